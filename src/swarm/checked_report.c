/*
 * checked_report: the gain of a team by a check: rows for samples with and without the check, of
 * the team and of its best agent, their comparisons, and the error rates of the check.
 *
 * Every row has the same number of samples at most. The rows of one agent show the gain by the
 * check; the difference between the checked rows is the team's own share. Rows with the check
 * stop at the first `passes` passes of an item, and their tokens include those of the check's
 * questions.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

enum { TEAM_MAJORITY, TEAM_CHECKED, BEST_MAJORITY, BEST_CHECKED, CHECKED_ROWS };

struct checked_report {
    const struct checked_report_options *o;
    uint8_t *right[CHECKED_ROWS]; /* [n_items] */
    struct check_confusion confusion;
};

/* Sets right[item], and adds the samples to the confusion matrix. */
static void samples_score(struct checked_report *r, const struct checked_samples *s, bool checked,
                          uint8_t *right) {
    const struct grader *g = r->o->samples.grader;
    for (int i = 0; i < s->n_items; i++) {
        const struct task_item *it = &r->o->items[i];
        const struct checked_sample *v = s->v + (int64_t)i * s->max_samples;
        const int best = checked_samples_decide(s, i, s->max_samples, checked);
        right[i] = best >= 0 && answer_is_right(it, g, v[best].answer);
        for (int j = 0; j < s->n[i]; j++)
            if (v[j].checked)
                check_confusion_add(&r->confusion, answer_is_right(it, g, v[j].answer),
                                    v[j].passed);
    }
}

/* Draws the samples of a row and adds the row. */
static int row_run(struct checked_report *r, int row, json_t *rows, struct progress *p,
                   struct error *err) {
    const struct checked_report_options *o = r->o;
    const bool team = row < BEST_MAJORITY, checked = row % 2;
    const struct agent *agents = team ? o->team : &o->team[o->best];
    struct checked_options with = o->samples;
    struct checked_samples s;
    struct check_questioner *q = o->questioner;
    const int64_t questions = check_cost(o->samples.check).questions;
    struct report_cost c;
    char name[96];
    if (!checked) with.check = NULL, with.passes = 0;
    q->prefilled = q->generated = 0;
    r->right[row] = xcalloc((size_t)MAX(o->n_items, 1), 1);
    int rc = checked_samples_run(o->client, agents, team ? o->n_agents : 1, o->items, o->n_items,
                                 &with, &s, p, err);
    if (rc == OK) {
        samples_score(r, &s, checked, r->right[row]);
        c = checked_samples_cost(&s);
        if (p && p->total > 0) p->total -= (int64_t)o->n_items * with.max_samples - c.calls;
        c.calls += check_cost(o->samples.check).questions - questions;
        c.prefilled += q->prefilled;
        c.generated += q->generated;
        snprintf(name, sizeof name, "%.40s@%d%s", team ? "team" : agents->name, with.max_samples,
                 checked ? ", checked" : ", majority");
        report_row_add(rows, name, checked ? "checked" : "samples", r->right[row], o->n_items, c);
    }
    checked_samples_release(&s);
    return rc;
}

/* The pre-registered comparisons: the team with the check against samples of its best agent, with
 * the check and without, and the check's gain for one agent. */
static json_t *comparisons_json(const struct checked_report *r) {
    static const int pairs[][2] = {
        {TEAM_CHECKED, BEST_MAJORITY}, {TEAM_CHECKED, BEST_CHECKED}, {BEST_CHECKED, BEST_MAJORITY}};
    static const char *const names[] = {"team, checked – one agent, majority",
                                        "team, checked – one agent, checked (the team's share)",
                                        "one agent, checked – majority (the check's share)"};
    struct stats_pair v[ARRAY_LEN(pairs)];
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++)
        v[i] = (struct stats_pair){.a = r->right[pairs[i][0]], .b = r->right[pairs[i][1]]};
    json_t *list = stats_pairs_json(v, ARRAY_LEN(pairs), r->o->n_items);
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++)
        json_object_set_new(json_array_get(list, i), "name", json_string(names[i]));
    return list;
}

int64_t checked_report_max_calls(int n_items, int max_samples) {
    return (int64_t)CHECKED_ROWS * n_items * max_samples;
}

json_t *checked_report_run(const struct checked_report_options *o, json_t *rows, struct progress *p,
                           struct error *err) {
    struct checked_report r = {.o = o};
    int rc = OK;
    json_t *v = NULL;
    for (int row = 0; rc == OK && row < CHECKED_ROWS; row++) rc = row_run(&r, row, rows, p, err);
    if (rc == OK) {
        const struct check_confusion *m = &r.confusion;
        v = json_pack("{s:s,s:i,s:i,s:{s:I,s:I,s:I,s:I},s:o}", "kind", check_kind(o->samples.check),
                      "samples", o->samples.max_samples, "passes", o->samples.passes, "confusion",
                      "right_passed", (json_int_t)m->right_passed, "right_failed",
                      (json_int_t)m->right_failed, "wrong_passed", (json_int_t)m->wrong_passed,
                      "wrong_failed", (json_int_t)m->wrong_failed, "comparisons",
                      comparisons_json(&r));
    }
    for (int row = 0; row < CHECKED_ROWS; row++) free(r.right[row]);
    return v;
}

static double share(json_int_t part, json_int_t rest) {
    return part + rest > 0 ? 100.0 * (double)part / (double)(part + rest) : 0;
}

void checked_report_print(const json_t *v, FILE *f) {
    const json_t *m = json_object_get(v, "confusion"), *c;
    size_t i;
    const json_int_t n[] = {json_integer_value(json_object_get(m, "right_passed")),
                            json_integer_value(json_object_get(m, "right_failed")),
                            json_integer_value(json_object_get(m, "wrong_passed")),
                            json_integer_value(json_object_get(m, "wrong_failed"))};
    fprintf(f, "check '%s': %.1f %% of %lld right answers pass, %.1f %% of %lld wrong ones\n",
            json_string_value(json_object_get(v, "kind")), share(n[0], n[1]),
            (long long)(n[0] + n[1]), share(n[2], n[3]), (long long)(n[2] + n[3]));
    json_array_foreach (json_object_get(v, "comparisons"), i, c)
        fprintf(f, "  %-56s %+5.1f (%+.1f … %+.1f)  p %.4f\n",
                json_string_value(json_object_get(c, "name")), 100 * json_get_number(c, "diff"),
                100 * json_get_number(c, "lo"), 100 * json_get_number(c, "hi"),
                json_get_number(c, "p_holm"));
}
