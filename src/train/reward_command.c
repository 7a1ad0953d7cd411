/*
 * reward_command: rewards that a user's program computes.
 *
 * The program runs in a sandbox. It gets its lines through an unnamed file, so neither side can
 * block the other, and its output is bounded in time and size. If the user disables the sandbox,
 * the program's process group is killed when it ends.
 */
#define _GNU_SOURCE
#include "train/reward_command.h"
#include "sandbox/sandbox.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Limits of a command. They are generous, because the user wrote it, but protect the machine. */
enum {
    ANSWER_MAX = 64, /* bytes per number */
    PROCESSES = 512,
    FILES = 1024,
    PRINTED = 16 << 20, /* bytes of output, mainly messages on stderr */
};

struct reward_command {
    struct strings argv;
    double timeout;
    bool sandbox, network;
    struct strings read, write;
    char *dir; /* working directory in the sandbox */
};

/* Splits text at blanks; '…' and "…" keep blanks together. No expansion of any kind. */
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

static void questions_write(const struct reward_input *v, int n, struct buf *out) {
    for (int i = 0; i < n; i++) {
        json_t *text = json_stringn_nocheck(v[i].text, strlen(v[i].text));
        json_t *line = json_pack("{s:O,s:o,s:b}", "item", v[i].item, "completion", text, "ended",
                                 (int)v[i].ended);
        char *words = json_dumps(line, JSON_COMPACT);
        if (!words) { // not UTF-8: the program gets null instead
            json_object_set_new(line, "completion", json_null());
            words = json_dumps(line, JSON_COMPACT);
        }
        buf_puts(out, words);
        buf_puts(out, "\n");
        free(words);
        json_decref(line);
    }
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

/* Reads until end of file; fails at the time `until` or after `limit` bytes. */
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
            return error_set(err, ERR_FORMAT, "line %d of its %d is '%.40s': expected a number",
                             i + 1, n, p);
        p = end;
    }
    while (isspace((unsigned char)*p)) p++;
    return *p ? error_set(err, ERR_FORMAT, "it prints more than %d numbers", n) : OK;
}

/* Waits until the program, which has closed its output, has ended. Leaves it as a zombie, so that
 * its process id cannot be reused yet. */
static int child_wait(pid_t pid, double until, struct error *err) {
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid)
            return OK;
        if (clock_now() > until) return error_set(err, ERR_STATE, "it did not end in time");
        usleep(1000);
    }
}

static int child_run(const struct reward_command *n, int questions, size_t limit, struct buf *out,
                     struct error *err) {
    int ends[2], status = 0;
    double until = clock_now() + n->timeout;
    pid_t pid;
    if (pipe2(ends, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    int rc = spawn(&n->argv, questions, ends[1], &pid, err);
    close(ends[1]);
    if (!rc) {
        rc = answers_read(ends[0], until, limit, out, err);
        if (!rc) rc = child_wait(pid, until, err);
        kill(-pid, SIGKILL); // also processes that it started
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
        if (!rc && (!WIFEXITED(status) || WEXITSTATUS(status)))
            rc = error_set(err, ERR_STATE, "it failed with status %d",
                           WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
    close(ends[0]);
    return rc;
}

static int run_plain(const struct reward_command *n, const struct buf *questions, size_t limit,
                     struct buf *out, struct error *err) {
    if (sandbox_bypass_check(err) != OK) return err->code;
    FILE *f = tmpfile();
    int rc = f && fwrite(questions->data, 1, questions->len, f) == questions->len && !fflush(f) &&
                     lseek(fileno(f), 0, SEEK_SET) == 0
                 ? child_run(n, fileno(f), limit, out, err)
                 : error_errno(err, "cannot write the reward's questions");
    if (f) fclose(f);
    return rc;
}

/* Prints the program's stderr, which may contain any bytes. */
static void words_show(const struct buf *errs) {
    struct buf clean = {0};
    if (errs->len) buf_add_sanitized(&clean, errs->data, errs->len);
    if (clean.len) fwrite(clean.data, 1, clean.len, stderr);
    buf_release(&clean);
}

/* The machine's memory, at least 8 GiB, because programs reserve memory without using it. */
static size_t memory_bound(void) {
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return MAX(machine, (size_t)8 << 30);
}

static int run_sandboxed(const struct reward_command *n, const struct buf *questions, size_t limit,
                         struct buf *out, struct error *err) {
    const struct sandbox_spec spec = {
        .argv = &n->argv,
        .read = &n->read,
        .write = &n->write,
        .dir = n->dir,
        .network = n->network,
        .input = questions->data,
        .input_len = questions->len,
        .limits = {.seconds = n->timeout,
                   .memory = memory_bound(),
                   .file_size = (size_t)1 << 30,
                   .tmp_size = (size_t)1 << 30,
                   .output = MAX(limit + 1, (size_t)PRINTED),
                   .processes = PROCESSES,
                   .files = FILES},
    };
    struct sandbox_result r;
    int rc = sandbox_run(&spec, &r, err);
    if (rc) return rc;
    const char *why = sandbox_failure(&r, &spec.limits);
    words_show(&r.errs);
    if (r.out.len > limit)
        rc = error_set(err, ERR_FORMAT, "it prints more than its numbers");
    else if (why)
        rc = error_set(err, ERR_STATE, "%s", why);
    else
        buf_add(out, r.out.data ? r.out.data : "", r.out.len);
    sandbox_result_release(&r);
    return rc;
}

int reward_command_run(const struct reward_command *c, const struct reward_input *v, int n,
                       double *out, struct error *err) {
    struct buf questions = {0}, answers = {0};
    questions_write(v, n, &questions);
    int rc = (c->sandbox ? run_sandboxed : run_plain)(c, &questions, (size_t)n * ANSWER_MAX,
                                                      &answers, err);
    if (!rc) rc = numbers_take(answers.data ? answers.data : "", n, out, err);
    buf_release(&questions);
    buf_release(&answers);
    return rc ? error_wrap(err, "reward command '%s'", c->argv.v[0]) : OK;
}

/* files that a command may read */

/* Whether a command may read the whole folder just because it is the working folder or contains the
 * program. Not if it is the root, /tmp, the home folder or one of its parents: it may hold
 * secrets. */
static bool is_shown(const char *folder) {
    const char *home = getenv("HOME");
    char *real = realpath(folder, NULL);
    size_t n = real ? strlen(real) : 0;
    bool shown = n > 1 && strcmp(real, "/tmp") != 0 &&
                 !(home && strncmp(home, real, n) == 0 && (!home[n] || home[n] == '/'));
    free(real);
    return shown;
}

/* `path` without its last `n` parts; malloc'ed. */
static char *above(const char *path, int n) {
    char *folder = xstrdup(path), *slash;
    while (n-- > 0 && (slash = strrchr(folder, '/'))) *slash = 0;
    return folder;
}

static bool has_any(const char *folder, const char *const *names, int n) {
    for (int i = 0; i < n; i++) {
        char *path = path_join(folder, names[i]);
        bool is = path_exists(path);
        free(path);
        if (is) return true;
    }
    return false;
}

/* Allows a program's folder, and for an interpreter its parent: a virtual environment, conda,
 * pyenv, or a separate installation of Python. */
static void allow_program_dirs(struct reward_command *c, const char *path) {
    static const char *const marks[] = {"pyvenv.cfg", "conda-meta", "libexec/pyenv"};
    if (strncmp(path, "/usr/", 5) == 0 || strncmp(path, "/bin/", 5) == 0) return;
    char *folder = above(path, 1), *root = above(path, 2);
    bool python = strncmp(path + strlen(folder), "/python", 7) == 0;
    strings_add(&c->read, path);
    if (!path_access_hook && is_shown(folder)) strings_add(&c->read, folder);
    if (!path_access_hook && is_shown(root) && (python || has_any(root, marks, ARRAY_LEN(marks))))
        strings_add(&c->read, root);
    free(folder);
    free(root);
}

/* Allows the files that arguments name. Returns whether one of them is in `here`. */
static bool allow_argv_files(struct reward_command *c, const char *here) {
    struct stat st;
    bool any = false;
    for (int i = 1; i < c->argv.n; i++) {
        char *real = realpath(c->argv.v[i], NULL);
        if (real && stat(real, &st) == 0 && S_ISREG(st.st_mode)) {
            size_t n = strlen(here);
            strings_add(&c->read, real);
            any |= strncmp(real, here, n) == 0 && real[n] == '/';
        }
        free(real);
    }
    return any;
}

/* Makes the program's path absolute, as the shell would find it. */
static int program_take(struct reward_command *c, const char *here, struct error *err) {
    char *name = c->argv.v[0], *path;
    if (!strchr(name, '/'))
        path = sandbox_program_find(getenv("PATH"), name);
    else
        path = *name == '/' ? xstrdup(name) : path_join(here, name);
    if (!path || !path_exists(path)) {
        free(path);
        return error_set(err, ERR_MISSING, "cannot run reward command '%s': it does not exist",
                         name);
    }
    free(name);
    c->argv.v[0] = path;
    char *real = realpath(path, NULL);
    allow_program_dirs(c, path);
    if (real && strcmp(real, path) != 0) allow_program_dirs(c, real);
    free(real);
    return OK;
}

static void all_add(struct strings *to, const struct strings *from) {
    for (int i = 0; i < from->n; i++) strings_add(to, from->v[i]);
}

/* With a path access hook, a command may read only files that the hook permits, and write
 * nothing. */
static int sandbox_paths_check(const struct reward_command *c, struct error *err) {
    for (int i = 0; path_access_hook && i < c->read.n; i++)
        if (path_access_hook(c->read.v[i], PATH_USE_EXEC, err) != OK) return err->code;
    return path_access_hook && c->write.n
               ? error_set(err, ERR_STATE, "in a job reward commands write nothing")
               : OK;
}

static int sandbox_paths_make(struct reward_command *c, const struct rl_options *o,
                              struct error *err) {
    char *here = realpath(".", NULL);
    if (!here) return error_errno(err, "the working folder");
    int rc = program_take(c, here, err);
    bool shown = !path_access_hook && is_shown(here), named = allow_argv_files(c, here);
    if (shown)
        strings_add(&c->read, here);
    else if (!rc && !path_access_hook)
        log_info("reward commands see of '%s' only files that they name; --reward-read shows more",
                 here);
    c->dir = xstrdup(shown || named ? here : "/tmp");
    all_add(&c->read, &o->reward_read);
    all_add(&c->write, &o->reward_write);
    free(here);
    return rc ? rc : sandbox_paths_check(c, err);
}

/* opening */

static int sandbox_check(struct error *err) {
    struct error why;
    int rc = sandbox_available(&why);
    if (!rc) return OK;
    return error_set(err, rc, "%.1900s; --no-reward-sandbox runs reward commands without a sandbox",
                     why.text);
}

struct reward_command *reward_command_open(const char *words, bool shell,
                                           const struct rl_options *o, struct error *err) {
    struct reward_command *c = xcalloc(1, sizeof *c);
    c->timeout = o->reward_timeout;
    c->sandbox = o->reward_sandbox;
    c->network = o->reward_network;
    int rc = OK;
    if (shell) {
        strings_add(&c->argv, "/bin/sh");
        strings_add(&c->argv, "-c");
        strings_add(&c->argv, words);
    } else {
        rc = words_split(words, &c->argv, err);
    }
    if (!rc) rc = (c->sandbox && !c->network ? sandbox_command_check : sandbox_bypass_check)(err);
    if (!rc && c->sandbox) rc = sandbox_check(err);
    if (!rc && c->sandbox) rc = sandbox_paths_make(c, o, err);
    if (!rc) return c;
    reward_command_close(c);
    return NULL;
}

void reward_command_close(struct reward_command *c) {
    if (!c) return;
    strings_release(&c->argv);
    strings_release(&c->read);
    strings_release(&c->write);
    free(c->dir);
    free(c);
}
