/*
 * cmd_runs: `shoal runs`: lists runs, and compares the results of groups of runs.
 *
 * A group NAME contains every run with an id NAME-KEY. The key identifies a repetition: a seed
 * ("s3"), or a family and a seed ("order-s3"). Groups are compared with the first one, paired by
 * key, so that the difficulty of a seed cancels.
 */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "eval/eval.h"
#include "store/store.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct options {
    char *runs, *base;
    struct strings compare;
};
static const struct option_row rows[] = {
    {"runs", OPT_STRING, offsetof(struct options, runs), "runs", 0, 0, "DIR",
     "folder of runs and of shoal.db"},
    {"compare", OPT_LIST, offsetof(struct options, compare), NULL, 0, 0, "NAME",
     "groups of finished runs to compare, with ids NAME-KEY, such as NAME-s1, NAME-s2"},
    {"base", OPT_STRING, offsetof(struct options, base), NULL, 0, 0, "NAME",
     "group that retention is relative to; default: each run's best founder"},
    {0},
};

/* The result of one run. */
struct outcome {
    const char *key; /* borrowed from the list of runs */
    double accuracy, flops;
    double retained_accuracy,
        retention; /* accuracy on the families to retain; its change since the founder */
    int64_t items;
};
struct run_group {
    const char *name;
    struct outcome *v; /* [n] */
    int n;
    bool measures_retention; /* all runs measured families to retain */
};

/* The key of a run in a group; NULL: the run is not in the group. */
static const char *run_key(const char *id, const char *group) {
    size_t n = strlen(group);
    return strncmp(id, group, n) == 0 && id[n] == '-' && id[n + 1] ? id + n + 1 : NULL;
}

/* Reads result.json of a run. The last row of its table is the result of the search. */
static int outcome_read(const char *root, const char *id, struct outcome *o,
                        bool *measures_retention, struct error *err) {
    char *path = xasprintf("%s/%s/result.json", root, id);
    json_t *v = json_parse_file(path, err), *table = json_object_get(v, "table"),
           *retention = json_object_get(v, "retention"), *row;
    size_t n = json_array_size(table), families = json_array_size(retention), i;
    int rc = v ? OK : err->code;
    if (v && n == 0) rc = error_set(err, ERR_FORMAT, "'%s' has no table", path);
    if (rc == OK) {
        const json_t *last = json_array_get(table, n - 1);
        o->accuracy = json_get_number(last, "acc");
        o->items = (int64_t)json_get_number(last, "n");
        o->flops = json_get_number(json_object_get(v, "spent"), "flops");
        json_array_foreach (retention, i, row) {
            o->retention +=
                json_get_number(json_object_get(row, "diff"), "value") / (double)families;
            o->retained_accuracy +=
                json_get_number(json_object_get(row, "evolved"), "acc") / (double)families;
        }
        *measures_retention &= families > 0;
    }
    json_decref(v);
    free(path);
    return rc;
}

static int group_read(const char *root, const json_t *runs, struct run_group *g,
                      struct error *err) {
    size_t i;
    json_t *run;
    int rc = OK;
    g->measures_retention = true;
    g->v = xcalloc(json_array_size(runs) + 1, sizeof *g->v);
    json_array_foreach (runs, i, run) {
        const char *key = run_key(json_get_string(run, "id"), g->name);
        if (rc != OK || !key || strcmp(json_get_string(run, "status"), "done") != 0) continue;
        g->v[g->n].key = key;
        rc = outcome_read(root, json_get_string(run, "id"), &g->v[g->n++], &g->measures_retention,
                          err);
    }
    if (rc == OK && g->n == 0)
        rc = error_set(err, ERR_MISSING, "no finished run is named '%s-…'; 'shoal runs' lists them",
                       g->name);
    return rc;
}

/* Mean and interval of one field over the runs of a group. */
static struct stats_interval group_interval(const struct run_group *g, size_t field) {
    double *v = xcalloc((size_t)g->n + 1, sizeof *v);
    for (int i = 0; i < g->n; i++) v[i] = *(const double *)((const char *)&g->v[i] + field);
    struct stats_interval mean = stats_mean_interval(v, g->n);
    free(v);
    return mean;
}

/* The accuracy of a group: between 0 and 1, also where the interval of Student's t goes beyond. */
static struct stats_interval group_accuracy(const struct run_group *g) {
    struct stats_interval v = group_interval(g, offsetof(struct outcome, accuracy));
    return (struct stats_interval){v.value, fmax(v.lo, 0), fmin(v.hi, 1)};
}

/* a - b in one field, over the keys that both groups have. */
struct pairing {
    struct stats_interval diff;
    double p;
    int n;
};
static struct pairing paired_difference(const struct run_group *a, const struct run_group *b,
                                        size_t field) {
    double *diff = xcalloc((size_t)a->n + 1, sizeof *diff);
    struct pairing r = {.p = 1};
    for (int i = 0; i < a->n; i++)
        for (int j = 0; j < b->n; j++)
            if (strcmp(a->v[i].key, b->v[j].key) == 0)
                diff[r.n++] = *(const double *)((const char *)&a->v[i] + field) -
                              *(const double *)((const char *)&b->v[j] + field);
    r.diff = stats_mean_interval(diff, r.n);
    if (r.n > 0) r.p = stats_sign_flip_test(diff, r.n);
    free(diff);
    return r;
}

/* The change on the families to retain, relative to base or, without one, to each run's founder. */
static struct stats_interval retention(const struct run_group *g, const struct run_group *base) {
    if (!base->name) return group_interval(g, offsetof(struct outcome, retention));
    return paired_difference(g, base, offsetof(struct outcome, retained_accuracy)).diff;
}

static json_t *group_json(const struct run_group *g, const struct run_group *base) {
    json_t *v =
        json_pack("{s:s,s:i,s:I,s:o,s:f}", "group", g->name, "runs", g->n, "items",
                  (json_int_t)g->v[0].items, "accuracy", stats_mean_json(group_accuracy(g), g->n),
                  "flops", group_interval(g, offsetof(struct outcome, flops)).value);
    if (g->measures_retention)
        json_object_set_new(v, "retention", stats_mean_json(retention(g, base), g->n));
    return v;
}

/* Every group, and the advantage of the first group over each other group. */
static json_t *comparison_json(const struct run_group *g, int n, const struct run_group *base) {
    json_t *list = json_array();
    double *p = xcalloc(2 * (size_t)n + 1, sizeof *p), *holm = p + n;
    struct pairing *d = xcalloc((size_t)n + 1, sizeof *d);
    for (int i = 1; i < n; i++) {
        d[i] = paired_difference(&g[0], &g[i], offsetof(struct outcome, accuracy));
        p[i - 1] = d[i].p;
    }
    stats_holm(p, n - 1, holm);
    for (int i = 0; i < n; i++) {
        json_t *v = group_json(&g[i], base);
        if (i > 0 && d[i].n > 0)
            json_object_set_new(v, "first",
                                json_pack("{s:o,s:i,s:f,s:f}", "ahead",
                                          stats_mean_json(d[i].diff, d[i].n), "pairs", d[i].n, "p",
                                          d[i].p, "p_holm", holm[i - 1]));
        json_array_append_new(list, v);
    }
    free(p);
    free(d);
    return list;
}

/* "+1.20 (+0.31 … +2.09)" in 26 columns, or "+1.20" without an interval; `format` prints one
 * number. */
static void print_points(const json_t *v, const char *format) {
    static const char *const keys[] = {"value", "lo", "hi"}, *const before[] = {"", " (", " … "};
    struct buf b = {0};
    bool has_interval = json_is_number(json_object_get(v, "lo"));
    int width = 26, n = has_interval ? 3 : 1;
    for (int i = 0; v && i < n; i++) {
        buf_puts(&b, before[i]);
        buf_printf(&b, format, 100 * json_get_number(v, keys[i]));
    }
    if (v && has_interval) buf_puts(&b, ")");
    if (v && has_interval) width += (int)strlen("…") - 1;
    printf("%-*s", width, v ? b.data : "");
    buf_release(&b);
}

static void comparison_print(const json_t *list) {
    size_t i;
    json_t *v;
    printf("%-22s%5s%8s  %-26s%-11s%-26s%-26s%s\n", "group", "runs", "items", "accuracy, %",
           "FLOPs", "retention, points", "the first is ahead by", "p, Holm's");
    json_array_foreach (list, i, v) {
        const json_t *first = json_object_get(v, "first");
        printf("%-22s%5d%8d  ", json_get_string(v, "group"), (int)json_get_number(v, "runs"),
               (int)json_get_number(v, "items"));
        print_points(json_object_get(v, "accuracy"), "%.2f");
        printf("%-11.2e", json_get_number(v, "flops"));
        print_points(json_object_get(v, "retention"), "%+.2f");
        print_points(json_object_get(first, "ahead"), "%+.2f");
        if (first)
            printf("%.2g, %.2g", json_get_number(first, "p"), json_get_number(first, "p_holm"));
        putchar('\n');
    }
}

static int compare(const struct cli_options *c, const struct options *o, const json_t *runs,
                   struct error *err) {
    int n = o->compare.n, rc = OK;
    struct run_group *g = xcalloc((size_t)n + 1, sizeof *g), *base = g + n;
    for (int i = 0; i < n; i++) g[i].name = o->compare.v[i];
    base->name = o->base;
    for (int i = 0; rc == OK && i <= n; i++)
        if (g[i].name) rc = group_read(o->runs, runs, &g[i], err);
    json_t *list = rc == OK ? comparison_json(g, n, base) : NULL, *v;
    size_t k;
    if (list && !c->json) comparison_print(list);
    json_array_foreach (list, k, v)
        if (c->json) cli_print_json(json_incref(v));
    json_decref(list);
    for (int i = 0; i <= n; i++) free(g[i].v);
    free(g);
    return rc;
}

static void list_runs(const struct cli_options *c, const json_t *runs) {
    size_t i;
    json_t *v;
    json_array_foreach (runs, i, v) {
        if (c->json)
            cli_print_json(json_incref(v));
        else
            printf("%-32s %-8s %-11s %s\n", json_get_string(v, "id"), json_get_string(v, "kind"),
                   json_get_string(v, "status"), json_get_string(v, "created"));
    }
}

static int run_runs(const struct cli_options *c, const void *options, const struct strings *args,
                    struct error *err) {
    (void)args;
    const struct options *o = options;
    char *db = path_join(o->runs, "shoal.db");
    struct store *s = NULL;
    if (!path_exists(db))
        error_set(err, ERR_MISSING, "no runs in '%s'; --runs names their folder", o->runs);
    else
        s = store_open(db, err);
    json_t *runs = s ? store_run_list(s, o->runs, err) : NULL;
    int rc = runs ? OK : err->code;
    if (rc == OK && o->compare.n)
        rc = compare(c, o, runs, err);
    else if (rc == OK)
        list_runs(c, runs);
    json_decref(runs);
    store_close(s);
    free(db);
    return rc;
}

const struct cli_command cmd_runs = {
    .name = "runs",
    .args = "",
    .summary = "list runs, or compare groups of runs over their seeds",
    .about =
        "Without options, lists the runs. With --compare, prints for each group of runs the\n"
        "mean final accuracy, the cost, and the change on the families to retain; then the\n"
        "difference of the first group to each other group, paired by seed. Intervals are\n"
        "Student's t of 95 % over runs. p is from a sign-flip test over pairs, which cannot go\n"
        "below 0.0625 with five pairs.\n"
        "\n"
        "  shoal runs\n"
        "  shoal runs --compare hybrid soup gradient",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run_runs,
};
