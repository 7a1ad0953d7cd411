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

struct kl_divergence adapter_kl_divergence(const struct model *m, const struct adapter *a,
                                           const struct model *m2, const struct adapter *a2,
                                           struct pool *pool) {
    int32_t vocab = m->config.vocab_size;
    CHECK(vocab == m2->config.vocab_size && (!a || adapter_is_ready(a)) &&
          (!a2 || adapter_is_ready(a2)));
    struct forward_options o = {
        .max_rows = MAX_TOKENS, .n_slots = 1, .slot_len = MAX_TOKENS, .pool = pool};
    struct forward *f = forward_new(m, &o), *f2 = forward_new(m2, &o);
    struct kl_divergence d = {0};
    CHECK(f && f2); // the memory for one short sequence is small
    float *p = xmalloc(sizeof *p * MAX_TOKENS * (size_t)vocab * 2), *q = p + MAX_TOKENS * vocab;
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
    forward_free(f);
    forward_free(f2);
    return d;
}
