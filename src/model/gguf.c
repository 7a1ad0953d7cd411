/*
 * gguf: GGUF files of version 3 or 2, which have the same layout: metadata, tensors in place,
 * tokenizer; and the canonical writer, which writes version 3.
 *
 *     "GGUF" | u32 version | u64 n_tensors | u64 n_kv
 *     n_kv × (key, type, value)
 *     n_tensors × (name, dims, type, offset)
 *     padding to `alignment`
 *     tensor bytes, each padded to `alignment`
 *
 * All numbers are little-endian; a string is a u64 length and bytes. Dims are written innermost
 * first and reversed on reading. Big-endian files and tensor types outside the table of kernel.h
 * are errors, and so is opening a split file or an adapter as a model.
 *
 * Invariants after gguf_open: (1) every value and tensor is inside the mapping; (2) keys and tensor
 * names are unique and both arrays sorted; (3) tensors are contiguous in file order except for
 * padding, so none overlap; (4) a tensor's size follows from its dims and type, and no product of
 * dims overflows, because the number of elements is first checked against the size of the file.
 */
#include "model/internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "values are copied in the byte order of the file");

/* GGUF's own keys general.source.* are addresses of a source, not its hash. */
#define KEY_SOURCE "shoal.source_sha256"

enum gguf_type {
    GGUF_TYPE_U8,
    GGUF_TYPE_I8,
    GGUF_TYPE_U16,
    GGUF_TYPE_I16,
    GGUF_TYPE_U32,
    GGUF_TYPE_I32,
    GGUF_TYPE_F32,
    GGUF_TYPE_BOOL,
    GGUF_TYPE_STRING,
    GGUF_TYPE_ARRAY,
    GGUF_TYPE_U64,
    GGUF_TYPE_I64,
    GGUF_TYPE_F64,
    GGUF_N_TYPES
};
static const uint8_t gguf_type_sizes[GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* For a string, `data` and `n` are its bytes and their number; for an array, its first element and
 * the number of elements. An element that is a string begins with its length word. `element`: type
 * of an array's elements. */
struct gguf_kv {
    const char *key; /* not terminated */
    uint64_t key_len;
    uint32_t type, element;
    uint64_t n;
    const uint8_t *data;
};
struct gguf {
    struct file_map map;
    uint64_t alignment, n_kv;
    struct gguf_kv *kv;
    struct tensor_info *tensors;
    int n_tensors;
};

/* Reads past the end return zeros and set `bad`, so that one check after several reads suffices. */
struct gguf_cursor {
    const uint8_t *data;
    size_t size, pos;
    bool bad;
};

static size_t cursor_left(const struct gguf_cursor *c) {
    return c->size - c->pos;
}

static const uint8_t *cursor_read_bytes(struct gguf_cursor *c, uint64_t n) {
    if (c->bad || n > cursor_left(c)) {
        c->bad = true;
        return NULL;
    }
    const uint8_t *p = c->data + c->pos;
    c->pos += (size_t)n;
    return p;
}

static uint64_t cursor_read_uint(struct gguf_cursor *c, size_t size) {
    uint64_t value = 0;
    const uint8_t *p = cursor_read_bytes(c, size);
    if (p) memcpy(&value, p, size);
    return value;
}

static const uint8_t *cursor_read_string(struct gguf_cursor *c, uint64_t *len) {
    *len = cursor_read_uint(c, 8);
    return cursor_read_bytes(c, *len);
}

static void array_read(struct gguf_cursor *c, struct gguf_kv *kv) {
    kv->element = (uint32_t)cursor_read_uint(c, 4);
    kv->n = cursor_read_uint(c, 8);
    kv->data = c->data + c->pos;
    if (kv->element >= GGUF_N_TYPES || kv->element == GGUF_TYPE_ARRAY) {
        c->bad = true; /* arrays of arrays exist only in the specification */
    } else if (kv->element != GGUF_TYPE_STRING) {
        if (kv->n > cursor_left(c))
            c->bad = true;
        else
            cursor_read_bytes(c, kv->n * gguf_type_sizes[kv->element]);
    } else {
        uint64_t len;
        for (uint64_t i = 0; i < kv->n && !c->bad; i++) cursor_read_string(c, &len);
    }
}

static int kv_read(struct gguf_cursor *c, struct gguf_kv *kv, struct error *err) {
    kv->key = (const char *)cursor_read_string(c, &kv->key_len);
    if (c->bad || kv->key_len == 0 || kv->key_len > 0xFFFF)
        return error_set(err, ERR_FORMAT,
                         "the metadata is cut off or has a key of impossible length");
    kv->type = (uint32_t)cursor_read_uint(c, 4);
    if (kv->type == GGUF_TYPE_STRING)
        kv->data = cursor_read_string(c, &kv->n);
    else if (kv->type == GGUF_TYPE_ARRAY)
        array_read(c, kv);
    else if (kv->type < GGUF_N_TYPES)
        kv->data = cursor_read_bytes(c, gguf_type_sizes[kv->type]);
    else
        c->bad = true;
    if (c->bad)
        return error_set(err, ERR_FORMAT, "metadata '%.*s' is cut off or of an unknown type",
                         (int)MIN(kv->key_len, 96), kv->key);
    return OK;
}

static int kv_compare(const void *a, const void *b) {
    const struct gguf_kv *x = a, *y = b;
    int order = memcmp(x->key, y->key, (size_t)MIN(x->key_len, y->key_len));
    return order ? order : x->key_len < y->key_len ? -1 : x->key_len > y->key_len;
}

static int metadata_read(struct gguf *g, struct gguf_cursor *c, struct error *err) {
    /* The shortest entry: 8 + 1 bytes of key, 4 of type, 1 of value. */
    if (g->n_kv > cursor_left(c) / 14)
        return error_set(err, ERR_FORMAT, "%llu metadata entries do not fit the file",
                         (unsigned long long)g->n_kv);
    g->kv = try_calloc((size_t)g->n_kv, sizeof(*g->kv), err);
    if (!g->kv) return err->code;
    for (uint64_t i = 0; i < g->n_kv; i++) {
        int rc = kv_read(c, &g->kv[i], err);
        if (rc != OK) return rc;
    }
    if (g->n_kv > 1) qsort(g->kv, (size_t)g->n_kv, sizeof(*g->kv), kv_compare);
    for (uint64_t i = 1; i < g->n_kv; i++)
        if (kv_compare(&g->kv[i - 1], &g->kv[i]) == 0)
            return error_set(err, ERR_FORMAT, "metadata '%.*s' appears twice",
                             (int)MIN(g->kv[i].key_len, 96), g->kv[i].key);
    return OK;
}

static const struct gguf_kv *gguf_find(const struct gguf *g, const char *key) {
    struct gguf_kv wanted = {.key = key, .key_len = strlen(key)};
    return g->n_kv ? bsearch(&wanted, g->kv, (size_t)g->n_kv, sizeof(*g->kv), kv_compare) : NULL;
}

/* Names of types that are not supported, for the error message. */
static const char *ggml_type_name(uint32_t type, char out[16]) {
    static const char *const names[] = {
        [9] = "q8_1",    [10] = "q2_k",   [11] = "q3_k",  [15] = "q8_k",   [16] = "iq2_xxs",
        [17] = "iq2_xs", [20] = "iq4_nl", [22] = "iq2_s", [23] = "iq4_xs", [39] = "mxfp4"};
    if (type < ARRAY_LEN(names) && names[type]) return names[type];
    snprintf(out, 16, "type %u", (unsigned)type);
    return out;
}

static int tensor_dims(struct tensor_info *t, struct gguf_cursor *c, int64_t *elements,
                       struct error *err) {
    uint64_t n_dims = cursor_read_uint(c, 4), product = 1;
    if (c->bad || n_dims < 1 || n_dims > 4)
        return error_set(err, ERR_FORMAT, "tensor '%.96s' has %llu dimensions", t->name,
                         (unsigned long long)n_dims);
    t->n_dims = (int)n_dims;
    for (int i = t->n_dims - 1; i >= 0; i--) {
        uint64_t dim = cursor_read_uint(c, 8);
        /* Every type takes at least half a byte per element, so a larger number cannot be in the
         * file. */
        if (dim == 0 || __builtin_mul_overflow(product, dim, &product) ||
            product > 2 * (uint64_t)c->size)
            return error_set(err, ERR_FORMAT,
                             "tensor '%.96s' has dimensions that do not fit the file", t->name);
        t->dims[i] = (int64_t)dim;
    }
    *elements = (int64_t)product;
    return OK;
}

/* Reads one entry of the tensor table; *offset is relative to the data section. An unknown type is
 * added to `unsupported`, and t->size stays 0. */
static int tensor_read(struct tensor_info *t, struct gguf_cursor *c, uint64_t *offset,
                       struct tensor_errors *unsupported, struct error *err) {
    uint64_t len;
    int64_t elements = 0;
    const uint8_t *name = cursor_read_string(c, &len);
    if (c->bad || len == 0 || len > 255 || memchr(name, 0, (size_t)len))
        return error_set(err, ERR_FORMAT, "the tensor table is cut off or has an impossible name");
    t->name = xcalloc((size_t)len + 1, 1);
    memcpy(t->name, name, (size_t)len);
    int rc = tensor_dims(t, c, &elements, err);
    if (rc != OK) return rc;
    uint32_t type = (uint32_t)cursor_read_uint(c, 4);
    *offset = cursor_read_uint(c, 8);
    if (c->bad) return error_set(err, ERR_FORMAT, "tensor '%.96s' is cut off", t->name);
    char text[16];
    int64_t k = t->dims[t->n_dims - 1];
    if (!tensor_type_is_known(type)) {
        tensor_errors_add(unsupported, "'%.96s' is %s", t->name, ggml_type_name(type, text));
        return OK;
    }
    t->type = (enum tensor_type)type;
    int block = tensor_type_block_size(t->type);
    if (k % block != 0)
        return error_set(err, ERR_FORMAT,
                         "tensor '%.96s' is %s with rows of %lld, not a multiple of %d", t->name,
                         tensor_type_name(t->type), (long long)k, block);
    t->size = tensor_row_bytes(t->type, k) * (size_t)(elements / k);
    return OK;
}

static uint64_t align_up(uint64_t n, uint64_t alignment) {
    return (n + alignment - 1) / alignment * alignment;
}

/* Checks invariant 3 and sets each tensor's data. `offsets` are those of the tensors in file order,
 * relative to `start`, where the data section begins. */
static int tensors_locate(struct gguf *g, const uint64_t *offsets, uint64_t start,
                          struct error *err) {
    uint64_t offset = 0, end = start;
    for (int i = 0; i < g->n_tensors; i++) {
        struct tensor_info *t = &g->tensors[i];
        if (offsets[i] != offset)
            return error_set(err, ERR_FORMAT,
                             "tensor '%.96s' begins at %llu, the one before it ends at %llu",
                             t->name, (unsigned long long)offsets[i], (unsigned long long)offset);
        if (start > g->map.size || offset > g->map.size - start ||
            t->size > g->map.size - start - offset)
            return error_set(err, ERR_FORMAT,
                             "tensor '%.96s' is outside the file, which may be cut off", t->name);
        t->data = g->map.data + start + offset;
        end = start + offset + t->size;
        offset = align_up(offset + t->size, g->alignment);
    }
    if (g->n_tensors > 0 && g->map.size > align_up(end, g->alignment))
        return error_set(err, ERR_FORMAT, "%llu bytes follow the last tensor",
                         (unsigned long long)(g->map.size - end));
    return OK;
}

static int tensors_read(struct gguf *g, struct gguf_cursor *c, uint64_t n_tensors,
                        struct error *err) {
    /* The shortest entry: 8 + 1 bytes of name, 4 + 8 of dims, 4 of type, 8 of offset. */
    if (n_tensors > cursor_left(c) / 33 || n_tensors > INT32_MAX)
        return error_set(err, ERR_FORMAT, "%llu tensors do not fit the file",
                         (unsigned long long)n_tensors);
    g->tensors = try_calloc((size_t)n_tensors, sizeof(*g->tensors), err);
    uint64_t *offsets = g->tensors ? try_calloc((size_t)n_tensors, sizeof(*offsets), err) : NULL;
    if (!offsets) return err->code;
    struct tensor_errors unsupported = {0};
    int rc = OK;
    while (rc == OK && (uint64_t)g->n_tensors < n_tensors) {
        int i = g->n_tensors++;
        rc = tensor_read(&g->tensors[i], c, &offsets[i], &unsupported, err);
    }
    int bad = tensor_errors_report(&unsupported, ERR_MISMATCH, err);
    if (rc == OK && bad != OK) rc = error_wrap(err, "only %s can be read", tensor_type_list());
    if (rc == OK) rc = tensors_locate(g, offsets, align_up(c->pos, g->alignment), err);
    free(offsets);
    if (rc != OK) return rc;
    tensors_sort(g->tensors, g->n_tensors);
    for (int i = 1; i < g->n_tensors; i++)
        if (strcmp(g->tensors[i - 1].name, g->tensors[i].name) == 0)
            return error_set(err, ERR_FORMAT, "tensor '%.96s' appears twice", g->tensors[i].name);
    return OK;
}

static int alignment_read(struct gguf *g, struct error *err) {
    const struct gguf_kv *kv = gguf_find(g, "general.alignment");
    uint32_t value = 32;
    if (kv && kv->type == GGUF_TYPE_U32) memcpy(&value, kv->data, sizeof(value));
    if ((kv && kv->type != GGUF_TYPE_U32) || value < 8 || value > 1u << 20 ||
        (value & (value - 1)) != 0)
        return error_set(err, ERR_FORMAT,
                         "'general.alignment' is not a power of two from 8 to 1048576");
    g->alignment = value;
    return OK;
}

static int gguf_parse(struct gguf *g, struct error *err) {
    struct gguf_cursor c = {.data = g->map.data, .size = g->map.size};
    const uint8_t *magic = cursor_read_bytes(&c, 4);
    if (!magic || memcmp(magic, "GGUF", 4) != 0)
        return error_set(err, ERR_FORMAT, "not a GGUF file");
    uint32_t version = (uint32_t)cursor_read_uint(&c, 4);
    uint64_t n_tensors = cursor_read_uint(&c, 8);
    g->n_kv = cursor_read_uint(&c, 8);
    if (c.bad) return error_set(err, ERR_FORMAT, "the header is cut off");
    if (version != 2 && version != 3)
        return error_set(err, ERR_FORMAT, "GGUF version %u is not read, only 2 and 3%s",
                         (unsigned)version,
                         version && (version & 0xFFFF) == 0 ? " in little-endian order" : "");
    int rc = metadata_read(g, &c, err);
    if (rc == OK) rc = alignment_read(g, err);
    if (rc == OK) rc = tensors_read(g, &c, n_tensors, err);
    return rc;
}

static void gguf_close(struct gguf *g) {
    for (int i = 0; i < g->n_tensors; i++) free(g->tensors[i].name);
    free(g->tensors);
    free(g->kv);
    file_map_close(&g->map);
    *g = (struct gguf){0};
}

static int gguf_open(struct gguf *g, const char *path, struct error *err) {
    *g = (struct gguf){0};
    int rc = file_map_open(&g->map, path, err);
    if (rc == OK) rc = gguf_parse(g, err);
    if (rc == OK) return OK;
    gguf_close(g);
    return rc;
}

static bool kv_get_integer(const struct gguf_kv *kv, int64_t *out) {
    uint64_t bits = 0;
    if (kv->type >= GGUF_N_TYPES || kv->type == GGUF_TYPE_F32 || kv->type == GGUF_TYPE_F64 ||
        kv->type == GGUF_TYPE_STRING || kv->type == GGUF_TYPE_ARRAY || kv->type == GGUF_TYPE_BOOL)
        return false;
    memcpy(&bits, kv->data, gguf_type_sizes[kv->type]);
    switch (kv->type) {
    case GGUF_TYPE_I8:
        *out = (int8_t)bits;
        return true;
    case GGUF_TYPE_I16:
        *out = (int16_t)bits;
        return true;
    case GGUF_TYPE_I32:
        *out = (int32_t)bits;
        return true;
    default:
        *out = (int64_t)bits;
        return kv->type == GGUF_TYPE_I64 || *out >= 0;
    }
}

static bool kv_get_number(const struct gguf_kv *kv, double *out) {
    float f;
    int64_t i;
    if (kv->type == GGUF_TYPE_F64) {
        memcpy(out, kv->data, sizeof(*out));
    } else if (kv->type == GGUF_TYPE_F32) {
        memcpy(&f, kv->data, sizeof(f));
        *out = (double)f;
    } else {
        if (!kv_get_integer(kv, &i)) return false;
        *out = (double)i;
    }
    return true;
}

static bool kv_equals(const struct gguf_kv *kv, const char *text) {
    return kv && kv->type == GGUF_TYPE_STRING && kv->n == strlen(text) &&
           memcmp(kv->data, text, kv->n) == 0;
}

/* A terminated copy, or NULL when the value is not a string or holds a NUL. */
static char *kv_get_text(const struct gguf_kv *kv, struct arena *arena) {
    if (!kv || kv->type != GGUF_TYPE_STRING || memchr(kv->data, 0, (size_t)kv->n)) return NULL;
    char *text = arena_alloc(arena, (size_t)kv->n + 1);
    memcpy(text, kv->data, (size_t)kv->n);
    return text;
}

/* *out keeps its value when the key is absent. */
static int bool_get(const struct gguf *g, const char *key, bool *out, struct error *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->type != GGUF_TYPE_BOOL || *kv->data > 1)
        return error_set(err, ERR_FORMAT, "metadata '%s' is not a bool", key);
    *out = *kv->data == 1;
    return OK;
}

enum { REQUIRED = -1 };

/* Reads the key ARCH.SUFFIX as an integer of at least 0. If the key is absent, *out is `fallback`;
 * REQUIRED makes that an error. */
static int int_get(const struct gguf *g, const char *arch, const char *suffix, int32_t fallback,
                   int32_t *out, struct error *err) {
    char key[96];
    int64_t value;
    snprintf(key, sizeof(key), "%s.%s", arch, suffix);
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv && fallback == REQUIRED)
        return error_set(err, ERR_FORMAT, "metadata '%s' is missing", key);
    *out = fallback;
    if (!kv) return OK;
    if (!kv_get_integer(kv, &value) || value < 0 || value > INT32_MAX)
        return error_set(
            err, ERR_FORMAT, "metadata '%s' is not a whole number from 0 to 2147483647%s", key,
            kv->type == GGUF_TYPE_ARRAY ? " (a value for each layer is not supported)" : "");
    *out = (int32_t)value;
    return OK;
}

/* Reads the key ARCH.SUFFIX as a float. If the key is absent, *out is `fallback`; 0 makes that an
 * error. */
static int float_get(const struct gguf *g, const char *arch, const char *suffix, float fallback,
                     float *out, struct error *err) {
    char key[96];
    double value = (double)fallback;
    snprintf(key, sizeof(key), "%s.%s", arch, suffix);
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv && fallback == 0.0f) return error_set(err, ERR_FORMAT, "metadata '%s' is missing", key);
    if (kv && !kv_get_number(kv, &value))
        return error_set(err, ERR_FORMAT, "metadata '%s' is not a number", key);
    *out = (float)value;
    return OK;
}

/* Keys that would change the arithmetic in an unsupported way must be absent or have a value that
 * changes nothing. */
static int unsupported_keys_check(const struct gguf *g, const char *arch, struct error *err) {
    static const struct {
        const char *suffix;
        double neutral, alternative;
    } numbers[] = {{"expert_count", 0, 0},
                   {"attention.clamp_kqv", 0, 0},
                   {"attn_logit_softcapping", 0, 0},
                   {"final_logit_softcapping", 0, 0},
                   {"logit_scale", 1, 0},
                   {"rope.scaling.attn_factor", 1, 0},
                   {"rope.scaling.yarn_ext_factor", 1, 1},
                   {"rope.scaling.yarn_attn_factor", 1, 1},
                   {"rope.scaling.yarn_beta_fast", 32, 32},
                   {"rope.scaling.yarn_beta_slow", 1, 1}};
    char key[96];
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++) {
        double value = numbers[i].neutral;
        snprintf(key, sizeof(key), "%s.%s", arch, numbers[i].suffix);
        const struct gguf_kv *kv = gguf_find(g, key);
        if (kv && (!kv_get_number(kv, &value) ||
                   (value != numbers[i].neutral && value != numbers[i].alternative)))
            return error_set(err, ERR_MISMATCH,
                             "metadata '%s' needs a feature that is not supported", key);
    }
    return OK;
}

/* Reads the type ("none", "linear" or "yarn") and its factor. A factor without a type is linear.
 * rope.scale_linear is an older key for the factor. */
static int rope_scaling_read(const struct gguf *g, struct model_config *c, struct error *err) {
    struct rope_scaling *s = &c->rope_scaling;
    const char *arch = c->arch->gguf;
    char key[96];
    snprintf(key, sizeof(key), "%s.rope.scaling.type", arch);
    const struct gguf_kv *type = gguf_find(g, key);
    bool yarn = type && kv_equals(type, "yarn"), none = type && kv_equals(type, "none");
    if (type && !none && !yarn && !kv_equals(type, "linear"))
        return error_set(err, ERR_MISMATCH, "metadata '%s' is '%.*s', which is not supported", key,
                         type->type == GGUF_TYPE_STRING ? (int)MIN(type->n, 32) : 0,
                         (const char *)type->data);
    float linear;
    int rc = float_get(g, arch, "rope.scale_linear", 1.0f, &linear, err);
    if (rc == OK) rc = float_get(g, arch, "rope.scaling.factor", linear, &s->factor, err);
    if (rc == OK && yarn)
        rc = int_get(g, arch, "rope.scaling.original_context_length", c->max_seq_len,
                     &s->original_len, err);
    if (rc != OK) return rc;
    if (none || s->factor == 1.0f || s->factor == 0.0f)
        *s = (struct rope_scaling){.kind = ROPE_DEFAULT};
    else
        s->kind = yarn ? ROPE_YARN : ROPE_LINEAR;
    return OK;
}

/* Reads an array of one bool per layer, true for a sliding window; or, as llama.cpp writes it, the
 * period p: each p-th layer has full attention. */
static int sliding_window_pattern_read(const struct gguf *g, struct model_config *c,
                                       struct error *err) {
    static const char suffix[] = "attention.sliding_window_pattern";
    char key[96];
    int32_t period;
    snprintf(key, sizeof(key), "%s.%s", c->arch->gguf, suffix);
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv || kv->type != GGUF_TYPE_ARRAY) {
        int rc = int_get(g, c->arch->gguf, suffix, 6, &period, err);
        if (rc == OK) sliding_window_pattern_set(c, period > 0 ? period : SLIDING_LAYERS_MAX + 1);
        return rc;
    }
    if (kv->element != GGUF_TYPE_BOOL || kv->n != (uint64_t)c->n_layers)
        return error_set(err, ERR_FORMAT, "metadata '%s' is not a list of %d bools", key,
                         (int)c->n_layers);
    for (int32_t l = 0; l < c->n_layers; l++)
        if (kv->data[l]) layer_set_sliding(c, l);
    return OK;
}

/* GGUF has no key for query_pre_attn_scalar. It is the head's width in all of Gemma's sizes except
 * the largest (62 layers), where it is d_model / n_heads. */
static float gemma_default_query_scalar(const struct model_config *c) {
    return (float)(c->n_layers == 62 && c->n_heads > 0 ? c->d_model / c->n_heads : c->head_dim);
}

/* Reads Gemma's sliding windows; in other architectures a window is an error. For keys that older
 * files lack, the constants of the programs that read those files are used: every 6th layer has
 * full attention, and layers with a sliding window use rope theta 10000. */
static int sliding_window_read(const struct gguf *g, struct model_config *c, struct error *err) {
    if (c->arch->hf_names != HF_GEMMA) {
        int32_t window;
        int rc = int_get(g, c->arch->gguf, "attention.sliding_window", 0, &window, err);
        return rc != OK || window == 0 ? rc
                                       : error_set(err, ERR_MISMATCH,
                                                   "metadata '%s.attention.sliding_window' needs "
                                                   "a feature that is not supported",
                                                   c->arch->gguf);
    }
    int rc = int_get(g, c->arch->gguf, "attention.sliding_window", 0, &c->sliding_window, err);
    if (rc == OK && c->sliding_window > 0) rc = sliding_window_pattern_read(g, c, err);
    if (!c->sliding_layers[0] && !c->sliding_layers[1])
        c->sliding_window = 0; /* set but not used */
    if (rc == OK)
        rc = float_get(g, c->arch->gguf, "rope.freq_base_swa", 1e4f, &c->rope_local_theta, err);
    if (rc == OK)
        rc = float_get(g, "shoal", "query_pre_attn_scalar", gemma_default_query_scalar(c),
                       &c->query_pre_attn_scalar, err);
    return rc;
}

static const char *bias_name(enum proj p) {
    static const char *const names[N_PROJ] = {
        "blk.0.attn_q.bias",   "blk.0.attn_k.bias", "blk.0.attn_v.bias",   "blk.0.attn_output.bias",
        "blk.0.ffn_gate.bias", "blk.0.ffn_up.bias", "blk.0.ffn_down.bias",
    };
    return names[p];
}

/* No key lists the projections with biases. They are found by the names of the first layer's
 * tensors, and model_bind requires the same biases in the other layers. */
static void biases_read(const struct gguf *g, struct model_config *c) {
    c->biased = c->arch->biased;
    for (int p = 0; p < N_PROJ; p++)
        if (tensors_find(g->tensors, g->n_tensors, bias_name((enum proj)p))) c->biased |= 1u << p;
}

static int arch_read(const struct gguf *g, const struct arch **out, struct error *err) {
    struct arena scratch = {0};
    int64_t splits;
    const struct gguf_kv *split = gguf_find(g, "split.count"), *type = gguf_find(g, "general.type");
    const char *name = kv_get_text(gguf_find(g, "general.architecture"), &scratch);
    int rc;
    if (type && !kv_equals(type, "model"))
        rc = error_set(err, ERR_MISMATCH, "it holds '%.*s', not a model",
                       type->type == GGUF_TYPE_STRING ? (int)MIN(type->n, 32) : 0,
                       (const char *)type->data);
    else if (split && (!kv_get_integer(split, &splits) || splits > 1))
        rc = error_set(err, ERR_MISMATCH, "it is one part of a split model; join the parts first");
    else if (!name)
        rc = error_set(err, ERR_FORMAT, "metadata 'general.architecture' is missing");
    else
        rc = arch_require(name, NAMING_GGUF, out, err);
    arena_release(&scratch);
    return rc;
}

static int sizes_read(const struct gguf *g, struct model_config *c, struct error *err) {
    const char *arch = c->arch->gguf;
    int rc = int_get(g, arch, "block_count", REQUIRED, &c->n_layers, err);
    if (rc == OK) rc = int_get(g, arch, "embedding_length", REQUIRED, &c->d_model, err);
    if (rc == OK) rc = int_get(g, arch, "feed_forward_length", REQUIRED, &c->d_ff, err);
    if (rc == OK) rc = int_get(g, arch, "context_length", REQUIRED, &c->max_seq_len, err);
    if (rc == OK) rc = int_get(g, arch, "attention.head_count", REQUIRED, &c->n_heads, err);
    if (rc == OK) rc = int_get(g, arch, "attention.head_count_kv", c->n_heads, &c->n_kv_heads, err);
    if (rc != OK) return rc;
    int32_t default_head_dim = c->n_heads > 0 ? c->d_model / c->n_heads : 0, value_length, rotary;
    rc = int_get(g, arch, "attention.key_length", default_head_dim, &c->head_dim, err);
    if (rc == OK) rc = int_get(g, arch, "attention.value_length", c->head_dim, &value_length, err);
    if (rc == OK) rc = int_get(g, arch, "rope.dimension_count", c->head_dim, &rotary, err);
    if (rc == OK && value_length != c->head_dim)
        rc = error_set(err, ERR_MISMATCH,
                       "keys of width %d and values of width %d are not supported",
                       (int)c->head_dim, (int)value_length);
    if (rc == OK && rotary != c->head_dim)
        rc = error_set(err, ERR_MISMATCH,
                       "rotary positions on %d of %d dimensions are not supported", (int)rotary,
                       (int)c->head_dim);
    return rc;
}

/* The size of the vocabulary is that of the embedding; the key, if present, must agree. */
static int vocab_read(const struct gguf *g, struct model_config *c, struct error *err) {
    const struct tensor_info *embed = tensors_find(g->tensors, g->n_tensors, "token_embd.weight");
    int32_t key_value;
    if (!embed || embed->n_dims != 2 || embed->dims[0] > INT32_MAX)
        return error_set(err, ERR_MISMATCH, "tensor 'token_embd.weight' is missing or no matrix");
    c->vocab_size = (int32_t)embed->dims[0];
    int rc = int_get(g, c->arch->gguf, "vocab_size", c->vocab_size, &key_value, err);
    if (rc == OK && key_value != c->vocab_size)
        rc = error_set(err, ERR_MISMATCH,
                       "'%s.vocab_size' is %d, but 'token_embd.weight' has %d rows", c->arch->gguf,
                       (int)key_value, (int)c->vocab_size);
    return rc;
}

static int config_read(const struct gguf *g, struct model_config *c, struct error *err) {
    *c = (struct model_config){0};
    int rc = arch_read(g, &c->arch, err);
    if (rc == OK) rc = sizes_read(g, c, err);
    if (rc == OK)
        rc = float_get(g, c->arch->gguf, "attention.layer_norm_rms_epsilon", 0.0f, &c->rms_norm_eps,
                       err);
    if (rc == OK) rc = float_get(g, c->arch->gguf, "rope.freq_base", 1e4f, &c->rope_theta, err);
    if (rc == OK) rc = unsupported_keys_check(g, c->arch->gguf, err);
    if (rc == OK) rc = rope_scaling_read(g, c, err);
    if (rc == OK) rc = sliding_window_read(g, c, err);
    if (rc == OK) rc = vocab_read(g, c, err);
    if (rc == OK) biases_read(g, c);
    if (rc == OK) rc = model_config_check(c, err);
    c->tied = !tensors_find(g->tensors, g->n_tensors, "output.weight");
    return rc;
}

/* True for pre-tokenizers with which llama.cpp looks up whole words before merging and adds BOS by
 * default. */
static bool pre_ignores_merges(const char *pre) {
    static const char *const names[] = {"llama3", "llama-v3", "llama-bpe", "tekken"};
    for (size_t i = 0; pre && i < ARRAY_LEN(names); i++)
        if (strcmp(pre, names[i]) == 0) return true;
    return false;
}

/* A pre-tokenizer that is a pattern and not one of GGUF's names (see struct tokenizer_spec). */
static bool pre_is_pattern(const char *pre) {
    return pre && strpbrk(pre, "\\[");
}

/* The array `key` of `n` elements of `type` (n 0: any number); *out is NULL when the key is absent.
 */
static int array_get(const struct gguf *g, const char *key, enum gguf_type type, uint64_t n,
                     const struct gguf_kv **out, struct error *err) {
    const struct gguf_kv *kv = *out = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->type != GGUF_TYPE_ARRAY || kv->element != (uint32_t)type)
        return error_set(err, ERR_FORMAT, "metadata '%s' is not an array of the expected type",
                         key);
    if (kv->n > INT32_MAX || (n && kv->n != n))
        return error_set(err, ERR_FORMAT, "metadata '%s' has %llu elements, expected %llu", key,
                         (unsigned long long)kv->n, (unsigned long long)n);
    return OK;
}

/* Terminated copies of all strings of an array, in one block, and their lengths. */
static int strings_copy(const struct gguf_kv *kv, const char **list, int32_t *lens,
                        struct arena *arena, struct error *err) {
    enum { STRING_MAX = 1 << 20 };
    struct gguf_cursor c = {.data = kv->data, .size = SIZE_MAX / 2}; /* array_read checked bounds */
    uint64_t len, total = 0;
    for (uint64_t i = 0; i < kv->n; i++) {
        cursor_read_string(&c, &len);
        if (len > STRING_MAX)
            return error_set(err, ERR_FORMAT, "metadata '%.*s' holds a string of %llu bytes",
                             (int)kv->key_len, kv->key, (unsigned long long)len);
        total += len + 1;
    }
    char *text = arena_try_alloc(arena, (size_t)total, err);
    if (!text) return err->code;
    c.pos = 0;
    for (uint64_t i = 0; i < kv->n; i++) {
        const uint8_t *bytes = cursor_read_string(&c, &len);
        list[i] = memcpy(text, bytes, (size_t)len);
        lens[i] = (int32_t)len;
        text += len + 1; /* arena memory is zeroed, so the text ends with NUL */
    }
    return OK;
}

static int pieces_read(const struct gguf *g, int32_t vocab, struct tokenizer_spec *spec,
                       struct arena *arena, struct error *err) {
    const struct gguf_kv *tokens, *scores, *types;
    int rc = array_get(g, "tokenizer.ggml.tokens", GGUF_TYPE_STRING, 0, &tokens, err);
    if (rc != OK) return rc;
    if (!tokens || tokens->n == 0)
        return error_set(err, ERR_FORMAT, "metadata 'tokenizer.ggml.tokens' is missing");
    if (tokens->n > (uint64_t)vocab)
        return error_set(err, ERR_MISMATCH, "the tokenizer has %llu tokens, the model %d",
                         (unsigned long long)tokens->n, (int)vocab);
    rc = array_get(g, "tokenizer.ggml.scores", GGUF_TYPE_F32, tokens->n, &scores, err);
    if (rc == OK)
        rc = array_get(g, "tokenizer.ggml.token_type", GGUF_TYPE_I32, tokens->n, &types, err);
    if (rc != OK) return rc;
    spec->n = (int32_t)tokens->n;
    rc = arena_reserve(arena, tokens->n * (sizeof(char *) + 4 + 4 + 1) + 4 * 64, err);
    if (rc != OK) return rc;
    int32_t *lens = arena_alloc(arena, sizeof(*lens) * (size_t)spec->n);
    float *score = arena_alloc(arena, sizeof(*score) * (size_t)spec->n);
    uint8_t *type = arena_alloc(arena, (size_t)spec->n);
    spec->pieces = arena_alloc(arena, sizeof(*spec->pieces) * (size_t)spec->n);
    rc = strings_copy(tokens, spec->pieces, lens, arena, err);
    if (rc != OK) return rc;
    if (scores) memcpy(score, scores->data, sizeof(*score) * (size_t)spec->n);
    for (int32_t i = 0; i < spec->n; i++) {
        int32_t value = 1;
        if (types) memcpy(&value, types->data + 4 * (size_t)i, sizeof(value));
        if (value < 1 || value > 6)
            return error_set(err, ERR_FORMAT, "token %d has type %d", (int)i, (int)value);
        type[i] = (uint8_t)value;
    }
    spec->lens = lens;
    spec->scores = score;
    spec->types = type;
    return OK;
}

static int merges_read(const struct gguf *g, struct tokenizer_spec *spec, struct arena *arena,
                       struct error *err) {
    const struct gguf_kv *merges;
    int rc = array_get(g, "tokenizer.ggml.merges", GGUF_TYPE_STRING, 0, &merges, err);
    if (rc != OK) return rc;
    if (!merges) return error_set(err, ERR_FORMAT, "metadata 'tokenizer.ggml.merges' is missing");
    spec->n_merges = (int32_t)merges->n;
    rc = arena_reserve(arena, merges->n * (sizeof(char *) + 4) + 2 * 64, err);
    if (rc != OK) return rc;
    int32_t *lens = arena_alloc(arena, sizeof(*lens) * (size_t)merges->n);
    spec->merges = arena_alloc(arena, sizeof(*spec->merges) * (size_t)merges->n);
    rc = strings_copy(merges, spec->merges, lens, arena, err);
    if (rc != OK) return rc;
    for (int32_t i = 0; i < spec->n_merges; i++)
        if (strlen(spec->merges[i]) != (size_t)lens[i])
            return error_set(err, ERR_FORMAT, "merge %d holds a NUL byte", (int)i);
    return OK;
}

/* *out is -1 when the key is absent, negative, or UINT32_MAX, which some writers use for "none". */
static int token_id_read(const struct gguf *g, const char *key, int32_t n, int32_t *out,
                         struct error *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t value = -1;
    *out = -1;
    if (!kv) return OK;
    if (!kv_get_integer(kv, &value) || (value >= n && value != UINT32_MAX))
        return error_set(err, ERR_FORMAT, "metadata '%s' is not the id of a token", key);
    if (value >= 0 && value < n) *out = (int32_t)value;
    return OK;
}

/* For a unigram model's normalisation llama.cpp has a table and a flag. Other normalizers are
 * stored under Shoal's key shoal.tokenizer.normalizer. */
static int normalizer_read(const struct gguf *g, struct tokenizer_spec *spec, struct arena *arena,
                           struct error *err) {
    const struct gguf_kv *table = gguf_find(g, "tokenizer.ggml.precompiled_charsmap");
    bool one_space = false;
    spec->normalizer = kv_get_text(gguf_find(g, "shoal.tokenizer.normalizer"), arena);
    if (spec->kind != TOKENIZER_UNIGRAM || spec->normalizer) return OK;
    int rc = bool_get(g, "tokenizer.ggml.remove_extra_whitespaces", &one_space, err);
    if (rc != OK) return rc;
    if (table && (table->type != GGUF_TYPE_ARRAY ||
                  (table->element != GGUF_TYPE_U8 && table->element != GGUF_TYPE_I8)))
        return error_set(err, ERR_FORMAT,
                         "metadata 'tokenizer.ggml.precompiled_charsmap' is not an array of bytes");
    char *text =
        normalizer_from_sentencepiece(table ? table->data : NULL, table ? table->n : 0, one_space);
    if (text) spec->normalizer = arena_strdup(arena, text);
    free(text);
    return OK;
}

static int tokenizer_settings_read(const struct gguf *g, struct tokenizer_spec *spec,
                                   struct arena *arena, struct error *err) {
    const char *pattern = kv_get_text(gguf_find(g, "shoal.tokenizer.pre_pattern"), arena);
    const char *pre = kv_get_text(gguf_find(g, "tokenizer.ggml.pre"), arena);
    spec->pre = pattern ? pattern : spec->kind != TOKENIZER_BPE ? NULL : pre ? pre : "default";
    spec->ignore_merges = pre_ignores_merges(spec->pre);
    spec->add_bos = spec->kind == TOKENIZER_SPM || spec->ignore_merges;
    spec->add_eos = spec->kind == TOKENIZER_UNIGRAM;
    spec->add_space_prefix = spec->kind == TOKENIZER_SPM;
    int rc = token_id_read(g, "tokenizer.ggml.bos_token_id", spec->n, &spec->bos, err);
    if (rc == OK) rc = token_id_read(g, "tokenizer.ggml.eos_token_id", spec->n, &spec->eos, err);
    if (rc == OK)
        rc = token_id_read(g, "tokenizer.ggml.unknown_token_id", spec->n, &spec->unk, err);
    if (rc == OK) rc = bool_get(g, "tokenizer.ggml.add_bos_token", &spec->add_bos, err);
    if (rc == OK) rc = bool_get(g, "tokenizer.ggml.add_eos_token", &spec->add_eos, err);
    if (rc == OK) rc = bool_get(g, "tokenizer.ggml.add_space_prefix", &spec->add_space_prefix, err);
    if (rc == OK) rc = normalizer_read(g, spec, arena, err);
    spec->user_pieces = spec->kind == TOKENIZER_UNIGRAM;
    if (rc == OK) rc = bool_get(g, "shoal.tokenizer.user_pieces", &spec->user_pieces, err);
    if (rc == OK) rc = bool_get(g, "shoal.tokenizer.split_words", &spec->split_words, err);
    if (rc == OK) rc = bool_get(g, "shoal.tokenizer.ignore_merges", &spec->ignore_merges, err);
    return rc;
}

/* *out stays NULL when the file has no tokenizer. */
static int tokenizer_read(const struct gguf *g, int32_t vocab, struct tokenizer **out,
                          struct error *err) {
    const struct gguf_kv *model = gguf_find(g, "tokenizer.ggml.model");
    *out = NULL;
    if (!model || kv_equals(model, "none") || kv_equals(model, "no_vocab")) return OK;
    struct tokenizer_spec spec = {.kind = kv_equals(model, "gpt2") ? TOKENIZER_BPE
                                          : kv_equals(model, "t5") ? TOKENIZER_UNIGRAM
                                                                   : TOKENIZER_SPM};
    struct arena arena = {0};
    int rc = OK;
    if (spec.kind == TOKENIZER_SPM && !kv_equals(model, "llama"))
        rc = error_set(err, ERR_MISMATCH,
                       "tokenizer kind '%.*s' is not supported (supported: gpt2, llama, t5)",
                       model->type == GGUF_TYPE_STRING ? (int)MIN(model->n, 32) : 0,
                       (const char *)model->data);
    if (rc == OK) rc = pieces_read(g, vocab, &spec, &arena, err);
    if (rc == OK && spec.kind == TOKENIZER_BPE) rc = merges_read(g, &spec, &arena, err);
    if (rc == OK) rc = tokenizer_settings_read(g, &spec, &arena, err);
    if (rc == OK && !(*out = tokenizer_new(&spec, err))) rc = err->code;
    arena_release(&arena);
    return rc;
}

struct tokenizer *gguf_tokenizer_open(const char *path, struct error *err) {
    struct gguf g;
    struct tokenizer *tok = NULL;
    int rc = gguf_open(&g, path, err);
    if (rc == OK) rc = tokenizer_read(&g, INT32_MAX, &tok, err);
    if (rc == OK && !tok) rc = error_set(err, ERR_MISSING, "it holds no tokenizer");
    gguf_close(&g);
    if (rc != OK) error_wrap(err, "'%s'", path);
    return tok;
}

/* Converts the tensor rope_freqs.weight, by which the rotary frequencies are divided, to
 * c->rope_scaling, and removes it from the list. If all values are 1, there is no scaling; other
 * values must be a scaling that rope_scaling_recover knows. */
static int rope_freqs_read(struct gguf *g, struct model_config *c, struct error *err) {
    const struct tensor_info *t = tensors_find(g->tensors, g->n_tensors, "rope_freqs.weight");
    if (!t) return OK;
    size_t size = sizeof(float) * (size_t)c->head_dim / 2;
    bool fits = t->type == TENSOR_F32 && t->n_dims == 1 && t->size == size &&
                c->rope_scaling.kind == ROPE_DEFAULT;
    float *divisors = xcalloc(1, size);
    if (fits) memcpy(divisors, t->data, size);
    fits = fits && rope_scaling_recover(c, divisors);
    free(divisors);
    if (!fits)
        return error_set(err, ERR_MISMATCH,
                         "tensor 'rope_freqs.weight' scales the rotary positions in a way that is "
                         "not supported (llama3's is, with frequency factors 1 and 4)");
    int index = (int)(t - g->tensors);
    free(g->tensors[index].name);
    memmove(&g->tensors[index], &g->tensors[index + 1],
            sizeof(*g->tensors) * (size_t)(g->n_tensors - index - 1));
    g->n_tensors--;
    return OK;
}

struct model *gguf_model_open(const char *path, enum numeric_class cls, bool mapped,
                              struct error *err) {
    struct gguf g;
    struct model *m = model_alloc(path, cls);
    m->mapped = mapped;
    int rc = gguf_open(&g, path, err);
    if (rc == OK) rc = config_read(&g, &m->config, err);
    if (rc == OK) rc = rope_freqs_read(&g, &m->config, err);
    if (rc == OK)
        rc = model_bind(m, g.tensors, g.n_tensors, NAMING_GGUF, m->config.arch->gguf_permuted, err);
    if (rc == OK) rc = tokenizer_read(&g, m->config.vocab_size, &m->tok, err);
    if (rc == OK) {
        m->chat_template = kv_get_text(gguf_find(&g, "tokenizer.chat_template"), &m->arena);
        model_read_source(m, kv_get_text(gguf_find(&g, KEY_SOURCE), &m->arena));
        model_add_map(m, &g.map);
    }
    gguf_close(&g);
    if (rc == OK) return m;
    error_wrap(err, "'%s'", path);
    model_close(m);
    return NULL;
}

int gguf_model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                       struct error *err) {
    struct gguf g;
    int rc = gguf_open(&g, path, err);
    if (rc == OK) rc = config_read(&g, &out->config, err);
    if (rc == OK) {
        tensors_measure(g.tensors, g.n_tensors, cls, out->config.arch->gguf_permuted, out);
        out->type = tensors_main_type(g.tensors, g.n_tensors);
        out->tokenizer = g.map.size - MIN(g.map.size, out->file);
    }
    gguf_close(&g);
    return rc == OK ? OK : error_wrap(err, "'%s'", path);
}

struct kv_writer {
    struct buf text;
    uint64_t n;
};

static void buf_add_string(struct buf *b, const char *bytes, uint64_t len) {
    buf_add(b, &len, sizeof(len));
    buf_add(b, bytes, (size_t)len);
}

/* Adds a key, its type and, for a scalar, its value. The caller appends the value of a string or an
 * array. */
static void kv_add(struct kv_writer *o, const char *key, uint32_t type, const void *value) {
    buf_add_string(&o->text, key, strlen(key));
    buf_add(&o->text, &type, sizeof(type));
    if (type < GGUF_N_TYPES && gguf_type_sizes[type])
        buf_add(&o->text, value, gguf_type_sizes[type]);
    o->n++;
}

static void kv_add_u32(struct kv_writer *o, const char *key, uint32_t value) {
    kv_add(o, key, GGUF_TYPE_U32, &value);
}

static void kv_add_bool(struct kv_writer *o, const char *key, bool value) {
    uint8_t byte = value;
    kv_add(o, key, GGUF_TYPE_BOOL, &byte);
}

static void kv_add_text(struct kv_writer *o, const char *key, const char *value) {
    kv_add(o, key, GGUF_TYPE_STRING, NULL);
    buf_add_string(&o->text, value, strlen(value));
}

static void kv_add_array(struct kv_writer *o, const char *key, uint32_t element, uint64_t n) {
    kv_add(o, key, GGUF_TYPE_ARRAY, NULL);
    buf_add(&o->text, &element, sizeof(element));
    buf_add(&o->text, &n, sizeof(n));
}

static void arch_kv_add_f32(struct kv_writer *o, const struct model_config *c, const char *suffix,
                            float value) {
    char key[96];
    snprintf(key, sizeof(key), "%s.%s", c->arch->gguf, suffix);
    kv_add(o, key, GGUF_TYPE_F32, &value);
}

static void arch_kv_add_u32(struct kv_writer *o, const struct model_config *c, const char *suffix,
                            int32_t value) {
    char key[96];
    snprintf(key, sizeof(key), "%s.%s", c->arch->gguf, suffix);
    kv_add_u32(o, key, (uint32_t)value);
}

/* llama3's scaling is stored as the tensor rope_freqs.weight instead. */
static void rope_scaling_write(struct kv_writer *o, const struct model_config *c) {
    const struct rope_scaling *s = &c->rope_scaling;
    char key[96];
    if (s->kind != ROPE_LINEAR && s->kind != ROPE_YARN) return;
    snprintf(key, sizeof(key), "%s.rope.scaling.type", c->arch->gguf);
    kv_add_text(o, key, rope_kind_name(s->kind));
    arch_kv_add_f32(o, c, "rope.scaling.factor", s->factor);
    if (s->kind == ROPE_YARN)
        arch_kv_add_u32(o, c, "rope.scaling.original_context_length", s->original_len);
}

static void sliding_window_pattern_write(struct kv_writer *o, const struct model_config *c) {
    static const char suffix[] = "attention.sliding_window_pattern";
    int32_t period = sliding_window_pattern(c);
    char key[96];
    if (period > 0) {
        arch_kv_add_u32(o, c, suffix, period);
        return;
    }
    snprintf(key, sizeof(key), "%s.%s", c->arch->gguf, suffix);
    kv_add_array(o, key, GGUF_TYPE_BOOL, (uint64_t)c->n_layers);
    for (int32_t l = 0; l < c->n_layers; l++)
        buf_add(&o->text, &(uint8_t){layer_is_sliding(c, l)}, 1);
}

static void gemma_write(struct kv_writer *o, const struct model_config *c) {
    if (c->sliding_window) {
        arch_kv_add_u32(o, c, "attention.sliding_window", c->sliding_window);
        sliding_window_pattern_write(o, c);
    }
    arch_kv_add_f32(o, c, "rope.freq_base_swa", c->rope_local_theta);
    if (c->query_pre_attn_scalar == gemma_default_query_scalar(c)) return;
    kv_add(o, "shoal.query_pre_attn_scalar", GGUF_TYPE_F32, &c->query_pre_attn_scalar);
    log_info(
        "GGUF has no key for 'query_pre_attn_scalar' %g; other programs will scale scores by the "
        "head's width",
        (double)c->query_pre_attn_scalar);
}

static void config_write(struct kv_writer *o, const struct model *m, const struct quant_scheme *q) {
    const struct model_config *c = &m->config;
    const struct {
        const char *suffix;
        int32_t value;
    } sizes[] = {
        {"block_count", c->n_layers},          {"context_length", c->max_seq_len},
        {"embedding_length", c->d_model},      {"feed_forward_length", c->d_ff},
        {"attention.head_count", c->n_heads},  {"attention.head_count_kv", c->n_kv_heads},
        {"attention.key_length", c->head_dim}, {"attention.value_length", c->head_dim},
        {"rope.dimension_count", c->head_dim}, {"vocab_size", c->vocab_size},
    };
    char key[96];
    kv_add_text(o, "general.architecture", c->arch->gguf);
    kv_add_text(o, "general.type", "model");
    kv_add_text(o, "general.name", m->name);
    kv_add_u32(o, "general.file_type", quant_file_type(q));
    kv_add_u32(o, "general.quantization_version", 2);
    if (m->source_hash[0]) kv_add_text(o, KEY_SOURCE, m->source_hash);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        snprintf(key, sizeof(key), "%s.%s", c->arch->gguf, sizes[i].suffix);
        kv_add_u32(o, key, (uint32_t)sizes[i].value);
    }
    arch_kv_add_f32(o, c, "attention.layer_norm_rms_epsilon", c->rms_norm_eps);
    arch_kv_add_f32(o, c, "rope.freq_base", c->rope_theta);
    rope_scaling_write(o, c);
    if (c->arch->hf_names == HF_GEMMA) gemma_write(o, c);
}

/* llama.cpp assumes that the number of tokens is the number of embedding rows, so rows beyond the
 * tokenizer's vocabulary get unused tokens with placeholder names. */
static void pieces_write(struct kv_writer *o, const struct tokenizer_spec *s, int32_t vocab) {
    kv_add_array(o, "tokenizer.ggml.tokens", GGUF_TYPE_STRING, (uint64_t)vocab);
    for (int32_t i = 0; i < vocab; i++) {
        char pad[32];
        if (i < s->n)
            buf_add_string(&o->text, s->pieces[i], (uint64_t)s->lens[i]);
        else
            buf_add_string(&o->text, pad, (uint64_t)snprintf(pad, sizeof(pad), "[PAD%d]", (int)i));
    }
    if (s->kind != TOKENIZER_BPE) {
        kv_add_array(o, "tokenizer.ggml.scores", GGUF_TYPE_F32, (uint64_t)vocab);
        for (int32_t i = 0; i < vocab; i++) {
            float score = i < s->n && s->scores ? s->scores[i] : 0.0f;
            buf_add(&o->text, &score, sizeof(score));
        }
    }
    enum { NORMAL = 1, UNUSED = 5 };
    kv_add_array(o, "tokenizer.ggml.token_type", GGUF_TYPE_I32, (uint64_t)vocab);
    for (int32_t i = 0; i < vocab; i++) {
        int32_t type = i >= s->n ? UNUSED : s->types ? s->types[i] : NORMAL;
        buf_add(&o->text, &type, sizeof(type));
    }
}

static void token_id_write(struct kv_writer *o, const char *key, int32_t id) {
    if (id >= 0) kv_add_u32(o, key, (uint32_t)id);
}

static void normalizer_write(struct kv_writer *o, const struct model *m) {
    const struct tokenizer_spec *s = tokenizer_get_spec(m->tok);
    size_t len = 0;
    char *representable = NULL;
    if (s->kind == TOKENIZER_UNIGRAM) {
        uint8_t *table = s->normalizer ? normalizer_charsmap(s->normalizer, &len) : NULL;
        char *collapsing = normalizer_from_sentencepiece(table, len, true);
        bool one_space = s->normalizer && strcmp(collapsing, s->normalizer) == 0;
        representable = normalizer_from_sentencepiece(table, len, one_space);
        kv_add_text(o, "tokenizer.ggml.pre", "default");
        kv_add_bool(o, "tokenizer.ggml.remove_extra_whitespaces", one_space);
        if (len > 0) kv_add_array(o, "tokenizer.ggml.precompiled_charsmap", GGUF_TYPE_U8, len);
        if (len > 0) buf_add(&o->text, table, len);
        free(collapsing);
        free(table);
    }
    if (s->kind == TOKENIZER_UNIGRAM && !s->user_pieces)
        kv_add_bool(o, "shoal.tokenizer.user_pieces", false);
    if (s->split_words) kv_add_bool(o, "shoal.tokenizer.split_words", true);
    if (s->kind != TOKENIZER_BPE && *s->pre) kv_add_text(o, "shoal.tokenizer.pre_pattern", s->pre);
    if (s->normalizer && (!representable || strcmp(representable, s->normalizer) != 0)) {
        kv_add_text(o, "shoal.tokenizer.normalizer", s->normalizer);
        log_info("'%s': other programs will not normalise text as this tokenizer requires",
                 m->name);
    }
    free(representable);
}

static void tokenizer_write(struct kv_writer *o, const struct model *m) {
    if (!m->tok) {
        kv_add_text(o, "tokenizer.ggml.model", "none");
        return;
    }
    const struct tokenizer_spec *s = tokenizer_get_spec(m->tok);
    static const char *const kinds[] = {
        [TOKENIZER_BPE] = "gpt2", [TOKENIZER_SPM] = "llama", [TOKENIZER_UNIGRAM] = "t5"};
    kv_add_text(o, "tokenizer.ggml.model", kinds[s->kind]);
    const char *pre = s->pre && *s->pre ? s->pre : "default";
    if (s->kind == TOKENIZER_BPE)
        kv_add_text(o, "tokenizer.ggml.pre", pre_is_pattern(pre) ? "gpt-2" : pre);
    pieces_write(o, s, m->config.vocab_size);
    if (s->kind == TOKENIZER_BPE) {
        kv_add_array(o, "tokenizer.ggml.merges", GGUF_TYPE_STRING, (uint64_t)s->n_merges);
        for (int32_t i = 0; i < s->n_merges; i++)
            buf_add_string(&o->text, s->merges[i], strlen(s->merges[i]));
    }
    token_id_write(o, "tokenizer.ggml.bos_token_id", s->bos);
    token_id_write(o, "tokenizer.ggml.eos_token_id", s->eos);
    token_id_write(o, "tokenizer.ggml.unknown_token_id", s->unk);
    kv_add_bool(o, "tokenizer.ggml.add_bos_token", s->add_bos);
    if (s->add_eos || s->kind == TOKENIZER_UNIGRAM)
        kv_add_bool(o, "tokenizer.ggml.add_eos_token", s->add_eos);
    kv_add_bool(o, "tokenizer.ggml.add_space_prefix", s->add_space_prefix);
    normalizer_write(o, m);
    if (m->chat_template) kv_add_text(o, "tokenizer.chat_template", m->chat_template);
    if (s->kind == TOKENIZER_BPE && pre_is_pattern(pre)) {
        kv_add_text(o, "shoal.tokenizer.pre_pattern", pre);
        log_info(
            "'%s': the pre-tokenizer pattern has no name in GGUF; other programs will split text "
            "as gpt-2 does",
            m->name);
    }
    if (s->ignore_merges != (s->kind == TOKENIZER_BPE && pre_ignores_merges(pre)))
        kv_add_bool(o, "shoal.tokenizer.ignore_merges", s->ignore_merges);
}

static void tensor_entry_write(struct buf *b, const char *name, const struct weight_info *w,
                               uint32_t type, uint64_t *offset) {
    uint32_t n_dims = w->is_vector ? 1 : 2;
    uint64_t dims[2] = {(uint64_t)w->k, (uint64_t)w->n};
    buf_add_string(b, name, strlen(name));
    buf_add(b, &n_dims, sizeof(n_dims));
    buf_add(b, dims, sizeof(*dims) * n_dims);
    buf_add(b, &type, sizeof(type));
    buf_add(b, offset, sizeof(*offset));
    *offset = align_up(*offset + (uint64_t)w->n * tensor_row_bytes(type, w->k), 32);
}

static bool has_rope_freqs(const struct model_config *c) {
    return c->rope_scaling.kind == ROPE_LLAMA3;
}

static void weight_table_write(struct buf *b, const struct model_config *c,
                               const struct quant_scheme *q) {
    uint64_t offset = 0;
    int n_fallback = 0;
    if (has_rope_freqs(c))
        tensor_entry_write(b, "rope_freqs.weight",
                           &(struct weight_info){.is_vector = true, .n = 1, .k = c->head_dim / 2},
                           TENSOR_F32, &offset);
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_GGUF, &w);
        enum tensor_type t = quant_weight_type(q, c, &w);
        tensor_entry_write(b, w.name, &w, t, &offset);
        if (!w.is_vector && w.k % tensor_type_block_size(q->type)) n_fallback++;
    }
    if (n_fallback)
        log_info(
            "%d tensors fall back to another type: their rows are not multiples of the %d that %s "
            "needs",
            n_fallback, tensor_type_block_size(q->type), tensor_type_name(q->type));
}

static int padding_write(struct atomic_file *w, struct error *err) {
    static const uint8_t zeros[32];
    return atomic_file_write(w, zeros, (size_t)(align_up(w->pos, 32) - w->pos), err);
}

/* The state of writing rows of one weight to a file. */
struct row_encoding {
    const struct model *m;
    const struct weight_info *w;
    enum tensor_type type;
    const int32_t *order; /* source row of each output row, or NULL: the same */
    int64_t first;        /* first output row of this write */
    size_t max_row_len;   /* floats of the longest row of any weight */
    float *scratch;       /* [threads][max_row_len] */
    uint8_t *out;         /* [ROWS_PER_WRITE][tensor_row_bytes] */
    atomic_bool bad;      /* a row does not pass row_fits */
    bool check;           /* a quantised type to which rows are converted, not copied */
};

/* Scales are f16, which cannot represent larger values or NaN. For rows that were copied, the
 * scratch holds the values of an earlier row, which passed this check. */
static bool row_fits(const struct row_encoding *e, const float *row) {
    if (!e->check) return true;
    for (int64_t i = 0; i < e->w->k; i++)
        if (!(row[i] >= -65504.0f && row[i] <= 65504.0f)) return false;
    return true;
}

static void rows_encode(void *ctx, int64_t begin, int64_t end, int thread) {
    struct row_encoding *e = ctx;
    float *scratch = e->scratch + (size_t)thread * e->max_row_len;
    size_t row_bytes = tensor_row_bytes(e->type, e->w->k);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = e->order ? e->order[e->first + i] : e->first + i;
        bool ok = weight_row(e->m, e->w, row, e->type, scratch, e->out + (size_t)i * row_bytes);
        if (!ok || !row_fits(e, scratch)) atomic_store(&e->bad, true);
    }
}

/* A bias is one row, so the order applies to its elements. */
static void elements_permute(struct row_encoding *e, const int32_t *order) {
    float *v = (float *)(void *)e->out;
    memcpy(e->scratch, v, sizeof(*v) * (size_t)e->w->k);
    for (int64_t i = 0; i < e->w->k; i++) v[i] = e->scratch[order[i]];
}

static int weight_write(struct atomic_file *out, struct row_encoding *e, struct pool *pool,
                        struct progress *p, int64_t *done, struct error *err) {
    const struct weight_info *w = e->w;
    bool permute = w->rope_heads > 0 && e->m->config.arch->gguf_permuted;
    int32_t *order =
        permute ? rope_rows_to_interleaved(w->rope_heads, e->m->config.head_dim) : NULL;
    int rc = OK;
    e->order = w->is_vector ? NULL : order;
    for (e->first = 0; rc == OK && e->first < w->n; e->first += ROWS_PER_WRITE) {
        int64_t n = MIN(ROWS_PER_WRITE, w->n - e->first);
        pool_run(pool, rows_encode, e, n, 1);
        if (order && w->is_vector) elements_permute(e, order);
        if (atomic_load(&e->bad))
            rc = error_set(err, ERR_NUMERIC,
                           "'%s' holds a weight that is not a number or beyond 65504, for which %s "
                           "has no scale",
                           w->name, tensor_type_name(e->type));
        if (rc == OK)
            rc = atomic_file_write(out, e->out, (size_t)n * tensor_row_bytes(e->type, w->k), err);
        weight_evict(e->m, w, e->first, e->first + n);
        *done += n * w->k;
        if (p) progress_update(p, *done, w->name);
    }
    weight_evict(e->m, w, 0, w->n); // pages between two writes, and rows in another order
    free(order);
    return rc == OK ? padding_write(out, err) : rc;
}

static int rope_freqs_write(struct atomic_file *out, const struct model_config *c,
                            struct error *err) {
    int rc = OK;
    for (int32_t i = 0; rc == OK && i < c->head_dim / 2; i++)
        rc = atomic_file_write(out, &(float){rope_divisor(c, i)}, sizeof(float), err);
    return rc == OK ? padding_write(out, err) : rc;
}

static int weights_write(struct atomic_file *out, const struct model *m,
                         const struct quant_scheme *q, struct pool *pool, struct progress *p,
                         struct error *err) {
    const struct model_config *c = &m->config;
    struct row_encoding e = {.m = m};
    struct weight_info w;
    int64_t done = 0;
    int rc = has_rope_freqs(c) ? rope_freqs_write(out, c, err) : OK;
    for (int32_t i = 0; i < weight_count(c); i++) {
        weight_at(c, i, NAMING_GGUF, &w);
        e.max_row_len = MAX(e.max_row_len, (size_t)w.k);
    }
    e.scratch = try_calloc((size_t)pool_size(pool) * e.max_row_len, sizeof(float), err);
    e.out = e.scratch ? try_calloc(ROWS_PER_WRITE, sizeof(float) * (e.max_row_len + 1), err) : NULL;
    if (!e.out) rc = err->code;
    for (int32_t i = 0; rc == OK && i < weight_count(c); i++) {
        weight_at(c, i, NAMING_GGUF, &w);
        e.w = &w;
        e.type = quant_weight_type(q, c, &w);
        const struct matrix *from =
            m->mapped ? weight_matrix((struct model *)(uintptr_t)m, &w) : NULL;
        e.check = tensor_type_is_quantized(e.type) && !(from && from->type == e.type);
        rc = weight_write(out, &e, pool, p, &done, err);
    }
    free(e.out);
    free(e.scratch);
    return rc;
}

static void header_build(struct buf *b, const struct model *m, const struct quant_scheme *q) {
    struct kv_writer o = {0};
    config_write(&o, m, q);
    tokenizer_write(&o, m);
    uint32_t version = 3;
    uint64_t n_tensors = (uint64_t)weight_count(&m->config) + (has_rope_freqs(&m->config) ? 1 : 0);
    buf_puts(b, "GGUF");
    buf_add(b, &version, sizeof(version));
    buf_add(b, &n_tensors, sizeof(n_tensors));
    buf_add(b, &o.n, sizeof(o.n));
    buf_add(b, o.text.data, o.text.len);
    weight_table_write(b, &m->config, q);
    buf_release(&o.text);
}

/* Refuses configurations that the format cannot express or that gguf_open could not read. */
static int gguf_config_check(const struct model_config *c, struct error *err) {
    if (!c->arch->gguf)
        return error_set(err, ERR_MISMATCH,
                         "architecture '%s' has no GGUF form; write a Hugging Face directory "
                         "instead",
                         c->arch->name);
    struct model_config reread = *c;
    float *divisors = xmalloc(sizeof(float) * (size_t)c->head_dim);
    for (int32_t i = 0; i < c->head_dim / 2; i++) divisors[i] = rope_divisor(c, i);
    bool ok = !has_rope_freqs(c) || rope_scaling_recover(&reread, divisors);
    free(divisors);
    return ok ? OK
              : error_set(err, ERR_MISMATCH,
                          "this llama3 rope scaling has no GGUF form that can be read back (its "
                          "frequency factors are not 1 and 4, or its original length no power of "
                          "two); write a Hugging Face directory instead");
}

int model_quantize_gguf(const struct model *m, const char *path, const struct quant_scheme *q,
                        struct pool *pool, struct progress *p, struct error *err) {
    if (gguf_config_check(&m->config, err) != OK) return err->code;
    struct buf header = {0};
    struct atomic_file w;
    header_build(&header, m, q);
    int rc = atomic_file_open(&w, path, err);
    if (rc == OK) rc = atomic_file_write(&w, header.data, header.len, err);
    if (rc == OK) rc = padding_write(&w, err);
    if (rc == OK) rc = weights_write(&w, m, q, pool, p, err);
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    buf_release(&header);
    return rc;
}

int model_write_gguf(const struct model *m, const char *path, enum tensor_type type,
                     struct error *err) {
    const struct quant_scheme q = quant_pure(type);
    return model_quantize_gguf(m, path, &q, NULL, NULL, err);
}

/* An array of integers as JSON; JSON's null for another or a long array. */
static json_t *array_to_json(const struct gguf_kv *kv) {
    enum { MAX_ELEMENTS = 4096 };
    json_t *list = json_array();
    if (kv->n > MAX_ELEMENTS) goto not_represented;
    for (uint64_t i = 0; i < kv->n; i++) {
        const struct gguf_kv item = {.type = kv->element,
                                     .data = kv->data + i * gguf_type_sizes[kv->element]};
        int64_t whole;
        if (!kv_get_integer(&item, &whole)) goto not_represented;
        json_array_append_new(list, json_integer(whole));
    }
    return list;
not_represented:
    json_decref(list);
    return json_null();
}

/* One value as JSON. Returns NULL for text that is not UTF-8. */
static json_t *kv_to_json(const struct gguf_kv *kv) {
    int64_t whole;
    double real;
    if (kv->type == GGUF_TYPE_STRING) return json_stringn((const char *)kv->data, (size_t)kv->n);
    if (kv->type == GGUF_TYPE_BOOL) return json_boolean(*kv->data);
    if (kv->type == GGUF_TYPE_ARRAY) return array_to_json(kv);
    if (kv_get_integer(kv, &whole)) return json_integer(whole);
    return kv_get_number(kv, &real) ? json_real(real) : json_null();
}

int gguf_tensors_open(struct safetensors *st, const char *path, struct error *err) {
    struct gguf g = {0};
    *st = (struct safetensors){0};
    if (file_map_open_copy(&g.map, path, err) != OK || gguf_parse(&g, err) != OK) {
        gguf_close(&g);
        return error_wrap(err, "'%s'", path);
    }
    st->metadata = json_object();
    for (uint64_t i = 0; i < g.n_kv; i++) {
        json_t *value = kv_to_json(&g.kv[i]);
        if (value) json_object_setn_new(st->metadata, g.kv[i].key, (size_t)g.kv[i].key_len, value);
    }
    st->map = g.map;
    st->tensors = g.tensors;
    st->n_tensors = g.n_tensors;
    free(g.kv);
    return OK;
}

static void kv_add_json(struct kv_writer *o, const char *key, const json_t *value) {
    float real = (float)json_real_value(value);
    size_t i;
    const json_t *item;
    CHECK(json_is_string(value) || json_is_number(value) || json_is_array(value));
    if (json_is_array(value)) kv_add_array(o, key, GGUF_TYPE_U32, json_array_size(value));
    json_array_foreach (value, i, item)
        buf_add(&o->text, &(uint32_t){(uint32_t)json_integer_value(item)}, sizeof(uint32_t));
    if (json_is_array(value)) return;
    if (json_is_string(value))
        kv_add_text(o, key, json_string_value(value));
    else if (json_is_integer(value))
        kv_add_u32(o, key, (uint32_t)json_integer_value(value));
    else
        kv_add(o, key, GGUF_TYPE_F32, &real);
}

static void tensor_table_write(struct buf *b, const struct tensor_info *t, int n) {
    uint64_t offset = 0;
    for (int i = 0; i < n; i++) {
        uint32_t n_dims = (uint32_t)t[i].n_dims, type = t[i].type;
        buf_add_string(b, t[i].name, strlen(t[i].name));
        buf_add(b, &n_dims, sizeof(n_dims));
        for (int d = t[i].n_dims - 1; d >= 0; d--) buf_add(b, &t[i].dims[d], sizeof(int64_t));
        buf_add(b, &type, sizeof(type));
        buf_add(b, &offset, sizeof(offset));
        offset = align_up(offset + t[i].size, 32);
    }
}

static void tensors_header_build(struct buf *b, const json_t *metadata, const struct tensor_info *t,
                                 int n) {
    struct kv_writer o = {0};
    struct strings keys = {0};
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)metadata, key, value) strings_add(&keys, key);
    strings_sort(&keys);
    for (int i = 0; i < keys.n; i++)
        kv_add_json(&o, keys.v[i], json_object_get(metadata, keys.v[i]));
    strings_release(&keys);
    uint32_t version = 3;
    uint64_t n_tensors = (uint64_t)n;
    buf_puts(b, "GGUF");
    buf_add(b, &version, sizeof(version));
    buf_add(b, &n_tensors, sizeof(n_tensors));
    buf_add(b, &o.n, sizeof(o.n));
    buf_add(b, o.text.data, o.text.len);
    tensor_table_write(b, t, n);
    buf_release(&o.text);
}

int gguf_tensors_write(const char *path, const json_t *metadata, const struct tensor_info *tensors,
                       int n, struct error *err) {
    struct buf header = {0};
    struct atomic_file w;
    tensors_header_build(&header, metadata, tensors, n);
    int rc = atomic_file_open(&w, path, err);
    if (rc == OK) rc = atomic_file_write(&w, header.data, header.len, err);
    if (rc == OK) rc = padding_write(&w, err);
    for (int i = 0; rc == OK && i < n; i++) {
        rc = atomic_file_write(&w, tensors[i].data, tensors[i].size, err);
        if (rc == OK) rc = padding_write(&w, err);
    }
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    buf_release(&header);
    return rc;
}
