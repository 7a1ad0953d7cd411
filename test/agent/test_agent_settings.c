/*
 * test_agent_settings: agent files: keys and their defaults, lists, paths relative to the file,
 * refused files, and what settings decide of a run.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char folder[] = "/tmp/shoal-test-settings-XXXXXX";
static char *file;

/* Reads an agent file with this text. */
static int settings_of(const char *text, struct agent_settings *s) {
    assert_int_equal(file_write(file, text, strlen(text), &err), OK);
    return agent_settings_read(s, file, &err);
}

static void path_is(const char *path, const char *name) {
    char *want = path_join(folder, name);
    assert_string_equal(path, want);
    free(want);
}

static void test_defaults(void **state) {
    (void)state;
    struct agent_settings s, defaults;
    options_default(agent_setting_rows, &defaults);
    for (int i = 0; i < 2; i++) { // an empty file, and one with a comment only
        assert_int_equal(settings_of(i ? "# nothing\n" : "", &s), OK);
        json_t *got = options_json(agent_setting_rows, &s),
               *want = options_json(agent_setting_rows, &defaults);
        assert_true(json_equal(got, want));
        json_decref(got);
        json_decref(want);
        options_release(agent_setting_rows, &s);
    }
    assert_string_equal(defaults.tools, "calculator,clock");
    options_release(agent_setting_rows, &defaults);
}

static void test_keys(void **state) {
    (void)state;
    struct agent_settings s;
    struct agent_options o = {0};
    struct agent_tools tools = {0};
    assert_int_equal(settings_of("system: 短く。\ntools: [clock, http_get]\nmax_steps: 3\n"
                                 "max_seconds: 2.5\nmax-tokens: 40\nthought_tokens: 7\n"
                                 "form: react\ntemperature: 0.5\ntop_k: 9\ntop_p: 0.8\n"
                                 "min_p: 0.1\nallow_host: [a.example, b.example]\n",
                                 &s),
                     OK);
    assert_int_equal(agent_settings_apply(&s, &o, &err), OK);
    assert_string_equal(o.system, "短く。");
    assert_int_equal(o.form, AGENT_REACT);
    assert_int_equal(o.max_steps, 3);
    assert_true(o.max_seconds == 2.5);
    assert_int_equal(o.max_tokens, 40);
    assert_int_equal(o.thought_tokens, 7);
    assert_int_equal(o.sampling.top_k, 9);
    assert_true(o.sampling.temperature == 0.5f && o.sampling.top_p == 0.8f &&
                o.sampling.min_p == 0.1f);
    assert_int_equal(s.hosts.n, 2);
    assert_int_equal(agent_settings_open_tools(&s, (struct agent_tool_options){0}, &tools, &err),
                     OK);
    assert_int_equal(tools.n, 2);
    assert_string_equal(tools.v[1].name, "http_get");
    agent_tools_release(&tools);
    options_release(agent_setting_rows, &s);

    assert_int_equal(settings_of("tools: []\n", &s), OK);
    assert_int_equal(agent_settings_open_tools(&s, (struct agent_tool_options){0}, &tools, &err),
                     OK);
    assert_int_equal(tools.n, 0);
    options_release(agent_setting_rows, &s);
}

static void test_paths(void **state) {
    (void)state;
    struct agent_settings s;
    struct adapter_mix mix;
    char *odd = path_join(folder, "odd,name=2");
    assert_int_equal(
        settings_of("root: notes\nmemory: m.db\nknowledge: /k.db\nadapter: [a=0.7, /b=0.3]\n", &s),
        OK);
    path_is(s.root, "notes");
    path_is(s.memory, "m.db");
    assert_string_equal(s.knowledge, "/k.db");
    assert_int_equal(adapter_mix_parse(&mix, s.adapter, &err), OK);
    assert_true(mix.weighted);
    assert_int_equal(mix.paths.n, 2);
    path_is(mix.paths.v[0], "a");
    assert_string_equal(mix.paths.v[1], "/b");
    assert_true(mix.weights[0] == 0.7f && mix.weights[1] == 0.3f);
    adapter_mix_release(&mix);
    options_release(agent_setting_rows, &s);

    assert_int_equal(settings_of("adapter: hf:owner/repo\n", &s), OK);
    assert_string_equal(s.adapter, "hf:owner/repo");
    options_release(agent_setting_rows, &s);

    // an existing path is an adapter, whatever its name contains
    assert_int_equal(dir_make(odd, &err), OK);
    assert_int_equal(settings_of("adapter: odd,name=2\n", &s), OK);
    assert_int_equal(adapter_mix_parse(&mix, s.adapter, &err), OK);
    assert_int_equal(mix.paths.n, 1);
    assert_string_equal(mix.paths.v[0], odd);
    assert_false(mix.weighted);
    adapter_mix_release(&mix);
    options_release(agent_setting_rows, &s);
    free(odd);
}

static void test_refused(void **state) {
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"tools: [clock]\nsteps: 3\n", "line 2: unknown key 'steps'"},
        {"max_step: 3\n", "did you mean 'max_steps'"},
        {"max_steps: 0\n", "line 1: "},
        {"max_steps: many\n", "line 1: "},
        {"max_steps: 65\n", "line 1: "},
        {"max_seconds: -1\n", "line 1: "},
        {"tools: [clock, 3]\n", "line 1: "},
        {"tools: {clock: true}\n", "line 1: "},
        {"system: 1\nsystem: 2\n", "system"},
        {"form: xml\n", "line 1: there is no form 'xml'"},
        {"- a\n", "must be a mapping"},
        {"text\n", "must be a mapping"},
        {"a: [\n", "agent.yaml"},
    };
    struct agent_settings s;
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        assert_int_not_equal(settings_of(cases[i].text, &s), OK);
        if (!strstr(err.text, cases[i].message))
            fail_msg("'%s' is refused with '%s', without '%s'", cases[i].text, err.text,
                     cases[i].message);
    }
    assert_int_not_equal(agent_settings_read(&s, "/nowhere/agent.yaml", &err), OK);
}

static int setup(void **state) {
    (void)state;
    if (!mkdtemp(folder)) return 1;
    file = path_join(folder, "agent.yaml");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char *odd = path_join(folder, "odd,name=2");
    dir_delete(odd);
    dir_delete(folder);
    free(odd);
    free(file);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
