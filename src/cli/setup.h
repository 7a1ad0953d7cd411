/*
 * setup: opens and closes model, adapters and engine for run, embed, eval, debate and others.
 *
 * setup_open makes the memory plan from headers and then loads the model; the command loads its
 * adapters (setup_adapter) and requests the engine (setup_engine); setup_close prints the peak of
 * memory and the number of recorded calls, and releases everything.
 */
#ifndef SHOAL_CLI_SETUP_H
#define SHOAL_CLI_SETUP_H

#include "cli/cli.h"
#include "cluster/cluster.h"
#include "engine/engine.h"

/* The options of a command that can compute on a cluster. */
struct cluster_flags {
    char *address, *balancer, *verify;
    int64_t replicas;
};
struct setup_options {
    char *max_memory, *kv, *lora, *store;
    struct cluster_flags cluster;
    struct engine_limits limits;
    bool dry_run, record;
};
/* Rows of a command whose options struct `type` has a struct setup_options `field`. SETUP_WORK_ROWS
 * are those of a command whose dry run estimates the time as well. */
#define SETUP_ROW(opt, kind, type, field, fallback, metavar, ...)                                  \
    { opt, kind, offsetof(type, field), fallback, 0, 0, metavar, __VA_ARGS__ }
#define SETUP_ROWS(type, field) SETUP_ALL_ROWS(type, field, "print the memory plan and exit")
#define SETUP_WORK_ROWS(type, field)                                                               \
    SETUP_ALL_ROWS(type, field, "print the plan of memory, work and time, and exit")
#define SETUP_ALL_ROWS(type, field, dry_run_help)                                                  \
    SETUP_ROW("max-memory", OPT_STRING, type, field.max_memory, NULL, "SIZE",                      \
              "memory limit such as 100M or 2G, checked before anything is loaded", JOB_ARG_TEXT), \
        ENGINE_LIMIT_ROWS(type, field.limits),                                                     \
        SETUP_ROW("dry-run", OPT_BOOL, type, field.dry_run, NULL, NULL, dry_run_help),             \
        SETUP_ROW("kv-cache-dtype", OPT_STRING, type, field.kv, "auto", "ELEM",                    \
                  "number format of the KV cache: f32, bf16, f16, i8 or auto (f16; bf16 where "    \
                  "attention runs in bf16)",                                                       \
                  JOB_ARG_TEXT),                                                                   \
        SETUP_ROW("lora-dtype", OPT_STRING, type, field.lora, "f32", "ELEM",                       \
                  "number format of adapters: f32, bf16, f16 or i8", JOB_ARG_TEXT)
#define SETUP_RECORD_ROWS(type, field)                                                             \
    SETUP_ROW("record", OPT_BOOL, type, field.record, NULL, NULL,                                  \
              "store every call with its result, for 'shoal replay'"),                             \
        SETUP_ROW("store", OPT_STRING, type, field.store, SETUP_STORE, "FILE",                     \
                  "database of stored calls", JOB_ARG_SERVER_ONLY)
#define SETUP_STORE "runs/calls.db"
/* Rows of a command whose options struct `type` has a struct cluster_flags `field`; the second
 * macro is for a server. */
#define CLUSTER_ROWS(type, field)                                                                  \
    SERVER_CLUSTER_ROWS(type, field),                                                              \
        {"replicas",                                                                               \
         OPT_INT,                                                                                  \
         offsetof(type, field.replicas),                                                           \
         "1",                                                                                      \
         1,                                                                                        \
         UNIT_REPLICAS_MAX,                                                                        \
         "N",                                                                                      \
         "nodes that compute each call; the result of more than half of them stands"},             \
        SETUP_ROW("verify", OPT_STRING, type, field.verify, "majority", "HOW",                     \
                  "how --replicas agree: majority, or pbft (4 to 7 nodes sign and commit "         \
                  "each result)",                                                                  \
                  JOB_ARG_TEXT)
#define SERVER_CLUSTER_ROWS(type, field)                                                           \
    SETUP_ROW("cluster", OPT_STRING, type, field.address, NULL, "ADDRESS",                         \
              "compute on a cluster: local:N starts N processes of this machine, "                 \
              "nats://HOST uses the nodes of a NATS server"),                                      \
        SETUP_ROW("balancer", OPT_STRING, type, field.balancer, "hybrid", "NAME",                  \
                  "how calls are distributed to nodes: hybrid, round_robin, least_loaded, "        \
                  "capability, adapter or prefix",                                                 \
                  JOB_ARG_TEXT)
/* Starts the cluster of the options. */
struct cluster *cluster_flags_open(const struct cluster_flags *f, const struct cli_options *c,
                                   size_t max_memory, bool streams, struct engine *e,
                                   struct model *m, struct error *err);

struct setup {
    const struct cli_options *c;
    const struct setup_options *o;
    size_t limit; /* bytes; 0: none */
    char *path;
    struct pool *pool;
    struct model *m; /* NULL after --dry-run, unless the command estimates its time */
    struct memory_plan plan;
    struct engine_options engine; /* for setup_engine; the command may change them before */
    struct engine *e;
    struct recorded_adapter *adapters; /* absolute paths; owns both */
    int n_adapters;
    bool streams; /* for a server: the cluster streams the tokens of replies */
    struct recorder recorder;
    struct cluster *cluster; /* of --cluster, or NULL */
};
/* Upper bounds of what a command needs: engine options for unlimited memory, the paths of its
 * adapters
 * ("base": no adapter), and bytes. */
struct setup_needs {
    struct engine_options engine; /* max_len 0: memory_plan_context; pool NULL: its own */
    size_t limit;                 /* share of --max-memory if there are several models; 0: all */
    size_t available;             /* the same without --max-memory; 0: memory_usable */
    const struct strings *adapters;
    size_t work;     /* bytes outside of the engine */
    size_t requests; /* bytes of a server's requests: see struct memory_plan_input */
    bool pooled;     /* a server evicts adapters: only the largest of `adapters` must fit */
    bool session;    /* room to load and save the state of one sequence */
    bool estimates;  /* after the plan of a dry run the model is loaded for setup_print_work */
};
/* Opens the store of --store, and creates its folder. */
struct store *setup_store(const struct setup *s, struct error *err);
/* Computes the total bytes with the smallest engine that works, and with the requested one. */
int setup_memory_bounds(const struct cli_options *c, const struct setup_options *o,
                        const char *model, const struct setup_needs *w, size_t *min_bytes,
                        size_t *max_bytes, struct error *err);
int setup_open(struct setup *s, const struct cli_options *c, const struct setup_options *o,
               const char *model, const struct setup_needs *w, struct error *err);
/* Loads an adapter, which setup_close releases; an equal path returns the same adapter. */
struct adapter *setup_adapter(struct setup *s, const char *path, struct error *err);
/* setup_adapter with the signature that team_load_adapters requires. */
struct adapter *setup_load_adapter(void *setup, const char *path, struct error *err);
/* Creates the engine, the recorder for --record, and the cluster of --cluster. */
int setup_engine(struct setup *s, struct error *err);
/* Ends a dry run of a command that counted its requests: measures their speed, and prints work and
 * time; with --json in one object with the memory plan. */
int setup_print_work(struct setup *s, struct work_counter *c, struct error *err);
/* Prints the peak that the system measured, and warns if it exceeds the limit (0: no limit). */
void setup_print_peak_memory(const struct cli_options *c, size_t limit);
/* Returns rc, or the error of the recorder. */
int setup_close(struct setup *s, int rc, struct error *err);

#endif
