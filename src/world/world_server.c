/*
 * world_server: the environment that other programs control, one line of JSON at a time.
 *
 * Answers are written without a JSON library, because steps are frequent; requests are parsed
 * strictly. A request is validated completely before anything changes, so an error leaves every
 * world unchanged. The state of a world is its trace: restoring simulates it, and it can then
 * continue.
 */
#include "world/world.h"
#include "world/world_server_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* observations */

uint64_t world_living_mask(const struct world *w) {
    uint64_t who = 0;
    for (int i = 0; i < w->n_agents; i++) who |= (uint64_t)(w->agents[i].alive != 0) << i;
    return who;
}

void agent_json_each(const char *name, uint64_t who, agent_json_fn add, const void *ctx,
                     struct buf *out) {
    buf_printf(out, "\"%s\":{", name);
    for (int i = 0, n = 0; i < WORLD_AGENTS; i++) {
        if (!(who >> i & 1)) continue;
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
        buf_printf(out, ",\"action\":\"%s\",\"parsed\":%s", world_action_names[a->last[1]],
                   v->invalid_actions >> agent & 1 ? "false" : "true");
    buf_puts(out, "}");
}

/* actions */

/* A random move replaces an answer without an action. */
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

/* Reads an action from outside: a number, a name or free text of a model, or {"action": one of
 * those, "word": N}. If the text names no action, *parsed is false and the action is the random
 * move of (seed, agent, tick). */
static int world_action_read(const struct world *w, const struct world_rules *r, int agent,
                             const json_t *v, int16_t *action, bool *parsed, struct error *err) {
    const json_t *what = json_is_object(v) ? json_object_get(v, "action") : v;
    int64_t word = 0,
            n = json_is_object(v) ? WORLD_N_ACTIONS : WORLD_N_ACTIONS * (r->vocabulary + 1);
    *parsed = true;
    if (json_is_object(v)) {
        const json_t *said = json_object_get(v, "word");
        if (word_read(r, said, &word, err) != OK) return err->code;
        if (json_object_size(v) != (size_t) !!what + (size_t) !!said)
            return error_set(err, ERR_FORMAT, "an action has 'action' and 'word', no more");
    }
    json_int_t number = json_integer_value(what);
    if (json_is_string(what)) {
        int found = world_action_parse(r, json_string_value(what));
        *parsed = found >= 0;
        *action = *parsed ? (int16_t)found : random_move(w, agent);
    } else if (json_is_integer(what) && number >= 0 && number < n) {
        *action = (int16_t)number;
    } else {
        return error_set(err, ERR_FORMAT, "an action is text or a number from 0 to %" PRId64,
                         n - 1);
    }
    *action += (int16_t)(WORLD_N_ACTIONS * word);
    return OK;
}

/* "agent_7" is 7; -1: no such name. */
static int agent_number(const char *name) {
    char *end;
    if (strncmp(name, "agent_", 6) != 0 || name[6] < '0' || name[6] > '9') return -1;
    if (name[6] == '0' && name[7]) return -1;
    long n = strtol(name + 6, &end, 10);
    return *end || n >= WORLD_AGENTS ? -1 : (int)n;
}

int world_actions_read(const struct world_view *v, uint64_t who, const json_t *object,
                       int16_t *actions, uint64_t *guessed, struct error *err) {
    const char *name;
    json_t *value;
    uint64_t got = 0;
    *guessed = 0;
    if (!json_is_object(object))
        return error_set(err, ERR_FORMAT, "actions must be an object: an action an agent");
    json_object_foreach ((json_t *)(uintptr_t)object, name, value) {
        int i = agent_number(name);
        bool parsed;
        if (i < 0 || !(who >> i & 1))
            return error_set(err, ERR_FORMAT, "no agent '%s' is there to act", name);
        if (world_action_read(v->w, v->r, i, value, &actions[i], &parsed, err) != OK)
            return error_wrap(err, "'%s'", name);
        got |= (uint64_t)1 << i;
        *guessed |= (uint64_t)!parsed << i;
    }
    for (int i = 0; i < WORLD_AGENTS; i++)
        if ((who & ~got) >> i & 1) return error_set(err, ERR_FORMAT, "'agent_%d' has no action", i);
    return OK;
}

/* the server */

struct server_world { /* state of one world */
    struct trace log;
    struct world w;
};
struct world_server {
    struct trace plain; /* without ticks: rules, agents and steps that a reset can override */
    uint64_t next_seed;
    struct server_world *grid_envs[WORLD_SERVER_MAX_WORLDS];
    bool closed;
};

struct world_server *world_server_new(const struct world_rules *r, int n_agents, int64_t steps,
                                      struct error *err) {
    struct world_server *s = xcalloc(1, sizeof *s);
    s->next_seed = 1;
    if (trace_init(&s->plain, r, n_agents, 1, steps, "pipe", err) == OK) return s;
    world_server_free(s);
    return NULL;
}

static void server_world_free(struct server_world *p) {
    if (p) trace_release(&p->log);
    free(p);
}

void world_server_free(struct world_server *s) {
    if (!s) return;
    for (int i = 0; i < WORLD_SERVER_MAX_WORLDS; i++) server_world_free(s->grid_envs[i]);
    trace_release(&s->plain);
    free(s);
}

/* The agents that are still active: alive, and the world has steps left. */
static uint64_t server_world_agents(const struct server_world *p) {
    return p && p->w.tick < p->log.steps ? world_living_mask(&p->w) : 0;
}

static struct world_view server_world_view(const struct server_world *p) {
    return (struct world_view){.w = &p->w, .r = &p->log.rules};
}

/* reset */

/* Copies the rules of `in` with their full names, written with '_': "rewards": {"move": 1} becomes
 * rewards_move. */
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

/* The options override the server's rules, or with "rules" those of that rule set. */
static int rules_take(const struct world_server *s, const json_t *options, struct world_rules *r,
                      struct error *err) {
    json_t *own =
        json_object_get(options, "rules") ? json_object() : world_rules_json(&s->plain.rules);
    if (json_object_get(options, "map"))
        for (const char *const *key = world_map_keys; *key; key++) json_object_del(own, *key);
    json_object_update(own, (json_t *)(uintptr_t)options);
    const char *name = json_string_value(json_object_get(options, "rules"));
    if (name) renamed_value("rules", name); /* for its note */
    int rc = world_rules_from_json(r, "options", own, err);
    json_decref(own);
    return rc;
}

/* Reads the options in `flat` and removes "agents" and "steps" from it. */
static int begin_read(const struct world_server *s, json_t *flat, uint64_t seed, struct trace *out,
                      struct error *err) {
    int64_t agents = s->plain.n_agents, steps = s->plain.steps;
    struct world_rules r = {0};
    int rc = count_take(flat, "agents", WORLD_AGENTS, &agents, err);
    if (rc == OK) rc = count_take(flat, "steps", TRACE_TICKS, &steps, err);
    if (rc == OK) rc = rules_take(s, flat, &r, err);
    if (rc == OK) rc = trace_init(out, &r, (int)agents, seed, steps, "pipe", err);
    world_rules_release(&r);
    return rc;
}

/* Replaces the world at that index. */
static int server_world_put(struct world_server *s, int at, struct trace *log, struct error *err) {
    struct server_world *p = s->grid_envs[at] ? s->grid_envs[at] : try_calloc(1, sizeof *p, err);
    if (!p) return err->code;
    trace_release(&p->log);
    p->log = *log;
    *log = (struct trace){0};
    p->w.n_agents = 0;
    trace_seek(&p->log, &p->w, p->log.n_ticks);
    s->grid_envs[at] = p;
    return OK;
}

static int do_reset(struct world_server *s, int at, const json_t *arg, struct buf *out,
                    struct error *err) {
    const json_t *seed = json_object_get(arg, "seed"), *options = json_object_get(arg, "options");
    bool seeded = seed && !json_is_null(seed);
    json_int_t n = seeded ? json_integer_value(seed) : (json_int_t)s->next_seed;
    json_t *flat = json_object();
    struct trace log = {0};
    int rc = OK;
    if (json_object_size(arg) != (size_t) !!seed + (size_t) !!options)
        rc = error_set(err, ERR_FORMAT, "a reset has 'seed' and 'options', no more");
    else if ((seeded && !json_is_integer(seed)) || n < 0)
        rc = error_set(err, ERR_FORMAT, "'seed' must be a whole number, at least 0");
    else if (options && !json_is_null(options) && !json_is_object(options))
        rc = error_set(err, ERR_FORMAT, "'options' must be an object");
    if (rc == OK && json_is_object(options)) rc = rules_flatten(options, "", flat, 0, err);
    if (rc == OK) rc = begin_read(s, flat, (uint64_t)n, &log, err);
    if (rc == OK) rc = server_world_put(s, at, &log, err);
    trace_release(&log);
    json_decref(flat);
    if (rc != OK) return rc;
    s->next_seed = ((uint64_t)n + 1) & INT64_MAX;
    struct world_view v = server_world_view(s->grid_envs[at]);
    v.at_start = true;
    uint64_t who = server_world_agents(s->grid_envs[at]);
    agent_json_each("observations", who, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("infos", who, agent_json_info, &v, out);
    return OK;
}

/* the other requests */

static void add_terminated(const void *place, int agent, struct buf *out) {
    const struct server_world *p = place;
    buf_puts(out, p->w.agents[agent].alive ? "false" : "true");
}

static void add_truncated(const void *place, int agent, struct buf *out) {
    const struct server_world *p = place;
    bool over = p->w.tick >= p->log.steps && p->w.agents[agent].alive;
    buf_puts(out, over ? "true" : "false");
}

static int begun(const struct server_world *p, struct error *err) {
    return p ? OK : error_set(err, ERR_STATE, "no world has begun: reset it first");
}

static int do_step(struct world_server *s, int at, const json_t *arg, struct buf *out,
                   struct error *err) {
    struct server_world *p = s->grid_envs[at];
    int16_t actions[WORLD_AGENTS] = {0};
    uint64_t who = server_world_agents(p), guessed;
    if (begun(p, err) != OK) return err->code;
    if (!who) return error_set(err, ERR_STATE, "no agent is left to act: reset the world");
    struct world_view v = server_world_view(p);
    if (world_actions_read(&v, who, arg, actions, &guessed, err) != OK ||
        trace_append(&p->log, &p->w, actions, err) != OK)
        return err->code;
    v.invalid_actions = guessed;
    world_step(&p->w, &p->log.rules, actions);
    agent_json_each("observations", who, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("rewards", who, agent_json_reward, &v, out);
    buf_puts(out, ",");
    agent_json_each("terminations", who, add_terminated, p, out);
    buf_puts(out, ",");
    agent_json_each("truncations", who, add_truncated, p, out);
    buf_puts(out, ",");
    agent_json_each("infos", who, agent_json_info, &v, out);
    return OK;
}

static int do_agents(struct world_server *s, int at, const json_t *arg, struct buf *out,
                     struct error *err) {
    (void)arg, (void)err;
    uint64_t who = server_world_agents(s->grid_envs[at]);
    buf_puts(out, "\"agents\":[");
    for (int i = 0, n = 0; i < WORLD_AGENTS; i++)
        if (who >> i & 1) buf_printf(out, "%s\"agent_%d\"", n++ ? "," : "", i);
    buf_puts(out, "]");
    return OK;
}

static int do_spaces(struct world_server *s, int at, const json_t *arg, struct buf *out,
                     struct error *err) {
    (void)arg, (void)err;
    const struct trace *t = s->grid_envs[at] ? &s->grid_envs[at]->log : &s->plain;
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

static int do_state(struct world_server *s, int at, const json_t *arg, struct buf *out,
                    struct error *err) {
    (void)arg;
    const struct server_world *p = s->grid_envs[at];
    if (begun(p, err) != OK) return err->code;
    json_t *v = trace_json(&p->log, &p->w);
    char *text = json_dumps(v, JSON_COMPACT);
    buf_printf(out, "\"state\":%s", text);
    free(text);
    json_decref(v);
    return OK;
}

static int do_restore(struct world_server *s, int at, const json_t *arg, struct buf *out,
                      struct error *err) {
    struct trace log;
    int rc = trace_from_json(&log, arg, err);
    if (rc == OK && log.n_ticks > log.steps)
        rc = error_set(err, ERR_FORMAT, "the state has more ticks than steps");
    if (rc == OK) rc = server_world_put(s, at, &log, err);
    trace_release(&log);
    if (rc != OK) return rc;
    struct world_view v = server_world_view(s->grid_envs[at]);
    v.at_start = v.w->tick == 0;
    uint64_t who = server_world_agents(s->grid_envs[at]);
    agent_json_each("observations", who, agent_json_observation, &v, out);
    buf_puts(out, ",");
    agent_json_each("infos", who, agent_json_info, &v, out);
    return OK;
}

static int do_close(struct world_server *s, int at, const json_t *arg, struct buf *out,
                    struct error *err) {
    (void)at, (void)arg, (void)err;
    s->closed = true;
    buf_puts(out, "\"closed\":true");
    return OK;
}

static const struct {
    const char *name;
    int (*run)(struct world_server *s, int at, const json_t *arg, struct buf *out,
               struct error *err);
    bool takes; /* takes an argument other than {} */
} requests[] = {
    {"reset", do_reset, true},    {"step", do_step, true},    {"agents", do_agents, false},
    {"spaces", do_spaces, false}, {"state", do_state, false}, {"restore", do_restore, true},
    {"close", do_close, false},
};

static int request_find(const json_t *v, struct error *err) {
    int found = -1;
    const char *key;
    json_t *value;
    if (!json_is_object(v)) return error_set(err, ERR_FORMAT, "a request is an object");
    json_object_foreach ((json_t *)(uintptr_t)v, key, value) {
        int i = 0, n = (int)ARRAY_LEN(requests);
        if (strcmp(key, "world") == 0) continue;
        while (i < n && strcmp(requests[i].name, key) != 0) i++;
        if (i == n) return error_set(err, ERR_FORMAT, "no request '%s'", key);
        if (found >= 0)
            return error_set(err, ERR_FORMAT, "two requests at once: '%s' and '%s'",
                             requests[found].name, key);
        if (!json_is_object(value) || (!requests[i].takes && json_object_size(value)))
            return error_set(err, ERR_FORMAT, "'%s' takes %s", key,
                             requests[i].takes ? "an object" : "{}");
        found = i;
    }
    return found >= 0 ? found : error_set(err, ERR_FORMAT, "the request is missing");
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
    size_t before = out->len;
    const json_t *world = json_object_get(v, "world");
    json_int_t at = json_integer_value(world);
    int rc = request_find(v, &err), request = rc;
    if (rc >= 0 && world && (!json_is_integer(world) || at < 0 || at >= WORLD_SERVER_MAX_WORLDS))
        rc = error_set(&err, ERR_FORMAT, "'world' must be a number from 0 to %d",
                       WORLD_SERVER_MAX_WORLDS - 1);
    if (rc >= 0) {
        const json_t *arg = json_object_get(v, requests[request].name);
        buf_puts(out, "{");
        rc = requests[request].run(s, (int)at, arg, out, &err);
        if (rc == OK) buf_puts(out, "}");
    }
    if (rc >= 0) return;
    out->len = before;
    add_error(&err, out);
}

bool world_server_handle(struct world_server *s, const char *line, size_t len, struct buf *out) {
    struct error err = {0};
    struct json_limits left = WORLD_SERVER_JSON_BOUNDS;
    json_t *v = json_parse_limited(line, len, "request", &left, &err), *one;
    size_t i;
    if (json_is_array(v)) {
        buf_puts(out, "[");
        json_array_foreach (v, i, one) {
            if (i) buf_puts(out, ",");
            request_answer(s, one, out);
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
