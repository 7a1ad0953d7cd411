/*
 * metrics_alert_rules: exports for other programs: alert rules for Prometheus and a dashboard for
 * Grafana. A rule names families by their ids, and the dashboard has a panel for each family with a
 * section. So neither of them can name a metric that does not exist.
 */
#define _GNU_SOURCE
#include "ops/ops.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

const struct alert_rule alert_rules[N_ALERT_RULES] = {
    {"ShoalAbsent", "critical", 300, ALERT_ABSENT, 0, METRIC_BUILD, 0, "No Shoal server answers."},
    {"ShoalNoActiveNodes", "critical", 60, ALERT_BELOW, 1, METRIC_MURMUR_NODES, 0,
     "No node is active."},
    {"ShoalCpuHigh", "warning", 300, ALERT_RATE, 0.8, METRIC_PROCESS_CPU, METRIC_CPUS,
     "The server uses more than 80 % of its processors."},
    {"ShoalMemoryHigh", "warning", 300, ALERT_USAGE, 0.85, METRIC_HOST_AVAILABLE,
     METRIC_HOST_MEMORY, "More than 85 % of the machine's memory is in use."},
    {"ShoalMemoryBudget", "warning", 120, ALERT_RATIO, 0.95, METRIC_PROCESS_RESIDENT,
     METRIC_MEMORY_BUDGET, "The server is within 5 % of its memory budget."},
    {"ShoalErrorRatio", "critical", 300, ALERT_RATE_RATIO, 0.1, METRIC_FAILED, METRIC_RECEIVED,
     "More than 10 % of requests fail."},
    {"ShoalLoopRatio", "warning", 300, ALERT_RATE_RATIO, 0.1, METRIC_ADAPTER_LOOPS,
     METRIC_ADAPTER_REQUESTS, "More than 10 % of replies end in a loop of the same tokens."},
    {"ShoalQueueWaiting", "warning", 300, ALERT_ABOVE, 50, METRIC_VLLM_WAITING, 0,
     "More than 50 requests wait for a place in the batch."},
    {"ShoalFirstTokenSlow", "warning", 600, ALERT_P95, 10, METRIC_VLLM_TTFT, 0,
     "One request in 20 waits more than 10 seconds for its first token."},
    {"ShoalLossNaN", "critical", 0, ALERT_NOT_FINITE, 0, METRIC_TRAIN_LOSS, 0,
     "The loss of a training is not a number any more."},
    {"ShoalJobFailed", "warning", 0, ALERT_FAILED, 0, METRIC_JOBS_ENDED, 0, "A job failed."},
    {"ShoalWorldStalled", "warning", 600, ALERT_UNCHANGED, 0, METRIC_WORLD_SPEED, 0,
     "The agents of a world take no decisions."},
    {"ShoalRestartsOften", "warning", 0, ALERT_RESTARTS, 3, METRIC_PROCESS_START, 0,
     "The server restarted more than three times in an hour."},
};

/* PromQL expressions of the conditions. $a and $b are replaced by the families' names, $l by the
 * limit. */
static const char *const condition_expressions[] = {
    [ALERT_ABSENT] = "absent($a)",
    [ALERT_BELOW] = "$a < $l",
    [ALERT_UNCHANGED] = "changes($a[5m]) == 0",
    [ALERT_ABOVE] = "$a > $l",
    [ALERT_RATIO] = "$a / $b > $l",
    [ALERT_USAGE] = "1 - $a / $b > $l",
    [ALERT_RATE] = "rate($a[5m]) / $b > $l",
    [ALERT_RATE_RATIO] =
        "sum without (adapter) (rate($a[5m])) / sum without (adapter) (rate($b[5m])) > $l",
    [ALERT_P95] = "histogram_quantile(0.95, rate($a_bucket[5m])) > $l",
    [ALERT_NOT_FINITE] = "$a != $a or abs($a) == Inf",
    [ALERT_FAILED] = ("increase($a{state=\"failed\"}[15m]) > 0 or"
                      " ($a{state=\"failed\"} unless $a{state=\"failed\"} offset 15m) > 0"),
    [ALERT_RESTARTS] = "changes($a[1h]) > $l",
};

static json_t *rule_expression(const struct alert_rule *r) {
    struct buf b = {0};
    for (const char *p = condition_expressions[r->condition]; *p; p++) {
        if (*p != '$')
            buf_add(&b, p, 1);
        else if (*++p == 'l')
            buf_printf(&b, "%g", r->limit);
        else
            buf_puts(&b, metric_families[*p == 'a' ? r->a : r->b].name);
    }
    json_t *v = json_string(b.data);
    buf_release(&b);
    return v;
}

json_t *metrics_alert_rules(void) {
    json_t *list = json_array();
    for (size_t i = 0; i < N_ALERT_RULES; i++) {
        const struct alert_rule *r = &alert_rules[i];
        char for_text[16];
        snprintf(for_text, sizeof for_text, "%dm", r->for_seconds / 60);
        json_array_append_new(list,
                              json_pack("{s:s,s:o,s:s,s:{s:s},s:{s:s}}", "alert", r->name, "expr",
                                        rule_expression(r), "for", for_text, "labels", "severity",
                                        r->severity, "annotations", "summary", r->summary));
    }
    return json_pack("{s:[{s:s,s:o}]}", "groups", "name", "shoal", "rules", list);
}

/* Writes mappings, sequences of mappings, and strings as YAML; a JSON string is valid YAML.
 * after_dash: the dash of a sequence begins the current line, and the first key follows on the same
 * line. */
static void yaml_write(struct buf *b, json_t *v, int depth, bool after_dash) {
    const char *key;
    json_t *item;
    size_t i;
    if (json_is_string(v)) {
        char *text = json_dumps(v, JSON_ENCODE_ANY);
        buf_printf(b, " %s\n", text);
        free(text);
        return;
    }
    if (depth && !after_dash) buf_puts(b, "\n");
    json_object_foreach (v, key, item) {
        buf_printf(b, "%*s%s:", after_dash ? 0 : 2 * depth, "", key);
        after_dash = false;
        yaml_write(b, item, depth + 1, false);
    }
    json_array_foreach (v, i, item) {
        buf_printf(b, "%*s- ", 2 * depth, "");
        yaml_write(b, item, depth + 1, true);
    }
}

void metrics_alert_rules_yaml(struct buf *out) {
    json_t *rules = metrics_alert_rules();
    buf_puts(out, "# Alerts of Shoal for Prometheus; written by 'shoal metrics --rules'.\n");
    yaml_write(out, rules, 0, false);
    json_decref(rules);
}

/* dashboard */

enum { PANEL_WIDTH = 8, PANELS_ACROSS = 3, PANEL_HEIGHT = 7 };

/* Grafana's name for the unit at the end of a metric's name. Counters are shown as rates, so a
 * counter of seconds is shown as a share. */
static const char *grafana_unit(const struct metric_family *f) {
    static const char *const units[][2] = {
        {"_bytes", "bytes"},
        {"_seconds", "s"},
        {"_ratio", "percentunit"},
        {"_perc", "percentunit"},
        {"_seconds_total", "percentunit"},
    };
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if (text_ends_with(f->name, units[i][0])) return units[i][1];
    return "short";
}

/* A legend with the family's labels, such as "{{model_name}} {{engine}}"; malloc'ed. */
static char *legend_format(const struct metric_family *f, const char *prefix) {
    struct buf b = {0};
    buf_puts(&b, prefix);
    for (int i = 0; i < f->n_labels; i++)
        buf_printf(&b, "%s{{%s}}", b.len ? " " : "", f->labels[i]);
    if (!b.len) buf_puts(&b, "{{instance}}");
    return b.data;
}

static json_t *source_json(void) {
    return json_pack("{s:s,s:s}", "type", "prometheus", "uid", "${datasource}");
}

/* Adds a curve to a panel. Takes ownership of expr and legend. */
static void target_add(json_t *targets, char *expr, char *legend) {
    char letter[2] = {(char)('A' + json_array_size(targets)), 0};
    json_array_append_new(targets, json_pack("{s:s,s:o,s:s,s:s}", "refId", letter, "datasource",
                                             source_json(), "expr", expr, "legendFormat", legend));
    free(expr);
    free(legend);
}

#define INSTANCE_FILTER "{instance=~\"$instance\"}"

static json_t *targets_json(const struct metric_family *f) {
    static const struct {
        const char *name, *q;
    } quantiles[] = {{"p50", "0.5"}, {"p90", "0.9"}, {"p99", "0.99"}};
    json_t *targets = json_array();
    if (f->type == METRIC_TYPE_COUNTER)
        target_add(targets, xasprintf("rate(%s" INSTANCE_FILTER "[$__rate_interval])", f->name),
                   legend_format(f, ""));
    else if (f->type != METRIC_TYPE_HISTOGRAM)
        target_add(targets, xasprintf("%s" INSTANCE_FILTER, f->name), legend_format(f, ""));
    for (size_t i = 0; f->type == METRIC_TYPE_HISTOGRAM && i < ARRAY_LEN(quantiles); i++)
        target_add(targets,
                   xasprintf("histogram_quantile(%s, rate(%s_bucket" INSTANCE_FILTER
                             "[$__rate_interval]))",
                             quantiles[i].q, f->name),
                   legend_format(f, quantiles[i].name));
    return targets;
}

/* The name without prefix, "_total" and underscores, such as "Requests rejected"; malloc'ed. */
static char *panel_title(const struct metric_family *f) {
    const char *colon = strchr(f->name, ':');
    char *title = xstrdup(colon                                     ? colon + 1
                          : strncmp(f->name, "shoal_", 6) == 0      ? f->name + 6
                          : strncmp(f->name, "murmurnet_", 10) == 0 ? f->name + 10
                                                                    : f->name);
    if (text_ends_with(title, "_total")) title[strlen(title) - strlen("_total")] = 0;
    for (char *p = title; *p; p++)
        if (*p == '_') *p = ' ';
    title[0] = (char)toupper((unsigned char)title[0]);
    return title;
}

static json_t *grid_position(int x, int y, int w, int h) {
    return json_pack("{s:i,s:i,s:i,s:i}", "x", x, "y", y, "w", w, "h", h);
}

static json_t *panel_json(const struct metric_family *f, int id, int x, int y) {
    char *title = panel_title(f), *help = xasprintf("%s (%s)", f->help, f->name);
    json_t *v =
        json_pack("{s:i,s:s,s:s,s:s,s:o,s:{s:{s:s},s:[]},s:o,s:o}", "id", id, "type", "timeseries",
                  "title", title, "description", help, "datasource", source_json(), "fieldConfig",
                  "defaults", "unit", grafana_unit(f), "overrides", "targets", targets_json(f),
                  "gridPos", grid_position(x, y, PANEL_WIDTH, PANEL_HEIGHT));
    free(title);
    free(help);
    return v;
}

/* Adds the heading and panels of a section from line y on; returns the next free line. */
static int section_add(json_t *panels, const char *section, int y) {
    int n = 0;
    json_array_append_new(panels, json_pack("{s:i,s:s,s:s,s:b,s:[],s:o}", "id",
                                            (int)json_array_size(panels) + 1, "type", "row",
                                            "title", section, "collapsed", 0, "panels", "gridPos",
                                            grid_position(0, y++, PANEL_WIDTH * PANELS_ACROSS, 1)));
    for (int i = 0; i < N_METRICS; i++) {
        const struct metric_family *f = &metric_families[i];
        if (!f->section || strcmp(f->section, section) != 0) continue;
        json_array_append_new(panels, panel_json(f, (int)json_array_size(panels) + 1,
                                                 n % PANELS_ACROSS * PANEL_WIDTH,
                                                 y + n / PANELS_ACROSS * PANEL_HEIGHT));
        n++;
    }
    return y + (n + PANELS_ACROSS - 1) / PANELS_ACROSS * PANEL_HEIGHT;
}

static json_t *dashboard_variables(void) {
    char *query = xasprintf("label_values(%s, instance)", metric_families[METRIC_BUILD].name);
    json_t *v = json_pack("[{s:s,s:s,s:s,s:s},{s:s,s:s,s:s,s:o,s:s,s:i,s:b,s:b,s:{s:s,s:s}}]",
                          "name", "datasource", "label", "Data source", "type", "datasource",
                          "query", "prometheus", "name", "instance", "label", "Server", "type",
                          "query", "datasource", source_json(), "query", query, "refresh", 2,
                          "multi", 1, "includeAll", 1, "current", "text", "All", "value", "$__all");
    free(query);
    return v;
}

json_t *metrics_dashboard(void) {
    json_t *panels = json_array(), *sections_done = json_object();
    int y = 0;
    for (int i = 0; i < N_METRICS; i++) {
        const char *section = metric_families[i].section;
        if (!section || json_object_get(sections_done, section)) continue;
        json_object_set_new(sections_done, section, json_true());
        y = section_add(panels, section, y);
    }
    json_decref(sections_done);
    return json_pack("{s:s,s:s,s:[s],s:i,s:i,s:s,s:{s:s,s:s},s:{s:o},s:o}", "uid", "shoal", "title",
                     "Shoal", "tags", "shoal", "schemaVersion", 37, "version", 1, "refresh", "30s",
                     "time", "from", "now-1h", "to", "now", "templating", "list",
                     dashboard_variables(), "panels", panels);
}
