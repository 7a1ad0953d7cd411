/*
 * facts: the memories of a user as facts, and the training lines of the facts.
 *
 * The lines are a function of the memories that hold: neither of their strength nor of the time.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "sleep/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static void memory_hash(const char *user, const json_t *memory, char out[HASH_LEN]) {
    json_t *v =
        json_pack("{s:s,s:O,s:O}", "user", user, "attribute", json_object_get(memory, "attribute"),
                  "value", json_object_get(memory, "value"));
    char *text = json_canonical(v);
    sha256_bytes(text, strlen(text), out);
    free(text);
    json_decref(v);
}

/* The index of the memory's fact, which is added if it is the first memory of its attribute and
 * language. */
static int fact_find(struct sleep_facts *f, const json_t *memory) {
    const char *attribute = json_get_string(memory, "attribute");
    const char *text = json_get_string(memory, "text"), *value = json_get_string(memory, "value");
    const enum language l = language_detect(*text ? text : value);
    int i = 0;
    if (!sleep_has_wordings(attribute)) return -1;
    while (i < f->n && (f->v[i].language != l || strcmp(f->v[i].attribute, attribute) != 0)) i++;
    if (i == f->n) f->v[f->n++] = (struct sleep_fact){.attribute = attribute, .language = l};
    return i;
}

static void memory_add(struct sleep_facts *f, const char *user, const json_t *memory) {
    struct sleep_memory *m = &f->memories[f->n_memories++];
    m->id = json_integer_value(json_object_get(memory, "id"));
    m->value = json_get_string(memory, "value");
    m->fact = fact_find(f, memory);
    memory_hash(user, memory, m->hash);
    if (m->fact < 0) return;
    struct sleep_fact *v = &f->v[m->fact];
    char *answer = v->answer;
    v->answer = answer ? xasprintf("%s%s%s", answer, sleep_separator(v->language), m->value)
                       : xstrdup(m->value);
    free(answer);
}

/* exports */

enum { MAX_EXPORTED = MEMORIES_MAX_CAPACITY };

/* Adds a memory of an export that holds. */
static int exported_add(void *ctx, const json_t *v, int line, struct error *err) {
    json_t *list = ctx;
    const char *value = json_get_string(v, "value");
    const size_t n = strlen(value);
    if (!json_is_integer(json_object_get(v, "id")) || !n ||
        utf8_prefix_len(value, n, MEMORY_VALUE_CHARS) < n ||
        !memory_attribute_find(json_get_string(v, "attribute")))
        return error_set(err, ERR_FORMAT,
                         "line %d is not a memory: use the lines of 'shoal memory export'", line);
    if (json_array_size(list) == MAX_EXPORTED)
        return error_set(err, ERR_FORMAT, "more than %d memories", MAX_EXPORTED);
    if (json_is_null(json_object_get(v, "valid_until")))
        json_array_append(list, (json_t *)(uintptr_t)v);
    return OK;
}

static json_t *export_read(const char *path, struct error *err) {
    json_t *list = json_array();
    if (json_file_each(path, exported_add, list, err) == OK) return list;
    json_decref(list);
    if (!strstr(err->text, path)) error_wrap(err, "'%s'", path);
    return NULL;
}

int sleep_memories_export(const json_t *list, const char *path, struct error *err) {
    struct buf text = {0};
    const json_t *v;
    size_t i;
    json_array_foreach (list, i, v) buf_add_json_line(&text, json_incref((json_t *)(uintptr_t)v));
    int rc = file_write_private(path, text.data ? text.data : "", text.len, err);
    buf_release(&text);
    return rc;
}

static json_t *memories_read(const struct sleep_options *o, struct error *err) {
    if (!path_exists(o->memory)) {
        error_set(err, ERR_MISSING,
                  "no database '%s'; 'shoal memory learn TEXT --store FILE' makes one", o->memory);
        return NULL;
    }
    if (text_ends_with(o->memory, ".jsonl")) return export_read(o->memory, err);
    struct store *store = store_open(o->memory, err);
    struct memories *m = store ? memories_open(store, o->user, 0, err) : NULL;
    json_t *list = m ? memories_list(m, false, err) : NULL;
    memories_close(m);
    store_close(store);
    return list;
}

int sleep_facts_open(const struct sleep_options *o, struct sleep_facts *out, struct error *err) {
    const json_t *v;
    size_t i;
    *out = (struct sleep_facts){.list = memories_read(o, err)};
    if (!out->list) return err->code;
    const size_t n = json_array_size(out->list) + 1;
    out->memories = xcalloc(n, sizeof *out->memories);
    out->v = xcalloc(n, sizeof *out->v);
    json_array_foreach (out->list, i, v) memory_add(out, o->user, v);
    return OK;
}

void sleep_facts_release(struct sleep_facts *f) {
    for (int i = 0; i < f->n; i++) free(f->v[i].answer);
    free(f->memories);
    free(f->v);
    json_decref(f->list);
    *f = (struct sleep_facts){0};
}

int sleep_facts_learnable(const struct sleep_facts *f) {
    int n = 0;
    for (int i = 0; i < f->n_memories; i++) n += f->memories[i].fact >= 0;
    return n;
}

bool sleep_facts_hold(const struct sleep_facts *f, const char *hash) {
    for (int i = 0; i < f->n_memories; i++)
        if (strcmp(f->memories[i].hash, hash) == 0) return true;
    return false;
}

void sleep_facts_write(const struct sleep_facts *f, struct buf *text) {
    for (int i = 0; i < f->n; i++)
        for (int k = 0; k < SLEEP_QUESTIONS; k++) {
            char *question = sleep_trained_question(f->v[i].language, f->v[i].attribute, k);
            json_t *turns = json_array();
            messages_add(turns, "user", question);
            messages_add(turns, "assistant", f->v[i].answer);
            messages_to_jsonl(text, turns);
            free(question);
        }
}

/* Han, kana and other scripts without blanks have no word boundaries here. */
static bool is_word_byte(char c) {
    return (unsigned char)c < 0x80 && isalnum((unsigned char)c);
}

bool sleep_answer_has(const char *answer, const char *value) {
    struct buf a = {0}, v = {0};
    bool found = false;
    text_normalize(answer, strlen(answer), &a);
    text_normalize(value, strlen(value), &v);
    for (const char *p = a.data; v.len > 0 && p && !found && (p = strstr(p, v.data)); p++) {
        const bool begins = p == a.data || !is_word_byte(p[-1]) || !is_word_byte(v.data[0]);
        const bool ends = !is_word_byte(p[v.len]) || !is_word_byte(v.data[v.len - 1]);
        found = begins && ends;
    }
    buf_release(&a);
    buf_release(&v);
    return found;
}
