/*
 * client: requests to a server of the Model Context Protocol (JSON-RPC 2.0), and the messages that
 * arrive before the answer: notifications, requests of the server, and invalid messages.
 *
 * Invariants:
 * 1. One request is open at a time. Only a response with its id answers it, or an error whose id is
 *    null; other responses belong to requests that timed out, or are wrong, and are ignored.
 * 2. Every message counts for the limits of the exchange, whatever it is, so a server cannot keep a
 *    request open by sending.
 * 3. Invalid messages do not end an exchange: programs that print a line to stdout are common. If
 *    no answer arrives, the error reports them.
 */
#define _GNU_SOURCE
#include "mcp/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* The versions that the client speaks; the first is the one that it proposes. */
static const char *const versions[] = {"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"};

enum {
    MAX_MESSAGES = 10000, /* in an exchange */
    MAX_LOGGED = 20,      /* messages of the server that are logged in an exchange */
    MAX_PAGES = 100,
    MAX_ID = 256, /* bytes of the id of a server's request */
};
#define DEFAULT_SECONDS 60.0
/* Limit of time for messages that have no answer. */
#define POST_SECONDS 5.0
/* Seconds by which a timer of libcurl may be early. */
#define TIMER_SLACK 0.01
static const struct json_limits message_limits = {
    .depth = 64, .cost = (size_t)64 << 20, .allow_duplicate_keys = true};

struct mcp_client {
    struct mcp_transport *transport;
    double seconds;
    int64_t last_id;
    const char *version;
    bool has_tools, tools_changed;
};

/* A request and its answer. */
struct request {
    struct mcp_client *client;
    int64_t id;
    double deadline;
    json_t *result;       /* owned; NULL until it is answered */
    struct error failure; /* code: 0, or ERR_STATE for an answer that is an error */
    int n_messages, n_logged, n_invalid;
    size_t n_bytes;
};

/* messages */

struct mcp_message mcp_message_read(const json_t *v) {
    struct mcp_message m = {.method = json_string_value(json_object_get(v, "method")),
                            .id = json_object_get(v, "id"),
                            .params = json_object_get(v, "params"),
                            .result = json_object_get(v, "result"),
                            .error = json_object_get(v, "error")};
    bool has_id = json_is_integer(m.id) || json_is_string(m.id);
    if (strcmp(json_get_string(v, "jsonrpc"), "2.0") != 0)
        m.kind = MCP_INVALID;
    else if (m.method)
        m.kind = has_id ? MCP_REQUEST : m.id ? MCP_INVALID : MCP_NOTIFICATION;
    else if (json_is_object(m.error))
        m.kind = MCP_RESPONSE;
    else if (json_is_object(m.result) && has_id)
        m.kind = MCP_RESPONSE;
    return m;
}

/* Sends a message that has no answer; takes ownership of `v`. */
static int post(struct mcp_client *c, json_t *v, double deadline, struct error *err) {
    char *text = json_dumps(v, JSON_COMPACT);
    CHECK(text);
    int rc = c->transport->post(c->transport, text, strlen(text),
                                MIN(deadline, clock_now() + POST_SECONDS), err);
    free(text);
    json_decref(v);
    return rc;
}

static int notify(struct mcp_client *c, const char *method, json_t *params, struct error *err) {
    return post(c,
                json_pack("{s:s,s:s,s:o*}", "jsonrpc", "2.0", "method", method, "params", params),
                INFINITY, err);
}

/* Answers a request of the server. */
static int request_answer(struct request *q, const struct mcp_message *m, struct error *err) {
    if (json_is_string(m->id) && json_string_length(m->id) > MAX_ID) {
        q->n_invalid++;
        return OK;
    }
    json_t *answer =
        strcmp(m->method, "ping") == 0
            ? json_pack("{s:s,s:O,s:{}}", "jsonrpc", "2.0", "id", m->id, "result")
            : json_pack("{s:s,s:O,s:{s:i,s:s}}", "jsonrpc", "2.0", "id", m->id, "error", "code",
                        -32601, "message", "this client does not offer the method");
    return post(q->client, answer, q->deadline, err);
}

/* Logs a progress or log notification, if it is worth a line. */
static void notification_log(struct request *q, const struct mcp_message *m) {
    const char *level = json_get_string(m->params, "level"),
               *message = json_get_string(m->params, "message");
    const json_t *data = json_object_get(m->params, "data");
    char *text = NULL;
    if (strcmp(m->method, "notifications/progress") == 0)
        text = *message ? xstrdup(message)
                        : xasprintf("progress %.6g", json_get_number(m->params, "progress"));
    else if (strcmp(m->method, "notifications/message") == 0 && strcmp(level, "debug") != 0 &&
             strcmp(level, "info") != 0 && strcmp(level, "notice") != 0)
        text = json_is_string(data) ? xstrdup(json_string_value(data))
                                    : json_dumps(data, JSON_COMPACT | JSON_ENCODE_ANY);
    if (text && *text && q->n_logged++ < MAX_LOGGED) log_info("MCP server: %.500s", text);
    free(text);
}

static void notification_read(struct request *q, const struct mcp_message *m) {
    if (strcmp(m->method, "notifications/tools/list_changed") == 0)
        q->client->tools_changed = true;
    else
        notification_log(q, m);
}

static int response_read(struct request *q, const struct mcp_message *m) {
    bool is_ours = json_is_integer(m->id) && json_integer_value(m->id) == q->id;
    if (!is_ours && !(m->error && (!m->id || json_is_null(m->id)))) return OK;
    const char *message = json_get_string(m->error, "message");
    if (m->error)
        error_set(&q->failure, ERR_STATE, "%.1000s (error %.0f)", *message ? message : "no message",
                  json_get_number(m->error, "code"));
    else
        q->result = json_incref((json_t *)(uintptr_t)m->result);
    return MCP_DONE;
}

static int message_receive(struct request *q, const json_t *v, struct error *err) {
    const struct mcp_message m = mcp_message_read(v);
    if (++q->n_messages > MAX_MESSAGES)
        return error_set(err, ERR_MEMORY, "it sent more than %d messages without an answer",
                         MAX_MESSAGES);
    if (m.kind == MCP_REQUEST) return request_answer(q, &m, err);
    if (m.kind == MCP_RESPONSE) return response_read(q, &m);
    if (m.kind == MCP_NOTIFICATION)
        notification_read(q, &m);
    else
        q->n_invalid++;
    return OK;
}

/* One message, or a list of messages (version 2025-03-26). */
static int text_receive(void *ctx, const char *text, size_t len, struct error *err) {
    struct request *q = ctx;
    struct json_limits left = message_limits;
    struct error invalid;
    int rc = OK;
    q->n_bytes += len;
    if (q->n_bytes > MCP_MAX_EXCHANGE)
        return error_set(err, ERR_MEMORY, "it sent more than %d MiB without an answer",
                         MCP_MAX_EXCHANGE >> 20);
    json_t *v = json_parse_limited(text, len, "a message", &left, &invalid);
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; rc == OK && i < n; i++)
        rc = message_receive(q, json_is_array(v) ? json_array_get(v, i) : v, err);
    json_decref(v);
    return rc;
}

/* requests */

/* Sends the request and waits for its answer. */
static int request_run(struct request *q, const char *method, const json_t *params,
                       struct error *err) {
    struct mcp_client *c = q->client;
    json_t *v = json_pack("{s:s,s:I,s:s,s:O*}", "jsonrpc", "2.0", "id", (json_int_t)q->id, "method",
                          method, "params", params);
    char *text = v ? json_dumps(v, JSON_COMPACT) : NULL;
    CHECK(text);
    int rc =
        c->transport->exchange(c->transport, text, strlen(text), q->deadline, text_receive, q, err);
    free(text);
    json_decref(v);
    if (rc < 0 && clock_now() >= q->deadline - TIMER_SLACK)
        error_set(err, ERR_STATE, "no answer within %.3g seconds", c->seconds);
    if (rc < 0 && q->n_invalid)
        error_wrap(err, "%d of its messages were not JSON-RPC 2.0", q->n_invalid);
    return rc;
}

/* Tells the server that the answer to a request is not expected any more. */
static void request_cancel(const struct request *q) {
    struct error ignored;
    notify(q->client, "notifications/cancelled",
           json_pack("{s:I,s:s}", "requestId", (json_int_t)q->id, "reason", "no answer in time"),
           &ignored);
}

static json_t *request_once(struct mcp_client *c, const char *method, const json_t *params,
                            struct error *err) {
    struct request q = {.client = c, .id = ++c->last_id, .deadline = clock_now() + c->seconds};
    int rc = request_run(&q, method, params, err);
    if (rc < 0 && c->version && rc != ERR_MISSING) request_cancel(&q);
    if (rc == MCP_DONE && q.failure.code) *err = q.failure;
    if (q.result && rc < 0) json_decref(q.result);
    return rc < 0 ? NULL : q.result;
}

static bool version_choose(struct mcp_client *c, const char *version) {
    for (size_t i = 0; i < ARRAY_LEN(versions); i++)
        if (strcmp(versions[i], version) == 0) c->version = versions[i];
    return c->version;
}

static int initialize(struct mcp_client *c, struct error *err) {
    json_t *params =
        json_pack("{s:s,s:{},s:{s:s,s:s}}", "protocolVersion", versions[0], "capabilities",
                  "clientInfo", "name", "shoal", "version", SHOAL_VERSION);
    c->version = NULL;
    c->transport->version_set(c->transport, NULL);
    json_t *result = request_once(c, "initialize", params, err);
    json_decref(params);
    if (!result) return err->code;
    const char *version = json_get_string(result, "protocolVersion");
    int rc = OK;
    if (!version_choose(c, version))
        rc = error_set(err, ERR_MISMATCH,
                       "it speaks version '%.40s' of the protocol, which this program does not",
                       version);
    c->has_tools =
        json_is_object(json_object_get(json_object_get(result, "capabilities"), "tools"));
    json_decref(result);
    if (rc) return rc;
    c->transport->version_set(c->transport, c->version);
    return notify(c, "notifications/initialized", NULL, err);
}

/* Sends a request. If the server has ended the session, it begins another and sends the request
 * once more. */
static json_t *request_send(struct mcp_client *c, const char *method, const json_t *params,
                            struct error *err) {
    json_t *result = request_once(c, method, params, err);
    if (!result && err->code == ERR_MISSING && initialize(c, err) == OK)
        result = request_once(c, method, params, err);
    return result;
}

/* the client */

static bool is_address(const char *target) {
    return strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0;
}

struct mcp_client *mcp_open(const char *target, const struct mcp_options *o, struct error *err) {
    struct mcp_transport *t = is_address(target) ? mcp_http_open(target, o->headers)
                                                 : mcp_stdio_open(target, o->env, err);
    if (!t) return NULL;
    struct mcp_client *c = xcalloc(1, sizeof *c);
    *c = (struct mcp_client){.transport = t,
                             .seconds = o->seconds > 0 ? o->seconds : DEFAULT_SECONDS};
    if (initialize(c, err) == OK) return c;
    mcp_close(c);
    return NULL;
}

const char *mcp_version(const struct mcp_client *c) {
    return c->version;
}

void mcp_close(struct mcp_client *c) {
    if (c) c->transport->close(c->transport);
    free(c);
}

int mcp_tools_list(struct mcp_client *c, struct mcp_tools *out, struct error *err) {
    json_t *params = json_object();
    int rc = OK;
    *out = (struct mcp_tools){0};
    for (int page = 0; rc == OK && params && c->has_tools; page++) {
        json_t *result = page < MAX_PAGES ? request_send(c, "tools/list", params, err) : NULL;
        if (page == MAX_PAGES)
            rc = error_set(err, ERR_MEMORY, "its list of tools has more than %d pages", MAX_PAGES);
        else
            rc = result ? mcp_tools_read(result, out, err) : err->code;
        json_t *cursor = json_object_get(result, "nextCursor");
        json_decref(params);
        params = json_is_string(cursor) ? json_pack("{s:O}", "cursor", cursor) : NULL;
        json_decref(result);
    }
    json_decref(params);
    return rc;
}

bool mcp_tools_changed(struct mcp_client *c) {
    bool changed = c->tools_changed;
    c->tools_changed = false;
    return changed;
}

int mcp_tool_call(struct mcp_client *c, const char *name, const json_t *arguments, size_t limit,
                  struct buf *out, struct error *err) {
    json_t *params = json_pack("{s:s,s:O,s:{s:I}}", "name", name, "arguments", arguments, "_meta",
                               "progressToken", (json_int_t)c->last_id + 1);
    CHECK(params);
    json_t *result = request_send(c, "tools/call", params, err);
    json_decref(params);
    if (!result) return err->code;
    bool succeeded = mcp_result_text(result, limit, out);
    json_decref(result);
    return succeeded ? OK : error_set(err, ERR_STATE, "the tool failed");
}
