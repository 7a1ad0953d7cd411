/* memory: terms of full-text search, and the log of a conversation. Private to this folder. */
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

#define CONVERSATION_KIND "conversation" /* of the document with a conversation's state */
/* The log of a conversation's exchanges; malloc'ed. */
char *conversation_log_name(const char *id);

#endif
