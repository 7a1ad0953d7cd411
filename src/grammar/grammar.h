/*
 * grammar: constrained decoding. It computes which tokens may come next, so that a reply matches a
 * regular expression, a JSON schema or another grammar.
 *
 * A `struct grammar` is compiled once from a regular expression, a JSON schema, a GBNF grammar or a
 * list of choices; it is immutable and may be shared by all threads. A `struct grammar_vocab` is
 * the byte trie of a tokenizer's vocabulary, also immutable. A `struct grammar_machine` has one of
 * each and a cache of states and masks. One thread at a time uses it; many replies share it and its
 * cache. A `struct grammar_state` is one reply's position in the grammar. It belongs to a machine
 * and must be released before it.
 *
 * Grammars work on bytes, so a token may begin or end inside a character. The allowed tokens depend
 * only on the grammar and the bytes read so far, not on other replies or the cache.
 */
#ifndef SHOAL_GRAMMAR_H
#define SHOAL_GRAMMAR_H

#include "tokenizer/tokenizer.h"

struct grammar;
/*
 * A regular expression that the whole text must match: alternation, (groups), (?:groups),
 * (?<named>), quantifiers (lazy ones are the same language), classes, '.', \d \w \s (ASCII), \p{L}
 * \p{Lu} \p{Han} \p{Hiragana} ..., \xHH \x{H..} \uHHHH; '^' and '$' at the beginning and end of a
 * top-level alternative. Look-around, back-references, \b, flags and possessive quantifiers are
 * refused with a message.
 */
struct grammar *grammar_new_regex(const char *text, size_t len, struct error *err);
/*
 * A JSON schema (draft 2020-12; json_schema.c lists the supported keywords). Objects have their
 * properties in the schema's order. White space between tokens is optional: one space, or a line
 * break and at most 20 spaces or tabs. With `compact` no white space is allowed, so that each value
 * has one text.
 */
struct grammar *grammar_new_json_schema(const char *text, size_t len, bool compact,
                                        struct error *err);
/* Any JSON object: OpenAI's json_object. */
struct grammar *grammar_new_json_object(struct error *err);
/* GBNF in llama.cpp's syntax, starting at the rule `root`; tokens in <> and left recursion are
 * errors. */
struct grammar *grammar_new_gbnf(const char *text, size_t len, struct error *err);
/* Exactly one of n texts of any bytes. */
struct grammar *grammar_new_choices(const char *const *texts, int n, struct error *err);
/* Until the next call, grammars compiled by this thread may have only 1/share of the maximum
 * numbers of states and expressions, so that a first attempt has a bounded cost. The second
 * function reports whether a grammar exceeded this budget. */
void grammar_set_build_budget(int32_t share);
bool grammar_build_budget_exceeded(void);
void grammar_free(struct grammar *g);
size_t grammar_bytes(const struct grammar *g); /* bytes of memory */
/* SHA-256 of the kind and the source text. */
const char *grammar_hash(const struct grammar *g);
/* Kind and source, the input of grammar_from_source. The source of choices is all texts, each with
 * its terminating zero byte. */
const char *grammar_kind(const struct grammar *g);
const char *grammar_source(const struct grammar *g, size_t *len);
struct grammar *grammar_from_source(const char *kind, const char *text, size_t len,
                                    struct error *err);
/* Length of the shortest text in bytes. */
int32_t grammar_min_length(const struct grammar *g);
/* Appends all texts in byte order and returns their number. ERR_MEMORY when there are more than
 * `limit`, when one is longer than 4096 bytes or contains a zero byte, or when the enumeration
 * takes too many steps. Tests compare masks with it. */
int grammar_enumerate(const struct grammar *g, int limit, struct strings *out, struct error *err);

struct grammar_vocab;
/* Built from the bytes of every token. Special tokens and empty tokens are never in a mask. */
struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t);
/* The same from n byte strings; tokens of length 0 are never in a mask. */
struct grammar_vocab *grammar_vocab_new_pieces(const char *const *pieces, const int32_t *lens,
                                               int32_t n);
void grammar_vocab_free(struct grammar_vocab *v);

struct grammar_machine;
/* Borrows both; `v` may be NULL if no mask is requested. Above `max_bytes` (0: 64 MiB) the machine
 * frees cached data that no state needs; results do not change. */
struct grammar_machine *grammar_machine_new(const struct grammar *g, const struct grammar_vocab *v,
                                            size_t max_bytes);
/* Changes max_bytes; applies from the next call on. */
void grammar_machine_set_limit(struct grammar_machine *m, size_t max_bytes);
void grammar_machine_free(struct grammar_machine *m);
size_t grammar_machine_bytes(const struct grammar_machine *m);
/* True if a step or mask exceeded the limit on work, so that some texts of a very ambiguous grammar
 * cannot be generated. Generated texts are still valid. */
bool grammar_machine_hit_limit(const struct grammar_machine *m);

struct grammar_state {
    struct grammar_machine *machine;
    int32_t slot;
};
/* The state before the first byte. */
struct grammar_state grammar_state_new(struct grammar_machine *m);
struct grammar_state grammar_state_copy(const struct grammar_state *s);
void grammar_state_release(struct grammar_state *s); /* may be called twice */

/* Reads n bytes. False, without changing the state, when no text of the grammar begins with all
 * bytes read so far. */
bool grammar_accept_bytes(struct grammar_state *s, const void *bytes, size_t n);
/* The same for the bytes of a token; false for special tokens. */
bool grammar_accept_token(struct grammar_state *s, int32_t token);
/* True if the bytes read are a complete text, so that the reply may end. */
bool grammar_is_final(const struct grammar_state *s);
/* Minimum number of bytes that complete the text; 0 when final. */
int32_t grammar_min_remaining(const struct grammar_state *s);
/*
 * Writes bits[(V + 31) / 32]: bit i is set if the grammar accepts token i and, if `max_remaining`
 * is not negative, a text can be completed with at most `max_remaining` more bytes. If the
 * vocabulary has all 256 bytes and grammar_min_remaining() <= tokens left, then max_remaining =
 * tokens left - 1 always allows a token, and the reply is complete when no tokens are left. The
 * caller handles end tokens: they are allowed exactly when grammar_is_final(). A mask is empty when
 * the text can only end; otherwise only when the vocabulary lacks bytes or after
 * grammar_machine_hit_limit().
 */
void grammar_mask(struct grammar_state *s, int32_t max_remaining, uint32_t *bits);
/*
 * grammar_accept_token (token -1: skipped) and then grammar_mask (bits NULL: skipped), in slices:
 * does at most about *units of work and subtracts it from *units. Returns false if work remains:
 * call it again with the same arguments. `left` is the number of tokens left for the reply: the
 * mask allows only tokens after which the reply can be completed in time, unless there are none. A
 * unit is one visit to a trie node, a configuration or an edge, some nanoseconds. The slices do not
 * change the result. A machine advances one state at a time: until that state is done or released,
 * calls for other states return false immediately.
 */
bool grammar_advance(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits,
                     int64_t *units);
/* Appends the bytes that come next in every reply, at most `limit`; returns their number. Does not
 * change the state. */
size_t grammar_jump_forward(struct grammar_state *s, size_t limit, struct buf *out);

#endif
