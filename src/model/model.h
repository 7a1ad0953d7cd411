/*
 * model: a frozen base model — its files, its shape — and the forward pass over a batch of rows.
 * The tokenizer and the chat template are in separate folders.
 *
 * A `struct model` is opened once, is immutable afterwards and is shared by all threads. It is
 * opened from a GGUF file (version 2 or 3), a Hugging Face directory or a checkpoint of llama2.c.
 * The files are mapped. Matrices in f32 (in the exact class also in bf16) are used in place, unless
 * their rows need another order. Other matrices are packed for the kernels, and their pages of the
 * file are evicted. In memory, rotary pairs are always (i, i + head_dim/2), as in Hugging Face's
 * files. In GGUF files of llama models the rows of q and k are permuted: opening and writing
 * convert them.
 *
 * Letters: B rows, T tokens, D d_model, H n_heads, K n_kv_heads, E head_dim, F d_ff, V vocab_size,
 * R rank, L n_layers.
 */
#ifndef SHOAL_MODEL_H
#define SHOAL_MODEL_H

#include "kernel/kernel.h"
#include "template/template.h"
#include "tokenizer/tokenizer.h"

/* shape */

/* An architecture is one row of the table in arch.c: its names in both formats and its differences
 * from the other architectures. Activations are f32, without the intermediate rounding of other
 * programs (which round, for example, Gemma's embedding scale to bf16). */
struct arch {
    const char *name;      /* "llama", "gemma3" */
    const char *gguf;      /* GGUF's general.architecture; NULL: no GGUF form exists */
    const char *hf_type;   /* model_type of config.json */
    const char *hf_class;  /* "LlamaForCausalLM" */
    const char *hf_layers; /* prefix of the names of a layer's tensors: "model.layers" */
    const char *hf_embed;  /* "model.embed_tokens" */
    enum hf_names { HF_LLAMA, HF_GEMMA, HF_NEO } hf_names; /* family of tensor names */
    uint32_t biased;       /* bit p: projection p always has a bias */
    bool tied;             /* tie_word_embeddings if config.json does not have it */
    bool qk_norm;          /* RMS norm of each q and k head before RoPE */
    bool gguf_permuted;    /* q/k rows permuted in GGUF relative to Hugging Face */
    bool post_norms;       /* RMS norms of attention's and MLP's outputs, before they are added */
    bool norm_offset;      /* Hugging Face stores the weights of norms minus 1 */
    bool scaled_embedding; /* the embedding is multiplied by sqrt(D) */
    bool layer_norm;       /* LayerNorm with bias instead of RMS norm */
    bool learned_pos;      /* a table of positions is added to the embedding; no RoPE */
    bool ungated;          /* MLP down(act(up x)), no gate */
    bool gelu;             /* activation: gelu (tanh form) instead of silu */
};
const struct arch *arch_find(const char *name); /* NULL when unknown */

/* Scaling of rotary positions beyond the context length of the original training; see rope.c. */
enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };
struct rope_scaling {
    enum rope_kind kind;
    float factor;
    float low_freq_factor, high_freq_factor; /* llama3 */
    int32_t original_len; /* llama3, yarn: context length of the original training */
};

enum { SLIDING_LAYERS_MAX = 128 };

struct model_config {
    const struct arch *arch;
    int32_t n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size, max_seq_len;
    float rope_theta, rms_norm_eps; /* the epsilon of LayerNorms as well */
    bool tied;                      /* the head is the embedding */
    /* A member below is 0 if the architecture does not use it. */
    struct rope_scaling rope_scaling;
    float rope_local_theta; /* > 0: theta of the layers with a sliding window, which then have no
                               rope_scaling */
    float query_pre_attn_scalar; /* scores are q·k / sqrt(this value); 0 stands for head_dim */
    uint32_t biased;             /* bit p: projection p has a bias */
    int32_t sliding_window; /* keys to which a row attends in a layer with a sliding window, its own
                               key included */
    uint64_t sliding_layers[SLIDING_LAYERS_MAX / 64]; /* bit l: layer l has a sliding window */
};
bool layer_is_sliding(const struct model_config *c, int32_t layer);

/* The seven linear maps of a layer that adapters may change, in this order everywhere. */
enum proj { PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN, N_PROJ };
extern const char *const proj_names[N_PROJ]; /* "q_proj" …: names on the command line */
/* Hugging Face's names within a layer, "self_attn.q_proj" or "attn.attention.q_proj". NULL if the
 * architecture has no such projection; proj_in and proj_out are then 0. */
const char *proj_hf_path(const struct arch *a, enum proj p);
/* The matrix of a projection is [proj_out, proj_in]. */
int32_t proj_in(const struct model_config *c, enum proj p);
int32_t proj_out(const struct model_config *c, enum proj p);

struct model_layer {
    struct matrix proj[N_PROJ];
    const float *bias[N_PROJ];                   /* [out], or NULL */
    const float *attn_norm, *ffn_norm;           /* [D] */
    const float *attn_norm_bias, *ffn_norm_bias; /* [D], or NULL */
    const float *post_attn_norm, *post_ffn_norm; /* [D], or NULL */
    const float *q_norm, *k_norm;                /* [E], or NULL */
};

struct model {
    char *name; /* name of the file or folder without its extension: "fry" */
    char *path;
    struct model_config config;
    struct model_layer *layers;   /* [L] */
    struct matrix embed;          /* [V, D] */
    struct matrix head;           /* [V, D]; equal to embed when tied */
    struct matrix pos_embed;      /* [max_seq_len, D], if positions are learned */
    const float *final_norm;      /* [D] */
    const float *final_norm_bias; /* [D], or NULL */
    enum tensor_type type;        /* type of most weights */
    enum numeric_class cls;
    bool computed;    /* see model_new_for_writing */
    bool mapped;      /* see model_open_for_writing */
    bool interleaved; /* mapped: the rows of q and k are interleaved pairs, as in GGUF */
    uint64_t seed;
    /* If not NULL, writers call it for each row i of a matrix w of this model: if it returns true,
     * `out` [w->k] is the row to write, else it is that of w. Any thread. */
    bool (*changed_row)(const struct model *m, const struct matrix *w, int64_t i, float *out);
    const void *changes;   /* for changed_row */
    struct tokenizer *tok; /* NULL when the files have none */
    char *chat_template;   /* Jinja text from the files, or NULL: ChatML */
    struct arena arena;    /* packed weights and everything small */
    struct file_map *maps;
    int n_maps;
    char hash[HASH_LEN]; /* SHA-256 as text; empty until model_hash computes it */
    /* SHA-256 of the model of which this one is a quantised or converted copy, from its files;
     * empty: unknown. The writers store it. */
    char source_hash[HASH_LEN];
};

/* `path`: a GGUF file, a Hugging Face directory, or the "hf:" name of a model that was pulled
 * (hub/hub.h). NULL on an error. */
struct model *model_open(const char *path, enum numeric_class cls, struct error *err);
/* model_open for the writers and model_hash alone: the matrices stay in the file, and the writers
 * evict the pages that they have read, so that neither the model nor the file is in memory. */
struct model *model_open_for_writing(const char *path, struct error *err);
void model_close(struct model *m);
/* A model's shape and memory, computed from the headers alone. */
struct model_size {
    struct model_config config;
    enum tensor_type type; /* type of most weights */
    size_t weights;        /* bytes in memory, packed or in place */
    size_t while_loading;  /* bytes of the largest tensor that is in memory twice while packed */
    size_t file;           /* bytes of the tensors in the file */
    size_t tokenizer;      /* bytes of the tokenizer's files; GGUF: all bytes except the tensors */
};
int model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                  struct error *err);
/* The SHA-256 as text: of the bytes of a model's single file; of config.json and the shards of a
 * directory; or of the configuration and weights of a model that has no file. It is computed on
 * first use and kept in m->hash. Any thread may call model_hash. It cannot fail. Code that changes
 * weights in place sets m->hash[0] to 0. */
const char *model_hash(struct model *m, struct error *err);
/* From now on the writers store in copies that they were made from m or, if m is a copy, from its
 * source. */
int model_set_source(struct model *m, struct error *err);
/* Both functions write matrices as `type`; norms and biases stay f32. Equal models give equal
 * bytes. In GGUF, tensor_type_fallback replaces `type` where its blocks do not fit. A Hugging Face
 * directory can have only f32, f16 and bf16. */
int model_write_gguf(const struct model *m, const char *path, enum tensor_type type,
                     struct error *err);
int model_write_hf(const struct model *m, const char *dir, enum tensor_type type,
                   struct error *err);
/* The weights of a model in canonical order, with Hugging Face's names: [n, k], n = 1 for a vector.
 * For full fine-tuning: `data` points into the model, where the weight must be f32. */
struct model_weight {
    char name[96];
    float *data;
    int64_t n, k;
};
int32_t model_weight_count(const struct model_config *c);
struct model_weight model_weight_at(struct model *m, int32_t i);
/* The types of the matrices in a file: one type for all (tensor_type_fallback where its blocks do
 * not fit), or one of llama.cpp's mixtures, which give the head and some layers more bits. */
struct quant_scheme {
    const char *name; /* "nf4", "q4_k_m" */
    enum tensor_type type;
    enum { QUANT_PURE, QUANT_SMALL, QUANT_MEDIUM } mix;
};
int quant_parse(const char *name, struct quant_scheme *out, struct error *err);
struct quant_scheme quant_pure(enum tensor_type type);
int64_t quant_bytes(const struct quant_scheme *q,
                    const struct model_config *c); /* bytes of all weights */
/* model_measure of a model that a writer would write with these types; `tokenizer` stays 0. */
void quant_measure(const struct quant_scheme *q, const struct model_config *c,
                   enum numeric_class cls, struct model_size *out);
/* Most bytes that a writer allocates besides the model, for rows of up to the longest one. */
size_t model_writing_bytes(const struct model_config *c, struct pool *pool);
/* model_write_gguf for any scheme. The threads of `pool` encode the rows; `p` counts weights;
 * either may be NULL. When the type of a matrix is quantised, a weight that is NaN or too large for
 * an f16 scale is ERR_NUMERIC. */
int model_quantize_gguf(const struct model *m, const char *path, const struct quant_scheme *q,
                        struct pool *pool, struct progress *p, struct error *err);
/* A model in memory with every weight f32 and writable (pretraining, tests). Norms are
 * 1 and biases 0. Matrices are approximately N(0, 0.02²), from the seed; o and down are scaled by
 * 1/sqrt(2L). */
struct model *model_new_random(const struct model_config *c, uint64_t seed, enum numeric_class cls);
/* The same model without weights in memory: the writers and model_hash compute them row by row.
 * Nothing else may use it. */
struct model *model_new_for_writing(const struct model_config *c, uint64_t seed);
/* The model that model_new_random, model_write_gguf with `type` and model_open would give one after
 * another, but without a file: only one row at a time is in memory as f32. */
struct model *model_new_quantized(const struct model_config *c, uint64_t seed,
                                  enum tensor_type type, enum numeric_class cls);
/* The shapes of `model new` and `bench`: some published models, fry, and tiny ones for tests. */
int model_preset_find(const char *name, struct model_config *out, struct error *err);
/* Opens llama2.c's legacy .bin (v0) with its tokenizer .bin. */
struct model *llama2c_open(const char *bin, const char *tokenizer, enum numeric_class cls,
                           struct error *err);
int64_t model_param_count(const struct model_config *c);

/* safetensors and GGUF files, also of adapters */

struct tensor_info {
    char *name;
    enum tensor_type type;
    int n_dims;
    int64_t dims[4]; /* row-major, outermost first, in both formats (GGUF's order is reversed on
                        reading) */
    const void *data;
    size_t size; /* bytes */
    bool mask;   /* BOOL or U8, which some files store in addition to weights: `type` is unused */
};
struct safetensors {
    struct file_map map;
    struct tensor_info *tensors;
    int n_tensors;
    json_t *metadata; /* string → string, or NULL */
};
int safetensors_open(struct safetensors *st, const char *path, struct error *err);
/* safetensors_open of a private copy of the file in memory (file_map_open_copy). */
int safetensors_read(struct safetensors *st, const char *path, struct error *err);
const struct tensor_info *safetensors_find(const struct safetensors *st, const char *name);
void safetensors_close(struct safetensors *st);
/* Equal input gives equal bytes: tensors in the given order, sorted metadata keys, the header
 * padded with spaces to a multiple of 8. */
int safetensors_write(const char *path, const struct tensor_info *tensors, int n,
                      const json_t *metadata, struct error *err);

/* Opens a GGUF file that is not a model, such as an adapter, as a struct safetensors with a private
 * copy of the file. `metadata` has its strings, integers, reals, bools and lists of at most 4096
 * integers; another array is null, and text that is not UTF-8 is absent. Close it with
 * safetensors_close. */
int gguf_tensors_open(struct safetensors *st, const char *path, struct error *err);
/* Equal input gives equal bytes: sorted keys, integers as u32, reals as f32, tensors in the given
 * order. The values of `metadata` are strings, numbers and lists of integers. */
int gguf_tensors_write(const char *path, const json_t *metadata, const struct tensor_info *tensors,
                       int n, struct error *err);

/* forward pass */

/* One adapter's low-rank update of one projection: y += scale · B (A x). */
struct lora {
    const float *a; /* [R, in] */
    const float *b; /* [out, R] */
    int32_t r;      /* rank; 0: not adapted */
    float scale;
    const float *dora_scale; /* [out] or NULL. DoRA: y = dora_scale ⊙ (W x + scale · B (A x)) */
};
/* An adapter's changes of a [V, D] table, the embedding or the head. A row is taken from `rows`,
 * else from `full`, else from the base model; then the low-rank update is added. */
struct vocab_override {
    const float *full;  /* [V, D] or NULL */
    const int32_t *ids; /* [n] ascending */
    const float *rows;  /* [n, D] */
    int32_t n;
    struct lora lora; /* head: a [R, D], b [V, R], as a projection. Embedding: a [R, V], b [D, R] */
};
struct vocab_overrides {
    struct vocab_override embed, head;
};
/* The index in t->ids of a token whose row is replaced, else -1. */
int32_t vocab_override_index(const struct vocab_override *t, int32_t id);
/* The override's row [D] for a token, or NULL for the base's row. The low-rank update is not
 * included. */
const float *vocab_override_row(const struct vocab_override *t, int32_t id, int64_t d);
/* x [D] += the embedding's low-rank update of a token. */
void embed_lora_add(const struct model_config *c, const struct lora *lo, int32_t id, float *x);
/* Changes logits [rows][V] of the base's head: whole table, replaced rows, low-rank update, DoRA's
 * multipliers. hidden [rows][D] are the head's inputs. low [rows][VOCAB_RANK_CHUNK] is scratch. If
 * the whole table is replaced, the base's logits are not read. */
#define VOCAB_RANK_CHUNK 64
void head_override_apply(const struct model_config *c, const struct vocab_override *t,
                         const float *hidden, int64_t rows, float *low, float *logits,
                         struct pool *pool);
/* A low-rank update in the layout of the forward pass: B is transposed, and both factors are f32,
 * bf16, f16 or int8. In int8 each row of A and of Bᵀ has its own scale, and R is even: an odd rank
 * is padded with zeros. The arrays of a module are contiguous. Immutable. */
struct lora_module {
    const void *a;           /* [R, in] */
    const void *bt;          /* [R, out]; int8: [R / 2, out, 2] */
    const float *gain;       /* [R] factors of t = A x: the adapter's scale; in int8 times the
                                scales of the row of A and of the row of Bᵀ */
    const float *dora_scale; /* [out] or NULL: DoRA, as in struct lora */
    int32_t r;
};
struct lora_pack {
    enum dtype elem;
    struct lora_module *modules; /* one for each adapted projection; see lora_module_at */
    int16_t *index;              /* [L][N_PROJ] into modules, -1: not adapted */
    size_t bytes;                /* memory of the whole pack */
    void *data;                  /* the arrays of all modules */
};
/* Packs loras[layer · N_PROJ + projection], [L][N_PROJ], whose arrays are copied. */
struct lora_pack *lora_pack_new(const struct model_config *c, const struct lora *loras,
                                enum dtype elem);
/* One projection's module; its rank is 0 if the adapter does not change the projection. */
const struct lora_module *lora_module_at(const struct lora_pack *p, int32_t layer, enum proj proj);
/* Converts both factors of a module to f32, without its gain: a [R, in], b [out, R]. */
void lora_module_unpack(const struct lora_module *m, enum dtype elem, int64_t in, int64_t out,
                        float *a, float *b);
void lora_pack_free(struct lora_pack *p); /* NULL is fine */

/*
 * A rank-1 perturbation that is not stored: ΔW = u vᵀ for every projection. The entries of u [out]
 * and v [in] are ±1, computed from a counter: rng (seed, RNG_NOISE, member, 2 · (layer · N_PROJ +
 * projection) + (1 for u, 0 for v)).
 */
struct lora_perturbation {
    uint64_t seed;
    uint32_t member;
};
/* Writes the signs [begin, begin + n) of one factor as f32 or int8. */
void lora_perturbation_signs(const struct lora_perturbation *z, int32_t layer, enum proj p, bool u,
                             int64_t begin, int64_t n, enum dtype e, void *out);

/* One weighted term of a segment's sum of low-rank updates: an adapter's pack, or a perturbation if
 * pack is NULL. A pack with DoRA must be the only term, with weight 1. */
struct lora_part {
    const struct lora_pack *pack;
    struct lora_perturbation noise;
    float weight;
};
struct batch_row {
    int32_t token;
    int32_t pos;  /* position in its sequence: the row attends to positions 0..pos of its slot */
    int32_t slot; /* the KV sequence */
    /* The token was sampled by this model. Sampled rows come before all other rows of a call. In
     * the fast class they take ROWS_EXACT, whose products are faster for few rows; the path of a
     * row depends only on this flag. */
    bool sampled;
};
/* Rows [begin, end) are computed with the base model plus the sum of the parts, which are added in
 * their order. Segments are ascending and do not overlap. Rows outside of all segments are computed
 * with the base model alone. */
struct lora_segment {
    int32_t begin, end;
    const struct lora_part *parts;
    int32_t n_parts;
    const struct vocab_overrides *vocab; /* or NULL: the base model's embedding and head */
};

/*
 * KV cache: pages of KV_PAGE_SIZE positions, all layers and heads of a position together, with
 * reference counts. A slot is a sequence: a table of pages. Sequences share pages; kv_cache_reserve
 * copies a shared page before it is written. Keys and values are f32, bf16, f16 or int8 (each
 * head's row with its own scale).
 */
#define KV_PAGE_SIZE 32
struct kv_cache;
struct kv_cache_options {
    int32_t n_slots, slot_len; /* maximum number of positions of a slot */
    int32_t n_pages;           /* 0: enough for all slots */
    enum dtype elem;
};
/* Parses the name of a dtype or "auto", the default of all commands and of libshoal: bf16 in a fast
 * class whose attention multiplies bf16 (fast-avx512bf16, fast-amx), else f16. Training rounds keys
 * and values to this type too, so that what is trained is what runs. */
int kv_cache_dtype_parse(const char *name, enum numeric_class cls, enum dtype *out,
                         struct error *err);
struct kv_cache *kv_cache_new(const struct model_config *c,
                              const struct kv_cache_options *o); /* NULL: no memory */
void kv_cache_free(struct kv_cache *kv);
size_t kv_cache_bytes(const struct model_config *c, const struct kv_cache_options *o);
int32_t kv_cache_pages_for(int32_t positions);
/* Makes positions [from, to) of a slot writable; positions [0, from) must be in use and keep their
 * content. Returns false when pages run out; even then no position in use has changed. */
bool kv_cache_reserve(struct kv_cache *kv, int32_t slot, int32_t from, int32_t to);
void kv_cache_truncate(struct kv_cache *kv, int32_t slot,
                       int32_t n); /* releases the pages beyond n positions */
/* Returns the memory of the pages that no slot uses to the system; it is allocated again when the
 * pages are written. */
void kv_cache_trim(struct kv_cache *kv);
/* Replaces slot `to` by the first n positions of slot `from`: the pages are shared, not copied. */
void kv_cache_share_prefix(struct kv_cache *kv, int32_t from, int32_t to, int32_t n);
/* kv_cache_save copies the keys and values of a slot's first n positions to `out` [n ·
 * kv_cache_position_bytes] in a fixed order. kv_cache_load replaces the content of a slot by such
 * bytes; it returns false when pages run out. */
size_t kv_cache_position_bytes(const struct kv_cache *kv);
void kv_cache_save(const struct kv_cache *kv, int32_t slot, int32_t n, void *out);
bool kv_cache_load(struct kv_cache *kv, int32_t slot, int32_t n, const void *in);
/* Rows of one head's keys or values in one page, [KV_PAGE_SIZE, E], and the scales of int8 rows
 * [KV_PAGE_SIZE], f16. */
struct kv_cache_rows {
    void *v;
    uint16_t *d;
};
/* Quantises one head's key or value to q [n] and returns the scale in f16. The scale is rounded
 * before it is used, so that each int8 value is the nearest one under the stored scale. */
uint16_t kv_row_quantize(const float *x, int8_t *q, int64_t n);
/* Stores one head's key or value at a reserved position. */
void kv_cache_write(struct kv_cache *kv, int32_t slot, int32_t pos, int32_t layer, int32_t head,
                    bool values, const float *x);
/* `page`: index in the slot's table, position / KV_PAGE_SIZE. */
struct kv_cache_rows kv_cache_at(const struct kv_cache *kv, int32_t slot, int32_t page,
                                 int32_t layer, int32_t head, bool values);

struct forward_options {
    int32_t max_rows; /* per call */
    int32_t n_slots, slot_len;
    int32_t n_pages;    /* pages of the KV cache; 0: enough for all slots */
    enum dtype kv_elem; /* element type of the KV cache */
    int32_t max_parts;  /* maximum number of parts of all segments of a call together; 0: max_rows +
                           15 */
    struct pool *pool;
};
struct forward_stats {
    uint64_t steps, rows, weight_passes; /* weight_passes: number of reads of a whole base matrix */
    double kernel_seconds;               /* time in products and attention */
};
struct forward; /* KV cache and scratch; allocated once; one thread at a time may call */
/* NULL when forward_bytes cannot be allocated. */
struct forward *forward_new(const struct model *m, const struct forward_options *o);
void forward_free(struct forward *f);
size_t forward_bytes(const struct model_config *c, const struct forward_options *o);
struct kv_cache *forward_kv_cache(const struct forward *f);
/* Runs all rows through the model and writes their keys and values to the KV cache, which must have
 * reserved or free pages for them. Rows of one slot are contiguous and ascending in pos. The rows
 * of a segment or a slot are either all sampled or all not sampled. logits: [n_out][V] for rows
 * out_rows[0..n_out), of which sampled rows come first; or NULL. The bits of a row's results depend
 * only on its sequence's tokens, on which of them were sampled, and on its adapters. */
void forward_run(struct forward *f, const struct batch_row *rows, int32_t n_rows,
                 const struct lora_segment *segs, int32_t n_segs, const int32_t *out_rows,
                 int32_t n_out, float *logits);
/*
 * forward_run in two halves, for sequences with the same tokens whose adapters change nothing below
 * some layer: the layers below it are computed once for all these sequences, without adapters.
 * forward_lower_layers runs the layers below `end` and writes the residual stream [n_rows][D].
 * forward_upper_layers runs the layers from `first` on. It reads the stream of row i from
 * streams[i] [D] and ignores an adapter's changes of the embedding. Each half reads and writes only
 * its own layers of the cache, so the second half may use other slots.
 */
void forward_lower_layers(struct forward *f, int32_t end, const struct batch_row *rows,
                          int32_t n_rows, float *stream);
void forward_upper_layers(struct forward *f, int32_t first, const float *const *streams,
                          const struct batch_row *rows, int32_t n_rows,
                          const struct lora_segment *segs, int32_t n_segs, const int32_t *out_rows,
                          int32_t n_out, float *logits);
const struct forward_stats *forward_stats(const struct forward *f);
/* The hidden states after the final norm of the last call's out_rows, [n_out][D]; valid until the
 * next call. */
const float *forward_hidden(const struct forward *f);
/* Cosine and sine of each position and pair, each [n_pos][E/2]; yarn multiplies both by its gain
 * (rope.c). rope_table_local is for layers with a sliding window if rope_local_theta is set. */
void rope_table(const struct model_config *c, int32_t n_pos, float *cos, float *sin);
void rope_table_local(const struct model_config *c, int32_t n_pos, float *cos, float *sin);

/*
 * Operations on one row between the products of a layer, which differ by architecture
 * (norm_act.c). They use elementwise arithmetic and the kernel table's reductions, so that a row's
 * bits are the same at every processor level and for every caller.
 */

/* RMS norm times g; with `b` LayerNorm, (x - mean) / sqrt(variance + eps) · g + b. y may be x. */
void norm_row(const struct kernels *k, float *y, const float *x, const float *g, const float *b,
              float eps, int64_t n);
/* y = act(gate) · up, or act(up) for an ungated MLP; y may be gate. */
void activation_row(const struct kernels *k, const struct arch *a, float *y, const float *gate,
                    const float *up, int64_t n);
/* Whether gate, up and activation of a layer can be one product in tiles whose outputs are the
 * tiles that the down projection reads. */
bool layer_can_fuse_gated_mlp(const struct model_layer *l, const struct arch *a,
                              enum row_path path);

#endif
