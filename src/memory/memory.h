/*
 * memory: what agents know beyond their prompt — a knowledge base of texts that is searched, and
 * what was said in a conversation.
 *
 * Embeddings come through a `struct embedder`, so that everything here runs with the engine's
 * (embedder_open), with another, or with none: then words alone decide. Results are functions of
 * the texts and the query: not of the order in which files were added, nor of what was cached.
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
 * By the letters: kana is Japanese; Han without kana is Chinese when it has one of that language's
 * own common words, else Japanese; the rest is English.
 */
enum language language_detect(const char *text);
/* Bytes of the first n characters of a text; of all of it when it has fewer. */
size_t utf8_prefix_len(const char *text, size_t len, size_t chars);

/*
 * Readers of documents. Each takes UTF-8 (ERR_FORMAT with the byte otherwise; a zero byte is none)
 * and appends plain text, paragraphs being separated by an empty line; `title` gets what the
 * document calls itself, or nothing. The text is at most as long as the document plus 2 bytes.
 */
int document_read_text(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_html(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err);
int document_read_markdown(const char *doc, size_t len, struct buf *title, struct buf *text,
                           struct error *err);

/* A piece of a text: whole paragraphs where they fit, else whole sentences, else characters. */
struct text_chunk {
    size_t begin, end;
};
/* At most `chars` (≥ 16) characters each, without white space at the ends; every other character of
 * the text is in exactly one. malloc'ed into *out; returns how many. */
int text_split_chunks(const char *text, size_t len, int chars, struct text_chunk **out);

/* rules: tables of regular expressions (text_rules.c) */

/*
 * Appends an answer as people want to read it: without thinking aloud, marks of chat and markup,
 * stutters, and, where it was `cut` at its limit, without the sentence that is not finished. False,
 * and nothing is appended, when no letter and no digit is left.
 */
bool answer_clean(const char *text, bool cut, struct buf *out);
/* What is said where nothing came. */
const char *answer_fallback(enum language l);
/* Appends the sentences of a text that do not ask. */
void statements_extract(const char *text, struct buf *out);
/* What a text says of who speaks, as conversation_merge_facts takes it; {} without. */
json_t *facts_extract(const char *text);
/* Of facts that a model found, those that stand in what was said: half of their words at least. */
json_t *facts_filter_grounded(const json_t *facts, const char *said);

/* embeddings */

/* In double, in the order of the entries; 0 when either is a zero vector. */
double cosine_similarity(const float *a, const float *b, int32_t d);

struct embedder {
    void *ctx;
    int32_t d;
    const char *model_hash; /* names the model and adapter in the cache */
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
 * One SQLite file of documents, cut into chunks, with an index of words (FTS5) and embeddings.
 *
 * Words of Latin, Greek, Cyrillic and the like are words; runs of Han, kana and Hangul are indexed
 * by their pairs of characters, so that words of two are found, which an index of three would miss.
 * A chunk's word score is its BM25 over that of an average chunk with every word of the query once,
 * at most 1; with an embedder the score is (1 - mix) · words + mix · max(0, cosine).
 */
struct knowledge;
struct knowledge *knowledge_open(const char *path, bool create, struct error *err);
void knowledge_close(struct knowledge *k);

struct knowledge_options {
    int chunk_chars;                 /* 0: 800 */
    const struct embedder *embedder; /* NULL: words alone */
    struct progress *progress;       /* of embedding; may be NULL */
};
struct knowledge_report {
    int added, changed, unchanged, removed; /* files */
    int refused;                            /* files, each with a warning that says why */
    int skipped;                            /* files of other kinds in a folder */
    int documents, chunks;                  /* in the whole base now */
    int embedded;                           /* texts that were not in the cache */
};
/*
 * Takes in a file or, recursively, a folder: .txt, .md, .markdown, .html, .htm, and .jsonl of
 * {title, content} or {text}. Files whose content is as it was stay; those of this folder that are
 * gone are removed. All or nothing, but for the embeddings, which are kept as they are made. Hidden
 * files and links inside a folder are not followed.
 */
int knowledge_add(struct knowledge *k, const char *path, const struct knowledge_options *o,
                  struct knowledge_report *out, struct error *err);
/* Forgets a file, or all of a folder. ERR_MISSING when nothing of it is known. */
int knowledge_remove(struct knowledge *k, const char *path, struct knowledge_report *out,
                     struct error *err);

struct knowledge_query {
    const char *text;
    int top;                         /* 0: 5 */
    double threshold;                /* 0: 0.5; below 0: none */
    double mix;                      /* with an embedder: 0: 0.5; below 0: words alone */
    const struct embedder *embedder; /* or NULL */
};
/* An array of {id, title, source, content, score, words, cosine (with an embedder)}, best first;
 * equals by source and place. NULL sets err. */
json_t *knowledge_search(struct knowledge *k, const struct knowledge_query *q, struct error *err);
#define KNOWLEDGE_SNIPPET_CHARS 500
/* Appends each hit as a line "【title】 content", the content cut to so many characters, then "…".
 */
void knowledge_snippets(const json_t *hits, int chars, struct buf *out);
/* An array of {source, hash, documents, chunks} by source. */
json_t *knowledge_list(struct knowledge *k, struct error *err);

/* conversations */

enum {
    CONVERSATION_MAX_EXCHANGES = 10,
    CONVERSATION_MAX_TEXT = 64 << 10, /* bytes kept of one utterance, and of the summary */
    CONVERSATION_MAX_FACTS = 50       /* of one kind */
};

/* Makes a summary, in the language of the talk, of the one before ("" at first) and what is about
 * to be forgotten. */
struct summarizer {
    void *ctx;
    int (*summarize)(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                     struct error *err);
};

/*
 * A conversation: the last ten exchanges word for word, a summary of what came before, and key
 * facts about who speaks. It is kept in the store under its id after every change.
 *
 * When an eleventh exchange comes, the older half is summarised and forgotten; without a
 * summariser the oldest is just forgotten.
 */
struct conversation;
struct conversation *conversation_open(struct store *s /* NULL: in memory only */, const char *id,
                                       struct error *err);
void conversation_close(struct conversation *c);
int conversation_add(struct conversation *c, const char *user, const char *assistant,
                     const struct summarizer *s, struct error *err);
/*
 * Merges facts as a model extracts them: {"名前": text, "興味": […], "好きなもの": […],
 * "その他の情報": […]}. English and Chinese names of the keys count as these; a name is replaced,
 * lists grow by what is new, the oldest beyond CONVERSATION_MAX_FACTS going; null and empty texts
 * say nothing; ERR_FORMAT for anything else.
 */
int conversation_merge_facts(struct conversation *c, const json_t *facts, struct error *err);
/* The JSON schema of what conversation_merge_facts takes, with its keys in a language; malloc'ed.
 */
char *conversation_facts_schema(enum language l);
/* Takes away the facts that hold this text, all of them with NULL, and counts them. */
int conversation_remove_facts(struct conversation *c, const char *text, int *forgotten,
                              struct error *err);
int conversation_clear(struct conversation *c, struct error *err);
/* {exchanges: [{user, assistant}], summary, facts}; borrowed. */
const json_t *conversation_state(const struct conversation *c);
/* Appends summary, facts and exchanges as text for a prompt; with max_chars > 0 the oldest
 * exchanges are left out until it fits. Nothing remembered: nothing appended. */
void conversation_context(const struct conversation *c, enum language l, int max_chars,
                          struct buf *out);
/* The same without the exchanges. */
void conversation_summary_and_facts(const struct conversation *c, enum language l, struct buf *out);
/* Whether the question asks for what the key facts answer (one's name, interests, likes, or all of
 * it); if so, appends the answer in the question's language. */
bool conversation_answer_from_facts(const struct conversation *c, const char *question,
                                    struct buf *out);

#endif
