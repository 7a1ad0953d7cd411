/*
 * data: training data: samples of tokens with a mask of targets, read from conversations,
 * preference pairs and prompts; checks of a file (lint); samples as text; generated data (synth).
 *
 * A sample knows nothing of losses: the backward pass and the training methods are in backprop/ and
 * train/. The results of loading are owned by the caller; one thread per struct.
 */
#ifndef SHOAL_DATA_H
#define SHOAL_DATA_H

#include "adapter/adapter.h"
#include "engine/engine.h"
#include "store/store.h"

struct train_sample {
    int32_t *tokens;
    uint8_t *mask; /* 1: this token is a target (predicted from those before it) */
    int32_t n;
    int32_t adapter; /* index into the trainer's adapters; ignored in full training */
};
void train_sample_release(struct train_sample *s);

/* Hashes and length of every sample of a file, kept or not, for lint. */
struct sample_digest {
    int32_t line, tokens; /* first line in its file; length before the cut */
    uint64_t exact_hash;  /* hash of its roles and texts */
    uint64_t near_hash;   /* the same, ignoring case, width and white space; prompt_hash too */
    uint64_t prompt_hash; /* hash of the messages before the last answer; 0: none */
};
struct dataset {
    struct train_sample *v;
    int n;
    int64_t tokens, targets;
    int64_t cut, dropped;          /* shortened to max_length; those without a remaining target */
    struct sample_digest *digests; /* [n_read] */
    int n_read;
    char hash[HASH_LEN]; /* hash of the file */
};
/* {messages}, {prompt, completion} or {text}; lines, concatenated objects or an array. An assistant
 * turn with "weight": 0 is context and not a target. Errors name file, line, field. Targets are the
 * assistant's text only (all of it for {text}). */
int dataset_load(struct dataset *d, const char *path, const struct tokenizer *tok,
                 int32_t max_length, struct error *err);
void dataset_release(struct dataset *d);

/* Statistics of token counts. */
struct length_stats {
    int n;
    int64_t tokens;
    int32_t shortest, median, p95, longest;
};
struct length_stats length_stats_compute(int32_t *v, int n); /* sorts v */

/* lint: checks of a file before training begins */

/* Number of matching samples. The first one begins in `line`, the sample that it matches in
 * `other`. */
struct lint_matches {
    int n;
    int32_t line, other;
};
struct lint {
    int read, kept, cut, dropped, n_eval;
    int64_t tokens, targets;                /* tokens and targets of kept samples */
    int32_t shortest, median, p95, longest; /* tokens of all samples, before the cut */
    struct lint_matches exact, near;        /* samples that repeat an earlier one; `near` only
                                             up to case, width and white space */
    struct lint_matches eval_samples,
        eval_prompts; /* evaluation samples that are in the data, as a whole or by their prompt;
                         `line` is in the data, `other` in the evaluation file */
};
/* `eval` may be NULL. */
int lint_dataset(const struct dataset *d, const struct dataset *eval, struct lint *out,
                 struct error *err);
json_t *lint_json(const struct lint *l);
void lint_text(const struct lint *l, struct buf *out); /* the complete report, a few lines */
void lint_log(const struct lint *l, const char *name); /* notes and warnings */
/* Computes the hashes. A prompt and its completion count as messages of the user and the assistant,
 * a text as one of the assistant. */
int sample_digest_compute(const struct chat_message *msgs, int n, struct sample_digest *out,
                          struct error *err);

/* The sample as text, including special tokens, with targets between `mark_begin` and `mark_end`.
 * Control characters except newline and tab, and invalid UTF-8, become U+FFFD. */
void train_sample_render(const struct train_sample *s, const struct tokenizer *tok,
                         const char *mark_begin, const char *mark_end, struct buf *out);
/* {"parts": [{"text", "learned"}, …], "ids", "mask" (1 for targets)}. */
json_t *train_sample_json(const struct train_sample *s, const struct tokenizer *tok);

/* preference pairs, and prompts without an answer */

/* {prompt, chosen, rejected}: texts; or lists of messages; or chosen and rejected as whole
 * conversations or texts with a common beginning. Pair i is samples 2i and 2i + 1. */
int dataset_load_preferences(struct dataset *d, const char *path, const struct tokenizer *tok,
                             int32_t max_length, struct error *err);
/* {messages} without an answer, or {prompt} (a text, or messages), encoded up to the beginning of
 * the answer, including `prefix` (may be NULL). "fry:FAMILY[:N]" instead of a file: N (2000)
 * generated questions of the train split. Longer prompts are dropped and counted. */
struct prompt_set {
    struct dataset data; /* samples without targets */
    json_t **items;      /* [data.n] */
};
struct prompt_source {
    const char *path, *prefix;
    const struct tokenizer *tok;
    int32_t max_length;
    uint64_t seed;
    /* May be NULL: refuses an item of the data that lacks a field. */
    int (*check)(void *ctx, const json_t *item, struct error *err);
    void *check_ctx;
};
int prompt_set_load(struct prompt_set *p, const struct prompt_source *s, struct error *err);
void prompt_set_release(struct prompt_set *p);

/*
 * synth: training data that the model generates: answers to prompts, filtered, each with the call
 * that produced it.
 *
 * Four steps: prompts are read, synth_generate generates k answers to each in batches of an engine,
 * synth_filter selects answers, synth_format_jsonl writes these as lines for `shoal train`. The
 * lines are a function of model, adapters, prompts and options. They do not depend on threads,
 * batches or the place of a prompt in its file. One thread; the caller owns the struct synth.
 *
 * Filters are rows of one table in synth_filter.c. They run in its order, each on the samples that
 * the one before it kept. They use texts and numbers of the samples; only the judge runs a model.
 */

struct synth_options {
    char *template, *system; /* prompt of a topic; system message of prompts without one */
    int64_t samples, n, top_k, seed;
    double temp, top_p, min_p;
    bool unfinished;
    int64_t min_chars, max_chars; /* 0: no bound */
    char *language;               /* "ja"; NULL: any */
    double language_share;
    struct strings require, forbid; /* regular expressions */
    char *json_schema;              /* a file */
    char *answer;                   /* marker before the final answer */
    double min_agreement;
    char *held_out;                        /* a file of samples */
    char *min_perplexity, *max_perplexity; /* "20", or "90%": a quantile */
};
extern const struct option_row synth_option_rows[];

/* prompts */

struct synth_prompt {
    json_t *messages; /* [{role, content}]; the last one is not from the assistant */
    int line;         /* line in its file */
    struct token_ids tokens;
};
struct synth_prompts {
    struct synth_prompt *v;
    int n;
    size_t longest; /* upper bound of a prompt's tokens before tokenization */
};
/* JSON objects {prompt} or {messages}; other fields are ignored. A conversation that ends with an
 * assistant turn is used without that turn, so training files are valid prompts too. */
int synth_prompts_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                       struct error *err);
/* One topic per line; it replaces {topic} in the template. */
int synth_topics_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                      struct error *err);
void synth_prompts_release(struct synth_prompts *p);
/* Borrowed texts in an array that the caller frees; `answer` (may be NULL) becomes the last
 * message. */
struct chat_message *synth_messages(const struct synth_prompt *p, const char *answer, int *n);

/* samples */

enum {
    SYNTH_KEPT = -1,
    SYNTH_MAX_FILTERS = 16,   /* maximum rows of the table */
    SYNTH_MAX_SAMPLES = 4096, /* maximum answers per prompt */
    SYNTH_BATCH_SIZE = 1024,  /* calls that are in memory as requests */
};
struct synth_sample {
    int prompt, index; /* answer `index` to prompt `prompt` */
    uint64_t seed;
    char call[HASH_LEN];  /* identity of the call that generated it */
    struct buf text;      /* any bytes */
    struct token_ids out; /* token ids of the text */
    enum finish_reason finish;
    double logprob;    /* mean log-probability of its tokens under the generating model */
    double agreement;  /* share of the prompt's answers that give the same answer */
    double perplexity; /* perplexity under the judge; 0: unknown */
    int filter;        /* filter that dropped it, or SYNTH_KEPT */
};
struct synth_filter_stats {
    bool enabled;
    int dropped, first; /* index of the first dropped sample; `why` is the filter's reason */
    char reason[160];
};
struct synth {
    const struct synth_options *o;
    struct synth_prompts prompts;
    struct model *model;
    struct adapter *adapter, *judge; /* NULL: the base model */
    struct engine *engine;           /* may be NULL if nothing is generated or judged */
    enum dtype kv, lora;             /* types in the engine */
    int32_t max_len;     /* maximum tokens of a sequence, set by synth_tokenize_prompts */
    struct store *calls; /* recorded calls are read instead of repeated; or NULL */
    int n_reused;

    struct synth_sample *v; /* [n], answers to one prompt are adjacent */
    int n;
    struct synth_filter_stats filter_stats[SYNTH_MAX_FILTERS];
};
/* Tokenizes the prompts and sets max_len. */
int synth_tokenize_prompts(struct synth *s, struct error *err);
int synth_generate(struct synth *s, struct error *err);
/* Computes missing perplexities of the samples that are still kept. */
int synth_score_perplexity(struct synth *s, struct error *err);
/* One JSON line for each kept sample: {messages, source}. */
int synth_format_jsonl(const struct synth *s, struct buf *out, struct error *err);
void synth_release(struct synth *s); /* frees prompts and samples */

/* filters */

struct synth_filter_set; /* prepared options; invalid ones are refused */
/* `tok` is for the held-out data; may be NULL without. */
struct synth_filter_set *synth_filter_set_new(const struct synth_options *o,
                                              const struct tokenizer *tok, struct error *err);
void synth_filter_set_free(struct synth_filter_set *r);
int synth_filter(struct synth *s, struct synth_filter_set *r, struct error *err);
int synth_count_kept(const struct synth *s);
const char *synth_filter_name(int filter); /* NULL past the last */
/* The number of samples that each filter dropped, with its first example. */
void synth_report_text(const struct synth *s, struct buf *out);
json_t *synth_report_json(const struct synth *s);

/* The answer as it is compared: the text after the last `marker` up to the line's end (without a
 * marker: all of it), folded, without a full stop at its end. */
void synth_extract_answer(const char *text, const char *marker, struct buf *out);

#endif
