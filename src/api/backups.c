/*
 * backups: backups over HTTP (backup/backup.h). A running server cannot restore a backup, because
 * its databases are open. So a restore is verified and scheduled, and the next start of the server
 * applies it before it opens any file.
 *
 * An operation runs in the worker thread of its request, however long it takes. Only one operation
 * runs at a time; meanwhile other requests are answered and can show its progress.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "backup/backup.h"

#include <stdlib.h>
#include <string.h>

enum { N_ROOTS = 3 };

/* Stores the progress for operation_json. Returns false to stop the operation when the server
 * closes. */
static bool progress_store(void *ctx, int64_t done, int64_t total) {
    struct server *s = ctx;
    pthread_mutex_lock(&s->lock);
    s->backup_done_bytes = done;
    s->backup_total_bytes = total;
    bool closing = s->closing;
    pthread_mutex_unlock(&s->lock);
    return !closing;
}

/* The options of this server's backups. The roots are its state, its runs, and its folder of
 * adapters, if it has one. */
static struct backup_options backup_options_init(struct server *s,
                                                 struct backup_root roots[N_ROOTS]) {
    struct backup_options p = {.to = s->backups,
                               .roots = roots,
                               .edit_staged = keys_restore,
                               .on_progress = progress_store,
                               .ctx = s};
    roots[p.n_roots++] = (struct backup_root){"state", s->options->state_dir};
    roots[p.n_roots++] = (struct backup_root){"runs", s->options->runs};
    if (s->options->adapter_dir)
        roots[p.n_roots++] = (struct backup_root){"adapters", s->options->adapter_dir};
    return p;
}

static void fail(struct exchange *x, const struct error *err) {
    if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "backup_not_found", "%s", err->text);
    else if (err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else
        api_fail(x, 500, NULL, NULL, "backup_failed", "%s", err->text);
}

static void reply(struct exchange *x, int status, json_t *v, const struct error *err) {
    if (v)
        exchange_reply_json(x, status, v);
    else
        fail(x, err);
}

/* Begins an operation, which operation_end ends; false: another one is running. */
static bool operation_begin(struct server *s, const char *operation, struct error *err) {
    pthread_mutex_lock(&s->lock);
    const char *other = s->backup_operation;
    if (!other) {
        s->backup_operation = operation;
        s->backup_done_bytes = s->backup_total_bytes = 0;
    }
    pthread_mutex_unlock(&s->lock);
    if (other) error_set(err, ERR_STATE, "a %s is running; try again later", other);
    return !other;
}

static void operation_end(struct server *s) {
    pthread_mutex_lock(&s->lock);
    s->backup_operation = NULL;
    pthread_mutex_unlock(&s->lock);
}

static json_t *operation_json(struct server *s) {
    pthread_mutex_lock(&s->lock);
    json_t *v = s->backup_operation ? json_pack("{s:s,s:I,s:I}", "what", s->backup_operation,
                                                "done", (json_int_t)s->backup_done_bytes, "total",
                                                (json_int_t)s->backup_total_bytes)
                                    : json_null();
    pthread_mutex_unlock(&s->lock);
    return v;
}

static void list_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    json_t *list = backup_list(s->backups, &err), *scheduled = backup_restore_scheduled(s->backups);
    if (list)
        exchange_reply_json(x, 200,
                            json_pack("{s:o,s:o,s:o,s:o}", "backups", list, "folder",
                                      json_from_path(s->backups), "working", operation_json(s),
                                      "restore", scheduled ? scheduled : json_null()));
    else
        json_decref(scheduled), fail(x, &err);
}

static void create_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct backup_root roots[N_ROOTS];
    struct backup_options p = backup_options_init(s, roots);
    struct error err;
    json_t *v = NULL;
    if (operation_begin(s, "backup", &err)) {
        v = backup_create(&p, &err);
        operation_end(s);
    }
    reply(x, 201, v, &err);
}

static void check(struct server *s, struct exchange *x, const char *id) {
    struct backup_options p = {.to = s->backups, .on_progress = progress_store, .ctx = s};
    struct error err;
    json_t *v = NULL;
    if (operation_begin(s, "check", &err)) {
        v = backup_verify(&p, id, &err);
        operation_end(s);
    }
    reply(x, 200, v, &err);
}

static void restore(struct server *s, struct exchange *x, const char *id) {
    struct backup_root roots[N_ROOTS];
    struct backup_options p = backup_options_init(s, roots);
    struct error err;
    json_t *v = NULL;
    if (operation_begin(s, "restore", &err)) {
        if (backup_restore_schedule(&p, id, &err) == OK) v = backup_restore_scheduled(s->backups);
        operation_end(s);
    }
    reply(x, 202, v, &err);
}

/* Splits the wildcard of the route, such as "ID/check". Returns the second part, "" if it is
 * missing. */
static const char *wildcard_split(const struct exchange *x, char id[BACKUP_ID_LEN + 1]) {
    const char *rest = exchange_wildcard(x), *slash = strchrnul(rest, '/');
    snprintf(id, BACKUP_ID_LEN + 1, "%.*s", (int)MIN(slash - rest, BACKUP_ID_LEN), rest);
    return *slash ? slash + 1 : "";
}

static void operation_handle(void *ctx, struct exchange *x) {
    char id[BACKUP_ID_LEN + 1];
    const char *operation = wildcard_split(x, id);
    if (strcmp(operation, "check") == 0)
        check(ctx, x, id);
    else if (strcmp(operation, "restore") == 0)
        restore(ctx, x, id);
    else
        api_fail(x, 404, NULL, NULL, "not_found", "a backup has the operations check and restore");
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    char id[BACKUP_ID_LEN + 1];
    const char *operation = wildcard_split(x, id);
    struct error err;
    json_t *v = NULL;
    if (strcmp(operation, "restore") == 0) {
        if (backup_restore_cancel(s->backups, id, &err) == OK)
            v = json_pack("{s:s,s:b}", "id", id, "restore", 0);
    } else if (*operation) {
        error_set(&err, ERR_MISSING, "a backup has only 'restore' to cancel");
    } else if (operation_begin(s, "delete", &err)) {
        v = backup_delete(s->backups, id, &err);
        operation_end(s);
    }
    reply(x, 200, v, &err);
}

static const struct http_route routes[] = {
    {"GET", "/v1/backups", SCOPE_ADMIN, list_handle},
    {"POST", "/v1/backups", SCOPE_ADMIN, create_handle},
    {"POST", "/v1/backups/*", SCOPE_ADMIN, operation_handle},
    {"DELETE", "/v1/backups/*", SCOPE_ADMIN, delete_handle},
    {0},
};

static void restore_log(const json_t *v) {
    const char *name;
    json_t *root;
    json_object_foreach (json_object_get(v, "roots"), name, root) {
        const char *before = json_get_string(root, "before");
        log_info("'%s' is as in backup '%s'%s%s", json_get_string(root, "path"),
                 json_get_string(v, "id"), *before ? "; the previous files are in " : "", before);
    }
}

/* Applies a scheduled restore. Called before any file of the state is opened. */
static int backups_restore(struct server *s, struct error *err) {
    struct backup_root roots[N_ROOTS];
    const char *state = s->options->state_dir;
    s->backups =
        s->options->backups ? xstrdup(s->options->backups) : path_relative_to(state, "backups");
    struct backup_options p = backup_options_init(s, roots);
    json_t *v = backup_restore_run_scheduled(&p, err);
    if (!v && err->code != OK) return err->code;
    if (v) restore_log(v);
    json_decref(v);
    return backup_is_unfinished(state, err) ? err->code : OK;
}

const struct server_module backups_module = {.routes = routes, .restore = backups_restore};
