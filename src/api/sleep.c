/*
 * sleep: the memories of a client become weights (sleep/sleep.h), as a job, at night, and as the
 * model `sleep`.
 *
 *     STATE/sleep/USER/adapter         the versions of the user's adapter
 *     STATE/sleep/USER/memories.jsonl  the memories that a job learns, until it ends
 *
 * USER is the user of the memories: the id of the API key, or "me". A job gets an export of the
 * memories of its owner, and write access to the folder of this user; the server sets both, and no
 * client can name another user. The report of a job has ids of memories and no text, because every
 * key with the scope jobs may read it.
 *
 * The adapter is not in the list of adapters. It is the model `sleep` of its user's requests, so
 * that no other client can ask it about the user. The pool has it as sleep/USER, from the user's
 * first request on, and reads a new or restored version when the next request gets it.
 */
#define _GNU_SOURCE
#include "sleep/sleep.h"
#include "api/internal.h"
#include "jobs/jobs.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_VERSIONS = 20,       /* in a reply */
    LEARNED_BYTES = 1 << 10, /* for a memory of a version, as JSON tree and as text */
    MAX_RESULT_BYTES = 16 << 20,
};
static const char MODEL_NAME[] = "sleep", KIND[] = "sleep";

/* The thread that starts the jobs of each night. */
struct sleep_schedule {
    struct server *s;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t stopped;
    bool stop;
};

/* paths and names */

static char *user_dir(const struct server *s, const char *user) {
    return xasprintf("%s/sleep/%s", s->options->state_dir, user);
}

static char *adapter_dir(const struct server *s, const char *user) {
    return xasprintf("%s/sleep/%s/adapter", s->options->state_dir, user);
}

static char *export_path(const struct server *s, const char *user) {
    return xasprintf("%s/sleep/%s/memories.jsonl", s->options->state_dir, user);
}

static bool has_adapter(const struct server *s, const char *user) {
    char *dir = adapter_dir(s, user);
    const bool exists = adapter_exists(dir);
    free(dir);
    return exists;
}

bool sleep_model_exists(const struct server *s, const struct exchange *x) {
    if (!s->options->memory) return false;
    char *user = memories_user(exchange_key_id(x));
    const bool exists = has_adapter(s, user);
    free(user);
    return exists;
}

/* The user's adapter in the pool; malloc'ed. */
static char *pool_name(const char *user) {
    return xasprintf("sleep/%s", user);
}

static char *own_adapter(struct server *s, const struct exchange *x, const char *name) {
    struct error err;
    if (s->front || strcmp(name, MODEL_NAME) != 0 || !sleep_model_exists(s, x)) return NULL;
    char *user = memories_user(exchange_key_id(x)), *dir = adapter_dir(s, user),
         *own = pool_name(user);
    if (adapter_pool_add(s->pool, own, dir, &err) != OK) {
        log_warn("the adapter of '%s' cannot be served: %s", user, err.text);
        free(own);
        own = NULL;
    }
    free(user);
    free(dir);
    return own;
}

/* Removes the user's adapter from the pool, if it has one. */
static int adapter_unload(struct server *s, const char *user, struct error *err) {
    char *name = pool_name(user);
    int rc = adapter_pool_remove(s->pool, name, err);
    free(name);
    return rc == ERR_MISSING ? OK : rc;
}

/* jobs */

static int export_write(struct server *s, const char *user, const char *path, struct error *err) {
    char *dir = user_dir(s, user);
    json_t *list = memories_of(s, NULL, user, false, err);
    int rc = list ? dir_make_private(dir, err) : err->code;
    if (rc == OK) rc = sleep_memories_export(list, path, err);
    json_decref(list);
    free(dir);
    return rc;
}

/* The permissions of jobs, and the folder of the user. */
static char *permissions_make(const struct server *s, const char *user, struct error *err) {
    char *dir = user_dir(s, user), *real = realpath(dir, NULL), *text = NULL;
    json_t *v = json_parse(s->job_env, strlen(s->job_env), "SHOAL_JOB", err);
    if (v && real) {
        json_array_append_new(json_object_get(v, "paths"),
                              json_pack("[o,i]", json_from_path(real), (int)PATH_WRITE));
        text = json_dumps(v, JSON_COMPACT);
    } else if (v) {
        error_set(err, ERR_MISSING, "cannot find '%s'", dir);
    }
    json_decref(v);
    free(real);
    free(dir);
    return text;
}

int sleep_job_prepare(void *ctx, const struct job_attempt *a, json_t *options, char **permissions,
                      struct error *err) {
    struct server *s = ctx;
    if (strcmp(a->kind, KIND) != 0) return OK;
    if (!s->options->memory)
        return error_set(err, ERR_STATE, "this server has no memories; start it with --memory DB");
    char *user = memories_user(a->owner), *dir = adapter_dir(s, user), *path = export_path(s, user);
    int rc = export_write(s, user, path, err);
    if (rc == OK && !(*permissions = permissions_make(s, user, err))) rc = err->code;
    json_object_set_new(options, "memory", json_from_path(path));
    json_object_set_new(options, "user", json_string(user));
    json_object_set_new(options, "out", json_from_path(dir));
    free(path);
    free(dir);
    free(user);
    return rc;
}

/* The last sleep of a user, or NULL. */
static json_t *last_job(struct server *s, const char *user) {
    json_t *list = jobs_list(s->jobs, NULL), *job, *found = NULL;
    size_t i;
    json_array_foreach (list, i, job) {
        if (found || strcmp(json_get_string(job, "kind"), KIND) != 0) continue;
        char *owner = jobs_owner(s->jobs, json_get_string(job, "id")), *of = memories_user(owner);
        if (owner && strcmp(of, user) == 0) found = json_incref(job);
        free(of);
        free(owner);
    }
    json_decref(list);
    return found;
}

/* ERR_STATE: a sleep of the user is not finished. */
static int check_finished(struct server *s, const char *user, struct error *err) {
    json_t *job = last_job(s, user);
    int rc = OK;
    if (job && !job_state_is_final(json_get_string(job, "state")))
        rc = error_set(err, ERR_STATE, "the sleep '%s' is %s; wait until it has ended",
                       json_get_string(job, "id"), json_get_string(job, "state"));
    json_decref(job);
    return rc;
}

/* Deletes the export of a user without an unfinished job. The list of jobs is read only if there is
 * an export: at the start all users are visited. */
static void export_delete(struct server *s, const char *user) {
    struct error unfinished;
    char *path = export_path(s, user);
    if (path_exists(path) && check_finished(s, user, &unfinished) == OK) unlink(path);
    free(path);
}

void sleep_job_ended(struct server *s, const char *id) {
    char *owner = jobs_owner(s->jobs, id), *user = memories_user(owner);
    if (owner) export_delete(s, user);
    free(user);
    free(owner);
}

/* The request for a job with these options (NULL: none). */
static json_t *job_request_make(const struct server *s, const json_t *options) {
    json_t *v = options ? json_deep_copy(options) : json_object();
    const char *rehearse = s->options->sleep_rehearse;
    if (rehearse && !json_object_get(v, "rehearse"))
        json_object_set_new(v, "rehearse", json_string(rehearse));
    return json_pack("{s:s,s:[o],s:o}", "kind", KIND, "args", json_from_path(s->path), "options",
                     v);
}

/* The result of a job: the last line of its output, or null. */
static json_t *result_read(struct server *s, const json_t *job) {
    struct error ignored;
    struct buf text = {0};
    json_t *v = NULL;
    char *path =
        job ? jobs_file(s->jobs, json_get_string(job, "id"), "stdout.jsonl", &ignored) : NULL;
    if (path && file_read(path, MAX_RESULT_BYTES, &text, &ignored) == OK && text.len)
        v = json_parse(text.data, strcspn(text.data, "\n"), path, &ignored);
    buf_release(&text);
    free(path);
    return v ? v : json_null();
}

/* the report */

static json_t *status_make(const struct server *s, const char *user, struct error *err) {
    char *out = adapter_dir(s, user);
    const struct sleep_options o = {
        .memory = s->options->memory, .user = (char *)(uintptr_t)user, .learn.out = out};
    json_t *v = sleep_status(&o, err);
    free(out);
    return v;
}

static const json_t *memory_find(const json_t *memories, json_int_t id) {
    const json_t *m;
    size_t i;
    json_array_foreach (memories, i, m)
        if (json_integer_value(json_object_get(m, "id")) == id) return m;
    return NULL;
}

/* Adds text and source to the memories of a list that the user still has. */
static void learned_explain(const json_t *learned, const json_t *memories) {
    static const char *const copied[] = {"attribute", "value", "text", "source", "valid_until"};
    json_t *row;
    size_t i;
    json_array_foreach (learned, i, row) {
        const json_t *m = memory_find(memories, json_integer_value(json_object_get(row, "id")));
        for (size_t k = 0; m && k < ARRAY_LEN(copied); k++)
            json_object_set(row, copied[k], json_object_get(m, copied[k]));
        json_object_del(row, "hash");
    }
}

/* Keeps the newest versions, and adds the texts of their memories. */
static int versions_explain(struct server *s, struct exchange *x, json_t *versions,
                            const json_t *memories, struct error *err) {
    int64_t n = 0;
    json_t *v;
    size_t i;
    while (json_array_size(versions) > MAX_VERSIONS)
        json_array_remove(versions, json_array_size(versions) - 1);
    json_array_foreach (versions, i, v)
        n += (int64_t)json_array_size(json_object_get(v, "learned"));
    if (request_memory_reserve_list(s, x, n, LEARNED_BYTES, NULL, err) != OK) return err->code;
    json_array_foreach (versions, i, v) learned_explain(json_object_get(v, "learned"), memories);
    return OK;
}

static json_t *report_make(struct server *s, struct exchange *x, const char *user,
                           struct error *err) {
    json_t *memories = memories_of(s, x, user, true, err);
    json_t *v = memories ? status_make(s, user, err) : NULL;
    json_t *versions = json_object_get(v, "versions"), *job, *result;
    if (v && versions_explain(s, x, versions, memories, err) != OK) {
        json_decref(v);
        v = NULL;
    }
    if (v) {
        job = last_job(s, user);
        result = result_read(s, job);
        learned_explain(json_object_get(result, "learned"), memories);
        json_object_del(result, "dir");
        json_object_set_new(v, "object", json_string("sleep"));
        json_object_set_new(v, "model",
                            has_adapter(s, user) ? json_string(MODEL_NAME) : json_null());
        json_object_set_new(v, "at",
                            s->options->sleep_at ? json_string(s->options->sleep_at) : json_null());
        json_object_set_new(v, "job", job ? job : json_null());
        json_object_set_new(v, "result", result);
    }
    json_decref(memories);
    return v;
}

/* requests */

static void fail(struct exchange *x, const struct error *err) {
    if (err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "version_not_found", "%s", err->text);
    else if (err->code == ERR_MEMORY)
        api_fail(x, 429, NULL, NULL, "too_many_jobs", "%s", err->text);
    else
        api_fail_error(x, err, NULL);
}

static void report_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    char *user = memories_request_user(s, x);
    if (!user) return;
    json_t *v = report_make(s, x, user, &err);
    if (v)
        exchange_reply_json(x, 200, v);
    else
        api_fail_error(x, &err, NULL);
    free(user);
}

/* The body of a request, or an empty object; NULL: it is refused, and the reply is sent. */
static json_t *body_read(struct server *s, struct exchange *x) {
    struct error err;
    json_t *v = exchange_body(x)->len ? request_memory_json(s, x, &err) : json_object();
    if (json_is_object(v)) return v;
    if (v) error_set(&err, ERR_USAGE, "the body must be an object");
    api_fail_error(x, &err, NULL);
    json_decref(v);
    return NULL;
}

static void start_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    char id[JOB_ID_LEN], *user = memories_request_user(s, x);
    struct job_caller caller = {.owner = exchange_key_id(x)};
    json_t *body = user ? body_read(s, x) : NULL, *request = NULL;
    if (!body) {
        free(user);
        return;
    }
    int rc = check_finished(s, user, &err);
    if (rc == OK) {
        request = job_request_make(s, json_object_get(body, "options"));
        rc = jobs_submit(s->jobs, request, &caller, id, &err);
    }
    if (rc == OK)
        exchange_reply_json(x, 201, jobs_get(s->jobs, id, &err));
    else if (*caller.field)
        api_fail_error(x, &err, caller.field);
    else
        fail(x, &err);
    json_decref(request);
    json_decref(body);
    free(user);
}

/* Restores the previous version, or the one whose hash begins with `to`. */
static int version_restore(struct server *s, const char *user, const char *to, char hash[HASH_LEN],
                           struct error *err) {
    char *dir = adapter_dir(s, user);
    int rc = check_finished(s, user, err);
    if (rc == OK && !has_adapter(s, user))
        rc = error_set(err, ERR_MISSING, "no memories of this key have been learned");
    if (rc == OK) rc = adapter_rollback(dir, &s->model->config, to, hash, err);
    free(dir);
    return rc;
}

static void rollback_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    const char *to = NULL;
    char hash[HASH_LEN], *user = memories_request_user(s, x);
    json_t *body = user ? body_read(s, x) : NULL;
    if (!body) {
        free(user);
        return;
    }
    int rc = json_read_string(body, "to", &to, &err);
    if (rc == OK) rc = version_restore(s, user, to, hash, &err);
    if (rc == OK)
        exchange_reply_json(x, 200, json_pack("{s:s}", "hash", hash));
    else
        fail(x, &err);
    json_decref(body);
    free(user);
}

/* Deletes the adapter with all versions, so that nothing of the memories is left in weights. */
static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    char *user = memories_request_user(s, x), *dir;
    if (!user) return;
    int rc = check_finished(s, user, &err);
    const bool existed = has_adapter(s, user);
    if (rc == OK) {
        dir = user_dir(s, user);
        tree_delete(dir);
        free(dir);
        rc = adapter_unload(s, user, &err);
    }
    if (rc == OK)
        exchange_reply_json(x, 200, json_pack("{s:b}", "deleted", (int)existed));
    else
        fail(x, &err);
    free(user);
}

static const struct http_route routes[] = {
    {"GET", "/v1/sleep", SCOPE_CHAT, report_handle},
    {"POST", "/v1/sleep", SCOPE_JOBS, start_handle},
    {"DELETE", "/v1/sleep", SCOPE_CHAT, delete_handle},
    {"POST", "/v1/sleep/rollback", SCOPE_CHAT, rollback_handle},
    {0},
};

/* the schedule */

/* Whether the current version knows other memories than those that hold now. */
static bool has_work(const json_t *status) {
    const json_t *v;
    size_t i;
    if (json_array_size(json_object_get(status, "unlearned"))) return true;
    json_array_foreach (json_object_get(status, "versions"), i, v)
        if (json_is_true(json_object_get(v, "current")))
            return json_array_size(json_object_get(v, "forgotten")) > 0;
    return false;
}

/* Starts the sleep of a night for the owner of a key (NULL: requests without one), if there are
 * memories to learn or to forget. The idempotency key allows one per night. */
static void night_start(struct server *s, const char *owner, const char *night) {
    struct error err = {0};
    char id[JOB_ID_LEN], *user = memories_user(owner);
    struct job_caller caller = {.idempotency_key = night, .owner = owner};
    json_t *status = status_make(s, user, &err);
    int rc = status ? OK : err.code;
    if (status && has_work(status) && check_finished(s, user, &err) == OK) {
        json_t *request = job_request_make(s, NULL);
        rc = jobs_submit(s->jobs, request, &caller, id, &err);
        if (rc == OK) log_info("sleep: job %s learns the memories of '%s'", id, user);
        json_decref(request);
    }
    if (rc != OK) log_warn("sleep: no job for the memories of '%s': %s", user, err.text);
    json_decref(status);
    free(user);
}

static void night_run(struct server *s, int64_t at) {
    char night[32];
    json_t *keys = keys_list(s->keys, (double)time(NULL)), *key;
    size_t i;
    snprintf(night, sizeof night, "sleep-%lld", (long long)at);
    night_start(s, NULL, night);
    night_start(s, KEY_TOKEN_ID, night);
    json_array_foreach (keys, i, key) {
        const char *id = json_get_string(key, "id");
        if (keys_scopes(s->keys, id)) night_start(s, id, night); // not revoked
    }
    json_decref(keys);
}

/* Waits for at most a few seconds, so that a change of the clock is noticed; false: the server
 * ends. */
static bool schedule_wait(struct sleep_schedule *t) {
    enum { SLICE_SECONDS = 5 };
    pthread_mutex_lock(&t->lock);
    if (!t->stop) condition_wait_until(&t->stopped, &t->lock, clock_now() + SLICE_SECONDS);
    const bool stop = t->stop;
    pthread_mutex_unlock(&t->lock);
    return !stop;
}

static void *schedule_main(void *arg) {
    struct sleep_schedule *t = arg;
    const int minute = t->s->options->sleep_minute;
    int64_t next = sleep_time_next(time(NULL), minute);
    while (schedule_wait(t)) {
        const int64_t now = time(NULL);
        if (now >= next) night_run(t->s, next);
        next = sleep_time_next(now, minute);
    }
    return NULL;
}

/* Deletes the exports of jobs that an earlier server has not seen end. */
static void exports_delete(struct server *s) {
    char *root = path_join(s->options->state_dir, "sleep");
    DIR *d = opendir(root);
    for (const struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.') export_delete(s, e->d_name);
    if (d) closedir(d);
    free(root);
}

static int module_open(struct server *s, struct error *err) {
    exports_delete(s);
    if (!s->options->sleep_at) return OK;
    struct sleep_schedule *t = s->sleep_schedule = xcalloc(1, sizeof *t);
    t->s = s;
    pthread_cond_init(&t->stopped, NULL);
    pthread_mutex_init(&t->lock, NULL);
    if (pthread_create(&t->thread, NULL, schedule_main, t) == 0) return OK;
    free(t);
    s->sleep_schedule = NULL;
    return error_set(err, ERR_MEMORY, "cannot start the thread of --sleep-at");
}

static void module_close(struct server *s) {
    struct sleep_schedule *t = s->sleep_schedule;
    if (!t) return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_signal(&t->stopped);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->stopped);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

const struct server_module sleep_module = {
    .routes = routes, .open = module_open, .close = module_close, .own_adapter = own_adapter};
