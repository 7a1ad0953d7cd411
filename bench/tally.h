/*
 * tally: the counts of load and bare, and the JSON object that both print.
 */
#ifndef SHOAL_BENCH_TALLY_H
#define SHOAL_BENCH_TALLY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { TALLY_SAMPLES = 1 << 20 };
struct samples {
    float *v;
    int n;
};
struct tally {
    double began, seconds;
    int64_t replies, errors, tokens;
    double tokens_middle; /* in the middle half of the time */
    struct samples first, between;
};

static inline struct tally tally_new(double began, double seconds) {
    return (struct tally){.began = began,
                          .seconds = seconds,
                          .first.v = malloc(sizeof(float) * TALLY_SAMPLES),
                          .between.v = malloc(sizeof(float) * TALLY_SAMPLES)};
}

/* Number of tokens of the n-th reply: between half and one and a half times the mean, so that, as
 * in real traffic, replies do not end at the same time. */
static inline int tally_reply_length(uint64_t n, int mean) {
    return mean / 2 + (int)(n * 2654435761u % (uint64_t)(mean + 1));
}

/* Counts a token at `t` of a stream whose request was sent at `sent` and whose last token came at
 * `last`, or none yet. */
static inline void tally_add_token(struct tally *y, double t, double sent, double last) {
    struct samples *s = last > 0 ? &y->between : &y->first;
    if (s->n < TALLY_SAMPLES) s->v[s->n++] = (float)(t - (last > 0 ? last : sent));
}

/* Counts a complete reply of n tokens, the first at `first` and the last at `t`. The tokens are
 * distributed evenly over this time, so that the rate is correct even if few replies end in the
 * measured interval. */
static inline void tally_add_reply(struct tally *y, double first, double t, int n) {
    double from = y->began + y->seconds * 0.25, to = y->began + y->seconds * 0.75;
    double a = first > from ? first : from, b = t < to ? t : to;
    y->replies++;
    y->tokens += n;
    if (b > a) y->tokens_middle += n * (b - a) / (t - first);
}

static inline int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static inline double tally_quantile(struct samples *s, double q) {
    if (s->n == 0) return 0;
    qsort(s->v, (size_t)s->n, sizeof *s->v, compare_floats);
    return (double)s->v[(int)(q * (s->n - 1))];
}

static inline void tally_print(struct tally *y, int streams, int unfinished) {
    printf("{\"streams\":%d,\"replies\":%lld,\"errors\":%lld,\"unfinished\":%d,\"tokens\":%lld,"
           "\"tokens_per_second\":%.1f,\"first_token\":{\"p50\":%.4f,\"p95\":%.4f},"
           "\"between_tokens\":{\"p50\":%.5f,\"p95\":%.5f}}\n",
           streams, (long long)y->replies, (long long)y->errors, unfinished, (long long)y->tokens,
           y->tokens_middle / (y->seconds * 0.5), tally_quantile(&y->first, 0.5),
           tally_quantile(&y->first, 0.95), tally_quantile(&y->between, 0.5),
           tally_quantile(&y->between, 0.95));
}

#endif
