/*
 * Debate and self-consistency over an asker. A round is one batch: every agent's turn on every
 * item. From the second round on, a turn holds the agent's own last answer and the others' last
 * answers, shuffled per item and unnamed.
 *
 * Invariant: rounds are bounded by the options, and an agent's first answer does not depend on the
 * team, so teams that share agents share those calls through the store.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

static struct answer *at(const struct debate *d, int round, int agent, int item) {
    return &d->answers[((size_t)round * (size_t)d->n_agents + (size_t)agent) * (size_t)d->n_items +
                       (size_t)item];
}

/* What agent `me` hears of the others before round r: their last answers in an order drawn from
 * (seed, item). */
static void hear(const struct debate *d, const struct item *items, const struct debate_options *o,
                 int r, int me, int item, struct turn *t) {
    uint32_t order[17];
    int n = 0;
    for (int a = 0; a < d->n_agents; a++)
        if (a != me) order[n++] = (uint32_t)a;
    struct rng rng = rng_make(o->seed, RNG_SHUFFLE, (uint32_t)item, (uint32_t)r);
    rng_shuffle(&rng, order, (size_t)n);
    t->own = items[item].choices[at(d, r - 1, me, item)->choice];
    for (int i = 0; i < n; i++)
        t->others[i] = items[item].choices[at(d, r - 1, (int)order[i], item)->choice];
    t->n_others = n;
}

static int run_round(const struct asker *a, const struct agent *team, const struct item *items,
                     const struct debate_options *o, int r, struct debate *d, struct error *err) {
    int n = d->n_agents * d->n_items;
    if (r > 0 && d->n_agents == 1) { /* nobody to hear: the first answer stands */
        memcpy(at(d, r, 0, 0), at(d, r - 1, 0, 0), (size_t)n * sizeof *d->answers);
        return OK;
    }
    struct turn *turns = xcalloc((size_t)MAX(n, 1), sizeof *turns);
    for (int i = 0; i < n; i++) {
        int agent = i / d->n_items, item = i % d->n_items;
        turns[i] =
            (struct turn){.agent = &team[agent], .item = &items[item], .working = o->working};
        if (r > 0) hear(d, items, o, r, agent, item, &turns[i]);
    }
    int rc = a->ask(a->ctx, turns, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        int agent = i / d->n_items, item = i % d->n_items;
        *at(d, r, agent, item) = turns[i].answer;
        d->prefilled += turns[i].n_prefilled;
        d->generated += turns[i].n_generated;
        d->truncated += turns[i].truncated;
        bool right = turns[i].answer.choice == items[item].correct;
        if (r == 0) d->solo[i] = right;
        bool before = r > 0 && at(d, r - 1, agent, item)->choice == items[item].correct;
        d->flips_good += r > 0 && right && !before;
        d->flips_bad += r > 0 && !right && before;
    }
    free(turns);
    return rc;
}

static void count_votes(const struct item *items, const struct vote *v, int r, struct debate *d) {
    struct answer last[17];
    for (int i = 0; i < d->n_items; i++) {
        for (int a = 0; a < d->n_agents; a++) last[a] = *at(d, r, a, i);
        d->voted[(size_t)r * (size_t)d->n_items + (size_t)i] =
            vote_decide(v, last, d->n_agents, items[i].n_choices) == items[i].correct;
    }
}

int debate_run(const struct asker *a, const struct agent *team, int n_agents,
               const struct item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err) {
    *out = (struct debate){.n_agents = n_agents, .n_items = n_items, .rounds = o->rounds};
    if (n_agents < 1 || n_agents > 17)
        return error_set(err, ERR_USAGE, "a debate needs 1 to 17 agents, not %d", n_agents);
    if (o->rounds < 1) return error_set(err, ERR_USAGE, "a debate needs at least one round");
    size_t cells = (size_t)n_agents * (size_t)n_items, rounds = (size_t)o->rounds;
    out->answers = xcalloc(rounds * cells + 1, sizeof *out->answers);
    out->solo = xcalloc(cells + 1, 1);
    out->voted = xcalloc(rounds * (size_t)n_items + 1, 1);
    int rc = OK;
    for (int r = 0; rc == OK && r < o->rounds; r++) {
        rc = run_round(a, team, items, o, r, out, err);
        if (rc == OK) count_votes(items, o->vote, r, out);
        if (p) progress_update(p, p->shown + (int64_t)cells, NULL);
    }
    return rc;
}

void debate_release(struct debate *d) {
    free(d->answers);
    free(d->solo);
    free(d->voted);
    *d = (struct debate){0};
}

void debate_transcript(const struct debate *d, const struct agent *team, const struct item *it,
                       int item, const struct vote *v, struct buf *out) {
    struct answer last[17];
    buf_printf(out, "%s\n", it->question);
    for (int r = 0; r < d->rounds; r++) {
        for (int a = 0; a < d->n_agents; a++) {
            last[a] = *at(d, r, a, item);
            buf_printf(out, "[%s][R%d] %s (%.2f)\n", team[a].name, r, it->choices[last[a].choice],
                       (double)last[a].prob[last[a].choice]);
        }
        buf_printf(out, "vote after round %d: %s\n", r,
                   it->choices[vote_decide(v, last, d->n_agents, it->n_choices)]);
    }
}

int self_consistency(const struct asker *a, const struct agent *agent, const struct item *items,
                     int n_items, int k, float temperature, uint64_t seed, uint8_t *right,
                     int64_t *prefilled, int64_t *generated, struct progress *p,
                     struct error *err) {
    int n = n_items * k;
    struct turn *turns = xcalloc((size_t)MAX(n, 1), sizeof *turns);
    struct answer *votes = xcalloc((size_t)MAX(k, 1), sizeof *votes);
    for (int i = 0; i < n; i++)
        turns[i] = (struct turn){.agent = agent,
                                 .item = &items[i / k],
                                 .working = true,
                                 .temperature = temperature,
                                 .seed = seed * 0x9E3779B97F4A7C15u + (uint64_t)i};
    int rc = a->ask(a->ctx, turns, n, err);
    for (int i = 0; rc == OK && i < n_items; i++) {
        for (int j = 0; j < k; j++) {
            votes[j] = turns[i * k + j].answer;
            *prefilled += turns[i * k + j].n_prefilled;
            *generated += turns[i * k + j].n_generated;
        }
        right[i] = vote_decide(&vote_table[0], votes, k, items[i].n_choices) == items[i].correct;
    }
    if (p) progress_update(p, p->shown + n, NULL);
    free(turns);
    free(votes);
    return rc;
}

int credit_leave_one_out(const struct asker *a, const struct agent *team, int n_agents,
                         const struct item *items, int n_items, const struct debate_options *o,
                         const struct debate *full, struct interval *value, struct progress *p,
                         struct error *err) {
    const uint8_t *with = full->voted + (size_t)(full->rounds - 1) * (size_t)n_items;
    struct agent rest[17];
    for (int i = 0; i < n_agents; i++) {
        struct debate d;
        int n = 0;
        for (int j = 0; j < n_agents; j++)
            if (j != i) rest[n++] = team[j];
        if (n == 0) return error_set(err, ERR_USAGE, "leave-one-out needs at least two agents");
        int rc = debate_run(a, rest, n, items, n_items, o, &d, p, err);
        if (rc == OK)
            value[i] =
                stats_paired(with, d.voted + (size_t)(d.rounds - 1) * (size_t)n_items, n_items)
                    .diff;
        debate_release(&d);
        if (rc != OK) return rc;
    }
    return OK;
}
