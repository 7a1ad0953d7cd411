/*
 * batch: packs samples end to end, and owns the memory of one pass over them.
 *
 * Samples of one adapter are adjacent, in the order given; attention is block-diagonal, so there is
 * no padding. Memory grows to the largest batch so far and is then reused. The size of a pass is
 * counted first and allocated at once, so a batch too large for the machine is an error and does
 * not end the program. Plans use the same count without a trainer's memory (trainer_bytes).
 *
 * With gradient checkpointing, the limit is the size of one pass over all samples in which only the
 * last layer keeps its activations. Passes over few samples leave most of that memory free; as many
 * of the upper layers as fit into it then keep their activations.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 512 /* rows per chunk in a layer's row-wise parts; a multiple of 32 */

static void *act_take(struct trainer *t, size_t bytes) {
    if (!t->measuring) return arena_alloc(&t->act, bytes);
    t->act_bytes += (MAX(bytes, 1) + 63) / 64 * 64;
    return NULL;
}

static float *floats(struct trainer *t, int64_t n) {
    return act_take(t, (size_t)n * sizeof(float));
}

static size_t tiles_bytes(int64_t rows, int64_t width) {
    return (size_t)((rows + 15) / 16 * 16 * ((width + 31) / 32 * 32)) * sizeof(uint16_t);
}

/* The largest adapter part of this projection among the trainer's adapters (with checkpointing: in
 * any layer): 0 nothing, 1 a low-rank part, 2 DoRA. */
static int projection_adapted(const struct trainer *t, int l, int p) {
    int found = 0;
    for (int i = 0; i < t->n_adapters; i++) {
        const struct adapter_config *c = &t->adapters[i]->config;
        for (int at = 0; at < t->c.n_layers; at++)
            if ((at == l || t->checkpointing) && adapter_module_at(c, at, (enum proj)p).r)
                found = MAX(found, c->dora ? 2 : 1);
    }
    return found;
}

/* Allocates all activations of a layer except x. */
static void layer_lay(struct trainer *t, int l, struct activations *a) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim;
    a->q = floats(t, m * q);
    a->k = floats(t, m * g);
    a->v = floats(t, m * g);
    if (c->arch->qk_norm) {
        a->q_raw = floats(t, m * q);
        a->k_raw = floats(t, m * g);
    }
    a->att = floats(t, m * q);
    if (attention_uses_tiles(t)) a->att_stats = floats(t, m * 2 * c->n_heads);
    a->mid = floats(t, m * c->d_model);
    if (t->mlp_tiles) {
        a->gate_tiles = act_take(t, tiles_bytes(m, c->d_ff));
        a->up_tiles = act_take(t, tiles_bytes(m, c->d_ff));
    } else {
        if (!c->arch->ungated) a->gate = floats(t, m * c->d_ff);
        a->up = floats(t, m * c->d_ff);
    }
    for (int i = 0; i < 2 && c->arch->post_norms; i++) a->branch[i] = floats(t, m * c->d_model);
    for (int p = 0; p < N_PROJ; p++) {
        int adapted = projection_adapted(t, l, p);
        if (!adapted) continue;
        a->h[p] = floats(t, m * t->max_r);
        if (adapted == 2) a->z[p] = floats(t, m * proj_out(c, (enum proj)p));
        if (t->dropout > 0)
            a->keep[p] = act_take(t, (size_t)(m * ((proj_in(c, (enum proj)p) + 7) / 8)));
    }
}

/* With checkpointing, all layers below the kept ones share one set of activations. */
static void activations_lay(struct trainer *t) {
    struct activations shared = {0};
    for (int l = 0; l <= t->c.n_layers; l++) {
        struct activations *a = &t->acts[l];
        *a = (struct activations){.x = floats(t, t->cap_rows * t->c.d_model)};
        if (l == t->c.n_layers) break;
        if (!t->checkpointing || l >= t->c.n_layers - t->n_full_layers) {
            layer_lay(t, l, a);
            continue;
        }
        if (l == 0) layer_lay(t, 0, &shared);
        float *x = a->x;
        *a = shared;
        a->x = x;
    }
}

static void gradients_lay(struct trainer *t, int64_t wide) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim, d = c->d_model, n = t->chunk;
    t->dx = floats(t, m * d);
    t->dq = floats(t, m * q);
    t->dk = floats(t, m * g);
    t->dv = floats(t, m * g);
    t->datt = floats(t, m * q);
    t->rstd = floats(t, m * c->n_heads);
    t->mean = floats(t, m * c->n_heads);
    t->xn = floats(t, n * d);
    t->dxn = floats(t, n * d);
    t->act_buf = floats(t, n * c->d_ff);
    t->dact = floats(t, n * c->d_ff);
    t->dgate = floats(t, n * c->d_ff);
    t->dup = floats(t, n * c->d_ff);
    if (t->mlp_tiles) {
        t->act_tiles = act_take(t, tiles_bytes(n, c->d_ff));
        t->dgate_tiles = act_take(t, tiles_bytes(n, c->d_ff));
        t->dup_tiles = act_take(t, tiles_bytes(n, c->d_ff));
    }
    if (t->full) return;
    t->dh = floats(t, n * t->max_r);
    if (t->dropout > 0) t->drop = floats(t, n * wide);
    for (int i = 0; i < t->n_adapters; i++)
        if (t->adapters[i]->config.dora && !t->dora_out) t->dora_out = floats(t, n * wide);
}

static void head_lay(struct trainer *t) {
    int64_t n = t->head_chunk, d = t->c.d_model;
    t->hx = floats(t, n * d);
    t->hn = floats(t, n * d);
    t->dhn = floats(t, n * d);
    t->logits = floats(t, n * t->cap_columns);
}

static void rope_lay(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    if (t->c.arch->learned_pos) return;
    t->rope_cos = floats(t, n);
    t->rope_sin = floats(t, n);
    t->rope_neg = floats(t, n);
    if (t->c.rope_local_theta <= 0.0f) return;
    t->local_cos = floats(t, n);
    t->local_sin = floats(t, n);
    t->local_neg = floats(t, n);
}

static void rope_fill(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    if (t->rope_cos) rope_table(&t->c, (int32_t)t->cap_len, t->rope_cos, t->rope_sin);
    if (t->local_cos) rope_table_local(&t->c, (int32_t)t->cap_len, t->local_cos, t->local_sin);
    for (int64_t i = 0; t->rope_cos && i < n; i++) t->rope_neg[i] = -t->rope_sin[i];
    for (int64_t i = 0; t->local_cos && i < n; i++) t->local_neg[i] = -t->local_sin[i];
}

static void batch_lay(struct trainer *t) {
    int64_t wide = t->c.d_model;
    for (int p = 0; p < N_PROJ; p++)
        wide = MAX(wide, MAX(proj_in(&t->c, (enum proj)p), proj_out(&t->c, (enum proj)p)));
    t->chunk = MIN(CHUNK, t->cap_rows);
    /* about 16 MB of logits at a time */
    t->head_chunk = MAX(16, MIN(1024, ((int64_t)1 << 22) / t->c.vocab_size / 16 * 16));
    t->dora_out = NULL;
    activations_lay(t);
    gradients_lay(t, wide);
    head_lay(t);
    rope_lay(t);
    t->in_scratch = act_take(t, gemm_input_scratch(MAX(t->chunk, t->head_chunk), wide));
    t->back_scratch =
        act_take(t, matrix_mul_backward_scratch(MAX(wide, t->cap_columns), pool_size(t->pool)));
    if (t->full && t->grad_path == GRAD_TILES)
        t->grad_scratch = act_take(t, weight_grad_scratch(MAX(t->chunk, t->head_chunk), wide));
    if (t->lora_tiles) {
        t->dy_scratch = act_take(t, gemm_input_scratch(t->chunk, wide));
        if (t->dropout > 0) t->drop_tiles = act_take(t, tiles_bytes(t->chunk, wide));
        for (int i = 0; i < 2; i++) {
            t->low_tiles[i] = act_take(t, tiles_bytes(t->chunk, LOW_RANK_MAX));
            t->low_parts[i] = act_take(t, (size_t)t->cap_rows * sizeof *t->low_parts[i]);
        }
        t->low_rows = act_take(t, (size_t)t->cap_rows * sizeof *t->low_rows);
        t->t_scratch = act_take(t, (size_t)pool_size(t->pool) * lora_tile_scratch(t));
    }
    t->seqs = act_take(t, (size_t)t->cap_rows * sizeof *t->seqs);
    t->tokens_in = act_take(t, (size_t)t->cap_rows * sizeof *t->tokens_in);
    t->pos = act_take(t, (size_t)t->cap_rows * sizeof *t->pos);
    t->target_row = act_take(t, (size_t)t->cap_rows * sizeof *t->target_row);
    t->target_token = act_take(t, (size_t)t->cap_rows * sizeof *t->target_token);
    t->target_group = act_take(t, (size_t)t->cap_rows * sizeof *t->target_group);
    t->target_nll = act_take(t, (size_t)t->cap_rows * sizeof *t->target_nll);
    t->target_weight = act_take(t, (size_t)t->cap_rows * sizeof *t->target_weight);
    for (int i = 0; i < pool_size(t->pool); i++)
        t->att_scratch[i] = act_take(t, attention_scratch(t, t->cap_len));
}

static size_t batch_bytes(struct trainer *t) {
    t->act_bytes = 0;
    t->measuring = true;
    batch_lay(t);
    t->measuring = false;
    return t->act_bytes;
}

/* Keeps as many layers as fit into the memory of one pass over all rows. */
static void choose_checkpointed_layers(struct trainer *t) {
    int64_t rows = t->cap_rows;
    t->n_full_layers = 0;
    if (!t->checkpointing || t->cap_whole <= rows) return;
    t->cap_rows = t->cap_whole;
    size_t room = batch_bytes(t);
    t->cap_rows = rows;
    size_t least = batch_bytes(t);
    t->n_full_layers = 1;
    size_t each = batch_bytes(t) - least;
    t->n_full_layers = (int)MIN((room - least) / each, (size_t)t->c.n_layers - 1);
}

/* Rounds up with a margin, so that a slightly larger batch needs no new layout. */
static int64_t rounded(int64_t rows) {
    int64_t step = rows < 128 ? 16 : 128;
    return (rows / step + 1) * step;
}

static void caps_raise(struct trainer *t, int64_t rows, int64_t longest) {
    t->cap_rows = MAX(t->cap_rows, rounded(rows));
    t->cap_columns = MAX(t->cap_columns, t->columns);
    t->cap_len = MAX(t->cap_len, (longest / 64 + 1) * 64);
    t->cap_whole = MAX(t->cap_whole, rounded(t->total_rows));
}

size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest) {
    struct trainer s = *t; // a copy, laid out without memory
    size_t bytes = 0;
    s.acts = xcalloc((size_t)t->c.n_layers + 1, sizeof *s.acts);
    s.att_scratch = xcalloc((size_t)pool_size(t->pool), sizeof *s.att_scratch);
    caps_raise(&s, rows, longest);
    s.n_full_layers = 0;
    s.cap_columns = t->c.vocab_size;
    if (rows > 0) bytes = batch_bytes(&s);
    free(s.acts);
    free(s.att_scratch);
    for (int i = 0; i < t->n_tensors; i++)
        bytes += (size_t)t->tensors[i].n * (t->full ? 1 : 3) * sizeof(float) + t->moments[i].bytes;
    return bytes;
}

void batch_free_activations(struct trainer *t) {
    arena_release(&t->act);
    t->cap_rows = t->cap_len = t->cap_whole = t->cap_columns = 0;
}

/* Makes a new layout if the batch exceeds the current one: counts, allocates everything at once (so
 * a batch too large for the machine is an error), and assigns the arrays. */
static int batch_reserve(struct trainer *t, struct error *err) {
    if (t->rows <= t->cap_rows && t->longest <= t->cap_len && t->total_rows <= t->cap_whole &&
        t->columns <= t->cap_columns)
        return OK;
    caps_raise(t, t->rows, t->longest);
    arena_release(&t->act);
    choose_checkpointed_layers(t);
    if (arena_reserve(&t->act, batch_bytes(t), err) != OK) {
        batch_free_activations(t);
        return error_wrap(err, "a batch of %lld tokens", (long long)t->rows);
    }
    batch_lay(t);
    rope_fill(t);
    return OK;
}

/* Number of rows to compute: a last target at token i needs rows 0..i-1. */
static int32_t sample_rows(const struct train_sample *s) {
    for (int32_t i = s->n - 1; i > 0; i--)
        if (s->mask[i]) return i;
    return 0;
}

int batch_fit(const struct trainer *t, const struct train_sample *samples, int n) {
    int64_t rows = 0;
    int taken = 0;
    if (!t->checkpointing) return n;
    while (taken < n && (rows += sample_rows(&samples[taken])) <= CHUNK) taken++;
    return MAX(taken, 1);
}

void batch_set_call_rows(struct trainer *t, const struct train_sample *samples, int n) {
    t->total_rows = 0;
    for (int i = 0; i < n; i++) t->total_rows += sample_rows(&samples[i]);
}

static int sample_check(const struct trainer *t, const struct train_sample *s, int i,
                        struct error *err) {
    if (!t->full && (s->adapter < 0 || s->adapter >= t->n_adapters))
        return error_set(err, ERR_USAGE, "sample %d names adapter %d of %d", i, s->adapter,
                         t->n_adapters);
    if (s->n - 1 > t->c.max_seq_len)
        return error_set(err, ERR_MEMORY, "sample %d has %d tokens; the model reads %d", i, s->n,
                         t->c.max_seq_len);
    for (int32_t j = 0; j < s->n; j++)
        if (s->tokens[j] < 0 || s->tokens[j] >= t->c.vocab_size)
            return error_set(err, ERR_USAGE,
                             "token %d of sample %d is outside the vocabulary of %d", s->tokens[j],
                             i, t->c.vocab_size);
    return OK;
}

static int batch_measure(struct trainer *t, const struct train_sample *samples, int n,
                         struct error *err) {
    t->rows = t->longest = 0;
    for (int i = 0; i < n; i++) {
        int rc = sample_check(t, &samples[i], i, err);
        if (rc) return rc;
        int64_t rows = sample_rows(&samples[i]);
        t->rows += rows;
        t->longest = MAX(t->longest, rows);
    }
    return OK;
}

static void sample_pack(struct trainer *t, const struct train_sample *s, int32_t adapter,
                        int64_t ordinal) {
    int64_t at = t->n_spans ? t->seqs[t->n_spans - 1].end : 0;
    int32_t rows = sample_rows(s);
    if (!rows) return;
    t->seqs[t->n_spans++] = (struct packed_seq){.begin = at,
                                                .end = at + rows,
                                                .target = t->targets,
                                                .adapter = adapter,
                                                .ordinal = ordinal,
                                                .sample = s};
    for (int32_t i = 0; i < rows; i++) {
        t->tokens_in[at + i] = s->tokens[i];
        t->pos[at + i] = i;
        if (!s->mask[i + 1]) continue;
        t->target_row[t->targets] = at + i;
        t->target_token[t->targets] = s->tokens[i + 1];
        t->target_group[t->targets++] = adapter;
    }
}

/* Packs the samples of one adapter together, in the order given. */
int batch_pack(struct trainer *t, const struct train_sample *samples, int n, struct error *err) {
    int rc = batch_measure(t, samples, n, err);
    if (!rc) rc = batch_reserve(t, err);
    if (rc) return rc;
    t->n_spans = 0;
    t->targets = 0;
    for (int g = 0; g < t->n_groups; g++) {
        int64_t ordinal = t->groups[g].samples;
        for (int i = 0; i < n; i++)
            if (t->full || samples[i].adapter == g) sample_pack(t, &samples[i], g, ordinal++);
    }
    return OK;
}
