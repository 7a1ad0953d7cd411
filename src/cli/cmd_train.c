/* shoal train: makes adapters from conversations. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "train/train.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct train_command {
    struct train_options train;
    struct strings data;
    char *out;
};

static struct option_row train_rows[64] = {
    {"data", OPT_LIST, offsetof(struct train_command, data), NULL, 0, 0, "FILE …",
     "conversations; NAME=FILE several times trains several adapters in one base pass"},
    {"out", OPT_STRING, offsetof(struct train_command, out), NULL, 0, 0, "DIR",
     "adapter directory; with several, the folder of them"},
};

/* The trainer's own rows follow the two above; they write to the front of the same struct. */
__attribute__((constructor)) static void train_rows_fill(void) {
    size_t n = 0;
    while (train_option_rows[n].name) n++;
    CHECK(n + 3 <= ARRAY_LEN(train_rows));
    memcpy(train_rows + 2, train_option_rows, n * sizeof *train_rows);
}

static int save_jobs(const struct train_command *o, const struct model *m, struct sft_job *jobs,
                     int n, const struct common *c, struct error *err) {
    for (int i = 0; i < n; i++) {
        char *dir = n == 1 && !strchr(o->data.v[0], '=') ? xstrdup(o->out)
                                                         : path_join(o->out, jobs[i].name);
        int rc = adapter_save(jobs[i].result, dir, m->name, err);
        if (rc == OK && c->json)
            cli_print(json_pack("{s:s,s:s,s:s,s:f,s:f}", "adapter", jobs[i].name, "dir", dir,
                                "hash", jobs[i].result->hash, "first_loss", jobs[i].first_loss,
                                "last_loss", jobs[i].last_loss));
        else if (rc == OK)
            printf("%s: loss %.4f to %.4f, wrote '%s'\n", jobs[i].name, jobs[i].first_loss,
                   jobs[i].last_loss, dir);
        free(dir);
        if (rc != OK) return rc;
    }
    return OK;
}

static int train(const struct common *c, const struct train_command *o, const struct model *m,
                 struct pool *pool, struct error *err) {
    struct sft_job jobs[32] = {{0}};
    char *names[32] = {0};
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
    int rc = dir_make(o->out, err);
    char *checkpoint = path_join(o->out, "checkpoint.bin"),
         *log_path = path_join(o->out, "train.jsonl");
    FILE *log = rc == OK ? fopen(log_path, "a") : NULL;
    if (rc == OK && !log) rc = error_errno(err, "cannot write '%s'", log_path);
    if (rc == OK) rc = sft_run(m, jobs, n, &o->train, pool, checkpoint, log, err);
    if (rc == OK) rc = save_jobs(o, m, jobs, n, c, err);
    if (rc == OK) unlink(checkpoint);
    if (log) fclose(log);
    for (int i = 0; i < n; i++) {
        adapter_release(jobs[i].result);
        free(names[i]);
    }
    free(checkpoint);
    free(log_path);
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
    .about = "Conversations are {\"messages\": [...]}, {\"prompt\", \"completion\"} or {\"text\"}: "
             "one object a line, objects one after\n"
             "another, or an array. Loss is taken on the assistant's words. Interrupted training "
             "continues.\n\n"
             "  shoal train models/fry --data data/personas/critic.jsonl --out /tmp/critic --r 8 "
             "--lr 4e-3\n"
             "  shoal train models/fry --data a=a.jsonl b=b.jsonl --out /tmp/both",
    .rows = train_rows,
    .size = sizeof(struct train_command),
    .min_args = 1,
    .max_args = 1,
    .run = run_train,
};
