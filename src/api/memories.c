/*
 * memories: the long-term memories (memory/memory.h) of the clients, in the store of --memory. The
 * user of the memories is the id of the API key, or "me" for requests without one, as for the tools
 * of agents. It learns from the user's messages in stored conversations, not from other texts.
 * Deleting a conversation deletes the memories learnt from it.
 *
 * Learning and the deletion of conversations exclude each other, so that no memory remains of an
 * exchange that was deleted while it was read.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "memory/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    DEFAULT_MEMORIES = 100,
    MAX_MEMORIES = 1000, /* in a reply */
    MAX_QUERY_BYTES = 4096,
    MEMORY_BYTES = 8 << 10, /* for a memory, as JSON tree and as text */
    EVENT_BYTES = 4 << 10,  /* for an event of the log */
    MAX_EVENTS = 20000,     /* for a key; then nothing more is learnt */
};
static const int64_t MAX_FILE_BYTES = (int64_t)1 << 30;
static pthread_mutex_t learning = PTHREAD_MUTEX_INITIALIZER;

/* The memories of a user, opened. */
struct access {
    struct store *store;
    struct memories *memories;
};

static void access_close(struct access *a) {
    memories_close(a->memories);
    store_close(a->store);
}

/* Reserves memory for all memories of a user and for `more` others. */
static int list_reserve(struct server *s, struct exchange *x, struct store *store, const char *user,
                        int64_t more, struct error *err) {
    int64_t n = 0;
    if (memories_count(store, user, &n, err) != OK) return err->code;
    return request_memory_reserve_list(s, x, n + more, MEMORY_BYTES, NULL, err);
}

/* Opens the memories of a user; for a request (NULL: there is none) after list_reserve. */
static int access_open_user(struct access *a, struct server *s, struct exchange *x,
                            const char *user, int64_t more, struct error *err) {
    *a = (struct access){.store = store_open(s->options->memory, err)};
    int rc = a->store ? OK : err->code;
    if (rc == OK && x) rc = list_reserve(s, x, a->store, user, more, err);
    if (rc == OK && !(a->memories = memories_open(a->store, user, 0, err))) rc = err->code;
    if (rc != OK) access_close(a);
    return rc;
}

/* The user of a request, or of a conversation in the server's store; malloc'ed. */
static char *user_of_key(const char *key, size_t n) {
    return n ? xstrndup(key, n) : xstrdup("me");
}

char *memories_user(const char *key) {
    return user_of_key(key, key ? strlen(key) : 0);
}

char *memories_request_user(const struct server *s, struct exchange *x) {
    if (s->options->memory) return memories_user(exchange_key_id(x));
    api_fail(x, 404, NULL, NULL, "no_memory",
             "this server has no memories; start it with --memory DB");
    return NULL;
}

/* Opens the memories of a request's user after reserving memory for them and for `more` others;
 * replies to the request if there is an error. */
static bool access_open(struct access *a, struct server *s, struct exchange *x, int64_t more) {
    struct error err;
    char *user = memories_request_user(s, x);
    if (!user) return false;
    int rc = access_open_user(a, s, x, user, more, &err);
    if (rc != OK) api_fail_error(x, &err, NULL);
    free(user);
    return rc == OK;
}

json_t *memories_of(struct server *s, struct exchange *x, const char *user, bool ended,
                    struct error *err) {
    struct access a;
    if (access_open_user(&a, s, x, user, 0, err) != OK) return NULL;
    json_t *list = memories_list(a.memories, ended, err);
    access_close(&a);
    return list;
}

/* Reserves memory for the log, which `why` and deletions read. */
static int log_reserve(struct server *s, struct exchange *x, const struct access *a,
                       struct error *err) {
    return request_memory_reserve_list(s, x, memories_events(a->memories), EVENT_BYTES, NULL, err);
}

/* Replies with v, of which it takes ownership, or with the error. */
static void reply(struct exchange *x, json_t *v, const struct error *err) {
    if (v)
        exchange_reply_json(x, 200, v);
    else if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "memory_not_found", "%s", err->text);
    else
        api_fail_error(x, err, NULL);
}

/* reading */

/* Reads ?query&attribute&ended&limit; *param receives the argument that an error is about. */
static int query_read(const struct exchange *x, struct memory_query *q, const char **param,
                      struct error *err) {
    const char *ended = exchange_query(x, "ended");
    q->text = exchange_query(x, "query");
    q->attribute = exchange_query(x, "attribute");
    q->top = DEFAULT_MEMORIES;
    q->ended = ended && strcmp(ended, "true") == 0;
    *param = "query";
    if (q->text && strlen(q->text) > MAX_QUERY_BYTES)
        return error_set(err, ERR_USAGE, "'query' must have at most %d bytes", MAX_QUERY_BYTES);
    *param = "ended";
    if (ended && !q->ended && strcmp(ended, "false") != 0)
        return error_set(err, ERR_USAGE, "'ended' must be true or false");
    *param = "attribute";
    if (q->attribute && !memory_attribute_find(q->attribute))
        return error_set(err, ERR_USAGE,
                         "'attribute' must be one of those in docs/MEMORY.md, such as residence");
    *param = "limit";
    return query_read_int(x, "limit", 1, MAX_MEMORIES, &q->top, err);
}

static void list_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    struct memory_query q = {0};
    const char *param;
    if (query_read(x, &q, &param, &err) != OK) {
        api_fail_error(x, &err, param);
        return;
    }
    if (!access_open(&a, ctx, x, q.top)) return;
    json_t *list = memories_search(a.memories, &q, &err);
    if (!list && err.code == ERR_USAGE)
        api_fail_error(x, &err, "query");
    else
        reply(x, list ? json_pack("{s:s,s:o}", "object", "list", "data", list) : NULL, &err);
    access_close(&a);
}

/* Reads the "ID" that a path begins with; *rest: the part after it. False: it begins with
 * other text, and the reply is sent. */
static bool id_read(struct exchange *x, int64_t *id, const char **rest) {
    const char *text = exchange_wildcard(x);
    char *end;
    errno = 0;
    *id = *text >= '0' && *text <= '9' ? strtoll(text, &end, 10) : 0;
    if (*id > 0 && !errno && (!*end || *end == '/')) {
        *rest = end;
        return true;
    }
    api_fail(x, 404, NULL, NULL, "memory_not_found",
             "the path must have the number of a memory, as GET /v1/memories lists it");
    return false;
}

static void why_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    const char *rest;
    int64_t id;
    if (!id_read(x, &id, &rest)) return;
    if (strcmp(rest, "/why") != 0) {
        api_fail(x, 404, NULL, NULL, "not_found", "use GET /v1/memories/%lld/why", (long long)id);
        return;
    }
    if (!access_open(&a, ctx, x, 0)) return;
    json_t *v = NULL;
    if (log_reserve(ctx, x, &a, &err) == OK) v = memories_why(a.memories, id, NULL, &err);
    reply(x, v, &err);
    access_close(&a);
}

/* changing */

static void delete_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    const char *rest;
    int64_t id;
    if (!id_read(x, &id, &rest)) return;
    if (*rest) {
        api_fail(x, 404, NULL, NULL, "not_found", "use DELETE /v1/memories/%lld", (long long)id);
        return;
    }
    if (!access_open(&a, ctx, x, 0)) return;
    int rc = log_reserve(ctx, x, &a, &err);
    if (rc == OK) rc = memories_delete(a.memories, id, &err);
    reply(x, rc == OK ? json_pack("{s:I,s:b}", "id", (json_int_t)id, "deleted", 1) : NULL, &err);
    access_close(&a);
}

static void undo_handle(void *ctx, struct exchange *x) {
    struct access a;
    struct error err;
    if (!access_open(&a, ctx, x, 0)) return;
    json_t *v = memories_undo(a.memories, &err);
    if (!v && (err.code == ERR_MISSING || err.code == ERR_STATE))
        api_fail(x, 409, NULL, NULL, "nothing_to_undo", "%s",
                 err.code == ERR_STATE ? err.text : "no change of the memories can be undone");
    else
        reply(x, v, &err);
    access_close(&a);
}

/* learning */

static bool file_is_full(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && st.st_size > MAX_FILE_BYTES;
}

/* The conversation's id in the request, after the key of an id in the store. */
static const char *conversation_of(const char *store_id) {
    return strchr(store_id, '/') + 1;
}

static int turn_learn(struct access *a, const struct memory_turn *turn, const char *user,
                      struct error *err) {
    if (memories_events(a->memories) >= MAX_EVENTS)
        return error_set(err, ERR_STATE,
                         "the memories of '%s' have %d changes; 'shoal memory delete' with --user, "
                         "--store and --all clears them",
                         user, MAX_EVENTS);
    json_t *result = memories_learn(a->memories, turn, err);
    json_decref(result);
    return result ? OK : err->code;
}

/* Learns from the last of one or two consecutive exchanges. */
static int exchange_learn(struct server *s, const char *store_id, const json_t *exchanges,
                          struct error *err) {
    const size_t n = json_array_size(exchanges);
    const json_t *last = json_array_get(exchanges, n - 1);
    const struct memory_turn turn = {
        .role = "user",
        .text = json_get_string(last, "user"),
        .conversation = conversation_of(store_id),
        .number = json_integer_value(json_object_get(last, "number")),
        .asked = n > 1 ? json_get_string(json_array_get(exchanges, 0), "assistant") : NULL};
    struct access a;
    char *user = user_of_key(store_id, strcspn(store_id, "/"));
    int rc = access_open_user(&a, s, NULL, user, 0, err);
    if (rc == OK) {
        rc = turn_learn(&a, &turn, user, err);
        access_close(&a);
    }
    free(user);
    return rc;
}

void memories_learn_exchange(struct server *s, struct store *store, const char *store_id,
                             int64_t number) {
    struct error err;
    const char *path = s->options->memory;
    if (!path) return;
    pthread_mutex_lock(&learning);
    json_t *exchanges =
        conversation_history(store, store_id, MAX(number - 2, 0), MIN(number, 2), &err);
    const json_t *last = json_array_get(exchanges, json_array_size(exchanges) - 1);
    bool exists = json_integer_value(json_object_get(last, "number")) == number;
    int rc = exchanges || err.code == ERR_MISSING ? OK : err.code;
    if (exists && file_is_full(path))
        rc = error_set(&err, ERR_STATE, "'%s' has 1 GiB", path);
    else if (exists)
        rc = exchange_learn(s, store_id, exchanges, &err);
    pthread_mutex_unlock(&learning);
    json_decref(exchanges);
    if (rc != OK) log_warn("an exchange was not read for memories: %s", err.text);
}

static int conversation_forget(struct server *s, const char *store_id, int64_t *n,
                               struct error *err) {
    struct access a;
    char *user = user_of_key(store_id, strcspn(store_id, "/"));
    int rc = access_open_user(&a, s, NULL, user, 0, err);
    free(user);
    if (rc != OK) return rc;
    rc = memories_delete_conversation(a.memories, conversation_of(store_id), n, err);
    access_close(&a);
    return rc;
}

/* If the memories cannot be deleted, the client repeats the request: then the conversation is
 * missing already. */
int memories_delete_with_conversation(struct server *s, struct store *store, const char *store_id,
                                      struct error *err) {
    struct error of_memories;
    int64_t n = 0;
    if (!s->options->memory) return conversation_delete(store, store_id, err);
    pthread_mutex_lock(&learning);
    int rc = conversation_delete(store, store_id, err);
    if ((rc == OK || rc == ERR_MISSING) &&
        conversation_forget(s, store_id, &n, &of_memories) != OK) {
        *err = of_memories;
        rc = err->code;
    }
    pthread_mutex_unlock(&learning);
    return rc == ERR_MISSING && n ? OK : rc;
}

static const struct http_route routes[] = {
    {"GET", "/v1/memories", SCOPE_CHAT, list_handle},
    {"GET", "/v1/memories/*", SCOPE_CHAT, why_handle},
    {"DELETE", "/v1/memories/*", SCOPE_CHAT, delete_handle},
    {"POST", "/v1/memories/undo", SCOPE_CHAT, undo_handle},
    {0},
};

/* Makes the file, and reports a damaged one at the start. */
static int module_open(struct server *s, struct error *err) {
    if (!s->options->memory) return OK;
    struct store *store = store_open(s->options->memory, err);
    store_close(store);
    return store ? OK : error_wrap(err, "--memory");
}

const struct server_module memories_module = {.routes = routes, .open = module_open};
