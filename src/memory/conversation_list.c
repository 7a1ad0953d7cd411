/*
 * conversation_list: the conversations in a store: listing, reading, searching, renaming and
 * deleting them.
 *
 * The exchanges of a conversation are a log, whose events are {at, user, assistant}; their numbers
 * are those of the log. The first one follows `cleared`, which its document has. A document without
 * `last` is of version 0.1 and has no log: its exchanges are those in the document.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unicase.h>
#include <uninorm.h>
#include <unistr.h>

enum { PAGE = 256, TITLE_CHARS = 60 };

char *conversation_log_name(const char *id) {
    return xasprintf("conversation:%s", id);
}

static int64_t number_get(const json_t *document, const char *key) {
    return json_integer_value(json_object_get(document, key));
}

/* At most `limit` exchanges with numbers above `after`, with their numbers. */
static json_t *exchanges_read(struct store *s, const char *id, const json_t *document,
                              int64_t after, int64_t limit, struct error *err) {
    char *log = conversation_log_name(id);
    bool logged = json_object_get(document, "last") != NULL;
    json_t *list = logged      ? store_log_list(s, log, after, limit, err)
                   : after > 0 ? json_array()
                               : json_deep_copy(json_object_get(document, "exchanges")),
           *v;
    int64_t number = MAX(after, number_get(document, "cleared"));
    size_t i;
    json_array_foreach (list, i, v) json_object_set_new(v, "number", json_integer(++number));
    free(log);
    return list;
}

json_t *conversation_history(struct store *s, const char *id, int64_t after, int64_t limit,
                             struct error *err) {
    json_t *document = store_document_get(s, CONVERSATION_KIND, id, err);
    json_t *list = document ? exchanges_read(s, id, document, after, limit, err) : NULL;
    json_decref(document);
    return list;
}

/* The first line of a text, at most TITLE_CHARS characters of it. */
static json_t *title_of_text(const char *text) {
    size_t line = strcspn(text, "\r\n"), n = utf8_prefix_len(text, line, TITLE_CHARS);
    char *title = xasprintf("%.*s%s", (int)n, text, n < strlen(text) ? "…" : "");
    json_t *v = json_string(title);
    free(title);
    return v;
}

/* The first exchanges of a conversation: those of a document without log, or one. */
static json_t *first_exchanges(struct store *s, const char *id, bool logged, int64_t cleared,
                               struct error *err) {
    char *log = conversation_log_name(id);
    json_t *list = logged ? store_log_list(s, log, cleared, 1, err)
                          : conversation_history(s, id, 0, CONVERSATION_MAX_EXCHANGES, err);
    free(log);
    return list;
}

/* values: the title, the time of the last exchange, its number, and the number of exchanges that
 * were cleared. */
static json_t *entry_new(struct store *s, const char *id, json_t *values, struct error *err) {
    const json_t *last = json_array_get(values, 2);
    bool logged = json_is_integer(last);
    int64_t cleared = json_integer_value(json_array_get(values, 3));
    json_t *title = json_array_get(values, 0), *updated = json_array_get(values, 1),
           *first = first_exchanges(s, id, logged, cleared, err);
    if (!first) return NULL;
    int64_t end = logged ? json_integer_value(last) : (int64_t)json_array_size(first);
    title = json_is_string(title)
                ? json_incref(title)
                : title_of_text(json_get_string(json_array_get(first, 0), "user"));
    json_decref(first);
    return json_pack("{s:s,s:o,s:I,s:I,s:O}", "id", id, "title", title, "exchanges",
                     (json_int_t)(end - cleared), "last", (json_int_t)end, "updated", updated);
}

/* Entries ordered by the time of their last change, newest first, then by id. */
static int entries_compare(const void *a, const void *b) {
    const json_t *x = *(json_t *const *)a, *y = *(json_t *const *)b;
    int order = strcmp(json_get_string(y, "updated"), json_get_string(x, "updated"));
    return order ? order : strcmp(json_get_string(x, "id"), json_get_string(y, "id"));
}

static json_t *entries_sort(json_t *list) {
    size_t n = json_array_size(list), i;
    json_t **v = xcalloc(n + 1, sizeof *v), *entry, *sorted = json_array();
    json_array_foreach (list, i, entry) v[i] = entry;
    qsort(v, n, sizeof *v, entries_compare);
    for (i = 0; i < n; i++) json_array_append(sorted, v[i]);
    free(v);
    json_decref(list);
    return sorted;
}

json_t *conversation_list(struct store *s, const char *prefix, struct error *err) {
    static const char *const paths[STORE_PATHS] = {"$.title", "$.updated", "$.last", "$.cleared"};
    json_t *all = store_document_extract(s, CONVERSATION_KIND, prefix, paths, err), *values;
    json_t *list = json_array();
    int rc = all ? OK : err->code;
    const char *id;
    json_object_foreach (all, id, values) {
        json_t *entry = rc == OK ? entry_new(s, id, values, err) : NULL;
        if (rc == OK && !entry) rc = err->code;
        if (entry) json_array_append_new(list, entry);
    }
    json_decref(all);
    if (rc == OK) return entries_sort(list);
    json_decref(list);
    return NULL;
}

int conversation_bytes(struct store *s, const char *prefix, int64_t *bytes, struct error *err) {
    static const char *const paths[STORE_PATHS] = {"$.bytes"};
    json_t *all = store_document_extract(s, CONVERSATION_KIND, prefix, paths, err), *values;
    const char *id;
    *bytes = 0;
    json_object_foreach (all, id, values) *bytes += json_integer_value(json_array_get(values, 0));
    json_decref(all);
    return all ? OK : err->code;
}

/* A text in the form that is compared; malloc'ed. */
static char *text_fold(const char *text) {
    size_t n;
    uint8_t *folded =
        u8_casefold((const uint8_t *)text, strlen(text) + 1, NULL, UNINORM_NFKC, NULL, &n);
    CHECK(folded);
    return (char *)folded;
}

static bool text_contains(const json_t *exchange, const char *key, const char *folded) {
    char *text = text_fold(json_get_string(exchange, key));
    bool found = strstr(text, folded) != NULL;
    free(text);
    return found;
}

/* Appends the exchanges of a conversation that contain the text to `hits`, until it has `limit`. */
static int history_search(struct store *s, const char *id, const char *folded, int64_t limit,
                          json_t *hits, struct error *err) {
    int64_t after = 0;
    for (size_t n = PAGE; n == PAGE && (int64_t)json_array_size(hits) < limit;) {
        json_t *page = conversation_history(s, id, after, PAGE, err), *v;
        size_t i;
        if (!page) return err->code;
        n = json_array_size(page);
        json_array_foreach (page, i, v) {
            after = number_get(v, "number");
            if ((int64_t)json_array_size(hits) >= limit ||
                (!text_contains(v, "user", folded) && !text_contains(v, "assistant", folded)))
                continue;
            json_object_set_new(v, "id", json_string(id));
            json_array_append(hits, v);
        }
        json_decref(page);
    }
    return OK;
}

json_t *conversation_search(struct store *s, const char *prefix, const char *text, int64_t limit,
                            struct error *err) {
    if (u8_check((const uint8_t *)text, strlen(text))) {
        error_set(err, ERR_USAGE, "the text to search for is not UTF-8");
        return NULL;
    }
    json_t *list = conversation_list(s, prefix, err), *entry, *hits = json_array();
    char *folded = text_fold(text);
    int rc = list ? OK : err->code;
    size_t i;
    json_array_foreach (list, i, entry)
        if (rc == OK)
            rc = history_search(s, json_get_string(entry, "id"), folded, limit, hits, err);
    free(folded);
    json_decref(list);
    if (rc == OK) return hits;
    json_decref(hits);
    return NULL;
}

static int title_set(struct store *s, const char *id, json_t *title, struct error *err) {
    json_t *document = store_document_get(s, CONVERSATION_KIND, id, err);
    if (!document) return err->code;
    if (*json_string_value(title))
        json_object_set(document, "title", title);
    else
        json_object_del(document, "title");
    int rc = store_document_put(s, CONVERSATION_KIND, id, document, err);
    json_decref(document);
    return rc;
}

static int delete_all(struct store *s, const char *id, struct error *err) {
    json_t *document = store_document_get(s, CONVERSATION_KIND, id, err);
    char *log = conversation_log_name(id);
    int rc = document ? store_document_delete(s, CONVERSATION_KIND, id, err) : err->code;
    if (rc == OK) rc = store_log_delete(s, log, err);
    if (rc == OK) rc = store_log_delete(s, id, err); // the blackboard of its team
    free(log);
    json_decref(document);
    return rc;
}

static int finish(struct store *s, int rc, struct error *err) {
    if (rc == OK) rc = store_commit(s, err);
    if (rc != OK) store_rollback(s);
    return rc;
}

int conversation_rename(struct store *s, const char *id, const char *title, struct error *err) {
    json_t *text = json_string(title);
    int rc = text ? store_begin(s, err) : error_set(err, ERR_USAGE, "a title is not UTF-8 text");
    if (rc == OK) rc = finish(s, title_set(s, id, text, err), err);
    json_decref(text);
    return rc;
}

int conversation_delete(struct store *s, const char *id, struct error *err) {
    int rc = store_begin(s, err);
    return rc == OK ? finish(s, delete_all(s, id, err), err) : rc;
}
