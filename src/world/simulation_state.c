/*
 * simulation_state: saves and loads a simulation between two generations.
 *
 *     state.json         names and statistics of the policies, and the caller's `extra`
 *     minds/HASH/        adapters, by content hash, as PEFT directories
 *     critics-G.bin      critics of all policies after generation G
 *
 * state.json is replaced last and refers to everything else by hash, so after a kill at any moment
 * the folder holds either the previous generation or this one, complete. Files to which state.json
 * does not refer any more are removed afterwards.
 */
#define _GNU_SOURCE
#include "world/internal.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VERSION = 1, STATE_BYTES = 256 << 20 };

static const char *const episode_stats_names[] = {"fitness", "reward", "delivered", "collected",
                                                  "blocked", "steps",  "alive"};
_Static_assert(sizeof(struct episode_stats) == ARRAY_LEN(episode_stats_names) * sizeof(double),
               "a name for each field");

static json_t *episode_stats_json(const struct episode_stats *o) {
    json_t *v = json_object();
    for (size_t i = 0; i < ARRAY_LEN(episode_stats_names); i++)
        json_object_set_new(v, episode_stats_names[i], json_real(((const double *)o)[i]));
    return v;
}

static int number_read(const json_t *v, const char *key, double *out, struct error *err) {
    const json_t *n = json_object_get(v, key);
    if (!json_is_number(n))
        return error_set(err, ERR_FORMAT, "'%s' is missing or not a number", key);
    *out = json_number_value(n);
    return OK;
}

/* Reads an integer from 0 to `max`. */
static int count_read(const json_t *v, const char *key, int64_t max, int64_t *out,
                      struct error *err) {
    const json_t *n = json_object_get(v, key);
    *out = json_integer_value(n);
    if (json_is_integer(n) && *out >= 0 && *out <= max) return OK;
    return error_set(err, ERR_FORMAT, "'%s' must be a whole number from 0 to %lld", key,
                     (long long)max);
}

static int bool_read(const json_t *v, const char *key, bool *out, struct error *err) {
    const json_t *b = json_object_get(v, key);
    *out = json_is_true(b);
    return json_is_boolean(b) ? OK : error_set(err, ERR_FORMAT, "'%s' is not true or false", key);
}

static int episode_stats_read(const json_t *v, struct episode_stats *out, struct error *err) {
    int rc = OK;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(episode_stats_names); i++)
        rc = number_read(v, episode_stats_names[i], (double *)out + i, err);
    return rc;
}

static int health_read(const json_t *v, struct policy_health *out, struct error *err) {
    int64_t rollbacks = 0;
    int rc = count_read(v, "decisions", INT64_MAX, &out->decisions, err);
    if (rc == OK) rc = number_read(v, "entropy", &out->entropy, err);
    if (rc == OK) rc = number_read(v, "most_repeated", &out->most_repeated, err);
    if (rc == OK) rc = number_read(v, "reward", &out->reward, err);
    if (rc == OK) rc = number_read(v, "spread", &out->spread, err);
    if (rc == OK) rc = bool_read(v, "collapsed", &out->collapsed, err);
    if (rc == OK) rc = count_read(v, "rollbacks", INT32_MAX, &rollbacks, err);
    out->rollbacks = (int)rollbacks;
    return rc;
}

json_t *policy_record_json(const struct policy_record *m) {
    const struct policy_health *h = &m->health;
    json_t *parents = json_array();
    for (int k = 0; k < 2 && m->parents[k][0]; k++)
        json_array_append_new(parents, json_string(m->parents[k]));
    return json_pack("{s:s,s:s,s:o,s:b,s:o,s:{s:I,s:f,s:f,s:f,s:f,s:b,s:i}}", "name", m->name,
                     "hash", m->adapter->hash, "parents", parents, "elite", (int)m->elite,
                     "outcome", episode_stats_json(&m->outcome), "health", "decisions",
                     (json_int_t)h->decisions, "entropy", h->entropy, "most_repeated",
                     h->most_repeated, "reward", h->reward, "spread", h->spread, "collapsed",
                     (int)h->collapsed, "rollbacks", h->rollbacks);
}

/* saving */

/* Records the environment in which a policy learned, from the identity of its run; see run.c. */
static void lineage_set_environment(json_t *lineage, const json_t *identity) {
    json_t *rules = json_object_get(identity, "rules"),
           *environment = rules ? rules : json_object_get(identity, "environment");
    char hash[HASH_LEN];
    if (!environment) return;
    char *text = json_canonical(environment);
    sha256_bytes(text, strlen(text), hash);
    json_object_set_new(lineage, "environment_sha256", json_string(hash));
    json_object_set_new(lineage, "environment_seed",
                        json_sprintf("%lld", (long long)json_get_number(identity, "seed")));
    free(text);
}

/* The policy's adapter in f32, with base, environment and fitness in its lineage. */
static struct adapter *policy_adapter_with_origin(const struct simulation *s,
                                                  const struct policy_record *m,
                                                  const json_t *identity) {
    json_t *lineage = m->adapter->lineage ? json_copy(m->adapter->lineage) : json_object();
    if (!json_object_get(lineage, ADAPTER_BASE_HASH)) adapter_lineage_set_model(lineage, s->m);
    lineage_set_environment(lineage, identity);
    if (isfinite(m->outcome.fitness))
        json_object_set_new(lineage, "fitness", json_sprintf("%.9g", m->outcome.fitness));
    struct adapter *f32 = operator_set_lineage(adapter_to_f32(m->adapter), lineage);
    json_decref(lineage);
    return f32;
}

static int policy_adapter_save(const struct simulation *s, const char *dir,
                               const struct policy_record *m, const json_t *identity,
                               struct error *err) {
    const struct adapter *a = m->adapter;
    char *path = xasprintf("%s/minds/%s", dir, a->hash);
    int rc = OK;
    if (!adapter_exists(path)) { // adapter_save writes the configuration last
        struct adapter *f32 = policy_adapter_with_origin(s, m, identity);
        rc = adapter_save(f32, path, s->m->name, err);
        adapter_release(f32);
    }
    free(path);
    return rc;
}

/* Writes the critics of all policies, concatenated; zeros for a policy without one. */
static int critics_write(const struct simulation *s, const char *path, char hash[HASH_LEN],
                         struct error *err) {
    size_t critic_bytes = learner_critic_bytes(&s->o->learn),
           total_bytes = critic_bytes * (size_t)s->n_policies;
    uint8_t *bytes = try_calloc(1, total_bytes, err);
    if (!bytes) return err->code;
    for (int i = 0; i < s->n_policies; i++)
        if (s->policies[i].critic)
            memcpy(bytes + critic_bytes * (size_t)i, s->policies[i].critic, critic_bytes);
    sha256_bytes(bytes, total_bytes, hash);
    int rc = file_write(path, bytes, total_bytes, err);
    free(bytes);
    return rc;
}

static char *critics_path(const char *dir, int generation) {
    return xasprintf("%s/critics-%d.bin", dir, generation);
}

static bool is_referenced(const struct simulation *s, const char *hash) {
    for (int i = 0; i < s->n_policies; i++)
        if (strcmp(s->policies[i].adapter->hash, hash) == 0) return true;
    return false;
}

static void unreferenced_files_remove(const struct simulation *s, const char *dir) {
    char *policies_dir = path_join(dir, "minds"), *critics = critics_path(dir, s->generation - 1);
    DIR *d = opendir(policies_dir);
    for (const struct dirent *f; d && (f = readdir(d));) {
        char *path = path_join(policies_dir, f->d_name);
        if (hash_is_valid(f->d_name) && !is_referenced(s, f->d_name)) dir_delete(path);
        free(path);
    }
    if (d) closedir(d);
    unlink(critics);
    free(policies_dir);
    free(critics);
}

int simulation_save(const struct simulation *s, const char *dir, const json_t *extra,
                    struct error *err) {
    char hash[HASH_LEN], *path = path_join(dir, "state.json"),
                         *critics = critics_path(dir, s->generation);
    json_t *policies = json_array();
    int rc = dir_make(dir, err);
    for (int i = 0; rc == OK && i < s->n_policies; i++) {
        rc = policy_adapter_save(s, dir, &s->policies[i], json_object_get(extra, "identity"), err);
        json_array_append_new(policies, policy_record_json(&s->policies[i]));
    }
    if (rc == OK) rc = critics_write(s, critics, hash, err);
    if (rc == OK) {
        json_t *v = json_pack("{s:i,s:i,s:I,s:s,s:O,s:O}", "shoal_life", VERSION, "generation",
                              s->generation, "decisions", (json_int_t)s->decisions, "critics", hash,
                              "minds", policies, "extra", extra);
        if (s->o->curriculum) json_object_set_new(v, "map_size", json_integer(s->map_size));
        char *text = json_canonical(v);
        rc = file_write(path, text, strlen(text), err);
        free(text);
        json_decref(v);
    }
    if (rc == OK) unreferenced_files_remove(s, dir);
    json_decref(policies);
    free(critics);
    free(path);
    return rc;
}

/* loading */

static int name_read(const json_t *v, char out[32], struct error *err) {
    const char *name = json_is_string(v) ? json_string_value(v) : "";
    if (!*name || strlen(name) > 31)
        return error_set(err, ERR_FORMAT, "a policy has no name of at most 31 bytes");
    strcpy(out, name);
    return OK;
}

static int parents_read(const json_t *v, char out[2][32], struct error *err) {
    size_t n = json_array_size(v);
    if (!json_is_array(v) || n > 2)
        return error_set(err, ERR_FORMAT, "'parents' is not a list of at most two names");
    int rc = OK;
    for (size_t k = 0; rc == OK && k < n; k++) rc = name_read(json_array_get(v, k), out[k], err);
    return rc;
}

char *simulation_policy_path(const char *dir, const char *hash, struct error *err) {
    if (hash_is_valid(hash)) return xasprintf("%s/minds/%s", dir, hash);
    error_set(err, ERR_FORMAT, "'%s' is no hash", hash);
    return NULL;
}

static int adapter_read(const struct simulation *s, const char *dir, const char *hash,
                        struct adapter **out, struct error *err) {
    char *path = simulation_policy_path(dir, hash, err);
    if (!path) return err->code;
    int rc = (*out = adapter_load(path, &s->m->config, err)) ? OK : err->code;
    if (rc == OK && strcmp((*out)->hash, hash) != 0)
        rc = error_set(err, ERR_MISMATCH, "'%s' differs from the saved file", path);
    free(path);
    return rc;
}

static int policy_read(const struct simulation *s, const char *dir, const json_t *v,
                       struct policy_record *out, struct error *err) {
    int rc = name_read(json_object_get(v, "name"), out->name, err);
    if (rc == OK) rc = parents_read(json_object_get(v, "parents"), out->parents, err);
    if (rc == OK) rc = episode_stats_read(json_object_get(v, "outcome"), &out->outcome, err);
    if (rc == OK) rc = health_read(json_object_get(v, "health"), &out->health, err);
    if (rc == OK) rc = bool_read(v, "elite", &out->elite, err);
    if (rc == OK) rc = adapter_read(s, dir, json_get_string(v, "hash"), &out->adapter, err);
    if (rc == OK && s->o->low_memory)
        out->adapter = policy_to_f16(out->adapter, 0); // policies are f16
    return rc;
}

static int critics_read(const struct simulation *s, const char *path, const char *expected_hash,
                        struct policy_record *policies, struct error *err) {
    size_t critic_bytes = learner_critic_bytes(&s->o->learn),
           total_bytes = critic_bytes * (size_t)s->n_policies;
    char hash[HASH_LEN];
    struct buf b = {0};
    int rc = file_read(path, total_bytes, &b, err);
    if (rc == OK) sha256_bytes(b.data, b.len, hash);
    if (rc == OK && (b.len != total_bytes || strcmp(hash, expected_hash) != 0))
        rc = error_set(err, ERR_MISMATCH, "'%s' differs from the saved file", path);
    for (int i = 0; rc == OK && i < s->n_policies; i++) {
        policies[i].critic = xmalloc(critic_bytes);
        memcpy(policies[i].critic, b.data + critic_bytes * (size_t)i, critic_bytes);
    }
    buf_release(&b);
    return rc;
}

static int state_read(struct simulation *s, const char *dir, const json_t *v, struct error *err) {
    const json_t *policies = json_object_get(v, "minds");
    int64_t generation, decisions, map_size = 0;
    if (json_integer_value(json_object_get(v, "shoal_life")) != VERSION)
        return error_set(err, ERR_FORMAT, "it is not a simulation state of a known version");
    int rc = count_read(v, "generation", INT32_MAX - 1, &generation, err);
    if (rc == OK) rc = count_read(v, "decisions", INT64_MAX, &decisions, err);
    if (rc == OK && s->o->curriculum)
        rc = count_read(v, "map_size", s->envs[0]->map_size, &map_size, err);
    if (rc == OK && map_size && map_size < WORLD_SIDE_MIN)
        rc = error_set(err, ERR_FORMAT, "'map_size' must be at least %d", WORLD_SIDE_MIN);
    if (rc != OK) return rc;
    if (json_array_size(policies) != (size_t)s->n_policies)
        return error_set(err, ERR_MISMATCH, "it has %zu policies, and this simulation has %d",
                         json_array_size(policies), s->n_policies);
    struct policy_record *loaded = xcalloc((size_t)s->n_policies, sizeof *loaded);
    char *critics_file = critics_path(dir, (int)generation);
    for (int i = 0; rc == OK && i < s->n_policies; i++)
        rc = policy_read(s, dir, json_array_get(policies, (size_t)i), &loaded[i], err);
    if (rc == OK) rc = critics_read(s, critics_file, json_get_string(v, "critics"), loaded, err);
    if (rc == OK) {
        struct policy_record *old = s->policies;
        s->policies = loaded;
        loaded = old;
        s->generation = (int)generation;
        s->decisions = decisions;
        s->map_size = (int)map_size;
    }
    policy_records_release(loaded, s->n_policies);
    free(loaded);
    free(critics_file);
    return rc;
}

json_t *simulation_read_state(const char *dir, struct error *err) {
    char *path = path_join(dir, "state.json");
    struct buf b = {0};
    json_t *v = NULL;
    if (file_read(path, STATE_BYTES, &b, err) == OK) v = json_parse(b.data, b.len, path, err);
    buf_release(&b);
    free(path);
    return v;
}

int simulation_load(struct simulation *s, const char *dir, const json_t *state, struct error *err) {
    if (state_read(s, dir, state, err) == OK) return OK;
    return error_wrap(err, "'%s/state.json'", dir);
}
