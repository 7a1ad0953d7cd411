/* world_report: `shoal world MODEL`, `export` and `compare`; see world_report.h. */
#include "cli/world_report.h"

#include "eval/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BAR = 24 };

struct run_printer {
    const struct cli_options *c;
    const struct simulation_request *q;
    double bar_max;   /* headline metric of the first baseline, which is a full bar */
    bool row_printed; /* a row was printed */
    json_t *manifest; /* of the run */
};

static double headline_of(const struct run_printer *r, const json_t *row) {
    const json_t *held = json_object_get(row, "held_out");
    return json_get_number(json_object_get(held, simulation_main_metric(r->q)), "value");
}

static void bar_print(const struct run_printer *r, const json_t *row) {
    double best = fmax(1e-9, r->bar_max);
    int full = (int)(BAR * fmin(1, fmax(0, headline_of(r, row) / best)) + 0.5);
    for (int i = 0; i < BAR; i++) printf("%s", i < full ? "█" : "·");
    printf(" ");
}

static void row_print(const struct run_printer *r, const char *name, const json_t *row) {
    const json_t *held = json_object_get(row, "held_out"),
                 *d = json_object_get(held, simulation_main_metric(r->q)),
                 *episode_stats = json_object_get(row, "lived");
    printf("%-10s %10lld ", name, (long long)json_get_number(row, "decisions"));
    if (!r->q->external) bar_print(r, row);
    printf("%6.2f [%5.2f, %5.2f]", headline_of(r, row), json_get_number(d, "lo"),
           json_get_number(d, "hi"));
    if (!r->q->external)
        printf("  %8.1f", json_get_number(json_object_get(held, "fitness"), "value"));
    if (episode_stats) {
        if (json_object_get(episode_stats, "entropy"))
            printf("  %5.2f", json_get_number(episode_stats, "entropy"));
        else
            printf("  %5s", "-"); // decoded text has no entropy
        int collapsed = (int)json_get_number(episode_stats, "collapsed"),
            rollbacks = (int)json_get_number(episode_stats, "rollbacks"),
            map_size = (int)json_get_number(episode_stats, "map_size");
        if (collapsed) printf("  %d collapsed", collapsed);
        if (rollbacks) printf("  %d rolled back", rollbacks);
        if (map_size) printf("  trained on maps of %d", map_size);
    }
    printf("\n");
    fflush(stdout);
}

static void on_begin(void *ctx, const char *id, const struct simulation_options *o,
                     const json_t *manifest) {
    struct run_printer *r = ctx;
    r->manifest = json_deep_copy(manifest);
    if (r->c->json) return;
    printf("%s: %lld held-out maps, %d agents, %lld steps; ", id, (long long)o->eval_maps,
           r->q->agents, (long long)o->steps);
    if (r->q->external)
        printf("reward of an agent [95 %% over maps]\n\n%-10s %10s %-22s  %s\n", "generation",
               "decisions", "reward", "entropy");
    else
        printf("delivered by an agent [95 %% over maps]; the bar is full at rule's\n\n"
               "%-10s %10s %-*s %-22s  %8s  %s\n",
               "generation", "decisions", BAR, "", "delivered", "fitness", "entropy");
}

static void on_row(void *ctx, const json_t *row) {
    struct run_printer *r = ctx;
    const char *policy = json_get_string(row, "policy");
    char name[32];
    if (!r->row_printed) r->bar_max = headline_of(r, row);
    r->row_printed = true;
    if (r->c->json) {
        json_t *v = json_deep_copy(row);
        json_object_set(v, "manifest", r->manifest);
        cli_print_json(v);
        return;
    }
    snprintf(name, sizeof name, "%d", (int)json_get_number(row, "generation"));
    row_print(r, *policy ? policy : name, row);
}

/* Replaces the plan's object "memory" by its text. */
static void memory_to_text(json_t *plan, const struct train_memory *memory) {
    struct buf text = {0};
    train_memory_text(memory, &text);
    json_object_set_new(plan, "memory", json_string(text.data + strlen("memory: ")));
    buf_release(&text);
}

int world_simulate(const struct cli_options *c, const struct simulation_request *q,
                   struct error *err) {
    struct run_printer r = {.c = c, .q = q};
    const struct simulation_run_callbacks cb = {.begin = on_begin, .row = on_row, .ctx = &r};
    if (!q->o->dry_run) {
        int rc = simulation_run(q, &cb, err);
        json_decref(r.manifest);
        return rc;
    }
    struct train_memory memory;
    json_t *plan = simulation_run_plan(q, &memory, err);
    if (plan && !c->json) memory_to_text(plan, &memory);
    if (plan) cli_print_dry_run(c, plan);
    return plan ? OK : err->code;
}

int world_export(const struct simulation_run_options *o, const char *run, const char *name,
                 struct error *err) {
    json_t *v = simulation_export_policy(o->runs, run, name, o->out, err);
    if (!v) return err->code;
    const json_t *outcome = json_object_get(v, "outcome");
    printf("%s: fitness %.1f, reward %.2f, wrote '%s'\n", json_get_string(v, "name"),
           json_get_number(outcome, "fitness"), json_get_number(outcome, "reward"), o->out);
    json_decref(v);
    return OK;
}

/* compare */

static json_t *group_json(const struct simulation_comparison *c, const struct simulation_group *g) {
    double time = g->decisions_to_80_percent;
    json_t *v =
        json_pack("{s:s,s:i,s:f,s:o,s:o}", "group", g->name, "runs", g->n_runs, "decisions",
                  g->decisions, "delivered", stats_interval_json(g->delivered),
                  "decisions_to_80_percent", isfinite(time) ? json_real(time) : json_null());
    if (c->at_decisions > 0) json_object_set_new(v, "at_decisions", json_real(c->at_decisions));
    if (g->pairs > 1)
        json_object_update_new(v, json_pack("{s:s,s:i,s:o,s:f}", "against", c->groups[0].name,
                                            "pairs", g->pairs, "difference",
                                            stats_interval_json(g->difference), "p", g->p));
    return v;
}

static void group_print(const struct simulation_comparison *c, const struct simulation_group *g) {
    const struct stats_interval *d = &g->delivered, *v = &g->difference;
    printf("%-16s %4d  ", g->name, g->n_runs);
    if (c->trained) printf("%9.0f  ", g->decisions);
    printf("%6.2f [%5.2f, %5.2f]  %4.0f %%  ", d->value, d->lo, d->hi, 100 * d->value / c->rule);
    if (c->trained && isfinite(g->decisions_to_80_percent))
        printf("%9.0f", g->decisions_to_80_percent);
    else if (c->trained)
        printf("%9s", "never");
    if (g->pairs > 1) printf("   %+6.2f [%+6.2f, %+6.2f] p %.3f", v->value, v->lo, v->hi, g->p);
    printf("\n");
}

static void comparison_print(const struct simulation_comparison *c) {
    char when[48] = "at the end";
    if (c->at_decisions > 0)
        snprintf(when, sizeof when, "after %.0f decisions of each run", c->at_decisions);
    printf("delivered by an agent on held-out maps, %s; rule %.2f, random %.2f [95 %% "
           "over runs]\n\n%-16s %4s  ",
           when, c->rule, c->random, "group", "runs");
    if (c->trained) printf("%9s  ", "decisions");
    printf("%-22s  %6s  ", "delivered", "rule's");
    if (c->trained) printf("%9s", "to 80 %");
    printf("   %s\n", "first group minus it, paired");
    for (int i = 0; i < c->n; i++) group_print(c, &c->groups[i]);
}

int world_compare(const struct cli_options *common, const struct simulation_run_options *o,
                  const struct strings *names, int64_t at_decisions, struct error *err) {
    struct simulation_comparison *c =
        simulation_compare(o->runs, names->v + 1, names->n - 1, (double)at_decisions, err);
    int rc = c ? OK : err->code;
    for (int i = 0; c && common->json && i < c->n; i++)
        cli_print_json(group_json(c, &c->groups[i]));
    if (c && !common->json) comparison_print(c);
    if (c && o->out) rc = simulation_comparison_plot(c, o->out, err);
    simulation_comparison_free(c);
    return rc;
}
