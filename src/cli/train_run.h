/*
 * train_run: the steps of shoal train around the training — the run's folder and its rows in the
 * store, the comparison with the previous adapter, the gate, and publishing or rejecting the
 * result.
 *
 * RUNS/ID/ holds train.jsonl and report.html; RUNS/shoal.db holds the same as rows. ID is a
 * function of the output directory, the model and the options, so a repeated command continues or
 * replaces its run.
 */
#ifndef SHOAL_TRAIN_RUN_H
#define SHOAL_TRAIN_RUN_H

#include "cli/cli.h"
#include "train/train.h"

struct train_gate_options {
    char *runs, *retain;
    struct strings eval_data, retain_data, tags;
    double alpha, tolerance, points;
    int64_t retain_n;
};
#define GATE_ROW(opt, kind, type, field, fallback, min, max, metavar, ...)                         \
    { opt, kind, offsetof(type, field), fallback, min, max, metavar, __VA_ARGS__ }
#define GATE_ROWS(type, at)                                                                        \
    GATE_ROW("runs", OPT_STRING, type, at.runs, "runs", 0, 0, "DIR",                               \
             "folder of runs and of shoal.db", JOB_SERVER),                                        \
        GATE_ROW("eval-data", OPT_LIST, type, at.eval_data, NULL, 0, 0, "FILE …",                  \
                 "held-out conversations: published only when better on them than the current "    \
                 "adapter; NAME=FILE for one of several",                                          \
                 JOB_NAMED),                                                                       \
        GATE_ROW("gate-alpha", OPT_FLOAT, type, at.alpha, "0.05", 1e-6, 1, "P",                    \
                 "better means: chance would do it at most this often"),                           \
        GATE_ROW("retain-data", OPT_LIST, type, at.retain_data, NULL, 0, 0, "FILE …",              \
                 "conversations that must not become worse; NAME=FILE for one of several",         \
                 JOB_NAMED),                                                                       \
        GATE_ROW("retain-tolerance", OPT_FLOAT, type, at.tolerance, "0.05", 0, 100, "X",           \
                 "increase of the loss on them that is allowed, in nats per token"),               \
        GATE_ROW("retain", OPT_STRING, type, at.retain, NULL, 0, 0, "LIST",                        \
                 "task families that must not become worse: fry, or names", JOB_TEXT),             \
        GATE_ROW("retain-n", OPT_INT, type, at.retain_n, "500", 1, 1e6, "N", "questions of each"), \
        GATE_ROW("retain-points", OPT_FLOAT, type, at.points, "1", 0, 100, "X",                    \
                 "accuracy that may be lost, in points"),                                          \
        GATE_ROW("tags", OPT_LIST, type, at.tags, NULL, 0, 0, "TAG …",                             \
                 "kept with the version, for 'shoal adapter list'", JOB_TEXT)

/* The FILE, or the file of NAME=FILE with the adapter's name; NULL: the list has no file for it. */
const char *data_file_for_adapter(const struct strings *list, const char *name);

struct train_result; /* an adapter in training, and the data to judge it */
struct train_run {
    const struct cli_options *c;
    const struct train_gate_options *o;
    struct model *m;
    struct pool *pool;
    char *id, *dir;
    struct store *store;
    struct train_log *log;
    struct train_result *trainees;
    int n, n_rejected;
    bool pick[FRY_MAX_FAMILIES];
};
/* Before training: reads everything that could refuse the result later. `dirs` (copied): output
 * paths of the adapters, in `out` or `out` itself; `options`: those that determine the training. */
int train_run_open(struct train_run *r, const struct cli_options *c,
                   const struct train_gate_options *o, const json_t *options, struct model *m,
                   struct pool *pool, const char *out, const struct train_job *jobs,
                   char *const *dirs, int n, struct error *err);
struct train_callbacks train_run_callbacks(struct train_run *r);
/* Measures, decides, publishes or rejects; after OK every result is safe on disk. */
int train_run_finish(struct train_run *r, struct train_job *jobs, struct error *err);
/* Releases everything and prints how the run ended. Returns rc, or ERR_STATE when it was OK and an
 * adapter was not published. */
int train_run_close(struct train_run *r, int rc, struct error *err);

/* shoal adapter list: versions of adapter directories, or of those in a folder. */
int cmd_adapter_list(const struct cli_options *c, const struct strings *args, struct error *err);

#endif
