/*
 * reward_named: rewards that the command line can name.
 *
 * exact and regex are pure. A command is outside of us: it gets lines through a file that has no
 * name, so neither side can block the other, its answer is bounded in time and size, and whatever
 * it started is killed with it when the time is over.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "eval/grade.h"
#include "train/policy.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pcre2.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_MAX 64 /* bytes a number may take */

extern char **environ;

struct named {
    pcre2_code *pattern; /* regex:PATTERN */
    struct strings argv; /* of a command */
    double timeout;
};

/* exact */

/* A text as grader `exact` compares it, a number as grader `number` does. */
static bool answer_matches(const char *said, const json_t *right) {
    struct error err;
    bool number = json_is_number(right);
    for (size_t i = 0; i < json_array_size(right); i++)
        if (answer_matches(said, json_array_get(right, i))) return true;
    if (json_is_array(right)) return false;
    const struct grader *g = grader_find(number ? "number" : "exact", &err);
    char *text = json_dumps(right, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    const char *gold = number ? text : json_string_value(right);
    double score = grade_text(g, said, &gold, 1).score;
    free(text);
    return score > 0;
}

static double exact_reward(void *ctx, const json_t *item, const char *completion) {
    (void)ctx;
    return answer_matches(completion, json_object_get(item, "answer"));
}

static int exact_check(void *ctx, const json_t *item, struct error *err) {
    const json_t *a = json_object_get(item, "answer");
    bool good = json_is_string(a) || json_is_number(a) || json_array_size(a) > 0;
    (void)ctx;
    for (size_t i = 0; i < json_array_size(a); i++)
        good =
            good && (json_is_string(json_array_get(a, i)) || json_is_number(json_array_get(a, i)));
    if (good) return OK;
    return error_set(err, ERR_FORMAT, "'answer' %s, which reward exact compares with",
                     a ? "must be a text, a number or a list of them" : "is missing");
}

/* regex */

static int regex_check(void *ctx, const json_t *item, struct error *err) {
    const struct named *n = ctx;
    const char *text = json_string_value(json_object_get(item, "pattern"));
    if (n->pattern) return OK;
    if (!text)
        return error_set(err, ERR_FORMAT, "'pattern' is missing, which reward regex looks for");
    pcre2_code *p = pattern_make(text, err);
    pcre2_code_free(p);
    return p ? OK : err->code;
}

/* What is no UTF-8 or takes too long does not match. */
static double regex_reward(void *ctx, const json_t *item, const char *completion) {
    const struct named *n = ctx;
    struct error err;
    const char *text = json_string_value(json_object_get(item, "pattern"));
    pcre2_code *p = n->pattern ? n->pattern : pattern_make(text, &err);
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    CHECK(p && m); // regex_check has seen the item
    int rc = pcre2_match(p, (PCRE2_SPTR)completion, strlen(completion), 0, 0, m, NULL);
    pcre2_match_data_free(m);
    if (!n->pattern) pcre2_code_free(p);
    return rc >= 0;
}

/* commands */

/* Words at blanks; '…' and "…" keep blanks together. No expansion of any kind. */
static int words_split(const char *text, struct strings *out, struct error *err) {
    struct buf word = {0};
    char quote = 0;
    bool any = false;
    for (const char *p = text; *p || any; p++) {
        if (!*p || (!quote && isspace((unsigned char)*p))) {
            if (any) strings_add(out, word.data ? word.data : "");
            buf_release(&word);
            any = false;
            if (!*p) break;
        } else if (quote ? *p == quote : *p == '\'' || *p == '"') {
            quote = quote ? 0 : *p;
            any = true;
        } else {
            buf_add(&word, p, 1);
            any = true;
        }
    }
    if (quote) return error_set(err, ERR_USAGE, "command '%s' has an open quote", text);
    return out->n ? OK : error_set(err, ERR_USAGE, "the reward's command is empty");
}

static FILE *questions_write(const struct completion *v, int n, struct error *err) {
    FILE *f = tmpfile();
    for (int i = 0; f && i < n; i++) {
        json_t *text = json_stringn_nocheck(v[i].text, strlen(v[i].text));
        json_t *line = json_pack("{s:O,s:o,s:b}", "item", v[i].item, "completion", text, "ended",
                                 (int)v[i].ended);
        char *out = json_dumps(line, JSON_COMPACT);
        if (!out) { // bytes that are no UTF-8: the program is told that they are
            json_object_set_new(line, "completion", json_null());
            out = json_dumps(line, JSON_COMPACT);
        }
        fprintf(f, "%s\n", out);
        free(out);
        json_decref(line);
    }
    if (f && !fflush(f) && !ferror(f) && lseek(fileno(f), 0, SEEK_SET) == 0) return f;
    error_errno(err, "cannot write the reward's questions");
    if (f) fclose(f);
    return NULL;
}

static int spawn(const struct strings *argv, int in, int out, pid_t *pid, struct error *err) {
    char **v = xcalloc((size_t)argv->n + 1, sizeof *v);
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    memcpy(v, argv->v, (size_t)argv->n * sizeof *v);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP);
    errno = posix_spawnp(pid, v[0], &files, &attr, v, environ);
    int rc = errno ? error_errno(err, "cannot run reward command '%s'", v[0]) : OK;
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    free(v);
    return rc;
}

/* Until its end of file, `until` or `limit` bytes. */
static int answers_read(int fd, double until, size_t limit, struct buf *out, struct error *err) {
    char bytes[4096];
    for (;;) {
        double left = until - clock_now();
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = left > 0 ? poll(&p, 1, (int)ceil(MIN(left, 1e6) * 1000)) : 0;
        if (ready < 0 && errno == EINTR) continue;
        if (ready <= 0) return error_set(err, ERR_STATE, "it did not end in time");
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_errno(err, "cannot read its numbers");
        if (n == 0) return OK;
        buf_add(out, bytes, (size_t)n);
        if (out->len > limit) return error_set(err, ERR_FORMAT, "it prints more than its numbers");
    }
}

static int numbers_take(const char *text, int n, double *out, struct error *err) {
    const char *p = text;
    for (int i = 0; i < n; i++) {
        char *end;
        out[i] = strtod(p, &end);
        if (end == p || (*end && !isspace((unsigned char)*end)) || !isfinite(out[i]))
            return error_set(err, ERR_FORMAT, "line %d of its %d is '%.40s': a number is wanted",
                             i + 1, n, p);
        p = end;
    }
    while (isspace((unsigned char)*p)) p++;
    return *p ? error_set(err, ERR_FORMAT, "it prints more than %d numbers", n) : OK;
}

/* Waits until the program, which has closed its output, is over; it stays to be reaped, so that its
 * number cannot be another's yet. */
static int child_wait(pid_t pid, double until, struct error *err) {
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid)
            return OK;
        if (clock_now() > until) return error_set(err, ERR_STATE, "it did not end in time");
        usleep(1000);
    }
}

static int child_run(const struct named *n, FILE *questions, size_t limit, struct buf *out,
                     struct error *err) {
    int ends[2], status = 0;
    double until = clock_now() + n->timeout;
    pid_t pid;
    if (pipe2(ends, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    int rc = spawn(&n->argv, fileno(questions), ends[1], &pid, err);
    close(ends[1]);
    if (!rc) {
        rc = answers_read(ends[0], until, limit, out, err);
        if (!rc) rc = child_wait(pid, until, err);
        kill(-pid, SIGKILL); // and what it left behind
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
        if (!rc && (!WIFEXITED(status) || WEXITSTATUS(status)))
            rc = error_set(err, ERR_STATE, "it failed with status %d",
                           WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
    close(ends[0]);
    return rc;
}

static int command_all(void *ctx, const struct completion *v, int n, double *out,
                       struct error *err) {
    const struct named *c = ctx;
    struct buf answers = {0};
    FILE *questions = questions_write(v, n, err);
    if (!questions) return err->code;
    int rc = child_run(c, questions, (size_t)n * ANSWER_MAX, &answers, err);
    fclose(questions);
    if (!rc) rc = numbers_take(answers.data ? answers.data : "", n, out, err);
    buf_release(&answers);
    return rc ? error_wrap(err, "reward command '%s'", c->argv.v[0]) : OK;
}

/* After `name:`, or NULL. */
static const char *after(const char *spec, const char *name) {
    size_t n = strlen(name);
    return strncmp(spec, name, n) == 0 && spec[n] == ':' ? spec + n + 1 : NULL;
}

int reward_open(struct reward *r, const char *spec, double timeout, struct error *err) {
    struct named *n = xcalloc(1, sizeof *n);
    const char *rest;
    int rc = OK;
    n->timeout = timeout;
    *r = (struct reward){.ctx = n};
    if (strcmp(spec, "exact") == 0) {
        r->one = exact_reward;
        r->check = exact_check;
    } else if (strcmp(spec, "regex") == 0 || (rest = after(spec, "regex"))) {
        r->one = regex_reward;
        r->check = regex_check;
        if (spec[5] && !(n->pattern = pattern_make(spec + 6, err))) rc = err->code;
    } else if ((rest = after(spec, "command"))) {
        r->all = command_all;
        rc = words_split(rest, &n->argv, err);
    } else if ((rest = after(spec, "shell"))) {
        r->all = command_all;
        strings_add(&n->argv, "/bin/sh");
        strings_add(&n->argv, "-c");
        strings_add(&n->argv, rest);
    } else {
        rc = error_set(err, ERR_USAGE,
                       "reward '%s' is not known; there are exact, regex[:PATTERN], command:WORDS, "
                       "shell:LINE",
                       spec);
    }
    if (rc) reward_close(r);
    return rc;
}

void reward_close(struct reward *r) {
    struct named *n = r->ctx;
    if (n) {
        pcre2_code_free(n->pattern);
        strings_release(&n->argv);
    }
    free(n);
    *r = (struct reward){0};
}
