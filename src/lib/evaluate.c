/* evaluate: shoal_evaluate of include/shoal.h: base model and adapters on the same questions. */
#include "lib/internal.h"

#include "data/data.h"
#include "eval/eval.h"

#include <stdlib.h>

static json_t *summaries_json(const struct eval_comparison *c, const struct eval_solver *solvers) {
    json_t *list = json_array();
    for (int i = 0; i < c->n_tasks * c->n_candidates; i++) {
        int k = i % c->n_candidates;
        const struct eval_task *task = &c->tasks[i / c->n_candidates];
        const char *name = c->candidates[k].name;
        json_t *v = eval_summary_json(task, name, k ? "adapter" : "base", &c->summaries[i], k == 0),
               *contaminated = contamination_report(task, name, solvers[k].adapter);
        if (contaminated) json_object_set_new(v, "contaminated", json_pack("[o]", contaminated));
        json_array_append_new(list, v);
    }
    return list;
}

char *shoal_evaluate(struct shoal *s, const struct shoal_adapter *const *adapters,
                     const char *const *names, int n, const char *const *options,
                     const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct error inner = {0};
    struct call call;
    struct eval_request o;
    struct eval_task *tasks = NULL;
    struct eval_comparison c = {.n_candidates = n + 1};
    struct eval_solver *solvers = xcalloc((size_t)n + 1, sizeof *solvers);
    struct eval_candidate *candidates = xcalloc((size_t)n + 1, sizeof *candidates);
    json_t *result = NULL;
    c.candidates = candidates;
    call_begin(&call, callbacks);
    int rc = call_options_parse(eval_request_rows, &o, options, &inner);
    if (rc == OK) rc = model_check_idle(s, &inner);
    for (int k = 0; rc == OK && k <= n; k++) {
        solvers[k] = (struct eval_solver){.e = s->engine,
                                          .tok = s->model->tok,
                                          .adapter = k ? adapter_unwrap(adapters[k - 1]) : NULL,
                                          .max_len = engine_max_len(s->engine),
                                          .chain_of_thought = o.chain_of_thought};
        candidates[k] =
            (struct eval_candidate){k ? names[k - 1] : "base", eval_solver_answer, &solvers[k]};
    }
    if (rc == OK) rc = eval_request_open(&o, &tasks, &c.n_tasks, &inner);
    c.tasks = tasks;
    if (rc == OK) rc = eval_comparison_run(&c, (uint64_t)o.seed, &inner);
    if (rc == OK) result = summaries_json(&c, solvers);
    eval_comparison_release(&c);
    for (int i = 0; i < c.n_tasks; i++) eval_task_release(&tasks[i]);
    free(tasks);
    free(solvers);
    free(candidates);
    options_release(eval_request_rows, &o);
    call_end(&call, rc, &inner, err);
    return json_result(result);
}
