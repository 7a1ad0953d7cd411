/*
 * local_nodes: see local_nodes.h.
 */
#define _GNU_SOURCE
#include "cluster/local_nodes.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process that has run for less than SHORT_SECONDS, SHORT_RUNS times in succession, is given up.
 */
enum { SHORT_RUNS = 3 };
static const double SHORT_SECONDS = 10;

struct process {
    char *name, **argv; /* argv ends with NULL; its texts are those of local_nodes and `name` */
    pid_t pid;
    double started;
    int short_runs;
};
struct local_nodes {
    struct process *v;
    int n;
    struct strings args;
    char *address;
};

static int process_start(struct process *p, struct error *err) {
    pid_t parent = getpid();
    p->started = clock_now();
    p->pid = fork();
    if (p->pid < 0) return error_errno(err, "cannot start a node");
    if (p->pid > 0) return OK;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127); // the parent died before PR_SET_PDEATHSIG
    setpgid(0, 0); // Ctrl-C in a terminal is for the program that has the calls
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL); // threads of a server block signals
    execv("/proc/self/exe", p->argv);
    _exit(127);
}

static void process_init(struct process *p, int index, const struct strings *args, char *address) {
    int n = 0;
    p->name = xasprintf("local-%d", index + 1);
    p->argv = xcalloc((size_t)args->n + 6, sizeof *p->argv);
    p->argv[n++] = "shoal";
    for (int i = 0; i < args->n; i++) p->argv[n++] = args->v[i];
    p->argv[n++] = "--join";
    p->argv[n++] = address;
    p->argv[n++] = "--name";
    p->argv[n++] = p->name;
}

struct local_nodes *local_nodes_start(int n, const struct strings *args, const char *address,
                                      struct error *err) {
    struct local_nodes *l = xcalloc(1, sizeof *l);
    l->v = xcalloc((size_t)n, sizeof *l->v);
    l->address = xstrdup(address);
    for (int i = 0; i < args->n; i++) strings_add(&l->args, args->v[i]);
    int rc = OK;
    for (; rc == OK && l->n < n; l->n++) {
        process_init(&l->v[l->n], l->n, &l->args, l->address);
        rc = process_start(&l->v[l->n], err);
    }
    if (rc == OK) return l;
    local_nodes_stop(l);
    return NULL;
}

int local_nodes_check(struct local_nodes *l, void (*gone)(void *ctx, const char *name), void *ctx,
                      struct error *err) {
    for (int i = 0; i < l->n; i++) {
        struct process *p = &l->v[i];
        int status;
        if (p->pid <= 0 || waitpid(p->pid, &status, WNOHANG) != p->pid) continue;
        p->pid = -1;
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (!killed)
            p->short_runs = clock_now() - p->started < SHORT_SECONDS ? p->short_runs + 1 : 0;
        gone(ctx, p->name);
        if (p->short_runs >= SHORT_RUNS)
            return error_set(err, ERR_STATE, "the node '%s' ends again and again", p->name);
        if (process_start(p, err) != OK) return err->code;
    }
    return OK;
}

void local_nodes_stop(struct local_nodes *l) {
    if (!l) return;
    for (int i = 0; i < l->n; i++)
        if (l->v[i].pid > 0) kill(l->v[i].pid, SIGKILL); // it has nothing to store
    for (int i = 0; i < l->n; i++) {
        if (l->v[i].pid > 0) waitpid(l->v[i].pid, NULL, 0);
        free(l->v[i].name);
        free(l->v[i].argv);
    }
    strings_release(&l->args);
    free(l->v);
    free(l->address);
    free(l);
}
