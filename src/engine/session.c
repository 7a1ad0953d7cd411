/*
 * session: saves the KV cache of a sequence to a file and loads it.
 *
 * The file has the tokens of one sequence, their cached keys and values, and a header:
 *
 *     "SHOALKV1" | u32 header length | JSON header | tokens i32 [n + more]
 *              | KV bytes of n tokens (kv_cache_save) | SHA-256 of everything before, in hex
 *
 * The last `more` tokens have no keys and values: one that was just sampled, or more of them in the
 * fast class with tiles (chunk_commit). Files of earlier versions have none of them.
 *
 * The header identifies model, adapter, numeric class, processor level (the name of the kernels in
 * use) and element types, and for a sequence with an activated adapter the activation.
 *
 * Invariant: a session is only used for requests that would compute the same bits. Loading fails if
 * the file is damaged or its model, numeric class, element types or, in the fast class, processor
 * level differ. A session can be loaded whatever its adapter is: its slot keeps the adapter's key
 * and the activation, which decide which requests use it.
 */
#include "engine/internal.h"

#include <stdlib.h>
#include <string.h>

static const char magic[8] = "SHOALKV1";
enum { DIGEST_LEN = HASH_LEN - 1, HEADER_MAX_BYTES = 4096 };
#define SESSION_MAX_BYTES ((size_t)4 << 30)

/* The activation of the base model (key "-") and of adapters without an invocation, which is not in
 * the header. */
static int32_t default_activation(const char *key) {
    return strcmp(key, "-") == 0 ? ADAPTER_INACTIVE : 0;
}

static json_t *session_header(const struct engine *e, const char *model_hash, const char *key,
                              int32_t activation, int32_t n, int32_t more) {
    bool exact = e->m->cls == NUMERIC_EXACT; // the exact class has equal bits at every level
    json_t *more_json = more ? json_integer(more) : NULL,
           *activation_json =
               activation != default_activation(key) ? json_integer(activation) : NULL;
    return json_pack("{s:s,s:s,s:o*,s:i,s:s,s:i,s:i,s:i,s:o*,s:i}", "model", model_hash, "adapter",
                     key, "activation", activation_json, "class", (int)e->m->cls, "level",
                     exact ? "any" : kernels_get()->name, "elem", (int)e->o.kv_elem, "lora",
                     (int)e->o.lora_elem, "tokens", (int)n, "more", more_json, "position_bytes",
                     (int)kv_cache_position_bytes(forward_kv_cache(e->f)));
}

/* The slot that has cached the longest prefix of `tokens` under the adapters of `key`; *n receives
 * the length of the prefix. -1: no slot has cached any of these tokens. */
static int32_t slot_find_longest_prefix(const struct engine *e, struct token_seq tokens,
                                        const char *key, int32_t *n) {
    int32_t best = -1;
    *n = 0;
    for (int32_t i = 0; i < e->n_slots; i++) {
        const struct engine_slot *s = &e->slots[i];
        int32_t n_equal = 0;
        if (s->n_known == 0 || strcmp(s->key, key) != 0) continue;
        while (n_equal < MIN(s->n_known, tokens.n) && s->tokens[n_equal] == tokens.v[n_equal])
            n_equal++;
        if (n_equal > *n) {
            *n = n_equal;
            best = i;
        }
    }
    return best;
}

/* The parts of a session file. */
struct session_file {
    json_t *header;
    const char *adapter; /* key of the adapters; borrowed from the header */
    int32_t activation;
    int32_t n, more;    /* tokens with keys and values; tokens after them */
    const char *tokens; /* i32 [n + more] */
    const char *kv;
    size_t kv_bytes;
};

/* Puts the tokens with keys and values into a free slot. */
static int slot_restore(struct engine *e, const struct session_file *f, struct error *err) {
    int32_t n = f->n;
    int32_t slot = slot_find_lru(e, false);
    if (slot < 0)
        return error_set(err, ERR_STATE, "every slot is busy; load sessions before requests");
    struct engine_slot *s = &e->slots[slot];
    s->n = s->n_known = 0;
    kv_cache_truncate(forward_kv_cache(e->f), slot, 0);
    memcpy(s->tokens, f->tokens, (size_t)n * sizeof *s->tokens);
    if (engine_check_tokens("the session", s->tokens, n, e->vocab, err) != OK) return err->code;
    if (!slot_reserve_pages(e, slot, 0, n)) {
        // eviction skips slots with n = 0, so such a slot must not keep pages
        kv_cache_truncate(forward_kv_cache(e->f), slot, 0);
        return error_set(err, ERR_MEMORY, "no room for the %d tokens of the session", n);
    }
    kv_cache_load(forward_kv_cache(e->f), slot, n, f->kv);
    s->n = s->n_known = n;
    s->last_used = e->stats.steps;
    strcpy(s->key, f->adapter);
    s->activation = f->activation;
    return OK;
}

int engine_session_save(struct engine *e, struct token_seq tokens, struct adapter *adapter,
                        const char *model_hash, const char *path, struct error *err) {
    const char *key = adapter ? adapter->hash : "-";
    int32_t n, slot = slot_find_longest_prefix(e, tokens, key, &n);
    if (slot < 0)
        return error_set(err, ERR_USAGE, "no part of these %d tokens is cached; run them first",
                         tokens.n);
    struct kv_cache *kv = forward_kv_cache(e->f);
    json_t *header = session_header(e, model_hash, key, e->slots[slot].activation, n, tokens.n - n);
    char *text = json_dumps(header, JSON_COMPACT | JSON_SORT_KEYS), digest[HASH_LEN];
    uint32_t header_len = (uint32_t)strlen(text);
    size_t kv_bytes = kv_cache_position_bytes(kv) * (size_t)n;
    struct buf out = {0};
    size_t token_bytes = (size_t)tokens.n * sizeof *tokens.v;
    size_t kv_offset = sizeof magic + sizeof header_len + header_len + token_bytes;
    int rc = buf_reserve(&out, kv_offset + kv_bytes + DIGEST_LEN, err);
    if (rc == OK) {
        buf_add(&out, magic, sizeof magic);
        buf_add(&out, &header_len, sizeof header_len);
        buf_add(&out, text, header_len);
        buf_add(&out, tokens.v, token_bytes);
        kv_cache_save(kv, slot, n, out.data + out.len);
        out.len += kv_bytes;
        sha256_bytes(out.data, out.len, digest);
        buf_add(&out, digest, DIGEST_LEN);
        rc = file_write_private(path, out.data, out.len, err);
    }
    buf_release(&out);
    free(text);
    json_decref(header);
    return rc;
}

/* Parses the content `f` of a file. out->header is released by the caller, also after an error. */
static int session_parse(const struct buf *f, const char *path, struct session_file *out,
                         struct error *err) {
    uint32_t header_len;
    const char *p = f->data + sizeof magic + sizeof header_len;
    char digest[HASH_LEN];
    *out = (struct session_file){0};
    if (f->len < sizeof magic + sizeof header_len + DIGEST_LEN ||
        memcmp(f->data, magic, sizeof magic) != 0)
        return error_set(err, ERR_FORMAT, "'%s' is not a session file", path);
    sha256_bytes(f->data, f->len - DIGEST_LEN, digest);
    memcpy(&header_len, f->data + sizeof magic, sizeof header_len);
    size_t remaining = f->len - sizeof magic - sizeof header_len - DIGEST_LEN;
    if (memcmp(digest, f->data + f->len - DIGEST_LEN, DIGEST_LEN) != 0 || header_len > remaining ||
        header_len > HEADER_MAX_BYTES)
        return error_set(err, ERR_FORMAT, "session '%s' is damaged", path);
    out->header = json_loadb(p, header_len, JSON_REJECT_DUPLICATES, NULL);
    out->adapter = json_string_value(json_object_get(out->header, "adapter"));
    const json_t *activation = json_object_get(out->header, "activation");
    json_int_t n = json_integer_value(json_object_get(out->header, "tokens")),
               more = json_integer_value(json_object_get(out->header, "more")),
               active = json_integer_value(activation);
    if (!out->adapter || strlen(out->adapter) >= HASH_LEN || n < 1 || more < 0 || n > INT32_MAX ||
        more > INT32_MAX - n || active < 0 || active > ADAPTER_INACTIVE)
        return error_set(err, ERR_FORMAT, "session '%s' has a damaged header", path);
    size_t token_bytes = (size_t)(n + more) * sizeof(int32_t);
    if (remaining - header_len < token_bytes)
        return error_set(err, ERR_FORMAT, "session '%s' has the wrong size", path);
    out->activation = activation ? (int32_t)active : default_activation(out->adapter);
    out->n = (int32_t)n;
    out->more = (int32_t)more;
    out->tokens = p + header_len;
    out->kv = out->tokens + token_bytes;
    out->kv_bytes = remaining - header_len - token_bytes;
    return OK;
}

/* Checks the fields of the header against this engine. */
static int header_check(const struct engine *e, const struct session_file *f,
                        const char *model_hash, const char *path, struct error *err) {
    const char *model = json_string_value(json_object_get(f->header, "model"));
    if (!model) return error_set(err, ERR_FORMAT, "session '%s' has a damaged header", path);
    if (strcmp(model, model_hash) != 0)
        return error_set(err, ERR_MISMATCH,
                         "session '%s' belongs to the model '%.12s', not '%.12s'", path, model,
                         model_hash);
    json_t *expected = session_header(e, model_hash, f->adapter, f->activation, f->n, f->more);
    bool same = json_equal(expected, f->header);
    json_decref(expected);
    if (!same)
        return error_set(
            err, ERR_MISMATCH,
            "session '%s' was made with another numeric class or processor level, or with another "
            "element type of the KV cache or of adapters",
            path);
    if (f->n > e->o.max_len)
        return error_set(err, ERR_MEMORY, "session '%s' has %d tokens; the engine holds %d", path,
                         f->n, e->o.max_len);
    return OK;
}

int engine_session_load(struct engine *e, const char *model_hash, const char *path,
                        int32_t *n_tokens, struct error *err) {
    struct buf content = {0};
    struct session_file f = {0};
    int rc = file_read(path, SESSION_MAX_BYTES, &content, err);
    if (rc == OK) rc = session_parse(&content, path, &f, err);
    if (rc == OK) rc = header_check(e, &f, model_hash, path, err);
    if (rc == OK && f.kv_bytes != (size_t)f.n * kv_cache_position_bytes(forward_kv_cache(e->f)))
        rc = error_set(err, ERR_FORMAT, "session '%s' has the wrong size", path);
    if (rc == OK) rc = slot_restore(e, &f, err);
    if (rc == OK) *n_tokens = f.n;
    json_decref(f.header);
    buf_release(&content);
    return rc;
}

int session_read_tokens(const char *path, struct token_ids *out, struct error *err) {
    struct buf content = {0};
    struct session_file f = {0};
    int rc = file_read(path, SESSION_MAX_BYTES, &content, err);
    if (rc == OK) rc = session_parse(&content, path, &f, err);
    for (int32_t i = 0; rc == OK && i < f.n + f.more; i++) {
        int32_t id;
        memcpy(&id, f.tokens + (size_t)i * sizeof id, sizeof id);
        token_ids_add(out, id);
    }
    json_decref(f.header);
    buf_release(&content);
    return rc;
}
