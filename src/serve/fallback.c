/*
 * fallback: the chains of a server: their links with circuits, probes of remote servers, and the
 * requests that go to a chain.
 *
 * A remote server gets no request but those of clients while its circuit is closed. Otherwise it
 * gets none of them, and the link's thread asks it for its models, once per cooldown.
 */
#define _GNU_SOURCE
#include "serve/fallback.h"
#include "serve/auto_model.h"
#include "serve/request_fields.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROBE_SECONDS 10.0

/* circuits */

static void state_show(struct fallback_link *l) {
    metric_set(l->state, l->circuit.state);
}

enum link_permit fallback_link_ask(struct fallback_link *l) {
    enum link_permit permit = LINK_ADMITTED;
    double now = clock_now();
    pthread_mutex_lock(&l->lock);
    l->circuit = circuit_step(l->circuit, CIRCUIT_REQUEST, now);
    if (!l->circuit.admitted && !l->remote) {
        permit = LINK_PROBE;
        l->circuit = circuit_step(l->circuit, CIRCUIT_PROBE, now);
    }
    if (!l->circuit.admitted) permit = LINK_REFUSED;
    state_show(l);
    pthread_mutex_unlock(&l->lock);
    return permit;
}

/* Logs that the circuit opened or closed. */
static void change_log(const struct fallback_link *l, enum circuit_state before,
                       enum circuit_state after, const char *why) {
    if (before == CIRCUIT_CLOSED && after == CIRCUIT_OPEN)
        log_warn("fallback '%s': the circuit of the link '%s' is open, because it failed %d times "
                 "in a row: %s",
                 l->chain->name, l->settings->name, (int)l->settings->failure_threshold, why);
    if (before == CIRCUIT_HALF_OPEN && after == CIRCUIT_CLOSED)
        log_info("fallback '%s': the circuit of the link '%s' is closed again", l->chain->name,
                 l->settings->name);
}

void fallback_link_report(struct fallback_link *l, enum link_permit permit, enum link_result result,
                          const char *why) {
    static const enum circuit_event of_request[] = {CIRCUIT_SUCCESS, CIRCUIT_FAILURE},
                                    of_probe[] = {CIRCUIT_PROBE_SUCCESS, CIRCUIT_PROBE_FAILURE,
                                                  CIRCUIT_PROBE_ABANDONED};
    if (l->settings->reply || (permit == LINK_ADMITTED && result == LINK_NO_RESULT)) return;
    pthread_mutex_lock(&l->lock);
    enum circuit_state before = l->circuit.state;
    l->circuit = circuit_step(
        l->circuit, permit == LINK_PROBE ? of_probe[result] : of_request[result], clock_now());
    change_log(l, before, l->circuit.state, why);
    state_show(l);
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

/* Waits for an event of the link, at most until the time `end`; 0: no limit. The lock is held. */
static void link_wait(struct fallback_link *l, double end) {
    if (end > 0)
        condition_wait_until(&l->changed, &l->lock, end);
    else
        pthread_cond_wait(&l->changed, &l->lock);
}

static void probe_run(struct fallback_link *l) {
    struct error err;
    int rc = remote_probe(l->remote, MIN(l->settings->timeout, PROBE_SECONDS), &l->quit, &err);
    fallback_link_report(l, LINK_PROBE,
                         atomic_load(&l->quit) ? LINK_NO_RESULT
                         : rc == OK            ? LINK_ANSWERED
                                               : LINK_FAILED,
                         rc == OK ? "" : err.text);
}

static void *probe_thread(void *ctx) {
    struct fallback_link *l = ctx;
    pthread_mutex_lock(&l->lock);
    while (!atomic_load(&l->quit)) {
        l->circuit = circuit_step(l->circuit, CIRCUIT_PROBE, clock_now());
        state_show(l);
        if (!l->circuit.admitted) {
            link_wait(l, l->circuit.state == CIRCUIT_OPEN ? l->circuit.open_to : 0);
            continue;
        }
        pthread_mutex_unlock(&l->lock);
        probe_run(l);
        pthread_mutex_lock(&l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* opening and closing */

static int remote_link_open(struct fallback_link *l, struct error *err) {
    const struct fallback_link_settings *o = l->settings;
    const struct remote_options ro = {
        .url = o->url, .model = o->model, .key_env = o->api_key_env, .seconds = o->timeout};
    if (!(l->remote = remote_open(&ro, err))) return err->code;
    log_info("fallback '%s': the link '%s' sends requests to %s", l->chain->name, o->name,
             remote_url(l->remote));
    CHECK(pthread_create(&l->thread, NULL, probe_thread, l) == 0);
    return OK;
}

/* Whether a base or an adapter has the name. */
static bool model_is_listed(struct server *front, const char *name) {
    struct server *s;
    bool listed = false;
    for (int i = 0; !listed && (s = base_at(front, i)); i++)
        listed = server_name_is_base(s, name) || server_adapter_listed(s, name);
    return listed;
}

/* Warns if no model has the link's name; an adapter can still be loaded later. */
static void local_link_check(struct server *s, const struct fallback_link *l) {
    const char *model = l->settings->model;
    bool is_compound = strpbrk(model, ":@*+") != NULL; // a team, an agent, a mix …
    if (!is_compound && !auto_model_is(s, model) && !model_is_listed(s, model))
        log_warn("fallback '%s': no model has the name '%s' yet, so its link fails until one has",
                 l->chain->name, model);
}

static int link_open(struct server *s, struct fallback_chain *c, int i, struct error *err) {
    struct fallback_link *l = &c->links[i];
    const struct fallback_link_settings *o = &c->settings.links[i];
    *l = (struct fallback_link){
        .chain = c,
        .settings = o,
        .answers = metric_get(s->metrics, METRIC_FALLBACK_ANSWERS, c->name, o->name),
        .failures = metric_get(s->metrics, METRIC_FALLBACK_FAILURES, c->name, o->name),
        .state = metric_get(s->metrics, METRIC_FALLBACK_CIRCUIT, c->name, o->name),
        .circuit = {.failure_threshold = (int)o->failure_threshold, .cooldown = o->cooldown}};
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    state_show(l);
    if (o->url) return remote_link_open(l, err);
    if (!o->reply) local_link_check(s, l);
    return OK;
}

static int name_check(const struct fallbacks *f, const char *name, struct error *err) {
    if (!fallback_name_is_valid(name))
        return error_set(err, ERR_USAGE,
                         "the name of a chain has 1 to %d characters of ASCII without blanks, '\"' "
                         "and '\\'",
                         FALLBACK_MAX_NAME);
    for (int i = 0; i < f->n; i++)
        if (f->v[i].name && strcmp(f->v[i].name, name) == 0)
            return error_set(err, ERR_USAGE, "another chain has the name '%s'", name);
    return OK;
}

static int chain_open(struct server *s, const char *text, struct error *err) {
    const char *path;
    char *name = named_file_parse(text, &path);
    struct fallback_chain *c = &s->fallbacks->v[s->fallbacks->n];
    int rc = name_check(s->fallbacks, name, err);
    if (rc == OK) rc = fallback_settings_read(&c->settings, path, err);
    if (rc != OK) {
        free(name);
        return rc;
    }
    c->name = name;
    c->links = xcalloc((size_t)c->settings.n, sizeof *c->links);
    s->fallbacks->n++;
    for (int i = 0; rc == OK && i < c->settings.n; i++)
        if ((rc = link_open(s, c, i, err)) != OK)
            rc = error_wrap(err, "link '%s'", c->settings.links[i].name);
    return rc;
}

int fallbacks_open(struct server *s, struct error *err) {
    const struct strings *list = &s->options->fallbacks;
    if (!list->n) return OK;
    s->fallbacks = xcalloc(1, sizeof *s->fallbacks);
    s->fallbacks->v = xcalloc((size_t)list->n, sizeof *s->fallbacks->v);
    for (int i = 0; i < list->n; i++)
        if (chain_open(s, list->v[i], err) != OK)
            return error_wrap(err, "--fallback %s", list->v[i]);
    return OK;
}

static void link_close(struct fallback_link *l) {
    atomic_store(&l->quit, true);
    pthread_mutex_lock(&l->lock);
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    if (l->remote) pthread_join(l->thread, NULL);
    remote_close(l->remote);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
}

void fallbacks_close(struct server *s) {
    struct fallbacks *f = s->fallbacks;
    if (!f) return;
    while (__atomic_load_n(&f->n_sessions, __ATOMIC_ACQUIRE))
        usleep(1000); // they end soon, because their clients have disconnected
    for (int i = 0; i < f->n; i++) {
        struct fallback_chain *c = &f->v[i];
        for (int k = 0; k < c->settings.n && c->links[k].settings; k++) link_close(&c->links[k]);
        fallback_settings_release(&c->settings);
        free(c->links);
        free(c->name);
    }
    free(f->v);
    free(f);
}

/* requests */

/* Whether the chain has the name; Ollama's clients may add the tag ":latest". */
static bool chain_has_name(const struct fallback_chain *c, const char *name) {
    size_t n = strlen(c->name);
    return strncmp(c->name, name, n) == 0 && (!name[n] || strcmp(name + n, ":latest") == 0);
}

static struct fallback_chain *chain_find(const struct server *s, const char *name) {
    for (int i = 0; name && s->fallbacks && i < s->fallbacks->n; i++)
        if (chain_has_name(&s->fallbacks->v[i], name)) return &s->fallbacks->v[i];
    return NULL;
}

/* Whether the API generates text. */
static bool path_generates(const char *path) {
    static const char *const paths[] = {"/v1/chat/completions", "/v1/completions", "/completion",
                                        "/completions",         "/api/generate",   "/api/chat"};
    for (size_t i = 0; i < ARRAY_LEN(paths); i++)
        if (strcmp(path, paths[i]) == 0) return true;
    return false;
}

/* The chain that a request is for; NULL: none. A part of a session is for the link's model. */
static struct fallback_chain *chain_of_request(struct server *s, const struct exchange *x) {
    if (fallback_attempt_of(x) || !path_generates(exchange_path(x))) return NULL;
    json_t *model = request_body_member(x, "model");
    struct fallback_chain *c = chain_find(s, json_string_value(model));
    json_decref(model);
    return c;
}

void fallback_handle(void *ctx, struct exchange *x, const struct http_route *r) {
    struct server *s = ctx;
    struct fallback_chain *c = chain_of_request(s, x);
    struct error err;
    if (!c && s->bases) {
        base_pool_handle(ctx, x, r);
    } else if (!c) {
        r->handle(ctx, x);
    } else {
        json_t *body = request_memory_json(s, x, &err);
        if (body)
            fallback_session_start(s, x, c, body);
        else
            api_fail_error(x, &err, NULL);
    }
}

/* lists */

const char *fallback_name_at(struct server *s, int i) {
    return s->fallbacks && i < s->fallbacks->n ? s->fallbacks->v[i].name : NULL;
}

bool fallback_is_only(struct server *s, const char *name) {
    return chain_find(s, name) && !model_is_listed(s, name);
}

static json_t *link_json(struct fallback_link *l) {
    const struct fallback_link_settings *o = l->settings;
    if (o->reply) return json_pack("{s:s,s:s}", "name", o->name, "kind", "reply");
    pthread_mutex_lock(&l->lock);
    struct circuit c = l->circuit;
    pthread_mutex_unlock(&l->lock);
    return json_pack("{s:s,s:s,s:s,s:f,s:I,s:f,s:s,s:i}", "name", o->name, "kind",
                     l->remote ? "remote" : "local", "model", o->model, "timeout", o->timeout,
                     "failure_threshold", (json_int_t)o->failure_threshold, "cooldown", o->cooldown,
                     "circuit", circuit_state_name(c.state), "failures", c.failures);
}

static void fallbacks_list(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    json_t *list = json_array();
    for (int i = 0; s->fallbacks && i < s->fallbacks->n; i++) {
        const struct fallback_chain *c = &s->fallbacks->v[i];
        json_t *links = json_array();
        for (int k = 0; k < c->settings.n; k++)
            json_array_append_new(links, link_json(&c->links[k]));
        json_array_append_new(list, json_pack("{s:s,s:f,s:o}", "model", c->name, "timeout",
                                              c->settings.timeout, "links", links));
    }
    exchange_reply_json(x, 200, json_pack("{s:o}", "fallbacks", list));
}

const struct http_route fallbacks_routes[] = {
    {"GET", "/v1/fallbacks", SCOPE_CHAT, fallbacks_list},
    {0},
};
