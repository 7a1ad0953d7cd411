/*
 * builtin_http: the tool http_get, which reads pages of the hosts that the user allows.
 *
 * http_get_page checks the addresses. This file turns a page into text: HTML is converted, other
 * text is kept, and every other type is refused.
 */
#define _GNU_SOURCE
#include "agent/internal.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { PAGE_LIMIT = 256 << 10, PAGE_SECONDS = 10 };

static int http_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    struct strings *hosts = *ctx = xcalloc(1, sizeof *hosts);
    (void)err;
    for (int i = 0; i < o->hosts->n; i++) strings_add(hosts, o->hosts->v[i]);
    return OK;
}

static void http_release(void *ctx) {
    struct strings *hosts = ctx;
    if (hosts) strings_release(hosts);
    free(hosts);
}

/* The kind of a page by its media type, which ends at a blank or ';'. */
enum page_kind { PAGE_OTHER, PAGE_TEXT, PAGE_HTML };
static enum page_kind page_kind(const char *type) {
    static const struct {
        const char *type;
        enum page_kind kind;
    } kinds[] = {{"text/html", PAGE_HTML},
                 {"application/xhtml+xml", PAGE_HTML},
                 {"application/json", PAGE_TEXT},
                 {"application/xml", PAGE_TEXT}};
    size_t len = strcspn(type, "; \t");
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (strlen(kinds[i].type) == len && strncasecmp(type, kinds[i].type, len) == 0)
            return kinds[i].kind;
    bool structured = len > 5 && (strncasecmp(type + len - 5, "+json", 5) == 0 ||
                                  strncasecmp(type + len - 4, "+xml", 4) == 0);
    return structured || strncasecmp(type, "text/", 5) == 0 ? PAGE_TEXT : PAGE_OTHER;
}

static int page_read(const struct http_page *p, struct buf *out, struct error *err) {
    struct buf title = {0}, text = {0};
    const char *body = p->body.data ? p->body.data : "";
    size_t len = p->body.len == PAGE_LIMIT ? utf8_complete_len(body, p->body.len) : p->body.len;
    enum page_kind kind = page_kind(p->type);
    if (kind == PAGE_OTHER)
        return error_set(err, ERR_FORMAT, "the page is '%.100s', not text", p->type);
    int rc = (kind == PAGE_HTML ? document_read_html : document_read_text)(body, len, &title, &text,
                                                                           err);
    if (rc) error_set(err, ERR_FORMAT, "the page is not text in UTF-8");
    if (!rc && title.len) buf_printf(out, "%s\n\n", title.data);
    if (!rc) buf_add(out, text.data, text.len);
    buf_release(&title);
    buf_release(&text);
    return rc;
}

static int http_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct http_page page;
    int rc =
        http_get_page(json_get_string(arguments, "url"), ctx, PAGE_LIMIT, PAGE_SECONDS, &page, err);
    if (rc) return rc;
    rc = page_read(&page, out, err);
    http_page_release(&page);
    return rc;
}

const struct tool_kind http_get_kind = {
    .need = NEEDS_HOSTS,
    .arguments = {{"url", "the address, with https:// or http://", 1000}},
    .open = http_open,
    .call = http_call,
    .release = http_release};
