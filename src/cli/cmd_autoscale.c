/*
 * cmd_autoscale: `shoal autoscale`: starts and removes nodes by their load, back-tests the decision
 * on a recorded load, and prints YAML for Kubernetes.
 */
#define _GNU_SOURCE
#include "cli/autoscale_metrics.h"
#include "cli/cli.h"
#include "cli/compatibility.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    struct scaling_options scaling;
    struct target_options target;
    struct strings metrics; /* addresses */
    char *metrics_key_env, *host, *backtest, *image, *prometheus;
    int64_t port, evaluations;
    bool print_kubernetes;
};

#define ROW(name, type, member, ...)                                                               \
    { name, type, offsetof(struct options, member), __VA_ARGS__ }
static const struct option_row rows[] = {
    ROW("target", OPT_STRING, target.target, NULL, 0, 0, "TARGET",
        "target: local (nodes of a cluster on this machine) or kubernetes (a Deployment)"),
    ROW("command", OPT_STRING, target.command, NULL, 0, 0, "CMD",
        "scale by this command, which gets the number of nodes as its last argument"),
    ROW("metrics", OPT_LIST, metrics, NULL, 0, 0, "URL",
        "/metrics of the servers whose load counts (default with kubernetes: those of the pods)"),
    ROW("metrics-key-env", OPT_STRING, metrics_key_env, NULL, 0, 0, "VAR",
        "environment variable with the key of the servers"),
    ROW("backtest", OPT_STRING, backtest, NULL, 0, 0, "FILE",
        "print the errors of the predictors on a recorded load (the lines of --json)"),
    ROW("print-kubernetes", OPT_BOOL, print_kubernetes, NULL, 0, 0, NULL,
        "print YAML for servers of a model, their autoscaler and its rights, and their metrics"),
    ROW("model", OPT_STRING, target.model, NULL, 0, 0, "MODEL", "the model of the nodes"),
    ROW("join", OPT_STRING, target.join, NULL, 0, 0, "ADDRESS",
        "local: address of the cluster, nats://HOST"),
    ROW("node-options", OPT_STRING, target.node_options, NULL, 0, 0, "WORDS",
        "local: options of 'shoal node', as --node-options='--exact --threads 2'"),
    ROW("drain-seconds", OPT_FLOAT, target.drain_seconds, "60", 0, 3600, "SECONDS",
        "local: time for a removed node to end its work"),
    ROW("deployment", OPT_STRING, target.deployment, NULL, 0, 0, "NAME",
        "kubernetes: the Deployment (default of --print-kubernetes: shoal)"),
    ROW("namespace", OPT_STRING, target.namespace, NULL, 0, 0, "NAME",
        "kubernetes: its namespace (default: that of the pod; of --print-kubernetes: default)"),
    ROW("kubernetes-api", OPT_STRING, target.api, NULL, 0, 0, "URL",
        "kubernetes: address of the API (default: that of the pod)"),
    ROW("service-account", OPT_STRING, target.account, NULL, 0, 0, "DIR",
        "kubernetes: folder with token, ca.crt and namespace (default: that of the pod)"),
    ROW("metrics-port", OPT_INT, target.metrics_port, "8000", 1, 65535, "N",
        "kubernetes: port of the servers"),
    ROW("image", OPT_STRING, image, "shoal:" SHOAL_VERSION, 0, 0, "IMAGE",
        "--print-kubernetes: the image of servers and autoscaler"),
    ROW("prometheus", OPT_STRING, prometheus, "http://prometheus-operated.monitoring:9090", 0, 0,
        "URL", "--print-kubernetes: the Prometheus that KEDA asks"),
    ROW("port", OPT_INT, port, "0", 0, 65535, "N", "port of this program's own /metrics; 0: none"),
    ROW("host", OPT_STRING, host, "127.0.0.1", 0, 0, "ADDRESS", "address of that port"),
    ROW("evaluations", OPT_INT, evaluations, "0", 0, 1e9, "N",
        "end after this number of evaluations; 0: none"),
    {0},
};
#undef ROW
static const struct option_table more[] = {
    {scaling_option_rows, offsetof(struct options, scaling), "decision"}, {0}};

/* the configuration file */

/* Keys of the section `monitoring` that concern this command; the others get a note. */
static int monitoring_load(struct options *o, const struct yaml *y, struct error *err) {
    json_t *section = json_object_get(y->root, "monitoring");
    const json_t *enabled = json_object_get(section, "enable_prometheus"),
                 *port = json_object_get(section, "prometheus_port");
    double n = port ? json_number_value(port) : 8000;
    if (json_is_true(enabled) && !(n >= 1 && n <= 65535 && n == (int64_t)n)) {
        error_set(err, ERR_USAGE, "expected a port from 1 to 65535");
        return yaml_error_wrap(y, "monitoring.prometheus_port", err);
    }
    if (json_is_true(enabled)) o->port = (int64_t)n;
    json_object_del(section, "enable_prometheus");
    json_object_del(section, "prometheus_port");
    return OK;
}

/* The section `autoscaling` has the options of this command. The other sections belong to the
 * configuration of another program, whose keys get a note. */
static int recipe_load(void *options, const char *path, struct error *err) {
    struct options *o = options;
    struct yaml y;
    if (yaml_load(&y, path, err) != OK) return err->code;
    struct option_row *all = options_join(rows, more);
    int rc = options_from_yaml(all, o, &y, "autoscaling", err);
    if (rc == OK && !json_object_get(y.root, "autoscaling"))
        rc = error_set(err, ERR_USAGE, "'%s' has no section 'autoscaling'", path);
    if (rc == OK) rc = monitoring_load(o, &y, err);
    json_object_del(y.root, "autoscaling");
    if (rc == OK) compatibility_note_keys(&y);
    free(all);
    yaml_release(&y);
    return rc;
}

/* the back-test */

static json_t *figures_json(const struct backtest_figures *f) {
    return json_pack("{s:f,s:f,s:f}", "mae", f->mae, "under_provisioned", f->under, "nodes",
                     f->nodes);
}

static void result_print(const struct cli_options *c, const struct backtest_result *r) {
    bool enough = r->points >= BACKTEST_MIN_POINTS;
    if (c->json)
        cli_print_json(enough ? json_pack("{s:s,s:i,s:o,s:o,s:b}", "predictor", r->predictor->name,
                                          "points", r->points, "predicting",
                                          figures_json(&r->figures), "reacting",
                                          figures_json(&r->reacting), "better", (int)r->better)
                              : json_pack("{s:s,s:i,s:b}", "predictor", r->predictor->name,
                                          "points", r->points, "better", 0));
    else if (enough)
        printf("%-14s %7d %8.4f %8.4f %8.1f %% %8.1f %% %7.2f %7.2f  %s\n", r->predictor->name,
               r->points, r->figures.mae, r->reacting.mae, 100 * r->figures.under,
               100 * r->reacting.under, r->figures.nodes, r->reacting.nodes,
               r->better ? translate("used") : translate("not used"));
    else
        printf("%-14s %7d  %s\n", r->predictor->name, r->points, translate("too few points"));
}

static int backtest(const struct cli_options *c, const struct options *o, struct error *err) {
    struct backtest_result v[N_PREDICTORS];
    double *demand;
    int n;
    if (scaling_load_file(&o->scaling, o->backtest, &demand, &n, err) != OK) return err->code;
    scaling_backtest(&o->scaling, demand, n, v);
    free(demand);
    if (!c->json)
        printf("%-14s %7s %17s %21s %15s\n%-14s %7s %8s %8s %10s %10s %7s %7s\n", "", "",
               "mean error", "under-provisioned", "nodes", "predictor", "points", "predict",
               "react", "predict", "react", "predict", "react");
    for (int i = 0; i < N_PREDICTORS; i++) result_print(c, &v[i]);
    return OK;
}

/* Kubernetes */

static int kubernetes_print(const struct options *o, struct error *err) {
    const struct target_options *t = &o->target;
    const struct manifest_options m = {.image = o->image,
                                       .model = t->model ? t->model : "models/fry",
                                       .namespace = t->namespace ? t->namespace : "default",
                                       .deployment = t->deployment ? t->deployment : "shoal",
                                       .prometheus = o->prometheus,
                                       .scaling = &o->scaling,
                                       .port = t->metrics_port};
    struct buf out = {0};
    int rc = scaling_manifests(&m, &out, err);
    if (rc == OK) fputs(out.data, stdout);
    buf_release(&out);
    return rc;
}

/* the loop */

static atomic_bool stop;

static void stop_set(int signal_number) {
    (void)signal_number;
    atomic_store(&stop, true);
}

struct autoscaler {
    const struct options *o;
    bool json;
    struct load_reader *reader;
    struct scaling_target *target;
    struct autoscale_metrics *metrics;
    struct scaling_state state;
    struct scaling_history history;
};

static void load_measure(struct autoscaler *a, struct scaling_load *out) {
    struct strings urls = {0};
    struct error err;
    for (int i = 0; i < a->o->metrics.n; i++) strings_add(&urls, a->o->metrics.v[i]);
    int rc = urls.n ? OK : scaling_target_sources(a->target, &urls, &err);
    if (rc == OK) rc = load_read(a->reader, &urls, out, &err);
    if (rc != OK) *out = (struct scaling_load){NAN, NAN, NAN};
    if (rc != OK && rc != ERR_STATE) log_warn("%s", err.text);
    strings_release(&urls);
}

static void decision_print(const struct autoscaler *a, const struct scaling_decision *d,
                           const char *failure) {
    char utc[32];
    json_t *v = scaling_decision_json(d);
    json_object_set_new(v, "time", json_string(clock_utc(utc)));
    json_object_set_new(
        v, "carried_out",
        json_boolean(d->action == SCALING_HOLD || (a->o->scaling.enable && !failure)));
    if (failure) json_object_set_new(v, "error", json_string_lossy(failure, strlen(failure)));
    if (a->json) {
        cli_print_json(v);
    } else {
        json_decref(v);
        printf("%s  %d -> %d  %s (%s)  score %.2f  cpu %.2f  memory %.2f  queue %.2f", utc, d->from,
               d->to, scaling_action_names[d->action], scaling_reason_names[d->reason], d->score,
               d->load.cpu, d->load.memory, d->load.queue);
        if (d->predictor) printf("  %s %.2f", d->predictor, d->predicted);
        putchar('\n');
    }
    fflush(stdout);
}

static void evaluate(struct autoscaler *a) {
    const struct scaling_options *o = &a->o->scaling;
    struct scaling_event e = {.kind = SCALING_LOAD, .now = clock_now()};
    struct error err;
    bool failed = false;
    if (scaling_target_nodes(a->target, &e.nodes, &err) != OK) {
        log_warn("no decision: %s", err.text);
        return;
    }
    load_measure(a, &e.load);
    scaling_history_add(&a->history, scaling_score(o, &e.load) * MAX(e.nodes, 1));
    const struct predictor *p = scaling_predict(o, &a->history, &e.demand);
    e.predictor = p ? p->name : NULL;
    struct scaling_decision d = scaling_step(o, &a->state, &e);
    if (d.action != SCALING_HOLD && o->enable)
        failed = scaling_target_set(a->target, d.to, &err) != OK;
    if (failed) log_warn("%s", err.text);
    if (failed) scaling_step(o, &a->state, &(struct scaling_event){.kind = SCALING_FAILED});
    decision_print(a, &d, failed ? err.text : NULL);
    autoscale_metrics_add(a->metrics, &d, failed);
}

/* Waits until the time, the target's end or a signal. */
static int wait_until(struct autoscaler *a, double time, struct error *err) {
    enum { SLICE_MICROSECONDS = 50000 };
    int rc = OK;
    while (rc == OK && !atomic_load(&stop) && clock_now() < time) {
        rc = scaling_target_check(a->target, err);
        double left = MAX(time - clock_now(), 0) * 1e6;
        usleep((useconds_t)MIN(left, SLICE_MICROSECONDS));
    }
    return rc;
}

/* The first reading of the load only sets the counters' beginning, so the first decision is made
 * after an interval. */
static int loop(struct autoscaler *a, struct error *err) {
    struct scaling_load ignored;
    double next = clock_now();
    int rc = OK;
    scaling_init(&a->state);
    load_measure(a, &ignored);
    for (int64_t i = 0; rc == OK && (!a->o->evaluations || i < a->o->evaluations); i++) {
        next = MAX(next + a->o->scaling.interval, clock_now());
        rc = wait_until(a, next, err);
        if (rc != OK || atomic_load(&stop)) break;
        evaluate(a);
    }
    return rc;
}

static int scale(const struct cli_options *c, const struct options *o, struct error *err) {
    struct autoscaler *a = xcalloc(1, sizeof *a);
    struct sigaction action = {.sa_handler = stop_set, .sa_flags = SA_RESETHAND};
    a->o = o;
    a->json = c->json;
    int rc = ERR_STATE;
    a->reader = load_reader_new(o->scaling.max_queue, o->metrics_key_env, err);
    if (!a->reader) goto out;
    a->metrics = autoscale_metrics_open(o->host, o->port, err);
    if (!a->metrics) goto out;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    a->target = scaling_target_open(&o->target, (int)o->scaling.min_nodes, err);
    if (!a->target) goto out;
    rc = loop(a, err);
out:
    if (rc != OK) rc = err->code;
    scaling_target_close(a->target);
    autoscale_metrics_close(a->metrics);
    load_reader_free(a->reader);
    free(a);
    return rc;
}

static bool is_kubernetes(const struct options *o) {
    return o->target.target && strcmp(o->target.target, "kubernetes") == 0;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (args->n && !cli_is_recipe(args->v[0]))
        return error_set(err, ERR_USAGE, "'%s' is not the name of a YAML file (.yaml, .yml)",
                         args->v[0]);
    if (o->backtest && o->print_kubernetes)
        return error_set(err, ERR_USAGE, "--backtest and --print-kubernetes exclude each other");
    if (scaling_options_check(&o->scaling, err) != OK) return err->code;
    if (o->print_kubernetes) return kubernetes_print(o, err);
    if (o->backtest) return backtest(c, o, err);
    if (!o->metrics.n && !is_kubernetes(o))
        return error_set(err, ERR_USAGE,
                         "name the load with --metrics URL, such as http://127.0.0.1:8000/metrics");
    return scale(c, o, err);
}

const struct cli_command cmd_autoscale = {
    .name = "autoscale",
    .args = "[FILE.yaml]",
    .summary = "start and remove nodes by their load",
    .about =
        "Reads the load of servers once a minute and changes the number of nodes: of a cluster\n"
        "on this machine, of a Deployment of Kubernetes, or by a command. Every decision is a\n"
        "line with its inputs and its reason. SIGTERM or Ctrl-C ends it; local nodes end their\n"
        "work first. FILE.yaml has options in its section 'autoscaling'.\n"
        "\n"
        "  shoal autoscale --target local --model models/fry --join nats://127.0.0.1 \\\n"
        "      --metrics http://127.0.0.1:8000/metrics\n"
        "  shoal autoscale --command ./set-nodes.sh --metrics http://127.0.0.1:8000/metrics\n"
        "  shoal autoscale --backtest decisions.jsonl\n"
        "  shoal autoscale --print-kubernetes | kubectl apply -f -",
    .main_options = "target command metrics metrics-key-env backtest print-kubernetes model join "
                    "deployment enable strategy min-nodes max-nodes scale-out scale-in predictor "
                    "port",
    .rows = rows,
    .more = more,
    .recipe_load = recipe_load,
    .size = sizeof(struct options),
    .max_args = 1,
    .run = run,
};
