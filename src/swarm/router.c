/*
 * router: the choice of an agent, and the file of a router. router_fit.c fits the weights.
 *
 * A file from another source can make a router choose badly, and nothing else: sizes are checked
 * before memory is allocated, numbers are finite.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "shoal-router-1"
/* Bounds what a sum of products can be; a fit has weights far below. */
#define WEIGHT_MAX 1e6

double router_logit(const double *weights, const struct question_features *f) {
    double sum = weights[0];
    for (int k = 0; k < f->n; k++) sum += weights[f->v[k].index] * (double)f->v[k].value;
    return sum;
}

int router_route(const struct router *r, const char *question, double *prob) {
    struct question_features f;
    double best_logit = 0;
    int best = 0;
    question_features_init(&f, question);
    for (int a = 0; a < r->n_agents; a++) {
        double z = router_logit(r->weights + (size_t)a * ROUTER_WEIGHTS, &f);
        if (a == 0 || z > best_logit) {
            best = a;
            best_logit = z;
        }
        if (prob) prob[a] = 1 / (1 + math_exp(-z));
    }
    free(f.v);
    return best;
}

/* files */

static int agents_read(struct router *r, const json_t *list, struct error *err) {
    size_t n = json_array_size(list);
    if (n < 1 || n > TEAM_MAX)
        return error_set(err, ERR_FORMAT, "a list of 1 to %d names is expected in 'agents'",
                         TEAM_MAX);
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (!name || !*name)
            return error_set(err, ERR_FORMAT, "a name is expected at 'agents.%zu'", i);
        r->names[r->n_agents++] = xstrdup(name);
    }
    return OK;
}

static int weights_read(struct router *r, const json_t *list, struct error *err) {
    if (json_array_size(list) != (size_t)r->n_agents)
        return error_set(err, ERR_FORMAT, "weights for each of %d agents are expected in 'weights'",
                         r->n_agents);
    for (int a = 0; a < r->n_agents; a++)
        if (json_array_size(json_array_get(list, (size_t)a)) != ROUTER_WEIGHTS)
            return error_set(err, ERR_FORMAT, "%d numbers are expected at 'weights.%d'",
                             ROUTER_WEIGHTS, a);
    r->weights = xcalloc((size_t)r->n_agents * ROUTER_WEIGHTS, sizeof *r->weights);
    for (int a = 0; a < r->n_agents; a++)
        for (int j = 0; j < ROUTER_WEIGHTS; j++) {
            const json_t *v = json_array_get(json_array_get(list, (size_t)a), (size_t)j);
            double x = json_number_value(v);
            if (!json_is_number(v) || !(fabs(x) <= WEIGHT_MAX))
                return error_set(err, ERR_FORMAT,
                                 "a number of at most %g is expected at 'weights.%d.%d'",
                                 WEIGHT_MAX, a, j);
            r->weights[(size_t)a * ROUTER_WEIGHTS + (size_t)j] = x;
        }
    return OK;
}

static int document_read(struct router *r, const json_t *root, struct error *err) {
    static const char *const keys[] = {"format", "agents", "l2", "fit", "weights"};
    const char *key;
    json_t *v;
    if (!json_is_object(root) || strcmp(json_get_string(root, "format"), FORMAT) != 0)
        return error_set(err, ERR_FORMAT, "the 'format' is not '%s'; fit the team again", FORMAT);
    json_object_foreach ((json_t *)(uintptr_t)root, key, v) {
        size_t k = 0;
        while (k < ARRAY_LEN(keys) && strcmp(keys[k], key) != 0) k++;
        if (k == ARRAY_LEN(keys)) return error_set(err, ERR_FORMAT, "unknown key '%s'", key);
    }
    r->l2 = json_get_number(root, "l2");
    if (!(r->l2 > 0) || !isfinite(r->l2))
        return error_set(err, ERR_FORMAT, "a positive number is expected in 'l2'");
    int rc = agents_read(r, json_object_get(root, "agents"), err);
    return rc == OK ? weights_read(r, json_object_get(root, "weights"), err) : rc;
}

struct router *router_parse(const char *text, size_t len, const char *path, struct error *err) {
    if (len > ROUTER_MAX_BYTES) {
        error_set(err, ERR_FORMAT, "router '%s' has more than %d bytes", path, ROUTER_MAX_BYTES);
        return NULL;
    }
    json_t *root = json_parse(text, len, path, err);
    if (!root) return NULL;
    struct router *r = xcalloc(1, sizeof *r);
    sha256_bytes(text, len, r->hash);
    int rc = document_read(r, root, err);
    json_decref(root);
    if (rc == OK) return r;
    error_wrap(err, "router '%s'", path);
    router_free(r);
    return NULL;
}

struct router *router_read(const char *path, struct error *err) {
    struct buf text = {0};
    struct router *r = NULL;
    if (file_read(path, ROUTER_MAX_BYTES, &text, err) == OK)
        r = router_parse(text.data ? text.data : "", text.len, path, err);
    buf_release(&text);
    return r;
}

json_t *router_json(const struct router *r, const json_t *fit) {
    json_t *agents = json_array(), *weights = json_array();
    for (int a = 0; a < r->n_agents; a++) {
        json_t *row = json_array();
        for (int j = 0; j < ROUTER_WEIGHTS; j++)
            json_array_append_new(row,
                                  json_real(r->weights[(size_t)a * ROUTER_WEIGHTS + (size_t)j]));
        json_array_append_new(agents, json_string(r->names[a]));
        json_array_append_new(weights, row);
    }
    return json_pack("{s:s,s:o,s:f,s:o,s:o}", "format", FORMAT, "agents", agents, "l2", r->l2,
                     "fit", fit ? json_deep_copy(fit) : json_null(), "weights", weights);
}

void router_free(struct router *r) {
    if (!r) return;
    for (int a = 0; a < r->n_agents; a++) free(r->names[a]);
    free(r->weights);
    free(r);
}
