/*
 * What the engine's files share: the one normaliser that sampled, generated and chosen tokens'
 * log-probabilities are taken under. A token's log-probability is logit - log_sum_exp, in float.
 */
#ifndef SHOAL_ENGINE_INTERNAL_H
#define SHOAL_ENGINE_INTERNAL_H

#include "engine/engine.h"

/* max + log Σ exp(x - max), the sum by the kernel's rule. `scratch` [n]. */
float log_sum_exp(const float *x, int32_t n, float *scratch);

#endif
