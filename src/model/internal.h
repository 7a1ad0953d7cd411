/*
 * model: the declarations that the readers and writers of model files share. Private to this
 * folder; all other code uses model.h.
 *
 * A model's weights are one canonical list (weight_at): embedding, each layer's tensors, final
 * norm, head. A format only supplies names. A reader converts its file to a `struct model_config`
 * and a name-sorted array of `struct tensor_info`; model_bind checks that array against the list
 * and creates the matrices. A writer walks the list and gets one row at a time from weight_row, so
 * that no weight is ever held twice.
 */
#ifndef SHOAL_MODEL_INTERNAL_H
#define SHOAL_MODEL_INTERNAL_H

#include "model/model.h"

enum tensor_naming { NAMING_HF, NAMING_GGUF };

/* One entry of the canonical list. A norm or a bias has n = 1 and is the vector [k]; the rest are
 * matrices [n, k]. */
struct weight_info {
    char name[96];
    int id;             /* index into arch.c's weight_table */
    int32_t layer;      /* -1 outside the layers */
    int32_t rope_heads; /* > 0: the rows are this many heads of a rotary projection (q or k) */
    bool is_vector;     /* a norm's weight or a bias, always f32 */
    bool is_bias;       /* the bias of a projection or of a norm */
    bool has_offset;    /* a norm whose weights Hugging Face stores minus 1 */
    int64_t n, k;
};
int32_t weight_count(const struct model_config *c);
void weight_at(const struct model_config *c, int32_t i, enum tensor_naming naming,
               struct weight_info *out);
/* The weight's location in `m`: weight_matrix returns NULL for a vector, weight_vector for a
 * matrix. */
struct matrix *weight_matrix(struct model *m, const struct weight_info *w);
const float **weight_vector(struct model *m, const struct weight_info *w);
/* Row i as `type` into `out` (tensor_row_bytes). Same-type quantised rows are copied block by
 * block, so that rewriting a quantised model changes nothing. `scratch` holds k floats: the row,
 * unless it was copied. */
void weight_row(const struct model *m, const struct weight_info *w, int64_t i,
                enum tensor_type type, float *scratch, void *out);

/* The type of one weight in a file, and llama.cpp's number (general.file_type) for the whole. */
enum tensor_type quant_weight_type(const struct quant_scheme *q, const struct model_config *c,
                                   const struct weight_info *w);
uint32_t quant_file_type(const struct quant_scheme *q);

/*
 * Interleaved rotary rows (GGUF's llama files, llama2.c) against Hugging Face's halves: row h*E +
 * 2j + a of the former is row h*E + a*E/2 + j of the latter. Both functions return the source row
 * of each output row. malloc'ed.
 */
int32_t *rope_rows_from_interleaved(int32_t heads, int32_t head_dim);
int32_t *rope_rows_to_interleaved(int32_t heads, int32_t head_dim);

/* By Hugging Face's names, "default", "linear", …; -1 when unknown. */
const char *rope_kind_name(enum rope_kind kind);
int rope_kind_find(const char *name);
/* The divisor that the scaling applies to the frequency of pair i. */
float rope_divisor(const struct model_config *c, int32_t i);
/* Sets c->rope_scaling to the scaling with these divisors [E/2]; false when no known kind fits. */
bool rope_scaling_recover(struct model_config *c, const float *divisors);

/* The p > 0 for which exactly the layers p-1, 2p-1, … have full attention, or 0 if there is none.
 */
int32_t sliding_window_pattern(const struct model_config *c);
/* Gives every layer a sliding window except each p-th. */
void sliding_window_pattern_set(struct model_config *c, int32_t p);
void layer_set_sliding(struct model_config *c,
                       int32_t layer); /* SLIDING_LAYERS_MAX and up: no-op */

/* Checks that all values are plausible and within limits that keep every product of two sizes
 * within int32. */
int model_config_check(const struct model_config *c, struct error *err);
/* The architecture that a format calls `name`, or ERR_MISMATCH with a list of the known names. */
int arch_require(const char *name, enum tensor_naming naming, const struct arch **out,
                 struct error *err);

/* Collects one message per invalid tensor for a single error, which quotes at most
 * TENSOR_ERRORS_SHOWN of them and counts the rest. */
enum { TENSOR_ERRORS_SHOWN = 20 };
struct tensor_errors {
    struct buf text;
    int n;
};
void tensor_errors_add(struct tensor_errors *o, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* OK when nothing was collected; else the error "N offending tensors: …" under `code`. Always
 * releases. */
int tensor_errors_report(struct tensor_errors *o, int code, struct error *err);

void tensors_sort(struct tensor_info *t, int n);
const struct tensor_info *tensors_find(const struct tensor_info *t, int n, const char *name);
enum tensor_type tensors_main_type(const struct tensor_info *t, int n);

/* An empty model named after `path`. */
struct model *model_alloc(const char *path, enum numeric_class cls);
/* Moves the mapping into the model, which keeps it until model_close, and clears *map. The model's
 * hash covers the mappings in the order in which they were added. */
void model_add_map(struct model *m, struct file_map *map);
/*
 * Creates every weight of m->config from `t` (sorted by name), whose names must be exactly those of
 * the canonical list under `naming`. Otherwise one ERR_MISMATCH lists the missing and unknown
 * tensors and those of a wrong shape. `interleaved`: the rows of rotary projections are in
 * llama2.c's order. The tensors' data are in mapped files; the pages of tensors that were packed
 * are evicted (file_map_evict).
 */
int model_bind(struct model *m, const struct tensor_info *t, int n, enum tensor_naming naming,
               bool interleaved, struct error *err);

/* config.json to a configuration, and a model's configuration to config.json (a new reference). */
int hf_config_read(const json_t *root, struct model_config *c, struct error *err);
json_t *hf_config_json(const struct model *m, enum tensor_type type);
/* ERR_MISMATCH when config.json cannot express this configuration. */
int hf_config_check(const struct model_config *c, struct error *err);
/* The member of an object; missing and null are the same in these files. */
const json_t *json_field(const json_t *root, const char *key);

struct model *gguf_model_open(const char *path, enum numeric_class cls, struct error *err);
/* model_measure of either format, and the sum over its tensors. */
int gguf_model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                       struct error *err);
int hf_model_measure(const char *dir, enum numeric_class cls, struct model_size *out,
                     struct error *err);
void tensors_measure(const struct tensor_info *t, int n, enum numeric_class cls, bool interleaved,
                     struct model_size *out);
struct model *hf_model_open(const char *dir, enum numeric_class cls, struct error *err);
/* The tokenizer of a GGUF file, which need not hold a model. */
struct tokenizer *gguf_tokenizer_open(const char *path, struct error *err);

/* The length word and the JSON of a safetensors file whose data follow in the order given; `data`
 * is not read. */
int safetensors_header(const struct tensor_info *tensors, int n, const json_t *metadata,
                       struct buf *out, struct error *err);

#endif
