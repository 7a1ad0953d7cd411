/*
 * trace: writes the actions in a world to a file, and reads them back without trusting the file.
 *
 * A trace contains no computed state except hashes for comparison. Rules are written and read as a
 * mapping of their keys; rules.c checks them.
 *
 * Invariant of a trace in memory: all its actions are valid in a world with its rules and seed, so
 * every loaded trace can be simulated, continued and saved.
 */
#include "world/world.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 1 };
static const size_t FILE_LIMIT = (size_t)1 << 30;

/* rules */

/* Whether a trace stores the rule: a map replaces some rules, and `map` itself is optional. */
static bool rule_is_stored(const struct option_row *row, const struct world_rules *r) {
    if (strcmp(row->name, "map") == 0) return r->map.n > 0;
    for (const char *const *key = world_map_keys; *key; key++)
        if (strcmp(row->name, *key) == 0) return r->map.n == 0;
    return true;
}

json_t *world_rules_json(const struct world_rules *r) {
    json_t *out = json_object();
    for (const struct option_row *row = world_rule_rows; row->name; row++) {
        char *key = xstrdup(option_stored_name(row));
        for (char *p = key; *p; p++)
            if (*p == '-') *p = '_';
        if (rule_is_stored(row, r)) json_object_set_new(out, key, option_json(row, r));
        free(key);
    }
    json_object_set_new(out, "rules", json_string(stored_value("rules", r->rules)));
    return out;
}

/* in memory */

int trace_init(struct trace *t, const struct world_rules *r, int n_agents, uint64_t seed,
               int64_t steps, const char *policy, struct error *err) {
    json_t *rules = world_rules_json(r);
    *t = (struct trace){
        .n_agents = n_agents, .seed = seed, .steps = steps, .policy = xstrdup(policy), .fork = -1};
    int rc = world_rules_from_json(&t->rules, "rules", rules, err);
    json_decref(rules);
    return rc;
}

void trace_release(struct trace *t) {
    world_rules_release(&t->rules);
    free(t->policy);
    free(t->actions);
    *t = (struct trace){0};
}

static int16_t *tick_actions(const struct trace *t, int64_t tick) {
    return t->actions + tick * t->n_agents;
}

static int trace_grow(struct trace *t, struct error *err) {
    if (t->n_ticks == TRACE_TICKS)
        return error_set(err, ERR_MEMORY, "a trace has at most %d ticks", TRACE_TICKS);
    if (t->n_ticks < t->cap) return OK;
    int64_t cap = MAX(64, 2 * t->cap);
    int16_t *more = try_realloc(t->actions, (size_t)(cap * t->n_agents) * sizeof *t->actions, err);
    if (!more) return err->code;
    t->actions = more;
    t->cap = cap;
    return OK;
}

int trace_append(struct trace *t, const struct world *w, const int16_t *actions,
                 struct error *err) {
    if (trace_grow(t, err) != OK) return err->code;
    int16_t *row = tick_actions(t, t->n_ticks++);
    for (int i = 0; i < t->n_agents; i++) row[i] = w->agents[i].alive ? actions[i] : -1;
    return OK;
}

void trace_seek(const struct trace *t, struct world *w, int64_t tick) {
    CHECK(tick >= 0 && tick <= t->n_ticks);
    if (w->n_agents == 0 || tick < w->tick) world_reset(w, &t->rules, t->n_agents, t->seed);
    while (w->tick < tick) world_step(w, &t->rules, tick_actions(t, w->tick));
}

void trace_truncate(struct trace *t, int64_t tick) {
    t->n_ticks = MIN(t->n_ticks, tick);
    t->closed = false;
}

/* writing */

static json_t *header_json(const struct trace *t) {
    json_t *v = json_pack("{s:i,s:o,s:i,s:I,s:I,s:s}", "shoal_world", VERSION, "rules",
                          world_rules_json(&t->rules), "agents", t->n_agents, "seed",
                          (json_int_t)t->seed, "steps", (json_int_t)t->steps, "policy", t->policy);
    CHECK(v != NULL);
    if (t->fork >= 0) json_object_set_new(v, "fork", json_integer(t->fork));
    return v;
}

static void header_add(const struct trace *t, struct buf *out) {
    buf_add_json_line(out, header_json(t));
}

static void hash_add(const struct world *w, struct buf *out) {
    char hash[HASH_LEN];
    world_hash(w, hash);
    buf_printf(out, ",\"hash\":\"%s\"}\n", hash);
}

/* Appends the line of the tick that ends in the state `w`. */
static void tick_add(const struct trace *t, const struct world *w, struct buf *out) {
    const int16_t *actions = tick_actions(t, w->tick - 1);
    buf_printf(out, "{\"tick\":%d,\"actions\":[", w->tick);
    for (int i = 0; i < t->n_agents; i++) buf_printf(out, "%s%d", i ? "," : "", actions[i]);
    buf_puts(out, "]");
    if (w->tick % TRACE_HASH_INTERVAL == 0)
        hash_add(w, out);
    else
        buf_puts(out, "}\n");
}

static int text_write(struct buf *b, FILE *f, struct error *err) {
    errno = 0;
    bool good = fwrite(b->data, 1, b->len, f) == b->len && fflush(f) == 0;
    buf_release(b);
    return good ? OK : error_errno(err, "cannot write the trace");
}

FILE *trace_create(const struct trace *t, const char *path, struct error *err) {
    FILE *f = fopen(path, "w");
    struct buf b = {0};
    struct world *w = xcalloc(1, sizeof *w);
    int rc = f ? OK : error_errno(err, "cannot write '%s'", path);
    if (f) header_add(t, &b);
    for (int64_t tick = 1; rc == OK && tick <= t->n_ticks; tick++) {
        trace_seek(t, w, tick);
        tick_add(t, w, &b);
        if (b.len > 1 << 16) rc = text_write(&b, f, err);
    }
    if (rc == OK) rc = text_write(&b, f, err);
    buf_release(&b);
    free(w);
    if (rc == OK) return f;
    if (f) fclose(f);
    return NULL;
}

int trace_write_tick(const struct trace *t, const struct world *w, FILE *f, struct error *err) {
    struct buf b = {0};
    CHECK(w->tick == t->n_ticks && w->tick > 0);
    tick_add(t, w, &b);
    return text_write(&b, f, err);
}

int trace_close(const struct world *w, FILE *f, struct error *err) {
    struct buf b = {0};
    buf_printf(&b, "{\"end\":%d", w->tick);
    hash_add(w, &b);
    int rc = text_write(&b, f, err);
    if (fclose(f) != 0 && rc == OK) rc = error_errno(err, "cannot write the trace");
    return rc;
}

/* reading */

static int keys_check(const json_t *v, const char *const *known_keys, struct error *err) {
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)v, key, value) {
        int i = 0;
        while (known_keys[i] && strcmp(known_keys[i], key) != 0) i++;
        if (!known_keys[i]) return error_set(err, ERR_FORMAT, "unknown key '%s'", key);
    }
    return OK;
}

/* Reads an integer in a range; ERR_FORMAT if it is missing or outside. */
static int integer_read(const json_t *v, const char *key, int64_t min, int64_t max, int64_t *out,
                        struct error *err) {
    const json_t *n = json_object_get(v, key);
    *out = json_integer_value(n);
    if (json_is_integer(n) && *out >= min && *out <= max) return OK;
    return error_set(err, ERR_FORMAT, "'%s' must be a whole number from %" PRId64 " to %" PRId64,
                     key, min, max);
}

static int header_read(struct trace *t, const json_t *v, const char *const *known_keys,
                       struct error *err) {
    int64_t version, agents, seed;
    const json_t *policy = json_object_get(v, "policy");
    *t = (struct trace){.fork = -1};
    if (!json_is_object(v) || !json_object_get(v, "shoal_world"))
        return error_set(err, ERR_FORMAT, "no trace of a world: 'shoal_world' is missing");
    if (integer_read(v, "shoal_world", VERSION, VERSION, &version, err) != OK ||
        keys_check(v, known_keys, err) != OK ||
        integer_read(v, "agents", 1, WORLD_AGENTS_MAX, &agents, err) != OK ||
        integer_read(v, "seed", 0, INT64_MAX, &seed, err) != OK ||
        integer_read(v, "steps", 1, TRACE_TICKS, &t->steps, err) != OK ||
        (json_object_get(v, "fork") &&
         integer_read(v, "fork", 0, TRACE_TICKS, &t->fork, err) != OK))
        return err->code;
    if (!json_is_string(policy)) return error_set(err, ERR_FORMAT, "'policy' must be text");
    t->n_agents = (int)agents;
    t->seed = (uint64_t)seed;
    t->policy = xstrdup(json_string_value(policy));
    return world_rules_from_json(&t->rules, "rules", json_object_get(v, "rules"), err);
}

/* Reads one tick's actions, checks that the world `w` accepts them, and steps `w`. */
static int actions_read(struct trace *t, struct world *w, const json_t *v, struct error *err) {
    int16_t actions[WORLD_AGENTS_MAX];
    int64_t n_actions = WORLD_N_ACTIONS * (t->rules.vocabulary + 1);
    if (!json_is_array(v) || json_array_size(v) != (size_t)t->n_agents)
        return error_set(err, ERR_FORMAT, "'actions' must be a list of %d", t->n_agents);
    for (int i = 0; i < t->n_agents; i++) {
        const json_t *item = json_array_get(v, (size_t)i);
        json_int_t a = json_integer_value(item);
        bool alive = w->agents[i].alive;
        if (!json_is_integer(item) || (alive ? a < 0 || a >= n_actions : a != -1))
            return error_set(err, ERR_FORMAT,
                             alive ? "agent %d does no action" : "agent %d is dead", i);
        actions[i] = (int16_t)a;
    }
    if (trace_append(t, w, actions, err) != OK) return err->code;
    world_step(w, &t->rules, actions);
    return OK;
}

static int hash_check(const struct world *w, const json_t *v, struct error *err) {
    char hash[HASH_LEN];
    world_hash(w, hash);
    if (json_is_string(v) && strcmp(json_string_value(v), hash) == 0) return OK;
    return error_set(err, ERR_MISMATCH,
                     "at tick %d the world is not the one that was recorded: '%s' is its hash",
                     w->tick, hash);
}

static int tick_read(struct trace *t, struct world *w, const json_t *v, struct error *err) {
    static const char *const known_keys[] = {"tick", "actions", "hash", NULL};
    const json_t *hash = json_object_get(v, "hash");
    int64_t tick;
    if (keys_check(v, known_keys, err) != OK ||
        integer_read(v, "tick", w->tick + 1, w->tick + 1, &tick, err) != OK ||
        actions_read(t, w, json_object_get(v, "actions"), err) != OK)
        return err->code;
    if (!hash && tick % TRACE_HASH_INTERVAL == 0)
        return error_set(err, ERR_FORMAT, "tick %d has no hash", w->tick);
    return hash ? hash_check(w, hash, err) : OK;
}

static int end_read(struct trace *t, const struct world *w, const json_t *v, struct error *err) {
    static const char *const known_keys[] = {"end", "hash", NULL};
    int64_t tick;
    if (keys_check(v, known_keys, err) != OK ||
        integer_read(v, "end", w->tick, w->tick, &tick, err) != OK)
        return err->code;
    t->closed = true;
    return hash_check(w, json_object_get(v, "hash"), err);
}

static int line_read(struct trace *t, struct world *w, const json_t *v, struct error *err) {
    static const char *const header[] = {"shoal_world", "rules",  "agents", "seed",
                                         "steps",       "policy", "fork",   NULL};
    if (t->closed) return error_set(err, ERR_FORMAT, "the trace has ended, but more follows");
    if (w->n_agents && json_object_get(v, "end")) return end_read(t, w, v, err);
    if (w->n_agents) return tick_read(t, w, v, err);
    if (header_read(t, v, header, err) != OK) return err->code;
    trace_seek(t, w, 0);
    return OK;
}

int trace_parse(struct trace *t, const char *name, const char *text, size_t len,
                struct error *err) {
    struct world *w = xcalloc(1, sizeof *w);
    int rc = OK, n_lines = 0;
    *t = (struct trace){.fork = -1};
    for (const char *line_start = text, *end = text + len, *newline; rc == OK;
         line_start = newline + 1) {
        newline = line_start < end ? memchr(line_start, '\n', (size_t)(end - line_start)) : NULL;
        if (!newline) break; /* a crash left an incomplete line */
        n_lines++;
        json_t *v = json_parse(line_start, (size_t)(newline - line_start), "trace", err);
        rc = v ? line_read(t, w, v, err) : err->code;
        json_decref(v);
    }
    if (rc != OK)
        rc = error_wrap(err, "'%s', line %d", name, n_lines);
    else if (n_lines == 0)
        rc = error_set(err, ERR_FORMAT, "'%s' holds no whole line of a trace", name);
    free(w);
    return rc;
}

int trace_load(struct trace *t, const char *path, struct error *err) {
    struct buf b = {0};
    *t = (struct trace){.fork = -1};
    int rc = file_read(path, FILE_LIMIT, &b, err);
    if (rc == OK) rc = trace_parse(t, path, b.data ? b.data : "", b.len, err);
    buf_release(&b);
    return rc;
}

/* as one JSON object */

json_t *trace_json(const struct trace *t, const struct world *w) {
    char hash[HASH_LEN];
    json_t *v = header_json(t), *ticks = json_array();
    for (int64_t tick = 0; tick < t->n_ticks; tick++) {
        json_t *actions = json_array();
        for (int i = 0; i < t->n_agents; i++)
            json_array_append_new(actions, json_integer(tick_actions(t, tick)[i]));
        json_array_append_new(ticks, actions);
    }
    world_hash(w, hash);
    json_object_set_new(v, "actions", ticks);
    json_object_set_new(v, "hash", json_string(hash));
    return v;
}

int trace_from_json(struct trace *t, const json_t *v, struct error *err) {
    static const char *const known_keys[] = {"shoal_world", "rules", "agents",  "seed", "steps",
                                             "policy",      "fork",  "actions", "hash", NULL};
    const json_t *ticks = json_object_get(v, "actions");
    struct world *w = xcalloc(1, sizeof *w);
    int rc = header_read(t, v, known_keys, err);
    if (rc == OK && !json_is_array(ticks))
        rc = error_set(err, ERR_FORMAT, "'actions' must be a list of ticks");
    if (rc == OK) trace_seek(t, w, 0);
    for (size_t i = 0; rc == OK && i < json_array_size(ticks); i++)
        if ((rc = actions_read(t, w, json_array_get(ticks, i), err)) != OK)
            error_wrap(err, "tick %zu", i + 1);
    if (rc == OK) rc = hash_check(w, json_object_get(v, "hash"), err);
    free(w);
    return rc;
}
