/*
 * memory: the plan of a training: the memory of its passes, which the options choose
 * (trainer_activation_memory), and less under a memory limit (engine/memory_limit.c).
 *
 * It is made twice. train_memory_check estimates an upper bound from the headers of the model and
 * the sizes of the data files, so that a limit that is far too small is refused before the model is
 * read. train_loop_plan_memory plans before the first step, when model, data and trainer exist and
 * the longest sample is known. Two phases follow one another: the steps (passes of the trainer,
 * perhaps together with an engine) and the measuring of the results.
 */
#define _GNU_SOURCE
#include "train/train_loop.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    ADAPTER_EXTRA_BYTES = 1 << 20, /* structs, hashes of the training data */
    DATA_FACTOR = 8,               /* memory per byte of a data file, with parsing */
    TOKENS_EXTRA = 256,            /* tokens that a chat template may add to a text */
    COMPLETION_TOKEN_BYTES = 64,   /* ids, masks, log-probabilities of a token of a completion */
};

/* An adapter's parameters and their pack. */
static size_t result_bytes(size_t params) {
    return params * 2 * sizeof(float) + ADAPTER_EXTRA_BYTES;
}

size_t train_completions_bytes(int64_t n, int64_t longest) {
    return (size_t)(n * longest) * COMPLETION_TOKEN_BYTES;
}

/* Bytes for the comparison of the results on samples of at most `longest` tokens. */
static size_t measuring_bytes(const struct model_config *c, int64_t longest, struct pool *pool) {
    int32_t len = (int32_t)MIN(longest, c->max_seq_len);
    const struct engine_options replies = {.max_seqs = 1, .max_len = len, .pool = pool};
    return MAX(gate_eval_bytes(c, len, pool), engine_least_bytes(c, &replies));
}

/* Bytes that 8-bit optimizer states would save: a bit less than three quarters of the states. */
static size_t saved_by_8bit(const struct train_loop *c) {
    size_t bytes = 0;
    if (c->o->optim && strcmp(c->o->optim, "adamw") != 0) return 0;
    for (int i = 0; i < c->n; i++) bytes += trainer_optimizer_state_bytes(c->trainer, i);
    return bytes / 10 * 7;
}

static int64_t longest_measured(const struct train_loop *c, int64_t longest) {
    for (int i = 0; i < c->n; i++) longest = MAX(longest, c->jobs[i].longest_measured);
    return longest;
}

/* Bytes after the last step, when the passes are freed: of the measuring, and of results that are
 * not measured. */
static size_t after_steps_bytes(const struct train_loop *c, int64_t longest) {
    size_t results = 0;
    bool measured = false;
    for (int i = 0; i < c->n; i++) {
        measured |= !c->jobs[i].unmeasured;
        if (c->jobs[i].unmeasured) results += c->initial_adapters[i]->n_data * sizeof(float);
    }
    if (measured) results += measuring_bytes(&c->m->config, longest_measured(c, longest), c->pool);
    return results;
}

/* The least memory of the phases, besides m->other; sets m->pass to the smallest passes. */
static size_t phases_least(struct train_loop *c, const struct train_memory_needs *n) {
    const struct model_config *shape = &c->m->config;
    size_t engine = n->engine ? engine_least_bytes(shape, n->engine) : 0;
    c->memory.pass = (struct trainer_passes){0};
    if (n->together > 0)
        trainer_limit_passes(c->trainer, 0, PACK_MAX_TOKENS, n->together, n->longest,
                             &c->memory.pass);
    return MAX(c->memory.pass.bytes + engine, after_steps_bytes(c, n->longest));
}

/* The longest samples that fit into `room` bytes, found by halving them; 0: not even short ones. */
static int64_t length_that_fits(struct train_loop *c, const struct train_memory_needs *n,
                                size_t room, size_t *least) {
    enum { SHORTEST = 64 };
    struct train_memory_needs shorter = *n;
    while ((shorter.longest /= 2) >= SHORTEST) {
        shorter.together /= 2;
        if ((*least = phases_least(c, &shorter)) <= room) return shorter.longest;
    }
    return 0;
}

/* Refuses a limit that is too small, with an option that would make the training fit. */
static int limit_check(struct train_loop *c, const struct train_memory_needs *n, size_t least,
                       struct error *err) {
    size_t room = memory_room(c->m), all = least + c->memory.other, shorter_least,
           saved = MIN(saved_by_8bit(c), all);
    if (all <= room) return OK;
    char *what = xasprintf("training on samples of up to %lld tokens", (long long)n->longest),
         *remedy = saved ? xstrdup("use --optim adamw_8bit") : NULL;
    if (all - saved > room) {
        size_t left = room - MIN(room, c->memory.other);
        int64_t length = length_that_fits(c, n, left, &shorter_least);
        if (length > 0) {
            free(remedy);
            remedy = xasprintf("use --max-length %lld", (long long)length);
            saved = least - shorter_least;
        }
    }
    const struct memory_step need = {.what = what, .least = all, .remedy = remedy, .saved = saved};
    int rc = memory_check(c->m, &need, err);
    free(what);
    free(remedy);
    return rc;
}

/* Bytes of the engine that samples completions: enough for the batches that a processor computes
 * fast, even if more memory is available. */
static size_t engine_budget(const struct train_memory_needs *n, const struct model_config *shape,
                            size_t room) {
    enum { ENGINE_BYTES = 1 << 30 };
    return MIN(room, MAX(ENGINE_BYTES, engine_least_bytes(shape, n->engine)));
}

int train_loop_plan_memory(struct train_loop *c, const struct train_memory_needs *n,
                           struct error *err) {
    const struct model_config *shape = &c->m->config;
    struct train_memory *m = &c->memory;
    *m = (struct train_memory){.limit = memory_limit_get(), .other = n->other};
    for (int i = 0; i < c->n; i++)
        m->other += c->jobs[i].unmeasured ? ADAPTER_EXTRA_BYTES
                                          : result_bytes(c->initial_adapters[i]->n_data);
    size_t least = phases_least(c, n);
    if (limit_check(c, n, least, err) != OK) return err->code;
    m->used = memory_used(c->m);
    size_t after = after_steps_bytes(c, n->longest),
           room = m->limit ? m->limit - m->used - m->other : SIZE_MAX, passes = room;
    if (n->engine) {
        passes -= engine_least_bytes(shape, n->engine);
        passes = m->pass.bytes + (passes - m->pass.bytes) / 2;
    }
    if (n->together > 0) {
        size_t wanted = trainer_activation_memory(c->trainer, c->o, n->longest);
        passes = MIN(passes, MAX(wanted, m->pass.bytes));
        CHECK(trainer_limit_passes(c->trainer, passes, PACK_MAX_TOKENS, n->together, n->longest,
                                   &m->pass));
        c->pass_tokens = m->pass.rows;
    }
    if (n->engine) {
        engine_options_fit(shape, n->engine, engine_budget(n, shape, room - m->pass.bytes));
        m->engine = engine_bytes(shape, n->engine);
    }
    m->passes = m->pass.bytes + m->engine < after ? after - m->engine : m->pass.bytes;
    return OK;
}

/* before model and data are read */

static size_t file_size(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? (size_t)st.st_size : 0;
}

size_t train_longest_sample(const char *path) {
    size_t longest = 0, cap = 0;
    ssize_t n;
    char *line = NULL;
    if (!path_has_extension(path, ".jsonl")) return file_size(path);
    FILE *f = fopen(path, "re");
    while (f && (n = getline(&line, &cap, f)) >= 0) longest = MAX(longest, (size_t)n);
    if (f) fclose(f);
    free(line);
    return longest;
}

/* The path in FILE or NAME=FILE. */
static const char *file_of(const char *text) {
    const char *equals = strchr(text, '=');
    return equals ? equals + 1 : text;
}

/* Measures a list of FILE and NAME=FILE: the sum of their sizes, and the longest sample. */
static void files_measure(const struct strings *files, size_t *sum, size_t *longest) {
    for (int i = 0; i < files->n; i++) {
        *sum += file_size(file_of(files->v[i]));
        *longest = MAX(*longest, train_longest_sample(file_of(files->v[i])));
    }
}

/* Most tokens of a sample. A text has at most as many tokens as bytes. */
static int64_t longest_possible(const struct train_settings *s, const struct model_config *c,
                                size_t longest_sample) {
    int64_t longest = c->max_seq_len;
    if (longest_sample > 0) longest = MIN(longest, (int64_t)longest_sample + TOKENS_EXTRA);
    return s->train.max_length > 0 ? MIN(longest, s->train.max_length) : longest;
}

/* The bytes of a method besides the trainer. */
static size_t method_bytes(const struct train_settings *s, const struct model_config *c,
                           const struct adapter_config *a, int64_t longest, struct pool *pool) {
    struct train_options o = s->train;
    enum train_method method;
    struct error ignored; // the settings are checked
    CHECK(train_method_parse(s->method, &method, &ignored) == OK);
    train_options_fix(&o);
    int64_t samples = o.bsz * o.grad_accum * s->data.n;
    if (method == METHOD_ES) return es_bytes_bound(c, &s->es, a, longest, samples * longest);
    if (method <= METHOD_DPO) return 0;
    const struct engine_options engine = {.max_seqs = 1, .max_len = (int32_t)longest, .pool = pool};
    size_t params = adapter_param_count(c, a);
    return engine_least_bytes(c, &engine) + (size_t)s->data.n * 4 * result_bytes(params) +
           train_completions_bytes(samples * s->policy.num_generations, longest);
}

int train_memory_bounds(const struct train_options *o, int n, const struct model_size *size,
                        enum numeric_class cls, int64_t longest, struct pool *pool,
                        struct train_memory_bounds *out, struct error *err) {
    const struct model_config *c = &size->config;
    struct adapter_config a;
    *out = (struct train_memory_bounds){0};
    int rc = train_adapter_config(o, c, &a, err);
    if (rc == OK) {
        size_t extra = (size_t)n * ADAPTER_EXTRA_BYTES,
               after = trainer_least_bytes(c, cls, &a, n, o, pool, 1) +
                       (size_t)n * adapter_param_count(c, &a) * sizeof(float);
        out->least = MAX(trainer_least_bytes(c, cls, &a, n, o, pool, longest), after) + extra;
        out->most =
            MAX(trainer_most_bytes(c, cls, &a, n, o, pool, longest, size->weights), after) + extra;
    }
    adapter_config_release(&a);
    return rc;
}

/* Everything except the model, for samples of `longest` tokens: the larger of the two phases, and
 * the results. A trainer for samples of one token has little besides its states. */
static int training_bytes(const struct train_settings *s, const struct model_size *size,
                          enum numeric_class cls, int64_t longest, struct pool *pool, size_t *out,
                          struct error *err) {
    const struct model_config *c = &size->config;
    int n = s->data.n;
    struct adapter_config a;
    *out = 0;
    int rc = train_adapter_config(&s->train, c, &a, err);
    if (rc == OK) {
        size_t steps = trainer_least_bytes(c, cls, &a, n, &s->train, pool, longest) +
                       method_bytes(s, c, &a, longest, pool),
               after = trainer_least_bytes(c, cls, &a, n, &s->train, pool, 1) +
                       measuring_bytes(c, longest, pool);
        *out = MAX(steps, after) + (size_t)n * result_bytes(adapter_param_count(c, &a));
    }
    adapter_config_release(&a);
    return rc;
}

int train_memory_check(const struct train_settings *s, const struct model_size *size,
                       enum numeric_class cls, struct pool *pool, struct error *err) {
    size_t model = model_loading_bytes(size), files = 0, longest = 0, least, enough;
    if (training_bytes(s, size, cls, 1, pool, &least, err) != OK) return err->code;
    if (model + least <= memory_room(NULL)) return OK;
    files_measure(&s->data, &files, &longest);
    files_measure(&s->gate.eval_data, &files, &longest);
    files_measure(&s->gate.retain_data, &files, &longest);
    training_bytes(s, size, cls, longest_possible(s, &size->config, longest), pool, &enough, err);
    /* The initial adapter may have a larger rank than the options. */
    struct adapter_size start = {0};
    if (s->init_adapter && adapter_measure(s->init_adapter, DTYPE_F32, &start, err) != OK)
        return err->code;
    const struct memory_step need = {
        .what = model ? "this training with its model" : "this training",
        .least = model + enough + files * DATA_FACTOR + 4 * start.resident + start.while_loading};
    return memory_check(NULL, &need, err);
}

int train_data_check(const struct train_settings *s, struct error *err) {
    const struct strings *lists[] = {&s->data, &s->gate.eval_data, &s->gate.retain_data};
    struct memory_step need = {.what = "reading the data"};
    for (size_t i = 0; i < ARRAY_LEN(lists); i++)
        for (int k = 0; k < lists[i]->n; k++)
            need.least += file_size(file_of(lists[i]->v[k])) * DATA_FACTOR;
    return memory_check(NULL, &need, err);
}

/* the plan as text and JSON */

void train_memory_text(const struct train_memory *m, struct buf *out) {
    const double mb = 1 << 20;
    buf_printf(out, "memory: %.1f MB", (double)(m->used + m->passes + m->engine + m->other) / mb);
    if (m->limit) buf_printf(out, " of %.1f", (double)m->limit / mb);
    buf_printf(out, ": %.1f in use", (double)m->used / mb);
    if (m->passes) buf_printf(out, ", %.1f for ", (double)m->passes / mb);
    if (m->passes && m->pass.rows > 0)
        buf_printf(out, "passes of up to %lld tokens%s", (long long)m->pass.rows,
                   m->pass.checkpointing ? " with gradient checkpointing" : "");
    else if (m->passes)
        buf_puts(out, "measuring");
    if (m->engine) buf_printf(out, ", %.1f for the engine", (double)m->engine / mb);
    if (m->other) buf_printf(out, ", %.1f for the rest", (double)m->other / mb);
}

json_t *train_memory_json(const struct train_memory *m) {
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:b}", "limit", (json_int_t)m->limit, "used",
                     (json_int_t)m->used, "passes", (json_int_t)m->passes, "engine",
                     (json_int_t)m->engine, "other", (json_int_t)m->other, "pass_tokens",
                     (json_int_t)m->pass.rows, "gradient_checkpointing",
                     (int)m->pass.checkpointing);
}
