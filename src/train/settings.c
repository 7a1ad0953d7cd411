/*
 * settings: the options of a training, their checks, and the request that they describe: one job
 * for each file of the data.
 *
 * The flags of `shoal train` and the options of shoal_train are these tables. A name of NAME=FILE
 * becomes a folder below the output directory.
 */
#include "train/train.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, metavar, ...)                                             \
    { name, type, offsetof(struct train_settings, field), fallback, 0, 0, metavar, __VA_ARGS__ }
#define TABLE(rows, field)                                                                         \
    { rows, offsetof(struct train_settings, field) }

const struct option_row train_settings_rows[] = {
    ROW("data", OPT_LIST, data, NULL, "FILE",
        "training data; several NAME=FILE train several adapters in one pass of the base model",
        JOB_ARG_NAMED_FILE),
    ROW("format", OPT_STRING, format, NULL, "NAME",
        "form of the training data: messages, sharegpt, alpaca, …; default: by the keys",
        JOB_ARG_TEXT),
    ROW("out", OPT_STRING, out, NULL, "DIR",
        "adapter directory; with several adapters, their parent folder", JOB_ARG_OUTPUT_PATH),
    ROW("method", OPT_STRING, method, "sft", "NAME",
        "sft; dpo from preferences; reinforce, rloo or grpo from rewards; es: sft without "
        "gradients",
        JOB_ARG_TEXT),
    ROW("init-adapter", OPT_STRING, init_adapter, NULL, "DIR",
        "initial adapter: training starts from its weights", JOB_ARG_INPUT_PATH),
    ROW("alora-invocation", OPT_STRING, alora_invocation, NULL, "TEXT",
        "activated LoRA: the new adapter changes only the tokens from the last TEXT in the prompt "
        "on, and shares the prefix cache of those before it with the base model",
        JOB_ARG_TEXT),
    {"output-dir", OPT_ALIAS, 0, "out", 0, 0, NULL, NULL},
    ROW("max-memory", OPT_STRING, max_memory, NULL, "SIZE",
        "memory limit of the process, such as 500M or 2G: passes get smaller, results stay the "
        "same; a limit that is too small is refused before the training",
        JOB_ARG_TEXT),
    ENGINE_LIMIT_ROWS(struct train_settings, limits),
    {0},
};
const struct option_table train_settings_tables[] = {
    {train_settings_rows, 0},      TABLE(gate_option_rows, gate), TABLE(train_option_rows, train),
    TABLE(rl_option_rows, policy), TABLE(es_option_rows, es),     {0},
};

enum { MAX_JOBS = 32 };

/* Length of the name of NAME=FILE; 0: a file without a name. */
static size_t name_length(const char *data) {
    const char *equals = strchr(data, '=');
    return equals ? (size_t)(equals - data) : 0;
}

static int name_check(const char *data, size_t n, struct error *err) {
    bool dots = (n == 1 && data[0] == '.') || (n == 2 && data[0] == '.' && data[1] == '.');
    if (!dots && n <= NAME_MAX && !memchr(data, '/', n)) return OK;
    return error_set(err, ERR_USAGE,
                     "'%.*s' is not a valid adapter name: it becomes a folder below --out",
                     (int)MIN(n, 64), data);
}

static int names_check(const struct strings *data, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < data->n; i++) {
        const char *v = data->v[i];
        size_t n = name_length(v);
        rc = name_check(v, n, err);
        if (rc == OK && data->n > 1 && !strchr(v, '='))
            rc = error_set(err, ERR_USAGE, "'%s': with several files each is NAME=FILE", v);
        for (int j = 0; rc == OK && j < i; j++)
            if (strncmp(data->v[j], v, n + 1) == 0)
                rc = error_set(err, ERR_USAGE, "two adapters are named '%.*s'", (int)MIN(n, 64), v);
    }
    return rc;
}

int train_settings_check(const struct train_settings *s, bool plan, struct error *err) {
    enum lr_schedule schedule;
    enum optim optim;
    enum train_method method = METHOD_SFT;
    enum dtype kv;
    size_t limit;
    if (s->data.n < 1 || s->data.n > MAX_JOBS)
        return error_set(err, ERR_USAGE, "'data' requires 1 to %d files", MAX_JOBS);
    if (!s->out && !plan) return error_set(err, ERR_USAGE, "'out' is missing");
    int rc = names_check(&s->data, err);
    if (rc == OK) rc = optim_parse(s->train.optim, &optim, err);
    if (rc == OK) rc = lr_schedule_parse(s->train.lr_scheduler, &schedule, err);
    if (rc == OK) rc = train_method_parse(s->method, &method, err);
    if (rc == OK && s->max_memory) rc = size_parse(s->max_memory, &limit, err);
    if (rc == OK) rc = activation_memory_parse(s->train.activation_memory, &limit, err);
    if (rc == OK) rc = train_kv_dtype_parse(&s->train, NUMERIC_EXACT, NULL, &kv, err);
    if (rc == OK && s->alora_invocation && (s->init_adapter || s->train.use_dora))
        rc = error_set(err, ERR_USAGE, "--alora-invocation is for a new LoRA adapter; leave %s out",
                       s->init_adapter ? "it or --init-adapter" : "--use-dora");
    if (rc == OK && s->alora_invocation && method == METHOD_ES)
        rc = error_set(err, ERR_USAGE, "method es trains plain LoRA; leave --alora-invocation out");
    if (rc == OK && s->format) rc = sample_form_check(s->format, err);
    if (rc == OK && s->format && method != METHOD_SFT && method != METHOD_ES)
        rc = error_set(err, ERR_USAGE, "--format is for sft and es; '%s' has one form", s->method);
    return rc == OK && method == METHOD_ES ? es_options_check(&s->es, &s->train, err) : rc;
}

/* The text continues a prompt, in which the names of special tokens are these tokens. */
static int invocation_encode(const char *text, const struct model *m, struct token_ids *out,
                             struct error *err) {
    if (!m->tok)
        return error_set(err, ERR_STATE, "model '%s' has no tokenizer for --alora-invocation",
                         m->name);
    tokenizer_encode(m->tok, text, strlen(text),
                     TOKENIZER_PARSE_SPECIAL | TOKENIZER_NO_PREFIX_SPACE, out);
    if (out->n >= 1 && out->n <= ADAPTER_INVOCATION_MAX) return OK;
    return error_set(err, ERR_USAGE, "--alora-invocation has %d tokens, not 1 to %d", out->n,
                     ADAPTER_INVOCATION_MAX);
}

static struct train_job job_make(const struct train_settings *s, const char *data,
                                 struct adapter *start) {
    const char *equals = strchr(data, '=');
    char *name = equals ? xstrndup(data, (size_t)(equals - data)) : xstrdup("adapter");
    return (struct train_job){.name = name,
                              .data = equals ? equals + 1 : data,
                              .format = s->format,
                              .eval_data = data_file_for_adapter(&s->gate.eval_data, name),
                              .start = start ? adapter_retain(start) : NULL,
                              .keep_samples = true};
}

/* Refuses --max-model-len if the model has less, or if a question of --retain has more. */
static int limits_check(const struct train_settings *s, const struct model_config *c,
                        struct error *err) {
    bool pick[MAX_FAMILIES] = {false};
    if (engine_limits_check(&s->limits, c->max_seq_len, err) != OK ||
        (s->gate.retain && families_parse(s->gate.retain, pick, err) != OK))
        return err->code;
    int32_t need = families_max_tokens(pick, c->max_seq_len);
    return engine_limits_require(&s->limits, need, "a question of --retain", err);
}

int train_request_open(struct train_request *q, const struct train_settings *s, struct model *m,
                       struct pool *pool, struct error *err) {
    struct adapter *start = NULL;
    *q = (struct train_request){.m = m,
                                .pool = pool,
                                .train = &s->train,
                                .policy = &s->policy,
                                .es = &s->es,
                                .limits = s->limits};
    if (limits_check(s, &m->config, err) != OK) return err->code;
    if (train_method_parse(s->method, &q->method, err) != OK) return err->code;
    if (!memory_limit_get() && memory_limit_parse(s->max_memory, err) != OK) return err->code;
    if (s->alora_invocation && invocation_encode(s->alora_invocation, m, &q->invocation, err))
        return err->code;
    if (s->init_adapter && !(start = adapter_open(s->init_adapter, m, err))) return err->code;
    q->n = s->data.n;
    q->jobs = xcalloc((size_t)q->n, sizeof *q->jobs);
    for (int i = 0; i < q->n; i++) {
        q->jobs[i] = job_make(s, s->data.v[i], start);
        if (q->invocation.n > 0) q->jobs[i].invocation = &q->invocation;
    }
    adapter_release(start);
    return OK;
}

void train_request_close(struct train_request *q) {
    for (int i = 0; i < q->n; i++) {
        adapter_release(q->jobs[i].start);
        adapter_release(q->jobs[i].result);
        dataset_release(&q->jobs[i].samples);
        free((char *)(uintptr_t)q->jobs[i].name);
    }
    free(q->jobs);
    memory_limit_set(0);
    token_ids_release(&q->invocation);
}

struct train_output train_settings_output(const struct train_settings *s) {
    return (struct train_output){.dir = s->out,
                                 .subfolders = s->data.n > 1 || strchr(s->data.v[0], '=') != NULL,
                                 .gate = &s->gate};
}
