/*
 * rows: what the forward pass does to one row between products, where architectures differ.
 *
 * Plain functions of arrays: elementwise sums and the kernel table's reductions, so that a row's
 * bits are the same at every processor level and whoever calls.
 */
#ifndef SHOAL_ROWS_H
#define SHOAL_ROWS_H

#include "model/model.h"

/* RMS norm times g; with `b` LayerNorm, (x - mean) / sqrt(variance + eps) · g + b. y may be x. */
void norm_row(const struct kernels *k, float *y, const float *x, const float *g, const float *b,
              float eps, int64_t n);
/* gate = act(gate + gate_bias) · (up + up_bias), or act(up + up_bias) where there is no gate; `up`
 * is overwritten and biases may be NULL. */
void activation_row(const struct kernels *k, const struct arch *a, float *gate, float *up,
                    const float *gate_bias, const float *up_bias, int64_t n);

#endif
