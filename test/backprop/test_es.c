/*
 * test_es: evolution strategies compared with the trainer's gradient and with a naive
 * implementation, and equal bits for any threads, passes and interruptions.
 *
 * The naive implementation builds a member explicitly: it derives its direction from the counter,
 * writes W + s B A ± σ s (E_B A + B E_A) over the matrices of a model and computes the loss of that
 * model with the trainer. The statistics (cosine and projection of the estimate on the gradient)
 * are compared with the theory for independent signs in that many dimensions, with tolerance for
 * the effect of rank-1 noise and of a finite σ.
 */
#include "backprop/backprop.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static struct train_options options(void) {
    struct train_options o;
    options_default(train_option_rows, &o);
    free(o.kv_cache_dtype);
    o.kv_cache_dtype = NULL; // f32
    o.lora_dropout = 0;
    o.max_grad_norm = 0;
    return o;
}

static struct es_options es_options(int64_t population, double sigma, const char *shaping) {
    struct es_options o;
    options_default(es_option_rows, &o);
    o.population = population;
    o.sigma = sigma;
    free(o.shaping);
    o.shaping = xstrdup(shaping);
    return o;
}

/* Samples of different lengths; targets are the second half, except one sample without targets. */
static struct train_sample *samples_make(int n, int32_t vocab, uint32_t id) {
    struct rng rng = rng_make(3, RNG_TEST, id, 0);
    struct train_sample *s = xcalloc((size_t)n, sizeof *s);
    for (int i = 0; i < n; i++) {
        s[i].n = 5 + (int32_t)rng_below(&rng, 40);
        s[i].tokens = xcalloc((size_t)s[i].n, sizeof *s[i].tokens);
        s[i].mask = xcalloc((size_t)s[i].n, 1);
        for (int32_t k = 0; k < s[i].n; k++) {
            s[i].tokens[k] = (int32_t)rng_below(&rng, (uint32_t)vocab);
            s[i].mask[k] = i != 1 && k >= s[i].n / 2 && k < s[i].n - 2;
        }
    }
    return s;
}

static void samples_free(struct train_sample *s, int n) {
    for (int i = 0; i < n; i++) train_sample_release(&s[i]);
    free(s);
}

/* All gradients of the trainer, concatenated. */
static double *gradients(struct trainer *t, int64_t *n) {
    double *g = NULL;
    *n = 0;
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        g = xrealloc(g, (size_t)(*n + x->n) * sizeof *g);
        for (int64_t k = 0; k < x->n; k++) g[(*n)++] = (double)x->g[k];
    }
    return g;
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The gradient of the mean loss. */
static double *true_gradient(const struct model *m, struct adapter *a, const struct train_sample *s,
                             int n, int64_t *dims) {
    struct train_options o = options();
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, NULL, &err);
    struct update_stats st;
    assert_int_equal(trainer_accumulate(t, s, n, &err), OK);
    double *g = gradients(t, dims);
    assert_int_equal(trainer_update(t, 0, &st, &err), OK);
    for (int64_t i = 0; i < *dims; i++) g[i] /= (double)st.targets;
    trainer_free(t);
    options_release(train_option_rows, &o);
    return g;
}

static double *estimate(const struct model *m, struct adapter *a, const struct train_sample *s,
                        int n, const struct es_options *eo, uint64_t seed, struct pool *pool,
                        int64_t *dims) {
    struct train_options o = options();
    o.seed = (int64_t)seed;
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, pool, &err);
    struct es *e = es_new(m, eo, pool);
    assert_int_equal(es_accumulate(e, t, 0, s, n, &err), OK);
    double *g = gradients(t, dims);
    es_free(e);
    trainer_free(t);
    options_release(train_option_rows, &o);
    return g;
}

/* w += s (B A + sigma (E_B A + B E_A)) of one projection and pair. */
static void naive_add_member(const struct model *m, const struct adapter *a, int32_t l, enum proj p,
                             const struct lora_perturbation *z, double sigma, float *w) {
    const struct model_config *c = &m->config;
    const struct lora *lo = &a->loras[l * N_PROJ + p];
    int64_t in = proj_in(c, p), out = proj_out(c, p);
    float *u = xcalloc((size_t)(in + out) + 2 * (size_t)lo->r, sizeof *u), *v = u + out,
          *sp = v + in, *sq = sp + lo->r;
    lora_perturbation_signs(z, l, p, true, 0, out, DTYPE_F32, u);
    lora_perturbation_signs(z, l, p, false, 0, in, DTYPE_F32, v);
    lora_perturbation_signs(z, c->n_layers + l, p, true, 0, lo->r, DTYPE_F32, sp);
    lora_perturbation_signs(z, c->n_layers + l, p, false, 0, lo->r, DTYPE_F32, sq);
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            double sum = 0;
            for (int32_t r = 0; r < lo->r; r++) {
                double av = (double)lo->a[r * in + i], bv = (double)lo->b[o * lo->r + r];
                sum += bv * av + sigma * (double)(u[o] * sp[r]) * av +
                       sigma * bv * (double)(sq[r] * v[i]);
            }
            w[o * in + i] += (float)((double)lo->scale * sum);
        }
    free(u);
}

/* The mean loss of one member: of a model with the member's matrices. */
static double naive_loss(struct adapter *a, const struct lora_perturbation *z, double sigma,
                         const struct train_sample *s, int n) {
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    struct train_options o = options();
    struct adapter_config none = {.r = 1, .alpha = 1, .target = {true}};
    struct adapter *empty = adapter_new(&m->config, &none, 1);
    for (int32_t l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++)
            if (a->loras[l * N_PROJ + p].r)
                naive_add_member(m, a, l, (enum proj)p, z, sigma,
                                 (float *)(uintptr_t)m->layers[l].proj[p].data);
    struct trainer *t = trainer_new_lora(m, &empty, 1, &o, NULL, &err);
    double nll;
    int64_t targets;
    assert_int_equal(trainer_eval_loss(t, s, n, &nll, &targets, &err), OK);
    trainer_free(t);
    adapter_release(empty);
    model_close(m);
    options_release(train_option_rows, &o);
    return nll / (double)targets;
}

/* One pair's unshaped estimate is its difference of losses over 2σ along its direction; the naive
 * implementation, which computes every layer, gives the same difference. */
static void check_member(int32_t first) {
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a =
        fixture_adapter_from(&m->config, first, 3, "q_proj,up_proj,down_proj", 0.05f, 7);
    struct train_sample *s = samples_make(5, m->config.vocab_size, 1);
    struct es_options eo = es_options(2, 0.03, "none");
    eo.pass_rows = 50;
    int64_t dims;
    double *g = estimate(m, a, s, 5, &eo, 9, NULL, &dims);
    struct rng rng = rng_make(9, RNG_NOISE, 0, 0);
    const struct lora_perturbation z = {rng_u64(&rng), 0};
    double plus = naive_loss(a, &z, 0.03, s, 5), minus = naive_loss(a, &z, -0.03, s, 5),
           slope = (plus - minus) / (2 * 0.03);
    print_message("member: %.6f and %.6f, slope %.6f, estimate %.6f\n", plus, minus, slope,
                  sqrt(dot(g, g, dims) / (double)dims));
    assert_true(fabs(slope) > 1e-2);
    for (int64_t i = 0; i < dims; i++) assert_true(fabs(fabs(g[i]) - fabs(slope)) < 2e-4);
    /* the direction's sign: the first number of the first A is q[0] v[0] */
    float v[16], q[16];
    lora_perturbation_signs(&z, first, PROJ_Q, false, 0, 16, DTYPE_F32, v);
    lora_perturbation_signs(&z, m->config.n_layers + first, PROJ_Q, false, 0, 3, DTYPE_F32, q);
    assert_true(g[0] * (double)(v[0] * q[0]) * slope > 0);
    free(g);
    samples_free(s, 5);
    options_release(es_option_rows, &eo);
    adapter_release(a);
    model_close(m);
}

static void test_member(void **state) {
    (void)state;
    check_member(0);
    check_member(1); // layers below the adapted ones are computed once for both members
}

/* For signs in D dimensions the estimate is the gradient plus noise of |gradient| · sqrt(D / P) in
 * total, with P pairs. So its projection on the gradient has the mean 1 and a deviation of about
 * sqrt(1 / P) · (a constant near 1), and its cosine is about sqrt(P / (P + D)). */
static void test_unbiased(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 2, "q_proj,v_proj", 0.05f, 7);
    struct train_sample *s = samples_make(4, m->config.vocab_size, 2);
    struct pool *pool = pool_new(2);
    int64_t dims;
    double *truth = true_gradient(m, a, s, 4, &dims), cosines[3];
    for (int k = 0; k < 3; k++) {
        int64_t pairs = 32 << 2 * k;
        struct es_options eo = es_options(2 * pairs, 1e-3, "none");
        double *g = estimate(m, a, s, 4, &eo, (uint64_t)k, pool, &dims);
        double along = dot(g, truth, dims) / dot(truth, truth, dims),
               expected = sqrt((double)pairs / (double)(pairs + dims));
        cosines[k] = dot(g, truth, dims) / sqrt(dot(g, g, dims) * dot(truth, truth, dims));
        print_message("%lld pairs in %lld dimensions: projection %.3f, cosine %.4f (theory %.4f)\n",
                      (long long)pairs, (long long)dims, along, cosines[k], expected);
        assert_true(fabs(along - 1) < 4 * sqrt(2.0 / (double)pairs));
        assert_true(cosines[k] > 0.6 * expected && cosines[k] < 1.6 * expected);
        free(g);
        options_release(es_option_rows, &eo);
    }
    assert_true(cosines[0] < cosines[1] && cosines[1] < cosines[2]);
    free(truth);
    samples_free(s, 4);
    pool_free(pool);
    adapter_release(a);
    model_close(m);
}

/* The estimate is divided by σ: with a tenth of the step it has the same length. */
static void test_sigma(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 2, "q_proj,v_proj", 0.05f, 7);
    struct train_sample *s = samples_make(4, m->config.vocab_size, 2);
    struct es_options wide = es_options(16, 1e-2, "none"), near = es_options(16, 1e-3, "none");
    int64_t dims;
    double *g = estimate(m, a, s, 4, &wide, 1, NULL, &dims),
           *h = estimate(m, a, s, 4, &near, 1, NULL, &dims);
    assert_true(dot(g, h, dims) / sqrt(dot(g, g, dims) * dot(h, h, dims)) > 0.99);
    assert_true(fabs(sqrt(dot(g, g, dims) / dot(h, h, dims)) - 1) < 0.05);
    free(g);
    free(h);
    samples_free(s, 4);
    options_release(es_option_rows, &wide);
    options_release(es_option_rows, &near);
    adapter_release(a);
    model_close(m);
}

struct setup {
    struct model *m;
    struct adapter *a[2];
    struct train_sample *s;
};

static struct setup setup_make(enum tensor_type type, int32_t first) {
    struct setup u = {.m = fixture_model("tiny-llama", false, type, NUMERIC_EXACT)};
    u.a[0] = fixture_adapter_from(&u.m->config, first, 3, "all-linear", 0.05f, 7);
    u.a[1] = fixture_adapter(&u.m->config, 8, "v_proj", 0.05f, 8);
    u.s = samples_make(6, u.m->config.vocab_size, 3);
    return u;
}

static void setup_release(struct setup *u) {
    samples_free(u->s, 6);
    adapter_release(u->a[0]);
    adapter_release(u->a[1]);
    model_close(u->m);
}

static void params_hash(struct trainer *t, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        sha256_update(&h, x->w, (size_t)x->n * sizeof *x->w);
    }
    sha256_final(&h, out);
}

/* Updates [from, to) of the first adapter, or of both. */
static void run_updates(struct trainer *t, struct es *e, const struct setup *u, int n_adapters,
                        int from, int to) {
    struct update_stats st;
    for (int k = from; k < to; k++) {
        for (int i = 0; i < n_adapters; i++)
            assert_int_equal(es_accumulate(e, t, i, u->s + 2 * (k % 2), 4, &err), OK);
        assert_int_equal(trainer_update(t, 0.01f, &st, &err), OK);
    }
}

/* The number of threads and the division into passes change no bit, for any weight type and
 * fitness. */
static void test_bits(void **state) {
    (void)state;
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_NF4};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct setup u = setup_make(types[i], i % 2);
        char want[HASH_LEN], got[HASH_LEN];
        for (int k = 0; k < 4; k++) {
            struct pool *pool = pool_new(1 + k % 2);
            struct train_options o = options();
            struct es_options eo = es_options(6, 0.02, i % 2 ? "zscore" : "rank");
            eo.pass_rows = k < 2 ? 1024 : 50;
            struct trainer *t = trainer_new_lora(u.m, u.a, 1, &o, pool, &err);
            struct es *e = es_new(u.m, &eo, pool);
            run_updates(t, e, &u, 1, 0, 2);
            params_hash(t, k ? got : want);
            if (k) assert_string_equal(want, got);
            es_free(e);
            trainer_free(t);
            options_release(es_option_rows, &eo);
            options_release(train_option_rows, &o);
            pool_free(pool);
        }
        setup_release(&u);
    }
}

/* Stopped after two updates of four and continued from the file: the bits of an uninterrupted run.
 * Two adapters trained together have the bits of separate runs. */
static void test_resume(void **state) {
    (void)state;
    char path[] = "/tmp/shoal-es-XXXXXX", want[HASH_LEN], got[HASH_LEN];
    struct setup u = setup_make(TENSOR_Q8_0, 1);
    struct train_options o = options();
    struct es_options eo = es_options(8, 0.02, "zscore");
    int fd = mkstemp(path);
    struct trainer *t = trainer_new_lora(u.m, u.a, 2, &o, NULL, &err), *c;
    struct es *e = es_new(u.m, &eo, NULL), *f = es_new(u.m, &eo, NULL);
    run_updates(t, e, &u, 2, 0, 2);
    assert_int_equal(trainer_save(t, path, NULL, &err), OK);
    run_updates(t, e, &u, 2, 2, 4);
    c = trainer_new_lora(u.m, u.a, 2, &o, NULL, &err);
    assert_int_equal(trainer_load(c, path, NULL, &err), OK);
    run_updates(c, f, &u, 2, 2, 4);
    params_hash(t, want);
    params_hash(c, got);
    assert_string_equal(want, got);
    struct trainer *alone = trainer_new_lora(u.m, &u.a[1], 1, &o, NULL, &err);
    run_updates(alone, f, &u, 1, 0, 4);
    struct adapter *one = trainer_export_adapter(alone, 0, NULL),
                   *two = trainer_export_adapter(t, 1, NULL);
    assert_string_equal(one->hash, two->hash);
    adapter_release(one);
    adapter_release(two);
    trainer_free(alone);
    trainer_free(t);
    trainer_free(c);
    es_free(e);
    es_free(f);
    close(fd);
    unlink(path);
    options_release(es_option_rows, &eo);
    options_release(train_option_rows, &o);
    setup_release(&u);
}

/* Learns without a gradient. */
static void test_learns(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", true, TENSOR_Q8_0, NUMERIC_EXACT);
    struct adapter_config ac = {.r = 1, .alpha = 2, .target = {[PROJ_V] = true, [PROJ_O] = true}};
    struct adapter *a = adapter_new(&m->config, &ac, 1);
    struct train_sample *s = samples_make(2, m->config.vocab_size, 4);
    struct train_options o = options();
    struct es_options eo = es_options(64, 0.02, "zscore");
    struct pool *pool = pool_new(2);
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, pool, &err);
    struct es *e = es_new(m, &eo, pool);
    struct update_stats st = {0};
    double first = 0;
    for (int k = 0; k < 60; k++) {
        assert_int_equal(es_accumulate(e, t, 0, s, 2, &err), OK);
        assert_int_equal(trainer_update(t, 0.05f, &st, &err), OK);
        if (k == 0) first = st.loss;
    }
    print_message("loss %.4f to %.4f in 60 updates of 64 members\n", first, st.loss);
    assert_true(st.loss < 0.8 * first);
    assert_true(fabs(es_fitness_mean(e) + st.loss) < 1e-9);
    es_free(e);
    trainer_free(t);
    pool_free(pool);
    samples_free(s, 2);
    options_release(es_option_rows, &eo);
    options_release(train_option_rows, &o);
    adapter_release(a);
    model_close(m);
}

/* The samples' answers are the model's greedy output, so at a tiny σ every member is correct; with
 * one wrong token none is. */
static void test_exact(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 2, "q_proj", 0.05f, 7);
    struct forward *f = forward_new(
        m, &(struct forward_options){.max_rows = 1, .n_slots = 1, .slot_len = KV_PAGE_SIZE});
    float *logits = xcalloc((size_t)m->config.vocab_size, sizeof *logits);
    int32_t tokens[14] = {3, 9, 17, 5};
    uint8_t mask[14] = {0};
    for (int32_t i = 0; i < 13; i++) {
        struct batch_row row = {tokens[i], i, 0};
        struct lora_part part;
        struct lora_segment g = adapter_lora_segment(a, 0, 1, &part);
        int32_t out = 0, best = 0;
        forward_run(f, &row, 1, &g, 1, &out, 1, logits);
        for (int32_t v = 1; v < m->config.vocab_size; v++)
            if (logits[v] > logits[best]) best = v;
        if (i >= 3) tokens[i + 1] = best, mask[i + 1] = 1;
    }
    struct train_sample s[] = {{tokens, mask, 14, 0}, {tokens, mask, 9, 0}};
    struct train_options o = options();
    struct es_options eo = es_options(4, 1e-9, "none");
    free(eo.fitness);
    eo.fitness = xstrdup("exact");
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, NULL, &err);
    struct es *e = es_new(m, &eo, NULL);
    assert_int_equal(es_accumulate(e, t, 0, s, 2, &err), OK);
    assert_true(es_fitness_mean(e) == 1);
    assert_int_equal(trainer_update(t, 0, NULL, &err), OK);
    tokens[12] = (tokens[12] + 1) % m->config.vocab_size;
    assert_int_equal(es_accumulate(e, t, 0, s, 2, &err), OK);
    assert_true(es_fitness_mean(e) == 0.5); // the shorter sample ends before it
    es_free(e);
    trainer_free(t);
    options_release(es_option_rows, &eo);
    options_release(train_option_rows, &o);
    free(logits);
    forward_free(f);
    adapter_release(a);
    model_close(m);
}

/* Keys and values have the trainer's type, also if an es serves trainers of two types in turn: at a
 * tiny σ the mean fitness is the trainer's loss. */
static void test_kv(void **state) {
    (void)state;
    static const char *const names[] = {"f16", "i8", "f32"};
    struct setup u = setup_make(TENSOR_F32, 0);
    struct es_options eo = es_options(2, 1e-9, "none");
    struct es *e = es_new(u.m, &eo, NULL);
    double loss[ARRAY_LEN(names)];
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct train_options o = options();
        o.kv_cache_dtype = xstrdup(names[i]);
        struct trainer *t = trainer_new_lora(u.m, u.a, 1, &o, NULL, &err);
        struct train_sample s = u.s[0];
        int64_t targets;
        double nll;
        assert_int_equal(trainer_eval_loss(t, &s, 1, &nll, &targets, &err), OK);
        assert_int_equal(es_accumulate(e, t, 0, &s, 1, &err), OK);
        loss[i] = -es_fitness_mean(e);
        assert_float_equal(loss[i], nll / (double)targets, 1e-6);
        trainer_free(t);
        options_release(train_option_rows, &o);
    }
    assert_true(loss[0] != loss[1] && loss[1] != loss[2] && loss[2] != loss[0]);
    es_free(e);
    options_release(es_option_rows, &eo);
    setup_release(&u);
}

/* The memory is a forward pass, one chunk of logits, the adapter and the maps of the pairs in a
 * pass, 2 / R of an adapter each; it does not grow with the population. */
static void test_memory(void **state) {
    (void)state;
    struct setup u = setup_make(TENSOR_Q4_0, 0);
    struct train_options o = options();
    size_t bytes[2], adapter = adapter_param_count(&u.m->config, &u.a[0]->config) * sizeof(float);
    for (int k = 0; k < 2; k++) {
        struct es_options eo = es_options(k ? 256 : 32, 0.02, "zscore");
        struct trainer *t = trainer_new_lora(u.m, u.a, 1, &o, NULL, &err);
        struct es *e = es_new(u.m, &eo, NULL);
        assert_int_equal(es_accumulate(e, t, 0, u.s, 6, &err), OK);
        bytes[k] = es_bytes(e);
        es_free(e);
        trainer_free(t);
        options_release(es_option_rows, &eo);
    }
    struct forward_options fo = {.max_rows = 1024,
                                 .n_slots = 64,
                                 .slot_len = 64,
                                 .n_pages = 1024 / KV_PAGE_SIZE + 65,
                                 .max_parts = 128};
    size_t inference =
        forward_bytes(&u.m->config, &fo) + 1024 * (size_t)u.m->config.vocab_size * sizeof(float);
    print_message("%zu bytes with 32 members, %zu with 256; inference %zu, the adapter %zu\n",
                  bytes[0], bytes[1], inference, adapter);
    assert_true(bytes[1] < bytes[0] + (16u << 10));
    assert_true(bytes[0] < inference + 10 * adapter + (512u << 10));
    options_release(train_option_rows, &o);
    setup_release(&u);
}

static void test_refusals(void **state) {
    (void)state;
    struct train_options o = options();
    struct es_options eo = es_options(7, 0.02, "zscore");
    assert_int_equal(es_options_check(&eo, &o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "population 7 is odd"));
    eo.population = 8;
    assert_int_equal(es_options_check(&eo, &o, &err), OK);
    o.use_dora = true;
    assert_int_equal(es_options_check(&eo, &o, &err), ERR_USAGE);
    o.use_dora = false;
    o.gradient_checkpointing = true;
    assert_int_equal(es_options_check(&eo, &o, &err), ERR_USAGE);
    o.gradient_checkpointing = false;
    eo.shaping[0] = 'Z';
    assert_int_equal(es_options_check(&eo, &o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "shaping 'Zscore' is not known; there are"));
    options_release(es_option_rows, &eo);
    options_release(train_option_rows, &o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_member), cmocka_unit_test(test_unbiased),
        cmocka_unit_test(test_sigma),  cmocka_unit_test(test_bits),
        cmocka_unit_test(test_resume), cmocka_unit_test(test_learns),
        cmocka_unit_test(test_exact),  cmocka_unit_test(test_kv),
        cmocka_unit_test(test_memory), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
