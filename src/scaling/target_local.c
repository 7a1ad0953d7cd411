/*
 * target_local: nodes of a cluster as processes of this machine.
 */
#include "cluster/cluster.h"
#include "scaling/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* "shoal node MODEL" with the user's options. */
static int args_make(const struct target_options *o, struct strings *args, struct error *err) {
    strings_add(args, "node");
    strings_add(args, o->model);
    strings_add(args, "--quiet");
    if (o->node_options && !strings_add_words(args, o->node_options))
        return error_set(err, ERR_USAGE, "--node-options: a quote is not closed");
    return OK;
}

static void *local_open(const struct target_options *o, int min_nodes, struct error *err) {
    char host[48] = "node";
    struct strings args = {0};
    struct local_nodes *l = NULL;
    if (!o->model || !o->join) {
        error_set(err, ERR_USAGE,
                  "--target local needs --model MODEL and the address of the cluster, --join "
                  "nats://HOST");
        return NULL;
    }
    gethostname(host, sizeof host - 1);
    char *prefix = xasprintf("%.*s-%d", (int)strcspn(host, "."), host, (int)getpid());
    if (args_make(o, &args, err) == OK)
        l = local_nodes_start(min_nodes,
                              &(struct local_nodes_options){.args = &args,
                                                            .address = o->join,
                                                            .prefix = prefix,
                                                            .drain_seconds = o->drain_seconds},
                              err);
    strings_release(&args);
    free(prefix);
    return l;
}

static int local_nodes_count(void *state, int *n, struct error *err) {
    (void)err;
    *n = local_nodes_needed(state);
    return OK;
}

static int local_set(void *state, int n, struct error *err) {
    return local_nodes_resize(state, n, err);
}

static void node_ended(void *ctx, const char *name) {
    (void)ctx;
    log_info("the node '%s' has ended", name);
}

static int local_check(void *state, struct error *err) {
    return local_nodes_check(state, node_ended, NULL, err);
}

static void local_close(void *state) {
    local_nodes_drain(state);
}

const struct target_kind target_local = {.name = "local",
                                         .open = local_open,
                                         .nodes = local_nodes_count,
                                         .set = local_set,
                                         .check = local_check,
                                         .close = local_close};
