/*
 * cmd_world: `shoal world`: measures policies on the same maps; shows or records one world; loads
 * any tick of a trace and continues from it; serves the environment to other programs; and runs
 * simulations of a model's agents.
 *
 * A struct world_player chooses the actions: a scripted policy, another program, or the model.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "cli/world_report.h"
#include "cli/world_viewer.h"
#include "eval/eval.h"
#include "world/world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    char *world, *policy_pipe, *env_pipe, *record, *replay, *max_memory;
    struct strings policies;
    int64_t agents, steps, maps, seed, at, at_decisions;
    double timeout;
    struct engine_limits limits;
    bool watch, do_continue, pipe, best;
    char *adapter_name;
    struct world_rules rules; /* rules of --world; flags override them */
    struct simulation_run_options simulation;
};
#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, __VA_ARGS__ }
static const struct option_row command_rows[] = {
    ROW("world", OPT_STRING, world, NULL, 0, 0, "NAME",
        "rules: repaired (default), legacy, or a YAML file, such as those in worlds/",
        JOB_ARG_BUILTIN_OR_PATH),
    ROW("policy", OPT_LIST, policies, NULL, 0, 0, "NAME",
        "policies that act: rule (the default), reflex, random, mock; several are compared on the "
        "same maps",
        JOB_ARG_TEXT),
    ROW("policy-pipe", OPT_STRING, policy_pipe, NULL, 0, 0, "CMD",
        "program that acts as the policy: reads observations, writes actions, one line per tick",
        JOB_ARG_FORBIDDEN),
    ROW("env-pipe", OPT_STRING, env_pipe, NULL, 0, 0, "CMD",
        "program that acts as the environment of the model's agents: answers reset and step",
        JOB_ARG_FORBIDDEN),
    ROW("max-memory", OPT_STRING, max_memory, NULL, 0, 0, "SIZE",
        "memory limit of a simulation, such as 500M or 2G; results do not depend on it",
        JOB_ARG_TEXT),
    ENGINE_LIMIT_ROWS(struct options, limits),
    ROW("timeout", OPT_FLOAT, timeout, "10", 0.01, 1e6, "S",
        "seconds that such a program may take for an answer"),
    ROW("agents", OPT_INT, agents, NULL, 0, WORLD_AGENTS_MAX, "N", "number of agents; default 20"),
    ROW("steps", OPT_INT, steps, NULL, 0, TRACE_TICKS, "N",
        "maximum ticks of an episode; default 500"),
    ROW("maps", OPT_INT, maps, NULL, 0, 100000, "N",
        "number of maps, with seeds SEED, SEED + 1 …; default 20, or 1 with --watch or --record"),
    ROW("seed", OPT_INT, seed, NULL, 0, 1e15, "N", "seed of the first map; default 1"),
    ROW("watch", OPT_BOOL, watch, NULL, 0, 0, NULL,
        "show the world live; without a terminal, print its last state"),
    ROW("record", OPT_STRING, record, NULL, 0, 0, "FILE", "write a trace of the episode",
        JOB_ARG_OUTPUT_PATH),
    ROW("replay", OPT_STRING, replay, NULL, 0, 0, "FILE", "load a trace instead of a new world",
        JOB_ARG_INPUT_PATH),
    ROW("at", OPT_INT, at, "-1", -1, TRACE_TICKS, "TICK",
        "tick of the trace to load; -1: the last"),
    ROW("continue", OPT_BOOL, do_continue, NULL, 0, 0, NULL,
        "continue from this tick with --policy; --record writes the fork"),
    ROW("pipe", OPT_BOOL, pipe, NULL, 0, 0, NULL,
        "serve the environment to another program: JSON lines on stdin and stdout",
        JOB_ARG_FORBIDDEN),
    ROW("best", OPT_BOOL, best, NULL, 0, 0, NULL, "export: the fittest adapter (the default)"),
    ROW("adapter-name", OPT_STRING, adapter_name, NULL, 0, 0, "NAME", "export: the adapter NAME",
        JOB_ARG_TEXT),
    ROW("at-decisions", OPT_INT, at_decisions, NULL, 0, 1e15, "N",
        "compare: the results of every run after N decisions, interpolated between generations; "
        "0: at its end"),
    {0},
};

enum { MAPS = 20 };

static const char *world_name(const struct options *o) {
    return o->world ? o->world : "repaired";
}

/* Loads rules by name, or from a file, which may be in the folder of the program. */
static int rules_load(struct world_rules *r, const char *name, struct error *err) {
    char *path = cli_is_recipe(name) ? cli_find_file(name) : xstrdup(name);
    int rc = world_rules_load(r, path, err);
    free(path);
    return rc;
}

static int base_load(void *options, struct error *err) {
    struct options *o = options;
    world_rules_release(&o->rules);
    return rules_load(&o->rules, world_name(o), err);
}

/* players: sources of actions */

struct world_player {
    const char *name;
    const struct world_policy *policy; /* or: */
    struct subprocess *process;        /* or: */
    struct model_policy *model;
};

static int player_act(const struct world_player *p, const struct world *w,
                      const struct world_rules *r, uint64_t seed, int16_t *actions,
                      struct error *err) {
    if (p->process) return subprocess_act(p->process, w, r, actions, err);
    if (p->model) return model_policy_act(p->model, w, r, seed, actions, err);
    world_policy_act(p->policy, w, r, seed, actions);
    return OK;
}

enum { MAX_PLAYERS = 16 };
static const char MODEL[] = "model"; /* name of the player that is the model on the command line */
struct players {
    const struct simulation_request *request; /* NULL: there is no model */
    struct world_player v[MAX_PLAYERS];
    int n;
};

static int player_open(struct players *all, const char *name, bool learns, struct error *err) {
    struct buf known = {0};
    struct world_player *p = &all->v[all->n++];
    *p = (struct world_player){.name = name, .policy = world_policy_find(name)};
    if (all->request && strcmp(name, MODEL) == 0) {
        p->model = model_policy_new(all->request, learns, err);
        return p->model ? OK : err->code;
    }
    if (p->policy) return OK;
    for (const struct world_policy *q = world_policies; q->name; q++)
        buf_printf(&known, "%s, ", q->name);
    int rc = error_set(err, ERR_USAGE, "no policy '%s': use %sor, with a model, 'model'", name,
                       known.data);
    buf_release(&known);
    return rc;
}

static int players_open(struct players *p, const struct options *o, struct error *err) {
    int rc = OK;
    bool learns = o->watch || o->record || o->do_continue; // measurements use fixed policies
    if (o->policies.n + 1 > MAX_PLAYERS)
        return error_set(err, ERR_USAGE, "at most %d policies", MAX_PLAYERS - 1);
    for (int i = 0; rc == OK && i < o->policies.n; i++)
        rc = player_open(p, o->policies.v[i], learns, err);
    if (rc == OK && !o->policies.n && !o->policy_pipe)
        rc = player_open(p, p->request ? MODEL : "rule", learns, err);
    if (rc != OK || !o->policy_pipe) return rc;
    struct world_player *last = &p->v[p->n++];
    *last = (struct world_player){.name = "pipe"};
    last->process = subprocess_open(o->policy_pipe, o->timeout, err);
    return last->process ? OK : err->code;
}

static void players_close(struct players *p) {
    for (int i = 0; i < p->n; i++) {
        subprocess_close(p->v[i].process);
        model_policy_free(p->v[i].model);
    }
}

/* measuring */

enum { CELL = 24 }; /* columns of the table */
enum measure { DELIVERED, COLLECTED, BLOCKED, SURVIVAL, FITNESS, N_MEASURES };
static const char *const measure_names[] = {"delivered", "collected", "blocked", "survival",
                                            "fitness"};
static const bool measure_shares[N_MEASURES] = {[BLOCKED] = true, [SURVIVAL] = true};

struct episode_metrics {
    double *v[N_MEASURES]; /* [maps]: mean over the agents of a map */
};

static void map_measure(const struct world *w, struct episode_metrics *l, int64_t map) {
    double sum[N_MEASURES] = {0}, steps = 0, n = w->n_agents;
    for (int i = 0; i < w->n_agents; i++) {
        const struct world_agent *a = &w->agents[i];
        sum[DELIVERED] += a->delivered;
        sum[COLLECTED] += a->collected;
        sum[BLOCKED] += a->blocked;
        sum[SURVIVAL] += a->alive;
        sum[FITNESS] += world_agent_fitness(a);
        steps += a->steps;
    }
    for (int m = 0; m < N_MEASURES; m++) l->v[m][map] = sum[m] / (m == BLOCKED ? MAX(steps, 1) : n);
}

static int episode_run(const struct options *o, const struct world_player *p, uint64_t seed,
                       struct world *w, int64_t *ticks, struct error *err) {
    int16_t actions[WORLD_AGENTS_MAX] = {0};
    world_reset(w, &o->rules, (int)o->agents, seed);
    while (!world_terminated(w) && w->tick < o->steps) {
        if (player_act(p, w, &o->rules, seed, actions, err) != OK) return err->code;
        world_step(w, &o->rules, actions);
        ++*ticks;
    }
    return OK;
}

static int episodes_run(const struct options *o, const struct players *p, struct episode_metrics *l,
                        struct error *err) {
    struct progress bar;
    struct world *w = xcalloc(1, sizeof *w);
    double began = clock_now(), joules = energy_now();
    int64_t done = 0, ticks = 0;
    int rc = OK;
    progress_start(&bar, "worlds", p->n * o->maps);
    for (int i = 0; rc == OK && i < p->n; i++)
        for (int64_t m = 0; rc == OK && m < o->maps; m++) {
            rc = episode_run(o, &p->v[i], (uint64_t)(o->seed + m), w, &ticks, err);
            map_measure(w, &l[i], m);
            progress_update(&bar, ++done, p->v[i].name);
        }
    double seconds = MAX(clock_now() - began, 1e-9);
    if (rc == OK) cli_energy_log(energy_now() - joules);
    if (rc == OK)
        log_info("%lld ticks of %lld agents, %.0f ticks a second", (long long)ticks,
                 (long long)o->agents, (double)ticks / seconds);
    free(w);
    return rc;
}

/* "12.34 [11.02, 13.66]"; a single map has no interval. */
static void add_interval(struct buf *out, struct stats_interval v, int64_t n, double scale,
                         const char *unit) {
    buf_printf(out, "%.2f%s", v.value * scale, unit);
    if (n > 1) buf_printf(out, " [%.2f, %.2f]", v.lo * scale, v.hi * scale);
}

/* A share is between 0 and 1 and a count is not negative, also where the interval of Student's t
 * goes beyond. */
static struct stats_interval measure_interval(const struct episode_metrics *l, int m, int64_t n) {
    struct stats_interval v = stats_mean_interval(l->v[m], n);
    if (m == FITNESS) return v;
    return (struct stats_interval){v.value, fmax(v.lo, 0),
                                   measure_shares[m] ? fmin(v.hi, 1) : v.hi};
}

static void episodes_print_json(const struct options *o, const struct world_player *p,
                                const struct episode_metrics *l) {
    json_t *v = json_pack("{s:s,s:s,s:I,s:I,s:I,s:I}", "policy", p->name, "world", world_name(o),
                          "maps", (json_int_t)o->maps, "seed", (json_int_t)o->seed, "agents",
                          (json_int_t)o->agents, "steps", (json_int_t)o->steps);
    for (int m = 0; m < N_MEASURES; m++)
        json_object_set_new(v, measure_names[m],
                            stats_mean_json(measure_interval(l, m, o->maps), o->maps));
    json_object_set_new(v, "manifest", model_policy_manifest(p->model, &o->rules, o->seed));
    cli_print_json(v);
}

static void episodes_print_row(const struct options *o, const struct world_player *p,
                               const struct episode_metrics *l) {
    printf("%-8s", p->name);
    for (int m = 0; m < N_MEASURES; m++) {
        struct buf b = {0};
        bool share = measure_shares[m];
        add_interval(&b, measure_interval(l, m, o->maps), o->maps, share ? 100 : 1,
                     share ? " %" : "");
        printf("  %-*s", m < FITNESS ? CELL : 0, b.data);
        buf_release(&b);
    }
    printf("\n");
}

static void episodes_table(const struct options *o, const struct players *p,
                           const struct episode_metrics *l) {
    printf("%lld maps from seed %lld on, %lld agents, %lld steps, world '%s'; a map's mean over "
           "agents [95 %% over maps]\n\n%-8s",
           (long long)o->maps, (long long)o->seed, (long long)o->agents, (long long)o->steps,
           current_value("rules", world_name(o)), "policy");
    for (int m = 0; m < N_MEASURES; m++) printf("  %-*s", m < FITNESS ? CELL : 0, measure_names[m]);
    printf("\n");
    for (int i = 0; i < p->n; i++) episodes_print_row(o, &p->v[i], &l[i]);
}

/* The first policy minus another one, paired by map. */
static void difference_print(const struct cli_options *c, const struct options *o,
                             const struct players *p, const struct episode_metrics *l, int other) {
    double *diff[2];
    static const enum measure of[2] = {DELIVERED, FITNESS};
    for (int k = 0; k < 2; k++) {
        diff[k] = xcalloc((size_t)o->maps, sizeof(double));
        for (int64_t m = 0; m < o->maps; m++) diff[k][m] = l[0].v[of[k]][m] - l[other].v[of[k]][m];
    }
    struct stats_interval delivered = stats_mean_interval(diff[0], o->maps),
                          fitness = stats_mean_interval(diff[1], o->maps);
    double odds = stats_sign_flip_test(diff[0], o->maps);
    if (c->json) {
        cli_print_json(json_pack("{s:[s,s],s:o,s:o,s:f}", "difference", p->v[0].name,
                                 p->v[other].name, "delivered", stats_mean_json(delivered, o->maps),
                                 "fitness", stats_mean_json(fitness, o->maps), "p_delivered",
                                 odds));
    } else {
        struct buf b = {0};
        buf_printf(&b, "%s - %s, map by map: delivered ", p->v[0].name, p->v[other].name);
        add_interval(&b, delivered, o->maps, 1, "");
        buf_printf(&b, ", p %.4f; fitness ", odds);
        add_interval(&b, fitness, o->maps, 1, "");
        puts(b.data);
        buf_release(&b);
    }
    free(diff[0]);
    free(diff[1]);
}

static int run_measure(const struct cli_options *c, const struct options *o,
                       const struct players *p, struct error *err) {
    struct episode_metrics l[MAX_PLAYERS];
    for (int i = 0; i < p->n; i++)
        for (int m = 0; m < N_MEASURES; m++) l[i].v[m] = xcalloc((size_t)o->maps, sizeof(double));
    int rc = episodes_run(o, p, l, err);
    if (rc == OK && !c->json) episodes_table(o, p, l);
    for (int i = 0; rc == OK && c->json && i < p->n; i++) episodes_print_json(o, &p->v[i], &l[i]);
    if (rc == OK && !c->json && p->n > 1) printf("\n");
    for (int i = 1; rc == OK && i < p->n; i++) difference_print(c, o, p, l, i);
    for (int i = 0; i < p->n; i++)
        for (int m = 0; m < N_MEASURES; m++) free(l[i].v[m]);
    return rc;
}

/* one world: live, recorded or from a trace */

struct live_world {
    struct trace t;
    struct world w;
    const struct world_player *player;
    uint64_t seed; /* seed of the player */
    FILE *record;
};

/* Appends one tick to the trace. */
static int live_world_step(void *ctx, struct error *err) {
    struct live_world *l = ctx;
    int16_t actions[WORLD_AGENTS_MAX] = {0};
    if (world_terminated(&l->w) || l->w.tick >= l->t.steps) return 0;
    int rc = player_act(l->player, &l->w, &l->t.rules, l->seed, actions, err);
    if (rc == OK) rc = trace_append(&l->t, &l->w, actions, err);
    if (rc != OK) return rc;
    world_step(&l->w, &l->t.rules, actions);
    if (l->record) rc = trace_write_tick(&l->t, &l->w, l->record, err);
    return rc == OK ? 1 : rc;
}

static void live_world_describe(void *ctx, int agent, struct buf *out) {
    const struct live_world *l = ctx;
    model_policy_describe(l->player->model, agent, out);
}

static json_t *cells_json(const struct world *w, const int16_t *cells, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("[i,i]", cells[i] % w->size, cells[i] / w->size));
    return list;
}

static json_t *buf_json(struct buf *b) {
    json_t *v = json_stringn(b->data ? b->data : "", b->len);
    buf_release(b);
    return v;
}

static json_t *agent_json(const struct live_world *l, int i) {
    static const char *const things[] = {"nothing", "food", "material"};
    const struct world_agent *a = &l->w.agents[i];
    struct buf see = {0}, prompt = {0};
    json_t *last = json_array();
    world_observe(&l->w, &l->t.rules, i, &see);
    world_prompt(&l->w, &l->t.rules, i, &prompt);
    for (int k = 0; k < 2; k++)
        if (a->last_actions[k] >= 0)
            json_array_append_new(last, json_string(world_action_names[a->last_actions[k]]));
    return json_pack(
        "{s:i,s:b,s:[i,i],s:i,s:s,s:i,s:o,s:o,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:f,s:o,"
        "s:o}",
        "agent", i, "alive", (int)a->alive, "cell", a->cell % l->w.size, a->cell / l->w.size,
        "energy", (int)a->energy, "holds", things[a->holds], "word", (int)a->word, "known",
        cells_json(&l->w, a->remembered, a->n_remembered), "last", last, "steps", a->steps,
        "collected", a->collected, "delivered", a->delivered, "built", a->built, "blocked",
        a->blocked, "bites", a->bites, "reward", a->reward, "total", a->episode_reward, "fitness",
        world_agent_fitness(a), "observation", buf_json(&see), "prompt", buf_json(&prompt));
}

static json_t *live_world_json(const struct live_world *l) {
    const struct world *w = &l->w;
    char hash[HASH_LEN];
    struct buf map = {0};
    json_t *agents = json_array();
    for (int i = 0; i < w->n_agents; i++) json_array_append_new(agents, agent_json(l, i));
    world_hash(w, hash);
    world_render(w, &map);
    const struct model_policy *model = l->player ? l->player->model : NULL;
    return json_pack("{s:i,s:I,s:I,s:s,s:s,s:i,s:o,s:o,s:o,s:I,s:I,s:I,s:o,s:o}", "tick", w->tick,
                     "steps", (json_int_t)l->t.steps, "seed", (json_int_t)w->seed, "policy",
                     l->t.policy, "hash", hash, "living", w->n_living, "picture", buf_json(&map),
                     "homes", cells_json(w, w->homes, w->n_homes), "predators",
                     cells_json(w, w->predators, w->n_predators), "food_grown",
                     (json_int_t)w->food_grown, "food_eaten", (json_int_t)w->food_eaten,
                     "food_lost", (json_int_t)w->food_lost, "agents", agents, "manifest",
                     model_policy_manifest(model, &l->t.rules, (int64_t)w->seed));
}

static void live_world_print(const struct live_world *l) {
    struct buf b = {0};
    struct world_viewer v = {.t = &l->t, .w = (struct world *)(uintptr_t)&l->w};
    world_viewer_render(&v, false, &b);
    buf_puts(&b, "\n");
    for (int i = 0; i < l->w.n_agents; i++) {
        buf_printf(&b, "agent_%d: ", i);
        world_observe(&l->w, &l->t.rules, i, &b);
        buf_puts(&b, "\n");
    }
    fputs(b.data, stdout);
    buf_release(&b);
}

/* Runs the world to its end, in the viewer or not, and prints the last state. */
static int live_world_run(const struct cli_options *c, const struct options *o,
                          struct live_world *l, struct error *err) {
    bool model = l->player && l->player->model;
    struct world_viewer v = {.t = &l->t,
                             .w = &l->w,
                             .step = l->player ? live_world_step : NULL,
                             .describe = model ? live_world_describe : NULL,
                             .ctx = l};
    int rc = OK;
    if (o->record) {
        l->record = trace_create(&l->t, o->record, err);
        if (!l->record) return err->code;
    }
    if (o->watch && !c->json) {
        rc = world_viewer_run(&v, err);
    } else {
        for (int more = l->player != NULL; rc >= 0 && more; more = rc) rc = live_world_step(l, err);
        if (rc >= 0 && c->json)
            cli_print_json(live_world_json(l));
        else if (rc >= 0)
            live_world_print(l);
    }
    if (!l->record) return MIN(rc, 0);
    if (rc < 0) { /* no end record, because the end was not reached */
        fclose(l->record);
        return rc;
    }
    trace_seek(&l->t, &l->w, l->t.n_ticks);
    return trace_close(&l->w, l->record, err);
}

static int run_live(const struct cli_options *c, const struct options *o, const struct players *p,
                    struct error *err) {
    struct live_world *l = xcalloc(1, sizeof *l);
    l->player = &p->v[0];
    l->seed = (uint64_t)o->seed;
    int rc = trace_init(&l->t, &o->rules, (int)o->agents, l->seed, o->steps, l->player->name, err);
    if (rc == OK) trace_seek(&l->t, &l->w, 0);
    if (rc == OK) rc = live_world_run(c, o, l, err);
    trace_release(&l->t);
    free(l);
    return rc;
}

/* Cuts the trace at the current tick, to continue it as another episode. */
static int live_world_fork(struct live_world *l, const struct options *o, const struct players *p,
                           struct error *err) {
    trace_truncate(&l->t, l->w.tick);
    l->t.fork = l->w.tick;
    l->player = &p->v[0];
    l->seed = o->seed ? (uint64_t)o->seed : l->t.seed;
    if (o->steps) l->t.steps = o->steps;
    free(l->t.policy);
    l->t.policy = xstrdup(l->player->name);
    if (l->t.steps >= l->w.tick) return OK;
    return error_set(err, ERR_USAGE, "--steps %lld is less than the current tick %d",
                     (long long)l->t.steps, l->w.tick);
}

static int run_replay(const struct cli_options *c, const struct options *o, const struct players *p,
                      struct error *err) {
    struct live_world *l = xcalloc(1, sizeof *l);
    int rc = trace_load(&l->t, o->replay, err);
    if (rc == OK && !l->t.closed)
        log_warn("'%s' has no end: its writer was stopped after tick %lld", o->replay,
                 (long long)l->t.n_ticks);
    int64_t at = o->at >= 0 ? o->at : o->watch && !o->do_continue ? 0 : l->t.n_ticks;
    if (rc == OK && at > l->t.n_ticks)
        rc = error_set(err, ERR_MISSING, "'%s' ends with tick %lld", o->replay,
                       (long long)l->t.n_ticks);
    if (rc == OK) trace_seek(&l->t, &l->w, at);
    if (rc == OK && o->do_continue) rc = live_world_fork(l, o, p, err);
    if (rc == OK) rc = live_world_run(c, o, l, err);
    trace_release(&l->t);
    free(l);
    return rc;
}

/* the environment for other programs */

static int serve_line(struct world_server *s, struct line_reader *in, bool *open,
                      struct error *err) {
    const char *line;
    size_t len;
    struct buf out = {0};
    int got = line_reader_next(in, 0, &line, &len, err);
    if (got == 0) *open = false;
    if (got == 0 || (got < 0 && got != ERR_MEMORY)) return got;
    if (got == ERR_MEMORY)
        buf_printf(&out, "{\"error\":\"%s\"}\n", err->text);
    else
        *open = world_server_handle(s, line, len, &out);
    bool good = fwrite(out.data, 1, out.len, stdout) == out.len && fflush(stdout) == 0;
    buf_release(&out);
    return good ? OK : error_set(err, ERR_IO, "cannot write the answers to stdout");
}

static int serve_env(const struct options *o, struct error *err) {
    struct line_reader in = {.fd = STDIN_FILENO, .limit = WORLD_SERVER_MAX_LINE};
    bool open = true;
    int rc = OK;
    struct world_server *s = world_server_new(&o->rules, (int)o->agents, o->steps, err);
    if (!s) return err->code;
    while (rc == OK && open) rc = serve_line(s, &in, &open, err);
    line_reader_release(&in);
    world_server_free(s);
    return rc;
}

/* combinations of options */

/* Refuses rules in addition to a trace, and --rules, which only world files may set. */
static int rules_check(const struct options *o, struct error *err) {
    struct world_rules r;
    int rc = rules_load(&r, world_name(o), err);
    json_t *named = world_rules_json(&r), *effective = world_rules_json(&o->rules);
    if (rc == OK) rc = world_rules_check_set(&o->rules, r.rules, err);
    if (rc == OK && o->replay && (o->world || !json_equal(named, effective)))
        rc = error_set(err, ERR_USAGE, "a trace has its own rules: leave out --world and rules");
    json_decref(named);
    json_decref(effective);
    world_rules_release(&r);
    return rc;
}

static int replay_check(const struct options *o, struct error *err) {
    if (o->pipe) return error_set(err, ERR_USAGE, "--pipe and --replay exclude each other");
    if (o->agents || o->maps)
        return error_set(err, ERR_USAGE, "a trace has its own agents, and is one map");
    if (!o->do_continue && (o->policies.n || o->policy_pipe || o->steps || o->seed || o->record))
        return error_set(
            err, ERR_USAGE,
            "--policy, --policy-pipe, --steps, --seed and --record go with --continue");
    if (o->record && strcmp(o->record, o->replay) == 0)
        return error_set(err, ERR_USAGE, "'%s' is the trace itself", o->record);
    return OK;
}

/* Checks the options of --env-pipe, an environment in another program. */
static int env_pipe_check(const struct options *o, bool model, struct error *err) {
    struct world_rules r;
    if (!model) return error_set(err, ERR_USAGE, "--env-pipe requires a model: name one");
    if (o->watch || o->record || o->replay || o->maps || o->policies.n || o->policy_pipe || o->pipe)
        return error_set(err, ERR_USAGE,
                         "--env-pipe is for simulations: leave out --pipe, --policy, "
                         "--policy-pipe, --maps, --watch, --record and --replay");
    int rc = rules_load(&r, world_name(o), err);
    json_t *named = world_rules_json(&r), *effective = world_rules_json(&o->rules);
    if (rc == OK && (o->world || o->agents || !json_equal(named, effective)))
        rc = error_set(
            err, ERR_USAGE,
            "--env-pipe has its own agents and rules: leave out --agents, --world and rules");
    json_decref(named);
    json_decref(effective);
    world_rules_release(&r);
    return rc;
}

/* Whether an option of simulations differs from its default. */
static bool has_simulation_options(const struct options *o) {
    struct simulation_options defaults = {0};
    options_default(simulation_option_rows, &defaults);
    options_default(learner_option_rows, &defaults.learn);
    json_t *a = options_json(simulation_option_rows, &defaults),
           *b = options_json(simulation_option_rows, &o->simulation.simulation),
           *c = options_json(learner_option_rows, &defaults.learn),
           *d = options_json(learner_option_rows, &o->simulation.simulation.learn);
    bool changed =
        !json_equal(a, b) || !json_equal(c, d) || o->simulation.adapters.n || o->simulation.out;
    json_decref(a);
    json_decref(b);
    json_decref(c);
    json_decref(d);
    options_release(simulation_option_rows, &defaults);
    options_release(learner_option_rows, &defaults.learn);
    return changed || o->limits.max_seqs || o->limits.max_len;
}

static int options_check(const struct cli_options *c, const struct options *o, bool model,
                         struct error *err) {
    bool one = o->watch || o->record || o->do_continue;
    if (o->watch && c->json)
        return error_set(err, ERR_USAGE, "--watch is for people, --json for programs");
    if (one && (o->maps > 1 || o->policies.n + (o->policy_pipe != NULL) > 1))
        return error_set(err, ERR_USAGE,
                         "--watch, --record and --continue take one world and one policy");
    if (rules_check(o, err) != OK) return err->code;
    if (o->env_pipe && env_pipe_check(o, model, err) != OK) return err->code;
    if (!model && has_simulation_options(o))
        return error_set(err, ERR_USAGE,
                         "the options of simulations require a model: shoal world MODEL");
    if (!model && o->simulation.dry_run)
        return error_set(err, ERR_USAGE, "--dry-run needs a model: shoal world MODEL");
    if (o->best || o->adapter_name)
        return error_set(err, ERR_USAGE,
                         "--best and --adapter-name are of 'shoal world export RUN'");
    if (o->at_decisions)
        return error_set(err, ERR_USAGE, "--at-decisions is of 'shoal world compare GROUP …'");
    if (model && o->pipe) return error_set(err, ERR_USAGE, "--pipe is without a model");
    if (model && simulation_options_check(&o->simulation.simulation, err) != OK) return err->code;
    if (o->replay) return replay_check(o, err);
    if (o->do_continue || o->at >= 0)
        return error_set(err, ERR_USAGE, "--%s needs a trace: give --replay FILE",
                         o->do_continue ? "continue" : "at");
    if (o->pipe && (one || o->policies.n || o->policy_pipe || o->maps || o->seed))
        return error_set(err, ERR_USAGE,
                         "--pipe: the other program sends the actions and the seed");
    return world_rules_check(&o->rules, err);
}

static int run_players(const struct cli_options *c, const struct options *o,
                       const struct players *p, struct error *err) {
    if (o->replay) return run_replay(c, o, p, err);
    if (o->pipe) return serve_env(o, err);
    return o->watch || o->record ? run_live(c, o, p, err) : run_measure(c, o, p, err);
}

static int players_run(const struct cli_options *c, const struct options *o,
                       const struct simulation_request *request, struct error *err) {
    struct players p = {.request = request};
    int rc = OK;
    if (!o->pipe && (!o->replay || o->do_continue)) rc = players_open(&p, o, err);
    if (rc == OK) rc = run_players(c, o, &p, err);
    players_close(&p);
    return rc;
}

/* Sets the defaults; a trace has its own values. */
static struct options options_set_defaults(const struct options *o) {
    struct options full = *o;
    if (o->replay) return full;
    if (!full.agents) full.agents = WORLD_DEFAULT_AGENTS;
    if (!full.steps) full.steps = WORLD_DEFAULT_STEPS;
    if (!full.seed) full.seed = 1;
    if (!full.maps) full.maps = MAPS;
    return full;
}

/* Starts the environment of --env-pipe, which sets the number of agents and the default of --steps.
 */
static int external_envs_start(struct external_envs **out, struct options *o, struct error *err) {
    const struct simulation_options *sim_options = &o->simulation.simulation;
    bool cloning = strcmp(sim_options->learn.learn, "clone") == 0;
    *out = external_envs_open(o->env_pipe, o->timeout, (int)sim_options->n_envs, cloning, err);
    if (!*out) return err->code;
    o->agents = external_envs_list(*out)[0]->n_agents;
    if (!o->steps) o->steps = external_envs_max_steps(*out);
    return OK;
}

/* Trained agents of the starter model. */
static const char FORAGER[] = "worlds/forager";
/* Stands for no adapter on the command line. */
static const char NO_ADAPTER[] = "none";

/* Whether a model that is watched without an adapter is the one that FORAGER, at `path`, is for. */
static bool has_forager(const struct options *o, const char *path, struct model *m) {
    struct error ignored;
    bool model_acts = !o->policy_pipe && (!o->policies.n || strcmp(o->policies.v[0], MODEL) == 0);
    if (!o->watch || o->replay || o->simulation.adapters.n || !model_acts) return false;
    struct adapter *a = adapter_load(path, &m->config, &ignored);
    bool is_of_model = a && adapter_is_of_model(a, m);
    adapter_release(a);
    return is_of_model;
}

/* Shows trained agents if the user names no adapter. They do not learn, so that all of them keep
 * the decisions of one policy. */
static void forager_use(struct options *o, struct strings *adapters, struct model *m) {
    static char frozen[] = "none";
    char *path = cli_find_file(FORAGER);
    const struct strings *named = &o->simulation.adapters;
    if (named->n == 1 && strcmp(named->v[0], NO_ADAPTER) == 0) {
        o->simulation.adapters = (struct strings){0};
    } else if (has_forager(o, path, m)) {
        strings_add(adapters, path);
        o->simulation.adapters = *adapters;
        o->simulation.simulation.learn.learn = frozen;
        log_info(
            "the agents have the adapter '%s', which 'shoal world' has trained by rewards, and "
            "do not learn; untrained agents that learn: --adapter none",
            path);
    }
    free(path);
}

/* Sets the memory limit, and refuses it if it is too small, before the model is read. `player`: one
 * world is played; if its agents learn, the learner checks the limit again. *used receives the most
 * memory of program and model. */
static int memory_limit_begin(const struct options *o, bool player, const char *path,
                              enum numeric_class cls, struct pool *pool, size_t *used,
                              struct error *err) {
    static char none[] = "none";
    struct model_size size;
    struct simulation_options so = o->simulation.simulation;
    size_t least;
    if (player) so.learn.learn = none;
    if (memory_limit_parse(o->max_memory, err) != OK ||
        model_measure(path, cls, &size, err) != OK ||
        engine_limits_check(&o->limits, size.config.max_seq_len, err) != OK)
        return err->code;
    *used = memory_used(NULL) + model_loading_bytes(&size);
    if (!memory_limit_get()) return OK;
    if (simulation_least_bytes(&size.config, cls, &so, (int)o->agents, pool, &least, err) != OK)
        return err->code;
    const struct memory_step step = {.what = "this simulation with its model",
                                     .least = model_loading_bytes(&size) + least};
    return memory_check(NULL, &step, err);
}

static int model_play(const struct cli_options *c, const struct options *o, const char *model,
                      struct error *err) {
    struct options full = *o;
    struct external_envs *external = NULL;
    int rc = o->env_pipe ? external_envs_start(&external, &full, err) : OK;
    if (rc != OK) return rc;
    full = options_set_defaults(&full);
    full.simulation.simulation.steps = full.steps;
    full.simulation.simulation.seed = full.seed;
    full.simulation.simulation.limits = full.limits;
    char *path = cli_find_file(model);
    struct pool *pool = pool_new((int)c->threads);
    bool player = o->watch || o->record || o->replay || o->maps || o->policies.n || o->policy_pipe;
    size_t used = 0;
    rc = memory_limit_begin(&full, player, path, cli_numeric_class(c), pool, &used, err);
    struct model *m = rc == OK ? model_open(path, cli_numeric_class(c), err) : NULL;
    struct strings adapters = {0};
    if (m) forager_use(&full, &adapters, m);
    struct simulation_request request = {.o = &full.simulation,
                                         .rules = &o->rules,
                                         .external = external,
                                         .agents = (int)full.agents,
                                         .m = m,
                                         .pool = pool,
                                         .used = used};
    double joules = energy_now();
    if (!m) rc = err->code;
    if (rc == OK && player && o->simulation.dry_run)
        rc = error_set(err, ERR_USAGE,
                       "--dry-run is for simulations, not for a player of one world");
    if (rc == OK)
        rc = player ? players_run(c, &full, &request, err) : world_simulate(c, &request, err);
    if (rc == OK && !player && !o->simulation.dry_run) cli_energy_log(energy_now() - joules);
    if (rc == OK && !o->simulation.dry_run) setup_print_peak_memory(c, memory_limit_named());
    memory_limit_set(0);
    external_envs_free(external);
    strings_release(&adapters);
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

static int run_export(const struct options *o, const struct strings *args, struct error *err) {
    if (args->n != 2)
        return error_set(err, ERR_USAGE, "export: of which run? name its folder or its id");
    if (o->best && o->adapter_name)
        return error_set(err, ERR_USAGE, "--best and --adapter-name exclude each other");
    return world_export(&o->simulation, args->v[1], o->adapter_name, err);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (args->n && strcmp(args->v[0], "export") == 0) return run_export(o, args, err);
    if (args->n > 1 && strcmp(args->v[0], "compare") == 0)
        return world_compare(c, &o->simulation, args, o->at_decisions, err);
    if (args->n > 1) return error_set(err, ERR_USAGE, "'%s': one model at most", args->v[1]);
    if (options_check(c, o, args->n, err) != OK) return err->code;
    if (args->n) return model_play(c, o, args->v[0], err);
    struct options full = options_set_defaults(o);
    return players_run(c, &full, NULL, err);
}

const struct cli_command cmd_world = {
    .name = "world",
    .args = "[MODEL | export RUN | compare GROUP …]",
    .summary = "a grid world: policies that learn and breed; scripted policies, traces",
    .about =
        "Agents in a grid world look for food and carry it home. With a MODEL, each agent's\n"
        "policy is an adapter that learns during its episode; the best policies breed the next\n"
        "generation. Each generation is evaluated on held-out maps, and an interrupted run\n"
        "continues.\n"
        "\n"
        "Without a model, scripted policies are compared on the same maps; or one world is\n"
        "shown, recorded, or continued from any tick of a trace. Other programs can be the\n"
        "agents (--pipe), the policy (--policy-pipe) or the environment (--env-pipe).\n"
        "docs/WORLD.md has rules, files and protocol.\n"
        "\n"
        "  shoal world models/fry --watch                     trained agents, live\n"
        "  shoal world models/fry --generations 10            agents that learn from rewards\n"
        "  shoal world models/fry --learn clone --num-adapters 1 --batch-size 64 --update-interval "
        "2\n"
        "  shoal world models/fry --adapter runs/world-1a2b3c4d --watch\n"
        "  shoal world export runs/world-1a2b3c4d --best --out forager\n"
        "  shoal world compare both online evolution --runs results --out curves.svg\n"
        "  shoal world --policy rule random --maps 20\n"
        "  shoal world --watch --size 30 --predators 2        keys: space, n, p, <, >\n"
        "  shoal world --world worlds/maze.yaml --record life.jsonl\n"
        "  shoal world --replay life.jsonl --at 120 --json\n"
        "  shoal world --replay life.jsonl --at 120 --continue --policy random --record "
        "fork.jsonl\n"
        "  shoal world --policy-pipe 'python3 examples/world_policy.py'\n"
        "  shoal world models/fry --env-pipe 'python3 examples/corridor_env.py' --num-envs 16",
    .job_args =
        (const struct job_args[]){{"export", {JOB_ARG_TEXT, JOB_ARG_BUILTIN_OR_PATH}, false},
                                  {"compare", {JOB_ARG_TEXT, JOB_ARG_NAME}, true},
                                  {NULL, {JOB_ARG_INPUT_PATH}, false},
                                  {0}},
    .job_store_option = "runs",
    .main_options = "policy agents steps seed watch record replay out num-adapters "
                    "generations learn rules max-memory",
    .rows = command_rows,
    .more =
        (const struct option_table[]){
            {simulation_run_option_rows, offsetof(struct options, simulation)},
            {simulation_option_rows, offsetof(struct options, simulation.simulation)},
            {learner_option_rows, offsetof(struct options, simulation.simulation.learn)},
            {world_rule_rows, offsetof(struct options, rules),
             "rules of the world, over those of --world"},
            {0}},
    .base_load = base_load,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = -1,
    .run = run,
};
