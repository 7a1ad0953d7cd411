/*
 * test_contamination: the hashes of training data find the same questions and near duplicates in
 * an evaluation, are bounded, and stay with an adapter in its file, its versions and its children.
 */
#define _GNU_SOURCE
#include "data/data.h"
#include "evolve/evolve.h"
#include "fixture.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char root[64];

static char *file_of(const char *name, const char *text) {
    char *path = path_join(root, name);
    if (file_write(path, text, strlen(text), &err) != OK) fail_msg("%s", err.text);
    return path;
}

static struct training_data *data_of(const char *text) {
    char *path = file_of("data.jsonl", text);
    struct training_data *t = training_data_of_file(path, NULL, &err);
    if (!t) fail_msg("%s", err.text);
    free(path);
    return t;
}

static const char samples[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"short\"},{\"role\":\"user\",\"content\":"
    "\"Which river flows through the old town of Heidelberg?\"},{\"role\":\"assistant\","
    "\"content\":\"Neckar\"},{\"role\":\"user\",\"content\":\"How long is it?\"},{\"role\":"
    "\"assistant\",\"content\":\"362 km\"}]}\n"
    "{\"prompt\":\"Why does ice float on water although it is "
    "solid?\",\"completion\":\"density\"}\n"
    "{\"instruction\":\"Name a metal\",\"output\":\"iron\"}\n"
    "{\"prompt\":\"日本で一番長い川の名前を教えてください\",\"chosen\":\"信濃川\",\"rejected\":\"?"
    "\"}\n"
    "{\"prompt\":[{\"role\":\"user\",\"content\":\"Only a prompt\"}]}\n"
    "{\"text\":\"A text is one question.\"}\n";

enum { NEW, NEAR, SAME };
static const struct {
    const char *question;
    int found;
} questions[] = {
    {"Which river flows through the old town of Heidelberg?", SAME},
    {"  which RIVER flows\nthrough the old town of  heidelberg?", SAME},
    {"Question: Which river flows through the old town of Heidelberg?\nAnswer:", SAME},
    {"Which river flows through the old city of Heidelberg?", NEAR},
    {"Which river flows through the old town of Heidelberg? A. Rhine B. Neckar", NEAR},
    {"Which river flows through the capital of Hungary?", NEW},
    {"Which river flows through the old town of Heidelberg? Neckar How long is it?", SAME},
    {"How long is it?", NEW},
    {"why does ice float on water although it is solid?", SAME},
    {"Why does wood float on oil although it is wet?", NEW},
    {"Name a metal", SAME},
    {"Name a gas", NEW},
    {"日本で一番長い川の名前を教えて ください", SAME},
    {"日本で一番長い橋の名前を教えてください", NEAR},
    {"日本で一番高い山はどれですか", NEW},
    {"only a prompt", SAME},
    {"A text is one question.", SAME},
    {"", NEW},
};

static int found_in(const struct training_data *t, const char *question, bool near) {
    struct contamination c = {0};
    contamination_add(&c, t, question, NULL, near);
    assert_int_equal(c.of, 1);
    int found = c.questions == 0 ? NEW : c.near ? NEAR : SAME;
    assert_true((c.example != NULL) == (found != NEW));
    contamination_release(&c);
    return found;
}

static void test_questions(void **state) {
    (void)state;
    struct training_data *t = data_of(samples);
    for (size_t i = 0; i < ARRAY_LEN(questions); i++) {
        const char *q = questions[i].question;
        int want = questions[i].found;
        if (found_in(t, q, true) != want) fail_msg("'%s' is not %d", q, want);
        if (found_in(t, q, false) != (want == NEAR ? NEW : want)) fail_msg("'%s', not near", q);
        assert_int_equal(found_in(NULL, q, true), NEW);
    }
    json_t *chat = json_pack("{s:[{s:s,s:s},{s:s,s:s}]}", "messages", "role", "system", "content",
                             "be long", "role", "user", "content", "Name a metal");
    struct contamination c = {0};
    contamination_add(&c, t, "", chat, false);
    assert_int_equal(c.questions, 1);
    contamination_release(&c);
    json_decref(chat);
    training_data_release(t);
}

/* Questions of one template differ in words that matter, so they are no near duplicates. */
static void test_template(void **state) {
    (void)state;
    struct buf text = {0};
    for (int i = 0; i < 40; i++)
        buf_printf(
            &text,
            "{\"prompt\":\"A farmer has %d cows and sells %d of them at the market. How many "
            "cows are left?\",\"completion\":\"%d\"}\n",
            50 + i, i, 50);
    struct training_data *t = data_of(text.data);
    assert_int_equal(found_in(t,
                              "A farmer has 99 cows and sells 7 of them at the market. How many "
                              "cows are left?",
                              true),
                     NEW);
    assert_int_equal(found_in(t,
                              "a farmer has 57 cows and sells 7 of them at the market. How many "
                              "cows are left?",
                              true),
                     SAME);
    training_data_release(t);
    buf_release(&text);
}

/* Held-out samples: with the answer of the data, with another one, and new. */
static void test_file(void **state) {
    (void)state;
    struct training_data *t = data_of(samples);
    char *path = file_of("eval.jsonl", "{\"prompt\":\"name a  METAL\",\"completion\":\"Iron\"}\n"
                                       "{\"prompt\":\"Name a metal\",\"completion\":\"gold\"}\n"
                                       "{\"prompt\":\"Name a gas\",\"completion\":\"argon\"}\n"
                                       "{\"text\":\"a text is one question.\"}\n");
    struct contamination c;
    assert_int_equal(contamination_of_file(&c, t, path, &err), OK);
    assert_int_equal(c.of, 4);
    assert_int_equal(c.questions, 3);
    assert_int_equal(c.near, 0);
    assert_int_equal(c.answered, 2);
    assert_string_equal(c.example, "name a metal");
    contamination_release(&c);
    training_data_release(t);
    free(path);
}

static void assert_bounded(const struct hash_list *l, int64_t max) {
    assert_int_equal(l->n, max);
    assert_true(l->limit == l->v[max - 1]);
    for (int64_t i = 1; i < l->n; i++) assert_true(l->v[i - 1] < l->v[i]);
}

/* More questions than a list holds: those up to the limit are found, in the union too. */
static void test_bounds(void **state) {
    (void)state;
    enum { N = 80000, TESTED = 2000 };
    struct buf text = {0};
    for (int i = 0; i < N; i++)
        buf_printf(&text, "{\"prompt\":\"q%d r%d s%d t%d\",\"completion\":\"\"}\n", i, i, i, i);
    struct training_data *t = data_of(text.data), *other = data_of(samples);
    assert_bounded(&t->questions, TRAINING_QUESTIONS_MAX);
    assert_bounded(&t->ngrams, TRAINING_NGRAMS_MAX);
    int found = 0;
    for (int i = 0; i < TESTED; i++) {
        char question[64];
        snprintf(question, sizeof question, "q%d r%d s%d t%d", i, i, i, i);
        found += found_in(t, question, false) == SAME;
    }
    double share = (double)TRAINING_QUESTIONS_MAX / N; // 0.82
    assert_true(found > (share - 0.05) * TESTED && found < (share + 0.05) * TESTED);
    struct model_config shape = fixture_shape(1, 8, 2, 2, 4, 8);
    struct adapter *a = fixture_adapter(&shape, 2, "q_proj", 0.1f, 1);
    adapter_add_training_data(a, other);
    adapter_add_training_data(a, t);
    assert_bounded(&a->training_data->questions, TRAINING_QUESTIONS_MAX);
    assert_true(a->training_data->questions.limit <= t->questions.limit);
    for (int64_t i = 0; i < other->questions.n; i++)
        assert_true(hash_list_has(&a->training_data->questions, other->questions.v[i]) ==
                    (other->questions.v[i] <= a->training_data->questions.limit));
    adapter_release(a);
    training_data_release(t);
    training_data_release(other);
    buf_release(&text);
}

static struct adapter *adapter_of(uint64_t seed, const char *data) {
    struct model_config shape = fixture_shape(1, 8, 2, 2, 4, 8);
    struct adapter *a = fixture_adapter(&shape, 2, "q_proj,v_proj", 0.1f, seed);
    struct training_data *t = data ? data_of(data) : NULL;
    adapter_add_training_data(a, t);
    training_data_release(t);
    return a;
}

static const char first[] = "{\"prompt\":\"the first\",\"completion\":\"1\"}",
                  second[] = "{\"prompt\":\"the second\",\"completion\":\"2\"}";

static void assert_knows(const struct adapter *a, bool knows_first, bool knows_second) {
    assert_int_equal(found_in(a->training_data, "The first", true), knows_first ? SAME : NEW);
    assert_int_equal(found_in(a->training_data, "The second", true), knows_second ? SAME : NEW);
}

static void assert_child_knows(struct adapter *child, bool knows_first, bool knows_second) {
    if (!child) fail_msg("%s", err.text);
    assert_knows(child, knows_first, knows_second);
    adapter_release(child);
}

static void test_children(void **state) {
    (void)state;
    struct adapter *a = adapter_of(1, first), *b = adapter_of(2, second), *c = adapter_of(3, NULL),
                   *list[2] = {a, b};
    assert_child_knows(adapter_blend(a, b, 0.5f, 0, BLEND_DELTA, &err), true, true);
    assert_child_knows(adapter_blend(a, c, 0.5f, 0, BLEND_LEGACY, &err), true, false);
    assert_child_knows(adapter_mutate(b, 0.5f, 0.1f, false, 1), false, true);
    assert_child_knows(adapter_scale(a, 0.5f), true, false);
    assert_child_knows(adapter_concat(list, (float[]){0.5f, 0.5f}, 2, &err), true, true);
    assert_child_knows(adapter_to_f32(b), false, true);
    const struct adapter_operator *op;
    for (int i = 0; (op = operator_at(i)); i++) {
        struct operands x = {
            .parents = list, .n_parents = MIN(op->max_parents, 2), .step = NAN, .seed = 1};
        struct adapter *child = operator_apply(op, &x, &err);
        if (!child) fail_msg("%s: %s", op->name, err.text);
        assert_knows(child, true, x.n_parents == 2);
        adapter_release(child);
    }
    adapter_release(a), adapter_release(b), adapter_release(c);
}

static void assert_file_knows(const char *dir, const struct model_config *shape, bool knows_first,
                              bool knows_second) {
    struct adapter *a = adapter_load(dir, shape, &err);
    assert_child_knows(a, knows_first, knows_second);
}

static void test_saved(void **state) {
    (void)state;
    struct adapter *a = adapter_of(1, first), *c = adapter_of(3, NULL);
    char *dir = path_join(root, "saved"), *path = path_join(dir, "training_data.hashes");
    assert_int_equal(adapter_save(a, dir, "", &err), OK);
    assert_file_knows(dir, &a->shape, true, false);
    struct buf file = {0};
    assert_int_equal(file_read(path, 1 << 20, &file, &err), OK);
    assert_int_equal(file.len, 40 + 8 * 2); // the question, and the question with its answer
    for (size_t n = 0; n < file.len; n++) { // any part of the file is ignored
        assert_int_equal(file_write(path, file.data, n, &err), OK);
        assert_file_knows(dir, &a->shape, false, false);
    }
    for (size_t i = 0; i < 40; i += 8) { // as is a header with another number or limit
        struct buf wrong = {0};
        buf_add(&wrong, file.data, file.len);
        memset(wrong.data + i, i < 24 ? 0x7f : 0, 8);
        assert_int_equal(file_write(path, wrong.data, wrong.len, &err), OK);
        if (i < 32) assert_file_knows(dir, &a->shape, false, false);
        buf_release(&wrong);
    }
    buf_release(&file);
    assert_int_equal(adapter_save(c, dir, "", &err), OK); // the old file does not stay
    assert_false(path_exists(path));
    adapter_release(a), adapter_release(c);
    free(dir), free(path);
}

static void test_versions(void **state) {
    (void)state;
    struct adapter *a = adapter_of(1, first), *b = adapter_of(2, second), *c = adapter_of(3, NULL);
    char *dir = path_join(root, "published"), hash[HASH_LEN];
    assert_int_equal(adapter_save(a, dir, "", &err), OK); // a version of another program
    assert_int_equal(adapter_publish(b, dir, "", NULL, &err), OK);
    assert_file_knows(dir, &a->shape, false, true);
    assert_int_equal(adapter_publish(c, dir, "", NULL, &err), OK);
    assert_file_knows(dir, &a->shape, false, false);
    assert_int_equal(adapter_rollback(dir, &a->shape, NULL, hash, &err), OK);
    assert_file_knows(dir, &a->shape, false, true);
    assert_int_equal(adapter_rollback(dir, &a->shape, a->hash, hash, &err), OK);
    assert_file_knows(dir, &a->shape, true, false);
    adapter_release(a), adapter_release(b), adapter_release(c);
    free(dir);
}

static int group_setup(void **state) {
    (void)state;
    log_quiet = log_muted = true;
    snprintf(root, sizeof root, "/tmp/shoal-test-contamination-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int group_teardown(void **state) {
    (void)state;
    return folder_remove(root);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_questions), cmocka_unit_test(test_template),
        cmocka_unit_test(test_file),      cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_children),  cmocka_unit_test(test_saved),
        cmocka_unit_test(test_versions),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
