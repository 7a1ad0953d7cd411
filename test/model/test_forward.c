/*
 * The forward pass compared with an independent naive one in double. A row's bits do not depend on
 * chunks, other rows, adapters present or threads; the base is read once per call; zero adapters
 * change nothing.
 *
 * The naive pass below recomputes a whole sequence from the weights' rows with the C library's
 * functions; it shares no code with src/.
 */
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

// last: it needs four of the above
#include <cmocka.h>

enum { N_TOKENS = 24 };

struct naive {
    const struct model *m;
    const struct lora *loras;
    int n;
    double *k, *v; /* [L][n][K·E] */
};

static void naive_norm(double *y, const double *x, const float *g, int n, double eps) {
    double ss = 0;
    for (int i = 0; i < n; i++) ss += x[i] * x[i];
    double r = 1.0 / sqrt(ss / n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * (double)g[i];
}

static void naive_product(double *y, const double *x, const struct matrix *w) {
    float *row = xcalloc((size_t)w->k, sizeof *row);
    for (int64_t n = 0; n < w->n; n++) {
        matrix_get_row(w, n, row);
        y[n] = 0;
        for (int64_t k = 0; k < w->k; k++) y[n] += x[k] * (double)row[k];
    }
    free(row);
}

static void naive_linear(const struct naive *t, int layer, enum proj p, double *y,
                         const double *x) {
    const struct matrix *w = &t->m->layers[layer].proj[p];
    naive_product(y, x, w);
    if (!t->loras) return;
    const struct lora *lo = &t->loras[layer * N_PROJ + (int)p];
    for (int r = 0; r < lo->r; r++) {
        double a = 0;
        for (int64_t k = 0; k < w->k; k++) a += x[k] * (double)lo->a[r * w->k + k];
        for (int64_t n = 0; n < w->n; n++)
            y[n] += (double)lo->scale * a * (double)lo->b[n * lo->r + r];
    }
}

static void naive_rope(double *x, int pos, int e, double theta) {
    for (int i = 0; i < e / 2; i++) {
        double angle = pos * pow(theta, -2.0 * i / e), a = x[i], b = x[i + e / 2];
        x[i] = a * cos(angle) - b * sin(angle);
        x[i + e / 2] = b * cos(angle) + a * sin(angle);
    }
}

static void naive_attention(const struct naive *t, int layer, int pos, const double *q,
                            double *out) {
    const struct model_config *c = &t->m->config;
    int e = c->head_dim, kv = c->n_kv_heads * e;
    double score[N_TOKENS];
    for (int h = 0; h < c->n_heads; h++) {
        int g = h / (c->n_heads / c->n_kv_heads);
        const double *k = t->k + (int64_t)layer * t->n * kv + g * e,
                     *v = t->v + (int64_t)layer * t->n * kv + g * e;
        double sum = 0;
        for (int j = 0; j <= pos; j++) {
            score[j] = 0;
            for (int i = 0; i < e; i++) score[j] += q[h * e + i] * k[j * kv + i];
            sum += score[j] = exp(score[j] / sqrt(e));
        }
        for (int i = 0; i < e; i++) {
            out[h * e + i] = 0;
            for (int j = 0; j <= pos; j++) out[h * e + i] += score[j] / sum * v[j * kv + i];
        }
    }
}

static void naive_token(struct naive *t, int token, int pos, double *logits) {
    const struct model_config *c = &t->m->config;
    int d = c->d_model, e = c->head_dim, kv = c->n_kv_heads * e, ff = c->d_ff;
    double x[64], h[64], o[64], q[256], attn[256], gate[256], up[256];
    float embed[64];
    assert_true(d <= 64 && c->n_heads * e <= 256 && ff <= 256);
    matrix_get_row(&t->m->embed, token, embed);
    for (int i = 0; i < d; i++) x[i] = (double)embed[i];
    for (int l = 0; l < c->n_layers; l++) {
        const struct model_layer *w = &t->m->layers[l];
        double *k = t->k + ((int64_t)l * t->n + pos) * kv,
               *v = t->v + ((int64_t)l * t->n + pos) * kv;
        naive_norm(h, x, w->attn_norm, d, (double)c->rms_norm_eps);
        naive_linear(t, l, PROJ_Q, q, h);
        naive_linear(t, l, PROJ_K, k, h);
        naive_linear(t, l, PROJ_V, v, h);
        for (int i = 0; i < c->n_heads; i++) {
            if (w->q_norm) naive_norm(q + i * e, q + i * e, w->q_norm, e, (double)c->rms_norm_eps);
            naive_rope(q + i * e, pos, e, (double)c->rope_theta);
        }
        for (int i = 0; i < c->n_kv_heads; i++) {
            if (w->k_norm) naive_norm(k + i * e, k + i * e, w->k_norm, e, (double)c->rms_norm_eps);
            naive_rope(k + i * e, pos, e, (double)c->rope_theta);
        }
        naive_attention(t, l, pos, q, attn);
        naive_linear(t, l, PROJ_O, o, attn);
        for (int i = 0; i < d; i++) x[i] += o[i];
        naive_norm(h, x, w->ffn_norm, d, (double)c->rms_norm_eps);
        naive_linear(t, l, PROJ_GATE, gate, h);
        naive_linear(t, l, PROJ_UP, up, h);
        for (int i = 0; i < ff; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        naive_linear(t, l, PROJ_DOWN, o, gate);
        for (int i = 0; i < d; i++) x[i] += o[i];
    }
    naive_norm(h, x, t->m->final_norm, d, (double)c->rms_norm_eps);
    naive_product(logits, h, &t->m->head);
}

/* logits [n][V] */
static void naive_run(const struct model *m, const struct lora *loras, const int32_t *tokens, int n,
                      double *logits) {
    size_t kv = (size_t)(m->config.n_layers * n * m->config.n_kv_heads * m->config.head_dim);
    struct naive t = {.m = m,
                      .loras = loras,
                      .n = n,
                      .k = xcalloc(kv, sizeof(double)),
                      .v = xcalloc(kv, sizeof(double))};
    for (int i = 0; i < n; i++)
        naive_token(&t, tokens[i], i, logits + (int64_t)i * m->config.vocab_size);
    free(t.k);
    free(t.v);
}

static void tokens_fill(int32_t *v, int n, int32_t vocab, uint32_t id) {
    struct rng rng = rng_make(3, RNG_TEST, id, 0);
    for (int i = 0; i < n; i++) v[i] = (int32_t)rng_below(&rng, (uint32_t)vocab);
}

static struct forward *forward_make(const struct model *m, struct pool *pool) {
    struct forward_options o = {.max_rows = 64, .n_slots = 24, .slot_len = 32, .pool = pool};
    return forward_new(m, &o);
}

/* Tokens of a sequence from this position on count as sampled: [slot]. */
static int sampled_from[24];

static bool row_is_sampled(int slot, int pos) {
    return sampled_from[slot] > 0 && pos >= sampled_from[slot];
}

/* One sequence into `slot` from position `from`, `chunk` rows a call, logits of all rows:
 * [n][V]. */
static void sequence_run(struct forward *f, const struct model *m, struct adapter *a,
                         const int32_t *tokens, int from, int n, int slot, int chunk,
                         float *logits) {
    struct batch_row rows[64];
    int32_t out[64];
    for (int pos = from; pos < n; pos += chunk) {
        int count = MIN(chunk, n - pos);
        for (int i = 0; i < count; i++) {
            rows[i] = (struct batch_row){.token = tokens[pos + i],
                                         .pos = pos + i,
                                         .slot = slot,
                                         .sampled = row_is_sampled(slot, pos + i)};
            out[i] = i;
        }
        struct lora_part part;
        struct lora_segment seg = adapter_lora_segment(a, 0, count, &part);
        forward_run(f, rows, count, &seg, 1, out, count,
                    logits + (int64_t)pos * m->config.vocab_size);
    }
}

static void assert_close_to_naive(const struct model *m, struct adapter *a) {
    int32_t tokens[N_TOKENS], vocab = m->config.vocab_size;
    float *got = xcalloc((size_t)(N_TOKENS * vocab), sizeof *got);
    double *want = xcalloc((size_t)(N_TOKENS * vocab), sizeof *want), worst = 0, top = 0;
    const struct lora *loras = a ? a->loras : NULL;
    struct forward *f = forward_make(m, NULL);
    tokens_fill(tokens, N_TOKENS, vocab, 0);
    sequence_run(f, m, a, tokens, 0, N_TOKENS, 1, 7, got);
    naive_run(m, loras, tokens, N_TOKENS, want);
    for (int i = 0; i < N_TOKENS * vocab; i++) {
        worst = fmax(worst, fabs((double)got[i] - want[i]));
        top = fmax(top, fabs(want[i]));
    }
    assert_true(top > 0.5);
    if (!(worst < 2e-5 * top)) fail_msg("off by %g of %g", worst, top);
    forward_free(f);
    free(got);
    free(want);
}

static void naive_agrees(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        bool tied;
    } cases[] = {
        {"tiny-llama", false}, {"tiny-llama", true}, {"tiny-qwen3", false}, {"tiny-qwen3", true}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct model *m = fixture_model(cases[i].shape, cases[i].tied, TENSOR_F32, NUMERIC_EXACT);
        struct adapter *all = fixture_adapter(&m->config, 5, "all-linear", 0.2f, 1);
        struct adapter *some = fixture_adapter(&m->config, 16, "q_proj,down_proj", 0.1f, 2);
        assert_close_to_naive(m, NULL);
        assert_close_to_naive(m, all);
        assert_close_to_naive(m, some);
        adapter_release(all);
        adapter_release(some);
        model_close(m);
    }
}

/* A rank larger than the scratch of one round. */
static void large_rank_agrees(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 530, "all-linear", 0.02f, 1);
    assert_close_to_naive(m, a);
    adapter_release(a);
    model_close(m);
}

/* All tokens at once, under a perturbation and the adapter with factors of type `e`. */
static void adapted_run(const struct model *m, const struct adapter *a, enum dtype e,
                        float *logits) {
    int32_t tokens[N_TOKENS], out[N_TOKENS];
    struct batch_row rows[N_TOKENS];
    struct lora_part parts[] = {{.noise = {5, 3}, .weight = 0.01f},
                                {.pack = a ? adapter_pack(a, e) : NULL, .weight = 1.0f}};
    struct lora_segment seg = {0, N_TOKENS, parts, a ? 2 : 1, NULL};
    struct forward *f = forward_make(m, NULL);
    tokens_fill(tokens, N_TOKENS, m->config.vocab_size, 0);
    for (int i = 0; i < N_TOKENS; i++) {
        rows[i] = (struct batch_row){tokens[i], i, 1};
        out[i] = i;
    }
    forward_run(f, rows, N_TOKENS, &seg, 1, out, N_TOKENS, logits);
    forward_free(f);
}

/* Factors in narrow types, of odd ranks and over bases with and without int8 inputs: the error is
 * small compared with the adapter's effect. */
static void narrow_factors_agree(void **state) {
    (void)state;
    static const int ranks[] = {1, 3, 8, 67};
    static const double max_error[N_DTYPE] = {
        [DTYPE_F32] = 0, [DTYPE_BF16] = 1e-2, [DTYPE_F16] = 2e-3, [DTYPE_I8] = 4e-2};
    for (int q = 0; q < 2; q++) {
        struct model *m =
            fixture_model("tiny-llama", false, q ? TENSOR_Q8_0 : TENSOR_F32, NUMERIC_EXACT);
        int64_t n = N_TOKENS * m->config.vocab_size;
        float *base = xcalloc((size_t)n, sizeof *base), *full = xcalloc((size_t)n, sizeof *full),
              *got = xcalloc((size_t)n, sizeof *got);
        adapted_run(m, NULL, DTYPE_F32, base);
        for (size_t i = 0; i < ARRAY_LEN(ranks) * N_DTYPE; i++) {
            enum dtype e = (enum dtype)(i % N_DTYPE);
            struct adapter *a =
                fixture_adapter(&m->config, ranks[i / N_DTYPE], "all-linear", 0.1f, 3);
            adapted_run(m, a, e, e == DTYPE_F32 ? full : got);
            double error = 0, effect = 0;
            for (int64_t j = 0; e != DTYPE_F32 && j < n; j++) {
                error += pow((double)(got[j] - full[j]), 2);
                effect += pow((double)(full[j] - base[j]), 2);
            }
            assert_true(e == DTYPE_F32 || (error > 0 && effect > 0));
            if (sqrt(error) > (max_error[e] + (q ? 8e-2 : 0)) * sqrt(effect))
                fail_msg("%s, rank %d: %g of %g", m->type == TENSOR_F32 ? "f32" : "q8_0",
                         ranks[i / N_DTYPE], sqrt(error), sqrt(effect));
            adapter_release(a);
        }
        free(base);
        free(full);
        free(got);
        model_close(m);
    }
}

static void rope_agrees(void **state) {
    (void)state;
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find("smollm-135m", &c, &err), OK);
    float *cs = xcalloc(2048 * 32, sizeof *cs), *sn = xcalloc(2048 * 32, sizeof *sn);
    rope_table(&c, 2048, cs, sn);
    for (int p = 0; p < 2048; p += 89)
        for (int i = 0; i < 32; i++) {
            double angle = p * pow(1e4, -2.0 * i / 64);
            assert_true(fabs((double)cs[p * 32 + i] - cos(angle)) < 1e-7);
            assert_true(fabs((double)sn[p * 32 + i] - sin(angle)) < 1e-7);
        }
    free(cs);
    free(sn);
}

/* Six sequences, each with a different adapter (two share one, one has none), interleaved in one
 * batch in uneven chunks, must give the bits of single runs, row by row. Two of them end with
 * sampled rows, which come first in a batch. */
enum { N_SEQS = 6, N_KNOWN = 11 };

/* The number of next rows of sequence s: at most `max`, all sampled or all known. */
static int mixed_count(int s, int pos, int max) {
    int end = row_is_sampled(s, pos) || !sampled_from[s] ? N_TOKENS : sampled_from[s];
    return MIN(max, end - pos);
}

static void mixed_run(struct forward *f, const struct model *m, struct adapter *const *by_seq,
                      int32_t tokens[N_SEQS][N_TOKENS], uint32_t id, float *logits) {
    int pos[N_SEQS] = {0}, n_left = N_SEQS * N_TOKENS;
    int64_t vocab = m->config.vocab_size;
    float *buf = xcalloc((size_t)(64 * vocab), sizeof *buf);
    struct rng rng = rng_make(17, RNG_TEST, id, 0);
    while (n_left > 0) {
        struct batch_row rows[64];
        struct lora_segment segs[N_SEQS];
        struct lora_part parts[N_SEQS];
        int32_t out[64], n = 0, n_segs = 0;
        for (int i = 0; i < 2 * N_SEQS; i++) {
            int s = i % N_SEQS, max = (int)rng_below(&rng, 10), count = mixed_count(s, pos[s], max);
            bool sampled = row_is_sampled(s, pos[s]);
            if (count == 0 || sampled != (i < N_SEQS)) continue;
            if (n_segs > 0 && rows[n - 1].slot == s) continue;
            segs[n_segs++] = adapter_lora_segment(by_seq[s], n, n + count, &parts[s]);
            for (int k = 0; k < count; k++, n++) {
                rows[n] = (struct batch_row){.token = tokens[s][pos[s] + k],
                                             .pos = pos[s] + k,
                                             .slot = s,
                                             .sampled = sampled};
                out[n] = n;
            }
            pos[s] += count;
        }
        if (n == 0) continue;
        forward_run(f, rows, n, segs, n_segs, out, n, buf);
        for (int i = 0; i < n; i++)
            memcpy(logits + (rows[i].slot * N_TOKENS + rows[i].pos) * vocab, buf + i * vocab,
                   (size_t)vocab * sizeof *buf);
        n_left -= n;
    }
    free(buf);
}

static void assert_bits_invariant(const struct model *m) {
    int64_t vocab = m->config.vocab_size, per_seq = N_TOKENS * vocab;
    struct adapter *a[4], *by_seq[N_SEQS];
    int32_t tokens[N_SEQS][N_TOKENS];
    for (int i = 0; i < 4; i++)
        a[i] = fixture_adapter(&m->config, 1 + 7 * i, i == 2 ? "q_proj,v_proj" : "all-linear", 0.2f,
                               (uint64_t)i);
    for (int s = 0; s < N_SEQS; s++) {
        by_seq[s] = s == 5 ? NULL : a[s % 4];
        tokens_fill(tokens[s], N_TOKENS, (int32_t)vocab, (uint32_t)s);
    }
    float *want = xcalloc((size_t)(N_SEQS * per_seq), sizeof *want);
    float *got = xcalloc((size_t)(N_SEQS * per_seq), sizeof *got);
    struct forward *single = forward_make(m, NULL);
    sampled_from[1] = sampled_from[4] = N_KNOWN;
    for (int s = 0; s < N_SEQS; s++)
        sequence_run(single, m, by_seq[s], tokens[s], 0, N_TOKENS, s, 1, want + s * per_seq);
    forward_free(single);
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        struct forward *f = forward_make(m, pool);
        for (uint32_t id = 0; id < 2; id++) {
            mixed_run(f, m, by_seq, tokens, id, got);
            assert_memory_equal(got, want, (size_t)(N_SEQS * per_seq) * sizeof *got);
        }
        forward_free(f);
        pool_free(pool);
    }
    sampled_from[1] = sampled_from[4] = 0;
    for (int i = 0; i < 4; i++) adapter_release(a[i]);
    free(want);
    free(got);
}

static void bits_invariant(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        enum tensor_type type;
        enum numeric_class cls;
    } cases[] = {
        {"tiny-llama", TENSOR_F32, NUMERIC_EXACT},    {"tiny-qwen3", TENSOR_F32, NUMERIC_EXACT},
        {"tiny-llama", TENSOR_Q8_0, NUMERIC_EXACT},   {"tiny-qwen3", TENSOR_Q4_0, NUMERIC_EXACT},
        {"tiny-llama", TENSOR_BF16, NUMERIC_EXACT},   {"tiny-qwen3", TENSOR_BF16, NUMERIC_FAST},
        {"tiny-qwen2", TENSOR_F32, NUMERIC_EXACT},    {"tiny-gemma3", TENSOR_F32, NUMERIC_EXACT},
        {"tiny-gemma3", TENSOR_Q8_0, NUMERIC_FAST},   {"tiny-gpt-neo", TENSOR_F32, NUMERIC_EXACT},
        {"tiny-gpt-neo", TENSOR_Q4_0, NUMERIC_EXACT}, {"tiny-llama", TENSOR_Q8_0, NUMERIC_FAST},
        {"tiny-qwen3", TENSOR_Q4_0, NUMERIC_FAST},    {"tiny-gpt-neo", TENSOR_F32, NUMERIC_FAST},
        {"tiny-llama", TENSOR_NF4, NUMERIC_FAST},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct model *m = fixture_model(cases[i].shape, i % 2, cases[i].type, cases[i].cls);
        assert_bits_invariant(m);
        model_close(m);
    }
}

/* Large enough to use the thread pool: the divisions are inside matrices and inside low-rank
 * parts. */
static void wide_bits_invariant(void **state) {
    (void)state;
    for (int cls = NUMERIC_EXACT; cls <= NUMERIC_FAST; cls++) {
        struct model *m = fixture_model("fry-1", true, TENSOR_Q8_0, (enum numeric_class)cls);
        assert_bits_invariant(m);
        model_close(m);
    }
    static const char *const shapes[] = {"tiny-gemma3", "tiny-gpt-neo"};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model_config c;
        struct error err;
        assert_int_equal(model_preset_find(shapes[i], &c, &err), OK);
        c.d_model = 192;
        c.d_ff = 512;
        struct model *m = fixture_model_of(c, true, TENSOR_F32, NUMERIC_EXACT);
        assert_bits_invariant(m);
        model_close(m);
    }
}

enum { REQUESTED_SEQS = 4, REQUESTED_LEN = 5, REQUESTED_ROWS = REQUESTED_SEQS * REQUESTED_LEN };

/* Runs four sequences of five tokens, the third without an adapter, then one more token of each.
 * The logits of the latter follow those of `out`. */
static void requested_run(const struct model *m, struct adapter *const a[], const int32_t *out,
                          int32_t n_out, float *logits) {
    struct forward *f = forward_make(m, NULL);
    struct batch_row rows[REQUESTED_ROWS];
    struct lora_segment segs[REQUESTED_SEQS];
    struct lora_part parts[REQUESTED_SEQS];
    const int32_t all[] = {0, 1, 2, 3};
    int n = 0;
    for (int32_t i = 0; i < REQUESTED_ROWS; i++)
        rows[i] =
            (struct batch_row){.token = 7 + i, .pos = i % REQUESTED_LEN, .slot = i / REQUESTED_LEN};
    for (int32_t s = 0; s < REQUESTED_SEQS; s++)
        if (s != 2)
            segs[n++] = adapter_lora_segment(a[s % 2], s * REQUESTED_LEN, (s + 1) * REQUESTED_LEN,
                                             &parts[s]);
    forward_run(f, rows, REQUESTED_ROWS, segs, n, out, n_out, logits);
    for (int32_t s = 0; s < REQUESTED_SEQS; s++)
        rows[s] = (struct batch_row){.token = 3 + s, .pos = REQUESTED_LEN, .slot = s};
    segs[0] = adapter_lora_segment(a[0], 0, 1, &parts[0]);
    forward_run(f, rows, REQUESTED_SEQS, segs, 1, all, REQUESTED_SEQS,
                logits + (int64_t)n_out * m->config.vocab_size);
    forward_free(f);
}

/* Rows without requested results are omitted from the last layer. This changes neither the bits of
 * the other rows nor the cache for the next token. */
static void rows_without_results_are_omitted(void **state) {
    (void)state;
    static const char *const shapes[] = {"tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-gpt-neo"};
    static const int32_t requested[] = {0, 4, 7, 8, 11, 19};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model *m =
            fixture_model(shapes[i], true, i == 1 ? TENSOR_Q4_0 : TENSOR_F32, NUMERIC_EXACT);
        size_t v = (size_t)m->config.vocab_size;
        struct adapter *a[2] = {fixture_adapter(&m->config, 8, "all-linear", 0.2f, 1),
                                fixture_adapter(&m->config, 3, "q_proj,o_proj", 0.2f, 2)};
        float *want = xcalloc((REQUESTED_ROWS + REQUESTED_SEQS) * v, sizeof *want),
              *got = xcalloc((REQUESTED_ROWS + REQUESTED_SEQS) * v, sizeof *got);
        int32_t all[REQUESTED_ROWS];
        for (int32_t k = 0; k < REQUESTED_ROWS; k++) all[k] = k;
        requested_run(m, a, all, REQUESTED_ROWS, want);
        for (int n_requested = 0; n_requested <= (int)ARRAY_LEN(requested); n_requested += 3) {
            requested_run(m, a, requested, n_requested, got);
            for (int k = 0; k < n_requested; k++)
                assert_memory_equal(got + (size_t)k * v, want + (size_t)requested[k] * v,
                                    v * sizeof *got);
            assert_memory_equal(got + (size_t)n_requested * v, want + REQUESTED_ROWS * v,
                                REQUESTED_SEQS * v * sizeof *got);
        }
        free(want);
        free(got);
        adapter_release(a[0]);
        adapter_release(a[1]);
        model_close(m);
    }
}

enum { HALVES_SEQS = 2, HALVES_MEMBERS = 4, HALVES_ROWS = HALVES_MEMBERS * REQUESTED_LEN };

/* Rows of four members, each with its adapter or none, which share two sequences of tokens. */
static int halves_rows(struct adapter *const a[], struct batch_row *rows, struct lora_segment *segs,
                       struct lora_part *parts) {
    int n = 0;
    for (int32_t i = 0; i < HALVES_ROWS; i++)
        rows[i] = (struct batch_row){.token = 9 + i % (HALVES_SEQS * REQUESTED_LEN),
                                     .pos = i % REQUESTED_LEN,
                                     .slot = i / REQUESTED_LEN};
    for (int32_t s = 0; s < HALVES_MEMBERS; s++)
        if (a[s])
            segs[n++] =
                adapter_lora_segment(a[s], s * REQUESTED_LEN, (s + 1) * REQUESTED_LEN, &parts[s]);
    return n;
}

static void assert_halves_equal_whole(const struct model *m, int32_t first, struct pool *pool) {
    static const int32_t out[] = {4, 8, 9, 14, 19};
    enum { N_OUT = ARRAY_LEN(out) };
    size_t d = (size_t)m->config.d_model, n = N_OUT * (size_t)m->config.vocab_size;
    struct adapter *a[HALVES_MEMBERS] = {
        fixture_adapter_from(&m->config, first, 8, "all-linear", 0.2f, 1),
        fixture_adapter_from(&m->config, first, 3, "k_proj,o_proj", 0.2f, 2), NULL,
        fixture_adapter_from(&m->config, m->config.n_layers - 1, 1, "q_proj", 0.2f, 3)};
    struct batch_row rows[HALVES_ROWS];
    struct lora_segment segs[HALVES_MEMBERS];
    struct lora_part parts[HALVES_MEMBERS];
    const float *streams[HALVES_ROWS];
    float *want = xcalloc(n, sizeof *want), *got = xcalloc(n, sizeof *got),
          *stream = xcalloc(HALVES_SEQS * REQUESTED_LEN * d, sizeof *stream);
    int n_segs = halves_rows(a, rows, segs, parts);
    struct forward *whole = forward_make(m, NULL), *halves = forward_make(m, pool);
    forward_run(whole, rows, HALVES_ROWS, segs, n_segs, out, N_OUT, want);
    forward_lower_layers(halves, first, rows, HALVES_SEQS * REQUESTED_LEN, stream);
    for (int32_t i = 0; i < HALVES_ROWS; i++) {
        streams[i] = stream + (size_t)(i % (HALVES_SEQS * REQUESTED_LEN)) * d;
        rows[i].slot = HALVES_MEMBERS - rows[i].slot;
    }
    forward_upper_layers(halves, first, streams, rows, HALVES_ROWS, segs, n_segs, out, N_OUT, got);
    assert_memory_equal(got, want, n * sizeof *got);
    forward_free(whole);
    forward_free(halves);
    for (int i = 0; i < HALVES_MEMBERS; i++) adapter_release(a[i]);
    free(want);
    free(got);
    free(stream);
}

/* If adapters change only upper layers, the lower layers are computed once per sequence: the bits
 * are those of the full computation. */
static void lower_layers_are_shared(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        int32_t first;
        enum tensor_type type;
    } cases[] = {{"tiny-llama", 1, TENSOR_F32},  {"tiny-qwen3", 1, TENSOR_Q4_0},
                 {"tiny-gemma3", 2, TENSOR_F32}, {"tiny-gpt-neo", 1, TENSOR_F32},
                 {"fry-1", 4, TENSOR_Q8_0},      {"fry-1", 1, TENSOR_BF16}};
    struct pool *pool = pool_new(2);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct model *m = fixture_model(cases[i].shape, true, cases[i].type, NUMERIC_EXACT);
        assert_halves_equal_whole(m, cases[i].first, i % 2 ? NULL : pool);
        model_close(m);
    }
    pool_free(pool);
}

static void base_read_once(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct forward *f = forward_make(m, NULL);
    struct adapter *a[20];
    struct batch_row rows[20];
    struct lora_segment segs[20];
    struct lora_part parts[20];
    int32_t out[20];
    float *logits = xcalloc(20 * 300, sizeof *logits);
    for (int i = 0; i < 20; i++) {
        a[i] = fixture_adapter(&m->config, 8, "all-linear", 0.1f, (uint64_t)i);
        rows[i] = (struct batch_row){.token = i, .pos = 0, .slot = i};
        segs[i] = adapter_lora_segment(a[i], i, i + 1, &parts[i]);
        out[i] = i;
    }
    uint64_t per_step = 7 * (uint64_t)m->config.n_layers + 1;
    forward_run(f, rows, 20, segs, 20, out, 20, logits);
    assert_int_equal(forward_stats(f)->weight_passes, per_step);
    // no results: neither the head is read, nor the last layer's q, o, gate, up and down
    forward_run(f, rows, 20, segs, 20, out, 0, logits);
    assert_int_equal(forward_stats(f)->weight_passes, 2 * per_step - 6);
    assert_int_equal(forward_stats(f)->steps, 2);
    assert_int_equal(forward_stats(f)->rows, 40);
    for (int i = 0; i < 20; i++) adapter_release(a[i]);
    forward_free(f);
    model_close(m);
    free(logits);
}

static void adapters_change_results(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter_config c = {.r = 4, .alpha = 8};
    for (int p = 0; p < N_PROJ; p++) c.target[p] = true;
    struct adapter *zero = adapter_new(&m->config, &c, 3),
                   *real = fixture_adapter(&m->config, 4, "v_proj", 0.2f, 4);
    size_t n = (size_t)(N_TOKENS * m->config.vocab_size);
    float *base = xcalloc(n, sizeof *base), *adapted = xcalloc(n, sizeof *adapted);
    int32_t tokens[N_TOKENS];
    tokens_fill(tokens, N_TOKENS, m->config.vocab_size, 9);
    struct forward *f = forward_make(m, NULL);
    sequence_run(f, m, NULL, tokens, 0, N_TOKENS, 0, 5, base);
    sequence_run(f, m, zero, tokens, 0, N_TOKENS, 1, 5, adapted);
    for (size_t i = 0; i < n; i++) assert_true(base[i] == adapted[i]); // -0 and +0 are equal here
    sequence_run(f, m, real, tokens, 0, N_TOKENS, 1, 5, adapted);
    assert_memory_not_equal(base, adapted, n * sizeof *base);
    forward_free(f);
    adapter_release(zero);
    adapter_release(real);
    model_close(m);
    free(base);
    free(adapted);
}

static void copies_continue(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    int64_t vocab = m->config.vocab_size;
    size_t n = (size_t)(N_TOKENS * vocab);
    float *want = xcalloc(n, sizeof *want), *got = xcalloc(n, sizeof *got);
    int32_t tokens[N_TOKENS];
    tokens_fill(tokens, N_TOKENS, (int32_t)vocab, 2);
    struct forward *f = forward_make(m, NULL);
    sequence_run(f, m, NULL, tokens, 0, N_TOKENS, 3, 24, want);
    kv_cache_share_prefix(forward_kv_cache(f), 3, 7, 10);
    sequence_run(f, m, NULL, tokens, 10, N_TOKENS, 7, 4, got);
    assert_memory_equal(got + 10 * vocab, want + 10 * vocab, (size_t)(14 * vocab) * sizeof *got);
    forward_free(f);
    model_close(m);
    free(want);
    free(got);
}

static void hidden_is_final_norm(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct forward *f = forward_make(m, NULL);
    int32_t tokens[4] = {1, 2, 3, 4}, d = m->config.d_model;
    float *logits = xcalloc(4 * 300, sizeof *logits), dot = 0,
          *row = xcalloc((size_t)d, sizeof *row);
    sequence_run(f, m, NULL, tokens, 0, 4, 0, 4, logits);
    matrix_get_row(&m->head, 17, row);
    dot = kernels_get()->dot(forward_hidden(f) + 2 * d, row, d);
    assert_true(dot == logits[2 * 300 + 17]);
    forward_free(f);
    model_close(m);
    free(logits);
    free(row);
}

static const int32_t story[] = {
    403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426,
    338, 401, 396, 267, 337, 410, 408, 419, 292, 411, 322, 265, 282, 295, 433,
    426, 385, 328, 432, 358, 394, 261, 370, 432, 352, 266, 268, 388, 426, 338,
    391, 266, 267, 337, 335, 312, 432, 398, 312, 286, 267, 414, 270, 333, 415,
};

/* The greedy continuation of BOS and the first logits of an independent program (REFERENCE.txt next
 * to the file). Tokens with nearly equal logits could differ; none does at any level. */
static void stories_reproduced(void **state) {
    (void)state;
    static const double first[] = {-6.22291, 8.40434, -6.22374, -6.22254, -6.22195, -6.22288};
    char *bin = fixture_shared("data/stories260K/stories260K.bin");
    char *tok = bin ? fixture_shared("data/stories260K/tok512.bin") : NULL;
    struct error err;
    if (!tok) {
        free(bin);
        skip();
    }
    struct model *m = llama2c_open(bin, tok, NUMERIC_EXACT, &err);
    if (!m) fail_msg("%s", err.text);
    struct forward_options o = {.max_rows = 1, .n_slots = 1, .slot_len = 64};
    struct forward *f = forward_new(m, &o);
    float logits[512];
    struct batch_row row = {.token = 1};
    for (size_t i = 0; i < ARRAY_LEN(story); i++, row.pos++) {
        forward_run(f, &row, 1, NULL, 0, (int32_t[]){0}, 1, logits);
        for (int j = 0; i == 0 && j < 6; j++)
            assert_true(fabs((double)logits[j] - first[j]) < 2e-5);
        row.token = 0;
        for (int32_t j = 1; j < 512; j++)
            if (logits[j] > logits[row.token]) row.token = j;
        assert_int_equal(row.token, story[i]);
    }
    forward_free(f);
    model_close(m);
    free(bin);
    free(tok);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(naive_agrees),
        cmocka_unit_test(large_rank_agrees),
        cmocka_unit_test(narrow_factors_agree),
        cmocka_unit_test(rope_agrees),
        cmocka_unit_test(bits_invariant),
        cmocka_unit_test(wide_bits_invariant),
        cmocka_unit_test(rows_without_results_are_omitted),
        cmocka_unit_test(base_read_once),
        cmocka_unit_test(adapters_change_results),
        cmocka_unit_test(copies_continue),
        cmocka_unit_test(hidden_is_final_norm),
        cmocka_unit_test(stories_reproduced),
        cmocka_unit_test(lower_layers_are_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
