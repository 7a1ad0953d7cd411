/*
 * test_model_files: models written and read back in every format, and invalid values of every field
 * of a file.
 *
 * Round trips compare bits, rewriting compares files. Truncation and corruption tests cover every
 * byte of a small file: they expect an error (for a changed byte: no crash), so the sanitizers make
 * them stricter. Files from other programs are found through SHOAL_SHARED or ../shared; without
 * them those tests are skipped.
 */
/* levels: once */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/internal.h"

#include "folder.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static char tmp_dir[64];
static struct arena tmp_paths;

static int group_setup(void **state) {
    (void)state;
    log_quiet = true;
    /* In memory if possible: hundreds of fsyncs take long on a busy disk. */
    static const char *const roots[] = {"/dev/shm", "/tmp"};
    for (size_t i = 0; i < ARRAY_LEN(roots); i++) {
        snprintf(tmp_dir, sizeof(tmp_dir), "%s/shoal-model-files-XXXXXX", roots[i]);
        if (mkdtemp(tmp_dir)) return 0;
    }
    return -1;
}

static int group_teardown(void **state) {
    (void)state;
    arena_release(&tmp_paths);
    return folder_remove(tmp_dir);
}

/* tmp/NAME; valid until the program ends. */
static const char *tmp_path(const char *name) {
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", tmp_dir, name);
    return arena_strdup(&tmp_paths, path);
}

static void file_write_unsynced(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb"); /* not file_write, which waits for the disk */
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static struct buf file_read_all(const char *path) {
    struct buf b = {0};
    struct error err;
    assert_int_equal(file_read(path, (size_t)1 << 30, &b, &err), OK);
    return b;
}

static void assert_files_equal(const char *a, const char *b) {
    struct buf x = file_read_all(a), y = file_read_all(b);
    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len);
    buf_release(&x);
    buf_release(&y);
}

static int tmp_leftovers(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (strstr(e->d_name, ".tmp-")) n++;
    closedir(d);
    return n;
}

static char *shared_path(const char *name) {
    const char *root = getenv("SHOAL_SHARED");
    char *path = path_join(root ? root : "../shared", name);
    if (path_exists(path)) return path;
    fprintf(stderr, "SKIP: no '%s'\n", path);
    free(path);
    return NULL;
}

static struct model_config preset_config(const char *name) {
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find(name, &c, &err), OK);
    return c;
}

/* The smallest model with a tokenizer of bytes. */
static struct model_config smallest_config(const char *arch, bool tied) {
    struct model_config c = preset_config("tiny-llama");
    c.arch = arch_find(arch);
    c.n_layers = 1;
    c.d_model = c.d_ff = 8;
    c.n_heads = 2;
    c.n_kv_heads = 1;
    c.head_dim = 4;
    c.tied = tied;
    return c;
}

static struct model *model_create(const struct model_config *c, const char *name) {
    struct model *m = model_new_random(c, 7, NUMERIC_EXACT);
    m->name = arena_strdup(&m->arena, name);
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_HF, &w);
        if (!w.is_vector) continue;
        float *norm = (float *)(uintptr_t)*weight_vector(m, &w);
        for (int64_t j = 0; j < w.k; j++) norm[j] = 1.0f + 0.01f * (float)(j + i);
    }
    return m;
}

static void assert_configs_equal(const struct model_config *a, const struct model_config *b) {
    assert_ptr_equal(a->arch, b->arch);
    assert_int_equal(a->n_layers, b->n_layers);
    assert_int_equal(a->d_model, b->d_model);
    assert_int_equal(a->n_heads, b->n_heads);
    assert_int_equal(a->n_kv_heads, b->n_kv_heads);
    assert_int_equal(a->head_dim, b->head_dim);
    assert_int_equal(a->d_ff, b->d_ff);
    assert_int_equal(a->vocab_size, b->vocab_size);
    assert_int_equal(a->max_seq_len, b->max_seq_len);
    assert_true(a->rope_theta == b->rope_theta && a->rms_norm_eps == b->rms_norm_eps);
    assert_int_equal(a->tied, b->tied);
    assert_int_equal(a->rope_scaling.kind, b->rope_scaling.kind);
    assert_true(a->rope_scaling.factor == b->rope_scaling.factor);
    assert_int_equal(a->rope_scaling.original_len, b->rope_scaling.original_len);
    assert_true(a->rope_local_theta == b->rope_local_theta);
    assert_true(a->query_pre_attn_scalar == b->query_pre_attn_scalar);
    assert_int_equal(a->biased, b->biased);
    assert_int_equal(a->sliding_window, b->sliding_window);
    assert_memory_equal(a->sliding_layers, b->sliding_layers, sizeof(a->sliding_layers));
}

/* Row i of `w` after a conversion to `type` and back. */
static void row_convert(const struct model *m, const struct weight_info *w, int64_t i,
                        enum tensor_type type, float *out) {
    float *plain = xmalloc(sizeof(float) * (size_t)w->k),
          *stored = xmalloc(sizeof(float) * (size_t)w->k);
    bool blocks = type == TENSOR_Q4_0 || type == TENSOR_Q8_0;
    if (w->is_vector)
        type = TENSOR_F32;
    else if (blocks && w->k % 32 != 0)
        type = TENSOR_F16;
    weight_row(m, w, i, TENSOR_F32, plain, stored);
    memcpy(plain, stored, sizeof(float) * (size_t)w->k);
    tensor_from_f32(type, plain, stored, w->k);
    tensor_to_f32(type, stored, out, w->k);
    free(plain);
    free(stored);
}

/* `b` has a's weights in `type`, bit for bit. */
static void assert_weights_equal(const struct model *a, const struct model *b,
                                 enum tensor_type type) {
    for (int32_t i = 0; i < weight_count(&a->config); i++) {
        struct weight_info w;
        weight_at(&a->config, i, NAMING_HF, &w);
        float *x = xmalloc(sizeof(float) * (size_t)w.k), *y = xmalloc(sizeof(float) * (size_t)w.k);
        for (int64_t r = 0; r < w.n; r++) {
            row_convert(a, &w, r, type, x);
            row_convert(b, &w, r, TENSOR_F32, y);
            if (memcmp(x, y, sizeof(float) * (size_t)w.k) != 0)
                fail_msg("%s row %d differs", w.name, (int)r);
        }
        free(x);
        free(y);
    }
}

/* tokenizer.json cannot represent unused tokens (type 5): they become normal tokens (1). */
static int type_in_json(uint8_t type) {
    return type == 5 ? 1 : type;
}

static void assert_tokenizers_equal(const struct tokenizer *a, const struct tokenizer *b) {
    const struct tokenizer_spec *x = tokenizer_get_spec(a), *y = tokenizer_get_spec(b);
    assert_int_equal(x->kind, y->kind);
    assert_int_equal(x->n, y->n);
    assert_int_equal(x->bos, y->bos);
    assert_int_equal(x->eos, y->eos);
    assert_int_equal(x->add_bos, y->add_bos);
    assert_int_equal(x->n_merges, y->n_merges);
    assert_int_equal(x->ignore_merges, y->ignore_merges);
    assert_string_equal(x->pre ? x->pre : "", y->pre ? y->pre : "");
    for (int32_t i = 0; i < x->n; i++) {
        assert_int_equal(x->lens[i], y->lens[i]);
        assert_memory_equal(x->pieces[i], y->pieces[i], (size_t)x->lens[i]);
        assert_int_equal(type_in_json(x->types[i]), type_in_json(y->types[i]));
    }
    for (int32_t i = 0; i < x->n_merges; i++) assert_string_equal(x->merges[i], y->merges[i]);
}

static struct model *open_ok(const char *path, enum numeric_class cls) {
    struct error err = {0};
    struct model *m = model_open(path, cls, &err);
    if (!m) fail_msg("%s", err.text);
    return m;
}

/* Opening `path` fails, and the error contains each of `parts`, which are separated by '|'. */
static void assert_refused(const char *path, const char *parts) {
    struct error err = {0};
    struct model *m = model_open(path, NUMERIC_EXACT, &err);
    if (m) fail_msg("'%s' was opened, expected: %s", path, parts);
    assert_true(err.code < 0);
    char *list = xstrdup(parts), *rest = list;
    for (char *part; (part = strsep(&rest, "|"));)
        if (!strstr(err.text, part)) fail_msg("no '%s' in: %s", part, err.text);
    free(list);
}

static void test_shapes(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int64_t params;
    } known[] = {
        {"smollm-135m", 134515008},     {"qwen3-0.6b", 596049920},     {"stories15m", 15191712},
        {"tinyllama-1.1b", 1100048384}, {"llama3.2-1b", 1235814400},   {"qwen2.5-0.5b", 494032768},
        {"gemma3-270m", 268098176},     {"tinystories-33m", 68514048}, {"smollm2-360m", 361821120},
        {"smollm2-1.7b", 1711376384},   {"qwen3-1.7b", 1720574976},    {"qwen3-4b", 4022468096},
        {"llama3.2-3b", 3212749824},    {"llama3.1-8b", 8030261248},   {"gemma3-1b", 999885952},
        {"gemma3-4b", 3880263168},
    };
    struct model_config c;
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        c = preset_config(known[i].name);
        assert_int_equal(model_param_count(&c), known[i].params);
        assert_int_equal(model_config_check(&c, &err), OK);
    }
    assert_int_equal(model_preset_find("gpt-5", &c, &err), ERR_MISSING);
    assert_non_null(strstr(err.text, "'gpt-5'"));
    assert_non_null(strstr(err.text, "tiny-qwen3"));
    c = preset_config("tiny-qwen3");
    assert_int_equal(proj_in(&c, PROJ_O), 64);
    assert_int_equal(proj_out(&c, PROJ_K), 32);
    assert_int_equal(proj_in(&c, PROJ_DOWN), 64);
    assert_null(arch_find("gpt2"));
}

/* The projections' paths are the names in the list of weights; no other weight has that shape and
 * name. */
static int projections_named(const struct model_config *c) {
    int n = 0;
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_HF, &w);
        for (int p = 0; p < N_PROJ; p++) {
            char name[96];
            const char *path = proj_hf_path(c->arch, (enum proj)p);
            snprintf(name, sizeof(name), "%s.%d.%s.weight", c->arch->hf_layers, (int)w.layer,
                     path ? path : "?");
            if (strcmp(name, w.name) != 0) continue;
            n++;
            assert_int_equal(w.n, proj_out(c, (enum proj)p));
            assert_int_equal(w.k, proj_in(c, (enum proj)p));
        }
    }
    return n;
}

static void test_weight_names(void **state) {
    (void)state;
    static const struct {
        const char *shape, *last, *last_gguf;
        int32_t per_layer, others, projections;
    } cases[] = {
        {"tiny-llama", "lm_head.weight", "output.weight", 9, 3, 7},
        {"tiny-qwen2", "model.norm.weight", "output_norm.weight", 12, 2, 7},
        {"tiny-qwen3", "model.norm.weight", "output_norm.weight", 11, 2, 7},
        {"tiny-gemma3", "model.norm.weight", "output_norm.weight", 13, 2, 7},
        {"tiny-gpt-neo", "transformer.ln_f.bias", NULL, 13, 4, 6},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct model_config c = preset_config(cases[i].shape);
        struct weight_info w;
        assert_int_equal(weight_count(&c), cases[i].others + c.n_layers * cases[i].per_layer);
        assert_int_equal(projections_named(&c), cases[i].projections * c.n_layers);
        weight_at(&c, weight_count(&c) - 1, NAMING_HF, &w);
        assert_string_equal(w.name, cases[i].last);
        if (!cases[i].last_gguf) continue;
        weight_at(&c, weight_count(&c) - 1, NAMING_GGUF, &w);
        assert_string_equal(w.name, cases[i].last_gguf);
    }
}

static void test_rope_table(void **state) {
    (void)state;
    struct model_config c = preset_config("tiny-qwen3");
    float cos_t[40 * 8], sin_t[40 * 8];
    rope_table(&c, 40, cos_t, sin_t);
    for (int p = 0; p < 40; p++)
        for (int i = 0; i < 8; i++) {
            double angle = p * pow(1e6, -2.0 * i / 16);
            assert_true(fabs((double)cos_t[p * 8 + i] - cos(angle)) < 1e-7);
            assert_true(fabs((double)sin_t[p * 8 + i] - sin(angle)) < 1e-7);
        }
}

static void mean_and_std(const struct matrix *w, double *mean, double *std) {
    double sum = 0, square = 0, n = (double)(w->n * w->k);
    const float *v = w->data;
    for (int64_t i = 0; i < w->n * w->k; i++) {
        sum += (double)v[i];
        square += (double)v[i] * (double)v[i];
    }
    *mean = sum / n;
    *std = sqrt(square / n - *mean * *mean);
}

static void test_model_new(void **state) {
    (void)state;
    struct model_config c = preset_config("fry-1");
    struct model *a = model_new_random(&c, 1, NUMERIC_EXACT),
                 *b = model_new_random(&c, 1, NUMERIC_EXACT);
    struct model *other = model_new_random(&c, 2, NUMERIC_EXACT);
    struct error err;
    double mean, std;
    assert_weights_equal(a, b, TENSOR_F32);
    assert_string_equal(model_hash(a, &err), model_hash(b, &err));
    assert_string_not_equal(model_hash(a, &err), model_hash(other, &err));
    mean_and_std(&a->embed, &mean, &std);
    assert_true(fabs(mean) < 4 * 0.02 / sqrt(768 * 192) && fabs(std - 0.02) < 0.0002);
    mean_and_std(&a->layers[5].proj[PROJ_DOWN], &mean, &std);
    assert_true(fabs(std * sqrt(12) - 0.02) < 0.0003);
    assert_true(a->layers[3].ffn_norm[191] == 1.0f);
    assert_ptr_equal(a->head.data, a->embed.data);
    assert_int_equal(tokenizer_vocab_size(a->tok), 768);
    model_close(a);
    model_close(b);
    model_close(other);
}

static const enum tensor_type all_types[] = {TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_Q8_0,
                                             TENSOR_Q4_0};

static void gguf_round_trip(const struct model_config *c, enum tensor_type type,
                            enum numeric_class cls) {
    struct error err;
    dir_make(tmp_path("again"), &err);
    const char *path = tmp_path("trip.gguf"), *copy = tmp_path("again/trip.gguf");
    struct model *m = model_create(c, "trip");
    assert_int_equal(model_write_gguf(m, path, type, &err), OK);
    struct model *reread = open_ok(path, cls);
    assert_string_equal(reread->name, "trip");
    assert_configs_equal(c, &reread->config);
    assert_weights_equal(m, reread, type);
    assert_tokenizers_equal(m->tok, reread->tok);
    if (c->d_model % 32 == 0) assert_int_equal(reread->type, type);
    assert_int_equal(model_write_gguf(reread, copy, type, &err), OK);
    assert_files_equal(path, copy);
    char hash[HASH_LEN];
    assert_int_equal(sha256_file(path, hash, &err), OK);
    assert_string_equal(model_hash(reread, &err), hash);
    model_close(m);
    model_close(reread);
}

/* A model whose weights are computed while they are written gives the same files and hash as one in
 * memory. */
static void test_write_without_memory(void **state) {
    (void)state;
    const char *shapes[] = {"tiny-llama", "tiny-qwen3", "tiny-gemma3"};
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model_config c = preset_config(shapes[i]);
        struct model *m = model_new_random(&c, 5, NUMERIC_EXACT), *w = model_new_for_writing(&c, 5);
        assert_string_equal(model_hash(m, &err), model_hash(w, &err));
        assert_int_equal(model_write_gguf(m, tmp_path("memory.gguf"), TENSOR_Q8_0, &err), OK);
        assert_int_equal(model_write_gguf(w, tmp_path("computed.gguf"), TENSOR_Q8_0, &err), OK);
        assert_files_equal(tmp_path("memory.gguf"), tmp_path("computed.gguf"));
        model_close(m);
        model_close(w);
    }
}

static void test_gguf_round_trips(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(all_types); i++) {
        struct model_config llama = preset_config("tiny-llama"), qwen = preset_config("tiny-qwen3");
        gguf_round_trip(&llama, all_types[i], NUMERIC_EXACT);
        gguf_round_trip(&qwen, all_types[i], NUMERIC_FAST);
        llama.tied = true;
        llama.d_ff = 44; /* not a multiple of 32: block types fall back */
        gguf_round_trip(&llama, all_types[i], NUMERIC_FAST);
        struct model_config qwen2 = preset_config("tiny-qwen2"),
                            gemma = preset_config("tiny-gemma3");
        gguf_round_trip(&qwen2, all_types[i], NUMERIC_EXACT);
        gguf_round_trip(&gemma, all_types[i], NUMERIC_EXACT);
        gemma.sliding_layers[0] = 0x6; /* no period: a list of layers */
        gemma.query_pre_attn_scalar = 16.0f;
        gguf_round_trip(&gemma, all_types[i], NUMERIC_FAST);
        gemma.sliding_layers[0] = 0;
        gemma.sliding_window = 0;
        gguf_round_trip(&gemma, all_types[i], NUMERIC_EXACT);
    }
}

/* A copy stores the hash of its source, and a copy of a copy that of the first. Without it the
 * files are as before. */
static void test_source_hash(void **state) {
    (void)state;
    struct error err;
    struct model_config c = preset_config("tiny-llama");
    struct model *m = model_create(&c, "source");
    char hash[HASH_LEN];
    assert_int_equal(model_write_gguf(m, tmp_path("source.gguf"), TENSOR_F32, &err), OK);
    model_close(m);
    m = open_ok(tmp_path("source.gguf"), NUMERIC_EXACT);
    assert_string_equal(m->source_hash, "");
    strcpy(hash, model_hash(m, &err));
    for (int k = 0; k < 3; k++) {
        const char *path = tmp_path(k == 1 ? "copy" : k ? "copy2.gguf" : "copy.gguf");
        assert_int_equal(model_set_source(m, &err), OK);
        assert_int_equal(k == 1 ? model_write_hf(m, path, TENSOR_F16, &err)
                                : model_write_gguf(m, path, TENSOR_Q8_0, &err),
                         OK);
        model_close(m);
        m = open_ok(path, NUMERIC_EXACT);
        assert_string_equal(m->source_hash, hash);
        assert_string_not_equal(model_hash(m, &err), hash);
    }
    model_close(m);
}

/* A chat template, a pattern that GGUF has no name for, and rows beyond the tokenizer. */
static void test_gguf_extras(void **state) {
    (void)state;
    struct error err;
    struct model_config c = preset_config("tiny-llama");
    struct model *m = model_create(&c, "extras");
    const char *pieces[256], *merges[] = {"a b", "ab c"};
    char text[256][8];
    int32_t lens[256];
    uint8_t types[256];
    for (int i = 0; i < 256; i++) {
        pieces[i] = text[i];
        lens[i] = snprintf(text[i], sizeof(text[i]),
                           i == 1   ? "ab"
                           : i == 2 ? "abc"
                           : i < 3  ? "<s>"
                                    : "%c",
                           i);
        types[i] = i == 0 ? 3 : 1;
        if (i >= 127) lens[i] = snprintf(text[i], sizeof(text[i]), "t%d", i);
    }
    struct tokenizer_spec spec = {.kind = TOKENIZER_BPE,
                                  .n = 256,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .types = types,
                                  .merges = merges,
                                  .n_merges = 2,
                                  .pre = "[a-z]+|\\s|.",
                                  .bos = -1,
                                  .eos = 0,
                                  .unk = -1,
                                  .ignore_merges = true};
    tokenizer_free(m->tok);
    m->tok = tokenizer_new(&spec, &err);
    assert_non_null(m->tok);
    m->chat_template = arena_strdup(&m->arena, "{{ messages }} ü");
    assert_int_equal(model_write_gguf(m, tmp_path("extras.gguf"), TENSOR_F32, &err), OK);
    struct model *reread = open_ok(tmp_path("extras.gguf"), NUMERIC_EXACT);
    assert_string_equal(reread->chat_template, "{{ messages }} ü");
    const struct tokenizer_spec *s = tokenizer_get_spec(reread->tok);
    assert_string_equal(s->pre, "[a-z]+|\\s|.");
    assert_true(s->ignore_merges && !s->add_bos && s->bos == -1 && s->eos == 0);
    assert_string_equal(s->merges[1], "ab c");
    assert_int_equal(s->n, 300);
    assert_string_equal(s->pieces[299], "[PAD299]");
    assert_int_equal(s->types[299], 5);
    model_close(reread);
    tokenizer_free(m->tok);
    m->tok = NULL; /* the tokenizer is optional */
    assert_int_equal(model_write_gguf(m, tmp_path("extras.gguf"), TENSOR_F32, &err), OK);
    reread = open_ok(tmp_path("extras.gguf"), NUMERIC_EXACT);
    assert_null(reread->tok);
    model_close(reread);
    model_close(m);
}

/* Row 0 of weight `index` in the GGUF file: the data section begins at the embedding's first
 * row. */
static const float *gguf_weight_data(const struct buf *file, const struct model *m, int32_t index) {
    const char *start =
        memmem(file->data, file->len, m->embed.data, sizeof(float) * (size_t)m->embed.k);
    assert_non_null(start);
    struct weight_info w;
    for (int32_t i = 0; i < index; i++) {
        weight_at(&m->config, i, NAMING_GGUF, &w);
        start += (w.n * w.k * 4 + 31) / 32 * 32;
    }
    return (const float *)(const void *)start;
}

/* Rotary rows are interleaved in a llama file and unchanged in a qwen3 file. */
static void test_gguf_permutation(void **state) {
    (void)state;
    static const char *const names[] = {"tiny-llama", "tiny-qwen3"};
    struct error err;
    for (int n = 0; n < 2; n++) {
        struct model_config c = preset_config(names[n]);
        struct model *m = model_create(&c, "p");
        assert_int_equal(model_write_gguf(m, tmp_path("p.gguf"), TENSOR_F32, &err), OK);
        struct buf file = file_read_all(tmp_path("p.gguf"));
        int e = c.head_dim, heads[2] = {c.n_heads, c.n_kv_heads};
        for (int p = PROJ_Q; p <= PROJ_K; p++) {
            const float *stored = gguf_weight_data(&file, m, 2 + p),
                        *hf = m->layers[0].proj[p].data;
            for (int h = 0; h < heads[p]; h++)
                for (int j = 0; j < e / 2; j++)
                    for (int a = 0; a < 2; a++) {
                        int row = n == 0 ? h * e + 2 * j + a : h * e + a * e / 2 + j;
                        assert_memory_equal(stored + row * 32, hf + (h * e + a * e / 2 + j) * 32,
                                            32 * 4);
                    }
        }
        buf_release(&file);
        model_close(m);
    }
}

/* Blocks that Shoal would quantise differently (no value at the end of the range) are unchanged by
 * rewriting. */
static void test_gguf_foreign_blocks(void **state) {
    (void)state;
    struct error err;
    struct model_config c = preset_config("tiny-qwen3");
    struct model *m = model_create(&c, "blocks");
    dir_make(tmp_path("again"), &err);
    const enum tensor_type types[] = {TENSOR_Q8_0, TENSOR_Q4_0};
    for (int n = 0; n < 2; n++) {
        assert_int_equal(model_write_gguf(m, tmp_path("blocks.gguf"), types[n], &err), OK);
        struct buf file = file_read_all(tmp_path("blocks.gguf"));
        size_t row = tensor_row_bytes(types[n], 32);
        uint8_t first[64];
        tensor_from_f32(types[n], m->embed.data, first, 32);
        uint8_t *block = memmem(file.data, file.len, first, row);
        assert_non_null(block);
        for (int i = 0; i < 300; i++)
            for (size_t j = 2; j < row; j++)
                block[(size_t)i * row + j] = n == 0 ? (uint8_t)(i % 50 + 3) : 0x7A;
        file_write_unsynced(tmp_path("blocks.gguf"), file.data, file.len);
        struct model *reread = open_ok(tmp_path("blocks.gguf"), NUMERIC_EXACT);
        assert_int_equal(model_write_gguf(reread, tmp_path("again/blocks.gguf"), types[n], &err),
                         OK);
        assert_files_equal(tmp_path("blocks.gguf"), tmp_path("again/blocks.gguf"));
        model_close(reread);
        buf_release(&file);
    }
    model_close(m);
}

static void test_hf_round_trips(void **state) {
    (void)state;
    static const char *const files[] = {"config.json", "model.safetensors", "tokenizer.json",
                                        "tokenizer_config.json"};
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_F16, TENSOR_BF16};
    struct error err;
    static const char *const shape_names[] = {"tiny-llama", "tiny-qwen3", "tiny-qwen2",
                                              "tiny-gemma3", "tiny-gpt-neo"};
    for (int n = 0; n < 3 * (int)ARRAY_LEN(shape_names); n++) {
        struct model_config c = preset_config(shape_names[n / 3]);
        struct model *m = model_create(&c, "hf");
        assert_int_equal(model_write_hf(m, tmp_path("hf"), types[n % 3], &err), OK);
        struct model *reread = open_ok(tmp_path("hf/"), NUMERIC_EXACT);
        assert_string_equal(reread->name, "hf");
        assert_configs_equal(&c, &reread->config);
        assert_weights_equal(m, reread, types[n % 3]);
        assert_tokenizers_equal(m->tok, reread->tok);
        assert_non_null(strstr(reread->chat_template, "<|im_start|>"));
        reread->chat_template = arena_strdup(&reread->arena, "{{ bos_token }}'\n'");
        assert_int_equal(model_write_hf(m, tmp_path("hf2"), types[n % 3], &err), OK);
        for (size_t f = 0; f < ARRAY_LEN(files); f++) {
            char a[64], b[64];
            snprintf(a, sizeof(a), "hf/%s", files[f]);
            snprintf(b, sizeof(b), "hf2/%s", files[f]);
            assert_files_equal(tmp_path(a), tmp_path(b));
        }
        assert_int_equal(model_write_hf(reread, tmp_path("hf3"), types[n % 3], &err), OK);
        assert_files_equal(tmp_path("hf/model.safetensors"), tmp_path("hf3/model.safetensors"));
        struct model *third = open_ok(tmp_path("hf3"), NUMERIC_FAST);
        assert_string_equal(third->chat_template, "{{ bos_token }}'\n'");
        assert_string_equal(model_hash(reread, &err), model_hash(third, &err));
        model_close(third);
        model_close(reread);
        model_close(m);
    }
    struct model_config c = preset_config("tiny-llama");
    struct model *m = model_create(&c, "hf");
    assert_int_equal(model_write_hf(m, tmp_path("hf"), TENSOR_Q4_0, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "GGUF"));
    model_close(m);
}

/* Writes a small model to tmp/NAME and returns it. */
static struct model *hf_model_create(const char *name, bool tied) {
    struct error err;
    struct model_config c = smallest_config("llama", tied);
    struct model *m = model_create(&c, name);
    assert_int_equal(model_write_hf(m, tmp_path(name), TENSOR_F32, &err), OK);
    return m;
}

static void test_hf_shards(void **state) {
    (void)state;
    struct error err;
    struct model *m = hf_model_create("shards", false);
    char *single = xstrdup(tmp_path("shards/model.safetensors"));
    char *index = xstrdup(tmp_path("shards/model.safetensors.index.json"));
    struct safetensors st;
    assert_int_equal(safetensors_open(&st, single, &err), OK);
    int half = st.n_tensors / 2;
    safetensors_write(tmp_path("shards/one.safetensors"), st.tensors, half, NULL, &err);
    safetensors_write(tmp_path("shards/two.safetensors"), st.tensors + half, st.n_tensors - half,
                      NULL, &err);
    json_t *map = json_object();
    for (int i = 0; i < st.n_tensors; i++)
        json_object_set_new(map, st.tensors[i].name,
                            json_string(i < half ? "one.safetensors" : "two.safetensors"));
    json_t *root = json_pack("{s:{s:i}, s:o}", "metadata", "total_size", 1, "weight_map", map);
    assert_int_equal(json_dump_file(root, index, 0), 0);
    unlink(single);
    struct model *reread = open_ok(tmp_path("shards"), NUMERIC_EXACT);
    assert_weights_equal(m, reread, TENSOR_F32);
    assert_int_equal(reread->n_maps, 3);
    model_close(reread);
    struct model *mapped = model_open_for_writing(tmp_path("shards"), &err);
    assert_non_null(mapped);
    assert_weights_equal(m, mapped, TENSOR_F32);
    model_close(mapped);

    json_object_set_new(map, "model.norm.weight", json_string("one.safetensors"));
    json_dump_file(root, index, 0);
    assert_refused(tmp_path("shards"), "'model.norm.weight' is not in 'one.safetensors'");
    json_object_set_new(map, "model.norm.weight", json_string("../shards/two.safetensors"));
    json_dump_file(root, index, 0);
    assert_refused(tmp_path("shards"), "in no file of this directory");
    json_object_set_new(map, "model.norm.weight", json_string("three.safetensors"));
    json_dump_file(root, index, 0);
    assert_refused(tmp_path("shards"), "three.safetensors");
    json_object_set_new(map, "model.norm.weight", json_string("two.safetensors"));
    json_dump_file(root, index, 0);
    safetensors_write(tmp_path("shards/two.safetensors"), st.tensors + half - 1,
                      st.n_tensors - half + 1, NULL, &err);
    assert_refused(tmp_path("shards"), "is in two files");
    safetensors_close(&st);
    json_decref(root);
    free(single);
    free(index);
    model_close(m);
}

/* Writes `root` as DIR/config.json, with one field set; `value` is JSON, NULL removes the field. */
static void config_write_changed(const char *dir, const json_t *root, const char *key,
                                 const char *value) {
    json_t *changed = json_deep_copy(root);
    char *path = path_join(tmp_path(dir), "config.json");
    if (value)
        json_object_set_new(changed, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(changed, key);
    assert_int_equal(json_dump_file(changed, path, 0), 0);
    json_decref(changed);
    free(path);
}

static json_t *config_read(const char *dir) {
    struct error err;
    char *path = path_join(tmp_path(dir), "config.json");
    json_t *root = json_parse_file(path, &err);
    assert_non_null(root);
    free(path);
    return root;
}

static void test_hf_config(void **state) {
    (void)state;
    static const struct {
        const char *key, *value, *message;
    } refused[] = {
        {"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8}",
         "'rope_scaling'|'low_freq_factor' is missing"},
        {"rope_scaling", "{\"factor\":8}", "'rope_scaling'"},
        {"rope_scaling", "[]", "'rope_scaling'"},
        {"rope_scaling", "{\"type\":\"dynamic\",\"factor\":2}", "'rope_scaling'|dynamic"},
        {"rope_scaling", "{\"type\":\"longrope\",\"factor\":2}", "'rope_scaling'|longrope"},
        {"rope_scaling", "{\"type\":\"linear\",\"factor\":0.5}",
         "factor 0.5 is not a number of at least 1"},
        {"rope_scaling", "{\"type\":\"linear\",\"factor\":\"x\"}", "'factor' is not a number"},
        {"rope_scaling", "{\"type\":\"yarn\",\"factor\":2,\"mscale\":1}", "'rope_scaling'|mscale"},
        {"rope_scaling", "{\"type\":\"yarn\",\"factor\":2,\"beta_fast\":16}", "beta_fast"},
        {"rope_scaling", "{\"type\":\"yarn\",\"factor\":2,\"truncate\":false}", "truncate"},
        {"rope_scaling",
         "{\"type\":\"llama3\",\"factor\":2,\"low_freq_factor\":4,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":16}",
         "are not positive and ascending"},
        {"rope_parameters", "{\"rope_type\":\"yarn\"}", "'rope_parameters'|'factor' is missing"},
        {"rope_parameters", "{\"full_attention\":{}}", "'rope_parameters'"},
        {"attention_bias", "true", "k_proj.bias' is missing"},
        {"attention_bias", "1", "'attention_bias' is neither"},
        {"mlp_bias", "1", "'mlp_bias'"},
        {"attn_logit_softcapping", "50.0", "'attn_logit_softcapping' is 50.0"},
        {"use_bidirectional_attention", "true", "'use_bidirectional_attention'"},
        {"hidden_act", "\"gelu\"", "'hidden_act' is \"gelu\""},
        {"quantization_config", "{\"quant_method\":\"gptq\"}", "'quantization_config'"},
        {"use_sliding_window", "true", "'use_sliding_window'"},
        {"layer_types", "[\"sliding_attention\"]", "'layer_types'"},
        {"partial_rotary_factor", "0.5", "'partial_rotary_factor'"},
        {"model_type", "\"gemma2\"", "'gemma2'|llama, qwen2, qwen3, gemma3, gpt_neo"},
        {"model_type", "null", "'model_type' is missing"},
        {"hidden_size", NULL, "'hidden_size' is missing"},
        {"hidden_size", "0", "'hidden_size'"},
        {"hidden_size", "8.5", "'hidden_size'"},
        {"num_hidden_layers", "-1", "'num_hidden_layers'"},
        {"num_hidden_layers", "4294967297", "'num_hidden_layers'"},
        {"num_hidden_layers", "100000", "number of layers"},
        {"num_attention_heads", "3", "q_proj.weight' is f32 [8, 8], expected [12, 8]"},
        {"num_key_value_heads", "5", "2 heads cannot share 5"},
        {"head_dim", "3", "odd"},
        {"rope_theta", "-1", "rope theta"},
        {"rope_theta", "\"big\"", "'rope_theta'"},
        {"rms_norm_eps", "0", "epsilon"},
        {"vocab_size", "301", "embed_tokens|[300, 8]|[301, 8]"},
        {"tie_word_embeddings", "3", "'tie_word_embeddings'"},
    };
    struct model *m = hf_model_create("conf", true);
    json_t *config = config_read("conf");
    for (size_t i = 0; i < ARRAY_LEN(refused); i++) {
        config_write_changed("conf", config, refused[i].key, refused[i].value);
        assert_refused(tmp_path("conf"), refused[i].message);
    }
    json_t *headless = json_deep_copy(config);
    json_object_del(headless, "head_dim");
    config_write_changed("conf", headless, "num_attention_heads", "3");
    assert_refused(tmp_path("conf"), "'hidden_size' 8 is not a multiple");
    json_decref(headless);
    static const struct {
        const char *key, *value;
    } accepted[] = {{"rope_scaling", "null"},
                    {"rope_scaling", "{\"rope_type\":\"default\"}"},
                    {"rope_parameters", "{\"rope_theta\":10000.0}"},
                    {"attention_bias", "false"},
                    {"rope_theta", "10000"},
                    {"layer_types", "[\"full_attention\"]"},
                    {"head_dim", "null"},
                    {"partial_rotary_factor", "1"},
                    {"initializer_range", "0.02"},
                    {"use_cache", "true"}};
    for (size_t i = 0; i < ARRAY_LEN(accepted); i++) {
        config_write_changed("conf", config, accepted[i].key, accepted[i].value);
        struct model *reread = open_ok(tmp_path("conf"), NUMERIC_EXACT);
        assert_configs_equal(&m->config, &reread->config);
        model_close(reread);
    }
    json_decref(config);
    model_close(m);
}

/* Fields that only the configurations of Gemma and GPT-Neo have. */
static void test_hf_windows(void **state) {
    (void)state;
    static const struct {
        const char *shape, *key, *value, *message;
    } refused[] = {
        {"tiny-gemma3", "layer_types", "[\"full_attention\"]", "not a list of 3 layers"},
        {"tiny-gemma3", "layer_types", "[\"full_attention\",\"full_attention\",\"chunked\"]",
         "'layer_types'|chunked"},
        {"tiny-gemma3", "sliding_window", "0", "'sliding_window'"},
        {"tiny-gemma3", "rope_local_base_freq", "0.0", "local rope theta 0 is not"},
        {"tiny-gemma3", "rope_local_base_freq", "-1.0", "local rope theta"},
        {"tiny-gemma3", "query_pre_attn_scalar", "-1.0", "pre-attention"},
        {"tiny-gemma3", "final_logit_softcapping", "30.0", "'final_logit_softcapping'"},
        {"tiny-gemma3", "hidden_activation", "\"gelu\"", "'hidden_activation'"},
        {"tiny-gpt-neo", "attention_layers", "[\"global\",7]", "'attention_layers'"},
        {"tiny-gpt-neo", "attention_layers", "\"global\"", "not a list of 2 layers"},
        {"tiny-gpt-neo", "activation_function", "\"relu\"", "'activation_function'"},
        {"tiny-gpt-neo", "num_layers", NULL, "'num_layers' is missing"},
        {"tiny-gpt-neo", "max_position_embeddings", "63", "wpe.weight|[64, 32]|[63, 32]"},
    };
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(refused); i++) {
        struct model_config c = preset_config(refused[i].shape);
        struct model *m = model_create(&c, "windows");
        assert_int_equal(model_write_hf(m, tmp_path("windows"), TENSOR_F32, &err), OK);
        json_t *config = config_read("windows");
        config_write_changed("windows", config, refused[i].key, refused[i].value);
        assert_refused(tmp_path("windows"), refused[i].message);
        json_decref(config);
        model_close(m);
    }
}

/* Appends a BOOL tensor of 16 elements to DIR/model.safetensors. */
static void mask_add(const char *dir, const char *name) {
    char *path = path_join(tmp_path(dir), "model.safetensors");
    struct buf file = file_read_all(path), out = {0};
    uint64_t len, data;
    memcpy(&len, file.data, sizeof(len));
    data = file.len - sizeof(len) - len;
    json_t *header = json_loadb(file.data + sizeof(len), len, 0, NULL);
    json_object_set_new(header, name,
                        json_pack("{s:s,s:[i,i,i,i],s:[I,I]}", "dtype", "BOOL", "shape", 1, 1, 4, 4,
                                  "data_offsets", (json_int_t)data, (json_int_t)data + 16));
    char *text = json_dumps(header, 0);
    uint64_t new_len = strlen(text);
    buf_add(&out, &new_len, sizeof(new_len));
    buf_puts(&out, text);
    buf_add(&out, file.data + sizeof(len) + len, data);
    buf_add(&out, "\1\0\0\0\1\1\0\0\1\1\1\0\1\1\1\1", 16);
    file_write_unsynced(path, out.data, out.len);
    buf_release(&file);
    buf_release(&out);
    json_decref(header);
    free(text);
    free(path);
}

/* Old GPT-Neo files contain their causal masks; a mask in another place is an unknown tensor. */
static void test_masks(void **state) {
    (void)state;
    struct error err;
    struct model_config c = preset_config("tiny-gpt-neo");
    struct model *m = model_create(&c, "masks");
    assert_int_equal(model_write_hf(m, tmp_path("masks"), TENSOR_F32, &err), OK);
    mask_add("masks", "transformer.h.0.attn.attention.bias");
    struct model *reread = open_ok(tmp_path("masks"), NUMERIC_EXACT);
    assert_weights_equal(m, reread, TENSOR_F32);
    model_close(reread);
    mask_add("masks", "transformer.h.0.attn.mask");
    assert_refused(tmp_path("masks"), "'transformer.h.0.attn.mask' is unknown");
    model_close(m);
}

/* Values of tokenizer_config.json, generation_config.json and chat_template.jinja in addition to
 * the tokenizer. */
static void test_hf_tokenizer_config(void **state) {
    (void)state;
    struct model *m = hf_model_create("tokconf", true);
    const struct tokenizer_spec *s = tokenizer_get_spec(m->tok);
    char config[512];
    snprintf(config, sizeof(config),
             "{\"bos_token\":null,\"eos_token\":{\"content\":\"%s\"},\"chat_template\":["
             "{\"name\":\"tool\",\"template\":\"x\"},{\"name\":\"default\",\"template\":\"y\"}]}",
             s->pieces[s->bos >= 0 ? s->bos : s->eos]);
    file_write_unsynced(tmp_path("tokconf/tokenizer_config.json"), config, strlen(config));
    struct model *reread = open_ok(tmp_path("tokconf"), NUMERIC_EXACT);
    assert_int_equal(tokenizer_bos(reread->tok), -1);
    assert_int_equal(tokenizer_eos(reread->tok), s->bos >= 0 ? s->bos : s->eos);
    assert_string_equal(reread->chat_template, "y");
    model_close(reread);

    file_write_unsynced(tmp_path("tokconf/tokenizer_config.json"), "{}", 2);
    file_write_unsynced(tmp_path("tokconf/generation_config.json"),
                        "{\"eos_token_id\":[5,6],\"bos_token_id\":4}", 39);
    file_write_unsynced(tmp_path("tokconf/chat_template.jinja"), "z\n", 2);
    reread = open_ok(tmp_path("tokconf"), NUMERIC_EXACT);
    assert_int_equal(tokenizer_bos(reread->tok), 4);
    assert_int_equal(tokenizer_eos(reread->tok), 5);
    assert_string_equal(reread->chat_template, "z\n");
    model_close(reread);

    unlink(tmp_path("tokconf/tokenizer.json"));
    reread = open_ok(tmp_path("tokconf"), NUMERIC_EXACT);
    assert_null(reread->tok);
    model_close(reread);
    model_close(m);
}

/* The error names every invalid tensor: one missing, one unknown, one of the wrong shape. */
static void test_errors_name_every_tensor(void **state) {
    (void)state;
    struct error err;
    struct model *m = hf_model_create("strict", false);
    char *path = xstrdup(tmp_path("strict/model.safetensors"));
    struct safetensors st;
    assert_int_equal(safetensors_open(&st, path, &err), OK);
    struct tensor_info *t = xcalloc((size_t)st.n_tensors, sizeof(*t));
    memcpy(t, st.tensors, sizeof(*t) * (size_t)st.n_tensors);
    for (int i = 0; i < st.n_tensors; i++) {
        if (strcmp(t[i].name, "model.norm.weight") == 0)
            t[i].name = (char *)(uintptr_t) "model.norm.bias";
        if (strstr(t[i].name, "k_proj")) {
            t[i].dims[0] = 8;
            t[i].dims[1] = 4;
        }
    }
    assert_int_equal(safetensors_write(path, t, st.n_tensors, NULL, &err), OK);
    assert_refused(
        tmp_path("strict"),
        "3 offending tensors|'model.norm.weight' is missing|'model.norm.bias' is unknown|"
        "k_proj.weight' is f32 [8, 4], expected [4, 8]");
    json_t *config = config_read("strict");
    config_write_changed("strict", config, "num_hidden_layers", "9");
    json_decref(config);
    assert_refused(tmp_path("strict"), "75 offending tensors|and 55 more");
    free(t);
    safetensors_close(&st);
    free(path);
    model_close(m);
}

/* A tied model may repeat its embedding as the head, and old versions saved the rotary
 * frequencies. */
static void test_harmless_extras(void **state) {
    (void)state;
    struct error err;
    struct model *m = hf_model_create("extra", true);
    char *path = xstrdup(tmp_path("extra/model.safetensors"));
    struct safetensors st;
    assert_int_equal(safetensors_open(&st, path, &err), OK);
    int n = st.n_tensors;
    struct tensor_info *t = xcalloc((size_t)n + 2, sizeof(*t));
    memcpy(t, st.tensors, sizeof(*t) * (size_t)n);
    t[n] = *safetensors_find(&st, "model.embed_tokens.weight");
    t[n].name = (char *)(uintptr_t) "lm_head.weight";
    t[n + 1] = *safetensors_find(&st, "model.norm.weight");
    t[n + 1].name = (char *)(uintptr_t) "model.layers.0.self_attn.rotary_emb.inv_freq";
    assert_int_equal(safetensors_write(path, t, n + 2, NULL, &err), OK);
    struct model *reread = open_ok(tmp_path("extra"), NUMERIC_EXACT);
    assert_weights_equal(m, reread, TENSOR_F32);
    model_close(reread);
    float *changed = xmalloc(t[n].size);
    memcpy(changed, t[n].data, t[n].size);
    changed[5] += 1.0f;
    t[n].data = changed;
    assert_int_equal(safetensors_write(path, t, n + 2, NULL, &err), OK);
    assert_refused(tmp_path("extra"), "'lm_head.weight' differs");
    free(changed);
    free(t);
    safetensors_close(&st);
    free(path);
    model_close(m);
}

static void buf_put(struct buf *b, const void *p, size_t n) {
    buf_add(b, p, n);
}
static void put_u32(struct buf *b, uint32_t v) {
    buf_put(b, &v, 4);
}
static void put_u64(struct buf *b, uint64_t v) {
    buf_put(b, &v, 8);
}
static void put_str(struct buf *b, const char *s) {
    put_u64(b, strlen(s));
    buf_put(b, s, strlen(s));
}
static void put_header(struct buf *b, uint32_t version, uint64_t tensors, uint64_t kvs) {
    buf_put(b, "GGUF", 4);
    put_u32(b, version);
    put_u64(b, tensors);
    put_u64(b, kvs);
}
static void put_tensor(struct buf *b, const char *name, uint64_t k, uint64_t n, uint32_t type,
                       uint64_t offset) {
    put_str(b, name);
    put_u32(b, 2);
    put_u64(b, k);
    put_u64(b, n);
    put_u32(b, type);
    put_u64(b, offset);
}

/* Pads to the data section, adds `data` zero bytes and expects an error. */
static void assert_gguf_refused(struct buf *b, size_t data, const char *message) {
    static const char zeros[4096];
    assert_true(data <= 2048);
    buf_put(b, zeros, (32 - b->len % 32) % 32 + data);
    file_write_unsynced(tmp_path("lie.gguf"), b->data, b->len);
    assert_refused(tmp_path("lie.gguf"), message);
    buf_release(b);
}

static void test_gguf_invalid_metadata(void **state) {
    (void)state;
    struct buf b = {0};
    put_header(&b, 3, (uint64_t)1 << 60, 0), assert_gguf_refused(&b, 64, "tensors do not fit");
    put_header(&b, 3, 0, (uint64_t)1 << 60),
        assert_gguf_refused(&b, 64, "metadata entries do not fit");
    put_header(&b, 1, 0, 0), assert_gguf_refused(&b, 0, "version 1");
    put_header(&b, 4, 0, 0), assert_gguf_refused(&b, 0, "version 4");
    put_header(&b, 3u << 24, 0, 0), assert_gguf_refused(&b, 0, "little-endian");
    put_header(&b, 3, 0, 0), assert_gguf_refused(&b, 0, "'general.architecture' is missing");
    static const uint64_t lengths[] = {(uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7, 1000, 0};
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        put_header(&b, 3, 0, 1), put_u64(&b, lengths[i]),
            assert_gguf_refused(&b, 100, "key of impossible length");
        if (lengths[i] == 0) continue;
        put_header(&b, 3, 0, 1), put_str(&b, "a"), put_u32(&b, 8), put_u64(&b, lengths[i]);
        assert_gguf_refused(&b, 100, "metadata 'a' is cut off");
        /* 9: arrays of arrays, 13: not a type */
        for (uint32_t element = 0; element < 14; element++) {
            put_header(&b, 3, 0, 1), put_str(&b, "a"), put_u32(&b, 9), put_u32(&b, element),
                put_u64(&b, lengths[i]);
            assert_gguf_refused(&b, 100, "metadata 'a' is cut off");
        }
    }
    put_header(&b, 3, 0, 1), put_str(&b, "a"), put_u32(&b, 13),
        assert_gguf_refused(&b, 100, "metadata 'a'");
    put_header(&b, 3, 0, 2);
    for (int i = 0; i < 2; i++) put_str(&b, "twice"), put_u32(&b, 4), put_u32(&b, 1);
    assert_gguf_refused(&b, 0, "'twice' appears twice");
    static const uint32_t alignments[] = {0, 1, 33, 1u << 31};
    for (size_t i = 0; i < ARRAY_LEN(alignments); i++) {
        put_header(&b, 3, 0, 1), put_str(&b, "general.alignment"), put_u32(&b, 4),
            put_u32(&b, alignments[i]);
        assert_gguf_refused(&b, 0, "'general.alignment'");
    }
    put_header(&b, 3, 0, 1), put_str(&b, "general.type"), put_u32(&b, 8), put_str(&b, "adapter");
    assert_gguf_refused(&b, 0, "'adapter', not a model");
    put_header(&b, 3, 0, 1), put_str(&b, "split.count"), put_u32(&b, 2), buf_put(&b, "\2\0", 2);
    assert_gguf_refused(&b, 0, "split");
}

static void test_gguf_invalid_tensors(void **state) {
    (void)state;
    struct buf b = {0};
    put_header(&b, 3, 1, 0), put_tensor(&b, "t", 4, 4, 0, 32),
        assert_gguf_refused(&b, 128, "'t' begins at 32");
    put_header(&b, 3, 1, 0), put_tensor(&b, "t", 4, 4, 0, UINT64_MAX - 31),
        assert_gguf_refused(&b, 64, "'t' begins at");
    put_header(&b, 3, 2, 0), put_tensor(&b, "t", 4, 4, 0, 0), put_tensor(&b, "u", 4, 4, 0, 32);
    assert_gguf_refused(&b, 128, "'u' begins at 32, the one before it ends at 64");
    put_header(&b, 3, 2, 0), put_tensor(&b, "t", 4, 4, 0, 0), put_tensor(&b, "t", 4, 4, 0, 64);
    assert_gguf_refused(&b, 128, "'t' appears twice");
    put_header(&b, 3, 1, 0), put_tensor(&b, "t", 4, 4, 0, 0),
        assert_gguf_refused(&b, 32, "'t' is outside the file");
    put_header(&b, 3, 1, 0), put_tensor(&b, "t", 4, 4, 0, 0),
        assert_gguf_refused(&b, 128, "64 bytes follow");
    static const uint64_t dims[][2] = {{(uint64_t)1 << 32, (uint64_t)1 << 32},
                                       {UINT64_MAX, 2},
                                       {0, 5},
                                       {5, 0},
                                       {(uint64_t)1 << 63, 2},
                                       {1000000, 1000000}};
    for (size_t i = 0; i < ARRAY_LEN(dims); i++) {
        put_header(&b, 3, 1, 0), put_tensor(&b, "t", dims[i][0], dims[i][1], 0, 0);
        assert_gguf_refused(&b, 64, "'t' has dimensions that do not fit");
    }
    put_header(&b, 3, 1, 0), put_tensor(&b, "t", 16, 4, 8, 0),
        assert_gguf_refused(&b, 64, "not a multiple of 32");
    put_header(&b, 3, 2, 0), put_tensor(&b, "t", 256, 1, 10, 0),
        put_tensor(&b, "u", 32, 1, 99, 160);
    assert_gguf_refused(&b, 64, "2 offending tensors|'t' is q2_k|'u' is type 99|f32, f16, bf16");
    put_header(&b, 3, 1, 0), put_str(&b, "t"), put_u32(&b, 0),
        assert_gguf_refused(&b, 100, "'t' has 0 dimensions");
    put_header(&b, 3, 1, 0), put_str(&b, "t"), put_u32(&b, 5),
        assert_gguf_refused(&b, 100, "'t' has 5 dimensions");
    put_header(&b, 3, 1, 0), put_u64(&b, (uint64_t)1 << 63),
        assert_gguf_refused(&b, 100, "tensor table is cut off");
    put_header(&b, 3, 1, 0), put_u64(&b, 3), buf_put(&b, "a\0b", 3),
        assert_gguf_refused(&b, 100, "impossible name");
}

/* Replaces one metadata value of a written file by another of the same length. */
static void assert_edited_gguf_refused(const char *from, const char *to, size_t n,
                                       const char *message) {
    struct buf file = file_read_all(tmp_path("edit.gguf"));
    char *match = memmem(file.data, file.len, from, n);
    assert_non_null(match);
    memcpy(match, to, n);
    file_write_unsynced(tmp_path("edited.gguf"), file.data, file.len);
    assert_refused(tmp_path("edited.gguf"), message);
    buf_release(&file);
}

static void test_gguf_wrong_keys(void **state) {
    (void)state;
    struct error err;
    struct model_config c = smallest_config("llama", false);
    struct model *m = model_create(&c, "edit");
    assert_int_equal(model_write_gguf(m, tmp_path("edit.gguf"), TENSOR_F32, &err), OK);
    assert_edited_gguf_refused("llama.block_count", "llama.block_kount", 17,
                               "'llama.block_count' is missing");
    assert_edited_gguf_refused("llama.block_count\4\0\0\0\1", "llama.block_count\4\0\0\0\2", 22,
                               "'blk.1.attn_norm.weight' is missing");
    assert_edited_gguf_refused("llama.block_count\4\0\0\0\1", "llama.block_count\6\0\0\0\1", 22,
                               "not a whole number");
    assert_edited_gguf_refused("rope.dimension_count\4\0\0\0\4", "rope.dimension_count\4\0\0\0\2",
                               25, "2 of 4 dimensions");
    assert_edited_gguf_refused("value_length\4\0\0\0\4", "value_length\4\0\0\0\6", 17,
                               "values of width 6");
    assert_edited_gguf_refused("vocab_size\4\0\0\0\54", "vocab_size\4\0\0\0\55", 15,
                               "'llama.vocab_size' is 301");
    assert_edited_gguf_refused("\15\0\0\0\0\0\0\0output.weight", "\15\0\0\0\0\0\0\0outpux.weight",
                               21, "'outpux.weight' is unknown");
    assert_edited_gguf_refused("blk.0.attn_q.weight", "blk.7.attn_q.weight", 19,
                               "'blk.7.attn_q.weight' is unknown|is missing");
    assert_edited_gguf_refused("architecture\10\0\0\0\5\0\0\0\0\0\0\0llama",
                               "architecture\10\0\0\0\5\0\0\0\0\0\0\0gemma", 29, "'gemma'");
    model_close(m);
}

/* Every length except the full one; the file is truncated step by step. */
static void test_gguf_truncated(void **state) {
    (void)state;
    struct error err;
    struct model_config c = smallest_config("qwen3", false);
    struct model *m = model_create(&c, "cut");
    const char *path = tmp_path("cut.gguf");
    assert_int_equal(model_write_gguf(m, path, TENSOR_F32, &err), OK);
    struct buf file = file_read_all(path);
    for (size_t len = file.len - 1; len < file.len; len--) {
        assert_int_equal(truncate(path, (off_t)len), 0);
        struct model *cut = model_open(path, NUMERIC_EXACT, &err);
        if (cut) fail_msg("opened at %zu of %zu bytes", len, file.len);
    }
    buf_release(&file);
    model_close(m);
}

/* Changes each byte before the data in one of three ways: opening the file may fail, but must not
 * crash. */
static void gguf_change_bytes(const struct model_config *c) {
    struct error err;
    struct model *m = model_create(c, "bad");
    const char *path = tmp_path("bad.gguf");
    assert_int_equal(model_write_gguf(m, path, TENSOR_F32, &err), OK);
    struct buf file = file_read_all(path);
    size_t header = (size_t)((const char *)(const void *)gguf_weight_data(&file, m, 0) - file.data);
    FILE *f = fopen(path, "r+b");
    setbuf(f, NULL);
    static const uint8_t masks[] = {0x01, 0x80, 0xFF};
    int opened = 0;
    for (size_t i = 0; i < header; i++) {
        uint8_t wrong = (uint8_t)file.data[i] ^ masks[i % 3];
        fseek(f, (long)i, SEEK_SET), fwrite(&wrong, 1, 1, f);
        struct model *bad = model_open(path, NUMERIC_EXACT, &err);
        if (bad) opened++;
        model_close(bad);
        fseek(f, (long)i, SEEK_SET), fwrite(&file.data[i], 1, 1, f);
    }
    fclose(f);
    assert_true(opened < (int)header);
    model_close(open_ok(path, NUMERIC_EXACT));
    buf_release(&file);
    model_close(m);
}

static void test_gguf_corrupted(void **state) {
    (void)state;
    struct model_config llama = smallest_config("llama", true),
                        gemma = preset_config("tiny-gemma3");
    llama.biased = 1u << PROJ_Q;
    llama.rope_scaling = (struct rope_scaling){ROPE_LLAMA3, 8.0f, 1.0f, 4.0f, 16};
    gguf_change_bytes(&llama);
    gguf_change_bytes(&gemma);
}

/* A safetensors file of this header and `data` zero bytes. */
static void assert_safetensors_refused(const char *header, size_t data, const char *message) {
    static const char zeros[256];
    struct buf b = {0};
    struct error err = {0};
    struct safetensors st;
    put_str(&b, header);
    buf_put(&b, zeros, data);
    file_write_unsynced(tmp_path("lie.safetensors"), b.data, b.len);
    if (safetensors_open(&st, tmp_path("lie.safetensors"), &err) == OK)
        fail_msg("opened: %s", header);
    if (!strstr(err.text, message)) fail_msg("no '%s' in: %s", message, err.text);
    buf_release(&b);
}

#define T(dtype, shape, offsets)                                                                   \
    "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_safetensors_invalid(void **state) {
    (void)state;
    struct error err;
    struct safetensors st;
    static const uint64_t lengths[] = {(uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7, 100};
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        struct buf b = {0};
        put_u64(&b, lengths[i]), buf_put(&b, "{}", 2);
        file_write_unsynced(tmp_path("lie.safetensors"), b.data, b.len);
        assert_int_equal(safetensors_open(&st, tmp_path("lie.safetensors"), &err), ERR_FORMAT);
        buf_release(&b);
    }
    assert_safetensors_refused("[]", 0, "not a JSON object");
    assert_safetensors_refused("{\"a\":1}", 0, "'a' is not described");
    assert_safetensors_refused("{\"__metadata__\":{\"a\":1}}", 0, "'a' is not a string");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[2]", "[0,8]") "}", 4, "outside the file");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[2]", "[0,4]") "}", 4, "need 8");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[2]", "[0,8]") "}", 12, "4 bytes follow");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[4,8]") "}", 8, "hole");
    assert_safetensors_refused(
        "{\"a\":" T("\"F32\"", "[2]", "[0,8]") ",\"b\":" T("\"F32\"", "[2]", "[4,12]") "}", 12,
        "overlaps");
    assert_safetensors_refused(
        "{\"a\":" T("\"F32\"", "[1]", "[0,4]") ",\"a\":" T("\"F32\"", "[1]", "[0,4]") "}", 4, "");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[8,4]") "}", 8, "outside the file");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[-4,0]") "}", 8, "outside the file");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[0,9223372036854775807]") "}", 8,
                               "outside the file");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[-1]", "[0,4]") "}", 4, "impossible shape");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[4294967296,4294967296]", "[0,0]") "}", 0,
                               "impossible shape");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[4611686018427387905]", "[0,4]") "}", 4,
                               "impossible shape");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1,1,1,1,1]", "[0,4]") "}", 4, "at most 4");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1.0]", "[0,4]") "}", 4, "impossible shape");
    assert_safetensors_refused("{\"a\":" T("\"I64\"", "[1]", "[0,8]") "}", 8, "'I64'");
    assert_safetensors_refused("{\"a\":" T("7", "[1]", "[0,8]") "}", 8, "no 'dtype'");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[0]") "}", 4, "'data_offsets'");
    assert_safetensors_refused("{\"a\":" T("\"F32\"", "[1]", "[\"0\",4]") "}", 4, "'data_offsets'");
}

/* Scalars, empty tensors, four dimensions, metadata, names out of order; written twice the same;
 * and every truncation. */
static void test_safetensors_round_trip(void **state) {
    (void)state;
    struct error err;
    static const float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct tensor_info t[] = {
        {.name = (char *)(uintptr_t) "z \"quoted\" ü",
         .type = TENSOR_F32,
         .n_dims = 0,
         .data = data,
         .size = 4},
        {.name = (char *)(uintptr_t) "empty",
         .type = TENSOR_F16,
         .n_dims = 2,
         .dims = {0, 3},
         .data = data,
         .size = 0},
        {.name = (char *)(uintptr_t) "a",
         .type = TENSOR_BF16,
         .n_dims = 4,
         .dims = {1, 2, 2, 1},
         .data = data,
         .size = 8},
    };
    json_t *metadata = json_pack("{s:s, s:s}", "z", "last", "format", "pt");
    const char *path = tmp_path("round.safetensors");
    assert_int_equal(safetensors_write(path, t, 3, metadata, &err), OK);
    struct safetensors st;
    assert_int_equal(safetensors_open(&st, path, &err), OK);
    assert_int_equal(st.n_tensors, 3);
    for (int i = 0; i < 3; i++) {
        const struct tensor_info *reread = safetensors_find(&st, t[i].name);
        assert_non_null(reread);
        assert_int_equal(reread->type, t[i].type);
        assert_int_equal(reread->n_dims, t[i].n_dims);
        assert_memory_equal(reread->dims, t[i].dims, sizeof(t[i].dims));
        assert_int_equal(reread->size, t[i].size);
        assert_memory_equal(reread->data, t[i].data, t[i].size);
    }
    assert_null(safetensors_find(&st, "b"));
    assert_true(json_equal(st.metadata, metadata));
    assert_int_equal(
        (size_t)((const uint8_t *)safetensors_find(&st, t[0].name)->data - st.map.data) % 8, 0);
    safetensors_close(&st);
    assert_int_equal(safetensors_write(tmp_path("again.safetensors"), t, 3, metadata, &err), OK);
    assert_files_equal(path, tmp_path("again.safetensors"));
    json_decref(metadata);
    struct buf file = file_read_all(path);
    for (size_t len = file.len - 1; len < file.len; len--) {
        assert_int_equal(truncate(path, (off_t)len), 0);
        assert_true(safetensors_open(&st, path, &err) < 0);
    }
    for (size_t i = 0; i < file.len; i++) {
        file.data[i] ^= 0x11;
        file_write_unsynced(path, file.data, file.len);
        if (safetensors_open(&st, path, &err) == OK) safetensors_close(&st);
        file.data[i] ^= 0x11;
    }
    t[0].type = TENSOR_Q8_0;
    assert_int_equal(safetensors_write(path, t, 1, NULL, &err), ERR_USAGE);
    buf_release(&file);
}

static void test_not_models(void **state) {
    (void)state;
    assert_refused(tmp_path("absent.gguf"), "absent.gguf");
    assert_refused(tmp_dir, "no config.json");
    file_write_unsynced(tmp_path("x.bin"), "", 0), assert_refused(tmp_path("x.bin"), "not a model");
    file_write_unsynced(tmp_path("x.bin"), "PK\3\4....", 8),
        assert_refused(tmp_path("x.bin"), "safetensors");
    file_write_unsynced(tmp_path("x.bin"), "\12\0\0\0\0\0\0\0{       ", 16),
        assert_refused(tmp_path("x.bin"), "directory");
    struct model *m = hf_model_create("pickle", true);
    rename(tmp_path("pickle/model.safetensors"), tmp_path("pickle/pytorch_model.bin"));
    assert_refused(tmp_path("pickle"), "pickle|safetensors");
    unlink(tmp_path("pickle/pytorch_model.bin"));
    assert_refused(tmp_path("pickle"), "no model.safetensors");
    model_close(m);
}

static void file_limit_set(rlim_t limit) {
    struct rlimit r;
    getrlimit(RLIMIT_FSIZE, &r);
    r.rlim_cur = limit == RLIM_INFINITY ? r.rlim_max : limit;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &r), 0);
}

/* After a failure at any point the old file is unchanged and no temporary file is left. */
static void test_failed_writes(void **state) {
    (void)state;
    struct error err;
    void (*old_handler)(int) = signal(SIGXFSZ, SIG_IGN);
    struct model_config c = smallest_config("llama", false);
    struct model *m = model_create(&c, "full");
    const char *dir = tmp_path("full"), *path = tmp_path("full/m.gguf"), *hf = tmp_path("full/hf");
    dir_make(hf, &err);
    assert_int_equal(model_write_gguf(m, path, TENSOR_F32, &err), OK);
    struct buf expected = file_read_all(path);
    file_write_unsynced(path, "old", 3);
    for (size_t limit = 0; limit < expected.len; limit += 1 + expected.len / 50) {
        file_limit_set(limit);
        int gguf = model_write_gguf(m, path, TENSOR_F32, &err);
        int dir_rc = limit < 8192 ? model_write_hf(m, hf, TENSOR_F32, &err) : ERR_IO;
        file_limit_set(RLIM_INFINITY);
        assert_int_equal(gguf, ERR_IO);
        assert_int_equal(dir_rc, ERR_IO);
        struct buf found = file_read_all(path);
        assert_string_equal(found.data, "old");
        buf_release(&found);
        assert_int_equal(tmp_leftovers(dir) + tmp_leftovers(hf), 0);
        assert_false(path_exists(tmp_path("full/hf/config.json")));
    }
    assert_true(model_write_gguf(m, tmp_path("no/such/dir.gguf"), TENSOR_F32, &err) < 0);
    assert_true(model_write_hf(m, path, TENSOR_F32, &err) < 0); /* the path is a file */
    signal(SIGXFSZ, old_handler);
    buf_release(&expected);
    model_close(m);
}

static void put_weights(struct buf *b, const struct model *m, const char *hf_suffix) {
    for (int32_t i = 0; i < weight_count(&m->config); i++) {
        struct weight_info w;
        weight_at(&m->config, i, NAMING_HF, &w);
        size_t n = strlen(w.name), e = strlen(hf_suffix);
        if (n < e || strcmp(w.name + n - e, hf_suffix) != 0) continue;
        int32_t *order =
            w.rope_heads ? rope_rows_to_interleaved(w.rope_heads, m->config.head_dim) : NULL;
        float *scratch = xmalloc(sizeof(float) * (size_t)w.k * 2);
        for (int64_t r = 0; r < w.n; r++) {
            weight_row(m, &w, order ? order[r] : r, TENSOR_F32, scratch, scratch + w.k);
            buf_put(b, scratch + w.k, sizeof(float) * (size_t)w.k);
        }
        free(scratch);
        free(order);
    }
}

static void llama2c_write(const struct model *m, const char *path) {
    static const char *const order[] = {"embed_tokens.weight",
                                        "input_layernorm.weight",
                                        "q_proj.weight",
                                        "k_proj.weight",
                                        "v_proj.weight",
                                        "o_proj.weight",
                                        "post_attention_layernorm.weight",
                                        "gate_proj.weight",
                                        "down_proj.weight",
                                        "up_proj.weight",
                                        "model.norm.weight",
                                        NULL,
                                        "lm_head.weight"};
    const struct model_config *c = &m->config;
    int32_t header[7] = {c->d_model,    c->d_ff,       c->n_layers,
                         c->n_heads,    c->n_kv_heads, c->tied ? c->vocab_size : -c->vocab_size,
                         c->max_seq_len};
    struct buf b = {0};
    buf_put(&b, header, sizeof(header));
    for (size_t i = 0; i < ARRAY_LEN(order); i++) {
        float angle = 0.5f;
        for (int j = 0; !order[i] && j < c->max_seq_len * c->head_dim; j++)
            buf_put(&b, &angle, sizeof(angle));
        if (order[i]) put_weights(&b, m, order[i]);
    }
    file_write_unsynced(path, b.data, b.len);
    buf_release(&b);
}

/* llama2.c's tokenizer file: longest piece, then score, length and bytes of each. */
static void llama2c_tokenizer_write(const char *path, int32_t vocab) {
    struct buf b = {0};
    put_u32(&b, 16);
    for (int32_t i = 0; i < vocab; i++) {
        char piece[16];
        float score = (float)-i;
        if (i < 3)
            snprintf(piece, sizeof(piece), "%s",
                     i == 0   ? "<unk>"
                     : i == 1 ? "\n<s>\n"
                              : "\n</s>\n");
        else if (i < 259)
            snprintf(piece, sizeof(piece), "<0x%02X>", i - 3);
        else
            snprintf(piece, sizeof(piece), "%c%c", 'a' + (i - 259) / 26, 'a' + (i - 259) % 26);
        buf_put(&b, &score, 4);
        put_u32(&b, (uint32_t)strlen(piece));
        buf_put(&b, piece, strlen(piece));
    }
    file_write_unsynced(path, b.data, b.len);
    buf_release(&b);
}

static void assert_llama2c_refused(const char *bin, const char *message) {
    struct error err = {0};
    assert_null(llama2c_open(bin, tmp_path("tok.bin"), NUMERIC_EXACT, &err));
    if (!strstr(err.text, message)) fail_msg("no '%s' in: %s", message, err.text);
}

static void test_llama2c(void **state) {
    (void)state;
    struct error err;
    const char *bin = tmp_path("l2c.bin"), *tok = tmp_path("tok.bin");
    for (int tied = 0; tied < 2; tied++) {
        struct model_config c = preset_config("tiny-llama");
        c.tied = tied;
        struct model *m = model_create(&c, "l2c");
        llama2c_write(m, bin);
        llama2c_tokenizer_write(tok, 300);
        struct model *reread = llama2c_open(bin, tok, NUMERIC_EXACT, &err);
        if (!reread) fail_msg("%s", err.text);
        assert_configs_equal(&c, &reread->config);
        assert_weights_equal(m, reread, TENSOR_F32);
        assert_int_equal(tokenizer_vocab_size(reread->tok), 300);
        model_close(reread);
        model_close(m);
    }
    struct buf file = file_read_all(bin);
    for (size_t len = 0; len < 40; len++) {
        assert_int_equal(truncate(bin, (off_t)(len < 20 ? file.len - 1 - len : 39 - len)), 0);
        assert_llama2c_refused(bin, "l2c.bin");
    }
    buf_add(&file, "", 1);
    file_write_unsynced(bin, file.data, file.len);
    assert_llama2c_refused(bin, "its header needs a file of");
    static const int32_t wrong_values[][2] = {
        {0, -1}, {0, 0},  {0, INT32_MAX}, {1, 1 << 19}, {2, 4096},    {3, 5}, {3, 0},
        {4, 3},  {4, -2}, {5, INT32_MIN}, {5, 0},       {6, 1 << 24}, {6, -1}};
    for (size_t i = 0; i < ARRAY_LEN(wrong_values); i++) {
        struct buf changed = file_read_all(bin);
        memcpy(changed.data + 4 * wrong_values[i][0], &wrong_values[i][1], 4);
        file_write_unsynced(tmp_path("lie.bin"), changed.data, changed.len - 1);
        assert_llama2c_refused(tmp_path("lie.bin"), "lie.bin");
        buf_release(&changed);
    }
    buf_release(&file);
}

static void test_real_gguf(void **state) {
    (void)state;
    char *path = shared_path("data/gguf/llama-2-tiny-random.gguf");
    if (!path) skip();
    struct error err;
    struct model *m = open_ok(path, NUMERIC_EXACT);
    assert_string_equal(m->name, "llama-2-tiny-random");
    assert_int_equal(m->config.head_dim, 4);
    assert_int_equal(m->config.vocab_size, 32000);
    assert_false(m->config.tied);
    assert_int_equal(tokenizer_bos(m->tok), 1);
    assert_true(tokenizer_add_bos(m->tok));
    int len;
    assert_memory_equal(tokenizer_id_to_piece(m->tok, 2, &len), "</s>", 4);
    assert_int_equal(model_write_gguf(m, tmp_path("real.gguf"), TENSOR_F16, &err), OK);
    struct model *reread = open_ok(tmp_path("real.gguf"), NUMERIC_EXACT);
    assert_weights_equal(m, reread, TENSOR_F16);
    assert_tokenizers_equal(m->tok, reread->tok);
    model_close(reread);
    model_close(m);
    free(path);
}

static void test_real_llama2c(void **state) {
    (void)state;
    char *bin = shared_path("data/stories260K/stories260K.bin"),
         *tok = shared_path("data/stories260K/tok512.bin");
    if (!bin || !tok) skip();
    struct error err;
    struct model *m = llama2c_open(bin, tok, NUMERIC_EXACT, &err);
    if (!m) fail_msg("%s", err.text);
    assert_int_equal(m->config.d_model, 64);
    assert_int_equal(m->config.n_kv_heads, 4);
    assert_true(m->config.tied);
    assert_int_equal(model_write_gguf(m, tmp_path("stories260K.gguf"), TENSOR_F32, &err), OK);
    struct model *reread = open_ok(tmp_path("stories260K.gguf"), NUMERIC_EXACT);
    assert_weights_equal(m, reread, TENSOR_F32);
    model_close(reread);
    model_close(m);
    free(bin);
    free(tok);
}

static void test_real_vocabularies(void **state) {
    (void)state;
    static const struct {
        const char *file;
        enum tokenizer_kind kind;
        int32_t n;
    } files[] = {{"data/tokenizers/ggml-vocab/ggml-vocab-llama-spm.gguf", TOKENIZER_SPM, 32000},
                 {"data/tokenizers/ggml-vocab/ggml-vocab-gpt-2.gguf", TOKENIZER_BPE, 50257}};
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        char *path = shared_path(files[i].file);
        if (!path) skip();
        struct error err;
        struct tokenizer *tok = gguf_tokenizer_open(path, &err);
        if (!tok) fail_msg("%s", err.text);
        assert_int_equal(tokenizer_vocab_size(tok), files[i].n);
        assert_int_equal(tokenizer_get_spec(tok)->kind, files[i].kind);
        assert_refused(path, i == 0 ? "'token_embd.weight' is missing" : "architecture 'gpt2'");
        tokenizer_free(tok);
        free(path);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_weight_names),
        cmocka_unit_test(test_rope_table),
        cmocka_unit_test(test_model_new),
        cmocka_unit_test(test_write_without_memory),
        cmocka_unit_test(test_gguf_round_trips),
        cmocka_unit_test(test_source_hash),
        cmocka_unit_test(test_gguf_extras),
        cmocka_unit_test(test_gguf_permutation),
        cmocka_unit_test(test_gguf_foreign_blocks),
        cmocka_unit_test(test_hf_round_trips),
        cmocka_unit_test(test_hf_shards),
        cmocka_unit_test(test_hf_config),
        cmocka_unit_test(test_hf_windows),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_hf_tokenizer_config),
        cmocka_unit_test(test_errors_name_every_tensor),
        cmocka_unit_test(test_harmless_extras),
        cmocka_unit_test(test_gguf_invalid_metadata),
        cmocka_unit_test(test_gguf_invalid_tensors),
        cmocka_unit_test(test_gguf_wrong_keys),
        cmocka_unit_test(test_gguf_truncated),
        cmocka_unit_test(test_gguf_corrupted),
        cmocka_unit_test(test_safetensors_invalid),
        cmocka_unit_test(test_safetensors_round_trip),
        cmocka_unit_test(test_not_models),
        cmocka_unit_test(test_failed_writes),
        cmocka_unit_test(test_llama2c),
        cmocka_unit_test(test_real_gguf),
        cmocka_unit_test(test_real_llama2c),
        cmocka_unit_test(test_real_vocabularies),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
