/*
 * builtin_files: the tools read_file and list_files, which read below one folder.
 *
 * openat2 with RESOLVE_BENEATH resolves every path, so the kernel itself keeps '..', symbolic links
 * and renames during the call inside of the folder. A kernel without openat2 gets no other way: the
 * tools then refuse. Only regular files are read, and opening a pipe or device never blocks.
 */
#define _GNU_SOURCE
#include "agent/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unistr.h>

enum { MAX_LISTED = 500, MAX_ENTRIES = 100000 /* limit of a folder's entries */ };

struct root {
    int fd;
};

static int root_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    if (path_access_hook && path_access_hook(o->root, PATH_USE_READ, err)) return err->code;
    int fd = open(o->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return error_errno(err, "cannot open folder '%s'", o->root);
    struct root *r = *ctx = xcalloc(1, sizeof *r);
    r->fd = fd;
    return OK;
}

static void root_release(void *ctx) {
    struct root *r = ctx;
    if (r) close(r->fd);
    free(r);
}

/* paths */

static bool path_has_parent(const char *path) {
    for (const char *p = path; p; p = strchr(p, '/')) {
        p += *p == '/';
        if (strncmp(p, "..", 2) == 0 && (!p[2] || p[2] == '/')) return true;
    }
    return false;
}

static int open_error(const char *path, struct error *err) {
    if (errno == ENOSYS || errno == EPERM)
        return error_set(err, ERR_STATE,
                         "this machine's kernel cannot keep a path inside of a folder (openat2)");
    if (errno == EXDEV || errno == ELOOP)
        return error_set(err, ERR_USAGE, "'%.500s' is a link that leads out of the folder", path);
    return error_errno(err, "cannot open '%.500s'", path);
}

/* Opens a path of the model for reading and fills *st; a descriptor, or an error. */
static int open_below(const struct root *r, const char *path, int flags, struct stat *st,
                      struct error *err) {
    const struct open_how how = {
        .flags = (uint64_t)(O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | flags),
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    if (!*path) path = ".";
    if (*path == '/' || path_has_parent(path))
        return error_set(err, ERR_USAGE,
                         "'%.500s' is not below the folder; give a path such as 'notes/a.txt', "
                         "without '..' and without '/' at its beginning",
                         path);
    int fd = (int)syscall(SYS_openat2, r->fd, path, &how, sizeof how);
    if (fd < 0) return open_error(path, err);
    if (fstat(fd, st) == 0) return fd;
    error_errno(err, "cannot open '%.500s'", path);
    close(fd);
    return err->code;
}

/* read_file */

/* Reads one byte more than a result may have, so that the caller knows whether more follows. */
static int read_start(int fd, const char *path, struct buf *out, struct error *err) {
    enum { LIMIT = AGENT_MAX_RESULT + 1 };
    buf_reserve(out, LIMIT, NULL);
    while (out->len < LIMIT) {
        ssize_t n = read(fd, out->data + out->len, LIMIT - out->len);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_errno(err, "cannot read '%.500s'", path);
        if (n == 0) break;
        out->len += (size_t)n;
    }
    out->data[out->len] = '\0';
    return OK;
}

static int text_check(const struct buf *text, const char *path, struct error *err) {
    size_t len =
        text->len > AGENT_MAX_RESULT ? utf8_complete_len(text->data, text->len) : text->len;
    if (!memchr(text->data, 0, len) && !u8_check((const uint8_t *)text->data, len)) return OK;
    return error_set(err, ERR_FORMAT, "'%.500s' is not a text file in UTF-8", path);
}

static int read_file_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    const char *path = json_get_string(arguments, "path");
    struct buf text = {0};
    struct stat st;
    int fd = open_below(ctx, path, 0, &st, err), rc = OK;
    if (fd < 0) return fd;
    if (S_ISDIR(st.st_mode))
        rc = error_set(err, ERR_USAGE, "'%.500s' is a folder; list_files shows its files", path);
    else if (!S_ISREG(st.st_mode))
        rc = error_set(err, ERR_USAGE, "'%.500s' is not a regular file", path);
    if (!rc) rc = read_start(fd, path, &text, err);
    close(fd);
    if (!rc) rc = text_check(&text, path, err);
    if (!rc && !text.len) buf_puts(out, "(the file is empty)");
    if (!rc) buf_add(out, text.data, text.len);
    buf_release(&text);
    return rc;
}

const struct tool_kind read_file_kind = {
    .need = NEEDS_ROOT,
    .arguments = {{"path", "path of the file, such as notes/a.txt", 500}},
    .open = root_open,
    .call = read_file_call,
    .release = root_release};

/* list_files */

/* A line break in a name must not look like two names. */
static void names_add(struct strings *names, int dir, const char *name) {
    struct stat st;
    bool is_folder = fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
    char *line = xasprintf("%s%s", name, is_folder ? "/" : "");
    for (char *p = line; *p; p++)
        if ((unsigned char)*p < 0x20) *p = '?';
    strings_add(names, line);
    free(line);
}

static int names_read(DIR *dir, struct strings *names, struct error *err) {
    for (struct dirent *e; (errno = 0, e = readdir(dir));) {
        if (e->d_name[0] == '.') continue;
        if (names->n == MAX_ENTRIES)
            return error_set(err, ERR_MEMORY, "the folder has more than %d entries", MAX_ENTRIES);
        names_add(names, dirfd(dir), e->d_name);
    }
    return errno ? error_errno(err, "cannot read the folder") : OK;
}

static int list_files_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct strings names = {0};
    struct stat st;
    int fd = open_below(ctx, json_get_string(arguments, "path"), O_DIRECTORY, &st, err);
    if (fd < 0) return fd;
    DIR *dir = fdopendir(fd);
    CHECK(dir != NULL);
    int rc = names_read(dir, &names, err);
    closedir(dir);
    strings_sort(&names);
    for (int i = 0; !rc && i < MIN(names.n, MAX_LISTED); i++)
        buf_printf(out, "%s%s", i ? "\n" : "", names.v[i]);
    if (!rc && names.n > MAX_LISTED) buf_printf(out, "\n… (%d more)", names.n - MAX_LISTED);
    if (!rc && !names.n) buf_puts(out, "(the folder is empty)");
    strings_release(&names);
    return rc;
}

const struct tool_kind list_files_kind = {
    .need = NEEDS_ROOT,
    .arguments = {{"path", "path of the folder; . is the top folder", 500}},
    .open = root_open,
    .call = list_files_call,
    .release = root_release};
