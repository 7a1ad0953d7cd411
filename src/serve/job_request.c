/*
 * job_request: what a client asks for as a command line. Pure.
 *
 * A client is not trusted: a name is letters, digits and dashes, a value is attached to its name by
 * '=', and what is no option stands behind "--". So nothing that it says can become an option that
 * was not checked.
 */
#define _GNU_SOURCE
#include "serve/job_request.h"

#include <stdlib.h>
#include <string.h>

/* Of a command line. */
enum { VALUES_MAX = 1024, TEXT_BYTES = 64 << 10 };

/* The commands that may be jobs. All of them may be run again with the same arguments: train and
 * world go on where they were, the others find again what they keep, or begin anew. */
static const struct kind {
    const char *name;
    /* The command that goes on with a run by its id, for who refuses to begin one twice. */
    const char *resume;
    const char *keeps;      /* the option that says where it keeps what it did */
    const char *refused[2]; /* options that name programs to run */
} kinds[] = {
    {"train", NULL, "runs", {0}},
    {"evolve", "resume", "runs", {0}},
    {"debate", NULL, "store", {0}},
    {"ask", NULL, "store", {0}},
    {"world", NULL, "runs", {"policy-pipe", "env-pipe"}},
    {"eval", NULL, "store", {0}},
    {"quantize", NULL, NULL, {0}},
};

static const struct kind *kind_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0) return &kinds[i];
    return NULL;
}

bool kind_exists(const char *name) {
    return kind_find(name) != NULL;
}

const char *kind_resume(const char *name) {
    const struct kind *k = kind_find(name);
    CHECK(k != NULL);
    return k->resume;
}

const char *kind_keeps(const char *name) {
    const struct kind *k = kind_find(name);
    CHECK(k != NULL);
    return k->keeps;
}

static int kind_check(const json_t *v, struct error *err) {
    if (json_is_string(v) && kind_find(json_string_value(v))) return OK;
    struct buf b = {0};
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        buf_printf(&b, "%s%s", i ? ", " : "", kinds[i].name);
    int rc = error_set(err, ERR_USAGE, "'kind' must be one of %s", b.data);
    buf_release(&b);
    return rc;
}

static bool name_is_plain(const char *name) {
    return *name && *name != '-' && !name[strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-")];
}

static int option_allowed(const struct jobs_options *o, const char *kind, const char *name,
                          struct error *err) {
    const struct kind *k = kind_find(kind);
    /* A file of settings could say what was not checked here, and its errors quote it. */
    bool refused = strcmp(name, "config") == 0 || (o->allow && !o->allow(o->ctx, kind, name));
    if (!name_is_plain(name))
        return error_set(err, ERR_USAGE, "the name of an option is made of a-z, 0-9 and -");
    for (size_t i = 0; i < ARRAY_LEN(k->refused); i++)
        refused |= k->refused[i] && strcmp(k->refused[i], name) == 0;
    return refused ? error_set(err, ERR_USAGE, "a job of '%s' may not be given '%.64s'", kind, name)
                   : OK;
}

/* A string, number or bool as the command line's text, malloc'ed; NULL: it is neither. */
static char *scalar_text(const json_t *v) {
    if (json_is_string(v))
        return strlen(json_string_value(v)) == json_string_length(v) ? xstrdup(json_string_value(v))
                                                                     : NULL;
    if (!json_is_number(v) && !json_is_boolean(v)) return NULL;
    return json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
}

static int value_add(struct strings *args, const char *name, const json_t *v, struct error *err) {
    char *text = scalar_text(v), *arg;
    if (!text)
        return error_set(err, ERR_USAGE,
                         "'%.64s' must be a string, a number, true, false or a list of these",
                         name);
    arg = xasprintf("--%s=%s", name, text);
    strings_add(args, arg);
    free(arg);
    free(text);
    return OK;
}

static int option_add(struct strings *args, const char *name, const json_t *v, struct error *err) {
    size_t i;
    const json_t *item;
    int rc = OK;
    if (json_is_boolean(v)) {
        char *flag = xasprintf(json_is_true(v) ? "--%s" : "--no-%s", name);
        strings_add(args, flag);
        free(flag);
    } else if (json_is_array(v)) {
        json_array_foreach (v, i, item)
            if (rc == OK) rc = value_add(args, name, item, err);
    } else {
        rc = value_add(args, name, v, err);
    }
    return rc;
}

static int positional_add(struct strings *args, const json_t *list, struct error *err) {
    size_t i;
    const json_t *v;
    strings_add(args, "--");
    json_array_foreach (list, i, v) {
        if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
            return error_set(err, ERR_USAGE, "'args' must be a list of strings");
        strings_add(args, json_string_value(v));
    }
    return OK;
}

static int size_check(const struct strings *args, struct error *err) {
    size_t bytes = 0;
    for (int i = 0; i < args->n; i++) bytes += strlen(args->v[i]) + 1;
    if (args->n <= VALUES_MAX && bytes <= TEXT_BYTES) return OK;
    return error_set(err, ERR_USAGE,
                     "a request may have %d values of %d bytes together; put them in a file",
                     VALUES_MAX, TEXT_BYTES);
}

int request_args(const json_t *request, struct strings *args, struct error *err) {
    const char *name;
    json_t *v;
    int rc = OK;
    strings_add(args, json_text_at(request, "kind"));
    json_object_foreach (json_object_get(request, "options"), name, v)
        if (rc == OK) rc = option_add(args, name, v, err);
    strings_add(args, "--json");
    strings_add(args, "--quiet");
    if (rc == OK) rc = positional_add(args, json_object_get(request, "args"), err);
    return rc == OK ? size_check(args, err) : rc;
}

static int keys_check(const json_t *request, struct error *err) {
    const char *key;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)request, key, v) {
        bool args = strcmp(key, "args") == 0, options = strcmp(key, "options") == 0;
        if (!args && !options && strcmp(key, "kind") != 0)
            return error_set(err, ERR_USAGE, "a job has 'kind', 'args' and 'options', no more");
        if (args && !json_is_array(v)) return error_set(err, ERR_USAGE, "'args' must be a list");
        if (options && !json_is_object(v))
            return error_set(err, ERR_USAGE, "'options' must be an object");
    }
    return OK;
}

int request_check(const struct jobs_options *o, const json_t *request, struct error *err) {
    const char *name;
    json_t *v;
    struct strings args = {0};
    if (!json_is_object(request)) return error_set(err, ERR_USAGE, "a job must be an object");
    int rc = keys_check(request, err);
    if (rc == OK) rc = kind_check(json_object_get(request, "kind"), err);
    json_object_foreach (json_object_get(request, "options"), name, v)
        if (rc == OK) rc = option_allowed(o, json_text_at(request, "kind"), name, err);
    if (rc == OK) rc = request_args(request, &args, err);
    strings_release(&args);
    return rc;
}

json_t *request_whole(const json_t *request) {
    struct error err;
    json_t *v = json_deep_copy(request), *sorted;
    if (!json_object_get(v, "args")) json_object_set_new(v, "args", json_array());
    if (!json_object_get(v, "options")) json_object_set_new(v, "options", json_object());
    char *text = json_text(v);
    sorted = json_parse(text, strlen(text), "a request", &err);
    CHECK(sorted != NULL);
    free(text);
    json_decref(v);
    return sorted;
}
