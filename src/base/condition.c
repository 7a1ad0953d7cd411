/* condition: waits of condition variables that end at a time of clock_now. */
#define _GNU_SOURCE
#include "base/base.h"

#include <time.h>

bool condition_wait_until(pthread_cond_t *c, pthread_mutex_t *lock, double end) {
    const struct timespec t = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    return pthread_cond_clockwait(c, lock, CLOCK_MONOTONIC, &t) == 0;
}
