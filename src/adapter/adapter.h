/*
 * adapter: LoRA adapters as immutable, reference-counted values named by the hash of their content,
 * their PEFT and GGUF files, algebra on ΔW = scale · B A that never forms the full matrix, and
 * merging into a base.
 *
 * An adapter belongs to a model shape, not to a model object. Once made it is never changed; every
 * operator returns a new one. The one exception is DoRA, whose multipliers depend on the base's
 * weights: adapter_bind makes them, before the adapter is shared. Retain/release are atomic;
 * everything else here is pure and may run in any thread.
 *
 * An adapter is *plain* when it is low-rank parts of layers and nothing else. Algebra and training
 * take plain ones only.
 */
#ifndef SHOAL_ADAPTER_H
#define SHOAL_ADAPTER_H

#include "model/model.h"

#define ADAPTER_DROPOUT_DEFAULT 0.05
#define ADAPTER_RANK_MAX 4096

/* Rank and alpha of one projection of one layer; r = 0: not adapted. */
struct adapter_module {
    int32_t r;
    float alpha;
};
/* What an adapter changes in the embedding or the head, both [V, D]. */
struct adapter_vocab_config {
    struct adapter_module lora;
    bool full;          /* a whole table of its own (PEFT's modules_to_save) */
    int32_t n_ids;      /* rows of its own (PEFT's trainable_token_indices) … */
    const int32_t *ids; /* … in ascending order; borrowed like `modules` */
};
struct adapter_config {
    int32_t r;
    float alpha, dropout;
    bool target[N_PROJ];
    bool rslora; /* scale = alpha / sqrt(r) instead of alpha / r */
    bool dora;   /* every low-rank part but the embedding's has a magnitude per output */
    struct adapter_vocab_config embed, head;
    /* NULL: every target has (r, alpha) in every layer. Else [L][N_PROJ], and it decides instead of
     * `target`: mixed ranks, some layers only. Borrowed: a config copied out of an adapter is good
     * while that adapter lives. */
    const struct adapter_module *modules;
};

struct adapter {
    int refs;
    char hash[HASH_LEN]; /* of config and tensors, not of lineage */
    struct adapter_config config;
    struct model_config shape;
    struct lora *loras; /* [L][N_PROJ]; r = 0 where not targeted; packs are what runs */
    /* All A and B, in layer, projection, A-then-B order; then, where the config has them, the
     * magnitudes in the same order; then of the embedding and of the head: A, B, magnitude, the
     * whole table, rows. */
    float *data;
    size_t n_data;           /* floats */
    const float **magnitude; /* DoRA: [L·N_PROJ + 1], each [out] or NULL, the head's last */
    struct vocab_overrides *overlay;  /* NULL: embedding and head are the base's */
    struct arena bound;               /* what adapter_bind made; loras and overlay point into it */
    struct lora_pack *packs[N_DTYPE]; /* made when first asked for; see adapter_pack */
    char *base;      /* base_model_name_or_path of the file it came from, or NULL */
    json_t *lineage; /* object of strings (parents, operator, seed …) or NULL */
};

/* "q_proj,v_proj" or "all-linear" → targets. */
int adapter_targets_parse(const char *list, bool target[N_PROJ], struct error *err);
/* "all", "4,5", "12-29": layers counted from 0 that the config's targets are adapted in. Where
 * these are not all, c->modules becomes a list, malloc'ed, that says so. */
int adapter_layers_parse(const char *list, const struct model_config *shape,
                         struct adapter_config *c, struct error *err);
/* A ~ U(±1/sqrt(in)), B = 0 (PEFT's initialisation), from (seed, RNG_INIT). */
struct adapter *adapter_new(const struct model_config *shape, const struct adapter_config *c,
                            uint64_t seed);
/* The same for this base, DoRA's magnitudes being the norms of its rows, so that the adapter
 * changes nothing yet. Bound. */
struct adapter *adapter_new_for_model(const struct model *m, const struct adapter_config *c,
                                      uint64_t seed, struct error *err);
/* Same layout, tensors taken from `data` (copied, n = adapter_param_count). Lineage is borrowed
 * (incref'ed). */
struct adapter *adapter_from_data(const struct model_config *shape, const struct adapter_config *c,
                                  const float *data, json_t *lineage);
/* The same, but `data` is malloc'ed and becomes the adapter's own. */
struct adapter *adapter_from_owned_data(const struct model_config *shape,
                                        const struct adapter_config *c, float *data,
                                        json_t *lineage);
size_t adapter_param_count(const struct model_config *shape, const struct adapter_config *c);
/* ERR_USAGE when no target is a projection of this architecture: there is no such adapter. */
int adapter_config_check(const struct model_config *shape, const struct adapter_config *c,
                         struct error *err);
struct adapter_module adapter_module_at(const struct adapter_config *c, int32_t layer, enum proj p);
/* Layers and projections of equal size; with tables of its own also the vocabulary. */
bool adapter_fits(const struct adapter *a, const struct model_config *shape);
/* OK, or ERR_MISMATCH saying why `what` ("blending") cannot be done with more than plain LoRA. */
int adapter_require_plain(const struct adapter *a, const char *what, struct error *err);
/* False for DoRA before adapter_bind: it must not be run. */
bool adapter_is_ready(const struct adapter *a);
/* Once, before the adapter is shared: DoRA's multipliers m / ‖W + scale · B A‖ (norms of rows, in
 * double; ERR_NUMERIC where one is 0); whole tables that differ from the base's in few rows are
 * served as those rows, so that they batch. */
int adapter_bind(struct adapter *a, const struct model *m, struct error *err);
/* ‖row + scale · B_o A‖ of output o, `row` being W_o [k]: what DoRA divides by. */
double lora_row_norm(const struct lora *lo, int64_t o, const float *row, int64_t k);
/* What the forward pass reads, in the wanted element; made once, good while the adapter lives. Any
 * thread. The adapter is ready. */
const struct lora_pack *adapter_pack(const struct adapter *a, enum dtype elem);
/* Rows [begin, end) under this adapter alone, in f32 (NULL: the bare base); `part` is the segment's
 * memory. */
struct lora_segment adapter_lora_segment(const struct adapter *a, int32_t begin, int32_t end,
                                         struct lora_part *part);
/* The same, and lets go of the factors themselves: for an adapter that is only served and changes
 * neither embedding nor head. Algebra, saving and other elements are then a broken contract. The
 * caller is the only owner yet. */
const struct lora_pack *adapter_pack_only(struct adapter *a, enum dtype elem);
/*
 * An adapter in half the bytes: made from floats (malloc'ed, taken over) whose values are first
 * rounded to f16, up or down at random by how near they lie, so that changes too small for a digit
 * are kept on the average; then as adapter_pack_only. The hash is of the rounded values, and
 * adapter_to_f32 gives those back: nothing more is lost on the way. Plain adapters only.
 */
struct adapter *adapter_from_data_f16(const struct model_config *shape,
                                      const struct adapter_config *c, float *data, json_t *lineage,
                                      struct rng *rng);
/* With its factors: itself, retained, or a copy made of its f16 pack. */
struct adapter *adapter_to_f32(struct adapter *a);
void adapter_copy_params(const struct adapter *a, float *out); /* [n_data] the same as floats */
/* The memory that it occupies, packs made so far included. Any thread. */
size_t adapter_bytes(const struct adapter *a);
struct adapter *adapter_retain(struct adapter *a);
void adapter_release(struct adapter *a); /* NULL is fine */

/*
 * PEFT directory: adapter_config.json and adapter_model.safetensors, in the byte-stable form of the
 * reference. Strict: every tensor must map to a projection of `shape` with the right dimensions and
 * every targeted projection must be there; all offenders are listed in one error (ERR_MISMATCH).
 * adapter_model.bin is refused with the conversion to use. F32, F16 and BF16 tensors are read; F32
 * is written. `base` is written as base_model_name_or_path.
 */
struct adapter *adapter_load(const char *dir, const struct model_config *shape, struct error *err);
int adapter_save(const struct adapter *a, const char *dir, const char *base, struct error *err);

/*
 * GGUF LoRA, llama.cpp's form: one alpha for the whole file, scale alpha / rank, q and k rows
 * permuted where the architecture's are. What only PEFT's config can say is kept under shoal.*
 * keys, so that PEFT → GGUF → PEFT gives the same bytes. Refused by name: DoRA, tables and rows of
 * its own, embedding or head under a tied base (llama.cpp has one tensor for both), and several
 * alphas, unless `fold` allows to scale B for them.
 */
struct adapter *adapter_load_gguf(const char *path, const struct model_config *shape,
                                  struct error *err);
int adapter_save_gguf(const struct adapter *a, const char *path, const char *base, bool fold,
                      struct error *err);

/* Loads either form for this model and binds it: what commands use. Copies of the model's own
 * embedding or head in the file, which PEFT adds unasked, are dropped. Warns when the file names
 * the hash of another base. */
struct adapter *adapter_open(const char *path, struct model *m, struct error *err);
/* Of one adapter in a mix, "DIR=0.7": cuts the weight off; 1 and false where none stands. */
bool adapter_weight_parse(char *term, float *weight);
/* The lineage key that holds the SHA-256 of the base an adapter was trained on. */
#define ADAPTER_BASE_HASH "base_sha256"

/* the pool */

/*
 * Names, and the adapters that they mean now: thousands on disk, in memory those that were used
 * last, within a budget. All functions may be called from any thread at any time, but for
 * adapter_pool_free. Files are looked at under the pool's one lock and read outside of it; who asks
 * for a name that is being loaded waits for that load.
 *
 * Versions. A name's version is a number that grows when its content changes. Whoever has been
 * given an adapter keeps it, and with it the version; the next who asks gets the new one. A path
 * whose files changed (device, inode, size, times) is read anew when it is asked for next. What
 * fails then leaves the old version in place, with a warning, as long as that is in memory.
 *
 * Budget. It bounds what adapters of the pool occupy: those resident, and those replaced or removed
 * that somebody still uses. The least recently used one goes first; never one that is in use,
 * pinned, or nowhere else. What is being loaded comes on top, in f32 factors, until it is in place.
 */
struct adapter_pool;
struct adapter_pool_options {
    size_t max_bytes; /* 0: no limit */
    enum dtype elem;  /* that adapters are packed in: the engine's lora_elem */
    bool serve_only;  /* keep nothing but the pack, where adapter_pack_only can */
};
/* The model is borrowed and outlives the pool; adapters may outlive both. */
struct adapter_pool *adapter_pool_new(struct model *m, const struct adapter_pool_options *o);
void adapter_pool_free(struct adapter_pool *p); /* NULL is fine; no other thread is in it */
/* Registers a PEFT directory, a GGUF LoRA file or the hf: name of a pulled one; no tensor is read.
 * ERR_STATE when the name stands for another path. */
int adapter_pool_add(struct adapter_pool *p, const char *name, const char *path, struct error *err);
/* Registers every sub-directory that holds an adapter_config.json, under its own name, but for
 * hidden ones and (with a warning) names that stand for another path. Returns how many were new. */
int adapter_pool_scan(struct adapter_pool *p, const char *dir, struct error *err);
/* The name's current version, retained, or NULL. ERR_MISSING: no such name; ERR_STATE: no room
 * beside the adapters in use, try again when one was released; ERR_MEMORY: it never fits; else what
 * is wrong with the files. */
struct adapter *adapter_pool_get(struct adapter_pool *p, const char *name, struct error *err);
/* Puts a version under a name, new or not, all or nothing: an adapter in memory (retained; it stays
 * there until replaced), or what `path` holds, which is loaded and checked before. Errors as for
 * get. */
int adapter_pool_publish(struct adapter_pool *p, const char *name, struct adapter *a,
                         struct error *err);
int adapter_pool_publish_path(struct adapter_pool *p, const char *name, const char *path,
                              struct error *err);
int adapter_pool_remove(struct adapter_pool *p, const char *name, struct error *err);
/* Once loaded, a pinned adapter stays resident. */
int adapter_pool_pin(struct adapter_pool *p, const char *name, bool pinned, struct error *err);

struct adapter_pool_item {
    const char *name;
    const char *path;    /* NULL: in memory only */
    const char *problem; /* why its files, as they are now, were refused; or NULL */
    const char *hash;    /* of the version; "" before the first load */
    uint64_t version;    /* 0 before the first load */
    size_t bytes;        /* 0: not resident */
    bool in_use, pinned;
    uint64_t gets, loads;
    double last_used; /* seconds of clock_now; 0: never */
};
struct adapter_pool_stats {
    int n, n_resident;
    int n_retired;           /* replaced or removed, and still in use */
    size_t bytes, max_bytes; /* of resident and retired ones */
    uint64_t gets, loads, drops;
};
/* [*n] ordered by name, in `out`'s memory. */
const struct adapter_pool_item *adapter_pool_list(struct adapter_pool *p, struct arena *out,
                                                  int *n);
struct adapter_pool_stats adapter_pool_stats(struct adapter_pool *p);

/* versions on disk */

/*
 * A PEFT directory with a past: DIR/.versions/HASH is every adapter that was published at DIR, a
 * PEFT directory itself, with version.json: {hash, number, created, previous, lineage, files, and
 * what the publisher noted, such as score and tags}. DIR's own two files are the current one.
 *
 * Replacing is done by renames and can be killed at any moment: DIR is then the old version whole,
 * the new one whole, or, for the moment when two configs are exchanged, no adapter, which the next
 * call of any of these mends; it is never parts of two. Calls for one DIR exclude each other.
 */
/* Makes `a` the current version, keeping what is there, also when nobody had published that.
 * `notes` (object or NULL) goes into version.json. */
int adapter_publish(const struct adapter *a, const char *dir, const char *base, const json_t *notes,
                    struct error *err);
/* Makes the previous version current again, or the one whose hash begins with `to` (not NULL).
 * ERR_MISSING when there is none. */
int adapter_rollback(const char *dir, const struct model_config *shape, const char *to,
                     char hash[HASH_LEN], struct error *err);
/* An array of what the version.json say, newest first, each with "current". */
json_t *adapter_versions(const char *dir, struct error *err);
/* Saves an adapter that is not to be published as DIR/rejected-HASH8, with its version.json; the
 * place is malloc'ed into *where. */
int adapter_save_rejected(const struct adapter *a, const char *dir, const char *base,
                          const json_t *notes, char **where, struct error *err);

/* merging and measuring */

/* Σ weights[i] · ΔW_i as one adapter of the added ranks (exact, PEFT's "cat"); plain ones only. */
struct adapter *adapter_concat(struct adapter *const *list, const float *weights, int n,
                               struct error *err);
/* The base with the adapter inside: touched matrices in f32, the rest shared with `m`, which must
 * outlive it. Close it with adapter_merged_close. NULL: no memory. */
struct model *adapter_merge(const struct model *m, const struct adapter *a, struct error *err);
void adapter_merged_close(struct model *merged);

/* How far two runs over a fixed set of prompts (several languages) lie apart: the KL divergence of
 * the second's next-token distribution from the first's, in nats, over all positions. */
struct kl_divergence {
    double mean, max;
    double same_top; /* share of positions with the same most probable token */
    int32_t positions;
};
/* Adapters may be NULL and must be ready; the models have one vocabulary. */
struct kl_divergence adapter_kl_divergence(const struct model *m, const struct adapter *a,
                                           const struct model *m2, const struct adapter *a2,
                                           struct pool *pool);

/* algebra */

enum blend_kind { BLEND_DELTA, BLEND_LEGACY };
/* (1-t)·a + t·b. BLEND_DELTA: of ΔW, re-factorised to rank `r` (0: max of the parents') by thin QR
 * of the stacked factors and an SVD of the small core, split as B = U√S, A = √S Vᵀ; exact when r ≥
 * r_a + r_b. BLEND_LEGACY: A and B separately per tensor, config of a, ranks must be equal (the
 * predecessor's rule). */
struct adapter *adapter_blend(const struct adapter *a, const struct adapter *b, float t, int32_t r,
                              enum blend_kind kind, struct error *err);
/* Each tensor with probability p gets N(0, s) added to each element; s = std × the tensor's own
 * standard deviation, or std itself when `absolute` (the predecessor's rule). */
struct adapter *adapter_mutate(const struct adapter *a, float p, float std, bool absolute,
                               uint64_t seed);
/* Mutation, scaling and blending are for plain adapters. */
struct adapter *adapter_scale(const struct adapter *a,
                              float s); /* ΔW × s; 0 gives a zero adapter */
/* Inner product <ΔW_a, ΔW_b> summed over layers; norm² is adapter_dot(a, a). In double, through the
 * R×R Gram matrices. */
double adapter_dot(const struct adapter *a, const struct adapter *b);
double adapter_cosine(const struct adapter *a, const struct adapter *b); /* 0 when either is zero */
double adapter_distance(const struct adapter *a,
                        const struct adapter *b); /* ‖ΔW_a - ΔW_b‖ / ((‖a‖+‖b‖)/2) */

/* Thin QR (Householder) of m×n, m ≥ n, row-major, in double: q [m][n], r [n][n]. */
void linalg_qr(const double *a, int m, int n, double *q, double *r);
/* One-sided Jacobi SVD of an n×n matrix: a = u diag(s) vᵀ, s descending, signs fixed (largest |u|
 * entry positive). */
void linalg_svd(const double *a, int n, double *u, double *s, double *v);

/*
 * lowrank: singular values of what an adapter does to one matrix, and adapters built from them
 * matrix by matrix. This is what operators are made of; blending in algebra.c uses it too.
 *
 * Everything is in double and rounded to float32 once, when a draft is written. Memory is the
 * caller's arena; nothing is shared, so any thread may do anything with its own.
 *
 * Letters: R rank, k = Σ R of what is stacked, n singular values.
 */

/* <ΔW_a, ΔW_b> of one module, out × in; 0 where either has none. */
double lora_dot(const struct lora *a, const struct lora *b, int64_t out, int64_t in);

/* Σ of weighted low-rank maps: left · rightᵀ. */
struct lowrank_sum {
    int out, in, k;
    double *left;  /* [out][k] */
    double *right; /* [in][k] */
};
/* All k columns are to be put. */
struct lowrank_sum lowrank_sum_new(struct arena *ar, int out, int in, int k);
/* Puts w · scale · B and A at columns c0 .. c0 + R. */
void lowrank_sum_put(struct lowrank_sum *s, const struct lora *lo, double w, int c0);

/* u diag(s) vᵀ; columns of u and v are orthonormal, s descends. */
struct svd {
    int out, in, n;
    double *u; /* [out][n] */
    double *s; /* [n] */
    double *v; /* [in][n] */
};
/* Exact: thin QR of both sides, SVD of the small core; n = min(k, out, in). */
struct svd lowrank_sum_svd(const struct lowrank_sum *s, struct arena *ar);
/*
 * Of a dense matrix w [out][in]. Exact when it has no more than r + 8 singular values; else those
 * r + 8 that a random range finder with power iterations holds (Halko, Martinsson and Tropp 2011,
 * algorithm 4.4), its noise the same in every call: of the truncation to rank r, the error is
 * within a few per cent of the best possible also where singular values hardly fall, and equal to
 * it where they do.
 */
struct svd randomized_svd(const float *w, int out, int in, int r, struct arena *ar);
/* The triplet c: √s v to row c of a [r][in], √s u to column c of b [out][r]. */
void svd_put_triplet(const struct svd *sv, int c, int r, float *a, float *b);
/* The first r: A = √S Vᵀ to a [r][in], B = U √S to b [out][r]. What lies beyond n stays as it is.
 * By Eckart and Young the error is the norm of the values left out. */
void svd_write_factors(const struct svd *sv, int r, float *a, float *b);

/* How many of the singular values, the largest first, hold `share` of a whole whose ‖·‖² is total2:
 * 1 to `most`, `most` also where they do not. */
int32_t svd_energy_rank(const struct svd *sv, double total2, double share, int32_t most);

/*
 * An adapter in the making: modules are added in order of layer and projection, each with its own
 * rank and scale 1.
 */
struct adapter_builder {
    const struct model_config *shape; /* borrowed */
    struct adapter_module *modules;   /* [L][N_PROJ] */
    float dropout;
    float *data;
    size_t n, cap;       /* floats */
    double size2, lost2; /* ‖what was meant‖², and of it what the ranks could not hold */
};
struct adapter_builder adapter_builder_init(const struct model_config *shape, float dropout);
/* A [r][in] of the new module i, zeros, with B [out][r] after it; good until the next is added. */
float *adapter_builder_add(struct adapter_builder *d, int32_t i, int32_t r);
/* B of what adapter_builder_add gave. */
float *adapter_builder_b(const struct adapter_builder *d, int32_t i, float *a);
/* Adds w · scale · B A as it is. */
void adapter_builder_add_exact(struct adapter_builder *d, int32_t i, const struct lora *lo,
                               double w);
/* Adds the best rank r; what is left out is counted. `total2` is the whole's ‖·‖². */
void adapter_builder_add_truncated(struct adapter_builder *d, int32_t i, const struct svd *sv,
                                   int32_t r, double total2);
/* Relative error, 0 of nothing. */
double adapter_builder_error(const struct adapter_builder *d);
/* The draft is released. NULL: it has no module (an adapter has one at least). Lineage is borrowed
 * (incref'ed). */
struct adapter *adapter_builder_finish(struct adapter_builder *d, json_t *lineage);
void adapter_builder_release(struct adapter_builder *d);

#endif
