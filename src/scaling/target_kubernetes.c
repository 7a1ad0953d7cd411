/*
 * target_kubernetes: the subresource `scale` of a Deployment, by the API of Kubernetes.
 *
 * Inside a pod, address, namespace, token and certificate authority are those of its service
 * account. The token is read again for each request, because Kubernetes replaces it. It is sent
 * over TLS, or to this machine (kubectl proxy), and is in no message.
 */
#include "hub/hub.h"
#include "scaling/internal.h"

#include <stdlib.h>
#include <string.h>

enum { FILE_MAX = 1 << 20, REPLY_MAX = 32 << 20, NAME_LIMIT = 253 };
static const char ACCOUNT[] = "/var/run/secrets/kubernetes.io/serviceaccount";
static const double REQUEST_SECONDS = 15;

struct kubernetes {
    char *api, *namespace, *deployment, *account; /* account: folder of the service account */
    int64_t metrics_port;
    char *selector; /* labels of the pods, by the last reply; NULL: none yet */
};

bool kubernetes_name_is_valid(const char *name) {
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-.");
    return n > 0 && n <= NAME_LIMIT && !name[n] && name[0] != '-' && name[0] != '.';
}

/* the service account */

/* The content of a file of the service account without its last newline, malloc'ed; NULL: it cannot
 * be read. */
static char *account_read(const struct kubernetes *k, const char *name, struct error *err) {
    struct buf b = {0};
    char *path = path_join(k->account, name);
    int rc = file_read(path, FILE_MAX, &b, err);
    free(path);
    if (rc != OK) {
        buf_release(&b);
        return NULL;
    }
    char *text = xstrndup(b.data ? b.data : "", b.len);
    text[strcspn(text, "\r\n")] = 0;
    buf_release(&b);
    return text;
}

static char *api_address(void) {
    const char *host = getenv("KUBERNETES_SERVICE_HOST"), *port = getenv("KUBERNETES_SERVICE_PORT");
    if (!host || !*host) return NULL;
    bool is_ipv6 = strchr(host, ':') != NULL;
    return xasprintf("https://%s%s%s:%s", is_ipv6 ? "[" : "", host, is_ipv6 ? "]" : "",
                     port && *port ? port : "443");
}

/* requests */

/* Adds the token to the headers. Without TLS to this machine it may be missing. */
static int token_add(const struct kubernetes *k, bool required, struct strings *headers,
                     struct error *err) {
    char *token = account_read(k, "token", err);
    if (!token) return required ? error_wrap(err, "the token of the service account") : OK;
    char *line = xasprintf("Authorization: Bearer %s", token);
    strings_add(headers, line);
    free(line);
    free(token);
    return OK;
}

/* The error of a reply: a Status object with a message. */
static int reply_error(const struct http_response *p, struct error *err) {
    struct json_limits limits = json_request_limits;
    struct error ignored;
    json_t *v = json_parse_limited(p->body.data ? p->body.data : "", p->body.len, "reply", &limits,
                                   &ignored);
    const char *message = json_get_string(v, "message");
    error_set(err, ERR_IO, "Kubernetes: status %d%s%.300s", p->status, *message ? ": " : "",
              message);
    json_decref(v);
    return err->code;
}

/* Sends a request to the API. Returns the object of the reply, or NULL. */
static json_t *api_call(const struct kubernetes *k, const char *method, const char *path,
                        const char *body, struct error *err) {
    struct json_limits limits = json_request_limits;
    struct http_response p = {0};
    struct strings headers = {0};
    json_t *v = NULL;
    char *url = xasprintf("%s%s", k->api, path), *ca = path_join(k->account, "ca.crt");
    bool tls = strncmp(k->api, "https://", 8) == 0;
    strings_add(&headers, "Accept: application/json");
    if (body) strings_add(&headers, "Content-Type: application/merge-patch+json");
    int rc = token_add(k, tls, &headers, err);
    if (rc == OK)
        rc = http_request(&(struct http_request){.method = method,
                                                 .url = url,
                                                 .headers = &headers,
                                                 .body = body,
                                                 .body_len = body ? strlen(body) : 0,
                                                 .ca_file = tls && path_exists(ca) ? ca : NULL,
                                                 .max_body = REPLY_MAX,
                                                 .seconds = REQUEST_SECONDS},
                          &p, err);
    if (rc != OK)
        error_wrap(err, "Kubernetes at '%s'", k->api);
    else if (p.status != 200)
        reply_error(&p, err);
    else
        v = json_parse_limited(p.body.data ? p.body.data : "", p.body.len,
                               "the reply of Kubernetes", &limits, err);
    http_response_release(&p);
    strings_release(&headers);
    free(url);
    free(ca);
    return v;
}

/* Reads or changes the scale. body: NULL, or the change. */
static int scale_call(struct kubernetes *k, const char *body, int *n, struct error *err) {
    char *path =
        xasprintf("/apis/apps/v1/namespaces/%s/deployments/%s/scale", k->namespace, k->deployment);
    json_t *v = api_call(k, body ? "PATCH" : "GET", path, body, err);
    free(path);
    if (!v) return err->code;
    const json_t *replicas = json_object_get(json_object_get(v, "spec"), "replicas");
    json_int_t got = replicas ? json_integer_value(replicas) : 0; // 0 replicas are left out
    int rc = OK;
    if (!json_is_object(json_object_get(v, "spec")) || got < 0 || got > 1000000)
        rc = error_set(err, ERR_FORMAT, "the reply of Kubernetes is not a scale");
    *n = (int)got;
    free(k->selector);
    k->selector = xstrdup(json_get_string(json_object_get(v, "status"), "selector"));
    json_decref(v);
    return rc;
}

/* the target */

static int kubernetes_nodes(void *state, int *n, struct error *err) {
    return scale_call(state, NULL, n, err);
}

static int kubernetes_set(void *state, int n, struct error *err) {
    char body[64];
    int got;
    snprintf(body, sizeof body, "{\"spec\":{\"replicas\":%d}}", n);
    int rc = scale_call(state, body, &got, err);
    if (rc == OK && got != n)
        rc = error_set(err, ERR_STATE, "Kubernetes has set %d replicas, not %d", got, n);
    return rc;
}

static void pod_add(const struct kubernetes *k, const json_t *pod, struct strings *urls) {
    const json_t *status = json_object_get(pod, "status");
    const char *ip = json_get_string(status, "podIP");
    size_t n = strspn(ip, "0123456789abcdefABCDEF.:");
    bool leaves = json_object_get(json_object_get(pod, "metadata"), "deletionTimestamp") != NULL;
    if (!n || ip[n] || leaves || strcmp(json_get_string(status, "phase"), "Running") != 0) return;
    bool is_ipv6 = strchr(ip, ':') != NULL;
    char *url = xasprintf("http://%s%s%s:%lld/metrics", is_ipv6 ? "[" : "", ip, is_ipv6 ? "]" : "",
                          (long long)k->metrics_port);
    strings_add(urls, url);
    free(url);
}

static void query_add(struct buf *b, const char *text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._";
    for (; *text; text++)
        if (strchr(plain, *text))
            buf_add(b, text, 1);
        else
            buf_printf(b, "%%%02X", (unsigned char)*text);
}

/* The pods that run, by the selector of the scale. */
static int kubernetes_sources(void *state, struct strings *urls, struct error *err) {
    struct kubernetes *k = state;
    struct buf path = {0};
    const json_t *pod;
    size_t i;
    int n, rc = k->selector ? OK : scale_call(k, NULL, &n, err);
    if (rc != OK) return rc;
    if (!*k->selector)
        return error_set(err, ERR_FORMAT, "the scale of '%s' has no selector", k->deployment);
    buf_printf(&path, "/api/v1/namespaces/%s/pods?labelSelector=", k->namespace);
    query_add(&path, k->selector);
    json_t *v = api_call(k, "GET", path.data, NULL, err);
    buf_release(&path);
    if (!v) return err->code;
    json_array_foreach (json_object_get(v, "items"), i, pod) pod_add(k, pod, urls);
    json_decref(v);
    return OK;
}

static void kubernetes_close(void *state) {
    struct kubernetes *k = state;
    free(k->api);
    free(k->namespace);
    free(k->deployment);
    free(k->account);
    free(k->selector);
    free(k);
}

static int kubernetes_check(const struct kubernetes *k, struct error *err) {
    if (!k->deployment || !kubernetes_name_is_valid(k->deployment))
        return error_set(err, ERR_USAGE,
                         "--target kubernetes needs the name of a Deployment, "
                         "--deployment NAME");
    if (!k->api)
        return error_set(err, ERR_USAGE,
                         "this process is not in a pod; name the API of Kubernetes with "
                         "--kubernetes-api URL");
    if (strncmp(k->api, "https://", 8) != 0 && !http_url_is_local(k->api))
        return error_set(err, ERR_USAGE,
                         "--kubernetes-api: expected https://…, or http:// of this "
                         "machine (kubectl proxy)");
    if (!k->namespace || !kubernetes_name_is_valid(k->namespace))
        return error_set(err, ERR_USAGE, "name the namespace of the Deployment with --namespace");
    return OK;
}

static void *kubernetes_open(const struct target_options *o, int min_nodes, struct error *err) {
    struct kubernetes *k = xcalloc(1, sizeof *k);
    struct error ignored;
    int n;
    (void)min_nodes; // the first decision corrects the number
    k->account = xstrdup(o->account ? o->account : ACCOUNT);
    k->api = o->api ? xstrdup(o->api) : api_address();
    if (k->api && text_ends_with(k->api, "/")) k->api[strlen(k->api) - 1] = 0;
    k->namespace = o->namespace ? xstrdup(o->namespace) : account_read(k, "namespace", &ignored);
    k->deployment = o->deployment ? xstrdup(o->deployment) : NULL;
    k->metrics_port = o->metrics_port;
    if (kubernetes_check(k, err) == OK && kubernetes_nodes(k, &n, err) == OK) return k;
    kubernetes_close(k);
    return NULL;
}

const struct target_kind target_kubernetes = {.name = "kubernetes",
                                              .open = kubernetes_open,
                                              .nodes = kubernetes_nodes,
                                              .set = kubernetes_set,
                                              .sources = kubernetes_sources,
                                              .close = kubernetes_close};
