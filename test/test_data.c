/*
 * test_data: training files in every form that is accepted, what becomes a target, and how wrong
 * files are refused.
 *
 * The tokenizer is the byte one, so expected lengths and masks can be read off the text. The
 * persona file of the first predecessor (pretty-printed objects one after another, Japanese) is
 * here in its own shape.
 */
#define _GNU_SOURCE /* fopencookie */
#include "train/train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static struct tokenizer *tok;
static char path[64];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    tok = tok_byte_fallback(300);
    snprintf(path, sizeof path, "/tmp/shoal-test-data-%d.jsonl", (int)getpid());
    return tok ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    tok_free(tok);
    unlink(path);
    return 0;
}

static int load(struct dataset *d, const char *text, int32_t max_length) {
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    return dataset_load(d, path, tok, max_length, &err);
}

/* The targets of a sample, decoded. */
static char *targets_text(const struct sample *s) {
    struct buf b = {0};
    struct ids ids = {0};
    for (int32_t i = 1; i < s->n; i++)
        if (s->mask[i]) ids_add(&ids, s->tokens[i]);
    tok_decode_all(tok, ids.v, ids.n, true, &b);
    ids_release(&ids);
    buf_puts(&b, "");
    return b.data;
}

static void targets_are(const struct sample *s, const char *expected) {
    char *text = targets_text(s);
    if (!strstr(text, expected)) fail_msg("targets are '%s', not '%s'", text, expected);
    free(text);
}

static void test_messages(void **state) {
    (void)state;
    struct dataset d;
    const char *text =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"be "
        "kind\"},{\"role\":\"user\",\"content\":\"one\"},"
        "{\"role\":\"assistant\",\"content\":\"TWO\"},{\"role\":\"user\",\"content\":\"three\"},"
        "{\"role\":\"assistant\",\"content\":\"FOUR\"}],\"id\":7}\n"
        "\n"
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
        "\"Y\"}]}\n";
    assert_int_equal(load(&d, text, 0), OK);
    assert_int_equal(d.n, 2);
    assert_int_equal(d.cut, 0);
    targets_are(&d.v[0], "TWO");
    targets_are(&d.v[0], "FOUR");
    char *learned = targets_text(&d.v[0]);
    assert_null(strstr(learned, "three"));
    assert_null(strstr(learned, "kind"));
    free(learned);
    targets_are(&d.v[1], "Y");
    int64_t targets = 0, tokens = 0;
    for (int i = 0; i < d.n; i++) {
        tokens += d.v[i].n;
        for (int32_t j = 1; j < d.v[i].n; j++) targets += d.v[i].mask[j];
    }
    assert_int_equal(d.targets, targets);
    assert_int_equal(d.tokens, tokens);
    assert_int_equal(strlen(d.hash), HASH_LEN - 1);
    dataset_release(&d);
}

/* As the first predecessor wrote them: objects over several lines, one after another. */
/* clang-format off */
static const char *const pretty =
    "{\"messages\":[\n"
    "  {\"role\":\"system\",\"content\":\"あなたは厳密な論理検証を重視する批判的思考の専門家です。\"},\n"
    "  {\"role\":\"user\",\"content\":\"ソクラテスは人間である。人間は死ぬ。ソクラテスは死ぬか？\"},\n"
    "  {\"role\":\"assistant\",\"content\":\"はい。三段論法により結論は「ソクラテスは死ぬ」です。\"}\n"
    "]}\n"
    "{\"messages\":[\n"
    "  {\"role\":\"system\",\"content\":\"あなたは厳密な論理検証を重視する批判的思考の専門家です。\"},\n"
    "  {\"role\":\"user\",\"content\":\"次の主張の前提の妥当性を検証してください: ...\"},\n"
    "  {\"role\":\"assistant\",\"content\":\"前提Aは観察データXにより支持されますが、Bは...\"}\n"
    "]}\n";
/* clang-format on */

static void test_pretty_japanese(void **state) {
    (void)state;
    struct dataset d;
    assert_int_equal(load(&d, pretty, 0), OK);
    assert_int_equal(d.n, 2);
    targets_are(&d.v[0], "はい。三段論法により結論は「ソクラテスは死ぬ」です。");
    targets_are(&d.v[1], "前提Aは観察データXにより支持されますが、Bは...");
    dataset_release(&d);
}

static void test_other_forms(void **state) {
    (void)state;
    struct dataset d;
    assert_int_equal(load(&d, "{\"prompt\":\"\",\"completion\":\"alone\"}", 0), OK);
    targets_are(&d.v[0], "lone");
    dataset_release(&d);
    assert_int_equal(
        load(&d, "[{\"prompt\":\"2+2=\",\"completion\":\" four\"},\n {\"text\":\"all of it\"}]", 0),
        OK);
    assert_int_equal(d.n, 2);
    targets_are(&d.v[0], "four");
    char *learned = targets_text(&d.v[0]);
    assert_null(strstr(learned, "2+2"));
    free(learned);
    targets_are(&d.v[1],
                "ll of it"); /* the first token has nothing before it unless there is a BOS */
    for (int i = 0; i < 2 && tok_eos(tok) >= 0; i++) {
        assert_int_equal(d.v[i].tokens[d.v[i].n - 1], tok_eos(tok));
        assert_int_equal(d.v[i].mask[d.v[i].n - 1], 1);
    }
    dataset_release(&d);
}

static void test_cut(void **state) {
    (void)state;
    struct dataset whole, d;
    const char *text = "{\"prompt\":\"ab\",\"completion\":\"cdefghijklmnop\"}\n{\"text\":\"xy\"}\n"
                       "{\"prompt\":\"a prompt that fills all the length\",\"completion\":\"z\"}\n";
    assert_int_equal(load(&whole, text, 0), OK);
    assert_int_equal(load(&d, text, 8), OK);
    assert_int_equal(whole.cut, 0);
    assert_int_equal(whole.n, 3);
    assert_int_equal(d.cut, 2);
    assert_int_equal(d.n, 2); /* the third has no target left */
    assert_int_equal(d.v[0].n, 8);
    assert_memory_equal(d.v[0].tokens, whole.v[0].tokens, 8 * sizeof(int32_t));
    assert_true(d.targets < whole.targets);
    dataset_release(&d);
    dataset_release(&whole);
    assert_int_equal(load(&d, "{\"prompt\":\"a long enough prompt\",\"completion\":\"z\"}", 8),
                     ERR_FORMAT);
    assert_non_null(strstr(err.text, "cut before"));
}

static void test_refused(void **state) {
    (void)state;
#define GOOD "{\"text\":\"good\"}\n"
    static const struct {
        const char *text, *word;
    } cases[] = {
        {GOOD GOOD "{\"text\": \n", "line"},
        {GOOD GOOD "{\"text\": nonsense}\n", "line 3"},
        {GOOD GOOD "[1]\n", "line 3"},
        {GOOD "{\"txt\":\"x\"}\n",
         "line 2: 'messages', 'prompt' and 'completion', or 'text' is missing"},
        {GOOD "\n{\"prompt\":\"x\"}\n", "line 3: 'completion' is missing"},
        {"{\"completion\":\"x\"}\n", "line 1: 'prompt' is missing"},
        {"{\"text\":5}\n", "line 1: 'text' must be a string"},
        {"{\"text\":\"x\",\"messages\":[]}\n", "only one of"},
        {"{\"messages\":{}}\n", "'messages' must be a list"},
        {"{\"messages\":[]}\n", "no turn of the assistant"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n", "no turn of the assistant"},
        {"{\"messages\":[7]}\n", "'messages[0]' must be an object"},
        {"{\"messages\":[{\"role\":\"user\"}]}\n", "'messages[0].content' is missing"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"content\":\"x\"}]}\n",
         "'messages[1].role' is missing"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}\n",
         "'messages[0].content' must be a string"},
        {"{\"messages\":[{\"role\":\"owl\",\"content\":\"x\"}]}\n",
         "'messages[0].role' must be system"},
        {"{\"prompt\":\"\",\"completion\":5}\n", "'completion' must be a string"},
        {"", "no sample"},
        {"[]", "no sample"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct dataset d;
        assert_int_equal(load(&d, cases[i].text, 0), ERR_FORMAT);
        if (!strstr(err.text, cases[i].word))
            fail_msg("'%s' does not say '%s'", err.text, cases[i].word);
        if (!strstr(err.text, path)) fail_msg("'%s' does not name the file", err.text);
        assert_null(d.v);
    }
    struct dataset d;
    assert_int_equal(dataset_load(&d, "/nonexistent/x.jsonl", tok, 0, &err), ERR_MISSING);
}

static struct train_options options(void) {
    struct train_options o;
    options_default(train_option_rows, &o);
    o.r = 4;
    o.grad_accum = 3;
    o.max_steps = 7;
    o.save_steps = 2;
    o.lr = 1e-2;
    return o;
}

/* Writes n samples about `word` to NAME and returns its path. */
static char *data_write(const char *name, const char *word, int n) {
    char *file = xasprintf("/tmp/shoal-test-data-%d-%s.jsonl", (int)getpid(), name);
    struct buf b = {0};
    for (int i = 0; i < n; i++)
        buf_printf(&b, "{\"prompt\":\"%d\",\"completion\":\"%s %d\"}\n", i, word, i * 3);
    assert_int_equal(file_write(file, b.data, b.len, &err), OK);
    buf_release(&b);
    return file;
}

struct stopper {
    int lines, limit;
};

/* A log that ends the process in the middle of the run, as a power cut would. */
static ssize_t stopper_write(void *cookie, const char *text, size_t n) {
    struct stopper *s = cookie;
    (void)text;
    if (++s->lines == s->limit) _exit(9);
    return (ssize_t)n;
}

static void run_until(const struct model *m, struct sft_job *jobs, const struct train_options *o,
                      const char *state, int limit) {
    pid_t child = fork();
    int status;
    if (child == 0) {
        struct stopper s = {.limit = limit};
        FILE *log = fopencookie(&s, "w", (cookie_io_functions_t){.write = stopper_write});
        sft_run(m, jobs, 2, o, NULL, state, log, &err);
        _exit(0);
    }
    waitpid(child, &status, 0);
    assert_int_equal(WEXITSTATUS(status), 9);
}

static void test_kill_and_resume(void **state) {
    (void)state;
    struct model_config c;
    assert_int_equal(shape_find("tiny-llama", &c, &err), OK);
    struct model *m = model_new(&c, 1, CLASS_EXACT);
    struct train_options o = options();
    char *a = data_write("a", "yes", 5), *b = data_write("b", "no", 4), *log_text = NULL;
    char *saved = xasprintf("/tmp/shoal-test-data-%d.state", (int)getpid());
    struct sft_job whole[2] = {{.name = "a", .data = a}, {.name = "b", .data = b}}, again[2], alone;
    size_t log_size;
    memcpy(again, whole, sizeof again);
    alone = whole[1];
    FILE *log = open_memstream(&log_text, &log_size);
    assert_int_equal(sft_run(m, whole, 2, &o, NULL, NULL, log, &err), OK);
    fclose(log);
    run_until(m, again, &o, saved, 5); /* saved after 4 */
    assert_true(path_exists(saved));
    struct pool *pool = pool_new(2);
    assert_int_equal(sft_run(m, again, 2, &o, pool, saved, NULL, &err), OK);
    assert_int_equal(sft_run(m, &alone, 1, &o, pool, NULL, NULL, &err), OK);
    for (int j = 0; j < 2; j++) {
        assert_string_equal(whole[j].result->hash, again[j].result->hash);
        assert_true(whole[j].first_loss == again[j].first_loss);
        assert_true(whole[j].last_loss == again[j].last_loss);
        assert_true(whole[j].last_loss < whole[j].first_loss);
    }
    assert_string_equal(whole[1].result->hash, alone.result->hash);
    o.lr = 2e-2;
    struct sft_job other[2] = {whole[0], whole[1]};
    assert_int_equal(sft_run(m, other, 2, &o, pool, saved, NULL, &err), ERR_MISMATCH);
    assert_non_null(strstr(err.text, "remove it"));
    int lines = 0;
    for (const char *p = log_text; (p = strchr(p, '\n')); p++) lines++;
    assert_int_equal(lines, 7);
    json_t *first = json_parse(log_text, (size_t)(strchr(log_text, '\n') - log_text), "log", &err);
    assert_int_equal(json_integer_value(json_object_get(first, "step")), 1);
    assert_true(json_real_value(json_object_get(json_object_get(first, "losses"), "b")) > 0);
    json_decref(first);
    for (int j = 0; j < 2; j++) adapter_release(whole[j].result), adapter_release(again[j].result);
    adapter_release(alone.result);
    unlink(a), unlink(b), unlink(saved);
    free(a), free(b), free(saved), free(log_text);
    model_close(m);
    options_release(train_option_rows, &o);
    pool_free(pool);
}

static void test_options(void **state) {
    (void)state;
    struct train_options o;
    options_default(train_option_rows, &o);
    assert_int_equal(o.r, 32);
    assert_int_equal(o.grad_accum, 16);
    assert_true(o.lora_dropout == 0.05 && o.lr == 2e-4 && o.beta2 == 0.999 && o.eps == 1e-8);
    assert_string_equal(o.lr_scheduler, "cosine");
    struct sft_job job = {.name = "x", .data = path};
    struct model_config c;
    assert_int_equal(shape_find("tiny-llama", &c, &err), OK);
    struct model *m = model_new(&c, 1, CLASS_EXACT);
    free(o.lr_scheduler);
    o.lr_scheduler = xstrdup("zigzag");
    assert_int_equal(sft_run(m, &job, 1, &o, NULL, NULL, NULL, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "zigzag"));
    model_close(m);
    options_release(train_option_rows, &o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),    cmocka_unit_test(test_pretty_japanese),
        cmocka_unit_test(test_other_forms), cmocka_unit_test(test_cut),
        cmocka_unit_test(test_refused),     cmocka_unit_test(test_kill_and_resume),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
