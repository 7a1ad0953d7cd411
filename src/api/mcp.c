/*
 * mcp: a server of the Model Context Protocol at /mcp (streamable HTTP): JSON-RPC messages,
 * sessions and the methods of a server that has tools only. `shoal mcp` speaks the same over stdio
 * (mcp_stdio.c).
 *
 * The protocol has two eras. Up to version 2025-11-25 a client sends 'initialize' first. From
 * 2026-07-28 on it does not: each request names its version in _meta, and over HTTP repeats
 * version, method and tool in headers. Results have the members of both eras.
 *
 * Every request is a POST with one message; batches, which only version 2025-03-26 has, are
 * refused. The reply is JSON, or server-sent events if the client asks for progress. The server
 * starts no messages, so GET is answered 405.
 *
 * A session only separates the request ids of clients that share a key, for
 * notifications/cancelled. Messages without a session are accepted: they are those of the key's
 * session "".
 */
#define _GNU_SOURCE
#include "api/mcp.h"
#include "api/internal.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    MAX_SESSIONS = 1024,
    SESSION_ID_LEN = 33,
    MAX_ID_BYTES = 256, /* bytes of a text as id of a request, or as token of its progress */

    RPC_PARSE_ERROR = -32700, /* error codes of JSON-RPC */
    RPC_INVALID_REQUEST = -32600,
    RPC_NO_METHOD = -32601,
    RPC_INVALID_PARAMS = -32602,
    RPC_INTERNAL_ERROR = -32603,
    RPC_NO_SESSION = -32001, /* as the official SDK */
    RPC_WRONG_HEADER = -32020,
    RPC_WRONG_VERSION = -32022,
};

#define STATELESS_VERSION "2026-07-28"
#define VERSION_KEY "io.modelcontextprotocol/protocolVersion"
#define SERVER_INFO_KEY "io.modelcontextprotocol/serverInfo"

/* Newest first; 'initialize' offers all but the first one. */
enum { INITIAL_VERSION = 1 };
static const char *const versions[] = {STATELESS_VERSION, "2025-11-25", "2025-06-18", "2025-03-26",
                                       "2024-11-05"};

struct session {
    char id[SESSION_ID_LEN], key[KEY_ID_LEN];
    uint64_t used; /* number of the message that used it last */
};
struct mcp {
    struct mcp_calls calls;
    pthread_mutex_t lock; /* protects the fields below */
    struct session sessions[MAX_SESSIONS];
    int n_sessions;
    uint64_t n_messages;
};

/* sessions */

/* The session of the caller with this id; the caller holds the lock. */
static struct session *session_find(struct mcp *m, const char *id, const char *key) {
    for (int i = 0; i < m->n_sessions; i++)
        if (strcmp(m->sessions[i].id, id) == 0 && strcmp(m->sessions[i].key, key) == 0)
            return &m->sessions[i];
    return NULL;
}

/* The session to replace when there is no room: the least recently used one of the key, or else of
 * all. So a key that has a session never ends those of others. */
static struct session *session_oldest(struct mcp *m, const char *key) {
    struct session *all = NULL, *own = NULL;
    for (int i = 0; i < m->n_sessions; i++) {
        struct session *s = &m->sessions[i];
        if (!all || s->used < all->used) all = s;
        if (strcmp(s->key, key) == 0 && (!own || s->used < own->used)) own = s;
    }
    return own ? own : all;
}

static void session_begin(struct mcp *m, const char *key, char id[SESSION_ID_LEN]) {
    uint64_t random[2];
    CHECK(getrandom(random, sizeof random, 0) == sizeof random);
    snprintf(id, SESSION_ID_LEN, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    pthread_mutex_lock(&m->lock);
    struct session *s =
        m->n_sessions < MAX_SESSIONS ? &m->sessions[m->n_sessions++] : session_oldest(m, key);
    *s = (struct session){.used = ++m->n_messages};
    memcpy(s->id, id, SESSION_ID_LEN);
    snprintf(s->key, sizeof s->key, "%s", key);
    pthread_mutex_unlock(&m->lock);
}

/* Whether the session exists. end: it is ended. */
static bool session_use(struct mcp *m, const char *id, const char *key, bool end) {
    pthread_mutex_lock(&m->lock);
    struct session *s = session_find(m, id, key);
    if (s) s->used = ++m->n_messages;
    if (s && end) *s = m->sessions[--m->n_sessions];
    pthread_mutex_unlock(&m->lock);
    return s != NULL;
}

/* messages */

/* A message of a client. */
struct message {
    struct server *s;
    struct exchange *x;
    const json_t *id, *params; /* id NULL: a notification; params NULL: none */
    const char *session;       /* "": none */
};

__attribute__((format(printf, 5, 6))) static void rpc_fail(struct exchange *x, int status, int code,
                                                           const json_t *id, const char *fmt, ...) {
    struct buf clean = {0};
    va_list ap;
    va_start(ap, fmt);
    char *text = xvasprintf(fmt, ap);
    va_end(ap);
    buf_add_sanitized(&clean, text, strlen(text));
    exchange_reply_json(x, status,
                        json_pack("{s:s,s:O?,s:{s:i,s:s}}", "jsonrpc", "2.0", "id",
                                  (json_t *)(uintptr_t)(id ? id : json_null()), "error", "code",
                                  code, "message", clean.data ? clean.data : ""));
    buf_release(&clean);
    free(text);
}

static void rpc_reply(const struct message *m, json_t *result) {
    exchange_reply_json(m->x, 200, mcp_response(m->id, result));
}

/* Whether v may be the id of a request or a token of progress. */
static bool is_id(const json_t *v) {
    return json_is_integer(v) || (json_is_string(v) && json_string_length(v) <= MAX_ID_BYTES);
}

static bool version_is_known(const char *version) {
    for (size_t i = 0; i < ARRAY_LEN(versions); i++)
        if (strcmp(version, versions[i]) == 0) return true;
    return false;
}

/* versions */

static void version_refuse(struct exchange *x, const json_t *id, const char *version) {
    json_t *supported = json_array();
    for (size_t i = 0; i < ARRAY_LEN(versions); i++)
        json_array_append_new(supported, json_string(versions[i]));
    exchange_reply_json(
        x, 400,
        json_pack("{s:s,s:O,s:{s:i,s:s,s:{s:o,s:o}}}", "jsonrpc", "2.0", "id",
                  (json_t *)(uintptr_t)(id ? id : json_null()), "error", "code", RPC_WRONG_VERSION,
                  "message", "this version of the protocol is not supported", "data", "supported",
                  supported, "requested", json_string_lossy(version, strlen(version))));
}

/* Whether a header has this value. Over stdio, which has no headers, the result is true. */
static bool header_is(const struct message *m, const char *name, const char *value) {
    const char *header = exchange_header(m->x, name);
    return m->s->options->http.calls_only || (header && strcmp(header, value) == 0);
}

/* Whether the headers of a request of the stateless era have the values of the message. */
static bool headers_agree(const struct message *m, const char *method, const char *version) {
    return header_is(m, "MCP-Protocol-Version", version) && header_is(m, "Mcp-Method", method) &&
           (strcmp(method, "tools/call") != 0 ||
            header_is(m, "Mcp-Name", json_get_string(m->params, "name")));
}

/* Checks a request that names its version in _meta or, of the stateless era, in its header; answers
 * if it is wrong. */
static bool stateless_is_ok(const struct message *m, const char *method) {
    const json_t *meta = json_object_get(m->params, "_meta");
    const char *header = exchange_header(m->x, "MCP-Protocol-Version"),
               *version = json_get_string(meta, VERSION_KEY);
    bool named = json_object_get(meta, VERSION_KEY) != NULL,
         stateless = header && strcmp(header, STATELESS_VERSION) == 0;
    if (!named && !stateless) return true;
    if (named && strcmp(version, STATELESS_VERSION) != 0)
        version_refuse(m->x, m->id, version);
    else if (!headers_agree(m, method, version))
        rpc_fail(m->x, 400, RPC_WRONG_HEADER, m->id,
                 "MCP-Protocol-Version, Mcp-Method or Mcp-Name differ from the message");
    else
        return true;
    return false;
}

/* methods */

static const char instructions[] =
    "A Shoal server: a small language model with LoRA adapters on this machine. Its tools call "
    "the model, alone or as a group of agents, and read stored knowledge and conversations.";

/* Members of the results of initialize and server/discover, and the server's name for clients. */
static json_t *capabilities_json(void) {
    return json_pack("{s:{s:b}}", "tools", "listChanged", 0);
}
static json_t *server_info_json(void) {
    return json_pack("{s:s,s:s,s:s}", "name", "shoal", "title", "Shoal", "version", SHOAL_VERSION);
}

/* A result of the stateless era. Clients may not cache it: it depends on the key and the options.
 */
static json_t *cacheable_result(const char *key, json_t *value) {
    return json_pack("{s:s,s:i,s:s,s:{s:o},s:o}", "resultType", "complete", "ttlMs", 0,
                     "cacheScope", "private", "_meta", SERVER_INFO_KEY, server_info_json(), key,
                     value);
}

static void discover(const struct message *m) {
    json_t *result = cacheable_result("supportedVersions", json_pack("[s]", STATELESS_VERSION));
    json_object_set_new(result, "capabilities", capabilities_json());
    json_object_set_new(result, "instructions", json_string(instructions));
    rpc_reply(m, result);
}

static void initialize(const struct message *m) {
    const char *version = json_get_string(m->params, "protocolVersion");
    char id[SESSION_ID_LEN];
    if (!*version) {
        rpc_fail(m->x, 200, RPC_INVALID_PARAMS, m->id, "'protocolVersion' is missing");
        return;
    }
    bool known = version_is_known(version) && strcmp(version, STATELESS_VERSION) != 0;
    session_begin(m->s->mcp, mcp_caller_key(m->x), id);
    exchange_add_header(m->x, "Mcp-Session-Id", id);
    rpc_reply(m, json_pack("{s:s,s:o,s:o,s:s}", "protocolVersion",
                           known ? version : versions[INITIAL_VERSION], "capabilities",
                           capabilities_json(), "serverInfo", server_info_json(), "instructions",
                           instructions));
}

static void ping(const struct message *m) {
    rpc_reply(m, json_object());
}

/* All tools are on one page. */
static void tools_list(const struct message *m) {
    if (json_object_get(m->params, "cursor"))
        rpc_fail(m->x, 200, RPC_INVALID_PARAMS, m->id, "'cursor' is not one of this server's");
    else
        rpc_reply(m, cacheable_result("tools", mcp_tools_json(m->s, m->x)));
}

static void tools_call(const struct message *m) {
    const char *name = json_get_string(m->params, "name"),
               *accept = exchange_header(m->x, "Accept");
    const json_t *arguments = json_object_get(m->params, "arguments"),
                 *token = json_object_get(json_object_get(m->params, "_meta"), "progressToken");
    const struct mcp_tool *t = mcp_tool_find(m->s, m->x, name);
    if (!t)
        rpc_fail(m->x, 200, RPC_INVALID_PARAMS, m->id,
                 "unknown tool '%.80s'; tools/list has the tools that this caller may use", name);
    else if (arguments && !json_is_object(arguments))
        rpc_fail(m->x, 200, RPC_INVALID_PARAMS, m->id, "'arguments' must be an object");
    else if (token && !is_id(token))
        rpc_fail(m->x, 200, RPC_INVALID_PARAMS, m->id,
                 "'progressToken' must be an integer or a text of at most %d bytes", MAX_ID_BYTES);
    else
        mcp_call_start(&m->s->mcp->calls, m->s, m->x, t, arguments, m->id,
                       accept && strstr(accept, "text/event-stream") ? token : NULL, m->session);
}

static void cancelled(const struct message *m) {
    const json_t *id = json_object_get(m->params, "requestId");
    if (is_id(id)) mcp_calls_cancel(&m->s->mcp->calls, m->x, m->session, id);
}

static void request_handle(const struct message *m, const char *method) {
    static const struct {
        const char *name;
        void (*handle)(const struct message *m);
    } methods[] = {{"initialize", initialize},
                   {"server/discover", discover},
                   {"ping", ping},
                   {"tools/list", tools_list},
                   {"tools/call", tools_call}};
    if (!stateless_is_ok(m, method)) return;
    for (size_t i = 0; i < ARRAY_LEN(methods); i++) {
        if (strcmp(method, methods[i].name) != 0) continue;
        methods[i].handle(m);
        return;
    }
    rpc_fail(m->x, 200, RPC_NO_METHOD, m->id, "this server has no method '%.80s'", method);
}

/* Other notifications need no action. */
static void notification_handle(const struct message *m, const char *method) {
    if (strcmp(method, "notifications/cancelled") == 0) cancelled(m);
    exchange_reply(m->x, 202, NULL, "", 0);
}

/* v is an object. Responses of a client are ignored, because the server sends no requests. */
static void message_handle(struct message *m, const json_t *v) {
    const json_t *id = json_object_get(v, "id"), *method = json_object_get(v, "method");
    m->params = json_object_get(v, "params");
    if (id && !is_id(id))
        rpc_fail(m->x, 400, RPC_INVALID_REQUEST, NULL,
                 "'id' must be an integer or a text of at most %d bytes", MAX_ID_BYTES);
    else if (strcmp(json_get_string(v, "jsonrpc"), "2.0") != 0)
        rpc_fail(m->x, 400, RPC_INVALID_REQUEST, id, "'jsonrpc' must be \"2.0\"");
    else if (!method && (json_object_get(v, "result") || json_object_get(v, "error")))
        exchange_reply(m->x, 202, NULL, "", 0);
    else if (!json_is_string(method))
        rpc_fail(m->x, 400, RPC_INVALID_REQUEST, id, "'method' must be a text");
    else if (m->params && !json_is_object(m->params))
        rpc_fail(m->x, id ? 200 : 400, RPC_INVALID_PARAMS, id, "'params' must be an object");
    else if ((m->id = id))
        request_handle(m, json_string_value(method));
    else
        notification_handle(m, json_string_value(method));
}

/* HTTP */

/* Checks the headers of the protocol; answers if they are wrong. */
static bool headers_are_ok(struct server *s, struct exchange *x, const char *session) {
    const char *version = exchange_header(x, "MCP-Protocol-Version");
    if (version && !version_is_known(version)) {
        version_refuse(x, NULL, version);
        return false;
    }
    if (!*session || session_use(s->mcp, session, mcp_caller_key(x), false)) return true;
    rpc_fail(x, 404, RPC_NO_SESSION, NULL, "there is no such session; send 'initialize' again");
    return false;
}

static const char *session_of(const struct exchange *x) {
    const char *session = exchange_header(x, "Mcp-Session-Id");
    return session ? session : "";
}

static void post_handle(void *ctx, struct exchange *x) {
    struct message m = {.s = ctx, .x = x, .session = session_of(x)};
    struct error err;
    if (!headers_are_ok(ctx, x, m.session)) return;
    json_t *v = request_memory_json(ctx, x, &err);
    if (v && json_is_object(v))
        message_handle(&m, v);
    else if (v && json_is_array(v))
        rpc_fail(x, 400, RPC_INVALID_REQUEST, NULL,
                 "batches are not supported; send one message in a request");
    else if (v)
        rpc_fail(x, 400, RPC_INVALID_REQUEST, NULL, "a message must be an object");
    else if (err.code == ERR_STATE || err.code == ERR_MEMORY)
        rpc_fail(x, 503, RPC_INTERNAL_ERROR, NULL, "%s", err.text);
    else
        rpc_fail(x, 400, RPC_PARSE_ERROR, NULL, "%s", err.text);
    json_decref(v);
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *session = session_of(x);
    if (!session_use(s->mcp, session, mcp_caller_key(x), true)) {
        rpc_fail(x, 404, RPC_NO_SESSION, NULL, "there is no such session");
        return;
    }
    mcp_calls_cancel(&s->mcp->calls, x, session, NULL);
    exchange_reply(x, 204, NULL, "", 0);
}

static const struct http_route routes[] = {
    {"POST", "/mcp", SCOPE_CHAT, post_handle},
    {"DELETE", "/mcp", SCOPE_CHAT, delete_handle},
    {0},
};

static int module_open(struct server *s, struct error *err) {
    (void)err;
    s->mcp = xcalloc(1, sizeof *s->mcp);
    pthread_mutex_init(&s->mcp->lock, NULL);
    pthread_mutex_init(&s->mcp->calls.lock, NULL);
    return OK;
}

static void module_close(struct server *s) {
    if (!s->mcp) return;
    pthread_mutex_destroy(&s->mcp->lock);
    pthread_mutex_destroy(&s->mcp->calls.lock);
    free(s->mcp);
}

const struct server_module mcp_module = {
    .routes = routes, .open = module_open, .close = module_close};
