/*
 * cmd_node: `shoal node MODEL`: a process that computes calls for a cluster.
 */
#include "cli/setup.h"
#include "cluster/cluster.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    struct setup_options setup;
    char *join, *name;
};
static const struct option_row rows[] = {
    {"join", OPT_STRING, offsetof(struct options, join), NULL, 0, 0, "ADDRESS",
     "address of the cluster: nats://HOST"},
    {"name", OPT_STRING, offsetof(struct options, name), NULL, 0, 0, "NAME",
     "name of the node (default: the host's name and the process's number)", JOB_ARG_TEXT},
    SETUP_ROWS(struct options, setup),
    {0},
};

enum { NODE_MAX_LEN = 4096 }; // without --max-model-len

static atomic_bool leave;

static void leave_set(int signal_number) {
    (void)signal_number;
    atomic_store(&leave, true);
}

/* The first SIGTERM or SIGINT makes the node leave, the second one ends it. */
static void signals_handle(void) {
    struct sigaction a = {.sa_handler = leave_set, .sa_flags = SA_RESETHAND};
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
}

static char *node_name(const struct options *o) {
    char host[NODE_NAME_MAX - 16] = "node";
    if (o->name) return xstrdup(o->name);
    gethostname(host, sizeof host - 1);
    return xasprintf("%s-%d", host, (int)getpid());
}

static int name_check(const char *name, struct error *err) {
    if (node_name_is_valid(name)) return OK;
    return error_set(err, ERR_USAGE,
                     "the name of a node has letters, digits, '_' and '-', at most %d",
                     NODE_NAME_MAX - 1);
}

static int node_start(const struct options *o, struct setup *s, const char *name,
                      struct error *err) {
    if (setup_engine(s, err) != OK || !model_hash(s->m, err)) return err->code;
    const struct node_options node = {.address = o->join,
                                      .name = name,
                                      .engine = s->e,
                                      .model = s->m,
                                      .threads = pool_size(s->pool),
                                      .leave = &leave};
    signals_handle();
    return node_run(&node, err);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct setup s = {0};
    const struct setup_needs w = {.engine = {.max_rows = 512,
                                             .max_seqs = 64,
                                             .max_len = o->setup.limits.max_len
                                                            ? (int32_t)o->setup.limits.max_len
                                                            : NODE_MAX_LEN}};
    if (!o->join)
        return error_set(err, ERR_USAGE,
                         "a node needs --join nats://HOST; '--cluster local:N' of other commands "
                         "starts its nodes itself");
    char *name = node_name(o);
    int rc = name_check(name, err);
    struct log_sink silent = {0}; // no plan of each local node
    struct log_sink *before = c->quiet ? log_set_sink(&silent) : NULL;
    if (rc == OK) rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
    if (c->quiet) log_set_sink(before);
    if (rc == OK && s.m) rc = node_start(o, &s, name, err);
    free(name);
    return setup_close(&s, rc, err);
}

const struct cli_command cmd_node = {
    .name = "node",
    .args = "MODEL",
    .summary = "compute for a cluster on this machine",
    .about =
        "Joins a cluster and computes its calls. The model and the class are those of the command\n"
        "that has the calls. '--cluster local:N' of other commands starts N nodes itself.\n"
        "SIGTERM or Ctrl-C makes the node leave when it has computed its units; a second one\n"
        "ends it at once.\n"
        "\n"
        "  shoal node models/fry --join nats://192.168.1.10\n"
        "  shoal eval models/fry --tasks starter --cluster nats://192.168.1.10\n"
        "  shoal eval models/fry --tasks starter --cluster local:2",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
