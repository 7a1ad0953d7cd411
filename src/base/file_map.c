/*
 * file_map: maps or copies files into memory, and handles a mapped file that shrinks.
 *
 * A page of a mapping beyond the file's new end cannot be read: the kernel sends SIGBUS.
 * file_map_catch_sigbus() turns that into a message with the file's name and exit 1. The handler
 * finds the file in a table of all mappings, which needs no lock: a slot is free, being filled, or
 * ready, and only a ready one is read. Faults at other addresses are passed to the previous SIGBUS
 * action.
 *
 * The handler does not notice that another process writes within the file's old size.
 * file_map_check_unchanged() compares sizes and modification times, so that a caller can notice a
 * change before a fault.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_READY };

/* `path` is empty if it was too long to store. */
static struct mapped_range {
    atomic_int state;
    uintptr_t begin;
    size_t size;
    dev_t dev;
    ino_t ino;
    struct timespec mtime;
    char path[512];
} slots[256];

static struct sigaction previous_action;

/* When the table is full, the mapping is not registered: a fault in it keeps the previous action,
 * and changes of its file are not noticed. */
static void file_map_register(const void *p, const struct stat *st, const char *path) {
    for (size_t i = 0; i < ARRAY_LEN(slots); i++) {
        struct mapped_range *s = &slots[i];
        int expected = SLOT_FREE;
        if (!atomic_compare_exchange_strong(&s->state, &expected, SLOT_FILLING)) continue;
        s->begin = (uintptr_t)p;
        s->size = (size_t)st->st_size;
        s->dev = st->st_dev;
        s->ino = st->st_ino;
        s->mtime = st->st_mtim;
        size_t n = strlen(path);
        memcpy(s->path, path, n < sizeof s->path ? n + 1 : 0);
        if (n >= sizeof s->path) s->path[0] = '\0';
        atomic_store(&s->state, SLOT_READY);
        return;
    }
}

static void slot_release(const void *p) {
    for (size_t i = 0; i < ARRAY_LEN(slots); i++)
        if (atomic_load(&slots[i].state) == SLOT_READY && slots[i].begin == (uintptr_t)p)
            atomic_store(&slots[i].state, SLOT_FREE);
}

static const struct mapped_range *slot_find(uintptr_t address) {
    for (size_t i = 0; i < ARRAY_LEN(slots); i++)
        if (atomic_load(&slots[i].state) == SLOT_READY && address >= slots[i].begin &&
            address - slots[i].begin < slots[i].size)
            return &slots[i];
    return NULL;
}

/* Called in a signal handler, so it must not allocate or lock. */
static void print_signal_safe(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void sigbus_handler(int sig, siginfo_t *info, void *context) {
    struct stat st;
    const struct mapped_range *s =
        info->si_code == BUS_ADRERR ? slot_find((uintptr_t)info->si_addr) : NULL;
    (void)context;
    if (!s) { /* after the return the access is repeated, and the previous action handles it */
        sigaction(SIGBUS, &previous_action, NULL);
        if (info->si_code <= 0) raise(sig); /* a sent signal: no access will repeat it */
        return;
    }
    bool shorter = stat(s->path, &st) != 0 || (size_t)st.st_size < s->size;
    print_signal_safe("shoal: '");
    print_signal_safe(*s->path ? s->path : "a mapped file");
    print_signal_safe(shorter ? "' became shorter while it was in use; start again\n"
                              : "' cannot be read any more: input/output error\n");
    _exit(1);
}

void file_map_catch_sigbus(void) {
    struct sigaction a = {.sa_sigaction = sigbus_handler, .sa_flags = SA_SIGINFO};
    sigemptyset(&a.sa_mask);
    CHECK(sigaction(SIGBUS, &a, &previous_action) == 0);
}

/* Whether the file at the slot's path is the mapped one, with another size or time. A different
 * file with that name does not count: the mapped one still exists without a name. */
static bool slot_changed(const struct mapped_range *s) {
    struct stat st;
    return atomic_load(&s->state) == SLOT_READY && *s->path && stat(s->path, &st) == 0 &&
           st.st_dev == s->dev && st.st_ino == s->ino &&
           ((size_t)st.st_size != s->size || st.st_mtim.tv_sec != s->mtime.tv_sec ||
            st.st_mtim.tv_nsec != s->mtime.tv_nsec);
}

int file_map_check_unchanged(struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(slots); i++)
        if (slot_changed(&slots[i]))
            return error_set(err, ERR_STATE, "'%s' was changed while it was in use; start again",
                             slots[i].path);
    return OK;
}

int file_map_open(struct file_map *m, const char *path, struct error *err) {
    *m = (struct file_map){0};
    struct stat st;
    int fd = file_open_regular(path, &st, err);
    if (fd < 0) return fd;
    int rc = OK;
    const void *p = ""; /* the address of an empty file, which cannot be mapped */
    if (st.st_size > 0) {
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = error_errno(err, "cannot map '%s'", path);
        else
            file_map_register(p, &st, path);
    }
    close(fd);
    if (rc == OK) *m = (struct file_map){.data = p, .size = (size_t)st.st_size};
    return rc;
}

/* Reads exactly `size` bytes; a file that has become shorter is an error. */
static int read_fully(int fd, uint8_t *to, size_t size, const char *path, struct error *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = read(fd, to + done, size - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_errno(err, "cannot read '%s'", path);
        if (n == 0) return error_set(err, ERR_IO, "'%s' became shorter while it was read", path);
        done += (size_t)n;
    }
    return OK;
}

int file_map_open_copy(struct file_map *m, const char *path, struct error *err) {
    *m = (struct file_map){0};
    struct stat st;
    int fd = file_open_regular(path, &st, err);
    if (fd < 0) return fd;
    size_t size = (size_t)st.st_size;
    int rc = OK;
    if (!(m->copy = try_calloc(size + 1, 1, err))) {
        rc = error_wrap(err, "'%s'", path);
    } else {
        rc = read_fully(fd, m->copy, size, path, err);
        m->data = m->copy;
        m->size = size;
    }
    close(fd);
    if (rc != OK) file_map_close(m);
    return rc;
}

void file_map_close(struct file_map *m) {
    if (m->copy) {
        free(m->copy);
    } else if (m->size) {
        slot_release(m->data);
        munmap((void *)(uintptr_t)m->data, m->size);
    }
    *m = (struct file_map){0};
}

void file_map_evict(const void *p, size_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)p + page - 1,
              end = (uintptr_t)p + size;
    begin -= begin % page;
    end -= end % page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED); // advice: may fail
}
