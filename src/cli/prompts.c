/*
 * prompts: reads prompts from options or a file.
 *
 * The whole file is read before the model, so that an invalid line is found first and the memory
 * plan knows the longest prompt.
 */
#define _GNU_SOURCE
#include "cli/prompts.h"

#include <stdlib.h>
#include <string.h>

enum {
    TEMPLATE_TOKENS = 256, /* maximum tokens that a chat template adds to a message */
    FILE_LIMIT = 256 << 20,
};

int prompts_each_line(int (*fn)(void *ctx, const char *line, struct error *err), void *ctx,
                      struct error *err) {
    char *line = NULL;
    size_t size = 0;
    int rc = OK;
    for (ssize_t n; rc == OK && (n = getline(&line, &size, stdin)) >= 0;) {
        while (n > 0 && strchr(" \t\r\n", line[n - 1])) line[--n] = 0;
        if (n > 0) rc = fn(ctx, line, err);
    }
    free(line);
    return rc;
}

void prompts_add(struct prompts *p, const char *text, const char *system, bool chat) {
    size_t len = strlen(text) + (system ? strlen(system) : 0) + (chat ? TEMPLATE_TOKENS : 8);
    p->v = xrealloc(p->v, sizeof *p->v * (size_t)(p->n + 1));
    p->v[p->n++] = (struct prompt){
        .text = xstrdup(text), .system = system ? xstrdup(system) : NULL, .chat = chat};
    p->longest = MAX(p->longest, len);
}

/* Takes ownership of `talk`. */
static void conversation_add(struct prompts *p, json_t *conversation) {
    char *text = json_canonical(conversation);
    p->longest = MAX(p->longest, strlen(text) + TEMPLATE_TOKENS);
    p->v = xrealloc(p->v, sizeof *p->v * (size_t)(p->n + 1));
    p->v[p->n++] = (struct prompt){.text = text, .chat = true, .conversation = conversation};
}

static bool is_conversation_key(const char *key) {
    return strcmp(key, "messages") == 0 || strcmp(key, "tools") == 0 ||
           strcmp(key, "chat_template_kwargs") == 0;
}

/* Reads a conversation in the form of a chat completion request. */
static int conversation_read(struct prompts *p, const json_t *v, int line, struct error *err) {
    const json_t *tools = json_object_get(v, "tools"),
                 *extra = json_object_get(v, "chat_template_kwargs");
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)v, key, value)
        if (!is_conversation_key(key))
            return error_set(err, ERR_FORMAT, "line %d: '%s' does not go with 'messages'", line,
                             key);
    if (!json_is_array(json_object_get(v, "messages")))
        return error_set(err, ERR_FORMAT, "line %d: 'messages' must be a list", line);
    if (tools && !json_is_array(tools))
        return error_set(err, ERR_FORMAT, "line %d: 'tools' must be a list", line);
    if (extra && !json_is_object(extra))
        return error_set(err, ERR_FORMAT, "line %d: 'chat_template_kwargs' must be an object",
                         line);
    conversation_add(p, json_copy((json_t *)(uintptr_t)v));
    return OK;
}

static int line_read(void *ctx, const json_t *v, int line, struct error *err) {
    const char *key, *text = NULL, *system = NULL;
    bool chat = false;
    json_t *value;
    if (!json_is_object(v))
        return error_set(err, ERR_FORMAT,
                         "line %d: expected {\"prompt\": …}, {\"chat\": …} or {\"messages\": …}",
                         line);
    if (json_object_get(v, "messages")) return conversation_read(ctx, v, line, err);
    json_object_foreach ((json_t *)(uintptr_t)v, key, value) {
        const char *s = json_string_value(value);
        bool is_text = strcmp(key, "prompt") == 0 || strcmp(key, "chat") == 0;
        if (strcmp(key, "check") == 0 && json_is_object(value)) continue;
        if (!is_text && strcmp(key, "system") != 0)
            return error_set(err, ERR_FORMAT, "line %d: unknown key '%s'", line, key);
        if (!s || strlen(s) != json_string_length(value))
            return error_set(err, ERR_FORMAT, "line %d: '%s' must be text", line, key);
        if (is_text && text)
            return error_set(err, ERR_FORMAT, "line %d: both 'prompt' and 'chat'", line);
        if (is_text) {
            text = s;
            chat = *key == 'c';
        } else {
            system = s;
        }
    }
    if (!text || (system && !chat))
        return error_set(err, ERR_FORMAT, "line %d: '%s' is missing", line,
                         text ? "chat" : "prompt");
    struct prompts *p = ctx;
    prompts_add(p, text, system, chat);
    p->v[p->n - 1].check = json_incref(json_object_get(v, "check"));
    return OK;
}

static void lines_add(struct prompts *p, char *text) {
    for (char *line; (line = strsep(&text, "\n")) != NULL;) {
        size_t n = strlen(line);
        if (n && line[n - 1] == '\r') line[n - 1] = 0;
        if (*line) prompts_add(p, line, NULL, false);
    }
}

int prompts_file(struct prompts *p, const char *path, struct error *err) {
    struct buf text = {0};
    int rc = file_read(path, FILE_LIMIT, &text, err);
    const char *first = rc == OK && text.data ? text.data + strspn(text.data, " \t\r\n") : "";
    if (rc == OK && *first == '{') {
        rc = json_file_each(path, line_read, p, err);
        if (rc != OK && !strstr(err->text, path)) error_wrap(err, "'%s'", path);
    } else if (rc == OK && text.data && strlen(text.data) != text.len) {
        rc = error_set(err, ERR_FORMAT, "'%s' is not text: it has a zero byte", path);
    } else if (rc == OK && text.data) {
        lines_add(p, text.data);
    }
    if (rc == OK && p->n == 0) rc = error_set(err, ERR_FORMAT, "'%s' has no prompts", path);
    buf_release(&text);
    return rc;
}

/* False if JSON cannot hold the text. */
static bool message_append(json_t *messages, const char *role, const char *text) {
    return json_array_append_new(messages, json_pack("{s:s,s:s}", "role", role, "content", text)) ==
           0;
}

/* Adds a message from the command line with variables for the chat template. */
static int message_add(struct prompts *p, const char *chat, const char *system, const char *extra,
                       struct error *err) {
    json_t *kwargs = json_parse(extra, strlen(extra), "--chat-template-kwargs", err);
    if (!kwargs) return err->code;
    json_t *messages = json_array(), *conversation = json_pack("{s:o,s:o}", "messages", messages,
                                                               "chat_template_kwargs", kwargs);
    int rc = OK;
    if (!json_is_object(kwargs))
        rc = error_set(err, ERR_USAGE,
                       "--chat-template-kwargs must be a JSON object, as "
                       "'{\"enable_thinking\": false}'");
    else if ((system && !message_append(messages, "system", system)) ||
             !message_append(messages, "user", chat))
        rc = error_set(err, ERR_USAGE, "with --chat-template-kwargs messages must be UTF-8");
    if (rc == OK)
        conversation_add(p, conversation);
    else
        json_decref(conversation);
    return rc;
}

int prompts_read(struct prompts *p, const char *prompt, const char *chat, const char *system,
                 const char *file, const char *extra, struct error *err) {
    if (!!prompt + !!chat + !!file != 1)
        return error_set(err, ERR_USAGE,
                         "give one prompt: as an argument, or with -p, --chat or --file");
    if (extra && !chat)
        return error_set(err, ERR_USAGE,
                         "--chat-template-kwargs goes with --chat; in a file it is a line's key "
                         "'chat_template_kwargs' next to 'messages'");
    if (extra) return message_add(p, chat, system, extra, err);
    if (file) return prompts_file(p, file, err);
    prompts_add(p, prompt ? prompt : chat, system, chat != NULL);
    return OK;
}

void prompts_release(struct prompts *p) {
    for (int i = 0; i < p->n; i++) {
        free(p->v[i].text);
        free(p->v[i].system);
        json_decref(p->v[i].conversation);
        json_decref(p->v[i].check);
    }
    free(p->v);
    *p = (struct prompts){0};
}

/* Whether the model has a chat template, or the special tokens of ChatML. */
static bool knows_chats(const struct tokenizer *t) {
    return tokenizer_get_template(t) || tokenizer_piece_to_id(t, "<|im_start|>") >= 0;
}

int prompt_encode(const struct model *m, const struct prompt *p, struct token_ids *out,
                  struct error *err) {
    if (p->conversation) {
        struct chat_template_input chat = {
            .messages = json_object_get(p->conversation, "messages"),
            .tools = json_object_get(p->conversation, "tools"),
            .extra = json_object_get(p->conversation, "chat_template_kwargs"),
            .generation_prompt = true};
        if (chat_template_encode(m->tok, &chat, out, NULL, err) != OK) return err->code;
    } else if (p->chat && (!p->template_optional || knows_chats(m->tok))) {
        struct chat_message msgs[2] = {{"system", p->system}, {"user", p->text}};
        if (chat_encode(m->tok, msgs + !p->system, 1 + !!p->system, true, out, NULL, err) != OK)
            return err->code;
    } else {
        tokenizer_encode_prompt(m->tok, p->text, out);
    }
    return out->n
               ? OK
               : error_set(err, ERR_USAGE, "the prompt is empty and the model has no first token");
}
