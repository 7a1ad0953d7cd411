/*
 * A run: founders trained together, measured alone and in debate, bred for some generations, and
 * everything measured once more on test questions that fitness never saw.
 *
 * A run is a function of its recipe, seed, base, data and numeric class. It keeps no cursor: every
 * generation is in the call store and training has its checkpoint, so continuing a run means
 * computing it again from the start, where all that was done before is found instead of computed.
 * That is why a killed run ends with the same hashes.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct run_options, field), fallback, min, max, metavar, help }

const struct option_row run_option_rows[] = {
    ROW("model", OPT_STRING, model, "models/fry", 0, 0, "MODEL", "the base"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "of everything random"),
    ROW("personas", OPT_LIST, personas, NULL, 0, 0, "NAME=FILE",
        "founders and their conversations"),
    ROW("tasks", OPT_LIST, tasks, NULL, 0, 0, "FAMILY", "what fitness and the final test ask"),
    ROW("rounds", OPT_INT, rounds, "2", 1, 16, "N", "rounds of a debate"),
    ROW("max-tokens", OPT_INT, max_tokens, "24", 1, 4096, "N", "tokens of thinking a turn"),
    ROW("working", OPT_BOOL, working, "true", 0, 0, NULL, "think before answering"),
    ROW("vote", OPT_STRING, vote, "confidence", 0, 0, "NAME",
        "majority, confidence, logprob or borda"),
    ROW("test-items", OPT_INT, test_items, "500", 1, 1e6, "N", "held-out questions of the table"),
    ROW("temperature", OPT_FLOAT, temperature, "0.7", 0.01, 10, "T",
        "of self-consistency's samples"),
    ROW("zero-adapters", OPT_BOOL, zero_adapters, NULL, 0, 0, NULL,
        "replace founders by zero adapters (a control)"),
    {0},
};
#undef ROW

static void run_options_default(struct run_options *o) {
    *o = (struct run_options){0};
    options_default(run_option_rows, o);
    options_default(train_option_rows, &o->train);
    options_default(evolve_option_rows, &o->evolve);
    options_default(fitness_option_rows, &o->fitness);
}

void run_options_release(struct run_options *o) {
    options_release(run_option_rows, o);
    options_release(train_option_rows, &o->train);
    options_release(evolve_option_rows, &o->evolve);
    options_release(fitness_option_rows, &o->fitness);
    free(o->text);
}

#define MAX_FOUNDERS 16

/* A persona's name becomes a folder and a row of the table, so it must be plain, its own, and no
 * row's or child's. */
static bool name_is_plain(const char *name, size_t len) {
    static const char *const taken[] = {"base", "debate", "generation", "self-consistency"};
    for (size_t i = 0; i < len; i++)
        if (!((name[i] | 32) >= 'a' && (name[i] | 32) <= 'z') &&
            !(name[i] >= '0' && name[i] <= '9') && name[i] != '-' && name[i] != '_')
            return false;
    for (size_t i = 0; i < ARRAY_LEN(taken); i++)
        if (strlen(taken[i]) == len && memcmp(taken[i], name, len) == 0) return false;
    bool child = len > 1 && name[0] == 'g' && name[1] >= '0' && name[1] <= '9';
    return len > 0 && len <= 20 && !child;
}

static int check_personas(const struct run_options *o, const char *path, struct error *err) {
    if (o->personas.n > MAX_FOUNDERS)
        return error_set(err, ERR_USAGE, "'%s': more than %d personas", path, MAX_FOUNDERS);
    for (int i = 0; i < o->personas.n; i++) {
        const char *v = o->personas.v[i], *eq = strchr(v, '=');
        if (!eq || eq == v || strspn(eq + 1, "+") == strlen(eq + 1))
            return error_set(err, ERR_USAGE, "'%s': '%s' is not name=file", path, v);
        if (!name_is_plain(v, (size_t)(eq - v)))
            return error_set(
                err, ERR_USAGE,
                "'%s': '%.*s' cannot name a persona; use up to 20 letters, digits, - and _, "
                "but not base, debate, generation, self-consistency or g1c0",
                path, (int)MIN(eq - v, 80), v);
        for (int j = 0; j < i; j++)
            if (strncmp(o->personas.v[j], v, (size_t)(eq - v) + 1) == 0)
                return error_set(err, ERR_USAGE, "'%s': two personas are named '%.*s'", path,
                                 (int)(eq - v), v);
    }
    return OK;
}

static int check_options(const struct run_options *o, const char *path, struct error *err) {
    if (o->personas.n < 2)
        return error_set(err, ERR_USAGE, "'%s': at least two personas are needed", path);
    if (o->tasks.n < 1) return error_set(err, ERR_USAGE, "'%s': no tasks are named", path);
    if (!vote_find(o->vote)) return error_set(err, ERR_USAGE, "'%s': no vote '%s'", path, o->vote);
    if (strcmp(o->evolve.crossover, "delta") != 0 && strcmp(o->evolve.crossover, "seed") != 0)
        return error_set(err, ERR_USAGE, "'%s': no crossover '%s'; there are delta and seed", path,
                         o->evolve.crossover);
    for (int i = 0; i < o->tasks.n; i++)
        if (fry_find(o->tasks.v[i]) < 0)
            return error_set(err, ERR_USAGE, "'%s': no task '%s'", path, o->tasks.v[i]);
    return check_personas(o, path, err);
}

/* The recipe's top level and its three sections; a key that no table knows is an error with its
 * line. */
int run_recipe_load(struct run_options *o, const char *path, struct error *err) {
    struct yaml y;
    struct buf text = {0};
    run_options_default(o);
    int rc = yaml_load(&y, path, err);
    if (rc != OK) return rc;
    if (yaml_line(&y, "train.seed"))
        rc = error_set(err, ERR_USAGE, "'%s', line %d: a run has one seed; set 'seed' at the top",
                       path, yaml_line(&y, "train.seed"));
    if (rc == OK) rc = options_from_yaml(train_option_rows, &o->train, &y, "train", err);
    if (rc == OK) rc = options_from_yaml(evolve_option_rows, &o->evolve, &y, "evolve", err);
    if (rc == OK) rc = options_from_yaml(fitness_option_rows, &o->fitness, &y, "fitness", err);
    for (int i = 0; rc == OK && i < 3; i++)
        json_object_del(y.root, (const char *[]){"train", "evolve", "fitness"}[i]);
    if (rc == OK) rc = options_from_yaml(run_option_rows, o, &y, NULL, err);
    yaml_release(&y);
    if (rc == OK) rc = file_read(path, 1 << 20, &text, err);
    o->text = text.data;
    return rc == OK ? check_options(o, path, err) : rc;
}

struct measured {
    char name[80];
    uint8_t *right; /* [test items] */
    int64_t prefilled, generated;
};

struct run {
    const struct run_env *env;
    const struct run_options *o;
    const char *id;
    char *dir;
    struct store *store;
    struct model *model;
    struct engine *engine;
    struct speaker speaker;
    struct asker asker;
    struct item *dev, *test;
    int n_dev, n_test, n_founders;
    struct adapter *founders[MAX_FOUNDERS];
    char names[MAX_FOUNDERS][24];
    char *data[MAX_FOUNDERS]; /* conversation files as found */
    struct measured *rows;    /* [max_rows] */
    int n_rows, max_rows;
    json_t *result, *adapters, *generations;
};

static struct item *draw_items(const struct run_options *o, enum split split, int n) {
    struct item *v = xcalloc((size_t)n + 1, sizeof *v);
    for (int i = 0; i < n; i++)
        fry_item(fry_find(o->tasks.v[i % o->tasks.n]), split, (uint64_t)o->seed,
                 (uint32_t)(i / o->tasks.n), false, &v[i]);
    return v;
}

static void free_items(struct item *v, int n) {
    for (int i = 0; v && i < n; i++) item_release(&v[i]);
    free(v);
}

/* The conversations of persona i: one file, or several joined into the run's folder. */
static int find_data(struct run *r, int i, struct error *err) {
    const char *eq = strchr(r->o->personas.v[i], '=');
    char *list = xstrdup(eq + 1), *save = NULL;
    struct buf all = {0};
    int rc = OK, files = 0;
    snprintf(r->names[i], sizeof r->names[i], "%.*s", (int)(eq - r->o->personas.v[i]),
             r->o->personas.v[i]);
    for (char *f = strtok_r(list, "+", &save); f && rc == OK;
         f = strtok_r(NULL, "+", &save), files++) {
        free(r->data[i]);
        r->data[i] = r->env->find(f);
        rc = file_read(r->data[i], (size_t)1 << 30, &all, err);
        buf_puts(&all, "\n");
    }
    if (rc == OK && files > 1) {
        char *name = xasprintf("%s.jsonl", r->names[i]);
        free(r->data[i]);
        r->data[i] = path_join(r->dir, name);
        rc = file_write(r->data[i], all.data, all.len, err);
        free(name);
    }
    buf_release(&all);
    free(list);
    return rc;
}

/* A new run must not touch what an older one of its name left. */
static int check_unused(struct run *r, struct error *err) {
    struct error missing;
    json_t *row = store_run_get(r->store, r->id, &missing);
    json_decref(row);
    return row ? error_set(err, ERR_STATE,
                           "run '%s' is there already; continue it with 'shoal resume %s'", r->id,
                           r->id)
               : OK;
}

static int run_open(struct run *r, bool fresh, struct error *err) {
    char *db = path_join(r->env->root, "shoal.db"), *path = r->env->find(r->o->model);
    struct engine_options eo = {
        .max_rows = 512, .max_seqs = 192, .max_len = 384, .pool = r->env->pool};
    int rc = dir_make(r->dir, err);
    if (rc == OK && !(r->store = store_open(db, err))) rc = err->code;
    if (rc == OK && fresh) rc = check_unused(r, err);
    if (rc == OK && !(r->model = model_open(path, r->env->cls, err))) rc = err->code;
    if (rc == OK && !r->model->tok)
        rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK) eo.max_len = MIN(eo.max_len, r->model->config.max_seq_len);
    if (rc == OK && !(r->engine = engine_new(r->model, &eo, err))) rc = err->code;
    CHECK(r->o->personas.n <= MAX_FOUNDERS);
    r->n_founders = r->o->personas.n;
    for (int i = 0; rc == OK && i < r->n_founders; i++) rc = find_data(r, i, err);
    r->max_rows = r->n_founders + (int)r->o->evolve.generations +
                  5; /* base, debate, vote, samples, generation 0 */
    r->rows = xcalloc((size_t)r->max_rows, sizeof *r->rows);
    r->speaker = (struct speaker){.engine = r->engine,
                                  .model = r->model,
                                  .store = r->store};
    r->asker = speaker_asker(&r->speaker);
    r->n_dev = (int)r->o->fitness.items;
    r->n_test = (int)r->o->test_items;
    r->dev = draw_items(r->o, SPLIT_DEV, r->n_dev);
    r->test = draw_items(r->o, SPLIT_TEST, r->n_test);
    r->adapters = json_object();
    r->generations = json_array();
    free(db);
    free(path);
    return rc;
}

static void run_close(struct run *r) {
    for (int i = 0; i < r->n_founders; i++) adapter_release(r->founders[i]);
    for (int i = 0; i < (int)ARRAY_LEN(r->data); i++) free(r->data[i]);
    for (int i = 0; i < r->n_rows; i++) free(r->rows[i].right);
    free(r->rows);
    free_items(r->dev, r->n_dev);
    free_items(r->test, r->n_test);
    engine_free(r->engine);
    model_close(r->model);
    store_close(r->store);
    json_decref(r->adapters);
    json_decref(r->generations);
    free(r->dir);
}

static char *adapter_dir(const struct run *r, int generation, const char *name) {
    return xasprintf("%s/adapters/gen_%d/%s", r->dir, generation, name);
}

/* Writes an adapter's folder, ledger row and the result's hash. */
static int publish(struct run *r, int generation, const char *name, const struct adapter *a,
                   const json_t *scores, struct error *err) {
    char *dir = adapter_dir(r, generation, name), *key = xasprintf("gen_%d/%s", generation, name);
    int rc = adapter_save(a, dir, r->model->name, err);
    if (rc == OK)
        rc = store_adapter_put(r->store, r->id, generation, name, a->hash, a->lineage, scores, err);
    if (rc == OK) json_object_set_new(r->adapters, key, json_string(a->hash));
    free(dir);
    free(key);
    return rc;
}

/* Founder i as an earlier, killed process left it, or NULL: its folder must hold what the ledger
 * says. */
static struct adapter *recall_founder(struct run *r, const json_t *ledger, int i) {
    size_t at;
    json_t *row;
    struct error ignored;
    json_array_foreach(ledger, at, row) {
        if (json_integer_value(json_object_get(row, "generation")) != 0) continue;
        if (strcmp(json_string_value(json_object_get(row, "name")), r->names[i]) != 0) continue;
        char *dir = adapter_dir(r, 0, r->names[i]);
        struct adapter *a = adapter_load(dir, &r->model->config, &ignored);
        free(dir);
        if (a && strcmp(a->hash, json_string_value(json_object_get(row, "hash"))) == 0) return a;
        adapter_release(a);
    }
    return NULL;
}

static bool recall_founders(struct run *r) {
    struct error err;
    json_t *ledger = store_adapter_list(r->store, r->id, &err);
    int n = 0;
    while (n < r->n_founders && (r->founders[n] = recall_founder(r, ledger, n))) n++;
    json_decref(ledger);
    if (n == r->n_founders) return true;
    while (n > 0) adapter_release(r->founders[--n]), r->founders[n] = NULL;
    return false;
}

/* Founders begin as one adapter: apart from birth, their ΔW would have nothing in common to blend.
 */
static int founders_start(const struct run *r, const struct train_options *o,
                          struct adapter **start, struct error *err) {
    struct adapter_config c;
    int rc = train_adapter_config(o, &r->model->config, &c, err);
    if (rc == OK) *start = adapter_new(&r->model->config, &c, (uint64_t)o->seed);
    free((void *)(uintptr_t)c.modules);
    return rc;
}

static int train_founders(struct run *r, struct error *err) {
    struct adapter *start = NULL;
    struct sft_job jobs[MAX_FOUNDERS] = {{0}};
    char *checkpoint = path_join(r->dir, "checkpoint.bin"),
         *log_path = path_join(r->dir, "train.jsonl");
    struct train_options o = r->o->train;
    o.seed = r->o->seed;
    FILE *log = fopen(log_path, "a");
    int rc = founders_start(r, &o, &start, err);
    for (int i = 0; i < r->n_founders; i++)
        jobs[i] = (struct sft_job){.name = r->names[i], .data = r->data[i], .start = start};
    if (rc == OK && !log) rc = error_errno(err, "cannot write '%s'", log_path);
    if (rc == OK)
        rc = sft_run(r->model, jobs, r->n_founders, &o, r->env->pool, checkpoint, log, err);
    for (int i = 0; rc == OK && i < r->n_founders; i++) {
        r->founders[i] =
            r->o->zero_adapters ? adapter_scale(jobs[i].result, 0) : adapter_retain(jobs[i].result);
        rc = publish(r, 0, r->names[i], r->founders[i], NULL, err);
    }
    for (int i = 0; i < r->n_founders; i++) adapter_release(jobs[i].result);
    adapter_release(start);
    if (log) fclose(log);
    if (rc == OK) unlink(checkpoint);
    free(checkpoint);
    free(log_path);
    return rc;
}

/* All candidates answer all dev questions in one go; worth is leave-one-out of their confidence
 * vote. */
static int evaluate(void *ctx, struct candidate *c, int n, struct error *err) {
    struct run *r = ctx;
    struct agent team[MAX_POPULATION];
    struct interval worth[MAX_POPULATION];
    double novelty[MAX_POPULATION];
    int cells = n * r->n_dev;
    struct answer *answers = xcalloc((size_t)cells + 1, sizeof *answers);
    struct call *calls = xcalloc((size_t)cells + 1, sizeof *calls);
    struct message(*chats)[2] = xcalloc((size_t)r->n_dev + 1, sizeof *chats);
    for (int i = 0; i < n; i++)
        team[i] = (struct agent){.name = c[i].name, .adapter = c[i].adapter};
    for (int i = 0; i < cells; i++) {
        int item = i % r->n_dev; // candidates have no prompts of their own: they share the chats
        calls[i] = call_question(&team[i / r->n_dev], &r->dev[item], -1, chats[item]);
        calls[i].working = r->o->working;
        calls[i].max_tokens = (int32_t)r->o->max_tokens;
    }
    int rc = r->asker.ask(r->asker.ctx, calls, cells, err);
    for (int i = 0; i < cells; i++) answers[i] = calls[i].answer;
    if (rc == OK) credit_vote_loo(vote_find(r->o->vote), answers, n, r->dev, r->n_dev, worth);
    if (rc == OK) credit_novelty(answers, n, r->dev, r->n_dev, novelty);
    for (int i = 0; rc == OK && i < n; i++) {
        int64_t right = 0;
        for (int j = 0; j < r->n_dev; j++)
            right += answers[i * r->n_dev + j].choice == r->dev[j].correct;
        c[i].performance = stats_wilson(right, r->n_dev);
        c[i].cooperation = worth[i];
        c[i].novelty = novelty[i];
    }
    for (int i = 0; i < cells; i++) call_release(&calls[i]);
    free(answers);
    free(chats);
    free(calls);
    return rc;
}

static json_t *interval_json(struct interval v) {
    return json_pack("{s:f,s:f,s:f}", "value", v.value, "lo", v.lo, "hi", v.hi);
}

static json_t *candidate_json(const struct candidate *c) {
    return json_pack("{s:s,s:s,s:s,s:s,s:f,s:b,s:o,s:o,s:f,s:f}", "name", c->name, "hash",
                     c->adapter->hash, "parent_a", c->parents[0], "parent_b", c->parents[1],
                     "blend", c->blend, "elite", (int)c->elite, "performance",
                     interval_json(c->performance), "cooperation", interval_json(c->cooperation),
                     "novelty", c->novelty, "fitness", c->fitness);
}

static int record_generation(struct run *r, const struct population *p, struct error *err) {
    json_t *list = json_array();
    int rc = store_begin(r->store, err);
    for (int i = 0; rc == OK && i < p->n; i++) {
        json_t *v = candidate_json(&p->c[i]);
        rc = publish(r, p->generation, p->c[i].name, p->c[i].adapter, v, err);
        json_array_append_new(list, v);
    }
    if (rc == OK) rc = store_event(r->store, r->id, "generation", list, err);
    if (rc == OK) rc = store_commit(r->store, err);
    if (rc != OK) store_rollback(r->store);
    json_array_append_new(r->generations, list);
    note("generation %d: best %s, fitness %.4f, accuracy %.1f %%", p->generation, p->c[0].name,
         p->c[0].fitness, 100 * p->c[0].performance.value);
    return rc;
}

/* best[t]: the fittest of generation t, retained. */
static int evolve_all(struct run *r, struct candidate *best, struct error *err) {
    struct population p;
    struct landscape l = {r, evaluate};
    const char *names[MAX_FOUNDERS];
    struct progress bar;
    for (int i = 0; i < r->n_founders; i++) names[i] = r->names[i];
    int rc = population_init(&p, &r->o->evolve, &r->o->fitness, (uint64_t)r->o->seed, r->founders,
                             names, r->n_founders, err);
    progress_start(&bar, "generations", r->o->evolve.generations + 1);
    for (int g = 0; rc == OK; g++) {
        rc = population_evaluate(&p, &l, err);
        if (rc == OK) rc = record_generation(r, &p, err);
        if (rc != OK) break;
        best[g] = p.c[0];
        adapter_retain(best[g].adapter);
        progress_update(&bar, g + 1, p.c[0].name);
        if (g == r->o->evolve.generations) break;
        rc = population_breed(&p, err);
    }
    progress_finish(&bar, NULL);
    population_release(&p);
    return rc;
}

static struct measured *add_row(struct run *r, const char *name) {
    CHECK(r->n_rows < r->max_rows);
    struct measured *m = &r->rows[r->n_rows++];
    snprintf(m->name, sizeof m->name, "%s", name);
    m->right = xcalloc((size_t)r->n_test + 1, 1);
    return m;
}

static int measure_solo(struct run *r, const char *name, struct adapter *a, struct progress *bar,
                        struct error *err) {
    struct measured *m = add_row(r, name);
    struct agent agent = {.name = name, .adapter = a};
    struct debate_options o = {
        .rounds = 1, .working = r->o->working, .vote = vote_find(r->o->vote)};
    struct debate d;
    o.max_tokens = (int32_t)r->o->max_tokens;
    int rc = debate_run(&r->asker, &agent, 1, r->test, r->n_test, &o, &d, bar, err);
    if (rc == OK) memcpy(m->right, d.solo, (size_t)r->n_test);
    m->prefilled = d.prefilled;
    m->generated = d.generated;
    debate_release(&d);
    return rc;
}

static json_t *transcripts(const struct run *r, const struct debate *d, const struct agent *team) {
    json_t *list = json_array();
    for (int i = 0; i < r->n_test && i < 5; i++) {
        struct buf b = {0};
        debate_transcript(d, team, &r->test[i], i, vote_find(r->o->vote), &b);
        json_array_append_new(list, json_stringn(b.data, b.len));
        buf_release(&b);
    }
    return list;
}

/* The debate of all founders, its first-round vote, and each founder's worth by debates without it.
 */
static int measure_debate(struct run *r, struct progress *bar, struct error *err) {
    struct agent team[MAX_FOUNDERS];
    struct interval worth[MAX_FOUNDERS];
    struct debate_options o = {.rounds = (int)r->o->rounds,
                               .working = r->o->working,
                               .vote = vote_find(r->o->vote),
                               .max_tokens = (int32_t)r->o->max_tokens,
                               .seed = (uint64_t)r->o->seed};
    struct debate d;
    for (int i = 0; i < r->n_founders; i++)
        team[i] = (struct agent){.name = r->names[i], .adapter = r->founders[i]};
    int rc = debate_run(&r->asker, team, r->n_founders, r->test, r->n_test, &o, &d, bar, err);
    if (rc == OK)
        rc = credit_leave_one_out(&r->asker, team, r->n_founders, r->test, r->n_test, &o, &d, worth,
                                  bar, err);
    if (rc == OK) {
        struct measured *debate = add_row(r, "debate"), *vote = add_row(r, "first-round vote");
        memcpy(debate->right, d.voted + (size_t)(d.rounds - 1) * (size_t)r->n_test,
               (size_t)r->n_test);
        memcpy(vote->right, d.voted, (size_t)r->n_test);
        debate->prefilled = d.prefilled;
        debate->generated = d.generated;
        for (int i = 0; i < r->n_founders; i++) vote->generated += r->rows[1 + i].generated;
        for (int i = 0; i < r->n_founders; i++) vote->prefilled += r->rows[1 + i].prefilled;
        json_t *credit = json_object();
        for (int i = 0; i < r->n_founders; i++)
            json_object_set_new(credit, r->names[i], interval_json(worth[i]));
        json_object_set_new(
            r->result, "debate",
            json_pack("{s:I,s:I,s:I,s:o,s:o}", "became_right", (json_int_t)d.flips_good,
                      "became_wrong", (json_int_t)d.flips_bad, "truncated", (json_int_t)d.truncated,
                      "leave_one_out", credit, "transcripts", transcripts(r, &d, team)));
    }
    debate_release(&d);
    return rc;
}

/* The best founder (by dev fitness) sampled until it has generated at least what the debate did. */
static int measure_self_consistency(struct run *r, const struct candidate *best,
                                    struct progress *bar, struct error *err) {
    const struct measured *debate = NULL, *solo = NULL;
    for (int i = 0; i < r->n_rows; i++) {
        if (strcmp(r->rows[i].name, "debate") == 0) debate = &r->rows[i];
        if (strcmp(r->rows[i].name, best->name) == 0) solo = &r->rows[i];
    }
    double one = (double)MAX(solo->generated, 1);
    int k = MAX(1, MIN(64, (int)ceil((double)debate->generated / one)));
    struct agent agent = {.name = best->name, .adapter = best->adapter};
    struct measured *m = add_row(r, "");
    bar->total += (int64_t)(k - r->n_founders * (int)r->o->rounds) * r->n_test;
    snprintf(m->name, sizeof m->name, "self-consistency %s@%d", best->name, k);
    struct samples drawn;
    int rc = samples_draw(&r->asker, &agent, r->test, r->n_test, k, (float)r->o->temperature,
                          (int32_t)r->o->max_tokens, (uint64_t)r->o->seed, NULL, &drawn, bar, err);
    if (rc == OK) samples_vote(&drawn, r->test, k, m->right);
    for (int i = 0; i < k; i++) {
        m->prefilled += drawn.prefilled[i];
        m->generated += drawn.generated[i];
    }
    samples_release(&drawn);
    return rc;
}

static int measure_all(struct run *r, const struct candidate *best, struct error *err) {
    struct progress bar;
    char name[80];
    int64_t solos = 2 + r->n_founders + r->o->evolve.generations;
    int64_t debates =
        r->n_founders * r->o->rounds + (int64_t)r->n_founders * (r->n_founders - 1) * r->o->rounds;
    progress_start(&bar, "held-out test",
                   (solos + debates + r->n_founders * r->o->rounds) * r->n_test);
    int rc = measure_solo(r, "base", NULL, &bar, err);
    for (int i = 0; rc == OK && i < r->n_founders; i++)
        rc = measure_solo(r, r->names[i], r->founders[i], &bar, err);
    if (rc == OK) rc = measure_debate(r, &bar, err);
    if (rc == OK) rc = measure_self_consistency(r, &best[0], &bar, err);
    for (int g = 0; rc == OK && g <= r->o->evolve.generations; g++) {
        snprintf(name, sizeof name, "generation %d best (%s)", g, best[g].name);
        rc = measure_solo(r, name, best[g].adapter, &bar, err);
    }
    progress_finish(&bar, NULL);
    return rc;
}

static int64_t count_right(const struct measured *m, int n) {
    int64_t right = 0;
    for (int i = 0; i < n; i++) right += m->right[i];
    return right;
}

static json_t *table_json(const struct run *r) {
    json_t *table = json_array();
    for (int i = 0; i < r->n_rows; i++) {
        const struct measured *m = &r->rows[i];
        struct interval ci = stats_wilson(count_right(m, r->n_test), r->n_test);
        json_array_append_new(table, json_pack("{s:s,s:i,s:f,s:f,s:f,s:I,s:I}", "name", m->name,
                                               "n", r->n_test, "acc", ci.value, "lo", ci.lo, "hi",
                                               ci.hi, "prefilled", (json_int_t)m->prefilled,
                                               "generated", (json_int_t)m->generated));
    }
    return table;
}

/* The row of that name, else the last one that begins so. */
static const struct measured *find_row(const struct run *r, const char *prefix) {
    const struct measured *found = NULL;
    for (int i = 0; i < r->n_rows; i++)
        if (strcmp(r->rows[i].name, prefix) == 0) return &r->rows[i];
    for (int i = 0; i < r->n_rows; i++)
        if (strncmp(r->rows[i].name, prefix, strlen(prefix)) == 0) found = &r->rows[i];
    return found;
}

/* The comparisons that the run is about, on the same questions, corrected for their number (Holm).
 */
static json_t *comparisons_json(const struct run *r, const char *best_founder) {
    const char *pairs[][2] = {{best_founder, "base"},         {"debate", best_founder},
                              {"debate", "first-round vote"}, {"debate", "self-consistency"},
                              {"generation", best_founder},   {"generation", "self-consistency"}};
    enum { N = ARRAY_LEN(pairs) };
    struct paired d[N];
    double p[N], adjusted[N];
    json_t *list = json_array();
    for (int i = 0; i < N; i++) {
        d[i] = stats_paired(find_row(r, pairs[i][0])->right, find_row(r, pairs[i][1])->right,
                            r->n_test);
        p[i] = d[i].p;
    }
    stats_holm(p, N, adjusted);
    for (int i = 0; i < N; i++) {
        bool significant = adjusted[i] < 0.05;
        json_array_append_new(
            list, json_pack("{s:s,s:s,s:f,s:f,s:f,s:f,s:f,s:b}", "a",
                            find_row(r, pairs[i][0])->name, "b", find_row(r, pairs[i][1])->name,
                            "diff", d[i].diff.value, "lo", d[i].diff.lo, "hi", d[i].diff.hi, "p",
                            p[i], "p_holm", adjusted[i], "significant", (int)significant));
    }
    return list;
}

static int write_json(const struct run *r, const char *name, const json_t *v, struct error *err) {
    char *path = path_join(r->dir, name),
         *text = json_dumps(v, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    int rc = file_write(path, text, strlen(text), err);
    free(path);
    free(text);
    return rc;
}

/* What the run depends on. Written at the start; a continued run must find the same. */
static int make_manifest(struct run *r, json_t **out, struct error *err) {
    char program[HASH_LEN], recipe[HASH_LEN], data[HASH_LEN];
    const char *base = model_hash(r->model, err);
    if (!base || hash_file("/proc/self/exe", program, err) != OK) return err->code;
    hash_bytes(r->o->text, strlen(r->o->text), recipe);
    json_t *files = json_object();
    for (int i = 0; i < r->n_founders; i++) {
        if (hash_file(r->data[i], data, err) != OK) return json_decref(files), err->code;
        json_object_set_new(files, r->names[i], json_string(data));
    }
    *out = json_pack("{s:s,s:s,s:s,s:s,s:s,s:o,s:I,s:s,s:s,s:i}", "run", r->id, "version",
                     SHOAL_VERSION, "program", program, "base", base, "recipe", recipe, "data",
                     files, "seed", (json_int_t)r->o->seed, "class",
                     r->env->cls == CLASS_EXACT ? "exact" : "fast", "level", kernels_get()->name,
                     "threads", pool_size(r->env->pool));
    return OK;
}

static int check_manifest(struct run *r, const json_t *now, struct error *err) {
    char *path = path_join(r->dir, "manifest.json");
    json_t *then = path_exists(path) ? json_file(path, err) : NULL;
    int rc = OK;
    for (int i = 0; then && rc == OK && i < 3; i++) {
        const char *key = (const char *[]){"base", "recipe", "data"}[i];
        if (!json_equal(json_object_get(then, key), json_object_get(now, key)))
            rc = error_set(err, ERR_MISMATCH,
                           "run '%s' began with another %s; it cannot be continued", r->id, key);
    }
    if (then && rc == OK &&
        !json_equal(json_object_get(then, "program"), json_object_get(now, "program")))
        warn("run '%s' began with another build of shoal; results may differ", r->id);
    json_decref(then);
    free(path);
    return rc;
}

static int finish(struct run *r, json_t *manifest, const char *best_founder, struct error *err) {
    char *page = path_join(r->dir, "report.html");
    json_object_set(r->result, "adapters", r->adapters);
    json_object_set(r->result, "generations", r->generations);
    json_object_set_new(r->result, "table", table_json(r));
    json_object_set_new(r->result, "comparisons", comparisons_json(r, best_founder));
    json_object_set(manifest, "adapters", r->adapters);
    json_object_set(r->result, "manifest", manifest);
    size_t i;
    json_t *row;
    int rc = OK;
    json_array_foreach(json_object_get(r->result, "table"), i, row)
        if (rc == OK)
            rc = store_result_put(r->store, r->id, json_string_value(json_object_get(row, "name")),
                                  row, err);
    if (rc == OK) rc = write_json(r, "manifest.json", manifest, err);
    if (rc == OK) rc = write_json(r, "result.json", r->result, err);
    if (rc == OK) rc = report_write(r->result, page, err);
    if (rc == OK) rc = store_run_status(r->store, r->id, "done", err);
    free(page);
    return rc;
}

static int run_all(struct run *r, struct error *err) {
    struct candidate *best = xcalloc((size_t)r->o->evolve.generations + 1, sizeof *best);
    json_t *manifest = NULL;
    int rc = make_manifest(r, &manifest, err);
    if (rc == OK) rc = check_manifest(r, manifest, err);
    if (rc == OK) rc = write_json(r, "manifest.json", manifest, err);
    bool begun = rc == OK;
    if (rc == OK && recall_founders(r)) {
        for (int i = 0; rc == OK && i < r->n_founders; i++)
            rc = publish(r, 0, r->names[i], r->founders[i], NULL, err);
    } else if (rc == OK) {
        rc = train_founders(r, err);
    }
    if (rc == OK) rc = evolve_all(r, best, err);
    if (rc == OK) rc = measure_all(r, best, err);
    if (rc == OK) rc = finish(r, manifest, best[0].name, err);
    struct error ignored; /* the first error is the one to tell */
    if (rc != OK && begun) store_run_status(r->store, r->id, "failed", &ignored);
    for (int g = 0; g <= r->o->evolve.generations; g++) adapter_release(best[g].adapter);
    free(best);
    json_decref(manifest);
    return rc;
}

static char *make_id(const struct run_env *env, int64_t seed) {
    char day[32];
    time_t now = time(NULL);
    struct tm tm;
    strftime(day, sizeof day, "%Y%m%d-%H%M%S", gmtime_r(&now, &tm));
    for (int i = 0;; i++) {
        char *id =
            i ? xasprintf("%s-s%d-%d", day, (int)seed, i) : xasprintf("%s-s%d", day, (int)seed);
        char *dir = path_join(env->root, id);
        bool taken = path_exists(dir);
        free(dir);
        if (!taken) return id;
        free(id);
    }
}

/* A new run's row, with what a later resume needs beside the recipe, and the recipe's text in its
 * folder. */
static int register_run(struct run *r, struct error *err) {
    char *path = path_join(r->dir, "recipe.yaml");
    json_t *how =
        json_pack("{s:I,s:b,s:s,s:s}", "seed", (json_int_t)r->o->seed, "zero_adapters",
                  (int)r->o->zero_adapters, "class", r->env->cls == CLASS_EXACT ? "exact" : "fast",
                  "level", kernels_get()->name);
    int rc = file_write(path, r->o->text, strlen(r->o->text), err);
    if (rc == OK) rc = store_run_add(r->store, r->id, "evolve", how, err);
    json_decref(how);
    free(path);
    return rc;
}

static json_t *execute(const struct run_env *env, const struct run_options *o, const char *id,
                       bool fresh, struct error *err) {
    struct run r = {.env = env, .o = o, .id = id, .dir = path_join(env->root, id)};
    r.result = json_pack("{s:s}", "run", id);
    int rc = dir_make(env->root, err);
    if (rc == OK) rc = run_open(&r, fresh, err);
    if (rc == OK && fresh) rc = register_run(&r, err);
    if (rc == OK) rc = run_all(&r, err);
    run_close(&r);
    if (rc == OK) return r.result;
    json_decref(r.result);
    return NULL;
}

json_t *run_execute(const struct run_env *env, const struct run_options *o, const char *id,
                    char **id_out, struct error *err) {
    char *own = id ? xstrdup(id) : make_id(env, o->seed);
    note("run %s in %s/%s; if interrupted: shoal resume %s", own, env->root, own, own);
    json_t *result = execute(env, o, own, true, err);
    if (id_out)
        *id_out = own;
    else
        free(own);
    return result;
}

json_t *run_resume(const struct run_env *env, const char *id, struct error *err) {
    char *dir = path_join(env->root, id), *path = path_join(dir, "recipe.yaml"),
         *db = path_join(env->root, "shoal.db");
    struct run_options o = {0};
    struct run_env again = *env;
    struct store *s = path_exists(db) ? store_open(db, err) : NULL;
    json_t *row = NULL, *result = NULL;
    if (!path_exists(db)) error_set(err, ERR_MISSING, "no runs in '%s'", env->root);
    if (s) row = store_run_get(s, id, err);
    store_close(s);
    if (row && run_recipe_load(&o, path, err) == OK) {
        const json_t *how = json_object_get(row, "recipe");
        o.seed = json_integer_value(json_object_get(how, "seed"));
        o.zero_adapters = json_is_true(json_object_get(how, "zero_adapters"));
        const char *cls = json_string_value(json_object_get(how, "class"));
        again.cls = cls && strcmp(cls, "fast") == 0 ? CLASS_FAST : CLASS_EXACT;
        const char *level = json_string_value(json_object_get(how, "level"));
        if (again.cls == CLASS_FAST && (!level || strcmp(level, kernels_get()->name) != 0))
            error_set(err, ERR_MISMATCH,
                      "run '%s' was made in the fast class at level '%s': level '%s' cannot give "
                      "the same bits",
                      id, level ? level : cpu_level_name(CPU_AMX), kernels_get()->name);
        else
            result = execute(&again, &o, id, false, err);
    }
    if (row) run_options_release(&o);
    json_decref(row);
    free(dir);
    free(path);
    free(db);
    return result;
}
