/*
 * memory: time and recall of the search in the vectors of memories: 100,000 vectors of 384 numbers
 * in clusters, as embeddings are. Prints one JSON line. The exact result is computed in double.
 */
#include "memory/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 100000, D = 384, QUERIES = 50, TOP = 10, CLUSTERS = 500 };

struct hit {
    double cosine;
    int64_t i;
};

static int hit_compare(const void *a, const void *b) {
    const struct hit *x = a, *y = b;
    if (x->cosine != y->cosine) return x->cosine > y->cosine ? -1 : 1;
    return (x->i > y->i) - (x->i < y->i);
}

/* Keeps the best TOP hits, best first. */
static void hit_add(struct hit *top, struct hit h) {
    int k = TOP;
    while (k > 0 && hit_compare(&h, &top[k - 1]) < 0) k--;
    if (k == TOP) return;
    memmove(top + k + 1, top + k, sizeof *top * (size_t)(TOP - 1 - k));
    top[k] = h;
}

static void top_empty(struct hit *top) {
    for (int k = 0; k < TOP; k++) top[k] = (struct hit){-2, -1};
}

/* As memory_search.c: a scan, then the exact cosine where the bound allows a place. */
static int64_t search(const struct vector_index *x, const float *query, float *cosine, float *bound,
                      struct hit *top) {
    int64_t exact = 0;
    vector_index_scan(x, query, cosine, bound);
    top_empty(top);
    for (int64_t i = 0; i < N; i++) hit_add(top, (struct hit){cosine[i] - bound[i], i});
    double lower = top[TOP - 1].cosine;
    top_empty(top);
    for (int64_t i = 0; i < N; i++) {
        if (cosine[i] + bound[i] < lower) continue;
        hit_add(top, (struct hit){vector_index_cosine(x, query, i), i});
        exact++;
    }
    return exact;
}

/* A vector near the centre of its cluster. */
static void vector_make(float *v, int64_t i, uint32_t purpose) {
    struct rng centre = rng_make(1, RNG_TEST, (uint32_t)(i % CLUSTERS), 0),
               own = rng_make(2, RNG_TEST, (uint32_t)i, purpose);
    for (int k = 0; k < D; k++) v[k] = rng_normal(&centre) + rng_normal(&own);
}

int main(void) {
    struct vector_index *x = vector_index_new(D);
    struct error err;
    float *v = xcalloc(D, sizeof *v), *cosine = xcalloc(N, sizeof *cosine),
          *bound = xcalloc(N, sizeof *bound);
    for (int64_t i = 0; i < N; i++) {
        vector_make(v, i, 0);
        if (vector_index_add(x, v, &err) != OK) return 1;
    }
    double times[QUERIES];
    int64_t exact = 0, found = 0;
    for (int q = 0; q < QUERIES; q++) {
        struct hit top[TOP], naive[TOP];
        vector_make(v, q * 7, 1);
        double start = clock_now();
        exact += search(x, v, cosine, bound, top);
        times[q] = clock_now() - start;
        top_empty(naive);
        for (int64_t i = 0; i < N; i++)
            hit_add(naive, (struct hit){vector_index_cosine(x, v, i), i});
        for (int a = 0; a < TOP; a++)
            for (int b = 0; b < TOP; b++) found += top[a].i == naive[b].i;
    }
    qsort(times, QUERIES, sizeof *times, double_compare);
    printf("{\"vectors\": %d, \"d\": %d, \"recall_at_10\": %.4f, \"median_ms\": %.2f, "
           "\"p95_ms\": %.2f, \"compared_exactly\": %.0f}\n",
           N, D, (double)found / (QUERIES * TOP), 1e3 * times[QUERIES / 2],
           1e3 * times[QUERIES * 95 / 100], (double)exact / QUERIES);
    vector_index_free(x);
    free(v);
    free(cosine);
    free(bound);
    return 0;
}
