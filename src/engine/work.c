/*
 * work: the requests of a command, counted before they are computed, and the time that they take on
 * this machine.
 *
 * A counter takes the place of the engine: it counts requests and fills in made-up replies of the
 * greatest length, so that a debate continues with them. Hence the counts of generated tokens, and
 * of prompts that quote replies, are upper bounds. The time of a token is measured on a sample of
 * the counted requests, in a batch of the size that the command will have.
 */
#define _GNU_SOURCE
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

enum { QUOTED = 4 }; /* made-up tokens in a row that show a quoted reply */
/* Seconds for a sample of prompts, and of replies. One step runs in any case. */
static const double PROMPTS_TIME = 0.5, REPLIES_TIME = 1.2;

/* A prefix of a prompt by hash, and the request that had it last. */
struct seen_prefix {
    uint64_t hash; /* 0: an empty cell */
    int64_t request;
};
struct work_counter {
    struct engine *e;
    double start; /* clock_now() when the counting began */
    struct work_counts counts;
    int32_t made_up;          /* the token of made-up replies */
    int64_t remembered;       /* requests whose prompts the prefix cache may have */
    struct seen_prefix *seen; /* [n_cells] hash table with linear probing; n_cells: a power of 2 */
    size_t n_cells, n_seen;
    struct arena arena;            /* arrays of `sample` */
    struct engine_request *sample; /* [n_sample] requests with prompts that quote no reply */
    int n_sample, max_sample;
    int64_t sampled; /* requests among which the sample was chosen */
    struct rng rng;
};

/* A token that a text of many of it consists of after it is tokenized again. */
static int32_t made_up_token(const struct tokenizer *tok) {
    struct token_ids ids = {0};
    int32_t token = 0;
    if (tok) tokenizer_encode(tok, " a a", 4, 0, &ids);
    if (ids.n) token = ids.v[ids.n - 1];
    token_ids_release(&ids);
    return token;
}

struct work_counter *work_counter_new(struct engine *e, const struct model *m) {
    struct work_counter *c = xcalloc(1, sizeof *c);
    c->e = e;
    c->start = clock_now();
    c->made_up = made_up_token(m->tok);
    c->max_sample = engine_max_seqs(e);
    c->remembered = 2 * (int64_t)c->max_sample;
    c->sample = xcalloc((size_t)c->max_sample, sizeof *c->sample);
    c->n_cells = 1 << 16;
    c->seen = xcalloc(c->n_cells, sizeof *c->seen);
    c->rng = rng_make(1, RNG_SAMPLE, 0, 0);
    return c;
}

/* The sample keeps the adapters of its requests, which their callers may release. */
static void adapters_keep(const struct engine_request *r) {
    if (r->adapter) adapter_retain(r->adapter);
    for (int32_t i = 0; i < r->n_mix; i++)
        if (r->mix[i].adapter) adapter_retain(r->mix[i].adapter);
}

static void adapters_drop(const struct engine_request *r) {
    adapter_release(r->adapter);
    for (int32_t i = 0; i < r->n_mix; i++) adapter_release(r->mix[i].adapter);
}

void work_counter_free(struct work_counter *c) {
    if (!c) return;
    for (int i = 0; i < c->n_sample; i++) adapters_drop(&c->sample[i]);
    arena_release(&c->arena);
    free(c->sample);
    free(c->seen);
    free(c);
}

struct work_counts work_counter_counts(const struct work_counter *c) {
    struct work_counts now = c->counts;
    now.other_seconds = clock_now() - c->start;
    return now;
}

void work_counts_add(struct work_counts *sum, const struct work_counts *v, int64_t times) {
    sum->requests += v->requests * times;
    sum->prompt_tokens += v->prompt_tokens * times;
    sum->cached_tokens += v->cached_tokens * times;
    sum->max_generated_tokens += v->max_generated_tokens * times;
    sum->other_seconds += v->other_seconds * (double)times;
}

/* counting */

static struct seen_prefix *prefix_cell(struct seen_prefix *seen, size_t n_cells, uint64_t hash) {
    size_t i = (size_t)hash & (n_cells - 1);
    while (seen[i].hash && seen[i].hash != hash) i = (i + 1) & (n_cells - 1);
    return &seen[i];
}

static void table_grow(struct work_counter *c) {
    size_t n = 2 * c->n_cells;
    struct seen_prefix *seen = xcalloc(n, sizeof *seen);
    for (size_t i = 0; i < c->n_cells; i++)
        if (c->seen[i].hash) *prefix_cell(seen, n, c->seen[i].hash) = c->seen[i];
    free(c->seen);
    c->seen = seen;
    c->n_cells = n;
}

/* Notes that this request has the prefix; returns whether the cache may have it. */
static bool prefix_note(struct work_counter *c, uint64_t hash) {
    if (2 * c->n_seen > c->n_cells) table_grow(c);
    struct seen_prefix *p = prefix_cell(c->seen, c->n_cells, hash | 1);
    bool cached = p->hash && c->counts.requests - p->request <= c->remembered;
    c->n_seen += !p->hash;
    *p = (struct seen_prefix){hash | 1, c->counts.requests};
    return cached;
}

static uint64_t hash_next(uint64_t hash, int32_t token) {
    const uint64_t v[2] = {hash, (uint64_t)(uint32_t)token};
    return hash_fnv1a(v, sizeof v);
}

/* The adapters of a request: prompts are cached for each of them separately. */
static uint64_t adapters_hash(const struct engine_request *r) {
    uint64_t hash = r->adapter ? hash_fnv1a(r->adapter->hash, strlen(r->adapter->hash)) : 0;
    for (int32_t i = 0; !r->adapter && i < r->n_mix; i++) {
        const struct weighted_adapter *w = &r->mix[i];
        uint64_t one = w->adapter ? hash_fnv1a(w->adapter->hash, strlen(w->adapter->hash)) : 1;
        hash = hash_next(hash ^ one ^ hash_fnv1a(&w->weight, sizeof w->weight), i);
    }
    return hash;
}

/* Rows that score the choices: their distinct prefixes without the last token, which no token
 * follows. */
static int64_t choices_count(const struct engine_request *r) {
    int64_t n = 0;
    for (int32_t i = 0; i < r->n_choices; i++) {
        int32_t shared = 0, rows = r->choices[i].n - 1;
        for (int32_t k = 0; k < i; k++) {
            int32_t same = 0, most = MIN(rows, r->choices[k].n - 1);
            while (same < most && r->choices[i].v[same] == r->choices[k].v[same]) same++;
            shared = MAX(shared, same);
        }
        n += rows - shared;
    }
    return n;
}

static bool quotes_reply(const struct work_counter *c, const struct engine_request *r) {
    for (int32_t i = 0, row = 0; i < r->n_prompt; i++) {
        row = r->prompt[i] == c->made_up ? row + 1 : 0;
        if (row == QUOTED) return true;
    }
    return false;
}

static void *arena_copy(struct arena *a, const void *v, int32_t n, size_t size) {
    return n > 0 ? memcpy(arena_alloc(a, (size_t)n * size), v, (size_t)n * size) : NULL;
}

/* A copy of the request's inputs, without its grammar, which its caller frees. */
static struct engine_request request_copy(struct arena *a, const struct engine_request *r) {
    struct engine_request copy = {.adapter = r->adapter,
                                  .n_prompt = r->n_prompt,
                                  .n_mix = r->mix ? r->n_mix : 0,
                                  .sampling = r->sampling,
                                  .max_tokens = r->max_tokens,
                                  .n_stop = r->n_stop,
                                  .n_stop_texts = r->n_stop_texts,
                                  .loop_tokens = r->loop_tokens,
                                  .n_choices = r->n_choices};
    copy.prompt = arena_copy(a, r->prompt, r->n_prompt, sizeof *r->prompt);
    copy.mix = arena_copy(a, r->mix, copy.n_mix, sizeof *r->mix);
    copy.stop = arena_copy(a, r->stop, r->n_stop, sizeof *r->stop);
    char **texts = arena_alloc(a, ((size_t)r->n_stop_texts + 1) * sizeof *texts);
    for (int32_t i = 0; i < r->n_stop_texts; i++) texts[i] = arena_strdup(a, r->stop_texts[i]);
    copy.stop_texts = (const char *const *)texts;
    copy.suffix.v = arena_copy(a, r->suffix.v, r->suffix.n, sizeof *r->suffix.v);
    copy.suffix.n = r->suffix.n;
    struct token_seq *choices = arena_copy(a, r->choices, r->n_choices, sizeof *r->choices);
    for (int32_t i = 0; i < r->n_choices; i++)
        choices[i].v = arena_copy(a, r->choices[i].v, r->choices[i].n, sizeof *r->choices[i].v);
    copy.choices = choices;
    return copy;
}

/* Reservoir sampling. */
static void sample_offer(struct work_counter *c, const struct engine_request *r) {
    if (quotes_reply(c, r)) return;
    int64_t i = c->sampled++;
    if (i >= c->max_sample) i = (int64_t)(rng_u64(&c->rng) % (uint64_t)c->sampled);
    if (i >= c->max_sample) return;
    adapters_drop(&c->sample[i]);
    c->sample[i] = request_copy(&c->arena, r);
    adapters_keep(&c->sample[i]);
    c->n_sample = MAX(c->n_sample, (int)i + 1);
}

void work_counter_add(struct work_counter *c, const struct engine_request *r) {
    uint64_t hash = adapters_hash(r);
    bool cached = true;
    for (int32_t i = 0; i < r->n_prompt; i++) {
        hash = hash_next(hash, r->prompt[i]);
        cached &= prefix_note(c, hash) && i + 1 < r->n_prompt; // the last token is run again
        c->counts.cached_tokens += cached;
    }
    c->counts.requests++;
    c->counts.prompt_tokens += r->n_prompt + r->suffix.n + choices_count(r);
    c->counts.max_generated_tokens += r->max_tokens;
    sample_offer(c, r);
}

/* Fills in the results: a reply of max_tokens tokens, and a choice that differs from that of the
 * request before it, so that the agents of a debate disagree. */
static void reply_make_up(const struct work_counter *c, struct engine_request *r) {
    int32_t n = r->max_tokens, k = r->n_choices;
    r->n_out = r->n_generated = n;
    r->out = xcalloc((size_t)n + 1, sizeof *r->out);
    r->out_logprob = xcalloc((size_t)n + 1, sizeof *r->out_logprob);
    for (int32_t i = 0; i < n; i++) r->out[i] = c->made_up;
    r->finish = k ? FINISH_CHOICE : FINISH_LENGTH;
    r->choice_prob = xcalloc((size_t)k + 1, sizeof *r->choice_prob);
    r->choice_logprob = xcalloc((size_t)k + 1, sizeof *r->choice_logprob);
    for (int32_t i = 0; i < k; i++) r->choice_prob[i] = 1.0f / (float)k;
    r->choice = k ? (int32_t)(c->counts.requests % k) : 0;
    r->n_prefilled = r->n_prompt + r->suffix.n + (int32_t)choices_count(r);
    r->done = true;
}

int work_counter_run(void *counter, struct engine_request *reqs, int n, struct error *err) {
    struct work_counter *c = counter;
    for (int i = 0; i < n; i++) {
        if (engine_check(c->e, &reqs[i], err) != OK) return err->code;
        work_counter_add(c, &reqs[i]);
        reply_make_up(c, &reqs[i]);
    }
    return log_check_cancelled(err);
}

/* measuring */

struct work_timer {
    struct engine *e;
    struct engine_request *reqs; /* [n] */
    int n;
    /* Results of the last work_run until few requests were left: time, rows run without cached
     * ones, tokens generated; and all tokens generated */
    double seconds;
    int64_t prompt_rows, generated, all_generated;
    bool finished; /* all requests ended before the time was over */
};

static void timer_read(struct work_timer *t, double start, const struct engine_stats *before) {
    struct engine_stats now = engine_stats(t->e);
    t->seconds = clock_now() - start;
    t->prompt_rows = (int64_t)(now.prefilled - before->prefilled);
    t->generated = (int64_t)(now.generated - before->generated);
}

/* Runs the requests, for about `limit` seconds. The time with `few` requests or fewer is not
 * measured: their batch is small. */
static int work_run(struct work_timer *t, double limit, int few, struct error *err) {
    const struct engine_stats before = engine_stats(t->e);
    int n = 0, rc = OK, left = 1;
    double start = clock_now();
    for (; rc == OK && n < t->n; n += rc == OK) rc = engine_submit(t->e, &t->reqs[n], err);
    t->seconds = 0;
    while (rc == OK && left > 0 && clock_now() - start < limit) {
        left = engine_step(t->e);
        if (left > few || t->seconds == 0 || few == 0) timer_read(t, start, &before);
        rc = log_check_cancelled(err);
    }
    t->all_generated = (int64_t)(engine_stats(t->e).generated - before.generated);
    t->finished = rc == OK && left == 0;
    for (int i = 0; i < n; i++) engine_cancel(t->e, &t->reqs[i]);
    return rc;
}

static void results_release(struct work_timer *t) {
    for (int i = 0; i < t->n; i++) engine_request_release(&t->reqs[i]);
}

/* Runs the prompts only, each cut to its last `most` tokens, and moves the requests whose prompts
 * ended to the front of the sample; *n: their number. backwards: in the reverse order of tokens, so
 * that the prefix cache gets no prompt of the sample. */
static int prompts_run(struct work_counter *c, struct work_timer *t, int32_t most, bool backwards,
                       int *n, struct error *err) {
    struct arena arena = {0};
    for (int i = 0; i < c->n_sample; i++) {
        const struct engine_request *r = &c->sample[i];
        int32_t len = MIN(most, r->n_prompt), *v = arena_alloc(&arena, (size_t)len * sizeof *v);
        for (int32_t k = 0; k < len; k++)
            v[k] = r->prompt[backwards ? r->n_prompt - 1 - k : r->n_prompt - len + k];
        t->reqs[i] = (struct engine_request){.prompt = v,
                                             .n_prompt = len,
                                             .adapter = r->adapter,
                                             .mix = r->mix,
                                             .n_mix = r->n_mix,
                                             .sampling = {.top_p = 1},
                                             .max_tokens = 1};
    }
    t->n = c->n_sample;
    int rc = work_run(t, PROMPTS_TIME, 0, err);
    *n = 0;
    for (int i = 0; rc == OK && i < c->n_sample; i++) {
        struct engine_request r = c->sample[i];
        if (t->reqs[i].finish == FINISH_NONE) continue;
        c->sample[i] = c->sample[*n];
        c->sample[(*n)++] = r;
    }
    results_release(t);
    arena_release(&arena);
    return rc;
}

/* The first n requests of the sample with their replies. Their prompts are in the prefix cache.
 * While the command has more requests, its batch stays full, so the end of the replies, when half
 * of them are left, does not count. */
static int replies_run(struct work_counter *c, struct work_timer *t, int n, struct error *err) {
    for (int i = 0; i < n; i++) t->reqs[i] = c->sample[i];
    t->n = n;
    int rc = work_run(t, REPLIES_TIME, c->counts.requests > 2 * (int64_t)n ? n / 2 : 0, err);
    results_release(t);
    return rc;
}

static int64_t max_reply_tokens(const struct work_counter *c, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += c->sample[i].max_tokens;
    return sum;
}

/* Measures prompts and then replies of the sample. */
static int sample_measure(struct work_counter *c, struct work_timer *t, struct work_speed *out,
                          struct error *err) {
    int n, rc = prompts_run(c, t, INT32_MAX, false, &n, err);
    *out = (struct work_speed){
        .prompt_tokens = t->prompt_rows, .prompt_seconds = t->seconds, .reply_share = 1};
    int64_t most = max_reply_tokens(c, n);
    if (rc != OK || n == 0) return rc;
    rc = replies_run(c, t, n, err);
    if (most == 0) { // only choices are left
        out->prompt_tokens += t->prompt_rows;
        out->prompt_seconds += t->seconds;
        return rc;
    }
    double row = out->prompt_seconds / (double)out->prompt_tokens;
    out->generated_tokens = t->generated;
    out->generation_seconds = MAX(t->seconds - row * (double)t->prompt_rows, t->seconds / 4);
    out->replies_ended = t->finished;
    if (t->finished) out->reply_share = (double)t->all_generated / (double)most;
    return rc;
}

/* Measures a model whose first step took long: that step, and one that decodes. */
static int steps_measure(struct work_counter *c, struct work_timer *t, int32_t most,
                         struct work_speed *out, struct error *err) {
    int n;
    *out = (struct work_speed){
        .prompt_tokens = t->prompt_rows, .prompt_seconds = t->seconds, .reply_share = 1};
    if (max_reply_tokens(c, c->n_sample) == 0) return OK;
    int rc = prompts_run(c, t, most, true, &n, err); // cached: one row of each is run again
    out->generated_tokens = t->generated;
    out->generation_seconds = t->seconds;
    return rc;
}

void work_counter_filter(struct work_counter *c,
                         bool (*keep)(void *ctx, const struct engine_request *r), void *ctx) {
    int kept = 0;
    for (int i = 0; i < c->n_sample; i++)
        if (keep(ctx, &c->sample[i]))
            c->sample[kept++] = c->sample[i];
        else
            adapters_drop(&c->sample[i]);
    c->n_sample = kept;
}

int work_counter_measure(struct work_counter *c, struct work_speed *out, struct error *err) {
    struct work_timer t = {.e = c->e};
    int n;
    *out = (struct work_speed){.reply_share = 1};
    if (c->n_sample == 0) return OK;
    t.reqs = xcalloc((size_t)c->n_sample, sizeof *t.reqs);
    int32_t most = MAX(engine_max_rows(c->e) / c->n_sample, 1);
    int rc = prompts_run(c, &t, most, true, &n, err);
    if (rc == OK)
        rc = t.seconds > PROMPTS_TIME ? steps_measure(c, &t, most, out, err)
                                      : sample_measure(c, &t, out, err);
    free(t.reqs);
    return rc;
}

/* Estimated seconds. most: if every reply has the greatest length. */
static double work_seconds(const struct work_counts *w, const struct work_speed *s, bool most) {
    double computed = (double)(w->prompt_tokens - w->cached_tokens),
           generated = (double)w->max_generated_tokens * (most ? 1 : s->reply_share),
           seconds = w->other_seconds;
    if (s->prompt_tokens > 0) seconds += computed * s->prompt_seconds / (double)s->prompt_tokens;
    if (s->generated_tokens > 0)
        seconds += generated * s->generation_seconds / (double)s->generated_tokens;
    return seconds;
}

static json_t *work_json(const struct work_counts *w, const struct work_speed *s) {
    return json_pack(
        "{s:I,s:I,s:I,s:I,s:f,s:I,s:f,s:I,s:f,s:b,s:f}", "requests", (json_int_t)w->requests,
        "prompt_tokens", (json_int_t)w->prompt_tokens, "cached_tokens",
        (json_int_t)w->cached_tokens, "max_generated_tokens", (json_int_t)w->max_generated_tokens,
        "other_seconds", w->other_seconds, "measured_prompt_tokens", (json_int_t)s->prompt_tokens,
        "measured_prompt_seconds", s->prompt_seconds, "measured_generated_tokens",
        (json_int_t)s->generated_tokens, "measured_generation_seconds", s->generation_seconds,
        "replies_ended", (int)s->replies_ended, "reply_share", s->reply_share);
}

void work_plan_add(json_t *plan, const struct work_counts *w, const struct work_speed *s,
                   double more) {
    json_object_set_new(plan, "work", work_json(w, s));
    json_object_set_new(plan, "seconds", json_real(more + work_seconds(w, s, false)));
    json_object_set_new(plan, "max_seconds", json_real(more + work_seconds(w, s, true)));
}
