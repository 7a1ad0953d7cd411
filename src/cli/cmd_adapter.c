/* cmd_adapter: `shoal adapter`: describes adapters, blends and mutates them, converts them between
 * PEFT and GGUF, merges them into their base. list is in adapter_list.c, prune in adapter_prune.c,
 * profile in adapter_profile.c; extract and resize are in adapter_extract.c. */
#define _GNU_SOURCE
#include "cli/adapter_verbs.h"
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct options {
    char *model;
    struct strings parents, weights;
    char *compat, *out, *type, *targets, *op_name, *step, *older_than, *min_score;
    double alpha, mut, mut_std, energy;
    int64_t rank, seed, keep;
    bool fold, dry_run, yes;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row adapter_rows[] = {
    ROW("model", OPT_STRING, model, "models/fry", 0, 0, "MODEL",
        "the base that the adapters belong to"),
    ROW("parents", OPT_LIST, parents, NULL, 0, 0, "A B",
        "blend: two adapters, or as many as the operator requires"),
    ROW("alpha", OPT_FLOAT, alpha, "0.5", -4, 4, "T", "blend: weight of the second parent"),
    ROW("mut", OPT_FLOAT, mut, "0.05", 0, 1, "P", "blend: probability that a tensor mutates"),
    ROW("mut-std", OPT_FLOAT, mut_std, "0.01", 0, 100, "S",
        "blend: standard deviation of a mutation, relative to that of the tensor"),
    ROW("rank", OPT_INT, rank, "0", 0, 1024, "R",
        "rank of the result; extract, resize: maximum rank (0: blend: the larger of the parents' "
        "ranks; new: 8; extract, resize: as --energy requires)"),
    ROW("energy", OPT_FLOAT, energy, "0", 0, 1, "E",
        "extract, resize: the smallest rank that keeps this share of |ΔW|² in each module"),
    ROW("target", OPT_STRING, targets, "all-linear", 0, 0, "LIST",
        "new: projections with LoRA: q_proj,v_proj … or all-linear"),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15, "N", "blend: seed of the mutation; new: seed of A"),
    ROW("compat", OPT_STRING, compat, NULL, 0, 0, "legacy",
        "blend A with A and B with B instead of ΔW; --mut-std is absolute"),
    ROW("operator", OPT_STRING, op_name, NULL, 0, 0, "NAME",
        "blend: operator from 'shoal adapter operators', instead of --alpha and --mut"),
    ROW("step", OPT_STRING, step, NULL, 0, 0, "S",
        "blend: step of the operator; default: see 'shoal adapter operators'"),
    ROW("fold", OPT_BOOL, fold, NULL, 0, 0, NULL,
        "GGUF output: multiply scales that differ between modules into B"),
    ROW("weights", OPT_LIST, weights, NULL, 0, 0, "W",
        "weight of each adapter (merge) or parent (--operator); default 1"),
    ROW("out", OPT_STRING, out, NULL, 0, 0, "OUT",
        "blend: directory; merge, extract, resize: file ending in .gguf, or a directory"),
    ROW("dry-run", OPT_BOOL, dry_run, NULL, 0, 0, NULL,
        "print what would be written or, by prune, deleted"),
    ROW("keep", OPT_INT, keep, "-1", -1, 1e9, "N",
        "prune: keep the N newest versions, or the N fittest candidates (-1: no condition)"),
    ROW("older-than", OPT_STRING, older_than, NULL, 0, 0, "TIME",
        "prune: delete only older files; TIME is a number with a unit: 12h, 30d, 8w"),
    ROW("min-score", OPT_STRING, min_score, NULL, 0, 0, "X",
        "prune: delete only versions of a lower score, candidates of a lower fitness"),
    ROW("yes", OPT_BOOL, yes, NULL, 0, 0, NULL,
        "prune: delete; without it the files are only listed"),
    ROW("type", OPT_STRING, type, NULL, 0, 0, "TYPE",
        "merge: weight type: f32, f16, bf16, q8_0, q4_0 … (see 'shoal quantize'); default: the "
        "model's, or bf16 if that is quantised"),
    {"child", OPT_ALIAS, 0, "out"},
    {"targets", OPT_ALIAS, 0, "target"},
    {0},
};
#undef ROW

/* Prints the output path and the adapter that would be written to it. */
static void adapter_print_plan(const struct cli_options *c, const struct adapter *a,
                               const char *out) {
    cli_print_dry_run(c, json_pack("{s:o,s:i,s:I,s:s,s:b}", "writes", json_from_path(out), "rank",
                                   a->config.r, "parameters", (json_int_t)a->n_data, "hash",
                                   a->hash, "replaces", (int)path_exists(out)));
}

/* Writes an untrained adapter, initialised like PEFT's: B is zero, so it has no effect. */
static int adapter_create_file(const struct cli_options *c, const struct options *o,
                               const struct model *m, const struct strings *args,
                               struct error *err) {
    struct adapter_config ac = {.r = o->rank ? (int32_t)o->rank : 8};
    ac.alpha = 2 * (float)ac.r;
    if (args->n != 2) return error_set(err, ERR_USAGE, "new requires one name to write to");
    if (adapter_targets_parse(o->targets, ac.target, err) != OK) return err->code;
    struct adapter *a = adapter_new(&m->config, &ac, (uint64_t)o->seed);
    int rc = OK;
    if (o->dry_run)
        adapter_print_plan(c, a, args->v[1]);
    else
        rc = adapter_write(a, args->v[1], m->path, false, err);
    adapter_release(a);
    return rc;
}

/* One line with the invocation of activated LoRA: its text as a JSON string, and its ids. */
static void print_invocation(const struct adapter *a, const struct tokenizer *tok) {
    const struct adapter_config *c = &a->config;
    struct buf text = {0};
    if (c->n_invocation == 0) return;
    if (tok) tokenizer_decode(tok, c->invocation, c->n_invocation, true, &text);
    json_t *quoted = text.len ? json_stringn(text.data, text.len) : NULL;
    char *line = quoted ? json_dumps(quoted, JSON_ENCODE_ANY) : NULL;
    printf("  activated LoRA: changes a prompt from the last %s on (tokens",
           line ? line : "invocation");
    for (int32_t i = 0; i < c->n_invocation; i++) printf(" %d", (int)c->invocation[i]);
    printf(")\n");
    free(line);
    json_decref(quoted);
    buf_release(&text);
}

static int adapter_info(const struct cli_options *c, struct model *m, const struct strings *args,
                        struct error *err) {
    if (args->n < 2) return error_set(err, ERR_USAGE, "name at least one adapter");
    for (int i = 1; i < args->n; i++) {
        struct adapter *a = adapter_open(args->v[i], m, err);
        if (!a) return err->code;
        double norm = sqrt(adapter_dot(a, a));
        if (c->json)
            cli_print_json(json_pack("{s:s,s:s,s:i,s:f,s:f,s:I,s:o*}", "adapter", args->v[i],
                                     "hash", a->hash, "rank", a->config.r, "alpha",
                                     (double)a->config.alpha, "norm", norm, "parameters",
                                     (json_int_t)a->n_data, "alora_invocation_tokens",
                                     adapter_invocation_json(&a->config)));
        else
            printf("%s: rank %d, alpha %g, %zu parameters, |ΔW| = %.4g\n  sha-256 %s\n", args->v[i],
                   a->config.r, (double)a->config.alpha, a->n_data, norm, a->hash);
        if (!c->json) print_invocation(a, m->tok);
        adapter_release(a);
    }
    return OK;
}

/* args: rollback DIR [HASH]; HASH is a prefix of a version's hash, default the previous version. */
static int adapter_rollback_file(const struct cli_options *c, const struct model *m,
                                 const struct strings *args, struct error *err) {
    char hash[HASH_LEN];
    if (args->n < 2 || args->n > 3)
        return error_set(err, ERR_USAGE, "rollback requires DIR and at most one HASH");
    int rc = adapter_rollback(args->v[1], &m->config, args->n > 2 ? args->v[2] : NULL, hash, err);
    if (rc == OK && c->json)
        cli_print_json(json_pack("{s:s,s:s}", "adapter", args->v[1], "hash", hash));
    else if (rc == OK)
        printf("%s: is version %.12s again\n", args->v[1], hash);
    return rc;
}

static json_t *vocab_config_json(const struct adapter_vocab_config *t) {
    return json_pack("{s:i, s:f, s:b, s:i}", "rank", t->lora.r, "alpha", (double)t->lora.alpha,
                     "whole", (int)t->full, "rows", t->n_ids);
}

/* One entry per projection: the number of layers that have it, and the range of their ranks. */
static json_t *modules_json(const struct adapter *a) {
    json_t *out = json_object();
    for (int p = 0; p < N_PROJ; p++) {
        int32_t layers = 0, low = ADAPTER_RANK_MAX, high = 0;
        for (int32_t l = 0; l < a->shape.n_layers; l++) {
            int32_t r = a->loras[l * N_PROJ + p].r;
            if (r == 0) continue;
            layers++;
            low = MIN(low, r);
            high = MAX(high, r);
        }
        if (layers)
            json_object_set_new(
                out, proj_names[p],
                json_pack("{s:i, s:i, s:i}", "layers", layers, "rank_min", low, "rank_max", high));
    }
    return out;
}

json_t *divergence_json(struct kl_divergence d) {
    return json_pack("{s:f, s:f, s:f, s:i}", "kl_mean", d.mean, "kl_max", d.max, "same_top",
                     d.same_top, "positions", d.positions);
}

void print_divergence(const char *what, struct kl_divergence d) {
    printf("  %s: KL mean %.3g, max %.3g nats; same first token at %.1f %% of %d positions\n", what,
           d.mean, d.max, 100 * d.same_top, d.positions);
}

static void print_vocab_config(const char *name, const struct adapter_vocab_config *t) {
    if (t->full) printf("  %s: a separate full table\n", name);
    if (t->n_ids) printf("  %s: %d separate rows\n", name, t->n_ids);
    if (t->lora.r) printf("  %s: rank %d, alpha %g\n", name, t->lora.r, (double)t->lora.alpha);
}

static void print_inspection(const char *path, const struct adapter *a, struct kl_divergence d,
                             const struct tokenizer *tok) {
    const struct adapter_config *k = &a->config;
    const char *key;
    json_t *modules = modules_json(a), *value;
    printf("%s: %s%s, rank %d, alpha %g, %zu parameters\n", path, k->dora ? "DoRA" : "LoRA",
           k->rslora ? " (rank-stabilised)" : "", k->r, (double)k->alpha, a->n_data);
    json_object_foreach (modules, key, value) {
        int layers, low, high;
        json_unpack(value, "{s:i, s:i, s:i}", "layers", &layers, "rank_min", &low, "rank_max",
                    &high);
        printf("  %s: %d of %d layers, rank %d", key, layers, a->shape.n_layers, low);
        printf(high > low ? " to %d\n" : "\n", high);
    }
    print_vocab_config("embed_tokens", &k->embed);
    print_vocab_config("lm_head", &k->head);
    print_invocation(a, tok);
    if (a->base) printf("  base: %s\n", a->base);
    json_object_foreach (a->lineage, key, value)
        printf("  %s: %s\n", key, json_string_value(value));
    print_divergence("effect on the base", d);
    printf("  sha-256 %s\n", a->hash);
    json_decref(modules);
}

static int adapter_inspect(const struct cli_options *c, struct model *m, const struct strings *args,
                           struct pool *pool, struct error *err) {
    if (args->n < 2) return error_set(err, ERR_USAGE, "name at least one adapter");
    for (int i = 1; i < args->n; i++) {
        struct adapter *a = adapter_open(args->v[i], m, err);
        if (!a) return err->code;
        struct kl_divergence d = adapter_kl_divergence(m, NULL, m, a, pool);
        if (c->json)
            cli_print_json(json_pack(
                "{s:s,s:s,s:i,s:f,s:b,s:b,s:I,s:o,s:o,s:o,s:s?,s:O?,s:o,s:o*}", "adapter",
                args->v[i], "hash", a->hash, "rank", a->config.r, "alpha", (double)a->config.alpha,
                "dora", (int)a->config.dora, "rslora", (int)a->config.rslora, "parameters",
                (json_int_t)a->n_data, "modules", modules_json(a), "embed_tokens",
                vocab_config_json(&a->config.embed), "lm_head", vocab_config_json(&a->config.head),
                "base", a->base, "lineage", a->lineage, "effect", divergence_json(d),
                "alora_invocation_tokens", adapter_invocation_json(&a->config)));
        else
            print_inspection(args->v[i], a, d, m->tok);
        // the probe's prompts do not have an invocation
        if (d.max == 0 && a->config.n_invocation == 0)
            log_warn("adapter '%s' changes nothing on the probe's prompts", args->v[i]);
        adapter_release(a);
    }
    return OK;
}

static int adapter_convert(const struct cli_options *c, const struct options *o, struct model *m,
                           const struct strings *args, struct error *err) {
    if (args->n != 3) return error_set(err, ERR_USAGE, "convert requires IN and OUT");
    struct adapter *a = adapter_open(args->v[1], m, err);
    if (!a) return err->code;
    const char *base = a->base ? a->base : m->name, *out = args->v[2];
    int rc = o->dry_run ? OK : adapter_write(a, out, base, o->fold, err);
    if (o->dry_run)
        adapter_print_plan(c, a, out);
    else if (rc == OK && c->json)
        cli_print_json(json_pack("{s:s,s:s}", "out", out, "from_hash", a->hash));
    else if (rc == OK)
        printf("%s: from sha-256 %s\n", out, a->hash);
    adapter_release(a);
    return rc;
}

static int float_parse(const char *text, const char *what, float *value, struct error *err) {
    char *end;
    *value = strtof(text, &end);
    if (!*end && end != text && isfinite(*value)) return OK;
    return error_set(err, ERR_USAGE, "%s '%s' is not a number", what, text);
}

static void operator_print(const struct adapter_operator *op, const char *options, bool json) {
    static const char *const kinds[] = {"crossover", "PEFT", "mutation"};
    if (json) {
        cli_print_json(json_pack("{s:s,s:s,s:s,s:s,s:i,s:i,s:s?,s:f,s:f,s:f}", "operator", op->name,
                                 "kind", kinds[op->kind], "about", op->about, "options", options,
                                 "parents_min", op->min_parents, "parents_max", op->max_parents,
                                 "step_unit", op->unit, "step", (double)op->step, "step_min",
                                 (double)op->step_min, "step_max", (double)op->step_max));
        return;
    }
    printf("%-22s %s; options: %s", op->name, op->about, options);
    if (op->unit)
        printf(" (%g in %g to %g: %s)", (double)op->step, (double)op->step_min,
               (double)op->step_max, op->unit);
    printf("\n");
}

static int adapter_operators(const struct cli_options *c) {
    const struct adapter_operator *op;
    for (int i = 0; (op = operator_at(i)); i++) {
        struct buf options = {0};
        operator_option_list(op, &options);
        operator_print(op, options.data, c->json);
        buf_release(&options);
    }
    return OK;
}

/* Adapters with their --weights, default 1. */
struct weighted_adapters {
    int n;
    struct adapter *v[OPERATOR_PARENTS_MAX];
    float weights[OPERATOR_PARENTS_MAX];
};

static void weighted_release(struct weighted_adapters *w) {
    for (int i = 0; i < w->n; i++) adapter_release(w->v[i]);
}

/* The caller calls weighted_release even after an error. */
static int weighted_open(struct weighted_adapters *w, const struct options *o, char *const *paths,
                         int n, struct model *m, struct error *err) {
    *w = (struct weighted_adapters){.n = 0};
    if (n > OPERATOR_PARENTS_MAX || (o->weights.n && o->weights.n != n))
        return error_set(err, ERR_USAGE, "%d weights for %d adapters (at most %d)", o->weights.n, n,
                         OPERATOR_PARENTS_MAX);
    for (int i = 0; i < n; i++) {
        w->weights[i] = 1;
        if (o->weights.n && float_parse(o->weights.v[i], "weight", &w->weights[i], err) != OK)
            return err->code;
        if (!(w->v[i] = adapter_open(paths[i], m, err))) return err->code;
        w->n++;
    }
    return OK;
}

/* If the parents' bases differ, the base of the child is the model for which it is made; that they
 * differ was warned of when they were opened. Takes ownership of `child`. */
static struct adapter *child_set_base(struct adapter *child, struct adapter *const *parents, int n,
                                      const struct model *m) {
    bool any = false;
    for (int i = 0; i < n; i++)
        any |= json_object_get(parents[i]->lineage, ADAPTER_BASE_HASH) != NULL;
    if (!any || json_object_get(child->lineage, ADAPTER_BASE_HASH)) return child;
    json_t *lineage = json_copy(child->lineage);
    adapter_lineage_set_model(lineage, m);
    child = operator_set_lineage(child, lineage);
    json_decref(lineage);
    return child;
}

/* Refuses options of blend that this operator does not use. Weights are ignored with a
 * warning if the operator takes several parents, because version 0.1 accepted them. */
static int operator_options_check(const struct adapter_operator *op, const struct options *o,
                                  struct error *err) {
    static const char *const names[] = {"weights", "rank", "step",    "seed",
                                        "alpha",   "mut",  "mut-std", "compat"};
    struct options defaults;
    int rc = OK;
    options_default(adapter_rows, &defaults);
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(names); i++) {
        const struct option_row *row = option_find(adapter_rows, names[i]);
        if (!option_changed(row, o, &defaults)) continue;
        rc = operator_check_option(op, names[i], err);
        if (rc == OK || row->offset != offsetof(struct options, weights) || op->max_parents == 1)
            continue;
        log_warn("%s: the weights are ignored", err->text);
        rc = OK;
    }
    options_release(adapter_rows, &defaults);
    return rc;
}

/* The child of --operator, or NULL. */
static struct adapter *operator_child(const struct options *o, struct model *m, struct error *err) {
    struct weighted_adapters w;
    struct adapter *child = NULL;
    float step = NAN;
    const struct adapter_operator *op = operator_find(o->op_name, err);
    if (!op || operator_options_check(op, o, err) != OK ||
        (o->step && float_parse(o->step, "step", &step, err) != OK))
        return NULL;
    if (weighted_open(&w, o, o->parents.v, o->parents.n, m, err) == OK) {
        struct operands x = {.parents = w.v,
                             .weights = o->weights.n ? w.weights : NULL,
                             .n_parents = w.n,
                             .rank = (int32_t)o->rank,
                             .step = step,
                             .seed = (uint64_t)o->seed,
                             .names = (const char *const *)o->parents.v};
        child = operator_apply(op, &x, err);
        if (child) child = child_set_base(child, w.v, w.n, m);
    }
    weighted_release(&w);
    return child;
}

/* The lineage of a mutated blend: the blend's, with the names of its parents and the mutation. The
 * blend itself is never saved, so it is not the parent. */
static json_t *blend_lineage(const struct options *o, const struct adapter *blend,
                             const struct adapter *child) {
    json_t *lineage = o->mut > 0 ? operator_mutated_lineage(blend->lineage, child->lineage)
                                 : json_copy(blend->lineage);
    operator_lineage_set_names(lineage, (const char *const *)o->parents.v, o->parents.n);
    return lineage;
}

/* The mutated blend. A blend with DoRA has no mutation: noise in B would change the multipliers. */
static struct adapter *blend_mutate(const struct options *o, struct adapter *blend,
                                    struct error *err) {
    if (!blend->config.dora)
        return adapter_mutate(blend, (float)o->mut, (float)o->mut_std, o->compat != NULL,
                              (uint64_t)o->seed);
    if (o->mut == 0) return adapter_retain(blend);
    error_set(err, ERR_USAGE, "a blend with a DoRA adapter cannot be mutated: add --mut 0");
    return NULL;
}

/* The child of --alpha and --mut: a blend, then a mutation of the blend. */
static struct adapter *blend_child(const struct options *o, struct model *m, struct pool *pool,
                                   struct error *err) {
    if (o->parents.n != 2) {
        error_set(err, ERR_USAGE, "--parents requires two adapter directories");
        return NULL;
    }
    if (o->weights.n || o->step) {
        error_set(err, ERR_USAGE, "'--%s' is an option of operators: it needs --operator",
                  o->step ? "step" : "weights");
        return NULL;
    }
    if (cli_compat_check(o->compat, err) != OK) return NULL;
    bool legacy = o->compat != NULL;
    struct adapter *a = adapter_open(o->parents.v[0], m, err);
    struct adapter *b = a ? adapter_open(o->parents.v[1], m, err) : NULL;
    struct adapter *blend = b ? adapter_blend_bound(m, a, b, (float)o->alpha, (int32_t)o->rank,
                                                    legacy ? BLEND_LEGACY : BLEND_DELTA, pool, err)
                              : NULL;
    struct adapter *child = blend ? blend_mutate(o, blend, err) : NULL;
    if (child) {
        json_t *lineage = blend_lineage(o, blend, child);
        child = operator_set_lineage(child, lineage);
        json_decref(lineage);
        child = child_set_base(child, (struct adapter *const[]){a, b}, 2, m);
    }
    adapter_release(a);
    adapter_release(b);
    adapter_release(blend);
    return child;
}

static int adapter_blend_files(const struct cli_options *c, const struct options *o,
                               struct model *m, struct pool *pool, struct error *err) {
    if (!o->out) return error_set(err, ERR_USAGE, "--out is missing");
    struct adapter *child = o->op_name ? operator_child(o, m, err) : blend_child(o, m, pool, err);
    int rc = child ? OK : err->code;
    if (child && !o->dry_run) rc = adapter_save(child, o->out, m->name, err);
    if (child && o->dry_run)
        adapter_print_plan(c, child, o->out);
    else if (rc == OK && c->json)
        cli_print_json(json_pack("{s:s,s:s,s:i}", "child", o->out, "hash", child->hash, "rank",
                                 child->config.r));
    else if (rc == OK)
        printf("%s: rank %d, sha-256 %s\n", o->out, child->config.r, child->hash);
    adapter_release(child);
    return rc;
}

/* The adapters to merge as one: a single one of weight 1 unchanged, else their weighted sum. */
static struct adapter *weighted_sum_open(const struct options *o, struct model *m,
                                         const struct strings *args, struct pool *pool,
                                         struct error *err) {
    struct weighted_adapters w;
    struct adapter *sum = NULL;
    if (weighted_open(&w, o, args->v + 2, args->n - 2, m, err) == OK)
        sum = w.n == 1 && w.weights[0] == 1 ? adapter_retain(w.v[0])
                                            : adapter_sum(m, w.v, w.weights, w.n, pool, err);
    weighted_release(&w);
    return sum;
}

/* The memory of the steps, of which one at a time is in memory: upper bounds in bytes. */
struct merge_memory {
    size_t used;             /* when the command starts */
    size_t adapters;         /* and their sum, in the first step */
    size_t merging, written; /* base with adapters, written and compared; the comparison of the
                                written model */
};

static size_t merge_memory_total(const struct merge_memory *m) {
    return m->used + MAX(m->merging, m->written);
}

static void merge_memory_measure(struct merge_memory *out, const struct model_size *base,
                                 const struct quant_scheme *q, const struct strings *args,
                                 const struct options *o, enum numeric_class cls,
                                 struct pool *pool) {
    struct adapter_size adapters = {0};
    struct model_size written;
    struct error later; // opening the adapter reports it
    for (int i = 2; i < args->n; i++) adapter_measure(args->v[i], DTYPE_F32, &adapters, &later);
    quant_measure(q, &base->config, cls, &written);
    written.tokenizer = base->tokenizer * (path_has_extension(o->out, ".gguf") ? 1 : 2);
    const size_t compare = kl_reference_bytes(&base->config, pool),
                 writing = model_writing_bytes(&base->config, pool) + written.tokenizer * 2;
    *out = (struct merge_memory){.used = memory_used(NULL),
                                 .adapters = 2 * adapters.resident + adapters.while_loading};
    out->merging = model_with_bytes(base, out->adapters + MAX(compare, writing));
    out->written = model_with_bytes(&written, compare);
}

/* Sets m->written to 0 if the merged model does not fit into the available memory: it is then not
 * compared with the base with its adapters. */
static void merged_model_check(struct merge_memory *m) {
    const struct memory_step step = {.what = "the comparison of the merged model",
                                     .least = m->written};
    struct error why;
    if (memory_check(NULL, &step, &why) == OK) return;
    log_warn("the merged model is not compared with the base with adapter: %s", why.text);
    m->written = 0;
}

/* Type of the merged weights, and the memory plan, which must fit into the available memory.
 * Without memory for the written model, memory->written is 0. */
static int merge_plan(const struct cli_options *c, const struct options *o, const char *path,
                      const struct strings *args, struct pool *pool, enum tensor_type *type,
                      struct merge_memory *memory, struct error *err) {
    struct model_size size;
    if (model_measure(path, cli_numeric_class(c), &size, err) != OK) return err->code;
    *type = tensor_type_is_quantized(size.type) ? TENSOR_BF16 : size.type;
    if (o->type && tensor_type_parse(o->type, type) != OK)
        return error_set(err, ERR_USAGE, "no weight type '%s'", o->type);
    const struct quant_scheme q = quant_pure(*type);
    merge_memory_measure(memory, &size, &q, args, o, cli_numeric_class(c), pool);
    const struct memory_step step = {.what = "the merge", .least = memory->merging};
    int rc = memory_limit_parse(NULL, err);
    if (rc == OK) rc = memory_check(NULL, &step, err);
    if (rc == OK) merged_model_check(memory);
    memory_limit_set(0);
    return rc;
}

static void merge_print_plan(const struct cli_options *c, const struct options *o,
                             const struct model_config *config, enum tensor_type type,
                             const struct merge_memory *m) {
    const struct quant_scheme q = quant_pure(type);
    json_t *memory =
        json_pack("{s:I,s:I,s:I,s:I,s:I}", "used", (json_int_t)m->used, "adapters",
                  (json_int_t)m->adapters, "merging", (json_int_t)m->merging, "written",
                  (json_int_t)m->written, "total", (json_int_t)merge_memory_total(m));
    cli_print_dry_run(c, json_pack("{s:o,s:s,s:I,s:b,s:o}", "writes", json_from_path(o->out),
                                   "type", tensor_type_name(type), "bytes of weights",
                                   (json_int_t)quant_bytes(&q, config), "replaces",
                                   (int)path_exists(o->out), "memory", memory));
}

static int merged_write(const struct model *m, const struct adapter *a, const char *out,
                        enum tensor_type type, struct pool *pool, struct error *err) {
    const struct quant_scheme q = quant_pure(type);
    struct progress bar;
    log_info("'%s' will have %.1f MB of weights in %s; --type chooses another type", out,
             1e-6 * (double)quant_bytes(&q, &m->config), tensor_type_name(type));
    struct model *merged = adapter_merge_for_writing(m, a, err);
    if (!merged) return err->code;
    int rc;
    if (path_has_extension(out, ".gguf")) {
        progress_start(&bar, "weights", model_param_count(&m->config));
        rc = model_quantize_gguf(merged, out, &q, pool, &bar, err);
        progress_finish(&bar, NULL);
    } else {
        rc = model_write_hf(merged, out, type, err);
    }
    adapter_merged_close(merged);
    return rc;
}

/* The logits of the base with its adapter, and the adapter's effect. */
static struct kl_reference *merge_reference(const struct model *m, const struct adapter *a,
                                            const char *out, struct pool *pool,
                                            struct kl_divergence *effect, struct error *err) {
    struct kl_reference *base = kl_reference_new(m, NULL, out, pool, err);
    int rc = base ? kl_reference_compare(base, m, a, pool, effect, err) : err->code;
    kl_reference_free(base);
    return rc == OK ? kl_reference_new(m, a, out, pool, err) : NULL;
}

static int merge_report(const struct cli_options *c, const char *out, enum tensor_type type,
                        const struct kl_reference *reference, struct kl_divergence effect,
                        struct pool *pool, struct error *err) {
    struct model *written = model_open(out, cli_numeric_class(c), err);
    struct kl_divergence loss;
    int rc = written ? kl_reference_compare(reference, written, NULL, pool, &loss, err) : err->code;
    model_close(written);
    if (rc != OK) return rc;
    if (c->json) {
        cli_print_json(json_pack("{s:s,s:s,s:o,s:o}", "out", out, "type", tensor_type_name(type),
                                 "merged_vs_adapter", divergence_json(loss), "adapter_vs_base",
                                 divergence_json(effect)));
    } else {
        printf("%s: merged, %s\n", out, tensor_type_name(type));
        print_divergence("merged against base with adapter", loss);
        print_divergence("adapter against base           ", effect);
    }
    return OK;
}

/* The report without a comparison. */
static void merge_print_written(const struct cli_options *c, const char *out,
                                enum tensor_type type) {
    if (c->json)
        cli_print_json(json_pack("{s:s,s:s}", "out", out, "type", tensor_type_name(type)));
    else
        printf("%s: merged, %s\n", out, tensor_type_name(type));
}

/* Writes the merged model, and computes what the report needs of the base. */
static int merge_write(const struct cli_options *c, const struct options *o, const char *path,
                       const struct strings *args, struct pool *pool, enum tensor_type type,
                       const struct merge_memory *memory, struct kl_reference **reference,
                       struct kl_divergence *effect, struct error *err) {
    struct model *m = model_open(path, cli_numeric_class(c), err);
    struct adapter *a = m ? weighted_sum_open(o, m, args, pool, err) : NULL;
    int rc = a ? adapter_check_mergeable(a, err) : err->code;
    if (rc == OK && o->dry_run)
        merge_print_plan(c, o, &m->config, type, memory);
    else if (rc == OK && (rc = merged_write(m, a, o->out, type, pool, err)) == OK &&
             memory->written && !(*reference = merge_reference(m, a, o->out, pool, effect, err)))
        rc = err->code;
    adapter_release(a);
    model_close(m);
    return rc;
}

/* One model at a time is in memory: the base with its adapters, then the merged model. */
static int adapter_merge_files(const struct cli_options *c, const struct options *o,
                               const char *path, const struct strings *args, struct pool *pool,
                               struct error *err) {
    struct merge_memory memory = {0};
    struct kl_reference *reference = NULL;
    struct kl_divergence effect;
    enum tensor_type type = TENSOR_F32;
    if (args->n < 3)
        return error_set(err, ERR_USAGE, "merge requires MODEL and at least one ADAPTER");
    if (!o->out) return error_set(err, ERR_USAGE, "--out is missing");
    int rc = merge_plan(c, o, path, args, pool, &type, &memory, err);
    if (rc == OK) rc = merge_write(c, o, path, args, pool, type, &memory, &reference, &effect, err);
    if (rc == OK && !reference && !o->dry_run) merge_print_written(c, o->out, type);
    if (rc == OK && reference) rc = merge_report(c, o->out, type, reference, effect, pool, err);
    kl_reference_free(reference);
    return rc;
}

static int verb_run(const struct cli_options *c, const struct options *o, struct model *m,
                    const struct strings *args, struct pool *pool, struct error *err) {
    const char *verb = args->v[0];
    const struct cut_request cut = {.cut = {(int32_t)o->rank, o->energy},
                                    .out = o->out,
                                    .fold = o->fold,
                                    .dry_run = o->dry_run};
    if (o->dry_run && strcmp(verb, "rollback") == 0)
        return error_set(err, ERR_USAGE,
                         "rollback has no --dry-run: 'shoal adapter list' shows "
                         "the versions");
    if (strcmp(verb, "info") == 0) return adapter_info(c, m, args, err);
    if (strcmp(verb, "inspect") == 0) return adapter_inspect(c, m, args, pool, err);
    if (strcmp(verb, "rollback") == 0) return adapter_rollback_file(c, m, args, err);
    if (strcmp(verb, "new") == 0) return adapter_create_file(c, o, m, args, err);
    if (strcmp(verb, "blend") == 0 && args->n > 1)
        return error_set(err, ERR_USAGE,
                         "'%s': blend takes its names from --model, --parents and --out",
                         args->v[1]);
    if (strcmp(verb, "blend") == 0) return adapter_blend_files(c, o, m, pool, err);
    if (strcmp(verb, "convert") == 0) return adapter_convert(c, o, m, args, err);
    if (strcmp(verb, "extract") == 0) return cmd_adapter_extract(c, m, args, &cut, pool, err);
    if (strcmp(verb, "resize") == 0) return cmd_adapter_resize(c, m, args, &cut, pool, err);
    return error_set(
        err, ERR_USAGE,
        "no '%s'; there are list, prune, info, inspect, profile, rollback, new, blend, "
        "operators, convert, merge, extract and resize",
        verb);
}

static int run_adapter(const struct cli_options *c, const void *options, const struct strings *args,
                       struct error *err) {
    const struct options *o = options;
    bool merge = strcmp(args->v[0], "merge") == 0, extract = strcmp(args->v[0], "extract") == 0;
    if (strcmp(args->v[0], "list") == 0) return cmd_adapter_list(c, args, err);
    if (strcmp(args->v[0], "operators") == 0) return adapter_operators(c);
    if (strcmp(args->v[0], "profile") == 0) return cmd_adapter_profile(c, args, o->dry_run, err);
    if (strcmp(args->v[0], "prune") == 0)
        return cmd_adapter_prune(c, args,
                                 &(struct prune_request){.keep = o->keep,
                                                         .older_than = o->older_than,
                                                         .min_score = o->min_score,
                                                         .yes = o->yes && !o->dry_run},
                                 err);
    char *path = cli_find_file((merge || extract) && args->n > 1 ? args->v[1] : o->model);
    struct pool *pool = pool_new((int)c->threads);
    struct model *m = merge ? NULL : model_open(path, cli_numeric_class(c), err);
    int rc = merge ? adapter_merge_files(c, o, path, args, pool, err)
             : m   ? verb_run(c, o, m, args, pool, err)
                   : err->code;
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

const struct cli_command cmd_adapter = {
    .name = "adapter",
    .args = "list|prune|info|inspect|profile|rollback|new|blend|operators|convert|merge|extract|"
            "resize …",
    .summary = "inspect, create, blend, convert, merge, extract and resize adapters",
    .about =
        "An adapter is a PEFT directory or a GGUF LoRA file. Subcommands:\n"
        "\n"
        "  list DIR …              versions of adapters, or of all adapters in a folder\n"
        "  prune DIR …             delete old versions, and candidates of finished evolution runs\n"
        "  info ADAPTER …          rank, alpha, number of parameters and norm\n"
        "  inspect ADAPTER …       also modules, lineage, effect on next-token probabilities\n"
        "  profile ADAPTER FILE …  store its training questions, for serve --router similarity\n"
        "  rollback DIR [HASH]     make the previous version, or version HASH, the current one\n"
        "  new PATH                an untrained adapter\n"
        "  blend                   a child of --parents: by --alpha and --mut, or by --operator\n"
        "  operators               list the operators of blend\n"
        "  convert IN OUT          between PEFT and GGUF\n"
        "  merge MODEL ADAPTER …   add adapters to the weights of the base; prints the error of "
        "the result\n"
        "  extract BASE FINETUNED  an adapter that approximates the difference of two models\n"
        "  resize ADAPTER          lower the ranks (truncated SVD)\n"
        "\n"
        "  shoal adapter inspect runs/ID/adapters/gen_0/critic\n"
        "  shoal adapter list runs/ID/adapters/gen_0 /tmp/critic\n"
        "  shoal adapter profile /tmp/critic data/personas/critic.jsonl\n"
        "  shoal adapter rollback /tmp/critic\n"
        "  shoal adapter prune /tmp/critic runs/ID --keep 5 --older-than 30d --yes\n"
        "  shoal adapter new --model models/fry --rank 8 --seed 1 begun.gguf\n"
        "  shoal adapter blend --parents A B --out C --alpha 0.5 --mut 0.05 --mut-std 0.01\n"
        "  shoal adapter blend --operator delta_ties --parents A B C --out D --step 0.2\n"
        "  shoal adapter convert --model base.gguf peft-directory lora.gguf\n"
        "  shoal adapter merge models/fry A B --weights 0.7 0.3 --out merged.gguf --type q8_0\n"
        "  shoal adapter extract models/fry finetuned.gguf --rank 16 --out D\n"
        "  shoal adapter resize D --energy 0.9 --out E",
    .main_options = "parents alpha operator weights rank energy out type dry-run",
    .rows = adapter_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = -1,
    .run = run_adapter,
};
