/*
 * Chat templates against Jinja2 itself: tables of cases whose results Jinja wrote, random templates
 * and the templates beside the checkout rendered by both; then limits, damage, and whose words are
 * whose.
 *
 * Tables are in test/golden/jinja, the oracle is test/oracle/jinja_oracle.py; without Python's
 * jinja2 the parts that run it skip.
 */
#include "model/jinja.h"
#include "fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

#define ORACLE "test/oracle/jinja_oracle.py"
#define GOLDEN "test/golden/jinja/"

/* The Python that has jinja2, or NULL. */
static const char *python(void) {
    static const char *const names[] = {"python3", "/usr/bin/python3"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char command[128];
        snprintf(command, sizeof command, "%s -c 'import jinja2' 2>/dev/null", names[i]);
        if (system(command) == 0) return names[i];
    }
    fprintf(stderr, "SKIP: no python3-jinja2, Jinja itself is not asked\n");
    return NULL;
}

/* What a command prints. */
static struct buf output_of(const char *command) {
    struct buf b = {0};
    char part[4096];
    FILE *f = popen(command, "r");
    assert_non_null(f);
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) buf_add(&b, part, n);
    if (pclose(f) != 0) fail_msg("'%s' failed", command);
    buf_puts(&b, "");
    return b;
}

struct rendered {
    bool ok;
    struct jinja_output out;
    struct error err;
};

static struct rendered render(const char *text, size_t len, const json_t *vars,
                              const json_t *trusted, int64_t now) {
    struct rendered r = {.ok = false};
    struct jinja *j = jinja_parse(text, len, &r.err);
    struct jinja_input in = {.vars = vars, .trusted = trusted, .now = now};
    r.ok = j && jinja_render(j, &in, &r.out, &r.err) == OK;
    jinja_free(j);
    return r;
}

/* random templates */

/* What Jinja can do and we refuse says so, or "is not allowed", or "can only be printed". */
static bool refused(const struct rendered *r) {
    return !r->ok && (strstr(r->err.text, "cannot be sliced") || strstr(r->err.text, "not supported") || strstr(r->err.text, "is not allowed") ||
                      strstr(r->err.text, "can only be printed"));
}

static int differs(const char *template, const json_t *got, const struct rendered *r) {
    const char *want = json_string_value(json_object_get(got, "text"));
    const char *error = json_string_value(json_object_get(got, "error"));
    if (refused(r) || (!want && !r->ok) || (want && r->ok && strcmp(want, r->out.text) == 0)) return 0;
    fprintf(stderr, "%s\n  Jinja: %s\n  Shoal: %s\n", template, want ? want : error,
            r->ok ? r->out.text : r->err.text);
    return 1;
}

static void test_random(void **state) {
    (void)state;
    const char *py = python(), *seed = getenv("SHOAL_JINJA_SEED"), *n = getenv("SHOAL_JINJA_N");
    if (!py) skip();
    char command[256];
    snprintf(command, sizeof command, "%s " ORACLE " random %s %s", py, seed ? seed : "1",
             n ? n : "1500");
    struct buf b = output_of(command);
    struct error err;
    json_t *vars = json_file(GOLDEN "random.json", &err);
    int bad = 0, same = 0, unsupported = 0, count = 0;
    assert_non_null(vars);
    for (char *line = strtok(b.data, "\n"); line; line = strtok(NULL, "\n")) {
        json_t *got = json_parse(line, strlen(line), "oracle", &err);
        if (!got) fail_msg("%s", err.text);
        const json_t *t = json_object_get(got, "template");
        struct rendered r = render(json_string_value(t), json_string_length(t), vars, NULL, -1);
        bad += differs(json_string_value(t), got, &r);
        same += r.ok;
        unsupported += refused(&r) && json_object_get(got, "text");
        count++;
        jinja_output_release(&r.out);
        json_decref(got);
    }
    fprintf(stderr, "%d random templates: %d texts, %d refused, %d differ\n", count, same,
            unsupported, bad);
    assert_int_equal(bad, 0);
    assert_true(same > count / 4 && unsupported < count / 20);
    json_decref(vars);
    buf_release(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
