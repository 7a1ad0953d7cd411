/*
 * recipe: options of a run, from YAML. The top level and each section have a table of options.
 *
 * An unknown key is an error that names its line. Every check that needs no model is made here.
 */
#include "evolve/run.h"

#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct evolve_recipe, field), fallback, min, max, metavar, help }

const struct option_row evolve_recipe_rows[] = {
    ROW("model", OPT_STRING, model, "models/fry", 0, 0, "MODEL", "base model"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of all random choices"),
    ROW("personas", OPT_LIST, personas, NULL, 0, 0, "NAME=FILE",
        "founders: a file of conversations each, or an adapter's directory"),
    ROW("tasks", OPT_LIST, tasks, NULL, 0, 0, "TASK",
        "questions of fitness and of the final test: families, or JSONL files, whose questions are "
        "split between the two"),
    ROW("retain", OPT_LIST, retain, NULL, 0, 0, "TASK",
        "tasks whose accuracy is checked for regressions at the end"),
    ROW("rounds", OPT_INT, rounds, "2", 0, 16, "N", "rounds of the founders' debate; 0: no debate"),
    ROW("max-tokens", OPT_INT, max_tokens, "24", 1, 4096, "N",
        "maximum tokens of the chain of thought per turn"),
    ROW("chain-of-thought", OPT_BOOL, chain_of_thought, "true", 0, 0, NULL,
        "write a chain of thought before the answer"),
    ROW("vote", OPT_STRING, vote, "confidence", 0, 0, "NAME",
        "vote of a team: majority, confidence, logprob, borda or quorum"),
    ROW("test-items", OPT_INT, test_items, "500", 1, 1e6, "N",
        "held-out questions of the final table"),
    ROW("curve", OPT_BOOL, curve, "true", 0, 0, NULL,
        "final table: every founder and the best candidate of up to a dozen generations; otherwise "
        "only the best founder and the best of the last generation"),
    ROW("retain-items", OPT_INT, retain_items, "1000", 1, 1e6, "N",
        "held-out questions per task of retain"),
    ROW("save", OPT_STRING, save, "all", 0, 0, "NAME",
        "adapters saved as folders: all, or the best of each generation"),
    ROW("kv-cache-dtype", OPT_STRING, kv_cache_dtype, "auto", 0, 0, "ELEM",
        "number format of keys and values, of the engine and in training: f32, bf16, f16, i8 or "
        "auto (f16; bf16 where attention runs in bf16)"),
    ROW("temperature", OPT_FLOAT, temperature, "0.7", 0.01, 10, "T",
        "sampling temperature of self-consistency"),
    ROW("zero-adapters", OPT_BOOL, zero_adapters, NULL, 0, 0, NULL,
        "control: replace founders by zero adapters and skip fine-tuning"),
    {0},
};
#undef ROW

#define SECTION(name, rows)                                                                        \
    { #name, rows, offsetof(struct evolve_recipe, name) }
/* A section of the recipe. The table ends with a row without a name. */
struct recipe_section {
    const char *name;
    const struct option_row *rows;
    size_t offset; /* in struct evolve_recipe */
};
static const struct recipe_section sections[] = {
    SECTION(train, train_option_rows),
    SECTION(evolve, evolve_option_rows),
    SECTION(fitness, fitness_option_rows),
    SECTION(search, search_option_rows),
    SECTION(race, race_option_rows),
    SECTION(finetune, train_option_rows),
    SECTION(es, es_option_rows),
    {"genome", genome_option_rows, offsetof(struct evolve_recipe, evolve.genome)},
    {0},
};

static void recipe_set_defaults(struct evolve_recipe *o) {
    *o = (struct evolve_recipe){0};
    options_default(evolve_recipe_rows, o);
    for (const struct recipe_section *s = sections; s->name; s++)
        options_default(s->rows, (char *)o + s->offset);
    train_options_fix(&o->finetune);
}

void evolve_recipe_release(struct evolve_recipe *o) {
    options_release(evolve_recipe_rows, o);
    for (const struct recipe_section *s = sections; s->name; s++)
        options_release(s->rows, (char *)o + s->offset);
    free(o->text);
}

/* Whether a persona may have this name, which becomes a folder and a row of the final table: 1 to
 * 20 letters, digits, '-' and '_', and not the name of another row or of a child ("g1c0"). */
static bool name_is_plain(const char *name, size_t len) {
    static const char *const reserved[] = {"base",    "debate", "generation", "self-consistency",
                                           "evolved", "made"};
    for (size_t i = 0; i < len; i++)
        if (!((name[i] | 32) >= 'a' && (name[i] | 32) <= 'z') &&
            !(name[i] >= '0' && name[i] <= '9') && name[i] != '-' && name[i] != '_')
            return false;
    for (size_t i = 0; i < ARRAY_LEN(reserved); i++)
        if (strlen(reserved[i]) == len && memcmp(reserved[i], name, len) == 0) return false;
    return len > 0 && len <= 20 && !candidate_name_is_child(name);
}

static int check_personas(const struct evolve_recipe *o, const char *path, struct error *err) {
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

/* A file name contains a dot; a family name does not. */
static int check_tasks(const struct strings *names, const char *path, struct error *err) {
    for (int i = 0; i < names->n; i++)
        if (family_find(names->v[i]) < 0 && !strchr(names->v[i], '.'))
            return error_set(err, ERR_USAGE, "'%s': no task '%s'; name a family or a JSONL file",
                             path, names->v[i]);
    return OK;
}

static int check_search(const struct evolve_options *o, struct error *err) {
    struct buf known = {0};
    const struct search_method *s = search_methods;
    for (; s->name && strcmp(s->name, o->search) != 0; s++)
        buf_printf(&known, "%s%s", s == search_methods ? "" : ", ", s->name);
    if (!s->name) error_set(err, ERR_USAGE, "no search '%s'; there are %s", o->search, known.data);
    buf_release(&known);
    if (!s->name) return err->code;
    bool trains = strcmp(o->search, "gradient") == 0 || strcmp(o->search, "es") == 0;
    if ((trains || o->finetune_steps > 0) && !o->finetune_data)
        return error_set(err, ERR_USAGE,
                         "set evolve.finetune_data to the conversations that %s trains on",
                         trains ? o->search : "finetune_steps");
    return OK;
}

/* ERR_USAGE: a range with min >= max, or a gene without an effect in this run. */
static int check_genome(const struct evolve_recipe *o, struct error *err) {
    const struct genome_options *x = &o->evolve.genome;
    for (int g = 0; g < N_GENES; g++) {
        bool evolves = genome_evolves(x, (enum gene)g);
        if (g != GENE_PROMPT && !evolves && (x->min[g] != 0 || x->max[g] != 0))
            return error_set(err, ERR_USAGE, "genome.%s needs a range with 0 < min < max",
                             gene_names[g]);
        if (evolves && g >= GENE_LR && o->evolve.finetune_steps == 0)
            return error_set(err, ERR_USAGE,
                             "genome.%s is a setting of fine-tuning: set evolve.finetune_steps",
                             gene_names[g]);
    }
    if (genome_evolves(x, GENE_TEMPERATURE) && !o->chain_of_thought)
        return error_set(err, ERR_USAGE,
                         "genome.temperature is a setting of chains of thought, which "
                         "'chain_of_thought: false' omits");
    if (genome_count(x) > 0 && strcmp(o->evolve.search, "breed") != 0)
        return error_set(err, ERR_USAGE, "section 'genome' needs search 'breed', not '%s'",
                         o->evolve.search);
    if (x->keep_weights > 0 && genome_count(x) == 0)
        return error_set(err, ERR_USAGE,
                         "genome.keep_weights needs an evolved gene: without one, such a child "
                         "is a copy of its parent");
    return OK;
}

/* Checks each section with the function of the module that uses it. */
static int check_sections(const struct evolve_recipe *o, struct error *err) {
    int rc = check_search(&o->evolve, err);
    if (rc == OK) rc = check_genome(o, err);
    if (rc == OK) rc = population_check_options(&o->evolve, &o->fitness, err);
    if (rc == OK) rc = train_options_require_plain(&o->train, "evolution", err);
    if (rc == OK) rc = train_options_require_plain(&o->finetune, "evolution", err);
    if (rc == OK && strcmp(o->evolve.search, "es") == 0)
        rc = es_options_check(&o->es, &o->finetune, err);
    if (rc == OK && o->fitness.race) {
        struct race *r = race_new(&o->race, (int)o->evolve.population, (int)o->fitness.items, err);
        rc = r ? OK : err->code;
        race_free(r);
    }
    return rc;
}

void evolve_recipe_set_kv(struct evolve_recipe *o, const char *name) {
    char **const all[] = {&o->kv_cache_dtype, &o->train.kv_cache_dtype,
                          &o->finetune.kv_cache_dtype};
    char *copy = xstrdup(name); // `name` may be one of the values
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        free(*all[i]);
        *all[i] = xstrdup(copy);
    }
    free(copy);
}

/* Gives the sections of training the type of keys and values of the run. */
static int share_kv(struct evolve_recipe *o, const char *path, struct error *err) {
    enum dtype type;
    if (strcmp(o->train.kv_cache_dtype, "auto") != 0 ||
        strcmp(o->finetune.kv_cache_dtype, "auto") != 0)
        return error_set(
            err, ERR_USAGE,
            "'%s': a run has one 'kv_cache_dtype'; set it at the top, not in a section", path);
    evolve_recipe_set_kv(o, o->kv_cache_dtype);
    return kv_cache_dtype_parse(o->kv_cache_dtype, NUMERIC_EXACT, &type, err) == OK
               ? OK
               : error_wrap(err, "'%s'", path);
}

static int check_options(const struct evolve_recipe *o, const char *path, struct error *err) {
    if (o->personas.n < 2)
        return error_set(err, ERR_USAGE, "'%s': at least two personas are needed", path);
    if (o->tasks.n < 1) return error_set(err, ERR_USAGE, "'%s': no tasks are named", path);
    if (!vote_find(o->vote)) return error_set(err, ERR_USAGE, "'%s': no vote '%s'", path, o->vote);
    if (strcmp(o->save, "all") != 0 && strcmp(o->save, "best") != 0)
        return error_set(err, ERR_USAGE, "'%s': save is all or best, not '%s'", path, o->save);
    const char *m = o->fitness.metric;
    if (strcmp(m, "right") != 0 && strcmp(m, "probability") != 0)
        return error_set(err, ERR_USAGE, "'%s': no metric '%s'; there are right and probability",
                         path, m);
    if (strcmp(o->fitness.credit, "loo") != 0 && strcmp(o->fitness.credit, "shapley") != 0)
        return error_set(err, ERR_USAGE, "'%s': credit is loo or shapley, not '%s'", path,
                         o->fitness.credit);
    const char *distance = o->fitness.distance;
    if (strcmp(distance, "js") != 0 && strcmp(distance, "disagreement") != 0 &&
        strcmp(distance, "embedding") != 0)
        return error_set(err, ERR_USAGE,
                         "'%s': distance is js, disagreement or embedding, not '%s'", path,
                         distance);
    if (strcmp(distance, "embedding") == 0 && !o->chain_of_thought)
        return error_set(err, ERR_USAGE,
                         "'%s': distance 'embedding' compares chains of thought, which "
                         "'chain_of_thought: false' omits",
                         path);
    if (check_tasks(&o->tasks, path, err) != OK) return err->code;
    if (check_tasks(&o->retain, path, err) != OK) return err->code;
    if (check_sections(o, err) != OK) return error_wrap(err, "'%s'", path);
    return check_personas(o, path, err);
}

/* Sets *key_out to the key of a section in the document, which may be an earlier name; NULL: the
 * section is absent. */
static int section_key(const struct recipe_section *s, const struct yaml *y, const char **key_out,
                       struct error *err) {
    const char *key;
    json_t *v;
    *key_out = NULL;
    json_object_foreach (y->root, key, v) {
        if (strcmp(current_value("section", key), s->name) != 0) continue;
        if (*key_out)
            return error_set(err, ERR_USAGE, "'%s', line %d: sections '%s' and '%s' are the same",
                             y->path, yaml_line(y, key), *key_out, key);
        *key_out = key;
    }
    if (*key_out) renamed_value("section", *key_out); /* logs that the name has changed */
    return OK;
}

/* Fills a section's table and deletes the section from the document. */
static int section_apply(const struct recipe_section *s, struct evolve_recipe *o, struct yaml *y,
                         struct error *err) {
    const char *found;
    int rc = section_key(s, y, &found, err);
    char *key = xstrdup(found ? found : s->name);
    if (rc == OK) rc = options_from_yaml(s->rows, (char *)o + s->offset, y, key, err);
    json_object_del(y->root, key);
    free(key);
    return rc;
}

int evolve_recipe_load(struct evolve_recipe *o, const char *path, struct error *err) {
    struct yaml y;
    struct buf text = {0};
    recipe_set_defaults(o);
    int rc = yaml_load(&y, path, err);
    if (rc != OK) return rc;
    if (yaml_line(&y, "train.seed"))
        rc = error_set(err, ERR_USAGE, "'%s', line %d: a run has one seed; set 'seed' at the top",
                       path, yaml_line(&y, "train.seed"));
    for (const struct recipe_section *s = sections; rc == OK && s->name; s++)
        rc = section_apply(s, o, &y, err);
    if (rc == OK) rc = options_from_yaml(evolve_recipe_rows, o, &y, NULL, err);
    yaml_release(&y);
    if (rc == OK) rc = share_kv(o, path, err);
    if (rc == OK && genome_resolve(&o->evolve.genome, err) != OK)
        rc = error_wrap(err, "'%s'", path);
    if (rc == OK) rc = file_read(path, 1 << 20, &text, err);
    o->text = text.data;
    return rc == OK ? check_options(o, path, err) : rc;
}
