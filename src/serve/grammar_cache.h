/*
 * grammar_cache: compiled grammars, shared by requests with the same source.
 *
 * Compilation has a bounded cost. The calling thread first compiles a short source with a small
 * part of the build budget. If that is not enough, a thread of low priority compiles the source
 * while the calling thread waits. The number of waiting threads is limited, in total and per
 * caller; further requests are refused with ERR_STATE and can be tried again. The cache is bounded
 * in bytes, in total and per caller; the caller with the most entries loses its oldest entry first.
 * Any thread may call; texts and names are borrowed for the call. A caller is the API key or the
 * address of a client.
 */
#ifndef SHOAL_SERVE_GRAMMAR_CACHE_H
#define SHOAL_SERVE_GRAMMAR_CACHE_H

#include "grammar/grammar.h"

struct grammar_cache;
struct grammar_cache_options { /* 0: the default in parentheses */
    /* Threads that compile large grammars (1 per 4 processors); threads that may wait in addition
     * (4), and of one caller (2). */
    int compile_threads, max_waiting, max_waiting_per_caller;
    int max_entries; /* (64) */
    size_t bytes; /* bytes of all entries, unused or in use (256 MiB); one caller may have half */
};
struct grammar_cache *grammar_cache_new(const struct grammar_cache_options *o);
void grammar_cache_free(struct grammar_cache *cache); /* no grammar may be in use */
/* The grammar of a source of the kind "json_schema", "json_object" (no text), "regex", "gbnf" or
 * "choices" (texts, each with its zero byte). ERR_USAGE: the source is invalid; ERR_STATE: there is
 * no room for it now. Borrowed until grammar_cache_release. */
struct grammar *grammar_cache_get(struct grammar_cache *cache, const char *caller, const char *kind,
                                  const char *text, size_t len, struct error *err);
void grammar_cache_release(struct grammar_cache *cache, struct grammar *g);
struct grammar_cache_stats {
    int kept, in_use;
    size_t bytes;
    uint64_t compiled; /* number of grammars compiled so far */
};
struct grammar_cache_stats grammar_cache_stats(struct grammar_cache *cache);

#endif
