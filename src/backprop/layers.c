/*
 * layers: one transformer layer: the forward pass, which keeps the backward pass's inputs, and the
 * backward pass.
 *
 * Forward x Wᵀ with the engine's products; dX = dY W over the same matrix, read along its rows; in
 * full training dW += dYᵀ X. Everything except attention runs in chunks of rows, so that
 * intermediate values stay small and in cache. Values that are cheap to recompute (outputs of
 * norms, the activation) are not kept. With gradient checkpointing a layer keeps only its input; it
 * runs forward again, except for its last product, before its backward pass (Chen et al. 2016).
 *
 * Invariant: threads split outputs, never a sum, and sums over rows continue from chunk to chunk,
 * so results depend on neither.
 */
#include "backprop/internal.h"

#include <string.h>

/* The input rows x in the form that the projections p, p + 1, … of a layer need; they share it. */
static struct gemm_input inputs_of(struct trainer *t, int l, int p, int n, const float *x,
                                   int64_t rows) {
    return gemm_input_for(&t->model->layers[l].proj[p], n, x, rows, t->in_scratch, t->pool);
}

/* y (+)= x Wᵀ and the adapters' parts, for a range of rows. */
static void linear_forward(struct trainer *t, int l, int p, struct row_range s, float *y,
                           const struct gemm_input *in, bool add) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    float *aside = add && t->acts[l].z[p] ? t->dora_out : NULL;
    matrix_mul(aside ? aside : y, w->n, in, w, add && !aside, t->pool);
    lora_forward(t, l, p, s, y, aside, in->x);
}

/* dx (+)= dy W, and the gradients of the weights; dx may be NULL if it is not needed. */
static void linear_backward(struct trainer *t, int l, int p, struct row_range s, float *dx,
                            const float *dy, const float *x, bool add) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    const float *dz = dora_backward(t, l, p, s, dy);
    if (dx)
        matrix_mul_backward(dx, w->k, dz, w->n, s.rows, w, t->int8_backward, add, t->back_scratch,
                            t->pool);
    lora_backward(t, l, p, s, dx, dz, x);
    if (!t->full) return;
    gemm_nn_parallel(DTYPE_F32, t->layers[l].proj[p], w->k, dz, 1, w->n, w->n, x, w->k, s.rows,
                     w->k, true, t->pool);
    bias_backward(t, t->layers[l].bias[p], dy, s.rows, w->n);
}

static struct row_range row_range_at(const struct trainer *t, int64_t r0) {
    return (struct row_range){r0, MIN(t->chunk, t->rows - r0)};
}

/* out = x + the end of a branch: a projection of `in`, its bias, and its norm if it has one. */
static void branch_forward(struct trainer *t, int l, int p, struct row_range s, float *out,
                           const float *x, const struct gemm_input *in, float *branch,
                           const float *norm) {
    int64_t d = t->c.d_model;
    const float *bias = t->model->layers[l].bias[p];
    memcpy(out, x, (size_t)(s.rows * d) * sizeof *out);
    linear_forward(t, l, p, s, branch ? branch : out, in, !branch);
    bias_forward(t, branch ? branch : out, bias, s.rows, d);
    if (!branch) return;
    norm_forward(t, t->dxn, branch, norm, NULL, s.rows, d);
    residual_forward(t, out, t->dxn, s.rows, d);
}

/* The gradient of the projection that ends a branch: dx, or dx through the backward pass of the
 * norm. */
static const float *branch_back(struct trainer *t, struct row_range s, const float *branch,
                                const float *norm, float *g_norm) {
    int64_t d = t->c.d_model;
    const float *dx = t->dx + s.r0 * d;
    if (!branch) return dx;
    memcpy(t->dxn, dx, (size_t)(s.rows * d) * sizeof *dx);
    norm_backward(t, t->dxn, t->dxn, branch + s.r0 * d,
                  (struct norm_params){.g = norm, .dg = g_norm}, s.rows, d, false);
    return t->dxn;
}

static void qk_norm_forward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    struct activations *a = &t->acts[l];
    int64_t e = t->c.head_dim, nq = t->rows * t->c.n_heads, nk = t->rows * t->c.n_kv_heads;
    if (!w->q_norm) return;
    memcpy(a->q_raw, a->q, (size_t)(nq * e) * sizeof(float));
    memcpy(a->k_raw, a->k, (size_t)(nk * e) * sizeof(float));
    norm_forward(t, a->q, a->q_raw, w->q_norm, NULL, nq, e);
    norm_forward(t, a->k, a->k_raw, w->k_norm, NULL, nk, e);
}

static void qk_norm_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t e = t->c.head_dim, nq = t->rows * t->c.n_heads, nk = t->rows * t->c.n_kv_heads;
    if (!w->q_norm) return;
    struct norm_params q = {.g = w->q_norm, .dg = g->q_norm}, k = {.g = w->k_norm, .dg = g->k_norm};
    norm_backward(t, t->dq, t->dq, a->q_raw, q, nq, e, false);
    norm_backward(t, t->dk, t->dk, a->k_raw, k, nk, e, false);
}

static void attention_block_forward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, q = (int64_t)t->c.n_heads * t->c.head_dim,
            g = (int64_t)t->c.n_kv_heads * t->c.head_dim;
    for (int64_t r0 = 0; r0 < t->rows; r0 += t->chunk) {
        struct row_range s = row_range_at(t, r0);
        norm_forward(t, t->xn, a->x + r0 * d, w->attn_norm, w->attn_norm_bias, s.rows, d);
        struct gemm_input in = inputs_of(t, l, PROJ_Q, 3, t->xn, s.rows);
        linear_forward(t, l, PROJ_Q, s, a->q + r0 * q, &in, false);
        linear_forward(t, l, PROJ_K, s, a->k + r0 * g, &in, false);
        linear_forward(t, l, PROJ_V, s, a->v + r0 * g, &in, false);
    }
    bias_forward(t, a->q, w->bias[PROJ_Q], t->rows, q);
    bias_forward(t, a->k, w->bias[PROJ_K], t->rows, g);
    bias_forward(t, a->v, w->bias[PROJ_V], t->rows, g);
    qk_norm_forward(t, l);
    rope_rotate(t, l, a->q, q, false);
    rope_rotate(t, l, a->k, g, false);
    attention_forward(t, l);
}

/* Attention's output projection and the MLP. Without `whole` only the values that the backward pass
 * reads, which exclude the last product. */
static void mlp_forward(struct trainer *t, int l, bool whole) {
    const struct model_layer *w = &t->model->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, f = t->c.d_ff, q = (int64_t)t->c.n_heads * t->c.head_dim;
    for (int64_t r0 = 0; r0 < t->rows; r0 += t->chunk) {
        struct row_range s = row_range_at(t, r0);
        float *mid = a->mid + r0 * d, *gate = a->gate ? a->gate + r0 * f : NULL,
              *up = a->up + r0 * f;
        float *branch[2] = {NULL, NULL};
        for (int i = 0; i < 2 && a->branch[0]; i++) branch[i] = a->branch[i] + r0 * d;
        struct gemm_input in = inputs_of(t, l, PROJ_O, 1, a->att + r0 * q, s.rows);
        branch_forward(t, l, PROJ_O, s, mid, a->x + r0 * d, &in, branch[0], w->post_attn_norm);
        norm_forward(t, t->xn, mid, w->ffn_norm, w->ffn_norm_bias, s.rows, d);
        in = inputs_of(t, l, gate ? PROJ_GATE : PROJ_UP, gate ? 2 : 1, t->xn, s.rows);
        if (gate) linear_forward(t, l, PROJ_GATE, s, gate, &in, false);
        linear_forward(t, l, PROJ_UP, s, up, &in, false);
        if (gate) bias_forward(t, gate, w->bias[PROJ_GATE], s.rows, f);
        bias_forward(t, up, w->bias[PROJ_UP], s.rows, f);
        if (!whole && !branch[1] && !a->h[PROJ_DOWN]) continue;
        activation_forward(t, gate, up, s.rows);
        if (!whole && !branch[1] && !a->z[PROJ_DOWN]) {
            lora_forward(t, l, PROJ_DOWN, s, NULL, NULL, t->act_buf);
            continue;
        }
        in = inputs_of(t, l, PROJ_DOWN, 1, t->act_buf, s.rows);
        branch_forward(t, l, PROJ_DOWN, s, t->acts[l + 1].x + r0 * d, mid, &in, branch[1],
                       w->post_ffn_norm);
    }
}

void layer_forward(struct trainer *t, int l) {
    for (int p = 0; p < N_PROJ; p++) lora_dropout_mask(t, l, p);
    attention_block_forward(t, l);
    mlp_forward(t, l, true);
}

static void mlp_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, f = t->c.d_ff;
    struct norm_params n = {w->ffn_norm, w->ffn_norm_bias, g->ffn_norm, g->ffn_norm_bias};
    for (int64_t r0 = 0; r0 < t->rows; r0 += t->chunk) {
        struct row_range s = row_range_at(t, r0);
        const float *gate = a->gate ? a->gate + r0 * f : NULL, *up = a->up + r0 * f;
        activation_forward(t, gate, up, s.rows);
        const float *dy = branch_back(t, s, a->branch[1], w->post_ffn_norm, g->post_ffn_norm);
        linear_backward(t, l, PROJ_DOWN, s, t->dact, dy, t->act_buf, false);
        activation_backward(t, gate, up, s.rows);
        norm_forward(t, t->xn, a->mid + r0 * d, n.g, n.b, s.rows, d);
        if (gate) linear_backward(t, l, PROJ_GATE, s, t->dxn, t->dgate, t->xn, false);
        linear_backward(t, l, PROJ_UP, s, t->dxn, t->dup, t->xn, gate != NULL);
        norm_backward(t, t->dx + r0 * d, t->dxn, a->mid + r0 * d, n, s.rows, d, true);
    }
}

static void qkv_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, nq = (int64_t)t->c.n_heads * t->c.head_dim,
            nk = (int64_t)t->c.n_kv_heads * t->c.head_dim;
    float *dxn = t->full || l > 0 ? t->dxn : NULL; // below the first layer all weights are frozen
    struct norm_params n = {w->attn_norm, w->attn_norm_bias, g->attn_norm, g->attn_norm_bias};
    rope_rotate(t, l, t->dq, nq, true);
    rope_rotate(t, l, t->dk, nk, true);
    qk_norm_backward(t, l);
    for (int64_t r0 = 0; r0 < t->rows; r0 += t->chunk) {
        struct row_range s = row_range_at(t, r0);
        norm_forward(t, t->xn, a->x + r0 * d, n.g, n.b, s.rows, d);
        linear_backward(t, l, PROJ_Q, s, dxn, t->dq + r0 * nq, t->xn, false);
        linear_backward(t, l, PROJ_K, s, dxn, t->dk + r0 * nk, t->xn, true);
        linear_backward(t, l, PROJ_V, s, dxn, t->dv + r0 * nk, t->xn, true);
        if (dxn) norm_backward(t, t->dx + r0 * d, dxn, a->x + r0 * d, n, s.rows, d, true);
    }
}

void layer_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t q = (int64_t)t->c.n_heads * t->c.head_dim;
    // the shared activations still hold the last layer that uses them
    if (t->checkpointing && l + 1 < t->c.n_layers - t->n_full_layers) {
        for (int p = 0; p < N_PROJ; p++) lora_dropout_mask(t, l, p);
        attention_block_forward(t, l);
        mlp_forward(t, l, false);
    }
    mlp_backward(t, l);
    for (int64_t r0 = 0; r0 < t->rows; r0 += t->chunk) {
        struct row_range s = row_range_at(t, r0);
        const float *dy = branch_back(t, s, a->branch[0], w->post_attn_norm, g->post_attn_norm);
        linear_backward(t, l, PROJ_O, s, t->datt + r0 * q, dy, a->att + r0 * q, false);
    }
    attention_backward(t, l);
    qkv_backward(t, l);
}
