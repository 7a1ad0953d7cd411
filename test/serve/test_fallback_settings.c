/*
 * test_fallback_settings: files of fallback chains: the three kinds of links, defaults, names,
 * limits, and refused files (test/cases/fallback-refused.txt).
 */
/* levels: once */
#define _GNU_SOURCE
#include "serve/fallback.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

static struct fallback_settings settings_of(const char *text) {
    struct fallback_settings s;
    if (fallback_settings_parse(&s, text, strlen(text), "c.yaml", &err) != OK)
        fail_msg("%s", err.text);
    return s;
}

static void test_whole_file(void **state) {
    (void)state;
    struct fallback_settings s = settings_of("timeout: 90\n"
                                             "links:\n"
                                             "  - model: support\n"
                                             "    timeout: 2.5\n"
                                             "  - name: cloud\n"
                                             "    model: big/model\n"
                                             "    url: https://api.example.com/v1\n"
                                             "    api_key_env: CLOUD_KEY\n"
                                             "    failure_threshold: 7\n"
                                             "    cooldown: 12\n"
                                             "  - reply: ごめんなさい。\n");
    assert_true(s.timeout == 90);
    assert_int_equal(s.n, 3);
    const struct fallback_link_settings *local = &s.links[0], *remote = &s.links[1],
                                        *fixed = &s.links[2];
    assert_string_equal(local->name, "support");
    assert_string_equal(local->model, "support");
    assert_true(local->timeout == 2.5 && !local->url && !local->reply);
    assert_string_equal(remote->name, "cloud");
    assert_string_equal(remote->model, "big/model");
    assert_string_equal(remote->url, "https://api.example.com/v1");
    assert_string_equal(remote->api_key_env, "CLOUD_KEY");
    assert_true(remote->failure_threshold == 7 && remote->cooldown == 12);
    assert_string_equal(fixed->name, "reply");
    assert_string_equal(fixed->reply, "ごめんなさい。");
    fallback_settings_release(&s);
    fallback_settings_release(&s); // harmless
}

static void test_defaults(void **state) {
    (void)state;
    struct fallback_settings s = settings_of("links: [{model: a}]\n");
    assert_true(s.timeout == 300);
    assert_true(s.links->timeout == 300 && s.links->cooldown == 30);
    assert_int_equal(s.links->failure_threshold, 3);
    fallback_settings_release(&s);
    s = settings_of("timeout: 7\nlinks: [{model: a}, {model: b, url: 'http://localhost'}]\n");
    assert_true(s.links[0].timeout == 7 && s.links[1].timeout == 60);
    fallback_settings_release(&s);
}

static void refused(const char *text, const char *part) {
    struct fallback_settings s;
    if (fallback_settings_parse(&s, text, strlen(text), "c.yaml", &err) == OK)
        fail_msg("accepted:\n%s", text);
    if (!strstr(err.text, part)) fail_msg("refused with '%s', not '%s'", err.text, part);
    assert_int_equal(s.n, 0);
}

/* Keys, types and ranges are those of the option rows. */
static void test_keys_and_ranges(void **state) {
    (void)state;
    refused("links: [{model: a}]\nbudget: 3\n", "line 2");
    refused("links:\n  - model: a\n    key: secret\n", "line 3");
    refused("timeout: 0\nlinks: [{model: a}]\n", "line 1");
    refused("links:\n  - model: a\n    timeout: -1\n", "line 3");
    refused("links:\n  - model: a\n    timeout: soon\n", "line 3");
    refused("links:\n  - model: a\n    failure_threshold: 0\n", "line 3");
    refused("links:\n  - model: a\n    failure_threshold: 1.5\n", "line 3");
    refused("links:\n  - model: a\n    cooldown: -1\n", "line 3");
    refused("links: [{model: &a x}]\n", "c.yaml");
}

static void test_limit_of_a_reply(void **state) {
    (void)state;
    char *text = xasprintf("links: [{reply: %0*d}]\n", FALLBACK_MAX_REPLY, 7);
    struct fallback_settings s;
    /* a number is not a text */
    assert_int_not_equal(fallback_settings_parse(&s, text, strlen(text), "c.yaml", &err), OK);
    free(text);
    text = xasprintf("links: [{reply: 'x%0*d'}]\n", FALLBACK_MAX_REPLY - 1, 7);
    s = settings_of(text);
    assert_int_equal(strlen(s.links->reply), FALLBACK_MAX_REPLY);
    fallback_settings_release(&s);
    free(text);
    text = xasprintf("links: [{reply: 'x%0*d'}]\n", FALLBACK_MAX_REPLY, 7);
    refused(text, "'reply' must have");
    free(text);
}

static void test_refused(void **state) {
    (void)state;
    struct buf file = {0};
    int n = 0;
    if (file_read("test/cases/fallback-refused.txt", 1 << 20, &file, &err) != OK)
        fail_msg("%s", err.text);
    for (char *at = file.data, *want; (want = strstr(at, "\n=> ")); n++) {
        struct fallback_settings s;
        at += strspn(at, "\n");
        char *end = strchr(want + 4, '\n');
        want[1] = *end = 0;
        if (fallback_settings_parse(&s, at, strlen(at), "c.yaml", &err) == OK)
            fail_msg("accepted:\n%s", at);
        if (strcmp(err.text, want + 4) != 0)
            fail_msg("refused with\n%s\nnot with\n%s\n:\n%s", err.text, want + 4, at);
        at = end + 1;
    }
    assert_true(n >= 18);
    buf_release(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_file),      cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_keys_and_ranges), cmocka_unit_test(test_limit_of_a_reply),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
