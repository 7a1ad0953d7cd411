/*
 * report: the parts of a run's page that are about descent (evolve_report_tree.c), and what they
 * share with the others. Everything appends to the page; all text from outside is escaped.
 */
#ifndef SHOAL_EVOLVE_REPORT_H
#define SHOAL_EVOLVE_REPORT_H

#include "base/base.h"
#include "evolve/evolve.h"

struct evolve_report {
    struct buf *b;
    const struct lineage *l; /* empty where the records cannot be understood */
    const json_t *generations, *adapters;
};
/* A name, as a link to the candidate's card where the run has written one. */
void evolve_report_name(const struct evolve_report *r, const char *name);
/* A number as a table's cell, "–" where there is none. */
void evolve_report_cell(struct buf *b, const char *before, int digits, double v, const char *after);

void evolve_report_tree(const struct evolve_report *r);
/* How long candidates and founders' lines live. */
void evolve_report_survival(const struct evolve_report *r);

#endif
