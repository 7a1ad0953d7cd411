/*
 * test_train_golden: whole training runs compared with an independent implementation in numpy and
 * doubles.
 *
 * test/golden/train/NAME.json (see its README) is the output of test/oracle/train_oracle.py: losses
 * and gradient norms of every update, gradients of the first, norms of the trained weights after
 * the last. The models are those of test/golden/arch, made here in memory by the same formula of a
 * weight's name. A model that the trainer refuses as not trainable is skipped with a message; every
 * other error is a failure.
 *
 * Losses in single precision differ from double by less than 2e-5 over 50 updates; the tolerance is
 * 1e-4. Gradients after the first update are those of different weights, and clipped: 2e-3.
 *
 * The same runs in the fast class, which rounds to bf16 where the processor multiplies in tiles:
 * there only losses, the first gradient's norm and norms of trained weights are compared.
 */
#include "backprop/backprop.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include "model/internal.h"

// last: it needs four of the above
#include <cmocka.h>

#define TOLERANCE 1e-4
#define FAST_TOLERANCE 1e-2

struct golden {
    const char *name;
    enum numeric_class cls;
    double tolerance;
    json_t *root, *arch; /* the training run, and its model's file */
    struct model_config config;
    struct model *m;
    struct adapter *adapter; /* NULL: full */
    struct trainer *t;
    struct train_options o;
    struct train_sample *samples;
    int n_samples;
    double worst; /* largest fraction of the tolerance that was used */
};

static const json_t *field(const json_t *root, const char *key) {
    const json_t *v = json_object_get(root, key);
    if (!v) fail_msg("no '%s' in the golden file", key);
    return v;
}

static double number(const json_t *root, const char *key) {
    return json_number_value(field(root, key));
}

static double number_at(const json_t *list, size_t i) {
    assert_true(i < json_array_size(list));
    return json_number_value(json_array_get(list, i));
}

static bool flag(const struct golden *g, const char *key) {
    return json_is_true(field(g->root, key));
}

static json_t *golden_file(const char *folder, const char *name) {
    char path[128];
    struct error err;
    snprintf(path, sizeof path, "test/golden/%s/%s.json", folder, name);
    json_t *root = json_parse_file(path, &err);
    if (!root) fail_msg("%s", err.text);
    return root;
}

/* `width` is the scale of the compared values. */
static void assert_near(struct golden *g, double got, double want, double width, const char *what,
                        const char *name) {
    double off = fabs(got - want) / (g->tolerance * width);
    if (!(off < 1)) fail_msg("%s: %s '%s' is %.9g, not %.9g", g->name, what, name, got, want);
    g->worst = fmax(g->worst, off);
}

/* The entry of a weight in test/golden/arch's list of tensors, [name, shape, base, scale, …]; in a
 * multimodal file the names have a prefix. */
static const json_t *tensor_entry(const struct golden *g, const char *name) {
    const json_t *list = field(g->arch, "tensors");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *e = json_array_get(list, i);
        const char *have = json_string_value(json_array_get(e, 0));
        if (strncmp(have, "language_model.", 15) == 0) have += 15;
        if (strcmp(have, name) == 0) return e;
    }
    fail_msg("no tensor '%s' in the golden file", name);
    return NULL;
}

static float *weight_data(struct model *m, const struct weight_info *w) {
    const struct matrix *matrix = weight_matrix(m, w);
    return (float *)(uintptr_t)(matrix ? matrix->data : *weight_vector(m, w));
}

static void model_make(struct golden *g) {
    struct error err;
    if (hf_config_read(field(g->arch, "config"), &g->config, &err) != OK) fail_msg("%s", err.text);
    g->m = model_new_random(&g->config, 1, g->cls);
    for (int32_t i = 0; i < weight_count(&g->config); i++) {
        struct weight_info w;
        weight_at(&g->config, i, NAMING_HF, &w);
        const json_t *e = tensor_entry(g, w.name);
        float base = (float)number_at(e, 2) + (w.has_offset ? 1 : 0),
              scale = (float)number_at(e, 3);
        fixture_formula(weight_data(g->m, &w), w.n * w.k, json_string_value(json_array_get(e, 0)),
                        base, scale);
    }
}

/* Fills one tensor of the adapter by PEFT's name; returns its end. */
static float *lora_fill(const struct golden *g, float *at, int64_t n, int32_t l, int p, float base,
                        const char *what) {
    char name[160];
    const struct arch *a = g->config.arch;
    snprintf(name, sizeof name, "base_model.model.%s.%d.%s.lora_%s", a->hf_layers, (int)l,
             proj_hf_path(a, (enum proj)p), what);
    fixture_formula(at, n, name, base, 0.25f);
    return at + n;
}

static void adapter_make(struct golden *g) {
    struct error err;
    const json_t *numbers = field(g->root, "adapter");
    struct adapter_config ac = {.r = (int32_t)number_at(numbers, 0),
                                .alpha = (float)number_at(numbers, 1),
                                .rslora = flag(g, "rslora"),
                                .dora = flag(g, "dora")};
    assert_int_equal(adapter_targets_parse("all-linear", ac.target, &err), OK);
    size_t n = adapter_param_count(&g->config, &ac);
    float *data = xcalloc(n, sizeof *data), *at = data;
    for (int magnitudes = 0; magnitudes <= ac.dora; magnitudes++)
        for (int32_t l = 0; l < g->config.n_layers; l++)
            for (int p = 0; p < N_PROJ; p++) {
                int64_t in = proj_in(&g->config, (enum proj)p),
                        out = proj_out(&g->config, (enum proj)p);
                if (!proj_hf_path(g->config.arch, (enum proj)p)) continue;
                if (magnitudes) {
                    at = lora_fill(g, at, out, l, p, 1.5f, "magnitude_vector");
                    continue;
                }
                at = lora_fill(g, at, ac.r * in, l, p, 0, "A.weight");
                at = lora_fill(g, at, out * ac.r, l, p, 0, "B.weight");
            }
    assert_true(at == data + n);
    g->adapter = adapter_from_data(&g->config, &ac, data, NULL);
    free(data);
    if (ac.dora) assert_int_equal(adapter_bind(g->adapter, g->m, &err), OK);
}

static void options_make(struct golden *g) {
    const json_t *o = field(g->root, "options");
    options_default(train_option_rows, &g->o);
    free(g->o.kv_cache_dtype);
    g->o.kv_cache_dtype = NULL; // f32, as in PyTorch
    g->o.lora_dropout = 0;
    g->o.beta1 = number(o, "beta1");
    g->o.beta2 = number(o, "beta2");
    g->o.eps = number(o, "eps");
    g->o.weight_decay = number(o, "weight_decay");
    g->o.max_grad_norm = number(o, "max_grad_norm");
}

static void samples_make(struct golden *g) {
    const json_t *list = field(g->root, "samples");
    g->n_samples = (int)json_array_size(list);
    g->samples = xcalloc((size_t)g->n_samples, sizeof *g->samples);
    for (int i = 0; i < g->n_samples; i++) {
        const json_t *tokens = json_array_get(json_array_get(list, (size_t)i), 0),
                     *mask = json_array_get(json_array_get(list, (size_t)i), 1);
        size_t n = json_array_size(tokens);
        g->samples[i] = (struct train_sample){
            .tokens = xcalloc(n, sizeof(int32_t)), .mask = xcalloc(n, 1), .n = (int32_t)n};
        for (size_t j = 0; j < n; j++) {
            g->samples[i].tokens[j] = (int32_t)number_at(tokens, j);
            g->samples[i].mask[j] = (uint8_t)number_at(mask, j);
        }
    }
}

/* The trainer's tensor of that name; in full training, the one that contains the model's weight of
 * that name. */
static struct train_tensor *tensor_find(struct golden *g, const char *name) {
    float *data = NULL;
    for (int32_t i = 0; !g->adapter && i < weight_count(&g->config); i++) {
        struct weight_info w;
        weight_at(&g->config, i, NAMING_HF, &w);
        if (strcmp(w.name, name) == 0) data = weight_data(g->m, &w);
    }
    for (int i = 0; i < trainer_n_tensors(g->t); i++) {
        struct train_tensor *x = trainer_tensor(g->t, i);
        if (g->adapter ? strcmp(x->name, name) == 0 : x->w == data) return x;
    }
    fail_msg("%s: the trainer has no tensor '%s'", g->name, name);
    return NULL;
}

static double norm_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* Before the first update: gradients are sums over `targets`, the golden ones means. The scale of
 * an entry is the root mean square of its tensor, if that is larger. */
static void gradients_check(struct golden *g, double targets) {
    const char *name;
    json_t *want;
    assert_int_equal(json_object_size(field(g->root, "gradients")), trainer_n_tensors(g->t));
    json_object_foreach ((json_t *)(uintptr_t)field(g->root, "gradients"), name, want) {
        const struct train_tensor *x = tensor_find(g, name);
        double norm = number_at(want, 0), rms = norm / sqrt((double)x->n);
        assert_true(norm > 0);
        assert_near(g, norm_of(x->g, x->n) / targets, norm, norm, "the gradient's norm of", name);
        for (int64_t i = 0; i < 4; i++) {
            double e = number_at(want, (size_t)i + 1);
            assert_near(g, (double)x->g[i * (x->n - 1) / 3] / targets, e, fmax(fabs(e), rms),
                        "an entry of the gradient of", name);
        }
    }
}

/* The offset that the file omits from this weight's values. */
static int weight_offset(const struct golden *g, const char *name) {
    for (int32_t i = 0; !g->adapter && i < weight_count(&g->config); i++) {
        struct weight_info w;
        weight_at(&g->config, i, NAMING_HF, &w);
        if (strcmp(w.name, name) == 0) return w.has_offset;
    }
    return 0;
}

static void weights_check(struct golden *g) {
    const char *name;
    json_t *want;
    json_object_foreach ((json_t *)(uintptr_t)field(g->root, "weights"), name, want) {
        const struct train_tensor *x = tensor_find(g, name);
        double norm = json_number_value(want);
        float *w = xmalloc((size_t)x->n * sizeof *w);
        for (int64_t i = 0; i < x->n; i++) w[i] = x->w[i] - (float)weight_offset(g, name);
        assert_near(g, norm_of(w, x->n), norm, norm, "the norm of", name);
        free(w);
    }
}

static float rate(const struct golden *g, int64_t step) {
    const json_t *o = field(g->root, "options");
    const char *name = json_string_value(field(o, "lr_scheduler"));
    enum lr_schedule s = strcmp(name, "cosine") == 0   ? LR_COSINE
                         : strcmp(name, "linear") == 0 ? LR_LINEAR
                                                       : LR_CONSTANT;
    return lr_schedule_at(s, number(o, "lr"), number(o, "min_lr_ratio"), step,
                          (int64_t)number(o, "warmup"), (int64_t)number(o, "updates"));
}

/* The samples' order is the oracle's; returns the number of targets. */
static int64_t update_accumulate(struct golden *g, int64_t step) {
    struct error err;
    int64_t targets = 0;
    int micro = (int)number(g->root, "micro_batch"), per_update = 2 * micro;
    for (int i = 0; i < per_update; i++) {
        struct train_sample *s = &g->samples[(per_update * step + i) % g->n_samples];
        for (int32_t j = 1; j < s->n; j++) targets += s->mask[j];
        if (i % micro == 0 && trainer_accumulate(g->t, s, micro, &err) != OK)
            fail_msg("%s", err.text);
    }
    return targets;
}

static void updates_check(struct golden *g) {
    struct error err;
    const json_t *losses = field(g->root, "losses"), *norms = field(g->root, "norms");
    size_t n = json_array_size(losses);
    assert_true(n == (size_t)number(field(g->root, "options"), "updates") && n >= 10);
    for (size_t i = 0; i < n; i++) {
        char step[32];
        struct update_stats st;
        int64_t targets = update_accumulate(g, (int64_t)i);
        if (i == 0 && g->cls == NUMERIC_EXACT) gradients_check(g, (double)targets);
        if (trainer_update(g->t, rate(g, (int64_t)i), &st, &err) != OK) fail_msg("%s", err.text);
        snprintf(step, sizeof step, "%zu", i);
        assert_int_equal(st.targets, targets);
        assert_near(g, st.loss, number_at(losses, i), number_at(losses, i), "the loss of", step);
        if (i > 0 && g->cls == NUMERIC_FAST) continue; // later norms are of different weights
        assert_near(g, st.grad_norm, number_at(norms, i), number_at(norms, i) * (i ? 20 : 1),
                    "the gradient's norm of update", step);
    }
}

static void golden_open(struct golden *g, struct pool *pool, struct error *err) {
    g->root = golden_file("train", g->name);
    g->arch = golden_file("arch", json_string_value(field(g->root, "model")));
    model_make(g);
    if (!flag(g, "full")) adapter_make(g);
    options_make(g);
    samples_make(g);
    g->t = g->adapter ? trainer_new_lora(g->m, &g->adapter, 1, &g->o, pool, err)
                      : trainer_new_full(g->m, &g->o, pool, err);
}

static void golden_close(struct golden *g) {
    trainer_free(g->t);
    adapter_release(g->adapter);
    model_close(g->m);
    options_release(train_option_rows, &g->o);
    for (int i = 0; i < g->n_samples; i++) train_sample_release(&g->samples[i]);
    free(g->samples);
    json_decref(g->root);
    json_decref(g->arch);
}

/* Whether the error means that this model cannot be trained. */
static bool is_untrainable(const struct error *err) {
    return err->code == ERR_MISMATCH &&
           (strstr(err->text, "cannot be trained") || strstr(err->text, "is for plain LoRA only"));
}

static void golden_check(const char *name, enum numeric_class cls) {
    struct error err;
    struct golden g = {
        .name = name, .cls = cls, .tolerance = cls == NUMERIC_FAST ? FAST_TOLERANCE : TOLERANCE};
    struct pool *pool = pool_new(2);
    golden_open(&g, pool, &err);
    bool trained = g.t != NULL;
    if (trained) {
        updates_check(&g);
        weights_check(&g);
        print_message("%s: at most %.1e off\n", g.name, g.tolerance * g.worst);
    } else if (is_untrainable(&err)) {
        fprintf(stderr, "SKIP: %s: %s\n", g.name, err.text);
    } else {
        fail_msg("%s: %s", g.name, err.text);
    }
    golden_close(&g);
    pool_free(pool);
    if (!trained) skip();
}

static void golden_trains(void **state) {
    golden_check(*state, NUMERIC_EXACT);
}

static void golden_trains_fast(void **state) {
    golden_check(*state, NUMERIC_FAST);
}

#define GOLDEN(name)                                                                               \
    { name, golden_trains, NULL, NULL, (void *)(uintptr_t)name },                                  \
        { name " fast", golden_trains_fast, NULL, NULL, (void *)(uintptr_t)name }

int main(void) {
    const struct CMUnitTest tests[] = {
        GOLDEN("lora-llama"),   GOLDEN("lora-llama-biased"), GOLDEN("lora-qwen2"),
        GOLDEN("lora-qwen3"),   GOLDEN("lora-gemma3"),       GOLDEN("lora-gemma3-multimodal"),
        GOLDEN("lora-gpt-neo"), GOLDEN("rslora-llama"),      GOLDEN("dora-llama"),
        GOLDEN("full-llama"),   GOLDEN("full-qwen3"),        GOLDEN("full-gemma3"),
        GOLDEN("full-gpt-neo"),
    };
    log_quiet = true;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
