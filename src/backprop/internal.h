/*
 * backprop: the trainer's state, shared by the files of this folder only.
 *
 * trainer.c owns the state (parameters, groups, checks, the public verbs), batch.c packs samples
 * and lays out the memory of a pass, layers.c runs one layer forward and backward, lora.c the
 * adapters' part of its projections, attention.c its attention, layer_ops.c the row-wise
 * operations, cross_entropy.c the loss, optimizer.c the update, checkpoint.c the file.
 *
 * Letters as in model.h; M rows of the packed batch, C rows of a chunk of it, Q = H·E, G = K·E, I
 * and O a projection's inputs and outputs. A sample of n tokens has at most n - 1 rows: the last
 * token is only a target, and rows after the last target have no effect, so they are not computed.
 *
 * The forward pass equals the one in serving: the same products over the same (quantised) matrices
 * and the same order of sums, so a row's logits have the bits that the engine would compute under
 * f32 adapters and an f32 KV cache. The trained model is the served model.
 *
 * Invariant of LoRA mode: no value computed for an adapter depends on rows of another adapter, nor
 * on the division of its samples over calls, chunks or threads. Its gradient is one chain of fused
 * multiply-adds over its rows, in the order in which they were given.
 */
#ifndef SHOAL_BACKPROP_INTERNAL_H
#define SHOAL_BACKPROP_INTERNAL_H

#include "backprop/backprop.h"
#include "model/model.h"

/* Parameters with a common gradient norm and target count: one adapter, or the whole model. */
struct param_group {
    int64_t updates;      /* AdamW's t */
    int64_t samples;      /* samples since the last update; keys the dropout */
    double count;         /* divisor of the gradient's sum: targets, or the loss function's count */
    double nll;           /* sum since the last update */
    double loss;          /* loss of the last update */
    int first, n_tensors; /* range in trainer.tensors */
};

/* Activations of one layer for the backward pass. With gradient checkpointing the lower layers
 * share one set of arrays, except x; its values are recomputed before the backward pass of each
 * layer. */
struct activations {
    float *x;             /* [M][D] residual stream at the layer's input */
    float *q_raw, *k_raw; /* [M][Q], [M][G] before the q and k norms; NULL without them */
    float *q, *k, *v;     /* [M][Q], [M][G], [M][G]: after RoPE */
    float *att;           /* [M][Q] */
    float *att_stats;     /* [M][H][2] of the attention kernels; NULL without them */
    float *mid;           /* [M][D] residual stream after attention */
    float *gate, *up;     /* [M][F], biases included; gate is NULL without gating */
    uint16_t *gate_tiles, *up_tiles; /* mlp_tiles: the same in bf16 instead, in tiles */
    float *branch[2]; /* [M][D] attention's and MLP's outputs before their norm, or NULL */
    float *h[N_PROJ]; /* [M][Rmax] scale · A x; NULL without adapters */
    float *z[N_PROJ]; /* [M][O] before DoRA's multipliers; NULL without DoRA */
    uint8_t *dropout_mask[N_PROJ]; /* [M][(I + 7) / 8] bits: 1 where kept; NULL without dropout */
};

struct packed_seq { /* rows of one sample */
    int64_t begin, end;
    int64_t target; /* first target in trainer.target_row */
    int32_t adapter;
    int64_t ordinal; /* the sample's number within its adapter since the last update */
    const struct train_sample *sample;
};

/* Destinations of the gradients of a layer's weights; all NULL when it is frozen. */
struct layer_grads {
    float *proj[N_PROJ], *bias[N_PROJ];
    float *attn_norm, *attn_norm_bias, *ffn_norm, *ffn_norm_bias, *post_attn_norm, *post_ffn_norm,
        *q_norm, *k_norm;
};

struct lora_params {         /* one adapter's LoRA of one projection */
    float *a, *b, *m;        /* [R][I], [O][R]; DoRA's magnitude [O] or NULL */
    float *ga, *gb, *gm;     /* their gradients */
    float *bt, *mult, *norm; /* recomputed when stale: [R][O]; [O] m / norm, [O] ‖W + scale B A‖ */
    int32_t r;               /* 0: not targeted */
    float scale;
};

struct trainer {
    const struct model *model;
    struct model_config c;
    const struct kernels *k;
    struct pool *pool;
    bool full;
    bool checkpointing;       /* gradient checkpointing of activations */
    int n_full_layers;        /* with it: number of upper layers whose activations are stored */
    enum row_path row_path;   /* of all rows: the model's class */
    enum grad_path grad_path; /* of dX through the base's products, and of dW */
    bool lora_tiles; /* LoRA mode: adapters' products may be in tiles; not their gradients */
    bool mlp_tiles;  /* gate, up and activation are one product in tiles, and are stored in bf16 */
    char fingerprint[HASH_LEN]; /* hash of everything that an update depends on except the state */
    uint64_t seed;
    enum optim optim;
    float beta1, beta2, eps, decay, momentum, max_grad_norm;

    /* parameters */
    struct arena arena;         /* tensors' names and arrays */
    struct layer_grads *layers; /* [L] */
    float *g_embed, *g_head;    /* [V][D], full mode; the same when tied */
    float *g_pos;               /* [positions][D] */
    float *g_final_norm, *g_final_norm_bias;
    int n_adapters;
    struct adapter **adapters; /* retained: configuration */
    struct lora_params *loras; /* [A][L][N_PROJ] */
    float **data;              /* [A] the adapters' floats in adapter.h's order */
    int32_t max_r;
    float dropout;
    struct train_tensor *tensors;
    struct optimizer_state *moments; /* [tensors] */
    int n_tensors;
    struct param_group *groups;
    int n_groups;
    int64_t updates, tokens_since_update, targets_since_update;

    /* one batch; arrays are in `act` and grow with the largest batch so far */
    struct arena act;
    bool measuring; /* the arrays are not allocated; only their bytes are added to act_bytes */
    size_t act_bytes;
    int64_t cap_rows, cap_len; /* capacity of `act` */
    int64_t columns,
        cap_columns; /* columns of a row of logits: V, or CHOICE_PANEL for each choice */
    int64_t call_rows, cap_call_rows; /* rows of all samples of a call; a pass may have fewer */
    int64_t rows, targets, longest;
    int64_t chunk;       /* C: rows that a layer's row-wise parts process at a time */
    bool dropout_active; /* dropout applies in this pass */
    bool derived_stale;  /* parameters changed since bt, mult and norm were computed */
    struct packed_seq *seqs;
    int n_seqs;
    int32_t *tokens_in, *pos; /* [M] */
    int64_t *target_row;      /* [targets] ascending */
    int32_t *target_token, *target_group;
    double *target_nll;
    float *target_weight;                     /* d loss / d nll */
    float *rope_cos, *rope_sin, *rope_neg;    /* [longest][E/2] */
    float *local_cos, *local_sin, *local_neg; /* tables of local layers, if they differ */
    struct activations *acts;                 /* [L + 1]; the last one has only x */
    /* gradients of all rows, shaped as their activations */
    float *dx, *dq, *dk, *dv, *datt;
    /* buffers of a chunk */
    float *xn, *dxn;                               /* [C][D] */
    float *act_buf, *dact, *dgate, *dup;           /* [C][F] */
    float *drop;                                   /* [C][max I] */
    uint16_t *act_tiles, *dgate_tiles, *dup_tiles; /* mlp_tiles: [C][F] */
    uint16_t *drop_tiles;                          /* lora_tiles: [C][max I] inputs after dropout */
    /* the low-rank parts of the next product in tiles */
    struct gemm_low_rank low_rank;
    uint16_t *low_rank_tiles[2];             /* [C][LOW_RANK_MAX] */
    struct low_rank_rows *low_rank_rows;     /* [M] */
    struct low_rank_part *low_rank_parts[2]; /* [M] */
    float *dora_out;        /* [C][max O] a product that DoRA scales, then its dz */
    float *dh;              /* [C][Rmax] */
    float *rstd, *mean;     /* [max(C, M)·H] statistics of the rows under a norm */
    void *in_scratch;       /* gemm_input_scratch of a chunk */
    void *dy_scratch;       /* lora_tiles: the same for dY */
    char *lora_scratch;     /* lora_tiles: [threads][lora_tile_scratch] */
    void *backward_scratch; /* scratch of matrix_mul_backward */
    void *grad_scratch;     /* full mode with tiles: scratch of weight_grad_tiles */
    /* the head's chunk of N rows */
    int64_t head_chunk;     /* N */
    float *hx, *hn, *dhn;   /* [N][D]: residual stream, normed, gradient */
    float *logits;          /* [N][columns], then their gradient */
    float logit_scale;      /* scale of the current loss: 1 over its temperature */
    const int32_t *choices; /* [n_choices] choices of the current loss, or NULL */
    int32_t n_choices;
    double *choice_logp;  /* [targets][n_choices] */
    float *choice_weight; /* the same: d loss / d choice_logp */
    float **att_scratch;  /* [threads] */
};

static inline struct lora_params *trainer_lora(const struct trainer *t, int adapter, int l, int p) {
    return &t->loras[((int64_t)adapter * t->c.n_layers + l) * N_PROJ + p];
}

#define CHOICE_PANEL                                                                               \
    16 /* outputs of the smallest product of the head, one of which is the choice */

/* batch.c: packs samples (those of one adapter together, in the order given) and allocates their
 * memory. */
int batch_pack(struct trainer *t, const struct train_sample *samples, int n, struct error *err);
/* The number of samples of a call that the next pass processes: few with checkpointing, otherwise
 * all; the bits are the same. batch_set_call_rows, which sets the rows of the whole call, must be
 * called first. */
int batch_fit(const struct trainer *t, const struct train_sample *samples, int n);
void batch_free_activations(struct trainer *t); /* frees their memory */
void batch_set_call_rows(struct trainer *t, const struct train_sample *samples, int n);

/* layers.c: t->acts[l].x → t->acts[l + 1].x, and t->dx back through the layer (in place). */
void layer_forward(struct trainer *t, int l);
void layer_backward(struct trainer *t, int l);

/* lora.c. A row_range is rows [r0, r0 + rows) of the batch; y, x, dy and dx begin at its first row.
 */
struct row_range {
    int64_t r0, rows;
};
void lora_prepare(struct trainer *t);                    /* computes bt, and DoRA's multipliers */
void lora_dropout_mask(struct trainer *t, int l, int p); /* samples the mask of all rows */
/* h = scale · A drop(x) of the projections p … p + n - 1, which read the same inputs; n is at most
 * 2. Returns the parts of h B that join the chains of their products in tiles, or NULL. */
const struct gemm_low_rank *lora_down(struct trainer *t, int l, int p, int n, struct row_range s,
                                      const struct gemm_input *x);
/* y += B h of all other parts, times DoRA's multipliers; stores z. With `base_out`, that buffer has
 * the base product, which is not yet added to y: y is the residual stream, which DoRA must not
 * scale. */
void lora_up(struct trainer *t, int l, int p, struct row_range s, float *y, float *base_out,
             const struct gemm_input *x);
/* Whether every part of this projection joins the chain of its product in tiles. */
bool lora_in_chain(const struct trainer *t, int l, int p);
size_t lora_tile_scratch(const struct trainer *t); /* of one thread */
/* DoRA only: adds the magnitudes' gradients and returns the gradient of z; otherwise returns dy. */
const float *dora_backward(struct trainer *t, int l, int p, struct row_range s, const float *dy);
/* dh = scale · Bᵀ dz. Returns the parts A dh of dx that join the chain of the product dy W, if it
 * runs in tiles (`chain`), or NULL. */
const struct gemm_low_rank *lora_backward_down(struct trainer *t, int l, int p, struct row_range s,
                                               const struct gemm_input *dy, bool chain);
/* dx += all other parts. */
void lora_backward_up(struct trainer *t, int l, int p, struct row_range s, float *dx,
                      const struct gemm_input *dy, bool chain);
/* Adds the gradients of A and B. */
void lora_backward_weights(struct trainer *t, int l, int p, struct row_range s,
                           const struct gemm_input *dy, const float *x);

/* attention.c: q, k, v → att; datt → dq, dk, dv. */
bool attention_uses_tiles(const struct trainer *t); /* the kernels of the fast class */
size_t attention_scratch(const struct trainer *t, int64_t longest);
void attention_forward(struct trainer *t, int l);
void attention_backward(struct trainer *t, int l);

/* layer_ops.c: row-wise operations, over the pool. */
void norm_forward(struct trainer *t, float *y, const float *x, const float *g, const float *b,
                  int64_t rows, int64_t width);
/* Backward of y = norm(x), rows of `width`: dx (+)= its gradient; dg and db (may be NULL) += sums
 * over rows, in order. dy is overwritten; dx may be equal to dy unless `add`. A norm with `b` is a
 * LayerNorm, as in norm_forward. */
struct norm_params {
    const float *g, *b;
    float *dg, *db;
};
void norm_backward(struct trainer *t, float *dx, float *dy, const float *x, struct norm_params n,
                   int64_t rows, int64_t width, bool add);
void bias_forward(struct trainer *t, float *y, const float *bias, int64_t rows, int64_t width);
void bias_backward(struct trainer *t, float *db, const float *dy, int64_t rows, int64_t width);
void residual_forward(struct trainer *t, float *y, const float *x, int64_t rows, int64_t width);
void rows_copy(struct trainer *t, float *y, const float *x, int64_t rows, int64_t width);
/* t->act_buf = act(gate) · up, or act(up); and back, from t->dact to t->dgate and t->dup. */
void activation_forward(struct trainer *t, const float *gate, const float *up, int64_t rows);
void activation_backward(struct trainer *t, const float *gate, const float *up, int64_t rows);
/* mlp_tiles: both at once, from the gates and ups stored in `g`. */
void gated_backward(struct trainer *t, const struct gemm_gated *g, int64_t rows);
/* Rotates the heads of all rows of y; `inverse` rotates in the other direction. */
void rope_rotate(struct trainer *t, int l, float *y, int64_t width, bool inverse);
/* Full mode: dw[n][k] += dyᵀ x over the rows. */
void weight_grad_add(struct trainer *t, float *dw, const float *dy, int64_t n, const float *x,
                     int64_t k, int64_t rows);
/* cross_entropy.c: fills t->target_nll; with `backward`, sets t->dx and adds the head's gradients,
 * each target weighted by t->target_weight. */
int fused_cross_entropy(struct trainer *t, bool backward, struct error *err);

/* optimizer.c */
#define MOMENT_BLOCK 256 /* values that share the scales of 8-bit moments */
struct optimizer_state { /* optimizer state of one tensor, in the layout of its rule */
    void *data;
    size_t bytes;
};
size_t optimizer_state_bytes(enum optim o, int64_t n);

#endif
