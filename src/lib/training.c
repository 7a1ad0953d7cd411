/*
 * training: the functions for training of include/shoal.h: `shoal train` as a call, and a trainer
 * for the caller's own loop.
 *
 * A trainer is a LoRA trainer of backprop/ with the options of its optimizer. Samples with weight 1
 * are added as by supervised fine-tuning; others have a loss that is multiplied by their weight.
 * Invariant: after an error no sample of the failed call is left in the gradients. A NaN or Inf may
 * have reached them, so then all gradients since the last update are discarded.
 */
#include "lib/internal.h"

#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* `shoal train` */

static void result_append(void *list, const struct train_result *r) {
    json_array_append_new(list, train_result_json(r));
}

static int settings_run(struct shoal *s, const struct train_settings *o, json_t *list,
                        struct error *err) {
    struct train_request q;
    if (train_settings_check(o, false, err) != OK) return err->code;
    if (!model_hash(s->model, err)) return err->code; // for lineage
    int rc = train_request_open(&q, o, s->model, s->pool, err);
    if (rc == OK) {
        struct train_output out = train_settings_output(o);
        out.accept_rejected = true;
        out.on_result = result_append;
        out.ctx = list;
        rc = train_and_publish(&q, &out, err);
    }
    train_request_close(&q);
    return rc;
}

char *shoal_train(struct shoal *s, const char *const *options,
                  const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct option_row *rows = options_join(NULL, train_settings_tables);
    struct train_settings o = {0};
    struct error inner = {0};
    struct call c;
    json_t *list = json_array();
    call_begin(&c, callbacks);
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = call_options_parse(rows, &o, options, &inner);
    if (rc == OK) rc = settings_run(s, &o, list, &inner);
    options_release(rows, &o);
    free(rows);
    if (call_end(&c, rc, &inner, err) == OK) return json_result(list);
    json_decref(list);
    return NULL;
}

/* the trainer */

static const char *const trainer_options[] = {"lora-dropout",
                                              "optim",
                                              "momentum",
                                              "beta1",
                                              "beta2",
                                              "eps",
                                              "weight-decay",
                                              "max-grad-norm",
                                              "max-length",
                                              "kv-cache-dtype",
                                              "seed",
                                              "f32-backward",
                                              "gradient-checkpointing",
                                              NULL};

struct shoal_trainer {
    struct shoal *s;
    struct trainer *trainer;
    int n;
    int32_t max_length;      /* maximum number of tokens of a sample */
    bool cut;                /* longer samples are cut, not refused */
    char (*start)[HASH_LEN]; /* [n] hashes of the adapters that training began with */
};

static int adapters_check(const struct shoal *s, const struct shoal_adapter *const *adapters, int n,
                          struct error *err) {
    if (n < 1 || !adapters) return error_set(err, ERR_USAGE, "a trainer needs an adapter");
    for (int i = 0; i < n; i++) {
        if (!adapters[i]) return error_set(err, ERR_USAGE, "adapter %d is NULL", i);
        if (!adapter_fits(adapter_unwrap(adapters[i]), &s->model->config))
            return error_set(err, ERR_MISMATCH, "adapter %d does not fit the shape of model '%s'",
                             i, s->model->name);
    }
    return OK;
}

static int trainer_open(struct shoal_trainer *t, const struct shoal_adapter *const *adapters,
                        const struct train_options *o, struct error *err) {
    if (!model_hash(t->s->model, err)) return err->code; // for lineage
    t->cut = o->max_length > 0;
    t->max_length = t->s->model->config.max_seq_len;
    if (t->cut) t->max_length = (int32_t)MIN(o->max_length, (int64_t)t->max_length);
    t->start = xcalloc((size_t)t->n, sizeof *t->start);
    for (int i = 0; i < t->n; i++) memcpy(t->start[i], adapter_unwrap(adapters[i])->hash, HASH_LEN);
    t->trainer =
        trainer_new_lora(t->s->model, (struct adapter *const *)adapters, t->n, o, t->s->pool, err);
    return t->trainer ? OK : err->code;
}

struct shoal_trainer *shoal_trainer_new(struct shoal *s,
                                        const struct shoal_adapter *const *adapters, int n,
                                        const char *const *options, struct shoal_error *err) {
    struct error inner = {0};
    struct train_options o = {0};
    struct option_row *rows = options_select(train_option_rows, trainer_options);
    struct shoal_trainer *t = xcalloc(1, sizeof *t);
    *t = (struct shoal_trainer){.s = s, .n = n};
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = adapters_check(s, adapters, n, &inner);
    if (rc == OK) rc = call_options_parse(rows, &o, options, &inner);
    if (rc == OK) rc = trainer_open(t, adapters, &o, &inner);
    options_release(rows, &o);
    free(rows);
    if (rc == OK) return t;
    error_copy(err, &inner);
    shoal_trainer_free(t);
    return NULL;
}

void shoal_trainer_free(struct shoal_trainer *t) {
    if (!t) return;
    trainer_free(t->trainer);
    free(t->start);
    free(t);
}

static int call_check(const struct shoal_trainer *t, int adapter, struct error *err) {
    if (adapter < 0 || adapter >= t->n)
        return error_set(err, ERR_USAGE, "adapter %d; the trainer has %d", adapter, t->n);
    return model_check_idle(t->s, err);
}

/* Encodes a conversation for an adapter. Release the sample after an error too. */
static int sample_make(const struct shoal_trainer *t, int adapter,
                       const struct shoal_message *messages, int n, struct train_sample *out,
                       struct error *err) {
    struct token_ids ids = {0};
    struct buf mask = {0};
    int32_t targets = 0;
    *out = (struct train_sample){.adapter = adapter};
    if (call_check(t, adapter, err) != OK) return err->code;
    int rc = messages_encode(t->s, messages, n, false, &ids, &mask, err);
    out->tokens = ids.v;
    out->mask = (uint8_t *)mask.data;
    if (rc != OK) return rc;
    if (ids.n > t->max_length && !t->cut)
        return error_set(err, ERR_USAGE,
                         "the conversation has %d tokens; the model allows %d, 'max-length' cuts",
                         ids.n, t->max_length);
    out->n = MIN(ids.n, t->max_length);
    for (int32_t i = 1; i < out->n; i++) targets += out->mask[i];
    return targets ? OK
                   : error_set(err, ERR_USAGE, "the conversation has no text of the assistant");
}

/* The loss of samples with a weight: weight · Σ -log p over the targets. */
static int weighted_loss(void *ctx, struct loss_sample *v, int n, struct error *err) {
    double weight = *(const double *)ctx;
    (void)err;
    for (int s = 0; s < n; s++) {
        v[s].count = v[s].n;
        for (int32_t i = 0; i < v[s].n; i++) {
            v[s].weight[i] = (float)-weight;
            v[s].loss -= weight * v[s].logp[i];
        }
    }
    return OK;
}

/* Discards the gradients if the error left a NaN or Inf in them. */
static int check_gradients(struct shoal_trainer *t, int rc) {
    if (rc == ERR_NUMERIC) trainer_zero_grad(t->trainer);
    return rc;
}

int shoal_trainer_add(struct shoal_trainer *t, int adapter, const struct shoal_message *messages,
                      int n, double weight, struct shoal_error *err) {
    struct error inner = {0};
    struct train_sample sample;
    const struct loss_fn loss = {.fn = weighted_loss, .ctx = &weight};
    if (!isfinite((float)weight)) {
        error_set(&inner, ERR_NUMERIC, "the weight is %g", weight);
        return error_copy(err, &inner);
    }
    int rc = sample_make(t, adapter, messages, n, &sample, &inner);
    if (rc == OK)
        rc = check_gradients(
            t, weight == 1 ? trainer_accumulate(t->trainer, &sample, 1, &inner)
                           : trainer_accumulate_loss(t->trainer, &sample, 1, &loss, &inner));
    train_sample_release(&sample);
    return rc == OK ? OK : error_copy(err, &inner);
}

int shoal_trainer_update(struct shoal_trainer *t, double learning_rate, double *loss,
                         struct shoal_error *err) {
    struct error inner = {0};
    struct update_stats stats = {0};
    int rc = call_check(t, 0, &inner);
    if (rc == OK && !(learning_rate >= 0 && isfinite((float)learning_rate)))
        rc = error_set(&inner, ERR_USAGE, "the learning rate is %g; it must be at least 0",
                       learning_rate);
    if (rc == OK)
        rc = check_gradients(t, trainer_update(t->trainer, (float)learning_rate, &stats, &inner));
    if (rc != OK) return error_copy(err, &inner);
    if (loss) *loss = stats.loss;
    return OK;
}

int shoal_trainer_loss(struct shoal_trainer *t, int adapter, const struct shoal_message *messages,
                       int n, double *loss, struct shoal_error *err) {
    struct error inner = {0};
    struct train_sample sample;
    double nll = 0;
    int64_t targets = 1;
    int rc = sample_make(t, adapter, messages, n, &sample, &inner);
    if (rc == OK) rc = trainer_eval_loss(t->trainer, &sample, 1, &nll, &targets, &inner);
    train_sample_release(&sample);
    if (rc != OK) return error_copy(err, &inner);
    *loss = nll / (double)targets;
    return OK;
}

/* results and checkpoints */

struct shoal_adapter *shoal_trainer_adapter(struct shoal_trainer *t, int adapter,
                                            struct shoal_error *err) {
    struct error inner = {0};
    const struct model *m = t->s->model;
    if (call_check(t, adapter, &inner) != OK) {
        error_copy(err, &inner);
        return NULL;
    }
    char updates[32];
    snprintf(updates, sizeof updates, "%lld", (long long)trainer_update_count(t->trainer));
    json_t *lineage = json_pack("{s:s,s:s,s:s}", "operator", "trainer", "start", t->start[adapter],
                                "updates", updates);
    adapter_lineage_set_model(lineage, m);
    struct adapter *a = trainer_export_adapter(t->trainer, adapter, lineage);
    json_decref(lineage);
    if (adapter_bind(a, m, &inner) == OK) return adapter_wrap(a);
    error_copy(err, &inner);
    adapter_release(a);
    return NULL;
}

int shoal_trainer_save(struct shoal_trainer *t, const char *path, struct shoal_error *err) {
    struct error inner = {0};
    json_t *extra = json_object(), *start = json_array();
    for (int i = 0; i < t->n; i++) json_array_append_new(start, json_string(t->start[i]));
    json_object_set_new(extra, "start", start);
    int rc = trainer_save(t->trainer, path, extra, &inner);
    json_decref(extra);
    return rc == OK ? OK : error_copy(err, &inner);
}

int shoal_trainer_load(struct shoal_trainer *t, const char *path, struct shoal_error *err) {
    struct error inner = {0};
    json_t *extra = NULL;
    int rc = call_check(t, 0, &inner);
    if (rc == OK) rc = trainer_load(t->trainer, path, &extra, &inner);
    const json_t *list = json_object_get(extra, "start");
    for (int i = 0; rc == OK && i < t->n; i++) {
        const char *start = json_string_value(json_array_get(list, (size_t)i));
        if (start) snprintf(t->start[i], HASH_LEN, "%s", start);
    }
    json_decref(extra);
    return rc == OK ? OK : error_copy(err, &inner);
}
