/*
 * test_sft: runs of supervised fine-tuning: kill and resume, plans, runs that stop at a NaN, and
 * the training options with the names of other programs.
 */
#define _GNU_SOURCE /* fopencookie */
#include "train/train.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
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
static char *write_samples(const char *name, const char *word, int n) {
    char *file = xasprintf("/tmp/shoal-test-sft-%d-%s.jsonl", (int)getpid(), name);
    struct buf b = {0};
    for (int i = 0; i < n; i++)
        buf_printf(&b, "{\"prompt\":\"%d\",\"completion\":\"%s %d\"}\n", i, word, i * 3);
    assert_int_equal(file_write(file, b.data, b.len, &err), OK);
    buf_release(&b);
    return file;
}

struct exit_at_line {
    int lines, limit;
};

/* A log that ends the process in the middle of the run, like a power failure. */
static ssize_t stopper_write(void *cookie, const char *text, size_t n) {
    struct exit_at_line *s = cookie;
    (void)text;
    if (++s->lines == s->limit) _exit(9);
    return (ssize_t)n;
}

static void run_until(const struct model *m, struct train_job *jobs, const struct train_options *o,
                      const char *state, int limit) {
    pid_t child = fork();
    int status;
    if (child == 0) {
        struct exit_at_line s = {.limit = limit};
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
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    struct train_options o = options();
    char *a = write_samples("a", "yes", 5), *b = write_samples("b", "no", 4), *log_text = NULL;
    char *saved = xasprintf("/tmp/shoal-test-sft-%d.state", (int)getpid());
    struct train_job whole[2] = {{.name = "a", .data = a}, {.name = "b", .data = b}}, again[2],
                     alone;
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
    struct train_job other[2] = {whole[0], whole[1]};
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

static struct model *tiny_model(void) {
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    return model_new_random(&c, 1, NUMERIC_EXACT);
}

/* The plan's counts are those of the run's log. */
static void test_plan(void **state) {
    (void)state;
    struct model *m = tiny_model();
    struct train_options o = options();
    struct training_plan p;
    o.max_steps = 0;
    o.epochs = 2;
    o.bsz = 2;
    char *a = write_samples("a", "はい", 9), *b = write_samples("b", "no", 4), *log_text = NULL;
    size_t log_size;
    struct train_job jobs[2] = {{.name = "a", .data = a, .eval_data = b},
                                {.name = "b", .data = b, .eval_data = b}};
    assert_int_equal(sft_plan_make(m, jobs, 2, &o, NULL, NULL, &p, &err), OK);
    assert_int_equal(jobs[0].lint.eval_samples.n, 0);
    assert_int_equal(jobs[0].lint.eval_prompts.n, 4); /* both ask 0, 1, 2, 3 */
    assert_int_equal(jobs[1].lint.eval_samples.n, 4);
    assert_int_equal(p.updates, 3);
    assert_int_equal(p.samples_per_update, 6);
    assert_int_equal(p.samples, 36);
    assert_int_equal(p.n_first, 4);
    assert_int_equal(p.first[1].adapter, 1);
    assert_int_equal(p.passes, 3);
    assert_int_equal(p.max_samples, 12);
    assert_true(p.bytes > 2 * sizeof(float) * (size_t)model_param_count(&m->config));
    assert_true(p.pass_seconds > 0 && p.seconds >= p.pass_seconds);
    assert_int_equal(sft_run(m, jobs, 2, &o, NULL, NULL, NULL, &err), ERR_STATE);
    assert_non_null(strstr(err.text, "4 of 4 evaluation samples are in the data of 'b'"));
    jobs[1].eval_data = NULL;
    FILE *log = open_memstream(&log_text, &log_size);
    assert_int_equal(sft_run(m, jobs, 2, &o, NULL, NULL, log, &err), OK);
    fclose(log);
    int64_t tokens = 0, lines = 0;
    for (char *line = log_text, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
        json_t *v = json_parse(line, (size_t)(end - line), "log", &err);
        tokens += json_integer_value(json_object_get(v, "tokens"));
        json_decref(v);
    }
    assert_int_equal(lines, p.updates);
    assert_in_range(p.tokens, tokens * 9 / 10,
                    tokens * 11 / 10); /* estimated for two epochs from one */
    training_plan_release(&p);
    for (int j = 0; j < 2; j++) adapter_release(jobs[j].result);
    unlink(a), unlink(b);
    free(a), free(b), free(log_text);
    model_close(m);
    options_release(train_option_rows, &o);
}

/* With evolution strategies, every member evaluates every sample. */
static void test_members_plan(void **state) {
    (void)state;
    struct model *m = tiny_model();
    struct train_options o = options();
    struct es_options es;
    struct training_plan p;
    options_default(es_option_rows, &es);
    es.population = 6;
    o.max_steps = 0;
    o.epochs = 2;
    o.lora_dropout = 0;
    char *a = write_samples("a", "はい", 6), *log_text = NULL, *last;
    size_t log_size;
    struct train_job job = {.name = "a", .data = a};
    assert_int_equal(sft_plan_make(m, &job, 1, &o, &es, NULL, &p, &err), OK);
    FILE *log = open_memstream(&log_text, &log_size);
    const struct train_callbacks watch = train_jsonl_callbacks(log);
    assert_int_equal(sft_run_with_callbacks(m, &job, 1, &o, &es, NULL, NULL, &watch, &err), OK);
    fclose(log);
    int64_t tokens = 0;
    for (char *line = log_text; (last = strstr(line, "\"tokens\":")); line = last + 1)
        tokens += strtol(last + strlen("\"tokens\":"), NULL, 10);
    assert_int_equal(p.updates, 4);
    assert_int_equal(p.tokens, tokens);
    assert_int_equal(p.tokens, 6 * 2 * job.lint.tokens);
    assert_int_equal(p.n_first, 1);
    assert_true(p.bytes > 0 &&
                p.bytes < sizeof(float) * 50 * (size_t)model_param_count(&m->config));
    assert_true(p.pass_seconds > 0 && p.seconds >= p.pass_seconds);
    training_plan_release(&p);
    adapter_release(job.result);
    unlink(a);
    free(a), free(log_text);
    model_close(m);
    options_release(es_option_rows, &es);
    options_release(train_option_rows, &o);
}

/* A learning rate that makes the loss non-finite: the run stops at once and reports the update and
 * the last saved one. */
static void test_nonfinite_loss(void **state) {
    (void)state;
    struct model *m = tiny_model();
    struct train_options o = options();
    o.save_steps = 1;
    o.lr = 1e30;
    o.max_grad_norm = 0;
    char *a = write_samples("a", "yes", 5);
    char *saved = xasprintf("/tmp/shoal-test-sft-%d.state", (int)getpid()), hash[2][HASH_LEN];
    struct train_job job = {.name = "a", .data = a};
    assert_int_equal(sft_run(m, &job, 1, &o, NULL, saved, NULL, &err), ERR_NUMERIC);
    assert_non_null(strstr(err.text, "layers."));
    char *kept = xasprintf("'%s' holds at least update ", saved);
    assert_non_null(strstr(err.text, kept));
    assert_null(job.result);
    assert_int_equal(sha256_file(saved, hash[0], &err), OK);
    assert_int_equal(sft_run(m, &job, 1, &o, NULL, saved, NULL, &err), ERR_NUMERIC);
    assert_int_equal(sha256_file(saved, hash[1], &err), OK);
    assert_string_equal(hash[0], hash[1]);
    unlink(a), unlink(saved);
    free(a), free(saved), free(kept);
    model_close(m);
    options_release(train_option_rows, &o);
}

/* A legacy command line, and PEFT's and TRL's names. */
static void test_names(void **state) {
    (void)state;
    static const char *const lines[][16] = {
        {"--r", "16", "--target", "q_proj", "v_proj", "--epochs", "3", "--lr", "0.001", "--bsz",
         "2", "--grad_accum", "8"},
        {"--lora_r", "16", "--target_modules=q_proj,v_proj", "--num_train_epochs", "3",
         "--learning_rate", "1e-3", "--per_device_train_batch_size", "2",
         "--gradient_accumulation_steps", "8"},
        {"--lora-r=16", "--target", "v_proj", "--target", "q_proj", "--epochs=3", "--learning-rate",
         "1e-3", "--batch-size", "2", "--grad-accum", "8"},
    };
    struct model_config shape;
    assert_int_equal(model_preset_find("fry-1", &shape, &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        struct train_options o;
        struct strings rest = {0};
        struct adapter_config c;
        int n = 0;
        while (n < 16 && lines[i][n]) n++;
        options_default(train_option_rows, &o);
        if (options_parse(train_option_rows, &o, n, (char **)(uintptr_t)lines[i], &rest, &err))
            fail_msg("%s", err.text);
        assert_int_equal(rest.n, 0);
        assert_true(o.r == 16 && o.epochs == 3 && o.lr == 1e-3 && o.bsz == 2 && o.grad_accum == 8);
        assert_int_equal(train_adapter_config(&o, &shape, &c, &err), OK);
        assert_null(c.modules);
        assert_true(c.alpha == 32 && c.r == 16 && !c.dora && !c.rslora);
        for (int p = 0; p < N_PROJ; p++) assert_int_equal(c.target[p], p == PROJ_Q || p == PROJ_V);
        options_release(train_option_rows, &o);
    }
    for (const struct option_row *row = train_option_rows; row->name; row++) {
        const struct option_row *of = train_option_rows;
        if (row->type != OPT_ALIAS) continue;
        while (of->name && strcmp(of->name, row->default_value) != 0) of++;
        assert_non_null(of->name);
        assert_int_not_equal(of->type, OPT_ALIAS);
    }
}

/* Bit l of `want`: layer l of six is adapted; 0: refused. */
static void check_layers(const char *text, uint32_t want, const struct model_config *shape) {
    const char *argv[] = {"--layers", text, "--target", "v_proj"};
    struct train_options o;
    struct adapter_config c;
    struct strings rest = {0};
    options_default(train_option_rows, &o);
    assert_int_equal(options_parse(train_option_rows, &o, 4, (char **)(uintptr_t)argv, &rest, &err),
                     OK);
    assert_int_equal(train_adapter_config(&o, shape, &c, &err), want ? OK : ERR_USAGE);
    for (int32_t i = 0; want && i < 6 * N_PROJ; i++)
        assert_int_equal(adapter_module_at(&c, i / N_PROJ, i % N_PROJ).r,
                         i % N_PROJ == PROJ_V && want >> i / N_PROJ & 1 ? o.r : 0);
    assert_true((c.modules == NULL) == (want == 63 || want == 0));
    free((void *)(uintptr_t)c.modules);
    options_release(train_option_rows, &o);
}

static void test_layers(void **state) {
    (void)state;
    struct model_config shape;
    assert_int_equal(model_preset_find("fry-1", &shape, &err), OK);
    assert_int_equal(shape.n_layers, 6);
    check_layers("all", 63, &shape);
    check_layers("0-5", 63, &shape);
    check_layers("4,5", 48, &shape);
    check_layers("1 3-4", 26, &shape);
    check_layers("0", 1, &shape);
    static const char *const refused[] = {"6", "3-6", "4-3", "-1", "x", "2x", "1-", " ", "1-2-3"};
    for (size_t i = 0; i < ARRAY_LEN(refused); i++) check_layers(refused[i], 0, &shape);
}

/* epochs, lr, bsz, grad_accum, separated by blanks, for n samples and a model of this width. */
static const char *adapted(const char *given, int64_t n, int32_t width) {
    static char text[64];
    struct train_options o = {0};
    assert_int_equal(
        sscanf(given, "%lf %lf %" SCNd64 " %" SCNd64, &o.epochs, &o.lr, &o.bsz, &o.grad_accum), 4);
    train_options_adapt(&o, n, width);
    snprintf(text, sizeof text, "%g %g %d %d", o.epochs, o.lr, (int)o.bsz, (int)o.grad_accum);
    return text;
}

static void test_adapted_options(void **state) {
    (void)state;
    assert_string_equal(adapted("0 0 0 0", 1, 192), "10 0.0031 1 1");
    assert_string_equal(adapted("0 0 0 0", 40, 576), "10 0.0013 4 1");
    assert_string_equal(adapted("0 0 0 0", 160, 2048), "10 0.00049 16 1");
    assert_string_equal(adapted("0 0 0 0", 1600, 4096), "2 0.00029 16 1");
    assert_string_equal(adapted("0 0 0 0", 1000000, 2000), "1 0.0005 16 1");
    assert_string_equal(adapted("0 0 4 0", 1600, 256), "2 0.0025 4 4");
    assert_string_equal(adapted("0 0 0 8", 1600, 256), "2 0.0025 2 8");
    assert_string_equal(adapted("0 0 64 0", 1600, 256), "8 0.0025 64 1");
    assert_string_equal(adapted("3 0.1 2 5", 40, 256), "3 0.1 2 5");
    struct train_options o = {.lr = 0.5};
    train_options_fix(&o);
    assert_true(o.lr == 0.5 && o.epochs == 1 && o.bsz == 1 && o.grad_accum == 16);
}

static void test_options(void **state) {
    (void)state;
    struct train_options o;
    options_default(train_option_rows, &o);
    assert_int_equal(o.r, 32);
    assert_true(o.lora_dropout == 0.05 && o.beta2 == 0.999 && o.eps == 1e-8);
    assert_string_equal(o.lr_scheduler, "cosine");
    assert_string_equal(o.optim, "adamw");
    assert_true(o.momentum == 0.9 && !o.gradient_checkpointing && !o.use_dora && !o.use_rslora);
    struct train_job job = {.name = "x", .data = "none.jsonl"};
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    free(o.lr_scheduler);
    o.lr_scheduler = xstrdup("zigzag");
    assert_int_equal(sft_run(m, &job, 1, &o, NULL, NULL, NULL, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "'zigzag' is not known; there are cosine, linear, constant"));
    free(o.lr_scheduler);
    o.lr_scheduler = xstrdup("linear");
    free(o.optim);
    o.optim = xstrdup("lion");
    assert_int_equal(sft_run(m, &job, 1, &o, NULL, NULL, NULL, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "'lion' is not known; there are adamw, adamw_8bit, sgd"));
    model_close(m);
    options_release(train_option_rows, &o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_and_resume),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_adapted_options),
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_nonfinite_loss),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_members_plan),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
