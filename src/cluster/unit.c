/*
 * unit: see unit.h.
 */
#define _GNU_SOURCE
#include "cluster/unit.h"

#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>

static const size_t FILE_MAX = (size_t)4 << 30; // limit of the files of an adapter

/* identity */

void unit_identity(const struct engine *e, const struct model *m, char out[HASH_LEN]) {
    char text[HASH_LEN + 128];
    int n = snprintf(text, sizeof text, "%s %s kv %s lora %s", m->hash, numeric_class_name(m->cls),
                     dtype_name(engine_kv_elem(e)), dtype_name(engine_lora_elem(e)));
    sha256_bytes(text, (size_t)n, out);
}

void unit_id(struct engine_request *const *calls, int n, const char *identity, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    for (int i = 0; i < n; i++) {
        char key[HASH_LEN];
        engine_request_key(calls[i], identity, NUMERIC_EXACT, key); // the identity has the class
        sha256_update(&h, key, HASH_LEN);
    }
    sha256_final(&h, out);
}

/* calls */

static void json_write(json_t *v, struct buf *out) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    buf_puts(out, text);
    free(text);
    json_decref(v);
}

void unit_calls_write(struct engine_request *const *calls, int n, struct buf *out) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:o,s:o}", "inputs", record_inputs_json(calls[i]),
                                              "adapters", record_adapters_json(calls[i], NULL, 0)));
    json_write(list, out);
}

static const struct json_limits unit_limits = {.depth = 16, .cost = (size_t)1 << 30};

static json_t *list_parse(const uint8_t *data, size_t len, const char *what, struct error *err) {
    struct json_limits left = unit_limits;
    json_t *list = json_parse_limited((const char *)data, len, what, &left, err);
    if (list && json_is_array(list)) return list;
    if (list) error_set(err, ERR_FORMAT, "%s are no list", what);
    json_decref(list);
    return NULL;
}

/* Reads the weights and noise of a call's adapters; the adapters themselves are set later. */
static int adapters_parse(const json_t *list, struct weighted_adapter *mix,
                          struct engine_request *r, struct error *err) {
    size_t n = json_array_size(list), i;
    const json_t *term;
    if (!json_is_array(list) || n > ENGINE_MIX_MAX)
        return error_set(err, ERR_FORMAT, "a call has wrong adapters");
    bool mixed = n > 0 && json_object_get(json_array_get(list, 0), "weight");
    json_array_foreach (list, i, term) {
        const json_t *noise = json_object_get(term, "noise");
        mix[i] = (struct weighted_adapter){.weight = (float)json_get_number(term, "weight")};
        if (noise) {
            mix[i].noise.seed = (uint64_t)json_integer_value(json_object_get(noise, "seed"));
            mix[i].noise.member = (uint32_t)json_integer_value(json_object_get(noise, "member"));
        } else if (!hash_is_valid(json_get_string(term, "hash"))) {
            return error_set(err, ERR_FORMAT, "an adapter of a call has no hash");
        }
        if (mixed != (json_object_get(term, "weight") != NULL) || (!mixed && (noise || n > 1)))
            return error_set(err, ERR_FORMAT, "a call has wrong adapters");
    }
    r->mix = mixed ? mix : NULL;
    r->n_mix = mixed ? (int32_t)n : 0;
    return OK;
}

int unit_calls_parse(const uint8_t *data, size_t len, struct unit_calls *out, struct error *err) {
    *out = (struct unit_calls){.json = list_parse(data, len, "the calls", err)};
    size_t n = json_array_size(out->json);
    if (!out->json) return err->code;
    if (n == 0 || n > UNIT_CALLS_MAX)
        return error_set(err, ERR_FORMAT, "a unit has 1 to %d calls", UNIT_CALLS_MAX);
    out->v = xcalloc(n, sizeof *out->v);
    out->mixes = xcalloc(n, sizeof *out->mixes);
    out->grammars = xcalloc(n, sizeof *out->grammars);
    int rc = OK;
    for (; rc == OK && out->n < (int)n; out->n++) {
        const json_t *call = json_array_get(out->json, (size_t)out->n);
        struct engine_request *r = &out->v[out->n];
        rc = record_inputs_parse(json_object_get(call, "inputs"), &out->arena, r,
                                 &out->grammars[out->n], err);
        if (rc == OK)
            rc = adapters_parse(json_object_get(call, "adapters"), out->mixes[out->n], r, err);
    }
    return rc;
}

static const json_t *call_adapters(const struct unit_calls *u, int i) {
    return json_object_get(json_array_get(u->json, (size_t)i), "adapters");
}

static bool strings_have(const struct strings *s, const char *text) {
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->v[i], text) == 0) return true;
    return false;
}

void unit_calls_adapters(const struct unit_calls *u, struct strings *hashes) {
    for (int i = 0; i < u->n; i++) {
        const json_t *term;
        size_t k;
        json_array_foreach (call_adapters(u, i), k, term) {
            const char *hash = json_get_string(term, "hash");
            if (*hash && !strings_have(hashes, hash)) strings_add(hashes, hash);
        }
    }
}

bool unit_calls_set_adapters(struct unit_calls *u, struct adapter *(*find)(void *ctx, const char *),
                             void *ctx) {
    for (int i = 0; i < u->n; i++) {
        const json_t *term;
        size_t k;
        json_array_foreach (call_adapters(u, i), k, term) {
            const char *hash = json_get_string(term, "hash");
            struct adapter *a = *hash ? find(ctx, hash) : NULL;
            if (*hash && !a) return false;
            if (u->v[i].mix)
                u->mixes[i][k].adapter = a;
            else
                u->v[i].adapter = a;
        }
    }
    return true;
}

void unit_calls_release(struct unit_calls *u) {
    for (int i = 0; i < u->n; i++) {
        engine_request_release(&u->v[i]);
        grammar_free(u->grammars[i]);
    }
    free(u->v);
    free(u->mixes);
    free(u->grammars);
    arena_release(&u->arena);
    json_decref(u->json);
    *u = (struct unit_calls){0};
}

/* results */

void unit_results_write(const struct engine_request *reqs, int n, struct buf *out) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, record_outputs_json(&reqs[i]));
    json_write(list, out);
}

int unit_results_parse(const struct engine *e, const uint8_t *data, size_t len,
                       struct engine_request *const *calls, int n, struct error *err) {
    json_t *list = list_parse(data, len, "the results", err);
    int rc = list ? OK : err->code, done = 0;
    if (rc == OK && json_array_size(list) != (size_t)n)
        rc = error_set(err, ERR_FORMAT, "a unit of %d calls has %zu results", n,
                       json_array_size(list));
    for (; rc == OK && done < n; done++)
        if (calls[done])
            rc = record_outputs_parse(e, json_array_get(list, (size_t)done), calls[done], err);
    for (int i = 0; rc != OK && i < done; i++)
        if (calls[i]) engine_request_release(calls[i]);
    json_decref(list);
    return rc;
}

/* streams */

void unit_part_write(const struct engine_request *r, int32_t from, struct buf *out) {
    json_write(record_tokens_json(r, from), out);
}

int unit_part_merge(const struct engine *e, const uint8_t *data, size_t len, int32_t at,
                    struct engine_request *r, struct error *err) {
    struct json_limits left = unit_limits;
    json_t *tokens = json_parse_limited((const char *)data, len, "a part", &left, err);
    int rc = tokens ? record_tokens_merge(e, tokens, at, r, err) : err->code;
    json_decref(tokens);
    return rc;
}

int unit_result_merge(const struct engine *e, const uint8_t *data, size_t len,
                      struct engine_request *r, struct error *err) {
    json_t *list = list_parse(data, len, "the results", err);
    int rc = list ? OK : err->code;
    if (rc == OK && json_array_size(list) != 1)
        rc = error_set(err, ERR_FORMAT, "a streamed unit has one result");
    if (rc == OK) rc = record_outputs_merge(e, json_array_get(list, 0), r, err);
    json_decref(list);
    return rc;
}

/* adapters */

static const char *const adapter_files[] = {"adapter_config.json", "adapter_model.safetensors"};

/* Makes a folder for the files of an adapter. */
static int folder_make(char folder[32], struct error *err) {
    snprintf(folder, 32, "/tmp/shoal-adapter-XXXXXX");
    return mkdtemp(folder) ? OK : error_errno(err, "cannot create a folder in '/tmp'");
}

static int file_add(const char *folder, const char *name, struct buf *out, struct error *err) {
    char *path = path_join(folder, name);
    struct buf file = {0};
    int rc = file_read(path, FILE_MAX, &file, err);
    uint64_t size = file.len;
    buf_add(out, &size, sizeof size);
    buf_add(out, file.data, file.len);
    buf_release(&file);
    free(path);
    return rc;
}

int adapter_to_bytes(const struct adapter *a, struct buf *out, struct error *err) {
    char folder[32];
    if (folder_make(folder, err) != OK) return err->code;
    struct adapter *full = adapter_to_f32((struct adapter *)(uintptr_t)a);
    int rc = adapter_save(full, folder, NULL, err);
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(adapter_files); i++)
        rc = file_add(folder, adapter_files[i], out, err);
    adapter_release(full);
    tree_delete(folder);
    return rc;
}

static int files_write(const uint8_t *data, size_t len, const char *folder, struct error *err) {
    int rc = OK;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(adapter_files); i++) {
        uint64_t size = 0;
        if (len >= sizeof size) memcpy(&size, data, sizeof size);
        if (len < sizeof size || size > len - sizeof size)
            return error_set(err, ERR_FORMAT, "the bytes of an adapter end too early");
        char *path = path_join(folder, adapter_files[i]);
        rc = file_write(path, data + sizeof size, size, err);
        free(path);
        data += sizeof size + size;
        len -= sizeof size + size;
    }
    return rc;
}

struct adapter *adapter_from_bytes(const uint8_t *data, size_t len, const char *hash,
                                   struct model *m, struct error *err) {
    char folder[32];
    if (folder_make(folder, err) != OK) return NULL;
    struct adapter *a =
        files_write(data, len, folder, err) == OK ? adapter_open(folder, m, err) : NULL;
    tree_delete(folder);
    if (!a || strcmp(a->hash, hash) == 0) return a;
    error_set(err, ERR_MISMATCH, "an adapter was to have the hash %.16s…, but has %.16s…", hash,
              a->hash);
    adapter_release(a);
    return NULL;
}
