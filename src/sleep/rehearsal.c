/*
 * rehearsal: questions of other tasks, which the training repeats so that the adapter keeps them.
 *
 * Families have endless questions: those of the train split are learned, those of the dev split
 * measured. Of a file every fifth line is measured and never learned.
 */
#define _GNU_SOURCE
#include "sleep/internal.h"

#include <stdlib.h>
#include <string.h>

enum { HELD_OUT_EVERY = 5 };

static bool turn_is(const json_t *turn, const char *role) {
    return strcmp(json_get_string(turn, "role"), role) == 0 &&
           json_is_string(json_object_get(turn, "content"));
}

/* The messages of a line, whose last one is the answer; NULL: the line has another form. */
static json_t *line_messages(const json_t *line) {
    const json_t *question = json_object_get(line, "question"),
                 *answer = json_object_get(line, "answer");
    json_t *messages = json_object_get(line, "messages");
    const size_t n = json_array_size(messages);
    if (n >= 2 && turn_is(json_array_get(messages, n - 1), "assistant"))
        return json_incref(messages);
    if (!question) question = json_object_get(line, "prompt");
    if (!json_is_string(question) || !json_is_string(answer)) return NULL;
    messages = json_array();
    messages_add(messages, "user", json_string_value(question));
    messages_add(messages, "assistant", json_string_value(answer));
    return messages;
}

static int line_read(void *ctx, const json_t *line, int number, struct error *err) {
    struct sleep_rehearsal *r = ctx;
    json_t *messages = line_messages(line);
    const size_t n = json_array_size(r->trained) + json_array_size(r->held_out);
    if (!messages)
        return error_set(err, ERR_FORMAT,
                         "line %d: expected {\"messages\": […]} that end with the assistant's "
                         "answer, or {\"question\": text, \"answer\": text}",
                         number);
    json_array_append_new(n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 ? r->held_out : r->trained,
                          messages);
    return OK;
}

static int file_open(struct sleep_rehearsal *r, struct error *err) {
    r->trained = json_array();
    r->held_out = json_array();
    int rc = json_file_each(r->name, line_read, r, err);
    if (rc == OK && json_array_size(r->held_out) == 0)
        rc = error_set(err, ERR_FORMAT,
                       "%zu lines; every fifth is for measuring, so at least %d are needed",
                       json_array_size(r->trained), HELD_OUT_EVERY);
    return rc == OK || strstr(err->text, r->name) ? rc : error_wrap(err, "'%s'", r->name);
}

int sleep_rehearsal_open(const struct sleep_options *o, struct sleep_rehearsal *out,
                         struct error *err) {
    bool pick[MAX_FAMILIES] = {false};
    *out = (struct sleep_rehearsal){.name = o->rehearse};
    if (!o->rehearse) return OK;
    if (path_exists(o->rehearse)) {
        out->n_sets = 1;
        return file_open(out, err);
    }
    if (families_parse(o->rehearse, pick, err) != OK) return err->code;
    for (int f = 0; f < family_count(); f++)
        if (pick[f]) out->families[out->n_sets++] = f;
    return OK;
}

void sleep_rehearsal_release(struct sleep_rehearsal *r) {
    json_decref(r->trained);
    json_decref(r->held_out);
    *r = (struct sleep_rehearsal){0};
}

/* Item i of a family with its answer, {messages, tools}. */
static json_t *family_conversation(int family, enum data_split split, uint64_t seed, int64_t i) {
    struct task_item it;
    family_item(family, split, seed, (uint32_t)i, false, &it);
    json_t *v = it.chat ? json_deep_copy(it.chat) : json_pack("{s:[]}", "messages");
    json_t *messages = json_object_get(v, "messages");
    char *reply = task_item_reply(&it, false);
    if (!it.chat) messages_add(messages, "user", it.question);
    messages_add(messages, "assistant", reply);
    free(reply);
    task_item_release(&it);
    return v;
}

const char *sleep_rehearsal_set(const struct sleep_rehearsal *r, int set) {
    return r->trained ? path_name(r->name) : task_families[r->families[set]]->name;
}

int64_t sleep_rehearsal_size(const struct sleep_rehearsal *r, bool held_out, int64_t most) {
    return r->trained ? MIN((int64_t)json_array_size(held_out ? r->held_out : r->trained), most)
                      : most;
}

json_t *sleep_rehearsal_at(const struct sleep_rehearsal *r, int set, bool held_out, int64_t i,
                           int64_t n, uint64_t seed) {
    const json_t *lines = held_out ? r->held_out : r->trained;
    if (!r->trained)
        return family_conversation(r->families[set], held_out ? SPLIT_DEV : SPLIT_TRAIN, seed, i);
    const size_t at = (size_t)(i * (int64_t)json_array_size(lines) / n); // evenly spaced
    return json_pack("{s:O}", "messages", json_array_get(lines, at));
}

int64_t sleep_rehearsal_write(const struct sleep_rehearsal *r, const struct sleep_options *o,
                              struct buf *text) {
    const int64_t n = r->n_sets * sleep_rehearsal_size(r, false, o->rehearse_n);
    for (int64_t i = 0; i < n; i++) {
        buf_add_json_line(text, sleep_rehearsal_at(r, (int)(i % r->n_sets), false, i, n,
                                                   (uint64_t)o->learn.train.seed));
    }
    return n;
}
