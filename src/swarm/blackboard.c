/*
 * blackboard: the event log and the state computed from it.
 *
 * Invariants:
 * 1. Only event_apply changes a board, for new events and for events from the store. It reads only
 *    the event and the board, so a replay gives the same board.
 * 2. An event is stored before it is applied to the board.
 * 3. Event n of the log, from 1, has sequence number n. The events in memory are the latest ones,
 *    without a gap.
 * 4. An expired entry is never returned; it is removed when another entry needs its place.
 *
 * Events hold embeddings as base64 of little-endian floats, which preserves every bit.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include "memory/memory.h"

#include <math.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_MAX_BYTES = 256, /* maximum length of a key or a slot's name */
    DEPTH_MAX = 64,       /* nesting of an event */
    PAGE_EVENTS = 256,    /* events that are read from the store at once */
    DEBUG_CHARS = 100,    /* characters of a text in the debug view */
    DEBUG_VECTOR = 16     /* minimum numbers of an array that the debug view shows as a vector */
};

/* A value under a key. */
struct board_entry {
    json_t *event;  /* owned reference to the write event, as in struct slot_entry */
    double expires; /* INFINITY: never */
    int64_t seq;
};
struct slot_entry {
    json_t *event;
    char id[9];       /* entry_id: 8 hex digits */
    float *embedding; /* [d]; NULL: none */
    int32_t d;
};
struct slot {
    char *name;
    struct slot_entry v[BOARD_SLOT_ENTRIES]; /* oldest first */
    int n;
};
struct blackboard {
    struct store *store;
    char *name;
    double (*clock)(void *ctx);
    void *clock_ctx;
    json_t *persistent; /* array of names of keys and slots */
    bool frozen;        /* read-only: opened with `until` */
    double time;        /* timestamp of the last event */
    int64_t last_seq;
    json_t *events; /* the latest events, each with its seq */
    struct board_entry entries[BOARD_MAX_KEYS];
    int n_entries;
    struct slot *slots[BOARD_MAX_SLOTS];
    int n_slots;
};

char *blackboard_agent_key(int agent, char out[BOARD_KEY_LEN]) {
    snprintf(out, BOARD_KEY_LEN, "agent_%d_output", agent);
    return out;
}

char *blackboard_summary_key(int iteration, char out[BOARD_KEY_LEN]) {
    snprintf(out, BOARD_KEY_LEN, "summary_%d", iteration);
    return out;
}

static const char *event_text(const json_t *event, const char *key) {
    return json_string_value(json_object_get(event, key));
}

static double event_number(const json_t *event, const char *key) {
    return json_number_value(json_object_get(event, key));
}

static bool event_op_is(const json_t *event, const char *op) {
    const char *text = event_text(event, "op");
    return text && strcmp(text, op) == 0;
}

/* The current time. It never decreases: otherwise an expired entry would become visible again. */
static double board_now(const struct blackboard *b) {
    double now = b->clock && !b->frozen ? b->clock(b->clock_ctx) : b->time;
    CHECK(isfinite(now));
    return MAX(now, b->time);
}

/* entries */

static int entry_find(const struct blackboard *b, const char *key) {
    for (int i = 0; i < b->n_entries; i++)
        if (strcmp(event_text(b->entries[i].event, "key"), key) == 0) return i;
    return -1;
}

static int entry_priority(const struct board_entry *e) {
    return (int)json_integer_value(json_object_get(e->event, "priority"));
}

static void entry_remove(struct blackboard *b, int i) {
    json_decref(b->entries[i].event);
    b->entries[i] = b->entries[--b->n_entries];
}

/* The index of the entry to evict: an expired one, else the one with the lowest priority; among
 * equals the oldest. */
static int entry_to_evict(const struct blackboard *b, double now) {
    int worst = 0;
    for (int i = 1; i < b->n_entries; i++) {
        const struct board_entry *e = &b->entries[i], *w = &b->entries[worst];
        int expired_first = (e->expires <= now) - (w->expires <= now);
        int lower_priority = entry_priority(w) - entry_priority(e);
        if (expired_first > 0 || (expired_first == 0 &&
                                  (lower_priority > 0 || (lower_priority == 0 && e->seq < w->seq))))
            worst = i;
    }
    return worst;
}

static void write_apply(struct blackboard *b, json_t *event) {
    double time = event_number(event, "timestamp"), ttl = event_number(event, "ttl");
    int i = entry_find(b, event_text(event, "key"));
    if (i < 0 && b->n_entries == BOARD_MAX_KEYS) i = entry_to_evict(b, time);
    if (i >= 0) entry_remove(b, i);
    b->entries[b->n_entries++] =
        (struct board_entry){json_incref(event), ttl > 0 ? time + ttl : INFINITY, b->last_seq};
}

/* slots */

static struct slot *slot_find(const struct blackboard *b, const char *name) {
    for (int i = 0; i < b->n_slots; i++)
        if (strcmp(b->slots[i]->name, name) == 0) return b->slots[i];
    return NULL;
}

static void slot_entry_release(struct slot_entry *e) {
    json_decref(e->event);
    free(e->embedding);
}

static void slot_free(struct slot *s) {
    for (int i = 0; i < s->n; i++) slot_entry_release(&s->v[i]);
    free(s->name);
    free(s);
}

/* The embedding [*d] of an event, malloc'ed; NULL: it is missing or invalid. */
static float *event_embedding(const json_t *event, int32_t *d) {
    const char *text = event_text(event, "embedding");
    size_t max_bytes = text ? strlen(text) / 4 * 3 : 0, n_bytes = 0;
    if (!max_bytes) return NULL;
    float *v = xmalloc(max_bytes);
    if (sodium_base642bin((unsigned char *)v, max_bytes, text, strlen(text), NULL, &n_bytes, NULL,
                          sodium_base64_VARIANT_ORIGINAL) != 0 ||
        n_bytes == 0 || n_bytes % sizeof *v) {
        free(v);
        return NULL;
    }
    *d = (int32_t)(n_bytes / sizeof *v);
    return v;
}

static void slot_apply(struct blackboard *b, json_t *event) {
    struct slot *s = slot_find(b, event_text(event, "slot"));
    if (!s) {
        s = b->slots[b->n_slots++] = xcalloc(1, sizeof *s);
        s->name = xstrdup(event_text(event, "slot"));
    }
    if (s->n == BOARD_SLOT_ENTRIES) {
        slot_entry_release(&s->v[0]);
        memmove(s->v, s->v + 1, sizeof *s->v * (size_t)--s->n);
    }
    struct slot_entry *e = &s->v[s->n++];
    *e = (struct slot_entry){.event = json_incref(event)};
    e->embedding = event_embedding(event, &e->d);
    char hash[HASH_LEN], *named = xasprintf("%lld %s", (long long)b->last_seq, s->name);
    sha256_bytes(named, strlen(named), hash);
    memcpy(e->id, hash, sizeof e->id - 1);
    free(named);
}

/* Whether a "clear" event keeps the key or slot `name`. */
static bool clear_keeps(const json_t *event, const char *name) {
    const json_t *keep = json_object_get(event, "keep"), *v;
    size_t i;
    json_array_foreach (keep, i, v)
        if (strcmp(json_string_value(v), name) == 0) return true;
    return false;
}

static void clear_apply(struct blackboard *b, const json_t *event) {
    for (int i = b->n_entries - 1; i >= 0; i--)
        if (!clear_keeps(event, event_text(b->entries[i].event, "key"))) entry_remove(b, i);
    int n = 0;
    for (int i = 0; i < b->n_slots; i++) {
        if (clear_keeps(event, b->slots[i]->name))
            b->slots[n++] = b->slots[i];
        else
            slot_free(b->slots[i]);
    }
    b->n_slots = n;
}

/* events */

static bool name_is_valid(const char *name) {
    return name && *name && strlen(name) <= NAME_MAX_BYTES;
}

/* Whether `v` is nested deeper than DEPTH_MAX; a replay could not parse such an event. */
static bool is_nested_too_deep(const json_t *v, int depth) {
    size_t i;
    const char *key;
    json_t *member;
    if (depth > DEPTH_MAX) return true;
    json_array_foreach (v, i, member)
        if (is_nested_too_deep(member, depth + 1)) return true;
    json_object_foreach ((json_t *)(uintptr_t)v, key, member)
        if (is_nested_too_deep(member, depth + 1)) return true;
    return false;
}

/* Checks that an event, from the store or new, can be applied. */
static int event_check(const struct blackboard *b, const json_t *event, struct error *err) {
    const json_t *embedding = json_object_get(event, "embedding");
    const char *slot = event_text(event, "slot"), *problem = NULL;
    int32_t d;
    float *v = event_embedding(event, &d);
    free(v);
    if (!json_is_number(json_object_get(event, "timestamp")))
        problem = "has no time";
    else if (event_op_is(event, "write"))
        problem = !name_is_valid(event_text(event, "key"))     ? "needs a key of 1 to 256 bytes"
                  : !json_object_get(event, "value")           ? "has no value"
                  : !(fabs(event_number(event, "ttl")) < 1e15) ? "has no usable time to live"
                                                               : NULL;
    else if (event_op_is(event, "slot"))
        problem = !name_is_valid(slot)         ? "needs a slot's name of 1 to 256 bytes"
                  : !event_text(event, "text") ? "has no text"
                  : embedding && !v            ? "has an embedding that is not a list of floats"
                  : !slot_find(b, slot) && b->n_slots == BOARD_MAX_SLOTS
                      ? "needs one more slot than 256"
                      : NULL;
    else if (!event_op_is(event, "clear") || !json_is_string_array(json_object_get(event, "keep")))
        problem = "is of no known kind";
    return problem ? error_set(err, ERR_FORMAT, "an event of board '%s' %s", b->name, problem) : OK;
}

/* Applies a checked event to the board and appends it to the history; takes ownership. */
static void event_apply(struct blackboard *b, json_t *event) {
    b->last_seq++;
    b->time = MAX(b->time, event_number(event, "timestamp"));
    json_object_set_new(event, "seq", json_integer(b->last_seq));
    if (event_op_is(event, "write"))
        write_apply(b, event);
    else if (event_op_is(event, "slot"))
        slot_apply(b, event);
    else
        clear_apply(b, event);
    json_array_append_new(b->events, event);
    if (json_array_size(b->events) <= BOARD_MAX_EVENTS) return;
    json_t *newer = json_array();
    for (size_t i = BOARD_MAX_EVENTS / 2; i <= BOARD_MAX_EVENTS; i++)
        json_array_append(newer, json_array_get(b->events, i));
    json_decref(b->events);
    b->events = newer;
}

/* Applies the events of the log after the board's last one, up to `until` (0: the end). */
static int board_replay(struct blackboard *b, int64_t until, struct error *err) {
    for (;;) {
        int64_t n = until ? MIN(until - b->last_seq, PAGE_EVENTS) : PAGE_EVENTS;
        json_t *page =
            n > 0 ? store_log_list(b->store, b->name, b->last_seq, n, err) : json_array();
        if (!page) return err->code;
        size_t n_read = json_array_size(page);
        int rc = OK;
        for (size_t i = 0; i < n_read && rc == OK; i++) {
            rc = event_check(b, json_array_get(page, i), err);
            if (rc != OK) error_wrap(err, "event %lld", (long long)b->last_seq + 1);
            if (rc == OK) event_apply(b, json_incref(json_array_get(page, i)));
        }
        json_decref(page);
        if (rc != OK || n_read < PAGE_EVENTS) return rc;
    }
}

int blackboard_refresh(struct blackboard *b, struct error *err) {
    return b->store && !b->frozen ? board_replay(b, 0, err) : OK;
}

/* Checks that an event can be applied and stored. */
static int new_event_check(const struct blackboard *b, const json_t *event, struct error *err) {
    if (event_check(b, event, err) != OK) return err->code = ERR_USAGE;
    if (is_nested_too_deep(event, 0))
        return error_set(err, ERR_USAGE, "a value for board '%s' is nested deeper than %d", b->name,
                         DEPTH_MAX - 1);
    char *text = json_canonical(event);
    size_t len = strlen(text);
    free(text);
    return len <= BOARD_MAX_VALUE
               ? OK
               : error_set(err, ERR_USAGE, "a value for board '%s' has %zu bytes, more than %d",
                           b->name, len, BOARD_MAX_VALUE);
}

/* Takes ownership of `events`, an array; appends them to the store, then applies them to the board.
 * If another process appended first, its events are applied before these. */
static int events_append(struct blackboard *b, json_t *events, struct error *err) {
    int rc = OK;
    size_t n = json_array_size(events);
    if (b->frozen)
        rc = error_set(err, ERR_STATE, "board '%s' is a replay up to event %lld: nothing is added",
                       b->name, (long long)b->last_seq);
    for (size_t i = 0; i < n && rc == OK; i++)
        rc = new_event_check(b, json_array_get(events, i), err);
    while (rc == OK && b->store &&
           (rc = store_log_append(b->store, b->name, b->last_seq + 1, events, err)) == ERR_STATE) {
        int64_t last_seq = b->last_seq;
        rc = blackboard_refresh(b, err);
        if (rc == OK && b->last_seq == last_seq)
            rc = error_set(err, ERR_FORMAT, "the log of board '%s' has a gap", b->name);
    }
    for (size_t i = 0; i < n && rc == OK; i++)
        event_apply(b, json_incref(json_array_get(events, i)));
    json_decref(events);
    return rc;
}

/* opening */

static json_t *persistent_list(const char *const *names) {
    static const char *const defaults[] = {BOARD_CONVERSATION, NULL};
    json_t *list = json_array();
    for (names = names ? names : defaults; *names; names++)
        json_array_append_new(list, json_string(*names));
    return list;
}

struct blackboard *blackboard_open(const struct blackboard_options *o, struct error *err) {
    struct blackboard *b = xcalloc(1, sizeof *b);
    CHECK(o->name || !o->store);
    b->store = o->store;
    b->name = xstrdup(o->name ? o->name : "");
    b->clock = o->clock;
    b->clock_ctx = o->clock_ctx;
    b->persistent = persistent_list(o->persistent);
    b->events = json_array();
    CHECK(json_is_array(b->persistent) && o->until >= 0);
    int rc = b->store ? board_replay(b, o->until, err) : OK;
    if (rc == OK && b->last_seq < o->until)
        rc = error_set(err, ERR_MISSING, "board '%s' has %lld events, not %lld", b->name,
                       (long long)b->last_seq, (long long)o->until);
    b->frozen = o->until > 0;
    if (rc == OK) return b;
    blackboard_close(b);
    return NULL;
}

void blackboard_close(struct blackboard *b) {
    if (!b) return;
    for (int i = 0; i < b->n_entries; i++) json_decref(b->entries[i].event);
    for (int i = 0; i < b->n_slots; i++) slot_free(b->slots[i]);
    json_decref(b->events);
    json_decref(b->persistent);
    free(b->name);
    free(b);
}

int64_t blackboard_last_seq(const struct blackboard *b) {
    return b->last_seq;
}

/* writing and reading */

/* A "write" event with a copy of the value, because the caller may change the value later. NULL if
 * the key is not UTF-8. */
static json_t *write_event_new(const struct blackboard *b, const char *key, const json_t *value,
                               const struct blackboard_write_options *w) {
    CHECK(value && (!w || w->ttl >= 0));
    json_t *event = json_pack("{s:s,s:f,s:s,s:o}", "op", "write", "timestamp", board_now(b), "key",
                              key, "value", json_deep_copy(value));
    if (event && w && w->ttl > 0) json_object_set_new(event, "ttl", json_real(w->ttl));
    if (event && w && w->priority)
        json_object_set_new(event, "priority", json_integer(w->priority));
    return event;
}

json_t *blackboard_write(struct blackboard *b, const char *key, const json_t *value,
                         const struct blackboard_write_options *w, struct error *err) {
    json_t *event = write_event_new(b, key, value, w);
    if (!event) {
        error_set(err, ERR_USAGE, "a key of board '%s' is not UTF-8", b->name);
        return NULL;
    }
    json_t *events = json_pack("[O]", event), *out = NULL;
    if (events_append(b, events, err) == OK)
        out = json_pack("{s:O,s:s,s:O}", "timestamp", json_object_get(event, "timestamp"), "key",
                        key, "value", json_object_get(event, "value"));
    json_decref(event);
    return out;
}

int blackboard_write_multiple(struct blackboard *b, const json_t *values,
                              const struct blackboard_write_options *w, struct error *err) {
    json_t *events = json_array(), *value;
    const char *key;
    CHECK(json_is_object(values));
    json_object_foreach ((json_t *)(uintptr_t)values, key, value)
        json_array_append_new(events, write_event_new(b, key, value, w));
    return events_append(b, events, err);
}

const json_t *blackboard_read(const struct blackboard *b, const char *key) {
    int i = entry_find(b, key);
    bool is_valid = i >= 0 && b->entries[i].expires > board_now(b);
    return is_valid ? json_object_get(b->entries[i].event, "value") : NULL;
}

json_t *blackboard_read_multiple(const struct blackboard *b, const char *const *keys, int n) {
    json_t *out = json_object();
    for (int i = 0; i < n; i++) {
        const json_t *v = blackboard_read(b, keys[i]);
        if (v) json_object_set(out, keys[i], (json_t *)(uintptr_t)v);
    }
    return out;
}

static int entry_order(const void *pa, const void *pb) {
    const struct board_entry *a = *(const struct board_entry *const *)pa,
                             *b = *(const struct board_entry *const *)pb;
    int pri_a = entry_priority(a), pri_b = entry_priority(b);
    return pri_a != pri_b ? (pri_a < pri_b) - (pri_a > pri_b)
                          : (a->seq > b->seq) - (a->seq < b->seq);
}

/* Sets `out` to the entries that have not expired, in the order of blackboard_read_all. Returns
 * their number. */
static int entries_live(const struct blackboard *b, const struct board_entry *out[BOARD_MAX_KEYS]) {
    double now = board_now(b);
    int n = 0;
    for (int i = 0; i < b->n_entries; i++)
        if (b->entries[i].expires > now) out[n++] = &b->entries[i];
    qsort(out, (size_t)n, sizeof *out, entry_order);
    return n;
}

json_t *blackboard_read_all(const struct blackboard *b) {
    const struct board_entry *live[BOARD_MAX_KEYS];
    json_t *out = json_object();
    int n = entries_live(b, live);
    for (int i = 0; i < n; i++)
        json_object_set(out, event_text(live[i]->event, "key"),
                        json_object_get(live[i]->event, "value"));
    return out;
}

int blackboard_clear_current_turn(struct blackboard *b, struct error *err) {
    return events_append(b,
                         json_pack("[{s:s,s:f,s:O}]", "op", "clear", "timestamp", board_now(b),
                                   "keep", b->persistent),
                         err);
}

/* history */

static int64_t first_seq_in_memory(const struct blackboard *b) {
    return b->last_seq - (int64_t)json_array_size(b->events) + 1;
}

/* Reads the n events after event `after` from the store and sets their seq. */
static json_t *events_from_store(const struct blackboard *b, int64_t after, int64_t n,
                                 struct error *err) {
    json_t *page = store_log_list(b->store, b->name, after, n, err), *event;
    size_t i;
    json_array_foreach (page, i, event)
        json_object_set_new(event, "seq", json_integer(after + (int64_t)i + 1));
    return page;
}

/* At most n events after event `after` that are in memory. */
static json_t *events_from_memory(const struct blackboard *b, int64_t after, int64_t n) {
    json_t *out = json_array();
    int64_t first = first_seq_in_memory(b);
    for (int64_t seq = MAX(after + 1, first); seq <= b->last_seq && n > 0; seq++, n--)
        json_array_append(out, json_array_get(b->events, (size_t)(seq - first)));
    return out;
}

json_t *blackboard_watch(const struct blackboard *b, int64_t after, int limit, struct error *err) {
    CHECK(after >= 0 && limit > 0);
    int64_t n_in_store = first_seq_in_memory(b) - 1 - after;
    json_t *out = b->store && n_in_store > 0
                      ? events_from_store(b, after, MIN(limit, n_in_store), err)
                      : events_from_memory(b, after, limit);
    if (!out || !b->store || n_in_store <= 0 || n_in_store >= limit) return out;
    json_t *rest = events_from_memory(b, after + n_in_store, limit - n_in_store);
    json_array_extend(out, rest);
    json_decref(rest);
    return out;
}

json_t *blackboard_history(const struct blackboard *b, const char *key, struct error *err) {
    json_t *out = json_array(), *event;
    int64_t after = 0;
    for (size_t n_read = PAGE_EVENTS; out && n_read == PAGE_EVENTS;) {
        json_t *page = blackboard_watch(b, after, PAGE_EVENTS, err);
        n_read = json_array_size(page);
        size_t i;
        json_array_foreach (page, i, event) {
            const char *event_key = event_text(event, "key");
            if (!key || (event_key && strcmp(event_key, key) == 0)) json_array_append(out, event);
            after = json_integer_value(json_object_get(event, "seq"));
        }
        if (!page) {
            json_decref(out);
            out = NULL;
        }
        json_decref(page);
    }
    return out;
}

/* The first DEBUG_CHARS characters of a text, with "…" if more follow. */
static json_t *text_shorten(const char *text) {
    size_t len = strlen(text), n = utf8_prefix_len(text, len, DEBUG_CHARS);
    return json_sprintf("%.*s%s", (int)n, text, n < len ? "…" : "");
}

static bool is_vector(const json_t *v) {
    size_t i;
    const json_t *x;
    json_array_foreach (v, i, x)
        if (!json_is_number(x)) return false;
    return json_array_size(v) >= DEBUG_VECTOR;
}

/* A value, shortened for display. */
static json_t *value_shorten(const json_t *v) {
    size_t i;
    const char *key;
    json_t *member, *out;
    if (json_is_string(v)) return text_shorten(json_string_value(v));
    if (is_vector(v)) return json_sprintf("<Vector shape=(%zu,)>", json_array_size(v));
    if (json_is_array(v)) {
        out = json_array();
        json_array_foreach (v, i, member) json_array_append_new(out, value_shorten(member));
    } else if (json_is_object(v)) {
        out = json_object();
        json_object_foreach ((json_t *)(uintptr_t)v, key, member)
            json_object_set_new(out, key, value_shorten(member));
    } else {
        out = json_incref((json_t *)(uintptr_t)v);
    }
    return out;
}

json_t *blackboard_debug_view(const struct blackboard *b) {
    const struct board_entry *live[BOARD_MAX_KEYS];
    json_t *entries = json_object(), *slots = json_object();
    int n = entries_live(b, live);
    for (int i = 0; i < n; i++) {
        const struct board_entry *e = live[i];
        json_t *row = json_pack("{s:o,s:O,s:I,s:i}", "value",
                                value_shorten(json_object_get(e->event, "value")), "timestamp",
                                json_object_get(e->event, "timestamp"), "seq", (json_int_t)e->seq,
                                "priority", entry_priority(e));
        if (isfinite(e->expires)) json_object_set_new(row, "expires", json_real(e->expires));
        json_object_set_new(entries, event_text(e->event, "key"), row);
    }
    for (int i = 0; i < b->n_slots; i++)
        json_object_set_new(slots, b->slots[i]->name, json_integer(b->slots[i]->n));
    return json_pack("{s:I,s:f,s:o,s:o}", "events", (json_int_t)b->last_seq, "time", board_now(b),
                     "entries", entries, "slots", slots);
}

/* public functions of slots */

/* A "slot" event; NULL if the slot's name or the text is not UTF-8. */
static json_t *slot_event_new(const struct blackboard *b, const struct blackboard_slot_entry *e) {
    json_t *event = json_pack("{s:s,s:f,s:s,s:s}", "op", "slot", "timestamp", board_now(b), "slot",
                              e->slot, "text", e->text);
    if (event && e->metadata) json_object_set_new(event, "metadata", json_deep_copy(e->metadata));
    if (event && e->embedding) {
        size_t bytes = sizeof *e->embedding * (size_t)e->d;
        size_t encoded_size = sodium_base64_encoded_len(bytes, sodium_base64_VARIANT_ORIGINAL);
        char *text = xmalloc(encoded_size);
        sodium_bin2base64(text, encoded_size, (const unsigned char *)e->embedding, bytes,
                          sodium_base64_VARIANT_ORIGINAL);
        json_object_set_new(event, "embedding", json_string(text));
        free(text);
    }
    return event;
}

static json_t *slot_entry_json(const struct slot_entry *e) {
    const json_t *metadata = json_object_get(e->event, "metadata");
    json_t *v = json_pack(
        "{s:s,s:O,s:O,s:O}", "entry_id", e->id, "slot", json_object_get(e->event, "slot"), "text",
        json_object_get(e->event, "text"), "timestamp", json_object_get(e->event, "timestamp"));
    json_object_set(v, "metadata", (json_t *)(uintptr_t)metadata);
    return v;
}

json_t *blackboard_slot_add(struct blackboard *b, const struct blackboard_slot_entry *e,
                            struct error *err) {
    CHECK(!e->embedding || e->d > 0);
    json_t *event = slot_event_new(b, e);
    if (!event) {
        error_set(err, ERR_USAGE, "a slot's text on board '%s' is not UTF-8", b->name);
        return NULL;
    }
    if (events_append(b, json_pack("[o]", event), err) != OK) return NULL;
    const struct slot *s = slot_find(b, e->slot);
    return slot_entry_json(&s->v[s->n - 1]);
}

json_t *blackboard_slot_list(const struct blackboard *b, const char *slot) {
    json_t *out = json_array();
    for (int i = 0; i < b->n_slots; i++) {
        const struct slot *s = b->slots[i];
        if (slot && strcmp(s->name, slot) != 0) continue;
        for (int k = 0; k < s->n; k++) json_array_append_new(out, slot_entry_json(&s->v[k]));
    }
    return out;
}

struct match {
    const struct slot_entry *e;
    double similarity;
    int64_t seq;
};
/* Inserts a match into out[n], which is sorted by falling similarity and then by age, and keeps at
 * most `max` matches. Returns their new number. */
static int match_insert(struct match *out, int n, int max, struct match m) {
    int rank = n;
    while (rank > 0 && (out[rank - 1].similarity < m.similarity ||
                        (out[rank - 1].similarity == m.similarity && out[rank - 1].seq > m.seq)))
        rank--;
    if (rank == max) return n;
    n = MIN(n + 1, max);
    memmove(out + rank + 1, out + rank, sizeof *out * (size_t)(n - rank - 1));
    out[rank] = m;
    return n;
}

json_t *blackboard_find_similar(const struct blackboard *b, const char *slot, const float *v,
                                int32_t d, double threshold, int max) {
    struct match *best = xcalloc((size_t)MAX(max, 1), sizeof *best);
    json_t *out = json_array();
    int n = 0;
    for (int i = 0; i < b->n_slots; i++) {
        const struct slot *s = b->slots[i];
        if (slot && strcmp(s->name, slot) != 0) continue;
        for (int k = 0; k < s->n; k++) {
            const struct slot_entry *e = &s->v[k];
            if (!e->embedding || e->d != d) continue;
            struct match m = {e, cosine_similarity(e->embedding, v, d),
                              json_integer_value(json_object_get(e->event, "seq"))};
            if (m.similarity >= threshold) n = match_insert(best, n, max, m);
        }
    }
    for (int i = 0; i < n; i++) {
        json_t *row = slot_entry_json(best[i].e);
        json_object_set_new(row, "similarity", json_real(best[i].similarity));
        json_array_append_new(out, row);
    }
    free(best);
    return out;
}

void blackboard_slot_context(const struct blackboard *b, const char *slot, int n, struct buf *out) {
    for (int i = 0; i < b->n_slots; i++) {
        const struct slot *s = b->slots[i];
        if (slot && strcmp(s->name, slot) != 0) continue;
        for (int k = MAX(s->n - n, 0); k < s->n; k++)
            buf_printf(out, "[%s] %s\n", s->name, event_text(s->v[k].event, "text"));
    }
}
