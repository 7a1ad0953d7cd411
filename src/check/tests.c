/*
 * tests: the check tests. The Python code of a text and then the item's tests run in one process in
 * the sandbox, without network and without files of the user.
 *
 * Both run as the module __main__. Neither may end the process: only the driver below does, after
 * the tests, and it then prints a random token as the last output. So a text that exits with status
 * 0 fails. Code that searches its own process for the token can still pass: this check finds errors
 * and does not withstand an adversary.
 */
#define _GNU_SOURCE
#include "check/internal.h"
#include "sandbox/sandbox.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { TOKEN_BYTES = 16 };
#define TEST_SECONDS 10

struct tests {
    struct strings argv, read;
};

/* Reads {"text", "tests", "token"}. An error is one line on standard error, status 1. */
static const char driver[] =
    "import json, os, sys, types\n"
    "def main():\n"
    "    write, leave, run, build = os.write, os._exit, exec, compile\n"
    "    part = json.load(sys.stdin)\n"
    "    module = sys.modules['__main__'] = types.ModuleType('__main__')\n"
    "    for name in ('text', 'tests'):\n"
    "        try:\n"
    "            run(build(part[name], name, 'exec'), module.__dict__)\n"
    "        except BaseException as e:\n"
    "            kind = type(e).__name__\n"
    "            try:\n"
    "                line = str(e).strip().split('\\n')[0][:200]\n"
    "            except BaseException:\n"
    "                line = ''\n"
    "            what = 'its code' if name == 'text' else 'a test'\n"
    "            write(2, ('\\n%s: %s %s' % (what, kind, line)).encode('utf-8', 'replace'))\n"
    "            leave(1)\n"
    "    try:\n"
    "        sys.stdout.flush()\n"
    "    finally:\n"
    "        write(1, part['token'].encode())\n"
    "        leave(0)\n"
    "main()\n";

/* The input of the driver; NULL: the text is not UTF-8. */
static char *driver_input(const struct check_case *k, const char *token) {
    struct code_block code = code_block_last(k->text);
    json_t *v = json_pack("{s:s%, s:O, s:s}", "text", code.ptr, code.len, "tests",
                          item_check_get(k->item, "tests"), "token", token);
    char *input = v ? json_dumps(v, JSON_COMPACT) : NULL;
    json_decref(v);
    return input;
}

static void token_make(char out[2 * TOKEN_BYTES + 1]) {
    uint8_t bytes[TOKEN_BYTES];
    CHECK(getrandom(bytes, sizeof bytes, 0) == TOKEN_BYTES);
    for (int i = 0; i < TOKEN_BYTES; i++) sprintf(out + 2 * i, "%02x", bytes[i]);
}

/* The last line of an output. */
static const char *last_line(struct buf *b) {
    while (b->len && strchr(" \r\n", b->data[b->len - 1])) b->data[--b->len] = 0;
    const char *newline = b->len ? memrchr(b->data, '\n', b->len) : NULL;
    return newline ? newline + 1 : b->len ? b->data : "";
}

static void result_judge(struct check *c, struct check_case *k, struct sandbox_result *r,
                         const struct sandbox_limits *limits, const char *token) {
    const char *why = sandbox_failure(r, limits);
    size_t n = 2 * TOKEN_BYTES;
    if (r->exit_reason == SANDBOX_EXITED && r->status == 1 && r->error_output.len)
        case_fail(c, k, "%s", last_line(&r->error_output));
    else if (why)
        case_fail(c, k, "%s", why);
    else if (r->out.len < n || memcmp(r->out.data + r->out.len - n, token, n) != 0)
        case_fail(c, k, "it ended before the end of its tests");
    else
        k->score = 1;
}

static int tests_run(struct check *c, struct check_case *k, struct error *err) {
    const struct tests *t = c->state;
    char token[2 * TOKEN_BYTES + 1];
    token_make(token);
    char *input = driver_input(k, token);
    if (!input) {
        case_fail(c, k, "the text is not UTF-8");
        return OK;
    }
    const struct sandbox_spec spec = {
        .argv = &t->argv,
        .read = &t->read,
        .input = input,
        .input_len = strlen(input),
        .limits = {.seconds = TEST_SECONDS,
                   .cpu_seconds = TEST_SECONDS,
                   .memory = (size_t)512 << 20,
                   .file_size = (size_t)16 << 20,
                   .tmp_size = (size_t)64 << 20,
                   .output = (size_t)1 << 20,
                   .processes = 32},
    };
    struct sandbox_result r;
    int rc = sandbox_run(&spec, &r, err);
    if (!rc) {
        result_judge(c, k, &r, &spec.limits, token);
        sandbox_result_release(&r);
    }
    free(input);
    return rc ? error_wrap(err, "%s tests", c->label) : OK;
}

static int tests_item(const struct check *c, const json_t *item, struct error *err) {
    const json_t *tests = item_check_get(item, "tests");
    if (json_string_length(tests) > 0) return OK;
    return error_set(err, ERR_FORMAT, "'check.tests' %s, which %s tests runs",
                     tests ? "must be a text of Python code" : "is missing", c->label);
}

/* The system's Python, which the sandbox shows anyway; without one that of PATH. */
static char *python_find(const char *named, const char *label, struct strings *read,
                         struct error *err) {
    char *path = named ? NULL : sandbox_program_find("/usr/local/bin:/usr/bin:/bin", "python3");
    char *working_dir = path ? NULL : realpath(".", NULL);
    if (!path && !working_dir) error_errno(err, "the working folder");
    if (working_dir)
        path = program_resolve(named ? named : "python3", working_dir, label, read, err);
    free(working_dir);
    return path;
}

static int tests_open(struct check *c, const char *argument, const struct check_options *o,
                      struct error *err) {
    struct tests *t = c->state = xcalloc(1, sizeof *t);
    (void)o;
    int rc = sandbox_command_check(err);
    if (!rc) rc = command_sandbox_check("", err);
    char *python = rc ? NULL : python_find(argument, c->label, &t->read, err);
    if (!python) return err->code;
    strings_add(&t->argv, python);
    strings_add(&t->argv, "-IB");
    strings_add(&t->argv, "-c");
    strings_add(&t->argv, driver);
    free(python);
    return program_paths_check(&t->read, err);
}

static void tests_free(void *state) {
    struct tests *t = state;
    if (!t) return;
    strings_release(&t->argv);
    strings_release(&t->read);
    free(t);
}

const struct check_kind tests_check = {.name = "tests",
                                       .usage = "tests[:PYTHON]",
                                       .argument = ARGUMENT_OPTIONAL,
                                       .open = tests_open,
                                       .item = tests_item,
                                       .run_one = tests_run,
                                       .free = tests_free};
