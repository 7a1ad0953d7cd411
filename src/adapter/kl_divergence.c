/*
 * kl_divergence: KL divergence of two models on a fixed set of prompts. Between a base and the base
 * with an adapter it measures the adapter's effect; between an adapter and its merged model, the
 * error of merging.
 *
 * The prompts are a few sentences in several languages, code and numbers. For a model without a
 * tokenizer the prompts are random token ids from a fixed seed. Divergences are computed in double
 * over the whole vocabulary.
 */
#include "adapter/internal.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* MAX_TOKENS: longer prompts are truncated. */
enum { MAX_TOKENS = 64, RANDOM_PROMPTS = 4, RANDOM_TOKENS = 24 };

static const char *const prompts[] = {
    "The capital of France is Paris, and the river that runs through it is the",
    "Question: what is 17 + 25? Answer: 17 + 25 = 42. Question: what is 8 times 7? Answer:",
    "日本の首都は東京です。富士山の高さは三千七百七十六メートルで、一番高い山は",
    "中国的首都是北京。长江是亚洲最长的河流,它的长度大约是",
    "Der Hund läuft schnell durch den Wald, weil er die Katze gesehen",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
};

struct kl_reference {
    int fd; /* the logits of all prompts, [positions][vocab] */
    int32_t vocab;
    int n;
    struct token_ids ids[ARRAY_LEN(prompts)];
};

static void random_ids(struct token_ids *out, int32_t vocab, uint32_t id) {
    struct rng rng = rng_make(7, RNG_TEST, id, 0);
    for (int i = 0; i < RANDOM_TOKENS; i++)
        token_ids_add(out, (int32_t)rng_below(&rng, (uint32_t)vocab));
}

static void prompt_ids(const struct model *m, int i, struct token_ids *out) {
    if (m->tok)
        tokenizer_encode(m->tok, prompts[i], strlen(prompts[i]), TOKENIZER_ADD_BOS, out);
    else
        random_ids(out, m->config.vocab_size, (uint32_t)i);
    out->n = MIN(out->n, MIN(MAX_TOKENS, m->config.max_seq_len));
}

/* Writes the logits [n][V] of one prompt. */
static void prompt_run(struct forward *f, const struct adapter *a, const struct token_ids *ids,
                       float *logits) {
    struct batch_row rows[MAX_TOKENS];
    int32_t out[MAX_TOKENS];
    struct lora_part part;
    int32_t active = a ? MIN(adapter_activation(&a->config, ids->v, ids->n), ids->n) : 0;
    struct lora_segment seg = adapter_lora_segment(a, active, ids->n, &part);
    for (int32_t i = 0; i < ids->n; i++) {
        rows[i] = (struct batch_row){.token = ids->v[i], .pos = i};
        out[i] = i;
    }
    forward_run(f, rows, ids->n, &seg, active < ids->n, out, ids->n, logits);
}

static double logsumexp(const float *logits, int32_t n) {
    double sum = 0, max = -DBL_MAX;
    for (int32_t i = 0; i < n; i++) max = MAX(max, (double)logits[i]);
    for (int32_t i = 0; i < n; i++) sum += math_exp((double)logits[i] - max);
    return max + math_log(sum);
}

/* KL(p ‖ q) of the softmax of two rows of logits. A negative result, due to rounding, becomes 0. */
static double kl(const float *p, const float *q, int32_t n) {
    double zp = logsumexp(p, n), zq = logsumexp(q, n), sum = 0;
    for (int32_t i = 0; i < n; i++) {
        double lp = (double)p[i] - zp;
        sum += math_exp(lp) * (lp - ((double)q[i] - zq));
    }
    return MAX(sum, 0);
}

static int32_t argmax(const float *v, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return best;
}

static void divergence_add(struct kl_divergence *d, const float *p, const float *q, int32_t n,
                           int32_t vocab) {
    for (int32_t i = 0; i < n; i++, p += vocab, q += vocab) {
        double k = kl(p, q, vocab);
        d->mean += k;
        d->max = MAX(d->max, k);
        d->same_top += argmax(p, vocab) == argmax(q, vocab);
        d->positions++;
    }
}

static const struct forward_options one_prompt = {
    .max_rows = MAX_TOKENS, .n_slots = 1, .slot_len = MAX_TOKENS};

/* A forward pass for one prompt, and the memory of its logits. */
static struct forward *forward_begin(const struct model *m, struct pool *pool, float **logits) {
    struct forward_options o = one_prompt;
    o.pool = pool;
    struct forward *f = forward_new(m, &o);
    CHECK(f); // the memory for one short sequence is small
    *logits = xmalloc(sizeof **logits * MAX_TOKENS * (size_t)m->config.vocab_size);
    return f;
}

struct kl_divergence adapter_kl_divergence(const struct model *m, const struct adapter *a,
                                           const struct model *m2, const struct adapter *a2,
                                           struct pool *pool) {
    int32_t vocab = m->config.vocab_size;
    CHECK(vocab == m2->config.vocab_size && (!a || adapter_is_ready(a)) &&
          (!a2 || adapter_is_ready(a2)));
    struct kl_divergence d = {0};
    float *p, *q;
    struct forward *f = forward_begin(m, pool, &p), *f2 = forward_begin(m2, pool, &q);
    int n = m->tok ? (int)ARRAY_LEN(prompts) : RANDOM_PROMPTS;
    for (int i = 0; i < n; i++) {
        struct token_ids ids = {0};
        prompt_ids(m, i, &ids);
        prompt_run(f, a, &ids, p);
        prompt_run(f2, a2, &ids, q);
        divergence_add(&d, p, q, ids.n, vocab);
        token_ids_release(&ids);
    }
    d.mean /= d.positions;
    d.same_top /= d.positions;
    free(p);
    free(q);
    forward_free(f);
    forward_free(f2);
    return d;
}

struct kl_reference *kl_reference_new(const struct model *m, const struct adapter *a,
                                      const char *path, struct pool *pool, struct error *err) {
    CHECK(!a || adapter_is_ready(a));
    int fd = file_open_unnamed(path, err), rc = fd < 0 ? fd : OK;
    if (rc != OK) return NULL;
    struct kl_reference *r = xcalloc(1, sizeof *r);
    float *logits;
    struct forward *f = forward_begin(m, pool, &logits);
    int64_t end = 0;
    *r = (struct kl_reference){fd, m->config.vocab_size,
                               m->tok ? ARRAY_LEN(prompts) : RANDOM_PROMPTS};
    for (int i = 0; rc == OK && i < r->n; i++) {
        prompt_ids(m, i, &r->ids[i]);
        size_t bytes = sizeof *logits * (size_t)r->ids[i].n * (size_t)r->vocab;
        prompt_run(f, a, &r->ids[i], logits);
        rc = file_write_at(fd, logits, bytes, end, err);
        end += (int64_t)bytes;
    }
    forward_free(f);
    free(logits);
    if (rc == OK) return r;
    kl_reference_free(r);
    return NULL;
}

int kl_reference_compare(const struct kl_reference *r, const struct model *m2,
                         const struct adapter *a2, struct pool *pool, struct kl_divergence *out,
                         struct error *err) {
    CHECK(!a2 || adapter_is_ready(a2));
    *out = (struct kl_divergence){0};
    if (m2->config.vocab_size != r->vocab)
        return error_set(err, ERR_MISMATCH, "'%s' has another vocabulary or context", m2->name);
    float *q, *p = xmalloc(sizeof *p * (size_t)r->vocab);
    struct forward *f = forward_begin(m2, pool, &q);
    const size_t bytes = sizeof *p * (size_t)r->vocab;
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n; i++) {
        prompt_run(f, a2, &r->ids[i], q);
        for (int32_t t = 0; rc == OK && t < r->ids[i].n; t++) {
            rc = file_read_at(r->fd, p, bytes, out->positions * (int64_t)bytes, err);
            if (rc == OK) divergence_add(out, p, q + (int64_t)t * r->vocab, 1, r->vocab);
        }
    }
    out->mean /= out->positions;
    out->same_top /= out->positions;
    forward_free(f);
    free(p);
    free(q);
    return rc;
}

void kl_reference_free(struct kl_reference *r) {
    if (!r) return;
    for (int i = 0; i < r->n; i++) token_ids_release(&r->ids[i]);
    close(r->fd);
    free(r);
}

size_t kl_reference_bytes(const struct model_config *c, struct pool *pool) {
    struct forward_options o = one_prompt;
    o.pool = pool;
    return forward_bytes(c, &o) + sizeof(float) * (MAX_TOKENS + 1) * (size_t)c->vocab_size;
}
