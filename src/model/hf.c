/*
 * hf: Hugging Face model directories: model.safetensors or its shards, tokenizer.json or
 * tokenizer.model, tokenizer_config.json, generation_config.json, chat_template.jinja, and
 * config.json through hf_config.c; and the canonical writer of such directories. Pickled weights
 * (pytorch_model.bin) are not read.
 *
 * Each file is written completely or not at all, config.json last. A directory without config.json
 * is not a model, so a failed write to a new directory leaves no model there.
 */
#include "model/internal.h"

#include <stdlib.h>
#include <string.h>

enum { SMALL_FILE = 64 << 20 };

/* Maps config.json into the model, so that the model's hash covers it, and reads m->config. Returns
 * the parsed file (a new reference), or NULL on an error. */
static json_t *config_open(struct model *m, const char *dir, struct error *err) {
    struct file_map map;
    char *path = path_join(dir, "config.json");
    json_t *root = NULL;
    if (!path_exists(path)) {
        error_set(err, ERR_MISSING, "'%s' is not a model directory: it has no config.json", dir);
    } else if (file_map_open(&map, path, err) == OK) {
        root = json_parse((const char *)map.data, map.size, path, err);
        model_add_map(m, &map);
        if (root && hf_config_read(root, &m->config, err) != OK) {
            error_wrap(err, "'%s'", path);
            json_decref(root);
            root = NULL;
        }
    }
    free(path);
    return root;
}

/* The files of a model, and the tensors of all files sorted by name. `tensors` has shallow copies:
 * the files own the names. */
struct shards {
    char **names;
    struct safetensors *files;
    int n;
    struct tensor_info *tensors;
    int n_tensors;
};

static void shards_release(struct shards *s) {
    for (int i = 0; i < s->n; i++) {
        safetensors_close(&s->files[i]);
        free(s->names[i]);
    }
    free(s->names);
    free(s->files);
    free(s->tensors);
}

static int shard_add(struct shards *s, const char *dir, const char *name, struct error *err) {
    s->names = xrealloc(s->names, sizeof(*s->names) * (size_t)(s->n + 1));
    s->files = xrealloc(s->files, sizeof(*s->files) * (size_t)(s->n + 1));
    char *path = path_join(dir, name);
    int rc = safetensors_open(&s->files[s->n], path, err);
    if (rc == OK) s->names[s->n++] = xstrdup(name);
    free(path);
    return rc;
}

static int shard_find(const struct shards *s, const char *name) {
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->names[i], name) == 0) return i;
    return -1;
}

/* An index may only name files in its own directory. */
static bool shard_name_is_valid(const char *name) {
    return name && name[0] != '\0' && name[0] != '.' && !strchr(name, '/') && strlen(name) < 256;
}

enum { SHARDS_MAX = 1024 };

static int index_open_shards(struct shards *s, const char *dir, const json_t *root,
                             struct error *err) {
    const json_t *files = json_object_get(root, "weight_map");
    struct tensor_errors missing = {0};
    const char *tensor;
    json_t *value;
    if (!json_is_object(files)) return error_set(err, ERR_FORMAT, "'weight_map' is missing");
    int rc = OK;
    json_object_foreach ((json_t *)(uintptr_t)files, tensor, value) {
        const char *name = json_string_value(value);
        if (!shard_name_is_valid(name))
            rc = error_set(err, ERR_FORMAT, "'%.96s' is in no file of this directory", tensor);
        else if (shard_find(s, name) < 0)
            rc = s->n < SHARDS_MAX ? shard_add(s, dir, name, err)
                                   : error_set(err, ERR_FORMAT, "too many files");
        if (rc != OK) break;
        if (!safetensors_find(&s->files[shard_find(s, name)], tensor))
            tensor_errors_add(&missing, "'%.96s' is not in '%.96s'", tensor, name);
    }
    int missing_rc =
        tensor_errors_report(&missing, ERR_MISMATCH, rc == OK ? err : &(struct error){0});
    return rc == OK ? missing_rc : rc;
}

static int index_read(struct shards *s, const char *dir, const char *path, struct error *err) {
    json_t *root = json_parse_file(path, err);
    if (!root) return err->code;
    int rc = index_open_shards(s, dir, root, err);
    json_decref(root);
    return rc == OK ? OK : error_wrap(err, "'%s'", path);
}

static int shards_merge(struct shards *s, struct error *err) {
    for (int i = 0; i < s->n; i++) s->n_tensors += s->files[i].n_tensors;
    s->tensors = try_calloc((size_t)s->n_tensors, sizeof(*s->tensors), err);
    if (!s->tensors) return err->code;
    int n_copied = 0;
    for (int i = 0; i < s->n; i++) {
        if (s->files[i].n_tensors)
            memcpy(s->tensors + n_copied, s->files[i].tensors,
                   sizeof(*s->tensors) * (size_t)s->files[i].n_tensors);
        n_copied += s->files[i].n_tensors;
    }
    tensors_sort(s->tensors, s->n_tensors);
    for (int i = 1; i < s->n_tensors; i++)
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            return error_set(err, ERR_FORMAT, "tensor '%.96s' is in two files", s->tensors[i].name);
    return OK;
}

static int shards_open(struct shards *s, const char *dir, struct error *err) {
    char *single = path_join(dir, "model.safetensors"),
         *index = path_join(dir, "model.safetensors.index.json");
    char *pickle = path_join(dir, "pytorch_model.bin");
    int rc;
    if (path_exists(single))
        rc = shard_add(s, dir, "model.safetensors", err);
    else if (path_exists(index))
        rc = index_read(s, dir, index, err);
    else if (path_exists(pickle))
        rc = error_set(err, ERR_FORMAT,
                       "'%s' is a pickle, which runs code when read; save the model as safetensors",
                       pickle);
    else
        rc = error_set(err, ERR_MISSING, "'%s' has no model.safetensors", dir);
    if (rc == OK) rc = shards_merge(s, err);
    free(single);
    free(index);
    free(pickle);
    return rc;
}

static void tensor_remove(struct shards *s, int index) {
    memmove(&s->tensors[index], &s->tensors[index + 1],
            sizeof(*s->tensors) * (size_t)(s->n_tensors - index - 1));
    s->n_tensors--;
}

/* True for tensors that some programs save although they are constants: rotary frequencies, which
 * follow from theta, and GPT-Neo's masks. */
static bool tensor_is_ignored(const char *name) {
    return text_ends_with(name, ".rotary_emb.inv_freq") ||
           text_ends_with(name, ".attn.attention.bias") ||
           text_ends_with(name, ".attn.attention.masked_bias");
}

/*
 * In a multimodal checkpoint, the names of the language model's tensors contain "language_model.".
 * This function gives these tensors the names of a text model and removes all other tensors except
 * lm_head.weight, because Shoal reads and writes only text. Returns the number of tensors with such
 * a name; 0: the checkpoint is not multimodal, and nothing changed.
 */
static int language_model_select(struct shards *s) {
    static const char infix[] = "language_model.";
    int n = 0;
    for (int i = 0; i < s->n_tensors; i++) n += strstr(s->tensors[i].name, infix) != NULL;
    if (n == 0) return 0;
    for (int i = s->n_tensors - 1; i >= 0; i--) {
        char *match = strstr(s->tensors[i].name, infix);
        /* "language_model.model.x" gives "model.x"; so does "model.language_model.x". */
        if (match && match == s->tensors[i].name)
            s->tensors[i].name = match + strlen(infix);
        else if (match)
            s->tensors[i].name = match + strlen("language_");
        else if (strcmp(s->tensors[i].name, "lm_head.weight") != 0)
            tensor_remove(s, i);
    }
    tensors_sort(s->tensors, s->n_tensors);
    return n;
}

/* Removes tensors that are not weights of the model. The head of a tied model is removed too; it
 * must be byte-equal to the embedding. */
static int ignored_tensors_remove(struct shards *s, const struct model_config *c,
                                  struct error *err) {
    int n_before = s->n_tensors;
    if (c->arch->hf_names == HF_GEMMA && language_model_select(s) > 0 && s->n_tensors < n_before)
        log_info("%d tensors that are not the language model's are left out",
                 n_before - s->n_tensors);
    for (int i = s->n_tensors - 1; i >= 0; i--)
        if (tensor_is_ignored(s->tensors[i].name)) tensor_remove(s, i);
    struct weight_info first;
    weight_at(c, 0, NAMING_HF, &first);
    const struct tensor_info *head = tensors_find(s->tensors, s->n_tensors, "lm_head.weight");
    const struct tensor_info *embed = tensors_find(s->tensors, s->n_tensors, first.name);
    if (!c->tied || !head || !embed) return OK;
    if (head->type != embed->type || head->size != embed->size ||
        memcmp(head->data, embed->data, head->size) != 0)
        return error_set(err, ERR_MISMATCH,
                         "'tie_word_embeddings' is true, but 'lm_head.weight' differs from the "
                         "embedding");
    file_map_evict(head->data, head->size);
    tensor_remove(s, (int)(head - s->tensors));
    return OK;
}

static int weights_read(struct model *m, const char *dir, struct error *err) {
    struct shards s = {0};
    int rc = shards_open(&s, dir, err);
    if (rc == OK) rc = ignored_tensors_remove(&s, &m->config, err);
    if (rc == OK) rc = model_bind(m, s.tensors, s.n_tensors, NAMING_HF, false, err);
    for (int i = 0; rc == OK && i < s.n; i++) model_add_map(m, &s.files[i].map);
    shards_release(&s);
    return rc;
}

/* Reads tokenizer.json, or tokenizer.model if tokenizer.json does not exist or cannot be read.
 * *out is NULL and the result OK when neither exists. If both fail, the error is that of
 * tokenizer.json. */
static int tokenizer_files_read(const char *dir, struct tokenizer **out, struct error *err) {
    char *json = path_join(dir, "tokenizer.json"), *model = path_join(dir, "tokenizer.model");
    bool has_json = path_exists(json), has_model = path_exists(model);
    struct error second;
    *out = has_json ? tokenizer_from_json(json, err) : NULL;
    if (!*out && has_model) *out = tokenizer_from_sentencepiece(model, has_json ? &second : err);
    free(json);
    free(model);
    return *out || !(has_json || has_model) ? OK : err->code;
}

/* The id of a special token, or -1. `value` is a string or an object with 'content'. */
static int32_t special_token_id(const struct tokenizer *tok, const json_t *value) {
    if (json_is_object(value)) value = json_object_get(value, "content");
    const char *piece = json_string_value(value);
    return piece ? tokenizer_piece_to_id(tok, piece) : -1;
}

/* The id that the key has, or the first id of its list; -1 if there is no valid id. */
static int32_t config_token_id(const struct tokenizer *tok, const json_t *root, const char *key) {
    const json_t *v = json_field(root, key);
    if (json_is_array(v)) v = json_array_get(v, 0);
    json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
    return id >= 0 && id < tokenizer_vocab_size(tok) ? (int32_t)id : -1;
}

/* roots: tokenizer_config.json, generation_config.json and config.json in the order of priority.
 * Null in tokenizer_config.json means that there is no such token. `current`, the value of the
 * tokenizer's own file, is used if no file has the key. */
static int32_t special_token_choose(const struct tokenizer *tok, const json_t *const roots[3],
                                    const char *name, int32_t current) {
    char key[32];
    snprintf(key, sizeof(key), "%s_token", name);
    if (json_object_get(roots[0], key))
        return special_token_id(tok, json_object_get(roots[0], key));
    snprintf(key, sizeof(key), "%s_token_id", name);
    for (int i = 1; i < 3; i++) {
        int32_t id = config_token_id(tok, roots[i], key);
        if (id >= 0) return id;
    }
    return current;
}

/* The tokenizer's own file may not define which tokens are BOS and EOS. A tokenizer is immutable,
 * so a new tokenizer replaces it if a setting differs. */
static int specials_apply(struct tokenizer **tok, const json_t *const roots[3], struct error *err) {
    const struct tokenizer_spec *current = tokenizer_get_spec(*tok);
    struct tokenizer_spec spec = *current;
    spec.bos = special_token_choose(*tok, roots, "bos", current->bos);
    spec.eos = special_token_choose(*tok, roots, "eos", current->eos);
    const json_t *add_bos = json_field(roots[0], "add_bos_token");
    if (json_is_boolean(add_bos)) spec.add_bos = json_is_true(add_bos);
    const json_t *add_eos = json_field(roots[0], "add_eos_token");
    if (json_is_boolean(add_eos)) spec.add_eos = json_is_true(add_eos);
    if (spec.bos == current->bos && spec.eos == current->eos && spec.add_bos == current->add_bos &&
        spec.add_eos == current->add_eos)
        return OK;
    struct tokenizer *replacement = tokenizer_new(&spec, err);
    if (!replacement) return err->code;
    tokenizer_free(*tok);
    *tok = replacement;
    return OK;
}

/* The template is chat_template.jinja, else the key of tokenizer_config.json: a string, or a list
 * of {name, template} of which 'default' is used. */
static int chat_template_read(struct model *m, const char *dir, const json_t *config,
                              struct error *err) {
    char *path = path_join(dir, "chat_template.jinja");
    struct buf text = {0};
    const json_t *v = json_field(config, "chat_template");
    const char *found = json_string_value(v);
    int rc = path_exists(path) ? file_read(path, SMALL_FILE, &text, err) : OK;
    if (text.data) found = text.data;
    for (size_t i = 0; !found && i < json_array_size(v); i++) {
        const json_t *entry = json_array_get(v, i);
        const char *name = json_string_value(json_field(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            found = json_string_value(json_field(entry, "template"));
    }
    if (rc == OK && found) m->chat_template = arena_strdup(&m->arena, found);
    buf_release(&text);
    free(path);
    return rc;
}

/* *out is NULL when the file does not exist. */
static int optional_json_read(const char *dir, const char *name, json_t **out, struct error *err) {
    char *path = path_join(dir, name);
    bool exists = path_exists(path);
    *out = exists ? json_parse_file(path, err) : NULL;
    free(path);
    return exists && !*out ? err->code : OK;
}

static int tokenizer_read(struct model *m, const char *dir, const json_t *config,
                          struct error *err) {
    json_t *tok_config = NULL, *generation = NULL;
    int rc = tokenizer_files_read(dir, &m->tok, err);
    if (rc == OK) rc = optional_json_read(dir, "tokenizer_config.json", &tok_config, err);
    if (rc == OK) rc = optional_json_read(dir, "generation_config.json", &generation, err);
    const json_t *const roots[3] = {tok_config, generation, config};
    if (rc == OK && m->tok) rc = specials_apply(&m->tok, roots, err);
    if (rc == OK && m->tok && tokenizer_vocab_size(m->tok) > m->config.vocab_size)
        rc = error_set(err, ERR_MISMATCH, "'%s': the tokenizer has %d tokens, the model %d", dir,
                       (int)tokenizer_vocab_size(m->tok), (int)m->config.vocab_size);
    if (rc == OK) rc = chat_template_read(m, dir, tok_config, err);
    json_decref(tok_config);
    json_decref(generation);
    return rc;
}

struct model *hf_model_open(const char *dir, enum numeric_class cls, bool mapped,
                            struct error *err) {
    struct model *m = model_alloc(dir, cls);
    m->mapped = mapped;
    json_t *config = config_open(m, dir, err);
    int rc = config ? weights_read(m, dir, err) : err->code;
    if (rc == OK) rc = tokenizer_read(m, dir, config, err);
    if (rc == OK) model_read_source(m, json_string_value(json_object_get(config, HF_SOURCE_KEY)));
    json_decref(config);
    if (rc == OK) return m;
    model_close(m);
    return NULL;
}

/* Total size of the files from which a tokenizer may be read. */
static size_t tokenizer_files_size(const char *dir) {
    static const char *const names[] = {"tokenizer.json", "tokenizer.model",
                                        "tokenizer_config.json"};
    size_t sum = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char *path = path_join(dir, names[i]);
        struct file_map map;
        struct error absent;
        if (file_map_open(&map, path, &absent) == OK) {
            sum += map.size;
            file_map_close(&map);
        }
        free(path);
    }
    return sum;
}

int hf_model_measure(const char *dir, enum numeric_class cls, struct model_size *out,
                     struct error *err) {
    struct model *m = model_alloc(dir, cls); // for its configuration
    struct shards s = {0};
    json_t *config = config_open(m, dir, err);
    int rc = config ? shards_open(&s, dir, err) : err->code;
    if (rc == OK) {
        out->config = m->config;
        tensors_measure(s.tensors, s.n_tensors, cls, false, out);
        out->type = tensors_main_type(s.tensors, s.n_tensors);
        out->tokenizer = tokenizer_files_size(dir);
    }
    json_decref(config);
    shards_release(&s);
    model_close(m);
    return rc;
}

static int json_write(const char *dir, const char *name, json_t *value, struct error *err) {
    struct buf text = {0};
    char *dumped = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    CHECK(dumped != NULL);
    buf_printf(&text, "%s\n", dumped);
    char *path = path_join(dir, name);
    int rc = file_write(path, text.data, text.len, err);
    free(path);
    free(dumped);
    buf_release(&text);
    json_decref(value);
    return rc;
}

static void json_set_piece(json_t *root, const char *key, const struct tokenizer *tok, int32_t id) {
    int len = 0;
    const char *piece = id >= 0 ? tokenizer_id_to_piece(tok, id, &len) : NULL;
    json_t *value = piece ? json_stringn(piece, (size_t)len) : NULL;
    json_object_set_new(root, key, value ? value : json_null());
}

static int tokenizer_write(const struct model *m, const char *dir, struct error *err) {
    if (!m->tok) return OK;
    char *path = path_join(dir, "tokenizer.json");
    int rc = tokenizer_write_json(m->tok, path, err);
    free(path);
    if (rc != OK) return rc;
    json_t *root = json_object();
    json_object_set_new(root, "add_bos_token", json_boolean(tokenizer_add_bos(m->tok)));
    json_set_piece(root, "bos_token", m->tok, tokenizer_bos(m->tok));
    json_set_piece(root, "eos_token", m->tok, tokenizer_eos(m->tok));
    json_t *template = json_string(m->chat_template ? m->chat_template : chatml_template);
    json_object_set_new(root, "chat_template", template ? template : json_string(chatml_template));
    json_object_set_new(root, "model_max_length", json_integer(m->config.max_seq_len));
    json_object_set_new(root, "tokenizer_class", json_string("PreTrainedTokenizerFast"));
    return json_write(dir, "tokenizer_config.json", root, err);
}

/* Fills `list` with all weights, norms and biases first: they are f32 and are thus aligned for any
 * sizes of the 16-bit matrices. Returns the number of weights. */
static int32_t weights_list_vectors_first(const struct model_config *c, struct weight_info *list) {
    int32_t n = 0;
    struct weight_info w;
    for (int pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < weight_count(c); i++) {
            weight_at(c, i, NAMING_HF, &w);
            if (w.is_vector == (pass == 0)) list[n++] = w;
        }
    return n;
}

static int weights_header(const struct weight_info *list, int32_t n, enum tensor_type type,
                          struct buf *out, struct error *err) {
    struct tensor_info *infos = xcalloc((size_t)n, sizeof(*infos));
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    for (int32_t i = 0; i < n; i++) {
        const struct weight_info *w = &list[i];
        infos[i] = (struct tensor_info){.name = (char *)(uintptr_t)w->name,
                                        .n_dims = w->is_vector ? 1 : 2,
                                        .type = w->is_vector ? TENSOR_F32 : type};
        infos[i].dims[0] = w->is_vector ? w->k : w->n;
        infos[i].dims[1] = w->is_vector ? 0 : w->k;
        infos[i].size = tensor_row_bytes(infos[i].type, w->k) * (size_t)w->n;
    }
    int rc = safetensors_header(infos, n, metadata, out, err);
    json_decref(metadata);
    free(infos);
    return rc;
}

static int weight_rows_write(struct atomic_file *out, const struct model *m,
                             const struct weight_info *list, int32_t n, enum tensor_type type,
                             struct error *err) {
    int64_t max_row_len = 0;
    for (int32_t i = 0; i < n; i++) max_row_len = MAX(max_row_len, list[i].k);
    float *scratch = xmalloc(sizeof(float) * (size_t)max_row_len * 2);
    int rc = OK;
    for (int32_t i = 0; i < n; i++) {
        enum tensor_type t = list[i].is_vector ? TENSOR_F32 : type;
        for (int64_t r = 0; rc == OK && r < list[i].n; r++) {
            if (!weight_row(m, &list[i], r, t, scratch, scratch + max_row_len))
                rc = error_set(err, ERR_NUMERIC, "'%s' has a block whose scale is not finite",
                               list[i].name);
            for (int64_t j = 0; j < list[i].k && list[i].has_offset; j++)
                scratch[max_row_len + j] -= 1.0f;
            if (rc == OK)
                rc = atomic_file_write(out, scratch + max_row_len, tensor_row_bytes(t, list[i].k),
                                       err);
            if (r % ROWS_PER_WRITE == 0) weight_evict(m, &list[i], MAX(r - ROWS_PER_WRITE, 0), r);
        }
        weight_evict(m, &list[i], 0, list[i].n);
    }
    free(scratch);
    return rc;
}

static int weights_write(const struct model *m, const char *dir, enum tensor_type type,
                         struct error *err) {
    struct weight_info *list = xcalloc((size_t)weight_count(&m->config), sizeof(*list));
    int32_t n = weights_list_vectors_first(&m->config, list);
    struct buf header = {0};
    struct atomic_file w = {0};
    char *path = path_join(dir, "model.safetensors");
    int rc = weights_header(list, n, type, &header, err);
    if (rc == OK) rc = atomic_file_open(&w, path, err);
    if (rc == OK) rc = atomic_file_write(&w, header.data, header.len, err);
    if (rc == OK) rc = weight_rows_write(&w, m, list, n, type, err);
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    free(path);
    buf_release(&header);
    free(list);
    return rc;
}

int model_write_hf(const struct model *m, const char *dir, enum tensor_type type,
                   struct error *err) {
    if (type != TENSOR_F32 && type != TENSOR_F16 && type != TENSOR_BF16)
        return error_set(
            err, ERR_USAGE,
            "a Hugging Face directory holds f32, f16 or bf16, not %s; write a GGUF file "
            "instead",
            tensor_type_name(type));
    if (hf_config_check(&m->config, err) != OK) return err->code;
    int rc = dir_make(dir, err);
    if (rc == OK) rc = weights_write(m, dir, type, err);
    if (rc == OK) rc = tokenizer_write(m, dir, err);
    if (rc == OK) rc = json_write(dir, "config.json", hf_config_json(m, type), err);
    return rc;
}
