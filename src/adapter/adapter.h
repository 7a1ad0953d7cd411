/*
 * adapter: LoRA adapters. An adapter is an immutable, reference-counted value that is identified by
 * the hash of its content. This header also has PEFT and GGUF files, algebra on ΔW = scale · B A
 * that never forms the full matrix, and merging into a base model.
 *
 * An adapter is valid for all models of its shape. It never changes after construction; every
 * operator returns a new one. There are two exceptions, both called before the adapter is shared:
 * adapter_bind computes what depends on the base's weights, and adapter_pack_only frees the f32
 * factors. (adapter_offload moves the factors and changes no value.) adapter_retain and
 * adapter_release are atomic. Unless a comment says otherwise, the functions share no state and
 * may run in any thread.
 *
 * An adapter is *plain* when it has only LoRA factors of the layers' projections, which apply to
 * every token: no DoRA, no change of the embedding or head, no invocation. Algebra accepts plain
 * adapters only.
 */
#ifndef SHOAL_ADAPTER_H
#define SHOAL_ADAPTER_H

#include "model/model.h"

#define ADAPTER_DROPOUT_DEFAULT 0.05
#define ADAPTER_RANK_MAX 4096
#define ADAPTER_INVOCATION_MAX 256

/* Rank and alpha of one projection of one layer; r = 0: not adapted. */
struct adapter_module {
    int32_t r;
    float alpha;
};
/* Changes to the embedding or the head, both [V, D]. */
struct adapter_vocab_config {
    struct adapter_module lora;
    bool full;          /* a replacement table (PEFT's modules_to_save) */
    int32_t n_ids;      /* number of replaced rows (PEFT's trainable_token_indices) */
    const int32_t *ids; /* [n_ids] token ids in ascending order; borrowed like `modules` */
};
struct adapter_config {
    int32_t r;
    float alpha, dropout;
    bool target[N_PROJ];
    bool rslora; /* scale = alpha / sqrt(r) instead of alpha / r */
    bool dora; /* DoRA: one learned magnitude per output of each low-rank part; not with a low-rank
                  embedding */
    struct adapter_vocab_config embed, head;
    /* NULL: every target has (r, alpha) in every layer. Else [L][N_PROJ], which replaces `target`,
     * for mixed ranks or a subset of the layers. Borrowed: a config copied from an adapter is valid
     * until that adapter is freed. */
    const struct adapter_module *modules;
    /* Activated LoRA (see adapter_activation): the token ids that activate the adapter, at most
     * ADAPTER_INVOCATION_MAX; NULL: it is always active. Borrowed like `modules`. Not with DoRA,
     * nor with changes of embedding or head. */
    const int32_t *invocation;
    int32_t n_invocation;
};

struct adapter {
    int refs;
    char hash[HASH_LEN]; /* SHA-256 of config and tensors, without lineage */
    struct adapter_config config;
    struct model_config shape;
    struct lora *loras; /* [L][N_PROJ] views into `data`; r = 0: not targeted */
    /* All A and B, in layer, projection, A-then-B order; then, if the config has them, the
     * magnitudes in the same order; then for the embedding and for the head: A, B, magnitude, the
     * replacement table, the replaced rows. */
    float *data;
    size_t n_data;           /* floats */
    bool is_offloaded;       /* `data` is in a file (adapter_offload) */
    const float **magnitude; /* DoRA: [L·N_PROJ + 1], each [out] or NULL; the last is the head's */
    struct vocab_overrides *vocab_overrides; /* NULL: the base's embedding and head are unchanged */
    struct arena bind_arena;          /* memory of the multipliers and rows from adapter_bind */
    struct lora_pack *packs[N_DTYPE]; /* for the forward pass; see adapter_pack */
    char *base; /* base_model_name_or_path in the file it was loaded from, or NULL */
    /* Object of strings (operator, seed …) or NULL. "parents": the hashes of the parents, separated
     * by blanks; "parent_names": a JSON list of the paths or names that they were read by. */
    json_t *lineage;
    struct training_data *training_data; /* NULL: unknown, or not trained */
};

/* "q_proj,v_proj" or "all-linear" → targets. */
int adapter_targets_parse(const char *list, bool target[N_PROJ], struct error *err);
/* As adapter_targets_parse, into c->target; "embed_tokens" and "lm_head" get low-rank parts of rank
 * c->r and alpha c->alpha. */
int adapter_config_targets_parse(const char *list, const struct model_config *shape,
                                 struct adapter_config *c, struct error *err);
/* "all", "4,5", "12-29": layers, counted from 0, that the config's targets apply to. If these are
 * not all layers, c->modules becomes a malloc'ed list. */
int adapter_layers_parse(const char *list, const struct model_config *shape,
                         struct adapter_config *c, struct error *err);
/* A list of "embed_tokens" and "lm_head" → replacement tables (PEFT's modules_to_save); "": none.
 * The architecture's own name of the embedding is known too. */
int adapter_modules_to_save_parse(const char *list, const struct model_config *shape,
                                  struct adapter_config *c, struct error *err);
/* A list of token ids "5" and ranges "5-9" → replaced rows of the embedding (PEFT's
 * trainable_token_indices); "": none. The ids after "lm_head=" are rows of the head, until
 * "embed_tokens=". The ids are malloc'ed. */
int adapter_token_indices_parse(const char *list, const struct model_config *shape,
                                struct adapter_config *c, struct error *err);
/* Frees the allocations of the parsers above: c->modules and the token ids. */
void adapter_config_release(struct adapter_config *c);
/* A ~ U(±1/sqrt(in)), B = 0 (PEFT's initialisation); the random numbers are those of (seed,
 * RNG_INIT). `c` must not have DoRA or changes of embedding or head. */
struct adapter *adapter_new(const struct model_config *shape, const struct adapter_config *c,
                            uint64_t seed);
/* As adapter_new for the base model m, with or without DoRA (but not DoRA of the head) and changes
 * of embedding and head. The adapter is bound. It does not change the output: DoRA's magnitudes are
 * the norms of the base's rows, replacement tables and rows are copies from the base, and a
 * low-rank embedding has A = 0 and B ~ N(0, 1), as in PEFT. NULL: out of memory, or a norm is 0. */
struct adapter *adapter_new_for_model(const struct model *m, const struct adapter_config *c,
                                      uint64_t seed, struct error *err);
/* An adapter with the tensors in `data` [adapter_param_count], in the order of adapter.data; they
 * are copied. The lineage is borrowed (incref'ed). */
struct adapter *adapter_from_data(const struct model_config *shape, const struct adapter_config *c,
                                  const float *data, json_t *lineage);
/* As adapter_from_data, but `data` is malloc'ed and the adapter takes ownership. */
struct adapter *adapter_from_owned_data(const struct model_config *shape,
                                        const struct adapter_config *c, float *data,
                                        json_t *lineage);
size_t adapter_param_count(const struct model_config *shape, const struct adapter_config *c);
/* ERR_USAGE when the adapter would be empty, because no target is a projection of this
 * architecture, or when a table is changed in more than one way; ERR_MISMATCH for an invocation
 * with DoRA or with changes of embedding or head. */
int adapter_config_check(const struct model_config *shape, const struct adapter_config *c,
                         struct error *err);
struct adapter_module adapter_module_at(const struct adapter_config *c, int32_t layer, enum proj p);
/*
 * Activated LoRA (Greenewald et al. 2025), with PEFT's rule: the adapter changes the tokens of a
 * sequence from the start of the last occurrence of the invocation in the prompt on, and so all
 * tokens that are generated. The tokens before it, and their keys and values, are those of the
 * base.
 *
 * Returns the index of the first token that the adapter changes, for a prompt of n tokens: 0 for an
 * adapter without an invocation, ADAPTER_INACTIVE if the prompt does not contain the invocation;
 * then the adapter changes no token.
 */
#define ADAPTER_INACTIVE INT32_MAX
int32_t adapter_activation(const struct adapter_config *c, const int32_t *prompt, int32_t n);
json_t *adapter_invocation_json(const struct adapter_config *c); /* its ids; NULL without one */
/* True if the adapter can be used with models of this shape: the number of layers and the sizes of
 * all projections are equal. For an adapter that changes embedding or head, the vocabulary size and
 * the tying of embedding and head must be equal too; an invocation must be in the vocabulary. */
bool adapter_fits(const struct adapter *a, const struct model_config *shape);
/* OK for a plain adapter, else ERR_MISMATCH. The message says that `operation` ("blending") works
 * with plain LoRA only. */
int adapter_require_plain(const struct adapter *a, const char *operation, struct error *err);
/* True for an adapter that changes the embedding or the head. */
bool adapter_config_has_vocab(const struct adapter_config *c);
/* The changes of embedding and head in a->data. They differ from a->vocab_overrides where
 * adapter_bind has reduced a table to rows. */
struct vocab_overrides adapter_vocab_params(const struct adapter *a);
/* False for a DoRA adapter before adapter_bind; it must not be used in a forward pass. */
bool adapter_is_ready(const struct adapter *a);
/* Called once, before the adapter is shared. Computes DoRA's multipliers m / ‖W + scale · B A‖
 * (norms of rows, in double; ERR_NUMERIC if one is 0). A replacement table that differs from the
 * base's in few rows is reduced to these rows, so that its requests share the product with the
 * base's table. */
int adapter_bind(struct adapter *a, const struct model *m, struct error *err);
/* DoRA's divisor for output o: ‖row + scale · B_o A‖, where `row` [k] is row o of W and B_o is row
 * o of B. */
double lora_row_norm(const struct lora *lo, int64_t o, const float *row, int64_t k);
/* The packed adapter that the forward pass reads, in element type `elem`. It is created on the
 * first call and valid until the adapter is freed, or adapter_free_packs. Any thread. The adapter
 * must be ready. */
const struct lora_pack *adapter_pack(const struct adapter *a, enum dtype elem);
/* The segment that applies this adapter, in f32, to rows [begin, end); NULL: the base model. `part`
 * is memory that the segment points to. The caller omits rows before an activation. */
struct lora_segment adapter_lora_segment(const struct adapter *a, int32_t begin, int32_t end,
                                         struct lora_part *part);
/* As adapter_pack, and frees the f32 factors. For an adapter that is only used for inference and
 * changes neither embedding nor head. Afterwards, algebra, saving and the creation of packs in
 * other element types abort the program. The caller must hold the only reference. */
const struct lora_pack *adapter_pack_only(struct adapter *a, enum dtype elem);
/*
 * Offloading: moves the f32 factors of a plain adapter to a file without a name in the folder
 * `dir`, from which they are read when they are used. Other adapters stay in memory. If the file
 * cannot be written, the adapter stays in memory too, with a warning. No other thread may use the
 * adapter during the call.
 */
void adapter_offload(struct adapter *a, const char *dir);
/* Returns the memory of factors that were read to the system. It changes no results. Does nothing
 * for an adapter that is not offloaded. Any thread. */
void adapter_free_pages(const struct adapter *a);
/* Frees the packs, which adapter_pack makes again. No forward pass may use the adapter. */
void adapter_free_packs(struct adapter *a);
/*
 * An adapter stored as f16 only, in half the memory. First `data` (malloc'ed; the adapter takes
 * ownership) is rounded to f16 with stochastic rounding, so that updates smaller than one unit in
 * the last place survive on average. Then adapter_pack_only frees the f32 factors. The hash covers
 * the rounded values, and adapter_to_f32 returns exactly these values. Plain adapters only.
 */
struct adapter *adapter_from_data_f16(const struct model_config *shape,
                                      const struct adapter_config *c, float *data, json_t *lineage,
                                      struct rng *rng);
/* An adapter with f32 factors: `a` itself, retained, or a copy made from its f16 pack. */
struct adapter *adapter_to_f32(struct adapter *a);
void adapter_copy_params(const struct adapter *a, float *out); /* [n_data] */
/* Bytes in memory, including the packs created so far, without offloaded factors. Any thread. */
size_t adapter_bytes(const struct adapter *a);
struct adapter *adapter_retain(struct adapter *a);
void adapter_release(struct adapter *a); /* NULL is allowed */

/*
 * PEFT directory: adapter_config.json and adapter_model.safetensors. Writing is canonical: equal
 * adapters give equal bytes. Reading is strict: every tensor must belong to a module that the
 * config selects and have the right dimensions, and no expected tensor may be missing; one error
 * lists all problems (ERR_MISMATCH). adapter_model.bin is refused with a command that converts it.
 * F32, F16 and BF16 tensors are read; F32 is written. adapter_load also accepts the hf: name of a
 * downloaded adapter. `base` is written as base_model_name_or_path.
 */
struct adapter *adapter_load(const char *dir, const struct model_config *shape, struct error *err);
int adapter_save(const struct adapter *a, const char *dir, const char *base, struct error *err);

/*
 * GGUF LoRA files as in llama.cpp: one alpha for the whole file, scale alpha / rank, q and k rows
 * permuted if the architecture permutes them. An invocation is adapter.alora.invocation_tokens.
 * PEFT's config and the lineage are stored under shoal.* keys, so that PEFT → GGUF → PEFT gives the
 * same bytes. Saving refuses what the format cannot express: DoRA, replaced tables and rows, and
 * low-rank parts of a tied embedding or head (llama.cpp has one tensor for both). It also refuses
 * modules that need different alphas, unless `fold` is set: then each B is rescaled so that one
 * alpha suffices.
 */
struct adapter *adapter_load_gguf(const char *path, const struct model_config *shape,
                                  struct error *err);
int adapter_save_gguf(const struct adapter *a, const char *path, const char *base, bool fold,
                      struct error *err);
/* Writes a GGUF file if `out` ends in .gguf, else a PEFT directory. */
int adapter_write(const struct adapter *a, const char *out, const char *base, bool fold,
                  struct error *err);

/* Loads a PEFT directory or a GGUF file for this model and binds it. Commands use this function. It
 * ignores exact copies of the model's embedding or head, which PEFT may add to the file, and warns
 * when the lineage has the hash of another base. Copies of one model are the same base. */
struct adapter *adapter_open(const char *path, struct model *m, struct error *err);
/* False if the adapter changes no output: B or A of every component is zero or the scale is, DoRA's
 * multipliers are 1, and no row of embedding or head is replaced. Looks at the factors only, and
 * only up to the first that is not zero. The adapter must have its f32 factors and be ready. */
bool adapter_has_effect(const struct adapter *a);
/* Warns about an adapter without effect. Commands that generate with an adapter call it. */
void adapter_warn_no_effect(const struct adapter *a, const char *path);
/* Parses one adapter of a mix, "DIR=0.7", and truncates `term` before the "=". Returns false, with
 * *weight = 1 and `term` unchanged, if no valid weight follows a "=". */
bool adapter_weight_parse(char *term, float *weight);
/* Lineage keys: the SHA-256 of the base model that the adapter was trained on and, if that is a
 * quantised or converted copy, of the model that it was made from (model.source_hash). */
#define ADAPTER_BASE_HASH "base_sha256"
#define ADAPTER_BASE_SOURCE "base_source_sha256"
/* Sets both keys from a model whose hash is known; does nothing if m->hash is empty. */
void adapter_lineage_set_model(json_t *lineage, const struct model *m);
/* Sets both keys of a child's lineage to the base of its parents. Parents without a base are
 * ignored. If the bases differ, sets nothing, unless they are copies of one model. */
void adapter_lineage_set_base(json_t *lineage, const struct adapter *const *parents, int n);
/* Whether the adapter was trained on the model or on another copy of it; false if its lineage has
 * no base. */
bool adapter_is_of_model(const struct adapter *a, struct model *m);

/* training data */

/*
 * Hashes of the data that an adapter and its ancestors were trained on, by which a later evaluation
 * finds the questions that the adapter has seen (data/contamination.c). Immutable and
 * reference-counted. A PEFT directory has them in training_data.hashes; training_data.c has its
 * format.
 *
 * A list is ascending and has no duplicates. If it would be longer than its maximum, it keeps the
 * smallest hashes, and `limit` is the largest hash that it can contain. So two lists have a union
 * of the same kind, and the hashes up to its limit are a random sample of all.
 */
enum { TRAINING_QUESTIONS_MAX = 65536, TRAINING_NGRAMS_MAX = 32768 };
struct hash_list {
    uint64_t *v; /* [n] */
    int64_t n;
    uint64_t limit; /* UINT64_MAX: the list is complete */
};
/* Brings a list of hashes in any order to the form above. */
void hash_list_normalize(struct hash_list *l, int64_t max);
bool hash_list_has(const struct hash_list *l, uint64_t hash);
struct training_data {
    int refs;
    struct hash_list questions; /* of questions, and of questions with their answers */
    struct hash_list ngrams;    /* of n-grams that only one question has */
};
/* Takes ownership of the lists, which must be normalised. */
struct training_data *training_data_new(struct hash_list questions, struct hash_list ngrams);
struct training_data *training_data_retain(struct training_data *t); /* NULL is allowed */
void training_data_release(struct training_data *t);                 /* NULL is allowed */
/* Adds `t` (may be NULL) to the adapter's training data. Called before the adapter is shared, for a
 * child with the data of each parent, and for a trained adapter with those of its start. */
void adapter_add_training_data(struct adapter *a, struct training_data *t);

/* the pool */

/*
 * Maps names to the current versions of adapters. Thousands may be on disk; the most recently used
 * ones are in memory, within a budget. All functions except adapter_pool_free may be called from
 * any thread at any time. The pool has one lock. It is held while file metadata are checked and
 * released while files are read. A get of a name that another thread is loading waits for that
 * load.
 *
 * Versions. A name's version is a number that grows when its content changes. An adapter that
 * adapter_pool_get returned never changes; the next get returns the new version. If the files of a
 * path have changed (device, inode, size, times), the next get reads them again. If this fails and
 * the old version is in memory, the pool logs a warning and continues to return the old version.
 *
 * Budget. max_bytes bounds the memory of resident adapters and of replaced or removed adapters that
 * are still in use. The least recently used adapter is evicted first. An adapter is never evicted
 * while it is in use or pinned, if it has no file, or if its files have an error. The memory of an
 * adapter that is being loaded, including its f32 factors, is not counted; with a budget the pool
 * loads one adapter at a time.
 */
struct adapter_pool;
struct adapter_pool_options {
    size_t max_bytes; /* 0: no limit */
    enum dtype elem;  /* element type of the packs: the engine's lora_elem */
    bool serve_only;  /* use adapter_pack_only, if the adapter changes no embedding or head */
};
/* The model is borrowed and outlives the pool; adapters may outlive both. */
struct adapter_pool *adapter_pool_new(struct model *m, const struct adapter_pool_options *o);
void adapter_pool_free(
    struct adapter_pool *p); /* NULL is allowed; no other thread may use the pool */
/* Registers a PEFT directory, a GGUF LoRA file or the hf: name of a downloaded adapter; reads no
 * tensor. ERR_STATE when the name already belongs to another path or to an adapter in memory. */
int adapter_pool_add(struct adapter_pool *p, const char *name, const char *path, struct error *err);
/* Registers every sub-directory that has an adapter_config.json, under the sub-directory's name.
 * Skips hidden sub-directories and, with a warning, names that are invalid or belong to another
 * adapter. Returns the number of new names, or an error. */
int adapter_pool_scan(struct adapter_pool *p, const char *dir, struct error *err);
/* The name's current version, retained, or NULL. ERR_MISSING: no such name. ERR_STATE: the adapters
 * that cannot be evicted leave no room; try again after one is released. ERR_MEMORY: the adapter is
 * larger than the budget. Other codes report errors in its files. */
struct adapter *adapter_pool_get(struct adapter_pool *p, const char *name, struct error *err);
/* Publishes a new version atomically under a new or existing name. adapter_pool_publish takes an
 * adapter in memory, retains it and keeps it resident until it is replaced; ERR_MISMATCH if it does
 * not fit the model. adapter_pool_publish_path loads the adapter at `path` first. Other errors as
 * for adapter_pool_get. */
int adapter_pool_publish(struct adapter_pool *p, const char *name, struct adapter *a,
                         struct error *err);
int adapter_pool_publish_path(struct adapter_pool *p, const char *name, const char *path,
                              struct error *err);
int adapter_pool_remove(struct adapter_pool *p, const char *name, struct error *err);
/* Bytes of the name's current version, resident or not; 0 before its first load. */
size_t adapter_pool_bytes_of(struct adapter_pool *p, const char *name);
/* Once loaded, a pinned adapter stays resident. */
int adapter_pool_pin(struct adapter_pool *p, const char *name, bool pinned, struct error *err);

struct adapter_pool_item {
    const char *name;
    const char *path;    /* NULL: in memory only */
    const char *problem; /* the error in its current files, or NULL */
    const char *hash;    /* SHA-256 of the version; "" before the first load */
    uint64_t version;    /* 0 before the first load */
    size_t bytes;        /* 0: not resident */
    bool in_use, pinned;
    uint64_t gets, loads;
    double last_used; /* seconds of clock_now; 0: never */
};
struct adapter_pool_stats {
    int n, n_resident;
    int n_retired;           /* replaced or removed, but still in use */
    size_t bytes, max_bytes; /* bytes: memory of resident and retired adapters */
    uint64_t gets, loads, evictions;
};
/* [*n] ordered by name, allocated from `out`. */
const struct adapter_pool_item *adapter_pool_list(struct adapter_pool *p, struct arena *out,
                                                  int *n);
struct adapter_pool_stats adapter_pool_stats(struct adapter_pool *p);

/* versions on disk */

/*
 * A PEFT directory with a history. Every adapter that was published at DIR is in
 * DIR/.versions/HASH, a PEFT directory with a version.json: {hash, number, created, previous,
 * lineage, and the publisher's notes, such as score and tags}. DIR's own two files are the current
 * version.
 *
 * A version is replaced by renames, and the process may be killed at any moment: DIR then contains
 * the complete old version, the complete new version, or no valid adapter (its config is missing
 * while the files are exchanged). The next adapter_publish, adapter_rollback or adapter_versions
 * repairs this. DIR never contains a config and tensors of different versions. A file lock
 * serialises calls for one DIR.
 */
/* Whether DIR has an adapter: an interrupted replacement may have left none. */
bool adapter_exists(const char *dir);
/* Makes `a` the current version and keeps the previous content of DIR, even if it was never
 * published. `notes` (object or NULL) is added to version.json. */
int adapter_publish(const struct adapter *a, const char *dir, const char *base, const json_t *notes,
                    struct error *err);
/* Makes the previous version current again, or, if `hash_prefix` is not NULL, the version whose
 * hash begins with it. `hash` receives the hash of that version. ERR_MISSING when there is no such
 * version. */
int adapter_rollback(const char *dir, const struct model_config *shape, const char *hash_prefix,
                     char hash[HASH_LEN], struct error *err);
/* An array with the content of each version.json, newest first, each with "current". */
json_t *adapter_versions(const char *dir, struct error *err);
/* Which adapters to delete: those that meet every condition that is set. An adapter without a score
 * or a time does not meet the condition about it. */
struct prune_rule {
    int64_t keep;        /* keep this many, in the order of the caller; -1: no condition */
    int64_t min_age;     /* seconds; -1: no condition */
    double min_score;    /* delete only adapters with a lower score; NAN: no condition */
    int64_t now;         /* unix seconds */
    bool delete_matches; /* false: find them only */
};
/* rank: from 0, in the order in which adapters are kept; created: unix seconds, -1: unknown; score:
 * NAN: unknown. */
bool prune_rule_matches(const struct prune_rule *rule, int64_t rank, int64_t created, double score);
/* Deletes versions by the rule, in the order from new to old, except the current version and the
 * one that adapter_rollback would restore. *out: the content of version.json of those that match,
 * with "bytes". Each version is renamed before its files are deleted. */
int adapter_versions_prune(const char *dir, const struct prune_rule *rule, json_t **out,
                           struct error *err);
/* Saves an adapter that a quality gate rejected as DIR/rejected-HASH8, with a version.json.
 * *saved_path receives the malloc'ed path, also after an error. */
int adapter_save_rejected(const struct adapter *a, const char *dir, const char *base,
                          const json_t *notes, char **saved_path, struct error *err);

/* merging and measuring */

/* Σ weights[i] · ΔW_i as one adapter whose rank is the sum of the ranks. Exact; PEFT's combination
 * type "cat". Plain adapters only. */
struct adapter *adapter_concat(struct adapter *const *list, const float *weights, int n,
                               struct error *err);
/* Σ weights[i] · ΔW_i of adapters that are bound to the base m, with or without DoRA, but without
 * changes of embedding and head. If no adapter has DoRA, the same as adapter_concat. Else the exact
 * sum is an adapter with DoRA, whose rank is the sum of the ranks; it is bound to m (dora_sum.c).
 * ERR_NUMERIC if the weights cancel an output. */
struct adapter *adapter_sum(const struct model *m, struct adapter *const *list,
                            const float *weights, int n, struct pool *pool, struct error *err);
/* The pack of such a sum, for a forward pass. The caller frees it. Of adapters without f32 factors
 * (adapter_pack_only) the values of their packs are summed. */
struct lora_pack *adapter_sum_pack(struct adapter *const *list, const float *weights, int n,
                                   enum dtype elem, struct error *err);
bool adapters_have_dora(struct adapter *const *list, int n);
/* OK for an adapter that applies to every token and does not change embedding and head, else
 * ERR_MISMATCH. */
int adapter_require_layers_only(const struct adapter *a, const char *operation, struct error *err);
/* A model with the adapter merged into the base. Changed matrices are f32; the others are shared
 * with `m`, which must outlive the result. The caller closes it with adapter_merged_close. NULL:
 * out of memory, or adapter_check_mergeable fails. */
struct model *adapter_merge(const struct model *m, const struct adapter *a, struct error *err);
/* The same for model_write_hf and model_write_gguf alone: each row is computed when it is written,
 * so that the merge needs no memory for matrices. `a` must outlive the result. */
struct model *adapter_merge_for_writing(const struct model *m, const struct adapter *a,
                                        struct error *err);
void adapter_merged_close(struct model *merged);
/* ERR_MISMATCH for an activated adapter: no weights have its effect. */
int adapter_check_mergeable(const struct adapter *a, struct error *err);

/* The difference between two models on fixed prompts in several languages: KL(first ‖ second) of
 * the next-token distributions, in nats; mean and maximum over all positions. */
struct kl_divergence {
    double mean, max;
    double same_top; /* share of positions with the same most probable token */
    int32_t positions;
};
/* Compares m with a and m2 with a2. The adapters may be NULL and must be ready; both models have
 * the same vocabulary. */
struct kl_divergence adapter_kl_divergence(const struct model *m, const struct adapter *a,
                                           const struct model *m2, const struct adapter *a2,
                                           struct pool *pool);

/* The first model of such a comparison, which may be closed before the second one is opened: the
 * logits of m with a, in a file without a name in the folder of `path`. */
struct kl_reference;
struct kl_reference *kl_reference_new(const struct model *m, const struct adapter *a,
                                      const char *path, struct pool *pool, struct error *err);
/* Compares m2 with a2. ERR_MISMATCH: m2 has another vocabulary. */
int kl_reference_compare(const struct kl_reference *r, const struct model *m2,
                         const struct adapter *a2, struct pool *pool, struct kl_divergence *out,
                         struct error *err);
void kl_reference_free(struct kl_reference *r);
/* Most bytes that each of the two functions allocates. */
size_t kl_reference_bytes(const struct model_config *c, struct pool *pool);

/* algebra */

enum blend_kind { BLEND_DELTA, BLEND_LEGACY };
/* (1-t)·a + t·b. BLEND_DELTA blends ΔW and factorises the result to rank `r` (0: the larger of the
 * parents' ranks): thin QR of the stacked factors, SVD of the small core, B = U√S, A = √S Vᵀ. It is
 * exact when r ≥ r_a + r_b. BLEND_LEGACY blends each A and each B separately and uses the config of
 * `a`; the ranks must be equal (docs/COMPATIBILITY.md). */
struct adapter *adapter_blend(const struct adapter *a, const struct adapter *b, float t, int32_t r,
                              enum blend_kind kind, struct error *err);
/* Mutates each tensor with probability p: adds N(0, s²) noise to each element, where s = std × the
 * tensor's own standard deviation, or std itself if `absolute` (`--compat legacy`). */
struct adapter *adapter_mutate(const struct adapter *a, float p, float std, bool absolute,
                               uint64_t seed);
/* As adapter_blend, for adapters that are bound to the base m. If one has DoRA, the blend is exact
 * (adapter_sum): r must be 0, and kind BLEND_DELTA. */
struct adapter *adapter_blend_bound(const struct model *m, const struct adapter *a,
                                    const struct adapter *b, float t, int32_t r,
                                    enum blend_kind kind, struct pool *pool, struct error *err);
/* Scaling, adapter_blend and mutation accept plain adapters only. */
struct adapter *adapter_scale(const struct adapter *a,
                              float s); /* ΔW × s; 0 gives a zero adapter */
/* Inner product <ΔW_a, ΔW_b>, summed over all modules; ‖ΔW_a‖² is adapter_dot(a, a). Computed in
 * double from R × R Gram matrices. */
double adapter_dot(const struct adapter *a, const struct adapter *b);
double adapter_cosine(const struct adapter *a, const struct adapter *b); /* 0 when either is zero */
double adapter_distance(const struct adapter *a,
                        const struct adapter *b); /* ‖ΔW_a - ΔW_b‖ / ((‖a‖+‖b‖)/2) */

/* Thin QR (Householder) of m×n, m ≥ n, row-major, in double: q [m][n], r [n][n]. */
void linalg_qr(const double *a, int m, int n, double *q, double *r);
/* One-sided Jacobi SVD of an n×n matrix: a = u diag(s) vᵀ, s descending, signs fixed (the entry
 * with the largest |u| of each column is positive). */
void linalg_svd(const double *a, int n, double *u, double *s, double *v);

/*
 * lowrank: the SVD of an adapter's ΔW of one matrix, and a builder for adapters, matrix by matrix.
 * The operators of evolution, blending (algebra.c) and extraction (extract.c) use it.
 *
 * Everything is in double and rounded to float32 once, when it is written to an adapter_builder.
 * Results are allocated from the caller's arena. There is no shared state, so threads may call
 * these functions with separate data.
 *
 * Letters: R is the rank of one LoRA, k the sum of the ranks of the stacked parts, n the number of
 * singular values.
 */

/* <ΔW_a, ΔW_b> of one module, out × in; 0 if either has r = 0. */
double lora_dot(const struct lora *a, const struct lora *b, int64_t out, int64_t in);

/* A weighted sum of low-rank matrices, in factors: left · rightᵀ. */
struct lowrank_sum {
    int out, in, k;
    double *left;  /* [out][k] */
    double *right; /* [in][k] */
};
/* Allocates k columns; the caller must write all of them. */
struct lowrank_sum lowrank_sum_new(struct arena *ar, int out, int in, int k);
/* Writes w · scale · B to columns [c0, c0 + R) of `left` and Aᵀ to the same columns of `right`. */
void lowrank_sum_add(struct lowrank_sum *s, const struct lora *lo, double w, int c0);

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
 * SVD of a dense matrix w [out][in]. Exact when the matrix has no more than r + 8 singular values;
 * else the r + 8 that a randomized range finder with power iterations finds (Halko, Martinsson and
 * Tropp 2011, algorithm 4.4). Every call uses the same random numbers. The error of the truncation
 * to rank r is within a few per cent of the optimum if the singular values hardly decrease, and
 * equal to it if they decrease fast.
 */
struct svd randomized_svd(const float *w, int out, int in, int r, struct arena *ar);
/* Writes singular triplet c: √s v to row c of a [r][in], √s u to column c of b [out][r]. */
void svd_write_triplet(const struct svd *sv, int c, int r, float *a, float *b);
/* Writes the first r triplets: A = √S Vᵀ to a [r][in], B = U √S to b [out][r]. If r > n, the
 * entries of triplets from n on are not written. By Eckart and Young the error is the norm of the
 * omitted singular values. */
void svd_write_factors(const struct svd *sv, int r, float *a, float *b);

/* The smallest rank, from 1 to max_rank, at which the squares of the largest singular values sum to
 * at least energy · total2, where total2 is ‖·‖² of the matrix; max_rank if no rank suffices. */
int32_t svd_energy_rank(const struct svd *sv, double total2, double energy, int32_t max_rank);

/*
 * An adapter under construction. Modules are added in order of layer and projection; each has its
 * own rank and scale 1. Module i is projection i % N_PROJ of layer i / N_PROJ.
 */
struct adapter_builder {
    const struct model_config *shape; /* borrowed */
    struct adapter_module *modules;   /* [L][N_PROJ] */
    float dropout;
    float *data;
    size_t n, cap;            /* floats */
    double norm2, lost_norm2; /* ‖exact result‖² of truncated modules, and the part of it that
                                 truncation lost */
};
struct adapter_builder adapter_builder_init(const struct model_config *shape, float dropout);
/* Adds module i and returns its A [r][in]; its B [out][r] follows in memory. Both are zeroed. The
 * pointer is valid until the next module is added. */
float *adapter_builder_add(struct adapter_builder *d, int32_t i, int32_t r);
/* B of the module whose A adapter_builder_add returned. */
float *adapter_builder_b(const struct adapter_builder *d, int32_t i, float *a);
/* Adds module i with w · scale · B A, exactly. */
void adapter_builder_add_exact(struct adapter_builder *d, int32_t i, const struct lora *lo,
                               double w);
/* Adds module i with the best approximation of rank r. total2 is ‖·‖² of the exact module; it is
 * added to norm2, and the squared error to lost_norm2. */
void adapter_builder_add_truncated(struct adapter_builder *d, int32_t i, const struct svd *sv,
                                   int32_t r, double total2);
/* The error of the truncated modules, relative to the norm of their exact values; 0 if no module
 * was truncated. */
double adapter_builder_error(const struct adapter_builder *d);
/* Makes the adapter and releases the builder. NULL: no module was added. The lineage is borrowed
 * (incref'ed). */
struct adapter *adapter_builder_finish(struct adapter_builder *d, json_t *lineage);
void adapter_builder_release(struct adapter_builder *d);

/* extract: adapters by truncated SVD (extract.c) */

struct lora_truncation {
    int32_t rank;  /* maximum rank; 0: ADAPTER_RANK_MAX */
    double energy; /* use the smallest rank that keeps this share of ‖ΔW‖²; 0: always use the
                      maximum rank */
};
struct truncated_adapter {
    struct adapter *adapter; /* released by the caller */
    double error;            /* error of all modules, relative to ‖ΔW‖ */
    struct projection_truncation {
        int32_t layers; /* number of layers in which the adapter has this projection; 0: the ranks
                           are undefined */
        int32_t rank_min, rank_max;
        double error;
    } projections[N_PROJ];
};
/* An adapter whose ΔW approximates the difference tuned - base of two models of the same shape.
 * Computes the hashes of both models if they are not known. */
int adapter_extract(struct model *base, struct model *tuned, struct lora_truncation truncation,
                    struct pool *pool, struct truncated_adapter *out, struct error *err);
/* A copy of the adapter with lower ranks. */
int adapter_resize(const struct adapter *source, struct lora_truncation truncation,
                   struct pool *pool, struct truncated_adapter *out, struct error *err);

#endif
