/*
 * operators: what makes a child from parents, as rows of a table: crossover, PEFT's combination
 * types, mutation.
 *
 * A breeder draws a row by name, calls operator_apply, asks operator_relative_change how far the child went
 * from its parents, and adapts the step that it gives next time within the row's bounds. An
 * operator is pure: the same parents, weights, step, rank and seed give the same adapter, bit for
 * bit. Any thread may apply any operator.
 *
 * All rows take plain LoRA only (DoRA and tables of the vocabulary are refused) and mixed ranks,
 * targets and scalings. Those that work on ΔW = scale · B A use the true scale (alpha / r, or
 * alpha / √r) and give children of scale 1.
 */
#ifndef SHOAL_OPERATORS_H
#define SHOAL_OPERATORS_H

#include "adapter/lowrank.h"

#define OPERATOR_PARENTS_MAX 64

/* What an operator is applied to. */
struct operands {
    struct adapter *const *parents; /* [n]; crossover of two calls them a and b */
    const float *weights;           /* [n], or NULL: 1 / n each */
    int n;
    /* Of every module of a child made from ΔW, at most what the module can have; 0: the largest
     * parent's there. Mutations but `rank` and PEFT's rows on A and B keep the parents'. */
    int32_t rank;
    float step; /* see the row; NAN: the row's own */
    uint64_t seed;
};

enum operator_kind { OPERATOR_CROSSOVER, OPERATOR_PEFT, OPERATOR_MUTATION };
/* What weights are to a row, for who breeds with it. */
enum operator_weighting {
    WEIGHTING_DELTA,   /* shares of ΔW */
    WEIGHTING_FACTORS, /* shares of A and B apart: ranks are the parents' */
    WEIGHTING_FITNESS,
    WEIGHTING_NONE /* none are wanted; the first parent should be the fitter */
};
struct adapter_operator {
    const char *name, *about;
    enum operator_kind kind;
    enum operator_weighting shares;
    int least, most;  /* parents */
    const char *unit; /* what the step is; NULL: it has none */
    float step, step_min, step_max;
    /* Operands were checked. `lineage` gets what is particular to this child; the rest is in it. */
    struct adapter *(*make)(const struct operands *x, json_t *lineage, struct error *err);
};
/* In the order in which they are listed; NULL beyond the last. */
const struct adapter_operator *operator_at(int i);
/* ERR_USAGE lists what there is. */
const struct adapter_operator *operator_find(const char *name, struct error *err);
/*
 * The child. Its lineage: operator, parents (hashes), weights, step, rank, seed, and where ΔW was
 * re-factorised "error", the relative norm of what the rank could not hold. ERR_USAGE: operands
 * that the row does not take; ERR_MISMATCH: parents that do not go together; ERR_STATE: nothing of
 * them is left; ERR_NUMERIC: overflow, or a mean that iteration does not reach.
 */
struct adapter *operator_apply(const struct adapter_operator *op, const struct operands *x,
                               struct error *err);
/* ‖ΔW_child - ΔW_parent‖ / ‖ΔW_parent‖, down to about 1e-8; of a zero parent 0 or infinity. */
double operator_relative_change(const struct adapter *child, const struct adapter *parent);

/* The parts of the table, each in its own file; each ends with a row without a name. */
extern const struct adapter_operator crossover_operators[], merge_operators[], peft_operators[],
    mutation_operators[];

/* For rows. */
int32_t operand_modules(const struct operands *x); /* of the parents' shape, with or without ΔW */
double operand_weight(const struct operands *x, int p);
/* The rank wanted of module i, or the largest of the parents', and at most `most` and what its
 * matrix can have. */
int32_t operand_rank(const struct operands *x, int32_t i, int32_t most);
/* Finishes the child of `d`; ERR_STATE when nothing is left of it. */
struct adapter *operator_finish(struct adapter_builder *d, json_t *lineage, struct error *err);
/* Takes over `a` (NULL: so is the result): its content under another lineage, which is borrowed. */
struct adapter *operator_set_lineage(struct adapter *a, json_t *lineage);
/* Takes over `a`: scaled to ‖ΔW‖ = norm, which its lineage tells as "scaled"; as it is where it has
 * no norm or is to have none. */
struct adapter *operator_rescale(struct adapter *a, double norm);
/* coef [L·N_PROJ][n]: child = Σ coef · ΔW in each module, truncated to its rank; a module where
 * only one parent counts is that parent's, as it is, when the rank allows. */
struct adapter *operator_weighted_sum(const struct operands *x, const double *coef, json_t *lineage,
                             struct error *err);

#endif
