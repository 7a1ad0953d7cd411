/*
 * test_lib_training: training by include/shoal.h: shoal_train equals the training of the layer
 * below it, also after it was cancelled and continued; a trainer equals shoal_train bit for bit,
 * trains adapters independently, applies weights, and continues from its file.
 */
/* levels: once */
#define _GNU_SOURCE
#include "folder.h"
#include "lib/internal.h"
#include "train/train.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define OPTIONS(...)                                                                               \
    (const char *const[]) {                                                                        \
        __VA_ARGS__, NULL                                                                          \
    }

static struct shoal *s;
static struct shoal_error err;
static char root[64];

static const struct shoal_message talk[] = {{"user", "pick the larger of 392 and 814"},
                                            {"assistant", "answer: 814"}};
static const struct shoal_message other_talk[] = {{"user", "order down: b y g"},
                                                  {"assistant", "answer: y g b"}};

static void assert_ok(int rc) {
    if (rc != SHOAL_OK) fail_msg("%s", err.text);
}

static void assert_error(int rc, int code, const char *text) {
    if (rc != code || err.code != code || !strstr(err.text, text))
        fail_msg("code %d, '%s' instead of code %d, '%s'", rc, err.text, code, text);
}

static int set_up(void **state) {
    (void)state;
    snprintf(root, sizeof root, "/tmp/shoal-test-lib-training-%d", (int)getpid());
    folder_remove(root);
    struct error e;
    s = shoal_open("test/models/fry-1", OPTIONS("exact=true", "threads=2"), &err);
    return s && dir_make(root, &e) == OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    shoal_close(s);
    return folder_remove(root);
}

/* "NAME=ROOT/FILE"; the texts live until the end of the program. */
static const char *option_path(const char *name, const char *file) {
    static char texts[64][160];
    static int used;
    char *text = texts[used++ % 64];
    snprintf(text, sizeof texts[0], "%s=%s/%s", name, root, file);
    return text;
}

/* Writes a line per conversation. */
static void write_data(const char *file, const struct shoal_message *const *talks, int n) {
    char *path = path_join(root, file);
    struct buf b = {0};
    struct error e;
    for (int i = 0; i < n; i++)
        buf_printf(&b,
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}, "
                   "{\"role\": \"assistant\", \"content\": \"%s\"}]}\n",
                   talks[i][0].content, talks[i][1].content);
    assert_int_equal(file_write(path, b.data, b.len, &e), OK);
    buf_release(&b);
    free(path);
}

static json_t *result_of(char *text) {
    struct error e;
    if (!text) fail_msg("%s", err.text);
    json_t *v = json_parse(text, strlen(text), "result", &e);
    shoal_free(text);
    return v;
}

static const char *hash_of(const json_t *list, size_t i) {
    return json_get_string(json_array_get(list, i), "hash");
}

/* An untrained adapter of rank 4. */
static struct shoal_adapter *new_adapter(const char *seed) {
    struct shoal_adapter *a = shoal_adapter_new(s, OPTIONS("r=4", seed), &err);
    if (!a) fail_msg("%s", err.text);
    return a;
}

static struct shoal_trainer *new_trainer(const struct shoal_adapter *const *adapters, int n,
                                         const char *const *options) {
    struct shoal_trainer *t = shoal_trainer_new(s, adapters, n, options, &err);
    if (!t) fail_msg("%s", err.text);
    return t;
}

static void assert_hash(struct shoal_trainer *t, int i, const char *hash) {
    struct shoal_adapter *a = shoal_trainer_adapter(t, i, &err);
    assert_non_null(a);
    assert_string_equal(shoal_adapter_hash(a), hash);
    shoal_adapter_free(a);
}

/* shoal_train */

struct watcher {
    int calls, stop_at, continued;
    long long last;
};

static int on_progress(void *ctx, const struct shoal_progress *p) {
    struct watcher *w = ctx;
    assert_string_equal(p->task, "training");
    assert_true(p->done == w->last + 1 || w->calls == 0);
    w->last = p->done;
    return ++w->calls == w->stop_at;
}

static void on_message(void *ctx, const char *text) {
    struct watcher *w = ctx;
    w->continued += strstr(text, "continuing") != NULL;
}

#define STEPS "max-steps=4"
static json_t *train_to(const char *out, struct watcher *w) {
    const struct shoal_callbacks callbacks = {on_progress, on_message, w};
    char *text = shoal_train(s,
                             OPTIONS("data=data/personas/critic.jsonl", option_path("out", out),
                                     option_path("runs", "runs"), "r=2", STEPS, "lr=0.01",
                                     "grad-accum=2", "save-steps=1"),
                             &callbacks, &err);
    return text ? result_of(text) : NULL;
}

/* The hash that the layer below gives with the same options. */
static void layer_hash(char hash[HASH_LEN]) {
    struct train_options o;
    struct error e;
    struct train_job job = {.name = "adapter", .data = "data/personas/critic.jsonl"};
    options_default(train_option_rows, &o);
    o.r = 2;
    o.max_steps = 4;
    o.lr = 0.01;
    o.grad_accum = 2;
    assert_int_equal(sft_run(s->model, &job, 1, &o, s->pool, NULL, NULL, &e), OK);
    memcpy(hash, job.result->hash, HASH_LEN);
    adapter_release(job.result);
    options_release(train_option_rows, &o);
}

static void test_train(void **state) {
    (void)state;
    char hash[HASH_LEN];
    struct watcher w = {0}, stopped = {.stop_at = 2}, rest = {0};
    layer_hash(hash);
    json_t *v = train_to("whole", &w);
    assert_int_equal(json_array_size(v), 1);
    assert_string_equal(hash_of(v, 0), hash);
    assert_true(json_is_true(json_object_get(json_array_get(v, 0), "published")));
    assert_int_equal(w.calls, 4);
    struct shoal_adapter *a =
        shoal_adapter_load(s, json_get_string(json_array_get(v, 0), "dir"), &err);
    assert_non_null(a);
    assert_string_equal(shoal_adapter_hash(a), hash);
    shoal_adapter_free(a);
    json_decref(v);

    assert_null(train_to("parts", &stopped));
    assert_error(err.code, SHOAL_ERR_STATE, "cancelled");
    assert_int_equal(stopped.calls, 2);
    v = train_to("parts", &rest);
    assert_string_equal(hash_of(v, 0), hash);
    assert_int_equal(rest.calls, 2);
    assert_int_equal(rest.continued, 1);
    json_decref(v);
}

static void test_train_rejected(void **state) {
    (void)state;
    const struct shoal_message *talks[] = {talk}, *others[] = {other_talk};
    write_data("one.jsonl", talks, 1);
    write_data("other.jsonl", others, 1);
    assert_null(shoal_train(
        s,
        OPTIONS(option_path("data", "one.jsonl"), option_path("eval-data", "one.jsonl"),
                option_path("out", "rejected"), option_path("runs", "runs"), "r=2", "max-steps=1"),
        NULL, &err));
    assert_error(err.code, SHOAL_ERR_STATE, "1 of 1 evaluation samples are in the data");
    json_t *v = result_of(
        shoal_train(s,
                    OPTIONS(option_path("data", "one.jsonl"),
                            option_path("eval-data", "other.jsonl"), option_path("out", "rejected"),
                            option_path("runs", "runs"), "r=2", "lr=1e-9", "max-steps=1"),
                    NULL, &err));
    assert_true(json_is_false(json_object_get(json_array_get(v, 0), "published")));
    assert_true(strlen(hash_of(v, 0)) == HASH_LEN - 1);
    json_decref(v);
}

static void assert_refused(const char *const *options, int code, const char *text) {
    assert_null(shoal_train(s, options, NULL, &err));
    assert_error(err.code, code, text);
}

static void test_train_errors(void **state) {
    (void)state;
    const char *out = option_path("out", "none"), *runs = option_path("runs", "runs"),
               *data = "data=data/personas/critic.jsonl",
               *same = "data=a=data/personas/critic.jsonl";
    assert_refused(OPTIONS(data, out, "ranks=2"), SHOAL_ERR_USAGE, "'--ranks'");
    assert_refused(OPTIONS(out), SHOAL_ERR_USAGE, "'data' requires");
    assert_refused(OPTIONS(data), SHOAL_ERR_USAGE, "'out' is missing");
    assert_refused(OPTIONS(data, data, out), SHOAL_ERR_USAGE, "NAME=FILE");
    assert_refused(OPTIONS(same, same, out), SHOAL_ERR_USAGE, "two adapters are named 'a'");
    assert_refused(OPTIONS("data=a/b=x", out), SHOAL_ERR_USAGE, "not a valid adapter name");
    assert_refused(OPTIONS(data, out, "method=x"), SHOAL_ERR_USAGE, "method 'x'");
    assert_refused(OPTIONS(option_path("data", "nowhere"), out, runs), SHOAL_ERR_MISSING,
                   "nowhere");
    assert_refused(OPTIONS(data, out, runs, option_path("init-adapter", "nothing")),
                   SHOAL_ERR_MISSING, "nothing");
    assert_null(shoal_train(s, NULL, NULL, NULL));
}

/* the trainer */

/* Adds the conversation with weight 1 and updates. Returns the loss. */
static double train_step(struct shoal_trainer *t, int i, const struct shoal_message *messages) {
    double loss = 0;
    assert_ok(shoal_trainer_add(t, i, messages, 2, 1, &err));
    assert_ok(shoal_trainer_update(t, 0.01, &loss, &err));
    return loss;
}

static void test_trainer_equals_train(void **state) {
    (void)state;
    const struct shoal_message *talks[] = {talk};
    struct shoal_adapter *a = new_adapter("seed=3");
    char *start = path_join(root, "start");
    write_data("one.jsonl", talks, 1);
    assert_ok(shoal_adapter_save(s, a, start, &err));
    json_t *v = result_of(
        shoal_train(s,
                    OPTIONS(option_path("data", "one.jsonl"), option_path("init-adapter", "start"),
                            option_path("out", "one"), option_path("runs", "runs"), "max-steps=3",
                            "lr=0.01", "lr-scheduler=constant", "warmup-ratio=0", "grad-accum=1"),
                    NULL, &err));
    const struct shoal_adapter *list[] = {a};
    struct shoal_trainer *t = new_trainer(list, 1, NULL);
    double loss = 0, first = 0;
    for (int i = 0; i < 3; i++) {
        loss = train_step(t, 0, talk);
        if (i == 0) first = loss;
    }
    const json_t *row = json_array_get(v, 0);
    assert_float_equal(first, json_number_value(json_object_get(row, "first_loss")), 0);
    assert_float_equal(loss, json_number_value(json_object_get(row, "last_loss")), 0);
    assert_hash(t, 0, hash_of(v, 0));
    struct shoal_adapter *trained = shoal_trainer_adapter(t, 0, &err);
    json_t *lineage = result_of(shoal_adapter_lineage(trained));
    assert_string_equal(json_get_string(lineage, "start"), shoal_adapter_hash(a));
    json_decref(lineage);
    shoal_adapter_free(trained);
    shoal_trainer_free(t);
    shoal_adapter_free(a);
    json_decref(v);
    free(start);
}

static void test_trainer_adapters_are_independent(void **state) {
    (void)state;
    struct shoal_adapter *a[2] = {new_adapter("seed=1"), new_adapter("seed=2")};
    const struct shoal_adapter *list[2] = {a[0], a[1]};
    const char *const *options = OPTIONS("lora-dropout=0");
    struct shoal_trainer *both = new_trainer(list, 2, options), *single;
    const struct shoal_message *talks[] = {talk, other_talk};
    double before, after, loss;
    assert_ok(shoal_trainer_loss(both, 0, talk, 2, &before, &err));
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 2; i++) assert_ok(shoal_trainer_add(both, i, talks[i], 2, 1, &err));
        assert_ok(shoal_trainer_update(both, 0.01, NULL, &err));
    }
    assert_ok(shoal_trainer_loss(both, 0, talk, 2, &after, &err));
    assert_true(after < before);
    for (int i = 0; i < 2; i++) {
        single = new_trainer(&list[i], 1, options);
        for (int k = 0; k < 3; k++) {
            loss = train_step(single, 0, talks[i]);
            if (i == 0 && k == 0) assert_float_equal(loss, before, 1e-9);
        }
        struct shoal_adapter *result = shoal_trainer_adapter(single, 0, &err);
        assert_hash(both, i, shoal_adapter_hash(result));
        shoal_adapter_free(result);
        shoal_trainer_free(single);
    }
    shoal_trainer_free(both);
    for (int i = 0; i < 2; i++) shoal_adapter_free(a[i]);
}

/* The change of the adapter's values by one step of plain gradient descent. */
static double *step_of(const struct shoal_adapter *a, double weight, double *loss) {
    struct shoal_trainer *t =
        new_trainer(&a, 1, OPTIONS("lora-dropout=0", "optim=sgd", "momentum=0", "max-grad-norm=0"));
    assert_ok(shoal_trainer_add(t, 0, talk, 2, weight, &err));
    assert_ok(shoal_trainer_update(t, 0.1, loss, &err));
    struct shoal_adapter *after = shoal_trainer_adapter(t, 0, &err);
    const struct adapter *x = adapter_unwrap(a), *y = adapter_unwrap(after);
    double *change = xcalloc(x->n_data, sizeof *change);
    for (size_t i = 0; i < x->n_data; i++) change[i] = (double)y->data[i] - (double)x->data[i];
    shoal_adapter_free(after);
    shoal_trainer_free(t);
    return change;
}

static void test_trainer_weights(void **state) {
    (void)state;
    struct shoal_adapter *a = new_adapter("seed=5");
    /* 1 + 1e-12 is another path of the code, and 1 as a float */
    const double weights[] = {1, 1 + 1e-12, 2, -0.5, 0};
    double *reference = NULL, reference_loss = 0, loss;
    for (size_t k = 0; k < ARRAY_LEN(weights); k++) {
        double *change = step_of(a, weights[k], &loss), size = 0, difference = 0;
        if (k == 0) reference = change, reference_loss = loss;
        for (size_t i = 0; i < adapter_unwrap(a)->n_data; i++) {
            size = fmax(size, fabs(reference[i]));
            difference = fmax(difference, fabs(change[i] - weights[k] * reference[i]));
        }
        assert_true(size > 1e-4);
        if (difference > 1e-3 * size) fail_msg("weight %g: %g of %g", weights[k], difference, size);
        assert_float_equal(loss, weights[k] * reference_loss, 1e-6);
        if (k > 0) free(change);
    }
    free(reference);
    shoal_adapter_free(a);
}

static void test_trainer_continues(void **state) {
    (void)state;
    struct shoal_adapter *a = new_adapter("seed=7"), *b = new_adapter("seed=8");
    const struct shoal_adapter *list = a, *others = b;
    struct shoal_trainer *t = new_trainer(&list, 1, NULL), *u = new_trainer(&others, 1, NULL),
                         *sgd = new_trainer(&list, 1, OPTIONS("optim=sgd"));
    char *path = path_join(root, "trainer.bin");
    for (int i = 0; i < 2; i++) train_step(t, 0, i % 2 ? other_talk : talk);
    assert_ok(shoal_trainer_save(t, path, &err));
    assert_ok(shoal_trainer_add(t, 0, talk, 2, 1, &err));
    assert_error(shoal_trainer_save(t, path, &err), SHOAL_ERR_STATE, "between updates");
    assert_ok(shoal_trainer_load(t, path, &err)); // drops the sample
    assert_ok(shoal_trainer_load(u, path, &err));
    for (int i = 0; i < 2; i++)
        assert_float_equal(train_step(t, 0, talk), train_step(u, 0, talk), 0);
    struct shoal_adapter *result = shoal_trainer_adapter(t, 0, &err);
    assert_hash(u, 0, shoal_adapter_hash(result));
    assert_error(shoal_trainer_load(sgd, path, &err), SHOAL_ERR_MISMATCH, "checkpoint");
    assert_error(shoal_trainer_load(u, "/nowhere/t.bin", &err), SHOAL_ERR_MISSING, "nowhere");
    shoal_trainer_free(sgd);
    shoal_trainer_free(t);
    shoal_trainer_free(u);
    shoal_adapter_free(result);
    shoal_adapter_free(a);
    shoal_adapter_free(b);
    free(path);
}

/* DoRA has magnitudes besides the two factors, and multipliers that depend on the base. */
static void test_trainer_dora(void **state) {
    (void)state;
    struct shoal_adapter *a = shoal_adapter_new(s, OPTIONS("r=2", "use-dora=1"), &err), *trained;
    const struct shoal_adapter *list = a;
    struct shoal_trainer *t = new_trainer(&list, 1, OPTIONS("dropout=0"));
    double before, after;
    assert_ok(shoal_trainer_loss(t, 0, talk, 2, &before, &err));
    train_step(t, 0, talk);
    trained = shoal_trainer_adapter(t, 0, &err);
    shoal_trainer_free(t);
    list = trained;
    t = new_trainer(&list, 1, NULL);
    assert_ok(shoal_trainer_loss(t, 0, talk, 2, &after, &err));
    assert_true(after < before);
    shoal_trainer_free(t);
    shoal_adapter_free(trained);
    shoal_adapter_free(a);
}

static void test_trainer_errors(void **state) {
    (void)state;
    struct shoal_adapter *a = new_adapter("seed=1");
    const struct shoal_adapter *list[] = {a, NULL};
    const struct shoal_message question = {"user", "pick"}, broken = {"user", NULL};
    double loss;
    assert_null(shoal_trainer_new(s, list, 2, NULL, &err));
    assert_error(err.code, SHOAL_ERR_USAGE, "adapter 1 is NULL");
    assert_null(shoal_trainer_new(s, NULL, 0, NULL, &err));
    assert_null(shoal_trainer_new(s, list, 1, OPTIONS("epochs=2"), &err));
    assert_error(err.code, SHOAL_ERR_USAGE, "epochs");
    assert_null(shoal_trainer_new(s, list, 1, OPTIONS("optim=lion"), &err));
    assert_error(err.code, SHOAL_ERR_USAGE, "lion");
    assert_null(shoal_trainer_new(s, list, 1, OPTIONS("dropout=2"), NULL));

    struct shoal_trainer *t = new_trainer(list, 1, OPTIONS("dropout=0"));
    assert_error(shoal_trainer_add(t, 1, talk, 2, 1, &err), SHOAL_ERR_USAGE, "adapter 1");
    assert_error(shoal_trainer_add(t, 0, &question, 1, 1, &err), SHOAL_ERR_USAGE, "assistant");
    assert_error(shoal_trainer_add(t, 0, &broken, 1, 1, &err), SHOAL_ERR_USAGE, "message 0");
    assert_error(shoal_trainer_add(t, 0, NULL, 0, 1, &err), SHOAL_ERR_USAGE, "message");
    assert_error(shoal_trainer_add(t, 0, talk, 2, NAN, &err), SHOAL_ERR_NUMERIC, "weight");
    assert_error(shoal_trainer_update(t, 0.1, NULL, &err), SHOAL_ERR_STATE, "target");
    assert_error(shoal_trainer_update(t, -1, NULL, &err), SHOAL_ERR_USAGE, "learning rate");
    assert_null(shoal_trainer_adapter(t, -1, &err));
    assert_hash(t, 0, shoal_adapter_hash(a));

    struct buf text = {0};
    for (int i = 0; i < 4000; i++) buf_puts(&text, "long ");
    const struct shoal_message longer[] = {{"user", "x"}, {"assistant", text.data}};
    assert_error(shoal_trainer_loss(t, 0, longer, 2, &loss, &err), SHOAL_ERR_USAGE, "tokens");
    struct shoal_trainer *cutting = new_trainer(list, 1, OPTIONS("max-length=64"));
    assert_ok(shoal_trainer_loss(cutting, 0, longer, 2, &loss, &err));
    assert_true(isfinite(loss));
    shoal_trainer_free(cutting);
    buf_release(&text);
    /* The gradient of a huge weight is not finite; the trainer can be used afterwards. */
    assert_ok(shoal_trainer_add(t, 0, talk, 2, 1, &err));
    int rc = shoal_trainer_add(t, 0, talk, 2, 3e38, &err);
    if (rc == SHOAL_OK) rc = shoal_trainer_update(t, 0.1, NULL, &err);
    assert_int_equal(rc, SHOAL_ERR_NUMERIC);
    assert_true(isfinite(train_step(t, 0, talk)));
    shoal_trainer_free(t);
    shoal_adapter_free(a);
    shoal_trainer_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train),
        cmocka_unit_test(test_train_rejected),
        cmocka_unit_test(test_train_errors),
        cmocka_unit_test(test_trainer_equals_train),
        cmocka_unit_test(test_trainer_adapters_are_independent),
        cmocka_unit_test(test_trainer_weights),
        cmocka_unit_test(test_trainer_continues),
        cmocka_unit_test(test_trainer_dora),
        cmocka_unit_test(test_trainer_errors),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
