/* policy_files: opens the policies of a run's last completed generation as adapters, and exports
 * one of them. */
#include "world/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_INITIAL = 4096 };

static int initial_adapters_add(struct initial_adapters *f, const char *path, struct model *m,
                                struct error *err) {
    if (f->n == MAX_INITIAL) return error_set(err, ERR_USAGE, "at most %d adapters", MAX_INITIAL);
    struct adapter *a = adapter_open(path, m, err);
    if (a) f->v[f->n++] = a;
    if (a) strings_add(&f->paths, path);
    return a ? OK : err->code;
}

static char *policy_path(const char *run, const json_t *policy, struct error *err) {
    char *path = simulation_policy_path(run, json_get_string(policy, "hash"), err);
    if (!path) error_wrap(err, "'%s/state.json'", run);
    return path;
}

int initial_adapters_open(struct initial_adapters *f, const struct strings *paths, struct model *m,
                          struct error *err) {
    int rc = OK;
    *f = (struct initial_adapters){.v = xcalloc(MAX_INITIAL, sizeof *f->v)};
    for (int i = 0; rc == OK && i < paths->n; i++) {
        struct error ignored;
        json_t *state = simulation_read_state(paths->v[i], &ignored), *policy;
        size_t k;
        if (!state) rc = initial_adapters_add(f, paths->v[i], m, err);
        json_array_foreach (json_object_get(state, "minds"), k, policy) {
            char *path = rc == OK ? policy_path(paths->v[i], policy, err) : NULL;
            if (rc == OK) rc = path ? initial_adapters_add(f, path, m, err) : err->code;
            free(path);
        }
        json_decref(state);
    }
    return rc;
}

void initial_adapters_release(struct initial_adapters *f) {
    for (int i = 0; i < f->n; i++) adapter_release(f->v[i]);
    free(f->v);
    strings_release(&f->paths);
}

json_t *world_manifest(struct model *m, const struct initial_adapters *f, const char *name,
                       json_t *environment, int64_t seed) {
    json_t *adapters = json_object(), *data = json_object();
    for (int i = 0; f && i < f->n; i++) manifest_add_hash(adapters, f->paths.v[i], f->v[i]->hash);
    manifest_add_json(data, name, environment);
    json_decref(environment);
    return manifest_json(m, adapters, data, seed);
}

static const json_t *policy_find(const json_t *state, const char *name) {
    const json_t *policies = json_object_get(state, "minds"), *policy;
    size_t i;
    if (!name) return json_array_get(policies, 0);
    json_array_foreach (policies, i, policy)
        if (strcmp(json_get_string(policy, "name"), name) == 0) return policy;
    return NULL;
}

json_t *simulation_export_policy(const char *runs, const char *run, const char *name,
                                 const char *out, struct error *err) {
    char *run_dir = path_is_dir(run) ? xstrdup(run) : path_join(runs, run), *policy_dir = NULL;
    json_t *state = simulation_read_state(run_dir, err), *record = NULL;
    const json_t *policy = policy_find(state, name);
    int rc = state ? OK : error_wrap(err, "'%s' is not a run of a world", run);
    if (rc == OK && !out) rc = error_set(err, ERR_USAGE, "--out DIR is missing");
    if (rc == OK && !policy)
        rc = error_set(err, ERR_MISSING, "'%s' has no policy '%s'", run, name ? name : "");
    if (rc == OK && !(policy_dir = policy_path(run_dir, policy, err))) rc = err->code;
    if (rc == OK) rc = dir_make(out, err);
    if (rc == OK) rc = file_copy(policy_dir, out, "adapter_model.safetensors", err);
    if (rc == OK) rc = file_copy(policy_dir, out, "adapter_config.json", err);
    if (rc == OK) record = json_deep_copy(policy);
    json_decref(state);
    free(policy_dir);
    free(run_dir);
    return record;
}
