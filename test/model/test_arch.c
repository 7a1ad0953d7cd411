/*
 * test_arch: every architecture compared with an independent implementation in Python and doubles.
 *
 * test/golden/arch/NAME.json (see its README) contains a tiny model's config.json, its list of
 * tensors and its results; the weights are a formula of the tensor's name, the same here as in the
 * oracle. The test covers reading the directory, the pass layer by layer, adapters with PEFT's
 * names, and the same model written and read again in both formats.
 */
#define _GNU_SOURCE
#include "fixture.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include "model/internal.h"

// last: it needs four of the above
#include <cmocka.h>

#define GOLDEN "test/golden/arch/"

static char tmp_dir[64];
static struct arena tmp_paths;

static int group_setup(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(tmp_dir, sizeof tmp_dir, "/tmp/shoal-arch-XXXXXX");
    return mkdtemp(tmp_dir) ? 0 : -1;
}

static int group_teardown(void **state) {
    (void)state;
    arena_release(&tmp_paths);
    return folder_remove(tmp_dir);
}

static const char *tmp_path(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", tmp_dir, name);
    return arena_strdup(&tmp_paths, path);
}

/* Tensors to be written; owns their names and data. */
struct tensors {
    struct tensor_info v[256];
    int n;
};

static void tensor_add(struct tensors *t, const char *name, int n_dims, int64_t d0, int64_t d1,
                       float base, float scale) {
    int64_t n = d0 * (n_dims == 2 ? d1 : 1);
    float *data = xcalloc((size_t)n, sizeof *data);
    fixture_formula(data, n, name, base, scale);
    assert_true(t->n < (int)ARRAY_LEN(t->v));
    t->v[t->n++] = (struct tensor_info){.name = xstrdup(name),
                                        .type = TENSOR_F32,
                                        .n_dims = n_dims,
                                        .dims = {d0, d1},
                                        .data = data,
                                        .size = (size_t)n * sizeof *data};
}

static void tensors_write(struct tensors *t, const char *path) {
    struct error err;
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    tensors_sort(t->v, t->n);
    if (safetensors_write(path, t->v, t->n, metadata, &err) != OK) fail_msg("%s", err.text);
    json_decref(metadata);
    for (int i = 0; i < t->n; i++) {
        free(t->v[i].name);
        free((void *)(uintptr_t)t->v[i].data);
    }
}

static json_t *golden_open(const char *name) {
    char path[128];
    struct error err;
    snprintf(path, sizeof path, GOLDEN "%s.json", name);
    json_t *g = json_parse_file(path, &err);
    if (!g) fail_msg("%s", err.text);
    return g;
}

/* A directory in Hugging Face's format; in the multimodal case with some tensors of other
 * modalities. */
static const char *model_write(const json_t *g, const char *name) {
    struct tensors t = {0};
    struct error err;
    const json_t *list = json_object_get(g, "tensors");
    const char *dir = tmp_path(name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *e = json_array_get(list, i), *dims = json_array_get(e, 1);
        tensor_add(&t, json_string_value(json_array_get(e, 0)), (int)json_array_size(dims),
                   json_integer_value(json_array_get(dims, 0)),
                   json_integer_value(json_array_get(dims, 1)),
                   (float)json_number_value(json_array_get(e, 2)),
                   (float)json_number_value(json_array_get(e, 3)));
    }
    if (json_object_get(json_object_get(g, "config"), "vision_config")) {
        tensor_add(&t, "vision_tower.vision_model.post_layernorm.bias", 1, 8, 1, 0, 1);
        tensor_add(&t, "multi_modal_projector.mm_input_projection_weight", 2, 8, 24, 0, 1);
    }
    assert_int_equal(dir_make(dir, &err), OK);
    char *weights = path_join(dir, "model.safetensors"), *config = path_join(dir, "config.json");
    tensors_write(&t, weights);
    assert_int_equal(json_dump_file(json_object_get(g, "config"), config, 0), 0);
    free(weights);
    free(config);
    return dir;
}

static struct model *open_ok(const char *path) {
    struct error err;
    struct model *m = model_open(path, NUMERIC_EXACT, &err);
    if (!m) fail_msg("%s", err.text);
    return m;
}

/* All tokens of the golden file, `chunk` at a time; logits [T][V], hidden [T][D] (may be NULL). */
static void model_run(const struct model *m, const json_t *g, const struct adapter *a, int chunk,
                      float *logits, float *hidden) {
    const json_t *tokens = json_object_get(g, "tokens");
    int n = (int)json_array_size(tokens), vocab = m->config.vocab_size, d = m->config.d_model;
    struct forward_options o = {.max_rows = chunk, .n_slots = 1, .slot_len = n};
    struct forward *f = forward_new(m, &o);
    for (int pos = 0; pos < n; pos += chunk) {
        struct batch_row rows[64];
        int32_t out[64], count = MIN(chunk, n - pos);
        for (int i = 0; i < count; i++) {
            int32_t token = (int32_t)json_integer_value(json_array_get(tokens, (size_t)(pos + i)));
            rows[i] = (struct batch_row){.token = token, .pos = pos + i};
            out[i] = i;
        }
        struct lora_part part;
        struct lora_segment seg = adapter_lora_segment(a, 0, count, &part);
        forward_run(f, rows, count, &seg, 1, out, count, logits + (int64_t)pos * vocab);
        if (hidden)
            memcpy(hidden + (int64_t)pos * d, forward_hidden(f),
                   sizeof(float) * (size_t)(count * d));
    }
    forward_free(f);
}

/* The golden rows of `want` against `got` [T][width]. */
static void assert_rows_near(const json_t *g, const json_t *want, const float *got, int width,
                             const char *what) {
    const json_t *rows = json_object_get(g, "rows");
    double worst = 0, top = 0;
    assert_true(json_array_size(want) == json_array_size(rows) && json_array_size(rows) > 0);
    for (size_t r = 0; r < json_array_size(rows); r++) {
        const json_t *row = json_array_get(want, r);
        int64_t pos = json_integer_value(json_array_get(rows, r));
        assert_int_equal(json_array_size(row), width);
        for (int i = 0; i < width; i++) {
            double x = json_number_value(json_array_get(row, (size_t)i));
            worst = fmax(worst, fabs(x - (double)got[pos * width + i]));
            top = fmax(top, fabs(x));
        }
    }
    assert_true(top > 0.5);
    if (!(worst < 2e-5 * top)) fail_msg("%s: off by %g of %g", what, worst, top);
}

/* After every layer: a truncated model applies the final norm to that layer's output. */
static void assert_layers_match(const struct model *m, const json_t *g) {
    size_t n = json_array_size(json_object_get(g, "tokens"));
    float *logits = xcalloc(n * (size_t)m->config.vocab_size, sizeof *logits);
    float *hidden = xcalloc(n * (size_t)m->config.d_model, sizeof *hidden);
    const json_t *layers = json_object_get(g, "hidden");
    assert_int_equal(json_array_size(layers), m->config.n_layers);
    for (int32_t l = 0; l < m->config.n_layers; l++) {
        char what[64];
        struct model truncated = *m;
        truncated.config.n_layers = l + 1;
        model_run(&truncated, g, NULL, 7, logits, hidden);
        snprintf(what, sizeof what, "hidden states after layer %d", (int)l);
        assert_rows_near(g, json_array_get(layers, (size_t)l), hidden, m->config.d_model, what);
    }
    assert_rows_near(g, json_object_get(g, "logits"), logits, m->config.vocab_size, "logits");
    free(logits);
    free(hidden);
}

static float *logits_compute(const struct model *m, const json_t *g) {
    float *logits =
        xcalloc(json_array_size(json_object_get(g, "tokens")) * (size_t)m->config.vocab_size,
                sizeof *logits);
    model_run(m, g, NULL, 64, logits, NULL);
    return logits;
}

static void assert_same_bits(const struct model *m, const char *path, const json_t *g) {
    struct model *reread = open_ok(path);
    float *a = logits_compute(m, g), *b = logits_compute(reread, g);
    size_t n = json_array_size(json_object_get(g, "tokens")) * (size_t)m->config.vocab_size;
    assert_memory_equal(a, b, n * sizeof *a);
    free(a);
    free(b);
    model_close(reread);
}

static bool file_has(const struct buf *file, const void *bytes, size_t n) {
    return memmem(file->data, file->len, bytes, n) != NULL;
}

/* A name in GGUF's format, preceded by its length. */
static bool gguf_has_name(const struct buf *file, const char *name) {
    char text[128];
    uint64_t len = strlen(name);
    memcpy(text, &len, sizeof len);
    memcpy(text + sizeof len, name, (size_t)len);
    return file_has(file, text, sizeof len + (size_t)len);
}

/* The norm or bias in llama.cpp's format: Gemma's norms plus 1, llama's q and k biases in
 * interleaved order. */
static void assert_vector_stored(const struct model *m, const struct buf *file,
                                 const json_t *entry) {
    const char *name = json_string_value(json_array_get(entry, 0)),
               *gguf = json_string_value(json_array_get(entry, 4));
    float raw[256], v[256], base = (float)json_number_value(json_array_get(entry, 2)),
                            scale = (float)json_number_value(json_array_get(entry, 3));
    int32_t n = (int32_t)json_integer_value(json_array_get(json_array_get(entry, 1), 0)),
            e = m->config.head_dim;
    bool permuted = m->config.arch->gguf_permuted &&
                    (strstr(gguf, "attn_q.bias") || strstr(gguf, "attn_k.bias"));
    if (m->config.arch->norm_offset) base += 1.0f;
    fixture_formula(raw, n, name, base, scale);
    for (int32_t i = 0; i < n; i++) {
        int32_t j = i % e, source = permuted ? i - j + j % 2 * (e / 2) + j / 2 : i;
        v[i] = raw[source];
    }
    if (!file_has(file, v, sizeof *v * (size_t)n))
        fail_msg("'%s' has other values in the GGUF file", gguf);
}

static void assert_gguf_matches(const struct model *m, const json_t *g, const char *name) {
    char file_name[64];
    struct error err;
    snprintf(file_name, sizeof file_name, "%s.gguf", name);
    const char *path = tmp_path(file_name);
    if (!m->config.arch->gguf) {
        assert_int_equal(model_write_gguf(m, path, TENSOR_F32, &err), ERR_MISMATCH);
        assert_non_null(strstr(err.text, "has no GGUF form"));
        return;
    }
    assert_int_equal(model_write_gguf(m, path, TENSOR_F32, &err), OK);
    assert_same_bits(m, path, g);
    struct buf file = {0};
    assert_int_equal(file_read(path, 1 << 28, &file, &err), OK);
    const json_t *list = json_object_get(g, "tensors"), *keys = json_object_get(g, "gguf_keys");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const char *tensor = json_string_value(json_array_get(entry, 4));
        if (!gguf_has_name(&file, tensor)) fail_msg("no '%s' in the GGUF file", tensor);
        if (json_array_size(json_array_get(entry, 1)) == 1) assert_vector_stored(m, &file, entry);
    }
    for (size_t i = 0; i < json_array_size(keys); i++) {
        const char *key = json_string_value(json_array_get(keys, i));
        if (!gguf_has_name(&file, key)) fail_msg("no '%s' in the GGUF file", key);
    }
    buf_release(&file);
}

/* An adapter on every projection with PEFT's names, as PEFT would save it. */
static const char *adapter_files_write(const struct model *m, const json_t *g, const char *name) {
    static const char *const letters[] = {"A", "B"};
    char dir_name[64];
    struct tensors t = {0};
    struct error err;
    const json_t *numbers = json_object_get(g, "adapter");
    int64_t r = json_integer_value(json_array_get(numbers, 0));
    snprintf(dir_name, sizeof dir_name, "%s-adapter", name);
    const char *dir = tmp_path(dir_name);
    for (int32_t l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < 2 * N_PROJ; p++) {
            const char *path = proj_hf_path(m->config.arch, (enum proj)(p / 2));
            char tensor[160];
            if (!path) continue;
            snprintf(tensor, sizeof tensor, "base_model.model.%s.%d.%s.lora_%s.weight",
                     m->config.arch->hf_layers, (int)l, path, letters[p % 2]);
            if (p % 2 == 0)
                tensor_add(&t, tensor, 2, r, proj_in(&m->config, (enum proj)(p / 2)), 0, 0.25f);
            else
                tensor_add(&t, tensor, 2, proj_out(&m->config, (enum proj)(p / 2)), r, 0, 0.25f);
        }
    assert_int_equal(dir_make(dir, &err), OK);
    char *weights = path_join(dir, "adapter_model.safetensors"),
         *config = path_join(dir, "adapter_config.json");
    tensors_write(&t, weights);
    json_t *root =
        json_pack("{s:s,s:i,s:f,s:s}", "peft_type", "LORA", "r", (int)r, "lora_alpha",
                  json_number_value(json_array_get(numbers, 1)), "target_modules", "all-linear");
    assert_int_equal(json_dump_file(root, config, 0), 0);
    json_decref(root);
    free(weights);
    free(config);
    return dir;
}

static void assert_adapter_matches(const struct model *m, const json_t *g, const char *name) {
    struct error err;
    struct adapter *a = adapter_load(adapter_files_write(m, g, name), &m->config, &err);
    if (!a) fail_msg("%s", err.text);
    float *logits = logits_compute(m, g);
    model_run(m, g, a, 9, logits, NULL);
    assert_rows_near(g, json_object_get(g, "adapted"), logits, m->config.vocab_size, "adapted");
    free(logits);
    assert_int_equal(adapter_save(a, tmp_path("adapter-again"), "base", &err), OK);
    struct adapter *reread = adapter_load(tmp_path("adapter-again"), &m->config, &err);
    if (!reread) fail_msg("%s", err.text);
    assert_string_equal(a->hash, reread->hash);
    adapter_release(reread);
    adapter_release(a);
}

static void golden_test(const char *name) {
    char copy[64];
    struct error err;
    json_t *g = golden_open(name);
    struct model *m = open_ok(model_write(g, name));
    assert_layers_match(m, g);
    assert_adapter_matches(m, g, name);
    snprintf(copy, sizeof copy, "%s-again", name);
    assert_int_equal(model_write_hf(m, tmp_path(copy), TENSOR_F32, &err), OK);
    assert_same_bits(m, tmp_path(copy), g);
    assert_gguf_matches(m, g, name);
    model_close(m);
    json_decref(g);
}

#define GOLDEN_TEST(function, name)                                                                \
    static void function(void **state) {                                                           \
        (void)state;                                                                               \
        golden_test(name);                                                                         \
    }
GOLDEN_TEST(llama_llama3, "llama-llama3")
GOLDEN_TEST(llama_biased, "llama-biased")
GOLDEN_TEST(qwen2, "qwen2")
GOLDEN_TEST(qwen3, "qwen3")
GOLDEN_TEST(gemma3, "gemma3")
GOLDEN_TEST(gemma3_multimodal, "gemma3-multimodal")
GOLDEN_TEST(gpt_neo, "gpt-neo")

/* The config.json of published models is read, gives the model's known number of parameters, and is
 * written again with the same values. */
static void published_configs(void **state) {
    (void)state;
    struct error err;
    json_t *list = json_parse_file(GOLDEN "published.json", &err);
    assert_true(json_array_size(list) > 5);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        struct model m = {0};
        struct model_config reread = {0};
        if (hf_config_read(json_object_get(entry, "config"), &m.config, &err) != OK)
            fail_msg("%s: %s", name, err.text);
        int64_t params = model_param_count(&m.config);
        if (params != json_integer_value(json_object_get(entry, "params")))
            fail_msg("%s: %lld parameters", name, (long long)params);
        assert_int_equal(m.config.sliding_window,
                         json_integer_value(json_object_get(entry, "window")));
        json_t *written = hf_config_json(&m, TENSOR_BF16);
        if (hf_config_read(written, &reread, &err) != OK) fail_msg("%s, again: %s", name, err.text);
        assert_memory_equal(&m.config, &reread, sizeof reread);
        json_decref(written);
    }
    json_decref(list);
}

/* With one layer, which has a sliding window, a changed token at position 3 changes exactly the
 * rows whose window contains it. */
static void assert_window_is_exact(const char *shape) {
    enum { N = 24, CHANGED = 3 };
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find(shape, &c, &err), OK);
    c.n_layers = 1;
    c.sliding_layers[0] = 1;
    struct model *m = model_new_random(&c, 5, NUMERIC_EXACT);
    struct forward_options o = {.max_rows = N, .n_slots = 2, .slot_len = N};
    struct forward *f = forward_new(m, &o);
    size_t size = (size_t)(N * c.vocab_size);
    float *a = xcalloc(size, sizeof *a), *b = xcalloc(size, sizeof *b);
    for (int run = 0; run < 2; run++) {
        struct batch_row rows[N];
        int32_t out[N];
        for (int i = 0; i < N; i++) {
            rows[i] = (struct batch_row){.token = 10 + i, .pos = i, .slot = run};
            out[i] = i;
        }
        if (run) rows[CHANGED].token = 99;
        forward_run(f, rows, N, NULL, 0, out, N, run ? b : a);
    }
    for (int i = 0; i < N; i++) {
        bool same = memcmp(a + i * c.vocab_size, b + i * c.vocab_size,
                           sizeof *a * (size_t)c.vocab_size) == 0;
        bool in_window = i >= CHANGED && i < CHANGED + c.sliding_window;
        if (same == in_window)
            fail_msg("%s: row %d %s", shape, i, in_window ? "does not see" : "sees");
    }
    forward_free(f);
    model_close(m);
    free(a);
    free(b);
}

static void windows_are_exact(void **state) {
    (void)state;
    assert_window_is_exact("tiny-gemma3");
    assert_window_is_exact("tiny-gpt-neo");
}

/* Values that rope_freqs.weight may have, in addition to those of the golden files. */
static void llama3_divisors_are_recovered(void **state) {
    (void)state;
    struct model_config c, reread;
    struct error err;
    float divisors[32];
    assert_int_equal(model_preset_find("llama3.2-1b", &c, &err), OK);
    for (int32_t i = 0; i < 32; i++) divisors[i] = rope_divisor(&c, i) * (1.0f + 1e-6f);
    reread = c;
    memset(&reread.rope_scaling, 0, sizeof reread.rope_scaling);
    assert_true(rope_scaling_recover(&reread, divisors));
    assert_int_equal(reread.rope_scaling.kind, ROPE_LLAMA3);
    assert_int_equal(reread.rope_scaling.original_len, 8192);
    assert_true(fabsf(reread.rope_scaling.factor - 32.0f) < 1e-3f);
    for (int32_t i = 0; i < 32; i++) divisors[i] = 1.0f;
    assert_true(rope_scaling_recover(&reread, divisors));
    assert_int_equal(reread.rope_scaling.kind, ROPE_DEFAULT);
    divisors[0] = 2.0f;
    assert_false(rope_scaling_recover(&reread, divisors));
    divisors[0] = NAN;
    assert_false(rope_scaling_recover(&reread, divisors));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_llama3),
        cmocka_unit_test(llama_biased),
        cmocka_unit_test(qwen2),
        cmocka_unit_test(qwen3),
        cmocka_unit_test(gemma3),
        cmocka_unit_test(gemma3_multimodal),
        cmocka_unit_test(gpt_neo),
        cmocka_unit_test(windows_are_exact),
        cmocka_unit_test(llama3_divisors_are_recovered),
        cmocka_unit_test(published_configs),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
