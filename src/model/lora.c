/*
 * lora: low-rank updates in the layout of the forward pass: packs of an adapter's factors, and
 * perturbations that are computed from a counter.
 *
 * A pack keeps A by rows, so that t = A x is one dot product per row, and B by columns b_r, so that
 * y += Σ_r t_r b_r runs along the outputs. In int8 every row of A and every column of B has one
 * scale, which is a factor of the gain of its rank. Columns of int8 are stored in pairs, because
 * integer products add pairs; the last column of an odd rank is paired with zeros.
 *
 * Invariant: a pack is a function of the factors and the element type; f32 packs contain the
 * factors unchanged.
 */
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

static size_t align_64(size_t n) {
    return (n + 63) & ~(size_t)63;
}

/* Reserves `size` bytes of the pack's memory at *used and adds them to *used. If `base` is NULL, it
 * only counts and returns NULL. */
static void *pack_reserve(uint8_t *base, size_t *used, size_t size) {
    size_t offset = *used;
    *used = offset + align_64(size);
    return base ? base + offset : NULL;
}

/* The rank of a module for an adapter's rank r: even in int8. */
static size_t pack_rank(enum dtype e, int32_t r) {
    return e == DTYPE_I8 ? ((size_t)r + 1) / 2 * 2 : (size_t)r;
}

/* Fills p->index and p->modules with pointers into `base`; returns the number of bytes. */
static size_t pack_layout(struct lora_pack *p, const struct model_config *c,
                          const struct lora *loras, uint8_t *base) {
    size_t used = 0, es = dtype_size(p->elem);
    int32_t n = 0;
    for (int32_t i = 0; i < c->n_layers * N_PROJ; i++) {
        size_t r = pack_rank(p->elem, loras[i].r), in = (size_t)proj_in(c, (enum proj)(i % N_PROJ)),
               out = (size_t)proj_out(c, (enum proj)(i % N_PROJ));
        p->index[i] = r > 0 ? (int16_t)n : -1;
        if (r == 0) continue;
        p->modules[n++] = (struct lora_module){
            .a = pack_reserve(base, &used, r * in * es),
            .bt = pack_reserve(base, &used, r * out * es),
            .gain = pack_reserve(base, &used, r * sizeof(float)),
            .dora_scale =
                loras[i].dora_scale ? pack_reserve(base, &used, out * sizeof(float)) : NULL,
            .r = (int32_t)r};
    }
    return used;
}

/* Writes the factors to the memory to which the module's const pointers refer. `column` and
 * `column_i8` are scratch [out]. */
static void module_fill(const struct lora_module *m, const struct lora *lo, enum dtype e,
                        int64_t in, int64_t out, float *column, int8_t *column_i8) {
    int64_t es = (int64_t)dtype_size(e);
    if (lo->dora_scale)
        memcpy((float *)(uintptr_t)m->dora_scale, lo->dora_scale,
               (size_t)out * sizeof *lo->dora_scale);
    for (int32_t r = 0; r < lo->r; r++) {
        for (int64_t n = 0; n < out; n++) column[n] = lo->b[n * lo->r + r];
        float da = dtype_from_f32(e, lo->a + r * in, (char *)(uintptr_t)m->a + r * in * es, in);
        char *bt = (char *)(uintptr_t)m->bt + r * out * es;
        float db = dtype_from_f32(e, column, e == DTYPE_I8 ? (char *)column_i8 : bt, out);
        for (int64_t n = 0; e == DTYPE_I8 && n < out; n++)
            bt[r % 2 + 2 * n - r % 2 * out] = column_i8[n];
        ((float *)(uintptr_t)m->gain)[r] = lo->scale * da * db;
    }
}

struct lora_pack *lora_pack_new(const struct model_config *c, const struct lora *loras,
                                enum dtype elem) {
    struct lora_pack *p = xcalloc(1, sizeof *p);
    int32_t n = c->n_layers * N_PROJ, adapted = 0;
    CHECK(n <= INT16_MAX);
    for (int32_t i = 0; i < n; i++) adapted += loras[i].r > 0;
    p->elem = elem;
    p->modules = xcalloc((size_t)MAX(adapted, 1), sizeof *p->modules);
    p->index = xcalloc((size_t)n, sizeof *p->index);
    size_t size = pack_layout(p, c, loras, NULL);
    p->data = xcalloc(size + 64, 1);
    p->bytes =
        sizeof *p + (size_t)adapted * sizeof *p->modules + (size_t)n * sizeof *p->index + size + 64;
    pack_layout(p, c, loras, (uint8_t *)align_64((uintptr_t)p->data));
    size_t widest = (size_t)MAX(MAX(c->d_ff, c->d_model), c->n_heads * c->head_dim);
    float *column = xcalloc(widest, sizeof *column);
    int8_t *column_i8 = xcalloc(widest, 1);
    for (int32_t i = 0; i < n; i++) {
        enum proj proj = (enum proj)(i % N_PROJ);
        if (p->index[i] >= 0)
            module_fill(&p->modules[p->index[i]], &loras[i], elem, proj_in(c, proj),
                        proj_out(c, proj), column, column_i8);
    }
    free(column);
    free(column_i8);
    return p;
}

const struct lora_module *lora_module_at(const struct lora_pack *p, int32_t layer, enum proj proj) {
    static const struct lora_module none;
    int16_t index = p->index[layer * N_PROJ + (int32_t)proj];
    return index < 0 ? &none : &p->modules[index];
}

static float elem_at(enum dtype e, const void *p, int64_t i) {
    if (e == DTYPE_F32) return ((const float *)p)[i];
    if (e == DTYPE_I8) return ((const int8_t *)p)[i];
    uint16_t bits = ((const uint16_t *)p)[i];
    return e == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

void lora_module_unpack(const struct lora_module *m, enum dtype elem, int64_t in, int64_t out,
                        float *a, float *b) {
    for (int64_t i = 0; i < m->r * in; i++) a[i] = elem_at(elem, m->a, i);
    for (int64_t n = 0; n < out; n++)
        for (int32_t r = 0; r < m->r; r++) {
            int64_t at = elem == DTYPE_I8 ? (r / 2 * out + n) * 2 + r % 2 : r * out + n;
            b[n * m->r + r] = elem_at(elem, m->bt, at);
        }
}

void lora_pack_free(struct lora_pack *p) {
    if (!p) return;
    free(p->modules);
    free(p->index);
    free(p->data);
    free(p);
}

void lora_perturbation_signs(const struct lora_perturbation *z, int32_t layer, enum proj p, bool u,
                             int64_t begin, int64_t n, enum dtype e, void *out) {
    CHECK(e == DTYPE_F32 || e == DTYPE_I8);
    struct rng rng =
        rng_make(z->seed, RNG_NOISE, z->member, 2 * ((uint32_t)layer * N_PROJ + (uint32_t)p) + u);
    int64_t i = begin / 128 * 128;
    rng.ctr[0] = (uint32_t)(begin / 128);
    for (; i < begin + n; i += 32) {
        uint32_t word = rng_u32(&rng);
        int64_t lo = MAX(begin - i, 0), hi = MIN(begin + n - i, 32);
        for (int64_t b = lo; e == DTYPE_F32 && b < hi; b++)
            ((float *)out)[i + b - begin] = word >> b & 1 ? -1.0f : 1.0f;
        for (int64_t b = lo; e == DTYPE_I8 && b < hi; b++)
            ((int8_t *)out)[i + b - begin] = word >> b & 1 ? -1 : 1;
    }
}
