/*
 * event_stream: reads streams of events, in which each event is lines "FIELD: VALUE" before an
 * empty line.
 *
 * A line ends with CR, LF or CR LF. The lines of `data` of an event are joined by newlines. An
 * event that the end of the stream cuts off is dropped.
 */
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

/* Whether a header can hold the id of an event. */
static bool id_is_valid(const char *id, size_t len) {
    if (len >= sizeof(((struct event_stream *)0)->id)) return false;
    for (size_t i = 0; i < len; i++)
        if (id[i] < 0x21 || id[i] > 0x7e) return false;
    return true;
}

static void retry_set(struct event_stream *s, const char *digits) {
    size_t n = strspn(digits, "0123456789");
    if (n && n < 10 && !digits[n]) s->retry_ms = strtoll(digits, NULL, 10);
}

static void field_add(struct event_stream *s, const char *name, const char *value, size_t len) {
    if (strcmp(name, "data") == 0) {
        if (s->has_data) buf_puts(&s->data, "\n");
        buf_add(&s->data, value, len);
        s->has_data = true;
    } else if (strcmp(name, "event") == 0) {
        s->is_other = !s->any_type && len && strcmp(value, "message") != 0;
    } else if (strcmp(name, "id") == 0) {
        bool is_valid = id_is_valid(value, len);
        memcpy(s->id, value, is_valid ? len : 0);
        s->id[is_valid ? len : 0] = '\0';
    } else if (strcmp(name, "retry") == 0) {
        retry_set(s, value);
    }
}

/* Ends the event. */
static int event_end(struct event_stream *s, event_receive_fn receive, void *ctx,
                     struct error *err) {
    bool is_message = s->has_data && s->data.len && !s->is_other;
    int rc = is_message ? receive(ctx, s->data.data, s->data.len, err) : OK;
    s->data.len = 0;
    s->has_data = s->is_other = false;
    return rc;
}

static int line_end(struct event_stream *s, event_receive_fn receive, void *ctx,
                    struct error *err) {
    static char none[] = "";
    char *line = s->line.len ? s->line.data : none, *end = line + s->line.len;
    s->line.len = 0;
    if (end - line >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0) line += 3; // a byte order mark
    if (line == end) return event_end(s, receive, ctx, err);
    char *colon = memchr(line, ':', (size_t)(end - line)), *value = colon ? colon + 1 : end;
    if (colon) *colon = '\0';
    value += *value == ' ';
    field_add(s, line, value, (size_t)(end - value));
    return OK;
}

int event_stream_add(struct event_stream *s, const char *data, size_t len, event_receive_fn receive,
                     void *ctx, struct error *err) {
    const char *end = data + len;
    for (int rc; data < end; s->after_cr = data++[0] == '\r') {
        if (s->after_cr && *data == '\n') continue;
        const char *p = data;
        while (p < end && *p != '\r' && *p != '\n') p++;
        buf_add(&s->line, data, (size_t)(p - data));
        if (s->line.len + s->data.len > EVENT_MAX_BYTES)
            return error_set(err, ERR_MEMORY, "it sent an event of more than %d MiB",
                             EVENT_MAX_BYTES >> 20);
        if (p == end) {
            s->after_cr = false;
            return OK;
        }
        data = p;
        if ((rc = line_end(s, receive, ctx, err)) != OK) return rc;
    }
    return OK;
}

void event_stream_release(struct event_stream *s) {
    buf_release(&s->line);
    buf_release(&s->data);
}
