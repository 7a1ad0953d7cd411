/*
 * test_replay: a request that is stored as JSON and parsed again is the same request; its replay
 * has the same bits, and differences are reported by name.
 *
 * Random requests with every field set are written as JSON text and parsed: the key, which covers
 * every input, must stay the same. Records are damaged in every place; parsing must return an error
 * or a request that the engine checks, and never abort. Runs on a tiny model in memory.
 */
#define _GNU_SOURCE
#include "engine/internal.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static struct model *model;
static const char hash[] = "0123456789abcdef";

static int set_up(void **state) {
    (void)state;
    model = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    model_close(model);
    return 0;
}

static struct token_seq random_tokens(struct rng *rng, struct arena *a, uint32_t max_n) {
    int32_t n = 1 + (int32_t)rng_below(rng, max_n), *v = arena_alloc(a, (size_t)n * sizeof *v);
    for (int32_t i = 0; i < n; i++)
        v[i] = (int32_t)rng_below(rng, (uint32_t)model->config.vocab_size);
    return (struct token_seq){v, n};
}

static struct sampling_params random_sampling(struct rng *rng, struct arena *a) {
    struct sampling_params s = {.temperature = rng_uniform(rng) + 0.1f,
                                .top_k = (int32_t)rng_below(rng, 50),
                                .top_p = 0.5f + 0.5f * rng_uniform(rng),
                                .min_p = 0.1f * rng_uniform(rng),
                                .seed = rng_u64(rng),
                                .typical_p = rng_uniform(rng),
                                .repetition_penalty = 1 + rng_uniform(rng),
                                .presence_penalty = rng_normal(rng),
                                .frequency_penalty = rng_normal(rng),
                                .penalty_last_n = (int32_t)rng_below(rng, 3)};
    struct logit_bias *b = arena_alloc(a, 3 * sizeof *b);
    for (int i = 0; i < 3; i++)
        b[i] =
            (struct logit_bias){(int32_t)rng_below(rng, 200), i == 2 ? -INFINITY : rng_normal(rng)};
    s.bias = b;
    s.n_bias = (int32_t)rng_below(rng, 4);
    return s;
}

static struct engine_request random_request(struct rng *rng, struct arena *a) {
    static const char *const texts[] = {"止", "\n\n", "\"}"};
    struct token_seq prompt = random_tokens(rng, a, 20), stop = random_tokens(rng, a, 3);
    struct engine_request r = {.prompt = prompt.v, .n_prompt = prompt.n, .stop = stop.v};
    struct token_seq *choices = arena_alloc(a, 4 * sizeof *choices);
    for (int i = 0; i < 4; i++) choices[i] = random_tokens(rng, a, 5);
    r.n_stop = stop.n;
    r.sampling = random_sampling(rng, a);
    r.max_tokens = (int32_t)rng_below(rng, 12);
    r.stop_texts = texts;
    r.n_stop_texts = (int32_t)rng_below(rng, 4);
    r.loop_tokens = (int32_t)rng_below(rng, 9);
    r.n_top = (int32_t)rng_below(rng, 5);
    r.prompt_logprobs = rng_below(rng, 2);
    r.logprob_temperature = rng_below(rng, 2) ? 0 : 2.5f;
    r.choices = choices;
    r.n_choices = (int32_t)rng_below(rng, 5);
    if (r.n_choices) r.suffix = random_tokens(rng, a, 4);
    return r;
}

static json_t *json_round_trip(json_t *v) {
    char *text = json_canonical(v);
    json_t *back = json_parse(text, strlen(text), "test", &err);
    free(text);
    json_decref(v);
    assert_non_null(back);
    return back;
}

/* A grammar of a random kind; one of the choices is not UTF-8. */
static struct grammar *random_grammar(struct rng *rng) {
    static const char *const choices[] = {"止まれ", "\xff\xfe", ""};
    static const char regex[] = "[あ-ん]{1,3}", schema[] = "{\"enum\": [\"春\", 2]}",
                      gbnf[] = "root ::= \"a\" | \"日\"";
    switch (rng_below(rng, 6)) {
    case 0:
        return grammar_new_regex(regex, strlen(regex), &err);
    case 1:
        return grammar_new_json_schema(schema, strlen(schema), false, &err);
    case 2:
        return grammar_new_json_schema(schema, strlen(schema), true, &err);
    case 3:
        return grammar_new_gbnf(gbnf, strlen(gbnf), &err);
    case 4:
        return grammar_new_choices(choices, 3, &err);
    default:
        return NULL;
    }
}

static void test_inputs_round_trip(void **state) {
    (void)state;
    struct grammar *grammar;
    struct rng rng = rng_make(1, RNG_TEST, 0, 0);
    for (int i = 0; i < 500; i++) {
        struct arena a = {0};
        char was[HASH_LEN], is[HASH_LEN];
        struct engine_request r = random_request(&rng, &a), back;
        struct grammar *drawn = random_grammar(&rng);
        r.grammar = drawn;
        json_t *v = json_round_trip(record_inputs_json(&r));
        assert_int_equal(record_inputs_parse(v, &a, &back, &grammar, &err), OK);
        engine_request_key(&r, hash, NUMERIC_EXACT, was);
        engine_request_key(&back, hash, NUMERIC_EXACT, is);
        assert_string_equal(was, is);
        assert_true(!drawn == !grammar);
        grammar_free(drawn);
        grammar_free(grammar);
        json_decref(v);
        arena_release(&a);
    }
}

/* A value of the row's type that is not 0, an empty list or NULL. */
static void random_input(const struct request_input *in, const struct grammar *grammar,
                         struct engine_request *r) {
    static const int32_t ids[] = {7, 8};
    static const char *const texts[] = {"x"};
    static const struct token_seq lists[] = {{ids, 1}, {ids, 2}};
    static const struct logit_bias bias[] = {{7, 0.5f}};
    static const void *const values[] = {[INPUT_TOKENS] = ids,
                                         [INPUT_TEXTS] = texts,
                                         [INPUT_TOKEN_LISTS] = lists,
                                         [INPUT_BIAS] = bias};
    char *at = (char *)r + in->value_offset;
    if (in->count_offset) *(int32_t *)((char *)r + in->count_offset) = 1;
    switch (in->type) {
    case INPUT_FLOAT:
        *(float *)at = 0.5f;
        break;
    case INPUT_INT:
        *(int32_t *)at = 3;
        break;
    case INPUT_SEED:
        *(uint64_t *)at = 1ull << 63 | 5;
        break;
    case INPUT_BOOL:
        *(bool *)at = true;
        break;
    case INPUT_GRAMMAR:
        *(const struct grammar **)at = grammar;
        break;
    default:
        memcpy(at, &values[in->type], sizeof(void *));
    }
}

/* Each input changes the key and is unchanged after a round trip through JSON. */
static void test_every_input_is_part_of_the_key(void **state) {
    (void)state;
    enum { MOST = 64 };
    char keys[MOST][HASH_LEN], again[HASH_LEN];
    struct grammar *grammar = grammar_new_regex("a+", 2, &err), *parsed;
    struct engine_request base = {0}, back;
    int n = 0;
    engine_request_key(&base, hash, NUMERIC_EXACT, keys[n++]);
    for (const struct request_input *in = request_inputs; in->name; in++, n++) {
        struct arena a = {0};
        struct engine_request r = base;
        assert_true(n < MOST);
        random_input(in, grammar, &r);
        engine_request_key(&r, hash, NUMERIC_EXACT, keys[n]);
        for (int i = 0; i < n; i++)
            if (strcmp(keys[i], keys[n]) == 0) fail_msg("the key does not depend on %s", in->name);
        json_t *v = json_round_trip(record_inputs_json(&r));
        assert_int_equal(record_inputs_parse(v, &a, &back, &parsed, &err), OK);
        engine_request_key(&back, hash, NUMERIC_EXACT, again);
        if (strcmp(again, keys[n]) != 0) fail_msg("%s is lost in JSON", in->name);
        grammar_free(parsed);
        json_decref(v);
        arena_release(&a);
    }
    grammar_free(grammar);
}

/* Keys and records do not change between versions: a golden hash over the keys and the JSON of
 * random requests. */
static void test_golden_keys(void **state) {
    (void)state;
    struct rng rng = rng_make(4, RNG_TEST, 0, 0);
    struct sha256 h;
    char key[HASH_LEN];
    sha256_init(&h);
    for (int i = 0; i < 200; i++) {
        struct arena a = {0};
        struct engine_request r = random_request(&rng, &a);
        struct grammar *drawn = random_grammar(&rng);
        r.grammar = drawn;
        json_t *v = record_inputs_json(&r);
        char *text = json_canonical(v);
        engine_request_key(&r, hash, NUMERIC_EXACT, key);
        sha256_update(&h, key, strlen(key));
        sha256_update(&h, text, strlen(text));
        free(text);
        json_decref(v);
        grammar_free(drawn);
        arena_release(&a);
    }
    sha256_final(&h, key);
    assert_string_equal(key, "fcc231f5db5de6971aa141adc79cedf951ad49d8322ab896b8e6b72390d6fb1f");
}

/* Every member is replaced by a value of another type, or removed: the error has its name. */
static void test_damaged_inputs(void **state) {
    (void)state;
    struct grammar *grammar;
    struct rng rng = rng_make(2, RNG_TEST, 0, 0);
    struct arena a = {0};
    struct engine_request r = random_request(&rng, &a), back;
    json_t *whole = record_inputs_json(&r), *kinds = json_pack("[s,f,i,{},[s]]", "x", 1.5, -7, "y");
    const char *key;
    json_t *v, *kind;
    size_t k;
    int refused = 0;
    json_object_foreach (whole, key, v) {
        json_array_foreach (kinds, k, kind) {
            json_t *bad = json_copy(whole);
            json_object_set(bad, key, kind);
            int rc = record_inputs_parse(bad, &a, &back, &grammar, &err);
            assert_true(rc == OK || rc == ERR_FORMAT);
            refused += rc == ERR_FORMAT;
            json_decref(bad);
        }
        if (strcmp(key, "prompt_logprobs") == 0 || strcmp(key, "grammar") == 0)
            continue; // absent means false, or none
        json_t *bad = json_copy(whole);
        json_object_del(bad, key);
        assert_int_equal(record_inputs_parse(bad, &a, &back, &grammar, &err), ERR_FORMAT);
        json_decref(bad);
    }
    assert_true(refused > 30);
    assert_int_equal(record_inputs_parse(NULL, &a, &back, &grammar, &err), ERR_FORMAT);
    json_decref(whole);
    json_decref(kinds);
    arena_release(&a);
}

static json_t *run_outputs(struct engine_request *r) {
    struct engine_options o = {.max_rows = 32, .max_seqs = 2, .max_len = 64};
    struct engine *e = engine_new(model, &o, &err);
    assert_non_null(e);
    if (engine_run(e, r, 1, NULL, &err) != OK) fail_msg("%s", err.text);
    json_t *v = record_outputs_json(r);
    engine_request_release(r);
    engine_free(e);
    return v;
}

static void test_outputs_round_trip(void **state) {
    (void)state;
    struct grammar *grammar;
    struct rng rng = rng_make(3, RNG_TEST, 0, 0);
    for (int i = 0; i < 40; i++) {
        struct arena a = {0};
        struct buf what = {0};
        struct engine_request r = random_request(&rng, &a), back;
        if (!r.n_choices) r.context_len = r.n_prompt + 3, r.n_keep = r.n_prompt / 2;
        json_t *inputs = json_round_trip(record_inputs_json(&r));
        assert_int_equal(record_inputs_parse(inputs, &a, &back, &grammar, &err), OK);
        json_t *first = json_round_trip(run_outputs(&r)), *second = run_outputs(&back);
        if (record_outputs_diff(first, second, &what)) fail_msg("%s", what.data);
        json_decref(first);
        json_decref(second);
        json_decref(inputs);
        buf_release(&what);
        arena_release(&a);
    }
}

static void test_differences_are_named(void **state) {
    (void)state;
    int32_t prompt[] = {5, 6, 7};
    struct engine_request r = {.prompt = prompt, .n_prompt = 3, .max_tokens = 6};
    struct buf what = {0};
    json_t *before = run_outputs(&r), *after = json_deep_copy(before);
    json_array_set_new(json_object_get(after, "out"), 2, json_integer(999));
    json_array_set_new(json_object_get(after, "logprobs"), 4, json_real(-0.5));
    json_array_remove(json_object_get(after, "out"), 5);
    json_object_set_new(after, "finish", json_string("stop"));
    assert_true(record_outputs_diff(before, after, &what));
    assert_non_null(strstr(what.data, "out at 2: was "));
    assert_non_null(strstr(what.data, "is '999'"));
    assert_non_null(strstr(what.data, "logprobs at 4: was "));
    assert_non_null(strstr(what.data, "finish: was '\"length\"', is '\"stop\"'"));
    assert_null(strstr(what.data, "generated"));
    buf_release(&what);
    json_decref(before);
    json_decref(after);
}

/* Element types other than f32 change the key. */
static void test_identity_covers_elements(void **state) {
    (void)state;
    int32_t prompt[] = {5, 6, 7};
    struct engine_request r = {.prompt = prompt, .n_prompt = 3, .max_tokens = 6};
    char plain[HASH_LEN], keys[N_DTYPE * N_DTYPE][HASH_LEN];
    engine_request_key(&r, hash, NUMERIC_FAST, plain);
    for (int i = 0; i < N_DTYPE * N_DTYPE; i++) {
        record_key(&r, hash, NUMERIC_FAST, (enum dtype)(i / N_DTYPE), (enum dtype)(i % N_DTYPE),
                   keys[i]);
        for (int j = 0; j < i; j++) assert_string_not_equal(keys[i], keys[j]);
    }
    assert_string_equal(keys[0], plain);
}

/* The records of requests with two adapters and a mix are found in the store by a prefix of their
 * key. */
static void test_recorder(void **state) {
    (void)state;
    char dir[] = "/tmp/shoal-test-replay-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *db = path_join(dir, "calls.db");
    struct adapter *a = fixture_adapter(&model->config, 4, "all-linear", 0.2f, 1),
                   *b = fixture_adapter(&model->config, 4, "all-linear", 0.2f, 2);
    struct recorded_adapter named[] = {{"there/a", a}, {"there/b", b}};
    struct weighted_adapter mix[] = {{.adapter = a, .weight = 0.75f},
                                     {.adapter = b, .weight = 0.25f}};
    struct recorder rec = {.store = store_open(db, &err),
                           .model = model,
                           .model_path = "m.gguf",
                           .model_hash = hash,
                           .kv = DTYPE_F16,
                           .adapters = named,
                           .n_adapters = 2};
    struct engine_options o = {.max_rows = 32,
                               .max_seqs = 4,
                               .max_len = 64,
                               .kv_elem = DTYPE_F16,
                               .on_finished = recorder_finished,
                               .on_finished_ctx = &rec};
    int32_t prompt[] = {5, 6, 7};
    struct engine_request reqs[3] = {{.adapter = a}, {.mix = mix, .n_mix = 2}, {.n_prompt = 0}};
    for (int i = 0; i < 3; i++) {
        reqs[i].prompt = prompt;
        reqs[i].n_prompt = 3;
        reqs[i].max_tokens = 4 + i;
    }
    struct engine *e = engine_new(model, &o, &err);
    assert_int_equal(engine_run(e, reqs, 3, NULL, &err), OK);
    assert_int_equal(rec.err.code, OK);
    assert_int_equal(rec.n, 3);
    for (int i = 0; i < 3; i++) {
        char key[HASH_LEN];
        record_key(&reqs[i], hash, NUMERIC_EXACT, DTYPE_F16, DTYPE_F32, key);
        key[12] = 0;
        json_t *call = store_record_get(rec.store, key, &err), *out = record_outputs_json(&reqs[i]);
        assert_non_null(call);
        assert_string_equal(json_string_value(json_object_get(call, "kv")), "f16");
        assert_true(json_equal(json_object_get(call, "outputs"), out));
        json_t *adapters = json_object_get(call, "adapters");
        assert_int_equal(json_array_size(adapters), i == 0 ? 1 : i == 1 ? 2 : 0);
        if (i == 1) {
            json_t *term = json_array_get(adapters, 1);
            assert_string_equal(json_string_value(json_object_get(term, "path")), "there/b");
            assert_string_equal(json_string_value(json_object_get(term, "hash")), b->hash);
            assert_true(json_number_value(json_object_get(term, "weight")) == 0.25);
        }
        json_decref(call);
        json_decref(out);
        engine_request_release(&reqs[i]);
    }
    json_t *all = store_record_list(rec.store, &err);
    assert_int_equal(json_array_size(all), 3);
    assert_null(json_object_get(json_array_get(all, 0), "outputs"));
    json_decref(all);
    assert_null(store_record_get(rec.store, "", &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_null(store_record_get(rec.store, "%", &err)); // no pattern
    assert_int_equal(err.code, ERR_MISSING);
    engine_free(e);
    store_close(rec.store);
    adapter_release(a);
    adapter_release(b);
    unlink(db);
    rmdir(dir);
    free(db);
}

/* If the store cannot be written, recording stops with its error and the requests continue. */
static void test_recorder_keeps_the_first_error(void **state) {
    (void)state;
    char dir[] = "/tmp/shoal-test-replay-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *db = path_join(dir, "calls.db");
    struct recorder rec = {
        .store = store_open(db, &err), .model = model, .model_path = "m", .model_hash = hash};
    sqlite3 *other;
    int32_t prompt[] = {5, 6, 7};
    struct engine_request r = {.prompt = prompt, .n_prompt = 3};
    assert_int_equal(sqlite3_open(db, &other), SQLITE_OK);
    recorder_finished(&rec, &r);
    assert_int_equal(rec.n, 1);
    assert_int_equal(sqlite3_exec(other, "ALTER TABLE recorded RENAME TO away", NULL, NULL, NULL),
                     SQLITE_OK);
    recorder_finished(&rec, &r);
    assert_int_equal(rec.err.code, ERR_IO);
    assert_non_null(strstr(rec.err.text, "calls.db"));
    assert_int_equal(sqlite3_exec(other, "ALTER TABLE away RENAME TO recorded", NULL, NULL, NULL),
                     SQLITE_OK);
    recorder_finished(&rec, &r);
    assert_int_equal(rec.n, 1);
    sqlite3_close(other);
    store_close(rec.store);
    unlink(db);
    rmdir(dir);
    free(db);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inputs_round_trip),
        cmocka_unit_test(test_every_input_is_part_of_the_key),
        cmocka_unit_test(test_golden_keys),
        cmocka_unit_test(test_damaged_inputs),
        cmocka_unit_test(test_outputs_round_trip),
        cmocka_unit_test(test_differences_are_named),
        cmocka_unit_test(test_identity_covers_elements),
        cmocka_unit_test(test_recorder),
        cmocka_unit_test(test_recorder_keeps_the_first_error),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
