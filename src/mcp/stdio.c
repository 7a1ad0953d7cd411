/*
 * stdio: a server that is a program. Messages are lines of its standard input and output.
 *
 * Its input is a socket, so that writing to a program that has ended raises no signal. Writing
 * never blocks: unsent bytes wait in `pending` while the output of the program is read, so the two
 * cannot block each other. The end of its standard error is kept for messages about its failure.
 *
 * A line that is too long ends the connection, since nothing after it can be trusted.
 */
#define _GNU_SOURCE
#include "mcp/internal.h"
#include "sandbox/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MAX_PENDING = 16 << 20, /* bytes that the program has not read */
    MAX_LOG = 4 << 10,      /* bytes of standard error that are kept */
    CHUNK = 64 << 10,
};
/* Seconds from the end of the input to SIGTERM, and from there to SIGKILL. */
#define EXIT_SECONDS 2.0

struct stdio {
    struct mcp_transport base;
    pid_t pid;         /* leads a process group; 0: it was never started */
    int in, out, errs; /* this process's ends; -1: closed */
    struct buf pending, received, log;
    size_t scanned; /* bytes of `received` that have no newline */
    bool broken;
};

/* the program */

/* The environment of the program; ends with NULL. */
static int environment_make(const struct strings *more, struct strings *out, struct error *err) {
    static const char *const passed[] = {"HOME",  "LANG", "LOGNAME", "PATH",
                                         "SHELL", "TERM", "USER"};
    int n_passed = (int)ARRAY_LEN(passed), n = n_passed + (more ? more->n : 0);
    for (int i = 0; i < n; i++) {
        const char *name = i < n_passed ? passed[i] : more->v[i - n_passed], *value = getenv(name);
        if (!value && i >= n_passed)
            return error_set(err, ERR_USAGE, "the environment has no variable '%.100s'", name);
        // A value that begins like this is a function of bash, which it would execute.
        if (!value || strncmp(value, "()", 2) == 0) continue;
        char *line = xasprintf("%s=%s", name, value);
        strings_add(out, line);
        free(line);
    }
    out->v = xrealloc(out->v, (size_t)(out->n + 1) * sizeof *out->v);
    out->v[out->n] = NULL;
    return OK;
}

/* in, out, errs: the program's ends. */
static int program_spawn(struct stdio *t, int in, int out, int errs, char **argv, char **env,
                         struct error *err) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, errs, STDERR_FILENO);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF |
                                        POSIX_SPAWN_SETSIGMASK);
    errno = posix_spawnp(&t->pid, argv[0], &files, &attr, argv, env);
    int rc = errno ? error_errno(err, "cannot start '%.200s'", argv[0]) : OK;
    if (rc) t->pid = 0;
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    return rc;
}

static int program_start(struct stdio *t, char **argv, char **env, struct error *err) {
    int in[2] = {-1, -1}, out[2] = {-1, -1}, errs[2] = {-1, -1};
    int rc = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) || pipe2(out, O_CLOEXEC) ||
                     pipe2(errs, O_CLOEXEC)
                 ? error_errno(err, "cannot make a pipe")
                 : OK;
    if (!rc) rc = program_spawn(t, in[0], out[1], errs[1], argv, env, err);
    int *const ends[] = {&in[0], &out[1], &errs[1]};
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) fd_close(ends[i]);
    t->in = in[1];
    t->out = out[0];
    t->errs = errs[0];
    if (t->out >= 0) fcntl(t->out, F_SETFL, O_NONBLOCK);
    if (t->errs >= 0) fcntl(t->errs, F_SETFL, O_NONBLOCK);
    return rc;
}

/* Waits at most `seconds` for the end of the program, which stays a zombie. */
static bool program_ended(const struct stdio *t, double seconds, siginfo_t *info) {
    double deadline = clock_now() + seconds;
    do {
        *info = (siginfo_t){0};
        int rc = waitid(P_PID, (id_t)t->pid, info, WEXITED | WNOHANG | WNOWAIT);
        if ((rc == 0 && info->si_pid) || (rc < 0 && errno == ECHILD)) return true;
        poll(NULL, 0, 2);
    } while (clock_now() < deadline);
    return false;
}

/* Ends the program and every process of its group. */
static void program_stop(struct stdio *t) {
    siginfo_t info;
    int *const ends[] = {&t->in, &t->out, &t->errs};
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) fd_close(ends[i]);
    if (!t->pid) return;
    if (!program_ended(t, EXIT_SECONDS, &info)) {
        kill(-t->pid, SIGTERM);
        program_ended(t, EXIT_SECONDS, &info);
    }
    kill(-t->pid, SIGKILL); // the zombie keeps the number of the group
    waitpid(t->pid, NULL, 0);
    t->pid = 0;
}

/* input and output */

/* Reads as much as the pipe holds. */
static void log_read(struct stdio *t) {
    char bytes[CHUNK];
    ssize_t n = t->errs >= 0 ? read(t->errs, bytes, sizeof bytes) : -1;
    if (n == 0) fd_close(&t->errs);
    if (n > 0) buf_add(&t->log, bytes, (size_t)n);
    if (t->log.len <= MAX_LOG) return;
    memmove(t->log.data, t->log.data + t->log.len - MAX_LOG, MAX_LOG);
    t->log.len = MAX_LOG;
}

/* The last line of standard error; may be "". */
static const char *log_last_line(struct stdio *t) {
    while (t->log.len && strchr(" \r\n", t->log.data[t->log.len - 1])) t->log.len--;
    if (!t->log.len) return "";
    t->log.data[t->log.len] = '\0';
    const char *line = memrchr(t->log.data, '\n', t->log.len);
    return line ? line + 1 : t->log.data;
}

/* Sets the error for a program that has closed its input or output. */
static int ended_error(struct stdio *t, struct error *err) {
    siginfo_t info;
    char how[64] = "it has closed its output";
    bool ended = program_ended(t, 0.5, &info);
    t->broken = true;
    log_read(t);
    if (ended && info.si_code == CLD_EXITED)
        snprintf(how, sizeof how, "it has ended with exit code %d", info.si_status);
    else if (ended)
        snprintf(how, sizeof how, "it was ended by signal %d", info.si_status);
    const char *line = log_last_line(t);
    return error_set(err, ERR_IO, "%s%s%.500s", how, *line ? ": " : "", line);
}

/* Sends as much as possible without waiting. False: the program reads no more. */
static bool pending_send(struct stdio *t) {
    while (t->pending.len) {
        ssize_t n = send(t->in, t->pending.data, t->pending.len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        t->pending.len -= (size_t)n;
        memmove(t->pending.data, t->pending.data + n, t->pending.len);
    }
    return true;
}

/* False: the output has ended. */
static bool output_read(struct stdio *t) {
    char bytes[CHUNK];
    ssize_t n = read(t->out, bytes, sizeof bytes);
    if (n > 0) buf_add(&t->received, bytes, (size_t)n);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

/* The timeout argument of poll. */
static int poll_timeout(double deadline) {
    double ms = (deadline - clock_now()) * 1000;
    return ms <= 0 ? 0 : ms > 1e6 ? 1000000 : (int)ms + 1;
}

/* Waits for the program, then reads and writes without waiting. */
static int transfer(struct stdio *t, double deadline, struct error *err) {
    struct pollfd p[] = {{.fd = t->out, .events = POLLIN},
                         {.fd = t->errs, .events = POLLIN},
                         {.fd = t->pending.len ? t->in : -1, .events = POLLOUT}};
    int ready = poll(p, ARRAY_LEN(p), poll_timeout(deadline));
    if (ready == 0) return error_set(err, ERR_STATE, "no answer in time");
    if (ready < 0) return errno == EINTR ? OK : error_errno(err, "cannot wait for the program");
    log_read(t);
    // Output is read to its end also of a program that reads no more.
    if (p[0].revents && !output_read(t)) return ended_error(t, err);
    if (p[2].revents && !pending_send(t)) t->pending.len = 0;
    return OK;
}

/* Passes the first line of the output to `receive`, or transfers more of it. */
static int line_receive(struct stdio *t, double deadline, mcp_receive_fn receive, void *ctx,
                        struct error *err) {
    struct buf *b = &t->received;
    char *end =
        b->len > t->scanned ? memchr(b->data + t->scanned, '\n', b->len - t->scanned) : NULL;
    size_t len = end ? (size_t)(end - b->data) : b->len;
    if (len > MCP_MAX_MESSAGE) {
        t->broken = true;
        return error_set(err, ERR_MEMORY, "it sent a line of more than %d MiB",
                         MCP_MAX_MESSAGE >> 20);
    }
    if (!end) {
        t->scanned = b->len;
        return transfer(t, deadline, err);
    }
    int rc = len ? receive(ctx, b->data, len, err) : OK;
    b->len -= len + 1;
    memmove(b->data, b->data + len + 1, b->len);
    t->scanned = 0;
    return rc;
}

/* the transport */

static int stdio_post(struct mcp_transport *base, const char *text, size_t len, double deadline,
                      struct error *err) {
    struct stdio *t = (struct stdio *)base;
    (void)deadline; // it never waits
    if (t->broken) return error_set(err, ERR_IO, "the connection has ended after an earlier error");
    if (t->pending.len + len >= MAX_PENDING)
        return error_set(err, ERR_MEMORY, "it does not read its input");
    buf_add(&t->pending, text, len);
    buf_puts(&t->pending, "\n");
    if (!pending_send(t)) t->pending.len = 0; // the exchange then reads the end of the output
    return OK;
}

static int stdio_exchange(struct mcp_transport *base, const char *text, size_t len, double deadline,
                          mcp_receive_fn receive, void *ctx, struct error *err) {
    struct stdio *t = (struct stdio *)base;
    int rc = stdio_post(base, text, len, deadline, err);
    while (rc == OK) {
        if (clock_now() >= deadline) return error_set(err, ERR_STATE, "no answer in time");
        rc = line_receive(t, deadline, receive, ctx, err);
    }
    return rc;
}

static void stdio_version_set(struct mcp_transport *base, const char *version) {
    (void)base, (void)version;
}

static void stdio_close(struct mcp_transport *base) {
    struct stdio *t = (struct stdio *)base;
    program_stop(t);
    buf_release(&t->pending);
    buf_release(&t->received);
    buf_release(&t->log);
    free(t);
}

struct mcp_transport *mcp_stdio_open(const char *command, const struct strings *env,
                                     struct error *err) {
    struct strings words = {0}, variables = {0};
    if (sandbox_bypass_check(err) != OK) return NULL;
    struct stdio *t = xcalloc(1, sizeof *t);
    t->base = (struct mcp_transport){stdio_exchange, stdio_post, stdio_version_set, stdio_close};
    t->in = t->out = t->errs = -1;
    int rc = environment_make(env, &variables, err);
    if (!rc && !strings_add_words(&words, command))
        rc = error_set(err, ERR_USAGE, "the command has an unclosed quote");
    if (!rc && !words.n) rc = error_set(err, ERR_USAGE, "the command is empty");
    if (!rc) {
        words.v = xrealloc(words.v, (size_t)(words.n + 1) * sizeof *words.v);
        words.v[words.n] = NULL;
        rc = program_start(t, words.v, variables.v, err);
    }
    strings_release(&words);
    strings_release(&variables);
    if (!rc) return &t->base;
    stdio_close(&t->base);
    return NULL;
}
