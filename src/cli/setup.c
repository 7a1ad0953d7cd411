/*
 * setup: memory limit and plan, model, adapters, engine, recorded calls, and the peak of memory.
 *
 * Invariant: no part of a model is loaded before the plan is computed, printed and within the
 * limit.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

/* Memory of a session, in KV caches of one sequence: the cache itself, and a buffer that grows by
 * copying (3 times its content). */
enum { SESSION_COPIES = 4 };

/* Adds the size of the adapter at `path` to the sum. */
static int adapter_add_size(const struct setup *s, const char *path, struct adapter_sizes *all,
                            struct error *err) {
    struct adapter_size one = {0};
    char *found = cli_find_file(path);
    int rc = OK;
    if (!hub_is_name(path) && !path_exists(found))
        rc = error_set(err, ERR_MISSING, "adapter '%s' does not exist", path);
    else if (adapter_measure(found, s->engine.lora_elem, &one, err) != OK)
        rc = error_wrap(err, "adapter '%s'", path);
    if (rc == OK) adapter_sizes_add(all, &one);
    free(found);
    return rc;
}

static int adapters_measure(const struct setup *s, const struct setup_needs *w,
                            struct adapter_sizes *all, struct error *err) {
    for (int i = 0; w->adapters && i < w->adapters->n; i++) {
        const char *path = w->adapters->v[i];
        bool duplicate = strcmp(path, "base") == 0;
        for (int k = 0; k < i; k++) duplicate |= strcmp(path, w->adapters->v[k]) == 0;
        if (!duplicate && adapter_add_size(s, path, all, err) != OK) return err->code;
    }
    return OK;
}

static void plan_print(const struct setup *s) {
    if (s->c->json) {
        cli_print_json(json_pack("{s:o}", "plan", memory_plan_json(&s->plan)));
        return;
    }
    struct buf text = {0};
    memory_plan_text(&s->plan, &text);
    for (char *line, *rest = text.data; (line = strsep(&rest, "\n"));) log_message("%s", line);
    buf_release(&text);
}

/* Sets max_len: --max-model-len, but not more than the command needs; and the share of requests,
 * which the chosen context leaves to them. */
static int context_choose(const struct setup *s, struct memory_plan_input *in, struct error *err) {
    int32_t longest = in->model.config.max_seq_len, *len = &in->max_options.max_len;
    int64_t named = s->o->limits.max_len;
    if (engine_limits_check(&s->o->limits, longest, err) != OK) return err->code;
    if (named) *len = *len ? MIN(*len, (int32_t)named) : (int32_t)named;
    memory_plan_limit_requests(in);
    if (!*len) *len = memory_plan_context(in);
    *len = MIN(*len, longest);
    return OK;
}

/* Adds the memory of a session. If the context is chosen here, it is halved until the session fits
 * with it. */
static void session_add(struct memory_plan_input *in, bool chosen) {
    enum { SHORTEST = 1024 };
    size_t work = in->caller_bytes;
    int32_t *len = &in->max_options.max_len;
    struct memory_plan plan;
    struct error too_small;
    for (;; *len = MAX(SHORTEST, *len / 2)) {
        struct kv_cache_options one = {
            .n_slots = 1, .slot_len = *len, .elem = in->max_options.kv_elem};
        in->caller_bytes = work + SESSION_COPIES * kv_cache_bytes(&in->model.config, &one);
        if (!chosen || *len <= SHORTEST || memory_plan_make(in, &plan, &too_small) == OK) return;
    }
}

static int plan_input_init(const struct setup *s, const struct setup_needs *w,
                           struct memory_plan_input *in, struct error *err) {
    *in = (struct memory_plan_input){.max_options = s->engine,
                                     .limit = s->limit,
                                     .available = w->available ? w->available : memory_usable(),
                                     .half = !s->limit,
                                     .caller_bytes = w->work,
                                     .requests = w->requests};
    struct adapter_sizes adapters = {0};
    if (model_measure(s->path, cli_numeric_class(s->c), &in->model, err) != OK ||
        adapters_measure(s, w, &adapters, err) != OK)
        return err->code;
    in->adapters = adapters.sum;
    if (w->pooled) {
        memory_plan_add_pool(in, &adapters);
        in->pool_wanted = MAX(in->pool_wanted, s->limit / 16);
    }
    if (context_choose(s, in, err) != OK) return err->code;
    if (w->session) session_add(in, !w->engine.max_len && !s->o->limits.max_len);
    return OK;
}

/* Computes the plan, and takes the engine options from it. Prints it if the user asked for a limit
 * or for the plan; else one line if memory is too little for the engine that is wanted. */
static int plan_apply(struct setup *s, const struct setup_needs *w, struct error *err) {
    struct memory_plan_input in;
    if (plan_input_init(s, w, &in, err) != OK) return err->code;
    int rc = memory_plan_make(&in, &s->plan, err);
    s->engine = s->plan.engine;
    bool later = rc == OK && s->o->dry_run && s->c->json && w->estimates; // by setup_print_work
    if (!later && (s->limit || s->o->dry_run))
        plan_print(s);
    else if (rc == OK && memory_plan_is_reduced(&in, &s->plan))
        log_info("memory: of %.0f MB, %.0f for a KV cache of %d pages (%d would let no request "
                 "wait), %d sequences of at most %d tokens",
                 (double)in.available / (1 << 20), (double)s->plan.kv / (1 << 20),
                 s->engine.n_pages, s->plan.pages_wanted, s->engine.max_seqs, s->engine.max_len);
    int32_t longest = in.model.config.max_seq_len;
    if (rc == OK && !w->engine.max_len && s->engine.max_len < longest)
        log_info("context: %d of the model's %d tokens; --max-model-len N changes it",
                 s->engine.max_len, longest);
    return rc;
}

/* Parses limit, dtypes and model path, and creates the thread pool. */
static int setup_init(struct setup *s, const struct cli_options *c, const struct setup_options *o,
                      const char *model, const struct setup_needs *w, struct error *err) {
    *s = (struct setup){.c = c, .o = o, .engine = w->engine, .limit = w->limit};
    if (o->limits.max_seqs) s->engine.max_seqs = (int32_t)o->limits.max_seqs;
    if (kv_cache_dtype_parse(o->kv, cli_numeric_class(c), &s->engine.kv_elem, err) != OK ||
        dtype_parse(o->lora, &s->engine.lora_elem, err) != OK ||
        (o->max_memory && !w->limit && size_parse(o->max_memory, &s->limit, err) != OK))
        return err->code;
    char *found = cli_find_file(model);
    s->path = path_absolute(found);
    free(found);
    if (!s->engine.pool) s->engine.pool = s->pool = pool_new((int)c->threads);
    return OK;
}

int setup_memory_bounds(const struct cli_options *c, const struct setup_options *o,
                        const char *model, const struct setup_needs *w, size_t *min_bytes,
                        size_t *max_bytes, struct error *err) {
    struct setup s;
    struct memory_plan_input in;
    struct memory_plan plan;
    struct error small;
    int rc = setup_init(&s, c, o, model, w, err);
    size_t limit = s.limit;
    s.limit = 1;
    if (rc == OK) rc = plan_input_init(&s, w, &in, err);
    if (rc == OK) memory_plan_make(&in, &plan, &small); /* fails with the smallest plan */
    *min_bytes = rc == OK ? plan.total : 0;
    s.limit = limit;
    if (rc == OK) rc = plan_input_init(&s, w, &in, err);
    in.limit = 0;
    if (rc == OK) rc = memory_plan_make(&in, &plan, err);
    *max_bytes = rc == OK ? plan.total : 0;
    return setup_close(&s, rc, err);
}

int setup_open(struct setup *s, const struct cli_options *c, const struct setup_options *o,
               const char *model, const struct setup_needs *w, struct error *err) {
    int rc = setup_init(s, c, o, model, w, err);
    if (rc == OK) rc = plan_apply(s, w, err);
    if (rc != OK || (o->dry_run && !w->estimates)) return rc;
    s->m = model_open(s->path, cli_numeric_class(c), err);
    return s->m ? OK : err->code;
}

struct adapter *setup_adapter(struct setup *s, const char *path, struct error *err) {
    char *found = cli_find_file(path), *absolute = path_absolute(found);
    struct adapter *a = NULL;
    for (int i = 0; i < s->n_adapters && !a; i++)
        if (strcmp(s->adapters[i].path, absolute) == 0) a = s->adapters[i].adapter;
    if (!a && (a = adapter_open(found, s->m, err))) {
        adapter_warn_no_effect(a, path);
        s->adapters = xrealloc(s->adapters, sizeof *s->adapters * (size_t)(s->n_adapters + 1));
        s->adapters[s->n_adapters++] = (struct recorded_adapter){absolute, a};
        absolute = NULL;
    }
    free(absolute);
    free(found);
    return a;
}

struct adapter *setup_load_adapter(void *setup, const char *path, struct error *err) {
    return setup_adapter(setup, path, err);
}

struct store *setup_store(const struct setup *s, struct error *err) {
    const char *slash = strrchr(s->o->store, '/');
    char *dir = slash ? strndup(s->o->store, (size_t)(slash - s->o->store)) : NULL;
    int rc = dir && *dir ? dir_make(dir, err) : OK;
    free(dir);
    return rc == OK ? store_open(s->o->store, err) : NULL;
}

/* Call it after adapters are loaded, because the recorder borrows their list. */
static int recorder_open(struct setup *s, struct error *err) {
    const char *hash = model_hash(s->m, err);
    s->recorder = (struct recorder){.model = s->m,
                                    .model_path = s->path,
                                    .model_hash = hash,
                                    .kv = s->engine.kv_elem,
                                    .lora = s->engine.lora_elem,
                                    .adapters = s->adapters,
                                    .n_adapters = s->n_adapters};
    if (!hash || !(s->recorder.store = setup_store(s, err))) return err->code;
    s->engine.on_finished = recorder_finished;
    s->engine.on_finished_ctx = &s->recorder;
    return OK;
}

struct cluster *cluster_flags_open(const struct cluster_flags *f, const struct cli_options *c,
                                   size_t max_memory, bool streams, struct engine *e,
                                   struct model *m, struct error *err) {
    const struct cluster_options o = {.address = f->address,
                                      .replicas = (int)f->replicas,
                                      .verify = f->verify,
                                      .balancer = f->balancer,
                                      .threads = (int)c->threads,
                                      .max_memory = max_memory,
                                      .streams = streams};
    return cluster_open(&o, e, m, err);
}

int setup_engine(struct setup *s, struct error *err) {
    bool records = s->o->record && !s->o->dry_run;
    if (records && recorder_open(s, err) != OK) return err->code;
    s->e = engine_new(s->m, &s->engine, err);
    if (!s->e) return err->code;
    if (!s->o->cluster.address || s->o->dry_run) return OK;
    s->cluster = cluster_flags_open(&s->o->cluster, s->c, s->limit, s->streams, s->e, s->m, err);
    return s->cluster ? OK : err->code;
}

int setup_print_work(struct setup *s, struct work_counter *c, struct error *err) {
    struct work_speed speed;
    struct buf text = {0};
    const struct work_counts counts = work_counter_counts(c);
    if (work_counter_measure(c, &speed, err) != OK) return err->code;
    json_t *plan = memory_plan_json(&s->plan);
    work_plan_add(plan, &counts, &speed, 0);
    if (s->c->json) {
        cli_print_json(json_pack("{s:o}", "plan", plan));
        return OK;
    }
    cli_work_text(plan, &text);
    for (char *line, *rest = text.data; (line = strsep(&rest, "\n")) && *line;)
        log_message("%s", line);
    buf_release(&text);
    json_decref(plan);
    return OK;
}

void setup_print_peak_memory(const struct cli_options *c, size_t limit) {
    size_t peak = process_memory("VmHWM");
    if (!limit) return;
    if (c->json)
        cli_print_json(
            json_pack("{s:I,s:I}", "peak", (json_int_t)peak, "limit", (json_int_t)limit));
    else
        log_info("peak memory %.1f MB of %.1f", (double)peak / (1 << 20),
                 (double)limit / (1 << 20));
    if (peak > limit) log_warn("the limit of %.1f MB was exceeded", (double)limit / (1 << 20));
}

int setup_close(struct setup *s, int rc, struct error *err) {
    if (rc == OK && s->recorder.err.code != OK) {
        *err = s->recorder.err;
        rc = error_wrap(err, "cannot record");
    }
    if (s->recorder.n)
        log_info("%lld calls recorded in '%s'", (long long)s->recorder.n, s->o->store);
    if (rc == OK && s->m && !s->o->dry_run) setup_print_peak_memory(s->c, s->limit);
    store_close(s->recorder.store);
    cluster_close(s->cluster);
    engine_free(s->e);
    for (int i = 0; i < s->n_adapters; i++) {
        adapter_release(s->adapters[i].adapter);
        free((char *)(uintptr_t)s->adapters[i].path);
    }
    free(s->adapters);
    model_close(s->m);
    pool_free(s->pool);
    free(s->path);
    return rc;
}
