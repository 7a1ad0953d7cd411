/*
 * eval: tasks, how an item is asked and graded, and the statistics that every claim of Shoal
 * carries.
 *
 * fry.c generates the starter model's task families. Every item has a canonical key (its content
 * without language and wording); hash(key) decides its split, so train, dev (fitness) and test are
 * disjoint by construction: no seed and no wording can carry a question across. All of it is pure
 * but eval_run_family, which drives an engine, and model_divergence_measure, which runs two models.
 */
#ifndef SHOAL_EVAL_H
#define SHOAL_EVAL_H

#include "engine/engine.h"

#define EVAL_MAX_CHOICES 32

struct task_item {
    char *question;             /* the user's words */
    char *work;                 /* a correct short working, for training; may be "" */
    char *choices[EVAL_MAX_CHOICES]; /* candidate answers, shuffled */
    int n_choices, correct;
    const char *lang; /* "en", "ja", "zh" */
    bool rare;        /* a variant that pretraining does not show */
    char *key;        /* canonical content */
    char *twin;       /* key of the same question in another family, or NULL */
    char *gold;       /* without choices: what a grader compares answers with, or NULL */
    char **views;     /* [n_views] what agents of a team see of it, in turn */
    int n_views;      /* 0: everybody sees the question */
};
void task_item_release(struct task_item *it);

enum data_split { SPLIT_TRAIN, SPLIT_DEV, SPLIT_TEST };
struct task_family {
    const char *name;
    bool easy;        /* the starter model answers at least 99 % */
    float rare_share; /* of rare variants outside pretraining; 0 for easy families */
    const char *about;
    void (*make)(struct rng *r, bool rare, struct task_item *out);
};
extern const struct task_family fry_families[];
int fry_count(void);
int fry_find(const char *name); /* -1 when unknown */
#define FRY_MAX_FAMILIES 64
/* "fry" (all families) or names, comma-separated → pick[fry_count()]. */
int fry_parse_families(const char *list, bool pick[FRY_MAX_FAMILIES], struct error *err);
/* Item `index` of a family's split: a pure function of its arguments. `pretrain`: common variants
 * only. */
void fry_item(int family, enum data_split split, uint64_t seed, uint32_t index, bool pretrain,
              struct task_item *out);
enum data_split fry_split_of(const char *key);

/* The three founding personas: name, system prompt, the families its conversations are about. */
struct fry_persona {
    const char *name, *system;
    const char *families[3];
};
extern const struct fry_persona fry_personas[3];
/* What a debater is told of the others: "others say 12 and 15. answer again." malloc'ed. */
char *fry_debate_turn(const char *const *others, int n);
/* Of a conversation that is written: a turn; the assistant's answer; and all its turns (taken over)
 * as a line of {messages}. */
void messages_add(json_t *turns, const char *role, const char *text);
void messages_add_answer(json_t *turns, const char *choice);
void messages_to_jsonl(struct buf *text, json_t *turns);
/* Writes n conversations of a persona as JSONL (train split). */
int fry_write_persona(const struct fry_persona *p, int n, uint64_t seed, const char *path,
                      struct error *err);
/* The same of some families' questions with their answers, family by family in turn. */
int fry_write_tasks(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                    struct error *err);

/* Conversations in which first answers, one's own and two others', are weighed: each is right half
 * of the time, the last is right. */
int fry_write_critic(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                     struct error *err);

/* split_evidence.c: questions whose evidence is split among a team ("largest", "earliest"): the question
 * holds all of it, a view a third. */
int split_evidence_find(const char *name);  /* -1 when unknown */
const char *split_evidence_name(int i);     /* NULL behind the last */
void split_evidence_item(int kind, enum data_split split, uint64_t seed, uint32_t index, struct task_item *out);
/* n conversations of the train split that teach the question, a share of it, and the debate. */
int split_evidence_write(int kind, int n, uint64_t seed, const char *path, struct error *err);

/* asking */

/* The assistant's first words; a space and one choice follow, closed by <|im_end|>. */
#define ANSWER_PREFIX "answer:"
#define WORK_PREFIX "work:"

/* A question as tokens: the chat so far with the assistant's first words, suffix, choices with
 * their end. */
struct choice_prompt {
    struct token_ids prompt, suffix, *choices; /* [n_choices] */
    struct token_seq *seq;
    int32_t stop[2];
    int n_stop, n_choices;
};
/* Choice i is the tokens of `text`, and after them `end` if it is a token. */
void choice_prompt_add_choice(struct choice_prompt *a, int i, const struct tokenizer *tok, const char *text,
                  int32_t end);
/* working: think first (up to max_tokens), then "\nanswer: " and the choice; else the choice at
 * once. */
int choice_prompt_init(struct choice_prompt *a, const struct tokenizer *tok, const struct chat_message *chat, int n_msgs,
               const struct task_item *it, bool working, struct error *err);
void choice_prompt_release(struct choice_prompt *a);
/* Points a request at it. */
void choice_prompt_request(const struct choice_prompt *a, struct adapter *adapter, int32_t max_tokens,
                   struct engine_request *out);

/* Accuracy of one adapter on one family. right[i] (may be NULL) tells each item. */
struct eval_score {
    int64_t n, correct;
    int64_t prefilled, generated, truncated;
    double seconds;
};
int eval_run_family(struct engine *e, const struct tokenizer *tok, int family, enum data_split split,
             uint64_t seed, int32_t n, struct adapter *adapter, bool working, uint8_t *right,
             struct eval_score *out, struct progress *p, struct error *err);

/* comparing models */

/* Tokens that are read together; `scored` has a byte for each that is to be predicted, NULL: all
 * but the first. */
struct scored_sequence {
    const int32_t *v;
    const char *scored;
    int32_t n;
};
/* m[1] against m[0] on passages that both have room for. */
struct model_divergence {
    int64_t n; /* predictions */
    double perplexity[2];
    double kl_mean, kl_p99; /* KL(m[0] ‖ m[1]) a prediction, in nats */
    double same_top;        /* share of predictions whose most probable token is the same */
};
struct model_divergence model_divergence_measure(const struct model *const m[2], const struct scored_sequence *seqs,
                                 int n, struct pool *pool, struct progress *p);

/* statistics */

struct stats_interval {
    double value, lo, hi;
};
json_t *stats_interval_json(struct stats_interval v); /* {value, lo, hi} */
struct stats_interval stats_wilson(int64_t correct, int64_t n); /* 95 % score interval of a proportion */
/* Difference of two paired 0/1 vectors, a - b: mean, 95 % interval (normal on the paired
 * differences), and McNemar's exact two-sided p (binomial on the discordant pairs). */
struct stats_mcnemar {
    struct stats_interval diff;
    double p;
    int64_t n, only_a, only_b;
};
struct stats_mcnemar stats_mcnemar(const uint8_t *a, const uint8_t *b, int64_t n);
/* The quantile of Student's t that belongs to the normal distribution's z: the Cornish-Fisher
 * expansion in 1/ν (Abramowitz & Stegun 26.7.5), for a few degrees of freedom or more. */
double stats_t_quantile(double z, int64_t dof);
struct stats_interval stats_mean_interval(const double *v, int64_t n); /* mean with 95 % t interval */
/* Two-sided p of paired differences whose signs mean nothing (Fisher's sign-flip test of the
 * mean): all 2^n flips where n <= 16, else 9999 drawn from a fixed seed. */
double stats_sign_flip_test(const double *diff, int64_t n);
/* Smallest difference that a paired test on n items finds with power 0.8 at α = 0.05 when
 * `discordant` of the pairs differ. */
double stats_min_detectable_effect(int64_t n, double discordant);
/* Percentile interval, 95 %, of the mean when what is drawn again are whole clusters of dependent
 * values (cluster_of[i] in 0..n_clusters-1): 1000 draws by the seed. */
struct stats_interval stats_cluster_bootstrap(const double *v, const int32_t *cluster_of, int64_t n,
                                        int32_t n_clusters, uint64_t seed);
/* Two one-sided tests at 5 % (Schuirmann 1987): is the mean within ± margin? That is, does the 90 %
 * interval lie inside. */
bool stats_tost(const double *diff, int64_t n, double margin);
void stats_holm(const double *p, int n, double *adjusted);

#endif
