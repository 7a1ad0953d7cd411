/*
 * extract: low-rank adapters by truncated SVD.
 *
 * adapter_extract computes ΔW = W_tuned - W_base of every projection and keeps the largest singular
 * values. Quantised weights are dequantised first, so ΔW also corrects the rounding of a quantised
 * base. adapter_resize keeps the largest singular values of an adapter's ΔW. The thread pool
 * factorises the modules independently, and the adapter is assembled in module order, so the result
 * does not depend on the number of threads. Differences outside of the projections are not
 * extracted; a warning names them.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_RANK 16 /* with --energy: number of singular values computed first; then doubled */

struct factorized_module {
    float *ab; /* A [r][in], then B [out][r] */
    int32_t r; /* 0: ΔW is zero */
    double norm2, lost_norm2;
};
struct svd_job {
    struct lora_truncation truncation;
    const struct model_config *shape;
    const struct model *base, *tuned;  /* extract */
    const struct adapter *source;      /* resize */
    struct factorized_module *modules; /* [L][N_PROJ] */
};

static void module_store_factors(const struct svd_job *job, int32_t i, const struct svd *sv,
                                 int32_t r, double total2) {
    struct factorized_module *m = &job->modules[i];
    double kept2 = 0;
    *m = (struct factorized_module){.r = r, .norm2 = total2};
    m->ab = xcalloc((size_t)r * (size_t)(sv->in + sv->out), sizeof *m->ab);
    svd_write_factors(sv, r, m->ab, m->ab + (size_t)r * (size_t)sv->in);
    for (int32_t k = 0; k < MIN(r, sv->n); k++) kept2 += sv->s[k] * sv->s[k];
    m->lost_norm2 = MAX(0, total2 - kept2);
}

static int32_t rank_limit(const struct svd_job *job, int32_t i) {
    int32_t max_rank = job->truncation.rank ? job->truncation.rank : ADAPTER_RANK_MAX;
    return MIN(max_rank, MIN(proj_in(job->shape, i % N_PROJ), proj_out(job->shape, i % N_PROJ)));
}

/* Writes ΔW of module i to w [out][in]; returns ‖ΔW‖². */
static double delta_compute(const struct svd_job *job, int32_t i, float *w) {
    const struct matrix *a = &job->base->layers[i / N_PROJ].proj[i % N_PROJ];
    const struct matrix *b = &job->tuned->layers[i / N_PROJ].proj[i % N_PROJ];
    float *row = xmalloc((size_t)a->k * sizeof *row);
    double total2 = 0;
    for (int64_t o = 0; o < a->n; o++, w += a->k) {
        matrix_get_row(a, o, row);
        matrix_get_row(b, o, w);
        for (int64_t j = 0; j < a->k; j++) {
            w[j] -= row[j];
            total2 += (double)w[j] * (double)w[j];
        }
    }
    free(row);
    return total2;
}

/* With --energy, doubles the number of computed singular values until fewer than all computed ones
 * suffice for the energy, or the number is the maximum rank. */
static void module_extract(const struct svd_job *job, int32_t i) {
    int in = proj_in(job->shape, i % N_PROJ), out = proj_out(job->shape, i % N_PROJ);
    int32_t max_rank = rank_limit(job, i);
    float *w = xmalloc((size_t)in * (size_t)out * sizeof *w);
    double total2 = delta_compute(job, i, w);
    int32_t n_values = job->truncation.energy > 0 ? MIN(FIRST_RANK, max_rank) : max_rank;
    job->modules[i].norm2 = total2;
    for (bool done = total2 == 0 || !isfinite(total2); !done;
         n_values = MIN(2 * n_values, max_rank)) {
        struct arena ar = {0};
        struct svd sv = randomized_svd(w, out, in, n_values, &ar);
        int32_t r = job->truncation.energy > 0
                        ? svd_energy_rank(&sv, total2, job->truncation.energy, n_values)
                        : n_values;
        done = r < n_values || n_values == max_rank;
        if (done) module_store_factors(job, i, &sv, r, total2);
        arena_release(&ar);
    }
    free(w);
}

static void module_resize(const struct svd_job *job, int32_t i) {
    const struct lora *lo = &job->source->loras[i];
    int32_t r = MIN(rank_limit(job, i), lo->r);
    struct arena ar = {0};
    struct lowrank_sum s = lowrank_sum_new(&ar, proj_out(job->shape, i % N_PROJ),
                                           proj_in(job->shape, i % N_PROJ), lo->r);
    double total2 = 0;
    lowrank_sum_add(&s, lo, 1, 0);
    struct svd sv = lowrank_sum_svd(&s, &ar);
    for (int k = 0; k < sv.n; k++) total2 += sv.s[k] * sv.s[k];
    if (job->truncation.energy > 0) r = svd_energy_rank(&sv, total2, job->truncation.energy, r);
    if (total2 > 0) module_store_factors(job, i, &sv, r, total2);
    arena_release(&ar);
}

static void modules_factorize(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct svd_job *job = ctx;
    (void)thread;
    for (int32_t i = (int32_t)begin; i < end; i++) {
        if (job->source && job->source->loras[i].r > 0) module_resize(job, i);
        if (job->tuned && proj_in(job->shape, i % N_PROJ) > 0) module_extract(job, i);
    }
}

static json_t *lineage_new(const struct svd_job *job, double error) {
    json_t *o = json_pack("{s:s}", "operator", job->source ? "resize" : "extract");
    if (job->source) {
        json_object_set_new(o, "parents", json_string(job->source->hash));
        adapter_lineage_set_base(o, &job->source, 1);
    }
    if (job->tuned) {
        adapter_lineage_set_model(o, job->base);
        json_object_set_new(o, "finetuned_sha256", json_string(job->tuned->hash));
    }
    if (job->truncation.rank)
        json_object_set_new(o, "rank", json_sprintf("%d", (int)job->truncation.rank));
    if (job->truncation.energy > 0)
        json_object_set_new(o, "energy", json_sprintf("%g", job->truncation.energy));
    json_object_set_new(o, "error", json_sprintf("%.3g", error));
    return o;
}

/* Assembles the adapter from the factorised modules. */
static struct adapter *adapter_assemble(const struct svd_job *job, struct error *err) {
    struct adapter_builder builder =
        adapter_builder_init(job->shape, job->source ? job->source->config.dropout : 0);
    for (int32_t i = 0; i < job->shape->n_layers * N_PROJ; i++) {
        const struct factorized_module *m = &job->modules[i];
        size_t sides = (size_t)(proj_in(job->shape, i % N_PROJ) + proj_out(job->shape, i % N_PROJ));
        builder.norm2 += m->norm2;
        builder.lost_norm2 += m->lost_norm2;
        if (m->r > 0)
            memcpy(adapter_builder_add(&builder, i, m->r), m->ab,
                   (size_t)m->r * sides * sizeof *m->ab);
    }
    if (!isfinite(builder.norm2)) {
        error_set(err, ERR_NUMERIC, "a projection has weights that are not numbers");
        adapter_builder_release(&builder);
        return NULL;
    }
    json_t *lineage = lineage_new(job, adapter_builder_error(&builder));
    struct adapter *a = adapter_builder_finish(&builder, lineage);
    if (!a) error_set(err, ERR_STATE, "no projection is changed: there is nothing to write");
    json_decref(lineage);
    return a;
}

/* Truncation error of projection p in all layers, relative to the norm of its ΔW; p = N_PROJ: the
 * error of all modules. */
static double proj_error(const struct svd_job *job, int p) {
    double norm2 = 0, lost_norm2 = 0;
    for (int32_t i = 0; i < job->shape->n_layers * N_PROJ; i++) {
        if (p < N_PROJ && i % N_PROJ != p) continue;
        norm2 += job->modules[i].norm2;
        lost_norm2 += job->modules[i].lost_norm2;
    }
    return norm2 > 0 ? sqrt(lost_norm2 / norm2) : 0;
}

static void proj_measure(const struct svd_job *job, int p, struct projection_truncation *out) {
    *out =
        (struct projection_truncation){.rank_min = ADAPTER_RANK_MAX, .error = proj_error(job, p)};
    for (int32_t l = 0; l < job->shape->n_layers; l++) {
        int32_t r = job->modules[l * N_PROJ + p].r;
        if (r == 0) continue;
        out->rank_min = MIN(out->rank_min, r);
        out->rank_max = MAX(out->rank_max, r);
        out->layers++;
    }
}

static void modules_free(struct svd_job *job) {
    for (int32_t i = 0; job->modules && i < job->shape->n_layers * N_PROJ; i++)
        free(job->modules[i].ab);
    free(job->modules);
}

/* Factorises all modules and assembles the adapter. */
static int svd_job_run(struct svd_job *job, struct pool *pool, struct truncated_adapter *out,
                       struct error *err) {
    int32_t n = job->shape->n_layers * N_PROJ;
    job->modules = xcalloc((size_t)n, sizeof *job->modules);
    pool_run(pool, modules_factorize, job, n, 1);
    out->adapter = adapter_assemble(job, err);
    out->error = proj_error(job, N_PROJ);
    for (int p = 0; p < N_PROJ; p++) proj_measure(job, p, &out->projections[p]);
    modules_free(job);
    return out->adapter ? OK : err->code;
}

/* OK if the models have the same architecture and the same sizes of all projections. */
static int models_check(const struct model *base, const struct model *tuned, struct error *err) {
    const struct model_config *a = &base->config, *b = &tuned->config;
    bool same = a->arch == b->arch && a->n_layers == b->n_layers;
    for (int p = 0; p < N_PROJ; p++)
        same = same && proj_in(a, p) == proj_in(b, p) && proj_out(a, p) == proj_out(b, p);
    if (same) return OK;
    return error_set(err, ERR_MISMATCH,
                     "'%s' (%s, %d layers of %d) was not made from '%s' (%s, %d layers of %d)",
                     tuned->name, b->arch->name, b->n_layers, b->d_model, base->name, a->arch->name,
                     a->n_layers, a->d_model);
}

static bool vectors_equal(const float *a, const float *b, int64_t n) {
    return a == b || (a && b && memcmp(a, b, (size_t)n * sizeof *a) == 0);
}

/* True if all norms and biases are equal. */
static bool layers_equal(const struct model *base, const struct model *tuned) {
    const struct model_config *c = &base->config;
    bool same = true;
    for (int32_t l = 0; l < c->n_layers; l++) {
        const struct model_layer *a = &base->layers[l], *b = &tuned->layers[l];
        const float *pairs[][2] = {
            {a->attn_norm, b->attn_norm},           {a->ffn_norm, b->ffn_norm},
            {a->attn_norm_bias, b->attn_norm_bias}, {a->ffn_norm_bias, b->ffn_norm_bias},
            {a->post_attn_norm, b->post_attn_norm}, {a->post_ffn_norm, b->post_ffn_norm}};
        for (size_t k = 0; k < ARRAY_LEN(pairs); k++)
            same = same && vectors_equal(pairs[k][0], pairs[k][1], c->d_model);
        for (int p = 0; p < N_PROJ; p++)
            same = same && vectors_equal(a->bias[p], b->bias[p], proj_out(c, p));
        same = same && vectors_equal(a->q_norm, b->q_norm, c->head_dim) &&
               vectors_equal(a->k_norm, b->k_norm, c->head_dim);
    }
    return same && vectors_equal(base->final_norm, tuned->final_norm, c->d_model) &&
           vectors_equal(base->final_norm_bias, tuned->final_norm_bias, c->d_model);
}

static bool matrices_equal(const struct matrix *a, const struct matrix *b) {
    bool same = a->n == b->n && a->k == b->k;
    float *x = xmalloc((size_t)MAX(1, a->k) * sizeof *x),
          *y = xmalloc((size_t)MAX(1, b->k) * sizeof *y);
    for (int64_t i = 0; same && i < a->n; i++) {
        matrix_get_row(a, i, x);
        matrix_get_row(b, i, y);
        same = memcmp(x, y, (size_t)a->k * sizeof *x) == 0;
    }
    free(x);
    free(y);
    return same;
}

/* Warns about differences outside of the projections. */
static void warn_other_differences(const struct model *base, const struct model *tuned) {
    bool embed = matrices_equal(&base->embed, &tuned->embed) &&
                 matrices_equal(&base->pos_embed, &tuned->pos_embed);
    bool head = matrices_equal(&base->head, &tuned->head), others = layers_equal(base, tuned);
    if (embed && head && others) return;
    log_warn("'%s' and '%s' differ in%s%s%s as well, which is left out", base->name, tuned->name,
             embed ? "" : " the embedding,", head ? "" : " the head,",
             others ? "" : " norms or biases,");
}

int adapter_extract(struct model *base, struct model *tuned, struct lora_truncation truncation,
                    struct pool *pool, struct truncated_adapter *out, struct error *err) {
    struct svd_job job = {
        .truncation = truncation, .shape = &base->config, .base = base, .tuned = tuned};
    *out = (struct truncated_adapter){0};
    int rc = models_check(base, tuned, err);
    if (rc == OK && (!model_hash(base, err) || !model_hash(tuned, err))) rc = err->code;
    if (rc != OK) return rc;
    warn_other_differences(base, tuned);
    return svd_job_run(&job, pool, out, err);
}

int adapter_resize(const struct adapter *source, struct lora_truncation truncation,
                   struct pool *pool, struct truncated_adapter *out, struct error *err) {
    struct svd_job job = {.truncation = truncation, .shape = &source->shape, .source = source};
    *out = (struct truncated_adapter){0};
    int rc = adapter_require_plain(source, "resizing", err);
    if (rc == OK) rc = svd_job_run(&job, pool, out, err);
    if (rc == OK) adapter_add_training_data(out->adapter, source->training_data);
    return rc;
}
