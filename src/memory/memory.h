/*
 * memory: a knowledge base of texts with hybrid search (BM25 and embeddings) for
 * retrieval-augmented generation, the memory of a conversation, and long-term memories of users.
 *
 * Embeddings are computed by a `struct embedder`: that of the engine (embedder_open) or one that
 * the caller implements. Without an embedder the search uses words only. Results depend on the
 * texts, the query and the embedder only, not on the order in which files were added or the state
 * of caches.
 *
 * One thread at a time uses a knowledge base, a conversation or the memories of a user; several
 * processes may share a file.
 */
#ifndef SHOAL_MEMORY_H
#define SHOAL_MEMORY_H

#include "engine/engine.h"
#include "store/store.h"

/* text */

enum language { LANG_JA, LANG_EN, LANG_ZH, N_LANGUAGES };
extern const char *const language_names[N_LANGUAGES]; /* "ja", "en", "zh" */
/*
 * Detects the language by its characters: a text with kana is Japanese; one with Han and no kana is
 * Chinese if it has a common character that only Chinese uses, else Japanese; any other text is
 * English.
 */
enum language language_detect(const char *text);
/* The length in bytes of the first `chars` characters of a text, or of the whole text if it is
 * shorter. */
size_t utf8_prefix_len(const char *text, size_t len, size_t chars);

/*
 * These functions convert a document to plain text, with an empty line between paragraphs, and
 * append it to `text`. They append the title of an HTML or Markdown document, if it has one, to
 * `title`. ERR_FORMAT, with the position, if the document is not UTF-8 or has zero bytes. The text
 * is at most 2 bytes longer than the document.
 */
int document_read_text(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_html(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_markdown(const char *doc, size_t len, struct buf *title, struct buf *text,
                           struct error *err);

/* A chunk is text[begin, end), in bytes. It has whole paragraphs if they fit, else whole sentences,
 * else parts of a sentence. */
struct text_chunk {
    size_t begin, end;
};
/* Splits a text into chunks of at most `chars` (≥ 16) characters, without white space at their
 * ends. Every character that is not white space is in exactly one chunk. *out receives a malloc'ed
 * array; returns the number of chunks. */
int text_split_chunks(const char *text, size_t len, int chars, struct text_chunk **out);

/* rules: tables of regular expressions (text_rules.c) */

/*
 * Appends a model's answer without reasoning, chat template tokens, markup and repeated text. If
 * the answer was `cut` at the token limit, removes the unfinished last sentence too, unless it is
 * the only one. Returns false and appends nothing if no letter and no digit remains.
 */
bool answer_clean(const char *text, bool cut, struct buf *out);
/* The text to show when the model's answer is empty. */
const char *answer_fallback(enum language l);
/* Appends the sentences of a text that are not questions. */
void statements_extract(const char *text, struct buf *out);
/* Facts that memory_rules_extract finds in a text, in the form for conversation_merge_facts; {} if
 * there are none. Those without a key of their own become "residence: Osaka". */
json_t *facts_extract(const char *text);
/* The facts, extracted by a model, that `text` supports. The text must contain at least half of a
 * fact's terms, of which common words count less. */
json_t *facts_filter_grounded(const json_t *facts, const char *text);

/* embeddings */

/* Computed in double, in order; 0 if either is a zero vector. */
double cosine_similarity(const float *a, const float *b, int32_t d);

struct embedder {
    void *ctx;
    int32_t d;
    const char *model_hash; /* key of the embedding cache: covers model, adapter and settings */
    /* out: [n][d] */
    int (*embed)(void *ctx, const char *const *texts, int n, float *out, struct error *err);
};
/* Embeddings by the engine. Texts are truncated to max_len tokens. All pointers are borrowed.
 * embedder_open sets `hash`; `out` refers to `e`, which must outlive it. */
struct engine_embedder {
    struct engine *engine;
    struct model *model;
    struct adapter *adapter; /* or NULL */
    int32_t max_len;         /* tokens */
    char hash[HASH_LEN];
    int64_t n_tokens; /* tokens of the texts embedded so far */
};
int embedder_open(struct embedder *out, struct engine_embedder *e, struct error *err);

/* knowledge */

/*
 * A SQLite file of documents, split into chunks, with a full-text index (FTS5) and embeddings.
 *
 * In Latin, Greek, Cyrillic and similar scripts a term is a word. Runs of Han, kana and Hangul are
 * indexed as character bigrams, because many of their words have only two characters. The word
 * score of a chunk is its BM25, divided by the BM25 of a chunk of average length that has every
 * term of the query once, and at most 1. With an embedder the score is (1 - mix) · words + mix ·
 * max(0, cosine).
 */
struct knowledge;
struct knowledge *knowledge_open(const char *path, bool create, struct error *err);
void knowledge_close(struct knowledge *k);

struct knowledge_options {
    int chunk_chars;                 /* characters per chunk; 0: 800 */
    const struct embedder *embedder; /* NULL: words only */
    struct progress *progress;       /* shows the progress of embedding; may be NULL */
};
struct knowledge_report {
    int added, changed, unchanged, removed; /* files */
    int refused;                            /* files with an error; a warning gives the reason */
    int skipped;           /* in a folder: files of other types and symbolic links */
    int documents, chunks; /* in the knowledge base now */
    int embedded;          /* chunks that were not in the embedding cache */
};
/*
 * Adds a file or, recursively, a folder: .txt, .md, .markdown, .html, .htm, and .jsonl of {title,
 * content} or {text}. Unchanged files are skipped. When a folder is added, its files that no longer
 * exist are removed, and hidden files and symbolic links are skipped. The files are updated in one
 * transaction; embeddings are stored afterwards, in batches.
 */
int knowledge_add(struct knowledge *k, const char *path, const struct knowledge_options *o,
                  struct knowledge_report *out, struct error *err);
/* Removes a file, or all files of a folder, from the knowledge base. ERR_MISSING when it has no
 * such file. */
int knowledge_remove(struct knowledge *k, const char *path, struct knowledge_report *out,
                     struct error *err);

struct knowledge_query {
    const char *text;
    int top;                         /* 0: 5 */
    double threshold;                /* minimum score of a result; 0: 0.5; below 0: none */
    double mix;                      /* weight of the embeddings; 0: 0.5; below 0: words only */
    const struct embedder *embedder; /* or NULL */
};
/* An array of {id, title, source, content, score, words, cosine (with an embedder)}, best first.
 * Equal scores are ordered by BM25, then by source and position. NULL sets err. */
json_t *knowledge_search(struct knowledge *k, const struct knowledge_query *q, struct error *err);
#define KNOWLEDGE_SNIPPET_CHARS 500
/* Minimum score of a passage in searches of the tool `knowledge` and of the API. A model asks in
 * its own words, of which a passage that helps may have only some. */
#define KNOWLEDGE_TOOL_THRESHOLD 0.2
/* Appends each hit as a line "【title】 content", with spaces instead of line breaks. Content
 * longer than `chars` characters is truncated and followed by "…". */
void knowledge_snippets(const json_t *hits, int chars, struct buf *out);
/* An array of {source, hash, documents, chunks}, one per file, ordered by source. NULL sets err. */
json_t *knowledge_list(struct knowledge *k, struct error *err);

/* conversations */

enum {
    CONVERSATION_MAX_EXCHANGES = 10,
    CONVERSATION_MAX_TEXT = 64 << 10, /* maximum bytes of a message, and of the summary */
    CONVERSATION_MAX_FACTS = 50       /* per kind */
};

/* `summarize` appends to `out` a new summary, in the language of the conversation, of the previous
 * summary ("" at first) and of the exchanges that will be removed. */
struct summarizer {
    void *ctx;
    int (*summarize)(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                     struct error *err);
};

/*
 * The memory of a conversation: the last exchanges (at most ten) verbatim, a summary of earlier
 * exchanges, and facts about the user. Every change is written to the store under the
 * conversation's id, in one transaction. Several processes may have one conversation open: a change
 * applies to the state in the store, and no exchange is lost. The store keeps every exchange, in
 * full, until the conversation is cleared or deleted.
 *
 * Before an eleventh exchange is added, the older half is summarised and removed from the memory;
 * without a summarizer only the oldest exchange is removed.
 */
struct conversation;
struct conversation *conversation_open(struct store *s /* NULL: in memory only */, const char *id,
                                       struct error *err);
void conversation_close(struct conversation *c);
/* Reads the changes of other processes. */
int conversation_refresh(struct conversation *c, struct error *err);
/* The two texts are truncated to CONVERSATION_MAX_TEXT bytes in the memory, not in the store. */
int conversation_add(struct conversation *c, const char *user, const char *assistant,
                     const struct summarizer *s, struct error *err);
/* Adds an exchange {at (or null), user, assistant} of conversation_history. ERR_FORMAT for
 * other values. */
int conversation_import(struct conversation *c, const json_t *exchange, struct error *err);
/*
 * Merges facts in the form that a model returns: {"名前": text, "興味": […], "好きなもの": […],
 * "その他の情報": […]}. English and Chinese names of the keys are accepted too. A new name replaces
 * the old one. New items are appended to lists; the oldest items beyond CONVERSATION_MAX_FACTS are
 * removed. null and empty texts are ignored. ERR_FORMAT for other keys or types of values.
 */
int conversation_merge_facts(struct conversation *c, const json_t *facts, struct error *err);
/* The JSON schema of the input of conversation_merge_facts, with its keys in language `l`;
 * malloc'ed. */
char *conversation_facts_schema(enum language l);
/* Removes the facts that contain `text`, or all facts (NULL). *n_removed receives their number. */
int conversation_remove_facts(struct conversation *c, const char *text, int *n_removed,
                              struct error *err);
/* Deletes exchanges, summary and facts, also from the store. */
int conversation_clear(struct conversation *c, struct error *err);
/* {exchanges: [{user, assistant}], summary, facts, last: the number of the last exchange};
 * borrowed, and valid until the next change. */
const json_t *conversation_state(const struct conversation *c);
/* Appends summary, facts and exchanges as text for a prompt, with labels in language `l`. With
 * max_chars > 0 the oldest exchanges are omitted until the text fits; then summary and facts are
 * truncated. Appends nothing if the state is empty. */
void conversation_context(const struct conversation *c, enum language l, int max_chars,
                          struct buf *out);
/* Appends summary and facts only. */
void conversation_summary_and_facts(const struct conversation *c, enum language l, struct buf *out);
/* If the question is about facts that are known (the user's name, interests, likes, or all facts),
 * appends the answer in the language of the question and returns true. */
bool conversation_answer_from_facts(const struct conversation *c, const char *question,
                                    struct buf *out);

/* conversations in a store (conversation_list.c) */

/* An array of {id, title, exchanges: how many, last: the number of the last one, updated: its time,
 * or null}, the last used one first. `prefix`: only those whose id begins with it; "": all. The
 * title is that of conversation_rename, or else the beginning of the first exchange. */
json_t *conversation_list(struct store *s, const char *prefix, struct error *err);
/* *bytes receives the size of the exchanges of these conversations as JSON text, without those that
 * version 0.1 stored. */
int conversation_bytes(struct store *s, const char *prefix, int64_t *bytes, struct error *err);
/* An array of at most `limit` exchanges {number, at (null: unknown), user, assistant}, in order,
 * whose numbers are above `after`. ERR_MISSING: there is no such conversation. */
json_t *conversation_history(struct store *s, const char *id, int64_t after, int64_t limit,
                             struct error *err);
/* An array of at most `limit` exchanges that contain `text`, with the id of their conversation, in
 * the order of the list and then of their numbers. Upper and lower case, and full-width and
 * half-width forms, are equal. ERR_USAGE for a text that is not UTF-8. */
json_t *conversation_search(struct store *s, const char *prefix, const char *text, int64_t limit,
                            struct error *err);
/* title "": that of the first exchange again. */
int conversation_rename(struct store *s, const char *id, const char *title, struct error *err);
/* Deletes a conversation with its summary, facts and blackboard. ERR_MISSING: there is no such
 * conversation. */
int conversation_delete(struct store *s, const char *id, struct error *err);

/* long-term memories: the rules (memory_rules.c) */

/*
 * Facts that a user states about himself or herself in one message, by rules for English, Japanese
 * and Chinese: {facts: [{attribute, value, text, change}], refused: [{text, reason}], pretence}.
 *
 * attribute is a name that memory_attribute_find knows. change: "holds", "ends" (value "": every
 * value of the attribute; attribute "": of any attribute whose value contains the value),
 * "corrects" (the value replaces `old`; old "": the value learnt last) or "ends last" (the value
 * learnt last). `text` is the sentence. reason is question, quotation, pretence, instruction,
 * negation, third person, transient or irony; a sentence without a fact and without such a reason
 * is not listed.
 *
 * `pretence`: the conversation is a role play, so that statements are not facts until the user ends
 * it. The result has its new value. `asked`: the assistant's message before this one, or NULL; a
 * question in it ("When is your birthday?") gives a bare answer its attribute, and nothing else is
 * read from it. The cost is bounded: a message is read up to MEMORY_TURN_BYTES.
 */
enum { MEMORY_TURN_BYTES = 16 << 10, MEMORY_VALUE_CHARS = 200, MEMORY_TURN_FACTS = 64 };
json_t *memory_rules_extract(const char *text, const char *asked, bool pretence);
/* An attribute. importance: 0 to 1, of its memories. `single`: a new value replaces the old one.
 * `words`: by which a search finds it. */
struct memory_attribute {
    const char *name;
    double importance;
    bool single;
    const char *words;
};
/* The attribute of a name, or NULL. */
const struct memory_attribute *memory_attribute_find(const char *name);

/* long-term memories: the store (memories.c) */

/*
 * The memories of one user in a store. A handle sees the memories of its user only. A memory is
 *
 *     {id, attribute, value, text, source: {conversation, turn, speaker, time}, valid_from,
 *      valid_until (null while it holds), stated, last_stated, uses, last_used (or null),
 *      importance}
 *
 * where `text` is the sentence that it came from, cut to 500 characters, and `stated` how often the
 * user said it. Times are those of clock_utc. The value of a memory is its strength, importance ×
 * recency × use:
 *
 *     recency = 2^(-days / 180), with the days since last_used or last_stated, whichever is later
 *     use     = (1 + uses) / (2 + uses)
 *
 * Every change is one transaction and is recorded in a log, from which memories_undo takes it back
 * and from which the handles of other processes read it. Above its capacity a user loses the
 * memories that no longer hold first, then those of the lowest strength.
 */
enum {
    MEMORIES_CAPACITY = 10000,      /* default */
    MEMORIES_MAX_CAPACITY = 100000, /* largest */
    MEMORIES_USER_BYTES = 200       /* longest name of a user */
};
struct memories;
/* capacity 0: MEMORIES_CAPACITY. ERR_USAGE: the name is empty, too long, not UTF-8 or has control
 * characters. */
struct memories *memories_open(struct store *s, const char *user, int64_t capacity,
                               struct error *err);
void memories_close(struct memories *m);
/* The number of memories of a user, without opening them. */
int memories_count(struct store *s, const char *user, int64_t *n, struct error *err);
/* The number of events of the log, which grows with every change. */
int64_t memories_events(const struct memories *m);

struct memory_turn {
    const char *role; /* "user": any other role is refused as a whole */
    const char *text;
    const char *conversation; /* NULL: none */
    int64_t number;           /* position in the conversation; 0: not known */
    const char *time;         /* NULL: now */
    const char *asked;        /* the assistant's message before it, or NULL; see above */
    const char *only;         /* NULL: all facts; else those whose value occurs in this text */
};
/* Learns the facts of a turn. Returns {added, merged, ended, pruned: [memory], refused: [{text,
 * reason}]}; NULL sets err. ERR_USAGE: a time that is not one. */
json_t *memories_learn(struct memories *m, const struct memory_turn *t, struct error *err);

struct memory_query {
    const char *text;                /* NULL or "": all memories, by their strength */
    const char *attribute;           /* NULL: any */
    const char *at;                  /* memories that hold at this time; NULL: now */
    bool ended;                      /* also memories that no longer hold */
    int64_t top;                     /* most results; 0: 10 */
    double threshold;                /* minimum relevance; 0: 0.2; below 0: none */
    double mix;                      /* weight of the embeddings; 0: 0.5; below 0: words only */
    const struct embedder *embedder; /* or NULL */
    bool count_uses;                 /* the results count as used */
};
/* An array of memories with {score, relevance, words, cosine (with an embedder), strength}, best
 * first. relevance is computed as the score of knowledge_search; score = relevance × (0.8 + 0.2 ×
 * strength), so that strength decides between results of similar relevance. The result is exact:
 * vectors of 8 bits only select the memories whose vectors are compared. NULL sets err. */
json_t *memories_search(struct memories *m, const struct memory_query *q, struct error *err);
/* All memories, in order of id; `ended`: also those that no longer hold. NULL sets err. */
json_t *memories_list(struct memories *m, bool ended, struct error *err);
/* {memory, strength: {importance, recency, use, days, uses, strength}, history: [{at, operation,
 * before, after}]}. ERR_MISSING: the user has no such memory. */
json_t *memories_why(struct memories *m, int64_t id, const char *now, struct error *err);
/* Deletes a memory with its vector and its text in the log; memories_undo cannot bring it back. */
int memories_delete(struct memories *m, int64_t id, struct error *err);
/* Deletes the memories whose source is this conversation in the same way. *n receives the number of
 * memories. */
int memories_delete_conversation(struct memories *m, const char *conversation, int64_t *n,
                                 struct error *err);
/* Deletes everything of the user. *n receives the number of memories. */
int memories_delete_all(struct memories *m, int64_t *n, struct error *err);
/* Takes back the last change that is not taken back yet: {operation, at, events: number}.
 * ERR_MISSING: every change is taken back. */
json_t *memories_undo(struct memories *m, struct error *err);
/* Adds a memory of memories_list, with a new id. *added is false if the user has it already.
 * ERR_FORMAT: it is not a memory. */
int memories_import(struct memories *m, const json_t *memory, bool *added, struct error *err);

/* vectors (vector_index.c) */

/*
 * Vectors of unit length, each with a copy in 8 bits. The scan of the copies gives every cosine to
 * within a bound that holds for each vector, so that only the vectors that may be among the best
 * are compared exactly.
 */
struct vector_index;
struct vector_index *vector_index_new(int32_t d);
void vector_index_free(struct vector_index *x);
/* Appends a vector, which is normalised. ERR_NUMERIC: NaN or Inf. */
int vector_index_add(struct vector_index *x, const float *v, struct error *err);
int64_t vector_index_size(const struct vector_index *x);
/* cosine and bound: [size]; |cosine - exact cosine| ≤ bound. query: [d]. */
void vector_index_scan(const struct vector_index *x, const float *query, float *cosine,
                       float *bound);
double vector_index_cosine(const struct vector_index *x, const float *query, int64_t i);

#endif
