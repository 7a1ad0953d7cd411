/*
 * thread: the fixed pool behind every parallel loop.
 *
 * It has no queue and no stealing. A run splits 0..n-1 into one contiguous range per thread; the
 * split depends on n, grain and the pool's size only. A range is claimed by its own worker, or by
 * the caller once its own range is done and the worker has not yet come: on a busy machine the run
 * is then late by the work itself, not by the scheduler's delay. `thread` names the range, so
 * scratch indexed by it is never shared, whoever executes it.
 *
 * Protocol. The caller writes the job, then publishes a new `epoch`. Range t is claimed by moving
 * claim[t] from epoch-1 to epoch; the job's fields may be read only after a successful claim, and
 * cannot change before `pending`, which counts unfinished ranges, reaches 0. Sleepers announce
 * themselves before they look once more at the word that they sleep on, and wakers change the word
 * before they look for sleepers, so no wake-up is lost.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * How often a waiter looks before it sleeps. A look is one pause instruction, 10 to 40 ns on the
 * processors we know, so 200 are some 2 to 8 microseconds: about what a futex sleep and wake cost
 * by themselves, which bounds the waste at twice the best possible, yet longer than the gap between
 * two products of one forward pass.
 */
enum { SPIN_LOOKS = 200, POOL_MAX = 1024 };

typedef _Atomic uint32_t futex_word;

struct claim {
    _Alignas(64) futex_word epoch; /* a cache line each: workers write theirs at the same moment */
};

struct worker {
    struct pool *pool;
    pthread_t id;
    int thread;
};

struct pool {
    struct arena arena; /* holds the pool itself */
    int size;
    pool_fn fn;
    void *ctx;
    int64_t n, grain;
    atomic_bool stop;
    atomic_bool running;
    struct claim *claims;   /* [size] */
    struct worker *workers; /* [size], the first unused */
    _Alignas(64) futex_word epoch;
    _Atomic uint32_t sleepers;
    _Alignas(64) futex_word pending;
    atomic_bool caller_sleeps;
};

static void futex_wait(futex_word *word, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(futex_word *word) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Range of `thread`: whole grains, shared out evenly; the last range takes the remainder. */
static void pool_execute(struct pool *p, int thread) {
    int64_t units = (p->n - 1) / p->grain + 1;
    int64_t begin = units / p->size * thread + units % p->size * thread / p->size;
    int64_t end = units / p->size * (thread + 1) + units % p->size * (thread + 1) / p->size;
    if (begin < end) p->fn(p->ctx, begin * p->grain, end == units ? p->n : end * p->grain, thread);
}

/* Runs range `thread` of run `epoch` unless somebody has it already. */
static bool range_take(struct pool *p, int thread, uint32_t epoch) {
    uint32_t before = epoch - 1;
    if (!atomic_compare_exchange_strong(&p->claims[thread].epoch, &before, epoch)) return false;
    pool_execute(p, thread);
    if (atomic_fetch_sub(&p->pending, 1) == 1 && atomic_load(&p->caller_sleeps))
        futex_wake(&p->pending);
    return true;
}

static uint32_t epoch_wait(struct pool *p, uint32_t seen) {
    for (int i = 0; i < SPIN_LOOKS; i++) {
        uint32_t now = atomic_load_explicit(&p->epoch, memory_order_acquire);
        if (now != seen) return now;
        cpu_relax();
    }
    atomic_fetch_add(&p->sleepers, 1);
    uint32_t now;
    while ((now = atomic_load(&p->epoch)) == seen) futex_wait(&p->epoch, seen);
    atomic_fetch_sub(&p->sleepers, 1);
    return now;
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    struct pool *p = w->pool;
    for (uint32_t seen = 0;;) {
        seen = epoch_wait(p, seen);
        if (atomic_load(&p->stop)) return NULL;
        range_take(p, w->thread, seen);
    }
}

static void epoch_publish(struct pool *p) {
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->sleepers) > 0) futex_wake(&p->epoch);
}

/* Workers leave signals to the caller, whose handlers expect to be on its thread. */
static void workers_start(struct pool *p, int wanted) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (p->size = 1; p->size < wanted; p->size++) {
        struct worker *w = &p->workers[p->size];
        *w = (struct worker){.pool = p, .thread = p->size};
        int rc = pthread_create(&w->id, NULL, worker_main, w);
        if (rc != 0) {
            warn("only %d of %d threads: %s", p->size, wanted, strerrordesc_np(rc));
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

struct pool *pool_new(int n_threads) {
    CHECK(n_threads >= 0);
    int wanted = n_threads ? n_threads : cpu_count();
    if (wanted > POOL_MAX) {
        warn("%d threads are more than the limit of %d", wanted, POOL_MAX);
        wanted = POOL_MAX;
    }
    struct arena arena = {0};
    struct pool *p = arena_alloc(&arena, sizeof(*p));
    p->claims = arena_alloc(&arena, (size_t)wanted * sizeof(*p->claims));
    p->workers = arena_alloc(&arena, (size_t)wanted * sizeof(*p->workers));
    p->arena = arena;
    workers_start(p, wanted);
    return p;
}

void pool_free(struct pool *p) {
    if (!p) return;
    CHECK(!atomic_load(&p->running));
    atomic_store(&p->stop, true);
    epoch_publish(p);
    for (int t = 1; t < p->size; t++) pthread_join(p->workers[t].id, NULL);
    struct arena arena = p->arena;
    arena_release(&arena);
}

int pool_size(const struct pool *p) {
    return p ? p->size : 1;
}

static void pending_wait(struct pool *p) {
    for (int i = 0; i < SPIN_LOOKS; i++) {
        if (atomic_load_explicit(&p->pending, memory_order_acquire) == 0) return;
        cpu_relax();
    }
    atomic_store(&p->caller_sleeps, true);
    for (uint32_t left; (left = atomic_load(&p->pending)) != 0;) futex_wait(&p->pending, left);
    atomic_store(&p->caller_sleeps, false);
}

void pool_run(struct pool *p, pool_fn fn, void *ctx, int64_t n, int64_t grain) {
    CHECK(n >= 0 && grain > 0);
    if (n == 0) return;
    if (!p) {
        fn(ctx, 0, n, 0);
        return;
    }
    CHECK(!atomic_exchange(&p->running, true)); /* nested, or driven by two threads */
    if (p->size == 1 || n <= grain) {
        fn(ctx, 0, n, 0);
    } else {
        p->fn = fn, p->ctx = ctx, p->n = n, p->grain = grain;
        atomic_store(&p->pending, (uint32_t)p->size);
        epoch_publish(p);
        uint32_t epoch = atomic_load(&p->epoch);
        for (int t = 0; t < p->size; t++) range_take(p, t, epoch);
        pending_wait(p);
    }
    atomic_store(&p->running, false);
}

int cpu_count(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return MAX(CPU_COUNT(&set), 1);
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than a cpu_set_t holds */
    return n > 0 ? (int)MIN(n, POOL_MAX) : 1;
}
