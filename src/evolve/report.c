/*
 * A run as one page: the table, what was compared with what, fitness by generation and the family
 * tree as SVG, some debates, and the manifest. Self-contained: no script, no font, no address.
 * Everything is made from the result object, so the page can be made again from result.json. All
 * text from outside is escaped.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char head[] =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Shoal run %s</title>\n"
    "<meta name=\"viewport\" content=\"width=device-width\"><style>\n"
    ":root{color-scheme:light "
    "dark;--ink:#1c2430;--soft:#66707d;--line:#d9dee5;--a:#1769aa;--b:#d1495b;--paper:#fff}\n"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#98a3b0;--line:#333c48;--a:#"
    "6bb3f0;--b:#ff8a98;"
    "--paper:#14181e}}\n"
    "body{font:16px/1.5 "
    "system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem "
    "auto;"
    "padding:0 "
    "1rem}h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}table{border-collapse:collapse;"
    "width:100%%}\n"
    "th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid "
    "var(--line)}td.n,th.n{text-align:right;"
    "font-variant-numeric:tabular-nums}.soft{color:var(--soft)}.yes{font-weight:600}pre{white-"
    "space:pre-wrap;"
    "border-left:3px solid "
    "var(--line);padding-left:.8rem;font-size:.9rem}svg{width:100%%;height:auto}\n"
    "svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}\n"
    "</style></head><body>\n<h1>Shoal run %s</h1>\n";

static const char *text_of(const json_t *v, const char *key) {
    const char *s = json_string_value(json_object_get(v, key));
    return s ? s : "";
}

static double number_of(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

static void escape(struct buf *b, const char *s) {
    for (; *s; s++) {
        if (*s == '<')
            buf_puts(b, "&lt;");
        else if (*s == '>')
            buf_puts(b, "&gt;");
        else if (*s == '&')
            buf_puts(b, "&amp;");
        else if (*s == '"')
            buf_puts(b, "&quot;");
        else
            buf_add(b, s, 1);
    }
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
        escape(b, text_of(row, "name"));
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
        escape(b, text_of(row, "a"));
        buf_puts(b, " <span class=soft>against</span> ");
        escape(b, text_of(row, "b"));
        buf_printf(b, "<td class=n>%+.1f<td>%+.1f – %+.1f<td class=n>%.2g<td class=%s>%s</tr>\n",
                   100 * number_of(row, "diff"), 100 * number_of(row, "lo"),
                   100 * number_of(row, "hi"), number_of(row, "p_holm"), sure ? "yes" : "soft",
                   !sure                        ? "not significant"
                   : number_of(row, "diff") > 0 ? "better"
                                                : "worse");
    }
    buf_puts(b, "</table>\n");
}

enum { WIDE = 860, TALL = 300, LEFT = 50, RIGHT = 20, TOP = 16, BOTTOM = 34 };

static double plot_x(size_t g, size_t n) {
    return n < 2 ? (LEFT + WIDE - RIGHT) / 2.0
                 : LEFT + (double)(WIDE - LEFT - RIGHT) * ((double)g + 0.5) / (double)n;
}

static double plot_y(double v, double lo, double hi) {
    return TOP + (double)(TALL - TOP - BOTTOM) * (hi - v) / (hi - lo);
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
    double pad = fmax(0.01, (*hi - *lo) * 0.1);
    *lo -= pad;
    *hi += pad;
}

static void fitness_axes(struct buf *b, size_t n, double lo, double hi) {
    for (int i = 0; i <= 4; i++) {
        double v = lo + (hi - lo) * i / 4, y = plot_y(v, lo, hi);
        buf_printf(b,
                   "<path d=\"M%d %.1fH%d\" stroke=\"var(--line)\"/><text x=\"%d\" y=\"%.1f\" "
                   "text-anchor=\"end\" "
                   "class=soft>%.3f</text>",
                   LEFT, y, WIDE - RIGHT, LEFT - 6, y + 4, v);
    }
    for (size_t g = 0; g < n; g++)
        buf_printf(
            b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" class=soft>generation %zu</text>",
            plot_x(g, n), TALL - 10, g);
}

static void fitness_plot(struct buf *b, const json_t *generations) {
    size_t n = json_array_size(generations), g, i;
    json_t *list, *c;
    double lo, hi;
    struct buf line = {0};
    fitness_range(generations, &lo, &hi);
    buf_printf(b,
               "<h2>Fitness by generation</h2><svg viewBox=\"0 0 %d %d\" role=\"img\" "
               "aria-label=\"fitness by "
               "generation\">",
               WIDE, TALL);
    fitness_axes(b, n, lo, hi);
    json_array_foreach (generations, g, list) {
        double x = plot_x(g, n);
        json_array_foreach (list, i, c) {
            double y = plot_y(number_of(c, "fitness"), lo, hi);
            buf_printf(
                b,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"none\" stroke=\"var(--a)\"><title>",
                x, y);
            escape(b, text_of(c, "name"));
            buf_printf(b, " %.4f</title></circle>", number_of(c, "fitness"));
            if (i == 0) buf_printf(&line, "%s%.1f %.1f", g ? "L" : "M", x, y);
        }
    }
    buf_printf(b,
               "<path d=\"%s\" fill=\"none\" stroke=\"var(--b)\" stroke-width=\"2\"/></svg>\n<p "
               "class=soft>Rings: "
               "candidates on the dev questions. Line: the best of each generation.</p>\n",
               line.data ? line.data : "");
    buf_release(&line);
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
            escape(b, name);
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
        escape(b, name);
        buf_printf(b, " %+.1f (%+.1f – %+.1f)", 100 * number_of(v, "value"),
                   100 * number_of(v, "lo"), 100 * number_of(v, "hi"));
    }
    buf_puts(b, ".</p>\n");
    json_array_foreach (json_object_get(debate, "transcripts"), i, v) {
        buf_puts(b, "<pre>");
        escape(b, json_string_value(v));
        buf_puts(b, "</pre>\n");
    }
}

static void manifest_section(struct buf *b, const json_t *manifest) {
    char *text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS);
    buf_puts(b, "<h2>What this depends on</h2><pre>");
    escape(b, text ? text : "");
    buf_puts(b, "</pre>\n");
    free(text);
}

int report_write(const json_t *result, const char *path, struct error *err) {
    struct buf b = {0};
    const json_t *generations = json_object_get(result, "generations");
    buf_printf(&b, head, text_of(result, "run"), text_of(result, "run"));
    results_table(&b, json_object_get(result, "table"));
    comparisons_table(&b, json_object_get(result, "comparisons"));
    fitness_plot(&b, generations);
    family_tree(&b, generations);
    debate_section(&b, json_object_get(result, "debate"));
    manifest_section(&b, json_object_get(result, "manifest"));
    buf_puts(&b, "</body></html>\n");
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
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
