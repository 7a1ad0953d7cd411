/* embedder: text embeddings by the engine: a text's tokens, then the mean of their hidden states.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

/* A text's tokens, at least one and at most max_len. */
static int text_encode(const struct engine_embedder *e, const char *text, struct token_ids *out,
                       struct error *err) {
    const struct tokenizer *tok = e->model->tok;
    int32_t first = tokenizer_first_token(tok);
    tokenizer_encode(tok, text, strlen(text), TOKENIZER_ADD_BOS, out);
    if (out->n == 0 && first >= 0) token_ids_add(out, first);
    out->n = MIN(out->n, e->max_len);
    return out->n ? OK : error_set(err, ERR_MISMATCH, "'%s' has no first token", e->model->path);
}

static int engine_embed_texts(void *ctx, const char *const *texts, int n, float *out,
                              struct error *err) {
    struct engine_embedder *e = ctx;
    struct token_ids *ids = xcalloc((size_t)n, sizeof *ids);
    struct token_seq *seq = xcalloc((size_t)n, sizeof *seq);
    int rc = OK;
    for (int i = 0; i < n && rc == OK; i++) {
        rc = text_encode(e, texts[i], &ids[i], err);
        seq[i] = (struct token_seq){ids[i].v, ids[i].n};
        e->n_tokens += ids[i].n;
    }
    if (rc == OK) rc = engine_embed(e->engine, seq, n, e->adapter, out, err);
    for (int i = 0; i < n; i++) token_ids_release(&ids[i]);
    free(ids);
    free(seq);
    return rc;
}

/* The hash includes the numeric class, because the fast class gives different vectors, and max_len.
 */
int embedder_open(struct embedder *out, struct engine_embedder *e, struct error *err) {
    const char *model = model_hash(e->model, err);
    if (!model) return err->code;
    if (!e->model->tok)
        return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", e->model->path);
    char *identity = xasprintf("%s %s %s %d", model, e->adapter ? e->adapter->hash : "",
                               numeric_class_name(e->model->cls), e->max_len);
    sha256_bytes(identity, strlen(identity), e->hash);
    free(identity);
    *out = (struct embedder){e, e->model->config.d_model, e->hash, engine_embed_texts};
    return OK;
}
