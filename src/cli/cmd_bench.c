/*
 * shoal bench: tokens a second on a known shape with random weights, medians of several
 * repetitions, one JSON object a line. `peak` lines come first: the best this class of product
 * reaches here on operands that stay in the caches, in the same run; `peak_share` of the other
 * lines is relative to it.
 */
#define _GNU_SOURCE
#include "adapter/adapter.h"
#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *shape, *quant, *what;
    int64_t reps, tokens, rank;
};
static const struct option_row rows[] = {
    {"shape", OPT_STRING, offsetof(struct options, shape), "smollm-135m", 0, 0, "NAME",
     "as in 'shoal model new'"},
    {"quant", OPT_STRING, offsetof(struct options, quant), "q8_0", 0, 0, "TYPE",
     "f32, bf16, q8_0, q4_0, nf4, q4_k …: any weight type"},
    {"what", OPT_STRING, offsetof(struct options, what), "peak,prefill,decode", 0, 0, "LIST",
     "peak, prefill, decode"},
    {"reps", OPT_INT, offsetof(struct options, reps), "5", 1, 1000, "N",
     "repetitions; medians are printed"},
    {"tokens", OPT_INT, offsetof(struct options, tokens), "512", 1, 8192, "N",
     "prompt length of prefill"},
    {"rank", OPT_INT, offsetof(struct options, rank), "8", 1, 256, "R",
     "of the adapters, on all seven projections"},
    {0},
};

enum { MAX_BATCH = 20, DECODE_FROM = 64, DECODE_STEPS = 16 };

struct bench {
    const struct common *c;
    const struct options *o;
    struct pool *pool;
    struct model *m;
    struct forward *f;
    struct adapter *adapters[MAX_BATCH];
    float *logits;
    double peak; /* operations a second */
};

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int64_t n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static bool wanted(const struct options *o, const char *what) {
    size_t n = strlen(what);
    for (const char *p = o->what; (p = strstr(p, what)); p += n)
        if ((p == o->what || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
    return false;
}

/* Multiplications and additions of one token through all matrices but the embedding. */
static double token_ops(const struct model_config *c) {
    double n = 0;
    for (int p = 0; p < N_PROJ; p++)
        n += (double)proj_in(c, (enum proj)p) * proj_out(c, (enum proj)p);
    return 2 * (n * c->n_layers);
}

static void print(const struct bench *b, const char *what, int batch, int tokens, int adapters,
                  double tps, double ops) {
    double share = b->peak > 0 ? ops / b->peak : 0;
    if (b->c->json)
        cli_print(json_pack(
            "{s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:f,s:s,s:f,s:f}", "what", what, "shape",
            b->o->shape, "quant", b->o->quant, "level", kernels_get()->name, "threads",
            pool_size(b->pool), "batch", batch, "tokens", tokens, "adapters", adapters, "rank",
            adapters ? (int)b->o->rank : 0, "tps", tps, "class",
            b->m->cls == CLASS_EXACT ? "exact" : "fast", "peak_share", share, "gops", 1e-9 * ops));
    else
        printf("%-8s batch %3d  tokens %4d  adapters %2d  %9.1f tokens/s  %7.1f Gop/s  %5.1f %% of "
               "peak\n",
               what, batch, tokens, adapters, tps, 1e-9 * ops, 100 * share);
}

/* 256 rows against 512 × 512 weights: everything stays in the second-level cache. */
static void bench_peak(struct bench *b, enum tensor_type type) {
    enum { ROWS = 256, K = 512, N = 512 };
    struct arena arena = {0};
    struct error err;
    struct matrix w;
    struct inputs in;
    double t[1000];
    float *x = arena_alloc(&arena, sizeof *x * ROWS * K),
          *y = arena_alloc(&arena, sizeof *y * ROWS * N);
    float *rows32 = arena_alloc(&arena, sizeof *rows32 * N * K);
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int i = 0; i < ROWS * K; i++) x[i] = rng_uniform(&r) - 0.5f;
    for (int i = 0; i < N * K; i++) rows32[i] = rng_uniform(&r) - 0.5f;
    void *file = arena_alloc(&arena, tensor_row_bytes(type, K) * N);
    for (int i = 0; i < N; i++)
        tensor_from_f32(type, rows32 + i * K,
                        (uint8_t *)file + tensor_row_bytes(type, K) * (size_t)i, K);
    CHECK(matrix_init(&w, type, N, K, file, NULL, b->m->cls, &arena, &err) == OK);
    void *scratch = arena_alloc(&arena, inputs_scratch(ROWS, K));
    inputs_prepare(&in, x, K, ROWS, K, matrix_int8(&w), matrix_bf16(&w), scratch, b->pool);
    for (int i = 0; i < 20; i++) matrix_mul(y, N, &in, &w, false, b->pool);
    for (int64_t i = 0; i < b->o->reps; i++) {
        double start = clock_now();
        for (int j = 0; j < 20; j++) matrix_mul(y, N, &in, &w, false, b->pool);
        t[i] = (clock_now() - start) / 20;
    }
    b->peak = 2.0 * ROWS * K * N / median(t, b->o->reps);
    if (wanted(b->o, "peak")) print(b, "peak", ROWS, 0, 0, 0, b->peak);
    arena_release(&arena);
}

/* n rows as one segment a distinct adapter: 0 none, 1 one for all, else one a row. */
static int segments(const struct bench *b, struct segment *segs, int n, int adapters) {
    if (adapters > 1) {
        for (int i = 0; i < n; i++) segs[i] = (struct segment){i, i + 1, b->adapters[i]->loras};
        return n;
    }
    segs[0] = (struct segment){0, n, adapters ? b->adapters[0]->loras : NULL};
    return 1;
}

static double prefill_seconds(struct bench *b, int tokens, int adapters) {
    struct row *rows_ = xcalloc((size_t)tokens, sizeof *rows_);
    struct segment segs[MAX_BATCH];
    int32_t last = tokens - 1;
    for (int i = 0; i < tokens; i++)
        rows_[i] = (struct row){(i * 7919 + 3) % b->m->config.vocab_size, i, 0};
    int n_segs = segments(b, segs, tokens, adapters);
    double start = clock_now();
    forward_run(b->f, rows_, tokens, segs, n_segs, &last, 1, b->logits);
    double seconds = clock_now() - start;
    free(rows_);
    return seconds;
}

static double decode_seconds(struct bench *b, int batch, int adapters) {
    struct row step[MAX_BATCH];
    struct segment segs[MAX_BATCH];
    int32_t out[MAX_BATCH];
    int n_segs = segments(b, segs, batch, adapters);
    double start = clock_now();
    for (int t = 0; t < DECODE_STEPS; t++) {
        for (int i = 0; i < batch; i++) {
            step[i] =
                (struct row){(t * 31 + i * 7919 + 3) % b->m->config.vocab_size, DECODE_FROM + t, i};
            out[i] = i;
        }
        forward_run(b->f, step, batch, segs, n_segs, out, batch, b->logits);
    }
    return clock_now() - start;
}

static void bench_prefill(struct bench *b, int adapters) {
    double t[1000];
    int tokens = (int)MIN(b->o->tokens, b->m->config.max_seq_len);
    prefill_seconds(b, tokens, adapters);
    for (int64_t i = 0; i < b->o->reps; i++) t[i] = prefill_seconds(b, tokens, adapters);
    double s = median(t, b->o->reps);
    print(b, "prefill", 1, tokens, adapters, tokens / s, token_ops(&b->m->config) * tokens / s);
}

static void bench_decode(struct bench *b, int batch, int adapters) {
    double t[1000], head = 2.0 * b->m->config.vocab_size * b->m->config.d_model;
    decode_seconds(b, batch, adapters);
    for (int64_t i = 0; i < b->o->reps; i++) t[i] = decode_seconds(b, batch, adapters);
    double tps = batch * DECODE_STEPS / median(t, b->o->reps);
    print(b, "decode", batch, DECODE_FROM, adapters, tps, (token_ops(&b->m->config) + head) * tps);
}

/* The shape's random model in the wanted weight type. */
static struct model *bench_model(const struct common *c, const struct options *o,
                                 enum tensor_type *type, struct error *err) {
    struct model_config config;
    if (shape_find(o->shape, &config, err) != OK) return NULL;
    if (tensor_type_parse(o->quant, type) != OK) {
        error_set(err, ERR_USAGE, "no weight type '%s'; there are %s", o->quant,
                  tensor_type_list());
        return NULL;
    }
    return model_new_typed(&config, 1, *type, cli_class(c));
}

static void bench_all(struct bench *b, enum tensor_type type) {
    static const int batches[] = {1, 4, MAX_BATCH};
    bench_peak(b, type);
    for (int a = 0; wanted(b->o, "prefill") && a <= 1; a++) bench_prefill(b, a);
    for (size_t i = 0; wanted(b->o, "decode") && i < ARRAY_LEN(batches); i++)
        for (int a = 0; a <= batches[i]; a += a == 1 && batches[i] > 1 ? batches[i] - 1 : 1)
            bench_decode(b, batches[i], a);
}

static int run(const struct common *c, const void *options, const struct strings *args,
               struct error *err) {
    struct bench b = {.c = c, .o = options, .pool = pool_new((int)c->threads)};
    enum tensor_type type;
    (void)args;
    b.m = bench_model(c, b.o, &type, err);
    if (b.m) {
        struct adapter_config ac = {.r = (int32_t)b.o->rank, .alpha = 2 * (float)b.o->rank};
        for (int p = 0; p < N_PROJ; p++) ac.target[p] = true;
        struct forward_options fo = {.max_rows = (int32_t)MAX(b.o->tokens, MAX_BATCH),
                                     .n_slots = MAX_BATCH,
                                     .slot_len =
                                         (int32_t)MAX(b.o->tokens, DECODE_FROM + DECODE_STEPS),
                                     .pool = b.pool};
        fo.slot_len = MIN(fo.slot_len, b.m->config.max_seq_len);
        b.f = forward_new(b.m, &fo);
        b.logits = xcalloc((size_t)MAX_BATCH * (size_t)b.m->config.vocab_size, sizeof *b.logits);
        for (int i = 0; i < MAX_BATCH; i++)
            b.adapters[i] = adapter_new(&b.m->config, &ac, (uint64_t)i);
        bench_all(&b, type);
    }
    for (int i = 0; i < MAX_BATCH; i++) adapter_release(b.adapters[i]);
    forward_free(b.f);
    free(b.logits);
    int rc = b.m ? OK : err->code;
    model_close(b.m);
    pool_free(b.pool);
    return rc;
}

const struct command cmd_bench = {
    .name = "bench",
    .args = "",
    .summary = "tokens a second on a known shape, with and without adapters",
    .about = "  shoal bench --shape smollm-135m --quant q8_0 --json\n\n"
             "Adapters have random A and zero B; their products cost what trained ones cost.",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run,
};
