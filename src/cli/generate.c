/* generate: parses the sampling options of a request from the command line. */
#define _GNU_SOURCE
#include "cli/generate.h"


struct sampling_params sampling_from_options(const struct sampling_options *o, int64_t i) {
    return (struct sampling_params){.temperature = (float)o->temperature,
                                    .top_k = (int32_t)o->top_k,
                                    .top_p = (float)o->top_p,
                                    .min_p = (float)o->min_p,
                                    .seed = (uint64_t)(o->seed + i),
                                    .typical_p = (float)o->typical_p,
                                    .repetition_penalty = (float)o->repeat,
                                    .presence_penalty = (float)o->presence,
                                    .frequency_penalty = (float)o->frequency};
}

int32_t model_stop_tokens(const struct model *m, int32_t out[2]) {
    const int32_t ends[2] = {tokenizer_eos(m->tok), tokenizer_eot(m->tok)};
    int32_t n = 0;
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) out[n++] = ends[i];
    return n;
}
