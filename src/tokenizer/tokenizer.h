/*
 * tokenizer: text to token ids and back, from the vocabularies of GGUF files, tokenizer.json,
 * SentencePiece and llama2.c; and the training of byte-level BPE.
 *
 * A tokenizer is immutable after creation: encode and decode may be called from any thread.
 */
#ifndef SHOAL_TOKENIZER_H
#define SHOAL_TOKENIZER_H

#include "base/base.h"

enum tokenizer_kind { TOKENIZER_BPE, TOKENIZER_SPM, TOKENIZER_UNIGRAM };
/* Byte-level BPE (GPT-2 family; the pre-tokenizer is a PCRE2 pattern), SentencePiece BPE with byte
 * fallback, and SentencePiece unigram with or without byte fallback. */
struct tokenizer;
int32_t tokenizer_vocab_size(const struct tokenizer *t);
int32_t tokenizer_bos(const struct tokenizer *t); /* -1: no such token */
int32_t tokenizer_eos(const struct tokenizer *t);
/* The token that a sequence without a text begins with: BOS or, without it, EOS; -1: neither. */
int32_t tokenizer_first_token(const struct tokenizer *t);
bool tokenizer_add_bos(const struct tokenizer *t);
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);
const char *tokenizer_id_to_piece(const struct tokenizer *t, int32_t id,
                                  int *len); /* as stored in the vocabulary */
int32_t tokenizer_piece_to_id(const struct tokenizer *t,
                              const char *piece); /* id of a stored piece, or -1 */
#define TOKENIZER_ADD_BOS 1                       /* add BOS before the text if the model adds it */
#define TOKENIZER_PARSE_SPECIAL 2 /* the text of a special token becomes the token's id */
#define TOKENIZER_ADD_EOS 4       /* add EOS after the text if the model adds it */
struct token_ids {
    int32_t *v;
    int n, cap;
    /* If the caller sets may_fail, lack of memory for the ids or for the symbols of a word sets
     * `failed`, and the ids are then incomplete. Otherwise it ends the process. */
    bool may_fail, failed;
};
void token_ids_add(struct token_ids *s, int32_t id);
void token_ids_release(struct token_ids *s);
/* Appends to `out`. Any bytes are accepted, at most INT32_MAX / 4; invalid UTF-8 becomes byte
 * tokens if the vocabulary has them. `flags`: TOKENIZER_… */
void tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                      struct token_ids *out);
/* Encodes a text to continue: names of special tokens become tokens, and an empty text the first
 * token. `out` stays empty if there is no such token. */
void tokenizer_encode_prompt(const struct tokenizer *t, const char *text, struct token_ids *out);
/* Appends the bytes of one token; a special token has no bytes unless `specials`. */
void tokenizer_decode_token(const struct tokenizer *t, int32_t id, bool specials, struct buf *out);
/* Appends the bytes of n tokens, without the space that encoding added before the text. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int n, bool specials,
                      struct buf *out);
/* tokenizer_decode that also sets ends [n] to the length of `out` after each token. */
void tokenizer_decode_offsets(const struct tokenizer *t, const int32_t *ids, int n, bool specials,
                              struct buf *out, int32_t *ends);
void tokenizer_free(struct tokenizer *t);

/* The fields that file readers set before tokenizer_new (strings are copied). */
struct tokenizer_spec {
    enum tokenizer_kind kind;
    int32_t n;
    const char **pieces; /* [n], may hold any bytes: lengths in `lens` */
    const int32_t *lens;
    const float *scores;  /* SPM, UNIGRAM: [n] */
    const uint8_t *types; /* [n] GGUF's: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
                             6 byte */
    const char **merges;  /* BPE: "a b" pairs in rank order */
    int32_t n_merges;
    const char *pre; /* BPE: GGUF's tokenizer.ggml.pre ("gpt-2", "qwen2", "llama-bpe", "smollm", …)
                        or, when it contains '\\' or '[', a PCRE2 pattern. SPM, UNIGRAM: the rule
                        for the added space (PREFIX_FIRST, PREFIX_ALWAYS), or NULL */
    const char *normalizer; /* tokenizer.json's normalizer as JSON text, without the steps that turn
                               spaces into ▁; NULL: no normalizer */
    int32_t bos, eos, unk;  /* -1: none */
    bool add_bos, add_eos, add_space_prefix, ignore_merges;
    bool split_words; /* SPM, UNIGRAM: every ▁ begins a word, and no piece crosses words */
    bool user_pieces; /* UNIGRAM: user-defined pieces are pieces with a high score, as in
                         SentencePiece; else they are added tokens */
};
struct tokenizer *tokenizer_new(const struct tokenizer_spec *spec, struct error *err);
/* Readers of tokenizer.json, SentencePiece's tokenizer.model (both: BPE or unigram), and the
 * tokenizer .bin of llama2.c, which must have exactly `vocab` tokens. NULL on an error. */
struct tokenizer *tokenizer_from_json(const char *path, struct error *err);
struct tokenizer *tokenizer_from_sentencepiece(const char *path, struct error *err);
struct tokenizer *tokenizer_from_llama2c(const char *path, int32_t vocab, struct error *err);
/* Byte tokens, three specials, and filler pieces up to `vocab` (NULL below 259): for models with
 * random weights. */
struct tokenizer *tokenizer_new_bytes(int32_t vocab);
const struct tokenizer_spec *tokenizer_get_spec(const struct tokenizer *t); /* for the writers */
int tokenizer_write_json(const struct tokenizer *t, const char *path, struct error *err);
/* Byte-level BPE training: counts the words of `text` that the pre-tokenizer `pre` gives (NULL:
 * "gpt-2") and merges the most frequent pair until there are `vocab` tokens. Of equally frequent
 * pairs it merges the one with the greatest bytes. Special tokens get the first ids; the first
 * n_control of them are control tokens, the others user-defined tokens. */
struct tokenizer *tokenizer_train_bpe(const char *text, size_t len, int32_t vocab, const char *pre,
                                      const char **specials, int n_specials, int n_control,
                                      struct error *err);

/* for chat templates (template/template.h) */

/* A flag of tokenizer_encode: the text continues another text, so no space is added before it. */
#define TOKENIZER_NO_PREFIX_SPACE 0x100
/* Splits a text at its added tokens (control, unknown and user-defined tokens): calls fn with each
 * token's id, and with -1 for the text between two of them. Without `control`, only user-defined
 * tokens count. */
typedef void (*fragment_fn)(void *ctx, int32_t id, const char *p, size_t n);
void split_special_tokens(const struct tokenizer *t, const char *text, size_t len, bool control,
                          fragment_fn fn, void *ctx);
/* SPM: a space is added before the first text only, not after special tokens. */
bool tokenizer_adds_space_once(const struct tokenizer *t);
/* The tokenizer's chat template; NULL: ChatML. The tokenizer owns it and calls `release` when it is
 * replaced and in tokenizer_free. */
struct chat_template;
void tokenizer_attach_template(struct tokenizer *t, struct chat_template *c,
                               void (*release)(struct chat_template *));
struct chat_template *tokenizer_get_template(const struct tokenizer *t);

/* for readers and writers of model files */

/* GGUF's token types. */
enum piece_type {
    PIECE_NORMAL = 1,
    PIECE_UNKNOWN,
    PIECE_CONTROL,
    PIECE_USER,
    PIECE_UNUSED,
    PIECE_BYTE
};

/* A normalizer's JSON text for SentencePiece's settings: a compiled table of replacements, and
 * whether runs of spaces become one. NULL if neither is set; malloc'ed. */
char *normalizer_from_sentencepiece(const void *charsmap, size_t len, bool collapse_spaces);
/* The compiled table of a normalizer that begins with one, malloc'ed, or NULL. */
uint8_t *normalizer_charsmap(const char *json, size_t *len);
/* pretokenizer_pattern returns the pattern for a name of tokenizer.ggml.pre, `pre` itself when it
 * is a pattern, else NULL. pretokenizer_name returns the name for a pattern, or the pattern itself
 * when it has no name. */
const char *pretokenizer_pattern(const char *pre);
const char *pretokenizer_name(const char *pattern, bool ignore_merges);

#endif
