/*
 * test_engine: a request's result depends on its own inputs only. Random requests run alone and
 * together, in other orders, submitted while others run, with few and many rows, slots and threads,
 * and the results must have the same bits. Choices are compared with a forward pass over each full
 * sequence, the sampler with a naive implementation and with exact probabilities, and the
 * instruction-set levels with each other.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

// last: it needs four of the above
#include <cmocka.h>

enum { N_REQUESTS = 36, N_ADAPTERS = 5, LEN = 64, VOCAB = 300 };

/* A request with the memory that it borrows. */
struct random_request {
    struct engine_request r;
    int32_t prompt[LEN], stop[8], suffix[4], words[8][6];
    struct token_seq choices[8];
    struct weighted_adapter mix[3];
    struct logit_bias bias[4];
};

static int32_t random_below(struct rng *rng, uint32_t n) {
    return (int32_t)rng_below(rng, n);
}

static void random_prompt(struct random_request *d, struct rng *rng) {
    d->r.n_prompt = 1 + random_below(rng, rng_below(rng, 2) ? 34 : 6);
    int32_t common = random_below(rng, 4) ? 0 : random_below(rng, 30); // a quarter begin alike
    for (int32_t i = 0; i < d->r.n_prompt; i++) {
        int32_t token = random_below(rng, VOCAB);
        d->prompt[i] = i < common ? (7 * i + 3) % VOCAB : token;
    }
    d->r.prompt = d->prompt;
}

/* Grammars of random requests; compiled once, freed at the end of the program. */
static struct grammar *grammars[4];

static void grammars_compile(void) {
    struct error err;
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"x\":{\"type\":\"integer\"},"
        "\"名\":{\"enum\":[\"猫\",\"犬\"]}},\"required\":[\"x\",\"名\"]}";
    grammars[0] = grammar_new_regex("(yes|no|perhaps not){1,3}", 25, &err);
    grammars[1] = grammar_new_regex("[0-9]{2,5}(\\.[0-9]+)?", 22, &err);
    grammars[2] = grammar_new_json_schema(schema, sizeof schema - 1, true, &err);
    grammars[3] = grammar_new_regex("", 0, &err);
    for (int i = 0; i < 4; i++)
        if (!grammars[i]) fail_msg("grammar %d: %s", i, err.text);
}

static void random_sampling(struct random_request *d, struct rng *rng) {
    static const float temperatures[] = {0, 0, 0.3f, 1, 2.5f}, ps[] = {1, 1, 0.9f, 0.4f};
    d->r.sampling = (struct sampling_params){.temperature = temperatures[rng_below(rng, 5)],
                                             .top_p = ps[rng_below(rng, 4)],
                                             .top_k = random_below(rng, 2) * random_below(rng, 40),
                                             .min_p = rng_below(rng, 3) ? 0 : 0.05f,
                                             .seed = rng_u64(rng)};
    d->r.max_tokens = random_below(rng, 13);
    d->r.n_stop = random_below(rng, 2) * random_below(rng, 9);
    for (int32_t i = 0; i < d->r.n_stop; i++) d->stop[i] = random_below(rng, VOCAB);
    d->r.stop = d->stop;
    if (!grammars[0]) grammars_compile();
    if (rng_below(rng, 4) == 0) d->r.grammar = grammars[rng_below(rng, 4)];
    if (rng_below(rng, 3) > 0) return;
    d->r.sampling.typical_p = rng_below(rng, 2) ? 0 : 0.3f;
    d->r.sampling.repetition_penalty = rng_below(rng, 2) ? 0 : 1.3f;
    d->r.sampling.presence_penalty = rng_below(rng, 2) ? 0 : 0.5f;
    d->r.sampling.frequency_penalty = rng_below(rng, 2) ? 0 : 0.2f;
    d->r.sampling.n_bias = random_below(rng, 5);
    for (int32_t i = 0; i < d->r.sampling.n_bias; i++)
        d->bias[i] = (struct logit_bias){random_below(rng, VOCAB), rng_normal(rng)};
    d->r.sampling.bias = d->bias;
    d->r.n_top = random_below(rng, 4);
    d->r.prompt_logprobs = rng_below(rng, 2);
    d->r.loop_tokens = random_below(rng, 2) * 4;
    d->r.logprob_temperature = rng_below(rng, 3) ? 0 : 1.7f;
}

/* No adapter, one adapter, or a mix of adapters and noise. */
static void random_adapters(struct random_request *d, struct adapter *const *adapters,
                            struct rng *rng) {
    int32_t a = random_below(rng, N_ADAPTERS + 3);
    if (a < N_ADAPTERS) d->r.adapter = adapters[a];
    if (a <= N_ADAPTERS) return;
    d->r.n_mix = 1 + random_below(rng, 3);
    for (int32_t i = 0; i < d->r.n_mix; i++)
        d->mix[i] = (struct weighted_adapter){
            .adapter = i == 1 ? NULL : adapters[random_below(rng, N_ADAPTERS)],
            .noise = {7, (uint32_t)random_below(rng, 2)},
            .weight = i == 1 ? 0.01f : 0.5f + (float)random_below(rng, 2)};
    d->r.mix = d->mix;
}

/* Choices of few different tokens, so that they share prefixes, contain each other and repeat. */
static void random_choices(struct random_request *d, struct rng *rng) {
    d->r.n_choices = random_below(rng, 2) * random_below(rng, 9);
    d->r.suffix = (struct token_seq){d->suffix, d->r.n_choices ? random_below(rng, 5) : 0};
    for (int32_t i = 0; i < d->r.suffix.n; i++) d->suffix[i] = random_below(rng, VOCAB);
    for (int32_t i = 0; i < d->r.n_choices; i++) {
        d->choices[i] = (struct token_seq){d->words[i], 1 + random_below(rng, 6)};
        for (int32_t j = 0; j < d->choices[i].n; j++) d->words[i][j] = 40 + random_below(rng, 3);
    }
    d->r.choices = d->choices;
}

/* A third of the requests without choices shift their context. */
static void random_context(struct random_request *d, struct rng *rng) {
    if (d->r.n_choices || rng_below(rng, 3)) return;
    d->r.context_len = d->r.n_prompt + 2 + random_below(rng, 6);
    d->r.n_keep = random_below(rng, (uint32_t)d->r.n_prompt + 1);
}

static void random_requests(struct random_request *d, int n, struct adapter *const *adapters,
                            uint32_t id) {
    struct rng rng = rng_make(23, RNG_TEST, id, 0);
    for (int i = 0; i < n; i++) {
        d[i] = (struct random_request){0};
        random_prompt(&d[i], &rng);
        random_sampling(&d[i], &rng);
        random_choices(&d[i], &rng);
        random_adapters(&d[i], adapters, &rng);
        struct rng contexts = rng_make(24, RNG_TEST, id, (uint32_t)i);
        random_context(&d[i], &contexts);
    }
}

/* Options of the engines that engine_make creates. */
static struct {
    enum dtype kv, lora;
    int32_t n_pages;
} engine_settings;

static struct engine *engine_make(const struct model *m, int max_rows, int max_seqs,
                                  struct pool *pool) {
    struct error err;
    struct engine_options o = {.max_rows = max_rows,
                               .max_seqs = max_seqs,
                               .n_pages = engine_settings.n_pages,
                               .kv_elem = engine_settings.kv,
                               .lora_elem = engine_settings.lora,
                               .pool = pool};
    struct engine *e = engine_new(m, &o, &err);
    if (!e) fail_msg("%s", err.text);
    return e;
}

/* Runs the engine until no request is left. */
static void engine_drain(struct engine *e) {
    while (engine_step(e) > 0) {}
}

static void run_one(struct engine *e, struct engine_request *r) {
    struct error err;
    if (engine_run(e, r, 1, NULL, &err) != OK) fail_msg("%s", err.text);
    assert_true(r->done && r->finish != FINISH_NONE);
}

static void assert_same_result(const struct engine_request *a, const struct engine_request *b) {
    size_t n = (size_t)a->n_out, c = (size_t)a->n_choices;
    assert_true(a->done && b->done);
    assert_int_equal(a->n_out, b->n_out);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->choice, b->choice);
    assert_int_equal(a->n_generated, b->n_generated);
    assert_int_equal(a->n_prefilled, b->n_prefilled);
    assert_int_equal(a->n_dropped, b->n_dropped);
    if (n) assert_memory_equal(a->out, b->out, n * sizeof *a->out);
    if (n) assert_memory_equal(a->out_logprob, b->out_logprob, n * sizeof(float));
    if (a->n_top) {
        size_t t = (size_t)a->n_top;
        if (n) assert_memory_equal(a->top_ids, b->top_ids, n * t * sizeof(int32_t));
        if (n) assert_memory_equal(a->top_logprob, b->top_logprob, n * t * sizeof(float));
    }
    if (a->prompt_logprobs) {
        size_t p = (size_t)a->n_prompt, t = p * (size_t)a->n_top;
        assert_memory_equal(a->prompt_logprob, b->prompt_logprob, p * sizeof(float));
        if (t) assert_memory_equal(a->prompt_top_ids, b->prompt_top_ids, t * sizeof(int32_t));
        if (t) assert_memory_equal(a->prompt_top_logprob, b->prompt_top_logprob, t * sizeof(float));
    }
    if (c) assert_memory_equal(a->choice_logprob, b->choice_logprob, c * sizeof(float));
    if (c) assert_memory_equal(a->choice_prob, b->choice_prob, c * sizeof(float));
}

struct engine_fixture {
    struct model *m;
    struct adapter *a[N_ADAPTERS];
    struct random_request d[N_REQUESTS];
};

static enum numeric_class tested_class = NUMERIC_EXACT; /* of the models of the next worlds */

static void fixture_open(struct engine_fixture *w, const char *shape, enum tensor_type type,
                         uint32_t id) {
    w->m = fixture_model(shape, false, type, tested_class);
    for (int i = 0; i < N_ADAPTERS; i++)
        w->a[i] = fixture_adapter(&w->m->config, 1 + 5 * i, i % 2 ? "all-linear" : "q_proj,up_proj",
                                  0.2f, (uint64_t)i);
    random_requests(w->d, N_REQUESTS, w->a, id);
}

static void fixture_close(struct engine_fixture *w) {
    for (int i = 0; i < N_REQUESTS; i++) engine_request_release(&w->d[i].r);
    for (int i = 0; i < N_ADAPTERS; i++) adapter_release(w->a[i]);
    model_close(w->m);
}

/* A copy of the request without its results. */
static struct engine_request request_copy_inputs(const struct engine_request *from) {
    struct engine_request r = *from;
    r.state = NULL;
    r.out = r.top_ids = r.prompt_top_ids = NULL;
    r.out_logprob = r.choice_logprob = r.choice_prob = NULL;
    r.top_logprob = r.prompt_logprob = r.prompt_top_logprob = NULL;
    r.n_out = r.n_generated = 0;
    r.done = false;
    return r;
}

/* Submits all requests in a random order, `burst` at a time between steps, and compares the results
 * with those of single runs. */
static void run_together(const struct engine_fixture *w, int max_rows, int max_seqs, int threads,
                         int burst, uint32_t id) {
    uint32_t order[N_REQUESTS];
    struct error err;
    struct engine_request got[N_REQUESTS];
    struct rng rng = rng_make(31, RNG_TEST, id, 0);
    struct pool *pool = pool_new(threads);
    struct engine *e = engine_make(w->m, max_rows, max_seqs, pool);
    for (uint32_t i = 0; i < N_REQUESTS; i++) order[i] = i;
    if (id > 0) rng_shuffle(&rng, order, N_REQUESTS);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine_request *r = &got[order[i]];
        *r = request_copy_inputs(&w->d[order[i]].r);
        if (engine_submit(e, r, &err) != OK) fail_msg("%s", err.text);
        if (i % burst == burst - 1) engine_step(e);
    }
    do engine_set_prompt_rows(e, 1 + random_below(&rng, (uint32_t)max_rows));
    while (engine_step(e) > 0);
    for (int i = 0; i < N_REQUESTS; i++) {
        assert_same_result(&w->d[i].r, &got[i]);
        engine_request_release(&got[i]);
    }
    assert_int_equal(engine_stats(e).finished, N_REQUESTS);
    engine_free(e);
    pool_free(pool);
}

/* A cancelled request keeps its partial result; the others' results do not change. */
static void cancel_does_not_change_others(void **state) {
    (void)state;
    struct engine_fixture w;
    struct error err;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 61);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine *e = engine_make(w.m, 256, 1, NULL);
        run_one(e, &w.d[i].r);
        engine_free(e);
    }
    for (uint32_t round = 0; round < 8; round++) {
        struct rng rng = rng_make(62, RNG_TEST, round, 0);
        struct engine *e = engine_make(w.m, round % 2 ? 7 : 64, round % 3 ? 5 : 64, NULL);
        struct engine_request got[N_REQUESTS];
        bool cancelled[N_REQUESTS] = {0};
        int left = 1, n_cancelled = 0;
        for (int i = 0; i < N_REQUESTS; i++) {
            got[i] = request_copy_inputs(&w.d[i].r);
            if (engine_submit(e, &got[i], &err) != OK) fail_msg("%s", err.text);
        }
        for (int step = 0; left > 0; step++) {
            int i = random_below(&rng, N_REQUESTS);
            if (!got[i].done && random_below(&rng, 2)) {
                engine_cancel(e, &got[i]);
                assert_true(got[i].done && got[i].finish == FINISH_NONE);
                cancelled[i] = true;
                n_cancelled++;
            }
            left = engine_step(e);
        }
        assert_true(n_cancelled > 2);
        assert_int_equal(engine_stats(e).finished, N_REQUESTS);
        for (int i = 0; i < N_REQUESTS; i++) {
            const struct engine_request *alone = &w.d[i].r;
            if (!cancelled[i]) assert_same_result(alone, &got[i]);
            assert_true(got[i].n_out <= alone->n_out && got[i].n_cached < alone->n_prompt);
            if (got[i].n_out)
                assert_memory_equal(alone->out, got[i].out,
                                    (size_t)got[i].n_out * sizeof *alone->out);
            engine_request_release(&got[i]);
        }
        engine_free(e);
    }
    fixture_close(&w);
}

static void results_invariant(const char *shape, enum tensor_type type, uint32_t id) {
    struct engine_fixture w;
    fixture_open(&w, shape, type, id);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine *e = engine_make(w.m, 256, 1, NULL);
        run_one(e, &w.d[i].r);
        engine_free(e);
    }
    run_together(&w, 256, 64, 1, N_REQUESTS, 0);
    engine_settings.n_pages =
        9; // far fewer than the sequences could use: requests wait until others finish
    run_together(&w, 7, 64, 2, N_REQUESTS, 1);
    engine_settings.n_pages = 2; // one request at a time
    run_together(&w, 64, 5, 3, N_REQUESTS, 2);
    engine_settings.n_pages = 0;
    run_together(&w, 64, 64, 2, 3, 3);
    run_together(&w, 7, 2, 1, 1, 4);
    run_together(&w, 1, 3, 3, 2, 5);
    fixture_close(&w);
}

static void results_invariant_f32(void **state) {
    (void)state;
    results_invariant("tiny-llama", TENSOR_F32, 1);
    results_invariant("tiny-qwen3", TENSOR_F32, 2);
}

static void results_invariant_q8(void **state) {
    (void)state;
    results_invariant("tiny-llama", TENSOR_Q8_0, 3);
    results_invariant("tiny-qwen3", TENSOR_Q4_0, 4);
}

/* In the fast class known rows and sampled rows are computed by different code. */
static void results_invariant_fast(void **state) {
    (void)state;
    tested_class = NUMERIC_FAST;
    results_invariant("tiny-llama", TENSOR_Q8_0, 3);
    results_invariant("tiny-qwen3", TENSOR_BF16, 4);
    engine_settings.kv = DTYPE_BF16, engine_settings.lora = DTYPE_I8;
    results_invariant("tiny-qwen3", TENSOR_Q4_0, 7);
    engine_settings.kv = DTYPE_F32, engine_settings.lora = DTYPE_F32;
    tested_class = NUMERIC_EXACT;
}

/* The same with smaller element types for the KV cache and the adapters. */
static void results_invariant_small(void **state) {
    (void)state;
    engine_settings.kv = DTYPE_I8, engine_settings.lora = DTYPE_I8;
    results_invariant("tiny-llama", TENSOR_Q8_0, 5);
    engine_settings.kv = DTYPE_F16, engine_settings.lora = DTYPE_BF16;
    results_invariant("tiny-qwen3", TENSOR_F32, 6);
    engine_settings.kv = DTYPE_F32, engine_settings.lora = DTYPE_F32;
}

/* Hash over all results of a fixture, in the exact class. */
static void results_hash(enum tensor_type type, char out[HASH_LEN]) {
    struct engine_fixture w;
    struct sha256 h;
    fixture_open(&w, "tiny-llama", type, 9);
    struct engine *e = engine_make(w.m, 64, 16, NULL);
    sha256_init(&h);
    for (int i = 0; i < N_REQUESTS; i++) {
        const struct engine_request *r = &w.d[i].r;
        run_one(e, &w.d[i].r);
        sha256_update(&h, r->out, (size_t)r->n_out * sizeof *r->out);
        sha256_update(&h, r->out_logprob, (size_t)r->n_out * sizeof(float));
        sha256_update(&h, r->choice_logprob, (size_t)r->n_choices * sizeof(float));
        sha256_update(&h, r->choice_prob, (size_t)r->n_choices * sizeof(float));
    }
    sha256_final(&h, out);
    engine_free(e);
    fixture_close(&w);
}

static int hashes_print(void) {
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_BF16};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        char hash[HASH_LEN];
        engine_settings.kv = engine_settings.lora = (enum dtype)i;
        results_hash(types[i], hash);
        printf("%s %s\n", tensor_type_name(types[i]), hash);
    }
    return 0;
}

/* Runs this program at another instruction-set level. */
static void hashes_at_level(const char *level, char *out, size_t size) {
    char self[1024] = {0};
    assert_true(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    char *command = xasprintf("SHOAL_CPU=%s '%s' hashes", level, self);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    out[fread(out, 1, size - 1, f)] = 0;
    assert_int_equal(pclose(f), 0);
    assert_true(strlen(out) > 4 * (HASH_LEN - 1));
    free(command);
}

static void levels_agree(void **state) {
    (void)state;
    char want[1024], got[1024];
    hashes_at_level("scalar", want, sizeof want);
    for (int level = CPU_AVX2; level <= (int)kernels_get()->level; level++) {
        if (!cpu_has_level((enum cpu_level)level)) continue;
        hashes_at_level(cpu_level_name((enum cpu_level)level), got, sizeof got);
        assert_string_equal(got, want);
    }
}

/* Log-probability of `tail` after `head` by one forward pass over both. */
static double sequence_logprob(const struct model *m, const struct engine_request *r,
                               const int32_t *head, int32_t n_head, const struct token_seq *tail) {
    struct forward_options o = {.max_rows = LEN, .n_slots = 1, .slot_len = LEN};
    struct forward *f = forward_new(m, &o);
    struct batch_row rows[LEN];
    int32_t out[LEN], n = n_head + tail->n;
    float *logits = xcalloc(LEN * VOCAB, sizeof *logits);
    for (int32_t i = 0; i < n; i++) {
        rows[i] = (struct batch_row){.token = i < n_head ? head[i] : tail->v[i - n_head], .pos = i};
        out[i] = i;
    }
    struct lora_part parts[4];
    struct lora_segment seg = adapter_lora_segment(r->adapter, 0, n, &parts[0]);
    for (int32_t i = 0; i < r->n_mix; i++) {
        adapter_lora_segment(r->mix[i].adapter, 0, n, &parts[i]);
        parts[i].noise = r->mix[i].noise;
        parts[i].weight = r->mix[i].weight;
    }
    seg.n_parts = r->adapter ? 1 : r->n_mix;
    forward_run(f, rows, n, &seg, 1, out, n, logits);
    double sum = 0;
    for (int32_t i = 0; i < tail->n; i++) {
        const float *x = logits + (n_head + i - 1) * VOCAB;
        double z = 0, t = r->logprob_temperature > 0 ? (double)r->logprob_temperature : 1;
        for (int32_t j = 0; j < VOCAB; j++) z += exp((double)x[j] / t);
        sum += (double)x[tail->v[i]] / t - log(z);
    }
    forward_free(f);
    free(logits);
    return sum;
}

static void choices_check(const struct model *m, const struct engine_request *r) {
    int32_t head[LEN], n = 0;
    double probs = 0, norm = 0, want[8];
    for (int32_t i = 0; i < r->n_prompt; i++) head[n++] = r->prompt[i];
    for (int32_t i = 0; i < r->n_out; i++) head[n++] = r->out[i];
    for (int32_t i = 0; i < r->suffix.n; i++) head[n++] = r->suffix.v[i];
    for (int32_t i = 0; i < r->n_choices; i++) {
        want[i] = sequence_logprob(m, r, head, n, &r->choices[i]);
        norm += exp(want[i]);
    }
    for (int32_t i = 0; i < r->n_choices; i++) {
        assert_true(fabs((double)r->choice_logprob[i] - want[i]) < 1e-4);
        assert_true(fabs((double)r->choice_prob[i] - exp(want[i]) / norm) < 1e-4);
        assert_true(r->choice_logprob[i] < r->choice_logprob[r->choice] || i >= r->choice);
        assert_true(r->choice_logprob[i] <= r->choice_logprob[r->choice]);
        probs += (double)r->choice_prob[i];
    }
    assert_true(fabs(probs - 1) < 1e-5);
    assert_int_equal(r->finish, FINISH_CHOICE);
}

static void choices_are_exact(void **state) {
    (void)state;
    struct engine_fixture w;
    int checked = 0;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 5);
    struct engine *e = engine_make(w.m, 32, 8, NULL);
    for (int i = 0; i < N_REQUESTS; i++) {
        run_one(e, &w.d[i].r);
        if (w.d[i].r.n_choices == 0) continue;
        choices_check(w.m, &w.d[i].r);
        checked++;
    }
    assert_true(checked >= 8);
    engine_free(e);
    fixture_close(&w);
}

/* The log-probability of a choice does not depend on the other choices: as the only choice it has
 * the same bits. */
static void single_choice_has_equal_bits(void **state) {
    (void)state;
    struct engine_fixture w;
    fixture_open(&w, "tiny-qwen3", TENSOR_F32, 6);
    struct engine *e = engine_make(w.m, 32, 8, NULL);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine_request *r = &w.d[i].r;
        run_one(e, r);
        for (int32_t c = 0; c < r->n_choices; c++) {
            struct engine_request one = {.prompt = r->prompt,
                                         .n_prompt = r->n_prompt,
                                         .adapter = r->adapter,
                                         .mix = r->mix,
                                         .n_mix = r->n_mix,
                                         .loop_tokens = r->loop_tokens,
                                         .grammar = r->grammar,
                                         .sampling = r->sampling,
                                         .logprob_temperature = r->logprob_temperature,
                                         .max_tokens = r->max_tokens,
                                         .stop = r->stop,
                                         .n_stop = r->n_stop,
                                         .suffix = r->suffix,
                                         .choices = &r->choices[c],
                                         .n_choices = 1};
            run_one(e, &one);
            assert_true(one.choice_logprob[0] == r->choice_logprob[c] &&
                        one.choice_prob[0] == 1.0f);
            engine_request_release(&one);
        }
    }
    engine_free(e);
    fixture_close(&w);
}

/* With choices_only the log-probabilities are the exact ones minus the log of the sum of their
 * probabilities: after a prompt, a suffix or generated tokens, alone and with other requests. */
static void choices_only_normalises_the_choices(void **state) {
    (void)state;
    enum { N = 4, CHOICES = 5 };
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 4, NULL);
    static const int32_t prompt[] = {5, 6, 7, 8}, suffix[] = {90}, ids[] = {100, 3, 250, 3, 77};
    struct token_seq choices[CHOICES];
    struct engine_request exact[N], only[N];
    struct error err;
    for (int c = 0; c < CHOICES; c++) choices[c] = (struct token_seq){&ids[c], 1};
    for (int i = 0; i < N; i++) {
        exact[i] = (struct engine_request){.prompt = prompt,
                                           .n_prompt = 2 + i,
                                           .max_tokens = i == 3 ? 4 : 0,
                                           .suffix = {suffix, i == 2},
                                           .logprob_temperature = i == 1 ? 2.5f : 0,
                                           .choices = choices,
                                           .n_choices = CHOICES};
        if (i == 3) exact[i].n_prompt = 1;
        only[i] = exact[i];
        only[i].choices_only = true;
        run_one(e, &exact[i]);
    }
    assert_int_equal(engine_run(e, only, N, NULL, &err), OK);
    for (int i = 0; i < N; i++) {
        struct engine_request alone = only[i];
        double sum = 0;
        alone.out = NULL, alone.out_logprob = alone.choice_logprob = alone.choice_prob = NULL;
        run_one(e, &alone);
        for (int c = 0; c < CHOICES; c++) sum += exp((double)exact[i].choice_logprob[c]);
        for (int c = 0; c < CHOICES; c++) {
            double want = (double)exact[i].choice_logprob[c] - log(sum);
            assert_true(fabs((double)only[i].choice_logprob[c] - want) < 1e-5);
            assert_true(fabs((double)only[i].choice_prob[c] - exp(want)) < 1e-6);
        }
        assert_int_equal(only[i].choice, exact[i].choice);
        assert_memory_equal(alone.choice_logprob, only[i].choice_logprob, CHOICES * sizeof(float));
        assert_true(i == 3 || sum < 0.9); // else the vocabulary would not differ from the choices
        engine_request_release(&alone);
        engine_request_release(&exact[i]);
        engine_request_release(&only[i]);
    }
    engine_free(e);
    model_close(m);
}

/* Choices after a generation that ended by a stop token or by its limit, with and without suffix,
 * are compared with choices after a prompt that contains the generated text. */
static void choices_follow_generation(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 4, NULL);
    static const int32_t prompt[] = {5, 6, 7}, suffix[] = {90, 91}, yes[] = {100},
                         no[] = {101, 102};
    const struct token_seq choices[] = {{yes, 1}, {no, 2}};
    struct engine_request plain = {.prompt = prompt, .n_prompt = 3, .max_tokens = 6};
    run_one(e, &plain);
    assert_int_equal(plain.finish, FINISH_LENGTH);
    for (int stopped = 0; stopped < 2; stopped++)
        for (int32_t n_suffix = 0; n_suffix <= 2; n_suffix += 2) {
            struct engine_request r = {.prompt = prompt,
                                       .n_prompt = 3,
                                       .max_tokens = 6,
                                       .stop = plain.out + 5,
                                       .n_stop = stopped,
                                       .suffix = {suffix, n_suffix},
                                       .choices = choices,
                                       .n_choices = 2};
            run_one(e, &r);
            int32_t spelled[16], n = 0;
            for (int i = 0; i < 3; i++) spelled[n++] = prompt[i];
            for (int i = 0; i < r.n_out; i++) spelled[n++] = r.out[i];
            for (int i = 0; i < n_suffix; i++) spelled[n++] = suffix[i];
            struct engine_request s = {
                .prompt = spelled, .n_prompt = n, .choices = choices, .n_choices = 2};
            run_one(e, &s);
            assert_memory_equal(r.choice_logprob, s.choice_logprob, 2 * sizeof(float));
            assert_true(stopped ? r.n_out < 6 && r.n_generated == r.n_out + 1
                                : r.n_out == 6 && r.n_generated == 6);
            assert_int_equal(r.n_prefilled, 3 + n_suffix + 1); // one choice prefix: 101
            engine_request_release(&r);
            engine_request_release(&s);
        }
    engine_request_release(&plain);
    engine_free(e);
    model_close(m);
}

static void stops_and_limits(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 4, NULL);
    static const int32_t prompt[] = {9, 8, 7, 6};
    struct engine_request all = {
        .prompt = prompt, .n_prompt = 4, .max_tokens = LEN - 4, .sampling = {2, 0, 1, 0, 77}};
    run_one(e, &all); // to the last position
    assert_int_equal(all.n_out, LEN - 4);
    assert_int_equal(all.finish, FINISH_LENGTH);
    for (int32_t i = 0; i < all.n_out; i++) assert_true(all.out_logprob[i] < 0);
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 4,
                               .max_tokens = LEN - 4,
                               .sampling = {2, 0, 1, 0, 77},
                               .stop = all.out + 9,
                               .n_stop = 2};
    run_one(e, &r);
    assert_int_equal(r.finish, FINISH_STOP);
    assert_true(r.n_out <= 9 && r.n_generated == r.n_out + 1);
    assert_memory_equal(r.out, all.out, (size_t)r.n_out * sizeof *r.out);
    assert_true(all.out[r.n_out] == r.stop[0] || all.out[r.n_out] == r.stop[1]);
    struct engine_request none = {.prompt = prompt, .n_prompt = 4};
    run_one(e, &none); // reads, generates nothing
    assert_true(none.n_out == 0 && none.n_prefilled == 4 && none.finish == FINISH_LENGTH);
    engine_request_release(&all);
    engine_request_release(&r);
    engine_request_release(&none);
    engine_free(e);
    model_close(m);
}

/* Token i is sampled with index i from the logits of one forward pass over all tokens before it. */
static void generation_is_sampled_forward(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 3, "all-linear", 0.2f, 8);
    struct engine *e = engine_make(m, 16, 4, NULL);
    static const int32_t prompt[] = {4, 40, 200};
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 3,
                               .adapter = a,
                               .max_tokens = 20,
                               .sampling = {1.5f, 50, 0.95f, 0.01f, 5}};
    run_one(e, &r);
    struct forward_options o = {.max_rows = 1, .n_slots = 1, .slot_len = LEN};
    struct forward *f = forward_new(m, &o);
    struct lora_part part;
    struct lora_segment seg = adapter_lora_segment(a, 0, 1, &part);
    float *logits = xcalloc(VOCAB, sizeof *logits), *scratch = xcalloc(3 * VOCAB, sizeof *scratch);
    for (int32_t pos = 0; pos < 22; pos++) {
        float logprob;
        int32_t i = pos - 2;
        struct batch_row row = {.token = pos < 3 ? prompt[pos] : r.out[pos - 3], .pos = pos};
        forward_run(f, &row, 1, &seg, 1, (int32_t[]){0}, 1, logits);
        if (i < 0) continue;
        assert_int_equal(sample_token(logits, VOCAB, &r.sampling, NULL, i, &logprob, scratch),
                         r.out[i]);
        assert_true(logprob == r.out_logprob[i]);
    }
    engine_request_release(&r);
    forward_free(f);
    engine_free(e);
    adapter_release(a);
    model_close(m);
    free(logits);
    free(scratch);
}

/* The output of a request that shifts its context, from requests that do not: each continues the
 * tokens that remain. All are greedy. Returns the number of dropped tokens. */
static int32_t shifted_naive(struct engine *e, const struct engine_request *r, int32_t *out,
                             float *logprob) {
    int32_t seq[LEN + 1], n = r->n_prompt, dropped = 0;
    memcpy(seq, r->prompt, (size_t)n * sizeof *seq);
    for (int32_t i = 0; i < r->max_tokens; i++) {
        if (n >= r->context_len && i > 0) {
            int32_t drop = (n - r->n_keep) / 2;
            memmove(seq + r->n_keep, seq + r->n_keep + drop,
                    (size_t)(n - r->n_keep - drop) * sizeof *seq);
            n -= drop;
            dropped += drop;
        }
        struct engine_request one = {
            .prompt = seq, .n_prompt = n, .max_tokens = 1, .adapter = r->adapter};
        run_one(e, &one);
        out[i] = seq[n++] = one.out[0];
        logprob[i] = one.out_logprob[0];
        engine_request_release(&one);
    }
    return dropped;
}

/* With every length of the part that is kept, in a context that is shorter than the model's and in
 * one that is as long. */
static void context_shift_equals_shorter_prompts(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 3, "all-linear", 0.2f, 8);
    struct engine *e = engine_make(m, 16, 4, NULL), *plain = engine_make(m, 256, 1, NULL);
    static const int32_t prompt[] = {4, 40, 200, 7, 90, 90, 11};
    int32_t out[150];
    float logprob[150];
    for (int32_t keep = 0; keep <= 7; keep++)
        for (int32_t i = 0; i < 3; i++) {
            struct engine_request r = {.prompt = prompt,
                                       .n_prompt = 7,
                                       .max_tokens = 150,
                                       .adapter = i % 2 ? a : NULL,
                                       .context_len = (int32_t[]){9, 19, LEN}[i],
                                       .n_keep = keep};
            run_one(e, &r);
            assert_int_equal(r.n_dropped, shifted_naive(plain, &r, out, logprob));
            assert_true(r.n_dropped >= 7 + 150 - r.context_len);
            assert_int_equal(r.n_out, 150);
            assert_memory_equal(r.out, out, sizeof out);
            assert_memory_equal(r.out_logprob, logprob, sizeof logprob);
            engine_request_release(&r);
        }
    engine_free(plain);
    engine_free(e);
    adapter_release(a);
    model_close(m);
}

static void base_is_read_once_per_step(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 64, 20, NULL);
    struct adapter *a[20];
    struct engine_request r[20];
    struct error err;
    int32_t prompts[20];
    for (int i = 0; i < 20; i++) {
        a[i] = fixture_adapter(&m->config, 4, "all-linear", 0.1f, (uint64_t)i);
        prompts[i] = i + 3;
        r[i] = (struct engine_request){
            .prompt = &prompts[i], .n_prompt = 1, .adapter = a[i], .max_tokens = 5};
        assert_int_equal(engine_submit(e, &r[i], &err), OK);
    }
    for (uint64_t step = 1; step <= 5; step++) {
        assert_int_equal(engine_step(e), step < 5 ? 20 : 0);
        assert_int_equal(engine_stats(e).weight_passes,
                         step * (7 * (uint64_t)m->config.n_layers + 1));
        assert_int_equal(engine_stats(e).rows, 20 * step);
    }
    assert_int_equal(engine_stats(e).max_adapters_in_a_step, 20);
    assert_int_equal(engine_stats(e).generated, 100);
    for (int i = 0; i < 20; i++) {
        engine_request_release(&r[i]);
        adapter_release(a[i]);
    }
    engine_free(e);
    model_close(m);
}

/* Prompts of different tokens, which share no prefix. */
static struct engine_request prompt_request(int32_t *tokens, int32_t n, int32_t first) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (first + 7 * i) % VOCAB;
    return (struct engine_request){.prompt = tokens, .n_prompt = n, .max_tokens = 3};
}

/* A prompt that fits into a step has its first token after the next step, although a long prompt
 * came before; while it decodes, the long prompt gets only the rows of engine_set_prompt_rows. */
static void short_prompts_do_not_wait(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 6, NULL);
    struct error err;
    int32_t v[60], w[5];
    struct engine_request longer = prompt_request(v, 60, 1), shorter = prompt_request(w, 5, 2);
    assert_int_equal(engine_submit(e, &longer, &err), OK);
    engine_step(e);
    assert_int_equal(engine_stats(e).prefilled, 16);
    assert_int_equal(engine_submit(e, &shorter, &err), OK);
    engine_step(e);
    assert_int_equal(shorter.n_out, 1);
    assert_int_equal(engine_stats(e).prefilled, 32);
    engine_set_prompt_rows(e, 2);
    engine_step(e);
    assert_int_equal(shorter.n_out, 2);
    assert_int_equal(engine_stats(e).prefilled, 34);
    engine_drain(e);
    engine_request_release(&longer);
    engine_request_release(&shorter);
    engine_free(e);
    model_close(m);
}

/* A step in which no request decodes is limited as well: to 128 prompt rows, or four times the
 * limit of the other steps. */
static void idle_steps_are_limited(void **state) {
    enum { N = 10, N_PROMPT = 60 };
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 512, N, NULL);
    struct error err;
    int32_t v[N][N_PROMPT];
    struct engine_request r[N];
    for (int i = 0; i < N; i++) {
        r[i] = prompt_request(v[i], N_PROMPT, i + 1);
        r[i].max_tokens = 0;
        assert_int_equal(engine_submit(e, &r[i], &err), OK);
    }
    engine_set_prompt_rows(e, 16);
    engine_step(e);
    assert_int_equal(engine_stats(e).prefilled, 128);
    engine_set_prompt_rows(e, 40);
    engine_step(e);
    assert_int_equal(engine_stats(e).prefilled, 128 + 160);
    engine_drain(e);
    for (int i = 0; i < N; i++) engine_request_release(&r[i]);
    engine_free(e);
    model_close(m);
}

/* New short prompts could use every step, but the oldest prompt gets a quarter of the rows. */
static void long_prompts_end(void **state) {
    enum { STEPS = 60 / 4, NEW = 3, N = STEPS * NEW };
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 64, NULL);
    struct error err;
    int32_t v[60], w[N][6];
    struct engine_request longer = prompt_request(v, 60, 1), shorter[N];
    assert_int_equal(engine_submit(e, &longer, &err), OK);
    for (int step = 0; step < STEPS; step++) {
        assert_int_equal(longer.n_out, 0);
        for (int i = NEW * step; i < NEW * (step + 1); i++) {
            shorter[i] = prompt_request(w[i], 6, i + 2);
            shorter[i].max_tokens = 0;
            assert_int_equal(engine_submit(e, &shorter[i], &err), OK);
        }
        engine_step(e);
        assert_int_equal(engine_stats(e).prefilled, 16 * (step + 1));
    }
    assert_int_equal(longer.n_out, 1);
    engine_drain(e);
    for (int i = 0; i < N; i++) engine_request_release(&shorter[i]);
    engine_request_release(&longer);
    engine_free(e);
    model_close(m);
}

/* Several samples of one prompt prefill it once; a continued conversation prefills only the new
 * tokens; requests with different adapters share no prefix. The results are equal to those without
 * sharing. */
static void prefixes_are_shared(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 4, "all-linear", 0.2f, 1);
    struct engine *e = engine_make(m, 8, 6, NULL);
    struct error err;
    struct engine_request r[5], alone;
    int32_t prompt[LEN];
    for (int i = 0; i < LEN; i++) prompt[i] = (11 * i + 5) % VOCAB;
    for (int i = 0; i < 5; i++)
        r[i] = (struct engine_request){.prompt = prompt,
                                       .n_prompt = 30,
                                       .adapter = a,
                                       .max_tokens = 8,
                                       .sampling = {1, 0, 1, 0, (uint64_t)i}};
    assert_int_equal(engine_run(e, r, 5, NULL, &err), OK);
    assert_int_equal(engine_stats(e).prefilled, 30 + 4);
    for (int i = 0; i < 5; i++) assert_int_equal(r[i].n_cached, i ? 29 : 0);
    for (int i = 0; i < 5; i++) {
        struct engine *fresh = engine_make(m, 64, 1, NULL);
        alone = (struct engine_request){.prompt = prompt,
                                        .n_prompt = 30,
                                        .adapter = a,
                                        .max_tokens = 8,
                                        .sampling = {1, 0, 1, 0, (uint64_t)i}};
        run_one(fresh, &alone);
        assert_same_result(&alone, &r[i]);
        assert_int_equal(alone.n_prefilled, 30);
        engine_request_release(&alone);
        engine_request_release(&r[i]);
        engine_free(fresh);
    }
    alone =
        (struct engine_request){.prompt = prompt, .n_prompt = 40, .adapter = a, .max_tokens = 1};
    run_one(e, &alone);
    assert_int_equal(engine_stats(e).prefilled, 34 + 10);
    engine_request_release(&alone);
    alone = (struct engine_request){.prompt = prompt, .n_prompt = 40, .max_tokens = 1};
    run_one(e, &alone);
    assert_int_equal(engine_stats(e).prefilled, 44 + 40);
    engine_request_release(&alone);
    engine_free(e);
    adapter_release(a);
    model_close(m);
}

/* A conversation that continues after generated tokens gives the result of a new engine. With
 * matrix tiles the answer is prefilled again, because its keys and values were computed as sampled
 * rows. */
static void generated_tokens_are_not_reused(void **state) {
    (void)state;
    static const enum tensor_type types[] = {TENSOR_Q8_0, TENSOR_BF16};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct model *m = fixture_model("tiny-qwen3", false, types[i], NUMERIC_FAST);
        struct engine *e = engine_make(m, 16, 4, NULL), *fresh = engine_make(m, 64, 1, NULL);
        struct engine_request first, turn[2];
        int32_t prompt[LEN];
        for (int k = 0; k < 20; k++) prompt[k] = (11 * k + 5) % VOCAB;
        first = (struct engine_request){.prompt = prompt, .n_prompt = 20, .max_tokens = 12};
        run_one(e, &first);
        memcpy(prompt + 20, first.out, (size_t)first.n_out * sizeof *prompt);
        for (int k = 0; k < 2; k++) {
            turn[k] = (struct engine_request){
                .prompt = prompt, .n_prompt = 20 + first.n_out, .max_tokens = 12};
            run_one(k ? fresh : e, &turn[k]);
        }
        assert_same_result(&turn[0], &turn[1]);
        assert_int_equal(turn[0].n_cached, kernels_get()->gemm_tiles ? 20 : 20 + first.n_out - 1);
        engine_request_release(&first);
        for (int k = 0; k < 2; k++) engine_request_release(&turn[k]);
        engine_free(e);
        engine_free(fresh);
        model_close(m);
    }
}

struct weighted_token {
    float w;
    int32_t id;
};

static int weighted_compare(const void *pa, const void *pb) {
    const struct weighted_token *a = pa, *b = pb;
    if (a->w != b->w) return a->w > b->w ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* The candidates that remain, in order, with their weights; returns their number. */
static int32_t naive_filter(const float *logits, int32_t n, const struct sampling_params *s,
                            struct weighted_token *v) {
    const struct kernels *k = kernels_get();
    float max = k->max(logits, n), *w = xcalloc((size_t)n, sizeof *w);
    double sum = 0, run = 0;
    for (int32_t i = 0; i < n; i++) w[i] = (logits[i] - max) / s->temperature;
    k->exp(w, w, n);
    for (int32_t i = 0; i < n; i++) v[i] = (struct weighted_token){w[i], i};
    free(w);
    int32_t kept = n;
    if ((s->top_k > 0 && s->top_k < n) || s->top_p < 1)
        qsort(v, (size_t)n, sizeof *v, weighted_compare);
    if (s->top_k > 0) kept = MIN(kept, s->top_k);
    for (int32_t i = 0; i < kept; i++) sum += (double)v[i].w;
    for (int32_t i = 0; s->top_p < 1 && i < kept; i++)
        if ((run += (double)v[i].w) >= (double)s->top_p * sum) kept = i + 1;
    int32_t out = 0;
    for (int32_t i = 0; i < kept; i++)
        if (v[i].w >= s->min_p) v[out++] = v[i];
    return out;
}

static int32_t naive_sample(const struct weighted_token *v, int32_t n, float u) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)v[i].w;
    double left = (double)u * sum;
    for (int32_t i = 0; i < n; i++)
        if ((left -= (double)v[i].w) < 0) return v[i].id;
    return v[n - 1].id;
}

static void sampler_equals_naive(void **state) {
    (void)state;
    enum { MOST = 700 };
    struct rng rng = rng_make(41, RNG_TEST, 0, 0);
    float *logits = xcalloc(MOST, sizeof *logits), *scratch = xcalloc(3 * MOST, sizeof *scratch),
          logprob;
    struct weighted_token *v = xcalloc(MOST, sizeof *v);
    for (int round = 0; round < 600; round++) {
        int32_t n = 1 + random_below(&rng, round % 2 ? MOST : 12);
        struct sampling_params s = {.temperature = 0.2f + 2 * rng_uniform(&rng),
                                    .top_k = random_below(&rng, 2) * random_below(&rng, 60),
                                    .top_p =
                                        rng_below(&rng, 2) ? 1 : 0.01f + 0.98f * rng_uniform(&rng),
                                    .min_p = rng_below(&rng, 2) ? 0 : 0.3f * rng_uniform(&rng),
                                    .seed = rng_u64(&rng)};
        // coarse values make ties
        for (int32_t i = 0; i < n; i++)
            logits[i] = floorf(4 * rng_normal(&rng)) / (round % 3 ? 2.0f : 64.0f);
        int32_t kept = naive_filter(logits, n, &s, v);
        assert_true(kept >= 1);
        for (int32_t index = 0; index < 5; index++) {
            struct rng u = rng_make(s.seed, RNG_SAMPLE, 0, (uint32_t)index);
            int32_t id = sample_token(logits, n, &s, NULL, index, &logprob, scratch);
            assert_int_equal(id, naive_sample(v, kept, rng_uniform(&u)));
            double z = 0;
            for (int32_t i = 0; i < n; i++) z += exp((double)logits[i]);
            assert_true(fabs((double)logprob - ((double)logits[id] - log(z))) < 1e-4);
        }
    }
    free(logits);
    free(scratch);
    free(v);
}

/* Chi-squared test of samples of 8 tokens with known probabilities: with 7 degrees of freedom 24.3
 * is the 99.9 % point. */
static void sampler_distribution(void **state) {
    (void)state;
    enum { N = 8, DRAWS = 20000 };
    static const double weights[N] = {40, 20, 12, 9, 8, 6, 3, 2};
    float logits[N], logprob, *scratch = xcalloc(3 * N, sizeof *scratch);
    int count[N] = {0};
    double chi2 = 0;
    for (int temperature = 1; temperature <= 2; temperature++) {
        struct sampling_params s = {.temperature = (float)temperature, .top_p = 1, .seed = 99};
        memset(count, 0, sizeof count);
        chi2 = 0;
        for (int i = 0; i < DRAWS; i++) {
            for (int j = 0; j < N; j++) logits[j] = (float)log(weights[j]) * (float)temperature;
            count[sample_token(logits, N, &s, NULL, i, &logprob, scratch)]++;
        }
        for (int j = 0; j < N; j++) {
            double want = DRAWS * weights[j] / 100;
            chi2 += (count[j] - want) * (count[j] - want) / want;
        }
        if (!(chi2 < 24.3)) fail_msg("chi-square %g", chi2);
    }
    free(scratch);
}

/* The tokens with probabilities .4 .3 .2 .1 (ids 2 0 3 1) that occur in 400 samples. */
static void sampler_filters(void **state) {
    (void)state;
    static const struct {
        int32_t top_k;
        float top_p, min_p;
        const char *kept; /* ids */
    } cases[] = {
        {0, 1, 0, "0123"},  {1, 1, 0, "2"},      {2, 1, 0, "02"},        {9, 1, 0, "0123"},
        {0, 0.39f, 0, "2"}, {0, 0.41f, 0, "02"}, {0, 0.85f, 0, "023"},   {0, 0.95f, 0, "0123"},
        {0, 1e-9f, 0, "2"}, {0, 1, 0.6f, "02"},  {0, 1, 0.4f, "023"},    {0, 1, 1, "2"},
        {2, 0.55f, 0, "2"}, {2, 0.59f, 0, "02"}, {3, 0.95f, 0.6f, "02"}, {3, 1, 0.2f, "023"},
    };
    static const double probs[4] = {0.3, 0.1, 0.4, 0.2};
    float logits[4], logprob, *scratch = xcalloc(12, sizeof *scratch);
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        bool seen[4] = {0};
        char kept[8] = "";
        struct sampling_params s = {.temperature = 1,
                                    .top_k = cases[c].top_k,
                                    .top_p = cases[c].top_p,
                                    .min_p = cases[c].min_p,
                                    .seed = 7};
        for (int i = 0; i < 400; i++) {
            for (int j = 0; j < 4; j++) logits[j] = (float)log(probs[j]);
            seen[sample_token(logits, 4, &s, NULL, i, &logprob, scratch)] = true;
        }
        for (int j = 0; j < 4; j++)
            if (seen[j]) strcat(kept, (char[]){(char)('0' + j), 0});
        if (strcmp(kept, cases[c].kept) != 0) fail_msg("case %zu: kept %s", c, kept);
    }
    free(scratch);
}

static void sampler_edges(void **state) {
    (void)state;
    float *scratch = xcalloc(16, sizeof *scratch), logprob;
    struct sampling_params greedy = {0}, hot = {.temperature = 1e6f, .top_p = 0.9f},
                           cold = {.temperature = 1e-30f, .top_p = 1};
    float tie[4] = {1, 3, 3, 2}, nan[4] = {NAN, NAN, NAN, NAN}, some[4] = {NAN, 1, -INFINITY, NAN},
          one[1] = {5};
    assert_int_equal(sample_token(tie, 4, &greedy, NULL, 0, &logprob, scratch), 1);
    assert_int_equal(sample_token(some, 4, &greedy, NULL, 0, &logprob, scratch), 1);
    assert_int_equal(sample_token(some, 4, &cold, NULL, 0, &logprob, scratch), 1);
    assert_int_equal(sample_token(nan, 4, &greedy, NULL, 0, &logprob, scratch), 0);
    assert_in_range(sample_token(nan, 4, &hot, NULL, 0, &logprob, scratch), 0, 3);
    assert_int_equal(sample_token(one, 1, &hot, NULL, 3, &logprob, scratch), 0);
    assert_true(logprob == 0.0f);
    for (int i = 0; i < 50; i++)
        assert_in_range(sample_token(tie, 4, &cold, NULL, i, &logprob, scratch), 1, 2);
    free(scratch);
}

static void assert_refused(struct engine *e, struct engine_request r, const char *part) {
    struct error err = {0};
    assert_int_equal(engine_submit(e, &r, &err), ERR_USAGE);
    if (!strstr(err.text, part)) fail_msg("'%s' lacks '%s'", err.text, part);
    assert_null(r.state);
    assert_int_equal(engine_run(e, &r, 1, NULL, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "request 0: "));
}

static void invalid_requests_are_refused(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct model *other = fixture_model("tiny-qwen3", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&other->config, 2, "q_proj", 0.1f, 1);
    struct engine *e = engine_make(m, 8, 2, NULL);
    static const int32_t ok[LEN + 1] = {1, 2, 3}, high[] = {1, VOCAB}, low[] = {-1};
    const struct token_seq empty[] = {{ok, 1}, {ok, 0}}, wild[] = {{high, 2}}, fine[] = {{ok, 3}};
    const struct engine_request base = {.prompt = ok, .n_prompt = 3, .max_tokens = 1};
    struct engine_request r = base;
    r.n_prompt = 0, assert_refused(e, r, "empty"), r = base;
    r.prompt = high, r.n_prompt = 2, assert_refused(e, r, "'300'"), r = base;
    r.prompt = low, r.n_prompt = 1, assert_refused(e, r, "'-1'"), r = base;
    r.stop = high, r.n_stop = 2, assert_refused(e, r, "stop"), r = base;
    r.n_stop = -1, assert_refused(e, r, "stop"), r = base;
    r.suffix = (struct token_seq){low, 1}, assert_refused(e, r, "suffix"), r = base;
    r.choices = empty, r.n_choices = 2, assert_refused(e, r, "choice '1' is empty"), r = base;
    r.choices = wild, r.n_choices = 1, assert_refused(e, r, "choice"), r = base;
    r.choices = fine, r.n_choices = 1, r.choices_only = true,
    assert_refused(e, r, "choice '0' has 3 tokens"), r = base;
    r.n_choices = -3, assert_refused(e, r, "-3"), r = base;
    r.max_tokens = -1, assert_refused(e, r, "max_tokens"), r = base;
    r.max_tokens = LEN - 2, assert_refused(e, r, "of the context"), r = base;
    r.max_tokens = INT32_MAX, assert_refused(e, r, "of the context"), r = base;
    r.n_prompt = LEN + 1, assert_refused(e, r, "of the context"), r = base;
    r.max_tokens = LEN - 5, r.choices = fine, r.n_choices = 1,
    assert_refused(e, r, "reply up to 62"), r = base;
    r.sampling.temperature = -1, assert_refused(e, r, "temperature"), r = base;
    r.sampling.temperature = NAN, assert_refused(e, r, "temperature"), r = base;
    r.sampling.temperature = 1, assert_refused(e, r, "top_p"), r = base;
    r.sampling = (struct sampling_params){.temperature = 1, .top_k = -1, .top_p = 1},
    assert_refused(e, r, "top_k"), r = base;
    r.sampling = (struct sampling_params){.temperature = 1, .top_p = 1, .min_p = 2},
    assert_refused(e, r, "min_p"), r = base;
    r.adapter = a, assert_refused(e, r, "another shape"), r = base;
    r.context_len = LEN + 1, assert_refused(e, r, "context_len"), r = base;
    r.context_len = 2, assert_refused(e, r, "more than the context_len"), r = base;
    r.context_len = 8, r.n_keep = 4, assert_refused(e, r, "n_keep '4' is not in 0..3"), r = base;
    r.context_len = 4, r.n_keep = 3, assert_refused(e, r, "n_keep '3' is not in 0..2"), r = base;
    r.context_len = 1, assert_refused(e, r, "context_len"), r = base;
    r.context_len = 8, r.choices = fine, r.n_choices = 1, assert_refused(e, r, "no context shift"),
    r = base;
    assert_int_equal(engine_step(e), 0);
    r.max_tokens = LEN - 3; // exactly full
    run_one(e, &r);
    engine_request_release(&r);
    engine_free(e);
    adapter_release(a);
    model_close(other);
    model_close(m);
}

static void invalid_options_are_refused(void **state) {
    (void)state;
    static const struct {
        struct engine_options o;
        int code;
        const char *part;
    } cases[] = {
        {{.max_rows = -1}, ERR_USAGE, "max_rows"},
        {{.max_seqs = 70000}, ERR_USAGE, "max_seqs"},
        {{.max_len = LEN + 1}, ERR_USAGE, "max_len"},
    };
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err;
        assert_null(engine_new(m, &cases[i].o, &err));
        assert_int_equal(err.code, cases[i].code);
        assert_non_null(strstr(err.text, cases[i].part));
    }
    m->config.max_seq_len = 1 << 24; // a cache larger than any machine's memory is refused with the
                                     // sizes, and not allocated
    struct error err;
    struct engine_options huge = {.max_seqs = 60000, .max_len = 1 << 24};
    assert_null(engine_new(m, &huge, &err));
    assert_int_equal(err.code, ERR_MEMORY);
    assert_non_null(strstr(err.text, "fewer or shorter sequences"));
    model_close(m);
}

/* Unfinished requests remain valid after engine_free and can be released. */
static void engine_freed_early(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 8, 2, NULL);
    static const int32_t prompt[] = {1, 2, 3};
    const struct token_seq choices[] = {{prompt, 2}, {prompt, 3}};
    struct engine_request r[4];
    struct error err;
    for (int i = 0; i < 4; i++) {
        r[i] = (struct engine_request){
            .prompt = prompt, .n_prompt = 3, .max_tokens = 9, .choices = choices, .n_choices = 2};
        assert_int_equal(engine_submit(e, &r[i], &err), OK);
    }
    engine_step(e);
    engine_step(e);
    engine_free(e);
    for (int i = 0; i < 4; i++) {
        assert_false(r[i].done);
        engine_request_release(&r[i]);
    }
    model_close(m);
}

static void request_key(const struct engine_request *r, const char *model, char out[HASH_LEN]) {
    engine_request_key(r, model, NUMERIC_EXACT, out);
}

/* test_replay tests each input separately. */
static void request_keys_are_distinct(void **state) {
    (void)state;
    enum { N = 9 };
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 2, "q_proj", 0.1f, 1);
    static const int32_t v[] = {1, 2, 3, 4};
    const struct token_seq c1[] = {{v, 1}, {v + 1, 2}}, c2[] = {{v, 2}, {v + 2, 1}};
    const struct engine_request base = {.prompt = v,
                                        .n_prompt = 2,
                                        .max_tokens = 1,
                                        .stop = v + 2,
                                        .n_stop = 1,
                                        .sampling = {.temperature = 1, .top_p = 1},
                                        .choices = c1,
                                        .n_choices = 2};
    struct engine_request r[N];
    char keys[N + 1][HASH_LEN];
    for (int i = 0; i < N; i++) r[i] = base;
    r[1].n_prompt = 3, r[1].n_stop = 0; // a token moved from one list to the next
    r[2].adapter = a;
    r[3].choices = c2; // the same tokens, divided differently
    r[4].n_choices = 1;
    r[5].prompt = v + 1;
    r[6].stop = v;
    r[7].context_len = 8;
    r[8].context_len = 8, r[8].n_keep = 1;
    for (int i = 0; i < N; i++) request_key(&r[i], "model", keys[i]);
    engine_request_key(&base, "model", NUMERIC_FAST, keys[N]);
    for (int i = 0; i <= N; i++)
        for (int j = 0; j < i; j++) assert_string_not_equal(keys[i], keys[j]);
    request_key(&base, "model", keys[1]);
    assert_string_equal(keys[0], keys[1]);
    request_key(&base, "other", keys[1]);
    assert_string_not_equal(keys[0], keys[1]);
    r[0].user = &r, r[0].n_out = 9; // results and the caller's fields are not part of the key
    request_key(&r[0], "model", keys[1]);
    assert_string_equal(keys[0], keys[1]);
    adapter_release(a);
    model_close(m);
}

static void stories_in_a_batch(void **state) {
    (void)state;
    static const int32_t want[] = {403, 407, 261, 378, 432, 383, 286, 261,
                                   376, 298, 315, 421, 395, 317, 426, 338};
    char *bin = fixture_shared("data/stories260K/stories260K.bin");
    char *tok = bin ? fixture_shared("data/stories260K/tok512.bin") : NULL;
    struct error err;
    if (!tok) {
        free(bin);
        skip();
    }
    struct model *m = llama2c_open(bin, tok, NUMERIC_EXACT, &err);
    if (!m) fail_msg("%s", err.text);
    struct engine *e = engine_make(m, 16, 4, NULL);
    int32_t prompts[6][3] = {{1}, {1, 403}, {1, 403, 407}, {1}, {1, 300}, {1, 200, 201}};
    static const int32_t n[] = {1, 2, 3, 1, 2, 3};
    struct engine_request r[6];
    for (int i = 0; i < 6; i++)
        r[i] = (struct engine_request){
            .prompt = prompts[i], .n_prompt = n[i], .max_tokens = 16 - n[i]};
    assert_int_equal(engine_run(e, r, 6, NULL, &err), OK);
    for (int i = 0; i < 4; i++)
        assert_memory_equal(r[i].out, want + n[i] - 1, (size_t)r[i].n_out * sizeof *r[i].out);
    for (int i = 0; i < 6; i++) engine_request_release(&r[i]);
    engine_free(e);
    model_close(m);
    free(bin);
    free(tok);
}

/* Log-probabilities of a prompt's tokens equal those of generation, bit for bit. */
static void prompt_logprobs_equal_generated(void **state) {
    (void)state;
    struct engine_fixture w;
    fixture_open(&w, "tiny-qwen3", TENSOR_Q8_0, 11);
    struct engine *e = engine_make(w.m, 7, 4, NULL);
    int32_t prompt[3] = {5, 9, 200}, whole[23];
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 3,
                               .adapter = w.a[1],
                               .max_tokens = 20,
                               .n_top = 5,
                               .sampling = {.temperature = 1, .top_p = 1, .seed = 3}};
    run_one(e, &r);
    memcpy(whole, prompt, sizeof prompt);
    memcpy(whole + 3, r.out, 20 * sizeof *whole);
    struct engine_request s = {
        .prompt = whole, .n_prompt = 23, .adapter = w.a[1], .prompt_logprobs = true, .n_top = 5};
    run_one(e, &s);
    assert_memory_equal(s.prompt_logprob + 3, r.out_logprob, 20 * sizeof(float));
    assert_memory_equal(s.prompt_top_ids + 15, r.top_ids, 100 * sizeof(int32_t));
    assert_memory_equal(s.prompt_top_logprob + 15, r.top_logprob, 100 * sizeof(float));
    for (int i = 0; i < 20; i++) {
        assert_true(r.out_logprob[i] <= r.top_logprob[i * 5]);
        for (int j = 1; j < 5; j++)
            assert_true(r.top_logprob[i * 5 + j] <= r.top_logprob[i * 5 + j - 1]);
    }
    float best = r.top_logprob[0] - r.top_logprob[1];
    engine_request_release(&r);
    engine_request_release(&s);
    r.logprob_temperature = s.logprob_temperature = 2; // the sampled tokens stay the same
    run_one(e, &r);
    assert_memory_equal(r.out, whole + 3, 20 * sizeof *whole);
    run_one(e, &s);
    assert_memory_equal(s.prompt_logprob + 3, r.out_logprob, 20 * sizeof(float));
    assert_true(fabsf(r.top_logprob[0] - r.top_logprob[1] - best / 2) < 1e-5f);
    engine_request_release(&r);
    engine_request_release(&s);
    engine_free(e);
    fixture_close(&w);
}

static void sampling_options_have_effect(void **state) {
    (void)state;
    enum { N = 6 };
    const float logits[N] = {3, 2.9f, 2, -1, 0, 2.5f};
    int32_t said[] = {0, 0, 1}, asked[] = {5, 3};
    struct sampling_context h = {{asked, 2}, {said, 3}, NULL};
    float scratch[SAMPLE_SCRATCH * N], lp;
    struct sampling_params s = {0};
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.repetition_penalty = 1.3f; // 0: 2.3, 1: 2.2, 5: 1.9, and 2 stays
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.repetition_penalty = 1.6f; // 0: 1.9, below 2
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 2);
    s.repetition_penalty = 1, s.presence_penalty = 0.6f; // 0: 2.4, 1: 2.3, 5 stays: only asked
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 5);
    s.presence_penalty = 0, s.frequency_penalty = 0.06f; // 0: 2.88, 1: 2.84
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.frequency_penalty = 0.11f; // 0: 2.78, 1: 2.79
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 1);
    s.penalty_last_n = 2; // the last 0 and the 1: 2.79, 2.79 and the rest as it is
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.frequency_penalty = 0, s.presence_penalty = 0.6f, s.penalty_last_n = 4; // not the 5
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 5);
    s.penalty_last_n = 5; // with the prompt's tokens: 0: 2.4, 5: 1.9
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.presence_penalty = 0, s.repetition_penalty = 1.6f, s.penalty_last_n = 1; // only the 1
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 0);
    s.repetition_penalty = 1, s.penalty_last_n = 0;
    struct logit_bias bias[] = {{4, 100}, {0, -100}};
    s.bias = bias, s.n_bias = 2;
    assert_int_equal(sample_token(logits, N, &s, &h, 0, &lp, scratch), 4);
    double z = 0; // the log-probability is that of the unmodified logits
    for (int i = 0; i < N; i++) z += exp((double)logits[i]);
    assert_true(fabs((double)lp + log(z)) < 1e-6);
}

/* Typical sampling compared with a naive implementation that sorts all surprisals in double. */
static void typical_equals_naive(void **state) {
    (void)state;
    enum { N = 50 };
    float logits[N], scratch[SAMPLE_SCRATCH * N], lp;
    struct rng rng = rng_make(47, RNG_TEST, 0, 0);
    for (int round = 0; round < 200; round++) {
        double p[N], sum = 0, entropy = 0, far[N], mass = 0;
        bool kept[N] = {false};
        for (int i = 0; i < N; i++) sum += p[i] = exp((double)(logits[i] = 2 * rng_normal(&rng)));
        for (int i = 0; i < N; i++) entropy -= p[i] / sum * log(p[i] / sum);
        for (int i = 0; i < N; i++) far[i] = fabs(-log(p[i] / sum) - entropy);
        for (int n = 0; n < N && mass < 0.4; n++) {
            int best = -1;
            for (int i = 0; i < N; i++)
                if (!kept[i] && (best < 0 || far[i] < far[best])) best = i;
            kept[best] = true;
            mass += p[best] / sum;
        }
        struct sampling_params s = {
            .temperature = 1, .top_p = 1, .typical_p = 0.4f, .seed = (uint64_t)round};
        for (int i = 0; i < 20; i++)
            assert_true(kept[sample_token(logits, N, &s, NULL, i, &lp, scratch)]);
    }
}

static struct grammar *hostile_grammar(void) {
    struct buf b = {0};
    struct error err;
    buf_puts(&b, "root ::= r\nr ::= [a-z ] r");
    for (int i = 0; i < 3000; i++) buf_puts(&b, " | [a-z ] r \"b\"");
    buf_puts(&b, " | \"a\"");
    struct grammar *g = grammar_new_gbnf(b.data, b.len, &err);
    if (!g) fail_msg("%s", err.text);
    buf_release(&b);
    return g;
}

/* Requests with expensive masks do not delay other requests, and have the results of single runs.
 */
static void grammars_do_not_delay_others(void **state) {
    (void)state;
    struct error err;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 4, NULL);
    struct grammar *g = hostile_grammar();
    int32_t prompt[] = {10, 20, 30, 40, 50, 60}, other[] = {10, 20, 30, 40, 50, 60, 70};
    struct engine_request alone = {.prompt = prompt, .n_prompt = 6, .grammar = g, .max_tokens = 6};
    struct engine_request slow = alone, plain = {.prompt = other, .n_prompt = 7, .max_tokens = 8};
    run_one(e, &alone);
    engine_free(e);
    e = engine_make(m, 16, 4, NULL);
    assert_int_equal(engine_submit(e, &slow, &err), OK);
    assert_int_equal(engine_submit(e, &plain, &err), OK);
    int steps = 0;
    while (!plain.done && steps < 100) {
        engine_step(e);
        steps++;
    }
    assert_true(plain.done && steps <= 10);
    assert_true(slow.n_out <= 2); // its masks take many steps
    struct engine_request given_up = {
        .prompt = prompt, .n_prompt = 6, .grammar = g, .max_tokens = 6};
    assert_int_equal(engine_submit(e, &given_up, &err), OK);
    for (int i = 0; i < 5; i++) engine_step(e);
    engine_cancel(e, &given_up);
    while (!slow.done) engine_step(e);
    assert_int_equal(slow.n_out, alone.n_out);
    assert_memory_equal(slow.out, alone.out, (size_t)alone.n_out * sizeof *slow.out);
    assert_memory_equal(slow.out_logprob, alone.out_logprob,
                        (size_t)alone.n_out * sizeof *slow.out_logprob);
    engine_request_release(&alone);
    engine_request_release(&slow);
    engine_request_release(&plain);
    engine_request_release(&given_up);
    grammar_free(g);
    engine_free(e);
    model_close(m);
}

/* For any sampling parameters the output is a complete text of the grammar if the token limit
 * allows one, and ends where no token can follow. */
static void output_matches_grammar(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 4, NULL);
    if (!grammars[0]) grammars_compile();
    int32_t prompt[] = {10, 20}, eos[] = {tokenizer_eos(m->tok)};
    for (int i = 0; i < 80; i++) {
        const struct grammar *g = grammars[i % 4];
        struct buf said = {0};
        struct engine_request r = {.prompt = prompt,
                                   .n_prompt = 2,
                                   .grammar = g,
                                   .max_tokens = grammar_min_length(g) + i / 4,
                                   .stop = eos,
                                   .n_stop = i % 8 < 4,
                                   .sampling = {.temperature = 2, .top_p = 1, .seed = (uint64_t)i}};
        run_one(e, &r);
        tokenizer_decode(m->tok, r.out, r.n_out, false, &said);
        struct grammar_machine *k = grammar_machine_new(g, NULL, 0);
        struct grammar_state at = grammar_state_new(k);
        assert_true(grammar_accept_bytes(&at, said.data ? said.data : "", said.len));
        assert_true(grammar_is_final(&at));
        assert_int_equal(r.finish, r.max_tokens ? FINISH_STOP : FINISH_LENGTH);
        grammar_state_release(&at);
        grammar_machine_free(k);
        engine_request_release(&r);
        buf_release(&said);
    }
    engine_free(e);
    model_close(m);
}

/* A bias that forces one token causes a loop; a text ends at the first stop text. */
static void loops_and_stop_texts(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct engine *e = engine_make(m, 16, 2, NULL);
    struct buf said = {0};
    int32_t prompt[] = {10, 20};
    struct logit_bias bias = {77, 1000};
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 2,
                               .max_tokens = 40,
                               .loop_tokens = 12,
                               .sampling = {.bias = &bias, .n_bias = 1}};
    run_one(e, &r);
    assert_int_equal(r.finish, FINISH_LOOP);
    assert_int_equal(r.n_out, 12);
    engine_request_release(&r);
    r.loop_tokens = 0;
    run_one(e, &r);
    assert_int_equal(r.finish, FINISH_LENGTH);
    engine_request_release(&r);
    r.sampling = (struct sampling_params){.temperature = 1.5f, .top_p = 1, .seed = 5};
    run_one(e, &r);
    tokenizer_decode(m->tok, r.out, r.n_out, false, &said);
    engine_request_release(&r);
    assert_true(said.len > 12);
    char *stop = strndup(said.data + 9, 3);
    const char *stops[] = {"\xff\xfe never", stop}, *at = memmem(said.data, said.len, stop, 3);
    r.stop_texts = stops, r.n_stop_texts = 2;
    run_one(e, &r);
    assert_int_equal(r.finish, FINISH_STOP);
    assert_int_equal(r.text.len, at - said.data);
    assert_memory_equal(r.text.data, said.data, r.text.len);
    engine_request_release(&r);
    free(stop);
    buf_release(&said);
    engine_free(e);
    model_close(m);
}

static void embeddings_are_means(void **state) {
    (void)state;
    struct engine_fixture w;
    struct error err;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 12);
    struct engine *few = engine_make(w.m, 3, 2, NULL), *many = engine_make(w.m, 64, 2, NULL);
    int32_t d = w.m->config.d_model, ids[20];
    for (int i = 0; i < 20; i++) ids[i] = 13 * i % VOCAB;
    struct token_seq texts[2] = {{ids, 20}, {ids + 4, 5}};
    float *a = xcalloc((size_t)(2 * d), sizeof *a), *b = xcalloc((size_t)(2 * d), sizeof *b);
    assert_int_equal(engine_embed(few, texts, 2, w.a[1], a, &err), OK);
    assert_int_equal(engine_embed(many, texts, 2, w.a[1], b, &err), OK);
    assert_memory_equal(a, b, (size_t)(2 * d) * sizeof *a);
    struct forward_options o = {.max_rows = 5, .n_slots = 1, .slot_len = 8};
    struct forward *f = forward_new(w.m, &o);
    struct batch_row rows[5];
    struct lora_part part;
    struct lora_segment seg = adapter_lora_segment(w.a[1], 0, 5, &part);
    int32_t out[5];
    for (int i = 0; i < 5; i++) rows[i] = (struct batch_row){ids[4 + i], i, 0}, out[i] = i;
    forward_run(f, rows, 5, &seg, 1, out, 5, NULL);
    for (int j = 0; j < d; j++) {
        double sum = 0;
        for (int i = 0; i < 5; i++) sum += (double)forward_hidden(f)[i * d + j];
        assert_true(fabs(sum / 5 - (double)a[d + j]) < 1e-5);
    }
    texts[0].n = 0;
    assert_int_equal(engine_embed(few, texts, 2, NULL, a, &err), ERR_USAGE);
    forward_free(f);
    engine_free(few);
    engine_free(many);
    free(a);
    free(b);
    fixture_close(&w);
}

/* A saved session replaces the prefill in another engine and does not change the result; damaged
 * files and files of other models are refused. */
static void sessions_resume(void **state) {
    (void)state;
    struct engine_fixture w;
    struct error err;
    fixture_open(&w, "tiny-llama", TENSOR_Q8_0, 13);
    engine_settings.kv = DTYPE_I8;
    struct engine *a = engine_make(w.m, 64, 2, NULL), *b = engine_make(w.m, 64, 2, NULL);
    const char *path = "/tmp/shoal-test-session", *hash = model_hash(w.m, &err);
    int32_t prompt[40], n = 0;
    for (int i = 0; i < 40; i++) prompt[i] = 17 * i % VOCAB;
    struct token_seq all = {prompt, 40};
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 40,
                               .adapter = w.a[0],
                               .max_tokens = 8},
                          s = r;
    assert_int_equal(engine_session_save(a, all, w.a[0], hash, path, &err), ERR_USAGE);
    run_one(a, &r);
    assert_int_equal(engine_session_save(a, all, w.a[1], hash, path, &err), ERR_USAGE);
    assert_int_equal(engine_session_save(a, all, w.a[0], hash, path, &err), OK);
    assert_int_equal(engine_session_load(b, hash, path, &n, &err), OK);
    assert_int_equal(n, 40);
    run_one(b, &s);
    assert_same_result(&r, &s);
    assert_int_equal(engine_stats(b).prefilled, 1);
    assert_int_equal(engine_session_load(b, "other", path, &n, &err), ERR_MISMATCH);
    engine_settings.kv = DTYPE_F32;
    struct engine *c = engine_make(w.m, 64, 2, NULL);
    assert_int_equal(engine_session_load(c, hash, path, &n, &err), ERR_MISMATCH);
    struct buf f = {0};
    assert_int_equal(file_read(path, 1 << 24, &f, &err), OK);
    for (size_t i = 0; i < f.len; i += f.len / 23) {
        f.data[i] ^= 4;
        assert_int_equal(file_write(path, f.data, f.len, &err), OK);
        assert_int_not_equal(engine_session_load(b, hash, path, &n, &err), OK);
        f.data[i] ^= 4;
        assert_int_equal(file_write(path, f.data, i, &err), OK);
        assert_int_equal(engine_session_load(b, hash, path, &n, &err), ERR_FORMAT);
    }
    assert_int_equal(file_write(path, f.data, f.len, &err), OK);
    engine_settings.kv = DTYPE_I8, engine_settings.lora = DTYPE_I8;
    struct engine *d = engine_make(w.m, 64, 2, NULL);
    assert_int_equal(engine_session_load(d, hash, path, &n, &err), ERR_MISMATCH);
    engine_settings.lora = DTYPE_F32,
    engine_settings.n_pages = 1; // of the two that it needs; none may stay reserved
    struct engine *small = engine_make(w.m, 64, 2, NULL);
    struct engine_request little = {.prompt = prompt, .n_prompt = 4, .max_tokens = 4};
    assert_int_equal(engine_session_load(small, hash, path, &n, &err), ERR_MEMORY);
    run_one(small, &little);
    engine_request_release(&little);
    engine_free(d);
    engine_free(small);
    engine_settings.kv = DTYPE_F32, engine_settings.n_pages = 0;
    unlink(path);
    buf_release(&f);
    engine_request_release(&r);
    engine_request_release(&s);
    engine_free(a);
    engine_free(b);
    engine_free(c);
    fixture_close(&w);
}

/* A mix is the sum of its low-rank maps: two halves of one adapter equal the adapter, up to
 * rounding. */
static void mix_is_a_weighted_sum(void **state) {
    (void)state;
    struct engine_fixture w;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 14);
    struct engine *e = engine_make(w.m, 64, 4, NULL);
    int32_t prompt[] = {1, 2, 3, 4, 5}, word[] = {9};
    struct token_seq choice = {word, 1};
    struct weighted_adapter halves[] = {{w.a[3], {0, 0}, 0.5f}, {w.a[3], {0, 0}, 0.5f}},
                            one = {w.a[3], {0, 0}, 1}, noise = {NULL, {3, 1}, 0.02f};
    struct engine_request r[4] = {{.adapter = w.a[3]},
                                  {.mix = halves, .n_mix = 2},
                                  {.mix = &one, .n_mix = 1},
                                  {.mix = &noise, .n_mix = 1}};
    for (int i = 0; i < 4; i++) {
        r[i].prompt = prompt, r[i].n_prompt = 5, r[i].choices = &choice, r[i].n_choices = 1;
        run_one(e, &r[i]);
    }
    assert_true(fabsf(r[0].choice_logprob[0] - r[1].choice_logprob[0]) < 1e-4f);
    assert_true(r[0].choice_logprob[0] == r[2].choice_logprob[0]);
    assert_true(r[0].choice_logprob[0] != r[3].choice_logprob[0]);
    for (int i = 0; i < 4; i++) engine_request_release(&r[i]);
    engine_free(e);
    fixture_close(&w);
}

/* A mix with DoRA is served as the exact sum (adapter_sum), alone and next to requests with the
 * same mix, and its sum does not outlive them. */
static void mixes_with_dora(void **state) {
    (void)state;
    struct engine_fixture w;
    struct error err;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 14);
    struct adapter_config c = {.r = 3, .alpha = 3, .dora = true};
    assert_int_equal(adapter_targets_parse("all-linear", c.target, &err), OK);
    struct adapter *fresh = adapter_new_for_model(w.m, &c, 1, &err);
    float *data = xmalloc(fresh->n_data * sizeof *data);
    for (size_t i = 0; i < fresh->n_data; i++) data[i] = fresh->data[i] * 1.1f + 0.01f;
    struct adapter *dora = adapter_from_owned_data(&w.m->config, &c, data, NULL);
    assert_int_equal(adapter_bind(dora, w.m, &err), OK);
    struct adapter *list[] = {dora, w.a[3]};
    struct adapter *sum = adapter_sum(w.m, list, (float[]){0.6f, 0.5f}, 2, NULL, &err);
    struct engine *e = engine_make(w.m, 64, 4, NULL);
    int32_t prompt[] = {1, 2, 3, 4, 5}, word[] = {9};
    struct token_seq choice = {word, 1};
    struct weighted_adapter mix[] = {{dora, {0, 0}, 0.6f}, {w.a[3], {0, 0}, 0.5f}},
                            noisy[] = {{dora, {0, 0}, 1}, {NULL, {3, 1}, 0.02f}};
    struct engine_request r[5] = {{.adapter = sum},
                                  {.mix = mix, .n_mix = 2},
                                  {.mix = mix, .n_mix = 2},
                                  {.adapter = dora},
                                  {.mix = noisy, .n_mix = 2}};
    for (int i = 0; i < 5; i++)
        r[i].prompt = prompt, r[i].n_prompt = 5, r[i].choices = &choice, r[i].n_choices = 1;
    assert_int_equal(engine_submit(e, &r[4], &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "DoRA adapters or noise, not both"));
    assert_int_equal(engine_run(e, r, 4, NULL, &err), OK);
    assert_true(fabsf(r[0].choice_logprob[0] - r[1].choice_logprob[0]) < 1e-4f);
    assert_true(r[1].choice_logprob[0] == r[2].choice_logprob[0]);
    assert_true(r[1].choice_logprob[0] != r[3].choice_logprob[0]);
    for (int i = 0; i < 4; i++) engine_request_release(&r[i]);
    adapter_release(fresh);
    adapter_release(dora);
    adapter_release(sum);
    engine_free(e);
    fixture_close(&w);
}

/* An activated adapter changes the tokens from the last occurrence of its invocation on: the rows
 * of a naive pass, one at a time, of the base model before it and with the adapter after it. */
static void activated_rows_equal_naive(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    static const int32_t call[] = {7, 8}, prompt[] = {7, 8, 5, 7, 8, 200, 7, 7, 8, 9, 11, 7};
    enum { N = ARRAY_LEN(prompt), START = 7, OUT = 6 };
    struct adapter *plain = fixture_adapter(&m->config, 3, "all-linear", 0.2f, 8),
                   *a = fixture_activated(plain, call, 2);
    struct engine *e = engine_make(m, 5, 4, NULL);
    struct engine_request r = {
        .prompt = prompt, .n_prompt = N, .adapter = a, .max_tokens = OUT, .prompt_logprobs = true};
    run_one(e, &r);
    struct forward_options o = {.max_rows = 1, .n_slots = 1, .slot_len = LEN};
    struct forward *f = forward_new(m, &o);
    struct lora_part part;
    struct lora_segment seg = adapter_lora_segment(plain, 0, 1, &part);
    float *logits = xcalloc(VOCAB, sizeof *logits), *scratch = xcalloc(VOCAB, sizeof *scratch);
    for (int32_t pos = 0; pos < N + OUT - 1; pos++) {
        struct batch_row row = {.token = pos < N ? prompt[pos] : r.out[pos - N], .pos = pos};
        int32_t next = pos + 1 < N ? prompt[pos + 1] : r.out[pos + 1 - N];
        forward_run(f, &row, 1, &seg, pos >= START, (int32_t[]){0}, 1, logits);
        float lse = kernels_get()->max(logits, VOCAB), got;
        memcpy(scratch, logits, VOCAB * sizeof *scratch);
        lse += (float)math_log((double)kernels_get()->softmax(scratch, VOCAB));
        got = pos + 1 < N ? r.prompt_logprob[pos + 1] : r.out_logprob[pos + 1 - N];
        assert_true(got == logits[next] - lse);
    }
    engine_request_release(&r);
    free(logits);
    free(scratch);
    forward_free(f);
    engine_free(e);
    adapter_release(plain);
    adapter_release(a);
    model_close(m);
}

/* Runs a request in `e` and alone in a new engine; the results must be equal. Returns n_cached. */
static int32_t run_cached(struct engine *e, const struct model *m, struct adapter *a,
                          const int32_t *prompt, int32_t n) {
    struct engine *fresh = engine_make(m, 64, 1, NULL);
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = n,
                               .adapter = a,
                               .max_tokens = 5,
                               .sampling = {1, 0, 1, 0, 3}},
                          alone = r;
    run_one(e, &r);
    run_one(fresh, &alone);
    assert_same_result(&alone, &r);
    assert_int_equal(alone.n_cached, 0);
    engine_request_release(&r);
    engine_request_release(&alone);
    engine_free(fresh);
    return r.n_cached;
}

/* The base model and activated adapters share the positions before the invocation. A later turn
 * moves the activation, so it shares less. Ordinary adapters share nothing with others. */
static void activated_adapters_share_the_base(void **state) {
    (void)state;
    static const int32_t calls[2][2] = {{250, 251}, {252, 253}};
    struct model *m = fixture_model("tiny-qwen3", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *plain = fixture_adapter(&m->config, 4, "all-linear", 0.2f, 1),
                   *a = fixture_activated(plain, calls[0], 2),
                   *b = fixture_activated(plain, calls[1], 2);
    struct engine *e = engine_make(m, 8, 1, NULL);
    int32_t to_a[LEN], to_b[LEN];
    for (int i = 0; i < LEN; i++) to_a[i] = to_b[i] = (11 * i + 5) % 200;
    memcpy(to_a + 30, calls[0], sizeof calls[0]);
    memcpy(to_b + 30, calls[1], sizeof calls[1]);
    assert_int_equal(run_cached(e, m, NULL, to_a, 30), 0);
    assert_int_equal(run_cached(e, m, a, to_a, 34), 30);
    assert_int_equal(run_cached(e, m, b, to_b, 34), 30);
    assert_int_equal(run_cached(e, m, b, to_b, 36), 34); // the same adapter and activation
    assert_int_equal(run_cached(e, m, a, to_b, 36), 30); // does not occur: the base model's rows
    assert_int_equal(run_cached(e, m, NULL, to_b, 38), 36);
    assert_int_equal(run_cached(e, m, plain, to_b, 38), 0);
    assert_int_equal(run_cached(e, m, a, to_a, 34), 0); // the plain adapter took over the slot
    memcpy(to_a + 40, calls[0], sizeof calls[0]);       // the next turn
    assert_int_equal(run_cached(e, m, a, to_a, 44), 30);
    assert_int_equal(run_cached(e, m, NULL, to_a, 44), 40);
    engine_free(e);
    adapter_release(plain);
    adapter_release(a);
    adapter_release(b);
    model_close(m);
}

/* Makes half of the requests ones with activated adapters. Their prompts begin alike, and most of
 * them have the invocation, at different places. */
static void activated_requests(struct engine_fixture *w, struct adapter *const activated[2],
                               const int32_t call[2]) {
    struct rng rng = rng_make(41, RNG_TEST, 0, 0);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct random_request *d = &w->d[i];
        int32_t n = d->r.n_prompt, at = random_below(&rng, (uint32_t)n);
        if (i % 2) continue;
        d->r.n_mix = 0;
        d->r.mix = NULL;
        d->r.adapter = random_below(&rng, 4) ? activated[i / 2 % 2] : NULL;
        if (d->r.adapter) d->r.context_len = d->r.n_keep = 0; // which it does not allow
        for (int32_t j = 0; j < n; j++)
            if (j < at || d->prompt[j] == call[0]) d->prompt[j] = (7 * j + 3) % VOCAB;
        if (at + 2 <= n) memcpy(d->prompt + at, call, 2 * sizeof *call);
    }
}

static void activated_results_invariant(const char *shape, enum tensor_type type, uint32_t id) {
    static const int32_t call[] = {290, 291};
    struct engine_fixture w;
    fixture_open(&w, shape, type, id);
    struct adapter *activated[2] = {fixture_activated(w.a[1], call, 2),
                                    fixture_activated(w.a[2], call, 2)};
    activated_requests(&w, activated, call);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine *e = engine_make(w.m, 256, 1, NULL);
        run_one(e, &w.d[i].r);
        engine_free(e);
    }
    run_together(&w, 256, 64, 2, N_REQUESTS, 0);
    run_together(&w, 7, 5, 2, 3, 3);
    run_together(&w, 1, 3, 1, 2, 5);
    fixture_close(&w);
    adapter_release(activated[0]);
    adapter_release(activated[1]);
}

static void activated_results_are_invariant(void **state) {
    (void)state;
    activated_results_invariant("tiny-llama", TENSOR_F32, 71);
    tested_class = NUMERIC_FAST;
    activated_results_invariant("tiny-qwen3", TENSOR_BF16, 72);
    tested_class = NUMERIC_EXACT;
}

/* The search for the invocation ends before an answer that contains it. Mixes are refused. A
 * session keeps the activation. Embeddings are those of the base or of the adapter where there is
 * no other row. */
static void activation_of_other_calls(void **state) {
    (void)state;
    struct engine_fixture w;
    struct error err;
    fixture_open(&w, "tiny-llama", TENSOR_F32, 15);
    int32_t prompt[24], n = 0, d = w.m->config.d_model;
    for (int i = 0; i < 24; i++) prompt[i] = 17 * i % VOCAB;
    memcpy(prompt + 20, prompt + 5, 2 * sizeof *prompt);
    struct adapter *a = fixture_activated(w.a[1], prompt + 5, 2),
                   *first = fixture_activated(w.a[1], prompt, 1);
    struct engine *e = engine_make(w.m, 64, 3, NULL), *other = engine_make(w.m, 64, 3, NULL);
    struct engine_request r[3] = {{.adapter = a}, {.adapter = a, .n_invocation_prompt = 19}};
    r[2] = (struct engine_request){.adapter = a, .n_invocation_prompt = 25};
    for (int i = 0; i < 3; i++) {
        r[i].prompt = prompt, r[i].n_prompt = 24, r[i].prompt_logprobs = true;
        if (i < 2) run_one(e, &r[i]);
    }
    assert_true(r[0].prompt_logprob[5] == r[1].prompt_logprob[5]);
    assert_true(r[0].prompt_logprob[6] != r[1].prompt_logprob[6]);
    assert_int_equal(engine_submit(e, &r[2], &err), ERR_USAGE);
    struct weighted_adapter half = {a, {0, 0}, 0.5f};
    struct engine_request mix = {.prompt = prompt, .n_prompt = 24, .mix = &half, .n_mix = 1};
    assert_int_equal(engine_submit(e, &mix, &err), ERR_MISMATCH);
    assert_non_null(strstr(err.text, "alora_invocation_tokens"));
    const char *path = "/tmp/shoal-test-activated", *hash = model_hash(w.m, &err);
    struct token_seq all = {prompt, 24};
    run_cached(e, w.m, a, prompt, 24);
    assert_int_equal(engine_session_save(e, all, a, hash, path, &err), OK);
    assert_int_equal(engine_session_load(other, hash, path, &n, &err), OK);
    assert_int_equal(n, 24);
    assert_int_equal(run_cached(other, w.m, a, prompt, 24), 23);
    assert_int_equal(engine_session_load(other, hash, path, &n, &err), OK);
    assert_int_equal(run_cached(other, w.m, NULL, prompt, 24), 20);
    unlink(path);
    float *v = xcalloc((size_t)(4 * d), sizeof *v);
    struct token_seq text = {prompt, 5};
    struct adapter *const by[] = {NULL, a, w.a[1], first};
    for (int i = 0; i < 4; i++)
        assert_int_equal(engine_embed(e, &text, 1, by[i], v + i * d, &err), OK);
    assert_memory_equal(v, v + d, (size_t)d * sizeof *v);
    assert_memory_equal(v + 2 * d, v + 3 * d, (size_t)d * sizeof *v);
    assert_memory_not_equal(v, v + 2 * d, (size_t)d * sizeof *v);
    free(v);
    engine_request_release(&r[0]);
    engine_request_release(&r[1]);
    engine_free(e);
    engine_free(other);
    adapter_release(a);
    adapter_release(first);
    fixture_close(&w);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "hashes") == 0) return hashes_print();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_invariant_f32),
        cmocka_unit_test(results_invariant_q8),
        cmocka_unit_test(results_invariant_fast),
        cmocka_unit_test(results_invariant_small),
        cmocka_unit_test(cancel_does_not_change_others),
        cmocka_unit_test(prompt_logprobs_equal_generated),
        cmocka_unit_test(sampling_options_have_effect),
        cmocka_unit_test(typical_equals_naive),
        cmocka_unit_test(output_matches_grammar),
        cmocka_unit_test(grammars_do_not_delay_others),
        cmocka_unit_test(loops_and_stop_texts),
        cmocka_unit_test(embeddings_are_means),
        cmocka_unit_test(sessions_resume),
        cmocka_unit_test(mix_is_a_weighted_sum),
        cmocka_unit_test(mixes_with_dora),
        cmocka_unit_test(activated_rows_equal_naive),
        cmocka_unit_test(activated_adapters_share_the_base),
        cmocka_unit_test(activated_results_are_invariant),
        cmocka_unit_test(activation_of_other_calls),
        cmocka_unit_test(levels_agree),
        cmocka_unit_test(choices_are_exact),
        cmocka_unit_test(single_choice_has_equal_bits),
        cmocka_unit_test(choices_only_normalises_the_choices),
        cmocka_unit_test(choices_follow_generation),
        cmocka_unit_test(stops_and_limits),
        cmocka_unit_test(generation_is_sampled_forward),
        cmocka_unit_test(context_shift_equals_shorter_prompts),
        cmocka_unit_test(base_is_read_once_per_step),
        cmocka_unit_test(short_prompts_do_not_wait),
        cmocka_unit_test(long_prompts_end),
        cmocka_unit_test(idle_steps_are_limited),
        cmocka_unit_test(prefixes_are_shared),
        cmocka_unit_test(generated_tokens_are_not_reused),
        cmocka_unit_test(sampler_equals_naive),
        cmocka_unit_test(sampler_distribution),
        cmocka_unit_test(sampler_filters),
        cmocka_unit_test(sampler_edges),
        cmocka_unit_test(invalid_requests_are_refused),
        cmocka_unit_test(invalid_options_are_refused),
        cmocka_unit_test(engine_freed_early),
        cmocka_unit_test(request_keys_are_distinct),
        cmocka_unit_test(stories_in_a_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
