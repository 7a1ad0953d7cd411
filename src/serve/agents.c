/*
 * agents: an agent with tools that is called like a model. Its answer is the reply; its thoughts,
 * calls and their results are the reasoning, and each step is also sent as JSON.
 *
 * An agent runs in a separate thread, in which its tools run too, so a tool delays only its own
 * request. Its calls of the model are interactive requests of the batcher, like a chat. The n
 * answers of a request run together, and share the tools, which are opened for the request.
 *
 * Tools that execute code or use the network, and MCP servers, exist only if the agent's file names
 * them and --allow-tool allows them. Each request has its own connections to the MCP servers.
 */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "serve/generation.h"
#include "serve/request_fields.h"

#include <stdlib.h>
#include <string.h>

static const char PREFIX[] = "agent:";
static const char MCP[] = "mcp"; // all tools of MCP servers, for --allow-tool

/* loading */

static const struct agent_builtin *builtin_find(const char *name) {
    const struct agent_builtin *b = agent_builtins;
    while (b->name && strcmp(b->name, name) != 0) b++;
    return b->name ? b : NULL;
}

static int allowed_tools_check(const struct strings *names, struct error *err) {
    for (int i = 0; i < names->n; i++) {
        const struct agent_builtin *b = builtin_find(names->v[i]);
        if (strcmp(names->v[i], MCP) != 0 && (!b || !b->executes))
            return error_set(err, ERR_USAGE,
                             "--allow-tool: '%s' is not a tool that executes code or uses the "
                             "network, nor mcp; 'shoal agent --list-tools --json' lists those",
                             names->v[i]);
    }
    return OK;
}

static bool tool_is_allowed(const struct server *s, const char *name) {
    const struct agent_builtin *b = builtin_find(name);
    for (int i = 0; i < s->options->tools.n; i++)
        if (strcmp(s->options->tools.v[i], name) == 0) return true;
    return b && !b->executes;
}

/* Opens the tools once, so that a missing file or sandbox is found at the start. */
static int tools_try(const struct server *s, struct agent_entry *a, struct error *err) {
    struct agent_tools tools = {0};
    const struct agent_team unused = {.team = &a->team};
    a->tools = json_array();
    if (a->settings.mcp.n && !tool_is_allowed(s, MCP))
        return error_set(err, ERR_USAGE,
                         "the agent uses MCP servers; allow them with --allow-tool mcp, or remove "
                         "'mcp' from the file");
    int rc = agent_settings_open_tools(
        &a->settings, (struct agent_tool_options){.team = a->team.n ? &unused : NULL}, &tools, err);
    for (int i = 0; rc == OK && i < tools.n; i++) {
        json_array_append_new(a->tools, json_string(tools.v[i].name));
        if (builtin_find(tools.v[i].name) && !tool_is_allowed(s, tools.v[i].name))
            rc = error_set(err, ERR_USAGE,
                           "the tool '%s' executes code or uses the network; allow it with "
                           "--allow-tool %s, or remove it from the file",
                           tools.v[i].name, tools.v[i].name);
    }
    agent_tools_release(&tools);
    return rc;
}

static int name_check(const struct server *s, const struct agent_entry *a, struct error *err) {
    if (!*a->name) return error_set(err, ERR_USAGE, "the agent has no name");
    for (const struct agent_entry *other = s->agents; other < a; other++)
        if (strcmp(other->name, a->name) == 0)
            return error_set(err, ERR_USAGE, "another agent has the name '%s'", a->name);
    return OK;
}

static int entry_open(struct server *s, const char *text, struct error *err) {
    const char *path;
    char *name = named_file_parse(text, &path);
    struct agent_entry *a = &s->agents[s->n_agents];
    int rc = agent_settings_read(&a->settings, path, err);
    if (rc != OK) {
        free(name);
        return rc;
    }
    a->name = name;
    s->n_agents++;
    rc = name_check(s, a, err);
    if (rc == OK) rc = adapter_mix_parse(&a->mix, a->settings.adapter, err);
    if (rc == OK) rc = adapter_mix_open(&a->mix, server_adapter_keep, s, err);
    if (rc == OK && a->settings.team) {
        rc = team_read(&a->team, a->settings.team, err);
        if (rc == OK) rc = team_load_adapters(&a->team, server_adapter_keep, s, err);
    }
    return rc == OK ? tools_try(s, a, err) : rc;
}

int agents_open(struct server *s, struct error *err) {
    const struct strings *list = &s->options->agents;
    if (allowed_tools_check(&s->options->tools, err) != OK) return err->code;
    s->agents = xcalloc((size_t)list->n + 1, sizeof *s->agents);
    for (int i = 0; i < list->n; i++)
        if (entry_open(s, list->v[i], err) != OK) return error_wrap(err, "--agent %s", list->v[i]);
    return OK;
}

void agents_release(struct server *s) {
    for (int i = 0; i < s->n_agents; i++) {
        struct agent_entry *a = &s->agents[i];
        free(a->name);
        options_release(agent_setting_rows, &a->settings);
        adapter_mix_release(&a->mix);
        team_release(&a->team);
        json_decref(a->tools);
    }
    free(s->agents);
}

const struct agent_entry *agent_find(const struct server *s, const char *model, struct error *err) {
    err->code = OK;
    if (!model || strncmp(model, PREFIX, strlen(PREFIX)) != 0) return NULL;
    const char *name = model + strlen(PREFIX);
    for (int i = 0; i < s->n_agents; i++)
        if (strcmp(s->agents[i].name, name) == 0) return &s->agents[i];
    error_set(err, ERR_MISSING, "there is no agent '%s'; GET /v1/agents lists those there are",
              name);
    return NULL;
}

/* running */

struct agent_session {
    struct server *s;
    const struct agent_entry *a;
    struct generation *g;
    struct agent_tools tools;
    struct agent_team team;
    struct agent_options options;
    struct agent_run *runs; /* [n_completions of g] */
    uint64_t client;
};

static int session_batch_run(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    struct agent_session *d = ctx;
    const bool *stop = &d->g->completions->async->stop; // a generation is cancelled as a whole
    return batcher_run_interactive(d->s->batcher, d->client, reqs, n, stop, err);
}

static struct token_usage run_usage(const struct agent_run *r) {
    return (struct token_usage){
        .prompt = r->prefilled, .completion = r->generated, .cached = r->cached};
}

/* A run without its steps, which are sent one by one, and without its answer, the reply. */
static json_t *run_summary(const struct agent_run *r, const struct agent_tools *t) {
    json_t *v = agent_run_json(r, t);
    json_object_del(v, "steps");
    json_object_del(v, "answer");
    json_object_del(v, "error");
    return v;
}

static void session_on_step(void *ctx, const struct agent_run *r, const struct agent_step *step) {
    struct agent_session *d = ctx;
    struct completion *a = &d->g->completions[r - d->runs];
    struct token_usage usage = run_usage(r);
    struct buf text = {0};
    bool done = step->tool < 0;
    agent_step_text(step, &d->tools, &text);
    generation_append(d->g, a,
                      &(struct async_part){.content = done ? r->answer : NULL,
                                           .reasoning = text.data,
                                           .step = agent_step_json(step, &d->tools),
                                           .run = done ? run_summary(r, &d->tools) : NULL,
                                           .usage = &usage,
                                           .truncated = r->truncated,
                                           .done = done});
    buf_release(&text);
}

/* Ends a run without an answer. */
static void run_fail(struct agent_session *d, int i, const struct error *failure) {
    const struct agent_run *r = &d->runs[i];
    struct token_usage usage = run_usage(r);
    struct error err = *failure;
    if (r->end == AGENT_FAILED)
        error_set(&err, ERR_USAGE, "the agent '%s' has failed: %s", d->a->name, r->error);
    generation_append(d->g, &d->g->completions[i],
                      &(struct async_part){.usage = &usage, .error = &err, .done = true});
}

static void session_free(struct agent_session *d, int n) {
    for (int i = 0; d->runs && i < n; i++) agent_run_release(&d->runs[i]);
    free(d->runs);
    agent_tools_release(&d->tools);
    free(d);
}

static void agent_generation_run(struct generation *g, void *ctx) {
    struct agent_session *d = ctx;
    struct error err;
    d->g = g;
    d->client = g->key ? hash_fnv1a(g->key, strlen(g->key)) : 0;
    d->runs = xcalloc((size_t)g->n_completions, sizeof *d->runs);
    for (int i = 0; i < g->n_completions; i++)
        d->runs[i] =
            (struct agent_run){.messages = json_object_get(g->spec.request_json, "messages"),
                               .seed = g->spec.sampling.seed + (uint64_t)i};
    d->team = (struct agent_team){.team = &d->a->team,
                                  .engine = d->s->engine,
                                  .model = d->s->model,
                                  .run = session_batch_run,
                                  .run_ctx = d};
    const struct agent_tool_options o = {.user = g->key,
                                         .messages =
                                             json_object_get(g->spec.request_json, "messages"),
                                         .team = d->a->team.n ? &d->team : NULL};
    int rc = agent_settings_open_tools(&d->a->settings, o, &d->tools, &err);
    if (rc == OK)
        agent_run_all(&d->options, d->runs, g->n_completions, &err);
    else
        err.code = ERR_IO; // the start could open them, so it is not the request's error
    for (int i = 0; i < g->n_completions; i++)
        if (!d->runs[i].answer) run_fail(d, i, &err);
    session_free(d, g->n_completions);
}

/* requests */

void agent_fields_apply(const struct agent_entry *a, json_t *body) {
    const struct agent_settings *s = &a->settings;
    json_t *fields = json_pack("{s:f,s:f,s:f,s:I}", "temperature", s->temperature, "top_p",
                               s->top_p, "min_p", s->min_p, "top_k", (json_int_t)s->top_k),
           *v;
    const char *key;
    if (!json_get_nonnull(body, "max_completion_tokens"))
        json_object_set_new(fields, "max_tokens", json_integer(s->max_tokens));
    json_object_foreach (fields, key, v)
        if (!json_get_nonnull(body, key)) json_object_set(body, key, v);
    json_decref(fields);
}

/* Bytes of a run: its tools with the grammars of their arguments; results, which a run keeps as
 * text, as messages and as JSON; the conversation, which each step renders and tokenizes. */
static size_t run_bytes(const struct server *s, const struct agent_entry *a) {
    enum { TOOL_BYTES = 256 << 10, RESULT_FACTOR = 12, CONVERSATION_FACTOR = 24 };
    size_t conversation = (size_t)engine_max_len(s->engine) * s->piece_bytes + AGENT_MAX_RESULT,
           results = (size_t)a->settings.max_steps * AGENT_MAX_RESULT;
    return json_array_size(a->tools) * TOOL_BYTES + RESULT_FACTOR * results +
           CONVERSATION_FACTOR * conversation;
}

/* The options of a run: those of the file, with the request's sampling and at most its tokens. */
static void session_options(struct agent_session *d, const struct generation_spec *spec) {
    struct error ignored; // the form was checked when the file was read
    struct engine_request mixed = {0};
    adapter_mix_apply(&d->a->mix, &mixed);
    agent_settings_apply(&d->a->settings, &d->options, &ignored);
    d->options.model = d->s->model;
    d->options.engine = d->s->engine;
    d->options.adapter = mixed.adapter;
    d->options.mix = mixed.mix;
    d->options.n_mix = mixed.n_mix;
    d->options.tools = &d->tools;
    d->options.max_tokens = MIN(d->options.max_tokens, spec->max_tokens);
    d->options.sampling = spec->sampling;
    d->options.run = session_batch_run;
    d->options.run_ctx = d;
    d->options.on_step = session_on_step;
    d->options.on_step_ctx = d;
}

static struct model_ref target_of(const struct agent_entry *a) {
    struct model_ref t = {
        .name = xasprintf("%s%s", PREFIX, a->name), .label = xstrdup("agent"), .n = a->mix.paths.n};
    for (int i = 0; i < t.n; i++) {
        t.terms[i] = a->mix.terms[i];
        adapter_retain(t.terms[i].adapter);
    }
    return t;
}

void agent_chat_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const struct agent_entry *a, struct generation_spec *spec) {
    struct error err;
    if (request_memory_reserve(s, x, (size_t)spec->n * run_bytes(s, a), &err) != OK) {
        api_fail_error(x, &err, spec->n > 1 ? "n" : NULL);
        generation_spec_release(spec);
        return;
    }
    struct model_ref target = target_of(a);
    struct agent_session *session = xcalloc(1, sizeof *session);
    *session = (struct agent_session){.s = s, .a = a};
    session_options(session, spec);
    spec->prompts = xcalloc(1, sizeof *spec->prompts); // no tokens: each step has its own prompt
    spec->n_prompts = 1;
    if (!generation_start_async(s, x, d, "chatcmpl-", &target, spec, agent_generation_run, session))
        session_free(session, 0);
}

/* GET /v1/agents */

static void agents_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    json_t *list = json_array();
    for (int i = 0; i < s->n_agents; i++) {
        const struct agent_entry *a = &s->agents[i];
        const struct agent_settings *o = &a->settings;
        json_array_append_new(
            list, json_pack("{s:s,s:s+,s:s?,s:o,s:s,s:I,s:f,s:I}", "name", a->name, "model", PREFIX,
                            a->name, "system", o->system, "tools", json_deep_copy(a->tools), "form",
                            o->form, "max_steps", (json_int_t)o->max_steps, "max_seconds",
                            o->max_seconds, "max_tokens", (json_int_t)o->max_tokens));
    }
    exchange_reply_json(x, 200, json_pack("{s:o}", "agents", list));
}

const struct http_route agents_routes[] = {
    {"GET", "/v1/agents", SCOPE_CHAT, agents_handle},
    {0},
};
