/*
 * dora_sum: weighted sums of adapters of which some have DoRA, as one adapter with DoRA.
 *
 * DoRA adapter i, bound to a base W, is the change ΔW_i = g_i ⊙ (W + s_i B_i A_i) - W with the
 * multipliers g_i = m_i / ‖W + s_i B_i A_i‖ of rows (bind.c); a plain adapter has g_i = 1. PEFT
 * adds these changes if several adapters are active. Their weighted sum has full rank, but the form
 * of DoRA:
 *
 *     W + Σ w_i ΔW_i = D ⊙ (W + B A)     D = 1 + Σ w_i (g_i - 1)
 *                                        A = the rows of all A_i, B = the columns w_i g_i s_i B_i /
 * D
 *
 * So the result is exact and has the multipliers D, that is, the magnitudes D ‖W + B A‖. A row
 * whose D is 0 has no such form.
 *
 * Averaging magnitudes and factors instead, as the parameters of DoRA, would be another change: the
 * factors of two adapters have unrelated coordinates (algebra.c).
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool adapters_have_dora(struct adapter *const *list, int n) {
    for (int i = 0; i < n; i++)
        if (list[i]->config.dora) return true;
    return false;
}

int adapter_require_layers_only(const struct adapter *a, const char *operation, struct error *err) {
    if (a->config.n_invocation > 0)
        return error_set(err, ERR_MISMATCH,
                         "adapter '%.12s' has an invocation (alora_invocation_tokens): %s is for "
                         "adapters that apply to every token",
                         a->hash, operation);
    if (!adapter_config_has_vocab(&a->config)) return OK;
    return error_set(err, ERR_MISMATCH,
                     "adapter '%.12s' changes the embedding or the head: %s is for adapters of the "
                     "layers only; 'shoal adapter merge' adds it to a copy of the model",
                     a->hash, operation);
}

/* The sum under construction. */
struct dora_sum {
    struct adapter *const *list;
    const struct lora **loras; /* [n] the terms' modules [L][N_PROJ], with f32 factors */
    struct arena arena;        /* factors that were read from packs */
    const float *weights;
    int n;
    const struct model_config *shape;
    struct adapter_module *modules; /* [L][N_PROJ]; alpha = r: scale 1 */
    struct adapter_config config;
    float *factors;     /* [A then B of each module], in the order of adapter.data */
    float *multipliers; /* [out of each module] D */
};

static int32_t module_count(const struct dora_sum *s) {
    return s->shape->n_layers * N_PROJ;
}

/* Sets the ranks, and allocates the arrays. */
static int sum_layout(struct dora_sum *s, struct error *err) {
    size_t n_multipliers = 0;
    s->modules = xcalloc((size_t)module_count(s), sizeof *s->modules);
    s->config = (struct adapter_config){.r = 1, .alpha = 1, .modules = s->modules, .dora = true};
    for (int32_t i = 0; i < module_count(s); i++) {
        int32_t r = 0;
        for (int k = 0; k < s->n; k++) r += s->loras[k][i].r;
        if (r > ADAPTER_RANK_MAX)
            return error_set(err, ERR_MEMORY, "the ranks add up to %d, more than %d", (int)r,
                             ADAPTER_RANK_MAX);
        s->modules[i] = (struct adapter_module){r, (float)r};
        if (r > 0) n_multipliers += (size_t)proj_out(s->shape, (enum proj)(i % N_PROJ));
    }
    size_t n = adapter_param_count(s->shape, &s->config) - n_multipliers;
    s->factors = try_calloc(n, sizeof *s->factors, err);
    s->multipliers = s->factors ? try_calloc(n_multipliers, sizeof *s->multipliers, err) : NULL;
    return s->multipliers ? OK : err->code;
}

/* g_i of output o, 1 for a plain adapter. */
static double multiplier_at(const struct lora *lo, int64_t o) {
    return lo->dora_scale ? (double)lo->dora_scale[o] : 1;
}

/* Fills B [out][r] and D [out] of module i. */
static int module_fill_b(const struct dora_sum *s, int32_t i, float *b, float *d,
                         struct error *err) {
    const int32_t r = s->modules[i].r;
    for (int64_t o = 0; o < proj_out(s->shape, (enum proj)(i % N_PROJ)); o++) {
        double sum = 1;
        for (int k = 0; k < s->n; k++)
            sum += (double)s->weights[k] * (multiplier_at(&s->loras[k][i], o) - 1);
        if (!(fabs(sum) >= 1e-6) || !isfinite(sum))
            return error_set(err, ERR_NUMERIC,
                             "the weights cancel output %lld of '%s' in layer %d: choose others",
                             (long long)o, proj_names[i % N_PROJ], (int)(i / N_PROJ));
        d[o] = (float)sum;
        for (int32_t k = 0, column = 0; k < s->n; column += s->loras[k++][i].r) {
            const struct lora *lo = &s->loras[k][i];
            const double w = (double)s->weights[k] * multiplier_at(lo, o) * (double)lo->scale;
            for (int32_t j = 0; j < lo->r; j++)
                b[o * r + column + j] = (float)(w * (double)lo->b[o * lo->r + j] / (double)d[o]);
        }
    }
    return OK;
}

static int sum_fill(struct dora_sum *s, struct error *err) {
    float *at = s->factors, *d = s->multipliers;
    int rc = OK;
    for (int32_t i = 0; !rc && i < module_count(s); i++) {
        const int64_t in = proj_in(s->shape, (enum proj)(i % N_PROJ)),
                      out = proj_out(s->shape, (enum proj)(i % N_PROJ));
        if (s->modules[i].r == 0) continue;
        for (int k = 0; k < s->n; k++) {
            const struct lora *lo = &s->loras[k][i];
            if (lo->r > 0) memcpy(at, lo->a, (size_t)(lo->r * in) * sizeof *at);
            at += lo->r * in;
        }
        rc = module_fill_b(s, i, at, d, err);
        at += s->modules[i].r * out;
        d += out;
    }
    return rc;
}

/* The modules of an adapter that has only a pack. */
static const struct lora *loras_unpack(const struct adapter *a, struct arena *arena) {
    int e = 0;
    const int32_t n = a->shape.n_layers * N_PROJ;
    struct lora *loras = arena_alloc(arena, (size_t)n * sizeof *loras);
    while (!a->packs[e]) e++;
    for (int32_t i = 0; i < n; i++) {
        const enum proj p = (enum proj)(i % N_PROJ);
        const struct lora_module *m = lora_module_at(a->packs[e], i / N_PROJ, p);
        const int64_t in = proj_in(&a->shape, p), out = proj_out(&a->shape, p);
        loras[i] = (struct lora){.r = m->r, .scale = 1, .dora_scale = m->dora_scale};
        if (m->r == 0) continue;
        float *factors = arena_alloc(arena, (size_t)(m->r * (in + out)) * sizeof *factors);
        float *b = factors + m->r * in;
        lora_module_unpack(m, (enum dtype)e, in, out, factors, b);
        for (int64_t k = 0; k < out * m->r; k++) b[k] *= m->gain[k % m->r];
        loras[i].a = factors;
        loras[i].b = b;
    }
    return loras;
}

static int sum_init(struct dora_sum *s, struct adapter *const *list, const float *weights, int n,
                    struct error *err) {
    *s = (struct dora_sum){.list = list, .weights = weights, .n = n, .shape = &list[0]->shape};
    CHECK(n > 0);
    s->loras = xcalloc((size_t)n, sizeof *s->loras);
    for (int k = 0; k < n; k++) {
        CHECK(adapter_is_ready(list[k]));
        if (adapter_require_layers_only(list[k], "a weighted sum", err)) return err->code;
        if (!adapter_fits(list[k], s->shape))
            return error_set(err, ERR_MISMATCH, "adapters '%.12s' and '%.12s' differ in shape",
                             list[0]->hash, list[k]->hash);
        s->loras[k] = list[k]->loras ? list[k]->loras : loras_unpack(list[k], &s->arena);
    }
    int rc = sum_layout(s, err);
    return rc ? rc : sum_fill(s, err);
}

static void sum_release(struct dora_sum *s) {
    arena_release(&s->arena);
    free(s->loras);
    free(s->modules);
    free(s->factors);
    free(s->multipliers);
}

/* The loras of the sum, [L][N_PROJ], views into it; malloc'ed. */
static struct lora *sum_loras(const struct dora_sum *s) {
    struct lora *loras = xcalloc((size_t)module_count(s), sizeof *loras);
    const float *at = s->factors, *d = s->multipliers;
    for (int32_t i = 0; i < module_count(s); i++) {
        const int32_t r = s->modules[i].r;
        const int64_t out = proj_out(s->shape, (enum proj)(i % N_PROJ));
        if (r == 0) continue;
        const float *b = at + r * (int64_t)proj_in(s->shape, (enum proj)(i % N_PROJ));
        loras[i] = (struct lora){.a = at, .b = b, .r = r, .scale = 1, .dora_scale = d};
        at = b + r * out;
        d += out;
    }
    return loras;
}

struct lora_pack *adapter_sum_pack(struct adapter *const *list, const float *weights, int n,
                                   enum dtype elem, struct error *err) {
    struct dora_sum s;
    struct lora_pack *pack = NULL;
    if (sum_init(&s, list, weights, n, err) == OK) {
        struct lora *loras = sum_loras(&s);
        pack = lora_pack_new(s.shape, loras, elem);
        free(loras);
    }
    sum_release(&s);
    return pack;
}

/* The magnitudes D ‖W + B A‖ of modules, which are the items of a parallel region. */
struct magnitude_job {
    const struct model *m;
    const struct lora *loras;
    float **out; /* [L][N_PROJ] */
};

static void magnitude_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct magnitude_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        const struct matrix *w = &j->m->layers[i / N_PROJ].proj[i % N_PROJ];
        const struct lora *lo = &j->loras[i];
        if (lo->r == 0) continue;
        float *row = xmalloc((size_t)w->k * sizeof *row);
        for (int64_t o = 0; o < w->n; o++) {
            matrix_get_row(w, o, row);
            j->out[i][o] = (float)((double)lo->dora_scale[o] * lora_row_norm(lo, o, row, w->k));
        }
        free(row);
    }
}

/* Writes the magnitudes of all modules to dst. */
static void magnitudes_compute(const struct dora_sum *s, const struct model *m, struct pool *pool,
                               float *dst) {
    struct lora *loras = sum_loras(s);
    float **out = xcalloc((size_t)module_count(s), sizeof *out);
    for (int32_t i = 0; i < module_count(s); i++) {
        out[i] = dst;
        if (loras[i].r > 0) dst += proj_out(s->shape, (enum proj)(i % N_PROJ));
    }
    struct magnitude_job job = {m, loras, out};
    pool_run(pool, magnitude_items, &job, module_count(s), 1);
    free(loras);
    free(out);
}

static struct adapter *sum_adapter(const struct dora_sum *s, const struct model *m,
                                   struct pool *pool, struct error *err) {
    const size_t n = adapter_param_count(s->shape, &s->config);
    size_t n_factors = n;
    for (int32_t i = 0; i < module_count(s); i++)
        if (s->modules[i].r > 0) n_factors -= (size_t)proj_out(s->shape, (enum proj)(i % N_PROJ));
    float *data = try_calloc(n, sizeof *data, err);
    if (!data) return NULL;
    memcpy(data, s->factors, n_factors * sizeof *data);
    magnitudes_compute(s, m, pool, data + n_factors);
    struct adapter *a = adapter_from_owned_data(s->shape, &s->config, data, NULL);
    for (int k = 0; k < s->n; k++) adapter_add_training_data(a, s->list[k]->training_data);
    if (adapter_bind(a, m, err) == OK) return a;
    adapter_release(a);
    return NULL;
}

struct adapter *adapter_sum(const struct model *m, struct adapter *const *list,
                            const float *weights, int n, struct pool *pool, struct error *err) {
    struct dora_sum s;
    struct adapter *a = NULL;
    if (!adapters_have_dora(list, n)) return adapter_concat(list, weights, n, err);
    if (sum_init(&s, list, weights, n, err) == OK) a = sum_adapter(&s, m, pool, err);
    sum_release(&s);
    return a;
}
