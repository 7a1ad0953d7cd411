/*
 * synth: training data that the model writes itself — answers to prompts, filtered, each with the
 * call that made it.
 *
 * Four steps: prompts are read, synth_generate has k answers to each written in batches of an
 * engine, synth_filter decides which stay, synth_format_jsonl gives those as lines for `shoal train`. The
 * lines are a function of model, adapters, prompts and options: not of threads, batches or the
 * place in the file at which a prompt stands. One thread; everything is the caller's struct synth.
 *
 * Filters are rows of one table in synth_filter.c, run in its order, each on what the one before it
 * left. They look at texts and at numbers that stand in the samples; only the judge runs a model.
 */
#ifndef SHOAL_SYNTH_H
#define SHOAL_SYNTH_H

#include "engine/record.h"
#include "train/train.h"

struct synth_options {
    char *template, *system; /* what topics become; system message of prompts without one */
    int64_t samples, n, top_k, seed;
    double temp, top_p, min_p;
    bool unfinished;
    int64_t min_chars, max_chars; /* 0: no bound */
    char *language;               /* "ja"; NULL: any */
    double language_share;
    struct strings require, forbid; /* regular expressions */
    char *json_schema;              /* a file */
    char *answer;                   /* what stands before the answer proper */
    double min_agreement;
    char *held_out;                        /* a file of samples */
    char *min_perplexity, *max_perplexity; /* "20", or "90%": a quantile */
};
extern const struct option_row synth_option_rows[];

/* prompts */

struct synth_prompt {
    json_t *messages; /* [{role, content}], the last one not the assistant's */
    int line;         /* of its file */
    struct token_ids tokens;
};
struct synth_prompts {
    struct synth_prompt *v;
    int n;
    size_t longest; /* tokens that one can have at most, before they are known */
};
/* JSON objects {prompt} or {messages}; other fields are let pass, and a conversation that ends with
 * the assistant's words is asked again without them: training files are prompts too. */
int synth_prompts_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                       struct error *err);
/* A topic a line, put in the template's place of {topic}. */
int synth_topics_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                      struct error *err);
void synth_prompts_release(struct synth_prompts *p);
/* Borrowed texts in an array of the caller's; `answer` (may be NULL) becomes the last message. */
struct chat_message *synth_messages(const struct synth_prompt *p, const char *answer, int *n);

/* samples */

enum {
    SYNTH_KEPT = -1,
    SYNTH_MAX_FILTERS = 16,   /* rows of the table at most */
    SYNTH_MAX_SAMPLES = 4096, /* answers to a prompt at most */
    SYNTH_BATCH_SIZE = 1024,   /* calls that are in memory as requests */
};
struct synth_sample {
    int prompt, index; /* answer `index` to prompt `prompt` */
    uint64_t seed;
    char call[HASH_LEN]; /* identity of the call that wrote it */
    struct buf text;     /* any bytes */
    struct token_ids out;      /* its tokens */
    enum finish_reason finish;
    double logprob;    /* mean of its tokens' under what wrote it */
    double agreement;  /* share of the prompt's answers that give the same answer */
    double perplexity; /* under the judge; 0: not known */
    int filter;        /* that dropped it, or SYNTH_KEPT */
};
struct synth_filter_stats {
    bool on;
    int dropped, first; /* the first of them: a sample, and what the filter says of it */
    char why[160];
};
struct synth {
    const struct synth_options *o;
    struct synth_prompts prompts;
    struct model *model;
    struct adapter *adapter, *judge; /* NULL: the base */
    struct engine *engine;           /* may be NULL where nothing is generated or judged */
    enum dtype kv, lora;              /* of the engine */
    int32_t max_len;                 /* tokens of a sequence; synth_tokenize_prompts's */
    struct store *calls;             /* recorded ones are read instead of made again; or NULL */
    int n_reused;

    struct synth_sample *v; /* [n], those of a prompt together */
    int n;
    struct synth_filter_stats tally[SYNTH_MAX_FILTERS];
};
/* Prompts as tokens, and max_len. */
int synth_tokenize_prompts(struct synth *s, struct error *err);
int synth_generate(struct synth *s, struct error *err);
/* Perplexities that are not known of samples that are still kept. */
int synth_score_perplexity(struct synth *s, struct error *err);
/* One JSON line for each kept sample: {messages, source}. */
int synth_format_jsonl(const struct synth *s, struct buf *out, struct error *err);
void synth_release(struct synth *s); /* prompts and samples */

/* filters */

struct synth_filter_set; /* the options, made ready; refuses wrong ones */
/* `tok` is for the held-out data; may be NULL without. */
struct synth_filter_set *synth_filter_set_new(const struct synth_options *o, const struct tokenizer *tok,
                                    struct error *err);
void synth_filter_set_free(struct synth_filter_set *r);
int synth_filter(struct synth *s, struct synth_filter_set *r, struct error *err);
int synth_count_kept(const struct synth *s);
const char *synth_filter_name(int filter); /* NULL beyond the last */
/* What was dropped by which filter, with the first example of each. */
void synth_report_text(const struct synth *s, struct buf *out);
json_t *synth_report_json(const struct synth *s);

/* An answer as it is compared: what stands behind the last `marker` up to the line's end (without
 * one: all of it), folded, without a full stop at its end. */
void synth_extract_answer(const char *text, const char *marker, struct buf *out);

#endif
