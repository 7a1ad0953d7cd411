/* internal.h: the state of a run, which run.c and round.c share. */
#ifndef SHOAL_GROW_INTERNAL_H
#define SHOAL_GROW_INTERNAL_H

#include "grow/grow.h"

void grow_question_release(struct grow_question *q);

enum grow_labels { LABELS_CHECK, LABELS_VOTES, LABELS_GOLD };
int grow_labels_parse(const char *name, enum grow_labels *out, struct error *err);

/* A kept answer to a question. */
struct kept_answer {
    int question, agent, sample, round; /* sample: its number among the question's; -1: gold */
    char *text;                         /* as the agent wrote it */
    bool held_out;
};
/* What became of each question so far. */
struct question_state {
    bool asked, kept;
};

struct grow_run {
    const struct grow_env *env;
    const struct grow_options *o;
    const struct grow_questions *q;
    enum grow_labels labels;
    enum dtype kv;
    char *id, *dir;
    struct store *store;
    struct question_state *state; /* [q->n] */
    struct kept_answer *kept;     /* [n_kept] of all rounds */
    int n_kept, n_agents;         /* agents of this round */
    struct agent team[TEAM_MAX];
    struct adapter *grown; /* of the last round whose adapter passed the gate; or NULL */
    int best_round;        /* its number from 1; 0: none */
    json_t *rounds;
};

/* Proposes and checks answers to the round's questions, adds the kept ones to r->kept and the
 * figures to `report`. */
int round_propose(struct grow_run *r, int round, json_t *report, struct error *err);
/* Writes kept.jsonl and held_out.jsonl of all answers kept so far to the folder `dir`; sets the
 * numbers of lines. Adds how often lines of each kind are repeated to `report`. */
int round_write(const struct grow_run *r, const char *dir, int *lines, int *held_out,
                json_t *report, struct error *err);
/* The measurements of --test and --compare (compare.c), for the result. */
json_t *grow_compare(struct grow_run *r, struct error *err);
int grow_questions_open_split(const struct grow_options *o, enum data_split split,
                              struct grow_questions *out, struct error *err);
/* An engine for proposals and answers to the questions `q`. */
struct engine *grow_engine_open(const struct grow_run *r, const struct grow_questions *q,
                                struct error *err);
/* Tokens of the longest proposal with its question, for these agents. */
int32_t round_longest(const struct grow_options *o, const struct grow_questions *q,
                      int32_t max_seq_len);

#endif
