/*
 * learners: the adapters that a run trains: one that joins the team, or one for each agent.
 *
 * With --learn each a round trains every agent's adapter from the adapter with which the agent
 * entered the run. All learn the same answers, so the agents differ by their start only; new
 * adapters in place of the agents would lose this difference, and the agents' other skills. A round
 * does not continue the adapters of the round before, which have learned most of the same answers
 * already: that overfits (grow.h). An agent without an adapter trains a new one.
 *
 * The adapters of a round are trained together, with one checkpoint.
 */
#define _GNU_SOURCE
#include "grow/internal.h"

#include <stdlib.h>
#include <string.h>

struct train_settings learn_settings(const struct grow_options *o, const struct strings *data) {
    struct train_settings s = o->learn;
    s.data = *data;
    s.method = (char *)(uintptr_t) "sft";
    return s;
}

bool grow_learns_each(const struct grow_options *o) {
    return strcmp(o->learners, "each") == 0;
}

/* A name becomes a folder below --out and is part of "NAME=FILE". */
static bool name_is_usable(const char *name) {
    return !strpbrk(name, "/=") && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

int learners_check(const struct grow_env *env, const struct grow_options *o, struct error *err) {
    for (int i = 0; grow_learns_each(o) && i < env->n_agents; i++)
        if (!name_is_usable(env->team[i].name))
            return error_set(
                err, ERR_USAGE,
                "--learn each: the agent's name '%s' cannot be a folder below --out; rename its "
                "directory",
                env->team[i].name);
    return OK;
}

void learners_open(struct grow_run *r) {
    const struct grow_env *env = r->env;
    if (!grow_learns_each(r->o)) {
        r->n_learners = 1;
        r->learners[0] = (struct grow_learner){.name = "adapter",
                                               .agent = -1,
                                               .out = xstrdup(r->o->learn.out),
                                               .dir = xstrdup(r->dir)};
        return;
    }
    for (int i = 0; i < env->n_agents; i++) {
        const char *name = env->team[i].name;
        r->learners[r->n_learners++] =
            (struct grow_learner){.name = name,
                                  .agent = i,
                                  .start = env->team[i].adapter,
                                  .out = path_join(r->o->learn.out, name),
                                  .dir = path_join(r->dir, name)};
    }
}

void learners_close(struct grow_run *r) {
    for (int i = 0; i < r->n_learners; i++) {
        struct grow_learner *l = &r->learners[i];
        adapter_release(l->grown);
        free(l->out), free(l->dir), free(l->baseline), free(l->best);
    }
    r->n_learners = 0;
}

json_t *learner_record(const struct grow_run *r, int learner, json_t *report) {
    if (!grow_learns_each(r->o)) return report;
    json_t *list = json_object_get(report, "learners");
    if (!list) json_object_set_new(report, "learners", list = json_array());
    for (int i = (int)json_array_size(list); i <= learner; i++)
        json_array_append_new(list, json_pack("{s:s}", "name", r->learners[i].name));
    return json_array_get(list, (size_t)learner);
}

/* a round */

static char *round_adapter_path(const struct grow_run *r, int round, const struct grow_learner *l) {
    return xasprintf("%s/round-%d/%s", r->dir, round, l->name);
}

/* The results of a training, by learner. */
struct learned {
    const struct grow_run *r;
    json_t *report;
};

static void on_learned(void *ctx, const struct train_result *t) {
    const struct learned *v = ctx;
    int i = 0;
    while (strcmp(v->r->learners[i].name, t->job->name) != 0) i++;
    json_t *result = train_result_json(t);
    json_object_set_new(result, "why", json_string(t->gate.why));
    json_object_del(result, "manifest");
    json_object_set_new(learner_record(v->r, i, v->report), "adapter", result);
}

/* Leaves in the folder of a round only the learner's adapter of the rounds before, so that the gate
 * of the training compares the new one with it. */
static int adapter_prepare(const struct grow_run *r, int round, const struct grow_learner *l,
                           struct error *err) {
    char *adapter = round_adapter_path(r, round, l);
    tree_delete(adapter);
    int rc = l->grown ? adapter_publish(l->grown, adapter, r->env->m->name, NULL, err) : OK;
    free(adapter);
    return rc;
}

static int learners_train(const struct grow_run *r, const struct train_settings *s, json_t *report,
                          struct error *err) {
    struct learned learned = {r, report};
    struct train_request q = {0};
    int rc = train_request_open(&q, s, r->env->m, r->env->pool, err);
    for (int i = 0; rc == OK && i < r->n_learners; i++)
        if (r->learners[i].start) q.jobs[i].start = adapter_retain(r->learners[i].start);
    if (rc == OK) {
        struct train_output out = train_settings_output(s);
        out.accept_rejected = true;
        out.on_result = on_learned;
        out.ctx = &learned;
        rc = train_and_publish(&q, &out, err);
    }
    train_request_close(&q);
    return rc;
}

int learners_round(const struct grow_run *r, int round, json_t *report, struct error *err) {
    char *dir = xasprintf("%s/round-%d", r->dir, round), *kept = path_join(dir, "kept.jsonl");
    struct strings files = {0};
    const size_t limit = memory_limit_get();
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_learners; i++) {
        char *data = xasprintf("%s=%s", r->learners[i].name, kept);
        strings_add(&files, data);
        free(data);
        rc = adapter_prepare(r, round, &r->learners[i], err);
    }
    struct train_settings s = learn_settings(r->o, &files);
    s.out = dir;
    if (rc == OK) rc = learners_train(r, &s, report, err);
    memory_limit_set(limit);
    strings_release(&files);
    free(kept), free(dir);
    return rc;
}

/* The learner proposes from now on: in place of its agent, or as the first of the team, because it
 * is the best. */
static void team_set(struct grow_run *r, const struct grow_learner *l) {
    if (l->agent >= 0) {
        r->team[l->agent].adapter = l->grown;
        return;
    }
    r->team[0] = (struct agent){.name = "grown", .adapter = l->grown};
    memcpy(r->team + 1, r->env->team, (size_t)r->env->n_agents * sizeof *r->team);
    r->n_agents = r->env->n_agents + 1;
}

int learner_adopt(struct grow_run *r, struct grow_learner *l, int round, json_t *record,
                  struct error *err) {
    const json_t *adapter = json_object_get(record, "adapter");
    bool accepted = false;
    if (!adapter) return OK;
    if (!json_is_true(json_object_get(adapter, "published"))) {
        log_info("round %d: the adapter is rejected: %s", round, json_get_string(adapter, "why"));
        json_object_set_new(record, "accepted", json_false());
        return OK;
    }
    char *path = round_adapter_path(r, round, l);
    struct adapter *a = adapter_open(path, r->env->m, err);
    free(path);
    if (!a) return err->code;
    int rc = grow_gate_round(r, l, a, &accepted, record, err);
    json_object_set_new(record, "accepted", json_boolean(accepted));
    if (!accepted) {
        adapter_release(a);
        return rc;
    }
    adapter_release(l->grown);
    l->grown = a;
    l->best_round = round;
    team_set(r, l);
    return rc;
}

/* the result */

/* Publishes the adapter of the best round, unless it is the current version. */
static int learner_publish(const struct grow_run *r, const struct grow_learner *l,
                           struct error *err) {
    json_t *versions = adapter_versions(l->out, err), *v, *notes;
    bool current = false;
    size_t i;
    if (!versions) return err->code;
    json_array_foreach (versions, i, v)
        current |= json_is_true(json_object_get(v, "current")) &&
                   strcmp(json_get_string(v, "hash"), l->grown->hash) == 0;
    notes = json_pack("{s:s,s:i}", "run", r->id, "round", l->best_round);
    int rc = current ? OK : adapter_publish(l->grown, l->out, r->env->m->name, notes, err);
    json_decref(notes);
    json_decref(versions);
    return rc;
}

int learners_publish(const struct grow_run *r, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_learners; i++)
        if (grow_gate_publish(r, &r->learners[i])) rc = learner_publish(r, &r->learners[i], err);
    return rc;
}
