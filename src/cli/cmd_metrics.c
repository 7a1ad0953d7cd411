/* cmd_metrics: `shoal metrics`: lists the metrics of `shoal serve`, and prints alert rules and a
 * dashboard for them. It contacts no server; the output is the same on every machine. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

struct options {
    bool rules, dashboard;
};
static const struct option_row rows[] = {
    {"rules", OPT_BOOL, offsetof(struct options, rules), NULL, 0, 0, NULL,
     "print alert rules, a file for Prometheus' rule_files"},
    {"dashboard", OPT_BOOL, offsetof(struct options, dashboard), NULL, 0, 0, NULL,
     "print a dashboard to import into Grafana"},
    {0},
};

static json_t *family_json(const struct metric_family *f) {
    json_t *labels = json_array();
    for (int i = 0; i < f->n_labels; i++) json_array_append_new(labels, json_string(f->labels[i]));
    return json_pack("{s:s,s:s,s:o,s:s}", "name", f->name, "type", metric_type_name(f->type),
                     "labels", labels, "help", f->help);
}

static void family_print(const struct metric_family *f) {
    char *labels = xstrdup("");
    for (int i = 0; i < f->n_labels; i++) {
        char *more = xasprintf("%s%s%s", labels, i ? "," : "", f->labels[i]);
        free(labels);
        labels = more;
    }
    printf("%-9s  %s%s%s%s\n           %s\n", metric_type_name(f->type), f->name,
           *labels ? "{" : "", labels, *labels ? "}" : "", f->help);
    free(labels);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct buf text = {0};
    (void)args;
    if (o->rules && o->dashboard)
        return error_set(err, ERR_USAGE, "--rules and --dashboard exclude each other");
    if (c->json && (o->rules || o->dashboard)) {
        cli_print_json(o->rules ? metrics_alert_rules() : metrics_dashboard());
    } else if (o->rules) {
        metrics_alert_rules_yaml(&text);
        fputs(text.data, stdout);
        buf_release(&text);
    } else if (o->dashboard) {
        json_t *v = metrics_dashboard();
        json_dumpf(v, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(v);
    } else {
        for (int i = 0; i < N_METRICS; i++)
            if (c->json)
                cli_print_json(family_json(&metric_families[i]));
            else
                family_print(&metric_families[i]);
    }
    return OK;
}

const struct cli_command cmd_metrics = {
    .name = "metrics",
    .args = "",
    .summary = "list the metrics of a server; print alert rules and a dashboard",
    .about =
        "Lists the metrics that GET /metrics of 'shoal serve' may contain: type, name, labels\n"
        "and meaning.\n"
        "\n"
        "  shoal metrics --rules >shoal-rules.yaml          (rule_files of Prometheus)\n"
        "  shoal metrics --dashboard >shoal-dashboard.json  (Dashboards > Import of Grafana)",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run,
};
