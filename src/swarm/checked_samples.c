/*
 * checked_samples: samples of answers, and the answer that a check accepts most often.
 *
 * The agents take turns: sample j of an item is agent j mod n's. An agent's first sample is greedy,
 * because it is the best single guess; the others are sampled. A round draws one sample of
 * every item that is not finished, in one batch, and checks it.
 *
 * The check does not see the right answer: an item is given to it as its question and the fields of
 * `check`.
 *
 * Invariant: a sample depends on its item, agent and index only, so the samples drawn before an
 * item finishes are the first of those that would be drawn without a check.
 */
#define _GNU_SOURCE
#include "check/check.h"
#include "grade/grade.h"
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

enum { QUESTION_TOKENS = 64 }; /* limit of the reply to a check's question */

static int questions_ask(void *ctx, const char *const *questions, int n, char **answers,
                         struct error *err) {
    struct check_questioner *q = ctx;
    struct task_item *items = xcalloc((size_t)MAX(n, 1), sizeof *items);
    struct llm_call *calls = xcalloc((size_t)MAX(n, 1), sizeof *calls);
    struct chat_message(*chats)[2] = xcalloc((size_t)MAX(n, 1), sizeof *chats);
    for (int i = 0; i < n; i++) {
        items[i].question = (char *)(uintptr_t)questions[i];
        calls[i] = llm_call_question(&q->agent, &items[i], -1, chats[i]);
        calls[i].max_tokens = QUESTION_TOKENS;
    }
    int rc = q->client.ask(q->client.ctx, calls, n, err);
    for (int i = 0; i < n; i++) {
        answers[i] = xstrdup(rc == OK && calls[i].text ? calls[i].text : "");
        q->prefilled += calls[i].n_prefilled;
        q->generated += calls[i].n_generated;
        llm_call_release(&calls[i]);
    }
    free(chats), free(calls), free(items);
    return rc;
}

struct check_model check_questioner_as_model(struct check_questioner *q) {
    return (struct check_model){q, questions_ask};
}

/* The object that a check sees of an item. */
static json_t *item_json(const struct task_item *it) {
    if (it->check_item) return json_incref(it->check_item);
    json_t *v = json_pack("{s:s}", "question", it->question);
    if (it->check_question && it->check_answer)
        json_object_set_new(
            v, "check",
            json_pack("{s:s,s:s}", "question", it->check_question, "answer", it->check_answer));
    return v;
}

struct checked_run {
    const struct llm_client *client;
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    const struct checked_options *o;
    const struct grader *grader;
    struct checked_samples *out;
    json_t **item_json; /* [n_items] what the check sees; NULL: the item cannot be checked */
};

static struct checked_sample *sample_at(const struct checked_samples *s, int item, int sample) {
    return &s->v[(int64_t)item * s->max_samples + sample];
}

static bool item_is_finished(const struct checked_run *r, int item) {
    int passed = 0;
    for (int j = 0; j < r->out->n[item]; j++) passed += sample_at(r->out, item, j)->passed;
    return r->out->n[item] == r->out->max_samples || (r->o->passes && passed >= r->o->passes);
}

/* The call of sample j of an item. */
static struct llm_call sample_call(const struct checked_run *r, int item, int j,
                                   struct chat_message chat[2]) {
    const struct agent *agent = &r->team[j % r->n_agents];
    struct llm_call c = llm_call_question(agent, &r->items[item], j % r->n_agents, chat);
    c.chain_of_thought = r->o->chain_of_thought;
    c.temperature = j < r->n_agents ? 0 : r->o->temperature;
    c.max_tokens = r->o->max_tokens;
    c.seed = r->o->seed * 0x9E3779B97F4A7C15u + (uint64_t)item * (uint64_t)r->out->max_samples +
             (uint64_t)j;
    return c;
}

/* Stores a reply as the next sample of its item. */
static void sample_add(struct checked_run *r, int item, struct llm_call *c) {
    struct checked_sample *s = sample_at(r->out, item, r->out->n[item]++);
    float confidence;
    s->prefilled = c->n_prefilled;
    s->generated = c->n_generated;
    if (c->failed) return;
    s->text = c->text;
    c->text = NULL;
    s->answer = answer_parse(r->grader, c, s->text, &confidence);
    s->checked = s->answer && r->item_json[item];
}

/* Checks the samples of a round: places[i] is the item of case i, whose last sample it is. */
static int round_check(struct checked_run *r, const int *places, int n, struct error *err) {
    struct check_case *cases = xcalloc((size_t)MAX(n, 1), sizeof *cases);
    int m = 0;
    for (int i = 0; i < n; i++) {
        const struct checked_sample *s = sample_at(r->out, places[i], r->out->n[places[i]] - 1);
        if (s->checked)
            cases[m++] = (struct check_case){
                .item = r->item_json[places[i]], .text = s->text, .ended = true};
    }
    int rc = check_run(r->o->check, cases, m, err);
    m = 0;
    for (int i = 0; rc == OK && i < n; i++) {
        struct checked_sample *s = sample_at(r->out, places[i], r->out->n[places[i]] - 1);
        if (s->checked) s->passed = cases[m++].passed;
    }
    free(cases);
    return rc;
}

/* Draws and checks one more sample of every item that is not finished; *drawn: their number. */
static int sample_round(struct checked_run *r, int *drawn, struct error *err) {
    const int n_items = r->out->n_items;
    int *places = xcalloc((size_t)MAX(n_items, 1), sizeof *places), n = 0;
    struct llm_call *calls = xcalloc((size_t)MAX(n_items, 1), sizeof *calls);
    struct chat_message(*chats)[2] = xcalloc((size_t)MAX(n_items, 1), sizeof *chats);
    for (int i = 0; i < n_items; i++) {
        if (item_is_finished(r, i)) continue;
        calls[n] = sample_call(r, i, r->out->n[i], chats[n]);
        places[n++] = i;
    }
    int rc = n ? r->client->ask(r->client->ctx, calls, n, err) : OK;
    for (int i = 0; i < n; i++) {
        if (rc == OK) sample_add(r, places[i], &calls[i]);
        llm_call_release(&calls[i]);
    }
    if (rc == OK && n && r->o->check) rc = round_check(r, places, n, err);
    *drawn = n;
    free(chats), free(calls), free(places);
    return rc;
}

/* Sets what the check sees of each item. Fails if it can check none of them. */
static int items_prepare(struct checked_run *r, struct error *err) {
    int checkable = 0, rc = OK;
    for (int i = 0; r->o->check && i < r->out->n_items; i++) {
        r->item_json[i] = item_json(&r->items[i]);
        rc = check_item(r->o->check, r->item_json[i], err);
        checkable += rc == OK;
        if (rc == OK) continue;
        json_decref(r->item_json[i]);
        r->item_json[i] = NULL;
    }
    if (checkable > 0 && checkable < r->out->n_items)
        log_info("%d of %d questions cannot be checked: their answer is the most frequent one",
                 r->out->n_items - checkable, r->out->n_items);
    return checkable > 0 ? OK : rc;
}

int checked_samples_run(const struct llm_client *client, const struct agent *team, int n_agents,
                        const struct task_item *items, int n_items, const struct checked_options *o,
                        struct checked_samples *out, struct progress *p, struct error *err) {
    const size_t n = (size_t)MAX(n_items, 1);
    struct checked_run r = {client, team, n_agents, items, o, o->grader, out, NULL};
    if (!r.grader && !(r.grader = grader_find("exact", err))) return err->code;
    *out = (struct checked_samples){.n_items = n_items, .max_samples = o->max_samples};
    out->v = xcalloc(n * (size_t)o->max_samples, sizeof *out->v);
    out->n = xcalloc(n, sizeof *out->n);
    r.item_json = xcalloc(n, sizeof *r.item_json);
    int rc = items_prepare(&r, err), drawn = n_items;
    while (rc == OK && drawn > 0) {
        rc = sample_round(&r, &drawn, err);
        if (p) progress_update(p, p->done + drawn, NULL);
    }
    for (int i = 0; i < n_items; i++) json_decref(r.item_json[i]);
    free(r.item_json);
    return rc;
}

int checked_samples_of_texts(struct check *check, json_t *const *items, int n_items, int n_samples,
                             char *const *texts, struct checked_samples *out, struct error *err) {
    const int n = n_items * n_samples;
    const struct grader *g = grader_find("exact", err);
    struct check_case *cases = xcalloc((size_t)MAX(n, 1), sizeof *cases);
    *out = (struct checked_samples){.n_items = n_items, .max_samples = n_samples};
    out->v = xcalloc((size_t)MAX(n, 1), sizeof *out->v);
    out->n = xcalloc((size_t)MAX(n_items, 1), sizeof *out->n);
    for (int i = 0; i < n_items; i++) out->n[i] = n_samples;
    for (int i = 0; i < n; i++)
        cases[i] =
            (struct check_case){.item = items[i / n_samples], .text = texts[i], .ended = true};
    int rc = check_run(check, cases, n, err);
    for (int i = 0; rc == OK && i < n; i++)
        out->v[i] = (struct checked_sample){
            .answer = grader_answer(g, texts[i]), .checked = true, .passed = cases[i].passed};
    free(cases);
    return rc;
}

void checked_samples_release(struct checked_samples *s) {
    for (int64_t i = 0; s->v && i < (int64_t)s->n_items * s->max_samples; i++) {
        free(s->v[i].text);
        free(s->v[i].answer);
    }
    free(s->v);
    free(s->n);
    *s = (struct checked_samples){0};
}

struct report_cost checked_samples_cost(const struct checked_samples *s) {
    struct report_cost c = {0};
    for (int i = 0; i < s->n_items; i++)
        for (int j = 0; j < s->n[i]; j++) {
            c.calls++;
            c.prefilled += sample_at(s, i, j)->prefilled;
            c.generated += sample_at(s, i, j)->generated;
        }
    return c;
}

int checked_samples_first_pass(const struct checked_samples *s, int item) {
    for (int j = 0; j < s->n[item]; j++)
        if (sample_at(s, item, j)->passed) return j;
    return -1;
}

int checked_samples_used(const struct checked_samples *s, int item, int n, int passes) {
    int passed = 0, i = 0;
    for (; i < MIN(n, s->n[item]) && (!passes || passed < passes); i++)
        passed += sample_at(s, item, i)->passed;
    return i;
}

/* How many of the first n samples have the answer of sample i, and passed if `passed`. */
static int answer_count(const struct checked_samples *s, int item, int n, int i, bool passed) {
    const struct checked_sample *a = sample_at(s, item, i);
    int count = 0;
    for (int j = 0; j < n; j++) {
        const struct checked_sample *b = sample_at(s, item, j);
        count += b->answer && (!passed || b->passed) && strcmp(a->answer, b->answer) == 0;
    }
    return count;
}

int checked_samples_decide(const struct checked_samples *s, int item, int n, bool checked) {
    int best = -1, most = 0;
    bool passed = false;
    n = MIN(n, s->n[item]);
    for (int i = 0; checked && i < n; i++) passed |= sample_at(s, item, i)->passed;
    for (int i = 0; i < n; i++) {
        const struct checked_sample *a = sample_at(s, item, i);
        if (!a->answer || (passed && !a->passed)) continue;
        const int count = answer_count(s, item, n, i, passed);
        if (count <= most) continue;
        most = count;
        best = i;
    }
    return best;
}
