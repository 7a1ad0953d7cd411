/*
 * test_sandbox: programs that try to escape, to outlive the sandbox, or to exceed its limits.
 *
 * Each attempt runs in the sandbox; the test checks its effect from outside, or the program's
 * output if only the program can observe it. Attempts that need system calls are this program, run
 * as 'attempt NAME'. Each attempt that must fail also runs where it is allowed and must succeed
 * there. Without bubblewrap, or without landlock, their tests are skipped with the reason.
 */
/* levels: once */
#define _GNU_SOURCE
#include "sandbox/sandbox.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char self[4096];
static char scratch[64], secret[96], read_dir[96],
    writable[96];           /* folders; no spec names `secret` */
static char unique_arg[32]; /* an argument of sleep that is unique to this run */
static bool available;
static char unavailable_reason[256];

/* the program in the sandbox */

static bool attempt_succeeds(const char *name, const char *argument) {
    char stack[4096] __attribute__((aligned(16)));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint64_t clone3_args[11] = {CLONE_NEWUSER, 0, 0, 0, SIGCHLD};
    int pid;
    (void)stack;
    if (!strcmp(name, "connect")) {
        at.sin_port = htons((uint16_t)atoi(argument));
        return connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&at, sizeof at) == 0;
    }
    if (!strcmp(name, "kill")) return kill(atoi(argument), SIGKILL) == 0;
    if (!strcmp(name, "read")) return open(argument, O_RDONLY) >= 0;
    if (!strcmp(name, "write")) return open(argument, O_WRONLY | O_CREAT, 0600) >= 0;
    if (!strcmp(name, "descriptor")) return fcntl(atoi(argument), F_GETFD) >= 0;
    if (!strcmp(name, "mount")) return mount("none", "/tmp", "tmpfs", 0, NULL) == 0;
    if (!strcmp(name, "remount")) return mount(NULL, "/usr", NULL, MS_REMOUNT | MS_BIND, NULL) == 0;
    if (!strcmp(name, "umount")) return umount2("/proc", MNT_DETACH) == 0;
    if (!strcmp(name, "unshare")) return unshare(CLONE_NEWUSER) == 0;
    if (!strcmp(name, "clone")) {
        pid = (int)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL);
        if (pid == 0) _exit(0);
        return pid > 0;
    }
    if (!strcmp(name, "clone3")) {
        pid = (int)syscall(SYS_clone3, clone3_args, sizeof clone3_args);
        if (pid == 0) _exit(0);
        return pid > 0;
    }
    if (!strcmp(name, "chroot")) return chroot("/tmp") == 0;
    if (!strcmp(name, "ptrace")) {
        if ((pid = fork()) == 0) pause();
        bool did = ptrace(PTRACE_ATTACH, pid, NULL, NULL) == 0;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return did;
    }
    if (!strcmp(name, "keyctl")) return syscall(SYS_keyctl, 0, -3, 0, 0, 0) >= 0;
    if (!strcmp(name, "bpf")) {
        union bpf_attr attr = {.map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 4};
        attr.max_entries = 1;
        return syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof attr) >= 0;
    }
    if (!strcmp(name, "perf")) {
        struct perf_event_attr attr = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attr};
        attr.exclude_kernel = 1;
        return syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0) >= 0;
    }
    if (!strcmp(name, "userfaultfd")) return syscall(SYS_userfaultfd, 1) >= 0;
    if (!strcmp(name, "io_uring")) {
        uint32_t params[30] = {0};
        return syscall(425, 1, params) >= 0;
    }
    if (!strcmp(name, "shmget")) return shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600) >= 0;
    if (!strcmp(name, "tiocsti")) return ioctl(STDIN_FILENO, TIOCSTI, "x") == 0;
    if (!strcmp(name, "tty")) return open("/dev/tty", O_RDWR) >= 0;
    if (!strcmp(name, "sethostname")) return sethostname("out", 3) == 0;
    return false;
}

/* Forks until it fails, and prints the number of forks. */
static int fork_bomb(void) {
    int n = 0;
    for (pid_t pid; n < 2000 && (pid = fork()) >= 0; n++)
        if (pid == 0) pause();
    printf("%d\n", n);
    fflush(stdout);
    return 0;
}

/* Writes files until a write fails, and prints the number of MiB written. */
static int fill_disk(const char *path) {
    static char block[1 << 20];
    int n = 0;
    for (int file = 0; file < 64; file++) {
        char *name = xasprintf("%s/%d", path, file);
        int fd = open(name, O_WRONLY | O_CREAT, 0600);
        for (int i = 0; i < 8 && write(fd, block, sizeof block) == sizeof block; i++) n++;
        free(name);
        close(fd);
    }
    printf("%d\n", n);
    fflush(stdout);
    return 0;
}

static int attempt(const char *name, const char *argument) {
    if (!strcmp(name, "forks")) return fork_bomb();
    if (!strcmp(name, "fill")) return fill_disk(argument);
    return attempt_succeeds(name, argument) ? 0 : 9;
}

/* running commands */

static int run(struct sandbox_spec *spec, struct sandbox_result *r, char **words, int n) {
    const struct strings argv = {words, n};
    spec->argv = &argv;
    int rc = sandbox_run(spec, r, &err);
    if (rc == OK) buf_add(&r->out, "", 1), r->out.len--;
    return rc;
}

static void run_shell(struct sandbox_spec spec, struct sandbox_result *r, const char *line) {
    char *words[] = {"/bin/sh", "-c", (char *)(uintptr_t)line};
    if (run(&spec, r, words, 3) != OK) fail_msg("%s: %s", line, err.text);
}

/* The exit code of a shell command, or -1. */
static int shell_status_with(struct sandbox_spec spec, const char *line) {
    struct sandbox_result r;
    run_shell(spec, &r, line);
    int status = r.exit_reason == SANDBOX_EXITED ? r.status : -1;
    sandbox_result_release(&r);
    return status;
}

static int shell_status(const char *line) {
    return shell_status_with((struct sandbox_spec){0}, line);
}

/* Runs this program in the sandbox; `out` is its output (may be NULL). Under the address sanitizer
 * it reserves more memory than the default limit. */
static int attempt_status(struct sandbox_spec spec, const char *name, const char *argument,
                          struct buf *out) {
    char *words[] = {self, "attempt", (char *)(uintptr_t)name, (char *)(uintptr_t)argument};
    struct strings read = {0};
    struct sandbox_result r;
    strings_add(&read, self);
    for (int i = 0; spec.read && i < spec.read->n; i++) strings_add(&read, spec.read->v[i]);
    spec.read = &read;
    spec.limits.memory = SIZE_MAX;
    if (run(&spec, &r, words, 4) != OK) fail_msg("%s: %s", name, err.text);
    int status = r.exit_reason == SANDBOX_EXITED ? r.status : -1;
    if (out) buf_add(out, r.out.data, r.out.len + 1);
    sandbox_result_release(&r);
    strings_release(&read);
    return status;
}

/* Number of processes on this machine with `word` in their arguments. */
static int count_processes(const char *word) {
    DIR *d = opendir("/proc");
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d));) {
        char *path = xasprintf("/proc/%s/cmdline", e->d_name);
        struct buf b = {0};
        struct error ignored;
        if (atoi(e->d_name) > 0 && file_read(path, 1 << 20, &b, &ignored) == OK && b.len)
            n += memmem(b.data, b.len, word, strlen(word)) != NULL;
        buf_release(&b);
        free(path);
    }
    if (d) closedir(d);
    return n;
}

/* Waits until all processes with `word` in their arguments have ended. */
static bool wait_processes_end(const char *word) {
    for (double until = clock_now() + 30; clock_now() < until; usleep(5000))
        if (count_processes(word) == 0) return true;
    return false;
}

static bool wait_file_exists(const char *path) {
    for (double until = clock_now() + 30; clock_now() < until; usleep(5000))
        if (path_exists(path)) return true;
    return false;
}

static int count_entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static char *format_line(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static char *format_line(const char *fmt, ...) {
    static char lines[8][512];
    static int at;
    va_list ap;
    char *line = lines[at++ % 8];
    va_start(ap, fmt);
    vsnprintf(line, sizeof lines[0], fmt, ap);
    va_end(ap);
    return line;
}

static void file_create(const char *folder, const char *name, const char *text) {
    char *path = path_join(folder, name);
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    free(path);
}

static int set_up(void **state) {
    (void)state;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    snprintf(scratch, sizeof scratch, "/tmp/shoal-test-sandbox-XXXXXX");
    assert_non_null(mkdtemp(scratch));
    snprintf(secret, sizeof secret, "%s/secret", scratch);
    snprintf(read_dir, sizeof read_dir, "%s/shown", scratch);
    snprintf(writable, sizeof writable, "%s/writable", scratch);
    snprintf(unique_arg, sizeof unique_arg, "987.%d", (int)getpid());
    mkdir(secret, 0700), mkdir(read_dir, 0755), mkdir(writable, 0755);
    file_create(secret, "a", "secret");
    file_create(read_dir, "a", "shown");
    file_create(writable, "a", "writable");
    available = sandbox_available(&err) == OK;
    snprintf(unavailable_reason, sizeof unavailable_reason, "%.200s", err.text);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    const char *const folders[] = {secret, read_dir, writable, scratch};
    for (size_t i = 0; i < ARRAY_LEN(folders); i++) dir_delete(folders[i]);
    return 0;
}

static void skip_without_sandbox(void) {
    if (available) return;
    print_message("# skipped: %s\n", unavailable_reason);
    skip();
}

/* Paths of the spec: a folder to read and one to write. */
static char *read_list[] = {read_dir}, *writable_list[] = {writable};
static const struct strings read_one = {read_list, 1}, writable_one = {writable_list, 1};
static struct sandbox_spec spec_with_folders(void) {
    return (struct sandbox_spec){.read = &read_one, .write = &writable_one};
}

/* files */

static void test_files(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_spec s = spec_with_folders();
    char *here = realpath(".", NULL);
    assert_int_equal(shell_status_with(s, format_line("cat %s/a", read_dir)), 0);
    assert_int_equal(shell_status_with(s, format_line("echo 1 >%s/b", writable)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("cat %s/a", secret)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("echo 1 >%s/b", read_dir)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("echo 1 >>%s/a", read_dir)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("rm %s/a", read_dir)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("chmod 777 %s/a", read_dir)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("test -e '%s'", here)), 0);
    assert_int_not_equal(shell_status_with(s, "test -e /etc/shadow"), 0);
    assert_int_not_equal(shell_status_with(s, "test -e /root"), 0);
    assert_int_not_equal(shell_status_with(s, "test -e /sys"), 0);
    static const char *const fixed[] = {"/",    "/usr", "/usr/bin", "/etc",
                                        "/dev", "/var", "/proc",    "/proc/sys/kernel"};
    for (size_t i = 0; i < ARRAY_LEN(fixed); i++)
        if (shell_status_with(s, format_line("echo 1 >%s/shoal-test", fixed[i])) == 0)
            fail_msg("%s", fixed[i]);
    assert_int_not_equal(shell_status("echo '|/bin/true' >/proc/sys/kernel/core_pattern"), 0);
    assert_int_not_equal(shell_status("echo 1 >/proc/sys/vm/drop_caches"), 0);
    assert_int_not_equal(shell_status("echo h >/proc/sysrq-trigger"), 0);
    assert_int_equal(shell_status("echo 1 >/tmp/a && cp /tmp/a /dev/shm && rm /tmp/a"), 0);
    free(here);
}

/* The deepest path decides, in any order of the list. */
static void test_nested_folders(void **state) {
    (void)state;
    skip_without_sandbox();
    char *inner = path_join(writable, "inner");
    char *tops[] = {scratch}, *inners[] = {inner};
    const struct strings a = {tops, 1}, b = {inners, 1};
    mkdir(inner, 0755);
    struct sandbox_spec in_read = {.read = &a, .write = &writable_one};
    assert_int_equal(
        shell_status_with(in_read, format_line("cat %s/a && echo 1 >%s/c", secret, writable)), 0);
    assert_int_not_equal(shell_status_with(in_read, format_line("echo 1 >%s/c", read_dir)), 0);
    struct sandbox_spec in_write = {.write = &writable_one, .read = &b};
    assert_int_equal(shell_status_with(in_write, format_line("echo 1 >%s/c", writable)), 0);
    assert_int_not_equal(shell_status_with(in_write, format_line("echo 1 >%s/c", inner)), 0);
    dir_delete(inner);
    free(inner);
}

static void test_links(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_spec s = spec_with_folders();
    char *link = path_join(writable, "link"), *real = path_join(scratch, "elsewhere");
    /* existing links, and links that it creates */
    assert_int_equal(symlink(secret, link), 0);
    assert_int_not_equal(shell_status_with(s, format_line("cat %s/a", link)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("echo 1 >%s/b", link)), 0);
    unlink(link);
    assert_int_not_equal(
        shell_status_with(s, format_line("ln -s %s/a %s && cat %s", secret, link, link)), 0);
    unlink(link);
    assert_int_not_equal(
        shell_status_with(s, format_line("ln -s %s/a %s && echo 1 >>%s", read_dir, link, link)), 0);
    unlink(link);
    assert_int_not_equal(shell_status_with(s, format_line("ln %s/a %s", read_dir, link)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("cat /proc/1/root%s/a", secret)), 0);
    assert_int_not_equal(shell_status_with(s, format_line("cat %s/../secret/a", writable)), 0);
    /* a folder that is given as a link exists under both names */
    assert_int_equal(symlink(read_dir, real), 0);
    char *names[] = {real};
    const struct strings through = {names, 1};
    struct sandbox_spec t = {.read = &through};
    assert_int_equal(shell_status_with(t, format_line("cat %s/a %s/a", real, read_dir)), 0);
    unlink(real);
    free(link);
    free(real);
}

static void test_sizes(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_spec s = {.limits = {.tmp_size = 16 << 20, .file_size = 4 << 20}};
    const char *const folders[] = {"/tmp", "/dev/shm"};
    for (size_t i = 0; i < ARRAY_LEN(folders); i++) {
        struct buf out = {0};
        signal(SIGXFSZ, SIG_DFL);
        s.limits.file_size = 0;
        assert_int_equal(attempt_status(s, "fill", folders[i], &out), 0);
        assert_in_range(atoi(out.data), 8, 16);
        buf_release(&out);
    }
    s.limits.file_size = 4 << 20;
    assert_int_equal(shell_status_with(s, "head -c 3000000 /dev/zero >/tmp/a"), 0);
    assert_int_not_equal(shell_status_with(s, "head -c 6000000 /dev/zero >/tmp/a"), 0);
}

/* the outside */

static void test_network(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (void *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_int_equal(getsockname(fd, (void *)&at, &size), 0);
    const char *port = format_line("%d", ntohs(at.sin_port));
    assert_int_equal(attempt_status((struct sandbox_spec){0}, "connect", port, NULL), 9);
    assert_int_equal(attempt_status((struct sandbox_spec){.network = true}, "connect", port, NULL),
                     0);
    close(fd);
}

static void test_processes_outside(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_result r;
    pid_t pid = fork();
    if (pid == 0) execlp("sleep", "sleep", unique_arg, NULL);
    assert_int_equal(
        attempt_status((struct sandbox_spec){0}, "kill", format_line("%d", (int)pid), NULL), 9);
    shell_status(format_line("kill -9 -1; kill -9 %d; kill -9 0", (int)getpid()));
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    run_shell((struct sandbox_spec){0}, &r, "cat /proc/[0-9]*/cmdline");
    assert_null(memmem(r.out.data, r.out.len, unique_arg, strlen(unique_arg)));
    assert_null(memmem(r.out.data, r.out.len, "test_sandbox", 12));
    sandbox_result_release(&r);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void test_environment(void **state) {
    (void)state;
    skip_without_sandbox();
    static const char *const expected[] = {"PATH=", "LANG=", "HOME=/tmp", "PWD=/tmp", "MINE=1"};
    char *mine[] = {"MINE=1", "LD_PRELOAD=/no/such/library.so"}, *env[] = {"/usr/bin/env"};
    struct strings own = {mine, 1};
    struct sandbox_spec s = {.env = &own};
    struct sandbox_result r;
    setenv("SHOAL_API_KEY", "secret", 1);
    setenv("HF_TOKEN", "secret", 1);
    assert_int_equal(run(&s, &r, env, 1), OK);
    int lines = 0;
    for (char *line = strtok(r.out.data, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        bool known = false;
        for (size_t i = 0; i < ARRAY_LEN(expected); i++)
            known |= strncmp(line, expected[i], strlen(expected[i])) == 0;
        if (!known) fail_msg("'%s' is in the environment", line);
    }
    assert_int_equal(lines, ARRAY_LEN(expected));
    sandbox_result_release(&r);
    assert_int_not_equal(shell_status("cat /proc/*/environ | grep -q secret"), 0);
    /* the loader prints one error: for the command, not for bwrap outside */
    own.n = 2;
    assert_int_equal(run(&s, &r, env, 1), OK);
    buf_add(&r.error_output, "", 1);
    const char *first = strstr(r.error_output.data, "/no/such/library.so");
    assert_non_null(first);
    assert_null(strstr(first + 1, "/no/such/library.so"));
    sandbox_result_release(&r);
    unsetenv("SHOAL_API_KEY");
    unsetenv("HF_TOKEN");
}

static void test_descriptors(void **state) {
    (void)state;
    skip_without_sandbox();
    char *path = path_join(secret, "a");
    int fd = open(path, O_RDONLY), high = dup2(fd, 77); /* any child inherits both */
    assert_int_equal(high, 77);
    for (int i = 3; i < 80; i += i == fd || i == 3 ? 1 : 74)
        assert_int_equal(
            attempt_status((struct sandbox_spec){0}, "descriptor", format_line("%d", i), NULL), 9);
    assert_int_equal(attempt_status((struct sandbox_spec){0}, "descriptor", "77", NULL), 9);
    assert_int_equal(attempt_status((struct sandbox_spec){0}, "descriptor", "2", NULL), 0);
    assert_int_equal(shell_status("test $(ls /proc/self/fd | wc -l) = 4"), 0); /* 3 is ls's own */
    close(fd);
    close(high);
    free(path);
}

/* Denied calls; those that the kernel would deny too are denied by two mechanisms. */
static void test_calls(void **state) {
    (void)state;
    skip_without_sandbox();
    static const char *const calls[] = {
        "mount",  "remount", "umount", "unshare",     "clone",    "clone3", "chroot",      "ptrace",
        "keyctl", "bpf",     "perf",   "userfaultfd", "io_uring", "shmget", "sethostname", "tty"};
    for (size_t i = 0; i < ARRAY_LEN(calls); i++) {
        int status = attempt_status((struct sandbox_spec){0}, calls[i], "", NULL);
        if (status != 9) fail_msg("%s: %d", calls[i], status);
    }
    assert_true(attempt_succeeds("ptrace", "")); /* it succeeds here, so the attempt is valid */
}

static void test_terminal(void **state) {
    (void)state;
    skip_without_sandbox();
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(slave >= 0);
    struct sandbox_spec s = {.input_fd = slave};
    assert_int_equal(attempt_status(s, "tiocsti", "", NULL), 9);
    assert_int_equal(shell_status_with(s, "test -t 0"), 0);
    assert_int_equal(shell_status("test $(ps -o sid= -p $$) -le 2"), 0);
    close(slave);
    close(master);
}

/* No way to gain privileges: no file is set-user-id, and the only capability, if any, is the one
 * for root's files. */
static void test_privileges(void **state) {
    (void)state;
    skip_without_sandbox();
    assert_int_equal(shell_status("grep -q '^NoNewPrivs:.1$' /proc/self/status"), 0);
    assert_int_equal(shell_status("grep -q '^Seccomp:.2$' /proc/self/status"), 0);
    assert_int_equal(shell_status("grep -Eq '^CapEff:.0+[02]$' /proc/self/status"), 0);
    assert_int_not_equal(shell_status("grep -vq nosuid /proc/self/mounts"), 0);
    assert_int_not_equal(
        shell_status_with(spec_with_folders(), "grep -vq nosuid /proc/self/mounts"), 0);
    assert_int_not_equal(shell_status("chown 1 /tmp"), 0);
    if (geteuid() == 0) /* the user id outside is not root's */
        assert_int_not_equal(shell_status("grep -Eq '^ +0 +0 ' /proc/self/uid_map"), 0);
}

/* limits */

static void test_fork_bomb(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_spec s = {.limits = {.processes = 32}};
    struct buf out = {0};
    assert_int_equal(attempt_status(s, "forks", unique_arg, &out), 0);
    assert_in_range(atoi(out.data), 8, 32);
    buf_release(&out);
    assert_int_equal(count_processes(unique_arg), 0);
    /* the same while it forks until its end */
    s.limits.seconds = 0.5;
    assert_int_not_equal(
        shell_status_with(s, format_line("f() { sleep %s & f & f & wait; }; f", unique_arg)), 0);
    assert_int_equal(count_processes(unique_arg), 0);
}

static void test_limits(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_result r;
    struct sandbox_spec s = {.limits = {.memory = 128 << 20}};
    const char *memory_hog =
        "head -c 300000000 /dev/zero | tail -c 300000000 | wc -c | grep -qx 300000000";
    assert_int_not_equal(shell_status_with(s, memory_hog), 0);
    s.limits.memory = (size_t)1 << 30;
    assert_int_equal(shell_status_with(s, memory_hog), 0);
    s = (struct sandbox_spec){.limits = {.cpu_seconds = 1, .seconds = 60}};
    run_shell(s, &r, "while :; do :; done");
    assert_int_equal(r.exit_reason, SANDBOX_EXITED);
    assert_in_range(r.status, 128 + SIGKILL, 128 + SIGXCPU);
    sandbox_result_release(&r);
    s = (struct sandbox_spec){.limits = {.open_files = 16}};
    assert_int_not_equal(shell_status_with(s, "exec 20</dev/null"), 0);
    assert_int_equal(shell_status("ulimit -c | grep -qx 0"), 0);
}

static void test_output_flood(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_spec s = {.limits = {.output = 100000}};
    struct sandbox_result r;
    const char *const lines[] = {"yes", "yes >&2", "yes & yes >&2"};
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        run_shell(s, &r, lines[i]);
        assert_int_equal(r.exit_reason, SANDBOX_OUTPUT_LIMIT);
        assert_true(r.out.len <= 100000 && r.error_output.len <= 100000);
        assert_true(r.out.len == 100000 || r.error_output.len == 100000);
        assert_non_null(strstr(sandbox_failure(&r, &s.limits), "100000 bytes"));
        sandbox_result_release(&r);
    }
    run_shell(s, &r, "head -c 100000 /dev/zero; head -c 100000 /dev/zero >&2");
    assert_int_equal(r.exit_reason, SANDBOX_EXITED);
    assert_true(r.out.len == 100000 && r.error_output.len == 100000);
    sandbox_result_release(&r);
}

static void test_deadline(void **state) {
    (void)state;
    skip_without_sandbox();
    const char *const lines[] = {
        "sleep %s", "trap '' TERM INT HUP; sleep %s & setsid sleep %s & wait",
        "(setsid sleep %s &) ; setsid nohup sleep %s >/dev/null 2>&1 & sleep %s",
        "exec >&- 2>&-; sleep %s"};
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        struct sandbox_spec s = {.limits = {.seconds = 0.4}};
        struct sandbox_result r;
        char line[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(line, sizeof line, lines[i], unique_arg, unique_arg, unique_arg);
#pragma GCC diagnostic pop
        run_shell(s, &r, line);
        assert_int_equal(r.exit_reason, SANDBOX_TIMED_OUT);
        assert_int_equal(r.status, -1);
        sandbox_result_release(&r);
        assert_int_equal(count_processes(unique_arg), 0);
    }
}

/* Processes that a command leaves behind are killed with it, and have ended when the call
 * returns. */
static void test_daemons(void **state) {
    (void)state;
    skip_without_sandbox();
    assert_int_equal(
        shell_status(format_line("sleep %s & setsid sleep %s & (setsid sleep %s &) ; sleep "
                                 "0.05",
                                 unique_arg, unique_arg, unique_arg)),
        0);
    assert_int_equal(count_processes(unique_arg), 0);
}

static pid_t start_parent(const char *ready_file) {
    pid_t pid = fork();
    if (pid == 0) {
        shell_status_with(spec_with_folders(), format_line("setsid sleep %s & echo >%s; sleep %s",
                                                           unique_arg, ready_file, unique_arg));
        _exit(0);
    }
    return pid;
}

static void kill_parent(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* kill -9 of the process that runs the sandbox: while the command runs, and at any moment of the
 * set-up, of several at once. */
static void test_parent_killed(void **state) {
    (void)state;
    skip_without_sandbox();
    enum { PARENTS = 8 };
    pid_t pids[PARENTS];
    char *ready_file = path_join(writable, "runs");
    pids[0] = start_parent(ready_file);
    assert_true(wait_file_exists(ready_file) && count_processes(unique_arg) >= 2);
    kill_parent(pids[0]);
    assert_true(wait_processes_end(unique_arg));
    for (unsigned round = 0; round < 12; round++) {
        for (int i = 0; i < PARENTS; i++) pids[i] = start_parent(ready_file);
        for (int i = 0; i < PARENTS; i++) {
            usleep(round * 500);
            kill_parent(pids[i]);
        }
        assert_true(wait_processes_end(unique_arg));
    }
    unlink(ready_file);
    free(ready_file);
}

/* running */

static void test_input_output(void **state) {
    (void)state;
    skip_without_sandbox();
    struct buf b = {0};
    for (uint32_t i = 0; b.len < 3000000; i++) buf_add(&b, &i, sizeof i);
    struct sandbox_spec s = {
        .input = b.data, .input_len = b.len, .limits = {.output = 4 << 20}, .dir = "/usr"};
    struct sandbox_result r;
    run_shell(s, &r, "cat; pwd >&2; exit 7");
    assert_int_equal(r.exit_reason, SANDBOX_EXITED);
    assert_int_equal(r.status, 7);
    assert_int_equal(r.out.len, b.len);
    assert_memory_equal(r.out.data, b.data, b.len);
    assert_memory_equal(r.error_output.data, "/usr\n", 5);
    assert_string_equal(sandbox_failure(&r, &s.limits), "it failed with status 7");
    sandbox_result_release(&r);
    buf_release(&b);
    assert_int_equal(shell_status("read x"), 1); /* end of file without waiting */
    assert_int_equal(shell_status("kill -KILL $$"), 128 + SIGKILL);
}

static void test_refusals(void **state) {
    (void)state;
    skip_without_sandbox();
    char *cat[] = {"cat"}, *none[] = {"no-such-program"}, *path[] = {"/no/such"},
         *text[] = {read_dir}, *empty[] = {""};
    const struct {
        char **words;
        const char *named, *env, *why;
        int rc;
    } cases[] = {
        {none, NULL, NULL, "'no-such-program' does not exist", ERR_MISSING},
        {path, NULL, NULL, "'/no/such' does not exist", ERR_MISSING},
        {text, NULL, NULL, "not executable", ERR_MISSING},
        {empty, NULL, NULL, "empty", ERR_USAGE},
        {cat, "/", NULL, "'/' cannot be shown", ERR_USAGE},
        {cat, "/tmp", NULL, "cannot be shown", ERR_USAGE},
        {cat, "/usr/..", NULL, "cannot be shown", ERR_USAGE},
        {cat, "/proc/self", NULL, "cannot be shown", ERR_USAGE},
        {cat, "/dev/shm", NULL, "cannot be shown", ERR_USAGE},
        {cat, "/no/such", NULL, "'/no/such'", ERR_MISSING},
        {cat, NULL, "A", "'A' is not NAME=VALUE", ERR_USAGE},
        {cat, NULL, "=A", "is not NAME=VALUE", ERR_USAGE},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *named[] = {(char *)(uintptr_t)cases[i].named},
             *env[] = {(char *)(uintptr_t)cases[i].env};
        const struct strings folders = {named, cases[i].named != NULL},
                             vars = {env, cases[i].env != NULL};
        struct sandbox_spec s = {.read = &folders, .env = &vars};
        struct sandbox_result r;
        int rc = run(&s, &r, cases[i].words, 1);
        if (rc != cases[i].rc || !strstr(err.text, cases[i].why))
            fail_msg("case %zu: %d: %s", i, rc, err.text);
    }
}

/* A bwrap that is missing, one that fails, and one that does nothing. */
static void test_bad_bwrap(void **state) {
    (void)state;
    skip_without_sandbox();
    char *old = xstrdup(getenv("PATH")), *fake = path_join(read_dir, "bwrap");
    char *true_words[] = {"/bin/true"};
    struct sandbox_result r;
    struct sandbox_spec s = {.limits = {.seconds = 20}};
    setenv("PATH", read_dir, 1);
    assert_int_equal(run(&s, &r, true_words, 1), ERR_MISSING);
    assert_non_null(strstr(err.text, "apt install bubblewrap"));
    assert_int_equal(sandbox_available(&err), ERR_MISSING);
    assert_null(sandbox_version(&err));
    const char *script = "#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n";
    file_create(read_dir, "bwrap", script);
    chmod(fake, 0755);
    assert_int_equal(run(&s, &r, true_words, 1), ERR_STATE);
    assert_non_null(strstr(err.text, "cannot make a sandbox: bwrap: No permissions"));
    file_create(read_dir, "bwrap", "#!/bin/sh\nexec /bin/sleep 987\n");
    s.limits.seconds = 0.3;
    assert_int_equal(run(&s, &r, true_words, 1), OK);
    assert_int_equal(r.exit_reason, SANDBOX_TIMED_OUT);
    sandbox_result_release(&r);
    setenv("PATH", old, 1);
    unlink(fake);
    free(fake);
    free(old);
}

static void *start_cat(void *out) {
    static char *words[] = {"cat"};
    static const struct strings argv = {words, 1};
    const struct sandbox_spec s = {.argv = &argv, .limits = {.seconds = 60}};
    *(struct sandbox **)out = sandbox_start(&s, &err);
    return NULL;
}

/* The thread that starts the sandbox ends; the command continues. */
static void test_streaming_input_output(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox *s = NULL;
    pthread_t thread;
    char bytes[16];
    assert_int_equal(pthread_create(&thread, NULL, start_cat, &s), 0);
    pthread_join(thread, NULL);
    assert_non_null(s);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(sandbox_read(s, bytes, sizeof bytes, 0.02, &err), ERR_STATE);
        assert_int_equal(sandbox_write(s, "hello", 5, 10, &err), OK);
        assert_int_equal(sandbox_read(s, bytes, sizeof bytes, 20, &err), 5);
        assert_memory_equal(bytes, "hello", 5);
    }
    assert_int_equal(sandbox_wait(s, 0.02, NULL, &err), ERR_STATE);
    sandbox_close_input(s);
    assert_int_equal(sandbox_read(s, bytes, sizeof bytes, 20, &err), 0);
    struct sandbox_result r;
    assert_int_equal(sandbox_wait(s, 20, &r, &err), OK);
    assert_int_equal(r.exit_reason, SANDBOX_EXITED);
    assert_int_equal(r.status, 0);
    sandbox_result_release(&r);
    sandbox_free(s);
}

static struct sandbox *start(const char *line, double seconds) {
    char *words[] = {"/bin/sh", "-c", (char *)(uintptr_t)line};
    const struct strings argv = {words, 3};
    const struct sandbox_spec s = {.argv = &argv, .limits = {.seconds = seconds, .output = 1000}};
    struct sandbox *p = sandbox_start(&s, &err);
    if (!p) fail_msg("%s", err.text);
    return p;
}

static void *kill_thread(void *s) {
    sandbox_kill(s);
    return NULL;
}

static void test_streaming_end(void **state) {
    (void)state;
    skip_without_sandbox();
    struct sandbox_result r;
    static char large_input[1 << 20];
    pthread_t thread;
    /* the time limit applies without any call */
    struct sandbox *s =
        start(format_line("setsid sleep %s & sleep %s", unique_arg, unique_arg), 0.4);
    assert_int_equal(sandbox_wait(s, 30, &r, &err), OK);
    assert_int_equal(r.exit_reason, SANDBOX_TIMED_OUT);
    sandbox_result_release(&r);
    sandbox_free(s);
    /* killed by another thread; freed while it runs */
    s = start(format_line("sleep %s", unique_arg), INFINITY);
    pthread_create(&thread, NULL, kill_thread, s);
    assert_int_equal(sandbox_wait(s, 30, &r, &err), OK);
    assert_int_equal(r.exit_reason, SANDBOX_KILLED);
    sandbox_result_release(&r);
    pthread_join(thread, NULL);
    sandbox_free(s);
    sandbox_free(
        start(format_line("setsid sleep %s & sleep %s", unique_arg, unique_arg), INFINITY));
    assert_int_equal(count_processes(unique_arg), 0);
    /* it does not read; it has ended */
    s = start("sleep 60", 60);
    assert_int_equal(sandbox_write(s, large_input, sizeof large_input, 0.1, &err), ERR_STATE);
    sandbox_free(s);
    s = start("exit 3", 60);
    assert_int_equal(sandbox_wait(s, 30, &r, &err), OK);
    assert_int_equal(r.status, 3);
    sandbox_result_release(&r);
    assert_int_equal(sandbox_write(s, large_input, sizeof large_input, 5, &err), ERR_STATE);
    sandbox_free(s);
    /* the beginning of standard error is kept, and standard error need not be read */
    s = start("head -c 500000 /dev/zero >&2; echo end", 60);
    assert_int_equal(sandbox_read(s, large_input, 4, 30, &err), 4);
    assert_int_equal(sandbox_wait(s, 30, &r, &err), OK);
    assert_int_equal(r.exit_reason, SANDBOX_EXITED);
    assert_int_equal(r.error_output.len, 1000);
    sandbox_result_release(&r);
    sandbox_free(s);
}

static void *run_repeatedly(void *failed) {
    for (int i = 0; i < 10; i++) {
        char *words[] = {"/bin/sh", "-c", "cat", NULL};
        const struct strings argv = {words, 3};
        const struct sandbox_spec s = {.argv = &argv, .input = &i, .input_len = sizeof i};
        struct sandbox_result r;
        struct error mine;
        if (sandbox_run(&s, &r, &mine) != OK) return print_error("%s\n", mine.text), failed;
        bool good = r.status == 0 && r.out.len == sizeof i && !memcmp(r.out.data, &i, sizeof i);
        if (!good)
            print_error("end %d, status %d, %zu bytes, '%.*s'\n", r.exit_reason, r.status,
                        r.out.len, (int)r.error_output.len, r.error_output.data);
        sandbox_result_release(&r);
        if (!good) return failed;
    }
    return NULL;
}

/* 200 runs leak no process, thread, descriptor or zombie. */
static void test_no_leaks(void **state) {
    (void)state;
    skip_without_sandbox();
    int fds = count_entries("/proc/self/fd");
    for (int i = 0; i < 160; i++) {
        struct sandbox_spec s = {.limits = {.seconds = i % 8 ? 60 : 0.02, .output = 1000}};
        struct sandbox_result r;
        run_shell(s, &r,
                  i % 3 ? format_line("setsid sleep %s & yes | head -c %d", unique_arg, i * 10)
                        : "true");
        sandbox_result_release(&r);
    }
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, run_repeatedly, threads);
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(count_entries("/proc/self/fd"), fds);
    assert_int_equal(count_entries("/proc/self/task"), 1);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_processes(unique_arg), 0);
}

/* this process */

/* Runs fn in a child; returns 0, or the number of the failed check. */
static int run_in_child(int (*fn)(void)) {
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(fn());
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

#define MUST(what)                                                                                 \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, strerror(errno));       \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static int forbidden(void) {
    char *words[] = {"true"};
    const struct strings argv = {words, 1};
    const struct sandbox_spec s = {.argv = &argv};
    struct sandbox_result r;
    MUST(sandbox_command_check(&err) == OK);
    sandbox_forbid_commands("no commands here");
    sandbox_forbid_commands("another reason");
    MUST(sandbox_command_check(&err) == ERR_STATE);
    MUST(strcmp(err.text, "no commands here") == 0);
    MUST(sandbox_run(&s, &r, &err) == ERR_STATE);
    MUST(strcmp(err.text, "no commands here") == 0);
    MUST(sandbox_start(&s, &err) == NULL && err.code == ERR_STATE);
    return 0;
}

static void test_forbidden(void **state) {
    (void)state;
    assert_int_equal(run_in_child(forbidden), 0);
    assert_int_equal(sandbox_command_check(&err), OK);
}

static bool can_open(const char *folder, const char *name, int flags) {
    char *path = path_join(folder, name);
    int fd = open(path, flags, 0600);
    if (fd >= 0) close(fd);
    free(path);
    return fd >= 0;
}

static int confined_files(void) {
    char *outside = path_join(secret, "a"), *link = path_join(writable, "link"),
         *inner = path_join(writable, "inner"), *from = path_join(writable, "a"),
         *to = path_join(inner, "a"), *away = path_join(secret, "b"),
         *taken = path_join(writable, "taken"), *readable = path_join(read_dir, "a");
    MUST(can_open(secret, "a", O_RDONLY) && can_open(read_dir, "a", O_RDWR));
    MUST(sandbox_confine(&read_one, &writable_one, &err) == OK);
    MUST(can_open(read_dir, "a", O_RDONLY) && count_entries(read_dir) == 1);
    MUST(!can_open(read_dir, "a", O_RDWR) && !can_open(read_dir, "new", O_WRONLY | O_CREAT));
    MUST(!can_open(secret, "a", O_RDONLY) && !can_open(secret, "a", O_WRONLY));
    MUST(!can_open(secret, "new", O_WRONLY | O_CREAT) && opendir(secret) == NULL);
    MUST(can_open(writable, "new", O_RDWR | O_CREAT) && can_open(writable, "a", O_RDWR | O_TRUNC));
    MUST(symlink(secret, link) == 0 && !can_open(link, "a", O_RDONLY));
    MUST(!can_open(link, "a", O_WRONLY) && unlink(link) == 0);
    MUST(mkdir(inner, 0700) == 0);
    if (sandbox_landlock_abi() >= 2) {
        MUST(rename(from, to) == 0 && rename(to, from) == 0);
    }
    MUST(rename(from, away) != 0 && rename(outside, taken) != 0 && link && unlink(outside) != 0);
    MUST(linkat(AT_FDCWD, outside, AT_FDCWD, taken, 0) != 0);
    MUST(mkdir(away, 0700) != 0 && rmdir(read_dir) != 0);
    if (sandbox_landlock_abi() >= 3) MUST(truncate(outside, 0) != 0 && truncate(readable, 0) != 0);
    MUST(can_open("/dev", "null", O_RDWR) && can_open("/usr", "bin", O_RDONLY));
    MUST(can_open("/proc", "self/status", O_RDONLY) && !can_open("/etc", "shadow", O_RDONLY));
    MUST(!can_open("/", ".", O_RDONLY | O_DIRECTORY));
    return 0;
}

static int confined_others(void) {
    char *words[] = {"true"};
    const struct strings argv = {words, 1};
    const struct sandbox_spec s = {.argv = &argv};
    struct sandbox_result r;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), abi = sandbox_landlock_abi(), status;
    MUST(sandbox_confine(NULL, NULL, &err) == OK);
    MUST(sandbox_run(&s, &r, &err) == ERR_STATE && strstr(err.text, "confined"));
    if (abi >= 4) {
        MUST(bind(fd, (void *)&at, sizeof at) != 0 && errno == EACCES);
        at.sin_port = htons(9);
        MUST(connect(fd, (void *)&at, sizeof at) != 0 && errno == EACCES);
    }
    if (abi >= 6) MUST(kill(getppid(), 0) != 0 && errno == EPERM);
    char *environ_path = xasprintf("/proc/%d/environ", (int)getppid());
    MUST(open(environ_path, O_RDONLY) < 0);
    pid_t pid = fork(); /* its children are confined too */
    if (pid == 0) _exit(can_open(read_dir, "a", O_RDONLY) ? 1 : execl("/bin/true", "true", NULL));
    waitpid(pid, &status, 0);
    MUST(status == 0);
    return 0;
}

static int confined_wrongly(void) {
    char *words[] = {"/no/such/folder"};
    const struct strings missing = {words, 1};
    pthread_t thread;
    MUST(sandbox_confine(&missing, NULL, &err) == ERR_MISSING);
    MUST(can_open(secret, "a", O_RDONLY)); /* nothing has changed */
    MUST(pthread_create(&thread, NULL, (void *(*)(void *))(void (*)(void))sleep, (void *)100) == 0);
    MUST(sandbox_confine(NULL, NULL, &err) == ERR_STATE && strstr(err.text, "threads"));
    MUST(can_open(secret, "a", O_RDONLY));
    return 0;
}

static void test_confined(void **state) {
    (void)state;
    if (sandbox_landlock_abi() == 0) {
        print_message("# skipped: the kernel has no landlock\n");
        skip();
    }
    assert_int_equal(run_in_child(confined_files), 0);
    assert_int_equal(run_in_child(confined_others), 0);
    assert_int_equal(run_in_child(confined_wrongly), 0);
    assert_true(can_open(secret, "a", O_RDONLY));
}

/* Time of a run compared with one without a sandbox: minimum and mean of 100. */
static int bench(void) {
    char *words[] = {"/bin/true"};
    const struct strings argv = {words, 1};
    const struct sandbox_spec s = {.argv = &argv};
    double least[2] = {INFINITY, INFINITY}, sum[2] = {0};
    enum { N = 100 };
    for (int i = 0; i < 2 * N; i++) {
        struct sandbox_result r;
        double start_at = clock_now();
        if (i % 2) {
            if (sandbox_run(&s, &r, &err) != OK) return fprintf(stderr, "%s\n", err.text), 1;
            sandbox_result_release(&r);
        } else {
            pid_t pid;
            char *plain[] = {"true", NULL};
            posix_spawn(&pid, "/bin/true", NULL, NULL, plain, environ);
            waitpid(pid, NULL, 0);
        }
        double took = 1000 * (clock_now() - start_at);
        least[i % 2] = MIN(least[i % 2], took);
        sum[i % 2] += took;
    }
    printf("true: %.2f ms in the sandbox (%.2f on average), %.2f ms without (%.2f)\n", least[1],
           sum[1] / N, least[0], sum[0] / N);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "attempt") == 0)
        _exit(attempt(argv[2], argc > 3 ? argv[3] : ""));
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) return bench();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_nested_folders),
        cmocka_unit_test(test_links),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_network),
        cmocka_unit_test(test_processes_outside),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_terminal),
        cmocka_unit_test(test_privileges),
        cmocka_unit_test(test_fork_bomb),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_output_flood),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_daemons),
        cmocka_unit_test(test_parent_killed),
        cmocka_unit_test(test_input_output),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bad_bwrap),
        cmocka_unit_test(test_streaming_input_output),
        cmocka_unit_test(test_streaming_end),
        cmocka_unit_test(test_no_leaks),
        cmocka_unit_test(test_forbidden),
        cmocka_unit_test(test_confined),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
