/*
 * layers: one transformer layer: the forward pass, which stores the inputs of the backward pass,
 * and the backward pass.
 *
 * The forward pass computes x Wᵀ with the engine's products; the backward pass computes dX = dY W
 * with the same matrix, and in full training dW += dYᵀ X. The products run in chunks of rows, so
 * that intermediate values stay small and in cache. Values that are cheap to compute again (outputs
 * of norms, the activation) are not stored. With gradient checkpointing, the lower layers store
 * only their inputs; the forward pass of such a layer, except for its last product, is run again
 * before its backward pass (Chen et al. 2016).
 *
 * Invariant: threads divide outputs, never a sum, and sums over rows continue from chunk to chunk.
 * So results depend neither on threads nor on chunks. In tiles, sums over rows add groups of 32
 * rows: from the first row of a pass on for gradients of weights, from the first row of each sample
 * on for those of adapters. Chunks end between two groups.
 */
#include "backprop/internal.h"

/* The chunk that begins at row r0; it has no rows if r0 is t->rows. */
static struct row_range chunk_at(const struct trainer *t, int64_t r0, int64_t tile_row) {
    int64_t end = MIN(r0 + t->chunk, t->rows);
    if (lora_grads_in_tiles(t) && end < t->rows) {
        const struct packed_seq *s = t->seqs;
        while (s->end < end) s++;
        if (s->active < end && end < s->end) end -= (end - s->active) % 32;
    }
    return (struct row_range){r0, end - r0, tile_row};
}

static struct row_range chunk_first(const struct trainer *t) {
    return chunk_at(t, 0, 0);
}

static struct row_range chunk_next(const struct trainer *t, struct row_range c) {
    return chunk_at(t, c.r0 + c.rows, c.tile_row + (c.rows + 15) / 16 * 16);
}

/* Prepares the input rows x for the n projections p, p + 1, … of a layer. */
static struct gemm_input input_prepare(struct trainer *t, int l, int p, int n, const float *x,
                                       int64_t rows) {
    return gemm_input_for(&t->model->layers[l].proj[p], n, x, rows, t->row_path, t->input_scratch,
                          t->pool);
}

/* Prepares norm(x) for these projections; in tiles only, if all of them read tiles. */
static struct gemm_input normed_input_prepare(struct trainer *t, int l, int p, int n,
                                              const float *x, const float *g, const float *b,
                                              int64_t rows) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    bool tiles = true;
    for (int i = 0; i < n; i++) tiles = tiles && matrix_uses_tiles(&w[i], t->row_path);
    if (tiles) return norm_tiles_forward(t, x, g, b, rows, w->k);
    norm_forward(t, t->xn, x, g, b, rows, w->k);
    return input_prepare(t, l, p, n, t->xn, rows);
}

/* The same for the backward pass, which reads the rows only to compute gradients of weights. */
static struct gemm_input normed_input_again(struct trainer *t, const float *x, const float *g,
                                            const float *b, int64_t rows) {
    const int64_t d = t->c.d_model;
    if (lora_grads_in_tiles(t)) return norm_tiles_forward(t, x, g, b, rows, d);
    norm_forward(t, t->xn, x, g, b, rows, d);
    return (struct gemm_input){.rows = rows, .k = d, .ldx = d, .x = t->xn};
}

/* y (+)= x Wᵀ plus the adapters' parts, for a range of rows; `in` is x. */
static void linear_forward(struct trainer *t, int l, int p, struct row_range range, float *y,
                           const struct gemm_input *in, bool add) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    float *base_out = add && t->acts[l].z[p] ? t->dora_out : NULL;
    struct gemm_input with_low_rank = *in;
    with_low_rank.low_rank = lora_down(t, l, p, 1, range, in);
    matrix_mul(base_out ? base_out : y, w->n, &with_low_rank, w, add && !base_out, t->pool);
    lora_up(t, l, p, range, y, base_out, in);
}

/* Prepares the gradient of a projection's outputs as the input of products: rows, and also tiles if
 * the caller has them or the products with A and B need them. */
static struct gemm_input output_grad_prepare(struct trainer *t, int l, int p, const float *dy,
                                             uint16_t *tiles, int64_t rows) {
    const int64_t n = t->model->layers[l].proj[p].n;
    struct gemm_input in = {.rows = rows, .k = n, .ldx = n, .x = dy, .tiles = tiles};
    if (!tiles && t->lora_tiles)
        gemm_input_prepare(&in, dy, n, rows, n, false, true, t->dy_scratch, t->pool);
    return in;
}

/* dx (+)= dy W plus the adapters' parts. dx may be NULL if it is not needed. */
static void linear_backward_inputs(struct trainer *t, int l, int p, struct row_range range,
                                   float *dx, struct gemm_input *dy, bool add) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    const bool chain = dx && dy->tiles && t->grad_path == GRAD_TILES &&
                       matrix_uses_tiles(w, ROWS_TRAINING);
    dy->low_rank = lora_backward_down(t, l, p, range, dy, chain);
    if (chain)
        matrix_mul_backward_tiles(dx, w->k, dy, w, add, t->pool);
    else if (dx)
        matrix_mul_backward(dx, w->k, dy->x, w->n, range.rows, w, t->grad_path, add,
                            t->backward_scratch, t->pool);
    if (dx) lora_backward_up(t, l, p, range, dx, dy, chain);
}

/* Adds the gradients of the weights. It reads t->dh, so it must follow linear_backward_inputs. */
static void linear_backward_weights(struct trainer *t, int l, int p, struct row_range range,
                                    const struct gemm_input *dy, const struct gemm_input *x) {
    const struct matrix *w = &t->model->layers[l].proj[p];
    lora_backward_weights(t, l, p, range, dy, x);
    if (!t->full) return;
    weight_grad_add(t, t->layers[l].proj[p], dy->x, w->n, x->x, w->k, range.rows);
    bias_backward(t, t->layers[l].bias[p], dy->x, range.rows, w->n);
}

/* The whole backward pass of a projection: dx (+)= …, and the gradients of weights and magnitudes.
 * `tiles` is dy in tiles; NULL if the caller did not compute it. */
static void linear_backward(struct trainer *t, int l, int p, struct row_range range, float *dx,
                            const float *dy, uint16_t *tiles, const struct gemm_input *x,
                            bool add) {
    const float *dz = dora_backward(t, l, p, range, dy);
    struct gemm_input in = output_grad_prepare(t, l, p, dz, dz == dy ? tiles : NULL, range.rows);
    linear_backward_inputs(t, l, p, range, dx, &in, add);
    linear_backward_weights(t, l, p, range, &in, x);
}

/* out = x + the output of a branch (attention or MLP). This output is a projection p of `in` plus
 * its bias, and is normed if `branch` is not NULL; `branch` then stores it before the norm. */
static void branch_forward(struct trainer *t, int l, int p, struct row_range range, float *out,
                           const float *x, const struct gemm_input *in, float *branch,
                           const float *norm) {
    int64_t d = t->c.d_model;
    const float *bias = t->model->layers[l].bias[p];
    rows_copy(t, out, x, range.rows, d);
    linear_forward(t, l, p, range, branch ? branch : out, in, !branch);
    bias_forward(t, branch ? branch : out, bias, range.rows, d);
    if (!branch) return;
    norm_forward(t, t->dxn, branch, norm, NULL, range.rows, d);
    residual_forward(t, out, t->dxn, range.rows, d);
}

/* Returns the gradient of the output of a branch's last projection: t->dx, or, if the branch has a
 * norm, the result of the norm's backward pass. */
static const float *branch_backward(struct trainer *t, struct row_range range, const float *branch,
                                    const float *norm, float *g_norm) {
    int64_t d = t->c.d_model;
    const float *dx = t->dx + range.r0 * d;
    if (!branch) return dx;
    rows_copy(t, t->dxn, dx, range.rows, d);
    norm_backward(t, t->dxn, t->dxn, branch + range.r0 * d,
                  (struct norm_params){.g = norm, .dg = g_norm}, range.rows, d, false);
    return t->dxn;
}

static void qk_norm_forward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    struct activations *a = &t->acts[l];
    int64_t e = t->c.head_dim, nq = t->rows * t->c.n_heads, nk = t->rows * t->c.n_kv_heads;
    if (!w->q_norm) return;
    rows_copy(t, a->q_raw, a->q, nq, e);
    rows_copy(t, a->k_raw, a->k, nk, e);
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
    for (struct row_range range = chunk_first(t); range.rows; range = chunk_next(t, range)) {
        const int64_t r0 = range.r0;
        struct gemm_input in = normed_input_prepare(t, l, PROJ_Q, 3, a->x + r0 * d, w->attn_norm,
                                                    w->attn_norm_bias, range.rows);
        linear_forward(t, l, PROJ_Q, range, a->q + r0 * q, &in, false);
        linear_forward(t, l, PROJ_K, range, a->k + r0 * g, &in, false);
        linear_forward(t, l, PROJ_V, range, a->v + r0 * g, &in, false);
    }
    bias_forward(t, a->q, w->bias[PROJ_Q], t->rows, q);
    bias_forward(t, a->k, w->bias[PROJ_K], t->rows, g);
    bias_forward(t, a->v, w->bias[PROJ_V], t->rows, g);
    qk_norm_forward(t, l);
    rope_rotate(t, l, a->q, q, false);
    rope_rotate(t, l, a->k, g, false);
    kv_round(t, l);
    attention_forward(t, l);
}

/* mlp_tiles: the matrices and outputs of the gated MLP for a range of rows. */
static struct gemm_gated gated_mlp_rows(const struct trainer *t, int l, struct row_range range) {
    const struct model_layer *w = &t->model->layers[l];
    const struct activations *a = &t->acts[l];
    const int64_t at = range.tile_row * ((t->c.d_ff + 31) / 32 * 32);
    return (struct gemm_gated){.gate = &w->proj[PROJ_GATE],
                               .up = &w->proj[PROJ_UP],
                               .act = t->act_tiles,
                               .gate_out = a->gate_tiles + at,
                               .up_out = a->up_tiles + at};
}

struct gated_job {
    const struct trainer *t;
    struct gemm_gated g;
    struct gemm_input in;
};

/* Items are pairs of panels of outputs. */
static void gate_up_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gated_job *j = ctx;
    (void)thread;
    j->t->k->gemm_tiles_silu(&j->g, &j->in, 32 * begin, MIN(32 * end, j->t->c.d_ff));
}

/* Packs x [rows][F] in tiles. */
static void rows_pack_tiles(struct trainer *t, uint16_t *tiles, const float *x, int64_t rows) {
    struct gemm_input in = {.rows = rows, .k = t->c.d_ff, .ldx = t->c.d_ff, .x = x, .tiles = tiles};
    gemm_input_pack_tiles(&in, t->pool);
}

/* mlp_tiles: computes gate, up and activation of the normed rows, and returns the inputs of the
 * next product. If an adapter's part is not chained (internal.h), it uses separate products. */
static struct gemm_input gate_up_forward_tiles(struct trainer *t, int l, struct row_range range,
                                               const struct gemm_input *in) {
    struct gated_job j = {t, gated_mlp_rows(t, l, range), *in};
    if (t->full || (lora_in_chain(t, l, PROJ_GATE) && lora_in_chain(t, l, PROJ_UP))) {
        j.in.low_rank = lora_down(t, l, PROJ_GATE, 2, range, in);
        pool_run(t->pool, gate_up_tiles_items, &j, (t->c.d_ff + 31) / 32, 1);
    } else {
        linear_forward(t, l, PROJ_GATE, range, t->dgate, in, false);
        linear_forward(t, l, PROJ_UP, range, t->dup, in, false);
        activation_forward(t, t->dgate, t->dup, range.rows);
        rows_pack_tiles(t, j.g.gate_out, t->dgate, range.rows);
        rows_pack_tiles(t, j.g.up_out, t->dup, range.rows);
        rows_pack_tiles(t, t->act_tiles, t->act_buf, range.rows);
    }
    return (struct gemm_input){.path = t->row_path,
                               .rows = range.rows,
                               .k = t->c.d_ff,
                               .ldx = t->c.d_ff,
                               .tiles = t->act_tiles};
}

/* The same in f32. Without `down` the caller needs no base product of down_proj, and the result is
 * prepared only if the products with A need it. */
static struct gemm_input gate_up_forward(struct trainer *t, int l, struct row_range range,
                                         const struct gemm_input *in, bool down) {
    const struct model_layer *w = &t->model->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t f = t->c.d_ff;
    float *gate = a->gate ? a->gate + range.r0 * f : NULL, *up = a->up + range.r0 * f;
    if (gate) linear_forward(t, l, PROJ_GATE, range, gate, in, false);
    linear_forward(t, l, PROJ_UP, range, up, in, false);
    if (gate) bias_forward(t, gate, w->bias[PROJ_GATE], range.rows, f);
    bias_forward(t, up, w->bias[PROJ_UP], range.rows, f);
    activation_forward(t, gate, up, range.rows);
    if (!down && !t->lora_tiles) return (struct gemm_input){.x = t->act_buf};
    return input_prepare(t, l, PROJ_DOWN, 1, t->act_buf, range.rows);
}

/* The output projection of attention, and the MLP. Without `whole`, it computes only the values
 * that the backward pass reads, and omits the last product unless one of these values needs it. */
static void mlp_forward(struct trainer *t, int l, bool whole) {
    const struct model_layer *w = &t->model->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, q = (int64_t)t->c.n_heads * t->c.head_dim;
    for (struct row_range range = chunk_first(t); range.rows; range = chunk_next(t, range)) {
        const int64_t r0 = range.r0;
        float *mid = a->mid + r0 * d, *branch[2] = {NULL, NULL};
        for (int i = 0; i < 2 && a->branch[0]; i++) branch[i] = a->branch[i] + r0 * d;
        const bool down = whole || branch[1] || a->z[PROJ_DOWN];
        struct gemm_input in = input_prepare(t, l, PROJ_O, 1, a->att + r0 * q, range.rows);
        branch_forward(t, l, PROJ_O, range, mid, a->x + r0 * d, &in, branch[0], w->post_attn_norm);
        const bool gated = a->gate || t->mlp_tiles;
        in = normed_input_prepare(t, l, gated ? PROJ_GATE : PROJ_UP, gated ? 2 : 1, mid,
                                  w->ffn_norm, w->ffn_norm_bias, range.rows);
        in = t->mlp_tiles ? gate_up_forward_tiles(t, l, range, &in)
                          : gate_up_forward(t, l, range, &in, down);
        if (down)
            branch_forward(t, l, PROJ_DOWN, range, t->acts[l + 1].x + r0 * d, mid, &in, branch[1],
                           w->post_ffn_norm);
        else
            lora_down(t, l, PROJ_DOWN, 1, range, &in);
    }
}

void layer_forward(struct trainer *t, int l) {
    lora_dropout_masks(t, l);
    attention_block_forward(t, l);
    mlp_forward(t, l, true);
}

/* Computes from t->dact the gradients of gates and ups, and returns the inputs of down_proj. */
static struct gemm_input mlp_activation_backward(struct trainer *t, int l, struct row_range range) {
    const struct activations *a = &t->acts[l];
    const int64_t at = range.r0 * t->c.d_ff;
    struct gemm_input act = {.rows = range.rows, .k = t->c.d_ff, .ldx = t->c.d_ff, .x = t->act_buf};
    if (t->mlp_tiles) {
        const struct gemm_gated g = gated_mlp_rows(t, l, range);
        gated_backward(t, &g, range.rows, t->full || a->z[PROJ_GATE] || a->z[PROJ_UP]);
        act.tiles = t->act_tiles;
        return act;
    }
    const float *gate = a->gate ? a->gate + at : NULL;
    activation_forward(t, gate, a->up + at, range.rows);
    activation_backward(t, gate, a->up + at, range.rows);
    return act;
}

static void mlp_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model;
    struct norm_params n = {w->ffn_norm, w->ffn_norm_bias, g->ffn_norm, g->ffn_norm_bias};
    for (struct row_range range = chunk_first(t); range.rows; range = chunk_next(t, range)) {
        const int64_t r0 = range.r0;
        const bool gated = !t->c.arch->ungated, tiles = t->mlp_tiles;
        const float *dy =
            branch_backward(t, range, a->branch[1], w->post_ffn_norm, g->post_ffn_norm);
        const float *dz = dora_backward(t, l, PROJ_DOWN, range, dy);
        struct gemm_input in = output_grad_prepare(t, l, PROJ_DOWN, dz, NULL, range.rows);
        linear_backward_inputs(t, l, PROJ_DOWN, range, t->dact, &in, false);
        const struct gemm_input act = mlp_activation_backward(t, l, range);
        linear_backward_weights(t, l, PROJ_DOWN, range, &in, &act);
        const struct gemm_input x = normed_input_again(t, a->mid + r0 * d, n.g, n.b, range.rows);
        if (gated)
            linear_backward(t, l, PROJ_GATE, range, t->dxn, t->dgate, tiles ? t->dgate_tiles : NULL,
                            &x, false);
        linear_backward(t, l, PROJ_UP, range, t->dxn, t->dup, tiles ? t->dup_tiles : NULL, &x,
                        gated);
        norm_backward(t, t->dx + r0 * d, t->dxn, a->mid + r0 * d, n, range.rows, d, true);
    }
}

static void qkv_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, nq = (int64_t)t->c.n_heads * t->c.head_dim,
            nk = (int64_t)t->c.n_kv_heads * t->c.head_dim;
    // LoRA: nothing below layer 0 is trained, except embeddings
    float *dxn = t->full || t->embed_trained || l > 0 ? t->dxn : NULL;
    struct norm_params n = {w->attn_norm, w->attn_norm_bias, g->attn_norm, g->attn_norm_bias};
    rope_rotate(t, l, t->dq, nq, true);
    rope_rotate(t, l, t->dk, nk, true);
    qk_norm_backward(t, l);
    for (struct row_range range = chunk_first(t); range.rows; range = chunk_next(t, range)) {
        const int64_t r0 = range.r0;
        const struct gemm_input x = normed_input_again(t, a->x + r0 * d, n.g, n.b, range.rows);
        linear_backward(t, l, PROJ_Q, range, dxn, t->dq + r0 * nq, NULL, &x, false);
        linear_backward(t, l, PROJ_K, range, dxn, t->dk + r0 * nk, NULL, &x, true);
        linear_backward(t, l, PROJ_V, range, dxn, t->dv + r0 * nk, NULL, &x, true);
        if (dxn) norm_backward(t, t->dx + r0 * d, dxn, a->x + r0 * d, n, range.rows, d, true);
    }
}

void layer_backward(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    const struct layer_grads *g = &t->layers[l];
    const struct activations *a = &t->acts[l];
    int64_t q = (int64_t)t->c.n_heads * t->c.head_dim;
    // The last layer with shared activations needs no second forward pass: they are still its own.
    if (t->checkpointing && l + 1 < t->c.n_layers - t->n_stored_layers) {
        lora_dropout_masks(t, l);
        attention_block_forward(t, l);
        mlp_forward(t, l, false);
    }
    mlp_backward(t, l);
    for (struct row_range range = chunk_first(t); range.rows; range = chunk_next(t, range)) {
        const struct gemm_input att = {
            .rows = range.rows, .k = q, .ldx = q, .x = a->att + range.r0 * q};
        const float *dy =
            branch_backward(t, range, a->branch[0], w->post_attn_norm, g->post_attn_norm);
        linear_backward(t, l, PROJ_O, range, t->datt + range.r0 * q, dy, NULL, &att, false);
    }
    attention_backward(t, l);
    qkv_backward(t, l);
}
