/*
 * world_server: worlds as environments for other programs, one line of JSON per request.
 *
 * Answers to steps are written without a JSON library, because steps are frequent. A request is
 * validated completely before anything changes, so an error leaves every world unchanged. The state
 * of a world is its trace: restoring a state simulates the trace, and the world can then continue.
 */
#include "world/world.h"
#include "world/world_server_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* observations */

uint64_t world_living_mask(const struct world *w) {
    uint64_t mask = 0;
    for (int i = 0; i < w->n_agents; i++) mask |= (uint64_t)(w->agents[i].alive != 0) << i;
    return mask;
}

void agent_json_each(const char *name, uint64_t agents, agent_json_fn add, const void *ctx,
                     struct buf *out) {
    buf_printf(out, "\"%s\":{", name);
    for (int i = 0, n = 0; i < WORLD_AGENTS_MAX; i++) {
        if (!(agents >> i & 1)) continue;
        buf_printf(out, "%s\"agent_%d\":", n++ ? "," : "", i);
        add(ctx, i, out);
    }
    buf_puts(out, "}");
}

/* Observations contain no character that needs escaping in JSON. */
void agent_json_observation(const void *view, int agent, struct buf *out) {
    const struct world_view *v = view;
    buf_puts(out, "\"");
    world_observe(v->w, v->r, agent, out);
    buf_puts(out, "\"");
}

void agent_json_reward(const void *view, int agent, struct buf *out) {
    buf_printf(out, "%.17g", ((const struct world_view *)view)->w->agents[agent].reward);
}

void agent_json_info(const void *view, int agent, struct buf *out) {
    const struct world_view *v = view;
    const struct world_agent *a = &v->w->agents[agent];
    buf_puts(out, "{\"prompt\":\"");
    world_prompt(v->w, v->r, agent, out);
    buf_printf(out, "\",\"cell\":[%d,%d],\"energy\":%d", a->cell % v->w->size, a->cell / v->w->size,
               a->energy);
    if (!v->at_start)
        buf_printf(out, ",\"action\":\"%s\",\"parsed\":%s", world_action_names[a->last_actions[1]],
                   v->invalid_actions >> agent & 1 ? "false" : "true");
    buf_puts(out, "}");
}

/* actions */

/* The move that replaces an answer that names no action. */
static int16_t random_move(const struct world *w, int agent) {
    struct rng r = world_policy_rng(w->seed, agent, w->tick);
    return (int16_t)rng_below(&r, PICK_FOOD);
}

static int word_read(const struct world_rules *r, const json_t *v, int64_t *word,
                     struct error *err) {
    *word = json_integer_value(v);
    if (!v || (json_is_integer(v) && *word >= 0 && *word <= r->vocabulary)) return OK;
    return error_set(err, ERR_FORMAT, "'word' must be a number from 0 to %" PRId64, r->vocabulary);
}

/* Reads an action: a number, a name, free text of a model, or {"action": one of these, "word": N}.
 * If the text names no action, *parsed is false and the action is the random move of (seed, agent,
 * tick). */
static int world_action_read(const struct world *w, const struct world_rules *r, int agent,
                             const json_t *v, int16_t *action, bool *parsed, struct error *err) {
    const json_t *action_value = json_is_object(v) ? json_object_get(v, "action") : v;
    int64_t word = 0,
            n = json_is_object(v) ? WORLD_N_ACTIONS : WORLD_N_ACTIONS * (r->vocabulary + 1);
    *parsed = true;
    if (json_is_object(v)) {
        const json_t *word_value = json_object_get(v, "word");
        if (word_read(r, word_value, &word, err) != OK) return err->code;
        if (json_object_size(v) != (size_t) !!action_value + (size_t) !!word_value)
            return error_set(err, ERR_FORMAT, "an action has only 'action' and 'word'");
    }
    json_int_t number = json_integer_value(action_value);
    if (json_is_string(action_value)) {
        int found = world_action_parse(r, json_string_value(action_value));
        *parsed = found >= 0;
        *action = *parsed ? (int16_t)found : random_move(w, agent);
    } else if (json_is_integer(action_value) && number >= 0 && number < n) {
        *action = (int16_t)number;
    } else {
        return error_set(err, ERR_FORMAT, "an action is text or a number from 0 to %" PRId64,
                         n - 1);
    }
    *action += (int16_t)(WORLD_N_ACTIONS * word);
    return OK;
}

/* The index in a name such as "agent_7"; -1: the name has another form. */
static int agent_index_parse(const char *name) {
    char *end;
    if (strncmp(name, "agent_", 6) != 0 || name[6] < '0' || name[6] > '9') return -1;
    if (name[6] == '0' && name[7]) return -1;
    long n = strtol(name + 6, &end, 10);
    return *end || n >= WORLD_AGENTS_MAX ? -1 : (int)n;
}

int world_actions_read(const struct world_view *v, uint64_t agents, const json_t *object,
                       int16_t *actions, uint64_t *invalid, struct error *err) {
    const char *name;
    json_t *value;
    uint64_t given = 0;
    *invalid = 0;
    if (!json_is_object(object))
        return error_set(err, ERR_FORMAT,
                         "actions must be an object with an action for each agent");
    json_object_foreach ((json_t *)(uintptr_t)object, name, value) {
        int i = agent_index_parse(name);
        bool parsed;
        if (i < 0 || !(agents >> i & 1))
            return error_set(err, ERR_FORMAT, "no agent '%s' can act now", name);
        if (world_action_read(v->w, v->r, i, value, &actions[i], &parsed, err) != OK)
            return error_wrap(err, "'%s'", name);
        given |= (uint64_t)1 << i;
        *invalid |= (uint64_t)!parsed << i;
    }
    for (int i = 0; i < WORLD_AGENTS_MAX; i++)
        if ((agents & ~given) >> i & 1)
            return error_set(err, ERR_FORMAT, "'agent_%d' has no action", i);
    return OK;
}

/* the server */

struct server_world { /* one world and its trace */
    struct trace trace;
    struct world w;
};
struct world_server {
    struct trace defaults; /* rules, agents and steps, which a reset can override; without ticks */
    uint64_t next_seed;
    struct server_world *worlds[WORLD_SERVER_MAX_WORLDS];
    bool closed;
};

struct world_server *world_server_new(const struct world_rules *r, int n_agents, int64_t steps,
                                      struct error *err) {
    struct world_server *s = xcalloc(1, sizeof *s);
    s->next_seed = 1;
    if (trace_init(&s->defaults, r, n_agents, 1, steps, "pipe", err) == OK) return s;
    world_server_free(s);
    return NULL;
}

static void server_world_free(struct server_world *p) {
    if (p) trace_release(&p->trace);
    free(p);
}

void world_server_free(struct world_server *s) {
    if (!s) return;
    for (int i = 0; i < WORLD_SERVER_MAX_WORLDS; i++) server_world_free(s->worlds[i]);
    trace_release(&s->defaults);
    free(s);
}

/* The bit set of active agents: those alive, while the world has steps left. */
static uint64_t server_world_agents(const struct server_world *p) {
    return p && p->w.tick < p->trace.steps ? world_living_mask(&p->w) : 0;
}

static struct world_view server_world_view(const struct server_world *p) {
    return (struct world_view){.w = &p->w, .r = &p->trace.rules};
}

/* reset */

/* Copies the rules of `in` to `out` with their full names, written with '_': "rewards": {"move": 1}
 * becomes rewards_move. */
static int rules_flatten(const json_t *in, const char *prefix, json_t *out, int depth,
                         struct error *err) {
    const char *key;
    json_t *v;
    int rc = OK;
    json_object_foreach ((json_t *)(uintptr_t)in, key, v) {
        char *name = xasprintf("%s%s%s", prefix, *prefix ? "_" : "", key);
        for (char *c = name; *c; c++)
            if (*c == '-') *c = '_';
        if (json_is_object(v) && depth == 0)
            rc = rules_flatten(v, name, out, depth + 1, err);
        else if (json_object_get(out, name))
            rc = error_set(err, ERR_FORMAT, "'%s' is given twice", name);
        else
            json_object_set(out, name, v);
        free(name);
        if (rc != OK) break;
    }
    return rc;
}

static int count_take(json_t *options, const char *key, int64_t max, int64_t *out,
                      struct error *err) {
    const json_t *v = json_object_get(options, key);
    json_int_t n = json_integer_value(v);
    if (!v) return OK;
    if (!json_is_integer(v) || n < 1 || n > max)
        return error_set(err, ERR_FORMAT, "'%s' must be a whole number from 1 to %" PRId64, key,
                         max);
    *out = n;
    json_object_del(options, key);
    return OK;
}

/* The options override the server's rules. If the options have "rules", they override that rule set
 * instead. */
static int reset_rules_read(const struct world_server *s, const json_t *options,
                            struct world_rules *r, struct error *err) {
    json_t *merged =
        json_object_get(options, "rules") ? json_object() : world_rules_json(&s->defaults.rules);
    if (json_object_get(options, "map"))
        for (const char *const *key = world_map_keys; *key; key++) json_object_del(merged, *key);
    json_object_update(merged, (json_t *)(uintptr_t)options);
    const char *name = json_string_value(json_object_get(options, "rules"));
    if (name) renamed_value("rules", name); /* logs a note if the name has changed */
    int rc = world_rules_from_json(r, "options", merged, err);
    json_decref(merged);
    return rc;
}

/* Fills `out`, a trace without ticks, from the options in `flat`; removes "agents" and "steps" from
 * `flat`. */
static int reset_options_read(const struct world_server *s, json_t *flat, uint64_t seed,
                              struct trace *out, struct error *err) {
    int64_t agents = s->defaults.n_agents, steps = s->defaults.steps;
    struct world_rules r = {0};
    int rc = count_take(flat, "agents", WORLD_AGENTS_MAX, &agents, err);
    if (rc == OK) rc = count_take(flat, "steps", TRACE_TICKS, &steps, err);
    if (rc == OK) rc = reset_rules_read(s, flat, &r, err);
    if (rc == OK) rc = trace_init(out, &r, (int)agents, seed, steps, "pipe", err);
    world_rules_release(&r);
    return rc;
}

/* Replaces the world at that index. */
static int server_world_set(struct world_server *s, int index, struct trace *trace,
                            struct error *err) {
    struct server_world *p = s->worlds[index] ? s->worlds[index] : try_calloc(1, sizeof *p, err);
    if (!p) return err->code;
    trace_release(&p->trace);
    p->trace = *trace;
    *trace = (struct trace){0};
    p->w.n_agents = 0;
    trace_seek(&p->trace, &p->w, p->trace.n_ticks);
    s->worlds[index] = p;
    return OK;
}

static int do_reset(struct world_server *s, int index, const json_t *arg, struct buf *out,
                    struct error *err) {
    const json_t *seed = json_object_get(arg, "seed"), *options = json_object_get(arg, "options");
    bool seeded = seed && !json_is_null(seed);
    json_int_t n = seeded ? json_integer_value(seed) : (json_int_t)s->next_seed;
    json_t *flat = json_object();
    struct trace trace = {0};
    int rc = OK;
    if (json_object_size(arg) != (size_t) !!seed + (size_t) !!options)
        rc = error_set(err, ERR_FORMAT, "a reset has only 'seed' and 'options'");
    else if ((seeded && !json_is_integer(seed)) || n < 0)
        rc = error_set(err, ERR_FORMAT, "'seed' must be a whole number, at least 0");
    else if (options && !json_is_null(options) && !json_is_object(options))
        rc = error_set(err, ERR_FORMAT, "'options' must be an object");
    if (rc == OK && json_is_object(options)) rc = rules_flatten(options, "", flat, 0, err);
    if (rc == OK) rc = reset_options_read(s, flat, (uint64_t)n, &trace, err);
    if (rc == OK) rc = server_world_set(s, index, &trace, err);
    trace_release(&trace);
    json_decref(flat);
    if (rc != OK) return rc;
    s->next_seed = ((uint64_t)n + 1) & INT64_MAX;
    struct world_view v = server_world_view(s->worlds[index]);
    v.at_start = true;
    uint64_t agents = server_world_agents(s->worlds[index]);
    agent_json_each("observations", agents, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("infos", agents, agent_json_info, &v, out);
    return OK;
}

/* the other requests */

static void add_terminated(const void *ctx, int agent, struct buf *out) {
    const struct server_world *p = ctx;
    buf_puts(out, p->w.agents[agent].alive ? "false" : "true");
}

static void add_truncated(const void *ctx, int agent, struct buf *out) {
    const struct server_world *p = ctx;
    bool over = p->w.tick >= p->trace.steps && p->w.agents[agent].alive;
    buf_puts(out, over ? "true" : "false");
}

static int world_require_reset(const struct server_world *p, struct error *err) {
    return p ? OK : error_set(err, ERR_STATE, "no world has begun: reset it first");
}

static int do_step(struct world_server *s, int index, const json_t *arg, struct buf *out,
                   struct error *err) {
    struct server_world *p = s->worlds[index];
    int16_t actions[WORLD_AGENTS_MAX] = {0};
    uint64_t agents = server_world_agents(p), invalid_actions;
    if (world_require_reset(p, err) != OK) return err->code;
    if (!agents) return error_set(err, ERR_STATE, "no agent is left to act: reset the world");
    struct world_view v = server_world_view(p);
    if (world_actions_read(&v, agents, arg, actions, &invalid_actions, err) != OK ||
        trace_append(&p->trace, &p->w, actions, err) != OK)
        return err->code;
    v.invalid_actions = invalid_actions;
    world_step(&p->w, &p->trace.rules, actions);
    agent_json_each("observations", agents, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("rewards", agents, agent_json_reward, &v, out);
    buf_puts(out, ",");
    agent_json_each("terminations", agents, add_terminated, p, out);
    buf_puts(out, ",");
    agent_json_each("truncations", agents, add_truncated, p, out);
    buf_puts(out, ",");
    agent_json_each("infos", agents, agent_json_info, &v, out);
    return OK;
}

static int do_agents(struct world_server *s, int index, const json_t *arg, struct buf *out,
                     struct error *err) {
    (void)arg, (void)err;
    uint64_t agents = server_world_agents(s->worlds[index]);
    buf_puts(out, "\"agents\":[");
    for (int i = 0, n = 0; i < WORLD_AGENTS_MAX; i++)
        if (agents >> i & 1) buf_printf(out, "%s\"agent_%d\"", n++ ? "," : "", i);
    buf_puts(out, "]");
    return OK;
}

static int do_spaces(struct world_server *s, int index, const json_t *arg, struct buf *out,
                     struct error *err) {
    (void)arg, (void)err;
    const struct trace *t = s->worlds[index] ? &s->worlds[index]->trace : &s->defaults;
    buf_puts(out, "\"possible_agents\":[");
    for (int i = 0; i < t->n_agents; i++) buf_printf(out, "%s\"agent_%d\"", i ? "," : "", i);
    buf_puts(out, "],\"actions\":[");
    for (int i = 0; i < WORLD_N_ACTIONS; i++)
        buf_printf(out, "%s\"%s\"", i ? "," : "", world_action_names[i]);
    buf_puts(out, "],\"said\":[");
    for (int i = 0; i < WORLD_N_ACTIONS; i++)
        buf_printf(out, "%s\"%s\"", i ? "," : "", world_action_words[i]);
    buf_printf(out, "],\"words\":%" PRId64 ",\"n_actions\":%" PRId64 ",\"max_steps\":%" PRId64,
               t->rules.vocabulary, WORLD_N_ACTIONS * (t->rules.vocabulary + 1), t->steps);
    return OK;
}

static int do_state(struct world_server *s, int index, const json_t *arg, struct buf *out,
                    struct error *err) {
    (void)arg;
    const struct server_world *p = s->worlds[index];
    if (world_require_reset(p, err) != OK) return err->code;
    json_t *v = trace_json(&p->trace, &p->w);
    char *text = json_dumps(v, JSON_COMPACT);
    buf_printf(out, "\"state\":%s", text);
    free(text);
    json_decref(v);
    return OK;
}

static int do_restore(struct world_server *s, int index, const json_t *arg, struct buf *out,
                      struct error *err) {
    struct trace trace;
    int rc = trace_from_json(&trace, arg, err);
    if (rc == OK && trace.n_ticks > trace.steps)
        rc = error_set(err, ERR_FORMAT, "the state has more ticks than steps");
    if (rc == OK) rc = server_world_set(s, index, &trace, err);
    trace_release(&trace);
    if (rc != OK) return rc;
    struct world_view v = server_world_view(s->worlds[index]);
    v.at_start = v.w->tick == 0;
    uint64_t agents = server_world_agents(s->worlds[index]);
    agent_json_each("observations", agents, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("infos", agents, agent_json_info, &v, out);
    return OK;
}

static int do_close(struct world_server *s, int index, const json_t *arg, struct buf *out,
                    struct error *err) {
    (void)index, (void)arg, (void)err;
    s->closed = true;
    buf_puts(out, "\"closed\":true");
    return OK;
}

static const struct {
    const char *name;
    int (*run)(struct world_server *s, int index, const json_t *arg, struct buf *out,
               struct error *err);
    bool has_argument; /* has an argument other than {} */
} requests[] = {
    {"reset", do_reset, true},    {"step", do_step, true},    {"agents", do_agents, false},
    {"spaces", do_spaces, false}, {"state", do_state, false}, {"restore", do_restore, true},
    {"close", do_close, false},
};

static int request_find(const json_t *v, struct error *err) {
    int i_found = -1;
    const char *key;
    json_t *value;
    if (!json_is_object(v)) return error_set(err, ERR_FORMAT, "a request is an object");
    json_object_foreach ((json_t *)(uintptr_t)v, key, value) {
        int i = 0, n = (int)ARRAY_LEN(requests);
        if (strcmp(key, "world") == 0) continue;
        while (i < n && strcmp(requests[i].name, key) != 0) i++;
        if (i == n) return error_set(err, ERR_FORMAT, "no request '%s'", key);
        if (i_found >= 0)
            return error_set(err, ERR_FORMAT, "two requests at once: '%s' and '%s'",
                             requests[i_found].name, key);
        if (!json_is_object(value) || (!requests[i].has_argument && json_object_size(value)))
            return error_set(err, ERR_FORMAT, "'%s' takes %s", key,
                             requests[i].has_argument ? "an object" : "{}");
        i_found = i;
    }
    return i_found >= 0 ? i_found : error_set(err, ERR_FORMAT, "the request is missing");
}

static void add_error(const struct error *err, struct buf *out) {
    struct buf clean = {0};
    buf_add_sanitized(&clean, err->text, strlen(err->text));
    json_t *v = json_string(clean.data);
    char *text = v ? json_dumps(v, JSON_ENCODE_ANY) : NULL;
    buf_printf(out, "{\"error\":%s}", text ? text : "\"not UTF-8\"");
    free(text);
    json_decref(v);
    buf_release(&clean);
}

/* Answers one request; on failure discards the partial answer and writes the error. */
static void request_answer(struct world_server *s, const json_t *v, struct buf *out) {
    struct error err = {0};
    size_t old_len = out->len;
    const json_t *world = json_object_get(v, "world");
    json_int_t index = json_integer_value(world);
    int rc = request_find(v, &err), request = rc;
    if (rc >= 0 && world &&
        (!json_is_integer(world) || index < 0 || index >= WORLD_SERVER_MAX_WORLDS))
        rc = error_set(&err, ERR_FORMAT, "'world' must be a number from 0 to %d",
                       WORLD_SERVER_MAX_WORLDS - 1);
    if (rc >= 0) {
        const json_t *arg = json_object_get(v, requests[request].name);
        buf_puts(out, "{");
        rc = requests[request].run(s, (int)index, arg, out, &err);
        if (rc == OK) buf_puts(out, "}");
    }
    if (rc >= 0) return;
    out->len = old_len;
    add_error(&err, out);
}

bool world_server_handle(struct world_server *s, const char *line, size_t len, struct buf *out) {
    struct error err = {0};
    struct json_limits left = WORLD_SERVER_JSON_BOUNDS;
    json_t *v = json_parse_limited(line, len, "request", &left, &err), *item;
    size_t i;
    if (json_is_array(v)) {
        buf_puts(out, "[");
        json_array_foreach (v, i, item) {
            if (i) buf_puts(out, ",");
            request_answer(s, item, out);
        }
        buf_puts(out, "]");
    } else if (v) {
        request_answer(s, v, out);
    } else {
        add_error(&err, out);
    }
    buf_puts(out, "\n");
    json_decref(v);
    return !s->closed;
}
