/*
 * sandbox: runs untrusted commands, forbids commands in this process, and confines this process.
 *
 * bubblewrap (`bwrap`, looked up in PATH) runs a command in new namespaces (user, PID, mount, IPC,
 * UTS, cgroup, network); the command and everything that it starts are killed together. The command
 * sees /usr and those files of /etc that the loader, fonts and locales need, all read-only; a
 * private /proc and /dev; an empty /tmp of bounded size; and the folders that the caller names. It
 * has no network, no capabilities that reach outside, no terminal, and no descriptors except 0, 1
 * and 2. Its environment has only PATH, LANG, HOME=/tmp and the variables that the caller names. On
 * x86_64 and aarch64 a seccomp filter denies system calls that such programs do not need (ptrace,
 * mount, bpf, keyctl, io_uring, new user namespaces and the like). If bwrap cannot run, the command
 * does not run: there is no fallback without a sandbox.
 *
 * The command and everything that it starts are one process tree. The tree is killed when the
 * command ends, when its time is over, when sandbox_kill is called, and when this process dies in
 * any way (also by kill -9, at any moment). After sandbox_run, sandbox_free, or a sandbox_wait that
 * returned OK, no process of the tree is left.
 *
 * Under root a command runs with a user id that belongs to no account of the machine, since root's
 * id has no process limit. It can access the files that are shown to it as root can. Files that it
 * creates in folders of `write` belong to the command's user id.
 *
 * The limits leave this open: `memory` is per process, so a tree may use `processes` times as much,
 * and an in-memory file (memfd) counts for `file_size` only. `cpu_seconds` is per process too. The
 * number of files in /tmp is bounded by the machine's memory only. With several processes or many
 * files a command can put the machine under memory pressure until `seconds` are over.
 *
 * Threads. Every function may be called from any thread; a `struct sandbox` is used by one thread
 * at a time, except for sandbox_kill. The caller's thread may end before the command does.
 * sandbox_confine is called while the process has one thread. After fork(), a child does not use
 * the parent's sandboxes.
 *
 * Ownership. A spec and everything it points to is borrowed during the call. The caller releases
 * results.
 */
#ifndef SHOAL_SANDBOX_H
#define SHOAL_SANDBOX_H

#include "base/base.h"

#include <sys/types.h>

/* commands */

/* A field of 0 selects its default, which is the value at the beginning of its comment. */
struct sandbox_limits {
    double seconds;     /* 60 of wall time; INFINITY for servers that run until they are killed */
    double cpu_seconds; /* no limit; otherwise per process, rounded up to whole seconds */
    size_t memory;      /* 4 GiB of address space per process; SIZE_MAX: no limit */
    size_t file_size;   /* 256 MiB for each file that is written */
    size_t tmp_size;    /* 256 MiB for all files in /tmp, and again for those in /dev/shm */
    size_t output;      /* 1 MiB for standard output, and again for standard error */
    int processes;      /* 64 processes and threads, two of which are bwrap's */
    int open_files;     /* 256 open descriptors per process */
};

struct sandbox_spec {
    const struct strings *argv; /* argv[0]: a path, or a name that is found in PATH (of `env`, else
                                   /usr/local/bin:/usr/bin:/bin) */
    /* Folders or files that the command sees under the same paths, read-only or writable. For a
     * file below several of them the deepest one decides; for a path in both lists `write` does.
     * Sockets in them can be connected to. `/`, `/tmp` and paths in /proc, /sys or /dev are
     * refused. NULL: none. */
    const struct strings *read, *write;
    const struct strings *env; /* "NAME=VALUE"; may replace PATH, LANG and HOME. NULL: none */
    const char *dir;           /* working directory, visible to the command; NULL: /tmp */
    /* The command may use the network of this machine, including abstract sockets and 127.0.0.1. */
    bool network;
    /* Standard input: the bytes of `input`, which are copied. If `input` is NULL: the descriptor
     * `input_fd`. If both are 0: nothing in sandbox_run, a pipe in sandbox_start. */
    const void *input;
    size_t input_len;
    int input_fd;
    struct sandbox_limits limits;
};

enum sandbox_exit_reason {
    SANDBOX_EXITED, /* the command ended; `status` is its exit code, or 128 + the signal that killed
                       it */
    SANDBOX_TIMED_OUT,    /* killed: limits.seconds passed */
    SANDBOX_OUTPUT_LIMIT, /* killed: it wrote more than limits.output to stdout or stderr
                             (sandbox_run only) */
    SANDBOX_KILLED,       /* killed by sandbox_kill or sandbox_free */
};

struct sandbox_result {
    enum sandbox_exit_reason exit_reason;
    int status;                   /* exit status if SANDBOX_EXITED, else -1 */
    double seconds;               /* duration, including the start of the sandbox */
    struct buf out, error_output; /* stdout and stderr; control characters are not removed */
};

/* Runs a command to find out whether commands can be run in a sandbox here: OK, or ERR_STATE or
 * ERR_MISSING with the reason and the remedy. */
int sandbox_available(struct error *err);
/* "bubblewrap 0.8.0", malloc'ed; NULL and `err` if it is not installed or cannot run. */
char *sandbox_version(struct error *err);

/* The path of the first executable file of this name in the absolute folders of a list like PATH
 * ("A:B"), malloc'ed. NULL: there is no such file, or `folders` is NULL. */
char *sandbox_program_find(const char *folders, const char *name);

/* Runs a command until it ends, and returns OK for any kind of end (`out->exit_reason`). Otherwise
 * nothing of the command was run, and `out` is empty: ERR_STATE (commands are forbidden; bwrap
 * cannot make a sandbox), ERR_MISSING (no bwrap; a program or folder that does not exist),
 * ERR_USAGE, ERR_IO. */
int sandbox_run(const struct sandbox_spec *spec, struct sandbox_result *out, struct error *err);
void sandbox_result_release(struct sandbox_result *r);
/* The failure of a run, for an error message: "it failed with status 3", "it did not end in time
 * (60 seconds)". NULL if it exited with 0. The text is valid until the thread's next call. */
const char *sandbox_failure(const struct sandbox_result *r, const struct sandbox_limits *limits);

/*
 * Interactive commands. Without `input` and `input_fd`, standard input is a pipe for sandbox_write.
 * The caller reads standard output, whose total is not bounded. The first limits.output bytes of
 * standard error are kept and the rest is discarded. When limits.seconds have passed the tree is
 * killed, even if the caller calls no function.
 */
struct sandbox;
struct sandbox *sandbox_start(const struct sandbox_spec *spec, struct error *err);
/* Writes all n bytes: OK, or ERR_STATE if the command does not read for `seconds` or has closed its
 * input. */
int sandbox_write(struct sandbox *s, const void *p, size_t n, double seconds, struct error *err);
void sandbox_close_input(struct sandbox *s); /* the command then reads end of file */
/* Reads up to `n` bytes of standard output as soon as any are available. Returns their number, 0 at
 * the end of the output, or ERR_STATE if none arrive within `seconds`. */
ssize_t sandbox_read(struct sandbox *s, void *p, size_t n, double seconds, struct error *err);
/* The caller's ends of the pipes of standard input and output, for poll(). They do not block. -1:
 * not open. */
int sandbox_input_fd(const struct sandbox *s);
int sandbox_output_fd(const struct sandbox *s);
/* OK: the command has ended; *out (may be NULL) gets the result, whose member `out` is empty
 * because sandbox_read returned the standard output. ERR_STATE: it has not ended within `seconds`.
 */
int sandbox_wait(struct sandbox *s, double seconds, struct sandbox_result *out, struct error *err);
void sandbox_kill(struct sandbox *s); /* kills the whole tree; does not wait */
void sandbox_free(struct sandbox *s); /* kills, waits, releases; NULL is allowed */

/* this process */

/*
 * Forbids commands in this process: from now on sandbox_run, sandbox_start and all other callers of
 * sandbox_command_check fail with ERR_STATE and `why` ("commands are not run in a job: …"). Cannot
 * be undone; the first reason is kept.
 */
void sandbox_forbid_commands(const char *why);
/* From now on commands of this process may only run in a sandbox without network:
 * sandbox_bypass_check, and sandbox_run and sandbox_start with `network`, fail with ERR_STATE and
 * `why`. Cannot be undone; the first reason is kept. */
void sandbox_require_isolation(const char *why);
/* To be called, in place of sandbox_command_check, before a program is started outside of the
 * sandbox. ERR_STATE if commands are forbidden or must be isolated. */
int sandbox_bypass_check(struct error *err);
/* To be called before a program is started or a plugin is loaded that a user, a file or a request
 * names. ERR_STATE if commands are forbidden. */
int sandbox_command_check(struct error *err);

/*
 * Confines this process, and everything that it starts, with landlock. Files below `read` may be
 * read and executed. Below `write` everything is allowed except ioctl of devices. Both lists may
 * name files and folders. The files that the system's libraries need are readable without being
 * named (/usr, /lib*, /bin, /sbin, parts of /etc, /proc, /sys/devices/system/cpu, /sys/fs/cgroup;
 * /dev/null, zero, full, random and urandom are also writable). The kernel's version of landlock
 * decides which of these are denied: truncation of other files (from ABI 3), TCP connect and bind
 * (4), ioctl of devices (5), signals to processes outside and connections to abstract sockets
 * outside (6). Open descriptors stay usable. A name that does not exist is an error (ERR_MISSING).
 *
 * Landlock does not control stat, chdir, chmod, chown, utime, extended attributes and connections
 * to Unix sockets in the file system: only the permissions of the process's user limit these.
 *
 * Cannot be undone. It sets no_new_privs, and keeps only those of root's capabilities that concern
 * files. ERR_STATE, without any change, if the kernel has no landlock or the process has several
 * threads. A confined process cannot mount, so sandbox_run and sandbox_start fail with ERR_STATE in
 * it.
 */
int sandbox_confine(const struct strings *read, const struct strings *write, struct error *err);
int sandbox_landlock_abi(void); /* 0: the kernel has no landlock */

#endif
