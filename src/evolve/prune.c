/*
 * prune: deletes the files of candidates that a finished run needs no more.
 *
 * A fork, a replay or a resumed run computes missing candidates again. Founders are kept, because
 * their training takes long. Names in result.json are checked, and links are not followed, because
 * the folder may come from another person.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A candidate with files in adapters/gen_T/NAME. */
struct dead_candidate {
    const char *name;
    int generation;
    double fitness;
    char *folder, *path; /* gen_T, gen_T/NAME */
    int64_t created;
};

struct dead_list {
    struct dead_candidate *v;
    int n;
};

static bool is_folder(const char *path, struct stat *st) {
    return lstat(path, st) == 0 && S_ISDIR(st->st_mode);
}

/* The candidate survives, and this folder is the one that the report links to. */
static bool is_alive(const struct lineage *l, const char *name, int generation) {
    int i = lineage_find(l, name);
    return i < 0 ||
           (l->v[i].last_generation == l->generations - 1 && l->v[i].generation == generation);
}

/* Adds candidate i of a generation, in order of fitness, unless it is needed or has no files. */
static void dead_add(struct dead_list *d, const struct lineage *l, const char *adapters,
                     int generation, const json_t *candidate) {
    const char *name = json_get_string(candidate, "name");
    struct stat st;
    if (name[0] == '.' || strchr(name, '/') || is_alive(l, name, generation)) return;
    struct dead_candidate c = {.name = name,
                               .generation = generation,
                               .fitness = json_interval(candidate, "fitness").value,
                               .folder = xasprintf("%s/gen_%d", adapters, generation)};
    c.path = path_join(c.folder, name);
    if (is_folder(c.folder, &st) && is_folder(c.path, &st)) {
        c.created = (int64_t)st.st_mtime;
        d->v = xrealloc(d->v, (size_t)(d->n + 1) * sizeof *d->v);
        d->v[d->n++] = c;
    } else {
        free(c.folder);
        free(c.path);
    }
}

/* Finds the candidates between the founders and the last generation, except the fittest one of
 * each, which is the first of its record. */
static void dead_find(struct dead_list *d, const struct lineage *l, const json_t *generations,
                      const char *adapters) {
    for (int g = 1; g < l->generations - 1; g++) {
        const json_t *record = json_array_get(generations, (size_t)g),
                     *list = json_object_get(record, "candidates");
        if (json_integer_value(json_object_get(record, "generation")) != g) continue;
        for (size_t i = 1; i < json_array_size(list); i++)
            dead_add(d, l, adapters, g, json_array_get(list, i));
    }
}

static int dead_compare(const void *pa, const void *pb) {
    const struct dead_candidate *a = pa, *b = pb;
    if (a->fitness > b->fitness || a->fitness < b->fitness) return a->fitness > b->fitness ? -1 : 1;
    return a->generation != b->generation ? (a->generation > b->generation ? -1 : 1)
                                          : strcmp(a->name, b->name);
}

/* Renames the folder, then deletes it; if that is interrupted, the next call deletes the rest. */
static int dead_delete(const struct dead_candidate *c, struct error *err) {
    char *trash = path_join(c->folder, ".pruned");
    tree_delete(trash);
    int rc = path_rename(c->path, trash, err);
    if (rc == OK) tree_delete(trash);
    free(trash);
    return rc;
}

static int dead_prune(struct dead_list *d, const struct prune_rule *rule, json_t *out,
                      struct error *err) {
    int rc = OK;
    if (d->n > 1) qsort(d->v, (size_t)d->n, sizeof *d->v, dead_compare);
    for (int i = 0; i < d->n && rc == OK; i++) {
        const struct dead_candidate *c = &d->v[i];
        if (!prune_rule_matches(rule, i, c->created, c->fitness)) continue;
        json_t *row = json_pack("{s:s,s:i,s:f,s:I}", "name", c->name, "generation", c->generation,
                                "score", c->fitness, "bytes", (json_int_t)tree_disk_usage(c->path));
        if (rule->delete_matches) rc = dead_delete(c, err);
        if (rc == OK) json_array_append(out, row);
        json_decref(row);
    }
    return rc;
}

static void dead_list_release(struct dead_list *d) {
    for (int i = 0; i < d->n; i++) {
        free(d->v[i].folder);
        free(d->v[i].path);
    }
    free(d->v);
}

/* The generations of the result, as a lineage too. */
static int result_read(const char *dir, json_t **result, struct lineage *l, struct error *err) {
    char *path = path_join(dir, "result.json");
    int rc = OK;
    if (!path_exists(path))
        rc = error_set(err, ERR_STATE, "run '%s' is not finished: it has no result.json", dir);
    else if (!(*result = json_parse_file(path, err)))
        rc = err->code;
    if (rc == OK && lineage_from_json(l, json_object_get(*result, "generations"), err) != OK)
        rc = error_wrap(err, "'%s'", path);
    free(path);
    return rc;
}

int evolve_run_prune(const char *dir, const struct prune_rule *rule, json_t **out,
                     struct error *err) {
    struct lineage l = {0};
    struct dead_list dead = {0};
    struct stat st;
    json_t *result = NULL;
    char *adapters = path_join(dir, "adapters");
    int lock = dir_lock(dir, "run", err), rc = lock < 0 ? err->code : OK;
    *out = json_array();
    if (rc == OK) rc = result_read(dir, &result, &l, err);
    if (rc == OK && is_folder(adapters, &st))
        dead_find(&dead, &l, json_object_get(result, "generations"), adapters);
    if (rc == OK) rc = dead_prune(&dead, rule, *out, err);
    dead_list_release(&dead);
    lineage_release(&l);
    json_decref(result);
    dir_unlock(lock, dir);
    free(adapters);
    return rc;
}
