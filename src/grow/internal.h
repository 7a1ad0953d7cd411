/* grow: the state of a run, and the functions that its files share. */
#ifndef SHOAL_GROW_INTERNAL_H
#define SHOAL_GROW_INTERNAL_H

#include "grow/grow.h"

enum grow_labels { LABELS_CHECK, LABELS_VOTES, LABELS_GOLD };
int grow_labels_parse(const char *name, enum grow_labels *out, struct error *err);

/* A kept answer to a question. */
struct kept_answer {
    int question, sample, round; /* sample: its number among the question's; -1: gold */
    const char *agent;           /* its name; NULL: gold */
    char *adapter_hash;          /* NULL: the base model */
    char *text;                  /* as the agent wrote it */
};
/* The state of a question after the rounds so far. */
struct question_state {
    bool asked, kept, held_out;
};
/* Held-out questions: no round asks them. */
struct grow_gate {
    struct task_item *items; /* [n] borrowed */
    int *places, n;          /* indices in the questions */
    char **votes;            /* [n] the team's answers, with LABELS_VOTES */
};
/* An adapter that the run trains. */
struct grow_learner {
    const char *name;      /* "adapter", or the agent's name: its folder in a round */
    int agent;             /* --learn each: its place in the team; -1: it joins the team */
    struct adapter *start; /* borrowed: every round trains from it; NULL: --init-adapter or none */
    char *out, *dir;       /* where it is published; folder of its baseline */
    struct adapter *grown; /* the last accepted adapter, or NULL */
    int best_round;        /* its number from 1; 0: none */
    /* [gate.n] whether the answer of the baseline, and of the best round, is accepted */
    uint8_t *baseline, *best;
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
    int n_kept, n_rehearsed;      /* n_rehearsed: the first of them, of --rehearse */
    int n_agents;                 /* of this round */
    struct agent team[TEAM_MAX];
    struct grow_learner learners[TEAM_MAX];
    int n_learners;
    struct grow_gate gate;
    json_t *rounds;
};

/* An engine with the check of a run. It must not move while it is open. */
struct answering {
    const struct grow_run *r;
    const struct grader *grader;
    struct engine *engine;
    struct engine_client client;
    struct llm_client llm;
    struct check_questioner questioner;
    struct check_model model;
    struct check *check; /* NULL: the labels are not a check's */
};
struct sampling_plan {
    int samples, passes; /* passes: see struct checked_options */
    bool checked;
    uint64_t round; /* rounds draw other samples */
};
/* For questions of `q`. Call answering_close also after an error. */
int answering_open(struct answering *a, const struct grow_run *r, const struct grow_questions *q,
                   struct error *err);
void answering_close(struct answering *a);
/* The caller releases `out`, also after an error. */
int answers_sample(struct answering *a, const struct agent *team, int n_team,
                   const struct task_item *items, int n, const struct sampling_plan *plan,
                   struct checked_samples *out, struct progress *p, struct error *err);
/* Whether every agent learns, instead of one new adapter. */
bool grow_learns_each(const struct grow_options *o);
/* The settings of a training whose data is `data`; borrowed from o. */
struct train_settings learn_settings(const struct grow_options *o, const struct strings *data);
/* Refuses --learn each with an agent whose name cannot be a folder (learners.c). */
int learners_check(const struct grow_env *env, const struct grow_options *o, struct error *err);
/* Sets the learners of a run, whose folder is known. */
void learners_open(struct grow_run *r);
void learners_close(struct grow_run *r);
/* Where a learner's members are in the report of a round or of a run: the report itself or, with
 * --learn each, an object of its list "learners"; borrowed. */
json_t *learner_record(const struct grow_run *r, int learner, json_t *report);
/* Trains all learners on the files of a round; adds "adapter" to their records in `report`. */
int learners_round(const struct grow_run *r, int round, json_t *report, struct error *err);
/* A learner's adapter of a round that the gates accept becomes an agent. */
int learner_adopt(struct grow_run *r, struct grow_learner *l, int round, json_t *record,
                  struct error *err);
/* Publishes the adapters that are better than their baselines. */
int learners_publish(const struct grow_run *r, struct error *err);
/* Selects the held-out questions and measures the learners' baselines. */
int grow_gate_open(struct grow_run *r, struct error *err);
void grow_gate_close(struct grow_run *r);
/* Measures a learner's adapter of a round and adds "gate" to `record`. */
int grow_gate_round(struct grow_run *r, struct grow_learner *l, struct adapter *candidate,
                    bool *accepted, json_t *record, struct error *err);
/* Whether the grown adapter is better than the baseline beyond chance. */
bool grow_gate_publish(const struct grow_run *r, const struct grow_learner *l);
/* {n, before, after, change, lo, hi, p} of two vectors of accepted answers. */
json_t *grow_gate_json(const uint8_t *before, const uint8_t *after, int n);

/* Asks the questions of --rehearse and adds the answers to r->kept. */
int rehearsal_ask(struct grow_run *r, struct error *err);
/* Proposes and checks answers to the round's questions, adds the kept ones to r->kept and the
 * figures to `report`. */
int round_propose(struct grow_run *r, int round, json_t *report, struct error *err);
/* Writes kept.jsonl of all answers kept so far to the folder `dir`; sets the number of lines. Adds
 * how often lines of each kind are repeated to `report`. */
int round_write(const struct grow_run *r, const char *dir, int *lines, json_t *report,
                struct error *err);
/* The measurements of --test and --compare (compare.c), for the result. */
json_t *grow_compare(struct grow_run *r, struct error *err);
int grow_questions_open_split(const struct grow_options *o, enum data_split split,
                              struct grow_questions *out, struct error *err);
/* Tokens of the longest answer with its question. */
int32_t round_longest(const struct grow_options *o, const struct grow_questions *q,
                      int32_t max_seq_len);

#endif
