/*
 * model: the declarations that the readers and writers of model files share. Private to this
 * folder; all other code uses model.h.
 *
 * A model's weights are one canonical list (weight_at): embeddings, each layer's tensors, final
 * norm, head. A format only supplies names. A reader converts its file to a `struct model_config`
 * and an array of `struct tensor_info` sorted by name; model_bind checks that array against the
 * list and creates the matrices. A writer walks the list and gets one row at a time from
 * weight_row, so that writing needs no copy of a whole matrix.
 */
#ifndef SHOAL_MODEL_INTERNAL_H
#define SHOAL_MODEL_INTERNAL_H

#include "model/model.h"

enum tensor_naming { NAMING_HF, NAMING_GGUF };

/* One entry of the canonical list. A norm or a bias has n = 1 and is the vector [k]; the rest are
 * matrices [n, k]. */
struct weight_info {
    char name[96];
    int32_t index;      /* in the canonical list */
    int id;             /* index into arch.c's weight_table */
    int32_t layer;      /* -1 outside the layers */
    int32_t rope_heads; /* q, k and their biases: number of heads; else 0 */
    bool is_vector;     /* a norm's weight or a bias, always f32 */
    bool is_bias;       /* the bias of a projection or of a norm */
    bool is_residual;   /* the matrix of a projection that adds to the residual stream */
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
/* Writes row i as `type` to `out` [tensor_row_bytes]. False: a block in a mapped file has a scale
 * that is not finite, which model_open would have refused. A row of a matrix that has this type
 * already is copied if its bytes are still known (matrix_encode_row), so that writing a quantised
 * model again changes nothing. Any other row of a matrix is converted; `scratch` [k] is then the
 * row as f32. */
bool weight_row(const struct model *m, const struct weight_info *w, int64_t i,
                enum tensor_type type, float *scratch, void *out);
/* Evicts rows [begin, end) of a weight of a mapped model; of other models, nothing. */
void weight_evict(const struct model *m, const struct weight_info *w, int64_t begin, int64_t end);
enum { ROWS_PER_WRITE = 256 }; /* rows that a writer encodes, writes and evicts at a time */

/* The type of one weight in a file, and llama.cpp's number for the scheme (general.file_type). */
enum tensor_type quant_weight_type(const struct quant_scheme *q, const struct model_config *c,
                                   const struct weight_info *w);
uint32_t quant_file_type(const struct quant_scheme *q);

/*
 * Orders of rotary rows: interleaved pairs (GGUF files of llama models, llama2.c) or Hugging Face's
 * halves. Row h*E + 2j + a in interleaved order is row h*E + a*E/2 + j in halves. Both functions
 * return the source row of each output row, malloc'ed, [heads * head_dim].
 */
int32_t *rope_rows_from_interleaved(int32_t heads, int32_t head_dim);
int32_t *rope_rows_to_interleaved(int32_t heads, int32_t head_dim);
/* Element `row` of rope_rows_from_interleaved. */
int64_t rope_row_from_interleaved(int64_t row, int32_t head_dim);

/* Hugging Face's names: "default", "linear", …; rope_kind_find returns -1 for an unknown name. */
const char *rope_kind_name(enum rope_kind kind);
int rope_kind_find(const char *name);
/* The divisor that the scaling applies to the frequency of pair i. */
float rope_divisor(const struct model_config *c, int32_t i);
/* Sets c->rope_scaling to the scaling with these divisors [E/2]: ROPE_DEFAULT, or ROPE_LLAMA3 with
 * frequency factors 1 and 4 and an original length that is a power of two from 16 to 2^20. False
 * when neither has these divisors; c->rope_scaling is then undefined. */
bool rope_scaling_recover(struct model_config *c, const float *divisors);

/* The smallest p > 0 for which exactly the layers p-1, 2p-1, … have full attention, or 0 if there
 * is no such p. */
int32_t sliding_window_pattern(const struct model_config *c);
/* Gives every layer a sliding window except each p-th. */
void sliding_window_pattern_set(struct model_config *c, int32_t p);
void layer_set_sliding(struct model_config *c,
                       int32_t layer); /* no effect on layers from SLIDING_LAYERS_MAX on */

/* Checks that all values are plausible and within limits. With them, n_heads · head_dim fits int32,
 * and the number of elements of any matrix fits int64. Otherwise ERR_FORMAT. */
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
/* OK when no message was collected; else the error "N offending tensors: …" with code `code`.
 * Releases `o` in both cases. */
int tensor_errors_report(struct tensor_errors *o, int code, struct error *err);

/* Sorts by name; tensors_find needs a sorted array and returns NULL for an unknown name. */
void tensors_sort(struct tensor_info *t, int n);
const struct tensor_info *tensors_find(const struct tensor_info *t, int n, const char *name);
enum tensor_type tensors_main_type(const struct tensor_info *t, int n);

/* An empty model named after `path`. Its members cls and mapped decide how model_bind creates
 * weights. */
struct model *model_alloc(const char *path, enum numeric_class cls);
/* Moves the mapping into the model, which keeps it until model_close, and clears *map. The model's
 * hash covers the mappings in the order in which they were added. */
void model_add_map(struct model *m, struct file_map *map);
/* Sets m->source_hash to a value from a file; ignores NULL and invalid hashes. */
void model_read_source(struct model *m, const char *hash);
/*
 * Creates every weight of m->config from `t` (sorted by name), whose names must be exactly those of
 * the canonical list under `naming`. Otherwise one ERR_MISMATCH lists the missing and unknown
 * tensors and those of a wrong shape. `interleaved`: the rows of q and k are interleaved pairs. The
 * tensors' data are in mapped files; the pages of matrices that were packed are evicted
 * (file_map_evict).
 */
int model_bind(struct model *m, const struct tensor_info *t, int n, enum tensor_naming naming,
               bool interleaved, struct error *err);

/* hf_config_read converts config.json to a configuration. hf_config_json converts a model's
 * configuration to config.json and returns a new reference. */
int hf_config_read(const json_t *root, struct model_config *c, struct error *err);
json_t *hf_config_json(const struct model *m, enum tensor_type type);
/* Key of config.json with m->source_hash; other programs ignore it. */
#define HF_SOURCE_KEY "shoal_source_sha256"
/* ERR_MISMATCH when config.json cannot express this configuration. */
int hf_config_check(const struct model_config *c, struct error *err);
/* The member of an object, or NULL if it is missing or null, which mean the same in these files. */
const json_t *json_field(const json_t *root, const char *key);

struct model *gguf_model_open(const char *path, enum numeric_class cls, bool mapped,
                              struct error *err);
/* model_measure for each of the two formats. tensors_measure adds the tensors to *out, whose config
 * must be set. */
int gguf_model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                       struct error *err);
int hf_model_measure(const char *dir, enum numeric_class cls, struct model_size *out,
                     struct error *err);
void tensors_measure(const struct tensor_info *t, int n, enum numeric_class cls, bool interleaved,
                     struct model_size *out);
struct model *hf_model_open(const char *dir, enum numeric_class cls, bool mapped,
                            struct error *err);
/* The tokenizer of a GGUF file, which need not hold a model. */
struct tokenizer *gguf_tokenizer_open(const char *path, struct error *err);

/* Appends to `out` the length word and the JSON header of a safetensors file in which the data of
 * the tensors follow in the given order. The member `data` of tensors is not read. */
int safetensors_header(const struct tensor_info *tensors, int n, const json_t *metadata,
                       struct buf *out, struct error *err);

#endif
