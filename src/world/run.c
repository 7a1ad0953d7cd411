/*
 * run: runs a simulation, generation by generation, and keeps its state and results in a folder.
 *
 * Each generation is evaluated on held-out maps, on which no agent trains, and compared with
 * scripted policies on the same maps.
 */
#define _GNU_SOURCE
#include "eval/eval.h"
#include "store/store.h"
#include "world/internal.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, metavar, ...)                                             \
    {                                                                                              \
        name, type, offsetof(struct simulation_run_options, field), fallback, 0, 0, metavar,       \
            __VA_ARGS__                                                                            \
    }
const struct option_row simulation_run_option_rows[] = {
    ROW("adapter", OPT_LIST, adapters, NULL, "DIR",
        "initial adapters, assigned in turn: adapter folders, or runs of 'shoal world' for all "
        "their adapters; none: untrained ones, also with --watch",
        JOB_ARG_BUILTIN_OR_PATH),
    ROW("runs", OPT_STRING, runs, "runs", "DIR", "folder of runs and of shoal.db",
        JOB_ARG_SERVER_ONLY),
    ROW("out", OPT_STRING, out, NULL, "DIR",
        "folder of the run; export: of the adapter; compare: file of the chart (.svg)",
        JOB_ARG_OUTPUT_PATH),
    ROW("dry-run", OPT_BOOL, dry_run, NULL, NULL,
        "print the size, the memory and the folder of the simulation and stop"),
    {0},
};

static const double SPEED_REPORT_SECONDS = 1;
static const char *const baseline_policies[] = {"rule", "random"};

struct run {
    const struct simulation_request *q;
    const struct simulation_run_callbacks *cb;
    const struct simulation_options *o; /* of the request, or `recorded` */
    struct simulation_options recorded; /* see run_identify */
    struct grid_env *grids;             /* [n_envs] */
    struct environment *envs, **env_list;
    struct environment *const *active_envs; /* env_list, or external environments */
    struct simulation *simulation;
    char *dir, *id;
    bool speaks; /* the agents say words */
    struct store *store;
    FILE *lineage;                       /* lineage.jsonl; NULL: not recorded from the beginning */
    int lock_fd;                         /* lock file of the folder; -1: not locked */
    struct episode_stats *heldout_stats; /* [eval_maps] */
    /* curve: one row per evaluation; the first one is before generation 1 */
    json_t *identity, *curve;
    json_t *baselines; /* rows of the baselines */
    /* state of a generation */
    int map_size; /* see simulation_map_size */
    struct progress bar;
    double reported_at;         /* time of the last speed report */
    int64_t reported_decisions; /* number of decisions at that time */
    struct trace trace;
    struct world *trace_world;       /* the world at the end of the trace */
    struct language_stats *language; /* words in that world; NULL: nothing is said */
    FILE *trace_file;
};

/* opening */

static void envs_init(struct run *r) {
    size_t n = (size_t)r->o->n_envs;
    if (r->q->external) {
        r->active_envs = external_envs_list(r->q->external);
        return;
    }
    r->grids = xcalloc(n, sizeof *r->grids);
    r->envs = xcalloc(n, sizeof *r->envs);
    r->env_list = xcalloc(n, sizeof *r->env_list);
    for (size_t i = 0; i < n; i++) {
        r->grids[i] = (struct grid_env){.rules = r->q->rules,
                                        .teacher = world_policy_find(r->o->teacher),
                                        .n_agents = r->q->agents,
                                        .is_silent = !r->speaks};
        r->envs[i] = grid_env_as_environment(&r->grids[i]);
        r->env_list[i] = &r->envs[i];
    }
    r->active_envs = r->env_list;
}

/* Options of later versions. Where they are 0, a run has the name that it had in version 0.1. */
static const char *const later_options[] = {"curriculum", "exploration-bonus"};

/* Another one, by its stored name: see simulation_options. */
#define KV_KEY "kv"

/* The options that determine a run, under their stored names. The type of keys and values is the
 * one that "auto" stands for; it is not stored if the results are those of version 0.1. */
static json_t *run_options_json(const struct simulation_options *o, enum numeric_class cls) {
    struct error ignored;
    enum dtype kv;
    json_t *v = options_json(simulation_option_rows, o);
    json_object_update_new(v, options_json(learner_option_rows, &o->learn));
    json_object_del(v, "generations");
    if (!o->kv_cache_dtype || kv_cache_dtype_parse(o->kv_cache_dtype, cls, &kv, &ignored) != OK ||
        (kv == DTYPE_F32 && cls == NUMERIC_EXACT))
        json_object_del(v, KV_KEY);
    else
        json_object_set_new(v, KV_KEY, json_string(dtype_name(kv)));
    json_object_set_new(v, "crossover", json_string(stored_value("operator", o->crossover)));
    for (size_t i = 0; i < ARRAY_LEN(later_options); i++)
        if (json_get_number(v, later_options[i]) == 0) json_object_del(v, later_options[i]);
    return v;
}

static json_t *run_identity(const struct run *r, const struct initial_adapters *f) {
    json_t *adapters = json_array();
    for (int i = 0; i < f->n; i++) json_array_append_new(adapters, json_string(f->v[i]->hash));
    bool external = r->q->external != NULL;
    json_t *v = json_pack(
        "{s:s,s:s,s:s,s:i,s:I,s:I,s:o,s:o,s:o}", "model", r->q->m->name, "model_sha256",
        r->q->m->hash, "class", numeric_class_name(r->q->m->cls), "agents", r->q->agents, "steps",
        (json_int_t)r->o->steps, "seed", (json_int_t)r->o->seed, external ? "environment" : "rules",
        external ? external_envs_json(r->q->external) : world_rules_json(r->q->rules), "life",
        run_options_json(r->o, r->q->m->cls), "adapters", adapters);
    if (r->speaks) json_object_set_new(v, "words", json_string("chosen by the policies"));
    return v;
}

/* Sets identity, id and folder by r->o. */
static void run_set_name(struct run *r, const struct initial_adapters *initial) {
    json_decref(r->identity);
    free(r->id);
    free(r->dir);
    r->identity = run_identity(r, initial);
    char *text = json_canonical(r->identity), hash[HASH_LEN];
    sha256_bytes(text, strlen(text), hash);
    r->id = xasprintf("world-%.8s", hash);
    r->dir = r->q->o->out ? xstrdup(r->q->o->out) : path_join(r->q->o->runs, r->id);
    free(text);
}

/* recorded options */

/* Adds the values of a run's record to `to`, for the options of a table that the request leaves at
 * their defaults, and the requested values of the others. */
static void recorded_options_add(const struct option_row *rows, const void *requested,
                                 const void *defaults, const json_t *record, json_t *to) {
    for (const struct option_row *row = rows; row->name; row++) {
        const char *name = option_stored_name(row);
        json_t *v = option_changed(row, requested, defaults)
                        ? option_json(row, requested)
                        : json_copy(json_object_get(record, name));
        if (v) json_object_set_new(to, name, v);
    }
}

/* Fills the options from a record, for which later_options are off unless it has them. */
static int options_read(const struct option_row *rows, void *out, json_t *record,
                        struct error *err) {
    struct yaml y;
    for (size_t i = 0; i < ARRAY_LEN(later_options); i++)
        if (option_find(rows, later_options[i]) && !json_object_get(record, later_options[i]))
            json_object_set_new(record, later_options[i], json_integer(0));
    char *text = json_canonical(record);
    int rc = yaml_parse(&y, "state.json", text, strlen(text), err);
    y.stored = true;
    if (rc == OK) rc = options_from_yaml(rows, out, &y, NULL, err);
    yaml_release(&y);
    free(text);
    return rc;
}

/* Makes r->recorded the options of the run: those of `record` where the request leaves an option at
 * its default, and the requested ones otherwise. */
static int recorded_options_read(struct run *r, const json_t *record, struct error *err) {
    const struct simulation_options *requested = &r->q->o->simulation;
    struct simulation_options defaults = {0}, *o = &r->recorded;
    json_t *simulation = json_object(), *learner = json_object();
    options_default(simulation_option_rows, &defaults);
    options_default(learner_option_rows, &defaults.learn);
    options_default(simulation_option_rows, o);
    options_default(learner_option_rows, &o->learn);
    o->steps = requested->steps;
    o->seed = requested->seed;
    o->limits = requested->limits;
    recorded_options_add(simulation_option_rows, requested, &defaults, record, simulation);
    recorded_options_add(learner_option_rows, &requested->learn, &defaults.learn, record, learner);
    int rc = options_read(simulation_option_rows, o, simulation, err);
    if (rc == OK && !json_object_get(simulation, KV_KEY)) {
        free(o->kv_cache_dtype);
        o->kv_cache_dtype = NULL;
    }
    if (rc == OK) rc = options_read(learner_option_rows, &o->learn, learner, err);
    if (rc == OK) rc = simulation_options_check(o, err);
    if (rc == OK && r->q->external &&
        (o->n_envs != requested->n_envs || strcmp(o->learn.learn, requested->learn.learn) != 0))
        rc = error_set(err, ERR_USAGE, "its run has --num-envs %lld and --learn %s: give both",
                       (long long)o->n_envs, o->learn.learn);
    if (rc == OK) r->o = o;
    options_release(simulation_option_rows, &defaults);
    options_release(learner_option_rows, &defaults.learn);
    json_decref(simulation);
    json_decref(learner);
    return rc;
}

/* Names the options that the run continues with and that the request has otherwise. */
static void recorded_options_report(const struct run *r) {
    struct buf b = {0};
    const enum numeric_class cls = r->q->m->cls;
    json_t *requested = run_options_json(&r->q->o->simulation, cls),
           *used = run_options_json(r->o, cls), *v;
    const char *key;
    json_object_foreach (used, key, v) {
        if (json_equal(v, json_object_get(requested, key))) continue;
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
        buf_printf(&b, "%s%s %s", b.len ? ", " : "", key, text);
        free(text);
    }
    if (b.len) log_info("'%s' continues with the options of its run: %s", r->dir, b.data);
    buf_release(&b);
    json_decref(requested);
    json_decref(used);
}

/* Defaults of version 0.1 that are others now, under their stored names. null: a later version
 * added the option. */
static const char earlier_defaults[] =
    "{\"minds\": 0, \"held-out\": 4, \"elites\": 4, \"temperature\": 2.0, \"every\": 10, "
    "\"batch\": 4, \"horizon\": 16, \"discount\": 0.9, \"share\": 0.0, \"entropy\": 0.05, "
    "\"lr\": 0.001, \"warmup\": 20, \"curriculum\": null, \"kv\": null}";

/* Whether version 0.1 gave a run this identity for the command of the request, whose options are
 * those of the run, or are at the defaults where the run has earlier defaults. */
static bool is_earlier_run(const struct run *r, const json_t *identity) {
    struct error ignored;
    struct simulation_options defaults = {0};
    options_default(simulation_option_rows, &defaults);
    options_default(learner_option_rows, &defaults.learn);
    json_t *earlier = json_parse(earlier_defaults, strlen(earlier_defaults), "defaults", &ignored),
           *now = run_options_json(&defaults, r->q->m->cls),
           *requested = json_deep_copy(r->identity), *options = json_object_get(requested, "life"),
           *v;
    const json_t *record = json_object_get(identity, "life");
    const char *key;
    CHECK(earlier);
    json_object_foreach (earlier, key, v) {
        const json_t *recorded = json_object_get(record, key);
        if (!json_equal(json_object_get(options, key), json_object_get(now, key))) continue;
        if (json_is_null(v) && !recorded) json_object_del(options, key);
        if (recorded && json_equal(recorded, v)) json_object_set(options, key, v);
    }
    bool same = json_equal(requested, identity);
    json_decref(earlier);
    json_decref(now);
    json_decref(requested);
    options_release(simulation_option_rows, &defaults);
    options_release(learner_option_rows, &defaults.learn);
    return same;
}

/* The state of the run in a folder, a new reference, and its identity, borrowed; NULL: none. */
static json_t *run_state(const char *dir, const json_t **identity) {
    struct error ignored;
    json_t *state = simulation_read_state(dir, &ignored);
    *identity = json_object_get(json_object_get(state, "extra"), "identity");
    return state;
}

/* The folder of a run that the command of the request began in version 0.1, malloc'ed; NULL: none.
 * Of several, the first by name. */
static char *earlier_run_find(const struct run *r) {
    char *found = NULL;
    DIR *d = opendir(r->q->o->runs);
    for (const struct dirent *f; d && (f = readdir(d));) {
        const json_t *identity;
        if (strncmp(f->d_name, "world-", 6) != 0) continue;
        char *dir = path_join(r->q->o->runs, f->d_name);
        json_t *state = run_state(dir, &identity);
        bool better = identity && (!found || strcmp(dir, found) < 0) && is_earlier_run(r, identity);
        json_decref(state);
        free(better ? found : dir);
        if (better) found = dir;
    }
    if (d) closedir(d);
    return found;
}

/* Whether the folder holds this run. */
static bool state_exists(const struct run *r) {
    const json_t *identity;
    json_t *state = run_state(r->dir, &identity);
    bool found = identity && json_equal(identity, r->identity);
    json_decref(state);
    return found;
}

/* In worlds with a vocabulary the agents of earlier versions never spoke; the identities of such
 * runs have no "words", and they continue without. */
static void run_set_speaks(struct run *r, const struct initial_adapters *initial) {
    r->speaks = !r->q->external && r->q->rules->vocabulary && !state_exists(r);
    if (r->speaks) run_set_name(r, initial);
}

/* Sets options, identity and folder. A run that exists keeps its options. */
static int run_identify(struct run *r, const struct initial_adapters *initial, struct error *err) {
    if (!model_hash(r->q->m, err)) return err->code;
    run_set_name(r, initial);
    char *dir = r->q->o->out          ? xstrdup(r->q->o->out)
                : path_is_dir(r->dir) ? NULL
                                      : earlier_run_find(r);
    const json_t *identity = NULL;
    json_t *state = dir ? run_state(dir, &identity) : NULL;
    const json_t *record = json_object_get(identity, "life");
    int rc = OK;
    if (json_is_object(record)) {
        rc = recorded_options_read(r, record, err);
        if (rc == OK) run_set_name(r, initial);
        if (rc == OK) recorded_options_report(r);
        if (rc != OK) error_wrap(err, "'%s'", dir);
    }
    json_decref(state);
    free(dir);
    if (rc == OK) run_set_speaks(r, initial);
    return rc;
}

static int store_record_open(struct run *r, struct error *err) {
    char *path = path_join(r->q->o->runs, "shoal.db");
    int rc = dir_make(r->q->o->runs, err);
    if (rc == OK && !(r->store = store_open(path, err))) rc = err->code;
    free(path);
    if (rc != OK) return error_wrap(err, "the run cannot be recorded; name a folder with --runs");
    json_t *recipe = json_copy(r->identity);
    if (r->q->o->out) json_object_set_new(recipe, "out", json_from_path(r->dir));
    rc = store_run_begin(r->store, r->id, "world", recipe, err);
    json_decref(recipe);
    return rc;
}

/* Resumes from the folder's state, which must belong to this run. Does nothing if there is no
 * state. */
static int state_resume(struct run *r, struct error *err) {
    struct error ignored;
    json_t *state = simulation_read_state(r->dir, &ignored);
    if (!state && ignored.code != ERR_MISSING)
        return error_set(err, ignored.code, "%s", ignored.text);
    if (!state) return OK;
    const json_t *extra = json_object_get(state, "extra");
    int rc = OK;
    if (!json_equal(json_object_get(extra, "identity"), r->identity))
        rc = error_set(err, ERR_MISMATCH,
                       "'%s' holds a run of other options; name another folder with --out", r->dir);
    if (rc == OK) rc = simulation_load(r->simulation, r->dir, state, err);
    if (rc == OK) {
        json_decref(r->curve);
        r->curve = json_deep_copy(json_object_get(extra, "curve"));
        log_info("run %s continues after generation %d", r->id,
                 simulation_generations(r->simulation));
    }
    json_decref(state);
    return rc;
}

/* evaluation */

static struct stats_interval field_mean(const struct episode_stats *v, int64_t n, size_t field) {
    double *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++) memcpy(&x[i], (const uint8_t *)&v[i] + field, sizeof x[i]);
    struct stats_interval out = stats_mean_interval(x, n);
    free(x);
    return out;
}

/* The fields of episode_stats that are reported. */
static const struct {
    const char *name;
    size_t field;
    bool grid_only; /* external environments do not report it */
} stat_fields[] = {{"delivered", offsetof(struct episode_stats, delivered), true},
                   {"collected", offsetof(struct episode_stats, collected), true},
                   {"fitness", offsetof(struct episode_stats, fitness), false},
                   {"reward", offsetof(struct episode_stats, reward), false},
                   {"alive", offsetof(struct episode_stats, alive), true}};

const char *simulation_main_metric(const struct simulation_request *q) {
    return q->external ? "reward" : "delivered";
}

/* Means and confidence intervals of the fields over n episodes. */
static json_t *stats_json(const struct run *r, const struct episode_stats *v, int64_t n) {
    json_t *out = json_object();
    for (size_t i = 0; i < ARRAY_LEN(stat_fields); i++)
        if (!stat_fields[i].grid_only || !r->q->external)
            json_object_set_new(out, stat_fields[i].name,
                                stats_interval_json(field_mean(v, n, stat_fields[i].field)));
    return out;
}

static void baseline_row_add(struct run *r, const char *policy) {
    json_t *held_out = stats_json(r, r->heldout_stats, r->o->eval_maps);
    json_array_append_new(r->baselines,
                          json_pack("{s:s,s:o}", "policy", policy, "held_out", held_out));
}

/* Samples actions as the policy `random` does; false: no agent is active. */
static bool random_actions_sample(const struct environment *e, uint64_t seed, int tick,
                                  int16_t *actions, struct buf *scratch) {
    bool any = false;
    for (int i = 0; i < e->n_agents; i++) {
        struct rng rng = world_policy_rng(seed, i, tick);
        scratch->len = 0;
        bool acts =
            !(e->is_truncated && e->is_truncated(e->ctx, i)) && e->prompt(e->ctx, i, scratch);
        actions[i] = acts ? (int16_t)rng_below(&rng, (uint32_t)e->n_actions) : -1;
        any |= acts;
    }
    return any;
}

/* Runs an episode of random actions, the only baseline in an external environment. */
static int random_rollout(struct run *r, uint64_t seed, struct episode_stats *out,
                          struct error *err) {
    const struct environment *e = r->active_envs[0];
    int16_t actions[ENV_MAX_AGENTS];
    double *rewards = xcalloc(2 * (size_t)e->n_agents, sizeof *rewards), sum = 0,
           *totals = rewards + e->n_agents;
    struct buf scratch = {0};
    int rc = e->reset(e->ctx, seed, err);
    for (int tick = 0; rc == OK && tick < r->o->steps; tick++) {
        if (!random_actions_sample(e, seed, tick, actions, &scratch)) break;
        rc = e->step(e->ctx, actions, rewards, err);
        for (int i = 0; i < e->n_agents; i++) totals[i] += rewards[i];
    }
    for (int i = 0; i < e->n_agents; i++) sum += totals[i] * (1.0 / e->n_agents);
    *out = (struct episode_stats){.fitness = sum, .reward = sum};
    buf_release(&scratch);
    free(rewards);
    return rc;
}

static int random_baseline_evaluate(struct run *r, struct error *err) {
    int rc = OK;
    for (int64_t map = 0; rc == OK && map < r->o->eval_maps; map++)
        rc = random_rollout(r, simulation_held_out_seed((int)map), &r->heldout_stats[map], err);
    if (rc == OK) baseline_row_add(r, "random");
    return rc;
}

static void baseline_evaluate(struct run *r, const char *name) {
    const struct world_policy *policy = world_policy_find(name);
    int16_t actions[WORLD_AGENTS_MAX];
    struct world *w = xcalloc(1, sizeof *w);
    for (int64_t map = 0; map < r->o->eval_maps; map++) {
        uint64_t seed = simulation_held_out_seed((int)map);
        world_reset(w, r->q->rules, r->q->agents, seed);
        while (!world_terminated(w) && w->tick < r->o->steps) {
            world_policy_act(policy, w, r->q->rules, seed, actions);
            world_step(w, r->q->rules, actions);
        }
        r->heldout_stats[map] = world_episode_stats(w);
    }
    free(w);
    baseline_row_add(r, name);
}

static int baselines_evaluate(struct run *r, struct error *err) {
    if (r->q->external) return random_baseline_evaluate(r, err);
    for (size_t i = 0; i < ARRAY_LEN(baseline_policies); i++)
        baseline_evaluate(r, baseline_policies[i]);
    return OK;
}

/* The outcomes of all policies in the generation, and the numbers of collapsed policies and
 * rollbacks. */
static json_t *outcomes_json(const struct run *r) {
    int n = simulation_n_policies(r->simulation), collapsed = 0, rollbacks = 0;
    double entropy = 0;
    int64_t n_decisions = 0;
    struct episode_stats *v = xcalloc((size_t)n, sizeof *v);
    for (int i = 0; i < n; i++) {
        const struct policy_record *m = simulation_policy(r->simulation, i);
        v[i] = m->outcome;
        n_decisions += m->health.decisions;
        entropy += m->health.entropy / n;
        collapsed += m->health.collapsed;
        rollbacks += m->health.rollbacks;
    }
    json_t *out = stats_json(r, v, n);
    json_object_update_new(out,
                           json_pack("{s:i,s:i,s:s}", "collapsed", collapsed, "rollbacks",
                                     rollbacks, "best", simulation_policy(r->simulation, 0)->name));
    if (n_decisions) json_object_set_new(out, "entropy", json_real(entropy));
    if (r->language) json_object_set_new(out, "language", language_stats_json(r->language));
    if (r->map_size) json_object_set_new(out, "map_size", json_integer(r->map_size));
    free(v);
    return out;
}

/* the report */

static void chart_add(struct buf *page, const struct run *r, const char *part, const char *key,
                      const char *title) {
    enum { LINES = 1 + ARRAY_LEN(baseline_policies) };
    struct curve *c = xcalloc(LINES, sizeof *c), *spread = xcalloc(LINES, sizeof *spread);
    const char *names[LINES] = {"policies"};
    int lines = 1;
    for (; strcmp(part, "held_out") == 0 && lines <= (int)json_array_size(r->baselines); lines++)
        names[lines] = json_get_string(json_array_get(r->baselines, (size_t)lines - 1), "policy");
    size_t i;
    json_t *row;
    json_array_foreach (r->curve, i, row) {
        const json_t *v = json_object_get(json_object_get(row, part), key);
        double x = json_get_number(row, "decisions");
        if (!v) continue;
        bool is_number = json_is_number(v);
        double y = is_number ? json_number_value(v) : json_get_number(v, "value");
        curve_add(&c[0], x, y);
        curve_add(&spread[0], x, is_number ? 0 : fmax(0, json_get_number(v, "hi") - y));
        for (int k = 1; k < lines; k++) {
            const json_t *b = json_object_get(json_array_get(r->baselines, (size_t)k - 1), part);
            curve_add(&c[k], x, json_get_number(json_object_get(b, key), "value"));
            curve_add(&spread[k], x, 0);
        }
    }
    buf_printf(page, "<h2>%s</h2>\n", title);
    plot_bands(page, title, "decisions", c, spread, names, lines);
    free(c);
    free(spread);
}

static json_t *policies_table(const struct run *r) {
    json_t *rows = json_array();
    for (int i = 0; i < simulation_n_policies(r->simulation); i++) {
        const struct policy_record *m = simulation_policy(r->simulation, i);
        json_array_append_new(
            rows, json_pack("{s:s,s:s,s:s,s:f,s:f,s:f,s:f,s:b,s:i}", "policy", m->name, "parents",
                            m->parents[0][0] ? m->parents[0] : "", "and", m->parents[1], "fitness",
                            m->outcome.fitness, "delivered", m->outcome.delivered, "reward",
                            m->outcome.reward, "entropy", m->health.entropy, "collapsed",
                            (int)m->health.collapsed, "rollbacks", m->health.rollbacks));
    }
    return rows;
}

/* A table of the mutual information of words and situations in the last generation. */
static void language_table_add(struct buf *page, const struct run *r) {
    const json_t *row = json_array_get(r->curve, json_array_size(r->curve) - 1),
                 *language = json_object_get(json_object_get(row, "lived"), "language");
    if (!language) return;
    buf_puts(page, "<h2>Words of the last generation: mutual information in bits, and with each "
                   "agent's words shifted in time</h2>\n");
    html_table(page, json_object_get(language, "pairs"));
}

static int report_write(const struct run *r, struct error *err) {
    struct buf page = {0};
    char *path = path_join(r->dir, "report.html"), *title = xasprintf("Shoal world %s", r->id);
    json_t *policies = policies_table(r);
    html_page_open(&page, title);
    if (r->q->external) {
        chart_add(&page, r, "held_out", "reward", "Reward of an agent, on held-out maps");
    } else {
        chart_add(&page, r, "held_out", "delivered", "Delivered by an agent, on held-out maps");
        chart_add(&page, r, "held_out", "fitness", "Fitness, on held-out maps");
    }
    chart_add(&page, r, "lived", "entropy", "Entropy of the policy, nats");
    buf_puts(&page, "<h2>Policies of the last generation</h2>\n");
    html_table(&page, policies);
    language_table_add(&page, r);
    buf_puts(&page, "<h2>The run</h2>\n");
    html_table(&page, r->identity);
    html_page_close(&page);
    int rc = file_write(path, page.data, page.len, err);
    buf_release(&page);
    json_decref(policies);
    free(title);
    free(path);
    return rc;
}

static void rows_add(const json_t *rows, struct buf *out) {
    size_t i;
    json_t *row;
    json_array_foreach (rows, i, row) {
        char *text = json_canonical(row);
        buf_printf(out, "%s\n", text);
        free(text);
    }
}

/* Writes the rows of the baselines, then those of the generations. */
static int curve_write(const struct run *r, struct error *err) {
    struct buf b = {0};
    rows_add(r->baselines, &b);
    rows_add(r->curve, &b);
    char *path = path_join(r->dir, "curve.jsonl");
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(path);
    return rc;
}

/* generations */

/* Saves the state first: the other files can be written again from it. */
static int generation_save(struct run *r, struct error *err) {
    json_t *extra = json_pack("{s:O,s:O}", "identity", r->identity, "curve", r->curve);
    const json_t *row = json_array_get(r->curve, json_array_size(r->curve) - 1);
    int rc = simulation_save(r->simulation, r->dir, extra, err);
    if (rc == OK && r->lineage && simulation_generations(r->simulation) > 0)
        rc = run_lineage_append(r->simulation, !r->q->external, r->lineage, err);
    if (rc == OK)
        rc = store_metric_put(r->store, r->id, simulation_generations(r->simulation), row, err);
    if (rc == OK) rc = curve_write(r, err);
    if (rc == OK) rc = report_write(r, err);
    json_decref(extra);
    return rc;
}

/* Reports the means over the held-out maps as metrics; an external environment has only fitness and
 * reward. */
static void generation_metrics_report(const json_t *row) {
    static const struct {
        const char *name, *of;
    } metrics[] = {{"world_deliveries", "delivered"},
                   {"world_fitness", "fitness"},
                   {"world_reward", "reward"},
                   {"world_alive", "alive"}};
    struct process_metric v[1 + ARRAY_LEN(metrics)] = {
        {"world_generation", json_get_number(row, "generation")}};
    int n = 1;
    for (size_t i = 0; i < ARRAY_LEN(metrics); i++) {
        const json_t *x = json_object_get(json_object_get(row, "held_out"), metrics[i].of);
        if (x) v[n++] = (struct process_metric){metrics[i].name, json_get_number(x, "value")};
    }
    process_metrics_report(v, n);
}

static int generation_evaluate(struct run *r, struct error *err) {
    int rc = simulation_evaluate(r->simulation, r->heldout_stats, err),
        g = simulation_generations(r->simulation);
    if (rc != OK) return rc;
    json_t *row = json_pack("{s:i,s:I,s:o}", "generation", g, "decisions",
                            (json_int_t)simulation_decisions(r->simulation), "held_out",
                            stats_json(r, r->heldout_stats, r->o->eval_maps));
    if (g > 0) json_object_set_new(row, "lived", outcomes_json(r));
    json_array_append_new(r->curve, row);
    generation_metrics_report(row);
    rc = generation_save(r, err);
    if (rc == OK) r->cb->row(r->cb->ctx, row);
    return rc;
}

/* Opens a log of the actions in an external environment. They cannot be replayed here, so the log
 * is not a trace of a world. */
static int actions_log_open(struct run *r, const char *path, struct error *err) {
    char *text = json_canonical(json_object_get(r->identity, "environment"));
    uint64_t seed = simulation_seed((uint64_t)r->o->seed, simulation_generations(r->simulation), 0);
    r->trace_file = fopen(path, "we");
    if (r->trace_file)
        fprintf(r->trace_file, "{\"environment\":%s,\"seed\":%llu}\n", text,
                (unsigned long long)seed);
    free(text);
    return r->trace_file ? OK : error_errno(err, "cannot write '%s'", path);
}

static int actions_log_write(struct run *r, int64_t tick, struct error *err) {
    const int16_t *actions = simulation_actions(r->simulation);
    fprintf(r->trace_file, "{\"tick\":%lld,\"actions\":[", (long long)tick);
    for (int i = 0; i < r->q->agents; i++) fprintf(r->trace_file, "%s%d", i ? "," : "", actions[i]);
    fprintf(r->trace_file, "]}\n");
    return ferror(r->trace_file) ? error_errno(err, "cannot write the log of actions") : OK;
}

static int actions_log_close(struct run *r, int rc, struct error *err) {
    bool good = !r->trace_file || fclose(r->trace_file) == 0;
    r->trace_file = NULL;
    return rc == OK && !good ? error_errno(err, "cannot write the log of actions") : rc;
}

static int world_trace_open(struct run *r, const char *path, struct error *err) {
    int g = simulation_generations(r->simulation);
    struct world_rules rules = *r->q->rules; // the trace copies it
    if (r->map_size) rules.size = r->map_size;
    int rc = trace_init(&r->trace, &rules, r->q->agents,
                        simulation_seed((uint64_t)r->o->seed, g, 0), r->o->steps, r->id, err);
    if (rc == OK) trace_seek(&r->trace, r->trace_world, 0);
    if (rc == OK && !(r->trace_file = trace_create(&r->trace, path, err))) rc = err->code;
    return rc;
}

static int trace_begin(struct run *r, struct error *err) {
    char *path = xasprintf("%s/trace-%d.jsonl", r->dir, simulation_generations(r->simulation) + 1);
    language_stats_free(r->language);
    r->language = r->speaks ? language_stats_new() : NULL;
    int rc = r->q->external ? actions_log_open(r, path, err) : world_trace_open(r, path, err);
    free(path);
    return rc;
}

static int trace_tick(struct run *r, int64_t tick, struct error *err) {
    if (r->q->external) return actions_log_write(r, tick, err);
    if (world_terminated(r->trace_world)) return OK; // the other worlds may continue
    if (r->language)
        language_stats_add(r->language, r->trace_world, r->q->rules,
                           simulation_actions(r->simulation));
    int rc = trace_append(&r->trace, r->trace_world, simulation_actions(r->simulation), err);
    if (rc == OK) trace_seek(&r->trace, r->trace_world, r->trace.n_ticks);
    return rc == OK ? trace_write_tick(&r->trace, r->trace_world, r->trace_file, err) : rc;
}

static int trace_end(struct run *r, int rc, struct error *err) {
    if (r->q->external) return actions_log_close(r, rc, err);
    if (r->trace_file && rc == OK)
        rc = trace_close(r->trace_world, r->trace_file, err);
    else if (r->trace_file)
        fclose(r->trace_file);
    r->trace_file = NULL;
    trace_release(&r->trace);
    memset(r->trace_world, 0, sizeof *r->trace_world);
    return rc;
}

/* Reports the speed since the last report, if that report is more than `seconds` ago. */
static void speed_report(struct run *r, double seconds) {
    double now = clock_now();
    int64_t decisions = simulation_decisions(r->simulation);
    if (now - r->reported_at <= seconds) return;
    double speed = (double)(decisions - r->reported_decisions) / (now - r->reported_at);
    process_metrics_report((const struct process_metric[]){{"world_decisions_per_second", speed}},
                           1);
    r->reported_at = now;
    r->reported_decisions = decisions;
}

/* Shows the progress and, in the grid environment, the deliveries per agent so far in the first
 * world of the generation. */
static void progress_show(struct run *r, int64_t ticks) {
    char note[48] = "";
    const struct world *w = r->trace_world;
    if (!r->q->external && w->n_agents)
        snprintf(note, sizeof note, "delivered %.2f", world_episode_stats(w).delivered);
    progress_update(&r->bar, ticks, *note ? note : NULL);
}

static int generation_simulate(struct run *r, struct error *err) {
    int64_t before = simulation_generations(r->simulation) * r->o->steps;
    double started_at = r->reported_at = clock_now();
    r->reported_decisions = simulation_decisions(r->simulation);
    r->map_size = simulation_map_size(r->simulation);
    int rc = trace_begin(r, err), n = 1;
    if (rc == OK) rc = simulation_begin_generation(r->simulation, NULL, err);
    for (int64_t tick = 1; rc == OK && (n = simulation_step(r->simulation, err)) > 0; tick++) {
        rc = trace_tick(r, tick, err);
        progress_show(r, before + tick);
        speed_report(r, SPEED_REPORT_SECONDS);
        if (rc == OK) rc = log_check_cancelled(err);
    }
    if (r->reported_at == started_at) speed_report(r, 0);
    rc = trace_end(r, n < 0 ? n : rc, err);
    if (rc == OK) simulation_end_generation(r->simulation);
    return rc;
}

static int generations_run(struct run *r, struct error *err) {
    int rc = json_array_size(r->curve) ? OK : generation_evaluate(r, err);
    progress_start(&r->bar, "simulation", r->o->generations * r->o->steps);
    while (rc == OK && simulation_generations(r->simulation) < r->o->generations) {
        rc = generation_simulate(r, err);
        if (rc == OK) rc = generation_evaluate(r, err);
    }
    progress_finish(&r->bar, NULL);
    return rc;
}

/* Refuses --max-model-len if the prompts of a first tick are longer. Those of another program are
 * not known. */
static int context_check(const struct run *r, struct error *err) {
    const struct simulation_request *q = r->q;
    const struct engine_limits *limits = &r->o->limits;
    if (q->external || !limits->max_len) return OK;
    struct world *w = xcalloc(1, sizeof *w);
    struct token_ids ids = {0};
    struct buf text = {0};
    int32_t longest = 0;
    world_reset(w, q->rules, q->agents, simulation_held_out_seed(0));
    for (int i = 0; i < q->agents; i++) {
        ids.n = 0;
        text.len = 0;
        world_prompt(w, q->rules, i, &text);
        tokenizer_encode(q->m->tok, text.data, text.len, TOKENIZER_ADD_BOS, &ids);
        longest = MAX(longest, ids.n);
    }
    longest += strcmp(r->o->decode, "text") == 0 ? POLICY_TEXT_TOKENS : 1;
    token_ids_release(&ids);
    buf_release(&text);
    free(w);
    return engine_limits_require(limits, longest, "a prompt of this world with its reply", err);
}

static int run_open(struct run *r, const struct initial_adapters *initial, struct error *err) {
    if (run_identify(r, initial, err) != OK || context_check(r, err) != OK) return err->code;
    envs_init(r);
    r->curve = json_array();
    r->baselines = json_array();
    r->heldout_stats = xcalloc((size_t)r->o->eval_maps, sizeof *r->heldout_stats);
    r->trace_world = xcalloc(1, sizeof *r->trace_world);
    r->simulation =
        simulation_new(r->q->m, r->o, r->active_envs, initial->v, initial->n, r->q->pool, err);
    int rc = !r->simulation ? err->code
             : r->q->o->out ? dir_make(r->dir, err)
                            : dir_make_private(r->dir, err);
    if (rc == OK && (r->lock_fd = dir_lock(r->dir, "run", err)) < 0) rc = r->lock_fd;
    return rc == OK ? store_record_open(r, err) : rc;
}

static void run_release(struct run *r) {
    simulation_free(r->simulation);
    store_close(r->store);
    if (r->lineage) fclose(r->lineage);
    if (r->dir) dir_unlock(r->lock_fd, r->dir);
    language_stats_free(r->language);
    options_release(simulation_option_rows, &r->recorded);
    options_release(learner_option_rows, &r->recorded.learn);
    json_decref(r->identity);
    json_decref(r->curve);
    json_decref(r->baselines);
    free(r->heldout_stats);
    free(r->trace_world);
    free(r->grids);
    free(r->envs);
    free(r->env_list);
    free(r->dir);
    free(r->id);
}

static json_t *run_plan_json(struct run *r, const struct initial_adapters *initial,
                             struct train_memory *memory, struct error *err) {
    if (run_identify(r, initial, err) != OK || context_check(r, err) != OK ||
        simulation_memory_plan(&r->q->m->config, r->q->m->cls, r->o, r->q->agents, initial->n,
                               r->q->used, r->q->pool, memory, err) != OK)
        return NULL;
    int64_t n_agents = r->o->n_envs * r->q->agents,
            n_policies = simulation_policy_count(r->o, r->q->agents);
    json_t *v = json_pack(
        "{s:s,s:s,s:b,s:I,s:I,s:I,s:I,s:I,s:s,s:s}", "run", r->id, "writes", r->dir, "continues",
        (int)path_is_dir(r->dir), "minds", (json_int_t)n_policies, "agents", (json_int_t)n_agents,
        "ticks", (json_int_t)r->o->steps, "generations", (json_int_t)r->o->generations,
        "decisions, at most", (json_int_t)(n_agents * r->o->steps * r->o->generations), "learns",
        r->o->learn.learn, "records", r->q->o->runs);
    json_object_set_new(v, "memory", train_memory_json(memory));
    return v;
}

/* Passes on the rows of the baselines and of the generations of a resumed run. */
static void past_rows_report(const struct run *r, const struct initial_adapters *initial) {
    bool external = r->q->external != NULL;
    size_t i;
    json_t *row, *manifest = world_manifest(r->q->m, initial, external ? "environment" : "rules",
                                            external ? external_envs_json(r->q->external)
                                                     : world_rules_json(r->q->rules),
                                            r->o->seed);
    if (r->cb->begin) r->cb->begin(r->cb->ctx, r->id, r->o, manifest);
    json_decref(manifest);
    json_array_foreach (r->baselines, i, row) r->cb->row(r->cb->ctx, row);
    json_array_foreach (r->curve, i, row) r->cb->row(r->cb->ctx, row);
}

static int run_execute(struct run *r, const struct initial_adapters *initial, struct error *err) {
    struct error ignored;
    int rc = run_open(r, initial, err);
    if (rc == OK) rc = state_resume(r, err);
    if (rc == OK) rc = run_lineage_open(r->simulation, r->dir, !r->q->external, &r->lineage, err);
    if (rc == OK) {
        log_info("run %s in %s; if interrupted, the same command continues it", r->id, r->dir);
        rc = baselines_evaluate(r, err);
    }
    if (rc == OK) {
        past_rows_report(r, initial);
        rc = generations_run(r, err);
    }
    bool paused = rc != OK && log_check_cancelled(&ignored) != OK;
    if (r->store)
        store_run_status(r->store, r->id,
                         rc == OK ? "done"
                         : paused ? "paused"
                                  : "failed",
                         &ignored);
    if (rc == OK)
        log_info(
            "curves: '%s/report.html'; export the best adapter: shoal world export %s --out DIR",
            r->dir, r->dir);
    return rc;
}

int simulation_run(const struct simulation_request *q, const struct simulation_run_callbacks *cb,
                   struct error *err) {
    struct run r = {.q = q, .cb = cb, .o = &q->o->simulation, .lock_fd = -1};
    struct initial_adapters initial;
    int rc = initial_adapters_open(&initial, &q->o->adapters, q->m, err);
    if (rc == OK) rc = run_execute(&r, &initial, err);
    run_release(&r);
    initial_adapters_release(&initial);
    return rc;
}

json_t *simulation_run_plan(const struct simulation_request *q, struct train_memory *memory,
                            struct error *err) {
    struct run r = {.q = q, .o = &q->o->simulation, .lock_fd = -1};
    struct initial_adapters initial;
    int rc = initial_adapters_open(&initial, &q->o->adapters, q->m, err);
    json_t *plan = rc == OK ? run_plan_json(&r, &initial, memory, err) : NULL;
    run_release(&r);
    initial_adapters_release(&initial);
    return plan;
}
