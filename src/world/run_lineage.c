/*
 * run_lineage: the record of a run's generations, from which `shoal lineage` prints the family
 * tree.
 *
 *     RUN/lineage.jsonl    a line per generation, as lineage_load reads them: {generation,
 *                          candidates: [{name, hash, parents, fitness, …}]}, the fittest first
 *
 * state.json holds only the last generation, so a line is appended after the state is saved.
 *
 * Invariants: line i (from 0) is generation i; every line that a later one follows is complete.
 * When a run continues, lines after its state are removed, and the line that a kill may have
 * prevented is written again from the state.
 */
#define _GNU_SOURCE
#include "world/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t FILE_LIMIT = (size_t)1 << 30; /* bytes, as in lineage_load */

/* The share of the second parent, from the weights that the crossover recorded; NAN: unknown. */
static double second_parent_share(const json_t *lineage) {
    float first, second;
    int n = sscanf(json_get_string(lineage, "weights"), "%f %f", &first, &second);
    return n == 2 && first >= 0 && second >= 0 && first + second > 0
               ? (double)second / ((double)first + (double)second)
               : NAN;
}

/* The operators that made a child, and the share of its second parent. */
static void candidate_add_origin(json_t *v, const struct policy_record *m) {
    static const char *const keys[] = {"operator", "mutation"};
    const json_t *lineage = m->adapter->lineage;
    double share = second_parent_share(lineage);
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        json_t *x = json_object_get(lineage, keys[i]);
        if (x) json_object_set(v, keys[i], x);
    }
    if (isfinite(share)) json_object_set_new(v, "blend", json_real(share));
}

static json_t *policy_candidate_json(const struct policy_record *m, bool is_grid) {
    json_t *record = policy_record_json(m), *v = json_object();
    static const char *const keys[] = {"name", "hash", "parents"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        json_object_set(v, keys[i], json_object_get(record, keys[i]));
    json_object_set_new(v, "fitness", json_pack("{s:f}", "value", m->outcome.fitness));
    if (is_grid) json_object_set_new(v, "alive", json_real(m->outcome.alive));
    if (m->parents[0][0]) candidate_add_origin(v, m);
    json_decref(record);
    return v;
}

int run_lineage_append(const struct simulation *s, bool is_grid, FILE *f, struct error *err) {
    json_t *candidates = json_array();
    for (int i = 0; i < simulation_n_policies(s); i++)
        json_array_append_new(candidates, policy_candidate_json(simulation_policy(s, i), is_grid));
    json_t *line = json_pack("{s:i,s:o}", "generation", simulation_generations(s) - 1, "candidates",
                             candidates);
    char *text = json_canonical(line);
    bool good = fprintf(f, "%s\n", text) > 0 && fflush(f) == 0;
    free(text);
    json_decref(line);
    return good ? OK : error_errno(err, "cannot write 'lineage.jsonl'");
}

/* The number of bytes of the first n lines, or -1 if the text has fewer complete lines. */
static int64_t lines_length(const struct buf *text, int n) {
    size_t at = 0;
    for (; n > 0; n--) {
        const char *newline = at < text->len ? memchr(text->data + at, '\n', text->len - at) : NULL;
        if (!newline) return -1;
        at = (size_t)(newline - text->data) + 1;
    }
    return (int64_t)at;
}

/* Opens the record of a run that continues after generation n. */
static int lineage_continue(const struct simulation *s, const char *path, bool is_grid, FILE **out,
                            struct error *err) {
    struct buf text = {0};
    int rc = path_exists(path) ? file_read(path, FILE_LIMIT, &text, err) : OK;
    int64_t kept = lines_length(&text, simulation_generations(s) - 1);
    buf_release(&text);
    if (rc != OK || kept < 0) return rc;
    if (!(*out = fopen(path, "ae")) || ftruncate(fileno(*out), kept) != 0)
        return error_errno(err, "cannot write '%s'", path);
    return run_lineage_append(s, is_grid, *out, err);
}

int run_lineage_open(const struct simulation *s, const char *dir, bool is_grid, FILE **out,
                     struct error *err) {
    char *path = path_join(dir, "lineage.jsonl");
    int rc = OK;
    *out = NULL;
    if (simulation_generations(s) > 0)
        rc = lineage_continue(s, path, is_grid, out, err);
    else if (!(*out = fopen(path, "we")))
        rc = error_errno(err, "cannot write '%s'", path);
    free(path);
    return rc;
}
