/*
 * memory: a knowledge base of texts with hybrid search (BM25 and embeddings) for
 * retrieval-augmented generation, and the memory of a conversation.
 *
 * Embeddings are computed by a `struct embedder`: that of the engine (embedder_open) or one that
 * the caller implements. Without an embedder the search uses words only. Results depend on the
 * texts, the query and the embedder only, not on the order in which files were added or the state
 * of caches.
 *
 * One thread at a time uses a knowledge base or a conversation; several processes may share a file.
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
/* Facts that the author of a text states about himself or herself, in the form for
 * conversation_merge_facts; {} if there are none. */
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

#endif
