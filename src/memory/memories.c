/*
 * memories: the long-term memories of a user in a store: learning, ending, pruning, undoing and
 * deleting them. The rules that find facts are in memory_rules.c, the search in memory_search.c.
 *
 * In the store a memory is a document of the kind "memory:USER". Every change of memories is also
 * an event of the log "memory:USER":
 *
 *     {change, operation, at, id, before, after}      before, after: the memory, or null
 *
 * `change` is the number of the first event of the call that made it, and the same for all events
 * of that call, which memories_undo takes back together. The document "memory"/USER has the number
 * of the last event, the next id and the conversations that are role plays. A document of the kind
 * "memory-vector:USER" is a memory's embedding (memory_search.c).
 *
 * Invariants. 1. Documents, log and numbers change in one transaction, which begins with reading
 * the events of other processes: no change is lost. 2. A state that applies the events above its
 * number `last` in order is the state of the documents, except for the counts of uses, which the
 * log omits. 3. An id is never given again.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unicase.h>
#include <uninorm.h>
#include <unistr.h>

enum { PAGE = 256, MAX_ROLE_PLAYS = 64, REFUSED_CHARS = 200, TEXT_CHARS = 500 };
#define STATE_KIND "memory"

/* reading */

int64_t memory_seconds(const char *time) {
    struct tm tm = {0};
    const char *end = time ? strptime(time, "%Y-%m-%dT%H:%M:%SZ", &tm) : NULL;
    return end && !*end ? MAX((int64_t)timegm(&tm), 0) : -1;
}

int64_t memory_id(const json_t *memory) {
    return json_integer_value(json_object_get(memory, "id"));
}

void memory_key(char key[MEMORY_KEY], int64_t id) {
    snprintf(key, MEMORY_KEY, "%lld", (long long)id);
}

static bool holds(const json_t *memory) {
    return json_is_null(json_object_get(memory, "valid_until"));
}

/* The first index whose id is not below `id`. */
static int64_t position(const struct memories *m, int64_t id) {
    int64_t lo = 0, hi = m->n;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (memory_id(m->v[mid]) < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int64_t memories_find(const struct memories *m, int64_t id) {
    int64_t i = position(m, id);
    return i < m->n && memory_id(m->v[i]) == id ? i : -1;
}

/* Replaces the memory of an id in the state; NULL removes it. Borrows `memory`. */
static void state_set(struct memories *m, int64_t id, json_t *memory) {
    int64_t i = position(m, id);
    bool known = i < m->n && memory_id(m->v[i]) == id;
    if (known) json_decref(m->v[i]);
    if (known && !memory) {
        m->n--;
        memmove(m->v + i, m->v + i + 1, sizeof *m->v * (size_t)(m->n - i));
    }
    if (!memory) return;
    if (!known) {
        if (m->n == m->cap) m->v = xrealloc(m->v, sizeof *m->v * (size_t)(m->cap += m->cap + 64));
        memmove(m->v + i + 1, m->v + i, sizeof *m->v * (size_t)(m->n - i));
        m->n++;
    }
    m->v[i] = json_incref(memory);
}

static void state_clear(struct memories *m) {
    for (int64_t i = 0; i < m->n; i++) json_decref(m->v[i]);
    m->n = 0;
    m->loaded = false;
}

/* Checks the members of a memory of the store, or of a file to import. */
static bool memory_is_valid(const json_t *v) {
    static const char *const texts[] = {"attribute", "value", "text", "valid_from", "last_stated"};
    static const char *const sources[] = {"conversation", "speaker", "time"};
    const json_t *source = json_object_get(v, "source"), *until = json_object_get(v, "valid_until"),
                 *used = json_object_get(v, "last_used"),
                 *importance = json_object_get(v, "importance");
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        if (!json_is_string(json_object_get(v, texts[i]))) return false;
    for (size_t i = 0; i < ARRAY_LEN(sources); i++)
        if (!json_is_string(json_object_get(source, sources[i]))) return false;
    return json_is_integer(json_object_get(v, "id")) &&
           json_is_integer(json_object_get(v, "uses")) &&
           json_integer_value(json_object_get(v, "uses")) >= 0 &&
           json_is_integer(json_object_get(v, "stated")) &&
           json_is_integer(json_object_get(source, "turn")) &&
           (json_is_null(until) || json_is_string(until)) &&
           (json_is_null(used) || json_is_string(used)) && json_is_number(importance) &&
           json_number_value(importance) >= 0 && json_number_value(importance) <= 1;
}

/* Reads the numbers of the state; they are 0 and 1 for a new user. After memories_delete_all the
 * numbers begin again, with another epoch. */
static int numbers_read(struct memories *m, int64_t *last, struct error *err) {
    json_t *v = store_document_get(m->store, STATE_KIND, m->user, err);
    if (!v && err->code != ERR_MISSING) return err->code;
    int64_t epoch = json_integer_value(json_object_get(v, "epoch"));
    if (epoch != m->epoch) state_clear(m);
    m->epoch = epoch;
    *last = json_integer_value(json_object_get(v, "last"));
    m->next = MAX(json_integer_value(json_object_get(v, "next")), 1);
    json_decref(m->pretence);
    m->pretence = json_is_array(json_object_get(v, "pretence"))
                      ? json_incref(json_object_get(v, "pretence"))
                      : json_array();
    json_decref(v);
    return OK;
}

static int documents_load(struct memories *m, struct error *err) {
    json_t *all = store_document_list(m->store, m->kind, err), *v;
    int rc = all ? OK : err->code;
    const char *key;
    json_object_foreach (all, key, v) {
        if (rc == OK && !memory_is_valid(v))
            rc = error_set(err, ERR_FORMAT, "memory %s of user '%s' is damaged", key, m->user);
        if (rc == OK) state_set(m, memory_id(v), v);
    }
    json_decref(all);
    return rc;
}

int memories_refresh(struct memories *m, struct error *err) {
    int64_t last = 0;
    int rc = numbers_read(m, &last, err);
    if (rc == OK && !m->loaded) {
        m->last = last;
        rc = documents_load(m, err);
        m->loaded = rc == OK;
        if (rc != OK) state_clear(m);
    }
    for (size_t n = PAGE; rc == OK && n == PAGE && m->last < last;) {
        json_t *events = store_log_list(m->store, m->log, m->last, PAGE, err), *e;
        size_t i;
        if (!events) return err->code;
        n = json_array_size(events);
        json_array_foreach (events, i, e) {
            json_t *after = json_object_get(e, "after");
            state_set(m, memory_id(e), json_is_object(after) ? after : NULL);
        }
        m->last += (int64_t)n;
        json_decref(events);
    }
    return rc;
}

static bool user_is_valid(const char *user) {
    size_t n = strlen(user);
    for (const char *p = user; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 0x7f) return false;
    return n && n <= MEMORIES_USER_BYTES && !u8_check((const uint8_t *)user, n);
}

struct memories *memories_open(struct store *s, const char *user, int64_t capacity,
                               struct error *err) {
    CHECK(capacity >= 0 && capacity <= MEMORIES_MAX_CAPACITY);
    if (!user_is_valid(user)) {
        error_set(err, ERR_USAGE,
                  "the name of a user has 1 to %d bytes of UTF-8 without control characters",
                  MEMORIES_USER_BYTES);
        return NULL;
    }
    struct memories *m = xcalloc(1, sizeof *m);
    *m = (struct memories){.store = s,
                           .user = xstrdup(user),
                           .kind = xasprintf("memory:%s", user),
                           .vector_kind = xasprintf("memory-vector:%s", user),
                           .log = xasprintf("memory:%s", user),
                           .capacity = capacity ? capacity : MEMORIES_CAPACITY};
    if (memories_refresh(m, err) == OK) return m;
    memories_close(m);
    return NULL;
}

void memories_close(struct memories *m) {
    if (!m) return;
    state_clear(m);
    memories_forget_index(m);
    json_decref(m->pretence);
    free(m->v);
    free(m->user);
    free(m->kind);
    free(m->vector_kind);
    free(m->log);
    free(m);
}

int memories_count(struct store *s, const char *user, int64_t *n, struct error *err) {
    char *kind = xasprintf("memory:%s", user);
    int rc = store_document_count(s, kind, "", n, err);
    free(kind);
    return rc;
}

int64_t memories_events(const struct memories *m) {
    return m->last;
}

/* changes */

/* A change in progress: a transaction is open. */
struct change {
    struct memories *m;
    const char *operation, *at;
    json_t *events;
    int64_t undoes; /* the change that it takes back; 0: none */
};

static int change_begin(struct change *c, struct memories *m, const char *operation, const char *at,
                        struct error *err) {
    *c = (struct change){.m = m, .operation = operation, .at = at, .events = json_array()};
    int rc = store_begin(m->store, err);
    if (rc == OK && (rc = memories_refresh(m, err)) != OK) store_rollback(m->store);
    if (rc != OK) json_decref(c->events);
    return rc;
}

/* Replaces `before` by `after` (either may be NULL) in state and store. Takes ownership of `after`.
 */
static int change_put(struct change *c, int64_t id, json_t *before, json_t *after,
                      struct error *err) {
    char key[MEMORY_KEY];
    struct memories *m = c->m;
    memory_key(key, id);
    json_t *event = json_pack("{s:I,s:s,s:s,s:I,s:O?,s:O?}", "change", (json_int_t)(m->last + 1),
                              "operation", c->operation, "at", c->at, "id", (json_int_t)id,
                              "before", before, "after", after);
    CHECK(event);
    if (c->undoes) json_object_set_new(event, "undoes", json_integer(c->undoes));
    json_array_append_new(c->events, event);
    int rc = after ? store_document_put(m->store, m->kind, key, after, err)
                   : store_document_delete(m->store, m->kind, key, err);
    if (rc == OK && !after) rc = store_document_delete(m->store, m->vector_kind, key, err);
    state_set(m, id, after);
    json_decref(after);
    return rc;
}

static int numbers_write(struct memories *m, struct error *err) {
    while (!m->epoch) {
        uint32_t random = 0;
        if (getrandom(&random, sizeof random, 0) < 0)
            return error_errno(err, "cannot make a random number");
        m->epoch = random;
    }
    json_t *v =
        json_pack("{s:I,s:I,s:I,s:O}", "epoch", (json_int_t)m->epoch, "last", (json_int_t)m->last,
                  "next", (json_int_t)m->next, "pretence", m->pretence);
    int rc = store_document_put(m->store, STATE_KIND, m->user, v, err);
    json_decref(v);
    return rc;
}

/* Ends the transaction. After an error nothing is changed, and the state is read again. */
static int change_end(struct change *c, int rc, struct error *err) {
    struct memories *m = c->m;
    size_t n = json_array_size(c->events);
    if (rc == OK && n) rc = store_log_append(m->store, m->log, m->last + 1, c->events, err);
    if (rc == OK) m->last += (int64_t)n;
    if (rc == OK) rc = numbers_write(m, err);
    if (rc == OK) rc = store_commit(m->store, err);
    if (rc != OK) {
        store_rollback(m->store);
        state_clear(m);
    }
    json_decref(c->events);
    return rc;
}

/* A copy with some members replaced; `with` is consumed. */
static json_t *memory_with(const json_t *memory, json_t *with) {
    json_t *v = json_copy((json_t *)(uintptr_t)memory);
    json_object_update(v, with);
    json_decref(with);
    return v;
}

/* learning */

/* The form in which values are compared: NFKC, folded case; without punctuation and articles, and
 * without spaces unless they are kept. malloc'ed. */
static char *value_fold(const char *value, bool spaces) {
    size_t n;
    uint8_t *folded =
        u8_casefold((const uint8_t *)value, strlen(value) + 1, NULL, UNINORM_NFKC, NULL, &n);
    CHECK(folded);
    struct buf b = {0};
    buf_puts(&b, (const char *)folded);
    buf_puts(&b, "");
    free(folded);
    pattern_replace("^(?:the|an?) (?=.)|\\p{P}", "", &b);
    if (!spaces) pattern_replace("\\s+", "", &b);
    return b.data;
}

static bool values_are_equal(const char *a, const char *b) {
    char *x = value_fold(a, false), *y = value_fold(b, false);
    bool equal = strcmp(x, y) == 0;
    free(x);
    free(y);
    return equal;
}

static bool is_latin(int c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

/* Whether `part` occurs in `text` as whole words, except for an ending "s"; in scripts without
 * spaces anywhere. */
static bool value_contains(const char *text, const char *part) {
    char *x = value_fold(text, true), *y = value_fold(part, true);
    size_t n = strlen(y);
    bool found = false;
    for (const char *p = x; n && !found && (p = strstr(p, y)); p++) {
        const char *end = p + n + (p[n] == 's');
        found = !(p > x && is_latin(p[-1]) && is_latin(y[0])) &&
                !(is_latin(y[n - 1]) && is_latin(*end));
    }
    free(x);
    free(y);
    return found;
}

static bool values_overlap(const char *a, const char *b) {
    return value_contains(a, b) || value_contains(b, a);
}

/* Learning of one turn. */
struct learning {
    struct change change;
    const struct memory_turn *turn;
    json_t *result; /* {added, merged, ended, pruned, refused} */
};

static void result_add(struct learning *l, const char *list, json_t *memory) {
    json_array_append(json_object_get(l->result, list), memory);
}

static int memory_end(struct learning *l, json_t *memory, struct error *err) {
    json_t *after = memory_with(memory, json_pack("{s:s}", "valid_until", l->change.at));
    result_add(l, "ended", after);
    return change_put(&l->change, memory_id(memory), memory, after, err);
}

static int memory_merge(struct learning *l, json_t *memory, struct error *err) {
    json_int_t stated = json_integer_value(json_object_get(memory, "stated")) + 1;
    json_t *after =
        memory_with(memory, json_pack("{s:I,s:s}", "stated", stated, "last_stated", l->change.at));
    result_add(l, "merged", after);
    return change_put(&l->change, memory_id(memory), memory, after, err);
}

static int memory_add(struct learning *l, const struct memory_attribute *a, const char *value,
                      const char *text, struct error *err) {
    struct memories *m = l->change.m;
    const struct memory_turn *t = l->turn;
    int64_t id = m->next++;
    json_t *sentence = json_string_lossy(text, utf8_prefix_len(text, strlen(text), TEXT_CHARS));
    json_t *source =
        json_pack("{s:s,s:I,s:s,s:s}", "conversation", t->conversation ? t->conversation : "",
                  "turn", (json_int_t)t->number, "speaker", t->role, "time", l->change.at);
    json_t *v =
        json_pack("{s:I,s:s,s:s,s:s,s:o,s:o,s:s,s:n,s:i,s:s,s:i,s:n,s:f}", "id", (json_int_t)id,
                  "user", m->user, "attribute", a->name, "value", value, "text", sentence, "source",
                  source, "valid_from", l->change.at, "valid_until", "stated", 1, "last_stated",
                  l->change.at, "uses", 0, "last_used", "importance", a->importance);
    if (!v) return error_set(err, ERR_USAGE, "the id of the conversation is not UTF-8 text");
    result_add(l, "added", v);
    return change_put(&l->change, id, NULL, v, err);
}

/* The memory with this attribute and value that holds, or NULL. */
static json_t *holding_find(const struct memories *m, const char *attribute, const char *value) {
    for (int64_t i = 0; i < m->n; i++)
        if (holds(m->v[i]) && strcmp(json_get_string(m->v[i], "attribute"), attribute) == 0 &&
            values_are_equal(json_get_string(m->v[i], "value"), value))
            return m->v[i];
    return NULL;
}

/* Ends the memories that hold, whose attribute is `attribute` ("": any that has several values) and
 * whose value overlaps with `value` ("": any). */
static int holding_end(struct learning *l, const char *attribute, const char *value,
                       struct error *err) {
    struct memories *m = l->change.m;
    int rc = OK;
    for (int64_t i = 0; i < m->n && rc == OK; i++) {
        const char *name = json_get_string(m->v[i], "attribute");
        const struct memory_attribute *a = memory_attribute_find(name);
        bool matches = *attribute ? strcmp(name, attribute) == 0 : a && !a->single;
        if (holds(m->v[i]) && matches &&
            (!*value || values_overlap(json_get_string(m->v[i], "value"), value)))
            rc = memory_end(l, m->v[i], err);
    }
    return rc;
}

/* Adds a fact, or merges it; ends what it contradicts. */
static int fact_hold(struct learning *l, const char *attribute, const char *value, const char *text,
                     struct error *err) {
    const struct memory_attribute *a = memory_attribute_find(attribute);
    json_t *known = holding_find(l->change.m, attribute, value);
    const char *opposite = strcmp(attribute, "likes") == 0      ? "dislikes"
                           : strcmp(attribute, "dislikes") == 0 ? "likes"
                                                                : NULL;
    json_t *denied = opposite ? holding_find(l->change.m, opposite, value) : NULL;
    CHECK(a);
    int rc = denied ? memory_end(l, denied, err) : OK;
    if (rc == OK && known) return memory_merge(l, known, err);
    if (rc == OK && a->single) rc = holding_end(l, attribute, "", err);
    return rc == OK ? memory_add(l, a, value, text, err) : rc;
}

/* The latest memory that holds, of the attribute ("": any), that contains `old`; "": that the same
 * conversation has given. */
static json_t *last_find(const struct learning *l, const char *attribute, const char *old) {
    const struct memories *m = l->change.m;
    const char *conversation = l->turn->conversation ? l->turn->conversation : "";
    for (int64_t i = m->n - 1; i >= 0; i--) {
        const json_t *source = json_object_get(m->v[i], "source");
        if (holds(m->v[i]) &&
            (!*attribute || strcmp(json_get_string(m->v[i], "attribute"), attribute) == 0) &&
            (*old ? value_contains(json_get_string(m->v[i], "value"), old)
                  : strcmp(json_get_string(source, "conversation"), conversation) == 0))
            return m->v[i];
    }
    return NULL;
}

/* The length of the number at the beginning of a text, in digits or words; 0: none. */
static size_t number_len(const char *text) {
    struct pattern_match m;
    return pattern_match("^(?i:\\d+|one|two|three|four|five|six|seven|eight|nine|ten|"
                         "[一二两兩三四五六七八九十]+)(?![a-z])",
                         text, strlen(text), 0, &m)
               ? m.end[0]
               : 0;
}

/* The part of a memory's value that a correction of `old` ("": all) to `new` replaces, and its
 * length; NULL: the whole value. A number replaces the number only: of "two kids", two; a name the
 * name only: of "sister Nadia", Nadia. */
static const char *part_find(const json_t *memory, const char *old, const char *new, size_t *n) {
    const char *value = json_get_string(memory, "value"),
               *attribute = json_get_string(memory, "attribute");
    bool named = strcmp(attribute, "family") == 0 || strcmp(attribute, "pet") == 0;
    *n = strlen(old);
    if (*old) return strstr(value, old);
    *n = number_len(value);
    if (*n && number_len(new) == strlen(new)) return value;
    const char *space = named ? strrchr(value, ' ') : NULL;
    if (!space) return NULL;
    *n = strlen(space + 1);
    return space + 1;
}

/* The value of a memory after a correction of `old` ("": all) to `new`; malloc'ed. */
static char *value_correct(const json_t *memory, const char *old, const char *new) {
    const char *value = json_get_string(memory, "value");
    size_t n;
    const char *part = part_find(memory, old, new, &n);
    char *text =
        part ? xasprintf("%.*s%s%s", (int)(part - value), value, new, part + n) : xstrdup(new);
    text[utf8_prefix_len(text, strlen(text), MEMORY_VALUE_CHARS)] = 0;
    return text;
}

static int fact_correct(struct learning *l, const json_t *fact, struct error *err) {
    json_t *memory = last_find(l, json_get_string(fact, "attribute"), json_get_string(fact, "old"));
    if (!memory) return OK;
    json_incref(memory);
    char *value =
        value_correct(memory, json_get_string(fact, "old"), json_get_string(fact, "value"));
    int rc = memory_end(l, memory, err);
    if (rc == OK)
        rc = fact_hold(l, json_get_string(memory, "attribute"), value,
                       json_get_string(fact, "text"), err);
    json_decref(memory);
    free(value);
    return rc;
}

static int fact_apply(struct learning *l, const json_t *fact, struct error *err) {
    const char *change = json_get_string(fact, "change"), *value = json_get_string(fact, "value"),
               *attribute = json_get_string(fact, "attribute");
    if (strcmp(change, "corrects") == 0) return fact_correct(l, fact, err);
    if (strcmp(change, "ends last") == 0) {
        json_t *last = last_find(l, attribute, "");
        return last ? memory_end(l, last, err) : OK;
    }
    if (strcmp(change, "ends") == 0) return holding_end(l, attribute, value, err);
    return fact_hold(l, attribute, value, json_get_string(fact, "text"), err);
}

/* A memory and its place in the order of pruning. */
struct prune_entry {
    bool holds;
    double strength;
    int64_t id;
};

static int prune_compare(const void *a, const void *b) {
    const struct prune_entry *x = a, *y = b;
    if (x->holds != y->holds) return x->holds - y->holds;
    if (x->strength != y->strength) return x->strength < y->strength ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

static int memories_prune(struct change *c, json_t *pruned, struct error *err) {
    struct memories *m = c->m;
    int64_t excess = m->n - m->capacity, now = memory_seconds(c->at);
    if (excess <= 0) return OK;
    struct prune_entry *order = xcalloc((size_t)m->n, sizeof *order);
    for (int64_t i = 0; i < m->n; i++)
        order[i] = (struct prune_entry){holds(m->v[i]), memory_strength(m->v[i], now).strength,
                                        memory_id(m->v[i])};
    qsort(order, (size_t)m->n, sizeof *order, prune_compare);
    int rc = OK;
    for (int64_t i = 0; i < excess && rc == OK; i++) {
        json_t *memory = json_incref(m->v[memories_find(m, order[i].id)]);
        json_array_append(pruned, memory);
        rc = change_put(c, order[i].id, memory, NULL, err);
        json_decref(memory);
    }
    free(order);
    return rc;
}

static int64_t pretence_find(const struct memories *m, const char *conversation) {
    const json_t *v;
    size_t i;
    json_array_foreach (m->pretence, i, v)
        if (strcmp(json_string_value(v), conversation) == 0) return (int64_t)i;
    return -1;
}

static void pretence_set(struct memories *m, const char *conversation, bool pretence) {
    int64_t i = pretence_find(m, conversation);
    if (pretence && i < 0) {
        if (json_array_size(m->pretence) == MAX_ROLE_PLAYS) json_array_remove(m->pretence, 0);
        json_array_append_new(m->pretence, json_string(conversation));
    }
    if (!pretence && i >= 0) json_array_remove(m->pretence, (size_t)i);
}

static int turn_learn(struct learning *l, struct error *err) {
    struct memories *m = l->change.m;
    const char *conversation = l->turn->conversation ? l->turn->conversation : "";
    bool pretence = *conversation && pretence_find(m, conversation) >= 0;
    json_t *found = memory_rules_extract(l->turn->text, l->turn->asked, pretence), *fact;
    size_t i;
    int rc = OK;
    json_object_set(l->result, "refused", json_object_get(found, "refused"));
    if (*conversation)
        pretence_set(m, conversation, json_is_true(json_object_get(found, "pretence")));
    json_array_foreach (json_object_get(found, "facts"), i, fact)
        if (rc == OK &&
            (!l->turn->only || value_contains(l->turn->only, json_get_string(fact, "value"))))
            rc = fact_apply(l, fact, err);
    json_decref(found);
    return rc == OK ? memories_prune(&l->change, json_object_get(l->result, "pruned"), err) : rc;
}

static json_t *result_new(void) {
    return json_pack("{s:[],s:[],s:[],s:[],s:[]}", "added", "merged", "ended", "pruned", "refused");
}

/* The result for a turn that is not the user's. */
static json_t *role_refuse(const struct memory_turn *t) {
    json_t *result = result_new();
    size_t n = utf8_prefix_len(t->text, strlen(t->text), REFUSED_CHARS);
    json_array_append_new(json_object_get(result, "refused"),
                          json_pack("{s:o,s:s}", "text", json_string_lossy(t->text, n), "reason",
                                    "not the user's words"));
    return result;
}

/* *at receives the time, or now; ERR_USAGE if it is not one. */
static int time_get(const char *time, char now[32], const char **at, struct error *err) {
    *at = time ? time : clock_utc(now);
    return memory_seconds(*at) < 0
               ? error_set(err, ERR_USAGE, "'%.40s' is not a time such as 2026-11-29T09:30:00Z",
                           *at)
               : OK;
}

json_t *memories_learn(struct memories *m, const struct memory_turn *t, struct error *err) {
    char now[32];
    const char *at;
    if (time_get(t->time, now, &at, err) != OK) return NULL;
    if (strcmp(t->role, "user") != 0) return role_refuse(t);
    if (t->conversation && u8_check((const uint8_t *)t->conversation, strlen(t->conversation))) {
        error_set(err, ERR_USAGE, "the id of the conversation is not UTF-8 text");
        return NULL;
    }
    struct learning l = {.turn = t, .result = result_new()};
    int rc = change_begin(&l.change, m, "learn", at, err);
    if (rc == OK) rc = change_end(&l.change, turn_learn(&l, err), err);
    if (rc == OK) return l.result;
    json_decref(l.result);
    return NULL;
}

json_t *memories_list(struct memories *m, bool ended, struct error *err) {
    if (memories_refresh(m, err) != OK) return NULL;
    json_t *list = json_array();
    for (int64_t i = 0; i < m->n; i++)
        if (ended || holds(m->v[i])) json_array_append(list, m->v[i]);
    return list;
}

int memories_import(struct memories *m, const json_t *memory, bool *added, struct error *err) {
    struct change c;
    char now[32];
    *added = false;
    if (!memory_is_valid(memory) || !memory_attribute_find(json_get_string(memory, "attribute")) ||
        memory_seconds(json_get_string(memory, "last_stated")) < 0)
        return error_set(err, ERR_FORMAT,
                         "this is not a memory: use the lines of 'shoal memory export'");
    int rc = change_begin(&c, m, "import", clock_utc(now), err);
    if (rc != OK) return rc;
    if (!holding_find(m, json_get_string(memory, "attribute"), json_get_string(memory, "value"))) {
        int64_t id = m->next++;
        json_t *pruned = json_array();
        *added = true;
        rc = change_put(
            &c, id, NULL,
            memory_with(memory, json_pack("{s:I,s:s}", "id", (json_int_t)id, "user", m->user)),
            err);
        if (rc == OK) rc = memories_prune(&c, pruned, err);
        json_decref(pruned);
    }
    return change_end(&c, rc, err);
}

/* undo */

/* The log's events from number `from` on, at most PAGE. */
static json_t *log_page(struct memories *m, int64_t from, struct error *err) {
    return store_log_list(m->store, m->log, from - 1, PAGE, err);
}

/* Whether memories_undo may take back the change of an event. Collects changes that are taken back.
 */
static bool event_is_open(const json_t *event, json_t *undone) {
    char key[MEMORY_KEY];
    json_int_t undoes = json_integer_value(json_object_get(event, "undoes"));
    if (undoes) {
        memory_key(key, undoes);
        json_object_set_new(undone, key, json_true());
        return false;
    }
    memory_key(key, json_integer_value(json_object_get(event, "change")));
    return !json_object_get(event, "erased") && !json_object_get(undone, key);
}

/* *change receives the number of the last change that can be taken back; 0: none. */
static int undo_find(struct memories *m, int64_t *change, struct error *err) {
    json_t *undone = json_object();
    int rc = OK;
    *change = 0;
    for (int64_t end = m->last; end > 0 && rc == OK && !*change; end -= PAGE) {
        int64_t begin = MAX(end - PAGE + 1, 1);
        json_t *events = log_page(m, begin, err);
        if (!events) rc = err->code;
        for (int64_t i = end - begin; rc == OK && i >= 0 && !*change; i--) {
            const json_t *event = json_array_get(events, (size_t)i);
            if (event && event_is_open(event, undone))
                *change = json_integer_value(json_object_get(event, "change"));
        }
        json_decref(events);
    }
    json_decref(undone);
    return rc;
}

/* The events of a change, which are consecutive. */
static json_t *change_events(struct memories *m, int64_t change, struct error *err) {
    json_t *list = json_array(), *events, *e;
    size_t i;
    bool more = true;
    for (int64_t at = change; more && at <= m->last; at += PAGE) {
        if (!(events = log_page(m, at, err))) {
            json_decref(list);
            return NULL;
        }
        json_array_foreach (events, i, e) {
            more = more && json_integer_value(json_object_get(e, "change")) == change;
            if (more) json_array_append(list, e);
        }
        json_decref(events);
    }
    return list;
}

/* Takes back one event, unless the memory was deleted since. The counts of uses stay. */
static int event_undo(struct change *c, const json_t *event, struct error *err) {
    json_t *before = json_object_get(event, "before"), *after = json_object_get(event, "after");
    int64_t id = memory_id(event), i = memories_find(c->m, id);
    if (json_object_get(event, "erased") || json_is_object(after) != (i >= 0)) return OK;
    json_t *current = i >= 0 ? json_incref(c->m->v[i]) : NULL, *restored = NULL;
    if (json_is_object(before)) {
        restored = json_copy(before);
        if (current) json_object_set(restored, "uses", json_object_get(current, "uses"));
        if (current) json_object_set(restored, "last_used", json_object_get(current, "last_used"));
    }
    int rc = change_put(c, id, current, restored, err);
    json_decref(current);
    return rc;
}

static int events_undo(struct change *c, const json_t *events, struct error *err) {
    int rc = OK;
    for (size_t i = json_array_size(events); i > 0 && rc == OK; i--)
        rc = event_undo(c, json_array_get(events, i - 1), err);
    return rc;
}

json_t *memories_undo(struct memories *m, struct error *err) {
    struct change c;
    char now[32];
    int64_t number = 0;
    json_t *events = NULL, *result = NULL;
    if (change_begin(&c, m, "undo", clock_utc(now), err) != OK) return NULL;
    int rc = undo_find(m, &number, err);
    if (rc == OK && !number)
        rc = error_set(err, ERR_MISSING, "user '%s' has no change that can be undone", m->user);
    c.undoes = number;
    if (rc == OK && !(events = change_events(m, number, err))) rc = err->code;
    if (rc == OK) rc = events_undo(&c, events, err);
    if (rc == OK && json_array_size(c.events) == 0)
        rc = error_set(err, ERR_STATE, "the memories of the last change were deleted since");
    if (rc == OK) {
        const json_t *first = json_array_get(events, 0);
        result =
            json_pack("{s:O,s:O,s:I}", "operation", json_object_get(first, "operation"), "at",
                      json_object_get(first, "at"), "events", (json_int_t)json_array_size(events));
    }
    rc = change_end(&c, rc, err);
    json_decref(events);
    if (rc == OK) return result;
    json_decref(result);
    return NULL;
}

/* history and deletion */

/* Calls fn for each event of the log. */
static int log_each(struct memories *m, void (*fn)(void *ctx, json_t *event), void *ctx,
                    struct error *err) {
    for (int64_t at = 1; at <= m->last; at += PAGE) {
        json_t *events = log_page(m, at, err), *e;
        size_t i;
        if (!events) return err->code;
        json_array_foreach (events, i, e) fn(ctx, e);
        json_decref(events);
    }
    return OK;
}

/* The events of a memory or, if `conversation` is not NULL, those of its memories. */
struct events_of {
    int64_t id;
    const char *conversation;
    json_t *list;
};

static bool memory_is_from(const json_t *memory, const char *conversation) {
    return strcmp(json_get_string(json_object_get(memory, "source"), "conversation"),
                  conversation) == 0;
}

static bool event_belongs(const struct events_of *h, const json_t *event) {
    if (!h->conversation) return memory_id(event) == h->id;
    return memory_is_from(json_object_get(event, "before"), h->conversation) ||
           memory_is_from(json_object_get(event, "after"), h->conversation);
}

static void history_add(void *ctx, json_t *event) {
    struct events_of *h = ctx;
    if (!event_belongs(h, event)) return;
    json_array_append_new(h->list,
                          json_pack("{s:O,s:O,s:O,s:O}", "at", json_object_get(event, "at"),
                                    "operation", json_object_get(event, "operation"), "before",
                                    json_object_get(event, "before"), "after",
                                    json_object_get(event, "after")));
}

static int missing(const struct memories *m, int64_t id, struct error *err) {
    return error_set(err, ERR_MISSING, "user '%s' has no memory %lld", m->user, (long long)id);
}

json_t *memories_why(struct memories *m, int64_t id, const char *now, struct error *err) {
    char clock[32];
    const char *at;
    if (time_get(now, clock, &at, err) != OK || memories_refresh(m, err) != OK) return NULL;
    int64_t i = memories_find(m, id);
    if (i < 0) {
        missing(m, id, err);
        return NULL;
    }
    struct events_of h = {.id = id, .list = json_array()};
    if (log_each(m, history_add, &h, err) != OK) {
        json_decref(h.list);
        return NULL;
    }
    const struct memory_strength s = memory_strength(m->v[i], memory_seconds(at));
    return json_pack("{s:O,s:{s:f,s:f,s:f,s:f,s:I,s:f},s:o}", "memory", m->v[i], "strength",
                     "importance", s.importance, "recency", s.recency, "use", s.use, "days", s.days,
                     "uses", (json_int_t)s.uses, "strength", s.strength, "history", h.list);
}

/* Copies an event; of those that belong to `ctx` only its number, operation and time. */
static void event_erase(void *ctx, json_t *event) {
    struct events_of *h = ctx;
    if (event_belongs(h, event)) {
        json_object_set_new(event, "before", json_null());
        json_object_set_new(event, "after", json_null());
        json_object_set_new(event, "erased", json_true());
    }
    json_array_append(h->list, event);
}

/* Writes the log again without the texts of these events. */
static int log_erase(struct memories *m, struct events_of h, struct error *err) {
    h.list = json_array();
    int rc = log_each(m, event_erase, &h, err);
    if (rc == OK) rc = store_log_delete(m->store, m->log, err);
    if (rc == OK) rc = store_log_append(m->store, m->log, 1, h.list, err);
    json_decref(h.list);
    return rc;
}

/* Deletes a memory, whose events are erased already. */
static int memory_erase(struct change *c, int64_t id, struct error *err) {
    int rc = change_put(c, id, NULL, NULL, err);
    json_t *event = json_array_get(c->events, json_array_size(c->events) - 1);
    json_object_set_new(event, "erased", json_true());
    return rc;
}

int memories_delete(struct memories *m, int64_t id, struct error *err) {
    struct change c;
    char now[32];
    int rc = change_begin(&c, m, "delete", clock_utc(now), err);
    if (rc != OK) return rc;
    if (memories_find(m, id) < 0) rc = missing(m, id, err);
    if (rc == OK) rc = log_erase(m, (struct events_of){.id = id}, err);
    if (rc == OK) rc = memory_erase(&c, id, err);
    return change_end(&c, rc, err);
}

int memories_delete_conversation(struct memories *m, const char *conversation, int64_t *n,
                                 struct error *err) {
    struct change c;
    char now[32];
    CHECK(*conversation);
    *n = 0;
    int rc = change_begin(&c, m, "delete", clock_utc(now), err);
    if (rc != OK) return rc;
    rc = log_erase(m, (struct events_of){.conversation = conversation}, err);
    for (int64_t i = m->n; i-- > 0 && rc == OK;) {
        if (!memory_is_from(m->v[i], conversation)) continue;
        rc = memory_erase(&c, memory_id(m->v[i]), err);
        ++*n;
    }
    pretence_set(m, conversation, false);
    return change_end(&c, rc, err);
}

/* Deletes the documents of the memories that the state has, and their vectors. */
static int documents_delete(struct memories *m, struct error *err) {
    int rc = OK;
    for (int64_t i = 0; i < m->n && rc == OK; i++) {
        char key[MEMORY_KEY];
        memory_key(key, memory_id(m->v[i]));
        rc = store_document_delete(m->store, m->kind, key, err);
        if (rc == OK) rc = store_document_delete(m->store, m->vector_kind, key, err);
    }
    return rc;
}

int memories_delete_all(struct memories *m, int64_t *n, struct error *err) {
    int rc = store_begin(m->store, err);
    if (rc != OK) return rc;
    rc = memories_refresh(m, err);
    *n = m->n;
    if (rc == OK) rc = documents_delete(m, err);
    if (rc == OK) rc = store_log_delete(m->store, m->log, err);
    if (rc == OK) rc = store_document_delete(m->store, STATE_KIND, m->user, err);
    if (rc == OK) rc = store_commit(m->store, err);
    if (rc != OK) store_rollback(m->store);
    state_clear(m);
    m->epoch = m->last = 0;
    return rc;
}
