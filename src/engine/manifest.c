/*
 * manifest: what a result was computed from, as hashes, so that two results can be compared and a
 * third person can check that a repetition had the same inputs.
 *
 * A manifest has no paths of this machine except the names that the caller gives to adapters and
 * data. The program's file is hashed once per process, a model once per struct model (model_hash).
 */
#include "engine/internal.h"

#include <pthread.h>
#include <string.h>

static char program_hash[HASH_LEN];

static void program_hash_compute(void) {
    struct error unreadable; /* then the manifest has null */
    if (sha256_file("/proc/self/exe", program_hash, &unreadable) != OK) program_hash[0] = 0;
}

static json_t *hash_json(const char *hash) {
    return *hash ? json_string(hash) : json_null();
}

static json_t *template_hash_json(const struct model *m) {
    const char *text = m->chat_template ? m->chat_template : chatml_template;
    char hash[HASH_LEN];
    sha256_bytes(text, strlen(text), hash);
    return json_string(hash);
}

json_t *manifest_json(struct model *m, json_t *adapters, json_t *data, int64_t seed) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct error none; /* model_hash cannot fail */
    pthread_once(&once, program_hash_compute);
    return json_pack("{s:o,s:o,s:o,s:o,s:o,s:o,s:I}", "program", hash_json(program_hash), "model",
                     m ? json_string(model_hash(m, &none)) : json_null(), "adapters",
                     adapters ? adapters : json_object(), "data", data ? data : json_object(),
                     "template", m ? template_hash_json(m) : json_null(), "class",
                     m ? json_string(numeric_class_name(m->cls)) : json_null(), "seed",
                     (json_int_t)seed);
}

void manifest_add_hash(json_t *hashes, const char *name, const char *hash) {
    json_t *key = json_from_path(name);
    if (json_is_string(key)) json_object_set_new(hashes, json_string_value(key), hash_json(hash));
    json_decref(key);
}

void manifest_add_json(json_t *hashes, const char *name, const json_t *value) {
    char *text = json_canonical(value), hash[HASH_LEN];
    sha256_bytes(text, strlen(text), hash);
    manifest_add_hash(hashes, name, hash);
    free(text);
}

int manifest_add_file(json_t *hashes, const char *path, struct error *err) {
    char hash[HASH_LEN];
    if (sha256_file(path, hash, err) != OK) return err->code;
    manifest_add_hash(hashes, path, hash);
    return OK;
}
