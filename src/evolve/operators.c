/*
 * operators: finds and applies the operators of all tables, and has the helpers that their
 * functions share.
 *
 * operator_apply checks the operands, so the function `make` of a row can rely on plain parents of
 * one shape, finite weights and a step within bounds. operator_apply also makes the lineage, and
 * refuses a child with numbers that are not finite.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct adapter_operator *const tables[] = {crossover_operators, merge_operators,
                                                        peft_operators, mutation_operators};

const struct adapter_operator *operator_at(int i) {
    for (size_t t = 0; t < ARRAY_LEN(tables); t++)
        for (const struct adapter_operator *op = tables[t]; op->name; op++)
            if (i-- == 0) return op;
    return NULL;
}

const struct adapter_operator *operator_find(const char *name, struct error *err) {
    struct buf known = {0};
    const struct adapter_operator *op;
    const char *current_name = renamed_value("operator", name);
    for (int i = 0; (op = operator_at(i)); i++) {
        if (strcmp(op->name, current_name) == 0) break;
        buf_printf(&known, "%s%s", i ? ", " : "", op->name);
    }
    if (!op) error_set(err, ERR_USAGE, "no operator '%s'; there are %s", name, known.data);
    buf_release(&known);
    return op;
}

const char *operator_stored_name(const struct adapter_operator *op) {
    return stored_value("operator", op->name);
}

const char *operator_label(const json_t *record, const char *key) {
    return current_value("operator", json_get_string(record, key));
}

int32_t operand_modules(const struct operands *x) {
    return x->parents[0]->shape.n_layers * N_PROJ;
}

double operand_weight(const struct operands *x, int p) {
    return x->weights ? (double)x->weights[p] : 1.0 / x->n_parents;
}

int32_t operand_rank(const struct operands *x, int32_t i, int32_t max_rank) {
    int32_t r = x->rank;
    for (int p = 0; x->rank == 0 && p < x->n_parents; p++) r = MAX(r, x->parents[p]->loras[i].r);
    const struct model_config *shape = &x->parents[0]->shape;
    r = MIN(r, MIN(proj_in(shape, i % N_PROJ), proj_out(shape, i % N_PROJ)));
    return MIN(r, max_rank);
}

struct adapter *operator_finish(struct adapter_builder *d, json_t *lineage, struct error *err) {
    if (d->norm2 > 0)
        json_object_set_new(lineage, "error", json_sprintf("%.3g", adapter_builder_error(d)));
    struct adapter *child = adapter_builder_finish(d, lineage);
    if (!child) error_set(err, ERR_STATE, "nothing of the parents is left in the child");
    return child;
}

json_t *operator_mutated_lineage(const json_t *before, const json_t *mutation) {
    static const char *const values[] = {"step", "p", "std", "seed"};
    json_t *lineage = json_copy((json_t *)(uintptr_t)before), *value;
    json_object_set(lineage, "mutation", json_object_get(mutation, "operator"));
    for (size_t i = 0; i < ARRAY_LEN(values); i++) {
        char *key = xasprintf("mutation_%s", values[i]);
        if ((value = json_object_get(mutation, values[i]))) json_object_set(lineage, key, value);
        free(key);
    }
    return lineage;
}

struct adapter *operator_set_lineage(struct adapter *a, json_t *lineage) {
    if (!a) return NULL;
    struct adapter *child = adapter_from_data(&a->shape, &a->config, a->data, lineage);
    adapter_add_training_data(child, a->training_data);
    adapter_release(a);
    return child;
}

struct adapter *operator_rescale(struct adapter *a, double norm) {
    double old_norm = sqrt(adapter_dot(a, a));
    if (old_norm <= 0 || norm <= 0) return a;
    double factor = norm / old_norm;
    json_t *lineage = json_copy(a->lineage);
    json_object_set_new(lineage, "scaled", json_sprintf("%.9g", factor));
    struct adapter *scaled = operator_set_lineage(adapter_scale(a, (float)factor), lineage);
    json_decref(lineage);
    adapter_release(a);
    return scaled;
}

/* Returns the number of parents that contribute to module i. *last: the last contributing parent;
 * *rank_sum: the sum of the ranks of the contributing parents. */
static int contributing_parents(const struct operands *x, const double *coef, int32_t i, int *last,
                                int *rank_sum) {
    int n = 0;
    *rank_sum = 0;
    for (int p = 0; p < x->n_parents; p++) {
        if (coef[p] == 0 || x->parents[p]->loras[i].r == 0) continue;
        *last = p;
        *rank_sum += x->parents[p]->loras[i].r;
        n++;
    }
    return n;
}

static void module_sum(const struct operands *x, const double *coef, int32_t i,
                       struct adapter_builder *d) {
    const struct model_config *shape = d->shape;
    int last = 0, rank_sum = 0, n = contributing_parents(x, coef, i, &last, &rank_sum);
    int32_t r = operand_rank(x, i, rank_sum);
    if (n == 0) return;
    if (n == 1 && r == rank_sum) {
        adapter_builder_add_exact(d, i, &x->parents[last]->loras[i], coef[last]);
        return;
    }
    struct arena ar = {0};
    struct lowrank_sum s =
        lowrank_sum_new(&ar, proj_out(shape, i % N_PROJ), proj_in(shape, i % N_PROJ), rank_sum);
    for (int p = 0, column = 0; p < x->n_parents; p++) {
        const struct lora *lo = &x->parents[p]->loras[i];
        if (coef[p] == 0) continue;
        lowrank_sum_add(&s, lo, coef[p], column);
        column += lo->r;
    }
    struct svd sv = lowrank_sum_svd(&s, &ar);
    double total2 = 0;
    for (int c = 0; c < sv.n; c++) total2 += sv.s[c] * sv.s[c];
    adapter_builder_add_truncated(d, i, &sv, r, total2);
    arena_release(&ar);
}

struct adapter *operator_weighted_sum(const struct operands *x, const double *coef, json_t *lineage,
                                      struct error *err) {
    const struct adapter *a = x->parents[0];
    struct adapter_builder d = adapter_builder_init(&a->shape, a->config.dropout);
    for (int32_t i = 0; i < operand_modules(x); i++)
        module_sum(x, coef + (size_t)i * (size_t)x->n_parents, i, &d);
    return operator_finish(&d, lineage, err);
}

static int parents_check(const struct adapter_operator *op, const struct operands *x,
                         struct error *err) {
    if (x->n_parents < op->min_parents || x->n_parents > op->max_parents)
        return error_set(err, ERR_USAGE, "operator '%s' takes %d%s parent%s, not %d", op->name,
                         op->min_parents, op->max_parents > op->min_parents ? " or more" : "",
                         op->max_parents > 1 ? "s" : "", x->n_parents);
    for (int p = 0; p < x->n_parents; p++) {
        const struct adapter *a = x->parents[p];
        CHECK(a->data); /* NULL if only the packed copy was kept */
        if (adapter_require_plain(a, op->name, err) != OK) return err->code;
        if (!adapter_fits(a, &x->parents[0]->shape))
            return error_set(err, ERR_MISMATCH, "parents '%.12s' and '%.12s' differ in shape",
                             x->parents[0]->hash, a->hash);
        if (x->weights && !isfinite(x->weights[p]))
            return error_set(err, ERR_USAGE, "weight %g is not a finite number",
                             (double)x->weights[p]);
    }
    return OK;
}

static int operands_check(const struct adapter_operator *op, const struct operands *x,
                          struct error *err) {
    if (op->unit && !(x->step >= op->step_min && x->step <= op->step_max))
        return error_set(err, ERR_USAGE, "step %g of operator '%s' is not in %g to %g (%s)",
                         (double)x->step, op->name, (double)op->step_min, (double)op->step_max,
                         op->unit);
    if (x->rank < 0 || x->rank > ADAPTER_RANK_MAX)
        return error_set(err, ERR_USAGE, "rank %d is not in 1 to %d (0: the parents')",
                         (int)x->rank, ADAPTER_RANK_MAX);
    return parents_check(op, x, err);
}

/* Appends the shortest decimal that reads back as the same float. */
static void add_float(struct buf *b, float f) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) break;
    }
    buf_add(b, text, strlen(text));
}

void operator_lineage_set_names(json_t *lineage, const char *const *names, int n) {
    json_t *list = json_array();
    for (int p = 0; p < n; p++) json_array_append_new(list, json_from_path(names[p]));
    char *text = json_dumps(list, JSON_COMPACT);
    json_object_set_new(lineage, "parent_names", json_string(text));
    json_decref(list);
    free(text);
}

static json_t *operator_lineage_json(const struct adapter_operator *op, const struct operands *x) {
    struct buf parents = {0}, weights = {0}, step = {0};
    for (int p = 0; p < x->n_parents; p++) {
        buf_printf(&parents, "%s%s", p ? " " : "", x->parents[p]->hash);
        if (p) buf_add(&weights, " ", 1);
        add_float(&weights, (float)operand_weight(x, p));
    }
    json_t *o =
        json_pack("{s:s, s:s}", "operator", operator_stored_name(op), "parents", parents.data);
    if (x->n_parents > 1) json_object_set_new(o, "weights", json_string(weights.data));
    add_float(&step, x->step);
    if (op->unit) json_object_set_new(o, "step", json_string(step.data));
    if (x->rank) json_object_set_new(o, "rank", json_sprintf("%d", (int)x->rank));
    json_object_set_new(o, "seed", json_sprintf("%llu", (unsigned long long)x->seed));
    if (x->names) operator_lineage_set_names(o, x->names, x->n_parents);
    adapter_lineage_set_base(o, (const struct adapter *const *)x->parents, x->n_parents);
    buf_release(&parents);
    buf_release(&weights);
    buf_release(&step);
    return o;
}

static const struct {
    const char *name;
    unsigned option;
} option_names[] = {{"weights", OPERAND_WEIGHTS}, {"rank", OPERAND_RANK}, {"seed", OPERAND_SEED}};

void operator_option_list(const struct adapter_operator *op, struct buf *b) {
    const char *separator = "";
    for (size_t i = 0; i < ARRAY_LEN(option_names); i++) {
        if (!(op->options & option_names[i].option)) continue;
        buf_printf(b, "%s%s", separator, option_names[i].name);
        separator = ", ";
    }
    if (op->unit) buf_printf(b, "%sstep", separator);
    if (!op->unit && !op->options) buf_puts(b, "none");
}

int operator_check_option(const struct adapter_operator *op, const char *name, struct error *err) {
    struct buf known = {0};
    if (op->unit && strcmp(name, "step") == 0) return OK;
    for (size_t i = 0; i < ARRAY_LEN(option_names); i++)
        if ((op->options & option_names[i].option) && strcmp(name, option_names[i].name) == 0)
            return OK;
    operator_option_list(op, &known);
    error_set(err, ERR_USAGE, "operator '%s' has no option '%s'; it has %s", op->name, name,
              known.data);
    buf_release(&known);
    return err->code;
}

struct adapter *operator_apply(const struct adapter_operator *op, const struct operands *x,
                               struct error *err) {
    struct operands checked = *x;
    if (isnan(checked.step)) checked.step = op->step;
    if (operands_check(op, &checked, err) != OK) return NULL;
    json_t *lineage = operator_lineage_json(op, &checked);
    struct adapter *child = op->make(&checked, lineage, err);
    json_decref(lineage);
    for (int p = 0; child && p < checked.n_parents; p++)
        adapter_add_training_data(child, checked.parents[p]->training_data);
    for (size_t i = 0; child && i < child->n_data; i++) {
        if (isfinite(child->data[i])) continue;
        adapter_release(child);
        error_set(err, ERR_NUMERIC, "operator '%s' overflows", op->name);
        return NULL;
    }
    return child;
}

double operator_relative_change(const struct adapter *child, const struct adapter *parent) {
    double cc = adapter_dot(child, child), pp = adapter_dot(parent, parent);
    double change2 = cc + pp - 2 * adapter_dot(child, parent);
    if (pp == 0) return cc == 0 ? 0 : INFINITY;
    return change2 > 0 ? sqrt(change2 / pp) : 0;
}
