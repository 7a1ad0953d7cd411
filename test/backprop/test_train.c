/*
 * test_train: the trainer compared with a separate double-precision forward pass, and equal bits
 * for any threads, batches and interruptions.
 *
 * The reference below is the textbook model: one token after another, no batching, exp and cos from
 * libm. Every element of every gradient is compared with its central difference on small models of
 * both architectures, and a sample of elements on the tiny built-in shapes. No test uses the
 * trainer's internals.
 */
#include "backprop/backprop.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_LAYERS 4
#define MAX_LEN 160

struct ref_layer {
    double *attn_norm, *ffn_norm, *q_norm, *k_norm, *w[N_PROJ], *a[N_PROJ], *b[N_PROJ];
    int r[N_PROJ];
};
struct ref {
    struct model_config c;
    double *embed, *head, *final_norm, scale;
    int invocation; /* token from whose last occurrence before the targets on the adapter applies,
                       or -1 */
    bool active;    /* the adapter applies to the current position */
    struct ref_layer layers[MAX_LAYERS];
    /* low-rank parts of embedding [vocab_r][V], [D][vocab_r] and head, or NULL */
    double *embed_a, *embed_b, *head_a, *head_b;
    int vocab_r;
};

static double *widen(const float *x, int64_t n) {
    double *y = xmalloc((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

static void ref_init(struct ref *r, const struct model *m) {
    *r = (struct ref){.c = m->config, .invocation = -1};
    r->embed = widen(m->embed.data, m->embed.n * m->embed.k);
    r->head = r->c.tied ? r->embed : widen(m->head.data, m->head.n * m->head.k);
    r->final_norm = widen(m->final_norm, r->c.d_model);
    for (int l = 0; l < r->c.n_layers; l++) {
        const struct model_layer *from = &m->layers[l];
        struct ref_layer *to = &r->layers[l];
        to->attn_norm = widen(from->attn_norm, r->c.d_model);
        to->ffn_norm = widen(from->ffn_norm, r->c.d_model);
        if (from->q_norm) {
            to->q_norm = widen(from->q_norm, r->c.head_dim);
            to->k_norm = widen(from->k_norm, r->c.head_dim);
        }
        for (int p = 0; p < N_PROJ; p++)
            to->w[p] = widen(from->proj[p].data, from->proj[p].n * from->proj[p].k);
    }
}

static void ref_release(struct ref *r) {
    if (r->head != r->embed) free(r->head);
    free(r->embed);
    free(r->final_norm);
    for (int l = 0; l < r->c.n_layers; l++) {
        struct ref_layer *y = &r->layers[l];
        free(y->attn_norm), free(y->ffn_norm), free(y->q_norm), free(y->k_norm);
        for (int p = 0; p < N_PROJ; p++) free(y->w[p]), free(y->a[p]), free(y->b[p]);
    }
}

static void ref_norm(double *y, const double *x, const double *g, int n, double eps) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    double s = 1 / sqrt(sum / n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * s * g[i];
}

static void ref_product(double *y, const double *w, const double *x, int out, int in) {
    for (int o = 0; o < out; o++) {
        y[o] = 0;
        for (int i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
    }
}

static void ref_linear(const struct ref *r, int l, enum proj p, double *y, const double *x) {
    const struct ref_layer *lay = &r->layers[l];
    int in = proj_in(&r->c, p), out = proj_out(&r->c, p);
    double h[64], add[256];
    ref_product(y, lay->w[p], x, out, in);
    if (!lay->a[p] || !r->active) return;
    ref_product(h, lay->a[p], x, lay->r[p], in);
    ref_product(add, lay->b[p], h, out, lay->r[p]);
    for (int o = 0; o < out; o++) y[o] += r->scale * add[o];
}

static void ref_heads(const struct ref *r, double *x, const double *norm, int heads, int pos) {
    int e = r->c.head_dim, half = e / 2;
    for (int h = 0; h < heads; h++, x += e) {
        if (norm) ref_norm(x, x, norm, e, (double)r->c.rms_norm_eps);
        for (int i = 0; i < half; i++) {
            double angle = pos * pow((double)r->c.rope_theta, -2.0 * i / e), a = x[i],
                   b = x[i + half];
            x[i] = a * cos(angle) - b * sin(angle);
            x[i + half] = b * cos(angle) + a * sin(angle);
        }
    }
}

struct ref_cache {
    double k[MAX_LAYERS][MAX_LEN][128], v[MAX_LAYERS][MAX_LEN][128];
};

static void ref_attend(const struct ref *r, const struct ref_cache *cache, int l, int pos,
                       const double *q, double *out) {
    int e = r->c.head_dim, group = r->c.n_heads / r->c.n_kv_heads;
    for (int h = 0; h < r->c.n_heads; h++) {
        double p[MAX_LEN], sum = 0;
        for (int j = 0; j <= pos; j++) {
            p[j] = 0;
            for (int i = 0; i < e; i++) p[j] += q[h * e + i] * cache->k[l][j][h / group * e + i];
            sum += p[j] = exp(p[j] / sqrt(e));
        }
        for (int i = 0; i < e; i++) {
            out[h * e + i] = 0;
            for (int j = 0; j <= pos; j++)
                out[h * e + i] += p[j] / sum * cache->v[l][j][h / group * e + i];
        }
    }
}

static void ref_layer_run(const struct ref *r, struct ref_cache *cache, int l, int pos, double *x) {
    const struct ref_layer *lay = &r->layers[l];
    double xn[128], q[128], att[128], y[128], gate[256], up[256], eps = (double)r->c.rms_norm_eps;
    ref_norm(xn, x, lay->attn_norm, r->c.d_model, eps);
    ref_linear(r, l, PROJ_Q, q, xn);
    ref_linear(r, l, PROJ_K, cache->k[l][pos], xn);
    ref_linear(r, l, PROJ_V, cache->v[l][pos], xn);
    ref_heads(r, q, lay->q_norm, r->c.n_heads, pos);
    ref_heads(r, cache->k[l][pos], lay->k_norm, r->c.n_kv_heads, pos);
    ref_attend(r, cache, l, pos, q, att);
    ref_linear(r, l, PROJ_O, y, att);
    for (int i = 0; i < r->c.d_model; i++) x[i] += y[i];
    ref_norm(xn, x, lay->ffn_norm, r->c.d_model, eps);
    ref_linear(r, l, PROJ_GATE, gate, xn);
    ref_linear(r, l, PROJ_UP, up, xn);
    for (int i = 0; i < r->c.d_ff; i++) gate[i] *= up[i] / (1 + exp(-gate[i]));
    ref_linear(r, l, PROJ_DOWN, y, gate);
    for (int i = 0; i < r->c.d_model; i++) x[i] += y[i];
}

static double ref_nll(const struct ref *r, const double *x, int token) {
    double xn[128], logits[512], sum = 0;
    ref_norm(xn, x, r->final_norm, r->c.d_model, (double)r->c.rms_norm_eps);
    ref_product(logits, r->head, xn, r->c.vocab_size, r->c.d_model);
    if (r->head_a) {
        double h[64], add[512];
        ref_product(h, r->head_a, xn, r->vocab_r, r->c.d_model);
        ref_product(add, r->head_b, h, r->c.vocab_size, r->vocab_r);
        for (int i = 0; i < r->c.vocab_size; i++) logits[i] += r->scale * add[i];
    }
    for (int i = 0; i < r->c.vocab_size; i++) sum += exp(logits[i]);
    return log(sum) - logits[token];
}

static void ref_embed(const struct ref *r, int token, double *x) {
    int d = r->c.d_model;
    memcpy(x, r->embed + token * d, (size_t)d * sizeof *x);
    for (int i = 0; r->embed_a && i < d; i++)
        for (int k = 0; k < r->vocab_r; k++)
            x[i] +=
                r->scale * r->embed_b[i * r->vocab_r + k] * r->embed_a[k * r->c.vocab_size + token];
}

/* The first position that the adapter changes. */
static int ref_activation(const struct ref *r, const struct train_sample *s) {
    int at = -1;
    for (int i = 0; i < s->n && !s->mask[i]; i++)
        if (s->tokens[i] == r->invocation) at = i;
    return r->invocation < 0 ? 0 : at;
}

/* Summed over the samples of that adapter (-1: all). */
static double ref_loss(struct ref *r, const struct train_sample *samples, int n, int adapter) {
    static struct ref_cache cache;
    double nll = 0, x[128];
    for (int s = 0; s < n; s++) {
        if (adapter >= 0 && samples[s].adapter != adapter) continue;
        for (int i = 0; i + 1 < samples[s].n; i++) {
            r->active = i >= ref_activation(r, &samples[s]);
            ref_embed(r, samples[s].tokens[i], x);
            for (int l = 0; l < r->c.n_layers; l++) ref_layer_run(r, &cache, l, i, x);
            if (samples[s].mask[i + 1]) nll += ref_nll(r, x, samples[s].tokens[i + 1]);
        }
    }
    return nll;
}

static struct error err;

static struct model_config shape(const char *name, bool small) {
    struct model_config c;
    assert_int_equal(model_preset_find(name, &c, &err), OK);
    if (!small) return c;
    c.d_model = 16;
    c.d_ff = 24;
    c.vocab_size = 64;
    return c;
}

static struct train_sample sample_make(uint32_t id, int32_t n, int32_t vocab, int32_t adapter) {
    struct rng r = rng_make(7, RNG_TEST, id, 0);
    struct train_sample s = {.tokens = xcalloc((size_t)n, sizeof(int32_t)),
                             .mask = xcalloc((size_t)n, 1),
                             .n = n,
                             .adapter = adapter};
    for (int32_t i = 0; i < n; i++) {
        s.tokens[i] = (int32_t)rng_below(&r, (uint32_t)vocab);
        s.mask[i] = i >= n / 2;
    }
    return s;
}

/* If at least 0, all samples of samples_make have this token at n / 4, before their targets. */
static int32_t activating_token = -1;

/* n samples of several lengths for adapters 0, 1, … in turn; some end in tokens that are no
 * targets. */
static struct train_sample *samples_make(int n, int32_t vocab, int adapters, uint32_t id) {
    static const int32_t lens[] = {5, 9, 2, 17, 7, 12};
    struct train_sample *v = xcalloc((size_t)n, sizeof *v);
    for (int i = 0; i < n; i++) {
        v[i] = sample_make(id + (uint32_t)i, lens[i % 6], vocab, i % adapters);
        if (i % 3 == 1) v[i].mask[v[i].n - 1] = 0;
        if (activating_token >= 0) v[i].tokens[v[i].n / 4] = activating_token;
    }
    return v;
}

static void samples_free(struct train_sample *v, int n) {
    for (int i = 0; i < n; i++) train_sample_release(&v[i]);
    free(v);
}

static struct train_options options(void) {
    struct train_options o;
    options_default(train_option_rows, &o);
    free(o.kv_cache_dtype);
    o.kv_cache_dtype = NULL; // f32, as in the reference
    o.lora_dropout = 0;
    return o;
}

static void set_kv(struct train_options *o, const char *name) {
    free(o->kv_cache_dtype);
    o->kv_cache_dtype = xstrdup(name);
}

/* Weights far larger than at initialisation, so that gradients exceed rounding errors. */
static struct model *model_of(const struct model_config *c, enum numeric_class cls,
                              struct pool *pool) {
    struct model *m = model_new_random(c, 1, cls);
    struct train_options o = options();
    struct trainer *t = trainer_new_full(m, &o, pool, &err);
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        struct train_tensor *x = trainer_tensor(t, i);
        bool norm = strstr(x->name, "norm") != NULL;
        for (int64_t e = 0; e < x->n; e++)
            x->w[e] = norm ? 1 + 0.3f * rng_normal(&r) : 0.25f * rng_normal(&r);
    }
    trainer_free(t);
    options_release(train_option_rows, &o);
    return m;
}

static struct model *model_make(const struct model_config *c, struct pool *pool) {
    return model_of(c, NUMERIC_EXACT, pool);
}

static struct adapter *adapter_make(const struct model_config *c, int32_t r, const char *targets,
                                    uint64_t seed) {
    struct adapter_config a = {.r = r, .alpha = 2.0f * (float)r};
    if (activating_token >= 0 && seed == 2) a.invocation = &activating_token, a.n_invocation = 1;
    assert_int_equal(adapter_targets_parse(targets, a.target, &err), OK);
    return adapter_new(c, &a, seed);
}

/* B is zero in a new adapter: sets it to random values. */
static void adapters_randomize(struct trainer *t) {
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        struct train_tensor *x = trainer_tensor(t, i);
        struct rng r =
            rng_make(5, RNG_TEST, (uint32_t)(hash_fnv1a(x->name + 1, strlen(x->name + 1))), 0);
        for (int64_t e = 0; e < x->n; e++) x->w[e] = 0.2f * rng_normal(&r);
    }
}

static double *ref_full_tensor(struct ref *r, const char *name) {
    int l;
    if (!strcmp(name, "model.embed_tokens.weight")) return r->embed;
    if (!strcmp(name, "lm_head.weight")) return r->head;
    if (!strcmp(name, "model.norm.weight")) return r->final_norm;
    assert_int_equal(sscanf(name, "model.layers.%d.", &l), 1);
    struct ref_layer *y = &r->layers[l];
    if (strstr(name, "input_layernorm")) return y->attn_norm;
    if (strstr(name, "post_attention_layernorm")) return y->ffn_norm;
    if (strstr(name, "q_norm")) return y->q_norm;
    if (strstr(name, "k_norm")) return y->k_norm;
    for (int p = 0; p < N_PROJ; p++)
        if (strstr(name, proj_names[p])) return y->w[p];
    fail_msg("unknown tensor '%s'", name);
    return NULL;
}

/* Compares every `stride`-th element of tensor x with w, the same tensor in the reference. */
static int64_t tensor_check(struct ref *r, double *w, const struct train_tensor *x, int64_t stride,
                            const struct train_sample *s, int n, int adapter) {
    double scale = 1e-6, worst = 0;
    int64_t checked = 0;
    for (int64_t e = 0; e < x->n; e++) scale = fmax(scale, fabs((double)x->g[e]));
    for (int64_t e = 0; e < x->n; e += stride, checked++) {
        double kept = w[e], h = 1e-4;
        w[e] = kept + h;
        double above = ref_loss(r, s, n, adapter);
        w[e] = kept - h;
        double below = ref_loss(r, s, n, adapter);
        w[e] = kept;
        worst = fmax(worst, fabs((above - below) / (2 * h) - (double)x->g[e]));
    }
    if (worst > 1e-3 * scale)
        fail_msg("gradient of '%s' is off by %g of %g", x->name, worst, scale);
    return checked;
}

static void check_full_gradients(const char *name, bool small, struct pool *pool) {
    struct model_config c = shape(name, small);
    struct model *m = model_make(&c, pool);
    struct train_options o = options();
    struct trainer *t = trainer_new_full(m, &o, pool, &err);
    int n = small ? 1 : 3;
    struct train_sample *s = samples_make(n, small ? 40 : c.vocab_size, 1, 11);
    struct ref r;
    double nll;
    int64_t targets, checked = 0;
    ref_init(&r, m);
    double expected = ref_loss(&r, s, n, -1);
    assert_int_equal(trainer_eval_loss(t, s, n, &nll, &targets, &err), OK);
    assert_true(fabs(nll - expected) < 1e-4 * expected);
    assert_int_equal(trainer_accumulate(t, s, n, &err), OK);
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        checked +=
            tensor_check(&r, ref_full_tensor(&r, x->name), x, small ? 1 : x->n / 25 + 1, s, n, -1);
    }
    print_message("%s: %lld elements of %d tensors, loss %.6f\n", name, (long long)checked,
                  trainer_n_tensors(t), expected / (double)targets);
    ref_release(&r);
    samples_free(s, n);
    trainer_free(t);
    model_close(m);
    options_release(train_option_rows, &o);
}

static void test_full_gradients(void **state) {
    (void)state;
    struct pool *pool = pool_new(2);
    check_full_gradients("tiny-llama", true, pool);
    check_full_gradients("tiny-qwen3", true, pool);
    check_full_gradients("tiny-llama", false, pool);
    check_full_gradients("tiny-qwen3", false, pool);
    pool_free(pool);
}

/* Two adapters of different rank and targets, the second one activated if activating_token is set;
 * the reference applies one of them at a time. */
static struct trainer *lora_trainer(const struct model *m, const struct train_options *o,
                                    struct pool *pool) {
    struct adapter *ad[2] = {adapter_make(&m->config, 4, "all-linear", 1),
                             adapter_make(&m->config, 3, "q_proj,v_proj,down_proj", 2)};
    struct trainer *t = trainer_new_lora(m, ad, 2, o, pool, &err);
    assert_non_null(t);
    adapter_release(ad[0]);
    adapter_release(ad[1]);
    adapters_randomize(t);
    return t;
}

/* The reference's array of tensor "I.layers.L.PATH.lora_X.weight". */
static double **ref_lora_tensor(struct ref *r, const char *name, int *adapter, int *rank_of) {
    int l;
    assert_int_equal(sscanf(name, "%d.layers.%d.", adapter, &l), 2);
    for (int p = 0; p < N_PROJ; p++) {
        if (!strstr(name, proj_names[p])) continue;
        *rank_of = p;
        r->layers[l].r[p] = *adapter ? 3 : 4;
        return strstr(name, "lora_A") ? &r->layers[l].a[p] : &r->layers[l].b[p];
    }
    fail_msg("unknown tensor '%s'", name);
    return NULL;
}

static void ref_set_adapter(struct ref *r, struct trainer *t, int adapter) {
    int owner, p;
    r->scale = 2;
    for (int l = 0; l < r->c.n_layers; l++)
        for (p = 0; p < N_PROJ; p++) {
            free(r->layers[l].a[p]), free(r->layers[l].b[p]);
            r->layers[l].a[p] = r->layers[l].b[p] = NULL;
        }
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        double **slot;
        if (x->name[0] - '0' != adapter) continue;
        slot = ref_lora_tensor(r, x->name, &owner, &p);
        *slot = widen(x->w, x->n);
    }
}

static void check_lora_gradients(const char *name, struct pool *pool) {
    struct model_config c = shape(name, true);
    struct model *m = model_make(&c, pool);
    struct train_options o = options();
    struct trainer *t = lora_trainer(m, &o, pool);
    struct train_sample *s = samples_make(4, c.vocab_size, 2, 21);
    struct ref r;
    double nll, expected = 0;
    int64_t targets, checked = 0;
    int owner, p;
    ref_init(&r, m);
    assert_int_equal(trainer_eval_loss(t, s, 4, &nll, &targets, &err), OK);
    assert_int_equal(trainer_accumulate(t, s, 4, &err), OK);
    for (int a = 0; a < 2; a++) {
        ref_set_adapter(&r, t, a);
        r.invocation = a == 1 ? activating_token : -1;
        expected += ref_loss(&r, s, 4, a);
        for (int i = 0; i < trainer_n_tensors(t); i++) {
            const struct train_tensor *x = trainer_tensor(t, i);
            if (x->name[0] - '0' != a) continue;
            checked += tensor_check(&r, *ref_lora_tensor(&r, x->name, &owner, &p), x, 1, s, 4, a);
        }
    }
    assert_true(fabs(nll - expected) < 1e-4 * expected);
    print_message("%s, two adapters: %lld elements\n", name, (long long)checked);
    ref_release(&r);
    samples_free(s, 4);
    trainer_free(t);
    model_close(m);
    options_release(train_option_rows, &o);
}

static void test_lora_gradients(void **state) {
    (void)state;
    struct pool *pool = pool_new(2);
    check_lora_gradients("tiny-llama", pool);
    check_lora_gradients("tiny-qwen3", pool);
    activating_token = 63;
    check_lora_gradients("tiny-qwen3", pool);
    activating_token = -1;
    pool_free(pool);
}

/* Samples of several attention blocks, some elements of each tensor. */
static void test_long_sample(void **state) {
    (void)state;
    struct model_config c = shape("tiny-qwen3", true);
    c.max_seq_len = 256;
    struct model *m = model_make(&c, NULL);
    struct train_options o = options();
    struct trainer *t = trainer_new_full(m, &o, NULL, &err);
    struct train_sample s[2] = {sample_make(31, 150, c.vocab_size, 0),
                                sample_make(32, 66, c.vocab_size, 0)};
    struct ref r;
    double nll;
    int64_t targets;
    ref_init(&r, m);
    assert_int_equal(trainer_eval_loss(t, s, 2, &nll, &targets, &err), OK);
    assert_true(fabs(nll / ref_loss(&r, s, 2, -1) - 1) < 1e-5);
    assert_int_equal(trainer_accumulate(t, s, 2, &err), OK);
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        tensor_check(&r, ref_full_tensor(&r, x->name), x, x->n / 5 + 1, s, 2, -1);
    }
    ref_release(&r);
    train_sample_release(&s[0]);
    train_sample_release(&s[1]);
    trainer_free(t);
    model_close(m);
    options_release(train_option_rows, &o);
}

/* The trainer's parameters after some updates, as one hash. */
static void params_hash(struct trainer *t, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    for (int i = 0; i < trainer_n_tensors(t); i++)
        sha256_update(&h, trainer_tensor(t, i)->w, (size_t)trainer_tensor(t, i)->n * sizeof(float));
    sha256_final(&h, out);
}

static void train_some(struct trainer *t, int first, int updates, int adapters) {
    for (int u = first; u < first + updates; u++) {
        struct train_sample *s = samples_make(12, 300, adapters, 100 + 12 * (uint32_t)u);
        struct update_stats st;
        assert_int_equal(trainer_accumulate(t, s, 6, &err), OK);
        assert_int_equal(trainer_accumulate(t, s + 6, 6, &err), OK);
        assert_int_equal(trainer_update(t, 1e-2f, &st, &err), OK);
        assert_true(isfinite(st.loss) && st.targets > 0 && st.tokens > st.targets);
        samples_free(s, 12);
    }
}

static void test_threads(void **state) {
    (void)state;
    char hash[2][4][HASH_LEN];
    struct model_config c = shape("tiny-qwen3", false);
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        struct train_options o = options();
        struct model *m = model_make(&c, pool);
        struct trainer *t = trainer_new_full(m, &o, pool, &err);
        train_some(t, 0, 3, 1);
        params_hash(t, hash[0][threads]);
        trainer_free(t);
        o.lora_dropout = 0.1;
        t = lora_trainer(m, &o, pool);
        train_some(t, 0, 3, 2);
        params_hash(t, hash[1][threads]);
        trainer_free(t);
        model_close(m);
        options_release(train_option_rows, &o);
        pool_free(pool);
    }
    for (int kind = 0; kind < 2; kind++)
        for (int threads = 2; threads <= 3; threads++)
            assert_string_equal(hash[kind][threads], hash[kind][1]);
}

/* The samples of one adapter only, renumbered to 0, in one or in several calls. */
static void train_one_adapter(struct trainer *t, int adapter, int updates, bool split) {
    for (int u = 0; u < updates; u++) {
        struct train_sample *s = samples_make(12, 300, 3, 100 + 12 * (uint32_t)u), selected[12];
        int n = 0;
        for (int i = 0; i < 12; i++)
            if (s[i].adapter == adapter) {
                selected[n] = s[i];
                selected[n++].adapter = 0;
            }
        for (int i = 0; split && i < n; i++)
            assert_int_equal(trainer_accumulate(t, selected + i, 1, &err), OK);
        if (!split) assert_int_equal(trainer_accumulate(t, selected, n, &err), OK);
        assert_int_equal(trainer_update(t, 1e-2f, NULL, &err), OK);
        samples_free(s, 12);
    }
}

/* Several adapters over one base, one of them DoRA: of low ranks, or (`wide`) one of a rank that no
 * chain of sums in tiles takes. */
static void check_together_equals_alone(enum numeric_class cls, double dropout, bool wide) {
    static const char *const targets[] = {"all-linear", "q_proj,v_proj", "all-linear"};
    struct model_config c = shape("tiny-llama", false);
    struct pool *pool = pool_new(2);
    struct model *m = model_new_quantized(&c, 1, TENSOR_BF16, cls);
    struct train_options o = options();
    struct adapter *ad[3];
    o.lora_dropout = dropout;
    for (int i = 0; i < 3; i++) {
        struct adapter_config a = {
            .r = wide && i == 0 ? 70 : 2 + 3 * i, .alpha = 8, .dora = i == 2};
        if (activating_token >= 0 && i < 2) a.invocation = &activating_token, a.n_invocation = 1;
        assert_int_equal(adapter_targets_parse(targets[i], a.target, &err), OK);
        ad[i] = adapter_new_for_model(m, &a, (uint64_t)i, &err);
        assert_non_null(ad[i]);
    }
    struct trainer *all = trainer_new_lora(m, ad, 3, &o, pool, &err);
    train_some(all, 0, 3, 3);
    for (int i = 0; i < 6; i++) {
        struct trainer *one = trainer_new_lora(m, &ad[i % 3], 1, &o, pool, &err);
        train_one_adapter(one, i % 3, 3, i >= 3);
        struct adapter *a = trainer_export_adapter(all, i % 3, NULL),
                       *b = trainer_export_adapter(one, 0, NULL);
        assert_string_equal(a->hash, b->hash);
        assert_string_not_equal(a->hash, ad[i % 3]->hash);
        assert_true(trainer_adapter_loss(all, i % 3) == trainer_adapter_loss(one, 0));
        adapter_release(a);
        adapter_release(b);
        trainer_free(one);
    }
    for (int i = 0; i < 3; i++) adapter_release(ad[i]);
    trainer_free(all);
    model_close(m);
    options_release(train_option_rows, &o);
    pool_free(pool);
}

static void test_together_equals_alone(void **state) {
    (void)state;
    check_together_equals_alone(NUMERIC_EXACT, 0.1, false);
    for (int i = 0; i < 4; i++) check_together_equals_alone(NUMERIC_FAST, i & 1 ? 0.1 : 0, i & 2);
    activating_token = 299;
    check_together_equals_alone(NUMERIC_EXACT, 0, false);
    for (int i = 0; i < 4; i++) check_together_equals_alone(NUMERIC_FAST, i & 1 ? 0.1 : 0, i & 2);
    activating_token = -1;
}

/* Mean training loss (with dropout) of adapters moved by `step` along their gradient's
 * direction. */
static double loss_with_dropout(const struct model *m, const struct train_options *o,
                                const struct train_sample *s, double step, double *slope) {
    struct trainer *t = lora_trainer(m, o, NULL), *probe = lora_trainer(m, o, NULL);
    struct update_stats st;
    double squares = 0;
    assert_int_equal(trainer_accumulate(probe, s, 4, &err), OK);
    for (int i = 0; i < trainer_n_tensors(t); i++)
        for (int64_t e = 0; e < trainer_tensor(t, i)->n; e++) {
            double g = (double)trainer_tensor(probe, i)->g[e];
            squares += g * g;
        }
    *slope = sqrt(squares);
    for (int i = 0; i < trainer_n_tensors(t); i++)
        for (int64_t e = 0; e < trainer_tensor(t, i)->n; e++)
            trainer_tensor(t, i)->w[e] +=
                (float)(step * (double)trainer_tensor(probe, i)->g[e] / *slope);
    assert_int_equal(trainer_accumulate(t, s, 4, &err), OK);
    assert_int_equal(trainer_update(t, 0, &st, &err), OK);
    trainer_free(t);
    trainer_free(probe);
    return st.loss * (double)st.targets;
}

static void test_dropout(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", true);
    struct model *m = model_make(&c, NULL);
    struct train_options o = options();
    struct train_sample *s = samples_make(4, c.vocab_size, 2, 21);
    double slope, unused, nll;
    int64_t targets;
    o.lora_dropout = 0.3;
    double above = loss_with_dropout(m, &o, s, 2e-3, &slope),
           below = loss_with_dropout(m, &o, s, -2e-3, &unused);
    double measured = (above - below) / 4e-3;
    if (fabs(measured - slope) > 5e-3 * slope) fail_msg("slope %g instead of %g", measured, slope);
    double dropped = loss_with_dropout(m, &o, s, 0, &unused);
    struct trainer *t = lora_trainer(m, &o, NULL);
    assert_int_equal(trainer_eval_loss(t, s, 4, &nll, &targets, &err), OK);
    assert_true(fabs(nll - dropped) > 1e-3 * nll); /* off in trainer_eval_loss */
    trainer_free(t);
    samples_free(s, 4);
    model_close(m);
    options_release(train_option_rows, &o);
}

static char *temporary(const char *name) {
    return xasprintf("/tmp/shoal-test-train-%d-%s", (int)getpid(), name);
}

static void check_resume(const struct model *base, bool full) {
    struct train_options o = options();
    char *path = temporary("state"), hash[2][HASH_LEN];
    struct model *m = full ? model_make(&base->config, NULL) : NULL, *resumed = NULL;
    json_t *extra = json_pack("{s:i}", "place", 17), *back = NULL;
    o.lora_dropout = 0.1;
    o.weight_decay = 0.1;
    struct trainer *t = full ? trainer_new_full(m, &o, NULL, &err) : lora_trainer(base, &o, NULL);
    train_some(t, 0, 2, full ? 1 : 2);
    assert_int_equal(trainer_save(t, path, extra, &err), OK);
    train_some(t, 2, 2, full ? 1 : 2);
    params_hash(t, hash[0]);
    trainer_free(t);
    if (full) resumed = model_make(&base->config, NULL);
    t = full ? trainer_new_full(resumed, &o, NULL, &err) : lora_trainer(base, &o, NULL);
    assert_int_equal(trainer_load(t, path, &back, &err), OK);
    assert_int_equal(trainer_update_count(t), 2);
    assert_true(json_equal(extra, back));
    train_some(t, 2, 2, full ? 1 : 2);
    params_hash(t, hash[1]);
    assert_string_equal(hash[0], hash[1]);
    trainer_free(t);
    if (full) model_close(m), model_close(resumed);
    json_decref(extra);
    json_decref(back);
    unlink(path);
    free(path);
    options_release(train_option_rows, &o);
}

static void test_resume(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", false);
    struct model *m = model_make(&c, NULL);
    check_resume(m, true);
    check_resume(m, false);
    model_close(m);
}

static void assert_load_fails(struct trainer *t, const char *path, const struct buf *b, size_t n,
                              int code, const char *word) {
    char before[HASH_LEN], after[HASH_LEN];
    params_hash(t, before);
    assert_int_equal(file_write(path, b->data, n, &err), OK);
    assert_int_equal(trainer_load(t, path, NULL, &err), code);
    if (!strstr(err.text, word)) fail_msg("'%s' does not say '%s'", err.text, word);
    params_hash(t, after);
    assert_string_equal(before, after);
}

static void test_bad_checkpoints(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", true);
    struct model *m = model_make(&c, NULL);
    struct train_options o = options();
    struct trainer *t = lora_trainer(m, &o, NULL);
    char *path = temporary("bad");
    struct buf b = {0};
    assert_int_equal(trainer_save(t, path, NULL, &err), OK);
    assert_int_equal(file_read(path, 1 << 24, &b, &err), OK);
    assert_load_fails(t, path, &b, b.len - 1, ERR_FORMAT, "damaged");
    assert_load_fails(t, path, &b, b.len / 2, ERR_FORMAT, "damaged");
    assert_load_fails(t, path, &b, 79, ERR_FORMAT, "not a training checkpoint");
    assert_load_fails(t, path, &b, 0, ERR_FORMAT, "");
    static const struct {
        int at;
        const char *word;
    } flips[] = {
        {0, "not a training checkpoint"},
        {8, "version"},
        {12, "damaged"},
        {15, "damaged"},
        {40, "damaged"},
        {5000, "damaged"},
    };
    for (size_t i = 0; i < ARRAY_LEN(flips); i++) {
        b.data[flips[i].at] ^= 0x40;
        assert_load_fails(t, path, &b, b.len, ERR_FORMAT, flips[i].word);
        b.data[flips[i].at] ^= 0x40;
    }
    trainer_free(t);
    o.beta2 = 0.95;
    t = lora_trainer(m, &o, NULL);
    assert_load_fails(t, path, &b, b.len, ERR_MISMATCH, "other options");
    trainer_free(t);
    t = trainer_new_full(m, &o, NULL, &err);
    assert_load_fails(t, path, &b, b.len, ERR_MISMATCH, "other tensors");
    struct train_sample *s = samples_make(1, c.vocab_size, 1, 1);
    assert_int_equal(trainer_accumulate(t, s, 1, &err), OK);
    assert_int_equal(trainer_save(t, path, NULL, &err), ERR_STATE);
    samples_free(s, 1);
    trainer_free(t);
    model_close(m);
    buf_release(&b);
    unlink(path);
    free(path);
    options_release(train_option_rows, &o);
}

static double train_overfit(struct trainer *t, float lr, int updates) {
    struct train_sample *s = samples_make(32, 300, 1, 500);
    struct update_stats st = {0};
    for (int u = 0; u < updates; u++) {
        float by = lr_schedule_at(LR_COSINE, (double)lr, 0.02, u, 10, updates);
        assert_int_equal(trainer_accumulate(t, s, 32, &err), OK);
        assert_int_equal(trainer_update(t, by, &st, &err), OK);
    }
    samples_free(s, 32);
    return st.loss;
}

static void test_overfit(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", false);
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    struct model *m = model_make(&c, pool);
    /* the frozen head bounds the logits, and so the loss from below */
    for (int64_t i = 0; i < m->head.n * m->head.k; i++) ((float *)m->head.data)[i] *= 4;
    struct adapter *ad = adapter_make(&c, 16, "all-linear", 3);
    struct trainer *lora = trainer_new_lora(m, &ad, 1, &o, pool, &err);
    double by_lora = train_overfit(lora, 1e-2f, 300);
    trainer_free(lora);
    model_close(m);
    m = model_new_random(&c, 4, NUMERIC_EXACT);
    struct trainer *full = trainer_new_full(m, &o, pool, &err);
    double by_all = train_overfit(full, 1e-2f, 150);
    trainer_free(full);
    print_message(
        "32 samples: loss %.4f after 300 updates of an adapter, %.4f after 150 of all weights\n",
        by_lora, by_all);
    assert_true(by_lora < 0.05);
    assert_true(by_all < 0.05);
    adapter_release(ad);
    model_close(m);
    options_release(train_option_rows, &o);
    pool_free(pool);
}

static void test_schedules(void **state) {
    (void)state;
    assert_true(lr_schedule_at(LR_COSINE, 1, 0, 0, 4, 100) == 0.25f);
    assert_true(lr_schedule_at(LR_COSINE, 1, 0, 4, 4, 100) == 1);
    assert_true(fabsf(lr_schedule_at(LR_COSINE, 1, 0, 52, 4, 100) - 0.5f) < 1e-6f);
    assert_true(fabsf(lr_schedule_at(LR_COSINE, 1, 0.1, 100, 4, 100) - 0.1f) < 1e-6f);
    assert_true(lr_schedule_at(LR_LINEAR, 2, 0, 50, 0, 100) == 1);
    assert_true(lr_schedule_at(LR_CONSTANT, 2, 0, 99, 10, 100) == 2);
    assert_true(lr_schedule_at(LR_COSINE, 1, 0, 500, 4, 100) == 0);
}

static void test_clipping(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", true);
    struct train_sample *s = samples_make(3, c.vocab_size, 1, 60);
    double expected = 0, norm[2];
    for (int clipped = 0; clipped < 2; clipped++) {
        struct model *m = model_make(&c, NULL);
        struct train_options o = options();
        struct update_stats st;
        o.max_grad_norm = clipped ? 1e-3 : 0;
        struct trainer *t = trainer_new_full(m, &o, NULL, &err);
        assert_int_equal(trainer_accumulate(t, s, 3, &err), OK);
        expected = 0;
        for (int i = 0; i < trainer_n_tensors(t); i++)
            for (int64_t e = 0; e < trainer_tensor(t, i)->n; e++)
                expected += (double)trainer_tensor(t, i)->g[e] * (double)trainer_tensor(t, i)->g[e];
        assert_int_equal(trainer_update(t, 1e-3f, &st, &err), OK);
        norm[clipped] = st.grad_norm;
        assert_true(fabs(st.grad_norm - sqrt(expected) / (double)st.targets) < 1e-9 * st.grad_norm);
        assert_int_equal(trainer_update(t, 1e-3f, &st, &err), ERR_STATE);
        trainer_free(t);
        model_close(m);
        options_release(train_option_rows, &o);
    }
    assert_true(norm[0] == norm[1]); /* reported before clipping */
    samples_free(s, 3);
}

static void test_refusals(void **state) {
    (void)state;
    struct model_config c = shape("tiny-llama", true);
    struct model *m = model_make(&c, NULL);
    struct train_options o = options();
    struct trainer *t = lora_trainer(m, &o, NULL);
    struct train_sample s = sample_make(1, 6, c.vocab_size, 0);
    s.adapter = 2;
    assert_int_equal(trainer_accumulate(t, &s, 1, &err), ERR_USAGE);
    s.adapter = 0;
    s.tokens[3] = c.vocab_size;
    assert_int_equal(trainer_accumulate(t, &s, 1, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "vocabulary"));
    s.tokens[3] = 1;
    memset(s.mask, 0, 6);
    s.mask[0] = 1; /* the first token is no target */
    assert_int_equal(trainer_accumulate(t, &s, 1, &err), OK);
    assert_int_equal(trainer_update(t, 1e-3f, NULL, &err), ERR_STATE);
    s.mask[5] = 1;
    ((float *)m->layers[1].attn_norm)[2] = NAN;
    assert_int_equal(trainer_accumulate(t, &s, 1, &err), ERR_NUMERIC);
    assert_non_null(strstr(err.text, "model.layers.1"));
    trainer_free(t);
    c.d_ff += 8;
    struct model *other = model_new_random(&c, 1, NUMERIC_EXACT);
    struct adapter *ad = adapter_make(&m->config, 2, "q_proj", 1);
    assert_null(trainer_new_lora(other, &ad, 1, &o, NULL, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    adapter_release(ad);
    model_close(other);
    model_close(m);
    train_sample_release(&s);
    options_release(train_option_rows, &o);
}

/* A base of any weight type, and an adapter on it with non-zero B. */
struct pair {
    struct model *m;
    struct adapter *ad;
};

static struct pair pair_of(const char *name, enum tensor_type type, enum numeric_class cls,
                           bool dora) {
    struct model_config c = shape(name, false);
    struct pair p = {.m = model_new_quantized(&c, 1, type, cls)};
    struct adapter_config a = {.r = 5, .alpha = 10, .dora = dora};
    assert_int_equal(adapter_targets_parse("all-linear", a.target, &err), OK);
    struct adapter *fresh = adapter_new_for_model(p.m, &a, 3, &err);
    assert_non_null(fresh);
    float *data = xmalloc(fresh->n_data * sizeof *data);
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (size_t i = 0; i < fresh->n_data; i++) data[i] = fresh->data[i] + 0.05f * rng_normal(&r);
    p.ad = adapter_from_data(&c, &a, data, NULL);
    assert_int_equal(adapter_bind(p.ad, p.m, &err), OK);
    adapter_release(fresh);
    free(data);
    return p;
}

static struct pair pair_make(const char *name, enum tensor_type type, bool dora) {
    return pair_of(name, type, NUMERIC_EXACT, dora);
}

static void pair_release(struct pair *p) {
    adapter_release(p->ad);
    model_close(p->m);
}

static const char *const all_shapes[] = {"tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3",
                                         "tiny-gpt-neo"};

/* The engine's logits of sample s under the adapter, summed like in the trainer. */
static double served_nll_kv(const struct pair *p, const struct train_sample *s, enum dtype kv) {
    const struct kernels *k = kernels_get();
    int64_t vocab = p->m->config.vocab_size;
    struct forward_options fo = {.max_rows = s->n, .n_slots = 1, .slot_len = s->n, .kv_elem = kv};
    struct forward *f = forward_new(p->m, &fo);
    struct batch_row *rows = xcalloc((size_t)s->n, sizeof *rows);
    int32_t *out = xcalloc((size_t)s->n, sizeof *out);
    float *logits = xmalloc((size_t)(s->n * vocab) * sizeof *logits);
    struct lora_part part;
    int32_t activation = p->ad ? train_sample_activation(s, &p->ad->config) : 0;
    struct lora_segment seg = adapter_lora_segment(p->ad, activation, s->n - 1, &part);
    double nll = 0;
    for (int32_t i = 0; i < s->n - 1; i++) {
        rows[i] = (struct batch_row){s->tokens[i], i, 0};
        out[i] = i;
    }
    forward_run(f, rows, s->n - 1, &seg, 1, out, s->n - 1, logits);
    for (int32_t i = 0; i < s->n - 1; i++) {
        float *row = logits + i * vocab;
        double at = row[s->tokens[i + 1]], max = k->max(row, vocab);
        if (s->mask[i + 1]) nll += math_log((double)k->softmax(row, vocab)) + max - at;
    }
    free(rows), free(out), free(logits);
    forward_free(f);
    return nll;
}

static double served_nll(const struct pair *p, const struct train_sample *s) {
    return served_nll_kv(p, s, DTYPE_F32);
}

/* Logits have equal bits in training and serving. So have losses, except those of
 * cross_entropy_tiles.c, which adds exponentials in another order. */
static void assert_same_nll(const struct model *m, double trained, double served) {
    if (m->cls == NUMERIC_FAST && kernels_get()->gemm_tiles)
        assert_true(fabs(trained - served) <= 3e-7 * served);
    else
        assert_true(trained == served);
}

/* Training and serving have equal bits, for every architecture, over quantised bases, with every
 * type of keys and values, of which "auto" is the engine's default. */
static void test_training_equals_serving(void **state) {
    (void)state;
    static const char *const types_kv[] = {"auto", "i8", "f32", "bf16", "f16"};
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_BF16, TENSOR_Q8_0, TENSOR_Q4_0,
                                             TENSOR_NF4};
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(all_shapes) * ARRAY_LEN(types) * 4; i++) {
        struct pair p =
            pair_of(all_shapes[i / 4 % ARRAY_LEN(all_shapes)], types[i / 4 / ARRAY_LEN(all_shapes)],
                    i / 2 % 2 ? NUMERIC_FAST : NUMERIC_EXACT, i % 2);
        enum dtype kv;
        // each architecture has all pairs of a weight type and a type of keys and values with one
        // sum; the sum differs by architecture
        set_kv(&o, types_kv[(i / 4 / ARRAY_LEN(all_shapes) + i / 4) % ARRAY_LEN(types_kv)]);
        assert_int_equal(kv_cache_dtype_parse(o.kv_cache_dtype, p.m->cls, &kv, &err), OK);
        struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, pool, &err);
        assert_non_null(t);
        struct train_sample s[2] = {sample_make(1, 40, p.m->config.vocab_size, 0),
                                    sample_make(2, 7, p.m->config.vocab_size, 0)};
        double nll[2];
        int32_t targets[2];
        assert_int_equal(trainer_sample_nll(t, s, 2, nll, targets, &err), OK);
        for (int k = 0; k < 2; k++) {
            assert_same_nll(p.m, nll[k], served_nll_kv(&p, &s[k], kv));
            assert_true(targets[k] == s[k].n - s[k].n / 2);
            train_sample_release(&s[k]);
        }
        trainer_free(t);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* Rounding keys and values changes the gradient by the size of the rounding; the derivative of the
 * rounding counts as 1. */
static void test_kv_gradient(void **state) {
    (void)state;
    static const struct {
        const char *name;
        double most; /* relative change of the gradient */
    } cases[] = {{"f16", 5e-3}, {"bf16", 4e-2}, {"i8", 8e-2}};
    for (size_t i = 0; i < ARRAY_LEN(cases) * 2; i++) {
        struct pair p = pair_of(i % 2 ? "tiny-qwen3" : "tiny-llama", TENSOR_F32, NUMERIC_EXACT, 0);
        struct train_sample s = sample_make(1, 40, p.m->config.vocab_size, 0);
        struct train_options o = options();
        struct trainer *t[2];
        double moved = 0, size = 0;
        for (int k = 0; k < 2; k++) {
            set_kv(&o, k ? cases[i / 2].name : "f32");
            t[k] = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
            assert_int_equal(trainer_accumulate(t[k], &s, 1, &err), OK);
        }
        for (int j = 0; j < trainer_n_tensors(t[0]); j++) {
            const struct train_tensor *a = trainer_tensor(t[0], j), *b = trainer_tensor(t[1], j);
            for (int64_t e = 0; e < a->n; e++) {
                moved += pow((double)(a->g[e] - b->g[e]), 2);
                size += pow((double)a->g[e], 2);
            }
        }
        if (!(moved > 0 && sqrt(moved / size) < cases[i / 2].most))
            fail_msg("%s: the gradient changed by %g", cases[i / 2].name, sqrt(moved / size));
        trainer_free(t[0]);
        trainer_free(t[1]);
        train_sample_release(&s);
        pair_release(&p);
        options_release(train_option_rows, &o);
    }
}

/* A run keeps its type of keys and values: "auto" is the type of the checkpoint, and another type
 * is refused. */
static void test_kv_checkpoint(void **state) {
    (void)state;
    static const char *const names[] = {"f32", "f16", "i8"};
    struct pair p = pair_of("tiny-llama", TENSOR_F32, NUMERIC_EXACT, 0);
    char *path = temporary("kv");
    struct train_options o = options();
    enum dtype kv;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        set_kv(&o, names[i]);
        struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err), *other;
        assert_int_equal(trainer_save(t, path, NULL, &err), OK);
        set_kv(&o, "auto");
        assert_int_equal(train_kv_dtype_parse(&o, NUMERIC_EXACT, path, &kv, &err), OK);
        assert_string_equal(dtype_name(kv), names[i]);
        set_kv(&o, "bf16");
        assert_int_equal(train_kv_dtype_parse(&o, NUMERIC_EXACT, path, &kv, &err), OK);
        assert_int_equal(kv, DTYPE_BF16);
        other = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
        assert_int_equal(trainer_load(t, path, NULL, &err), OK);
        assert_int_equal(trainer_load(other, path, NULL, &err), ERR_MISMATCH);
        trainer_free(t);
        trainer_free(other);
    }
    assert_int_equal(unlink(path), 0);
    set_kv(&o, "auto");
    assert_int_equal(train_kv_dtype_parse(&o, NUMERIC_EXACT, path, &kv, &err), OK);
    assert_int_equal(kv, DTYPE_F16);
    assert_int_equal(file_write(path, "SHOALTRN", 8, &err), OK);
    assert_int_equal(train_kv_dtype_parse(&o, NUMERIC_EXACT, path, &kv, &err), ERR_FORMAT);
    set_kv(&o, "q9");
    assert_null(trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err));
    unlink(path);
    free(path);
    pair_release(&p);
    options_release(train_option_rows, &o);
}

/* How an adapter changes embedding and head: lists for adapter_config_targets_parse,
 * adapter_modules_to_save_parse and adapter_token_indices_parse. */
static const struct vocab_case {
    const char *targets, *tables, *ids;
    bool tied;
} vocab_cases[] = {
    {"q_proj", "embed_tokens,lm_head", "", false},
    {"q_proj", "embed_tokens,lm_head", "", true},
    {"q_proj", "lm_head", "3-40", false},
    {"q_proj", "", "3-40,lm_head=20-50", false},
    {"q_proj", "", "3-40", true},
    {"q_proj,lm_head,embed_tokens", "", "", false},
    {"embed_tokens,lm_head", "", "", true},
    {"v_proj,embed_tokens", "lm_head", "", true},
};

static struct adapter *vocab_adapter(const struct model *m, const struct vocab_case *v) {
    struct adapter_config a = {.r = 3, .alpha = 6};
    assert_int_equal(adapter_config_targets_parse(v->targets, &m->config, &a, &err), OK);
    assert_int_equal(adapter_modules_to_save_parse(v->tables, &m->config, &a, &err), OK);
    assert_int_equal(adapter_token_indices_parse(v->ids, &m->config, &a, &err), OK);
    assert_int_equal(adapter_config_check(&m->config, &a, &err), OK);
    struct adapter *ad = adapter_new_for_model(m, &a, 4, &err);
    assert_non_null(ad);
    adapter_config_release(&a);
    return ad;
}

/* The reference's array of a tensor of embedding or head, filled from the tensor. Rows begin with
 * token 3, of an untied head with 20. */
static double *ref_vocab_tensor(struct ref *r, const struct train_tensor *x) {
    bool head = strstr(x->name, "lm_head") != NULL;
    double **table = head ? &r->head : &r->embed, *w = widen(x->w, x->n);
    r->vocab_r = 3;
    if (strstr(x->name, "lora_A")) return *(head ? &r->head_a : &r->embed_a) = w;
    if (strstr(x->name, "lora_B")) return *(head ? &r->head_b : &r->embed_b) = w;
    int64_t first = x->n == (int64_t)r->c.vocab_size * r->c.d_model ? 0 : head ? 20 : 3;
    if (first == 0 && r->head == r->embed) { // no longer tied
        size_t size = (size_t)x->n * sizeof *w;
        *table = memcpy(xmalloc(size), *table, size);
    }
    memcpy(*table + first * r->c.d_model, w, (size_t)x->n * sizeof *w);
    free(w);
    return *table + first * r->c.d_model;
}

/* Adapter 0 changes embedding or head, adapter 1 does not. */
static void check_vocab_gradients(const char *name, const struct vocab_case *v, struct pool *pool) {
    struct model_config c = shape(name, true);
    c.tied = v->tied;
    struct model *m = model_make(&c, pool);
    struct train_options o = options();
    struct adapter *ad[2] = {vocab_adapter(m, v), adapter_make(&c, 3, "q_proj,down_proj", 2)};
    struct trainer *t = trainer_new_lora(m, ad, 2, &o, pool, &err);
    struct train_sample *s = samples_make(6, c.vocab_size, 2, 21);
    double *arrays[16], nll, expected;
    int64_t targets, checked = 0;
    struct ref r;
    assert_non_null(t);
    adapters_randomize(t);
    ref_init(&r, m);
    r.scale = 2;
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        int owner, p;
        if (x->name[0] != '0') continue;
        if (!strstr(x->name, "layers")) {
            arrays[i] = ref_vocab_tensor(&r, x);
            continue;
        }
        double **slot = ref_lora_tensor(&r, x->name, &owner, &p);
        r.layers[strtol(x->name + strlen("0.layers."), NULL, 10)].r[p] = 3;
        arrays[i] = *slot = widen(x->w, x->n);
    }
    expected = ref_loss(&r, s, 6, 0);
    struct train_sample first[3] = {s[0], s[2], s[4]};
    assert_int_equal(trainer_eval_loss(t, first, 3, &nll, &targets, &err), OK);
    assert_true(fabs(nll - expected) < 1e-4 * expected);
    assert_int_equal(trainer_accumulate(t, s, 6, &err), OK);
    for (int i = 0; i < trainer_n_tensors(t) && trainer_tensor(t, i)->name[0] == '0'; i++)
        checked += tensor_check(&r, arrays[i], trainer_tensor(t, i), 1, s, 6, 0);
    print_message("%s, %s %s %s: %lld elements\n", name, v->targets, v->tables, v->ids,
                  (long long)checked);
    free(r.embed_a), free(r.embed_b), free(r.head_a), free(r.head_b);
    ref_release(&r);
    samples_free(s, 6);
    trainer_free(t);
    adapter_release(ad[0]);
    adapter_release(ad[1]);
    model_close(m);
    options_release(train_option_rows, &o);
}

static void test_vocab_gradients(void **state) {
    (void)state;
    struct pool *pool = pool_new(2);
    for (size_t i = 0; i < ARRAY_LEN(vocab_cases); i++)
        check_vocab_gradients(i % 2 ? "tiny-qwen3" : "tiny-llama", &vocab_cases[i], pool);
    pool_free(pool);
}

/* The gradient of the trainer's last tensor whose name has `word` and has n elements. */
static const float *grad_named(struct trainer *t, const char *word, int64_t n) {
    const float *g = NULL;
    for (int i = 0; i < trainer_n_tensors(t); i++)
        if (strstr(trainer_tensor(t, i)->name, word) && trainer_tensor(t, i)->n == n)
            g = trainer_tensor(t, i)->g;
    assert_non_null(g);
    return g;
}

static double distance(const float *x, const float *y, int64_t n) {
    double apart = 0, square = 0;
    for (int64_t i = 0; i < n; i++) {
        apart += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        square += (double)x[i] * (double)x[i];
    }
    assert_true(square > 0);
    return sqrt(apart / square);
}

/* A new adapter's tables have the gradients of these tables in training of all weights. */
static void test_vocab_equals_full(void **state) {
    (void)state;
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(all_shapes); i++) {
        struct model_config c = shape(all_shapes[i], false);
        c.tied = false;
        struct model *m = model_make(&c, NULL);
        struct adapter *ad = vocab_adapter(m, &vocab_cases[0]);
        struct trainer *t = trainer_new_lora(m, &ad, 1, &o, NULL, &err),
                       *full = trainer_new_full(m, &o, NULL, &err);
        struct train_sample *s = samples_make(4, 300, 1, 21);
        int64_t n = (int64_t)c.vocab_size * c.d_model;
        assert_int_equal(trainer_accumulate(t, s, 4, &err), OK);
        assert_int_equal(trainer_accumulate(full, s, 4, &err), OK);
        const char *embed = strrchr(c.arch->hf_embed, '.') + 1;
        assert_true(distance(grad_named(full, embed, n), grad_named(t, "embed_tokens", n), n) <
                    1e-5);
        assert_true(distance(grad_named(full, "lm_head", n), grad_named(t, "lm_head", n), n) <
                    1e-5);
        samples_free(s, 4);
        trainer_free(t);
        trainer_free(full);
        adapter_release(ad);
        model_close(m);
    }
    options_release(train_option_rows, &o);
}

/* Adapter 0 of three, after training together, is bitwise equal to adapter 0 trained alone, on
 * another number of threads, one sample per call, saved and loaded in between. */
static void check_vocab_bits(const struct vocab_case *v, enum numeric_class cls) {
    struct model_config c = shape("tiny-llama", false);
    c.tied = v->tied;
    struct pool *pool = pool_new(3);
    struct model *m = model_new_quantized(&c, 1, TENSOR_Q8_0, cls);
    struct train_options o = options();
    char *path = temporary("vocab");
    struct adapter *ad[3] = {vocab_adapter(m, v), adapter_make(&c, 2, "all-linear", 5),
                             vocab_adapter(m, &vocab_cases[v->tied ? 4 : 3])};
    struct trainer *all = trainer_new_lora(m, ad, 3, &o, pool, &err), *one;
    train_some(all, 0, 3, 3);
    for (int i = 0; i < 2; i++) {
        one = trainer_new_lora(m, &ad[i], 1, &o, i ? pool : NULL, &err);
        train_one_adapter(one, i, 3, true);
        struct adapter *a = trainer_export_adapter(all, i, NULL),
                       *b = trainer_export_adapter(one, 0, NULL);
        assert_string_equal(a->hash, b->hash);
        assert_string_not_equal(a->hash, ad[i]->hash);
        adapter_release(a);
        adapter_release(b);
        trainer_free(one);
    }
    char hash[2][HASH_LEN];
    assert_int_equal(trainer_save(all, path, NULL, &err), OK);
    train_some(all, 3, 1, 3);
    params_hash(all, hash[0]);
    trainer_free(all);
    all = trainer_new_lora(m, ad, 3, &o, NULL, &err);
    assert_int_equal(trainer_load(all, path, NULL, &err), OK);
    train_some(all, 3, 1, 3);
    params_hash(all, hash[1]);
    assert_string_equal(hash[0], hash[1]);
    trainer_free(all);
    for (int i = 0; i < 3; i++) adapter_release(ad[i]);
    model_close(m);
    pool_free(pool);
    unlink(path);
    free(path);
    options_release(train_option_rows, &o);
}

static void test_vocab_bits(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(vocab_cases); i++)
        check_vocab_bits(&vocab_cases[i], i % 3 == 1 ? NUMERIC_FAST : NUMERIC_EXACT);
}

/* A new adapter does not change the model; a trained one is served with the bits of training. */
static void test_vocab_served(void **state) {
    (void)state;
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(vocab_cases); i++) {
        struct model_config c = shape(all_shapes[i % ARRAY_LEN(all_shapes)], false);
        c.tied = vocab_cases[i].tied;
        struct pair p = {.m = model_new_quantized(&c, 1, TENSOR_F32, NUMERIC_EXACT)};
        struct adapter *fresh = vocab_adapter(p.m, &vocab_cases[i]);
        struct trainer *t = trainer_new_lora(p.m, &fresh, 1, &o, NULL, &err);
        struct train_sample s = sample_make(1, 40, p.m->config.vocab_size, 0);
        double nll, base = served_nll(&p, &s);
        int32_t targets;
        assert_int_equal(trainer_sample_nll(t, &s, 1, &nll, &targets, &err), OK);
        assert_true(fabs(nll - base) < 1e-4);
        train_some(t, 0, 2, 1);
        p.ad = trainer_export_adapter(t, 0, NULL);
        assert_int_equal(adapter_bind(p.ad, p.m, &err), OK);
        assert_int_equal(trainer_sample_nll(t, &s, 1, &nll, &targets, &err), OK);
        assert_true(nll == served_nll(&p, &s));
        assert_true(fabs(nll - base) > 1e-3);
        adapter_release(fresh);
        train_sample_release(&s);
        trainer_free(t);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
}

/* The same for activated adapters, whose invocation is searched before the last answer: sample 0
 * has two answers, and the invocation also in its last one. A sample without it is refused. */
static void test_activated(void **state) {
    (void)state;
    static const int32_t call[] = {7, 8};
    struct train_options o = options();
    for (int i = 0; i < 4; i++) {
        struct pair p = pair_of("tiny-llama", i / 2 ? TENSOR_BF16 : TENSOR_Q8_0,
                                i % 2 ? NUMERIC_FAST : NUMERIC_EXACT, false);
        struct adapter *plain = p.ad;
        struct adapter_config c = plain->config;
        c.invocation = call, c.n_invocation = 2;
        p.ad = adapter_from_data(&p.m->config, &c, plain->data, NULL);
        struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
        struct train_sample s[2] = {sample_make(1, 60, p.m->config.vocab_size, 0),
                                    sample_make(2, 9, p.m->config.vocab_size, 0)};
        s[0].mask[5] = s[0].mask[6] = 1;
        for (int k = 3; k < 60; k += 17) memcpy(s[0].tokens + k, call, sizeof call);
        memcpy(s[1].tokens, call, sizeof call);
        assert_int_equal(train_sample_activation(&s[0], &p.ad->config), 20);
        assert_int_equal(train_sample_activation(&s[1], &p.ad->config), 0);
        assert_int_equal(train_sample_activation(&s[0], &plain->config), 0);
        double nll[2];
        int32_t targets[2];
        assert_int_equal(trainer_sample_nll(t, s, 2, nll, targets, &err), OK);
        for (int k = 0; k < 2; k++) assert_same_nll(p.m, nll[k], served_nll(&p, &s[k]));
        struct adapter *trained = trainer_export_adapter(t, 0, NULL);
        assert_string_equal(trained->hash, p.ad->hash);
        adapter_release(trained);
        s[1].tokens[1]++;
        assert_int_equal(trainer_accumulate(t, s, 2, &err), ERR_MISMATCH);
        assert_non_null(strstr(err.text, "sample 1 does not have the adapter's invocation"));
        train_sample_release(&s[0]);
        train_sample_release(&s[1]);
        trainer_free(t);
        adapter_release(plain);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
}

static void trained_hash(const struct pair *p, const struct train_options *o, struct pool *pool,
                         char out[HASH_LEN]) {
    struct trainer *t = trainer_new_lora(p->m, &p->ad, 1, o, pool, &err);
    assert_non_null(t);
    train_some(t, 0, 3, 1);
    params_hash(t, out);
    trainer_free(t);
}

/* The bits of the fast class (numeric_class_name): 0 fast-f32, 1 fast-avx512bf16, 2 fast-amx. */
enum { FAST_BITS = 3 };
static int fast_bits(void) {
    return kernels_get()->level == CPU_AMX ? 2 : kernels_get()->gemm_tiles ? 1 : 0;
}

/* The exact class trains to the same bits on every processor, the fast class on every processor
 * with the same bits of it. A change of these hashes is a change of arithmetic: state it in the
 * commit message. */
static void test_golden_hashes(void **state) {
    (void)state;
    static const struct {
        enum tensor_type type;
        enum numeric_class cls;
        bool dora;
        const char *hashes[FAST_BITS]; /* of the exact class only the first */
    } runs[] = {{TENSOR_F32,
                 NUMERIC_EXACT,
                 true,
                 {"d0b372166eb6e4f7cc3166408086cf11db848edb447630c7488e1c8e1e8c2504"}},
                {TENSOR_BF16,
                 NUMERIC_EXACT,
                 false,
                 {"df3c0aebaf9d2e7801f795aa6e358419ed9707155d51a2cde6e12361bb7c4143"}},
                {TENSOR_Q4_0,
                 NUMERIC_EXACT,
                 false,
                 {"9e0a5422e94238ec7fa96a4dd0914fd0e1121611105d392756030f412a896955"}},
                {TENSOR_BF16,
                 NUMERIC_FAST,
                 false,
                 {"00506feebd5ab5851318493a3399d0b6f0637f12dfaf1664ccd8b3148292b16a",
                  "bf00767a225ee6f48d606766c1bce667b9fb6d891445c52e16029d6e65ddb486",
                  "d6edcdff13b351283ee8f695163718de75b329812c2e98c7013ea4df95e6df23"}},
                {TENSOR_Q4_0,
                 NUMERIC_FAST,
                 false,
                 {"9e0a5422e94238ec7fa96a4dd0914fd0e1121611105d392756030f412a896955",
                  "3315eab1d52b36f30560ff6b5598ad1499da4b835b481bd12605d6cd49b71cad",
                  "477041dd5a3ce1f0791f82efd0c69982eed7a68153fd2f3a58e8fd1be0bc0996"}}};
    char hash[HASH_LEN];
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(runs); i++) {
        struct pair p = pair_of("tiny-qwen3", runs[i].type, runs[i].cls, runs[i].dora);
        trained_hash(&p, &o, pool, hash);
        assert_string_equal(hash, runs[i].hashes[runs[i].cls == NUMERIC_FAST ? fast_bits() : 0]);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* Relative distance between the gradients of two trainers of the same adapter. */
static double gradient_distance(struct trainer *t, struct trainer *u) {
    double apart = 0, square = 0;
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        const struct train_tensor *x = trainer_tensor(t, i), *y = trainer_tensor(u, i);
        for (int64_t e = 0; e < x->n; e++) {
            double d = (double)x->g[e] - (double)y->g[e];
            apart += d * d;
            square += (double)x->g[e] * (double)x->g[e];
        }
    }
    return sqrt(apart / square);
}

/* The fast class rounds to bf16 what the exact class does not: its gradients are near, and do not
 * depend on threads and checkpointing either. */
static void test_fast_class(void **state) {
    (void)state;
    struct pool *pools[] = {pool_new(1), pool_new(2)};
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(all_shapes); i++) {
        char hash[3][HASH_LEN];
        struct pair p[2];
        struct trainer *t[2];
        int32_t vocab = shape(all_shapes[i], false).vocab_size;
        struct train_sample s[] = {sample_make(1, 50, vocab, 0), sample_make(2, 7, vocab, 0)};
        for (int cls = NUMERIC_EXACT; cls <= NUMERIC_FAST; cls++) {
            p[cls] = pair_of(all_shapes[i], TENSOR_F32, (enum numeric_class)cls, false);
            t[cls] = trainer_new_lora(p[cls].m, &p[cls].ad, 1, &o, pools[1], &err);
            assert_non_null(t[cls]);
            assert_int_equal(trainer_accumulate(t[cls], s, 2, &err), OK);
        }
        double apart = gradient_distance(t[NUMERIC_EXACT], t[NUMERIC_FAST]);
        if (!(apart <= 0.02)) fail_msg("%s: gradients are %g apart", all_shapes[i], apart);
        for (int way = 0; way < 3; way++) {
            o.gradient_checkpointing = way == 2;
            trained_hash(&p[NUMERIC_FAST], &o, pools[way == 0], hash[way]);
        }
        o.gradient_checkpointing = false;
        assert_string_equal(hash[0], hash[1]);
        assert_string_equal(hash[0], hash[2]);
        for (int k = 0; k < 2; k++) {
            trainer_free(t[k]);
            pair_release(&p[k]);
            train_sample_release(&s[k]);
        }
    }
    options_release(train_option_rows, &o);
    pool_free(pools[0]), pool_free(pools[1]);
}

/* A pass of more than one chunk of rows, which ends inside a sample, and a vocabulary of more than
 * one segment (cross_entropy_tiles.c): the gradients of both classes are near, and equal for one
 * call and one call for each sample, with any number of threads. */
static void test_long_passes(void **state) {
    (void)state;
    struct model_config c = shape("tiny-qwen3", false);
    c.max_seq_len = 512;
    c.vocab_size = 2500;
    struct train_options o = options();
    struct train_sample s[] = {
        sample_make(1, 250, c.vocab_size, 0), sample_make(2, 301, c.vocab_size, 0),
        sample_make(3, 77, c.vocab_size, 0), sample_make(4, 400, c.vocab_size, 0)};
    const struct adapter_config a = {
        .r = 8, .alpha = 16, .target = {true, true, true, true, true, true, true}};
    struct trainer *t[5];
    struct model *m[2];
    struct pool *pools[3];
    struct adapter *ad[2];
    double nll[2][4];
    int32_t targets[4];
    for (int i = 0; i < 3; i++) pools[i] = pool_new(i + 1);
    for (int cls = NUMERIC_EXACT; cls <= NUMERIC_FAST; cls++) {
        m[cls] = model_new_quantized(&c, 1, TENSOR_BF16, (enum numeric_class)cls);
        ad[cls] = adapter_new_for_model(m[cls], &a, 1, &err);
        assert_non_null(ad[cls]);
    }
    for (int i = 0; i < 5; i++) {
        const int cls = i == 4 ? NUMERIC_EXACT : NUMERIC_FAST;
        t[i] = trainer_new_lora(m[cls], &ad[cls], 1, &o, pools[i % 3], &err);
        assert_non_null(t[i]);
        struct rng r = rng_make(9, RNG_TEST, 0, 0);
        for (int k = 0; k < trainer_n_tensors(t[i]); k++)
            for (int64_t e = 0; e < trainer_tensor(t[i], k)->n; e++)
                trainer_tensor(t[i], k)->w[e] += 0.05f * rng_normal(&r);
        for (int k = 0; i == 3 && k < 4; k++)
            assert_int_equal(trainer_accumulate(t[i], s + k, 1, &err), OK);
        if (i != 3) assert_int_equal(trainer_accumulate(t[i], s, 4, &err), OK);
        if (i > 2) assert_int_equal(trainer_sample_nll(t[i], s, 4, nll[i - 3], targets, &err), OK);
    }
    for (int i = 1; i < 4; i++) assert_true(gradient_distance(t[0], t[i]) == 0);
    const double apart = gradient_distance(t[4], t[0]);
    print_message("gradients of both classes are %.4f apart\n", apart);
    assert_true(apart <= 0.02);
    for (int k = 0; k < 4; k++) assert_true(fabs(nll[0][k] / nll[1][k] - 1) < 1e-3);
    for (int i = 0; i < 5; i++) trainer_free(t[i]);
    for (int i = 0; i < 2; i++) adapter_release(ad[i]), model_close(m[i]);
    for (int i = 0; i < 3; i++) pool_free(pools[i]);
    for (int i = 0; i < 4; i++) train_sample_release(&s[i]);
    options_release(train_option_rows, &o);
}

/* Logits of hundreds, of which the largest is in any part of the vocabulary: exponentials of
 * differences from the first ones overflow. */
static void test_large_logits(void **state) {
    (void)state;
    struct model_config c = shape("tiny-qwen3", false);
    c.vocab_size = 5000;
    struct train_options o = options();
    struct train_sample s = sample_make(1, 60, c.vocab_size, 0);
    struct pair p = {.m = model_new_quantized(&c, 1, TENSOR_BF16, NUMERIC_FAST)};
    const struct adapter_config a = {.r = 2, .alpha = 4, .target = {true}};
    float *gain = (float *)(uintptr_t)p.m->final_norm;
    int32_t targets;
    double nll;
    for (int32_t i = 0; i < c.d_model; i++) gain[i] *= 1000;
    p.ad = adapter_new_for_model(p.m, &a, 1, &err);
    assert_non_null(p.ad);
    set_kv(&o, "f32");
    struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
    assert_non_null(t);
    assert_int_equal(trainer_sample_nll(t, &s, 1, &nll, &targets, &err), OK);
    print_message("mean loss of large logits: %g\n", nll / targets);
    assert_true(nll / targets > 100);
    assert_same_nll(p.m, nll, served_nll(&p, &s));
    assert_int_equal(trainer_accumulate(t, &s, 1, &err), OK);
    trainer_free(t);
    train_sample_release(&s);
    pair_release(&p);
    options_release(train_option_rows, &o);
}

/* The same of all weights: the gradients of both classes are near, and the bits after training do
 * not depend on threads. `hashes`: of fast-avx512bf16 and fast-amx, or NULL. */
static void check_full_fast_class(const char *name, bool f32_backward,
                                  const char *const hashes[FAST_BITS - 1]) {
    struct model_config c = shape(name, false);
    c.max_seq_len = 256;
    struct train_options o = options();
    struct train_sample s[] = {sample_make(1, 150, c.vocab_size, 0),
                               sample_make(2, 40, c.vocab_size, 0)};
    struct model *m[2];
    struct trainer *t[2];
    char hash[3][HASH_LEN];
    o.f32_backward = f32_backward;
    for (int cls = NUMERIC_EXACT; cls <= NUMERIC_FAST; cls++) {
        m[cls] = model_of(&c, (enum numeric_class)cls, NULL);
        t[cls] = trainer_new_full(m[cls], &o, NULL, &err);
        assert_int_equal(trainer_accumulate(t[cls], s, 2, &err), OK);
    }
    const double apart = gradient_distance(t[NUMERIC_EXACT], t[NUMERIC_FAST]);
    print_message("%s: gradients of both classes are %.4f apart\n", name, apart);
    assert_true(apart <= 0.06);
    for (int i = 0; i < 2; i++) trainer_free(t[i]), model_close(m[i]);
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        m[0] = model_of(&c, NUMERIC_FAST, pool);
        t[0] = trainer_new_full(m[0], &o, pool, &err);
        train_some(t[0], 0, 3, 1);
        params_hash(t[0], hash[threads - 1]);
        assert_string_equal(hash[threads - 1], hash[0]);
        trainer_free(t[0]), model_close(m[0]);
        pool_free(pool);
    }
    if (hashes && fast_bits() > 0) assert_string_equal(hash[0], hashes[fast_bits() - 1]);
    train_sample_release(&s[0]), train_sample_release(&s[1]);
    options_release(train_option_rows, &o);
}

static void test_full_fast_class(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(all_shapes); i++)
        check_full_fast_class(all_shapes[i], false, NULL);
    static const char
        *const int8[] = {"594c7eab97471acd43f9d4cf2635be1454f386cd67b49ec1fb6dc55f426aa320",
                         "d9bcf3d3dbc2ccdfc5fc5bf65da829becf97acee1cb13e3d4af2a3a4eae23dfd"},
               *const f32[] = {"c04f82281726b526a37297232652db78a41905f0bd8eb651a98979c2c9679d43",
                               "001730a78e50e16343b05e8699ecbc78c3408e69ffee313f0405ffdcdefed576"};
    check_full_fast_class("tiny-qwen3", false, int8);
    check_full_fast_class("tiny-qwen3", true, f32);
}

/* Recomputed activations equal stored ones. */
static void test_checkpointing(void **state) {
    (void)state;
    char stored[HASH_LEN], recomputed[HASH_LEN];
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    o.lora_dropout = 0.1;
    for (size_t i = 0; i < 2 * ARRAY_LEN(all_shapes); i++) {
        struct pair p = pair_make(all_shapes[i / 2], i % 2 ? TENSOR_Q4_0 : TENSOR_F32, i % 3 == 0);
        o.gradient_checkpointing = false;
        trained_hash(&p, &o, pool, stored);
        o.gradient_checkpointing = true;
        trained_hash(&p, &o, pool, recomputed);
        assert_string_equal(stored, recomputed);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* Calls of many rows are divided into passes, in which some layers keep their activations: the same
 * bits, for every adapter. */
static void test_checkpointing_passes(void **state) {
    (void)state;
    char hash[2][HASH_LEN];
    double nll[2];
    int64_t targets;
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    o.lora_dropout = 0.1;
    for (size_t i = 0; i < ARRAY_LEN(all_shapes); i++) {
        struct pair p = pair_make(all_shapes[i], i % 2 ? TENSOR_Q4_0 : TENSOR_BF16, i % 3 == 0);
        struct adapter *two[] = {p.ad, p.ad};
        struct train_sample *s = samples_make(200, p.m->config.vocab_size, 2, 70);
        for (int k = 0; k < 2; k++) {
            o.gradient_checkpointing = k;
            struct trainer *t = trainer_new_lora(p.m, two, 2, &o, pool, &err);
            struct update_stats stats;
            for (int n = 40; n <= 200; n += 80) { // one pass, then several, then more
                assert_int_equal(trainer_accumulate(t, s, n, &err), OK);
                assert_int_equal(trainer_update(t, 1e-3f, &stats, &err), OK);
            }
            assert_int_equal(trainer_eval_loss(t, s, 200, &nll[k], &targets, &err), OK);
            params_hash(t, hash[k]);
            trainer_free(t);
        }
        assert_string_equal(hash[0], hash[1]);
        assert_true(nll[0] == nll[1]);
        samples_free(s, 200);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

static void tokens_add(void *ctx, int64_t tokens) {
    int64_t *seen = ctx; // [2] tokens, calls
    assert_true(tokens >= seen[0]);
    seen[0] = tokens;
    seen[1]++;
}

/* Progress is reported after every layer of every pass, forward and backward. */
static void test_progress(void **state) {
    (void)state;
    struct train_options o = options();
    struct pair p = pair_make("tiny-llama", TENSOR_F32, false);
    struct train_sample *s = samples_make(40, p.m->config.vocab_size, 1, 70);
    struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
    struct trainer_passes passes = {0};
    int64_t seen[2] = {0}, rows = 0;
    for (int i = 0; i < 40; i++) rows += s[i].n - 1;
    trainer_limit_passes(t, SIZE_MAX, rows / 2, 70, 70, &passes);
    trainer_on_progress(t, tokens_add, seen);
    assert_int_equal(trainer_accumulate(t, s, 40, &err), OK);
    assert_true(seen[0] >= rows - 70 && seen[0] <= rows + 40);
    assert_true(seen[1] >= 4 * p.m->config.n_layers && seen[1] % (2 * p.m->config.n_layers) == 0);
    trainer_free(t);
    samples_free(s, 40);
    pair_release(&p);
    options_release(train_option_rows, &o);
}

/* Gradients of activations in int8 blocks have nearly the direction of those in f32. */
static void test_int8_backward(void **state) {
    (void)state;
    static const enum tensor_type types[] = {TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q5_0,
                                             TENSOR_NF4};
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct pair p = pair_make("tiny-llama", types[i], false);
        struct train_sample *s = samples_make(6, p.m->config.vocab_size, 1, 50);
        double dot = 0, one = 0, two = 0;
        struct trainer *t[2];
        for (int k = 0; k < 2; k++) {
            o.f32_backward = k;
            t[k] = trainer_new_lora(p.m, &p.ad, 1, &o, pool, &err);
            assert_int_equal(trainer_accumulate(t[k], s, 6, &err), OK);
        }
        for (int k = 0; k < trainer_n_tensors(t[0]); k++) {
            const struct train_tensor *a = trainer_tensor(t[0], k), *b = trainer_tensor(t[1], k);
            for (int64_t e = 0; e < a->n; e++) {
                dot += (double)a->g[e] * (double)b->g[e];
                one += (double)a->g[e] * (double)a->g[e];
                two += (double)b->g[e] * (double)b->g[e];
            }
        }
        print_message("%s: cosine %.6f, length %.5f\n", tensor_type_name(types[i]),
                      dot / sqrt(one * two), sqrt(one / two));
        assert_true(dot / sqrt(one * two) > 0.999 && fabs(sqrt(one / two) - 1) < 0.01);
        trainer_free(t[0]);
        trainer_free(t[1]);
        samples_free(s, 6);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* Every optimizer overfits eight samples, and continues from a file with the same bits. */
static void test_optimizers(void **state) {
    (void)state;
    static const char *const names[] = {"adamw", "adamw_8bit", "sgd"};
    char path[] = "/tmp/shoal-optim-XXXXXX", straight[HASH_LEN], resumed[HASH_LEN];
    struct model_config c = shape("tiny-llama", false);
    struct pair p = {model_make(&c, NULL), adapter_make(&c, 16, "all-linear", 3)};
    int fd = mkstemp(path);
    for (int i = 0; i < 3; i++) {
        struct train_options o = options();
        free(o.optim);
        o.optim = xstrdup(names[i]);
        struct trainer *t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err), *u;
        train_some(t, 0, 2, 1);
        assert_int_equal(trainer_save(t, path, NULL, &err), OK);
        u = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
        assert_int_equal(trainer_load(u, path, NULL, &err), OK);
        train_some(t, 2, 2, 1);
        train_some(u, 2, 2, 1);
        params_hash(t, straight);
        params_hash(u, resumed);
        assert_string_equal(straight, resumed);
        trainer_free(t);
        trainer_free(u);
        struct train_sample *s = samples_make(8, p.m->config.vocab_size, 1, 70);
        struct update_stats st, first;
        t = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
        for (int k = 0; k < 80; k++) {
            assert_int_equal(trainer_accumulate(t, s, 8, &err), OK);
            assert_int_equal(trainer_update(t, i == 2 ? 0.05f : 0.01f, &st, &err), OK);
            if (k == 0) first = st;
        }
        print_message("%s: loss %.4f to %.4f in 80 updates\n", names[i], first.loss, st.loss);
        assert_true(st.loss < 0.3 * first.loss);
        trainer_free(t);
        samples_free(s, 8);
        options_release(train_option_rows, &o);
    }
    close(fd);
    unlink(path);
    pair_release(&p);
}

/* The likelihood as a loss over log-probabilities. */
static int likelihood_loss(void *ctx, struct loss_sample *v, int n, struct error *e) {
    (void)e;
    for (int i = 0; i < n; i++) {
        ++*(int *)ctx;
        v[i].count = v[i].n;
        for (int32_t k = 0; k < v[i].n; k++) {
            v[i].weight[k] = -1;
            v[i].loss -= v[i].logp[k];
        }
    }
    return OK;
}

static void test_losses(void **state) {
    (void)state;
    struct pair p = pair_make("tiny-qwen3", TENSOR_F32, false);
    struct train_options o = options();
    struct trainer *t[2];
    struct update_stats st[2];
    struct train_sample *s = samples_make(6, p.m->config.vocab_size, 1, 90);
    int seen = 0;
    struct loss_fn loss = {.fn = likelihood_loss, .ctx = &seen};
    for (int k = 0; k < 2; k++) {
        t[k] = trainer_new_lora(p.m, &p.ad, 1, &o, NULL, &err);
        assert_int_equal(trainer_accumulate_loss(t[k], s, 6, k ? &loss : NULL, &err), OK);
        assert_int_equal(trainer_update(t[k], 1e-2f, &st[k], &err), OK);
    }
    assert_true(seen > 0 && fabs(st[0].loss - st[1].loss) < 1e-12 && st[0].loss > 0);
    char hash[2][HASH_LEN];
    for (int k = 0; k < 2; k++) params_hash(t[k], hash[k]);
    assert_string_equal(hash[0], hash[1]);
    for (int k = 0; k < 2; k++) trainer_free(t[k]);
    samples_free(s, 6);
    options_release(train_option_rows, &o);
    pair_release(&p);
}

/* Trains with passes within `bytes` (0: no limit) and hashes the parameters. Returns the peak of
 * the memory of passes, of which `least` receives the least possible. */
static void limited_hash(struct trainer *t, size_t bytes, int adapters, size_t *least,
                         char out[HASH_LEN]) {
    struct train_sample *s = samples_make(200, 300, adapters, 70);
    int64_t rows = 0, longest = 0;
    struct trainer_passes passes;
    for (int i = 0; i < 200; i++) {
        rows += s[i].n;
        longest = MAX(longest, s[i].n);
    }
    assert_false(trainer_limit_passes(t, 0, rows, longest, longest, &passes));
    *least = passes.bytes;
    if (bytes) assert_true(trainer_limit_passes(t, bytes, rows, longest, longest, &passes));
    assert_true(!bytes || passes.bytes <= bytes);
    for (int u = 0; u < 2; u++) {
        assert_int_equal(trainer_accumulate(t, s, 200, &err), OK);
        assert_int_equal(trainer_update(t, 1e-3f, NULL, &err), OK);
    }
    params_hash(t, out);
    samples_free(s, 200);
}

/* The memory that is computed before model and trainer exist is an upper bound of theirs, and not
 * far above it; in less memory the passes are smaller. */
static void test_passes_bound(void **state) {
    (void)state;
    enum { ROWS = 640, LONGEST = 70 };
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    for (size_t i = 0; i < ARRAY_LEN(all_shapes); i++) {
        struct pair p = pair_of(all_shapes[i], i % 2 ? TENSOR_Q4_0 : TENSOR_F32,
                                i % 2 ? NUMERIC_FAST : NUMERIC_EXACT, false);
        struct adapter *two[] = {p.ad, p.ad};
        struct trainer_passes bound, half;
        struct trainer *t = trainer_new_lora(p.m, two, 2, &o, pool, &err);
        size_t bytes = trainer_bytes(t, ROWS, LONGEST);
        trainer_passes_bound(&p.m->config, p.m->cls, &p.ad->config, 2, &o, pool, SIZE_MAX, ROWS,
                             LONGEST, &bound);
        if (bound.bytes < bytes || bound.bytes > bytes + bytes / 4 + (1 << 20))
            fail_msg("%s: %zu bytes, computed as %zu", all_shapes[i], bytes, bound.bytes);
        assert_int_equal(bound.rows, ROWS);
        trainer_passes_bound(&p.m->config, p.m->cls, &p.ad->config, 2, &o, pool,
                             bound.bytes * 3 / 4, ROWS, LONGEST, &half);
        assert_true(half.rows < ROWS && half.bytes <= bound.bytes * 3 / 4);
        trainer_free(t);
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* A limit of the memory of passes changes no bit, down to the smallest that is possible. */
static void test_limited_passes(void **state) {
    (void)state;
    char unlimited[HASH_LEN], limited[HASH_LEN];
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    o.lora_dropout = 0.1;
    for (size_t i = 0; i < 2 * ARRAY_LEN(all_shapes); i++) {
        struct pair p = pair_of(all_shapes[i / 2], i % 4 < 2 ? TENSOR_Q4_0 : TENSOR_BF16,
                                i % 2 ? NUMERIC_FAST : NUMERIC_EXACT, i % 3 == 0);
        struct adapter *two[] = {p.ad, p.ad};
        size_t least = 0;
        for (int k = 0; k < 4; k++) {
            struct trainer *t = trainer_new_lora(p.m, two, 2, &o, pool, &err);
            limited_hash(t, k ? (size_t)k * k * least : 0, 2, &least, k ? limited : unlimited);
            if (k) assert_string_equal(unlimited, limited);
            trainer_free(t);
        }
        pair_release(&p);
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

/* The same with the gradients of all weights, whose passes are not divided. */
static void test_limited_passes_full(void **state) {
    (void)state;
    char unlimited[HASH_LEN], limited[HASH_LEN];
    struct pool *pool = pool_new(2);
    struct train_options o = options();
    for (size_t i = 0; i < 2 * ARRAY_LEN(all_shapes); i++) {
        struct model_config c = shape(all_shapes[i / 2], false);
        size_t least = 0;
        for (int k = 0; k < 3; k++) {
            struct model *m = model_of(&c, i % 2 ? NUMERIC_FAST : NUMERIC_EXACT, pool);
            struct trainer *t = trainer_new_full(m, &o, pool, &err);
            limited_hash(t, k ? (size_t)k * least : 0, 1, &least, k ? limited : unlimited);
            if (k) assert_string_equal(unlimited, limited);
            trainer_free(t);
            model_close(m);
        }
    }
    options_release(train_option_rows, &o);
    pool_free(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_gradients),
        cmocka_unit_test(test_lora_gradients),
        cmocka_unit_test(test_long_sample),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_together_equals_alone),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_bad_checkpoints),
        cmocka_unit_test(test_overfit),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_training_equals_serving),
        cmocka_unit_test(test_kv_gradient),
        cmocka_unit_test(test_kv_checkpoint),
        cmocka_unit_test(test_vocab_gradients),
        cmocka_unit_test(test_vocab_equals_full),
        cmocka_unit_test(test_vocab_bits),
        cmocka_unit_test(test_vocab_served),
        cmocka_unit_test(test_activated),
        cmocka_unit_test(test_golden_hashes),
        cmocka_unit_test(test_fast_class),
        cmocka_unit_test(test_long_passes),
        cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_full_fast_class),
        cmocka_unit_test(test_checkpointing),
        cmocka_unit_test(test_checkpointing_passes),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_passes_bound),
        cmocka_unit_test(test_limited_passes),
        cmocka_unit_test(test_limited_passes_full),
        cmocka_unit_test(test_int8_backward),
        cmocka_unit_test(test_optimizers),
        cmocka_unit_test(test_losses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
