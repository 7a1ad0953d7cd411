/*
 * attempt: one request for a reply, whole or as a stream of events, and the probe of a server.
 *
 * A stream is OpenAI's: each event is a chunk with a part of the text, the last one is [DONE],
 * which servers may omit. A server that ignores `stream` and sends the whole reply is accepted, and
 * so is one that sends a stream without being asked for it.
 * Parts of the text are held back while they may begin the API key, which therefore is not passed
 * on even if the server splits it.
 */
#define _GNU_SOURCE
#include "remote/internal.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { EVENT_DONE = 1 }; /* result of chunk_receive: the stream is complete */
#define MAX_RETRY_AFTER 60.0

/* whole replies */

static int64_t token_count(const json_t *v, const char *key) {
    json_int_t n = json_integer_value(json_object_get(json_object_get(v, "usage"), key));
    return n > 0 && n < INT32_MAX ? n : 0;
}

/* Reads finish_reason and usage of a reply, or of a chunk that has them. */
static void reply_end_read(const json_t *v, struct remote_reply *out) {
    const json_t *choice = json_array_get(json_object_get(v, "choices"), 0);
    int64_t prefilled = token_count(v, "prompt_tokens"),
            generated = token_count(v, "completion_tokens");
    out->truncated |= strcmp(json_get_string(choice, "finish_reason"), "length") == 0;
    if (prefilled) out->prefilled = prefilled;
    if (generated) out->generated = generated;
}

/* Reads a whole reply. A model that only reasons until its limit has the content null: its text is
 * empty. */
static int reply_read(const struct remote *r, const struct buf *body, bool is_chat,
                      struct remote_reply *out, struct error *err) {
    json_t *v = remote_body_parse(body, err);
    if (!v) return err->code;
    const json_t *choice = json_array_get(json_object_get(v, "choices"), 0),
                 *message = json_object_get(choice, "message"),
                 *text = is_chat ? json_object_get(message, "content")
                                 : json_object_get(choice, "text");
    int rc = OK;
    if (json_is_string(text) || (message && json_is_null(text)))
        out->text = xstrdup(json_is_string(text) ? json_string_value(text) : "");
    else
        rc = error_set(err, ERR_FORMAT, "the response has no '%s', as a reply of OpenAI's API has",
                       is_chat ? "choices[0].message.content" : "choices[0].text");
    if (rc == OK && remote_has_key(r, out->text))
        rc = error_set(err, ERR_FORMAT, "the reply contains the API key");
    reply_end_read(v, out);
    json_decref(v);
    return rc;
}

/* streams */

struct stream {
    const struct remote *r;
    const struct remote_attempt *a;
    struct remote_reply *out;
    bool is_chat, has_end; /* has_end: a chunk had the finish_reason */
    struct event_stream events;
    struct buf text; /* all of it */
    size_t passed;   /* bytes of the text that were passed on, or may be if on_text is NULL */
    struct buf body; /* the body, if the response is not a stream of events */
    int rc;          /* EVENT_DONE, OK, or an error */
    struct error *err;
};

/* Bytes at the end of the text that are a beginning of the key. */
static size_t key_begin_len(const struct stream *s) {
    const char *key = s->r->key;
    size_t n = key ? MIN(strlen(key) - 1, s->text.len) : 0;
    while (n && memcmp(s->text.data + s->text.len - n, key, n) != 0) n--;
    return n;
}

/* Passes on the text up to its last `held` bytes. */
static void text_pass(struct stream *s, size_t held) {
    size_t n = s->text.len - held - s->passed;
    if (n && s->a->on_text) s->a->on_text(s->a->ctx, s->text.data + s->passed, n);
    s->passed += n;
}

static int text_add(struct stream *s, const char *text) {
    size_t most = s->a->max_text ? s->a->max_text : REMOTE_MAX_RESPONSE;
    buf_puts(&s->text, text);
    if (s->text.len > most)
        return error_set(s->err, ERR_MEMORY, "the reply has more than %zu bytes", most);
    // the text that was passed on does not even end in a beginning of the key
    if (s->text.len && remote_has_key(s->r, s->text.data + s->passed))
        return error_set(s->err, ERR_FORMAT, "the reply contains the API key");
    text_pass(s, key_begin_len(s));
    return OK;
}

/* Reads an event: a chunk of the reply, an error or the end. */
static int chunk_receive(void *ctx, const char *text, size_t len, struct error *err) {
    struct stream *s = ctx;
    const struct buf body = {.data = (char *)(uintptr_t)text, .len = len};
    if (len == 6 && memcmp(text, "[DONE]", len) == 0) return EVENT_DONE;
    json_t *v = remote_body_parse(&body, err);
    if (!v) return err->code;
    const json_t *choice = json_array_get(json_object_get(v, "choices"), 0);
    const char *part = s->is_chat ? json_get_string(json_object_get(choice, "delta"), "content")
                                  : json_get_string(choice, "text");
    int rc = OK;
    if (json_object_get(v, "error"))
        rc = remote_reported_error(s->r, v, err);
    else if (!json_is_array(json_object_get(v, "choices")))
        rc = error_set(err, ERR_FORMAT,
                       "an event of the response has no 'choices', as a chunk of OpenAI's API has");
    if (rc == OK) rc = text_add(s, part);
    if (rc == OK) reply_end_read(v, s->out);
    s->has_end |= *json_get_string(choice, "finish_reason") != '\0';
    json_decref(v);
    return rc;
}

static bool is_event_stream(const struct http_response *r) {
    static const char type[] = "text/event-stream";
    const char *got = r->headers[0] ? r->headers[0] : "";
    return r->status == 200 && strncasecmp(got, type, strlen(type)) == 0;
}

static bool on_body(void *ctx, const struct http_response *r, const char *data, size_t len) {
    struct stream *s = ctx;
    if (!is_event_stream(r))
        buf_add(&s->body, data, len);
    else
        s->rc = event_stream_add(&s->events, data, len, chunk_receive, s, s->err);
    return s->rc == OK;
}

/* The result of a response that arrived. */
static int response_read(struct stream *s, const struct http_response *response) {
    int rc = s->rc;
    if (response->status != 200)
        return remote_status_error(s->r, response->status, &s->body, s->err);
    if (is_event_stream(response) && rc == OK && !s->has_end)
        return error_set(s->err, ERR_FORMAT, "the stream ended before its reply was complete");
    if (!is_event_stream(response))
        rc = reply_read(s->r, &s->body, s->is_chat, s->out, s->err);
    else if (rc == EVENT_DONE)
        rc = OK;
    if (rc == OK && !s->out->text && !s->a->on_text)
        s->out->text = xstrdup(s->text.data ? s->text.data : "");
    if (rc == OK && s->out->text && s->a->on_text) rc = text_add(s, s->out->text);
    if (rc == OK && s->a->on_text) text_pass(s, 0);
    if (rc == OK && s->a->max_text && s->out->text && strlen(s->out->text) > s->a->max_text)
        rc = error_set(s->err, ERR_MEMORY, "the reply has more than %zu bytes", s->a->max_text);
    return rc;
}

/* requests */

/* The request with the client's model and the fields of a stream, as text; malloc'ed. */
static char *request_body(const struct remote *r, const json_t *request, bool stream) {
    json_t *v = json_copy((json_t *)(uintptr_t)request);
    json_object_set_new(v, "model", json_string_lossy(remote_model(r), strlen(remote_model(r))));
    if (stream) {
        json_object_set_new(v, "stream", json_true());
        json_object_set_new(v, "stream_options", json_pack("{s:b}", "include_usage", 1));
    }
    char *body = json_dumps(v, JSON_COMPACT);
    CHECK(body);
    json_decref(v);
    return body;
}

/* Seconds of Retry-After. A date is not read: the usual pause applies. */
static double retry_after(const char *text) {
    char *end = NULL;
    double seconds = text ? strtod(text, &end) : 0;
    return end && *end == '\0' && seconds > 0 ? MIN(seconds, MAX_RETRY_AFTER) : 0;
}

int remote_try(struct remote *r, const json_t *request, const struct remote_attempt *a,
               struct remote_reply *out, struct error *err) {
    struct stream s = {.r = r, .a = a, .out = out, .err = err};
    struct http_response response;
    s.is_chat = json_object_get(request, "messages");
    char *url = xasprintf("%s/%s", r->url, s.is_chat ? "chat/completions" : "completions"),
         *body = request_body(r, request, a->on_text != NULL);
    *out = (struct remote_reply){.attempts = 1};
    int rc =
        http_request(&(struct http_request){.method = "POST",
                                            .url = url,
                                            .headers = &r->headers,
                                            .body = body,
                                            .body_len = strlen(body),
                                            .keep_headers = {"Content-Type", "Retry-After"},
                                            .max_body = REMOTE_MAX_RESPONSE,
                                            .seconds = a->seconds > 0 ? a->seconds : r->seconds,
                                            .cancel = a->cancel,
                                            .on_body = on_body,
                                            .ctx = &s},
                     &response, err);
    out->status = response.status;
    out->retry_after = retry_after(response.headers[1]);
    if (rc == OK) rc = response_read(&s, &response);
    if (a->on_text) {
        free(out->text);
        out->text = NULL;
    }
    http_response_release(&response);
    event_stream_release(&s.events);
    buf_release(&s.text);
    buf_release(&s.body);
    free(url);
    free(body);
    return rc;
}

int remote_probe(struct remote *r, double seconds, const atomic_bool *cancel, struct error *err) {
    struct http_response response;
    char *url = xasprintf("%s/models", r->url);
    int rc = http_request(&(struct http_request){.method = "GET",
                                                 .url = url,
                                                 .headers = &r->headers,
                                                 .max_body = REMOTE_MAX_RESPONSE,
                                                 .seconds = seconds,
                                                 .cancel = cancel},
                          &response, err),
        status = response.status;
    if (rc == OK && (status >= 500 || status == 401 || status == 403 || status == 429))
        rc = remote_status_error(r, status, &response.body, err);
    http_response_release(&response);
    free(url);
    return rc;
}
