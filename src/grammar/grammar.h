/*
 * grammar: constrains the texts of a reply, and computes which tokens keep it valid.
 *
 * A `struct grammar` is compiled once from a regular expression, a JSON schema, a GBNF grammar or a
 * list of choices; it is immutable and may be shared by all threads. A `struct grammar_vocab` is a
 * tokenizer's byte trie, immutable too. A `struct grammar_machine` joins one of each with the
 * cached states and masks; one thread drives it, and many replies share it, so that each finds the
 * states and masks of the others. A `struct grammar_state` is one reply's position in the grammar:
 * it belongs to a machine and is released before it.
 *
 * Everything works on bytes, so a token may end or begin inside a character. The allowed tokens
 * depend on the grammar and the bytes read so far only, not on other replies or the cache.
 */
#ifndef SHOAL_GRAMMAR_H
#define SHOAL_GRAMMAR_H

#include "tokenizer/tokenizer.h"

struct grammar;
/*
 * A regular expression that the whole text must match: alternation, (groups), (?:groups),
 * (?<named>), quantifiers (lazy ones are the same language), classes, '.', \d \w \s (ASCII), \p{L}
 * \p{Lu} \p{Han} \p{Hiragana} ..., \xHH \x{H..} \uHHHH; '^' and '$' where a whole alternative
 * begins and ends. Look-around, back-references, \b, flags and possessive quantifiers are refused
 * by name.
 */
struct grammar *grammar_new_regex(const char *text, size_t len, struct error *err);
/*
 * A JSON schema (draft 2020-12, the part in json_schema.c's preamble). Objects have their
 * properties in the schema's order. Blanks are optional between tokens — one space, or a line break
 * and at most 20 blanks —; with `compact` no blanks are allowed and a finite schema has one text
 * per value.
 */
struct grammar *grammar_new_json_schema(const char *text, size_t len, bool compact,
                                        struct error *err);
/* Any JSON object: OpenAI's json_object. */
struct grammar *grammar_new_json_object(struct error *err);
/* GBNF in llama.cpp's syntax, starting at the rule `root`; tokens in <> and left recursion are
 * refused. */
struct grammar *grammar_new_gbnf(const char *text, size_t len, struct error *err);
/* Exactly one of n texts, which may be any bytes. */
struct grammar *grammar_new_choices(const char *const *texts, int n, struct error *err);
/* Sets a budget for this thread until the next call: grammars that it compiles may have only
 * 1/share of the states and expressions that the limits allow, for a first try of bounded cost. The
 * second function reports whether a grammar was refused for that. */
void grammar_set_build_budget(int32_t share);
bool grammar_build_budget_exceeded(void);
void grammar_free(struct grammar *g);
size_t grammar_bytes(const struct grammar *g); /* bytes of memory */
/* Identity: SHA-256 of the kind and the source text. */
const char *grammar_hash(const struct grammar *g);
/* The input of grammar_from_source: the kind's name and the source; for choices the source is every
 * text with its zero byte. */
const char *grammar_kind(const struct grammar *g);
const char *grammar_source(const struct grammar *g, size_t *len);
struct grammar *grammar_from_source(const char *kind, const char *text, size_t len,
                                    struct error *err);
/* Bytes of the shortest text. */
int32_t grammar_min_length(const struct grammar *g);
/* Appends every text in byte order and returns their number; ERR_MEMORY when there are more than
 * `limit` or infinitely many, or one is longer than 4096 bytes or contains a zero byte, or when the
 * grammar's automaton takes too many steps. For tests: the naive twin of masks. */
int grammar_enumerate(const struct grammar *g, int limit, struct strings *out, struct error *err);

struct grammar_vocab;
/* Built from every token's own bytes; special tokens and empty ones are in no mask. */
struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t);
/* The same for n byte strings; a length of 0 omits a token. */
struct grammar_vocab *grammar_vocab_new_pieces(const char *const *pieces, const int32_t *lens,
                                               int32_t n);
void grammar_vocab_free(struct grammar_vocab *v);

struct grammar_machine;
/* `vocab` may be NULL if no mask is requested. Beyond `max_bytes` (0: 64 MiB) the machine drops
 * cached data that no state needs; results stay the same. Borrows both. */
struct grammar_machine *grammar_machine_new(const struct grammar *g, const struct grammar_vocab *v,
                                            size_t max_bytes);
/* Changes max_bytes; takes effect with the next call. */
void grammar_machine_set_limit(struct grammar_machine *m, size_t max_bytes);
void grammar_machine_free(struct grammar_machine *m);
size_t grammar_machine_bytes(const struct grammar_machine *m);
/* True if one step or mask exceeded the limit on work, so that some texts of a very ambiguous
 * grammar can no longer be generated. Generated texts are still valid. */
bool grammar_machine_hit_limit(const struct grammar_machine *m);

struct grammar_state {
    struct grammar_machine *machine;
    int32_t slot;
};
/* The state of the empty text. */
struct grammar_state grammar_state_new(struct grammar_machine *m);
struct grammar_state grammar_state_copy(const struct grammar_state *s);
void grammar_state_release(struct grammar_state *s); /* may be called twice */

/* Reads n bytes. False, without changing the state, when no text of the grammar begins like this.
 */
bool grammar_accept_bytes(struct grammar_state *s, const void *bytes, size_t n);
/* The same with a token's bytes; false for special tokens. */
bool grammar_accept_token(struct grammar_state *s, int32_t token);
/* True if the bytes read are a whole text: the reply may end here. */
bool grammar_is_final(const struct grammar_state *s);
/* Minimum number of bytes needed to complete a text; 0 when final. */
int32_t grammar_min_remaining(const struct grammar_state *s);
/*
 * bits[(V + 31) / 32]: bit i is set when the grammar can continue after token i and, if
 * `max_remaining` is not negative, needs at most `max_remaining` more bytes. With a vocabulary of
 * all 256 bytes and grammar_min_remaining() <= tokens left, max_remaining = tokens left - 1 always
 * allows a token and the reply is complete when the tokens run out. The caller handles end tokens:
 * they are allowed exactly when grammar_is_final(). A mask may be empty when the text can only end;
 * otherwise only when the vocabulary lacks bytes or grammar_machine_hit_limit().
 */
void grammar_mask(struct grammar_state *s, int32_t max_remaining, uint32_t *bits);
/*
 * grammar_accept_token (token -1: none) and then grammar_mask (bits NULL: none) in slices: does
 * about *units of work at most, subtracts the work done from *units, and returns false if work
 * remains: call it again with the same arguments. `left` is the number of tokens left for the
 * reply: the mask then only allows tokens after which the reply can be completed in time, unless no
 * token is such. A unit is one visit to a trie node, a configuration or an edge, some nanoseconds.
 * The slices do not change the result. A machine advances one of its states at a time; until it is
 * done, calls for other states do nothing and return false, and releasing that state frees the
 * machine for them.
 */
bool grammar_advance(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits,
                     int64_t *units);
/* Appends the bytes that must come next in any reply, at most `limit`; does not change the state.
 * Returns their number. */
size_t grammar_jump_forward(struct grammar_state *s, size_t limit, struct buf *out);

#endif
