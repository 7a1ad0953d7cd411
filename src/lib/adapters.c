/* adapters: the functions for adapters of include/shoal.h: load, make, combine, save. */
#include "lib/internal.h"

#include "evolve/evolve.h"
#include "train/train.h"

#include <math.h>
#include <stdlib.h>

static struct shoal_adapter *adapter_result(struct adapter *a, const struct error *inner,
                                            struct shoal_error *err) {
    if (!a) error_copy(err, inner);
    return adapter_wrap(a);
}

struct shoal_adapter *shoal_adapter_load(struct shoal *s, const char *path,
                                         struct shoal_error *err) {
    struct error inner = {0};
    struct adapter *a = NULL;
    if (model_check_idle(s, &inner) == OK) a = adapter_open(path, s->model, &inner);
    return adapter_result(a, &inner, err);
}

struct shoal_adapter *shoal_adapter_new(struct shoal *s, const char *const *options,
                                        struct shoal_error *err) {
    struct error inner = {0};
    struct train_options o;
    struct adapter_config c = {0};
    struct adapter *a = NULL;
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = call_options_parse(train_option_rows, &o, options, &inner);
    if (rc == OK) rc = train_adapter_config(&o, &s->model->config, &c, &inner);
    if (rc == OK) a = adapter_new_for_model(s->model, &c, (uint64_t)o.seed, &inner);
    adapter_config_release(&c);
    options_release(train_option_rows, &o);
    return adapter_result(a, &inner, err);
}

struct combine_options {
    int64_t rank, seed;
    double step; /* NAN: the operator's default */
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct combine_options, field), fallback, min, max, NULL, NULL }
static const struct option_row combine_rows[] = {
    ROW("rank", OPT_INT, rank, "0", 0, ADAPTER_RANK_MAX),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15),
    ROW("step", OPT_FLOAT, step, NULL, 0, 0),
    {0},
};
#undef ROW

struct shoal_adapter *shoal_adapter_combine(struct shoal *s, const char *operator_name,
                                            const struct shoal_adapter *const *adapters,
                                            const float *weights, int n, const char *const *options,
                                            struct shoal_error *err) {
    struct error inner = {0};
    struct combine_options o = {.step = NAN};
    struct adapter *a = NULL;
    int rc = call_options_apply(combine_rows, &o, options, &inner);
    const struct adapter_operator *op = rc == OK ? operator_find(operator_name, &inner) : NULL;
    if (op && !isnan(o.step)) rc = operator_check_option(op, "step", &inner);
    if (op && rc == OK) {
        const struct operands x = {.parents = (struct adapter *const *)adapters,
                                   .weights = weights,
                                   .n_parents = n,
                                   .rank = (int32_t)o.rank,
                                   .step = (float)o.step,
                                   .seed = (uint64_t)o.seed};
        a = operator_apply(op, &x, &inner);
    }
    if (a && adapter_bind(a, s->model, &inner) != OK) {
        adapter_release(a);
        a = NULL;
    }
    options_release(combine_rows, &o);
    return adapter_result(a, &inner, err);
}

int shoal_adapter_save(struct shoal *s, const struct shoal_adapter *a, const char *dir,
                       struct shoal_error *err) {
    struct error inner = {0};
    int rc = adapter_save(adapter_unwrap(a), dir, s->model->name, &inner);
    return rc == OK ? OK : error_copy(err, &inner);
}

const char *shoal_adapter_hash(const struct shoal_adapter *a) {
    return adapter_unwrap(a)->hash;
}

char *shoal_adapter_lineage(const struct shoal_adapter *a) {
    const json_t *lineage = adapter_unwrap(a)->lineage;
    return json_result(lineage ? json_deep_copy(lineage) : json_object());
}

struct shoal_adapter *shoal_adapter_retain(const struct shoal_adapter *a) {
    return adapter_wrap(adapter_retain(adapter_unwrap(a)));
}

void shoal_adapter_free(struct shoal_adapter *a) {
    adapter_release(adapter_unwrap(a));
}
