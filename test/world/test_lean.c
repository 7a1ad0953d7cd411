/*
 * test_lean: methods that save memory without a change of results: f16 adapters, one trainer slot
 * for several adapters in turn, logits of the choices only.
 */
#include "backprop/backprop.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const int32_t choices[3] = {5, 7, 130}; // two in one panel of outputs

static struct model *tiny_model(enum tensor_type type) {
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find("fry-1", &c, &err), OK);
    c.n_layers = 2;
    return model_new_quantized(&c, 3, type, NUMERIC_EXACT);
}

static struct adapter *random_adapter(const struct model *m, uint64_t seed) {
    struct adapter_config c = {.r = 4, .alpha = 8};
    c.target[PROJ_Q] = c.target[PROJ_V] = true;
    struct adapter *a = adapter_new(&m->config, &c, seed),
                   *b = adapter_mutate(a, 1, 0.02f, true, seed);
    adapter_release(a);
    return b;
}

static struct adapter *round_to_f16(const struct adapter *a, const float *from, uint64_t seed) {
    struct rng r = rng_make(seed, RNG_TEST, 0, 0);
    size_t bytes = a->n_data * sizeof(float);
    return adapter_from_data_f16(&a->shape, &a->config, memcpy(xmalloc(bytes), from, bytes), NULL,
                                 &r);
}

static void test_f16_rounding(void **state) {
    struct model *m = tiny_model(TENSOR_F32);
    struct adapter *a = random_adapter(m, 1), *b = round_to_f16(a, a->data, 1),
                   *f32 = adapter_to_f32(b);
    (void)state;
    assert_null(b->data);
    assert_string_equal(b->hash, f32->hash);
    assert_string_not_equal(b->hash, a->hash);
    struct adapter *again = round_to_f16(a, f32->data, 2);
    assert_string_equal(again->hash, b->hash); // values that are already rounded do not change
    for (size_t i = 0; i < a->n_data; i++) {
        double digit = fmax(ldexp(1, -24), fabs((double)a->data[i]) * ldexp(1, -10));
        assert_true(fabs((double)(f32->data[i] - a->data[i])) <= digit);
    }
    assert_true(adapter_bytes(b) < adapter_bytes(a) * 6 / 10);
    adapter_release(again);
    adapter_release(f32);
    adapter_release(b);
    adapter_release(a);
    model_close(m);
}

/* Changes far smaller than a unit in the last place of f16 add up over a thousand updates. */
static void test_small_changes(void **state) {
    static const float values[] = {0.04f, -0.04f, 3e-5f, -2e-6f};
    struct model *m = tiny_model(TENSOR_F32);
    struct adapter *a = random_adapter(m, 1);
    enum { TIMES = 1000 };
    (void)state;
    for (size_t v = 0; v < ARRAY_LEN(values); v++) {
        float step = fabsf(values[v]) * 0x1p-14f;
        for (size_t i = 0; i < a->n_data; i++) a->data[i] = values[v];
        float *x = memcpy(xmalloc(a->n_data * sizeof *x), a->data, a->n_data * sizeof *x);
        double sum = 0, digit = fmax(ldexp(1, -24), fabs((double)values[v]) * ldexp(1, -10));
        for (int t = 0; t < TIMES / 10; t++) {
            for (size_t i = 0; i < a->n_data; i++) x[i] += 10 * step;
            struct adapter *b = round_to_f16(a, x, (uint64_t)t);
            adapter_copy_params(b, x);
            adapter_release(b);
        }
        for (size_t i = 0; i < a->n_data; i++) sum += (double)x[i];
        double moved = sum / (double)a->n_data - (double)values[v],
               noise = digit * sqrt(TIMES / 10.0 / (double)a->n_data);
        assert_true(fabs(moved - TIMES * (double)step) < 5 * noise + 1e-9 * TIMES);
        free(x);
    }
    adapter_release(a);
    model_close(m);
}

static int choice_loss(void *ctx, struct loss_sample *s, int n, struct error *err) {
    (void)err;
    for (int i = 0; i < n; i++) {
        assert_float_equal(exp(s[i].logp[0]) + exp(s[i].logp[1]) + exp(s[i].logp[2]), 1, 1e-9);
        s[i].count = 1;
        s[i].loss = -s[i].logp[0] + 0.5 * s[i].logp[2];
        s[i].weight[0] = -1;
        s[i].weight[1] = 0;
        s[i].weight[2] = 0.5f;
        *(double *)ctx += s[i].loss;
    }
    return OK;
}

static double accumulate_loss(struct trainer *t, int adapter) {
    struct error err;
    double sum = 0;
    int32_t tokens[2][6] = {{1, 2, 3, 4, 9, 7}, {8, 6, 4, 2, 0, 130}};
    uint8_t mask[6] = {0, 0, 0, 0, 0, 1};
    struct train_sample s[2];
    struct loss_fn loss = {
        .fn = choice_loss, .ctx = &sum, .temperature = 0.7f, .choices = choices, .n_choices = 3};
    for (int i = 0; i < 2; i++)
        s[i] = (struct train_sample){.tokens = tokens[i], .mask = mask, .n = 6, .adapter = adapter};
    assert_int_equal(trainer_accumulate_loss(t, s, 2, &loss, &err), OK);
    return sum;
}

static struct trainer *trainer_open(const struct model *m, struct adapter *const *a, int n,
                                    const char *optim, double momentum) {
    struct error err;
    struct train_options o;
    options_default(train_option_rows, &o);
    free(o.optim);
    o.optim = xstrdup(optim);
    o.momentum = momentum;
    o.lora_dropout = 0;
    struct trainer *t = trainer_new_lora(m, a, n, &o, NULL, &err);
    assert_non_null(t);
    options_release(train_option_rows, &o);
    return t;
}

/* The derivative along the gradient equals its squared norm. */
static void test_choices(void **state) {
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_Q8_0, TENSOR_NF4};
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(types); k++) {
        struct model *m = tiny_model(types[k]);
        struct adapter *a = random_adapter(m, 1);
        struct trainer *t = trainer_open(m, &a, 1, "sgd", 0);
        double square = 0, step = k ? 0.2 : 1e-3, losses[2]; // int8 inputs: the loss is a step
                                                             // function
        accumulate_loss(t, 0);
        size_t n = a->n_data;
        float *g = xcalloc(n, sizeof *g), *at = g;
        for (int i = 0; i < trainer_n_tensors(t); i++) {
            const struct train_tensor *x = trainer_tensor(t, i);
            memcpy(at, x->g, (size_t)x->n * sizeof *g);
            for (int64_t e = 0; e < x->n; e++) square += (double)x->g[e] * (double)x->g[e];
            at += x->n;
        }
        for (int side = 0; side < 2; side++) {
            at = g;
            for (int i = 0; i < trainer_n_tensors(t); i++) {
                struct train_tensor *x = trainer_tensor(t, i);
                double step_size = (side ? -2 : 1) * step / sqrt(square);
                for (int64_t e = 0; e < x->n; e++) x->w[e] += (float)(step_size * (double)*at++);
            }
            losses[side] = accumulate_loss(t, 0);
        }
        double slope = (losses[0] - losses[1]) / (2 * step), want = sqrt(square);
        print_message("%s %g\n", tensor_type_name(types[k]), slope / want);
        assert_float_equal(slope / want, 1, types[k] == TENSOR_F32 ? 0.02 : 0.3);
        free(g);
        trainer_free(t);
        adapter_release(a);
        model_close(m);
    }
}

/* Two adapters that take turns in one slot equal two adapters with separate slots. */
static void shared_slot_check(const char *optim, double momentum) {
    struct model *m = tiny_model(TENSOR_Q8_0);
    struct error err;
    struct adapter *a[2] = {random_adapter(m, 1), random_adapter(m, 2)};
    struct trainer *both = trainer_open(m, a, 2, optim, momentum),
                   *one = trainer_open(m, a, 1, optim, momentum);
    size_t bytes = trainer_optimizer_state_bytes(one, 0);
    assert_true((bytes == 0) == (momentum == 0));
    uint8_t *optimizer_states[2] = {xcalloc(1, bytes + 1), xcalloc(1, bytes + 1)};
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++) accumulate_loss(both, i);
        assert_int_equal(trainer_update(both, 0.01f, NULL, &err), OK);
        for (int i = 0; i < 2; i++) {
            trainer_import_adapter(one, 0, a[i], step ? optimizer_states[i] : NULL, step);
            accumulate_loss(one, 0);
            trainer_free_activations(one);
            assert_int_equal(trainer_update(one, 0.01f, NULL, &err), OK);
            trainer_optimizer_state(one, 0, optimizer_states[i]);
            adapter_release(a[i]);
            a[i] = trainer_export_adapter(one, 0, NULL);
        }
    }
    for (int i = 0; i < 2; i++) {
        struct adapter *want = trainer_export_adapter(both, i, NULL);
        assert_string_equal(a[i]->hash, want->hash);
        adapter_release(want);
        adapter_release(a[i]);
        free(optimizer_states[i]);
    }
    trainer_free(one);
    trainer_free(both);
    model_close(m);
}

static void test_shared_trainer_slot(void **state) {
    (void)state;
    shared_slot_check("adamw", 0.9);
    shared_slot_check("adamw_8bit", 0.9);
    shared_slot_check("sgd", 0.9);
    shared_slot_check("sgd", 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16_rounding), cmocka_unit_test(test_small_changes),
        cmocka_unit_test(test_choices), cmocka_unit_test(test_shared_trainer_slot)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
