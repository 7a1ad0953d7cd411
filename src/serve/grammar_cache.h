/*
 * grammars: what requests' grammars are compiled to, shared by requests of the same source.
 *
 * Compiling has a bounded cost. A short source is first tried with a small share of the limits, by
 * the thread that asks. A larger one is compiled by a thread of low priority while that waits: few
 * may wait, and of one caller fewer still; the others are refused with ERR_STATE, to be tried
 * again. Compiled grammars are kept in a cache that is bounded in bytes, in all and for each
 * caller; the caller that holds most loses its oldest first. Any thread; texts and names are
 * borrowed for the call.
 */
#ifndef SHOAL_GRAMMARS_H
#define SHOAL_GRAMMARS_H

#include "grammar/grammar.h"

struct grammar_cache;
struct grammar_cache_options { /* 0: what is said */
    int large, waiting, share; /* large ones compiled at once (1 for 4 processors), waiting (4), of
                                  one caller (2) */
    int kept;                  /* entries (64) */
    size_t bytes;              /* of all that is kept or in use (256 MiB); half of it a caller's */
};
struct grammar_cache *grammar_cache_new(const struct grammar_cache_options *o);
void grammar_cache_free(struct grammar_cache *all); /* none may be in use */
/*
 * The grammar of a source: "json_schema", "json_object" (no text), "regex", "gbnf" or "choices"
 * (texts, each with its zero byte). ERR_USAGE: what is wrong with it; ERR_STATE: there is no room
 * for it now. Borrowed until grammar_cache_release.
 */
struct grammar *grammar_cache_get(struct grammar_cache *all, const char *caller, const char *kind,
                                  const char *text, size_t len, struct error *err);
void grammar_cache_release(struct grammar_cache *all, struct grammar *g);
struct grammar_cache_stats {
    int kept, in_use;
    size_t bytes;
    uint64_t compiled; /* so far, without first tries that were given up */
};
struct grammar_cache_stats grammar_cache_stats(struct grammar_cache *all);

#endif
