/*
 * tools: the list of an agent's tools, and the calls of a tool.
 *
 * A tool may return any bytes. The model gets valid UTF-8 of bounded length without control
 * characters, and always some text: a model that reads nothing tends to repeat its call.
 */
#define _GNU_SOURCE
#include "agent/internal.h"
#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum { MAX_NAME = 64, MAX_MESSAGE = 2048 /* bytes of an error */ };

/* the list */

static void tool_release(const struct agent_tool *t) {
    if (t->release) t->release(t->ctx);
    free(t->name);
    free(t->description);
    json_decref(t->parameters);
}

static int name_check(const struct agent_tools *t, const char *name, struct error *err) {
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
    size_t n = strlen(name);
    if (n < 1 || n > MAX_NAME || strspn(name, allowed) != n)
        return error_set(err, ERR_USAGE,
                         "'%.100s' is not a tool's name: expected 1 to %d letters, digits, _ and -",
                         name, MAX_NAME);
    if (agent_tools_find(t, name) >= 0)
        return error_set(err, ERR_USAGE, "there are two tools '%s'", name);
    return OK;
}

/* Whether the arguments are an object that the grammar can enforce. */
static int parameters_check(const json_t *parameters, struct error *err) {
    const char *type = json_string_value(json_object_get(parameters, "type"));
    if (!type || strcmp(type, "object") != 0)
        return error_set(err, ERR_FORMAT, "the schema must have \"type\": \"object\"");
    struct grammar *g = grammar_new_json_value(parameters, "", err);
    if (!g) return err->code;
    grammar_free(g);
    return OK;
}

static int tool_check(const struct agent_tools *t, const struct agent_tool *tool,
                      struct error *err) {
    if (t->n == AGENT_MAX_TOOLS)
        return error_set(err, ERR_USAGE, "an agent can have at most %d tools", AGENT_MAX_TOOLS);
    int rc = name_check(t, tool->name, err);
    if (rc) return rc;
    if (u8_check((const uint8_t *)tool->description, strlen(tool->description)))
        return error_set(err, ERR_FORMAT, "the description of tool '%s' is not UTF-8", tool->name);
    rc = parameters_check(tool->parameters, err);
    return rc ? error_wrap(err, "the arguments of tool '%s'", tool->name) : OK;
}

int agent_tools_add(struct agent_tools *t, const struct agent_tool *tool, struct error *err) {
    CHECK(tool->name && tool->description && tool->call);
    int rc = tool_check(t, tool, err);
    if (rc) {
        tool_release(tool);
        return rc;
    }
    t->v = xrealloc(t->v, (size_t)(t->n + 1) * sizeof *t->v);
    t->v[t->n++] = *tool;
    return OK;
}

void agent_tools_release(struct agent_tools *t) {
    for (int i = 0; i < t->n; i++) tool_release(&t->v[i]);
    free(t->v);
    *t = (struct agent_tools){0};
}

int agent_tools_find(const struct agent_tools *t, const char *name) {
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->v[i].name, name) == 0) return i;
    return -1;
}

json_t *agent_tools_json(const struct agent_tools *t) {
    json_t *list = json_array();
    for (int i = 0; i < t->n; i++) {
        const struct agent_tool *tool = &t->v[i];
        json_array_append_new(list, json_pack("{s:s,s:{s:s,s:s,s:O}}", "type", "function",
                                              "function", "name", tool->name, "description",
                                              tool->description, "parameters", tool->parameters));
    }
    return list;
}

/* calls */

void text_add_clean(struct buf *out, const char *text, size_t len, size_t limit) {
    static const char mark[] = "\n… (cut)", replacement[] = "\xef\xbf\xbd";
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    size_t begin = out->len, fits = begin; // `fits`: the end of the text if the mark follows
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        const void *bytes = n > 0 ? (const void *)p : replacement;
        size_t size = n > 0 ? (size_t)n : sizeof replacement - 1;
        p += MAX(n, 1);
        if (n > 0 && ((c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0))) continue;
        if (out->len - begin + size > limit) {
            out->len = fits;
            buf_puts(out, mark);
            return;
        }
        buf_add(out, bytes, size);
        if (out->len - begin + sizeof mark - 1 <= limit) fits = out->len;
    }
}

bool agent_tool_call(const struct agent_tool *tool, const json_t *arguments, struct buf *out) {
    struct buf result = {0}, message = {0};
    struct error err;
    size_t begin = out->len;
    bool suspended = translations_suspend(true);
    int rc = json_is_object(arguments)
                 ? tool->call(tool->ctx, arguments, &result, &err)
                 : error_set(&err, ERR_USAGE, "the arguments must be a JSON object");
    translations_suspend(suspended);
    if (rc) {
        buf_puts(&message, "\nerror: ");
        text_add_clean(&message, err.text, strlen(err.text), MAX_MESSAGE);
    }
    text_add_clean(out, result.data, result.len, AGENT_MAX_RESULT - message.len);
    // The error is the last line, also of a result that was cut.
    if (rc) buf_puts(out, message.data + (out->len == begin || out->data[out->len - 1] == '\n'));
    if (out->len == begin) buf_puts(out, "(no output)");
    buf_release(&result);
    buf_release(&message);
    return rc == OK;
}
