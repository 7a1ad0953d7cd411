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
#include "train/train_loop.h"

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
    ROW("special-tokens", OPT_LIST, special_tokens, NULL, 0, 0, "TOKEN",
        "tokens besides those of ChatML; <|NAME|> is a control token, others have their text"),
    ROW("prose", OPT_INT, prose, "0", 0, 1000, "N",
        "times that the tokenizer reads everyday sentences in three languages"),
    ROW("chat-template", OPT_STRING, chat_template, NULL, 0, 0, "FILE",
        "chat template (Jinja), relative to the recipe; default: ChatML"),
    ROW("mix", OPT_LIST, mix, NULL, 0, 0, "FAMILY=WEIGHT",
        "families and their fraction of the samples"),
    ROW("final-mix", OPT_LIST, final_mix, NULL, 0, 0, "FAMILY=WEIGHT",
        "the mix of the last updates; default: mix"),
    ROW("final-mix-from", OPT_INT, final_mix_from, "0", 0, 1e9, "N",
        "the number of updates before those of final-mix"),
    ROW("conclusions", OPT_BOOL, conclusions, "true", 0, 0, NULL,
        "derivations end with their conclusions; those of final-mix always do"),
    ROW("final-chain-of-thought-fraction", OPT_FLOAT, final_chain_of_thought, "-1", -1, 1, "X",
        "chain-of-thought-fraction of final-mix; -1: the same"),
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
    ROW("think", OPT_FLOAT, think, "0", 0, 1, "X",
        "fraction of the chains of thought that are in <think> tags"),
    ROW("multi-turn", OPT_FLOAT, multi_turn, "0", 0, 1, "X",
        "fraction of samples with several questions"),
    ROW("debate", OPT_FLOAT, debate, "0.12", 0, 1, "X",
        "fraction of samples that revise an answer after a debate"),
    ROW("drill", OPT_FLOAT, drill, "0.2", 0, 1, "X",
        "fraction of samples that copy 6 to 14 letters and numbers, before final-mix"),
    ROW("system", OPT_FLOAT, system, "0.3", 0, 1, "X",
        "fraction of samples with a persona's system prompt"),
    ROW("dtype", OPT_STRING, dtype, "f32", 0, 0, "TYPE",
        "type of the written weights: f32, bf16 or f16"),
    ROW("kv-cache-dtype", OPT_STRING, kv_cache_dtype, "auto", 0, 0, "ELEM",
        "number format of keys and values, in training and for accuracy lines: f32, bf16, f16, i8 "
        "or auto (f16; bf16 where attention runs in bf16)"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of weights and samples"),
    ROW("eval-every", OPT_INT, eval_every, "500", 0, 1e9, "N",
        "updates between accuracy lines; 0: never"),
    ROW("eval-items", OPT_INT, eval_items, "200", 1, 1e6, "N",
        "dev items per family for an accuracy line"),
    ROW("max-memory", OPT_STRING, max_memory, NULL, 0, 0, "SIZE",
        "memory limit of the process, such as 500M or 2G; weights are the same with every limit"),
    ROW("save-every", OPT_INT, save_every, "500", 1, 1e9, "N", "updates between checkpoints"),
    {0},
};
#undef ROW

enum { MAX_TURNS = 8 }; /* questions of one sample */

/* The source of the samples: [family] its weight, and the sum of the shares up to it; fractions
 * of exercises and of chains of thought. */
struct mix {
    double weight[MAX_FAMILIES], cumulative_share[MAX_FAMILIES];
    double drill, chain_of_thought;
    bool conclusions; /* derivations have conclusions */
};

struct pretrain {
    struct pretrain_options o;
    enum numeric_class cls;
    enum dtype kv; /* type of keys and values: that of the checkpoint, if there is one */
    struct mix mix, final_mix;
    struct model *model;
    struct trainer *trainer;
    struct pool *pool;
    const char *dir;
    char *checkpoint;
    FILE *log;                                 /* log.jsonl */
    struct event_file *events;                 /* NULL: no event files */
    double started;                            /* time of clock_now */
    double seconds_before, cpu_seconds_before; /* the sums of earlier processes, from the log */
};

/* Parses the entries of the option `key`; without entries, the families of the first starter model
 * have equal weights. */
static int mix_parse(struct mix *mix, const char *key, const struct strings *entries,
                     struct error *err) {
    double *weight = mix->weight, total = 0;
    for (int i = 0; i < fry_count() && entries->n == 0; i++) weight[i] = 1;
    for (int i = 0; i < entries->n; i++) {
        const char *entry = entries->v[i], *eq = strchr(entry, '=');
        char *name = eq ? strndup(entry, (size_t)(eq - entry)) : xstrdup(entry), *end = NULL;
        int family = family_find(name);
        double w = eq ? strtod(eq + 1, &end) : 1;
        free(name);
        if (family < 0) return error_set(err, ERR_USAGE, "%s: no task family in '%s'", key, entry);
        if ((eq && *end) || !(w >= 0))
            return error_set(err, ERR_USAGE, "%s: bad weight in '%s'", key, entry);
        weight[family] = w;
    }
    for (int i = 0; i < family_count(); i++) total += weight[i];
    if (total <= 0) return error_set(err, ERR_USAGE, "%s: all weights are zero", key);
    double sum = 0;
    for (int i = 0; i < family_count(); i++) mix->cumulative_share[i] = (sum += weight[i]) / total;
    return OK;
}

static int mixes_parse(struct pretrain *p, struct error *err) {
    const struct pretrain_options *o = &p->o;
    double final = o->final_chain_of_thought;
    p->mix = (struct mix){
        .drill = o->drill, .chain_of_thought = o->chain_of_thought, .conclusions = o->conclusions};
    p->final_mix = (struct mix){.chain_of_thought = final < 0 ? o->chain_of_thought : final,
                                .conclusions = true};
    if (mix_parse(&p->mix, "mix", &o->mix, err) != OK) return err->code;
    if (o->final_mix.n > 0) return mix_parse(&p->final_mix, "final_mix", &o->final_mix, err);
    p->final_mix = p->mix;
    return OK;
}

static int sample_family(const struct mix *mix, struct rng *r) {
    double u = rng_uniform(r);
    for (int i = 0; i < family_count(); i++)
        if (u < mix->cumulative_share[i]) return i;
    return family_count() - 1;
}

/* Whether a family has samples. */
static bool trains_on(const struct pretrain *p, int family) {
    return p->mix.weight[family] > 0 || p->final_mix.weight[family] > 0;
}

/* Tokens of the longest item of the accuracy lines. */
static int32_t longest_item(const struct pretrain *p, const struct model_config *c) {
    bool pick[MAX_FAMILIES] = {false};
    for (int f = 0; f < family_count(); f++) pick[f] = trains_on(p, f);
    return families_max_tokens(pick, c->max_seq_len);
}

/* Refuses --max-model-len if the shape has less, or if an item has more. */
static int limits_check(const struct pretrain *p, const struct model_config *c, struct error *err) {
    const struct engine_limits *l = &p->o.limits;
    if (engine_limits_check(l, c->max_seq_len, err) != OK) return err->code;
    return engine_limits_require(l, longest_item(p, c), "an item of the mix", err);
}

/* The right answer with probability p, else a random wrong one. */
static const char *noisy_answer(struct rng *r, const struct task_item *it, float p) {
    if (rng_uniform(r) < p) return it->choices[it->correct];
    int wrong = (int)rng_below(r, (uint32_t)it->n_choices - 1);
    return it->choices[wrong + (wrong >= it->correct)];
}

/* The assistant's reply to an item, malloc'ed. A chain of thought is in the tags of reasoning or
 * follows WORK_PREFIX. */
static char *reply_text(const struct pretrain *p, const struct mix *mix, struct rng *r,
                        const struct task_item *it) {
    bool work = !it->whole_replies && *it->work && rng_uniform(r) < mix->chain_of_thought;
    if (!work) return task_item_reply(it, false);
    bool think = rng_uniform(r) < p->o.think;
    char *derivation = mix->conclusions ? task_item_work(it) : xstrdup(it->work),
         *reply = xasprintf(think ? "<think>\n%s\n</think>\n\n" ANSWER_PREFIX " %s"
                                  : WORK_PREFIX " %s\n" ANSWER_PREFIX " %s",
                            derivation, it->choices[it->correct]);
    free(derivation);
    return reply;
}

/* A conversation of which the assistant's last turn is a target, or every turn. */
struct sample_chat {
    json_t *messages, *tools; /* tools: may be NULL */
    bool only_last_turn;      /* an earlier turn may be wrong */
};

static void sample_chat_release(struct sample_chat *chat) {
    json_decref(chat->messages);
    json_decref(chat->tools);
}

static void messages_add_owned(json_t *messages, const char *role, char *text) {
    messages_add(messages, role, text);
    free(text);
}

/* Appends an item's question, an answer that may be wrong, and a debate about it. */
static void chat_add_debate(struct sample_chat *chat, struct rng *r, const struct task_item *it) {
    messages_add(chat->messages, "user", it->question);
    messages_add_answer(chat->messages, noisy_answer(r, it, 0.6f));
    messages_add_owned(
        chat->messages, "user",
        debate_turn_text((const char *[]){noisy_answer(r, it, 0.6f), noisy_answer(r, it, 0.6f)},
                         2));
    chat->only_last_turn = true;
}

/* Appends an item's question, the reply, and its further questions with their answers. */
static void chat_add_question(struct sample_chat *chat, const struct pretrain *p,
                              const struct mix *mix, struct rng *r, const struct task_item *it) {
    messages_add(chat->messages, "user", it->question);
    messages_add_owned(chat->messages, "assistant", reply_text(p, mix, r, it));
    for (int i = 0; i < it->n_follow_ups; i++) {
        messages_add(chat->messages, "user", it->follow_ups[i].question);
        messages_add_answer(chat->messages, it->follow_ups[i].answer);
    }
}

static struct sample_chat chat_sample(const struct pretrain *p, const struct mix *mix,
                                      struct rng *r, const struct task_item *it) {
    struct sample_chat chat = {.messages = json_array(),
                               .tools = json_incref(json_object_get(it->chat, "tools"))};
    if (rng_uniform(r) < p->o.system)
        messages_add(chat.messages, "system", built_in_personas[rng_below(r, 3)].system);
    if (it->chat) {
        json_array_extend(chat.messages, json_object_get(it->chat, "messages"));
        messages_add_owned(chat.messages, "assistant", reply_text(p, mix, r, it));
        return chat;
    }
    if (rng_uniform(r) < p->o.debate && !it->whole_replies) {
        chat_add_debate(&chat, r, it);
        messages_add_owned(chat.messages, "assistant", reply_text(p, mix, r, it));
    } else {
        chat_add_question(&chat, p, mix, r, it);
    }
    return chat;
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

static void item_sample(const struct pretrain *p, const struct mix *mix, struct rng *r,
                        struct task_item *out) {
    if (rng_uniform(r) < mix->drill)
        copy_task_item(r, out);
    else
        family_item(sample_family(mix, r), SPLIT_TRAIN, (uint64_t)p->o.seed, rng_u32(r), true, out);
}

/* Clears the mask of all turns but the last one. Returns the number of tokens up to its end: the
 * newline after it is not a target. */
static size_t mask_finish(char *mask, size_t n, bool only_last_turn) {
    while (n > 0 && !mask[n - 1]) n--;
    size_t first = n;
    while (first > 0 && mask[first - 1]) first--;
    if (only_last_turn) memset(mask, 0, first);
    return n;
}

/* An item that can be one of several turns of a sample: bytes of its question and reply, about. A
 * text has at most as many tokens. */
static int turn_bytes(const struct task_item *it, const struct mix *mix) {
    size_t conclusion = mix->conclusions && it->conclusion ? strlen(it->conclusion) : 0,
           work = strlen(it->work) + conclusion;
    return (int)MIN(strlen(it->question), (size_t)INT32_MAX / 2) + (int)work + 64;
}

/* Appends up to `n` further questions while the sample, of `bytes` bytes, surely fits. */
static void chat_add_questions(const struct pretrain *p, const struct mix *mix, struct rng *r,
                               int n, int bytes, struct sample_chat *chat) {
    for (; n > 0 && bytes < p->model->config.max_seq_len / 2; n--) {
        struct task_item it;
        item_sample(p, mix, r, &it);
        bytes += turn_bytes(&it, mix);
        if (!it.chat && bytes < p->model->config.max_seq_len / 2)
            chat_add_question(chat, p, mix, r, &it);
        task_item_release(&it);
    }
}

/* Encodes a conversation. An error names what the recipe lacks. */
static int sample_encode(const struct pretrain *p, const struct sample_chat *chat,
                         struct train_sample *out, struct error *err) {
    struct token_ids ids = {0};
    struct buf mask = {0};
    const struct chat_template_input in = {.messages = chat->messages, .tools = chat->tools};
    int rc = chat_template_encode(p->model->tok, &in, &ids, &mask, err);
    /* the last questions of a long text may go */
    size_t n = MIN(mask.len, (size_t)p->model->config.max_seq_len);
    if (rc == OK && (n = mask_finish(mask.data, n, chat->only_last_turn)) == 0)
        rc = error_set(err, ERR_USAGE,
                       "a sample of %d tokens has its first answer after the model's %d positions: "
                       "leave its family out of the mix",
                       ids.n, (int)p->model->config.max_seq_len);
    *out = (struct train_sample){.tokens = ids.v, .mask = (uint8_t *)mask.data, .n = (int32_t)n};
    if (rc != OK) train_sample_release(out);
    return rc;
}

static int make_sample(const struct pretrain *p, uint32_t update, uint32_t row,
                       struct train_sample *out, struct error *err) {
    struct rng r = rng_make((uint64_t)p->o.seed, RNG_DATA, update, row);
    struct task_item it;
    const struct mix *mix = update < p->o.final_mix_from ? &p->mix : &p->final_mix;
    item_sample(p, mix, &r, &it);
    struct sample_chat chat = chat_sample(p, mix, &r, &it);
    int more = rng_uniform(&r) < p->o.multi_turn ? 1 + (int)rng_below(&r, MAX_TURNS - 1) : 0;
    if (!it.chat && !chat.only_last_turn)
        chat_add_questions(p, mix, &r, more, turn_bytes(&it, mix), &chat);
    task_item_release(&it);
    int rc = sample_encode(p, &chat, out, err);
    sample_chat_release(&chat);
    return rc;
}

static float update_lr(const struct pretrain *p, int64_t update) {
    return lr_schedule_at(LR_COSINE, p->o.lr, p->o.min_lr_ratio, update, p->o.warmup_steps,
                          p->o.steps);
}

static int train_update(struct pretrain *p, uint32_t update, struct update_stats *st,
                        struct error *err) {
    struct train_sample v[4096];
    int n = 0, rows = 0, rc = OK;
    while (rc == OK && n < (int)ARRAY_LEN(v) && rows < p->o.rows) {
        rc = make_sample(p, update, (uint32_t)n, &v[n], err);
        if (rc == OK) rows += v[n++].n;
    }
    if (rc == OK) rc = trainer_accumulate(p->trainer, v, n, err);
    for (int i = 0; i < n; i++) train_sample_release(&v[i]);
    return rc == OK ? trainer_update(p->trainer, update_lr(p, update), st, err) : rc;
}

/* Everyday sentences, and characters that have to be one token. English repeats its words more
 * often than the other languages. */
static void tokenizer_text_add_prose(struct buf *text, int repeats) {
    static const char characters[] = " ↑ ↓ → ← a b c d e f g h i j k l m n o p q r s t u v w x y z "
                                     "A B C D E F G H I J K L M N O P"
                                     " Q R S T U V W X Y Z 0 1 2 3 4 5 6 7 8 9 + - * / = < > ( ) [ "
                                     "] { } , . : ; ! ? \" ' _ # % &";
    for (int i = 0; i < 10 * repeats; i++) buf_puts(text, characters);
    for (int lang = 0; lang < 3; lang++)
        for (int i = 0; i < (lang == 0 ? repeats * 3 / 5 : repeats); i++)
            family_prose_add(text, lang, lang == 0 && i < repeats / 6);
}

static void tokenizer_text_add_item(const struct pretrain *p, int family, uint32_t i,
                                    struct buf *text) {
    struct rng r = rng_make((uint64_t)p->o.seed, RNG_TEST, (uint32_t)family, i);
    struct task_item it;
    size_t k;
    json_t *m;
    family_item(family, SPLIT_TRAIN, (uint64_t)p->o.seed, i, false, &it);
    struct sample_chat chat = chat_sample(p, &p->mix, &r, &it);
    char *tools = chat.tools ? json_dumps(chat.tools, 0) : NULL;
    json_array_foreach (chat.messages, k, m)
        buf_printf(text, "<|im_start|>%s\n%s<|im_end|>\n", json_get_string(m, "role"),
                   json_get_string(m, "content"));
    buf_puts(text, tools ? tools : "");
    free(tools);
    sample_chat_release(&chat);
    task_item_release(&it);
}

/* Trains on the families of `mix`, and always on those of the first starter model. */
static struct tokenizer *train_tokenizer(const struct pretrain *p, struct error *err) {
    enum { CHATML = 3, MAX_SPECIALS = 64, FAMILY_BYTES = 1 << 20 };
    const char *specials[MAX_SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    const struct strings *more = &p->o.special_tokens;
    int n = CHATML;
    if (more->n > MAX_SPECIALS - CHATML)
        return error_set(err, ERR_USAGE, "special-tokens: %d are more than %d", more->n,
                         MAX_SPECIALS - CHATML),
               NULL;
    for (int control = 1; control >= 0; control--)
        for (int i = 0; i < more->n; i++)
            if ((strncmp(more->v[i], "<|", 2) == 0) == control) specials[n++] = more->v[i];
    int n_control = CHATML;
    while (n_control < n && strncmp(specials[n_control], "<|", 2) == 0) n_control++;
    struct buf text = {0};
    for (int f = 0; f < family_count(); f++) {
        size_t begin = text.len;
        if (f >= fry_count() && p->mix.weight[f] <= 0) continue;
        for (uint32_t i = 0; i < (uint32_t)p->o.tokenizer_items && text.len < begin + FAMILY_BYTES;
             i++)
            tokenizer_text_add_item(p, f, i, &text);
    }
    tokenizer_text_add_prose(&text, (int)p->o.prose);
    log_info("training a tokenizer of %d tokens on %zu bytes", (int)p->o.vocab, text.len);
    struct tokenizer *t = tokenizer_train_bpe(text.data, text.len, (int32_t)p->o.vocab, "smollm",
                                              specials, n, n_control, err);
    buf_release(&text);
    return t;
}

enum { LONG_TOKENS = 1024 }; /* families with longer items get a tenth of the dev items */

static int accuracy_event_add(const struct pretrain *p, int64_t update, json_t *accuracy,
                              struct error *err) {
    json_t *figures = json_pack("{s:O}", "accuracy", accuracy);
    int rc = event_file_add(p->events, update, figures, err);
    json_decref(figures);
    return rc;
}

static int log_accuracy(struct pretrain *p, int64_t update, struct error *err) {
    const int64_t seqs = p->o.limits.max_seqs;
    struct engine_options eo = {.max_rows = 512,
                                .max_seqs = seqs ? (int32_t)seqs : 256,
                                .max_len = longest_item(p, &p->model->config),
                                .kv_elem = p->kv,
                                .pool = p->pool};
    if (memory_room(p->model) < engine_bytes(&p->model->config, &eo))
        trainer_free_activations(p->trainer); // the next pass allocates them
    int rc = engine_options_limit(p->model, &eo, err);
    struct engine *e = rc == OK ? engine_new(p->model, &eo, err) : NULL;
    json_t *line = json_pack("{s:I}", "accuracy_at", (json_int_t)update), *accuracy = json_object();
    struct buf text = {0};
    if (!e) rc = err->code;
    for (int f = 0; rc == OK && f < family_count(); f++) {
        if (!trains_on(p, f)) continue;
        struct eval_score s = {0};
        int64_t n =
            family_max_tokens(f) > LONG_TOKENS ? MAX(p->o.eval_items / 10, 1) : p->o.eval_items;
        rc = eval_run_family(e, p->model->tok, f, SPLIT_DEV, (uint64_t)p->o.seed, (int32_t)n, NULL,
                             false, NULL, &s, NULL, err);
        double acc = (double)s.correct / (double)MAX(s.n, 1);
        json_object_set_new(accuracy, task_families[f]->name, json_real(acc));
        buf_printf(&text, " %s %.0f%%", task_families[f]->name, 100 * acc);
    }
    json_object_update(line, accuracy);
    if (rc == OK && p->events) rc = accuracy_event_add(p, update, accuracy, err);
    if (rc == OK) {
        char *dump = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(4));
        fprintf(p->log, "%s\n", dump);
        fflush(p->log);
        free(dump);
        log_info("after %d updates:%s", (int)update, text.data);
    }
    json_decref(line);
    json_decref(accuracy);
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

/* Keeps a line that an earlier process wrote, if the checkpoint includes its update; the times of
 * later lines count on from it. */
static bool earlier_line_keep(void *ctx, const json_t *line) {
    static const char *const keys[] = {"update", "accuracy_at", "checkpoint_at"};
    struct pretrain *p = ctx;
    const json_t *update = NULL;
    for (int i = 0; i < (int)ARRAY_LEN(keys) && !update; i++)
        update = json_object_get(line, keys[i]);
    if (!json_is_integer(update) || json_integer_value(update) > trainer_update_count(p->trainer))
        return false;
    if (json_object_get(line, "seconds")) {
        p->seconds_before = json_get_number(line, "seconds");
        p->cpu_seconds_before = json_get_number(line, "cpu_seconds");
    }
    return true;
}

/* Rewrites the log without the lines after the checkpoint's update, then opens it for appending. */
static int log_open(struct pretrain *p, const char *path, struct error *err) {
    int rc = log_lines_keep(path, earlier_line_keep, p, err);
    if (rc == OK && !(p->log = fopen(path, "a"))) rc = error_errno(err, "cannot write '%s'", path);
    return rc;
}

static int update_event_add(const struct pretrain *p, int64_t update, const struct update_stats *st,
                            double tokens_per_s, struct error *err) {
    json_t *figures =
        json_pack("{s:f,s:f,s:f,s:f}", "loss", st->loss, "lr", (double)update_lr(p, update - 1),
                  "grad_norm", st->grad_norm, "tokens_per_s", tokens_per_s);
    int rc = event_file_add(p->events, update, figures, err);
    json_decref(figures);
    return rc;
}

static int update_log(const struct pretrain *p, int64_t update, const struct update_stats *st,
                      int64_t tokens, struct error *err) {
    double seconds = clock_now() - p->started;
    fprintf(p->log,
            "{\"update\":%d,\"loss\":%.5f,\"grad_norm\":%.4f,\"tokens_per_s\":%.0f,"
            "\"seconds\":%.1f,\"cpu_seconds\":%.1f}\n",
            (int)update, st->loss, st->grad_norm, (double)tokens / seconds,
            p->seconds_before + seconds, p->cpu_seconds_before + cpu_seconds());
    fflush(p->log);
    return p->events ? update_event_add(p, update, st, (double)tokens / seconds, err) : OK;
}

/* Saves a checkpoint, and logs its hash: equal hashes are equal weights and moments. */
static int checkpoint_save(struct pretrain *p, int64_t update, struct error *err) {
    char hash[HASH_LEN];
    if (trainer_save(p->trainer, p->checkpoint, NULL, err) != OK ||
        sha256_file(p->checkpoint, hash, err) != OK)
        return err->code;
    fprintf(p->log, "{\"checkpoint_at\":%d,\"sha256\":\"%s\"}\n", (int)update, hash);
    fflush(p->log);
    return OK;
}

/* Trains up to update `stop`. */
static int train_until(struct pretrain *p, int64_t stop, struct error *err) {
    struct progress bar;
    struct update_stats st = {0};
    int64_t tokens = 0, first = trainer_update_count(p->trainer);
    char detail[96] = "";
    progress_start(&bar, "pretrain", p->o.steps);
    progress_resume(&bar, first);
    for (int64_t u = first; u < stop; u++) {
        if (train_update(p, (uint32_t)u, &st, err) != OK)
            return error_wrap(err, "update %d", (int)u + 1);
        tokens += st.tokens;
        if ((u % 10 == 9 || u + 1 == p->o.steps) && update_log(p, u + 1, &st, tokens, err) != OK)
            return err->code;
        snprintf(detail, sizeof detail, "loss %.4f, %.0f tokens/s", st.loss,
                 (double)tokens / (clock_now() - p->started));
        progress_update(&bar, u + 1, detail);
        bool last = u + 1 == p->o.steps;
        if (p->o.eval_every && ((u + 1) % p->o.eval_every == 0 || last) &&
            log_accuracy(p, u + 1, err) != OK)
            return err->code;
        if (((u + 1) % p->o.save_every == 0 || u + 1 == stop) && !last &&
            checkpoint_save(p, u + 1, err) != OK)
            return err->code;
    }
    progress_finish(&bar, detail);
    return OK;
}

static int chat_template_set(struct pretrain *p, struct error *err) {
    struct buf text = {0};
    if (!p->o.chat_template) return OK;
    if (file_read(p->o.chat_template, JINJA_MAX_TEXT, &text, err) != OK) return err->code;
    p->model->chat_template = arena_strdup(&p->model->arena, text.data);
    tokenizer_set_chat_template(p->model->tok, text.data);
    /* the template is compiled, and used for the first time, on a short conversation */
    const struct chat_message user = {"user", "hello"};
    struct token_ids ids = {0};
    int rc = chat_encode(p->model->tok, &user, 1, true, &ids, NULL, err);
    token_ids_release(&ids);
    buf_release(&text);
    return rc == OK ? OK : error_wrap(err, "'%s'", p->o.chat_template);
}

/* memory */

static void trainer_options_init(const struct pretrain_options *o, struct train_options *to) {
    options_default(train_option_rows, to);
    to->beta2 = o->beta2;
    to->weight_decay = o->weight_decay;
    to->max_grad_norm = o->max_grad_norm;
    to->seed = o->seed;
    free(to->kv_cache_dtype);
    to->kv_cache_dtype = o->kv_cache_dtype ? xstrdup(o->kv_cache_dtype) : NULL;
}

/* Most tokens of an update: the last sample may exceed the option. */
static int64_t max_rows(const struct pretrain_options *o, const struct model_config *c) {
    return o->rows + c->max_seq_len;
}

/* An upper bound of the least memory of model, trainer, and passes or the engine of the accuracy.
 */
static size_t memory_least(const struct pretrain_options *o, const struct model_config *c,
                           enum numeric_class cls, struct pool *pool) {
    enum { TOKENIZER_BYTES = 24 << 20 }; /* training it; 1,024 for each token afterwards */
    struct train_options to;
    const struct engine_options eo = {.max_seqs = 1, .max_len = c->max_seq_len, .pool = pool};
    trainer_options_init(o, &to);
    size_t model = (size_t)model_param_count(c) * sizeof(float),
           trainer =
               trainer_least_bytes(c, cls, NULL, (int)max_rows(o, c), &to, pool, c->max_seq_len),
           engine = o->eval_every ? engine_least_bytes(c, &eo) : 0;
    options_release(train_option_rows, &to);
    return MAX(TOKENIZER_BYTES, model + trainer + engine + (size_t)o->vocab * 1024);
}

/* Sets the memory limit, and refuses one that is too small. */
static int memory_limit_open(const struct pretrain_options *o, const struct model_config *c,
                             enum numeric_class cls, struct pool *pool, struct error *err) {
    if (memory_limit_parse(o->max_memory, err) != OK) return err->code;
    if (!memory_limit_get()) return OK;
    const struct memory_step step = {.what = "this model with its trainer",
                                     .least = memory_least(o, c, cls, pool)};
    return memory_check(NULL, &step, err);
}

/* Bounds the passes of the trainer by the limit. */
static int passes_limit(struct pretrain *p, struct error *err) {
    const struct model_config *c = &p->model->config;
    const int64_t rows = max_rows(&p->o, c), longest = c->max_seq_len;
    struct train_memory m = {.limit = memory_limit_get(), .used = memory_used(p->model)};
    if (!m.limit) return OK;
    bool fits =
        trainer_limit_passes(p->trainer, memory_room(p->model), rows, longest, longest, &m.pass);
    const struct memory_step step = {.what = "an update", .least = m.pass.bytes};
    if (!fits) return memory_check(p->model, &step, err);
    if (!memory_limit_named() && !m.pass.checkpointing) return OK;
    struct buf text = {0};
    m.passes = m.pass.bytes;
    train_memory_text(&m, &text);
    log_info("%s", text.data);
    buf_release(&text);
    return OK;
}

static int kv_dtype_parse(const struct pretrain_options *o, enum numeric_class cls,
                          const char *checkpoint, enum dtype *out, struct error *err) {
    const struct train_options to = {.kv_cache_dtype = o->kv_cache_dtype};
    return train_kv_dtype_parse(&to, cls, checkpoint, out, err);
}

static int pretrain_open(struct pretrain *p, struct error *err) {
    struct model_config c;
    if (model_preset_find(p->o.shape, &c, err) != OK ||
        kv_dtype_parse(&p->o, p->cls, p->checkpoint, &p->kv, err) != OK)
        return err->code;
    struct tokenizer *tok = train_tokenizer(p, err);
    if (!tok) return err->code;
    c.vocab_size = tokenizer_vocab_size(tok);
    p->model = model_new_random(&c, (uint64_t)p->o.seed, p->cls);
    tokenizer_free(p->model->tok);
    p->model->tok = tok;
    if (chat_template_set(p, err) != OK) return err->code;
    struct train_options to;
    trainer_options_init(&p->o, &to);
    free(to.kv_cache_dtype);
    to.kv_cache_dtype = xstrdup(dtype_name(p->kv));
    p->trainer = trainer_new_full(p->model, &to, p->pool, err);
    options_release(train_option_rows, &to);
    if (!p->trainer || passes_limit(p, err) != OK) return err->code;
    log_info("%s: %.2f million parameters, %d updates of about %d tokens", p->o.shape,
             1e-6 * (double)model_param_count(&c), (int)p->o.steps, (int)p->o.rows);
    if (!path_exists(p->checkpoint)) return OK;
    log_info("continuing from '%s'", p->checkpoint);
    return trainer_load(p->trainer, p->checkpoint, NULL, err);
}

/* The type of the written weights. */
static int weight_type_parse(const char *name, enum tensor_type *out, struct error *err) {
    if (tensor_type_parse(name, out) == OK &&
        (*out == TENSOR_F32 || *out == TENSOR_BF16 || *out == TENSOR_F16))
        return OK;
    return error_set(err, ERR_USAGE, "dtype: '%s' is none of f32, bf16 and f16", name);
}

/* with AdamW in f32: a weight, its gradient and two moments */
enum { BYTES_PER_PARAMETER = 16 };

json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, enum numeric_class cls,
                      struct pool *pool, struct error *err) {
    struct pretrain p = {.o = *o};
    struct model_config c;
    enum tensor_type dtype;
    enum dtype kv;
    if (mixes_parse(&p, err) != OK || kv_dtype_parse(o, cls, NULL, &kv, err) != OK ||
        weight_type_parse(o->dtype, &dtype, err) != OK ||
        model_preset_find(o->shape, &c, err) != OK || limits_check(&p, &c, err) != OK)
        return NULL;
    c.vocab_size = (int32_t)o->vocab;
    int rc = memory_limit_open(o, &c, cls, pool, err);
    size_t limit = memory_limit_named();
    memory_limit_set(0);
    if (rc != OK) return NULL;
    int64_t n = model_param_count(&c);
    char *checkpoint = path_join(dir, "checkpoint.bin");
    json_t *v = json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:o,s:b}", "shape", o->shape, "parameters",
                          (json_int_t)n, "updates", (json_int_t)o->steps, "tokens, about",
                          (json_int_t)(o->steps * o->rows), "bytes at least",
                          (json_int_t)(n * BYTES_PER_PARAMETER), "bytes written",
                          (json_int_t)(n * (int64_t)sizeof(float)), "writes", json_from_path(dir),
                          "continues", (int)path_exists(checkpoint));
    free(checkpoint);
    if (limit) json_object_set_new(v, "memory limit", json_integer((json_int_t)limit));
    json_object_set_new(
        v, "memory, the least",
        json_integer((json_int_t)(memory_used(NULL) + memory_least(o, &c, cls, pool))));
    return v;
}

int pretrain_run(const struct pretrain_options *o, const char *dir, int64_t stop_at,
                 bool tensorboard, enum numeric_class cls, struct pool *pool, struct error *err) {
    struct pretrain p = {.o = *o, .cls = cls, .pool = pool, .dir = dir, .started = clock_now()};
    p.checkpoint = path_join(dir, "checkpoint.bin");
    char *log = path_join(dir, "log.jsonl");
    int64_t stop = stop_at ? MIN(stop_at, o->steps) : o->steps;
    enum tensor_type dtype;
    struct model_config c;
    int rc = mixes_parse(&p, err), lock = -1;
    if (rc == OK) rc = weight_type_parse(o->dtype, &dtype, err);
    if (rc == OK) rc = kv_dtype_parse(o, cls, NULL, &p.kv, err);
    if (rc == OK) rc = model_preset_find(o->shape, &c, err);
    if (rc == OK) rc = limits_check(&p, &c, err);
    if (rc == OK) c.vocab_size = (int32_t)o->vocab;
    if (rc == OK) rc = memory_limit_open(o, &c, cls, pool, err);
    if (rc == OK) rc = dir_make(dir, err);
    if (rc == OK && (lock = dir_lock(dir, "folder", err)) < 0) rc = lock;
    if (rc == OK) rc = pretrain_open(&p, err);
    if (rc == OK) rc = log_open(&p, log, err);
    if (rc == OK && tensorboard &&
        !(p.events = event_file_open(dir, trainer_update_count(p.trainer), err)))
        rc = err->code;
    if (rc == OK) rc = train_until(&p, stop, err);
    if (rc == OK) rc = model_write_hf(p.model, dir, dtype, err);
    if (rc == OK && stop == o->steps) unlink(p.checkpoint);
    dir_unlock(lock, dir);
    trainer_free(p.trainer);
    model_close(p.model);
    if (p.log) fclose(p.log);
    event_file_close(p.events);
    free(log);
    free(p.checkpoint);
    memory_limit_set(0);
    return rc;
}
