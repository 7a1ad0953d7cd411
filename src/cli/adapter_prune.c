/*
 * adapter_prune: deletes versions of adapters, and candidates of finished evolution runs — shoal
 * adapter prune.
 *
 * The conditions never select files that are in use: see adapter_versions_prune and
 * evolve_run_prune. Without --yes nothing is deleted.
 */
#include "cli/adapter_verbs.h"
#include "evolve/evolve.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct {
    char unit;
    double seconds;
} units[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}, {'w', 7 * 86400}};

static int age_parse(const char *text, int64_t *seconds, struct error *err) {
    char *end;
    double n = strtod(text, &end);
    for (size_t i = 0; i < ARRAY_LEN(units) && end > text; i++)
        if (*end == units[i].unit && !end[1] && n >= 0 && n * units[i].seconds < 1e12) {
            *seconds = (int64_t)(n * units[i].seconds);
            return OK;
        }
    return error_set(err, ERR_USAGE,
                     "--older-than '%s' is not a number with a unit: s, m, h, d or w, as in 30d",
                     text);
}

static int score_parse(const char *text, double *score, struct error *err) {
    char *end;
    *score = strtod(text, &end);
    if (end > text && !*end && isfinite(*score)) return OK;
    return error_set(err, ERR_USAGE, "--min-score '%s' is not a number", text);
}

static int rule_parse(const struct prune_request *q, struct prune_rule *rule, struct error *err) {
    *rule = (struct prune_rule){.keep = q->keep,
                                .min_age = -1,
                                .min_score = NAN,
                                .now = (int64_t)time(NULL),
                                .delete_matches = q->yes};
    if (q->keep < 0 && !q->older_than && !q->min_score)
        return error_set(err, ERR_USAGE,
                         "prune requires --keep, --older-than or --min-score; files must meet all "
                         "conditions that are given");
    if (q->older_than && age_parse(q->older_than, &rule->min_age, err) != OK) return err->code;
    return q->min_score ? score_parse(q->min_score, &rule->min_score, err) : OK;
}

/* A version or a candidate. Names and times may come from another person. */
static void print_one(const json_t *v) {
    const json_t *score = json_object_get(v, "score");
    const char *hash = json_get_string(v, "hash");
    struct buf line = {0}, clean = {0};
    if (*hash)
        buf_printf(&line, "  %.12s  %-20.20s", hash, json_get_string(v, "created"));
    else
        buf_printf(&line, "  gen_%d/%s", (int)json_get_number(v, "generation"),
                   json_get_string(v, "name"));
    if (json_is_number(score)) buf_printf(&line, "  score %+.4f", json_number_value(score));
    buf_add_sanitized(&clean, line.data, line.len);
    puts(clean.data);
    buf_release(&line);
    buf_release(&clean);
}

static void print_pruned(const char *dir, const json_t *list, bool deleted) {
    double bytes = 0;
    json_t *v;
    size_t i;
    json_array_foreach (list, i, v) bytes += json_get_number(v, "bytes");
    printf("%s: %zu %s, %.1f MB\n", dir, json_array_size(list),
           deleted ? "deleted" : "would be deleted", bytes / 1e6);
    json_array_foreach (list, i, v) print_one(v);
}

enum target { TARGET_NONE, TARGET_ADAPTER, TARGET_RUN };

static enum target target_of(const char *dir) {
    char *recipe = path_join(dir, "recipe.yaml"), *adapters = path_join(dir, "adapters");
    enum target t = dir_is_adapter(dir)                            ? TARGET_ADAPTER
                    : path_exists(recipe) && path_is_dir(adapters) ? TARGET_RUN
                                                                   : TARGET_NONE;
    free(recipe);
    free(adapters);
    return t;
}

static int prune_one(const struct cli_options *c, const char *dir, enum target target,
                     const struct prune_rule *rule, struct error *err) {
    json_t *list = NULL;
    int rc = target == TARGET_RUN ? evolve_run_prune(dir, rule, &list, err)
                                  : adapter_versions_prune(dir, rule, &list, err);
    if (rc == OK && c->json)
        cli_print_json(json_pack("{s:o,s:b,s:O}", "directory", json_from_path(dir), "deleted",
                                 rule->delete_matches, "pruned", list));
    else if (rc == OK)
        print_pruned(dir, list, rule->delete_matches);
    json_decref(list);
    return rc;
}

static int is_visible(const struct dirent *f) {
    return f->d_name[0] != '.';
}

/* Prunes the adapters and the finished runs directly below a folder, by name; unfinished runs are
 * left out with a warning. */
static int prune_folder(const struct cli_options *c, const char *dir, const struct prune_rule *rule,
                        struct error *err) {
    struct dirent **found = NULL;
    int n = scandir(dir, &found, is_visible, alphasort), rc = OK, shown = 0;
    if (n < 0) return error_errno(err, "cannot read the directory '%s'", dir);
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, found[i]->d_name);
        enum target target = rc == OK ? target_of(path) : TARGET_NONE;
        if (target != TARGET_NONE) {
            rc = prune_one(c, path, target, rule, err);
            shown++;
        }
        if (rc == ERR_STATE && target == TARGET_RUN) {
            log_warn("%s", err->text);
            rc = OK;
        }
        free(path);
        free(found[i]);
    }
    free(found);
    if (rc == OK && shown == 0)
        rc = error_set(err, ERR_MISSING, "'%s' has neither adapters nor runs of 'shoal evolve'",
                       dir);
    return rc;
}

int cmd_adapter_prune(const struct cli_options *c, const struct strings *args,
                      const struct prune_request *q, struct error *err) {
    struct prune_rule rule;
    int rc = rule_parse(q, &rule, err);
    if (rc == OK && args->n < 2)
        rc = error_set(err, ERR_USAGE, "name at least one adapter, run or folder");
    for (int i = 1; rc == OK && i < args->n; i++) {
        enum target target = target_of(args->v[i]);
        rc = target == TARGET_NONE ? prune_folder(c, args->v[i], &rule, err)
                                   : prune_one(c, args->v[i], target, &rule, err);
    }
    if (rc == OK && !q->yes && !c->json)
        log_info("nothing was deleted; --yes deletes the listed files");
    return rc;
}
