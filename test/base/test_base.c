/*
 * test_base: the contracts of base.h, one test for each.
 *
 * Everything runs in one scratch directory under TMPDIR. Broken contracts are tested in a forked
 * child, which must die by SIGABRT. No test depends on the processor level.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char scratch[256];

static int scratch_create(void **state) {
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(scratch, sizeof(scratch), "%s/shoal-base-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(scratch) ? 0 : -1;
}

static int scratch_remove(void **state) {
    (void)state;
    char *cmd = xasprintf("rm -rf '%s'", scratch);
    int rc = system(cmd);
    free(cmd);
    return rc;
}

/* Path of NAME in the scratch directory; the last eight results stay valid. */
static const char *scratch_path(const char *name) {
    static char *ring[8];
    static int next;
    next = (next + 1) % 8;
    free(ring[next]);
    return ring[next] = path_join(scratch, name);
}

static const char *file_create(const char *name, const char *text) {
    const char *path = scratch_path(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    return path;
}

static void assert_file(const char *path, const char *text) {
    struct buf b = {0};
    struct error err = {0};
    assert_int_equal(file_read(path, 1 << 20, &b, &err), OK);
    assert_string_equal(b.data, text);
    buf_release(&b);
}

static int count_files(const char *dir) {
    DIR *d = opendir(dir);
    assert_non_null(d);
    int n = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void assert_has(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("'%s' is not in '%s'", part, text);
}

/* Whether fn aborts because of a broken contract. */
static bool call_aborts(void (*fn)(void)) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr)) _exit(1);
        fn();
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_error(void **state) {
    (void)state;
    struct error err = {0};
    assert_int_equal(error_set(&err, ERR_FORMAT, "bad '%s'", "x"), ERR_FORMAT);
    assert_int_equal(error_wrap(&err, "line %d", 3), ERR_FORMAT);
    assert_string_equal(err.text, "line 3: bad 'x'");
    error_set(&err, ERR_STATE, "again: %s", err.text); /* its own text as an argument */
    assert_string_equal(err.text, "again: line 3: bad 'x'");
    errno = ENOENT;
    assert_int_equal(error_errno(&err, "cannot open '%s'", "f"), ERR_MISSING);
    assert_string_equal(err.text, "cannot open 'f': No such file or directory");
    errno = ENOSPC;
    assert_int_equal(error_errno(&err, "x"), ERR_IO);
    assert_string_equal(error_name(ERR_NUMERIC), "numeric");
    assert_string_equal(error_name(ERR_USAGE), "usage");
    assert_string_equal(error_name(-99), "unknown");
    assert_string_equal(error_name(7), "unknown");
}

static void test_error_long(void **state) {
    (void)state;
    struct error err = {0};
    struct buf b = {0};
    for (int i = 0; i < 1000; i++) buf_puts(&b, "魚"); /* 3 bytes each */
    error_set(&err, ERR_IO, "%s", b.data);
    assert_true(strlen(err.text) < sizeof(err.text));
    assert_int_equal(strlen(err.text) % 3, 0); /* whole characters and "..." */
    assert_has(err.text + strlen(err.text) - 6, "魚...");
    for (int i = 0; i < 10; i++) error_wrap(&err, "context %d", i);
    assert_has(err.text, "context 9: context 8: ");
    buf_release(&b);
}

static void bad_wrap(void) {
    struct error err = {0};
    error_wrap(&err, "nothing to wrap");
}

static void test_arena(void **state) {
    (void)state;
    assert_true(call_aborts(bad_wrap));
    struct arena a = {0};
    size_t sizes[] = {0, 1, 63, 64, 65, 4096, 300000, 5, 1 << 20, 7, 262144, 100};
    uint8_t *p[ARRAY_LEN(sizes)];
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        p[i] = arena_alloc(&a, sizes[i]);
        assert_int_equal((uintptr_t)p[i] % 64, 0);
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(p[i][j], 0);
        memset(p[i], (int)i + 1, sizes[i]);
    }
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(p[i][j], i + 1);
    assert_string_equal(arena_strdup(&a, "koi"), "koi");
    assert_true(a.used >= 300000 + (1 << 20));
    arena_release(&a);
    assert_null(a.head);
    assert_int_equal(a.used, 0);
}

static void test_buf(void **state) {
    (void)state;
    struct buf b = {0};
    buf_add(&b, NULL, 0);
    assert_string_equal(b.data, "");
    for (int i = 0; i < 1000; i++) buf_printf(&b, "%d,", i);
    buf_add(&b, "a\0b", 3);
    assert_int_equal(b.len, 10 * 2 + 90 * 3 + 900 * 4 + 3);
    assert_memory_equal(b.data + b.len - 7, "999,a\0b", 8);
    buf_release(&b);
    char *s = xasprintf("%s-%d", "x", 5);
    assert_string_equal(s, "x-5");
    free(s);
}

static void test_read_and_map(void **state) {
    (void)state;
    struct error err = {0};
    struct file_map m;
    struct buf b = {0};
    int (*const ways[])(struct file_map *, const char *, struct error *) = {file_map_open,
                                                                            file_map_open_copy};
    const char *path = file_create("hello", "hello");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ways[i](&m, path, &err), OK);
        assert_int_equal(m.size, 5);
        assert_memory_equal(m.data, "hello", 5);
        file_map_close(&m);
        assert_int_equal(ways[i](&m, file_create("empty", ""), &err), OK);
        assert_int_equal(m.size, 0);
        file_map_close(&m);
        assert_int_equal(ways[i](&m, scratch, &err), ERR_IO);
        assert_has(err.text, "is a directory");
        assert_int_equal(ways[i](&m, scratch_path("none"), &err), ERR_MISSING);
        assert_int_equal(ways[i](&m, "/dev/null", &err), ERR_IO);
    }
    /* A copy does not change with the file. */
    assert_int_equal(file_map_open_copy(&m, path, &err), OK);
    file_create("hello", "");
    assert_memory_equal(m.data, "hello", 5);
    file_map_close(&m);
    path = file_create("hello", "hello");

    buf_puts(&b, "> ");
    assert_int_equal(file_read(path, 5, &b, &err), OK);
    assert_string_equal(b.data, "> hello");
    assert_int_equal(file_read(path, 4, &b, &err), ERR_MEMORY);
    assert_has(err.text, "limit of 4 bytes");
    assert_string_equal(b.data, "> hello"); /* unchanged by the failure */
    assert_int_equal(file_read(scratch, 9, &b, &err), ERR_IO);
    buf_release(&b);
}

static void test_atomic_write(void **state) {
    (void)state;
    struct error err = {0};
    assert_int_equal(dir_make(scratch_path("w"), &err), OK);
    const char *path = scratch_path("w/file"), *link_path = scratch_path("w/link");
    assert_int_equal(file_write(path, "one", 3, &err), OK);
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(file_write(path, "two", 3, &err), OK);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);

    assert_int_equal(symlink("file", link_path), 0);
    assert_int_equal(file_write(link_path, "three", 5, &err), OK);
    assert_int_equal(lstat(link_path, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_file(path, "three");

    struct atomic_file w;
    assert_int_equal(atomic_file_open(&w, path, &err), OK);
    assert_int_equal(atomic_file_write(&w, "part", 4, &err), OK);
    assert_int_equal(w.pos, 4);
    assert_int_equal(count_files(scratch_path("w")), 3);
    atomic_file_abort(&w);
    atomic_file_abort(&w);
    assert_file(path, "three");
    assert_int_equal(count_files(scratch_path("w")), 2);

    assert_int_equal(file_write("/dev/null", "x", 1, &err), ERR_IO);
    assert_has(err.text, "not a regular file");
    assert_int_equal(file_write(scratch_path("w"), "x", 1, &err), ERR_IO);
    assert_int_equal(file_write(scratch_path("no/dir"), "x", 1, &err), ERR_MISSING);
}

/* A file size limit simulates a full disk: write fails with an errno in the middle of the data. */
static void test_full_disk(void **state) {
    (void)state;
    struct error err = {0};
    assert_int_equal(dir_make(scratch_path("full"), &err), OK);
    const char *path = scratch_path("full/file");
    assert_int_equal(file_write(path, "old", 3, &err), OK);
    size_t size = 1 << 20;
    char *data = xcalloc(1, size);
    struct rlimit old, small;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){.rlim_cur = 100000, .rlim_max = old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc_large = file_write(path, data, size, &err);
    /* 100,001 bytes in small pieces: the last of them reaches the limit only when commit flushes
     * the stream. */
    struct error late = {0};
    struct atomic_file w;
    int rc_open = atomic_file_open(&w, path, &late), rc_put = OK;
    for (int i = 0; i < 100001 && rc_put == OK; i++) rc_put = atomic_file_write(&w, "x", 1, &late);
    int rc_commit = rc_put == OK ? atomic_file_commit(&w, &late) : rc_put;
    atomic_file_abort(&w);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    assert_int_equal(rc_large, ERR_IO);
    assert_has(err.text, "cannot write '");
    assert_int_equal(rc_open, OK);
    assert_int_equal(rc_commit, ERR_IO);
    assert_file(path, "old");
    assert_int_equal(count_files(scratch_path("full")), 1);
    free(data);
}

/* Opening a pipe without a writer blocks; a device may have no end. */
static void test_regular_files_only(void **state) {
    (void)state;
    struct error err = {0};
    struct file_map m;
    struct buf b = {0};
    char hash[HASH_LEN], head[4];
    const char *pipe_path = scratch_path("pipe");
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    alarm(20); /* a hang ends the program */
    assert_int_equal(file_map_open(&m, pipe_path, &err), ERR_IO);
    assert_has(err.text, "it is a pipe, not a regular file");
    assert_int_equal(file_map_open_copy(&m, pipe_path, &err), ERR_IO);
    assert_int_equal(file_read_head(pipe_path, head, sizeof head), 0);
    assert_int_equal(file_read("/dev/zero", 1 << 20, &b, &err), ERR_IO);
    assert_has(err.text, "it is a device");
    assert_int_equal(file_read("/dev/null", 1 << 20, &b, &err), OK);

    pid_t writer = fork(); /* a command line may name a pipe */
    if (writer == 0) {
        int fd = open(pipe_path, O_WRONLY);
        _exit(fd >= 0 && write(fd, "abc", 3) == 3 ? 0 : 1);
    }
    assert_int_equal(file_read(pipe_path, 1 << 20, &b, &err), OK);
    assert_string_equal(b.data, "abc");
    assert_int_equal(waitpid(writer, NULL, 0), writer);

    file_set_regular_only(true); /* a request may not */
    assert_int_equal(file_read(pipe_path, 1 << 20, &b, &err), ERR_IO);
    assert_int_equal(file_read("/dev/null", 1 << 20, &b, &err), ERR_IO);
    assert_int_equal(sha256_file(pipe_path, hash, &err), ERR_IO);
    assert_null(json_parse_file(pipe_path, &err));
    assert_has(err.text, "it is a pipe");
    file_set_regular_only(false);
    alarm(0);
    buf_release(&b);
}

static unsigned file_mode(const char *path) {
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    return st.st_mode & 07777;
}

static void test_private(void **state) {
    (void)state;
    struct error err = {0};
    mode_t before = umask(0);
    log_quiet = true;
    assert_int_equal(dir_make_private(scratch_path("p/q"), &err), OK);
    assert_int_equal(file_mode(scratch_path("p")), 0777);
    assert_int_equal(file_mode(scratch_path("p/q")), 0700);
    assert_int_equal(chmod(scratch_path("p/q"), 0755), 0);
    assert_int_equal(dir_make_private(scratch_path("p/q"), &err), OK);
    assert_int_equal(file_mode(scratch_path("p/q")), 0700);

    const char *path = scratch_path("p/q/file");
    assert_int_equal(file_write(path, "a", 1, &err), OK);
    assert_int_equal(file_mode(path), 0666);
    assert_int_equal(file_write_private(path, "b", 1, &err), OK);
    assert_int_equal(file_mode(path), 0600);
    assert_int_equal(file_write(path, "c", 1, &err), OK); /* keeps it */
    assert_int_equal(file_mode(path), 0600);
    assert_int_equal(file_make_private(scratch_path("p/q/new"), &err), OK);
    assert_int_equal(file_mode(scratch_path("p/q/new")), 0600);
    assert_int_equal(chmod(path, 0664), 0);
    assert_int_equal(file_make_private(path, &err), OK);
    assert_int_equal(file_mode(path), 0600);
    assert_file(path, "c");

    /* A folder that every user may write to is refused as a state folder. */
    assert_int_equal(dir_make(scratch_path("p/shared"), &err), OK);
    assert_int_equal(chmod(scratch_path("p/shared"), 01777), 0);
    assert_int_equal(dir_make_private(scratch_path("p/shared"), &err), ERR_STATE);
    assert_int_equal(file_mode(scratch_path("p/shared")), 01777);
    umask(before);
    log_quiet = false;
}

static void test_protect(void **state) {
    (void)state;
    struct error err = {0};
    static const char *const names[] = {"serve.db", "jobs", NULL};
    mode_t before = umask(022);
    assert_int_equal(dir_make(scratch_path("s/jobs/1"), &err), OK);
    const char *files[] = {"s/serve.db", "s/serve.db-wal", "s/jobs/1/log", "s/other", "outside"};
    for (size_t i = 0; i < ARRAY_LEN(files); i++) file_create(files[i], "x");
    assert_int_equal(symlink(scratch_path("outside"), scratch_path("s/jobs/link")), 0);
    assert_int_equal(symlink(scratch, scratch_path("s/jobs/all")), 0);
    assert_int_equal(mkfifo(scratch_path("s/jobs/pipe"), 0644), 0);
    assert_int_equal(dir_restrict_permissions(scratch_path("s"), names), 6);
    for (size_t i = 0; i < 3; i++) assert_int_equal(file_mode(scratch_path(files[i])), 0600);
    assert_int_equal(file_mode(scratch_path("s")), 0700);
    assert_int_equal(file_mode(scratch_path("s/jobs/1")), 0700);
    assert_int_equal(file_mode(scratch_path("s/other")), 0644);
    assert_int_equal(file_mode(scratch_path("outside")), 0644);
    assert_int_equal(dir_restrict_permissions(scratch_path("s"), names), 0);
    assert_int_equal(dir_restrict_permissions(scratch_path("none"), NULL), 0);
    umask(before);
}

/* A process id that is not in use. */
static pid_t dead_pid(void) {
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return pid;
}

static const char *tempfile_create(const char *dir, const char *fmt, long pid) {
    char *tail = xasprintf(fmt, pid), *name = path_join(dir, tail);
    const char *path = file_create(name, "left");
    free(tail);
    free(name);
    return path;
}

static void test_leftovers(void **state) {
    (void)state;
    struct error err = {0};
    long dead = dead_pid();
    assert_int_equal(dir_make(scratch_path("l"), &err), OK);
    char *gone[] = {xstrdup(tempfile_create("l", "file.tmp-%ld", dead)),
                    xstrdup(tempfile_create("l", "file.tmp-%ld-12", dead)),
                    xstrdup(tempfile_create("l", "file.tmp-%ld-3", getpid()))};
    char *kept[] = {xstrdup(tempfile_create("l", "file.tmp-%ld", getppid())),
                    xstrdup(tempfile_create("l", "file.tmp-%ld-", dead)),
                    xstrdup(tempfile_create("l", "file.tmp-%ld.bak", dead)),
                    xstrdup(tempfile_create("l", "file.tmp-0%ld", dead)),
                    xstrdup(tempfile_create("l", "other.tmp-%ld", dead)),
                    xstrdup(tempfile_create("l", "xfile.tmp-%ld", dead))};
    /* A locked temporary, as of a writer in another container, whose process id means nothing here.
     */
    char *locked = xstrdup(tempfile_create("l", "file.tmp-%ld-99", dead));
    int fd = open(locked, O_RDONLY);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    char *link_name = xasprintf("l/file.tmp-%ld-5", dead);
    assert_int_equal(symlink(kept[0], scratch_path(link_name)), 0);

    assert_int_equal(file_write(scratch_path("l/file"), "new", 3, &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(gone); i++) assert_false(path_exists(gone[i]));
    for (size_t i = 0; i < ARRAY_LEN(kept); i++) assert_true(path_exists(kept[i]));
    assert_true(path_exists(locked));
    assert_true(path_exists(scratch_path(link_name)));
    close(fd);
    assert_int_equal(file_write(scratch_path("l/file"), "new", 3, &err), OK);
    assert_false(path_exists(locked));

    /* Protecting a folder removes the leftovers of all its files. */
    dir_restrict_permissions(scratch_path("l"), NULL);
    assert_false(path_exists(kept[4]));
    assert_true(path_exists(kept[0]));
    for (size_t i = 0; i < ARRAY_LEN(gone); i++) free(gone[i]);
    for (size_t i = 0; i < ARRAY_LEN(kept); i++) free(kept[i]);
    free(locked);
    free(link_name);
}

/* A writer is killed, and the file is written again: only this file is left. */
static void test_leftover_of_killed_process(void **state) {
    (void)state;
    struct error err = {0};
    assert_int_equal(dir_make(scratch_path("k"), &err), OK);
    const char *path = scratch_path("k/file");
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct atomic_file w;
        if (atomic_file_open(&w, path, &err) != OK || write(ready[1], "x", 1) != 1) _exit(1);
        for (;;) pause();
    }
    char c;
    assert_int_equal(read(ready[0], &c, 1), 1);
    assert_int_equal(file_write(path, "one", 3, &err), OK);
    assert_int_equal(count_files(scratch_path("k")), 2); /* the other writer is alive */
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(file_write(path, "two", 3, &err), OK);
    assert_int_equal(count_files(scratch_path("k")), 1);
    assert_file(path, "two");
    close(ready[0]);
    close(ready[1]);
}

static void test_lock(void **state) {
    (void)state;
    struct error err = {0};
    assert_int_equal(dir_make(scratch_path("h"), &err), OK);
    const char *dir = scratch_path("h");
    int ready[2];
    char c;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (dir_lock(dir, "run", &err) < 0 || write(ready[1], "x", 1) != 1) _exit(1);
        for (;;) pause();
    }
    assert_int_equal(read(ready[0], &c, 1), 1);
    assert_int_equal(dir_lock(dir, "run", &err), ERR_STATE);
    char *expected = xasprintf("run '%s' is in use by another process (%ld)", dir, (long)pid);
    assert_string_equal(err.text, expected);
    free(expected);
    kill(pid, SIGKILL); /* the lock ends with the process */
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    int fd = dir_lock(dir, "run", &err);
    assert_true(fd >= 0);
    assert_int_equal(dir_lock(dir, "run", &err), ERR_STATE);
    dir_unlock(fd, dir);
    assert_int_equal(count_files(dir), 0);
    fd = dir_lock(dir, "run", &err);
    assert_true(fd >= 0);
    dir_unlock(fd, dir);
    assert_true(dir_lock(scratch_path("h/none"), "run", &err) < 0);
    close(ready[0]);
    close(ready[1]);
}

/* Maps a file in a child, truncates it (or raises SIGBUS) and reads its last page. Returns the
 * child's wait status and its stderr. */
static int sigbus_child(const char *path, bool truncate_file, char *output, size_t size) {
    int out[2], status;
    assert_int_equal(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct error err;
        struct file_map m;
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(out[1], STDERR_FILENO);
        signal(SIGBUS, SIG_DFL); /* cmocka has its own */
        file_map_catch_sigbus();
        if (file_map_open(&m, path, &err) != OK) _exit(9);
        if (truncate_file && truncate(path, 10) != 0) _exit(9);
        if (!truncate_file) raise(SIGBUS);
        volatile uint8_t sum = m.data[m.size - 1];
        _exit(sum == 0 ? 0 : 8);
    }
    close(out[1]);
    size_t len = 0;
    for (ssize_t n; (n = read(out[0], output + len, size - 1 - len)) > 0;) len += (size_t)n;
    output[len] = 0;
    close(out[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void test_mapped_file_shrinks(void **state) {
    (void)state;
    struct error err = {0};
    struct file_map m;
    char output[4096], data[20000] = {0};
    const char *path = scratch_path("mapped");
    assert_int_equal(file_write(path, data, sizeof data, &err), OK);
    int status = sigbus_child(path, true, output, sizeof output);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    char *want = xasprintf("shoal: '%s' became shorter while it was in use; start again\n", path);
    assert_string_equal(output, want);
    free(want);
    /* Other bus errors keep their action. */
    assert_int_equal(file_write(path, data, sizeof data, &err), OK);
    status = sigbus_child(path, false, output, sizeof output);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    assert_null(strstr(output, "became shorter"));

    assert_int_equal(file_map_open(&m, path, &err), OK);
    assert_int_equal(file_map_check_unchanged(&err), OK);
    assert_int_equal(file_write(path, data, 100, &err), OK); /* another file of this name */
    assert_int_equal(file_map_check_unchanged(&err), OK);
    file_map_close(&m);
    assert_int_equal(file_map_open(&m, path, &err), OK);
    assert_int_equal(truncate(path, 50), 0);
    assert_int_equal(file_map_check_unchanged(&err), ERR_STATE);
    assert_has(err.text, "was changed while it was in use");
    file_map_close(&m);
    assert_int_equal(file_map_check_unchanged(&err), OK);
}

/* Messages have the errno of the failed call, not of a later check. */
static void test_error_reasons(void **state) {
    (void)state;
    struct error err = {0};
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    char *long_path = path_join(scratch, name),
         *child_path = path_join(file_create("plain2", ""), "sub/x");
    assert_true(dir_make(long_path, &err) < 0);
    assert_has(err.text, "File name too long");
    assert_true(dir_make(child_path, &err) < 0);
    assert_has(err.text, "plain2': File exists");
    assert_true(file_write(long_path, "x", 1, &err) < 0);
    assert_has(err.text, "File name too long");
    assert_true(dir_make("/proc/none/x", &err) < 0);
    free(long_path);
    free(child_path);
    assert_int_equal(dir_make(scratch_path("locked"), &err), OK);
    const char *path_inside = scratch_path("locked/in");
    int out[2];
    char output[600];
    assert_int_equal(pipe(out), 0);
    assert_int_equal(chmod(scratch, 0755), 0);
    pid_t pid = fork();
    if (pid == 0) { /* as a user that does not own the folder */
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(77);
        if (geteuid() != 65534 && chmod(scratch_path("locked"), 0500) != 0) _exit(77);
        int rc = dir_make(path_inside, &err);
        dprintf(out[1], "%s|", rc < 0 ? err.text : "made");
        rc = file_write(path_inside, "x", 1, &err);
        dprintf(out[1], "%s|", rc < 0 ? err.text : "written");
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(out[1]);
    ssize_t n = read(out[0], output, sizeof output - 1);
    output[MAX(n, 0)] = 0;
    close(out[0]);
    if (WEXITSTATUS(status) == 77) skip();
    const char *second = strchr(output, '|');
    assert_non_null(second);
    assert_has(second, "Permission denied|");
    assert_has(output, "Permission denied|cannot");
}

static void test_paths(void **state) {
    (void)state;
    struct error err = {0};
    struct {
        const char *dir, *name, *want;
    } cases[] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"", "b", "b"}, {NULL, "b", "b"}, {"/", "b", "/b"}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *p = path_join(cases[i].dir, cases[i].name);
        assert_string_equal(p, cases[i].want);
        free(p);
    }
    assert_int_equal(dir_make(scratch_path("x/y//z/"), &err), OK);
    assert_int_equal(dir_make(scratch_path("x/y/z"), &err), OK);
    assert_true(path_is_dir(scratch_path("x/y/z")));
    assert_true(path_exists("/"));
    assert_false(path_exists(scratch_path("nothing")));
    const char *file = file_create("plain", "");
    assert_false(path_is_dir(file));
    char *child_path = path_join(file, "sub");
    assert_true(dir_make(child_path, &err) < 0);
    free(child_path);
}

/* Writes a file of a simulated /proc or /sys. */
static void system_file_create(const char *path, const char *text) {
    struct error err = {0};
    char *full = path_join("sys-root", path), *dir = path_join(scratch, full);
    *strrchr(dir, '/') = 0;
    assert_int_equal(dir_make(dir, &err), OK);
    file_create(full, text);
    free(full);
    free(dir);
}

static void assert_memory_info(int64_t total_kib, int64_t available_kib) {
    struct memory_info m = memory_info(scratch_path("sys-root"));
    assert_int_equal(m.total, total_kib << 10);
    assert_int_equal(m.available, available_kib << 10);
}

/* A domain of the powercap interface with its counter and range in microjoules. */
static void energy_domain_create(const char *folder, const char *domain, const char *name,
                                 const char *counter, const char *range) {
    const char *const files[][2] = {
        {"name", name}, {"energy_uj", counter}, {"max_energy_range_uj", range}};
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        char *path = xasprintf("%s/%s/%s", folder, domain, files[i][0]);
        system_file_create(path, files[i][1]);
        free(path);
    }
}

/* Two packages, one of which overflows; parts of a package and the platform do not count. */
static void test_energy(void **state) {
    (void)state;
    const char *folder = "powercap";
    energy_domain_create(folder, "intel-rapl:0", "package-0\n", "1000000\n", "5000000\n");
    energy_domain_create(folder, "intel-rapl:0:0", "core\n", "1\n", "5000000\n");
    energy_domain_create(folder, "intel-rapl:1", "package-1\n", "4000000\n", "5000000\n");
    energy_domain_create(folder, "intel-rapl:2", "psys\n", "1\n", "5000000\n");
    struct energy_meter *m = energy_meter_new(scratch_path("sys-root/powercap"));
    assert_non_null(m);
    assert_true(fabs(energy_meter_period(m) - 0.0025) < 1e-9); // 5 J at 2000 W
    assert_true(energy_meter_read(m) == 0);
    system_file_create("powercap/intel-rapl:0/energy_uj", "2500000\n");
    system_file_create("powercap/intel-rapl:0:0/energy_uj", "900000\n");
    system_file_create("powercap/intel-rapl:1/energy_uj", "4250000\n");
    system_file_create("powercap/intel-rapl:2/energy_uj", "900000\n");
    assert_true(fabs(energy_meter_read(m) - 1.75) < 1e-9);
    system_file_create("powercap/intel-rapl:1/energy_uj", "500000\n"); // 0.75 J to 5 J, then 0.5 J
    assert_true(fabs(energy_meter_read(m) - 3) < 1e-9);
    assert_true(fabs(energy_meter_read(m) - 3) < 1e-9);
    system_file_create("powercap/intel-rapl:1/energy_uj", "\n");
    assert_true(isnan(energy_meter_read(m)));
    system_file_create("powercap/intel-rapl:1/energy_uj", "600000\n");
    assert_true(isnan(energy_meter_read(m))); // the missed energy is not known
    energy_meter_free(m);
    assert_int_equal(unlink(scratch_path("sys-root/powercap/intel-rapl:0/energy_uj")), 0);
    assert_null(energy_meter_new(scratch_path("sys-root/powercap"))); // one package is unreadable
    assert_null(energy_meter_new(scratch_path("no-root")));
    json_t *v = json_object();
    energy_add_json(v, NAN, 10);
    assert_int_equal(json_object_size(v), 0);
    energy_add_json(v, 5, 10);
    assert_true(json_get_number(v, "joules") == 5 && json_get_number(v, "joules_per_token") == 0.5);
    json_decref(v);
}

/* The process's meter reads $SHOAL_POWERCAP. It is the only user of energy_now in this program. */
static void test_energy_now(void **state) {
    (void)state;
    struct error err = {0};
    energy_domain_create("powercap-now", "intel-rapl:0", "package-0\n", "1000000\n",
                         "262143328850\n");
    setenv("SHOAL_POWERCAP", scratch_path("sys-root/powercap-now"), 1);
    double start = energy_now();
    /* The thread may read the counter at any moment: it is replaced, never empty. */
    assert_int_equal(file_write(scratch_path("sys-root/powercap-now/intel-rapl:0/energy_uj"),
                                "3000000\n", 8, &err),
                     OK);
    assert_true(fabs(energy_now() - start - 2) < 1e-9);
    unsetenv("SHOAL_POWERCAP");
}

static void test_memory_info(void **state) {
    (void)state;
    struct memory_info none = memory_info(scratch_path("no-root")), own = memory_info("/");
    assert_int_equal(none.total, -1);
    assert_string_equal(none.huge_pages, "unknown");
    system_file_create("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    assert_string_equal(memory_info(scratch_path("sys-root")).huge_pages, "madvise");
    system_file_create("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
    assert_string_equal(memory_info(scratch_path("sys-root")).huge_pages, "always");
    assert_true(own.total > 0 && own.available >= 0 && own.available <= own.total);
    system_file_create("proc/meminfo",
                       "MemTotal:       4000 kB\nMemFree: 10 kB\nMemAvailable:   3000 kB\n");
    assert_memory_info(4000, 3000);
    system_file_create("proc/self/cgroup", "1:name=systemd:/\n0::/a/b\n");
    assert_memory_info(4000, 3000); /* the group does not exist */
    system_file_create("sys/fs/cgroup/a/b/memory.max", "max\n");
    assert_memory_info(4000, 3000);
    system_file_create("sys/fs/cgroup/a/memory.max",
                       "2048000\n"); /* an ancestor of this group: its limit applies */
    system_file_create("sys/fs/cgroup/a/memory.current", "1024000\n");
    assert_memory_info(2000, 1000);
    system_file_create("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 512000\n");
    assert_memory_info(2000, 1500);
    system_file_create("sys/fs/cgroup/a/b/memory.max", "1024000\n");
    system_file_create("sys/fs/cgroup/a/b/memory.current", "1124000\n"); /* beyond the limit */
    assert_memory_info(1000, 0);
    system_file_create("sys/fs/cgroup/a/b/memory.current", "102400\n"); /* 900 KiB of it are free */
    assert_memory_info(1000, 900);
    system_file_create("sys/fs/cgroup/a/memory.current",
                       "2355200\n"); /* other groups of a use it */
    assert_memory_info(1000, 200);
    /* Version 1: a number larger than the machine means no limit. */
    system_file_create("proc/self/cgroup", "4:cpu,memory:/c\n3:memoryx:/d\n");
    system_file_create("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
    assert_memory_info(4000, 3000);
    system_file_create("sys/fs/cgroup/memory/memory.limit_in_bytes", "1024000\n");
    system_file_create("sys/fs/cgroup/memory/memory.usage_in_bytes", "102400\n");
    assert_memory_info(1000, 900);
}

static void test_hashes(void **state) {
    (void)state;
    struct error err = {0};
    char hex[HASH_LEN], other[HASH_LEN];
    sha256_bytes("", 0, hex);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha256_bytes("abc", 3, hex); /* FIPS 180-2, appendix B.1 */
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_int_equal(sha256_file(file_create("abc", "abc"), other, &err), OK);
    assert_string_equal(hex, other);
    assert_int_equal(sha256_file(scratch_path("none"), other, &err), ERR_MISSING);
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, "a", 1);
    sha256_update(&h, "bc", 2);
    sha256_final(&h, other);
    assert_string_equal(hex, other);

    assert_true(hash_fnv1a("a", 1) != hash_fnv1a("b", 1));
    int ones = 0;
    for (uint32_t i = 0; i < 4096; i++) ones += (int)(hash_fnv1a(&i, 4) >> 63);
    assert_in_range(ones, 1900, 2200);
}

/* Messages of every short length, cut at random, against libsodium's hash of the whole. */
static void test_sha256_in_parts(void **state) {
    (void)state;
    enum { MAX_BYTES = 1500 };
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    uint8_t message[MAX_BYTES], want[crypto_hash_sha256_BYTES];
    char hex[HASH_LEN], want_hex[HASH_LEN];
    for (int i = 0; i < MAX_BYTES; i++) message[i] = (uint8_t)rng_below(&r, 256);
    for (size_t n = 0; n < MAX_BYTES; n++) {
        struct sha256 h;
        sha256_init(&h);
        for (size_t offset = 0, part; offset < n; offset += part) {
            part = 1 + rng_below(&r, n % 2 ? 600 : 100);
            part = MIN(part, n - offset);
            sha256_update(&h, message + offset, part);
        }
        sha256_final(&h, hex);
        crypto_hash_sha256(want, message, n);
        sodium_bin2hex(want_hex, sizeof want_hex, want, sizeof want);
        assert_string_equal(hex, want_hex);
    }
}

/* The test vectors of Random123 for philox4x32, 10 rounds. */
static void test_philox(void **state) {
    (void)state;
    struct {
        uint32_t ctr[4], key[2], out[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < ARRAY_LEN(kat); i++) {
        struct rng r = {0};
        memcpy(r.key, kat[i].key, sizeof(r.key));
        memcpy(r.ctr, kat[i].ctr, sizeof(r.ctr));
        for (int j = 0; j < 4; j++) assert_int_equal(rng_u32(&r), kat[i].out[j]);
    }
}

/* rng_fill equals n calls of rng_u32, from any position in a block and across the counter's end. */
static void test_rng_fill(void **state) {
    (void)state;
    uint32_t v[1000];
    for (uint32_t first = 0; first < 9; first++)
        for (size_t n = 0; n < ARRAY_LEN(v); n += 1 + n / 3) {
            struct rng a = rng_make(9, RNG_TEST, 3, first), b;
            if (first % 2) a.ctr[0] = UINT32_MAX - 7 * first;
            for (uint32_t i = 0; i < first; i++) rng_u32(&a);
            b = a;
            rng_fill(&a, v, n);
            for (size_t i = 0; i < n; i++) assert_int_equal(v[i], rng_u32(&b));
            assert_int_equal(rng_u32(&a), rng_u32(&b));
        }
}

/* rng_skip equals n calls of rng_u32, also across the counter's end. */
static void test_rng_skip(void **state) {
    (void)state;
    for (uint32_t n = 0; n < 50; n++) {
        struct rng a = rng_make(9, RNG_TEST, 3, 1), b;
        if (n % 2) a.ctr[0] = UINT32_MAX - 5;
        b = a;
        rng_skip(&a, n);
        for (uint32_t i = 0; i < n; i++) rng_u32(&b);
        for (uint32_t i = 0; i < 9; i++) assert_int_equal(rng_u32(&a), rng_u32(&b));
    }
}

static void test_rng_streams(void **state) {
    (void)state;
    struct rng a = rng_make(7, RNG_TEST, 1, 2), b = rng_make(7, RNG_TEST, 1, 2);
    for (int i = 0; i < 100; i++) assert_int_equal(rng_u32(&a), rng_u32(&b));
    struct rng others[] = {rng_make(8, RNG_TEST, 1, 2), rng_make(7, RNG_DATA, 1, 2),
                           rng_make(7, RNG_TEST, 2, 2), rng_make(7, RNG_TEST, 1, 3),
                           rng_make(7 + (1ull << 32), RNG_TEST, 1, 2)};
    a = rng_make(7, RNG_TEST, 1, 2);
    uint64_t first = rng_u64(&a);
    for (size_t i = 0; i < ARRAY_LEN(others); i++) assert_true(rng_u64(&others[i]) != first);
    /* Beyond 2^32 blocks a stream continues with new numbers, not with those of another stream or
     * its own again. */
    struct rng end = rng_make(7, RNG_TEST, 1, 2);
    end.ctr[0] = UINT32_MAX;
    for (int i = 0; i < 4; i++) rng_u32(&end);
    assert_true(rng_u64(&end) != first);
}

static void test_rng_distributions(void **state) {
    (void)state;
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    int bins[7] = {0};
    for (int i = 0; i < 70000; i++) bins[rng_below(&r, 7)]++;
    for (int i = 0; i < 7; i++) assert_in_range(bins[i], 9500, 10500);
    assert_int_equal(rng_below(&r, 1), 0);
    double sum = 0, square = 0, uniform = 0;
    enum { N = 100000 };
    for (int i = 0; i < N; i++) {
        double x = (double)rng_normal(&r), u = (double)rng_uniform(&r);
        assert_true(u >= 0 && u < 1 && isfinite(x));
        sum += x, square += x * x, uniform += u;
    }
    assert_true(fabs(sum / N) < 0.015 && fabs(square / N - 1) < 0.02 &&
                fabs(uniform / N - 0.5) < 0.005);
    uint32_t v[50];
    for (uint32_t i = 0; i < 50; i++) v[i] = i;
    rng_shuffle(&r, v, 50);
    uint64_t seen = 0;
    int moved = 0;
    for (uint32_t i = 0; i < 50; i++) seen |= 1ull << v[i], moved += v[i] != i;
    assert_true(seen == (1ull << 50) - 1 && moved > 40);
    rng_shuffle(&r, NULL, 0);
}

struct accuracy {
    double worst, at;
};

static void accuracy_update(struct accuracy *a, double x, double got, long double want) {
    double e = (double)fabsl(((long double)got - want) / (want == 0 ? 1 : want));
    if (!(e <= a->worst)) a->worst = e, a->at = x;
}

static double rng_between(struct rng *r, double low, double high) {
    return low + (high - low) * ((double)(rng_u64(r) >> 11) * 0x1p-53);
}

/* Compared with the 64-bit mantissas of long double; the contract is 1e-14, the bounds here are the
 * measured errors, rounded up. */
static void test_math_accuracy(void **state) {
    (void)state;
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    struct accuracy e = {0}, l = {0}, s = {0}, c = {0}, p = {0};
    for (int i = 0; i < 200000; i++) {
        double wide = i & 1 ? 1.0 : 1e-3;
        double x = rng_between(&r, -708, 708) * wide;
        accuracy_update(&e, x, math_exp(x), expl((long double)x));
        x = i & 1 ? ldexp(rng_between(&r, 0.5, 1), (int)rng_below(&r, 2090) - 1060)
                  : rng_between(&r, 0.5, 2);
        accuracy_update(&l, x, math_log(x), logl((long double)x));
        x = rng_between(&r, -1e6, 1e6) * (i & 2 ? 1.0 : 1e-5);
        accuracy_update(&s, x, math_sin(x), sinl((long double)x));
        accuracy_update(&c, x, math_cos(x), cosl((long double)x));
        x = exp(rng_between(&r, -20, 20));
        double y = rng_between(&r, -30, 30);
        accuracy_update(&p, x, math_pow(x, y), powl((long double)x, (long double)y));
    }
    /* Next to multiples of pi/2, where nearly every digit cancels. */
    for (int k = 1; k < 600000; k += 7) {
        double x = (double)k * 1.5707963267948966;
        accuracy_update(&s, x, math_sin(x), sinl((long double)x));
        accuracy_update(&c, x, math_cos(x), cosl((long double)x));
    }
    struct accuracy all[] = {e, l, s, c, p};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        if (!(all[i].worst < 1e-15))
            fail_msg("function %zu: error %.3g at %.17g", i, all[i].worst, all[i].at);
}

static void test_math_edges(void **state) {
    (void)state;
    assert_true(math_exp(0) == 1 && math_log(1) == 0 && math_sin(0) == 0 && math_cos(0) == 1);
    assert_true(math_exp(1e9) == math_exp(708) && math_exp(-INFINITY) == math_exp(-708) &&
                math_exp(-708) > 0);
    assert_true(isnan(math_exp(NAN)) && isnan(math_log(NAN)) && isnan(math_log(-1)) &&
                isnan(math_sin(INFINITY)));
    assert_true(math_log(0) == -INFINITY && math_log(INFINITY) == INFINITY);
    assert_true(fabs(math_log(0x1p-1074) + 744.4400719213812) < 1e-12);
    assert_true(math_pow(2, 10) == 1024 && math_pow(10, 0) == 1 && math_pow(1, 1e300) == 1);
    assert_true(isnan(math_pow(-1, 2)) && isnan(math_pow(2, NAN)) &&
                math_pow(2, 1e9) == math_exp(708));
}

/* The exact bits, which other compilers, options and machines must reproduce. Computed with gcc 12
 * and clang 14. */
static void test_math_bits(void **state) {
    (void)state;
    struct rng r = rng_make(4, RNG_TEST, 0, 0);
    struct buf b = {0};
    for (int i = 0; i < 2000; i++) {
        double x = rng_between(&r, -700, 700);
        double y[] = {math_exp(x), math_log(fabs(x)), math_sin(x), math_cos(x),
                      math_pow(fabs(x) + 0.1, 1.5)};
        float z = rng_normal(&r);
        buf_add(&b, y, sizeof(y));
        buf_add(&b, &z, sizeof(z));
    }
    char hex[HASH_LEN];
    sha256_bytes(b.data, b.len, hex);
    assert_string_equal(hex, "96a257dc583708c5c06cd6e84b4fd191aa3921e2e91bd9b4c065c7d310f93e56");
    buf_release(&b);
}

struct ranges {
    int64_t end[200]; /* end of the chunk that begins there, or 0 */
    int threads;
    atomic_int calls;
    double *out;
};

static void range_record(void *ctx, int64_t begin, int64_t end, int thread) {
    struct ranges *s = ctx;
    assert_true(thread >= 0 && thread < s->threads);
    s->end[begin] = end;
    atomic_fetch_add(&s->calls, 1);
    for (int64_t i = begin; i < end; i++) s->out[i] = math_exp((double)i * 1e-3) + s->out[i];
}

static void test_pool_ranges(void **state) {
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        assert_int_equal(pool_size(pool), threads);
        for (int64_t n = 0; n < 200; n += 1 + n / 10) {
            for (int64_t grain = 1; grain <= 64; grain *= 4) {
                double out[200] = {0}, want[200] = {0};
                struct ranges s = {.threads = threads, .out = out},
                              one = {.threads = 1, .out = want};
                pool_run(pool, range_record, &s, n, grain);
                pool_run(NULL, range_record, &one, n, grain);
                assert_memory_equal(out, want, sizeof(out));
                int calls = 0;
                for (int64_t at = 0; at < n; at = s.end[at], calls++) {
                    assert_int_equal(at % grain, 0);
                    assert_true(s.end[at] > at);
                }
                assert_int_equal(atomic_load(&s.calls), calls);
                if (n > 0 && n <= grain) assert_int_equal(s.end[0], n);
            }
        }
        pool_free(pool);
    }
    pool_free(NULL);
    assert_int_equal(pool_size(NULL), 1);
    assert_true(cpu_count() >= 1);
}

static void add_one(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t i = begin; i < end; i++) ((int *)ctx)[i]++;
}

/* Many short runs, some after a pause that lets the workers sleep: no wake-up is lost and no range
 * runs twice. */
static void test_pool_stress(void **state) {
    (void)state;
    enum { RUNS = 20000 };
    for (int threads = 2; threads <= 5; threads += 3) {
        struct pool *pool = pool_new(threads);
        int counts[37] = {0};
        for (int i = 0; i < RUNS; i++) {
            pool_run(pool, add_one, counts, 37, 1);
            if (i % 1000 == 0) usleep(300);
        }
        for (int i = 0; i < 37; i++) assert_int_equal(counts[i], RUNS);
        pool_free(pool);
    }
    for (int i = 0; i < 50; i++) pool_free(pool_new(3));
}

static void nested_run(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)begin, (void)end, (void)thread;
    int counts[4] = {0};
    pool_run(ctx, add_one, counts, 4, 1);
}

static void pool_nested(void) {
    struct pool *pool = pool_new(2);
    pool_run(pool, nested_run, pool, 2, 1);
}

static void pool_bad_grain(void) {
    pool_run(NULL, add_one, NULL, 1, 0);
}

static void test_pool_contract(void **state) {
    (void)state;
    assert_true(call_aborts(pool_nested));
    assert_true(call_aborts(pool_bad_grain));
}

static void test_clock(void **state) {
    (void)state;
    double a = clock_now(), b = clock_now();
    assert_true(b >= a);
    char utc[32];
    assert_string_equal(clock_utc(utc), utc);
    assert_int_equal(strlen(utc), 20);
    assert_int_equal(utc[10], 'T');
    assert_int_equal(utc[19], 'Z');
}

static void test_endings(void **state) {
    (void)state;
    assert_true(path_has_extension("a/b.gguf", ".gguf") && path_has_extension("B.CSV", ".csv"));
    assert_false(path_has_extension("a/.gguf", ".gguf") || path_has_extension("gguf", ".gguf"));
    assert_false(path_has_extension("a.gguf/b", ".gguf"));
    assert_true(text_ends_with("a_total", "_total") && text_ends_with("_total", "_total"));
    assert_false(text_ends_with("total", "_total") || text_ends_with("a_Total", "_total"));
}

static void messages_print(void) {
    struct progress p;
    progress_start(&p, "train", 40);
    for (int i = 1; i <= 40; i++) {
        if (i % 20 == 0) usleep(110000);
        progress_update(&p, i, "loss 2.5");
        if (i == 20) log_info("half %s", "way");
    }
    progress_finish(&p, "done");
    log_warn("low %d", 1);
}

/* Runs messages_print() with stderr redirected to `fd`. */
static void messages_print_to(int fd) {
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(fd, STDERR_FILENO) >= 0);
    messages_print();
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
}

static void test_progress(void **state) {
    (void)state;
    const char *path = scratch_path("stderr");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    messages_print_to(fd);
    log_quiet = true;
    messages_print_to(fd);
    log_quiet = false;
    close(fd);
    struct buf b = {0};
    struct error err = {0};
    assert_int_equal(file_read(path, 1 << 16, &b, &err), OK);
    assert_null(strchr(
        b.data, '\r')); /* no progress bar without a terminal; quiet keeps only the warning */
    assert_int_equal(strncmp(b.data, "half way\ntrain 40/40  ", 22), 0);
    assert_has(b.data, "  in 0 s  done\nwarning: low 1\nwarning: low 1\n");
    buf_release(&b);
}

static void test_progress_terminal(void **state) {
    (void)state;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        fprintf(stderr, "SKIP: no pseudo-terminal\n");
        skip();
    }
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    assert_true(slave >= 0);
    messages_print_to(slave);
    assert_int_equal(fcntl(master, F_SETFL, O_NONBLOCK), 0);
    char text[8192];
    size_t len = 0;
    for (ssize_t n; (n = read(master, text + len, sizeof(text) - 1 - len)) > 0;) len += (size_t)n;
    text[len] = '\0';
    assert_has(text, "\r\033[Ktrain [############............] 20/40");
    assert_has(text, "left  loss 2.5\r\033[Khalf way\r\n"); /* the message clears the bar */
    assert_has(text, "[########################] 40/40");
    close(slave);
    close(master);
}

/* Runs child_main in a child on a pseudo-terminal. `text` receives what the terminal gets. */
static void run_on_terminal(void (*child_main)(void), char *text, size_t size) {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    text[0] = '\0';
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        fprintf(stderr, "SKIP: no pseudo-terminal\n");
        skip();
    }
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    assert_true(slave >= 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(slave, STDOUT_FILENO);
        dup2(slave, STDERR_FILENO);
        child_main();
        fflush(stdout);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(fcntl(master, F_SETFL, O_NONBLOCK), 0);
    size_t len = 0;
    for (ssize_t n; (n = read(master, text + len, size - 1 - len)) > 0;) len += (size_t)n;
    text[len] = '\0';
    close(slave);
    close(master);
}

/* A title, a colour, a C1 control, an override, a lone carriage return, line ends, a kanji, invalid
 * bytes: cut between any two bytes. */
static const char untrusted[] = "a\033]0;x\007b\033[31mc\302\2335nd\342\200\256e\r!\r\n\tf\346\274"
                                "\242\377g\177\342\201\246h\n";
#define R "\357\277\275"
static const char sanitized[] =
    "a" R "]0;x" R "b" R "[31mc" R "5nd" R "e" R "!\r\n\tf\346\274\242" R "g" R R "h\r\n";

static void print_whole(void) {
    terminal_sanitize_stdout();
    fputs(untrusted, stdout);
}

static void print_pieces(void) {
    terminal_sanitize_stdout();
    for (const char *p = untrusted; *p; p++) {
        putchar(*p);
        fflush(stdout);
    }
}

static void print_raw(void) {
    terminal_sanitize_stdout();
    printf("one ");
    terminal_write_raw("\033[1mtwo\033[0m");
    printf(" three\033\n");
}

static void hostile_print(void) {
    struct progress p;
    log_warn("'%s' is missing", "x\033[2J\nwarning: forged");
    progress_start(&p, "train", 2);
    progress_finish(&p, "loss\033[2J");
}

static void test_terminal(void **state) {
    (void)state;
    char text[8192];
    run_on_terminal(print_whole, text, sizeof text);
    assert_string_equal(text, sanitized);
    run_on_terminal(print_pieces, text, sizeof text);
    assert_string_equal(text, sanitized);
    run_on_terminal(print_raw, text, sizeof text);
    assert_string_equal(text, "one \033[1mtwo\033[0m three" R "\r\n");
    setenv("TERM", "xterm", 1);
    setenv("NO_COLOR", "", 1);
    run_on_terminal(hostile_print, text, sizeof text);
    assert_has(text, "\033[33mwarning: \033[0m'x" R "[2J\r\n  warning: forged' is missing\r\n");
    setenv("NO_COLOR", "1", 1);
    run_on_terminal(hostile_print, text, sizeof text);
    assert_has(text, "warning: 'x" R "[2J\r\n  warning: forged' is missing\r\n");
    assert_has(text, "loss" R "[2J");
}

/* A log may be shown on a terminal, so messages are filtered in files too. */
static void test_messages_in_files(void **state) {
    (void)state;
    const char *path = scratch_path("log");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), saved = dup(STDERR_FILENO);
    fflush(stderr);
    assert_true(dup2(fd, STDERR_FILENO) >= 0);
    hostile_print();
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(fd);
    struct buf b = {0};
    struct error err = {0};
    assert_int_equal(file_read(path, 1 << 16, &b, &err), OK);
    assert_has(b.data, "warning: 'x" R "[2J\n  warning: forged' is missing\n");
    assert_null(strchr(b.data, '\033'));
    buf_release(&b);
}

/* A file gets every byte. */
static void test_files_are_not_filtered(void **state) {
    (void)state;
    const char *path = scratch_path("out");
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, STDOUT_FILENO);
        print_whole();
        fflush(stdout);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_file(path, untrusted);
}

struct option_values {
    bool packed, verbose;
    int64_t rank, seed;
    double learning_rate;
    char *name;
    struct strings data;
};

static const struct option_row rows[] = {
    {"packed", OPT_BOOL, offsetof(struct option_values, packed), "true", 0, 0, NULL,
     "pack samples"},
    {"verbose", OPT_BOOL, offsetof(struct option_values, verbose), NULL, 0, 0, NULL, "say more"},
    {"lora-rank", OPT_INT, offsetof(struct option_values, rank), "8", 1, 256, "R",
     "rank of each adapter"},
    {"seed", OPT_INT, offsetof(struct option_values, seed), NULL, 0, 0, NULL, "random seed"},
    {"learning-rate", OPT_FLOAT, offsetof(struct option_values, learning_rate), "1e-3", 0, 1, "LR",
     "step size of the optimizer, which the schedule multiplies by its factor at every step"},
    {"name", OPT_STRING, offsetof(struct option_values, name), "koi", 0, 0, NULL,
     "name of the run"},
    {"data", OPT_LIST, offsetof(struct option_values, data), "a.jsonl,b.jsonl", 0, 0, "FILE",
     "training files"},
    {"lr", OPT_ALIAS, 0, "learning-rate", 0, 0, NULL, NULL},
    {"dataset", OPT_ALIAS, 0, "data", 0, 0, NULL, NULL},
    {0},
};

/* Parses words separated by blanks into k and pos. */
static int parse_words(struct option_values *k, struct strings *pos, struct error *err,
                       const char *words) {
    char *copy = xstrdup(words), *argv[32];
    int argc = 0;
    for (char *w = strtok(copy, " "); w && argc < 32; w = strtok(NULL, " ")) argv[argc++] = w;
    int rc = options_parse(rows, k, argc, argv, pos, err);
    free(copy);
    return rc;
}

static void test_options(void **state) {
    (void)state;
    struct error err = {0};
    struct option_values k;
    struct strings pos = {0};
    memset(&k, 0xAA, sizeof(k));
    options_default(rows, &k);
    assert_true(k.packed && !k.verbose && k.rank == 8 && k.seed == 0 && k.learning_rate == 1e-3);
    assert_string_equal(k.name, "koi");
    assert_int_equal(k.data.n, 2);
    assert_int_equal(
        parse_words(
            &k, &pos, &err,
            "in --lora-rank 16 --learning_rate=0.5 --no-packed out --verbose --name=x=y --seed -5 "
            "--data c d --data=e -- --rank -7 -"),
        OK);
    assert_true(!k.packed && k.verbose && k.rank == 16 && k.seed == -5 && k.learning_rate == 0.5);
    assert_string_equal(k.name, "x=y");
    assert_int_equal(k.data.n, 3); /* the defaults are replaced, repeats are appended */
    assert_string_equal(k.data.v[2], "e");
    const char *want[] = {"in", "out", "--rank", "-7", "-"};
    assert_int_equal(pos.n, 5);
    for (int i = 0; i < 5; i++) assert_string_equal(pos.v[i], want[i]);
    strings_release(&pos);
    assert_int_equal(parse_words(&k, &pos, &err, "--packed=on -3 - --verbose=no"), OK);
    assert_true(k.packed && !k.verbose && pos.n == 2);
    strings_release(&pos);
    assert_int_equal(parse_words(&k, &pos, &err, "--lr 0.25 --no_packed --dataset f --data g"), OK);
    assert_true(k.learning_rate == 0.25 && !k.packed && k.data.n == 2);
    strings_release(&pos);
    options_release(rows, &k);
    assert_null(k.name);
}

static void test_option_errors(void **state) {
    (void)state;
    struct {
        const char *words, *message;
    } cases[] = {
        {"--lora-rank 0", "'--lora-rank' cannot be 0: it must be 1 to 256"},
        {"--lora-rank=99999999999999999999", "cannot be 99999999999999999999: it must be 1 to 256"},
        {"--lora-rank 8x", "'--lora-rank' must be a whole number, not '8x'"},
        {"--lora-rank 1.5", "must be a whole number, not '1.5'"},
        {"--lora-rank=", "must be a whole number, not ''"},
        {"--seed 9223372036854775808", "does not fit 64 bits"},
        {"--lora-rank", "'--lora-rank' needs a value: R"},
        {"--lora-rank --verbose", "'--lora-rank' needs a value: R"},
        {"--name", "'--name' needs a value"},
        {"--learning-rate nan", "must be a number, not 'nan'"},
        {"--learning-rate 0x1", "must be a number, not '0x1'"},
        {"--learning-rate 1e999", "too large"},
        {"--learning-rate 2", "'--learning-rate' cannot be 2: it must be 0 to 1"},
        {"--packed=maybe", "'--packed' must be true or false, not 'maybe'"},
        {"--no-packed=1", "'--no-packed' takes no value"},
        {"--lora-rnak 3", "unknown flag '--lora-rnak', did you mean '--lora-rank'?"},
        {"--learning 3", "unknown flag '--learning', did you mean '--learning-rate'?"},
        {"--no-paked", "unknown flag '--no-paked', did you mean '--no-packed'?"},
        {"--no-name", "unknown flag '--no-name'"},
        {"--lr 2", "'--lr' cannot be 2: it must be 0 to 1"},
        {"--zebra=4", "unknown flag '--zebra'"},
        {"-v", "unknown flag '-v'"},
        {"--=3", "unknown flag '--'"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct option_values k;
        struct strings pos = {0};
        options_default(rows, &k);
        assert_int_equal(parse_words(&k, &pos, &err, cases[i].words), ERR_USAGE);
        assert_has(err.text, cases[i].message);
        strings_release(&pos);
        options_release(rows, &k);
    }
}

static void test_option_help(void **state) {
    (void)state;
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    options_help(rows, f);
    fclose(f);
    assert_has(text, "  --[no-]packed             pack samples\n");
    assert_has(text, "  --lora-rank R             rank of each adapter (1 to 256; default 8)\n");
    assert_has(text, "  --data FILE...            training files (default a.jsonl,b.jsonl)\n");
    assert_null(strstr(text, "dataset")); /* an alias */
    for (const char *line = text; *line; line = strchr(line, '\n') + 1)
        assert_true(strcspn(line, "\n") <= 79);
    free(text);
}

/* Loads `text` as a recipe and applies `section`; err gets the message, if any. */
static int recipe_apply(struct option_values *k, const char *text, const char *section,
                        struct error *err) {
    struct yaml y;
    int rc = yaml_load(&y, file_create("recipe.yaml", text), err);
    if (rc != OK) return rc;
    rc = options_from_yaml(rows, k, &y, section, err);
    yaml_release(&y);
    return rc;
}

static void test_option_recipe(void **state) {
    (void)state;
    struct error err = {0};
    struct option_values k;
    options_default(rows, &k);
    assert_int_equal(
        recipe_apply(
            &k,
            "train:\n  sft:\n    lora: {rank: 4}\n    learning-rate: 1\n    data: [x, 'y z']\n"
            "    packed: false\n    name: 鯉\n    seed: 1e6\n",
            "train.sft", &err),
        OK);
    assert_true(k.rank == 4 && k.learning_rate == 1 && k.data.n == 2 && !k.packed &&
                k.seed == 1000000);
    assert_string_equal(k.data.v[1], "y z");
    assert_string_equal(k.name, "鯉");
    assert_int_equal(recipe_apply(&k, "lora_rank: null\ndata: one\nname:\n", NULL, &err), OK);
    assert_true(k.rank == 8 && k.data.n == 1 && k.seed == 1000000);
    assert_string_equal(k.name, "koi");
    assert_int_equal(recipe_apply(&k, "other: {a: 1}\n", "train.sft", &err), OK);
    assert_int_equal(recipe_apply(&k, "train:\n", "train", &err), OK);
    assert_int_equal(recipe_apply(&k, "# nothing\n", NULL, &err), OK);
    options_release(rows, &k);
}

static void test_option_recipe_errors(void **state) {
    (void)state;
    struct {
        const char *text, *section, *message;
    } cases[] = {
        {"# a\nseed: 1\nlerning_rate: 1\n", NULL,
         "recipe.yaml', line 3: unknown key 'lerning_rate', did you mean 'learning_rate'?"},
        {"train:\n  lora:\n    rank: 4\n    wings: 2\n", "train",
         "line 4: unknown key 'lora_wings'"},
        {"train:\n  lora:\n    rank: 0\n", "train",
         "line 3: 'lora_rank' cannot be 0: it must be 1 to 256"},
        {"lora_rank: 4\nlora-rank: 5\n", NULL, "line 2: 'lora-rank' is given twice"},
        {"packed: yes\n", NULL, "line 1: 'packed' must be true or false, not 'yes'"},
        {"seed: 1.5\n", NULL, "'seed' must be a whole number, not a number"},
        {"name: 3\n", NULL, "'name' must be text, not a number (put it in quotes)"},
        {"data: [a, [b]]\n", NULL, "'data' must be text, not a list"},
        {"seed: {a: 1}\n", NULL, "'seed' must be a whole number, not a mapping"},
        {"a:\n  b: 3\n", "a.b", "line 2: 'a.b' must be a mapping of options"},
        {"- 1\n", NULL, "the document must be a mapping of options, not a list"},
        {"wings: {}\n", NULL, "unknown key 'wings'"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct option_values k;
        options_default(rows, &k);
        assert_int_equal(recipe_apply(&k, cases[i].text, cases[i].section, &err), ERR_USAGE);
        assert_has(err.text, cases[i].message);
        options_release(rows, &k);
    }
}

static void test_yaml_values(void **state) {
    (void)state;
    struct {
        const char *yaml, *json;
    } cases[] = {
        {"", "null"},
        {"---\n...\n", "null"},
        {"a: 1\nb: [2, -3, +4, 0x1F, 0o17, 007]\n", "{\"a\":1,\"b\":[2,-3,4,31,15,7]}"},
        {"- 1.5\n- .5\n- 1e3\n- -2.\n", "[1.5,0.5,1000.0,-2.0]"},
        {"- true\n- FALSE\n- ~\n- Null\n-\n", "[true,false,null,null,null]"},
        {"- 'true'\n- \"1\"\n- yes\n- on\n- 1_000\n- 1:30\n- 0x\n- 1e\n- .\n- +\n",
         "[\"true\",\"1\",\"yes\",\"on\",\"1_000\",\"1:30\",\"0x\",\"1e\",\".\",\"+\"]"},
        {"a: |\n  two\n  lines\nb: >-\n  one\n  line\n",
         "{\"a\":\"two\\nlines\\n\",\"b\":\"one line\"}"},
        {"\xEF\xBB\xBF鍵: 値\n", "{\"鍵\":\"値\"}"},
        {"- a: 1\n  b:\n  - {c: d}\n- []\n- {}\n", "[{\"a\":1,\"b\":[{\"c\":\"d\"}]},[],{}]"},
        {"1: x\n", "{\"1\":\"x\"}"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct yaml y;
        if (yaml_load(&y, file_create("v.yaml", cases[i].yaml), &err) != OK)
            fail_msg("case %zu: %s", i, err.text);
        char *text = json_canonical(y.root);
        assert_string_equal(text, cases[i].json);
        free(text);
        yaml_release(&y);
    }
}

static void test_yaml_lines(void **state) {
    (void)state;
    struct error err = {0};
    struct yaml y;
    const char *path =
        file_create("lines.yaml", "a:\n  b:\n  - x\n  - c: 1\n    d: {e: 2}\n\nf: 3\n");
    assert_int_equal(yaml_load(&y, path, &err), OK);
    assert_string_equal(y.path, path);
    assert_int_equal(yaml_line(&y, "a"), 1);
    assert_int_equal(yaml_line(&y, "a.b.0"), 3);
    assert_int_equal(yaml_line(&y, "a.b.1.c"), 4);
    assert_int_equal(yaml_line(&y, "a.b.1.d.e"), 5);
    assert_int_equal(yaml_line(&y, "f"), 7);
    assert_int_equal(yaml_line(&y, "g"), 0);
    yaml_release(&y);
    yaml_release(&y);
}

static void test_yaml_errors(void **state) {
    (void)state;
    struct {
        const char *yaml, *message;
    } cases[] = {
        {"a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is given twice"},
        {"a: &x 1\n", "line 1: anchors and aliases"},
        {"a: 1\nb: *x\n", "line 2: anchors and aliases"},
        {"a: !!str 1\n", "line 1: tags"},
        {"a: 1\n---\nb: 1\n", "line 2: a second document"},
        {"a: [1, 2\nb: 3\n", "bad.yaml', line 2, column "},
        {"a: 1\n\tb: 2\n", "bad.yaml', line 2, column 1: "},
        {"? [a]\n: 1\n", "line 1: a key must be a word"},
        {"a: .inf\n", "line 1: '.inf' is not a finite number"},
        {"a: 9223372036854775808\n", "line 1: '9223372036854775808' does not fit"},
        {"a: 1e999\n", "line 1: '1e999' is too large"},
        {"a: \"\\0\"\n", "line 1: '' holds a NUL"},
        {"a: \xff\n", "bad.yaml', byte 3: "},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct yaml y;
        assert_int_equal(yaml_load(&y, file_create("bad.yaml", cases[i].yaml), &err), ERR_FORMAT);
        assert_has(err.text, cases[i].message);
        assert_null(y.root);
    }
    struct buf deep = {0};
    for (int i = 0; i < 100; i++) buf_puts(&deep, "[");
    for (int i = 0; i < 100; i++) buf_puts(&deep, "]");
    struct error err = {0};
    struct yaml y;
    assert_int_equal(yaml_load(&y, file_create("deep.yaml", deep.data), &err), ERR_FORMAT);
    assert_has(err.text, "too deeply");
    assert_int_equal(yaml_load(&y, scratch_path("none.yaml"), &err), ERR_MISSING);
    buf_release(&deep);
}

static void test_json_parse(void **state) {
    (void)state;
    struct error err = {0};
    const char *text = "\xEF\xBB\xBF {\"b\": [1, 2.5, \"\\u9b5a\"], \"a\": null}\r\n";
    json_t *v = json_parse(text, strlen(text), "t", &err);
    assert_non_null(v);
    char *canonical = json_canonical(v);
    assert_string_equal(canonical, "{\"a\":null,\"b\":[1,2.5,\"魚\"]}");
    free(canonical);
    json_decref(v);
    v = json_parse_file(file_create("v.json", "[9223372036854775807]"), &err);
    assert_int_equal(json_integer_value(json_array_get(v, 0)), INT64_MAX);
    json_decref(v);
    assert_null(json_parse_file(scratch_path("none.json"), &err));
    assert_int_equal(err.code, ERR_MISSING);
}

static void test_json_errors(void **state) {
    (void)state;
    struct {
        const char *text, *message;
    } cases[] = {
        {"", "'t' is empty"},
        {" \n ", "'t' is empty"},
        {"{\n \"a\": 1,\n}", "'t', line 3, column 1: "},
        {"{\"a\":1,\"a\":2}", "duplicate object key"},
        {"{} {}", "'t', line 1, column 4: the JSON value has ended"},
        {"[1,]", "'t', line 1, column 4: "},
        {"\"\xff\"", "'t', line 1"},
        {"nul", "invalid token"},
        {"[9223372036854775808]", "too big integer"},
        {"\n\n   [1", "'t', line 3, column 5: "},
        {"[\"a\\u0000\"]", "'t', line 1, column 10: a string holds the character U+0000"},
        {"{\"a\\u0000\":1}", "U+0000"},
        {"[\"\\ud800\"]", "half of a surrogate pair"},
        {"[\"\\ud800\\u0041\"]", "half of a surrogate pair"},
        {"[\"\\udc00\"]", "half of a surrogate pair"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        assert_null(json_parse(cases[i].text, strlen(cases[i].text), "t", &err));
        assert_int_equal(err.code, ERR_FORMAT);
        assert_has(err.text, cases[i].message);
        assert_null(strstr(err.text, "JSON_"));
    }
    struct buf deep = {0};
    struct error err = {0};
    for (int i = 0; i < 3000; i++) buf_puts(&deep, "[");
    assert_null(json_parse(deep.data, deep.len, "t", &err));
    assert_has(err.text, "nested more than 2048 deep");
    buf_release(&deep);
}

/* A refused document does not change the remaining budget; a parsed one uses its cost. */
static void test_json_bounded(void **state) {
    static const char nested[] = "[{\"a\":[\"[[[[[\"]}]", flat[] = "[1,1,1,1,1,1,1,1,1,1]",
                      twice[] = "{\"a\":1,\"a\":2}";
    (void)state;
    struct error err = {0};
    size_t whole = json_parse_memory(nested, strlen(nested)),
           flat_cost = json_parse_memory(flat, strlen(flat));
    struct json_limits left = {.depth = 3, .cost = whole};
    json_t *v = json_parse_limited(nested, strlen(nested), "t", &left, &err);
    assert_non_null(v);
    json_decref(v);
    assert_int_equal(left.cost, 0);
    left = (struct json_limits){.depth = 2, .cost = flat_cost + 10};
    assert_null(json_parse_limited(nested, strlen(nested), "t", &left, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_has(err.text, "the JSON of 't' is nested more than 2 deep");
    v = json_parse_limited(flat, strlen(flat), "t", &left, &err);
    assert_non_null(v);
    json_decref(v);
    assert_int_equal(left.cost, 10);
    assert_null(json_parse_limited(flat, strlen(flat), "t", &left, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_has(err.text, "too many values");
    assert_int_equal(left.cost, 10);
    left = json_request_limits;
    assert_null(json_parse_limited(twice, strlen(twice), "t", &left, &err));
    left.allow_duplicate_keys = true;
    v = json_parse_limited(twice, strlen(twice), "t", &left, &err);
    assert_int_equal(json_get_number(v, "a"), 2);
    json_decref(v);
}

struct visits {
    struct buf seen; /* "LINE:JSON;" for each value */
    int stop_after, n;
};

static int visit(void *ctx, const json_t *value, int line, struct error *err) {
    struct visits *s = ctx;
    char *text = json_canonical(value);
    buf_printf(&s->seen, "%d:%s;", line, text);
    free(text);
    if (++s->n == s->stop_after) return error_set(err, ERR_STATE, "enough");
    return OK;
}

static void test_json_each(void **state) {
    (void)state;
    struct {
        const char *text, *seen;
    } cases[] = {
        {"", ""},
        {"\xEF\xBB\xBF\n \n", ""},
        {"{\"a\":\"鯉 [\"}\n\n{\"a\":\"泳ぐ }\"}\r\n", "1:{\"a\":\"鯉 [\"};3:{\"a\":\"泳ぐ }\"};"},
        {"{\n  \"a\": 1\n}\n{\n  \"b\": [\n 2]\n}\n", "1:{\"a\":1};4:{\"b\":[2]};"},
        {"\xEF\xBB\xBF[\n {\"a\": 1},\n\n {\"b\": \"]\\\"\"}\n]\n",
         "2:{\"a\":1};4:{\"b\":\"]\\\"\"};"},
        {"[]", ""},
        {"[1, 2,\n3]", "1:1;1:2;2:3;"},
        {"[1,2]\n[3]\n", "1:[1,2];2:[3];"},
        {"1 2\n\"x\"", "1:1;1:2;2:\"x\";"},
        {"{}{}", "1:{};1:{};"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct visits s = {0};
        buf_puts(&s.seen, "");
        int rc = json_file_each(file_create("each.json", cases[i].text), visit, &s, &err);
        if (rc != OK) fail_msg("case %zu: %s", i, err.text);
        assert_string_equal(s.seen.data, cases[i].seen);
        buf_release(&s.seen);
    }
}

static void test_json_each_errors(void **state) {
    (void)state;
    struct {
        const char *text, *message;
        int n;
    } cases[] = {
        {"{\"a\":1}\n{\"a\":2\n{\"a\":3}\n", "each.json', line 3, column 1: '}' expected near '{'",
         1},
        {"{\"a\":1}\n{\"a\":2\n{\"a\":3}\n", "(in the value that begins on line 2)", 1},
        {"{\"a\":1},\n{\"a\":2}\n", "line 1, column 8: ", 1},
        {"[1,\n2,\n]", "line 3, column 1: a value is expected after ','", 2},
        {"[1\n2]", "line 2, column 1: ',' or ']' is expected", 1},
        {"[1, 2", "line 1, column 6: the array is not closed", 0},
        {"[1, 2 ", "line 1, column 7: the array is not closed", 0},
        {"[1,", "line 1, column 4: the array is not closed", 1},
        {"{\"a\":\n \"鯉\" x}", "line 2, column ", 0},
        {"{\"a\":1,\"a\":1}", "duplicate object key", 0},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct error err = {0};
        struct visits s = {0};
        assert_int_equal(json_file_each(file_create("each.json", cases[i].text), visit, &s, &err),
                         ERR_FORMAT);
        assert_has(err.text, cases[i].message);
        if (cases[i].n) assert_int_equal(s.n, cases[i].n);
        buf_release(&s.seen);
    }
    struct error err = {0};
    struct visits s = {.stop_after = 2};
    assert_int_equal(json_file_each(file_create("each.json", "1\n2\n3\n"), visit, &s, &err),
                     ERR_STATE);
    assert_int_equal(s.n, 2);
    assert_string_equal(err.text, "enough");
    assert_int_equal(json_file_each(scratch_path("none"), visit, &s, &err), ERR_MISSING);
    buf_release(&s.seen);
}

/* A column of a table has the same width with kana and kanji in it. */
static void test_columns(void **state) {
    (void)state;
    assert_int_equal(utf8_field_width("abc", 8), 8);
    assert_int_equal(utf8_field_width("批判", 8), 10); // 6 bytes, 4 columns
    assert_int_equal(utf8_field_width("é", 8), 9);     // 2 bytes, 1 column
    assert_int_equal(utf8_field_width("", 8), 8);
}

/* memory */

/* Runs in a process that may map 64 MB more. The first failed allocation frees the reserve, which
 * is allocated again when there is memory; a failed allocation without the reserve ends the
 * process. */
static int reserve_child(void) {
    enum { MB = 1 << 20 };
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (!f || fscanf(f, "%lu", &pages) != 1) return 10;
    fclose(f);
    rlim_t limit = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + 64 * MB;
    if (setrlimit(RLIMIT_AS, &(struct rlimit){limit, limit}) != 0) return 11;
    memory_reserve_set(16 * MB);
    if (memory_is_low()) return 12;
    char *large = malloc(40 * MB);
    struct error err;
    if (!large || try_calloc(1, 14 * MB, &err) || err.code != ERR_MEMORY) return 13;
    char *after = xmalloc(14 * MB); // fits only into the memory of the reserve
    after[0] = 1;
    if (!memory_is_low()) return 14;
    free(large);
    if (memory_is_low()) return 15;
    free(after);
    if (!freopen("/dev/null", "w", stderr)) return 16;
    free(xmalloc(200 * MB)); // never fits: exit status 1
    return 17;
}

static void test_memory_reserve(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("skip: a sanitizer maps additional memory\n");
    return;
#endif
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) _exit(reserve_child());
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
}

int main(void) {
    log_to_stderr = true;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_error_long),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_buf),
        cmocka_unit_test(test_read_and_map),
        cmocka_unit_test(test_atomic_write),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_regular_files_only),
        cmocka_unit_test(test_private),
        cmocka_unit_test(test_protect),
        cmocka_unit_test(test_leftovers),
        cmocka_unit_test(test_leftover_of_killed_process),
        cmocka_unit_test(test_lock),
        cmocka_unit_test(test_mapped_file_shrinks),
        cmocka_unit_test(test_error_reasons),
        cmocka_unit_test(test_memory_info),
        cmocka_unit_test(test_energy),
        cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_sha256_in_parts),
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_rng_fill),
        cmocka_unit_test(test_rng_skip),
        cmocka_unit_test(test_rng_streams),
        cmocka_unit_test(test_rng_distributions),
        cmocka_unit_test(test_math_accuracy),
        cmocka_unit_test(test_math_edges),
        cmocka_unit_test(test_math_bits),
        cmocka_unit_test(test_pool_ranges),
        cmocka_unit_test(test_pool_stress),
        cmocka_unit_test(test_pool_contract),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_columns),
        cmocka_unit_test(test_endings),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_progress_terminal),
        cmocka_unit_test(test_terminal),
        cmocka_unit_test(test_messages_in_files),
        cmocka_unit_test(test_files_are_not_filtered),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_option_errors),
        cmocka_unit_test(test_option_help),
        cmocka_unit_test(test_option_recipe),
        cmocka_unit_test(test_option_recipe_errors),
        cmocka_unit_test(test_yaml_values),
        cmocka_unit_test(test_yaml_lines),
        cmocka_unit_test(test_yaml_errors),
        cmocka_unit_test(test_json_parse),
        cmocka_unit_test(test_memory_reserve),
        cmocka_unit_test(test_json_errors),
        cmocka_unit_test(test_json_bounded),
        cmocka_unit_test(test_json_each),
        cmocka_unit_test(test_json_each_errors),
        cmocka_unit_test(test_energy_now), // last: it starts a thread
    };
    return cmocka_run_group_tests(tests, scratch_create, scratch_remove);
}
