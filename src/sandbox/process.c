/*
 * process: runs a sandboxed command, from its start to the end of the last process of its tree.
 *
 * bwrap is started as the init (process 1) of a PID namespace; inside, it makes a second PID
 * namespace for the command. When bwrap ends for any reason, everything that it started ends too:
 * the kernel kills and reaps the rest of the namespace before it reports the end of its init.
 * Before it executes bwrap, the child asks the kernel to kill it when the thread that started it
 * ends. That thread sends bwrap the seccomp filter only after it knows that the child has asked,
 * and bwrap runs no command without a filter. So if this process dies, nothing is left running,
 * whatever the moment.
 *
 * Every command has a supervisor, a thread that starts bwrap, waits for it and reads standard
 * error. bwrap must be started by a thread that lives exactly as long as the command: a thread of
 * the caller may end earlier.
 *
 * A PID namespace needs a user namespace, which the child creates too. RLIMIT_NPROC is set inside
 * the user namespace, so it counts the processes of this namespace; set outside, it would count all
 * processes of the user. For root the limit would have no effect: the kernel exempts user id 0 of
 * the initial namespace, however it is mapped. So under root the command gets an unused user id of
 * the machine, and all other ids are mapped too, so that CAP_DAC_OVERRIDE works on the files shown
 * to it. Only a process outside can write such a map, so under root the child is forked. Without
 * root the child shares the memory of this process until exec, as after vfork, which is faster
 * because no page tables are copied.
 *
 * The pipe of the seccomp filter, called the gate, shows when the command starts: bwrap reads it to
 * its end when everything else is set up (seccomp_filter_send).
 */
#define _GNU_SOURCE
#include "sandbox/internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct sandbox {
    /* set before the supervisor starts */
    char *bwrap, **argv;
    struct sandbox_limits limits;
    bool strict;    /* too much output on stderr kills the command; set by sandbox_run */
    bool mapped;    /* this process is root and maps the user ids of the child */
    int fds[N_FDS]; /* descriptors for bwrap; closed once it has them */
    int in, out;    /* the caller's ends of the pipes; -1: none */
    int errs, gate; /* the supervisor's ends of the pipes of stderr and of the filter */
    double start_time, deadline;
    /* used by the caller's thread only */
    pthread_t supervisor;
    bool has_supervisor;
    /* used by the supervisor only */
    pid_t pid; /* bwrap */
    /* protected by `lock` */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool started, ended;
    int pidfd;            /* pidfd of bwrap; -1: not started */
    struct error failure; /* valid if `ended`; a code other than OK: the command was never run */
    enum sandbox_exit_reason exit_reason;
    int status;
    double seconds;
    struct buf stderr_text; /* standard error */
};

/* descriptors */

/* Milliseconds until the deadline, for poll(); -1 (no limit) if that is more than 1e6 seconds. */
static int poll_timeout(double deadline) {
    double left = deadline - clock_now();
    return left > 1e6 ? -1 : left > 0 ? (int)(left * 1000) + 1 : 0;
}

static int pidfd_open(pid_t pid) {
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

/* Makes a pipe. *ours is the end of this process, which does not block: the reading end if
 * `we_read`. *theirs is the end for the command. */
static int pipe_make(int *theirs, int *ours, bool we_read, struct error *err) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    *theirs = ends[we_read];
    *ours = ends[!we_read];
    fcntl(*ours, F_SETFL, O_NONBLOCK);
    return OK;
}

/* the new process */

enum { CHILD_STACK = 64 << 10 };

/* Arguments of the child. Between clone and exec the child may only make system calls. */
struct sandbox_launch {
    const struct sandbox *s;
    const char *uid_map, *gid_map; /* id maps that the child writes; NULL: the parent writes them */
    int parent; /* socket: the parent sends a byte when it has written the maps, the child answers
                 * when it dies with the parent; valid without uid_map */
    volatile int error;
};

static bool text_write(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return written;
}

/* Gives the child its user id in the new user namespace: the same id as before or, under root, id
 * 0, which the parent maps to an unused id. */
static bool user_switch(const struct sandbox_launch *l) {
    char c;
    ssize_t n;
    if (l->uid_map)
        return text_write("/proc/self/setgroups", "deny") &&
               text_write("/proc/self/uid_map", l->uid_map) &&
               text_write("/proc/self/gid_map", l->gid_map);
    while ((n = read(l->parent, &c, 1)) < 0 && errno == EINTR) continue;
    return n == 1 && syscall(SYS_setgroups, 0, NULL) == 0 && syscall(SYS_setresgid, 0, 0, 0) == 0 &&
           syscall(SYS_setresuid, 0, 0, 0) == 0;
}

/* Makes the child die with the thread that started it, which may be dead already: then bwrap finds
 * no filter in the gate, whose only other writing end the child closes here. */
static bool die_with_parent(const struct sandbox_launch *l) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return false;
    close(l->s->gate);
    return l->uid_map || write(l->parent, "", 1) == 1;
}

static bool limit_set(int what, double soft, double hard) {
    struct rlimit current, wanted;
    if (!(soft < 9e18)) return true; // no limit
    if (syscall(SYS_prlimit64, 0, what, NULL, &current) != 0) return false;
    wanted.rlim_cur = MIN((rlim_t)soft, current.rlim_max);
    wanted.rlim_max = MIN((rlim_t)hard, current.rlim_max);
    return syscall(SYS_prlimit64, 0, what, &wanted, NULL) == 0;
}

static bool limits_set(const struct sandbox_limits *l) {
    return limit_set(RLIMIT_CORE, 0, 0) &&
           limit_set(RLIMIT_CPU, l->cpu_seconds, l->cpu_seconds + 1) &&
           limit_set(RLIMIT_AS, (double)l->memory, (double)l->memory) &&
           limit_set(RLIMIT_FSIZE, (double)l->file_size, (double)l->file_size) &&
           limit_set(RLIMIT_NOFILE, l->open_files, l->open_files) &&
           limit_set(RLIMIT_NPROC, l->processes, l->processes);
}

static int child_main(void *ctx) {
    static char *const env[] = {"PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/tmp",
                                NULL};
    const struct sigaction default_action = {.sa_handler = SIG_DFL};
    struct sandbox_launch *l = ctx;
    sigset_t none;
    for (int i = 1; i < NSIG; i++) sigaction(i, &default_action, NULL);
    if (user_switch(l) && die_with_parent(l) && fds_remap(l->s->fds, N_FDS) &&
        close_range(N_FDS, ~0U, 0) == 0 && limits_set(&l->s->limits)) {
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(l->s->bwrap, l->s->argv, env);
    }
    l->error = errno;
    _exit(127);
}

/* launching as a user */

static int namespace_error(int code, struct error *err) {
    return error_set(err, ERR_STATE, "cannot make the namespaces of a sandbox: %s%s",
                     strerror(code), bwrap_hint());
}

static int launch_as_user(struct sandbox *s, struct error *err) {
    char uid_map[32], gid_map[32], *stack = xmalloc(CHILD_STACK);
    struct sandbox_launch l = {.s = s, .uid_map = uid_map, .gid_map = gid_map};
    snprintf(uid_map, sizeof uid_map, "%u %u 1", geteuid(), geteuid());
    snprintf(gid_map, sizeof gid_map, "%u %u 1", getegid(), getegid());
    s->pid = clone(child_main, stack + CHILD_STACK,
                   CLONE_VM | CLONE_VFORK | CLONE_NEWUSER | CLONE_NEWPID | SIGCHLD, &l);
    int rc = s->pid < 0 ? namespace_error(errno, err)
             : l.error  ? namespace_error(l.error, err)
                        : OK;
    if (rc && s->pid > 0) waitpid(s->pid, NULL, 0);
    free(stack);
    return rc;
}

/* launching as root */

static int map_write(pid_t pid, const char *name, unsigned id, struct error *err) {
    char path[64], text[64];
    snprintf(text, sizeof text, "0 %u 1\n1 0 %u\n", id, id);
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    if (text_write(path, text)) return OK;
    return error_set(err, ERR_STATE, "root cannot map user ids: %s", strerror(errno));
}

/* A user or group id that exists in this process's own user namespace and that no account is likely
 * to have; 0: there are too few ids. `map` is the namespace's uid_map or gid_map. */
static unsigned unused_id(const char *map, pid_t pid) {
    unsigned inside = 0, outside = 0, n = 0;
    FILE *f = fopen(map, "re");
    if (f && fscanf(f, "%u %u %u", &inside, &outside, &n) != 3) n = 0;
    if (f) fclose(f);
    if (n > 0x7fff0000u) return 0x70000000u + (unsigned)pid;
    return n > 8192 ? inside + n - 4096 + (unsigned)pid % 2048 : 0;
}

static int maps_write(pid_t pid, struct error *err) {
    unsigned uid = unused_id("/proc/self/uid_map", pid), gid = unused_id("/proc/self/gid_map", pid);
    if (!uid || !gid)
        return error_set(err, ERR_STATE, "root has no unused user id here to run commands with");
    int rc = map_write(pid, "gid_map", gid, err);
    return rc ? rc : map_write(pid, "uid_map", uid, err);
}

static int launch_as_root(struct sandbox *s, struct error *err) {
    int ends[2];
    char c;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return error_errno(err, "cannot make a pair of sockets");
    struct sandbox_launch l = {.s = s, .parent = ends[0]};
    s->pid =
        (pid_t)syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWPID | SIGCHLD, NULL, NULL, NULL, NULL);
    if (s->pid == 0) {
        close(ends[1]);
        child_main(&l);
    }
    close(ends[0]);
    int rc = s->pid > 0 ? maps_write(s->pid, err) : namespace_error(errno, err);
    /* The child waits for a byte and not for the end of the stream, because children of other
     * threads hold this end too, until their exec. */
    if (!rc && send(ends[1], "", 1, MSG_NOSIGNAL) != 1)
        rc = error_errno(err, "cannot start the new process");
    if (rc && s->pid > 0) {
        kill(s->pid, SIGKILL);
        waitpid(s->pid, NULL, 0);
    }
    while (!rc && read(ends[1], &c, 1) < 0 && errno == EINTR) continue;
    close(ends[1]);
    return rc;
}

static int launch(struct sandbox *s, struct error *err) {
    int rc = s->mapped ? launch_as_root(s, err) : launch_as_user(s, err);
    for (int i = 0; i < N_FDS; i++) fd_close(&s->fds[i]);
    if (rc) return rc;
    int fd = pidfd_open(s->pid);
    pthread_mutex_lock(&s->lock);
    s->pidfd = fd;
    pthread_mutex_unlock(&s->lock);
    if (fd >= 0) return OK;
    rc = error_set(err, ERR_STATE, "a sandbox needs Linux 5.3 or newer: %s", strerror(errno));
    kill(s->pid, SIGKILL);
    waitpid(s->pid, NULL, 0);
    return rc;
}

/* killing */

static void kill_with_reason(struct sandbox *s, enum sandbox_exit_reason exit_reason) {
    pthread_mutex_lock(&s->lock);
    if (!s->ended && s->exit_reason == SANDBOX_EXITED) s->exit_reason = exit_reason;
    if (!s->ended && s->pidfd >= 0) syscall(SYS_pidfd_send_signal, s->pidfd, SIGKILL, NULL, 0);
    pthread_mutex_unlock(&s->lock);
}

void sandbox_kill(struct sandbox *s) {
    kill_with_reason(s, SANDBOX_KILLED);
}

/* Sends the filter and waits until bwrap has read it: the pipe holds one page, so it has room again
 * only then. Returns whether the command is running now. */
static bool seccomp_filter_send(struct sandbox *s) {
    uint8_t filter[SECCOMP_FILTER_MAX];
    size_t n = seccomp_filter(filter);
    struct pollfd p[2] = {{.fd = s->gate, .events = POLLOUT}, {.fd = s->pidfd, .events = POLLIN}};
    bool sent = fcntl(s->gate, F_SETPIPE_SZ, SECCOMP_FILTER_MAX) > 0 &&
                write(s->gate, filter, n) == (ssize_t)n;
    while (sent && poll(p, 2, poll_timeout(s->deadline)) < 0 && errno == EINTR) continue;
    fd_close(&s->gate);
    return sent && (p[0].revents & POLLOUT) && !(p[0].revents & POLLERR);
}

/* waiting */

/* Reads the standard error that is available; returns false at its end. */
static bool errs_read(struct sandbox *s) {
    char bytes[4096];
    ssize_t n;
    while ((n = read(s->errs, bytes, sizeof bytes)) > 0) {
        pthread_mutex_lock(&s->lock);
        size_t room = s->limits.output - s->stderr_text.len;
        buf_add(&s->stderr_text, bytes, MIN((size_t)n, room));
        pthread_mutex_unlock(&s->lock);
        if (s->strict && (size_t)n > room) kill_with_reason(s, SANDBOX_OUTPUT_LIMIT);
    }
    return n < 0 && (errno == EAGAIN || errno == EINTR);
}

/* Reads standard error and enforces the time limit until bwrap has ended. */
static void watch_until_end(struct sandbox *s) {
    bool open = true;
    for (;;) {
        struct pollfd p[2] = {{.fd = s->pidfd, .events = POLLIN},
                              {.fd = open ? s->errs : -1, .events = POLLIN}};
        int ready = poll(p, 2, poll_timeout(s->deadline));
        if (ready == 0) {
            kill_with_reason(s, SANDBOX_TIMED_OUT);
            s->deadline = INFINITY;
        }
        if (ready > 0 && p[1].revents) open = errs_read(s);
        if (ready > 0 && p[0].revents) return;
    }
}

/* Waits for the end of bwrap. No process of the tree is left then: the kernel has reaped the others
 * of the namespace before. */
static void reap(struct sandbox *s) {
    siginfo_t info = {0};
    errs_read(s);
    while (waitid(P_PID, (id_t)s->pid, &info, WEXITED) != 0 && errno == EINTR) continue;
    s->status = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
}

static void failure_set(struct sandbox *s) {
    struct buf clean = {0};
    size_t n = s->stderr_text.len;
    while (n && s->stderr_text.data[n - 1] == '\n') n--;
    buf_add_sanitized(&clean, n ? s->stderr_text.data : "", n);
    error_set(&s->failure, ERR_STATE, "bubblewrap cannot make a sandbox: %.1000s%s",
              clean.len ? clean.data : "it ended", bwrap_hint());
    buf_release(&clean);
}

static void state_publish(struct sandbox *s, bool ended) {
    pthread_mutex_lock(&s->lock);
    s->ended = ended;
    if (ended) s->seconds = clock_now() - s->start_time;
    if (ended && s->exit_reason != SANDBOX_EXITED) s->status = -1;
    if (!ended) s->started = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void *supervisor_main(void *ctx) {
    struct sandbox *s = ctx;
    if (launch(s, &s->failure) != OK) return state_publish(s, true), NULL;
    s->failure.code = OK;
    bool runs = seccomp_filter_send(s);
    if (runs) state_publish(s, false);
    watch_until_end(s);
    reap(s);
    if (!runs && s->exit_reason == SANDBOX_EXITED) failure_set(s);
    state_publish(s, true);
    return NULL;
}

/* starting */

/* Opens standard input: the input of the spec, or else a pipe (if `interactive`) or /dev/null. */
static int input_open(struct sandbox *s, const struct sandbox_spec *spec, bool interactive,
                      struct error *err) {
    int *fd = &s->fds[STDIN_FILENO];
    if (spec->input)
        *fd = memfd_from_bytes(spec->input, spec->input_len, err);
    else if (spec->input_fd)
        *fd = fcntl(spec->input_fd, F_DUPFD_CLOEXEC, 0);
    else if (interactive)
        return pipe_make(fd, &s->in, false, err);
    else
        *fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (*fd >= 0) return OK;
    return spec->input ? err->code : error_errno(err, "cannot open a command's input");
}

static int fds_open(struct sandbox *s, const struct sandbox_spec *spec, bool interactive,
                    const struct buf *options, struct error *err) {
    int rc = input_open(s, spec, interactive, err);
    if (!rc) rc = pipe_make(&s->fds[STDOUT_FILENO], &s->out, true, err);
    if (!rc) rc = pipe_make(&s->fds[STDERR_FILENO], &s->errs, true, err);
    if (!rc) rc = pipe_make(&s->fds[BWRAP_FD_SECCOMP], &s->gate, false, err);
    if (rc) return rc;
    s->fds[BWRAP_FD_ARGS] = memfd_from_bytes(options->data, options->len, err);
    return s->fds[BWRAP_FD_ARGS] >= 0 ? OK : err->code;
}

/* bwrap's arguments: its options are in a file, the command follows. */
static char **argv_make(const struct strings *command) {
    static char name[] = "bwrap", args[] = "--args", end[] = "--", number[] = "4";
    static_assert(BWRAP_FD_ARGS == 4, "the number");
    char **v = xcalloc((size_t)command->n + 5, sizeof *v);
    v[0] = name;
    v[1] = args;
    v[2] = number;
    v[3] = end;
    for (int i = 0; i < command->n; i++) v[4 + i] = command->v[i];
    return v;
}

static int supervisor_start(struct sandbox *s, struct error *err) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&s->supervisor, NULL, supervisor_main, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) return error_set(err, ERR_STATE, "cannot start a thread: %s", strerror(rc));
    s->has_supervisor = true;
    pthread_mutex_lock(&s->lock);
    while (!s->started && !s->ended) pthread_cond_wait(&s->changed, &s->lock);
    rc = s->ended ? s->failure.code : OK;
    if (rc) *err = s->failure;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static struct sandbox *sandbox_new(const struct sandbox_limits *l, bool strict) {
    struct sandbox *s = xcalloc(1, sizeof *s);
    s->limits = sandbox_limits_with_defaults(l);
    s->strict = strict;
    s->mapped = geteuid() == 0;
    s->in = s->out = s->errs = s->gate = s->pidfd = -1;
    for (int i = 0; i < N_FDS; i++) s->fds[i] = -1;
    s->start_time = clock_now();
    s->deadline = s->start_time + s->limits.seconds;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    return s;
}

static int check_may_run(const struct sandbox_spec *spec, struct error *err) {
    if ((spec->network ? sandbox_bypass_check : sandbox_command_check)(err) != OK) return err->code;
    if (sandbox_is_confined())
        return error_set(err, ERR_STATE,
                         "this process is confined, so it cannot make a sandbox for a command");
    return sandbox_program_check(spec, err);
}

static struct sandbox *command_start(const struct sandbox_spec *spec, bool interactive,
                                     struct error *err) {
    struct buf options = {0};
    if (check_may_run(spec, err) != OK) return NULL;
    struct sandbox *s = sandbox_new(&spec->limits, !interactive);
    s->argv = argv_make(spec->argv);
    s->bwrap = bwrap_find(err);
    int rc = s->bwrap ? bwrap_args_build(spec, &s->limits, s->mapped, &options, err) : err->code;
    if (!rc) rc = fds_open(s, spec, interactive, &options, err);
    if (!rc) rc = supervisor_start(s, err);
    buf_release(&options);
    if (!rc) return s;
    sandbox_free(s);
    return NULL;
}

struct sandbox *sandbox_start(const struct sandbox_spec *spec, struct error *err) {
    return command_start(spec, true, err);
}

/* input and output */

int sandbox_input_fd(const struct sandbox *s) {
    return s->in;
}

int sandbox_output_fd(const struct sandbox *s) {
    return s->out;
}

void sandbox_close_input(struct sandbox *s) {
    fd_close(&s->in);
}

/* write() that never raises SIGPIPE, however the process handles this signal. */
static ssize_t write_quietly(int fd, const void *p, size_t n) {
    const struct timespec now = {0};
    sigset_t set, old, pending;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &set, &old);
    ssize_t w = write(fd, p, n);
    int code = errno;
    if (w < 0 && code == EPIPE && !sigismember(&pending, SIGPIPE)) sigtimedwait(&set, NULL, &now);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = code;
    return w;
}

int sandbox_write(struct sandbox *s, const void *p, size_t n, double seconds, struct error *err) {
    double deadline = clock_now() + seconds;
    for (size_t n_written = 0; n_written < n;) {
        ssize_t written = write_quietly(s->in, (const char *)p + n_written, n - n_written);
        if (written >= 0) {
            n_written += (size_t)written;
        } else if (errno == EAGAIN) {
            struct pollfd poll_in = {.fd = s->in, .events = POLLOUT};
            if (poll(&poll_in, 1, poll_timeout(deadline)) == 0)
                return error_set(err, ERR_STATE, "it did not read for %.3g seconds", seconds);
        } else if (errno != EINTR) {
            return error_set(err, ERR_STATE, "it has closed its input");
        }
    }
    return OK;
}

ssize_t sandbox_read(struct sandbox *s, void *p, size_t n, double seconds, struct error *err) {
    double deadline = clock_now() + seconds;
    for (;;) {
        ssize_t got = read(s->out, p, n);
        if (got >= 0) return got;
        struct pollfd poll_out = {.fd = s->out, .events = POLLIN};
        if (errno == EAGAIN) {
            if (poll(&poll_out, 1, poll_timeout(deadline)) == 0)
                return error_set(err, ERR_STATE, "it was silent for %.3g seconds", seconds);
        } else if (errno != EINTR) {
            return error_errno(err, "cannot read a command's output");
        }
    }
}

/* ending */

/* Whether the command has ended, waiting at most `seconds`; the caller holds the lock. */
static bool ended_within(struct sandbox *s, double seconds) {
    double deadline = clock_now() + MIN(seconds, 1e9);
    while (!s->ended && condition_wait_until(&s->changed, &s->lock, deadline)) continue;
    return s->ended;
}

int sandbox_wait(struct sandbox *s, double seconds, struct sandbox_result *out, struct error *err) {
    pthread_mutex_lock(&s->lock);
    bool ended = ended_within(s, seconds);
    if (ended && out) {
        *out = (struct sandbox_result){
            .exit_reason = s->exit_reason, .status = s->status, .seconds = s->seconds};
        buf_add(&out->error_output, s->stderr_text.data ? s->stderr_text.data : "",
                s->stderr_text.len);
    }
    pthread_mutex_unlock(&s->lock);
    return ended ? OK : error_set(err, ERR_STATE, "it has not ended in %.3g seconds", seconds);
}

void sandbox_free(struct sandbox *s) {
    if (!s) return;
    if (s->has_supervisor) {
        sandbox_kill(s);
        pthread_join(s->supervisor, NULL);
    }
    int *const fds[] = {&s->in, &s->out, &s->errs, &s->gate, &s->pidfd};
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) fd_close(fds[i]);
    for (int i = 0; i < N_FDS; i++) fd_close(&s->fds[i]);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    buf_release(&s->stderr_text);
    free(s->bwrap);
    free(s->argv);
    free(s);
}

/* running to the end */

/* Reads standard output to its end, that is until no process of the tree has it open. */
static int output_read(struct sandbox *s, struct buf *out, struct error *err) {
    char bytes[16 << 10];
    ssize_t n;
    while ((n = sandbox_read(s, bytes, sizeof bytes, INFINITY, err)) > 0) {
        size_t room = s->limits.output - out->len;
        buf_add(out, bytes, MIN((size_t)n, room));
        if ((size_t)n > room) kill_with_reason(s, SANDBOX_OUTPUT_LIMIT);
    }
    return n < 0 ? err->code : OK;
}

int sandbox_run(const struct sandbox_spec *spec, struct sandbox_result *out, struct error *err) {
    struct buf text = {0};
    *out = (struct sandbox_result){0};
    struct sandbox *s = command_start(spec, false, err);
    if (!s) return err->code;
    int rc = output_read(s, &text, err);
    if (!rc) rc = sandbox_wait(s, INFINITY, out, err);
    out->out = text;
    sandbox_free(s);
    if (rc) sandbox_result_release(out);
    return rc;
}

void sandbox_result_release(struct sandbox_result *r) {
    buf_release(&r->out);
    buf_release(&r->error_output);
    *r = (struct sandbox_result){0};
}

const char *sandbox_failure(const struct sandbox_result *r, const struct sandbox_limits *limits) {
    static _Thread_local char text[96];
    struct sandbox_limits l = sandbox_limits_with_defaults(limits);
    if (r->exit_reason == SANDBOX_EXITED && r->status == 0) return NULL;
    if (r->exit_reason == SANDBOX_EXITED)
        snprintf(text, sizeof text, "it failed with status %d", r->status);
    else if (r->exit_reason == SANDBOX_TIMED_OUT)
        snprintf(text, sizeof text, "it did not end in time (%.3g seconds)", l.seconds);
    else if (r->exit_reason == SANDBOX_OUTPUT_LIMIT)
        snprintf(text, sizeof text, "it printed more than %zu bytes", l.output);
    else
        snprintf(text, sizeof text, "it was killed");
    return text;
}
