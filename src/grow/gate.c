/*
 * gate: whether a round's adapter answers held-out questions better than the one before.
 *
 * Each adapter answers every held-out question once, greedily. An answer counts if the labels of
 * the run accept it: it passes the check, is the team's most frequent answer, or is right. The
 * answers are paired by question, so that rare kinds of questions, which an average of losses
 * hides, count as much as they occur. A round's adapter is accepted if it has at least as many
 * accepted answers as the learner's best before; the run's is published if it has more than the
 * baseline beyond chance (McNemar). Learners share the questions; each has its own baseline.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "grow/internal.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

enum { SHARES = 1000 };

/* Questions that differ in case, width or blanks only are on the same side. */
static bool is_held_out(const struct grow_options *o, const char *text) {
    struct buf normal = {0};
    text_normalize(text, strlen(text), &normal);
    const uint64_t h = hash_fnv1a(normal.data ? normal.data : "", normal.len);
    buf_release(&normal);
    return (double)(h % SHARES) < o->held_out * SHARES;
}

/* The held-out questions without their answers, for the user. */
static int questions_write(const struct grow_run *r, struct error *err) {
    struct buf text = {0};
    char *path = path_join(r->dir, "held_out.jsonl");
    for (int i = 0; i < r->gate.n; i++) {
        buf_add_json_line(&text, json_pack("{s:s,s:s}", "question", r->gate.items[i].question,
                                           "kind", r->q->v[r->gate.places[i]].kind));
    }
    int rc = file_write_private(path, text.data ? text.data : "", text.len, err);
    buf_release(&text);
    free(path);
    return rc;
}

static bool answer_accepted(const struct answering *a, int i, const struct checked_sample *s) {
    const struct grow_gate *g = &a->r->gate;
    if (a->r->labels == LABELS_CHECK) return s->passed;
    if (a->r->labels == LABELS_GOLD) return answer_is_right(&g->items[i], a->grader, s->text);
    return s->answer && g->votes[i] && strcmp(s->answer, g->votes[i]) == 0;
}

/* accepted[n]: whether the adapter's answer to each held-out question is accepted. */
static int accepted_measure(const struct grow_run *r, struct answering *a, struct adapter *adapter,
                            uint8_t *accepted, struct error *err) {
    const struct agent agent = {.name = "adapter", .adapter = adapter};
    const struct sampling_plan plan = {.samples = 1, .checked = r->labels == LABELS_CHECK};
    struct checked_samples s = {0};
    int rc = answers_sample(a, &agent, 1, r->gate.items, r->gate.n, &plan, &s, NULL, err);
    for (int i = 0; rc == OK && i < r->gate.n; i++) accepted[i] = answer_accepted(a, i, &s.v[i]);
    checked_samples_release(&s);
    return rc;
}

/* The team's most frequent answers to the held-out questions. */
static int votes_measure(struct grow_run *r, struct answering *a, struct error *err) {
    const struct sampling_plan plan = {.samples = (int)r->o->samples};
    struct checked_samples s = {0};
    int rc =
        answers_sample(a, r->team, r->n_agents, r->gate.items, r->gate.n, &plan, &s, NULL, err);
    r->gate.votes = xcalloc((size_t)r->gate.n + 1, sizeof *r->gate.votes);
    for (int i = 0; rc == OK && i < r->gate.n; i++) {
        const int best = checked_samples_decide(&s, i, s.n[i], false);
        if (best < 0) continue;
        r->gate.votes[i] = xstrdup(s.v[(int64_t)i * s.max_samples + best].answer);
    }
    checked_samples_release(&s);
    return rc;
}

/* The adapter that the published one must be better than: at first the current version at its
 * output folder, else the adapter from which training starts; *out NULL: the base model. The run's
 * folder keeps a copy: the version in the output folder may be the run's own when it continues. */
static int baseline_open(const struct grow_run *r, const struct grow_learner *l,
                         struct adapter **out, struct error *err) {
    char *copy = path_join(l->dir, "baseline"), *done = path_join(l->dir, "baseline.json"),
         *text = NULL;
    const bool known = path_exists(done);
    const char *dir = known                    ? path_exists(copy) ? copy : NULL
                      : adapter_exists(l->out) ? l->out
                                               : r->o->learn.init_adapter;
    int rc = dir_make_private(l->dir, err);
    *out = NULL;
    if (rc == OK && dir && !(*out = adapter_open(dir, r->env->m, err))) rc = err->code;
    if (rc == OK && !dir && !known && l->start) *out = adapter_retain(l->start);
    if (rc == OK && !known && *out) rc = adapter_publish(*out, copy, r->env->m->name, NULL, err);
    if (rc == OK && !known) {
        text = xasprintf("{\"adapter\": \"%s\"}\n", *out ? (*out)->hash : "base");
        rc = file_write_private(done, text, strlen(text), err);
    }
    free(text), free(done), free(copy);
    return rc;
}

/* Measures the baseline of a learner, which is the best adapter until a round has a better one. */
static int baseline_measure(const struct grow_run *r, struct answering *a, struct grow_learner *l,
                            struct error *err) {
    struct adapter *baseline;
    int rc = baseline_open(r, l, &baseline, err);
    if (rc == OK) rc = accepted_measure(r, a, baseline, l->baseline, err);
    if (rc == OK) memcpy(l->best, l->baseline, (size_t)r->gate.n);
    adapter_release(baseline);
    return rc;
}

int grow_gate_open(struct grow_run *r, struct error *err) {
    struct grow_gate *g = &r->gate;
    struct answering a = {0};
    g->items = xcalloc((size_t)r->q->n + 1, sizeof *g->items);
    g->places = xcalloc((size_t)r->q->n + 1, sizeof *g->places);
    for (int i = 0; i < r->q->n; i++) {
        if (!is_held_out(r->o, r->q->v[i].item.question)) continue;
        r->state[i].held_out = true;
        g->items[g->n] = r->q->v[i].item; // borrowed
        g->places[g->n++] = i;
    }
    for (int i = 0; i < r->n_learners; i++) {
        r->learners[i].baseline = xcalloc((size_t)g->n + 1, 1);
        r->learners[i].best = xcalloc((size_t)g->n + 1, 1);
    }
    if (g->n == 0) return OK;
    int rc = questions_write(r, err);
    if (rc == OK) rc = answering_open(&a, r, r->q, err);
    if (rc == OK && r->labels == LABELS_VOTES) rc = votes_measure(r, &a, err);
    for (int i = 0; rc == OK && i < r->n_learners; i++)
        rc = baseline_measure(r, &a, &r->learners[i], err);
    answering_close(&a);
    return rc;
}

void grow_gate_close(struct grow_run *r) {
    struct grow_gate *g = &r->gate;
    for (int i = 0; g->votes && i < g->n; i++) free(g->votes[i]);
    free(g->votes), free(g->items), free(g->places);
    *g = (struct grow_gate){0};
}

json_t *grow_gate_json(const uint8_t *before, const uint8_t *after, int n) {
    const struct stats_mcnemar v = stats_mcnemar(after, before, n);
    const struct stats_interval d = stats_paired_interval(&v, 1);
    return json_pack("{s:i,s:f,s:f,s:f,s:f,s:f,s:f}", "n", n, "before",
                     (double)(v.both + v.only_b) / (double)MAX(n, 1), "after",
                     (double)(v.both + v.only_a) / (double)MAX(n, 1), "change", d.value, "lo", d.lo,
                     "hi", d.hi, "p", v.p);
}

int grow_gate_round(struct grow_run *r, struct grow_learner *l, struct adapter *candidate,
                    bool *accepted, json_t *record, struct error *err) {
    struct grow_gate *g = &r->gate;
    struct answering a = {0};
    uint8_t *now = xcalloc((size_t)g->n + 1, 1);
    int rc = g->n > 0 ? answering_open(&a, r, r->q, err) : OK;
    if (rc == OK && g->n > 0) rc = accepted_measure(r, &a, candidate, now, err);
    answering_close(&a);
    int64_t gain = 0;
    for (int i = 0; i < g->n; i++) gain += now[i] - l->best[i];
    *accepted = rc == OK && gain >= 0;
    if (rc == OK && g->n > 0)
        json_object_set_new(record, "gate", grow_gate_json(l->best, now, g->n));
    if (*accepted) memcpy(l->best, now, (size_t)g->n);
    free(now);
    return rc;
}

bool grow_gate_publish(const struct grow_run *r, const struct grow_learner *l) {
    const int n = r->gate.n;
    const struct stats_mcnemar v = stats_mcnemar(l->best, l->baseline, n);
    return l->grown && (n == 0 || (v.diff.value > 0 && v.p <= r->o->learn.gate.alpha));
}
