/*
 * batch: packs samples end to end, and owns the memory of one pass over them.
 *
 * Samples of one adapter are adjacent, in the order given. There is no padding, because attention
 * is block-diagonal. Memory grows to the largest batch so far and is then reused. The size of a
 * pass is computed first and then reserved at once, so a batch that is too large for the machine
 * gives an error and does not end the program. trainer_bytes uses the same computation without
 * allocating.
 *
 * With gradient checkpointing, the memory limit of a pass is that of trainer_limit_passes or else
 * the size of one pass over all samples of the call in which all layers share one set of
 * activations. The passes have few samples and leave most of that memory free, so as many upper
 * layers as fit into it store their own activations.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 512 /* most rows per chunk in a layer's row-wise parts; a multiple of 32 */

/* Allocates in batch_arena, or with t->measuring only adds to t->act_bytes and returns NULL. */
static void *act_alloc(struct trainer *t, size_t bytes) {
    if (!t->measuring) return arena_alloc(&t->batch_arena, bytes);
    t->act_bytes += (MAX(bytes, 1) + 63) / 64 * 64;
    return NULL;
}

static float *act_floats(struct trainer *t, int64_t n) {
    return act_alloc(t, (size_t)n * sizeof(float));
}

static size_t tiles_bytes(int64_t rows, int64_t width) {
    return (size_t)((rows + 15) / 16 * 16 * ((width + 31) / 32 * 32)) * sizeof(uint16_t);
}

/* How the trainer's adapters change this projection (with checkpointing: in any layer): 0 not, 1 by
 * LoRA, 2 at least one by DoRA. */
static int projection_adapter_kind(const struct trainer *t, int l, int p) {
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
static void layer_activations_alloc(struct trainer *t, int l, struct activations *a) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim;
    a->q = act_floats(t, m * q);
    a->k = act_floats(t, m * g);
    a->v = act_floats(t, m * g);
    for (int i = 0; t->kv_elem == DTYPE_I8 && i < 2; i++) {
        struct i8_rows *rows = i ? &a->v_i8 : &a->k_i8;
        rows->q = act_alloc(t, (size_t)(m * g));
        rows->scale = act_alloc(t, (size_t)(m * c->n_kv_heads) * sizeof *rows->scale);
    }
    if (c->arch->qk_norm) {
        a->q_raw = act_floats(t, m * q);
        a->k_raw = act_floats(t, m * g);
    }
    a->att = act_floats(t, m * q);
    if (attention_uses_tiles(t)) a->att_stats = act_floats(t, m * 2 * c->n_heads);
    a->mid = act_floats(t, m * c->d_model);
    if (t->mlp_tiles) {
        const int64_t chunks = m / (CHUNK - 31) + 1; // each begins a tile (chunk_at)
        a->gate_tiles = act_alloc(t, tiles_bytes(m + 16 * chunks, c->d_ff));
        a->up_tiles = act_alloc(t, tiles_bytes(m + 16 * chunks, c->d_ff));
    } else {
        if (!c->arch->ungated) a->gate = act_floats(t, m * c->d_ff);
        a->up = act_floats(t, m * c->d_ff);
    }
    for (int i = 0; i < 2 && c->arch->post_norms; i++) a->branch[i] = act_floats(t, m * c->d_model);
    for (int p = 0; p < N_PROJ; p++) {
        int adapted = projection_adapter_kind(t, l, p);
        if (!adapted) continue;
        a->h[p] = act_floats(t, m * t->max_r);
        if (adapted == 2) a->z[p] = act_floats(t, m * proj_out(c, (enum proj)p));
        if (t->dropout > 0)
            a->dropout_mask[p] = act_alloc(t, (size_t)(m * ((proj_in(c, (enum proj)p) + 7) / 8)));
    }
}

/* Allocates the activations of all layers. With checkpointing, all layers but the upper
 * n_stored_layers share one set. */
static void activations_alloc(struct trainer *t) {
    struct activations shared = {0};
    for (int l = 0; l <= t->c.n_layers; l++) {
        struct activations *a = &t->acts[l];
        *a = (struct activations){.x = act_floats(t, t->cap_rows * t->c.d_model)};
        if (l == t->c.n_layers) break;
        if (!t->checkpointing || l >= t->c.n_layers - t->n_stored_layers) {
            layer_activations_alloc(t, l, a);
            continue;
        }
        if (l == 0) layer_activations_alloc(t, 0, &shared);
        float *x = a->x;
        *a = shared;
        a->x = x;
    }
}

/* `wide`: the largest number of inputs or outputs of a projection. */
static void gradients_alloc(struct trainer *t, int64_t wide) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim, d = c->d_model, n = t->chunk;
    t->dx = act_floats(t, m * d);
    t->dq = act_floats(t, m * q);
    t->dk = act_floats(t, m * g);
    t->dv = act_floats(t, m * g);
    t->datt = act_floats(t, m * q);
    t->rstd = act_floats(t, m * c->n_heads);
    t->mean = act_floats(t, m * c->n_heads);
    t->xn = act_floats(t, MAX(n, pool_size(t->pool)) * d);
    t->dxn = act_floats(t, n * d);
    t->act_buf = act_floats(t, n * c->d_ff);
    t->dact = act_floats(t, n * c->d_ff);
    t->dgate = act_floats(t, n * c->d_ff);
    t->dup = act_floats(t, n * c->d_ff);
    if (t->mlp_tiles) {
        t->act_tiles = act_alloc(t, tiles_bytes(n, c->d_ff));
        t->dgate_tiles = act_alloc(t, tiles_bytes(n, c->d_ff));
        t->dup_tiles = act_alloc(t, tiles_bytes(n, c->d_ff));
    }
    if (t->full) return;
    t->dh = act_floats(t, n * t->max_r);
    if (t->dropout > 0) t->drop = act_floats(t, n * wide);
    for (int i = 0; i < t->n_adapters; i++)
        if (t->adapters[i]->config.dora && !t->dora_out) t->dora_out = act_floats(t, n * wide);
}

static void lm_head_alloc(struct trainer *t) {
    int64_t n = t->head_chunk, d = t->c.d_model;
    t->hx = act_floats(t, n * d);
    t->hn = act_floats(t, n * d);
    t->dhn = act_floats(t, n * d);
    t->logits = act_floats(t, n * t->cap_columns);
    if (cross_entropy_uses_tiles(t)) t->head_scratch = act_alloc(t, cross_entropy_tiles_scratch(t));
    if (!t->vocab) return;
    t->head_low = act_floats(t, n * MAX(t->vocab_max_r, VOCAB_RANK_CHUNK));
    t->head_dlow = act_floats(t, n * MAX(t->vocab_max_r, VOCAB_RANK_CHUNK));
    t->head_rows_dy = act_floats(t, n * t->vocab_max_ids);
}

static void rope_alloc(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    if (t->c.arch->learned_pos) return;
    t->rope_cos = act_floats(t, n);
    t->rope_sin = act_floats(t, n);
    t->rope_neg = act_floats(t, n);
    if (t->c.rope_local_theta <= 0.0f) return;
    t->local_cos = act_floats(t, n);
    t->local_sin = act_floats(t, n);
    t->local_neg = act_floats(t, n);
}

static void rope_fill(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    if (t->rope_cos) rope_table(&t->c, (int32_t)t->cap_len, t->rope_cos, t->rope_sin);
    if (t->local_cos) rope_table_local(&t->c, (int32_t)t->cap_len, t->local_cos, t->local_sin);
    for (int64_t i = 0; t->rope_cos && i < n; i++) t->rope_neg[i] = -t->rope_sin[i];
    for (int64_t i = 0; t->local_cos && i < n; i++) t->local_neg[i] = -t->local_sin[i];
}

static void batch_alloc(struct trainer *t) {
    int64_t wide = t->c.d_model;
    for (int p = 0; p < N_PROJ; p++)
        wide = MAX(wide, MAX(proj_in(&t->c, (enum proj)p), proj_out(&t->c, (enum proj)p)));
    t->chunk = MIN(CHUNK, t->cap_rows);
    /* about 16 MB of logits over the vocabulary at a time */
    t->head_chunk = MAX(16, MIN(1024, ((int64_t)1 << 22) / t->c.vocab_size / 16 * 16));
    if (cross_entropy_uses_tiles(t)) t->head_chunk = cross_entropy_tiles_rows(t->c.d_model);
    t->head_chunk = MIN(t->head_chunk, (t->cap_rows + 15) / 16 * 16);
    t->dora_out = NULL;
    activations_alloc(t);
    gradients_alloc(t, wide);
    lm_head_alloc(t);
    rope_alloc(t);
    t->input_scratch = act_alloc(t, gemm_input_scratch(MAX(t->chunk, t->head_chunk), wide));
    t->backward_scratch =
        act_alloc(t, matrix_mul_backward_scratch(MAX(wide, t->cap_columns), pool_size(t->pool)));
    if (t->full && t->grad_path == GRAD_TILES)
        t->grad_scratch = act_alloc(t, weight_grad_scratch(MAX(t->chunk, t->head_chunk), wide));
    if (t->lora_tiles) {
        t->dy_scratch = act_alloc(t, gemm_input_scratch(t->chunk, wide));
        if (t->dropout > 0) t->drop_tiles = act_alloc(t, tiles_bytes(t->chunk, wide));
        for (int i = 0; i < 2; i++) {
            t->low_rank_tiles[i] = act_alloc(t, tiles_bytes(t->chunk, LOW_RANK_MAX));
            t->low_rank_parts[i] = act_alloc(t, (size_t)t->cap_rows * sizeof *t->low_rank_parts[i]);
        }
        t->low_rank_rows = act_alloc(t, (size_t)t->cap_rows * sizeof *t->low_rank_rows);
        t->lora_scratch = act_alloc(t, (size_t)pool_size(t->pool) * lora_tile_scratch(t));
    }
    t->seqs = act_alloc(t, (size_t)t->cap_rows * sizeof *t->seqs);
    t->tokens_in = act_alloc(t, (size_t)t->cap_rows * sizeof *t->tokens_in);
    t->pos = act_alloc(t, (size_t)t->cap_rows * sizeof *t->pos);
    t->target_row = act_alloc(t, (size_t)t->cap_rows * sizeof *t->target_row);
    t->target_token = act_alloc(t, (size_t)t->cap_rows * sizeof *t->target_token);
    t->target_group = act_alloc(t, (size_t)t->cap_rows * sizeof *t->target_group);
    t->target_nll = act_alloc(t, (size_t)t->cap_rows * sizeof *t->target_nll);
    t->target_weight = act_alloc(t, (size_t)t->cap_rows * sizeof *t->target_weight);
    for (int i = 0; i < pool_size(t->pool); i++)
        t->att_scratch[i] = act_alloc(t, attention_scratch(t, t->cap_len));
}

static size_t batch_bytes(struct trainer *t) {
    t->act_bytes = 0;
    t->measuring = true;
    batch_alloc(t);
    t->measuring = false;
    return t->act_bytes;
}

/* Sets n_stored_layers to the number of upper layers that can have their own activations within the
 * memory limit of a pass. */
static void choose_checkpointed_layers(struct trainer *t) {
    int64_t rows = t->cap_rows;
    t->n_stored_layers = 0;
    if (!t->checkpointing || (!t->pass_bytes && t->cap_call_rows <= rows)) return;
    size_t least = batch_bytes(t), room = MAX(t->pass_bytes, least);
    if (!t->pass_bytes) {
        t->cap_rows = t->cap_call_rows;
        room = batch_bytes(t);
        t->cap_rows = rows;
    }
    t->n_stored_layers = 1;
    size_t each = batch_bytes(t) - least;
    t->n_stored_layers = (int)MIN((room - least) / each, (size_t)t->c.n_layers - 1);
}

/* Rounds up with a margin, so that a slightly larger batch needs no new allocation. */
static int64_t rows_round_up(int64_t rows) {
    int64_t step = rows < 128 ? 16 : 128;
    return (rows / step + 1) * step;
}

/* Raises the capacities to at least those of a pass of `rows` rows. */
static void capacity_raise(struct trainer *t, int64_t rows, int64_t longest) {
    t->cap_rows = MAX(t->cap_rows, rows_round_up(rows));
    t->cap_columns = MAX(t->cap_columns, t->columns);
    t->cap_len = MAX(t->cap_len, (longest / 64 + 1) * 64);
    t->cap_call_rows = MAX(t->cap_call_rows, rows_round_up(t->call_rows));
}

/* The memory of a pass. With checkpointing, all layers share one set of activations. */
static size_t pass_bytes(const struct trainer *t, bool checkpointing, int64_t rows,
                         int64_t longest) {
    struct trainer s = *t; // a copy: batch_bytes only counts its arrays
    if (rows == 0) return 0;
    s.acts = xcalloc((size_t)t->c.n_layers + 1, sizeof *s.acts);
    s.att_scratch = xcalloc((size_t)pool_size(t->pool), sizeof *s.att_scratch);
    s.checkpointing = checkpointing;
    capacity_raise(&s, rows, longest);
    s.n_stored_layers = 0;
    s.cap_columns = head_columns(t, NULL);
    size_t bytes = batch_bytes(&s);
    free(s.acts);
    free(s.att_scratch);
    return bytes;
}

size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest) {
    size_t bytes = pass_bytes(t, t->checkpointing, rows, longest);
    if (t->checkpointing && t->pass_bytes) {
        rows = MIN(rows, MAX(CHUNK, longest));
        bytes = MIN(t->pass_bytes, pass_bytes(t, false, rows, longest));
    }
    for (int i = 0; i < t->n_tensors; i++)
        bytes += (size_t)t->tensors[i].n * (t->full ? 1 : 3) * sizeof(float) + t->moments[i].bytes;
    return bytes - t->vocab_floats * sizeof(float); // tables have no transpose
}

bool trainer_limit_passes(struct trainer *t, size_t bytes, int64_t rows, int64_t together,
                          int64_t longest, struct trainer_passes *out) {
    /* fewer than FEW rows without checkpointing are slower than more with it */
    enum { LEAST = 16, FEW = 256 };
    if (t->full) together = MAX(together, rows);
    *out = (struct trainer_passes){.rows = rows, .checkpointing = t->checkpointing};
    while ((out->bytes = pass_bytes(t, out->checkpointing, MAX(out->rows, together), longest)) >
           bytes) {
        bool small = out->rows <= (out->checkpointing ? LEAST : FEW) || out->rows <= together;
        if (small && out->checkpointing) return false;
        out->rows = small ? MIN(rows, CHUNK) : out->rows / 2;
        out->checkpointing |= small;
    }
    if (t->full) out->rows = rows;
    batch_free_activations(t);
    t->checkpointing = out->checkpointing;
    t->pass_rows = out->rows;
    t->pass_bytes = out->checkpointing ? bytes : 0;
    if (out->checkpointing)
        out->bytes = MIN(bytes, pass_bytes(t, false, MAX(out->rows, together), longest));
    return true;
}

static size_t weight_bytes(const struct model *m) {
    size_t n = matrix_bytes(&m->embed);
    if (!m->config.tied) n += matrix_bytes(&m->head);
    for (int32_t l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) n += matrix_bytes(&m->layers[l].proj[p]);
    return n;
}

size_t activation_memory(const struct trainer *t, const struct train_options *o, int64_t longest,
                         size_t weights) {
    enum { LEAST_BYTES = 256 << 20, SHARE = 3 };
    struct error ignored; // the options are checked
    size_t bytes;
    CHECK(activation_memory_parse(o->activation_memory, &bytes, &ignored) == OK);
    if (bytes) return bytes;
    if (o->gradient_checkpointing) return pass_bytes(t, true, PACK_MAX_TOKENS, longest);
    return MAX(LEAST_BYTES, weights / SHARE);
}

size_t trainer_activation_memory(const struct trainer *t, const struct train_options *o,
                                 int64_t longest) {
    return activation_memory(t, o, longest, weight_bytes(t->model));
}

void batch_free_activations(struct trainer *t) {
    arena_release(&t->batch_arena);
    t->cap_rows = t->cap_len = t->cap_call_rows = t->cap_columns = 0;
}

/* Memory that the system grants may be missing when it is written (overcommit), which ends the
 * process. So a batch may not need more than what is available. */
static int batch_memory_check(size_t bytes, struct error *err) {
    int64_t available = memory_info("/").available;
    if (available < 0 || bytes <= (size_t)available) return OK;
    return error_set(err, ERR_MEMORY,
                     "%zu MB are needed and %zu MB of memory are available; use "
                     "--gradient-checkpointing, a smaller --bsz or --max-length",
                     bytes >> 20, (size_t)available >> 20);
}

/* If the batch exceeds a capacity, raises it, reserves the whole memory at once (so a batch that is
 * too large for the machine gives an error), and assigns the arrays. */
static int batch_reserve(struct trainer *t, struct error *err) {
    if (t->rows <= t->cap_rows && t->longest <= t->cap_len && t->call_rows <= t->cap_call_rows &&
        t->columns <= t->cap_columns)
        return OK;
    capacity_raise(t, t->rows, t->longest);
    arena_release(&t->batch_arena);
    choose_checkpointed_layers(t);
    size_t bytes = batch_bytes(t);
    if (batch_memory_check(bytes, err) || arena_reserve(&t->batch_arena, bytes, err)) {
        batch_free_activations(t);
        return error_wrap(err, "a batch of %lld tokens", (long long)t->rows);
    }
    batch_alloc(t);
    rope_fill(t);
    return OK;
}

/* Number of rows to compute: if token i is the last target, rows 0..i-1 are needed. */
static int32_t sample_rows(const struct train_sample *s) {
    for (int32_t i = s->n - 1; i > 0; i--)
        if (s->mask[i]) return i;
    return 0;
}

/* Full training runs a call in one pass: a tied embedding adds the gradients of the head and those
 * of the embedding in turns, pass by pass. */
int batch_fit(const struct trainer *t, const struct train_sample *samples, int n) {
    int64_t rows = 0, most = t->pass_rows ? t->pass_rows : INT64_MAX;
    int taken = 0;
    if (t->full) return n;
    if (t->checkpointing) most = MIN(most, CHUNK);
    while (taken < n && (rows += sample_rows(&samples[taken])) <= most) taken++;
    return MAX(taken, 1);
}

void batch_set_call_rows(struct trainer *t, const struct train_sample *samples, int n) {
    t->call_rows = 0;
    for (int i = 0; i < n; i++) t->call_rows += sample_rows(&samples[i]);
}

static int32_t sample_activation(const struct trainer *t, const struct train_sample *s) {
    return t->full ? 0 : train_sample_activation(s, &t->adapters[s->adapter]->config);
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
    if (sample_rows(s) > 0 && sample_activation(t, s) == ADAPTER_INACTIVE)
        return error_set(err, ERR_MISMATCH,
                         "sample %d does not have the adapter's invocation before its last answer, "
                         "so the adapter does not change it",
                         i);
    return OK;
}

/* Checks the samples, and sets t->rows and t->longest. */
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

/* Appends a sample to the batch; a sample without a target has no rows. */
static void sample_pack(struct trainer *t, const struct train_sample *s, int32_t adapter,
                        int64_t ordinal) {
    int64_t at = t->n_seqs ? t->seqs[t->n_seqs - 1].end : 0;
    int32_t rows = sample_rows(s);
    if (!rows) return;
    t->seqs[t->n_seqs++] = (struct packed_seq){.begin = at,
                                               .end = at + rows,
                                               .active = at + MIN(sample_activation(t, s), rows),
                                               .first_target = t->targets,
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

int batch_pack(struct trainer *t, const struct train_sample *samples, int n, struct error *err) {
    int rc = batch_measure(t, samples, n, err);
    if (!rc) rc = batch_reserve(t, err);
    if (rc) return rc;
    t->n_seqs = 0;
    t->targets = 0;
    for (int g = 0; g < t->n_groups; g++) {
        int64_t ordinal = t->groups[g].samples;
        for (int i = 0; i < n; i++)
            if (t->full || samples[i].adapter == g) sample_pack(t, &samples[i], g, ordinal++);
    }
    return OK;
}
