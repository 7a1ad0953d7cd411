/*
 * child: vfork and exec, and three pipes, which a job in a thread (thread.c) has as well.
 *
 * vfork, because the server may use gigabytes: fork would copy their page tables and cause page
 * faults in every thread on its next writes. Until exec the child runs in this process's memory
 * while the thread that started it waits. So child_main only makes system calls, and signals are
 * blocked until the server's handlers are reset.
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
    MAX_STDERR_BYTES = 1 << 20, /* maximum bytes of stderr.txt */
    MAX_OPEN_FILES = 4096,      /* maximal number of open files of a child */
};

/* Maximal bytes of a line of each pipe; longer lines are truncated. */
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

static void set_idle_priority(void) {
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);
    setpriority(PRIO_PROCESS, 0, 19);
}

/* If memory runs out, the kernel kills the job rather than the server. */
static void raise_oom_score(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "500", 3) < 0) { /* ignored: this is an optimisation */
    }
    close(fd);
}

/* Sets a resource limit, unless a lower one is set already. */
static void resource_limit_lower(int which, rlim_t max) {
    struct rlimit r;
    if (getrlimit(which, &r) != 0 || r.rlim_max <= max) return;
    r.rlim_cur = r.rlim_max = max;
    setrlimit(which, &r);
}

static void resource_limits_set(const struct child_launch *l) {
    resource_limit_lower(RLIMIT_CORE, 0);
    resource_limit_lower(RLIMIT_NOFILE, MAX_OPEN_FILES);
    resource_limit_lower(RLIMIT_FSIZE, l->max_file);
    resource_limit_lower(RLIMIT_DATA, l->max_data);
    umask(077);
}

static _Noreturn void child_main(struct child_launch *l) {
    const struct sigaction default_action = {.sa_handler = SIG_DFL};
    sigset_t no_signals;
    for (int i = 1; i < NSIG; i++) sigaction(i, &default_action, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != l->parent) _exit(127); /* the parent died before PR_SET_PDEATHSIG */
    if (l->idle) set_idle_priority();
    raise_oom_score();
    resource_limits_set(l);
    if (fds_remap(l->fds, FIRST_OTHER_FD)) {
        close_range(FIRST_OTHER_FD, ~0U, 0);
        sigemptyset(&no_signals);
        sigprocmask(SIG_SETMASK, &no_signals, NULL);
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

/* Whether a child inherits this variable of the environment. */
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

/* Configuration files are disabled, so that only the job's request determines its options. */
static void child_environment(const struct job_child_options *o, struct strings *out) {
    char *tmp = path_join(o->folder, "tmp"), *assignments[] = {xasprintf("TMPDIR=%s", tmp), NULL};
    for (size_t i = 0; environ[i]; i++)
        if (is_passed(environ[i])) strings_add(out, environ[i]);
    strings_add(out, "SHOAL_PROGRESS=3");
    strings_add(out, "SHOAL_CONFIG=");
    strings_add(out, assignments[0]);
    if (o->permissions) assignments[1] = xasprintf("SHOAL_JOB=%s", o->permissions);
    if (assignments[1]) strings_add(out, assignments[1]);
    free(assignments[0]);
    free(assignments[1]);
    free(tmp);
    out->v = xrealloc(out->v, sizeof *out->v * ((size_t)out->n + 1));
    out->v[out->n] = NULL;
}

static char **child_arguments(const struct strings *args) {
    static char name[] = "shoal";
    char **v = xcalloc((size_t)args->n + 2, sizeof *v);
    v[0] = name;
    for (int i = 0; i < args->n; i++) v[i + 1] = args->v[i];
    return v;
}

/* Opens a pipe and its file. This process's end is non-blocking; the child's end, *child_fd,
 * blocks. */
static int pipe_open(struct child_pipe *in, enum child_pipe_kind which,
                     const struct job_child_options *o, int *child_fd, struct error *err) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    in->fd = ends[0];
    *child_fd = ends[1];
    if (fcntl(in->fd, F_SETFL, O_NONBLOCK) != 0) return error_errno(err, "cannot use a pipe");
    if (!file_names[which]) return OK;
    char *path = path_join(o->folder, file_names[which]);
    in->file_bytes_left = which == CHILD_STDOUT ? o->max_output : MAX_STDERR_BYTES;
    in->file_fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int rc = in->file_fd < 0 ? error_errno(err, "cannot write '%s'", path) : OK;
    free(path);
    return rc;
}

static int child_spawn(struct job_child *c, struct child_launch *l, struct error *err) {
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
        fd_close(&c->pipes[i].fd);
        fd_close(&c->pipes[i].file_fd);
        buf_release(&c->pipes[i].line);
    }
    fd_close(&c->pidfd);
    free(c);
}

static struct job_child *child_new(void) {
    struct job_child *c = xcalloc(1, sizeof *c);
    c->pid = c->pidfd = -1;
    for (int i = 0; i < N_CHILD_PIPES; i++) c->pipes[i].fd = c->pipes[i].file_fd = -1;
    return c;
}

/* Makes FOLDER and an empty FOLDER/tmp. */
static int job_folder_init(const char *folder, struct error *err) {
    char *tmp = path_join(folder, "tmp");
    int rc = dir_make(folder, err);
    tree_delete(tmp);
    if (rc == OK && mkdir(tmp, 0700) != 0) rc = error_errno(err, "cannot make '%s'", tmp);
    free(tmp);
    return rc;
}

/* Starts the process with the write ends of its pipes. */
static int process_start(struct job_child *c, const struct job_child_options *o,
                         const int fds[N_CHILD_PIPES], struct error *err) {
    struct strings env = {0};
    int rc = OK, null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    child_environment(o, &env);
    struct child_launch l = {
        .program = o->program,
        .argv = child_arguments(o->args),
        .envp = env.v,
        .fds = {null, fds[CHILD_STDOUT], fds[CHILD_STDERR], fds[CHILD_PROGRESS]},
        .idle = !o->same_priority,
        .max_file = o->max_file ? (rlim_t)o->max_file : RLIM_INFINITY,
        .max_data = o->max_data ? (rlim_t)o->max_data : RLIM_INFINITY,
        .parent = getpid()};
    if (null < 0) rc = error_errno(err, "cannot open '/dev/null'");
    if (rc == OK) rc = child_spawn(c, &l, err);
    fd_close(&null);
    free(l.argv);
    strings_release(&env);
    if (rc == OK || c->pid <= 0) return rc;
    job_child_signal(c, SIGKILL);
    waitpid(c->pid, NULL, 0);
    return rc;
}

static int thread_start(struct job_child *c, const struct job_child_options *o,
                        int fds[N_CHILD_PIPES], struct error *err) {
    c->thread = job_thread_start(o, fds, &c->pidfd, err);
    return c->thread ? OK : err->code;
}

struct job_child *job_child_start(const struct job_child_options *o, struct error *err) {
    struct job_child *c = child_new();
    int fds[N_CHILD_PIPES] = {-1, -1, -1};
    int rc = job_folder_init(o->folder, err);
    for (int i = 0; rc == OK && i < N_CHILD_PIPES; i++)
        rc = pipe_open(&c->pipes[i], i, o, &fds[i], err);
    if (rc == OK) rc = o->run ? thread_start(c, o, fds, err) : process_start(c, o, fds, err);
    for (int i = 0; i < N_CHILD_PIPES; i++) fd_close(&fds[i]);
    if (rc == OK) return c;
    child_free(c);
    return NULL;
}

void job_child_signal(const struct job_child *c, int signal) {
    if (c->thread)
        job_thread_signal(c->thread, signal);
    else
        kill(-c->pid, signal);
}

void job_child_pollfds(const struct job_child *c, struct pollfd out[JOB_CHILD_FDS], bool read) {
    out[0] = (struct pollfd){.fd = c->pidfd, .events = POLLIN};
    for (int i = 0; i < N_CHILD_PIPES; i++)
        out[1 + i] = (struct pollfd){.fd = read ? c->pipes[i].fd : -1, .events = POLLIN};
}

/* reading */

/* Appends to the pipe's file, up to its limit. Kills the child on a write error, or if its results
 * exceed the limit. */
static void file_append(struct job_child *c, enum child_pipe_kind which, const char *p, size_t n) {
    struct child_pipe *in = &c->pipes[which];
    size_t room = (size_t)MIN(in->file_bytes_left, (int64_t)n);
    in->file_bytes_left -= (int64_t)room;
    for (size_t written = 0; written < room && !c->fault.code;) {
        ssize_t m = write(in->file_fd, p + written, room - written);
        if (m < 0 && errno == EINTR) continue;
        if (m < 0)
            error_errno(&c->fault, "cannot keep its output in '%s'", file_names[which]);
        else
            written += (size_t)m;
    }
    if (which == CHILD_STDOUT && room < n && !c->fault.code)
        error_set(&c->fault, ERR_MEMORY, "stopped: its results are too long");
    if (c->fault.code) job_child_signal(c, SIGKILL);
}

static void line_end(struct child_pipe *in, enum child_pipe_kind which, job_child_line_fn on_line,
                     void *ctx) {
    if (in->line_len)
        on_line(ctx, which, in->line.data ? in->line.data : "", in->line.len, in->line_len);
    in->line.len = in->line_len = 0;
}

static void lines_split(struct child_pipe *in, enum child_pipe_kind which, const char *p, size_t n,
                        job_child_line_fn on_line, void *ctx) {
    for (const char *all = p + n; p < all;) {
        const char *end = memchr(p, '\n', (size_t)(all - p));
        size_t m = (size_t)((end ? end : all) - p);
        buf_add(&in->line, p, MIN(m, line_limits[which] - in->line.len));
        in->line_len += m;
        if (end) line_end(in, which, on_line, ctx);
        p += m + (end != NULL);
    }
}

static void pipe_read(struct job_child *c, enum child_pipe_kind which, job_child_line_fn on_line,
                      void *ctx) {
    struct child_pipe *in = &c->pipes[which];
    char block[READ_BLOCK];
    for (int i = 0; i < READ_BLOCKS && in->fd >= 0; i++) {
        ssize_t n = read(in->fd, block, sizeof block);
        if (n < 0) return; /* no more data now */
        if (n == 0) {
            fd_close(&in->fd);
            return;
        }
        if (in->file_fd >= 0) file_append(c, which, block, (size_t)n);
        lines_split(in, which, block, (size_t)n, on_line, ctx);
    }
}

void job_child_read(struct job_child *c, job_child_line_fn on_line, void *ctx) {
    for (int i = 0; i < N_CHILD_PIPES; i++) pipe_read(c, i, on_line, ctx);
}

static void lines_finish(struct job_child *c, job_child_line_fn on_line, void *ctx) {
    job_child_read(c, on_line, ctx);
    for (int i = 0; i < N_CHILD_PIPES; i++) line_end(&c->pipes[i], i, on_line, ctx);
}

/* Reads while it waits, because the thread waits while a pipe is full. */
static int thread_reap(struct job_child *c, job_child_line_fn on_line, void *ctx) {
    enum { READ_MS = 10 };
    struct pollfd ended = {.fd = c->pidfd, .events = POLLIN};
    while (poll(&ended, 1, READ_MS) <= 0) job_child_read(c, on_line, ctx);
    int status = job_thread_join(c->thread);
    lines_finish(c, on_line, ctx);
    return status;
}

/* The group's leader is not reaped before waitpid, so until then its group id is not reused and the
 * whole group can be killed. */
static int process_reap(struct job_child *c, job_child_line_fn on_line, void *ctx) {
    siginfo_t info;
    int status = -1, rc;
    do rc = waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOWAIT);
    while (rc != 0 && errno == EINTR);
    if (rc == 0) job_child_signal(c, SIGKILL);
    lines_finish(c, on_line, ctx);
    if (rc == 0 && waitpid(c->pid, &status, 0) != c->pid) status = -1;
    return status;
}

int job_child_reap(struct job_child *c, job_child_line_fn on_line, void *ctx) {
    int status = c->thread ? thread_reap(c, on_line, ctx) : process_reap(c, on_line, ctx);
    child_free(c);
    return status;
}
