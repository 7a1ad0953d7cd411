/* agent_measure: `shoal agent --tasks`: see agent_measure.h. */
#define _GNU_SOURCE
#include "cli/agent_measure.h"

#include <stdlib.h>
#include <string.h>

struct measurement {
    const struct agent_measure_options *m;
    const struct agent_options *o;
    const struct grader *g;
    struct agent_tasks tasks;     /* as read */
    struct agent_tasks questions; /* each task `samples` times, in turn; borrowed from `tasks` */
    struct agent_run *runs;       /* [questions.n] */
};

static int write_runs(const struct measurement *x, struct error *err) {
    struct buf text = {0};
    for (int i = 0; i < x->questions.n; i++) {
        json_t *run = agent_run_json(&x->runs[i], x->o->tools);
        json_object_set_new(
            run, "right", json_boolean(agent_task_is_right(&x->questions.v[i], x->g, &x->runs[i])));
        json_object_set(run, "messages", x->questions.v[i].messages);
        buf_add_json_line(&text, run);
    }
    int rc = file_write(x->m->out, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

/* Whether an earlier run of the same task has the same conversation. */
static bool is_repeated(const struct measurement *x, int i) {
    int first = i - i % (int)x->m->samples;
    for (int k = first; k < i; k++)
        if (json_equal(x->runs[k].conversation, x->runs[i].conversation)) return true;
    return false;
}

static int write_traces(const struct measurement *x, struct error *err) {
    struct buf text = {0};
    int n = 0;
    buf_puts(&text, "");
    for (int i = 0; i < x->questions.n; i++)
        if (agent_task_is_right(&x->questions.v[i], x->g, &x->runs[i]) && !is_repeated(x, i)) {
            buf_add_json_line(&text, json_incref(x->runs[i].conversation));
            n++;
        }
    int rc = file_write(x->m->traces, text.data, text.len, err);
    buf_release(&text);
    if (rc == OK) log_info("%d different right runs in '%s'", n, x->m->traces);
    return rc;
}

static int write_demonstrations(const struct measurement *x, struct error *err) {
    struct buf text = {0};
    buf_puts(&text, "");
    int rc = agent_tasks_demonstrate(&x->tasks, x->o, &text, err);
    if (rc == OK) rc = file_write(x->m->demonstrations, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

static int write_calibration(const struct measurement *x, struct error *err) {
    int n = 0;
    double *confidence = xcalloc((size_t)x->questions.n, sizeof *confidence);
    bool *right = xcalloc((size_t)x->questions.n, sizeof *right);
    struct agent_calibration c;
    for (int i = 0; i < x->questions.n; i++) {
        if (!x->runs[i].answer) continue;
        confidence[n] = x->runs[i].confidence;
        right[n++] = agent_task_is_right(&x->questions.v[i], x->g, &x->runs[i]);
    }
    int rc = agent_calibrate(confidence, right, n, &c, err);
    if (rc == OK) {
        struct buf text = {0};
        buf_add_json_line(&text, json_pack("{s:f,s:f,s:i}", "a", c.a, "b", c.b, "answers", n));
        rc = file_write(x->m->calibrate, text.data, text.len, err);
        buf_release(&text);
    }
    free(confidence);
    free(right);
    return rc;
}

int agent_calibration_read(const char *path, struct agent_calibration *out, struct error *err) {
    json_t *v = json_parse_file(path, err);
    if (!v) return err->code;
    const json_t *a = json_object_get(v, "a"), *b = json_object_get(v, "b");
    int rc = json_is_number(a) && json_is_number(b)
                 ? OK
                 : error_set(err, ERR_FORMAT,
                             "'%s' is no calibration: 'shoal agent --tasks FILE --calibrate OUT' "
                             "writes one",
                             path);
    *out = (struct agent_calibration){json_number_value(a), json_number_value(b)};
    json_decref(v);
    return rc;
}

static void print_share(const char *name, const json_t *share) {
    if (!json_is_object(share)) {
        printf("  %-16s -\n", name);
        return;
    }
    printf("  %-16s %5.1f %% (%.1f to %.1f)\n", name,
           100 * json_number_value(json_object_get(share, "value")),
           100 * json_number_value(json_object_get(share, "lo")),
           100 * json_number_value(json_object_get(share, "hi")));
}

static void print_report(const json_t *report) {
    const char *kind;
    json_t *v;
    printf("%lld runs\n", (long long)json_integer_value(json_object_get(report, "n")));
    print_share("right answers", json_object_get(report, "accuracy"));
    json_object_foreach (json_object_get(report, "kinds"), kind, v)
        print_share(kind, json_object_get(v, "accuracy"));
    print_share("right calls", json_object_get(report, "right_calls"));
    print_share("unneeded calls", json_object_get(report, "unneeded"));
    printf("  %-16s %.3f; calibration error %.3f\n", "confidence",
           json_number_value(json_object_get(report, "confidence")),
           json_number_value(json_object_get(report, "calibration_error")));
    printf("  %-16s %lld; failed calls %lld, failed runs %lld\n", "calls",
           (long long)json_integer_value(json_object_get(report, "calls")),
           (long long)json_integer_value(json_object_get(report, "failed_calls")),
           (long long)json_integer_value(json_object_get(report, "failed_runs")));
}

static int measure(const struct cli_options *c, struct measurement *x, uint64_t seed,
                   struct error *err) {
    int n = x->tasks.n, samples = (int)x->m->samples;
    x->questions.v = xcalloc((size_t)n * (size_t)samples, sizeof *x->questions.v);
    for (int i = 0; i < n * samples; i++) x->questions.v[i] = x->tasks.v[i / samples];
    x->questions.n = n * samples;
    x->runs = xcalloc((size_t)x->questions.n, sizeof *x->runs);
    int rc = agent_tasks_run(&x->questions, x->o, seed, x->runs, err);
    if (rc == OK && x->m->out) rc = write_runs(x, err);
    if (rc == OK && x->m->traces) rc = write_traces(x, err);
    if (rc == OK && x->m->calibrate) rc = write_calibration(x, err);
    if (rc != OK) return rc;
    json_t *report = agent_tasks_report(&x->questions, x->g, x->runs, x->o->tools);
    if (c->json)
        cli_print_json(report);
    else {
        print_report(report);
        json_decref(report);
    }
    return OK;
}

int agent_measure(const struct cli_options *c, const struct agent_measure_options *m,
                  const struct agent_options *o, uint64_t seed, struct error *err) {
    struct measurement x = {.m = m, .o = o, .g = grader_find(m->grader, err)};
    if (!x.g) return err->code;
    int rc = agent_tasks_read(m->tasks, (int)m->n, x.g, &x.tasks, err);
    if (rc == OK)
        rc = m->demonstrations ? write_demonstrations(&x, err) : measure(c, &x, seed, err);
    for (int i = 0; x.runs && i < x.questions.n; i++) agent_run_release(&x.runs[i]);
    free(x.runs);
    free(x.questions.v);
    agent_tasks_release(&x.tasks);
    return rc;
}
