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

static void message_add(json_t *messages, const char *role, const char *content) {
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", role, "content", content));
}

/* A call in the template's form: NAME stands between the first two texts, the arguments, perhaps
 * after white space, between the last two. All are malloc'ed. */
struct native_call {
    char *before_name, *after_name;
    char *then;     /* brackets and white space only */
    bool described; /* the template writes the descriptions of tools into the prompt */
};

static void native_call_release(struct native_call *c) {
    free(c->before_name);
    free(c->after_name);
    free(c->then);
}

/* Finds the parts of the call of PROBE_TOOL with PROBE_ARGUMENT at the begin of a text. */
static bool native_call_parse(const char *text, struct native_call *out) {
    const char *name = strstr(text, PROBE_TOOL), *after = name ? name + strlen(PROBE_TOOL) : NULL,
               *argument = after ? strstr(after, PROBE_ARGUMENT) : NULL,
               *close = argument ? strchr(argument, '}') : NULL, *open = argument;
    while (open && open > after && *open != '{') open--;
    while (open && open > after && strchr(" \t\n", open[-1])) open--;
    if (!close || open == after) return false;
    out->before_name = xstrndup(text, (size_t)(name - text));
    out->after_name = xstrndup(after, (size_t)(open - after));
    out->then = xstrndup(close + 1, strspn(close + 1, "}]) \t\n"));
    return true;
}

/* False: the template does not write calls as JSON. */
static bool native_call_probe(const struct model *m, struct native_call *out) {
    json_t *messages = json_pack("[{s:s,s:s}]", "role", "user", "content", "question"),
           *arguments = json_pack("{s:i}", PROBE_ARGUMENT, 1),
           *tools = json_pack("[{s:s,s:{s:s,s:s,s:{s:s,s:{}}}}]", "type", "function", "function",
                              "name", PROBE_TOOL, "description", "", "parameters", "type", "object",
                              "properties");
    char *before = render(m, messages, tools, true), *after = NULL;
    json_array_append_new(messages, call_message("", PROBE_TOOL, arguments));
    *out = (struct native_call){.described = before && strstr(before, PROBE_TOOL)};
    if (before) after = render(m, messages, tools, false);
    size_t n = before ? strlen(before) : 0;
    bool found = after && strncmp(before, after, n) == 0 && native_call_parse(after + n, out);
    free(before);
    free(after);
    json_decref(messages);
    json_decref(arguments);
    json_decref(tools);
    return found;
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

static int native_init(struct agent_call_form *f, const struct native_call *c,
                       const struct model *m, const struct agent_tools *t, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < t->n; i++) {
        char *opening = xasprintf("%s%s%s", c->before_name, t->v[i].name, c->after_name);
        rc = tool_init(f, i, m->tok, opening, t->v[i].parameters, c->then, err);
        free(opening);
    }
    size_t n = strlen(c->before_name);
    while (n > 0 && strchr(" \t\n", c->before_name[n - 1])) n--;
    if (t->n > 0) f->stop = xstrndup(c->before_name, n);
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
    struct native_call call = {0};
    bool found = !f->react && native_call_probe(m, &call);
    if (form == AGENT_AUTO) f->react = !found || !call.described;
    f->tools = agent_tools_json(t);
    f->openings = xcalloc((size_t)t->n + 1, sizeof *f->openings);
    f->grammars = xcalloc((size_t)t->n + 1, sizeof *f->grammars);
    int rc = OK;
    if (f->react)
        rc = react_init(f, m, t, err);
    else if (found)
        rc = native_init(f, &call, m, t, err);
    else if (t->n > 0)
        rc = error_set(err, ERR_USAGE,
                       "the model's chat template does not write calls of tools as JSON; use the "
                       "form 'react'");
    native_call_release(&call);
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

json_t *agent_call_form_conversation(const struct agent_call_form *f, const char *system_text,
                                     const json_t *messages) {
    json_t *out = json_array(), *first = json_array_get(messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    bool has_system = role && strcmp(role, "system") == 0;
    struct buf system = {0};
    const char *const parts[] = {
        system_text, has_system ? json_string_value(json_object_get(first, "content")) : NULL,
        f->explanation};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        if (parts[i] && *parts[i]) buf_printf(&system, "%s%s", system.len ? "\n\n" : "", parts[i]);
    if (system.len) message_add(out, "system", system.data);
    for (size_t i = has_system; i < json_array_size(messages); i++)
        json_array_append_new(out, json_deep_copy(json_array_get(messages, i)));
    buf_release(&system);
    return out;
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
    message_add(messages, "assistant", call);
    message_add(messages, "user", seen);
    free(text);
    free(call);
    free(seen);
}

void agent_call_form_add_answer(const struct agent_call_form *f, json_t *messages,
                                const char *thought, const char *answer) {
    char *text = f->react ? xasprintf("Thought: %s\nAnswer: %s", thought, answer) : NULL;
    message_add(messages, "assistant", text ? text : answer);
    free(text);
}

json_t *agent_call_form_request(const struct agent_call_form *f, json_t *messages) {
    json_t *out = json_pack("{s:O}", "messages", messages);
    if (!f->react && f->n_tools) json_object_set(out, "tools", f->tools);
    return out;
}
