/*
 * yield: background work that yields to foreground work, with turns for the background.
 *
 * The turns are counted in foreground time, not in time: `busy` grows only while there is
 * foreground work. So a client that sends one short request after another does not postpone the
 * turns, and a turn that begins before a pause continues after it.
 *
 * Invariant: n_foreground, and held and ended of every task, change under the lock, before a
 * broadcast. yield_task_wait reads them without the lock first: without foreground work it costs a
 * few loads.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

struct yield {
    double share;
    double (*clock)(void);
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_foreground;   /* atomic */
    double busy, begun; /* seconds of foreground work before `begun`, when the current one began */
};

struct yield *yield_new(double share, double (*clock)(void)) {
    CHECK(share >= 0 && share <= 1);
    struct yield *y = xcalloc(1, sizeof *y);
    y->share = share;
    y->clock = clock;
    pthread_mutex_init(&y->lock, NULL);
    pthread_cond_init(&y->changed, NULL);
    return y;
}

void yield_free(struct yield *y) {
    if (!y) return;
    CHECK(y->n_foreground == 0);
    pthread_cond_destroy(&y->changed);
    pthread_mutex_destroy(&y->lock);
    free(y);
}

void yield_foreground(struct yield *y, bool begins) {
    pthread_mutex_lock(&y->lock);
    int n = y->n_foreground + (begins ? 1 : -1);
    CHECK(n >= 0);
    if (begins && n == 1) y->begun = y->clock();
    if (n == 0) y->busy += y->clock() - y->begun;
    __atomic_store_n(&y->n_foreground, n, __ATOMIC_RELEASE);
    if (n == 0) pthread_cond_broadcast(&y->changed);
    pthread_mutex_unlock(&y->lock);
}

static void task_set(const struct yield_task *t, bool *flag, bool value) {
    pthread_mutex_lock(&t->y->lock);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&t->y->changed);
    pthread_mutex_unlock(&t->y->lock);
}

void yield_task_hold(struct yield_task *t, bool hold) {
    task_set(t, &t->held, hold);
}

void yield_task_end(struct yield_task *t) {
    task_set(t, &t->ended, true);
}

/* The lock is held. */
static double task_delay(const struct yield_task *t) {
    const struct yield *y = t->y;
    if (t->ended) return 0;
    if (t->held) return INFINITY;
    if (t->normal || y->n_foreground == 0) return 0;
    double at = fmod(y->busy + (y->clock() - y->begun), YIELD_PERIOD),
           turn = YIELD_PERIOD * (1 - y->share);
    return at < turn ? turn - at : 0;
}

double yield_task_delay(struct yield_task *t) {
    pthread_mutex_lock(&t->y->lock);
    double delay = task_delay(t);
    pthread_mutex_unlock(&t->y->lock);
    return delay;
}

/* Waits for a change, at most `seconds`. The lock is held. */
static void change_wait(struct yield *y, double seconds) {
    if (seconds == INFINITY)
        pthread_cond_wait(&y->changed, &y->lock);
    else
        condition_wait_until(&y->changed, &y->lock, clock_now() + seconds);
}

void yield_task_wait(void *task) {
    struct yield_task *t = task;
    struct yield *y = t->y;
    double delay;
    if (__atomic_load_n(&y->n_foreground, __ATOMIC_ACQUIRE) == 0 &&
        !__atomic_load_n(&t->held, __ATOMIC_ACQUIRE))
        return;
    pthread_mutex_lock(&y->lock);
    while ((delay = task_delay(t)) > 0) change_wait(y, delay);
    pthread_mutex_unlock(&y->lock);
}
