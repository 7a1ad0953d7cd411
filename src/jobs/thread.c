/*
 * thread: a job in a thread of this process. Its messages, progress and results go to the pipes
 * that a process would have.
 *
 * A thread cannot be stopped from outside without leaving locks and memory behind. So it is held
 * and cancelled between two pieces of its work: at the gate of its pools (struct yield_task), and
 * where it calls log_check_cancelled.
 *
 * Invariant: the end of the pipes and the value of ended_fd are the last that the thread changes.
 */
#define _GNU_SOURCE
#include "jobs/child.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Enough for requests to go first, and for a turn of the job to have an effect. */
enum { LOWER_PRIORITY = 10 };

struct job_thread {
    pthread_t thread;
    struct job_run run;
    struct yield_task task;
    struct log_sink sink;
    int (*fn)(void *ctx, const struct job_run *r, struct error *err);
    void *ctx;
    bool low_priority;
    char *id;
    json_t *request;
    struct strings args;
    int fds[N_CHILD_PIPES], ended_fd; /* ended_fd: borrowed */
    int exit;
};

/* Writes a line; the pipe's reader never closes its end before the thread has ended. */
static void line_write(int fd, const char *text) {
    char *line = xasprintf("%s\n", text);
    fd_write(fd, line, strlen(line));
    free(line);
}

static void message_write(void *ctx, const char *text) {
    const struct job_thread *t = ctx;
    line_write(t->fds[CHILD_STDERR], text);
}

void job_run_print(const struct job_run *r, json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    line_write(r->results_fd, text);
    free(text);
    json_decref(v);
}

static void *thread_main(void *arg) {
    struct job_thread *t = arg;
    struct error err = {0};
    const uint64_t one = 1;
    if (t->low_priority) thread_lower_priority(LOWER_PRIORITY); // also of the threads it starts
    log_muted = true;
    translations_suspend(true); // clients read the messages
    log_set_sink(&t->sink);
    progress_pipe_set(t->fds[CHILD_PROGRESS]);
    int rc = t->fn(t->ctx, &t->run, &err);
    if (rc != OK) line_write(t->fds[CHILD_STDERR], err.text);
    t->exit = rc == OK ? 0 : rc == ERR_USAGE ? 2 : 1;
    for (int i = 0; i < N_CHILD_PIPES; i++) fd_close(&t->fds[i]);
    if (write(t->ended_fd, &one, sizeof one) < 0) CHECK(false);
    return NULL;
}

static void thread_free(struct job_thread *t) {
    for (int i = 0; i < N_CHILD_PIPES; i++) fd_close(&t->fds[i]);
    strings_release(&t->args);
    json_decref(t->request);
    free(t->id);
    free(t);
}

struct job_thread *job_thread_start(const struct job_child_options *o, int fds[N_CHILD_PIPES],
                                    int *ended_fd, struct error *err) {
    struct job_thread *t = xcalloc(1, sizeof *t);
    *t = (struct job_thread){.task = {.y = o->yield, .normal = o->same_priority},
                             .fn = o->run,
                             .ctx = o->run_ctx,
                             .low_priority = !o->same_priority,
                             .id = xstrdup(o->id),
                             .request = json_deep_copy(o->request)};
    for (int i = 0; i < o->args->n; i++) strings_add(&t->args, o->args->v[i]);
    for (int i = 0; i < N_CHILD_PIPES; i++) {
        t->fds[i] = fds[i];
        fds[i] = -1;
    }
    t->run = (struct job_run){.id = t->id,
                              .request = t->request,
                              .args = &t->args,
                              .task = &t->task,
                              .results_fd = t->fds[CHILD_STDOUT]};
    t->sink = (struct log_sink){.message = message_write, .ctx = t};
    *ended_fd = t->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    errno = t->ended_fd < 0 ? errno : pthread_create(&t->thread, NULL, thread_main, t);
    if (t->ended_fd >= 0 && errno == 0) return t;
    error_errno(err, "cannot start the job's thread");
    thread_free(t);
    return NULL;
}

void job_thread_signal(struct job_thread *t, int signal) {
    if (signal == SIGSTOP || signal == SIGCONT) {
        yield_task_hold(&t->task, signal == SIGSTOP);
        return;
    }
    __atomic_store_n(&t->sink.cancelled, true, __ATOMIC_RELEASE);
    yield_task_end(&t->task);
}

int job_thread_join(struct job_thread *t) {
    pthread_join(t->thread, NULL);
    int status = t->exit << 8;
    thread_free(t);
    return status;
}
