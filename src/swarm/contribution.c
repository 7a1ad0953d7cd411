/*
 * contribution: the contribution of each agent to its team, as values of cooperative games.
 *
 * The value of every coalition is measured on the same items, so all differences are paired and
 * each agent's value has a confidence interval. The weighted sum of an agent's differences on one
 * item is one observation; the mean of the observations over the items is the agent's value
 * (Shapley 1953, Banzhaf 1965; sampled permutations: Castro et al. 2009).
 */
#include "swarm/swarm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The results [n_items] of coalition `mask`. */
static const uint8_t *coalition_row(const uint8_t *right, uint32_t mask, int n_items) {
    return right + (size_t)mask * (size_t)n_items;
}

/* v[item] += weight (with - without) */
static void marginal_add(double *v, const uint8_t *with, const uint8_t *without, int n_items,
                         double weight) {
    for (int i = 0; i < n_items; i++) v[i] += weight * ((double)with[i] - (double)without[i]);
}

/* Weight of a coalition of s of n agents: 1 / (n C(n-1, s)) = s! (n-s-1)! / n! */
static double shapley_weight(int n, int s) {
    double ways = 1;
    for (int i = 0; i < s; i++) ways = ways * (n - 1 - i) / (i + 1);
    return 1 / (n * ways);
}

void contribution_exact(const uint8_t *right, int n_agents, int n_items, struct contribution *out) {
    CHECK(n_agents >= 1 && n_agents <= GAME_MAX_EXACT_AGENTS);
    uint32_t all_agents = (1u << n_agents) - 1;
    double *v = xmalloc((size_t)MAX(n_items, 1) * sizeof *v),
           *b = xmalloc((size_t)MAX(n_items, 1) * sizeof *b);
    for (int a = 0; a < n_agents; a++) {
        memset(v, 0, (size_t)n_items * sizeof *v);
        memset(b, 0, (size_t)n_items * sizeof *b);
        for (uint32_t s = 0; s <= all_agents; s++) {
            if (s >> a & 1) continue;
            const uint8_t *with = coalition_row(right, s | 1u << a, n_items),
                          *without = coalition_row(right, s, n_items);
            marginal_add(v, with, without, n_items,
                         shapley_weight(n_agents, __builtin_popcount(s)));
            marginal_add(b, with, without, n_items, 1.0 / (1u << (n_agents - 1)));
        }
        out[a].shapley = stats_mean_interval(v, n_items);
        out[a].banzhaf = stats_mean_interval(b, n_items);
        out[a].leave_one_out =
            stats_contribution(coalition_row(right, all_agents, n_items),
                               coalition_row(right, all_agents & ~(1u << a), n_items), n_items);
    }
    free(v);
    free(b);
}

int coalition_game_play_all(const struct coalition_game *g, uint8_t *right, struct error *err) {
    CHECK(g->n_agents >= 1 && g->n_agents <= GAME_MAX_EXACT_AGENTS);
    memset(right, 0, (size_t)g->n_items);
    for (uint32_t s = 1; s < 1u << g->n_agents; s++) {
        int rc = g->play(g->ctx, s, right + (size_t)s * (size_t)g->n_items, err);
        if (rc) return rc;
    }
    return OK;
}

/* sampling */

/* State of the estimation of Shapley values, and after sampler_clear of Banzhaf values. */
struct shapley_sampler {
    const struct coalition_game *g;
    uint8_t **played;     /* [2^n] results of a coalition; NULL until it is played */
    double *v;            /* [n_agents][n_items] sums of the marginal contributions */
    double *sum, *square; /* [n_agents] sums of the samples' means, and of their squares */
    int n;                /* number of samples */
    struct error *err;
};

/* The results [n_items] of a coalition; plays the coalition on first use. NULL: an error is in
 * s->err. */
static const uint8_t *coalition_get(struct shapley_sampler *s, uint32_t mask) {
    size_t bytes = (size_t)MAX(s->g->n_items, 1);
    if (s->played[mask]) return s->played[mask];
    uint8_t *right = xcalloc(bytes, 1);
    if (mask && s->g->play(s->g->ctx, mask, right, s->err) != OK) {
        free(right);
        return NULL;
    }
    return s->played[mask] = right;
}

/* Adds agent a's marginal contribution to coalition `mask` to s->v, and its mean over the items to
 * *mean. */
static int sample_add(struct shapley_sampler *s, int a, uint32_t mask, double *mean) {
    const uint8_t *without = coalition_get(s, mask),
                  *with = without ? coalition_get(s, mask | 1u << a) : NULL;
    int n = s->g->n_items;
    if (!with) return s->err->code;
    double sum = 0;
    marginal_add(s->v + (size_t)a * (size_t)n, with, without, n, 1);
    for (int i = 0; i < n; i++) sum += (double)with[i] - (double)without[i];
    *mean += sum / MAX(n, 1);
    return OK;
}

static void sample_finish(struct shapley_sampler *s, const double *mean) {
    for (int a = 0; a < s->g->n_agents; a++) {
        s->sum[a] += mean[a];
        s->square[a] += mean[a] * mean[a];
    }
    s->n++;
}

/* Agent a's value: the mean over items and samples. The interval combines the error of the items
 * and that of the samples. `marginals_per_sample`: marginal contributions of each agent in one
 * sample. */
static struct stats_interval sampled_interval(const struct shapley_sampler *s, int a,
                                              int marginals_per_sample) {
    int n = s->g->n_items;
    double *v = xmalloc((size_t)MAX(n, 1) * sizeof *v);
    for (int i = 0; i < n; i++)
        v[i] = s->v[(size_t)a * (size_t)n + (size_t)i] / (s->n * marginals_per_sample);
    struct stats_interval out = stats_mean_interval(v, n);
    double mean = s->sum[a] / s->n, variance = s->square[a] / s->n - mean * mean;
    double half_width = (out.hi - out.lo) / 2,
           sampling_error = s->n > 1 ? 1.96 * sqrt(fmax(0, variance) / (s->n - 1)) : 1;
    half_width = sqrt(half_width * half_width + sampling_error * sampling_error);
    free(v);
    return (struct stats_interval){out.value, out.value - half_width, out.value + half_width};
}

static void sampler_clear(struct shapley_sampler *s) {
    size_t n = (size_t)s->g->n_agents;
    memset(s->v, 0, n * (size_t)s->g->n_items * sizeof *s->v);
    memset(s->sum, 0, n * sizeof *s->sum);
    memset(s->square, 0, n * sizeof *s->square);
    s->n = 0;
}

/* A permutation and its reverse form one sample. */
static int permutation_sample(struct shapley_sampler *s, uint64_t seed, int index) {
    uint32_t order[TEAM_MAX];
    double mean[TEAM_MAX] = {0};
    int n = s->g->n_agents, rc = OK;
    struct rng rng = rng_make(seed, RNG_SHUFFLE, (uint32_t)index, 1);
    for (int i = 0; i < n; i++) order[i] = (uint32_t)i;
    rng_shuffle(&rng, order, (size_t)n);
    for (int reversed = 0; reversed < 2; reversed++) {
        uint32_t mask = 0;
        for (int i = 0; rc == OK && i < n; i++) {
            int a = (int)order[reversed ? n - 1 - i : i];
            rc = sample_add(s, a, mask, &mean[a]);
            mask |= 1u << a;
        }
    }
    for (int a = 0; a < n; a++) mean[a] /= 2;
    sample_finish(s, mean);
    return rc;
}

/* A random coalition for each agent is one sample. */
static int coalition_sample(struct shapley_sampler *s, uint64_t seed, int index) {
    double mean[TEAM_MAX] = {0};
    int n = s->g->n_agents, rc = OK;
    struct rng rng = rng_make(seed, RNG_SHUFFLE, (uint32_t)index, 2);
    for (int a = 0; rc == OK && a < n; a++) {
        uint32_t mask = rng_u32(&rng) & ((1u << n) - 1) & ~(1u << a);
        rc = sample_add(s, a, mask, &mean[a]);
    }
    sample_finish(s, mean);
    return rc;
}

static int leave_one_out(struct shapley_sampler *s, struct contribution *out) {
    uint32_t all_agents = (1u << s->g->n_agents) - 1;
    for (int a = 0; a < s->g->n_agents; a++) {
        const uint8_t *with = coalition_get(s, all_agents),
                      *without = with ? coalition_get(s, all_agents & ~(1u << a)) : NULL;
        if (!without) return s->err->code;
        out[a].leave_one_out = stats_contribution(with, without, s->g->n_items);
    }
    return OK;
}

int contribution_sampled(const struct coalition_game *g, int samples, uint64_t seed,
                         struct contribution *out, struct error *err) {
    CHECK(g->n_agents >= 1 && g->n_agents <= TEAM_MAX && samples >= 1);
    size_t n = (size_t)g->n_agents, masks = (size_t)1 << n;
    struct shapley_sampler s = {.g = g, .err = err, .played = xcalloc(masks, sizeof *s.played)};
    s.v = xcalloc(n * (size_t)MAX(g->n_items, 1), sizeof *s.v);
    s.sum = xcalloc(n, sizeof *s.sum);
    s.square = xcalloc(n, sizeof *s.square);
    int rc = leave_one_out(&s, out);
    sampler_clear(&s);
    for (int i = 0; rc == OK && i < (samples + 1) / 2; i++) rc = permutation_sample(&s, seed, i);
    for (int a = 0; rc == OK && a < g->n_agents; a++) out[a].shapley = sampled_interval(&s, a, 2);
    sampler_clear(&s);
    for (int i = 0; rc == OK && i < samples; i++) rc = coalition_sample(&s, seed, i);
    for (int a = 0; rc == OK && a < g->n_agents; a++) out[a].banzhaf = sampled_interval(&s, a, 1);
    for (size_t m = 0; m < masks; m++) free(s.played[m]);
    free(s.played);
    free(s.v);
    free(s.sum);
    free(s.square);
    return rc;
}

/* games */

static int vote_game_play(void *ctx, uint32_t mask, uint8_t *right, struct error *err) {
    const struct vote_game *v = ctx;
    struct agent_answer ballots[TEAM_MAX];
    (void)err;
    for (int i = 0; i < v->n_items; i++) {
        int n = 0;
        for (int a = 0; a < v->n_agents; a++) {
            const struct agent_answer *answer =
                &v->answers[(size_t)a * (size_t)v->n_items + (size_t)i];
            if (mask >> a & 1 && answer->choice >= 0) ballots[n++] = *answer;
        }
        const struct task_item *it = &v->items[i];
        bool has_choices = it->n_choices > 0 || !v->transcripts;
        int choice = n ? vote_decide(v->vote, ballots, n,
                                     has_choices ? it->n_choices : v->transcripts[i].n_candidates)
                       : -1;
        right[i] =
            choice >= 0 && (has_choices ? choice == it->correct : v->transcripts[i].right[choice]);
    }
    return OK;
}

struct coalition_game vote_game(struct vote_game *v) {
    CHECK(v->n_agents <= TEAM_MAX);
    return (struct coalition_game){v, vote_game_play, v->n_agents, v->n_items};
}

static int debate_game_play(void *ctx, uint32_t mask, uint8_t *right, struct error *err) {
    const struct debate_game *g = ctx;
    struct agent team[TEAM_MAX];
    struct debate d;
    int n = 0;
    for (int a = 0; a < g->n_agents; a++)
        if (mask >> a & 1) team[n++] = g->team[a];
    if (g->progress) // contribution_sampled does not know the number of coalitions in advance
        g->progress->total =
            MAX(g->progress->total,
                g->progress->done + debate_max_calls(team, n, g->items, g->n_items, g->options));
    int rc =
        debate_run(g->llm_client, team, n, g->items, g->n_items, g->options, &d, g->progress, err);
    if (rc == OK) memcpy(right, d.decision_correct, (size_t)g->n_items);
    debate_release(&d);
    return rc;
}

struct coalition_game debate_game(struct debate_game *d) {
    CHECK(d->n_agents <= TEAM_MAX);
    return (struct coalition_game){d, debate_game_play, d->n_agents, d->n_items};
}

int contribution_leave_one_out(const struct llm_client *client, const struct agent *team,
                               int n_agents, const struct task_item *items, int n_items,
                               const struct debate_options *o, const struct debate *full,
                               struct stats_interval *value, struct progress *p,
                               struct error *err) {
    const uint8_t *with = full->vote_correct + (size_t)(full->rounds - 1) * (size_t)n_items;
    struct agent others[TEAM_MAX];
    for (int i = 0; i < n_agents; i++) {
        struct debate d;
        int n = 0;
        for (int j = 0; j < n_agents; j++)
            if (j != i) others[n++] = team[j];
        if (n == 0) return error_set(err, ERR_USAGE, "leave-one-out needs at least two agents");
        int rc = debate_run(client, others, n, items, n_items, o, &d, p, err);
        if (rc == OK)
            value[i] = stats_contribution(
                with, d.vote_correct + (size_t)(d.rounds - 1) * (size_t)n_items, n_items);
        debate_release(&d);
        if (rc != OK) return rc;
    }
    return OK;
}

/* Whether the vote of all agents except `without` is correct on item i; without -1: all agents
 * vote. */
static bool vote_is_correct(const struct vote *v, const struct agent_answer *answers, int n_agents,
                            const struct task_item *items, int n_items, int i, int without) {
    struct agent_answer team[64];
    int n = 0;
    for (int a = 0; a < n_agents; a++)
        if (a != without) team[n++] = answers[(size_t)a * (size_t)n_items + (size_t)i];
    return n > 0 && vote_decide(v, team, n, items[i].n_choices) == items[i].correct;
}

void contribution_leave_one_out_vote(const struct vote *v, const struct agent_answer *answers,
                                     int n_agents, const struct task_item *items, int n_items,
                                     struct stats_interval *value) {
    CHECK(n_agents <= 64);
    uint8_t *with = xmalloc((size_t)n_items), *without = xmalloc((size_t)n_items);
    for (int i = 0; i < n_items; i++)
        with[i] = vote_is_correct(v, answers, n_agents, items, n_items, i, -1);
    for (int a = 0; a < n_agents; a++) {
        for (int i = 0; i < n_items; i++)
            without[i] = vote_is_correct(v, answers, n_agents, items, n_items, i, a);
        value[a] = stats_contribution(with, without, n_items);
    }
    free(with);
    free(without);
}

/* Jensen-Shannon divergence of two distributions over n choices, base 2. */
static double jensen_shannon(const float *p, const float *q, int n) {
    double sum = 0, log2 = math_log(2);
    for (int i = 0; i < n; i++) {
        double a = (double)p[i], b = (double)q[i], m = (a + b) / 2;
        if (a > 0) sum += a / 2 * math_log(a / m);
        if (b > 0) sum += b / 2 * math_log(b / m);
    }
    return fmax(0, sum / log2);
}

double behaviour_js_divergence(const void *ctx, int a, int b, int item) {
    const struct behaviour_answers *x = ctx;
    return jensen_shannon(x->answers[(size_t)a * (size_t)x->n_items + (size_t)item].prob,
                          x->answers[(size_t)b * (size_t)x->n_items + (size_t)item].prob,
                          x->items[item].n_choices);
}

double behaviour_disagreement(const void *ctx, int a, int b, int item) {
    const struct behaviour_answers *x = ctx;
    return x->answers[(size_t)a * (size_t)x->n_items + (size_t)item].choice !=
           x->answers[(size_t)b * (size_t)x->n_items + (size_t)item].choice;
}

void behaviour_novelty(behaviour_distance_fn distance_fn, const void *ctx, int n_agents, int team,
                       int n_items, struct stats_interval *value, double *distance) {
    size_t row_size = (size_t)n_items;
    double *sums = xcalloc((size_t)n_agents * row_size + 1, sizeof *sums);
    for (int a = 0; a < n_agents; a++)
        for (int b = a + 1; b < n_agents; b++) {
            double total = 0;
            for (int i = 0; i < n_items; i++) {
                double d = distance_fn(ctx, a, b, i);
                if (b < team) sums[(size_t)a * row_size + (size_t)i] += d;
                if (a < team) sums[(size_t)b * row_size + (size_t)i] += d;
                total += d;
            }
            total = n_items ? total / n_items : 0;
            if (distance) distance[a * n_agents + b] = distance[b * n_agents + a] = total;
        }
    for (int a = 0; a < n_agents; a++) {
        int others = a < team ? team - 1 : team;
        for (int i = 0; others > 1 && i < n_items; i++)
            sums[(size_t)a * row_size + (size_t)i] /= others;
        value[a] = others > 0 && n_items ? stats_mean_interval(sums + (size_t)a * row_size, n_items)
                                         : (struct stats_interval){0, 0, 0};
    }
    free(sums);
}
