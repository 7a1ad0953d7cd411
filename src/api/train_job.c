/*
 * train_job: a training in the server's process: checks of its request, and the versions of its
 * adapter that are served while it runs.
 *
 * The training uses the default base, which is always in memory, and only reads it. It may train by
 * sft and dpo, which run nothing but the trainer; methods with rewards may start commands, for
 * which the process of a job is confined, and es is not cancelled between two layers.
 *
 * A version is in memory only. If the job ends without a result (it failed, it was cancelled, or
 * the gate rejected its adapter), the name is again what it was before: the adapter that its files
 * hold, or none. A job that continues after a restart of the server first publishes the state of
 * its checkpoint.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "jobs/jobs.h"

#include <stdlib.h>
#include <string.h>

/* the request */

/* The base that the request names: the first argument, or an option. */
static const char *model_named(const json_t *request) {
    const char *first = json_string_value(json_array_get(json_object_get(request, "args"), 0));
    return first ? first : json_get_string(json_object_get(request, "options"), "model");
}

static bool is_default_base(const struct server *s, const char *path) {
    char *a = realpath(path, NULL), *b = realpath(s->path, NULL);
    bool same = (a && b && strcmp(a, b) == 0) || strcmp(path, s->path) == 0;
    free(a);
    free(b);
    return same;
}

/* Whether the request trains several adapters, or one in a subfolder of its output. */
static bool has_subfolders(const json_t *options) {
    const json_t *data = json_object_get(options, "data"), *v;
    size_t i;
    if (json_is_string(data)) return strchr(json_string_value(data), '=') != NULL;
    json_array_foreach (data, i, v)
        if (strchr(json_string_value(v), '=')) return true;
    return json_array_size(data) > 1;
}

static int option_refuse(char field[64], const char *name, struct error *err, const char *why) {
    snprintf(field, 64, "%s", name);
    return error_set(err, ERR_USAGE, "'%s' of a training in the server's process %s", name, why);
}

/* The versions of a job replace only the adapter of their path, because they are taken back if the
 * job has no result. */
static int versions_check(struct server *s, const json_t *request, char field[64],
                          struct error *err) {
    const json_t *options = json_object_get(request, "options");
    const char *out = json_get_string(options, "out"), *slash = strrchr(out, '/');
    struct error taken;
    if (!json_object_get(request, "publish_steps")) return OK;
    snprintf(field, 64, "publish_steps");
    if (has_subfolders(options))
        return error_set(err, ERR_USAGE,
                         "'publish_steps' is for one adapter: 'data' must be one file without "
                         "NAME=");
    if (slash && job_adapter_name_check(s, slash + 1, out, false, &taken) != OK)
        return error_set(err, ERR_USAGE,
                         "'publish_steps' cannot replace '%s', a served adapter that no job has "
                         "written: choose another name",
                         slash + 1);
    return OK;
}

int train_job_check(void *ctx, const json_t *request, char field[64], struct error *err) {
    struct server *s = ctx;
    const json_t *options = json_object_get(request, "options");
    const char *method = json_get_string(options, "method");
    bool fast = s->model->cls == NUMERIC_FAST;
    if (s->options->max_memory && !s->options->train_memory_bytes) {
        snprintf(field, 64, "in_process");
        return error_set(err, ERR_USAGE,
                         "--max-memory of this server leaves no memory for a training in its "
                         "process: start it with --train-memory SIZE as well, or leave "
                         "'in_process' out");
    }
    if (!is_default_base(s, model_named(request))) {
        snprintf(field, 64, "args");
        return error_set(err, ERR_USAGE,
                         "a training in the server's process trains the first model of the "
                         "server: 'args' must be [\"%s\"]",
                         s->path);
    }
    if (*method && strcmp(method, "sft") != 0 && strcmp(method, "dpo") != 0)
        return option_refuse(field, "method", err, "is sft or dpo; leave 'in_process' out");
    if (json_object_get(options, "max-memory"))
        return option_refuse(field, "max-memory", err, "is --train-memory of the server");
    if (json_is_true(json_object_get(options, "dry-run")))
        return option_refuse(field, "dry-run", err, "has no effect; leave 'in_process' out");
    if (json_is_true(json_object_get(options, fast ? "exact" : "fast")))
        return option_refuse(field, fast ? "exact" : "fast", err,
                             "is that of the server, which has the other numeric class");
    return versions_check(s, request, field, err);
}

/* versions */

/* The adapter of a job under its name. */
struct live_adapter {
    struct server *s;
    const struct job_run *r;
    const char *path, *name; /* its files, once the job is done; the last part of this path */
    int64_t versions;        /* number of published versions */
};

/* If a version cannot be served, the training continues. */
static int version_publish(void *ctx, int64_t step, struct adapter *a, struct error *err) {
    struct live_adapter *v = ctx;
    struct server *s = v->s;
    struct error why;
    (void)err;
    if (job_adapter_name_check(s, v->name, v->path, false, &why) != OK ||
        server_adapter_publish(s, v->name, v->path, a, &why) != OK) {
        log_warn("the adapter of step %lld is not served: %s", (long long)step, why.text);
        return OK;
    }
    v->versions++;
    job_run_print(v->r, json_pack("{s:s,s:I,s:s}", "version_of", v->name, "step", (json_int_t)step,
                                  "hash", a->hash));
    return OK;
}

static bool is_closing(struct server *s) {
    pthread_mutex_lock(&s->lock);
    bool closing = s->closing;
    pthread_mutex_unlock(&s->lock);
    return closing;
}

/* Serves the adapter that was served before the first version, or none. */
static void versions_withdraw(const struct live_adapter *v) {
    struct server *s = v->s;
    struct error err;
    int rc = adapter_exists(v->path) ? server_adapter_load(s, v->name, v->path, true, &err)
                                     : server_adapter_unload(s, v->name, &err);
    if (rc != OK) log_warn("the versions of '%s' are still served: %s", v->name, err.text);
}

int train_job_run(void *ctx, const struct job_run *r, struct error *err) {
    struct server *s = ctx;
    const char *out = json_get_string(json_object_get(r->request, "options"), "out"),
               *slash = strrchr(out, '/');
    struct live_adapter v = {.s = s, .r = r, .path = out, .name = slash ? slash + 1 : out};
    int64_t steps = json_integer_value(json_object_get(r->request, "publish_steps"));
    const struct train_host host = {.model = s->model,
                                    .memory = s->options->train_memory_bytes,
                                    .publish = steps ? version_publish : NULL,
                                    .publish_steps = steps,
                                    .ctx = &v};
    int rc = s->options->train(r, &host, err);
    if (rc != OK && v.versions && !is_closing(s)) versions_withdraw(&v);
    return rc;
}
