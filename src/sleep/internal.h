/* sleep: declarations shared by its files. */
#ifndef SHOAL_SLEEP_INTERNAL_H
#define SHOAL_SLEEP_INTERNAL_H

#include "sleep/sleep.h"

/* options.c */

/* The settings of a training on these files. */
struct train_settings sleep_train_settings(const struct sleep_options *o,
                                           const struct strings *data);

/* wordings.c */

enum {
    SLEEP_TRAINED = 12, /* questions of an attribute for training, each without and with a prefix */
    SLEEP_PREFIXES = 6, /* in turn */
    SLEEP_OBJECTS = 4,  /* names of an attribute for training */
    SLEEP_FRAMES = 12,  /* questions with a place for a name, each with two of them */
    SLEEP_QUESTIONS = 2 * SLEEP_TRAINED + 2 * SLEEP_FRAMES,
    SLEEP_HELD_OUT = 2 /* questions for measuring only */
};
bool sleep_has_wordings(const char *attribute);
/* Question i of an attribute that has wordings; malloc'ed. */
char *sleep_trained_question(enum language l, const char *attribute, int i);
char *sleep_held_out_question(enum language l, const char *attribute, int i);
const char *sleep_separator(enum language l);

/* facts.c */

struct sleep_memory {
    int64_t id;
    const char *value;   /* borrowed from sleep_facts.list */
    char hash[HASH_LEN]; /* SHA-256 of user, attribute and value */
    int fact;            /* index; -1: its attribute has no wordings */
};
struct sleep_fact {
    const char *attribute; /* borrowed */
    enum language language;
    char *answer; /* the values of its memories */
};
/* The memories of a user that hold, in the order of their ids. */
struct sleep_facts {
    json_t *list;
    struct sleep_memory *memories; /* [n_memories] */
    struct sleep_fact *v;          /* [n] */
    int n_memories, n;
};
int sleep_facts_open(const struct sleep_options *o, struct sleep_facts *out, struct error *err);
void sleep_facts_release(struct sleep_facts *f);
/* Memories that are part of a fact. */
int sleep_facts_learnable(const struct sleep_facts *f);
bool sleep_facts_hold(const struct sleep_facts *f, const char *hash);
/* Appends the training lines. */
void sleep_facts_write(const struct sleep_facts *f, struct buf *text);
/* Whether an answer contains a value as whole words, in any case and width. */
bool sleep_answer_has(const char *answer, const char *value);

/* rehearsal.c */

/* The questions of --rehearse. A set is a family, or the file. */
struct sleep_rehearsal {
    const char *name; /* as given; NULL: none */
    int n_sets;
    int families[MAX_FAMILIES]; /* [n_sets] of a list of families */
    json_t *trained, *held_out; /* lists of messages of a file; the last message is the answer */
};
int sleep_rehearsal_open(const struct sleep_options *o, struct sleep_rehearsal *out,
                         struct error *err);
void sleep_rehearsal_release(struct sleep_rehearsal *r);
const char *sleep_rehearsal_set(const struct sleep_rehearsal *r, int set); /* its name */
/* Conversations of a set, at most `most`. */
int64_t sleep_rehearsal_size(const struct sleep_rehearsal *r, bool held_out, int64_t most);
/* Conversation i of n of a set, {messages, tools}; the last message is the answer. */
json_t *sleep_rehearsal_at(const struct sleep_rehearsal *r, int set, bool held_out, int64_t i,
                           int64_t n, uint64_t seed);
/* Appends at most o->rehearse_n training lines of each set, the sets in turn, and returns their
 * number. */
int64_t sleep_rehearsal_write(const struct sleep_rehearsal *r, const struct sleep_options *o,
                              struct buf *text);

/* provenance.c */

/* The adapter that a run starts from. */
struct sleep_start {
    char *dir;                           /* NULL: a new adapter */
    char hash[HASH_LEN], base[HASH_LEN]; /* "": none */
    json_t *versions, *unlearned;        /* as of sleep_status */
    bool up_to_date;                     /* the start has learned exactly these memories */
    bool knows_forgotten; /* the current version has learned memories that no longer hold */
};
int sleep_start_find(const struct sleep_options *o, const struct sleep_facts *f,
                     const struct model_config *shape, struct sleep_start *out, struct error *err);
void sleep_start_release(struct sleep_start *s);
/* Prints the rows of versions that know memories which no longer hold; returns whether it printed
 * one. */
bool sleep_forgotten_print(const json_t *versions, FILE *f);

/* measure.c */

/* Seed of generated questions to retain. They come from the dev split, so that test questions stay
 * unused. */
enum { RETAIN_SEED = 1000003 };

/* Questions in this order: SLEEP_HELD_OUT of each fact, then those to retain, set by set. */
struct sleep_measure {
    struct sleep_question *v; /* [n] */
    int n;
    int32_t longest; /* tokens of a question with its answer */
    json_t *sets;    /* names of the sets to retain; all have as many questions */
    /* Whether a memory was recalled, [n_recall], SLEEP_HELD_OUT of each memory of a fact, and a
     * question to retain answered, [n_retain]; before and after. */
    int64_t n_recall, n_retain;
    uint8_t *recall[2], *retain[2];
};
int sleep_measure_open(struct sleep_measure *q, const struct model *m,
                       const struct sleep_options *o, const struct sleep_facts *f,
                       const struct sleep_rehearsal *r, struct error *err);
void sleep_measure_release(struct sleep_measure *q);
/* phase 0: before, 1: after. The adapter is NULL, or bound to env->exact. */
int sleep_measure_run(struct sleep_measure *q, const struct sleep_env *env,
                      const struct engine_limits *limits, const struct sleep_facts *f,
                      struct adapter *a, int phase, struct error *err);
/* {n, before, after, change, lo, hi, p}, and `sets` of retention; null: nothing was measured. */
json_t *sleep_recall_json(const struct sleep_measure *q);
json_t *sleep_retention_json(const struct sleep_measure *q);
/* [{id, hash, new, before, after}] of the memories that are part of a fact. new: whether the id is
 * in `unlearned`; before, after: how many of its SLEEP_HELD_OUT questions recalled it. */
json_t *sleep_learned_json(const struct sleep_measure *q, const struct sleep_facts *f,
                           const json_t *unlearned);

#endif
