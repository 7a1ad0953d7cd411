/* shoal eval MODEL: accuracy with intervals, base and adapters on the same items. */
#include "cli/setup.h"
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    char *tasks, *split;
    struct strings adapters;
    int64_t n, seed;
    bool working;
};
static const struct option_row rows[] = {
    {"tasks", OPT_STRING, offsetof(struct options, tasks), "fry", 0, 0, "LIST",
     "'fry' (all families) or family names, comma-separated"},
    {"adapters", OPT_LIST, offsetof(struct options, adapters), NULL, 0, 0, "DIR …",
     "PEFT directories to measure beside the base"},
    {"n", OPT_INT, offsetof(struct options, n), "1000", 1, 1e7, "N", "questions a family"},
    {"split", OPT_STRING, offsetof(struct options, split), "test", 0, 0, "NAME",
     "test, dev or train"},
    {"seed", OPT_INT, offsetof(struct options, seed), "1000003", 0, 9e15, "N",
     "draws the questions"},
    {"working", OPT_BOOL, offsetof(struct options, working), NULL, 0, 0, NULL,
     "let the model write its working first"},
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};

/* The questions that are in memory at once, with their tokens and answers. */
enum { QUESTIONS_WORK = 16 << 20 };

static int parse_split(const char *name, enum split *out, struct error *err) {
    static const char *const names[] = {"train", "dev", "test"};
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) return *out = (enum split)i, OK;
    return error_set(err, ERR_USAGE, "no split '%s'; there are train, dev and test", name);
}

static void print_score(const struct common *c, const char *task, const char *adapter,
                        const struct score *s) {
    struct interval ci = stats_wilson(s->correct, s->n);
    if (c->json)
        cli_print(json_pack("{s:s,s:s,s:I,s:f,s:f,s:f,s:I,s:I,s:I,s:f}", "task", task, "adapter",
                            adapter, "n", (json_int_t)s->n, "acc", ci.value, "lo", ci.lo, "hi",
                            ci.hi, "prefilled", (json_int_t)s->prefilled, "generated",
                            (json_int_t)s->generated, "truncated", (json_int_t)s->truncated,
                            "seconds", s->seconds));
    else
        printf("%-14s %-16s %7d %7.2f %%   %6.2f … %6.2f\n", task, adapter, (int)s->n,
               100 * ci.value, 100 * ci.lo, 100 * ci.hi);
}

static int eval_adapter(const struct common *c, const struct options *o, struct setup *s,
                        const bool pick[], enum split split, int a, struct error *err) {
    struct adapter *ad = a < 0 ? NULL : s->adapters[a].adapter;
    int rc = OK;
    for (int f = 0; rc == OK && f < fry_count(); f++) {
        if (!pick[f]) continue;
        struct score score = {0};
        rc = task_run(s->e, s->m->tok, f, split, (uint64_t)o->seed, (int32_t)o->n, ad, o->working,
                      NULL, &score, NULL, err);
        if (rc == OK)
            print_score(c, fry_families[f].name, a < 0 ? "base" : o->adapters.v[a], &score);
    }
    return rc;
}

static int eval_all(const struct common *c, const struct options *o, struct setup *s,
                    const bool pick[], enum split split, struct error *err) {
    int rc = OK;
    if (!s->m->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", s->path);
    for (int a = 0; a < o->adapters.n; a++)
        if (!setup_adapter(s, o->adapters.v[a], err)) return err->code;
    if (setup_engine(s, err) != OK) return err->code;
    if (!c->json)
        printf("%-14s %-16s %7s %9s   %s\n", "task", "adapter", "n", "accuracy", "95 % interval");
    for (int a = -1; rc == OK && a < o->adapters.n; a++)
        rc = eval_adapter(c, o, s, pick, split, a, err);
    return rc;
}

static int run(const struct common *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    bool pick[MAX_TASKS] = {false};
    enum split split = SPLIT_TEST;
    if (tasks_parse(o->tasks, pick, err) != OK || parse_split(o->split, &split, err) != OK)
        return err->code;
    struct setup_wants w = {.engine = {.max_rows = 512, .max_seqs = 256, .max_len = 256},
                            .adapters = &o->adapters,
                            .work = QUESTIONS_WORK};
    struct setup s;
    int rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
    if (rc == OK && s.m) rc = eval_all(c, o, &s, pick, split, err);
    return setup_close(&s, rc, err);
}

const struct command cmd_eval = {
    .name = "eval",
    .args = "MODEL",
    .summary = "accuracy with 95 % intervals, base and adapters on the same items",
    .about = "Asks fresh questions of each task and prints accuracy with Wilson's 95 % interval. "
             "Answers are decoded as one of\n"
             "the choices, never parsed out of text.\n\n"
             "  shoal eval models/fry --tasks fry --json\n"
             "  shoal eval models/fry --tasks route,order --adapters "
             "runs/ID/adapters/gen_0/explorer --n 5000",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
