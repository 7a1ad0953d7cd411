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
    char *question;                  /* the user's words */
    char *work;                      /* a correct short working, for training; may be "" */
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

/* split_evidence.c: questions whose evidence is split among a team ("largest", "earliest"): the
 * question holds all of it, a view a third. */
int split_evidence_find(const char *name); /* -1 when unknown */
const char *split_evidence_name(int i);    /* NULL behind the last */
void split_evidence_item(int kind, enum data_split split, uint64_t seed, uint32_t index,
                         struct task_item *out);
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
void choice_prompt_add_choice(struct choice_prompt *a, int i, const struct tokenizer *tok,
                              const char *text, int32_t end);
/* working: think first (up to max_tokens), then "\nanswer: " and the choice; else the choice at
 * once. */
int choice_prompt_init(struct choice_prompt *a, const struct tokenizer *tok,
                       const struct chat_message *chat, int n_msgs, const struct task_item *it,
                       bool working, struct error *err);
void choice_prompt_release(struct choice_prompt *a);
/* Points a request at it. */
void choice_prompt_request(const struct choice_prompt *a, struct adapter *adapter,
                           int32_t max_tokens, struct engine_request *out);

/* Accuracy of one adapter on one family. right[i] (may be NULL) tells each item. */
struct eval_score {
    int64_t n, correct;
    int64_t prefilled, generated, truncated;
    double seconds;
};
int eval_run_family(struct engine *e, const struct tokenizer *tok, int family,
                    enum data_split split, uint64_t seed, int32_t n, struct adapter *adapter,
                    bool working, uint8_t *right, struct eval_score *out, struct progress *p,
                    struct error *err);

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
struct model_divergence model_divergence_measure(const struct model *const m[2],
                                                 const struct scored_sequence *seqs, int n,
                                                 struct pool *pool, struct progress *p);

/* statistics */

struct stats_interval {
    double value, lo, hi;
};
json_t *stats_interval_json(struct stats_interval v); /* {value, lo, hi} */
struct stats_interval stats_wilson(int64_t correct,
                                   int64_t n); /* 95 % score interval of a proportion */
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
struct stats_interval stats_mean_interval(const double *v,
                                          int64_t n); /* mean with 95 % t interval */
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

/*
 * bank: the questions of a task, from the program's own families or from local files.
 *
 * A task is a row of a table (task.c), a recipe in YAML, or a JSONL file that explains itself. A
 * line of a file is recognised by the fields it has (dataset_formats.c); the task says what the
 * model is shown. Built-in tasks use the words of lm-evaluation-harness, so that scores can be
 * compared:
 *
 *     preamble of the subject | context of the question | delimiter | option
 *     (description, examples)                            `-- what is scored, one option a time
 *
 * A bank owns its texts and is immutable once it is open. Questions of files are held; those of a
 * family, or of a task whose evidence is split, are drawn again whenever they are asked for.
 */

#define EVAL_MAX_OPTIONS EVAL_MAX_CHOICES

struct eval_question {
    char *context;
    char *options[EVAL_MAX_OPTIONS];  /* [n], without the delimiter */
    char *contexts[EVAL_MAX_OPTIONS]; /* the same for one option only; NULL: `context` */
    int n, correct;
    char *answer;  /* generation: what the grader compares with */
    char *cluster; /* questions that share it are not independent; NULL: alone */
    int subject;
    const char *path; /* where it was read; NULL: drawn */
    int line;
};
void eval_question_release(struct eval_question *q);

/* CHAT: in the model's chat template, one of the choices is decoded. LIKELIHOOD: the option that is
 * most probable after the context. GENERATE: text, for a grader. */
enum eval_output_type { EVAL_CHAT_CHOICE, EVAL_LOGLIKELIHOOD, EVAL_GENERATE };

struct eval_subject {
    char *name, *preamble;
};
struct eval_task {
    char *name;
    enum eval_output_type ask;
    int64_t n;
    bool normed;                   /* acc_norm is usual for it */
    char *delimiter;               /* between a context and an option */
    struct strings files;          /* that were read */
    struct eval_subject *subjects; /* [n_subjects] */
    int n_subjects;
    struct eval_question *v; /* [n]; NULL for what is drawn */
    int family; /* drawn: of fry_families, or of the tasks of split_evidence.c; -1: read */
    bool shares;
    enum data_split split;
    uint64_t seed;
    char *grader; /* GENERATE */
    struct strings stops;
    int32_t max_tokens;
    size_t longest; /* bytes of the longest context with its preamble and option */
};

struct eval_task_options {
    const char *dir; /* where files of built-in tasks are */
    int64_t n;       /* questions of each task; 0: 1000 of a family, all of a file */
    int64_t shots;   /* examples before each question, the first of the task's own */
    enum data_split split;
    uint64_t seed; /* draws questions */
};
/* `name`: a family, a task of split_evidence.c, a built-in task, a JSONL file, or a recipe (.yaml).
 */
int eval_task_open(struct eval_task *b, const char *name, const struct eval_task_options *o,
                   struct error *err);
void eval_task_release(struct eval_task *b);
/* Borrowed from the bank, or made in `scratch`, which the caller releases in both cases. */
const struct eval_question *eval_task_question(const struct eval_task *b, int64_t i,
                                               struct eval_question *scratch);
/*
 * All of them for a team, [n], for task_items_release. What a file's questions show a model is what
 * agents are asked; options are choices, and where contexts differ, what differs is a part of them.
 * Generated answers have a gold instead.
 */
struct task_item *eval_task_items(const struct eval_task *b);
void task_items_release(struct task_item *v, int64_t n);
/* "a,b": each a name for eval_task_open; "fry" is every family. *out is malloc'ed. */
int eval_tasks_open(const char *list, const struct eval_task_options *o, struct eval_task **out,
                    int *n, struct error *err);
/* Names and explanations of the built-in tasks; NULL past the end. */
const char *eval_task_builtin(int i, const char **about);

/* Lines of files (dataset_formats.c). */

/* What a line says, whatever its form; strings are its own. */
struct dataset_row {
    char *question, *passage;
    char *choices[EVAL_MAX_OPTIONS];
    char *contexts[EVAL_MAX_OPTIONS]; /* one a choice, or NULL */
    int n, correct;                   /* correct < 0: no choices */
    char *answer, *cluster, *subject;
};
void dataset_row_release(struct dataset_row *f);
/* Reads a line of any known form; the error says which field is wrong. */
int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err);
/* Which of n choices an answer names: an index from 0, the text of one, a letter, or an index as
 * text; -1: none. */
int choice_index(const json_t *answer, char *const *choices, int n);
/* "choices.text" → row["choices"]["text"], or NULL. */
const json_t *json_path_get(const json_t *row, const char *path);
/* A string, or a number as text; NULL otherwise. malloc'ed. */
char *json_scalar_text(const json_t *v);
/* Calls fn for every row of a CSV file of question, choices and answer (a letter or an index from
 * 0), as an object of those fields; a header with these names is skipped. */
int csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

/*
 * contest: contestants on the same questions, and what may be said of the differences.
 *
 * A contestant is a name and a function that answers a bank of questions: the base, an adapter
 * (eval_solver_answer), or a team. contest_compare is pure: outcomes in, figures out.
 */

/* What became of one question. Failures of form are told apart from wrong answers. */
struct eval_result {
    bool right;      /* acc: the most probable option; a grader's score of at least 1/2 */
    bool right_norm; /* acc_norm: the log-probability a character of the option's text */
    bool cut;        /* too long: the beginning of its context was left out */
    bool truncated;  /* generation reached its limit */
    bool unread;     /* the text holds no answer */
    int16_t choice;  /* -1: none */
    float prob;      /* of the choice among the options */
    float score;     /* a grader's */
};
struct eval_cost {
    int64_t calls, prefilled, generated;
    double seconds;
};
/* out [b->n]. `p` (may be NULL) counts questions, from `done` on. */
struct eval_candidate {
    const char *name;
    int (*answer)(void *ctx, const struct eval_task *b, struct eval_result *out,
                  struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);
    void *ctx;
};

/* One adapter (NULL: the base) on an engine that has room for max_len tokens a request. */
struct eval_solver {
    struct engine *e;
    const struct tokenizer *tok;
    struct adapter *adapter;
    int32_t max_len;
    bool working; /* CHAT: think first */
};
int eval_solver_answer(void *solver, const struct eval_task *b, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/* Of answers that are generated (else NULL), when it takes the gold of every question. */
struct grader;
int eval_task_grader(const struct eval_task *b, const struct grader **out, struct error *err);
/* What the longest request of a bank of files needs, about. */
int32_t eval_task_max_request(const struct eval_task *b, const struct tokenizer *tok);
/* As lm-evaluation-harness does it: white space at the end of the context goes to the continuation,
 * both are encoded as one text, which is cut at the length of the encoded context. Appends. When
 * nothing is left for the continuation, it is encoded by itself. */
void eval_encode_pair(const struct tokenizer *tok, const char *context, const char *continuation,
                      struct token_ids *prompt, struct token_ids *rest);

/* The score of a contestant, beside the first one's on the same questions. */
struct eval_summary {
    int64_t n, correct, correct_norm, cut, truncated, unread;
    struct stats_interval acc, acc_norm; /* Wilson */
    struct stats_interval clustered;     /* of acc: bootstrap over clusters */
    int64_t n_clusters;
    double score; /* mean of a grader's */
    struct eval_cost cost;
    /* against the first contestant; the first one's own are zero */
    struct stats_mcnemar versus;
    struct stats_interval versus_clustered;
    bool equivalent; /* the difference is within 2 points, by two one-sided tests at 5 % */
    double p_holm;   /* over all comparisons of the run: by the caller */
};
/* Contestant k of a bank: out[k][i]. cluster_of [n] as eval_task_clusters gives it. */
struct eval_summary eval_summarize(const struct eval_result *own, const struct eval_result *first,
                                   int64_t n, const int32_t *cluster_of, int32_t n_clusters,
                                   uint64_t seed);
/* Numbers questions by their cluster; questions without one are their own. Returns how many there
 * are. */
int32_t eval_task_clusters(const struct eval_task *b, int32_t *cluster_of);

/*
 * sequential: is b better than a? Decided from pairs of scores as they come, looking after each.
 *
 * A fixed-sample test that is looked at after every pair finds something in nothing sooner or
 * later. This one may be looked at as often as one likes. It is a bet (Waudby-Smith & Ramdas 2024,
 * "Estimating means of bounded random variables by betting", JRSS B 86(1)): for the hypothesis that
 * the mean difference d = b - a is μ, a player begins with 1 and stakes a fixed share λ of what he
 * has on "more than μ" before each pair, so that his wealth is the product of 1 + λ(d_i - μ). It
 * cannot become negative while λ <= 1/2, and if μ is true nobody expects to win, whatever the
 * distribution of the scores and however each depends on those before: the wealth is an e-value at
 * every moment, and by Ville's inequality it ever reaches 1/p with probability p at most. Which λ
 * is best depends on what is not known, so the money is dealt out to eight players, λ = 2^-1 …
 * 2^-8: their mean is a wealth too, and loses at most a factor of 8 on the best of them. A second
 * eight bet on "less than μ". Each side decides at 2/α, so both together err with probability α.
 *
 * All μ whose players have not reached 2/α are the confidence sequence: it holds the true mean at
 * all times at once with probability 1 - α, and leaves 0 out exactly when the test decides.
 *
 * What is assumed is no more than that, under "no difference", the next pair's mean difference is
 * 0 given all pairs before. Pure; the state is a function of the options and the pairs, so whoever
 * has kept the pairs has kept the state, to the same bits on every machine.
 */

enum { SEQUENTIAL_BETS = 8, SEQUENTIAL_PAIRS_MAX = 100000 };

enum sequential_decision {
    SEQUENTIAL_CONTINUE,
    SEQUENTIAL_B_BETTER,
    SEQUENTIAL_B_WORSE,
    SEQUENTIAL_NO_DIFFERENCE, /* max_pairs, and nothing was found: none, or too small a one */
};
const char *sequential_decision_name(enum sequential_decision d); /* "b_better" */

struct sequential_options {
    double alpha;                 /* of a wrong decision when there is no difference; in (0, 1) */
    int64_t min_pairs, max_pairs; /* 1 <= min_pairs <= max_pairs <= SEQUENTIAL_PAIRS_MAX */
};

struct sequential_test {
    struct sequential_options o;
    enum sequential_decision decision;
    double *diff; /* [n] b - a */
    int64_t n, cap;
    double sum[2];                         /* of a's scores, of b's */
    double log_wealth[2][SEQUENTIAL_BETS]; /* against μ = 0: of those who bet on more, on less */
};

void sequential_init(struct sequential_test *s, const struct sequential_options *o);
void sequential_release(struct sequential_test *s);
/* The next pair, both in [0, 1]. Once it is decided, pairs change nothing. */
enum sequential_decision sequential_add(struct sequential_test *s, double a, double b);
/* The e-value against "no difference" of those who bet on b (0), or on a (1); at most 1e307. */
double sequential_e_value(const struct sequential_test *s, int side);
double sequential_threshold(const struct sequential_test *s); /* what an e-value decides at: 2/α */
/* The mean difference with its confidence sequence. Takes time in proportion to the pairs: 1 ms for
 * a thousand. */
struct stats_interval sequential_difference(const struct sequential_test *s);

#endif
