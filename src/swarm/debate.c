/*
 * debate: debates of whole task sets, and the self-consistency baseline. A debate runs a workflow
 * and reads the answers after every round from the transcripts.
 *
 * Invariant: an agent's first answer does not depend on the other agents. So teams that share an
 * agent share the calls of its first answers through the store.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

static struct agent_answer *answer_at(const struct debate *d, int round, int agent, int item) {
    return &d->answers[((size_t)round * (size_t)d->n_agents + (size_t)agent) * (size_t)d->n_items +
                       (size_t)item];
}

/* Sets the answers of one item after each round. An agent that gave no answer in a round keeps its
 * previous one. */
static void answers_fill(struct debate *d, const struct transcript *o, int item) {
    for (int a = 0; a < d->n_agents; a++) answer_at(d, 0, a, item)->choice = -1;
    for (int r = 0, u = 0; r < d->rounds; r++) {
        for (int a = 0; r > 0 && a < d->n_agents; a++)
            *answer_at(d, r, a, item) = *answer_at(d, r - 1, a, item);
        for (; u < o->n && o->v[u].round <= r; u++) {
            if (o->v[u].answer < 0) continue;
            *answer_at(d, r, o->v[u].agent, item) = utterance_answer(&o->v[u]);
        }
    }
}

/* The choice of the vote on the answers after round r; -1: no answers, or no quorum. */
static int vote_after_round(const struct debate *d, const struct vote *v, int r, int item,
                            int n_choices) {
    struct agent_answer last[TEAM_MAX];
    int n = 0;
    for (int a = 0; a < d->n_agents; a++)
        if (answer_at(d, r, a, item)->choice >= 0) last[n++] = *answer_at(d, r, a, item);
    return n ? vote_decide(v, last, n, n_choices) : -1;
}

static void costs_add(struct debate *d, const struct transcript *o) {
    for (int i = 0; i < o->n; i++) {
        d->prefilled += o->v[i].n_prefilled;
        d->generated += o->v[i].n_generated;
        d->truncated += o->v[i].truncated;
        d->failed += o->v[i].failed != NULL;
        d->calls++;
    }
}

/* right: [n_candidates] grades of the candidates, used if the item has no choices. */
static bool choice_is_correct(const struct task_item *it, const uint8_t *right, int choice) {
    if (choice < 0) return false;
    return it->n_choices ? choice == it->correct : right[choice];
}

bool debate_answer_is_correct(const struct debate *d, const struct task_item *items, int item,
                              int choice) {
    return choice_is_correct(&items[item], d->transcripts[item].right, choice);
}

/* Sets all results of item i, and adds its costs and flips. */
static void item_measure(struct debate *d, const struct task_item *items, const struct vote *v,
                         int i) {
    const struct transcript *o = &d->transcripts[i];
    answers_fill(d, o, i);
    costs_add(d, o);
    d->decision_correct[i] = debate_answer_is_correct(d, items, i, o->answer);
    for (int a = 0; a < d->n_agents; a++) {
        d->first_correct[(size_t)a * (size_t)d->n_items + (size_t)i] =
            debate_answer_is_correct(d, items, i, answer_at(d, 0, a, i)->choice);
        for (int r = 1; r < d->rounds; r++) {
            bool was_correct =
                     debate_answer_is_correct(d, items, i, answer_at(d, r - 1, a, i)->choice),
                 is_correct = debate_answer_is_correct(d, items, i, answer_at(d, r, a, i)->choice);
            d->flips_good += is_correct && !was_correct;
            d->flips_bad += was_correct && !is_correct;
        }
    }
    for (int r = 0; r < d->rounds; r++)
        d->vote_correct[(size_t)r * (size_t)d->n_items + (size_t)i] =
            debate_answer_is_correct(d, items, i, vote_after_round(d, v, r, i, o->n_candidates));
}

/* Replies at once; no two replies agree. ctx counts the calls. */
static int disagreeing_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    int64_t *count = ctx;
    (void)err;
    for (int i = 0; i < n; i++, ++*count) {
        struct llm_call *c = &calls[i];
        int choices = c->reply == REPLY_JUDGE ? c->n_candidates : c->item->n_choices;
        c->text = xasprintf("answer: %lld", (long long)*count);
        c->answer.choice = choices > 0 ? (int32_t)(*count % choices) : -1;
        if (c->reply == REPLY_JUDGE && choices == 0) c->failed = "there is nothing to judge";
        c->n_generated = 1;
    }
    return OK;
}

static int constant_embed(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                          int64_t *n_tokens, struct error *err) {
    (void)ctx, (void)texts, (void)err;
    *out = xcalloc((size_t)n, sizeof **out);
    *d = 1;
    *n_tokens = 0;
    return OK;
}

int64_t debate_max_calls(const struct agent *team, int n_agents, const struct task_item *items,
                         int n_items, const struct debate_options *o) {
    int64_t count = 0;
    struct debate_options one = *o;
    struct debate d;
    struct error ignored;
    const struct llm_client client = {&count, disagreeing_ask, constant_embed};
    one.on_step = NULL;
    if (n_items > 0) {
        debate_run(&client, team, n_agents, items, 1, &one, &d, NULL, &ignored);
        debate_release(&d);
    }
    return count * n_items;
}

/* The agent that the router chooses for each item, malloc'ed; NULL without a router. */
static int *routes(const struct router *r, const struct task_item *items, int n_items) {
    int *only = r ? xcalloc((size_t)n_items + 1, sizeof *only) : NULL;
    for (int i = 0; r && i < n_items; i++)
        only[i] = router_route(r, task_item_question(&items[i], -1), NULL);
    return only;
}

int debate_run(const struct llm_client *client, const struct agent *team, int n_agents,
               const struct task_item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err) {
    *out = (struct debate){.n_agents = n_agents, .n_items = n_items, .rounds = o->rounds};
    if (n_agents < 1 || n_agents > TEAM_MAX)
        return error_set(err, ERR_USAGE, "a debate needs 1 to %d agents, not %d", TEAM_MAX,
                         n_agents);
    if (o->rounds < 1) return error_set(err, ERR_USAGE, "a debate needs at least one round");
    if (o->router && o->rounds > 1)
        return error_set(err, ERR_USAGE,
                         "a team with a router has one round, not %d: one agent answers",
                         o->rounds);
    CHECK(!o->router || o->router->n_agents == n_agents);
    struct workflow *default_workflow = o->workflow ? NULL : workflow_open("brief", err);
    const struct workflow *w = o->workflow ? o->workflow : default_workflow;
    if (!w) return err->code;
    size_t cells = (size_t)n_agents * (size_t)n_items, rounds = (size_t)o->rounds;
    out->transcripts = xcalloc((size_t)n_items + 1, sizeof *out->transcripts);
    out->answers = xcalloc(rounds * cells + 1, sizeof *out->answers);
    out->first_correct = xcalloc(cells + 1, 1);
    out->vote_correct = xcalloc(rounds * (size_t)n_items + 1, 1);
    out->decision_correct = xcalloc((size_t)n_items + 1, 1);
    int *only = routes(o->router, items, n_items);
    const struct workflow_options wo = {.rounds = o->rounds,
                                        .chain_of_thought = o->chain_of_thought,
                                        .temperature = o->temperature,
                                        .max_tokens = o->max_tokens,
                                        .vote = o->vote,
                                        .grader = o->grader,
                                        .flock = o->flock,
                                        .only = only,
                                        .seconds = o->seconds,
                                        .seed = o->seed,
                                        .on_step = o->on_step,
                                        .on_step_ctx = o->on_step_ctx};
    struct progress before = p ? *p : (struct progress){0};
    int64_t most = p ? debate_max_calls(team, n_agents, items, n_items, o) : 0;
    int rc = workflow_run(w, client, team, n_agents, items, n_items, &wo, out->transcripts, p, err);
    /* the total has debate_max_calls; a debate that ends early makes fewer calls */
    if (p && before.total > 0) p->total = before.total + p->done - before.done - most;
    for (int i = 0; rc == OK && i < n_items; i++) item_measure(out, items, o->vote, i);
    workflow_free(default_workflow);
    free(only);
    return rc;
}

void debate_release(struct debate *d) {
    for (int i = 0; d->transcripts && i < d->n_items; i++) transcript_release(&d->transcripts[i]);
    free(d->transcripts);
    free(d->answers);
    free(d->first_correct);
    free(d->vote_correct);
    free(d->decision_correct);
    *d = (struct debate){0};
}

static void utterance_print(const struct debate *d, const struct agent *team, int item, int u,
                            struct buf *out) {
    const struct transcript *o = &d->transcripts[item];
    const struct utterance *utterance = &o->v[u];
    buf_printf(out, "[%s][R%d] ", team[utterance->agent].name, utterance->round);
    if (utterance->failed)
        buf_printf(out, "(%s)\n", utterance->failed);
    else if (utterance->answer < 0)
        buf_printf(out, "%s\n", utterance->text);
    else
        buf_printf(out, "%s%s%s (%.2f)\n", utterance->text, *utterance->text ? " → " : "",
                   o->candidates[utterance->answer], (double)utterance->confidence);
}

void debate_transcript(const struct debate *d, const struct agent *team, const struct task_item *it,
                       int item, const struct vote *v, struct buf *out) {
    const struct transcript *o = &d->transcripts[item];
    buf_printf(out, "%s\n", it->question);
    for (int r = 0, u = 0; r < o->rounds; r++) {
        for (; u < o->n && o->v[u].round <= r; u++) utterance_print(d, team, item, u, out);
        int choice = r < d->rounds ? vote_after_round(d, v, r, item, o->n_candidates) : -1;
        if (choice >= 0) buf_printf(out, "vote after round %d: %s\n", r, o->candidates[choice]);
    }
}

/* Stores the samples of one item. Free answers are numbered in the order of first appearance. */
static void samples_collect(struct self_consistency *s, const struct task_item *it,
                            const struct llm_call *calls, const struct grader *grader, int item) {
    size_t first = (size_t)item * (size_t)s->k;
    char **candidates = NULL;
    int n = 0;
    for (int j = 0; j < s->k; j++) {
        struct agent_answer *a = &s->answers[first + (size_t)j];
        *a = calls[j].answer;
        if (calls[j].failed || !it->n_choices) a->choice = -1;
        if (calls[j].failed || it->n_choices) continue;
        char *text = answer_parse(grader, &calls[j], calls[j].text, &a->confidence);
        if (text) a->choice = answer_candidate_find(&candidates, &n, text, grader, true);
        if (text && a->choice < EVAL_MAX_CHOICES) a->prob[a->choice] = a->confidence;
        free(text);
    }
    uint8_t *right = answers_grade(it, grader, candidates, n);
    if (n) memcpy(s->right + first, right, (size_t)n);
    for (int i = 0; i < n; i++) free(candidates[i]);
    free(candidates);
    free(right);
}

int self_consistency_sample(const struct llm_client *client, const struct agent *agent,
                            const struct task_item *items, int n_items, int k,
                            bool chain_of_thought, float temperature, int32_t max_tokens,
                            uint64_t seed, const struct grader *grader,
                            struct self_consistency *out, struct progress *p, struct error *err) {
    int n = n_items * k;
    struct llm_call *calls = xcalloc((size_t)MAX(n, 1), sizeof *calls);
    struct chat_message(*chats)[2] = xcalloc((size_t)MAX(n, 1), sizeof *chats);
    if (!grader) grader = grader_find("exact", err);
    *out = (struct self_consistency){.n_items = n_items, .k = k};
    out->answers = xcalloc((size_t)MAX(n, 1), sizeof *out->answers);
    out->right = xcalloc((size_t)MAX(n, 1), 1);
    out->prefilled = xcalloc((size_t)MAX(k, 1), sizeof *out->prefilled);
    out->generated = xcalloc((size_t)MAX(k, 1), sizeof *out->generated);
    for (int i = 0; i < n; i++) {
        calls[i] = llm_call_question(agent, &items[i / k], i % k, chats[i]);
        calls[i].chain_of_thought = chain_of_thought || items[i / k].n_choices;
        calls[i].temperature = temperature;
        calls[i].max_tokens = max_tokens;
        calls[i].seed = seed * 0x9E3779B97F4A7C15u + (uint64_t)i;
    }
    int rc = client->ask(client->ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n_items; i++)
        samples_collect(out, &items[i], calls + (size_t)i * (size_t)k, grader, i);
    for (int i = 0; i < n; i++) {
        out->prefilled[i % k] += calls[i].n_prefilled;
        out->generated[i % k] += calls[i].n_generated;
        llm_call_release(&calls[i]);
    }
    if (p) progress_update(p, p->done + n, NULL);
    free(chats);
    free(calls);
    return rc;
}

void self_consistency_vote(const struct self_consistency *s, const struct task_item *items, int k,
                           uint8_t *right) {
    struct agent_answer *votes = xcalloc((size_t)MAX(k, 1), sizeof *votes);
    for (int i = 0; i < s->n_items; i++) {
        const struct task_item *it = &items[i];
        size_t first = (size_t)i * (size_t)s->k;
        int m = 0;
        for (int j = 0; j < k; j++)
            if (s->answers[first + (size_t)j].choice >= 0)
                votes[m++] = s->answers[first + (size_t)j];
        int choice =
            m ? vote_decide(&vote_table[0], votes, m, it->n_choices ? it->n_choices : s->k) : -1;
        right[i] = choice_is_correct(it, s->right + first, choice);
    }
    free(votes);
}

void self_consistency_release(struct self_consistency *s) {
    free(s->answers);
    free(s->right);
    free(s->prefilled);
    free(s->generated);
    *s = (struct self_consistency){0};
}
