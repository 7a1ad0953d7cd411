/*
 * test_libshoal: models, requests, embeddings, adapters, evaluation and worlds through
 * include/shoal.h, on a trained model: equal to the layers below, errors, callbacks, cancelling.
 */
#define _GNU_SOURCE
#include "eval/eval.h"
#include "folder.h"
#include "shoal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const char MODEL[] = "test/models/fry-1";
static const struct shoal_message question = {"user", "pick the smallest of 41, 3, 907"};
static char dir[] = "/tmp/test_libshoal.XXXXXX";
static struct shoal *s;

static const char *in_dir(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static int open_model(void **state) {
    (void)state;
    static const char *const options[] = {"threads=2", "exact=true", NULL};
    s = mkdtemp(dir) ? shoal_open(MODEL, options, NULL) : NULL;
    return s ? 0 : -1;
}

static int close_model(void **state) {
    (void)state;
    shoal_close(s);
    return folder_remove(dir);
}

static struct shoal_request *request_of(const char *const *options) {
    struct shoal_error err = {0};
    struct shoal_request *r = shoal_request_new(s, &question, 1, options, &err);
    if (!r) fail_msg("%s", err.text);
    return r;
}

static void test_open_errors(void **state) {
    (void)state;
    static const struct {
        const char *model, *option;
        int code;
        const char *text;
    } cases[] = {
        {"/nowhere", NULL, SHOAL_ERR_MISSING, "/nowhere"},
        {MODEL, "thread=1", SHOAL_ERR_USAGE, "did you mean '--threads'"},
        {MODEL, "threads=many", SHOAL_ERR_USAGE, "whole number"},
        {MODEL, "threads", SHOAL_ERR_USAGE, "NAME=VALUE"},
        {MODEL, "=1", SHOAL_ERR_USAGE, "NAME=VALUE"},
        {MODEL, "kv-cache-dtype=q9", SHOAL_ERR_USAGE, "q9"},
        {"README.md", NULL, SHOAL_ERR_FORMAT, "README.md"},
    };
    static const char *const twice[] = {"threads=1", "exact=true", "threads=2", NULL};
    struct shoal_error repeated = {0};
    assert_null(shoal_open(MODEL, twice, &repeated));
    assert_string_equal(repeated.text, "option 'threads' is given twice");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *options[] = {cases[i].option, NULL};
        struct shoal_error err = {0};
        assert_null(shoal_open(cases[i].model, options, &err));
        assert_null(shoal_open(cases[i].model, options, NULL));
        if (err.code != cases[i].code || !strstr(err.text, cases[i].text))
            fail_msg("case %zu: %d %s", i, err.code, err.text);
    }
    assert_string_equal(shoal_error_name(SHOAL_ERR_NUMERIC), "numeric");
    assert_string_equal(shoal_version(), SHOAL_VERSION);
}

static void test_info(void **state) {
    (void)state;
    char *text = shoal_info(s, NULL);
    json_t *v = json_loads(text, 0, NULL);
    assert_string_equal(json_get_string(v, "name"), "fry-1");
    assert_string_equal(json_get_string(v, "class"), "exact");
    assert_int_equal(json_get_number(v, "threads"), 2);
    assert_int_equal(json_get_number(v, "width"), shoal_embedding_size(s));
    json_decref(v);
    shoal_free(text);
}

/* The context of a model that is opened; 0: `err` says why not. */
static int context_of(const char *model, const char *option, struct shoal_error *err) {
    const char *options[] = {"threads=1", option, NULL};
    struct shoal *opened = shoal_open(model, options, err);
    char *text = opened ? shoal_info(opened, NULL) : NULL;
    json_t *v = text ? json_loads(text, 0, NULL) : NULL;
    int tokens = (int)json_get_number(v, "max_seq_len");
    json_decref(v);
    shoal_free(text);
    shoal_close(opened);
    return tokens;
}

/* The context is the model's, as far as memory allows, or the named one. */
static void test_context(void **state) {
    (void)state;
    enum { TOKENS = 40000 }; // its keys and values need 60 MB
    char model[256];
    struct shoal_error err = {0};
    snprintf(model, sizeof model, "%s", in_dir("long"));
    assert_true(folder_long_model(model, TOKENS));
    assert_int_equal(context_of(model, NULL, &err), TOKENS);
    assert_int_equal(context_of(model, "max-model-len=5000", &err), 5000);
    assert_int_equal(context_of(model, "max-model-len=40001", &err), 0);
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
    memory_limit_set(memory_used(NULL) + (60 << 20));
    assert_in_range(context_of(model, NULL, &err), 1024, TOKENS / 2);
    memory_limit_set(memory_used(NULL) + (10 << 20));
    assert_int_equal(context_of(model, NULL, &err), 0);
    memory_limit_set(0);
    assert_int_equal(err.code, SHOAL_ERR_MEMORY);
    if (!strstr(err.text, "one sequence of 1024 tokens needs")) fail_msg("%s", err.text);
}

static void test_tokens(void **state) {
    (void)state;
    static const char text[] = "pick 3, 猫と犬";
    struct shoal_error err = {0};
    int ids[64], n = shoal_tokenize(s, text, ids, 64);
    assert_in_range(n, 3, 64);
    assert_int_equal(shoal_tokenize(s, text, ids, 1), n);
    char *back = shoal_detokenize(s, ids, n, &err);
    assert_string_equal(back, text);
    shoal_free(back);
    ids[0] = 1 << 30;
    assert_null(shoal_detokenize(s, ids, n, &err));
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
}

/* A batch, single steps and another number of threads give the same replies. */
static void test_run_and_step(void **state) {
    (void)state;
    static const char *const greedy[] = {"max-tokens=24", NULL}, *const sampled[] = {
                                                                     "max-tokens=24",
                                                                     "temperature=0.9",
                                                                     "top-p=0.95", "seed=7", NULL};
    struct shoal_request *batch[2] = {request_of(greedy), request_of(sampled)},
                         *single[2] = {request_of(greedy), request_of(sampled)};
    assert_int_equal(shoal_run(s, batch, 2, NULL, NULL), 0);
    assert_string_equal(shoal_request_finish(single[0]), "");
    assert_string_equal(shoal_request_text(single[0]), "");
    for (int i = 0; i < 2; i++) {
        char before[512] = "";
        assert_int_equal(shoal_submit(s, single[i], NULL), 0);
        while (shoal_step(s, NULL) > 0) {
            const char *text = shoal_request_text(single[i]);
            assert_memory_equal(text, before, strlen(before));
            snprintf(before, sizeof before, "%s", text);
        }
        assert_string_equal(shoal_request_text(single[i]), shoal_request_text(batch[i]));
        assert_true(strlen(shoal_request_text(single[i])) > 0);
        struct shoal_usage u = shoal_request_usage(single[i]);
        assert_in_range(u.completion_tokens, 1, 25);
        assert_in_range(u.prompt_tokens, 5, 60);
    }
    struct shoal_error err = {0};
    assert_int_equal(shoal_submit(s, single[0], &err), SHOAL_ERR_STATE);
    for (int i = 0; i < 2; i++) {
        shoal_request_free(batch[i]);
        shoal_request_free(single[i]);
    }
}

static void test_constraints(void **state) {
    (void)state;
    static const char *const regex[] = {"regex=[0-9]{4}", "temperature=1", "seed=3", NULL},
                             *const schema[] = {"json-schema={\"enum\": [\"猫\", \"犬\"]}", NULL},
                             *const stop[] = {"stop=:", "max-tokens=40", NULL},
                             *const bad[] = {"regex=(", NULL},
                             *const two[] = {"regex=a", "grammar=root ::= \"a\"", NULL};
    struct shoal_request *r[3] = {request_of(regex), request_of(schema), request_of(stop)};
    struct shoal_error err = {0};
    assert_int_equal(shoal_run(s, r, 3, NULL, &err), 0);
    const char *digits = shoal_request_text(r[0]);
    assert_true(strlen(digits) == 4 && strspn(digits, "0123456789") == 4);
    const char *name = shoal_request_text(r[1]);
    assert_true(strcmp(name, "\"猫\"") == 0 || strcmp(name, "\"犬\"") == 0);
    assert_null(strchr(shoal_request_text(r[2]), ':'));
    for (int i = 0; i < 3; i++) {
        assert_string_equal(shoal_request_finish(r[i]), "stop");
        shoal_request_free(r[i]);
    }
    assert_null(shoal_request_new(s, &question, 1, bad, &err));
    assert_null(shoal_request_new(s, &question, 1, two, &err));
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
    assert_null(shoal_request_new(s, &question, 0, NULL, &err));
    assert_null(shoal_request_new(s, &(struct shoal_message){"user", NULL}, 1, NULL, &err));
}

static void test_choices(void **state) {
    (void)state;
    static const char *const choices[] = {"answer: 3", "answer: 41", "answer: 907"};
    struct shoal_request *r = request_of(NULL);
    float p[3];
    assert_int_equal(shoal_request_choice(r, p), -1);
    assert_int_equal(shoal_request_set_choices(r, choices, 1, NULL), SHOAL_ERR_USAGE);
    assert_int_equal(shoal_request_set_choices(r, choices, 3, NULL), 0);
    assert_int_equal(shoal_run(s, &r, 1, NULL, NULL), 0);
    int best = shoal_request_choice(r, p);
    assert_in_range(best, 0, 2);
    assert_true(p[0] + p[1] + p[2] > 0.9999f && p[0] + p[1] + p[2] < 1.0001f);
    for (int i = 0; i < 3; i++) assert_true(p[i] <= p[best]);
    assert_string_equal(shoal_request_finish(r), "choice");
    assert_int_equal(shoal_request_set_choices(r, choices, 3, NULL), SHOAL_ERR_STATE);
    shoal_request_free(r);
}

/* callbacks */

struct counter {
    int calls, stop_at;
    long long last;
};

static int count(void *ctx, const struct shoal_progress *p) {
    struct counter *c = ctx;
    assert_true(p->task && p->detail && p->seconds >= 0 && p->done <= p->total);
    c->last = p->done;
    return ++c->calls == c->stop_at;
}

static void test_cancel(void **state) {
    (void)state;
    static const char *const options[] = {"max-tokens=30", NULL};
    struct shoal_request *r[2] = {request_of(options), request_of(options)};
    struct counter c = {.stop_at = 3};
    const struct shoal_callbacks callbacks = {.progress = count, .ctx = &c};
    struct shoal_error err = {0};
    assert_int_equal(shoal_run(s, r, 2, &callbacks, &err), SHOAL_ERR_STATE);
    assert_string_equal(err.text, "cancelled");
    assert_int_equal(c.calls, 3);
    assert_string_equal(shoal_request_finish(r[0]), "");
    c = (struct counter){0};
    assert_int_equal(shoal_run(s, r, 2, &callbacks, &err), 0);
    assert_true(c.calls > 3 && c.last == 2);
    assert_string_equal(shoal_request_text(r[0]), shoal_request_text(r[1]));
    struct shoal_request *one = request_of(options);
    assert_int_equal(shoal_submit(s, one, NULL), 0);
    for (int i = 0; i < 4; i++) shoal_step(s, NULL);
    shoal_cancel(s, one);
    assert_string_equal(shoal_request_finish(one), "cancelled");
    size_t n = strlen(shoal_request_text(one));
    assert_true(n > 0 && strncmp(shoal_request_text(one), shoal_request_text(r[0]), n) == 0);
    assert_int_equal(shoal_step(s, NULL), 0);
    shoal_request_free(one);
    /* a request that cannot run: none of the batch has run */
    struct shoal_request *bad[2] = {request_of(options), r[0]};
    assert_int_equal(shoal_run(s, bad, 2, NULL, &err), SHOAL_ERR_STATE);
    assert_non_null(strstr(err.text, "request 1"));
    assert_int_equal(shoal_run(s, bad, 1, NULL, &err), 0);
    shoal_request_free(bad[0]);
    for (int i = 0; i < 2; i++) shoal_request_free(r[i]);
}

static void test_embed(void **state) {
    (void)state;
    static const char *const texts[] = {"cat", "猫", "cat"};
    int d = shoal_embedding_size(s);
    float *v = calloc((size_t)(3 * d), sizeof *v);
    assert_int_equal(shoal_embed(s, texts, 3, NULL, v, NULL), 0);
    assert_memory_equal(v, v + 2 * d, (size_t)d * sizeof *v);
    assert_memory_not_equal(v, v + d, (size_t)d * sizeof *v);
    free(v);
}

static void test_adapters(void **state) {
    (void)state;
    static const char *const small[] = {"r=4", "lora-alpha=8", "target=q_proj,v_proj", "seed=5",
                                        NULL},
                             *const noise[] = {"seed=9", NULL}, *const wrong[] = {"r=0", NULL};
    struct shoal_error err = {0};
    struct shoal_adapter *a = shoal_adapter_new(s, small, &err),
                         *same = shoal_adapter_new(s, small, &err);
    assert_string_equal(shoal_adapter_hash(a), shoal_adapter_hash(same));
    assert_null(shoal_adapter_new(s, wrong, &err));
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
    const struct shoal_adapter *pair[2] = {a, same};
    assert_null(shoal_adapter_combine(s, "nosuch", pair, NULL, 2, NULL, &err));
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
    assert_int_equal(shoal_adapter_save(s, a, in_dir("a"), &err), 0);
    struct shoal_adapter *loaded = shoal_adapter_load(s, in_dir("a"), &err);
    assert_string_equal(shoal_adapter_hash(a), shoal_adapter_hash(loaded));
    struct shoal_adapter *child = shoal_adapter_combine(s, "linear", pair, NULL, 2, noise, &err);
    if (!child) fail_msg("%s", err.text);
    char *lineage = shoal_adapter_lineage(child);
    assert_non_null(strstr(lineage, shoal_adapter_hash(a)));
    shoal_free(lineage);
    /* an untrained adapter changes nothing; requests keep their adapters */
    struct shoal_request *r[2] = {request_of(NULL), request_of(NULL)};
    assert_int_equal(shoal_request_set_adapters(r[1], pair, (const float[]){0.5f, 0.5f}, 2, &err),
                     0);
    struct shoal_adapter *kept = shoal_adapter_retain(a);
    shoal_adapter_free(a);
    shoal_adapter_free(same);
    assert_string_equal(shoal_adapter_hash(kept), shoal_adapter_hash(loaded));
    shoal_adapter_free(kept);
    assert_int_equal(shoal_run(s, r, 2, NULL, &err), 0);
    assert_string_equal(shoal_request_text(r[0]), shoal_request_text(r[1]));
    for (int i = 0; i < 2; i++) shoal_request_free(r[i]);
    shoal_adapter_free(loaded);
    shoal_adapter_free(child);
    assert_null(shoal_adapter_load(s, "/nowhere", &err));
    assert_int_equal(err.code, SHOAL_ERR_MISSING);
}

static void test_evaluate(void **state) {
    (void)state;
    static const char *const options[] = {"tasks=pick", "n=40", NULL}, *const wrong[] = {
                                                                           "tasks=nosuch", NULL};
    static const char *const names[] = {"new"};
    struct shoal_error err = {0};
    struct counter c = {0};
    const struct shoal_callbacks callbacks = {.progress = count, .ctx = &c};
    struct shoal_adapter *a = shoal_adapter_new(s, NULL, &err);
    const struct shoal_adapter *one = a;
    char *text = shoal_evaluate(s, &one, names, 1, options, &callbacks, &err);
    if (!text) fail_msg("%s", err.text);
    json_t *v = json_loads(text, 0, NULL), *base = json_array_get(v, 0),
           *new = json_array_get(v, 1);
    assert_int_equal(json_array_size(v), 2);
    assert_string_equal(json_get_string(base, "adapter"), "base");
    assert_true(json_get_number(base, "acc") == json_get_number(new, "acc"));
    assert_true(json_get_number(json_object_get(new, "difference"), "p") == 1);
    assert_true(c.calls > 1 && c.last == 80);
    json_decref(v);
    shoal_free(text);
    c = (struct counter){.stop_at = 2};
    assert_null(shoal_evaluate(s, &one, names, 1, options, &callbacks, &err));
    assert_int_equal(err.code, SHOAL_ERR_STATE);
    assert_null(shoal_evaluate(s, NULL, NULL, 0, wrong, NULL, &err));
    assert_non_null(strstr(err.text, "nosuch"));
    assert_int_equal(shoal_step(s, NULL), 0);
    shoal_adapter_free(a);
}

static void test_world(void **state) {
    (void)state;
    struct shoal_error err = {0};
    struct shoal_agent a;
    int actions[5];
    struct shoal_world *w = shoal_world_new(NULL, 5, 3, &err);
    assert_int_equal(shoal_world_agents(w), 5);
    for (int t = 0; t < 40; t++) {
        assert_int_equal(shoal_world_policy(w, "rule", actions, &err), 0);
        assert_int_equal(shoal_world_step(w, actions, &err), 0);
    }
    assert_int_equal(shoal_world_tick(w), 40);
    int delivered = 0;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(shoal_world_agent(w, i, &a, &err), 0);
        delivered += a.delivered;
    }
    assert_true(delivered > 0);
    assert_int_equal(shoal_world_policy(w, "nosuch", actions, &err), SHOAL_ERR_USAGE);
    actions[0] = 10000;
    assert_int_equal(shoal_world_step(w, actions, &err), SHOAL_ERR_USAGE);
    assert_int_equal(shoal_world_tick(w), 40);
    assert_null(shoal_world_new("/nowhere.yaml", 5, 3, &err));
    shoal_world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_errors),  cmocka_unit_test(test_info),
        cmocka_unit_test(test_context),      cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_run_and_step), cmocka_unit_test(test_constraints),
        cmocka_unit_test(test_choices),      cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_embed),        cmocka_unit_test(test_adapters),
        cmocka_unit_test(test_evaluate),     cmocka_unit_test(test_world),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
