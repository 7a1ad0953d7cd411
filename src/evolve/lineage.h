/*
 * lineage: who descends from whom in a run, from the records of its generations (an array of the
 * lines of evolution.jsonl, also result.json's "generations").
 *
 * A candidate is one node from the generation that it is born in, which is the first that names it,
 * to the last: elites stay the same node. Parents come before children. Who has no parents is a
 * founder. Records are borrowed and outlive the lineage; any thread.
 */
#ifndef SHOAL_LINEAGE_H
#define SHOAL_LINEAGE_H

#include "evolve/evolve.h"

struct lineage_node {
    const char *name;
    const json_t *born; /* the record of its first generation */
    int generation, last;
    int parent[2];   /* nodes; -1: none */
    double share[2]; /* of its ancestry that comes through each: as the blend says, else halves */
};
struct lineage {
    struct lineage_node *v;
    int n, generations;
    int best; /* the fittest of the last generation, -1 before the first */
    json_t *index;
};
/* The next generation; one that is there already takes the place of itself and all later ones, as
 * where a run was continued from an earlier point. After an error the lineage ends before it. */
int lineage_add(struct lineage *l, const json_t *generation, struct error *err);
int lineage_from_json(struct lineage *l, const json_t *generations, struct error *err);
void lineage_release(struct lineage *l);
int lineage_find(const struct lineage *l, const char *name); /* -1 when there is none */
/* in[n]: the node itself and whoever it descends from. */
void lineage_ancestors(const struct lineage *l, int node, bool *in);
/* Lets what is in flow[n] run up to the parents by their shares: of 1 put into a node, each founder
 * ends with its share of that node's ancestry, others with what came through them. */
void lineage_propagate(const struct lineage *l, double *flow);

/* evolution.jsonl as such an array, of lines that lineage_add takes; errors name the line. A last
 * line that is not finished yet is left out. */
json_t *lineage_load(const char *path, struct error *err);
/* Of `name` and its ancestors, or of everybody (NULL): {of, generations, nodes, edges, founders};
 * Graphviz. */
json_t *lineage_json(const json_t *generations, const char *name, struct error *err);
int lineage_dot(const json_t *generations, const char *name, struct buf *out, struct error *err);

/* For those who show records. */
double json_number_or_nan(const json_t *v, const char *key); /* NAN where there is none */
struct stats_interval json_interval(const json_t *v, const char *key);
void buf_add_one_line(struct buf *b, const char *s); /* buf_add_sanitized, and on one line */

#endif
