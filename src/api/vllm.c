/*
 * vllm: loads and unloads adapters while requests run, and has the other endpoints of vLLM that
 * vLLM's clients and lm-evaluation-harness use. Messages that clients compare are exactly those of
 * vLLM.
 *
 * Not here: the endpoints that vLLM shares with OpenAI; openai.c has them.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "serve/generation.h"

#include <stdlib.h>
#include <string.h>

/* adapters that are loaded from a folder on their first use */

/* Whether the configuration of an adapter names this base model. */
static bool is_for_base(const struct server *s, const char *config) {
    struct error err;
    json_t *v = json_parse_file(config, &err);
    const char *base = json_get_string(v, "base_model_name_or_path");
    bool matches = *base && (strcmp(base, s->path) == 0 || strcmp(path_name(base), s->name) == 0);
    for (int i = 0; i < s->options->names.n; i++)
        matches |= strcmp(base, s->options->names.v[i]) == 0;
    json_decref(v);
    return matches;
}

/* Lists an adapter by name from the folder in vLLM's environment variables. Returns whether it is
 * available. */
static bool adapter_resolve(struct server *s, const char *name) {
    const char *plugins = getenv("VLLM_PLUGINS"), *folder = getenv("VLLM_LORA_RESOLVER_CACHE_DIR");
    struct error err;
    if (!plugins || !folder || !strstr(plugins, "lora_filesystem_resolver")) return false;
    if (!*name || *name == '.' || strchr(name, '/')) return false;
    char *path = path_join(folder, name), *config = path_join(path, "adapter_config.json");
    bool loaded = path_exists(config) && is_for_base(s, config);
    int rc = loaded ? server_adapter_load(s, name, path, false, &err) : OK;
    if (rc == ERR_STATE && !server_adapter_listed(s, name)) // no room now: the request waits
        rc = server_adapter_register(s, name, path, &err);
    if (rc != OK && rc != ERR_STATE) {
        log_warn("'%s' was requested and cannot be loaded: %s", path, err.text);
        loaded = false;
    }
    free(config);
    free(path);
    return loaded;
}

/* adapters that are loaded by a request */

static void text_reply(struct exchange *x, const char *fmt, const char *name) {
    char *text = xasprintf(fmt, name);
    exchange_reply(x, 200, "text/plain; charset=utf-8", text, strlen(text));
    free(text);
}

static void bad_request(struct exchange *x, const struct error *err) {
    char named[API_PARAM_LEN];
    api_fail(x, 400, "BadRequestError", api_error_param(err, named), NULL, "%s", err->text);
}

/* Reads the fields; replies with an error and returns false if one has the wrong type. */
static bool names_read(struct exchange *x, const json_t *body, const char **name,
                       const char **path) {
    struct error err;
    if (json_read_name(body, "lora_name", name, &err) != OK ||
        (path && json_read_string(body, "lora_path", path, &err) != OK)) {
        bad_request(x, &err);
        return false;
    }
    return true;
}

static void load_handle(void *ctx, struct exchange *x) {
    struct error err;
    const char *name = "", *path = "";
    bool load_inplace = false, stacked = false;
    json_t *body = request_memory_json(ctx, x, &err);
    if (!body) {
        bad_request(x, &err);
        return;
    }
    if (!names_read(x, body, &name, &path)) {
    } else if (json_read_bool(body, "load_inplace", &load_inplace, &err) != OK ||
               json_read_bool(body, "is_3d_lora_weight", &stacked, &err) != OK ||
               (stacked &&
                error_set(
                    &err, ERR_USAGE,
                    "'is_3d_lora_weight' is for weights of experts, which no model here has") !=
                    OK)) {
        bad_request(x, &err);
    } else if (!*name || !*path) {
        api_fail(x, 400, "InvalidUserInput", *name ? "lora_path" : "lora_name", NULL,
                 "Both 'lora_name' and 'lora_path' must be provided.");
    } else if (server_adapter_load(ctx, name, path, load_inplace, &err) == OK) {
        text_reply(x, "Success: LoRA adapter '%s' added successfully.", name);
    } else if (err.code == ERR_STATE && !load_inplace && server_adapter_listed(ctx, name)) {
        api_fail(x, 400, "InvalidUserInput", "lora_name", NULL,
                 "The lora adapter '%s' has already been loaded. If you want to load the adapter "
                 "in place, set 'load_inplace' to True.",
                 name);
    } else if (err.code == ERR_MISSING) {
        api_fail(x, 404, "NotFoundError", NULL, NULL, "%s", err.text);
    } else if (err.code == ERR_STATE || err.code == ERR_MEMORY) {
        api_fail_error(x, &err, "lora_path"); // the server has no memory for it
    } else {
        bad_request(x, &err);
    }
    json_decref(body);
}

static void unload_handle(void *ctx, struct exchange *x) {
    struct error err;
    const char *name = "";
    json_t *body = request_memory_json(ctx, x, &err);
    if (!body) {
        bad_request(x, &err);
        return;
    }
    if (!names_read(x, body, &name, NULL)) {
    } else if (!*name) {
        api_fail(x, 400, "InvalidUserInput", "lora_name", NULL,
                 "'lora_name' needs to be provided to unload a LoRA adapter.");
    } else if (server_adapter_unload(ctx, name, &err) == OK) {
        text_reply(x, "Success: LoRA adapter '%s' removed successfully.", name);
    } else {
        api_fail(x, 404, "NotFoundError", NULL, NULL, "The lora adapter '%s' cannot be found.",
                 name);
    }
    json_decref(body);
}

/* the tokenizer */

/* Tokenizes a conversation as for a chat. */
static int chat_tokenize(const struct server *s, struct exchange *x, json_t *body,
                         struct token_ids *out, struct error *err) {
    struct generation_spec spec = {
        .tool_choice = json_get_nonnull(body, "tools") ? TOOL_CHOICE_AUTO : TOOL_CHOICE_NONE,
        .x = x};
    int rc = chat_template_check(s, body, &spec, err);
    if (rc == OK) rc = chat_prompt_render(s, body, &spec, err);
    if (rc == OK) {
        *out = spec.prompts[0];
        spec.prompts[0] = (struct token_ids){0};
    }
    generation_spec_release(&spec);
    return rc;
}

int vllm_tokenize_read(const struct server *s, struct exchange *x, json_t *body,
                       struct token_ids *out, struct error *err) {
    bool specials = true;
    const char *prompt = NULL;
    if (json_get_nonnull(body, "messages")) return chat_tokenize(s, x, body, out, err);
    if (json_read_bool(body, "add_special_tokens", &specials, err) != OK ||
        json_read_string(body, "prompt", &prompt, err) != OK)
        return err->code;
    if (!prompt) return error_set(err, ERR_USAGE, "'prompt' or 'messages' must be given");
    out->may_fail = true;
    tokenizer_encode(s->model->tok, prompt, strlen(prompt),
                     TOKENIZER_PARSE_SPECIAL | (specials ? TOKENIZER_ADD_BOS : 0), out);
    return token_ids_check_memory(out, err);
}

/* Also serves clients of llama.cpp, which call the text `content`. */
static void tokenize_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct token_ids ids = {0};
    struct error err;
    bool names = false;
    json_t *body = request_memory_json(ctx, x, &err);
    if (body && json_get_nonnull(body, "content") && !json_get_nonnull(body, "prompt") &&
        !json_get_nonnull(body, "messages")) {
        llamacpp_tokenize(s, x, body);
        json_decref(body);
        return;
    }
    int rc = body ? vllm_tokenize_read(s, x, body, &ids, &err) : err.code;
    if (rc == OK) rc = json_read_bool(body, "return_token_strs", &names, &err);
    if (rc == OK)
        rc = request_memory_reserve_list(
            s, x, ids.n, names ? JSON_TOKEN_TEXT_BYTES : JSON_INTEGER_BYTES, "prompt", &err);
    if (rc == OK) {
        json_t *list = json_array(), *strs = names ? json_array() : json_null();
        for (int32_t i = 0; i < ids.n; i++) {
            json_array_append_new(list, json_integer(ids.v[i]));
            if (names)
                json_array_append_new(
                    strs, json_string(tokenizer_id_to_piece(s->model->tok, ids.v[i], NULL)));
        }
        exchange_reply_json(x, 200,
                            json_pack("{s:i,s:i,s:o,s:o}", "count", ids.n, "max_model_len",
                                      engine_max_len(s->engine), "tokens", list, "token_strs",
                                      strs));
    } else {
        api_fail_error(x, &err, NULL);
    }
    token_ids_release(&ids);
    json_decref(body);
}

/* The request is the same in vLLM and llama.cpp. The reply has the text under both names, vLLM's
 * `prompt` and llama.cpp's `content`. */
static void detokenize_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct token_ids *ids = NULL;
    int n = 0;
    struct error err;
    struct buf text = {0}, clean = {0};
    json_t *body = request_memory_json(ctx, x, &err);
    const json_t *list = body ? json_get_nonnull(body, "tokens") : NULL;
    int rc = body ? OK : err.code;
    if (rc == OK && (!json_is_array(list) ||
                     (json_array_size(list) && !json_is_integer(json_array_get(list, 0)))))
        rc = error_set(&err, ERR_USAGE, "'tokens' must be a list of token ids");
    if (rc == OK)
        rc = request_memory_reserve_list(s, x, (int64_t)json_array_size(list), 8 * s->piece_bytes,
                                         "tokens", &err);
    if (rc == OK && json_array_size(list) > 0) rc = prompts_tokenize(s, list, 1, &ids, &n, &err);
    if (rc == OK) {
        if (n) tokenizer_decode(s->model->tok, ids[0].v, ids[0].n, true, &text);
        buf_add_sanitized(&clean, text.data ? text.data : "", text.len);
        const char *detokenized = clean.data ? clean.data : "";
        exchange_reply_json(x, 200,
                            json_pack("{s:s%,s:s%}", "prompt", detokenized, clean.len, "content",
                                      detokenized, clean.len));
    } else {
        api_fail_error(x, &err, list ? "tokens" : NULL);
    }
    for (int i = 0; i < n; i++) token_ids_release(&ids[i]);
    free(ids);
    buf_release(&text);
    buf_release(&clean);
    json_decref(body);
}

static json_t *special_token_json(const struct server *s, int32_t id) {
    return id < 0 ? json_null() : json_string(tokenizer_id_to_piece(s->model->tok, id, NULL));
}

/* The reply contains the source of the chat template, because clients render it themselves. */
static void tokenizer_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const struct tokenizer *t = s->model->tok;
    exchange_reply_json(
        x, 200,
        json_pack("{s:s,s:i,s:o,s:o,s:o,s:b,s:s}", "tokenizer_class", "shoal", "model_max_length",
                  engine_max_len(s->engine), "bos_token", special_token_json(s, tokenizer_bos(t)),
                  "eos_token", special_token_json(s, tokenizer_eos(t)), "pad_token",
                  special_token_json(s, tokenizer_eos(t)), "add_bos_token", tokenizer_add_bos(t),
                  "chat_template",
                  s->model->chat_template ? s->model->chat_template : chatml_template));
}

/* health */

/* A base model that has changed on disk cannot answer reliably. */
static void health_handle(void *ctx, struct exchange *x) {
    struct error err;
    (void)ctx;
    if (file_map_check_unchanged(&err) == OK)
        exchange_reply(x, 200, NULL, "", 0);
    else
        api_fail(x, 503, NULL, NULL, "model_changed", "%s", err.text);
}

static void version_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply_json(x, 200, json_pack("{s:s}", "version", SHOAL_VERSION));
}

static const struct http_route routes[] = {
    {"POST", "/v1/load_lora_adapter", SCOPE_ADMIN | ROUTE_BASE, load_handle},
    {"POST", "/v1/unload_lora_adapter", SCOPE_ADMIN | ROUTE_BASE, unload_handle},
    {"POST", "/tokenize", SCOPE_CHAT | ROUTE_BASE, tokenize_handle},
    {"POST", "/detokenize", SCOPE_CHAT | ROUTE_BASE, detokenize_handle},
    {"GET", "/tokenizer_info", SCOPE_CHAT | ROUTE_BASE, tokenizer_handle},
    {"GET", "/health", SCOPE_OPEN | ROUTE_IO_THREAD, health_handle},
    {"GET", "/ping", SCOPE_OPEN | ROUTE_IO_THREAD, health_handle},
    {"POST", "/ping", SCOPE_OPEN | ROUTE_IO_THREAD, health_handle},
    {"GET", "/version", SCOPE_OPEN | ROUTE_IO_THREAD, version_handle},
    {0},
};

const struct server_module vllm_module = {.routes = routes, .find_adapter = adapter_resolve};
