/*
 * grow: a team of agents teaches one adapter, or each of its agents, without labels.
 *
 * A run has rounds of three steps:
 *
 *   propose  the agents, and from the second round on the adapter of the round before, sample
 *            answers to questions in one multi-LoRA batch, until an answer to a question passes or
 *            its samples end (swarm/checked_samples.c)
 *   check    a check (check/check.h) scores each answer without the right one; of each question the
 *            most frequent answer that passed is kept
 *   learn    a new adapter is trained on all answers kept so far, those of rarer kinds repeated;
 *            the gate (gate.c) compares its answers to held-out questions with those of the best
 *            adapter before
 *
 * With --learn each the agents are the learners: each one's adapter is trained on all kept answers,
 * also those of the other agents, and replaces the agent in the proposals of the next round. Each
 * learner has its own gate and is published in its own folder below --out.
 *
 * Every round trains a new adapter, or from the adapter with which the agent entered the run, never
 * from that of the round before: repeated training on the same answers overfits (Zelikman et al.
 * 2022). The last adapter that the gate accepted is published if it is better than the baseline. A
 * run refuses to train if too few questions of its first round have an answer that passes, because
 * an answer that no agent finds cannot be learned.
 *
 * An adapter that learns one task forgets others. Questions of such tasks (--rehearse) are answered
 * once by each agent before the first round; the most frequent answer is learned as well, without a
 * check, as in learning without forgetting (Li and Hoiem 2016).
 *
 * A run is a function of model, agents, questions, options and numeric class. It stores no
 * position: calls are in RUNS/shoal.db and each round's adapter is in the run's folder, and a
 * continued run computes the rest from the start. So a run that was killed and continued ends with
 * the same hashes.
 *
 *   RUNS/ID/round-N/kept.jsonl      lines {messages, source} for the training
 *   RUNS/ID/held_out.jsonl          the questions of the gate, which are in no round
 *   RUNS/ID/round-N/adapter/        the adapter of the round; --learn each: NAME/ of each agent
 *   RUNS/ID/round-N/round.json      figures of the round; exists when the round is complete
 *   RUNS/ID/result.json, report.html
 */
#ifndef SHOAL_GROW_H
#define SHOAL_GROW_H

#include "swarm/swarm.h"
#include "train/train.h"

enum { GROW_MAX_ROUNDS = 100, GROW_MAX_REFERENCES = 8 };

struct grow_options { /* filled from grow_option_rows */
    struct strings prompts, rehearse, compare, references;
    char *check, *labels, *learners, *id, *grader, *test, *test_retained;
    int64_t n, rehearse_n, test_n, rounds, samples, passes, per_round, repeat, max_tokens;
    double temperature, min_coverage, held_out;
    bool check_sandbox, chain_of_thought;
    /* The training: its data are the kept answers. train.seed is the seed of the run. */
    struct train_settings learn;
};
extern const struct option_table grow_option_tables[]; /* all options: also those of the training */
/* Checks everything that needs neither a file nor the model. */
int grow_options_check(const struct grow_options *o, struct error *err);

/* Questions without their answers (questions.c). */
struct grow_question {
    struct task_item item; /* without choices */
    char *kind; /* "arithmetic", "arithmetic, rare", or the member "kind" of a line; "": none */
};
struct grow_questions {
    struct grow_question *v; /* [n + n_rehearsal]: in the order in which rounds ask them; then those
                                of --rehearse */
    int n, n_rehearsal;
    size_t longest; /* bytes of the longest question */
    char hash[HASH_LEN];
};
/*
 * Opens the questions of a list of families (their train split, n questions each) and of files. A
 * line of a file is {"question": text}, {"prompt": text} or {"messages": [question, perhaps
 * answer]} with the members that the check needs. The members "kind" and "answer" are optional; an
 * answer is read for --labels gold and to report how many kept answers are right. Those of
 * --rehearse need no check. The caller releases `out` also after an error.
 */
int grow_questions_open(const struct grow_options *o, struct grow_questions *out,
                        struct error *err);
void grow_questions_release(struct grow_questions *q);

struct grow_env {
    struct model *m;
    struct pool *pool;
    struct agent team[TEAM_MAX]; /* adapters bound to the model; room for one more agent */
    int n_agents;
};
/* {questions, rehearsal, rounds, questions_per_round, samples, max_calls, trainings, memory};
 * max_calls, trainings: of all rounds at most. n_agents: size of the team. */
json_t *grow_plan(const struct grow_options *o, const struct grow_questions *q, int n_agents,
                  const struct model_size *size, enum numeric_class cls, struct pool *pool,
                  struct error *err);
/* ERR_MEMORY: neither the proposals nor the training of a model of this size fit into the limit. */
int grow_memory_check(const struct grow_options *o, const struct grow_questions *q, int n_agents,
                      const struct model_size *size, enum numeric_class cls, struct pool *pool,
                      struct error *err);
/*
 * Runs, or continues, and publishes. The result, which the caller frees:
 *
 * {run, check, agents, rehearsed, rounds: [round], published, dir, hash, best_round, cost}; a round
 * is {round, questions, passed, coverage, pass_at: [share of the questions with a passing answer
 * among the first k samples], kinds: [{kind, questions, passed, kept, repeated}], agents: [{name,
 * samples, passed, kept}], kept, lines, accepted, gate, right (of kept answers, where the right one
 * is known), check, cost, adapter: {dir, hash, published, why, …}}. With --learn each, accepted,
 * gate and adapter of a round, and dir, hash, best_round and gate of the result, are members of the
 * list `learners`: [{name, …}]; published: whether one of them is. With o->test also test: {n,
 * all_wrong, rows (report_row_add), comparisons (stats_pairs_json), arms: {NAME: result of a
 * further run}}.
 */
json_t *grow_run(const struct grow_env *env, const struct grow_options *o,
                 const struct grow_questions *q, struct error *err);
void grow_print(const json_t *result, FILE *f);
/* Appends the result as a page. */
void grow_page(const json_t *result, struct buf *page);

#endif
