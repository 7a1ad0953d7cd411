/*
 * request: checks a client's request for a job, and converts it to a command line.
 *
 * The client is not trusted. It may set only the options that the command's option table allows
 * (enum job_arg_policy). An option is looked up in the table by any of its names, and only the
 * canonical name reaches the command line; a path reaches it as the canonical path that was
 * checked. A value is attached to its name by '=', and positional arguments come after "--", so no
 * text of a client becomes an unchecked option.
 */
#define _GNU_SOURCE
#include "jobs/jobs.h"

#include "check/check.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

/* Limits of a request. */
enum { MAX_VALUES = 1024, MAX_TEXT_BYTES = 64 << 10, MAX_NAME_BYTES = 64, FIELD_BYTES = 64 };

/* Keys of a request with whole numbers. */
static const struct number_key {
    const char *name;
    int min, max;
} number_keys[] = {
    {"publish_steps", 1, 1000000000},
    {"priority", -100, 100},
    {"retries", 0, 3},
    {"deadline", 1, 1000000000},
};

struct request_checker {
    const struct job_request_rules *rules;
    const struct job_kind *kind;
    struct job_request *request; /* the result */
    char *field; /* [FIELD_BYTES] the part of the request that is being checked, for errors */
    struct error *err;
};

const struct job_kind *job_kind_find(const struct job_kind *kinds, const char *name) {
    for (; kinds && kinds->name; kinds++)
        if (strcmp(kinds->name, name) == 0) return kinds;
    return NULL;
}

/* Whether a name consists of letters, digits, '.', '_' and '-', and is neither a path nor a
 * flag. */
static bool is_plain_name(const char *name) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(name);
    return n && n <= MAX_NAME_BYTES && *name != '.' && *name != '-' && strspn(name, letters) == n;
}

static void field_set(const struct request_checker *c, const char *name) {
    struct buf b = {0};
    buf_add_sanitized(&b, name, MIN(strlen(name), (size_t)FIELD_BYTES / 2));
    snprintf(c->field, FIELD_BYTES, "%.*s", FIELD_BYTES - 1, b.data ? b.data : "");
    buf_release(&b);
}

static int kind_check(struct request_checker *c, const json_t *v) {
    const char *name = json_string_value(v);
    field_set(c, "kind");
    if (name && (c->kind = job_kind_find(c->rules->kinds, name))) return OK;
    struct buf b = {0};
    for (const struct job_kind *k = c->rules->kinds; k && k->name; k++)
        buf_printf(&b, "%s%s", b.len ? ", " : "", k->name);
    int rc = error_set(c->err, ERR_USAGE, "'kind' must be one of %s", b.data ? b.data : "none");
    buf_release(&b);
    return rc;
}

/* options */

static int unknown_option_error(const struct request_checker *c, const char *name) {
    const char *near = option_suggest(c->kind->rows, name);
    return error_set(c->err, ERR_USAGE, "'%s' has no option '%.64s'%s%s%s", c->kind->name, name,
                     near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
}

static bool is_list(const struct option_row *row) {
    return row->type == OPT_LIST || row->type == OPT_SECRETS;
}

static int not_allowed_error(const struct request_checker *c, const char *name, const char *why) {
    return error_set(c->err, ERR_USAGE, "a job of '%s' may not set '%.64s'%s", c->kind->name, name,
                     why);
}

static const char COMMANDS_OFF[] = ": it would run a program or open a file, which rewards of "
                                   "jobs do only where the server was started with "
                                   "--jobs-run-commands";

static int name_check(const struct request_checker *c, const char *name, const char *hint) {
    if (is_plain_name(name)) return OK;
    return error_set(
        c->err, ERR_USAGE,
        "'%s' must be a name of at most %d letters, digits, '.', '_' and '-', not a path%s",
        c->field, MAX_NAME_BYTES, hint);
}

/* values: each function returns the value for the command line, malloc'ed; NULL on an error */

static char *input_value(const struct request_checker *c, const char *text, bool database) {
    if (!c->rules->resolve_input || hub_is_name(text))
        return xstrdup(text); /* the command checks names on the hub when it opens them */
    char *path = c->rules->resolve_input(c->rules->ctx, text, database, c->err);
    if (!path && c->err->code == ERR_MISSING) c->err->code = ERR_USAGE;
    return path;
}

/* JOB_ARG_BUILTIN_OR_PATH: a text that names no file must be a plain name, which the command looks
 * up. */
static char *builtin_or_path_value(const struct request_checker *c, const char *text) {
    if (!c->rules->resolve_input || hub_is_name(text)) return xstrdup(text);
    char *path = c->rules->resolve_input(c->rules->ctx, text, false, c->err);
    if (path || c->err->code != ERR_MISSING) return path;
    c->err->code = is_plain_name(text) ? OK : ERR_USAGE;
    return c->err->code == OK ? xstrdup(text) : NULL;
}

static char *builtin_or_path_list_value(const struct request_checker *c, const char *text) {
    char *copy = xstrdup(text), *rest = copy, *part;
    struct buf all = {0};
    int rc = OK;
    buf_add(&all, "", 0);
    while (rc == OK && (part = strsep(&rest, ","))) {
        char *one = *part ? builtin_or_path_value(c, part) : NULL;
        if (*part && !one) rc = c->err->code;
        if (one && strcmp(one, part) != 0 && strchr(one, ','))
            rc = error_set(c->err, ERR_USAGE, "'%.256s' has a path with a comma", part);
        if (one) buf_printf(&all, "%s%s", all.len ? "," : "", one);
        free(one);
    }
    free(copy);
    if (rc == OK) return all.data;
    buf_release(&all);
    return NULL;
}

/* "fry:FAMILY[:N]", a built-in source of questions. */
static bool is_task_family(const char *text) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789:_-";
    return strncmp(text, "fry:", 4) == 0 && strspn(text, letters) == strlen(text);
}

static char *named_file_value(const struct request_checker *c, const char *text) {
    const char *eq = strchr(text, '='), *file = eq ? eq + 1 : text;
    char *name = eq ? strndup(text, (size_t)(eq - text)) : NULL;
    int rc = name ? name_check(c, name, "; a file with a name is given as NAME=FILE") : OK;
    char *path = rc != OK               ? NULL
                 : is_task_family(file) ? xstrdup(file)
                                        : input_value(c, file, false),
         *value;
    value = path && name ? xasprintf("%s=%s", name, path) : path ? xstrdup(path) : NULL;
    free(path);
    free(name);
    return value;
}

/* `text` is the name of a result, or its path in the folder of results, as in a normalized request.
 */
static char *output_value(const struct request_checker *c, const char *text) {
    size_t n = c->rules->results_dir ? strlen(c->rules->results_dir) : 0;
    if (n && strncmp(text, c->rules->results_dir, n) == 0 && text[n] == '/') text += n + 1;
    if (!c->rules->results_dir) {
        not_allowed_error(c, c->field, ": this server stores no results");
        return NULL;
    }
    if (name_check(c, text, ": the result is stored below the server's folder") != OK) return NULL;
    for (int i = 0; i < c->request->outputs.n; i++)
        if (strcmp(c->request->outputs.v[i], text) == 0) {
            error_set(c->err, ERR_USAGE, "two results have the name '%s'", text);
            return NULL;
        }
    strings_add(&c->request->outputs, text);
    return path_join(c->rules->results_dir, text);
}

static char *name_value(const struct request_checker *c, const char *text) {
    if (name_check(c, text, "") != OK) return NULL;
    if (strcmp(c->field, "id") == 0) strings_add(&c->request->runs, text); // the id of a run
    return xstrdup(text);
}

static char *threads_value(const struct request_checker *c, const char *text) {
    if (c->rules->max_threads && strtoll(text, NULL, 10) > c->rules->max_threads) {
        error_set(c->err, ERR_USAGE, "'%s' may be at most %d on this server", c->field,
                  c->rules->max_threads);
        return NULL;
    }
    return xstrdup(text);
}

static char *value_check(const struct request_checker *c, enum job_arg_policy policy,
                         const char *text) {
    switch (policy) {
    case JOB_ARG_TEXT:
        return xstrdup(text);
    case JOB_ARG_NAME:
        return name_value(c, text);
    case JOB_ARG_CLIENT_NAME:
        return c->rules->owner ? xasprintf("%s/%s", c->rules->owner, text) : xstrdup(text);
    case JOB_ARG_INPUT_PATH:
    case JOB_ARG_DATABASE:
        return input_value(c, text, policy == JOB_ARG_DATABASE);
    case JOB_ARG_BUILTIN_OR_PATH:
        return builtin_or_path_value(c, text);
    case JOB_ARG_BUILTIN_OR_PATH_LIST:
        return builtin_or_path_list_value(c, text);
    case JOB_ARG_NAMED_FILE:
        return named_file_value(c, text);
    case JOB_ARG_OUTPUT_PATH:
        return output_value(c, text);
    case JOB_ARG_THREADS:
        return threads_value(c, text);
    case JOB_ARG_REWARD:
        if (c->rules->allow_commands || check_spec_is_pure(text)) return xstrdup(text);
        not_allowed_error(c, c->field, COMMANDS_OFF);
        return NULL;
    case JOB_ARG_DEFAULT:
    case JOB_ARG_FORBIDDEN:
    case JOB_ARG_SERVER_ONLY:
        break;
    }
    not_allowed_error(c, c->field, "");
    return NULL;
}

/* A string, number or bool as text for the command line, malloc'ed; NULL: another type, or a string
 * with a NUL byte. */
static char *scalar_text(const json_t *v) {
    if (json_is_string(v))
        return strlen(json_string_value(v)) == json_string_length(v) ? xstrdup(json_string_value(v))
                                                                     : NULL;
    if (!json_is_number(v) && !json_is_boolean(v)) return NULL;
    return json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
}

/* The value for job_request.normalized: inputs as the client sent them, outputs as paths. */
static json_t *normalized_value(enum job_arg_policy policy, const json_t *v, const char *checked) {
    return policy == JOB_ARG_OUTPUT_PATH ? json_from_path(checked)
                                         : json_incref((json_t *)(uintptr_t)v);
}

/* Checks one value of an option or argument. Returns the value for the command line, NULL on an
 * error, and sets *normalized to the value for job_request.normalized. */
static json_t *single_value(const struct request_checker *c, enum job_arg_policy policy,
                            const json_t *v, json_t **normalized) {
    char *text = scalar_text(v);
    if (!text) {
        error_set(c->err, ERR_USAGE,
                  "'%s' must be a string, a number, true, false or a list of these", c->field);
        return NULL;
    }
    bool as_text = json_is_string(v) || (policy != JOB_ARG_DEFAULT && policy != JOB_ARG_THREADS);
    char *checked = policy == JOB_ARG_DEFAULT ? xstrdup(text) : value_check(c, policy, text);
    json_t *out = !checked  ? NULL
                  : as_text ? json_string(checked)
                            : json_incref((json_t *)(uintptr_t)v);
    if (checked && !out)
        error_set(c->err, ERR_USAGE, "'%s' has a path that is not UTF-8", c->field);
    if (out) *normalized = normalized_value(policy, v, checked);
    free(checked);
    free(text);
    return out;
}

static json_t *list_value(const struct request_checker *c, enum job_arg_policy policy,
                          const json_t *v, json_t **normalized) {
    json_t *list = json_array(), *item, *one;
    size_t i;
    *normalized = json_array();
    json_array_foreach (v, i, item) {
        json_t *normalized_item = NULL;
        if (!(one = single_value(c, policy, item, &normalized_item))) {
            json_decref(list);
            json_decref(*normalized);
            return NULL;
        }
        json_array_append_new(list, one);
        json_array_append_new(*normalized, normalized_item);
    }
    return list;
}

/* Checks that the table allows a client to set the option, and that the value has the right
 * type. */
static int option_row_check(const struct request_checker *c, const struct option_row *row,
                            const json_t *v) {
    bool text = row->type != OPT_BOOL && row->type != OPT_INT && row->type != OPT_FLOAT;
    if (row->job_policy == JOB_ARG_FORBIDDEN || row->job_policy == JOB_ARG_SERVER_ONLY ||
        (row->job_policy == JOB_ARG_DEFAULT && text) || row->type == OPT_SECRETS)
        return not_allowed_error(c, row->name, "");
    if (json_is_array(v) && !is_list(row))
        return error_set(c->err, ERR_USAGE, "'%s' takes one value", row->name);
    if (json_is_boolean(v) && row->type != OPT_BOOL)
        return error_set(c->err, ERR_USAGE, "'%s' requires a value, not true or false", row->name);
    return OK;
}

/* Finds an option's row by any of its names on the command line. "no-NAME" is NAME with the negated
 * value: *v is then replaced. The caller releases *v. */
static const struct option_row *option_row_find(const struct request_checker *c, const char *name,
                                                json_t **v) {
    const json_t *first = json_is_array(*v) ? json_array_get(*v, 0) : *v;
    const struct option_row *row = option_find_flag(c->kind->rows, name, json_string_value(first));
    bool no = strncmp(name, "no", 2) == 0 && (name[2] == '-' || name[2] == '_');
    *v = json_incref(*v);
    if (row || !no) return row;
    row = option_find(c->kind->rows, name + 3);
    if (!row || row->type != OPT_BOOL || !json_is_boolean(*v)) return NULL;
    json_decref(*v);
    *v = json_boolean(!json_is_true(*v));
    return row;
}

static int option_check(struct request_checker *c, const char *name, json_t *v) {
    json_t *options = json_object_get(c->request->resolved, "options"), *normalized = NULL,
           *value = NULL;
    int rc = OK;
    field_set(c, name);
    const struct option_row *row = option_row_find(c, name, &v);
    if (!row) rc = unknown_option_error(c, name);
    if (rc == OK && json_object_get(options, row->name))
        rc = error_set(c->err, ERR_USAGE, "'%s' is given twice, once as '%.64s'", row->name, name);
    if (rc == OK) field_set(c, row->name);
    if (rc == OK) rc = option_row_check(c, row, v);
    if (rc == OK)
        value = json_is_array(v) ? list_value(c, row->job_policy, v, &normalized)
                                 : single_value(c, row->job_policy, v, &normalized);
    if (rc == OK && !value) rc = c->err->code;
    if (rc == OK) {
        json_object_set_new(options, row->name, value);
        json_object_set_new(json_object_get(c->request->normalized, "options"), row->name,
                            normalized);
    }
    json_decref(v);
    return rc;
}

/* arguments */

static enum job_arg_policy arg_policy(const struct job_args *a, size_t i) {
    size_t n = 0;
    while (n < ARRAY_LEN(a->policies) && a->policies[n] != JOB_ARG_END) n++;
    return i < n ? a->policies[i] : a->repeats && n ? a->policies[n - 1] : JOB_ARG_END;
}

static const struct job_args *args_find(const struct job_kind *k, const char *first) {
    const struct job_args *a = k->args;
    while (a && a->policies[0] != JOB_ARG_END && a->subcommand &&
           (!first || strcmp(a->subcommand, first) != 0))
        a++;
    return a;
}

static int args_check(struct request_checker *c, const json_t *args) {
    const struct job_args *a = args_find(c->kind, json_string_value(json_array_get(args, 0)));
    json_t *v;
    size_t i;
    field_set(c, "args");
    json_array_foreach (args, i, v) {
        enum job_arg_policy policy = a ? arg_policy(a, i) : JOB_ARG_END;
        json_t *normalized = NULL, *value;
        if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
            return error_set(c->err, ERR_USAGE, "'args' must be a list of strings");
        if (policy == JOB_ARG_END)
            return error_set(c->err, ERR_USAGE, "'%s' does not take %zu arguments here",
                             c->kind->name, json_array_size(args));
        if (!(value = single_value(c, policy, v, &normalized))) return c->err->code;
        json_array_append_new(json_object_get(c->request->resolved, "args"), value);
        json_array_append_new(json_object_get(c->request->normalized, "args"), normalized);
    }
    return OK;
}

/* requests */

/* The bytes of a value and of its items if it is a list; adds the number of all these to *values.
 */
static size_t text_bytes(const json_t *v, size_t *values) {
    size_t bytes = json_is_string(v) ? json_string_length(v) + 1 : 32, i;
    const json_t *item;
    ++*values;
    json_array_foreach (v, i, item) {
        ++*values;
        bytes += json_is_string(item) ? json_string_length(item) + 1 : 32;
    }
    return bytes;
}

/* Checks the size of a request. Called before the other checks, so that their cost is bounded. */
static int size_check(const struct request_checker *c, const json_t *request) {
    size_t bytes = 0, values = 0;
    const char *key;
    json_t *v;
    bytes += text_bytes(json_object_get(request, "args"), &values);
    json_object_foreach (json_object_get(request, "options"), key, v)
        bytes += strlen(key) + text_bytes(v, &values);
    if (values <= MAX_VALUES && bytes <= MAX_TEXT_BYTES) return OK;
    return error_set(
        c->err, ERR_USAGE,
        "a request may have at most %d values, with at most %d bytes together; put them in a file",
        MAX_VALUES, MAX_TEXT_BYTES);
}

static const struct number_key *number_key_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(number_keys); i++)
        if (strcmp(number_keys[i].name, name) == 0) return &number_keys[i];
    return NULL;
}

static int number_check(const struct request_checker *c, const struct number_key *k,
                        const json_t *v) {
    if (json_is_integer(v) && json_integer_value(v) >= k->min && json_integer_value(v) <= k->max)
        return OK;
    return error_set(c->err, ERR_USAGE, "'%s' must be an integer from %d to %d", k->name, k->min,
                     k->max);
}

static int keys_check(const struct request_checker *c, const json_t *request) {
    const char *key;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)request, key, v) {
        const struct number_key *number = number_key_find(key);
        bool args = strcmp(key, "args") == 0, options = strcmp(key, "options") == 0,
             in_process = strcmp(key, "in_process") == 0;
        field_set(c, key);
        if (!args && !options && !in_process && !number && strcmp(key, "kind") != 0)
            return error_set(c->err, ERR_USAGE,
                             "the keys of a job are 'kind', 'args', 'options', 'priority', "
                             "'retries', 'deadline', 'in_process' and 'publish_steps'; there are "
                             "no others");
        if (in_process && !json_is_boolean(v))
            return error_set(c->err, ERR_USAGE, "'in_process' must be true or false");
        if (number && number_check(c, number, v) != OK) return c->err->code;
        if (args && !json_is_array(v)) return error_set(c->err, ERR_USAGE, "'args' must be a list");
        if (options && !json_is_object(v))
            return error_set(c->err, ERR_USAGE, "'options' must be an object");
    }
    return OK;
}

static int in_process_check(const struct request_checker *c, const json_t *request) {
    bool in_process = json_is_true(json_object_get(request, "in_process"));
    const char *kind = c->rules->in_process_kind;
    field_set(c, "in_process");
    if (in_process && !kind)
        return error_set(c->err, ERR_USAGE, "this server runs no job in its process");
    if (in_process && strcmp(kind, c->kind->name) != 0)
        return error_set(c->err, ERR_USAGE,
                         "a job of '%s' cannot run in the server's process; one of '%s' can",
                         c->kind->name, kind);
    field_set(c, "publish_steps");
    if (!in_process && json_object_get(request, "publish_steps"))
        return error_set(c->err, ERR_USAGE,
                         "'publish_steps' is for a job in the server's process: add "
                         "\"in_process\": true");
    return OK;
}

/* A request of the same kind without arguments and options. */
static json_t *empty_request(const json_t *request) {
    json_t *v =
        json_pack("{s:[],s:O,s:{}}", "args", "kind", json_object_get(request, "kind"), "options");
    if (json_is_true(json_object_get(request, "in_process")))
        json_object_set_new(v, "in_process", json_true());
    for (size_t i = 0; i < ARRAY_LEN(number_keys); i++)
        if (json_object_get(request, number_keys[i].name))
            json_object_set(v, number_keys[i].name, json_object_get(request, number_keys[i].name));
    return v;
}

/* Returns a copy with sorted keys, as the store writes them; releases v. */
static json_t *sorted_copy(json_t *v) {
    struct error err;
    char *text = json_canonical(v);
    json_t *copy = json_parse(text, strlen(text), "a request", &err);
    CHECK(copy != NULL);
    free(text);
    json_decref(v);
    return copy;
}

static int args_and_options_check(struct request_checker *c, const json_t *request) {
    const char *name;
    json_t *v;
    c->request->normalized = empty_request(request);
    c->request->resolved = empty_request(request);
    int rc = args_check(c, json_object_get(request, "args"));
    json_object_foreach (json_object_get(request, "options"), name, v)
        if (rc == OK) rc = option_check(c, name, v);
    if (rc != OK) return rc;
    c->request->normalized = sorted_copy(c->request->normalized);
    c->request->resolved = sorted_copy(c->request->resolved);
    return OK;
}

int job_request_check(const struct job_request_rules *r, const json_t *request,
                      struct job_request *out, char field[64], struct error *err) {
    char unused[FIELD_BYTES];
    struct request_checker c = {
        .rules = r, .request = out, .field = field ? field : unused, .err = err};
    *out = (struct job_request){0};
    *c.field = 0;
    if (!json_is_object(request)) return error_set(err, ERR_USAGE, "a job must be an object");
    int rc = keys_check(&c, request);
    if (rc == OK) rc = size_check(&c, request);
    if (rc == OK) rc = kind_check(&c, json_object_get(request, "kind"));
    if (rc == OK) rc = in_process_check(&c, request);
    if (rc == OK) rc = args_and_options_check(&c, request);
    if (rc == OK && json_object_get(out->resolved, "in_process"))
        rc = r->check_in_process(r->ctx, out->resolved, c.field, err);
    if (rc != OK) job_request_release(out);
    return rc;
}

void job_request_release(struct job_request *r) {
    json_decref(r->normalized);
    json_decref(r->resolved);
    strings_release(&r->outputs);
    strings_release(&r->runs);
    *r = (struct job_request){0};
}

/* the command line */

static void value_add(struct strings *args, const char *name, const json_t *v) {
    char *text = scalar_text(v), *arg = xasprintf("--%s=%s", name, text ? text : "");
    strings_add(args, arg);
    free(arg);
    free(text);
}

static void option_add(struct strings *args, const char *name, const json_t *v) {
    size_t i;
    const json_t *item;
    if (json_is_boolean(v)) {
        char *flag = xasprintf(json_is_true(v) ? "--%s" : "--no-%s", name);
        strings_add(args, flag);
        free(flag);
    } else if (json_is_array(v)) {
        json_array_foreach (v, i, item) value_add(args, name, item);
    } else {
        value_add(args, name, v);
    }
}

int job_request_argv(const json_t *request, struct strings *args, struct error *err) {
    const char *name;
    json_t *v;
    size_t i, bytes = 0;
    strings_add(args, json_get_string(request, "kind"));
    json_object_foreach (json_object_get(request, "options"), name, v) option_add(args, name, v);
    strings_add(args, "--json");
    strings_add(args, "--quiet");
    strings_add(args, "--");
    json_array_foreach (json_object_get(request, "args"), i, v)
        strings_add(args, json_string_value(v));
    for (int k = 0; k < args->n; k++) bytes += strlen(args->v[k]) + 1;
    /* 4: names in the request have become paths, which are longer. */
    if (bytes <= 4 * MAX_TEXT_BYTES) return OK;
    return error_set(err, ERR_USAGE, "the command line of this request is too long");
}
