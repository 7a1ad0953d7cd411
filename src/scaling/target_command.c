/*
 * target_command: a command of the user, which gets the number of nodes as its last argument.
 *
 * It changes things outside of this process, so it does not run in a sandbox; only the command
 * line or a file that it names can choose it. It runs without a shell.
 */
#define _GNU_SOURCE
#include "sandbox/sandbox.h"
#include "scaling/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COMMAND_SECONDS = 120, WAIT_MICROSECONDS = 20000 };

struct command {
    struct strings words;
    int nodes; /* number of the last successful run */
};

static void child_run(char **argv) {
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const int fds[] = {null, STDERR_FILENO, STDERR_FILENO};
    setpgid(0, 0);
    if (null >= 0 && fds_remap(fds, 3)) execvp(argv[0], argv);
    _exit(127);
}

/* Waits for the end; the whole process group is killed after COMMAND_SECONDS. */
static int child_wait(pid_t pid, const char *name, struct error *err) {
    double until = clock_now() + COMMAND_SECONDS;
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        usleep(WAIT_MICROSECONDS);
        if (clock_now() < until) continue;
        kill(-pid, SIGKILL);
        waitpid(pid, &status, 0);
        return error_set(err, ERR_IO, "'%s' did not end in %d s", name, COMMAND_SECONDS);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return OK;
    return error_set(err, ERR_IO, "'%s' failed with status %d", name,
                     WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

static int command_set(void *state, int n, struct error *err) {
    struct command *c = state;
    if (sandbox_bypass_check(err) != OK) return err->code;
    char **argv = xcalloc((size_t)c->words.n + 2, sizeof *argv), number[16];
    snprintf(number, sizeof number, "%d", n);
    memcpy(argv, c->words.v, sizeof *argv * (size_t)c->words.n);
    argv[c->words.n] = number;
    pid_t pid = fork();
    if (pid == 0) child_run(argv);
    int rc =
        pid < 0 ? error_errno(err, "cannot start '%s'", argv[0]) : child_wait(pid, argv[0], err);
    free(argv);
    if (rc == OK) c->nodes = n;
    return rc;
}

static void command_close(void *state) {
    struct command *c = state;
    strings_release(&c->words);
    free(c);
}

static void *command_open(const struct target_options *o, int min_nodes, struct error *err) {
    struct command *c = xcalloc(1, sizeof *c);
    if (!o->command || !strings_add_words(&c->words, o->command) || !c->words.n)
        error_set(err, ERR_USAGE, "--command: expected a program with its arguments");
    else if (command_set(c, min_nodes, err) == OK)
        return c;
    command_close(c);
    return NULL;
}

static int command_nodes(void *state, int *n, struct error *err) {
    (void)err;
    *n = ((struct command *)state)->nodes;
    return OK;
}

const struct target_kind target_command = {.name = "command",
                                           .open = command_open,
                                           .nodes = command_nodes,
                                           .set = command_set,
                                           .close = command_close};
