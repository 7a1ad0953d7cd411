/*
 * tools: lists of tools, and results of tools as text.
 *
 * A result is a list of contents. Texts are what a model reads; of everything else it gets a line
 * that says what it is. If there is no text, the structured result is shown as JSON.
 */
#include "mcp/internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_NAME = 256,
    MAX_TYPE = 100,
    MAX_URI = 1000,
    MAX_DESCRIPTION = 8 << 10,
    MAX_SCHEMAS = 1 << 20, /* bytes of all schemas of a server; the rest count as too large */
};

/* lists */

/* A new reference to a schema, or NULL if it is too large. */
static json_t *schema_take(const json_t *schema, struct mcp_tools *out) {
    size_t size = json_dumpb(schema, NULL, 0, JSON_COMPACT);
    if (size > MCP_MAX_SCHEMA || out->schema_bytes + size > MAX_SCHEMAS) return NULL;
    out->schema_bytes += size;
    return json_incref((json_t *)(uintptr_t)schema);
}

/* Why a tool is left out; NULL: it is not. */
static const char *tool_problem(const json_t *v) {
    size_t len = json_string_length(json_object_get(v, "name"));
    const char *support = json_get_string(json_object_get(v, "execution"), "taskSupport");
    if (len < 1 || len > MAX_NAME) return "it has no name, or one that is too long";
    if (!json_is_object(json_object_get(v, "inputSchema"))) return "it has no schema";
    if (strcmp(support, "required") == 0) return "it only runs as a task, which is not supported";
    return NULL;
}

int mcp_tools_read(const json_t *result, struct mcp_tools *out, struct error *err) {
    const json_t *list = json_object_get(result, "tools"), *v;
    size_t i;
    if (!json_is_array(list)) return error_set(err, ERR_FORMAT, "its list of tools is not a list");
    json_array_foreach (list, i, v) {
        const char *why = tool_problem(v), *name = json_get_string(v, "name");
        if (out->n == MCP_MAX_TOOLS)
            return error_set(err, ERR_MEMORY, "it has more than %d tools", MCP_MAX_TOOLS);
        if (why) {
            log_warn("MCP tool '%.100s' is left out: %s", name, why);
            continue;
        }
        const char *text = json_get_string(v, "description");
        size_t len = utf8_complete_len(text, MIN(strlen(text), MAX_DESCRIPTION));
        out->v = xrealloc(out->v, (size_t)(out->n + 1) * sizeof *out->v);
        out->v[out->n++] =
            (struct mcp_tool){.name = xstrdup(name),
                              .description = xstrndup(text, len),
                              .schema = schema_take(json_object_get(v, "inputSchema"), out)};
    }
    return OK;
}

void mcp_tools_release(struct mcp_tools *t) {
    for (int i = 0; i < t->n; i++) {
        free(t->v[i].name);
        free(t->v[i].description);
        json_decref(t->v[i].schema);
    }
    free(t->v);
    *t = (struct mcp_tools){0};
}

/* results */

/* Appends a text from a server, at most `max` bytes of it. */
static void cut_add(struct buf *out, const json_t *v, const char *key, size_t max) {
    const char *text = json_get_string(v, key);
    buf_add(out, text, utf8_complete_len(text, MIN(strlen(text), max)));
}

/* "(image, image/png, 1234 bytes)"; the value of `key` is base64. */
static void binary_text(const char *kind, const json_t *v, const char *key, struct buf *out) {
    const char *data = json_get_string(v, key);
    size_t len = strlen(data);
    while (len && data[len - 1] == '=') len--;
    buf_printf(out, "(%s, ", kind);
    cut_add(out, v, "mimeType", MAX_TYPE);
    if (*json_get_string(v, "mimeType")) buf_puts(out, ", ");
    buf_printf(out, "%zu bytes)", len * 3 / 4);
}

static void resource_text(const json_t *v, struct buf *out) {
    const json_t *text = json_object_get(v, "text");
    cut_add(out, v, "uri", MAX_URI);
    buf_puts(out, json_is_string(text) ? ":\n" : ": ");
    if (json_is_string(text))
        buf_puts(out, json_string_value(text));
    else
        binary_text("resource", v, "blob", out);
}

static void content_text(const json_t *v, struct buf *out) {
    const char *type = json_get_string(v, "type");
    if (strcmp(type, "text") == 0) {
        buf_puts(out, json_get_string(v, "text"));
    } else if (strcmp(type, "image") == 0 || strcmp(type, "audio") == 0) {
        binary_text(type, v, "data", out);
    } else if (strcmp(type, "resource") == 0) {
        resource_text(json_object_get(v, "resource"), out);
    } else if (strcmp(type, "resource_link") == 0) {
        buf_puts(out, "(resource '");
        cut_add(out, v, "name", MAX_NAME);
        buf_puts(out, "': ");
        cut_add(out, v, "uri", MAX_URI);
        buf_puts(out, ")");
    } else {
        buf_puts(out, "(content of type '");
        cut_add(out, v, "type", MAX_TYPE);
        buf_puts(out, "')");
    }
}

bool mcp_result_text(const json_t *result, size_t limit, struct buf *out) {
    const json_t *structured = json_object_get(result, "structuredContent"), *v;
    size_t begin = out->len, i;
    bool has_text = false;
    json_array_foreach (json_object_get(result, "content"), i, v) {
        if (out->len - begin > limit) break;
        if (out->len > begin) buf_puts(out, "\n");
        content_text(v, out);
        has_text = has_text || *json_get_string(v, "text");
    }
    if (structured && !has_text) {
        char *text = json_dumps(structured, JSON_COMPACT | JSON_ENCODE_ANY);
        if (text && out->len > begin) buf_puts(out, "\n");
        if (text) buf_puts(out, text);
        free(text);
    }
    if (out->len - begin > limit) out->len = begin + utf8_complete_len(out->data + begin, limit);
    if (out->data) out->data[out->len] = '\0';
    return !json_is_true(json_object_get(result, "isError"));
}
