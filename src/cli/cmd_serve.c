/* cmd_serve: `shoal serve`: serves a model, its adapters, teams and agents over HTTP until a
 * signal. */
#define _GNU_SOURCE
#include "cli/serve_command.h"

#include <stdlib.h>
#include <string.h>

/* messages at the end of the start */

struct ready_ctx {
    const struct cli_options *c;
    const struct http_options *http;
    bool auth;
};

/* "2 adapters (a, b)", at most NAMES_SHOWN names. */
static void add_names(struct buf *b, const struct strings *names, const char *kind,
                      const char *prefix) {
    enum { NAMES_SHOWN = 4 };
    buf_printf(b, ", %d %s%s", names->n, kind, names->n == 1 ? "" : "s");
    for (int i = 0; i < MIN(names->n, NAMES_SHOWN); i++)
        buf_printf(b, "%s%s%s", i ? ", " : " (", prefix, names->v[i]);
    if (names->n) buf_puts(b, names->n > NAMES_SHOWN ? " …)" : ")");
}

/* A command that sends a chat and works when it is pasted on this machine. On a loopback address,
 * which is rarely a name of the certificate, curl does not check the certificate. */
static void add_curl(struct buf *b, const struct http_options *http, const struct serve_ready *r) {
    bool loopback = http_is_loopback(http) || strcmp(r->url, r->page) != 0;
    char *url = xasprintf("%s/v1/chat/completions", r->page);
    json_t *v = json_pack("{s:s,s:i,s:[{s:s,s:s}]}", "model", r->model, "max_tokens", 64,
                          "messages", "role", "user", "content", "Hello");
    char *body = json_dumps(v, 0);
    CHECK(body != NULL);
    buf_puts(b, "curl ");
    if (http->tls_cert && loopback) buf_puts(b, "-k ");
    if (http->tls_cert && !loopback) {
        buf_puts(b, "--cacert ");
        buf_add_shell_word(b, http->tls_cert);
        buf_puts(b, " ");
    }
    if (r->needs_key) {
        buf_puts(b, "-H \"Authorization: Bearer $(cat ");
        buf_add_shell_word(b, r->token_path);
        buf_puts(b, ")\" ");
    }
    buf_add_shell_word(b, url);
    buf_puts(b, " -d ");
    buf_add_shell_word(b, body);
    free(body);
    free(url);
    json_decref(v);
}

/* The token is a secret, so it is not in the JSON line, which is often logged. In the page's
 * address it is in the fragment, which browsers do not send: only the page reads it. */
static void on_ready(void *ctx, const struct serve_ready *r) {
    const struct ready_ctx *x = ctx;
    struct buf models = {0}, on_demand = {0}, curl = {0};
    if (x->c->json) {
        cli_print_json(json_pack("{s:s,s:s+,s:s}", "listening", r->url, "page", r->page, "/",
                                 "token_file", r->token_path));
        return;
    }
    add_names(&models, &r->adapters, "adapter", "");
    add_names(&models, &r->teams, "team", "team:");
    if (r->agents.n) add_names(&models, &r->agents, "agent", "agent:");
    if (r->fallbacks.n) add_names(&models, &r->fallbacks, "fallback chain", "");
    for (int i = 0; i < r->bases.n; i++)
        buf_printf(&on_demand, "%s%s", i ? ", " : "", r->bases.v[i]);
    add_curl(&curl, x->http, r);
    log_info("listening on %s — OpenAI's API is at %s/v1; Ctrl-C stops", r->url, r->url);
    log_info("page %s/#token=%s", r->page, r->token);
    log_info("model %s%s", r->model, models.data);
    if (r->bases.n) log_info("on demand: %s", on_demand.data);
    log_info("keys: %s", r->needs_key ? "every request needs a key ('shoal key list') or the token"
                         : x->auth    ? "none; this machine may chat without one"
                                      : "none; every client may chat without one (--no-auth)");
    log_info("token in %s, for jobs and changes of the server", r->token_path);
    log_info("try: %s", curl.data);
    buf_release(&models);
    buf_release(&on_demand);
    buf_release(&curl);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    struct serve_command o = *(const struct serve_command *)options;
    struct ready_ctx ready = {.c = c, .http = &o.serve.http, .auth = o.serve.auth};
    o.serve.ready = on_ready;
    o.serve.ready_ctx = &ready;
    return serve_command_run(c, &o, args, err);
}

const struct cli_command cmd_serve = {
    .name = "serve",
    .args = "MODEL [MODEL …]",
    .summary = "serve a model and its adapters: OpenAI's, vLLM's, llama.cpp's and Ollama's APIs",
    .about =
        "Serves a model and any number of LoRA adapters with continuous batching: requests for\n"
        "different adapters, and for weighted sums of them, share one batch. An adapter is a\n"
        "model name: \"NAME\", \"BASE:NAME\", \"BASE@NAME\", or a mix, \"a*0.7+b*0.3\".\n"
        "\n"
        "  shoal serve models/fry --adapter critic=adapters/critic solver=adapters/solver\n"
        "  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d\n"
        "    '{\"model\": \"critic\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'\n"
        "\n"
        "Further models, and those of --model-dir, are loaded when a request names them and\n"
        "unloaded after --keep-alive without requests, or when another one needs the memory.\n"
        "The first model is always in memory: teams, agents, jobs and A/B tests use it.\n"
        "\n"
        "  shoal serve models/fry models/other.gguf --max-memory 8G\n"
        "\n"
        "Without keys it accepts requests from this machine only ('shoal key add NAME' adds a\n"
        "key). Jobs and changes of the server need a key or the start-up token, which each\n"
        "start prints with the address of the web page and keeps in the file 'token' of --state\n"
        "until the server ends.\n"
        "\n"
        "SIGTERM or Ctrl-C stops the server: running replies have --drain-seconds to finish. If\n"
        "requests still run 5 seconds later, or after a second signal, it ends without them,\n"
        "with exit status 3.",
    .main_options = "adapter adapter-dir model-dir team agent state api-key max-num-seqs "
                    "max-memory host port",
    .rows = serve_option_rows,
    .more = (const struct option_table[]){{serve_command_rows, 0},
                                          {http_option_rows,
                                           offsetof(struct serve_command, serve.http), "HTTP"},
                                          {0}},
    .size = sizeof(struct serve_command),
    .min_args = 1,
    .max_args = -1,
    .run = run,
};
