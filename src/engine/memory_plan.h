/*
 * plan: does it fit, and how large may the engine be? Asked before anything is loaded.
 *
 * Pure arithmetic over sizes that are known from headers (model_measure, adapter files) and over
 * what the engine computes of its own memory. Owns nothing; any thread.
 */
#ifndef SHOAL_PLAN_H
#define SHOAL_PLAN_H

#include "engine/engine.h"

/* What an adapter takes: its factors in f32 and as the forward pass reads them; and what passes
 * while it is loaded. */
struct adapter_size {
    size_t held, passing;
};
/* Adds one to the sum: `held` adds up, `passing` is the largest. */
int adapter_measure(const char *path, enum dtype elem, struct adapter_size *sum, struct error *err);

struct memory_plan_input {
    struct model_size model;
    struct adapter_size adapters; /* of all */
    size_t work;                  /* the caller's own: requests, answers, a session file */
    size_t requests;              /* of a server: what clients send and are sent, at most */
    size_t limit;                 /* 0: none */
    struct engine_options want;   /* what would be used if memory did not matter */
};
/* Bytes by purpose; `total` is their sum. What was chosen stands in `engine`: fewer pages than
 * wanted make requests wait, smaller max_seqs and max_rows make steps smaller; no result changes.
 */
struct memory_plan {
    size_t weights, tokenizer, adapters, kv, activations, requests, work, total, limit;
    int32_t pages_wanted;
    struct engine_options engine;
};
/* ERR_MEMORY, with the figures and what to change, when not even one sequence of max_len tokens
 * fits; `out` then is the smallest that there is. */
int memory_plan_make(const struct memory_plan_input *in, struct memory_plan *out, struct error *err);
/* For people, several lines; and the same as JSON. */
void memory_plan_text(const struct memory_plan *p, struct buf *out);
json_t *memory_plan_json(const struct memory_plan *p);

#endif
