/* debate: shoal_debate of include/shoal.h: the caller's adapters as a team of the swarm layer. */
#include "lib/internal.h"

#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

static int names_check(const char *const *names, int n, struct error *err) {
    if (n < 1 || n > TEAM_MAX || !names)
        return error_set(err, ERR_USAGE, "a debate needs 1 to %d agents with names, not %d",
                         TEAM_MAX, n);
    for (int i = 0; i < n; i++) {
        if (!names[i] || !*names[i]) return error_set(err, ERR_USAGE, "agent %d has no name", i);
        for (int k = 0; k < i; k++)
            if (strcmp(names[i], names[k]) == 0)
                return error_set(err, ERR_USAGE, "two agents have the name '%s'", names[i]);
    }
    return OK;
}

/* A team that borrows names and adapters. Call team_release also after an error. */
static int team_make(struct team *t, const struct shoal_adapter *const *adapters,
                     const char *const *names, int n, const struct debate_request *r,
                     struct error *err) {
    struct strings agents = {0};
    int rc = names_check(names, n, err);
    if (rc != OK) return rc;
    for (int i = 0; i < n; i++) strings_add(&agents, names[i]);
    rc = team_from_flags(t, r->protocol ? r->protocol : "brief", &agents, &r->personas, err);
    for (int i = 0; rc == OK && i < n; i++) {
        t->v[i].name = names[i];
        t->v[i].adapter = adapters ? adapter_unwrap(adapters[i]) : NULL;
    }
    strings_release(&agents);
    if (rc == OK) rc = debate_request_apply(r, &t->options, err);
    if (rc == OK && r->rounds == 0)
        rc = error_set(err, ERR_USAGE, "a debate needs at least one round");
    return rc;
}

static json_t *topic_run(const struct llm_client *client, const struct team *t,
                         const struct task_item *topic, struct error *err) {
    struct debate d;
    struct progress bar;
    progress_start(&bar, "debate", (int64_t)t->n * t->options.rounds);
    int rc = debate_run(client, t->v, t->n, topic, 1, &t->options, &d, &bar, err);
    json_t *transcript = rc == OK ? debate_transcript_json(&d, t->v, topic, 0) : NULL;
    progress_finish(&bar, NULL);
    debate_release(&d);
    return transcript;
}

static json_t *tasks_run(const struct debate_request *r, const struct llm_client *client,
                         const struct team *t, const struct debate_questions *q,
                         struct error *err) {
    json_t *reports = json_array();
    for (int i = 0; i < q->n_tasks; i++) {
        json_t *report = log_check_cancelled(err) == OK
                             ? debate_request_run_task(r, client, t, &q->tasks[i], err)
                             : NULL;
        if (!report) {
            json_decref(reports);
            return NULL;
        }
        json_array_append_new(reports, report);
    }
    return reports;
}

char *shoal_debate(struct shoal *s, const struct shoal_adapter *const *adapters,
                   const char *const *names, int n, const char *const *options,
                   const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct error inner = {0};
    struct call c;
    struct debate_request r = {0};
    struct debate_questions q = {0};
    struct team t = {0};
    struct engine_client engine = {.engine = s->engine, .model = s->model};
    const struct llm_client client = engine_client_as_llm(&engine);
    json_t *result = NULL;
    call_begin(&c, callbacks);
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = call_options_parse(debate_request_rows, &r, options, &inner);
    if (rc == OK) rc = team_make(&t, adapters, names, n, &r, &inner);
    if (rc == OK) rc = debate_questions_open(&r, &q, &inner);
    if (rc == OK) {
        result = q.topic ? topic_run(&client, &t, q.topic, &inner)
                         : tasks_run(&r, &client, &t, &q, &inner);
        rc = result ? OK : inner.code;
    }
    debate_questions_release(&q);
    team_release(&t);
    options_release(debate_request_rows, &r);
    call_end(&c, rc, &inner, err);
    return json_result(result);
}
