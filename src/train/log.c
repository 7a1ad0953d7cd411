/*
 * log: train.jsonl, metrics in the store, report.html.
 *
 * A line that cannot be written ends the run with the system's words: the last checkpoint stands,
 * and a run without its log would be a run without its evidence. The store gets lines in one
 * transaction a checkpoint. Curves are kept as means (page.h), so a page of a million updates is
 * as small as one of a thousand.
 */
#define _GNU_SOURCE
#include "train/log.h"

#include "base/page.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CURVES = 32 }; /* adapters that have one of their own */
enum { CURVE_LR, CURVE_NORM, CURVE_SPEED, CURVE_MEMORY, N_CURVES };

struct train_log {
    char *path, *page, *title;
    struct store *store;
    const char *run;
    FILE *f;
    json_t *sections; /* heading: table */
    json_t *names;    /* of the adapters, once they are known */
    json_t *pending;  /* lines that the store has not */
    struct curve losses[MAX_CURVES], curves[N_CURVES];
    double seconds; /* before this process took over */
    int64_t last;   /* step of the last line kept */
};

static json_t *number_json(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

json_t *sft_event_json(const struct sft_event *e) {
    json_t *losses = json_object();
    for (int j = 0; j < e->n; j++)
        json_object_set_new(losses, e->jobs[j].name, number_json(e->jobs[j].last_loss));
    return json_pack("{s:I,s:o,s:f,s:o,s:I,s:I,s:o,s:f,s:I,s:I,s:o}", "step", (json_int_t)e->step,
                     "loss", number_json(e->stats->loss), "lr", e->lr, "grad_norm",
                     number_json(e->stats->grad_norm), "tokens", (json_int_t)e->stats->tokens,
                     "targets", (json_int_t)e->stats->targets, "tokens_per_s",
                     number_json(e->tokens_per_s), "seconds", e->seconds, "rss",
                     (json_int_t)process_bytes("VmRSS"), "peak", (json_int_t)process_bytes("VmHWM"),
                     "losses", losses);
}

static char *line_text(const json_t *line) {
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text);
    return text;
}

int train_log_line(FILE *f, const json_t *line, struct error *err) {
    char *text = line_text(line);
    bool written = fprintf(f, "%s\n", text) > 0 && fflush(f) == 0;
    free(text);
    return written ? OK : error_errno(err, "cannot write the training log");
}

struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run) {
    struct train_log *l = xcalloc(1, sizeof *l);
    l->path = path_join(dir, "train.jsonl");
    l->page = path_join(dir, "report.html");
    l->title = xstrdup(title);
    l->store = store;
    l->run = run;
    l->sections = json_object();
    l->pending = json_array();
    return l;
}

FILE *train_log_stream(struct train_log *l, struct error *err) {
    long whole = 0, at = 0;
    CHECK(!l->f);
    l->f = fopen(l->path, "a+");
    for (int c; l->f && (c = getc(l->f)) != EOF;) {
        at++;
        if (c == '\n') whole = at;
    }
    if (l->f && !ferror(l->f) && (at == whole || ftruncate(fileno(l->f), whole) == 0)) return l->f;
    error_errno(err, "cannot write '%s'", l->path);
    return NULL;
}

void train_log_free(struct train_log *l) {
    if (!l) return;
    if (l->f) fclose(l->f);
    json_decref(l->sections);
    json_decref(l->names);
    json_decref(l->pending);
    free(l->path);
    free(l->page);
    free(l->title);
    free(l);
}

void train_log_section(struct train_log *l, const char *heading, json_t *value) {
    json_object_set_new(l->sections, heading, value);
}

static double number_at(const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static void curves_add(struct train_log *l, const json_t *line) {
    static const char *const keys[N_CURVES] = {"lr", "grad_norm", "tokens_per_s", "rss"};
    double step = number_at(line, "step");
    const json_t *losses = json_object_get(line, "losses");
    json_t *name;
    size_t i;
    json_array_foreach (l->names, i, name)
        if (i < MAX_CURVES)
            curve_add(&l->losses[i], step, number_at(losses, json_string_value(name)));
    for (int k = 0; k < N_CURVES; k++)
        curve_add(&l->curves[k], step, number_at(line, keys[k]) / (k == CURVE_MEMORY ? 1e6 : 1));
}

/* A line of the run so far: kept when it belongs to what the checkpoint has seen. A last line that
 * a kill cut short, or what is no line of ours, is dropped. */
static int line_keep(struct train_log *l, const char *text, size_t len, int64_t done,
                     struct writer *w, struct error *err) {
    json_t *line = json_loadb(text, len, 0, NULL);
    double step = number_at(line, "step");
    int rc = OK;
    if (len > 0 && text[len - 1] == '\n' && step > (double)l->last && step <= (double)done) {
        rc = writer_put(w, text, len, err);
        curves_add(l, line);
        l->last = (int64_t)step;
        l->seconds = number_at(line, "seconds");
        if (!isfinite(l->seconds)) l->seconds = 0;
    }
    json_decref(line);
    return rc;
}

/* Rewrites the log as far as the checkpoint reaches; afterwards it is open for more. */
static int log_continue(struct train_log *l, int64_t done, struct error *err) {
    struct writer w = {0};
    FILE *old = done > 0 ? fopen(l->path, "r") : NULL;
    char *text = NULL;
    size_t cap = 0;
    ssize_t len;
    int rc = writer_open(&w, l->path, err);
    while (rc == OK && old && (len = getline(&text, &cap, old)) > 0)
        rc = line_keep(l, text, (size_t)len, done, &w, err);
    if (rc == OK) rc = writer_commit(&w, err);
    writer_abort(&w);
    if (old) fclose(old);
    free(text);
    if (rc == OK && !(l->f = fopen(l->path, "a")))
        rc = error_errno(err, "cannot open '%s'", l->path);
    return rc;
}

static int log_begin(void *ctx, int64_t done, const json_t *about, struct error *err) {
    struct train_log *l = ctx;
    json_t *data = json_object_get(about, "data"), *row;
    size_t i;
    l->names = json_array();
    json_array_foreach (data, i, row) json_array_append(l->names, json_object_get(row, "name"));
    train_log_section(l, "Data", json_deep_copy(data));
    int rc = log_continue(l, done, err);
    return rc || !l->store ? rc : store_metric_cut(l->store, l->run, done, err);
}

static int pending_store(struct train_log *l, struct error *err) {
    json_t *line;
    size_t i;
    if (!l->store || json_array_size(l->pending) == 0) return OK;
    int rc = store_begin(l->store, err);
    json_array_foreach (l->pending, i, line)
        if (rc == OK)
            rc = store_metric_put(l->store, l->run,
                                  json_integer_value(json_object_get(line, "step")), line, err);
    if (rc == OK) rc = store_commit(l->store, err);
    if (rc != OK) store_rollback(l->store);
    json_array_clear(l->pending);
    return rc;
}

static int log_update(void *ctx, const struct sft_event *e, struct error *err) {
    struct train_log *l = ctx;
    struct sft_event whole = *e;
    whole.seconds += l->seconds;
    json_t *line = sft_event_json(&whole);
    int rc = train_log_line(l->f, line, err);
    if (rc) error_wrap(err, "'%s'", l->path);
    curves_add(l, line);
    if (l->store)
        json_array_append_new(l->pending, line);
    else
        json_decref(line);
    if (rc == OK && e->due) rc = pending_store(l, err);
    if (rc == OK && e->due) rc = train_log_report(l, err);
    return rc;
}

struct sft_watch train_log_watch(struct train_log *l) {
    return (struct sft_watch){log_begin, log_update, l};
}

static void losses_plot(struct buf *b, const struct train_log *l) {
    const char *names[MAX_CURVES];
    size_t n = MIN(json_array_size(l->names), MAX_CURVES);
    for (size_t i = 0; i < n; i++) names[i] = json_string_value(json_array_get(l->names, i));
    buf_puts(b, "<h2>Loss</h2>\n");
    plot_curves(b, "loss by update", "update", l->losses, names, (int)n);
}

int train_log_report(struct train_log *l, struct error *err) {
    static const char *const titles[N_CURVES] = {"Learning rate", "Gradient norm (before clipping)",
                                                 "Tokens a second", "Memory, MB"};
    struct buf b = {0};
    const char *heading;
    json_t *value;
    page_open(&b, l->title);
    losses_plot(&b, l);
    for (int k = 0; k < N_CURVES; k++) {
        buf_printf(&b, "<h2>%s</h2>\n", titles[k]);
        plot_curves(&b, titles[k], "update", &l->curves[k], NULL, 1);
    }
    json_object_foreach (l->sections, heading, value) {
        buf_puts(&b, "<h2>");
        page_text(&b, heading);
        buf_puts(&b, "</h2>\n");
        page_table(&b, value);
    }
    page_close(&b);
    int rc = file_write(l->page, b.data, b.len, err);
    buf_release(&b);
    return rc;
}

static json_t *option_json(const struct option_row *row, const struct train_options *o) {
    const char *at = (const char *)o + row->offset;
    const struct strings *list = (const void *)at;
    json_t *v = NULL;
    if (row->type == OPT_BOOL) v = json_boolean(*(const bool *)at);
    if (row->type == OPT_INT) v = json_integer(*(const int64_t *)(const void *)at);
    if (row->type == OPT_FLOAT) v = json_real(*(const double *)(const void *)at);
    if (row->type == OPT_STRING) {
        const char *text = *(char *const *)(const void *)at;
        v = text ? json_string(text) : json_null();
    }
    if (row->type == OPT_LIST) {
        v = json_array();
        for (int i = 0; i < list->n; i++) json_array_append_new(v, json_string(list->v[i]));
    }
    return v;
}

json_t *train_options_json(const struct train_options *o) {
    json_t *all = json_object();
    for (const struct option_row *row = train_option_rows; row->name; row++) {
        json_t *v = option_json(row, o);
        if (v) json_object_set_new(all, row->name, v);
    }
    return all;
}
