/*
 * sleep: the memories of a user become weights of the user's adapter.
 *
 * A run has four steps:
 *
 *   read      the memories that hold become facts: one for each attribute and language, because a
 *             question such as "what do I like?" is answered with all values (facts.c)
 *   train     a LoRA learns to answer questions about the facts in several wordings (wordings.c),
 *             together with questions of the tasks to retain (--rehearse)
 *   measure   before and after the training, by greedy generation in the exact class: questions
 *             about the facts in wordings that are in no training line, and other questions of the
 *             tasks to retain (measure.c)
 *   publish   a new version of the adapter directory, if more of the memories are recalled and the
 *             accuracy on the tasks to retain fell by at most --retain-points
 *
 * Training starts from the current version of the directory, and from the memories that hold now.
 * Every version records the ids and hashes of its memories. A memory that was deleted or ended is
 * still in the weights of the versions that learned it. So the next run starts from the base, the
 * adapter that was there before the first run, and not from such a version. No run trains from a
 * version that knows more than the memories of the run.
 *
 * A run is a function of model, memories, options and numeric class. OUT/.sleep holds its training
 * lines and its checkpoint until it ends; the same command continues a run that was interrupted.
 * Besides its weights, a version contains no text of a memory.
 */
#ifndef SHOAL_SLEEP_H
#define SHOAL_SLEEP_H

#include "memory/memory.h"
#include "train/train.h"

struct sleep_options { /* filled from sleep_option_tables */
    char *memory;      /* a database, or an export NAME.jsonl of one user's memories */
    char *user, *rehearse;
    int64_t rehearse_n, retain_n;
    double points;
    struct train_settings learn; /* out, init_adapter, max_memory, limits and train are used */
};
extern const struct option_table sleep_option_tables[];
/* Checks everything that needs neither a file nor the model. */
int sleep_options_check(const struct sleep_options *o, struct error *err);

/* The versions of --out that learned memories, and the memories of the user, without a model:
 * {user, memories, versions: [{hash, number, created, current, memories, forgotten: [id], learned,
 * recall, retention}], unlearned: [id]}. forgotten: memories that the version learned and that no
 * longer hold; learned, recall and retention: as in the result of sleep_run; unlearned: memories
 * that the current version has not learned. NULL sets err. */
json_t *sleep_status(const struct sleep_options *o, struct error *err);
void sleep_status_print(const json_t *status, FILE *f);

/* The work of a run: {user, memories, facts, lines, rehearsal, questions, questions_to_retain,
 * start, base, unlearned, versions, up_to_date, example}. Writes nothing. */
json_t *sleep_plan(const struct sleep_options *o, const struct model_size *size, struct error *err);
/* ERR_MEMORY: a model of this size cannot be trained within the limit. */
int sleep_memory_check(const struct sleep_options *o, const struct model_size *size,
                       enum numeric_class cls, struct pool *pool, struct error *err);

/* Writes memories of memories_list to a file, mode 0600, that sleep_options.memory may name. */
int sleep_memories_export(const json_t *list, const char *path, struct error *err);

/* schedule: nightly runs at a local time of day */

/* Parses "HH:MM"; *minute: of the day. */
int sleep_time_parse(const char *text, int *minute, struct error *err);
/* The first time after `now` at which the local time of day is `minute`, in seconds since 1970. A
 * minute that a change of the clocks skips is moved by the size of the change. */
int64_t sleep_time_next(int64_t now, int minute);

struct sleep_env {
    struct model *m;     /* used for training */
    struct model *exact; /* used for measuring; in the exact class; may be m */
    struct pool *pool;
};
/*
 * Runs, or continues, and publishes: {user, memories, facts, start, base, versions, lines,
 * rehearsal, first_loss, last_loss, recall, retention, learned, published, up_to_date, why, dir,
 * hash}; recall and retention are {n, before: interval, after: interval, change, lo, hi, p} of
 * paired answers; retention also has sets: [{name, …}], and is null if nothing was measured;
 * learned is [{id, hash, new: not learned by the current version before, before, after: questions
 * that recalled the memory}]. It contains no text of a memory. The caller frees it. If the gate
 * rejects the adapter, published is false, and err is not set. up_to_date: the current version has
 * learned exactly these memories, and nothing was done. If no memories are left, the base becomes
 * the current version.
 */
json_t *sleep_run(const struct sleep_env *env, const struct sleep_options *o, struct error *err);
void sleep_print(const json_t *result, FILE *f);

#endif
