/* memory: terms of full-text search, patterns, the log of a conversation, and the state of the
 * memories of a user. Private to this folder. */
#ifndef SHOAL_MEMORY_INTERNAL_H
#define SHOAL_MEMORY_INTERNAL_H

#include "memory/memory.h"

/* Appends the terms of a text, each followed by a space; *n receives their number. A word is one
 * term, in lower case and at most TERM_BYTES long. A run of Han, kana or Hangul gives its character
 * bigrams and its last character. The only error is ERR_MEMORY. */
int terms_index(const char *text, size_t len, struct buf *out, int64_t *n, struct error *err);

/* A term of a query. */
enum { TERM_BYTES = 64, QUERY_TERMS = 128 };
struct query_term {
    char text[TERM_BYTES + 1];
    bool prefix;   /* a single character, which matches every term that begins with it */
    double weight; /* lower for stop words */
};
/* Writes the distinct terms of a query, in its order; those beyond QUERY_TERMS are ignored. Returns
 * their number, or an error. */
int terms_query(const char *text, struct query_term out[QUERY_TERMS], struct error *err);

/* BM25: the IDF of a term that n_with of n texts have, and the weight of a term that occurs tf
 * times in a text of n_terms terms, when the average is `average`; it is 1 for one occurrence in a
 * text of average length. */
double bm25_idf(double n, double n_with);
double bm25_term_weight(double tf, double n_terms, double average);

/* Kind of the document that has a conversation's state. */
#define CONVERSATION_KIND "conversation"
/* The log of a conversation's exchanges; malloc'ed. */
char *conversation_log_name(const char *id);

/* patterns (pattern.c): PCRE2 patterns that are string literals, compiled once. Texts must be valid
 * UTF-8. A search that exceeds the match limit, as may happen on a very long text with near
 * repetitions, finds nothing. */
enum { PATTERN_GROUPS = 4 };
struct pattern_match {
    /* bytes of the match, then those of each group that took part in it */
    size_t begin[PATTERN_GROUPS], end[PATTERN_GROUPS];
};
/* True if the pattern matches in the text from byte `from` on; *m (may be NULL) receives the first
 * match. */
bool pattern_match(const char *pattern, const char *text, size_t len, size_t from,
                   struct pattern_match *m);
/* The same from the beginning; `group` (may be NULL) receives the first group. */
bool pattern_find(const char *pattern, const char *text, size_t len, struct buf *group);
/* Replaces every match in `text`, which ends with a NUL. */
void pattern_replace(const char *pattern, const char *replacement, struct buf *text);

/* The memories of a user. */
struct memories {
    struct store *store;
    char *user, *kind, *vector_kind, *log; /* names in the store */
    int64_t capacity;
    json_t **v; /* [n] ordered by id; a memory is replaced, never changed */
    int64_t n, cap;
    int64_t last, next; /* number of the last event of the log; id of the next memory */
    json_t *pretence;   /* ids of the conversations that are role plays */
    int64_t epoch; /* distinguishes the numbers before and after memories_delete_all; 0: none yet */
    bool loaded;
    /* The index of the search. Row i is of v[i]; other rows are outdated. */
    struct memory_row {
        int64_t id;
        char *terms; /* output of terms_index, after a space */
        int64_t n_terms;
    } * rows;                     /* [n_rows] */
    int64_t n_rows;               /* at most n */
    struct vector_index *vectors; /* vectors for the first rows; NULL: not loaded */
    char vector_model[HASH_LEN];
};
int64_t memory_id(const json_t *memory);
/* A number as a key, of the documents of a memory in the store or of a JSON object. */
enum { MEMORY_KEY = 24 };
void memory_key(char key[MEMORY_KEY], int64_t id);
/* Reads the memories, or the changes of other processes. */
int memories_refresh(struct memories *m, struct error *err);
/* Index in v, or -1. */
int64_t memories_find(const struct memories *m, int64_t id);
/* Frees the index, which the next search makes again. */
void memories_forget_index(struct memories *m);
/* Seconds since 1970 of a time of clock_utc; -1: the text has another form. */
int64_t memory_seconds(const char *time);
/* The factors of a memory's strength at a time in seconds. */
struct memory_strength {
    double importance, days, recency, use, strength;
    int64_t uses;
};
struct memory_strength memory_strength(const json_t *memory, int64_t now);

#endif
