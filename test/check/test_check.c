/*
 * test_check: every kind of check with right, wrong and hostile texts.
 *
 * A text that reaches a limit must fail with a reason, and the check must then judge the next text.
 * Code and commands run in the real sandbox; without one their tests are skipped with the reason.
 */
/* levels: once */
#define _GNU_SOURCE
#include "check/check.h"
#include "sandbox/sandbox.h"

#include <pthread.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char folder[] = "/tmp/shoal-test-check-XXXXXX";

static void endless_start(void);

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    endless_start();
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    tree_delete(folder);
    return 0;
}

static json_t *json_from(const char *text) {
    json_t *v = json_parse(text, strlen(text), "item", &err);
    if (!v) fail_msg("%s: %s", text, err.text);
    return v;
}

static struct check *open_with(const char *spec, const struct check_options *o) {
    struct check *c = check_open(spec, o, &err);
    if (!c) fail_msg("%s: %s", spec, err.text);
    return c;
}

static struct check *open_check(const char *spec) {
    return open_with(spec, &(struct check_options){.sandbox = true});
}

/* Checks one text; the check owns the reason. */
static struct check_case run_text(struct check *c, const char *item, const char *text) {
    struct check_case k = {.item = json_from(item), .text = text, .ended = true};
    if (check_item(c, k.item, &err) != OK) fail_msg("%s: %s", item, err.text);
    if (check_run(c, &k, 1, &err) != OK) fail_msg("%s: %s", check_kind(c), err.text);
    json_decref((json_t *)k.item);
    k.item = NULL;
    assert_int_equal(k.passed, k.score >= 0.5);
    assert_int_equal(k.passed, k.reason == NULL);
    return k;
}

static void assert_passes(struct check *c, const char *item, const char *text) {
    struct check_case k = run_text(c, item, text);
    if (!k.passed) fail_msg("%s of '%.80s': %s", check_kind(c), text, k.reason);
}

/* `why` is a part of the reason. */
static void assert_fails(struct check *c, const char *item, const char *text, const char *why) {
    struct check_case k = run_text(c, item, text);
    if (k.passed) fail_msg("%s of '%.80s' passes", check_kind(c), text);
    if (!strstr(k.reason, why)) fail_msg("%s of '%.80s': %s", check_kind(c), text, k.reason);
}

static char *repeat(const char *part, size_t bytes) {
    struct buf b = {0};
    while (b.len < bytes) buf_puts(&b, part);
    return b.data;
}

static char *write_file(const char *name, const char *text) {
    char *path = path_join(folder, name);
    if (file_write(path, text, strlen(text), &err) != OK) fail_msg("%s", err.text);
    return path;
}

static bool have_sandbox(void) {
    if (sandbox_available(&err) == OK) return true;
    print_message("# skipped: %s\n", err.text);
    return false;
}

/* specs and items */

static void test_specs(void **state) {
    (void)state;
    static const struct {
        const char *spec, *why;
        int code;
    } cases[] = {
        {"fame", "there are exact, regex[:PATTERN], json-schema:FILE, calculator", ERR_USAGE},
        {"", "is not known", ERR_USAGE},
        {"exac", "is not known", ERR_USAGE},
        {"exact:", "takes no argument", ERR_USAGE},
        {"calculator:1", "takes no argument", ERR_USAGE},
        {"json-schema", "needs an argument; write 'json-schema:FILE'", ERR_USAGE},
        {"sql", "needs an argument", ERR_USAGE},
        {"command", "needs an argument", ERR_USAGE},
        {"command:", "is empty", ERR_USAGE},
        {"command:a 'b", "unclosed quote", ERR_USAGE},
        {"question", "needs a model", ERR_USAGE},
        {"regex:[", "", ERR_FORMAT},
        {"json-schema:/no/such", "/no/such", ERR_MISSING},
        {"sql:/no/such", "/no/such", ERR_MISSING},
        {"sql:/bin/sh", "cannot read database '/bin/sh'", ERR_FORMAT},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        assert_null(check_open(cases[i].spec, &(struct check_options){0}, &err));
        if (err.code != cases[i].code || !strstr(err.text, cases[i].why))
            fail_msg("'%s': %d %s", cases[i].spec, err.code, err.text);
    }
    assert_null(check_open("x", &(struct check_options){.label = "reward"}, &err));
    assert_non_null(strstr(err.text, "reward 'x' is not known"));
    assert_null(strstr(err.text, "question")); // it needs a model
    static const char *const pure[] = {"exact", "regex", "regex:a:b", "calculator", "question"};
    static const char *const others[] = {"exact:",   "shell:id", "command:id", "tests",
                                         "tests:x",  "sql:a",    "question:a", "json-schema:a",
                                         "SHELL:id", "",         "regexp",     "exact;id"};
    for (size_t i = 0; i < ARRAY_LEN(pure); i++) assert_true(check_spec_is_pure(pure[i]));
    for (size_t i = 0; i < ARRAY_LEN(others); i++) assert_false(check_spec_is_pure(others[i]));
}

static void assert_refused(struct check *c, const char *item, const char *why) {
    json_t *v = json_from(item);
    assert_int_equal(check_item(c, v, &err), ERR_FORMAT);
    if (!strstr(err.text, why)) fail_msg("%s: %s", item, err.text);
    json_decref(v);
}

static void test_cost_and_confusion(void **state) {
    (void)state;
    struct check *c = open_check("regex:a");
    assert_string_equal(check_kind(c), "regex");
    assert_false(check_needs_gold(c));
    assert_passes(c, "{}", "a");
    assert_fails(c, "{}", "b", "does not match");
    struct check_cost cost = check_cost(c);
    assert_int_equal(cost.checked, 2);
    assert_int_equal(cost.passed, 1);
    assert_int_equal(cost.questions, 0);
    assert_true(cost.seconds >= 0);
    check_free(c);
    check_free(NULL);
    struct check_confusion m = {0};
    for (int i = 0; i < 10; i++) check_confusion_add(&m, i < 7, i % 3 == 0);
    assert_int_equal(m.right_passed, 3);
    assert_int_equal(m.right_failed, 4);
    assert_int_equal(m.wrong_passed, 1);
    assert_int_equal(m.wrong_failed, 2);
}

/* patterns */

static void test_exact(void **state) {
    (void)state;
    struct check *c = open_check("exact");
    assert_true(check_needs_gold(c));
    assert_passes(c, "{\"answer\": \"12\"}", "6 + 6\nanswer: 12\n");
    assert_fails(c, "{\"answer\": \"12\"}", "112", "not the item's answer");
    assert_passes(c, "{\"answer\": [\"yes\", 3]}", "it is 3.0");
    assert_fails(c, "{\"answer\": \"a\"}", "\xff\xfe", "not the item's answer");
    assert_refused(c, "{}", "'answer' is missing, which check exact compares with");
    assert_refused(c, "{\"answer\": [true]}", "must be a text");
    check_free(c);
}

static void test_regex(void **state) {
    (void)state;
    struct check *c = open_check("regex"), *slow = open_check("regex:^(a+)+$");
    assert_passes(c, "{\"pattern\": \"^答え\"}", "答えは三");
    assert_fails(c, "{\"pattern\": \"^答え\"}", "三が答え", "does not match");
    assert_fails(c, "{\"pattern\": \"a\"}", "a\xff", "not UTF-8");
    assert_refused(c, "{}", "'pattern' is missing");
    assert_refused(c, "{\"pattern\": \"[\"}", "");
    char *text = repeat("a", 40);
    text[39] = '!';
    assert_fails(slow, "{}", text, "");
    free(text);
    text = repeat("a", 1 << 20);
    text[(1 << 20) - 1] = '!';
    assert_fails(slow, "{}", text, "");
    assert_passes(slow, "{}", "aaa");
    free(text);
    check_free(c);
    check_free(slow);
}

/* json-schema */

static void test_json_schema(void **state) {
    (void)state;
    char *path = write_file("schema.json",
                            "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": "
                            "\"string\"}, \"age\": {\"type\": \"integer\", \"minimum\": 0}, "
                            "\"tags\": {\"type\": \"array\", \"items\": {\"$ref\": "
                            "\"#/$defs/tag\"}}}, \"required\": [\"name\", \"age\"], \"$defs\": "
                            "{\"tag\": {\"type\": \"object\", \"properties\": {\"a\": {\"type\": "
                            "\"null\"}, \"b\": {\"type\": \"number\"}}}}}");
    char *spec = xasprintf("json-schema:%s", path);
    struct check *c = open_check(spec);
    assert_passes(c, "{}", "{\"name\": \"x\", \"age\": 3}");
    assert_passes(c, "{}", "\n {\n\n\t\"age\" :\r\n 3 ,   \"name\":\"a \\\" , }\" } \n");
    assert_passes(c, "{}", "Here:\n```json\n{\"age\": 1, \"name\": \"y\"}\n```\nand ```that```");
    assert_passes(c, "{}", "```\n[]\n```\n```json\n{\"age\": 1, \"name\": \"y\"}");
    assert_passes(c, "{}",
                  "{\"tags\": [ {\"b\": 1.50, \"a\": null}, {} ], \"age\": 1, \"name\": \"\"}");
    assert_fails(c, "{}", "{\"name\": \"x\", \"age\": -3}", "does not accept");
    assert_fails(c, "{}", "{\"name\": \"x\", \"age\": \"3\"}", "does not accept");
    assert_fails(c, "{}", "{\"name\": \"x\"}", "does not accept");
    assert_fails(c, "{}", "{\"name\": \"x\", \"age\": 3, \"more\": 1}", "does not accept");
    assert_fails(c, "{}", "{\"tags\": [{\"b\": \"1\"}], \"age\": 1, \"name\": \"\"}", "not accept");
    assert_fails(c, "{}", "[]", "does not accept");
    assert_fails(c, "{}", "3", "does not accept");
    assert_fails(c, "{}", "{\"name\": \"x\", \"age\": 3, \"age\": 3}", "no JSON");
    assert_fails(c, "{}", "{\"name\": \"\xff\", \"age\": 3}", "no JSON");
    assert_fails(c, "{}", "{\"name\": \"x\"", "no JSON");
    assert_fails(c, "{}", "", "no JSON");
    char *deep = repeat("[", 1 << 20), *part = repeat("a", 1 << 20);
    char *large = xasprintf("{\"age\": 1, \"name\": \"%s\"}", part);
    assert_fails(c, "{}", deep, "no JSON");
    assert_passes(c, "{}", large);
    free(deep);
    free(part);
    free(large);
    free(path);
    free(spec);
    check_free(c);
    path = write_file("wrong.json", "{\"type\": \"objekt\"}");
    spec = xasprintf("json-schema:%s", path);
    assert_null(check_open(spec, &(struct check_options){0}, &err));
    assert_non_null(strstr(err.text, "wrong.json"));
    free(path);
    free(spec);
}

/* calculator */

static void test_equations(void **state) {
    (void)state;
    static const struct {
        const char *text, *why; /* NULL: it passes */
    } cases[] = {
        {"5 + 3 = 8", NULL},
        {"so 5 + 3 = 8 apples, and 8 * 2 = 16.", NULL},
        {"5 + 3 = 9", "'5 + 3 = 9' is wrong"},
        {"5 + 3 = 8. But 8 * 2 = 15.", "'8 * 2 = 15' is wrong"},
        {"1,234.5 × 2 = 2,469", NULL},
        {"１２＋３×４＝２４です", NULL},
        {"１２＋３×４＝６０です", "is wrong"},
        {"１，２３４−２３４＝１０００", NULL},
        {"5+3=8，100-1=99", NULL},
        {"(1 + 2) ÷ 4 = 0.75", NULL},
        {"1/3 + 1/6 = 1/2", NULL},
        {"10 / 3 = 3.33", "is wrong"},
        {"0.1 + 0.2 = 0.3", NULL},
        {"-5 + 3 = -2", NULL},
        {"2 - -3 = 5", NULL},
        {"- 5 + 3 = 8\n* 2 + 2 = 4\n1. 3 + 3 = 6\n2) 4 + 4 = 8", NULL},
        {"**5 + 3 = 8** and `2+2=4`", NULL},
        {"\\( 5 \\times 3 = 15 \\) and \\boxed{7-2=5}", NULL},
        {"\\( 5 \\times 3 = 16 \\)", "is wrong"},
        {"$5 + $3 = $8", NULL},
        {"5 x 3 = 15", NULL},
        {"50 * 20% = 10", NULL},
        {"<<5*3=15>>15", NULL},
        {"<<5*3=14>>14", "is wrong"},
        {"5 + 3 = 8 = 4 * 2", NULL},
        {"5 + 3 = 8 = 9", "is wrong"},
        {"x = 5 + 3 = 8", NULL},
        {"x = 5 + 3 = 7", "is wrong"},
        {"(5 + 3 = 8)", NULL},
        {"7 == 3 + 4", NULL},
        {"20% of 50 = 10, 5 + 3 = 8", NULL},
        {"答えは5+3=8。", NULL},
        /* other mathematics is skipped */
        {"2x + 3 = 7 so 2x = 7 - 3 = 4", NULL},
        {"2^3 + 1 = 9 and 1 + 1 = 2", NULL},
        {"2**3 + 1 = 9 and 1 + 1 = 2", NULL},
        {"√16 + 1 = 5 and 1 + 1 = 2", NULL},
        {"f(2) + 1 = 6 and 1 + 1 = 2", NULL},
        {"□ + 3 - 1 = 8 and 1 + 1 = 2", NULL},
        {"5個 + 3個 - 1 = 7個、1+1=2", NULL},
        {"7 ÷ 2 = 3…1、1+1=2", NULL},
        {"7 ÷ 2 = 3 余り 1、1+1=2", NULL},
        {"x2 + 1 = 4, v1.2 + 1 = 3, 1 + 1 = 2", NULL},
        {"5 + 3 => 9, 5 + 3 >= 1, 1 + 1 = 2", NULL},
        {"\\frac{1}{2} + 3 - 1 = 2.5, 1 + 1 = 2", NULL},
        {"2x + 3 = 7", "no equation"},
        {"12", "no equation"},
        {"50 = 10", "no equation"},
        {"5 + 3 = ?", "no equation"},
        {"", "no equation"},
        {"\xff\xfe\x80 5 + 3 = 8 \xe3\x81", NULL},
        {"\xff\xfe\x80", "no equation"},
        /* limits */
        {"1 / 0 = 0", "divides by zero"},
        {"1 / (2 - 2) + 1 = 1", "divides by zero"},
        {"9223372036854775807 + 1 = 9223372036854775808", "too many digits"},
        {"99999999999 * 99999999999 = 1", "too many digits"},
        {"-9223372036854775807 - 1 = 1", "too many digits"},
        {"123456789012345678901234567890 + 1 = 2", "too many digits"},
        {"0.0000000000000000000000001 * 2 = 1", "too many digits"},
        {"9223372036854775806 + 1 = 9223372036854775807", NULL},
    };
    struct check *c = open_check("calculator");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        if (cases[i].why)
            assert_fails(c, "{}", cases[i].text, cases[i].why);
        else
            assert_passes(c, "{}", cases[i].text);
    check_free(c);
}

static void test_arithmetic_questions(void **state) {
    (void)state;
    static const struct {
        const char *item, *text, *why;
    } cases[] = {
        {"{\"question\": \"7325 - 6 = ?\"}", "7319", NULL},
        {"{\"question\": \"7325 - 6 = ?\"}", "5 - 6 = -1\nanswer: 7,319", NULL},
        {"{\"question\": \"7325 - 6 = ?\"}", "7318", "the answer is not 7319"},
        {"{\"question\": \"7325ひく6は？\"}", "答えは7319です。", NULL},
        {"{\"question\": \"7325ひく6は？\"}", "答え：７３１９", NULL},
        {"{\"question\": \"7325ひく6は？\"}", "7331", "is not 7319"},
        {"{\"question\": \"3ひく8は？\"}", "答えは-5です", NULL},
        {"{\"question\": \"3ひく8は？\"}", "5", "is not -5"},
        {"{\"question\": \"6たす7は？\"}", "13", NULL},
        {"{\"question\": \"6かける7は？\"}", "42", NULL},
        {"{\"question\": \"7わる2は？\"}", "3.5", NULL},
        {"{\"question\": \"7わる2は？\"}", "7/2", NULL},
        {"{\"question\": \"1234加5等于？\"}", "1239", NULL},
        {"{\"question\": \"1234减5等于？\"}", "1239", "is not 1229"},
        {"{\"question\": \"6乘7等于多少？\"}", "42", NULL},
        {"{\"question\": \"6除以4\"}", "1.5", NULL},
        {"{\"prompt\": \"What is (2 + 3) * 4?\"}", "It is 20.", NULL},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"2 plus 3?\"}]}", "5", NULL},
        {"{\"prompt\": \"2+3\"}", "2+3=5", NULL},
        {"{\"prompt\": \"2+3\"}", "2+3=6 answer: 5", "is wrong"},
        {"{\"prompt\": \"2+3\"}", "five", "no number"},
        {"{\"prompt\": \"2+3\"}", "\xff", "no number"},
        {"{\"prompt\": \"1/0\"}", "0", "divides by zero"},
        {"{\"prompt\": \"9999999999*9999999999\"}", "0", "too many digits"},
        {"{\"prompt\": \"Tom has 2 + 3 apples, how many?\"}", "5", "no equation"},
        {"{\"prompt\": 3}", "5", "no equation"},
    };
    struct check *c = open_check("calculator");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        if (cases[i].why)
            assert_fails(c, cases[i].item, cases[i].text, cases[i].why);
        else
            assert_passes(c, cases[i].item, cases[i].text);
    check_free(c);
}

/* Texts of 1 MB that a scan which is not linear would not finish. */
static void test_calculator_is_linear(void **state) {
    (void)state;
    static const char *const parts[] = {"(",  "-",     "1+", "(1+",    "1(", "- ", "*1 ",
                                        "1=", "     ", "9",  "1+1=2 ", "\\", "－"};
    struct check *c = open_check("calculator");
    double start = clock_now();
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        char *text = repeat(parts[i], 1 << 20);
        struct check_case k = run_text(c, "{}", text);
        assert_int_equal(k.passed, strcmp(parts[i], "1+1=2 ") == 0);
        free(text);
    }
    assert_true(clock_now() - start < 30); // quadratic time is minutes
    check_free(c);
}

/* tests */

static void test_python(void **state) {
    (void)state;
    static const char item[] = "{\"check\": {\"tests\": \"assert add(2, 3) == 5\\nassert "
                               "add(-1, 1) == 0\"}}";
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"def add(a, b):\n    return a + b\n", NULL},
        {"Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", NULL},
        {"def add(a, b):\n    print('hi', flush=True)\n    return a + b\n", NULL},
        {"def add(a, b):\n    return a - b\n", "a test: AssertionError"},
        {"def add(a, b)\n", "its code: SyntaxError"},
        {"def sub(a, b): return 1", "NameError"},
        {"\xff", "UTF-8"},
        {"", "NameError"},
        /* the end of the process is not the end of the tests */
        {"import os; os._exit(0)", "ended before"},
        {"import builtins; builtins.exec = builtins.compile = print", "a test: NameError"},
        {"import sys; sys.exit(0)", "its code: SystemExit"},
        {"def add(a, b): raise SystemExit(0)", "a test: SystemExit"},
        {"import atexit, os\ndef add(a, b): os._exit(0)", "ended before"},
        {"import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "status 137"},
        /* limits */
        {"x = bytearray(1 << 30)", "MemoryError"},
        {"open('/tmp/a', 'wb').write(b'x' * (40 << 20))", "its code: OSError"},
        {"open('/usr/a', 'w')", "its code: OSError"},
        {"open('/etc/shadow').read()", "its code: FileNotFoundError"},
        {"import os\nassert os.listdir('/tmp') == []\nopen('/tmp/ok', 'w').write('x')\n"
         "def add(a, b): return a + b",
         NULL},
        {"import os\nassert not os.path.exists('/home') and not os.path.exists('/root')\n"
         "def add(a, b): return a + b",
         NULL},
        {"import socket\nsocket.create_connection(('127.0.0.1', 22), 1)", "its code: "},
        {"import socket\nsocket.create_connection(('1.1.1.1', 53), 1)", "its code: OSError"},
        {"import os\nwhile True: os.fork()", ""},
        {"for _ in range(100): print('x' * (1 << 20))", "printed more than"},
        {"import os\nfor _ in range(100): os.write(2, b'x' * (1 << 20))", "printed more than"},
        {"def f(n): return f(n + 1)\nf(0)", "its code: RecursionError"},
        {"def add(a, b):\n    return a + b\n", NULL},
    };
    if (!have_sandbox()) skip();
    struct check *c = open_check("tests");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        if (cases[i].why)
            assert_fails(c, item, cases[i].text, cases[i].why);
        else
            assert_passes(c, item, cases[i].text);
    assert_refused(c, "{}", "'check.tests' is missing");
    assert_refused(c, "{\"check\": {\"tests\": 1}}", "must be a text");
    char *comment = repeat("# 関数\n", 1 << 20);
    char *large = xasprintf("%sdef add(a, b): return a + b", comment);
    assert_passes(c, item, large);
    free(large);
    free(comment);
    /* a file of the user is not shown */
    char *secret = write_file("secret", "x");
    char *code = xasprintf("open('%s')", secret);
    assert_fails(c, item, code, "FileNotFoundError");
    free(code);
    free(secret);
    check_free(c);
    assert_null(check_open("tests:/no/python", &(struct check_options){0}, &err));
    assert_int_equal(err.code, ERR_MISSING);
}

/* A loop without end takes the whole time limit, so it runs in a thread of its own, from the
 * beginning of this program on. */
static struct {
    pthread_t thread;
    bool started;
    struct check *c;
    json_t *item;
    struct check_case cases[2];
    struct error err;
    int rc;
    double seconds;
} endless;

static void *endless_run(void *unused) {
    double start = clock_now();
    endless.rc = check_run(endless.c, endless.cases, 2, &endless.err);
    endless.seconds = clock_now() - start;
    return unused;
}

static void endless_start(void) {
    endless.c = check_open("tests", &(struct check_options){0}, &endless.err);
    if (!endless.c) return;
    endless.item = json_from("{\"check\": {\"tests\": \"pass\"}}");
    endless.cases[0] = (struct check_case){.item = endless.item, .text = "while True: pass"};
    endless.cases[1] = (struct check_case){.item = endless.item, .text = "pass"};
    endless.started = pthread_create(&endless.thread, NULL, endless_run, NULL) == 0;
}

static void test_python_without_end(void **state) {
    (void)state;
    if (!endless.started) {
        print_message("# skipped: %s\n", endless.err.text);
        skip();
    }
    pthread_join(endless.thread, NULL);
    if (endless.rc != OK) fail_msg("%s", endless.err.text);
    assert_false(endless.cases[0].passed);
    assert_non_null(endless.cases[0].reason);
    assert_true(endless.cases[1].passed);
    assert_true(endless.seconds < 14);
    json_decref(endless.item);
    check_free(endless.c);
}

/* sql */

static char *database_make(void) {
    char *path = path_join(folder, "a#b.db");
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db,
                                  "CREATE TABLE t(id INTEGER, name TEXT, x REAL);"
                                  "INSERT INTO t VALUES(1, 'a', 0.5), (2, '東京', 2.0), (3, "
                                  "NULL, 1e300);"
                                  "CREATE TABLE n(i INTEGER);"
                                  "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r "
                                  "LIMIT 20000) INSERT INTO n SELECT i FROM r",
                                  NULL, NULL, NULL),
                     SQLITE_OK);
    sqlite3_close(db);
    return path;
}

static void test_sql(void **state) {
    (void)state;
    static const struct {
        const char *item, *text, *why;
    } cases[] = {
        {"{}", "SELECT * FROM t", NULL},
        {"{}", "Here:\n```sql\nSELECT name FROM t WHERE id = 1; -- done\n```\n", NULL},
        {"{}", "SELECT * FROM t WHERE id > 3", "no rows"},
        {"{}", "SELECT count(*), max(upper(name)) FROM t", NULL},
        {"{\"check\": {\"rows\": [[1, \"a\"], [2, \"東京\"], [3, null]]}}",
         "SELECT id, name FROM t ORDER BY id DESC", NULL},
        {"{\"check\": {\"rows\": [[1], [2], [3]], \"ordered\": true}}",
         "SELECT id FROM t ORDER BY id DESC", "other rows"},
        {"{\"check\": {\"rows\": [[1], [2], [3]], \"ordered\": true}}",
         "SELECT id FROM t ORDER BY id", NULL},
        {"{\"check\": {\"rows\": [[1], [2]]}}", "SELECT id FROM t", "other rows"},
        {"{\"check\": {\"rows\": [[1], [1]]}}", "SELECT id FROM t WHERE id < 3", "other rows"},
        {"{\"check\": {\"rows\": [[2]]}}", "SELECT x FROM t WHERE id = 2", NULL},
        {"{\"check\": {\"rows\": [[2.0]]}}", "SELECT 2", NULL},
        {"{\"check\": {\"rows\": [[\"2\"]]}}", "SELECT 2", "other rows"},
        {"{\"check\": {\"rows\": []}}", "SELECT * FROM t WHERE id > 3", NULL},
        {"{\"check\": {\"rows\": [[true]]}}", "SELECT 1 = 1", NULL},
        {"{}", "", "no query"},
        {"{}", "-- nothing", "no query"},
        {"{}", "It is 3.", "syntax error"},
        {"{}", "SELECT 1; SELECT 2", "more than one"},
        {"{}", "SELECT 1; -- a\n ; /* b */", NULL},
        {"{}", "\xff\xfe", "syntax error"},
        {"{}", "SELECT '\xff'", NULL},
        /* everything but reading */
        {"{}", "ATTACH '/tmp/shoal-test-attached.db' AS x", "not authorized"},
        {"{}", "PRAGMA user_version", "not authorized"},
        {"{}", "PRAGMA query_only = OFF", "not authorized"},
        {"{}", "INSERT INTO t VALUES(4, 'b', 1)", "not authorized"},
        {"{}", "INSERT INTO t VALUES(4, 'b', 1) RETURNING id", "not authorized"},
        {"{}", "DELETE FROM t", "not authorized"},
        {"{}", "DROP TABLE t", "not authorized"},
        {"{}", "CREATE TEMP TABLE u AS SELECT 1", "not authorized"},
        {"{}", "VACUUM INTO '/tmp/shoal-test-vacuum.db'", ""},
        {"{}", "BEGIN", "not authorized"},
        {"{}", "EXPLAIN SELECT 1", "not a query"},
        {"{}", "SELECT load_extension('/tmp/x.so')", "not authorized"},
        {"{}", "SELECT * FROM pragma_database_list", "not authorized"},
        {"{}", "SELECT writefile('/tmp/x', 'y')", "no such function"},
        {"{}", "SELECT * FROM other.t", "no such table"},
        /* limits */
        {"{}",
         "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT max(i) "
         "FROM r",
         "too many steps"},
        {"{}", "SELECT count(*) FROM n a, n b, n c", "too many steps"},
        {"{}", "SELECT i FROM n", "more than 10000 rows"},
        {"{}", "SELECT hex(zeroblob(100000)) FROM n", "or 16 MB"},
        {"{}", "SELECT hex(zeroblob(1000000000))", "too big"},
        {"{}", "SELECT length(group_concat(hex(zeroblob(1000)))) FROM n", "too big"},
        {"{}", "SELECT count(*) FROM (SELECT i, hex(zeroblob(100000 + i)) x FROM n ORDER BY x)",
         ""},
        {"{}",
         "WITH x(y) AS MATERIALIZED (SELECT hex(zeroblob(1500)) FROM n a, n b) "
         "SELECT max(y) FROM x",
         "memory"},
        {"{}", "SELECT id FROM t WHERE id = 1", NULL},
    };
    char *path = database_make(), *spec = xasprintf("sql:%s", path);
    char hash[HASH_LEN], after[HASH_LEN];
    assert_int_equal(sha256_file(path, hash, &err), OK);
    struct check *c = open_check(spec);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        if (cases[i].why)
            assert_fails(c, cases[i].item, cases[i].text, cases[i].why);
        else
            assert_passes(c, cases[i].item, cases[i].text);
    assert_refused(c, "{\"check\": {\"rows\": 3}}", "'check.rows'");
    assert_refused(c, "{\"check\": {\"rows\": [3]}}", "'check.rows'");
    assert_refused(c, "{\"check\": {\"rows\": [[[]]]}}", "'check.rows'");
    static const char *const parts[] = {"(", "SELECT 1 UNION ", "1+", "a"};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        char *text = repeat(parts[i], 1 << 20);
        assert_fails(c, "{}", text, "");
        free(text);
    }
    check_free(c);
    assert_int_equal(sha256_file(path, after, &err), OK);
    assert_string_equal(hash, after);
    assert_false(path_exists("/tmp/shoal-test-attached.db"));
    assert_false(path_exists("/tmp/shoal-test-vacuum.db"));
    free(path);
    free(spec);
}

/* question */

struct script {
    const char *const *replies;
    struct strings asked;
    int code;
};

static int scripted_answer(void *ctx, const char *const *questions, int n, char **answers,
                           struct error *e) {
    struct script *s = ctx;
    if (s->code) return error_set(e, s->code, "the engine is gone");
    for (int i = 0; i < n; i++) {
        strings_add(&s->asked, questions[i]);
        answers[i] = xstrdup(s->replies[i]);
    }
    return OK;
}

static void test_question(void **state) {
    (void)state;
    static const char *const replies[] = {"The number is 7.", "8", "PARIS.", "London", "3"};
    struct script s = {.replies = replies};
    const struct check_model model = {&s, scripted_answer};
    struct check *c = open_with("question", &(struct check_options){.model = &model});
    assert_false(check_needs_gold(c));
    json_t *number = json_from("{\"check\": {\"question\": \"What is {{ answer }} + 4?\", "
                               "\"answer\": 7}}"),
           *capital = json_from("{\"check\": {\"question\": \"The capital of {{ answer }}?\", "
                                "\"answer\": \"Paris\"}}"),
           *inverse = json_from("{\"check\": {\"question\": \"7 - {{ 4 }}\", \"answer\": "
                                "\"{{ answer }}\"}}"),
           *wrong = json_from("{\"check\": {\"question\": \"{{ nothing }}\", \"answer\": \"a\"}}"),
           *looping = json_from("{\"check\": {\"question\": \"{% for i in range(99999) %}{% for j "
                                "in range(99999) %}{{ answer }}{% endfor %}{% endfor %}\", "
                                "\"answer\": \"a\"}}");
    struct check_case k[] = {
        {.item = number, .text = "so answer: 3"},
        {.item = number, .text = "4"},
        {.item = wrong, .text = "a"},
        {.item = capital, .text = "France"},
        {.item = looping, .text = "a"},
        {.item = capital, .text = "\xff"},
        {.item = number, .text = " "},
        {.item = inverse, .text = "3"},
    };
    static const bool passed[] = {true, false, false, true, false, false, false, true};
    static const char *const reasons[] = {NULL,
                                          "answers '8' and not '7'",
                                          "nothing",
                                          NULL,
                                          "its question: ",
                                          "answers 'London'",
                                          "has no answer",
                                          NULL};
    for (size_t i = 0; i < ARRAY_LEN(k); i++) {
        if (check_item(c, k[i].item, &err) != OK) fail_msg("%s", err.text);
    }
    assert_int_equal(check_run(c, k, ARRAY_LEN(k), &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(k); i++) {
        assert_int_equal(k[i].passed, passed[i]);
        if (!passed[i] && !strstr(k[i].reason, reasons[i])) fail_msg("%zu: %s", i, k[i].reason);
    }
    assert_int_equal(s.asked.n, 5);
    assert_string_equal(s.asked.v[0], "What is 3 + 4?");
    assert_string_equal(s.asked.v[2], "The capital of france?");
    assert_string_equal(s.asked.v[3], "The capital of \uFFFD?");
    assert_int_equal(check_cost(c).questions, 5);
    s.code = ERR_STATE; // the model itself fails
    assert_int_equal(check_run(c, k, 1, &err), ERR_STATE);
    assert_non_null(strstr(err.text, "the engine is gone"));
    assert_refused(c, "{}", "'check.question' is missing");
    assert_refused(c, "{\"check\": {\"question\": \"a\"}}", "'check.answer' is missing");
    assert_refused(c, "{\"check\": {\"question\": \"{{\", \"answer\": 1}}", "'check.question'");
    strings_release(&s.asked);
    json_decref(number);
    json_decref(capital);
    json_decref(inverse);
    json_decref(wrong);
    json_decref(looping);
    check_free(c);
}

/* commands */

/* The error of a command on two texts, or "". */
static const char *command_error(const char *spec, double timeout, bool sandbox) {
    struct check_options o = {.label = "reward", .timeout = timeout, .sandbox = sandbox};
    struct check *c = check_open(spec, &o, &err);
    json_t *item = json_object();
    struct check_case k[2] = {{.item = item, .text = "a"}, {.item = item, .text = "b"}};
    int rc = c ? check_run(c, k, 2, &err) : err.code;
    if (c) assert_int_equal(check_cost(c).checked, rc ? 0 : 2);
    json_decref(item);
    check_free(c);
    return rc ? err.text : "";
}

static void check_commands(bool sandbox) {
    static const struct {
        const char *spec, *why;
        double timeout;
    } cases[] = {
        {"shell:echo 1", "line 2 of its 2 is '", 10},
        {"shell:echo 1; echo nan", "expected a number", 10},
        {"shell:echo 1; echo 2; echo 3", "more than 2 numbers", 10},
        {"shell:exit 3", "failed with status 3", 10},
        {"shell:yes 1", "prints more than its numbers", 10},
        {"command:sleep 100", "did not end in time", 0.2},
        {"command:true", "reward command '", 10},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *why = command_error(cases[i].spec, cases[i].timeout, sandbox);
        if (!strstr(why, cases[i].why)) fail_msg("%s: '%s'", cases[i].spec, why);
    }
    struct check *c = open_with("shell:sed -e 's/.*\"completion\":\"1\".*/1/' -e t -e "
                                "'s/.*\"completion\":null.*/0.5/' -e t -e 's/.*/-2/'",
                                &(struct check_options){.sandbox = sandbox});
    struct check_case k = run_text(c, "{}", "1");
    assert_true(k.score == 1 && k.passed);
    k = run_text(c, "{}", "2");
    assert_true(k.score == -2 && !k.passed);
    k = run_text(c, "{}", "\xff");
    assert_true(k.score == 0.5 && k.passed);
    char *large = repeat("2", 1 << 20);
    assert_fails(c, "{}", large, "below 0.5");
    free(large);
    check_free(c);
}

static void test_commands(void **state) {
    (void)state;
    check_commands(false);
    if (have_sandbox()) check_commands(true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_specs),
        cmocka_unit_test(test_cost_and_confusion),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_regex),
        cmocka_unit_test(test_json_schema),
        cmocka_unit_test(test_equations),
        cmocka_unit_test(test_arithmetic_questions),
        cmocka_unit_test(test_calculator_is_linear),
        cmocka_unit_test(test_python),
        cmocka_unit_test(test_sql),
        cmocka_unit_test(test_question),
        cmocka_unit_test(test_commands),
        cmocka_unit_test(test_python_without_end),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
