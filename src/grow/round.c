/*
 * round: the proposals of a round, the answers that are kept of them, and the files for the
 * training.
 *
 * A round asks the questions that no round has asked, in their order, then those without a kept
 * answer once more.
 */
#define _GNU_SOURCE
#include "grow/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEMPLATE_TOKENS = 256, /* a chat template and a system prompt */
    CHECK_TOKENS = 64,     /* the reply to a check's question, with its wording */
};

static const char *const labels_names[] = {"check", "votes", "gold"};

int grow_labels_parse(const char *name, enum grow_labels *out, struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(labels_names); i++)
        if (strcmp(name, labels_names[i]) == 0) {
            *out = (enum grow_labels)i;
            return OK;
        }
    return error_set(err, ERR_USAGE, "'%s' is unknown; labels are check, votes or gold", name);
}

int32_t round_longest(const struct grow_options *o, const struct grow_questions *q,
                      int32_t max_seq_len) {
    const size_t longest =
        q->longest + (size_t)MAX(o->max_tokens, CHECK_TOKENS) + (size_t)TEMPLATE_TOKENS;
    return (int32_t)MIN(longest, (size_t)max_seq_len);
}

/* The questions of a round: places[i] is an index in r->q. Returns their number. */
static int questions_select(const struct grow_run *r, int *places) {
    const int most = r->o->per_round ? (int)MIN(r->o->per_round, r->q->n) : r->q->n;
    int n = 0;
    for (int again = 0; again < 2; again++)
        for (int i = 0; i < r->q->n && n < most; i++)
            if (r->state[i].asked == again && !r->state[i].kept && !r->state[i].held_out)
                places[n++] = i;
    return n;
}

static void answer_keep(struct grow_run *r, int question, int round, int sample,
                        const struct agent *agent, const char *text) {
    if (!(r->n_kept & (r->n_kept - 1)))
        r->kept = xrealloc(r->kept, sizeof *r->kept * (size_t)MAX(2 * r->n_kept, 1));
    r->kept[r->n_kept++] = (struct kept_answer){
        .question = question,
        .agent = agent ? agent->name : NULL,
        .adapter_hash = agent && agent->adapter ? xstrdup(agent->adapter->hash) : NULL,
        .sample = sample,
        .round = round,
        .text = xstrdup(text)};
    r->state[question].kept = true;
}

/* The sample whose answer is kept; -1: none. Votes keep an answer that at least two samples gave.
 */
static int sample_keep(const struct grow_run *r, const struct checked_samples *s, int item) {
    const struct checked_sample *v = s->v + (int64_t)item * s->max_samples;
    const int best = checked_samples_decide(s, item, s->n[item], r->labels == LABELS_CHECK);
    int equal = 0;
    if (best < 0 || r->labels == LABELS_CHECK) return best >= 0 && v[best].passed ? best : -1;
    for (int j = 0; j < s->n[item]; j++)
        equal += v[j].answer && strcmp(v[j].answer, v[best].answer) == 0;
    return equal >= MIN(2, s->max_samples) ? best : -1;
}

/* figures */

static json_t *find_or_add(json_t *list, const char *key, const char *value) {
    json_t *v;
    size_t i;
    json_array_foreach (list, i, v)
        if (strcmp(json_get_string(v, key), value) == 0) return v;
    v = json_pack("{s:s}", key, value);
    json_array_append_new(list, v);
    return v;
}

static void add_to(json_t *v, const char *key, int64_t n) {
    json_object_set_new(v, key,
                        json_integer(json_integer_value(json_object_get(v, key)) + (json_int_t)n));
}

static void agents_report(const struct grow_run *r, const struct checked_samples *s,
                          const int *kept, json_t *report) {
    json_t *agents = json_array();
    for (int a = 0; a < r->n_agents; a++) {
        int64_t samples = 0, passed = 0, chosen = 0;
        for (int i = 0; i < s->n_items; i++)
            for (int j = a; j < s->n[i]; j += r->n_agents) {
                samples++;
                passed += s->v[(int64_t)i * s->max_samples + j].passed;
                chosen += kept[i] == j;
            }
        json_array_append_new(agents, json_pack("{s:s,s:I,s:I,s:I}", "name", r->team[a].name,
                                                "samples", (json_int_t)samples, "passed",
                                                (json_int_t)passed, "kept", (json_int_t)chosen));
    }
    json_object_set_new(report, "agents", agents);
}

/* pass_at[k]: the share of the questions of which one of the first k + 1 samples passed. */
static void coverage_report(const struct checked_samples *s, json_t *report) {
    const double n = (double)MAX(s->n_items, 1);
    int *first = xcalloc((size_t)s->max_samples, sizeof *first), found = 0;
    json_t *pass_at = json_array();
    for (int i = 0; i < s->n_items; i++) {
        const int j = checked_samples_first_pass(s, i);
        if (j >= 0) first[j]++;
    }
    for (int k = 0; k < s->max_samples; k++) {
        found += first[k];
        json_array_append_new(pass_at, json_real((double)found / n));
    }
    json_object_set_new(report, "passed", json_integer(found));
    json_object_set_new(report, "coverage", json_real((double)found / n));
    json_object_set_new(report, "pass_at", pass_at);
    free(first);
}

static void kinds_report(const struct grow_run *r, const struct checked_samples *s,
                         const int *places, const int *kept, json_t *report) {
    json_t *kinds = json_array();
    for (int i = 0; i < s->n_items; i++) {
        json_t *v = find_or_add(kinds, "kind", r->q->v[places[i]].kind);
        add_to(v, "questions", 1);
        add_to(v, "passed", checked_samples_first_pass(s, i) >= 0);
        add_to(v, "kept", kept[i] >= 0);
    }
    json_object_set_new(report, "kinds", kinds);
}

/* How many kept answers are right, of those whose right answer is known. The run does not use it.
 */
static void right_report(const struct answering *a, int first_kept, json_t *report) {
    const struct grow_run *r = a->r;
    int known = 0, right = 0;
    for (int i = first_kept; i < r->n_kept; i++) {
        const struct task_item *it = &r->q->v[r->kept[i].question].item;
        known += it->gold != NULL;
        right += answer_is_right(it, a->grader, r->kept[i].text);
    }
    if (known > 0)
        json_object_set_new(report, "right", json_pack("{s:i,s:i}", "right", right, "of", known));
}

static void samples_keep(struct grow_run *r, const struct answering *a, int round,
                         const struct checked_samples *s, const int *places, json_t *report) {
    int *kept = xcalloc((size_t)MAX(s->n_items, 1), sizeof *kept);
    const int first_kept = r->n_kept;
    const struct report_cost cost = checked_samples_cost(s);
    for (int i = 0; i < s->n_items; i++) {
        const struct checked_sample *v = s->v + (int64_t)i * s->max_samples;
        kept[i] = sample_keep(r, s, i);
        if (kept[i] >= 0)
            answer_keep(r, places[i], round, kept[i], &r->team[kept[i] % r->n_agents],
                        v[kept[i]].text);
    }
    coverage_report(s, report);
    kinds_report(r, s, places, kept, report);
    agents_report(r, s, kept, report);
    right_report(a, first_kept, report);
    json_object_set_new(report, "kept", json_integer(r->n_kept - first_kept));
    json_object_set_new(report, "cost",
                        json_pack("{s:I,s:I,s:I}", "calls", (json_int_t)cost.calls, "prefilled",
                                  (json_int_t)cost.prefilled, "generated",
                                  (json_int_t)cost.generated));
    free(kept);
}

/* proposals */

static void check_report(const struct answering *a, json_t *report) {
    const struct check_cost cost = check_cost(a->check);
    json_object_set_new(report, "check",
                        json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:f}", "kind", check_kind(a->check),
                                  "checked", (json_int_t)cost.checked, "passed",
                                  (json_int_t)cost.passed, "questions", (json_int_t)cost.questions,
                                  "prefilled", (json_int_t)a->questioner.prefilled, "generated",
                                  (json_int_t)a->questioner.generated, "seconds", cost.seconds));
}

/* Samples answers to the questions `places` [n]. The caller calls answering_close and
 * checked_samples_release, also after an error. */
static int questions_sample(const struct grow_run *r, struct answering *a, const char *title,
                            const int *places, int n, const struct sampling_plan *plan,
                            struct checked_samples *s, struct error *err) {
    struct progress p;
    struct task_item *items = xcalloc((size_t)MAX(n, 1), sizeof *items);
    for (int i = 0; i < n; i++) items[i] = r->q->v[places[i]].item; // borrowed
    *s = (struct checked_samples){0};
    progress_start(&p, title, (int64_t)n * plan->samples);
    int rc = answering_open(a, r, r->q, err);
    if (rc == OK) rc = answers_sample(a, r->team, r->n_agents, items, n, plan, s, &p, err);
    if (rc == OK) p.total = p.done; // questions end with their passes
    progress_finish(&p, NULL);
    free(items);
    return rc;
}

/* Samples answers to the questions `places` [n] and keeps some of them. */
static int proposals_run(struct grow_run *r, int round, const int *places, int n, json_t *report,
                         struct error *err) {
    const struct sampling_plan plan = {.samples = (int)r->o->samples,
                                       .passes = (int)r->o->passes,
                                       .checked = r->labels == LABELS_CHECK,
                                       .round = (uint64_t)round};
    struct answering a;
    struct checked_samples s;
    char *title = xasprintf("round %d, proposals", round);
    int rc = questions_sample(r, &a, title, places, n, &plan, &s, err);
    if (rc == OK) {
        for (int i = 0; i < n; i++) r->state[places[i]].asked = true;
        samples_keep(r, &a, round, &s, places, report);
        if (a.check) check_report(&a, report);
    }
    checked_samples_release(&s);
    answering_close(&a);
    free(title);
    return rc;
}

int rehearsal_ask(struct grow_run *r, struct error *err) {
    const struct sampling_plan plan = {.samples = r->n_agents}; // each agent's greedy answer
    struct answering a;
    struct checked_samples s;
    const int n = r->q->n_rehearsal;
    if (n == 0) return OK;
    int *places = xcalloc((size_t)n, sizeof *places);
    for (int i = 0; i < n; i++) places[i] = r->q->n + i;
    int rc = questions_sample(r, &a, "rehearsal", places, n, &plan, &s, err);
    for (int i = 0; rc == OK && i < n; i++) {
        const struct checked_sample *v = s.v + (int64_t)i * s.max_samples;
        const int best = checked_samples_decide(&s, i, s.n[i], false);
        if (best < 0 || v[best].generated >= r->o->max_tokens) continue; // it may be cut off
        answer_keep(r, places[i], 0, best, &r->team[best], v[best].text);
    }
    r->n_rehearsed = r->n_kept;
    checked_samples_release(&s);
    answering_close(&a);
    free(places);
    return rc;
}

/* The reference: the right answers are the labels, and nothing is sampled. */
static int gold_keep(struct grow_run *r, int round, const int *places, int n, json_t *report,
                     struct error *err) {
    const int first_kept = r->n_kept;
    for (int i = 0; i < n; i++) {
        const char *gold = r->q->v[places[i]].item.gold;
        r->state[places[i]].asked = true;
        if (!gold) continue;
        char *text = xasprintf(r->q->v[places[i]].item.free_answer ? " %s" : "%s", gold);
        answer_keep(r, places[i], round, -1, NULL, text);
        free(text);
    }
    json_object_set_new(report, "kept", json_integer(r->n_kept - first_kept));
    if (r->n_kept > first_kept || round > 1) return OK;
    return error_set(err, ERR_FORMAT, "no question has an 'answer', which --labels gold needs");
}

int round_propose(struct grow_run *r, int round, json_t *report, struct error *err) {
    int *places = xcalloc((size_t)MAX(r->q->n, 1), sizeof *places);
    const int n = questions_select(r, places);
    int rc = OK;
    json_object_set_new(report, "round", json_integer(round));
    json_object_set_new(report, "questions", json_integer(n));
    if (r->labels == LABELS_GOLD) {
        rc = gold_keep(r, round, places, n, report, err);
    } else if (n > 0) {
        rc = proposals_run(r, round, places, n, report, err);
    }
    free(places);
    return rc;
}

/* files for the training */

static json_t *line_json(const struct grow_run *r, const struct kept_answer *k) {
    const struct grow_question *q = &r->q->v[k->question];
    const struct task_item *it = &q->item;
    json_t *messages = json_array();
    messages_add(messages, "user", it->question);
    const char *prefix = !it->free_answer                           ? ""
                         : r->o->chain_of_thought && k->sample >= 0 ? WORK_PREFIX
                                                                    : ANSWER_PREFIX;
    char *reply = xasprintf("%s%s", prefix, k->text);
    messages_add(messages, "assistant", reply);
    free(reply);
    // without the run's name: equal runs write equal lines
    return json_pack("{s:o,s:{s:s,s:i,s:i,s:s,s:s*}}", "messages", messages, "source", "agent",
                     k->agent ? k->agent : "gold", "round", k->round, "sample", k->sample, "kind",
                     q->kind, "adapter", k->adapter_hash);
}

/* How often a line of this kind is written: kinds with fewer lines are repeated, so that all have
 * about as many. */
static int kind_repeat(const json_t *counts, const char *kind, int64_t most, int64_t limit) {
    const json_int_t n = json_integer_value(json_object_get(counts, kind));
    const int64_t times = n > 0 ? (int64_t)llround((double)most / (double)n) : 1;
    return (int)MAX(1, MIN(times, limit));
}

int round_write(const struct grow_run *r, const char *dir, int *lines, json_t *report,
                struct error *err) {
    struct buf text = {0};
    json_t *counts = json_object(), *repeated = json_object();
    int64_t most = 0;
    *lines = 0;
    for (int i = r->n_rehearsed; i < r->n_kept; i++) {
        const char *kind = r->q->v[r->kept[i].question].kind;
        add_to(counts, kind, 1);
        most = MAX(most, (int64_t)json_integer_value(json_object_get(counts, kind)));
    }
    for (int i = 0; i < r->n_kept; i++) {
        const char *kind = r->q->v[r->kept[i].question].kind;
        const int times = i < r->n_rehearsed ? 1 : kind_repeat(counts, kind, most, r->o->repeat);
        json_t *v = line_json(r, &r->kept[i]);
        char *line = json_dumps(v, JSON_COMPACT);
        for (int j = 0; j < times; j++) buf_printf(&text, "%s\n", line);
        *lines += times;
        if (times > 1) json_object_set_new(repeated, kind, json_integer(times));
        free(line);
        json_decref(v);
    }
    char *path = path_join(dir, "kept.jsonl");
    int rc = file_write_private(path, text.data ? text.data : "", text.len, err);
    free(path);
    buf_release(&text);
    json_object_set_new(report, "lines", json_integer(*lines));
    json_object_set_new(report, "repeated", repeated);
    json_decref(counts);
    return rc;
}
