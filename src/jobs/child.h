/*
 * child: starts a process, or a thread of this process, for jobs.c, reads its output and ends it.
 * States and queues of jobs are in jobs.c.
 *
 * A thread has the same pipes as a process, and its end is reported in the same way.
 *
 * Threads. Children are killed when the thread that started them ends. Only that thread may read
 * and reap. Other threads may call job_child_signal if job_child_reap cannot run at the same time.
 */
#ifndef SHOAL_JOBS_CHILD_H
#define SHOAL_JOBS_CHILD_H

#include "jobs/jobs.h"

#include <poll.h>
#include <sys/types.h>

/* Output of a child: results on stdout, messages on stderr, and progress on the pipe whose file
 * descriptor is in the child's variable SHOAL_PROGRESS. The first two are also stored in
 * FOLDER/stdout.jsonl and FOLDER/stderr.txt. */
enum child_pipe_kind { CHILD_STDOUT, CHILD_STDERR, CHILD_PROGRESS, N_CHILD_PIPES };
enum { JOB_CHILD_FDS = 1 + N_CHILD_PIPES };

struct child_pipe {
    int fd, file_fd;         /* -1: the pipe is closed, or there is no file */
    int64_t file_bytes_left; /* bytes that may still be written to the file */
    struct buf line;         /* first bytes of the line that is being received */
    size_t line_len; /* bytes of that line so far, including those that `line` does not hold */
};
struct job_thread;
struct job_child {
    struct job_thread *thread; /* NULL: a process */
    pid_t pid;                 /* id of the process and of its group; -1: a thread */
    int pidfd;                 /* or a descriptor that becomes readable when the thread ends */
    struct child_pipe pipes[N_CHILD_PIPES];
    struct error fault; /* why this process killed the child; code OK: it did not */
};

struct job_child_options {
    const char *program, *folder;
    const struct strings *args; /* without the program's name */
    const char *permissions;    /* value of the child's variable SHOAL_JOB; NULL: not set */
    int64_t max_output;         /* maximum bytes of stdout.jsonl */
    /* Maximum bytes of a file that the child writes, and of the child's memory; 0: unlimited. */
    int64_t max_file, max_data;
    bool same_priority; /* false: the child runs at idle priority */
    /* For a thread: see jobs_options. */
    int (*run)(void *ctx, const struct job_run *r, struct error *err);
    void *run_ctx;
    struct yield *yield;
    const char *id;
    const json_t *request;
};
/*
 * The child's environment has the variables that a program needs (PATH, HOME, the language and the
 * time zone, paths of libraries and of pulled models, the choice of kernels) and those set here.
 * Its TMPDIR is FOLDER/tmp, which is removed after its end. Only its user can access the files that
 * it creates, and it writes no core file. No other data of this process reaches it, in particular
 * no secret.
 */
/* Starts the program in the environment above, or with `run` a thread. NULL: the system cannot
 * start it. */
struct job_child *job_child_start(const struct job_child_options *o, struct error *err);
/* Signals the whole process group. A thread is held by SIGSTOP, continues at SIGCONT, and is
 * cancelled by SIGTERM and SIGKILL. */
void job_child_signal(const struct job_child *c, int signal);
/* Fills `out` with file descriptors to poll, the pidfd first. With read == false only the pidfd is
 * polled. */
void job_child_pollfds(const struct job_child *c, struct pollfd out[JOB_CHILD_FDS], bool read);

/* Called for each line. `line` holds the first n bytes of the line, without a newline; len is the
 * length of the whole line, which may be larger. */
typedef void (*job_child_line_fn)(void *ctx, enum child_pipe_kind which, const char *line, size_t n,
                                  size_t len);
/* Reads the available output, at most 256 KiB of each pipe per call. */
void job_child_read(struct job_child *c, job_child_line_fn on_line, void *ctx);
/* Waits for the child's exit, kills the rest of its group, reads the remaining output, and frees c.
 * Returns the wait status; -1: the process was reaped elsewhere. */
int job_child_reap(struct job_child *c, job_child_line_fn on_line, void *ctx);

/* thread.c, for child.c. fds: the write ends of the pipes, which the thread takes and closes.
 * *ended_fd: the descriptor that becomes readable at its end. */
struct job_thread *job_thread_start(const struct job_child_options *o, int fds[N_CHILD_PIPES],
                                    int *ended_fd, struct error *err);
void job_thread_signal(struct job_thread *t, int signal);
/* Waits for the end. Returns a status as waitpid does. */
int job_thread_join(struct job_thread *t);

#endif
