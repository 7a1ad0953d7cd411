/*
 * subprocess: line-based exchange with another program, and a program as a policy (for a program
 * that is the environment see external_env.c).
 *
 * The program reads a line from its input and must write a line to its output; it shares the stderr
 * of this process. Its exit, a timeout and an invalid answer are errors. It leads a process group,
 * which subprocess_close kills if the program has not exited.
 */
#define _GNU_SOURCE
#include "sandbox/sandbox.h"
#include "world/world_server_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* lines */

/* The timeout argument of poll(): milliseconds until `deadline`; -1 (no limit) for the deadline 0.
 */
static int poll_timeout(double deadline) {
    if (deadline == 0) return -1;
    double seconds = deadline - clock_now();
    return seconds > 0 ? (int)(seconds * 1000) + 1 : 0;
}

/* Returns the number of bytes read, 0 at the end, or an error. */
static ssize_t bytes_read(struct line_reader *r, double deadline, struct error *err) {
    char chunk[1 << 16];
    for (;;) {
        struct pollfd p = {.fd = r->fd, .events = POLLIN};
        int ready = poll(&p, 1, poll_timeout(deadline));
        if (ready == 0) return error_set(err, ERR_STATE, "no line was received in time");
        ssize_t n = ready < 0 ? -1 : read(r->fd, chunk, sizeof chunk);
        if (n >= 0) {
            if (buf_reserve(&r->b, (size_t)n, err) != OK) return err->code = ERR_IO;
            buf_add(&r->b, chunk, (size_t)n);
            return n;
        }
        if (errno != EINTR && errno != EAGAIN) return error_errno(err, "cannot read");
    }
}

/* Moves the bytes that were not returned yet to the front of the buffer. */
static void reader_compact(struct line_reader *r) {
    if (r->begin == 0) return;
    r->b.len -= r->begin;
    memmove(r->b.data, r->b.data + r->begin, r->b.len);
    r->begin = 0;
}

static int line_consume(struct line_reader *r, size_t n, size_t n_consumed, const char **line,
                        size_t *len) {
    *line = r->b.data + r->begin;
    *len = n;
    r->begin += n_consumed;
    return 1;
}

int line_reader_next(struct line_reader *r, double timeout, const char **line, size_t *len,
                     struct error *err) {
    double deadline = timeout > 0 ? clock_now() + timeout : 0;
    size_t scanned = 0;
    reader_compact(r);
    for (;;) {
        char *end =
            r->b.len > scanned ? memchr(r->b.data + scanned, '\n', r->b.len - scanned) : NULL;
        size_t n = end ? (size_t)(end - r->b.data) : r->b.len;
        if (r->skip || n > r->limit) {
            r->skip = !end;
            r->begin = end ? n + 1 : n;
            reader_compact(r);
            scanned = 0;
            if (end) return error_set(err, ERR_MEMORY, "a line has more than %zu bytes", r->limit);
        } else if (end) {
            return line_consume(r, n, n + 1, line, len);
        } else {
            scanned = n;
        }
        ssize_t got = bytes_read(r, deadline, err);
        if (got < 0) return (int)got;
        if (got == 0 && r->skip) {
            r->skip = false;
            return error_set(err, ERR_MEMORY, "a line has more than %zu bytes", r->limit);
        }
        if (got == 0) return r->b.len ? line_consume(r, r->b.len, r->b.len, line, len) : 0;
    }
}

void line_reader_release(struct line_reader *r) {
    buf_release(&r->b);
    *r = (struct line_reader){.fd = r->fd, .limit = r->limit};
}

/* the program */

struct subprocess {
    char *command;
    double timeout;
    pid_t pid; /* 0: the process has exited with `status`, or was never started */
    int stdin_fd, status;
    bool failed; /* an exchange failed, so subprocess_close does not wait long for its exit */
    uint64_t invalid_actions; /* agents whose last answer named no action */
    struct line_reader reader;
};

/* in: the child's input; out: the child's output. */
static int child_start(struct subprocess *o, int in, int out, struct error *err) {
    char *argv[] = {"sh", "-c", o->command, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t pipe_signal;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE); /* this process ignores it; the child must not */
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
    posix_spawnattr_setsigdefault(&attr, &pipe_signal);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    errno = posix_spawn(&o->pid, "/bin/sh", &files, &attr, argv, environ);
    int rc = errno ? error_errno(err, "cannot start '%s'", o->command) : OK;
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    return rc;
}

struct subprocess *subprocess_open(const char *command, double timeout, struct error *err) {
    if (sandbox_bypass_check(err) != OK) return NULL;
    struct subprocess *o = xcalloc(1, sizeof *o);
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    o->command = xstrdup(command);
    o->timeout = timeout;
    int rc =
        pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) ? error_errno(err, "cannot make a pipe") : OK;
    if (rc == OK) rc = child_start(o, in[0], out[1], err);
    if (rc != OK) o->pid = 0;
    o->stdin_fd = in[1];
    o->reader = (struct line_reader){.fd = out[0], .limit = WORLD_SERVER_MAX_LINE};
    if (in[0] >= 0) close(in[0]);
    if (out[1] >= 0) close(out[1]);
    if (o->stdin_fd >= 0) fcntl(o->stdin_fd, F_SETFL, O_NONBLOCK);
    if (rc == OK) return o;
    subprocess_close(o);
    return NULL;
}

/* Waits at most `seconds`; returns whether the program has exited. */
static bool child_wait_exit(struct subprocess *o, double seconds) {
    double deadline = clock_now() + seconds;
    for (;;) {
        if (o->pid == 0) return true;
        pid_t got = waitpid(o->pid, &o->status, WNOHANG);
        if (got == o->pid || (got < 0 && errno == ECHILD)) o->pid = 0;
        if (o->pid && clock_now() >= deadline) return false;
        if (o->pid) poll(NULL, 0, 2);
    }
}

void subprocess_close(struct subprocess *o) {
    if (!o) return;
    if (o->stdin_fd >= 0) close(o->stdin_fd);
    pid_t group = o->pid;
    if (group && !child_wait_exit(o, o->failed ? 0.1 : o->timeout)) {
        if (!o->failed) log_warn("'%s' did not end when its input did: it is killed", o->command);
        kill(-group, SIGKILL);
        waitpid(group, NULL, 0);
    }
    if (o->reader.fd >= 0) close(o->reader.fd);
    line_reader_release(&o->reader);
    free(o->command);
    free(o);
}

/* Sets the error for a program that has closed its input or output. */
static int exit_error(struct subprocess *o, struct error *err) {
    if (!child_wait_exit(o, 0.2))
        return error_set(err, ERR_STATE, "it has closed its output or input");
    if (WIFSIGNALED(o->status))
        return error_set(err, ERR_STATE, "it died of signal %d (%s)", WTERMSIG(o->status),
                         strsignal(WTERMSIG(o->status)));
    return error_set(err, ERR_STATE, "it ended with exit code %d", WEXITSTATUS(o->status));
}

static int timeout_error(const struct subprocess *o, struct error *err) {
    return error_set(err, ERR_STATE, "it was silent for %.3g seconds (--timeout)", o->timeout);
}

static int line_send(struct subprocess *o, const struct buf *b, struct error *err) {
    double deadline = clock_now() + o->timeout;
    for (size_t sent = 0; sent < b->len;) {
        ssize_t n = write(o->stdin_fd, b->data + sent, b->len - sent);
        if (n >= 0) {
            sent += (size_t)n;
        } else if (errno == EAGAIN) {
            struct pollfd p = {.fd = o->stdin_fd, .events = POLLOUT};
            if (poll(&p, 1, poll_timeout(deadline)) == 0) return timeout_error(o, err);
        } else if (errno != EINTR) {
            return exit_error(o, err);
        }
    }
    return OK;
}

int subprocess_exchange(struct subprocess *o, const struct buf *request, const char **line,
                        size_t *len, struct error *err) {
    int rc = line_send(o, request, err);
    int got = rc == OK ? line_reader_next(&o->reader, o->timeout, line, len, err) : 0;
    if (got == ERR_STATE)
        rc = timeout_error(o, err);
    else if (rc == OK && got == 0)
        rc = exit_error(o, err);
    else if (got < 0)
        rc = got;
    o->failed |= rc != OK;
    return rc;
}

/* a policy */

static struct buf observations_request(const struct world_view *v, uint64_t agents) {
    struct buf b = {0};
    buf_printf(&b, "{\"tick\":%d,\"seed\":%" PRIu64 ",", v->w->tick, v->w->seed);
    agent_json_each("observations", agents, agent_json_observation, v, &b);
    buf_puts(&b, ",");
    agent_json_each("rewards", agents, agent_json_reward, v, &b);
    buf_puts(&b, ",");
    agent_json_each("infos", agents, agent_json_info, v, &b);
    buf_puts(&b, "}\n");
    return b;
}

static int actions_reply_read(struct subprocess *o, const struct world_view *v, uint64_t agents,
                              const char *line, size_t len, int16_t *actions, struct error *err) {
    struct json_limits left = WORLD_SERVER_JSON_BOUNDS;
    json_t *answer = json_parse_limited(line, len, "its answer", &left, err);
    const json_t *object = json_object_get(answer, "actions");
    int rc = answer ? OK : err->code;
    if (rc == OK && (!object || json_object_size(answer) != 1))
        rc = error_set(err, ERR_FORMAT, "its answer must be {\"actions\": {…}}");
    if (rc == OK) rc = world_actions_read(v, agents, object, actions, &o->invalid_actions, err);
    json_decref(answer);
    return rc;
}

int subprocess_act(struct subprocess *o, const struct world *w, const struct world_rules *r,
                   int16_t *actions, struct error *err) {
    struct world_view v = {
        .w = w, .r = r, .invalid_actions = o->invalid_actions, .at_start = w->tick == 0};
    uint64_t agents = world_living_mask(w);
    struct buf request = observations_request(&v, agents);
    const char *line;
    size_t len;
    int rc = subprocess_exchange(o, &request, &line, &len, err);
    if (rc == OK) rc = actions_reply_read(o, &v, agents, line, len, actions, err);
    buf_release(&request);
    if (rc == OK) return OK;
    o->failed = true;
    return error_wrap(err, "the policy '%s', tick %d", o->command, w->tick);
}
