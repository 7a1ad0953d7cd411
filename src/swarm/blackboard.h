/*
 * blackboard: what a team's agents read and write — values under keys, and slots of texts that are
 * found by likeness.
 *
 * Every change is an event, appended to a log (in the store, when there is one) and never changed;
 * the board is a function of its events. Opening a log again, up to any event, gives the board as
 * it was then. Writers in other processes are seen by blackboard_refresh, and no event of theirs is
 * lost. Time comes from the caller's clock, so that a run with a scripted one is reproducible.
 *
 * One thread uses a board. What it returns as `const json_t *` is borrowed until the board changes;
 * any other json_t is the caller's to release.
 */
#ifndef SHOAL_BLACKBOARD_H
#define SHOAL_BLACKBOARD_H

#include "store/store.h"

/* The keys of the answer pipeline. */
#define BOARD_INPUT "input"
#define BOARD_RAG "rag"
#define BOARD_CONVERSATION "conversation_context"
#define BOARD_INITIAL_SUMMARY "initial_summary"
#define BOARD_FINAL_RESPONSE "final_response"
#define BOARD_QUESTION_TYPE "question_type"
#define BOARD_KEY_FACTS "key_facts"
#define BOARD_KEY_LEN 32
char *blackboard_agent_key(int agent, char out[BOARD_KEY_LEN]);       /* "agent_{i}_output" */
char *blackboard_summary_key(int iteration, char out[BOARD_KEY_LEN]); /* "summary_{i}" */

enum {
    BOARD_MAX_KEYS = 1024,    /* beyond: the lowest priority goes first, then the oldest */
    BOARD_MAX_SLOTS = 256,    /* a slot too many is refused */
    BOARD_SLOT_ENTRIES = 100, /* beyond: the oldest goes */
    BOARD_MAX_EVENTS = 4096,  /* held in memory; older ones are read from the store, if any */
    BOARD_MAX_VALUE = 1 << 20 /* bytes of one event as JSON */
};

struct blackboard;
struct blackboard_options {
    struct store *store;        /* NULL: in memory only */
    const char *name;           /* of the log in the store */
    double (*clock)(void *ctx); /* seconds; NULL: time stands at the last event's. A clock that
                                   goes back is taken to stand */
    void *clock_ctx;
    const char *const *persistent; /* keys and slots that clear_current_turn keeps, ended by NULL;
                                      NULL: conversation_context */
    int64_t until;                 /* replay up to this event and take no more; 0: all of them */
};
struct blackboard *blackboard_open(const struct blackboard_options *o, struct error *err);
void blackboard_close(struct blackboard *b);
int64_t blackboard_last_seq(const struct blackboard *b); /* the number of the last event; 0: none */
/* Takes in what other processes have written since. */
int blackboard_refresh(struct blackboard *b, struct error *err);

/* How long and how firmly a value stands. */
struct blackboard_write_options {
    double ttl;   /* seconds until it is no more; 0: for good */
    int priority; /* order of read_all, and who goes when the board is full */
};
/* {timestamp, key, value}, or NULL: ERR_USAGE for a key that is empty or too long and a value that
 * is too large or nested too deep. `w` may be NULL. */
json_t *blackboard_write(struct blackboard *b, const char *key, const json_t *value,
                         const struct blackboard_write_options *w, struct error *err);
/* Every member of the object, all or none. */
int blackboard_write_multiple(struct blackboard *b, const json_t *values,
                              const struct blackboard_write_options *w, struct error *err);
const json_t *blackboard_read(const struct blackboard *b, const char *key); /* NULL: nothing */
/* Objects of key and value; keys without a value are left out. read_all: highest priority first,
 * then the oldest. */
json_t *blackboard_read_multiple(const struct blackboard *b, const char *const *keys, int n);
json_t *blackboard_read_all(const struct blackboard *b);
/* Forgets keys and slots but the persistent ones. The history stays. */
int blackboard_clear_current_turn(struct blackboard *b, struct error *err);

/*
 * Events as they came: an array of {seq, timestamp, op, …}, op being "write" (key, value, ttl,
 * priority), "slot" (slot, text, embedding, metadata) or "clear" (keep). `key` picks the writes to
 * one key; NULL: all.
 *
 * Watching is the same with a cursor: what came after event n, at most `limit` of them; the next
 * cursor is the last one's seq.
 */
json_t *blackboard_history(const struct blackboard *b, const char *key, struct error *err);
json_t *blackboard_watch(const struct blackboard *b, int64_t after, int limit, struct error *err);
/* For people: {events, time, entries: {key: {value, timestamp, …}}, slots: {name: entries}}, where
 * vectors are "<Vector shape=(n,)>" and long texts are cut. */
json_t *blackboard_debug_view(const struct blackboard *b);

/* slots */

struct blackboard_slot_entry {
    const char *slot, *text;
    const float *embedding; /* [d], or NULL: not found by likeness */
    int32_t d;
    const json_t *metadata; /* may be NULL */
};
/* {entry_id, slot, text, metadata, timestamp}, entry_id being 8 hex digits; NULL sets err. */
json_t *blackboard_slot_add(struct blackboard *b, const struct blackboard_slot_entry *e,
                            struct error *err);
/* An array of a slot's entries, oldest first; of every slot with NULL. */
json_t *blackboard_slot_list(const struct blackboard *b, const char *slot);
#define BOARD_SIMILARITY 0.7
/* Entries (with "similarity") whose cosine with v[d] is at least the threshold, the most alike
 * first, the older of equals first. `slot` NULL: of every slot. */
json_t *blackboard_find_similar(const struct blackboard *b, const char *slot, const float *v,
                                int32_t d, double threshold, int max);
/* Appends the last n entries of a slot (NULL: of each) as lines "[slot] text". */
void blackboard_slot_context(const struct blackboard *b, const char *slot, int n, struct buf *out);

#endif
