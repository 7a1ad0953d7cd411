/* shoal train: makes adapters from conversations. */
#define _GNU_SOURCE
#include "cli/train_run.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct train_command {
    struct train_options train;
    struct strings data;
    char *out;
    struct gate_options gate;
};

static struct option_row train_rows[64] = {
    {"data", OPT_LIST, offsetof(struct train_command, data), NULL, 0, 0, "FILE …",
     "conversations; NAME=FILE several times trains several adapters in one base pass"},
    {"out", OPT_STRING, offsetof(struct train_command, out), NULL, 0, 0, "DIR",
     "adapter directory; with several, the folder of them"},
    GATE_ROWS(struct train_command, gate),
};

/* The trainer's own rows follow the ones above; they write to the front of the same struct. */
__attribute__((constructor)) static void train_rows_fill(void) {
    size_t own = 0, n = 0;
    while (train_rows[own].name) own++;
    while (train_option_rows[n].name) n++;
    CHECK(own + n + 1 <= ARRAY_LEN(train_rows));
    memcpy(train_rows + own, train_option_rows, n * sizeof *train_rows);
}

static int train(const struct common *c, const struct train_command *o, struct model *m,
                 struct pool *pool, struct error *err) {
    struct sft_job jobs[32] = {{0}};
    char *names[32] = {0}, *dirs[32] = {0};
    int n = o->data.n;
    if (n < 1 || n > 32) return error_set(err, ERR_USAGE, "--data wants 1 to 32 files");
    if (!o->out) return error_set(err, ERR_USAGE, "--out is missing");
    for (int i = 0; i < n; i++) {
        const char *eq = strchr(o->data.v[i], '=');
        if (!eq && n > 1)
            return error_set(err, ERR_USAGE, "'%s': with several files each is NAME=FILE",
                             o->data.v[i]);
        names[i] = eq ? strndup(o->data.v[i], (size_t)(eq - o->data.v[i])) : xstrdup("adapter");
        jobs[i] = (struct sft_job){.name = names[i], .data = eq ? eq + 1 : o->data.v[i]};
    }
    for (int i = 0; i < n; i++)
        dirs[i] =
            n == 1 && !strchr(o->data.v[0], '=') ? xstrdup(o->out) : path_join(o->out, names[i]);
    char *checkpoint = path_join(o->out, "checkpoint.bin");
    struct train_run run;
    int rc = dir_make(o->out, err);
    if (rc == OK) {
        rc = train_run_open(&run, c, &o->gate, &o->train, m, pool, o->out, jobs, dirs, n, err);
        if (rc == OK) {
            const struct sft_watch watch = train_run_watch(&run);
            rc = sft_run_watched(m, jobs, n, &o->train, pool, checkpoint, &watch, err);
        }
        if (rc == OK) rc = train_run_finish(&run, jobs, err);
        if (rc == OK) unlink(checkpoint);
        rc = train_run_close(&run, rc, err);
    }
    for (int i = 0; i < n; i++) {
        adapter_release(jobs[i].result);
        free(names[i]);
        free(dirs[i]);
    }
    free(checkpoint);
    return rc;
}

static int run_train(const struct common *c, const void *options, const struct strings *args,
                     struct error *err) {
    char *path = cli_find(args->v[0]);
    struct pool *pool = pool_new((int)c->threads);
    struct model *m = model_open(path, cli_class(c), err);
    int rc = m ? OK : err->code;
    if (m && !m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK && model_hash(m, err)) rc = train(c, options, m, pool, err); // hash: for lineage
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

const struct command cmd_train = {
    .name = "train",
    .args = "MODEL --data FILE --out DIR",
    .summary = "fine-tune LoRA adapters on conversations",
    .about =
        "Conversations are {\"messages\": [...]}, {\"prompt\", \"completion\"} or {\"text\"}: "
        "one object a line, objects one after\n"
        "another, or an array. Loss is taken on the assistant's words. Interrupted training "
        "continues.\n"
        "With --eval-data, a version that is not better on it than the one before is set aside "
        "and the exit code is 1;\n"
        "what was at --out before can be had again with 'shoal adapter rollback DIR'.\n\n"
        "  shoal train models/fry --data data/personas/critic.jsonl --out /tmp/critic --r 8 "
        "--lr 4e-3\n"
        "  shoal train models/fry --data a=a.jsonl b=b.jsonl --out /tmp/both",
    .rows = train_rows,
    .size = sizeof(struct train_command),
    .min_args = 1,
    .max_args = 1,
    .run = run_train,
};
