/*
 * grammar: constrained decoding. It computes which tokens may come next, so that a model's reply is
 * a text of a grammar: it matches a regular expression, a JSON schema, a GBNF grammar or one of
 * several choices.
 *
 * A `struct grammar` is compiled once; it is immutable and may be shared by all threads. A `struct
 * grammar_vocab` is the byte trie of a tokenizer's vocabulary, also immutable. A `struct
 * grammar_machine` has a grammar, a vocabulary and a cache of states and masks, which many replies
 * share. One thread at a time uses a machine. A `struct grammar_state` is one reply's position in
 * the grammar. A state belongs to a machine and must be released before the machine is freed.
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
 * (?<named>), quantifiers (lazy ones match the same texts), classes, '.', \d \w \s (ASCII), \p{L}
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
/* A value of a schema within a longer text: perhaps a space, the value, and then `then`. So a model
 * may write the beginning and the end of the value as tokens that reach beyond it. */
struct grammar *grammar_new_json_value(const json_t *schema, const char *then, struct error *err);
/* Any JSON object: OpenAI's json_object. */
struct grammar *grammar_new_json_object(struct error *err);
/* GBNF in llama.cpp's syntax, starting at the rule `root`; tokens in <> and left recursion are
 * errors. */
struct grammar *grammar_new_gbnf(const char *text, size_t len, struct error *err);
/* Exactly one of n zero-terminated texts, which need not be UTF-8. */
struct grammar *grammar_new_choices(const char *const *texts, int n, struct error *err);
/* Until the next call, grammars compiled by this thread may have only 1/share of the maximum number
 * of states and of the maximum memory for expressions, so that a first attempt has a bounded cost.
 * grammar_build_budget_exceeded reports whether a grammar has exceeded this limit since then. */
void grammar_set_build_budget(int32_t share);
bool grammar_build_budget_exceeded(void);
void grammar_free(struct grammar *g);
size_t grammar_bytes(const struct grammar *g); /* bytes of memory */
/* SHA-256 of kind and source, in hexadecimal digits. */
const char *grammar_hash(const struct grammar *g);
/* The kind ("JSON schema") and the source text, from which grammar_from_source makes an equal
 * grammar. The source of a list of choices is all texts, each with its terminating zero byte. */
const char *grammar_kind(const struct grammar *g);
const char *grammar_source(const struct grammar *g, size_t *len);
struct grammar *grammar_from_source(const char *kind, const char *text, size_t len,
                                    struct error *err);
/* Length in bytes of the shortest text of the grammar. */
int32_t grammar_min_length(const struct grammar *g);
/* Appends all texts of the grammar to `out`, in byte order, and returns their number. ERR_MEMORY
 * when there are more than `limit` or infinitely many texts, when one is longer than 4096 bytes or
 * contains a zero byte, or when the enumeration takes too many steps. Tests compare masks with the
 * result. */
int grammar_enumerate(const struct grammar *g, int limit, struct strings *out, struct error *err);

struct grammar_vocab;
/* The trie of the bytes of all tokens. Special tokens and empty tokens are never in a mask. */
struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t);
/* The same from n byte strings; those of length 0 are never in a mask. */
struct grammar_vocab *grammar_vocab_new_pieces(const char *const *pieces, const int32_t *lens,
                                               int32_t n);
void grammar_vocab_free(struct grammar_vocab *v);

struct grammar_machine;
/* Borrows `g` and `v`; `v` may be NULL if only bytes are read and no masks or tokens are used. If
 * it needs more than `max_bytes` (0: 64 MiB), the machine frees cached data that no state needs;
 * results do not change. */
struct grammar_machine *grammar_machine_new(const struct grammar *g, const struct grammar_vocab *v,
                                            size_t max_bytes);
/* Changes max_bytes, from the next call on. */
void grammar_machine_set_limit(struct grammar_machine *m, size_t max_bytes);
void grammar_machine_free(struct grammar_machine *m);
size_t grammar_machine_bytes(const struct grammar_machine *m);
/* True if the computation of a state or mask reached the limit on work, so that some texts of a
 * very ambiguous grammar cannot be generated. Generated texts are still valid. */
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
/* Reads the bytes of a token in the same way; false for special tokens. */
bool grammar_accept_token(struct grammar_state *s, int32_t token);
/* True if the bytes read are a complete text, so that the reply may end. */
bool grammar_is_final(const struct grammar_state *s);
/* Minimum number of further bytes that complete the text; 0 if the text may end. */
int32_t grammar_min_remaining(const struct grammar_state *s);
/*
 * Writes bits[(V + 31) / 32]: bit i is set if the grammar accepts token i and, if `max_remaining`
 * is not negative, a text can be completed with at most `max_remaining` more bytes. If the
 * vocabulary has all 256 bytes and grammar_min_remaining() <= tokens left, then max_remaining =
 * tokens left - 1 always allows a token, and the reply is complete when no tokens are left. The
 * caller handles end tokens: they are allowed exactly when grammar_is_final(). A mask is empty when
 * the text can only end. It may also be empty when the vocabulary lacks bytes or
 * grammar_machine_hit_limit() is true.
 */
void grammar_mask(struct grammar_state *s, int32_t max_remaining, uint32_t *bits);
/*
 * grammar_accept_token (token -1: skipped) and then grammar_mask (bits NULL: skipped), in slices:
 * does at most about *units of work and subtracts it from *units. Returns false if work remains:
 * the caller must call it again with the same arguments. `left` is the number of tokens left for
 * the reply: the mask allows only tokens after which the reply can be completed with the tokens
 * left; if the reply cannot be completed, there is no such limit. A unit is one visit to a trie
 * node, a configuration or an edge, some nanoseconds. The result does not depend on the slices. A
 * machine advances one state at a time: until the mask of that state is done or the state is
 * released, calls for other states return false immediately.
 */
bool grammar_advance(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits,
                     int64_t *units);
/* Appends the bytes that come next in every reply, at most `limit`; returns their number. Does not
 * change the state. */
size_t grammar_jump_forward(struct grammar_state *s, size_t limit, struct buf *out);

#endif
