/*
 * pretrain: trains a small base model from scratch, first its tokenizer, then its weights, on the
 * train split of the task families (families/). The weights see the common variants of the items
 * only.
 *
 * A recipe is one YAML mapping (pretrain_option_rows). Every sample is a pure function of (seed,
 * update, row), so the stream of samples has no state: a checkpoint holds the trainer and the
 * number of updates done, and a resumed run ends with the bits of an uninterrupted one. Pretraining
 * needs no network and no corpus.
 */
#define _GNU_SOURCE
#include "train/train.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct pretrain_options, field), fallback, min, max, metavar, help }

const struct option_row pretrain_option_rows[] = {
    ROW("shape", OPT_STRING, shape, "fry", 0, 0, "NAME", "model shape, as in 'shoal model new'"),
    ROW("vocab", OPT_INT, vocab, "768", 300, 65536, "N",
        "tokens in the tokenizer that is trained first"),
    ROW("tokenizer-items", OPT_INT, tokenizer_items, "2000", 100, 1e6, "N",
        "items of each family that the tokenizer is trained on"),
    ROW("mix", OPT_LIST, mix, NULL, 0, 0, "FAMILY=WEIGHT",
        "families and their fraction of the samples"),
    ROW("steps", OPT_INT, steps, "6000", 1, 1e9, "N", "updates"),
    ROW("rows", OPT_INT, rows, "2048", 64, 1e6, "N", "approximate tokens per update"),
    ROW("lr", OPT_FLOAT, lr, "0.003", 0, 1, "RATE", "peak learning rate"),
    ROW("min-lr-ratio", OPT_FLOAT, min_lr_ratio, "0.05", 0, 1, "X",
        "final learning rate as a fraction of the peak"),
    ROW("warmup-steps", OPT_INT, warmup_steps, "100", 0, 1e9, "N", "updates of linear warm-up"),
    ROW("beta2", OPT_FLOAT, beta2, "0.98", 0, 0.9999999, "X", "AdamW's second decay"),
    ROW("weight-decay", OPT_FLOAT, weight_decay, "0.05", 0, 1, "X",
        "decoupled weight decay, of matrices only"),
    ROW("max-grad-norm", OPT_FLOAT, max_grad_norm, "1.0", 0, 1e9, "X", "clip the gradient's norm"),
    ROW("chain-of-thought-fraction", OPT_FLOAT, chain_of_thought, "0.2", 0, 1, "X",
        "fraction of samples with a chain of thought"),
    ROW("debate", OPT_FLOAT, debate, "0.12", 0, 1, "X",
        "fraction of samples that revise an answer after a debate"),
    ROW("drill", OPT_FLOAT, drill, "0.2", 0, 1, "X",
        "fraction of samples that copy 6 to 14 letters and numbers"),
    ROW("system", OPT_FLOAT, system, "0.3", 0, 1, "X",
        "fraction of samples with a persona's system prompt"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of weights and samples"),
    ROW("eval-every", OPT_INT, eval_every, "500", 0, 1e9, "N",
        "updates between accuracy lines; 0: never"),
    ROW("eval-items", OPT_INT, eval_items, "200", 1, 1e6, "N",
        "dev items per family for an accuracy line"),
    ROW("save-every", OPT_INT, save_every, "500", 1, 1e9, "N", "updates between checkpoints"),
    {0},
};
#undef ROW

struct pretrain {
    struct pretrain_options o;
    enum numeric_class cls;
    /* [family] its weight; sum of the shares up to this family */
    double weight[FRY_MAX_FAMILIES], cumulative_share[FRY_MAX_FAMILIES];
    struct model *model;
    struct trainer *trainer;
    struct pool *pool;
    const char *dir;
    char *checkpoint;
    FILE *log;      /* log.jsonl */
    double started; /* time of clock_now */
};

static int parse_mix(struct pretrain *p, struct error *err) {
    double *weight = p->weight, total = 0;
    for (int i = 0; i < fry_count() && p->o.mix.n == 0; i++) weight[i] = 1;
    for (int i = 0; i < p->o.mix.n; i++) {
        const char *entry = p->o.mix.v[i], *eq = strchr(entry, '=');
        char *name = eq ? strndup(entry, (size_t)(eq - entry)) : xstrdup(entry), *end = NULL;
        int family = fry_find(name);
        double w = eq ? strtod(eq + 1, &end) : 1;
        free(name);
        if (family < 0) return error_set(err, ERR_USAGE, "mix: no task family in '%s'", entry);
        if ((eq && *end) || !(w >= 0))
            return error_set(err, ERR_USAGE, "mix: bad weight in '%s'", entry);
        weight[family] = w;
    }
    for (int i = 0; i < family_count(); i++) total += weight[i];
    if (total <= 0) return error_set(err, ERR_USAGE, "mix: all weights are zero");
    double sum = 0;
    for (int i = 0; i < family_count(); i++) p->cumulative_share[i] = (sum += weight[i]) / total;
    return OK;
}

/* Whether the tokenizer is trained on a family and its accuracy is logged: those of the mix, and all
 * of the starter model. */
static bool is_trained(const struct pretrain *p, int family) {
    return family < fry_count() || p->weight[family] > 0;
}

static int sample_family(const struct pretrain *p, struct rng *r) {
    double u = rng_uniform(r);
    for (int i = 0; i < family_count(); i++)
        if (u < p->cumulative_share[i]) return i;
    return family_count() - 1;
}

/* The right answer with probability p, else a random wrong one. */
static const char *noisy_answer(struct rng *r, const struct task_item *it, float p) {
    if (rng_uniform(r) < p) return it->choices[it->correct];
    int wrong = (int)rng_below(r, (uint32_t)it->n_choices - 1);
    return it->choices[wrong + (wrong >= it->correct)];
}

struct conversation_text {
    struct chat_message msgs[6];
    char *allocated[3]; /* contents of messages, which conversation_release frees; NULL: unused */
    int n;
};

/* The conversation of one sample; only its last turn is a target. */
static struct conversation_text sample_conversation(const struct pretrain_options *o, struct rng *r,
                                                    const struct task_item *it) {
    struct conversation_text conversation = {0};
    if (rng_uniform(r) < o->system)
        conversation.msgs[conversation.n++] =
            (struct chat_message){"system", fry_personas[rng_below(r, 3)].system};
    conversation.msgs[conversation.n++] = (struct chat_message){"user", it->question};
    if (rng_uniform(r) < o->debate) {
        conversation.allocated[0] = xasprintf(ANSWER_PREFIX " %s", noisy_answer(r, it, 0.6f));
        conversation.allocated[1] = fry_debate_turn(
            (const char *[]){noisy_answer(r, it, 0.6f), noisy_answer(r, it, 0.6f)}, 2);
        conversation.msgs[conversation.n++] =
            (struct chat_message){"assistant", conversation.allocated[0]};
        conversation.msgs[conversation.n++] =
            (struct chat_message){"user", conversation.allocated[1]};
    }
    bool has_work = *it->work && rng_uniform(r) < o->chain_of_thought;
    conversation.allocated[2] = has_work ? xasprintf(WORK_PREFIX " %s\n" ANSWER_PREFIX " %s",
                                                     it->work, it->choices[it->correct])
                                         : xasprintf(ANSWER_PREFIX " %s", it->choices[it->correct]);
    conversation.msgs[conversation.n++] =
        (struct chat_message){"assistant", conversation.allocated[2]};
    return conversation;
}

static void conversation_release(struct conversation_text *conversation) {
    for (int i = 0; i < 3; i++) free(conversation->allocated[i]);
}

/* Makes an exercise: repeat a text that is longer than in any task. The exercise trains attention
 * to earlier tokens, which every family needs first. */
static void copy_task_item(struct rng *r, struct task_item *out) {
    struct buf text = {0};
    for (int i = 0, n = 6 + (int)rng_below(r, 9); i < n; i++) {
        if (i) buf_puts(&text, " ");
        if (rng_below(r, 3))
            buf_printf(&text, "%c", 'a' + (char)rng_below(r, 26));
        else
            buf_printf(&text, "%u", rng_below(r, rng_below(r, 2) ? 100 : 10000));
    }
    *out = (struct task_item){.question = xasprintf("repeat: %s", text.data),
                              .work = xstrdup(""),
                              .key = xstrdup(""),
                              .n_choices = 2,
                              .choices = {text.data, xstrdup("?")}};
}

static struct train_sample make_sample(const struct pretrain *p, uint32_t update, uint32_t row) {
    struct rng r = rng_make((uint64_t)p->o.seed, RNG_DATA, update, row);
    struct task_item it;
    if (rng_uniform(&r) < p->o.drill)
        copy_task_item(&r, &it);
    else
        fry_item(sample_family(p, &r), SPLIT_TRAIN, (uint64_t)p->o.seed, rng_u32(&r), true, &it);
    struct conversation_text conversation = sample_conversation(&p->o, &r, &it);
    struct token_ids ids = {0};
    struct buf mask = {0};
    struct error err;
    CHECK(chat_encode(p->model->tok, conversation.msgs, conversation.n, false, &ids, &mask, &err) ==
          OK); /* ChatML */
    int last = ids.n;
    while (last > 0 && !mask.data[last - 1])
        last--; /* the newline after the last turn is not a target */
    int first = last;
    while (first > 0 && mask.data[first - 1]) first--;
    memset(mask.data, 0, (size_t)first);
    conversation_release(&conversation);
    task_item_release(&it);
    return (struct train_sample){.tokens = ids.v, .mask = (uint8_t *)mask.data, .n = last};
}

static int train_update(struct pretrain *p, uint32_t update, struct update_stats *st,
                        struct error *err) {
    struct train_sample v[4096];
    int n = 0, rows = 0;
    while (n < (int)ARRAY_LEN(v) && rows < p->o.rows) {
        v[n] = make_sample(p, update, (uint32_t)n);
        rows += v[n++].n;
    }
    int rc = trainer_accumulate(p->trainer, v, n, err);
    for (int i = 0; i < n; i++) train_sample_release(&v[i]);
    float lr = lr_schedule_at(LR_COSINE, p->o.lr, p->o.min_lr_ratio, update, p->o.warmup_steps,
                              p->o.steps);
    return rc == OK ? trainer_update(p->trainer, lr, st, err) : rc;
}

static struct tokenizer *train_tokenizer(const struct pretrain *p, struct error *err) {
    static const char *specials[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    struct buf text = {0};
    for (int f = 0; f < family_count(); f++)
        for (uint32_t i = 0; is_trained(p, f) && i < (uint32_t)p->o.tokenizer_items; i++) {
            struct rng r = rng_make((uint64_t)p->o.seed, RNG_TEST, (uint32_t)f, i);
            struct task_item it;
            fry_item(f, SPLIT_TRAIN, (uint64_t)p->o.seed, i, false, &it);
            struct conversation_text conversation = sample_conversation(&p->o, &r, &it);
            for (int k = 0; k < conversation.n; k++)
                buf_printf(&text, "<|im_start|>%s\n%s<|im_end|>\n", conversation.msgs[k].role,
                           conversation.msgs[k].content);
            conversation_release(&conversation);
            task_item_release(&it);
        }
    log_info("training a tokenizer of %d tokens on %zu bytes", (int)p->o.vocab, text.len);
    struct tokenizer *t =
        tokenizer_train_bpe(text.data, text.len, (int32_t)p->o.vocab, "smollm", specials, 3, err);
    buf_release(&text);
    return t;
}

static int log_accuracy(struct pretrain *p, int64_t update, struct error *err) {
    struct engine_options eo = {.max_rows = 512, .max_seqs = 256, .max_len = 256, .pool = p->pool};
    struct engine *e = engine_new(p->model, &eo, err);
    json_t *line = json_pack("{s:I}", "accuracy_at", (json_int_t)update);
    struct buf text = {0};
    int rc = e ? OK : err->code;
    for (int f = 0; rc == OK && f < family_count(); f++) {
        if (!is_trained(p, f)) continue;
        struct eval_score s = {0};
        rc = eval_run_family(e, p->model->tok, f, SPLIT_DEV, (uint64_t)p->o.seed,
                             (int32_t)p->o.eval_items, NULL, false, NULL, &s, NULL, err);
        double acc = (double)s.correct / (double)MAX(s.n, 1);
        json_object_set_new(line, fry_families[f]->name, json_real(acc));
        buf_printf(&text, " %s %.0f%%", fry_families[f]->name, 100 * acc);
    }
    if (rc == OK) {
        char *dump = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(4));
        fprintf(p->log, "%s\n", dump);
        fflush(p->log);
        free(dump);
        log_info("after %d updates:%s", (int)update, text.data);
    }
    json_decref(line);
    buf_release(&text);
    engine_free(e);
    return rc;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int train_all(struct pretrain *p, struct error *err) {
    struct progress bar;
    struct update_stats st = {0};
    int64_t tokens = 0, first = trainer_update_count(p->trainer);
    char detail[96];
    progress_start(&bar, "pretrain", p->o.steps);
    for (int64_t u = first; u < p->o.steps; u++) {
        if (train_update(p, (uint32_t)u, &st, err) != OK)
            return error_wrap(err, "update %d", (int)u + 1);
        tokens += st.tokens;
        double seconds = clock_now() - p->started;
        if (u % 10 == 9 || u + 1 == p->o.steps) {
            fprintf(p->log,
                    "{\"update\":%d,\"loss\":%.5f,\"grad_norm\":%.4f,\"tokens_per_s\":%.0f,"
                    "\"seconds\":%.1f,\"cpu_seconds\":%.1f}\n",
                    (int)u + 1, st.loss, st.grad_norm, (double)tokens / seconds, seconds,
                    cpu_seconds());
            fflush(p->log);
        }
        snprintf(detail, sizeof detail, "loss %.4f, %.0f tokens/s", st.loss,
                 (double)tokens / seconds);
        progress_update(&bar, u + 1, detail);
        bool last = u + 1 == p->o.steps;
        if (p->o.eval_every && ((u + 1) % p->o.eval_every == 0 || last) &&
            log_accuracy(p, u + 1, err) != OK)
            return err->code;
        if ((u + 1) % p->o.save_every == 0 && !last &&
            trainer_save(p->trainer, p->checkpoint, NULL, err) != OK)
            return err->code;
    }
    progress_finish(&bar, detail);
    return OK;
}

static int pretrain_open(struct pretrain *p, struct error *err) {
    struct model_config c;
    if (model_preset_find(p->o.shape, &c, err) != OK) return err->code;
    struct tokenizer *tok = train_tokenizer(p, err);
    if (!tok) return err->code;
    c.vocab_size = tokenizer_vocab_size(tok);
    p->model = model_new_random(&c, (uint64_t)p->o.seed, p->cls);
    tokenizer_free(p->model->tok);
    p->model->tok = tok;
    struct train_options to;
    options_default(train_option_rows, &to);
    to.beta2 = p->o.beta2;
    to.weight_decay = p->o.weight_decay;
    to.max_grad_norm = p->o.max_grad_norm;
    to.seed = p->o.seed;
    p->trainer = trainer_new_full(p->model, &to, p->pool, err);
    options_release(train_option_rows, &to);
    if (!p->trainer) return err->code;
    log_info("%s: %.2f million parameters, %d updates of about %d tokens", p->o.shape,
             1e-6 * (double)model_param_count(&c), (int)p->o.steps, (int)p->o.rows);
    if (!path_exists(p->checkpoint)) return OK;
    log_info("continuing from '%s'", p->checkpoint);
    return trainer_load(p->trainer, p->checkpoint, NULL, err);
}

/* with AdamW in f32: a weight, its gradient and two moments */
enum { BYTES_PER_PARAMETER = 16 };

json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, struct error *err) {
    struct pretrain p = {.o = *o};
    struct model_config c;
    if (parse_mix(&p, err) != OK || model_preset_find(o->shape, &c, err) != OK) return NULL;
    c.vocab_size = (int32_t)o->vocab;
    int64_t n = model_param_count(&c);
    char *checkpoint = path_join(dir, "checkpoint.bin");
    json_t *v = json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:o,s:b}", "shape", o->shape, "parameters",
                          (json_int_t)n, "updates", (json_int_t)o->steps, "tokens, about",
                          (json_int_t)(o->steps * o->rows), "bytes at least",
                          (json_int_t)(n * BYTES_PER_PARAMETER), "bytes written",
                          (json_int_t)(n * (int64_t)sizeof(float)), "writes", json_from_path(dir),
                          "continues", (int)path_exists(checkpoint));
    free(checkpoint);
    return v;
}

int pretrain_run(const struct pretrain_options *o, const char *dir, enum numeric_class cls,
                 struct pool *pool, struct error *err) {
    struct pretrain p = {.o = *o, .cls = cls, .pool = pool, .dir = dir, .started = clock_now()};
    p.checkpoint = path_join(dir, "checkpoint.bin");
    char *log = path_join(dir, "log.jsonl");
    int rc = parse_mix(&p, err), lock = -1;
    if (rc == OK) rc = dir_make(dir, err);
    if (rc == OK && (lock = dir_lock(dir, "folder", err)) < 0) rc = lock;
    if (rc == OK && !(p.log = fopen(log, path_exists(p.checkpoint) ? "a" : "w")))
        rc = error_errno(err, "cannot write '%s'", log);
    if (rc == OK) rc = pretrain_open(&p, err);
    if (rc == OK) rc = train_all(&p, err);
    if (rc == OK) rc = model_write_hf(p.model, dir, TENSOR_F32, err);
    if (rc == OK) unlink(p.checkpoint);
    dir_unlock(lock, dir);
    trainer_free(p.trainer);
    model_close(p.model);
    if (p.log) fclose(p.log);
    free(log);
    free(p.checkpoint);
    return rc;
}
