/*
 * pattern: the checks exact and regex, which compare a text with the item's answer or a pattern.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "check/internal.h"
#include "grade/grade.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* exact */

/* Whether the text matches the answer. A text is compared by grader `exact`, a number by grader
 * `number`. If the answer is a list, one of its members must match. */
static bool answer_matches(const char *text, const json_t *answer) {
    struct error err;
    bool number = json_is_number(answer);
    for (size_t i = 0; i < json_array_size(answer); i++)
        if (answer_matches(text, json_array_get(answer, i))) return true;
    if (json_is_array(answer)) return false;
    const struct grader *g = grader_find(number ? "number" : "exact", &err);
    char *dump = json_dumps(answer, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    const char *gold = number ? dump : json_string_value(answer);
    double score = grader_grade(g, text, &gold, 1).score;
    free(dump);
    return score > 0;
}

static int exact_run(struct check *c, struct check_case *k, struct error *err) {
    (void)err;
    k->score = answer_matches(k->text, json_object_get(k->item, "answer"));
    if (k->score == 0) case_fail(c, k, "it is not the item's answer");
    return OK;
}

static int exact_item(const struct check *c, const json_t *item, struct error *err) {
    const json_t *a = json_object_get(item, "answer");
    bool good = json_is_string(a) || json_is_number(a) || json_array_size(a) > 0;
    for (size_t i = 0; i < json_array_size(a); i++)
        good =
            good && (json_is_string(json_array_get(a, i)) || json_is_number(json_array_get(a, i)));
    if (good) return OK;
    return error_set(err, ERR_FORMAT, "'answer' %s, which %s exact compares with",
                     a ? "must be a text, a number or a list of them" : "is missing", c->label);
}

const struct check_kind exact_check = {.name = "exact",
                                       .usage = "exact",
                                       .argument = ARGUMENT_NONE,
                                       .needs_gold = true,
                                       .pure = true,
                                       .item = exact_item,
                                       .run_one = exact_run};

/* regex */

static int regex_open(struct check *c, const char *argument, const struct check_options *o,
                      struct error *err) {
    (void)o;
    return !argument || (c->state = regex_compile(argument, err)) ? OK : err->code;
}

static int regex_item(const struct check *c, const json_t *item, struct error *err) {
    const char *text = json_string_value(json_object_get(item, "pattern"));
    if (c->state) return OK;
    if (!text)
        return error_set(err, ERR_FORMAT, "'pattern' is missing, which %s regex looks for",
                         c->label);
    pcre2_code *p = regex_compile(text, err);
    pcre2_code_free(p);
    return p ? OK : err->code;
}

/* A text that is not UTF-8, or for which the matcher exceeds its limits, does not match. */
static int regex_run(struct check *c, struct check_case *k, struct error *err) {
    const char *text = json_string_value(json_object_get(k->item, "pattern"));
    pcre2_code *p = c->state ? c->state : text ? regex_compile(text, err) : NULL;
    CHECK(p); // regex_item has compiled the pattern before
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = regex_limits_new();
    CHECK(m);
    int rc = pcre2_match(p, (PCRE2_SPTR)k->text, strlen(k->text), 0, 0, m, limits);
    pcre2_match_context_free(limits);
    pcre2_match_data_free(m);
    if (!c->state) pcre2_code_free(p);
    k->score = rc >= 0;
    if (rc == PCRE2_ERROR_NOMATCH)
        case_fail(c, k, "the pattern does not match");
    else if (rc < 0)
        case_fail(c, k,
                  rc <= PCRE2_ERROR_UTF8_ERR1 && rc >= PCRE2_ERROR_UTF8_ERR21
                      ? "the text is not UTF-8"
                      : "the match exceeds its limits");
    return OK;
}

static void regex_free(void *state) {
    pcre2_code_free(state);
}

const struct check_kind regex_check = {.name = "regex",
                                       .usage = "regex[:PATTERN]",
                                       .argument = ARGUMENT_OPTIONAL,
                                       .pure = true,
                                       .open = regex_open,
                                       .item = regex_item,
                                       .run_one = regex_run,
                                       .free = regex_free};
