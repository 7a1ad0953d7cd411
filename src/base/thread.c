/*
 * thread: the thread pool of fixed size that every parallel loop uses.
 *
 * A unit is `grain` items. Workers and caller take chunks of units in order, lowest first. The size
 * of a chunk is the number of remaining units divided by the number of threads (guided
 * self-scheduling): the first chunks are large, because each chunk has a fixed cost; the last are
 * small, so that all threads end at about the same time, even if the host or an expensive item
 * slows one down. With a gate every chunk is one unit, so that a thread soon comes to the gate.
 * `thread` is the index of the executing thread, so scratch memory indexed by it is never shared.
 *
 * Protocol. The caller writes the job, then `left`, the number of unclaimed units, then publishes a
 * new `epoch`. A thread claims a chunk by subtracting units from `left`. It may read the job's
 * fields only after that; they cannot change before `pending`, which counts unfinished units,
 * reaches 0. A thread that is about to sleep increments `sleepers` (or sets `caller_sleeps`) before
 * it checks its futex word again, and a thread that wakes others changes the word before it checks
 * for sleepers, so no wake-up is lost.
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
 * A waiting thread spins this long before it sleeps: longer than the gaps inside a forward pass and
 * between two passes. Waking a sleeping thread costs 50 microseconds or more on a virtual machine,
 * half the time of a matrix product. After every SPINS_PER_YIELD checks it yields the processor.
 */
#define SPIN_SECONDS 200e-6
enum { SPINS_PER_YIELD = 64, UNITS_MAX = 1 << 20, POOL_MAX = 1024 };

typedef _Atomic uint32_t futex_word;

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
    int64_t n, grain;        /* a unit is `grain` items, the last one may be less */
    void (*gate)(void *ctx); /* NULL: none; it does not change after the first job */
    void *gate_ctx;
    atomic_bool stop;
    atomic_bool running;
    struct worker *workers; /* [size]; workers[0] is unused, because the caller is thread 0 */
    _Alignas(64) futex_word left;
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

static int64_t unit_count(int64_t n, int64_t grain) {
    return (n - 1) / grain + 1;
}

/* Claims a chunk and runs it; false when no units are left. */
static bool chunk_run_next(struct pool *p, int thread) {
    uint32_t left = atomic_load(&p->left), n_claimed;
    if (p->gate && left) {
        p->gate(p->gate_ctx);
        left = atomic_load(&p->left);
    }
    do {
        if (left == 0) return false;
        n_claimed = p->gate ? 1 : MAX(left / (uint32_t)p->size, 1);
    } while (!atomic_compare_exchange_weak(&p->left, &left, left - n_claimed));
    int64_t begin = unit_count(p->n, p->grain) - left, end = begin + n_claimed;
    p->fn(p->ctx, begin * p->grain, MIN(end * p->grain, p->n), thread);
    if (atomic_fetch_sub(&p->pending, n_claimed) == n_claimed && atomic_load(&p->caller_sleeps))
        futex_wake(&p->pending);
    return true;
}

/* Spins until the word equals `value` (with `until_differs`: differs from it) or SPIN_SECONDS have
 * passed. */
static void spin_until(const futex_word *word, uint32_t value, bool until_differs) {
    for (double end = 0;; sched_yield()) {
        for (int i = 0; i < SPINS_PER_YIELD; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) != until_differs)
                return;
            cpu_relax();
        }
        double now = clock_now();
        if (end == 0) end = now + SPIN_SECONDS;
        if (now >= end) return;
    }
}

static uint32_t epoch_wait(struct pool *p, uint32_t seen) {
    spin_until(&p->epoch, seen, true);
    uint32_t now = atomic_load(&p->epoch);
    if (now != seen) return now;
    atomic_fetch_add(&p->sleepers, 1);
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
        while (chunk_run_next(p, w->thread)) continue;
    }
}

static void epoch_publish(struct pool *p) {
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->sleepers) > 0) futex_wake(&p->epoch);
}

/* Workers block all signals, since handlers expect to run on the caller's thread. */
static void workers_start(struct pool *p, int wanted) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (p->size = 1; p->size < wanted; p->size++) {
        struct worker *w = &p->workers[p->size];
        *w = (struct worker){.pool = p, .thread = p->size};
        int rc = pthread_create(&w->id, NULL, worker_main, w);
        if (rc != 0) {
            log_warn("only %d of %d threads: %s", p->size, wanted, strerrordesc_np(rc));
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

struct pool *pool_new(int n_threads) {
    CHECK(n_threads >= 0);
    int wanted = n_threads ? n_threads : cpu_count();
    if (wanted > POOL_MAX) {
        log_warn("%d threads are more than the limit of %d", wanted, POOL_MAX);
        wanted = POOL_MAX;
    }
    struct arena arena = {0};
    struct pool *p = arena_alloc(&arena, sizeof(*p));
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

void pool_set_gate(struct pool *p, void (*gate)(void *ctx), void *ctx) {
    CHECK(atomic_load(&p->epoch) == 0);
    p->gate = gate;
    p->gate_ctx = ctx;
}

static void pending_wait(struct pool *p) {
    spin_until(&p->pending, 0, false);
    if (atomic_load(&p->pending) == 0) return;
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
    CHECK(!atomic_exchange(&p->running, true)); /* fails if nested, or driven by two threads */
    if (n <= grain || (p->size == 1 && !p->gate)) {
        if (p->gate) p->gate(p->gate_ctx);
        fn(ctx, 0, n, 0);
    } else {
        grain *= unit_count(unit_count(n, grain), UNITS_MAX);
        p->fn = fn, p->ctx = ctx, p->n = n, p->grain = grain;
        atomic_store(&p->pending, (uint32_t)unit_count(n, grain));
        atomic_store(&p->left, (uint32_t)unit_count(n, grain));
        epoch_publish(p);
        while (chunk_run_next(p, 0)) continue;
        pending_wait(p);
    }
    atomic_store(&p->running, false);
}

int cpu_count(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return MAX(CPU_COUNT(&set), 1);
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* for more processors than a cpu_set_t holds */
    return n > 0 ? (int)MIN(n, POOL_MAX) : 1;
}

/* struct sched_attr of linux/sched/types.h, version 0. */
struct schedule {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline,
        period; /* in ns; for normal threads `runtime` is the requested slice */
};

void thread_lower_priority(int nice) {
    struct schedule s = {.size = sizeof s, .nice = nice, .runtime = 100000};
    syscall(SYS_sched_setattr, 0, &s, 0u); // may fail: the priority is then unchanged
}
