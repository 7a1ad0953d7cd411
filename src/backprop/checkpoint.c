/*
 * checkpoint: a trainer's whole state in one file.
 *
 *   "SHOALTRN"  u32 version  u32 header bytes  header (JSON)
 *   for each tensor: f32[n], then its optimizer state
 *   SHA-256 of all bytes before it, as 64 hex characters
 *
 * The header has the fingerprint of the trainer (shape, base, options), the counts of updates, the
 * tensors' names and sizes, the type of keys and values unless it is f32, and the caller's `extra`.
 * Numbers are little-endian, as on every machine that Shoal runs on.
 *
 * Invariants: a checkpoint is saved only when no sample was accumulated since the last update, so
 * it contains no gradient. The whole file is checked before the trainer changes.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC "SHOALTRN"
#define VERSION 2u
#define PREFIX 16
#define TRAILER (HASH_LEN - 1)
#define KV_KEY "kv_cache_dtype"

static json_t *header_new(const struct trainer *t, const json_t *extra) {
    json_t *groups = json_array(), *tensors = json_array();
    for (int i = 0; i < t->n_groups; i++)
        json_array_append_new(groups,
                              json_pack("{s:I,s:f}", "updates", (json_int_t)t->groups[i].updates,
                                        "loss", t->groups[i].loss));
    for (int i = 0; i < t->n_tensors; i++)
        json_array_append_new(tensors,
                              json_pack("[s,I]", t->tensors[i].name, (json_int_t)t->tensors[i].n));
    json_t *header = json_pack("{s:s,s:I,s:o,s:o,s:o}", "fingerprint", t->fingerprint, "updates",
                               (json_int_t)t->updates, "groups", groups, "tensors", tensors,
                               "extra", extra ? json_deep_copy(extra) : json_null());
    if (t->kv_elem != DTYPE_F32)
        json_object_set_new(header, KV_KEY, json_string(dtype_name(t->kv_elem)));
    return header;
}

static int write_hashed(struct atomic_file *w, struct sha256 *h, const void *p, size_t n,
                        struct error *err) {
    sha256_update(h, p, n);
    return atomic_file_write(w, p, n, err);
}

static int state_write(const struct trainer *t, struct atomic_file *w, const char *header,
                       struct error *err) {
    struct sha256 h;
    char hash[HASH_LEN];
    uint32_t numbers[2] = {VERSION, (uint32_t)strlen(header)};
    sha256_init(&h);
    int rc = write_hashed(w, &h, MAGIC, 8, err);
    if (!rc) rc = write_hashed(w, &h, numbers, sizeof numbers, err);
    if (!rc) rc = write_hashed(w, &h, header, numbers[1], err);
    for (int i = 0; !rc && i < t->n_tensors; i++) {
        size_t bytes = (size_t)t->tensors[i].n * sizeof(float);
        rc = write_hashed(w, &h, t->tensors[i].w, bytes, err);
        if (!rc) rc = write_hashed(w, &h, t->moments[i].data, t->moments[i].bytes, err);
    }
    sha256_final(&h, hash);
    return rc ? rc : atomic_file_write(w, hash, TRAILER, err);
}

int trainer_save(const struct trainer *t, const char *path, const json_t *extra,
                 struct error *err) {
    for (int i = 0; i < t->n_groups; i++)
        if (t->groups[i].samples)
            return error_set(err, ERR_STATE, "a trainer can be saved only between updates");
    struct atomic_file w;
    int rc = atomic_file_open(&w, path, err);
    if (rc) return rc;
    json_t *header = header_new(t, extra);
    CHECK(header);
    char *text = json_canonical(header);
    rc = state_write(t, &w, text, err);
    if (!rc) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    free(text);
    json_decref(header);
    return rc;
}

static size_t state_bytes(const struct trainer *t) {
    size_t n = 0;
    for (int i = 0; i < t->n_tensors; i++)
        n += (size_t)t->tensors[i].n * sizeof(float) + t->moments[i].bytes;
    return n;
}

/* The SHA-256 of all bytes but the trailer. Pages that were read are evicted: the file is as large
 * as the trainer. */
static void file_hash(const struct file_map *map, char hash[HASH_LEN]) {
    const size_t size = map->size - TRAILER, step = (size_t)4 << 20;
    struct sha256 h;
    sha256_init(&h);
    for (size_t pos = 0; pos < size; pos += step) {
        size_t n = MIN(size - pos, step);
        sha256_update(&h, map->data + pos, n);
        file_map_evict(map->data + pos, n);
    }
    sha256_final(&h, hash);
}

/* Checks magic, version and lengths, and sets *header_bytes. */
static int prefix_check(const struct file_map *map, const char *path, size_t *header_bytes,
                        struct error *err) {
    uint32_t numbers[2];
    if (map->size < PREFIX + TRAILER || memcmp(map->data, MAGIC, 8))
        return error_set(err, ERR_FORMAT, "'%s' is not a training checkpoint", path);
    memcpy(numbers, map->data + 8, sizeof numbers);
    if (numbers[0] != VERSION)
        return error_set(err, ERR_FORMAT, "checkpoint '%s' has version %u; this program reads %u",
                         path, numbers[0], VERSION);
    *header_bytes = numbers[1];
    return OK;
}

static int damaged(const char *path, struct error *err) {
    return error_set(err, ERR_FORMAT,
                     "checkpoint '%s' is damaged or cut short: its checksum does not fit", path);
}

/* Checks magic, version, checksum and lengths. Returns the parsed header (the caller decrefs it)
 * and sets *at to the offset of the tensors; NULL on an error. */
static json_t *file_check(const struct file_map *map, const char *path, size_t *at,
                          struct error *err) {
    size_t header;
    char hash[HASH_LEN];
    if (prefix_check(map, path, &header, err) != OK) return NULL;
    file_hash(map, hash);
    if (memcmp(hash, map->data + map->size - TRAILER, TRAILER) ||
        header > map->size - PREFIX - TRAILER) {
        damaged(path, err);
        return NULL;
    }
    *at = PREFIX + header;
    return json_parse((const char *)map->data + PREFIX, header, path, err);
}

static bool tensors_match(const struct trainer *t, const json_t *tensors) {
    if (!json_is_array(tensors) || json_array_size(tensors) != (size_t)t->n_tensors) return false;
    for (int i = 0; i < t->n_tensors; i++) {
        const json_t *row = json_array_get(tensors, (size_t)i);
        const char *name = json_string_value(json_array_get(row, 0));
        if (!name || strcmp(name, t->tensors[i].name)) return false;
        if (json_integer_value(json_array_get(row, 1)) != t->tensors[i].n) return false;
    }
    return true;
}

/* Checks that the file belongs to this trainer; `bytes` is the size of the tensors in the file. */
static int header_check(const struct trainer *t, const json_t *header, const char *path,
                        size_t bytes, struct error *err) {
    const char *fingerprint = json_string_value(json_object_get(header, "fingerprint"));
    const json_t *groups = json_object_get(header, "groups");
    if (!tensors_match(t, json_object_get(header, "tensors")) ||
        json_array_size(groups) != (size_t)t->n_groups)
        return error_set(err, ERR_MISMATCH,
                         "checkpoint '%s' holds other tensors than this run trains", path);
    if (!fingerprint || strcmp(fingerprint, t->fingerprint))
        return error_set(
            err, ERR_MISMATCH,
            "checkpoint '%s' was made with another base or other options; remove it to "
            "start again",
            path);
    if (bytes != state_bytes(t))
        return error_set(err, ERR_FORMAT,
                         "checkpoint '%s' has %zu bytes of numbers; %zu are needed", path, bytes,
                         state_bytes(t));
    return OK;
}

static void state_read(struct trainer *t, const uint8_t *p, const json_t *header) {
    trainer_zero_grad(t);
    for (int i = 0; i < t->n_tensors; i++) {
        size_t bytes = (size_t)t->tensors[i].n * sizeof(float);
        memcpy(t->tensors[i].w, p, bytes);
        memcpy(t->moments[i].data, p + bytes, t->moments[i].bytes);
        file_map_evict(p, bytes + t->moments[i].bytes);
        p += bytes + t->moments[i].bytes;
    }
    for (int i = 0; i < t->n_groups; i++) {
        const json_t *row = json_array_get(json_object_get(header, "groups"), (size_t)i);
        struct param_group *g = &t->groups[i];
        g->updates = json_integer_value(json_object_get(row, "updates"));
        g->loss = json_number_value(json_object_get(row, "loss"));
        g->samples = 0;
        g->nll = g->count = 0;
    }
    t->updates = json_integer_value(json_object_get(header, "updates"));
    t->tokens_since_update = t->targets_since_update = 0;
    t->derived_stale = true;
}

int trainer_load(struct trainer *t, const char *path, json_t **extra, struct error *err) {
    struct file_map map;
    size_t at = 0;
    int rc = file_map_open(&map, path, err);
    if (rc) return rc;
    json_t *header = file_check(&map, path, &at, err);
    rc = header ? header_check(t, header, path, map.size - TRAILER - at, err) : err->code;
    if (!rc) {
        state_read(t, map.data + at, header);
        if (extra) *extra = json_incref(json_object_get(header, "extra"));
    }
    json_decref(header);
    file_map_close(&map);
    return rc;
}

int checkpoint_kv_dtype(const char *path, enum dtype *out, struct error *err) {
    struct file_map map;
    size_t bytes;
    int rc = file_map_open(&map, path, err);
    if (rc != OK) return rc;
    rc = prefix_check(&map, path, &bytes, err);
    if (rc == OK && bytes > map.size - PREFIX - TRAILER) rc = damaged(path, err);
    json_t *header =
        rc == OK ? json_parse((const char *)map.data + PREFIX, bytes, path, err) : NULL;
    if (rc == OK && !header) rc = err->code;
    const json_t *name = json_object_get(header, KV_KEY);
    *out = DTYPE_F32;
    if (name) rc = dtype_parse(json_string_value(name) ? json_string_value(name) : "", out, err);
    json_decref(header);
    file_map_close(&map);
    return rc;
}
