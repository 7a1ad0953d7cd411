/*
 * batcher: the engine's thread. The engine gets at most as many requests as it can run at once.
 * Other requests wait in the queues here, where cancelling is cheap and interactive requests
 * overtake background requests. Interactive requests wait in a queue for each client; the next one
 * to start is of the client with the fewest running requests.
 *
 * Invariant: only the batcher's thread uses the engine, and never while it holds the lock, so that
 * a submission does not wait for a step.
 */
#define _GNU_SOURCE
#include "serve/batcher.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct request_queue {
    struct batcher_request *head, *tail;
    int n;
};

/* The interactive requests of a client. It exists while there are any. */
struct client {
    uint64_t id;
    struct request_queue waiting;
    int running;
    struct client *next;
};

/* A call of engine_embed between two steps, for a thread that waits for the result. */
struct embed_task {
    struct embed_task *next;
    const struct token_seq *texts;
    int32_t n;
    struct adapter *adapter;
    float *out;
    struct error *err;
    int rc;
    bool done;
};

struct batcher {
    struct engine *e;
    int max_waiting, max_running;
    pthread_t thread;

    pthread_mutex_t lock; /* guards the fields below, except on_step to in_engine */
    pthread_cond_t work_ready, embed_done, embed_drained;
    struct client *clients;
    int n_interactive; /* interactive requests that wait */
    struct request_queue background;
    struct embed_task *embed_queue, *embed_queue_tail;
    int n_embed_callers; /* threads in batcher_embed; batcher_free waits for them */
    int n_cancelled;     /* requests in the engine that have to be cancelled */
    bool quit;
    struct yield *yield; /* NULL: none */
    bool is_foreground;  /* yield_foreground has begun */
    struct batcher_stats stats;

    void (*on_step)(void *ctx, double seconds, int32_t rows);
    void *on_step_ctx;
    uint64_t rows;                      /* rows computed so far */
    double step_seconds;                /* duration of the last step */
    double step_goal;                   /* see batcher_set_step_seconds */
    int32_t prompt_rows;                /* the engine's limit; see prompt_rows_adapt */
    double memory_checked_at;           /* clock_now of the last memory_return */
    struct batcher_request **in_engine; /* [n_in_engine] private to the thread */
    int n_in_engine, n_background;
};

static void queue_add(struct request_queue *q, struct batcher_request *c) {
    c->next = NULL;
    *(q->tail ? &q->tail->next : &q->head) = c;
    q->tail = c;
    q->n++;
}

static struct batcher_request *queue_pop(struct request_queue *q) {
    struct batcher_request *c = q->head;
    q->head = c->next;
    if (!q->head) q->tail = NULL;
    q->n--;
    return c;
}

/* Returns whether the queue contained it. */
static bool queue_remove(struct request_queue *q, const struct batcher_request *c) {
    struct batcher_request **link = &q->head, *previous = NULL;
    while (*link && *link != c) {
        previous = *link;
        link = &previous->next;
    }
    if (!*link) return false;
    *link = c->next;
    if (q->tail == c) q->tail = previous;
    q->n--;
    return true;
}

/* The lock is held. */
static void foreground_set(struct batcher *b, bool begins) {
    if (!b->yield || b->is_foreground == begins) return;
    b->is_foreground = begins;
    yield_foreground(b->yield, begins);
}

/* Finds or creates a client. The lock is held. */
static struct client *client_get(struct batcher *b, uint64_t id) {
    struct client **link = &b->clients;
    while (*link && (*link)->id != id) link = &(*link)->next;
    if (!*link) {
        *link = xcalloc(1, sizeof **link);
        (*link)->id = id;
    }
    return *link;
}

/* Frees a client without requests. The lock is held. */
static void client_release(struct batcher *b, struct client *client) {
    struct client **link = &b->clients;
    if (client->waiting.n || client->running) return;
    while (*link != client) link = &(*link)->next;
    *link = client->next;
    free(client);
}

/* Pops a request of the client with the fewest running requests; of several such clients, of the
 * one whose request waits longest. NULL: none waits. The lock is held. */
static struct batcher_request *interactive_pop(struct batcher *b) {
    struct client *best = NULL;
    for (struct client *c = b->clients; c; c = c->next) {
        if (!c->waiting.n) continue;
        if (!best || c->running < best->running ||
            (c->running == best->running &&
             c->waiting.head->submitted < best->waiting.head->submitted))
            best = c;
    }
    if (!best) return NULL;
    b->n_interactive--;
    best->running++;
    return queue_pop(&best->waiting);
}

/* Removes a request that waits. Returns whether it did. The lock is held. */
static bool waiting_remove(struct batcher *b, struct batcher_request *c) {
    if (c->background) return queue_remove(&b->background, c);
    struct client *client = client_get(b, c->client);
    bool removed = queue_remove(&client->waiting, c);
    b->n_interactive -= removed;
    client_release(b, client);
    return removed;
}

/* Accounts for the end of a request that was in the engine. */
static void running_remove(struct batcher *b, const struct batcher_request *c) {
    if (c->background) {
        b->n_background--;
        return;
    }
    pthread_mutex_lock(&b->lock);
    struct client *client = client_get(b, c->client);
    client->running--;
    client_release(b, client);
    pthread_mutex_unlock(&b->lock);
}

static void request_notify(struct batcher_request *c) {
    bool done = c->request.done;
    double now = clock_now();
    if (c->request.n_out > 0 && c->first == 0) c->first = now;
    if (done) c->ended = now;
    __atomic_store_n(&c->n_visible, c->request.n_out, __ATOMIC_RELEASE);
    __atomic_store_n(&c->done, done, __ATOMIC_RELEASE);
    c->on_change(c, done);
}

/* Ends a request that was cancelled before it entered the engine. */
static void request_end_unstarted(struct batcher_request *c) {
    c->request.done = true;
    c->request.finish = FINISH_NONE;
    request_notify(c);
}

/* Pops the next request to start: interactive requests first; background requests take at most half
 * of the engine's sequences. The lock is held. */
static struct batcher_request *request_next(struct batcher *b) {
    if (b->n_in_engine == b->max_running) return NULL;
    if (b->n_interactive) return interactive_pop(b);
    if (b->background.n && b->n_background < MAX(1, b->max_running / 2))
        return queue_pop(&b->background);
    return NULL;
}

static struct batcher_request *request_start(struct batcher *b) {
    pthread_mutex_lock(&b->lock);
    struct batcher_request *c = request_next(b);
    if (c) {
        b->in_engine[b->n_in_engine++] = c;
        b->n_background += c->background;
    }
    pthread_mutex_unlock(&b->lock);
    return c;
}

/* A request without memory for its results is done at once; it stays in in_engine until
 * requests_notify. */
static void requests_admit(struct batcher *b) {
    struct error err;
    for (struct batcher_request *c; (c = request_start(b));) {
        c->started = clock_now();
        if (engine_submit(b->e, &c->request, &err) == OK) continue;
        CHECK(err.code == ERR_MEMORY); // engine_check has covered all other errors
        c->request.done = c->no_memory = true;
        c->request.finish = FINISH_NONE;
    }
}

static void requests_cancel(struct batcher *b) {
    pthread_mutex_lock(&b->lock);
    bool any = b->n_cancelled > 0;
    b->n_cancelled = 0;
    pthread_mutex_unlock(&b->lock);
    for (int i = 0; any && i < b->n_in_engine; i++)
        if (__atomic_load_n(&b->in_engine[i]->cancelled, __ATOMIC_ACQUIRE))
            engine_cancel(b->e, &b->in_engine[i]->request);
}

/* Notifies finished requests first, because their clients may submit again. Returns the number of
 * finished requests. */
static int requests_notify(struct batcher *b) {
    int n = 0, ended = 0;
    uint64_t cached = 0, cancelled = 0;
    pthread_mutex_lock(&b->lock);
    bool quit = b->quit;
    pthread_mutex_unlock(&b->lock);
    for (int i = 0; i < b->n_in_engine; i++) {
        struct batcher_request *c = b->in_engine[i];
        if (!c->request.done) {
            b->in_engine[n++] = c;
            continue;
        }
        running_remove(b, c);
        c->no_result = c->request.finish == FINISH_NONE && !c->no_memory && !quit &&
                       !__atomic_load_n(&c->cancelled, __ATOMIC_ACQUIRE);
        cached += (uint64_t)c->request.n_cached;
        cancelled += c->request.finish == FINISH_NONE;
        ended++;
        request_notify(c); // this may free the request
    }
    for (int i = 0; i < n; i++)
        if (b->in_engine[i]->request.n_out > b->in_engine[i]->n_visible)
            request_notify(b->in_engine[i]);
    pthread_mutex_lock(&b->lock);
    b->n_in_engine = n;
    b->stats.cached += cached;
    b->stats.cancelled += cancelled;
    pthread_mutex_unlock(&b->lock);
    return ended;
}

/* A client that submits its next request right after a reply would just miss the next step, and its
 * sequence in the batch would stay empty. So the thread waits until as many requests are queued as
 * have ended, for at most 1/32 of a step. */
static void resubmit_wait(struct batcher *b, int ended) {
    double until = clock_now() + b->step_seconds / 32;
    pthread_mutex_lock(&b->lock);
    while (!b->quit && b->n_interactive + b->background.n < ended &&
           condition_wait_until(&b->work_ready, &b->lock, until))
        ;
    pthread_mutex_unlock(&b->lock);
}

/* Runs the oldest task. Only one runs per step, so that many tasks do not stop the requests. */
static void embed_task_run(struct batcher *b) {
    pthread_mutex_lock(&b->lock);
    struct embed_task *w = b->embed_queue;
    bool quit = b->quit;
    if (w) b->embed_queue = w->next;
    pthread_mutex_unlock(&b->lock);
    if (!w) return;
    w->rc = quit ? error_set(w->err, ERR_STATE, "the server is shutting down")
                 : engine_embed(b->e, w->texts, w->n, w->adapter, w->out, w->err);
    pthread_mutex_lock(&b->lock);
    w->done = true;
    pthread_cond_broadcast(&b->embed_done);
    pthread_mutex_unlock(&b->lock);
}

/* Products compute whole tiles of 16 rows. */
static int32_t prompt_rows_whole(int32_t limit) {
    return limit / PROMPT_ROWS_MIN * PROMPT_ROWS_MIN;
}

int32_t prompt_rows_adapt(int32_t limit, int32_t rows, double seconds, double goal) {
    if (seconds > goal) return MAX(PROMPT_ROWS_MIN, (int32_t)(rows * goal / seconds));
    if (rows < prompt_rows_whole(limit)) return limit;
    return seconds < goal / 2 ? 2 * limit : limit + limit / 8 + 1;
}

/* Steps without replies, which have no limit, show the speed as well. `s`: the statistics after the
 * step; b->stats: before it. */
static void step_limit_prompts(struct batcher *b, const struct engine_stats *s) {
    int32_t rows = (int32_t)(s->prefilled - b->stats.prefilled), most = engine_max_rows(b->e);
    if (b->step_goal == 0 || rows == 0) return;
    int32_t next = prompt_rows_adapt(b->prompt_rows, rows, b->step_seconds, b->step_goal);
    b->prompt_rows = MIN(next, most);
    engine_set_prompt_rows(b->e, prompt_rows_whole(b->prompt_rows));
}

static void step(struct batcher *b) {
    double begin = clock_now();
    engine_step(b->e);
    b->step_seconds = clock_now() - begin;
    struct engine_stats s = engine_stats(b->e);
    step_limit_prompts(b, &s);
    pthread_mutex_lock(&b->lock);
    b->stats.steps = s.steps;
    b->stats.prefilled = s.prefilled;
    b->stats.generated = s.generated;
    b->stats.pages = s.pages;
    b->stats.pages_free = s.pages_free;
    b->stats.busy += b->step_seconds;
    pthread_mutex_unlock(&b->lock);
    bool rows = s.rows > b->rows; // false: every request waits for the token mask of its grammar
    if (b->on_step && rows)
        b->on_step(b->on_step_ctx, b->step_seconds, (int32_t)(s.rows - b->rows));
    b->rows = s.rows;
}

enum { MEMORY_CHECK_SECONDS = 1 };

/* Returns unused memory of the KV cache, if less than a sixteenth of the machine's is available. */
static void memory_return(struct batcher *b) {
    double now = clock_now();
    if (now < b->memory_checked_at + MEMORY_CHECK_SECONDS) return;
    b->memory_checked_at = now;
    struct memory_info m = memory_info("/");
    if (m.available >= 0 && m.available < m.total / 16) engine_trim(b->e);
}

static bool has_work(const struct batcher *b) {
    return b->quit || b->n_interactive || b->background.n || b->embed_queue || b->n_in_engine > 0;
}

/* Waits for work; with a remote that streams, for at most a second. Returns false when the thread
 * has to end. */
static bool work_wait(struct batcher *b) {
    const double idle_seconds = 1;
    bool waits = true, remote = engine_remote_streams(b->e);
    pthread_mutex_lock(&b->lock);
    while (waits && !has_work(b)) {
        foreground_set(b, false);
        if (!remote)
            pthread_cond_wait(&b->work_ready, &b->lock);
        else
            waits = condition_wait_until(&b->work_ready, &b->lock, clock_now() + idle_seconds);
    }
    bool go_on = !b->quit;
    pthread_mutex_unlock(&b->lock);
    return go_on;
}

/* Pops a request that still waits at shutdown; other threads may cancel requests meanwhile. */
static struct batcher_request *queued_request_pop(struct batcher *b) {
    pthread_mutex_lock(&b->lock);
    struct client *client = b->clients;
    while (client && !client->waiting.n) client = client->next;
    struct batcher_request *c = client ? client->waiting.head : b->background.head;
    if (c) waiting_remove(b, c);
    b->stats.cancelled += c != NULL;
    pthread_mutex_unlock(&b->lock);
    return c;
}

static void *batcher_thread(void *ctx) {
    struct batcher *b = ctx;
    while (work_wait(b)) {
        requests_admit(b);
        requests_cancel(b);
        if (b->n_in_engine)
            step(b);
        else if (engine_remote_streams(b->e))
            engine_step(b->e);
        int ended = requests_notify(b);
        embed_task_run(b);
        memory_return(b);
        if (ended) resubmit_wait(b, ended);
    }
    for (int i = 0; i < b->n_in_engine; i++) engine_cancel(b->e, &b->in_engine[i]->request);
    requests_notify(b);
    for (struct batcher_request *c; (c = queued_request_pop(b));) request_end_unstarted(c);
    while (b->embed_queue) embed_task_run(b);
    return NULL;
}

struct batcher *batcher_new(struct engine *e, int max_waiting) {
    struct batcher *b = xcalloc(1, sizeof *b);
    *b = (struct batcher){.e = e,
                          .max_waiting = max_waiting,
                          .max_running = engine_max_seqs(e),
                          .prompt_rows = MIN(PROMPT_ROWS_START, engine_max_rows(e))};
    b->in_engine = xcalloc((size_t)b->max_running, sizeof *b->in_engine);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work_ready, NULL);
    pthread_cond_init(&b->embed_done, NULL);
    pthread_cond_init(&b->embed_drained, NULL);
    struct engine_stats s = engine_stats(e);
    b->stats.pages = s.pages;
    b->stats.pages_free = s.pages_free;
    CHECK(pthread_create(&b->thread, NULL, batcher_thread, b) == 0);
    return b;
}

void batcher_free(struct batcher *b) {
    if (!b) return;
    pthread_mutex_lock(&b->lock);
    b->quit = true;
    pthread_cond_signal(&b->work_ready);
    pthread_mutex_unlock(&b->lock);
    engine_wake(b->e);
    pthread_join(b->thread, NULL);
    pthread_mutex_lock(&b->lock);
    foreground_set(b, false);
    while (b->n_embed_callers) pthread_cond_wait(&b->embed_drained, &b->lock);
    pthread_mutex_unlock(&b->lock);
    free(b->in_engine);
    free(b);
}

int batcher_submit_all(struct batcher *b, struct batcher_request *const *c, int n,
                       struct error *err) {
    for (int i = 0; i < n; i++)
        if (engine_check(b->e, &c[i]->request, err) != OK) return err->code;
    pthread_mutex_lock(&b->lock);
    bool quit = b->quit,
         full = quit || (!c[0]->background && b->n_interactive + n > b->max_waiting);
    for (int i = 0; !full && i < n; i++) {
        c[i]->submitted = clock_now();
        queue_add(c[i]->background ? &b->background : &client_get(b, c[i]->client)->waiting, c[i]);
        b->n_interactive += !c[i]->background;
    }
    if (!full) foreground_set(b, true);
    pthread_cond_signal(&b->work_ready);
    pthread_mutex_unlock(&b->lock);
    if (!full) engine_wake(b->e);
    if (!full) return OK;
    if (quit) return error_set(err, ERR_STATE, "the server is shutting down");
    return error_set(err, ERR_STATE, "%d requests wait already; try again later", b->max_waiting);
}

int batcher_submit(struct batcher *b, struct batcher_request *c, struct error *err) {
    return batcher_submit_all(b, &c, 1, err);
}

void batcher_cancel(struct batcher *b, struct batcher_request *c) {
    pthread_mutex_lock(&b->lock);
    bool waiting = waiting_remove(b, c);
    if (!waiting && !c->cancelled) {
        __atomic_store_n(&c->cancelled, true, __ATOMIC_RELEASE);
        b->n_cancelled++;
    }
    b->stats.cancelled += waiting;
    pthread_mutex_unlock(&b->lock);
    if (waiting)
        request_end_unstarted(c);
    else
        engine_wake(b->e);
}

/* blocking functions */

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t done;
    int left;
};

static void run_on_change(struct batcher_request *c, bool done) {
    struct waiter *w = c->user;
    if (!done) return;
    pthread_mutex_lock(&w->lock);
    w->left--;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
}

static void requests_wait(struct batcher *b, struct waiter *w, struct batcher_request *requests,
                          int n, const bool *stop) {
    bool stopped = false;
    pthread_mutex_lock(&w->lock);
    while (w->left > 0) {
        condition_wait_until(&w->done, &w->lock, clock_now() + 0.2);
        if (stopped || !stop || !__atomic_load_n(stop, __ATOMIC_ACQUIRE)) continue;
        stopped = true;
        pthread_mutex_unlock(&w->lock);
        for (int i = 0; i < n; i++) batcher_cancel(b, &requests[i]);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
}

/* Runs n requests, each of which is a copy of `kind` for one of r. */
static int requests_run(struct batcher *b, const struct batcher_request *kind,
                        struct engine_request *r, int n, const bool *stop, struct error *err) {
    struct waiter w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, n};
    struct batcher_request *requests = xcalloc((size_t)MAX(n, 1), sizeof *requests);
    struct batcher_request **list = xcalloc((size_t)MAX(n, 1), sizeof *list);
    for (int i = 0; i < n; i++) {
        requests[i] = *kind;
        requests[i].request = r[i];
        requests[i].on_change = run_on_change;
        requests[i].user = &w;
        list[i] = &requests[i];
    }
    int rc = n > 0 ? batcher_submit_all(b, list, n, err) : OK;
    if (rc == OK) requests_wait(b, &w, requests, n, stop);
    for (int i = 0; rc == OK && i < n; i++) r[i] = requests[i].request;
    for (int i = 0; rc == OK && i < n; i++) {
        if (requests[i].no_memory)
            rc = error_set(err, ERR_MEMORY, "out of memory for the results of a request");
        else if (requests[i].no_result)
            rc = error_set(err, ERR_STATE, "the nodes do not agree on the tokens of a request");
    }
    free(list);
    free(requests);
    if (rc == OK && stop && __atomic_load_n(stop, __ATOMIC_ACQUIRE))
        rc = error_set(err, ERR_STATE, "cancelled");
    return rc;
}

int batcher_run(struct batcher *b, struct engine_request *r, int n, const bool *stop,
                struct error *err) {
    return requests_run(b, &(struct batcher_request){.background = true}, r, n, stop, err);
}

int batcher_run_interactive(struct batcher *b, uint64_t client, struct engine_request *r, int n,
                            const bool *stop, struct error *err) {
    return requests_run(b, &(struct batcher_request){.client = client}, r, n, stop, err);
}

int batcher_embed(struct batcher *b, const struct token_seq *texts, int32_t n,
                  struct adapter *adapter, float *out, struct error *err) {
    struct embed_task w = {.texts = texts, .n = n, .adapter = adapter, .out = out, .err = err};
    pthread_mutex_lock(&b->lock);
    if (b->quit) {
        pthread_mutex_unlock(&b->lock);
        return error_set(err, ERR_STATE, "the server is shutting down");
    }
    *(b->embed_queue ? &b->embed_queue_tail->next : &b->embed_queue) = &w;
    b->embed_queue_tail = &w;
    b->n_embed_callers++;
    foreground_set(b, true);
    pthread_cond_signal(&b->work_ready);
    engine_wake(b->e);
    while (!w.done) pthread_cond_wait(&b->embed_done, &b->lock);
    if (--b->n_embed_callers == 0) pthread_cond_signal(&b->embed_drained);
    pthread_mutex_unlock(&b->lock);
    return w.rc;
}

struct batcher_stats batcher_stats(struct batcher *b) {
    pthread_mutex_lock(&b->lock);
    struct batcher_stats s = b->stats;
    s.running = b->n_in_engine;
    s.waiting = b->n_interactive + b->background.n + b->n_embed_callers;
    s.max_running = b->max_running;
    pthread_mutex_unlock(&b->lock);
    return s;
}

void batcher_set_step_seconds(struct batcher *b, double seconds) {
    b->step_goal = seconds;
    engine_set_prompt_rows(b->e, seconds > 0 ? b->prompt_rows : engine_max_rows(b->e));
}

void batcher_set_yield(struct batcher *b, struct yield *y) {
    b->yield = y;
}

void batcher_on_step(struct batcher *b, void (*fn)(void *ctx, double seconds, int32_t rows),
                     void *ctx) {
    b->on_step_ctx = ctx;
    b->on_step = fn;
}
