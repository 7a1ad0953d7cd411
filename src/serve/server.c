/*
 * server: functions that the handlers share (errors, adapters, model names, grammars), and the
 * start and shutdown of the server.
 */
#define _GNU_SOURCE
#include "serve/server.h"
#include "jobs/jobs.h"
#include "ops/ops.h"
#include "serve/auto_model.h"
#include "serve/reasoning.h"
#include "serve/request_fields.h"

#include <malloc.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    WORKERS = 8,
    MAX_ROUTES = 128,
    MEMORY_RESERVE = 64 << 20, /* emergency reserve: released when an allocation fails */
};

/* errors */

static const struct {
    int status;
    const char *type;
} error_types[] = {
    {400, "invalid_request_error"}, {401, "authentication_error"},  {403, "permission_error"},
    {404, "not_found_error"},       {405, "invalid_request_error"}, {409, "conflict_error"},
    {413, "invalid_request_error"}, {429, "rate_limit_error"},      {503, "overloaded_error"},
    {507, "insufficient_storage"},
};

void api_fail(struct exchange *x, int status, const char *type, const char *param, const char *code,
              const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *message = xvasprintf(fmt, ap);
    va_end(ap);
    for (size_t i = 0; !type && i < ARRAY_LEN(error_types); i++)
        if (error_types[i].status == status) type = error_types[i].type;
    struct buf clean = {0}; // the message may quote part of a character of the request
    buf_add_sanitized(&clean, message, strlen(message));
    const char *text = clean.data ? clean.data : "";
    exchange_reply_json(x, status,
                        strncmp(exchange_path(x), "/api/", 5) == 0
                            ? json_pack("{s:s}", "error", text)
                            : json_pack("{s:{s:s,s:s,s:s?,s:s?}}", "error", "message", text, "type",
                                        type ? type : "server_error", "param", param, "code",
                                        code));
    buf_release(&clean);
    free(message);
}

const char *api_error_param(const struct error *err, char out[API_PARAM_LEN]) {
    size_t n = err->text[0] == '\'' ? strcspn(err->text + 1, "'") : 0;
    if (n == 0 || n >= API_PARAM_LEN || err->text[n + 1] != '\'') return NULL;
    memcpy(out, err->text + 1, n);
    out[n] = 0;
    bool known = request_field_is_known(out) || strstr(err->text, "is not a field of this request");
    return known ? out : NULL;
}

void api_fail_error(struct exchange *x, const struct error *err, const char *param) {
    char named[API_PARAM_LEN];
    switch (err->code) {
    case ERR_MISSING:
        api_fail(x, 404, NULL, param ? param : "model", "model_not_found", "%s", err->text);
        return;
    case ERR_STATE:
    case ERR_MEMORY:
        exchange_add_header(x, "Retry-After", "1");
        api_fail(x, 503, NULL, NULL, "overloaded", "%s", err->text);
        return;
    case ERR_IO:
        log_warn("request %s (%s %s) failed: %s", exchange_id(x), exchange_method(x),
                 exchange_path(x), err->text);
        api_fail(x, 500, NULL, param, "internal_error", "%s", err->text);
        return;
    default:
        api_fail(x, 400, NULL, param ? param : api_error_param(err, named), "invalid_value", "%s",
                 err->text);
    }
}

/* With the status 200 of its stream, the server has accepted the request, so the error is never
 * reported as the client's. */
json_t *api_error_json(const struct error *err, bool plain) {
    bool busy = err->code == ERR_STATE || err->code == ERR_MEMORY;
    struct buf clean = {0};
    buf_add_sanitized(&clean, err->text, strlen(err->text));
    const char *text = clean.data ? clean.data : "";
    json_t *v = plain ? json_pack("{s:s}", "error", text)
                      : json_pack("{s:{s:s,s:s,s:n,s:s}}", "error", "message", text, "type",
                                  busy ? "overloaded_error" : "server_error", "param", "code",
                                  busy ? "overloaded" : "internal_error");
    buf_release(&clean);
    return v;
}

/* ids, and adapters by name */

struct server *server_front(struct server *s) {
    return s->front ? s->front : s;
}

void server_new_id(struct server *s, const char *prefix, char out[40]) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    uint64_t n = __atomic_add_fetch(&server_front(s)->n_ids, 1, __ATOMIC_RELAXED);
    struct rng r = rng_make((uint64_t)s->started ^ (uint64_t)getpid() << 32, RNG_SAMPLE,
                            (uint32_t)(n >> 32), (uint32_t)n);
    int at = snprintf(out, 16, "%s", prefix);
    for (int i = 0; i < 24; i++) out[at++] = letters[rng_below(&r, sizeof letters - 1)];
    out[at] = 0;
}

static struct adapter_entry *adapter_entry_find(const struct server *s, const char *name) {
    for (int i = 0; i < s->n_adapters; i++)
        if (strcmp(s->adapters[i].name, name) == 0) return &s->adapters[i];
    return NULL;
}

bool server_adapter_listed(struct server *s, const char *name) {
    pthread_mutex_lock(&s->lock);
    bool has = adapter_entry_find(s, name) != NULL;
    pthread_mutex_unlock(&s->lock);
    return has;
}

struct adapter_entry *server_adapters(struct server *s, int *n) {
    pthread_mutex_lock(&s->lock);
    struct adapter_entry *v = xcalloc((size_t)MAX(s->n_adapters, 1), sizeof *v);
    *n = s->n_adapters;
    for (int i = 0; i < *n; i++) {
        v[i] = s->adapters[i];
        v[i].name = xstrdup(v[i].name);
        v[i].path = xstrdup(v[i].path);
        v[i].derived_spec = json_deep_copy(v[i].derived_spec);
    }
    pthread_mutex_unlock(&s->lock);
    return v;
}

void server_adapters_free(struct adapter_entry *v, int n) {
    for (int i = 0; i < n; i++) {
        free(v[i].name);
        free(v[i].path);
        json_decref(v[i].derived_spec);
    }
    free(v);
}

json_t *server_derived_spec(struct server *s, const char *name) {
    pthread_mutex_lock(&s->lock);
    const struct adapter_entry *entry = adapter_entry_find(s, name);
    json_t *spec = entry ? json_deep_copy(entry->derived_spec) : NULL;
    pthread_mutex_unlock(&s->lock);
    return spec;
}

/* Adds or replaces an entry; takes ownership of spec. is_base: the entry is the base model under
 * another name; the adapters of all other entries are in the pool. */
static void adapter_entry_set(struct server *s, const char *name, const char *path, bool is_base,
                              json_t *spec) {
    pthread_mutex_lock(&s->lock);
    struct adapter_entry *entry = adapter_entry_find(s, name);
    if (entry) {
        free(entry->path);
        json_decref(entry->derived_spec);
    } else {
        s->adapters = xrealloc(s->adapters, sizeof *entry * (size_t)(s->n_adapters + 1));
        entry = &s->adapters[s->n_adapters++];
        *entry = (struct adapter_entry){.name = xstrdup(name), .id = s->next_id++};
    }
    entry->path = xstrdup(path);
    entry->is_base = is_base;
    entry->derived_spec = spec;
    entry->created = (int64_t)time(NULL);
    pthread_mutex_unlock(&s->lock);
}

static void adapter_entry_remove(struct server *s, const char *name) {
    pthread_mutex_lock(&s->lock);
    struct adapter_entry *entry = adapter_entry_find(s, name);
    if (entry) {
        free(entry->name);
        free(entry->path);
        json_decref(entry->derived_spec);
        int after = --s->n_adapters - (int)(entry - s->adapters);
        memmove(entry, entry + 1, sizeof *entry * (size_t)after);
    }
    pthread_mutex_unlock(&s->lock);
}

/* Checks the name of an adapter. Names are printed in replies and logs, and '*' and '+' are
 * reserved for mixes. */
static int name_check(const struct server *s, const char *name, struct error *err) {
    size_t n = strlen(name);
    bool valid = n > 0 && n <= 128 && name[0] != '.';
    for (size_t i = 0; valid && i < n; i++)
        valid = (uint8_t)name[i] > ' ' && !strchr("*+\\\"", name[i]);
    if (!valid)
        return error_set(err, ERR_USAGE,
                         "'%.140s' is not a name for an adapter: 1 to 128 bytes, none of them a "
                         "blank, '*', '+', '\"' or '\\', and no '.' at the start",
                         name);
    if (strcmp(name, s->name) == 0)
        return error_set(err, ERR_USAGE, "'%s' is the base's name", name);
    return OK;
}

int server_adapter_load(struct server *s, const char *name, const char *path, bool replace,
                        struct error *err) {
    if (name_check(s, name, err) != OK) return err->code;
    if (!replace && server_adapter_listed(s, name))
        return error_set(err, ERR_STATE, "the adapter '%s' is loaded already", name);
    if (adapter_pool_publish_path(s->pool, name, path, err) != OK) return err->code;
    adapter_entry_set(s, name, path, false, NULL);
    if (s->ab) ab_end_promotion(s->ab, name);
    return OK;
}

int server_adapter_publish(struct server *s, const char *name, const char *path, struct adapter *a,
                           struct error *err) {
    if (name_check(s, name, err) != OK || adapter_pool_publish(s->pool, name, a, err) != OK)
        return err->code;
    adapter_entry_set(s, name, path, false, NULL);
    if (s->ab) ab_end_promotion(s->ab, name);
    return OK;
}

int server_adapter_register(struct server *s, const char *name, const char *path,
                            struct error *err) {
    if (name_check(s, name, err) != OK || adapter_pool_add(s->pool, name, path, err) != OK)
        return err->code;
    adapter_entry_set(s, name, path, false, NULL);
    return OK;
}

int server_derived_put(struct server *s, const char *name, const char *path, struct adapter *a,
                       json_t *spec, struct error *err) {
    struct error none;
    int rc = name_check(s, name, err);
    if (rc == OK && a) rc = adapter_pool_publish(s->pool, name, a, err);
    if (rc != OK) {
        json_decref(spec);
        return rc;
    }
    adapter_entry_set(s, name, path, !a, spec);
    if (!a) adapter_pool_remove(s->pool, name, &none); // remove the name's previous adapter, if any
    return OK;
}

static bool adapter_entry_is_base(struct server *s, const char *name) {
    pthread_mutex_lock(&s->lock);
    const struct adapter_entry *entry = adapter_entry_find(s, name);
    bool is_base = entry && entry->is_base;
    pthread_mutex_unlock(&s->lock);
    return is_base;
}

int server_adapter_unload(struct server *s, const char *name, struct error *err) {
    if (!server_adapter_listed(s, name))
        return error_set(err, ERR_MISSING, "there is no adapter '%s'", name);
    bool is_base = adapter_entry_is_base(s, name);
    adapter_entry_remove(s, name);
    return is_base ? OK : adapter_pool_remove(s->pool, name, err);
}

/* The adapter's name in a model name NAME, BASE:NAME, BASE@NAME or NAME:latest. malloc'ed. */
static char *adapter_name_from_model(struct server *s, const char *model) {
    size_t n = strlen(s->name);
    char *name = xstrdup(model), *tag;
    if (server_adapter_listed(s, name)) return name;
    if (strncmp(model, s->name, n) == 0 && (model[n] == ':' || model[n] == '@')) {
        free(name);
        name = xstrdup(model + n + 1);
    }
    if (!server_adapter_listed(s, name) && (tag = strrchr(name, ':')) &&
        strcmp(tag, ":latest") == 0)
        *tag = 0;
    return name;
}

bool server_name_is_base(const struct server *s, const char *model) {
    size_t n = strlen(s->name);
    if (!model || !*model || strcmp(model, s->name) == 0 || strcmp(model, s->path) == 0)
        return true;
    for (int i = 0; i < s->options->names.n; i++)
        if (strcmp(model, s->options->names.v[i]) == 0) return true;
    return strncmp(model, s->name, n) == 0 && strcmp(model + n, ":latest") == 0;
}

const struct server_module *server_module_at(const struct server *s, int i) {
    return s->options->modules ? s->options->modules[i] : NULL;
}

/* Asks each module to load an adapter of that name; false: no module has it. */
static bool adapter_find_in_modules(struct server *s, const char *name) {
    const struct server_module *m;
    for (int i = 0; (m = server_module_at(s, i)); i++)
        if (m->find_adapter && m->find_adapter(s, name)) return true;
    return false;
}

/* The name in the pool of an adapter of that name which only this request's caller may use,
 * malloc'ed; NULL: no module has one. */
static char *adapter_find_own(struct server *s, const char *name) {
    const struct server_module *m;
    char *own = NULL;
    for (int i = 0; !own && (m = server_module_at(s, i)); i++)
        if (m->own_adapter) own = m->own_adapter(s, exchange_current(), name);
    return own;
}

/* Waiting for adapters. A request whose adapters do not fit now, because running requests use the
 * memory of the pool, is postponed for at most ADAPTER_WAIT_SECONDS; later requests for adapters
 * are queued after it. A postponed request holds no adapter, so two mixes cannot wait for each
 * other. */
enum { ADAPTER_WAIT_SECONDS = 60 };

/* Postpones the request of this thread, if it is one and has not waited too long. */
static void request_wait_for_adapters(struct server *s) {
    struct exchange *x = exchange_current();
    if (!x || clock_now() > exchange_start_time(x) + ADAPTER_WAIT_SECONDS) return;
    if (exchange_postpone(x, s->pool)) memory_budget_release(s->memory, x);
}

/* ERR_MEMORY: the adapter `name` and those of `ref` never fit into the pool together. */
static int mix_check_fits(struct server *s, const struct model_ref *ref, const char *name,
                          struct error *err) {
    size_t bytes = adapter_pool_bytes_of(s->pool, name),
           most = adapter_pool_stats(s->pool).max_bytes;
    for (int i = 0; i < ref->n; i++) bytes += adapter_bytes(ref->terms[i].adapter);
    if (bytes <= most || most == 0) return OK;
    return error_set(err, ERR_MEMORY,
                     "the adapters of this mix need %.1f MB, and the adapter pool has %.1f MB",
                     (double)bytes / (1 << 20), (double)most / (1 << 20));
}

/* The adapter, retained. If it does not fit now, the request waits, and the result is ERR_STATE. */
static struct adapter *adapter_get_or_wait(struct server *s, const char *name,
                                           const struct model_ref *ref, struct error *err) {
    struct exchange *x = exchange_current();
    struct adapter *a = NULL;
    if (x && exchange_is_behind_postponed(x, s->pool))
        error_set(err, ERR_STATE, "earlier requests wait for memory for their adapters");
    else
        a = adapter_pool_get(s->pool, name, err);
    if (!a && err->code == ERR_STATE && mix_check_fits(s, ref, name, err) == OK)
        request_wait_for_adapters(s);
    return a;
}

int model_ref_add(struct server *s, const char *name, float weight, struct model_ref *ref,
                  struct error *err) {
    if (ref->n == ENGINE_MIX_MAX)
        return error_set(err, ERR_USAGE, "'model' names more than %d adapters", ENGINE_MIX_MAX);
    char *own = NULL;
    if (!server_adapter_listed(s, name) && !adapter_find_in_modules(s, name) &&
        !(own = adapter_find_own(s, name)))
        return error_set(err, ERR_MISSING,
                         "the model '%s' does not exist; GET /v1/models lists those that do", name);
    if (adapter_entry_is_base(s, name)) return OK;
    struct adapter *a = adapter_get_or_wait(s, own ? own : name, ref, err);
    free(own);
    if (!a)
        return adapter_entry_is_base(s, name) ? OK : err->code; // replaced by the base meanwhile
    ref->terms[ref->n++] = (struct weighted_adapter){.adapter = a, .weight = weight};
    return OK;
}

/* A weighted sum of names, such as "a*0.7+b*0.3". */
static int model_ref_parse_mix(struct server *s, const char *model, struct model_ref *ref,
                               struct error *err) {
    char *copy = xstrdup(model), *rest = copy;
    int rc = OK;
    for (char *term; rc == OK && (term = strsep(&rest, "+"));) {
        char *star = strchr(term, '*'), *end = NULL;
        double w = star ? strtod(star + 1, &end) : 1;
        if (star) *star = 0;
        if (star && (end == star + 1 || *end || !(w >= -100 && w <= 100)))
            rc = error_set(err, ERR_USAGE,
                           "'model': the weight of '%s' in '%s' is not a number from -100 to 100",
                           term, model);
        char *name = adapter_name_from_model(s, term);
        if (rc == OK && !server_name_is_base(s, name))
            rc = model_ref_add(s, name, (float)w, ref, err);
        free(name);
    }
    free(copy);
    return rc;
}

/* The model reference of requests without a model: all adapters whose scale is not 0. */
static int model_ref_default(struct server *s, struct model_ref *out, struct error *err) {
    int n, rc = OK;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n && rc == OK; i++)
        if (v[i].scale != 0) rc = model_ref_add(s, v[i].name, (float)v[i].scale, out, err);
    out->label = xstrdup(out->n ? "mix" : "base");
    server_adapters_free(v, n);
    if (rc != OK) model_ref_release(out);
    return rc;
}

int model_ref_resolve(struct server *s, const char *model, struct model_ref *out,
                      struct error *err) {
    int rc = OK;
    *out = (struct model_ref){0};
    size_t max_bytes = model && strpbrk(model, "*+") ? MODEL_NAME_MAX : JSON_NAME_MAX;
    if (model && strlen(model) > max_bytes)
        return error_set(err, ERR_USAGE, "'model' may have at most %zu bytes", max_bytes);
    bool base = server_name_is_base(s, model);
    *out = (struct model_ref){.name = xstrdup(model && *model ? model : s->name)};
    if (!model || !*model) return model_ref_default(s, out, err);
    char *name = base ? xstrdup("base") : adapter_name_from_model(s, model);
    if (!base && strpbrk(model, "*+") && !server_adapter_listed(s, name)) {
        free(name);
        name = xstrdup("mix");
        rc = model_ref_parse_mix(s, model, out, err);
    } else if (!base) {
        rc = model_ref_add(s, name, 1, out, err);
    }
    out->label = name;
    if (rc != OK) model_ref_release(out);
    return rc;
}

/* Parses [{id, scale}], and sets scales[i] for each v[i] whose id is in the list. */
static int scales_read(const json_t *list, const struct adapter_entry *v, int n, double *scales,
                       struct error *err) {
    const json_t *item;
    size_t i;
    if (!json_is_array(list))
        return error_set(err, ERR_USAGE, "'lora' must be a list of {\"id\": N, \"scale\": X}");
    json_array_foreach (list, i, item) {
        int64_t id = -1;
        int at = 0;
        double scale = 1;
        if (json_read_int(item, "id", 0, 1 << 30, &id, err) != OK ||
            json_read_number(item, "scale", -100, 100, &scale, err) != OK)
            return err->code;
        while (at < n && v[at].id != id) at++;
        if (at == n)
            return error_set(err, ERR_USAGE, "'lora' has the id %lld, which no adapter has",
                             (long long)id);
        scales[at] = scale;
    }
    return OK;
}

int model_ref_from_list(struct server *s, const json_t *list, struct model_ref *out,
                        struct error *err) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    double *scales = xcalloc((size_t)n + 1, sizeof *scales);
    *out = (struct model_ref){.name = xstrdup(s->name), .label = xstrdup("mix")};
    int rc = scales_read(list, v, n, scales, err);
    for (int i = 0; rc == OK && i < n; i++)
        if (scales[i] != 0) rc = model_ref_add(s, v[i].name, (float)scales[i], out, err);
    free(scales);
    server_adapters_free(v, n);
    if (rc != OK) model_ref_release(out);
    return rc;
}

int server_set_scales(struct server *s, const json_t *list, struct error *err) {
    pthread_mutex_lock(&s->lock);
    double *scales = xcalloc((size_t)s->n_adapters + 1, sizeof *scales);
    int rc = scales_read(list, s->adapters, s->n_adapters, scales, err);
    for (int i = 0; rc == OK && i < s->n_adapters; i++) s->adapters[i].scale = scales[i];
    pthread_mutex_unlock(&s->lock);
    free(scales);
    return rc;
}

void model_ref_release(struct model_ref *ref) {
    for (int i = 0; i < ref->n; i++) adapter_release(ref->terms[i].adapter);
    free(ref->name);
    free(ref->label);
    strings_release(&ref->candidates);
    *ref = (struct model_ref){0};
}

void model_ref_apply(const struct model_ref *ref, struct engine_request *r) {
    bool alone = ref->n == 1 && ref->terms[0].weight == 1.0f;
    r->adapter = alone ? ref->terms[0].adapter : NULL;
    r->mix = alone || ref->n == 0 ? NULL : ref->terms;
    r->n_mix = alone ? 0 : ref->n;
}

/* grammars */

/* The caller for which the grammar cache counts: the id of the key, or else the address. */
static const char *grammar_caller(void) {
    const struct exchange *x = exchange_current();
    if (!x) return "";
    const char *key = exchange_key_id(x);
    return key ? key : exchange_limits_name(x);
}

struct grammar *server_grammar(struct server *s, const char *kind, const char *text, size_t len,
                               struct error *err) {
    struct grammar *g = grammar_cache_get(s->grammars, grammar_caller(), kind, text, len, err);
    if (g && s->engine) engine_prepare_grammars(s->engine);
    return g;
}

void server_grammar_release(struct server *s, struct grammar *g) {
    grammar_cache_release(s->grammars, g);
}

/* life cycle */

static void http_refuse(void *ctx, struct exchange *x, int status, const char *code,
                        const char *message) {
    (void)ctx;
    api_fail(x, status, NULL, NULL, code, "%s", message);
}

static struct body_sink *body_sink_find(void *ctx, struct exchange *x, const struct http_route *r) {
    struct server *s = ctx;
    struct body_sink *found = NULL;
    const struct server_module *m;
    for (int i = 0; !found && (m = server_module_at(s, i)); i++)
        if (m->body_sink) found = m->body_sink(s, x, r);
    return found;
}

static void request_done(void *ctx, const struct exchange *x) {
    struct server *s = ctx;
    if (!fallback_is_part(x)) request_metrics_add_exchange(s, x);
    memory_budget_release(s->memory, x);
    auth_request_done(s, x);
    http_resume_postponed(s->http); // it may have released adapters
}

static int routes_add(struct http_route all[MAX_ROUTES], int n, const struct http_route *r) {
    for (; r && r->method; r++) {
        CHECK(n + 1 < MAX_ROUTES);
        all[n++] = *r;
    }
    return n;
}

static struct http_route *routes_join(const struct server *s) {
    struct http_route *all = xcalloc(MAX_ROUTES, sizeof *all);
    const struct server_module *m;
    int n = routes_add(all, 0, teams_routes);
    n = routes_add(all, n, agents_routes);
    n = routes_add(all, n, fallbacks_routes);
    n = routes_add(all, n, metrics_routes);
    for (int i = 0; (m = server_module_at(s, i)); i++) n = routes_add(all, n, m->routes);
    all[n] = (struct http_route){0};
    return all;
}

static int modules_restore(struct server *s, struct error *err) {
    const struct server_module *m;
    for (int i = 0; (m = server_module_at(s, i)); i++)
        if (m->restore && m->restore(s, err) != OK) return err->code;
    return OK;
}

static void modules_load(struct server *s) {
    const struct server_module *m;
    for (int i = 0; (m = server_module_at(s, i)); i++)
        if (m->load) m->load(s);
}

static int modules_open(struct server *s, struct error *err) {
    const struct server_module *m;
    for (int i = 0; (m = server_module_at(s, i)); i++)
        if (m->open && m->open(s, err) != OK) return err->code;
    return OK;
}

/* In reverse order, because a module may use those before it until it is closed. */
static void modules_close(struct server *s) {
    int n = 0;
    while (server_module_at(s, n)) n++;
    while (n-- > 0)
        if (server_module_at(s, n)->close) server_module_at(s, n)->close(s);
}

char *model_name_from_path(const char *path) {
    char *copy = xstrdup(path), *end = copy + strlen(copy);
    while (end > copy + 1 && end[-1] == '/') *--end = 0;
    const char *slash = strrchr(copy, '/');
    char *name = xstrdup(slash ? slash + 1 : copy), *dot = strstr(name, ".gguf");
    if (dot && !dot[5]) *dot = 0;
    free(copy);
    return name;
}

char *named_file_parse(const char *text, const char **path) {
    const char *is = strchr(text, '='), *slash = strrchr(text, '/');
    *path = is ? is + 1 : text;
    if (is) return xstrndup(text, (size_t)(is - text));
    const char *from = slash ? slash + 1 : text, *dot = strrchr(from, '.');
    return dot ? xstrndup(from, (size_t)(dot - from)) : xstrdup(from);
}

struct adapter *server_adapter_keep(void *ctx, const char *path, struct error *err) {
    struct server *s = ctx;
    struct adapter *a = adapter_open(path, s->model, err);
    if (!a) return NULL;
    adapter_warn_no_effect(a, path);
    s->kept_adapters =
        xrealloc(s->kept_adapters, sizeof *s->kept_adapters * (size_t)(s->n_kept_adapters + 1));
    return s->kept_adapters[s->n_kept_adapters++] = a;
}

/* Lists an adapter of a base that is not loaded; its files are checked when the base is. */
static int adapter_declare(struct server *s, const char *name, const char *path,
                           struct error *err) {
    struct adapter_size size = {0};
    if (name_check(s, name, err) != OK || adapter_measure(path, DTYPE_F32, &size, err) != OK)
        return err->code;
    if (server_adapter_listed(s, name))
        return error_set(err, ERR_STATE, "the adapter '%s' is listed already", name);
    adapter_entry_set(s, name, path, false, NULL);
    return OK;
}

/* "critic=DIR", "BASE:critic=DIR", "DIR", or {"name": "critic", "path": "DIR"}. */
static int adapter_load_spec(struct server *s, const char *spec, struct error *err) {
    struct server *base = base_at(s, serve_adapter_base(s->options, spec) + 1);
    const char *equals = strchr(spec, '='), *path = equals ? equals + 1 : spec;
    json_t *v = NULL;
    char *name = NULL;
    if (*spec == '{') {
        if (!(v = json_parse(spec, strlen(spec), "adapter", err))) return err->code;
        path = json_get_string(v, "path");
        name = xstrdup(json_get_string(v, "name"));
    } else if (equals) {
        const char *begin = spec + (base == s ? 0 : strlen(base->name) + 1);
        name = xstrndup(begin, (size_t)(equals - begin));
    } else {
        name = model_name_from_path(spec);
    }
    int rc = base == s ? server_adapter_load(s, name, path, false, err)
                       : adapter_declare(base, name, path, err);
    json_decref(v);
    free(name);
    return rc;
}

static int adapters_load(struct server *s, struct error *err) {
    for (int i = 0; i < s->options->adapters.n; i++)
        if (adapter_load_spec(s, s->options->adapters.v[i], err) != OK)
            return error_wrap(err, "--adapter %s", s->options->adapters.v[i]);
    return OK;
}

/* Opens --adapter-dir, and adds an entry for every adapter in it whose name is valid. */
static int adapters_scan(struct server *s, struct error *err) {
    struct arena mem = {0};
    int n = 0;
    if (!s->options->adapter_dir) return OK;
    if (adapter_pool_scan(s->pool, s->options->adapter_dir, err) < 0) return err->code;
    const struct adapter_pool_item *v = adapter_pool_list(s->pool, &mem, &n);
    for (int i = 0; i < n; i++)
        if (v[i].path && name_check(s, v[i].name, err) == OK)
            adapter_entry_set(s, v[i].name, v[i].path, false, NULL);
    arena_release(&mem);
    return OK;
}

/* The settings of the process while at least one server runs. */
static void process_restrict(bool begin) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int n_servers;
    pthread_mutex_lock(&lock);
    n_servers += begin ? 1 : -1;
    if (n_servers == (begin ? 1 : 0)) {
        memory_reserve_set(begin ? MEMORY_RESERVE : 0);
        file_set_regular_only(begin); /* paths come from requests */
    }
    pthread_mutex_unlock(&lock);
}

static void server_release(struct server *s) {
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_mutex_unlock(&s->lock);
    base_pool_stop(s->bases);
    http_free(s->http);
    __atomic_store_n(&s->http_ended, true, __ATOMIC_RELEASE);
    alerts_free(s->alerts);
    modules_close(s);
    while (__atomic_load_n(&s->n_async_threads, __ATOMIC_ACQUIRE))
        usleep(1000); // they end soon, because their stop flags are set
    fallbacks_close(s);
    base_pool_free(s->bases);
    batcher_free(s->batcher);
    s->batcher = NULL;
    engine_set_grammar_memory(s->engine, 0);
    ab_close(s->ab);
    teams_release(s);
    agents_release(s);
    auto_model_close(s);
    for (int i = 0; i < s->n_kept_adapters; i++) adapter_release(s->kept_adapters[i]);
    free(s->kept_adapters);
    keys_close(s->keys);
    auth_close(s);
    if (s->metrics) pthread_mutex_destroy(&s->metrics_lock);
    metrics_free(s->metrics);
    strings_release(&s->slack_urls);
    for (int i = 0; i < REQUEST_TRACES_MAX; i++) json_decref(s->traces[i]);
    server_base_close(s);
    yield_free(s->yield);
    grammar_cache_free(s->grammars);
    server_adapters_free(s->adapters, s->n_adapters);
    memory_budget_free(s->memory);
    if (s->restricts_process) process_restrict(false);
    free(s->routes);
    free(s->name);
    free(s->path);
    free(s->backups);
}

/* Makes all threads share two heaps, whose free ends are returned to the system. With a heap per
 * thread, each as large as its largest request, heaps would be most of the server's memory. */
static void malloc_configure(void) {
#ifdef __GLIBC__
    struct rlimit space;
    bool limited = getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY;
    mallopt(M_ARENA_MAX, limited ? 1 : 2); // a second heap reserves 128 MB of address space
    mallopt(M_MMAP_THRESHOLD, 128 << 10);
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
#endif
}

static void signals_block(sigset_t *set) {
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    pthread_sigmask(SIG_BLOCK, set, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void alerts_refresh_metrics(void *ctx) {
    request_metrics_refresh(ctx);
}

/* A Slack URL is a secret. One may be in the environment, which other users cannot read, unlike the
 * command line. */
static int alerts_start(struct server *s, struct error *err) {
    const char *slack = getenv("SHOAL_ALERT_SLACK");
    struct alerts_options o = {.interval_seconds = s->options->alert_seconds,
                               .webhooks = &s->options->alert_webhooks,
                               .slack_urls = &s->slack_urls,
                               .source = s->name,
                               .refresh = alerts_refresh_metrics,
                               .ctx = s};
    for (int i = 0; i < s->options->alert_slacks.n; i++)
        strings_add(&s->slack_urls, s->options->alert_slacks.v[i]);
    if (slack && *slack) strings_add(&s->slack_urls, slack);
    s->alerts = alerts_new(s->metrics, &o, err);
    return s->alerts ? OK : err->code;
}

/* The byte limit of the adapter pool under --max-memory: the plan's share and the rest that the
 * plan uses for nothing else. 0: no limit. */
static size_t adapter_pool_limit(const struct server *s) {
    const struct memory_plan *p = s->options->plan;
    if (!s->options->max_memory || !p) return 0;
    size_t spare = p->limit > p->total ? p->limit - p->total : 0;
    return MAX(p->pool + spare, 1);
}

/* Publishes the winner of an A/B test under a name. path: the files of an adapter with that
 * content.
 */
static int promotion_publish(void *ctx, const char *name, struct adapter *a, const char *path,
                             struct error *err) {
    struct server *s = ctx;
    if (adapter_pool_publish(s->pool, name, a, err) != OK) return err->code;
    adapter_entry_set(s, name, path, false, NULL);
    return OK;
}

static int experiments_open(struct server *s, struct error *err) {
    char *path = path_join(s->options->state_dir, "ab.db");
    struct ab_options o = {.path = path,
                           .model = s->model,
                           .pool = s->pool,
                           .metrics = s->metrics,
                           .started = s->started,
                           .feedback = s->options->feedback,
                           .reply_bytes = s->reply_log_bytes,
                           .max_bytes = s->options->feedback_bytes,
                           .publish = promotion_publish,
                           .ctx = s};
    s->ab = ab_open(&o, err);
    free(path);
    if (!s->ab) return err->code;
    struct strings names = {0};
    int n;
    struct adapter_entry *list = server_adapters(s, &n);
    for (int i = 0; i < n; i++) strings_add(&names, list[i].name);
    server_adapters_free(list, n);
    ab_resume(s->ab, &names);
    strings_release(&names);
    return OK;
}

static void fingerprint_init(struct server *s, const char *hash, const struct engine_options *eo) {
    // two blanks: so fingerprints of the exact class are those of earlier versions
    char *text = xasprintf("%s %s  kv %s lora %s", hash, numeric_class_name(s->model->cls),
                           dtype_name(eo->kv_elem), dtype_name(eo->lora_elem));
    sha256_bytes(text, strlen(text), s->fingerprint);
    free(text);
}

void system_fingerprint(const struct server *s, const struct model_ref *ref,
                        char out[SYSTEM_FINGERPRINT_LEN]) {
    char hash[HASH_LEN];
    struct buf text = {0};
    *out = '\0';
    if (ref->is_elsewhere) return;
    buf_puts(&text, s->fingerprint);
    for (int i = 0; i < ref->n; i++)
        buf_printf(&text, " %s*%a", ref->terms[i].adapter->hash, (double)ref->terms[i].weight);
    sha256_bytes(text.data, text.len, hash);
    snprintf(out, SYSTEM_FINGERPRINT_LEN, "fp_%.12s", hash);
    buf_release(&text);
}

int server_base_open(struct server *s, const struct engine_options *eo, struct error *err) {
    struct adapter_pool_options po = {
        .elem = eo->lora_elem, .serve_only = false, .max_bytes = adapter_pool_limit(s)};
    const char *hash = model_hash(s->model, err);
    if (!hash) return err->code;
    fingerprint_init(s, hash, eo);
    s->piece_bytes = token_piece_bytes(s->model->tok);
    s->pool = adapter_pool_new(s->model, &po);
    engine_set_grammar_memory(s->engine, s->grammar_cache_bytes);
    s->batcher = batcher_new(s->engine, (int)s->options->max_waiting);
    batcher_set_yield(s->batcher, server_front(s)->yield);
    batcher_set_step_seconds(s->batcher, s->options->max_step_ms / 1e3);
    s->reasoning_form =
        reasoning_form_find(s->options->reasoning_parser, s->model->chat_template, s->model->tok);
    return OK;
}

void server_base_close(struct server *s) {
    batcher_free(s->batcher);
    adapter_pool_free(s->pool);
    s->batcher = NULL;
    s->pool = NULL;
}

static int server_open(struct server *s, const struct engine_options *eo, struct error *err) {
    if (modules_restore(s, err) != OK || server_base_open(s, eo, err) != OK) return err->code;
    if (s->options->bases.n && !(s->bases = base_pool_new(s, err))) return err->code;
    if (adapters_load(s, err) != OK || adapters_scan(s, err) != OK || teams_open(s, err) != OK ||
        agents_open(s, err) != OK || auto_model_open(s, err) != OK)
        return err->code;
    if (s->bases && base_pool_start(s->bases, err) != OK) return err->code;
    modules_load(s);
    s->grammars =
        grammar_cache_new(&(struct grammar_cache_options){.bytes = s->grammar_cache_bytes});
    request_metrics_open(s);
    if (auth_open(s, err) != OK || experiments_open(s, err) != OK || fallbacks_open(s, err) != OK)
        return err->code;
    s->routes = routes_join(s);
    struct http_callbacks calls = {.ctx = s,
                                   .routes = s->routes,
                                   .workers = WORKERS,
                                   .self = &s->http,
                                   .admit = auth_admit,
                                   .sink = body_sink_find,
                                   .refuse = http_refuse,
                                   .dispatch = route_dispatch,
                                   .handle = s->fallbacks ? fallback_handle
                                             : s->bases   ? base_pool_handle
                                                          : NULL,
                                   .any_host = auth_any_host,
                                   .ended = request_done};
    // the token last: then the lock of the jobs is held, so no other server uses the state folder
    if (modules_open(s, err) != OK || alerts_start(s, err) != OK || auth_token_create(s, err) != OK)
        return err->code;
    process_restrict(true);
    s->restricts_process = true;
    return http_new(&s->options->http, &calls, err) ? OK : err->code;
}

/* Shutdown has two phases. Running replies have --drain-seconds to finish; then they are cut off,
 * and the stop flags of the work for them are set. If requests still run CANCEL_SECONDS later, or
 * if a second signal comes, the process ends without them; the state on disk is then as after a
 * kill, which every start can handle. After the last request, jobs and the other modules have
 * CLOSE_SECONDS to stop. If the process ends because requests do not, jobs have JOBS_SECONDS. */
enum { CANCEL_SECONDS = 5, CLOSE_SECONDS = 15, JOBS_SECONDS = 3, FORCED_EXIT_STATUS = 3 };
struct shutdown_state {
    struct server *s;
    sigset_t set;
    bool done;        /* atomic: the server has ended normally */
    pthread_t thread; /* runs shutdown_thread */
};

/* Ends the process. It waits for no lock of the server without a limit, because a stuck thread may
 * hold it. */
static _Noreturn void shutdown_force(struct server *s, const char *why, double jobs_seconds) {
    log_warn("%s", why);
    if (s->has_token) unlink(s->token_path);
    if (s->jobs && jobs_seconds > 0) jobs_stop(s->jobs, jobs_seconds);
    _exit(FORCED_EXIT_STATUS); // running jobs are killed with it (PR_SET_PDEATHSIG)
}

static void *shutdown_thread(void *ctx) {
    struct shutdown_state *shutdown = ctx;
    double end = clock_now() + shutdown->s->options->http.drain_seconds + CANCEL_SECONDS;
    const struct timespec interval = {.tv_nsec = 50000000};
    while (!__atomic_load_n(&shutdown->done, __ATOMIC_ACQUIRE)) {
        if (sigtimedwait(&shutdown->set, NULL, &interval) > 0)
            shutdown_force(shutdown->s, "second signal: ending at once", 0);
        bool http_ended = __atomic_load_n(&shutdown->s->http_ended, __ATOMIC_ACQUIRE);
        if (clock_now() > end + (http_ended ? CLOSE_SECONDS : 0))
            shutdown_force(shutdown->s, "requests did not stop in time: ending without them",
                           http_ended ? 0 : JOBS_SECONDS); // 0: jobs are already being stopped
    }
    return NULL;
}

/* url: the address of the server; page: its address for a browser on this machine, which cannot
 * open the addresses 0.0.0.0 and "::". */
static void urls_format(const struct server *s, char url[512], char page[512]) {
    const struct http_options *o = &s->options->http;
    bool v6 = strchr(o->host, ':') != NULL;
    const char *scheme = o->tls_cert ? "https" : "http",
               *browser_host = strcmp(o->host, "0.0.0.0") == 0 ? "127.0.0.1"
                               : strcmp(o->host, "::") == 0    ? "::1"
                                                               : o->host;
    int port = http_port(s->http);
    snprintf(url, 512, "%s://%s%s%s:%d", scheme, v6 ? "[" : "", o->host, v6 ? "]" : "", port);
    snprintf(page, 512, "%s://%s%s%s:%d", scheme, v6 ? "[" : "", browser_host, v6 ? "]" : "", port);
}

static void report_ready(struct server *s) {
    char url[512], page[512];
    struct serve_ready r = {.url = url,
                            .page = page,
                            .token = s->token,
                            .token_path = s->token_path,
                            .model = s->name,
                            .needs_key = keys_exist(s->keys)};
    int n;
    struct adapter_entry *list = server_adapters(s, &n);
    for (int i = 0; i < n; i++)
        if (!list[i].is_base) strings_add(&r.adapters, list[i].name);
    server_adapters_free(list, n);
    for (int i = 0; i < s->n_teams; i++) strings_add(&r.teams, s->teams[i].name);
    for (int i = 0; i < s->n_agents; i++) strings_add(&r.agents, s->agents[i].name);
    const char *chain;
    for (int i = 0; (chain = fallback_name_at(s, i)); i++) strings_add(&r.fallbacks, chain);
    const struct server *base;
    for (int i = 1; (base = base_at(s, i)); i++) strings_add(&r.bases, base->name);
    urls_format(s, url, page);
    s->options->ready(s->options->ready_ctx, &r);
    strings_release(&r.adapters);
    strings_release(&r.teams);
    strings_release(&r.agents);
    strings_release(&r.fallbacks);
    strings_release(&r.bases);
}

/* Removes other users' permissions from keys, conversations and jobs. Only the server's own files
 * are changed, because the folder may contain others. */
static int state_protect(const char *dir, struct error *err) {
    static const char *const server_files[] = {"serve.db", "ab.db",  "jobs.db", "conversations.db",
                                               "token",    "jobs",   "out",     "adapters",
                                               "blobs",    "models", "sleep",   NULL};
    int rc = dir_make_private(dir, err);
    int changed = rc == OK ? dir_restrict_permissions(dir, server_files) : 0;
    if (changed)
        log_info("%d files of '%s' were open to other users; they are private now", changed, dir);
    return rc;
}

struct server *serve_start(struct model *m, struct engine *e, const struct engine_options *eo,
                           const char *path, const struct serve_options *o, struct error *err) {
    struct server *s = xcalloc(1, sizeof *s);
    *s = (struct server){.options = o,
                         .model = m,
                         .engine = e,
                         .size = {.config = m->config, .type = m->type},
                         .name = xstrdup(m->name),
                         .path = xstrdup(path),
                         .started = (int64_t)time(NULL),
                         .yield = yield_new(o->train_share, clock_now),
                         .threads = pool_size(eo->pool)};
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->derived_lock, NULL);
    request_memory_open(s);
    int rc = state_protect(o->state_dir, err);
    if (rc == OK) rc = server_open(s, eo, err);
    if (rc == OK) {
        report_ready(s);
        return s;
    }
    server_release(s);
    free(s);
    return NULL;
}

static void server_close(struct server *s) {
    http_drain(s->http);
    server_release(s);
}

void serve_stop(struct server *s) {
    server_close(s);
    free(s);
}

/* Frees the server after the thread that watches the shutdown has ended. */
static void serve_until_signal(struct shutdown_state *shutdown) {
    const struct serve_options *o = shutdown->s->options;
    int got;
    if (o->attend) {
        o->attend(shutdown->s, &shutdown->set);
    } else {
        sigwait(&shutdown->set, &got);
        log_info("finishing running requests; a second signal ends the server at once");
    }
    CHECK(pthread_create(&shutdown->thread, NULL, shutdown_thread, shutdown) == 0);
    server_close(shutdown->s);
    __atomic_store_n(&shutdown->done, true, __ATOMIC_RELEASE);
    pthread_join(shutdown->thread, NULL);
    free(shutdown->s);
}

int serve_run(struct model *m, struct engine *e, const struct engine_options *eo, const char *path,
              const struct serve_options *o, struct error *err) {
    struct shutdown_state shutdown = {0};
    signals_block(&shutdown.set);
    malloc_configure();
    umask(077); /* also for files written by libraries and jobs */
    shutdown.s = serve_start(m, e, eo, path, o, err);
    if (shutdown.s) serve_until_signal(&shutdown);
    pthread_sigmask(SIG_UNBLOCK, &shutdown.set, NULL);
    return shutdown.s ? OK : err->code;
}
