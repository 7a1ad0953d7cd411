/*
 * model: opens a model from a path, binds its tensors, creates models from a seed, computes hashes,
 * and closes models.
 *
 * gguf.c, hf.c and llama2c.c read the formats. Loading is strict:
 * the tensors of a file must be exactly the canonical list of its configuration. One error counts
 * all offending tensors and names the first TENSOR_ERRORS_SHOWN.
 *
 * Invariants: (1) a struct model that was returned is complete; (2) in a model from files, f32 (and
 * exact-class bf16) matrices whose rows need no reordering point into m->maps; all other weights
 * are in m->arena; (3) model_close frees both.
 */
#include "hub/hub.h"
#include "model/internal.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void tensor_errors_add(struct tensor_errors *o, const char *fmt, ...) {
    if (o->n++ >= TENSOR_ERRORS_SHOWN) return;
    char line[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    buf_printf(&o->text, "%s%s", o->n > 1 ? "; " : "", line);
}

int tensor_errors_report(struct tensor_errors *o, int code, struct error *err) {
    int rc = OK;
    if (o->n > TENSOR_ERRORS_SHOWN)
        rc = error_set(err, code, "%d offending tensors: %s; and %d more", o->n, o->text.data,
                       o->n - TENSOR_ERRORS_SHOWN);
    else if (o->n > 0)
        rc = error_set(err, code, "%d offending tensor%s: %s", o->n, o->n > 1 ? "s" : "",
                       o->text.data);
    buf_release(&o->text);
    return rc;
}

static int tensor_compare_names(const void *a, const void *b) {
    return strcmp(((const struct tensor_info *)a)->name, ((const struct tensor_info *)b)->name);
}

void tensors_sort(struct tensor_info *t, int n) {
    if (n > 1) qsort(t, (size_t)n, sizeof(*t), tensor_compare_names);
}

const struct tensor_info *tensors_find(const struct tensor_info *t, int n, const char *name) {
    for (int lo = 0, hi = n; lo < hi;) {
        int mid = lo + (hi - lo) / 2, order = strcmp(name, t[mid].name);
        if (order == 0) return &t[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* "[4, 8]" */
static const char *tensor_shape_text(const int64_t *dims, int n_dims, char out[96]) {
    size_t len = 0;
    out[len++] = '[';
    for (int i = 0; i < n_dims; i++)
        len += (size_t)snprintf(out + len, 96 - len, "%s%lld", i ? ", " : "", (long long)dims[i]);
    snprintf(out + len, 96 - len, "]");
    return out;
}

/* The last component of the path, without its extension if that is a known extension, and with
 * U+FFFD for bytes that JSON cannot contain. */
static char *model_name(struct arena *arena, const char *path) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    static const char *const endings[] = {".gguf", ".bin", ".safetensors"};
    for (size_t i = 0; i < ARRAY_LEN(endings); i++) {
        size_t len = strlen(endings[i]);
        if (end - begin > len && memcmp(path + end - len, endings[i], len) == 0) {
            end -= len;
            break;
        }
    }
    struct buf clean = {0};
    buf_add_sanitized(&clean, path + begin, end - begin);
    char *name = arena_strdup(arena, clean.data ? clean.data : "");
    buf_release(&clean);
    return name;
}

struct model *model_alloc(const char *path, enum numeric_class cls) {
    struct model *m = xcalloc(1, sizeof(*m));
    m->cls = cls;
    m->path = arena_strdup(&m->arena, path);
    m->name = model_name(&m->arena, path);
    return m;
}

void model_add_map(struct model *m, struct file_map *map) {
    m->maps = xrealloc(m->maps, sizeof(*m->maps) * (size_t)(m->n_maps + 1));
    m->maps[m->n_maps++] = *map;
    *map = (struct file_map){0};
}

void model_close(struct model *m) {
    if (!m) return;
    tokenizer_free(m->tok);
    for (int i = 0; i < m->n_maps; i++) file_map_close(&m->maps[i]);
    free(m->maps);
    arena_release(&m->arena);
    free(m);
}

/* Sets the error for a file that is not a model, with a hint if its format is recognised. */
static int model_format_error(const char *path, const struct file_map *map, struct error *err) {
    static const struct {
        const char *magic;
        size_t len;
        const char *hint;
    } formats[] = {
        {"PK\x03\x04", 4,
         "a pickled PyTorch checkpoint runs code when read; save it as safetensors"},
        {"\x80\x02", 2, "a Python pickle runs code when read; save it as safetensors"},
        {"ggjt", 4, "it is older than GGUF; convert it again"},
        {"lmgg", 4, "it is older than GGUF; convert it again"},
    };
    for (size_t i = 0; i < ARRAY_LEN(formats); i++)
        if (map->size >= formats[i].len && memcmp(map->data, formats[i].magic, formats[i].len) == 0)
            return error_set(err, ERR_FORMAT, "'%s' is not a model file: %s", path,
                             formats[i].hint);
    if (map->size > 8 && map->data[8] == '{')
        return error_set(
            err, ERR_FORMAT,
            "'%s' is a safetensors file: give its directory, which needs a config.json", path);
    return error_set(err, ERR_FORMAT,
                     "'%s' is not a model: expected a GGUF file or a Hugging Face directory", path);
}

static struct model *model_read(const char *path, enum numeric_class cls, bool mapped,
                                struct error *err) {
    if (hub_is_name(path)) {
        char *cached_path = hub_cached_path(path, err);
        struct model *m = cached_path ? model_read(cached_path, cls, mapped, err) : NULL;
        free(cached_path);
        return m;
    }
    if (path_is_dir(path)) return hf_model_open(path, cls, mapped, err);
    struct file_map map;
    if (file_map_open(&map, path, err) != OK) return NULL;
    bool gguf = map.size >= 4 && memcmp(map.data, "GGUF", 4) == 0;
    if (!gguf) model_format_error(path, &map, err);
    file_map_close(&map);
    return gguf ? gguf_model_open(path, cls, mapped, err) : NULL;
}

static struct model *model_open_in(const char *path, enum numeric_class cls, bool mapped,
                                   struct error *err) {
    struct model *m = kernels_check_level(err) == OK ? model_read(path, cls, mapped, err) : NULL;
    if (m && m->tok) tokenizer_set_chat_template(m->tok, m->chat_template);
    return m;
}

struct model *model_open(const char *path, enum numeric_class cls, struct error *err) {
    return model_open_in(path, cls, false, err);
}

struct model *model_open_for_writing(const char *path, struct error *err) {
    return model_open_in(path, NUMERIC_EXACT, true, err);
}

static bool type_is_float(enum tensor_type t) {
    return t == TENSOR_F32 || t == TENSOR_F16 || t == TENSOR_BF16;
}

static bool weight_fits(const struct weight_info *w, const struct tensor_info *t) {
    if (t->mask) return false;
    if (w->is_vector) return t->n_dims == 1 && t->dims[0] == w->k && type_is_float(t->type);
    return t->n_dims == 2 && t->dims[0] == w->n && t->dims[1] == w->k;
}

/* Adds a message to `o` if the tensor is missing (t NULL) or does not fit the weight. */
static void weight_check(const struct weight_info *w, const struct tensor_info *t,
                         struct tensor_errors *o) {
    if (!t) {
        tensor_errors_add(o, "'%s' is missing", w->name);
    } else if (!weight_fits(w, t)) {
        char have[96], want[96];
        int64_t dims[2] = {w->n, w->k};
        tensor_errors_add(
            o, "'%s' is %s %s, expected %s%s", w->name,
            t->mask ? "a mask" : tensor_type_name(t->type),
            tensor_shape_text(t->dims, t->n_dims, have), w->is_vector ? "float " : "",
            tensor_shape_text(w->is_vector ? dims + 1 : dims, w->is_vector ? 1 : 2, want));
    }
}

/* Sets found[i] to the tensor of weight i. ERR_MISMATCH: a tensor is missing, unknown or of a wrong
 * shape. */
static int tensors_match(const struct model_config *c, const struct tensor_info *t, int n,
                         enum tensor_naming naming, const struct tensor_info **found,
                         struct error *err) {
    struct tensor_errors offenders = {0};
    bool *used = try_calloc((size_t)n, sizeof(*used), err);
    if (!used) return err->code;
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, naming, &w);
        found[i] = tensors_find(t, n, w.name);
        if (found[i]) used[found[i] - t] = true;
        weight_check(&w, found[i], &offenders);
    }
    for (int i = 0; i < n; i++)
        if (!used[i]) tensor_errors_add(&offenders, "'%.96s' is unknown", t[i].name);
    free(used);
    return tensor_errors_report(&offenders, ERR_MISMATCH, err);
}

/* Binds a norm or a bias; `order` is as in matrix_init, but for elements instead of rows.
 * `offset` is added to every element. */
static int vector_bind(struct model *m, const struct weight_info *w, const struct tensor_info *t,
                       const int32_t *order, float offset, struct error *err) {
    size_t n = (size_t)w->k;
    float *v = arena_try_alloc(&m->arena, sizeof(*v) * n, err);
    float *source = order ? try_calloc(n, sizeof(*source), err) : v;
    if (v && source) {
        tensor_to_f32(t->type, t->data, source, w->k);
        for (size_t i = 0; i < n && order; i++) v[i] = source[order[i]];
        for (size_t i = 0; i < n && offset != 0.0f; i++) v[i] += offset;
        *weight_vector(m, w) = v;
    }
    if (order) free(source);
    return v && source ? OK : err->code;
}

static int weight_bind(struct model *m, const struct weight_info *w, const struct tensor_info *t,
                       enum tensor_naming naming, bool interleaved, struct pool *pool,
                       struct error *err) {
    int32_t *order = interleaved && w->rope_heads > 0
                         ? rope_rows_from_interleaved(w->rope_heads, m->config.head_dim)
                         : NULL;
    struct matrix *matrix = weight_matrix(m, w);
    if (matrix && m->mapped) {
        free(order);
        return matrix_init_unpacked(matrix, t->type, w->n, w->k, t->data, err) == OK
                   ? OK
                   : error_wrap(err, "'%s'", w->name);
    }
    // Hugging Face stores the weights of Gemma's norms minus 1.
    int rc =
        matrix
            ? matrix_init(matrix, t->type, w->n, w->k, t->data, order, m->cls, pool, &m->arena, err)
            : vector_bind(m, w, t, order, w->has_offset && naming == NAMING_HF ? 1.0f : 0.0f, err);
    if (rc == OK && matrix && matrix->data != t->data)
        file_map_evict(t->data, t->size); // the packed copy replaces it in memory
    free(order);
    return rc == OK ? OK : error_wrap(err, "'%s'", w->name);
}

/* The type that most matrix elements have; the first one in `types` wins a tie. */
enum tensor_type tensors_main_type(const struct tensor_info *t, int n) {
    static const enum tensor_type types[] = {TENSOR_F32,  TENSOR_F16,  TENSOR_Q4_0, TENSOR_Q4_1,
                                             TENSOR_Q5_0, TENSOR_Q5_1, TENSOR_Q8_0, TENSOR_Q4_K,
                                             TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_BF16, TENSOR_NF4};
    enum tensor_type best = TENSOR_F32;
    for (int64_t i = 0, best_count = 0; i < (int64_t)ARRAY_LEN(types); i++) {
        int64_t count = 0;
        for (int j = 0; j < n; j++)
            if (t[j].type == types[i] && t[j].n_dims == 2) count += t[j].dims[0] * t[j].dims[1];
        if (count > best_count) {
            best = types[i];
            best_count = count;
        }
    }
    return best;
}

/* Loading of a large model: the threads that pack the weights, and its progress, which is shown if
 * it takes longer than a second. */
struct loading {
    struct pool *pool; /* NULL: a small model, which one thread loads */
    char *title;
    double start;
    bool shown;
    struct progress progress;
    size_t done, total; /* bytes of the file */
};
#define LOADING_POOL_BYTES ((size_t)32 << 20) /* from this size on, threads are worth starting */

static struct loading loading_start(const struct model *m, const struct tensor_info *t, int n) {
    struct loading l = {.title = xasprintf("loading %s, MB", m->name), .start = clock_now()};
    for (int i = 0; i < n; i++) l.total += t[i].size;
    if (l.total >= LOADING_POOL_BYTES && !m->mapped) l.pool = pool_new(0);
    return l;
}

static void loading_advance(struct loading *l, size_t bytes) {
    l->done += bytes;
    if (!l->shown && clock_now() - l->start < 1) return;
    if (!l->shown) progress_start(&l->progress, l->title, (int64_t)(l->total >> 20));
    l->shown = true;
    progress_update(&l->progress, (int64_t)(l->done >> 20), NULL);
}

static void loading_end(struct loading *l) {
    if (l->shown) progress_finish(&l->progress, NULL);
    pool_free(l->pool);
    free(l->title);
}

int model_bind(struct model *m, const struct tensor_info *t, int n, enum tensor_naming naming,
               bool interleaved, struct error *err) {
    const struct model_config *c = &m->config;
    int32_t n_weights = weight_count(c);
    const struct tensor_info **found = xcalloc((size_t)n_weights, sizeof(*found));
    int rc = tensors_match(c, t, n, naming, found, err);
    struct loading l = loading_start(m, t, n);
    m->layers = arena_alloc(&m->arena, sizeof(*m->layers) * (size_t)c->n_layers);
    m->interleaved = interleaved && m->mapped;
    for (int32_t i = 0; rc == OK && i < n_weights; i++) {
        struct weight_info w;
        weight_at(c, i, naming, &w);
        rc = weight_bind(m, &w, found[i], naming, interleaved, l.pool, err);
        loading_advance(&l, found[i]->size);
    }
    loading_end(&l);
    if (c->tied) m->head = m->embed;
    m->type = tensors_main_type(t, n);
    free(found);
    return rc;
}

/*
 * n values with mean 0 and the given standard deviation: each is the sum of four 16-bit uniforms
 * (Irwin–Hall of order 4), which is close to a normal distribution and ends at ±3.46 standard
 * deviations. Box–Muller in double takes ten times as long for a model of 135 million parameters.
 */
static void fill_random(float *w, int64_t n, float std, struct rng *rng) {
    /* A sum of four uniforms on [0, 65536) has variance 65536²/3. */
    const float scale = std * sqrtf(3.0f) / 65536.0f;
    for (int64_t i = 0; i < n; i++) {
        uint32_t a = rng_u32(rng), b = rng_u32(rng);
        int32_t sum = (int32_t)((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16));
        w[i] = scale * ((float)sum - 131070.0f);
    }
}

enum { VALUES_PER_WEIGHT = 2 }; /* values of rng_u32 that fill_random uses for one weight */

/* Projections that add to the residual stream begin smaller, as in GPT-2. */
static float weight_std(const struct model_config *c, const struct weight_info *w) {
    return w->is_residual ? 0.02f / sqrtf(2.0f * (float)c->n_layers) : 0.02f;
}

static float vector_start(const struct weight_info *w) {
    return w->is_bias ? 0.0f : 1.0f;
}

/* Creates a matrix of random weights, one row at a time, encoded as `type`. */
static void matrix_init_random(struct model *m, struct matrix *matrix, enum tensor_type type,
                               const struct weight_info *w, struct rng *rng) {
    struct error err;
    float std = weight_std(&m->config, w);
    size_t size = sizeof(float) * (size_t)w->k;
    float *row = xmalloc(size);
    void *bytes = xmalloc(size + sizeof(float)); // at most the values as f32, or nf4 with its scale
    int rc = matrix_alloc(matrix, type, w->n, w->k, m->cls, &m->arena, &err);
    for (int64_t i = 0; rc == OK && i < w->n; i++) {
        fill_random(row, w->k, std, rng);
        tensor_from_f32(type, row, bytes, w->k);
        rc = matrix_set_row(matrix, i, bytes, &err);
    }
    if (rc != OK) check_failed(__FILE__, __LINE__, err.text);
    free(row);
    free(bytes);
}

static void weight_init(struct model *m, const struct weight_info *w, int32_t index,
                        uint64_t seed) {
    struct matrix *matrix = weight_matrix(m, w);
    if (!matrix) {
        float *data = arena_alloc(&m->arena, sizeof(float) * (size_t)w->k);
        for (int64_t i = 0; i < w->k; i++) data[i] = vector_start(w);
        *weight_vector(m, w) = data;
        return;
    }
    struct rng rng = rng_make(seed, RNG_INIT, (uint32_t)index, 0);
    const struct quant_scheme q = quant_pure(m->type);
    matrix_init_random(m, matrix, quant_weight_type(&q, &m->config, w), w, &rng);
}

struct model *model_new_random(const struct model_config *c, uint64_t seed,
                               enum numeric_class cls) {
    return model_new_quantized(c, seed, TENSOR_F32, cls);
}

/* Reserves the memory of all weights at once: the unused end of one page per weight would add up to
 * half a megabyte for a small model. */
static void weights_reserve(struct model *m) {
    const struct quant_scheme q = quant_pure(m->type);
    size_t size = 0;
    struct error err;
    for (int32_t i = 0; i < weight_count(&m->config); i++) {
        struct weight_info w;
        weight_at(&m->config, i, NAMING_HF, &w);
        size += 4 * 64; // at most four arrays, each aligned to 64 bytes
        size += w.is_vector
                    ? sizeof(float) * (size_t)(w.n * w.k)
                    : matrix_bytes_of(quant_weight_type(&q, &m->config, &w), w.n, w.k, m->cls);
    }
    if (arena_reserve(&m->arena, size, &err) != OK) check_failed(__FILE__, __LINE__, err.text);
}

struct model *model_new_quantized(const struct model_config *c, uint64_t seed,
                                  enum tensor_type type, enum numeric_class cls) {
    struct error err;
    if (model_config_check(c, &err) != OK) check_failed(__FILE__, __LINE__, err.text);
    struct model *m = model_alloc(c->arch->name, cls);
    m->config = *c;
    m->type = type;
    m->layers = arena_alloc(&m->arena, sizeof(*m->layers) * (size_t)c->n_layers);
    weights_reserve(m);
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_HF, &w);
        weight_init(m, &w, i, seed);
    }
    if (c->tied) m->head = m->embed;
    m->tok = tokenizer_new_bytes(c->vocab_size);
    return m;
}

struct model *model_new_for_writing(const struct model_config *c, uint64_t seed) {
    struct error err;
    if (model_config_check(c, &err) != OK) check_failed(__FILE__, __LINE__, err.text);
    struct model *m = model_alloc(c->arch->name, NUMERIC_EXACT);
    m->config = *c;
    m->type = TENSOR_F32;
    m->computed = true;
    m->seed = seed;
    m->tok = tokenizer_new_bytes(c->vocab_size);
    return m;
}

/* Row i of a model from model_new_for_writing. */
static void weight_row_compute(const struct model *m, const struct weight_info *w, int64_t i,
                               float *out) {
    if (w->is_vector) {
        for (int64_t j = 0; j < w->k; j++) out[j] = vector_start(w);
        return;
    }
    struct rng rng = rng_make(m->seed, RNG_INIT, (uint32_t)w->index, 0);
    rng_skip(&rng, (uint64_t)(i * w->k) * VALUES_PER_WEIGHT);
    fill_random(out, w->k, weight_std(&m->config, w), &rng);
}

int32_t model_weight_count(const struct model_config *c) {
    return weight_count(c);
}

struct model_weight model_weight_at(struct model *m, int32_t i) {
    struct weight_info w;
    struct model_weight out;
    weight_at(&m->config, i, NAMING_HF, &w);
    const struct matrix *matrix = weight_matrix(m, &w);
    out.data = (float *)(uintptr_t)(matrix ? matrix->data : *weight_vector(m, &w));
    out.n = w.n;
    out.k = w.k;
    memcpy(out.name, w.name, sizeof out.name);
    return out;
}

static bool is_finite(const float *v, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(v[i])) return false;
    return true;
}

/* weight_row of a matrix in its file. The row is decoded even if it is copied, because nothing has
 * checked the scales of its blocks. */
static bool mapped_row(const struct model *m, const struct weight_info *w,
                       const struct matrix *matrix, int64_t i, enum tensor_type type,
                       float *scratch, void *out) {
    if (m->interleaved && w->rope_heads > 0) i = rope_row_from_interleaved(i, m->config.head_dim);
    matrix_get_row(matrix, i, scratch);
    if (matrix->type != type || !matrix_encode_row(matrix, i, out))
        tensor_from_f32(type, scratch, out, w->k);
    return !tensor_type_is_quantized(matrix->type) || is_finite(scratch, w->k);
}

void weight_evict(const struct model *m, const struct weight_info *w, int64_t begin, int64_t end) {
    struct model *mutable_model = (struct model *)(uintptr_t)m;
    const struct matrix *matrix = m->mapped ? weight_matrix(mutable_model, w) : NULL;
    if (!matrix) return;
    const size_t bytes = tensor_row_bytes(matrix->type, matrix->k);
    file_map_evict((const uint8_t *)matrix->data + (size_t)begin * bytes,
                   (size_t)(end - begin) * bytes);
}

bool weight_row(const struct model *m, const struct weight_info *w, int64_t i,
                enum tensor_type type, float *scratch, void *out) {
    /* weight_matrix and weight_vector return pointers; nothing is written through them here. */
    struct model *mutable_model = (struct model *)(uintptr_t)m;
    const struct matrix *matrix = m->computed ? NULL : weight_matrix(mutable_model, w);
    if (m->computed) {
        weight_row_compute(m, w, i, scratch);
        tensor_from_f32(type, scratch, out, w->k);
    } else if (!matrix) {
        tensor_from_f32(type, *weight_vector(mutable_model, w), out, w->k);
    } else if (m->mapped) {
        return mapped_row(m, w, matrix, i, type, scratch, out);
    } else if (m->changed_row && m->changed_row(m, matrix, i, scratch)) {
        tensor_from_f32(type, scratch, out, w->k);
    } else if (matrix->type != type || !matrix_encode_row(matrix, i, out)) {
        matrix_get_row(matrix, i, scratch);
        tensor_from_f32(type, scratch, out, w->k);
    }
    return true;
}

static void config_hash(struct sha256 *h, const struct model_config *c) {
    char text[256];
    int len = snprintf(text, sizeof(text), "%s %d %d %d %d %d %d %d %d %a %a %d\n", c->arch->name,
                       (int)c->n_layers, (int)c->d_model, (int)c->n_heads, (int)c->n_kv_heads,
                       (int)c->head_dim, (int)c->d_ff, (int)c->vocab_size, (int)c->max_seq_len,
                       (double)c->rope_theta, (double)c->rms_norm_eps, (int)c->tied);
    sha256_update(h, text, (size_t)len);
    const struct rope_scaling *s = &c->rope_scaling;
    len = snprintf(text, sizeof(text), "%d %a %a %a %d %a %a %x %d %llx %llx\n", (int)s->kind,
                   (double)s->factor, (double)s->low_freq_factor, (double)s->high_freq_factor,
                   (int)s->original_len, (double)c->rope_local_theta,
                   (double)c->query_pre_attn_scalar, (unsigned)c->biased, (int)c->sliding_window,
                   (unsigned long long)c->sliding_layers[0],
                   (unsigned long long)c->sliding_layers[1]);
    sha256_update(h, text, (size_t)len);
}

static void weights_hash(struct sha256 *h, const struct model *m) {
    int64_t max_row_len = MAX(m->config.d_ff, MAX(m->config.d_model, proj_in(&m->config, PROJ_O)));
    float *row = xmalloc(sizeof(float) * (size_t)max_row_len * 2);
    for (int32_t i = 0; i < weight_count(&m->config); i++) {
        struct weight_info w;
        weight_at(&m->config, i, NAMING_HF, &w);
        for (int64_t r = 0; r < w.n; r++) {
            weight_row(m, &w, r, TENSOR_F32, row, row + max_row_len);
            sha256_update(h, row + max_row_len, sizeof(float) * (size_t)w.k);
        }
    }
    free(row);
}

/*
 * The hash of a model in a single file is the SHA-256 of the file, as sha256sum prints it. Of
 * several files (config.json first) it is the SHA-256 of each file's length and bytes in turn. Of a
 * model that has no file it is the SHA-256 of its configuration and its weights as f32. Code that
 * trains such a model sets m->hash[0] to 0, so that the hash is computed again.
 */
static void hash_compute(struct model *m) {
    struct sha256 h;
    sha256_init(&h);
    if (m->n_maps == 0) {
        config_hash(&h, &m->config);
        weights_hash(&h, m);
    }
    for (int i = 0; i < m->n_maps; i++) {
        uint64_t size = m->maps[i].size;
        if (m->n_maps > 1) sha256_update(&h, &size, sizeof(size));
        for (size_t pos = 0, n; pos < m->maps[i].size; pos += n) { // evicts what was hashed
            n = MIN(m->maps[i].size - pos, (size_t)4 << 20);
            sha256_update(&h, m->maps[i].data + pos, n);
            file_map_evict(m->maps[i].data + pos, n);
        }
    }
    sha256_final(&h, m->hash);
}

int model_set_source(struct model *m, struct error *err) {
    const char *hash = model_hash(m, err);
    if (hash && !m->source_hash[0]) memcpy(m->source_hash, hash, sizeof m->source_hash);
    return hash ? OK : err->code;
}

void model_read_source(struct model *m, const char *hash) {
    if (hash && hash_is_valid(hash)) memcpy(m->source_hash, hash, sizeof m->source_hash);
}

const char *model_hash(struct model *m, struct error *err) {
    // one lock for all models, because it is seldom taken
    static pthread_mutex_t hash_lock = PTHREAD_MUTEX_INITIALIZER;
    (void)err; /* everything is mapped or in memory, so no error is possible */
    pthread_mutex_lock(&hash_lock);
    if (!m->hash[0]) hash_compute(m);
    pthread_mutex_unlock(&hash_lock);
    return m->hash;
}
