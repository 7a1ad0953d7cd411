/*
 * sandbox: running a command that is not trusted, confining this process, refusing commands.
 *
 * A sandboxed command is run by bubblewrap (`bwrap`, looked up in PATH) in namespaces of its own
 * (user, PID, mount, IPC, UTS, cgroup, network), with all that it starts killed as a whole. It
 * sees /usr and what the loader, fonts and locales need of /etc, all read-only; a private /proc and
 * /dev; an empty /tmp of bounded size; and the folders that the caller names. It has no network, no
 * capabilities that reach outside, no terminal, no descriptor but 0, 1 and 2, and an environment
 * built from nothing: PATH, LANG, HOME=/tmp and what the caller names. On x86_64 and aarch64 a
 * seccomp filter denies system calls that such programs do not need (ptrace, mount, bpf, keyctl,
 * io_uring, new user namespaces and the like). Where bwrap cannot be run, so is the command not:
 * there is no fallback without a sandbox.
 *
 * The tree ends when the command ends, when its time is over, when sandbox_kill is called, and when
 * this process dies in any way (also by kill -9, at any moment). After sandbox_run, sandbox_wait
 * that returned OK, or sandbox_free no process of it is left.
 *
 * Run by root, a command has a user id of its own that is none of the machine's accounts: root's id
 * has no limit of processes. It may do with the files that it is shown what root may; files that it
 * makes in folders of `write` belong to that id.
 *
 * What the limits do not bound: `memory` is per process, so a tree may use `processes` times as
 * much, and a file in memory (memfd) counts for `file_size` only; CPU time is per process too; the
 * number of files in /tmp is bounded by the machine's memory alone. With the memory of several
 * processes or of many files a command can press the machine until `seconds` are over.
 *
 * Threads. Every function may be called from any thread; a `struct sandbox` is used by one thread
 * at a time, except for sandbox_kill. The caller's thread may end before the command does.
 * sandbox_confine is called while the process has one thread. After fork(), a child does not use
 * the parent's sandboxes.
 *
 * Ownership. A spec and all that it points to is borrowed during the call. Results are released by
 * the caller.
 */
#ifndef SHOAL_SANDBOX_H
#define SHOAL_SANDBOX_H

#include "base/base.h"

#include <sys/types.h>

/* commands */

/* A field of 0 is its default. */
struct sandbox_limits {
    double seconds;     /* 60 of wall time; INFINITY for servers that run until they are killed */
    double cpu_seconds; /* of each process, rounded up; no limit */
    size_t memory;      /* 4 GiB of address space of each process; SIZE_MAX: no limit */
    size_t file_size;   /* 256 MiB: of each file that is written */
    size_t tmp_size;    /* 256 MiB: of all files in /tmp, and again of those in /dev/shm */
    size_t output;      /* 1 MiB: of standard output, and again of standard error */
    int processes;      /* 64 processes and threads, two of which are bwrap's */
    int files;          /* 256 open descriptors of each process */
};

struct sandbox_spec {
    const struct strings *argv; /* argv[0]: a path, or a name in /usr/local/bin, /usr/bin, /bin */
    /* Folders or files, which keep their paths. The deeper path decides where one is in another; of
     * equal paths `write` does. Sockets in them can be connected to. `/`, `/tmp` and what is in
     * /proc, /sys or /dev cannot be named. NULL: none. */
    const struct strings *read, *write;
    const struct strings *env; /* "NAME=VALUE"; may replace PATH, LANG and HOME. NULL: none */
    const char *dir;           /* where it begins, in a folder that it can see; NULL: /tmp */
    /* The network of this machine, abstract sockets and 127.0.0.1 included. */
    bool network;
    /* Standard input: these bytes, which are copied, or with input = NULL the descriptor `in` - 0
     * is not one and means nothing to read. Of sandbox_start see there. */
    const void *input;
    size_t input_len;
    int in;
    struct sandbox_limits limits;
};

enum sandbox_exit_reason {
    SANDBOX_EXITED,       /* `status` is its exit code, or 128 + the signal that killed it */
    SANDBOX_TIMED_OUT,    /* killed: limits.seconds were over */
    SANDBOX_OUTPUT_LIMIT, /* killed: it wrote more than limits.output */
    SANDBOX_KILLED,       /* by sandbox_kill or sandbox_free */
};

struct sandbox_result {
    enum sandbox_exit_reason end;
    int status;           /* of SANDBOX_EXITED, else -1 */
    double seconds;       /* it took, the sandbox's own time included */
    struct buf out, errs; /* what it wrote; not cleaned of control characters */
};

/* Whether commands can be run in a sandbox here, found out by running one: OK, or ERR_STATE or
 * ERR_MISSING with the reason and the remedy. Costs as much as a run. */
int sandbox_available(struct error *err);
/* "bubblewrap 0.8.0"; NULL and `err` where there is none. malloc'ed. */
char *sandbox_version(struct error *err);

/* The first executable file of this name in absolute folders, as in PATH ("A:B"; NULL: none).
 * malloc'ed, or NULL. */
char *sandbox_program_find(const char *folders, const char *name);

/* Runs a command to its end, whichever that is (`out->end`): OK. Else nothing of the command was
 * run, and `out` is empty: ERR_STATE (commands are forbidden; bwrap cannot make a sandbox),
 * ERR_MISSING (no bwrap; a program or folder that does not exist), ERR_USAGE, ERR_IO. */
int sandbox_run(const struct sandbox_spec *spec, struct sandbox_result *out, struct error *err);
void sandbox_result_release(struct sandbox_result *r);
/* Why a result is no success, for an error message: "it ended with exit code 3", "it did not end in
 * 60 seconds". NULL: it ended with 0. The text is valid until the thread's next call. */
const char *sandbox_failure(const struct sandbox_result *r, const struct sandbox_limits *limits);

/*
 * The same for a conversation. Without `input` and `in`, standard input is a pipe for
 * sandbox_write. Standard output is read by the caller and is not bounded in all; of standard error
 * the first limits.output bytes are kept and the rest is thrown away. limits.seconds holds
 * here too, without any call.
 */
struct sandbox;
struct sandbox *sandbox_start(const struct sandbox_spec *spec, struct error *err);
/* Writes all n bytes: OK, or ERR_STATE after so many seconds, or when it reads no more. */
int sandbox_write(struct sandbox *s, const void *p, size_t n, double seconds, struct error *err);
void sandbox_close_input(struct sandbox *s); /* it reads its end of file */
/* Up to `n` bytes as soon as there are any; 0 at the end; ERR_STATE: nothing came in so many
 * seconds. */
ssize_t sandbox_read(struct sandbox *s, void *p, size_t n, double seconds, struct error *err);
/* For poll(): the non-blocking ends of the pipes; -1: there is none. */
int sandbox_input_fd(const struct sandbox *s);
int sandbox_output_fd(const struct sandbox *s);
/* OK: it has ended, and `out` (may be NULL) is how, with `errs` and without `out`. ERR_STATE: not
 * in so many seconds. */
int sandbox_wait(struct sandbox *s, double seconds, struct sandbox_result *out, struct error *err);
void sandbox_kill(struct sandbox *s); /* the whole tree; does not wait */
void sandbox_free(struct sandbox *s); /* kills, waits, releases; NULL is nothing */

/* this process */

/*
 * From now on no command is run in this process: sandbox_run, sandbox_start and whatever else asks
 * sandbox_command_check fail with ERR_STATE and `why` ("commands are not run in a job: …"). Cannot
 * be taken back; the first reason stays.
 */
void sandbox_forbid_commands(const char *why);
/* From now on commands of this process run in a sandbox without the network only:
 * sandbox_bypass_check, sandbox_run and sandbox_start with `network` fail with ERR_STATE and `why`.
 * Cannot be taken back; the first reason stays. */
void sandbox_require_isolation(const char *why);
/* To be asked before a program is started outside of the sandbox, as sandbox_command_check. */
int sandbox_bypass_check(struct error *err);
/* To be asked before any program is started or any plugin is loaded that a user, a file or a
 * request names. */
int sandbox_command_check(struct error *err);

/*
 * Confines this process, and all that it starts, with landlock: below `read` files may be read and
 * executed, below `write` anything may be done; what is named may be a file. What the system's
 * libraries need is readable without being named (/usr, /lib*, /bin, parts of /etc, /proc,
 * /sys/devices/system/cpu, and /dev/null, zero, full, random and urandom also writable). Where the
 * kernel's landlock has it: no truncation elsewhere (ABI 3), no TCP connect or bind (4), no ioctl
 * of devices (5), no signals to processes and no connections to abstract sockets outside (6).
 * Descriptors that are open stay usable. Names that do not exist are an error (ERR_MISSING).
 *
 * Landlock does not judge stat, chdir, chmod, chown, utime, extended attributes and sockets that
 * are files: the process's user decides there, as before.
 *
 * Cannot be taken back; it sets no_new_privs, and of root's capabilities only those about files
 * are left. ERR_STATE: the kernel has no landlock, or the process
 * has several threads, and nothing has changed. A confined process cannot mount, so it cannot run
 * commands in a sandbox: those fail with ERR_STATE.
 */
int sandbox_confine(const struct strings *read, const struct strings *write, struct error *err);
int sandbox_landlock_abi(void); /* 0: the kernel has none */

#endif
