/*
 * forms: the forms of training samples that other programs write, converted to {messages, tools},
 * {prompt, completion} or {text}, which data.c reads.
 *
 * A form is known by its keys: of the forms whose required keys are all there, the first one of the
 * table counts. Other keys are ignored, unless they say that the sample must not be learned like
 * this: the label of KTO, a rejected answer. Nothing that a model could learn is dropped: what
 * cannot be converted is an error.
 */
#include "data/internal.h"
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_KEYS = 2 };
struct form {
    const char *name, *keys[MAX_KEYS]; /* required keys; two are a question and its answer */
    /* Adds messages and tools to `out`. NULL: the sample is read as it is. */
    int (*convert)(const struct form *f, const json_t *v, json_t *out, struct error *err);
};
static int from_messages(const struct form *f, const json_t *v, json_t *out, struct error *err);
static int from_sharegpt(const struct form *f, const json_t *v, json_t *out, struct error *err);
static int from_pair(const struct form *f, const json_t *v, json_t *out, struct error *err);

static const struct form forms[] = {
    {"messages", {"messages"}, from_messages},
    {"sharegpt", {"conversations"}, from_sharegpt},
    {"alpaca", {"instruction", "output"}, from_pair},
    {"dolly", {"instruction", "response"}, from_pair},
    {"prompt-completion", {"prompt", "completion"}, NULL},
    {"prompt-response", {"prompt", "response"}, from_pair},
    {"query-response", {"query", "response"}, from_pair},
    {"question-answer", {"question", "answer"}, from_pair},
    {"input-output", {"input", "output"}, from_pair},
    {"text", {"text"}, NULL},
};

static int key_error(struct error *err, const char *key, const char *what) {
    return error_set(err, ERR_FORMAT, "'%s' %s", key, what);
}

/* Sets *out to the string of a key; "" if the key is missing or null. */
static int text_get(const json_t *v, const char *key, const char **out, struct error *err) {
    const json_t *text = json_object_get(v, key);
    *out = !text || json_is_null(text) ? "" : json_string_value(text);
    return *out ? OK : key_error(err, key, "must be a string");
}

/* messages: as in chat requests and in OpenAI's files for fine-tuning */

/* The text of a list of parts {type, text}. */
static json_t *parts_text(const json_t *parts, struct error *err) {
    struct buf text = {0};
    size_t i;
    const json_t *part;
    int rc = OK;
    buf_puts(&text, "");
    json_array_foreach ((json_t *)(uintptr_t)parts, i, part) {
        const char *piece = json_string_value(json_object_get(part, "text"));
        if (piece)
            buf_puts(&text, piece);
        else
            rc = key_error(err, "content", "has a part without text; images are not trained");
    }
    json_t *out = rc == OK ? json_string(text.data) : NULL;
    buf_release(&text);
    return out;
}

/* Replaces what has another form in older and newer files: developer and function roles, a call
 * without a list, content in parts or null. */
static int message_normalize(json_t *m, struct error *err) {
    const char *role = json_get_string(m, "role");
    json_t *call = json_object_get(m, "function_call"), *content = json_object_get(m, "content");
    const char *now = strcmp(role, "developer") == 0  ? "system"
                      : strcmp(role, "function") == 0 ? "tool"
                                                      : NULL;
    if (now) json_object_set_new(m, "role", json_string(now));
    if (json_is_object(call)) {
        json_object_set_new(m, "tool_calls",
                            json_pack("[{s:s,s:O}]", "type", "function", "function", call));
        json_object_del(m, "function_call");
    }
    if (json_is_array(content)) {
        json_t *text = parts_text(content, err);
        if (!text) return err->code;
        json_object_set_new(m, "content", text);
    } else if (json_is_null(content) && json_object_get(m, "tool_calls")) {
        json_object_set_new(m, "content", json_string(""));
    }
    return OK;
}

/* {"type": "function", "function": {name, …}} for each tool, which may be its function alone. */
static json_t *tools_normalize(const json_t *list) {
    json_t *out = json_array(), *tool;
    size_t i;
    json_array_foreach ((json_t *)(uintptr_t)list, i, tool)
        json_array_append_new(out,
                              json_object_get(tool, "name")
                                  ? json_pack("{s:s,s:O}", "type", "function", "function", tool)
                                  : json_incref(tool));
    return out;
}

/* Sets out's tools from v's, which are a list or its text. */
static int tools_set(const json_t *v, const char *key, json_t *out, struct error *err) {
    const json_t *tools = json_object_get(v, key);
    const char *text = json_string_value(tools);
    if (!tools || json_is_null(tools) || (text && !*text)) return OK;
    json_t *list = text ? json_loads(text, 0, NULL) : json_incref((json_t *)(uintptr_t)tools);
    bool valid = json_is_array(list);
    if (valid && json_array_size(list)) json_object_set_new(out, "tools", tools_normalize(list));
    json_decref(list);
    return valid ? OK : key_error(err, key, "must be a list, or the text of one");
}

static int from_messages(const struct form *f, const json_t *v, json_t *out, struct error *err) {
    (void)f;
    json_t *messages = json_deep_copy(json_object_get(v, "messages")), *m;
    size_t i;
    int rc = tools_set(v, "tools", out, err);
    json_object_set_new(out, "messages", messages);
    if (rc == OK && !json_object_get(out, "tools")) rc = tools_set(v, "functions", out, err);
    json_array_foreach (messages, i, m)
        if (rc == OK && (rc = message_normalize(m, err)) != OK)
            error_wrap(err, "'messages[%zu]'", i);
    return rc;
}

/* sharegpt: {"conversations": [{"from", "value"}], "system", "tools"} */

static const char *sharegpt_role(const char *from) {
    static const char *const roles[][2] = {
        {"human", "user"},          {"user", "user"},         {"gpt", "assistant"},
        {"assistant", "assistant"}, {"chatgpt", "assistant"}, {"system", "system"},
        {"tool", "tool"},           {"observation", "tool"},  {"function_response", "tool"},
    };
    for (size_t i = 0; i < ARRAY_LEN(roles); i++)
        if (strcmp(from, roles[i][0]) == 0) return roles[i][1];
    return NULL;
}

/* Appends a turn whose value is a call, {name, arguments} as text. */
static int sharegpt_call_add(json_t *messages, const char *value, struct error *err) {
    json_t *call = json_loads(value, 0, NULL);
    bool valid = json_object_get(call, "name") && json_object_get(call, "arguments");
    if (valid)
        json_array_append_new(messages,
                              json_pack("{s:s,s:s,s:[{s:s,s:O}]}", "role", "assistant", "content",
                                        "", "tool_calls", "type", "function", "function", call));
    json_decref(call);
    return valid ? OK
                 : key_error(err, "value", "of a function_call must be {name, arguments} as text");
}

static int sharegpt_turn_add(json_t *messages, const json_t *turn, struct error *err) {
    const char *from = json_string_value(json_object_get(turn, "from")),
               *value = json_string_value(json_object_get(turn, "value"));
    if (!from || !value) return key_error(err, "conversations", "need turns {from, value}");
    if (strcmp(from, "function_call") == 0) return sharegpt_call_add(messages, value, err);
    const char *role = sharegpt_role(from);
    if (!role)
        return error_set(err, ERR_FORMAT,
                         "'from' is '%s'; known are human, gpt, system, tool, observation and "
                         "function_call",
                         from);
    messages_add(messages, role, value);
    return OK;
}

static int from_sharegpt(const struct form *f, const json_t *v, json_t *out, struct error *err) {
    (void)f;
    const json_t *turns = json_object_get(v, "conversations"), *turn;
    json_t *messages = json_array();
    const char *system;
    size_t i;
    json_object_set_new(out, "messages", messages);
    if (!json_is_array(turns)) return key_error(err, "conversations", "must be a list");
    int rc = text_get(v, "system", &system, err);
    if (rc == OK && *system) messages_add(messages, "system", system);
    json_array_foreach ((json_t *)(uintptr_t)turns, i, turn)
        if (rc == OK) rc = sharegpt_turn_add(messages, turn, err);
    return rc == OK ? tools_set(v, "tools", out, err) : rc;
}

/* alpaca and other pairs: a question, which may have an input or a context, and its answer */

/* Appends the turns of {"history": [[question, answer], …]}. */
static int history_add(const json_t *history, json_t *messages, struct error *err) {
    static const char *const roles[] = {"user", "assistant"};
    size_t i;
    const json_t *pair;
    if (history && !json_is_null(history) && !json_is_array(history))
        return key_error(err, "history", "must be a list of [question, answer]");
    json_array_foreach ((json_t *)(uintptr_t)history, i, pair)
        for (size_t k = 0; k < 2; k++) {
            const char *text = json_string_value(json_array_get(pair, k));
            if (!text) return key_error(err, "history", "must be a list of [question, answer]");
            messages_add(messages, roles[k], text);
        }
    return OK;
}

static int from_pair(const struct form *f, const json_t *v, json_t *out, struct error *err) {
    const char *system, *question, *input = "", *context, *answer;
    json_t *messages = json_array();
    json_object_set_new(out, "messages", messages);
    bool has_input = strcmp(f->keys[0], "input") != 0; /* else it is the question */
    if (text_get(v, "system", &system, err) != OK ||
        text_get(v, f->keys[0], &question, err) != OK ||
        (has_input && text_get(v, "input", &input, err) != OK) ||
        text_get(v, "context", &context, err) != OK || text_get(v, f->keys[1], &answer, err) != OK)
        return err->code;
    if (*input && *context) return key_error(err, "context", "and 'input' are both given");
    const char *more = *input ? input : context;
    if (*system) messages_add(messages, "system", system);
    if (history_add(json_object_get(v, "history"), messages, err) != OK) return err->code;
    char *user = xasprintf("%s%s%s", question, *more ? "\n\n" : "", more);
    messages_add(messages, "user", user);
    messages_add(messages, "assistant", answer);
    free(user);
    return OK;
}

/* the form of a sample */

static bool has_keys(const struct form *f, const json_t *v) {
    for (int i = 0; i < MAX_KEYS && f->keys[i]; i++)
        if (!json_object_get(v, f->keys[i])) return false;
    return true;
}

/* What must not be learned as an answer. */
static int purpose_check(const json_t *v, struct error *err) {
    if (json_object_get(v, "rejected"))
        return key_error(err, "rejected", "is for preferences: use --method dpo");
    if (json_object_get(v, "label") && json_object_get(v, "completion"))
        return key_error(err, "label",
                         "marks answers as good or bad (KTO), which is not trained: keep the good "
                         "ones without this key, or pair them for --method dpo");
    return OK;
}

/* The error for an object of no form. Names the missing key if one of two is present. */
static int form_error(const json_t *v, struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        for (int k = 0; k < 2 && forms[i].keys[1]; k++)
            if (json_object_get(v, forms[i].keys[k]))
                return error_set(
                    err, ERR_FORMAT, "'%s' is missing: the form '%s' has '%s' and '%s'",
                    forms[i].keys[!k], forms[i].name, forms[i].keys[0], forms[i].keys[1]);
    return error_set(err, ERR_FORMAT,
                     "'messages', 'prompt' and 'completion', or 'text' is missing, and the keys of "
                     "the other forms; docs/DATA.md lists all");
}

static const struct form *form_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        if (strcmp(name, forms[i].name) == 0) return &forms[i];
    return NULL;
}

int sample_form_check(const char *name, struct error *err) {
    struct buf names = {0};
    if (form_find(name)) return OK;
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        buf_printf(&names, "%s%s", i ? ", " : "", forms[i].name);
    error_set(err, ERR_USAGE, "no form '%s' of training data; there are %s", name, names.data);
    buf_release(&names);
    return err->code;
}

int sample_convert(const json_t *v, const char *form, json_t **out, const char **name,
                   struct error *err) {
    const struct form *f = form ? form_find(form) : NULL;
    *out = NULL;
    if (!json_is_object(v)) return error_set(err, ERR_FORMAT, "a sample must be an object");
    if (purpose_check(v, err) != OK) return err->code;
    for (size_t i = 0; !form && !f && i < ARRAY_LEN(forms); i++)
        if (has_keys(&forms[i], v)) f = &forms[i];
    if (!f || !has_keys(f, v)) return form_error(v, err);
    bool is_text = json_object_get(v, "text") && strcmp(f->name, "text") != 0;
    if (!form && is_text && (!f->convert || f->convert == from_messages))
        return error_set(err, ERR_FORMAT,
                         "only one of 'messages', 'prompt' and 'text' may be given");
    *name = f->name;
    if (!f->convert) return *out = json_incref((json_t *)(uintptr_t)v), OK;
    *out = json_object();
    return f->convert(f, v, *out, err);
}

/* Pairs and prompts are no samples: their own keys are read. */
const json_t *sample_question_find(const json_t *v, const char *form, json_t **from) {
    static const char *const keys[] = {"messages", "prompt", "text", "chosen"};
    const json_t *found = NULL;
    struct error ignored;
    const char *name;
    if (sample_convert(v, form, from, &name, &ignored) != OK) {
        json_decref(*from);
        *from = json_incref((json_t *)(uintptr_t)v);
    }
    for (size_t i = 0; i < ARRAY_LEN(keys) && !found; i++) found = json_object_get(*from, keys[i]);
    return found;
}
