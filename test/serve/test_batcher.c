/*
 * test_batcher: concurrent requests from many threads have the same bits as when engine_run runs
 * them, also when others are cancelled, and batcher_free ends the waiting of every thread.
 *
 * The reference is engine_run on a separate engine: a request's result depends only on the request,
 * not on the requests beside it.
 */
/* levels: once */
#define _GNU_SOURCE
#include "serve/batcher.h"

#include "fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    THREADS = 8,
    ROUNDS = 60,
    N_EXPECTED = 40,
    TEXTS = 6,
    LEN = 48,
    SEQS = 6,
    MAX_WAITING = 500
};

static struct model *m;
static struct engine *e;
static struct batcher *b;
static struct adapter *adapters[2];
static int32_t tokens[LEN];
static struct engine_request expected[N_EXPECTED]; /* requests with the results of engine_run */
static struct token_seq texts[TEXTS];
static float *vectors; /* [TEXTS][32] expected embeddings */

static struct engine *engine_small(void) {
    struct error err;
    struct engine_options o = {.max_rows = 24, .max_seqs = SEQS, .max_len = LEN};
    struct engine *created = engine_new(m, &o, &err);
    if (!created) fail_msg("%s", err.text);
    return created;
}

static void request_random(struct engine_request *r, int i, struct rng *rng) {
    *r = (struct engine_request){.prompt = tokens + rng_below(rng, 8),
                                 .n_prompt = 1 + (int32_t)rng_below(rng, 16),
                                 .max_tokens = (int32_t)rng_below(rng, 24),
                                 .adapter = i % 3 ? adapters[i % 2] : NULL,
                                 .n_top = i % 4 ? 0 : 3,
                                 .sampling = {.temperature = 1, .top_p = 1, .seed = (uint64_t)i}};
}

static int group_setup(void **state) {
    struct model_config c = fixture_shape(2, 32, 4, 2, 8, 64);
    struct rng rng = rng_make(1, RNG_TEST, 0, 0);
    struct error err;
    (void)state;
    log_quiet = true;
    c.max_seq_len = LEN;
    m = fixture_model_of(c, true, TENSOR_F32, NUMERIC_EXACT);
    for (int i = 0; i < 2; i++)
        adapters[i] = fixture_adapter(&m->config, 4, "all-linear", 0.1f, (uint64_t)i + 1);
    for (int i = 0; i < LEN; i++) tokens[i] = (int32_t)rng_below(&rng, 64);
    for (int i = 0; i < N_EXPECTED; i++) request_random(&expected[i], i, &rng);
    for (int i = 0; i < TEXTS; i++) texts[i] = (struct token_seq){tokens + i, 3 + 5 * i};
    vectors = xcalloc((size_t)TEXTS * 32, sizeof *vectors);
    struct engine *reference = engine_small();
    if (engine_run(reference, expected, N_EXPECTED, NULL, &err) != OK ||
        engine_embed(reference, texts, TEXTS, adapters[0], vectors, &err) != OK)
        fail_msg("%s", err.text);
    engine_free(reference);
    return 0;
}

static int group_teardown(void **state) {
    (void)state;
    for (int i = 0; i < N_EXPECTED; i++) engine_request_release(&expected[i]);
    for (int i = 0; i < 2; i++) adapter_release(adapters[i]);
    free(vectors);
    model_close(m);
    return 0;
}

static int set_up(void **state) {
    (void)state;
    e = engine_small();
    b = batcher_new(e, MAX_WAITING);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    batcher_free(b);
    engine_free(e);
    return 0;
}

/* expected[i] as it was before it ran. */
static struct engine_request request_new(int i) {
    struct engine_request r = expected[i];
    return (struct engine_request){.prompt = r.prompt,
                                   .n_prompt = r.n_prompt,
                                   .max_tokens = r.max_tokens,
                                   .adapter = r.adapter,
                                   .n_top = r.n_top,
                                   .sampling = r.sampling};
}

/* Whether the first n tokens of r equal those of expected[i], bit for bit. */
static bool prefix_matches(const struct engine_request *r, int i, int32_t n) {
    const struct engine_request *k = &expected[i];
    return n <= k->n_out && memcmp(r->out, k->out, sizeof *r->out * (size_t)n) == 0 &&
           memcmp(r->out_logprob, k->out_logprob, sizeof(float) * (size_t)n) == 0 &&
           memcmp(r->top_logprob ? r->top_logprob : r->out_logprob,
                  k->top_logprob ? k->top_logprob : k->out_logprob,
                  sizeof(float) * (size_t)(n * MAX(k->n_top, 1))) == 0;
}

static bool matches_reference(const struct engine_request *r, int i) {
    return r->done && r->finish == expected[i].finish && r->n_out == expected[i].n_out &&
           (r->n_out == 0 || prefix_matches(r, i, r->n_out));
}

/* a request whose thread checks the tokens while it runs */

struct watched_request {
    struct batcher_request ticket;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool over;
};

static void watched_on_change(struct batcher_request *c, bool done) {
    struct watched_request *w = c->user;
    pthread_mutex_lock(&w->lock);
    w->over = done;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Submits request i and waits for its end. Cancels it when cancel_after tokens are visible; -1:
 * never. Returns whether every result is right. */
static bool submit_round(int i, bool background, int cancel_after) {
    struct watched_request w = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                .changed = PTHREAD_COND_INITIALIZER};
    struct error err;
    w.ticket = (struct batcher_request){.request = request_new(i),
                                        .background = background,
                                        .on_change = watched_on_change,
                                        .user = &w};
    bool right = batcher_submit(b, &w.ticket, &err) == OK;
    if (cancel_after == 0) batcher_cancel(b, &w.ticket);
    pthread_mutex_lock(&w.lock);
    while (right && !w.over) {
        pthread_cond_wait(&w.changed, &w.lock);
        int32_t seen = __atomic_load_n(&w.ticket.n_visible, __ATOMIC_ACQUIRE);
        right &= seen == 0 || prefix_matches(&w.ticket.request, i, seen);
        if (w.over || cancel_after < 0 || seen < cancel_after) continue;
        pthread_mutex_unlock(&w.lock);
        batcher_cancel(b, &w.ticket);
        pthread_mutex_lock(&w.lock);
    }
    pthread_mutex_unlock(&w.lock);
    const struct engine_request *r = &w.ticket.request;
    bool cancelled = cancel_after >= 0 && r->done && r->finish == FINISH_NONE;
    right &= cancelled ? r->n_out == 0 || prefix_matches(r, i, r->n_out) : matches_reference(r, i);
    engine_request_release(&w.ticket.request);
    return right;
}

static bool run_round(struct rng *rng) {
    struct engine_request r[5];
    int which[5];
    struct error err;
    for (int k = 0; k < 5; k++) r[k] = request_new(which[k] = (int)rng_below(rng, N_EXPECTED));
    bool right = batcher_run(b, r, 5, NULL, &err) == OK;
    for (int k = 0; k < 5; k++) {
        right = right && matches_reference(&r[k], which[k]);
        engine_request_release(&r[k]);
    }
    return right;
}

static bool embed_round(struct rng *rng) {
    float out[TEXTS * 32];
    struct error err;
    int from = (int)rng_below(rng, TEXTS), n = 1 + (int)rng_below(rng, (uint32_t)(TEXTS - from));
    return batcher_embed(b, texts + from, n, adapters[0], out, &err) == OK &&
           memcmp(out, vectors + from * 32, sizeof *out * (size_t)n * 32) == 0;
}

static void *client(void *ctx) {
    struct rng rng = rng_make(*(uint64_t *)ctx, RNG_TEST, 1, 0);
    intptr_t wrong = 0;
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t kind = rng_below(&rng, 8);
        int cancel = kind < 4 ? -1 : (int)rng_below(&rng, 6);
        if (kind == 0)
            wrong += !run_round(&rng);
        else if (kind == 1)
            wrong += !embed_round(&rng);
        else
            wrong += !submit_round((int)rng_below(&rng, N_EXPECTED), kind % 3 == 0, cancel);
    }
    return (void *)wrong;
}

static void test_many_threads(void **state) {
    pthread_t threads[THREADS];
    uint64_t seeds[THREADS];
    (void)state;
    for (size_t i = 0; i < THREADS; i++) {
        seeds[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, client, &seeds[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        if (wrong) fail_msg("thread %zu: %d results are wrong", i, (int)(intptr_t)wrong);
    }
    struct batcher_stats s = batcher_stats(b);
    assert_int_equal(s.waiting, 0);
    assert_true(s.cancelled > 10 && s.generated > 1000);
}

/* order of the callbacks */

static struct {
    int32_t v[64]; /* max_tokens of the request of each callback, negative when done */
    int n;
} notifications;

static void order_on_change(struct batcher_request *c, bool done) {
    notifications.v[notifications.n++] = done ? -c->request.max_tokens : c->request.max_tokens;
}

/* Callbacks of finished requests come first, so that their clients can submit again before the next
 * step. */
static void test_finished_requests_are_notified_first(void **state) {
    static const int32_t wanted[] = {8, 3, 8, 3, -3, 8, 8, 8, 8, 8, -8};
    struct batcher_request requests[2] = {{.on_change = order_on_change},
                                          {.on_change = order_on_change}},
                           *list[2] = {&requests[0], &requests[1]};
    struct error err;
    (void)state;
    for (int i = 0; i < 2; i++)
        requests[i].request =
            (struct engine_request){.prompt = tokens, .n_prompt = 4, .max_tokens = i ? 3 : 8};
    assert_int_equal(batcher_submit_all(b, list, 2, &err), OK);
    while (batcher_stats(b).running || batcher_stats(b).waiting) usleep(1000);
    assert_int_equal(notifications.n, ARRAY_LEN(wanted));
    assert_memory_equal(notifications.v, wanted, sizeof wanted);
    for (int i = 0; i < 2; i++) engine_request_release(&requests[i].request);
}

/* A step takes 20 ms and 2 ms for each prompt row: 40 rows fit into 100 ms. */
static void test_prompt_rows_approach_the_goal(void **state) {
    int32_t limit = 256;
    (void)state;
    for (int i = 0; i < 20; i++) {
        limit = prompt_rows_adapt(limit, limit, 0.02 + 0.002 * limit, 0.1);
        assert_true(limit >= PROMPT_ROWS_MIN && (i < 3 || (limit >= 35 && limit <= 46)));
    }
    assert_int_equal(prompt_rows_adapt(40, 7, 0.01, 0.1), 40); // the prompts were short
    assert_int_equal(prompt_rows_adapt(40, 40, 5, 0.1), PROMPT_ROWS_MIN);
    assert_int_equal(prompt_rows_adapt(40, 32, 0.06, 0.1), 46); // 32 is 40 in whole tiles
    assert_int_equal(prompt_rows_adapt(40, 32, 0.04, 0.1), 80);
}

/* submission of too many requests, or of an invalid one */

struct tally {
    int done, cancelled; /* atomic */
};
static void tally_on_change(struct batcher_request *c, bool done) {
    struct tally *t = c->user;
    if (!done) return;
    __atomic_add_fetch(&t->cancelled, c->request.finish == FINISH_NONE, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&t->done, 1, __ATOMIC_SEQ_CST);
}

/* [n] requests that generate long replies. */
static struct batcher_request *long_requests_new(int n, struct tally *t) {
    struct batcher_request *requests = xcalloc((size_t)n, sizeof *requests);
    for (int i = 0; i < n; i++)
        requests[i] =
            (struct batcher_request){.request = {.prompt = tokens, .n_prompt = 4, .max_tokens = 40},
                                     .on_change = tally_on_change,
                                     .user = t};
    return requests;
}

static void requests_free(struct batcher_request *requests, int n) {
    for (int i = 0; i < n; i++) engine_request_release(&requests[i].request);
    free(requests);
}

static void test_submit_all_takes_all_or_none(void **state) {
    struct tally t = {0};
    struct error err;
    struct batcher_request *requests = long_requests_new(MAX_WAITING + 1, &t),
                           *list[MAX_WAITING + 1];
    (void)state;
    for (int i = 0; i <= MAX_WAITING; i++) list[i] = &requests[i];
    assert_int_equal(batcher_submit_all(b, list, MAX_WAITING + 1, &err), ERR_STATE);
    requests[3].request.n_prompt = 0;
    assert_int_equal(batcher_submit_all(b, list, MAX_WAITING, &err), ERR_USAGE);
    usleep(20000);
    assert_int_equal(batcher_stats(b).waiting + batcher_stats(b).running, 0);
    assert_int_equal(t.done, 0);
    requests_free(requests, MAX_WAITING + 1);
}

/* batcher_free while requests wait */

/* The callback of the blocking request blocks the batcher's thread until this is true, so that
 * requests submitted meanwhile wait. */
static bool blocking_request_released;

static void blocking_on_change(struct batcher_request *c, bool done) {
    (void)c;
    while (done && !__atomic_load_n(&blocking_request_released, __ATOMIC_ACQUIRE)) usleep(1000);
}

static void *run_until_freed(void *ctx) {
    struct engine_request r[8];
    struct error err;
    (void)ctx;
    for (int i = 0; i < 8; i++)
        r[i] = (struct engine_request){.prompt = tokens, .n_prompt = 4, .max_tokens = 40};
    int rc = batcher_run(b, r, 8, NULL, &err), cancelled = 0;
    for (int i = 0; i < 8; i++) {
        cancelled += r[i].done && r[i].finish == FINISH_NONE;
        engine_request_release(&r[i]);
    }
    return (void *)(intptr_t)(rc == OK ? cancelled : -1);
}

static void *embed_until_freed(void *ctx) {
    float out[TEXTS * 32];
    struct error err;
    (void)ctx;
    return (void *)(intptr_t)batcher_embed(b, texts, TEXTS, NULL, out, &err);
}

static void *release_blocking_request_later(void *ctx) {
    usleep(5000);
    __atomic_store_n(&blocking_request_released, true, __ATOMIC_RELEASE);
    return ctx;
}

static void wait_until_waiting(int waiting) {
    while (batcher_stats(b).waiting != waiting) usleep(1000);
}

static void test_free_while_others_wait(void **state) {
    enum { N = 300, RUNS = 3, EMBEDS = 4 };
    (void)state;
    for (int round = 0; round < 10; round++) {
        struct tally t = {0};
        struct error err;
        struct batcher_request *requests = long_requests_new(N, &t),
                               blocking = {.on_change = blocking_on_change};
        pthread_t threads[RUNS + EMBEDS + 1];
        void *got;
        blocking_request_released = false;
        blocking.request =
            (struct engine_request){.prompt = tokens, .n_prompt = 4, .max_tokens = 1};
        assert_int_equal(batcher_submit(b, &blocking, &err), OK);
        while (!__atomic_load_n(&blocking.done, __ATOMIC_ACQUIRE)) usleep(1000);
        for (int i = 0; i < N; i++) assert_int_equal(batcher_submit(b, &requests[i], &err), OK);
        for (int i = 0; i < RUNS + EMBEDS; i++)
            assert_int_equal(pthread_create(&threads[i], NULL,
                                            i < RUNS ? run_until_freed : embed_until_freed, NULL),
                             0);
        wait_until_waiting(N + 8 * RUNS + EMBEDS);
        assert_int_equal(
            pthread_create(&threads[RUNS + EMBEDS], NULL, release_blocking_request_later, NULL), 0);
        batcher_free(b);
        assert_int_equal(t.done, N);
        assert_int_equal(t.cancelled, N);
        for (int i = 0; i <= RUNS + EMBEDS; i++) {
            pthread_join(threads[i], &got);
            if (i < RUNS + EMBEDS) assert_int_equal((int)(intptr_t)got, i < RUNS ? 8 : ERR_STATE);
        }
        engine_request_release(&blocking.request);
        requests_free(requests, N);
        b = batcher_new(e, MAX_WAITING);
    }
}

/* sharing of the engine between clients */

static struct {
    uint64_t v[64]; /* clients of the requests, in the order of their ends */
    int n;
} ended_clients;

static void client_on_change(struct batcher_request *c, bool done) {
    if (done) ended_clients.v[ended_clients.n++] = c->client;
}

/* One client has 24 requests that wait, and another one comes with 4: of the first six that run
 * together, half are of each. */
static void test_clients_share_the_engine(void **state) {
    enum { N = 28, FIRST = 24 };
    struct tally t = {0};
    struct error err;
    struct batcher_request *requests = long_requests_new(N, &t),
                           blocking = {.on_change = blocking_on_change};
    (void)state;
    blocking_request_released = false;
    ended_clients.n = 0;
    blocking.request = (struct engine_request){.prompt = tokens, .n_prompt = 4, .max_tokens = 1};
    assert_int_equal(batcher_submit(b, &blocking, &err), OK);
    while (!__atomic_load_n(&blocking.done, __ATOMIC_ACQUIRE)) usleep(1000);
    for (int i = 0; i < N; i++) {
        requests[i].client = i < FIRST ? 7 : 9;
        requests[i].on_change = client_on_change;
        assert_int_equal(batcher_submit(b, &requests[i], &err), OK);
    }
    __atomic_store_n(&blocking_request_released, true, __ATOMIC_RELEASE);
    while (batcher_stats(b).running || batcher_stats(b).waiting) usleep(1000);
    assert_int_equal(ended_clients.n, N);
    int others = 0;
    for (int i = 0; i < SEQS; i++) others += ended_clients.v[i] == 9;
    assert_int_equal(others, SEQS / 2);
    engine_request_release(&blocking.request);
    requests_free(requests, N);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_many_threads),
        TEST(test_finished_requests_are_notified_first),
        TEST(test_prompt_rows_approach_the_goal),
        TEST(test_submit_all_takes_all_or_none),
        TEST(test_free_while_others_wait),
        TEST(test_clients_share_the_engine),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
