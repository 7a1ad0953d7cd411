/*
 * test_remote: requests of an engine whose remote fills in their tokens as they are generated
 * (struct engine_remote). The remote of the test has the results of an engine without one. It sends
 * them in parts, sends some again, and returns requests that have tokens, right and wrong ones.
 */
#define _GNU_SOURCE
#include "engine/internal.h"
#include "fixture.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { MAX_TOKENS = 12, TOP = 2 };
static struct error err;
static struct model *model;
static struct engine *engine, *alone;
static const int32_t prompt[] = {5, 9, 12, 3};
static struct engine_request right;  /* with its results */
static struct engine_request *given; /* the request that the remote has */
static int n_compared, n_cancelled;
static bool was_equal;

static void remote_submit(void *ctx, struct engine_request *r) {
    (void)ctx;
    assert_int_equal(r->n_out, 0);
    given = r;
}

static void remote_step(void *ctx, double seconds) {
    (void)ctx;
    (void)seconds;
}

static void remote_cancel(void *ctx, struct engine_request *r) {
    (void)ctx;
    assert_ptr_equal(r, given);
    n_cancelled++;
}

static void remote_compared(void *ctx, const struct engine_request *r, bool equal) {
    (void)ctx;
    assert_ptr_equal(r, given);
    n_compared++;
    was_equal = equal;
}

static void remote_wake(void *ctx) {
    (void)ctx;
}

static const struct engine_remote remote = {remote_submit, remote_step, remote_cancel,
                                            remote_compared, remote_wake};

static struct engine_request request_new(void) {
    return (struct engine_request){.prompt = prompt,
                                   .n_prompt = ARRAY_LEN(prompt),
                                   .max_tokens = MAX_TOKENS,
                                   .n_top = TOP,
                                   .sampling = {.temperature = 1, .top_p = 1, .seed = 3}};
}

static int set_up(void **state) {
    (void)state;
    const struct engine_options o = {.max_seqs = 2, .max_len = 64};
    model = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    alone = engine_new(model, &o, &err);
    engine = engine_new(model, &o, &err);
    right = request_new();
    if (!alone || !engine || engine_run(alone, &right, 1, NULL, &err) != OK) return -1;
    engine_set_remote(engine, &remote, NULL);
    return right.n_out == MAX_TOKENS ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    engine_request_release(&right);
    engine_free(engine);
    engine_free(alone);
    model_close(model);
    return 0;
}

/* Submits a request to the remote, which has not computed any token of it. */
static void begin(struct engine_request *r) {
    *r = request_new();
    n_compared = n_cancelled = 0;
    assert_int_equal(engine_submit(engine, r, &err), OK);
    assert_int_equal(engine_step(engine), 1);
}

/* Sends the tokens from `from` to `to` - 1 of the right result. */
static int part(struct engine_request *r, int32_t from, int32_t to) {
    struct engine_request some = right;
    some.n_out = to;
    json_t *tokens = record_tokens_json(&some, from);
    int rc = record_tokens_merge(engine, tokens, from, r, &err);
    json_decref(tokens);
    return rc;
}

static void assert_results(const struct engine_request *r) {
    json_t *got = record_outputs_json(r), *expected = record_outputs_json(&right);
    struct buf text = {0};
    if (record_outputs_diff(expected, got, &text)) fail_msg("%s", text.data);
    json_decref(got);
    json_decref(expected);
}

static void parts_are_merged(void **state) {
    (void)state;
    struct engine_request r;
    begin(&r);
    const int32_t *out = r.out;
    assert_int_equal(part(&r, 0, 3), OK);
    assert_int_equal(part(&r, 5, 6), OK); // one before it is lost
    assert_int_equal(r.n_out, 3);
    assert_int_equal(part(&r, 0, 2), OK); // another node begins again
    assert_int_equal(part(&r, 1, 5), OK);
    assert_int_equal(r.n_out, 5);
    json_t *outputs = record_outputs_json(&right);
    assert_int_equal(record_outputs_merge(engine, outputs, &r, &err), OK);
    json_decref(outputs);
    assert_ptr_equal(r.out, out);
    engine_remote_finish(engine, &r);
    assert_int_equal(engine_step(engine), 0);
    assert_results(&r);
    engine_request_release(&r);
}

static void other_tokens_are_refused(void **state) {
    (void)state;
    struct engine_request r;
    begin(&r);
    assert_int_equal(part(&r, 0, 4), OK);
    right.out[2] ^= 1;
    assert_int_equal(part(&r, 1, 6), ERR_MISMATCH);
    right.out[2] ^= 1;
    right.out_logprob[3] += 1;
    assert_int_equal(part(&r, 1, 6), ERR_MISMATCH);
    right.out_logprob[3] -= 1;
    int32_t top = right.top_ids[TOP];
    right.top_ids[TOP] = (top + 1) % model->config.vocab_size;
    assert_int_equal(part(&r, 0, 6), ERR_MISMATCH);
    json_t *outputs = record_outputs_json(&right);
    assert_int_equal(record_outputs_merge(engine, outputs, &r, &err), ERR_MISMATCH);
    json_decref(outputs);
    right.top_ids[TOP] = top;
    assert_int_equal(r.n_out, 4);
    static const char *const wrong[] = {
        "{}", "{\"out\": [1]}", "{\"out\": [1], \"logprobs\": [0], \"top\": [[]]}",
        "{\"out\": [-1], \"logprobs\": [0], \"top\": [[[1, 0], [2, 0]]]}",
        "{\"out\": [99999], \"logprobs\": [0], \"top\": [[[1, 0], [2, 0]]]}"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        json_t *tokens = json_loads(wrong[i], 0, NULL);
        assert_int_not_equal(record_tokens_merge(engine, tokens, 4, &r, &err), OK);
        json_decref(tokens);
    }
    struct engine_request some = right;
    json_t *tokens = record_tokens_json(&some, 4);
    assert_int_equal(record_tokens_merge(engine, tokens, 5, &r, &err), ERR_FORMAT);
    assert_int_equal(record_tokens_merge(engine, tokens, -1, &r, &err), ERR_FORMAT);
    json_decref(tokens);
    assert_int_equal(r.n_out, 4);
    engine_cancel(engine, &r);
    assert_int_equal(n_cancelled, 1);
    engine_request_release(&r);
}

static void a_returned_request_is_compared(void **state) {
    (void)state;
    struct engine_request r;
    for (int32_t sent = 0; sent <= MAX_TOKENS; sent += 4) {
        begin(&r);
        assert_int_equal(part(&r, 0, sent), OK);
        assert_int_equal(engine_remote_return(engine, &r, &err), OK);
        while (engine_step(engine) > 0)
            ;
        assert_int_equal(n_compared, sent > 0);
        assert_true(sent == 0 || was_equal);
        assert_results(&r);
        engine_request_release(&r);
    }
}

static void wrong_tokens_end_a_returned_request(void **state) {
    (void)state;
    struct engine_request r;
    begin(&r);
    int32_t wrong = right.out[5] ^ 1;
    right.out[5] ^= 1;
    assert_int_equal(part(&r, 0, 8), OK);
    right.out[5] ^= 1;
    assert_int_equal(engine_remote_return(engine, &r, &err), OK);
    while (engine_step(engine) > 0)
        ;
    assert_true(r.done && n_compared == 1 && !was_equal);
    assert_int_equal(r.finish, FINISH_NONE);
    assert_int_equal(r.n_out, 8); // a client may have them
    assert_int_equal(r.out[5], wrong);
    engine_request_release(&r);
}

static void a_returned_request_can_be_cancelled(void **state) {
    (void)state;
    struct engine_request r;
    begin(&r);
    assert_int_equal(part(&r, 0, 8), OK);
    assert_int_equal(engine_remote_return(engine, &r, &err), OK);
    engine_step(engine);
    engine_step(engine);
    engine_cancel(engine, &r);
    assert_int_equal(n_cancelled, 1);
    assert_int_equal(n_compared, 0);
    assert_int_equal(r.n_out, 8);
    assert_int_equal(engine_unfinished(engine), 0);
    engine_request_release(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_merged),
        cmocka_unit_test(other_tokens_are_refused),
        cmocka_unit_test(a_returned_request_is_compared),
        cmocka_unit_test(wrong_tokens_end_a_returned_request),
        cmocka_unit_test(a_returned_request_can_be_cancelled),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
