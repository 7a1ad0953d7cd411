/*
 * cmd_bench: `shoal bench`: tokens per second on random weights of a known shape, or on a model.
 *
 * The variants of a group run in turn in every repetition, so that a busy machine slows all of them
 * alike; compare the ratios. All printed times are medians; `ratio` is the median over repetitions
 * of the ratio to the first variant of the group. `peak` is the rate of a matrix product whose
 * operands stay in the caches, in the same numeric class; `bandwidth` is the speed of reading a
 * buffer as large as the weights. Both are measured in the same run.
 */
#define _GNU_SOURCE
#include "adapter/adapter.h"
#include "backprop/backprop.h"
#include "cli/cli.h"
#include "engine/engine.h"
#include "world/world.h"

#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_BATCH = 20,
    CANDIDATES = 64, /* adapters in population */
    QUESTIONS = 4,   /* questions per candidate */
    CHOICES = 4,
    CHOICE_TOKENS = 3, /* the last one is not an input */
    SPAN_MAX = 64,     /* tokens of a prompt, a reply, and a member of noise */
    DECODE_STEPS = 16,
    NOISE_SEQS = 4,      /* members per step */
    WORLD_TICKS = 16384, /* ticks per repetition of world */
    BENCH_AGENTS = 20,   /* agents of world */
    MAX_REPS = 1000,
};

struct options {
    char *model, *shape, *quant, *what, *lora, *kv, *history, *targets, *layers, *rules, *tokenizer;
    int64_t reps, tokens, depth, rank, members, registered, samples, adapters, ticks;
    struct strings set;
    struct engine_limits limits;
    bool world;
};
static const struct option_row rows[] = {
    {"model", OPT_STRING, offsetof(struct options, model), "", 0, 0, "PATH",
     "model to measure, instead of random weights"},
    {"shape", OPT_STRING, offsetof(struct options, shape), "smollm-135m", 0, 0, "NAME",
     "shape of the random weights, as in 'shoal model new'"},
    {"type", OPT_STRING, offsetof(struct options, quant), "q8_0", 0, 0, "TYPE",
     "type of the random weights: bf16, q8_0, q4_0, nf4 …"},
    {"lora-dtype", OPT_STRING, offsetof(struct options, lora), "i8", 0, 0, "ELEM",
     "number format of adapters: f32, bf16, f16 or i8"},
    {"kv-cache-dtype", OPT_STRING, offsetof(struct options, kv), "auto", 0, 0, "ELEM",
     "number format of keys and values, also in training: f32, bf16, f16, i8 or auto (f16; bf16 "
     "where attention runs in bf16)"},
    {"what", OPT_STRING, offsetof(struct options, what), "peak,bandwidth,prefill,decode,serve", 0,
     0, "LIST",
     "measurements: peak, bandwidth, prefill, decode, depth, serve, pool, noise, es, population, "
     "memory, train, world, life"},
    {"world", OPT_BOOL, offsetof(struct options, world), NULL, 0, 0, NULL,
     "the same as --what world,life"},
    {"ticks", OPT_INT, offsetof(struct options, ticks), "60", 2, 100000, "N",
     "life: ticks of a generation"},
    {"tokenizer", OPT_STRING, offsetof(struct options, tokenizer), "", 0, 0, "FILE",
     "life: tokenizer.json for the random weights; default: a token per byte"},
    {"reps", OPT_INT, offsetof(struct options, reps), "5", 1, 1000, "N",
     "repetitions of each measurement; medians are printed"},
    {"tokens", OPT_INT, offsetof(struct options, tokens), "512", 1, 8192, "N",
     "prefill, train: tokens of the prompt and of a sample"},
    {"depth", OPT_INT, offsetof(struct options, depth), "1800", 1, 1000000, "N",
     "depth: tokens in the KV cache before the generated ones"},
    {"rank", OPT_INT, offsetof(struct options, rank), "8", 1, 256, "R",
     "LoRA rank of the adapters"},
    {"target", OPT_STRING, offsetof(struct options, targets), "all-linear", 0, 0, "LIST",
     "projections with LoRA: q_proj,v_proj … or all-linear"},
    {"layers", OPT_STRING, offsetof(struct options, layers), "all", 0, 0, "LIST",
     "layers with LoRA: 4-5, or all"},
    {"members", OPT_INT, offsetof(struct options, members), "64", 1, 65536, "N",
     "noise, es: number of perturbations"},
    {"registered", OPT_INT, offsetof(struct options, registered), "2000", 20, 1000000, "N",
     "pool: number of registered adapters"},
    {"samples", OPT_INT, offsetof(struct options, samples), "4", 1, 4096, "N",
     "train: samples per update"},
    {"num-adapters", OPT_INT, offsetof(struct options, adapters), "1", 0, MAX_BATCH, "N",
     "train: adapters that are trained together; 0: full fine-tuning"},
    {"set", OPT_LIST, offsetof(struct options, set), NULL, 0, 0, "NAME=X",
     "options of 'shoal train' (train, es) or 'shoal world' (life), such as optim=sgd"},
    {"rules", OPT_STRING, offsetof(struct options, rules), "repaired", 0, 0, "NAME",
     "world, life: rules of the world: legacy, repaired or a YAML file"},
    ENGINE_LIMIT_ROWS(struct options, limits),
    {"history", OPT_STRING, offsetof(struct options, history), "", 0, 0, "FILE",
     "append the results to this CSV file"},
    {"quant", OPT_ALIAS, 0, "type"},
    {"targets", OPT_ALIAS, 0, "target"},
    {"adapters", OPT_ALIAS, 0, "num-adapters"},
    {0},
};

struct bench {
    const struct cli_options *c;
    const struct options *o;
    struct pool *pool;
    struct model *m;
    struct forward *f;
    enum dtype lora, kv;
    int32_t span; /* SPAN_MAX, or half of a short context */
    struct adapter *adapters[CANDIDATES];
    struct lora_part parts[MAX_BATCH], noise[NOISE_SEQS];
    struct adapter_pool *small_pool, *large_pool; /* of MAX_BATCH and of o->registered adapters */
    int64_t next_cold;                            /* the next adapter of `many` to request */
    struct trainer *single_trainer,
        *multi_trainer; /* trainers of one adapter or all weights, and of o->adapters */
    struct train_sample *samples;
    struct es *es;
    int rc; /* first error of train and es; `err` has its message */
    struct error *err;
    float *logits;
    FILE *history;
    double peak, bandwidth; /* operations and bytes per second */
};

/* One measurement, which prints one line: its labels and the function that measures it. */
struct variant {
    const char *what;
    int batch, tokens, adapters;
    double units; /* tokens that count towards the rate */
    double (*seconds)(struct bench *b, const struct variant *v);
};

static double median(double *v, int64_t n) {
    qsort(v, (size_t)n, sizeof *v, double_compare);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static bool is_selected(const struct options *o, const char *what) {
    size_t n = strlen(what);
    for (const char *p = o->what; (p = strstr(p, what)); p += n)
        if ((p == o->what || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
    return false;
}

/* Operations (2 per multiply-add) per token in all layers, without the embedding and the head. */
static double token_ops(const struct model_config *c) {
    double n = 0;
    for (int p = 0; p < N_PROJ; p++)
        n += (double)proj_in(c, (enum proj)p) * proj_out(c, (enum proj)p);
    return 2 * (n * c->n_layers);
}

/* Bytes of weights read per token. */
static double weight_bytes(const struct model *m) {
    double n = (double)matrix_bytes(&m->head);
    for (int32_t l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) n += (double)matrix_bytes(&m->layers[l].proj[p]);
    return n;
}

static const char *shape_name(const struct bench *b) {
    return *b->o->model ? b->m->name : b->o->shape;
}

static void history_append(const struct bench *b, const struct variant *v, double tps,
                           double ratio) {
    char day[32];
    time_t now = time(NULL);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(b->history, "%s,%s,%s,%s,%d,%s,%s,%s,%s,%d,%d,%d,%.1f,%.3f\n", day, SHOAL_VERSION,
            kernels_get()->name, numeric_class_name(b->m->cls), pool_size(b->pool), shape_name(b),
            tensor_type_name(b->m->type), b->o->lora, v->what, v->batch, v->tokens, v->adapters,
            tps, ratio);
}

/* joules: per token; NaN: not known. */
static void print_variant(const struct bench *b, const struct variant *v, double tps, double ratio,
                          double ops, double bytes, double joules) {
    double peak = b->peak > 0 ? ops / b->peak : 0,
           band = b->bandwidth > 0 ? bytes / b->bandwidth : 0;
    if (b->history) history_append(b, v, tps, ratio);
    if (b->c->json) {
        json_t *row = json_pack(
            "{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:f,s:f,s:f}", "what",
            v->what, "shape", shape_name(b), "quant", tensor_type_name(b->m->type), "lora",
            b->o->lora, "kv", dtype_name(b->kv), "level", kernels_get()->name, "class",
            numeric_class_name(b->m->cls), "threads", pool_size(b->pool), "batch", v->batch,
            "tokens", v->tokens, "adapters", v->adapters, "rank", v->adapters ? (int)b->o->rank : 0,
            "tps", tps, "ratio", ratio, "gops", 1e-9 * ops, "peak_share", peak, "bandwidth_share",
            band);
        if (!isnan(joules)) json_object_set_new(row, "joules_per_token", json_real(joules));
        cli_print_json(row);
        return;
    }
    printf("%-9s batch %3d  tokens %4d  adapters %4d  %9.1f tokens/s  x %.3f", v->what, v->batch,
           v->tokens, v->adapters, tps, ratio);
    if (ops > 0) printf("  %7.1f Gop/s", 1e-9 * ops);
    if (peak > 0) printf("  %5.1f %% of peak", 100 * peak);
    if (band > 0 && v->batch == 1) printf("  %5.1f %% of bandwidth", 100 * band);
    if (!isnan(joules)) printf("  %.3g J/token", joules);
    printf("\n");
    fflush(stdout);
}

/* Runs all variants in turn, o->reps times, after one warm-up round. Returns the seconds of the
 * last variant. */
static double group_run(struct bench *b, const struct variant *v, int n, double ops_a_unit) {
    double *t = xcalloc((size_t)n * MAX_REPS, sizeof *t), ratio[MAX_REPS], seconds[MAX_REPS],
           last = 0, *joules = xcalloc((size_t)n, sizeof *joules);
    int64_t reps = b->o->reps;
    for (int i = 0; i < n; i++) v[i].seconds(b, &v[i]);
    for (int64_t r = 0; r < reps; r++)
        for (int i = 0; i < n; i++) {
            double before = energy_now();
            t[i * MAX_REPS + r] = v[i].seconds(b, &v[i]);
            joules[i] += energy_now() - before;
        }
    for (int i = 0; b->rc == OK && i < n; i++) {
        for (int64_t r = 0; r < reps; r++) {
            seconds[r] = t[i * MAX_REPS + r];
            ratio[r] = t[r] / v[0].units / (seconds[r] / v[i].units);
        }
        double tps = last = v[i].units / median(seconds, reps);
        print_variant(b, &v[i], tps, median(ratio, reps), ops_a_unit * tps,
                      tps / v[i].batch * weight_bytes(b->m), joules[i] / v[i].units / (double)reps);
    }
    free(t);
    free(joules);
    return v[n - 1].units / last;
}

/* 256 rows against 512 × 512 weights: everything stays in the second-level cache. */
static void bench_peak(struct bench *b, enum tensor_type type) {
    enum { ROWS = 256, K = 512, N = 512 };
    struct arena arena = {0};
    struct error err;
    struct matrix w;
    double t[MAX_REPS];
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
    CHECK(matrix_init(&w, type, N, K, file, NULL, b->m->cls, NULL, &arena, &err) == OK);
    void *scratch = arena_alloc(&arena, gemm_input_scratch(ROWS, K));
    struct gemm_input in = gemm_input_for(
        &w, 1, x, ROWS, b->m->cls == NUMERIC_FAST ? ROWS_KNOWN : ROWS_EXACT, scratch, b->pool);
    for (int i = 0; i < 20; i++) matrix_mul(y, N, &in, &w, false, b->pool);
    for (int64_t i = 0; i < b->o->reps; i++) {
        double start = clock_now();
        for (int j = 0; j < 20; j++) matrix_mul(y, N, &in, &w, false, b->pool);
        t[i] = (clock_now() - start) / 20;
    }
    b->peak = 2.0 * ROWS * K * N / median(t, b->o->reps);
    struct variant v = {.what = "peak", .batch = ROWS};
    if (is_selected(b->o, "peak")) print_variant(b, &v, 0, 1, b->peak, 0, NAN);
    arena_release(&arena);
}

struct read_job {
    const float *data;
    int64_t n;
    float sum[64];
};

static void read_part(void *ctx, int64_t begin, int64_t end, int thread) {
    struct read_job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        j->sum[thread % 64] += kernels_get()->sum(j->data + i * 4096, MIN(4096, j->n - i * 4096));
}

static void bench_bandwidth(struct bench *b) {
    struct read_job j = {.n = (int64_t)(weight_bytes(b->m) / sizeof(float))};
    double t[MAX_REPS];
    float *data = xcalloc((size_t)j.n, sizeof *data);
    for (int64_t i = 0; i < j.n; i += 1024) data[i] = 1;
    j.data = data;
    for (int64_t i = -1; i < b->o->reps; i++) {
        double start = clock_now();
        pool_run(b->pool, read_part, &j, (j.n + 4095) / 4096, 1);
        if (i >= 0) t[i] = clock_now() - start;
    }
    b->bandwidth = (double)j.n * sizeof *data / median(t, b->o->reps);
    free(data);
    if (b->c->json)
        cli_print_json(json_pack("{s:s,s:f,s:f}", "what", "bandwidth", "bytes_per_second",
                                 b->bandwidth, "buffer", (double)j.n * sizeof *data));
    else
        printf("bandwidth %.1f GB/s over %.0f MB\n", 1e-9 * b->bandwidth,
               1e-6 * (double)j.n * sizeof *data);
}

/* Fills LoRA segments for n rows and returns their number. adapters: 0 none, 1 one for all rows,
 * else one per row. */
static int segments_init(const struct bench *b, struct lora_segment *segs, int n, int adapters) {
    if (adapters > 1) {
        for (int i = 0; i < n; i++)
            segs[i] = (struct lora_segment){i, i + 1, &b->parts[i], 1, NULL};
        return n;
    }
    segs[0] = (struct lora_segment){0, n, b->parts, adapters, NULL};
    return 1;
}

static int32_t pseudo_token(const struct bench *b, int i) {
    return (int32_t)(((int64_t)i * 7919 + 3) % b->m->config.vocab_size);
}

static double prefill_seconds(struct bench *b, const struct variant *v) {
    struct batch_row *r = xcalloc((size_t)v->tokens, sizeof *r);
    struct lora_segment segs[MAX_BATCH];
    int32_t last = v->tokens - 1;
    for (int i = 0; i < v->tokens; i++) r[i] = (struct batch_row){pseudo_token(b, i), i, 0};
    int n_segs = segments_init(b, segs, v->tokens, v->adapters);
    double start = clock_now();
    forward_run(b->f, r, v->tokens, segs, n_segs, &last, 1, b->logits);
    double seconds = clock_now() - start;
    free(r);
    return seconds;
}

/* Fills the KV cache of the first sequence with the tokens of a prompt. */
static void depth_fill(struct bench *b, int tokens) {
    struct batch_row *r = xcalloc((size_t)b->o->tokens, sizeof *r);
    struct lora_segment segs[MAX_BATCH];
    for (int at = 0; at < tokens;) {
        int n = (int)MIN(b->o->tokens, tokens - at);
        for (int i = 0; i < n; i++) r[i] = (struct batch_row){pseudo_token(b, at + i), at + i, 0};
        forward_run(b->f, r, n, segs, segments_init(b, segs, n, 0), NULL, 0, NULL);
        at += n;
    }
    free(r);
}

/* DECODE_STEPS tokens of each sequence after v->tokens others. */
static double decode_seconds(struct bench *b, const struct variant *v) {
    struct batch_row step[MAX_BATCH];
    struct lora_segment segs[MAX_BATCH];
    int32_t out[MAX_BATCH];
    int n_segs = segments_init(b, segs, v->batch, v->adapters);
    for (int i = 0; i < v->batch; i++)
        kv_cache_reserve(forward_kv_cache(b->f), i, 0, v->tokens + DECODE_STEPS);
    double start = clock_now();
    for (int t = 0; t < DECODE_STEPS; t++) {
        for (int i = 0; i < v->batch; i++) {
            step[i] = (struct batch_row){pseudo_token(b, t * 31 + i), v->tokens + t, i, true};
            out[i] = i;
        }
        forward_run(b->f, step, v->batch, segs, n_segs, out, v->batch, b->logits);
    }
    return clock_now() - start;
}

/* The sequences of an engine for n requests. */
static int32_t sequences(const struct bench *b, int32_t n) {
    int64_t named = b->o->limits.max_seqs;
    return named ? (int32_t)MIN(named, n) : n;
}

static struct engine_options serve_options(const struct bench *b) {
    return (struct engine_options){.max_rows = 256,
                                   .max_seqs = sequences(b, MAX_BATCH),
                                   .max_len = 2 * b->span,
                                   .lora_elem = b->lora,
                                   .kv_elem = b->kv,
                                   .pool = b->pool};
}

/* Seconds that an engine takes for n requests with different prompts, submitted at once; without
 * the time to create the engine. */
static double requests_run(struct bench *b, struct adapter *const adapters[], int n) {
    struct error err;
    const struct engine_options eo = serve_options(b);
    struct engine *e = engine_new(b->m, &eo, &err);
    struct engine_request r[MAX_BATCH] = {0};
    int32_t prompts[MAX_BATCH][SPAN_MAX];
    CHECK(e != NULL);
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < b->span; j++) prompts[i][j] = pseudo_token(b, 1 + i * 131 + j);
        r[i] = (struct engine_request){.prompt = prompts[i],
                                       .n_prompt = b->span,
                                       .max_tokens = b->span,
                                       .adapter = adapters[i]};
    }
    double start = clock_now();
    CHECK(engine_run(e, r, n, NULL, &err) == OK);
    double seconds = clock_now() - start;
    for (int i = 0; i < n; i++) engine_request_release(&r[i]);
    engine_free(e);
    return seconds;
}

static double serve_seconds(struct bench *b, const struct variant *v) {
    struct adapter *adapters[MAX_BATCH] = {0};
    for (int i = 0; v->adapters && i < v->batch; i++) adapters[i] = b->adapters[i % v->adapters];
    return requests_run(b, adapters, v->batch);
}

/* Like serve_seconds, with adapters from a pool: the registered adapter number `first`, and every
 * `step`th after it. */
static double pool_seconds(struct bench *b, struct adapter_pool *p, int64_t first, int64_t step) {
    struct adapter *adapters[MAX_BATCH];
    struct error err;
    char name[32];
    double start = clock_now();
    for (int i = 0; i < MAX_BATCH; i++) {
        snprintf(name, sizeof name, "%" PRId64, (first + i * step) % b->o->registered);
        adapters[i] = adapter_pool_get(p, name, &err);
        CHECK(adapters[i] != NULL);
    }
    double seconds = clock_now() - start + requests_run(b, adapters, MAX_BATCH);
    for (int i = 0; i < MAX_BATCH; i++) adapter_release(adapters[i]);
    return seconds;
}

/* The same MAX_BATCH adapters in every repetition, which stay in memory after the first. */
static double pool_hot(struct bench *b, const struct variant *v) {
    return pool_seconds(b, v->adapters > MAX_BATCH ? b->large_pool : b->small_pool, 0,
                        v->adapters / MAX_BATCH);
}

/* Different adapters in every repetition, so that each is read from its file. */
static double pool_cold(struct bench *b, const struct variant *v) {
    (void)v;
    b->next_cold += MAX_BATCH;
    return pool_seconds(b, b->large_pool, b->next_cold - MAX_BATCH, 1);
}

/* Prefills b->span tokens per member, with a perturbation for each member or without any. */
static double noise_seconds(struct bench *b, const struct variant *v) {
    struct batch_row r[NOISE_SEQS * SPAN_MAX];
    struct lora_segment segs[NOISE_SEQS];
    int32_t out[NOISE_SEQS];
    double start = clock_now();
    for (int m = 0; m < v->batch; m += NOISE_SEQS) {
        int n = MIN(NOISE_SEQS, v->batch - m);
        for (int i = 0; i < n; i++) {
            b->noise[i] = (struct lora_part){.noise = {1, (uint32_t)(m + i)}, .weight = 1e-3f};
            segs[i] = (struct lora_segment){i * b->span, (i + 1) * b->span, &b->noise[i],
                                            v->adapters > 0, NULL};
            out[i] = (i + 1) * b->span - 1;
            for (int j = 0; j < b->span; j++)
                r[i * b->span + j] = (struct batch_row){pseudo_token(b, (m + i) * 131 + j), j, i};
        }
        forward_run(b->f, r, n * b->span, segs, n, out, n, b->logits);
    }
    return clock_now() - start;
}

/* Token j of prompt i. The first two tokens distinguish the prompts, so that requests for the base
 * model share no prefix. */
static int32_t question_token(const struct bench *b, int i, int j) {
    int32_t vocab = b->m->config.vocab_size;
    return j == 0 ? i % vocab : j == 1 ? i / vocab : pseudo_token(b, i * 131 + j);
}

static struct engine_options population_options(const struct bench *b) {
    return (struct engine_options){.max_rows = 512,
                                   .max_seqs = sequences(b, CANDIDATES),
                                   .max_len = b->span,
                                   .max_out = 256,
                                   .lora_elem = b->lora,
                                   .kv_elem = b->kv,
                                   .pool = b->pool};
}

/* Multiple choice by likelihood through an engine: QUESTIONS for each of CANDIDATES. Requests
 * alternate between candidates, so that a batch has as many adapters as possible. */
static double population_seconds(struct bench *b, const struct variant *v) {
    enum { N = CANDIDATES * QUESTIONS, PROMPT = SPAN_MAX / 2 };
    static struct engine_request r[N];
    static int32_t prompts[N][PROMPT], words[N][CHOICES][CHOICE_TOKENS];
    static struct token_seq choices[N][CHOICES];
    int32_t prompt = b->span / 2 - CHOICES * (CHOICE_TOKENS - 1);
    struct error err;
    const struct engine_options eo = population_options(b);
    struct engine *e = engine_new(b->m, &eo, &err);
    CHECK(e != NULL);
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < prompt; j++) prompts[i][j] = question_token(b, i, j);
        for (int k = 0; k < CHOICES; k++) {
            for (int j = 0; j < CHOICE_TOKENS; j++)
                words[i][k][j] = pseudo_token(b, i + k * 17 + j);
            choices[i][k] = (struct token_seq){words[i][k], CHOICE_TOKENS};
        }
        r[i] =
            (struct engine_request){.prompt = prompts[i],
                                    .n_prompt = prompt,
                                    .choices = choices[i],
                                    .n_choices = CHOICES,
                                    .adapter = v->adapters ? b->adapters[i % v->adapters] : NULL};
    }
    double start = clock_now();
    CHECK(engine_run(e, r, N, NULL, &err) == OK);
    double seconds = clock_now() - start;
    CHECK(engine_stats(e).rows == (uint64_t)v->units);
    for (int i = 0; i < N; i++) engine_request_release(&r[i]);
    engine_free(e);
    return seconds;
}

/* A generation of evolution strategies: all members evaluate one sample, of which a quarter is the
 * answer; then an update. */
static double es_seconds(struct bench *b, const struct variant *v) {
    (void)v;
    double start = clock_now();
    if (b->rc == OK) b->rc = es_accumulate(b->es, b->single_trainer, 0, b->samples, 1, b->err);
    if (b->rc == OK) b->rc = trainer_update(b->single_trainer, 1e-4f, NULL, b->err);
    return clock_now() - start;
}

static void bench_prefill(struct bench *b) {
    int tokens = (int)MIN(b->o->tokens, b->m->config.max_seq_len);
    struct variant v[] = {{"prefill", 1, tokens, 0, tokens, prefill_seconds},
                          {"prefill", 1, tokens, 1, tokens, prefill_seconds}};
    group_run(b, v, 2, token_ops(&b->m->config));
}

static void bench_decode(struct bench *b) {
    static const int batches[] = {1, 4, MAX_BATCH};
    double head = 2.0 * b->m->config.vocab_size * b->m->config.d_model;
    for (size_t i = 0; i < ARRAY_LEN(batches); i++) {
        int n = batches[i];
        double units = n * DECODE_STEPS;
        struct variant v[] = {{"decode", n, b->span, 0, units, decode_seconds},
                              {"decode", n, b->span, 1, units, decode_seconds},
                              {"decode", n, b->span, n, units, decode_seconds}};
        struct forward_stats before = *forward_stats(b->f);
        double start = clock_now();
        group_run(b, v, n > 1 ? 3 : 2, token_ops(&b->m->config) + head);
        double seconds = clock_now() - start,
               kernels = forward_stats(b->f)->kernel_seconds - before.kernel_seconds;
        if (!b->c->json)
            printf("%36s%.0f %% of the time in kernels\n", "", 100 * kernels / seconds);
    }
}

static int depth_tokens(const struct bench *b, const struct model_config *c) {
    return (int)MIN(b->o->depth, c->max_seq_len - DECODE_STEPS);
}

static void bench_depth(struct bench *b) {
    int depth = depth_tokens(b, &b->m->config);
    struct variant v[] = {{"depth", 1, depth, 0, DECODE_STEPS, decode_seconds},
                          {"depth", 1, depth, 1, DECODE_STEPS, decode_seconds}};
    depth_fill(b, depth);
    group_run(b, v, 2, token_ops(&b->m->config));
}

static void bench_serve(struct bench *b) {
    static const int batches[] = {4, MAX_BATCH};
    for (size_t i = 0; i < ARRAY_LEN(batches); i++) {
        int n = batches[i];
        double units = n * b->span;
        struct variant v[] = {{"serve", n, b->span, 0, units, serve_seconds},
                              {"serve", n, b->span, 1, units, serve_seconds},
                              {"serve", n, b->span, n, units, serve_seconds}};
        group_run(b, v, 3, token_ops(&b->m->config));
    }
}

static void pool_file(const char *dir, int i, char path[64]) {
    snprintf(path, 64, "%s/%d.gguf", dir, i);
}

/* An adapter pool of n names for the files in `dir`, with memory for two batches. */
static struct adapter_pool *bench_pool_new(struct bench *b, const char *dir, int64_t n) {
    struct error err;
    struct adapter_pool_options po = {
        .max_bytes = 2 * MAX_BATCH * b->parts[0].pack->bytes, .elem = b->lora, .serve_only = true};
    struct adapter_pool *p = adapter_pool_new(b->m, &po);
    for (int64_t i = 0; i < n; i++) {
        char name[32], path[64];
        pool_file(dir, (int)(i % MAX_BATCH), path);
        snprintf(name, sizeof name, "%" PRId64, i);
        CHECK(adapter_pool_add(p, name, path, &err) == OK);
    }
    return p;
}

static int bench_pool(struct bench *b, struct error *err) {
    double units = MAX_BATCH * b->span;
    int many = (int)b->o->registered, rc = OK;
    struct variant v[] = {{"pool", MAX_BATCH, b->span, MAX_BATCH, units, pool_hot},
                          {"pool", MAX_BATCH, b->span, many, units, pool_hot},
                          {"pool-cold", MAX_BATCH, b->span, many, units, pool_cold}};
    char dir[] = "/tmp/shoal-bench-XXXXXX", path[64];
    if (!mkdtemp(dir)) return error_errno(err, "cannot make '%s'", dir);
    for (int i = 0; rc == OK && i < MAX_BATCH; i++) {
        pool_file(dir, i, path);
        rc = adapter_save_gguf(b->adapters[i], path, "", false, err);
    }
    if (rc == OK) {
        b->small_pool = bench_pool_new(b, dir, MAX_BATCH);
        b->large_pool = bench_pool_new(b, dir, many);
        group_run(b, v, 3, token_ops(&b->m->config));
        adapter_pool_free(b->small_pool);
        adapter_pool_free(b->large_pool);
    }
    for (int i = 0; i < MAX_BATCH; i++) {
        pool_file(dir, i, path);
        unlink(path);
    }
    rmdir(dir);
    return rc;
}

static void bench_noise(struct bench *b) {
    int members = (int)b->o->members;
    double units = (double)members * b->span;
    struct variant v[] = {{"noise", members, b->span, 0, units, noise_seconds},
                          {"noise", members, b->span, members, units, noise_seconds}};
    group_run(b, v, 2, token_ops(&b->m->config));
}

static void bench_population(struct bench *b) {
    double units = CANDIDATES * QUESTIONS * (b->span / 2);
    int n = CANDIDATES * QUESTIONS, len = b->span / 2;
    struct variant v[] = {{"population", n, len, 0, units, population_seconds},
                          {"population", n, len, 1, units, population_seconds},
                          {"population", n, len, CANDIDATES, units, population_seconds}};
    group_run(b, v, 3, token_ops(&b->m->config));
}

static void print_memory(const struct bench *b, double engine, double adapters) {
    double high = (double)process_memory("VmHWM");
    if (b->c->json)
        cli_print_json(json_pack("{s:s,s:s,s:s,s:s,s:s,s:i,s:i,s:f,s:f,s:f,s:f}", "what", "memory",
                                 "shape", shape_name(b), "quant", tensor_type_name(b->m->type),
                                 "lora", b->o->lora, "kv", dtype_name(b->kv), "agents", MAX_BATCH,
                                 "tokens", b->span, "weights", weight_bytes(b->m), "adapters",
                                 adapters, "engine", engine, "VmHWM", high));
    else
        printf("memory    %d agents of %d tokens: weights %.1f MB, adapters %.1f MB, engine %.1f "
               "MB; VmHWM %.0f bytes\n",
               MAX_BATCH, b->span, 1e-6 * weight_bytes(b->m), 1e-6 * adapters, 1e-6 * engine, high);
}

/* Runs MAX_BATCH agents with separate adapters in one batch and as little memory as possible; a
 * quarter of their tokens is prefilled, the rest decoded. Prints the peak memory of the process. */
static int bench_memory(struct bench *b, const struct adapter_config *ac, struct error *err) {
    struct engine_options eo = {.max_rows = MAX_BATCH,
                                .max_seqs = sequences(b, MAX_BATCH),
                                .max_len = b->span,
                                .max_cached = 1,
                                .max_out = 1,
                                .lora_elem = b->lora,
                                .kv_elem = b->kv,
                                .pool = b->pool};
    struct engine_request r[MAX_BATCH] = {0};
    int32_t prompts[MAX_BATCH][SPAN_MAX / 4];
    double adapters = 0;
    tokenizer_free(b->m->tok); // not needed: no text is encoded or decoded here
    b->m->tok = NULL;
    for (int i = 0; i < MAX_BATCH; i++) {
        b->adapters[i] = adapter_new(&b->m->config, ac, (uint64_t)i);
        adapters += (double)adapter_pack_only(b->adapters[i], b->lora)->bytes;
    }
    const struct memory_step step = {.what = "an engine for the agents",
                                     .least = engine_bytes(&b->m->config, &eo)};
    struct engine *e = NULL;
    if (memory_check(b->m, &step, err) == OK) e = engine_new(b->m, &eo, err);
    if (!e) return err->code;
    for (int i = 0; i < MAX_BATCH; i++) {
        for (int j = 0; j < b->span / 4; j++) prompts[i][j] = pseudo_token(b, 1 + i * 131 + j);
        r[i] = (struct engine_request){.prompt = prompts[i],
                                       .n_prompt = b->span / 4,
                                       .max_tokens = b->span - b->span / 4,
                                       .adapter = b->adapters[i]};
    }
    int rc = engine_run(e, r, MAX_BATCH, NULL, err);
    for (int i = 0; i < MAX_BATCH; i++) engine_request_release(&r[i]);
    if (rc == OK) print_memory(b, (double)engine_bytes(&b->m->config, &eo), adapters);
    engine_free(e);
    return rc;
}

static void train_samples(struct bench *b) {
    int32_t n = (int32_t)b->o->tokens;
    b->samples = xcalloc((size_t)b->o->samples, sizeof *b->samples);
    for (int64_t i = 0; i < b->o->samples; i++) {
        struct train_sample *s = &b->samples[i];
        *s = (struct train_sample){
            .tokens = xmalloc((size_t)n * sizeof *s->tokens), .mask = xmalloc((size_t)n), .n = n};
        memset(s->mask, 1, (size_t)n);
        for (int32_t j = 0; j < n; j++) s->tokens[j] = pseudo_token(b, (int)(1 + i * 131 + j));
    }
}

/* Assigns the samples to the adapters in turn. */
static struct trainer *samples_assign(struct bench *b, const struct variant *v) {
    for (int64_t i = 0; i < b->o->samples; i++)
        b->samples[i].adapter = (int32_t)(i % MAX(1, v->adapters));
    return v->adapters > 1 ? b->multi_trainer : b->single_trainer;
}

static double train_seconds(struct bench *b, const struct variant *v) {
    struct trainer *t = samples_assign(b, v);
    double start = clock_now();
    if (b->rc == OK) b->rc = trainer_accumulate(t, b->samples, (int)b->o->samples, b->err);
    if (b->rc == OK) b->rc = trainer_update(t, 1e-4f, NULL, b->err);
    return clock_now() - start;
}

static double train_forward(struct bench *b, const struct variant *v) {
    struct trainer *t = samples_assign(b, v);
    double nll, start = clock_now();
    int64_t targets;
    if (b->rc == OK)
        b->rc = trainer_eval_loss(t, b->samples, (int)b->o->samples, &nll, &targets, b->err);
    return clock_now() - start;
}

/* Defaults without dropout, then the options of --set. */
static int train_options(const struct bench *b, struct train_options *out, struct error *err) {
    const struct strings *set = &b->o->set;
    struct strings flags = {0}, rest = {0};
    options_default(train_option_rows, out);
    out->lora_dropout = 0;
    free(out->kv_cache_dtype);
    out->kv_cache_dtype = xstrdup(b->o->kv);
    for (int i = 0; i < set->n; i++) {
        char *flag = xasprintf("--%s", set->v[i]);
        strings_add(&flags, flag);
        free(flag);
    }
    int rc = options_parse(train_option_rows, out, flags.n, flags.v, &rest, err);
    strings_release(&flags);
    strings_release(&rest);
    return rc;
}

static int memory_check_trainer(const struct bench *b, const struct adapter_config *ac, int n,
                                const struct train_options *o, struct error *err) {
    const struct memory_step step = {
        .what = "a trainer",
        .least = trainer_least_bytes(&b->m->config, b->m->cls, ac, n, o, b->pool, b->o->tokens)};
    return memory_check(b->m, &step, err);
}

static int trainers_new(struct bench *b, const struct adapter_config *ac, struct error *err) {
    struct train_options o;
    int n = (int)b->o->adapters, rc = train_options(b, &o, err);
    if (rc == OK) rc = memory_check_trainer(b, n ? ac : NULL, n, &o, err);
    for (int i = 0; i < n; i++) b->adapters[i] = adapter_new(&b->m->config, ac, (uint64_t)i);
    if (rc == OK) {
        b->single_trainer = n ? trainer_new_lora(b->m, b->adapters, 1, &o, b->pool, err)
                              : trainer_new_full(b->m, &o, b->pool, err);
        if (b->single_trainer && n > 1)
            b->multi_trainer = trainer_new_lora(b->m, b->adapters, n, &o, b->pool, err);
        if (!b->single_trainer || (n > 1 && !b->multi_trainer)) rc = err->code;
    }
    options_release(train_option_rows, &o);
    return rc;
}

static void print_train_memory(const struct bench *b) {
    double high = (double)process_memory("VmHWM");
    if (b->c->json)
        cli_print_json(json_pack("{s:s,s:s,s:f,s:f}", "what", "train-memory", "shape",
                                 shape_name(b), "weights", weight_bytes(b->m), "VmHWM", high));
    else
        printf("weights %.1f MB; VmHWM %.1f MB\n", 1e-6 * weight_bytes(b->m), 1e-6 * high);
}

/* Measures whole updates, and forward passes with the loss. The ratio of the forward pass is the
 * number of forward passes that an update costs. */
static int bench_train(struct bench *b, const struct adapter_config *ac, struct error *err) {
    int n = (int)b->o->samples, tokens = (int)b->o->tokens, adapters = (int)b->o->adapters;
    double units = (double)n * tokens;
    struct variant v[] = {{"train", n, tokens, MIN(1, adapters), units, train_seconds},
                          {"forward", n, tokens, MIN(1, adapters), units, train_forward},
                          {"train", n, tokens, adapters, units, train_seconds}};
    b->err = err;
    b->rc = trainers_new(b, ac, err);
    if (b->rc == OK) {
        train_samples(b);
        group_run(b, v, b->multi_trainer ? 3 : 2, 0);
        if (b->rc == OK) print_train_memory(b);
        for (int i = 0; i < n; i++) train_sample_release(&b->samples[i]);
        free(b->samples);
    }
    trainer_free(b->multi_trainer);
    trainer_free(b->single_trainer);
    return b->rc;
}

static void print_generations(const struct bench *b, double seconds) {
    double minutes = seconds * 1000 / 60;
    if (b->c->json)
        cli_print_json(json_pack("{s:s,s:f,s:f}", "what", "generations", "seconds", seconds,
                                 "minutes_a_thousand", minutes));
    else
        printf("%.3f s a generation of %" PRId64 " members, %.1f minutes for 1,000\n", seconds,
               b->o->members, minutes);
}

/* Generations of evolution strategies with their update, compared with prefilling the same rows by
 * the base model. */
static int bench_es(struct bench *b, struct error *err) {
    int members = (int)b->o->members;
    double units = (double)members * b->span;
    struct variant v[] = {{"noise", members, b->span, 0, units, noise_seconds},
                          {"es", members, b->span, members, units, es_seconds}};
    struct es_options eo;
    struct train_options o;
    struct train_sample s = {.n = b->span + 1};
    int rc = train_options(b, &o, err);
    options_default(es_option_rows, &eo);
    eo.population = members;
    if (rc == OK) rc = es_options_check(&eo, &o, err);
    b->err = err;
    b->single_trainer = rc == OK ? trainer_new_lora(b->m, b->adapters, 1, &o, b->pool, err) : NULL;
    if (b->single_trainer) {
        s.tokens = xmalloc((size_t)s.n * sizeof *s.tokens);
        s.mask = xcalloc((size_t)s.n, 1);
        for (int32_t j = 0; j < s.n; j++) s.tokens[j] = pseudo_token(b, j);
        memset(s.mask + s.n - s.n / 4, 1, (size_t)s.n / 4);
        b->samples = &s;
        b->es = es_new(b->m, &eo, b->pool);
        double seconds = group_run(b, v, 2, token_ops(&b->m->config));
        if (b->rc == OK) print_generations(b, seconds);
        train_sample_release(&s);
        rc = b->rc;
    } else {
        rc = err->code;
    }
    es_free(b->es);
    trainer_free(b->single_trainer);
    options_release(es_option_rows, &eo);
    options_release(train_option_rows, &o);
    return rc;
}

static struct forward_options speed_options(const struct bench *b, const struct model_config *c) {
    int32_t len = (int32_t)MAX(b->o->tokens, b->span + DECODE_STEPS);
    if (is_selected(b->o, "depth")) len = MAX(len, depth_tokens(b, c) + DECODE_STEPS);
    return (struct forward_options){.max_rows = (int32_t)MAX(b->o->tokens, NOISE_SEQS * b->span),
                                    .n_slots = MAX_BATCH,
                                    .slot_len = MIN(len, c->max_seq_len),
                                    .kv_elem = b->kv,
                                    .pool = b->pool};
}

/* An upper bound of the memory of bench_speed besides the model. */
static size_t speed_bytes(const struct bench *b, const struct model_config *c,
                          const struct adapter_config *ac) {
    const struct engine_options serve = serve_options(b), population = population_options(b);
    const struct forward_options fo = speed_options(b, c);
    size_t adapter = adapter_param_count(c, ac) * (sizeof(float) + dtype_size(b->lora)),
           logits = MAX_BATCH * (size_t)c->vocab_size * sizeof(float), engine = 0;
    if (is_selected(b->o, "serve") || is_selected(b->o, "pool")) engine = engine_bytes(c, &serve);
    if (is_selected(b->o, "population")) engine = MAX(engine, engine_bytes(c, &population));
    return forward_bytes(c, &fo) + logits + engine + CANDIDATES * adapter;
}

static int bench_speed(struct bench *b, const struct adapter_config *ac, struct error *err) {
    const struct forward_options fo = speed_options(b, &b->m->config);
    b->f = forward_new(b->m, &fo);
    if (!b->f) return error_set(err, ERR_MEMORY, "no memory for '%s'", shape_name(b));
    b->logits = xcalloc((size_t)MAX_BATCH * (size_t)b->m->config.vocab_size, sizeof *b->logits);
    for (int i = 0; i < (is_selected(b->o, "population") ? CANDIDATES : MAX_BATCH); i++)
        b->adapters[i] = adapter_new(&b->m->config, ac, (uint64_t)i);
    for (int i = 0; i < MAX_BATCH; i++)
        b->parts[i] =
            (struct lora_part){.pack = adapter_pack(b->adapters[i], b->lora), .weight = 1};
    bench_peak(b, b->m->layers[0].proj[PROJ_Q].type);
    if (is_selected(b->o, "bandwidth")) bench_bandwidth(b);
    if (is_selected(b->o, "prefill")) bench_prefill(b);
    if (is_selected(b->o, "decode")) bench_decode(b);
    if (is_selected(b->o, "depth")) bench_depth(b);
    if (is_selected(b->o, "serve")) bench_serve(b);
    if (is_selected(b->o, "noise")) bench_noise(b);
    if (is_selected(b->o, "population")) bench_population(b);
    int rc = is_selected(b->o, "pool") ? bench_pool(b, err) : OK;
    if (rc == OK && is_selected(b->o, "es")) rc = bench_es(b, err);
    forward_free(b->f);
    free(b->logits);
    return rc;
}

/* Agent-steps per second, including resets of worlds without living agents. Actions come from the
 * policy or, without one, from `drawn`. */
static double world_speed(struct world *w, const struct world_rules *r,
                          const struct world_policy *policy,
                          int16_t (*random_actions)[BENCH_AGENTS]) {
    int64_t steps = 0;
    double start = clock_now();
    world_reset(w, r, BENCH_AGENTS, 1);
    for (int t = 0; t < WORLD_TICKS; t++) {
        if (world_terminated(w)) world_reset(w, r, BENCH_AGENTS, (uint64_t)t);
        if (policy) world_policy_act(policy, w, r, 1, random_actions[t]);
        steps += w->n_living;
        world_step(w, r, random_actions[t]);
    }
    return (double)steps / (clock_now() - start);
}

static void print_world(const struct cli_options *c, const char *rules, const char *actions,
                        double speed) {
    if (c->json)
        cli_print_json(json_pack("{s:s,s:s,s:i,s:s,s:f}", "what", "world", "rules", rules, "agents",
                                 BENCH_AGENTS, "actions", actions, "agent_steps_per_second",
                                 speed));
    else
        printf("world     %d agents  rules %s  actions %-9s  %7.2f million agent-steps/s\n",
               BENCH_AGENTS, current_value("rules", rules), actions, 1e-6 * speed);
}

/* Measures the world alone, on one core: with actions that are sampled in advance, and with actions
 * of the random policy. */
static int bench_world(const struct cli_options *c, const struct options *o, struct error *err) {
    struct world_rules rules;
    double before[MAX_REPS], policy[MAX_REPS];
    int rc = world_rules_load(&rules, o->rules, err);
    if (rc == OK) {
        struct world *w = xmalloc(sizeof *w);
        int16_t(*random_actions)[BENCH_AGENTS] = xmalloc(sizeof *random_actions * WORLD_TICKS);
        struct rng rng = rng_make(1, RNG_TEST, 0, 0);
        for (int t = 0; t < WORLD_TICKS; t++)
            for (int i = 0; i < BENCH_AGENTS; i++)
                random_actions[t][i] = (int16_t)rng_below(&rng, WORLD_N_ACTIONS);
        for (int64_t i = 0; i < o->reps; i++) {
            before[i] = world_speed(w, &rules, NULL, random_actions);
            policy[i] = world_speed(w, &rules, world_policy_find("random"), random_actions);
        }
        print_world(c, o->rules, "drawn", median(before, o->reps));
        print_world(c, o->rules, "policy's", median(policy, o->reps));
        free(random_actions);
        free(w);
    }
    world_rules_release(&rules);
    return rc;
}

/* simulations */

/* All options of a struct simulation_options; malloc'ed. */
static struct option_row *simulation_rows(void) {
    return options_join(
        simulation_option_rows,
        (const struct option_table[]){
            {learner_option_rows, offsetof(struct simulation_options, learn)}, {0}});
}

/* Defaults, those of version 0.1 where they are others now, so that results can be compared, the
 * rank and targets of this command, then the options of --set. */
static int bench_simulation_options(const struct options *o, struct simulation_options *out,
                                    struct error *err) {
    struct strings flags = {0}, rest = {0};
    static const char *const earlier[] = {
        "--num-adapters=0", "--curriculum=0",     "--temperature=2", "--update-interval=10",
        "--batch-size=4",   "--buffer-size=1000", "--horizon=16"};
    char *first[] = {xasprintf("--r=%" PRId64, o->rank), xasprintf("--target=%s", o->targets),
                     xasprintf("--kv-cache-dtype=%s", o->kv)};
    struct option_row *table = simulation_rows();
    options_default(table, out);
    for (size_t i = 0; i < ARRAY_LEN(earlier); i++) strings_add(&flags, earlier[i]);
    for (size_t i = 0; i < ARRAY_LEN(first); i++) strings_add(&flags, first[i]);
    for (int i = 0; i < o->set.n; i++) {
        char *flag = xasprintf("--%s", o->set.v[i]);
        strings_add(&flags, flag);
        free(flag);
    }
    int rc = options_parse(table, out, flags.n, flags.v, &rest, err);
    free(table);
    if (rc == OK) rc = simulation_options_check(out, err);
    for (size_t i = 0; i < ARRAY_LEN(first); i++) free(first[i]);
    strings_release(&flags);
    strings_release(&rest);
    out->limits = o->limits;
    out->steps = o->ticks;
    out->seed = 1;
    return rc;
}

/* Times of the ticks of one generation; ticks with an update are separate. */
struct generation_timing {
    double seconds, tick_seconds,
        update_tick_seconds; /* total; medians of a tick without an update, and with one */
    int64_t decisions;
    int policies;
};

static int bench_generation(struct bench *b, const struct simulation_options *lo,
                            struct grid_env *grids, struct generation_timing *out,
                            struct error *err) {
    struct environment *envs = xcalloc((size_t)lo->n_envs, sizeof *envs), **list;
    double *plain = xcalloc((size_t)lo->steps, sizeof *plain),
           *learned = xcalloc((size_t)lo->steps, sizeof *learned);
    int64_t n_plain = 0, n_learned = 0;
    list = xcalloc((size_t)lo->n_envs, sizeof *list);
    for (int64_t i = 0; i < lo->n_envs; i++) {
        envs[i] = grid_env_as_environment(&grids[i]);
        list[i] = &envs[i];
    }
    struct simulation *l = simulation_new(b->m, lo, list, NULL, 0, b->pool, err);
    int rc = l ? simulation_begin_generation(l, NULL, err) : err->code, n = 1;
    while (rc == OK && n > 0) {
        int64_t updates = simulation_updates(l);
        double start = clock_now();
        n = simulation_step(l, err);
        double seconds = clock_now() - start;
        if (n <= 0) break;
        out->seconds += seconds;
        *(simulation_updates(l) > updates ? &learned[n_learned++] : &plain[n_plain++]) = seconds;
    }
    if (n < 0) rc = n;
    if (rc == OK) {
        out->tick_seconds = n_plain ? median(plain, n_plain) : 0;
        out->update_tick_seconds = n_learned ? median(learned, n_learned) : 0;
        out->decisions = simulation_decisions(l);
        out->policies = simulation_n_policies(l);
        simulation_end_generation(l);
    }
    simulation_free(l);
    free(list);
    free(envs);
    free(plain);
    free(learned);
    return rc;
}

static void print_simulation(const struct bench *b, const struct simulation_options *lo,
                             const struct generation_timing *frozen,
                             const struct generation_timing *v) {
    double high = (double)process_memory("VmHWM"),
           frozen_speed = (double)frozen->decisions / frozen->seconds,
           learning_speed = (double)v->decisions / v->seconds;
    if (b->c->json)
        cli_print_json(json_pack(
            "{s:s,s:s,s:s,s:s,s:i,s:I,s:I,s:s,s:b,s:f,s:f,s:f,s:f,s:f,s:f}", "what", "life",
            "shape", shape_name(b), "quant", tensor_type_name(b->m->type), "rules", b->o->rules,
            "minds", v->policies, "worlds", (json_int_t)lo->n_envs, "rank",
            (json_int_t)lo->learn.train.r, "targets", b->o->targets, "lean", (int)lo->low_memory,
            "decisions_per_second", frozen_speed, "learning_decisions_per_second", learning_speed,
            "tick", frozen->tick_seconds, "tick_between_updates", v->tick_seconds,
            "tick_with_update", v->update_tick_seconds, "VmHWM", high));
    else
        printf(
            "life      %d policies  %" PRId64 " worlds of %d  rules %s  rank %" PRId64 " of %s%s\n"
            "          %.1f decisions/s, learning %.1f; a tick %.1f ms, with an update %.1f ms;"
            " VmHWM %.1f MB\n",
            v->policies, lo->n_envs, BENCH_AGENTS, current_value("rules", b->o->rules),
            lo->learn.train.r, b->o->targets, lo->low_memory ? ", low memory" : "", frozen_speed,
            learning_speed, 1e3 * frozen->tick_seconds, 1e3 * v->update_tick_seconds, 1e-6 * high);
}

/* Measures one generation of policies that do not learn, and one of the same policies that learn.
 * No breeding. */
static int bench_simulation(struct bench *b, struct error *err) {
    struct simulation_options lo, frozen_options;
    struct world_rules rules = {0};
    struct generation_timing frozen = {0}, learning = {0};
    struct grid_env *grids = NULL;
    int rc = bench_simulation_options(b->o, &lo, err);
    if (rc == OK) rc = world_rules_load(&rules, b->o->rules, err);
    if (rc == OK) {
        grids = xcalloc((size_t)lo.n_envs, sizeof *grids);
        for (int64_t i = 0; i < lo.n_envs; i++)
            grids[i] = (struct grid_env){.rules = &rules,
                                         .teacher = world_policy_find(lo.teacher),
                                         .n_agents = BENCH_AGENTS};
        frozen_options = lo;
        frozen_options.learn.learn = "none";
        rc = bench_generation(b, &frozen_options, grids, &frozen, err);
    }
    if (rc == OK) rc = bench_generation(b, &lo, grids, &learning, err);
    if (rc == OK) print_simulation(b, &lo, &frozen, &learning);
    free(grids);
    world_rules_release(&rules);
    struct option_row *table = simulation_rows();
    options_release(table, &lo);
    free(table);
    return rc;
}

static int tokenizer_replace(struct model *m, const char *path, struct error *err) {
    if (!*path) return OK;
    struct tokenizer *t = tokenizer_from_json(path, err);
    if (t && tokenizer_vocab_size(t) > m->config.vocab_size) {
        tokenizer_free(t);
        return error_set(err, ERR_MISMATCH, "'%s' has more pieces than the model has rows", path);
    }
    if (!t) return err->code;
    tokenizer_free(m->tok);
    m->tok = t;
    return OK;
}

/* Refuses --max-num-seqs and --max-model-len if no measurement has an engine, or if the model has a
 * shorter or a measurement needs a longer context. Simulations check the length of their prompts.
 */
static int limits_check(const struct bench *b, const struct model_config *c, struct error *err) {
    static const char *const with_engine[] = {"serve", "pool", "population", "memory", "life"};
    const struct engine_limits *l = &b->o->limits;
    bool any = b->o->world, two = is_selected(b->o, "serve") || is_selected(b->o, "pool"),
         one = is_selected(b->o, "population") || is_selected(b->o, "memory");
    for (size_t i = 0; i < ARRAY_LEN(with_engine); i++) any |= is_selected(b->o, with_engine[i]);
    if (!any && (l->max_seqs || l->max_len))
        return error_set(
            err, ERR_USAGE,
            "--max-num-seqs and --max-model-len apply to the measurements serve, pool, "
            "population, memory and life");
    if (engine_limits_check(l, c->max_seq_len, err) != OK) return err->code;
    bool simulates = b->o->world || is_selected(b->o, "life");
    int32_t need = simulates ? 0 : two ? 2 * b->span : one ? b->span : 0;
    return engine_limits_require(l, need, "this measurement", err);
}

/* Refuses too little memory before the weights are loaded or made. Sets b->span. */
static int memory_check_begin(struct bench *b, const struct model_config *c, size_t weights,
                              const struct adapter_config *ac, struct error *err) {
    bool alone = b->o->world || is_selected(b->o, "life") || is_selected(b->o, "memory") ||
                 is_selected(b->o, "train"); // these check their memory when the model is loaded
    b->span = MIN(SPAN_MAX, c->max_seq_len / 2);
    const struct memory_step step = {.what = "this measurement with its model",
                                     .least = weights + (alone ? 0 : speed_bytes(b, c, ac))};
    return limits_check(b, c, err) == OK ? memory_check(NULL, &step, err) : err->code;
}

/* The model, or a random one of the given shape and weight type. */
static struct model *bench_model(struct bench *b, const struct adapter_config *ac,
                                 struct error *err) {
    const struct options *o = b->o;
    enum numeric_class cls = cli_numeric_class(b->c);
    struct model_config config;
    enum tensor_type type;
    if (*o->model) {
        struct model_size size;
        struct model *m = NULL;
        char *path = cli_find_file(o->model);
        if (model_measure(path, cls, &size, err) == OK &&
            memory_check_begin(b, &size.config, model_loading_bytes(&size), ac, err) == OK)
            m = model_open(path, cls, err);
        free(path);
        return m;
    }
    if (model_preset_find(o->shape, &config, err) != OK) return NULL;
    if (tensor_type_parse(o->quant, &type) != OK) {
        error_set(err, ERR_USAGE, "no weight type '%s'; there are %s", o->quant,
                  tensor_type_list());
        return NULL;
    }
    size_t weights = (size_t)model_param_count(&config) / 256 * tensor_row_bytes(type, 256);
    if (memory_check_begin(b, &config, weights, ac, err) != OK) return NULL;
    return model_new_quantized(&config, 1, type, cls);
}

static int history_open(struct bench *b, struct error *err) {
    if (!*b->o->history) return OK;
    b->history = fopen(b->o->history, "a");
    if (!b->history) return error_errno(err, "cannot append to '%s'", b->o->history);
    if (ftell(b->history) == 0)
        fputs("time,version,level,class,threads,shape,quant,lora,what,batch,tokens,adapters,tps,"
              "ratio\n",
              b->history);
    return OK;
}

/* Refuses a context that is too short and an invalid adapter configuration. */
static int bench_check(const struct bench *b, const struct adapter_config *ac, struct error *err) {
    int32_t len = b->m->config.max_seq_len;
    if (b->span < DECODE_STEPS)
        return error_set(err, ERR_USAGE, "a context of %d tokens is too short (at least %d)",
                         (int)len, 2 * DECODE_STEPS);
    return adapter_config_check(&b->m->config, ac, err);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    struct bench b = {.c = c, .o = options};
    struct adapter_config ac = {.r = (int32_t)b.o->rank, .alpha = 2 * (float)b.o->rank};
    (void)args;
    if (b.o->world || is_selected(b.o, "world")) {
        int done = bench_world(c, b.o, err);
        if (done != OK || (!b.o->world && !is_selected(b.o, "life"))) return done;
    }
    if (dtype_parse(b.o->lora, &b.lora, err) != OK ||
        kv_cache_dtype_parse(b.o->kv, cli_numeric_class(c), &b.kv, err) != OK ||
        adapter_targets_parse(b.o->targets, ac.target, err) != OK ||
        memory_limit_parse(NULL, err) != OK || history_open(&b, err) != OK)
        return err->code;
    bool simulates = b.o->world || is_selected(b.o, "life");
    if (simulates || is_selected(b.o, "memory"))
        mallopt(M_MMAP_THRESHOLD, 1 << 16); // large freed blocks return to the system
    b.pool = pool_new((int)c->threads);
    b.m = bench_model(&b, &ac, err);
    int rc = b.m ? adapter_layers_parse(b.o->layers, &b.m->config, &ac, err) : err->code;
    if (rc == OK) rc = bench_check(&b, &ac, err);
    if (rc == OK) rc = tokenizer_replace(b.m, b.o->tokenizer, err);
    if (rc == OK && simulates)
        rc = bench_simulation(&b, err);
    else if (rc == OK && is_selected(b.o, "memory"))
        rc = bench_memory(&b, &ac, err);
    else if (rc == OK && is_selected(b.o, "train"))
        rc = bench_train(&b, &ac, err);
    else if (rc == OK)
        rc = bench_speed(&b, &ac, err);
    for (int i = 0; i < CANDIDATES; i++) adapter_release(b.adapters[i]);
    adapter_config_release(&ac);
    if (b.history && fclose(b.history) != 0)
        rc = error_errno(err, "cannot write '%s'", b.o->history);
    model_close(b.m);
    pool_free(b.pool);
    return rc;
}

const struct cli_command cmd_bench = {
    .name = "bench",
    .args = "",
    .summary = "measure speed and memory, with and without adapters",
    .about =
        "Measures speed in tokens per second, on random weights of a known shape or on a model.\n"
        "--what selects the measurements:\n"
        "\n"
        "  peak, bandwidth     matrix products in cache; reading a buffer as large as the weights\n"
        "  prefill, decode     a prompt; 1, 4 and 20 sequences; without, with one and with many "
        "adapters\n"
        "  depth               one sequence after --depth tokens, without and with an adapter\n"
        "  serve               4 and 20 requests at once, 64 tokens in and 64 out; 0, 1 and many "
        "adapters\n"
        "  pool                serve with adapters from a pool of 20 and of many; pool-cold reads "
        "each file\n"
        "  noise, es           prompts under random rank-1 perturbations; generations of --method "
        "es\n"
        "  population          4 questions of 32 tokens for each of 64 adapters in one batch\n"
        "  memory              (alone) 20 agents in as little memory as possible\n"
        "  train               (alone) an update of one adapter, of several, and the forward pass "
        "alone\n"
        "  world               (alone, or with life) agent-steps per second of the world without a "
        "model\n"
        "  life                agents whose policies are adapters, frozen and then learning\n"
        "\n"
        "If the context is shorter than 128 tokens, half of it replaces the 64 tokens. The\n"
        "adapters have a random A and a zero B, and cost as much as trained ones.\n"
        "\n"
        "  shoal bench --shape smollm-135m --type q8_0 --json\n"
        "  shoal bench --what memory --type nf4 --kv-cache-dtype i8 --target q_proj,v_proj\n"
        "  shoal bench --world --model models/fry --set num-envs=64 num-adapters=256\n"
        "  shoal bench --what train --shape smollm-135m --type bf16 --samples 4 --tokens 512",
    .main_options = "model shape type what world rules history",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run,
};
