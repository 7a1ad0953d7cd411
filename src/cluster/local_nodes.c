/*
 * local_nodes: the processes of a cluster "local:N" and of the autoscaler (cluster.h).
 *
 * Every process has a slot, whose number is part of its name. A slot is free again when its process
 * has ended; until then a new process gets another one, so two nodes never have the same name.
 */
#define _GNU_SOURCE
#include "cluster/cluster.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process that has run for less than SHORT_SECONDS, SHORT_RUNS times in succession, is given up.
 */
enum { SHORT_RUNS = 3, WAIT_MICROSECONDS = 20000 };
static const double SHORT_SECONDS = 10;

struct process {
    char *name;
    pid_t pid; /* 0: none */
    bool needed;
    double started, kill_at; /* kill_at: time of the SIGKILL if the process is not needed */
    int short_runs;
};
struct local_nodes {
    struct process v[CLUSTER_LOCAL_MAX];
    struct strings args;
    double drain_seconds;
};

static int process_start(struct process *p, const struct strings *args, struct error *err) {
    pid_t parent = getpid();
    int n = 0;
    char **argv = xcalloc((size_t)args->n + 4, sizeof *argv);
    argv[n++] = "shoal";
    for (int i = 0; i < args->n; i++) argv[n++] = args->v[i];
    argv[n++] = "--name";
    argv[n++] = p->name;
    p->started = clock_now();
    p->pid = fork();
    if (p->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(127); // the parent died before PR_SET_PDEATHSIG
        setpgid(0, 0); // Ctrl-C in a terminal is for the program that started it
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL); // threads of a server block signals
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    free(argv);
    if (p->pid > 0) return OK;
    p->pid = 0;
    return error_errno(err, "cannot start a node");
}

int local_nodes_needed(const struct local_nodes *l) {
    int n = 0;
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++) n += l->v[i].needed;
    return n;
}

/* The process to start (a free slot) or to end (the youngest needed one), or NULL. */
static struct process *process_choose(struct local_nodes *l, bool start) {
    struct process *found = NULL;
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++) {
        struct process *p = &l->v[i];
        if (start && !p->pid) return p;
        if (!start && p->needed && (!found || p->started >= found->started)) found = p;
    }
    return found;
}

static void process_end(struct process *p, double drain_seconds) {
    p->needed = false;
    p->kill_at = clock_now() + drain_seconds;
    if (p->pid) kill(p->pid, SIGTERM);
}

int local_nodes_resize(struct local_nodes *l, int n, struct error *err) {
    int needed = local_nodes_needed(l), rc = OK;
    for (; needed > n; needed--) process_end(process_choose(l, false), l->drain_seconds);
    for (; rc == OK && needed < n; needed++) {
        struct process *p = process_choose(l, true);
        if (!p)
            return error_set(err, ERR_MEMORY, "at most %d nodes run on this machine",
                             CLUSTER_LOCAL_MAX);
        p->short_runs = 0;
        rc = process_start(p, &l->args, err);
        p->needed = rc == OK;
    }
    return rc;
}

struct local_nodes *local_nodes_start(int n, const struct local_nodes_options *o,
                                      struct error *err) {
    struct local_nodes *l = xcalloc(1, sizeof *l);
    l->drain_seconds = o->drain_seconds;
    for (int i = 0; i < o->args->n; i++) strings_add(&l->args, o->args->v[i]);
    strings_add(&l->args, "--join");
    strings_add(&l->args, o->address);
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++) l->v[i].name = xasprintf("%s-%d", o->prefix, i + 1);
    if (local_nodes_resize(l, n, err) == OK) return l;
    local_nodes_stop(l);
    return NULL;
}

/* A needed process has ended with this status. */
static int process_restart(struct local_nodes *l, struct process *p, int status,
                           struct error *err) {
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!killed) p->short_runs = clock_now() - p->started < SHORT_SECONDS ? p->short_runs + 1 : 0;
    if (p->short_runs >= SHORT_RUNS)
        return error_set(err, ERR_STATE, "the node '%s' ends again and again", p->name);
    return process_start(p, &l->args, err);
}

int local_nodes_check(struct local_nodes *l, void (*gone)(void *ctx, const char *name), void *ctx,
                      struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < CLUSTER_LOCAL_MAX; i++) {
        struct process *p = &l->v[i];
        int status;
        if (!p->pid) continue;
        if (!p->needed && clock_now() >= p->kill_at) kill(p->pid, SIGKILL);
        if (waitpid(p->pid, &status, WNOHANG) != p->pid) continue;
        p->pid = 0;
        if (gone) gone(ctx, p->name);
        if (p->needed) rc = process_restart(l, p, status, err);
    }
    return rc;
}

static bool has_processes(const struct local_nodes *l) {
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++)
        if (l->v[i].pid) return true;
    return false;
}

void local_nodes_drain(struct local_nodes *l) {
    struct error ignored; // no process is needed, so none is started again
    if (!l) return;
    local_nodes_resize(l, 0, &ignored);
    while (local_nodes_check(l, NULL, NULL, &ignored) == OK && has_processes(l))
        usleep(WAIT_MICROSECONDS);
    local_nodes_stop(l);
}

void local_nodes_stop(struct local_nodes *l) {
    if (!l) return;
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++)
        if (l->v[i].pid) kill(l->v[i].pid, SIGKILL); // it has nothing to store
    for (int i = 0; i < CLUSTER_LOCAL_MAX; i++) {
        if (l->v[i].pid) waitpid(l->v[i].pid, NULL, 0);
        free(l->v[i].name);
    }
    strings_release(&l->args);
    free(l);
}
