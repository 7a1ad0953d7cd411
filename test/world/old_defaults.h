/* old_defaults: the options that version 0.1 had by default and the tests were written with. */
#ifndef SHOAL_TEST_OLD_DEFAULTS_H
#define SHOAL_TEST_OLD_DEFAULTS_H

#include "world/world.h"

#include <stdlib.h>

static inline void learner_options_set_old_defaults(struct learner_options *o) {
    o->update_interval = 10;
    o->batch_size = 4;
    o->buffer_size = 1000;
    o->horizon = 16;
    o->discount = 0.9;
    o->shared_experience_fraction = 0;
    o->entropy_coef = 0.05;
    o->train.lr = 1e-3;
    o->warmup_steps = 20;
}

static inline void simulation_options_set_old_defaults(struct simulation_options *o) {
    free(o->kv_cache_dtype);
    o->kv_cache_dtype = NULL; // as in version 0.1
    o->n_adapters = 0;
    o->elites = 4;
    o->temperature = 2;
    o->eval_maps = 4;
    o->curriculum = 0;
    learner_options_set_old_defaults(&o->learn);
}

#endif
