/*
 * tokenizer: the declarations that the tokenizer's source files share. Private to this folder.
 *
 * Added tokens divide a text into fragments. normalizer.c normalises a fragment if the model has a
 * normalizer. Both kinds of BPE then use one merge loop: the fragment becomes symbols (ids), and
 * the neighbouring pair of lowest rank is merged, the leftmost first, until no pair of the table is
 * left. Byte-level BPE splits by a PCRE2 pattern, begins with bytes, and has ranks from a merge
 * list. SPM replaces spaces by ▁, begins with characters, and has ranks from the pieces' scores.
 * Unigram has the same ▁ and byte fallback as SPM, but maximises the sum of scores (unigram.c).
 *
 * A symbol below spec.n is a token. SPM adds symbols from spec.n to n_symbols - 1 for characters
 * that occur in pieces but are not pieces: they can merge; a symbol that remains is encoded as
 * bytes.
 */
#ifndef SHOAL_TOKENIZER_INTERNAL_H
#define SHOAL_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/tokenizer.h"

#include <pcre2.h>

#define METASPACE_CHAR "\xE2\x96\x81" /* ▁, SentencePiece's space */

struct merge_slot {
    uint64_t key; /* left << 32 | right; UINT64_MAX: empty */
    int32_t rank, id;
};
struct byte_pair {
    int32_t rank, id;
};
struct merge_table {
    struct merge_slot *slots;
    uint64_t mask;    /* slots - 1; at most half of them are used */
    uint64_t *filter; /* Bloom filter with four bits per slot and one hash: most lookups find no
                         pair, and the filter is smaller than the slots by a factor of 32 */
    int32_t n;
};

struct normalizer;
struct trie;
struct tokenizer {
    struct tokenizer_spec spec; /* owned copies */
    struct arena arena;
    int32_t n_symbols; /* [n, n_symbols): SPM's characters without a piece */
    const char **text; /* [n_symbols] bytes of each symbol; spec.pieces is the same array */
    int32_t *lens;
    int32_t *index; /* open addressing: symbol + 1 by hash of its text */
    uint64_t index_mask;
    struct merge_table pairs;
    struct byte_pair *byte_pairs; /* BPE: [256 left][256 right]; rank INT32_MAX: none */
    int32_t byte_ids[256];        /* -1: the vocabulary lacks this byte */
    int32_t
        *added_tokens; /* control, unknown and user-defined tokens, by their bytes, then by id */
    int32_t added_begin[257];
    struct normalizer *norm;    /* NULL: text is not normalised */
    pcre2_code *code;           /* BPE's pre-tokenizer */
    struct trie *trie;          /* UNIGRAM: its normal pieces */
    int32_t ascii[128];         /* SPM: symbol of each one-byte character, or -1 */
    bool prefix_text_only;      /* SPM: a space is added before a text, not after special tokens */
    bool prefix_unless_space;   /* SPM: no space is added before another space */
    bool splits_words;          /* SPM: words are encoded separately: no piece crosses their ends */
    struct chat_template *chat; /* NULL: ChatML */
    void (*chat_free)(struct chat_template *c);
};

/* Scratch of one encode call, freed at its end. */
struct cached_word;
struct merge_entry;
struct viterbi_node;
struct encoder {
    const struct tokenizer *t;
    struct token_ids *out;
    int begin;                /* SPM: where this fragment's ids begin in `out` */
    int32_t *id, *offset;     /* [cap] symbols and their offsets in the text, n used */
    int32_t *prev, *next;     /* [long_cap] links of a long merge */
    struct merge_entry *heap; /* [3 long_cap] */
    int32_t n, cap, long_cap;
    struct viterbi_node *lattice; /* UNIGRAM: positions of an undecided range, [lattice_cap] */
    size_t lattice_cap;
    struct buf text;            /* the fragment with ▁ for spaces, or with a space before it */
    struct buf normal, scratch; /* the normalised fragment, and scratch of normalizer_apply */
    pcre2_match_data *match;
    struct cached_word *cache; /* words of this call already encoded; NULL: a short text */
    bool unknown; /* the word has unknown tokens, so its ids depend on the text before the word */
};

/* tokenizer.c */
int utf8_len(const char *p, size_t left); /* 1..4 bytes of a valid character, 0 when invalid */
/* The lowest id with this text, or -1. */
int32_t vocab_find(const struct tokenizer *t, const char *p, size_t n);
void vocab_index_build(struct tokenizer *t);
void merge_table_init(struct merge_table *p, struct arena *a, int64_t max_pairs);
/* Does nothing if the table has the pair. */
void merge_table_add(struct merge_table *p, int32_t left, int32_t right, int32_t rank, int32_t id);
const struct merge_slot *merge_table_find(const struct merge_table *p, int32_t left, int32_t right);
/* Fills the table from spec.merges; OK or ERR_FORMAT. */
int merge_table_build(struct tokenizer *t, struct error *err);

/* normalizer.c */
struct normalizer *normalizer_new(const char *json, struct error *err);
void normalizer_free(struct normalizer *n);
/* Writes the normalised text to `out`; `scratch` is temporary memory. */
void normalizer_apply(const struct normalizer *n, const char *p, size_t len, struct buf *out,
                      struct buf *scratch);
/* A normalizer's JSON text from its steps, malloc'ed. */
char *normalizer_to_json(const json_t *steps);

/* bpe.c */
int bpe_prepare(struct tokenizer *t, struct error *err);
/* Splits a text by the pre-tokenizer's pattern and calls fn for each word in order; together the
 * words are the text. */
typedef void (*word_fn)(void *ctx, const char *p, size_t n);
void bpe_split(const struct tokenizer *t, pcre2_match_data *match, const char *text, size_t len,
               word_fn fn, void *ctx);
void bpe_encode(struct encoder *e, const char *text, size_t len, bool first);
void bpe_decode(const struct tokenizer *t, int32_t id, struct buf *out);
/* Reserves memory for n symbols. The caller then sets id, offset and n, and encoder_merge merges in
 * place. When memory runs out, sets out->failed and returns false. */
bool encoder_reserve(struct encoder *e, int32_t n);
/* xrealloc, except that when memory runs out and s->may_fail is set, it sets s->failed and returns
 * NULL. */
void *token_ids_realloc(struct token_ids *s, void *p, size_t size);
void encoder_merge(struct encoder *e);
/* Called at the start of each fragment with its length; allocates the cache if the text is long
 * enough to benefit. */
void encoder_init_cache(struct encoder *e, size_t len);
/* Adds the word's ids from the cache, or by `encode`. */
typedef void (*encode_fn)(struct encoder *e, const char *p, size_t n);
void encoder_word(struct encoder *e, const char *p, size_t n, encode_fn encode);
/* bytes_to_unicode_byte returns byte i in GPT-2's order: printable bytes first.
 * bytes_to_unicode_piece writes GPT-2's character for a byte as UTF-8 and a NUL; it returns the
 * length. */
int bytes_to_unicode_byte(int i);
int bytes_to_unicode_piece(int byte, char out[4]);
/* NULL and ERR_FORMAT when the pattern does not compile. In it, \s is Unicode's White_Space. */
pcre2_code *tokenizer_regex_compile(const char *pattern, uint32_t options, struct error *err);

/* spm.c */
/* Values of spec.pre: a space is added before the text only, or also after special tokens; neither
 * adds a space before another space. */
#define PREFIX_FIRST "metaspace-first"
#define PREFIX_ALWAYS "metaspace-always"
int spm_prepare(struct tokenizer *t, struct error *err);
/* The length of the character at p; 1 for bytes outside UTF-8. */
size_t char_len(const char *p, size_t left);
/* Adds the byte tokens of the n bytes if the vocabulary has all of them, else the unknown token, if
 * there is one: once for a run of unknown characters. */
void encoder_byte_fallback(struct encoder *e, const char *p, size_t n);
void spm_encode(struct encoder *e, const char *text, size_t len, bool first);
void spm_decode(const struct tokenizer *t, int32_t id, struct buf *out);
struct spm_merge { /* left and right become id; left_len: bytes of left */
    int32_t left, right, rank, id, left_len;
};
/* All merges of the pair table in the order of their ranks; malloc'ed. */
struct spm_merge *spm_merges(const struct tokenizer *t, int32_t *n);

/* unigram.c */
int unigram_prepare(struct tokenizer *t, struct error *err);
void trie_free(struct trie *t);
/* Encodes a normalised text in which spaces are ▁ already. */
void unigram_viterbi(struct encoder *e, const char *p, size_t len);

#endif
