/*
 * system: properties of the server: model, memory, batch, adapters with their versions, runs with
 * their curves and lineage, and the time per stage of the last requests.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "engine/engine.h"
#include "evolve/evolve.h"
#include "serve/generation.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* server */

static json_t *model_json(const struct server *s) {
    const struct model_config *c = &s->model->config;
    return json_pack("{s:s,s:o,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i}", "id", s->name, "path",
                     json_from_path(s->path), "hash", s->model->hash, "quantization",
                     tensor_type_name(s->model->type), "layers", c->n_layers, "width", c->d_model,
                     "heads", c->n_heads, "kv_heads", c->n_kv_heads, "vocabulary", c->vocab_size,
                     "context", engine_max_len(s->engine));
}

static json_t *batch_json(struct server *s) {
    struct batcher_stats b = batcher_stats(s->batcher);
    return json_pack("{s:i,s:i,s:i,s:I,s:I,s:I,s:I,s:f,s:i,s:i}", "running", b.running, "waiting",
                     b.waiting, "max_running", b.max_running, "steps", (json_int_t)b.steps,
                     "prefilled", (json_int_t)b.prefilled, "generated", (json_int_t)b.generated,
                     "cancelled", (json_int_t)b.cancelled, "busy_seconds", b.busy, "kv_pages",
                     (int)b.pages, "kv_pages_free", (int)b.pages_free);
}

static json_t *memory_json(const struct server *s) {
    struct adapter_pool_stats p = adapter_pool_stats(s->pool);
    return json_pack("{s:I,s:I,s:I,s:I,s:o}", "resident", (json_int_t)process_memory("VmRSS"),
                     "peak", (json_int_t)process_memory("VmHWM"), "budget",
                     (json_int_t)s->options->max_memory, "adapters", (json_int_t)p.bytes, "plan",
                     memory_plan_json(s->options->plan));
}

/* The instruction set of the kernels, and the types of their operands. */
static json_t *kernels_json(const struct server *s) {
    return json_pack("{s:s,s:s,s:s,s:s,s:s,s:i}", "level", cpu_level_name(kernels_get()->level),
                     "class", numeric_class_name(s->model->cls), "weights",
                     tensor_type_name(s->model->type), "kv",
                     dtype_name(s->options->plan->engine.kv_elem), "lora",
                     dtype_name(s->options->plan->engine.lora_elem), "threads", s->threads);
}

/* The bases that are loaded on demand. */
static json_t *bases_json(struct server *front) {
    json_t *list = json_array();
    struct server *s;
    for (int i = 1; (s = base_at(front, i)); i++) {
        struct base_status b = base_status(s);
        const char *state = b.loaded ? "loaded" : b.loading ? "loading" : "unloaded";
        json_t *expires = b.loaded && b.expires >= 0 ? json_real(b.expires) : json_null();
        json_array_append_new(list,
                              json_pack("{s:s,s:o,s:s,s:i,s:I,s:I,s:o}", "id", s->name, "path",
                                        json_from_path(s->path), "state", state, "in_use", b.in_use,
                                        "loads", (json_int_t)b.loads, "plan_bytes",
                                        (json_int_t)b.plan_bytes, "expires_in", expires));
    }
    return list;
}

static void system_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct http_stats h = http_stats(s->http);
    json_t *http = json_pack("{s:i,s:i,s:I,s:I}", "open", h.open, "streams", h.streams, "requests",
                             (json_int_t)h.requests, "bytes_out", (json_int_t)h.bytes_out);
    exchange_reply_json(x, 200,
                        json_pack("{s:s,s:I,s:I,s:b,s:b,s:o,s:o,s:o,s:o,s:o,s:o}", "version",
                                  SHOAL_VERSION, "started", (json_int_t)s->started, "now",
                                  (json_int_t)time(NULL), "feedback", s->options->feedback,
                                  "memories", s->options->memory != NULL, "kernels",
                                  kernels_json(s), "model", model_json(s), "batch", batch_json(s),
                                  "memory", memory_json(s), "bases", bases_json(s), "http", http));
}

/* adapters */

static json_t *pool_item_json(const struct adapter_pool_item *i) {
    return json_pack("{s:s,s:o?,s:s?,s:s,s:I,s:I,s:b,s:b,s:I,s:I}", "name", i->name, "path",
                     i->path ? json_from_path(i->path) : NULL, "problem", i->problem, "hash",
                     i->hash, "version", (json_int_t)i->version, "bytes", (json_int_t)i->bytes,
                     "in_use", i->in_use, "pinned", i->pinned, "requests", (json_int_t)i->gets,
                     "loads", (json_int_t)i->loads);
}

static void adapters_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct arena mem = {0};
    json_t *list = json_array();
    int n;
    const struct adapter_pool_item *v = adapter_pool_list(s->pool, &mem, &n);
    for (int i = 0; i < n; i++) json_array_append_new(list, pool_item_json(&v[i]));
    arena_release(&mem);
    exchange_reply_json(x, 200, json_pack("{s:o}", "adapters", list));
}

/* The path from which a listed adapter was loaded, malloc'ed; NULL: it is not listed. */
static char *adapter_path(struct server *s, const char *name) {
    char *path = NULL;
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n; i++)
        if (strcmp(v[i].name, name) == 0) path = xstrdup(v[i].path);
    server_adapters_free(v, n);
    return path;
}

/* The wildcard of the route without a suffix, malloc'ed: "critic/versions" gives "critic". NULL: it
 * does not end with the suffix. */
static char *wildcard_without_suffix(const struct exchange *x, const char *suffix) {
    const char *rest = exchange_wildcard(x);
    size_t n = strlen(rest), m = strlen(suffix);
    return n > m && strcmp(rest + n - m, suffix) == 0 ? xstrndup(rest, n - m) : NULL;
}

static void versions_handle(void *ctx, struct exchange *x) {
    struct error err;
    char *name = wildcard_without_suffix(x, "/versions"),
         *path = name ? adapter_path(ctx, name) : NULL;
    json_t *list = path ? adapter_versions(path, &err) : NULL;
    if (list)
        exchange_reply_json(x, 200, json_pack("{s:o}", "versions", list));
    else if (path)
        api_fail_error(x, &err, NULL);
    else
        api_fail(x, 404, NULL, NULL, "not_found", "there is no adapter '%.140s'",
                 name ? name : exchange_wildcard(x));
    free(path);
    free(name);
}

/* Restores the previous version of an adapter, or the one whose hash begins with `to`. The next
 * requests use it. */
static void rollback_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    const char *to = NULL;
    char hash[HASH_LEN], *name = wildcard_without_suffix(x, "/rollback"),
                         *path = name ? adapter_path(s, name) : NULL;
    json_t *body = exchange_body(x)->len ? request_memory_json(ctx, x, &err) : json_object();
    int rc = body ? json_read_string(body, "to", &to, &err) : err.code;
    if (rc == OK && !path)
        rc = error_set(&err, ERR_MISSING, "there is no adapter '%.140s'",
                       name ? name : exchange_wildcard(x));
    if (rc == OK) rc = adapter_rollback(path, &s->model->config, to, hash, &err);
    if (rc == OK) rc = server_adapter_load(s, name, path, true, &err);
    if (rc == OK)
        exchange_reply_json(x, 200, json_pack("{s:s,s:s}", "name", name, "hash", hash));
    else
        api_fail_error(x, &err, NULL);
    json_decref(body);
    free(path);
    free(name);
}

/* runs */

static struct store *runs_store(const struct server *s, struct error *err) {
    char *path = path_join(s->options->runs, "shoal.db");
    struct store *store = NULL;
    if (path_exists(path))
        store = store_open(path, err);
    else
        error_set(err, ERR_MISSING, "'%s' contains no runs yet", s->options->runs);
    free(path);
    return store;
}

/* The name of the result ("out") of the job of this server that made the run, malloc'ed; NULL: no
 * job of this server made it. */
static char *run_result_name(const struct server *s, struct store *store, const char *id) {
    struct error missing;
    json_t *run = store_run_get(store, id, &missing);
    const json_t *recipe = json_object_get(run, "recipe"), *jobs = json_object_get(recipe, "jobs");
    const char *out_path = json_get_string(recipe, "out"),
               *out = *out_path ? out_path : json_get_string(json_array_get(jobs, 0), "dir"),
               *slash = strrchr(out, '/');
    char *path = slash ? xasprintf("%s/out%s", s->options->state_dir, slash) : NULL, *name = NULL;
    if (path && strcmp(path, out) == 0 && slash[1] != '.') name = xstrdup(slash + 1);
    free(path);
    json_decref(run);
    return name;
}

static char *path_if_exists(char *path) {
    if (path_exists(path)) return path;
    free(path);
    return NULL;
}

/* The folder of a run, malloc'ed, found by the run's id or the name of its result; names that could
 * be paths are rejected. NULL: none. */
static char *run_folder(const struct server *s, const char *id) {
    struct error ignored;
    if (!*id || *id == '.' || strchr(id, '/')) return NULL;
    char *folder = path_if_exists(path_join(s->options->runs, id));
    if (!folder) folder = path_if_exists(xasprintf("%s/out/%s", s->options->state_dir, id));
    if (folder) return folder;
    struct store *store = runs_store(s, &ignored);
    char *out = store ? run_result_name(s, store, id) : NULL;
    if (out) folder = path_if_exists(xasprintf("%s/out/%s", s->options->state_dir, out));
    store_close(store);
    free(out);
    return folder;
}

static char *run_file(const char *folder, const char *name) {
    return path_if_exists(path_join(folder, name));
}

/* Lists the runs. The run of a job has the name of its result, "out", in addition to its id. */
static void runs_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    struct store *store = runs_store(s, &err);
    json_t *list = store                     ? store_run_list(store, s->options->runs, &err)
                   : err.code == ERR_MISSING ? json_array()
                                             : NULL,
           *run;
    size_t i;
    json_array_foreach (list, i, run) {
        char *out = run_result_name(s, store, json_get_string(run, "id"));
        if (out) json_object_set_new(run, "out", json_string(out));
        free(out);
    }
    if (list)
        exchange_reply_json(x, 200, json_pack("{s:o}", "runs", list));
    else
        api_fail_error(x, &err, NULL);
    store_close(store);
}

/* A log with more than MAX_LINES lines is thinned to every 2nd, 4th, … line and the last one. The
 * shape of a curve is kept, and memory is bounded for a run of any length. */
enum {
    MAX_LINES = 4096,
    LINE_BYTES = 256, /* typical bytes of a line */
    LINE_FACTOR = 16, /* bytes in memory per byte in a file */
};
struct sampled_lines {
    json_t *list, *last; /* last: the last line if it is not in the list; or NULL */
    int64_t seen, stride;
};

static void sampled_lines_halve(struct sampled_lines *l) {
    json_t *half = json_array();
    for (size_t i = 0; i < json_array_size(l->list); i += 2)
        json_array_append(half, json_array_get(l->list, i));
    json_decref(l->list);
    l->list = half;
    l->stride *= 2;
}

static int line_sample(void *ctx, const json_t *v, int line, struct error *err) {
    struct sampled_lines *l = ctx;
    json_t *row = json_incref((json_t *)(uintptr_t)v);
    (void)line, (void)err;
    json_decref(l->last);
    l->last = NULL;
    if (l->seen++ % l->stride == 0)
        json_array_append_new(l->list, row);
    else
        l->last = row;
    if (json_array_size(l->list) > MAX_LINES) sampled_lines_halve(l);
    return OK;
}

/* The lines of a run's log, thinned; an empty list if the log does not exist. */
static json_t *log_lines_json(const char *folder, const char *name) {
    struct error err;
    struct sampled_lines l = {.list = json_array(), .stride = 1};
    char *path = run_file(folder, name);
    if (path) json_file_each(path, line_sample, &l, &err); // the last line may be incomplete
    if (l.last) json_array_append_new(l.list, l.last);
    free(path);
    return l.list;
}

/* Reserves memory for the data of a run: the lines of thinned logs, and whole files. */
static int run_reserve(struct server *s, struct exchange *x, const char *folder,
                       struct error *err) {
    static const char *const names[] = {"evolution.jsonl", "evolution.jsonl", "result.json"};
    int rc = request_memory_reserve(s, x, 2 * (size_t)MAX_LINES * LINE_BYTES * LINE_FACTOR, err);
    for (size_t i = 0; i < ARRAY_LEN(names) && rc == OK; i++) {
        char *path = path_join(folder, names[i]);
        rc = request_memory_reserve_file(s, x, path, LINE_FACTOR, err);
        free(path);
    }
    return rc;
}

/* The lineage of a run; null if it has no generations yet. */
static json_t *lineage_tree_json(const char *folder, struct error *err) {
    char *path = run_file(folder, "evolution.jsonl");
    json_t *generations = path ? lineage_load(path, err) : json_array();
    json_t *v = NULL;
    if (generations)
        v = json_array_size(generations) ? lineage_json(generations, NULL, err) : json_null();
    json_decref(generations);
    free(path);
    return v;
}

static json_t *result_json(const char *folder) {
    struct error err;
    char *path = run_file(folder, "result.json");
    json_t *v = path ? json_parse_file(path, &err) : NULL;
    free(path);
    return v;
}

/* Replies with all data that the page of a run shows. */
static void run_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *id = exchange_wildcard(x);
    struct error err;
    char *folder = run_folder(s, id);
    bool fits = folder && run_reserve(s, x, folder, &err) == OK;
    json_t *tree = fits ? lineage_tree_json(folder, &err) : NULL;
    if (tree)
        exchange_reply_json(x, 200,
                            json_pack("{s:s,s:o,s:o,s:o,s:o,s:o?}", "id", id, "training",
                                      log_lines_json(folder, "train.jsonl"), "generations",
                                      log_lines_json(folder, "evolution.jsonl"), "curve",
                                      log_lines_json(folder, "curve.jsonl"), "lineage", tree,
                                      "result", result_json(folder)));
    else if (folder)
        api_fail_error(x, &err, NULL);
    else
        api_fail(x, 404, NULL, NULL, "run_not_found", "there is no run '%.80s'", id);
    free(folder);
}

/* traces */

/* Lists the traces of requests, the newest first; ?slow=SECONDS: only requests that took at least
 * this long. */
static void traces_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    double min_seconds = 0;
    if (query_read_number(x, "slow", 0, 1e9, &min_seconds, &err) != OK) {
        api_fail_error(x, &err, "slow");
        return;
    }
    json_t *list = json_array();
    pthread_mutex_lock(&s->lock);
    for (uint64_t i = 0; i < MIN(s->n_traces, REQUEST_TRACES_MAX); i++) {
        json_t *v = s->traces[(s->n_traces - 1 - i) % REQUEST_TRACES_MAX];
        if (json_get_number(v, "total") >= min_seconds)
            json_array_append_new(list, json_deep_copy(v));
    }
    pthread_mutex_unlock(&s->lock);
    exchange_reply_json(x, 200, json_pack("{s:o}", "traces", list));
}

static const struct http_route routes[] = {
    {"GET", "/v1/system", SCOPE_CHAT, system_handle},
    {"GET", "/v1/traces", SCOPE_CHAT, traces_handle},
    {"GET", "/v1/adapters", SCOPE_CHAT, adapters_handle},
    {"GET", "/v1/adapters/*", SCOPE_CHAT, versions_handle},
    {"POST", "/v1/adapters/*", SCOPE_ADMIN, rollback_handle},
    {"GET", "/v1/runs", SCOPE_CHAT, runs_handle},
    {"GET", "/v1/runs/*", SCOPE_CHAT, run_handle},
    {0},
};

const struct server_module system_module = {.routes = routes};
