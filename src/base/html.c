/*
 * html: HTML and SVG as text. One style sheet defines the colours as variables, which have other
 * values in dark mode. Charts use these variables too.
 *
 * Invariant: every element that is opened here is closed here, so a page is well-formed if the
 * caller's parts are.
 */
#include "base/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char style_sheet[] =
    ":root{color-scheme:light dark;--ink:#1c2430;--soft:#66707d;--line:#d9dee5;--paper:#fff;"
    "--a:#1769aa;--b:#d1495b;--c:#2e8b57;--d:#b07d12;--e:#7b4fb5;--f:#0f8b8d;--g:#a0522d;"
    "--h:#5c6670}\n"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#98a3b0;--line:#333c48;"
    "--paper:#14181e;--a:#6bb3f0;--b:#ff8a98;--c:#6fce9b;--d:#e5bd5c;--e:#bb9af0;--f:#5fd0d2;"
    "--g:#e0a07a;--h:#aab4c0}}\n"
    "body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}"
    "table{border-collapse:collapse;width:100%}\n"
    "th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);"
    "overflow-wrap:anywhere}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".soft{color:var(--soft)}.yes{font-weight:600}pre{white-space:pre-wrap;"
    "border-left:3px solid var(--line);padding-left:.8rem;font-size:.9rem}"
    "svg{width:100%;height:auto}\n"
    "svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}"
    ".key{margin-right:1.2rem;white-space:nowrap}.key svg{width:2rem;height:.7rem}\n";

void html_escape(struct buf *b, const char *s) {
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '<')
            buf_puts(b, "&lt;");
        else if (c == '>')
            buf_puts(b, "&gt;");
        else if (c == '&')
            buf_puts(b, "&amp;");
        else if (c == '"')
            buf_puts(b, "&quot;");
        else if ((c < 0x20 && c != '\n' && c != '\t' && c != '\r') || c == 0x7f)
            buf_puts(b, "\xef\xbf\xbd");
        else
            buf_add(b, s, 1);
    }
}

void html_page_open(struct buf *b, const char *title) {
    buf_puts(b, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>");
    html_escape(b, title);
    buf_printf(b,
               "</title>\n<meta name=\"viewport\" content=\"width=device-width\"><style>\n%s"
               "</style></head><body>\n<h1>",
               style_sheet);
    html_escape(b, title);
    buf_puts(b, "</h1>\n");
}

void html_page_close(struct buf *b) {
    buf_puts(b, "</body></html>\n");
}

static void add_cell(struct buf *b, const json_t *v) {
    bool number = json_is_number(v);
    buf_puts(b, number ? "<td class=\"n\">" : "<td>");
    if (json_is_real(v)) {
        buf_printf(b, "%.6g", json_real_value(v));
    } else if (json_is_string(v)) {
        html_escape(b, json_string_value(v));
    } else if (v && !json_is_null(v)) {
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
        html_escape(b, text ? text : "");
        free(text);
    }
    buf_puts(b, "</td>");
}

/* The keys of all rows, in order of appearance, as an object of nulls. */
static json_t *column_names(const json_t *rows) {
    json_t *columns = json_object(), *row, *v;
    const char *key;
    size_t i;
    json_array_foreach (rows, i, row)
        json_object_foreach (row, key, v) json_object_set_new(columns, key, json_null());
    return columns;
}

static void add_row_table(struct buf *b, const json_t *rows) {
    json_t *columns = column_names(rows), *row, *v;
    const char *key;
    size_t i;
    buf_puts(b, "<table><tr>");
    json_object_foreach (columns, key, v) {
        buf_puts(b, "<th>");
        html_escape(b, key);
        buf_puts(b, "</th>");
    }
    buf_puts(b, "</tr>\n");
    json_array_foreach (rows, i, row) {
        buf_puts(b, "<tr>");
        json_object_foreach (columns, key, v) add_cell(b, json_object_get(row, key));
        buf_puts(b, "</tr>\n");
    }
    buf_puts(b, "</table>\n");
    json_decref(columns);
}

void html_table(struct buf *b, const json_t *v) {
    const char *key;
    json_t *value;
    if (json_is_array(v)) {
        add_row_table(b, v);
        return;
    }
    buf_puts(b, "<table>");
    json_object_foreach ((json_t *)(uintptr_t)v, key, value) {
        buf_puts(b, "<tr><th>");
        html_escape(b, key);
        buf_puts(b, "</th>");
        add_cell(b, value);
        buf_puts(b, "</tr>\n");
    }
    buf_puts(b, "</table>\n");
}

/* charts */

enum {
    CHART_WIDTH = 860,
    CHART_HEIGHT = 300,
    MARGIN_LEFT = 58,
    MARGIN_RIGHT = 26,
    MARGIN_TOP = 16,
    MARGIN_BOTTOM = 34
};

/* The distance of two ticks: 1, 2 or 5 times a power of ten, such that the range has four to ten
 * such distances. */
static double tick_spacing(double range) {
    double unit = 1;
    while (unit < range / 10) unit *= 10;
    while (unit > range / 10) unit /= 10;
    return unit * 10 <= range / 4 ? unit * 10 : unit * 5 <= range / 4 ? unit * 5 : unit * 2;
}

/* Widens [lo, hi] to a range of finite, positive width whose ends are ticks. Returns the distance
 * of two ticks. */
static double axis_fit(double *lo, double *hi) {
    if (!isfinite(*lo) || !isfinite(*hi) || *lo > *hi) *lo = 0, *hi = 1;
    if (*hi - *lo < 1e-9 * fmax(1e-20, fmax(fabs(*lo), fabs(*hi)))) {
        double pad = *hi == 0 ? 1 : fabs(*hi) / 10;
        *lo -= pad;
        *hi += pad;
    }
    double tick = tick_spacing(*hi - *lo);
    *lo = floor(*lo / tick + 1e-9) * tick;
    *hi = ceil(*hi / tick - 1e-9) * tick;
    return tick;
}

double plot_x(const struct plot *p, double x) {
    return MARGIN_LEFT + (CHART_WIDTH - MARGIN_LEFT - MARGIN_RIGHT) * (x - p->x0) / (p->x1 - p->x0);
}

double plot_y(const struct plot *p, double y) {
    return MARGIN_TOP + (CHART_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM) * (p->y1 - y) / (p->y1 - p->y0);
}

void plot_open(struct buf *b, struct plot *p) {
    double dx = axis_fit(&p->x0, &p->x1), dy = axis_fit(&p->y0, &p->y1);
    int nx = (int)((p->x1 - p->x0) / dx + 0.5), ny = (int)((p->y1 - p->y0) / dy + 0.5);
    buf_printf(b, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", CHART_WIDTH,
               CHART_HEIGHT);
    html_escape(b, p->label);
    buf_puts(b, "\">");
    for (int i = 0; i <= ny; i++) {
        double v = p->y0 + i * dy, y = plot_y(p, v);
        buf_printf(b,
                   "<path d=\"M%d %.1fH%d\" stroke=\"var(--line)\"/><text x=\"%d\" y=\"%.1f\" "
                   "text-anchor=\"end\" class=\"soft\">%g</text>",
                   MARGIN_LEFT, y, CHART_WIDTH - MARGIN_RIGHT, MARGIN_LEFT - 6, y + 4,
                   fabs(v) < dy / 2 ? 0 : v);
    }
    for (int i = 0; i <= nx; i++) {
        double v = p->x0 + i * dx;
        buf_printf(b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" class=\"soft\">%g</text>",
                   plot_x(p, v), CHART_HEIGHT - 18, fabs(v) < dx / 2 ? 0 : v);
    }
    buf_printf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" class=\"soft\">",
               CHART_WIDTH - MARGIN_RIGHT, CHART_HEIGHT - 3);
    html_escape(b, p->x_title);
    buf_puts(b, "</text>");
}

void plot_close(struct buf *b) {
    buf_puts(b, "</svg>\n");
}

static void add_stroke(struct buf *b, int series) {
    static const char *const dashes[] = {"", "6 3", "2 2", "8 2 2 2"};
    buf_printf(b, " fill=\"none\" stroke=\"var(--%c)\" stroke-width=\"1.6\"", 'a' + series % 8);
    if (series / 8 % 4) buf_printf(b, " stroke-dasharray=\"%s\"", dashes[series / 8 % 4]);
}

void plot_line(struct buf *b, const struct plot *p, int series, const double *x, const double *y,
               int n) {
    bool connected = false;
    buf_puts(b, "<path");
    add_stroke(b, series);
    buf_puts(b, " d=\"");
    for (int i = 0; i < n; i++) {
        bool finite = isfinite(x[i]) && isfinite(y[i]);
        if (finite)
            buf_printf(b, "%c%.1f %.1f", connected ? 'L' : 'M', plot_x(p, x[i]), plot_y(p, y[i]));
        connected = finite;
    }
    buf_puts(b, "\"/>");
}

void plot_point(struct buf *b, const struct plot *p, int series, double x, double y, double lo,
                double hi, const char *name) {
    double at = plot_x(p, x);
    bool right = at > MARGIN_LEFT + 0.7 * (CHART_WIDTH - MARGIN_LEFT - MARGIN_RIGHT);
    buf_printf(b, "<path d=\"M%.1f %.1fV%.1f\"", at, plot_y(p, lo), plot_y(p, hi));
    add_stroke(b, series);
    buf_printf(b,
               "/><circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"var(--%c)\"/><text x=\"%.1f\" "
               "y=\"%.1f\" text-anchor=\"%s\">",
               at, plot_y(p, y), 'a' + series % 8, right ? at - 7 : at + 7, plot_y(p, y) - 4,
               right ? "end" : "start");
    html_escape(b, name);
    buf_puts(b, "</text>");
}

void plot_legend(struct buf *b, int series, const char *name) {
    buf_puts(b, "<span class=\"key\"><svg viewBox=\"0 0 32 10\"><path d=\"M0 5H32\"");
    add_stroke(b, series);
    buf_puts(b, "/></svg> ");
    html_escape(b, name);
    buf_puts(b, "</span>\n");
}

/* Makes room in a full curve: each pair of points becomes its mean. */
static void curve_downsample(struct curve *c) {
    for (int i = 0; i < CURVE_POINTS / 2; i++) {
        c->x[i] = (c->x[2 * i] + c->x[2 * i + 1]) / 2;
        c->y[i] = (c->y[2 * i] + c->y[2 * i + 1]) / 2;
    }
    c->n = CURVE_POINTS / 2;
    c->points_per_mean *= 2;
}

void curve_add(struct curve *c, double x, double y) {
    if (!isfinite(x) || !isfinite(y)) return;
    if (c->points_per_mean == 0) c->points_per_mean = 1;
    if (c->n == CURVE_POINTS) curve_downsample(c);
    c->sum_x += x;
    c->sum_y += y;
    if (++c->n_summed < c->points_per_mean) return;
    c->x[c->n] = c->sum_x / (double)c->points_per_mean;
    c->y[c->n++] = c->sum_y / (double)c->points_per_mean;
    c->sum_x = c->sum_y = 0;
    c->n_summed = 0;
}

static double spread_at(const struct curve *spread, int k) {
    return k < spread->n ? spread->y[k] : 0;
}

static struct plot curves_range(const char *label, const char *x_title, const struct curve *c,
                                const struct curve *spread, int n) {
    struct plot p = {label, x_title, INFINITY, -INFINITY, INFINITY, -INFINITY};
    for (int i = 0; i < n; i++)
        for (int k = 0; k < c[i].n; k++) {
            double half_height = spread ? spread_at(&spread[i], k) : 0;
            p.x0 = fmin(p.x0, c[i].x[k]), p.x1 = fmax(p.x1, c[i].x[k]);
            p.y0 = fmin(p.y0, c[i].y[k] - half_height), p.y1 = fmax(p.y1, c[i].y[k] + half_height);
        }
    return p;
}

/* Draws the area within ±spread of a line: its upper edge from left to right, then its lower edge
 * from right to left. */
static void plot_band(struct buf *b, const struct plot *p, int series, const struct curve *c,
                      const struct curve *spread) {
    if (!spread->n) return;
    buf_printf(b, "<path fill=\"var(--%c)\" fill-opacity=\".15\" d=\"", 'a' + series % 8);
    for (int i = 0; i < 2 * c->n; i++) {
        int k = i < c->n ? i : 2 * c->n - 1 - i;
        double y = c->y[k] + (i < c->n ? 1 : -1) * spread_at(spread, k);
        buf_printf(b, "%c%.1f %.1f", i ? 'L' : 'M', plot_x(p, c->x[k]), plot_y(p, y));
    }
    buf_puts(b, "\"/>");
}

void plot_curves(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                 const char *const *names, int n) {
    plot_bands(b, label, x_title, c, NULL, names, n);
}

static void plot_draw(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                      const struct curve *spread, int n) {
    struct plot p = curves_range(label, x_title, c, spread, n);
    plot_open(b, &p);
    for (int i = 0; spread && i < n; i++) plot_band(b, &p, i, &c[i], &spread[i]);
    for (int i = 0; i < n; i++) plot_line(b, &p, i, c[i].x, c[i].y, c[i].n);
    plot_close(b);
}

void plot_svg(struct buf *b, const char *label, const char *x_title, const struct curve *c,
              const struct curve *spread, const char *const *names, int n) {
    enum { ROW_HEIGHT = 20, COLUMN_WIDTH = 210, COLUMNS = 4 };
    int height = MARGIN_TOP + ROW_HEIGHT + CHART_HEIGHT +
                 ROW_HEIGHT * ((n + COLUMNS - 1) / COLUMNS) + MARGIN_TOP;
    buf_printf(b,
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
               "viewBox=\"0 0 %d %d\"><style>%s</style>\n<rect width=\"%d\" height=\"%d\" "
               "fill=\"var(--paper)\"/><text x=\"%d\" y=\"%d\">",
               CHART_WIDTH, height, CHART_WIDTH, height, style_sheet, CHART_WIDTH, height,
               MARGIN_LEFT, ROW_HEIGHT);
    html_escape(b, label);
    buf_printf(b, "</text>\n<svg y=\"%d\" width=\"%d\" height=\"%d\">", MARGIN_TOP + ROW_HEIGHT,
               CHART_WIDTH, CHART_HEIGHT);
    plot_draw(b, label, x_title, c, spread, n);
    buf_puts(b, "</svg>\n");
    for (int i = 0; i < n; i++) {
        int x = MARGIN_LEFT + COLUMN_WIDTH * (i % COLUMNS),
            y = MARGIN_TOP + 2 * ROW_HEIGHT + CHART_HEIGHT + ROW_HEIGHT * (i / COLUMNS);
        buf_printf(b, "<path d=\"M%d %dh28\"", x, y - 4);
        add_stroke(b, i);
        buf_printf(b, "/><text x=\"%d\" y=\"%d\">", x + 34, y);
        html_escape(b, names[i]);
        buf_puts(b, "</text>\n");
    }
    buf_puts(b, "</svg>\n");
}

void plot_bands(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                const struct curve *spread, const char *const *names, int n) {
    plot_draw(b, label, x_title, c, spread, n);
    if (names && n > 0) {
        buf_puts(b, "<p>");
        for (int i = 0; i < n; i++) plot_legend(b, i, names[i]);
        buf_puts(b, "</p>\n");
    }
    if (n > 0 && c[0].points_per_mean > 1)
        buf_printf(b, "<p class=\"soft\">A point is the mean of %lld values.</p>\n",
                   (long long)c[0].points_per_mean);
}
