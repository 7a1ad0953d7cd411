/*
 * eval: tasks, requests and grading, and the statistics that every claim of Shoal carries.
 *
 * fry.c generates the starter model's task families. Every item has a canonical key (its content
 * without language and wording); hash(key) decides its split, so train, dev (fitness) and test are
 * disjoint by construction: no seed and no wording can carry a question across. Generators and
 * statistics are pure. eval_run_family and eval_solver_answer drive an engine,
 * model_divergence_measure runs two models, eval_task_open reads files.
 */
#ifndef SHOAL_EVAL_H
#define SHOAL_EVAL_H

#include "engine/engine.h"

#define EVAL_MAX_CHOICES 32

struct task_item {
    char *question;                  /* the user's message */
    char *work;                      /* a short correct derivation, for training; may be "" */
    char *choices[EVAL_MAX_CHOICES]; /* candidate answers, shuffled */
    int n_choices, correct;
    const char *lang;   /* "en", "ja", "zh" */
    bool rare;          /* a variant that does not occur in pretraining */
    char *key;          /* canonical content */
    char *duplicate_of; /* key of the same question in another family, or NULL */
    char *gold;         /* without choices: the text that a grader compares answers with, or NULL */
    char **views; /* [n_views] parts of the question for the agents of a team: agent i sees view i
                     mod n_views */
    int n_views;  /* 0: all agents see the question */
};
void task_item_release(struct task_item *it);

enum data_split { SPLIT_TRAIN, SPLIT_DEV, SPLIT_TEST };
struct task_family {
    const char *name;
    bool easy;        /* the starter model answers at least 99 % */
    float rare_share; /* share of rare variants outside pretraining; 0 for easy families */
    const char *description;
    void (*generate)(struct rng *r, bool rare, struct task_item *out);
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

/* The three built-in personas: name, system prompt, and the families of the persona's
 * conversations. */
struct fry_persona {
    const char *name, *system;
    const char *families[3];
};
extern const struct fry_persona fry_personas[3];
/* The debate message to an agent: "others say 12 and 15. answer again." malloc'ed. */
char *fry_debate_turn(const char *const *others, int n);
/* Build a conversation: append a turn; append the assistant's answer; write all turns (taken over)
 * as a line of {messages}. */
void messages_add(json_t *turns, const char *role, const char *text);
void messages_add_answer(json_t *turns, const char *choice);
void messages_to_jsonl(struct buf *text, json_t *turns);
/* Writes n conversations of a persona as JSONL (train split). */
int fry_write_persona(const struct fry_persona *p, int n, uint64_t seed, const char *path,
                      struct error *err);
/* Writes n questions of the families with their answers, the families in turn. */
int fry_write_tasks(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                    struct error *err);

/* Writes n conversations in which the assistant answers, sees two other answers and answers again.
 * Each of the three first answers is correct with probability 1/2; the last answer is correct. */
int fry_write_critic(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                     struct error *err);

/* split_evidence.c: questions ("largest", "earliest") whose evidence is split among a team: the
 * question contains all of it, a view contains a third. */
int split_evidence_find(const char *name); /* -1 when unknown */
void split_evidence_item(int kind, enum data_split split, uint64_t seed, uint32_t index,
                         struct task_item *out);
/* Writes n conversations of the train split that teach the question, a share of it, and the
 * debate. */
int split_evidence_write(int kind, int n, uint64_t seed, const char *path, struct error *err);

/* prompts */

/* The assistant's first words; a space and one choice follow, closed by <|im_end|>. */
#define ANSWER_PREFIX "answer:"
#define WORK_PREFIX "work:"

/* A question as tokens: the chat up to the assistant's first words, the suffix, and the choices
 * with their end. */
struct choice_prompt {
    struct token_ids prompt, suffix, *choices; /* [n_choices] */
    struct token_seq *seq;
    int32_t stop[2];
    int n_stop, n_choices;
};
/* Choice i is the tokens of `text`, followed by `end` if it is a token. */
void choice_prompt_add_choice(struct choice_prompt *a, int i, const struct tokenizer *tok,
                              const char *text, int32_t end);
/* chain_of_thought: generates reasoning (up to max_tokens), then "\nanswer: " and the choice;
 * otherwise only the choice. */
int choice_prompt_init(struct choice_prompt *a, const struct tokenizer *tok,
                       const struct chat_message *chat, int n_msgs, const struct task_item *it,
                       bool chain_of_thought, struct error *err);
void choice_prompt_release(struct choice_prompt *a);
/* Fills a request that borrows the tokens of `a`. */
void choice_prompt_request(const struct choice_prompt *a, struct adapter *adapter,
                           int32_t max_tokens, struct engine_request *out);

/* Accuracy of one adapter on one family. right[i] (may be NULL) is the result of each item. */
struct eval_score {
    int64_t n, correct;
    int64_t prefilled, generated, truncated;
    double seconds;
};
int eval_run_family(struct engine *e, const struct tokenizer *tok, int family,
                    enum data_split split, uint64_t seed, int32_t n, struct adapter *adapter,
                    bool chain_of_thought, uint8_t *right, struct eval_score *out,
                    struct progress *p, struct error *err);

/* comparing models */

/* Tokens of one sequence. `scored` has a byte for each token, nonzero if its prediction counts;
 * NULL: all but the first. */
struct scored_sequence {
    const int32_t *v;
    const char *scored;
    int32_t n;
};
/* Divergence of m[1] from m[0] on passages that fit both. */
struct model_divergence {
    int64_t n; /* number of predictions */
    double perplexity[2];
    double kl_mean, kl_p99; /* KL(m[0] ‖ m[1]) per prediction, in nats */
    double same_top;        /* share of predictions with the same most probable token */
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
/* The quantile of Student's t that corresponds to the normal quantile z: the Cornish-Fisher
 * expansion in 1/ν (Abramowitz & Stegun 26.7.5). It needs more than two degrees of freedom. */
double stats_t_quantile(double z, int64_t dof);
struct stats_interval stats_mean_interval(const double *v,
                                          int64_t n); /* mean with 95 % t interval */
/* Two-sided p of paired differences whose signs are exchangeable under the null hypothesis
 * (Fisher's sign-flip test of the mean): all 2^n flips if n <= 16, else 9999 samples from a fixed
 * seed. */
double stats_sign_flip_test(const double *diff, int64_t n);
/* The smallest difference that a paired test on n items detects with power 0.8 at α = 0.05 if
 * `discordant` is the share of pairs that differ. */
double stats_min_detectable_effect(int64_t n, double discordant);
/* Percentile interval, 95 %, of the mean, from a bootstrap that resamples whole clusters of
 * dependent values (cluster_of[i] in 0..n_clusters-1): 1000 resamples by the seed. */
struct stats_interval stats_cluster_bootstrap(const double *v, const int32_t *cluster_of, int64_t n,
                                              int32_t n_clusters, uint64_t seed);
/* Two one-sided tests at 5 % (Schuirmann 1987): whether the mean is within ± margin, that is,
 * whether the 90 % interval is inside. */
bool stats_tost(const double *diff, int64_t n, double margin);
void stats_holm(const double *p, int n, double *adjusted);

/*
 * task: the questions of a task, from the built-in families or from local files.
 *
 * A task is a row of a table (task.c), a recipe in YAML, or a JSONL file with known fields. The
 * fields of a line determine its format (dataset_formats.c); the task determines the text for the
 * model. Built-in tasks use the wording of lm-evaluation-harness, so scores can be compared:
 *
 *     preamble of the subject | context of the question | delimiter | option
 *     (description, examples)                            `-- scored, one option at a time
 *
 * A task owns its texts and is immutable once it is open. It stores the questions of files; it
 * generates those of a family, or of a task with split evidence, on each query.
 */

#define EVAL_MAX_OPTIONS EVAL_MAX_CHOICES

struct eval_question {
    char *context;
    char *options[EVAL_MAX_OPTIONS];  /* [n], without the delimiter */
    char *contexts[EVAL_MAX_OPTIONS]; /* context of one option; NULL: `context` */
    int n, correct;
    char *answer;  /* generation: the text that the grader compares with */
    char *cluster; /* questions of one cluster are dependent; NULL: an independent question */
    int subject;
    const char *path; /* the file it was read from; NULL: generated */
    int line;
};
void eval_question_release(struct eval_question *q);

/* CHAT_CHOICE: decodes one of the choices in the model's chat template. LOGLIKELIHOOD: selects the
 * option that is most probable after the context. GENERATE: generates text for a grader. */
enum eval_output_type { EVAL_CHAT_CHOICE, EVAL_LOGLIKELIHOOD, EVAL_GENERATE };

struct eval_subject {
    char *name, *preamble;
};
struct eval_task {
    char *name;
    enum eval_output_type output_type;
    int64_t n_questions;
    bool reports_acc_norm;         /* acc_norm is its usual metric */
    char *delimiter;               /* text between a context and an option */
    struct strings files;          /* files that were read */
    struct eval_subject *subjects; /* [n_subjects] */
    int n_subjects;
    struct eval_question *questions; /* [n]; NULL if questions are generated */
    int family; /* generated questions: index in fry_families, or in split_evidence.c; -1: questions
                   of files */
    bool is_split_evidence;
    enum data_split split;
    uint64_t seed;
    char *grader; /* GENERATE */
    struct strings stops;
    int32_t max_tokens;
    size_t longest; /* bytes of the longest context including its preamble and option */
};

struct eval_task_options {
    const char *dir; /* folder of the built-in tasks' files */
    int64_t n;       /* questions of each task; 0: 1000 of a family, all of a file */
    int64_t shots;   /* examples before each question, the first ones of the task's examples */
    enum data_split split;
    uint64_t seed; /* seed of the sampled questions */
};
/* `name`: a family, a task of split_evidence.c, a built-in task, a JSONL file, or a recipe (.yaml).
 */
int eval_task_open(struct eval_task *b, const char *name, const struct eval_task_options *o,
                   struct error *err);
void eval_task_release(struct eval_task *b);
/* Returns a question that the task owns, or one made in `scratch`. The caller releases `scratch` in
 * both cases. */
const struct eval_question *eval_task_question(const struct eval_task *b, int64_t i,
                                               struct eval_question *scratch);
/*
 * All questions as items for a team, [n]; free them with task_items_release. An item's question is
 * the text that the model would see, its choices are the options. Where contexts differ, the
 * differing part belongs to the choice. A question with a generated answer has a gold answer
 * instead.
 */
struct task_item *eval_task_items(const struct eval_task *b);
void task_items_release(struct task_item *v, int64_t n);
/* "a,b": names for eval_task_open; "fry" means every family. *out is malloc'ed. */
int eval_tasks_open(const char *list, const struct eval_task_options *o, struct eval_task **out,
                    int *n, struct error *err);
/* Names and explanations of the built-in tasks; NULL past the end. */
const char *eval_task_builtin(int i, const char **summary);

/* Lines of files (dataset_formats.c). */

/* The content of a line, in any format; it owns its strings. */
struct dataset_row {
    char *question, *passage;
    char *choices[EVAL_MAX_OPTIONS];
    char *contexts[EVAL_MAX_OPTIONS]; /* one per choice, or NULL */
    int n, correct;                   /* correct < 0: no choices */
    char *answer, *cluster, *subject;
};
void dataset_row_release(struct dataset_row *f);
/* Reads a line of any known format; the error names the field that is wrong. */
int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err);
/* The index of the choice that an answer names: an index from 0, the text of a choice, a letter, or
 * an index as text; -1: none. */
int choice_index(const json_t *answer, char *const *choices, int n);
/* "choices.text" → row["choices"]["text"], or NULL. */
const json_t *json_path_get(const json_t *row, const char *path);
/* A string, or a number as text; NULL otherwise. malloc'ed. */
char *json_scalar_text(const json_t *v);
/* Calls fn for every row of a CSV file with the columns question, choices and answer (a letter or
 * an index from 0), as an object of those fields; a header with these names is skipped. */
int csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

/*
 * evaluate: candidates on the same questions, and the statistics of their differences.
 *
 * A candidate is a name and a function that answers a task: the base model, an adapter
 * (eval_solver_answer), or a team. eval_summarize is pure: it turns results into statistics.
 */

/* The result of one question. Format failures are separate from wrong answers. */
struct eval_result {
    bool right;      /* acc: the most probable option; for a grader, a score of at least 1/2 */
    bool right_norm; /* acc_norm: log-probability per character of the option's text */
    bool prompt_truncated; /* too long: the beginning of its context was dropped */
    bool truncated;        /* generation reached its limit */
    bool no_answer;        /* the text holds no answer */
    int16_t choice;        /* -1: none */
    float prob;            /* probability of the choice among the options */
    float score;           /* score of the grader */
};
struct eval_cost {
    int64_t calls, prefilled, generated;
    double seconds;
};
/* out [task->n]. `p` (may be NULL) counts questions, from `done` on. */
struct eval_candidate {
    const char *name;
    int (*answer)(void *ctx, const struct eval_task *task, struct eval_result *out,
                  struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);
    void *ctx;
};

/* One adapter (NULL: the base model) on an engine with room for max_len tokens per request. */
struct eval_solver {
    struct engine *e;
    const struct tokenizer *tok;
    struct adapter *adapter;
    int32_t max_len;
    bool chain_of_thought; /* CHAT: think first */
};
int eval_solver_answer(void *solver, const struct eval_task *task, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/* The grader of a task with generated answers (else NULL). Fails if the grader rejects the gold
 * answer of a question. */
struct grader;
int eval_task_grader(const struct eval_task *task, const struct grader **out, struct error *err);
/* Approximate length of the longest request of a task from files, in tokens. */
int32_t eval_task_max_request_tokens(const struct eval_task *task, const struct tokenizer *tok);
/* Encodes like lm-evaluation-harness: white space at the end of the context moves to the
 * continuation, both are encoded as one text, which is cut at the length of the encoded context.
 * Appends to both outputs. If no token is left for the continuation, it is encoded separately. */
void eval_encode_pair(const struct tokenizer *tok, const char *context, const char *continuation,
                      struct token_ids *prompt, struct token_ids *continuation_ids);

/* The scores of a candidate, and its comparison with the first one on the same questions. */
struct eval_summary {
    int64_t n, correct, correct_norm, prompts_truncated, truncated, no_answer;
    struct stats_interval acc, acc_norm; /* Wilson */
    struct stats_interval clustered;     /* interval of acc: bootstrap over clusters */
    int64_t n_clusters;
    double score; /* mean score of the grader */
    struct eval_cost cost;
    /* comparison with the first candidate; zero for the first one */
    struct stats_mcnemar versus;
    struct stats_interval versus_clustered;
    bool equivalent; /* the difference is within 2 points, by two one-sided tests at 5 % */
    double p_holm;   /* adjusted over all comparisons of the run; the caller sets it */
};
/* Compares the results [n] of a candidate with those of the first candidate, baseline [n].
 * cluster_of: [n], from eval_task_clusters. */
struct eval_summary eval_summarize(const struct eval_result *results,
                                   const struct eval_result *baseline, int64_t n,
                                   const int32_t *cluster_of, int32_t n_clusters, uint64_t seed);
/* Numbers the clusters of the questions. A question without a cluster forms a separate one. Returns
 * the number of clusters. */
int32_t eval_task_clusters(const struct eval_task *task, int32_t *cluster_of);

/*
 * sequential: is b better than a? A test that may decide after each pair of scores.
 *
 * A fixed-sample test that is repeated after every pair sooner or later finds a difference even
 * between equals. This test allows a look after every pair. It is a betting test (Waudby-Smith &
 * Ramdas 2024, "Estimating means of bounded random variables by betting", JRSS B 86(1)). For the
 * hypothesis that the mean difference d = b - a is μ, a bettor begins with wealth 1 and stakes a
 * fixed share λ of its wealth on "more than μ" before each pair, so its wealth is the product of 1
 * + λ(d_i - μ). It cannot become negative while λ <= 1/2. If μ is true, the expected gain is zero
 * for any distribution of the scores and any dependence on earlier ones: the wealth is an e-value
 * at every time, and by Ville's inequality it ever reaches 1/p with probability p at most. The best
 * λ depends on unknown quantities, so the money is divided among eight bettors, λ = 2^-1 … 2^-8:
 * their mean is a wealth too, and loses at most a factor of 8 against the best of them. A second
 * eight bet on "less than μ". Each side decides at 2/α, so both together err with probability α.
 *
 * The confidence sequence is the set of all μ whose bettors have not reached 2/α. It holds the true
 * mean at all times at once with probability 1 - α, and excludes 0 exactly when the test decides.
 *
 * The only assumption is that, under "no difference", the next pair's mean difference is 0 given
 * all earlier pairs. Pure; the state is a function of the options and the pairs, so stored pairs
 * reproduce it bit by bit on every machine.
 */

enum { SEQUENTIAL_BETS = 8, SEQUENTIAL_PAIRS_MAX = 100000 };

enum sequential_decision {
    SEQUENTIAL_CONTINUE,
    SEQUENTIAL_B_BETTER,
    SEQUENTIAL_B_WORSE,
    SEQUENTIAL_NO_DIFFERENCE, /* max_pairs reached without a decision: no difference, or too small a
                                 one */
};
const char *sequential_decision_name(enum sequential_decision d); /* "b_better" */

struct sequential_options {
    double alpha; /* probability of a wrong decision if there is no difference; in (0, 1) */
    int64_t min_pairs, max_pairs; /* 1 <= min_pairs <= max_pairs <= SEQUENTIAL_PAIRS_MAX */
};

struct sequential_test {
    struct sequential_options o;
    enum sequential_decision decision;
    double *diff; /* [n] b - a */
    int64_t n, cap;
    double sum[2];                         /* sums of a's scores and of b's */
    double log_wealth[2][SEQUENTIAL_BETS]; /* for μ = 0: bets on more, bets on less */
};

void sequential_init(struct sequential_test *s, const struct sequential_options *o);
void sequential_release(struct sequential_test *s);
/* Adds a pair, both in [0, 1]. After a decision, pairs change nothing. */
enum sequential_decision sequential_add(struct sequential_test *s, double a, double b);
/* The e-value against "no difference" of the bets on b (0) or on a (1); at most 1e307. */
double sequential_e_value(const struct sequential_test *s, int side);
double sequential_threshold(const struct sequential_test *s); /* the e-value that decides: 2/α */
/* The mean difference with its confidence sequence. The time is proportional to the number of
 * pairs: 1 ms for a thousand. */
struct stats_interval sequential_difference(const struct sequential_test *s);

#endif
