/*
 * adapter: declarations shared by the file formats of adapters. Private to this folder.
 *
 * An adapter's file is a config and a list of named tensors in the order of adapter.data
 * (adapter_tensors). Readers fill the list from a file and make the adapter from the floats;
 * writers iterate over the list. The names are PEFT's; gguf_lora.c translates them.
 */
#ifndef SHOAL_ADAPTER_INTERNAL_H
#define SHOAL_ADAPTER_INTERNAL_H

#include "adapter/adapter.h"

#define NAME_MAX_LEN 160
#define PEFT_CONFIG_FILE "adapter_config.json"
#define PEFT_WEIGHTS_FILE "adapter_model.safetensors"
#define TRAINING_DATA_FILE "training_data.hashes"

enum lora_tensor_kind {
    LORA_TENSOR_A,
    LORA_TENSOR_B,
    LORA_TENSOR_MAGNITUDE,
    LORA_TENSOR_SAVED_MODULE,
    LORA_TENSOR_TRAINABLE_TOKENS
};
struct adapter_tensor {
    char name[NAME_MAX_LEN]; /* PEFT's name */
    int32_t module;          /* layer * N_PROJ + projection, or MODULE_EMBED, MODULE_HEAD */
    enum lora_tensor_kind kind;
    int64_t rows, cols; /* cols 0: the tensor is a vector [rows] */
};
enum { MODULE_EMBED = -1, MODULE_HEAD = -2 };
/* A malloc'ed list of *n tensors. */
struct adapter_tensor *adapter_tensors(const struct model_config *shape,
                                       const struct adapter_config *c, int *n);
size_t adapter_tensor_floats(const struct adapter_tensor *t);
/* The module's name in Hugging Face models of the architecture: "model.layers.3.mlp.up_proj",
 * "model.embed_tokens", "lm_head"; "" for a projection that the architecture lacks. */
void peft_module_name(char out[NAME_MAX_LEN], const struct arch *arch, int32_t module);

/* An adapter with config `c`, which must be valid. The adapter takes ownership of `data`; NULL: it
 * allocates zeros. The caller fills the data and then computes or sets the hash. */
struct adapter *adapter_alloc(const struct model_config *shape, const struct adapter_config *c,
                              float *data);
void adapter_hash_compute(struct adapter *a);
/* Frees the f32 factors, wherever they are, and sets `data` to NULL. */
void adapter_data_free(struct adapter *a);

/* Refuses an invocation with DoRA or with changes of embedding or head, for which PEFT defines no
 * activation. */
int adapter_invocation_check(const struct adapter_config *c, struct error *err);

/* For qsort: by name. */
int tensor_info_compare(const void *a, const void *b);

/* A list of errors for one message. The message has as many errors as fit and the number of the
 * others. */
struct adapter_errors {
    struct buf text;
    int n, hidden;
};
void adapter_errors_add(struct adapter_errors *o, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* A parsed adapter_config.json, with the memory that `c` points into. */
struct peft_config {
    struct adapter_config c;
    struct arena arena;
    const int32_t
        *row_order[2]; /* for embedding and head: [i] is the row in the file of token ids[i] */
    const char *base;  /* base_model_name_or_path, or NULL */
    /* The prefix that replaces "model." in the config's patterns, such as "model.language_model.";
     * NULL except for an adapter of a multimodal model (text and images). The caller of
     * peft_config_read sets it. */
    const char *model_prefix;
    bool tie_weights; /* ensure_weight_tying: on a tied base, both tables change together */
};
int peft_config_read(const json_t *root, const struct model_config *shape, struct peft_config *out,
                     struct adapter_errors *errors, struct error *err);
/* Sets the invocation of p->c from a list of token ids, the value of `key`. */
int peft_invocation_parse(const json_t *list, const char *key, const struct model_config *shape,
                          struct peft_config *p, struct error *err);
void peft_config_release(struct peft_config *p);
/* The bytes of adapter_config.json, malloc'ed; NULL when `base` is not UTF-8. */
char *peft_config_text(const struct adapter *a, const char *base);

/* Optional information for the readers of adapter files. */
struct adapter_load_hints {
    const struct model
        *model;       /* or NULL; exact copies of its embedding and head in the file are ignored */
    const char *hash; /* or NULL; the hash of the content, so that it need not be computed */
};
/* Makes an adapter from `config` and the tensors of `st`, which have PEFT's names and are sorted by
 * name. The metadata of `st` become the lineage. */
struct adapter *adapter_from_tensors(const char *path, const struct model_config *shape,
                                     struct peft_config *config, const struct safetensors *st,
                                     const struct adapter_load_hints *hints,
                                     struct adapter_errors *errors, struct error *err);
struct adapter *peft_load(const char *dir, const struct model_config *shape,
                          const struct adapter_load_hints *hints, struct error *err);
struct adapter *gguf_load(const char *path, const struct model_config *shape,
                          const struct adapter_load_hints *hints, struct error *err);
/* OK, or the reason why no adapter can be read at `dir`. */
int peft_check(const char *dir, struct error *err);

/* As adapter_open, for content whose hash is known. NULL: computes the hash and warns if the
 * lineage has another base. Any thread. */
struct adapter *adapter_open_with_hash(const char *path, struct model *m, const char *hash,
                                       struct error *err);
bool adapter_path_is_gguf(const char *path);

/* The training data in an adapter's directory, which may be an hf: name. NULL: there are none, or,
 * with a warning, the file is damaged. */
struct training_data *training_data_read(const char *dir);
/* Replaces the file in a directory; t NULL: removes it. */
int training_data_write(const struct training_data *t, const char *dir, struct error *err);
/* Copies the file, or removes that of `to` if `from` has none. */
int training_data_copy(const char *from, const char *to, struct error *err);
/* Warns when the adapter was trained on another base. This is not an error, because it fits the
 * model's shape. Computes the model's hash if the lineage has a base. */
void adapter_warn_other_base(const struct adapter *a, const char *path, struct model *m);

#endif
