/*
 * reward_fn: rewards by name.
 *
 * exact and regex are pure; reward_command.c runs commands.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "grade/grade.h"
#include "train/reward_command.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

struct reward_state {
    pcre2_code *pattern; /* compiled PATTERN of regex:PATTERN; NULL: each item has a pattern */
    struct reward_command *command; /* the command of command:WORDS or shell:LINE */
};

/* exact */

/* Whether the completion matches the answer. A text is compared by grader `exact`, a number by
 * grader `number`. If the answer is a list, one of its members must match. */
static bool answer_matches(const char *completion, const json_t *answer) {
    struct error err;
    bool number = json_is_number(answer);
    for (size_t i = 0; i < json_array_size(answer); i++)
        if (answer_matches(completion, json_array_get(answer, i))) return true;
    if (json_is_array(answer)) return false;
    const struct grader *g = grader_find(number ? "number" : "exact", &err);
    char *text = json_dumps(answer, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    const char *gold = number ? text : json_string_value(answer);
    double score = grader_grade(g, completion, &gold, 1).score;
    free(text);
    return score > 0;
}

static double exact_reward(void *ctx, const json_t *item, const char *completion) {
    (void)ctx;
    return answer_matches(completion, json_object_get(item, "answer"));
}

static int exact_check(void *ctx, const json_t *item, struct error *err) {
    const json_t *a = json_object_get(item, "answer");
    bool good = json_is_string(a) || json_is_number(a) || json_array_size(a) > 0;
    (void)ctx;
    for (size_t i = 0; i < json_array_size(a); i++)
        good =
            good && (json_is_string(json_array_get(a, i)) || json_is_number(json_array_get(a, i)));
    if (good) return OK;
    return error_set(err, ERR_FORMAT, "'answer' %s, which reward exact compares with",
                     a ? "must be a text, a number or a list of them" : "is missing");
}

/* regex */

static int regex_check(void *ctx, const json_t *item, struct error *err) {
    const struct reward_state *state = ctx;
    const char *text = json_string_value(json_object_get(item, "pattern"));
    if (state->pattern) return OK;
    if (!text)
        return error_set(err, ERR_FORMAT, "'pattern' is missing, which reward regex looks for");
    pcre2_code *p = regex_compile(text, err);
    pcre2_code_free(p);
    return p ? OK : err->code;
}

/* A completion that is not UTF-8, or for which the matcher exceeds its limits, does not match. */
static double regex_reward(void *ctx, const json_t *item, const char *completion) {
    const struct reward_state *state = ctx;
    struct error err;
    const char *text = json_string_value(json_object_get(item, "pattern"));
    pcre2_code *p = state->pattern ? state->pattern : regex_compile(text, &err);
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = regex_limits_new();
    CHECK(p && m); // regex_check has compiled the pattern before
    int rc = pcre2_match(p, (PCRE2_SPTR)completion, strlen(completion), 0, 0, m, limits);
    pcre2_match_context_free(limits);
    pcre2_match_data_free(m);
    if (!state->pattern) pcre2_code_free(p);
    return rc >= 0;
}

/* The text after `name:`, or NULL. */
static const char *text_after_prefix(const char *spec, const char *name) {
    size_t n = strlen(name);
    return strncmp(spec, name, n) == 0 && spec[n] == ':' ? spec + n + 1 : NULL;
}

static int command_rewards(void *ctx, const struct reward_input *v, int n, double *out,
                           struct error *err) {
    return reward_command_run(((const struct reward_state *)ctx)->command, v, n, out, err);
}

int reward_fn_open(struct reward_fn *r, const struct rl_options *o, struct error *err) {
    struct reward_state *state = xcalloc(1, sizeof *state);
    const char *spec = o->reward, *rest;
    int rc = OK;
    *r = (struct reward_fn){.ctx = state};
    if (strcmp(spec, "exact") == 0) {
        r->score_one = exact_reward;
        r->check = exact_check;
    } else if (strcmp(spec, "regex") == 0 || (rest = text_after_prefix(spec, "regex"))) {
        r->score_one = regex_reward;
        r->check = regex_check;
        if (spec[5] && !(state->pattern = regex_compile(spec + 6, err))) rc = err->code;
    } else if ((rest = text_after_prefix(spec, "command")) ||
               (rest = text_after_prefix(spec, "shell"))) {
        r->score_batch = command_rewards;
        state->command = reward_command_open(rest, *spec == 's', o, err);
        rc = state->command ? OK : err->code;
    } else {
        rc = error_set(err, ERR_USAGE,
                       "reward '%s' is not known; there are exact, regex[:PATTERN], command:WORDS, "
                       "shell:LINE",
                       spec);
    }
    if (rc) reward_fn_close(r);
    return rc;
}

void reward_fn_close(struct reward_fn *r) {
    struct reward_state *state = r->ctx;
    if (state) {
        pcre2_code_free(state->pattern);
        reward_command_close(state->command);
    }
    free(state);
    *r = (struct reward_fn){0};
}
