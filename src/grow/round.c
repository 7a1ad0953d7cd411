/*
 * round: the proposals of a round, the answers that are kept of them, and the files for the
 * training.
 *
 * A round asks the questions that no round has asked, in their order, then those without a kept
 * answer once more. Whether a question is held out follows from its text, so the gate never
 * measures a question that a round has trained on.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "grow/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEMPLATE_TOKENS = 256, /* a chat template and a system prompt */
    CHECK_TOKENS = 64,     /* the reply to a check's question, with its wording */
    HELD_OUT_SHARES = 1000,
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
            if (r->state[i].asked == again && !r->state[i].kept) places[n++] = i;
    return n;
}

static bool is_held_out(const struct grow_run *r, int question) {
    const char *text = r->q->v[question].item.question;
    struct buf normal = {0};
    text_normalize(text, strlen(text), &normal); // questions that differ in case or blanks are one
    const uint64_t h = hash_fnv1a(normal.data ? normal.data : "", normal.len);
    buf_release(&normal);
    return (double)(h % HELD_OUT_SHARES) < r->o->held_out * HELD_OUT_SHARES;
}

static void answer_keep(struct grow_run *r, int question, int round, int sample, int agent,
                        const char *text) {
    if (!(r->n_kept & (r->n_kept - 1)))
        r->kept = xrealloc(r->kept, sizeof *r->kept * (size_t)MAX(2 * r->n_kept, 1));
    r->kept[r->n_kept++] = (struct kept_answer){.question = question,
                                                .agent = agent,
                                                .sample = sample,
                                                .round = round,
                                                .text = xstrdup(text),
                                                .held_out = is_held_out(r, question)};
    r->state[question].kept = true;
}

/* Whether a text has the question's right answer; -1: that is not known. */
static int answer_is_right(const struct grow_run *r, int question, const char *text) {
    const char *gold = r->q->v[question].item.gold;
    struct error ignored; // the grader's name is checked
    const struct grader *g = grader_find(r->o->grader, &ignored);
    return gold && g ? grader_grade(g, text, &gold, 1).score >= 0.5 : -1;
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
    json_t *pass_at = json_array();
    int found = 0;
    for (int k = 0; k < s->max_samples; k++) {
        found = 0;
        for (int i = 0; i < s->n_items; i++) {
            bool passed = false;
            for (int j = 0; j <= k && j < s->n[i]; j++)
                passed |= s->v[(int64_t)i * s->max_samples + j].passed;
            found += passed;
        }
        json_array_append_new(pass_at, json_real((double)found / (double)MAX(s->n_items, 1)));
    }
    json_object_set_new(report, "passed", json_integer(found));
    json_object_set_new(report, "coverage", json_real((double)found / (double)MAX(s->n_items, 1)));
    json_object_set_new(report, "pass_at", pass_at);
}

static void kinds_report(const struct grow_run *r, const struct checked_samples *s,
                         const int *places, const int *kept, json_t *report) {
    json_t *kinds = json_array();
    for (int i = 0; i < s->n_items; i++) {
        json_t *v = find_or_add(kinds, "kind", r->q->v[places[i]].kind);
        bool passed = false;
        for (int j = 0; j < s->n[i]; j++) passed |= s->v[(int64_t)i * s->max_samples + j].passed;
        add_to(v, "questions", 1);
        add_to(v, "passed", passed);
        add_to(v, "kept", kept[i] >= 0);
    }
    json_object_set_new(report, "kinds", kinds);
}

/* How many kept answers are right, of those whose right answer is known. The run does not use it.
 */
static void right_report(const struct grow_run *r, int first_kept, json_t *report) {
    int known = 0, right = 0;
    for (int i = first_kept; i < r->n_kept; i++) {
        const int is_right = answer_is_right(r, r->kept[i].question, r->kept[i].text);
        known += is_right >= 0;
        right += is_right > 0;
    }
    if (known > 0)
        json_object_set_new(report, "right", json_pack("{s:i,s:i}", "right", right, "of", known));
}

static void samples_keep(struct grow_run *r, int round, const struct checked_samples *s,
                         const int *places, json_t *report) {
    int *kept = xcalloc((size_t)MAX(s->n_items, 1), sizeof *kept);
    const int first_kept = r->n_kept;
    json_int_t calls = 0, prefilled = 0, generated = 0;
    for (int i = 0; i < s->n_items; i++) {
        const struct checked_sample *v = s->v + (int64_t)i * s->max_samples;
        kept[i] = sample_keep(r, s, i);
        if (kept[i] >= 0)
            answer_keep(r, places[i], round, kept[i], kept[i] % r->n_agents, v[kept[i]].text);
        calls += s->n[i];
        for (int j = 0; j < s->n[i]; j++) {
            prefilled += v[j].prefilled;
            generated += v[j].generated;
        }
    }
    coverage_report(s, report);
    kinds_report(r, s, places, kept, report);
    agents_report(r, s, kept, report);
    right_report(r, first_kept, report);
    json_object_set_new(report, "kept", json_integer(r->n_kept - first_kept));
    json_object_set_new(
        report, "cost",
        json_pack("{s:I,s:I,s:I}", "calls", calls, "prefilled", prefilled, "generated", generated));
    free(kept);
}

/* proposals */

struct engine *grow_engine_open(const struct grow_run *r, const struct grow_questions *q,
                                struct error *err) {
    const struct grow_env *env = r->env;
    const int64_t seqs = r->o->learn.limits.max_seqs;
    struct engine_options eo = {.max_rows = 512,
                                .max_seqs = seqs ? (int32_t)seqs : 256,
                                .max_len = round_longest(r->o, q, env->m->config.max_seq_len),
                                .kv_elem = r->kv,
                                .pool = env->pool};
    return engine_options_limit(env->m, &eo, err) == OK ? engine_new(env->m, &eo, err) : NULL;
}

static void check_report(const struct check *c, const struct check_questioner *q, json_t *report) {
    const struct check_cost cost = check_cost(c);
    json_object_set_new(report, "check",
                        json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:f}", "kind", check_kind(c), "checked",
                                  (json_int_t)cost.checked, "passed", (json_int_t)cost.passed,
                                  "questions", (json_int_t)cost.questions, "prefilled",
                                  (json_int_t)q->prefilled, "generated", (json_int_t)q->generated,
                                  "seconds", cost.seconds));
}

/* Samples answers to the questions `places` [n] and keeps some of them. */
static int proposals_run(struct grow_run *r, int round, struct engine *e, const int *places, int n,
                         json_t *report, struct error *err) {
    struct engine_client client = {.engine = e, .model = r->env->m, .store = r->store};
    struct check_questioner q = {.client = engine_client_as_llm(&client), .agent.name = "base"};
    const struct check_model model = check_questioner_as_model(&q);
    const struct check_options co = {.sandbox = r->o->check_sandbox, .model = &model};
    const struct llm_client llm = engine_client_as_llm(&client);
    struct checked_options so = {.max_samples = (int)r->o->samples,
                                 .passes = (int)r->o->passes,
                                 .chain_of_thought = r->o->chain_of_thought,
                                 .temperature = (float)r->o->temperature,
                                 .max_tokens = (int32_t)r->o->max_tokens,
                                 .seed = (uint64_t)r->o->learn.train.seed + (uint64_t)round,
                                 .grader = grader_find(r->o->grader, err)};
    struct checked_samples s = {0};
    struct progress p;
    if (!so.grader) return err->code;
    if (r->labels == LABELS_CHECK && !(so.check = check_open_filter(r->o->check, &co, err)))
        return err->code;
    struct task_item *items = xcalloc((size_t)MAX(n, 1), sizeof *items);
    for (int i = 0; i < n; i++) items[i] = r->q->v[places[i]].item; // borrowed
    char *title = xasprintf("round %d, proposals", round);
    progress_start(&p, title, (int64_t)n * so.max_samples);
    int rc = checked_samples_run(&llm, r->team, r->n_agents, items, n, &so, &s, &p, err);
    if (rc == OK) {
        for (int i = 0; i < n; i++) r->state[places[i]].asked = true;
        samples_keep(r, round, &s, places, report);
        if (so.check) check_report(so.check, &q, report);
        p.total = p.done; // questions end with their passes
    }
    progress_finish(&p, NULL);
    checked_samples_release(&s);
    check_free(so.check);
    free(title);
    free(items);
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
        answer_keep(r, places[i], round, -1, -1, text);
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
        struct engine *e = grow_engine_open(r, r->q, err);
        rc = e ? proposals_run(r, round, e, places, n, report, err) : err->code;
        engine_free(e);
    }
    free(places);
    return rc;
}

/* files for the training */

static json_t *line_json(const struct grow_run *r, const struct kept_answer *k) {
    const struct grow_question *q = &r->q->v[k->question];
    const struct task_item *it = &q->item;
    json_t *messages = json_array(), *given = json_object_get(it->chat, "messages");
    if (given)
        json_array_extend(messages, given);
    else
        messages_add(messages, "user", it->question);
    const char *prefix = !it->free_answer                           ? ""
                         : r->o->chain_of_thought && k->sample >= 0 ? WORK_PREFIX
                                                                    : ANSWER_PREFIX;
    char *reply = xasprintf("%s%s", prefix, k->text);
    messages_add(messages, "assistant", reply);
    free(reply);
    const struct agent *a = k->agent >= 0 ? &r->team[k->agent] : NULL;
    // without the run's name: equal runs write equal lines
    return json_pack("{s:o,s:{s:s,s:i,s:i,s:s,s:s*}}", "messages", messages, "source", "agent",
                     a ? a->name : "gold", "round", k->round, "sample", k->sample, "kind", q->kind,
                     "adapter", a && a->adapter ? a->adapter->hash : NULL);
}

/* How often a line of this kind is written: kinds with fewer lines are repeated, so that all have
 * about as many. */
static int kind_repeat(const json_t *counts, const char *kind, int64_t most, int64_t limit) {
    const json_int_t n = json_integer_value(json_object_get(counts, kind));
    const int64_t times = n > 0 ? (int64_t)llround((double)most / (double)n) : 1;
    return (int)MAX(1, MIN(times, limit));
}

int round_write(const struct grow_run *r, const char *dir, int *lines, int *held_out,
                json_t *report, struct error *err) {
    struct buf text[2] = {{0}}; // for the training and held out
    json_t *counts = json_object(), *repeated = json_object();
    int n[2] = {0};
    int64_t most = 0;
    for (int i = 0; i < r->n_kept; i++) {
        const char *kind = r->q->v[r->kept[i].question].kind;
        if (r->kept[i].held_out) continue;
        add_to(counts, kind, 1);
        most = MAX(most, (int64_t)json_integer_value(json_object_get(counts, kind)));
    }
    for (int i = 0; i < r->n_kept; i++) {
        const struct kept_answer *k = &r->kept[i];
        const char *kind = r->q->v[k->question].kind;
        const int times = k->held_out ? 1 : kind_repeat(counts, kind, most, r->o->repeat);
        json_t *v = line_json(r, k);
        char *line = json_dumps(v, JSON_COMPACT);
        for (int j = 0; j < times; j++) buf_printf(&text[k->held_out], "%s\n", line);
        n[k->held_out] += times;
        if (times > 1) json_object_set_new(repeated, kind, json_integer(times));
        free(line);
        json_decref(v);
    }
    int rc = OK;
    for (int i = 0; rc == OK && i < 2; i++) {
        char *path = path_join(dir, i ? "held_out.jsonl" : "kept.jsonl");
        rc = file_write_private(path, text[i].data ? text[i].data : "", text[i].len, err);
        free(path);
        buf_release(&text[i]);
    }
    *lines = n[0];
    *held_out = n[1];
    json_object_set_new(report, "lines", json_integer(n[0]));
    json_object_set_new(report, "held_out", json_integer(n[1]));
    json_object_set_new(report, "repeated", repeated);
    json_decref(counts);
    return rc;
}
