/*
 * page: self-contained HTML pages and line charts — no script, no font, no address, readable in
 * light and dark. All text from outside is escaped.
 *
 * Everything appends to a buf that the caller writes (file_write is atomic). A chart is made in
 * order: plot_open fits the axes to the range, then lines and whatever SVG the caller adds at
 * plot_x, plot_y, then plot_close. Pure; any thread.
 */
#ifndef SHOAL_PAGE_H
#define SHOAL_PAGE_H

#include "base/base.h"

void html_page_open(struct buf *b, const char *title); /* up to and with the heading */
void html_page_close(struct buf *b);
/* As text or inside "quotes": markup is escaped; what no page may hold becomes U+FFFD. */
void html_escape(struct buf *b, const char *s);
/* An object as rows of name and value; an array of objects as rows under the keys of all of them.
 * What is nested deeper is shown as JSON. */
void html_table(struct buf *b, const json_t *v);

struct plot {
    const char *label, *x_title; /* what it shows, and along what */
    double x0, x1, y0, y1;       /* the range of the data; plot_open widens it to round numbers */
};
void plot_open(struct buf *b, struct plot *p);
double plot_x(const struct plot *p, double x);
double plot_y(const struct plot *p, double y);
/* The series decides colour and dashes. Points that are not finite break the line. */
void plot_line(struct buf *b, const struct plot *p, int series, const double *x, const double *y,
               int n);
void plot_close(struct buf *b);
void plot_legend(struct buf *b, int series, const char *name);

/* Any number of points as at most CURVE_POINTS means of equal numbers of them. */
#define CURVE_POINTS 512
struct curve {
    double x[CURVE_POINTS], y[CURVE_POINTS], sum_x, sum_y;
    int n;
    int64_t per, held; /* points in a mean; points in the sums */
};
void curve_add(struct curve *c, double x, double y); /* not finite: left out */
/* n charts' worth of lines in one chart; names may be NULL: no legend. */
void plot_curves(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                 const char *const *names, int n);
/* A chart as a file of its own: plot_bands' with its names below, under its own style sheet. */
void plot_file(struct buf *b, const char *label, const char *x_title, const struct curve *c,
               const struct curve *spread, const char *const *names, int n);
/* The same with a band around each line, as high as `spread` [n] (may be NULL) above and below. A
 * curve of spreads has the points of its line, or none: no band. */
void plot_bands(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                const struct curve *spread, const char *const *names, int n);

#endif
