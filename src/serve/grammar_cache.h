/*
 * grammar_cache: compiled grammars, shared by requests with the same source.
 *
 * Compiling has a bounded cost. The calling thread first tries a short source with a small share of
 * the limits. A larger one is compiled by a thread of low priority while the caller waits: few may
 * wait, and fewer for one caller; the others are refused with ERR_STATE and can try again. Compiled
 * grammars are kept in a cache that is bounded in bytes, in total and per caller; the caller that
 * holds the most loses its oldest entry first. Any thread may call; texts and names are borrowed
 * for the call.
 */
#ifndef SHOAL_SERVE_GRAMMAR_CACHE_H
#define SHOAL_SERVE_GRAMMAR_CACHE_H

#include "grammar/grammar.h"

struct grammar_cache;
struct grammar_cache_options { /* 0: the default in parentheses */
    int large, waiting, share; /* large grammars compiled at once (1 per 4 processors), waiting (4),
                                  waiting per caller (2) */
    int kept;                  /* entries (64) */
    size_t bytes; /* bytes of all entries, kept or in use (256 MiB); one caller may have half */
};
struct grammar_cache *grammar_cache_new(const struct grammar_cache_options *o);
void grammar_cache_free(struct grammar_cache *all); /* no grammar may be in use */
/*
 * The grammar of a source: "json_schema", "json_object" (no text), "regex", "gbnf" or "choices"
 * (texts, each with its zero byte). ERR_USAGE: the source is invalid; ERR_STATE: there is no room
 * for it now. Borrowed until grammar_cache_release.
 */
struct grammar *grammar_cache_get(struct grammar_cache *all, const char *caller, const char *kind,
                                  const char *text, size_t len, struct error *err);
void grammar_cache_release(struct grammar_cache *all, struct grammar *g);
struct grammar_cache_stats {
    int kept, in_use;
    size_t bytes;
    uint64_t compiled; /* so far, without first tries that exceeded their share */
};
struct grammar_cache_stats grammar_cache_stats(struct grammar_cache *all);

#endif
