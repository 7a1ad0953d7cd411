/*
 * sample: samples a token from a row of logits.
 *
 * A filter sorts the candidates by a key (probability or typicality), largest first, ties by id,
 * and keeps a prefix. A heap sorts only as many candidates as the filter needs. Without a filter
 * that sorts, the candidates stay in order of their ids. Each filter renormalises the probabilities
 * that the previous filter kept. Sums are in double in a fixed order, exponentials are computed by
 * the kernel table, and the random number is that of rng (seed, RNG_SAMPLE, 0, index).
 *
 * Invariant: the sampled token depends on the logits, the settings, the context and the index only.
 * Logits that are all NaN also give a valid token.
 */
#include "engine/internal.h"

#include <math.h>
#include <string.h>

/* The candidate tokens: ids in v[0..n). */
struct candidates {
    const float *w;   /* [V] unnormalised probabilities, the largest is 1 */
    const float *key; /* [V] sort key, largest first */
    int32_t *v;
    int32_t n;
};

static int32_t argmax(const struct kernels *k, const float *x, int32_t n) {
    float max = k->max(x, n);
    for (int32_t i = 0; i < n; i++)
        if (x[i] == max) return i;
    return 0; // all NaN
}

float logits_logsumexp(const float *x, int32_t n, float *scratch) {
    const struct kernels *k = kernels_get();
    float max = k->max(x, n);
    memcpy(scratch, x, (size_t)n * sizeof *x);
    return max + (float)math_log((double)k->softmax(scratch, n));
}

static bool candidate_precedes(const struct candidates *c, int32_t a, int32_t b) {
    return c->key[a] > c->key[b] || (c->key[a] == c->key[b] && a < b);
}

static void heap_sink(struct candidates *c, int32_t i, int32_t n) {
    int32_t id = c->v[i];
    for (int32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && candidate_precedes(c, c->v[child + 1], c->v[child])) child++;
        if (!candidate_precedes(c, c->v[child], id)) break;
        c->v[i] = c->v[child];
    }
    c->v[i] = id;
}

/* Keeps the best candidates, sorted by key, until there are max_n of them or the sum of their
 * weights reaches `mass`; removes the others. */
static void candidates_keep_top(struct candidates *c, int32_t max_n, double mass) {
    int32_t n_left = c->n, taken = 0;
    double sum = 0;
    for (int32_t i = n_left / 2 - 1; i >= 0; i--) heap_sink(c, i, n_left);
    while (n_left > 0 && taken < max_n && (taken == 0 || sum < mass)) {
        int32_t best = c->v[0];
        c->v[0] = c->v[--n_left];
        if (n_left > 0) heap_sink(c, 0, n_left);
        c->v[n_left] = best; // kept candidates are stored at the end of v, in reverse order
        sum += (double)c->w[best];
        taken++;
    }
    for (int32_t i = 0; i < taken / 2; i++) {
        int32_t *a = &c->v[c->n - 1 - i], *b = &c->v[c->n - taken + i], t = *a;
        *a = *b;
        *b = t;
    }
    memmove(c->v, c->v + c->n - taken, (size_t)taken * sizeof *c->v);
    c->n = taken;
}

static double candidates_sum(const struct candidates *c) {
    double sum = 0;
    for (int32_t i = 0; i < c->n; i++) sum += (double)c->w[c->v[i]];
    return sum;
}

/* Keeps the shortest prefix of the candidates, which are sorted, whose weights sum to at least
 * `mass`. */
static void candidates_keep_nucleus(struct candidates *c, double mass) {
    double sum = 0;
    int32_t n = 0;
    while (n < c->n && (n == 0 || sum < mass)) sum += (double)c->w[c->v[n++]];
    c->n = n;
}

/* Keeps the candidates with a weight of at least min_weight, in order. */
static void candidates_keep_min(struct candidates *c, float min_weight) {
    int32_t n = 0;
    for (int32_t i = 0; i < c->n; i++)
        if (c->w[c->v[i]] >= min_weight) c->v[n++] = c->v[i];
    c->n = n;
}

/* Keeps the candidates whose surprise -log p is nearest to the entropy, until their probabilities
 * sum to at least `mass`. `key` [V] is scratch. */
static void candidates_keep_typical(struct candidates *c, double mass, float *key) {
    const float *w = c->w;
    double sum = candidates_sum(c), log_sum = math_log(sum), entropy = 0;
    for (int32_t i = 0; i < c->n; i++) {
        double p = (double)w[c->v[i]];
        if (p > 0) entropy += p / sum * (log_sum - math_log(p));
    }
    for (int32_t i = 0; i < c->n; i++) {
        double p = (double)w[c->v[i]];
        key[c->v[i]] = p > 0 ? (float)-fabs(log_sum - math_log(p) - entropy) : -INFINITY;
    }
    c->key = key;
    candidates_keep_top(c, c->n, mass * sum);
    c->key = w;
}

/* `key` [V] is scratch. */
static void candidates_filter(struct candidates *c, const struct sampling_params *s, float *key) {
    double top_p = (double)s->top_p;
    bool ordered = s->top_k > 0 && s->top_k < c->n;
    if (ordered) candidates_keep_top(c, s->top_k, INFINITY);
    if (s->typical_p > 0.0f && s->typical_p < 1.0f) {
        candidates_keep_typical(c, (double)s->typical_p, key);
        ordered = false;
    }
    if (s->top_p < 1.0f && ordered) {
        candidates_keep_nucleus(c, top_p * candidates_sum(c));
    } else if (s->top_p < 1.0f) {
        double sum = candidates_sum(c);
        // weights below (1 - p) / n of the sum add up to less than 1 - p of the sum, so they are
        // never in the nucleus
        candidates_keep_min(c, MIN((float)(0.999 * (1.0 - top_p) * sum / c->n), 1.0f));
        candidates_keep_top(c, c->n, top_p * sum);
    }
    if (s->min_p > 0.0f) candidates_keep_min(c, s->min_p); // the largest weight is 1
}

static int32_t candidates_sample(const struct candidates *c, float u) {
    double remaining = (double)u * candidates_sum(c);
    int32_t last = c->n > 0 ? c->v[0] : 0;
    for (int32_t i = 0; i < c->n; i++) {
        if (c->w[c->v[i]] > 0.0f) last = c->v[i];
        remaining -= (double)c->w[c->v[i]];
        if (remaining < 0.0) break;
    }
    return last;
}

/* w[i] = exp((logits[i] - max) / temperature): unnormalised probabilities; NaN becomes 0. */
static void temperature_apply(const struct kernels *k, float *w, const float *logits, int32_t n,
                              float temperature) {
    float max = k->max(logits, n);
    for (int32_t i = 0; i < n; i++) w[i] = (logits[i] - max) / temperature;
    k->exp(w, w, n);
    for (int32_t i = 0; i < n; i++)
        if (!(w[i] >= 0.0f)) w[i] = 0.0f;
}

static bool sampling_changes_logits(const struct sampling_params *s,
                                    const struct sampling_context *context) {
    return (context && context->allowed) || s->n_bias > 0 || s->presence_penalty != 0.0f ||
           s->frequency_penalty != 0.0f ||
           (s->repetition_penalty != 0.0f && s->repetition_penalty != 1.0f);
}

static void repetition_penalty_apply(float *x, float penalty, struct token_seq tokens,
                                     int32_t *flags) {
    for (int32_t i = 0; i < tokens.n; i++) {
        float *l = &x[tokens.v[i]];
        if (flags[tokens.v[i]] & 1) continue;
        flags[tokens.v[i]] |= 1;
        *l = *l > 0.0f ? *l / penalty : *l * penalty;
    }
}

static void presence_penalty_apply(float *x, const struct sampling_params *s,
                                   struct token_seq tokens, int32_t *flags) {
    for (int32_t i = 0; i < tokens.n; i++) {
        int32_t id = tokens.v[i];
        x[id] -= s->frequency_penalty;
        if (!(flags[id] & 2)) x[id] -= s->presence_penalty;
        flags[id] |= 2;
    }
}

static struct token_seq token_seq_tail(struct token_seq seq, int32_t n) {
    int32_t n_skipped = MAX(seq.n - n, 0);
    return n_skipped ? (struct token_seq){seq.v + n_skipped, seq.n - n_skipped} : seq;
}

/* Applies bias, penalties and the grammar mask to x, a copy of the logits. flags [V] is scratch:
 * bit 0 means that the repetition penalty was applied to the token, bit 1 the presence penalty. */
static void logits_process(float *x, int32_t n, const struct sampling_params *s,
                           const struct sampling_context *context, int32_t *flags) {
    for (int32_t i = 0; i < s->n_bias; i++) x[s->bias[i].token] += s->bias[i].bias;
    if (!context) return;
    struct token_seq prompt = context->prompt, out = context->out;
    if (s->penalty_last_n > 0) {
        out = token_seq_tail(out, s->penalty_last_n);
        prompt = token_seq_tail(prompt, s->penalty_last_n - out.n);
    }
    memset(flags, 0, (size_t)n * sizeof *flags);
    if (s->repetition_penalty != 0.0f && s->repetition_penalty != 1.0f) {
        repetition_penalty_apply(x, s->repetition_penalty, prompt, flags);
        repetition_penalty_apply(x, s->repetition_penalty, out, flags);
    }
    if (s->penalty_last_n > 0) presence_penalty_apply(x, s, prompt, flags);
    presence_penalty_apply(x, s, out, flags);
    for (int32_t i = 0; context->allowed && i < n; i++)
        if (!(context->allowed[i / 32] >> i % 32 & 1)) x[i] = -INFINITY;
}

/* `scratch` has three arrays [n]: weights, ids, keys. */
int32_t sample_token(const float *logits, int32_t n, const struct sampling_params *s,
                     const struct sampling_context *context, int32_t index, float *logprob,
                     float *scratch) {
    const struct kernels *k = kernels_get();
    float lse = logits_logsumexp(logits, n, scratch), *key = scratch + 2 * (int64_t)n;
    int32_t id, *ids = (int32_t *)(void *)(scratch + n);
    const float *x = logits;
    if (sampling_changes_logits(s, context)) {
        memcpy(scratch, logits, (size_t)n * sizeof *logits);
        logits_process(scratch, n, s, context, ids);
        x = scratch;
    }
    if (s->temperature == 0.0f) {
        id = argmax(k, x, n);
    } else {
        struct candidates c = {.w = scratch, .key = scratch, .v = ids, .n = n};
        struct rng rng = rng_make(s->seed, RNG_SAMPLE, 0, (uint32_t)index);
        temperature_apply(k, scratch, x, n, s->temperature);
        for (int32_t i = 0; i < n; i++) c.v[i] = i;
        candidates_filter(&c, s, key);
        id = candidates_sample(&c, rng_uniform(&rng));
    }
    *logprob = logits[id] - lse;
    return id;
}

void sample_top_logprobs(const float *logits, int32_t n, float lse, int32_t k, int32_t *ids,
                         float *logprobs, float *scratch) {
    struct candidates c = {.w = logits, .key = logits, .v = (int32_t *)(void *)scratch, .n = n};
    for (int32_t i = 0; i < n; i++) c.v[i] = i;
    candidates_keep_top(&c, k, INFINITY);
    for (int32_t i = 0; i < k; i++) {
        ids[i] = c.v[i];
        logprobs[i] = logits[c.v[i]] - lse;
    }
}
