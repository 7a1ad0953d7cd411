/*
 * A run as one page: the table, what was compared with what, fitness by generation and the family
 * tree as SVG, some debates, and the manifest. Self-contained: no script, no font, no address.
 * Everything is made from the result object, so the page can be made again from result.json. All
 * text from outside is escaped.
 */
#define _GNU_SOURCE
#include "base/page.h"
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *text_of(const json_t *v, const char *key) {
    const char *s = json_string_value(json_object_get(v, key));
    return s ? s : "";
}

static double number_of(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

/* The interval as a bar from 0 to 100 %, with a mark at the value. */
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
    buf_puts(b, "<h2>Held-out questions</h2><table><tr><th>who<th class=n>n<th "
                "class=n>accuracy<th>95 % interval<th>"
                "<th class=n>tokens read<th class=n>written</tr>\n");
    json_array_foreach (table, i, row) {
        double v = number_of(row, "acc"), lo = number_of(row, "lo"), hi = number_of(row, "hi");
        buf_puts(b, "<tr><td>");
        page_text(b, text_of(row, "name"));
        buf_printf(b, "<td class=n>%d<td class=n>%.1f %%<td>%.1f – %.1f<td>",
                   (int)number_of(row, "n"), 100 * v, 100 * lo, 100 * hi);
        interval_bar(b, v, lo, hi);
        buf_printf(b, "<td class=n>%.0f<td class=n>%.0f</tr>\n", number_of(row, "prefilled"),
                   number_of(row, "generated"));
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
        bool sure = json_is_true(json_object_get(row, "significant"));
        buf_puts(b, "<tr><td>");
        page_text(b, text_of(row, "a"));
        buf_puts(b, " <span class=soft>against</span> ");
        page_text(b, text_of(row, "b"));
        buf_printf(b, "<td class=n>%+.1f<td>%+.1f – %+.1f<td class=n>%.2g<td class=%s>%s</tr>\n",
                   100 * number_of(row, "diff"), 100 * number_of(row, "lo"),
                   100 * number_of(row, "hi"), number_of(row, "p_holm"), sure ? "yes" : "soft",
                   !sure                        ? "not significant"
                   : number_of(row, "diff") > 0 ? "better"
                                                : "worse");
    }
    buf_puts(b, "</table>\n");
}

static void fitness_range(const json_t *generations, double *lo, double *hi) {
    size_t g, i;
    json_t *list, *c;
    *lo = 1, *hi = 0;
    json_array_foreach (generations, g, list)
        json_array_foreach (list, i, c) {
            double v = number_of(c, "fitness");
            *lo = fmin(*lo, v);
            *hi = fmax(*hi, v);
        }
}

static void fitness_plot(struct buf *b, const json_t *generations) {
    size_t n = json_array_size(generations), g, i;
    json_t *list, *c;
    double *x = xcalloc(n + 1, sizeof *x), *best = xcalloc(n + 1, sizeof *best);
    struct plot p = {
        .label = "fitness by generation", .x_title = "generation", .x1 = n > 1 ? (double)n - 1 : 1};
    fitness_range(generations, &p.y0, &p.y1);
    buf_puts(b, "<h2>Fitness by generation</h2>");
    plot_open(b, &p);
    json_array_foreach (generations, g, list) {
        x[g] = (double)g;
        best[g] = number_of(json_array_get(list, 0), "fitness");
        json_array_foreach (list, i, c) {
            buf_printf(
                b,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"none\" stroke=\"var(--a)\"><title>",
                plot_x(&p, x[g]), plot_y(&p, number_of(c, "fitness")));
            page_text(b, text_of(c, "name"));
            buf_printf(b, " %.4f</title></circle>", number_of(c, "fitness"));
        }
    }
    plot_line(b, &p, 1, x, best, (int)n);
    plot_close(b);
    buf_puts(b, "<p class=soft>Rings: candidates on the dev questions. Line: the best of each "
                "generation.</p>\n");
    free(x);
    free(best);
}

/* Where a candidate stands in the tree: column by generation, row by rank. */
static bool tree_place(const json_t *generations, size_t g, const char *name, double *x,
                       double *y) {
    size_t i;
    json_t *c;
    json_array_foreach (json_array_get(generations, g), i, c) {
        if (strcmp(text_of(c, "name"), name) != 0) continue;
        *x = 70 + 190.0 * (double)g;
        *y = 30 + 44.0 * (double)i;
        return true;
    }
    return false;
}

static void tree_edge(struct buf *b, const json_t *generations, size_t g, const char *parent,
                      double x, double y) {
    double px, py;
    if (g == 0 || !*parent || !tree_place(generations, g - 1, parent, &px, &py)) return;
    double mid = (px + 45 + x - 45) / 2;
    buf_printf(b,
               "<path d=\"M%.0f %.0fC%.0f %.0f %.0f %.0f %.0f %.0f\" fill=\"none\" "
               "stroke=\"var(--soft)\"/>",
               px + 45, py, mid, py, mid, y, x - 45, y);
}

static void family_tree(struct buf *b, const json_t *generations) {
    size_t n = json_array_size(generations), g, i, most = 1;
    json_t *list, *c;
    double x, y;
    json_array_foreach (generations, g, list) most = MAX(most, json_array_size(list));
    buf_printf(
        b,
        "<h2>Family tree</h2><svg viewBox=\"0 0 %zu %zu\" role=\"img\" aria-label=\"family tree\">",
        190 * n + 20, 44 * most + 30);
    json_array_foreach (generations, g, list)
        json_array_foreach (list, i, c) {
            const char *name = text_of(c, "name");
            bool elite = json_is_true(json_object_get(c, "elite"));
            if (!tree_place(generations, g, name, &x, &y)) continue;
            tree_edge(b, generations, g, elite ? name : text_of(c, "parent_a"), x, y);
            if (!elite) tree_edge(b, generations, g, text_of(c, "parent_b"), x, y);
            buf_printf(b,
                       "<rect x=\"%.0f\" y=\"%.0f\" width=\"90\" height=\"34\" rx=\"6\" "
                       "fill=\"var(--paper)\" stroke=\"var(%s)\" "
                       "stroke-width=\"%d\"/><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">",
                       x - 45, y - 17, i == 0 ? "--b" : "--line", i == 0 ? 2 : 1, x, y - 2);
            page_text(b, name);
            buf_printf(b,
                       "</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" "
                       "class=soft>%.3f%s</text>",
                       x, y + 12, number_of(c, "fitness"), elite ? " kept" : "");
        }
    buf_puts(b, "</svg>\n<p class=soft>Columns are generations, the fittest on top (red). Numbers "
                "are fitness.</p>\n");
}

static void debate_section(struct buf *b, const json_t *debate) {
    size_t i;
    const char *name;
    json_t *v;
    if (!debate) return;
    buf_printf(b,
               "<h2>The debate</h2><p>Hearing the others made %.0f answers right and %.0f wrong. "
               "Worth of each agent by "
               "leave-one-out (points, 95 %% interval):",
               number_of(debate, "became_right"), number_of(debate, "became_wrong"));
    json_object_foreach (json_object_get(debate, "leave_one_out"), name, v) {
        buf_puts(b, " ");
        page_text(b, name);
        buf_printf(b, " %+.1f (%+.1f – %+.1f)", 100 * number_of(v, "value"),
                   100 * number_of(v, "lo"), 100 * number_of(v, "hi"));
    }
    buf_puts(b, ".</p>\n");
    json_array_foreach (json_object_get(debate, "transcripts"), i, v) {
        buf_puts(b, "<pre>");
        page_text(b, json_string_value(v));
        buf_puts(b, "</pre>\n");
    }
}

static void manifest_section(struct buf *b, const json_t *manifest) {
    char *text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS);
    buf_puts(b, "<h2>What this depends on</h2><pre>");
    page_text(b, text ? text : "");
    buf_puts(b, "</pre>\n");
    free(text);
}

int report_write(const json_t *result, const char *path, struct error *err) {
    struct buf b = {0};
    const json_t *generations = json_object_get(result, "generations");
    char *title = xasprintf("Shoal run %s", text_of(result, "run"));
    page_open(&b, title);
    results_table(&b, json_object_get(result, "table"));
    comparisons_table(&b, json_object_get(result, "comparisons"));
    fitness_plot(&b, generations);
    family_tree(&b, generations);
    debate_section(&b, json_object_get(result, "debate"));
    manifest_section(&b, json_object_get(result, "manifest"));
    page_close(&b);
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(title);
    return rc;
}

void run_print(const json_t *result, FILE *f) {
    size_t i;
    json_t *row;
    fprintf(f, "\n%-34s %6s %9s   %-13s %11s %8s\n", "held-out questions", "n", "accuracy",
            "95 % interval", "tokens read", "written");
    json_array_foreach (json_object_get(result, "table"), i, row)
        fprintf(f, "%-34s %6d %7.1f %%   %5.1f – %-5.1f %11.0f %8.0f\n", text_of(row, "name"),
                (int)number_of(row, "n"), 100 * number_of(row, "acc"), 100 * number_of(row, "lo"),
                100 * number_of(row, "hi"), number_of(row, "prefilled"),
                number_of(row, "generated"));
    fprintf(f, "\non the same questions, points gained (McNemar, Holm-corrected):\n");
    json_array_foreach (json_object_get(result, "comparisons"), i, row) {
        bool sure = json_is_true(json_object_get(row, "significant"));
        fprintf(f, "  %s against %s: %+.1f (%+.1f – %+.1f), p = %.2g: %s\n", text_of(row, "a"),
                text_of(row, "b"), 100 * number_of(row, "diff"), 100 * number_of(row, "lo"),
                100 * number_of(row, "hi"), number_of(row, "p_holm"),
                !sure                        ? "not significant"
                : number_of(row, "diff") > 0 ? "better"
                                             : "worse");
    }
}
