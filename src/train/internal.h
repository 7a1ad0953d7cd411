/*
 * train/internal: the trainer's state, shared by the files of this folder and by nobody else.
 *
 * trainer.c owns the state (parameters, groups, checks, the public verbs), layers.c runs one layer
 * forward and backward, attention.c its attention, head.c the loss, optimizer.c the update,
 * checkpoint.c the file.
 *
 * Letters as in model.h; M rows of the packed batch, Q = H·E, G = K·E, I and O a projection's
 * inputs and outputs. A sample of n tokens gives at most n - 1 rows: the last token is only ever a
 * target, and rows after the last target change nothing, so they are not computed at all.
 *
 * Invariant of LoRA mode: no number in an adapter's path depends on rows of another adapter, nor on
 * how its own samples are spread over calls. Its gradient is the ordered sum, over its samples, of
 * per-sample sums by the 16-lane rule.
 */
#ifndef SHOAL_TRAIN_INTERNAL_H
#define SHOAL_TRAIN_INTERNAL_H

#include "train/train.h"

/* Parameters that are clipped and counted together: one adapter, or the whole model. */
struct group {
    int64_t updates;          /* AdamW's t */
    int64_t targets, samples; /* since the last update; `samples` keys the dropout */
    double nll;               /* since the last update */
    double loss;              /* of the last update */
    int first, n_tensors;     /* its range of trainer.tensors */
};

/* What the backward pass needs of one layer. */
struct activations {
    float *x;              /* [M][D] residual stream at the layer's entrance */
    float *q_raw, *k_raw;  /* [M][Q], [M][G] before the heads' norm; NULL without qk_norm */
    float *q, *k, *v;      /* [M][Q], [M][G], [M][G]: after RoPE */
    float *att;            /* [M][Q] */
    float *mid;            /* [M][D] residual stream after attention */
    float *gate, *up;      /* [M][F] */
    float *h[N_PROJ];      /* [M][Rmax] scale · A x; NULL without adapters */
    uint8_t *keep[N_PROJ]; /* [M][(I + 7) / 8] bits: what dropout kept; NULL without dropout */
};

struct span { /* rows of one sample */
    int64_t begin, end;
    int32_t adapter;
    int64_t ordinal; /* the sample's number within its adapter since the last update */
    const struct sample *sample;
};

struct weight {      /* a base matrix in f32 */
    const float *w;  /* [O][I] */
    const float *wt; /* [I][O]; NULL in full mode: transposed into scratch when needed */
    float *g;        /* [O][I]; NULL when frozen */
    int64_t n, k;
};

struct layer_params {
    struct weight proj[N_PROJ];
    const float *attn_norm, *ffn_norm, *q_norm, *k_norm;
    float *g_attn_norm, *g_ffn_norm, *g_q_norm, *g_k_norm; /* NULL when frozen */
};

struct lora_params { /* one adapter's part of one projection */
    float *a, *b;    /* [R][I], [O][R] */
    float *ga, *gb;
    int32_t r; /* 0: not targeted */
    float scale;
};

struct trainer {
    const struct model *model;
    struct model_config c;
    const struct kernels *k;
    struct pool *pool;
    bool full;
    char fingerprint[HASH_LEN]; /* of everything besides the state that an update depends on */
    uint64_t seed;
    float beta1, beta2, eps, decay, max_grad_norm;

    /* parameters */
    struct arena arena;          /* tensors' names and arrays, frozen copies */
    struct layer_params *layers; /* [L] */
    struct weight head;          /* [V][D] */
    float *g_embed;              /* [V][D], full mode; == head.g when tied */
    const float *final_norm;
    float *g_final_norm;
    int n_adapters;
    struct adapter **adapters; /* retained: configuration */
    struct lora_params *loras; /* [A][L][N_PROJ] */
    float **data;              /* [A] the adapters' floats in adapter.h's order */
    int32_t max_r;
    float dropout;
    struct train_tensor *tensors;
    float **m, **v; /* [tensors] AdamW's moments */
    int n_tensors;
    struct group *groups;
    int n_groups;
    int64_t updates, tokens; /* `tokens` since the last update */

    /* one batch; arrays live in `act` and grow with the largest batch seen */
    struct arena act;
    bool measuring;                      /* the layout is only counted, into act_bytes */
    size_t act_bytes;
    int64_t cap_rows, cap_len;           /* what `act` was laid out for */
    int64_t rows, targets, longest, ldt; /* ldt: row stride of the [·][M] transposes */
    bool dropping;                       /* dropout applies in this pass */
    struct span *spans;
    int n_spans;
    int32_t *tokens_in, *pos; /* [M] */
    int64_t *target_row;      /* [targets] ascending */
    int32_t *target_token, *target_group;
    double *target_nll;
    float *rope_cos, *rope_sin, *rope_neg; /* [longest][E/2] */
    struct activations *acts;              /* [L + 1]; of the last only x is used */
    float *xn, *act_buf, *drop;            /* [M][D], [M][F], [M][max I] */
    /* gradients, shaped as their activations */
    float *dx, *dxn, *dq, *dk, *dv, *datt, *dgate, *dup, *dact;
    float *dh;                 /* [M][Rmax] */
    float *rstd;               /* [M·H] 1 / root mean square of the rows under a norm */
    float *tx, *ty, *th, *tdh; /* transposes [max I][ldt], [max O][ldt], [Rmax][ldt] twice */
    float *wt;                 /* a transposed weight, the largest; and adapters' */
    /* the head's chunk of C rows */
    int64_t head_chunk;     /* C */
    float *hx, *hn, *dhn;   /* [C][D]: residual stream, normed, gradient */
    float *logits;          /* [C][V], then their gradient */
    float *hx_t, *logits_t; /* [D][C], [V][C]; full mode */
    float *head_wt;         /* [D][V]; full mode */
    float **att_scratch;    /* [threads] */
};

/* layers.c: t->acts[l].x → t->acts[l + 1].x, and t->dx back through the layer (in place). */
void layer_forward(struct trainer *t, int l);
void layer_backward(struct trainer *t, int l);
/* dx (+)= gradient through y = rmsnorm(x) * g, rows of `width`; dg (may be NULL) += over rows, in
 * order. dy is overwritten; dx may be dy itself when it is not added to. */
void rmsnorm_backward(struct trainer *t, float *dx, float *dy, const float *x, const float *g,
                      float *dg, int64_t rows, int64_t width, bool add);
void rmsnorm_rows(struct trainer *t, float *y, const float *x, const float *g, int64_t rows,
                  int64_t width);
const float *weight_transposed(struct trainer *t, const struct weight *w, float *scratch);

/* attention.c: q, k, v → att; datt → dq, dk, dv. */
size_t attention_scratch(const struct model_config *c, int64_t longest);
void attention_forward(struct trainer *t, const struct activations *a);
void attention_backward(struct trainer *t, const struct activations *a);

/* head.c: fills t->target_nll; with `backward`, sets t->dx and adds the head's gradients. */
int head_loss(struct trainer *t, bool backward, struct error *err);

/* True when every value is a number: neither NaN nor Inf. */
bool all_finite(const float *x, int64_t n);

#endif
