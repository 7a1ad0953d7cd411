/*
 * report_tree: plots of the family tree and of survival. A plot of a whole population over many
 * generations is unreadable, so for a large run it shows only the nodes with the largest share of
 * the ancestry of the last generation's best candidate.
 */
#define _GNU_SOURCE
#include "evolve/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A tree of at most MAX_WHOLE_TREE nodes, with at most MAX_WHOLE_ROW per row, is shown completely.
 * Of a larger tree, at most MAX_SHOWN_NODES nodes are shown, at most MAX_SHOWN_ROW per row. */
enum { MAX_WHOLE_TREE = 80, MAX_WHOLE_ROW = 10, MAX_SHOWN_NODES = 240, MAX_SHOWN_ROW = 8 };
/* in units of the SVG's viewBox */
enum { BOX_WIDTH = 92, BOX_HEIGHT = 34, PITCH = 98, ROW_HEIGHT = 76, LABEL_WIDTH = 40 };
enum { MAX_COHORTS = 6, MAX_FOUNDER_LINES = 16 };

/* family tree */

struct tree_layout {
    const struct evolve_report *r;
    const struct lineage *l;
    double *flow;   /* [n] share of the best candidate's ancestry through each node */
    bool *ancestor; /* [n] the best candidate and its ancestors */
    bool *shown;    /* [n] */
    double *x, *y;  /* [n] centre of the node's box */
    double width, height;
    bool is_complete; /* all nodes are shown */
};

/* A node that compare_keys sorts by `key`, smallest first, then by number. */
struct ranked_node {
    int node;
    double key;
};

static int compare_keys(const void *a, const void *b) {
    const struct ranked_node *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1) : x->node - y->node;
}

/* Selects the ancestors with the largest flow, at most MAX_SHOWN_ROW per generation. */
static void select_shown_ancestors(struct tree_layout *d) {
    const struct lineage *l = d->l;
    struct ranked_node *order = xcalloc((size_t)l->n, sizeof *order);
    int *row = xcalloc((size_t)l->generations, sizeof *row), shown = 0;
    for (int i = 0; i < l->n; i++) order[i] = (struct ranked_node){i, -d->flow[i]};
    qsort(order, (size_t)l->n, sizeof *order, compare_keys);
    for (int i = 0; i < l->n && shown < MAX_SHOWN_NODES; i++) {
        int node = order[i].node, *n = &row[l->v[node].generation];
        if (!d->ancestor[node] || *n == MAX_SHOWN_ROW) continue;
        d->shown[node] = true;
        ++*n;
        shown++;
    }
    free(order);
    free(row);
}

static bool tree_is_small(const struct lineage *l) {
    int row = 0;
    for (int i = 0; i < l->n; i++) {
        row = i > 0 && l->v[i].generation == l->v[i - 1].generation ? row + 1 : 1;
        if (row > MAX_WHOLE_ROW) return false;
    }
    return l->n <= MAX_WHOLE_TREE;
}

/* Preferred x position of a node: the mean of its shown parents. */
static double preferred_x(const struct tree_layout *d, int node) {
    double sum = 0;
    int n = 0;
    for (int k = 0; k < 2; k++) {
        int parent = d->l->v[node].parent[k];
        if (parent < 0 || !d->shown[parent]) continue;
        sum += d->x[parent];
        n++;
    }
    return n ? sum / n : d->width / 2;
}

/* Sets the positions: one row for each generation in which a shown node begins. */
static void layout_nodes(struct tree_layout *d) {
    const struct lineage *l = d->l;
    struct ranked_node row[MAX_CANDIDATES];
    d->width = 860;
    d->height = 8;
    for (int i = 0; i < l->n;) {
        int n = 0, generation = l->v[i].generation;
        for (; i < l->n && l->v[i].generation == generation; i++)
            if (d->shown[i]) row[n++] = (struct ranked_node){i, preferred_x(d, i)};
        if (!n) continue;
        qsort(row, (size_t)n, sizeof *row, compare_keys);
        double pitch = fmin(1.6 * PITCH, (d->width - LABEL_WIDTH) / n);
        for (int k = 0; k < n; k++) {
            d->x[row[k].node] =
                LABEL_WIDTH + (d->width - LABEL_WIDTH) / 2 + pitch * (k - (n - 1) / 2.0);
            d->y[row[k].node] = d->height + BOX_HEIGHT / 2.0;
        }
        d->height += ROW_HEIGHT;
    }
}

static void draw_edges(const struct tree_layout *d, int node) {
    const struct lineage_node *v = &d->l->v[node];
    for (int k = 0; k < 2; k++) {
        int p = v->parent[k];
        if (p < 0 || !d->shown[p]) continue;
        double y0 = d->y[p] + BOX_HEIGHT / 2.0, y1 = d->y[node] - BOX_HEIGHT / 2.0,
               mid = (y0 + y1) / 2;
        buf_printf(d->r->b,
                   "<path d=\"M%.0f %.0fC%.0f %.0f %.0f %.0f %.0f %.0f\" fill=\"none\" "
                   "stroke=\"var(--%s)\" stroke-width=\"%.1f\"/>",
                   d->x[p], y0, d->x[p], mid, d->x[node], mid, d->x[node], y1,
                   d->ancestor[node] ? "a" : "line", 1 + 3 * d->flow[node] * v->parent_share[k]);
    }
}

static void draw_title(const struct tree_layout *d, int node) {
    const struct lineage_node *v = &d->l->v[node];
    struct stats_interval f = json_interval(v->birth_record, "fitness");
    struct buf *b = d->r->b;
    buf_puts(b, "<title>");
    html_escape(b, v->name);
    for (int k = 0; k < 2 && v->parent[k] >= 0; k++) {
        buf_puts(b, k ? " × " : " of ");
        html_escape(b, d->l->v[v->parent[k]].name);
        buf_printf(b, " %.0f %%", 100 * v->parent_share[k]);
    }
    buf_printf(b, ", fitness %.4f (%.4f – %.4f), generations %d – %d", f.value, f.lo, f.hi,
               v->generation, v->last_generation);
    if (d->ancestor[node]) buf_printf(b, ", %.1f %% of the best's ancestry", 100 * d->flow[node]);
    buf_puts(b, "</title>");
}

/* A name that is too long for its box is condensed. */
static void draw_box(const struct tree_layout *d, int node) {
    const struct lineage_node *v = &d->l->v[node];
    struct buf *b = d->r->b;
    bool best = node == d->l->best;
    double x = d->x[node], y = d->y[node];
    int columns = (int)strlen(v->name) - utf8_field_width(v->name, 0);
    buf_puts(b, "<g>");
    draw_title(d, node);
    buf_printf(b,
               "<rect x=\"%.0f\" y=\"%.0f\" width=\"%d\" height=\"%d\" rx=\"6\" "
               "fill=\"var(--paper)\" stroke=\"var(--%s)\" stroke-width=\"%d\"/>"
               "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\"%s>",
               x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT,
               best                ? "b"
               : d->ancestor[node] ? "a"
                                   : "line",
               best ? 2 : 1, x, y - 2,
               columns > 12 ? " textLength=\"82\" lengthAdjust=\"spacingAndGlyphs\"" : "");
    evolve_report_name(d->r, v->name);
    buf_printf(b, "</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" class=soft>%.3f ", x,
               y + 12, json_interval(v->birth_record, "fitness").value);
    html_escape(b, operator_label(v->birth_record, "operator"));
    buf_puts(b, "</text></g>\n");
}

static void draw_tree(const struct tree_layout *d) {
    struct buf *b = d->r->b;
    int labelled = -1;
    buf_printf(b, "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"family tree\">",
               d->width, d->height - ROW_HEIGHT + BOX_HEIGHT + 8);
    for (int i = 0; i < d->l->n; i++)
        if (d->shown[i]) draw_edges(d, i);
    for (int i = 0; i < d->l->n; i++) {
        if (!d->shown[i]) continue;
        if (d->l->v[i].generation != labelled)
            buf_printf(b, "<text x=\"0\" y=\"%.0f\" class=soft>%d</text>", d->y[i] + 4,
                       d->l->v[i].generation);
        labelled = d->l->v[i].generation;
        draw_box(d, i);
    }
    buf_puts(b, "</svg>\n");
}

static void tree_caption(const struct tree_layout *d) {
    int ancestors = 0, shown = 0;
    for (int i = 0; i < d->l->n; i++) {
        ancestors += d->ancestor[i];
        shown += d->shown[i];
    }
    buf_puts(d->r->b, "<p class=soft>");
    if (!d->is_complete)
        buf_printf(d->r->b,
                   "Only ancestors of the last generation's best are shown: of %d ancestors, the "
                   "%d with the largest share of its ancestry. The run had %d candidates. ",
                   ancestors, shown, d->l->n);
    buf_puts(d->r->b, "A row has the candidates whose first generation it is; numbers are their "
                      "fitness in it. Red: the best of the last generation. Blue: its ancestors; "
                      "the width of a line is the share of its ancestry.</p>\n");
}

void evolve_report_tree(const struct evolve_report *r) {
    const struct lineage *l = r->l;
    size_t n = (size_t)l->n;
    double *numbers = xcalloc(3 * n, sizeof *numbers);
    bool *flags = xcalloc(2 * n, sizeof *flags);
    struct tree_layout d = {.r = r,
                            .l = l,
                            .flow = numbers,
                            .x = numbers + n,
                            .y = numbers + 2 * n,
                            .ancestor = flags,
                            .shown = flags + n,
                            .is_complete = tree_is_small(l)};
    lineage_ancestors(l, l->best, d.ancestor);
    d.flow[l->best] = 1;
    lineage_propagate(l, d.flow);
    if (d.is_complete)
        memset(d.shown, 1, n * sizeof *d.shown);
    else
        select_shown_ancestors(&d);
    layout_nodes(&d);
    buf_puts(r->b, "<h2>Family tree</h2>");
    draw_tree(&d);
    tree_caption(&d);
    free(numbers);
    free(flags);
}

/* survival */

/* Counts nodes whose first generation is in [from, to). *n_survived: those that survived age `age`;
 * *n_ended: those that ended at this age. A node that is in the last generation is censored at its
 * age. */
static void count_at_risk(const struct lineage *l, int from, int to, int age, int *n_survived,
                          int *n_ended) {
    *n_survived = *n_ended = 0;
    for (int i = 0; i < l->n; i++) {
        const struct lineage_node *v = &l->v[i];
        if (v->generation < from || v->generation >= to) continue;
        *n_survived += v->last_generation - v->generation > age;
        *n_ended +=
            v->last_generation - v->generation == age && v->last_generation < l->generations - 1;
    }
}

/* Adds to `c` the product-limit estimate (Kaplan & Meier 1958) of the share of nodes that survives
 * x generations. Ends when no node is at risk. */
static void survival_curve(const struct lineage *l, int from, int to, struct curve *c) {
    double share = 1;
    curve_add(c, 0, 1);
    for (int age = 0, n_survived, n_ended; age < l->generations - 1 && share > 0; age++) {
        count_at_risk(l, from, to, age, &n_survived, &n_ended);
        if (n_survived + n_ended == 0) break;
        share *= (double)n_survived / (n_survived + n_ended);
        curve_add(c, age + 1, share);
    }
}

/* Plots the survival of the founders, and of later nodes grouped by ranges of first generations. */
static void cohorts_plot(const struct evolve_report *r) {
    const struct lineage *l = r->l;
    struct curve *c = xcalloc(MAX_COHORTS + 1, sizeof *c);
    char *names[MAX_COHORTS + 1] = {0};
    /* number of generations whose children can survive to a later one */
    int n_generations = l->generations - 2;
    int n = MAX(0, MIN(MAX_COHORTS, n_generations));
    for (int i = 0; i <= n; i++) {
        int from = i ? 1 + (i - 1) * n_generations / n : 0, to = i ? 1 + i * n_generations / n : 1;
        names[i] = !i               ? xstrdup("founders")
                   : to - from == 1 ? xasprintf("born in generation %d", from)
                                    : xasprintf("born in %d – %d", from, to - 1);
        survival_curve(l, from, to, &c[i]);
    }
    buf_puts(r->b, "<h2>Survival</h2>");
    plot_curves(r->b, "survival", "generations after birth", c, (const char *const *)names, n + 1);
    buf_puts(r->b, "<p class=soft>Share of candidates that survive that many generations; "
                   "candidates of the last generation are censored (Kaplan-Meier estimate).</p>\n");
    for (int i = 0; i <= n; i++) free(names[i]);
    free(c);
}

/* Sets flow [n nodes]: at a founder, the founder's share of the ancestry of all candidates in the
 * generation. */
static void founder_shares(const struct lineage *l, int generation, double *flow) {
    int n_alive = 0;
    memset(flow, 0, (size_t)l->n * sizeof *flow);
    for (int i = 0; i < l->n; i++)
        n_alive += l->v[i].generation <= generation && generation <= l->v[i].last_generation;
    for (int i = 0; i < l->n; i++)
        if (l->v[i].generation <= generation && generation <= l->v[i].last_generation)
            flow[i] = 1.0 / n_alive;
    lineage_propagate(l, flow);
}

/* Sets share[]: one value for each of the first MAX_FOUNDER_LINES founders, then one for all other
 * founders together. Returns the number of founders with a separate value. */
static int founder_line_shares(const struct lineage *l, const double *flow,
                               double share[MAX_FOUNDER_LINES + 1]) {
    int n = 0;
    memset(share, 0, (MAX_FOUNDER_LINES + 1) * sizeof *share);
    for (int i = 0; i < l->n; i++) {
        if (l->v[i].parent[0] >= 0) continue;
        bool has_line = l->v[i].generation == 0 && i < MAX_FOUNDER_LINES;
        share[has_line ? i : MAX_FOUNDER_LINES] += flow[i];
        if (has_line) n = i + 1;
    }
    return n;
}

static void founder_shares_plot(const struct evolve_report *r) {
    const struct lineage *l = r->l;
    struct curve *c = xcalloc(MAX_FOUNDER_LINES + 1, sizeof *c);
    char *names[MAX_FOUNDER_LINES + 1];
    double *flow = xcalloc((size_t)l->n, sizeof *flow), share[MAX_FOUNDER_LINES + 1];
    bool has_others = false;
    int n = 0;
    for (int g = 0; g < l->generations; g++) {
        founder_shares(l, g, flow);
        n = founder_line_shares(l, flow, share);
        has_others = has_others || share[MAX_FOUNDER_LINES] > 0;
        for (int i = 0; i < n; i++) curve_add(&c[i], g, 100 * share[i]);
        curve_add(&c[MAX_FOUNDER_LINES], g, 100 * share[MAX_FOUNDER_LINES]);
    }
    for (int i = 0; i < n; i++) names[i] = xasprintf("%s %.1f %%", l->v[i].name, 100 * share[i]);
    if (has_others) {
        c[n] = c[MAX_FOUNDER_LINES];
        names[n++] = xasprintf("all others %.1f %%", 100 * share[MAX_FOUNDER_LINES]);
    }
    buf_puts(r->b, "<h2>Founders' lines</h2>");
    plot_curves(r->b, "ancestry by founder", "generation", c, (const char *const *)names, n);
    buf_puts(r->b, "<p class=soft>Share of a generation's ancestry, in percent. A child's ancestry "
                   "is that of its parents, weighted by the blend. Numbers beside the names are of "
                   "the last generation.</p>\n");
    for (int i = 0; i < n; i++) free(names[i]);
    free(flow);
    free(c);
}

void evolve_report_survival(const struct evolve_report *r) {
    bool bred = false;
    for (int i = 0; i < r->l->n; i++) bred = bred || r->l->v[i].parent[0] >= 0;
    if (!bred) return;
    cohorts_plot(r);
    founder_shares_plot(r);
}
