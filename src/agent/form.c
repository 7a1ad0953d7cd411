/*
 * form: how a model writes a call: the texts that begin the call of each tool, and the messages
 * that show it a call and its result.
 *
 * The native form is derived from the chat template, not from a table of models: the template
 * renders a conversation that ends with a call, and its text between the generation prompt and
 * the arguments begins a call.
 */
#define _GNU_SOURCE
#include "agent/form.h"

#include <stdlib.h>
#include <string.h>

/* A tool and an argument whose names no template contains. */
#define PROBE_TOOL "shoal_probe"
#define PROBE_ARGUMENT "shoal_argument"

static char *render(const struct model *m, const json_t *messages, const json_t *tools,
                    bool generation_prompt) {
    const struct chat_template_input in = {
        .messages = messages, .tools = tools, .generation_prompt = generation_prompt};
    struct chat_text text = {0};
    struct error err;
    char *out = NULL;
    if (chat_template_render(m->tok, &in, &text, &err) == OK) out = xstrndup(text.text, text.len);
    chat_text_release(&text);
    return out;
}

static json_t *call_message(const char *thought, const char *name, const json_t *arguments) {
    return json_pack("{s:s,s:s,s:[{s:s,s:s,s:{s:s,s:O}}]}", "role", "assistant", "content", thought,
                     "tool_calls", "type", "function", "id", "call00001", "function", "name", name,
                     "arguments", arguments);
}

/* The text that begins a call of a tool in the template's form, without the white space before the
 * arguments; malloc'ed. NULL: the template does not write calls as JSON. *then receives the
 * brackets and the white space after the arguments, malloc'ed. */
static char *native_opening(const struct model *m, const json_t *tools, const char *name,
                            char **then) {
    json_t *messages = json_pack("[{s:s,s:s}]", "role", "user", "content", "question"),
           *arguments = json_pack("{s:i}", PROBE_ARGUMENT, 1);
    char *before = render(m, messages, tools, true), *after = NULL, *opening = NULL;
    json_array_append_new(messages, call_message("", name, arguments));
    if (before) after = render(m, messages, tools, false);
    size_t n = before ? strlen(before) : 0;
    *then = NULL;
    if (after && strncmp(before, after, n) == 0) {
        const char *end = strstr(after + n, PROBE_ARGUMENT), *close = end ? strchr(end, '}') : NULL;
        if (close) *then = xstrndup(close + 1, strspn(close + 1, "}]) \t\n"));
        while (end && end > after + n && *end != '{') end--;
        while (end && end > after + n && strchr(" \t\n", end[-1])) end--;
        if (end && end > after + n) opening = xstrndup(after + n, (size_t)(end - after) - n);
        if (opening && !strstr(opening, name)) {
            free(opening);
            opening = NULL;
        }
    }
    free(before);
    free(after);
    json_decref(messages);
    json_decref(arguments);
    return opening;
}

/* Whether the template writes the description of a tool and calls as JSON. */
static bool template_knows_tools(const struct model *m) {
    json_t *messages = json_pack("[{s:s,s:s}]", "role", "user", "content", "question"),
           *tools = json_pack("[{s:s,s:{s:s,s:s,s:{s:s,s:{}}}}]", "type", "function", "function",
                              "name", PROBE_TOOL, "description", "", "parameters", "type", "object",
                              "properties");
    char *then, *text = render(m, messages, tools, true),
                *opening = native_opening(m, tools, PROBE_TOOL, &then);
    bool found = text && strstr(text, PROBE_TOOL) && opening;
    free(text);
    free(opening);
    free(then);
    json_decref(messages);
    json_decref(tools);
    return found;
}

/* The part that the openings of all tools have in common, without white space at its end: a text
 * that contains it begins a call. */
static char *openings_prefix(char *const *openings, int n, const char *name) {
    const char *end = strstr(openings[0], name);
    size_t len = (size_t)(end - openings[0]);
    for (int i = 1; i < n; i++)
        while (len > 0 && strncmp(openings[0], openings[i], len) != 0) len--;
    while (len > 0 && strchr(" \t\n", openings[0][len - 1])) len--;
    return xstrndup(openings[0], len);
}

static void opening_encode(const struct tokenizer *tok, const char *text, struct token_ids *out) {
    tokenizer_encode(tok, text, strlen(text), TOKENIZER_PARSE_SPECIAL | TOKENIZER_NO_PREFIX_SPACE,
                     out);
}

static int tool_init(struct agent_call_form *f, int i, const struct tokenizer *tok,
                     const char *opening, const json_t *schema, const char *then,
                     struct error *err) {
    opening_encode(tok, opening, &f->openings[i]);
    f->grammars[i] = grammar_new_json_value(schema, then, err);
    return f->grammars[i] ? OK : err->code;
}

static int native_init(struct agent_call_form *f, const struct model *m,
                       const struct agent_tools *t, struct error *err) {
    char **openings = xcalloc((size_t)t->n + 1, sizeof *openings);
    int rc = OK;
    for (int i = 0; rc == OK && i < t->n; i++) {
        char *then;
        openings[i] = native_opening(m, f->tools, t->v[i].name, &then);
        if (!openings[i])
            rc = error_set(err, ERR_USAGE,
                           "the model's chat template does not write calls of tools as JSON; use "
                           "the form 'react'");
        else
            rc = tool_init(f, i, m->tok, openings[i], t->v[i].parameters, then, err);
        free(then);
    }
    if (rc == OK && t->n > 0) f->stop = openings_prefix(openings, t->n, t->v[0].name);
    for (int i = 0; i < t->n; i++) free(openings[i]);
    free(openings);
    return rc;
}

#define REACT_EXPLANATION                                                                          \
    "Answer the question in steps. You can use these tools:\n\n%s\n"                               \
    "Write each step as\n\nThought: what to do next\nAction: the name of a tool\n"                 \
    "Arguments: its arguments as JSON\n\n"                                                         \
    "and read the result after \"Observation:\". When you know the answer, write\n\n"              \
    "Thought: the answer is known\nAnswer: the answer\n"

static int react_init(struct agent_call_form *f, const struct model *m, const struct agent_tools *t,
                      struct error *err) {
    struct buf list = {0};
    int rc = OK;
    buf_puts(&list, "");
    for (int i = 0; rc == OK && i < t->n; i++) {
        char *opening = xasprintf("Action: %s\nArguments:", t->v[i].name),
             *schema = json_dumps(t->v[i].parameters, JSON_COMPACT);
        rc = tool_init(f, i, m->tok, opening, t->v[i].parameters, "\n", err);
        buf_printf(&list, "%s: %s %s\n", t->v[i].name, t->v[i].description, schema);
        free(schema);
        free(opening);
    }
    opening_encode(m->tok, "Answer:", &f->openings[t->n]);
    f->explanation = xasprintf(REACT_EXPLANATION, list.data);
    f->stop = xstrdup("Observation:");
    buf_release(&list);
    return rc;
}

int agent_call_form_init(struct agent_call_form *f, enum agent_form form, const struct model *m,
                         const struct agent_tools *t, struct error *err) {
    *f = (struct agent_call_form){.react = form == AGENT_REACT, .n_tools = t->n};
    if (form == AGENT_AUTO) f->react = !template_knows_tools(m);
    f->tools = agent_tools_json(t);
    f->openings = xcalloc((size_t)t->n + 1, sizeof *f->openings);
    f->grammars = xcalloc((size_t)t->n + 1, sizeof *f->grammars);
    int rc = f->react ? react_init(f, m, t, err) : native_init(f, m, t, err);
    if (rc != OK) return rc;
    f->seqs = xcalloc((size_t)t->n + 1, sizeof *f->seqs);
    for (int i = 0; i <= t->n; i++)
        f->seqs[i] = (struct token_seq){f->openings[i].v, f->openings[i].n};
    return OK;
}

void agent_call_form_release(struct agent_call_form *f) {
    for (int i = 0; f->openings && i <= f->n_tools; i++) token_ids_release(&f->openings[i]);
    for (int i = 0; f->grammars && i < f->n_tools; i++) grammar_free(f->grammars[i]);
    free(f->openings);
    free(f->grammars);
    free(f->seqs);
    free(f->explanation);
    free(f->stop);
    json_decref(f->tools);
    *f = (struct agent_call_form){0};
}

void agent_call_form_add(const struct agent_call_form *f, json_t *messages, const char *thought,
                         const struct agent_tool *tool, const json_t *arguments,
                         const char *observation) {
    if (!f->react) {
        json_array_append_new(messages, call_message(thought, tool->name, arguments));
        json_array_append_new(messages,
                              json_pack("{s:s,s:s,s:s,s:s}", "role", "tool", "name", tool->name,
                                        "tool_call_id", "call00001", "content", observation));
        return;
    }
    char *text = json_dumps(arguments, 0),
         *call = xasprintf("Thought: %s\nAction: %s\nArguments: %s", thought, tool->name, text),
         *seen = xasprintf("Observation: %s", observation);
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "assistant", "content", call));
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", seen));
    free(text);
    free(call);
    free(seen);
}
