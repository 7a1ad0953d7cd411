/*
 * check: the table of kinds, and the code that all kinds share: the spec, reasons, costs, fenced
 * blocks.
 */
#define _GNU_SOURCE
#include "check/internal.h"

#include <stdlib.h>
#include <string.h>

static const struct check_kind *const kinds[] = {
    &exact_check, &regex_check,    &json_schema_check, &calculator_check, &tests_check,
    &sql_check,   &question_check, &command_check,     &shell_check,
};

/* texts */

const json_t *item_check_get(const json_t *item, const char *key) {
    return json_object_get(json_object_get(item, "check"), key);
}

/* The number of backticks at the beginning of a line, after at most three blanks; 0 if fewer than
 * three. *rest: the line after them. */
static int fence_length(struct code_block line, struct code_block *rest) {
    size_t i = 0, n;
    while (i < line.len && i < 3 && line.ptr[i] == ' ') i++;
    for (n = i; n < line.len && line.ptr[n] == '`';) n++;
    *rest = (struct code_block){line.ptr + n, line.len - n};
    return n - i >= 3 ? (int)MIN(n - i, INT32_MAX) : 0;
}

static bool is_blank(struct code_block b) {
    for (size_t i = 0; i < b.len; i++)
        if (!strchr(" \t\r", b.ptr[i])) return false;
    return true;
}

struct code_block code_block_last(const char *text) {
    const char *end = text + strlen(text), *begin = NULL;
    struct code_block found = {text, (size_t)(end - text)}, rest;
    int open = 0;
    for (const char *p = text, *next; p < end; p = next) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        struct code_block line = {p, (size_t)((newline ? newline : end) - p)};
        next = newline ? newline + 1 : end;
        int n = fence_length(line, &rest);
        if (open && n >= open && is_blank(rest)) {
            found = (struct code_block){begin, (size_t)(p - begin)};
            open = 0;
        } else if (!open && n && !memchr(rest.ptr, '`', rest.len)) {
            open = n;
            begin = next;
        }
    }
    return open ? (struct code_block){begin, (size_t)(end - begin)} : found;
}

/* reasons */

void case_fail(struct check *c, struct check_case *k, const char *fmt, ...) {
    enum { REASON_MAX = 240 };
    struct buf clean = {0};
    va_list ap;
    va_start(ap, fmt);
    char *text = xvasprintf(fmt, ap);
    va_end(ap);
    size_t n = strlen(text);
    buf_puts(&clean, "");
    buf_add_sanitized(&clean, text, n > REASON_MAX ? utf8_complete_len(text, REASON_MAX) : n);
    k->score = 0;
    k->reason = arena_strdup(&c->reasons, clean.data);
    buf_release(&clean);
    free(text);
}

/* opening */

/* The kind of a spec; NULL: the name is unknown. *argument: the text after the first
 * colon; NULL: there is no colon. */
static const struct check_kind *kind_find(const char *spec, const char **argument) {
    size_t n = strcspn(spec, ":");
    *argument = spec[n] ? spec + n + 1 : NULL;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (strlen(kinds[i]->name) == n && memcmp(kinds[i]->name, spec, n) == 0) return kinds[i];
    return NULL;
}

static int unknown_kind(const char *spec, const char *label, bool has_model, struct error *err) {
    struct buf list = {0};
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (has_model || !kinds[i]->needs_model)
            buf_printf(&list, "%s%s", list.len ? ", " : "", kinds[i]->usage);
    error_set(err, ERR_USAGE, "%s '%s' is not known; there are %s", label, spec, list.data);
    buf_release(&list);
    return err->code;
}

static int spec_check(const struct check_kind *kind, const char *spec, const char *argument,
                      const char *label, bool has_model, struct error *err) {
    if (!kind) return unknown_kind(spec, label, has_model, err);
    if (kind->needs_model && !has_model)
        return error_set(err, ERR_USAGE,
                         "%s '%s' needs a model, which this command does not provide", label, spec);
    if (argument && kind->argument == ARGUMENT_NONE)
        return error_set(err, ERR_USAGE, "%s '%s' takes no argument; write '%s'", label, spec,
                         kind->usage);
    if (!argument && kind->argument == ARGUMENT_REQUIRED)
        return error_set(err, ERR_USAGE, "%s '%s' needs an argument; write '%s'", label, spec,
                         kind->usage);
    return OK;
}

struct check *check_open(const char *spec, const struct check_options *o, struct error *err) {
    const char *argument, *label = o->label ? o->label : "check";
    const struct check_kind *kind = kind_find(spec, &argument);
    if (spec_check(kind, spec, argument, label, o->model, err) != OK) return NULL;
    struct check *c = xcalloc(1, sizeof *c);
    c->kind = kind;
    c->label = xstrdup(label);
    if (!kind->open || kind->open(c, argument, o, err) == OK) return c;
    check_free(c);
    return NULL;
}

void check_free(struct check *c) {
    if (!c) return;
    if (c->kind->free) c->kind->free(c->state);
    arena_release(&c->reasons);
    free(c->label);
    free(c);
}

bool check_needs_gold(const struct check *c) {
    return c->kind->needs_gold;
}

struct check *check_open_filter(const char *spec, const struct check_options *o,
                                struct error *err) {
    struct check *c = check_open(spec, o, err);
    if (!c || !check_needs_gold(c)) return c;
    error_set(err, ERR_USAGE,
              "check '%s' needs the right answer, so it cannot select among samples",
              c->kind->name);
    check_free(c);
    return NULL;
}

const char *check_kind(const struct check *c) {
    return c->kind->name;
}

bool check_spec_is_pure(const char *spec) {
    const char *argument;
    struct error err;
    const struct check_kind *kind = kind_find(spec, &argument);
    return kind && kind->pure && spec_check(kind, spec, argument, "", true, &err) == OK;
}

/* running */

int check_item(const struct check *c, const json_t *item, struct error *err) {
    return c->kind->item ? c->kind->item(c, item, err) : OK;
}

int check_run(struct check *c, struct check_case *cases, int n, struct error *err) {
    double start = clock_now();
    int rc = OK, passed = 0;
    arena_release(&c->reasons);
    for (int i = 0; i < n; i++) {
        cases[i].score = 0;
        cases[i].passed = false;
        cases[i].reason = NULL;
    }
    if (c->kind->run_all) rc = c->kind->run_all(c, cases, n, err);
    for (int i = 0; !rc && !c->kind->run_all && i < n; i++)
        rc = c->kind->run_one(c, &cases[i], err);
    for (int i = 0; !rc && i < n; i++) {
        cases[i].passed = cases[i].score >= 0.5;
        passed += cases[i].passed;
        if (!cases[i].passed && !cases[i].reason) cases[i].reason = "its score is below 0.5";
    }
    c->cost.seconds += clock_now() - start;
    c->cost.checked += rc ? 0 : n;
    c->cost.passed += passed;
    return rc;
}

struct check_cost check_cost(const struct check *c) {
    return c->cost;
}

void check_confusion_add(struct check_confusion *m, bool right, bool passed) {
    int64_t *count = right ? (passed ? &m->right_passed : &m->right_failed)
                           : (passed ? &m->wrong_passed : &m->wrong_failed);
    ++*count;
}
