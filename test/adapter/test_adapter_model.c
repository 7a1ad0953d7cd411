/*
 * test_adapter_model: all kinds of adapters with a model.
 *
 * Logits are compared with test/oracle/adapter.py, PEFT's formulas in double (test/golden/adapter),
 * for adapters that are served, saved and loaded in both formats, and merged. In addition: the bits
 * of a row do not depend on other rows, threads or chunks, for all kinds of adapters in a batch;
 * hostile GGUF files are refused.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "fixture.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

// last: it needs four of the above
#include <cmocka.h>

#define GOLDEN "test/golden/adapter"
enum { MAX_TOKENS = 16, MAX_CASES = 32 };

struct golden {
    char name[64], base[64];
    int n;
    int32_t tokens[MAX_TOKENS];
    double *logits; /* [n][V] */
};
static struct golden golden[MAX_CASES];
static int n_golden;
static char *temp_dir; /* temporary folder */

static struct model *base_open(const char *name) {
    struct error err = {0};
    char *path = xasprintf(GOLDEN "/%s", name);
    struct model *m = model_open(path, NUMERIC_EXACT, &err);
    if (!m) fail_msg("%s", err.text);
    free(path);
    return m;
}

static struct adapter *open_ok(const char *path, struct model *m) {
    struct error err = {0};
    struct adapter *a = adapter_open(path, m, &err);
    if (!a) fail_msg("%s", err.text);
    return a;
}

static struct adapter *case_open(const struct golden *g, struct model *m) {
    char *path = xasprintf(GOLDEN "/%s", g->name);
    struct adapter *a = open_ok(path, m);
    free(path);
    return a;
}

static int golden_setup(void **state) {
    (void)state;
    FILE *f = fopen(GOLDEN "/expected.txt", "r");
    assert_non_null(f);
    assert_true(fscanf(f, "#%*[^\n]\n") >= 0);
    while (n_golden < MAX_CASES) {
        struct golden *g = &golden[n_golden];
        if (fscanf(f, "%63s %63s %d", g->name, g->base, &g->n) != 3) break;
        assert_true(g->n > 0 && g->n <= MAX_TOKENS);
        for (int i = 0; i < g->n; i++) assert_int_equal(fscanf(f, "%d", &g->tokens[i]), 1);
        struct model *m = base_open(g->base);
        int values = g->n * m->config.vocab_size;
        g->logits = xcalloc((size_t)values, sizeof *g->logits);
        for (int i = 0; i < values; i++) assert_int_equal(fscanf(f, "%lf", &g->logits[i]), 1);
        model_close(m);
        n_golden++;
    }
    fclose(f);
    assert_true(n_golden >= 16);
    const char *tmp = getenv("TMPDIR");
    temp_dir = xasprintf("%s/shoal-adapter-model-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(temp_dir));
    return 0;
}

static int golden_teardown(void **state) {
    (void)state;
    for (int i = 0; i < n_golden; i++) free(golden[i].logits);
    char *command = xasprintf("rm -r '%s'", temp_dir);
    int rc = system(command);
    free(command);
    free(temp_dir);
    return rc;
}

/* Logits [n][V], computed a few rows at a time. */
static float *logits_run(const struct model *m, const struct adapter *a, const int32_t *tokens,
                         int n) {
    struct forward_options o = {.max_rows = 3, .n_slots = 1, .slot_len = 32};
    struct forward *f = forward_new(m, &o);
    float *logits = xcalloc((size_t)(n * m->config.vocab_size), sizeof *logits);
    int activation = a ? MIN(adapter_activation(&a->config, tokens, n), n) : 0;
    for (int at = 0; at < n; at += 3) {
        int count = MIN(3, n - at);
        struct batch_row rows[3];
        for (int i = 0; i < count; i++)
            rows[i] = (struct batch_row){.token = tokens[at + i], .pos = at + i};
        struct lora_part part;
        int first = MIN(MAX(activation - at, 0), count);
        struct lora_segment seg = adapter_lora_segment(a, first, count, &part);
        forward_run(f, rows, count, &seg, first < count, (int32_t[]){0, 1, 2}, count,
                    logits + at * m->config.vocab_size);
    }
    forward_free(f);
    return logits;
}

static void assert_golden(const struct golden *g, const struct model *m, const struct adapter *a,
                          const char *how) {
    float *got = logits_run(m, a, g->tokens, g->n);
    double worst = 0, top = 0;
    for (int i = 0; i < g->n * m->config.vocab_size; i++) {
        worst = fmax(worst, fabs((double)got[i] - g->logits[i]));
        top = fmax(top, fabs(g->logits[i]));
    }
    if (!(worst < 1e-5 * top)) fail_msg("%s, %s: off by %g of %g", g->name, how, worst, top);
    free(got);
}

static void golden_agrees(void **state) {
    (void)state;
    for (int i = 0; i < n_golden; i++) {
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m);
        assert_golden(&golden[i], m, a, "served");
        adapter_release(a);
        model_close(m);
    }
}

static struct buf read_file(const char *dir, const char *name) {
    struct buf b = {0};
    struct error err;
    char *path = path_join(dir, name);
    if (file_read(path, 1 << 24, &b, &err)) fail_msg("%s", err.text);
    free(path);
    return b;
}

static void assert_same_file(const char *a, const char *b, const char *name) {
    struct buf x = read_file(a, name), y = read_file(b, name);
    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len);
    buf_release(&x);
    buf_release(&y);
}

static void save_ok(const struct adapter *a, const char *dir, const char *base) {
    struct error err = {0};
    if (adapter_save(a, dir, base, &err)) fail_msg("%s", err.text);
}

/* Saves, loads and saves each adapter: the adapters and the files are equal. */
static void saved_twice_same_bytes(void **state) {
    (void)state;
    char *one = path_join(temp_dir, "one"), *two = path_join(temp_dir, "two");
    for (int i = 0; i < n_golden; i++) {
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m);
        assert_string_equal(a->base, golden[i].base);
        save_ok(a, one, a->base);
        struct adapter *b = open_ok(one, m);
        save_ok(b, two, b->base);
        assert_string_equal(a->hash, b->hash);
        assert_same_file(one, two, "adapter_config.json");
        assert_same_file(one, two, "adapter_model.safetensors");
        assert_golden(&golden[i], m, b, "saved and loaded");
        adapter_release(a);
        adapter_release(b);
        model_close(m);
    }
    free(one);
    free(two);
}

/* The reason why an adapter cannot be saved as GGUF, or NULL. */
static const char *gguf_refusal(const struct adapter *a) {
    if (a->config.dora) return "use_dora";
    if (a->config.embed.full || a->config.head.full) return "modules_to_save";
    if (a->config.embed.n_ids || a->config.head.n_ids) return "trainable_token_indices";
    return a->shape.tied && a->vocab_overrides ? "tied embedding or head" : NULL;
}

/* PEFT → GGUF → PEFT gives the same bytes; adapters that GGUF cannot represent are refused with the
 * feature's name. */
static void gguf_round_trip(void **state) {
    (void)state;
    char *one = path_join(temp_dir, "peft1"), *two = path_join(temp_dir, "peft2");
    char *file = path_join(temp_dir, "lora.gguf");
    int converted = 0, folded = 0;
    for (int i = 0; i < n_golden; i++) {
        struct error err = {0};
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m), *b = NULL;
        const char *why = gguf_refusal(a);
        int rc = adapter_save_gguf(a, file, a->base, false, &err);
        if (why) {
            assert_int_equal(rc, ERR_MISMATCH);
            assert_non_null(strstr(err.text, why));
        } else if (rc != OK) { // several alphas: only folded into B
            assert_non_null(strstr(err.text, "--fold"));
            assert_int_equal(adapter_save_gguf(a, file, a->base, true, &err), OK);
            b = open_ok(file, m);
            assert_golden(&golden[i], m, b, "folded");
            folded++;
        } else {
            save_ok(a, one, a->base);
            b = open_ok(file, m);
            save_ok(b, two, b->base);
            assert_string_equal(a->hash, b->hash);
            assert_same_file(one, two, "adapter_config.json");
            assert_same_file(one, two, "adapter_model.safetensors");
            converted++;
        }
        adapter_release(a);
        adapter_release(b);
        model_close(m);
    }
    assert_true(converted >= 4 && folded >= 2);
    free(one);
    free(two);
    free(file);
}

static struct safetensors gguf_read_ok(const char *path) {
    struct safetensors st;
    struct error err;
    if (gguf_tensors_open(&st, path, &err)) fail_msg("%s", err.text);
    return st;
}

/* Entry [i][j] of the ΔW of tensor `name` as llama.cpp computes it, from the adapter's file only.
 */
static double delta_from_file(const struct safetensors *lora, const char *name, int64_t i,
                              int64_t j) {
    char *an = xasprintf("%s.lora_a", name), *bn = xasprintf("%s.lora_b", name);
    const struct tensor_info *a = safetensors_find(lora, an), *b = safetensors_find(lora, bn);
    bool embed = strcmp(name, "token_embd.weight") == 0;
    double alpha = json_number_value(json_object_get(lora->metadata, "adapter.lora.alpha")),
           sum = 0;
    int64_t rank = a ? b->dims[1] : 0, in = a ? a->dims[1] : 0;
    for (int64_t r = 0; r < rank; r++) {
        const float *x = a->data, *y = b->data;
        sum += embed ? x[i * rank + r] * y[j * rank + r] : x[r * in + j] * y[i * rank + r];
    }
    free(an);
    free(bn);
    return rank ? sum * alpha / (double)rank : 0;
}

/* For every matrix in GGUF's layout, with permuted rows: merged = base + ΔW of the GGUF adapter. */
static void gguf_orientation(void **state) {
    (void)state;
    char *base = path_join(temp_dir, "o-base.gguf"), *merged = path_join(temp_dir, "o-merged.gguf"),
         *file = path_join(temp_dir, "o-lora.gguf");
    int checked = 0;
    for (int i = 0; i < n_golden; i++) {
        struct error err;
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m);
        if (adapter_save_gguf(a, file, "x", true, &err) == OK && !a->config.n_invocation) {
            struct model *sum = adapter_merge(m, a, &err);
            assert_int_equal(model_write_gguf(m, base, TENSOR_F32, &err), OK);
            assert_int_equal(model_write_gguf(sum, merged, TENSOR_F32, &err), OK);
            adapter_merged_close(sum);
            struct safetensors x = gguf_read_ok(base), y = gguf_read_ok(merged),
                               lora = gguf_read_ok(file);
            assert_int_equal(x.n_tensors, y.n_tensors);
            for (int t = 0; t < x.n_tensors; t++) {
                const float *w = x.tensors[t].data, *v = y.tensors[t].data;
                int64_t k = x.tensors[t].dims[1];
                for (int64_t n = 0; x.tensors[t].n_dims == 2 && n < x.tensors[t].dims[0] * k; n++)
                    assert_true(fabs((double)v[n] - (double)w[n] -
                                     delta_from_file(&lora, x.tensors[t].name, n / k, n % k)) <
                                1e-6);
            }
            safetensors_close(&x);
            safetensors_close(&y);
            safetensors_close(&lora);
            checked++;
        }
        adapter_release(a);
        model_close(m);
    }
    assert_true(checked >= 6);
    free(base);
    free(merged);
    free(file);
}

/* Converts all tensors to f16, which llama.cpp's converter also writes. */
static void gguf_convert_to_f16(const char *from, const char *to) {
    struct safetensors st = gguf_read_ok(from);
    struct error err;
    void *narrow[64];
    assert_true(st.n_tensors <= 64);
    for (int i = 0; i < st.n_tensors; i++) {
        struct tensor_info *t = &st.tensors[i];
        int64_t n = (int64_t)(t->size / sizeof(float));
        tensor_from_f32(TENSOR_F16, t->data, narrow[i] = xmalloc((size_t)n * 2), n);
        t->type = TENSOR_F16;
        t->data = narrow[i];
        t->size = (size_t)n * 2;
    }
    assert_int_equal(gguf_tensors_write(to, st.metadata, st.tensors, st.n_tensors, &err), OK);
    for (int i = 0; i < st.n_tensors; i++) free(narrow[i]);
    safetensors_close(&st);
}

/* A file with non-ASCII lineage, and a file without PEFT's config, as llama.cpp's converter writes
 * it. */
static void gguf_from_other_programs(void **state) {
    (void)state;
    struct model *m = base_open("base");
    struct golden *g = &golden[0];
    struct adapter *a = case_open(g, m);
    struct error err = {0};
    char *file = path_join(temp_dir, "foreign.gguf"), *bare = path_join(temp_dir, "bare.gguf");
    a->lineage = json_pack("{s:s}", "由来", "手で作った、来自手工");
    assert_int_equal(adapter_save_gguf(a, file, "基底", false, &err), OK);
    struct adapter *b = open_ok(file, m);
    assert_string_equal(json_string_value(json_object_get(b->lineage, "由来")),
                        "手で作った、来自手工");
    assert_string_equal(b->base, "基底");
    struct safetensors st;
    assert_int_equal(gguf_tensors_open(&st, file, &err), OK);
    assert_string_equal(json_string_value(json_object_get(st.metadata, "general.type")), "adapter");
    json_object_del(st.metadata, "shoal.config");
    json_object_del(st.metadata, "shoal.lineage.由来");
    assert_int_equal(gguf_tensors_write(bare, st.metadata, st.tensors, st.n_tensors, &err), OK);
    safetensors_close(&st);
    struct adapter *c = open_ok(bare, m);
    assert_string_equal(a->hash, c->hash);
    assert_null(c->lineage);
    assert_golden(g, m, c, "without shoal.config");
    gguf_convert_to_f16(file, bare);
    struct adapter *narrow = open_ok(bare, m);
    for (size_t i = 0; i < a->n_data; i++)
        assert_true(narrow->data[i] == f16_to_f32(f32_to_f16(a->data[i])));
    adapter_release(narrow);
    adapter_release(a);
    adapter_release(b);
    adapter_release(c);
    model_close(m);
    free(file);
    free(bare);
}

/* A merge whose rows are computed when they are written gives the file of a merge in memory: for
 * every golden adapter, in f32 and in a smaller type. */
static void merged_for_writing(void **state) {
    (void)state;
    char *file[2] = {path_join(temp_dir, "memory.gguf"), path_join(temp_dir, "rows.gguf")};
    int checked = 0;
    for (int i = 0; i < 2 * n_golden; i++) {
        struct error err = {0};
        struct model *m = base_open(golden[i / 2].base);
        struct adapter *a = case_open(&golden[i / 2], m);
        struct buf bytes[2] = {{0}};
        for (int k = 0; k < 2 && !a->config.n_invocation; k++) {
            struct model *merged =
                k ? adapter_merge_for_writing(m, a, &err) : adapter_merge(m, a, &err);
            assert_non_null(merged);
            assert_int_equal(
                model_write_gguf(merged, file[k], i % 2 ? TENSOR_BF16 : TENSOR_F32, &err), OK);
            assert_int_equal(file_read(file[k], 1 << 26, &bytes[k], &err), OK);
            adapter_merged_close(merged);
        }
        assert_int_equal(bytes[0].len, bytes[1].len);
        if (bytes[0].len > 0) assert_memory_equal(bytes[0].data, bytes[1].data, bytes[0].len);
        checked += bytes[0].len > 0;
        for (int k = 0; k < 2; k++) buf_release(&bytes[k]);
        adapter_release(a);
        model_close(m);
    }
    assert_true(checked > 10);
    for (int k = 0; k < 2; k++) free(file[k]);
}

static void merged_agrees(void **state) {
    (void)state;
    struct error err = {0};
    char *hf = path_join(temp_dir, "merged"), *gguf = path_join(temp_dir, "merged.gguf");
    for (int i = 0; i < n_golden; i++) {
        struct model *m = base_open(golden[i].base), *back;
        struct adapter *a = case_open(&golden[i], m);
        struct model *merged = adapter_merge(m, a, &err);
        if (a->config.n_invocation > 0) {
            assert_null(merged);
            assert_non_null(strstr(err.text, "use it with --adapter"));
            adapter_release(a);
            model_close(m);
            continue;
        }
        assert_golden(&golden[i], merged, NULL, "merged");
        assert_int_equal(model_write_hf(merged, hf, TENSOR_F32, &err), OK);
        assert_int_equal(model_write_gguf(merged, gguf, TENSOR_F32, &err), OK);
        adapter_merged_close(merged);
        for (int k = 0; k < 2; k++) {
            if (!(back = model_open(k ? gguf : hf, NUMERIC_EXACT, &err))) fail_msg("%s", err.text);
            assert_golden(&golden[i], back, NULL, "merged and written");
            struct kl_divergence d = adapter_kl_divergence(m, a, back, NULL, NULL);
            assert_true(d.positions > 0 && d.mean < 1e-9 && d.max < 1e-8 && d.same_top == 1);
            struct kl_reference *reference = kl_reference_new(m, a, gguf, NULL, &err);
            struct kl_divergence same;
            assert_non_null(reference);
            assert_int_equal(kl_reference_compare(reference, back, NULL, NULL, &same, &err), OK);
            assert_memory_equal(&same, &d, sizeof d);
            assert_int_equal(kl_reference_compare(reference, m, NULL, NULL, &same, &err), OK);
            assert_true(same.mean > 1e-4);
            kl_reference_free(reference);
            model_close(back);
        }
        struct kl_divergence effect = adapter_kl_divergence(m, NULL, m, a, NULL);
        assert_true(effect.mean > 1e-3 && effect.max > effect.mean);
        adapter_release(a);
        model_close(m);
    }
    free(hf);
    free(gguf);
}

/* A weighted sum of two adapters equals the manual addition of both. */
static void concat_agrees(void **state) {
    (void)state;
    struct error err;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *list[2] = {fixture_adapter(&m->config, 3, "q_proj,v_proj", 0.2f, 1),
                               fixture_adapter(&m->config, 5, "v_proj,down_proj", 0.2f, 2)};
    float weights[2] = {0.75f, -0.5f};
    struct adapter *sum = adapter_concat(list, weights, 2, &err);
    assert_non_null(sum);
    for (int32_t i = 0; i < m->config.n_layers * N_PROJ; i++) {
        int64_t in = proj_in(&m->config, i % N_PROJ), out = proj_out(&m->config, i % N_PROJ);
        assert_int_equal(sum->loras[i].r, list[0]->loras[i].r + list[1]->loras[i].r);
        for (int64_t at = 0; at < in * out; at++) {
            double want = 0, got = 0;
            for (int k = 0; k < 3; k++) {
                const struct lora *lo = k < 2 ? &list[k]->loras[i] : &sum->loras[i];
                double w = 0;
                for (int32_t r = 0; r < lo->r; r++)
                    w += (double)lo->scale * lo->b[at / in * lo->r + r] * lo->a[r * in + at % in];
                *(k < 2 ? &want : &got) += k < 2 ? weights[k] * w : w;
            }
            assert_true(fabs(want - got) < 1e-6);
        }
    }
    for (int i = 0; i < 2; i++) adapter_release(list[i]);
    adapter_release(sum);
    model_close(m);
}

/* A DoRA adapter whose magnitudes are near the norms of the rows. */
static struct adapter *dora_adapter(const struct model *m, int32_t r, const char *targets,
                                    uint64_t seed) {
    struct error err;
    struct adapter_config c = {.r = r, .alpha = 4, .dora = true};
    assert_int_equal(adapter_targets_parse(targets, c.target, &err), OK);
    struct adapter *fresh = adapter_new_for_model(m, &c, seed, &err), *a;
    float *data = xmalloc(fresh->n_data * sizeof *data);
    struct rng rng = rng_make(seed, RNG_TEST, 0, 0);
    for (size_t i = 0; i < fresh->n_data; i++)
        data[i] = fresh->data[i] * (1 + 0.2f * rng_normal(&rng)) + 0.05f * rng_normal(&rng);
    a = adapter_from_owned_data(&m->config, &c, data, NULL);
    assert_int_equal(adapter_bind(a, m, &err), OK);
    adapter_release(fresh);
    return a;
}

/* Row o of the projection of a model, as doubles added with a weight. */
static void row_add(const struct model *m, int32_t i, int64_t o, double w, double *sum) {
    const struct matrix *x = &m->layers[i / N_PROJ].proj[i % N_PROJ];
    float *row = xmalloc((size_t)x->k * sizeof *row);
    matrix_get_row(x, o, row);
    for (int64_t k = 0; k < x->k; k++) sum[k] += w * (double)row[k];
    free(row);
}

/* W + Σ w (W_i - W) of merged models W_i equals the model with the sum merged, on every element. */
static void dora_sum_is_exact(void **state) {
    (void)state;
    struct error err = {0};
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *list[3] = {dora_adapter(m, 3, "all-linear", 1),
                               fixture_adapter(&m->config, 5, "v_proj,down_proj", 0.2f, 2),
                               dora_adapter(m, 2, "q_proj,down_proj", 3)};
    const float weights[3] = {0.75f, -0.5f, 0.4f};
    struct pool *pool = pool_new(2);
    struct model *merged[4];
    struct adapter *sum = adapter_sum(m, list, weights, 3, pool, &err);
    assert_non_null(sum);
    assert_true(sum->config.dora);
    for (int k = 0; k < 4; k++)
        assert_non_null(merged[k] = adapter_merge(m, k < 3 ? list[k] : sum, &err));
    for (int32_t i = 0; i < m->config.n_layers * N_PROJ; i++) {
        const struct matrix *w = &m->layers[i / N_PROJ].proj[i % N_PROJ];
        double *apart = xmalloc((size_t)w->k * sizeof *apart);
        for (int64_t o = 0; o < w->n; o++) {
            memset(apart, 0, (size_t)w->k * sizeof *apart);
            row_add(m, i, o, 1, apart);
            for (int k = 0; k < 3; k++) {
                row_add(merged[k], i, o, (double)weights[k], apart);
                row_add(m, i, o, -(double)weights[k], apart);
            }
            row_add(merged[3], i, o, -1, apart);
            for (int64_t k = 0; k < w->k; k++) assert_true(fabs(apart[k]) < 2e-6);
        }
        free(apart);
    }
    struct adapter *blend =
        adapter_blend_bound(m, list[0], list[2], 0.25f, 0, BLEND_DELTA, pool, &err);
    struct adapter *same = adapter_sum(m, (struct adapter *[]){list[0], list[2]},
                                       (float[]){0.75f, 0.25f}, 2, NULL, &err);
    assert_string_equal(blend->hash, same->hash);
    assert_null(adapter_blend_bound(m, list[0], list[1], 0.5f, 4, BLEND_DELTA, pool, &err));
    assert_non_null(strstr(err.text, "leave --rank out"));
    const float cancel = -1 / (list[0]->loras[0].dora_scale[0] - 1);
    assert_null(adapter_sum(m, list, &cancel, 1, pool, &err));
    assert_non_null(strstr(err.text, "the weights cancel output 0 of 'q_proj' in layer 0"));
    for (int k = 0; k < 4; k++) adapter_merged_close(merged[k]);
    for (int k = 0; k < 3; k++) adapter_release(list[k]);
    adapter_release(sum);
    adapter_release(blend);
    adapter_release(same);
    pool_free(pool);
    model_close(m);
}

/* A pack of a sum gives the results of the sum, also if the terms have only packs. */
static void sum_packs_agree(void **state) {
    (void)state;
    struct error err;
    const enum dtype elems[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I8};
    const float weights[2] = {0.7f, 0.4f};
    for (size_t e = 0; e < ARRAY_LEN(elems); e++) {
        struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
        struct adapter *list[2] = {dora_adapter(m, 3, "all-linear", 1),
                                   fixture_adapter(&m->config, 4, "q_proj,up_proj", 0.05f, 2)};
        struct adapter *sum = adapter_sum(m, list, weights, 2, NULL, &err);
        struct forward_options fo = {.max_rows = 5, .n_slots = 1, .slot_len = 5};
        int64_t v = m->config.vocab_size;
        float *logits[3];
        for (int k = 0; k < 3; k++) {
            if (k == 2)
                for (int i = 0; i < 2; i++) adapter_pack_only(list[i], elems[e]);
            struct lora_pack *pack = k ? adapter_sum_pack(list, weights, 2, elems[e], &err) : NULL;
            struct lora_part part = {.pack = k ? pack : adapter_pack(sum, DTYPE_F32), .weight = 1};
            struct lora_segment seg = {.begin = 0, .end = 5, .parts = &part, .n_parts = 1};
            struct forward *f = forward_new(m, &fo);
            struct batch_row rows[5];
            const int32_t out = 4;
            for (int32_t i = 0; i < 5; i++) rows[i] = (struct batch_row){3 * i + 1, i, 0};
            logits[k] = xmalloc((size_t)v * sizeof *logits[k]);
            forward_run(f, rows, 5, &seg, 1, &out, 1, logits[k]);
            forward_free(f);
            lora_pack_free(pack);
        }
        for (int k = 1; k < 3; k++) {
            double apart = 0, square = 0;
            for (int64_t i = 0; i < v; i++) {
                apart += pow((double)logits[0][i] - (double)logits[k][i], 2);
                square += pow((double)logits[0][i], 2);
            }
            assert_true(sqrt(apart / square) < (elems[e] == DTYPE_F32 ? 1e-5 : 0.01));
        }
        for (int k = 0; k < 3; k++) free(logits[k]);
        for (int k = 0; k < 2; k++) adapter_release(list[k]);
        adapter_release(sum);
        model_close(m);
    }
}

/* Functions that support only plain LoRA refuse other adapters and give the reason. */
static void plain_adapters_required(void **state) {
    (void)state;
    struct error err = {0};
    for (int i = 0; i < n_golden; i++) {
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m), *list[2] = {a, a};
        bool plain = !a->config.dora && !a->vocab_overrides && !a->config.n_invocation;
        assert_int_equal(adapter_require_plain(a, "testing", &err) == OK, plain);
        struct adapter *sum = adapter_concat(list, (float[]){1, 1}, 2, &err);
        struct adapter *child = adapter_blend(a, a, 0.5f, 0, BLEND_DELTA, &err);
        assert_true(!sum == !plain && !child == !plain);
        if (!plain) assert_non_null(strstr(err.text, "blending is for plain LoRA only"));
        adapter_release(sum);
        adapter_release(child);
        adapter_release(a);
        model_close(m);
    }
}

/* All kinds of adapters in one batch. They are random; the magnitudes are near the norms of the
 * rows. */
static struct adapter *adapter_of_kind(const struct model *m, int kind) {
    static const int32_t ids[] = {0, 3, 17, 18, 200};
    const struct model_config *s = &m->config;
    struct adapter_config c = {.r = kind == 1 ? 270 : 2 + 3 * kind, .alpha = 4, .rslora = kind % 2};
    struct error err;
    assert_int_equal(
        adapter_targets_parse(kind == 2 ? "v_proj,down_proj" : "all-linear", c.target, &err), OK);
    c.dora = kind == 1 || kind == 2;
    if (kind == 2) c.head.lora = (struct adapter_module){5, 4};
    if (kind == 3) c.embed.lora = (struct adapter_module){300, 40}, c.head.full = true;
    if (kind == 4 || kind == 2) c.embed.n_ids = ARRAY_LEN(ids), c.embed.ids = ids;
    if (kind == 4) c.head.n_ids = 3, c.head.ids = ids + 2;
    size_t n = adapter_param_count(s, &c);
    float *data = xcalloc(n, sizeof *data);
    struct rng rng = rng_make(31, RNG_TEST, (uint32_t)kind, 0);
    for (size_t i = 0; i < n; i++) data[i] = 0.2f * rng_normal(&rng) + (c.dora ? 0.3f : 0);
    struct adapter *a = adapter_from_data(s, &c, data, NULL);
    if (adapter_bind(a, m, &err)) fail_msg("%s", err.text);
    free(data);
    return a;
}

enum { N_KINDS = 5, N_SEQS = 7, N_TOKENS = 20 };

/* All sequences, in random chunks of at most `chunk` rows, one segment each, outputs in a random
 * subset and order; logits [N_SEQS][N_TOKENS][V]. */
static void batch_run(struct forward *f, const struct model *m, struct adapter *const *by_seq,
                      int first, int last, uint32_t id, float *logits) {
    int at[N_SEQS] = {0}, left = (last - first) * N_TOKENS;
    int64_t vocab = m->config.vocab_size;
    float *buf = xcalloc((size_t)(64 * vocab), sizeof *buf);
    struct rng rng = rng_make(77, RNG_TEST, id, 0);
    while (left > 0) {
        struct batch_row rows[64];
        struct lora_segment segs[N_SEQS];
        struct lora_part parts[N_SEQS];
        int32_t out[64], n = 0, n_segs = 0;
        for (int s = first; s < last; s++) {
            int drawn = (int)rng_below(&rng, 9), count = MIN(drawn, N_TOKENS - at[s]);
            if (count == 0) continue;
            segs[n_segs++] = adapter_lora_segment(by_seq[s], n, n + count, &parts[s]);
            for (int i = 0; i < count; i++, n++) {
                int32_t token = (s * 31 + (at[s] + i) * 7) % 23 * 9;
                rows[n] = (struct batch_row){.token = token, .pos = at[s] + i, .slot = s};
                out[n] = n;
            }
            at[s] += count;
        }
        if (n == 0) continue;
        for (int i = 0; i < n / 2; i++) { // outputs need not be in order
            int32_t x = out[i], *y = &out[n - 1 - i];
            out[i] = id % 2 ? *y : x;
            *y = id % 2 ? x : *y;
        }
        forward_run(f, rows, n, segs, n_segs, out, n, buf);
        for (int i = 0; i < n; i++) {
            const struct batch_row *r = &rows[out[i]];
            memcpy(logits + (r->slot * N_TOKENS + r->pos) * vocab, buf + i * vocab,
                   (size_t)vocab * sizeof *buf);
        }
        left -= n;
    }
    free(buf);
}

static void kinds_check(const struct model *m) {
    struct adapter *kinds[N_KINDS], *by_seq[N_SEQS];
    size_t all = (size_t)N_SEQS * N_TOKENS * (size_t)m->config.vocab_size;
    float *want = xcalloc(all, sizeof *want), *got = xcalloc(all, sizeof *got);
    for (int k = 0; k < N_KINDS; k++) kinds[k] = adapter_of_kind(m, k);
    for (int s = 0; s < N_SEQS; s++) by_seq[s] = s < 6 ? kinds[s % N_KINDS] : NULL;
    struct forward_options o = {.max_rows = 64, .n_slots = N_SEQS, .slot_len = 32};
    struct forward *alone = forward_new(m, &o);
    for (int s = 0; s < N_SEQS; s++) batch_run(alone, m, by_seq, s, s + 1, 9, want);
    forward_free(alone);
    for (uint32_t i = 0; i < all; i++) assert_true(isfinite(want[i]));
    for (int threads = 1; threads <= 3; threads++) {
        o.pool = pool_new(threads);
        struct forward *f = forward_new(m, &o);
        for (uint32_t id = 0; id < 2; id++) {
            batch_run(f, m, by_seq, 0, N_SEQS, id, got);
            assert_memory_equal(got, want, all * sizeof *got);
        }
        forward_free(f);
        pool_free(o.pool);
    }
    for (int k = 0; k < N_KINDS; k++) adapter_release(kinds[k]);
    free(want);
    free(got);
}

static void kinds_invariant(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        enum tensor_type type;
        enum numeric_class cls;
    } cases[] = {
        {"tiny-llama", TENSOR_F32, NUMERIC_EXACT},  {"tiny-qwen3", TENSOR_F32, NUMERIC_EXACT},
        {"tiny-qwen3", TENSOR_Q8_0, NUMERIC_EXACT}, {"tiny-llama", TENSOR_Q4_0, NUMERIC_EXACT},
        {"tiny-llama", TENSOR_BF16, NUMERIC_FAST},  {"fry-1", TENSOR_Q8_0, NUMERIC_EXACT},
        {"tiny-qwen2", TENSOR_F32, NUMERIC_EXACT},  {"tiny-gemma3", TENSOR_Q8_0, NUMERIC_EXACT},
        {"tiny-gemma3", TENSOR_F32, NUMERIC_EXACT}, {"tiny-gpt-neo", TENSOR_Q4_0, NUMERIC_EXACT},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct model *m = fixture_model(cases[i].shape, i % 2, cases[i].type, cases[i].cls);
        kinds_check(m);
        model_close(m);
    }
}

static void assert_logits_near(const struct model *m, const float *want, float *got, int n,
                               const char *shape, int kind, const char *how) {
    double worst = 0, top = 0;
    for (int i = 0; i < n * m->config.vocab_size; i++) {
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
        top = fmax(top, fabs((double)want[i]));
    }
    if (!(worst < 1e-5 * top)) fail_msg("%s, kind %d, %s: %g of %g", shape, kind, how, worst, top);
    free(got);
}

/* The logits of the adapter, of the merged model, and of the merged model after it was written and
 * opened are equal. */
static void arch_merged(const char *shape, struct model *m, const struct adapter *a, int kind) {
    static const int32_t tokens[] = {200, 3, 17, 18, 0, 100, 3, 45, 17, 200, 18, 1};
    enum { N = ARRAY_LEN(tokens) };
    struct error err;
    char *dir = path_join(temp_dir, "arch-merged");
    float *want = logits_run(m, a, tokens, N);
    struct model *merged = adapter_merge(m, a, &err);
    assert_logits_near(m, want, logits_run(merged, NULL, tokens, N), N, shape, kind, "merged");
    if (model_write_hf(merged, dir, TENSOR_F32, &err)) fail_msg("%s: %s", shape, err.text);
    struct model *back = model_open(dir, NUMERIC_EXACT, &err);
    if (!back) fail_msg("%s: %s", shape, err.text);
    assert_logits_near(m, want, logits_run(back, NULL, tokens, N), N, shape, kind, "written");
    model_close(back);
    adapter_merged_close(merged);
    free(want);
    free(dir);
}

/* Saves and loads the adapter as a PEFT directory and, if possible, as a GGUF file. */
static void arch_saved(const char *shape, struct model *m, const struct adapter *a) {
    struct error err;
    char *dir = path_join(temp_dir, "arch-peft"), *file = path_join(temp_dir, "arch.gguf");
    save_ok(a, dir, shape);
    struct adapter *b = open_ok(dir, m);
    assert_string_equal(a->hash, b->hash);
    adapter_release(b);
    const char *why = m->config.arch->gguf ? gguf_refusal(a) : "has no GGUF form";
    int rc = adapter_save_gguf(a, file, shape, false, &err);
    if (why) {
        assert_int_equal(rc, ERR_MISMATCH);
        assert_non_null(strstr(err.text, why));
    } else {
        assert_int_equal(rc, OK);
        b = open_ok(file, m);
        assert_string_equal(a->hash, b->hash);
        adapter_release(b);
    }
    free(dir);
    free(file);
}

static void architectures(void **state) {
    (void)state;
    static const char *const shapes[] = {"tiny-llama", "tiny-qwen3", "tiny-qwen2", "tiny-gemma3",
                                         "tiny-gpt-neo"};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        for (int kind = 0; kind < 2 * N_KINDS; kind++) {
            struct model *m = fixture_model(shapes[i], kind < N_KINDS, TENSOR_F32, NUMERIC_EXACT);
            struct adapter *a = adapter_of_kind(m, kind % N_KINDS);
            arch_merged(shapes[i], m, a, kind);
            arch_saved(shapes[i], m, a);
            adapter_release(a);
            model_close(m);
        }
}

/* Names of PEFT and llama.cpp in each architecture. */
static void architecture_names(void **state) {
    (void)state;
    static const struct {
        const char *shape, *peft, *gguf;
    } rows[] = {
        {"tiny-qwen2", "model.layers.1.self_attn.k_proj.lora_A.weight",
         "blk.1.attn_k.weight.lora_a"},
        {"tiny-qwen2", "model.embed_tokens.lora_embedding_B", "token_embd.weight.lora_b"},
        {"tiny-gemma3", "model.layers.2.mlp.gate_proj.lora_B.weight",
         "blk.2.ffn_gate.weight.lora_b"},
        {"tiny-gemma3", "lm_head.lora_A.weight", "output.weight.lora_a"},
        {"tiny-gpt-neo", "transformer.h.0.attn.attention.out_proj.lora_A.weight", NULL},
        {"tiny-gpt-neo", "transformer.h.1.mlp.c_fc.lora_B.weight", NULL},
        {"tiny-gpt-neo", "transformer.h.1.mlp.c_proj.lora_B.weight", NULL},
        {"tiny-gpt-neo", "transformer.wte.lora_embedding_A", NULL},
    };
    char *dir = path_join(temp_dir, "names"), *file = path_join(temp_dir, "names.gguf"),
         *weights = path_join(dir, "adapter_model.safetensors");
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct model *m = fixture_model(rows[i].shape, false, TENSOR_F32, NUMERIC_EXACT);
        struct adapter_config c = {.r = 2, .alpha = 3, .embed.lora = {2, 3}, .head.lora = {2, 3}};
        struct error err;
        struct safetensors st;
        for (int p = 0; p < N_PROJ; p++) c.target[p] = true;
        float *data = xcalloc(adapter_param_count(&m->config, &c), sizeof *data);
        struct adapter *a = adapter_from_owned_data(&m->config, &c, data, NULL);
        save_ok(a, dir, "base");
        assert_int_equal(safetensors_open(&st, weights, &err), OK);
        char *name = xasprintf("base_model.model.%s", rows[i].peft);
        if (!safetensors_find(&st, name)) fail_msg("%s: no '%s'", rows[i].shape, name);
        free(name);
        safetensors_close(&st);
        if (rows[i].gguf) {
            assert_int_equal(adapter_save_gguf(a, file, "base", false, &err), OK);
            st = gguf_read_ok(file);
            if (!safetensors_find(&st, rows[i].gguf)) fail_msg("no '%s'", rows[i].gguf);
            assert_string_equal(
                json_string_value(json_object_get(st.metadata, "general.architecture")),
                m->config.arch->gguf);
            safetensors_close(&st);
        }
        adapter_release(a);
        model_close(m);
    }
    free(dir);
    free(file);
    free(weights);
}

/* The engine, with all adapters of one base in a batch, gives the results of the forward pass. */
static void engine_agrees(void **state) {
    (void)state;
    static const char *const bases[] = {"base", "tied"};
    for (int b = 0; b < 2; b++) {
        struct model *m = base_open(bases[b]);
        struct engine_options o = {.max_rows = 16, .max_seqs = 8, .max_len = 32};
        struct error err;
        struct engine *e = engine_new(m, &o, &err);
        struct engine_request reqs[MAX_CASES] = {{0}};
        int n = 0;
        for (int i = 0; i < n_golden; i++)
            if (strcmp(golden[i].base, bases[b]) == 0)
                reqs[n++] = (struct engine_request){.prompt = golden[i].tokens,
                                                    .n_prompt = golden[i].n,
                                                    .adapter = case_open(&golden[i], m),
                                                    .max_tokens = 4};
        if (engine_run(e, reqs, n, NULL, &err)) fail_msg("%s", err.text);
        for (int i = 0; i < n; i++) {
            int32_t tokens[MAX_TOKENS + 4], len = reqs[i].n_prompt, vocab = m->config.vocab_size;
            memcpy(tokens, reqs[i].prompt, (size_t)len * sizeof *tokens);
            assert_int_equal(reqs[i].n_out, 4);
            for (int k = 0; k < 4; k++, len++) {
                float *logits = logits_run(m, reqs[i].adapter, tokens, len),
                      *last = logits + (len - 1) * vocab;
                tokens[len] = 0;
                for (int32_t t = 1; t < vocab; t++)
                    if (last[t] > last[tokens[len]]) tokens[len] = t;
                assert_int_equal(reqs[i].out[k], tokens[len]);
                free(logits);
            }
            adapter_release(reqs[i].adapter);
            engine_request_release(&reqs[i]);
        }
        engine_free(e);
        model_close(m);
    }
}

/* Requests with an unbound DoRA adapter, or with a table for another vocabulary, are refused. */
static void unbound_dora_refused(void **state) {
    (void)state;
    struct model *m = base_open("base");
    struct error err;
    struct adapter *a = adapter_load(GOLDEN "/dora", &m->config, &err);
    assert_non_null(a);
    assert_false(adapter_is_ready(a));
    struct engine_options o = {.max_rows = 4, .max_seqs = 1, .max_len = 8};
    struct engine *e = engine_new(m, &o, &err);
    struct engine_request r = {
        .prompt = (int32_t[]){1}, .n_prompt = 1, .max_tokens = 1, .adapter = a};
    assert_int_equal(engine_submit(e, &r, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "is DoRA and not bound to its base"));
    engine_free(e);
    assert_int_equal(adapter_bind(a, m, &err), OK);
    assert_true(adapter_is_ready(a));
    adapter_release(a);
    a = adapter_load(GOLDEN "/saved", &m->config, &err);
    struct model_config other = m->config;
    other.vocab_size++;
    assert_true(adapter_fits(a, &m->config) && !adapter_fits(a, &other));
    adapter_release(a);
    assert_null(adapter_load(GOLDEN "/saved_tied", &other, &err));
    assert_non_null(strstr(err.text, "'base_model.model.lm_head.weight' is [24, 8], expected [25"));
    model_close(m);
}

/* A replacement table that differs from the base's in three rows is reduced to these rows: the
 * results have the same bits as those of an adapter with these rows only. */
static void replacement_tables_reduced_to_rows(void **state) {
    (void)state;
    static const int32_t ids[] = {3, 250, 299};
    struct model *m = fixture_model("tiny-llama", false, TENSOR_Q8_0, NUMERIC_EXACT);
    int64_t d = m->config.d_model, vocab = m->config.vocab_size;
    int32_t tokens[] = {3, 7, 250, 299, 1};
    struct adapter_config whole = {.r = 1, .alpha = 1, .embed.full = true, .head.full = true};
    struct adapter_config few = {.r = 1, .alpha = 1, .embed = {.n_ids = 3, .ids = ids}};
    few.head = few.embed;
    float *all = xcalloc((size_t)(2 * vocab * d), sizeof *all),
          *rows = xcalloc(6 * 32, sizeof *rows);
    struct rng rng = rng_make(4, RNG_TEST, 0, 0);
    for (int t = 0; t < 2; t++) {
        for (int64_t i = 0; i < vocab; i++)
            matrix_get_row(t ? &m->head : &m->embed, i, all + (t * vocab + i) * d);
        for (int k = 0; k < 3; k++)
            for (int64_t j = 0; j < d; j++)
                rows[(t * 3 + k) * d + j] = all[(t * vocab + ids[k]) * d + j] = rng_normal(&rng);
    }
    struct adapter *a = adapter_from_data(&m->config, &whole, all, NULL);
    struct adapter *b = adapter_from_data(&m->config, &few, rows, NULL);
    struct error err;
    assert_int_equal(adapter_bind(a, m, &err), OK);
    assert_int_equal(adapter_bind(b, m, &err), OK);
    assert_true(!a->vocab_overrides->head.full && a->vocab_overrides->head.n == 3 &&
                a->vocab_overrides->embed.n == 3);
    float *x = logits_run(m, a, tokens, 5), *y = logits_run(m, b, tokens, 5),
          *base = logits_run(m, NULL, tokens, 5);
    assert_memory_equal(x, y, (size_t)(5 * vocab) * sizeof *x);
    assert_memory_not_equal(x, base, (size_t)(5 * vocab) * sizeof *x);
    float *free_me[] = {all, rows, x, y, base};
    for (int i = 0; i < 5; i++) free(free_me[i]);
    adapter_release(a);
    adapter_release(b);
    model_close(m);
}

/* A DoRA magnitude for a row with norm 0 is undefined and refused. */
static void zero_norm_refused(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter_config c = {.r = 1, .alpha = 1, .dora = true};
    struct error err;
    c.target[PROJ_V] = true;
    float *row = (float *)(uintptr_t)m->layers[1].proj[PROJ_V].data + 3 * m->config.d_model;
    memset(row, 0, (size_t)m->config.d_model * sizeof *row);
    float *data = xcalloc(adapter_param_count(&m->config, &c), sizeof *data);
    struct adapter *a = adapter_from_data(&m->config, &c, data, NULL);
    assert_int_equal(adapter_bind(a, m, &err), ERR_NUMERIC);
    assert_non_null(strstr(err.text, "'model.layers.1.self_attn.v_proj': output 3"));
    assert_false(adapter_is_ready(a));
    free(data);
    adapter_release(a);
    model_close(m);
}

static void write_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(data, 1, n, f) == n && fclose(f) == 0);
}

/* A GGUF adapter that is truncated at any length is refused; one with any byte of its header
 * changed is refused or is still a complete adapter. */
static void gguf_damaged(void **state) {
    (void)state;
    struct model *m = base_open("base");
    struct adapter *a = case_open(&golden[0], m);
    struct error err;
    char *file = path_join(temp_dir, "damaged.gguf");
    assert_int_equal(adapter_save_gguf(a, file, a->base, false, &err), OK);
    struct buf b = read_file(temp_dir, "damaged.gguf");
    for (size_t n = 0; n + 32 < b.len;
         n += n < 400 ? 1 : 11) { // the last tensor may end in padding
        write_file(file, b.data, n);
        err = (struct error){0};
        assert_null(adapter_load_gguf(file, &m->config, &err));
        assert_true(err.code < 0 && err.text[0]);
    }
    for (size_t i = 0; i < b.len && i < 2400; i++) {
        char old = b.data[i];
        b.data[i] = (char)(old ^ (1 << (i % 8)));
        write_file(file, b.data, b.len);
        adapter_release(adapter_load_gguf(file, &m->config, &err));
        b.data[i] = old;
    }
    buf_release(&b);
    adapter_release(a);
    model_close(m);
    free(file);
}

/* Small changes of a valid GGUF adapter, and parts of the errors. `tensor` is renamed or, without a
 * new name, removed; `key` gets `value`, or is removed. */
static const struct refused_gguf {
    const char *key, *value, *tensor, *renamed, *words;
} refused_gguf[] = {
    {"general.type", "\"model\"", NULL, NULL, "'general.type' is 'model', expected 'adapter'"},
    {"general.architecture", "\"qwen3\"", NULL, NULL, "'general.architecture' is 'qwen3'"},
    {"adapter.type", NULL, NULL, NULL, "'adapter.type' is 'missing'"},
    {"adapter.lora.alpha", NULL, NULL, NULL, "'adapter.lora.alpha' is missing or no number"},
    {"adapter.lora.alpha", "7.5", NULL, NULL, "'adapter.lora.alpha' disagree"},
    {"adapter.alora.invocation_tokens", "3", NULL, NULL, "is not a list of 1 to 256 token ids"},
    {"adapter.alora.invocation_tokens", "[3, 24]", NULL, NULL, "but ids from 0 to 23"},
    {"adapter.alora.invocation_tokens", "[3]", NULL, NULL,
     "'shoal.config' and 'adapter.alora.invocation_tokens' disagree"},
    {"shoal.config", "3", NULL, NULL, "'shoal.config' is no text"},
    {"shoal.config", "\"{\"", NULL, NULL, "shoal.config"},
    {"shoal.config", "\"{}\"", NULL, NULL, "'peft_type' is missing"},
    {NULL, NULL, "blk.1.attn_q.weight.lora_b", NULL,
     "layers.1.self_attn.q_proj.lora_B.weight' is missing"},
    {NULL, NULL, "blk.1.attn_q.weight.lora_b", "blk.2.attn_q.weight.lora_b",
     "'blk.2.attn_q.weight.lora_b' belongs to no projection"},
    {NULL, NULL, "blk.0.attn_v.weight.lora_a", "blk.0.attn_k.weight.lora_a",
     "layers.0.self_attn.k_proj.lora_A.weight' is not among the targets"},
};

static void gguf_refused(void **state) {
    (void)state;
    struct model *m = base_open("base");
    struct adapter *a = case_open(&golden[0], m);
    char *good = path_join(temp_dir, "good.gguf"), *bad = path_join(temp_dir, "bad.gguf");
    struct error err;
    assert_int_equal(adapter_save_gguf(a, good, a->base, false, &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(refused_gguf); i++) {
        const struct refused_gguf *r = &refused_gguf[i];
        struct safetensors st;
        assert_int_equal(gguf_tensors_open(&st, good, &err), OK);
        if (r->key && r->value)
            json_object_set_new(st.metadata, r->key, json_loads(r->value, JSON_DECODE_ANY, NULL));
        else if (r->key)
            json_object_del(st.metadata, r->key);
        struct tensor_info *list = xcalloc((size_t)st.n_tensors, sizeof *list);
        int n = 0;
        for (int t = 0; t < st.n_tensors; t++) {
            bool hit = r->tensor && strcmp(st.tensors[t].name, r->tensor) == 0;
            if (hit && !r->renamed) continue;
            list[n] = st.tensors[t];
            if (hit) list[n].name = (char *)(uintptr_t)r->renamed;
            n++;
        }
        assert_int_equal(gguf_tensors_write(bad, st.metadata, list, n, &err), OK);
        err = (struct error){0};
        assert_null(adapter_load_gguf(bad, &m->config, &err));
        if (!strstr(err.text, r->words)) fail_msg("wanted \"%s\", got \"%s\"", r->words, err.text);
        safetensors_close(&st);
        free(list);
    }
    adapter_release(a);
    model_close(m);
    free(good);
    free(bad);
}

/* An invocation is the same in a PEFT directory and in GGUF, with and without PEFT's config in the
 * file. DoRA and a replaced head exclude it. */
static void activated_files(void **state) {
    (void)state;
    struct model *m = base_open("base");
    struct adapter *plain = case_open(&golden[0], m);
    static const int32_t ids[] = {23, 0, 7}, prompt[] = {23, 0, 7, 1, 23, 0, 7, 23, 0};
    struct adapter *a = fixture_activated(plain, ids, 3);
    char *dir = path_join(temp_dir, "activated"), *gguf = path_join(temp_dir, "activated.gguf");
    struct error err;
    struct safetensors st;
    assert_int_equal(adapter_save(a, dir, "b", &err), OK);
    assert_int_equal(adapter_save_gguf(a, gguf, "b", false, &err), OK);
    for (int i = 0; i < 3; i++) {
        struct adapter *b = adapter_open(i ? gguf : dir, m, &err);
        if (!b) fail_msg("%s", err.text);
        assert_string_equal(b->hash, a->hash);
        assert_int_equal(b->config.n_invocation, 3);
        assert_memory_equal(b->config.invocation, ids, sizeof ids);
        adapter_release(b);
        if (i != 1) continue;
        assert_int_equal(gguf_tensors_open(&st, gguf, &err), OK);
        json_object_del(st.metadata, "shoal.config");
        assert_int_equal(gguf_tensors_write(gguf, st.metadata, st.tensors, st.n_tensors, &err), OK);
        safetensors_close(&st);
    }
    assert_int_equal(adapter_activation(&a->config, prompt, 9), 4);
    assert_int_equal(adapter_activation(&a->config, prompt, 6), 0);
    assert_int_equal(adapter_activation(&a->config, prompt + 1, 5), ADAPTER_INACTIVE);
    assert_int_equal(adapter_activation(&a->config, prompt, 0), ADAPTER_INACTIVE);
    assert_int_equal(adapter_activation(&plain->config, prompt, 0), 0);
    struct adapter_config c = a->config;
    c.dora = true;
    assert_int_equal(adapter_config_check(&m->config, &c, &err), ERR_MISMATCH);
    c.dora = false, c.head.full = true;
    assert_int_equal(adapter_config_check(&m->config, &c, &err), ERR_MISMATCH);
    adapter_release(a);
    adapter_release(plain);
    model_close(m);
    free(dir);
    free(gguf);
}

/* PEFT configs of the golden cases with one invalid value. */
static const struct invalid_config {
    const char *from, *old, *new, *words;
} invalid_configs[] = {
    {"tokens", "[23, 5, 7]", "[23, 5, 24]", "holds something but ids from 0 to 23"},
    {"tokens", "[23, 5, 7]", "[5, 23, 5]", "names token 5 twice"},
    {"tokens", "[23, 5, 7]", "[5, 7]", "trainable_tokens_delta' is [3, 8], expected [2, 8]"},
    {"tokens", "[23, 5, 7]", "{\"q_proj\": [1]}", "names 'q_proj'; embed_tokens and lm_head"},
    {"tokens", "[23, 5, 7]", "7", "'trainable_token_indices' is not a list of numbers"},
    {"saved", "\"embed_tokens\"", "\"norm\"", "'modules_to_save' is set: 'norm' in it"},
    {"saved", "\"q_proj\"", "\"lm_head\"", "'lm_head' is in more than one of target_modules"},
    {"tables", "\"r\": 3", "\"use_dora\": true, \"r\": 3", "on 'embed_tokens', an embedding"},
    {"tables_tied", "\"r\": 3", "\"ensure_weight_tying\": true, \"r\": 3", "'ensure_weight_tying'"},
    {"dora", "\"use_dora\": true", "\"use_dora\": true, \"alora_invocation_tokens\": [1]",
     "with DoRA is not supported"},
    {"saved", "\"bias\"", "\"alora_invocation_tokens\": [1], \"bias\"",
     "with a separate embedding or head"},
    {"dora", "\"use_dora\": true", "\"use_dora\": false", "lora_magnitude_vector' belongs to no"},
    {"dora", "\"use_dora\": true", "\"use_dora\": 1", "'use_dora' is neither true nor false"},
    {"plain", "\"r\": 2", "\"r\": 2, \"r\": 3", "duplicate object key"},
    {"plain", "\"bias\": \"none\"", "\"bias\": \"lora_only\"", "'bias' is set"},
    {"plain", "\"bias\"", "\"fan_in_fan_out\": true, \"bias\"", "'fan_in_fan_out' is set"},
    {"plain", "\"bias\"", "\"lora_bias\": true, \"bias\"", "'lora_bias' is set"},
    {"plain", "\"bias\"", "\"target_parameters\": [\"x\"], \"bias\"", "'target_parameters'"},
    {"plain", "\"bias\"", "\"init_lora_weights\": \"olora\", \"bias\"", "changes the base as well"},
    {"tables", "\"lm_head\"]", "\"lm_head\"], \"layers_to_transform\": [0, 1]",
     "'base_model.model.lm_head.lora_A.weight' is not among the targets"},
};

/* Writes a copy of the golden adapter with `old` replaced by `new` in its config. */
static void invalid_config_write(const struct invalid_config *w, const char *dir) {
    char *from = xasprintf(GOLDEN "/%s", w->from), *to;
    struct error err;
    struct buf config = read_file(from, "adapter_config.json"),
               tensors = read_file(from, "adapter_model.safetensors"), out = {0};
    json_t *root = json_parse(config.data, config.len, w->from, &err); // one line, spaces as above
    char *line = json_dumps(root, JSON_SORT_KEYS);
    const char *at = strstr(line, w->old);
    if (!at) fail_msg("no %s in %s", w->old, line);
    buf_add(&out, line, (size_t)(at - line));
    buf_printf(&out, "%s%s", w->new, at + strlen(w->old));
    assert_int_equal(dir_make(dir, &err), OK);
    write_file(to = path_join(dir, "adapter_config.json"), out.data, out.len);
    free(to);
    write_file(to = path_join(dir, "adapter_model.safetensors"), tensors.data, tensors.len);
    free(to);
    free(from);
    free(line);
    json_decref(root);
    buf_release(&config);
    buf_release(&tensors);
    buf_release(&out);
}

static void configs_refused(void **state) {
    (void)state;
    char *dir = path_join(temp_dir, "wrong");
    for (size_t i = 0; i < ARRAY_LEN(invalid_configs); i++) {
        struct model *m = base_open(strstr(invalid_configs[i].from, "tied") ? "tied" : "base");
        struct error err = {0};
        invalid_config_write(&invalid_configs[i], dir);
        assert_null(adapter_open(dir, m, &err));
        if (!strstr(err.text, invalid_configs[i].words))
            fail_msg("wanted \"%s\", got \"%s\"", invalid_configs[i].words, err.text);
        model_close(m);
    }
    free(dir);
}

/* Tensors with PEFT's internal names, which include the adapter's name. */
static void peft_internal_names(void **state) {
    (void)state;
    static const struct {
        const char *ending, *inner;
    } names[] = {
        {"lora_A.weight", "lora_A.default.weight"},
        {"lora_B.weight", "lora_B.default.weight"},
        {"lora_magnitude_vector", "lora_magnitude_vector.default.weight"},
        {"lora_embedding_A", "lora_embedding_A.default"},
        {"lora_embedding_B", "lora_embedding_B.default"},
        {"trainable_tokens_delta", "trainable_tokens_delta.default"},
    };
    char *dir = path_join(temp_dir, "inner"), *path = path_join(dir, "adapter_model.safetensors");
    for (int i = 0; i < n_golden; i++) {
        struct invalid_config same = {golden[i].name, "LORA", "LORA", NULL};
        struct model *m = base_open(golden[i].base);
        struct adapter *a = case_open(&golden[i], m);
        struct safetensors st;
        struct error err;
        char *from = xasprintf(GOLDEN "/%s/adapter_model.safetensors", golden[i].name);
        invalid_config_write(&same, dir);
        assert_int_equal(safetensors_open(&st, from, &err), OK);
        for (int t = 0; t < st.n_tensors; t++)
            for (size_t k = 0; k < ARRAY_LEN(names); k++) {
                char *name = st.tensors[t].name;
                size_t len = strlen(name), n = strlen(names[k].ending);
                if (len < n || strcmp(name + len - n, names[k].ending) != 0) continue;
                st.tensors[t].name = xasprintf("%.*s%s", (int)(len - n), name, names[k].inner);
                free(name);
                break;
            }
        assert_int_equal(safetensors_write(path, st.tensors, st.n_tensors, NULL, &err), OK);
        struct adapter *b = open_ok(dir, m);
        assert_string_equal(a->hash, b->hash);
        safetensors_close(&st);
        adapter_release(a);
        adapter_release(b);
        model_close(m);
        free(from);
    }
    free(dir);
    free(path);
}

/* Names of the language model's modules in a multimodal Gemma, in the forms of old and new
 * versions, and names of modules outside of the language model. */
static void multimodal_names(void **state) {
    (void)state;
    static const char vision[] = "base_model.model.model.vision_tower.encoder.layers.0.self_attn."
                                 "q_proj.lora_A.weight";
    static const struct {
        const char *stem, *targets; /* for "model." */
    } rows[] = {
        {"model.language_model.", "[\"q_proj\", \"down_proj\"]"},
        {"language_model.model.", "[\"q_proj\", \"down_proj\"]"},
        {"model.language_model.", "\".*language_model.*\\\\.(q_proj|down_proj)\""},
        {"language_model.model.", "\"language_model.model.layers.\\\\d+.*(q_proj|down_proj)\""},
    };
    struct model *m = fixture_model("tiny-gemma3", true, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 3, "q_proj,down_proj", 0.2f, 4);
    char *plain = path_join(temp_dir, "language"), *dir = path_join(temp_dir, "multimodal"),
         *from = path_join(plain, "adapter_model.safetensors"),
         *to = path_join(dir, "adapter_model.safetensors"),
         *config = path_join(dir, "adapter_config.json");
    struct error err;
    log_quiet = true;
    save_ok(a, plain, "base");
    assert_int_equal(dir_make(dir, &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct safetensors st;
        assert_int_equal(safetensors_open(&st, from, &err), OK);
        struct tensor_info list[64] = {{.name = xstrdup(vision),
                                        .n_dims = 2,
                                        .dims = {1, 1},
                                        .data = (float[]){1},
                                        .size = 4}};
        int n = st.n_tensors + 1;
        assert_true(n <= 64);
        for (int t = 1; t < n; t++) {
            list[t] = st.tensors[t - 1];
            list[t].name = xasprintf("base_model.model.%s%s", rows[i].stem,
                                     st.tensors[t - 1].name + strlen("base_model.model.model."));
        }
        assert_int_equal(safetensors_write(to, list, n, NULL, &err), OK);
        char *text = xasprintf("{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 4.5, "
                               "\"target_modules\": %s}",
                               rows[i].targets);
        write_file(config, text, strlen(text));
        struct adapter *b = open_ok(dir, m);
        assert_string_equal(a->hash, b->hash);
        for (int t = 0; t < n; t++) free(list[t].name);
        safetensors_close(&st);
        adapter_release(b);
        free(text);
    }
    log_quiet = false;
    adapter_release(a);
    model_close(m);
    free(plain);
    free(dir);
    free(from);
    free(to);
    free(config);
}

/* Each kind of tensor is refused if its last value is NaN, and the error has the tensor's name. */
static void nan_refused(void **state) {
    (void)state;
    static const char *const kinds[] = {"plain", "dora", "saved", "tokens", "tables"};
    char *dir = path_join(temp_dir, "nan"), *path = path_join(dir, "adapter_model.safetensors");
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct invalid_config same = {kinds[k], "LORA", "LORA", NULL};
        struct model *m = base_open("base");
        struct safetensors st;
        struct error err;
        invalid_config_write(&same, dir);
        struct buf b = read_file(dir, "adapter_model.safetensors");
        assert_int_equal(safetensors_open(&st, path, &err), OK);
        for (int i = 0; i < st.n_tensors; i++) {
            const struct tensor_info *t = &st.tensors[i];
            char *at = b.data + ((const uint8_t *)t->data - st.map.data) + t->size - 4, old[4];
            memcpy(old, at, 4);
            memcpy(at, &(float){NAN}, 4);
            write_file(path, b.data, b.len);
            memcpy(at, old, 4);
            assert_null(adapter_open(dir, m, &err));
            assert_int_equal(err.code, ERR_NUMERIC);
            assert_non_null(strstr(err.text, t->name));
        }
        safetensors_close(&st);
        buf_release(&b);
        model_close(m);
    }
    free(dir);
    free(path);
}

static void count_messages(void *ctx, const char *text) {
    (void)text;
    ++*(int *)ctx;
}

/* Number of warnings when an adapter of a base, which may be a copy, is opened for a model. */
static int base_warnings(const struct model *trained_on, struct model *m) {
    struct adapter *a = fixture_adapter(&m->config, 2, "q_proj", 0.2f, 1), *b;
    json_t *lineage = json_object();
    char *dir = path_join(temp_dir, "of-base");
    int n = 0;
    struct log_sink sink = {.message = count_messages, .ctx = &n}, *before;
    adapter_lineage_set_model(lineage, trained_on);
    b = adapter_from_data(&a->shape, &a->config, a->data, lineage);
    save_ok(b, dir, "base");
    before = log_set_sink(&sink);
    adapter_release(open_ok(dir, m));
    log_set_sink(before);
    adapter_release(a);
    adapter_release(b);
    json_decref(lineage);
    free(dir);
    return n;
}

/* A model and its quantised and converted copies are one base. */
static void copies_are_one_base(void **state) {
    (void)state;
    struct error err;
    struct model *m[4];
    const char *const names[] = {"source.gguf", "q8.gguf", "copy", "other.gguf"};
    struct model *made[2] = {fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT), NULL};
    made[1] = model_new_random(&made[0]->config, 77, NUMERIC_EXACT);
    for (int i = 0; i < 4; i++) {
        char *path = path_join(temp_dir, names[i]);
        const struct model *from = i == 3 ? made[1] : i == 0 ? made[0] : m[i - 1];
        assert_int_equal(
            i == 2 ? model_write_hf(from, path, TENSOR_F16, &err)
                   : model_write_gguf(from, path, i == 1 ? TENSOR_Q8_0 : TENSOR_F32, &err),
            OK);
        if (!(m[i] = model_open(path, NUMERIC_EXACT, &err))) fail_msg("%s", err.text);
        assert_int_equal(model_hash(m[i], &err) && i < 2 ? model_set_source(m[i], &err) : OK, OK);
        free(path);
    }
    m[0]->source_hash[0] = 0; // it was set for the writers; the file does not have it
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++)
            assert_int_equal(base_warnings(m[i], m[k]), (i == 3) != (k == 3));
    for (int i = 0; i < 4; i++) model_close(m[i]);
    for (int i = 0; i < 2; i++) model_close(made[i]);
}

/* Adapters without effect: a new one, a scale of 0, and components of which only one factor is not
 * zero; with DoRA as without. */
static void effect_is_recognised(void **state) {
    (void)state;
    struct error err;
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    for (int dora = 0; dora < 2; dora++) {
        struct adapter_config c = {.r = 2, .alpha = 4, .target = {[PROJ_Q] = true}, .dora = dora};
        struct adapter *a = adapter_new_for_model(m, &c, 3, &err), *b;
        size_t in = (size_t)proj_in(&m->config, PROJ_Q), last = a->n_data - 1;
        assert_false(adapter_has_effect(a));
        float *data = xmalloc(a->n_data * sizeof *data);
        memcpy(data, a->data, a->n_data * sizeof *data);
        if (!dora) {
            memset(data + in, 0, in * sizeof *data); // row 1 of A of layer 0
            data[2 * in + 1] = 1;                    // column 1 of B
            b = adapter_from_data(&m->config, &c, data, NULL);
            assert_false(adapter_has_effect(b));
            adapter_release(b);
            data[2 * in] = 1; // column 0 of B
            b = adapter_from_data(&m->config, &c, data, NULL);
            assert_true(adapter_has_effect(b));
            adapter_release(b);
            c.alpha = 0;
            b = adapter_from_data(&m->config, &c, data, NULL);
            assert_false(adapter_has_effect(b));
            adapter_release(b);
        } else {
            data[last] *= 1.01f; // a magnitude
            b = adapter_from_data(&m->config, &c, data, NULL);
            assert_int_equal(adapter_bind(b, m, &err), OK);
            assert_true(adapter_has_effect(b));
            adapter_release(b);
        }
        adapter_release(a);
        free(data);
    }
    model_close(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_agrees),
        cmocka_unit_test(saved_twice_same_bytes),
        cmocka_unit_test(gguf_round_trip),
        cmocka_unit_test(gguf_orientation),
        cmocka_unit_test(gguf_from_other_programs),
        cmocka_unit_test(merged_agrees),
        cmocka_unit_test(merged_for_writing),
        cmocka_unit_test(concat_agrees),
        cmocka_unit_test(dora_sum_is_exact),
        cmocka_unit_test(sum_packs_agree),
        cmocka_unit_test(plain_adapters_required),
        cmocka_unit_test(kinds_invariant),
        cmocka_unit_test(architectures),
        cmocka_unit_test(architecture_names),
        cmocka_unit_test(engine_agrees),
        cmocka_unit_test(unbound_dora_refused),
        cmocka_unit_test(replacement_tables_reduced_to_rows),
        cmocka_unit_test(zero_norm_refused),
        cmocka_unit_test(gguf_damaged),
        cmocka_unit_test(gguf_refused),
        cmocka_unit_test(activated_files),
        cmocka_unit_test(configs_refused),
        cmocka_unit_test(peft_internal_names),
        cmocka_unit_test(multimodal_names),
        cmocka_unit_test(nan_refused),
        cmocka_unit_test(copies_are_one_base),
        cmocka_unit_test(effect_is_recognised),
    };
    return cmocka_run_group_tests(tests, golden_setup, golden_teardown);
}
