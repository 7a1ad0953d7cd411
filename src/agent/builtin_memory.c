/*
 * builtin_memory: the tools memory_search and memory_write: the long-term memories of the user.
 *
 * The texts that memory_write stores are the user's own words. The rules of memory/memory.h read
 * the user's messages of the conversation, and the text of the model only selects among the facts
 * that they find. So neither the model, nor a tool's result or a document that it has read, can
 * make a fact about the user.
 */
#define _GNU_SOURCE
#include "agent/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MEMORY_RESULTS = 5, QUERY_CHARS = 500, FACT_CHARS = 300 };

struct memory_tool {
    struct store *store;
    struct memories *memories;
    const struct embedder *embedder;
    const json_t *messages; /* the conversation, or NULL; borrowed */
};

static void memory_release(void *ctx) {
    struct memory_tool *t = ctx;
    if (t) {
        memories_close(t->memories);
        store_close(t->store);
    }
    free(t);
}

static int memory_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    struct memory_tool *t = xcalloc(1, sizeof *t);
    *t = (struct memory_tool){.embedder = o->embedder, .messages = o->messages};
    t->store = store_open(o->memory, err);
    if (t->store) t->memories = memories_open(t->store, o->user ? o->user : "me", 0, err);
    if (t->memories) {
        *ctx = t;
        return OK;
    }
    memory_release(t);
    return err->code;
}

static void memory_add_line(struct buf *out, const json_t *memory) {
    buf_printf(out, "%s: %s (%.10s: %s)\n", json_get_string(memory, "attribute"),
               json_get_string(memory, "value"), json_get_string(memory, "last_stated"),
               json_get_string(memory, "text"));
}

static int search_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct memory_tool *t = ctx;
    const struct memory_query q = {.text = json_get_string(arguments, "query"),
                                   .top = MEMORY_RESULTS,
                                   .embedder = t->embedder,
                                   .count_uses = true};
    json_t *hits = memories_search(t->memories, &q, err), *v;
    size_t i;
    json_array_foreach (hits, i, v) memory_add_line(out, v);
    if (hits && json_array_size(hits) == 0) buf_puts(out, "no memory matches");
    json_decref(hits);
    return hits ? OK : err->code;
}

/* The assistant's message before a message of the conversation, or NULL. */
static const char *message_asked(const json_t *messages, size_t i) {
    const json_t *before = i ? json_array_get(messages, i - 1) : NULL;
    bool assistant = before && strcmp(json_get_string(before, "role"), "assistant") == 0;
    return assistant ? json_string_value(json_object_get(before, "content")) : NULL;
}

/* Learns what message i, which is the user's, and the model's text agree about. */
static int message_learn(struct memory_tool *t, size_t i, const char *fact, struct buf *out,
                         struct error *err) {
    static const char *const lists[] = {"added", "merged"};
    const json_t *message = json_array_get(t->messages, i);
    const struct memory_turn turn = {.role = json_get_string(message, "role"),
                                     .text = json_get_string(message, "content"),
                                     .number = (int64_t)i + 1,
                                     .asked = message_asked(t->messages, i),
                                     .only = fact};
    json_t *result = memories_learn(t->memories, &turn, err), *v;
    size_t n;
    for (size_t k = 0; result && k < ARRAY_LEN(lists); k++)
        json_array_foreach (json_object_get(result, lists[k]), n, v) memory_add_line(out, v);
    json_decref(result);
    return result ? OK : err->code;
}

static int write_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct memory_tool *t = ctx;
    const json_t *message;
    size_t i, before = out->len;
    int rc = OK;
    json_array_foreach (t->messages, i, message)
        if (rc == OK && strcmp(json_get_string(message, "role"), "user") == 0)
            rc = message_learn(t, i, json_get_string(arguments, "fact"), out, err);
    if (rc == OK && out->len == before)
        return error_set(err, ERR_USAGE,
                         "not remembered: the user's own messages do not state this fact");
    return rc;
}

const struct tool_kind
    memory_search_kind = {.need = NEEDS_MEMORY,
                          .arguments = {{"query", "words to search for in the memories of the user",
                                         QUERY_CHARS}},
                          .open = memory_open,
                          .call = search_call,
                          .release = memory_release},
    memory_write_kind = {.need = NEEDS_MEMORY,
                         .arguments = {{"fact", "the fact, in the user's words", FACT_CHARS}},
                         .open = memory_open,
                         .call = write_call,
                         .release = memory_release};
