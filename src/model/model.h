/*
 * model: a frozen base — its files, its tokenizer, its shape — and the forward pass over a batch of
 * rows.
 *
 * A `struct model` is opened once, never written again and shared by all threads. It is opened in
 * place from a GGUF v3 file or a Hugging Face directory; f32 (and exact-class bf16) weights stay
 * memory-mapped, the rest is packed for the kernels. In memory there is one convention, Hugging
 * Face's: rotary pairs are (i, i + head_dim/2); GGUF llama files, whose q and k rows are permuted,
 * are un-permuted when opened and permuted when written.
 *
 * Letters: B rows, T tokens, D d_model, H n_heads, K n_kv_heads, E head_dim, F d_ff, V vocab_size,
 * R rank, L n_layers.
 */
#ifndef SHOAL_MODEL_H
#define SHOAL_MODEL_H

#include "kernel/kernel.h"

/* shape */

/* An architecture is one row of the table in arch.c: its names in both formats and what is truly
 * its own. */
struct arch {
    const char *name;     /* "llama", "qwen3": GGUF general.architecture and HF model_type */
    const char *hf_class; /* "LlamaForCausalLM" */
    bool qk_norm;         /* RMS norm of each q and k head before RoPE */
    bool gguf_permuted;   /* q/k rows permuted in GGUF relative to Hugging Face */
};
const struct arch *arch_find(const char *name); /* NULL when unknown */

struct model_config {
    const struct arch *arch;
    int32_t n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size, max_seq_len;
    float rope_theta, rms_norm_eps;
    bool tied; /* the head is the embedding */
};

/* The seven linear maps of a layer that adapters may change, in this order everywhere. */
enum proj { PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN, N_PROJ };
extern const char *const proj_names[N_PROJ];    /* "q_proj" … */
extern const char *const proj_hf_paths[N_PROJ]; /* "self_attn.q_proj" … */
int32_t proj_in(const struct model_config *c, enum proj p);
int32_t proj_out(const struct model_config *c, enum proj p);

struct layer {
    struct matrix proj[N_PROJ];
    const float *attn_norm, *ffn_norm; /* [D] */
    const float *q_norm, *k_norm;      /* [E], or NULL */
};

struct model {
    char *name; /* file's or folder's name without its ending: "fry" */
    char *path;
    struct model_config config;
    struct layer *layers;    /* [L] */
    struct matrix embed;     /* [V, D] */
    struct matrix head;      /* [V, D]; the same as embed when tied */
    const float *final_norm; /* [D] */
    enum tensor_type type;   /* of most weights */
    enum numeric_class cls;
    struct tokenizer *tok; /* NULL when the files hold none */
    char *chat_template;   /* Jinja text from the files, or NULL; rendered as ChatML here */
    struct arena arena;    /* packed weights and everything small */
    struct mapping *maps;
    int n_maps;
    char hash[HASH_LEN]; /* filled by model_hash */
};

/* `path`: a GGUF file, a Hugging Face directory, or the hf: name of a pulled one (store.h). */
struct model *model_open(const char *path, enum numeric_class cls, struct error *err);
void model_close(struct model *m);
/* Its shape and the bytes it will take, from the headers alone. */
struct model_size {
    struct model_config config;
    enum tensor_type type; /* of most weights */
    size_t weights;        /* as they will be held, packed or in place */
    size_t passing;        /* the most that is read besides while one weight is packed */
    size_t file;           /* tensors as they are stored */
    size_t words;          /* stored bytes of what the tokenizer is made from */
};
int model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                  struct error *err);
/* SHA-256, computed on first use and kept (call it once before threads share the model): of a
 * single file's bytes, of config.json and the shards of a directory, of config and rows of a model
 * in memory. Who changes weights in place clears m->hash[0]. */
const char *model_hash(struct model *m, struct error *err);
/* `type`: what dense weights are written as; norms stay f32. Both are canonical: same content, same
 * bytes. */
int model_write_gguf(const struct model *m, const char *path, enum tensor_type type,
                     struct error *err);
int model_write_hf(const struct model *m, const char *dir, enum tensor_type type,
                   struct error *err);
/* A model in memory with every weight f32 and writable (pretraining, tests, `model new`): norms 1,
 * matrices N(0, 0.02²) with o and down scaled by 1/sqrt(2L), from the seed. */
struct model *model_new(const struct model_config *c, uint64_t seed, enum numeric_class cls);
/* The shapes `model new` and `bench` know: smollm-135m, qwen3-0.6b, stories15m, fry, and tiny ones
 * for tests. */
int shape_find(const char *name, struct model_config *out, struct error *err);
/* llama2.c: legacy .bin (v0) with its tokenizer .bin, as a model in memory. */
struct model *llama2c_open(const char *bin, const char *tokenizer, enum numeric_class cls,
                           struct error *err);
int64_t model_param_count(const struct model_config *c);

/* safetensors and GGUF, shared with adapters */

struct tensor_info {
    char *name;
    enum tensor_type type;
    int n_dims;
    int64_t dims[4]; /* row-major, outermost first, in both formats (GGUF's order is reversed on
                        reading) */
    const void *data;
    size_t size; /* bytes */
};
struct safetensors {
    struct mapping map;
    struct tensor_info *tensors;
    int n_tensors;
    json_t *metadata; /* string → string, or NULL */
};
int safetensors_open(struct safetensors *st, const char *path, struct error *err);
const struct tensor_info *safetensors_find(const struct safetensors *st, const char *name);
void safetensors_close(struct safetensors *st);
/* Canonical: tensors in the given order, metadata keys sorted, header padded with spaces to 8. */
int safetensors_write(const char *path, const struct tensor_info *tensors, int n,
                      const json_t *metadata, struct error *err);

/* tokenizer */

enum tokenizer_kind { TOK_BPE, TOK_SPM };
/* Byte-level BPE (GPT-2 family; the pre-tokenizer is a PCRE2 pattern) and SentencePiece BPE with
 * byte fallback. Immutable after opening; encode and decode may be called from any thread. */
struct tokenizer;
int32_t tok_vocab_size(const struct tokenizer *t);
int32_t tok_bos(const struct tokenizer *t); /* -1 when there is none */
int32_t tok_eos(const struct tokenizer *t);
bool tok_add_bos(const struct tokenizer *t);
bool tok_is_special(const struct tokenizer *t, int32_t id);
const char *tok_piece(const struct tokenizer *t, int32_t id,
                      int *len);                                /* as stored in the vocabulary */
int32_t tok_find(const struct tokenizer *t, const char *piece); /* id of a stored piece, or -1 */
#define TOK_BOS 1     /* add what the model adds before a text */
#define TOK_SPECIAL 2 /* the text of special tokens becomes their id */
struct ids {
    int32_t *v;
    int n, cap;
};
void ids_add(struct ids *s, int32_t id);
void ids_release(struct ids *s);
/* Appends to `out`. Any bytes are accepted; invalid UTF-8 goes through byte tokens. */
void tok_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                struct ids *out);
/* Appends the bytes of one token; special tokens give nothing unless `specials`. */
void tok_decode(const struct tokenizer *t, int32_t id, bool specials, struct buf *out);
void tok_decode_all(const struct tokenizer *t, const int32_t *ids, int n, bool specials,
                    struct buf *out);
void tok_free(struct tokenizer *t);

/* What the file readers fill in to make one (strings are copied). */
struct tok_spec {
    enum tokenizer_kind kind;
    int32_t n;
    const char **pieces; /* [n], may hold any bytes: lengths beside */
    const int32_t *lens;
    const float *scores;  /* SPM: [n] */
    const uint8_t *types; /* [n] GGUF's: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
                             6 byte */
    const char **merges;  /* BPE: "a b" pairs in rank order */
    int32_t n_merges;
    const char *pre; /* GGUF's tokenizer.ggml.pre ("gpt-2", "qwen2", "llama-bpe", "smollm", …) or,
                        when it contains '\\' or '[', a PCRE2 pattern itself */
    int32_t bos, eos, unk; /* -1: none */
    bool add_bos, add_space_prefix, ignore_merges;
};
struct tokenizer *tok_new(const struct tok_spec *spec, struct error *err);
struct tokenizer *tok_from_json(const char *path,
                                struct error *err); /* tokenizer.json: BPE kinds */
struct tokenizer *tok_from_sentencepiece(const char *path,
                                         struct error *err); /* tokenizer.model, BPE only */
struct tokenizer *tok_from_llama2c(const char *path, int32_t vocab, struct error *err);
/* Byte tokens, three specials, and filler pieces up to `vocab` (NULL below 259): for models with
 * random weights. */
struct tokenizer *tok_byte_fallback(int32_t vocab);
const struct tok_spec *tok_spec_of(const struct tokenizer *t); /* for the writers */
int tok_write_json(const struct tokenizer *t, const char *path, struct error *err);
/* Byte-level BPE training: counts pre-tokens of `texts`, merges the most frequent pair (ties: the
 * pair whose two pieces are lexicographically greatest, as GPT-2-style trainers do) until `vocab`.
 * Specials get the first ids. */
struct tokenizer *tok_train_bpe(const char *text, size_t len, int32_t vocab, const char *pre,
                                const char **specials, int n_specials, struct error *err);

/* chat */

struct message {
    const char *role, *content;
};
/* ChatML: <|im_start|>role\ncontent<|im_end|>\n … and, to generate, <|im_start|>assistant\n.
 * Appends ids; `mask` (may be NULL) gets one byte a token: 1 where the assistant's own words are,
 * <|im_end|> included. A tokenizer without the two special tokens gets them as plain text. */
void chat_encode(const struct tokenizer *t, const struct message *msgs, int n,
                 bool generation_prompt, struct ids *out, struct buf *mask);

/* forward pass */

/* One adapter's low-rank map of one projection: y += scale · B (A x). */
struct lora {
    const float *a; /* [R, in] */
    const float *b; /* [out, R] */
    int32_t r;      /* 0: none here */
    float scale;
};
/* The same as the forward pass reads it: B transposed, both in f32, bf16, f16 or int8 (each row of
 * A and of Bᵀ with its own scale). Immutable. */
struct lora_map {
    const void *a;     /* [R, in] */
    const void *bt;    /* [R, out] */
    const float *gain; /* [R] what t = A x is multiplied by: scale, times both int8 scales */
    int32_t r;
};
struct lora_pack {
    enum elem elem;
    struct lora_map *maps; /* [L][N_PROJ] */
    size_t bytes;          /* all of it */
    void *data;
};
struct lora_pack *lora_pack_new(const struct model_config *c, const struct lora *loras,
                                enum elem elem);
void lora_pack_free(struct lora_pack *p); /* NULL is fine */

/*
 * A rank-1 perturbation that is stored nowhere: ΔW = u vᵀ for every projection, the entries of u
 * [out] and v [in] are ±1 from a counter, rng (seed, RNG_NOISE, member, layer · N_PROJ +
 * projection): bits of v, then of u.
 */
struct lora_noise {
    uint64_t seed;
    uint32_t member;
};
/* The signs [begin, begin + n) of one factor; begin is a multiple of 16. */
void noise_signs(const struct lora_noise *z, int32_t layer, enum proj p, bool u, int64_t begin,
                 int64_t n, float *out);

/* One term of a segment's sum of low-rank maps: weight · (pack, or noise when pack is NULL). */
struct lora_part {
    const struct lora_pack *pack;
    struct lora_noise noise;
    float weight;
};
struct row {
    int32_t token;
    int32_t pos;  /* position in its sequence: it sees positions 0..pos of its slot */
    int32_t slot; /* which KV sequence */
};
/* Rows [begin, end) run under the base plus the sum of the parts, added in their order. Rows are
 * sorted so that segments do not overlap. */
struct segment {
    int32_t begin, end;
    const struct lora_part *parts;
    int32_t n_parts;
};

/*
 * KV cache: pages of KV_PAGE positions, all layers and heads of a position together, counted by
 * reference. A slot is a sequence: a table of pages. Sequences share pages; who writes into a
 * shared one gets its own copy first. Keys and values are f32, bf16, f16 or int8 (each head's row
 * with its own scale).
 */
#define KV_PAGE 32
struct kv;
struct kv_options {
    int32_t n_slots, slot_len; /* positions a slot may have */
    int32_t n_pages;           /* 0: as many as all slots can need */
    enum elem elem;
};
struct kv *kv_new(const struct model_config *c, const struct kv_options *o);
void kv_free(struct kv *kv);
size_t kv_bytes(const struct model_config *c, const struct kv_options *o);
int32_t kv_pages_for(int32_t positions);
int32_t kv_pages_free(const struct kv *kv);
/* Makes positions [from, to) of a slot writable, [0, from) being kept. False, and nothing changed
 * that a reader could see, when pages run out. */
bool kv_reserve(struct kv *kv, int32_t slot, int32_t from, int32_t to);
void kv_trim(struct kv *kv, int32_t slot, int32_t n); /* gives pages beyond n positions back */
/* The first n positions of `to` become those of `from`: pages are shared, nothing is copied. */
void kv_share(struct kv *kv, int32_t from, int32_t to, int32_t n);
/* What a slot's first n positions hold, as bytes of a fixed order, and back into an empty slot. */
size_t kv_position_bytes(const struct kv *kv);
void kv_save(const struct kv *kv, int32_t slot, int32_t n, void *out);
bool kv_load(struct kv *kv, int32_t slot, int32_t n, const void *in);
/* Rows of one head's keys or values in one page, [KV_PAGE, E], and the scales of int8 rows
 * [KV_PAGE]. */
struct kv_rows {
    void *v;
    float *d;
};
struct kv_rows kv_at(const struct kv *kv, int32_t slot, int32_t page, int32_t layer, int32_t head,
                     bool values);

struct forward_options {
    int32_t max_rows; /* per call */
    int32_t n_slots, slot_len;
    int32_t n_pages;   /* of the KV cache; 0: as many as all slots can need */
    enum elem kv_elem; /* ELEM_F32 unless asked */
    int32_t max_parts; /* of all segments of a call; 0: max_rows + 15 */
    struct pool *pool;
};
struct forward_stats {
    uint64_t steps, rows, weight_passes; /* weight_passes: times a base matrix was read through */
    double kernel_seconds;               /* in products and attention */
};
struct forward; /* KV cache and scratch; allocated once, driven by one thread */
struct forward *forward_new(const struct model *m, const struct forward_options *o);
void forward_free(struct forward *f);
size_t forward_bytes(const struct model_config *c, const struct forward_options *o);
struct kv *forward_kv(const struct forward *f);
/* Runs all rows through the model, appending to the KV cache, whose pages for them must be free or
 * reserved; rows of one slot must be contiguous and ascending in pos. logits: [n_out][V] for rows
 * out_rows[0..n_out). The bits of a row depend on its own tokens and adapters only. */
void forward_run(struct forward *f, const struct row *rows, int32_t n_rows,
                 const struct segment *segs, int32_t n_segs, const int32_t *out_rows, int32_t n_out,
                 float *logits);
const struct forward_stats *forward_stats(const struct forward *f);
/* Final-norm hidden states of the last call's out_rows, [n_out][D]. */
const float *forward_hidden(const struct forward *f);
void rope_table(const struct model_config *c, int32_t n_pos, float *cos,
                float *sin); /* each [n_pos][E/2] */

#endif
