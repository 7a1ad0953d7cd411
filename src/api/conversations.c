/*
 * conversations: the stored conversations of /v1/ask: a key lists, reads, renames and deletes its
 * own. Their texts are those of the store, word for word, also after a restart.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

enum {
    ENTRY_BYTES = 4 << 10, /* of a conversation in a list, as JSON tree and as text */
    DEFAULT_EXCHANGES = 20,
    MAX_EXCHANGES = 100, /* in a reply */
    MAX_TITLE_BYTES = 256
};

struct store *conversations_open(const struct server *s, struct error *err) {
    char *path = path_join(s->options->state_dir, "conversations.db");
    struct store *store = store_open(path, err);
    free(path);
    return store;
}

char *conversation_store_id(const struct exchange *x, const char *id) {
    const char *key = exchange_key_id(x);
    return xasprintf("%s/%s", key ? key : "", id);
}

/* The store, and the id of the conversation that the path names; replies to the request if there is
 * an error. */
struct access {
    struct store *store;
    char *id;
};

static bool access_open(struct access *a, struct server *s, struct exchange *x) {
    struct error err;
    *a = (struct access){.id = conversation_store_id(x, exchange_wildcard(x))};
    if ((a->store = conversations_open(s, &err))) return true;
    api_fail_error(x, &err, NULL);
    free(a->id);
    return false;
}

static void access_close(struct access *a) {
    store_close(a->store);
    free(a->id);
}

/* Replies with v, of which it takes ownership, or with the error. */
static void reply(struct exchange *x, json_t *v, const struct error *err) {
    if (v)
        exchange_reply_json(x, 200, v);
    else if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "conversation_not_found", "there is no conversation '%s'",
                 exchange_wildcard(x));
    else
        api_fail_error(x, err, NULL);
}

/* The path of a conversation has no wildcard here, so its id is the prefix of all of the key's. */
static void list_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    if (!access_open(&a, ctx, x)) return;
    int64_t n;
    int rc = store_document_count(a.store, "conversation", a.id, &n, &err);
    if (rc == OK) rc = request_memory_reserve_list(ctx, x, n, ENTRY_BYTES, NULL, &err);
    json_t *list = rc == OK ? conversation_list(a.store, a.id, &err) : NULL, *v;
    size_t i;
    json_array_foreach (list, i, v) // without the key
        json_object_set_new(v, "id", json_string(json_get_string(v, "id") + strlen(a.id)));
    reply(x, list ? json_pack("{s:s,s:o}", "object", "list", "data", list) : NULL, &err);
    access_close(&a);
}

static int64_t query_int(const struct exchange *x, const char *key, int64_t fallback) {
    const char *text = exchange_query(x, key);
    return text ? strtoll(text, NULL, 10) : fallback;
}

/* ?after&limit: at most `limit` exchanges whose numbers are above `after`. */
static void history_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct access a;
    struct error err;
    int64_t after = MAX(query_int(x, "after", 0), 0),
            n = MIN(MAX(query_int(x, "limit", DEFAULT_EXCHANGES), 1), MAX_EXCHANGES);
    size_t bytes = 4 * (MAX_QUESTION_BYTES + (size_t)engine_max_len(s->engine) * s->piece_bytes);
    if (request_memory_reserve_list(s, x, n, bytes, "limit", &err) != OK) {
        api_fail_error(x, &err, "limit");
        return;
    }
    if (!access_open(&a, s, x)) return;
    json_t *list = conversation_history(a.store, a.id, after, n, &err);
    reply(x, list ? json_pack("{s:s,s:o}", "object", "list", "data", list) : NULL, &err);
    access_close(&a);
}

static void rename_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    const char *title = NULL;
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? json_read_string(body, "title", &title, &err) : err.code;
    if (rc == OK && (!title || strlen(title) > MAX_TITLE_BYTES))
        rc = error_set(&err, ERR_USAGE, "'title' must be a text of at most %d bytes",
                       MAX_TITLE_BYTES);
    if (rc != OK) {
        api_fail_error(x, &err, "title");
    } else if (access_open(&a, ctx, x)) {
        rc = conversation_rename(a.store, a.id, title, &err);
        reply(x,
              rc == OK ? json_pack("{s:s,s:s}", "id", exchange_wildcard(x), "title", title) : NULL,
              &err);
        access_close(&a);
    }
    json_decref(body);
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    if (!access_open(&a, ctx, x)) return;
    int rc = conversation_delete(a.store, a.id, &err);
    reply(x, rc == OK ? json_pack("{s:s,s:b}", "id", exchange_wildcard(x), "deleted", 1) : NULL,
          &err);
    access_close(&a);
}

static const struct http_route routes[] = {
    {"GET", "/v1/conversations", SCOPE_CHAT, list_handle},
    {"GET", "/v1/conversations/*", SCOPE_CHAT, history_handle},
    {"POST", "/v1/conversations/*", SCOPE_CHAT, rename_handle},
    {"DELETE", "/v1/conversations/*", SCOPE_CHAT, delete_handle},
    {0},
};

const struct server_module conversations_module = {.routes = routes};
