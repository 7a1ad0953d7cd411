/*
 * child: vfork and exec, and three pipes.
 *
 * vfork, because the service may hold gigabytes: fork would copy their page tables and cause page
 * faults in every thread on its next writes. Until exec the child runs in this process's memory
 * while the thread that started it waits. So child_main makes only system calls, with signals
 * blocked until the service's handlers are reset.
 *
 * Invariant: a pid is signalled only before it is reaped, so it never belongs to another process.
 */
#define _GNU_SOURCE
#include "jobs/child.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    FIRST_OTHER_FD = 4, /* after stdin, stdout, stderr and progress */
    READ_BLOCK = 64 << 10,
    READ_BLOCKS = 4,
    WORDS_BYTES = 1 << 20, /* maximum bytes of stderr.txt */
    CHILD_FILES = 4096,    /* open files */
};

/* Longer lines are truncated. */
static const size_t line_limits[N_CHILD_PIPES] = {256 << 10, 1000, 4096};
static const char *const file_names[N_CHILD_PIPES] = {"stdout.jsonl", "stderr.txt", NULL};

struct child_launch {
    const char *program;
    char **argv, **envp;
    int fds[FIRST_OTHER_FD];
    bool idle;
    rlim_t max_file, max_data;
    pid_t parent;
    volatile int error; /* errno of a failed exec */
};

static void yield_to_all(void) {
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);
    setpriority(PRIO_PROCESS, 0, 19);
}

/* If memory runs out, the kernel kills the job rather than the service. */
static void offer_to_oom_killer(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "500", 3) < 0) { /* ignored: it is an optimization */
    }
    close(fd);
}

/* Sets a limit, unless a lower one is in force. */
static void limit(int which, rlim_t most) {
    struct rlimit r;
    if (getrlimit(which, &r) != 0 || r.rlim_max <= most) return;
    r.rlim_cur = r.rlim_max = most;
    setrlimit(which, &r);
}

static void limits_set(const struct child_launch *l) {
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, CHILD_FILES);
    limit(RLIMIT_FSIZE, l->max_file);
    limit(RLIMIT_DATA, l->max_data);
    umask(077);
}

static _Noreturn void child_main(struct child_launch *l) {
    const struct sigaction usual = {.sa_handler = SIG_DFL};
    sigset_t none;
    for (int i = 1; i < NSIG; i++) sigaction(i, &usual, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != l->parent) _exit(127); /* the parent died before PR_SET_PDEATHSIG */
    if (l->idle) yield_to_all();
    offer_to_oom_killer();
    limits_set(l);
    if (fds_remap(l->fds, FIRST_OTHER_FD)) {
        close_range(FIRST_OTHER_FD, ~0U, 0);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(l->program, l->argv, l->envp);
    }
    l->error = errno;
    _exit(127);
}

static pid_t child_launch(struct child_launch *l) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pid_t pid = vfork();
    if (pid == 0) child_main(l);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return pid;
}

/* Whether a child gets this variable of the environment. */
static bool is_passed(const char *variable) {
    static const char *const names[] = {
        "PATH=",
        "HOME=",
        "LANG=",
        "LANGUAGE=",
        "LC_",
        "TZ=",
        "LD_LIBRARY_PATH=",
        "SHOAL_CPU=",
        "SHOAL_CACHE=",
        "XDG_CACHE_HOME=",
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        "ASAN_OPTIONS=",
        "UBSAN_OPTIONS=",
        "LSAN_OPTIONS=",
        "TSAN_OPTIONS=",
#endif
    };
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strncmp(variable, names[i], strlen(names[i])) == 0) return true;
    return false;
}

/* Configuration files are disabled: the job's record determines its options, even if a file
 * changes. */
static void environment(const struct job_child_options *s, struct strings *out) {
    char *tmp = path_join(s->folder, "tmp"), *all[] = {xasprintf("TMPDIR=%s", tmp), NULL};
    for (size_t i = 0; environ[i]; i++)
        if (is_passed(environ[i])) strings_add(out, environ[i]);
    strings_add(out, "SHOAL_PROGRESS=3");
    strings_add(out, "SHOAL_CONFIG=");
    strings_add(out, all[0]);
    if (s->job) all[1] = xasprintf("SHOAL_JOB=%s", s->job);
    if (all[1]) strings_add(out, all[1]);
    free(all[0]);
    free(all[1]);
    free(tmp);
    out->v = xrealloc(out->v, sizeof *out->v * ((size_t)out->n + 1));
    out->v[out->n] = NULL;
}

static char **arguments(const struct strings *args) {
    static char name[] = "shoal";
    char **v = xcalloc((size_t)args->n + 2, sizeof *v);
    v[0] = name;
    for (int i = 0; i < args->n; i++) v[i + 1] = args->v[i];
    return v;
}

/* This end of the pipe is non-blocking; the child's end, *theirs, blocks. */
static int inlet_open(struct child_pipe *in, enum child_pipe_kind which,
                      const struct job_child_options *s, int *theirs, struct error *err) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    in->fd = ends[0];
    *theirs = ends[1];
    if (fcntl(in->fd, F_SETFL, O_NONBLOCK) != 0) return error_errno(err, "cannot use a pipe");
    if (!file_names[which]) return OK;
    char *path = path_join(s->folder, file_names[which]);
    in->left = which == CHILD_STDOUT ? s->max_output : WORDS_BYTES;
    in->file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int rc = in->file < 0 ? error_errno(err, "cannot write '%s'", path) : OK;
    free(path);
    return rc;
}

static int launch(struct job_child *c, struct child_launch *l, struct error *err) {
    c->pid = child_launch(l);
    if (c->pid < 0) return error_errno(err, "cannot start a process");
    errno = l->error;
    if (errno) {
        waitpid(c->pid, NULL, 0);
        c->pid = -1;
        return error_errno(err, "cannot run '%s'", l->program);
    }
    c->pidfd = (int)syscall(SYS_pidfd_open, c->pid, 0);
    return c->pidfd >= 0 ? OK : error_errno(err, "cannot watch a process");
}

static void child_free(struct job_child *c) {
    for (int i = 0; i < N_CHILD_PIPES; i++) {
        fd_close(&c->in[i].fd);
        fd_close(&c->in[i].file);
        buf_release(&c->in[i].line);
    }
    fd_close(&c->pidfd);
    free(c);
}

static struct job_child *child_new(void) {
    struct job_child *c = xcalloc(1, sizeof *c);
    c->pid = c->pidfd = -1;
    for (int i = 0; i < N_CHILD_PIPES; i++) c->in[i].fd = c->in[i].file = -1;
    return c;
}

/* Makes FOLDER and an empty FOLDER/tmp. */
static int folders_make(const char *folder, struct error *err) {
    char *tmp = path_join(folder, "tmp");
    int rc = dir_make(folder, err);
    tree_delete(tmp);
    if (rc == OK && mkdir(tmp, 0700) != 0) rc = error_errno(err, "cannot make '%s'", tmp);
    free(tmp);
    return rc;
}

struct job_child *job_child_start(const struct job_child_options *s, struct error *err) {
    struct job_child *c = child_new();
    struct strings env = {0};
    environment(s, &env);
    struct child_launch l = {.program = s->program,
                             .argv = arguments(s->args),
                             .envp = env.v,
                             .fds = {-1, -1, -1, -1},
                             .idle = !s->same_priority,
                             .max_file = s->max_file ? (rlim_t)s->max_file : RLIM_INFINITY,
                             .max_data = s->max_data ? (rlim_t)s->max_data : RLIM_INFINITY,
                             .parent = getpid()};
    int rc = folders_make(s->folder, err);
    for (int i = 0; rc == OK && i < N_CHILD_PIPES; i++)
        rc = inlet_open(&c->in[i], i, s, &l.fds[1 + i], err);
    if (rc == OK && (l.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        rc = error_errno(err, "cannot open '/dev/null'");
    if (rc == OK) rc = launch(c, &l, err);
    for (int i = 0; i < FIRST_OTHER_FD; i++) fd_close(&l.fds[i]);
    free(l.argv);
    strings_release(&env);
    if (rc == OK) return c;
    if (c->pid > 0) {
        job_child_signal(c, SIGKILL);
        waitpid(c->pid, NULL, 0);
    }
    child_free(c);
    return NULL;
}

void job_child_signal(const struct job_child *c, int signal) {
    kill(-c->pid, signal);
}

void job_child_pollfds(const struct job_child *c, struct pollfd out[JOB_CHILD_FDS], bool read) {
    out[0] = (struct pollfd){.fd = c->pidfd, .events = POLLIN};
    for (int i = 0; i < N_CHILD_PIPES; i++)
        out[1 + i] = (struct pollfd){.fd = read ? c->in[i].fd : -1, .events = POLLIN};
}

/* reading */

/* Appends to the pipe's file, up to its limit. */
static void keep(struct job_child *c, enum child_pipe_kind which, const char *p, size_t n) {
    struct child_pipe *in = &c->in[which];
    size_t room = (size_t)MIN(in->left, (int64_t)n);
    in->left -= (int64_t)room;
    for (size_t at = 0; at < room && !c->fault.code;) {
        ssize_t m = write(in->file, p + at, room - at);
        if (m < 0 && errno == EINTR) continue;
        if (m < 0)
            error_errno(&c->fault, "cannot keep its output in '%s'", file_names[which]);
        else
            at += (size_t)m;
    }
    if (which == CHILD_STDOUT && room < n && !c->fault.code)
        error_set(&c->fault, ERR_MEMORY, "stopped: its results are too long");
    if (c->fault.code) job_child_signal(c, SIGKILL);
}

static void line_end(struct child_pipe *in, enum child_pipe_kind which, job_child_line_fn take,
                     void *ctx) {
    if (in->len) take(ctx, which, in->line.data ? in->line.data : "", in->line.len, in->len);
    in->line.len = in->len = 0;
}

static void lines_take(struct child_pipe *in, enum child_pipe_kind which, const char *p, size_t n,
                       job_child_line_fn take, void *ctx) {
    for (const char *all = p + n; p < all;) {
        const char *end = memchr(p, '\n', (size_t)(all - p));
        size_t m = (size_t)((end ? end : all) - p);
        buf_add(&in->line, p, MIN(m, line_limits[which] - in->line.len));
        in->len += m;
        if (end) line_end(in, which, take, ctx);
        p += m + (end != NULL);
    }
}

static void inlet_read(struct job_child *c, enum child_pipe_kind which, job_child_line_fn take,
                       void *ctx) {
    struct child_pipe *in = &c->in[which];
    char block[READ_BLOCK];
    for (int i = 0; i < READ_BLOCKS && in->fd >= 0; i++) {
        ssize_t n = read(in->fd, block, sizeof block);
        if (n < 0) return; /* no data yet */
        if (n == 0) {
            fd_close(&in->fd);
            return;
        }
        if (in->file >= 0) keep(c, which, block, (size_t)n);
        lines_take(in, which, block, (size_t)n, take, ctx);
    }
}

void job_child_read(struct job_child *c, job_child_line_fn take, void *ctx) {
    for (int i = 0; i < N_CHILD_PIPES; i++) inlet_read(c, i, take, ctx);
}

/* Everything before waitpid runs while the group's leader is not reaped, so its group id is not
 * reused. */
int job_child_reap(struct job_child *c, job_child_line_fn take, void *ctx) {
    siginfo_t info;
    int status = -1, rc;
    do rc = waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOWAIT);
    while (rc != 0 && errno == EINTR);
    if (rc == 0) job_child_signal(c, SIGKILL);
    job_child_read(c, take, ctx);
    for (int i = 0; i < N_CHILD_PIPES; i++) line_end(&c->in[i], i, take, ctx);
    if (rc == 0 && waitpid(c->pid, &status, 0) != c->pid) status = -1;
    child_free(c);
    return status;
}
