/* shoal train and shoal adapter: make adapters from conversations, look at them, blend and mutate
 * them. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "train/train.h"

#include <math.h>
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
    if (rc == OK) rc = train(c, options, m, pool, err);
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

struct adapter_command {
    struct strings parents;
    char *model, *child, *compat;
    double alpha, mut, mut_std;
    int64_t rank, seed;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct adapter_command, field), fallback, min, max, metavar, help }
static const struct option_row adapter_rows[] = {
    ROW("model", OPT_STRING, model, "models/fry", 0, 0, "MODEL",
        "the base that the adapters belong to"),
    ROW("parents", OPT_LIST, parents, NULL, 0, 0, "A B", "blend: two PEFT directories"),
    ROW("child", OPT_STRING, child, NULL, 0, 0, "DIR", "blend: where the child goes"),
    ROW("alpha", OPT_FLOAT, alpha, "0.5", -4, 4, "T", "blend: share of the second parent"),
    ROW("mut", OPT_FLOAT, mut, "0.05", 0, 1, "P", "blend: probability that a tensor mutates"),
    ROW("mut-std", OPT_FLOAT, mut_std, "0.01", 0, 100, "S",
        "blend: noise, relative to the tensor's own deviation"),
    ROW("rank", OPT_INT, rank, "0", 0, 1024, "R",
        "blend: rank of the child; 0: the larger parent's"),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15, "N", "blend: of the mutation"),
    ROW("compat", OPT_STRING, compat, NULL, 0, 0, "seed",
        "blend A and B apart and mutate absolutely, as the predecessor"),
    {0},
};
#undef ROW

static int adapter_info(const struct common *c, const struct model *m, const struct strings *args,
                        struct error *err) {
    if (args->n < 2) return error_set(err, ERR_USAGE, "name at least one adapter directory");
    for (int i = 1; i < args->n; i++) {
        struct adapter *a = adapter_load(args->v[i], &m->config, err);
        if (!a) return err->code;
        double norm = sqrt(adapter_dot(a, a));
        if (c->json)
            cli_print(json_pack("{s:s,s:s,s:i,s:f,s:f,s:I}", "adapter", args->v[i], "hash", a->hash,
                                "rank", a->config.r, "alpha", (double)a->config.alpha, "norm", norm,
                                "parameters", (json_int_t)a->n_data));
        else
            printf("%s: rank %d, alpha %g, %zu parameters, |ΔW| = %.4g\n  sha-256 %s\n", args->v[i],
                   a->config.r, (double)a->config.alpha, a->n_data, norm, a->hash);
        adapter_release(a);
    }
    return OK;
}

static int adapter_blend_files(const struct common *c, const struct adapter_command *o,
                               const struct model *m, struct error *err) {
    bool seed = o->compat && strcmp(o->compat, "seed") == 0;
    if (o->parents.n != 2)
        return error_set(err, ERR_USAGE, "--parents wants two adapter directories");
    if (!o->child) return error_set(err, ERR_USAGE, "--child is missing");
    if (o->compat && !seed) return error_set(err, ERR_USAGE, "--compat knows only 'seed'");
    struct adapter *a = adapter_load(o->parents.v[0], &m->config, err);
    struct adapter *b = a ? adapter_load(o->parents.v[1], &m->config, err) : NULL;
    struct adapter *mid = b ? adapter_blend(a, b, (float)o->alpha, (int32_t)o->rank,
                                            seed ? BLEND_SEED : BLEND_DELTA, err)
                            : NULL;
    struct adapter *child =
        mid ? adapter_mutate(mid, (float)o->mut, (float)o->mut_std, seed, (uint64_t)o->seed) : NULL;
    int rc = child ? adapter_save(child, o->child, m->name, err) : err->code;
    if (rc == OK && c->json)
        cli_print(json_pack("{s:s,s:s,s:i}", "child", o->child, "hash", child->hash, "rank",
                            child->config.r));
    else if (rc == OK)
        printf("%s: rank %d, sha-256 %s\n", o->child, child->config.r, child->hash);
    adapter_release(a);
    adapter_release(b);
    adapter_release(mid);
    adapter_release(child);
    return rc;
}

static int run_adapter(const struct common *c, const void *options, const struct strings *args,
                       struct error *err) {
    const struct adapter_command *o = options;
    char *path = cli_find(o->model);
    struct model *m = model_open(path, cli_class(c), err);
    int rc = m ? OK : err->code;
    if (rc == OK && strcmp(args->v[0], "info") == 0)
        rc = adapter_info(c, m, args, err);
    else if (rc == OK && strcmp(args->v[0], "blend") == 0)
        rc = adapter_blend_files(c, o, m, err);
    else if (rc == OK)
        rc = error_set(err, ERR_USAGE, "no '%s'; there are info and blend", args->v[0]);
    model_close(m);
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
const struct command cmd_adapter = {
    .name = "adapter",
    .args = "info|blend [DIR …]",
    .summary = "describe adapters, blend and mutate them",
    .about = "  shoal adapter info runs/ID/adapters/gen_0/critic\n"
             "  shoal adapter blend --parents A B --child C --alpha 0.5 --mut 0.05 --mut-std 0.01",
    .rows = adapter_rows,
    .size = sizeof(struct adapter_command),
    .min_args = 1,
    .max_args = -1,
    .run = run_adapter,
};
