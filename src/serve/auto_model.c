/* auto_model: chooses an adapter by the prompt. See auto_model.h. */
#define _GNU_SOURCE
#include "serve/auto_model.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { TEXT_MAX = 1 << 16 }; /* bytes of a prompt that similarity and router read */

enum auto_method { METHOD_NONE, METHOD_LIKELIHOOD, METHOD_SIMILARITY, METHOD_ROUTER };
static const char *const method_names[] = {"none", "likelihood", "similarity", "router"};

/* The profile of an adapter, as it was read; a file that has changed is read again. */
struct cached_profile {
    char *path;
    struct timespec changed;
    off_t size;
    bool valid;
    struct prompt_profile profile;
};
struct auto_model {
    enum auto_method method; /* of --router */
    bool required;           /* --router was given; otherwise each request has its method */
    struct router *router;   /* METHOD_ROUTER */
    pthread_mutex_t lock;    /* guards the profiles */
    struct cached_profile **profiles;
    int n_profiles;
};

/* pure functions */

int score_best(const double *scores, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!isnan(scores[i]) && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

double prompt_mean_logprob(const float *logprob, int32_t n) {
    double sum = 0;
    for (int32_t i = 1; i < n; i++) sum += (double)logprob[i];
    return n > 1 ? sum / (n - 1) : (double)NAN;
}

/* candidates */

struct candidates {
    struct strings names;
    double *scores; /* [names.n] */
};

static void candidates_add(struct candidates *c, const char *name, double score) {
    strings_add(&c->names, name);
    c->scores = xrealloc(c->scores, (size_t)c->names.n * sizeof *c->scores);
    c->scores[c->names.n - 1] = score;
}

static void candidates_release(struct candidates *c) {
    strings_release(&c->names);
    free(c->scores);
}

static bool entry_is_candidate(const struct adapter_entry *e) {
    return !e->is_base && !e->derived_spec;
}

static bool name_is_candidate(struct server *s, const char *name) {
    json_t *derived = server_derived_spec(s, name);
    bool is_derived = derived != NULL;
    json_decref(derived);
    return server_name_is_base(s, name) || (server_adapter_listed(s, name) && !is_derived);
}

static int count_adapters(struct server *s) {
    int n, count = 0;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n; i++) count += entry_is_candidate(&v[i]);
    server_adapters_free(v, n);
    return count;
}

/* opening */

/* At least one agent of the router is needed. */
static int router_check(struct server *s, const struct router *r, struct error *err) {
    for (int i = 0; i < r->n_agents; i++)
        if (name_is_candidate(s, r->names[i])) return OK;
    return error_set(err, ERR_USAGE,
                     "no agent of the router (the first is '%s') is the name of an adapter or of "
                     "the base '%s'; name the adapters as the team does: --adapter NAME=DIR",
                     r->names[0], s->name);
}

static int method_open(struct server *s, struct auto_model *a, const char *text,
                       struct error *err) {
    a->method = METHOD_ROUTER;
    for (size_t i = 0; text && i < METHOD_ROUTER; i++)
        if (strcmp(text, method_names[i]) == 0) a->method = (enum auto_method)i;
    if (!text || a->method != METHOD_ROUTER) return OK;
    a->router = router_read(text, err);
    return a->router ? router_check(s, a->router, err) : err->code;
}

int auto_model_open(struct server *s, struct error *err) {
    const char *text = s->options->router;
    struct auto_model *a = s->auto_model = xcalloc(1, sizeof *a);
    pthread_mutex_init(&a->lock, NULL);
    a->required = text != NULL;
    if (method_open(s, a, text, err) == OK) return OK;
    return error_wrap(
        err, "--router %s (likelihood, similarity, none or a file of 'shoal team fit')", text);
}

void auto_model_close(struct server *s) {
    struct auto_model *a = s->auto_model;
    if (!a) return;
    for (int i = 0; i < a->n_profiles; i++) {
        free(a->profiles[i]->path);
        free(a->profiles[i]);
    }
    free(a->profiles);
    router_free(a->router);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

bool auto_model_exists(struct server *s) {
    const struct auto_model *a = s->auto_model;
    if (!a || a->method == METHOD_NONE || server_name_is_base(s, AUTO_MODEL) ||
        server_adapter_listed(s, AUTO_MODEL))
        return false;
    return a->required || count_adapters(s) > 1;
}

bool auto_model_is(struct server *s, const char *model) {
    return model && strcmp(model, AUTO_MODEL) == 0 && auto_model_exists(s);
}

/* The adapters are held from here on, so that a choice and its reply use the same version. */
static int likelihood_terms_add(struct server *s, struct model_ref *out, struct error *err) {
    int n, most = count_adapters(s), rc = OK;
    if (most > ENGINE_MIX_MAX)
        return error_set(err, ERR_USAGE,
                         "'model': auto prefills a prompt under at most %d adapters, and this "
                         "server has %d; start it with --router similarity or a router file",
                         ENGINE_MIX_MAX, most);
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n && rc == OK; i++)
        if (entry_is_candidate(&v[i])) {
            rc = model_ref_add(s, v[i].name, 1, out, err);
            // no term: the base has replaced the adapter meanwhile
            if (out->n > out->candidates.n) strings_add(&out->candidates, v[i].name);
        }
    server_adapters_free(v, n);
    return rc;
}

/* text of a prompt */

static const char *last_user_message(const json_t *messages) {
    const char *found = NULL;
    const json_t *m;
    size_t i;
    json_array_foreach ((json_t *)(uintptr_t)messages, i, m)
        if (strcmp(json_get_string(m, "role"), "user") == 0)
            found = json_string_value(json_object_get(m, "content"));
    return found;
}

/* The last message of the user, or the text of the prompt; at most TEXT_MAX bytes. malloc'ed. */
static char *prompt_text(const struct server *s, const struct generation_spec *spec) {
    const char *text = last_user_message(json_object_get(spec->request_json, "messages"));
    struct buf decoded = {0};
    if (!text) text = json_string_value(json_object_get(spec->request_json, "prompt"));
    if (!text) {
        tokenizer_decode(s->model->tok, spec->prompts->v, spec->prompts->n, false, &decoded);
        text = decoded.data ? decoded.data : "";
    }
    size_t n = strlen(text);
    char *copy = xstrndup(text, n > TEXT_MAX ? utf8_complete_len(text, TEXT_MAX) : n);
    buf_release(&decoded);
    return copy;
}

/* scores without a prefill */

static void profile_load(struct cached_profile *p, const struct stat *st) {
    struct error err;
    p->changed = st->st_mtim;
    p->size = st->st_size;
    p->valid = prompt_profile_read(&p->profile, p->path, &err) == OK;
    if (!p->valid) log_warn("the model auto leaves an adapter out: %s", err.text);
}

/* The profile of an adapter, or NULL; valid while the lock is held. */
static const struct prompt_profile *profile_find(struct auto_model *a, const char *adapter) {
    struct stat st;
    char *path = prompt_profile_path(adapter);
    struct cached_profile *p = NULL;
    if (stat(path, &st) == 0) {
        for (int i = 0; i < a->n_profiles && !p; i++)
            if (strcmp(a->profiles[i]->path, path) == 0) p = a->profiles[i];
        bool fresh = p && p->size == st.st_size && p->changed.tv_sec == st.st_mtim.tv_sec &&
                     p->changed.tv_nsec == st.st_mtim.tv_nsec;
        if (!p) {
            a->profiles = xrealloc(a->profiles, (size_t)(a->n_profiles + 1) * sizeof *a->profiles);
            p = a->profiles[a->n_profiles++] = xcalloc(1, sizeof *p);
            p->path = xstrdup(path);
        }
        if (!fresh) profile_load(p, &st);
    }
    free(path);
    return p && p->valid ? &p->profile : NULL;
}

static bool all_have_profiles(struct server *s) {
    int n;
    bool all = true;
    struct adapter_entry *v = server_adapters(s, &n);
    pthread_mutex_lock(&s->auto_model->lock);
    for (int i = 0; i < n && all; i++)
        all = !entry_is_candidate(&v[i]) || profile_find(s->auto_model, v[i].path);
    pthread_mutex_unlock(&s->auto_model->lock);
    server_adapters_free(v, n);
    return all;
}

/* Without --router it is similarity if it can choose every adapter, else likelihood. */
static enum auto_method method_now(struct server *s) {
    const struct auto_model *a = s->auto_model;
    if (a->required) return a->method;
    return all_have_profiles(s) ? METHOD_SIMILARITY : METHOD_LIKELIHOOD;
}

int auto_model_ref(struct server *s, struct model_ref *out, struct error *err) {
    *out = (struct model_ref){
        .name = xstrdup(AUTO_MODEL), .label = xstrdup(AUTO_MODEL), .is_auto = true};
    out->by_likelihood = method_now(s) == METHOD_LIKELIHOOD;
    int rc = out->by_likelihood ? likelihood_terms_add(s, out, err) : OK;
    if (rc != OK) model_ref_release(out);
    return rc;
}

static void similarity_scores(struct server *s, const char *text, struct candidates *c) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    struct prompt_profile prompt = {0};
    prompt_profile_add(&prompt, text);
    pthread_mutex_lock(&s->auto_model->lock);
    for (int i = 0; i < n; i++) {
        const struct prompt_profile *p =
            entry_is_candidate(&v[i]) ? profile_find(s->auto_model, v[i].path) : NULL;
        if (p) candidates_add(c, v[i].name, prompt_profile_similarity(p, &prompt));
    }
    pthread_mutex_unlock(&s->auto_model->lock);
    server_adapters_free(v, n);
}

static void router_scores(struct server *s, const char *text, struct candidates *c) {
    const struct router *r = s->auto_model->router;
    double *prob = xcalloc((size_t)r->n_agents, sizeof *prob);
    router_route(r, text, prob);
    for (int i = 0; i < r->n_agents; i++)
        if (name_is_candidate(s, r->names[i])) candidates_add(c, r->names[i], prob[i]);
    free(prob);
}

/* the choice */

/* Stores the choice in spec. */
static void choice_report(const struct candidates *c, int best, enum auto_method by,
                          struct generation_spec *spec) {
    const char *name = c->names.v[best];
    json_t *scores = json_object();
    for (int i = 0; i < c->names.n; i++)
        json_object_set_new(scores, c->names.v[i],
                            isfinite(c->scores[i]) ? json_real(c->scores[i]) : json_null());
    spec->router = json_pack("{s:s,s:s,s:o,s:I}", "method", method_names[by], "model", name,
                             "scores", scores, "prompt_tokens", (json_int_t)spec->router_tokens);
}

static void choice_count(struct server *s, const struct model_ref *chosen, enum auto_method by) {
    metric_add(metric_get(s->metrics, METRIC_ROUTER_CHOICES, chosen->label, method_names[by]), 1);
}

static void choose_without_prefill(struct server *s, struct exchange *x,
                                   const struct api_dialect *d, const char *id_prefix,
                                   struct model_ref *t, struct generation_spec *spec) {
    struct candidates c = {0};
    struct error err;
    char *text = prompt_text(s, spec);
    enum auto_method by = s->auto_model->router ? METHOD_ROUTER : METHOD_SIMILARITY;
    (by == METHOD_ROUTER ? router_scores : similarity_scores)(s, text, &c);
    free(text);
    if (c.names.n == 0) candidates_add(&c, s->name, (double)NAN); // only the base is left
    int best = MAX(score_best(c.scores, c.names.n), 0);
    choice_report(&c, best, by, spec);
    model_ref_release(t);
    int rc = model_ref_resolve(s, c.names.v[best], t, &err);
    candidates_release(&c);
    if (rc != OK) {
        generation_fail(s, x, t, spec, &err);
        return;
    }
    choice_count(s, t, by);
    generation_start(s, x, d, id_prefix, t, spec);
}

/* likelihood */

/* The prefills of a prompt, one for each candidate: the base, then the terms of the target. */
struct prefills {
    struct server *s;
    struct exchange *x; /* retained */
    const struct api_dialect *dialect;
    const char *id_prefix;
    struct model_ref target;
    struct generation_spec spec;
    struct batcher_request *requests; /* [n] */
    int n, refs;                      /* refs: of the unfinished requests and of prefills_start */
};

static void prefills_free(struct prefills *p) {
    struct server *s = p->s;
    for (int i = 0; i < p->n; i++) engine_request_release(&p->requests[i].request);
    free(p->requests);
    exchange_release(p->x);
    free(p);
    base_release(s, true);
}

/* The reference of candidate i: like that of a request that names it. */
static struct model_ref candidate_ref(const struct prefills *p, int i) {
    const char *name = i ? p->target.candidates.v[i - 1] : p->s->name;
    struct model_ref t = {.name = xstrdup(name), .label = xstrdup(i ? name : "base"), .n = i > 0};
    if (i) t.terms[0] = p->target.terms[i - 1];
    if (i) adapter_retain(t.terms[0].adapter);
    return t;
}

/* The scores of all candidates. ERR_STATE: a prefill was cut off. */
static int prefill_scores(struct prefills *p, struct candidates *c, struct error *err) {
    for (int i = 0; i < p->n; i++) {
        const struct engine_request *r = &p->requests[i].request;
        p->spec.router_tokens += r->n_prefilled;
        if (r->finish == FINISH_NONE)
            return error_set(err, ERR_STATE,
                             p->requests[i].no_memory
                                 ? "the server is short of memory; try again later"
                                 : "the choice of an adapter was cancelled");
        candidates_add(c, i ? p->target.candidates.v[i - 1] : p->s->name,
                       prompt_mean_logprob(r->prompt_logprob, r->n_prompt));
    }
    return OK;
}

/* The tokens of prefills whose reply does not start. */
static void prefills_count(const struct prefills *p) {
    struct token_usage u = {0};
    for (int i = 0; i < p->n; i++) u.prompt += p->requests[i].request.n_prefilled;
    request_metrics_add_tokens(p->s, exchange_key_id(p->x), &u);
}

/* Runs in a worker when all prefills are done. */
static void prefills_finish(void *ctx) {
    struct prefills *p = ctx;
    struct candidates c = {0};
    struct error err;
    struct http *h = p->s->http;
    if (prefill_scores(p, &c, &err) == OK) {
        int best = MAX(score_best(c.scores, c.names.n), 0);
        struct model_ref chosen = candidate_ref(p, best);
        choice_report(&c, best, METHOD_LIKELIHOOD, &p->spec);
        choice_count(p->s, &chosen, METHOD_LIKELIHOOD);
        model_ref_release(&p->target);
        generation_start(p->s, p->x, p->dialect, p->id_prefix, &chosen, &p->spec);
    } else {
        prefills_count(p);
        generation_fail(p->s, p->x, &p->target, &p->spec, &err);
    }
    candidates_release(&c);
    prefills_free(p); // not before: a client that disconnects cancels them until the reply starts
    http_resume_postponed(h); // adapters were released
}

static void prefills_release(struct prefills *p) {
    if (__atomic_sub_fetch(&p->refs, 1, __ATOMIC_ACQ_REL) == 0)
        http_run_in_worker(p->s->http, prefills_finish, p);
}

static void prefill_on_change(struct batcher_request *c, bool done) {
    if (done) prefills_release(c->user);
}

static void prefills_cancel(void *ctx) {
    struct prefills *p = ctx;
    for (int i = 0; i < p->n; i++) batcher_cancel(p->s->batcher, &p->requests[i]);
}

static struct prefills *prefills_new(struct server *s, struct exchange *x,
                                     const struct api_dialect *d, const char *id_prefix,
                                     struct model_ref *t, struct generation_spec *spec) {
    struct prefills *p = xcalloc(1, sizeof *p);
    const char *key = exchange_key_id(x);
    *p = (struct prefills){.s = s,
                           .x = exchange_retain(x),
                           .dialect = d,
                           .id_prefix = id_prefix,
                           .target = *t,
                           .spec = *spec,
                           .n = 1 + t->n,
                           .refs = 2 + t->n};
    *t = (struct model_ref){0};
    *spec = (struct generation_spec){0};
    p->requests = xcalloc((size_t)p->n, sizeof *p->requests);
    for (int i = 0; i < p->n; i++)
        p->requests[i] = (struct batcher_request){
            .request = {.prompt = p->spec.prompts->v,
                        .n_prompt = p->spec.prompts->n,
                        .prompt_logprobs = true,
                        .adapter = i ? p->target.terms[i - 1].adapter : NULL},
            .client = key ? hash_fnv1a(key, strlen(key)) : 0,
            .on_change = prefill_on_change,
            .user = p};
    CHECK(base_retain(s)); // the handler has a reference
    return p;
}

static void prefills_start(struct prefills *p) {
    struct batcher_request *calls[ENGINE_MIX_MAX + 1];
    struct error err;
    for (int i = 0; i < p->n; i++) calls[i] = &p->requests[i];
    if (batcher_submit_all(p->s->batcher, calls, p->n, &err) != OK) {
        generation_fail(p->s, p->x, &p->target, &p->spec, &err);
        prefills_free(p);
        return;
    }
    exchange_on_disconnect(p->x, prefills_cancel, p);
    prefills_release(p);
}

/* Memory for the log-probabilities; and room in the queue, without which every retry would fail. */
static int prefills_check(struct server *s, struct exchange *x, int n, int32_t n_prompt,
                          struct error *err) {
    if (n > s->options->max_waiting)
        return error_set(err, ERR_USAGE,
                         "'model': auto needs a prefill for each of %d candidates, and this server "
                         "takes %lld requests at once; raise --max-waiting",
                         n, (long long)s->options->max_waiting);
    size_t each = sizeof(struct batcher_request) + sizeof(float) * (size_t)n_prompt;
    return request_memory_reserve(s, x, (size_t)n * each, err);
}

void auto_model_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const char *id_prefix, struct model_ref *t, struct generation_spec *spec) {
    struct error err;
    if (spec->n_prompts != 1) {
        error_set(&err, ERR_USAGE,
                  "the model auto takes one prompt per request, because the prompt chooses the "
                  "adapter; this one has %d",
                  spec->n_prompts);
        spec->bad_field = "prompt";
        generation_fail(s, x, t, spec, &err);
    } else if (!t->by_likelihood) {
        choose_without_prefill(s, x, d, id_prefix, t, spec);
    } else if (prefills_check(s, x, 1 + t->n, spec->prompts->n, &err) != OK) {
        generation_fail(s, x, t, spec, &err);
    } else {
        prefills_start(prefills_new(s, x, d, id_prefix, t, spec));
    }
}
