/*
 * subprocess: line-based exchange with another program, and a program as a policy (for a program
 * that is the environment see external_env.c).
 *
 * The program reads a line from its input and must write a line to its output; it shares our
 * stderr. Its end, a timeout and an invalid answer are errors. It never outlives this process: it
 * leads a process group that is killed with it.
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

/* Milliseconds until `until`, for poll(); -1: for ever. */
static int wait_left(double until) {
    if (until == 0) return -1;
    double left = until - clock_now();
    return left > 0 ? (int)(left * 1000) + 1 : 0;
}

/* Returns the number of bytes read, 0 at the end, or an error. */
static ssize_t bytes_next(struct line_reader *r, double until, struct error *err) {
    char chunk[1 << 16];
    for (;;) {
        struct pollfd p = {.fd = r->fd, .events = POLLIN};
        int ready = poll(&p, 1, wait_left(until));
        if (ready == 0) return error_set(err, ERR_STATE, "nothing came");
        ssize_t n = ready < 0 ? -1 : read(r->fd, chunk, sizeof chunk);
        if (n >= 0) {
            if (buf_reserve(&r->b, (size_t)n, err) != OK) return err->code = ERR_IO;
            buf_add(&r->b, chunk, (size_t)n);
            return n;
        }
        if (errno != EINTR && errno != EAGAIN) return error_errno(err, "cannot read");
    }
}

/* Moves the bytes that were not returned yet to the front. */
static void reader_pack(struct line_reader *r) {
    if (r->begin == 0) return;
    r->b.len -= r->begin;
    memmove(r->b.data, r->b.data + r->begin, r->b.len);
    r->begin = 0;
}

static int line_give(struct line_reader *r, size_t n, size_t taken, const char **line,
                     size_t *len) {
    *line = r->b.data + r->begin;
    *len = n;
    r->begin += taken;
    return 1;
}

int line_reader_next(struct line_reader *r, double timeout, const char **line, size_t *len,
                     struct error *err) {
    double until = timeout > 0 ? clock_now() + timeout : 0;
    size_t looked = 0;
    reader_pack(r);
    for (;;) {
        char *end = r->b.len > looked ? memchr(r->b.data + looked, '\n', r->b.len - looked) : NULL;
        size_t n = end ? (size_t)(end - r->b.data) : r->b.len;
        if (r->skip || n > r->limit) {
            r->skip = !end;
            r->begin = end ? n + 1 : n;
            reader_pack(r);
            looked = 0;
            if (end) return error_set(err, ERR_MEMORY, "a line has more than %zu bytes", r->limit);
        } else if (end) {
            return line_give(r, n, n + 1, line, len);
        } else {
            looked = n;
        }
        ssize_t got = bytes_next(r, until, err);
        if (got < 0) return (int)got;
        if (got == 0 && r->skip) {
            r->skip = false;
            return error_set(err, ERR_MEMORY, "a line has more than %zu bytes", r->limit);
        }
        if (got == 0) return r->b.len ? line_give(r, r->b.len, r->b.len, line, len) : 0;
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
    pid_t pid; /* 0: it has ended with `status` */
    int to, status;
    bool failed;              /* an exchange failed; do not wait long for its end */
    uint64_t invalid_actions; /* agents with an answer that named no action */
    struct line_reader from;
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
    o->to = in[1];
    o->from = (struct line_reader){.fd = out[0], .limit = WORLD_SERVER_MAX_LINE};
    if (in[0] >= 0) close(in[0]);
    if (out[1] >= 0) close(out[1]);
    if (o->to >= 0) fcntl(o->to, F_SETFL, O_NONBLOCK);
    if (rc == OK) return o;
    subprocess_close(o);
    return NULL;
}

/* Waits at most `seconds`; returns whether the program has ended. */
static bool child_ended(struct subprocess *o, double seconds) {
    double until = clock_now() + seconds;
    for (;;) {
        if (o->pid == 0) return true;
        pid_t got = waitpid(o->pid, &o->status, WNOHANG);
        if (got == o->pid || (got < 0 && errno == ECHILD)) o->pid = 0;
        if (o->pid && clock_now() >= until) return false;
        if (o->pid) poll(NULL, 0, 2);
    }
}

void subprocess_close(struct subprocess *o) {
    if (!o) return;
    if (o->to >= 0) close(o->to);
    pid_t group = o->pid;
    if (group && !child_ended(o, o->failed ? 0.1 : o->timeout)) {
        if (!o->failed) log_warn("'%s' did not end when its input did: it is killed", o->command);
        kill(-group, SIGKILL);
        waitpid(group, NULL, 0);
    }
    if (o->from.fd >= 0) close(o->from.fd);
    line_reader_release(&o->from);
    free(o->command);
    free(o);
}

/* The error for a program that has closed its input or output. */
static int ended_error(struct subprocess *o, struct error *err) {
    if (!child_ended(o, 0.2)) return error_set(err, ERR_STATE, "it has closed its output or input");
    if (WIFSIGNALED(o->status))
        return error_set(err, ERR_STATE, "it died of signal %d (%s)", WTERMSIG(o->status),
                         strsignal(WTERMSIG(o->status)));
    return error_set(err, ERR_STATE, "it ended with exit code %d", WEXITSTATUS(o->status));
}

static int silent_error(const struct subprocess *o, struct error *err) {
    return error_set(err, ERR_STATE, "it was silent for %.3g seconds (--timeout)", o->timeout);
}

static int line_send(struct subprocess *o, const struct buf *b, struct error *err) {
    double until = clock_now() + o->timeout;
    for (size_t at = 0; at < b->len;) {
        ssize_t n = write(o->to, b->data + at, b->len - at);
        if (n >= 0) {
            at += (size_t)n;
        } else if (errno == EAGAIN) {
            struct pollfd p = {.fd = o->to, .events = POLLOUT};
            if (poll(&p, 1, wait_left(until)) == 0) return silent_error(o, err);
        } else if (errno != EINTR) {
            return ended_error(o, err);
        }
    }
    return OK;
}

int subprocess_exchange(struct subprocess *o, const struct buf *question, const char **line,
                        size_t *len, struct error *err) {
    int rc = line_send(o, question, err);
    int got = rc == OK ? line_reader_next(&o->from, o->timeout, line, len, err) : 0;
    if (got == ERR_STATE)
        rc = silent_error(o, err);
    else if (rc == OK && got == 0)
        rc = ended_error(o, err);
    else if (got < 0)
        rc = got;
    o->failed |= rc != OK;
    return rc;
}

/* a policy */

static struct buf question_make(const struct world_view *v, uint64_t who) {
    struct buf b = {0};
    buf_printf(&b, "{\"tick\":%d,\"seed\":%" PRIu64 ",", v->w->tick, v->w->seed);
    agent_json_each("observations", who, agent_json_observation, v, &b);
    buf_puts(&b, ",");
    agent_json_each("rewards", who, agent_json_reward, v, &b);
    buf_puts(&b, ",");
    agent_json_each("infos", who, agent_json_info, v, &b);
    buf_puts(&b, "}\n");
    return b;
}

static int answer_read(struct subprocess *o, const struct world_view *v, uint64_t who,
                       const char *line, size_t len, int16_t *actions, struct error *err) {
    struct json_limits left = WORLD_SERVER_JSON_BOUNDS;
    json_t *answer = json_parse_limited(line, len, "its answer", &left, err);
    const json_t *object = json_object_get(answer, "actions");
    int rc = answer ? OK : err->code;
    if (rc == OK && (!object || json_object_size(answer) != 1))
        rc = error_set(err, ERR_FORMAT, "its answer must be {\"actions\": {…}}");
    if (rc == OK) rc = world_actions_read(v, who, object, actions, &o->invalid_actions, err);
    json_decref(answer);
    return rc;
}

int subprocess_act(struct subprocess *o, const struct world *w, const struct world_rules *r,
                   int16_t *actions, struct error *err) {
    struct world_view v = {
        .w = w, .r = r, .invalid_actions = o->invalid_actions, .at_start = w->tick == 0};
    uint64_t who = world_living_mask(w);
    struct buf question = question_make(&v, who);
    const char *line;
    size_t len;
    int rc = subprocess_exchange(o, &question, &line, &len, err);
    if (rc == OK) rc = answer_read(o, &v, who, line, len, actions, err);
    buf_release(&question);
    if (rc == OK) return OK;
    o->failed = true;
    return error_wrap(err, "the policy '%s', tick %d", o->command, w->tick);
}
