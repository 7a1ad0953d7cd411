/*
 * conversations: the stored conversations of /v1/ask: a key lists, reads, searches, renames and
 * deletes its own. Their texts are those of the store, word for word, also after a restart.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "memory/memory.h"
#include "serve/async_reply.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    ENTRY_BYTES = 4 << 10, /* of a conversation in a list, as JSON tree and as text */
    DEFAULT_EXCHANGES = 20,
    MAX_EXCHANGES = 100, /* in a reply */
    MAX_TITLE_BYTES = 256,
    MAX_SEARCH_BYTES = 256,
    MAX_PER_KEY = 256, /* conversations */
};
static const int64_t MAX_FILE_BYTES = (int64_t)1 << 30, MAX_KEY_BYTES = (int64_t)1 << 26;

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

/* limits */

static int64_t file_bytes(const struct server *s) {
    static const char *const ends[] = {"", "-wal"};
    int64_t bytes = 0;
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        struct stat st;
        char *path = xasprintf("%s/conversations.db%s", s->options->state_dir, ends[i]);
        if (stat(path, &st) == 0) bytes += (int64_t)st.st_size;
        free(path);
    }
    return bytes;
}

static bool refuse(struct exchange *x, const char *reason) {
    api_fail(x, 507, NULL, "conversation", "conversations_full",
             "%s; DELETE /v1/conversations/NAME deletes a conversation, and a question without "
             "'conversation' is answered without one",
             reason);
    return false;
}

/* Requests without a key are not limited to a share of the file. The sizes of the conversations are
 * read only if the file is larger than a share, because that takes time. */
static bool key_admits(struct store *store, struct exchange *x, const char *store_id,
                       bool may_exceed, struct error *err) {
    char *prefix = xstrndup(store_id, strcspn(store_id, "/") + 1);
    int64_t n, bytes = 0;
    int rc = store_document_count(store, "conversation", prefix, &n, err);
    if (rc == OK && may_exceed && *store_id != '/')
        rc = conversation_bytes(store, prefix, &bytes, err);
    free(prefix);
    if (rc != OK) {
        api_fail_error(x, err, NULL);
        return false;
    }
    if (bytes > MAX_KEY_BYTES)
        return refuse(x, "the conversations of this key have 64 MiB already");
    if (n < MAX_PER_KEY) return true;
    json_t *known = store_document_get(store, "conversation", store_id, err);
    json_decref(known);
    return known || refuse(x, "this key has 256 conversations already");
}

bool conversation_admit(struct server *s, struct exchange *x, const char *store_id) {
    struct error err;
    const int64_t bytes = file_bytes(s);
    if (bytes > MAX_FILE_BYTES)
        return refuse(x, "the conversations of this server have 1 GiB already");
    struct store *store = conversations_open(s, &err);
    if (!store) api_fail_error(x, &err, NULL);
    bool admitted = store && key_admits(store, x, store_id, bytes > MAX_KEY_BYTES, &err);
    store_close(store);
    return admitted;
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

/* A list for the client; NULL for NULL. The first `prefix` bytes of the ids, which name the key,
 * are removed. */
static json_t *list_json(json_t *list, size_t prefix) {
    json_t *v;
    size_t i;
    json_array_foreach (list, i, v)
        if (prefix) json_object_set_new(v, "id", json_string(json_get_string(v, "id") + prefix));
    return list ? json_pack("{s:s,s:o}", "object", "list", "data", list) : NULL;
}

/* Reads ?limit and reserves memory for that many exchanges; replies to the request if there is an
 * error. */
static bool limit_reserve(struct server *s, struct exchange *x, int64_t *limit) {
    struct error err;
    size_t bytes = 4 * (MAX_QUESTION_BYTES + (size_t)engine_max_len(s->engine) * s->piece_bytes);
    *limit = DEFAULT_EXCHANGES;
    if (query_read_int(x, "limit", 1, MAX_EXCHANGES, limit, &err) == OK &&
        request_memory_reserve_list(s, x, *limit, bytes, "limit", &err) == OK)
        return true;
    api_fail_error(x, &err, "limit");
    return false;
}

/* searching */

struct search {
    struct server *s;
    char *prefix, *text;
    int64_t limit;
};

static json_t *search_run(struct async_reply *l, void *ctx, struct error *err) {
    struct search *q = ctx;
    struct store *store = conversations_open(q->s, err);
    json_t *hits = store ? conversation_search(store, q->prefix, q->text, q->limit, err) : NULL;
    (void)l;
    store_close(store);
    return list_json(hits, strlen(q->prefix));
}

static void search_free(void *ctx) {
    struct search *q = ctx;
    free(q->prefix);
    free(q->text);
    free(q);
}

/* The search reads all exchanges of the key, so it has its own thread. */
static void search_handle(struct server *s, struct exchange *x, const char *text) {
    int64_t limit;
    if (!*text || strlen(text) > MAX_SEARCH_BYTES) {
        api_fail(x, 400, NULL, "search", NULL, "'search' must be a text of 1 to %d bytes",
                 MAX_SEARCH_BYTES);
        return;
    }
    if (!limit_reserve(s, x, &limit)) return;
    struct search *q = xcalloc(1, sizeof *q);
    *q = (struct search){s, conversation_store_id(x, ""), xstrdup(text), limit};
    async_reply_start(s, x, false, &(struct async_reply_work){search_run, search_free, q});
}

/* The path of a conversation has no wildcard here, so its id is the prefix of all of the key's. */
static void list_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    const char *text = exchange_query(x, "search");
    if (text) {
        search_handle(ctx, x, text);
        return;
    }
    if (!access_open(&a, ctx, x)) return;
    int64_t n;
    int rc = store_document_count(a.store, "conversation", a.id, &n, &err);
    if (rc == OK) rc = request_memory_reserve_list(ctx, x, n, ENTRY_BYTES, NULL, &err);
    json_t *list = rc == OK ? conversation_list(a.store, a.id, &err) : NULL;
    reply(x, list_json(list, strlen(a.id)), &err);
    access_close(&a);
}

/* ?after&limit: at most `limit` exchanges whose numbers are above `after`. */
static void history_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    int64_t limit, after = 0;
    if (query_read_int(x, "after", 0, INT64_MAX, &after, &err) != OK) {
        api_fail_error(x, &err, "after");
        return;
    }
    if (!limit_reserve(ctx, x, &limit) || !access_open(&a, ctx, x)) return;
    json_t *list = conversation_history(a.store, a.id, after, limit, &err);
    reply(x, list_json(list, 0), &err);
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
    int rc = memories_delete_with_conversation(ctx, a.store, a.id, &err);
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
