/*
 * memory_info: the memory available to this process, according to the machine, the control groups
 * (versions 2 and 1) that the process is in and its limit on the address space; and huge pages.
 *
 * Swap does not count.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* The number at the beginning of the first line with the prefix `key`, after that prefix; with
 * NULL, the number at the beginning of the file. -1 if it is missing, negative or "max". */
static int64_t file_read_number(const char *path, const char *key) {
    char line[512];
    int64_t value = -1;
    FILE *f = fopen(path, "re");
    while (f && value < 0 && fgets(line, sizeof line, f)) {
        size_t n = key ? strlen(key) : 0;
        if (key && strncmp(line, key, n) != 0) continue;
        char *end, *text = line + n + strspn(line + n, ": \t");
        long long v = strtoll(text, &end, 10);
        if (end != text && v >= 0) value = v;
        if (!key) break;
    }
    if (f) fclose(f);
    return value;
}

static int64_t dir_read_number(const char *folder, const char *name, const char *key) {
    char *path = path_join(folder, name);
    int64_t v = file_read_number(path, key);
    free(path);
    return v;
}

/* Lowers `m` to the limit of one group, unless it is not below the machine's memory (-1: not
 * known): a group above with a larger limit may have less memory left, because other groups use it
 * too. Pages of the file cache that were not used recently (inactive_file) count as free: the
 * kernel drops them first. */
static void cgroup_apply_limit(const char *folder, bool v2, int64_t machine,
                               struct memory_info *m) {
    int64_t limit = dir_read_number(folder, v2 ? "memory.max" : "memory.limit_in_bytes", NULL),
            used = dir_read_number(folder, v2 ? "memory.current" : "memory.usage_in_bytes", NULL),
            cached = dir_read_number(folder, "memory.stat",
                                     v2 ? "inactive_file " : "total_inactive_file ");
    if (limit < 0 || (machine >= 0 && limit >= machine)) return;
    m->total = m->total < 0 ? limit : MIN(m->total, limit);
    if (used < 0) return;
    int64_t free_bytes = MAX(limit - MAX(used - MAX(cached, 0), 0), 0);
    m->available = m->available < 0 ? free_bytes : MIN(m->available, free_bytes);
}

/* Applies the limits of the group `path` and of all groups above it, which hold for it too. Changes
 * `path`. In a container, `path` may be the group's path on the host, which does not exist under
 * `top`; then only the limit of `top` itself is found. */
static void cgroup_apply_ancestors(const char *top, char *path, bool v2, struct memory_info *m) {
    int64_t machine = m->total;
    path[strcspn(path, "\n")] = '\0';
    for (;;) {
        char *folder = xasprintf("%s%s", top, path), *slash = strrchr(path, '/');
        cgroup_apply_limit(folder, v2, machine, m);
        free(folder);
        if (!slash) return;
        *slash = '\0';
    }
}

/* Whether the text from `list` to `end`, such as "cpu,memory", contains the controller "memory". */
static bool has_controller(const char *list, const char *end) {
    for (const char *p = list; p < end; p += strcspn(p, ",:") + 1)
        if (strcspn(p, ",:") == 6 && strncmp(p, "memory", 6) == 0) return true;
    return false;
}

/* Reads the kernel's setting of transparent huge pages: the word in brackets of a line such as
 * "always [madvise] never"; "unknown" if there is none. */
static void huge_pages_read(const char *root, char out[16]) {
    char *path = path_join(root, "sys/kernel/mm/transparent_hugepage/enabled"), line[64] = "";
    FILE *f = fopen(path, "re");
    const char *chosen = f && fgets(line, sizeof line, f) ? strchr(line, '[') : NULL;
    if (!chosen || sscanf(chosen, "[%15[^]]", out) != 1) snprintf(out, 16, "unknown");
    if (f) fclose(f);
    free(path);
}

void memory_prefer_huge(void *p, size_t size) {
    enum { HUGE_PAGE = 2 << 20 };
    uintptr_t begin = ((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE,
              end = ((uintptr_t)p + size) / HUGE_PAGE * HUGE_PAGE;
    if (size < 2 * HUGE_PAGE || begin >= end) return;
    madvise((void *)begin, end - begin, MADV_HUGEPAGE); // advice: may fail
}

/* The limit on the address space (ulimit -v). */
static void address_space_apply_limit(struct memory_info *m) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur > INT64_MAX) return;
    int64_t most = (int64_t)limit.rlim_cur,
            left = MAX(most - (int64_t)process_memory("VmSize"), (int64_t)0);
    if (m->total < 0 || most < m->total) m->total = most;
    if (m->available < 0 || left < m->available) m->available = left;
}

struct memory_info memory_info(const char *root) {
    char *meminfo = path_join(root, "proc/meminfo"),
         *cgroup_file = path_join(root, "proc/self/cgroup"), *v2 = path_join(root, "sys/fs/cgroup"),
         *v1 = path_join(root, "sys/fs/cgroup/memory"), line[4096];
    int64_t total = file_read_number(meminfo, "MemTotal"),
            available = file_read_number(meminfo, "MemAvailable");
    struct memory_info m = {total < 0 ? -1 : total << 10, available < 0 ? -1 : available << 10};
    FILE *cgroups = fopen(cgroup_file, "re");
    while (cgroups && fgets(line, sizeof line, cgroups)) { /* "0::/path" or "4:memory:/path" */
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (path && path == list + 1)
            cgroup_apply_ancestors(v2, path + 1, true, &m);
        else if (path && has_controller(list + 1, path))
            cgroup_apply_ancestors(v1, path + 1, false, &m);
    }
    if (cgroups) fclose(cgroups);
    address_space_apply_limit(&m);
    huge_pages_read(root, m.huge_pages);
    free(meminfo);
    free(cgroup_file);
    free(v2);
    free(v1);
    return m;
}

size_t memory_usable(void) {
    enum { LEFT_BYTES = 128 << 20 };
    int64_t available = memory_info("/").available;
    if (available < 0) return SIZE_MAX / 2;
    return (size_t)MAX(available - available / 16 - LEFT_BYTES, 1);
}
