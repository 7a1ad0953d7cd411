/*
 * contest: contestants on the same questions, and what may be said of the differences.
 *
 * A contestant is a name and a function that answers a bank of questions: the base, an adapter
 * (eval_solver_answer), or a team. contest_compare is pure: outcomes in, figures out.
 */
#ifndef SHOAL_EVAL_CONTEST_H
#define SHOAL_EVAL_CONTEST_H

#include "eval/task.h"

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
    int (*answer)(void *ctx, const struct eval_task *b, struct eval_result *out, struct eval_cost *cost,
                  struct progress *p, int64_t done, struct error *err);
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
int eval_solver_answer(void *solver, const struct eval_task *b, struct eval_result *out, struct eval_cost *cost,
                  struct progress *p, int64_t done, struct error *err);

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
struct eval_summary eval_summarize(const struct eval_result *own, const struct eval_result *first, int64_t n,
                              const int32_t *cluster_of, int32_t n_clusters, uint64_t seed);
/* Numbers questions by their cluster; questions without one are their own. Returns how many there
 * are. */
int32_t eval_task_clusters(const struct eval_task *b, int32_t *cluster_of);

#endif
