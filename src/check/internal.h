/*
 * check: internals. A kind of check is a struct check_kind, defined in a separate file and listed
 * in the table of check.c.
 */
#ifndef SHOAL_CHECK_INTERNAL_H
#define SHOAL_CHECK_INTERNAL_H

#include "check/check.h"

#include <stdarg.h>

enum check_argument { ARGUMENT_NONE, ARGUMENT_OPTIONAL, ARGUMENT_REQUIRED };

struct check_kind {
    const char *name, *usage; /* "regex", "regex[:PATTERN]" */
    enum check_argument argument;
    bool needs_gold, needs_model;
    bool pure; /* opens no file and runs no program */
    /* Sets c->state. `argument` is NULL if the spec has no colon. May be NULL. */
    int (*open)(struct check *c, const char *argument, const struct check_options *o,
                struct error *err);
    int (*item)(const struct check *c, const json_t *item, struct error *err); /* may be NULL */
    /* One of the two: checks one text or all. The caller has set score and reason to 0. */
    int (*run_one)(struct check *c, struct check_case *k, struct error *err);
    int (*run_all)(struct check *c, struct check_case *cases, int n, struct error *err);
    void (*free)(void *state); /* state may be NULL; the function too */
};

struct check {
    const struct check_kind *kind;
    char *label; /* check_options.label */
    void *state;
    struct check_cost cost;
    struct arena reasons; /* texts of check_case.reason, until the next check_run */
};

extern const struct check_kind exact_check, regex_check, json_schema_check, calculator_check,
    tests_check, sql_check, question_check, command_check, shell_check;

/* Fails a text. The reason is made printable and shortened. */
void case_fail(struct check *c, struct check_case *k, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The member `key` of the item's "check"; or NULL. */
const json_t *item_check_get(const json_t *item, const char *key);

/* A part of a text. */
struct code_block {
    const char *ptr;
    size_t len;
};
/* The content of the last fenced block (between lines of ```; up to the end of the text if it is
 * not closed), or the whole text. */
struct code_block code_block_last(const char *text);

/* The program `name`, found as a shell finds it, malloc'ed; NULL: ERR_MISSING. Adds to `read` its
 * folders that a sandbox must show. */
char *program_resolve(const char *name, const char *working_dir, const char *label,
                      struct strings *read, struct error *err);
/* OK, or the error of path_access_hook: in a job, commands may read only the files that the hook
 * permits. */
int program_paths_check(const struct strings *read, struct error *err);
/* OK if commands can run in a sandbox here; else the reason. */
int command_sandbox_check(const char *remedy, struct error *err);

#endif
