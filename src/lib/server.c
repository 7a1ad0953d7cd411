/*
 * server: the functions for serving of include/shoal.h. A struct shoal_server holds what the server
 * borrows: options and memory plan.
 */
#include "lib/internal.h"

#include "api/api.h"
#include "serve/serve.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct shoal_server {
    struct shoal *s;
    struct option_row *rows; /* of the options */
    struct serve_options options;
    struct memory_plan plan;
    struct server *server; /* NULL: not started */
    char *url, *token_file;
};

static void server_ready(void *ctx, const struct serve_ready *r) {
    struct shoal_server *v = ctx;
    v->url = xstrdup(r->page);
    v->token_file = xstrdup(r->token_path);
}

/* Describes the memory of the server, which has no limit. */
static int plan_make(struct shoal_server *v, struct error *err) {
    struct memory_plan_input in = {.max_options = v->s->engine_options,
                                   .requests = (size_t)v->options.request_memory};
    if (model_measure(v->s->path, v->s->model->cls, &in.model, err) != OK) return err->code;
    return memory_plan_make(&in, &v->plan, err);
}

/* The threads of the server inherit the mask: signals belong to the threads of the application, and
 * a client that closes its connection must not raise SIGPIPE. */
static void server_start(struct shoal_server *v, struct error *err) {
    struct shoal *s = v->s;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    v->server = serve_start(s->model, s->engine, &s->engine_options, s->path, &v->options, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (v->server) s->server = v;
}

static int engine_check_idle(const struct shoal *s, struct error *err) {
    int n = engine_unfinished(s->engine);
    return n ? error_set(err, ERR_STATE, "%d submitted requests are unfinished", n) : OK;
}

static int options_complete(struct shoal_server *v, const char *const *options, struct error *err) {
    struct serve_options *o = &v->options;
    int rc = call_options_parse(v->rows, o, options, err);
    if (rc == OK) rc = serve_options_check(o, err);
    if (rc == OK) rc = plan_make(v, err);
    if (rc == OK) rc = serve_options_add_models(o, v->s->path, v->s->model->cls, err);
    o->base_engine = v->plan.engine;
    o->base_engine.max_len = v->s->named_len;
    o->base_engine.n_pages = 0;
    o->base_engine.pool = NULL;
    o->plan = &v->plan;
    o->modules = api_modules;
    o->ready = server_ready;
    o->ready_ctx = v;
    return rc;
}

struct shoal_server *shoal_serve(struct shoal *s, const char *const *options,
                                 struct shoal_error *err) {
    struct error inner = {0};
    struct shoal_server *v = xcalloc(1, sizeof *v);
    v->s = s;
    v->rows = options_join(serve_option_rows,
                           (const struct option_table[]){
                               {http_option_rows, offsetof(struct serve_options, http)}, {0}});
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = engine_check_idle(s, &inner);
    if (rc == OK) rc = options_complete(v, options, &inner);
    if (rc == OK) server_start(v, &inner);
    if (v->server) return v;
    error_copy(err, &inner);
    shoal_server_stop(v);
    return NULL;
}

const char *shoal_server_url(const struct shoal_server *v) {
    return v->url;
}

const char *shoal_server_token_file(const struct shoal_server *v) {
    return v->token_file;
}

void shoal_server_stop(struct shoal_server *v) {
    if (!v) return;
    if (v->server) {
        serve_stop(v->server);
        v->s->server = NULL;
    }
    strings_release(&v->options.bases);
    options_release(v->rows, &v->options);
    free(v->rows);
    free(v->url);
    free(v->token_file);
    free(v);
}
