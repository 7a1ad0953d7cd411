/* paths: rules for canonical paths. See jobs.h. */
#define _GNU_SOURCE
#include "jobs/jobs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

/* Like realpath for a path that need not exist: resolves the longest part that exists and appends
 * the rest. NULL: the rest contains "..". */
static char *canonical_path(const char *path) {
    char *real = realpath(path, NULL);
    if (real || (errno != ENOENT && errno != ENOTDIR) || !*path) return real;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t last_start = n;
    while (last_start && path[last_start - 1] != '/') last_start--;
    char *last = strndup(path + last_start, n - last_start),
         *dir = strndup(path, last_start ? last_start : 1), *joined = NULL;
    bool is_name = *last && strcmp(last, ".") != 0 && strcmp(last, "..") != 0;
    char *parent = is_name && last_start != n ? canonical_path(last_start ? dir : ".") : NULL;
    if (parent) joined = path_join(parent, last);
    free(parent);
    free(last);
    free(dir);
    return joined;
}

void job_paths_add(struct job_paths *p, const char *path, enum path_access access) {
    char *real = path && *path ? canonical_path(path) : NULL;
    if (!real) return;
    for (int i = 0; i < p->n; i++) {
        if (strcmp(p->v[i].path, real) != 0) continue;
        p->v[i].access = access;
        free(real);
        return;
    }
    p->v = xrealloc(p->v, sizeof *p->v * (size_t)(p->n + 1));
    p->v[p->n++] = (struct path_rule){real, access};
}

void job_paths_release(struct job_paths *p) {
    for (int i = 0; i < p->n; i++) free(p->v[i].path);
    free(p->v);
    *p = (struct job_paths){0};
}

json_t *job_paths_json(const struct job_paths *p) {
    json_t *v = json_array();
    for (int i = 0; i < p->n; i++)
        json_array_append_new(
            v, json_pack("[o,i]", json_from_path(p->v[i].path), (int)p->v[i].access));
    return v;
}

int job_paths_parse(struct job_paths *p, const json_t *v, struct error *err) {
    const json_t *rule;
    size_t i;
    *p = (struct job_paths){0};
    json_array_foreach (v, i, rule) {
        const char *path = json_string_value(json_array_get(rule, 0));
        json_int_t access = json_integer_value(json_array_get(rule, 1));
        if (!path || *path != '/' || access < PATH_DENIED || access > PATH_WRITE)
            return error_set(err, ERR_FORMAT, "invalid rule for paths");
        job_paths_add(p, path, (enum path_access)access);
    }
    return OK;
}

/* The part of a canonical path below a folder; "": it is the folder; NULL: it is not below the
 * folder. */
static const char *relative_path(const char *path, const char *folder) {
    size_t n = strlen(folder);
    if (n == 1) return path + 1; /* "/" */
    if (strncmp(path, folder, n) != 0 || (path[n] && path[n] != '/')) return NULL;
    return path[n] ? path + n + 1 : "";
}

static const struct path_rule *rule_find(const struct job_paths *p, const char *path) {
    const struct path_rule *deepest = NULL;
    for (int i = 0; i < p->n; i++)
        if (relative_path(path, p->v[i].path) &&
            (!deepest || strlen(p->v[i].path) > strlen(deepest->path)))
            deepest = &p->v[i];
    return deepest;
}

/* Hidden names that this program creates: versions of an adapter, the record of a pull; and, where
 * jobs may write, the state of a sleep. */
static bool is_created_by_program(const char *name, size_t n, enum path_access access) {
    static const struct {
        const char *name;
        bool only_where_written;
    } names[] = {
        {".versions", false}, {".hub.json", false}, {".hub.lock", false}, {".sleep", true}};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strlen(names[i].name) == n && strncmp(name, names[i].name, n) == 0)
            return access == PATH_WRITE || !names[i].only_where_written;
    return false;
}

/* Whether a path below the folder of a rule has a hidden part. */
static bool has_hidden(const struct path_rule *rule, const char *real) {
    const char *rest = relative_path(real, rule->path);
    while (*rest) {
        size_t n = strcspn(rest, "/");
        if (*rest == '.' && !is_created_by_program(rest, n, rule->access)) return true;
        rest += n + (rest[n] == '/');
    }
    return false;
}

static bool has_extension(const char *path, const char *const *extensions, size_t n_extensions) {
    size_t n = strlen(path);
    for (size_t i = 0; i < n_extensions; i++) {
        size_t m = strlen(extensions[i]);
        if (n > m && path[n - m - 1] != '/' && strcasecmp(path + n - m, extensions[i]) == 0)
            return true;
    }
    return false;
}

static bool is_database_name(const char *path) {
    static const char *const extensions[] = {".db",         ".db-wal",        ".db-shm",
                                             ".db-journal", ".sqlite",        ".sqlite-wal",
                                             ".sqlite-shm", ".sqlite-journal"};
    return has_extension(path, extensions, ARRAY_LEN(extensions));
}

/* Data, texts, recipes, models and the files that accompany them. */
static bool is_input_name(const char *path) {
    static const char *const extensions[] = {
        ".jsonl", ".ndjson", ".json", ".csv", ".tsv",         ".txt",   ".text",  ".md",
        ".yaml",  ".yml",    ".gguf", ".bin", ".safetensors", ".model", ".jinja", ".gbnf"};
    return has_extension(path, extensions, ARRAY_LEN(extensions));
}

static int refuse(const char *path, const char *why, struct error *err) {
    return error_set(err, ERR_USAGE, "'%.256s' is not for jobs: %s", path, why);
}

static const char NOT_READABLE[] = "it is missing, or not below a folder that jobs may read (the "
                                   "server's --jobs-read DIR adds one)";

/* Reads the file type of a canonical path. Opens it component by component without following links,
 * so that a link that was created after the path's resolution is not followed. */
static int file_mode(const char *path, mode_t *mode, struct error *err) {
    struct stat st;
    char *copy = xstrdup(path + 1), *rest = copy;
    int fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (char *part; fd >= 0 && (part = strsep(&rest, "/"));) {
        int next = *part ? openat(fd, part, O_PATH | O_NOFOLLOW | O_CLOEXEC) : dup(fd);
        close(fd);
        fd = next;
    }
    int rc = fd >= 0 && fstat(fd, &st) == 0 ? OK : refuse(path, NOT_READABLE, err);
    if (rc == OK) *mode = st.st_mode;
    if (fd >= 0) close(fd);
    free(copy);
    return rc;
}

/* Where a path comes from: a client's request, a client's request for a database, or the job's
 * program (a file that it reads, or itself). */
enum path_origin { FROM_CLIENT, FROM_CLIENT_DATABASE, FROM_PROGRAM };

/* Checks whether a path may be read as an input. rule: the rule that decides (NULL: none); path: as
 * given, for errors; real: the canonical path. */
static int input_check(const struct path_rule *rule, const char *path, const char *real,
                       enum path_origin origin, struct error *err) {
    mode_t mode;
    if (!rule || rule->access == PATH_DENIED) return refuse(path, NOT_READABLE, err);
    if (has_hidden(rule, real)) return refuse(path, "names that begin with '.' are not read", err);
    if (file_mode(real, &mode, err) != OK) return err->code;
    if (!S_ISREG(mode) && !S_ISDIR(mode))
        return refuse(path, "it is neither a file nor a folder", err);
    if (origin == FROM_CLIENT_DATABASE)
        return S_ISREG(mode) && is_database_name(real) && rule->access == PATH_READ
                   ? OK
                   : refuse(path, "it is not a database (.db) of the server's operator", err);
    if (S_ISDIR(mode)) return OK;
    if (is_database_name(real)) return refuse(path, "databases are not read", err);
    if ((origin == FROM_CLIENT || rule->access == PATH_READ) && !is_input_name(real))
        return refuse(path,
                      "its name must end like data, a text, a recipe or a model (.jsonl, .txt, "
                      ".yaml, .gguf …)",
                      err);
    return OK;
}

char *job_paths_resolve(const struct job_paths *p, const char *path, bool database,
                        struct error *err) {
    enum path_origin origin = database ? FROM_CLIENT_DATABASE : FROM_CLIENT;
    char *real = realpath(path, NULL);
    if (!real) {
        error_set(err, ERR_MISSING, "'%.256s' is not for jobs: %s", path, NOT_READABLE);
        return NULL;
    }
    if (input_check(rule_find(p, real), path, real, origin, err) == OK) return real;
    free(real);
    return NULL;
}

/* Files with which the system describes itself and this process, and /dev/null. */
static bool is_system_file(const char *real) {
    char self[32];
    snprintf(self, sizeof self, "/proc/%d", (int)getpid());
    static const char *const places[] = {"/sys", "/proc/cpuinfo", "/proc/meminfo", "/dev/null"};
    for (size_t i = 0; i < ARRAY_LEN(places); i++)
        if (relative_path(real, places[i])) return true;
    return relative_path(real, self) && !strstr(real, "/environ");
}

/* Checks whether a job may execute a file. Jobs may not execute files that they may write. */
static int exec_check(const struct path_rule *rule, const char *path, const char *real,
                      struct error *err) {
    static const char *const system[] = {"/usr", "/bin", "/sbin", "/lib", "/lib64"};
    mode_t mode;
    for (size_t i = 0; i < ARRAY_LEN(system); i++)
        if (relative_path(real, system[i])) return OK;
    if (!rule || rule->access != PATH_READ) return refuse(path, NOT_READABLE, err);
    if (has_hidden(rule, real)) return refuse(path, "names that begin with '.' are not read", err);
    if (file_mode(real, &mode, err) != OK) return err->code;
    if (!S_ISREG(mode)) return refuse(path, "only files can be executed", err);
    return is_database_name(real) ? refuse(path, "databases are not read", err) : OK;
}

int job_paths_check(const struct job_paths *p, const char *path, enum path_use use,
                    struct error *err) {
    char *real = canonical_path(path);
    const struct path_rule *rule = real ? rule_find(p, real) : NULL;
    struct stat st;
    int rc = OK;
    if (use == PATH_USE_EXEC) {
        rc = real ? exec_check(rule, path, real, err) : refuse(path, NOT_READABLE, err);
    } else if (use == PATH_USE_WRITE) {
        if (!rule || rule->access != PATH_WRITE || has_hidden(rule, real))
            rc = refuse(path, "it is not below a folder that jobs may write", err);
    } else if (real && !is_system_file(real) && lstat(real, &st) == 0) {
        rc = input_check(rule, path, real, FROM_PROGRAM, err);
    } /* otherwise it is a system file, or it does not exist and opening it fails */
    free(real);
    return rc;
}
