/*
 * memory: the plan of a run's memory, and how a run keeps it.
 *
 * Founders are trained together. After that, the memory does not depend on the number of adapters:
 * the factors of all of them are offloaded to the run's folder (adapter_offload), and are read when
 * they are evaluated, bred, compared or saved. Packs exist during an evaluation only, of a few
 * adapters at a time.
 *
 * Results do not depend on any of this: a request's result does not depend on the other requests of
 * its batch, nor an adapter's training on the adapters that are trained with it.
 */
#include "evolve/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { WORK_BYTES = 24 << 20 }; /* items, transcripts and requests of a generation */
/* Most bytes of packs, unless one request needs more. More would make small batches a little
 * faster. */
#define PACKS_BYTES ((size_t)256 << 20)

/* the plan */

enum dtype evolve_run_kv_dtype(const struct evolve_env *env, const struct evolve_recipe *o) {
    struct error ignored; // the recipe's value is valid
    enum dtype type;
    CHECK(kv_cache_dtype_parse(o->kv_cache_dtype, env->cls, &type, &ignored) == OK);
    return type;
}

static struct engine_options engine_options_for(const struct evolve_env *env,
                                                const struct evolve_recipe *o,
                                                const struct model_config *c) {
    enum { LONGEST = 384 }; /* tokens of a question with its answer */
    int64_t longest = LONGEST + (int64_t)genome_prompt_bytes(&o->evolve.genome);
    return (struct engine_options){.max_rows = 512,
                                   .max_seqs = env->max_seqs ? env->max_seqs : 192,
                                   .max_len = (int32_t)MIN(longest, c->max_seq_len),
                                   .kv_elem = evolve_run_kv_dtype(env, o),
                                   .pool = env->pool};
}

/* Sizes of the data of the personas and of fine-tuning, and of the run's largest adapter. */
struct run_data {
    int trained;     /* personas that are trained */
    int64_t longest; /* tokens of the longest sample in a file, at most */
    size_t params, rank;
};

/* Adds a file of conversations, or an adapter's directory. A directory without an adapter is
 * refused when it is opened. */
static void data_add(struct run_data *d, const char *path) {
    enum { TEMPLATE_TOKENS = 256 }; /* tokens that a chat template may add */
    struct adapter_size size = {0};
    struct error ignored;
    if (!path_is_dir(path))
        d->longest = MAX(d->longest, (int64_t)train_longest_sample(path) + TEMPLATE_TOKENS);
    else if (adapter_measure(path, DTYPE_F32, &size, &ignored) == OK)
        d->params = MAX(d->params, size.resident / (2 * sizeof(float)));
}

static void files_measure(const struct evolve_env *env, const struct evolve_recipe *o,
                          struct run_data *d) {
    *d = (struct run_data){0};
    for (int i = 0; i < o->personas.n; i++) {
        char *list = xstrdup(strchr(o->personas.v[i], '=') + 1), *save = NULL, *f;
        bool file = false;
        for (f = strtok_r(list, "+", &save); f; f = strtok_r(NULL, "+", &save)) {
            char *found = env->find(f);
            file |= !path_is_dir(found);
            data_add(d, found);
            free(found);
        }
        d->trained += file;
        free(list);
    }
    if (!o->evolve.finetune_data) return;
    char *found = env->find(o->evolve.finetune_data);
    data_add(d, found);
    free(found);
}

static int64_t longest_trained(const struct train_options *o, const struct model_config *c,
                               int64_t longest) {
    longest = MIN(longest, c->max_seq_len);
    return o->max_length > 0 ? MIN(longest, o->max_length) : longest;
}

static bool search_is(const struct evolve_recipe *o, const char *name) {
    return strcmp(o->evolve.search, name) == 0;
}

/* Whether the search makes children of `evolve.rank`; `merges`: of all founders at once. */
static bool search_makes_children(const struct evolve_recipe *o, bool *merges) {
    *merges = search_is(o, "merge") || search_is(o, "coefficients");
    return *merges || search_is(o, "breed");
}

/* The largest adapter is a founder, or a child with the recipe's rank. Those that are trained here
 * have the targets of section "train". */
static int data_measure(const struct evolve_env *env, const struct evolve_recipe *o,
                        const struct model_config *c, struct run_data *d, struct error *err) {
    struct adapter_config a;
    bool merges;
    files_measure(env, o, d);
    int rc = train_adapter_config(&o->train, c, &a, err);
    if (rc == OK) {
        size_t per_rank = adapter_param_count(c, &a) / (size_t)a.r;
        d->rank = MAX((size_t)a.r, (d->params + per_rank - 1) / per_rank);
        if (search_makes_children(o, &merges)) d->rank = MAX(d->rank, (size_t)o->evolve.rank);
        d->params = d->rank * per_rank;
    }
    adapter_config_release(&a);
    return rc;
}

/* The options of fine-tuning the largest adapter. Their texts are borrowed. */
static struct train_options finetune_options(const struct evolve_recipe *o,
                                             const struct run_data *d) {
    struct train_options t = o->finetune;
    t.r = (int64_t)d->rank;
    t.target = o->train.target;
    t.layers = o->train.layers;
    t.lora_dropout = fmax(t.lora_dropout, o->evolve.genome.max[GENE_LORA_DROPOUT]);
    train_options_fix(&t);
    return t;
}

/* Most adapters that are fine-tuned together; 0: none. */
static int most_finetuned(const struct evolve_recipe *o) {
    if (search_is(o, "gradient") || search_is(o, "es")) return 1;
    if (o->evolve.finetune_steps == 0) return 0;
    if (search_is(o, "coefficients")) return 1;
    return search_is(o, "breed") ? (int)o->evolve.population : 0;
}

/* Bytes that an operator uses for one module: dense ΔW of the parents and the result, and the
 * factors of its SVD. `k` is the sum of the parents' ranks. */
static size_t operator_bytes(const struct model_config *c, size_t parents, size_t k) {
    enum { OVERSAMPLE = 8, ARRAYS = 6 }; /* see lowrank.c */
    size_t most = 0;
    for (int p = 0; p < N_PROJ; p++) {
        size_t in = (size_t)proj_in(c, p), out = (size_t)proj_out(c, p);
        most = MAX(most, (parents + 1) * in * out * sizeof(float) +
                             ARRAYS * (in + out) * (k + OVERSAMPLE) * sizeof(double));
    }
    return most;
}

/* With a limit on the address space (ulimit -v), the mapped files of offloaded adapters count. */
static bool address_space_is_limited(void) {
    struct rlimit limit;
    return !memory_limit_named() && getrlimit(RLIMIT_AS, &limit) == 0 &&
           limit.rlim_cur != RLIM_INFINITY;
}

/* The memory of a run besides the model, in bytes: of the smallest engine, and of the rest, at
 * least and if memory is sufficient. `packs`: the part of the rest that the packs of an evaluation
 * have; `beside_packs`: the other bytes of the evaluation. */
struct run_needs {
    size_t engine_least, beside_packs;
    struct train_memory_bounds rest, packs;
};

/* Raises the bounds by those of a training. */
static int needs_add_training(struct run_needs *needs, const struct evolve_env *env,
                              const struct train_options *o, int n_least, int n_most,
                              const struct model_size *size, int64_t longest, struct error *err) {
    struct train_memory_bounds least, most;
    longest = longest_trained(o, &size->config, longest);
    int rc = train_memory_bounds(o, n_least, size, env->cls, longest, env->pool, &least, err);
    if (rc == OK)
        rc = train_memory_bounds(o, n_most, size, env->cls, longest, env->pool, &most, err);
    if (rc != OK) return rc;
    needs->rest.least = MAX(needs->rest.least, least.least);
    needs->rest.most = MAX(needs->rest.most, most.most);
    return OK;
}

/* Adds the perturbations of evolution strategies to the bounds. */
static int needs_add_es(struct run_needs *needs, const struct evolve_recipe *o,
                        const struct model_config *c, const struct run_data *d, struct error *err) {
    const struct train_options t = finetune_options(o, d);
    struct adapter_config a;
    int64_t longest = longest_trained(&t, c, d->longest);
    int rc = train_adapter_config(&t, c, &a, err);
    if (rc == OK) {
        size_t bytes = es_bytes_bound(c, &o->es, &a, longest, t.bsz * t.grad_accum * longest);
        needs->rest.least += bytes;
        needs->rest.most += bytes;
    }
    adapter_config_release(&a);
    return rc;
}

/* Raises the bounds by the evaluation, and by making, comparing, saving and loading adapters of
 * `rank` with `params` values. */
static void needs_add_search(struct run_needs *needs, const struct evolve_recipe *o,
                             const struct model_config *c, size_t params, size_t rank) {
    /* operator_rescale and the loading of a file need that many. */
    enum { CHILD_COPIES = 3 };
    bool merges;
    search_makes_children(o, &merges);
    size_t bytes = params * sizeof(float), founders = (size_t)o->personas.n,
           parents = merges ? MAX(founders, 2) : 2,
           all = founders + 2 * (size_t)o->evolve.population,
           making = (parents + CHILD_COPIES) * bytes + operator_bytes(c, parents, parents * rank);
    needs->packs.least = (merges ? founders : 1) * bytes;
    needs->packs.most = MAX(needs->packs.least, MIN(all * bytes, PACKS_BYTES));
    needs->beside_packs = bytes + WORK_BYTES;
    needs->rest.least = MAX(needs->rest.least, MAX(making, needs->packs.least + bytes));
    needs->rest.most = MAX(needs->rest.most, MAX(making, needs->packs.most + bytes));
}

static int needs_measure(const struct evolve_env *env, const struct evolve_recipe *o,
                         const struct model_size *size, struct run_needs *out, struct error *err) {
    const struct model_config *c = &size->config;
    const struct engine_options eo = engine_options_for(env, o, c);
    struct run_data data;
    size_t more = WORK_BYTES;
    int finetuned = most_finetuned(o), rc = data_measure(env, o, c, &data, err);
    if (rc != OK) return rc;
    const struct train_options finetune = finetune_options(o, &data);
    *out = (struct run_needs){.engine_least = engine_least_bytes(c, &eo)};
    if (data.trained)
        rc = needs_add_training(out, env, &o->train, data.trained, data.trained, size, data.longest,
                                err);
    if (rc == OK && finetuned)
        rc = needs_add_training(out, env, &finetune, 1, finetuned, size, data.longest, err);
    if (rc == OK && search_is(o, "es")) rc = needs_add_es(out, o, c, &data, err);
    needs_add_search(out, o, c, data.params, data.rank);
    if (address_space_is_limited())
        more += (size_t)(2 * o->evolve.population + o->personas.n + o->evolve.generations) *
                data.params * sizeof(float);
    out->rest.least += more;
    out->rest.most += more;
    return rc;
}

static int recipe_measure(const struct evolve_env *env, const struct evolve_recipe *o,
                          struct model_size *size, struct run_needs *needs, struct error *err) {
    char *path = env->find(o->model);
    int rc = model_measure(path, env->cls, size, err);
    free(path);
    return rc == OK ? needs_measure(env, o, size, needs, err) : rc;
}

int evolve_run_check_memory(const struct evolve_env *env, const struct evolve_recipe *o,
                            struct error *err) {
    struct model_size size;
    struct run_needs needs;
    if (!memory_limit_get()) return OK;
    if (recipe_measure(env, o, &size, &needs, err) != OK) return err->code;
    const struct memory_step step = {
        .what = "this run with its model",
        .least = model_with_bytes(&size, needs.engine_least + needs.rest.least)};
    return memory_check(NULL, &step, err);
}

/* Gives the engine half of the bytes of `room` beyond the least memory. */
static void engine_fit(const struct model_config *c, const struct run_needs *needs, size_t room,
                       struct engine_options *eo) {
    size_t least = needs->engine_least + needs->rest.least, more = room > least ? room - least : 0;
    engine_options_fit(c, eo, needs->engine_least + more / 2);
}

int evolve_run_plan_memory(const struct evolve_env *env, const struct evolve_recipe *o,
                           struct evolve_memory *out, struct error *err) {
    struct model_size size;
    struct run_needs needs;
    if (recipe_measure(env, o, &size, &needs, err) != OK) return err->code;
    struct engine_options eo = engine_options_for(env, o, &size.config);
    size_t used = memory_used(NULL), rest = needs.rest.most;
    if (memory_limit_get()) {
        size_t room = memory_room(NULL), model = model_with_bytes(&size, 0);
        room -= MIN(room, model);
        engine_fit(&size.config, &needs, room, &eo);
        rest = MIN(rest, room - MIN(room, engine_bytes(&size.config, &eo)));
    }
    out->total = used + model_with_bytes(&size, engine_bytes(&size.config, &eo) + rest);
    out->least = used + model_with_bytes(&size, needs.engine_least + needs.rest.least);
    return OK;
}

/* Bytes for the packs of an evaluation, if the engine has these options. */
static size_t packs_fit(const struct evolve_run *r, const struct run_needs *needs,
                        const struct engine_options *eo) {
    size_t room = memory_room(r->model),
           others = engine_bytes(&r->model->config, eo) + needs->beside_packs;
    if (!memory_limit_get()) return needs->packs.most;
    return MAX(needs->packs.least, MIN(needs->packs.most, room - MIN(room, others)));
}

int evolve_run_fit_memory(struct evolve_run *r, struct engine_options *out, struct error *err) {
    const struct model_size size = {.config = r->model->config};
    const struct model_config *c = &size.config;
    struct run_needs needs;
    *out = engine_options_for(r->env, r->o, c);
    if (needs_measure(r->env, r->o, &size, &needs, err) != OK) return err->code;
    size_t wanted = engine_bytes(c, out);
    if (memory_limit_get()) engine_fit(c, &needs, memory_room(r->model), out);
    r->packs_bytes = packs_fit(r, &needs, out);
    if (!memory_limit_named() && engine_bytes(c, out) >= wanted) return OK;
    log_info("memory: %.1f MB of %.1f in use, %.1f for an engine of %d sequences",
             (double)memory_used(r->model) / (1 << 20), (double)memory_limit_get() / (1 << 20),
             (double)engine_bytes(c, out) / (1 << 20), out->max_seqs);
    return OK;
}

int evolve_run_finetuned_together(const struct evolve_run *r, const struct evolve_recipe *o, int n,
                                  struct error *err) {
    const struct model_size size = {.config = r->model->config};
    size_t room = memory_room(r->model);
    struct run_data data;
    struct train_memory_bounds bounds;
    if (data_measure(r->env, o, &size.config, &data, err) != OK) return err->code;
    const struct train_options t = finetune_options(o, &data);
    int64_t longest = longest_trained(&t, &size.config, data.longest);
    for (; n > 1; n--) {
        if (train_memory_bounds(&t, n, &size, r->env->cls, longest, r->env->pool, &bounds, err))
            return err->code;
        if (bounds.least <= room) break;
    }
    return n;
}

/* evaluation */

/* Adapters whose packs are in memory together. */
struct pack_group {
    struct adapter *v[MAX_CANDIDATES + MAX_FOUNDERS];
    int n;
    size_t bytes; /* about: the sum of their packs */
};

static bool group_has(const struct pack_group *g, const struct adapter *a) {
    for (int i = 0; i < g->n; i++)
        if (g->v[i] == a) return true;
    return false;
}

/* Adds the request's adapters. False, and unchanged, if the packs of all would have more than
 * `most` bytes; an empty group has room for the adapters of any request. */
static bool group_add(struct pack_group *g, const struct engine_request *r, size_t most) {
    struct pack_group with = *g;
    for (int i = 0; i < MAX(r->n_mix, r->adapter != NULL); i++) {
        struct adapter *a = r->adapter ? r->adapter : r->mix[i].adapter;
        if (!a || group_has(&with, a)) continue;
        if (with.n == (int)ARRAY_LEN(with.v)) return false;
        with.v[with.n++] = a;
        with.bytes += a->n_data * sizeof *a->data;
    }
    if (g->n > 0 && with.n > g->n && with.bytes > most) return false;
    *g = with;
    return true;
}

/* Makes the packs one at a time, so that the factors of only one adapter are in memory. The engine
 * makes those of adapters that are not plain, which it checks first. */
static void group_pack(const struct pack_group *g, enum dtype elem) {
    for (int i = 0; i < g->n; i++) {
        if (!g->v[i]->is_offloaded) continue;
        adapter_pack(g->v[i], elem);
        adapter_free_pages(g->v[i]);
    }
}

static void group_free(const struct pack_group *g) {
    for (int i = 0; i < g->n; i++) {
        adapter_free_packs(g->v[i]);
        adapter_free_pages(g->v[i]);
    }
}

int evolve_run_requests(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    struct evolve_run *r = ctx;
    struct engine_request *some = xcalloc((size_t)n + 1, sizeof *some);
    int *index = xcalloc((size_t)n + 1, sizeof *index), rc = OK, left = n;
    bool *taken = xcalloc((size_t)n + 1, sizeof *taken);
    while (rc == OK && left > 0) {
        struct pack_group g = {.n = 0};
        int m = 0;
        for (int i = 0; i < n; i++) {
            if (taken[i] || !group_add(&g, &reqs[i], r->packs_bytes)) continue;
            taken[i] = true;
            index[m] = i;
            some[m++] = reqs[i];
        }
        group_pack(&g, engine_lora_elem(r->engine));
        rc = engine_run(r->engine, some, m, NULL, err);
        group_free(&g);
        for (int k = 0; k < m; k++) reqs[index[k]] = some[k];
        left -= m;
    }
    free(some);
    free(index);
    free(taken);
    return rc;
}

struct sample_group {
    struct pack_group g;
    size_t most;
};

static bool sample_keeps(void *ctx, const struct engine_request *r) {
    struct sample_group *s = ctx;
    return group_add(&s->g, r, s->most);
}

void evolve_run_fit_sample(const struct evolve_run *r, struct work_counter *c) {
    struct sample_group s = {.most = r->packs_bytes};
    work_counter_filter(c, sample_keeps, &s);
}
