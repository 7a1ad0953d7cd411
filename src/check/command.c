/*
 * command: the checks command and shell, which run a program of the user.
 *
 * The program runs in a sandbox. It reads its input from an unnamed file, so that neither the
 * program nor this process can block the other by a full pipe. Its time and the size of its output
 * are limited. If the user has disabled the sandbox, the program's process group is killed when the
 * program ends.
 */
#define _GNU_SOURCE
#include "check/internal.h"
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

/* Limits of a command. The user has written the program, so the limits are large, but they protect
 * the machine. */
enum {
    MAX_NUMBER_BYTES = 64, /* bytes of output per text */
    MAX_PROCESSES = 512,
    MAX_FILES = 1024,
    /* bytes of output of a sandboxed command, mainly messages on stderr */
    MAX_OUTPUT_BYTES = 16 << 20,
};

struct command {
    const char *label; /* of the check */
    struct strings argv;
    double timeout; /* seconds */
    bool sandbox, network;
    struct strings read, write;
    char *dir; /* working directory in the sandbox */
};

static void write_inputs(const struct check_case *v, int n, struct buf *out) {
    for (int i = 0; i < n; i++) {
        json_t *text = json_stringn_nocheck(v[i].text, strlen(v[i].text));
        json_t *line = json_pack("{s:O,s:o,s:b}", "item", v[i].item, "completion", text, "ended",
                                 (int)v[i].ended);
        char *dump = json_dumps(line, JSON_COMPACT);
        if (!dump) { // not UTF-8: the program gets null instead
            json_object_set_new(line, "completion", json_null());
            dump = json_dumps(line, JSON_COMPACT);
        }
        buf_puts(out, dump);
        buf_puts(out, "\n");
        free(dump);
        json_decref(line);
    }
}

static int spawn(const struct command *c, int in, int out, pid_t *pid, struct error *err) {
    const struct strings *argv = &c->argv;
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
    int rc = errno ? error_errno(err, "cannot run %s command '%s'", c->label, v[0]) : OK;
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    free(v);
    return rc;
}

/* Reads until end of file. ERR_STATE at the deadline, ERR_FORMAT after more than `limit` bytes. */
static int read_output(int fd, double deadline, size_t limit, struct buf *out, struct error *err) {
    char bytes[4096];
    for (;;) {
        double seconds_left = deadline - clock_now();
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = seconds_left > 0 ? poll(&p, 1, (int)ceil(MIN(seconds_left, 1e6) * 1000)) : 0;
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

static int parse_numbers(const char *text, int n, double *out, struct error *err) {
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
 * its process id is not reused before the process group is killed. */
static int child_wait(pid_t pid, double deadline, struct error *err) {
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid)
            return OK;
        if (clock_now() > deadline) return error_set(err, ERR_STATE, "it did not end in time");
        usleep(1000);
    }
}

static int child_run(const struct command *c, int input, size_t limit, struct buf *out,
                     struct error *err) {
    int pipe_fds[2], status = 0;
    double deadline = clock_now() + c->timeout;
    pid_t pid;
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    int rc = spawn(c, input, pipe_fds[1], &pid, err);
    close(pipe_fds[1]);
    if (!rc) {
        rc = read_output(pipe_fds[0], deadline, limit, out, err);
        if (!rc) rc = child_wait(pid, deadline, err);
        kill(-pid, SIGKILL); // kills also the processes that it started
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
        if (!rc && (!WIFEXITED(status) || WEXITSTATUS(status)))
            rc = error_set(err, ERR_STATE, "it failed with status %d",
                           WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
    close(pipe_fds[0]);
    return rc;
}

static int run_unsandboxed(const struct command *c, const struct buf *input, size_t limit,
                           struct buf *out, struct error *err) {
    if (sandbox_bypass_check(err) != OK) return err->code;
    FILE *f = tmpfile();
    int rc = f && fwrite(input->data, 1, input->len, f) == input->len && !fflush(f) &&
                     lseek(fileno(f), 0, SEEK_SET) == 0
                 ? child_run(c, fileno(f), limit, out, err)
                 : error_errno(err, "cannot write the input of a command");
    if (f) fclose(f);
    return rc;
}

/* Prints the program's stderr, which may contain any bytes. */
static void print_stderr(const struct buf *errs) {
    struct buf clean = {0};
    if (errs->len) buf_add_sanitized(&clean, errs->data, errs->len);
    if (clean.len) fwrite(clean.data, 1, clean.len, stderr);
    buf_release(&clean);
}

/* Address space that a command may reserve: the machine's memory, at least 8 GiB, because programs
 * reserve more than they use. */
static size_t memory_limit(void) {
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return MAX(machine, (size_t)8 << 30);
}

static int run_sandboxed(const struct command *c, const struct buf *input, size_t limit,
                         struct buf *out, struct error *err) {
    const struct sandbox_spec spec = {
        .argv = &c->argv,
        .read = &c->read,
        .write = &c->write,
        .dir = c->dir,
        .network = c->network,
        .input = input->data,
        .input_len = input->len,
        .limits = {.seconds = c->timeout,
                   .memory = memory_limit(),
                   .file_size = (size_t)1 << 30,
                   .tmp_size = (size_t)1 << 30,
                   .output = MAX(limit + 1, (size_t)MAX_OUTPUT_BYTES),
                   .processes = MAX_PROCESSES,
                   .open_files = MAX_FILES},
    };
    struct sandbox_result r;
    int rc = sandbox_run(&spec, &r, err);
    if (rc) return rc;
    const char *why = sandbox_failure(&r, &spec.limits);
    print_stderr(&r.error_output);
    if (r.out.len > limit)
        rc = error_set(err, ERR_FORMAT, "it prints more than its numbers");
    else if (why)
        rc = error_set(err, ERR_STATE, "%s", why);
    else
        buf_add(out, r.out.data ? r.out.data : "", r.out.len);
    sandbox_result_release(&r);
    return rc;
}

static int command_run(struct check *check, struct check_case *cases, int n, struct error *err) {
    const struct command *c = check->state;
    struct buf input = {0}, output = {0};
    double *scores = xcalloc((size_t)MAX(n, 1), sizeof *scores);
    write_inputs(cases, n, &input);
    int rc = (c->sandbox ? run_sandboxed : run_unsandboxed)(c, &input, (size_t)n * MAX_NUMBER_BYTES,
                                                            &output, err);
    if (!rc) rc = parse_numbers(output.data ? output.data : "", n, scores, err);
    for (int i = 0; !rc && i < n; i++) cases[i].score = scores[i];
    buf_release(&input);
    buf_release(&output);
    free(scores);
    return rc ? error_wrap(err, "%s command '%s'", c->label, c->argv.v[0]) : OK;
}

/* files that a command may read */

/* Whether a command may read a whole folder because it is the working folder or contains the
 * program. False for the root, /tmp, the home folder and its parents, which may contain secrets. */
static bool may_expose_folder(const char *folder) {
    const char *home = getenv("HOME");
    char *real = realpath(folder, NULL);
    size_t n = real ? strlen(real) : 0;
    bool may_expose = n > 1 && strcmp(real, "/tmp") != 0 &&
                      !(home && strncmp(home, real, n) == 0 && (!home[n] || home[n] == '/'));
    free(real);
    return may_expose;
}

/* `path` without its last `n` components; malloc'ed. */
static char *parent_folder(const char *path, int n) {
    char *folder = xstrdup(path), *slash;
    while (n-- > 0 && (slash = strrchr(folder, '/'))) *slash = 0;
    return folder;
}

static bool has_any_file(const char *folder, const char *const *names, int n) {
    for (int i = 0; i < n; i++) {
        char *path = path_join(folder, names[i]);
        bool exists = path_exists(path);
        free(path);
        if (exists) return true;
    }
    return false;
}

/* Adds to `read` the program, its folder and, for an interpreter, the parent of this folder: the
 * folder of a virtual environment, of conda, of pyenv, or of a separate installation of Python. */
static void allow_program_dirs(struct strings *read, const char *path) {
    static const char *const markers[] = {"pyvenv.cfg", "conda-meta", "libexec/pyenv"};
    if (strncmp(path, "/usr/", 5) == 0 || strncmp(path, "/bin/", 5) == 0) return;
    char *folder = parent_folder(path, 1), *parent = parent_folder(path, 2);
    bool python = strncmp(path + strlen(folder), "/python", 7) == 0;
    strings_add(read, path);
    if (!path_access_hook && may_expose_folder(folder)) strings_add(read, folder);
    if (!path_access_hook && may_expose_folder(parent) &&
        (python || has_any_file(parent, markers, ARRAY_LEN(markers))))
        strings_add(read, parent);
    free(folder);
    free(parent);
}

/* Adds to `read` the files that are arguments. Returns whether one of these files is in the working
 * folder. */
static bool allow_argv_files(struct command *c, const char *working_dir) {
    struct stat st;
    bool is_in_working_dir = false;
    for (int i = 1; i < c->argv.n; i++) {
        char *real = realpath(c->argv.v[i], NULL);
        if (real && stat(real, &st) == 0 && S_ISREG(st.st_mode)) {
            size_t n = strlen(working_dir);
            strings_add(&c->read, real);
            is_in_working_dir |= strncmp(real, working_dir, n) == 0 && real[n] == '/';
        }
        free(real);
    }
    return is_in_working_dir;
}

char *program_resolve(const char *name, const char *working_dir, const char *label,
                      struct strings *read, struct error *err) {
    char *path;
    if (!strchr(name, '/'))
        path = sandbox_program_find(getenv("PATH"), name);
    else
        path = *name == '/' ? xstrdup(name) : path_join(working_dir, name);
    if (!path || !path_exists(path)) {
        free(path);
        error_set(err, ERR_MISSING, "cannot run %s command '%s': it does not exist", label, name);
        return NULL;
    }
    char *real = realpath(path, NULL);
    allow_program_dirs(read, path);
    if (real && strcmp(real, path) != 0) allow_program_dirs(read, real);
    free(real);
    return path;
}

int program_paths_check(const struct strings *read, struct error *err) {
    for (int i = 0; path_access_hook && i < read->n; i++)
        if (path_access_hook(read->v[i], PATH_USE_EXEC, err) != OK) return err->code;
    return OK;
}

/* Replaces the program's name by its absolute path. */
static int resolve_program(struct command *c, const char *working_dir, struct error *err) {
    char *path = program_resolve(c->argv.v[0], working_dir, c->label, &c->read, err);
    if (!path) return err->code;
    free(c->argv.v[0]);
    c->argv.v[0] = path;
    return OK;
}

static void strings_add_all(struct strings *to, const struct strings *from) {
    for (int i = 0; i < from->n; i++) strings_add(to, from->v[i]);
}

/* With a path access hook (in a job), a command may read only files that the hook permits, and
 * write nothing. */
static int sandbox_paths_check(const struct command *c, struct error *err) {
    if (program_paths_check(&c->read, err) != OK) return err->code;
    return path_access_hook && c->write.n
               ? error_set(err, ERR_STATE, "in a job %s commands write nothing", c->label)
               : OK;
}

static int sandbox_paths_make(struct command *c, const struct check_options *o, struct error *err) {
    char *working_dir = realpath(".", NULL);
    if (!working_dir) return error_errno(err, "the working folder");
    int rc = resolve_program(c, working_dir, err);
    bool is_exposed = !path_access_hook && may_expose_folder(working_dir),
         names_file = allow_argv_files(c, working_dir);
    if (is_exposed)
        strings_add(&c->read, working_dir);
    else if (!rc && !path_access_hook)
        log_info("%s commands can read only those files of '%s' that they name; --%s-read adds "
                 "more",
                 c->label, working_dir, c->label);
    c->dir = xstrdup(is_exposed || names_file ? working_dir : "/tmp");
    strings_add_all(&c->read, &o->read);
    strings_add_all(&c->write, &o->write);
    free(working_dir);
    return rc ? rc : sandbox_paths_check(c, err);
}

/* opening */

int command_sandbox_check(const char *remedy, struct error *err) {
    struct error why;
    int rc = sandbox_available(&why);
    return rc ? error_set(err, rc, "%.1900s%s", why.text, remedy) : OK;
}

static void command_free(void *state) {
    struct command *c = state;
    if (!c) return;
    strings_release(&c->argv);
    strings_release(&c->read);
    strings_release(&c->write);
    free(c->dir);
    free(c);
}

/* Whether the command can run here, and the files that it sees. */
static int command_prepare(struct command *c, const struct check_options *o, struct error *err) {
    int rc = (c->sandbox && !c->network ? sandbox_command_check : sandbox_bypass_check)(err);
    if (rc || !c->sandbox) return rc;
    char *remedy =
        xasprintf("; --no-%s-sandbox runs %s commands without a sandbox", c->label, c->label);
    rc = command_sandbox_check(remedy, err);
    free(remedy);
    return rc ? rc : sandbox_paths_make(c, o, err);
}

static struct command *command_new(struct check *check, const struct check_options *o) {
    struct command *c = check->state = xcalloc(1, sizeof *c);
    c->label = check->label;
    c->timeout = o->timeout > 0 ? o->timeout : 60;
    c->sandbox = o->sandbox;
    c->network = o->network;
    return c;
}

static int command_open(struct check *check, const char *argument, const struct check_options *o,
                        struct error *err) {
    struct command *c = command_new(check, o);
    int rc = OK;
    if (!strings_add_words(&c->argv, argument))
        rc = error_set(err, ERR_USAGE, "command '%s' has an unclosed quote", argument);
    else if (!c->argv.n)
        rc = error_set(err, ERR_USAGE, "the %s's command is empty", c->label);
    return rc ? rc : command_prepare(c, o, err);
}

static int shell_open(struct check *check, const char *argument, const struct check_options *o,
                      struct error *err) {
    struct command *c = command_new(check, o);
    strings_add(&c->argv, "/bin/sh");
    strings_add(&c->argv, "-c");
    strings_add(&c->argv, argument);
    return command_prepare(c, o, err);
}

const struct check_kind command_check = {.name = "command",
                                         .usage = "command:WORDS",
                                         .argument = ARGUMENT_REQUIRED,
                                         .open = command_open,
                                         .run_all = command_run,
                                         .free = command_free};

const struct check_kind shell_check = {.name = "shell",
                                       .usage = "shell:LINE",
                                       .argument = ARGUMENT_REQUIRED,
                                       .open = shell_open,
                                       .run_all = command_run,
                                       .free = command_free};
