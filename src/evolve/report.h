/*
 * report: the parts of a run's page that are about descent (report_tree.c), and what they share
 * with the others. Everything appends to the page; all text from outside is escaped.
 */
#ifndef SHOAL_EVOLVE_REPORT_H
#define SHOAL_EVOLVE_REPORT_H

#include "base/page.h"
#include "evolve/lineage.h"

struct report {
    struct buf *b;
    const struct lineage *l; /* empty where the records cannot be understood */
    const json_t *generations, *adapters;
};
/* A name, as a link to the candidate's card where the run has written one. */
void report_name(const struct report *r, const char *name);
/* A number as a table's cell, "–" where there is none. */
void report_cell(struct buf *b, const char *before, int digits, double v, const char *after);

void report_tree(const struct report *r);
/* How long candidates and founders' lines live. */
void report_survival(const struct report *r);

#endif
