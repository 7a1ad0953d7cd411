/*
 * feedback: ratings of replies by users. The last replies are kept in memory, so that they can be
 * rated by their ids. A rated reply becomes a row in the store. Rows are never removed, and are
 * exported as training data.
 *
 * A row is {id, created, updated, model, key, messages or prompt, reply, rating, correction,
 * comment, arm: {name, run, user, side, place}}, without the fields that are not set; place is the
 * index of the outcome. A further rating of the same reply adds or replaces fields of the row. A
 * rating that an experiment has used cannot be replaced, because a sequential test cannot remove an
 * outcome. Only the key that received a reply may rate it.
 */
#define _GNU_SOURCE
#include "ops/internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    MAX_REPLIES = 4096,
    KEY_SHARE = 4, /* if several keys have replies, one key's replies may use a quarter of the bytes
                      in memory */
    MAX_CHANGES = 16,     /* maximum number of ratings of a reply */
    DAY_SHARE = 16,       /* a key may write a sixteenth of --max-feedback per day */
    PAGE_BYTES = 4 << 20, /* bytes of rows after which no further row is read at once */
    TEXT_MAX = 1 << 20, /* bytes of a reply's prompt and text; of a longer reply, which can be rated
                           too, no text is kept */
    ROW_BYTES = 512,    /* estimated bytes that a row adds to the store besides its JSON */
    PAGE = 64,          /* rows of an export that are read at once */
};

struct kept_reply {
    char id[FEEDBACK_ID_LEN];
    char *key, *model;   /* key may be NULL */
    char *prompt, *text; /* both are JSON, or both NULL: not kept */
    struct ab_arm arm;
    int64_t created;
    size_t bytes;
};
struct feedback_log { /* a ring: v[first] is the oldest of n */
    struct kept_reply v[MAX_REPLIES];
    int first, n;
    size_t bytes,
        max_bytes; /* memory of all replies, and its limit; the oldest replies are removed first */
};

/* replies that can be rated */

static void remove_oldest(struct feedback_log *replies) {
    struct kept_reply *r = &replies->v[replies->first];
    replies->bytes -= r->bytes;
    free(r->key);
    free(r->model);
    free(r->prompt);
    free(r->text);
    replies->first = (replies->first + 1) % MAX_REPLIES;
    replies->n--;
}

static bool same_key(const struct kept_reply *a, const struct kept_reply *b) {
    return strcmp(a->key ? a->key : "", b->key ? b->key : "") == 0;
}

static void remove_text(struct feedback_log *replies, struct kept_reply *r) {
    size_t bytes = r->prompt ? strlen(r->prompt) + strlen(r->text) : 0;
    free(r->prompt);
    free(r->text);
    r->prompt = r->text = NULL;
    r->bytes -= bytes;
    replies->bytes -= bytes;
}

/* If there are replies of other keys, and with the new reply its key has more than its share,
 * removes the key's oldest texts, so that the key does not displace replies of other keys. */
static void enforce_key_share(struct feedback_log *replies, const struct kept_reply *new_reply) {
    size_t bytes = new_reply->bytes;
    bool has_other_keys = false;
    for (int i = 0; i < replies->n; i++) {
        const struct kept_reply *r = &replies->v[(replies->first + i) % MAX_REPLIES];
        bytes += same_key(r, new_reply) ? r->bytes : 0;
        has_other_keys = has_other_keys || !same_key(r, new_reply);
    }
    for (int i = 0; has_other_keys && i < replies->n && bytes > replies->max_bytes / KEY_SHARE;
         i++) {
        struct kept_reply *r = &replies->v[(replies->first + i) % MAX_REPLIES];
        if (!same_key(r, new_reply) || !r->prompt) continue;
        bytes -= r->bytes;
        remove_text(replies, r);
        bytes += r->bytes;
    }
}

void feedback_log_reply(struct ab *ab, const struct feedback_reply *reply) {
    if (!ab->replies) return;
    struct kept_reply r = {.key = reply->key ? xstrdup(reply->key) : NULL,
                           .model = xstrdup(reply->model),
                           .arm = *reply->arm,
                           .created = reply->created};
    snprintf(r.id, sizeof r.id, "%s", reply->id);
    if (reply->prompt && reply->text_len <= TEXT_MAX) {
        json_t *text = json_string_lossy(reply->text, reply->text_len);
        r.prompt = json_canonical(reply->prompt);
        r.text = json_canonical(text);
        json_decref(text);
        r.bytes = strlen(r.prompt) + strlen(r.text);
    }
    if (r.bytes > MIN((size_t)TEXT_MAX, ab->o.reply_bytes / KEY_SHARE)) {
        free(r.prompt);
        free(r.text);
        r.prompt = r.text = NULL;
        r.bytes = 0;
    }
    r.bytes += strlen(r.model) + (r.key ? strlen(r.key) : 0) + sizeof r;
    pthread_mutex_lock(&ab->table_lock);
    struct feedback_log *replies = ab->replies;
    enforce_key_share(replies, &r);
    while (replies->n == MAX_REPLIES ||
           (replies->n && replies->bytes + r.bytes > replies->max_bytes))
        remove_oldest(replies);
    replies->v[(replies->first + replies->n++) % MAX_REPLIES] = r;
    replies->bytes += r.bytes;
    pthread_mutex_unlock(&ab->table_lock);
}

static json_t *reply_row(const struct kept_reply *r) {
    json_t *row = json_pack("{s:s,s:I,s:s,s:s*}", "id", r->id, "created", (json_int_t)r->created,
                            "model", r->model, "key", r->key);
    if (r->prompt) {
        json_t *prompt = json_loads(r->prompt, 0, NULL);
        json_object_update(row, prompt);
        json_object_set_new(row, "reply", json_loads(r->text, JSON_DECODE_ANY, NULL));
        json_decref(prompt);
    }
    if (r->arm.run)
        json_object_set_new(row, "arm",
                            json_pack("{s:s,s:I,s:I,s:i,s:b}", "name", r->arm.name, "run",
                                      (json_int_t)r->arm.run, "user", (json_int_t)r->arm.user,
                                      "side", r->arm.side, "spare", r->arm.ignored));
    return row;
}

static json_t *reply_find(struct ab *ab, const char *id) {
    struct feedback_log *replies = ab->replies;
    json_t *row = NULL;
    pthread_mutex_lock(&ab->table_lock);
    for (int i = 0; i < replies->n && !row; i++) {
        const struct kept_reply *r = &replies->v[(replies->first + i) % MAX_REPLIES];
        if (strcmp(r->id, id) == 0) row = reply_row(r);
    }
    pthread_mutex_unlock(&ab->table_lock);
    return row;
}

/* The row of a reply: the stored row or, if the reply is not rated yet, a new row (*is_new).
 * ERR_MISSING if the reply is unknown or another key received it. */
static json_t *row_find(struct ab *ab, const char *id, const char *key, bool *is_new,
                        struct error *err) {
    json_t *row = store_document_get(ab->store, "feedback", id, err);
    if (!row && err->code != ERR_MISSING) return NULL;
    *is_new = !row;
    if (!row) row = reply_find(ab, id);
    if (row && strcmp(json_get_string(row, "key"), key ? key : "") == 0) return row;
    json_decref(row);
    error_set(err, ERR_MISSING,
              "there is no reply '%.40s' that can be rated: only the last %d replies since the "
              "server started can, with the key of their request",
              id, MAX_REPLIES);
    return NULL;
}

/* quotas: the bytes that ratings write are bounded per reply, per key and day, and in total */

static json_t *day_usage_read(struct ab *ab, const char *key, int64_t *bytes) {
    struct error none;
    int64_t day = (int64_t)time(NULL) / 86400;
    json_t *v = store_document_get(ab->store, "feedback_day", key ? key : "", &none);
    bool today = v && json_integer_value(json_object_get(v, "day")) == day;
    *bytes = today ? json_integer_value(json_object_get(v, "bytes")) : 0;
    json_decref(v);
    return json_pack("{s:I,s:I}", "day", (json_int_t)day, "bytes", (json_int_t)*bytes);
}

static int64_t file_size(const char *path, const char *suffix) {
    struct stat st;
    char *name = xasprintf("%s%s", path, suffix);
    int64_t n = stat(name, &st) == 0 ? (int64_t)st.st_size : 0;
    free(name);
    return n;
}

static int quota_refuse(enum feedback_refusal *out, enum feedback_refusal reason, struct error *err,
                        const char *text) {
    *out = reason;
    return error_set(err, ERR_STATE, "%s", text);
}

/* Checks whether `bytes` more may be written for a row, and counts the change in the row. today:
 * bytes that the key has written today. */
static int quota_check(struct ab *ab, json_t *row, int64_t today, int64_t bytes,
                       enum feedback_refusal *refusal, struct error *err) {
    int64_t max_bytes = ab->o.max_bytes;
    json_int_t changes = json_integer_value(json_object_get(row, "changes")) + 1;
    if (changes > MAX_CHANGES)
        return quota_refuse(refusal, FEEDBACK_OVER_QUOTA, err,
                            "this reply has been rated 16 times: its rating is final");
    if (today + bytes > max_bytes / DAY_SHARE)
        return quota_refuse(refusal, FEEDBACK_OVER_QUOTA, err,
                            "ratings of a key may write a sixteenth of --max-feedback a day, and "
                            "this key's have; try again tomorrow");
    if (file_size(ab->path, "") + file_size(ab->path, "-wal") + bytes > max_bytes)
        return quota_refuse(refusal, FEEDBACK_FILE_FULL, err,
                            "the file of ratings is as large as --max-feedback allows: raise that, "
                            "or export the ratings and begin with another --state");
    json_object_set_new(row, "changes", json_integer(changes));
    return OK;
}

static void row_set_rating(json_t *row, const struct feedback_rating *o) {
    if (o->score >= 0) json_object_set_new(row, "rating", json_real(o->score));
    if (o->correction) json_object_set_new(row, "correction", json_string(o->correction));
    if (o->comment) json_object_set_new(row, "comment", json_string(o->comment));
    json_object_set_new(row, "updated", json_integer((json_int_t)time(NULL)));
}

/* The arm of a row. *place: the index of the row's outcome; -1: no outcome yet. */
static struct ab_arm row_arm(const json_t *row, int64_t *place) {
    const json_t *v = json_object_get(row, "arm"), *at = json_object_get(v, "place");
    struct ab_arm arm = {.run = json_integer_value(json_object_get(v, "run")),
                         .user = json_integer_value(json_object_get(v, "user")),
                         .side = json_integer_value(json_object_get(v, "side")) == 1,
                         .ignored = json_is_true(json_object_get(v, "spare"))};
    snprintf(arm.name, sizeof arm.name, "%s", json_get_string(v, "name"));
    *place = at ? json_integer_value(at) : -1;
    return arm;
}

/* Stores in one transaction: the row, its entry in the log of rows if the row is new, the key's
 * usage of the day, and the outcome if it is not NULL. */
static int row_store(struct ab *ab, const char *id, const json_t *row, bool is_new,
                     const struct ab_arm *arm, json_t *outcome, const char *key, const json_t *day,
                     struct error *err) {
    json_t *events = json_pack("[{s:s}]", "id", id);
    int rc = store_begin(ab->store, err);
    bool begun = rc == OK;
    if (rc == OK) rc = store_document_put(ab->store, "feedback", id, row, err);
    if (rc == OK) rc = store_document_put(ab->store, "feedback_day", key ? key : "", day, err);
    if (rc == OK && is_new)
        rc = store_log_append(ab->store, "feedback", ab->n_rated + 1, events, err);
    if (rc == OK && outcome) rc = ab_outcome_put(ab, arm, outcome, err);
    if (rc == OK) rc = store_commit(ab->store, err);
    if (rc == OK)
        ab->n_rated += is_new;
    else if (begun)
        store_rollback(ab->store);
    json_decref(events);
    return rc;
}

/* Does the work of feedback_rate. The caller holds store_lock. */
static int rating_store(struct ab *ab, const struct feedback_rating *o, const char *key,
                        bool *counted, enum feedback_refusal *refusal, struct error *err) {
    bool is_new;
    int64_t place, today, bytes;
    json_t *row = row_find(ab, o->id, key, &is_new, err), *outcome = NULL;
    if (!row) return err->code;
    json_t *day = day_usage_read(ab, key, &today);
    struct ab_arm arm = row_arm(row, &place);
    int rc = OK;
    if (o->score >= 0 && ab_outcome_is_used(ab, &arm, place))
        rc = error_set(err, ERR_STATE,
                       "the experiment '%s' has used this reply's rating: it is final", arm.name);
    row_set_rating(row, o);
    bytes = (int64_t)json_dumpb(row, NULL, 0, JSON_COMPACT) + ROW_BYTES;
    if (rc == OK) rc = quota_check(ab, row, today, bytes, refusal, err);
    if (rc == OK) {
        json_object_set_new(day, "bytes", json_integer(today + bytes));
        place = o->score >= 0 ? ab_outcome_index(ab, &arm, place) : -1;
        *counted = place >= 0;
        if (*counted) {
            outcome = ab_outcome_event(&arm, place, o->score, o->id);
            json_object_set_new(json_object_get(row, "arm"), "place", json_integer(place));
        }
        rc = row_store(ab, o->id, row, is_new, &arm, outcome, key, day, err);
    }
    if (rc == OK && outcome) ab_outcome_apply(ab, &arm, outcome);
    json_decref(outcome);
    json_decref(day);
    json_decref(row);
    return rc;
}

static void rating_update_metrics(struct ab *ab, double score) {
    const char *direction = score < 0    ? "none"
                            : score == 0 ? "down"
                            : score == 1 ? "up"
                                         : "between";
    metric_add(metric_get(ab->o.metrics, METRIC_FEEDBACK, direction), 1);
}

int feedback_rate(struct ab *ab, const struct feedback_rating *rating, const char *key,
                  bool *counted, enum feedback_refusal *refusal, struct error *err) {
    *counted = false;
    *refusal = FEEDBACK_NOT_REFUSED;
    if (!ab->replies)
        return error_set(err, ERR_MISSING, "this server keeps no replies (--no-feedback)");
    pthread_mutex_lock(&ab->store_lock);
    int rc = rating_store(ab, rating, key, counted, refusal, err);
    pthread_mutex_unlock(&ab->store_lock);
    if (rc == OK) rating_update_metrics(ab, rating->score);
    return rc;
}

/* reading */

/* The rows after the first `seq` rows: at most `limit`, and no further row once they exceed
 * PAGE_BYTES. */
static json_t *rows_after(struct store *store, int64_t seq, int64_t limit, struct error *err) {
    json_t *ids = store_log_list(store, "feedback", seq, limit, err), *v, *rows;
    size_t i, bytes = 0;
    if (!ids) return NULL;
    rows = json_array();
    json_array_foreach (ids, i, v) {
        json_t *row = store_document_get(store, "feedback", json_get_string(v, "id"), err);
        if (!row) {
            json_decref(ids);
            json_decref(rows);
            return NULL;
        }
        json_array_append_new(rows, row);
        if ((bytes += json_dumpb(row, NULL, 0, JSON_COMPACT)) > PAGE_BYTES) break;
    }
    json_decref(ids);
    return rows;
}

json_t *feedback_list(struct ab *ab, int64_t after, int64_t limit, bool *more, struct error *err) {
    pthread_mutex_lock(&ab->store_lock);
    json_t *rows = rows_after(ab->store, after, limit, err);
    *more = after + (int64_t)json_array_size(rows) < ab->n_rated;
    pthread_mutex_unlock(&ab->store_lock);
    return rows;
}

/* export */

/* The request's messages with roles and texts only. zero_weights: earlier turns of the assistant
 * get weight 0 in the loss, because no user rated them as good. NULL: training cannot use the
 * messages, because they are missing, contain tool calls or other roles, or end with a turn
 * of the assistant. */
static json_t *messages_without_tools(const json_t *messages, bool zero_weights) {
    json_t *out = json_array();
    const json_t *m = NULL;
    bool usable = json_array_size(messages) > 0;
    size_t i;
    json_array_foreach (messages, i, m) {
        const char *role = json_get_string(m, "role");
        bool assistant = strcmp(role, "assistant") == 0;
        const json_t *calls = json_object_get(m, "tool_calls");
        usable &= (assistant || strcmp(role, "user") == 0 || strcmp(role, "system") == 0) &&
                  (!calls || json_is_null(calls));
        json_t *v = json_pack("{s:s,s:s}", "role", role, "content", json_get_string(m, "content"));
        if (assistant && zero_weights) json_object_set_new(v, "weight", json_integer(0));
        json_array_append_new(out, v);
        usable &= !(assistant && i + 1 == json_array_size(messages));
    }
    if (usable) return out;
    json_decref(out);
    return NULL;
}

static json_t *assistant_message(const char *content) {
    return json_pack("{s:s,s:s}", "role", "assistant", "content", content);
}

static json_t *row_sft(const json_t *row, const char *correction) {
    const json_t *messages = json_object_get(row, "messages");
    json_t *prompt = json_object_get(row, "prompt");
    if (prompt) return json_pack("{s:O,s:s}", "prompt", prompt, "completion", correction);
    json_t *list = messages_without_tools(messages, true);
    if (list) json_array_append_new(list, assistant_message(correction));
    return list ? json_pack("{s:o}", "messages", list) : NULL;
}

static json_t *row_preference(const json_t *row, const char *correction) {
    const char *reply = json_get_string(row, "reply");
    json_t *prompt = json_object_get(row, "prompt");
    if (!*reply || strcmp(reply, correction) == 0) return NULL;
    if (prompt)
        return json_pack("{s:O,s:s,s:s}", "prompt", prompt, "chosen", correction, "rejected",
                         reply);
    json_t *list = messages_without_tools(json_object_get(row, "messages"), false);
    return list ? json_pack("{s:o,s:[o],s:[o]}", "prompt", list, "chosen",
                            assistant_message(correction), "rejected", assistant_message(reply))
                : NULL;
}

/* An export reads the store through its own connection, so it does not block other requests. */
struct feedback_export {
    struct store *store;
    int64_t seq;
    json_t *(*sample)(const json_t *row, const char *correction);
};

struct feedback_export *feedback_export_open(struct ab *ab, enum feedback_format format,
                                             struct error *err) {
    struct store *store = store_open(ab->path, err);
    if (!store) return NULL;
    struct feedback_export *e = xcalloc(1, sizeof *e);
    e->store = store;
    e->sample = format == FEEDBACK_PREFERENCE ? row_preference : row_sft;
    return e;
}

json_t *feedback_export_next(struct feedback_export *e) {
    struct error err;
    json_t *rows = rows_after(e->store, e->seq, PAGE, &err), *row, *samples = NULL;
    size_t i, n = json_array_size(rows);
    if (!rows) log_warn("export of feedback: %s", err.text);
    if (n) samples = json_array();
    json_array_foreach (rows, i, row) {
        const char *correction = json_get_string(row, "correction");
        json_t *sample = *correction ? e->sample(row, correction) : NULL;
        if (sample) json_array_append_new(samples, sample);
    }
    json_decref(rows);
    e->seq += (int64_t)n;
    return samples;
}

void feedback_export_close(struct feedback_export *e) {
    store_close(e->store);
    free(e);
}

/* open and close */

/* Counts the stored rows; allocates the log of replies if replies can be rated. */
int feedback_open(struct ab *ab, struct error *err) {
    for (size_t n = FEEDBACK_LIST_MAX; n == FEEDBACK_LIST_MAX; ab->n_rated += (int64_t)n) {
        json_t *page = store_log_list(ab->store, "feedback", ab->n_rated, FEEDBACK_LIST_MAX, err);
        if (!page) return err->code;
        n = json_array_size(page);
        json_decref(page);
    }
    if (ab->o.feedback) {
        ab->replies = xcalloc(1, sizeof *ab->replies);
        ab->replies->max_bytes = ab->o.reply_bytes;
    }
    return OK;
}

void feedback_close(struct ab *ab) {
    while (ab->replies && ab->replies->n) remove_oldest(ab->replies);
    free(ab->replies);
    ab->replies = NULL;
}
