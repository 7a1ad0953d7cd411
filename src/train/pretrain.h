/* Pretraining of a small base from a recipe: see pretrain.c. */
#ifndef SHOAL_PRETRAIN_H
#define SHOAL_PRETRAIN_H

#include "train/train.h"

struct pretrain_options {
    char *shape;
    int64_t vocab, tokenizer_items, steps, rows, warmup, seed, eval_every, eval_items, save_every;
    double lr, min_lr_ratio, beta2, weight_decay, max_grad_norm, working, debate, drill, system;
    struct strings mix;
};
extern const struct option_row pretrain_option_rows[];
/* What that would take, checked as it would be: {shape, parameters, updates, done, tokens, ...};
 * "parameters" is for the whole vocabulary. NULL: `err` says what is wrong. */
json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, struct error *err);
/* Writes the finished model as a Hugging Face directory, with log.jsonl; continues from
 * DIR/checkpoint.bin if there. */
int pretrain_run(const struct pretrain_options *o, const char *dir, struct pool *pool,
                 struct error *err);

#endif
