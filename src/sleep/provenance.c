/*
 * provenance: which memories the versions of an adapter directory have learned, and the version
 * from which the next run starts.
 *
 * version.json of a version that a run published has
 *
 *     "sleep": {"user": …, "base": HASH or "", "memories": [{"id": …, "hash": …, …}], …}
 *
 * A memory holds if the user has one with the same attribute and value now: its id may change when
 * it is exported and imported. Whether a version knows a forgotten memory is computed from the
 * memories each time, so that it cannot be out of date.
 */
#define _GNU_SOURCE
#include "sleep/internal.h"

#include <stdlib.h>
#include <string.h>

static const json_t *learned_list(const json_t *version) {
    return json_object_get(json_object_get(version, "sleep"), "memories");
}

/* Ids of the memories that a version has learned and that no longer hold. */
static json_t *forgotten_list(const struct sleep_facts *f, const json_t *version) {
    json_t *list = json_array();
    const json_t *m;
    size_t i;
    json_array_foreach (learned_list(version), i, m)
        if (!sleep_facts_hold(f, json_get_string(m, "hash")))
            json_array_append(list, json_object_get(m, "id"));
    return list;
}

static bool version_has(const json_t *version, const char *hash) {
    const json_t *m;
    size_t i;
    json_array_foreach (learned_list(version), i, m)
        if (strcmp(json_get_string(m, "hash"), hash) == 0) return true;
    return false;
}

/* Ids of the memories of facts that a version (NULL: none) has not learned. */
static json_t *unlearned_list(const struct sleep_facts *f, const json_t *version) {
    json_t *list = json_array();
    for (int i = 0; i < f->n_memories; i++)
        if (f->memories[i].fact >= 0 && !version_has(version, f->memories[i].hash))
            json_array_append_new(list, json_integer((json_int_t)f->memories[i].id));
    return list;
}

static const json_t *version_find(const json_t *versions, const char *hash) {
    const json_t *v;
    size_t i;
    json_array_foreach (versions, i, v)
        if (strcmp(json_get_string(v, "hash"), hash) == 0) return v;
    return NULL;
}

static const json_t *version_current(const json_t *versions) {
    const json_t *v;
    size_t i;
    json_array_foreach (versions, i, v)
        if (json_is_true(json_object_get(v, "current"))) return v;
    return NULL;
}

static json_t *version_row(const struct sleep_facts *f, const json_t *v) {
    const json_t *sleep = json_object_get(v, "sleep");
    return json_pack(
        "{s:O,s:O?,s:O?,s:O,s:I,s:o,s:O,s:O?,s:O?}", "hash", json_object_get(v, "hash"), "number",
        json_object_get(v, "number"), "created", json_object_get(v, "created"), "current",
        json_object_get(v, "current"), "memories", (json_int_t)json_array_size(learned_list(v)),
        "forgotten", forgotten_list(f, v), "learned", learned_list(v), "recall",
        json_object_get(sleep, "recall"), "retention", json_object_get(sleep, "retention"));
}

/* The rows of the versions that learned memories. */
static json_t *versions_report(const struct sleep_facts *f, const json_t *versions) {
    json_t *rows = json_array();
    const json_t *v;
    size_t i;
    json_array_foreach (versions, i, v)
        if (json_is_array(learned_list(v))) json_array_append_new(rows, version_row(f, v));
    return rows;
}

/* The hash of the adapter in a directory or file. */
static int adapter_hash(const char *path, const struct model_config *shape, char hash[HASH_LEN],
                        struct error *err) {
    struct adapter *a = adapter_load(path, shape, err);
    if (!a) return err->code;
    memcpy(hash, a->hash, HASH_LEN);
    adapter_release(a);
    return OK;
}

/* Starts from the base adapter, because the current version knows forgotten memories. */
static int start_at_base(const struct sleep_options *o, struct sleep_start *s,
                         const json_t *versions, struct error *err) {
    memcpy(s->hash, s->base, HASH_LEN);
    if (!s->base[0]) return OK;
    if (version_find(versions, s->base)) {
        s->dir = xasprintf("%s/.versions/%s", o->learn.out, s->base);
        return OK;
    }
    if (o->learn.init_adapter) {
        s->dir = xstrdup(o->learn.init_adapter);
        return OK;
    }
    return error_set(
        err, ERR_MISSING,
        "the adapter before the first sleep, %.12s, is missing in the versions of '%s'; "
        "name it with --init-adapter DIR",
        s->base, o->learn.out);
}

/* Starts from the version in --out. */
static int start_at_current(const struct sleep_options *o, const struct sleep_facts *f,
                            const struct model_config *shape, struct sleep_start *s,
                            const json_t *versions, struct error *err) {
    const json_t *current = version_current(versions), *sleep = json_object_get(current, "sleep");
    if (!sleep) {
        s->dir = xstrdup(o->learn.out);
        if (adapter_hash(s->dir, shape, s->hash, err) != OK) return err->code;
        memcpy(s->base, s->hash, HASH_LEN);
        return OK;
    }
    const char *user = json_get_string(sleep, "user"), *base = json_get_string(sleep, "base");
    if (strcmp(user, o->user) != 0)
        return error_set(err, ERR_USAGE,
                         "'%s' has learned the memories of user '%s', not of '%s'; each user needs "
                         "another --out",
                         o->learn.out, user, o->user);
    if (*base && !hash_is_valid(base))
        return error_set(err, ERR_FORMAT, "the current version of '%s' names no valid base",
                         o->learn.out);
    snprintf(s->base, sizeof s->base, "%s", base);
    json_t *forgotten = forgotten_list(f, current);
    s->knows_forgotten = json_array_size(forgotten) > 0;
    json_decref(forgotten);
    if (s->knows_forgotten) return start_at_base(o, s, versions, err);
    s->dir = xstrdup(o->learn.out);
    snprintf(s->hash, sizeof s->hash, "%s", json_get_string(current, "hash"));
    s->up_to_date = json_array_size(s->unlearned) == 0;
    return OK;
}

/* A repeated command names the same initial adapter; another one would be ignored. */
static int init_adapter_check(const struct sleep_options *o, const struct model_config *shape,
                              const struct sleep_start *s, struct error *err) {
    char hash[HASH_LEN];
    if (!o->learn.init_adapter) return OK;
    if (adapter_hash(o->learn.init_adapter, shape, hash, err) != OK) return err->code;
    if (strcmp(hash, s->base) == 0) return OK;
    return error_set(err, ERR_USAGE,
                     "'%s' was not made from --init-adapter '%s'; choose another "
                     "--out, or leave --init-adapter out",
                     o->learn.out, o->learn.init_adapter);
}

static int start_find(const struct sleep_options *o, const struct sleep_facts *f,
                      const struct model_config *shape, struct sleep_start *s,
                      const json_t *versions, struct error *err) {
    int rc = OK;
    if (adapter_exists(o->learn.out)) {
        rc = start_at_current(o, f, shape, s, versions, err);
        if (rc == OK) rc = init_adapter_check(o, shape, s, err);
    } else if (o->learn.init_adapter) {
        s->dir = xstrdup(o->learn.init_adapter);
        rc = adapter_hash(s->dir, shape, s->hash, err);
        memcpy(s->base, s->hash, HASH_LEN);
    }
    return rc;
}

int sleep_start_find(const struct sleep_options *o, const struct sleep_facts *f,
                     const struct model_config *shape, struct sleep_start *out, struct error *err) {
    json_t *versions = adapter_versions(o->learn.out, err);
    *out = (struct sleep_start){0};
    if (!versions) return err->code;
    out->versions = versions_report(f, versions);
    out->unlearned = unlearned_list(f, version_current(versions));
    int rc = start_find(o, f, shape, out, versions, err);
    json_decref(versions);
    return rc;
}

void sleep_start_release(struct sleep_start *s) {
    json_decref(s->versions);
    json_decref(s->unlearned);
    free(s->dir);
    *s = (struct sleep_start){0};
}

/* status */

json_t *sleep_status(const struct sleep_options *o, struct error *err) {
    struct sleep_facts f = {0};
    json_t *versions = NULL, *v = NULL;
    int rc = sleep_facts_open(o, &f, err);
    if (rc == OK) versions = adapter_versions(o->learn.out, err);
    if (versions)
        v = json_pack("{s:s,s:i,s:o,s:o}", "user", o->user, "memories", f.n_memories, "versions",
                      versions_report(&f, versions), "unlearned",
                      unlearned_list(&f, version_current(versions)));
    json_decref(versions);
    sleep_facts_release(&f);
    return v;
}

static void ids_print(const char *label, const json_t *ids, FILE *f) {
    const json_t *id;
    size_t i;
    if (json_array_size(ids) == 0) return;
    fprintf(f, "%s", label);
    json_array_foreach (ids, i, id) fprintf(f, " %lld", (long long)json_integer_value(id));
    fprintf(f, "\n");
}

bool sleep_forgotten_print(const json_t *versions, FILE *f) {
    const json_t *v;
    size_t i;
    bool any = false;
    json_array_foreach (versions, i, v) {
        const json_t *ids = json_object_get(v, "forgotten");
        char *label =
            xasprintf("version %lld, %.12s, has learned memories that no longer hold:",
                      (long long)json_get_number(v, "number"), json_get_string(v, "hash"));
        ids_print(label, ids, f);
        free(label);
        any |= json_array_size(ids) > 0;
    }
    return any;
}

void sleep_status_print(const json_t *status, FILE *f) {
    const json_t *v;
    size_t i;
    fprintf(f, "user '%s': %lld memories\n", json_get_string(status, "user"),
            (long long)json_get_number(status, "memories"));
    json_array_foreach (json_object_get(status, "versions"), i, v)
        fprintf(f, "version %lld  %.12s  %s  %lld memories%s\n",
                (long long)json_get_number(v, "number"), json_get_string(v, "hash"),
                json_get_string(v, "created"), (long long)json_get_number(v, "memories"),
                json_is_true(json_object_get(v, "current")) ? ", current" : "");
    ids_print("not learned by the current version:", json_object_get(status, "unlearned"), f);
    if (sleep_forgotten_print(json_object_get(status, "versions"), f))
        fprintf(f, "the next sleep trains from an adapter that does not know them\n");
}
