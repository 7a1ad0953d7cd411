/*
 * builtin_code: the tools python, sh and check_code, which run programs in the sandbox.
 *
 * A program that fails is an error. The result is then its output, and the kind of failure on the
 * last line. For check_code a syntax error is a result and not an error.
 */
#define _GNU_SOURCE
#include "agent/internal.h"
#include "sandbox/sandbox.h"

#include <stdlib.h>
#include <string.h>

#define FOLDERS "/usr/local/bin:/usr/bin:/bin" /* the sandbox shows these */
#define CODE_SECONDS 10.0
/* Bytes of each of the two outputs of a program that failed, so that both fit in a result. */
enum { FAILED_OUTPUT = 6 << 10, MAX_WORDS = 8 };

struct code_tool {
    char *python;
    double seconds;
};

static int code_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    int rc = sandbox_available(err);
    if (rc) return rc;
    struct code_tool *t = *ctx = xcalloc(1, sizeof *t);
    t->seconds = o->seconds > 0 ? o->seconds : CODE_SECONDS;
    return OK;
}

static void code_release(void *ctx) {
    struct code_tool *t = ctx;
    if (t) free(t->python);
    free(t);
}

static struct sandbox_limits code_limits(const struct code_tool *t) {
    return (struct sandbox_limits){.seconds = t->seconds,
                                   .memory = (size_t)512 << 20,
                                   .file_size = (size_t)16 << 20,
                                   .tmp_size = (size_t)64 << 20,
                                   .output = (size_t)64 << 10,
                                   .processes = 32};
}

/* Runs a program whose words end with NULL. input NULL: nothing on standard input. */
static int program_run(const char *const *words, const char *input,
                       const struct sandbox_limits *limits, struct sandbox_result *r,
                       struct error *err) {
    struct strings argv = {0};
    for (int i = 0; words[i]; i++) strings_add(&argv, words[i]);
    const struct sandbox_spec spec = {
        .argv = &argv, .input = input, .input_len = input ? strlen(input) : 0, .limits = *limits};
    int rc = sandbox_run(&spec, r, err);
    strings_release(&argv);
    return rc;
}

/* Appends an output, which begins a new line, without the empty lines at its end. */
static void output_add(struct buf *out, const struct buf *text, size_t limit) {
    size_t len = text->len;
    while (len && strchr(" \r\n", text->data[len - 1])) len--;
    if (len && out->len) buf_puts(out, "\n");
    text_add_clean(out, text->data, len, limit);
}

static int program_output(const char *const *words, const struct sandbox_limits *limits,
                          struct buf *out, struct error *err) {
    struct sandbox_result r;
    int rc = program_run(words, NULL, limits, &r, err);
    if (rc) return rc;
    const char *why = sandbox_failure(&r, limits);
    output_add(out, &r.out, why ? FAILED_OUTPUT : AGENT_MAX_RESULT);
    if (why) {
        output_add(out, &r.error_output, FAILED_OUTPUT);
        rc = error_set(err, ERR_STATE, "%s", why);
    }
    sandbox_result_release(&r);
    return rc;
}

/* python and sh */

static int python_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    char *python = sandbox_program_find(FOLDERS, "python3");
    if (!python)
        return error_set(err, ERR_MISSING, "python3 is not in %s; install the package 'python3'",
                         FOLDERS);
    int rc = code_open(o, ctx, err);
    if (rc)
        free(python);
    else
        ((struct code_tool *)*ctx)->python = python;
    return rc;
}

static int python_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    const struct code_tool *t = ctx;
    const char *const words[] = {t->python, "-IB", "-c", json_get_string(arguments, "code"), NULL};
    const struct sandbox_limits limits = code_limits(t);
    return program_output(words, &limits, out, err);
}

static int sh_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    const char *const words[] = {"/bin/sh", "-c", json_get_string(arguments, "command"), NULL};
    const struct sandbox_limits limits = code_limits(ctx);
    return program_output(words, &limits, out, err);
}

const struct tool_kind python_kind = {
    .arguments = {{"code", "a program, which prints its result", 4000}},
    .open = python_open,
    .call = python_call,
    .release = code_release};
const struct tool_kind sh_kind = {.arguments = {{"command", "command for /bin/sh", 4000}},
                                  .open = code_open,
                                  .call = sh_call,
                                  .release = code_release};

/* check_code */

static const char python_checker[] =
    "import sys\n"
    "try: compile(sys.stdin.buffer.read(), 'code', 'exec', dont_inherit=True)\n"
    "except SyntaxError as e: sys.exit('line %s: %s' % (e.lineno, e.msg))\n";

/* A program that reads code from standard input and does not run it; `words` follow its name. */
struct checker {
    const char *language, *program, *package, *words[MAX_WORDS];
    bool reserves_memory; /* it reserves far more addresses than it uses */
};
static const struct checker checkers[] = {
    {"python", "python3", "python3", {"-IB", "-c", python_checker}, false},
    {"c", "gcc", "gcc", {"-fsyntax-only", "-x", "c", "-"}, false},
    {"javascript", "node", "nodejs", {"--check", "-"}, true},
    {"sh", "sh", "dash", {"-n"}, false},
};
static const char *const languages[] = {"python", "c", "javascript", "sh", NULL};

static const struct checker *checker_find(const char *language) {
    for (size_t i = 0; i < ARRAY_LEN(checkers); i++)
        if (strcmp(checkers[i].language, language) == 0) return &checkers[i];
    return NULL;
}

static int checker_run(const struct code_tool *t, const struct checker *k, const char *code,
                       struct sandbox_result *r, struct error *err) {
    char *path = sandbox_program_find(FOLDERS, k->program);
    if (!path)
        return error_set(err, ERR_MISSING,
                         "%s cannot be checked: '%s' is missing; install the package '%s'",
                         k->language, k->program, k->package);
    const char *words[MAX_WORDS + 2] = {path};
    for (int i = 0; i < MAX_WORDS; i++) words[i + 1] = k->words[i];
    struct sandbox_limits limits = code_limits(t);
    if (k->reserves_memory) limits.memory = SIZE_MAX;
    int rc = program_run(words, code, &limits, r, err);
    free(path);
    const char *why = rc ? NULL : sandbox_failure(r, &limits);
    bool has_found = why && r->exit_reason == SANDBOX_EXITED && r->status < 126;
    if (!why || has_found) return rc;
    sandbox_result_release(r);
    return error_set(err, ERR_STATE, "%s: %s", k->program, why);
}

static int check_code_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    const char *language = json_get_string(arguments, "language");
    const struct checker *k = checker_find(language);
    struct sandbox_result r;
    if (!k)
        return error_set(err, ERR_USAGE,
                         "'%.100s' cannot be checked; there are python, c, javascript and sh",
                         language);
    int rc = checker_run(ctx, k, json_get_string(arguments, "code"), &r, err);
    if (rc) return rc;
    if (r.status == 0)
        buf_puts(out, "no syntax errors");
    else
        output_add(out, &r.error_output, AGENT_MAX_RESULT);
    sandbox_result_release(&r);
    return OK;
}

const struct tool_kind check_code_kind = {
    .arguments = {{"language", "language of the code", 0, languages},
                  {"code", "code to check", 4000}},
    .open = code_open,
    .call = check_code_call,
    .release = code_release};
