/*
 * answer_parse: extracts the answer from free text, by a grader or by the prefix "answer:". It also
 * finds equal answers, grades answers, and computes the probability of an answer's tokens.
 *
 * answer_tokens_find locates the tokens of an answer by truncating the text, because graders do not
 * report positions. First it removes tokens at the end while the grader still extracts the same
 * answer. Then it removes tokens at the beginning until the rest gives the same answer with as few
 * tokens as possible. Example:
 *
 *   "I take 3 and get\n#### 16 apples" → " 16"
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

/* The text after the last "answer:" up to the line's end, without blanks and full stops at its end.
 * It points into `text`; NULL: no such text. */
static const char *answer_after_marker(const char *text, size_t *len) {
    const char *p = text, *found = NULL;
    while ((p = strcasestr(p, ANSWER_PREFIX))) found = p += strlen(ANSWER_PREFIX);
    if (!found) return NULL;
    found += strspn(found, " \t");
    *len = strcspn(found, "\n");
    while (*len > 0 && strchr(" \t\r.", found[*len - 1])) --*len;
    return *len ? found : NULL;
}

static bool text_gives_answer(const struct grader *g, const char *text, const char *form) {
    char *answer = grader_answer(g, text);
    bool is_equal = answer && strcmp(answer, form) == 0;
    free(answer);
    return is_equal;
}

/* Byte offset of token i in the text; for i = n, the end of the last token. */
static size_t token_begin(const struct llm_call *c, int i) {
    return i ? (size_t)c->ends[i - 1] : 0;
}

/* Finds the byte range [*begin, *end) of the tokens from which the grader extracts `form`. */
static void answer_tokens_find(const struct grader *g, const struct llm_call *c, const char *text,
                               const char *form, size_t *begin, size_t *end) {
    char *copy = xstrdup(text);
    int to = c->n_tokens, from;
    for (; to > 1; to--) {
        copy[token_begin(c, to - 1)] = 0;
        if (!text_gives_answer(g, copy, form)) break;
    }
    memcpy(copy, text, strlen(text) + 1);
    copy[ *end = token_begin(c, to)] = 0;
    for (from = to; from > 1; from--)
        if (grader_equivalent(g, copy + token_begin(c, from - 1), form)) break;
    *begin = token_begin(c, MAX(from - 1, 0));
    free(copy);
}

/* Product of the probabilities of the tokens that share a byte with [begin, end). */
static float tokens_probability(const struct llm_call *c, size_t begin, size_t end) {
    double sum = 0;
    for (int i = 0; i < c->n_tokens; i++)
        if (token_begin(c, i) < end && (size_t)c->ends[i] > begin) sum += (double)c->logprobs[i];
    return (float)math_exp(sum);
}

char *answer_parse(const struct grader *g, const struct llm_call *c, const char *text,
                   float *confidence) {
    size_t begin = 0, len, end;
    const char *marked = g ? NULL : answer_after_marker(text, &len);
    char *answer = g ? grader_answer(g, text) : marked ? strndup(marked, len) : NULL;
    *confidence = 1;
    if (!answer || c->n_tokens == 0) return answer;
    if (g) {
        answer_tokens_find(g, c, text, answer, &begin, &end);
    } else {
        begin = (size_t)(marked - text);
        end = begin + len;
    }
    *confidence = tokens_probability(c, begin, end);
    return answer;
}

int answer_candidate_find(char ***candidates, int *n, const char *text, const struct grader *g,
                          bool add) {
    for (int i = 0; i < *n; i++)
        if (g ? grader_equivalent(g, (*candidates)[i], text) : strcmp((*candidates)[i], text) == 0)
            return i;
    if (!add) return -1;
    *candidates = xrealloc(*candidates, (size_t)(*n + 1) * sizeof **candidates);
    (*candidates)[*n] = xstrdup(text);
    return (*n)++;
}

bool answer_is_right(const struct task_item *item, const struct grader *g, const char *answer) {
    struct error err;
    if (!item->gold || !answer) return false;
    if (!g) g = grader_find("exact", &err);
    return grader_grade(g, answer, (const char *const *)&item->gold, 1).score >= 0.5 ||
           grader_grade(g, answer, (const char *const *)item->gold_aliases.v, item->gold_aliases.n)
                   .score >= 0.5;
}

uint8_t *answers_grade(const struct task_item *item, const struct grader *g, char *const *answers,
                       int n) {
    uint8_t *is_correct = xcalloc((size_t)MAX(n, 1), 1);
    for (int i = 0; i < n; i++)
        is_correct[i] = item->n_choices ? i == item->correct : answer_is_right(item, g, answers[i]);
    return is_correct;
}
