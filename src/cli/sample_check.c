/*
 * sample_check: selects the answer of each prompt among its samples by a check.
 *
 * The selected sample is the first with the most frequent answer of those that passed. If none
 * passed, it is the first with the most frequent answer of all, and the command prints a warning.
 */
#include "cli/sample_check.h"
#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>

/* The object that the check sees of a prompt. */
static json_t *item_json(const struct prompt *p) {
    json_t *question = json_string(p->text), *v = json_object();
    json_object_set_new(v, "question", question ? question : json_null());
    if (p->check) json_object_set(v, "check", p->check);
    return v;
}

int sample_check_open(struct sample_check *c, const char *spec, bool sandbox,
                      const struct prompts *p, int n_samples, struct error *err) {
    *c = (struct sample_check){.n_prompts = p->n, .n_samples = n_samples};
    c->questioner.agent.name = "base";
    c->model = check_questioner_as_model(&c->questioner);
    const struct check_options o = {.sandbox = sandbox, .model = &c->model};
    c->check = check_open_filter(spec, &o, err);
    if (!c->check) return err->code;
    int rc = OK;
    c->items = xcalloc((size_t)MAX(p->n, 1), sizeof *c->items);
    for (int i = 0; rc == OK && i < p->n; i++) {
        c->items[i] = item_json(&p->v[i]);
        rc = check_item(c->check, c->items[i], err);
        if (rc != OK) error_wrap(err, "prompt %d", i + 1);
    }
    return rc;
}

/* Stores the texts and the results of their checks as samples. */
static int samples_check(struct sample_check *c, char *const *texts, struct error *err) {
    const int n = c->n_prompts * c->n_samples;
    const struct grader *g = grader_find("exact", err);
    struct check_case *cases = xcalloc((size_t)MAX(n, 1), sizeof *cases);
    for (int i = 0; i < n; i++)
        cases[i] = (struct check_case){
            .item = c->items[i / c->n_samples], .text = texts[i], .ended = true};
    int rc = check_run(c->check, cases, n, err);
    for (int i = 0; rc == OK && i < n; i++)
        c->samples.v[i] = (struct checked_sample){.answer = grader_answer(g, texts[i]),
                                                  .passed = cases[i].passed};
    free(cases);
    return rc;
}

static void prompt_select(struct sample_check *c, int prompt) {
    const struct checked_sample *v = c->samples.v + (int64_t)prompt * c->n_samples;
    int passed = 0;
    for (int i = 0; i < c->n_samples; i++) passed += v[i].passed;
    c->selected[prompt] = checked_samples_decide(&c->samples, prompt, c->n_samples, true);
    if (passed > 0)
        log_info("prompt %d: %d of %d samples passed check '%s'", prompt + 1, passed, c->n_samples,
                 check_kind(c->check));
    else
        log_warn("prompt %d: none of %d samples passed check '%s'; the answer is the most frequent "
                 "one",
                 prompt + 1, c->n_samples, check_kind(c->check));
}

int sample_check_run(struct sample_check *c, struct setup *s, char *const *texts,
                     struct error *err) {
    const size_t n = (size_t)MAX(c->n_prompts, 1);
    c->engine = (struct engine_client){.engine = s->e, .model = s->m};
    c->questioner.client = engine_client_as_llm(&c->engine);
    c->samples = (struct checked_samples){.n_items = c->n_prompts, .max_samples = c->n_samples};
    c->samples.v = xcalloc(n * (size_t)c->n_samples, sizeof *c->samples.v);
    c->samples.n = xcalloc(n, sizeof *c->samples.n);
    c->selected = xcalloc(n, sizeof *c->selected);
    for (int i = 0; i < c->n_prompts; i++) c->samples.n[i] = c->n_samples;
    int rc = samples_check(c, texts, err);
    for (int i = 0; rc == OK && i < c->n_prompts; i++) prompt_select(c, i);
    return rc;
}

void sample_check_release(struct sample_check *c) {
    check_free(c->check);
    for (int i = 0; c->items && i < c->n_prompts; i++) json_decref(c->items[i]);
    free(c->items);
    checked_samples_release(&c->samples);
    free(c->selected);
    *c = (struct sample_check){0};
}
