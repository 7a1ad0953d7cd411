/*
 * test_grade: equality of answers, for each grader.
 *
 * The cases are in test/cases/grade-NAME.txt, one file per grader; add new cases there. In
 * addition: changes that must not change a verdict (blanks, \left and \right, the order of a sum)
 * and changes that must (a digit), canonical forms, groups for votes, and texts that take long to
 * compare.
 *
 * levels: once. Nothing here uses a kernel.
 */
#define _GNU_SOURCE
#include "grade/internal.h"

#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

static const struct grader *grader(const char *name) {
    const struct grader *g = grader_find(name, &err);
    if (!g) fail_msg("%s", err.text);
    return g;
}

static struct grade grade(const struct grader *g, const char *text, const char *gold) {
    return grader_grade(g, text, &gold, 1);
}

/* cases */

struct test_case {
    const char *answer, *gold, *want;
    int line;
};
struct cases {
    struct buf file;
    struct test_case v[1024];
    int n;
};

/* Replaces each "⏎" by a newline. */
static void lines_unescape(char *s) {
    for (char *p; (p = strstr(s, "⏎")) != NULL; s = p) {
        *p = '\n';
        memmove(p + 1, p + 3, strlen(p + 3) + 1);
    }
}

static struct cases *cases_read(const char *name) {
    struct cases *c = xcalloc(1, sizeof *c);
    char *path = xasprintf("test/cases/grade-%s.txt", name);
    int line_number = 0;
    if (file_read(path, 1 << 20, &c->file, &err) != OK) fail_msg("%s", err.text);
    for (char *rest = c->file.data, *line; (line = strsep(&rest, "\n")) != NULL;) {
        line_number++;
        if (*line == 0 || (*line == '#' && line[1] == ' ')) continue;
        char *answer = strsep(&line, "\t"), *gold = strsep(&line, "\t");
        if (!gold || !line || strchr(line, '\t'))
            fail_msg("%s:%d: a case needs exactly two tabs", path, line_number);
        assert_true(c->n < (int)ARRAY_LEN(c->v));
        lines_unescape(answer);
        lines_unescape(gold);
        c->v[c->n++] = (struct test_case){answer, gold, line, line_number};
    }
    free(path);
    return c;
}

static void cases_free(struct cases *c) {
    buf_release(&c->file);
    free(c);
}

/* `want` is "yes", "no", "nofound", or a score with four decimals. */
static bool is_expected_grade(struct grade got, const char *want) {
    char score[32];
    snprintf(score, sizeof score, "%.4f", got.score);
    if (strcmp(want, "yes") == 0) return got.found && got.score == 1;
    if (strcmp(want, "no") == 0) return got.found && got.score == 0;
    if (strcmp(want, "nofound") == 0) return !got.found && got.score == 0;
    return got.found && strcmp(score, want) == 0;
}

/* The canonical form of an answer has the same score as the answer, and is its own canonical form.
 */
static void check_canonical_form(const struct grader *g, const struct test_case *c,
                                 struct grade first) {
    struct buf form = {0}, again = {0};
    if (!grader_extract(g, c->answer, &form)) {
        buf_release(&form);
        return;
    }
    if (!grader_extract(g, form.data, &again) || strcmp(form.data, again.data) != 0)
        fail_msg("%s, line %d: the canonical form '%s' has the canonical form '%s'", grader_name(g),
                 c->line, form.data, again.data);
    struct grade second = grade(g, form.data, c->gold);
    if (first.score != second.score)
        fail_msg("%s, line %d: score %g, but the canonical form has %g", grader_name(g), c->line,
                 first.score, second.score);
    assert_true(grader_equivalent(g, c->answer, form.data));
    buf_release(&form);
    buf_release(&again);
}

static void check_cases(const char *name, int at_least) {
    const struct grader *g = grader(name);
    struct cases *c = cases_read(name);
    int wrong = 0;
    for (int i = 0; i < c->n; i++) {
        const struct test_case *t = &c->v[i];
        if (grader_check(g, t->gold, &err) != OK)
            fail_msg("%s, line %d: %s", name, t->line, err.text);
        struct grade got = grade(g, t->answer, t->gold);
        if (!is_expected_grade(got, t->want)) {
            print_error("grade-%s.txt:%d: '%s' for '%s': %s, not %s\n", name, t->line, t->answer,
                        t->gold, got.found ? "found" : "nofound", t->want);
            print_error("    score %.4f\n", got.score);
            wrong++;
        }
        check_canonical_form(g, t, got);
    }
    assert_int_equal(wrong, 0);
    assert_true(c->n >= at_least);
    cases_free(c);
}

static void test_letter(void **state) {
    (void)state;
    check_cases("letter", 40);
}

static void test_number(void **state) {
    (void)state;
    check_cases("number", 40);
}

static void test_math(void **state) {
    (void)state;
    check_cases("math", 150);
}

static void test_text_graders(void **state) {
    (void)state;
    check_cases("exact", 20);
    check_cases("exact_match", 20);
    check_cases("prefix", 25);
    check_cases("verbatim", 8);
    check_cases("regex", 20);
    check_cases("f1", 20);
    check_cases("rouge_l", 20);
    check_cases("bleu", 20);
}

/* properties */

static const char *text_replace(const char *s, const char *from, const char *to, struct buf *out) {
    out->len = 0;
    buf_puts(out, "");
    for (const char *p; (p = strstr(s, from)) != NULL; s = p + strlen(from)) {
        buf_add(out, s, (size_t)(p - s));
        buf_puts(out, to);
    }
    buf_puts(out, s);
    return out->data;
}

/* Writes the formula s in the i-th of several equivalent notations; NULL after the last. */
static const char *with_notation(const char *s, int i, struct buf *out) {
    static const char *const rules[][2] = {
        {"=", " = "},   {"+", "  + "},         {"\\frac", "\\dfrac"}, {"\\frac", "\\tfrac"},
        {"^2", "^{2}"}, {"\\cdot", "\\times"}, {"\\le ", "\\leq "},   {"\\pi", "\\pi "},
        {"}", "} "},    {"\\cup", " \\cup "},  {"{", "{ "},           {", ", " ,\\ "},
        {"x", "{x}"},
    };
    if (i < (int)ARRAY_LEN(rules)) return text_replace(s, rules[i][0], rules[i][1], out);
    out->len = 0;
    switch (i - (int)ARRAY_LEN(rules)) {
    case 0:
        buf_printf(out, "  %s  ", s);
        return out->data;
    case 1:
        buf_printf(out, "$%s$", s);
        return out->data;
    case 2:
        buf_printf(out, "\\boxed{%s}", s);
        return out->data;
    case 3:
        buf_printf(out, "\\left(%s\\right)", s);
        return out->data;
    case 4:
        buf_printf(out, "%s.", s);
        return out->data;
    case 5:
        buf_printf(out, "\\displaystyle %s", s);
        return out->data;
    default:
        return NULL;
    }
}

static const char *const formulas[] = {
    "\\frac{1}{2}",
    "x^2+3x-1",
    "2\\sqrt{3}",
    "\\frac{\\pi}{4}",
    "3\\cdot 2^{x}",
    "\\sin x",
    "(x+1)(x-2)",
    "\\frac{x^2}{y+1}",
    "-7",
    "0.125",
    "e^{2x}",
    "12345",
    "\\sqrt{x+1}",
    "n!",
    "3+4i",
};

static void test_notation_does_not_matter(void **state) {
    (void)state;
    const struct grader *g = grader("math");
    struct buf out = {0};
    for (size_t i = 0; i < ARRAY_LEN(formulas); i++)
        for (int k = 0; with_notation(formulas[i], k, &out); k++) {
            if (!grader_equivalent(g, formulas[i], out.data))
                fail_msg("'%s' is not '%s'", formulas[i], out.data);
            if (!grader_equivalent(g, out.data, formulas[i]))
                fail_msg("'%s' is not '%s'", out.data, formulas[i]);
        }
    buf_release(&out);
}

/* Every formula equals only itself, in both orders of comparison. */
static void test_formulas_differ(void **state) {
    (void)state;
    const struct grader *g = grader("math");
    for (size_t i = 0; i < ARRAY_LEN(formulas); i++)
        for (size_t k = 0; k < ARRAY_LEN(formulas); k++)
            if (grader_equivalent(g, formulas[i], formulas[k]) != (i == k))
                fail_msg("wrong for '%s' and '%s'", formulas[i], formulas[k]);
}

/* If the last digit of the reference answer is changed, a correct answer becomes wrong. */
static void test_changed_digit_differs(void **state) {
    (void)state;
    static const char *const names[] = {"math", "number"};
    int n = 0;
    for (size_t k = 0; k < ARRAY_LEN(names); k++) {
        const struct grader *g = grader(names[k]);
        struct cases *c = cases_read(names[k]);
        for (int i = 0; i < c->n; i++) {
            char *gold = xstrdup(c->v[i].gold);
            size_t len = strlen(gold);
            char *d = len && isdigit((unsigned char)gold[len - 1]) ? &gold[len - 1] : NULL;
            if (d && strcmp(c->v[i].want, "yes") == 0) {
                *d = (char)('1' + (*d - '0') % 9);
                if (grade(g, c->v[i].answer, gold).score != 0)
                    fail_msg("grade-%s.txt:%d: the answer also equals '%s'", names[k], c->v[i].line,
                             gold);
                n++;
            }
            free(gold);
        }
        cases_free(c);
    }
    assert_true(n > 50);
}

static void term_put(struct rng *r, struct buf *out) {
    static const char *const terms[] = {"x^2", "3x",      "\\frac{y}{2}", "\\sqrt{x}",
                                        "7",   "\\sin y", "2xy",          "e^{x}"};
    buf_printf(out, "%u%s", 2 + rng_below(r, 90), "\\cdot ");
    buf_puts(out, terms[rng_below(r, ARRAY_LEN(terms))]);
}

/* The order of the terms of a sum does not matter, but a coefficient does (c has a digit more). */
static void test_order_of_a_sum_does_not_matter(void **state) {
    (void)state;
    const struct grader *g = grader("math");
    for (uint32_t i = 0; i < 300; i++) {
        struct rng r = rng_make(1, RNG_TEST, i, 0);
        struct buf t[3] = {{0}}, a = {0}, b = {0}, c = {0};
        for (int k = 0; k < 3; k++) term_put(&r, &t[k]);
        buf_printf(&a, "%s+%s-%s", t[0].data, t[1].data, t[2].data);
        buf_printf(&b, "-%s + %s + %s", t[2].data, t[1].data, t[0].data);
        buf_printf(&c, "%s+%s-1%s", t[0].data, t[1].data, t[2].data);
        if (!grader_equivalent(g, a.data, b.data)) fail_msg("'%s' is not '%s'", a.data, b.data);
        if (grader_equivalent(g, a.data, c.data)) fail_msg("'%s' is '%s'", a.data, c.data);
        for (int k = 0; k < 3; k++) buf_release(&t[k]);
        buf_release(&a);
        buf_release(&b);
        buf_release(&c);
    }
}

/* Two fractions are equivalent exactly if the cross products of their integers are equal. */
static void test_fractions_are_exact(void **state) {
    (void)state;
    const struct grader *g = grader("math");
    for (uint32_t i = 0; i < 2000; i++) {
        struct rng r = rng_make(2, RNG_TEST, i, 0);
        int64_t v[4], factor = 1 + rng_below(&r, 9);
        for (int k = 0; k < 4; k++) v[k] = 1 + rng_below(&r, 40);
        if (rng_below(&r, 2)) v[2] = v[0] * factor, v[3] = v[1] * factor;
        char *a = xasprintf("\\frac{%d}{%d}", (int)v[0], (int)v[1]);
        char *b = xasprintf("%d/%d", (int)v[2], (int)v[3]);
        if (grader_equivalent(g, a, b) != (v[0] * v[3] == v[1] * v[2]))
            fail_msg("wrong for %s and %s", a, b);
        free(a);
        free(b);
    }
}

/* the rest of the interface */

static void test_groups(void **state) {
    (void)state;
    static const char *const texts[] = {
        "\\frac12",
        "so it is \\boxed{0.5}",
        "2",
        "I do not know, and nobody will ever be able to tell us, alas. "
        "It stays open.",
        "1/2",
        "4/2",
        "$50\\%$"};
    static const int want[] = {0, 0, 1, -1, 0, 1, 0};
    int group[ARRAY_LEN(texts)];
    assert_int_equal(grader_group_answers(grader("math"), texts, ARRAY_LEN(texts), group), 2);
    assert_memory_equal(group, want, sizeof want);
    static const char *const letters[] = {"(B)", "Answer: B", "b", "none", "答えはＣです。", "C"};
    static const int letter_groups[] = {0, 0, 0, -1, 1, 1};
    assert_int_equal(grader_group_answers(grader("letter"), letters, ARRAY_LEN(letters), group), 2);
    assert_memory_equal(group, letter_groups, sizeof letter_groups);
    assert_int_equal(grader_group_answers(grader("letter"), letters, 0, group), 0);
}

static void test_best_of_golds(void **state) {
    (void)state;
    static const char *const golds[] = {"Paris", "the city of Paris", "パリ"};
    assert_true(grader_grade(grader("exact"), "パリ。", golds, 3).score == 1);
    assert_true(grader_grade(grader("exact"), "パリ。", golds, 2).score == 0);
    assert_true(grader_grade(grader("f1"), "city of Paris", golds, 3).score == 1);
    assert_true(grader_grade(grader("exact"), "Paris", golds, 0).score == 0);
}

/* Stopping as soon as the grade is decided must not change it. */
static void test_decided_prefixes(void **state) {
    (void)state;
    const struct grader *g = grader("prefix");
    struct cases *c = cases_read("prefix");
    for (int i = 0; i < c->n; i++) {
        const struct test_case *t = &c->v[i];
        double want = grade(g, t->answer, t->gold).score;
        for (size_t len = 0; len < strlen(t->answer); len++) {
            char *part = xasprintf("%.*s", (int)len, t->answer);
            if (grader_is_decided(g, part, t->gold) && grade(g, part, t->gold).score != want)
                fail_msg("grade-prefix.txt:%d: '%s' is not decided", t->line, part);
            free(part);
        }
    }
    assert_true(grader_is_decided(g, "no", "yes"));
    assert_true(grader_is_decided(g, "signs of life", "signs"));
    assert_false(grader_is_decided(g, " ", "signs"));
    assert_false(grader_is_decided(g, "signs", "signs"));
    assert_false(grader_is_decided(grader("exact"), "no", "yes"));
    cases_free(c);
}

static void test_invalid_golds_are_refused(void **state) {
    (void)state;
    static const char *const cases[][3] = {
        {"letter", "K", "is no letter from A to J"},
        {"letter", "", "is no letter"},
        {"number", "many", "'many' is no number"},
        {"math", " ", "is empty"},
        {"regex", "(", "pattern '(' is wrong at"},
        {"exact", "", "is empty"},
        {"bleu", "\n", "is empty"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        assert_int_equal(grader_check(grader(cases[i][0]), cases[i][1], &err), ERR_FORMAT);
        if (!strstr(err.text, cases[i][2])) fail_msg("%s", err.text);
    }
    assert_null(grader_find("maths", &err));
    assert_non_null(strstr(err.text, "no grader 'maths'; there are letter, number, math"));
}

/* hostile texts */

static char *text_repeat(const char *head, const char *what, size_t bytes, const char *tail) {
    struct buf b = {0};
    buf_puts(&b, head);
    while (b.len < bytes) buf_puts(&b, what);
    buf_puts(&b, tail);
    return b.data;
}

static void test_hostile_texts(void **state) {
    (void)state;
    static const char *const parts[] = {
        "(",
        "{",
        "\\frac{",
        "\\frac12",
        "1\\frac{1",
        "[1,",
        "\\sqrt{",
        "x^",
        "^",
        "-",
        "\\boxed{",
        "\\text{",
        "1,",
        "2^9^",
        "!",
        "a\\%",
        "\\{1,",
        "\\left(",
        "|",
        "\\begin{pmatrix}",
        "sin ",
        "log_",
        "1e999",
        "±",
        "1 = ",
        "一万",
        "あ",
        "\xFF",
        "answer: ",
        "A) ",
        "$",
        "x_{",
        "9",
        "999,",
        " ",
        "1/",
        "\\binom{999}{500}",
        "999!",
        "\\overline{1}",
        "∪",
        "5 m ",
        "\n",
        "\\",
        "B and ",
        "3万",
        "\\(",
    };
    static const size_t sizes[] = {1000, 2000, 20000};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        for (size_t k = 0; k < ARRAY_LEN(sizes); k++)
            for (int closed = 0; closed < 2; closed++) {
                char *a =
                    text_repeat(closed ? "\\boxed{" : "", parts[i], sizes[k], closed ? "}" : "");
                char *b = text_repeat("", parts[i], sizes[k], "1");
                for (int n = 0; grader_at(n); n++) {
                    const struct grader *g = grader_at(n);
                    struct grade got = grade(g, a, strcmp(grader_name(g), "regex") ? b : "^(a+)+$");
                    assert_true(got.score >= 0 && got.score <= 1 && (got.found || got.score == 0));
                }
                grader_equivalent(grader("math"), a, b);
                free(a);
                free(b);
            }
}

/* Expensive comparisons: long lists, long sums, large numbers. The largest cost must be above that
 * of one pair of readings, so that the limit is tested, and at most 1 % above MATH_MAX_STEPS. */
static void test_one_comparison_is_bounded(void **state) {
    (void)state;
    const struct grader *g = grader("math");
    static const char *const parts[] = {"\\sqrt{x},", "\\{x,y\\},", "(\\sin x)^y +", "999!+",
                                        "0.\\overline{123}+"};
    int64_t max_steps = 0;
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        char *a = text_repeat("", parts[i], 900, "2"), *b = text_repeat("", parts[i], 900, "3");
        int64_t steps;
        assert_false(grader_equivalent(g, a, b));
        assert_false(math_equivalent(a, b, &steps));
        if (steps > max_steps) max_steps = steps;
        free(a);
        free(b);
    }
    assert_true(max_steps > MATH_MAX_STEPS / 16 &&
                max_steps < MATH_MAX_STEPS + MATH_MAX_STEPS / 100);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_letter),
        cmocka_unit_test(test_number),
        cmocka_unit_test(test_math),
        cmocka_unit_test(test_text_graders),
        cmocka_unit_test(test_notation_does_not_matter),
        cmocka_unit_test(test_formulas_differ),
        cmocka_unit_test(test_changed_digit_differs),
        cmocka_unit_test(test_order_of_a_sum_does_not_matter),
        cmocka_unit_test(test_fractions_are_exact),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_best_of_golds),
        cmocka_unit_test(test_decided_prefixes),
        cmocka_unit_test(test_invalid_golds_are_refused),
        cmocka_unit_test(test_hostile_texts),
        cmocka_unit_test(test_one_comparison_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
