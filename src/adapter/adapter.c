/*
 * adapter: the value itself — layout, construction, identity, reference count.
 *
 * One block of floats holds every A [R, in] and B [out, R], layer by layer, projection by
 * projection, A before B; `loras` points into it and is what the engine reads. Nothing here knows
 * files or algebra, and nothing writes to an adapter after its maker has returned it.
 *
 * Invariants: config, loras and data describe the same modules; config is normalised (`modules` is
 * NULL whenever one (r, alpha) for whole projections says the same), so that equal content has one
 * form and therefore one hash.
 */
#include "adapter/adapter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Some architectures have their own names for the same maps. */
static const struct {
    const char *name;
    enum proj p;
} aliases[] = {{"out_proj", PROJ_O}, {"c_fc", PROJ_UP}, {"c_proj", PROJ_DOWN}};

static int target_find(const char *name, size_t len) {
    for (size_t i = 0; i < ARRAY_LEN(aliases); i++)
        if (strlen(aliases[i].name) == len && memcmp(aliases[i].name, name, len) == 0)
            return aliases[i].p;
    for (int p = 0; p < N_PROJ; p++)
        if (strlen(proj_names[p]) == len && memcmp(proj_names[p], name, len) == 0) return p;
    return -1;
}

static int target_unknown(const char *name, size_t len, struct error *err) {
    struct buf known = {0};
    for (int p = 0; p < N_PROJ; p++) buf_printf(&known, "%s, ", proj_names[p]);
    error_set(err, ERR_USAGE, "unknown target '%.*s' (known: %sor all-linear)", (int)MIN(len, 80),
              name, known.data);
    buf_release(&known);
    return err->code;
}

int adapter_targets_parse(const char *list, bool target[N_PROJ], struct error *err) {
    int n = 0;
    memset(target, 0, N_PROJ * sizeof *target);
    for (const char *p = list; *p;) {
        size_t len = strcspn(p, ", ");
        if (len == strlen("all-linear") && memcmp(p, "all-linear", len) == 0) {
            for (int i = 0; i < N_PROJ; i++) target[i] = true;
            n++;
        } else if (len > 0) {
            int i = target_find(p, len);
            if (i < 0) return target_unknown(p, len, err);
            target[i] = true;
            n++;
        }
        p += len + (p[len] != 0);
    }
    return n > 0
               ? OK
               : error_set(err, ERR_USAGE, "no target named (try 'q_proj,v_proj' or 'all-linear')");
}

struct adapter_module adapter_module_at(const struct adapter_config *c, int32_t layer,
                                        enum proj p) {
    if (c->modules) return c->modules[layer * N_PROJ + (int)p];
    return c->target[p] ? (struct adapter_module){c->r, c->alpha} : (struct adapter_module){0, 0};
}

static size_t module_floats(const struct model_config *shape, enum proj p, int32_t r) {
    return ((size_t)proj_in(shape, p) + (size_t)proj_out(shape, p)) * (size_t)r;
}

size_t adapter_floats(const struct model_config *shape, const struct adapter_config *c) {
    size_t n = 0;
    for (int32_t l = 0; l < shape->n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) n += module_floats(shape, p, adapter_module_at(c, l, p).r);
    return n;
}

int adapter_config_check(const struct model_config *shape, const struct adapter_config *c,
                         struct error *err) {
    if (adapter_floats(shape, c) > 0) return OK;
    return error_set(err, ERR_USAGE, "none of the targets is a projection of a '%s' model",
                     shape->arch->name);
}

bool adapter_fits(const struct adapter *a, const struct model_config *shape) {
    bool same = a->shape.n_layers == shape->n_layers;
    for (int p = 0; p < N_PROJ; p++)
        same = same && proj_in(&a->shape, p) == proj_in(shape, p) &&
               proj_out(&a->shape, p) == proj_out(shape, p);
    return same;
}

static bool module_same(struct adapter_module a, struct adapter_module b) {
    return a.r == b.r && (a.r == 0 || a.alpha == b.alpha);
}

/* The pair that most modules have, the first of equals: the file's top-level r and lora_alpha. */
static struct adapter_module modules_commonest(const struct adapter_module *modules, int32_t n) {
    struct adapter_module best = {0, 0};
    int32_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t count = 0;
        for (int32_t j = 0; j < n && modules[i].r > 0; j++)
            count += module_same(modules[i], modules[j]);
        if (count > most) most = count, best = modules[i];
    }
    return best;
}

/* True when `modules` only says "these projections, in all layers, with this rank and alpha". */
static bool modules_uniform(const struct adapter_module *modules, int32_t n,
                            struct adapter_module all) {
    for (int32_t i = 0; i < n; i++) {
        bool layers_differ = (modules[i].r == 0) != (modules[i % N_PROJ].r == 0);
        if (layers_differ || (modules[i].r > 0 && !module_same(modules[i], all))) return false;
    }
    return true;
}

/* The one form that equal configurations share: no projection that the architecture lacks;
 * `modules`, where needed, is an owned copy. */
static struct adapter_config config_normalise(const struct model_config *shape,
                                              const struct adapter_config *from) {
    struct adapter_config c = *from;
    int32_t n = shape->n_layers * N_PROJ;
    for (int p = 0; p < N_PROJ; p++) c.target[p] &= proj_out(shape, (enum proj)p) > 0;
    if (!from->modules) return c;
    struct adapter_module *own = xcalloc((size_t)n, sizeof *own);
    memset(c.target, 0, sizeof c.target);
    for (int32_t i = 0; i < n; i++) {
        if (from->modules[i].r == 0 || proj_out(shape, i % N_PROJ) == 0) continue;
        own[i] = from->modules[i];
        c.target[i % N_PROJ] = true;
    }
    struct adapter_module top = modules_commonest(own, n);
    c.r = top.r;
    c.alpha = top.alpha;
    bool uniform = modules_uniform(own, n, top);
    c.modules = uniform ? NULL : own;
    if (uniform) free(own);
    return c;
}

static void config_check(const struct model_config *shape, const struct adapter_config *c) {
    CHECK(shape->n_layers > 0);
    CHECK(c->r >= 1 && c->r <= ADAPTER_RANK_MAX && isfinite(c->alpha) && isfinite(c->dropout));
    for (int32_t l = 0; l < shape->n_layers; l++) {
        for (int p = 0; p < N_PROJ; p++) {
            struct adapter_module m = adapter_module_at(c, l, p);
            CHECK(m.r >= 0 && m.r <= ADAPTER_RANK_MAX && isfinite(m.alpha));
        }
    }
}

static float module_scale(struct adapter_module m, bool rslora) {
    return (float)((double)m.alpha / (rslora ? sqrt(m.r) : (double)m.r));
}

/* Points every lora at its place in a->data. */
static void loras_lay(struct adapter *a) {
    const float *at = a->data;
    for (int32_t l = 0; l < a->shape.n_layers; l++) {
        for (int p = 0; p < N_PROJ; p++) {
            struct adapter_module m = adapter_module_at(&a->config, l, p);
            if (m.r == 0) continue;
            size_t n_a = (size_t)m.r * (size_t)proj_in(&a->shape, p);
            a->loras[l * N_PROJ + p] = (struct lora){
                .a = at, .b = at + n_a, .r = m.r, .scale = module_scale(m, a->config.rslora)};
            at += module_floats(&a->shape, p, m.r);
        }
    }
}

static uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/*
 * SHA-256 of a text that says what changes the adapter's effect or its training (sizes, ranks,
 * alphas, dropout), then the floats as they lie in memory (little-endian, as in the file). Lineage
 * and the base's name are not part of it.
 */
static void adapter_seal(struct adapter *a) {
    struct buf b = {0};
    const struct adapter_config *c = &a->config;
    buf_printf(&b, "shoal adapter 1\nlayers %d\n", (int)a->shape.n_layers);
    buf_printf(&b, "r %d alpha %08x dropout %08x rslora %d\n", (int)c->r, float_bits(c->alpha),
               float_bits(c->dropout), c->rslora);
    for (int p = 0; p < N_PROJ; p++)
        if (c->target[p])
            buf_printf(&b, "%s %d %d\n", proj_names[p], (int)proj_in(&a->shape, p),
                       (int)proj_out(&a->shape, p));
    for (int32_t i = 0; c->modules && i < a->shape.n_layers * N_PROJ; i++)
        if (c->modules[i].r > 0)
            buf_printf(&b, "%d %d %08x\n", (int)i, (int)c->modules[i].r,
                       float_bits(c->modules[i].alpha));
    struct hasher h;
    hasher_init(&h);
    hasher_add(&h, b.data, b.len);
    hasher_add(&h, a->data, a->n_data * sizeof *a->data);
    hasher_final(&h, a->hash);
    buf_release(&b);
}

/* Laid out, tensors not yet filled, hash not yet made. */
static struct adapter *adapter_blank(const struct model_config *shape,
                                     const struct adapter_config *c) {
    config_check(shape, c);
    struct adapter *a = xcalloc(1, sizeof *a);
    a->refs = 1;
    a->shape = *shape;
    a->config = config_normalise(shape, c);
    a->n_data = adapter_floats(shape, &a->config);
    CHECK(a->n_data > 0);
    a->loras = xcalloc((size_t)shape->n_layers * N_PROJ, sizeof *a->loras);
    a->data = xcalloc(a->n_data, sizeof *a->data);
    loras_lay(a);
    return a;
}

struct adapter *adapter_new(const struct model_config *shape, const struct adapter_config *c,
                            uint64_t seed) {
    struct adapter *a = adapter_blank(shape, c);
    for (int32_t i = 0; i < shape->n_layers * N_PROJ; i++) {
        const struct lora *lo = &a->loras[i];
        if (lo->r == 0) continue;
        /* One stream a tensor, so that a projection starts the same whatever else is targeted. */
        struct rng rng = rng_make(seed, RNG_INIT, (uint32_t)i, 0);
        int32_t in = proj_in(shape, i % N_PROJ);
        float bound = (float)(1 / sqrt(in)), *w = a->data + (lo->a - a->data);
        for (int64_t k = 0; k < (int64_t)lo->r * in; k++)
            w[k] = bound * (2 * rng_uniform(&rng) - 1);
    }
    adapter_seal(a);
    return a;
}

static void lineage_check(const json_t *lineage) {
    const char *key;
    json_t *value;
    CHECK(!lineage || json_is_object(lineage));
    json_object_foreach((json_t *)lineage, key, value) {
        CHECK(json_is_string(value));
    }
}

struct adapter *adapter_from_data(const struct model_config *shape, const struct adapter_config *c,
                                  const float *data, json_t *lineage) {
    lineage_check(lineage);
    struct adapter *a = adapter_blank(shape, c);
    memcpy(a->data, data, a->n_data * sizeof *data);
    a->lineage = lineage ? json_incref(lineage) : NULL;
    adapter_seal(a);
    return a;
}

struct adapter *adapter_retain(struct adapter *a) {
    __atomic_add_fetch(&a->refs, 1, __ATOMIC_RELAXED);
    return a;
}

void adapter_release(struct adapter *a) {
    if (!a || __atomic_sub_fetch(&a->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    free((void *)a->config.modules);
    free(a->loras);
    free(a->data);
    json_decref(a->lineage);
    free(a);
}
