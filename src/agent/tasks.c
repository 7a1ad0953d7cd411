/*
 * tasks: questions with their answers and the calls that they need: their file, the report about
 * the runs that answered them, and conversations for training.
 */
#define _GNU_SOURCE
#include "agent/form.h"

#include "eval/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CALIBRATION_BINS = 10 };

/* reading */

struct task_reader {
    struct agent_tasks *out;
    const struct grader *g;
    int limit;
};

static void task_release(struct agent_task *t) {
    free(t->kind);
    free(t->reply);
    json_decref(t->messages);
    json_decref(t->calls);
    strings_release(&t->answers);
}

void agent_tasks_release(struct agent_tasks *t) {
    for (int i = 0; i < t->n; i++) task_release(&t->v[i]);
    free(t->v);
    *t = (struct agent_tasks){0};
}

static int answers_read(const json_t *answer, const struct grader *g, struct agent_task *t,
                        struct error *err) {
    size_t n = json_is_array(answer) ? json_array_size(answer) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(answer) ? json_array_get(answer, i) : answer;
        char *text = json_scalar_text(v);
        if (!text) return error_set(err, ERR_FORMAT, "'answer' is a text, or a list of texts");
        strings_add(&t->answers, text);
        free(text);
        if (grader_check(g, t->answers.v[i], err) != OK) return err->code;
    }
    return n ? OK : error_set(err, ERR_FORMAT, "'answer' is empty");
}

static int calls_read(json_t *calls, struct agent_task *t, struct error *err) {
    size_t i;
    const json_t *call;
    if (!calls) return OK;
    if (!json_is_array(calls))
        return error_set(err, ERR_FORMAT, "'calls' is a list of {name, arguments}");
    json_array_foreach (calls, i, call)
        if (!*json_get_string(call, "name") || !json_is_object(json_object_get(call, "arguments")))
            return error_set(err, ERR_FORMAT,
                             "call %zu needs the text 'name' and the object "
                             "'arguments'",
                             i + 1);
    t->calls = json_incref(calls);
    return OK;
}

static int task_read(const json_t *row, const struct grader *g, struct agent_task *t,
                     struct error *err) {
    const char *question = json_get_string(row, "question"), *kind = json_get_string(row, "kind"),
               *reply = json_get_string(row, "reply"); // "" if they are missing
    json_t *messages = json_object_get(row, "messages");
    if (!*question && !json_array_size(messages))
        return error_set(err, ERR_FORMAT,
                         "a task needs the text 'question' or the list 'messages'");
    int rc = answers_read(json_object_get(row, "answer"), g, t, err);
    if (rc == OK) rc = calls_read(json_object_get(row, "calls"), t, err);
    if (rc != OK) return rc;
    t->kind = xstrdup(*kind ? kind : "all");
    t->reply = xstrdup(*reply ? reply : t->answers.v[0]);
    t->messages = *question ? json_pack("[{s:s,s:s}]", "role", "user", "content", question)
                            : json_incref(messages);
    return OK;
}

static int line_read(void *ctx, const json_t *row, int line, struct error *err) {
    struct task_reader *r = ctx;
    struct agent_task t = {0};
    if (r->limit && r->out->n == r->limit) return OK;
    if (task_read(row, r->g, &t, err) != OK) {
        task_release(&t);
        return error_wrap(err, "line %d", line);
    }
    r->out->v = xrealloc(r->out->v, sizeof *r->out->v * (size_t)(r->out->n + 1));
    r->out->v[r->out->n++] = t;
    return OK;
}

int agent_tasks_read(const char *path, int limit, const struct grader *g, struct agent_tasks *out,
                     struct error *err) {
    struct task_reader r = {.out = out, .g = g, .limit = limit};
    *out = (struct agent_tasks){0};
    int rc = json_file_each(path, line_read, &r, err);
    if (rc != OK) return error_wrap(err, "'%s'", path);
    return out->n ? OK : error_set(err, ERR_FORMAT, "'%s' has no tasks", path);
}

/* report */

bool agent_task_is_right(const struct agent_task *t, const struct grader *g,
                         const struct agent_run *r) {
    return r->answer &&
           grader_grade(g, r->answer, (const char *const *)t->answers.v, t->answers.n).score >= 1;
}

struct counts {
    int64_t n, right;
    int64_t all_calls, failed_calls;
    int64_t calls, right_calls; /* in tasks that list theirs */
    int64_t without_calls, unneeded;
    int64_t steps, failed_runs, prefilled, cached, generated;
    int64_t binned[CALIBRATION_BINS], right_in_bin[CALIBRATION_BINS];
    double confidence, confidence_in_bin[CALIBRATION_BINS], seconds;
};

static bool call_is_right(const struct agent_step *s, const json_t *call,
                          const struct agent_tools *tools) {
    return call && strcmp(tools->v[s->tool].name, json_get_string(call, "name")) == 0 &&
           json_equal(s->arguments, json_object_get(call, "arguments"));
}

static void count_calls(struct counts *c, const struct agent_task *t, const struct agent_run *r,
                        const struct agent_tools *tools) {
    int n = 0;
    for (int i = 0; i < r->n_steps; i++) {
        const struct agent_step *s = &r->steps[i];
        if (s->tool < 0) continue;
        c->all_calls++;
        c->failed_calls += s->failed;
        if (json_array_size(t->calls)) {
            c->right_calls += call_is_right(s, json_array_get(t->calls, (size_t)n), tools);
            c->calls++;
        }
        n++;
    }
    if (t->calls && !json_array_size(t->calls)) {
        c->without_calls++;
        c->unneeded += n > 0;
    }
}

static void count_run(struct counts *c, const struct agent_task *t, const struct grader *g,
                      const struct agent_run *r, const struct agent_tools *tools) {
    bool right = agent_task_is_right(t, g, r);
    double confidence = r->answer && !isnan(r->calibrated) ? r->calibrated : r->confidence;
    int bin = MIN((int)(confidence * CALIBRATION_BINS), CALIBRATION_BINS - 1);
    c->n++;
    c->right += right;
    c->steps += r->n_steps;
    c->failed_runs += r->end == AGENT_FAILED;
    c->prefilled += r->prefilled;
    c->cached += r->cached;
    c->generated += r->generated;
    c->seconds += r->seconds;
    c->confidence += confidence;
    c->binned[bin]++;
    c->right_in_bin[bin] += right;
    c->confidence_in_bin[bin] += confidence;
    count_calls(c, t, r, tools);
}

static json_t *share_json(int64_t part, int64_t n) {
    return n ? stats_interval_json(stats_wilson(part, n)) : json_null();
}

static json_t *counts_json(const struct counts *c) {
    double error = 0;
    for (int b = 0; b < CALIBRATION_BINS; b++)
        error += fabs(c->confidence_in_bin[b] - (double)c->right_in_bin[b]) / (double)c->n;
    return json_pack(
        "{s:I,s:o,s:o,s:o,s:I,s:I,s:I,s:f,s:f,s:I,s:I,s:I,s:I,s:f}", "n", (json_int_t)c->n,
        "accuracy", share_json(c->right, c->n), "right_calls", share_json(c->right_calls, c->calls),
        "unneeded", share_json(c->unneeded, c->without_calls), "calls", (json_int_t)c->all_calls,
        "failed_calls", (json_int_t)c->failed_calls, "failed_runs", (json_int_t)c->failed_runs,
        "confidence", c->confidence / (double)c->n, "calibration_error", error, "steps",
        (json_int_t)c->steps, "prefilled", (json_int_t)c->prefilled, "cached",
        (json_int_t)c->cached, "generated", (json_int_t)c->generated, "seconds", c->seconds);
}

json_t *agent_tasks_report(const struct agent_tasks *t, const struct grader *g,
                           const struct agent_run *runs, const struct agent_tools *tools) {
    struct counts all = {0};
    json_t *kinds = json_object();
    for (int i = 0; i < t->n; i++) {
        const char *kind = t->v[i].kind;
        struct counts c = {0};
        count_run(&all, &t->v[i], g, &runs[i], tools);
        if (json_object_get(kinds, kind)) continue;
        for (int k = i; k < t->n; k++)
            if (strcmp(t->v[k].kind, kind) == 0) count_run(&c, &t->v[k], g, &runs[k], tools);
        json_object_set_new(kinds, kind, counts_json(&c));
    }
    json_t *report = counts_json(&all);
    json_object_set_new(report, "kinds", kinds);
    return report;
}

/* running */

int agent_tasks_run(const struct agent_tasks *t, const struct agent_options *o, uint64_t seed,
                    struct agent_run *runs, struct error *err) {
    struct progress progress;
    int rc = OK;
    progress_start(&progress, "tasks", t->n);
    for (int from = 0; rc == OK && from < t->n; from += AGENT_TASKS_AT_ONCE) {
        int n = MIN(AGENT_TASKS_AT_ONCE, t->n - from);
        for (int i = from; i < from + n; i++) {
            runs[i].messages = t->v[i].messages;
            runs[i].seed = seed + (uint64_t)i;
        }
        rc = agent_run_all(o, runs + from, n, err);
        progress_update(&progress, from + n, NULL);
        if (rc == OK) rc = log_check_cancelled(err);
    }
    progress_finish(&progress, NULL);
    return rc;
}

/* training data */

/* Makes the calls of a task and appends them with their results. */
static int demonstrate(const struct agent_call_form *f, const struct agent_task *t,
                       const struct agent_options *o, struct buf *out, struct error *err) {
    json_t *messages = agent_call_form_conversation(f, o->system, t->messages);
    struct buf result = {0};
    size_t i;
    const json_t *call;
    int rc = OK;
    json_array_foreach (t->calls, i, call) {
        const char *name = json_get_string(call, "name");
        const json_t *arguments = json_object_get(call, "arguments");
        int tool = agent_tools_find(o->tools, name);
        if (tool < 0) {
            rc =
                error_set(err, ERR_USAGE, "a task calls the tool '%s', which is not offered", name);
            break;
        }
        result.len = 0;
        agent_tool_call(&o->tools->v[tool], arguments, &result);
        agent_call_form_add(f, messages, "", &o->tools->v[tool], arguments, result.data);
    }
    agent_call_form_add_answer(f, messages, "", t->reply);
    if (rc == OK) buf_add_json_line(out, agent_call_form_request(f, messages));
    buf_release(&result);
    json_decref(messages);
    return rc;
}

int agent_tasks_demonstrate(const struct agent_tasks *t, const struct agent_options *o,
                            struct buf *out, struct error *err) {
    struct agent_call_form f;
    int rc = agent_call_form_init(&f, o->form, o->model, o->tools, err);
    for (int i = 0; rc == OK && i < t->n; i++)
        if (t->v[i].calls) rc = demonstrate(&f, &t->v[i], o, out, err);
    agent_call_form_release(&f);
    return rc;
}
