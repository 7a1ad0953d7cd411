/*
 * train_in_server: `shoal train` as a thread of `shoal serve`, over the model that the server has
 * in memory.
 *
 * It reads the command line of the job as the command does, but no settings file and no variable,
 * as for every job. The rest is what the command does with a model that it has opened itself, so
 * the adapter has the same bits.
 */
#include "cli/serve_command.h"
#include "cli/settings.h"
#include "jobs/jobs.h"
#include "train/train.h"

#include <stdlib.h>

static void result_print(void *ctx, const struct train_result *r) {
    job_run_print(ctx, train_result_json(r));
    train_effect_warn(r);
}

static int version_publish(void *ctx, const struct train_job *job, int64_t step, struct adapter *a,
                           struct error *err) {
    const struct train_host *host = ctx;
    (void)job;
    return host->publish(host->ctx, step, a, err);
}

static int limit_set(const struct train_host *h, struct error *err) {
    if (!h->memory) return memory_limit_parse(NULL, err);
    memory_limit_set_part(h->model, h->memory, "--train-memory");
    return OK;
}

static int settings_run(const struct train_settings *s, const struct job_run *r,
                        const struct train_host *h, struct pool *pool, struct error *err) {
    const struct model_size in_memory = {.config = h->model->config, .type = h->model->type};
    const struct train_versions versions = {h->publish_steps, version_publish,
                                            (void *)(uintptr_t)h};
    struct train_request q = {0};
    int rc = train_settings_check(s, false, err);
    if (rc == OK) rc = limit_set(h, err);
    if (rc == OK) rc = train_data_check(s, err);
    if (rc == OK) rc = train_memory_check(s, &in_memory, h->model->cls, pool, err);
    if (rc == OK) rc = train_request_open(&q, s, h->model, pool, err);
    if (rc == OK) {
        struct train_output out = train_settings_output(s);
        out.on_result = result_print;
        out.ctx = (void *)(uintptr_t)r;
        if (h->publish) q.versions = &versions;
        rc = train_and_publish(&q, &out, err);
    }
    train_request_close(&q);
    return rc;
}

int train_in_server(const struct job_run *r, const struct train_host *h, struct error *err) {
    struct option_row *common = settings_common_rows(), *own = settings_command_rows(&cmd_train),
                      *rows = options_join(common, (const struct option_table[]){
                                                       {own, sizeof(struct cli_options)}, {0}});
    char *values = xcalloc(1, sizeof(struct cli_options) + cmd_train.size);
    struct strings args = {0}; // the model
    options_default(rows, values);
    int rc = options_parse(rows, values, r->args->n - 1, r->args->v + 1, &args, err);
    if (rc == OK) {
        struct pool *pool = pool_new((int)((const struct cli_options *)(void *)values)->threads);
        pool_set_gate(pool, yield_task_wait, r->task);
        // the settings are the first member of the command's options
        rc = settings_run((const void *)(values + sizeof(struct cli_options)), r, h, pool, err);
        pool_free(pool);
    }
    options_release(rows, values);
    strings_release(&args);
    free(values);
    free(rows);
    free(own);
    free(common);
    return rc;
}
