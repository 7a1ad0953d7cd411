/*
 * manifests: YAML for Kubernetes (scaling.h).
 *
 * The files are templates in which $NAME is replaced. Names are checked, and texts are quoted as
 * JSON, which is YAML; so no value can add a key.
 */
#include "scaling/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const char servers[] =
    "# Servers of a model, and an autoscaler for them. The key of the servers is a secret:\n"
    "#   kubectl -n $namespace create secret generic $name-key --from-literal=key=\"$(openssl rand "
    "-hex "
    "32)\"\n"
    "apiVersion: apps/v1\n"
    "kind: Deployment\n"
    "metadata: {name: $name, namespace: $namespace, labels: {app: $name}}\n"
    "spec:\n"
    "  replicas: $min\n"
    "  selector: {matchLabels: {app: $name}}\n"
    "  template:\n"
    "    metadata: {labels: {app: $name}}\n"
    "    spec:\n"
    "      terminationGracePeriodSeconds: 40\n"
    "      containers:\n"
    "        - name: shoal\n"
    "          image: $image\n"
    "          args: [serve, $model, --host, 0.0.0.0, --port, \"$port\"]\n"
    "          env:\n"
    "            - {name: SHOAL_API_KEY, valueFrom: {secretKeyRef: {name: $name-key, key: key}}}\n"
    "          ports: [{name: http, containerPort: $port}]\n"
    "          readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5}\n"
    "          livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 20, "
    "initialDelaySeconds: 30}\n"
    "          resources: {requests: {cpu: \"1\", memory: 1Gi}}\n"
    "---\n"
    "apiVersion: v1\n"
    "kind: Service\n"
    "metadata: {name: $name, namespace: $namespace, labels: {app: $name}}\n"
    "spec:\n"
    "  selector: {app: $name}\n"
    "  ports: [{name: http, port: $port, targetPort: http}]\n";

static const char autoscaler[] =
    "---\n"
    "apiVersion: v1\n"
    "kind: ServiceAccount\n"
    "metadata: {name: $name-autoscale, namespace: $namespace}\n"
    "---\n"
    "apiVersion: rbac.authorization.k8s.io/v1\n"
    "kind: Role\n"
    "metadata: {name: $name-autoscale, namespace: $namespace}\n"
    "rules:\n"
    "  - {apiGroups: [apps], resources: [deployments/scale], resourceNames: [$name], verbs: [get, "
    "patch]}\n"
    "  - {apiGroups: [\"\"], resources: [pods], verbs: [list]}\n"
    "---\n"
    "apiVersion: rbac.authorization.k8s.io/v1\n"
    "kind: RoleBinding\n"
    "metadata: {name: $name-autoscale, namespace: $namespace}\n"
    "subjects: [{kind: ServiceAccount, name: $name-autoscale, namespace: $namespace}]\n"
    "roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: $name-autoscale}\n"
    "---\n"
    "apiVersion: apps/v1\n"
    "kind: Deployment\n"
    "metadata: {name: $name-autoscale, namespace: $namespace, labels: {app: $name-autoscale}}\n"
    "spec:\n"
    "  replicas: 1\n"
    "  strategy: {type: Recreate}\n"
    "  selector: {matchLabels: {app: $name-autoscale}}\n"
    "  template:\n"
    "    metadata: {labels: {app: $name-autoscale}}\n"
    "    spec:\n"
    "      serviceAccountName: $name-autoscale\n"
    "      containers:\n"
    "        - name: autoscale\n"
    "          image: $image\n"
    "          args: [autoscale, --json, --target, kubernetes, --deployment, $name, "
    "--metrics-port, "
    "\"$port\",\n"
    "            --metrics-key-env, SHOAL_API_KEY, --host, 0.0.0.0, --port, \"9091\",\n"
    "            --strategy, $strategy, --min-nodes, \"$min\", --max-nodes, \"$max\",\n"
    "            --scale-out, \"$out\", --scale-in, \"$in\", --out-cooldown, \"$outcooldown\", "
    "--in-cooldown, \"$incooldown\",\n"
    "            --target-cpu-utilization, \"$cpu\", --interval, \"$interval\", --max-queue, "
    "\"$queue\",\n"
    "            --predictor, $predictor, --horizon, \"$horizon\", --season, \"$season\", "
    "--quantile, "
    "\"$quantile\"]\n"
    "          env:\n"
    "            - {name: SHOAL_API_KEY, valueFrom: {secretKeyRef: {name: $name-key, key: key}}}\n"
    "          ports: [{name: http, containerPort: 9091}]\n"
    "          resources: {requests: {cpu: 10m, memory: 64Mi}}\n"
    "---\n"
    "apiVersion: v1\n"
    "kind: Service\n"
    "metadata: {name: $name-autoscale, namespace: $namespace, labels: {app: $name-autoscale}}\n"
    "spec:\n"
    "  selector: {app: $name-autoscale}\n"
    "  ports: [{name: http, port: 9091, targetPort: http}]\n";

static const char monitoring[] =
    "---\n"
    "# Needs the Prometheus operator.\n"
    "apiVersion: monitoring.coreos.com/v1\n"
    "kind: ServiceMonitor\n"
    "metadata: {name: $name, namespace: $namespace, labels: {app: $name}}\n"
    "spec:\n"
    "  selector: {matchExpressions: [{key: app, operator: In, values: [$name, "
    "$name-autoscale]}]}\n"
    "  endpoints:\n"
    "    - port: http\n"
    "      path: /metrics\n"
    "      interval: 15s\n"
    "      authorization: {credentials: {name: $name-key, key: key}}\n"
    "---\n"
    "# Needs KEDA. Only one of this and $name-autoscale may act: to use it, scale $name-autoscale\n"
    "# to 0 and remove the annotation.\n"
    "apiVersion: keda.sh/v1alpha1\n"
    "kind: ScaledObject\n"
    "metadata: {name: $name, namespace: $namespace, annotations: {autoscaling.keda.sh/paused: "
    "\"true\"}}\n"
    "spec:\n"
    "  scaleTargetRef: {name: $name}\n"
    "  minReplicaCount: $min\n"
    "  maxReplicaCount: $max\n"
    "  pollingInterval: 30\n"
    "  advanced:\n"
    "    horizontalPodAutoscalerConfig:\n"
    "      behavior:\n"
    "        scaleUp: {policies: [{type: Pods, value: 1, periodSeconds: $keout}]}\n"
    "        scaleDown: {stabilizationWindowSeconds: $kein, policies: [{type: Pods, value: 1, "
    "periodSeconds: $kein}]}\n"
    "  triggers:\n"
    "    - type: prometheus\n"
    "      metricType: AverageValue\n"
    "      metadata:\n"
    "        serverAddress: $prometheus\n"
    "        threshold: \"$threshold\"\n"
    "        query: $query\n";

/* The sum of the scores, as the autoscaler computes it, for Prometheus. malloc'ed. */
static char *query_make(const struct manifest_options *o) {
    const struct scaling_strategy *s = scaling_strategy_find(o->scaling->strategy);
    char *at = xasprintf("{namespace=\"%s\",service=\"%s\"}", o->namespace, o->deployment);
    char *query = xasprintf(
        "sum(%g * (rate(process_cpu_seconds_total%s[2m]) / on (pod) shoal_cpus%s) + on (pod) "
        "%g * (1 - shoal_host_memory_available_bytes%s / on (pod) shoal_host_memory_bytes%s) + on "
        "(pod) %g * clamp_max(sum by (pod) (vllm:num_requests_waiting%s) / %lld, 1))",
        s->cpu, at, at, s->memory, at, at, s->queue, at, (long long)o->scaling->max_queue);
    free(at);
    return query;
}

struct variable {
    const char *name;
    char *value; /* malloc'ed */
};

static char *quoted(const char *text) {
    json_t *v = json_string_lossy(text, strlen(text));
    char *out = json_dumps(v, JSON_ENCODE_ANY);
    CHECK(out);
    json_decref(v);
    return out;
}

static char *number(double x) {
    return xasprintf("%.10g", x);
}

/* A period of the HorizontalPodAutoscaler: 1 to 1800 whole seconds. */
static char *period(double seconds) {
    return number(MIN(MAX(ceil(seconds), 1), 1800));
}

static void template_add(struct buf *out, const char *text, const struct variable *v, int n) {
    for (const char *p = text; *p;) {
        size_t len = *p == '$' ? 1 : 0;
        while (len && islower((unsigned char)p[len])) len++;
        int i = 0;
        while (i < n && !(len == strlen(v[i].name) + 1 && strncmp(v[i].name, p + 1, len - 1) == 0))
            i++;
        if (len > 1 && i < n)
            buf_puts(out, v[i].value);
        else
            buf_add(out, p, MAX(len, 1));
        p += MAX(len, 1);
    }
}

static int manifest_check(const struct manifest_options *o, struct error *err) {
    enum { NAME_MAX_LEN = 50 }; // a label has 63 bytes, and names get a suffix
    const char *const names[] = {o->namespace, o->deployment};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (!kubernetes_name_is_valid(names[i]) || strchr(names[i], '.') ||
            strlen(names[i]) > NAME_MAX_LEN)
            return error_set(err, ERR_USAGE,
                             "'%s' is not a name of Kubernetes: lower-case "
                             "letters, digits and '-', at most %d",
                             names[i], NAME_MAX_LEN);
    return scaling_options_check(o->scaling, err);
}

int scaling_manifests(const struct manifest_options *o, struct buf *out, struct error *err) {
    if (manifest_check(o, err) != OK) return err->code;
    const struct scaling_options *s = o->scaling;
    char *query = query_make(o);
    struct variable v[] = {{"name", xstrdup(o->deployment)},
                           {"namespace", xstrdup(o->namespace)},
                           {"image", quoted(o->image)},
                           {"model", quoted(o->model)},
                           {"prometheus", quoted(o->prometheus)},
                           {"query", quoted(query)},
                           {"port", number((double)o->port)},
                           {"strategy", xstrdup(s->strategy)},
                           {"predictor", xstrdup(s->predictor)},
                           {"min", number((double)s->min_nodes)},
                           {"max", number((double)s->max_nodes)},
                           {"out", number(s->scale_out)},
                           {"in", number(s->scale_in)},
                           {"threshold", number(scaling_threshold(s))},
                           {"outcooldown", number(s->out_cooldown)},
                           {"incooldown", number(s->in_cooldown)},
                           {"keout", period(s->out_cooldown)},
                           {"kein", period(s->in_cooldown)},
                           {"cpu", number(s->target_cpu)},
                           {"interval", number(s->interval)},
                           {"queue", number((double)s->max_queue)},
                           {"horizon", number(s->horizon)},
                           {"season", number(s->season)},
                           {"quantile", number(s->quantile)}};
    template_add(out, servers, v, ARRAY_LEN(v));
    template_add(out, autoscaler, v, ARRAY_LEN(v));
    template_add(out, monitoring, v, ARRAY_LEN(v));
    for (size_t i = 0; i < ARRAY_LEN(v); i++) free(v[i].value);
    free(query);
    return OK;
}
