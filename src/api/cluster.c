/*
 * cluster: the nodes of the server's cluster, and their metrics.
 */
#include "cluster/cluster.h"

#include "api/internal.h"
#include "serve/generation.h"

#include <string.h>

static void cluster_handle(void *ctx, struct exchange *x) {
    const struct server *s = ctx;
    if (!s->options->cluster) {
        api_fail(x, 404, NULL, NULL, "no_cluster",
                 "this server has no cluster; start it with --cluster");
        return;
    }
    exchange_reply_json(x, 200, cluster_status_json(s->options->cluster));
}

static void cluster_metrics_set(struct server *s, const json_t *status) {
    const json_t *node;
    double counts[NODE_QUARANTINED + 1] = {0};
    int active = 0;
    size_t i;
    json_array_foreach (json_object_get(status, "nodes"), i, node) {
        const char *state = json_get_string(node, "state");
        for (int k = 0; k <= NODE_QUARANTINED; k++)
            counts[k] += strcmp(state, node_state_names[k]) == 0;
        active += strcmp(state, node_state_names[NODE_UP]) == 0 &&
                  json_is_true(json_object_get(node, "usable"));
    }
    for (int k = 0; k <= NODE_QUARANTINED; k++)
        metric_set(metric_get(s->metrics, METRIC_CLUSTER_NODES, node_state_names[k]), counts[k]);
    metric_set(metric_get(s->metrics, METRIC_MURMUR_NODES), active);
    metric_set_total(metric_get(s->metrics, METRIC_CLUSTER_HERE),
                     json_get_number(status, "computed_here"));
}

static void update_metrics(struct server *s) {
    if (!s->options->cluster) {
        metric_set(metric_get(s->metrics, METRIC_MURMUR_NODES), 1);
        return;
    }
    json_t *status = cluster_status_json(s->options->cluster);
    cluster_metrics_set(s, status);
    json_decref(status);
}

static const struct http_route routes[] = {
    {"GET", "/v1/cluster", SCOPE_METRICS, cluster_handle},
    {0},
};

const struct server_module cluster_module = {.routes = routes, .update_metrics = update_metrics};
