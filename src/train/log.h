/*
 * log: what a training run leaves for people and programs — DIR/train.jsonl with a line an update,
 * the same lines as metrics of a run in the store, and DIR/report.html with curves.
 *
 * A log watches a run (train_log_callbacks). Each update is in it once and in order, also when the run
 * was killed and continued: lines of updates that the checkpoint had not seen are cut. The page is
 * rewritten before every checkpoint; the caller adds sections and writes it once more at the end.
 * One thread.
 */
#ifndef SHOAL_TRAIN_LOG_H
#define SHOAL_TRAIN_LOG_H

#include "store/store.h"
#include "train/train.h"

/* {step, loss, lr, grad_norm, tokens, targets, tokens_per_s, seconds, rss, peak, losses} and what
 * the method adds; a number that is not finite is null. */
json_t *train_event_json(const struct train_event *e);
/* Writes the events as lines, each through to the system. */
struct train_callbacks train_jsonl_callbacks(FILE *f);

struct train_log;
/* DIR exists; store may be NULL and, like the texts, is used until the end. */
struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run);
void train_log_free(struct train_log *l); /* NULL is fine */
struct train_callbacks train_log_callbacks(struct train_log *l);
/* A table of the page (see html_table); `value` is taken over. The same heading again replaces. */
void train_log_section(struct train_log *l, const char *heading, json_t *value);
int train_log_report(struct train_log *l, struct error *err);
/* A table's options as an object, in its order. */
json_t *options_json(const struct option_row *rows, const void *options);

#endif
