/*
 * embed: text embeddings, the mean of a text's hidden states after the final norm.
 *
 * Each text uses a free slot, whose pages are released at the end. The hidden states are summed in
 * the order of positions, so an embedding depends on its text and adapter only.
 *
 * Active requests wait while engine_embed runs.
 */
#include <string.h>

#include "engine/internal.h"

/* Writes the mean of one text's hidden states to out [D]. The adapter of `adapter_seg` applies from
 * position `activation` on. */
static void embed_mean_pool(struct engine *e, int32_t slot, const struct token_seq *t,
                            const struct lora_segment *adapter_seg, int32_t activation,
                            float *out) {
    int32_t d = e->m->config.d_model;
    memset(out, 0, (size_t)d * sizeof *out);
    for (int32_t pos = 0, n; pos < t->n; pos += n) {
        n = MIN(t->n - pos, e->o.max_rows);
        struct lora_segment seg = *adapter_seg;
        seg.begin = MIN(MAX(activation - pos, 0), n), seg.end = n;
        for (int32_t i = 0; i < n; i++) {
            e->rows[i] = (struct batch_row){.token = t->v[pos + i], .pos = pos + i, .slot = slot};
            e->out_rows[i] = i;
        }
        forward_run(e->f, e->rows, n, &seg, seg.begin < n, e->out_rows, n, NULL);
        const float *hidden = forward_hidden(e->f);
        for (int32_t i = 0; i < n; i++) e->kern->axpy(out, 1.0f, hidden + (int64_t)i * d, d);
    }
    e->kern->scale(out, 1.0f / (float)t->n, d);
}

static int texts_check(const struct engine *e, const struct token_seq *texts, int32_t n,
                       const struct adapter *adapter, struct error *err) {
    for (int32_t i = 0; i < n; i++) {
        if (texts[i].n < 1 || texts[i].n > e->o.max_len)
            return error_set(err, ERR_USAGE, "text %d has %d tokens; 1 to %d are possible", i,
                             texts[i].n, e->o.max_len);
        if (engine_check_tokens("a text", texts[i].v, texts[i].n, e->vocab, err) != OK)
            return err->code;
    }
    return adapter ? engine_check_adapter(adapter, &e->m->config, err) : OK;
}

int engine_embed(struct engine *e, const struct token_seq *texts, int32_t n,
                 struct adapter *adapter, float *out, struct error *err) {
    if (texts_check(e, texts, n, adapter, err) != OK) return err->code;
    struct lora_part part = {.pack = adapter ? adapter_pack(adapter, e->o.lora_elem) : NULL,
                             .weight = 1};
    struct lora_segment adapter_seg = {.parts = &part,
                                       .n_parts = adapter != NULL,
                                       .vocab = adapter ? adapter->vocab_overrides : NULL};
    int32_t slot = slot_find_lru(e, false), rc = OK;
    if (slot < 0) return error_set(err, ERR_STATE, "every slot of the engine is busy");
    e->slots[slot].n = e->slots[slot].n_known = 0;
    for (int32_t i = 0; i < n && rc == OK; i++) {
        kv_cache_truncate(forward_kv_cache(e->f), slot, 0);
        int32_t activation =
            adapter ? adapter_activation(&adapter->config, texts[i].v, texts[i].n) : 0;
        if (!slot_reserve_pages(e, slot, 0, texts[i].n))
            rc =
                error_set(err, ERR_MEMORY, "no pages are free for a text of %d tokens", texts[i].n);
        else
            embed_mean_pool(e, slot, &texts[i], &adapter_seg, activation,
                            out + (int64_t)i * e->m->config.d_model);
    }
    kv_cache_truncate(forward_kv_cache(e->f), slot, 0);
    return rc;
}
