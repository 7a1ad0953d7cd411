/*
 * backprop: the trainer's state, shared by the files of this folder only.
 *
 * trainer.c: parameters, groups and the order of a pass. batch.c: packs samples and allocates the
 * memory of a pass. layers.c: one layer forward and backward. lora.c: the adapters' part of a
 * layer's projections. vocab.c: the adapters' changes of embedding and head. attention.c: a layer's
 * attention. layer_ops.c: row-wise operations. cross_entropy.c and cross_entropy_tiles.c: the loss.
 * optimizer.c: the update. checkpoint.c: the file. snapshot.c and es.c: see backprop.h.
 *
 * Letters as in model.h (D d_model, H n_heads, K n_kv_heads, E head_dim, F d_ff, V vocab_size, L
 * n_layers). M rows of the packed batch, C rows of a chunk of it, Q = H·E, G = K·E, I and O the
 * inputs and outputs of a projection, R the rank of an adapter and Rmax the largest rank, A in
 * array shapes the number of adapters, N rows of a chunk of the head. A sample has fewer
 * rows than tokens: its last token is only a target. Rows after the last target have no effect, so
 * they are not computed.
 *
 * The forward pass equals the one in serving: the same products over the same (quantised) matrices
 * and the same order of sums, so a row's logits have the bits that the engine computes with f32
 * adapters and a KV cache of the same element type.
 *
 * Invariant of LoRA mode: no value that is computed for an adapter depends on rows of another
 * adapter, nor on the division of its samples over calls, chunks or threads. Each element of its
 * gradients is one chain of fused multiply-adds over the adapter's rows, in the order in which the
 * samples were given.
 */
#ifndef SHOAL_BACKPROP_INTERNAL_H
#define SHOAL_BACKPROP_INTERNAL_H

#include "backprop/backprop.h"
#include "model/model.h"

/* Parameters with a common gradient norm and target count: one adapter, or the whole model. */
struct param_group {
    int64_t updates; /* number of updates: AdamW's t */
    int64_t samples; /* samples since the last update; a part of the key of dropout masks */
    double count;    /* divisor of the gradient's sum: targets, or the loss function's count */
    double nll;      /* sum of the losses since the last update */
    double loss;     /* mean loss of the last update: nll / count */
    int first_tensor, n_tensors; /* range in trainer.tensors */
};

/* Keys or values as in an int8 KV cache, from which the forward pass computes: its products are
 * sums over the integers, multiplied by the scales. */
struct i8_rows {
    int8_t *q;       /* [M][G] */
    uint16_t *scale; /* [K][M] f16: of each kv head's rows */
};

/* Activations of one layer for the backward pass. With gradient checkpointing, the lower layers
 * (all but the upper trainer.n_stored_layers) share all arrays except x. The values in shared
 * arrays are computed again before the backward pass of each of these layers. */
struct activations {
    float *x;                  /* [M][D] residual stream at the layer's input */
    float *q_raw, *k_raw;      /* [M][Q], [M][G] before the q and k norms; NULL without them */
    float *q, *k, *v;          /* [M][Q], [M][G], [M][G]: after RoPE; k and v rounded to kv_elem */
    struct i8_rows k_i8, v_i8; /* kv_elem is i8: the integers of k and v; else NULL */
    float *att;                /* [M][Q] attention's output, before o_proj */
    float *att_stats;          /* [M][H][2] attention_job.stats; NULL unless attention_uses_tiles */
    float *mid;                /* [M][D] residual stream after attention */
    float *gate, *up;          /* [M][F], biases included; gate is NULL without gating */
    uint16_t *gate_tiles,
        *up_tiles;    /* with trainer.mlp_tiles, in place of gate and up: row_range.tile_row */
    float *branch[2]; /* [M][D] outputs of attention and of the MLP before their norms; NULL if the
                         architecture has no such norms */
    float *h[N_PROJ]; /* [M][Rmax] scale · A drop(x); NULL if no adapter changes the projection */
    float *z[N_PROJ]; /* [M][O] the outputs before DoRA's multipliers; NULL without DoRA */
    uint8_t *dropout_mask[N_PROJ]; /* [M][(I + 7) / 8] bits: 1 where kept; NULL without dropout */
};

struct packed_seq { /* rows of one sample */
    int64_t begin, end;
    int64_t active;       /* first row that the adapter changes (train_sample_activation) */
    int64_t first_target; /* index in trainer.target_row */
    int32_t adapter;
    int64_t ordinal; /* number of samples of this adapter before this one since the last update */
    const struct train_sample *sample;
};

/* Arrays of the gradients of a layer's weights; all NULL in LoRA mode. A pointer is also NULL if
 * the layer has no such weight. */
struct layer_grads {
    float *proj[N_PROJ], *bias[N_PROJ];
    float *attn_norm, *attn_norm_bias, *ffn_norm, *ffn_norm_bias, *post_attn_norm, *post_ffn_norm,
        *q_norm, *k_norm;
};

struct lora_params {     /* one adapter's LoRA of one projection */
    float *a, *b, *m;    /* [R][I], [O][R]; DoRA's magnitude [O] or NULL */
    float *ga, *gb, *gm; /* their gradients */
    /* computed by lora_prepare: bt is Bᵀ [R][O]; with DoRA, mult is m / norm [O], and norm is
     * ‖W + scale B A‖ [O] of each output's row */
    float *bt, *mult, *norm;
    int32_t r; /* 0: not targeted */
    float scale;
};

/* One adapter's changes of the embedding or the head. */
struct vocab_params {
    struct vocab_override w;            /* pointers into trainer.adapter_data */
    float *g_full, *g_rows, *g_a, *g_b; /* gradients of full, rows, lora.a, lora.b; NULL without */
};
struct vocab_tables {
    struct vocab_params embed, head;
};

struct trainer {
    const struct model *model;
    struct model_config c;
    const struct kernels *k;
    struct pool *pool;
    bool full;           /* full mode: trains all weights; else LoRA mode */
    bool checkpointing;  /* gradient checkpointing */
    int n_stored_layers; /* with checkpointing: upper layers that keep their activations */
    /* limits of a pass, if trainer_limit_passes has set them; else 0 */
    int64_t pass_rows;
    size_t pass_bytes;
    /* path of all rows: ROWS_EXACT; in the fast class ROWS_KNOWN, or ROWS_TRAINING in full mode */
    enum row_path row_path;
    enum grad_path grad_path; /* arithmetic of dX of the base model, and in full mode of dW */
    bool lora_tiles;          /* LoRA mode: products with A and B run in bf16 tiles */
    enum dtype kv_elem;       /* keys and values are rounded to it */
    bool mlp_tiles; /* gate, up and activation are one product in tiles, and are stored in bf16 */
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
    struct adapter **adapters;  /* [A] retained, for their configurations */
    struct lora_params *loras;  /* [A][L][N_PROJ] */
    float **adapter_data;       /* [A] all parameters of an adapter, in the order of adapter.data */
    struct vocab_tables *vocab; /* [A], or NULL: no adapter changes embedding or head */
    int32_t vocab_max_r, vocab_max_ids; /* largest rank, and number of rows of a head */
    size_t vocab_floats;                /* parameters of tables and rows of all adapters */
    bool embed_trained;                 /* an adapter changes the embedding */
    int32_t max_r;
    float dropout;
    struct train_tensor *tensors;
    struct optimizer_state *moments; /* [tensors] */
    int n_tensors;
    struct param_group *groups;
    int n_groups;
    int64_t updates, tokens_since_update, targets_since_update;
    void (*on_progress)(void *ctx, int64_t tokens); /* may be NULL */
    void *progress_ctx;

    /* One batch. Its arrays are in batch_arena, which grows to the largest batch so far, except the
     * arrays acts and att_scratch themselves, choices, choice_logp and choice_weight. */
    struct arena batch_arena;
    bool measuring; /* no array is allocated; its size is added to act_bytes */
    size_t act_bytes;
    int64_t cap_rows, cap_len;        /* capacity of batch_arena */
    int64_t columns, cap_columns;     /* columns of logits: V, or CHOICE_PANEL for each choice */
    int64_t call_rows, cap_call_rows; /* rows of all samples of a public call, of all its passes */
    int64_t rows, targets,
        longest;         /* the current pass: M, tokens to predict, rows of the longest sample */
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
    float *rope_cos, *rope_sin, *rope_neg;    /* [cap_len][E/2] cos, sin, -sin */
    float *local_cos, *local_sin, *local_neg; /* those of sliding-window layers if they differ */
    struct activations *acts;                 /* [L + 1]; acts[L] has only x */
    /* gradients of all rows, with the shapes of x, q, k, v and att */
    float *dx, *dq, *dk, *dv, *datt;
    /* buffers of a chunk */
    float *xn, *dxn;                               /* [C][D] normed rows, and their gradient; xn has
                                                      at least a row for each thread */
    float *act_buf, *dact, *dgate, *dup;           /* [C][F]; act_buf: the inputs of down_proj */
    float *drop;                                   /* [C][max I] inputs after dropout */
    uint16_t *act_tiles, *dgate_tiles, *dup_tiles; /* mlp_tiles: [C][F] in tiles */
    uint16_t *drop_tiles;                          /* lora_tiles: inputs after dropout in tiles */
    /* the low-rank parts that continue the sums of the next product in tiles (gemm_low_rank) */
    struct gemm_low_rank low_rank;
    uint16_t *low_rank_tiles[2];             /* [C][LOW_RANK_MAX] */
    struct low_rank_rows *low_rank_rows;     /* [M] */
    struct low_rank_part *low_rank_parts[2]; /* [M] */
    float *dora_out;        /* [C][max O] forward: a product that DoRA scales; backward: dz */
    float *dh;              /* [C][Rmax] */
    float *rstd, *mean;     /* [M·H] rows of a norm's input: 1 / standard deviation, and mean */
    void *input_scratch;    /* gemm_input_scratch of a chunk */
    void *dy_scratch;       /* lora_tiles: gemm_input_scratch of a chunk of dY */
    char *lora_scratch;     /* lora_tiles: [threads][lora_tile_scratch] */
    void *backward_scratch; /* scratch of matrix_mul_backward */
    void *grad_scratch;     /* full mode with tiles: scratch of weight_grad_tiles */
    /* the head's chunk of N rows */
    int64_t head_chunk;          /* N */
    float *hx, *hn, *dhn;        /* [N][D]: residual stream, after the final norm, gradient */
    float *logits;               /* [N][columns], overwritten with their gradient; not allocated
                                    with head_scratch, except for choices */
    void *head_scratch;          /* cross_entropy_tiles_scratch bytes, if that computes the loss */
    float *head_low, *head_dlow; /* with `vocab`: [N][max(vocab_max_r, VOCAB_RANK_CHUNK)] */
    float *head_rows_dy;         /* [N][vocab_max_ids] gradients of replaced rows' logits */
    float logit_scale;           /* scale of the current loss: 1 over its temperature */
    const int32_t *choices;      /* [n_choices] choices of the current loss, or NULL */
    int32_t n_choices;
    double *choice_logp;  /* [targets][n_choices] */
    float *choice_weight; /* [targets][n_choices] d loss / d choice_logp */
    float **att_scratch;  /* [threads] */
};

static inline struct lora_params *trainer_lora(const struct trainer *t, int adapter, int l, int p) {
    return &t->loras[((int64_t)adapter * t->c.n_layers + l) * N_PROJ + p];
}

/* A loss over choices computes, for each choice, the logits of the panel of CHOICE_PANEL outputs of
 * the head that contains the choice. */
#define CHOICE_PANEL 16

/* The columns of t->logits that a pass needs. */
int64_t head_columns(const struct trainer *t, const struct loss_fn *loss);

/* batch.c. A public call runs its samples in one or more passes. */
/* Packs the samples of a pass (those of one adapter together, in the order given) and allocates its
 * memory. Returns an error for samples that do not fit the model, or without memory. */
int batch_pack(struct trainer *t, const struct train_sample *samples, int n, struct error *err);
/* The number of samples that the next pass takes of the n samples that remain: few with
 * checkpointing or a limit of LoRA training, otherwise all. Results do not depend on it. */
int batch_fit(const struct trainer *t, const struct train_sample *samples, int n);
void batch_free_activations(struct trainer *t); /* frees batch_arena */
/* trainer_activation_memory, for a model whose weights have that many bytes. */
size_t activation_memory(const struct trainer *t, const struct train_options *o, int64_t longest,
                         size_t weights);
/* Sets t->call_rows from all samples of a call; must precede the first batch_pack of the call. */
void batch_set_call_rows(struct trainer *t, const struct train_sample *samples, int n);

/* layers.c. layer_forward computes t->acts[l + 1].x from t->acts[l].x. layer_backward replaces
 * t->dx, the gradient of t->acts[l + 1].x, by that of t->acts[l].x, and adds the gradients of the
 * weights. */
void layer_forward(struct trainer *t, int l);
void layer_backward(struct trainer *t, int l);

/* lora.c. A row_range is rows [r0, r0 + rows) of the batch; y, x, dy and dx begin at its first row.
 * The low-rank part of an adapter is B h in the forward product W x, and Aᵀ dh in the backward
 * product Wᵀ dy. If the base product runs in tiles, its sums can continue with the low-rank part
 * (gemm_low_rank): such a part is called chained. Other parts are computed and added separately. */
struct row_range {
    int64_t r0, rows;
    int64_t tile_row; /* its first row in arrays of tiles of all rows: each chunk begins a tile */
};
/* If t->derived_stale, computes bt, and with DoRA mult and norm. */
void lora_prepare(struct trainer *t);
void lora_dropout_masks(struct trainer *t, int l); /* draws the masks of all rows */
/* h = scale · A drop(x) of the projections p … p + n - 1, which read the same inputs; n is at most
 * 2. Returns the chained parts, which the caller passes to the base product, or NULL. */
const struct gemm_low_rank *lora_down(struct trainer *t, int l, int p, int n,
                                      struct row_range range, const struct gemm_input *x);
/* Adds the parts that are not chained: y += B h. With DoRA it stores the sum as z and multiplies y
 * by m / norm. If `base_out` is not NULL, it has the base product, and y is the residual stream,
 * which DoRA must not scale: the result is computed in `base_out` and then added to y. */
void lora_up(struct trainer *t, int l, int p, struct row_range range, float *y, float *base_out,
             const struct gemm_input *x);
/* Whether the parts of all adapters in the forward product of projection p are chained. */
bool lora_in_chain(const struct trainer *t, int l, int p);
size_t lora_tile_scratch(const struct trainer *t); /* bytes of scratch for one thread */
/* With DoRA: adds the gradients of the magnitudes and returns dz, the gradient of z, in
 * t->dora_out. Otherwise returns dy. */
const float *dora_backward(struct trainer *t, int l, int p, struct row_range range,
                           const float *dy);
/* dh = scale · Bᵀ dz, with dz as `dy`. `chain`: the product Wᵀ dz runs in tiles; returns its
 * chained parts, or NULL. */
const struct gemm_low_rank *lora_backward_down(struct trainer *t, int l, int p,
                                               struct row_range range, const struct gemm_input *dy,
                                               bool chain);
/* Adds the parts that are not chained to dx. */
void lora_backward_up(struct trainer *t, int l, int p, struct row_range range, float *dx,
                      const struct gemm_input *dy, bool chain);
/* Adds the gradients of A and B. With lora_grads_in_tiles it reads the tiles of dy and x, and packs
 * x if that only has f32 rows. */
bool lora_grads_in_tiles(const struct trainer *t);
void lora_backward_weights(struct trainer *t, int l, int p, struct row_range range,
                           const struct gemm_input *dy, const struct gemm_input *x);

/* vocab.c: needs t->vocab, except vocab_base_head_needed. vocab_embed_row sets x [D] to the
 * embedding of row `row`, with its adapter's changes. */
void vocab_embed_row(const struct trainer *t, int64_t row, float *x);
void vocab_embed_backward(struct trainer *t); /* adds gradients from t->dx */
/* Whether the head of the base is a part of the logits of targets [first, first + n). */
bool vocab_base_head_needed(const struct trainer *t, int64_t first, int64_t n);
/* For the head's chunk of targets [first, first + n): changes the base's logits; and, from the
 * gradients of the logits, adds the gradients of the adapters' parameters and sets t->dhn. The
 * latter changes t->logits. */
void vocab_head_forward(struct trainer *t, int64_t first, int64_t n);
void vocab_head_backward(struct trainer *t, int64_t first, int64_t n);
/* Adds the head's part of the gradients of tied rows to that of the embedding. */
void vocab_grads_join(struct trainer *t);

/* attention.c. kv_round rounds k and v of layer l to t->kv_elem. attention_forward computes att
 * from q, k and v, attention_backward computes dq, dk and dv from datt. */
void kv_round(struct trainer *t, int l);
bool attention_uses_tiles(const struct trainer *t); /* whether kernels.attention computes it */
size_t attention_scratch(const struct trainer *t, int64_t longest); /* bytes for one thread */
void attention_forward(struct trainer *t, int l);
void attention_backward(struct trainer *t, int l);

/* checkpoint.c: the type of keys and values of the run that saved the file. The file's checksum is
 * not verified; trainer_load does that. */
int checkpoint_kv_dtype(const char *path, enum dtype *out, struct error *err);

/* layer_ops.c: row-wise operations, over the pool. */
/* y = norm(x) of `rows` rows of `width`: a LayerNorm with gain g and bias b, or an RMS norm if b is
 * NULL. */
void norm_forward(struct trainer *t, float *y, const float *x, const float *g, const float *b,
                  int64_t rows, int64_t width);
/* norm(x) in tiles only, in t->input_scratch. */
struct gemm_input norm_tiles_forward(struct trainer *t, const float *x, const float *g,
                                     const float *b, int64_t rows, int64_t width);
/* Backward of y = norm(x): dx (+)= the gradient of x. Unless they are NULL, dg and db += the
 * gradients of g and b, sums over rows in order. dy is overwritten; dx may be equal to dy unless
 * `add`. */
struct norm_params {
    const float *g, *b;
    float *dg, *db;
};
void norm_backward(struct trainer *t, float *dx, float *dy, const float *x, struct norm_params n,
                   int64_t rows, int64_t width, bool add);
/* y[row] += bias, and db += Σ dy[row]; nothing if bias or db is NULL. */
void bias_forward(struct trainer *t, float *y, const float *bias, int64_t rows, int64_t width);
void bias_backward(struct trainer *t, float *db, const float *dy, int64_t rows, int64_t width);
void residual_forward(struct trainer *t, float *y, const float *x, int64_t rows,
                      int64_t width); /* y += x */
void rows_copy(struct trainer *t, float *y, const float *x, int64_t rows, int64_t width);
/* t->act_buf = act(gate) · up, or act(up) if gate is NULL. The backward function computes t->dgate
 * and t->dup from t->dact. */
void activation_forward(struct trainer *t, const float *gate, const float *up, int64_t rows);
void activation_backward(struct trainer *t, const float *gate, const float *up, int64_t rows);
/* mlp_tiles: activation_forward and activation_backward in one function, from g->gate_out and
 * g->up_out to t->act_tiles, t->dgate_tiles and t->dup_tiles, and to f32 too if `f32`. */
void gated_backward(struct trainer *t, const struct gemm_gated *g, int64_t rows, bool f32);
/* Applies the rotary embedding to the heads of all rows of y; `inverse` negates the angles. */
void rope_rotate(struct trainer *t, int l, float *y, int64_t width, bool inverse);
/* Full mode: dw[n][k] += dyᵀ x, summed over the rows. */
void weight_grad_add(struct trainer *t, float *dw, const float *dy, int64_t n, const float *x,
                     int64_t k, int64_t rows);
/* cross_entropy.c: fills t->target_nll. With `backward`, also sets t->dx and adds the gradients of
 * the head and the final norm; each target is weighted by t->target_weight, or by t->choice_weight.
 * ERR_NUMERIC if a loss is not finite. */
int fused_cross_entropy(struct trainer *t, bool backward, struct error *err);
/* logits [rows][ld] = outputs [n0, n1) of the head; n0 is a multiple of 16. */
void head_logits(const struct trainer *t, const struct gemm_input *in, int64_t n0, int64_t n1,
                 float *logits, int64_t ld);
/* cross_entropy_tiles.c: losses of targets first, first + 1, … and, in the backward pass, dhn. `in`
 * has the chunk's rows of hn in tiles. It needs t->head_scratch, which exists if
 * cross_entropy_uses_tiles. cross_entropy_tiles_rows is then head_chunk, unless a pass has fewer
 * rows. */
bool cross_entropy_uses_tiles(const struct trainer *t);
int64_t cross_entropy_tiles_rows(int64_t d_model);
size_t cross_entropy_tiles_scratch(const struct trainer *t);
void cross_entropy_tiles(struct trainer *t, int64_t first, const struct gemm_input *in,
                         bool backward);

/* optimizer.c */
#define MOMENT_BLOCK 256 /* values that share the scales of 8-bit moments */
struct optimizer_state { /* the state of one tensor; trainer.optim determines its layout */
    void *data;
    size_t bytes;
};
size_t optimizer_state_bytes(enum optim o, int64_t n); /* for a tensor of n values */

#endif
