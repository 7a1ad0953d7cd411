/*
 * sample_check: selects the answer of each prompt among its samples by a check.
 *
 * The selected sample is the first with the most frequent answer of those that passed. If none
 * passed, it is the first with the most frequent answer of all.
 */
#include "cli/sample_check.h"

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
        if (rc != OK && p->n > 1) error_wrap(err, "prompt %d", i + 1);
    }
    return rc;
}

int sample_check_open_lines(struct sample_check *c, const char *spec, bool sandbox, int n_samples,
                            struct error *err) {
    struct prompt line = {.text = (char[]){""}};
    const struct prompts lines = {.v = &line, .n = 1};
    return sample_check_open(c, spec, sandbox, &lines, n_samples, err);
}

int sample_check_options(int64_t n_samples, const char *spec, struct error *err) {
    if (n_samples <= 1 || spec) return OK;
    return error_set(err, ERR_USAGE, "'--samples' needs '--check', which selects among them");
}

void sample_check_set_question(struct sample_check *c, int prompt, const char *text) {
    json_t *question = json_string(text);
    json_object_set_new(c->items[prompt], "question", question ? question : json_null());
}

static void results_release(struct sample_check *c) {
    checked_samples_release(&c->samples);
    free(c->selected);
    c->selected = NULL;
}

int sample_check_run(struct sample_check *c, struct setup *s, char *const *texts,
                     struct error *err) {
    results_release(c);
    c->engine.engine = s->e;
    c->engine.model = s->m;
    c->questioner.client = engine_client_as_llm(&c->engine);
    c->questioner.prefilled = c->questioner.generated = 0;
    c->selected = xcalloc((size_t)MAX(c->n_prompts, 1), sizeof *c->selected);
    int rc = checked_samples_of_texts(c->check, c->items, c->n_prompts, c->n_samples, texts,
                                      &c->samples, err);
    for (int i = 0; rc == OK && i < c->n_prompts; i++)
        c->selected[i] = checked_samples_decide(&c->samples, i, c->n_samples, true);
    return rc;
}

int sample_check_passed(const struct sample_check *c, int prompt) {
    int passed = 0;
    for (int i = 0; i < c->n_samples; i++)
        passed += c->samples.v[(int64_t)prompt * c->n_samples + i].passed;
    return passed;
}

void sample_check_log(const struct sample_check *c, int64_t prefilled, int64_t generated) {
    log_info("%d of %d samples passed check '%s'; %lld prompt tokens, %lld completion tokens",
             sample_check_passed(c, 0), c->n_samples, check_kind(c->check), (long long)prefilled,
             (long long)generated);
}

void sample_check_add_json(const struct sample_check *c, json_t *v) {
    json_object_set_new(v, "samples", json_integer(c->n_samples));
    json_object_set_new(v, "passed", json_integer(sample_check_passed(c, 0)));
}

void sample_check_release(struct sample_check *c) {
    check_free(c->check);
    for (int i = 0; c->items && i < c->n_prompts; i++) json_decref(c->items[i]);
    free(c->items);
    results_release(c);
    *c = (struct sample_check){0};
}
