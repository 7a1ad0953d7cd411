/*
 * limits: checks of --max-model-len, for commands that know how long their requests are.
 */
#include "engine/engine.h"

int engine_limits_check(const struct engine_limits *l, int32_t longest, struct error *err) {
    if (l->max_len <= longest) return OK;
    return error_set(err, ERR_USAGE,
                     "--max-model-len '%lld' is more than the %d tokens of the model's context",
                     (long long)l->max_len, longest);
}

int engine_limits_require(const struct engine_limits *l, int64_t tokens, const char *what,
                          struct error *err) {
    if (!l->max_len || l->max_len >= tokens) return OK;
    return error_set(err, ERR_USAGE, "--max-model-len '%lld' is too short: %s needs %lld tokens",
                     (long long)l->max_len, what, (long long)tokens);
}
