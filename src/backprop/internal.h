/*
 * backprop: the trainer's state, shared by the files of this folder only.
 *
 * trainer.c owns the state (parameters, groups) and has the public functions, batch.c packs samples
 * and lays out the memory of a pass, layers.c runs one layer forward and backward, lora.c the
 * adapters' part of its projections, attention.c its attention, layer_ops.c the row-wise
 * operations, cross_entropy.c the loss, optimizer.c the update, checkpoint.c the file.
 *
 * Letters as in model.h; M rows of the packed batch, C rows of a chunk of it, Q = H·E, G = K·E, I
 * and O a projection's inputs and outputs, R an adapter's rank and Rmax the largest, A in array
 * shapes the number of adapters, N rows of a chunk of the head. A sample of n tokens has at most n
 * - 1 rows: the last token is only a target, and rows after the last target have no effect, so they
 * are not computed.
 *
 * The forward pass equals the one in serving: the same products over the same (quantised) matrices
 * and the same order of sums, so a row's logits have the bits that the engine computes with f32
 * adapters and an f32 KV cache.
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
    int64_t updates; /* number of updates: AdamW's t */
    int64_t samples; /* samples since the last update; part of the dropout's random key */
    double count;    /* divisor of the gradient's sum: targets, or the loss function's count */
    double nll;      /* sum since the last update */
    double loss;     /* loss of the last update */
    int first_tensor, n_tensors; /* range in trainer.tensors */
};

/* Activations of one layer for the backward pass. With gradient checkpointing the lower layers
 * share one set of arrays, except x, and the values in it are recomputed before the backward pass
 * of each of these layers. */
struct activations {
    float *x;             /* [M][D] residual stream at the layer's input */
    float *q_raw, *k_raw; /* [M][Q], [M][G] before the q and k norms; NULL without them */
    float *q, *k, *v;     /* [M][Q], [M][G], [M][G]: after RoPE */
    float *att;           /* [M][Q] attention's output, before o_proj */
    float *att_stats;     /* [M][H][2] attention_job.stats; NULL unless attention_uses_tiles */
    float *mid;           /* [M][D] residual stream after attention */
    float *gate, *up;     /* [M][F], biases included; gate is NULL without gating */
    uint16_t *gate_tiles,
        *up_tiles;    /* with trainer.mlp_tiles, in place of gate and up: bf16 tiles */
    float *branch[2]; /* [M][D] attention's and the MLP's outputs before their norms; NULL without
                         these */
    float *h[N_PROJ]; /* [M][Rmax] scale · A x; NULL without adapters */
    float *z[N_PROJ]; /* [M][O] before DoRA's multipliers; NULL without DoRA */
    uint8_t *dropout_mask[N_PROJ]; /* [M][(I + 7) / 8] bits: 1 where kept; NULL without dropout */
};

struct packed_seq { /* rows of one sample */
    int64_t begin, end;
    int64_t first_target; /* index in trainer.target_row */
    int32_t adapter;
    int64_t ordinal; /* the number of this adapter's samples before it since the last update */
    const struct train_sample *sample;
};

/* Destinations of the gradients of a layer's weights; all NULL when it is frozen. */
struct layer_grads {
    float *proj[N_PROJ], *bias[N_PROJ];
    float *attn_norm, *attn_norm_bias, *ffn_norm, *ffn_norm_bias, *post_attn_norm, *post_ffn_norm,
        *q_norm, *k_norm;
};

struct lora_params {     /* one adapter's LoRA of one projection */
    float *a, *b, *m;    /* [R][I], [O][R]; DoRA's magnitude [O] or NULL */
    float *ga, *gb, *gm; /* their gradients */
    /* recomputed when derived_stale: Bᵀ [R][O]; with DoRA m / norm [O] and ‖W + scale B A‖ [O] */
    float *bt, *mult, *norm;
    int32_t r; /* 0: not targeted */
    float scale;
};

struct trainer {
    const struct model *model;
    struct model_config c;
    const struct kernels *k;
    struct pool *pool;
    bool full;                /* full mode: trains all weights; else LoRA mode */
    bool checkpointing;       /* gradient checkpointing */
    int n_stored_layers;      /* with checkpointing: upper layers that keep their activations */
    enum row_path row_path;   /* of all rows: ROWS_EXACT, or in the fast class one of the others */
    enum grad_path grad_path; /* of dX through the base's products, and of dW */
    bool lora_tiles; /* LoRA mode: products with A and B run in bf16 tiles, dA and dB in f32 */
    bool mlp_tiles;  /* gate, up and activation are one product in tiles, and are stored in bf16 */
    char fingerprint[HASH_LEN]; /* hash of options, configuration and a sample of the base */
    uint64_t seed;
    enum optim optim;
    float beta1, beta2, eps, weight_decay, momentum, max_grad_norm;

    /* parameters */
    struct arena arena;         /* tensors' names and arrays */
    struct layer_grads *layers; /* [L] */
    float *g_embed, *g_head;    /* [V][D], full mode; the same when tied */
    float *g_pos;               /* [positions][D] */
    float *g_final_norm, *g_final_norm_bias;
    int n_adapters;
    struct adapter **adapters; /* retained: configuration */
    struct lora_params *loras; /* [A][L][N_PROJ] */
    float **adapter_data;      /* [A] all parameters of an adapter, in adapter.h's order */
    int32_t max_r;
    float dropout;
    struct train_tensor *tensors;
    struct optimizer_state *moments; /* [tensors] */
    int n_tensors;
    struct param_group *groups;
    int n_groups;
    int64_t updates, tokens_since_update, targets_since_update;

    /* one batch: all arrays below are in batch_arena, which grows to the largest batch so far */
    struct arena batch_arena;
    bool measuring; /* no array is allocated; its size is added to act_bytes */
    size_t act_bytes;
    int64_t cap_rows, cap_len;        /* capacity of batch_arena */
    int64_t columns, cap_columns;     /* of a row of logits: V, or CHOICE_PANEL for each choice */
    int64_t call_rows, cap_call_rows; /* rows of all samples of a public call, one or more passes */
    int64_t rows, targets,
        longest;         /* of the pass: M, tokens to predict, rows of the longest sample */
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
    float *rope_cos, *rope_sin, *rope_neg;    /* [longest][E/2] cos, sin, -sin */
    float *local_cos, *local_sin, *local_neg; /* the same for sliding layers, if theirs differ */
    struct activations *acts;                 /* [L + 1]; the last one has only x */
    /* gradients of all rows, with the shapes of x, q, k, v and att */
    float *dx, *dq, *dk, *dv, *datt;
    /* buffers of a chunk */
    float *xn, *dxn;                               /* [C][D] after the norm */
    float *act_buf, *dact, *dgate, *dup;           /* [C][F]; act_buf: the inputs of down_proj */
    float *drop;                                   /* [C][max I] inputs after dropout */
    uint16_t *act_tiles, *dgate_tiles, *dup_tiles; /* mlp_tiles: [C][F] */
    uint16_t *drop_tiles;                          /* lora_tiles: the same in tiles */
    /* the low-rank parts that continue the sums of the next product in tiles (gemm_low_rank) */
    struct gemm_low_rank low_rank;
    uint16_t *low_rank_tiles[2];             /* [C][LOW_RANK_MAX] */
    struct low_rank_rows *low_rank_rows;     /* [M] */
    struct low_rank_part *low_rank_parts[2]; /* [M] */
    float *dora_out;        /* [C][max O] forward: a product that DoRA scales; backward: dz */
    float *dh;              /* [C][Rmax] */
    float *rstd, *mean;     /* [M·H] of the rows that a norm normalizes: 1 / deviation, mean */
    void *input_scratch;    /* gemm_input_scratch of a chunk */
    void *dy_scratch;       /* lora_tiles: the same for dY */
    char *lora_scratch;     /* lora_tiles: [threads][lora_tile_scratch] */
    void *backward_scratch; /* scratch of matrix_mul_backward */
    void *grad_scratch;     /* full mode with tiles: scratch of weight_grad_tiles */
    /* the head's chunk of N rows */
    int64_t head_chunk;     /* N */
    float *hx, *hn, *dhn;   /* [N][D]: residual stream, normed, gradient */
    float *logits;          /* [N][columns], overwritten with their gradient */
    float logit_scale;      /* scale of the current loss: 1 over its temperature */
    const int32_t *choices; /* [n_choices] choices of the current loss, or NULL */
    int32_t n_choices;
    double *choice_logp;  /* [targets][n_choices] */
    float *choice_weight; /* [targets][n_choices] d loss / d choice_logp */
    float **att_scratch;  /* [threads] */
};

static inline struct lora_params *trainer_lora(const struct trainer *t, int adapter, int l, int p) {
    return &t->loras[((int64_t)adapter * t->c.n_layers + l) * N_PROJ + p];
}

/* Logits are computed in panels of so many outputs of the head: for a loss over choices, one panel
 * for each choice. */
#define CHOICE_PANEL 16

/* batch.c: packs samples (those of one adapter together, in the order given) and allocates their
 * memory. */
int batch_pack(struct trainer *t, const struct train_sample *samples, int n, struct error *err);
/* The number of samples of a call that the next pass processes: few with checkpointing, otherwise
 * all; results do not depend on it. batch_set_call_rows, which sets the rows of the whole call,
 * must be called first. */
int batch_fit(const struct trainer *t, const struct train_sample *samples, int n);
void batch_free_activations(struct trainer *t); /* frees batch_arena */
void batch_set_call_rows(struct trainer *t, const struct train_sample *samples, int n);

/* layers.c: t->acts[l].x → t->acts[l + 1].x, and t->dx back through the layer (in place). */
void layer_forward(struct trainer *t, int l);
void layer_backward(struct trainer *t, int l);

/* lora.c. A row_range is rows [r0, r0 + rows) of the batch; y, x, dy and dx begin at its first row.
 * B h is the low-rank part of an adapter in the product W x, and Aᵀ dh that in Wᵀ dy. If the base
 * product runs in tiles, its sums may continue with the low-rank part (gemm_low_rank): a chained
 * part. The others are computed and added separately. */
struct row_range {
    int64_t r0, rows;
};
void lora_prepare(struct trainer *t);                    /* computes bt, and DoRA's multipliers */
void lora_dropout_mask(struct trainer *t, int l, int p); /* samples the mask of all rows */
/* h = scale · A drop(x) of the projections p … p + n - 1, which read the same inputs; n is at most
 * 2. Returns the chained parts, which the caller passes to the base product, or NULL. */
const struct gemm_low_rank *lora_down(struct trainer *t, int l, int p, int n,
                                      struct row_range range, const struct gemm_input *x);
/* Adds the parts that are not chained: y += B h. With DoRA it stores z = y and multiplies y by m /
 * norm. If `base_out` is not NULL, y is the residual stream, which DoRA must not scale: `base_out`
 * has the base product, and the result is computed there and then added to y. */
void lora_up(struct trainer *t, int l, int p, struct row_range range, float *y, float *base_out,
             const struct gemm_input *x);
/* Whether the parts of all adapters in this projection's forward product are chained. */
bool lora_in_chain(const struct trainer *t, int l, int p);
size_t lora_tile_scratch(const struct trainer *t); /* of one thread */
/* DoRA only: adds the magnitudes' gradients and returns the gradient of z; otherwise returns dy. */
const float *dora_backward(struct trainer *t, int l, int p, struct row_range range,
                           const float *dy);
/* dh = scale · Bᵀ dz. `chain`: the product Wᵀ dz runs in tiles. Returns its chained parts, or NULL.
 */
const struct gemm_low_rank *lora_backward_down(struct trainer *t, int l, int p,
                                               struct row_range range, const struct gemm_input *dy,
                                               bool chain);
/* Adds the parts that are not chained to dx. */
void lora_backward_up(struct trainer *t, int l, int p, struct row_range range, float *dx,
                      const struct gemm_input *dy, bool chain);
/* Adds the gradients of A and B. */
void lora_backward_weights(struct trainer *t, int l, int p, struct row_range range,
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
/* mlp_tiles: activation_forward and activation_backward at once, from the gates and ups in `g`. */
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
struct optimizer_state { /* state of one tensor, in the layout of trainer.optim */
    void *data;
    size_t bytes;
};
size_t optimizer_state_bytes(enum optim o, int64_t n);

#endif
