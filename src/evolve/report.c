/*
 * report: a run as one HTML page: the table, the comparisons, the generations, some debates, and
 * the manifest. The page has no script and no font, and links only to the candidates' model cards
 * in the run's folder. It is made from the result object only, so result.json suffices to make it
 * again. All external text is escaped; sections that grow with the run are truncated with a note.
 */
#define _GNU_SOURCE
#include "evolve/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_SHOWN = 120, CANDIDATES_SHOWN = 300, RINGS_SHOWN = 4000, ARCHIVE_SIDE = 32 };

/* shared */

static void add_percent_encoded(struct buf *b, const char *s) {
    for (; *s; s++) {
        bool plain = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') ||
                     (*s >= '0' && *s <= '9') || strchr("-_.~", *s);
        buf_printf(b, plain ? "%c" : "%%%02X", (unsigned char)*s);
    }
}

void evolve_report_name(const struct evolve_report *r, const char *name) {
    int node = lineage_find(r->l, name), birth_generation = node < 0 ? 0 : r->l->v[node].generation;
    char *key = xasprintf("gen_%d/%s", birth_generation, name);
    bool has_card = node >= 0 && json_object_get(r->adapters, key);
    free(key);
    if (has_card) {
        buf_printf(r->b, "<a href=\"adapters/gen_%d/", birth_generation);
        add_percent_encoded(r->b, name);
        buf_puts(r->b, "/README.md\">");
    }
    html_escape(r->b, name);
    if (has_card) buf_puts(r->b, "</a>");
}

/* Adds a number as a table cell, "–" if it is not finite. */
static void add_number_cell(struct buf *b, const char *before, int digits, double v,
                            const char *after) {
    if (isfinite(v))
        buf_printf(b, "<td class=n>%s%.*f%s", before, digits, v, after);
    else
        buf_puts(b, "<td class=n>–");
}

/* A table with many columns does not wrap its cells; it scrolls. */
#define WIDE_TABLE                                                                                 \
    "<div style=\"overflow-x:auto\"><table style=\"white-space:nowrap;font-size:.8rem\">"
#define WIDE_TABLE_END "</table></div>\n"

/* Whether a table shows row i of n: a long table shows its first and last rows only. At the first
 * omitted row, adds a row with the number of omitted rows. */
static bool table_shows_row(struct buf *b, size_t i, size_t n, int columns) {
    if (n <= ROWS_SHOWN || i < ROWS_SHOWN / 2 || i >= n - ROWS_SHOWN / 2) return true;
    if (i == ROWS_SHOWN / 2)
        buf_printf(b, "<tr><td class=soft colspan=%d>… %zu more are in result.json</tr>\n", columns,
                   n - ROWS_SHOWN);
    return false;
}

/* held-out questions */

/* Draws the interval [lo, hi], in 0..1, as a bar on a line from 0 to 100 %, with a mark at the
 * value. */
static void interval_bar(struct buf *b, double v, double lo, double hi) {
    buf_printf(b,
               "<svg viewBox=\"0 0 200 12\" style=\"width:12rem\"><path d=\"M0 6H200\" "
               "stroke=\"var(--line)\"/>"
               "<path d=\"M%.1f 6H%.1f\" stroke=\"var(--a)\" stroke-width=\"4\"/><circle "
               "cx=\"%.1f\" cy=\"6\" r=\"4\" "
               "fill=\"var(--a)\"/></svg>",
               200 * lo, 200 * hi, 200 * v);
}

static void results_table(struct buf *b, const json_t *table) {
    size_t i;
    json_t *row;
    buf_puts(b, "<h2>Held-out questions</h2><table><tr><th>name<th class=n>n<th "
                "class=n>accuracy<th>95 % interval<th>"
                "<th class=n>prompt tokens<th class=n>generated</tr>\n");
    json_array_foreach (table, i, row) {
        if (!table_shows_row(b, i, json_array_size(table), 7)) continue;
        double v = json_number_or_nan(row, "acc"), lo = json_number_or_nan(row, "lo"),
               hi = json_number_or_nan(row, "hi");
        buf_puts(b, "<tr><td>");
        html_escape(b, json_get_string(row, "name"));
        buf_printf(b, "<td class=n>%d<td class=n>%.1f %%<td>%.1f – %.1f<td>",
                   (int)json_number_or_nan(row, "n"), 100 * v, 100 * lo, 100 * hi);
        interval_bar(b, v, lo, hi);
        buf_printf(b, "<td class=n>%.0f<td class=n>%.0f</tr>\n",
                   json_number_or_nan(row, "prefilled"), json_number_or_nan(row, "generated"));
    }
    buf_puts(b, "</table>\n");
}

static void comparisons_table(struct buf *b, const json_t *list) {
    size_t i;
    json_t *row;
    buf_puts(b, "<h2>Did it help?</h2><p class=soft>Paired on the same questions; McNemar's exact "
                "test, corrected for the "
                "number of comparisons (Holm).</p><table><tr><th>comparison<th "
                "class=n>points<th>95 % interval<th class=n>"
                "p<th>verdict</tr>\n");
    json_array_foreach (list, i, row) {
        bool significant = json_is_true(json_object_get(row, "significant"));
        buf_puts(b, "<tr><td>");
        html_escape(b, json_get_string(row, "a"));
        buf_puts(b, " <span class=soft>against</span> ");
        html_escape(b, json_get_string(row, "b"));
        buf_printf(b, "<td class=n>%+.1f<td>%+.1f – %+.1f<td class=n>%.2g<td class=%s>%s</tr>\n",
                   100 * json_number_or_nan(row, "diff"), 100 * json_number_or_nan(row, "lo"),
                   100 * json_number_or_nan(row, "hi"), json_number_or_nan(row, "p_holm"),
                   significant ? "yes" : "soft",
                   !significant                          ? "not significant"
                   : json_number_or_nan(row, "diff") > 0 ? "better"
                                                         : "worse");
    }
    buf_puts(b, "</table>\n");
}

static void retention_cells(struct buf *b, const json_t *v) {
    add_number_cell(b, "", 1, 100 * json_number_or_nan(v, "acc"), " %");
    buf_printf(b, "<td class=soft>%.1f – %.1f", 100 * json_number_or_nan(v, "lo"),
               100 * json_number_or_nan(v, "hi"));
}

static const char *retention_verdict(const json_t *row) {
    if (!(json_number_or_nan(row, "p_holm") < 0.05)) return "no change found";
    return json_interval(row, "diff").value > 0 ? "better" : "lost";
}

static void retention_table(struct buf *b, const json_t *list) {
    size_t i;
    json_t *row;
    if (!json_array_size(list)) return;
    buf_puts(
        b, "<h2>Retention</h2><p class=soft>Families that fitness never asks: "
           "the best founder and the best candidate of the last generation, on the same questions."
           "</p>" WIDE_TABLE "<tr><th>family<th class=n>n<th class=n>founder<th><th class=n>evolved"
           "<th><th class=n>points<th>95 % interval<th class=n>p<th>verdict</tr>\n");
    json_array_foreach (list, i, row) {
        const char *verdict = retention_verdict(row);
        struct stats_interval d = json_interval(row, "diff");
        buf_puts(b, "<tr><td>");
        html_escape(b, json_get_string(row, "family"));
        add_number_cell(b, "", 0, json_number_or_nan(row, "n"), "");
        retention_cells(b, json_object_get(row, "founder"));
        retention_cells(b, json_object_get(row, "evolved"));
        buf_printf(b, "<td class=n>%+.1f<td>%+.1f – %+.1f<td class=n>%.2g<td%s>%s</tr>\n",
                   100 * d.value, 100 * d.lo, 100 * d.hi, json_number_or_nan(row, "p_holm"),
                   strcmp(verdict, "lost") == 0 ? " class=yes style=\"color:var(--b)\"" : "",
                   verdict);
    }
    buf_puts(b, WIDE_TABLE_END);
}

/* generations */

static const json_t *candidates_of(const json_t *generation) {
    return json_object_get(generation, "candidates");
}

static const json_t *last_generation_of(const json_t *generations) {
    return json_array_get(generations, json_array_size(generations) - 1);
}

static size_t candidates_count(const json_t *generations) {
    size_t g, n = 0;
    json_t *v;
    json_array_foreach (generations, g, v) n += json_array_size(candidates_of(v));
    return n;
}

/* Fitness by generation, [n] each: of the best candidate with its interval, and the mean. */
struct fitness_history {
    double *x, *best, *lo, *hi, *mean;
    int n;
};

static struct fitness_history compute_fitness_history(const json_t *generations, struct plot *p) {
    size_t n = json_array_size(generations), g, i;
    json_t *v, *c;
    double *values = xcalloc(5 * n + 1, sizeof *values);
    struct fitness_history o = {values,         values + n,     values + 2 * n,
                                values + 3 * n, values + 4 * n, (int)n};
    p->y0 = INFINITY, p->y1 = -INFINITY;
    json_array_foreach (generations, g, v) {
        const json_t *list = candidates_of(v);
        struct stats_interval best = json_interval(json_array_get(list, 0), "fitness");
        o.x[g] = (double)g, o.best[g] = best.value, o.lo[g] = best.lo, o.hi[g] = best.hi;
        p->y0 = fmin(p->y0, best.lo), p->y1 = fmax(p->y1, best.hi);
        json_array_foreach (list, i, c) {
            double f = json_interval(c, "fitness").value;
            p->y0 = fmin(p->y0, f), p->y1 = fmax(p->y1, f);
            o.mean[g] += f / (double)json_array_size(list);
        }
    }
    return o;
}

/* Fills the area between the upper and lower ends of the intervals, where they are finite. */
static void interval_band(struct buf *b, const struct plot *p, const struct fitness_history *o) {
    bool has_point = false;
    buf_puts(b, "<path fill=\"var(--b)\" fill-opacity=\".18\" d=\"");
    for (int i = 0; i < 2 * o->n; i++) {
        int k = i < o->n ? i : 2 * o->n - 1 - i;
        double y = i < o->n ? o->hi[k] : o->lo[k];
        if (!isfinite(y)) continue;
        buf_printf(b, "%c%.1f %.1f", has_point ? 'L' : 'M', plot_x(p, o->x[k]), plot_y(p, y));
        has_point = true;
    }
    buf_puts(b, "\"/>");
}

static void fitness_rings(struct buf *b, const struct plot *p, const json_t *generations) {
    size_t g, i;
    json_t *v, *c;
    json_array_foreach (generations, g, v)
        json_array_foreach (candidates_of(v), i, c) {
            double f = json_interval(c, "fitness").value;
            if (!isfinite(f)) continue;
            buf_printf(b,
                       "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"none\" "
                       "stroke=\"var(--a)\" stroke-opacity=\".5\"><title>",
                       plot_x(p, (double)g), plot_y(p, f));
            html_escape(b, json_get_string(c, "name"));
            buf_printf(b, " %.4f</title></circle>", f);
        }
}

static void fitness_plot(const struct evolve_report *r) {
    struct buf *b = r->b;
    size_t n = json_array_size(r->generations);
    struct plot p = {
        .label = "fitness by generation", .x_title = "generation", .x1 = n > 1 ? (double)n - 1 : 1};
    struct fitness_history o = compute_fitness_history(r->generations, &p);
    bool rings = candidates_count(r->generations) <= RINGS_SHOWN;
    buf_puts(b, "<h2>Fitness by generation</h2>");
    plot_open(b, &p);
    interval_band(b, &p, &o);
    if (rings) fitness_rings(b, &p, r->generations);
    plot_line(b, &p, 1, o.x, o.best, o.n);
    plot_line(b, &p, 0, o.x, o.mean, o.n);
    plot_close(b);
    buf_puts(b, "<p>");
    plot_legend(b, 1, "the best, and its 95 % interval");
    plot_legend(b, 0, "mean");
    buf_printf(
        b,
        "</p>\n<p class=soft>%sMeasured on the dev questions that selection saw: the best of "
        "many looks better than it is. The table above is of questions it never saw.</p>\n",
        rings ? "Rings are candidates. " : "");
    free(o.x);
}

static void diversity_plot(const struct evolve_report *r) {
    static const char *const keys[] = {"weights_mean", "weights_min", "behaviour_mean",
                                       "behaviour_min"};
    static const char *const names[] = {"weights, mean", "weights, nearest two", "behaviour, mean",
                                        "behaviour, nearest two"};
    struct curve *c = xcalloc(ARRAY_LEN(keys), sizeof *c);
    size_t g;
    json_t *v;
    int points = 0;
    json_array_foreach (r->generations, g, v)
        for (size_t k = 0; k < ARRAY_LEN(keys); k++)
            curve_add(&c[k], (double)g,
                      json_number_or_nan(json_object_get(v, "diversity"), keys[k]));
    for (size_t k = 0; k < ARRAY_LEN(keys); k++) points += c[k].n;
    if (points) {
        buf_puts(r->b, "<h2>Diversity by generation</h2>");
        plot_curves(r->b, "diversity by generation", "generation", c, names, ARRAY_LEN(keys));
        buf_puts(r->b,
                 "<p class=soft>Over all pairs of candidates: ‖ΔW − ΔW′‖ divided by their mean "
                 "norm (1.4 for unrelated ones), and the Jensen-Shannon divergence of their "
                 "answers.</p>\n");
    }
    free(c);
}

/* Numbers of children of an operator. children: all; finished: born before the last generation;
 * survived: also in a later generation than that of their birth. */
struct operator_outcome {
    int children, finished, survived;
};

static struct operator_outcome count_outcomes(const struct lineage *l, const char *operator_name) {
    struct operator_outcome outcome = {0};
    for (int i = 0; i < l->n; i++) {
        const struct lineage_node *v = &l->v[i];
        if (v->parent[0] < 0 ||
            (operator_name &&
             strcmp(json_get_string(v->birth_record, "operator"), operator_name) != 0))
            continue;
        outcome.children++;
        outcome.finished += v->generation < l->generations - 1;
        outcome.survived += v->last_generation > v->generation;
    }
    return outcome;
}

static void share_bar(struct buf *b, double share) {
    buf_printf(b,
               "<td><svg viewBox=\"0 0 100 10\" style=\"width:4rem\"><path d=\"M0 5H100\" "
               "stroke=\"var(--line)\"/><path d=\"M0 5H%.1f\" stroke=\"var(--a)\" "
               "stroke-width=\"8\"/></svg>",
               isfinite(share) ? 100 * fmin(1, fmax(0, share)) : 0);
}

static void operator_row(const struct evolve_report *r, const json_t *v,
                         const struct operator_outcome *total) {
    struct buf *b = r->b;
    struct operator_outcome outcome = count_outcomes(r->l, json_get_string(v, "name"));
    buf_puts(b, "<tr><td>");
    html_escape(b, operator_label(v, "name"));
    if (json_is_true(json_object_get(v, "dropped")))
        buf_puts(b, " <b style=\"color:var(--b)\">dropped</b>");
    buf_puts(b, "<td class=soft>");
    html_escape(b, json_get_string(v, "kind"));
    add_number_cell(b, "", 0, json_number_or_nan(v, "used"), "");
    add_number_cell(b, "", 0, json_number_or_nan(v, "improved"), "");
    add_number_cell(b, json_number_or_nan(v, "quality") < 0 ? "" : "+", 4,
                    json_number_or_nan(v, "quality"), "");
    add_number_cell(b, "", 3, json_number_or_nan(v, "step"), "");
    add_number_cell(b, "", 1, 100 * json_number_or_nan(v, "p"), " %");
    share_bar(b, json_number_or_nan(v, "p"));
    buf_printf(b, "<td class=n>%d of %d", outcome.survived, outcome.finished);
    add_number_cell(b, "", 1, 100.0 * outcome.survived / total->survived, " %");
    share_bar(b, (double)outcome.survived / total->survived);
    buf_puts(b, "</tr>\n");
}

static void operators_table(const struct evolve_report *r) {
    const json_t *list = json_object_get(last_generation_of(r->generations), "operators");
    struct operator_outcome all = count_outcomes(r->l, NULL);
    size_t i;
    json_t *v;
    if (!json_array_size(list)) return;
    buf_puts(r->b,
             "<h2>Operators</h2>" WIDE_TABLE "<tr><th>operator<th>kind<th class=n>used<th "
             "class=n>improved<th class=n>mean gain<th class=n>step<th class=n>probability<th>"
             "<th class=n>survived<th class=n>of survivors<th></tr>\n");
    json_array_foreach (list, i, v) operator_row(r, v, &all);
    buf_puts(r->b, WIDE_TABLE_END
             "<p class=soft>Gain: a child's fitness minus its parents', on "
             "questions that did not choose them; recent children count more. Survived: "
             "children that were kept beyond the generation they were born in.</p>\n");
}

/* archive */

/* Sets cell[side²] to the fittest cell of each block of cells, and *range to the smallest and
 * largest fitness. Returns the side; 0: there is no archive. */
static int archive_blocks(const json_t *archive, const json_t **cell,
                          struct stats_interval *range) {
    json_int_t bins = json_integer_value(json_object_get(archive, "bins"));
    int side = (int)MIN(bins, ARCHIVE_SIDE);
    size_t i;
    json_t *c;
    *range = (struct stats_interval){.lo = INFINITY, .hi = -INFINITY};
    if (bins < 1 || bins > 1 << 20) return 0;
    json_array_foreach (json_object_get(archive, "cells"), i, c) {
        json_int_t x = json_integer_value(json_object_get(c, "x")),
                   y = json_integer_value(json_object_get(c, "y"));
        double f = json_number_or_nan(c, "fitness");
        if (x < 0 || x >= bins || y < 0 || y >= bins || !isfinite(f)) continue;
        const json_t **block = &cell[y * side / bins * side + x * side / bins];
        if (!*block || f > json_number_or_nan(*block, "fitness")) *block = c;
        range->lo = fmin(range->lo, f), range->hi = fmax(range->hi, f);
    }
    return side;
}

static void draw_archive_cell(const struct evolve_report *r, const json_t *c, double x, double y,
                              double size, double shade) {
    buf_printf(r->b,
               "<g><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
               "fill=\"var(--a)\" fill-opacity=\"%.2f\"/>",
               x, y, size, size, 0.12 + 0.7 * shade);
    buf_puts(r->b, "<title>");
    html_escape(r->b, json_get_string(c, "name"));
    buf_printf(r->b, " %.4f</title>", json_number_or_nan(c, "fitness"));
    buf_printf(r->b,
               "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" style=\"font-size:%.1fpx\">",
               x + size / 2, y + size / 2 + 3, fmin(11, size / 5));
    evolve_report_name(r, json_get_string(c, "name"));
    buf_puts(r->b, "</text></g>\n");
}

static void archive_map(const struct evolve_report *r) {
    const json_t *archive = json_object_get(last_generation_of(r->generations), "archive"),
                 *cell[ARCHIVE_SIDE * ARCHIVE_SIDE] = {0};
    struct stats_interval range;
    int side = archive_blocks(archive, cell, &range);
    if (side < 1 || range.lo > range.hi) return;
    double size = 480.0 / side;
    buf_puts(r->b, "<h2>Archive</h2><svg viewBox=\"0 0 860 500\" role=\"img\" "
                   "aria-label=\"archive\"><rect x=\"190\" y=\"2\" width=\"480\" height=\"480\" "
                   "fill=\"none\" stroke=\"var(--line)\"/>");
    for (int i = 0; i < side * side; i++)
        if (cell[i])
            draw_archive_cell(
                r, cell[i], 190 + size * (i % side), 482 - size * (i / side + 1), size,
                range.hi > range.lo
                    ? (json_number_or_nan(cell[i], "fitness") - range.lo) / (range.hi - range.lo)
                    : 1);
    buf_puts(r->b, "<text x=\"670\" y=\"498\" text-anchor=\"end\" class=soft>first descriptor →"
                   "</text><text x=\"182\" y=\"14\" text-anchor=\"end\" class=soft>second ↑</text>"
                   "</svg>\n");
    buf_printf(r->b,
               "<p class=soft>The fittest candidate of each cell, by two descriptors of behaviour; "
               "darker is fitter, from %.4f to %.4f.%s Filled: %.1f %% of the cells; "
               "QD score %.4g.</p>\n",
               range.lo, range.hi,
               side < json_number_or_nan(archive, "bins") ? " Each square is several cells." : "",
               100 * json_number_or_nan(archive, "coverage"),
               json_number_or_nan(archive, "qd_score"));
}

/* candidates and cost */

/* A cell per gene that is a column. A long prompt is cut; the whole text is its title. */
static void gene_cells(struct buf *b, const json_t *genes, unsigned columns) {
    enum { SHOWN = 40 }; /* bytes */
    for (int g = 0; g < N_GENES; g++) {
        const json_t *x = json_object_get(genes, gene_names[g]);
        if (!(columns >> g & 1)) continue;
        if (!json_is_string(x)) {
            buf_puts(b, "<td class=n>");
            if (x) buf_printf(b, "%.4g", json_number_value(x));
            continue;
        }
        const char *text = json_string_length(x) ? json_string_value(x) : "none";
        size_t n = strlen(text), cut = utf8_complete_len(text, MIN(n, SHOWN));
        char *begin = xasprintf("%.*s", (int)cut, text);
        buf_puts(b, "<td title=\"");
        html_escape(b, text);
        buf_puts(b, "\">");
        html_escape(b, begin);
        if (cut < n) buf_puts(b, "…");
        free(begin);
    }
}

static void candidate_row(const struct evolve_report *r, const json_t *c, int generation,
                          unsigned genes) {
    struct buf *b = r->b;
    struct stats_interval f = json_interval(c, "fitness");
    const json_t *parents = json_object_get(c, "parents"), *parent;
    size_t i;
    buf_printf(b, "<tr><td class=n>%d<td>", generation);
    evolve_report_name(r, json_get_string(c, "name"));
    add_number_cell(b, "", 4, f.value, "");
    buf_puts(b, "<td class=soft>");
    if (isfinite(f.lo) && isfinite(f.hi)) buf_printf(b, "%.4f – %.4f", f.lo, f.hi);
    add_number_cell(b, "", 1, 100 * json_interval(c, "performance").value, " %");
    add_number_cell(b, "", 4, json_interval(c, "cooperation").value, "");
    add_number_cell(b, "", 4, json_interval(c, "novelty").value, "");
    add_number_cell(b, "", 0, json_number_or_nan(c, "items"), "");
    gene_cells(b, json_object_get(c, "genes"), genes);
    buf_puts(b, "<td>");
    bool kept = json_is_true(json_object_get(c, "elite"));
    const char *operator_name = operator_label(c, "operator");
    bool copies = !*operator_name && json_object_get(c, "genes");
    html_escape(b, kept ? "kept" : copies ? "weights kept" : operator_name);
    if (!kept)
        json_array_foreach (parents, i, parent) {
            buf_puts(b, i ? " × " : " <span class=soft>of</span> ");
            evolve_report_name(r, json_string_value(parent) ? json_string_value(parent) : "");
        }
    buf_printf(b, "<td class=soft>%.8s</tr>\n", json_get_string(c, "hash"));
}

/* The genes that any candidate has, as bits. */
static unsigned genes_of(const json_t *generations) {
    size_t k, i;
    json_t *v, *c;
    unsigned all = 0;
    json_array_foreach (generations, k, v)
        json_array_foreach (candidates_of(v), i, c)
            for (int g = 0; g < N_GENES; g++)
                if (json_object_get(json_object_get(c, "genes"), gene_names[g])) all |= 1u << g;
    return all;
}

static void candidates_table(const struct evolve_report *r) {
    size_t i, shown = 0, n_candidates = candidates_count(r->generations);
    unsigned genes = genes_of(r->generations);
    json_t *c;
    buf_puts(r->b, "<h2>Candidates</h2>");
    if (n_candidates > CANDIDATES_SHOWN)
        buf_printf(r->b, "<p class=soft>The last %d of %zu; evolution.jsonl has all.</p>",
                   CANDIDATES_SHOWN, n_candidates);
    buf_puts(r->b,
             WIDE_TABLE "<tr><th class=n>generation<th>name<th class=n>fitness<th>95 % interval"
                        "<th class=n>performance<th class=n>cooperation<th class=n>novelty<th "
                        "class=n>items");
    for (int g = 0; g < N_GENES; g++)
        if (genes >> g & 1) buf_printf(r->b, "<th>%s", gene_names[g]);
    buf_puts(r->b, "<th>made by<th>hash</tr>\n");
    for (size_t g = json_array_size(r->generations); g-- > 0;)
        json_array_foreach (candidates_of(json_array_get(r->generations, g)), i, c)
            if (shown++ < CANDIDATES_SHOWN) candidate_row(r, c, (int)g, genes);
    buf_puts(r->b, WIDE_TABLE_END);
}

static void cost_row(struct buf *b, const char *what, const json_t *spent) {
    double flops = json_number_or_nan(spent, "flops");
    if (!spent) return;
    buf_printf(b, "<tr><td>%s", what);
    add_number_cell(b, "", 0, json_number_or_nan(spent, "forward_tokens"), "");
    add_number_cell(b, "", 0, json_number_or_nan(spent, "trained_tokens"), "");
    buf_printf(b, "<td class=n>%.3g</tr>\n", flops);
}

/* The sum of n costs. */
static json_t *cost_sum(const json_t *const *spent, int n) {
    static const char *const keys[] = {"forward_tokens", "trained_tokens", "flops"};
    json_t *sum = json_object();
    for (int k = 0; k < (int)ARRAY_LEN(keys); k++) {
        double total = 0;
        for (int i = 0; i < n; i++) total += json_number_or_nan(spent[i], keys[k]);
        json_object_set_new(sum, keys[k], json_real(total));
    }
    return sum;
}

static void cost_table(struct buf *b, const json_t *result) {
    static const char *const names[] = {"training of the founders", "search", "held-out tests"},
                             *const keys[] = {"spent_on_founders", "spent", "spent_on_tests"};
    enum { N = ARRAY_LEN(keys) };
    const json_t *spent[N];
    bool complete = true;
    for (int i = 0; i < N; i++) complete &= (spent[i] = json_object_get(result, keys[i])) != NULL;
    if (!spent[1]) return;
    buf_puts(b, "<h2>Cost</h2><table><tr><th><th class=n>tokens processed<th class=n>tokens "
                "trained on<th class=n>floating-point operations</tr>\n");
    for (int i = 0; i < N; i++) cost_row(b, names[i], spent[i]);
    json_t *sum = complete ? cost_sum(spent, N) : NULL;
    cost_row(b, "all", sum);
    json_decref(sum);
    buf_puts(b, "</table>\n");
}

static void evolution_sections(struct buf *b, const json_t *result) {
    struct error err;
    struct lineage l;
    const json_t *generations = json_object_get(result, "generations");
    int rc = lineage_from_json(&l, generations, &err);
    struct evolve_report r = {b, &l, generations, json_object_get(result, "adapters")};
    fitness_plot(&r);
    diversity_plot(&r);
    operators_table(&r);
    if (rc == OK && l.n > 0) {
        evolve_report_survival(&r);
        evolve_report_tree(&r);
    } else if (rc != OK) {
        buf_puts(b, "<p>The family tree cannot be shown: ");
        html_escape(b, err.text);
        buf_puts(b, "</p>\n");
    }
    archive_map(&r);
    candidates_table(&r);
    lineage_release(&l);
}

/* debates and manifest */

static void debate_section(struct buf *b, const json_t *debate) {
    size_t i;
    const char *name;
    json_t *v;
    if (!debate) return;
    buf_printf(b,
               "<h2>The debate</h2><p>After the others' answers, %.0f answers became right and "
               "%.0f wrong. Leave-one-out contribution of each agent (points, 95 %% interval):",
               json_number_or_nan(debate, "became_right"),
               json_number_or_nan(debate, "became_wrong"));
    json_object_foreach (json_object_get(debate, "leave_one_out"), name, v) {
        buf_puts(b, " ");
        html_escape(b, name);
        buf_printf(b, " %+.1f (%+.1f – %+.1f)", 100 * json_number_or_nan(v, "value"),
                   100 * json_number_or_nan(v, "lo"), 100 * json_number_or_nan(v, "hi"));
    }
    buf_puts(b, ".</p>\n");
    json_array_foreach (json_object_get(debate, "transcripts"), i, v) {
        buf_puts(b, "<pre>");
        html_escape(b, json_string_value(v));
        buf_puts(b, "</pre>\n");
    }
}

/* Omits the adapters' hashes, of which there is one per candidate. */
static void manifest_section(struct buf *b, const json_t *manifest) {
    json_t *shown = json_copy((json_t *)(uintptr_t)manifest);
    json_object_del(shown, "adapters");
    char *text = json_dumps(shown, JSON_INDENT(2) | JSON_SORT_KEYS);
    buf_puts(b, "<h2>Inputs</h2><pre>");
    html_escape(b, text ? text : "");
    buf_puts(b, "</pre>\n");
    free(text);
    json_decref(shown);
}

int evolve_report_write(const json_t *result, const char *path, struct error *err) {
    struct buf b = {0};
    char *title = xasprintf("Shoal run %s", json_get_string(result, "run"));
    html_page_open(&b, title);
    buf_puts(&b, "<style>a{color:var(--a)}</style>\n");
    results_table(&b, json_object_get(result, "table"));
    comparisons_table(&b, json_object_get(result, "comparisons"));
    retention_table(&b, json_object_get(result, "retention"));
    evolution_sections(&b, result);
    cost_table(&b, result);
    debate_section(&b, json_object_get(result, "debate"));
    manifest_section(&b, json_object_get(result, "manifest"));
    html_page_close(&b);
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(title);
    return rc;
}

static void retention_print(const json_t *list, FILE *f) {
    size_t i;
    json_t *row;
    if (json_array_size(list)) fprintf(f, "\nfamilies not trained for, best founder → evolved:\n");
    json_array_foreach (list, i, row) {
        struct stats_interval d = json_interval(row, "diff");
        fprintf(f, "  %s: %.1f → %.1f %%, %+.1f (%+.1f – %+.1f), p = %.2g: %s\n",
                json_get_string(row, "family"),
                100 * json_number_or_nan(json_object_get(row, "founder"), "acc"),
                100 * json_number_or_nan(json_object_get(row, "evolved"), "acc"), 100 * d.value,
                100 * d.lo, 100 * d.hi, json_number_or_nan(row, "p_holm"), retention_verdict(row));
    }
}

/* The genes of the result, and the option that its prompt needs. */
static void best_genes_print(const json_t *best, FILE *f) {
    const json_t *genes = json_object_get(best, "genes");
    const char *prompt = json_get_string(genes, gene_names[GENE_PROMPT]);
    struct buf b = {0}, line = {0};
    if (!genes) return;
    genes_describe(genes, &b);
    fprintf(f, "\ngenes of %s, the best of the last generation: %s\n",
            json_get_string(best, "name"), b.data);
    b.len = 0;
    buf_add_one_line(&line, prompt);
    buf_puts(&line, "");
    buf_add_shell_word(&b, line.data);
    if (*prompt) fprintf(f, "use it with its prompt: --system %s\n", b.data);
    buf_release(&b);
    buf_release(&line);
}

void evolve_run_print(const json_t *result, FILE *f) {
    size_t i;
    json_t *row;
    fprintf(f, "\n%-34s %6s %9s   %-13s %13s %9s\n", "held-out questions", "n", "accuracy",
            "95 % interval", "prompt tokens", "generated");
    json_array_foreach (json_object_get(result, "table"), i, row)
        fprintf(f, "%-34s %6d %7.1f %%   %5.1f – %-5.1f %13.0f %9.0f\n",
                json_get_string(row, "name"), (int)json_number_or_nan(row, "n"),
                100 * json_number_or_nan(row, "acc"), 100 * json_number_or_nan(row, "lo"),
                100 * json_number_or_nan(row, "hi"), json_number_or_nan(row, "prefilled"),
                json_number_or_nan(row, "generated"));
    fprintf(f, "\non the same questions, points gained (McNemar, Holm-corrected):\n");
    json_array_foreach (json_object_get(result, "comparisons"), i, row) {
        bool significant = json_is_true(json_object_get(row, "significant"));
        fprintf(f, "  %s against %s: %+.1f (%+.1f – %+.1f), p = %.2g: %s\n",
                json_get_string(row, "a"), json_get_string(row, "b"),
                100 * json_number_or_nan(row, "diff"), 100 * json_number_or_nan(row, "lo"),
                100 * json_number_or_nan(row, "hi"), json_number_or_nan(row, "p_holm"),
                !significant                          ? "not significant"
                : json_number_or_nan(row, "diff") > 0 ? "better"
                                                      : "worse");
    }
    retention_print(json_object_get(result, "retention"), f);
    best_genes_print(json_object_get(result, "best"), f);
}
