/*
 * builtin: the built-in tools by their names, and the small ones: calculator, clock and knowledge.
 *
 * A tool is a row in two tables: agent_builtins is what a user and a model read, `kinds` how it
 * works. The JSON schema of the arguments is made from the row, with bounds for every text, so that
 * a small model cannot write forever.
 */
#define _GNU_SOURCE
#include "agent/internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KNOWLEDGE_PASSAGES = 3 };

/* calculator */

static int calculator_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    (void)ctx;
    return agent_calculate(json_get_string(arguments, "expression"), out, err);
}

/* clock */

/* The time of the machine; that of SOURCE_DATE_EPOCH for runs that must repeat. */
static time_t clock_time(void) {
    const char *text = getenv("SOURCE_DATE_EPOCH");
    char *end = NULL;
    long long seconds = text && *text ? strtoll(text, &end, 10) : -1;
    return end && !*end && seconds >= 0 && seconds < (long long)1 << 40 ? (time_t)seconds
                                                                        : time(NULL);
}

static int clock_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    static const char *const days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                       "Thursday", "Friday", "Saturday"};
    time_t now = clock_time();
    struct tm t;
    char text[64];
    (void)ctx, (void)arguments;
    if (!gmtime_r(&now, &t) || !strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &t))
        return error_set(err, ERR_STATE, "the time is not known");
    buf_printf(out, "%s, %s", text, days[t.tm_wday]);
    return OK;
}

/* knowledge */

struct knowledge_tool {
    struct knowledge *base;
    const struct embedder *embedder;
};

static int knowledge_tool_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    struct knowledge *base = knowledge_open(o->knowledge, false, err);
    if (!base) return err->code;
    struct knowledge_tool *t = *ctx = xcalloc(1, sizeof *t);
    *t = (struct knowledge_tool){base, o->embedder};
    return OK;
}

static int knowledge_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct knowledge_tool *t = ctx;
    const struct knowledge_query query = {.text = json_get_string(arguments, "query"),
                                          .top = KNOWLEDGE_PASSAGES,
                                          .threshold = KNOWLEDGE_TOOL_THRESHOLD,
                                          .embedder = t->embedder};
    json_t *hits = knowledge_search(t->base, &query, err);
    if (!hits) return err->code;
    if (json_array_size(hits))
        knowledge_snippets(hits, KNOWLEDGE_SNIPPET_CHARS, out);
    else
        buf_puts(out, "no passage matches");
    json_decref(hits);
    return OK;
}

static void knowledge_release(void *ctx) {
    struct knowledge_tool *t = ctx;
    if (t) knowledge_close(t->base);
    free(t);
}

/* the tables */

const struct agent_builtin agent_builtins[] = {
    {"calculator", "Computes an arithmetic expression exactly, also with units.", NULL, false},
    {"clock", "Tells the date, the time and the day of the week, in UTC.", NULL, false},
    {"knowledge", "Finds passages of the knowledge base.", "--knowledge DB", false},
    {"memory_search", "Recalls facts about the user.", "--memory DB", false},
    {"memory_write", "Remembers a lasting fact that the user stated.", "--memory DB", false},
    {"ask", "Asks a team of agents a question.", "--team FILE", false},
    {"debate", "Lets a team of agents debate which of several answers is right.", "--team FILE",
     false},
    {"read_file", "Reads a text file.", "--root DIR", false},
    {"list_files", "Lists the files of a folder.", "--root DIR", false},
    {"python", "Runs a Python program and returns its output.", NULL, true},
    {"sh", "Runs a shell command and returns its output.", NULL, true},
    {"check_code", "Finds syntax errors in code without running it.", NULL, true},
    {"http_get", "Reads a web page of an allowed host.", "--allow-host HOST", true},
    {NULL},
};

static const struct tool_kind
    calculator_kind = {.arguments = {{"expression", "expression such as (12 + 3) * 4 or 5 km in mi",
                                      1000}},
                       .call = calculator_call},
    clock_kind = {.call = clock_call},
    knowledge_kind = {.need = NEEDS_KNOWLEDGE,
                      .arguments = {{"query", "words to search for", 500}},
                      .open = knowledge_tool_open,
                      .call = knowledge_call,
                      .release = knowledge_release};

/* The rows of agent_builtins. */
static const struct tool_kind *const kinds[] = {
    &calculator_kind, &clock_kind,      &knowledge_kind, &memory_search_kind, &memory_write_kind,
    &ask_kind,        &debate_kind,     &read_file_kind, &list_files_kind,    &python_kind,
    &sh_kind,         &check_code_kind, &http_get_kind};
_Static_assert(ARRAY_LEN(kinds) == ARRAY_LEN(agent_builtins) - 1, "one row for each tool");

/* adding */

/* The JSON schema of one argument. */
static json_t *argument_json(const struct tool_argument *a) {
    json_t *v = json_pack("{s:s,s:s}", "type", "string", "description", a->description);
    json_t *choices = a->choices ? json_array() : NULL;
    for (const char *const *c = a->choices; c && *c; c++)
        json_array_append_new(choices, json_string(*c));
    if (choices)
        json_object_set_new(v, "enum", choices);
    else
        json_object_set_new(v, "maxLength", json_integer(a->max_length));
    return v;
}

static json_t *parameters_json(const struct tool_kind *kind) {
    json_t *properties = json_object(), *required = json_array();
    for (size_t i = 0; i < ARRAY_LEN(kind->arguments) && kind->arguments[i].name; i++) {
        json_object_set_new(properties, kind->arguments[i].name,
                            argument_json(&kind->arguments[i]));
        json_array_append_new(required, json_string(kind->arguments[i].name));
    }
    return json_pack("{s:s,s:o,s:o,s:b}", "type", "object", "properties", properties, "required",
                     required, "additionalProperties", 0);
}

static bool need_is_given(enum tool_need need, const struct agent_tool_options *o) {
    const bool given[] = {[NEEDS_NOTHING] = true,
                          [NEEDS_KNOWLEDGE] = o->knowledge && *o->knowledge,
                          [NEEDS_MEMORY] = o->memory && *o->memory,
                          [NEEDS_TEAM] = o->team != NULL,
                          [NEEDS_ROOT] = o->root && *o->root,
                          [NEEDS_HOSTS] = o->hosts && o->hosts->n};
    return given[need];
}

static int builtin_find(const char *name, struct error *err) {
    struct buf names = {0};
    for (int i = 0; agent_builtins[i].name; i++) {
        if (strcmp(agent_builtins[i].name, name) == 0) {
            buf_release(&names);
            return i;
        }
        buf_printf(&names, "%s%s", i ? ", " : "", agent_builtins[i].name);
    }
    error_set(err, ERR_USAGE, "there is no tool '%.100s'; there are %s", name, names.data);
    buf_release(&names);
    return err->code;
}

static int builtin_add(struct agent_tools *t, const char *name, const struct agent_tool_options *o,
                       struct error *err) {
    int i = builtin_find(name, err);
    if (i < 0) return i;
    const struct tool_kind *kind = kinds[i];
    if (!need_is_given(kind->need, o))
        return error_set(err, ERR_USAGE, "the tool '%s' needs %s", name, agent_builtins[i].needs);
    struct agent_tool tool = {.name = xstrdup(name),
                              .description = xstrdup(agent_builtins[i].description),
                              .parameters = parameters_json(kind),
                              .call = kind->call,
                              .spent = kind->spent,
                              .release = kind->release};
    if (!kind->open || kind->open(o, &tool.ctx, err) == OK) return agent_tools_add(t, &tool, err);
    free(tool.name);
    free(tool.description);
    json_decref(tool.parameters);
    return error_wrap(err, "the tool '%s'", name);
}

int agent_tools_add_builtin(struct agent_tools *t, const char *list,
                            const struct agent_tool_options *o, struct error *err) {
    static const char blanks[] = " \t\n";
    int rc = OK;
    for (const char *p = list; rc == OK; p++) {
        p += strspn(p, blanks);
        size_t n = strcspn(p, ","), len = n;
        while (len && strchr(blanks, p[len - 1])) len--;
        char *name = xstrndup(p, len);
        rc = builtin_add(t, name, o, err);
        free(name);
        p += n;
        if (!*p) break;
    }
    return rc;
}
