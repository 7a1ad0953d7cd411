/* simulate: shoal_simulate of include/shoal.h: a simulation of the world layer, whose rows are the
 * result. */
#include "lib/internal.h"

#include "world/world.h"

#include <stdlib.h>

struct simulate_options {
    char *world;
    int64_t agents, steps, seed;
    struct world_rules rules; /* rules of `world`; options override them */
    struct simulation_run_options run;
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct simulate_options, field), fallback, min, max, NULL, NULL }
static const struct option_row simulate_rows[] = {
    ROW("world", OPT_STRING, world, "repaired", 0, 0),
    ROW("agents", OPT_INT, agents, NULL, 0, WORLD_AGENTS_MAX),
    ROW("steps", OPT_INT, steps, NULL, 0, TRACE_TICKS),
    ROW("seed", OPT_INT, seed, "1", 0, 1e15),
    {0},
};
#undef ROW

static struct option_row *rows_join(void) {
    static const struct option_table more[] = {
        {simulation_run_option_rows, offsetof(struct simulate_options, run)},
        {simulation_option_rows, offsetof(struct simulate_options, run.simulation)},
        {learner_option_rows, offsetof(struct simulate_options, run.simulation.learn)},
        {world_rule_rows, offsetof(struct simulate_options, rules)},
        {0}};
    return options_join(simulate_rows, more);
}

/* Loads the rules of the world, and applies the options again, over these rules. */
static int rules_apply(const struct option_row *rows, struct simulate_options *o,
                       const char *const *options, struct error *err) {
    world_rules_release(&o->rules);
    int rc = world_rules_load(&o->rules, o->world, err);
    char *set = rc == OK ? xstrdup(o->rules.rules) : NULL;
    if (rc == OK) rc = call_options_apply(rows, o, options, err);
    if (rc == OK) rc = world_rules_check_set(&o->rules, set, err);
    if (rc == OK) rc = world_rules_check(&o->rules, err);
    free(set);
    return rc;
}

static int options_complete(const struct option_row *rows, struct simulate_options *o,
                            const char *const *options, struct error *err) {
    int rc = call_options_parse(rows, o, options, err);
    if (rc == OK) rc = rules_apply(rows, o, options, err);
    if (rc == OK && o->run.dry_run)
        rc = error_set(err, ERR_USAGE, "'dry-run' is an option of the command only");
    if (!o->agents) o->agents = WORLD_DEFAULT_AGENTS;
    o->run.simulation.steps = o->steps ? o->steps : WORLD_DEFAULT_STEPS;
    o->run.simulation.seed = o->seed ? o->seed : 1;
    return rc == OK ? simulation_options_check(&o->run.simulation, err) : rc;
}

static void row_add(void *ctx, const json_t *row) {
    json_array_append_new(ctx, json_deep_copy(row));
}

char *shoal_simulate(struct shoal *s, const char *const *options,
                     const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct error inner = {0};
    struct call c;
    struct simulate_options o = {0};
    struct option_row *rows = rows_join();
    json_t *result = json_array();
    call_begin(&c, callbacks);
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = options_complete(rows, &o, options, &inner);
    if (rc == OK) {
        const struct simulation_request q = {.o = &o.run,
                                             .rules = &o.rules,
                                             .agents = (int)o.agents,
                                             .m = s->model,
                                             .pool = s->pool};
        rc = simulation_run(&q, &(struct simulation_run_callbacks){.row = row_add, .ctx = result},
                            &inner);
    }
    options_release(rows, &o);
    free(rows);
    if (call_end(&c, rc, &inner, err) == OK) return json_result(result);
    json_decref(result);
    return NULL;
}
