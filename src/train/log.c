/*
 * log: train.jsonl, metrics in the store, report.html, and event files of TensorBoard on request.
 *
 * If a line cannot be written, the run ends: its last checkpoint remains valid, and a run without a
 * complete log has no evidence. The lines since the last checkpoint are added to the store in one
 * transaction. Curves store means of neighbouring points (struct curve), so the page of a million
 * updates is as small as that of a thousand.
 *
 * The log is independent of the method: it draws the metrics that the table `charts` names.
 */
#define _GNU_SOURCE
#include "train/train_loop.h"

#include "base/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CURVES = 32 }; /* largest number of adapters with a curve */

/* A chart has one line per adapter. With `key`, the values are line[object][adapter][key] of the
 * log's lines; without `key`, line[object][adapter]. Without `object`, the chart has one line for
 * the run: line[key]. */
struct chart {
    const char *title, *object, *key;
    const char
        *band_key; /* like `key`, for half the width of the band around the line; NULL: no band */
    double unit;   /* divisor of the values, such as 1e6 for MB */
};
static const struct chart charts[] = {
    {"Loss", "losses", NULL, NULL, 1},
    {"Reward of completions, mean and standard deviation", "adapters", "reward", "reward_std", 1},
    {"Fitness of members, mean and standard deviation", "adapters", "fitness", "fitness_std", 1},
    {"Margin: implicit reward of chosen less that of rejected", "adapters", "margin", NULL, 1},
    {"Share of pairs with a positive margin", "adapters", "accuracy", NULL, 1},
    {"Implicit reward of chosen answers", "adapters", "reward_chosen", NULL, 1},
    {"Implicit reward of rejected answers", "adapters", "reward_rejected", NULL, 1},
    {"KL to the start, nats per token", "adapters", "kl", NULL, 1},
    {"Share of prompts whose completions differ in reward", "adapters", "mixed", NULL, 1},
    {"Entropy of the policy, nats per token", "adapters", "entropy", NULL, 1},
    {"Length of completions, tokens", "adapters", "length", NULL, 1},
    {"Share of completions that end with the end token", "adapters", "ended", NULL, 1},
    {"Share of tokens whose ratio is clipped", "adapters", "clipped", NULL, 1},
    {"Updates taken back because of their KL", NULL, "not_applied", NULL, 1},
    {"Learning rate", NULL, "lr", NULL, 1},
    {"Gradient norm (before clipping)", NULL, "grad_norm", NULL, 1},
    {"Tokens a second", NULL, "tokens_per_s", NULL, 1},
    {"Memory, MB", NULL, "rss", NULL, 1e6},
};
enum { N_CHARTS = ARRAY_LEN(charts) };

struct train_log {
    char *dir, *path, *page, *title;
    struct store *store;
    const char *run;
    FILE *f;
    bool write_events;
    struct event_file *events;    /* open during a run with write_events */
    json_t *sections;             /* {heading: table} */
    json_t *names;                /* names of the adapters, once known */
    json_t *pending;              /* lines not yet in the store */
    int n;                        /* number of names with curves */
    struct curve *curves, *bands; /* [N_CHARTS][n], once names are known */
    double seconds, joules;       /* time and energy of earlier processes of this run */
    int64_t last_step;            /* step of the last line in the file */
};

static json_t *number_json(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

/* {step, loss, lr, grad_norm, tokens, targets, tokens_per_s, seconds, rss, peak, losses}, joules if
 * they are known, and the metrics of the method. A number that is not finite becomes null. */
static json_t *train_event_json(const struct train_event *e) {
    json_t *losses = json_object();
    for (int j = 0; j < e->n; j++)
        json_object_set_new(losses, e->jobs[j].name, number_json(e->jobs[j].last_loss));
    json_t *line = json_pack("{s:I,s:o,s:f,s:o,s:I,s:I,s:o,s:f,s:I,s:I,s:o}", "step",
                             (json_int_t)e->step, "loss", number_json(e->stats->loss), "lr", e->lr,
                             "grad_norm", number_json(e->stats->grad_norm), "tokens",
                             (json_int_t)e->stats->tokens, "targets", (json_int_t)e->stats->targets,
                             "tokens_per_s", number_json(e->tokens_per_s), "seconds", e->seconds,
                             "rss", (json_int_t)process_memory("VmRSS"), "peak",
                             (json_int_t)process_memory("VmHWM"), "losses", losses);
    energy_add_json(line, e->joules, 0);
    if (e->extra_metrics) json_object_update(line, (json_t *)(uintptr_t)e->extra_metrics);
    return line;
}

static char *line_text(const json_t *line) {
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text);
    return text;
}

static int log_line_write(FILE *f, const json_t *line, struct error *err) {
    char *text = line_text(line);
    bool written = fprintf(f, "%s\n", text) > 0 && fflush(f) == 0;
    free(text);
    return written ? OK : error_errno(err, "cannot write the training log");
}

static int jsonl_begin(void *ctx, int64_t done, const json_t *about, struct error *err) {
    (void)ctx, (void)done, (void)about, (void)err;
    return OK;
}

static int jsonl_update(void *ctx, const struct train_event *e, struct error *err) {
    json_t *line = train_event_json(e);
    int rc = log_line_write(ctx, line, err);
    json_decref(line);
    return rc ? error_wrap(err, "the log of update %lld", (long long)e->step) : OK;
}

struct train_callbacks train_jsonl_callbacks(FILE *f) {
    return (struct train_callbacks){.begin = jsonl_begin, .update = jsonl_update, .ctx = f};
}

struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run) {
    struct train_log *l = xcalloc(1, sizeof *l);
    l->dir = xstrdup(dir);
    l->path = path_join(dir, "train.jsonl");
    l->page = path_join(dir, "report.html");
    l->title = xstrdup(title);
    l->store = store;
    l->run = run;
    l->sections = json_object();
    l->pending = json_array();
    return l;
}

void train_log_free(struct train_log *l) {
    if (!l) return;
    if (l->f) fclose(l->f);
    event_file_close(l->events);
    json_decref(l->sections);
    json_decref(l->names);
    json_decref(l->pending);
    free(l->curves);
    free(l->bands);
    free(l->dir);
    free(l->path);
    free(l->page);
    free(l->title);
    free(l);
}

void train_log_section(struct train_log *l, const char *heading, json_t *value) {
    json_object_set_new(l->sections, heading, value);
}

void train_log_write_events(struct train_log *l) {
    l->write_events = true;
}

static double number_at(const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static const char *name_at(const struct train_log *l, int i) {
    return json_string_value(json_array_get(l->names, (size_t)i));
}

static int chart_n_lines(const struct train_log *l, const struct chart *c) {
    return c->object ? l->n : MIN(l->n, 1);
}

static void curves_add(struct train_log *l, const json_t *line) {
    double step = number_at(line, "step");
    for (int k = 0; k < N_CHARTS; k++) {
        const struct chart *c = &charts[k];
        for (int i = 0; i < chart_n_lines(l, c); i++) {
            const json_t *object = c->object ? json_object_get(line, c->object) : line;
            if (c->object && c->key) object = json_object_get(object, name_at(l, i));
            double y = number_at(object, c->key ? c->key : name_at(l, i)) / c->unit;
            curve_add(&l->curves[k * l->n + i], step, y);
            if (c->band_key)
                curve_add(&l->bands[k * l->n + i], step, number_at(object, c->band_key));
        }
    }
}

int log_lines_keep(const char *path, bool (*keep)(void *ctx, const json_t *line), void *ctx,
                   struct error *err) {
    struct atomic_file w = {0};
    FILE *old = fopen(path, "r");
    char *text = NULL;
    size_t cap = 0;
    ssize_t len;
    int rc = atomic_file_open(&w, path, err);
    while (rc == OK && old && (len = getline(&text, &cap, old)) > 0) {
        json_t *line = text[len - 1] == '\n' ? json_loadb(text, (size_t)len, 0, NULL) : NULL;
        if (line && keep(ctx, line)) rc = atomic_file_write(&w, text, (size_t)len, err);
        json_decref(line);
    }
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    if (old) fclose(old);
    free(text);
    return rc;
}

struct earlier_lines {
    struct train_log *log;
    int64_t done;
};

/* Keeps a line that an earlier process wrote, if the checkpoint includes its step. */
static bool earlier_line_keep(void *ctx, const json_t *line) {
    const struct earlier_lines *e = ctx;
    struct train_log *l = e->log;
    double step = number_at(line, "step");
    if (!(step > (double)l->last_step && step <= (double)e->done)) return false;
    curves_add(l, line);
    l->last_step = (int64_t)step;
    l->seconds = number_at(line, "seconds");
    if (!isfinite(l->seconds)) l->seconds = 0;
    l->joules = number_at(line, "joules");
    return true;
}

/* Rewrites the log without the lines after the checkpoint's step, then opens it for appending. */
static int log_continue(struct train_log *l, int64_t done, struct error *err) {
    struct earlier_lines earlier = {l, done};
    int rc = log_lines_keep(l->path, earlier_line_keep, &earlier, err);
    if (rc == OK && !(l->f = fopen(l->path, "a")))
        rc = error_errno(err, "cannot open '%s'", l->path);
    return rc;
}

static void row_add_count(json_t *row, const char *prefix, const char *key, const json_t *v) {
    char *name = xasprintf("%s%s", prefix, key);
    for (char *p = name; *p; p++)
        if (*p == '_') *p = ' '; // a heading can break at a blank
    if (json_is_object(v)) v = json_object_get(v, "count");
    if (json_is_integer(v)) json_object_set_new(row, name, json_integer(json_integer_value(v)));
    free(name);
}

/* The counts of a dataset's lint as one table row. */
static json_t *lint_row(const json_t *row) {
    const json_t *lint = json_object_get(row, "lint"), *lengths = json_object_get(lint, "lengths");
    json_t *flat = json_pack("{s:O}", "name", json_object_get(row, "name")), *v;
    const char *key;
    json_object_foreach ((json_t *)(uintptr_t)lint, key, v) row_add_count(flat, "", key, v);
    json_object_foreach (json_object_get(lint, "eval"), key, v)
        row_add_count(flat, "evaluation ", key, v);
    json_object_foreach ((json_t *)(uintptr_t)lengths, key, v)
        row_add_count(flat, "length ", key, v);
    return flat;
}

static void log_add_data_tables(struct train_log *l, const json_t *data) {
    json_t *files = json_array(), *lint = json_array(), *row;
    size_t i;
    json_array_foreach (data, i, row) {
        json_t *file = json_copy(row);
        json_object_del(file, "lint");
        json_array_append_new(files, file);
        json_array_append_new(lint, lint_row(row));
    }
    train_log_section(l, "Data", files);
    train_log_section(l, "Contents of the data, lengths in tokens", lint);
}

static int log_begin(void *ctx, int64_t done, const json_t *about, struct error *err) {
    struct train_log *l = ctx;
    json_t *data = json_object_get(about, "data"), *row;
    size_t i;
    CHECK(!l->names);
    l->names = json_array();
    json_array_foreach (data, i, row) json_array_append(l->names, json_object_get(row, "name"));
    l->n = MIN((int)json_array_size(l->names), MAX_CURVES);
    l->curves = xcalloc((size_t)(N_CHARTS * l->n), sizeof *l->curves);
    l->bands = xcalloc((size_t)(N_CHARTS * l->n), sizeof *l->bands);
    log_add_data_tables(l, data);
    int rc = log_continue(l, done, err);
    if (rc == OK && l->write_events && !(l->events = event_file_open(l->dir, done, err)))
        rc = err->code;
    return rc || !l->store ? rc : store_metric_truncate(l->store, l->run, done, err);
}

static int store_pending_lines(struct train_log *l, struct error *err) {
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

static int log_update(void *ctx, const struct train_event *e, struct error *err) {
    struct train_log *l = ctx;
    struct train_event event = *e;
    event.seconds += l->seconds;
    event.joules += l->joules;
    json_t *line = train_event_json(&event);
    int rc = log_line_write(l->f, line, err);
    if (rc) error_wrap(err, "'%s'", l->path);
    if (rc == OK && l->events) rc = event_file_add(l->events, event.step, line, err);
    curves_add(l, line);
    if (l->store)
        json_array_append_new(l->pending, line);
    else
        json_decref(line);
    if (rc == OK && e->checkpoint_due) rc = store_pending_lines(l, err);
    if (rc == OK && e->checkpoint_due) rc = train_log_report(l, err);
    return rc;
}

struct train_callbacks train_log_callbacks(struct train_log *l) {
    return (struct train_callbacks){.begin = log_begin, .update = log_update, .ctx = l};
}

static void chart_plot(struct buf *b, const struct train_log *l, int k) {
    const struct chart *c = &charts[k];
    const struct curve *curves = l->curves + k * l->n;
    const char *names[MAX_CURVES];
    int n = chart_n_lines(l, c), points = 0;
    for (int i = 0; i < n; i++) {
        names[i] = name_at(l, i);
        points += curves[i].n;
    }
    if (!points) return;
    buf_printf(b, "<h2>%s</h2>\n", c->title);
    plot_bands(b, c->title, "step", curves, l->bands + k * l->n, c->object ? names : NULL, n);
}

int train_log_report(struct train_log *l, struct error *err) {
    struct buf b = {0};
    const char *heading;
    json_t *value;
    html_page_open(&b, l->title);
    for (int k = 0; k < N_CHARTS; k++) chart_plot(&b, l, k);
    json_object_foreach (l->sections, heading, value) {
        buf_puts(&b, "<h2>");
        html_escape(&b, heading);
        buf_puts(&b, "</h2>\n");
        html_table(&b, value);
    }
    html_page_close(&b);
    int rc = file_write(l->page, b.data, b.len, err);
    buf_release(&b);
    return rc;
}
