/*
 * eval: tasks, requests and grading, and the statistics of every result that Shoal reports.
 *
 * Statistics are pure functions. eval_run_family and eval_solver_answer drive an engine,
 * model_divergence_measure runs two models, eval_task_open reads files.
 */
#ifndef SHOAL_EVAL_H
#define SHOAL_EVAL_H

#include "engine/engine.h"
#include "families/families.h"

/* prompts */

/* A question as tokens. prompt: the chat up to the prefix of the assistant's turn. suffix: the
 * tokens between the reasoning and the choice; empty: no reasoning. choices: [n_choices], each with
 * its end; `seq` has the same tokens for a request. stop: [n_stop] tokens that end the reasoning.
 */
struct choice_prompt {
    struct token_ids prompt, suffix, *choices;
    struct token_seq *seq;
    int32_t stop[2];
    int n_stop, n_choices;
};
/* Sets choice i to the tokens of `text`, followed by the token `end` if end >= 0. */
void choice_prompt_add_choice(struct choice_prompt *a, int i, const struct tokenizer *tok,
                              const char *text, int32_t end);
/* The request of this prompt decodes "answer: CHOICE", or a choice alone if the item's choices are
 * whole replies. With chain_of_thought it first generates reasoning, up to the request's max_tokens
 * or the end of the line; not before whole replies. chat, n_msgs: the conversation, for an item
 * without its own. The caller calls choice_prompt_release also after an error. */
int choice_prompt_init(struct choice_prompt *a, const struct tokenizer *tok,
                       const struct chat_message *chat, int n_msgs, const struct task_item *it,
                       bool chain_of_thought, struct error *err);
void choice_prompt_release(struct choice_prompt *a);
/* Sets *out to a request that borrows the tokens of `a`. max_tokens: limit of the reasoning. */
void choice_prompt_request(const struct choice_prompt *a, struct adapter *adapter,
                           int32_t max_tokens, struct engine_request *out);

/* Accuracy of one adapter on families. */
struct eval_score {
    int64_t n, correct;
    int64_t prefilled, generated, truncated;
    double seconds;
};
/* Measures an adapter on items 0..n-1 of a family's split and adds the result to *out. right[n]
 * (may be NULL): whether each item was answered correctly. */
int eval_run_family(struct engine *e, const struct tokenizer *tok, int family,
                    enum data_split split, uint64_t seed, int32_t n, struct adapter *adapter,
                    bool chain_of_thought, uint8_t *right, struct eval_score *out,
                    struct progress *p, struct error *err);

/* comparing models */

/* The n tokens v of one sequence. scored[n]: nonzero if the prediction of the token counts; NULL:
 * all tokens but the first count. */
struct scored_sequence {
    const int32_t *v;
    const char *scored;
    int32_t n;
};
/* Divergence of model m[1] from model m[0], which have the same vocabulary. They may be the same
 * model with different types of keys and values. */
struct model_divergence {
    int64_t n; /* number of predictions */
    double perplexity[2];
    double kl_mean, kl_p99; /* KL(m[0] ‖ m[1]) per prediction, in nats */
    double same_top;        /* share of predictions with the same most probable token */
};
/* Every sequence fits in the context of both models. kv: the types of their keys and values. */
struct model_divergence model_divergence_measure(const struct model *const m[2],
                                                 const enum dtype kv[2],
                                                 const struct scored_sequence *seqs, int n,
                                                 struct pool *pool, struct progress *p);
/* The same for the models at two paths, of which one at a time is in memory. The logits of the
 * first are in a file without a name in the folder of `path`, which has at most `file_bytes`: for
 * more predictions the models are opened again in turn. ERR_MISMATCH: a model has not `vocab`
 * tokens, or a shorter context than a sequence. */
int model_divergence_measure_in_turn(const char *const models[2], enum numeric_class cls,
                                     const enum dtype kv[2], int32_t vocab,
                                     const struct scored_sequence *seqs, int n, const char *path,
                                     int64_t file_bytes, struct pool *pool,
                                     struct model_divergence *out, struct error *err);
/* Most bytes of model_divergence_measure_in_turn besides the opened model, for sequences of at most
 * `longest` tokens, `tokens` in all. */
size_t model_divergence_bytes(const struct model_config *c, int32_t longest, int64_t tokens,
                              struct pool *pool);

/* statistics */

struct stats_interval {
    double value, lo, hi;
};
json_t *stats_interval_json(struct stats_interval v); /* {value, lo, hi} */
/* The same of a mean of n values; lo and hi are null for one value, which has no interval. */
json_t *stats_mean_json(struct stats_interval v, int64_t n);
struct stats_interval stats_wilson(int64_t correct,
                                   int64_t n); /* 95 % score interval of a proportion */
/* Difference of two paired 0/1 vectors, a - b: mean, 95 % interval, and McNemar's exact two-sided p
 * (binomial on the discordant pairs). */
struct stats_mcnemar {
    struct stats_interval diff;
    double p;
    int64_t n, both, only_a, only_b; /* pairs; pairs of which both, only a, or only b, are 1 */
};
struct stats_mcnemar stats_mcnemar(const uint8_t *a, const uint8_t *b, int64_t n);
/* The interval of the difference a - b, inside [-1, 1] (Newcombe 1998, method 10: Wilson's
 * intervals of both proportions, with their correlation). comparisons: how many such intervals hold
 * together with 95 % (Bonferroni), for differences whose p values are corrected for their number.
 */
struct stats_interval stats_paired_interval(const struct stats_mcnemar *d, int comparisons);
/* The mean of a - b with its normal 95 % interval, which is 0 ± 0 without differences: for
 * contributions, whose intervals are added in squares to that of a fitness. */
struct stats_interval stats_contribution(const uint8_t *a, const uint8_t *b, int64_t n);
/* The normal quantile of the upper tail p, at most 1/2, within 4.5e-4 (Abramowitz & Stegun
 * 26.2.23). */
double stats_upper_quantile(double p);
/* The quantile of Student's t that corresponds to the normal quantile z, by the Cornish-Fisher
 * expansion in 1/dof (Abramowitz & Stegun 26.7.5). It is accurate for dof > 2. */
double stats_t_quantile(double z, int64_t dof);
struct stats_interval stats_mean_interval(const double *v,
                                          int64_t n); /* mean with 95 % t interval */
/* Two-sided p of Fisher's sign-flip test of the mean of paired differences. Under the null
 * hypothesis their signs are exchangeable. It uses all 2^n flips if n <= 16, else 9999 random flips
 * from a fixed seed. */
double stats_sign_flip_test(const double *diff, int64_t n);
/* The smallest difference of proportions that a paired test on n items detects with power 0.8 at
 * α = 0.05. `discordant`: share of the pairs that differ. */
double stats_min_detectable_effect(int64_t n, double discordant);
/* The mean with its 95 % percentile interval from 1000 bootstrap resamples by the seed. The
 * bootstrap resamples whole clusters, because the values of a cluster are dependent. cluster_of[i]:
 * cluster of v[i], 0..n_clusters-1. */
struct stats_interval stats_cluster_bootstrap(const double *v, const int32_t *cluster_of, int64_t n,
                                              int32_t n_clusters, uint64_t seed);
/* Two results on the same n questions; the vectors are 0/1. */
struct stats_pair {
    const char *a_name, *b_name; /* may be NULL */
    const uint8_t *a, *b;        /* [n] */
};
/* [{a, b, diff, lo, hi, p, p_holm}]: the differences a - b with McNemar's p. The p values are
 * corrected by Holm, the intervals hold together. */
json_t *stats_pairs_json(const struct stats_pair *v, int n_pairs, int64_t n);
/* Two one-sided tests at 5 % (Schuirmann 1987): whether the 90 % normal interval of the mean is
 * inside (-margin, margin). */
bool stats_tost(const double *diff, int64_t n, double margin);
/* Holm's adjustment of n p values for multiple comparisons. */
void stats_holm(const double *p, int n, double *adjusted);

/*
 * task: the questions of a task, from the built-in families or from local files.
 *
 * A task from files is a built-in task (a row of a table in task.c), a recipe in YAML, a task file
 * of lm-evaluation-harness (harness_task.c), or a JSONL file with known fields. The fields of a
 * line determine its format (dataset_formats.c); the task determines the text for the model.
 * Built-in tasks use the wording of lm-evaluation-harness, so scores can be compared:
 *
 *     preamble of the subject | context of the question | delimiter | option
 *     (description, examples)                            `-- scored, one option at a time
 *
 * A task owns its texts and is immutable once it is open. A task from files stores its questions. A
 * family, or a task with split evidence, generates a question on each query.
 */

#define EVAL_MAX_OPTIONS EVAL_MAX_CHOICES

struct eval_question {
    char *context;
    json_t *chat; /* with EVAL_CHAT_CHOICE; see task_item */
    bool whole_replies;
    char *options[EVAL_MAX_OPTIONS];  /* [n], without the delimiter */
    char *contexts[EVAL_MAX_OPTIONS]; /* context of one option; NULL: `context` */
    int n, correct;
    char *answer;           /* generated answers: the gold answer; else NULL */
    struct strings aliases; /* other right answers */
    char *example_answer;   /* text after the context in an example; NULL: the delimiter and the
                               answer or the correct option */
    char *cluster; /* questions of one cluster are dependent; NULL: an independent question */
    int subject;
    const char *path; /* the file it was read from; NULL: generated */
    int line;
};
void eval_question_release(struct eval_question *q);

/* EVAL_CHAT_CHOICE: decodes one of the choices in the model's chat template. EVAL_LOGLIKELIHOOD:
 * selects the option that is most probable after the context. EVAL_GENERATE: generates a text,
 * which a grader scores. */
enum eval_output_type { EVAL_CHAT_CHOICE, EVAL_LOGLIKELIHOOD, EVAL_GENERATE };

struct eval_subject {
    char *name, *preamble;
};
struct eval_task {
    char *name;
    enum eval_output_type output_type;
    int64_t n_questions;
    bool reports_acc_norm; /* the task's usual metric is acc_norm, see eval_result */
    char *delimiter;       /* text between a context and an option */
    struct strings files;  /* files that were read */
    const char *form; /* name of the form of the files' lines; NULL: a recipe maps the fields, or
                         questions are generated */
    struct eval_subject *subjects; /* [n_subjects] */
    int n_subjects;
    struct eval_question *questions; /* [n_questions]; NULL if questions are generated */
    int family; /* generated questions: index in task_families, or in split_evidence.c; -1:
                   questions of files */
    bool is_split_evidence;
    enum data_split split;
    uint64_t seed;
    char *grader;                 /* EVAL_GENERATE: name of the grader */
    struct answer_filter *filter; /* applied to a generated text before the grader; or NULL */
    struct strings stops;         /* texts that end the generation */
    int32_t max_tokens;           /* maximum generated tokens; 0 without generation */
    /* Bytes of the longest context including its preamble and option; generated questions: tokens
     */
    size_t longest;
};

struct eval_task_options {
    const char *dir;       /* folder with the files of built-in tasks, or the file of a task
                              of lm-evaluation-harness; may be NULL */
    int64_t n;             /* questions of each task; 0: 1000 if they are generated, else all */
    int64_t shots;         /* number of examples before each question */
    enum data_split split; /* split of generated questions */
    uint64_t seed;         /* selects the questions */
};
/* `name`: a family, a kind of split evidence, a built-in task, a JSONL file, or a recipe or a task
 * file of lm-evaluation-harness (.yaml). Call eval_task_release also after an error. */
int eval_task_open(struct eval_task *b, const char *name, const struct eval_task_options *o,
                   struct error *err);
void eval_task_release(struct eval_task *b);
/* Returns question i: in `scratch` if it is generated, else a question that the task owns. The
 * caller may release `scratch` in either case. */
const struct eval_question *eval_task_question(const struct eval_task *b, int64_t i,
                                               struct eval_question *scratch);
/*
 * All questions as items for a team, [n_questions]; free them with task_items_release. An item's
 * question is the text that the model would see, and its choices are the options. If each option
 * has a separate context, the part in which the contexts differ belongs to the choice. A question
 * with a generated answer has a gold answer instead of choices.
 */
struct task_item *eval_task_items(const struct eval_task *b);
void task_items_release(struct task_item *v, int64_t n);
/* Opens the tasks of a comma-separated list of names for eval_task_open and of sets of families.
 * The caller releases each of the *n tasks and frees *out, also after an error. */
int eval_tasks_open(const char *list, const struct eval_task_options *o, struct eval_task **out,
                    int *n, struct error *err);
/* The SHA-256 of the questions with their choices, answers and examples (task_hash.c). */
void eval_task_hash(const struct eval_task *t, char out[HASH_LEN]);
/* Add to the data of a manifest the hashes of the task's files; and also its own, under its name.
 */
int eval_task_add_file_hashes(const struct eval_task *t, json_t *hashes, struct error *err);
int eval_task_add_hashes(const struct eval_task *t, json_t *hashes, struct error *err);
/* Name and explanation of built-in task i; NULL past the last. */
const char *eval_task_builtin(int i, const char **summary);

/* Lines of files (dataset_formats.c). */

/* The content of a line in any form. The row owns its strings, except `form` and `task`; a text
 * that the line lacks is NULL. */
struct dataset_row {
    const char *form; /* its name, for messages */
    const char *task; /* the task that asks the lines of an unnamed file */
    char *question, *passage;
    char *prompt; /* the whole context, if the line has it written out */
    char *choices[EVAL_MAX_OPTIONS];
    char *contexts[EVAL_MAX_OPTIONS]; /* one per choice, or NULL */
    int n, correct;                   /* number of choices; correct < 0: no choices */
    char *answer;
    struct strings aliases;
    char *chain_of_thought, *example_answer; /* example_answer: see eval_question */
    char *cluster, *subject;
};
void dataset_row_release(struct dataset_row *f);
/* Reads a line of any known form. The error names the wrong field. The caller releases `out` also
 * after an error. */
int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err);
/* The index of the choice that an answer names: an index from 0, the text of a choice, a letter, or
 * an index as text; -1: none. */
int choice_index(const json_t *answer, char *const *choices, int n);
/* "choices.text" → row["choices"]["text"], or NULL. */
const json_t *json_path_get(const json_t *row, const char *path);
/* The text of a string or a number, malloc'ed; NULL for other values. */
char *json_scalar_text(const json_t *v);
/* What lm-evaluation-harness writes before the questions of a subject of BIG-Bench Hard; NULL: the
 * subject is unknown. */
const char *bbh_description(const char *subject);
/* The prompt of a complete query: without trailing white space; with "\nAnswer:" if one of its
 * lines begins with "Question:" and its last line is no cue for the answer. malloc'ed. */
char *prompt_of_query(const char *query);
/* The prompt of a question with a free answer: as it is if it ends with a cue, else with the cue
 * of its notation; a bare question becomes "Question: …\nAnswer:". malloc'ed. */
char *prompt_of_question(const char *question);
/* The length of s without trailing white space, which includes the ideographic space U+3000. */
size_t text_trimmed_len(const char *s);
/* A copy without white space at both ends. */
char *text_trimmed(const char *s);
/* Calls fn for every row of a CSV file. The first column is the question, the last one the answer
 * (a letter or an index from 0), the others are the choices. fn receives {question, choices,
 * answer}. A header, whose first cell is "question", is skipped. */
int csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

/*
 * evaluate: results of candidates on the same questions, and statistics of their differences.
 *
 * A candidate is a name and a function that answers a task: the base model, an adapter
 * (eval_solver_answer), or a team. eval_summarize is pure: it turns results into statistics.
 */

/* The result of one question. A text without an answer is not the same as a wrong answer. */
struct eval_result {
    bool right;            /* acc: the choice is correct; for a grader, the score is at least 1/2 */
    bool right_norm;       /* acc_norm: the option with the highest log-probability per character is
                              correct */
    bool prompt_truncated; /* the beginning of a too long context was dropped */
    bool truncated;        /* generation reached its token limit */
    bool no_answer;        /* the grader found no answer in the text */
    bool failed;           /* no text came from a remote server; the other members are 0 */
    int16_t choice;        /* index of the option; -1: none */
    float prob;            /* probability of the choice among the options */
    float score;           /* score of the grader */
};
struct eval_cost {
    int64_t calls, prefilled, generated;
    double seconds, joules; /* joules: of the whole machine, see energy_now; NaN: not known */
};
struct eval_candidate {
    const char *name;
    /* Answers all questions of a task: sets out[task->n_questions] and adds to *cost. `p` (may be
     * NULL) counts questions, beginning with `done`. */
    int (*answer)(void *ctx, const struct eval_task *task, struct eval_result *out,
                  struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);
    void *ctx;
};

/* One adapter (NULL: the base model) on an engine. */
struct eval_solver {
    struct engine *e;
    const struct tokenizer *tok;
    struct adapter *adapter;
    int32_t max_len;       /* tokens that a request may have; longer contexts are cut */
    bool chain_of_thought; /* EVAL_CHAT_CHOICE: generate reasoning before the choice */
};
/* eval_candidate.answer of a struct eval_solver. */
int eval_solver_answer(void *solver, const struct eval_task *task, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/* Counts the requests that eval_solver_answer would run, and checks them; runs none. */
int eval_solver_count(const struct eval_solver *solver, const struct eval_task *task,
                      struct work_counter *counter, struct error *err);

/* A model of a remote server, which is asked for generated answers. */
struct remote;
struct eval_remote {
    struct remote *server;
    bool is_chat;   /* a question is the message of a chat; false: a prompt, as local models get */
    int n_requests; /* at once, at least 1 */
    int64_t seed;   /* sent with each request; the temperature is 0 */
};
/* Refuses tasks whose answers are not generated: a server reports no probabilities of choices. */
int eval_remote_check(const struct eval_task *task, struct error *err);
/* eval_candidate.answer of a struct eval_remote. A question without a reply is marked as failed,
 * and a warning has the reason of the first one; the function returns OK. */
int eval_remote_answer(void *remote, const struct eval_task *task, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/* Sets *out to the grader of an EVAL_GENERATE task, and to NULL for other tasks. Fails if the
 * grader rejects the gold answer of a question. */
struct grader;
int eval_task_grader(const struct eval_task *task, const struct grader **out, struct error *err);
/* Approximate length of a task's longest request, in tokens. */
int32_t eval_task_max_request_tokens(const struct eval_task *task, const struct tokenizer *tok);
/* Encodes a context and its continuation like lm-evaluation-harness. White space at the end of the
 * context moves to the continuation. Context and continuation are encoded as one text; the tokens
 * after the length of the encoded context are the continuation. If there are no such tokens, the
 * continuation is encoded separately. Appends to prompt and continuation_ids. */
void eval_encode_pair(const struct tokenizer *tok, const char *context, const char *continuation,
                      struct token_ids *prompt, struct token_ids *continuation_ids);

/* The scores of a candidate, and its comparison with the first candidate on the same questions. */
struct eval_summary {
    int64_t n, failed; /* questions with a result, and failed ones, which count nowhere else */
    int64_t correct, correct_norm, prompts_truncated, truncated, no_answer;
    struct stats_interval acc, acc_norm; /* Wilson */
    struct stats_interval clustered;     /* interval of acc: bootstrap over clusters */
    int64_t n_clusters;
    double score; /* mean score of the grader */
    struct eval_cost cost;
    /* comparison with the first candidate; for the first candidate: zero, with p = 1 */
    struct stats_mcnemar versus;
    struct stats_interval versus_clustered;
    bool equivalent; /* the difference is within 2 points, by two one-sided tests at 5 % */
    double p_holm;   /* p adjusted for all comparisons of the run; set by the caller, initially 1 */
};
/* Compares the results [n] of a candidate with those of the first candidate, baseline [n], of which
 * none failed. The candidate's failed questions are left out of both. cluster_of: [n], from
 * eval_task_clusters. */
struct eval_summary eval_summarize(const struct eval_result *results,
                                   const struct eval_result *baseline, int64_t n,
                                   const int32_t *cluster_of, int32_t n_clusters, uint64_t seed);
/* Sets cluster_of[n_questions] to the numbers of the questions' clusters. A question without a
 * cluster forms a separate cluster. Returns the number of clusters. */
int32_t eval_task_clusters(const struct eval_task *task, int32_t *cluster_of);

/*
 * comparison: candidates on the same questions of several tasks. The first candidate is the one
 * that the others are compared with.
 */

/* Assumed fraction of questions that only one of two candidates answers correctly, for the smallest
 * detectable difference. */
#define EVAL_DISCORDANT 0.2

struct eval_comparison {
    const struct eval_task *tasks;           /* [n_tasks], borrowed */
    const struct eval_candidate *candidates; /* [n_candidates], borrowed */
    int n_tasks, n_candidates;
    struct eval_result **results;   /* [n_tasks · n_candidates][n of the task] */
    struct eval_summary *summaries; /* [n_tasks · n_candidates] */
};
/* Fills results and summaries, with p_holm over all comparisons. Call eval_comparison_release also
 * after an error. */
int eval_comparison_run(struct eval_comparison *c, uint64_t seed, struct error *err);
void eval_comparison_release(struct eval_comparison *c);
/* {task, adapter, n, acc, lo, hi, clusters, form, …, kind, difference}; `first`: the first
 * candidate, without a difference. */
json_t *eval_summary_json(const struct eval_task *b, const char *candidate, const char *kind,
                          const struct eval_summary *s, bool first);

/*
 * preregistration: the plan of a comparison, sealed in a file before results exist.
 */

/* The tasks with the hashes of their questions, candidates, planned comparisons, settings and
 * statistics of a comparison that need not have run. Takes ownership of `settings`, an object. */
json_t *eval_plan_json(const struct eval_comparison *c, json_t *settings);
/* ERR_STATE if the file exists. */
int eval_plan_check_new(const char *path, struct error *err);
/* Writes manifest and plan with the time to a new file. */
int eval_plan_seal(const char *path, const json_t *manifest, const json_t *plan, struct error *err);
/* Reads a sealed plan; adds to it {file, sha256}. NULL: `err` is set. */
json_t *eval_plan_read(const char *path, struct error *err);
/* Compares manifest and plan of an evaluation with the sealed ones, item by item: {file, sha256,
 * sealed, kept, items: [{item, kept, planned, found}]}. `planned` or `found` is missing if only one
 * of both has the item. */
json_t *eval_plan_compare(const json_t *sealed, const json_t *manifest, const json_t *plan);
/* Appends the report of eval_plan_compare as text: a sentence, and a line for each deviation. */
void eval_plan_report(const json_t *report, struct buf *b);

/* eval_request: the questions of a comparison, as options of the command and the library. */
struct eval_request {
    char *tasks, *data, *split;
    int64_t n, shots, seed;
    bool chain_of_thought;
};
extern const struct option_row eval_request_rows[];
/* Opens the tasks. ERR_USAGE if tasks from files are combined with options for generated questions.
 * The caller releases each of the *n tasks and frees *tasks, also after an error. */
int eval_request_open(const struct eval_request *r, struct eval_task **tasks, int *n,
                      struct error *err);

/*
 * sequential: a test whether b is better than a that may decide after each pair of scores.
 *
 * A fixed-sample test that is repeated after every pair eventually finds a difference, even if none
 * exists. This test may be evaluated after every pair. It is a betting test (Waudby-Smith & Ramdas
 * 2024, "Estimating means of bounded random variables by betting", JRSS B 86(1)). For the
 * hypothesis that the mean of the differences d = b - a is μ, a bettor begins with wealth 1. Before
 * each pair the bettor stakes a fixed share λ of its wealth on "more than μ". So the wealth is the
 * product of 1 + λ(d_i - μ), which cannot become negative if λ <= 1/2. If μ is the true mean, the
 * expected gain is zero for any distribution of the scores and any dependence on earlier scores. So
 * the wealth is an e-value at every time, and by Ville's inequality the probability that it ever
 * reaches 1/p is at most p. The best λ depends on unknown quantities, so eight bettors with λ =
 * 2^-1 … 2^-8 share the initial wealth. Their mean wealth is an e-value too; it is at least an
 * eighth of the wealth of the best bettor. Eight more bettors stake on "less than μ". From
 * min_pairs on, the test decides when the mean wealth of either side reaches 2/α, so the
 * probability of a wrong decision is at most α.
 *
 * The confidence sequence is the set of all μ for which neither side has reached 2/α. With
 * probability 1 - α it contains the true mean at all times. From min_pairs on, it excludes 0
 * exactly when the test decides.
 *
 * The only assumption is that, if there is no difference, the expected difference of the next pair
 * is 0 given all earlier pairs. The state is a function of the options and the pairs, so stored
 * pairs reproduce the same bits on every machine.
 */

enum { SEQUENTIAL_BETS = 8, SEQUENTIAL_PAIRS_MAX = 100000 };

enum sequential_decision {
    SEQUENTIAL_CONTINUE,
    SEQUENTIAL_B_BETTER,
    SEQUENTIAL_B_WORSE,
    SEQUENTIAL_NO_DIFFERENCE, /* no decision after max_pairs: no difference, or one too small */
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
    double log_wealth[2][SEQUENTIAL_BETS]; /* μ = 0: bettors on "b is better", on "b is worse" */
};

void sequential_init(struct sequential_test *s, const struct sequential_options *o);
void sequential_release(struct sequential_test *s);
/* Adds a pair of scores in [0, 1] and returns the decision. After a decision it changes nothing. */
enum sequential_decision sequential_add(struct sequential_test *s, double a, double b);
/* The e-value against "no difference" of the bettors on b (side 0) or on a (side 1); at most
 * 1e307. */
double sequential_e_value(const struct sequential_test *s, int side);
double sequential_threshold(const struct sequential_test *s); /* the e-value that decides: 2/α */
/* The mean difference with the interval of its confidence sequence. The time is proportional to the
 * number of pairs: 1 ms for a thousand. */
struct stats_interval sequential_difference(const struct sequential_test *s);

#endif
