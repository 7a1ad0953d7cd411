/*
 * report: the result of a run as text and as a page.
 */
#define _GNU_SOURCE
#include "grow/grow.h"

#include <stdlib.h>
#include <string.h>

static long long integer(const json_t *v, const char *key) {
    return (long long)json_integer_value(json_object_get(v, key));
}

static void gate_print(const json_t *gate, const char *other, FILE *f) {
    if (!gate) return;
    fprintf(f,
            "  answers to %lld held-out questions: %.1f %% pass, of %s %.1f %%: %+.1f (%+.1f … "
            "%+.1f), p = %.2g\n",
            integer(gate, "n"), 100 * json_get_number(gate, "after"), other,
            100 * json_get_number(gate, "before"), 100 * json_get_number(gate, "change"),
            100 * json_get_number(gate, "lo"), 100 * json_get_number(gate, "hi"),
            json_get_number(gate, "p"));
}

/* The records of the learners: the list of --learn each, else the report itself. The caller frees
 * the array. */
static json_t *learner_records(const json_t *report) {
    const json_t *list = json_object_get(report, "learners");
    return json_is_array(list) ? json_copy((json_t *)(uintptr_t)list) : json_pack("[O]", report);
}

/* The result of a learner in a round. Its name is that of its agent, or "". */
static void learner_print(const json_t *record, long long lines, FILE *f) {
    const char *name = json_get_string(record, "name");
    if (json_object_get(record, "adapter"))
        fprintf(f, "  %s%slearned from %lld lines: %s\n", name, *name ? " " : "", lines,
                json_is_true(json_object_get(record, "accepted")) ? "accepted" : "rejected");
    gate_print(json_object_get(record, "gate"), "the best adapter before", f);
}

static void round_print(const json_t *round, FILE *f) {
    const json_t *right = json_object_get(round, "right"), *v;
    json_t *learners = learner_records(round);
    size_t i;
    fprintf(f, "round %lld: %lld questions", integer(round, "round"), integer(round, "questions"));
    if (json_object_get(round, "coverage"))
        fprintf(f, ", %.1f %% with an answer that passes",
                100 * json_get_number(round, "coverage"));
    fprintf(f, ", %lld kept", integer(round, "kept"));
    if (right)
        fprintf(f, " (%.1f %% of %lld with a known answer are right)",
                100 * (double)integer(right, "right") / (double)integer(right, "of"),
                integer(right, "of"));
    fprintf(f, "\n");
    json_array_foreach (json_object_get(round, "agents"), i, v)
        fprintf(f, "  %-16s %6lld answers, %6lld pass, %6lld kept\n", json_get_string(v, "name"),
                integer(v, "samples"), integer(v, "passed"), integer(v, "kept"));
    json_array_foreach (learners, i, v) learner_print(v, integer(round, "lines"), f);
    json_decref(learners);
}

static void test_print(const json_t *test, FILE *f) {
    const json_t *v;
    size_t i;
    fprintf(f, "generated answers to %lld test questions; all agents are wrong on %.1f %%\n",
            integer(test, "n"), 100 * json_get_number(test, "all_wrong"));
    json_array_foreach (json_object_get(test, "rows"), i, v) report_row_print(v, f);
    json_array_foreach (json_object_get(test, "comparisons"), i, v) report_comparison_print(v, f);
}

static void published_print(const json_t *record, FILE *f) {
    const char *name = json_get_string(record, "name");
    if (json_is_true(json_object_get(record, "published")))
        fprintf(f, "published '%s', the adapter of round %lld\n", json_get_string(record, "dir"),
                integer(record, "best_round"));
    else if (*name)
        fprintf(f, "no round's adapter of '%s' passed the gate; it is not published\n", name);
    else
        fprintf(f, "no round's adapter passed the gate; nothing is published\n");
    gate_print(json_object_get(record, "gate"), "the baseline", f);
}

void grow_print(const json_t *result, FILE *f) {
    json_t *learners = learner_records(result);
    const json_t *v;
    size_t i;
    if (integer(result, "rehearsed"))
        fprintf(f, "rehearsal: %lld answers to questions of other tasks, kept without a check\n",
                integer(result, "rehearsed"));
    json_array_foreach (json_object_get(result, "rounds"), i, v) round_print(v, f);
    json_array_foreach (learners, i, v) published_print(v, f);
    json_decref(learners);
    if ((v = json_object_get(result, "test"))) test_print(v, f);
}

/* Rows of one table over all rounds. */
static json_t *rounds_table(const json_t *rounds) {
    json_t *rows = json_array();
    const json_t *v, *k;
    size_t i;
    json_array_foreach (rounds, i, v) {
        const json_t *adapter = json_object_get(v, "adapter"), *cost = json_object_get(v, "cost");
        json_t *row = json_object();
        static const char *const keys[] = {"round", "questions", "coverage",
                                           "kept",  "lines",     "held_out"};
        for (size_t j = 0; j < ARRAY_LEN(keys); j++)
            if ((k = json_object_get(v, keys[j])))
                json_object_set(row, keys[j], (json_t *)(uintptr_t)k);
        json_object_update(row, (json_t *)(uintptr_t)cost);
        if (adapter) {
            json_object_set(row, "accepted", json_object_get(v, "accepted"));
            json_object_set(row, "hash", json_object_get(adapter, "hash"));
        }
        json_array_append_new(rows, row);
    }
    return rows;
}

/* Rows of the adapters of one round, with --learn each. */
static json_t *learners_table(const json_t *learners) {
    json_t *rows = json_array();
    const json_t *v;
    size_t i;
    json_array_foreach (learners, i, v) {
        const json_t *gate = json_object_get(v, "gate");
        json_array_append_new(
            rows,
            json_pack("{s:s,s:O*,s:O*,s:O*,s:O*}", "learner", json_get_string(v, "name"),
                      "accepted", json_object_get(v, "accepted"), "before",
                      json_object_get(gate, "before"), "after", json_object_get(gate, "after"),
                      "hash", json_object_get(json_object_get(v, "adapter"), "hash")));
    }
    return rows;
}

/* Coverage by the number of samples, a line for each round. */
static void coverage_plot(const json_t *rounds, struct buf *page) {
    const int n = (int)json_array_size(rounds);
    struct curve *curves = xcalloc((size_t)n, sizeof *curves);
    char **names = xcalloc((size_t)n, sizeof *names);
    const json_t *v, *y;
    size_t i, k;
    json_array_foreach (rounds, i, v) {
        names[i] = xasprintf("round %zu", i + 1);
        json_array_foreach (json_object_get(v, "pass_at"), k, y)
            curve_add(&curves[i], (double)k + 1, json_number_value(y));
    }
    plot_curves(page, "share of the questions with a passing answer", "samples of a question",
                curves, (const char *const *)names, n);
    for (int j = 0; j < n; j++) free(names[j]);
    free(names);
    free(curves);
}

void grow_page(const json_t *result, struct buf *page) {
    const json_t *rounds = json_object_get(result, "rounds"), *v;
    json_t *table = rounds_table(rounds);
    size_t i;
    html_page_open(page, json_get_string(result, "run"));
    html_table(page, table);
    json_decref(table);
    if ((v = json_object_get(result, "test"))) {
        buf_puts(page, "<h2>Answers to test questions</h2>\n");
        html_table(page, json_object_get(v, "rows"));
        html_table(page, json_object_get(v, "comparisons"));
    }
    if (json_array_size(json_object_get(json_array_get(rounds, 0), "pass_at")) > 1) {
        buf_puts(page, "<h2>Questions with a passing answer</h2>\n");
        coverage_plot(rounds, page);
    }
    json_array_foreach (rounds, i, v) {
        buf_printf(page, "<h2>Round %lld</h2>\n", integer(v, "round"));
        json_t *learners = learners_table(json_object_get(v, "learners"));
        if (json_object_get(v, "agents")) html_table(page, json_object_get(v, "agents"));
        if (json_array_size(learners)) html_table(page, learners);
        json_decref(learners);
        if (json_object_get(v, "kinds")) html_table(page, json_object_get(v, "kinds"));
    }
    html_page_close(page);
}
