/* options: the options of a sleep, their checks, and the plan of a run. */
#include "sleep/internal.h"

#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct sleep_options, field), fallback, min, max, metavar, __VA_ARGS__ }
static const struct option_row sleep_option_rows[] = {
    ROW("memory", OPT_STRING, memory, "runs/calls.db", 0, 0, "FILE",
        "database of 'shoal memory' with the memories, or the .jsonl of 'shoal memory export'",
        JOB_ARG_SERVER_ONLY),
    ROW("user", OPT_STRING, user, "me", 0, 0, "NAME", "user whose memories are learned",
        JOB_ARG_SERVER_ONLY),
    ROW("out", OPT_STRING, learn.out, NULL, 0, 0, "DIR",
        "adapter directory of the user: training starts from its current version, and the result "
        "becomes its new version",
        JOB_ARG_SERVER_ONLY),
    ROW("init-adapter", OPT_STRING, learn.init_adapter, NULL, 0, 0, "DIR",
        "adapter from which the first sleep starts; default: a new one", JOB_ARG_INPUT_PATH),
    ROW("rehearse", OPT_STRING, rehearse, NULL, 0, 0, "LIST",
        "other tasks, which are learned as well and must not become worse: task families, or a "
        "file of {messages} or {question, answer}",
        JOB_ARG_BUILTIN_OR_PATH_LIST),
    ROW("rehearse-n", OPT_INT, rehearse_n, "450", 0, 1e5, "N",
        "training lines of each family of --rehearse, or of the file"),
    ROW("retain-n", OPT_INT, retain_n, "200", 1, 1e6, "N",
        "questions of each family, or of the file, that are measured before and after"),
    ROW("retain-points", OPT_FLOAT, points, "1", 0, 100, "X",
        "accuracy on the tasks of --rehearse that may be lost, in points"),
    ROW("max-memory", OPT_STRING, learn.max_memory, NULL, 0, 0, "SIZE",
        "memory limit of the process, such as 500M or 2G; the result is the same with every limit",
        JOB_ARG_TEXT),
    ENGINE_SEQS_ROW(struct sleep_options, learn.limits.max_seqs),
    {0},
};
const struct option_table sleep_option_tables[] = {
    {sleep_option_rows, 0}, {train_option_rows, offsetof(struct sleep_options, learn.train)}, {0}};
#undef ROW

struct train_settings sleep_train_settings(const struct sleep_options *o,
                                           const struct strings *data) {
    struct train_settings s = o->learn;
    s.data = *data;
    s.method = (char *)(uintptr_t) "sft";
    s.init_adapter = NULL; // the run opens it
    return s;
}

/* The settings before the run writes the training lines: an adapter without a file. */
static struct train_settings settings_without_lines(const struct sleep_options *o) {
    static char *no_file[] = {(char *)(uintptr_t) "adapter="};
    return sleep_train_settings(o, &(const struct strings){no_file, 1});
}

int sleep_options_check(const struct sleep_options *o, struct error *err) {
    if (!o->learn.out) return error_set(err, ERR_USAGE, "--out is missing");
    const struct train_settings s = settings_without_lines(o);
    return train_settings_check(&s, false, err);
}

static json_t *plan_make(const struct sleep_options *o, const struct sleep_facts *f,
                         const struct sleep_start *s, const struct sleep_rehearsal *r) {
    struct buf lines = {0};
    const int64_t rehearsal = sleep_rehearsal_write(r, o, &lines);
    const int64_t questions = (int64_t)SLEEP_HELD_OUT * f->n;
    buf_release(&lines);
    json_t *plan = json_pack(
        "{s:s,s:i,s:i,s:I,s:I,s:I,s:I,s:s,s:s,s:O,s:O,s:b}", "user", o->user, "memories",
        f->n_memories, "facts", f->n, "lines", (json_int_t)SLEEP_QUESTIONS * f->n, "rehearsal",
        (json_int_t)rehearsal, "questions", (json_int_t)questions, "questions_to_retain",
        (json_int_t)(r->n_sets * sleep_rehearsal_size(r, true, o->retain_n)), "start",
        s->hash[0] ? s->hash : "a new adapter", "base", s->base[0] ? s->base : "a new adapter",
        "unlearned", s->unlearned, "versions", s->versions, "up_to_date", (int)s->up_to_date);
    if (f->n == 0) return plan;
    char *trained = sleep_trained_question(f->v[0].language, f->v[0].attribute, 0),
         *held_out = sleep_held_out_question(f->v[0].language, f->v[0].attribute, 0);
    json_object_set_new(plan, "example",
                        json_pack("{s:s,s:s,s:s}", "trained", trained, "measured", held_out,
                                  "answer", f->v[0].answer));
    free(trained);
    free(held_out);
    return plan;
}

json_t *sleep_plan(const struct sleep_options *o, const struct model_size *size,
                   struct error *err) {
    struct sleep_facts f = {0};
    struct sleep_start s = {0};
    struct sleep_rehearsal r = {0};
    int rc = sleep_facts_open(o, &f, err);
    if (rc == OK) rc = sleep_start_find(o, &f, &size->config, &s, err);
    if (rc == OK) rc = sleep_rehearsal_open(o, &r, err);
    json_t *plan = rc == OK ? plan_make(o, &f, &s, &r) : NULL;
    sleep_rehearsal_release(&r);
    sleep_start_release(&s);
    sleep_facts_release(&f);
    return plan;
}

int sleep_memory_check(const struct sleep_options *o, const struct model_size *size,
                       enum numeric_class cls, struct pool *pool, struct error *err) {
    const struct train_settings s = settings_without_lines(o);
    return train_memory_check(&s, size, cls, pool, err);
}
