/* cmd_lineage: `shoal lineage RUN`: the family tree of a run of 'shoal evolve' or 'shoal world',
 * even of a run in progress. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "evolve/evolve.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *runs;
    bool dot;
};
static const struct option_row rows[] = {
    {"runs", OPT_STRING, offsetof(struct options, runs), "runs", 0, 0, "DIR", "folder of runs"},
    {"dot", OPT_BOOL, offsetof(struct options, dot), NULL, 0, 0, NULL,
     "print the tree as Graphviz, for 'dot -Tsvg'"},
    {0},
};

/* The file with the generations of the run in `dir`: of 'shoal evolve', else of 'shoal world'. */
static char *generations_path(const char *dir) {
    char *path = path_join(dir, "evolution.jsonl");
    if (path_exists(path)) return path;
    free(path);
    return path_join(dir, "lineage.jsonl");
}

static json_t *run_generations(const char *runs, const char *id, struct error *err) {
    char *dir = path_join(runs, id), *path = generations_path(dir),
         *state = path_join(dir, "state.json");
    json_t *generations = NULL;
    if (strchr(id, '/') || *id == '.' || !path_is_dir(dir))
        error_set(err, ERR_MISSING, "no run '%s' in '%s'", id, runs);
    else if (path_exists(path))
        generations = lineage_load(path, err);
    else if (path_exists(state))
        error_set(
            err, ERR_STATE,
            "run '%s' was begun by a version that did not record its generations: begin a new "
            "run, for example with another --seed",
            id);
    else
        error_set(err, ERR_STATE,
                  "run '%s' has evaluated no generation yet: there is no '%s/evolution.jsonl'", id,
                  dir);
    free(dir);
    free(path);
    free(state);
    return generations;
}

static int print_json(const json_t *generations, const char *id, const char *name,
                      struct error *err) {
    json_t *v = lineage_json(generations, name, err);
    if (!v) return err->code;
    json_object_set_new(v, "run", json_string(id));
    cli_print_json(v);
    return OK;
}

static int print_dot(const json_t *generations, const char *name, struct error *err) {
    struct buf b = {0};
    int rc = lineage_dot(generations, name, &b, err);
    if (rc == OK) fwrite(b.data, 1, b.len, stdout);
    buf_release(&b);
    return rc;
}

static int run_lineage(const struct cli_options *c, const void *options, const struct strings *args,
                       struct error *err) {
    const struct options *o = options;
    const char *id = args->v[0], *name = args->n > 1 ? args->v[1] : NULL;
    if (c->json && o->dot) return error_set(err, ERR_USAGE, "--json and --dot exclude each other");
    json_t *generations = run_generations(o->runs, id, err);
    if (!generations) return err->code;
    int rc = c->json  ? print_json(generations, id, name, err)
             : o->dot ? print_dot(generations, name, err)
                      : lineage_print(generations, name, stdout, err);
    json_decref(generations);
    return rc;
}

const struct cli_command cmd_lineage = {
    .name = "lineage",
    .args = "RUN [NAME]",
    .summary = "print the family tree of a run: parents and operator of each candidate",
    .about = "Prints the candidates of runs/RUN by generation, or NAME and its ancestors: first\n"
             "measured fitness, hash, operator and parents, and each founder's share of the\n"
             "ancestry. Candidates of 'shoal world' are its policies, with the share of their\n"
             "agents that were alive at the end. It also works while the run is active.\n"
             "\n"
             "  shoal lineage 20260801-093000-s1 g3c2\n"
             "  shoal lineage 20260801-093000-s1 --dot | dot -Tsvg -o tree.svg\n"
             "  shoal lineage world-1a2b3c4d",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run_lineage,
};
