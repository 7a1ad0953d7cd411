/*
 * adapter: memory layout, constructors, hash and reference count of struct adapter.
 *
 * One block of floats holds every A [R, in] and B [out, R], layer by layer, projection by
 * projection, A before B, then DoRA's magnitudes and the adapter's parts of embedding and head; the
 * pointers in `loras` and `vocab_overrides` lead into this block. File formats and algebra are in
 * other files. After a constructor has returned an adapter, adapter_bind (bind.c) computes its
 * multipliers, adapter_pack fills its cache of packs, and adapter_pack_only frees its f32 factors;
 * nothing else changes it.
 *
 * Invariants: config, loras and data describe the same modules; config is normalised, that is,
 * `modules` is NULL if `r`, `alpha` and `target` describe all modules. Equal content therefore has
 * one form and one hash.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct adapter_module adapter_module_at(const struct adapter_config *c, int32_t layer,
                                        enum proj p) {
    if (c->modules) return c->modules[layer * N_PROJ + (int)p];
    return c->target[p] ? (struct adapter_module){c->r, c->alpha} : (struct adapter_module){0, 0};
}

static size_t module_floats(const struct model_config *shape, enum proj p, int32_t r) {
    return ((size_t)proj_in(shape, p) + (size_t)proj_out(shape, p)) * (size_t)r;
}

static size_t table_floats(const struct model_config *shape, const struct adapter_vocab_config *t) {
    size_t d = (size_t)shape->d_model, v = (size_t)shape->vocab_size;
    return (v + d) * (size_t)t->lora.r + (t->full ? v * d : 0) + (size_t)t->n_ids * d;
}

size_t adapter_param_count(const struct model_config *shape, const struct adapter_config *c) {
    size_t n = table_floats(shape, &c->embed) + table_floats(shape, &c->head);
    if (c->dora && c->head.lora.r > 0) n += (size_t)shape->vocab_size;
    for (int32_t l = 0; l < shape->n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) {
            int32_t r = adapter_module_at(c, l, p).r;
            n += module_floats(shape, p, r);
            if (c->dora && r > 0) n += (size_t)proj_out(shape, p);
        }
    return n;
}

static bool table_is_used(const struct adapter_vocab_config *t) {
    return t->lora.r > 0 || t->full || t->n_ids > 0;
}

bool adapter_config_has_vocab(const struct adapter_config *c) {
    return table_is_used(&c->embed) || table_is_used(&c->head);
}

int adapter_invocation_check(const struct adapter_config *c, struct error *err) {
    if (c->n_invocation == 0 || (!c->dora && !adapter_config_has_vocab(c))) return OK;
    return error_set(err, ERR_MISMATCH,
                     "activated LoRA (alora_invocation_tokens) with %s is not supported; leave one "
                     "of them out",
                     c->dora ? "DoRA" : "a separate embedding or head, or low-rank parts of them");
}

int adapter_config_check(const struct model_config *shape, const struct adapter_config *c,
                         struct error *err) {
    const struct adapter_vocab_config *tables[] = {&c->embed, &c->head};
    for (int i = 0; i < 2; i++)
        if ((tables[i]->lora.r > 0) + tables[i]->full + (tables[i]->n_ids > 0) > 1)
            return error_set(err, ERR_USAGE,
                             "'%s' is in more than one of target, modules_to_save and "
                             "trainable_token_indices",
                             i ? "lm_head" : "embed_tokens");
    if (adapter_invocation_check(c, err)) return err->code;
    if (adapter_param_count(shape, c) > 0) return OK;
    return error_set(err, ERR_USAGE, "none of the targets is a projection of a '%s' model",
                     shape->arch->name);
}

json_t *adapter_invocation_json(const struct adapter_config *c) {
    json_t *list = c->n_invocation ? json_array() : NULL;
    for (int32_t i = 0; i < c->n_invocation; i++)
        json_array_append_new(list, json_integer(c->invocation[i]));
    return list;
}

int32_t adapter_activation(const struct adapter_config *c, const int32_t *prompt, int32_t n) {
    size_t bytes = (size_t)c->n_invocation * sizeof *prompt;
    if (c->n_invocation == 0) return 0;
    for (int32_t i = n - c->n_invocation; i >= 0; i--)
        if (memcmp(prompt + i, c->invocation, bytes) == 0) return i;
    return ADAPTER_INACTIVE;
}

bool adapter_fits(const struct adapter *a, const struct model_config *shape) {
    bool same = a->shape.n_layers == shape->n_layers;
    for (int32_t i = 0; i < a->config.n_invocation; i++)
        same = same && a->config.invocation[i] < shape->vocab_size;
    for (int p = 0; p < N_PROJ; p++)
        same = same && proj_in(&a->shape, p) == proj_in(shape, p) &&
               proj_out(&a->shape, p) == proj_out(shape, p);
    return same && (!adapter_config_has_vocab(&a->config) ||
                    (a->shape.vocab_size == shape->vocab_size && a->shape.tied == shape->tied));
}

int adapter_require_plain(const struct adapter *a, const char *operation, struct error *err) {
    const struct adapter_config *c = &a->config;
    const char *why =
        c->dora ? "DoRA (use_dora)"
        : c->embed.full || c->head.full || c->embed.n_ids || c->head.n_ids
            ? "a separate embedding or head (modules_to_save, trainable_token_indices)"
        : adapter_config_has_vocab(c) ? "low-rank parts of the embedding or head"
        : c->n_invocation ? "an invocation (alora_invocation_tokens in its adapter_config.json; "
                            "without it the adapter is plain LoRA)"
                          : NULL;
    if (!why) return OK;
    return error_set(err, ERR_MISMATCH, "adapter '%.12s' has %s: %s is for plain LoRA only%s",
                     a->hash, why, operation,
                     c->dora ? " ('shoal adapter merge' and then 'shoal adapter extract' make one "
                               "that is close to it)"
                             : "");
}

static bool module_equal(struct adapter_module a, struct adapter_module b) {
    return a.r == b.r && (a.r == 0 || a.alpha == b.alpha);
}

/* The (r, alpha) that most modules have; if several are equally common, the first. PEFT's config
 * stores it as the top-level r and lora_alpha. */
static struct adapter_module modules_most_common(const struct adapter_module *modules, int32_t n) {
    struct adapter_module most_common = {0, 0};
    int32_t max_count = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t count = 0;
        for (int32_t j = 0; j < n && modules[i].r > 0; j++)
            count += module_equal(modules[i], modules[j]);
        if (count > max_count) max_count = count, most_common = modules[i];
    }
    return most_common;
}

/* True if `modules` are the same projections in every layer, all with the rank and alpha of
 * `common`, so that a list of projections describes them. */
static bool modules_are_uniform(const struct adapter_module *modules, int32_t n,
                                struct adapter_module common) {
    for (int32_t i = 0; i < n; i++) {
        bool layers_differ = (modules[i].r == 0) != (modules[i % N_PROJ].r == 0);
        if (layers_differ || (modules[i].r > 0 && !module_equal(modules[i], common))) return false;
    }
    return true;
}

static int32_t *ids_copy(const int32_t *ids, int32_t n) {
    if (n == 0) return NULL;
    size_t size = (size_t)n * sizeof *ids;
    return memcpy(xmalloc(size), ids, size);
}

/* A copy in the normal form, which is the same for equal configurations: projections that the
 * architecture lacks are removed, and `modules` is NULL if it is not needed. The copy owns
 * `modules`, the invocation and the token ids. */
static struct adapter_config config_normalise(const struct model_config *shape,
                                              const struct adapter_config *from) {
    struct adapter_config c = *from;
    int32_t n = shape->n_layers * N_PROJ;
    c.embed.ids = ids_copy(from->embed.ids, from->embed.n_ids);
    c.head.ids = ids_copy(from->head.ids, from->head.n_ids);
    c.invocation = ids_copy(from->invocation, from->n_invocation);
    for (int p = 0; p < N_PROJ; p++) c.target[p] &= proj_out(shape, (enum proj)p) > 0;
    if (!from->modules) return c;
    struct adapter_module *modules = xcalloc((size_t)n, sizeof *modules);
    memset(c.target, 0, sizeof c.target);
    for (int32_t i = 0; i < n; i++) {
        if (from->modules[i].r == 0 || proj_out(shape, i % N_PROJ) == 0) continue;
        modules[i] = from->modules[i];
        c.target[i % N_PROJ] = true;
    }
    struct adapter_module common = modules_most_common(modules, n);
    if (common.r == 0) common = c.embed.lora.r ? c.embed.lora : c.head.lora;
    // no low-rank parts: the adapter has only replacement tables or rows
    if (common.r == 0) common = (struct adapter_module){c.r, c.alpha};
    c.r = common.r;
    c.alpha = common.alpha;
    bool uniform = modules_are_uniform(modules, n, common);
    c.modules = uniform ? NULL : modules;
    if (uniform) free(modules);
    return c;
}

static void table_check(const struct model_config *shape, const struct adapter_vocab_config *t) {
    CHECK(t->lora.r >= 0 && t->lora.r <= ADAPTER_RANK_MAX && isfinite(t->lora.alpha));
    for (int32_t i = 0; i < t->n_ids; i++)
        CHECK(t->ids[i] >= (i ? t->ids[i - 1] + 1 : 0) && t->ids[i] < shape->vocab_size);
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
    table_check(shape, &c->embed);
    table_check(shape, &c->head);
    CHECK(!c->dora || c->embed.lora.r == 0);
    CHECK(c->n_invocation >= 0 && c->n_invocation <= ADAPTER_INVOCATION_MAX);
    CHECK(c->n_invocation == 0 || (!c->dora && !adapter_config_has_vocab(c)));
    for (int32_t i = 0; i < c->n_invocation; i++)
        CHECK(c->invocation[i] >= 0 && c->invocation[i] < shape->vocab_size);
}

static float module_scale(struct adapter_module m, bool rslora) {
    return (float)((double)m.alpha / (rslora ? sqrt(m.r) : (double)m.r));
}

/* Returns the changes of the embedding or the head. Their data begin at *cursor, which advances
 * past them. *magnitude receives the head's magnitudes, if it has any. */
static struct vocab_override table_layout(const struct adapter *a,
                                          const struct adapter_vocab_config *t, bool head,
                                          const float **cursor, const float **magnitude) {
    size_t d = (size_t)a->shape.d_model, v = (size_t)a->shape.vocab_size;
    size_t in = head ? d : v, out = head ? v : d, r = (size_t)t->lora.r;
    struct vocab_override table = {.n = t->n_ids, .ids = t->ids};
    if (r > 0)
        table.lora = (struct lora){.a = *cursor,
                                   .b = *cursor + r * in,
                                   .r = t->lora.r,
                                   .scale = module_scale(t->lora, a->config.rslora)};
    *cursor += r * (in + out);
    if (head && r > 0 && a->config.dora) {
        *magnitude = *cursor;
        *cursor += v;
    }
    table.full = t->full ? *cursor : NULL;
    *cursor += t->full ? v * d : 0;
    table.rows = t->n_ids ? *cursor : NULL;
    *cursor += (size_t)t->n_ids * d;
    return table;
}

/* If embedding and head are tied, the trained rows of the embedding apply to the head too, as in
 * PEFT. The tables' data begin at `cursor`. */
static struct vocab_overrides tables_layout(const struct adapter *a, const float *cursor,
                                            const float **magnitude) {
    struct vocab_overrides o;
    o.embed = table_layout(a, &a->config.embed, false, &cursor, magnitude);
    o.head = table_layout(a, &a->config.head, true, &cursor, magnitude);
    if (a->shape.tied && o.head.n == 0 && !o.head.full) {
        o.head.n = o.embed.n;
        o.head.ids = o.embed.ids;
        o.head.rows = o.embed.rows;
    }
    return o;
}

static void tables_set_pointers(struct adapter *a, const float *cursor) {
    const float *magnitude = NULL;
    if (!adapter_config_has_vocab(&a->config)) return;
    a->vocab_overrides = xmalloc(sizeof *a->vocab_overrides);
    *a->vocab_overrides = tables_layout(a, cursor, &magnitude);
    if (magnitude) a->magnitude[a->shape.n_layers * N_PROJ] = magnitude;
}

struct vocab_overrides adapter_vocab_params(const struct adapter *a) {
    const float *magnitude = NULL;
    const struct adapter_config *c = &a->config;
    size_t n = table_floats(&a->shape, &c->embed) + table_floats(&a->shape, &c->head);
    if (c->dora && c->head.lora.r > 0) n += (size_t)a->shape.vocab_size;
    CHECK(a->data);
    return tables_layout(a, a->data + a->n_data - n, &magnitude);
}

/* Sets the pointers of all loras, magnitudes and tables into a->data. */
static void loras_set_pointers(struct adapter *a) {
    const float *cursor = a->data;
    for (int32_t l = 0; l < a->shape.n_layers; l++) {
        for (int p = 0; p < N_PROJ; p++) {
            struct adapter_module m = adapter_module_at(&a->config, l, p);
            if (m.r == 0) continue;
            size_t n_a = (size_t)m.r * (size_t)proj_in(&a->shape, p);
            a->loras[l * N_PROJ + p] = (struct lora){.a = cursor,
                                                     .b = cursor + n_a,
                                                     .r = m.r,
                                                     .scale = module_scale(m, a->config.rslora)};
            cursor += module_floats(&a->shape, p, m.r);
        }
    }
    int32_t n = a->shape.n_layers * N_PROJ;
    if (a->config.dora) a->magnitude = xcalloc((size_t)n + 1, sizeof *a->magnitude);
    for (int32_t i = 0; a->config.dora && i < n; i++) {
        if (a->loras[i].r == 0) continue;
        a->magnitude[i] = cursor;
        cursor += proj_out(&a->shape, i % N_PROJ);
    }
    tables_set_pointers(a, cursor);
}

static uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static void table_append_hash_text(struct buf *b, const char *name,
                                   const struct adapter_vocab_config *t) {
    if (!table_is_used(t)) return;
    buf_printf(b, "%s r %d alpha %08x full %d ids", name, (int)t->lora.r, float_bits(t->lora.alpha),
               t->full);
    for (int32_t i = 0; i < t->n_ids; i++) buf_printf(b, " %d", (int)t->ids[i]);
    buf_puts(b, "\n");
}

/*
 * SHA-256 of a text with all settings that change the adapter's output or training (sizes, ranks,
 * alphas, dropout, invocation), followed by the floats of `data` (little-endian, as in the file).
 * Neither the lineage nor the base's name is hashed.
 */
void adapter_hash_compute(struct adapter *a) {
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
    if (c->dora) buf_puts(&b, "dora\n");
    table_append_hash_text(&b, "embed", &c->embed);
    table_append_hash_text(&b, "head", &c->head);
    if (c->n_invocation) buf_puts(&b, "invocation");
    for (int32_t i = 0; i < c->n_invocation; i++) buf_printf(&b, " %d", (int)c->invocation[i]);
    if (c->n_invocation) buf_puts(&b, "\n");
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, b.data, b.len);
    sha256_update(&h, a->data, a->n_data * sizeof *a->data);
    sha256_final(&h, a->hash);
    buf_release(&b);
}

struct adapter *adapter_alloc(const struct model_config *shape, const struct adapter_config *c,
                              float *data) {
    config_check(shape, c);
    struct adapter *a = xcalloc(1, sizeof *a);
    a->refs = 1;
    a->shape = *shape;
    a->config = config_normalise(shape, c);
    a->n_data = adapter_param_count(shape, &a->config);
    CHECK(a->n_data > 0);
    a->loras = xcalloc((size_t)shape->n_layers * N_PROJ, sizeof *a->loras);
    a->data = data ? data : xcalloc(a->n_data, sizeof *a->data);
    loras_set_pointers(a);
    return a;
}

struct adapter *adapter_new(const struct model_config *shape, const struct adapter_config *c,
                            uint64_t seed) {
    // DoRA and changes of embedding or head need the weights of a base model
    CHECK(!c->dora && !adapter_config_has_vocab(c));
    struct adapter *a = adapter_alloc(shape, c, NULL);
    for (int32_t i = 0; i < shape->n_layers * N_PROJ; i++) {
        const struct lora *lo = &a->loras[i];
        if (lo->r == 0) continue;
        /* One random stream per tensor: a projection's initial values do not depend on the other
         * targets. */
        struct rng rng = rng_make(seed, RNG_INIT, (uint32_t)i, 0);
        int32_t in = proj_in(shape, i % N_PROJ);
        float bound = (float)(1 / sqrt(in)), *w = a->data + (lo->a - a->data);
        for (int64_t k = 0; k < (int64_t)lo->r * in; k++)
            w[k] = bound * (2 * rng_uniform(&rng) - 1);
    }
    adapter_hash_compute(a);
    return a;
}

static void lineage_check(const json_t *lineage) {
    const char *key;
    json_t *value;
    CHECK(!lineage || json_is_object(lineage));
    json_object_foreach ((json_t *)lineage, key, value) {
        CHECK(json_is_string(value));
    }
}

struct adapter *adapter_from_data(const struct model_config *shape, const struct adapter_config *c,
                                  const float *data, json_t *lineage) {
    size_t bytes = adapter_param_count(shape, c) * sizeof *data;
    return adapter_from_owned_data(shape, c, memcpy(xmalloc(bytes), data, bytes), lineage);
}

struct adapter *adapter_from_owned_data(const struct model_config *shape,
                                        const struct adapter_config *c, float *data,
                                        json_t *lineage) {
    lineage_check(lineage);
    struct adapter *a = adapter_alloc(shape, c, data);
    a->lineage = lineage ? json_incref(lineage) : NULL;
    adapter_hash_compute(a);
    return a;
}

const struct lora_pack *adapter_pack(const struct adapter *a, enum dtype elem) {
    // the cast removes `const`: packs is a cache
    struct lora_pack **slot = (struct lora_pack **)(uintptr_t)&a->packs[elem];
    struct lora_pack *p = __atomic_load_n(slot, __ATOMIC_ACQUIRE), *expected = NULL;
    if (p) return p;
    // fails after adapter_pack_only, which frees the data, and for DoRA before adapter_bind
    CHECK(a->data && adapter_is_ready(a));
    p = lora_pack_new(&a->shape, a->loras, elem);
    if (__atomic_compare_exchange_n(slot, &expected, p, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return p;
    lora_pack_free(p); // another thread has stored a pack with the same content
    return expected;
}

struct lora_segment adapter_lora_segment(const struct adapter *a, int32_t begin, int32_t end,
                                         struct lora_part *part) {
    *part = (struct lora_part){.pack = a ? adapter_pack(a, DTYPE_F32) : NULL, .weight = 1};
    return (struct lora_segment){.begin = begin,
                                 .end = end,
                                 .parts = part,
                                 .n_parts = a != NULL,
                                 .vocab = a ? a->vocab_overrides : NULL};
}

const struct lora_pack *adapter_pack_only(struct adapter *a, enum dtype elem) {
    CHECK(!a->vocab_overrides && a->refs == 1);
    const struct lora_pack *p = adapter_pack(a, elem);
    adapter_data_free(a);
    free(a->loras);
    free(a->magnitude);
    a->loras = NULL;
    a->magnitude = NULL;
    return p;
}

size_t adapter_bytes(const struct adapter *a) {
    size_t modules = (size_t)a->shape.n_layers * N_PROJ, n = sizeof *a + a->bind_arena.used;
    n += (a->loras ? modules * sizeof *a->loras : 0) +
         (a->data && !a->is_offloaded ? a->n_data * sizeof *a->data : 0);
    if (a->config.modules) n += modules * sizeof *a->config.modules;
    if (a->magnitude) n += modules * sizeof *a->magnitude;
    n += (size_t)a->config.n_invocation * sizeof *a->config.invocation;
    if (a->vocab_overrides) n += sizeof *a->vocab_overrides;
    for (int e = 0; e < N_DTYPE; e++) {
        const struct lora_pack *p = __atomic_load_n(&a->packs[e], __ATOMIC_ACQUIRE);
        n += p ? p->bytes : 0;
    }
    return n;
}

struct adapter *adapter_retain(struct adapter *a) {
    __atomic_add_fetch(&a->refs, 1, __ATOMIC_RELAXED);
    return a;
}

void adapter_release(struct adapter *a) {
    if (!a || __atomic_sub_fetch(&a->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    free((void *)a->config.modules);
    for (int e = 0; e < N_DTYPE; e++) lora_pack_free(a->packs[e]);
    free((void *)a->config.embed.ids);
    free((void *)a->config.head.ids);
    free((void *)a->config.invocation);
    free(a->magnitude);
    free(a->vocab_overrides);
    arena_release(&a->bind_arena);
    free(a->loras);
    adapter_data_free(a);
    json_decref(a->lineage);
    training_data_release(a->training_data);
    free(a->base);
    free(a);
}

bool adapter_weight_parse(char *term, float *weight) {
    char *equals = strrchr(term, '='), *end;
    *weight = 1;
    if (!equals) return false;
    double x = strtod(equals + 1, &end);
    if (end == equals + 1 || *end || !isfinite(x)) return false;
    *equals = 0;
    *weight = (float)x;
    return true;
}
