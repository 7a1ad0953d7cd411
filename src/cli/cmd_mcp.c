/*
 * cmd_mcp: `shoal mcp`: a server of the Model Context Protocol over stdin and stdout, for the
 * program that starts it. It is the server of `shoal serve`, which listens on no address.
 */
#define _GNU_SOURCE
#include "api/api.h"
#include "cli/serve_command.h"

#include <stdlib.h>
#include <string.h>

/* Clients start the command in any folder, often in one that it may not write to. So the defaults
 * of
 * --state and --runs are folders of the user, which other sources override. */
static int defaults_set(void *options, struct error *err) {
    struct serve_options *o = &((struct serve_command *)options)->serve;
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    (void)err;
    if ((!state || *state != '/') && (!home || *home != '/')) return OK;
    char *base =
        state && *state == '/' ? path_join(state, "shoal") : path_join(home, ".local/state/shoal");
    free(o->state_dir);
    free(o->runs);
    o->state_dir = path_join(base, "mcp");
    o->runs = path_join(base, "runs");
    free(base);
    return OK;
}

/* Only messages of the protocol go to stdout. */
static void on_ready(void *ctx, const struct serve_ready *r) {
    (void)ctx;
    log_info("model %s: waiting for messages of an MCP client on stdin", r->model);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    struct serve_command o = *(const struct serve_command *)options;
    struct cli_options common = *c;
    options_default(http_option_rows, &o.serve.http);
    common.json = c->json && o.setup.dry_run;
    o.serve.http.calls_only = true;
    o.serve.ready = on_ready;
    o.serve.attend = mcp_stdio_attend;
    int rc = serve_command_run(&common, &o, args, err);
    options_release(http_option_rows, &o.serve.http);
    return rc;
}

const struct cli_command cmd_mcp = {
    .name = "mcp",
    .args = "MODEL [MODEL …]",
    .summary = "serve a model's tools to a program that speaks MCP, over stdin and stdout",
    .about =
        "A server of the Model Context Protocol. A program that speaks MCP, such as an editor or\n"
        "an assistant, starts it, and calls its tools: chat with an adapter, ask, debate, search\n"
        "in a knowledge base and in conversations, lists of adapters and jobs. It takes the\n"
        "options of 'shoal serve', except those of HTTP, and listens on no address.\n"
        "\n"
        "  {\"mcpServers\": {\"shoal\": {\"command\": \"shoal\", \"args\":\n"
        "    [\"mcp\", \"models/fry\", \"--adapter\", \"critic=/home/ann/adapters/critic\"]}}}\n"
        "\n"
        "A running 'shoal serve' offers the same tools at http://ADDRESS/mcp. One server for all\n"
        "clients needs the memory of the model once.\n"
        "\n"
        "The defaults of --state and --runs are folders in $XDG_STATE_HOME/shoal, or else in\n"
        "~/.local/state/shoal. One process at a time uses a state folder: give each further\n"
        "client its own --state.\n"
        "\n"
        "It ends when stdin ends, after the last response.",
    .main_options =
        "adapter adapter-dir model-dir team knowledge memory state max-num-seqs max-model-len "
        "max-tokens max-memory",
    .rows = serve_option_rows,
    .more = (const struct option_table[]){{serve_command_rows, 0}, {0}},
    .base_load = defaults_set,
    .size = sizeof(struct serve_command),
    .min_args = 1,
    .max_args = -1,
    .run = run,
};
