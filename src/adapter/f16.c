/*
 * f16: adapters whose parameters all are f16 values, so that the f16 pack stores them exactly.
 *
 * Rounding is stochastic. With rounding to nearest, every update of less than half a unit in the
 * last place would be lost, even if many such updates have the same sign. Below 2^-14 (subnormals)
 * f16 values are 2^-24 apart; above, their fraction has ten bits.
 *
 * Invariant: converting the values from f16 to f32 and back does not change them.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MIN_NORMAL 0x1p-14f
#define F16_MAX 65504.0f

/* One of the two f16 values next to x (finite), the nearer one more probably, so that the expected
 * value is x. `bits` has 13 random bits. Values beyond ±F16_MAX become ±F16_MAX. */
static float round_stochastic(float x, uint32_t bits) {
    uint32_t u;
    if (fabsf(x) < MIN_NORMAL) return floorf(x * 0x1p24f + (float)bits * 0x1p-13f) * 0x1p-24f;
    memcpy(&u, &x, sizeof u);
    u = (u + bits) & ~(uint32_t)0x1fff;
    memcpy(&x, &u, sizeof x);
    return fmaxf(-F16_MAX, fminf(x, F16_MAX));
}

static void floats_round(float *v, size_t n, struct rng *rng) {
    enum { BLOCK = 1024 };
    uint32_t words[BLOCK / 2];
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        rng_fill(rng, words, BLOCK / 2);
        for (size_t i = begin; i < MIN(begin + BLOCK, n); i++) {
            uint32_t bits = words[(i - begin) / 2] >> 16 * (i % 2) & 0x1fff;
            if (isfinite(v[i])) v[i] = round_stochastic(v[i], bits);
        }
    }
}

struct adapter *adapter_from_data_f16(const struct model_config *shape,
                                      const struct adapter_config *c, float *data, json_t *lineage,
                                      struct rng *rng) {
    CHECK(!c->dora);
    floats_round(data, adapter_param_count(shape, c), rng);
    struct adapter *a = adapter_from_owned_data(shape, c, data, lineage);
    adapter_pack_only(a, DTYPE_F16);
    return a;
}

void adapter_copy_params(const struct adapter *a, float *out) {
    if (a->data) {
        memcpy(out, a->data, a->n_data * sizeof *out);
        return;
    }
    CHECK(a->packs[DTYPE_F16] && !a->config.dora);
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        enum proj p = (enum proj)(i % N_PROJ);
        const struct lora_module *m = lora_module_at(a->packs[DTYPE_F16], i / N_PROJ, p);
        int64_t in = proj_in(&a->shape, p), n = proj_out(&a->shape, p);
        if (m->r == 0) continue;
        lora_module_unpack(m, DTYPE_F16, in, n, out, out + m->r * in);
        out += m->r * (in + n);
    }
}

struct adapter *adapter_to_f32(struct adapter *a) {
    if (a->data) return adapter_retain(a);
    float *data = xmalloc(a->n_data * sizeof *data);
    adapter_copy_params(a, data);
    struct adapter *f32 = adapter_from_owned_data(&a->shape, &a->config, data, a->lineage);
    adapter_add_training_data(f32, a->training_data);
    return f32;
}
