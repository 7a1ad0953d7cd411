/*
 * vote: the votes, as pure functions of answers. Each vote adds to a score of every choice;
 * vote_decide selects the best choice and breaks ties in the same way for all votes.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The probability of choice c in an answer. Beyond EVAL_MAX_CHOICES only the probability of the
 * agent's own choice is known; that of the others counts as 0. */
static double answer_prob(const struct agent_answer *a, int c) {
    return c < EVAL_MAX_CHOICES ? (double)a->prob[c] : c == a->choice ? (double)a->confidence : 0;
}

static void majority(const struct agent_answer *a, int n, int n_choices, double *out) {
    (void)n_choices;
    for (int i = 0; i < n; i++) out[a[i].choice] += 1;
}

/* The choice of each agent, weighted by the exact probability that the agent assigns to it. */
static void confidence(const struct agent_answer *a, int n, int n_choices, double *out) {
    (void)n_choices;
    for (int i = 0; i < n; i++) out[a[i].choice] += answer_prob(&a[i], a[i].choice);
}

/* Product of experts: the score of a choice is the sum of its log-probabilities. */
static void logprob(const struct agent_answer *a, int n, int n_choices, double *out) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++) out[c] += math_log(fmax(answer_prob(&a[i], c), 1e-12));
}

/* Borda count: a choice gets one point for each choice that the agent finds less likely. */
static void borda(const struct agent_answer *a, int n, int n_choices, double *out) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++)
            for (int d = 0; d < n_choices; d++)
                out[c] += answer_prob(&a[i], c) > answer_prob(&a[i], d);
}

/* Without a positive weight all weights count as equal. */
static void weighted(const struct agent_answer *a, int n, int n_choices, double *out) {
    double sum = 0;
    (void)n_choices;
    for (int i = 0; i < n; i++) sum += (double)a[i].weight;
    for (int i = 0; i < n; i++) out[a[i].choice] += sum > 0 ? (double)a[i].weight : 1;
}

const struct vote vote_table[] = {
    {"majority", majority, false}, {"confidence", confidence, false}, {"logprob", logprob, false},
    {"borda", borda, false},       {"quorum", majority, true},        {"weighted", weighted, false},
    {NULL, NULL, false},
};

const struct vote *vote_find(const char *name) {
    for (const struct vote *v = vote_table; v->name; v++)
        if (strcmp(v->name, name) == 0) return v;
    return NULL;
}

const struct vote *vote_parse(const char *name, struct error *err) {
    const struct vote *found = vote_find(name);
    struct buf names = {0};
    for (const struct vote *v = vote_table; v->name; v++)
        buf_printf(&names, "%s%s", v == vote_table ? "" : ", ", v->name);
    if (!found) error_set(err, ERR_USAGE, "no vote '%s'; there are %s", name, names.data);
    buf_release(&names);
    return found;
}

int vote_decide(const struct vote *v, const struct agent_answer *answers, int n, int n_choices) {
    double *score = xcalloc((size_t)n_choices + 1, 2 * sizeof *score),
           *prob_sum = score + n_choices;
    v->score(answers, n, n_choices, score);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++) prob_sum[c] += answer_prob(&answers[i], c);
    int best = 0;
    for (int c = 1; c < n_choices; c++)
        if (score[c] > score[best] || (score[c] == score[best] && prob_sum[c] > prob_sum[best]))
            best = c;
    if (v->quorum && 2 * score[best] <= n) best = -1;
    free(score);
    return best;
}

/* The answer in a JSON reply, malloc'ed; NULL: none. */
static char *json_answer(const json_t *v) {
    static const char *const keys[] = {"answer", "vote", "conclusion"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        const json_t *x = json_object_get(v, keys[i]);
        if (json_is_string(x)) return xstrdup(json_string_value(x));
        if (x) return json_dumps(x, JSON_ENCODE_ANY | JSON_COMPACT);
    }
    return NULL;
}

/* The answer in the text from the first '{' to the next '}', malloc'ed. NULL: that text is not JSON
 * or has no answer. *confidence is changed only if the JSON has a number for it. */
static char *json_vote(const char *text, float *confidence) {
    const char *open = strchr(text, '{'), *close = open ? strchr(open, '}') : NULL;
    if (!close) return NULL;
    json_t *v = json_loadb(open, (size_t)(close - open) + 1, 0, NULL);
    const json_t *reported = json_object_get(v, "confidence");
    char *out = json_answer(v);
    if (out && json_is_number(reported))
        *confidence = (float)fmin(1, fmax(0, json_number_value(reported)));
    json_decref(v);
    return out;
}

/* Bytes of the white-space character at p; 0: p is not at white space. */
static size_t white_space_len(const char *p) {
    return *p && strchr(" \t\r\n\f\v", *p) ? 1 : strncmp(p, "\u3000", 3) == 0 ? 3 : 0;
}

char *legacy_vote_parse(const char *text, float *confidence) {
    static const char *const marks[] = {"Answer", "結論", "Vote", "最終"};
    const char *line = text;
    *confidence = 0.6f;
    char *out = json_vote(text, confidence);
    if (out) return out;
    for (const char *p = text; p; p = strchr(p, '\n'), p = p ? p + 1 : NULL) {
        char *line_copy = strndup(p, strcspn(p, "\n"));
        bool has_marker = false;
        for (size_t i = 0; i < ARRAY_LEN(marks); i++)
            has_marker |= strstr(line_copy, marks[i]) != NULL;
        free(line_copy);
        if (!has_marker) continue;
        line = p;
        break;
    }
    size_t n = strcspn(line, "\n");
    const char *colon = memchr(line, ':', n), *word = colon ? colon + 1 : line;
    while (white_space_len(word) && word < line + n) word += white_space_len(word);
    const char *end = word;
    while (*end && !white_space_len(end)) end++;
    return strndup(word, (size_t)(end - word));
}
