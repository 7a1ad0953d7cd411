/*
 * Inside memory: texts as the terms of an index.
 */
#ifndef SHOAL_MEMORY_INTERNAL_H
#define SHOAL_MEMORY_INTERNAL_H

#include "memory/memory.h"

/* Appends the terms of a text, each followed by a space, and counts them: words in lower case,
 * and of a run of Han, kana or Hangul its pairs of characters and its last character. ERR_MEMORY
 * only. */
int terms_index(const char *text, size_t len, struct buf *out, int64_t *n, struct error *err);

/* What a query looks for. */
enum { TERM_BYTES = 64, QUERY_TERMS = 128 };
struct query_term {
    char text[TERM_BYTES + 1];
    bool prefix;   /* a single character: every term that begins with it */
    double weight; /* less for the words that hold every sentence together */
};
/* Distinct terms in the order of the query; those beyond QUERY_TERMS are left out. Returns how
 * many, or an error. */
int terms_query(const char *text, struct query_term out[QUERY_TERMS], struct error *err);

#endif
