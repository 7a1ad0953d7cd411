/*
 * compare: the gain of a run, on questions with known answers that are in no run.
 *
 * Rows are accuracies of generated answers: the base model, each agent, samples of the team and of
 * its best agent with and without the check, the grown adapter, and adapters that further runs grow
 * from the same questions with as many updates: from votes instead of the check, by the best agent
 * alone, from the right answers. With --learn each: every learner's adapter, and samples of the
 * team of them. The best agent is the one with the most right answers on these questions, which
 * favours it. The check belongs to the task: rows of the best agent have it too.
 *
 * Three comparisons are named before the run: the grown adapter with the best agent; the team with
 * the check with samples of the best agent without it, at least as many tokens; the adapter of the
 * team with that of one agent. With --learn each: the best agent's adapter with the best agent; as
 * above; the grown team with the team, both with the check. Their p values are corrected together
 * (Holm).
 */
#define _GNU_SOURCE
#include "grow/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 2 * TEAM_MAX + 8 + 2 * GROW_MAX_REFERENCES };

struct row {
    char name[80];
    uint8_t *right; /* [n] */
    struct report_cost cost;
    int64_t retained; /* right answers to the questions of other tasks; -1: not measured */
};
struct comparison {
    const struct grow_run *r;
    struct task_item *items, *other; /* [n], [n_other] questions of the tasks and of other ones */
    int n, n_other, best;            /* best: row of the best agent */
    struct answering a;
    struct row rows[MAX_ROWS];
    int n_rows;
};

static const struct row *row_find(const struct comparison *c, const char *name) {
    for (int i = 0; i < c->n_rows; i++)
        if (strcmp(c->rows[i].name, name) == 0) return &c->rows[i];
    return NULL;
}

/* Samples answers of the team and adds a row: of the most frequent answer, with the check of those
 * that passed. */
static int row_measure(struct comparison *c, const char *name, const struct agent *team, int n_team,
                       int samples, bool checked, struct progress *p, struct error *err) {
    const struct sampling_plan plan = {
        .samples = samples, .passes = (int)c->r->o->passes, .checked = checked};
    struct check *check = c->a.check;
    struct checked_samples s = {0};
    CHECK(c->n_rows < MAX_ROWS);
    struct row *row = &c->rows[c->n_rows++];
    *row = (struct row){.right = xcalloc((size_t)MAX(c->n, 1), 1), .retained = -1};
    snprintf(row->name, sizeof row->name, "%s", name);
    c->a.questioner.prefilled = c->a.questioner.generated = 0;
    const int64_t questions = check ? check_cost(check).questions : 0;
    int rc = answers_sample(&c->a, team, n_team, c->items, c->n, &plan, &s, p, err);
    for (int i = 0; rc == OK && i < c->n; i++) {
        const struct checked_sample *v = s.v + (int64_t)i * s.max_samples;
        const int best = checked_samples_decide(&s, i, s.n[i], checked);
        row->right[i] = best >= 0 && answer_is_right(&c->items[i], c->a.grader, v[best].text);
    }
    if (rc == OK) row->cost = checked_samples_cost(&s);
    row->cost.prefilled += c->a.questioner.prefilled;
    row->cost.generated += c->a.questioner.generated;
    if (check) row->cost.calls += check_cost(check).questions - questions;
    checked_samples_release(&s);
    return rc;
}

static int64_t count_right(const uint8_t *right, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += right[i];
    return sum;
}

/* Sets the right answers of one agent to questions of other tasks. Their cost is not counted. */
static int retained_measure(struct comparison *c, const struct agent *agent, struct row *row,
                            struct progress *p, struct error *err) {
    const struct sampling_plan plan = {.samples = 1};
    struct checked_samples s = {0};
    if (c->n_other == 0) return OK;
    int rc = answers_sample(&c->a, agent, 1, c->other, c->n_other, &plan, &s, p, err);
    row->retained = 0;
    for (int i = 0; rc == OK && i < c->n_other; i++)
        row->retained +=
            answer_is_right(&c->other[i], c->a.grader, s.v[(int64_t)i * s.max_samples].text);
    checked_samples_release(&s);
    return rc;
}

/* The row of one agent's greedy answers. */
static int agent_measure(struct comparison *c, const char *name, const struct agent *agent,
                         struct progress *p, struct error *err) {
    int rc = row_measure(c, name, agent, 1, 1, false, p, err);
    return rc == OK ? retained_measure(c, agent, &c->rows[c->n_rows - 1], p, err) : rc;
}

/* Also the base model, unless it is an agent itself. */
static int agents_measure(struct comparison *c, struct progress *p, struct error *err) {
    const struct grow_run *r = c->r;
    const struct agent base = {.name = "base"};
    bool has_base = false;
    int rc = OK;
    for (int a = 0; rc == OK && a < r->env->n_agents; a++) {
        has_base |= !agent_has_adapter(&r->env->team[a]);
        rc = agent_measure(c, r->env->team[a].name, &r->env->team[a], p, err);
        if (rc == OK &&
            count_right(c->rows[a].right, c->n) > count_right(c->rows[c->best].right, c->n))
            c->best = a;
    }
    return rc == OK && !has_base ? agent_measure(c, "base", &base, p, err) : rc;
}

/* Samples of a team, without the check and with it; those with the check end with their passes. */
static int samples_measure(struct comparison *c, const char *who, const struct agent *team,
                           int n_team, struct progress *p, struct error *err) {
    const int k = (int)c->r->o->samples;
    int rc = OK;
    for (int checked = 0; rc == OK && checked <= (c->a.check != NULL); checked++) {
        char name[80];
        snprintf(name, sizeof name, "%.40s@%d%s", who, k, checked ? ", checked" : ", votes");
        rc = row_measure(c, name, team, n_team, k, checked, p, err);
    }
    return rc;
}

static int grown_measure(struct comparison *c, const char *name, struct adapter *a,
                         struct progress *p, struct error *err) {
    const struct agent agent = {.name = name, .adapter = a};
    return agent_measure(c, name, &agent, p, err);
}

/* The adapters that the gates accepted and, with --learn each, samples of the team of them: an
 * agent without an accepted adapter is in it unchanged. */
static int learners_measure(struct comparison *c, struct progress *p, struct error *err) {
    const struct grow_run *r = c->r;
    int rc = OK, n = 0;
    for (int i = 0; rc == OK && i < r->n_learners; i++) {
        const struct grow_learner *l = &r->learners[i];
        char name[80] = "grown";
        if (!l->grown) continue;
        if (l->agent >= 0) snprintf(name, sizeof name, "grown, %.40s", l->name), n++;
        rc = grown_measure(c, name, l->grown, p, err);
    }
    return rc == OK && n ? samples_measure(c, "grown team", r->team, r->n_agents, p, err) : rc;
}

/* further runs */

/* Grows an adapter with other labels, or by the best agent alone; *out: NULL if none passed the
 * gate. The result is added to `arms`. */
static int arm_run(struct comparison *c, const char *arm, struct adapter **out, json_t *arms,
                   struct error *err) {
    const struct grow_run *r = c->r;
    struct grow_env env = *r->env;
    struct grow_options o = *r->o;
    const bool one = strcmp(arm, "one") == 0;
    char *dir = one ? xasprintf("%s/one-%d", r->dir, c->best) : path_join(r->dir, arm);
    if (!one) o.labels = (char *)(uintptr_t)arm;
    if (one) {
        env.team[0] = r->env->team[c->best];
        env.n_agents = 1;
    }
    o.compare = (struct strings){0};
    o.test = o.test_retained = NULL;
    o.id = NULL;
    o.learn.out = dir;
    json_t *result = grow_run(&env, &o, r->q, err);
    int rc = result ? OK : err->code;
    if (rc == OK && json_is_true(json_object_get(result, "published"))) {
        *out = adapter_open(dir, env.m, err);
        if (!*out) rc = err->code;
    }
    if (rc == OK) json_object_set(arms, arm, result);
    json_decref(result);
    free(dir);
    return rc;
}

static int arms_measure(struct comparison *c, json_t *arms, struct progress *p, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < c->r->o->compare.n; i++) {
        const char *arm = c->r->o->compare.v[i];
        struct adapter *a = NULL;
        char name[80];
        snprintf(name, sizeof name, "grown, %s", arm);
        rc = arm_run(c, arm, &a, arms, err);
        if (rc == OK && a) rc = grown_measure(c, name, a, p, err);
        adapter_release(a);
    }
    return rc;
}

static int references_measure(struct comparison *c, struct progress *p, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < c->r->o->references.n; i++) {
        const char *dir = c->r->o->references.v[i], *name = path_name(dir);
        struct adapter *a = adapter_open(dir, c->r->env->m, err);
        rc = a ? grown_measure(c, *name ? name : dir, a, p, err) : err->code;
        adapter_release(a);
    }
    return rc;
}

/* the result */

static json_t *rows_json(const struct comparison *c) {
    json_t *list = json_array();
    for (int i = 0; i < c->n_rows; i++) {
        const struct row *row = &c->rows[i];
        report_row_add(list, row->name, "generated", row->right, c->n, row->cost);
        if (row->retained >= 0)
            json_object_set_new(json_array_get(list, (size_t)i), "retained",
                                json_real((double)row->retained / (double)c->n_other));
    }
    return list;
}

static json_t *comparisons_json(const struct comparison *c) {
    const char *best = c->r->env->team[c->best].name;
    const int k = (int)c->r->o->samples;
    const bool each = grow_learns_each(c->r->o);
    char majority[80], checked[80], grown[80] = "grown", grown_checked[80];
    snprintf(majority, sizeof majority, "%.40s@%d, votes", best, k);
    snprintf(checked, sizeof checked, "team@%d, checked", k);
    snprintf(grown_checked, sizeof grown_checked, "grown team@%d, checked", k);
    if (each) snprintf(grown, sizeof grown, "grown, %.40s", best);
    const char *const names[][2] = {{grown, best},
                                    {checked, majority},
                                    {each ? grown_checked : grown, each ? checked : "grown, one"}};
    struct stats_pair v[ARRAY_LEN(names)];
    int n = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const struct row *a = row_find(c, names[i][0]), *b = row_find(c, names[i][1]);
        if (a && b) v[n++] = (struct stats_pair){a->name, b->name, a->right, b->right};
    }
    return stats_pairs_json(v, n, c->n);
}

/* Questions that every agent answers wrongly bound every vote and router. */
static double all_wrong(const struct comparison *c) {
    int wrong = 0;
    for (int i = 0; i < c->n; i++) {
        bool right = false;
        for (int a = 0; a < c->r->env->n_agents; a++) right |= c->rows[a].right[i];
        wrong += !right;
    }
    return (double)wrong / (double)MAX(c->n, 1);
}

/* The test split of families, or lines of files with their answers: *items [*n], borrowed from q.
 */
static int items_open(const struct comparison *c, char *list, bool checked,
                      struct grow_questions *q, struct task_item **items, int *n,
                      struct error *err) {
    struct grow_options o = *c->r->o;
    const struct strings lists[] = {{0}, {&list, 1}};
    o.prompts = lists[checked];
    o.rehearse = lists[!checked];
    o.n = o.rehearse_n = o.test_n;
    if (grow_questions_open_split(&o, SPLIT_TEST, q, err) != OK) return err->code;
    *items = xcalloc((size_t)MAX(q->n + q->n_rehearsal, 1), sizeof **items);
    for (int i = 0; i < q->n + q->n_rehearsal; i++)
        if (q->v[i].item.gold) (*items)[(*n)++] = q->v[i].item;
    if (*n > 0) return OK;
    return error_set(err, ERR_FORMAT, "'%s' has no question with its 'answer'", list);
}

static int rows_measure(struct comparison *c, json_t *arms, struct error *err) {
    const struct grow_env *env = c->r->env;
    struct progress p;
    progress_start(&p, "answers to test questions", 0);
    int rc = agents_measure(c, &p, err);
    const struct agent *best = &env->team[c->best];
    if (rc == OK) rc = samples_measure(c, best->name, best, 1, &p, err);
    if (rc == OK) rc = samples_measure(c, "team", env->team, env->n_agents, &p, err);
    if (rc == OK) rc = learners_measure(c, &p, err);
    if (rc == OK) rc = references_measure(c, &p, err);
    progress_finish(&p, NULL);
    return rc == OK ? arms_measure(c, arms, NULL, err) : rc;
}

json_t *grow_compare(struct grow_run *r, struct error *err) {
    struct comparison c = {.r = r};
    struct grow_questions q = {0}, other = {0};
    json_t *v = NULL, *arms = json_object();
    int rc = items_open(&c, r->o->test, true, &q, &c.items, &c.n, err);
    if (rc == OK && r->o->test_retained)
        rc = items_open(&c, r->o->test_retained, false, &other, &c.other, &c.n_other, err);
    q.longest = MAX(q.longest, other.longest);
    if (rc == OK) rc = answering_open(&c.a, r, &q, err);
    if (rc == OK) rc = rows_measure(&c, arms, err);
    if (rc == OK)
        v = json_pack("{s:i,s:f,s:o,s:o,s:O}", "n", c.n, "all_wrong", all_wrong(&c), "rows",
                      rows_json(&c), "comparisons", comparisons_json(&c), "arms", arms);
    for (int i = 0; i < c.n_rows; i++) free(c.rows[i].right);
    answering_close(&c.a);
    json_decref(arms);
    free(c.items);
    free(c.other);
    grow_questions_release(&q);
    grow_questions_release(&other);
    return v;
}
