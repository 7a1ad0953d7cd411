/*
 * generate: sampling options, for run and chat.
 */
#ifndef SHOAL_CLI_GENERATE_H
#define SHOAL_CLI_GENERATE_H

#include "cli/setup.h"

struct sampling_options {
    int64_t max_tokens, top_k, seed, loop_tokens;
    double temperature, top_p, min_p, typical_p, repeat, presence, frequency;
};
/* The rows for max_tokens and temperature, whose defaults differ, are in each command's table. */
#define SAMPLING_ROW(opt, kind, type, field, fallback, min, max, metavar, help)                    \
    { opt, kind, offsetof(type, field), fallback, min, max, metavar, help }
#define SAMPLING_ROWS(type, field)                                                                 \
    SAMPLING_ROW("top-k", OPT_INT, type, field.top_k, "0", 0, 1e6, "K",                            \
                 "sample from the K most probable tokens; 0: all"),                                \
        SAMPLING_ROW("top-p", OPT_FLOAT, type, field.top_p, "0.9", 0, 1, "P",                      \
                     "sample from the smallest set with probability P"),                           \
        SAMPLING_ROW("min-p", OPT_FLOAT, type, field.min_p, "0", 0, 1, "P",                        \
                     "exclude tokens below P times the highest probability"),                      \
        SAMPLING_ROW("typical-p", OPT_FLOAT, type, field.typical_p, "1", 0, 1, "P",                \
                     "locally typical sampling; 1: off"),                                          \
        SAMPLING_ROW("repeat-penalty", OPT_FLOAT, type, field.repeat, "1", 0, 1e3, "X",            \
                     "divide logits of tokens in the prompt or reply; 1: off"),                    \
        SAMPLING_ROW("presence-penalty", OPT_FLOAT, type, field.presence, "0", -1e3, 1e3, "X",     \
                     "subtract X from logits of generated tokens"),                                \
        SAMPLING_ROW("frequency-penalty", OPT_FLOAT, type, field.frequency, "0", -1e3, 1e3, "X",   \
                     "subtract X for each occurrence in the reply"),                               \
        SAMPLING_ROW("loop-tokens", OPT_INT, type, field.loop_tokens, "0", 0, 1e6, "N",            \
                     "stop if the last N tokens repeat one cycle; 0: off"),                        \
        SAMPLING_ROW("seed", OPT_INT, type, field.seed, "0", 0, 9e15, "N",                         \
                     "seed of the sampling"),                                                      \
        SAMPLING_ALIAS("n", "max-tokens"), SAMPLING_ALIAS("n-predict", "max-tokens"),              \
        SAMPLING_ALIAS("temp", "temperature")
/* A word of llama.cpp; `n` and `temp` are those of version 0.1, too. */
#define SAMPLING_ALIAS(name, of)                                                                   \
    { name, OPT_ALIAS, 0, of, 0, 0, NULL, NULL }

/* Sampling parameters of sample i, with the seed of the options + i. Adjacent seeds give
 * independent random numbers, because the generator is counter-based. */
struct sampling_params sampling_from_options(const struct sampling_options *o, int64_t i);

/* The tokens that end a reply: the model's end of text and of a chat turn. Returns their number. */
int32_t model_stop_tokens(const struct model *m, int32_t out[2]);

#endif
