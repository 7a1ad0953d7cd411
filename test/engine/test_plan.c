/*
 * test_plan: the bounds of the memory plan hold for every limit, and its estimates of models equal
 * their sizes when loaded.
 *
 * test_cli.sh checks that the process stays below a limit, by the system's counters.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "fixture.h"
#include "folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static size_t engine_bytes_of_plan(const struct memory_plan *p, const struct model_config *c) {
    return engine_bytes(c, &p->engine);
}

static struct memory_plan_input plan_input(const char *shape) {
    struct memory_plan_input in = {.adapters = {100000, 23456}, .caller_bytes = 54321};
    if (model_preset_find(shape, &in.model.config, &err) != OK) fail_msg("%s", err.text);
    in.model.weights = (size_t)model_param_count(&in.model.config) * 2;
    in.model.while_loading = in.model.weights / 7;
    in.model.tokenizer = 250000;
    in.max_options = (struct engine_options){.max_rows = 256, .max_seqs = 48, .max_len = 200};
    return in;
}

static void test_without_limit(void **state) {
    (void)state;
    struct memory_plan_input in = plan_input("fry-1");
    struct memory_plan p;
    assert_int_equal(memory_plan_make(&in, &p, &err), OK);
    assert_int_equal(p.engine.n_pages, 48 * kv_cache_pages_for(200));
    assert_int_equal(p.engine.max_seqs, 48);
    assert_int_equal(p.engine.max_rows, 256);
    assert_int_equal(p.kv + p.activations, engine_bytes_of_plan(&p, &in.model.config));
    assert_int_equal(p.total,
                     p.weights + p.tokenizer + p.adapters + p.other_bytes + p.kv + p.activations);
}

/* Without a limit, the available memory bounds the plan as a limit would; with one, it does not. */
static void test_available_memory(void **state) {
    (void)state;
    struct memory_plan_input in = plan_input("fry-1"), limited;
    struct memory_plan all, p, q;
    assert_int_equal(memory_plan_make(&in, &all, &err), OK);
    assert_false(memory_plan_is_reduced(&in, &all));
    in.available = all.total - 1;
    limited = in;
    limited.limit = in.available;
    limited.available = 1;
    assert_int_equal(memory_plan_make(&in, &p, &err), OK);
    assert_int_equal(memory_plan_make(&limited, &q, &err), OK);
    assert_true(p.total <= in.available && p.limit == 0);
    assert_true(memory_plan_is_reduced(&in, &p));
    assert_memory_equal(&p.engine, &q.engine, sizeof p.engine);
    in.available = 1;
    assert_int_equal(memory_plan_make(&in, &p, &err), ERR_MEMORY);
    assert_non_null(strstr(err.text, "0.0 MB of memory are available, but one sequence of 200"));
    assert_null(strstr(err.text, "--max-memory"));
}

/* Whether a server's plan fits, with the context of `in` (0: the chosen one). */
static bool server_fits(struct memory_plan_input in, struct memory_plan *p) {
    memory_plan_limit_requests(&in);
    if (!in.max_options.max_len) in.max_options.max_len = memory_plan_context(&in);
    return memory_plan_make(&in, p, &err) == OK;
}

/* The requests' limit never decides whether a plan fits; it gets more with more memory, at most
 * what it names. A memory limit counts it whole. */
static void test_requests_share(void **state) {
    (void)state;
    for (int32_t len = 0; len <= 200; len += 200) {
        struct memory_plan_input in = plan_input("smollm-135m"), little;
        struct memory_plan p;
        size_t before = 0;
        bool all = false;
        in.half = true;
        in.max_options.max_len = len;
        little = in;
        in.requests = (size_t)4 << 30;
        little.requests = 1 << 20;
        for (in.available = 100 << 20; in.available < (size_t)40 << 30;
             in.available += in.available / 16) {
            little.available = in.available;
            bool fits = server_fits(in, &p);
            size_t requests = p.requests;
            assert_int_equal(fits, server_fits(little, &p));
            assert_true(requests >= MAX(before, 1 << 20) && requests <= in.requests);
            if (fits && requests > 1 << 20) assert_true(requests <= in.available / 4);
            before = requests;
            all |= requests == in.requests;
        }
        assert_true(all);
        in.limit = (size_t)4 << 30;
        assert_false(server_fits(in, &p));
        assert_int_equal(p.requests, in.requests);
    }
}

/* The adapter pool has at least the adapters that must fit, grows with the limit, and never takes
 * more than half of what the smallest engine leaves. */
static void test_pool_share(void **state) {
    (void)state;
    struct memory_plan_input in = plan_input("fry-1");
    struct memory_plan least, p;
    size_t before = 0;
    in.pool_wanted = 40 << 20;
    in.limit = 1;
    assert_int_equal(memory_plan_make(&in, &least, &err), ERR_MEMORY);
    assert_int_equal(least.pool, in.adapters.resident);
    for (in.limit = least.total; in.limit < least.total + (200 << 20); in.limit += 3 << 20) {
        assert_int_equal(memory_plan_make(&in, &p, &err), OK);
        assert_true(p.total <= in.limit);
        assert_int_equal(p.adapters, p.pool + in.adapters.while_loading);
        assert_true(p.pool >= MAX(in.adapters.resident, before));
        assert_true(p.pool - in.adapters.resident <= (in.limit - least.total) / 2);
        before = p.pool;
    }
    assert_int_equal(before, in.adapters.resident + in.pool_wanted);
}

/* For limits from 0 to more than enough: the plan is within the limit, a larger limit never gives
 * fewer pages, and a refused plan would not fit. */
static void limits_sweep(const char *shape, enum dtype elem) {
    struct memory_plan_input in = plan_input(shape);
    struct memory_plan p, most;
    in.max_options.kv_elem = elem;
    assert_int_equal(memory_plan_make(&in, &most, &err), OK);
    bool fitted = false;
    size_t step = most.total / 180 + 1;
    int64_t room = 0;
    for (in.limit = step; in.limit < most.total + 3 * step; in.limit += step) {
        int rc = memory_plan_make(&in, &p, &err);
        assert_int_equal(p.total, p.weights + p.tokenizer + p.adapters + p.other_bytes +
                                      engine_bytes_of_plan(&p, &in.model.config));
        if (rc != OK) {
            assert_int_equal(rc, ERR_MEMORY);
            assert_false(fitted);
            assert_true(p.total > in.limit);
            assert_int_equal(p.engine.max_seqs, 1);
            assert_int_equal(p.engine.max_rows, 16);
            assert_non_null(strstr(err.text, "raise --max-memory to "));
            continue;
        }
        fitted = true;
        assert_true(p.total <= in.limit);
        assert_true(p.engine.n_pages >= kv_cache_pages_for(200));
        assert_true(p.engine.n_pages <= most.engine.n_pages);
        int64_t now = (int64_t)p.engine.max_seqs * p.engine.max_rows;
        assert_true(now >= room);
        room = now;
    }
    assert_true(fitted);
    assert_int_equal(p.engine.n_pages, most.engine.n_pages);
}

static void test_limits(void **state) {
    (void)state;
    static const char *const shapes[] = {"tiny-llama", "fry-1", "stories15m", "smollm-135m",
                                         "qwen3-0.6b"};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        for (int e = 0; e < N_DTYPE; e++) limits_sweep(shapes[i], (enum dtype)e);
}

/* The limit that the error suggests is sufficient. */
static void test_refusal_suggests_sufficient_limit(void **state) {
    (void)state;
    struct memory_plan_input in = plan_input("smollm-135m");
    struct memory_plan p;
    in.limit = 1 << 20;
    assert_int_equal(memory_plan_make(&in, &p, &err), ERR_MEMORY);
    const char *at = strstr(err.text, "raise --max-memory to ");
    assert_non_null(at);
    in.limit = (size_t)atol(at + strlen("raise --max-memory to ")) << 20;
    assert_int_equal(memory_plan_make(&in, &p, &err), OK);
}

/* With a small plan requests wait for pages; the results do not change. */
static void test_small_plan_same_bits(void **state) {
    (void)state;
    struct model *m = fixture_model("tiny-qwen3", true, TENSOR_F32, NUMERIC_EXACT);
    struct memory_plan_input in = {.max_options = {.max_rows = 64, .max_seqs = 8, .max_len = 60}};
    struct memory_plan p;
    int32_t prompts[8][40];
    struct rng rng = rng_make(4, RNG_TEST, 0, 0);
    for (int i = 0; i < 8 * 40; i++)
        prompts[i / 40][i % 40] = (int32_t)rng_below(&rng, (uint32_t)m->config.vocab_size);
    int32_t out[2][8][20];
    in.model.config = m->config;
    assert_int_equal(memory_plan_make(&in, &p, &err), OK);
    for (int small = 0; small < 2; small++) {
        in.limit = small ? p.total - p.kv * 2 / 3 : 0;
        assert_int_equal(memory_plan_make(&in, &p, &err), OK);
        if (small) assert_true(p.engine.n_pages < p.pages_wanted);
        struct engine_request reqs[8];
        for (int i = 0; i < 8; i++)
            reqs[i] =
                (struct engine_request){.prompt = prompts[i],
                                        .n_prompt = 40,
                                        .max_tokens = 20,
                                        .sampling = {.temperature = 0.9f, .top_p = 1, .seed = 7}};
        struct engine *e = engine_new(m, &p.engine, &err);
        if (!e) fail_msg("%s", err.text);
        assert_int_equal(engine_run(e, reqs, 8, NULL, &err), OK);
        for (int i = 0; i < 8; i++) {
            assert_int_equal(reqs[i].n_out, 20);
            memcpy(out[small][i], reqs[i].out, sizeof out[small][i]);
            engine_request_release(&reqs[i]);
        }
        engine_free(e);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    model_close(m);
}

static size_t model_memory_bytes(const struct model *m) {
    const struct model_config *c = &m->config;
    size_t sum = matrix_bytes(&m->embed) + (c->tied ? 0 : matrix_bytes(&m->head));
    int64_t norms = c->d_model;
    for (int32_t l = 0; l < c->n_layers; l++) {
        for (int p = 0; p < N_PROJ; p++) sum += matrix_bytes(&m->layers[l].proj[p]);
        norms += 2 * c->d_model + (m->layers[l].q_norm ? 2 * c->head_dim : 0);
    }
    return sum + (size_t)norms * sizeof(float);
}

/* The size computed from the headers is that of the loaded model, for both formats, all types and
 * both numeric classes. */
static void measure_check(const char *shape, bool tied, enum tensor_type type, bool gguf) {
    char dir[] = "/tmp/shoal-test-plan-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *path = path_join(dir, gguf ? "m.gguf" : "m");
    struct model *made = fixture_model(shape, tied, TENSOR_F32, NUMERIC_EXACT);
    int rc =
        gguf ? model_write_gguf(made, path, type, &err) : model_write_hf(made, path, type, &err);
    if (rc != OK) fail_msg("%s", err.text);
    for (int cls = NUMERIC_EXACT; cls <= NUMERIC_FAST; cls++) {
        struct model_size size;
        assert_int_equal(model_measure(path, (enum numeric_class)cls, &size, &err), OK);
        struct model *m = model_open(path, (enum numeric_class)cls, &err);
        assert_non_null(m);
        assert_int_equal(size.weights, model_memory_bytes(m));
        assert_int_equal(size.type, m->type);
        assert_int_equal(size.config.vocab_size, m->config.vocab_size);
        assert_int_equal(size.config.max_seq_len, m->config.max_seq_len);
        assert_true(size.tokenizer > 0);
        model_close(m);
    }
    model_close(made);
    free(path);
    folder_remove(dir);
}

static void test_measured_from_headers(void **state) {
    (void)state;
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_Q8_0,
                                             TENSOR_Q4_0};
    for (size_t t = 0; t < ARRAY_LEN(types); t++)
        for (int tied = 0; tied < 2; tied++) {
            measure_check("tiny-llama", tied, types[t], true);
            measure_check("tiny-qwen3", tied, types[t], true);
            if (t < 3) measure_check("tiny-qwen3", tied, types[t], false);
        }
}

static void test_measure_errors(void **state) {
    (void)state;
    struct model_size size;
    struct adapter_size sum = {0};
    assert_true(model_measure("/nowhere/at-all", NUMERIC_EXACT, &size, &err) != OK);
    assert_non_null(strstr(err.text, "/nowhere/at-all"));
    assert_int_equal(adapter_measure("/nowhere/at-all", DTYPE_F32, &sum, &err), ERR_MISSING);
}

/* Damaged headers give a size or an error, but no crash. */
static void test_measure_of_damaged_files(void **state) {
    (void)state;
    char dir[] = "/tmp/shoal-test-plan-XXXXXX";
    assert_non_null(mkdtemp(dir));
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    struct rng rng = rng_make(6, RNG_TEST, 0, 0);
    int refused = 0;
    for (int gguf = 0; gguf < 2; gguf++) {
        char *path = path_join(dir, gguf ? "m.gguf" : "m"),
             *file = gguf ? xstrdup(path) : path_join(path, "model.safetensors");
        struct buf whole = {0};
        int rc = gguf ? model_write_gguf(m, path, TENSOR_Q8_0, &err)
                      : model_write_hf(m, path, TENSOR_BF16, &err);
        if (rc == OK) rc = file_read(file, 1 << 24, &whole, &err);
        if (rc != OK) fail_msg("%s", err.text);
        for (int i = 0; i < 400; i++) {
            struct buf bad = {0};
            struct model_size size;
            buf_add(&bad, whole.data, whole.len);
            for (uint32_t k = rng_below(&rng, 4) + 1; k > 0; k--)
                bad.data[rng_below(&rng, (uint32_t)MIN(whole.len, 8000))] = (char)rng_u32(&rng);
            FILE *f = fopen(file, "wb");
            size_t n = i % 4 ? whole.len : rng_below(&rng, (uint32_t)whole.len);
            assert_int_equal(fwrite(bad.data, 1, n, f), n);
            fclose(f);
            refused += model_measure(path, NUMERIC_FAST, &size, &err) != OK;
            buf_release(&bad);
        }
        buf_release(&whole);
        free(path);
        free(file);
    }
    assert_true(refused > 200);
    model_close(m);
    folder_remove(dir);
}

/* Several adapters: their sizes in f32 and in the element type add up. */
static void test_adapters_measured(void **state) {
    (void)state;
    char dir[] = "/tmp/shoal-test-plan-XXXXXX";
    assert_non_null(mkdtemp(dir));
    struct model *m = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    for (int e = 0; e < N_DTYPE; e++) {
        struct adapter_size sum = {0};
        size_t want = 0;
        for (int i = 0; i < 3; i++) {
            char *path = path_join(dir, i == 0 ? "a" : i == 1 ? "b" : "c");
            struct adapter *a =
                fixture_adapter(&m->config, 2 + i, i ? "all-linear" : "q_proj", 0.1f, 5);
            assert_int_equal(adapter_save(a, path, "base", &err), OK);
            want += a->n_data * (sizeof(float) + dtype_size((enum dtype)e));
            if (adapter_measure(path, (enum dtype)e, &sum, &err) != OK) fail_msg("%s", err.text);
            assert_int_equal(sum.resident, want);
            assert_true(sum.while_loading > a->n_data * 8);
            adapter_release(a);
            free(path);
        }
    }
    model_close(m);
    folder_remove(dir);
}

/* Pages that no slot uses are not resident after kv_cache_trim, and can be used again. */
static void test_unused_pages_are_returned(void **state) {
    (void)state;
    enum { POSITIONS = 512 };
    struct model_config c;
    assert_int_equal(model_preset_find("smollm-135m", &c, &err), OK);
    struct kv_cache *kv =
        kv_cache_new(&c, &(struct kv_cache_options){.n_slots = 2, .slot_len = POSITIONS});
    size_t size = POSITIONS * kv_cache_position_bytes(kv), empty = process_memory("RssAnon");
    uint8_t *in = xmalloc(size), *out = xmalloc(size);
    for (size_t i = 0; i < size; i++) in[i] = (uint8_t)(i % 251);
    assert_true(kv_cache_load(kv, 0, POSITIONS, in) && kv_cache_load(kv, 1, POSITIONS, in));
    kv_cache_truncate(kv, 1, 0);
    size_t full = process_memory("RssAnon");
    kv_cache_trim(kv);
    size_t trimmed = process_memory("RssAnon");
    if (empty > 0) assert_true(full - trimmed > size * 9 / 10);
    kv_cache_save(kv, 0, POSITIONS, out);
    assert_memory_equal(in, out, size);
    assert_true(kv_cache_load(kv, 1, POSITIONS, in));
    kv_cache_save(kv, 1, POSITIONS, out);
    assert_memory_equal(in, out, size);
    free(in);
    free(out);
    kv_cache_free(kv);
}

/* The default context: all of the model's in much memory, less in half of little, never below
 * 1024. */
static void test_context(void **state) {
    (void)state;
    struct memory_plan_input in = {.max_options = {.max_rows = 64, .max_seqs = 4, .max_len = 1}};
    struct memory_plan p;
    assert_int_equal(model_preset_find("smollm-135m", &in.model.config, &err), OK);
    in.model.config.max_seq_len = 40960;
    assert_int_equal(memory_plan_context(&in), 40960);
    in.available = (size_t)1 << 40;
    assert_int_equal(memory_plan_context(&in), 40960);
    in.available = (size_t)1 << 30;
    int32_t len = memory_plan_context(&in);
    assert_true(len > 4096 && len < 40960);
    in.half = true;
    in.max_options.max_len = len;
    assert_int_equal(memory_plan_make(&in, &p, &err), OK);
    assert_true(p.total <= in.available);
    in.max_options.max_len = len + 2 * KV_PAGE_SIZE;
    in.available = in.available / 2 + 1; // more than half of the rest
    assert_true(memory_plan_context(&in) < len);
    in.available = 1;
    assert_int_equal(memory_plan_context(&in), 1024);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_limit),
        cmocka_unit_test(test_available_memory),
        cmocka_unit_test(test_requests_share),
        cmocka_unit_test(test_pool_share),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_refusal_suggests_sufficient_limit),
        cmocka_unit_test(test_small_plan_same_bits),
        cmocka_unit_test(test_measured_from_headers),
        cmocka_unit_test(test_measure_errors),
        cmocka_unit_test(test_adapters_measured),
        cmocka_unit_test(test_measure_of_damaged_files),
        cmocka_unit_test(test_unused_pages_are_returned),
        cmocka_unit_test(test_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
