/*
 * run: starts, continues, forks, replays and ends a run, and writes its folder:
 *
 *     recipe.yaml                 options
 *     fork.json, recipe.N.yaml    of a fork: the options of the generations shared with its parent
 *     manifest.json               hashes of the inputs; at the end also of the adapters
 *     NAME.jsonl                  conversations of a persona that has several files
 *     train.jsonl                 log of the founders' training
 *     adapters/gen_T/NAME/        trained founders (gen_0), candidates: PEFT directories
 *     evolution.jsonl             one line per generation
 *     result.json, report.html    at the end
 *
 * The store, shoal.db, has an event for each change of the run's state, the founders and each
 * generation.
 */
#define _GNU_SOURCE
#include "evolve/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const struct evolve_recipe *evolve_run_recipe_at(const struct evolve_run *r, int g) {
    for (int i = 0; i < r->n_forks; i++)
        if (g <= r->forks[i].until) return &r->forks[i].o;
    return r->o;
}

int evolve_run_check_pause(const struct evolve_run *r, struct error *err) {
    if (!r->env->pause || !*r->env->pause) return OK;
    return error_set(err, ERR_STATE, "run '%s' is paused; continue it with 'shoal resume %s'",
                     r->id, r->id);
}

/* Sets the name and the data of persona i. The data is an adapter's directory or a file of
 * conversations. Several files are concatenated into one in the run's folder. */
static int persona_resolve_data(struct evolve_run *r, int i, struct error *err) {
    const char *eq = strchr(r->o->personas.v[i], '=');
    char *list = xstrdup(eq + 1), *save = NULL;
    struct buf joined = {0};
    int rc = OK, files = 0, adapters = 0;
    snprintf(r->names[i], sizeof r->names[i], "%.*s", (int)(eq - r->o->personas.v[i]),
             r->o->personas.v[i]);
    for (char *f = strtok_r(list, "+", &save); f && rc == OK;
         f = strtok_r(NULL, "+", &save), files++) {
        free(r->data[i]);
        r->data[i] = r->env->find(f);
        adapters += r->is_adapter[i] = path_is_dir(r->data[i]);
        if (r->is_adapter[i]) continue;
        rc = file_read(r->data[i], (size_t)1 << 30, &joined, err);
        buf_puts(&joined, "\n");
    }
    if (rc == OK && files > 1 && adapters)
        rc = error_set(err, ERR_USAGE,
                       "persona '%s' must be either one adapter or files of conversations",
                       r->names[i]);
    if (rc == OK && files > 1) {
        char *name = xasprintf("%s.jsonl", r->names[i]);
        free(r->data[i]);
        r->data[i] = path_join(r->dir, name);
        rc = file_write(r->data[i], joined.data, joined.len, err);
        free(name);
    }
    buf_release(&joined);
    free(list);
    return rc;
}

/* ERR_STATE if the store has a run with this id, which a new run must not overwrite. */
static int check_id_unused(struct evolve_run *r, struct error *err) {
    struct error missing;
    json_t *row = store_run_get(r->store, r->id, &missing);
    json_decref(row);
    return row ? error_set(err, ERR_STATE,
                           "run '%s' already exists; continue it with 'shoal resume %s'", r->id,
                           r->id)
               : OK;
}

int evolve_run_open_model(struct evolve_run *r, struct error *err) {
    char *path = r->env->find(r->o->model);
    struct engine_options eo;
    int rc = OK;
    if (!(r->model = model_open(path, r->env->cls, err))) rc = err->code;
    if (rc == OK && !r->model->tok)
        rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK) rc = evolve_run_fit_memory(r, &eo, err);
    if (rc == OK && !(r->engine = engine_new(r->model, &eo, err))) rc = err->code;
    if (rc == OK && r->env->engine_opened)
        rc = r->env->engine_opened(r->env->engine_ctx, r->engine, r->model, err);
    CHECK(r->o->personas.n <= MAX_FOUNDERS);
    r->n_founders = r->o->personas.n;
    for (int i = 0; rc == OK && i < r->n_founders; i++) rc = persona_resolve_data(r, i, err);
    if (rc == OK) rc = evolve_run_open_tasks(r, &r->o->tasks, err);
    if (rc == OK) rc = evolve_run_open_tasks(r, &r->o->retain, err);
    for (int i = 0; rc == OK && i < r->n_forks; i++)
        rc = evolve_run_open_tasks(r, &r->forks[i].o.tasks, err);
    r->engine_client = (struct engine_client){.engine = r->engine,
                                              .model = r->model,
                                              .store = r->store,
                                              .run = evolve_run_requests,
                                              .run_ctx = r};
    r->llm_client = engine_client_as_llm(&r->engine_client);
    r->adapters = json_object();
    r->generations = json_array();
    free(path);
    return rc;
}

static int run_open(struct evolve_run *r, bool is_new, struct error *err) {
    char *db = path_join(r->env->root, "shoal.db");
    int rc = evolve_run_check_memory(r->env, r->o, err);
    if (rc == OK) rc = dir_make_private(r->dir, err);
    if (rc == OK && !(r->store = store_open(db, err))) rc = err->code;
    if (rc == OK && is_new) rc = check_id_unused(r, err);
    if (rc == OK) rc = evolve_run_open_model(r, err);
    free(db);
    return rc;
}

void evolve_run_close(struct evolve_run *r) {
    for (int i = 0; i < r->n_founders; i++) adapter_release(r->founders[i]);
    for (int i = 0; i < (int)ARRAY_LEN(r->data); i++) free(r->data[i]);
    for (int i = 0; i < r->n_rows; i++) free(r->rows[i].right);
    free(r->rows);
    for (int g = 0; g < r->n_best; g++) adapter_release(r->best[g].adapter);
    free(r->best);
    for (int i = 0; i < r->n_forks; i++) evolve_recipe_release(&r->forks[i].o);
    free(r->forks);
    task_items_release(r->test, r->n_test);
    evolve_run_close_tasks(r);
    if (r->log) fclose(r->log);
    engine_free(r->engine);
    model_close(r->model);
    store_close(r->store);
    json_decref(r->adapters);
    json_decref(r->generations);
    free(r->parent_id);
    free(r->dir);
}

static char *adapter_dir(const struct evolve_run *r, const char *id, int generation,
                         const char *name) {
    return xasprintf("%s/%s/adapters/gen_%d/%s", r->env->root, id, generation, name);
}

void evolve_lineage_set_genes(json_t *lineage, const json_t *genes) {
    char *text = genes_text(genes);
    if (text)
        json_object_set_new(lineage, LINEAGE_GENES, json_string(text));
    else
        json_object_del(lineage, LINEAGE_GENES);
    free(text);
}

/* The adapter with the lineage that its files get. An adapter without a base gets the run's model
 * as its base; "fitness" is the value in the generation's scores. */
static struct adapter *adapter_with_fitness(const struct evolve_run *r, const struct adapter *a,
                                            const json_t *scores) {
    json_t *lineage = a->lineage ? json_copy(a->lineage) : json_object();
    double fitness = json_interval(scores, "fitness").value;
    if (!json_object_get(lineage, ADAPTER_BASE_HASH)) adapter_lineage_set_model(lineage, r->model);
    if (isfinite(fitness)) json_object_set_new(lineage, "fitness", json_sprintf("%.9g", fitness));
    if (scores) evolve_lineage_set_genes(lineage, json_object_get(scores, "genes"));
    struct adapter *out = adapter_from_data(&a->shape, &a->config, a->data, lineage);
    adapter_add_training_data(out, a->training_data);
    json_decref(lineage);
    return out;
}

int evolve_run_save_adapter(struct evolve_run *r, int generation, const char *name,
                            const struct adapter *candidate, const json_t *scores,
                            struct error *err) {
    if (r->replay_generation >= 0) return OK;
    struct adapter *a = adapter_with_fitness(r, candidate, scores);
    char *dir = adapter_dir(r, r->id, generation, name),
         *key = xasprintf("gen_%d/%s", generation, name);
    int rc = adapter_save(a, dir, r->model->name, err);
    if (rc == OK && scores)
        rc = model_card_write(dir, r->model->name, r->id, generation, scores, err);
    if (rc == OK)
        rc = store_adapter_put(r->store, r->id, generation, name, a->hash, a->lineage, scores, err);
    if (rc == OK) json_object_set_new(r->adapters, key, json_string(a->hash));
    adapter_release(a);
    adapter_free_pages(candidate);
    free(dir);
    free(key);
    return rc;
}

static struct adapter *load_adapter_of_run(struct evolve_run *r, const char *id, int generation,
                                           const char *name, const char *key, const char *value) {
    size_t i;
    json_t *row, *ledger;
    struct error ignored;
    struct adapter *a = NULL;
    ledger = store_adapter_list(r->store, id, &ignored);
    json_array_foreach (ledger, i, row) {
        if (json_integer_value(json_object_get(row, "generation")) != generation) continue;
        if (strcmp(json_get_string(row, "name"), name) != 0) continue;
        if (key && strcmp(json_get_string(json_object_get(row, "lineage"), key), value) != 0)
            continue;
        char *dir = adapter_dir(r, id, generation, name);
        a = adapter_load(dir, &r->model->config, &ignored);
        free(dir);
        if (a && strcmp(a->hash, json_get_string(row, "hash")) == 0) {
            /* The files may lack the lineage, which the ledger has. The fitness is that of one
             * generation: it is not passed on. */
            json_object_del(json_object_get(row, "lineage"), "fitness");
            a = operator_set_lineage(a, json_object_get(row, "lineage"));
            break;
        }
        adapter_release(a);
        a = NULL;
    }
    json_decref(ledger);
    return a;
}

struct adapter *evolve_run_load_adapter(struct evolve_run *r, int generation, const char *name,
                                        const char *key, const char *value) {
    if (r->replay_generation == generation && generation > 0) return NULL;
    struct adapter *a = load_adapter_of_run(r, r->id, generation, name, key, value);
    bool is_shared = r->n_forks > 0 && generation <= r->forks[r->n_forks - 1].until;
    if (!a && is_shared) a = load_adapter_of_run(r, r->parent_id, generation, name, key, value);
    if (a) adapter_offload(a, r->dir);
    return a;
}

/* generations */

static void log_generation(struct evolve_run *r, const json_t *v) {
    if (!r->log) return;
    json_dumpf(v, r->log, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    fputc('\n', r->log);
    fflush(r->log);
}

static int save_generation(struct evolve_run *r, int g, const json_t *v, const struct candidate *c,
                           int n, struct error *err) {
    bool best_only = strcmp(evolve_run_recipe_at(r, g)->save, "best") == 0;
    const json_t *list = json_object_get(v, "candidates");
    int rc = store_begin(r->store, err);
    for (int i = 0; rc == OK && i < n; i++)
        if (c[i].adapter && (i == 0 || !best_only))
            rc = evolve_run_save_adapter(r, g, c[i].name, c[i].adapter,
                                         json_array_get(list, (size_t)i), err);
    if (rc == OK) rc = store_event_add(r->store, r->id, "generation", v, err);
    if (rc == OK) rc = store_commit(r->store, err);
    if (rc != OK) store_rollback(r->store);
    return rc;
}

/* The diversity is NaN if there is only one candidate. */
static void report_generation_metrics(int g, const json_t *v, const struct candidate *c, int n) {
    const json_t *diversity = json_object_get(json_object_get(v, "diversity"), "weights_mean");
    double sum = 0;
    for (int i = 0; i < n; i++) sum += c[i].fitness.value;
    process_metrics_report(
        (const struct process_metric[]){
            {"evolve_generation", g},
            {"evolve_fitness_best", c[0].fitness.value},
            {"evolve_fitness_mean", sum / n},
            {"evolve_diversity", json_is_number(diversity) ? json_number_value(diversity) : NAN}},
        4);
}

int evolve_run_record_generation(struct evolve_run *r, json_t *v, const struct candidate *c, int n,
                                 struct error *err) {
    int g = r->n_best;
    json_object_set_new(v, "spent", evolve_cost_json(&r->spent));
    json_array_append_new(r->generations, v);
    r->best = xrealloc(r->best, (size_t)(g + 1) * sizeof *r->best);
    r->best[g] = c[0];
    adapter_retain(c[0].adapter);
    r->n_best++;
    if (r->rehearsal) evolve_rehearsal_record(r, n);
    if (r->replay_generation >= 0) // the error ends the search
        return g == r->replay_generation ? error_set(err, ERR_STATE, "generation %d is computed", g)
                                         : OK;
    log_info("generation %d: best %s, fitness %.4f (%.4f – %.4f), accuracy %.1f %%", g, c[0].name,
             c[0].fitness.value, c[0].fitness.lo, c[0].fitness.hi, 100 * c[0].performance.value);
    log_generation(r, v);
    report_generation_metrics(g, v, c, n);
    return save_generation(r, g, v, c, n, err);
}

/* founders */

/* Makes the adapter that all trained founders start from. With different initialisations their ΔW
 * would have nothing in common that a blend could preserve. */
static int make_start_adapter(const struct evolve_run *r, const struct train_options *o,
                              struct adapter **start, struct error *err) {
    struct adapter_config c;
    int rc = train_adapter_config(o, &r->model->config, &c, err);
    if (rc == OK) *start = adapter_new(&r->model->config, &c, (uint64_t)o->seed);
    if (rc == OK) adapter_offload(*start, r->dir);
    adapter_config_release(&c);
    return rc;
}

/* Loads all trained founders that an earlier process saved. If one is missing, loads none and
 * returns false. */
static bool load_trained_founders(struct evolve_run *r) {
    int n = 0;
    for (; n < r->n_founders; n++)
        if (!r->is_adapter[n] &&
            !(r->founders[n] = evolve_run_load_adapter(r, 0, r->names[n], NULL, NULL)))
            break;
    if (n == r->n_founders) return true;
    while (n-- > 0) {
        if (r->is_adapter[n]) continue;
        adapter_release(r->founders[n]);
        r->founders[n] = NULL;
    }
    return false;
}

static int open_adapter_founders(struct evolve_run *r, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_founders; i++) {
        if (!r->is_adapter[i]) continue;
        if (!(r->founders[i] = adapter_open(r->data[i], r->model, err)))
            rc = err->code;
        else
            adapter_offload(r->founders[i], r->dir);
    }
    return rc;
}

static int train_founders(struct evolve_run *r, struct error *err) {
    struct adapter *start = NULL;
    struct train_job jobs[MAX_FOUNDERS] = {{0}};
    int index[MAX_FOUNDERS], n = 0;
    char *checkpoint = path_join(r->dir, "checkpoint.bin"),
         *log_path = path_join(r->dir, "train.jsonl");
    const struct evolve_recipe *first = evolve_run_recipe_at(r, 0);
    struct train_options o = first->train;
    o.seed = first->seed;
    FILE *log = fopen(log_path, "a");
    int rc = make_start_adapter(r, &o, &start, err);
    for (int i = 0; i < r->n_founders; i++)
        if (!r->is_adapter[i]) index[n++] = i;
    for (int k = 0; k < n; k++)
        jobs[k] = (struct train_job){.name = r->names[index[k]],
                                     .data = r->data[index[k]],
                                     .start = start,
                                     .unmeasured = true};
    if (rc == OK && !log) rc = error_errno(err, "cannot write '%s'", log_path);
    if (rc == OK && n > 0) rc = sft_run(r->model, jobs, n, &o, r->env->pool, checkpoint, log, err);
    for (int k = 0; rc == OK && k < n; k++) {
        r->founders[index[k]] = adapter_retain(jobs[k].result);
        adapter_offload(jobs[k].result, r->dir);
        rc = evolve_run_save_adapter(r, 0, r->names[index[k]], jobs[k].result, NULL, err);
    }
    for (int k = 0; k < n; k++) adapter_release(jobs[k].result);
    adapter_release(start);
    if (log) fclose(log);
    if (rc == OK) unlink(checkpoint);
    free(checkpoint);
    free(log_path);
    return rc;
}

/* Records the founders' diversity as an event and checks that no founder is a copy of another one.
 * With zero_adapters (a control experiment), replaces the founders by zero adapters instead of the
 * check. */
static int founders_zero_or_check(struct evolve_run *r, struct error *err) {
    const char *names[MAX_FOUNDERS];
    int rc = OK;
    for (int i = 0; i < r->n_founders; i++) {
        names[i] = r->names[i];
        if (!r->o->zero_adapters) continue;
        struct adapter *zero = adapter_scale(r->founders[i], 0);
        adapter_release(r->founders[i]);
        r->founders[i] = zero;
        adapter_offload(zero, r->dir);
    }
    struct diversity d = diversity_compute(r->founders, r->n_founders, NULL);
    if (r->replay_generation < 0) {
        json_t *v = diversity_json(&d);
        rc = store_event_add(r->store, r->id, "founders", v, err);
        json_decref(v);
    }
    if (rc != OK || r->o->zero_adapters) return rc;
    return diversity_check(&d, names, err);
}

/* Loads trained founders, or trains them. */
static int load_or_train_founders(struct evolve_run *r, struct error *err) {
    int rc = load_trained_founders(r) ? OK : train_founders(r, err);
    return rc == OK ? founders_zero_or_check(r, err) : rc;
}

/* contamination */

/* Refuses training data that contain questions of a final test, in the same words or, for more than
 * a tenth of the questions, in similar ones: the table would not measure what the run learned.
 * `what` names the data in messages. */
static int check_task_contamination(struct evolve_run *r, const struct training_data *t,
                                    const char *what, const char *task, int64_t max_items,
                                    struct error *err) {
    struct strings tasks = {(char *[]){(char *)(uintptr_t)task}, 1};
    struct contamination c = {0};
    int n = evolve_run_count_items(r, &tasks, SPLIT_TEST, max_items), rc = OK;
    struct task_item *items =
        evolve_run_task_items(r, &tasks, SPLIT_TEST, (uint64_t)r->o->seed, 0, n);
    bool near = family_find(task) < 0;
    for (int i = 0; i < n; i++) contamination_add(&c, t, items[i].question, items[i].chat, near);
    task_items_release(items, n);
    if (c.questions > c.near || c.near > c.of / 10)
        rc = error_set(
            err, ERR_STATE,
            "%lld of %lld test questions of '%s' are in the training data of %s (such as "
            "'%s'), %lld of them with other words: the final test would not be held out; "
            "take them out of the data, or test on other questions",
            (long long)c.questions, (long long)c.of, task, what, c.example, (long long)c.near);
    else if (c.near)
        log_warn("%lld of %lld test questions of '%s' resemble training data of %s (such as '%s')",
                 (long long)c.near, (long long)c.of, task, what, c.example);
    contamination_release(&c);
    return rc;
}

static int check_data_contamination(struct evolve_run *r, const struct training_data *t,
                                    const char *what, struct error *err) {
    const struct strings *tasks = &r->o->tasks, *retain = &r->o->retain;
    int64_t per_task = (r->o->test_items + tasks->n - 1) / tasks->n;
    int rc = OK;
    for (int i = 0; rc == OK && i < tasks->n; i++)
        rc = check_task_contamination(r, t, what, tasks->v[i], per_task, err);
    for (int i = 0; rc == OK && i < retain->n; i++)
        rc = check_task_contamination(r, t, what, retain->v[i], r->o->retain_items, err);
    return rc;
}

static int check_file_contamination(struct evolve_run *r, const char *path, const char *what,
                                    struct error *err) {
    struct training_data *t = training_data_of_file(path, NULL, err);
    int rc = t ? check_data_contamination(r, t, what, err) : err->code;
    training_data_release(t);
    return rc;
}

/* Checks the data of the founders and of fine-tuning, which all candidates descend from, before any
 * training. */
static int check_contamination(struct evolve_run *r, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_founders; i++) {
        char what[48];
        snprintf(what, sizeof what, "founder '%s'", r->names[i]);
        if (!r->is_adapter[i])
            rc = check_file_contamination(r, r->data[i], what, err);
        else if (r->founders[i]->training_data)
            rc = check_data_contamination(r, r->founders[i]->training_data, what, err);
    }
    char *finetune_data =
        r->o->evolve.finetune_data ? r->env->find(r->o->evolve.finetune_data) : NULL;
    if (rc == OK && finetune_data)
        rc = check_file_contamination(r, finetune_data, "'evolve.finetune_data'", err);
    free(finetune_data);
    return rc;
}

/* manifest and result */

static int write_json(const struct evolve_run *r, const char *name, const json_t *v,
                      struct error *err) {
    char *path = path_join(r->dir, name),
         *text = json_dumps(v, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    int rc = file_write(path, text, strlen(text), err);
    free(path);
    free(text);
    return rc;
}

static int add_file_hash(json_t *files, const char *name, const char *path, struct error *err) {
    char hash[HASH_LEN];
    if (sha256_file(path, hash, err) != OK) return err->code;
    json_object_set_new(files, name, json_string(hash));
    return OK;
}

static int hash_tasks(const struct evolve_run *r, const struct strings *tasks, json_t *files,
                      struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < tasks->n; i++) {
        char *path = r->env->find(tasks->v[i]);
        if (family_find(tasks->v[i]) < 0) rc = add_file_hash(files, tasks->v[i], path, err);
        free(path);
    }
    return rc;
}

/* Adds the hashes of the founders, of the files of `tasks` and `retain` and of the fine-tuning
 * data. */
static int hash_data(struct evolve_run *r, json_t *files, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_founders; i++) {
        if (r->is_adapter[i])
            json_object_set_new(files, r->names[i], json_string(r->founders[i]->hash));
        else
            rc = add_file_hash(files, r->names[i], r->data[i], err);
    }
    for (int g = 0; rc == OK && g <= r->n_forks; g++) {
        const struct evolve_recipe *o = g < r->n_forks ? &r->forks[g].o : r->o;
        rc = hash_tasks(r, &o->tasks, files, err);
        if (rc == OK) rc = hash_tasks(r, &o->retain, files, err);
        char *finetune_data =
            o->evolve.finetune_data ? r->env->find(o->evolve.finetune_data) : NULL;
        if (rc == OK && finetune_data)
            rc = add_file_hash(files, o->evolve.finetune_data, finetune_data, err);
        free(finetune_data);
    }
    return rc;
}

/* Makes the manifest: the inputs of the run, by hash, and its settings. A resumed run must have the
 * same base, recipe and data as the manifest that was written at its start. */
static int make_manifest(struct evolve_run *r, json_t **out, struct error *err) {
    char program[HASH_LEN], recipe[HASH_LEN];
    const char *base = model_hash(r->model, err);
    if (!base || sha256_file("/proc/self/exe", program, err) != OK) return err->code;
    sha256_bytes(r->o->text, strlen(r->o->text), recipe);
    json_t *files = json_object();
    if (hash_data(r, files, err) != OK) return json_decref(files), err->code;
    *out =
        json_pack("{s:s,s:s,s:s,s:s,s:s,s:o,s:I,s:s,s:s,s:s,s:i}", "run", r->id, "version",
                  SHOAL_VERSION, "program", program, "base", base, "recipe", recipe, "data", files,
                  "seed", (json_int_t)r->o->seed, "class", numeric_class_name(r->env->cls),
                  "kv_cache_dtype", dtype_name(evolve_run_kv_dtype(r->env, r->o)), "level",
                  kernels_get()->name, "threads", pool_size(r->env->pool));
    return OK;
}

/* Whether the values are equal; of objects, those that the stored one has: manifests of 0.1 lack
 * the files of `retain`. */
static bool stored_values_equal(json_t *stored, json_t *current) {
    const char *key;
    json_t *value;
    if (!json_is_object(stored)) return json_equal(stored, current);
    json_object_foreach (stored, key, value)
        if (!json_equal(value, json_object_get(current, key))) return false;
    return true;
}

static int check_manifest(struct evolve_run *r, const json_t *current, struct error *err) {
    char *path = path_join(r->dir, "manifest.json");
    bool exists = path_exists(path);
    json_t *stored = exists ? json_parse_file(path, err) : NULL;
    int rc = exists && !stored ? error_wrap(err, "run '%s'", r->id) : OK;
    for (int i = 0; stored && rc == OK && i < 3; i++) {
        const char *key = (const char *[]){"base", "recipe", "data"}[i];
        if (!stored_values_equal(json_object_get(stored, key), json_object_get(current, key)))
            rc = error_set(err, ERR_MISMATCH,
                           "run '%s' began with another %s; it cannot be continued", r->id, key);
    }
    if (stored && rc == OK &&
        !json_equal(json_object_get(stored, "program"), json_object_get(current, "program")))
        log_warn("run '%s' began with another build of shoal; results may differ", r->id);
    json_decref(stored);
    free(path);
    return rc;
}

struct training_tokens {
    json_int_t last_step;
    double tokens;
};

static int training_step_count(void *ctx, const json_t *line, int number, struct error *err) {
    struct training_tokens *t = ctx;
    json_int_t step = json_integer_value(json_object_get(line, "step"));
    (void)number, (void)err;
    if (step > t->last_step) t->tokens += json_get_number(line, "tokens");
    t->last_step = MAX(t->last_step, step);
    return OK;
}

/* The cost of training the founders, from its log, which an earlier process may have begun: a step
 * that occurs twice counts once. A run without training has no log. */
static struct evolve_cost training_cost(const struct evolve_run *r) {
    char *path = path_join(r->dir, "train.jsonl");
    struct training_tokens t = {0};
    struct error ignored;
    json_file_each(path, training_step_count, &t, &ignored);
    free(path);
    return (struct evolve_cost){.trained_tokens = (int64_t)t.tokens,
                                .flops = 2 * t.tokens * evolve_run_token_flops(r, r->founders[0])};
}

/* The fittest candidate of the last generation, if it has genes that its user needs to know. */
static void add_best_genes(struct evolve_run *r) {
    const struct candidate *best = &r->best[r->n_best - 1];
    json_t *genes = genome_json(&best->genome);
    if (genes)
        json_object_set_new(r->result, "best",
                            json_pack("{s:s,s:o}", "name", best->name, "genes", genes));
}

static int write_results(struct evolve_run *r, json_t *manifest, struct error *err) {
    char *page = path_join(r->dir, "report.html");
    json_object_set(r->result, "adapters", r->adapters);
    json_object_set(r->result, "generations", r->generations);
    add_best_genes(r);
    const struct evolve_cost training = training_cost(r);
    json_object_set_new(r->result, "spent", evolve_cost_json(&r->spent));
    json_object_set_new(r->result, "spent_on_founders", evolve_cost_json(&training));
    json_object_set_new(r->result, "spent_on_tests", evolve_cost_json(&r->tests));
    json_object_set(manifest, "adapters", r->adapters);
    json_object_set(r->result, "manifest", manifest);
    size_t i;
    json_t *row;
    int rc = OK;
    json_array_foreach (json_object_get(r->result, "table"), i, row)
        if (rc == OK)
            rc = store_result_put(r->store, r->id, json_get_string(row, "name"), row, err);
    if (rc == OK) rc = write_json(r, "manifest.json", manifest, err);
    if (rc == OK) rc = write_json(r, "result.json", r->result, err);
    if (rc == OK) rc = evolve_report_write(r->result, page, err);
    free(page);
    return rc;
}

static int run_search(struct evolve_run *r, struct error *err) {
    const struct search_method *s = search_methods;
    while (strcmp(s->name, r->o->evolve.search) != 0) s++;
    char *path = path_join(r->dir, "evolution.jsonl");
    if (r->replay_generation < 0 && !(r->log = fopen(path, "w")))
        error_errno(err, "cannot write '%s'", path);
    free(path);
    return r->replay_generation >= 0 || r->log ? s->run(r, err) : err->code;
}

/* Closes the log; an error of an earlier write is reported too. */
static int log_close(struct evolve_run *r, struct error *err) {
    bool failed = ferror(r->log);
    failed |= fclose(r->log) != 0;
    r->log = NULL;
    return failed ? error_errno(err, "cannot write '%s/evolution.jsonl'", r->dir) : OK;
}

/* Sets the run's state and records the change as an event. */
static int state_set(struct evolve_run *r, const char *state, struct error *err) {
    json_t *detail =
        json_pack("{s:s,s:i}", "from", r->parent_id ? r->parent_id : "", "generations", r->n_best);
    int rc = store_run_status(r->store, r->id, state, err);
    if (rc == OK) rc = store_event_add(r->store, r->id, state, detail, err);
    json_decref(detail);
    return rc;
}

static int run_all(struct evolve_run *r, struct error *err) {
    json_t *manifest = NULL;
    int rc = open_adapter_founders(r, err);
    if (rc == OK && !r->o->zero_adapters) rc = check_contamination(r, err);
    if (rc == OK) rc = make_manifest(r, &manifest, err);
    if (rc == OK) rc = check_manifest(r, manifest, err);
    if (rc == OK) rc = write_json(r, "manifest.json", manifest, err);
    bool is_running = rc == OK;
    if (rc == OK) rc = state_set(r, "running", err);
    if (rc == OK) rc = load_or_train_founders(r, err);
    if (rc == OK) rc = run_search(r, err);
    if (rc == OK) rc = log_close(r, err);
    if (rc == OK) rc = evolve_run_evaluate_heldout(r, err);
    if (rc == OK) rc = write_results(r, manifest, err);
    if (rc == OK) rc = state_set(r, "done", err);
    struct error ignored; /* the first error is reported */
    bool paused = r->env->pause && *r->env->pause;
    if (rc != OK && is_running) state_set(r, paused ? "paused" : "failed", &ignored);
    json_decref(manifest);
    return rc;
}

static bool id_is_valid(const char *id) {
    for (const char *p = id; *p; p++)
        if (!((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') ||
              *p == '-' || *p == '_'))
            return false;
    return *id != 0;
}

int evolve_id_check(const char *id, struct error *err) {
    if (!id || id_is_valid(id)) return OK;
    return error_set(err, ERR_USAGE, "'%s' is not a valid run name; use letters, digits, - and _",
                     id);
}

static char *make_id(const struct evolve_env *env, int64_t seed) {
    char time_text[32];
    time_t now = time(NULL);
    struct tm tm;
    strftime(time_text, sizeof time_text, "%Y%m%d-%H%M%S", gmtime_r(&now, &tm));
    for (int i = 0;; i++) {
        char *id = i ? xasprintf("%s-s%d-%d", time_text, (int)seed, i)
                     : xasprintf("%s-s%d", time_text, (int)seed);
        char *dir = path_join(env->root, id);
        bool taken = path_exists(dir);
        free(dir);
        if (!taken) return id;
        free(id);
    }
}

/* Writes the recipe to the folder of a new run, and adds the run's row to the store, with the
 * settings that a resume needs in addition to the recipe. */
static int register_run(struct evolve_run *r, struct error *err) {
    char *path = path_join(r->dir, "recipe.yaml");
    json_t *settings = json_pack("{s:I,s:b,s:s,s:s,s:s}", "seed", (json_int_t)r->o->seed,
                                 "zero_adapters", (int)r->o->zero_adapters, "class",
                                 numeric_class_name(r->env->cls), "level", kernels_get()->name,
                                 "kv_cache_dtype", dtype_name(evolve_run_kv_dtype(r->env, r->o)));
    int rc = file_write(path, r->o->text, strlen(r->o->text), err);
    if (rc == OK) rc = store_run_add(r->store, r->id, "evolve", settings, err);
    json_decref(settings);
    free(path);
    return rc;
}

/* forks */

static json_t *segment_json(int until, const char *recipe, int64_t seed) {
    return json_pack("{s:i,s:s,s:I}", "until", until, "recipe", recipe, "seed", (json_int_t)seed);
}

/* Reads the segments of a fork from fork.json, if it exists. */
static int read_forks(struct evolve_run *r, struct error *err) {
    char *path = path_join(r->dir, "fork.json");
    json_t *v = path_exists(path) ? json_parse_file(path, err) : NULL, *s;
    const json_t *list = json_object_get(v, "segments");
    size_t n = json_array_size(list), i;
    int rc = !v && path_exists(path) ? err->code : OK;
    if (v && (n < 1 || n > MAX_SEGMENTS || !*json_get_string(v, "from")))
        rc = error_set(err, ERR_FORMAT, "'%s' has no 'from' or no 'segments'", path);
    if (rc == OK && v) r->parent_id = xstrdup(json_get_string(v, "from"));
    if (rc == OK && v) r->forks = xcalloc(n, sizeof *r->forks);
    json_array_foreach (list, i, s) {
        if (rc != OK) break;
        char *recipe = path_join(r->dir, json_get_string(s, "recipe"));
        struct evolve_segment *f = &r->forks[r->n_forks++];
        rc = evolve_recipe_load(&f->o, recipe, err);
        if (rc == OK) evolve_recipe_set_kv(&f->o, r->o->kv_cache_dtype);
        f->until = (int)json_integer_value(json_object_get(s, "until"));
        f->o.seed = json_integer_value(json_object_get(s, "seed"));
        free(recipe);
    }
    json_decref(v);
    free(path);
    return rc;
}

static json_t *execute(const struct evolve_env *env, const struct evolve_recipe *o, const char *id,
                       bool is_new, struct error *err) {
    struct evolve_run r = {
        .env = env, .o = o, .id = id, .dir = path_join(env->root, id), .replay_generation = -1};
    r.result = json_pack("{s:s}", "run", id);
    int rc = evolve_run_check_memory(env, o, err), lock = -1;
    if (rc == OK) rc = dir_make(env->root, err);
    if (rc == OK) rc = dir_make_private(r.dir, err);
    if (rc == OK && (lock = dir_lock(r.dir, "run", err)) < 0) rc = lock;
    if (rc == OK) rc = read_forks(&r, err);
    if (rc == OK) rc = run_open(&r, is_new, err);
    if (rc == OK && is_new) rc = register_run(&r, err);
    if (rc == OK) rc = run_all(&r, err);
    dir_unlock(lock, r.dir);
    evolve_run_close(&r);
    if (rc == OK) return r.result;
    json_decref(r.result);
    return NULL;
}

json_t *evolve_run_execute(const struct evolve_env *env, const struct evolve_recipe *o,
                           const char *id, struct error *err) {
    if (evolve_id_check(id, err) != OK || population_check_unused(&o->evolve, err) != OK)
        return NULL;
    char *run_id = id ? xstrdup(id) : make_id(env, o->seed);
    log_info("run %s in %s/%s; if interrupted: shoal resume %s", run_id, env->root, run_id, run_id);
    json_t *result = execute(env, o, run_id, true, err);
    free(run_id);
    return result;
}

/* A list of the recipe's personas, NAME=DATA. Sets err->code to ERR_MISSING if one of their files
 * does not exist, else to OK. */
static json_t *founders_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                             struct error *err) {
    json_t *all = json_array();
    *err = (struct error){0};
    for (int i = 0; err->code == OK && i < o->personas.n; i++) {
        char *list = xstrdup(strchr(o->personas.v[i], '=') + 1), *save = NULL;
        for (char *f = strtok_r(list, "+", &save); f; f = strtok_r(NULL, "+", &save)) {
            char *found = env->find(f);
            if (!path_exists(found))
                error_set(err, ERR_MISSING, "persona '%s': there is no '%s'", o->personas.v[i], f);
            free(found);
        }
        json_array_append_new(all, json_from_path(o->personas.v[i]));
        free(list);
    }
    return all;
}

/* The plan without an estimate, which needs the model. */
static json_t *checked_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                            struct error *err) {
    struct evolve_run r = {.env = env, .o = o};
    struct model_size size;
    struct evolve_memory memory;
    char *path = env->find(o->model);
    json_t *founders = founders_plan(env, o, err), *v = NULL;
    int rc = err->code;
    if (rc == OK) rc = population_check_unused(&o->evolve, err);
    if (rc == OK) rc = model_measure(path, env->cls, &size, err);
    if (rc == OK) rc = evolve_run_check_memory(env, o, err);
    if (rc == OK) rc = evolve_run_plan_memory(env, o, &memory, err);
    if (rc == OK) rc = evolve_run_open_tasks(&r, &o->tasks, err);
    if (rc == OK) rc = evolve_run_open_tasks(&r, &o->retain, err);
    if (rc == OK)
        v = json_pack("{s:o,s:I,s:O,s:s,s:I,s:I,s:i,s:i,s:I,s:s}", "model", json_from_path(path),
                      "model bytes", (json_int_t)size.weights, "founders", founders, "search",
                      o->evolve.search, "generations", (json_int_t)o->evolve.generations,
                      "population", (json_int_t)o->evolve.population, "items a generation",
                      evolve_run_count_items(&r, &o->tasks, SPLIT_DEV, o->fitness.items),
                      "test items",
                      evolve_run_count_items(&r, &o->tasks, SPLIT_TEST, o->test_items),
                      "rounds of debate", (json_int_t)o->rounds, "writes", env->root);
    if (v && genome_count(&o->evolve.genome) > 0)
        json_object_set_new(v, "genes", json_integer(genome_count(&o->evolve.genome)));
    if (v && memory_limit_named())
        json_object_set_new(v, "memory limit", json_integer((json_int_t)memory_limit_named()));
    if (v) {
        json_object_set_new(v, "memory", json_integer((json_int_t)memory.total));
        json_object_set_new(v, "memory, the least", json_integer((json_int_t)memory.least));
    }
    evolve_run_close_tasks(&r);
    json_decref(founders);
    free(path);
    return v;
}

/* recorded: the generations that the run need not compute. */
static json_t *estimated_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                              int recorded, struct error *err) {
    json_t *v = checked_plan(env, o, err);
    if (!v || evolve_run_estimate(env, o, recorded, v, err) == OK) return v;
    json_decref(v);
    return NULL;
}

json_t *evolve_run_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                        struct error *err) {
    return estimated_plan(env, o, 0, err);
}

/* Loads recipe, seed, zero_adapters, type of keys and values, and numeric class of a stored run. In
 * version 0.1 the type was f32. ERR_MISMATCH if the run has the numeric class fast and was made at
 * another processor level, so that this machine cannot reproduce its bits. */
static int stored_options(const struct evolve_env *env, const char *id, struct evolve_recipe *o,
                          enum numeric_class *cls, struct error *err) {
    if (!id_is_valid(id)) return error_set(err, ERR_MISSING, "no run '%s'", id);
    char *dir = path_join(env->root, id), *path = path_join(dir, "recipe.yaml"),
         *db = path_join(env->root, "shoal.db");
    struct store *s = path_exists(db) ? store_open_read_only(db, err) : NULL;
    json_t *row = s ? store_run_get(s, id, err) : NULL;
    if (!path_exists(db)) error_set(err, ERR_MISSING, "no runs in '%s'", env->root);
    store_close(s);
    int rc = row ? evolve_recipe_load(o, path, err) : err->code;
    const json_t *settings = json_object_get(row, "recipe");
    if (row) {
        const char *level = json_string_value(json_object_get(settings, "level"));
        o->seed = json_integer_value(json_object_get(settings, "seed"));
        o->zero_adapters = json_is_true(json_object_get(settings, "zero_adapters"));
        const char *kv = json_string_value(json_object_get(settings, "kv_cache_dtype"));
        enum dtype known;
        if (rc == OK && kv) rc = dtype_parse(kv, &known, err);
        if (rc == OK) evolve_recipe_set_kv(o, kv ? kv : "f32");
        const char *name = json_get_string(settings, "class");
        if (!numeric_class_find(name, level ? level : "", cls) && rc == OK)
            rc = error_set(err, ERR_MISMATCH,
                           "run '%s' was made with --fast at processor level '%s': level '%s' "
                           "cannot give the same bits",
                           id, level ? level : cpu_level_name(CPU_AMX), kernels_get()->name);
    }
    if (row && rc != OK) evolve_recipe_release(o);
    json_decref(row);
    free(dir);
    free(path);
    free(db);
    return rc;
}

json_t *evolve_run_resume(const struct evolve_env *env, const char *id, struct error *err) {
    struct evolve_recipe o;
    struct evolve_env run_env = *env;
    if (stored_options(env, id, &o, &run_env.cls, err) != OK) return NULL;
    json_t *result = execute(&run_env, &o, id, false, err);
    evolve_recipe_release(&o);
    return result;
}

/* The number of generations that evolution.jsonl of a run holds. */
static int recorded_generations(const struct evolve_env *env, const char *id) {
    char *dir = path_join(env->root, id), *path = path_join(dir, "evolution.jsonl");
    struct buf text = {0};
    struct error ignored;
    int n = 0;
    if (file_read(path, (size_t)1 << 30, &text, &ignored) == OK)
        for (size_t i = 0; i < text.len; i++) n += text.data[i] == '\n';
    buf_release(&text);
    free(path);
    free(dir);
    return n;
}

/* evolve_run_plan of a run that has an id. */
static json_t *plan_with_id(const struct evolve_env *env, const struct evolve_recipe *o,
                            const char *id, int recorded, struct error *err) {
    char *dir = path_join(env->root, id);
    json_t *v = estimated_plan(env, o, recorded, err);
    if (v) json_object_set_new(v, "writes", json_from_path(dir));
    free(dir);
    return v;
}

json_t *evolve_run_resume_plan(const struct evolve_env *env, const char *id, struct error *err) {
    struct evolve_recipe o;
    struct evolve_env run_env = *env;
    if (stored_options(env, id, &o, &run_env.cls, err) != OK) return NULL;
    int recorded = recorded_generations(env, id);
    json_t *v = plan_with_id(&run_env, &o, id, recorded, err);
    if (v) json_object_set_new(v, "recorded generations", json_integer(recorded));
    evolve_recipe_release(&o);
    return v;
}

static bool founders_equal(const struct evolve_recipe *a, const struct evolve_recipe *b) {
    bool equal = strcmp(a->model, b->model) == 0 && a->personas.n == b->personas.n;
    for (int i = 0; equal && i < a->personas.n; i++)
        equal = strcmp(a->personas.v[i], b->personas.v[i]) == 0;
    return equal;
}

/* Writes fork.json of a new run that continues the parent after `generation`. A segment is a range
 * of generations with one recipe, so these segments are the parent's own, then the parent's recipe,
 * cut off at `generation`. Also writes the recipe of each segment to recipe.N.yaml. */
static int write_fork_json(const struct evolve_run *parent, const char *dir, int generation,
                           struct error *err) {
    json_t *segments = json_array();
    int rc = dir_make_private(dir, err), n = 0;
    for (int i = 0; rc == OK && i <= parent->n_forks; i++) {
        bool last = i == parent->n_forks || parent->forks[i].until >= generation;
        const struct evolve_recipe *o = i < parent->n_forks ? &parent->forks[i].o : parent->o;
        char *name = xasprintf("recipe.%d.yaml", n++), *path = path_join(dir, name);
        rc = n > MAX_SEGMENTS
                 ? error_set(err, ERR_STATE, "a fork can have at most %d forks as ancestors",
                             MAX_SEGMENTS - 1)
                 : file_write(path, o->text, strlen(o->text), err);
        json_array_append_new(
            segments, segment_json(last ? generation : parent->forks[i].until, name, o->seed));
        free(name);
        free(path);
        if (last) break;
    }
    json_t *v =
        json_pack("{s:s,s:i,s:o}", "from", parent->id, "at", generation, "segments", segments);
    char *text = json_dumps(v, JSON_INDENT(2)), *path = path_join(dir, "fork.json");
    if (rc == OK) rc = file_write(path, text, strlen(text), err);
    json_decref(v);
    free(text);
    free(path);
    return rc;
}

/* A fork that is checked, and nothing of it is written. */
struct fork_state {
    struct evolve_recipe parent_recipe, recipe;
    struct evolve_run parent;
    struct evolve_env env; /* with the numeric class of the parent */
    char *id, *dir;
};

/* The caller calls fork_release even after an error. */
static int fork_open(struct fork_state *s, const struct evolve_env *env,
                     const struct evolve_fork *f, struct error *err) {
    *s = (struct fork_state){.env = *env};
    if (evolve_id_check(f->id, err) != OK) return err->code;
    if (stored_options(env, f->parent, &s->parent_recipe, &s->env.cls, err) != OK) {
        s->parent_recipe = (struct evolve_recipe){0}; // it is released already
        return err->code;
    }
    s->parent = (struct evolve_run){.env = env,
                                    .o = &s->parent_recipe,
                                    .id = f->parent,
                                    .dir = path_join(env->root, f->parent)};
    int rc = read_forks(&s->parent, err);
    char *parent_path = path_join(s->parent.dir, "recipe.yaml");
    if (rc == OK) rc = evolve_recipe_load(&s->recipe, f->recipe ? f->recipe : parent_path, err);
    free(parent_path);
    if (rc == OK && !founders_equal(&s->parent_recipe, &s->recipe))
        rc = error_set(err, ERR_MISMATCH,
                       "'%s' has another model or other personas than run '%s'; a fork shares its "
                       "founders",
                       f->recipe, f->parent);
    if (rc == OK && f->recipe && strcmp(s->recipe.kv_cache_dtype, "auto") != 0 &&
        strcmp(s->recipe.kv_cache_dtype, s->parent_recipe.kv_cache_dtype) != 0)
        rc = error_set(err, ERR_MISMATCH,
                       "'%s' has kv_cache_dtype %s and run '%s' has %s; a fork keeps it", f->recipe,
                       s->recipe.kv_cache_dtype, f->parent, s->parent_recipe.kv_cache_dtype);
    if (rc == OK) evolve_recipe_set_kv(&s->recipe, s->parent_recipe.kv_cache_dtype);
    s->recipe.seed = f->seed >= 0 ? f->seed : s->parent_recipe.seed;
    s->recipe.zero_adapters = s->parent_recipe.zero_adapters;
    s->id = f->id ? xstrdup(f->id) : make_id(env, s->recipe.seed);
    s->dir = path_join(env->root, s->id);
    if (rc == OK && path_exists(s->dir))
        rc = error_set(err, ERR_STATE, "'%s' already exists", s->dir);
    return rc;
}

static void fork_release(struct fork_state *s) {
    for (int i = 0; i < s->parent.n_forks; i++) evolve_recipe_release(&s->parent.forks[i].o);
    free(s->parent.forks);
    free(s->parent.parent_id);
    free(s->parent.dir);
    evolve_recipe_release(&s->parent_recipe);
    evolve_recipe_release(&s->recipe);
    free(s->id);
    free(s->dir);
}

json_t *evolve_run_fork(const struct evolve_env *env, const struct evolve_fork *fork,
                        struct error *err) {
    struct fork_state s;
    json_t *result = NULL;
    int rc = fork_open(&s, env, fork, err);
    if (rc == OK) rc = evolve_run_check_memory(&s.env, &s.recipe, err);
    if (rc == OK) rc = write_fork_json(&s.parent, s.dir, fork->generation, err);
    if (rc == OK)
        log_info("run %s continues %s from generation %d", s.id, fork->parent, fork->generation);
    if (rc == OK) result = execute(&s.env, &s.recipe, s.id, true, err);
    fork_release(&s);
    return result;
}

json_t *evolve_run_fork_plan(const struct evolve_env *env, const struct evolve_fork *fork,
                             struct error *err) {
    struct fork_state s;
    json_t *v = fork_open(&s, env, fork, err) == OK
                    ? plan_with_id(&s.env, &s.recipe, s.id, fork->generation + 1, err)
                    : NULL;
    if (v) json_object_set_new(v, "shared generations", json_integer(fork->generation));
    fork_release(&s);
    return v;
}

/* replay */

/* The line of a generation in evolution.jsonl, parsed. */
static json_t *read_logged_generation(const struct evolve_run *r, int generation,
                                      struct error *err) {
    char *path = path_join(r->dir, "evolution.jsonl");
    struct buf text = {0};
    json_t *v = NULL;
    int rc = file_read(path, (size_t)1 << 30, &text, err), line_index = 0;
    char *save = NULL, *text_line = rc == OK && text.len ? strtok_r(text.data, "\n", &save) : NULL;
    for (; text_line && line_index < generation; line_index++)
        text_line = strtok_r(NULL, "\n", &save);
    if (text_line) v = json_parse(text_line, strlen(text_line), path, err);
    if (rc == OK && !text_line)
        error_set(err, ERR_MISSING, "run '%s' has no generation %d", r->id, generation);
    buf_release(&text);
    free(path);
    return v;
}

/* A copy of `v` with numbers rounded as in the log. */
static json_t *round_to_log_precision(const json_t *v) {
    struct error ignored;
    char *text = json_dumps(v, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    json_t *out = json_parse(text, strlen(text), "", &ignored);
    free(text);
    return out;
}

/* The result of a replay: for each candidate, whether it equals the logged one. */
static json_t *compare_replay(const json_t *logged, const json_t *replayed, int generation) {
    json_t *a = json_object_get(logged, "candidates"), *current = round_to_log_precision(replayed),
           *b = json_object_get(current, "candidates"), *list = json_array(), *c;
    bool equal = json_array_size(a) == json_array_size(b);
    size_t i;
    json_array_foreach (b, i, c) {
        bool same = json_equal(c, json_array_get(a, i));
        equal &= same;
        json_t *row = json_pack("{s:s,s:s,s:b}", "name", json_get_string(c, "name"), "hash",
                                json_get_string(c, "hash"), "equal", (int)same);
        json_object_set(row, "fitness", json_object_get(c, "fitness"));
        json_array_append_new(list, row);
    }
    json_decref(current);
    return json_pack("{s:i,s:b,s:o}", "generation", generation, "equal", (int)equal, "candidates",
                     list);
}

json_t *evolve_run_replay(const struct evolve_env *env, const char *id, int generation,
                          struct error *err) {
    struct evolve_recipe o;
    struct evolve_env run_env = *env;
    json_t *logged = NULL, *result = NULL;
    if (stored_options(env, id, &o, &run_env.cls, err) != OK) return NULL;
    struct evolve_run r = {.env = &run_env,
                           .o = &o,
                           .id = id,
                           .dir = path_join(env->root, id),
                           .replay_generation = generation};
    int rc = read_forks(&r, err);
    if (rc == OK && !(logged = read_logged_generation(&r, generation, err))) rc = err->code;
    if (rc == OK) rc = run_open(&r, false, err);
    if (rc == OK) rc = open_adapter_founders(&r, err);
    if (rc == OK && !load_trained_founders(&r))
        rc = error_set(err, ERR_MISSING, "the founders of run '%s' are missing", id);
    if (rc == OK) rc = founders_zero_or_check(&r, err);
    if (rc == OK) run_search(&r, err);
    const json_t *replayed = json_array_get(r.generations, (size_t)generation);
    if (replayed) result = compare_replay(logged, replayed, generation);
    json_decref(logged);
    evolve_run_close(&r);
    evolve_recipe_release(&o);
    return result;
}
