/*
 * Votes and credit: pure functions of answers. Each vote fills a score for every choice;
 * vote_decide breaks ties the same way for all. Credit compares the vote with and without each
 * agent on the same items, so its intervals are paired.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void majority(const struct answer *a, int n, int n_choices, double *out) {
    (void)n_choices;
    for (int i = 0; i < n; i++) out[a[i].choice] += 1;
}

/* Each agent's own choice, weighted by the exact probability it gives it. */
static void confidence(const struct answer *a, int n, int n_choices, double *out) {
    (void)n_choices;
    for (int i = 0; i < n; i++) out[a[i].choice] += (double)a[i].prob[a[i].choice];
}

/* Product of experts: summed log-probabilities of every choice. */
static void logprob(const struct answer *a, int n, int n_choices, double *out) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++) out[c] += math_log(fmax((double)a[i].prob[c], 1e-12));
}

/* Borda count: a choice gets one point for each that the agent thinks less likely. */
static void borda(const struct answer *a, int n, int n_choices, double *out) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++)
            for (int d = 0; d < n_choices; d++) out[c] += a[i].prob[c] > a[i].prob[d];
}

const struct vote vote_table[] = {
    {"majority", majority}, {"confidence", confidence}, {"logprob", logprob}, {"borda", borda},
    {NULL, NULL},
};

const struct vote *vote_find(const char *name) {
    for (const struct vote *v = vote_table; v->name; v++)
        if (strcmp(v->name, name) == 0) return v;
    return NULL;
}

int vote_decide(const struct vote *v, const struct answer *answers, int n, int n_choices) {
    double score[MAX_CHOICES] = {0}, mass[MAX_CHOICES] = {0};
    v->score(answers, n, n_choices, score);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n_choices; c++) mass[c] += (double)answers[i].prob[c];
    int best = 0;
    for (int c = 1; c < n_choices; c++)
        if (score[c] > score[best] || (score[c] == score[best] && mass[c] > mass[best])) best = c;
    return best;
}

static char *json_answer(const json_t *v) {
    static const char *const keys[] = {"answer", "vote", "conclusion"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        const json_t *x = json_object_get(v, keys[i]);
        if (json_is_string(x)) return xstrdup(json_string_value(x));
        if (x) return json_dumps(x, JSON_ENCODE_ANY | JSON_COMPACT);
    }
    return NULL;
}

/* What stands from the first brace to the first that closes one, if that is JSON with an answer. */
static char *json_vote(const char *text, float *confidence) {
    const char *open = strchr(text, '{'), *close = open ? strchr(open, '}') : NULL;
    if (!close) return NULL;
    json_t *v = json_loadb(open, (size_t)(close - open) + 1, 0, NULL);
    const json_t *sure = json_object_get(v, "confidence");
    char *out = json_answer(v);
    if (out && json_is_number(sure))
        *confidence = (float)fmin(1, fmax(0, json_number_value(sure)));
    json_decref(v);
    return out;
}

char *seed_vote_parse(const char *text, float *confidence) {
    static const char *const marks[] = {"Answer", "結論", "Vote", "最終"};
    const char *line = text;
    *confidence = 0.6f;
    char *out = json_vote(text, confidence);
    if (out) return out;
    for (const char *at = text; at; at = strchr(at, '\n'), at = at ? at + 1 : NULL) {
        char *one = strndup(at, strcspn(at, "\n"));
        bool marked = false;
        for (size_t i = 0; i < ARRAY_LEN(marks); i++) marked |= strstr(one, marks[i]) != NULL;
        free(one);
        if (!marked) continue;
        line = at;
        break;
    }
    size_t n = strcspn(line, "\n");
    const char *colon = memchr(line, ':', n), *word = colon ? colon + 1 : line;
    word += strspn(word, " \t\r");
    return strndup(word, strcspn(word, " \t\r\n"));
}

/* Whether the vote of all agents but `without` (-1: of all) is right on item i. */
static bool vote_right(const struct vote *v, const struct answer *answers, int n_agents,
                       const struct item *items, int n_items, int i, int without) {
    struct answer team[64];
    int n = 0;
    for (int a = 0; a < n_agents; a++)
        if (a != without) team[n++] = answers[(size_t)a * (size_t)n_items + (size_t)i];
    return n > 0 && vote_decide(v, team, n, items[i].n_choices) == items[i].correct;
}

void credit_vote_loo(const struct vote *v, const struct answer *answers, int n_agents,
                     const struct item *items, int n_items, struct interval *value) {
    CHECK(n_agents <= 64);
    uint8_t *with = xmalloc((size_t)n_items), *without = xmalloc((size_t)n_items);
    for (int i = 0; i < n_items; i++)
        with[i] = vote_right(v, answers, n_agents, items, n_items, i, -1);
    for (int a = 0; a < n_agents; a++) {
        for (int i = 0; i < n_items; i++)
            without[i] = vote_right(v, answers, n_agents, items, n_items, i, a);
        value[a] = stats_paired(with, without, n_items).diff;
    }
    free(with);
    free(without);
}

static double jensen_shannon(const float *p, const float *q, int n) {
    double sum = 0, log2 = math_log(2);
    for (int i = 0; i < n; i++) {
        double a = (double)p[i], b = (double)q[i], m = (a + b) / 2;
        if (a > 0) sum += a / 2 * math_log(a / m);
        if (b > 0) sum += b / 2 * math_log(b / m);
    }
    return fmax(0, sum / log2);
}

void credit_novelty(const struct answer *answers, int n_agents, const struct item *items,
                    int n_items, double *value) {
    for (int a = 0; a < n_agents; a++) {
        double sum = 0;
        for (int b = 0; b < n_agents; b++)
            for (int i = 0; b != a && i < n_items; i++)
                sum += jensen_shannon(answers[(size_t)a * (size_t)n_items + (size_t)i].prob,
                                      answers[(size_t)b * (size_t)n_items + (size_t)i].prob,
                                      items[i].n_choices);
        value[a] = n_agents > 1 ? sum / ((double)(n_agents - 1) * (double)MAX(n_items, 1)) : 0;
    }
}
