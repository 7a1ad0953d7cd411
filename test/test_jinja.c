/*
 * Chat templates against Jinja2 itself: tables of cases whose results Jinja wrote, random templates
 * and the templates beside the checkout rendered by both; then limits, damage, and whose words are
 * whose.
 *
 * Tables are in test/golden/jinja, the oracle is test/oracle/jinja_oracle.py; without Python's
 * jinja2 the parts that run it skip.
 */
#include "model/jinja.h"
#include "model/model.h"
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
    return !r->ok && r->err.code == ERR_FORMAT && (strstr(r->err.text, "cannot be sliced") || strstr(r->err.text, "not supported") || strstr(r->err.text, "is not allowed") ||
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
    assert_true(same > count / 4 && unsupported <= count / 20);
    json_decref(vars);
    buf_release(&b);
}

/* tables */

/* 1 when the case fails, which is shown: all failures of a table at once. */
static int case_check(const char *where, const char *template, size_t len, const char *context,
                      const char *want, bool trimmed) {
    struct error err;
    json_t *vars = json_parse(context, strlen(context), where, &err);
    if (!vars) fail_msg("%s", err.text);
    struct rendered r = render(template, len, vars, NULL, -1);
    bool fails = want[0] == '!' || want[0] == '?', right;
    size_t n = r.out.n;
    while (trimmed && n > 0 && r.out.text[n - 1] == '\n') n--;
    if (fails)
        right = !r.ok && strstr(r.err.text, want + 2);
    else
        right = r.ok && n == strlen(want) && memcmp(r.out.text, want, n) == 0;
    if (!right)
        fprintf(stderr, "%s: '%s' gives\n%s\nexpected\n%s\n", where, template,
                r.ok ? r.out.text : r.err.text, want);
    jinja_output_release(&r.out);
    json_decref(vars);
    return !right;
}

static struct buf golden(const char *name) {
    struct buf b = {0};
    struct error err;
    char *path = path_join(GOLDEN, name);
    if (file_read(path, 1 << 22, &b, &err) != OK) fail_msg("%s", err.text);
    free(path);
    return b;
}

static void test_lines(void **state) {
    (void)state;
    struct buf b = golden("expressions.lines");
    const char *context = "{}";
    char where[64];
    int line = 0, n = 0, bad = 0;
    for (char *p = b.data, *next; p; p = next) {
        if ((next = strchr(p, '\n'))) *next++ = 0;
        snprintf(where, sizeof where, "expressions.lines:%d", ++line);
        char *want = NULL;
        for (char *q = strstr(p, " => "); q; q = strstr(q + 1, " => ")) want = q;
        if (strncmp(p, "context: ", 9) == 0) context = p + 9;
        if (!want || *p == '#') continue;
        *want = 0;
        want += 4;
        struct error err;
        json_t *text = *want == '"' ? json_parse(want, strlen(want), where, &err) : NULL;
        if (*want == '"' && !text) fail_msg("%s", err.text);
        bad += case_check(where, p, strlen(p), context, text ? json_string_value(text) : want, false);
        json_decref(text);
        n++;
    }
    assert_int_equal(bad, 0);
    assert_true(n > 100);
    buf_release(&b);
}

static void test_blocks(void **state) {
    (void)state;
    struct buf b = golden("templates.blocks");
    int n = 0, bad = 0;
    for (char *p = strstr(b.data, "\n== "), *next; p; p = next, n++) {
        char *template = strchr(p + 1, '\n') + 1;
        if ((next = strstr(template, "\n== "))) *next = 0;
        char *context = strstr(template, "\n-- "), *want = context ? strchr(context + 1, '\n') : NULL;
        if (!want) fail_msg("'%s' has no result", p);
        template[-1] = *context = *want++ = 0;
        for (size_t end = strlen(want); end > 0 && want[end - 1] == '\n';) want[--end] = 0;
        bad += case_check(p + 4, template, strlen(template), context + 4, want, true);
    }
    assert_int_equal(bad, 0);
    assert_true(n > 25);
    buf_release(&b);
}

/* The tables' results are Jinja's, not ours. */
static void test_tables_are_jinjas(void **state) {
    (void)state;
    const char *py = python();
    if (!py) skip();
    char command[256];
    snprintf(command, sizeof command, "%s " ORACLE " check %s %s", py, GOLDEN "expressions.lines",
             GOLDEN "templates.blocks");
    struct buf b = output_of(command);
    assert_string_equal(b.data, "");
    buf_release(&b);
}

/* the templates beside the checkout */

static const char *const published[] = {
    "HuggingFaceTB-SmolLM3-3B.jinja", "Qwen-Qwen2.5-7B-Instruct.jinja", "Qwen-Qwen3-0.6B.jinja",
    "google-gemma-2-2b-it.jinja", "meta-llama-Llama-3.2-3B-Instruct.jinja",
};

static struct buf published_template(const char *name) {
    char *path = xasprintf("data/chat-templates/%s", name), *full = fixture_shared(path);
    struct buf b = {0};
    struct error err;
    if (full && file_read(full, 1 << 20, &b, &err) != OK) fail_msg("%s", err.text);
    free(path);
    free(full);
    return b;
}

static json_t *conversation_vars(const json_t *c, bool prompt) {
    json_t *vars = json_pack("{s:n,s:n}", "tools", "documents"), *extra = json_object_get(c, "extra");
    if (extra) json_object_update(vars, extra);
    json_object_set(vars, "messages", json_object_get(c, "messages"));
    if (json_object_get(c, "tools")) json_object_set(vars, "tools", json_object_get(c, "tools"));
    json_object_set_new(vars, "add_generation_prompt", json_boolean(prompt));
    return vars;
}

/* The line that the oracle prints for this rendering. */
static char *hash_line(const char *name, const struct buf *template, const json_t *c, bool prompt) {
    json_t *vars = conversation_vars(c, prompt), *now = json_object_get(c, "now"),
           *trusted = json_pack("{s:s,s:s}", "bos_token", "<s>", "eos_token", "</s>");
    struct rendered r = render(template->data, template->len, vars, trusted,
                               now ? (int64_t)json_integer_value(now) : -1);
    char hash[HASH_LEN] = "error";
    const char *title = json_string_value(json_object_get(c, "name"));
    if (r.ok) hash_bytes(r.out.text, r.out.n, hash);
    if (refused(&r)) fail_msg("%s, %s: %s", name, title, r.err.text);
    jinja_output_release(&r.out);
    json_decref(vars);
    json_decref(trusted);
    return xasprintf("%s %s %d %s\n", name, title, prompt, hash);
}

static json_t *conversations(void) {
    struct error err;
    json_t *list = json_file(GOLDEN "conversations.json", &err);
    if (!list) fail_msg("%s", err.text);
    return list;
}

/* Every template with every conversation, as Jinja renders it: hashes, since the texts hold the
 * templates' own. */
static void test_published(void **state) {
    (void)state;
    json_t *list = conversations();
    struct buf want = golden("published.txt"), got = {0};
    for (size_t i = 0; i < ARRAY_LEN(published); i++) {
        struct buf template = published_template(published[i]);
        if (!template.data) skip();
        for (size_t k = 0; k < json_array_size(list); k++) {
            for (int prompt = 0; prompt < 2; prompt++) {
                char *line = hash_line(published[i], &template, json_array_get(list, k), prompt);
                if (!strstr(want.data, line)) fail_msg("Jinja differs: %s", line);
                buf_puts(&got, line);
                free(line);
            }
        }
        buf_release(&template);
    }
    assert_string_equal(got.data, want.data);
    const char *py = python();
    char *folder = fixture_shared("data/chat-templates");
    if (py && folder) {
        char *command =
            xasprintf("%s " ORACLE " shared %s " GOLDEN "conversations.json", py, folder);
        struct buf now = output_of(command);
        assert_string_equal(now.data, want.data);
        buf_release(&now);
        free(command);
    }
    free(folder);
    buf_release(&got);
    buf_release(&want);
    json_decref(list);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_tables_are_jinjas),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
