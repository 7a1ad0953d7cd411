/*
 * extract: low-rank adapters cut out of larger weights.
 *
 * adapter_extract takes ΔW = W_finetuned - W_base of every projection, row by row as the two files
 * hold them, and keeps the largest singular values. The adapter will run on a quantised base as it
 * is, so the rounding of the base belongs in ΔW. adapter_resize does the same to the ΔW of an
 * adapter. Modules are independent: the thread pool cuts them, and the adapter is assembled in
 * module order, so that it does not depend on the number of threads. Differences outside of the
 * projections do not fit in a low-rank adapter: a warning names them.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_RANK 16 /* singular values tried first for --energy, then doubled */

struct piece {
    float *ab; /* A [r][in], then B [out][r] */
    int32_t r; /* 0: ΔW is zero */
    double size2, lost2;
};
struct svd_job {
    struct lora_truncation cut;
    const struct model_config *shape;
    const struct model *base, *tuned; /* extract */
    const struct adapter *from;       /* resize */
    struct piece *pieces;             /* [L][N_PROJ] */
};

static void piece_fill(const struct svd_job *c, int32_t i, const struct svd *sv, int32_t r,
                       double total2) {
    struct piece *p = &c->pieces[i];
    double kept2 = 0;
    *p = (struct piece){.r = r, .size2 = total2};
    p->ab = xcalloc((size_t)r * (size_t)(sv->in + sv->out), sizeof *p->ab);
    svd_write_factors(sv, r, p->ab, p->ab + (size_t)r * (size_t)sv->in);
    for (int32_t k = 0; k < MIN(r, sv->n); k++) kept2 += sv->s[k] * sv->s[k];
    p->lost2 = MAX(0, total2 - kept2);
}

static int32_t rank_limit(const struct svd_job *c, int32_t i) {
    int32_t most = c->cut.rank ? c->cut.rank : ADAPTER_RANK_MAX;
    return MIN(most, MIN(proj_in(c->shape, i % N_PROJ), proj_out(c->shape, i % N_PROJ)));
}

/* w [out][in] := ΔW of module i; returns ‖ΔW‖². */
static double delta_read(const struct svd_job *c, int32_t i, float *w) {
    const struct matrix *a = &c->base->layers[i / N_PROJ].proj[i % N_PROJ];
    const struct matrix *b = &c->tuned->layers[i / N_PROJ].proj[i % N_PROJ];
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

/* With --energy, doubles the number of singular values until the rank that holds the energy is
 * below it. */
static void module_extract(const struct svd_job *c, int32_t i) {
    int in = proj_in(c->shape, i % N_PROJ), out = proj_out(c->shape, i % N_PROJ);
    int32_t most = rank_limit(c, i);
    float *w = xmalloc((size_t)in * (size_t)out * sizeof *w);
    double total2 = delta_read(c, i, w);
    int32_t look = c->cut.energy > 0 ? MIN(FIRST_RANK, most) : most;
    c->pieces[i].size2 = total2;
    for (bool done = total2 == 0 || !isfinite(total2); !done; look = MIN(2 * look, most)) {
        struct arena ar = {0};
        struct svd sv = randomized_svd(w, out, in, look, &ar);
        int32_t r = c->cut.energy > 0 ? svd_energy_rank(&sv, total2, c->cut.energy, look) : look;
        done = r < look || look == most;
        if (done) piece_fill(c, i, &sv, r, total2);
        arena_release(&ar);
    }
    free(w);
}

static void module_resize(const struct svd_job *c, int32_t i) {
    const struct lora *lo = &c->from->loras[i];
    int32_t r = MIN(rank_limit(c, i), lo->r);
    struct arena ar = {0};
    struct lowrank_sum s =
        lowrank_sum_new(&ar, proj_out(c->shape, i % N_PROJ), proj_in(c->shape, i % N_PROJ), lo->r);
    double total2 = 0;
    lowrank_sum_put(&s, lo, 1, 0);
    struct svd sv = lowrank_sum_svd(&s, &ar);
    for (int k = 0; k < sv.n; k++) total2 += sv.s[k] * sv.s[k];
    if (c->cut.energy > 0) r = svd_energy_rank(&sv, total2, c->cut.energy, r);
    if (total2 > 0) piece_fill(c, i, &sv, r, total2);
    arena_release(&ar);
}

static void modules_factorize(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct svd_job *c = ctx;
    (void)thread;
    for (int32_t i = (int32_t)begin; i < end; i++) {
        if (c->from && c->from->loras[i].r > 0) module_resize(c, i);
        if (c->tuned && proj_in(c->shape, i % N_PROJ) > 0) module_extract(c, i);
    }
}

static json_t *lineage_make(const struct svd_job *c, double error) {
    json_t *o = json_pack("{s:s}", "operator", c->from ? "resize" : "extract");
    json_t *of = c->from ? json_object_get(c->from->lineage, ADAPTER_BASE_HASH) : NULL;
    if (c->from) json_object_set_new(o, "parents", json_string(c->from->hash));
    if (of) json_object_set(o, ADAPTER_BASE_HASH, of);
    if (c->tuned) {
        json_object_set_new(o, ADAPTER_BASE_HASH, json_string(c->base->hash));
        json_object_set_new(o, "finetuned_sha256", json_string(c->tuned->hash));
    }
    if (c->cut.rank) json_object_set_new(o, "rank", json_sprintf("%d", (int)c->cut.rank));
    if (c->cut.energy > 0) json_object_set_new(o, "energy", json_sprintf("%g", c->cut.energy));
    json_object_set_new(o, "error", json_sprintf("%.3g", error));
    return o;
}

/* Assembles the adapter from all pieces. */
static struct adapter *pieces_join(const struct svd_job *c, struct error *err) {
    struct adapter_builder d =
        adapter_builder_init(c->shape, c->from ? c->from->config.dropout : 0);
    for (int32_t i = 0; i < c->shape->n_layers * N_PROJ; i++) {
        const struct piece *p = &c->pieces[i];
        size_t sides = (size_t)(proj_in(c->shape, i % N_PROJ) + proj_out(c->shape, i % N_PROJ));
        d.size2 += p->size2;
        d.lost2 += p->lost2;
        if (p->r > 0)
            memcpy(adapter_builder_add(&d, i, p->r), p->ab, (size_t)p->r * sides * sizeof *p->ab);
    }
    if (!isfinite(d.size2)) {
        error_set(err, ERR_NUMERIC, "a projection has weights that are not numbers");
        adapter_builder_release(&d);
        return NULL;
    }
    json_t *lineage = lineage_make(c, adapter_builder_error(&d));
    struct adapter *a = adapter_builder_finish(&d, lineage);
    if (!a) error_set(err, ERR_STATE, "no projection is changed: there is nothing to write");
    json_decref(lineage);
    return a;
}

/* The error of all modules of kind p (N_PROJ: of all modules), relative to the norm of their ΔW. */
static double kind_error(const struct svd_job *c, int p) {
    double size2 = 0, lost2 = 0;
    for (int32_t i = 0; i < c->shape->n_layers * N_PROJ; i++) {
        if (p < N_PROJ && i % N_PROJ != p) continue;
        size2 += c->pieces[i].size2;
        lost2 += c->pieces[i].lost2;
    }
    return size2 > 0 ? sqrt(lost2 / size2) : 0;
}

static void kind_measure(const struct svd_job *c, int p, struct lora_cut_kind *out) {
    *out = (struct lora_cut_kind){.rank_min = ADAPTER_RANK_MAX, .error = kind_error(c, p)};
    for (int32_t l = 0; l < c->shape->n_layers; l++) {
        int32_t r = c->pieces[l * N_PROJ + p].r;
        if (r == 0) continue;
        out->rank_min = MIN(out->rank_min, r);
        out->rank_max = MAX(out->rank_max, r);
        out->layers++;
    }
}

static void pieces_free(struct svd_job *c) {
    for (int32_t i = 0; c->pieces && i < c->shape->n_layers * N_PROJ; i++) free(c->pieces[i].ab);
    free(c->pieces);
}

/* Cuts all modules. */
static int modules_cut(struct svd_job *c, struct pool *pool, struct lora_cut *out,
                       struct error *err) {
    int32_t n = c->shape->n_layers * N_PROJ;
    c->pieces = xcalloc((size_t)n, sizeof *c->pieces);
    pool_run(pool, modules_factorize, c, n, 1);
    out->adapter = pieces_join(c, err);
    out->error = kind_error(c, N_PROJ);
    for (int p = 0; p < N_PROJ; p++) kind_measure(c, p, &out->kinds[p]);
    pieces_free(c);
    return out->adapter ? OK : err->code;
}

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

static bool vectors_same(const float *a, const float *b, int64_t n) {
    return a == b || (a && b && memcmp(a, b, (size_t)n * sizeof *a) == 0);
}

static bool layers_same(const struct model *base, const struct model *tuned) {
    const struct model_config *c = &base->config;
    bool same = true;
    for (int32_t l = 0; l < c->n_layers; l++) {
        const struct model_layer *a = &base->layers[l], *b = &tuned->layers[l];
        const float *pairs[][2] = {
            {a->attn_norm, b->attn_norm},           {a->ffn_norm, b->ffn_norm},
            {a->attn_norm_bias, b->attn_norm_bias}, {a->ffn_norm_bias, b->ffn_norm_bias},
            {a->post_attn_norm, b->post_attn_norm}, {a->post_ffn_norm, b->post_ffn_norm}};
        for (size_t k = 0; k < ARRAY_LEN(pairs); k++)
            same = same && vectors_same(pairs[k][0], pairs[k][1], c->d_model);
        for (int p = 0; p < N_PROJ; p++)
            same = same && vectors_same(a->bias[p], b->bias[p], proj_out(c, p));
        same = same && vectors_same(a->q_norm, b->q_norm, c->head_dim) &&
               vectors_same(a->k_norm, b->k_norm, c->head_dim);
    }
    return same && vectors_same(base->final_norm, tuned->final_norm, c->d_model) &&
           vectors_same(base->final_norm_bias, tuned->final_norm_bias, c->d_model);
}

static bool matrices_same(const struct matrix *a, const struct matrix *b) {
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

static void rest_compare(const struct model *base, const struct model *tuned) {
    bool embed = matrices_same(&base->embed, &tuned->embed) &&
                 matrices_same(&base->pos_embed, &tuned->pos_embed);
    bool head = matrices_same(&base->head, &tuned->head), rest = layers_same(base, tuned);
    if (embed && head && rest) return;
    log_warn("'%s' and '%s' differ in%s%s%s as well, which is left out", base->name, tuned->name,
             embed ? "" : " the embedding,", head ? "" : " the head,",
             rest ? "" : " norms or biases,");
}

int adapter_extract(struct model *base, struct model *tuned, struct lora_truncation cut,
                    struct pool *pool, struct lora_cut *out, struct error *err) {
    struct svd_job c = {.cut = cut, .shape = &base->config, .base = base, .tuned = tuned};
    *out = (struct lora_cut){0};
    int rc = models_check(base, tuned, err);
    if (rc == OK && (!model_hash(base, err) || !model_hash(tuned, err))) rc = err->code;
    if (rc != OK) return rc;
    rest_compare(base, tuned);
    return modules_cut(&c, pool, out, err);
}

int adapter_resize(const struct adapter *from, struct lora_truncation cut, struct pool *pool,
                   struct lora_cut *out, struct error *err) {
    struct svd_job c = {.cut = cut, .shape = &from->shape, .from = from};
    *out = (struct lora_cut){0};
    int rc = adapter_require_plain(from, "resizing", err);
    return rc == OK ? modules_cut(&c, pool, out, err) : rc;
}
