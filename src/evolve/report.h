/*
 * report: the sections on the family tree and on survival of a run's page (report_tree.c), and a
 * helper for all sections. All functions append to the page and escape external text.
 */
#ifndef SHOAL_EVOLVE_REPORT_H
#define SHOAL_EVOLVE_REPORT_H

#include "base/base.h"
#include "evolve/evolve.h"

struct evolve_report {
    struct buf *b;
    const struct lineage *l; /* empty if the records are invalid */
    const json_t *generations, *adapters;
};
/* Adds a name, as a link to the candidate's model card if the run has written one. */
void evolve_report_name(const struct evolve_report *r, const char *name);

void evolve_report_tree(const struct evolve_report *r);
/* Adds the survival of candidates, and each founder's share of the ancestry by generation. */
void evolve_report_survival(const struct evolve_report *r);

#endif
