/*
 * energy: the energy of the processor packages, from the counters of Linux's powercap interface
 * (RAPL).
 *
 * Each folder `intel-rapl:N` whose file `name` begins with "package-" is a package; AMD processors
 * have the same names. Other domains are left out: parts of a package (intel-rapl:N:M) and the
 * platform (psys) would count energy twice. A counter in microjoules runs from 0 to
 * max_energy_range_uj and starts again at 0, at full load after some minutes to an hour. So
 * energy_now has a thread that reads the counters often enough.
 *
 * Invariant: a meter whose counter could once not be read is NaN from then on.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_WATTS = 2000 }; /* an upper limit of a package's power */

struct energy_package {
    char *counter_path;
    uint64_t counter, range; /* microjoules: the last value, the largest value */
};
struct energy_meter {
    struct energy_package *packages; /* [n] */
    size_t n;
    double joules;
};

/* Reads a number without allocating memory, so that the thread gets no heap. */
static bool number_read(const char *path, uint64_t *out) {
    char text[32] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0) close(fd);
    *out = strtoull(text, NULL, 10);
    return n > 0 && text[0] >= '0' && text[0] <= '9';
}

static bool is_package(const char *folder) {
    char *path = path_join(folder, "name"), name[16] = "";
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(name, sizeof name, f) && strncmp(name, "package-", 8) == 0;
    if (f) fclose(f);
    free(path);
    return ok;
}

static bool package_open(struct energy_package *p, const char *folder) {
    char *range_path = path_join(folder, "max_energy_range_uj");
    p->counter_path = path_join(folder, "energy_uj");
    bool ok = number_read(range_path, &p->range) && p->range > 0 &&
              number_read(p->counter_path, &p->counter);
    free(range_path);
    return ok;
}

struct energy_meter *energy_meter_new(const char *folder) {
    struct energy_meter *m = xcalloc(1, sizeof *m);
    char *pattern = path_join(folder, "intel-rapl:*");
    glob_t g = {0};
    bool ok = glob(pattern, 0, NULL, &g) == 0;
    m->packages = xcalloc(g.gl_pathc + 1, sizeof *m->packages);
    for (size_t i = 0; ok && i < g.gl_pathc; i++)
        if (is_package(g.gl_pathv[i])) ok = package_open(&m->packages[m->n++], g.gl_pathv[i]);
    globfree(&g);
    free(pattern);
    if (ok && m->n > 0) return m;
    energy_meter_free(m);
    return NULL;
}

double energy_meter_read(struct energy_meter *m) {
    for (size_t i = 0; i < m->n; i++) {
        struct energy_package *p = &m->packages[i];
        uint64_t now, used;
        if (!number_read(p->counter_path, &now)) return m->joules = NAN;
        used = now >= p->counter ? now - p->counter : p->range - p->counter + now;
        p->counter = now;
        m->joules += 1e-6 * (double)used;
    }
    return m->joules;
}

double energy_meter_period(const struct energy_meter *m) {
    double period = INFINITY;
    for (size_t i = 0; i < m->n; i++)
        period = fmin(period, 1e-6 * (double)m->packages[i].range / MAX_WATTS);
    return period;
}

void energy_meter_free(struct energy_meter *m) {
    for (size_t i = 0; m && i < m->n; i++) free(m->packages[i].counter_path);
    if (m) free(m->packages);
    free(m);
}

void energy_add_json(json_t *v, double joules, int64_t tokens) {
    if (isnan(joules)) return;
    json_object_set_new(v, "joules", json_real(joules));
    if (tokens > 0) json_object_set_new(v, "joules_per_token", json_real(joules / (double)tokens));
}

/* the process's meter */

static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static struct energy_meter *process_meter; /* NULL: no counters */

static double process_meter_read(void) {
    pthread_mutex_lock(&process_lock);
    double joules = process_meter ? energy_meter_read(process_meter) : NAN;
    pthread_mutex_unlock(&process_lock);
    return joules;
}

static void *overflows_watch(void *unused) {
    double period = energy_meter_period(process_meter);
    while (!isnan(process_meter_read())) usleep((useconds_t)(1e6 * fmin(fmax(period, 1), 60)));
    return unused;
}

/* Starts the thread with all signals blocked, since handlers expect to run on other threads. */
static bool watch_start(void) {
    pthread_t thread;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = pthread_create(&thread, NULL, overflows_watch, NULL) == 0;
    if (ok) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return ok;
}

/* Without the thread a long run may miss an overflow, so there is no meter then. */
static void process_meter_open(void) {
    const char *folder = getenv("SHOAL_POWERCAP");
    process_meter = energy_meter_new(folder ? folder : "/sys/class/powercap");
    if (!process_meter || watch_start()) return;
    energy_meter_free(process_meter);
    process_meter = NULL;
}

double energy_now(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, process_meter_open);
    return process_meter_read();
}
