/*
 * harness_task: reads task files of lm-evaluation-harness, and makes questions of rows.
 *
 * A key is used, has no effect here, or is refused; an unknown key is refused. Python code (the tag
 * !function) is never run. Metrics and filters that are not computed are named in a message, if
 * another one is computed.
 *
 * Differences from lm-evaluation-harness: examples are the first rows of their split, for all
 * questions the same; a continuation (output_type loglikelihood) is decoded greedily.
 */
#define _GNU_SOURCE
#include "eval/harness_task.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { INCLUDE_DEPTH = 16, DEFAULT_TOKENS = 256, MAX_TOKENS = 65536, MAX_SHOTS = 1000 };

/* keys */

enum key_use { KEY_USED, KEY_WITHOUT_EFFECT, KEY_REFUSED };

static const char write_template[] =
    "write a template, or add a column with the result to the data";
static const char save_rows[] = "save the rows that it makes as JSONL, name them in "
                                "dataset_kwargs.data_files, and leave the key out";

/* remedy: of a refused key, or of Python code as the value of a key. */
static const struct harness_key {
    const char *name;
    enum key_use use;
    const char *remedy;
} known_keys[] = {
    {"task", KEY_USED, NULL},
    {"dataset_path", KEY_USED, save_rows},
    {"dataset_name", KEY_USED, NULL},
    {"dataset_kwargs", KEY_USED, save_rows},
    {"training_split", KEY_USED, NULL},
    {"validation_split", KEY_USED, NULL},
    {"test_split", KEY_USED, NULL},
    {"fewshot_split", KEY_USED, NULL},
    {"fewshot_config", KEY_USED, "list the examples as 'samples'"},
    {"num_fewshot", KEY_USED, NULL},
    {"description", KEY_USED, "write the text"},
    {"doc_to_text", KEY_USED, write_template},
    {"doc_to_target", KEY_USED, write_template},
    {"doc_to_choice", KEY_USED, write_template},
    {"target_delimiter", KEY_USED, NULL},
    {"fewshot_delimiter", KEY_USED, NULL},
    {"output_type", KEY_USED, NULL},
    {"generation_kwargs", KEY_USED, NULL},
    {"metric_list", KEY_USED, "leave this metric out; acc, acc_norm and exact_match are computed"},
    {"filter_list", KEY_USED,
     "use the filters regex, remove_whitespace, lowercase, uppercase, map"},
    {"repeats", KEY_USED, NULL},
    {"tag", KEY_WITHOUT_EFFECT, NULL},
    {"group", KEY_WITHOUT_EFFECT, NULL},
    {"task_alias", KEY_WITHOUT_EFFECT, NULL},
    {"group_alias", KEY_WITHOUT_EFFECT, NULL},
    {"metadata", KEY_WITHOUT_EFFECT, NULL},
    {"batch_size", KEY_WITHOUT_EFFECT, NULL},
    {"should_decontaminate", KEY_WITHOUT_EFFECT, NULL},
    {"doc_to_decontamination_query", KEY_WITHOUT_EFFECT, NULL},
    {"process_docs", KEY_REFUSED, save_rows},
    {"custom_dataset", KEY_REFUSED, save_rows},
    {"process_results", KEY_REFUSED, "name metrics in metric_list instead"},
    {"class", KEY_REFUSED, "describe the task with doc_to_text and doc_to_target"},
    {"use_prompt", KEY_REFUSED, "write the prompt in doc_to_text"},
    {"gen_prefix", KEY_REFUSED, "append it to doc_to_text"},
    {"doc_to_image", KEY_REFUSED, "models of texts are evaluated"},
    {"doc_to_audio", KEY_REFUSED, "models of texts are evaluated"},
    {"unsafe_code", KEY_REFUSED, "eval executes no code that a model writes"},
    {"aggregate_metric_list", KEY_REFUSED, "name the files of the group's tasks"},
    {"task_list", KEY_REFUSED, "name one file for each task"},
};

/* The value of a key; NULL: it is absent or null. */
static const json_t *key_get(const struct harness_task *h, const char *key) {
    return json_object_get(h->keys, key);
}

static const char *key_text(const struct harness_task *h, const char *key) {
    return json_string_value(key_get(h, key));
}

__attribute__((format(printf, 4, 5))) static int
key_error(const struct harness_task *h, const char *key, struct error *err, const char *fmt, ...) {
    const char *place = json_string_value(json_object_get(h->places, key));
    va_list args;
    va_start(args, fmt);
    char *text = NULL;
    if (vasprintf(&text, fmt, args) < 0) text = NULL;
    va_end(args);
    error_set(err, ERR_FORMAT, "%s", text ? text : "");
    free(text);
    return place ? error_wrap(err, "%s: '%s'", place, key)
                 : error_wrap(err, "task '%s': '%s'", h->name ? h->name : "", key);
}

static int key_check_type(const struct harness_task *h, const char *key, bool ok, const char *type,
                          struct error *err) {
    return !key_get(h, key) || ok ? OK : key_error(h, key, err, "must be %s", type);
}

/* files */

static int file_merge(struct harness_task *h, const struct yaml *y, int depth, struct error *err);

static int include_merge(struct harness_task *h, const struct yaml *y, const json_t *name,
                         int depth, struct error *err) {
    struct yaml base = {0};
    int line = yaml_line(y, "include");
    if (!json_is_string(name) || depth == INCLUDE_DEPTH)
        return error_set(err, ERR_FORMAT, "'%s', line %d: 'include' %s", y->path, line,
                         json_is_string(name) ? "includes a file that includes it"
                                              : "must be the name of a file");
    char *path = path_relative_to(y->path, json_string_value(name));
    int rc = yaml_load_functions(&base, path, err);
    if (rc == OK) rc = file_merge(h, &base, depth + 1, err);
    yaml_release(&base);
    free(path);
    return rc == OK || depth > 0 ? rc : error_wrap(err, "'%s', line %d: 'include'", y->path, line);
}

/* Adds the keys of the included files, then those of the file itself, which replace them. */
static int file_merge(struct harness_task *h, const struct yaml *y, int depth, struct error *err) {
    const json_t *include = json_object_get(y->root, "include");
    size_t n =
        json_is_array(include) ? json_array_size(include) : include && !json_is_null(include);
    const char *key;
    json_t *value;
    if (!json_is_object(y->root))
        return error_set(err, ERR_FORMAT, "'%s' must be a mapping of keys", y->path);
    for (size_t i = 0; i < n; i++) {
        const json_t *name = json_is_array(include) ? json_array_get(include, i) : include;
        if (include_merge(h, y, name, depth, err) != OK) return err->code;
    }
    json_object_foreach (y->root, key, value) {
        if (strcmp(key, "include") == 0) continue;
        char *place = xasprintf("'%s', line %d", y->path, yaml_line(y, key));
        json_object_set(h->keys, key, value);
        json_object_set_new(h->places, key, json_string_lossy(place, strlen(place)));
        free(place);
    }
    return OK;
}

static void nulls_remove(json_t *object) {
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, key, value) if (json_is_null(value))
        json_object_del(object, key);
}

/* The name of the Python function anywhere in a value, or NULL. */
static const char *function_find(const json_t *v) {
    const char *key, *found = json_string_value(json_object_get(v, YAML_FUNCTION));
    json_t *item;
    for (size_t i = 0; !found && i < json_array_size(v); i++)
        found = function_find(json_array_get(v, i));
    json_object_foreach ((json_t *)(uintptr_t)v, key, item)
        if (!found) found = function_find(item);
    return found;
}

static int key_check(const struct harness_task *h, const char *key, const json_t *value,
                     struct error *err) {
    const struct harness_key *k = NULL;
    const char *function = function_find(value);
    for (size_t i = 0; i < ARRAY_LEN(known_keys); i++)
        if (strcmp(known_keys[i].name, key) == 0) k = &known_keys[i];
    if (!k)
        return key_error(h, key, err,
                         "is an unknown key of a task; leave it out "
                         "if it does not change the questions");
    if (k->use == KEY_WITHOUT_EFFECT || (k->use == KEY_REFUSED && json_is_false(value))) return OK;
    if (function)
        return key_error(h, key, err, "needs the Python code '%s', which is not run; %s", function,
                         k->remedy ? k->remedy : "write the value");
    return k->use == KEY_USED ? OK : key_error(h, key, err, "is not supported; %s", k->remedy);
}

static int keys_check(const struct harness_task *h, struct error *err) {
    static const char *const texts[] = {
        "dataset_path",  "dataset_name", "training_split",   "validation_split",  "test_split",
        "fewshot_split", "description",  "target_delimiter", "fewshot_delimiter", "output_type"};
    const char *key;
    json_t *value;
    json_object_foreach (h->keys, key, value)
        if (key_check(h, key, value, err) != OK) return err->code;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        if (key_check_type(h, texts[i], key_text(h, texts[i]), "a text", err) != OK)
            return err->code;
    if (json_is_array(key_get(h, "task")))
        return key_error(h, "task", err, "is a group of tasks; name their files in --tasks");
    if (key_check_type(h, "task", key_text(h, "task"), "a name", err) != OK) return err->code;
    const json_t *repeats = key_get(h, "repeats");
    return !repeats || json_integer_value(repeats) == 1
               ? OK
               : key_error(h, "repeats", err, "must be 1: one answer of each question is graded");
}

/* data */

static bool is_local_format(const char *dataset) {
    return strcmp(dataset, "json") == 0 || strcmp(dataset, "csv") == 0;
}

/* Adds a data file, relative to the task file or else to the working directory. */
static int data_file_add(const struct harness_task *h, const char *task_file, const json_t *name,
                         struct strings *out, struct error *err) {
    const char *text = json_string_value(name);
    static const char *const extensions[] = {".json", ".jsonl", ".csv"};
    bool known = false;
    if (!text) return key_error(h, "dataset_kwargs", err, "'data_files' must name files");
    if (strstr(text, "://"))
        return key_error(h, "dataset_kwargs", err,
                         "'%s' is not downloaded; save it and name the file", text);
    for (size_t i = 0; i < ARRAY_LEN(extensions); i++)
        known |= path_has_extension(text, extensions[i]);
    if (!known)
        return key_error(h, "dataset_kwargs", err,
                         "'%s' is neither .json, .jsonl nor .csv; convert it, for example with "
                         "pandas: to_json(..., orient=\"records\", lines=True)",
                         text);
    char *path = path_relative_to(task_file, text);
    strings_add(out, path_exists(path) ? path : text);
    free(path);
    return OK;
}

/* Adds the files of a split. data_files: a name, a list, or a mapping of splits to these. */
static int split_files_add(const struct harness_task *h, const char *task_file, const char *split,
                           struct strings *out, struct error *err) {
    const json_t *files = json_object_get(key_get(h, "dataset_kwargs"), "data_files");
    if (json_is_object(files) && !(files = json_object_get(files, split)))
        return key_error(h, "dataset_kwargs", err, "'data_files' has no split '%s'", split);
    size_t n = json_is_array(files) ? json_array_size(files) : 1;
    for (size_t i = 0; i < n; i++)
        if (data_file_add(h, task_file, json_is_array(files) ? json_array_get(files, i) : files,
                          out, err) != OK)
            return err->code;
    return OK;
}

static int data_files_read(struct harness_task *h, const char *task_file, const char *split,
                           const char *shot_split, struct error *err) {
    const json_t *kwargs = key_get(h, "dataset_kwargs");
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)kwargs, key, value)
        if (strcmp(key, "data_files") != 0 && strcmp(key, "trust_remote_code") != 0)
            return key_error(h, "dataset_kwargs", err, "'%s' is not supported", key);
    if (!json_object_get(kwargs, "data_files"))
        return key_error(h, "dataset_path", err,
                         "'%s' needs the files of the data in "
                         "dataset_kwargs.data_files",
                         key_text(h, "dataset_path"));
    h->own_examples |= !json_is_object(json_object_get(kwargs, "data_files"));
    if (split_files_add(h, task_file, split, &h->files, err) != OK) return err->code;
    return h->own_examples ? OK : split_files_add(h, task_file, shot_split, &h->shots, err);
}

/* Glob patterns of a split's files below the data folder: TASK/SPLIT*.jsonl and the like, for the
 * names of task, data set and subset. */
static char *split_patterns(const struct harness_task *h, const char *split) {
    const char *dataset = key_text(h, "dataset_path"), *slash = strrchr(dataset, '/');
    const char *const names[] = {h->name, key_text(h, "dataset_name"), slash ? slash + 1 : dataset};
    struct buf b = {0};
    buf_puts(&b, "");
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (names[i] && !strpbrk(names[i], " *?[\\"))
            buf_printf(&b, "%s%s/%s*.json* %s/%s*.csv", b.len ? " " : "", names[i], split, names[i],
                       split);
    return b.data;
}

static int data_set_find(struct harness_task *h, const char *data, const char *split,
                         const char *shot_split, struct error *err) {
    if (!data)
        return key_error(h, "dataset_path", err,
                         "'%s' is not downloaded; save its split '%s' as JSONL and name the file "
                         "with --data, or a folder that has '%s/%s.jsonl'",
                         key_text(h, "dataset_path"), split, h->name, split);
    if (path_exists(data) && !path_is_dir(data)) {
        strings_add(&h->files, data);
        h->own_examples = true;
        return OK;
    }
    h->patterns = split_patterns(h, split);
    h->shot_patterns = split_patterns(h, shot_split);
    return OK;
}

/* Finds the files of the questions and of the examples. */
static int data_find(struct harness_task *h, const char *task_file, const char *data,
                     struct error *err) {
    const json_t *fewshot = key_get(h, "fewshot_config");
    const char *const shot_splits[] = {json_string_value(json_object_get(fewshot, "split")),
                                       key_text(h, "fewshot_split"), key_text(h, "training_split"),
                                       key_text(h, "validation_split"), key_text(h, "test_split")};
    const char *dataset = key_text(h, "dataset_path"), *shot_split = NULL,
               *split = key_text(h, "test_split");
    if (!split) split = key_text(h, "validation_split");
    if (!dataset) return key_error(h, "dataset_path", err, "is missing");
    if (!split)
        return key_error(h, "test_split", err, "is missing; it names the split of the questions");
    for (size_t i = 0; !shot_split; i++) shot_split = shot_splits[i];
    h->own_examples = strcmp(split, shot_split) == 0;
    return is_local_format(dataset) ? data_files_read(h, task_file, split, shot_split, err)
                                    : data_set_find(h, data, split, shot_split, err);
}

static int fewshot_config_read(struct harness_task *h, struct error *err) {
    const json_t *config = key_get(h, "fewshot_config"), *n = key_get(h, "num_fewshot");
    const char *key, *sampler = json_string_value(json_object_get(config, "sampler"));
    json_t *value;
    h->n_shots = json_integer_value(n);
    if (n && (!json_is_integer(n) || h->n_shots < 0 || h->n_shots > MAX_SHOTS))
        return key_error(h, "num_fewshot", err, "must be an integer from 0 to %d", MAX_SHOTS);
    if (config && !json_is_object(config))
        return key_error(h, "fewshot_config", err, "must be a mapping");
    json_object_foreach ((json_t *)(uintptr_t)config, key, value)
        if (strcmp(key, "sampler") != 0 && strcmp(key, "samples") != 0 && strcmp(key, "split") != 0)
            return key_error(h, "fewshot_config", err,
                             "'%s' is not supported; 'sampler', 'samples' and 'split' are", key);
    if (sampler && strcmp(sampler, "first_n") != 0 && strcmp(sampler, "default") != 0)
        return key_error(h, "fewshot_config", err, "the sampler '%s' is not supported; use first_n",
                         sampler);
    h->samples = json_object_get(config, "split") ? NULL : json_object_get(config, "samples");
    return !h->samples || json_is_array(h->samples)
               ? OK
               : key_error(h, "fewshot_config", err, "'samples' must be a list of examples");
}

/* scoring */

static const struct harness_output {
    const char *name, *form;
    const char *metrics[3]; /* the metrics that are computed */
} outputs[] = {
    {"multiple_choice", "lm-evaluation-harness, multiple_choice", {"acc", "acc_norm", NULL}},
    {"loglikelihood", "lm-evaluation-harness, loglikelihood", {"acc", NULL}},
    {"generate_until", "lm-evaluation-harness, generate_until", {"exact_match", NULL}},
};

static const struct harness_output *output_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(outputs); i++)
        if (strcmp(outputs[i].name, name) == 0) return &outputs[i];
    return NULL;
}

static int output_type_read(struct harness_task *h, struct error *err) {
    const char *name = key_text(h, "output_type");
    const struct harness_output *o = output_find(name ? name : "generate_until");
    if (!o)
        return key_error(h, "output_type", err,
                         "'%s' is not supported; multiple_choice, "
                         "loglikelihood and generate_until are",
                         name);
    h->form = o->form;
    h->output_type = strcmp(o->name, "multiple_choice") == 0 ? EVAL_LOGLIKELIHOOD : EVAL_GENERATE;
    h->is_continuation = strcmp(o->name, "loglikelihood") == 0;
    if (h->output_type == EVAL_LOGLIKELIHOOD && !h->choice.value)
        return key_error(h, "doc_to_choice", err, "is missing; multiple_choice needs it");
    return OK;
}

static void step_add(json_t *steps, const char *name, json_t *options) {
    if (!options) options = json_object();
    json_object_set_new(options, "step", json_string(name));
    json_array_append_new(steps, options);
}

/* Adds the steps of exact_match's options, in the order in which they are applied. */
static int exact_match_read(const struct harness_task *h, const json_t *metric, json_t *steps,
                            struct error *err) {
    static const char *const options[][2] = {{"ignore_case", "lower"},
                                             {"ignore_punctuation", "punctuation"},
                                             {"ignore_numbers", "digits"}};
    static const char *const others[] = {"metric", "aggregation", "higher_is_better", "hf_evaluate",
                                         "regexes_to_ignore"};
    const json_t *patterns = json_object_get(metric, "regexes_to_ignore");
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)metric, key, value) {
        bool known = false;
        for (size_t i = 0; i < ARRAY_LEN(options); i++) known |= strcmp(options[i][0], key) == 0;
        for (size_t i = 0; i < ARRAY_LEN(others); i++) known |= strcmp(others[i], key) == 0;
        if (!known) return key_error(h, "metric_list", err, "exact_match has no option '%s'", key);
    }
    if (patterns && !json_is_string_array(patterns) && !json_is_null(patterns))
        return key_error(h, "metric_list", err, "'regexes_to_ignore' must be a list of patterns");
    for (size_t i = 0; i < json_array_size(patterns); i++)
        step_add(steps, "remove", json_pack("{s:O}", "pattern", json_array_get(patterns, i)));
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if (json_is_true(json_object_get(metric, options[i][0])))
            step_add(steps, options[i][1], NULL);
    return OK;
}

static bool metric_is_computed(const struct harness_output *o, const char *metric) {
    for (int i = 0; o->metrics[i]; i++)
        if (strcmp(o->metrics[i], metric) == 0) return true;
    return false;
}

static int metric_read(struct harness_task *h, const json_t *metric, json_t *steps,
                       struct error *err) {
    const char *name = json_get_string(metric, "metric"),
               *aggregation = json_string_value(json_object_get(metric, "aggregation"));
    if (aggregation && strcmp(aggregation, "mean") != 0)
        return key_error(h, "metric_list", err, "the mean of %s is computed, not '%s'", name,
                         aggregation);
    h->reports_acc_norm |= strcmp(name, "acc_norm") == 0;
    return strcmp(name, "exact_match") == 0 ? exact_match_read(h, metric, steps, err) : OK;
}

/* Reads the metrics, adds the steps of exact_match, and names the metrics that are not computed. */
static int metrics_read(struct harness_task *h, json_t *steps, struct error *err) {
    const json_t *list = key_get(h, "metric_list");
    const char *type = key_text(h, "output_type");
    const struct harness_output *o = output_find(type ? type : "generate_until");
    struct buf left_out = {0};
    int n_computed = 0, rc = OK;
    h->reports_acc_norm = !list && h->output_type == EVAL_LOGLIKELIHOOD;
    if (!list) return OK;
    if (!json_is_array(list)) return key_error(h, "metric_list", err, "must be a list");
    buf_puts(&left_out, "");
    for (size_t i = 0; rc == OK && i < json_array_size(list); i++) {
        const json_t *metric = json_array_get(list, i);
        const char *name = json_get_string(metric, "metric");
        bool computed = metric_is_computed(o, name);
        n_computed += computed;
        if (computed)
            rc = metric_read(h, metric, steps, err);
        else
            buf_printf(&left_out, "%s'%s'", left_out.len ? ", " : "", name);
    }
    if (rc == OK && n_computed == 0)
        rc = key_error(h, "metric_list", err, "no metric of %s is computed; %s%s%s would be",
                       o->name, o->metrics[0], o->metrics[1] ? " and " : "",
                       o->metrics[1] ? o->metrics[1] : "");
    if (rc == OK && left_out.len)
        log_info("%s: metrics that are not computed: %s", h->name, left_out.data);
    buf_release(&left_out);
    return rc;
}

/* A step of a filter; take_first and the like do nothing to a single answer. */
static int filter_step_read(const struct harness_task *h, const json_t *v, json_t *steps,
                            struct error *err) {
    static const char *const single[] = {"take_first", "majority_vote", "take_first_k"};
    static const char *const plain[][2] = {
        {"remove_whitespace", "strip"}, {"lowercase", "lower"}, {"uppercase", "upper"}};
    const char *name = json_get_string(v, "function");
    const json_t *pattern = json_object_get(v, "regex_pattern"),
                 *fallback = json_object_get(v, "fallback"),
                 *map = json_object_get(v, "mapping_dict"), *other = NULL;
    for (size_t i = 0; i < ARRAY_LEN(single); i++)
        if (strcmp(single[i], name) == 0) return OK;
    for (size_t i = 0; i < ARRAY_LEN(plain); i++)
        if (strcmp(plain[i][0], name) == 0) return step_add(steps, plain[i][1], NULL), OK;
    if (strcmp(name, "regex") == 0 && (!pattern || json_is_string(pattern)) &&
        (!fallback || json_is_string(fallback))) {
        step_add(steps, "regex",
                 json_pack("{s:s,s:I,s:s}", "pattern",
                           pattern ? json_string_value(pattern) : "#### (\\-?[0-9\\.\\,]+)",
                           "group", json_integer_value(json_object_get(v, "group_select")),
                           "fallback", fallback ? json_string_value(fallback) : "[invalid]"));
        return OK;
    }
    if (strcmp(name, "map") == 0 && json_is_object(map)) {
        other = json_object_get(v, "default_value");
        json_t *options = json_pack("{s:O}", "map", map);
        if (json_is_string(other)) json_object_set(options, "default", (json_t *)(uintptr_t)other);
        step_add(steps, "map", options);
        return OK;
    }
    return key_error(h, "filter_list", err,
                     "the filter '%s' is not supported; put a list of regex, remove_whitespace, "
                     "lowercase, uppercase and map first",
                     name);
}

/* Adds the steps of the first filter, and names the others, which are not computed. */
static int filters_read(const struct harness_task *h, json_t *steps, struct error *err) {
    const json_t *list = key_get(h, "filter_list"),
                 *first = json_object_get(json_array_get(list, 0), "filter");
    struct buf left_out = {0};
    if (!list) return OK;
    if (!json_is_array(first))
        return key_error(h, "filter_list", err, "must be a list of {name, filter: [...]}");
    for (size_t i = 0; i < json_array_size(first); i++)
        if (filter_step_read(h, json_array_get(first, i), steps, err) != OK) return err->code;
    for (size_t i = 1; i < json_array_size(list); i++)
        buf_printf(&left_out, "%s'%s'", left_out.len ? ", " : "",
                   json_get_string(json_array_get(list, i), "name"));
    if (left_out.len)
        log_info("%s: answers are filtered by '%s'; put another filter first to use it: %s",
                 h->name, json_get_string(json_array_get(list, 0), "name"), left_out.data);
    buf_release(&left_out);
    return OK;
}

/* Reads metrics and filters. A generated answer passes the filter, then the options of exact_match;
 * a gold answer only the latter. */
static int scoring_read(struct harness_task *h, struct error *err) {
    json_t *steps = json_array(), *gold_steps = json_array();
    int rc = metrics_read(h, gold_steps, err);
    if (rc == OK) rc = filters_read(h, steps, err);
    if (rc == OK && json_array_size(steps) > 0 &&
        (h->output_type != EVAL_GENERATE || h->is_continuation))
        rc = key_error(h, "filter_list", err, "is for generated answers only; leave it out");
    json_array_extend(steps, gold_steps);
    if (rc == OK && h->output_type == EVAL_GENERATE && !h->is_continuation) {
        h->filter = answer_filter_new(json_incref(steps), err);
        h->gold_filter = h->filter ? answer_filter_new(json_incref(gold_steps), err) : NULL;
        if (!h->gold_filter) rc = error_wrap(err, "task '%s'", h->name);
    }
    json_decref(steps);
    json_decref(gold_steps);
    return rc;
}

/* generation */

static int until_read(struct harness_task *h, const json_t *until, struct error *err) {
    if (json_is_string(until)) strings_add(&h->stops, json_string_value(until));
    for (size_t i = 0; i < json_array_size(until); i++) {
        const char *stop = json_string_value(json_array_get(until, i));
        if (!stop) break;
        if (*stop) strings_add(&h->stops, stop);
    }
    if (!until) strings_add(&h->stops, h->fewshot_delimiter);
    return !until || json_is_string(until) || json_is_string_array(until)
               ? OK
               : key_error(h, "generation_kwargs", err, "'until' must be a list of texts");
}

/* Reads an option besides `until` and those that sampling needs. */
static int generation_option_read(struct harness_task *h, const char *key, const json_t *v,
                                  struct error *err) {
    static const char *const limits[] = {"max_gen_toks", "max_new_tokens", "max_tokens",
                                         "max_completion_tokens"},
                             *const known[] = {"until", "do_sample", "temperature", "top_p",
                                               "top_k", "min_p",     "seed"};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strcmp(known[i], key) == 0) return OK;
    for (size_t i = 0; i < ARRAY_LEN(limits); i++) {
        if (strcmp(limits[i], key) != 0) continue;
        json_int_t n = json_integer_value(v);
        h->max_tokens = (int32_t)MIN(MAX(n, 0), MAX_TOKENS);
        return n >= 1 && n <= MAX_TOKENS ? OK
                                         : key_error(h, "generation_kwargs", err,
                                                     "'%s' must be from 1 to %d", key, MAX_TOKENS);
    }
    return key_error(h, "generation_kwargs", err, "'%s' is not supported; leave it out", key);
}

static int generation_read(struct harness_task *h, struct error *err) {
    const json_t *options = key_get(h, "generation_kwargs"),
                 *sample = json_object_get(options, "do_sample");
    const char *key;
    json_t *v;
    h->max_tokens = DEFAULT_TOKENS;
    if (h->output_type != EVAL_GENERATE || h->is_continuation) return OK;
    if (options && !json_is_object(options))
        return key_error(h, "generation_kwargs", err, "must be a mapping");
    json_object_foreach ((json_t *)(uintptr_t)options, key, v)
        if (generation_option_read(h, key, v, err) != OK) return err->code;
    if (json_is_true(sample) || (!sample && json_get_number(options, "temperature") > 0))
        return key_error(h, "generation_kwargs", err,
                         "answers are decoded greedily; set do_sample to false");
    return until_read(h, json_object_get(options, "until"), err);
}

/* opening */

static int field_read(struct harness_task *h, const char *key, struct harness_field *f,
                      struct error *err) {
    const json_t *v = key_get(h, key);
    *f = (struct harness_field){.key = key, .value = v};
    const char *text = json_string_value(v);
    if (v && !text && !json_is_integer(v) && !json_is_array(v) && !json_is_object(v))
        return key_error(h, key, err, "must be a column, a template or a list");
    if (!text || (f->template = jinja_parse_strict(text, strlen(text), err)) != NULL) return OK;
    const char *place = json_string_value(json_object_get(h->places, key));
    return error_wrap(err, "%s: '%s'", place, key);
}

static int fields_read(struct harness_task *h, struct error *err) {
    if (field_read(h, "doc_to_text", &h->text, err) != OK ||
        field_read(h, "doc_to_target", &h->target, err) != OK ||
        field_read(h, "doc_to_choice", &h->choice, err) != OK)
        return err->code;
    if (!h->text.value) return key_error(h, "doc_to_text", err, "is missing");
    if (!h->target.value) return key_error(h, "doc_to_target", err, "is missing");
    static const char print[] = "{{ value }}";
    return (h->print = jinja_parse_strict(print, sizeof print - 1, err)) ? OK : err->code;
}

static int description_read(struct harness_task *h, struct error *err) {
    const char *text = key_text(h, "description");
    h->description = text ? text : "";
    return strstr(h->description, "{{") || strstr(h->description, "{%")
               ? key_error(h, "description", err,
                           "is a template; write a text, or begin doc_to_text with it")
               : OK;
}

bool harness_task_detect(const json_t *root) {
    static const char *const keys[] = {"task",        "dataset_path", "doc_to_text",
                                       "output_type", "include",      "group"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        if (json_object_get(root, keys[i]) && !json_object_get(root, "file")) return true;
    return false;
}

int harness_task_open(struct harness_task *h, const struct yaml *y, const char *data,
                      struct error *err) {
    *h = (struct harness_task){.keys = json_object(), .places = json_object()};
    if (file_merge(h, y, 0, err) != OK) return err->code;
    nulls_remove(h->keys);
    const char *name = key_text(h, "task");
    h->name = xstrdup(name ? name : path_name(y->path));
    if (keys_check(h, err) != OK) return err->code;
    h->target_delimiter = key_get(h, "target_delimiter") ? key_text(h, "target_delimiter") : " ";
    h->fewshot_delimiter =
        key_get(h, "fewshot_delimiter") ? key_text(h, "fewshot_delimiter") : "\n\n";
    int rc = description_read(h, err);
    if (rc == OK) rc = fields_read(h, err);
    if (rc == OK) rc = output_type_read(h, err);
    if (rc == OK) rc = scoring_read(h, err);
    if (rc == OK) rc = generation_read(h, err);
    if (rc == OK) rc = fewshot_config_read(h, err);
    return rc == OK ? data_find(h, y->path, data, err) : rc;
}

void harness_task_release(struct harness_task *h) {
    jinja_free(h->text.template);
    jinja_free(h->target.template);
    jinja_free(h->choice.template);
    jinja_free(h->print);
    answer_filter_free(h->filter);
    answer_filter_free(h->gold_filter);
    strings_release(&h->files);
    strings_release(&h->shots);
    strings_release(&h->stops);
    free(h->patterns);
    free(h->shot_patterns);
    free(h->name);
    json_decref(h->keys);
    json_decref(h->places);
    *h = (struct harness_task){0};
}

/* questions */

/* The text that a template writes, as a JSON string; NULL: `err` is set. */
static json_t *template_render(const struct jinja *j, const json_t *vars, struct error *err) {
    struct jinja_output out;
    const struct jinja_input in = {.vars = vars, .now = -1};
    json_t *text = NULL;
    if (jinja_render(j, &in, &out, err) == OK && !(text = json_stringn(out.text, out.n)))
        error_set(err, ERR_FORMAT, "the text is not UTF-8");
    jinja_output_release(&out);
    return text;
}

/* The value of a field for a row, a new reference; NULL: `err` is set. */
static json_t *field_value(const struct harness_field *f, const json_t *row, struct error *err) {
    const char *text = json_string_value(f->value);
    json_t *v = NULL;
    if (!text) return json_incref((json_t *)(uintptr_t)f->value);
    if (!f->is_column)
        v = template_render(f->template, row, err);
    else if ((v = json_incref(json_object_get(row, text))) == NULL || json_is_null(v))
        error_set(err, ERR_FORMAT, "the column '%s' is missing", text);
    if (v && !json_is_null(v)) return v;
    json_decref(v);
    error_wrap(err, "'%s'", f->key);
    return NULL;
}

/* Python's str() of a value, malloc'ed; NULL: `err` is set. */
static char *value_text(const struct harness_task *h, const json_t *v, struct error *err) {
    if (json_is_string(v)) return xstrdup(json_string_value(v));
    json_t *vars = json_pack("{s:O}", "value", v), *text = template_render(h->print, vars, err);
    char *copy = text ? xstrdup(json_string_value(text)) : NULL;
    json_decref(vars);
    json_decref(text);
    return copy;
}

static bool is_digits(const char *s) {
    return *s && strspn(s, "0123456789") == strlen(s) && strlen(s) < 10;
}

/* The value of doc_to_text or doc_to_target. The text of a template is an index if it has only
 * digits and the task has choices; a target in brackets is a list. */
static json_t *field_value_typed(const struct harness_task *h, const struct harness_field *f,
                                 const json_t *row, struct error *err) {
    json_t *v = field_value(f, row, err), *typed = NULL;
    const char *text = f->template && !f->is_column ? json_string_value(v) : NULL;
    size_t n = text ? strlen(text) : 0;
    if (n && h->choice.value && is_digits(text))
        typed = json_integer(strtol(text, NULL, 10));
    else if (n >= 2 && f == &h->target && text[0] == '[' && text[n - 1] == ']')
        typed = python_literal_parse(text);
    if (!typed) return v;
    json_decref(v);
    return typed;
}

static int choices_set(const struct harness_task *h, json_t *list, struct eval_question *q,
                       struct error *err) {
    const char *key;
    json_t *item;
    size_t n = json_is_object(list) ? json_object_size(list) : json_array_size(list), i = 0;
    if (n < 2 || n > EVAL_MAX_OPTIONS)
        return error_set(err, ERR_FORMAT, "'doc_to_choice': %zu choices; 2 to %d are possible", n,
                         EVAL_MAX_OPTIONS);
    json_object_foreach (list, key, item)
        if (!(q->options[i++] = value_text(h, item, err))) return err->code;
    for (i = 0; json_is_array(list) && i < n; i++)
        if (!(q->options[i] = value_text(h, json_array_get(list, i), err))) return err->code;
    q->n = (int)n;
    return OK;
}

static int choices_read(const struct harness_task *h, const json_t *row, struct eval_question *q,
                        struct error *err) {
    json_t *v = field_value(&h->choice, row, err), *list = v;
    if (!v) return err->code;
    q->n = EVAL_MAX_OPTIONS; // so that choices are released after an error
    if (json_is_string(v)) list = python_literal_parse(json_string_value(v));
    int rc = list ? choices_set(h, list, q, err)
                  : error_set(err, ERR_FORMAT, "'doc_to_choice': '%.80s' must be a list of texts",
                              json_string_value(v));
    if (list != v) json_decref(list);
    json_decref(v);
    return rc;
}

/* The index of the choice that a target names; -1: none. */
static int target_index(const json_t *target, const struct eval_question *q) {
    json_int_t i = json_is_boolean(target) ? json_is_true(target) : -1;
    const char *text = json_string_value(target);
    if (json_is_integer(target)) i = json_integer_value(target);
    for (int k = 0; text && i < 0 && k < q->n; k++)
        if (strcmp(q->options[k], text) == 0) i = k;
    return i >= 0 && i < q->n ? (int)i : -1;
}

static int target_error(const struct harness_field *f, const json_t *v, int n, struct error *err) {
    char *text = json_canonical(v);
    error_set(err, ERR_FORMAT, "'%s': '%.80s' names none of the %d choices", f->key, text, n);
    free(text);
    return err->code;
}

/* The choices are contexts, of which `context` has the number of the right one; the target is
 * scored after each of them. */
static int contexts_set(const struct harness_task *h, const json_t *context, const json_t *target,
                        struct eval_question *q, struct error *err) {
    if ((q->correct = target_index(context, q)) < 0)
        return target_error(&h->text, context, q->n, err);
    if (h->reports_acc_norm)
        return error_set(err, ERR_FORMAT,
                         "acc_norm of a text after several contexts is not "
                         "computed; leave it out of 'metric_list'");
    char *text = value_text(h, target, err);
    for (int i = 0; text && i < q->n; i++) {
        q->contexts[i] = q->options[i];
        q->options[i] = xstrdup(text);
    }
    free(text);
    return text ? OK : err->code;
}

static int choice_question_set(const struct harness_task *h, const json_t *context,
                               const json_t *target, struct eval_question *q, struct error *err) {
    if (json_is_integer(context)) return contexts_set(h, context, target, q, err);
    if ((q->correct = target_index(target, q)) < 0)
        return target_error(&h->target, target, q->n, err);
    return (q->context = value_text(h, context, err)) ? OK : err->code;
}

/* The text that must follow the context. White space at the end of the context belongs to the
 * continuation, and is not compared. */
static int continuation_set(const struct harness_task *h, const json_t *context,
                            const json_t *target, struct eval_question *q, struct error *err) {
    char *text = value_text(h, context, err), *after = text ? value_text(h, target, err) : NULL;
    if (after) {
        size_t n = text_trimmed_len(text);
        q->example_answer = xasprintf("%s%s%s", text + n, h->target_delimiter, after);
        q->answer = text_trimmed(after);
        text[n] = 0;
        q->context = xstrdup(text);
    }
    free(text);
    free(after);
    return after ? OK : err->code;
}

/* A gold answer as the metric compares it, malloc'ed. */
static char *gold_text(const struct harness_task *h, const char *text) {
    struct buf b = {0};
    buf_puts(&b, "");
    answer_filter_apply(h->gold_filter, text, &b);
    return b.data;
}

static int golds_set(const struct harness_task *h, const json_t *golds, struct eval_question *q,
                     struct error *err) {
    size_t n = json_is_array(golds) ? json_array_size(golds) : 1;
    if (n == 0) return error_set(err, ERR_FORMAT, "'doc_to_target' is an empty list");
    for (size_t i = 0; i < n; i++) {
        char *text = value_text(h, json_is_array(golds) ? json_array_get(golds, i) : golds, err);
        if (!text) return err->code;
        char *gold = gold_text(h, text);
        if (i == 0) {
            q->example_answer = xasprintf("%s%s", h->target_delimiter, text);
            q->answer = xstrdup(gold);
        } else {
            strings_add(&q->aliases, gold);
        }
        free(gold);
        free(text);
    }
    return OK;
}

static void choices_release(struct eval_question *q) {
    for (int i = 0; i < q->n; i++) {
        free(q->options[i]);
        q->options[i] = NULL;
    }
    q->n = 0;
}

/* A question with a generated answer; with choices the target is the number of the right one. */
static int generate_question_set(const struct harness_task *h, const json_t *context,
                                 const json_t *target, struct eval_question *q, struct error *err) {
    json_t *gold = NULL;
    q->correct = -1;
    if (h->choice.value) {
        int index = target_index(target, q);
        if (index < 0) return target_error(&h->target, target, q->n, err);
        gold = json_string(q->options[index]);
        choices_release(q);
    }
    int rc = golds_set(h, gold ? gold : target, q, err);
    json_decref(gold);
    if (rc != OK) return rc;
    return (q->context = value_text(h, context, err)) ? OK : err->code;
}

static void columns_find(struct harness_task *h, const json_t *row) {
    struct harness_field *const fields[] = {&h->text, &h->target, &h->choice};
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        const char *text = json_string_value(fields[i]->value);
        fields[i]->is_column = text && json_object_get(row, text);
    }
    h->has_columns = true;
}

int harness_question_make(struct harness_task *h, const json_t *row, struct eval_question *q,
                          struct error *err) {
    if (!json_is_object(row)) return error_set(err, ERR_FORMAT, "the row is not a JSON object");
    if (!h->has_columns) columns_find(h, row);
    if (h->choice.value && choices_read(h, row, q, err) != OK) return err->code;
    json_t *context = field_value_typed(h, &h->text, row, err),
           *target = context ? field_value_typed(h, &h->target, row, err) : NULL;
    int rc = !target ? err->code
             : h->output_type == EVAL_LOGLIKELIHOOD
                 ? choice_question_set(h, context, target, q, err)
             : h->is_continuation ? continuation_set(h, context, target, q, err)
                                  : generate_question_set(h, context, target, q, err);
    json_decref(context);
    json_decref(target);
    return rc;
}

/* CSV */

/* An integer in its usual form is a number, an empty cell null. */
static json_t *cell_value(json_t *text) {
    const char *s = json_string_value(text);
    size_t len = json_string_length(text), sign = *s == '-', n = strspn(s + sign, "0123456789");
    bool integer = n > 0 && n < 19 && sign + n == len && (s[sign] != '0' || len == 1);
    if (len > 0 && !integer) return text;
    json_t *v = integer ? json_integer(strtoll(s, NULL, 10)) : json_null();
    json_decref(text);
    return v;
}

int harness_csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err) {
    return csv_objects_each(path, ',', cell_value, fn, ctx, err);
}
