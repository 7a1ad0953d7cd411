/*
 * safetensors: a length word, a JSON header, and tensor bytes; read in place, written canonically.
 *
 *     u64 N | N bytes of JSON | tensor bytes, end to end, to the end of the file
 *
 * This file is independent of models and adapters. F32, F16 and BF16 are the supported element
 * types. BOOL and U8 are read as masks, for callers that can ignore them. Any other type is an
 * error that names it.
 * The format does not guarantee alignment of the data, so readers must not assume any.
 *
 * Invariants after opening: (1) every tensor's bytes are inside the mapping; (2) their sizes follow
 * from shape and type; (3) together they cover the data without hole or overlap; (4) the array is
 * sorted by name.
 */
#include "model/internal.h"

#include <stdlib.h>
#include <string.h>

/* The limit of the reference implementation. */
#define HEADER_MAX 100000000u

static const struct {
    const char *name;
    enum tensor_type type;
    size_t size;
    bool mask;
} dtypes[] = {{"F32", TENSOR_F32, 4, false},
              {"F16", TENSOR_F16, 2, false},
              {"BF16", TENSOR_BF16, 2, false},
              {"BOOL", TENSOR_F32, 1, true},
              {"U8", TENSOR_F32, 1, true}};

static int dtype_find(const char *name) {
    for (int i = 0; i < (int)ARRAY_LEN(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0) return i;
    return -1;
}

/* Sets t->type, t->mask and *size, the bytes of one element. */
static int tensor_dtype(struct tensor_info *t, const json_t *spec, size_t *size,
                        struct error *err) {
    const char *dtype = json_string_value(json_object_get(spec, "dtype"));
    if (!dtype) return error_set(err, ERR_FORMAT, "tensor '%.96s' has no 'dtype'", t->name);
    int index = dtype_find(dtype);
    if (index < 0)
        return error_set(err, ERR_FORMAT,
                         "tensor '%.96s' has dtype '%.16s'; F32, F16 and BF16 can be read", t->name,
                         dtype);
    t->type = dtypes[index].type;
    t->mask = dtypes[index].mask;
    *size = dtypes[index].size;
    return OK;
}

/* Fills dims and t->size, which is the product of the dims and the element size `size`. */
static int tensor_shape(struct tensor_info *t, const json_t *spec, size_t size, struct error *err) {
    const json_t *shape = json_object_get(spec, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > ARRAY_LEN(t->dims))
        return error_set(err, ERR_FORMAT, "tensor '%.96s' has no 'shape' of at most 4 dimensions",
                         t->name);
    t->n_dims = (int)json_array_size(shape);
    t->size = size;
    for (int i = 0; i < t->n_dims; i++) {
        const json_t *dim = json_array_get(shape, (size_t)i);
        t->dims[i] = json_integer_value(dim);
        if (!json_is_integer(dim) || t->dims[i] < 0 ||
            __builtin_mul_overflow(t->size, (size_t)t->dims[i], &t->size))
            return error_set(err, ERR_FORMAT, "tensor '%.96s' has an impossible shape", t->name);
    }
    return OK;
}

/* Sets t->data from the offsets, which must be within `available` bytes and agree with t->size. */
static int tensor_locate(struct tensor_info *t, const json_t *spec, const uint8_t *data,
                         size_t available, struct error *err) {
    const json_t *offsets = json_object_get(spec, "data_offsets");
    const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to))
        return error_set(err, ERR_FORMAT, "tensor '%.96s' has no pair of 'data_offsets'", t->name);
    json_int_t begin = json_integer_value(from), end = json_integer_value(to);
    if (begin < 0 || end < begin || (uint64_t)end > available)
        return error_set(err, ERR_FORMAT,
                         "tensor '%.96s' is outside the file: bytes %lld to %lld of %zu", t->name,
                         (long long)begin, (long long)end, available);
    if ((uint64_t)(end - begin) != t->size)
        return error_set(err, ERR_FORMAT,
                         "tensor '%.96s' has %lld bytes, but its shape and type need %zu", t->name,
                         (long long)(end - begin), t->size);
    t->data = data + begin;
    return OK;
}

static int tensor_read(struct tensor_info *t, const char *name, const json_t *spec,
                       const uint8_t *data, size_t available, struct error *err) {
    t->name = xstrdup(name);
    if (!json_is_object(spec))
        return error_set(err, ERR_FORMAT, "tensor '%.96s' is not described", name);
    size_t size = 0;
    int rc = tensor_dtype(t, spec, &size, err);
    if (rc == OK) rc = tensor_shape(t, spec, size, err);
    if (rc == OK) rc = tensor_locate(t, spec, data, available, err);
    return rc;
}

static int tensor_by_offset(const void *a, const void *b) {
    const struct tensor_info *x = a, *y = b;
    if (x->data != y->data) return (const uint8_t *)x->data < (const uint8_t *)y->data ? -1 : 1;
    /* Empty tensors come before the tensor that begins at the same byte. */
    return x->size < y->size ? -1 : x->size > y->size;
}

/* Checks invariant 3. Leaves the array sorted by offset. */
static int tensors_check_coverage(struct safetensors *st, const uint8_t *data, size_t available,
                                  struct error *err) {
    if (st->n_tensors > 1)
        qsort(st->tensors, (size_t)st->n_tensors, sizeof(*st->tensors), tensor_by_offset);
    const uint8_t *expected = data;
    for (int i = 0; i < st->n_tensors; i++) {
        const struct tensor_info *t = &st->tensors[i];
        if ((const uint8_t *)t->data != expected)
            return error_set(err, ERR_FORMAT, "tensor '%.96s' %s", t->name,
                             (const uint8_t *)t->data < expected ? "overlaps another"
                                                                 : "follows a hole in the data");
        expected += t->size;
    }
    if (expected != data + available)
        return error_set(err, ERR_FORMAT, "%zu bytes follow the last tensor",
                         (size_t)(data + available - expected));
    return OK;
}

static int metadata_read(struct safetensors *st, json_t *metadata, struct error *err) {
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return error_set(err, ERR_FORMAT, "'__metadata__' is not an object");
    json_object_foreach (metadata, key, value)
        if (!json_is_string(value))
            return error_set(err, ERR_FORMAT, "'__metadata__' entry '%.96s' is not a string", key);
    st->metadata = json_incref(metadata);
    return OK;
}

static int header_read(struct safetensors *st, json_t *header, const uint8_t *data,
                       size_t available, struct error *err) {
    if (!json_is_object(header))
        return error_set(err, ERR_FORMAT, "the header is not a JSON object");
    st->tensors = try_calloc(json_object_size(header), sizeof(*st->tensors), err);
    if (!st->tensors) return err->code;
    const char *name;
    json_t *spec;
    int rc = OK;
    json_object_foreach (header, name, spec) {
        rc = strcmp(name, "__metadata__") == 0
                 ? metadata_read(st, spec, err)
                 : tensor_read(&st->tensors[st->n_tensors++], name, spec, data, available, err);
        if (rc != OK) return rc;
    }
    rc = tensors_check_coverage(st, data, available, err);
    tensors_sort(st->tensors, st->n_tensors);
    return rc;
}

static int safetensors_parse(struct safetensors *st, struct error *err) {
    const uint8_t *file = st->map.data;
    uint64_t length = 0;
    if (st->map.size < 8)
        return error_set(err, ERR_FORMAT, "too short to be safetensors: %zu bytes", st->map.size);
    memcpy(&length, file, 8);
    if (length > st->map.size - 8 || length > HEADER_MAX)
        return error_set(err, ERR_FORMAT, "a header of %llu bytes does not fit a file of %zu",
                         (unsigned long long)length, st->map.size);
    json_t *header = json_parse((const char *)file + 8, (size_t)length, "header", err);
    if (!header) return err->code;
    int rc = header_read(st, header, file + 8 + length, st->map.size - 8 - (size_t)length, err);
    json_decref(header);
    return rc;
}

/* Parses the file in st->map; on an error, closes st and adds the path to the message. */
static int mapped_parse(struct safetensors *st, const char *path, struct error *err) {
    if (safetensors_parse(st, err) == OK) return OK;
    safetensors_close(st);
    return error_wrap(err, "'%s'", path);
}

int safetensors_open(struct safetensors *st, const char *path, struct error *err) {
    *st = (struct safetensors){0};
    int rc = file_map_open(&st->map, path, err);
    return rc == OK ? mapped_parse(st, path, err) : rc;
}

int safetensors_read(struct safetensors *st, const char *path, struct error *err) {
    *st = (struct safetensors){0};
    int rc = file_map_open_copy(&st->map, path, err);
    return rc == OK ? mapped_parse(st, path, err) : rc;
}

const struct tensor_info *safetensors_find(const struct safetensors *st, const char *name) {
    return tensors_find(st->tensors, st->n_tensors, name);
}

void safetensors_close(struct safetensors *st) {
    for (int i = 0; i < st->n_tensors; i++) free(st->tensors[i].name);
    free(st->tensors);
    json_decref(st->metadata);
    file_map_close(&st->map);
    *st = (struct safetensors){0};
}

static void json_string_add(struct buf *out, const char *text) {
    json_t *value = json_string(text);
    CHECK(value != NULL); /* names and metadata are UTF-8 */
    char *quoted = json_dumps(value, JSON_ENCODE_ANY);
    CHECK(quoted != NULL);
    buf_puts(out, quoted);
    free(quoted);
    json_decref(value);
}

static void header_tensor_add(struct buf *out, const struct tensor_info *t, const char *dtype,
                              uint64_t begin) {
    json_string_add(out, t->name);
    buf_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", dtype);
    for (int i = 0; i < t->n_dims; i++)
        buf_printf(out, "%s%lld", i ? "," : "", (long long)t->dims[i]);
    buf_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
               (unsigned long long)(begin + t->size));
}

int safetensors_header(const struct tensor_info *tensors, int n, const json_t *metadata,
                       struct buf *out, struct error *err) {
    struct buf text = {0};
    uint64_t offset = 0;
    buf_puts(&text, "{");
    if (metadata && json_object_size(metadata) > 0) {
        char *sorted = json_canonical(metadata);
        buf_printf(&text, "\"__metadata__\":%s%s", sorted, n ? "," : "");
        free(sorted);
    }
    for (int i = 0; i < n; i++) {
        int dtype = 0;
        while (dtype < (int)ARRAY_LEN(dtypes) && dtypes[dtype].type != tensors[i].type) dtype++;
        if (dtype == (int)ARRAY_LEN(dtypes)) {
            buf_release(&text);
            return error_set(
                err, ERR_USAGE,
                "safetensors holds f32, f16 and bf16, not %s; write a GGUF file instead",
                tensor_type_name(tensors[i].type));
        }
        if (i) buf_puts(&text, ",");
        header_tensor_add(&text, &tensors[i], dtypes[dtype].name, offset);
        offset += tensors[i].size;
    }
    buf_puts(&text, "}");
    while (text.len % 8 != 0) buf_puts(&text, " ");
    uint64_t length = text.len;
    buf_add(out, &length, sizeof(length));
    buf_add(out, text.data, text.len);
    buf_release(&text);
    return OK;
}

int safetensors_write(const char *path, const struct tensor_info *tensors, int n,
                      const json_t *metadata, struct error *err) {
    struct buf header = {0};
    struct atomic_file w = {0};
    int rc = safetensors_header(tensors, n, metadata, &header, err);
    if (rc == OK) rc = atomic_file_open(&w, path, err);
    if (rc == OK) rc = atomic_file_write(&w, header.data, header.len, err);
    for (int i = 0; rc == OK && i < n; i++)
        rc = atomic_file_write(&w, tensors[i].data, tensors[i].size, err);
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    buf_release(&header);
    return rc;
}
