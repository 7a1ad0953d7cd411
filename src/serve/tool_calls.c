/*
 * tool_calls: parses tool calls.
 *
 * A text is parsed again whenever it has grown; a value that is not complete is left for the next
 * time, except for the begin of the arguments. The forms, as the models' chat templates have them,
 * with CALL for {"name": "f", "arguments": {…}}:
 *
 *     Hermes, Qwen   <tool_call>CALL</tool_call> …
 *     Mistral        [TOOL_CALLS][CALL, …]
 *                    [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…, perhaps [CALL_ID]ID before [ARGS]
 *     Granite        <|tool_call|>[CALL, …]
 *     Llama 3        <|python_tag|>CALL; …, with "parameters"
 *     DeepSeek       <｜tool▁calls▁begin｜>, then for each call
 *                    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
 *                    earlier: function<｜tool▁sep｜>f and {…} in a block ```json
 */
#define _GNU_SOURCE
#include "serve/tool_calls.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Hermes, Mistral, Granite, DeepSeek, Llama 3. */
static const struct tool_form forms[] = {
    {.open = "<tool_call>", .close = "</tool_call>"},
    {.open = "[TOOL_CALLS]", .separator = "[ARGS]"},
    {.open = "<|tool_call|>"},
    {.open = "<｜tool▁call▁begin｜>",
     .close = "<｜tool▁call▁end｜>",
     .separator = "<｜tool▁sep｜>",
     .begin = "<｜tool▁calls▁begin｜>"},
    {.open = "<|python_tag|>"},
};
static const char call_id_tag[] = "[CALL_ID]";

const struct tool_form *tool_form_find(const char *chat_template) {
    for (size_t i = 0; chat_template && i < ARRAY_LEN(forms); i++)
        if (strstr(chat_template, forms[i].open)) return &forms[i];
    return &forms[0];
}

bool tool_form_has_token(const struct tool_form *f, const struct tokenizer *tok, int32_t id) {
    const char *const tags[] = {f->open, f->close, f->separator, f->begin, call_id_tag};
    for (size_t i = 0; i < ARRAY_LEN(tags); i++)
        if (tags[i] && tokenizer_piece_to_id(tok, tags[i]) == id) return true;
    return false;
}

size_t tag_partial_match(const char *text, size_t n, const char *tag) {
    size_t k = MIN(strlen(tag) - 1, n);
    while (k > 0 && memcmp(text + n - k, tag, k) != 0) k--;
    return k;
}

size_t tool_form_holdback(const struct tool_form *f, const char *text, size_t n) {
    size_t held = tag_partial_match(text, n, f->open);
    return f->begin ? MAX(held, tag_partial_match(text, n, f->begin)) : held;
}

static const char *find(const char *p, const char *end, const char *tag) {
    return p < end ? memmem(p, (size_t)(end - p), tag, strlen(tag)) : NULL;
}

static const char *skip(const char *p, const char *end, const char *characters) {
    while (p < end && *p && strchr(characters, *p)) p++;
    return p;
}

const char *skip_whitespace(const char *p, const char *end) {
    return skip(p, end, " \n\r\t");
}

const char *tool_form_first(const struct tool_form *f, const char *p, const char *end) {
    const char *open = find(p, end, f->open),
               *begin = f->begin ? find(p, open ? open : end, f->begin) : NULL;
    return begin ? begin : open;
}

const char *tool_form_next(const struct tool_form *f, const char *p, const char *end,
                           bool follows) {
    if (follows && !f->close) {
        const char *next = skip(p, end, " \n\r\t,;");
        if (next < end && *next == '{') return next;
    }
    const char *open = find(p, end, f->open);
    if (!open) return NULL;
    p = skip_whitespace(open + strlen(f->open), end);
    if (p < end && *p == '[' && !f->close) p = skip_whitespace(p + 1, end);
    return p < end && *p != ']' ? p : NULL;
}

/* The end of the JSON value that begins at `p`; NULL: the value does not end before `end`. */
static const char *json_value_end(const char *p, const char *end) {
    int depth = 0;
    bool text = false;
    for (; p < end; p++) {
        if (text) {
            if (*p == '\\')
                p++;
            else if (*p == '"')
                text = false;
        } else if (*p == '"') {
            text = true;
        } else if (*p == '{' || *p == '[') {
            depth++;
        } else if (*p == '}' || *p == ']') {
            if (--depth < 0) return p; // end of a number, true, false or null in an object
        } else if (*p == ',' && depth == 0) {
            return p;
        }
        if (!text && depth == 0 && (*p == '"' || *p == '}' || *p == ']')) return p + 1;
    }
    return NULL;
}

const char *tool_call_parse_json(const char *text, const char *p, const char *end,
                                 struct tool_call *c) {
    static const char *const args[] = {"\"arguments\"", "\"parameters\""};
    p = skip_whitespace(p, end);
    if (p == end || *p++ != '{') return NULL;
    while ((p = skip_whitespace(p, end)) < end && *p != '}') {
        const char *key = p, *key_end = json_value_end(p, end);
        if (!key_end) return NULL;
        p = skip_whitespace(key_end, end);
        if (p == end || *p != ':') return NULL;
        const char *v = skip_whitespace(p + 1, end), *v_end = json_value_end(v, end);
        size_t n = (size_t)(key_end - key);
        if (n == 6 && memcmp(key, "\"name\"", 6) == 0 && v_end && *v == '"' && !c->name) {
            json_t *name = json_loadb(v, (size_t)(v_end - v), JSON_DECODE_ANY, NULL);
            c->name = name ? xstrdup(json_string_value(name)) : NULL;
            json_decref(name);
        }
        for (size_t i = 0; i < ARRAY_LEN(args); i++)
            if (n == strlen(args[i]) && memcmp(key, args[i], n) == 0 && v < end) {
                c->args = (size_t)(v - text);
                c->args_end = v_end ? (size_t)(v_end - text) : 0;
            }
        if (!v_end) return NULL;
        p = skip_whitespace(v_end, end);
        if (p < end && *p == ',') p++;
    }
    return p < end ? p + 1 : NULL;
}

static void name_set(struct tool_call *c, const char *from, const char *to) {
    from = skip_whitespace(from, to);
    while (to > from && strchr(" \n\r\t", to[-1])) to--;
    if (!c->name && to > from) c->name = xstrndup(from, (size_t)(to - from));
}

/* A call NAME separator {arguments}. */
static const char *named_call_parse(const struct tool_form *f, const char *text, const char *p,
                                    const char *end, struct tool_call *c) {
    const char *separator = find(p, end, f->separator);
    if (!separator) return NULL;
    const char *call_id = find(p, separator, call_id_tag),
               *name_end = call_id ? call_id : separator,
               *body = skip_whitespace(separator + strlen(f->separator), end);
    if (body == end) return NULL;
    if (*body != '{') { // "function", and the name on a line of its own
        p = body;
        name_end = memchr(body, '\n', (size_t)(end - body));
        body = name_end ? memchr(name_end, '{', (size_t)(end - name_end)) : NULL;
        if (!body) return NULL;
    }
    name_set(c, p, name_end);
    const char *body_end = json_value_end(body, end);
    c->args = (size_t)(body - text);
    c->args_end = body_end ? (size_t)(body_end - text) : 0;
    return body_end;
}

const char *tool_call_parse(const struct tool_form *f, const char *text, const char *p,
                            const char *end, struct tool_call *c) {
    const char *close = f->close ? find(p, end, f->close) : NULL, *body_end = close ? close : end;
    bool named = f->separator && p < end && *p != '{';
    const char *call_end = named ? named_call_parse(f, text, p, body_end, c)
                                 : tool_call_parse_json(text, p, body_end, c);
    if (!f->close) return call_end;
    return close ? close + strlen(f->close) : NULL;
}
