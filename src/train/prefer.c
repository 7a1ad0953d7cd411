/*
 * prefer: DPO — pairs of answers, of which one is preferred, and a loss on the difference of their
 * log-probabilities from the reference's.
 *
 * The reference is what training begins with: its log-probabilities are the trainer's own before
 * the first update, computed once a run for all pairs. A pair's two answers share a pass.
 */
#include "train/course.h"

#include <math.h>
#include <stdlib.h>

#define MAX_ROWS 2048

struct pairs { /* of a job */
    struct dataset data;
    struct order order;
    double *reference; /* [data.n] */
};
struct prefer {
    struct course c;
    struct pairs *jobs; /* [n] */
    int64_t per_update; /* pairs of each adapter */
    struct sample *batch;
    double *reference; /* of the batch */
    int n_batch;
    int64_t rows;
    struct dpo dpo;
};

/* nll is summed over targets, so the log-probability is its negative. */
static int reference_score(struct prefer *p, int job, struct error *err) {
    struct pairs *q = &p->jobs[job];
    int rc = OK;
    for (int i = 0, n; !rc && i < q->data.n; i += n) {
        int32_t targets[MAX_ROWS];
        double nll[MAX_ROWS];
        int64_t rows = 0;
        for (n = 0; i + n < q->data.n && n < MAX_ROWS; n++) {
            if (n && rows + q->data.v[i + n].n > MAX_ROWS) break;
            q->data.v[i + n].adapter = job;
            rows += q->data.v[i + n].n;
        }
        rc = trainer_score(p->c.trainer, q->data.v + i, n, nll, targets, err);
        for (int k = 0; !rc && k < n; k++) q->reference[i + k] = -nll[k];
    }
    return rc ? error_wrap(err, "the reference of '%s'", p->c.jobs[job].name) : OK;
}

static int flush(struct prefer *p, struct error *err) {
    const struct loss loss = {.fn = dpo_loss, .ctx = &p->dpo};
    int n = p->n_batch;
    p->n_batch = 0;
    p->rows = 0;
    return n ? trainer_accumulate_loss(p->c.trainer, p->batch, n, &loss, err) : OK;
}

static int pair_add(struct prefer *p, int job, int pair, struct error *err) {
    const struct pairs *q = &p->jobs[job];
    const struct sample *s = q->data.v + 2 * pair;
    int64_t rows = s[0].n + s[1].n;
    int rc = p->rows && p->rows + rows > MAX_ROWS ? flush(p, err) : OK;
    for (int k = 0; k < 2; k++) {
        p->reference[p->n_batch] = q->reference[2 * pair + k];
        p->batch[p->n_batch++] = s[k];
    }
    p->rows += rows;
    return rc;
}

static void sums_log(const struct prefer *p, json_t *line) {
    json_t *list = json_object();
    double margin = 0, right = 0;
    for (int j = 0; j < p->c.n; j++) {
        const struct dpo_sums *s = &p->dpo.sums[j];
        double n = (double)s->n;
        margin += s->margin / n / p->c.n;
        right += (double)s->right / n / p->c.n;
        json_object_set_new(list, p->c.jobs[j].name,
                            json_pack("{s:f,s:f,s:f}", "margin", s->margin / n, "reward_chosen",
                                      s->chosen / n, "accuracy", (double)s->right / n));
    }
    json_object_set_new(line, "margin", json_real(margin));
    json_object_set_new(line, "accuracy", json_real(right));
    json_object_set_new(line, "adapters", list);
}

static int prefer_step(void *ctx, int64_t step, json_t *line, struct error *err) {
    struct prefer *p = ctx;
    int rc = OK;
    for (int j = 0; j < p->c.n; j++) p->dpo.sums[j] = (struct dpo_sums){0};
    for (int64_t i = step * p->per_update; !rc && i < (step + 1) * p->per_update; i++)
        for (int j = 0; !rc && j < p->c.n; j++)
            rc = pair_add(p, j, (int)order_at(&p->jobs[j].order, p->c.o->seed, i), err);
    if (!rc) rc = flush(p, err);
    if (!rc) rc = course_update(&p->c, step, line, err);
    if (!rc) sums_log(p, line);
    return rc;
}

static json_t *prefer_state(void *ctx) {
    (void)ctx;
    return json_null();
}

static void prefer_restore(void *ctx, const json_t *state) {
    (void)ctx, (void)state;
}

static int pairs_open(struct prefer *p, int j, struct error *err) {
    struct pairs *q = &p->jobs[j];
    struct sft_job *job = &p->c.jobs[j];
    const struct tokenizer *tok = p->c.m->tok;
    struct dataset eval = {0};
    int32_t limit = course_limit(&p->c);
    int rc = pairs_load(&q->data, job->data, tok, limit, err);
    if (rc) return error_wrap(err, "data of '%s'", job->name);
    if (job->eval_data && (rc = pairs_load(&eval, job->eval_data, tok, 0, err)))
        return error_wrap(err, "evaluation data of '%s'", job->name);
    p->c.data[j] = q->data.hash;
    rc = lint_make(&q->data, job->eval_data ? &eval : NULL, &job->lint, err);
    dataset_release(&eval);
    if (!rc) lint_say(&job->lint, job->name);
    if (!rc) rc = order_init(&q->order, q->data.n / 2, err);
    q->reference = rc ? NULL : try_calloc((size_t)q->data.n, sizeof *q->reference, err);
    return q->reference ? OK : err->code;
}

static int prefer_open(struct prefer *p, struct error *err) {
    int64_t most = 1;
    int rc = OK;
    for (int j = 0; !rc && j < p->c.n; j++) rc = pairs_open(p, j, err);
    if (rc) return rc;
    for (int j = 0; j < p->c.n; j++) most = MAX(most, p->jobs[j].data.n / 2);
    p->c.steps = course_steps(&p->c, most, p->per_update);
    p->c.per_step = 1;
    size_t room = 2 * (size_t)p->per_update * (size_t)p->c.n;
    p->batch = try_calloc(room, sizeof *p->batch, err);
    p->reference = p->batch ? try_calloc(room, sizeof *p->reference, err) : NULL;
    if (!p->reference) return err->code;
    p->dpo.batch = p->batch;
    p->dpo.reference = p->reference;
    p->c.identity = json_pack("{s:f}", "beta", p->dpo.beta);
    rc = course_begin(&p->c, err);
    for (int j = 0; !rc && j < p->c.n; j++) rc = reference_score(p, j, err);
    return rc;
}

int prefer_run(const struct course *c, const struct policy_options *o, struct error *err) {
    struct prefer p = {.c = *c, .dpo = {.beta = o->beta}};
    p.per_update = c->o->bsz * c->o->grad_accum;
    p.jobs = xcalloc((size_t)c->n, sizeof *p.jobs);
    p.dpo.sums = xcalloc((size_t)c->n, sizeof *p.dpo.sums);
    int rc = prefer_open(&p, err);
    const struct course_step step = {prefer_step, prefer_state, prefer_restore, &p};
    if (!rc) rc = course_run(&p.c, &step, err);
    for (int j = 0; j < c->n; j++) {
        dataset_release(&p.jobs[j].data);
        order_release(&p.jobs[j].order);
        free(p.jobs[j].reference);
    }
    course_release(&p.c);
    free(p.jobs);
    free(p.dpo.sums);
    free(p.batch);
    free(p.reference);
    return rc;
}
