/*
 * heldout: held-out evaluation of a run, on questions that fitness never used: single agents, the
 * founders' debate with its baselines, the generations, and retention on other tasks. Every
 * comparison is paired and corrected for the number of comparisons.
 */
#define _GNU_SOURCE
#include "evolve/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct heldout_result *add_row(struct evolve_run *r, const char *name) {
    CHECK(r->n_rows < r->max_rows);
    struct heldout_result *m = &r->rows[r->n_rows++];
    snprintf(m->name, sizeof m->name, "%s", name);
    m->right = xcalloc((size_t)r->n_test + 1, 1);
    return m;
}

/* Evaluates one agent, without debate, on the items [n], and stores the result in `m`. */
static int evaluate_solo(struct evolve_run *r, struct agent agent, const struct task_item *items,
                         int n, struct heldout_result *m, struct progress *bar, struct error *err) {
    struct debate_options o = {.rounds = 1,
                               .chain_of_thought = r->o->chain_of_thought,
                               .vote = vote_find(r->o->vote),
                               .temperature = agent.temperature,
                               .seed = agent.temperature > 0 ? (uint64_t)r->o->seed : 0,
                               .max_tokens = (int32_t)r->o->max_tokens};
    agent.name = "solo";
    struct debate d;
    int rc = evolve_run_check_pause(r, err);
    if (rc != OK) return rc;
    rc = debate_run(&r->llm_client, &agent, 1, items, n, &o, &d, bar, err);
    if (rc == OK) memcpy(m->right, d.first_correct, (size_t)n);
    m->prefilled = d.prefilled;
    m->generated = d.generated;
    debate_release(&d);
    return rc;
}

static int measure_solo(struct evolve_run *r, const char *name, struct agent agent,
                        struct progress *bar, struct error *err) {
    return evaluate_solo(r, agent, r->test, r->n_test, add_row(r, name), bar, err);
}

static json_t *transcripts(const struct evolve_run *r, const struct debate *d,
                           const struct agent *team) {
    json_t *list = json_array();
    for (int i = 0; i < r->n_test && i < 5; i++) {
        struct buf b = {0};
        debate_transcript(d, team, &r->test[i], i, vote_find(r->o->vote), &b);
        json_array_append_new(list, json_stringn(b.data, b.len));
        buf_release(&b);
    }
    return list;
}

static struct debate_options founders_debate_options(const struct evolve_run *r) {
    return (struct debate_options){.rounds = (int)r->o->rounds,
                                   .chain_of_thought = r->o->chain_of_thought,
                                   .vote = vote_find(r->o->vote),
                                   .max_tokens = (int32_t)r->o->max_tokens,
                                   .seed = (uint64_t)r->o->seed};
}

/* The calls of the founders' debate and of those without one founder; and of self-consistency with
 * as many samples as the debate has turns. */
static int64_t founders_debate_calls(const struct evolve_run *r) {
    const struct debate_options o = founders_debate_options(r);
    struct agent team[MAX_FOUNDERS];
    int n = r->n_founders;
    if (o.rounds == 0) return 0;
    for (int i = 0; i < n; i++) team[i] = (struct agent){.name = r->names[i]};
    return debate_max_calls(team, n, r->test, r->n_test, &o) +
           n * (n > 1 ? debate_max_calls(team, n - 1, r->test, r->n_test, &o) : 0) +
           (int64_t)n * o.rounds * r->n_test;
}

/* The debate of all founders, its first-round vote, and each founder's leave-one-out
 * contribution. */
static int measure_debate(struct evolve_run *r, struct progress *bar, struct error *err) {
    struct agent team[MAX_FOUNDERS];
    struct stats_interval contribution[MAX_FOUNDERS];
    const struct debate_options o = founders_debate_options(r);
    struct debate d;
    for (int i = 0; i < r->n_founders; i++)
        team[i] = (struct agent){.name = r->names[i], .adapter = r->founders[i]};
    int rc = debate_run(&r->llm_client, team, r->n_founders, r->test, r->n_test, &o, &d, bar, err);
    if (rc == OK)
        rc = contribution_leave_one_out(&r->llm_client, team, r->n_founders, r->test, r->n_test, &o,
                                        &d, contribution, bar, err);
    if (rc == OK) {
        struct heldout_result *debate = add_row(r, "debate"),
                              *vote = add_row(r, "first-round vote");
        memcpy(debate->right, d.vote_correct + (size_t)(d.rounds - 1) * (size_t)r->n_test,
               (size_t)r->n_test);
        memcpy(vote->right, d.vote_correct, (size_t)r->n_test);
        debate->prefilled = d.prefilled;
        debate->generated = d.generated;
        for (int i = 0; i < r->n_founders; i++) vote->generated += r->rows[1 + i].generated;
        for (int i = 0; i < r->n_founders; i++) vote->prefilled += r->rows[1 + i].prefilled;
        json_t *credit = json_object();
        for (int i = 0; i < r->n_founders; i++)
            json_object_set_new(credit, r->names[i], stats_interval_json(contribution[i]));
        json_object_set_new(
            r->result, "debate",
            json_pack("{s:I,s:I,s:I,s:o,s:o}", "became_right", (json_int_t)d.flips_good,
                      "became_wrong", (json_int_t)d.flips_bad, "truncated", (json_int_t)d.truncated,
                      "leave_one_out", credit, "transcripts", transcripts(r, &d, team)));
    }
    debate_release(&d);
    return rc;
}

/* Self-consistency of the best founder (by dev fitness). The number of samples is such that they
 * generate about as many tokens as the debate. */
static int measure_self_consistency(struct evolve_run *r, const struct candidate *best,
                                    struct progress *bar, struct error *err) {
    const struct heldout_result *debate = NULL, *solo = NULL;
    for (int i = 0; i < r->n_rows; i++) {
        if (strcmp(r->rows[i].name, "debate") == 0) debate = &r->rows[i];
        if (strcmp(r->rows[i].name, best->name) == 0) solo = &r->rows[i];
    }
    double tokens_per_sample = (double)MAX(solo->generated, 1);
    int k = MAX(1, MIN(64, (int)ceil((double)debate->generated / tokens_per_sample)));
    struct agent agent = {.name = best->name, .adapter = best->adapter};
    struct heldout_result *m = add_row(r, "");
    bar->total += (int64_t)(k - r->n_founders * (int)r->o->rounds) * r->n_test;
    snprintf(m->name, sizeof m->name, "self-consistency %s@%d", best->name, k);
    struct self_consistency samples;
    int rc = self_consistency_sample(&r->llm_client, &agent, r->test, r->n_test, k, true,
                                     (float)r->o->temperature, (int32_t)r->o->max_tokens,
                                     (uint64_t)r->o->seed, NULL, &samples, bar, err);
    if (rc == OK) self_consistency_vote(&samples, r->test, k, m->right);
    for (int i = 0; i < k; i++) {
        m->prefilled += samples.prefilled[i];
        m->generated += samples.generated[i];
    }
    self_consistency_release(&samples);
    return rc;
}

/* Whether the table has generation g. With `curve` it has about a dozen generations, including the
 * last; without `curve` only the last. */
static bool is_shown(const struct evolve_run *r, int g) {
    if (!r->o->curve) return g == r->n_best - 1;
    int every = MAX(1, (r->n_best - 1 + 9) / 10);
    return g % every == 0 || g == r->n_best - 1;
}

/* The table always has the best founder. It has all founders with `curve`, or if there is a debate,
 * because the founders are the debate's baselines. */
static bool is_founder_measured(const struct evolve_run *r, int founder) {
    return r->o->curve || r->o->rounds || r->founders[founder] == r->best[0].adapter;
}

static int measure_rows(struct evolve_run *r, struct progress *bar, struct error *err) {
    char name[80];
    int rc = measure_solo(r, "base", (struct agent){0}, bar, err);
    for (int i = 0; rc == OK && i < r->n_founders; i++)
        if (is_founder_measured(r, i))
            rc = measure_solo(r, r->names[i], (struct agent){.adapter = r->founders[i]}, bar, err);
    if (rc == OK && r->o->rounds) rc = measure_debate(r, bar, err);
    if (rc == OK && r->o->rounds) rc = measure_self_consistency(r, &r->best[0], bar, err);
    for (int g = 0; rc == OK && g < r->n_best; g++) {
        if (!is_shown(r, g)) continue;
        snprintf(name, sizeof name, "generation %d best (%s)", g, r->best[g].name);
        rc = measure_solo(r, name, candidate_agent(&r->best[g]), bar, err);
    }
    return rc;
}

static int64_t count_right(const struct heldout_result *m, int n) {
    int64_t right = 0;
    for (int i = 0; i < n; i++) right += m->right[i];
    return right;
}

static json_t *table_json(const struct evolve_run *r) {
    json_t *table = json_array();
    for (int i = 0; i < r->n_rows; i++) {
        const struct heldout_result *m = &r->rows[i];
        struct stats_interval ci = stats_wilson(count_right(m, r->n_test), r->n_test);
        json_array_append_new(table, json_pack("{s:s,s:i,s:f,s:f,s:f,s:I,s:I}", "name", m->name,
                                               "n", r->n_test, "acc", ci.value, "lo", ci.lo, "hi",
                                               ci.hi, "prefilled", (json_int_t)m->prefilled,
                                               "generated", (json_int_t)m->generated));
    }
    return table;
}

/* The row with the name `prefix`, or else the last row whose name begins with `prefix`. */
static const struct heldout_result *find_row(const struct evolve_run *r, const char *prefix) {
    const struct heldout_result *found = NULL;
    for (int i = 0; i < r->n_rows; i++)
        if (strcmp(r->rows[i].name, prefix) == 0) return &r->rows[i];
    for (int i = 0; i < r->n_rows; i++)
        if (strncmp(r->rows[i].name, prefix, strlen(prefix)) == 0) found = &r->rows[i];
    return found;
}

/* The planned comparisons of the run, paired on the same questions, with p-values corrected for the
 * number of comparisons (Holm). */
static json_t *comparisons_json(const struct evolve_run *r, const char *best_founder) {
    const char *pairs[][2] = {{best_founder, "base"},         {"generation", best_founder},
                              {"debate", best_founder},       {"debate", "first-round vote"},
                              {"debate", "self-consistency"}, {"generation", "self-consistency"}};
    enum { N = ARRAY_LEN(pairs), WITHOUT_DEBATE = 2 };
    struct stats_pair v[N];
    int n = r->o->rounds ? N : WITHOUT_DEBATE;
    for (int i = 0; i < n; i++) {
        const struct heldout_result *a = find_row(r, pairs[i][0]), *b = find_row(r, pairs[i][1]);
        v[i] = (struct stats_pair){a->name, b->name, a->right, b->right};
    }
    json_t *list = stats_pairs_json(v, n, r->n_test), *c;
    size_t i;
    json_array_foreach (list, i, c)
        json_object_set_new(c, "significant", json_boolean(json_get_number(c, "p_holm") < 0.05));
    return list;
}

/* Measures retention on the tasks of `retain`: compares the best founder with the best candidate of
 * the last generation, paired on the same questions. */
static int measure_retention(struct evolve_run *r, struct progress *bar, struct error *err) {
    const struct strings *families = &r->o->retain;
    int max_items = (int)r->o->retain_items, rc = OK;
    struct heldout_result before = {.right = xcalloc((size_t)max_items + 1, 1)},
                          after = {.right = xcalloc((size_t)max_items + 1, 1)};
    struct stats_mcnemar *d = xcalloc((size_t)families->n + 1, sizeof *d);
    double *p = xcalloc(2 * (size_t)families->n + 1, sizeof *p), *holm = p + families->n;
    json_t *list = json_array(), *row;
    for (int i = 0; rc == OK && i < families->n; i++) {
        struct strings family = {&families->v[i], 1};
        int n = evolve_run_count_items(r, &family, SPLIT_TEST, max_items);
        struct task_item *items =
            evolve_run_task_items(r, &family, SPLIT_TEST, (uint64_t)r->o->seed, 0, n);
        rc = evaluate_solo(r, candidate_agent(&r->best[0]), items, n, &before, bar, err);
        if (rc == OK)
            rc = evaluate_solo(r, candidate_agent(&r->best[r->n_best - 1]), items, n, &after, bar,
                               err);
        d[i] = stats_mcnemar(after.right, before.right, n);
        p[i] = d[i].p;
        struct stats_interval b = stats_wilson(count_right(&before, n), n),
                              a = stats_wilson(count_right(&after, n), n);
        json_array_append_new(
            list, json_pack("{s:s,s:i,s:{s:f,s:f,s:f},s:{s:f,s:f,s:f},s:o}", "family",
                            families->v[i], "n", n, "founder", "acc", b.value, "lo", b.lo, "hi",
                            b.hi, "evolved", "acc", a.value, "lo", a.lo, "hi", a.hi, "diff",
                            stats_interval_json(stats_paired_interval(&d[i], families->n))));
        task_items_release(items, n);
    }
    stats_holm(p, families->n, holm);
    size_t i;
    json_array_foreach (list, i, row) json_object_set_new(row, "p_holm", json_real(holm[i]));
    json_object_set_new(r->result, "retention", list);
    free(before.right);
    free(after.right);
    free(d);
    free(p);
    return rc;
}

static const char **item_keys(const struct task_item *v, int n) {
    const char **keys = xcalloc((size_t)n + 1, sizeof *keys);
    for (int i = 0; i < n; i++) keys[i] = v[i].key;
    return keys;
}

/* Verifies that no test question was a fitness question of any generation; the splits are disjoint
 * by construction. */
static int check_disjoint(struct evolve_run *r, struct error *err) {
    const char **test = item_keys(r->test, r->n_test);
    int rc = OK;
    for (int g = 0; rc == OK && g < r->n_best; g++) {
        int n;
        struct task_item *items = evolve_run_generation_items(r, g, &n);
        const char **keys = item_keys(items, n);
        rc = fitness_check_disjoint(keys, n, test, r->n_test, err);
        free(keys);
        task_items_release(items, n);
    }
    free(test);
    return rc;
}

/* Asks the run's client, and counts the tokens of the calls as a cost of the tests. */
struct counting_client {
    struct llm_client client;
    struct evolve_run *r;
};

static int counting_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    const struct counting_client *c = ctx;
    struct evolve_cost *cost = &c->r->tests;
    int rc = c->client.ask(c->client.ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        int64_t tokens = calls[i].n_prefilled + calls[i].n_generated;
        cost->forward_tokens += tokens;
        cost->flops += (double)tokens * evolve_run_token_flops(c->r, calls[i].agent->adapter);
    }
    return rc;
}

static int measure_all(struct evolve_run *r, struct progress *bar, struct error *err) {
    struct counting_client counting = {r->llm_client, r};
    r->llm_client = (struct llm_client){&counting, counting_ask};
    int rc = measure_rows(r, bar, err);
    if (rc == OK && r->o->retain.n) rc = measure_retention(r, bar, err);
    r->llm_client = counting.client;
    return rc;
}

int evolve_run_evaluate_heldout(struct evolve_run *r, struct error *err) {
    struct progress bar;
    int64_t n_rows = 0, retained = 0;
    for (int g = 0; g < r->n_best; g++) n_rows += is_shown(r, g);
    for (int i = 0; i < r->n_founders; i++) n_rows += is_founder_measured(r, i);
    r->max_rows = (int)n_rows + 4; /* base, debate, first-round vote, self-consistency */
    r->rows = xcalloc((size_t)r->max_rows, sizeof *r->rows);
    r->n_test = evolve_run_count_items(r, &r->o->tasks, SPLIT_TEST, r->o->test_items);
    r->test =
        evolve_run_task_items(r, &r->o->tasks, SPLIT_TEST, (uint64_t)r->o->seed, 0, r->n_test);
    for (int i = 0; i < r->o->retain.n; i++) {
        struct strings family = {&r->o->retain.v[i], 1};
        retained += evolve_run_count_items(r, &family, SPLIT_TEST, r->o->retain_items);
    }
    int rc = check_disjoint(r, err);
    progress_start(&bar, "held-out test",
                   (1 + n_rows) * r->n_test + founders_debate_calls(r) + 2 * retained);
    if (rc == OK) rc = measure_all(r, &bar, err);
    progress_finish(&bar, NULL);
    if (rc != OK) return rc;
    json_object_set_new(r->result, "table", table_json(r));
    json_object_set_new(r->result, "comparisons", comparisons_json(r, r->best[0].name));
    return OK;
}
