/*
 * memory: knowledge of agents beyond their prompt — a searchable knowledge base of texts, and the
 * memory of a conversation.
 *
 * Embeddings come from a `struct embedder`: the engine's (embedder_open), another one, or none;
 * without one, only words count. Results are functions of the texts and the query: the order in
 * which files were added and the state of caches do not change them.
 *
 * One thread uses a handle; several processes may share a file.
 */
#ifndef SHOAL_MEMORY_H
#define SHOAL_MEMORY_H

#include "engine/engine.h"
#include "store/store.h"

/* text */

enum language { LANG_JA, LANG_EN, LANG_ZH, N_LANGUAGES };
extern const char *const language_names[N_LANGUAGES]; /* "ja", "en", "zh" */
/*
 * Detects the language by its letters: kana is Japanese; Han without kana is Chinese when it has a
 * common character that only Chinese uses, else Japanese; the rest is English.
 */
enum language language_detect(const char *text);
/* Bytes of the first n characters of a text; of the whole text when it has fewer. */
size_t utf8_prefix_len(const char *text, size_t len, size_t chars);

/*
 * Readers of documents. Each takes UTF-8 (else ERR_FORMAT with the position; zero bytes are
 * refused) and appends plain text, with an empty line between paragraphs; `title` receives the
 * title that the document gives, or nothing. The text is at most as long as the document plus 2
 * bytes.
 */
int document_read_text(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_html(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_markdown(const char *doc, size_t len, struct buf *title, struct buf *text,
                           struct error *err);

/* A piece of a text: whole paragraphs if they fit, else whole sentences, else characters. */
struct text_chunk {
    size_t begin, end;
};
/* Chunks of at most `chars` (≥ 16) characters each, without white space at the ends; every other
 * character of the text is in exactly one. *out receives a malloc'ed array; returns the number. */
int text_split_chunks(const char *text, size_t len, int chars, struct text_chunk **out);

/* rules: tables of regular expressions (text_rules.c) */

/*
 * Appends an answer for people to read: without reasoning, chat marks, markup and repeated text
 * and, if it was `cut` at its limit, without the unfinished sentence. False, and appends nothing,
 * when no letter and no digit is left.
 */
bool answer_clean(const char *text, bool cut, struct buf *out);
/* The answer to give when the model gave none. */
const char *answer_fallback(enum language l);
/* Appends the sentences of a text that are not questions. */
void statements_extract(const char *text, struct buf *out);
/* Facts that a text states about its speaker, in the form for conversation_merge_facts; {} without
 * any. */
json_t *facts_extract(const char *text);
/* Keeps those facts of a model that the text `text` supports: it must contain at least half of
 * their words. */
json_t *facts_filter_grounded(const json_t *facts, const char *text);

/* embeddings */

/* In double, in the order of the entries; 0 when either is a zero vector. */
double cosine_similarity(const float *a, const float *b, int32_t d);

struct embedder {
    void *ctx;
    int32_t d;
    const char *model_hash; /* identifies the model and adapter in the cache */
    /* out: [n][d] */
    int (*embed)(void *ctx, const char *const *texts, int n, float *out, struct error *err);
};
/* The engine's embeddings; texts are cut at the engine's max_len. All borrowed. */
struct engine_embedder {
    struct engine *engine;
    struct model *model;
    struct adapter *adapter; /* or NULL */
    int32_t max_len;         /* tokens */
    char hash[HASH_LEN];
};
int embedder_open(struct embedder *out, struct engine_embedder *e, struct error *err);

/* knowledge */

/*
 * One SQLite file of documents, split into chunks, with an index of words (FTS5) and embeddings.
 *
 * In Latin, Greek, Cyrillic and similar scripts a term is a word; runs of Han, kana and Hangul are
 * indexed by pairs of characters, so that two-character words are found, which an index of three
 * would miss. A chunk's word score is its BM25 over that of an average chunk with every word of the
 * query once, at most 1; with an embedder the score is (1 - mix) · words + mix · max(0, cosine).
 */
struct knowledge;
struct knowledge *knowledge_open(const char *path, bool create, struct error *err);
void knowledge_close(struct knowledge *k);

struct knowledge_options {
    int chunk_chars;                 /* 0: 800 */
    const struct embedder *embedder; /* NULL: words only */
    struct progress *progress;       /* progress of the embedding; may be NULL */
};
struct knowledge_report {
    int added, changed, unchanged, removed; /* files */
    int refused;                            /* files, each with a warning that gives the reason */
    int skipped;                            /* files of other kinds in a folder */
    int documents, chunks;                  /* in the whole base now */
    int embedded;                           /* texts that were not in the cache */
};
/*
 * Adds a file or, recursively, a folder: .txt, .md, .markdown, .html, .htm, and .jsonl of {title,
 * content} or {text}. Unchanged files are skipped; files that no longer exist in this folder are
 * removed. All or nothing, except embeddings, which are stored as they are computed. Hidden files
 * and links inside a folder are not followed.
 */
int knowledge_add(struct knowledge *k, const char *path, const struct knowledge_options *o,
                  struct knowledge_report *out, struct error *err);
/* Removes a file, or all files of a folder. ERR_MISSING when the base contains no such file. */
int knowledge_remove(struct knowledge *k, const char *path, struct knowledge_report *out,
                     struct error *err);

struct knowledge_query {
    const char *text;
    int top;                         /* 0: 5 */
    double threshold;                /* 0: 0.5; below 0: no threshold */
    double mix;                      /* with an embedder: 0: 0.5; below 0: words only */
    const struct embedder *embedder; /* or NULL */
};
/* An array of {id, title, source, content, score, words, cosine (with an embedder)}, best first;
 * ties in order of source and place. NULL sets err. */
json_t *knowledge_search(struct knowledge *k, const struct knowledge_query *q, struct error *err);
#define KNOWLEDGE_SNIPPET_CHARS 500
/* Appends each hit as a line "【title】 content"; content longer than `chars` characters is cut and
 * followed by "…". */
void knowledge_snippets(const json_t *hits, int chars, struct buf *out);
/* An array of {source, hash, documents, chunks} by source. */
json_t *knowledge_list(struct knowledge *k, struct error *err);

/* conversations */

enum {
    CONVERSATION_MAX_EXCHANGES = 10,
    CONVERSATION_MAX_TEXT = 64 << 10, /* bytes kept per utterance, and for the summary */
    CONVERSATION_MAX_FACTS = 50       /* maximum per kind */
};

/* Writes a new summary, in the language of the conversation, from the previous one ("" at first)
 * and the exchanges to be removed. */
struct summarizer {
    void *ctx;
    int (*summarize)(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                     struct error *err);
};

/*
 * A conversation: the last ten exchanges word for word, a summary of earlier ones, and key facts
 * about the user. Every change is written to the store under its id.
 *
 * When an eleventh exchange arrives, the older half is summarised and removed; without a summariser
 * only the oldest exchange is removed.
 */
struct conversation;
struct conversation *conversation_open(struct store *s /* NULL: in memory only */, const char *id,
                                       struct error *err);
void conversation_close(struct conversation *c);
int conversation_add(struct conversation *c, const char *user, const char *assistant,
                     const struct summarizer *s, struct error *err);
/*
 * Merges facts in the form in which a model extracts them: {"名前": text, "興味": […],
 * "好きなもの": […], "その他の情報": […]}. English and Chinese names of the keys are accepted too.
 * A name is replaced. New items are appended to lists; the oldest beyond CONVERSATION_MAX_FACTS are
 * removed. null and empty texts are ignored; ERR_FORMAT for anything else.
 */
int conversation_merge_facts(struct conversation *c, const json_t *facts, struct error *err);
/* The JSON schema of the input of conversation_merge_facts, with its keys in a language; malloc'ed.
 */
char *conversation_facts_schema(enum language l);
/* Removes the facts that contain this text, or all facts (NULL), and counts them. */
int conversation_remove_facts(struct conversation *c, const char *text, int *n_removed,
                              struct error *err);
int conversation_clear(struct conversation *c, struct error *err);
/* {exchanges: [{user, assistant}], summary, facts}; borrowed. */
const json_t *conversation_state(const struct conversation *c);
/* Appends summary, facts and exchanges as text for a prompt; with max_chars > 0 the oldest
 * exchanges are left out until it fits. Appends nothing if the state is empty. */
void conversation_context(const struct conversation *c, enum language l, int max_chars,
                          struct buf *out);
/* The same without the exchanges. */
void conversation_summary_and_facts(const struct conversation *c, enum language l, struct buf *out);
/* If the question asks for key facts (the user's name, interests, likes, or all facts) and they are
 * known, appends the answer in the question's language and returns true. */
bool conversation_answer_from_facts(const struct conversation *c, const char *question,
                                    struct buf *out);

#endif
