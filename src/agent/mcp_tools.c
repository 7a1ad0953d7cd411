/*
 * mcp_tools: the tools of servers of the Model Context Protocol as tools of an agent.
 *
 * Names, descriptions and schemas come from a server that is not trusted. They become valid names,
 * cleaned text of one line, and grammars; nothing else depends on them. The list does not change
 * while the agent runs, because prompts and grammars are made from it: when a server changes its
 * list, the user reads a warning, and a call of a removed tool is an error that the model
 * reads.
 */
#define _GNU_SOURCE
#include "agent/internal.h"
#include "grammar/grammar.h"
#include "mcp/mcp.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    MAX_SERVER_NAME = 32,
    MAX_TOOL_NAME = 64,
    MAX_DESCRIPTION = 1024,  /* bytes */
    MAX_SHOWN_SCHEMA = 2048, /* bytes of a schema that a description has instead of a grammar */
    GRAMMAR_SHARE = 8,       /* a schema may use 1/8 of the limits of a grammar */
};
static const char name_chars[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";

/* A connection, which its tools share. */
struct server {
    char *name;
    struct mcp_client *client;
    int n_users;
};

struct mcp_tool_state {
    struct server *server;
    char *name; /* the server's name of the tool */
};

/* options */

/* The length of NAME in "NAME=…"; 0: it has no NAME. */
static size_t name_length(const char *spec) {
    size_t n = strspn(spec, name_chars);
    return spec[n] == '=' && n <= MAX_SERVER_NAME ? n : 0;
}

/* The name of server `i`, malloc'ed. */
static char *server_name(const struct strings *servers, int i) {
    size_t n = name_length(servers->v[i]);
    if (n) return xstrndup(servers->v[i], n);
    return i ? xasprintf("mcp%d", i + 1) : xstrdup("mcp");
}

static bool server_exists(const struct strings *servers, const char *name, size_t len, int until) {
    bool found = false;
    for (int i = 0; i < until && !found; i++) {
        char *other = server_name(servers, i);
        found = strlen(other) == len && strncmp(other, name, len) == 0;
        free(other);
    }
    return found;
}

/* Whether every item is "NAME=…" with the name of a server. */
static int items_check(const struct agent_mcp_options *o, const struct strings *items,
                       const char *form, struct error *err) {
    for (int i = 0; items && i < items->n; i++) {
        size_t n = name_length(items->v[i]);
        if (!n) return error_set(err, ERR_USAGE, "expected %s", form);
        if (!server_exists(o->servers, items->v[i], n, o->servers->n))
            return error_set(err, ERR_USAGE, "there is no MCP server '%.*s'", (int)n, items->v[i]);
    }
    return OK;
}

static int options_check(const struct agent_mcp_options *o, struct error *err) {
    for (int i = 1; i < o->servers->n; i++) {
        char *name = server_name(o->servers, i);
        bool is_taken = server_exists(o->servers, name, strlen(name), i);
        if (is_taken) error_set(err, ERR_USAGE, "there are two MCP servers '%s'", name);
        free(name);
        if (is_taken) return err->code;
    }
    int rc = items_check(o, o->headers,
                         "a header NAME=HEADER: VALUE, where NAME is that of a server", err);
    return rc ? rc : items_check(o, o->env, "NAME=VARIABLE, where NAME is that of a server", err);
}

/* Appends a header with the values of its variables. No message contains the value. */
static int header_expand(const char *header, struct buf *out, struct error *err) {
    bool has_variable = false;
    const char *p = header, *open;
    for (; (open = strstr(p, "${")); p = strchr(open, '}') + 1) {
        size_t n = strcspn(open + 2, "}");
        char *name = xstrndup(open + 2, n);
        const char *value = open[2 + n] ? getenv(name) : NULL;
        if (!value) error_set(err, ERR_USAGE, "the environment has no variable '%.100s'", name);
        free(name);
        if (!value) return err->code;
        buf_add(out, p, (size_t)(open - p));
        buf_puts(out, value);
        has_variable = true;
    }
    buf_puts(out, p);
    if (!has_variable && strncasecmp(header, "authorization:", 14) == 0)
        return error_set(err, ERR_USAGE,
                         "the token is on the command line, where other users can read it; put it "
                         "into a variable of the environment and write ${VARIABLE}");
    return OK;
}

/* The headers and variables of one server. */
static int server_options(const struct agent_mcp_options *o, const char *name,
                          struct strings *headers, struct strings *env, struct error *err) {
    size_t len = strlen(name);
    for (int i = 0; o->env && i < o->env->n; i++)
        if (name_length(o->env->v[i]) == len && strncmp(o->env->v[i], name, len) == 0)
            strings_add(env, o->env->v[i] + len + 1);
    for (int i = 0; o->headers && i < o->headers->n; i++) {
        struct buf line = {0};
        if (name_length(o->headers->v[i]) != len || strncmp(o->headers->v[i], name, len) != 0)
            continue;
        int rc = header_expand(o->headers->v[i] + len + 1, &line, err);
        if (!rc) strings_add(headers, line.data);
        buf_release(&line);
        if (rc) return rc;
    }
    return OK;
}

/* calls */

static void server_leave(struct server *s) {
    if (--s->n_users) return;
    mcp_close(s->client);
    free(s->name);
    free(s);
}

static void tool_release(void *ctx) {
    struct mcp_tool_state *t = ctx;
    server_leave(t->server);
    free(t->name);
    free(t);
}

static int tool_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    const struct mcp_tool_state *t = ctx;
    int rc = mcp_tool_call(t->server->client, t->name, arguments, 2 * AGENT_MAX_RESULT, out, err);
    if (mcp_tools_changed(t->server->client))
        log_warn("MCP server '%s' has changed its tools; the agent keeps those of its start",
                 t->server->name);
    return rc;
}

/* adding */

/* SERVER__TOOL as a valid name that is not taken, malloc'ed. */
static char *tool_name(const struct agent_tools *t, const char *server, const char *tool) {
    for (int i = 1;; i++) {
        char suffix[16] = "";
        int n = i > 1 ? snprintf(suffix, sizeof suffix, "_%d", i) : 0;
        char *full = xasprintf("%s__%s", server, tool),
             *name = xasprintf("%.*s%s", MAX_TOOL_NAME - n, full, suffix);
        for (char *p = name; *p; p++)
            if (!strchr(name_chars, *p)) *p = '_';
        free(full);
        if (agent_tools_find(t, name) < 0) return name;
        free(name);
    }
}

/* Appends a cleaned text as one line. */
static void line_add(struct buf *out, const char *text, size_t limit) {
    struct buf clean = {0};
    text_add_clean(&clean, text, strlen(text), limit);
    for (size_t i = 0; i < clean.len; i++) {
        char c = clean.data[i] == '\n' || clean.data[i] == '\t' ? ' ' : clean.data[i];
        if (c != ' ' || (out->len && out->data[out->len - 1] != ' ')) buf_add(out, &c, 1);
    }
    buf_release(&clean);
}

static bool schema_is_supported(const json_t *schema) {
    struct error ignored;
    struct grammar *g = NULL;
    if (strcmp(json_get_string(schema, "type"), "object") == 0) {
        grammar_set_build_budget(GRAMMAR_SHARE);
        g = grammar_new_json_value(schema, "", &ignored);
        grammar_set_build_budget(1);
    }
    grammar_free(g);
    return g;
}

/* The schema for the grammar, a new reference. Appends to the description what the grammar does not
 * enforce. */
static json_t *parameters_make(const struct mcp_tool *v, struct buf *description) {
    if (schema_is_supported(v->schema)) return json_incref(v->schema);
    char *text = v->schema ? json_dumps(v->schema, JSON_COMPACT) : NULL;
    if (text && strlen(text) <= MAX_SHOWN_SCHEMA) {
        buf_puts(description, description->len ? " Arguments: " : "Arguments: ");
        line_add(description, text, MAX_SHOWN_SCHEMA + 64);
    }
    free(text);
    return json_pack("{s:s}", "type", "object");
}

static bool is_wanted(const struct strings *only, const char *name) {
    bool wanted = !only || !only->n;
    for (int i = 0; only && i < only->n && !wanted; i++) wanted = fnmatch(only->v[i], name, 0) == 0;
    return wanted;
}

/* Adds a tool under `name`, of which it takes ownership. */
static void tool_add(struct agent_tools *t, struct server *s, const struct mcp_tool *v,
                     char *name) {
    struct buf description = {0};
    struct error err;
    buf_puts(&description, "");
    line_add(&description, v->description, MAX_DESCRIPTION);
    json_t *parameters = parameters_make(v, &description); // completes the description
    struct mcp_tool_state *state = xcalloc(1, sizeof *state);
    *state = (struct mcp_tool_state){s, xstrdup(v->name)};
    s->n_users++;
    const struct agent_tool tool = {.name = name,
                                    .description = description.data,
                                    .parameters = parameters,
                                    .call = tool_call,
                                    .release = tool_release,
                                    .ctx = state};
    char *label = xstrdup(name);
    if (agent_tools_add(t, &tool, &err) != OK)
        log_warn("the tool '%s' is left out: %s", label, err.text);
    free(label);
}

/* Adds the wanted tools of a server, as many as an agent can have. */
static void tools_add(struct agent_tools *t, struct server *s, const struct mcp_tools *list,
                      const struct strings *only) {
    int n_left_out = 0;
    for (int i = 0; i < list->n; i++) {
        char *name = tool_name(t, s->name, list->v[i].name);
        bool wanted = is_wanted(only, name), is_full = t->n == AGENT_MAX_TOOLS;
        if (wanted && !is_full)
            tool_add(t, s, &list->v[i], name);
        else
            free(name);
        n_left_out += wanted && is_full;
    }
    if (n_left_out)
        log_warn("the last %d tools of MCP server '%s' are left out: an agent can have at most %d; "
                 "choose some with --mcp-tools",
                 n_left_out, s->name, AGENT_MAX_TOOLS);
}

static int server_add(struct agent_tools *t, const char *name, const char *target,
                      const struct mcp_options *m, const struct strings *only, struct error *err) {
    struct mcp_tools list = {0};
    struct mcp_client *client = mcp_open(target, m, err);
    if (!client) return err->code;
    struct server *s = xcalloc(1, sizeof *s);
    *s = (struct server){xstrdup(name), client, 1};
    int rc = mcp_tools_list(client, &list, err);
    if (!rc) tools_add(t, s, &list, only);
    mcp_tools_changed(client); // before the list was read
    mcp_tools_release(&list);
    server_leave(s);
    return rc;
}

int agent_tools_add_mcp(struct agent_tools *t, const struct agent_mcp_options *o,
                        struct error *err) {
    int rc = options_check(o, err);
    for (int i = 0; !rc && i < o->servers->n; i++) {
        const char *spec = o->servers->v[i];
        size_t n = name_length(spec);
        char *name = server_name(o->servers, i);
        struct strings headers = {0}, env = {0};
        const struct mcp_options m = {&headers, &env, o->seconds};
        rc = server_options(o, name, &headers, &env, err);
        if (!rc) rc = server_add(t, name, n ? spec + n + 1 : spec, &m, o->only, err);
        if (rc) error_wrap(err, "MCP server '%s'", name);
        strings_release(&headers);
        strings_release(&env);
        free(name);
    }
    return rc;
}
