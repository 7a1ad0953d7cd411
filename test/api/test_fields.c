/*
 * test_fields: the table of request fields is consistent, its rows decide as described, and
 * docs/API.md lists it between its marks; `build/test_fields --write` writes that list again.
 */
/* levels: once */
#define _GNU_SOURCE
#include "serve/request_fields.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char DOCS[] = "docs/API.md", BEGIN[] = "<!-- fields -->\n",
                  END[] = "<!-- end of fields -->\n";
static const int routes[] = {FIELD_CHAT, FIELD_COMPLETION, FIELD_EMBEDDING};

static int verdict(int route, const char *text, struct error *err) {
    json_t *body = json_loads(text, 0, NULL);
    assert_non_null(body);
    *err = (struct error){0};
    int rc = request_fields_check((enum field_route)route, body, err);
    json_decref(body);
    return rc;
}

static void test_table(void **state) {
    (void)state;
    for (const struct request_field *f = request_fields; f->name; f++) {
        assert_true(f->routes != 0);
        assert_int_equal(f->support == FIELD_REJECTED, f->reason != NULL);
        assert_int_equal(f->support == FIELD_REJECTED, f->neutral_values != NULL);
        for (const struct request_field *o = f + 1; o->name; o++)
            if (strcmp(f->name, o->name) == 0 && (f->routes & o->routes))
                fail_msg("'%s' is there twice for a route", f->name);
    }
}

/* Each row: null and its neutral values are accepted, another value of a rejected field is not. */
static void test_rows(void **state) {
    struct error err;
    (void)state;
    for (const struct request_field *f = request_fields; f->name; f++)
        for (size_t r = 0; r < ARRAY_LEN(routes); r++) {
            if (!(f->routes & routes[r])) continue;
            char *text = xasprintf("{\"%s\": \"something\"}", f->name);
            int rc = verdict(routes[r], text, &err);
            assert_int_equal(rc, f->support == FIELD_REJECTED ? ERR_USAGE : OK);
            if (rc != OK) assert_non_null(strstr(err.text, f->name));
            free(text);
            json_t *list = json_loads(f->neutral_values ? f->neutral_values : "[]", 0, NULL), *v;
            size_t i;
            json_array_append_new(list, json_null());
            json_array_foreach (list, i, v) {
                json_t *body = json_pack("{s:O}", f->name, v);
                assert_int_equal(request_fields_check((enum field_route)routes[r], body, &err), OK);
                json_decref(body);
            }
            json_decref(list);
        }
}

static void test_cases(void **state) {
    static const struct {
        int route;
        const char *body, *says; /* NULL: it passes */
    } cases[] = {
        {FIELD_CHAT, "{\"messages\": [], \"store\": true, \"metadata\": {\"a\": \"b\"}}", NULL},
        {FIELD_CHAT, "{\"temprature\": 1}", "did you mean 'temperature'"},
        {FIELD_CHAT, "{\"zzzzzzzzzzzz\": 1}", "'zzzzzzzzzzzz' is not a field"},
        {FIELD_CHAT, "{\"zzzzzzzzzzzz\": null}", NULL},
        {FIELD_CHAT, "{\"prompt\": \"x\"}", "'prompt' is not a field"},
        {FIELD_CHAT, "{\"length_penalty\": 1.0}", NULL},
        {FIELD_CHAT, "{\"length_penalty\": 1.1}", "beam search"},
        {FIELD_CHAT, "{\"functions\": [{\"name\": \"f\"}]}", "'tools'"},
        {FIELD_CHAT, "{\"modalities\": [\"text\", \"audio\"]}", "text only"},
        {FIELD_CHAT, "{\"modalities\": [\"text\"]}", NULL},
        {FIELD_COMPLETION, "{\"messages\": []}", "'messages' is not a field"},
        {FIELD_EMBEDDING, "{\"input\": \"x\", \"user\": \"u\"}", NULL},
        {FIELD_EMBEDDING, "{\"input\": \"x\", \"temperature\": 1}", "'temperature' is not a field"},
        {FIELD_CHAT, "[]", NULL}, // not an object: the reader of the body reports it
    };
    struct error err;
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int rc = verdict(cases[i].route, cases[i].body, &err);
        if ((rc == OK) != !cases[i].says || (cases[i].says && !strstr(err.text, cases[i].says)))
            fail_msg("%s: %d %s", cases[i].body, rc, err.text);
    }
}

/* The fields of other APIs, by path. */
static void test_body_fields(void **state) {
    static const struct {
        const char *path, *body, *says; /* NULL: it passes */
    } cases[] = {
        {"/v1/ask", "{\"question\": \"x\", \"agents\": 3}", NULL},
        {"/v1/ask", "{\"question\": \"x\", \"knowledge\": \"k\"}", "'knowledge' is not a field"},
        {"/v1/ask", "{\"question\": \"x\", \"knowledge\": null}", NULL},
        {"/v1/ask", "{\"queston\": \"x\"}", "did you mean 'question'"},
        {"/v1/askew", "{\"knowledge\": \"k\"}", NULL}, // no path of the table
        {"/completions", "{\"id_slot\": 1, \"cache_prompt\": true}", NULL},
        {"/completions", "{\"id_slo\": 1}", "'id_slo' is not a field"},
        {"/v1/adapters/a/rollback", "{\"t\": 1}", "'t' is not a field"},
        {"/lora-adapters", "[]", NULL},
    };
    struct error err;
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        json_t *body = json_loads(cases[i].body, 0, NULL);
        int rc = body_fields_check(cases[i].path, body, &err);
        if ((rc == OK) != !cases[i].says || (cases[i].says && !strstr(err.text, cases[i].says)))
            fail_msg("%s %s: %d %s", cases[i].path, cases[i].body, rc, err.text);
        json_decref(body);
    }
    assert_true(request_field_is_known("messages[0].content"));
    assert_true(request_field_is_known("question"));
    assert_true(request_field_is_known("weights"));
    assert_false(request_field_is_known("weight"));
    assert_false(request_field_is_known(""));
}

/* Texts that no request may have, where JSON ends early, and nesting. */
static void test_texts(void **state) {
    static const struct {
        const char *text, *says; /* NULL: no finding */
    } cases[] = {
        {"{\"a\": [1, {\"b\": \"\\u0000\"}]}", "'a[1].b' contains the character U+0000"},
        {"{\"a\": 1.5e3, \"b\": null, \"c\": \"\\ud800\"}", "'c' contains half"},
        {"{\"a\": {\"b\": [[]], \"c\": {}}, \"d\": \"\xff\"}", "'d' is not UTF-8"},
        {"{\"a\": {\"b\\u0000\": 1}}", "'a' has a name that contains the character U+0000"},
        {"{\"\\udc00\": 1}", "the body has a name that contains half"},
        {"[\"x\", \"\\u0000\"]", "'[1]' contains"},
        {"\"\\u0000\"", "the body contains"},
        {"{\"a\": \"\\ud83d\\ude00 \\\\u0000 \\\"\\u00e9\"}", NULL},
        {"{\"a\": \"\\u00", NULL},
        {"{\"a\": \"\\ud83d\\u", "'a' contains half"},
        {"{\"a\"", NULL},
        {"{\"a\": [1,", NULL},
        {"{\"a\" 1, \"b\": \"\\u0000\"}", NULL},
        {"", NULL},
        {"\\", NULL},
        {"\"\\", NULL},
    };
    struct error err;
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        size_t n = strlen(cases[i].text);
        char *exact = malloc(n + !n); // so that a sanitizer finds a read past its end
        memcpy(exact, cases[i].text, n);
        err.text[0] = 0;
        int rc = request_text_check(exact, n, &err);
        if ((rc == OK) != !cases[i].says || (cases[i].says && !strstr(err.text, cases[i].says)))
            fail_msg("%s: %d %s", cases[i].text, rc, err.text);
        free(exact);
    }
    struct buf deep = {0};
    for (int i = 0; i < 100000; i++) buf_puts(&deep, "[");
    buf_puts(&deep, "\"\\u0000\"");
    assert_int_equal(request_text_check(deep.data, deep.len, &err), OK);
    buf_release(&deep);
}

static void test_members(void **state) {
    static const struct {
        const char *text, *value; /* value: the member "model"; NULL: not found */
    } cases[] = {
        {"{\"model\": \"a\"}", "\"a\""},
        {" { \"messages\" : [{\"model\": \"x\"}, 1], \"model\" : \"\\u00e9 \\\"\" , \"n\": 1}",
         "\"\\u00e9 \\\"\""},
        {"{\"n\": -1.5e3, \"stop\": null, \"model\": [1, {\"a\": 2}]}", "[1, {\"a\": 2}]"},
        {"{\"model\": 12}", "12"},
        {"{\"model\": \"a\", \"n\": ", "\"a\""},
        {"{\"models\": \"a\", \"mode\": \"b\", \"\": \"model\"}", NULL},
        {"[\"model\", \"a\"]", NULL},
        {"{\"model\": \"a", NULL},
        {"{\"model\"", NULL},
        {"{\"n\": [1, \"model\": \"a\"}", NULL},
        {"{\"n\" 1, \"model\": \"a\"}", NULL},
        {"{}", NULL},
        {"{", NULL},
        {"", NULL},
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        size_t n = strlen(cases[i].text), len = 0;
        char *exact = malloc(n + !n); // so that a sanitizer finds a read past its end
        memcpy(exact, cases[i].text, n);
        const char *found = request_text_member(exact, n, "model", &len), *want = cases[i].value;
        if (!found != !want || (want && (len != strlen(want) || memcmp(found, want, len) != 0)))
            fail_msg("%s: '%.*s'", cases[i].text, found ? (int)len : 0, found ? found : "");
        free(exact);
    }
}

/* The page before the list, and from its end on. */
static void docs_split(struct buf *page, size_t *from, size_t *to) {
    struct error err;
    if (file_read(DOCS, 1 << 24, page, &err) != OK) fail_msg("%s", err.text);
    const char *begin = strstr(page->data, BEGIN), *end = strstr(page->data, END);
    assert_true(begin && end && begin < end);
    *from = (size_t)(begin - page->data) + strlen(BEGIN);
    *to = (size_t)(end - page->data);
}

static void test_docs(void **state) {
    struct buf page = {0}, list = {0};
    size_t from, to;
    (void)state;
    docs_split(&page, &from, &to);
    request_fields_markdown(&list);
    if (list.len != to - from || memcmp(list.data, page.data + from, list.len) != 0)
        fail_msg("%s does not list the fields as they are: build/test_fields --write", DOCS);
    buf_release(&page);
    buf_release(&list);
}

static int docs_write(void) {
    struct buf page = {0}, out = {0};
    size_t from, to;
    docs_split(&page, &from, &to);
    buf_add(&out, page.data, from);
    request_fields_markdown(&out);
    buf_puts(&out, page.data + to);
    FILE *f = fopen(DOCS, "w");
    bool fine = f && fwrite(out.data, 1, out.len, f) == out.len;
    fine = f && fclose(f) == 0 && fine;
    buf_release(&page);
    buf_release(&out);
    return fine ? 0 : 1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table), cmocka_unit_test(test_rows),
        cmocka_unit_test(test_cases), cmocka_unit_test(test_body_fields),
        cmocka_unit_test(test_texts), cmocka_unit_test(test_members),
        cmocka_unit_test(test_docs),
    };
    if (argc > 1 && strcmp(argv[1], "--write") == 0) return docs_write();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
