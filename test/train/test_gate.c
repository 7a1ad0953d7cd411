/*
 * test_gate: the quality gate and its measurements, the log and the page of a run, and the versions
 * of an adapter on disk.
 *
 * The sign-flip test is compared with a recursion over all flips, the forward pass's losses with
 * the trainer's; a small parser checks that every tag of a page is closed. Faults and kills during
 * publication are in test_faults.c.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "fixture.h"
#include "folder.h"
#include "train/train.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char root[64];

static void assert_ok(int rc) {
    if (rc != OK) fail_msg("%s", err.text);
}

static char *path_in_root(const char *name) {
    return path_join(root, name);
}

/* statistics */

static int64_t flips_count(const double *d, int n, double sum, double bar) {
    if (n == 0) return fabs(sum) >= bar - 1e-9;
    return flips_count(d + 1, n - 1, sum + d[0], bar) + flips_count(d + 1, n - 1, sum - d[0], bar);
}

static void test_sign_flip(void **state) {
    (void)state;
    double d[40];
    for (int n = 1; n <= 12; n++) {
        struct rng r = rng_make(3, RNG_TEST, (uint32_t)n, 0);
        double sum = 0;
        for (int i = 0; i < n; i++) {
            d[i] = (double)(int)rng_below(&r, 9) - 3; // small integers: many ties
            sum += d[i];
        }
        double want = (double)flips_count(d, n, 0, fabs(sum)) / (double)(1 << n);
        assert_float_equal(stats_sign_flip_test(d, n), want, 1e-12);
    }
    double same[5] = {1, 1, 1, 1, 1}, none[40] = {0};
    assert_float_equal(stats_sign_flip_test(same, 5), 2.0 / 32, 1e-12);
    assert_float_equal(stats_sign_flip_test(none, 40), 1, 0);
    assert_float_equal(stats_sign_flip_test(none, 0), 1, 0);
    /* Sampled flips agree with the normal approximation of the same test. */
    for (int i = 0; i < 40; i++) d[i] = i % 2 ? 1.0 : -0.4;
    double sum = 0, square = 0;
    for (int i = 0; i < 40; i++) sum += d[i], square += d[i] * d[i];
    assert_float_equal(stats_sign_flip_test(d, 40), erfc(sum / sqrt(2 * square)), 0.02);
}

/* The gate's input: n pairs with gains of alternately mean + spread and mean - spread. */
static struct gate_comparison make_comparison(int n, double gain, double spread) {
    double before[400], after[400];
    for (int i = 0; i < n; i++) {
        before[i] = 2 + 0.3 * (i % 7);
        after[i] = before[i] - gain + (i % 2 ? spread : -spread);
    }
    return gate_compare(before, after, n);
}

static void test_decisions(void **state) {
    (void)state;
    static const struct {
        int n;
        double gain, spread;
        int n_retain;
        double retained, retain_spread;
        bool publish;
        const char *why;
    } cases[] = {
        {40, 0.2, 0.1, 0, 0, 0, true, "it is better"},
        {40, 0.0, 0.0, 0, 0, 0, false, "not better"}, /* the same adapter */
        {40, 0.0, 0.3, 0, 0, 0, false, "it is"},      /* a difference of roundings */
        {40, -0.2, 0.1, 0, 0, 0, false, "not better"},
        {40, 0.01, 0.3, 0, 0, 0, false, "beyond chance"},
        {400, 0.01, 0.05, 0, 0, 0, true, "it is better"},
        {1, 5, 0, 0, 0, 0, false, "so few"},
        {5, 5, 0.1, 0, 0, 0, false, "so few"}, /* 2/32 > 0.05 */
        {6, 5, 0.1, 0, 0, 0, true, "it is better"},
        {0, 0, 0, 0, 0, 0, true, "nothing was held out"},
        {40, 0.2, 0.1, 40, 0, 0.01, true, "it is better"},
        {40, 0.2, 0.1, 40, -0.2, 0.01, false, "may lose"},
        {40, 0.2, 0.1, 40, -0.04, 0.2, false, "more samples would narrow"},
        {40, 0.2, 0.1, 40, -0.04, 0.001, true, "it is better"}, /* a loss within the tolerance */
        {40, 0.2, 0.1, 1, 0, 0, false, "may lose"},
        {0, 0, 0, 40, -0.2, 0.01, false, "may lose"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct gate g = {.eval = make_comparison(cases[i].n, cases[i].gain, cases[i].spread),
                         .retain = make_comparison(cases[i].n_retain, cases[i].retained,
                                                   cases[i].retain_spread)};
        gate_decide(&g, 0.05, 0.05);
        if (g.publish != cases[i].publish || !strstr(g.why, cases[i].why))
            fail_msg("case %zu: %d, '%s'", i, g.publish, g.why);
        json_t *v = gate_json(&g);
        assert_non_null(v);
        assert_true(json_is_true(json_object_get(v, "published")) == g.publish);
        json_decref(v);
    }
}

/* measuring */

static struct train_sample sample_of(uint32_t id, int32_t n, int32_t vocab, bool all) {
    struct rng r = rng_make(7, RNG_TEST, id, 0);
    struct train_sample s = {
        .tokens = xcalloc((size_t)n, sizeof(int32_t)), .mask = xcalloc((size_t)n, 1), .n = n};
    for (int32_t i = 0; i < n; i++) {
        s.tokens[i] = (int32_t)rng_below(&r, (uint32_t)vocab);
        s.mask[i] = all || (i >= n / 2 && i % 3 != 0) || i == n - 1;
    }
    return s;
}

static void test_token_losses(void **state) {
    (void)state;
    enum { N = 7 };
    struct model *m = fixture_model("tiny-qwen3", false, TENSOR_F32, NUMERIC_EXACT);
    struct adapter *a = fixture_adapter(&m->config, 3, "all-linear", 0.2f, 1),
                   *zero = adapter_scale(a, 0);
    struct dataset d = {.v = xcalloc(N, sizeof *d.v), .n = N};
    static const int32_t lengths[N] = {2, 5, 64, 65, 66, 33, 129};
    for (int i = 0; i < N; i++)
        d.v[i] = sample_of((uint32_t)i, MIN(lengths[i], m->config.max_seq_len),
                           m->config.vocab_size, i % 2);
    double base[N], none[N], with[N], threaded[N];
    struct pool *pool = pool_new(3);
    assert_ok(gate_eval_nll(m, NULL, &d, DTYPE_F32, NULL, base, &err));
    assert_ok(gate_eval_nll(m, zero, &d, DTYPE_F32, NULL, none, &err));
    assert_ok(gate_eval_nll(m, a, &d, DTYPE_F32, NULL, with, &err));
    assert_ok(gate_eval_nll(m, a, &d, DTYPE_F32, pool, threaded, &err));
    assert_memory_equal(with, threaded, sizeof with);
    struct train_options o;
    options_default(train_option_rows, &o);
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, NULL, &err);
    assert_non_null(t);
    for (int i = 0; i < N; i++) {
        double nll;
        int64_t targets;
        assert_ok(trainer_eval_loss(t, &d.v[i], 1, &nll, &targets, &err));
        assert_float_equal(with[i], nll / (double)targets, 1e-3 * with[i]);
        assert_float_equal(none[i], base[i], 1e-6 * base[i]);
        assert_true(fabs(with[i] - base[i]) > 1e-6);
    }
    trainer_free(t);
    options_release(train_option_rows, &o);
    dataset_release(&d);
    adapter_release(a);
    adapter_release(zero);
    pool_free(pool);
    model_close(m);
}

/* pages */

/* Every element is closed in order; attributes are quoted or bare words; no bare '<' or '&'. */
static void assert_well_formed(const char *page) {
    char stack[64][16];
    int depth = 0;
    for (const char *p = page; *p; p++) {
        if (*p == '&') {
            size_t n = strcspn(p, ";");
            assert_true(n > 1 && n < 8);
        }
        if (*p != '<') continue;
        size_t len = strcspn(p, ">");
        assert_int_equal(p[len], '>');
        if (p[1] == '!' || strncmp(p, "<meta", 5) == 0 || p[len - 1] == '/') {
            p += len;
            continue;
        }
        bool closes = p[1] == '/';
        const char *name = p + 1 + closes;
        size_t n = strcspn(name, " >/");
        assert_in_range(n, 1, 15);
        if (closes) {
            assert_true(depth > 0);
            depth--;
            if (strncmp(stack[depth], name, n) != 0 || stack[depth][n])
                fail_msg("</%.*s> closes <%s>", (int)n, name, stack[depth]);
        } else {
            assert_true(depth < 64);
            snprintf(stack[depth++], sizeof stack[0], "%.*s", (int)n, name);
        }
        p += len;
    }
    assert_int_equal(depth, 0);
}

static bool contains(const char *page, const char *text) {
    return strstr(page, text) != NULL;
}

static void test_page(void **state) {
    (void)state;
    struct buf b = {0};
    html_page_open(&b, "訓練 <b>&\"\x01");
    json_t *v = json_pack("{s:s,s:f,s:i,s:n,s:[i,s],s:s}", "名前", "批評家 <script>", "lr", 2e-4,
                          "r", 8, "nothing", "list", 1, "a&b", "<k>", "v"),
           *rows = json_pack("[{s:i,s:s},{s:f}]", "a", 1, "b", "丙", "c", 0.5);
    html_table(&b, v);
    html_table(&b, rows);
    html_table(&b, json_object_get(v, "missing"));
    static const double xs[3] = {0, 1, 2}, ys[3] = {1, NAN, 3};
    static const double ranges[][2] = {{0, 1},
                                       {5, 5},
                                       {0, 0},
                                       {-3, 7},
                                       {1e-30, 2e-30},
                                       {1e20, 3e20},
                                       {INFINITY, -INFINITY},
                                       {-1e-5, 1.00001},
                                       {NAN, 1}};
    for (size_t i = 0; i < ARRAY_LEN(ranges); i++) {
        struct plot p = {"損失 <x>", "更新", 0, 3, ranges[i][0], ranges[i][1]};
        plot_open(&b, &p);
        assert_true(p.y1 > p.y0 && isfinite(p.y0) && isfinite(p.y1));
        plot_line(&b, &p, (int)(5 * i), xs, ys, 3);
        plot_close(&b);
    }
    plot_legend(&b, 3, "甲<");
    html_page_close(&b);
    assert_well_formed(b.data);
    assert_true(contains(b.data, "<td>批評家 &lt;script&gt;</td>"));
    assert_true(contains(b.data, "訓練 &lt;b&gt;&amp;&quot;\xef\xbf\xbd"));
    assert_true(contains(b.data, "<th>&lt;k&gt;</th>"));
    assert_false(contains(b.data, "<script"));
    assert_false(contains(b.data, "nan"));
    assert_false(contains(b.data, "inf"));
    json_decref(v);
    json_decref(rows);
    buf_release(&b);
}

static void test_curve(void **state) {
    (void)state;
    static struct curve c;
    enum { N = 10000 };
    double sum = 0;
    for (int i = 0; i < N; i++) curve_add(&c, i, i % 10);
    curve_add(&c, N, NAN);
    assert_true(c.n > CURVE_POINTS / 4 && c.n <= CURVE_POINTS);
    for (int i = 0; i < c.n; i++) {
        sum += c.y[i];
        assert_float_equal(c.x[i], ((double)i + 0.5) * (double)c.points_per_mean - 0.5, 1e-9);
    }
    assert_float_equal(sum / c.n, 4.5, 0.1);
}

/* The axis includes the band; a curve without spreads has none. */
static void test_bands(void **state) {
    (void)state;
    static struct curve c[2], spread[2];
    static const char *const names[2] = {"甲", "乙"};
    struct buf b = {0};
    for (int i = 0; i < 5; i++) {
        curve_add(&c[0], i, 1);
        curve_add(&spread[0], i, 4);
        curve_add(&c[1], i, 2);
    }
    html_page_open(&b, "x");
    plot_bands(&b, "報酬", "step", c, spread, names, 2);
    html_page_close(&b);
    assert_well_formed(b.data);
    const char *first = strstr(b.data, "fill-opacity");
    assert_true(first && !strstr(first + 1, "fill-opacity"));
    assert_true(contains(b.data, ">-3</text>") && contains(b.data, ">5</text>"));
    assert_true(contains(b.data, "乙"));
    buf_release(&b);
}

/* the log of a run */

static char *write_samples(const char *name, const char *word, int n) {
    char *file = path_in_root(name);
    struct buf b = {0};
    for (int i = 0; i < n; i++)
        buf_printf(&b, "{\"prompt\":\"%d\",\"completion\":\"%s %d\"}\n", i, word, i * 3);
    assert_ok(file_write(file, b.data, b.len, &err));
    buf_release(&b);
    return file;
}

struct failing_callbacks { /* forwards events, and fails after a number of them */
    struct train_callbacks forward;
    int n_left;
};
static int killer_begin(void *ctx, int64_t done, const json_t *about, struct error *e) {
    struct failing_callbacks *k = ctx;
    return k->forward.begin(k->forward.ctx, done, about, e);
}
static int killer_update(void *ctx, const struct train_event *event, struct error *e) {
    struct failing_callbacks *k = ctx;
    int rc = k->forward.update(k->forward.ctx, event, e);
    return rc || --k->n_left > 0 ? rc : error_set(e, ERR_STATE, "killed");
}

static int run_logged(const struct model *m, struct train_job *jobs, const struct train_options *o,
                      const char *checkpoint, struct store *store, int limit) {
    struct train_log *l = train_log_open(root, "訓練 <1>", store, "r");
    struct failing_callbacks k = {train_log_callbacks(l), limit};
    const struct train_callbacks watch = {killer_begin, killer_update, &k};
    int rc = sft_run_with_callbacks(m, jobs, 2, o, NULL, NULL, checkpoint, &watch, &err);
    train_log_section(l, "Options", options_json(train_option_rows, o));
    if (rc == OK) assert_ok(train_log_report(l, &err));
    train_log_free(l);
    return rc;
}

/* A run of one method. */
struct method_case {
    const char *name;
    enum train_method method;
    const char *data;
    const char *const *charts; /* headings, NULL last */
};
static int cut_update(void *ctx, const struct train_event *event, struct error *e) {
    struct failing_callbacks *k = ctx;
    int rc = k->forward.update(k->forward.ctx, event, e);
    if (--k->n_left == 0) _exit(9);
    return rc;
}

static int run_method(const struct method_case *c, const struct model *m, const char *dir,
                      int limit) {
    struct train_options o;
    struct rl_options p = {.limits = {0}};
    struct es_options es;
    options_default(train_option_rows, &o);
    options_default(rl_option_rows, &p);
    options_default(es_option_rows, &es);
    o.r = 2, o.bsz = 2, o.grad_accum = 1, o.max_steps = 7, o.save_steps = 3;
    p.num_generations = 2, p.max_new_tokens = 3, p.num_iterations = 2, p.kl_max = 9,
    es.population = 4;
    char *data = path_join(dir, "data.jsonl"), *checkpoint = path_join(dir, "checkpoint.bin"),
         *db = path_join(dir, "shoal.db");
    assert_ok(file_write(data, c->data, strlen(c->data), &err));
    struct store *store = store_open(db, &err);
    json_t *recipe = json_object();
    store_run_add(store, "r", "train", recipe, &err); /* once; the second call finds it */
    struct train_log *l = train_log_open(dir, c->name, store, "r");
    struct train_job jobs[2] = {{.name = "甲", .data = data}, {.name = "乙", .data = data}};
    struct failing_callbacks k = {train_log_callbacks(l), limit};
    const struct train_callbacks watch = {killer_begin, cut_update, &k};
    int rc = c->method == METHOD_ES
                 ? sft_run_with_callbacks(m, jobs, 2, &o, &es, NULL, checkpoint, &watch, &err)
                 : rl_run_with_callbacks(m, jobs, 2, &o, c->method, &p, NULL, NULL, checkpoint,
                                         &watch, &err);
    if (rc == OK) rc = train_log_report(l, &err);
    for (int j = 0; j < 2; j++) adapter_release(jobs[j].result);
    train_log_free(l);
    store_close(store);
    json_decref(recipe);
    options_release(train_option_rows, &o);
    options_release(rl_option_rows, &p);
    options_release(es_option_rows, &es);
    free(data), free(checkpoint), free(db);
    return rc;
}

static int check_step_order(void *ctx, const json_t *line, int at, struct error *e) {
    (void)e;
    static const char *const keys[] = {"loss",    "lr",  "grad_norm", "tokens", "tokens_per_s",
                                       "seconds", "rss", "peak",      "losses"};
    int *n = ctx;
    assert_int_equal(json_integer_value(json_object_get(line, "step")), ++*n);
    assert_int_equal(at, *n);
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) assert_non_null(json_object_get(line, keys[i]));
    assert_true(json_integer_value(json_object_get(line, "peak")) > 100000);
    assert_true(json_is_real(json_object_get(json_object_get(line, "losses"), "乙<&>")));
    return OK;
}

static void test_log(void **state) {
    (void)state;
    struct model_config c;
    assert_ok(model_preset_find("tiny-llama", &c, &err));
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    struct train_options o;
    options_default(train_option_rows, &o);
    o.r = 2, o.grad_accum = 2, o.max_steps = 9, o.save_steps = 3, o.lr = 1e-2;
    char *a = write_samples("a.jsonl", "yes", 4), *b = write_samples("b.jsonl", "いいえ", 3),
         *checkpoint = path_in_root("checkpoint.bin"), *lines = path_in_root("train.jsonl"),
         *page = path_in_root("report.html"), *db = path_in_root("shoal.db");
    struct train_job jobs[2] = {{.name = "甲", .data = a}, {.name = "乙<&>", .data = b}};
    struct store *store = store_open(db, &err);
    assert_non_null(store);
    json_t *recipe = json_object();
    assert_ok(store_run_add(store, "r", "train", recipe, &err));
    json_decref(recipe);
    assert_int_equal(run_logged(m, jobs, &o, checkpoint, store, 5), ERR_STATE);
    assert_true(path_exists(page)); /* of the checkpoint after 3 */
    FILE *f = fopen(lines, "a");
    fputs("{\"step\":6,\"lo", f); /* a kill in the middle of a line */
    fclose(f);
    assert_ok(run_logged(m, jobs, &o, checkpoint, store, 100));
    int n = 0;
    struct buf text = {0};
    assert_ok(json_file_each(lines, check_step_order, &n, &err));
    assert_int_equal(n, 9);
    json_t *metrics = store_metric_list(store, "r", &err);
    assert_int_equal(json_array_size(metrics), 9);
    for (size_t i = 0; i < 9; i++)
        assert_int_equal(json_integer_value(json_object_get(json_array_get(metrics, i), "step")),
                         i + 1);
    json_decref(metrics);
    assert_ok(file_read(page, 1 << 24, &text, &err));
    assert_well_formed(text.data);
    assert_true(contains(text.data, "乙&lt;&amp;&gt;") && contains(text.data, "訓練 &lt;1&gt;"));
    assert_true(contains(text.data, "<th>grad-accum</th><td class=\"n\">2</td>"));
    assert_false(contains(text.data, "<script") || contains(text.data, "http"));
    for (int j = 0; j < 2; j++) adapter_release(jobs[j].result);
    FILE *full = fopen("/dev/full", "w");
    if (full) { /* a full disk ends the run */
        assert_int_equal(sft_run(m, jobs, 2, &o, NULL, NULL, full, &err), ERR_IO);
        assert_true(contains(err.text, "cannot write the training log"));
        fclose(full);
    }
    buf_release(&text);
    store_close(store);
    options_release(train_option_rows, &o);
    model_close(m);
    free(a), free(b), free(checkpoint), free(lines), free(page), free(db);
}

static void assert_log_steps(const char *dir, int64_t n) {
    char *db = path_join(dir, "shoal.db"), *lines = path_join(dir, "train.jsonl");
    struct buf text = {0};
    int count = 0;
    assert_ok(file_read(lines, 1 << 24, &text, &err));
    for (const char *p = text.data; (p = strstr(p, "{\"step\":")); p++)
        assert_int_equal(strtol(p + strlen("{\"step\":"), NULL, 10), ++count);
    assert_int_equal(count, n);
    struct store *store = store_open(db, &err);
    json_t *metrics = store_metric_list(store, "r", &err);
    assert_int_equal(json_array_size(metrics), n);
    json_decref(metrics);
    store_close(store);
    buf_release(&text);
    free(db), free(lines);
}

static void test_log_of_methods(void **state) {
    (void)state;
    static const char pairs[] = "{\"prompt\":\"空?\",\"chosen\":\"青\",\"rejected\":\"赤い\"}\n"
                                "{\"prompt\":\"one\",\"chosen\":\"yes\",\"rejected\":\"no\"}\n";
    static const char *const of_pairs[] = {"Loss", "Margin: implicit reward of chosen",
                                           "Share of pairs", "KL to the start", NULL};
    static const char *const of_rewards[] = {"Reward of completions",
                                             "KL to the start",
                                             "Share of prompts",
                                             "Entropy",
                                             "Length of completions",
                                             "Share of tokens whose ratio is clipped",
                                             "Updates taken back",
                                             "fill-opacity",
                                             NULL};
    static const char *const of_es[] = {"Loss", "Fitness of members", "fill-opacity", NULL};
    static const struct method_case cases[] = {
        {"dpo", METHOD_DPO, pairs, of_pairs},
        {"rloo", METHOD_RLOO, "{\"prompt\":\"空?\",\"answer\":\"青\"}", of_rewards},
        {"es", METHOD_ES, "{\"prompt\":\"空?\",\"completion\":\"青\"}", of_es},
    };
    struct model_config c;
    assert_ok(model_preset_find("tiny-llama", &c, &err));
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *dir = path_in_root(cases[i].name), *page = path_join(dir, "report.html");
        struct buf text = {0};
        int status;
        assert_ok(dir_make(dir, &err));
        pid_t child = fork();
        if (child == 0) _exit(run_method(&cases[i], m, dir, 5) == OK ? 0 : 1);
        waitpid(child, &status, 0);
        assert_int_equal(WEXITSTATUS(status), 9); /* 5 lines, a checkpoint after 3 */
        assert_ok(run_method(&cases[i], m, dir, 0));
        assert_log_steps(dir, 7);
        assert_ok(file_read(page, 1 << 24, &text, &err));
        assert_well_formed(text.data);
        for (const char *const *chart = cases[i].charts; *chart; chart++)
            if (!contains(text.data, *chart)) fail_msg("no '%s' in '%s'", *chart, page);
        assert_true(contains(text.data, "<h2>Gradient norm") &&
                    contains(text.data, "<h2>Memory, MB"));
        assert_true(contains(text.data, "<th>near duplicates</th>"));
        assert_int_equal(contains(text.data, "Reward of"), cases[i].method == METHOD_RLOO);
        buf_release(&text);
        free(dir), free(page);
    }
    model_close(m);
}

/* versions */

static struct adapter *adapter_make(uint64_t seed, int32_t r) {
    struct model_config c;
    assert_ok(model_preset_find("tiny-llama", &c, &err));
    return fixture_adapter(&c, r, "q_proj,v_proj", 0.1f, seed);
}

static void assert_current_version(const char *dir, const struct adapter *a) {
    struct adapter *there = adapter_load(dir, &a->shape, &err);
    if (!there) fail_msg("%s", err.text);
    assert_string_equal(there->hash, a->hash);
    adapter_release(there);
}

static const char *version_field(const json_t *list, size_t i, const char *key) {
    const char *s = json_string_value(json_object_get(json_array_get(list, i), key));
    return s ? s : "";
}

static void test_versions(void **state) {
    (void)state;
    char *dir = path_in_root("絵/agent"), hash[HASH_LEN];
    struct adapter *a = adapter_make(1, 2), *b = adapter_make(2, 2), *c = adapter_make(3, 4),
                   *foreign = adapter_make(4, 3);
    json_t *notes = json_pack("{s:f,s:[s],s:s}", "score", -1.25, "tags", "良い", "hash", "lie");
    assert_int_equal(adapter_rollback(dir, &a->shape, NULL, hash, &err), ERR_MISSING);
    json_t *list = adapter_versions(dir, &err);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    assert_ok(adapter_publish(a, dir, "base", NULL, &err));
    assert_current_version(dir, a);
    assert_int_equal(adapter_rollback(dir, &a->shape, NULL, hash, &err), ERR_MISSING);
    assert_true(contains(err.text, "no previous version"));
    assert_ok(adapter_publish(b, dir, "base", notes, &err));
    assert_current_version(dir, b);
    assert_ok(
        adapter_publish(b, dir, "base", notes, &err)); /* again: nothing is lost, nothing added */
    assert_ok(adapter_publish(c, dir, "base", NULL, &err));
    assert_current_version(dir, c);
    list = adapter_versions(dir, &err);
    assert_int_equal(json_array_size(list), 3);
    assert_string_equal(version_field(list, 0, "hash"), c->hash);
    assert_string_equal(version_field(list, 1, "hash"), b->hash);
    assert_string_equal(version_field(list, 1, "previous"), a->hash);
    assert_true(json_real_value(json_object_get(json_array_get(list, 1), "score")) == -1.25);
    for (size_t i = 0; i < 3; i++)
        assert_true(json_is_true(json_object_get(json_array_get(list, i), "current")) == (i == 0));
    json_decref(list);
    assert_ok(adapter_rollback(dir, &a->shape, NULL, hash, &err));
    assert_string_equal(hash, b->hash);
    assert_ok(adapter_rollback(dir, &a->shape, NULL, hash, &err));
    assert_current_version(dir, a);
    char prefix[13];
    snprintf(prefix, sizeof prefix, "%.12s", c->hash);
    assert_ok(adapter_rollback(dir, &a->shape, prefix, hash, &err));
    assert_current_version(dir, c);
    assert_int_equal(adapter_rollback(dir, &a->shape, "zz", hash, &err), ERR_MISSING);
    assert_int_equal(adapter_rollback(dir, &a->shape, "", hash, &err), ERR_USAGE);
    /* A file that another program wrote there is kept too. */
    assert_ok(adapter_save(foreign, dir, "base", &err));
    assert_ok(adapter_publish(a, dir, "base", NULL, &err));
    assert_current_version(dir, a);
    assert_ok(adapter_rollback(dir, &a->shape, NULL, hash, &err));
    assert_current_version(dir, foreign);
    /* A modified version is refused, and the current version stays. */
    char *inner = xasprintf("%s/.versions/%s", dir, b->hash);
    assert_ok(adapter_save(c, inner, "base", &err));
    assert_int_equal(adapter_rollback(dir, &a->shape, b->hash, hash, &err), ERR_FORMAT);
    assert_true(contains(err.text, "damaged"));
    assert_current_version(dir, foreign);
    assert_ok(adapter_publish(b, dir, "base", NULL,
                              &err)); /* and repaired by publishing the same content */
    assert_current_version(dir, b);
    /* An existing file that cannot be read is not overwritten. */
    struct model_config other;
    assert_ok(model_preset_find("tiny-qwen3", &other, &err));
    other.d_model *= 2;
    struct adapter *wrong = fixture_adapter(&other, 2, "q_proj", 0.1f, 1);
    assert_ok(adapter_save(foreign, dir, "base", &err));
    char *kept = xasprintf("%s/.versions/%s", dir, foreign->hash);
    assert_ok(adapter_save(b, kept, "base", &err)); /* so that its bytes are not recognised */
    assert_int_equal(adapter_publish(wrong, dir, "base", NULL, &err), ERR_MISMATCH);
    assert_true(contains(err.text, "cannot be kept"));
    assert_current_version(dir, foreign);
    assert_ok(adapter_publish(b, dir, "base", NULL, &err));
    free(kept);
    char *where = NULL;
    assert_ok(adapter_save_rejected(c, dir, "base", notes, &where, &err));
    assert_current_version(where, c);
    assert_current_version(dir, b);
    free(where), free(inner), free(dir);
    json_decref(notes);
    adapter_release(a), adapter_release(b), adapter_release(c), adapter_release(foreign);
    adapter_release(wrong);
}

/* Pruning: versions 1 to 5, of which 5 is current and 4 the one before it. Versions 1 and 2 have
 * the scores 0.1 and 0.9. */

static const struct prune_rule no_rule = {.keep = -1, .min_age = -1, .min_score = NAN};

/* The versions that the rule matches, as digits, newest first. */
static void prune_check(const char *dir, struct adapter *const *a, struct prune_rule rule,
                        const char *want) {
    char have[8] = "";
    json_t *list = NULL;
    assert_ok(adapter_versions_prune(dir, &rule, &list, &err));
    for (size_t i = 0; i < json_array_size(list); i++)
        for (int k = 0; k < 5; k++)
            if (strcmp(version_field(list, i, "hash"), a[k]->hash) == 0) have[i] = (char)('1' + k);
    assert_string_equal(have, want);
    json_decref(list);
}

static void assert_versions(const char *dir, size_t n) {
    json_t *list = adapter_versions(dir, &err);
    assert_int_equal(json_array_size(list), n);
    json_decref(list);
}

static char *pruned_make(const char *name, struct adapter *const *a) {
    char *dir = path_in_root(name);
    for (int i = 0; i < 5; i++) {
        json_t *notes = i < 2 ? json_pack("{s:f}", "score", i ? 0.9 : 0.1) : NULL;
        assert_ok(adapter_publish(a[i], dir, "base", notes, &err));
        json_decref(notes);
    }
    return dir;
}

/* Replaces the time of a version. */
static void version_set_created(const char *dir, const char *hash, const char *created) {
    char *path = xasprintf("%s/.versions/%s/version.json", dir, hash);
    json_t *v = json_parse_file(path, &err);
    json_object_set_new(v, "created", json_string(created));
    char *text = json_dumps(v, 0);
    assert_ok(file_write(path, text, strlen(text), &err));
    json_decref(v);
    free(text), free(path);
}

static void prune_rules_check(const char *dir, struct adapter *const *a) {
    struct prune_rule r = no_rule;
    r.keep = 0, prune_check(dir, a, r, "321");
    r.keep = 3, prune_check(dir, a, r, "21");
    r.keep = 9, prune_check(dir, a, r, "");
    r = no_rule, r.min_score = 0.5, prune_check(dir, a, r, "1");
    r.min_score = 0.1, prune_check(dir, a, r, "");
    r.min_score = 2, r.keep = 4, prune_check(dir, a, r, "1"); // both conditions
    version_set_created(dir, a[0]->hash, "2026-01-01T00:00:00Z");
    version_set_created(dir, a[1]->hash, "2026-01-01T00:01:00Z");
    version_set_created(dir, a[2]->hash, "yesterday");
    r = no_rule, r.now = 1767225600 + 90, r.min_age = 50; // 90 s after version 1
    prune_check(dir, a, r, "1");
    r.min_age = 20, prune_check(dir, a, r, "21");
    r.min_age = 90, prune_check(dir, a, r, "");
    assert_versions(dir, 5); // nothing was deleted so far
}

/* The current version and the one that a rollback restores are kept. */
static void prune_needed_check(const char *dir, struct adapter *const *a) {
    struct prune_rule all = no_rule;
    char hash[HASH_LEN];
    all.keep = 0;
    assert_ok(adapter_rollback(dir, &a[0]->shape, a[1]->hash, hash, &err));
    prune_check(dir, a, all, "543");
    assert_ok(adapter_rollback(dir, &a[0]->shape, a[0]->hash, hash, &err));
    prune_check(dir, a, all, "5432"); // version 1 is the first
    struct adapter *foreign = adapter_make(99, 3);
    assert_ok(adapter_save(foreign, dir, "base", &err));
    prune_check(dir, a, all, "4321"); // unpublished files: the next rollback restores 5
    adapter_release(foreign);
    assert_ok(adapter_save(a[4], dir, "base", &err));
    all.delete_matches = true;
    prune_check(dir, a, all, "321");
    assert_versions(dir, 2);
    assert_current_version(dir, a[4]);
    assert_ok(adapter_rollback(dir, &a[0]->shape, NULL, hash, &err));
    assert_current_version(dir, a[3]);
}

/* A folder that is a link is kept, and so is what it names. */
static void prune_links_check(const char *dir, const char *other, struct adapter *const *a) {
    struct prune_rule all = no_rule;
    json_t *list = NULL;
    char *inner = xasprintf("%s/.versions/%s", dir, a[0]->hash), *outside = path_in_root("outside"),
         *root_link = xasprintf("%s/.versions", other), *versions = xasprintf("%s/.versions", dir),
         *config = path_join(outside, "version.json");
    all.keep = 0, all.delete_matches = true;
    assert_ok(path_rename(inner, outside, &err));
    assert_int_equal(symlink(outside, inner), 0);
    assert_ok(dir_make(other, &err));
    assert_int_equal(symlink(versions, root_link), 0);
    assert_int_equal(adapter_versions_prune(other, &all, &list, &err), ERR_STATE);
    json_decref(list);
    prune_check(dir, a, all, "32");
    assert_true(path_exists(config));
    assert_versions(dir, 3);
    free(inner), free(outside), free(root_link), free(versions), free(config);
}

static void test_prune(void **state) {
    (void)state;
    struct adapter *a[5];
    for (int i = 0; i < 5; i++) a[i] = adapter_make((uint64_t)(11 + i), 2);
    char *dir = pruned_make("pruned", a), *linked = pruned_make("linked", a),
         *killed = pruned_make("killed", a), *other = path_in_root("link"),
         *from = xasprintf("%s/.versions/%s", killed, a[1]->hash),
         *tmp = xasprintf("%s/.versions/tmp", killed);
    prune_rules_check(dir, a);
    prune_needed_check(dir, a);
    prune_links_check(linked, other, a);
    assert_ok(path_rename(from, tmp, &err)); // as if killed before the files were deleted
    assert_versions(killed, 4);
    assert_false(path_exists(tmp));
    for (int i = 0; i < 5; i++) adapter_release(a[i]);
    free(dir), free(linked), free(killed), free(other), free(from), free(tmp);
}

static int group_setup(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(root, sizeof root, "/tmp/shoal-test-gate-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int group_teardown(void **state) {
    (void)state;
    return folder_remove(root);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sign_flip),    cmocka_unit_test(test_decisions),
        cmocka_unit_test(test_token_losses), cmocka_unit_test(test_page),
        cmocka_unit_test(test_curve),        cmocka_unit_test(test_log),
        cmocka_unit_test(test_versions),     cmocka_unit_test(test_log_of_methods),
        cmocka_unit_test(test_bands),        cmocka_unit_test(test_prune),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
