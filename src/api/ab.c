/* ab: A/B tests and ratings of replies over HTTP (ops/ops.h). */
#define _GNU_SOURCE
#include "api/internal.h"
#include "eval/eval.h"
#include "serve/generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CORRECTION_BYTES = 1 << 20, MAX_COMMENT_BYTES = 64 << 10 };

/* Replies with 404 if the object is missing, 409 if its state does not allow the call. */
static void reply_error(struct exchange *x, const struct error *err) {
    if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "not_found", "%s", err->text);
    else if (err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else
        api_fail_error(x, err, NULL);
}

/* Replies with v and takes ownership of it; v NULL: replies with the error. */
static void reply(struct exchange *x, json_t *v, const struct error *err) {
    if (v)
        exchange_reply_json(x, 200, v);
    else
        reply_error(x, err);
}

/* experiments */

static void spec_release(struct ab_spec *p) {
    free(p->model);
    for (int k = 0; k < 2; k++) {
        free(p->names[k]);
        free(p->paths[k]);
        adapter_release(p->arms[k]);
    }
}

/* Reads a field that names a single adapter: its name, and in *out, unless NULL, its current
 * content. */
static int adapter_read(struct server *s, const json_t *body, const char *key, const char *fallback,
                        char **name, struct adapter **out, struct error *err) {
    const char *model = fallback;
    struct model_ref t;
    if (json_read_string(body, key, &model, err) != OK) return err->code;
    if (!model) return error_set(err, ERR_USAGE, "'%s' must name an adapter", key);
    if (model_ref_resolve(s, model, &t, err) != OK) return error_wrap(err, "'%s'", key);
    if (t.n != 1 || t.terms[0].weight != 1.0f || strcmp(t.label, "mix") == 0) {
        model_ref_release(&t);
        return error_set(err, ERR_USAGE, "'%s' must be one adapter, and '%.140s' is not", key,
                         model);
    }
    *name = xstrdup(t.label);
    if (out) *out = adapter_retain(t.terms[0].adapter);
    model_ref_release(&t);
    return OK;
}

/* The path of an adapter's files, malloc'ed; "": the adapter is not listed. */
static char *adapter_path(struct server *s, const char *name) {
    int n;
    struct adapter_entry *list = server_adapters(s, &n);
    char *path = NULL;
    for (int i = 0; i < n && !path; i++) {
        if (strcmp(list[i].name, name) != 0) continue;
        path = realpath(list[i].path, NULL);
        if (!path) path = xstrdup(list[i].path);
    }
    server_adapters_free(list, n);
    return path ? path : xstrdup("");
}

static int spec_read(struct server *s, const json_t *body, struct ab_spec *p, struct error *err) {
    *p = (struct ab_spec){.name = "",
                          .share = 0.5,
                          .alpha = 0.05,
                          .min_pairs = 20,
                          .max_pairs = 1000,
                          .once_per_user = true};
    if (json_read_name(body, "name", &p->name, err) != OK || ab_name_check(p->name, err) != OK ||
        adapter_read(s, body, "model", NULL, &p->model, NULL, err) != OK ||
        adapter_read(s, body, "a", p->model, &p->names[0], &p->arms[0], err) != OK ||
        adapter_read(s, body, "b", NULL, &p->names[1], &p->arms[1], err) != OK ||
        json_read_number(body, "share", 0.01, 0.99, &p->share, err) != OK ||
        json_read_bool(body, "once_per_user", &p->once_per_user, err) != OK ||
        json_read_number(body, "alpha", 1e-6, 0.5, &p->alpha, err) != OK ||
        json_read_int(body, "max_pairs", 1, SEQUENTIAL_PAIRS_MAX, &p->max_pairs, err) != OK)
        return err->code;
    p->min_pairs = MIN(p->min_pairs, p->max_pairs);
    if (json_read_int(body, "min_pairs", 1, p->max_pairs, &p->min_pairs, err) != OK)
        return err->code;
    for (int k = 0; k < 2; k++) p->paths[k] = adapter_path(s, p->names[k]);
    return OK;
}

static void start_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct ab_spec p = {0};
    struct error err;
    json_t *body = request_memory_json(s, x, &err), *out = NULL;
    int rc = body ? OK : err.code;
    if (rc == OK && !s->options->feedback)
        rc = error_set(&err, ERR_STATE,
                       "an experiment needs ratings: start the server without "
                       "--no-feedback");
    if (rc == OK) rc = spec_read(s, body, &p, &err);
    if (rc == OK) out = ab_start(s->ab, &p, &err);
    reply(x, out, &err);
    spec_release(&p);
    json_decref(body);
}

static void experiments_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    exchange_reply_json(x, 200, json_pack("{s:s,s:o}", "object", "list", "data", ab_list(s->ab)));
}

static void experiment_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    reply(x, ab_get(s->ab, exchange_wildcard(x), &err), &err);
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    reply(x, ab_delete(s->ab, exchange_wildcard(x), &err), &err);
}

static void stop_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *rest = exchange_wildcard(x), *operation = strchr(rest, '/');
    struct error err;
    if (!operation || strcmp(operation, "/stop") != 0) {
        api_fail(x, 404, NULL, NULL, "not_found", "there is POST /v1/ab and /v1/ab/NAME/stop");
        return;
    }
    char *name = xstrndup(rest, (size_t)(operation - rest));
    reply(x, ab_stop(s->ab, name, &err), &err);
    free(name);
}

/* ratings */

static int text_check(const char *key, const char *text, size_t max, struct error *err) {
    if (!text || (*text && strlen(text) <= max)) return OK;
    return error_set(err, ERR_USAGE, "'%s' must have 1 to %zu bytes", key, max);
}

static int rating_read(const json_t *body, struct feedback_rating *o, struct error *err) {
    double rating = 2;
    *o = (struct feedback_rating){.score = -1};
    if (json_read_string(body, "id", &o->id, err) != OK ||
        json_read_number(body, "rating", -1, 1, &rating, err) != OK ||
        json_read_string(body, "correction", &o->correction, err) != OK ||
        json_read_string(body, "comment", &o->comment, err) != OK ||
        text_check("correction", o->correction, MAX_CORRECTION_BYTES, err) != OK ||
        text_check("comment", o->comment, MAX_COMMENT_BYTES, err) != OK)
        return err->code;
    if (!o->id || strlen(o->id) >= FEEDBACK_ID_LEN)
        return error_set(err, ERR_USAGE, "'id' must be a reply's id");
    if (rating < 0 && rating != -1)
        return error_set(err, ERR_USAGE, "'rating' must be 1 or -1, or from 0 to 1");
    if (rating <= 1) o->score = fmax(rating, 0);
    if (o->score < 0 && !o->correction && !o->comment)
        return error_set(err, ERR_USAGE, "'rating', 'correction' or 'comment' must be given");
    return OK;
}

static void rate_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct feedback_rating o;
    struct error err;
    enum feedback_refusal why = FEEDBACK_NOT_REFUSED;
    bool counted = false;
    json_t *body = request_memory_json(s, x, &err);
    int rc = body ? rating_read(body, &o, &err) : err.code;
    if (rc == OK) rc = feedback_rate(s->ab, &o, exchange_key_id(x), &counted, &why, &err);
    if (rc == OK) {
        json_t *rating = o.score < 0 ? json_null() : json_real(o.score);
        exchange_reply_json(x, 200,
                            json_pack("{s:s,s:s,s:o,s:b}", "object", "feedback", "id", o.id,
                                      "rating", rating, "counted", counted));
    } else if (why == FEEDBACK_OVER_QUOTA) {
        api_fail(x, 429, NULL, NULL, "insufficient_quota", "%s", err.text);
    } else if (why == FEEDBACK_FILE_FULL) {
        api_fail(x, 507, NULL, NULL, "feedback_full", "%s", err.text);
    } else {
        reply_error(x, &err);
    }
    json_decref(body);
}

static void ratings_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    int64_t after = 0, limit = 100;
    bool more;
    json_t *rows = NULL;
    if (query_read_int(x, "after", 0, INT64_MAX, &after, &err) == OK &&
        query_read_int(x, "limit", 0, FEEDBACK_LIST_MAX, &limit, &err) == OK)
        rows = feedback_list(s->ab, after, limit, &more, &err);
    if (!rows) {
        reply_error(x, &err);
        return;
    }
    exchange_reply_json(x, 200,
                        json_pack("{s:s,s:o,s:I,s:b}", "object", "list", "data", rows, "last",
                                  (json_int_t)after + (json_int_t)json_array_size(rows), "has_more",
                                  more));
}

static enum stream_status export_pull(void *ctx, struct buf *out) {
    while (out->len == 0) {
        json_t *samples = feedback_export_next(ctx), *sample;
        size_t i;
        if (!samples) return STREAM_END;
        json_array_foreach (samples, i, sample) ndjson_add(NULL, json_incref(sample), out);
        json_decref(samples);
    }
    return STREAM_MORE;
}

static void export_close(void *ctx, bool finished) {
    (void)finished;
    feedback_export_close(ctx);
}

static void export_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *form = exchange_query(x, "form");
    bool preference = form && strcmp(form, "preference") == 0;
    struct error err;
    if (form && !preference && strcmp(form, "sft") != 0) {
        api_fail(x, 400, NULL, "form", "invalid_value", "'form' must be sft or preference");
        return;
    }
    struct feedback_export *e =
        feedback_export_open(s->ab, preference ? FEEDBACK_PREFERENCE : FEEDBACK_SFT, &err);
    if (!e) {
        reply_error(x, &err);
        return;
    }
    struct stream_source source = {.pull = export_pull, .close = export_close, .ctx = e};
    exchange_stream(x, 200, "application/x-ndjson", &source);
}

static const struct http_route routes[] = {
    {"POST", "/v1/ab", SCOPE_ADMIN, start_handle},
    {"GET", "/v1/ab", SCOPE_ADMIN, experiments_handle},
    {"GET", "/v1/ab/*", SCOPE_ADMIN, experiment_handle},
    {"POST", "/v1/ab/*", SCOPE_ADMIN, stop_handle},
    {"DELETE", "/v1/ab/*", SCOPE_ADMIN, delete_handle},
    {"POST", "/v1/feedback", SCOPE_CHAT, rate_handle},
    {"GET", "/v1/feedback", SCOPE_ADMIN, ratings_handle},
    {"GET", "/v1/feedback/export", SCOPE_ADMIN, export_handle},
    {0},
};

const struct server_module ab_module = {.routes = routes};
