/*
 * settings: an agent as options of the command line, and as a YAML file. The keys of a file are the
 * rows of the options, so unknown keys, wrong types and values out of range are reported with file
 * and line, as in a recipe.
 */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct agent_settings, field), fallback, min, max, metavar, help }
const struct option_row agent_setting_rows[] = {
    ROW("tools", OPT_STRING, tools, "calculator,clock", 0, 0, "LIST",
        "tools that the agent may call, separated by commas (--list-tools lists them)"),
    ROW("adapter", OPT_STRING, adapter, NULL, 0, 0, "DIR",
        "adapter, or a weighted sum of several, such as A=0.7,B=0.3"),
    ROW("system", OPT_STRING, system, NULL, 0, 0, "TEXT", "system message"),
    ROW("knowledge", OPT_STRING, knowledge, NULL, 0, 0, "DB",
        "database of 'shoal knowledge' for the tool knowledge"),
    ROW("memory", OPT_STRING, memory, NULL, 0, 0, "DB",
        "store with the user's memories for the tools memory_search and memory_write"),
    ROW("user", OPT_STRING, user, "me", 0, 0, "NAME",
        "user whose memories these tools use; of a server: only of requests without a key"),
    ROW("team", OPT_STRING, team, NULL, 0, 0, "FILE",
        "team (file of 'shoal debate --team') for the tools ask and debate"),
    ROW("root", OPT_STRING, root, NULL, 0, 0, "DIR",
        "folder that the tools read_file and list_files may read"),
    ROW("allow-host", OPT_LIST, hosts, NULL, 0, 0, "HOST", "hosts that the tool http_get may ask"),
    ROW("mcp", OPT_LIST, mcp, NULL, 0, 0, "[NAME=]CMD|URL",
        "MCP servers whose tools the agent may call: a program (stdio) or an address (streamable "
        "HTTP)"),
    ROW("mcp-tools", OPT_LIST, mcp_tools, NULL, 0, 0, "GLOB",
        "tools of the MCP servers to use, by the agent's names for them (NAME__TOOL); default: "
        "all"),
    ROW("mcp-header", OPT_LIST, mcp_headers, NULL, 0, 0, "NAME=HEADER",
        "headers of the requests to an MCP server, such as 'x=Authorization: Bearer ${TOKEN}', "
        "where ${TOKEN} is the value of a variable of the environment"),
    ROW("mcp-env", OPT_LIST, mcp_env, NULL, 0, 0, "NAME=VARIABLE",
        "variables of the environment that the program of an MCP server gets"),
    ROW("mcp-seconds", OPT_FLOAT, mcp_seconds, "60", 0.1, 3600, "S",
        "maximum seconds of one request to an MCP server"),
    ROW("max-steps", OPT_INT, max_steps, "8", 1, 64, "N",
        "maximum calls; then the agent must answer"),
    ROW("max-seconds", OPT_FLOAT, max_seconds, "180", 0, 1e6, "S",
        "seconds after which the agent must answer (0: no limit)"),
    ROW("tool-seconds", OPT_FLOAT, tool_seconds, "10", 0.1, 3600, "S",
        "maximum seconds of one call that executes code"),
    ROW("max-tokens", OPT_INT, max_tokens, "512", 1, 65536, "N",
        "maximum tokens of an answer, and of the arguments of a call"),
    ROW("thought-tokens", OPT_INT, thought_tokens, "128", 1, 65536, "N",
        "maximum tokens of a thought in the form react"),
    ROW("form", OPT_STRING, form, "auto", 0, 0, "FORM",
        "form of the calls: native, that of the model's chat template; react, lines of text; "
        "auto: native if the template knows tools"),
    ROW("temperature", OPT_FLOAT, temperature, "0", 0, 100, "X",
        "sampling temperature of thoughts and answers, and of calls with --sample-calls"),
    ROW("sample-calls", OPT_BOOL, sample_calls, NULL, 0, 0, NULL,
        "sample calls too, instead of taking the most probable ones"),
    ROW("top-k", OPT_INT, top_k, "0", 0, 1e6, "K",
        "sample from the K most probable tokens; 0: all"),
    ROW("min-p", OPT_FLOAT, min_p, "0", 0, 1, "P",
        "exclude tokens below P times the highest probability"),
    ROW("top-p", OPT_FLOAT, top_p, "0.9", 0, 1, "P",
        "sample from the smallest set with probability P"),
    {0},
};
#undef ROW

static int form_parse(const char *text, enum agent_form *out, struct error *err) {
    static const char *const names[] = {"auto", "native", "react"};
    for (int i = 0; i < (int)ARRAY_LEN(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *out = (enum agent_form)i;
            return OK;
        }
    return error_set(err, ERR_USAGE, "there is no form '%s': it is auto, native or react", text);
}

int agent_settings_open_tools(const struct agent_settings *s, struct agent_tool_options o,
                              struct agent_tools *t, struct error *err) {
    const struct agent_mcp_options mcp = {.servers = &s->mcp,
                                          .headers = &s->mcp_headers,
                                          .env = &s->mcp_env,
                                          .only = &s->mcp_tools,
                                          .seconds = s->mcp_seconds};
    o.knowledge = s->knowledge;
    o.memory = s->memory;
    if (!o.user) o.user = s->user;
    o.root = s->root;
    o.hosts = &s->hosts;
    o.seconds = s->tool_seconds;
    int rc = *s->tools ? agent_tools_add_builtin(t, s->tools, &o, err) : OK;
    return rc ? rc : agent_tools_add_mcp(t, &mcp, err);
}

int agent_settings_apply(const struct agent_settings *s, struct agent_options *o,
                         struct error *err) {
    o->system = s->system;
    o->max_steps = (int)s->max_steps;
    o->max_seconds = s->max_seconds;
    o->max_tokens = (int32_t)s->max_tokens;
    o->thought_tokens = (int32_t)s->thought_tokens;
    o->sample_calls = s->sample_calls;
    o->sampling = (struct sampling_params){.temperature = (float)s->temperature,
                                           .top_k = (int32_t)s->top_k,
                                           .top_p = (float)s->top_p,
                                           .min_p = (float)s->min_p};
    return form_parse(s->form, &o->form, err);
}

/* files */

/* Replaces a list of texts by the text that the option has on the command line. */
static void list_join(json_t *root, const char *key) {
    const json_t *list = json_object_get(root, key), *item;
    struct buf text = {0};
    size_t i;
    if (!json_is_string_array(list)) return;
    buf_puts(&text, "");
    json_array_foreach (list, i, item)
        buf_printf(&text, "%s%s", i ? "," : "", json_string_value(item));
    json_object_set_new(root, key, json_string(text.data));
    buf_release(&text);
}

/* Replaces a path, which may be NULL, by the one that the file means. */
static void path_resolve(const char *file, char **path) {
    if (!*path || !**path) return;
    char *found = path_relative_to(file, *path);
    free(*path);
    *path = found;
}

/* Appends a term of a mix, "DIR" or "DIR=WEIGHT", with its path resolved. */
static void term_resolve(const char *file, const char *term, struct buf *out) {
    float weight;
    char *path = xstrdup(term);
    adapter_weight_parse(path, &weight);
    size_t len = strlen(path);
    if (*path && !hub_is_name(path)) path_resolve(file, &path);
    buf_printf(out, "%s%s%s", out->len ? "," : "", path, term + len);
    free(path);
}

/* As adapter_mix_parse, an existing path is not a mix, whatever its name contains. */
static void adapters_resolve(const char *file, char **text) {
    struct buf out = {0};
    if (!*text || !**text) return;
    char *whole = path_relative_to(file, *text), *rest = *text;
    bool exists = path_exists(whole);
    while (!exists && rest) term_resolve(file, strsep(&rest, ","), &out);
    free(*text);
    *text = xstrdup(exists ? whole : out.data ? out.data : "");
    free(whole);
    buf_release(&out);
}

static int document_read(struct agent_settings *s, const struct yaml *y, struct error *err) {
    struct agent_options ignored;
    list_join(y->root, "tools");
    list_join(y->root, "adapter");
    options_default(agent_setting_rows, s);
    int rc = options_from_yaml(agent_setting_rows, s, y, NULL, err);
    if (rc == OK && agent_settings_apply(s, &ignored, err) != OK)
        rc = error_wrap(err, "'%s', line %d", y->path, yaml_line(y, "form"));
    if (rc != OK) {
        options_release(agent_setting_rows, s);
        return rc;
    }
    adapters_resolve(y->path, &s->adapter);
    path_resolve(y->path, &s->knowledge);
    path_resolve(y->path, &s->memory);
    path_resolve(y->path, &s->team);
    path_resolve(y->path, &s->root);
    return OK;
}

int agent_settings_read(struct agent_settings *s, const char *path, struct error *err) {
    struct yaml y;
    int rc = yaml_load(&y, path, err);
    if (rc != OK) return rc;
    rc = document_read(s, &y, err);
    yaml_release(&y);
    return rc;
}
