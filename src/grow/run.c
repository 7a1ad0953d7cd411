/*
 * run: a recorded run: its options, plan, rounds and result.
 *
 * Order of a round: its files are written, the adapter is trained and compared, round.json is
 * written. A round without round.json is computed again: its calls are in the store, its training
 * continues from its checkpoint, and an adapter that was written without its round.json is removed,
 * because the gate would compare the next one with it.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "grow/internal.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct grow_options, field)
static const struct option_row grow_option_rows[] = {
    {"prompts", OPT_LIST, AT(prompts), NULL, 0, 0, "LIST",
     "questions: task families, and files of {question}, {prompt} or {messages} with what the "
     "check needs",
     JOB_ARG_BUILTIN_OR_PATH_LIST},
    {"n", OPT_INT, AT(n), "1000", 1, 1e6, "N", "questions of each family"},
    {"rehearse", OPT_LIST, AT(rehearse), NULL, 0, 0, "LIST",
     "questions of other tasks, as --prompts: the agents' most frequent answer is learned "
     "without a check, so that the adapter keeps these skills",
     JOB_ARG_BUILTIN_OR_PATH_LIST},
    {"rehearse-n", OPT_INT, AT(rehearse_n), "100", 1, 1e6, "N",
     "questions of each family of --rehearse"},
    {"check", OPT_STRING, AT(check), "question", 0, 0, "CHECK",
     "question, calculator, tests, regex:PATTERN, json-schema:FILE, sql:FILE, command:WORDS …",
     JOB_ARG_REWARD},
    {"check-sandbox", OPT_BOOL, AT(check_sandbox), "true", 0, 0, NULL,
     "run the commands of a check in a sandbox", JOB_ARG_FORBIDDEN},
    {"rounds", OPT_INT, AT(rounds), "3", 1, GROW_MAX_ROUNDS, "N",
     "rounds of propose, check, learn"},
    {"questions-per-round", OPT_INT, AT(per_round), "0", 0, 1e6, "N",
     "questions that a round asks: new ones, then those without a kept answer; 0: all"},
    {"samples", OPT_INT, AT(samples), "6", 1, 4096, "N",
     "most answers to a question in a round; the agents take turns"},
    {"passes", OPT_INT, AT(passes), "1", 0, 4096, "N",
     "passing answers after which a question gets no further sample; 0: all samples are drawn"},
    {"temperature", OPT_FLOAT, AT(temperature), "0.7", 0, 100, "X",
     "sampling temperature; each agent's first answer is greedy"},
    {"max-tokens", OPT_INT, AT(max_tokens), "64", 1, 65536, "N", "maximum tokens of an answer"},
    {"chain-of-thought", OPT_BOOL, AT(chain_of_thought), NULL, 0, 0, NULL,
     "answers to questions of families begin with a derivation"},
    {"grader", OPT_STRING, AT(grader), "exact", 0, 0, "NAME",
     "normal form in which answers are compared", JOB_ARG_TEXT},
    {"labels", OPT_STRING, AT(labels), "check", 0, 0, "NAME",
     "source of the labels: check; or, to compare with, votes (the most frequent answer) or gold "
     "(the right answers)",
     JOB_ARG_TEXT},
    {"learn", OPT_STRING, AT(learners), "one", 0, 0, "NAME",
     "adapters that learn the kept answers: one (a new adapter, besides the agents), or each "
     "(every "
     "agent's adapter, which then replaces the agent and is published in a folder of its name "
     "below "
     "--out)",
     JOB_ARG_TEXT},
    {"min-coverage", OPT_FLOAT, AT(min_coverage), "0.05", 0, 1, "X",
     "least share of the questions with a passing answer in the first round"},
    {"held-out", OPT_FLOAT, AT(held_out), "0.1", 0, 0.9, "X",
     "share of the questions for the gate, which are in no round"},
    {"repeat", OPT_INT, AT(repeat), "8", 1, 1000, "N",
     "kept answers of rarer kinds are repeated at most N times"},
    {"test", OPT_STRING, AT(test), NULL, 0, 0, "LIST",
     "then measure generated answers of the agents, of the team with the check and of the grown "
     "adapter: families (their test split), or a file with answers",
     JOB_ARG_BUILTIN_OR_PATH_LIST},
    {"test-n", OPT_INT, AT(test_n), "500", 1, 1e6, "N", "questions of each family of --test"},
    {"test-retained", OPT_STRING, AT(test_retained), NULL, 0, 0, "LIST",
     "with --test: families or a file of other tasks, on which each adapter is measured as well",
     JOB_ARG_BUILTIN_OR_PATH_LIST},
    {"compare", OPT_LIST, AT(compare), NULL, 0, 0, "NAME",
     "with --test: also grow adapters from votes, by the best agent alone (one), from the right "
     "answers (gold); --max-steps gives all as many updates",
     JOB_ARG_TEXT},
    {"references", OPT_LIST, AT(references), NULL, 0, 0, "DIR", "with --test: further adapters",
     JOB_ARG_INPUT_PATH},
    {"out", OPT_STRING, AT(learn.out), NULL, 0, 0, "DIR", "adapter directory", JOB_ARG_OUTPUT_PATH},
    {"init-adapter", OPT_STRING, AT(learn.init_adapter), NULL, 0, 0, "DIR",
     "adapter from which each round trains; default: a new one", JOB_ARG_INPUT_PATH},
    {"id", OPT_STRING, AT(id), NULL, 0, 0, "ID",
     "name of the run; default: from --out and the options", JOB_ARG_NAME},
    {"max-memory", OPT_STRING, AT(learn.max_memory), NULL, 0, 0, "SIZE",
     "memory limit of the process, such as 500M or 2G; the result is the same with every limit",
     JOB_ARG_TEXT},
    ENGINE_SEQS_ROW(struct grow_options, learn.limits.max_seqs),
    {0},
};
#undef AT
const struct option_table grow_option_tables[] = {
    {grow_option_rows, 0},
    {train_option_rows, offsetof(struct grow_options, learn.train)},
    {gate_option_rows, offsetof(struct grow_options, learn.gate)},
    {0}};

int grow_options_check(const struct grow_options *o, struct error *err) {
    enum grow_labels labels;
    if (o->prompts.n == 0)
        return error_set(err, ERR_USAGE,
                         "no questions; name a file or families with --prompts LIST");
    if (!o->learn.out) return error_set(err, ERR_USAGE, "--out is missing");
    if (strcmp(o->learners, "one") != 0 && !grow_learns_each(o))
        return error_set(err, ERR_USAGE, "'%s' is unknown; --learn takes one or each", o->learners);
    if (grow_learns_each(o) && o->learn.init_adapter)
        return error_set(err, ERR_USAGE,
                         "--init-adapter is for --learn one; with each, every agent trains from "
                         "its own adapter");
    if (grow_learns_each(o) && o->compare.n)
        return error_set(err, ERR_USAGE, "--compare is for --learn one, not for each");
    if (grow_labels_parse(o->labels, &labels, err) != OK || !grader_find(o->grader, err))
        return err->code;
    if ((o->compare.n || o->references.n) && !o->test)
        return error_set(err, ERR_USAGE, "--compare and --references need --test LIST");
    if (o->test_retained && !o->test)
        return error_set(err, ERR_USAGE, "--test-retained needs --test LIST");
    if (o->compare.n && !o->learn.train.max_steps)
        return error_set(err, ERR_USAGE,
                         "--compare needs --max-steps N, so that all learn with as many updates");
    if (o->references.n > GROW_MAX_REFERENCES || o->compare.n > GROW_MAX_REFERENCES)
        return error_set(err, ERR_USAGE, "--compare and --references take at most %d values each",
                         GROW_MAX_REFERENCES);
    for (int i = 0; i < o->compare.n; i++)
        if (strcmp(o->compare.v[i], "one") != 0 &&
            (grow_labels_parse(o->compare.v[i], &labels, err) != OK || labels == LABELS_CHECK))
            return error_set(err, ERR_USAGE, "'%s' is unknown; --compare takes votes, one and gold",
                             o->compare.v[i]);
    if (o->passes > o->samples)
        return error_set(err, ERR_USAGE, "--passes %lld is more than --samples %lld",
                         (long long)o->passes, (long long)o->samples);
    return OK;
}

/* plan */

/* The smallest engine that samples answers. */
static struct engine_options least_engine(const struct grow_options *o,
                                          const struct grow_questions *q,
                                          const struct model_config *c, struct pool *pool) {
    return (struct engine_options){
        .max_seqs = 1, .max_len = round_longest(o, q, c->max_seq_len), .pool = pool};
}

/* Adapters that a round trains. */
static int learners_count(const struct grow_options *o, int n_agents) {
    return grow_learns_each(o) ? n_agents : 1;
}

int grow_memory_check(const struct grow_options *o, const struct grow_questions *q, int n_agents,
                      const struct model_size *size, enum numeric_class cls, struct pool *pool,
                      struct error *err) {
    char *files[TEAM_MAX];
    for (size_t i = 0; i < ARRAY_LEN(files); i++)
        files[i] = (char *)(uintptr_t) "adapter=kept.jsonl";
    const struct strings data = {files, learners_count(o, n_agents)};
    const struct train_settings s = learn_settings(o, &data);
    const struct engine_options least = least_engine(o, q, &size->config, pool);
    const struct memory_step proposals = {.what = "sampling answers of this model",
                                          .least = model_loading_bytes(size) +
                                                   engine_least_bytes(&size->config, &least)};
    int rc = memory_check(NULL, &proposals, err);
    return rc == OK ? train_memory_check(&s, size, cls, pool, err) : rc;
}

json_t *grow_plan(const struct grow_options *o, const struct grow_questions *q, int n_agents,
                  const struct model_size *size, enum numeric_class cls, struct pool *pool,
                  struct error *err) {
    const struct model_config *c = &size->config;
    const struct engine_options eo = least_engine(o, q, c, pool);
    const int n_learners = learners_count(o, n_agents);
    struct train_memory_bounds learn;
    if (train_memory_bounds(&o->learn.train, n_learners, size, cls, eo.max_len, pool, &learn,
                            err) != OK)
        return NULL;
    const int64_t asked = o->per_round ? MIN(o->per_round, q->n) : q->n;
    const size_t model = model_loading_bytes(size), sampling = engine_least_bytes(c, &eo);
    return json_pack("{s:i,s:i,s:I,s:I,s:I,s:I,s:I,s:{s:I,s:I,s:I}}", "questions", q->n,
                     "rehearsal", q->n_rehearsal, "rounds", (json_int_t)o->rounds,
                     "questions_per_round", (json_int_t)asked, "samples", (json_int_t)o->samples,
                     "max_calls", (json_int_t)(asked * o->samples * o->rounds), "trainings",
                     (json_int_t)(n_learners * o->rounds), "memory", "model", (json_int_t)model,
                     "sampling", (json_int_t)sampling, "training", (json_int_t)learn.least);
}

/* rounds */

static char *round_path(const struct grow_run *r, int round, const char *name) {
    return xasprintf("%s/round-%d%s%s", r->dir, round, *name ? "/" : "", name);
}

static int coverage_check(const struct grow_run *r, const json_t *report, struct error *err) {
    const double coverage = json_get_number(report, "coverage");
    if (r->labels != LABELS_CHECK || coverage >= r->o->min_coverage) return OK;
    return error_set(
        err, ERR_STATE,
        "%.1f %% of %lld questions have an answer that passes (pass@%lld), less than "
        "%.1f %%; an answer that no agent finds cannot be learned: use more --samples, "
        "other --agents or easier questions, or lower --min-coverage",
        100 * coverage, (long long)json_integer_value(json_object_get(report, "questions")),
        (long long)r->o->samples, 100 * r->o->min_coverage);
}

static void gate_log(const struct grow_learner *l, const json_t *gate) {
    if (!gate) return;
    log_info("%s%sanswers to %lld held-out questions: %.1f %% pass, %.1f %% of the best adapter "
             "before",
             l->agent >= 0 ? l->name : "", l->agent >= 0 ? ": " : "",
             (long long)json_integer_value(json_object_get(gate, "n")),
             100 * json_get_number(gate, "after"), 100 * json_get_number(gate, "before"));
}

static void round_log(const struct grow_run *r, json_t *report) {
    log_info("round %lld: %lld questions, %.1f %% with an answer that passes, %lld kept",
             (long long)json_integer_value(json_object_get(report, "round")),
             (long long)json_integer_value(json_object_get(report, "questions")),
             100 * json_get_number(report, "coverage"),
             (long long)json_integer_value(json_object_get(report, "kept")));
    for (int i = 0; i < r->n_learners; i++)
        gate_log(&r->learners[i], json_object_get(learner_record(r, i, report), "gate"));
}

/* Trains the learners on the files of a round, unless it is complete: `stored` is its record. */
static int round_learn(struct grow_run *r, int round, int lines, json_t *stored, json_t *report,
                       struct error *err) {
    int rc = OK;
    if (!stored && lines > 0) rc = learners_round(r, round, report, err);
    for (int i = 0; rc == OK && i < r->n_learners; i++) {
        json_t *record = learner_record(r, i, report);
        if (stored)
            json_object_set(record, "adapter",
                            json_object_get(learner_record(r, i, stored), "adapter"));
        rc = learner_adopt(r, &r->learners[i], round, record, err);
    }
    return rc;
}

/* *more: whether a further round can change anything. */
static int round_run(struct grow_run *r, int round, bool *more, struct error *err) {
    char *dir = round_path(r, round, ""), *done = round_path(r, round, "round.json");
    json_t *report = json_object(), *stored = NULL;
    int lines = 0, rc = dir_make_private(dir, err);
    if (rc == OK) rc = round_propose(r, round, report, err);
    if (rc == OK && round == 1) rc = coverage_check(r, report, err);
    *more = json_integer_value(json_object_get(report, "kept")) > 0;
    if (rc == OK && *more) rc = round_write(r, dir, &lines, report, err);
    if (rc == OK && path_exists(done)) {
        stored = json_parse_file(done, err);
        rc = stored ? OK : err->code;
    }
    if (rc == OK) rc = round_learn(r, round, lines, stored, report, err);
    if (rc == OK && !stored) {
        char *text = json_dumps(report, JSON_INDENT(1));
        rc = file_write_private(done, text, strlen(text), err);
        free(text);
    }
    if (rc == OK) round_log(r, report);
    if (rc == OK) json_array_append(r->rounds, report);
    json_decref(stored);
    json_decref(report);
    free(done);
    free(dir);
    return rc;
}

/* the run */

static json_t *agents_json(const struct grow_run *r) {
    json_t *list = json_array();
    for (int i = 0; i < r->env->n_agents; i++) {
        const struct agent *a = &r->env->team[i];
        json_array_append_new(list, json_pack("{s:s,s:s*}", "name", a->name, "adapter",
                                              a->adapter ? a->adapter->hash : NULL));
    }
    return list;
}

/* Everything that determines a run. Options that change no result, or only its measurements, are
 * left out. */
static json_t *recipe_json(const struct grow_run *r) {
    static const char *const others[] = {
        "id",   "out",    "runs",          "max-memory", "max-num-seqs", "tensorboard",
        "test", "test-n", "test-retained", "compare",    "references",   "activation-memory"};
    json_t *options = json_object();
    for (const struct option_table *t = grow_option_tables; t->rows; t++) {
        json_t *part = options_json(t->rows, (const char *)r->o + t->offset);
        json_object_update(options, part);
        json_decref(part);
    }
    for (size_t i = 0; i < ARRAY_LEN(others); i++) json_object_del(options, others[i]);
    if (!grow_learns_each(r->o)) json_object_del(options, "learn"); // as in earlier versions
    return json_pack("{s:s,s:s,s:o,s:s,s:o}", "model", r->env->m->name, "model_sha256",
                     r->env->m->hash, "agents", agents_json(r), "questions_sha256", r->q->hash,
                     "options", options);
}

/* Refuses the name of a run that was made from something else. */
static int recipe_check(const struct grow_run *r, const json_t *recipe, struct error *err) {
    struct error missing;
    json_t *old = store_run_get(r->store, r->id, &missing);
    const bool same = !old || json_equal(json_object_get(old, "recipe"), recipe);
    json_decref(old);
    return same ? OK
                : error_set(err, ERR_STATE,
                            "run '%s' was made from another model, agents, questions or options; "
                            "choose another --id",
                            r->id);
}

/* Sets the name and the folder of the run, and its row in the store. */
static int record_open(struct grow_run *r, int *lock, struct error *err) {
    const char *runs = r->o->learn.gate.runs;
    json_t *recipe = recipe_json(r);
    char *path = path_join(runs, "shoal.db");
    r->id = r->o->id ? xstrdup(r->o->id) : run_id_make("grow", r->o->learn.out, recipe);
    r->dir = path_join(runs, r->id);
    int rc = dir_make_private(r->dir, err);
    if (rc == OK && (*lock = dir_lock(r->dir, "run", err)) < 0) rc = *lock;
    if (rc == OK && !(r->store = store_open(path, err))) rc = err->code;
    if (rc != OK) error_wrap(err, "the run cannot be recorded; name a folder with --runs");
    if (rc == OK) rc = recipe_check(r, recipe, err);
    if (rc == OK) rc = store_run_begin(r->store, r->id, "grow", recipe, err);
    json_decref(recipe);
    free(path);
    return rc;
}

static int result_write(const struct grow_run *r, const json_t *result, struct error *err) {
    struct buf page = {0};
    char *json = path_join(r->dir, "result.json"), *html = path_join(r->dir, "report.html"),
         *text = json_dumps(result, JSON_INDENT(1));
    grow_page(result, &page);
    int rc = file_write_private(json, text, strlen(text), err);
    if (rc == OK) rc = file_write_private(html, page.data, page.len, err);
    buf_release(&page);
    free(text);
    free(html);
    free(json);
    return rc;
}

static void learner_report(const struct grow_run *r, const struct grow_learner *l, json_t *record) {
    json_object_set_new(record, "published", json_boolean(grow_gate_publish(r, l)));
    json_object_set_new(record, "best_round", json_integer(l->best_round));
    json_object_set_new(record, "dir", json_string(l->out));
    if (l->grown) json_object_set_new(record, "hash", json_string(l->grown->hash));
}

static json_t *result_make(struct grow_run *r, struct error *err) {
    bool published = false;
    json_t *result = json_pack("{s:s,s:s,s:s,s:o,s:i,s:O}", "run", r->id, "labels", r->o->labels,
                               "check", r->o->check, "agents", agents_json(r), "rehearsed",
                               r->n_rehearsed, "rounds", r->rounds);
    for (int i = 0; i < r->n_learners; i++) {
        learner_report(r, &r->learners[i], learner_record(r, i, result));
        published |= grow_gate_publish(r, &r->learners[i]);
    }
    json_object_set_new(result, "published", json_boolean(published));
    json_object_set_new(result, "manifest",
                        manifest_json(r->env->m, json_object(),
                                      json_pack("{s:s}", "questions", r->q->hash),
                                      (uint64_t)r->o->learn.train.seed));
    for (int i = 0; r->gate.n > 0 && i < r->n_learners; i++) {
        const struct grow_learner *l = &r->learners[i];
        json_object_set_new(learner_record(r, i, result), "gate",
                            grow_gate_json(l->baseline, l->best, r->gate.n));
    }
    json_t *test = r->o->test ? grow_compare(r, err) : NULL;
    if (test) json_object_set_new(result, "test", test);
    if ((test || !r->o->test) && result_write(r, result, err) == OK) return result;
    json_decref(result);
    return NULL;
}

static int rounds_run(struct grow_run *r, struct error *err) {
    bool more = true;
    int rc = grow_gate_open(r, err);
    if (rc == OK) rc = rehearsal_ask(r, err);
    for (int round = 1; rc == OK && more && round <= r->o->rounds; round++)
        rc = round_run(r, round, &more, err);
    if (rc == OK) rc = learners_publish(r, err);
    return rc;
}

json_t *grow_run(const struct grow_env *env, const struct grow_options *o,
                 const struct grow_questions *q, struct error *err) {
    struct grow_run r = {.env = env, .o = o, .q = q, .n_agents = env->n_agents};
    json_t *result = NULL;
    int lock = -1;
    struct error ignored; // only the first error is reported
    if (grow_labels_parse(o->labels, &r.labels, err) != OK ||
        kv_cache_dtype_parse(o->learn.train.kv_cache_dtype, env->m->cls, &r.kv, err) != OK ||
        learners_check(env, o, err) != OK)
        return NULL;
    memcpy(r.team, env->team, sizeof r.team);
    r.state = xcalloc((size_t)MAX(q->n + q->n_rehearsal, 1), sizeof *r.state);
    r.rounds = json_array();
    const int recorded = record_open(&r, &lock, err);
    if (recorded == OK) learners_open(&r);
    int rc = recorded == OK ? rounds_run(&r, err) : recorded;
    if (rc == OK) result = result_make(&r, err);
    if (recorded == OK) store_run_status(r.store, r.id, result ? "done" : "failed", &ignored);
    store_close(r.store);
    if (lock >= 0) dir_unlock(lock, r.dir);
    for (int i = 0; i < r.n_kept; i++) free(r.kept[i].text), free(r.kept[i].adapter_hash);
    grow_gate_close(&r);
    learners_close(&r);
    json_decref(r.rounds);
    free(r.kept), free(r.state), free(r.id), free(r.dir);
    return result;
}
