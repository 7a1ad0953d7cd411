/*
 * norm_act: norms and activations of single rows, by the kernel table and by elementwise loops.
 *
 * The loops here use only operations that IEEE 754 rounds exactly (+ - * / sqrt); sums, whose order
 * matters, and exp come from the kernel table.
 */
#include "model/model.h"

#include <math.h>

static void layernorm_row(const struct kernels *k, float *y, const float *x, const float *g,
                          const float *b, float eps, int64_t n) {
    float mean = k->sum(x, n) / (float)n;
    for (int64_t i = 0; i < n; i++) y[i] = x[i] - mean;
    float r = 1.0f / sqrtf(k->dot(y, y, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * r * g[i] + b[i];
}

void norm_row(const struct kernels *k, float *y, const float *x, const float *g, const float *b,
              float eps, int64_t n) {
    if (b)
        layernorm_row(k, y, x, g, b, eps, n);
    else
        k->rmsnorm(y, x, g, eps, n);
}

void activation_row(const struct kernels *k, const struct arch *a, float *y, const float *gate,
                    const float *up, int64_t n) {
    if (a->ungated) {
        k->gelu(y, up, n);
    } else if (a->gelu) {
        k->gelu(y, gate, n);
        for (int64_t i = 0; i < n; i++) y[i] *= up[i];
    } else {
        k->silu_mul(y, gate, up, n);
    }
}

bool layer_can_fuse_gated_mlp(const struct model_layer *l, const struct arch *a,
                              enum row_path path) {
    if (a->ungated || a->gelu || l->bias[PROJ_GATE] || l->bias[PROJ_UP]) return false;
    for (int p = PROJ_GATE; p <= PROJ_DOWN; p++)
        if (!matrix_uses_tiles(&l->proj[p], path)) return false;
    return true;
}
