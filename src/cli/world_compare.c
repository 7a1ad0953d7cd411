/*
 * world_compare: compares the results of groups of simulation runs, over seeds.
 *
 * A group is every run below --runs whose folder is its name and "-KEY" (both-s1, both-s2, …).
 * Groups are compared with the first one on the keys that both have, at the end of their runs.
 */
#define _GNU_SOURCE
#include "cli/world_simulation.h"

#include "base/base.h"
#include "eval/eval.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_KEYS = 64, MAX_GROUPS = 8, MAX_LINES = MAX_GROUPS + 2, MAX_POINTS = 256 };
#define ENOUGH 0.8 /* share of rule's deliveries to reach; a run is timed to it */

struct member {
    char *key;
    int n; /* points */
    double decisions[MAX_POINTS], delivered[MAX_POINTS];
};
struct group {
    const char *name;
    struct member *v[MAX_KEYS]; /* [n] by key */
    int n;
};
struct comparison {
    struct group groups[MAX_GROUPS]; /* [n] */
    int n;
    double rule, random; /* deliveries of these policies on the same maps; NAN: unknown */
};

static double value_at(const json_t *row, const char *key) {
    return json_get_number(json_object_get(json_object_get(row, "held_out"), key), "value");
}

struct reading {
    struct comparison *c;
    struct member *m;
};

/* Rows of policies are the reference levels of all groups. */
static int row_take(void *ctx, const json_t *row, int line, struct error *err) {
    struct reading *r = ctx;
    struct member *m = r->m;
    const char *policy = json_get_string(row, "policy");
    (void)line, (void)err;
    if (strcmp(policy, "rule") == 0) r->c->rule = value_at(row, "delivered");
    if (strcmp(policy, "random") == 0) r->c->random = value_at(row, "delivered");
    if (*policy || m->n == MAX_POINTS) return OK;
    m->decisions[m->n] = json_get_number(row, "decisions");
    m->delivered[m->n++] = value_at(row, "delivered");
    return OK;
}

static int member_cmp(const void *a, const void *b) {
    return strcmp((*(struct member *const *)a)->key, (*(struct member *const *)b)->key);
}

static int group_read(struct comparison *c, struct group *g, const char *root, struct error *err) {
    size_t len = strlen(g->name);
    DIR *d = opendir(root);
    int rc = OK;
    for (const struct dirent *f; rc == OK && d && (f = readdir(d)) && g->n < MAX_KEYS;) {
        if (strncmp(f->d_name, g->name, len) != 0 || f->d_name[len] != '-') continue;
        char *path = xasprintf("%s/%s/curve.jsonl", root, f->d_name);
        if (path_exists(path)) {
            struct member *m = xcalloc(1, sizeof *m);
            m->key = xstrdup(f->d_name + len + 1);
            g->v[g->n++] = m;
            rc = json_file_each(path, row_take, &(struct reading){c, m}, err);
        }
        free(path);
    }
    if (d) closedir(d);
    qsort(g->v, (size_t)g->n, sizeof *g->v, member_cmp);
    if (rc == OK && g->n == 0)
        rc = error_set(err, ERR_MISSING, "'%s' has no run of a world '%s-…'", root, g->name);
    return rc;
}

static double last_of(const struct member *m) {
    return m->n ? m->delivered[m->n - 1] : 0;
}

static struct stats_interval group_last(const struct group *g) {
    double v[MAX_KEYS];
    for (int i = 0; i < g->n; i++) v[i] = last_of(g->v[i]);
    return stats_mean_interval(v, g->n);
}

/* Decisions until a run first reached ENOUGH; infinite: never. */
static double time_of(const struct comparison *c, const struct member *m) {
    for (int i = 0; i < m->n; i++)
        if (m->delivered[i] >= ENOUGH * c->rule) return m->decisions[i];
    return INFINITY;
}

static int double_cmp(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_time(const struct comparison *c, const struct group *g) {
    double v[MAX_KEYS];
    for (int i = 0; i < g->n; i++) v[i] = time_of(c, g->v[i]);
    qsort(v, (size_t)g->n, sizeof *v, double_cmp);
    return v[(g->n - 1) / 2];
}

/* Differences on the keys that both have; returns their number. */
static int paired(const struct group *a, const struct group *b, double *diff) {
    int n = 0;
    for (int i = 0; i < a->n; i++)
        for (int j = 0; j < b->n; j++)
            if (strcmp(a->v[i]->key, b->v[j]->key) == 0)
                diff[n++] = last_of(a->v[i]) - last_of(b->v[j]);
    return n;
}

static json_t *group_json(const struct comparison *c, int i) {
    const struct group *g = &c->groups[i];
    const struct member *m = g->v[0];
    double diff[MAX_KEYS], time = median_time(c, g);
    json_t *v = json_pack("{s:s,s:i,s:f,s:o,s:o}", "group", g->name, "runs", g->n, "decisions",
                          m->n ? m->decisions[m->n - 1] : 0, "delivered",
                          stats_interval_json(group_last(g)), "decisions_to_80_percent",
                          isfinite(time) ? json_real(time) : json_null());
    int n = i ? paired(&c->groups[0], g, diff) : 0;
    if (n > 1)
        json_object_update_new(v, json_pack("{s:s,s:i,s:o,s:f}", "against", c->groups[0].name,
                                            "pairs", n, "difference",
                                            stats_interval_json(stats_mean_interval(diff, n)), "p",
                                            stats_sign_flip_test(diff, n)));
    return v;
}

/* Whether any run has a learning curve: a run that only measures does not. */
static bool has_course(const struct comparison *c) {
    for (int i = 0; i < c->n; i++)
        for (int k = 0; k < c->groups[i].n; k++) {
            const struct member *m = c->groups[i].v[k];
            if (m->n && m->decisions[m->n - 1] > 0) return true;
        }
    return false;
}

static void group_print(const struct comparison *c, int i) {
    const struct group *g = &c->groups[i];
    struct stats_interval d = group_last(g);
    double diff[MAX_KEYS], time = median_time(c, g);
    bool course = has_course(c);
    printf("%-16s %4d  ", g->name, g->n);
    if (course) printf("%9.0f  ", g->v[0]->n ? g->v[0]->decisions[g->v[0]->n - 1] : 0);
    printf("%6.2f [%5.2f, %5.2f]  %4.0f %%  ", d.value, d.lo, d.hi, 100 * d.value / c->rule);
    if (course && isfinite(time))
        printf("%9.0f", time);
    else if (course)
        printf("%9s", "never");
    int n = i ? paired(&c->groups[0], g, diff) : 0;
    if (n > 1) {
        struct stats_interval v = stats_mean_interval(diff, n);
        printf("   %+6.2f [%+6.2f, %+6.2f] p %.3f", v.value, v.lo, v.hi,
               stats_sign_flip_test(diff, n));
    }
    printf("\n");
}

static void tell(const struct comparison *c, bool json) {
    if (!json) {
        bool course = has_course(c);
        printf("delivered by an agent on held-out maps, at the end; rule %.2f, random %.2f [95 %% "
               "over runs]\n\n%-16s %4s  ",
               c->rule, c->random, "group", "runs");
        if (course) printf("%9s  ", "decisions");
        printf("%-22s  %6s  ", "delivered", "rule's");
        if (course) printf("%9s", "to 80 %");
        printf("   %s\n", "first group minus it, paired");
    }
    for (int i = 0; i < c->n; i++) {
        if (json)
            cli_print(group_json(c, i));
        else
            group_print(c, i);
    }
}

/* The mean over runs at each point that all runs have, and half of its interval. */
static void curve_of(const struct group *g, struct curve *c, struct curve *spread) {
    int points = MAX_POINTS;
    for (int i = 0; i < g->n; i++) points = MIN(points, g->v[i]->n);
    for (int k = 0; k < points; k++) {
        double v[MAX_KEYS], x = 0;
        for (int i = 0; i < g->n; i++) {
            v[i] = g->v[i]->delivered[k];
            x += g->v[i]->decisions[k] / g->n;
        }
        struct stats_interval mean = stats_mean_interval(v, g->n);
        curve_add(c, x, mean.value);
        curve_add(spread, x, g->n > 1 ? mean.hi - mean.value : 0);
    }
}

static int plot_write(const struct comparison *c, const char *path, struct error *err) {
    struct curve *lines = xcalloc(MAX_LINES, sizeof *lines),
                 *spread = xcalloc(MAX_LINES, sizeof *spread);
    const char *names[MAX_LINES];
    const double level[2] = {c->rule, c->random};
    double last = 0;
    int n = 0;
    for (; n < c->n; n++) {
        names[n] = c->groups[n].name;
        curve_of(&c->groups[n], &lines[n], &spread[n]);
        if (lines[n].n) last = fmax(last, lines[n].x[lines[n].n - 1]);
    }
    for (int k = 0; k < 2; k++, n++) {
        names[n] = k ? "random" : "rule";
        for (int x = 0; x < 2; x++) curve_add(&lines[n], x * last, level[k]);
    }
    struct buf b = {0};
    plot_file(&b, "delivered by an agent on held-out maps (band: 95 % over seeds)", "decisions",
              lines, spread, names, n);
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(lines);
    free(spread);
    return rc;
}

int simulation_compare(const struct cli_options *common, const struct simulation_cmd_options *o,
                       const struct strings *names, struct error *err) {
    struct comparison *c = xcalloc(1, sizeof *c);
    int rc = OK;
    c->rule = c->random = NAN;
    if (names->n - 1 > MAX_GROUPS) rc = error_set(err, ERR_USAGE, "at most %d groups", MAX_GROUPS);
    for (int i = 1; rc == OK && i < names->n; i++) {
        c->groups[c->n].name = names->v[i];
        rc = group_read(c, &c->groups[c->n++], o->runs, err);
    }
    if (rc == OK) tell(c, common->json);
    if (rc == OK && o->out) rc = plot_write(c, o->out, err);
    for (int i = 0; i < c->n; i++)
        for (int k = 0; k < c->groups[i].n; k++) {
            free(c->groups[i].v[k]->key);
            free(c->groups[i].v[k]);
        }
    free(c);
    return rc;
}
