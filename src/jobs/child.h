/*
 * job_child: a process that works for jobs.c: started, listened to, ended. It knows no jobs.
 *
 * Threads. The thread that starts children must live as long as they may, since they are killed
 * when it ends; it alone reads and reaps. job_child_signal is safe wherever job_child_reap cannot
 * happen meanwhile.
 */
#ifndef SHOAL_JOB_CHILD_H
#define SHOAL_JOB_CHILD_H

#include "base/base.h"

#include <poll.h>
#include <sys/types.h>

/* What a child says: results on stdout, words on stderr, progress on the pipe of SHOAL_PROGRESS.
 * The first two are kept in FOLDER/stdout.jsonl and FOLDER/stderr.txt. */
enum child_pipe_kind { CHILD_STDOUT, CHILD_STDERR, CHILD_PROGRESS, N_CHILD_PIPES };
enum { JOB_CHILD_FDS = 1 + N_CHILD_PIPES };

struct child_pipe {
    int fd, file; /* -1: closed, none */
    int64_t left; /* bytes that the file may grow */
    struct buf line;
    size_t len; /* of the line as it came; line.len may be less */
};
struct job_child {
    pid_t pid; /* of the process and of its group */
    int pidfd;
    struct child_pipe in[N_CHILD_PIPES];
    struct error fault; /* why it was ended from here; code OK: it was not */
};

struct job_child_options {
    const char *program, *folder;
    const struct strings *args; /* without the program's name */
    const char *job;            /* of its variable SHOAL_JOB: what it may do; NULL: none */
    int64_t max_output;         /* of results */
    int64_t max_file, max_data; /* bytes of a file that it writes, and of its memory; 0: any */
    bool same_priority;
};
/*
 * Its environment is made of what a program needs (PATH, HOME, the language and the time zone,
 * where libraries and pulled models are, the choice of kernels) and of what it is told here; its
 * TMPDIR is FOLDER/tmp, which is removed when it has ended. What it makes is its user's alone, and
 * it leaves no core. Nothing else of this process reaches it, above all no secret.
 */
/* NULL with the system's reason. */
struct job_child *job_child_start(const struct job_child_options *s, struct error *err);
void job_child_signal(const struct job_child *c, int signal); /* to its whole group */
/* What to poll for; its pidfd first. With !read only whether it has ended. */
void job_child_pollfds(const struct job_child *c, struct pollfd out[JOB_CHILD_FDS], bool read);

/* A line without its end; len > n: so long was it, and these are its first bytes. */
typedef void (*job_child_line_fn)(void *ctx, enum child_pipe_kind which, const char *line, size_t n,
                                  size_t len);
/* Takes what is there, and not much more at once than pipes hold. */
void job_child_read(struct job_child *c, job_child_line_fn take, void *ctx);
/* Waits for its end, ends what it left behind, takes the rest, and frees it. Returns the wait
 * status; -1: somebody else has reaped it. */
int job_child_reap(struct job_child *c, job_child_line_fn take, void *ctx);

#endif
