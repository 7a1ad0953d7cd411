/*
 * test_config: configuration files (accepted values, and refused ones with their position),
 * environment variables, the precedence of the sources, former names of options, and secrets.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct values {
    bool loud;
    int64_t port;
    double rate;
    char *name;
    struct strings items, keys;
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct values, field), fallback, min, max, NULL, NULL }
static const struct option_row rows[] = {
    ROW("loud", OPT_BOOL, loud, NULL, 0, 0),
    ROW("port", OPT_INT, port, "8000", 0, 65535),
    ROW("rate", OPT_FLOAT, rate, "0.5", 0, 1),
    ROW("model-name", OPT_STRING, name, NULL, 0, 0),
    ROW("item", OPT_LIST, items, "x,y", 0, 0),
    ROW("api-key", OPT_SECRETS, keys, NULL, 0, 0),
    {"thing", OPT_ALIAS, 0, "item", 0, 0, NULL, NULL},
    {0},
};

static int config_apply(struct values *v, const char *text, struct option_origin *origin,
                        struct error *err) {
    struct config_file c;
    int rc = config_parse(&c, "c", text, strlen(text), err);
    if (rc == OK) rc = options_from_config(rows, v, &c, "serve", "serve", origin, err);
    config_release(&c);
    return rc;
}

static void test_values(void **state) {
    (void)state;
    struct values v;
    struct error err;
    struct option_origin origin[ARRAY_LEN(rows)] = {{0}};
    options_default(rows, &v);
    int rc = config_apply(&v,
                          "\xEF\xBB\xBF# first\r\n"
                          "\n"
                          "  [ serve ] \r\n"
                          "port=9000\n"
                          "\trate = 0.25\n"
                          "; another remark\n"
                          "model_name = \" a # b \"\n"
                          "item = p=q=r\n"
                          "thing = last one\n"
                          "loud = yes\n"
                          "[other]\n"
                          "port = 1",
                          origin, &err);
    assert_int_equal(rc, OK);
    assert_int_equal(v.port, 9000);
    assert_true(v.rate == 0.25);
    assert_true(v.loud);
    assert_string_equal(v.name, " a # b ");
    assert_int_equal(v.items.n, 2);
    assert_string_equal(v.items.v[0], "p=q=r");
    assert_string_equal(v.items.v[1], "last one");
    assert_int_equal(origin[1].source, OPTION_FROM_FILE);
    assert_int_equal(origin[1].line, 4);
    assert_int_equal(origin[5].source, OPTION_FROM_DEFAULT);
    options_release(rows, &v);
}

static void test_refused_files(void **state) {
    (void)state;
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"[serve]\nprot = 1\n", "c:2: serve has no option 'prot'; did you mean 'port'?"},
        {"[serve]\nport = 70000\n", "c:2: 'port' cannot be 70000: it must be 0 to 65535"},
        {"[serve]\nport = 80 # mine\n", "c:2: a comment must be on a separate line"},
        {"[serve]\nport = 8x\n", "c:2: 'port' must be a whole number, not '8x'"},
        {"[serve]\nport =\n", "c:2: 'port' must be a whole number, not ''"},
        {"[serve]\nloud = maybe\n", "c:2: 'loud' must be true or false"},
        {"[serve]\nport = 1\n\nport = 2\n", "c:4: 'port' is set in line 2 already"},
        {"[serve]\n[a]\n[serve]\n", "c:3: section [serve] began in line 1 already"},
        {"[serve]\nport\n", "c:2: expected KEY = VALUE"},
        {"[serve]\n= 2\n", "c:2: a key is made of"},
        {"[serve]\np\xC3\xB6rt = 2\n", "c:2: a key is made of"},
        {"[serve\n", "c:1: a section is [NAME]"},
        {"[serve] x\n", "c:1: a section is [NAME]"},
        {"[]\n", "c:1: a section's name"},
        {"[Serve]\n", "c:1: a section's name"},
        {"[serve]\nmodel-name = \"a\" b\n", "c:2: a value in quotes ends with the line"},
        {"[serve]\nmodel-name = \"\n", "c:2: a value in quotes ends with the line"},
        {"[serve]\nmodel-name = a\x01\n", "c:2: the line holds bytes"},
        {"[serve]\nmodel-name = \xFF\n", "c:2: the line holds bytes"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct values v;
        struct error err = {0};
        options_default(rows, &v);
        assert_int_equal(config_apply(&v, cases[i].text, NULL, &err), ERR_USAGE);
        if (strncmp(err.text, cases[i].error, strlen(cases[i].error)) != 0)
            fail_msg("'%s', not '%s'", err.text, cases[i].error);
        options_release(rows, &v);
    }
}

static void test_size_limits_and_nul(void **state) {
    (void)state;
    struct config_file c;
    struct error err;
    static const char nul[] = "[serve]\nport = 1\0 2\n";
    assert_int_equal(config_parse(&c, "c", nul, sizeof nul - 1, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "c:2: the line holds bytes"));
    size_t size = (1 << 20) + 1;
    char *big = xmalloc(size);
    memset(big, 'a', size);
    assert_int_equal(config_parse(&c, "c", big, size, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "larger than the limit"));
    big[0] = '#';
    assert_int_equal(config_parse(&c, "c", big, 8193, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "c:1: the line is longer than 8192 bytes"));
    assert_int_equal(config_parse(&c, "c", big, 8192, &err), OK);
    config_release(&c);
    free(big);
}

/* A value from the file replaces the default, a variable replaces the file's value, and a flag
 * replaces the variable's. A list is replaced as a whole. */
static void test_precedence(void **state) {
    (void)state;
    static char *const environment[] = {"HOME=/",
                                        "SHOAL_SERVE_PORT=9002",
                                        "SHOAL_SERVE_RATE=",
                                        "SHOAL_SERVE_THING=a  b",
                                        "SHOAL_SERVER_PORT=1",
                                        "SHOAL_SERVE_NO_SUCH=1",
                                        NULL};
    static char *argv[] = {"--port", "9003"};
    struct values v;
    struct error err = {0};
    struct strings rest = {0};
    struct option_origin origin[ARRAY_LEN(rows)] = {{0}};
    options_default(rows, &v);
    assert_int_equal(
        config_apply(&v, "[serve]\nport = 9001\nrate = 0.75\nitem = f\n", origin, &err), OK);
    assert_int_equal(options_from_env(rows, &v, "SHOAL_SERVE", environment, origin, &err), OK);
    assert_int_equal(v.port, 9002);
    assert_true(v.rate == 0.75); /* an empty variable counts as not set */
    assert_int_equal(v.items.n, 2);
    assert_string_equal(v.items.v[1], "b");
    assert_int_equal(origin[1].source, OPTION_FROM_ENV);
    assert_int_equal(origin[4].source, OPTION_FROM_ENV);
    assert_int_equal(options_parse_with_origin(rows, &v, 2, argv, &rest, origin, &err), OK);
    assert_int_equal(v.port, 9003);
    assert_int_equal(origin[1].source, OPTION_FROM_FLAG);
    assert_int_equal(origin[2].source, OPTION_FROM_FILE);
    strings_release(&rest);
    options_release(rows, &v);
}

static void test_invalid_variable(void **state) {
    (void)state;
    static char *const environment[] = {"SHOAL_SERVE_PORT=tcp://10.0.0.1:80", NULL};
    struct values v;
    struct error err = {0};
    options_default(rows, &v);
    assert_int_equal(options_from_env(rows, &v, "SHOAL_SERVE", environment, NULL, &err), ERR_USAGE);
    assert_string_equal(err.text,
                        "'SHOAL_SERVE_PORT' must be a whole number, not 'tcp://10.0.0.1:80'");
    options_release(rows, &v);
}

/* Every source accepts the name that an option had in version 0.1, and results and records hold its
 * value under that name. */
static void test_former_names(void **state) {
    (void)state;
    static const struct option_row steps[] = {
        {"finetune-steps", OPT_INT, 0, "0", 0, 100, NULL, NULL}, {"port", OPT_INT, 8}, {0}};
    static char *const environment[] = {"SHOAL_EVOLVE_BURST=3", NULL};
    static char *argv[] = {"--burst", "2"}, *unknown[] = {"--kv", "f16"};
    int64_t v[2] = {0};
    struct error err = {0};
    struct strings rest = {0};
    struct buf b = {0};
    struct yaml y;
    log_quiet = true;
    assert_int_equal(options_parse(steps, v, 2, argv, &rest, &err), OK);
    assert_int_equal(v[0], 2);
    assert_int_equal(options_from_env(steps, v, "SHOAL_EVOLVE", environment, NULL, &err), OK);
    assert_int_equal(v[0], 3);
    assert_true(option_env_source(steps, &steps[0], "SHOAL_EVOLVE", environment, &b));
    assert_string_equal(b.data, "SHOAL_EVOLVE_BURST");
    assert_int_equal(yaml_parse(&y, "y", "burst: 4", 8, &err), OK);
    assert_int_equal(options_from_yaml(steps, v, &y, NULL, &err), OK);
    assert_int_equal(v[0], 4);
    /* --kv is the former name of an option, but the option is not in this table: refused. */
    assert_int_equal(options_parse(steps, v, 2, unknown, &rest, &err), ERR_USAGE);
    assert_string_equal(option_stored_name(&steps[0]), "burst");
    assert_string_equal(option_stored_name(&steps[1]), "port");
    log_quiet = false;
    yaml_release(&y);
    buf_release(&b);
    strings_release(&rest);
}

static void test_secrets_are_not_printed(void **state) {
    (void)state;
    struct values v;
    struct error err = {0};
    struct buf b = {0};
    options_default(rows, &v);
    assert_false(option_print_value(&rows[5], &v, &b));
    assert_int_equal(config_apply(&v, "[serve]\napi-key = hush\n", NULL, &err), OK);
    assert_string_equal(v.keys.v[0], "hush");
    assert_true(option_print_value(&rows[5], &v, &b));
    assert_null(strstr(b.data, "hush"));
    buf_release(&b);
    options_release(rows, &v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refused_files),
        cmocka_unit_test(test_size_limits_and_nul),
        cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_invalid_variable),
        cmocka_unit_test(test_secrets_are_not_printed),
        cmocka_unit_test(test_former_names),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
