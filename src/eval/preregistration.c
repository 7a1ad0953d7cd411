/*
 * preregistration: the plan of an evaluation, sealed in a file before results exist, and the check
 * of a later evaluation against it.
 *
 *     {"shoal_eval_plan": 1, "sealed": "2026-11-21T09:30:00Z", "version": "0.1.0",
 *      "manifest": {…}, "plan": {"tasks": […], "n": {TASK: N}, "questions": {TASK: SHA-256},
 *                                "candidates": […], "comparisons": […], "settings": {…},
 *                                "method": {…}}}
 *
 * The members of manifest and plan are the items of the check; of an object, each of its members:
 * "seed", "adapters NAME", "questions TASK". An item that is only planned or only found is not
 * kept. The file is not secret and not protected: its SHA-256, which the command prints, proves the
 * plan if it was published before the results.
 */
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

enum { PLAN_FORMAT = 1, HASH_SHOWN = 12, VALUE_SHOWN = 60 };

/* the plan */

/* The name of a task as UTF-8, with its number if an earlier task has the same name; malloc'ed. */
static char *task_label(const struct eval_task *tasks, int i) {
    json_t *name = json_string_lossy(tasks[i].name, strlen(tasks[i].name));
    bool taken = false;
    for (int k = 0; k < i; k++) taken |= strcmp(tasks[k].name, tasks[i].name) == 0;
    char *label = taken ? xasprintf("%s (%d)", json_string_value(name), i + 1)
                        : xstrdup(json_string_value(name));
    json_decref(name);
    return label;
}

static void task_add(json_t *plan, const struct eval_comparison *c, int i) {
    const struct eval_task *t = &c->tasks[i];
    char *name = task_label(c->tasks, i), hash[HASH_LEN];
    eval_task_hash(t, hash);
    json_array_append_new(json_object_get(plan, "tasks"), json_from_path(name));
    manifest_add_hash(json_object_get(plan, "questions"), name, hash);
    json_object_set_new(json_object_get(plan, "n"), name, json_integer((json_int_t)t->n_questions));
    for (int k = 1; k < c->n_candidates; k++) {
        char *text = xasprintf("%s: %s - %s", name, c->candidates[k].name, c->candidates[0].name);
        json_array_append_new(json_object_get(plan, "comparisons"), json_from_path(text));
        free(text);
    }
    free(name);
}

static json_t *method_json(const struct eval_comparison *c) {
    int n = c->n_tasks * (c->n_candidates - 1);
    return json_pack("{s:s,s:s,s:s,s:o,s:s}", "accuracy", "right answers / questions, Wilson 95 %",
                     "difference", "paired, Newcombe 95 %, Bonferroni over all comparisons", "test",
                     "McNemar, exact, two-sided", "correction",
                     json_sprintf("Holm over %d comparisons", n), "equivalence",
                     "two one-sided tests at 5 %, within 2 points");
}

json_t *eval_plan_json(const struct eval_comparison *c, json_t *settings) {
    json_t *plan =
        json_pack("{s:[],s:{},s:{},s:[],s:[],s:o,s:o}", "tasks", "n", "questions", "candidates",
                  "comparisons", "settings", settings, "method", method_json(c));
    for (int k = 0; k < c->n_candidates; k++)
        json_array_append_new(json_object_get(plan, "candidates"),
                              json_from_path(c->candidates[k].name));
    for (int i = 0; i < c->n_tasks; i++) task_add(plan, c, i);
    return plan;
}

/* the file */

int eval_plan_check_new(const char *path, struct error *err) {
    if (!path_exists(path)) return OK;
    return error_set(err, ERR_STATE,
                     "'%s' exists, and a sealed plan is not replaced; name a new file", path);
}

int eval_plan_seal(const char *path, const json_t *manifest, const json_t *plan,
                   struct error *err) {
    char sealed[32];
    json_t *v =
        json_pack("{s:i,s:s,s:s,s:O,s:O}", "shoal_eval_plan", PLAN_FORMAT, "sealed",
                  clock_utc(sealed), "version", SHOAL_VERSION, "manifest", manifest, "plan", plan);
    char *text = json_dumps(v, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    int rc = eval_plan_check_new(path, err);
    CHECK(text);
    struct buf b = {0};
    buf_printf(&b, "%s\n", text);
    if (rc == OK) rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(text);
    json_decref(v);
    return rc;
}

json_t *eval_plan_read(const char *path, struct error *err) {
    char hash[HASH_LEN];
    json_t *v = sha256_file(path, hash, err) == OK ? json_parse_file(path, err) : NULL;
    if (!v) return NULL;
    if (json_integer_value(json_object_get(v, "shoal_eval_plan")) == PLAN_FORMAT &&
        json_is_object(json_object_get(v, "manifest")) &&
        json_is_object(json_object_get(v, "plan")) &&
        json_is_string(json_object_get(v, "sealed"))) {
        json_object_set_new(v, "file", json_from_path(path));
        json_object_set_new(v, "sha256", json_string(hash));
        return v;
    }
    json_decref(v);
    error_set(err, ERR_FORMAT, "'%s' is no plan; 'shoal eval --freeze FILE' writes one", path);
    return NULL;
}

/* the check */

/* {item: value} of a manifest and a plan. */
static json_t *items_flatten(const json_t *manifest, const json_t *plan) {
    json_t *flat = json_object(), *v, *inner;
    const json_t *sections[] = {manifest, plan};
    const char *key, *name;
    for (size_t i = 0; i < ARRAY_LEN(sections); i++)
        json_object_foreach ((json_t *)(uintptr_t)sections[i], key, v) {
            if (!json_is_object(v)) json_object_set(flat, key, v);
            json_object_foreach (v, name, inner) {
                char *item = xasprintf("%s %s", key, name);
                json_object_set(flat, item, inner);
                free(item);
            }
        }
    return flat;
}

/* Adds an item; NULL: it is not planned, or not found. Returns whether it is kept. */
static bool item_add(json_t *items, const char *name, json_t *planned, json_t *found) {
    bool kept = planned && found && json_equal(planned, found);
    json_t *row = json_pack("{s:s,s:b}", "item", name, "kept", (int)kept);
    if (planned) json_object_set(row, "planned", planned);
    if (found) json_object_set(row, "found", found);
    json_array_append_new(items, row);
    return kept;
}

json_t *eval_plan_compare(const json_t *sealed, const json_t *manifest, const json_t *plan) {
    json_t *items = json_array(), *v, *found = items_flatten(manifest, plan),
           *planned =
               items_flatten(json_object_get(sealed, "manifest"), json_object_get(sealed, "plan"));
    const char *name;
    bool kept = true;
    json_object_foreach (planned, name, v)
        kept &= item_add(items, name, v, json_object_get(found, name));
    json_object_foreach (found, name, v)
        if (!json_object_get(planned, name)) kept &= item_add(items, name, NULL, v);
    json_decref(planned);
    json_decref(found);
    return json_pack("{s:O,s:O,s:O,s:b,s:o}", "file", json_object_get(sealed, "file"), "sha256",
                     json_object_get(sealed, "sha256"), "sealed", json_object_get(sealed, "sealed"),
                     "kept", (int)kept, "items", items);
}

/* Appends a value of an item, shortened: a text without quotes, the beginning of a hash. */
static void value_add(struct buf *b, const json_t *v) {
    const char *text = json_string_value(v);
    char *dump = text ? xstrdup(text) : json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    CHECK(dump);
    size_t n = strlen(dump), shown = MIN(n, hash_is_valid(dump) ? HASH_SHOWN : VALUE_SHOWN);
    buf_add_sanitized(b, dump, utf8_complete_len(dump, shown));
    if (shown < n) buf_puts(b, "…");
    free(dump);
}

static void deviation_add(struct buf *b, const json_t *row) {
    const json_t *planned = json_object_get(row, "planned"), *found = json_object_get(row, "found");
    buf_puts(b, "  ");
    buf_add_sanitized(b, json_get_string(row, "item"), strlen(json_get_string(row, "item")));
    buf_puts(b, planned ? ": planned " : ": not planned");
    if (planned) value_add(b, planned);
    buf_puts(b, found ? ", found " : ", not found");
    if (found) value_add(b, found);
    buf_puts(b, "\n");
}

void eval_plan_report(const json_t *report, struct buf *b) {
    const json_t *items = json_object_get(report, "items"), *row;
    int changed = 0, n = (int)json_array_size(items);
    size_t i;
    json_array_foreach (items, i, row) changed += !json_is_true(json_object_get(row, "kept"));
    buf_printf(b, "plan '%s' of %s, SHA-256 %s: ", json_get_string(report, "file"),
               json_get_string(report, "sealed"), json_get_string(report, "sha256"));
    if (changed)
        buf_printf(b, "the evaluation deviates from it in %d of %d items:\n", changed, n);
    else
        buf_printf(b, "the evaluation kept all %d items\n", n);
    json_array_foreach (items, i, row)
        if (!json_is_true(json_object_get(row, "kept"))) deviation_add(b, row);
}
