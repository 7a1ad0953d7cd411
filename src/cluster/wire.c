/*
 * wire: see wire.h.
 */
#include "cluster/wire.h"

#include <string.h>

enum { HEAD_MAX = 4096 };

void wire_write(struct buf *out, json_t *head, const void *body, size_t len) {
    buf_add_json_line(out, head);
    if (len) buf_add(out, body, len);
}

json_t *wire_read(const struct bus_message *m, const uint8_t **body, size_t *len) {
    static const struct json_limits limits = {.depth = 4, .cost = 1 << 20};
    struct json_limits left = limits;
    struct error err;
    const uint8_t *end = memchr(m->data, '\n', MIN(m->len, HEAD_MAX));
    if (!end) return NULL;
    json_t *v = json_parse_limited((const char *)m->data, (size_t)(end - m->data), "a message",
                                   &left, &err);
    if (!json_is_object(v)) {
        json_decref(v);
        return NULL;
    }
    *body = end + 1;
    *len = m->len - (size_t)(end + 1 - m->data);
    return v;
}

int wire_publish(struct bus *b, const char *subject, json_t *head, const void *body, size_t len,
                 struct error *err) {
    struct buf text = {0};
    wire_write(&text, head, body, len);
    int rc = bus_publish(b, subject, text.data, text.len, err);
    buf_release(&text);
    return rc;
}
