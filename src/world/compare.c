/* compare: the results of groups of simulation runs, over seeds. */
#define _GNU_SOURCE
#include "world/world.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RUNS = 64, MAX_GROUPS = 16, MAX_LINES = MAX_GROUPS + 2, MAX_POINTS = 256 };
/* The share of the deliveries of the policy `rule` that a run has to reach: decisions_to_target. */
#define TARGET_FRACTION 0.8

struct run_curve {
    char *key;
    int n; /* number of points */
    double decisions[MAX_POINTS], delivered[MAX_POINTS];
    double result; /* the deliveries that are compared */
};
struct group {
    const char *name;
    struct run_curve *v[MAX_RUNS]; /* [n] sorted by key */
    int n;
};
struct comparison {
    /* The first member, so that a pointer to the result is also a pointer to the comparison. */
    struct simulation_comparison result;
    struct group groups[MAX_GROUPS]; /* [result.n] */
    struct simulation_group results[MAX_GROUPS];
};

static double heldout_value(const json_t *row, const char *key) {
    return json_get_number(json_object_get(json_object_get(row, "held_out"), key), "value");
}

struct row_reader {
    struct comparison *c;
    struct run_curve *m;
};

/* Reads a row of a run's curve. Rows of scripted policies give the baselines of the comparison. */
static int row_read(void *ctx, const json_t *row, int line, struct error *err) {
    struct row_reader *r = ctx;
    struct run_curve *m = r->m;
    const char *policy = json_get_string(row, "policy");
    (void)line, (void)err;
    if (strcmp(policy, "rule") == 0) r->c->result.rule = heldout_value(row, "delivered");
    if (strcmp(policy, "random") == 0) r->c->result.random = heldout_value(row, "delivered");
    if (*policy || m->n == MAX_POINTS) return OK;
    m->decisions[m->n] = json_get_number(row, "decisions");
    m->delivered[m->n++] = heldout_value(row, "delivered");
    return OK;
}

static int run_curve_compare(const void *a, const void *b) {
    return strcmp((*(struct run_curve *const *)a)->key, (*(struct run_curve *const *)b)->key);
}

static int group_read(struct comparison *c, struct group *g, const char *root, struct error *err) {
    size_t len = strlen(g->name);
    DIR *d = opendir(root);
    int rc = OK;
    for (const struct dirent *f; rc == OK && d && (f = readdir(d)) && g->n < MAX_RUNS;) {
        if (strncmp(f->d_name, g->name, len) != 0 || f->d_name[len] != '-') continue;
        char *path = xasprintf("%s/%s/curve.jsonl", root, f->d_name);
        if (path_exists(path)) {
            struct run_curve *m = xcalloc(1, sizeof *m);
            m->key = xstrdup(f->d_name + len + 1);
            g->v[g->n++] = m;
            rc = json_file_each(path, row_read, &(struct row_reader){c, m}, err);
        }
        free(path);
    }
    if (d) closedir(d);
    qsort(g->v, (size_t)g->n, sizeof *g->v, run_curve_compare);
    if (rc == OK && g->n == 0)
        rc = error_set(err, ERR_MISSING, "'%s' has no run of a world '%s-…'", root, g->name);
    return rc;
}

static double final_decisions(const struct run_curve *m) {
    return m->n ? m->decisions[m->n - 1] : 0;
}

static double final_delivered(const struct run_curve *m) {
    return m->n ? m->delivered[m->n - 1] : 0;
}

/* The deliveries of a run after x decisions, which it must have: linear between two generations. */
static double delivered_at(const struct run_curve *m, double x) {
    int i = 0;
    while (m->decisions[i] < x) i++;
    if (i == 0) return m->delivered[0];
    double width = m->decisions[i] - m->decisions[i - 1];
    double fraction = (x - m->decisions[i - 1]) / width;
    return m->delivered[i - 1] + fraction * (m->delivered[i] - m->delivered[i - 1]);
}

/* Sets the result of each run of a group, see simulation_compare. */
static int group_evaluate(struct group *g, double at, struct error *err) {
    for (int i = 0; i < g->n; i++) {
        struct run_curve *m = g->v[i];
        if (at > final_decisions(m))
            return error_set(err, ERR_USAGE, "'%s-%s' ends after %.0f decisions", g->name, m->key,
                             final_decisions(m));
        m->result = at > 0 ? delivered_at(m, at) : final_delivered(m);
    }
    return OK;
}

static struct stats_interval group_mean_delivered(const struct group *g) {
    double v[MAX_RUNS];
    for (int i = 0; i < g->n; i++) v[i] = g->v[i]->result;
    return stats_mean_interval(v, g->n);
}

/* Decisions until a run first reached TARGET_FRACTION; INFINITY: never. */
static double decisions_to_target(const struct comparison *c, const struct run_curve *m) {
    for (int i = 0; i < m->n; i++)
        if (m->delivered[i] >= TARGET_FRACTION * c->result.rule) return m->decisions[i];
    return INFINITY;
}

static double median_decisions_to_target(const struct comparison *c, const struct group *g) {
    double v[MAX_RUNS];
    for (int i = 0; i < g->n; i++) v[i] = decisions_to_target(c, g->v[i]);
    qsort(v, (size_t)g->n, sizeof *v, double_compare);
    return v[(g->n - 1) / 2];
}

/* Computes the differences on the keys that both groups have; returns their number. */
static int paired_differences(const struct group *a, const struct group *b, double *diff) {
    int n = 0;
    for (int i = 0; i < a->n; i++)
        for (int j = 0; j < b->n; j++)
            if (strcmp(a->v[i]->key, b->v[j]->key) == 0)
                diff[n++] = a->v[i]->result - b->v[j]->result;
    return n;
}

/* Whether any run has a learning curve. A run that only evaluates has none. */
static bool any_trained(const struct comparison *c) {
    for (int i = 0; i < c->result.n; i++)
        for (int k = 0; k < c->groups[i].n; k++)
            if (final_decisions(c->groups[i].v[k]) > 0) return true;
    return false;
}

static struct simulation_group group_result(const struct comparison *c, int i) {
    const struct group *g = &c->groups[i];
    double diff[MAX_RUNS];
    struct simulation_group out = {.name = g->name,
                                   .n_runs = g->n,
                                   .decisions = final_decisions(g->v[0]),
                                   .delivered = group_mean_delivered(g),
                                   .decisions_to_80_percent = median_decisions_to_target(c, g)};
    if (i) out.pairs = paired_differences(&c->groups[0], g, diff);
    if (out.pairs > 1) {
        out.difference = stats_mean_interval(diff, out.pairs);
        out.p = stats_sign_flip_test(diff, out.pairs);
    }
    return out;
}

/* The mean over runs at each point that all runs have, and half the width of its confidence
 * interval. */
static void group_mean_curve(const struct group *g, struct curve *c, struct curve *spread) {
    int points = MAX_POINTS;
    for (int i = 0; i < g->n; i++) points = MIN(points, g->v[i]->n);
    for (int k = 0; k < points; k++) {
        double v[MAX_RUNS], x = 0;
        for (int i = 0; i < g->n; i++) {
            v[i] = g->v[i]->delivered[k];
            x += g->v[i]->decisions[k] / g->n;
        }
        struct stats_interval mean = stats_mean_interval(v, g->n);
        curve_add(c, x, mean.value);
        curve_add(spread, x, g->n > 1 ? mean.hi - mean.value : 0);
    }
}

int simulation_comparison_plot(const struct simulation_comparison *result, const char *path,
                               struct error *err) {
    const struct comparison *c = (const struct comparison *)result;
    struct curve *lines = xcalloc(MAX_LINES, sizeof *lines),
                 *spread = xcalloc(MAX_LINES, sizeof *spread);
    const char *names[MAX_LINES];
    const double baselines[2] = {c->result.rule, c->result.random};
    double last = 0;
    int n = 0;
    for (; n < c->result.n; n++) {
        names[n] = c->groups[n].name;
        group_mean_curve(&c->groups[n], &lines[n], &spread[n]);
        if (lines[n].n) last = fmax(last, lines[n].x[lines[n].n - 1]);
    }
    for (int k = 0; k < 2; k++, n++) {
        names[n] = k ? "random" : "rule";
        for (int x = 0; x < 2; x++) curve_add(&lines[n], x * last, baselines[k]);
    }
    struct buf b = {0};
    plot_svg(&b, "delivered by an agent on held-out maps (band: 95 % over seeds)", "decisions",
             lines, spread, names, n);
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(lines);
    free(spread);
    return rc;
}

void simulation_comparison_free(struct simulation_comparison *result) {
    struct comparison *c = (struct comparison *)result;
    for (int i = 0; c && i < c->result.n; i++)
        for (int k = 0; k < c->groups[i].n; k++) {
            free(c->groups[i].v[k]->key);
            free(c->groups[i].v[k]);
        }
    free(c);
}

struct simulation_comparison *simulation_compare(const char *runs, char *const *names, int n,
                                                 double at_decisions, struct error *err) {
    struct comparison *c = xcalloc(1, sizeof *c);
    int rc = OK;
    c->result = (struct simulation_comparison){
        .at_decisions = at_decisions, .rule = NAN, .random = NAN, .groups = c->results};
    if (n > MAX_GROUPS) rc = error_set(err, ERR_USAGE, "at most %d groups", MAX_GROUPS);
    for (int i = 0; rc == OK && i < n; i++) {
        c->groups[i].name = names[i];
        c->result.n++;
        rc = group_read(c, &c->groups[i], runs, err);
        if (rc == OK) rc = group_evaluate(&c->groups[i], at_decisions, err);
    }
    for (int i = 0; rc == OK && i < n; i++) c->results[i] = group_result(c, i);
    c->result.trained = any_trained(c);
    if (rc == OK) return &c->result;
    simulation_comparison_free(&c->result);
    return NULL;
}
