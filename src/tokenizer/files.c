/*
 * files: tokenizers from and to files — Hugging Face's tokenizer.json, SentencePiece's
 * tokenizer.model, llama2.c's tokenizer .bin — and the byte tokenizer of models without a file.
 * (gguf.c reads the tokenizer of GGUF files.)
 *
 * A reader converts its file to a struct tokenizer_spec, or refuses it: an unsupported normalizer,
 * pre-tokenizer or decoder is an error that names it. Only the options lstrip, rstrip and
 * single_word of added tokens are ignored, with a warning. hf.c reads tokenizer_config.json.
 *
 * Invariant: tokenizer_from_json reads the output of tokenizer_write_json as a tokenizer with the
 * same ids for every text, except where pieces share a score (merges_from_scores). Writing that
 * tokenizer gives the same bytes again.
 */
#include "tokenizer/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    VOCAB_LIMIT = 1 << 24, /* maximum number of tokens */
    FILE_LIMIT = 1 << 28,  /* maximum bytes of a file that is not JSON: even if every space becomes
                              ▁, which has three bytes, positions in the text fit int32 */
};

/* Reads tokenizer.json. */
struct tokenizer_json_reader {
    struct arena arena;
    struct tokenizer_spec spec;
    const json_t *root, *model;
    const char **pieces; /* [n]; NULL: no piece has this id yet */
    int32_t *lens;
    uint8_t *types;
    float *scores; /* UNIGRAM: [n] */
    const char **merges;
    json_t *steps; /* normalizers, except those that set adds_prefix or escapes_spaces */
    bool adds_prefix, escapes_spaces; /* a ▁ is prepended to the text; spaces become ▁ */
    bool splits_at_spaces;            /* text is split at all white space, which is not encoded */
};

static const char *json_type_name(const json_t *v) {
    const char *s = json_string_value(json_object_get(v, "type"));
    return s ? s : json_is_null(v) || !v ? "null" : "without a type";
}

static bool json_string_is(const json_t *v, const char *key, const char *want) {
    const char *s = json_string_value(json_object_get(v, key));
    return s && strcmp(s, want) == 0;
}

static bool json_flag(const json_t *v, const char *key, bool fallback) {
    const json_t *b = json_object_get(v, key);
    return json_is_boolean(b) ? json_is_true(b) : fallback;
}

static json_t *replace_json(const char *kind, const char *from, const char *to) {
    return json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern", kind, from, "content", to);
}

static int id_from_json(const json_t *v, const char *piece, int32_t *id, struct error *err) {
    json_int_t value = json_is_integer(v) ? json_integer_value(v) : -1;
    if (value < 0 || value >= VOCAB_LIMIT)
        return error_set(err, ERR_FORMAT, "token '%.80s' has no valid id", piece);
    *id = (int32_t)value;
    return OK;
}

static int vocab_max_id(struct tokenizer_json_reader *r, int32_t *max, struct error *err) {
    json_t *vocab = json_object_get(r->model, "vocab"), *v;
    const char *piece;
    int32_t id = -1;
    if (r->spec.kind == TOKENIZER_UNIGRAM) {
        if (!json_is_array(vocab) || json_array_size(vocab) > VOCAB_LIMIT)
            return error_set(err, ERR_FORMAT, "'model.vocab' is not an array of pieces");
        *max = (int32_t)json_array_size(vocab) - 1;
        return OK;
    }
    if (!json_is_object(vocab)) return error_set(err, ERR_FORMAT, "'model.vocab' is not an object");
    json_object_foreach (vocab, piece, v) {
        if (id_from_json(v, piece, &id, err) != OK) return err->code;
        *max = MAX(*max, id);
    }
    return OK;
}

/* The size of the vocabulary: the highest id of model.vocab and added_tokens, plus 1. Ids without a
 * piece are filled with placeholders, so only a limited number may be missing. */
static int reader_count_tokens(struct tokenizer_json_reader *r, struct error *err) {
    json_t *vocab = json_object_get(r->model, "vocab"), *v;
    json_t *added = json_object_get(r->root, "added_tokens");
    const char *piece;
    int32_t id = -1, max = -1;
    size_t i;
    if (vocab_max_id(r, &max, err) != OK) return err->code;
    json_array_foreach (added, i, v) {
        piece = json_string_value(json_object_get(v, "content"));
        if (!piece) return error_set(err, ERR_FORMAT, "added token %zu has no 'content'", i);
        if (id_from_json(json_object_get(v, "id"), piece, &id, err) != OK) return err->code;
        max = MAX(max, id);
    }
    size_t n = json_object_size(vocab) + json_array_size(vocab) + json_array_size(added);
    if (max < 0 || (size_t)max > 2 * n + 4096)
        return error_set(err, ERR_FORMAT, "the highest token id is %d, but there are %zu tokens",
                         max, n);
    r->spec.n = max + 1;
    return OK;
}

static int reader_set_piece(struct tokenizer_json_reader *r, int32_t id, const char *piece,
                            size_t len, uint8_t type, struct error *err) {
    if (len > INT32_MAX) return error_set(err, ERR_FORMAT, "token %d is too long", id);
    if (r->pieces[id] && ((size_t)r->lens[id] != len || memcmp(r->pieces[id], piece, len) != 0))
        return error_set(err, ERR_FORMAT, "tokens '%.80s' and '%.80s' have the same id %d",
                         r->pieces[id], piece, id);
    r->pieces[id] = piece;
    r->lens[id] = (int32_t)len;
    r->types[id] = type;
    return OK;
}

static int placeholder_name(int32_t id, char out[24]) {
    return snprintf(out, 24, "[PAD%d]", id);
}

/* Reads a list of [piece, score] whose index is the id. Placeholders, which tokenizer_write_json
 * writes for missing ids, become unused pieces again. */
static int unigram_vocab_read(struct tokenizer_json_reader *r, struct error *err) {
    size_t i;
    json_t *v;
    char placeholder[24];
    json_array_foreach (json_object_get(r->model, "vocab"), i, v) {
        const char *piece = json_string_value(json_array_get(v, 0));
        const json_t *score = json_array_get(v, 1);
        int32_t id = (int32_t)i;
        if (!piece || !json_is_number(score))
            return error_set(err, ERR_FORMAT, "token %d is not a pair of a piece and its score",
                             id);
        placeholder_name(id, placeholder);
        r->scores[id] = (float)json_number_value(score);
        uint8_t type = strcmp(piece, placeholder) == 0 ? PIECE_UNUSED : PIECE_NORMAL;
        if (reader_set_piece(r, id, piece, strlen(piece), type, err) != OK) return err->code;
    }
    return OK;
}

static int reader_read_vocab(struct tokenizer_json_reader *r, struct error *err) {
    json_t *v;
    if (r->spec.kind == TOKENIZER_UNIGRAM) return unigram_vocab_read(r, err);
    const char *piece;
    json_object_foreach (json_object_get(r->model, "vocab"), piece, v) {
        int32_t id = (int32_t)json_integer_value(v);
        if (reader_set_piece(r, id, piece, strlen(piece), PIECE_NORMAL, err) != OK)
            return err->code;
    }
    return OK;
}

static int reader_read_added_tokens(struct tokenizer_json_reader *r, struct error *err) {
    size_t i, stripping = 0, users = 0, normalized = 0;
    json_t *v;
    json_array_foreach (json_object_get(r->root, "added_tokens"), i, v) {
        const char *piece = json_string_value(json_object_get(v, "content"));
        uint8_t type = json_flag(v, "special", false) ? PIECE_CONTROL : PIECE_USER;
        int32_t id = (int32_t)json_integer_value(json_object_get(v, "id"));
        if (reader_set_piece(r, id, piece, strlen(piece), type, err) != OK) return err->code;
        normalized += type == PIECE_USER && json_flag(v, "normalized", false);
        users += type == PIECE_USER;
        stripping += json_flag(v, "lstrip", false) || json_flag(v, "rstrip", false) ||
                     json_flag(v, "single_word", false);
    }
    r->spec.user_pieces = r->spec.kind == TOKENIZER_UNIGRAM && users > 0 && normalized == users;
    if (stripping > 0)
        log_warn("%zu added tokens have 'lstrip', 'rstrip' or 'single_word', which are ignored",
                 stripping);
    return OK;
}

static void reader_fill_missing_ids(struct tokenizer_json_reader *r) {
    for (int32_t id = 0; id < r->spec.n; id++) {
        if (r->pieces[id]) continue;
        char *name = arena_alloc(&r->arena, 24);
        r->lens[id] = placeholder_name(id, name);
        r->pieces[id] = name;
        r->types[id] = PIECE_UNUSED;
    }
}

/* Reads a merge: either "a b" or ["a", "b"]. */
static int reader_read_merge(struct tokenizer_json_reader *r, int32_t rank, const json_t *v,
                             struct error *err) {
    r->merges[rank] = json_string_value(v);
    if (r->merges[rank]) return OK;
    const char *a = json_string_value(json_array_get(v, 0));
    const char *b = json_string_value(json_array_get(v, 1));
    if (!a || !b || json_array_size(v) != 2)
        return error_set(err, ERR_FORMAT, "merge %d is not a pair", rank);
    if (strchr(a, ' ') || strchr(b, ' '))
        return error_set(err, ERR_FORMAT,
                         "merge %d has a space inside a piece, which is not supported", rank);
    size_t size = strlen(a) + strlen(b) + 2;
    char *text = arena_alloc(&r->arena, size);
    snprintf(text, size, "%s %s", a, b);
    r->merges[rank] = text;
    return OK;
}

static int reader_read_merges(struct tokenizer_json_reader *r, struct error *err) {
    const json_t *merges = json_object_get(r->model, "merges");
    size_t n = json_array_size(merges);
    if (!json_is_array(merges)) return error_set(err, ERR_FORMAT, "'model.merges' is not an array");
    if (n > VOCAB_LIMIT) return error_set(err, ERR_FORMAT, "there are too many merges: %zu", n);
    if (arena_reserve(&r->arena, sizeof(*r->merges) * (n + 1) + 64, err) != OK) return err->code;
    r->merges = arena_alloc(&r->arena, sizeof(*r->merges) * (n + 1));
    for (size_t i = 0; i < n; i++)
        if (reader_read_merge(r, (int32_t)i, json_array_get(merges, i), err) != OK)
            return err->code;
    r->spec.merges = r->merges;
    r->spec.n_merges = (int32_t)n;
    return OK;
}

static int32_t reader_find_piece(const struct tokenizer_json_reader *r, const char *piece) {
    size_t len = strlen(piece);
    for (int32_t id = 0; id < r->spec.n; id++)
        if ((size_t)r->lens[id] == len && memcmp(r->pieces[id], piece, len) == 0) return id;
    return -1;
}

/* Unigram models have the id of the unknown token in unk_id, which may be null. */
static int unigram_unk_read(struct tokenizer_json_reader *r, struct error *err) {
    const json_t *v = json_object_get(r->model, "unk_id");
    if (!v || json_is_null(v)) return OK;
    if (id_from_json(v, "unk_id", &r->spec.unk, err) != OK) return err->code;
    if (r->spec.unk >= r->spec.n)
        return error_set(err, ERR_FORMAT, "the unknown token %d is not in the vocabulary",
                         r->spec.unk);
    r->types[r->spec.unk] = PIECE_UNKNOWN;
    return OK;
}

static int reader_read_unk(struct tokenizer_json_reader *r, struct error *err) {
    if (r->spec.kind == TOKENIZER_UNIGRAM) return unigram_unk_read(r, err);
    const char *unk = json_string_value(json_object_get(r->model, "unk_token"));
    if (!unk) return OK;
    r->spec.unk = reader_find_piece(r, unk);
    if (r->spec.unk < 0)
        return error_set(err, ERR_FORMAT, "the unknown token '%.80s' is not in the vocabulary",
                         unk);
    if (r->spec.kind == TOKENIZER_SPM) r->types[r->spec.unk] = PIECE_UNKNOWN;
    return OK;
}

typedef int (*step_fn)(struct tokenizer_json_reader *r, const json_t *part, struct error *err);
/* If v is a Sequence, calls fn for each element of its array `list`; otherwise calls fn for v
 * itself. Calls nothing for null. */
static int steps_each(struct tokenizer_json_reader *r, const json_t *v, const char *list,
                      step_fn fn, struct error *err) {
    size_t i;
    json_t *part;
    if (!v || json_is_null(v)) return OK;
    if (strcmp(json_type_name(v), "Sequence") != 0) return fn(r, v, err);
    json_array_foreach (json_object_get(v, list), i, part) {
        if (fn(r, part, err) != OK) return err->code;
    }
    return OK;
}

/* Appends a step without a check: tokenizer_new checks it. */
static int normalizer_append(struct tokenizer_json_reader *r, const json_t *part,
                             struct error *err) {
    (void)err;
    json_array_append(r->steps, (json_t *)(uintptr_t)part);
    return OK;
}

static bool is_replace_step(const json_t *part, const char *from, const char *to) {
    const json_t *pattern = json_object_get(part, "pattern");
    return strcmp(json_type_name(part), "Replace") == 0 && json_string_is(part, "content", to) &&
           (json_string_is(pattern, "String", from) || json_string_is(pattern, "Regex", from));
}

/* llm-jp's pattern for the beginning of a text: the beginning of a line that follows no newline. */
#define TEXT_BEGIN "(?<!\\n)^"

static int spm_normalizer_read(struct tokenizer_json_reader *r, const json_t *part,
                               struct error *err) {
    bool is_prefix = (strcmp(json_type_name(part), "Prepend") == 0 &&
                      json_string_is(part, "prepend", METASPACE_CHAR)) ||
                     is_replace_step(part, TEXT_BEGIN, METASPACE_CHAR);
    bool is_space_mark = is_replace_step(part, " ", METASPACE_CHAR);
    if (!is_prefix && !is_space_mark && (r->adds_prefix || r->escapes_spaces))
        return error_set(err, ERR_FORMAT,
                         "normalizer '%s' is not supported after the one that writes ▁",
                         json_type_name(part));
    if (!is_prefix && !is_space_mark) return normalizer_append(r, part, err);
    r->adds_prefix |= is_prefix;
    r->escapes_spaces |= is_space_mark;
    r->spec.add_space_prefix = r->adds_prefix;
    return OK;
}

static const char *metaspace_scheme(const json_t *part) {
    const char *scheme = json_string_value(json_object_get(part, "prepend_scheme"));
    if (scheme) return scheme; /* older files have a flag instead */
    return json_flag(part, "add_prefix_space", true) ? "always" : "never";
}

/* A Split at spaces is ignored: it has no effect if spaces are ▁ at that point. WhitespaceSplit
 * with a ▁ before each word is equivalent to collapsing white space to single spaces that become ▁.
 */
static int spm_pre_tokenizer_read(struct tokenizer_json_reader *r, const json_t *part,
                                  struct error *err) {
    if (strcmp(json_type_name(part), "Split") == 0 &&
        json_string_is(json_object_get(part, "pattern"), "String", " "))
        return OK;
    if (strcmp(json_type_name(part), "WhitespaceSplit") == 0 && !r->adds_prefix &&
        !r->escapes_spaces) {
        json_array_append_new(r->steps, replace_json("Regex", "\\s+", " "));
        json_array_append_new(r->steps, json_pack("{s:s,s:b,s:b}", "type", "Strip", "strip_left", 1,
                                                  "strip_right", 1));
        r->splits_at_spaces = true;
        return OK;
    }
    const char *scheme = metaspace_scheme(part);
    if (strcmp(json_type_name(part), "Metaspace") != 0 ||
        !json_string_is(part, "replacement", METASPACE_CHAR) || r->adds_prefix ||
        (r->splits_at_spaces && (strcmp(scheme, "always") != 0 || !json_flag(part, "split", true))))
        return error_set(err, ERR_FORMAT,
                         "pre-tokenizer '%s' is not supported for sentencepiece models as it is "
                         "used here",
                         json_type_name(part));
    r->spec.add_space_prefix = strcmp(scheme, "never") != 0;
    r->spec.pre = strcmp(scheme, "first") == 0 ? PREFIX_FIRST : PREFIX_ALWAYS;
    r->spec.split_words = json_flag(part, "split", true);
    r->escapes_spaces = true;
    return OK;
}

static int bpe_decoder_check(struct tokenizer_json_reader *r, const json_t *part,
                             struct error *err) {
    (void)r;
    if (strcmp(json_type_name(part), "ByteLevel") == 0) return OK;
    return error_set(err, ERR_FORMAT, "decoder '%s' is not supported for byte-level BPE",
                     json_type_name(part));
}

static int spm_decoder_check(struct tokenizer_json_reader *r, const json_t *part,
                             struct error *err) {
    (void)r;
    const char *type = json_type_name(part);
    bool is_strip = strcmp(type, "Strip") == 0 && json_string_is(part, "content", " ") &&
                    json_integer_value(json_object_get(part, "start")) <= 1 &&
                    json_integer_value(json_object_get(part, "stop")) == 0;
    if (is_strip || strcmp(type, "ByteFallback") == 0 || strcmp(type, "Fuse") == 0 ||
        strcmp(type, "Metaspace") == 0 || is_replace_step(part, METASPACE_CHAR, " ") ||
        is_replace_step(part, TEXT_BEGIN " ", ""))
        return OK;
    return error_set(err, ERR_FORMAT, "decoder '%s' is not supported as it is used here", type);
}

static bool split_keeps_all_text(const json_t *split) {
    bool invert = json_flag(split, "invert", false);
    return json_string_is(split, "behavior", invert ? "Removed" : "Isolated");
}

/* Reads the three forms that one pattern can replace: ByteLevel alone, Digits then ByteLevel, Split
 * then ByteLevel. */
static int bpe_pre_tokenizer_read(struct tokenizer_json_reader *r, const json_t *v,
                                  struct error *err) {
    const json_t *list = json_object_get(v, "pretokenizers");
    bool sequence = strcmp(json_type_name(v), "Sequence") == 0;
    const json_t *last = sequence ? json_array_get(list, json_array_size(list) - 1) : v;
    const json_t *before = sequence && json_array_size(list) == 2 ? json_array_get(list, 0) : NULL;
    bool regex = json_flag(last, "use_regex", true),
         alone = !before && (!sequence || json_array_size(list) == 1);
    const char *pattern =
        json_string_value(json_object_get(json_object_get(before, "pattern"), "Regex"));
    r->spec.add_space_prefix = json_flag(last, "add_prefix_space", true) && regex;
    if (strcmp(json_type_name(last), "ByteLevel") == 0) {
        if (alone && regex) r->spec.pre = "gpt-2";
        if (regex && strcmp(json_type_name(before), "Digits") == 0 &&
            json_flag(before, "individual_digits", false) && !r->spec.add_space_prefix)
            r->spec.pre = "smollm";
        if (!regex && strcmp(json_type_name(before), "Split") == 0 && pattern &&
            split_keeps_all_text(before) && !json_flag(last, "add_prefix_space", true))
            r->spec.pre = pretokenizer_name(pattern, r->spec.ignore_merges);
    }
    if (r->spec.pre && pretokenizer_pattern(r->spec.pre)) return OK;
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    error_set(err, ERR_FORMAT, "this pre-tokenizer is not supported: '%.300s'", text ? text : "?");
    free(text);
    return err->code;
}

static int byte_level_detect(struct tokenizer_json_reader *r, const json_t *part,
                             struct error *err) {
    (void)err;
    if (strcmp(json_type_name(part), "ByteLevel") == 0) r->spec.kind = TOKENIZER_BPE;
    return OK;
}

static int bpe_pipeline_read(struct tokenizer_json_reader *r, struct error *err) {
    const json_t *norm = json_object_get(r->root, "normalizer");
    if (steps_each(r, norm, "normalizers", normalizer_append, err) != OK ||
        bpe_pre_tokenizer_read(r, json_object_get(r->root, "pre_tokenizer"), err) != OK)
        return err->code;
    return steps_each(r, json_object_get(r->root, "decoder"), "decoders", bpe_decoder_check, err);
}

static int spm_pipeline_read(struct tokenizer_json_reader *r, struct error *err) {
    const json_t *norm = json_object_get(r->root, "normalizer"),
                 *pre = json_object_get(r->root, "pre_tokenizer");
    if (steps_each(r, norm, "normalizers", spm_normalizer_read, err) != OK ||
        steps_each(r, pre, "pretokenizers", spm_pre_tokenizer_read, err) != OK)
        return err->code;
    if ((r->spec.kind == TOKENIZER_UNIGRAM && !r->escapes_spaces) ||
        (r->splits_at_spaces && !r->spec.split_words))
        return error_set(err, ERR_FORMAT, "spaces do not become ▁, which is not supported here");
    return steps_each(r, json_object_get(r->root, "decoder"), "decoders", spm_decoder_check, err);
}

static int reader_read_pipeline(struct tokenizer_json_reader *r, struct error *err) {
    const json_t *pre = json_object_get(r->root, "pre_tokenizer");
    r->steps = json_array();
    if (r->spec.kind != TOKENIZER_UNIGRAM) {
        r->spec.kind = TOKENIZER_SPM;
        steps_each(r, pre, "pretokenizers", byte_level_detect, err);
    }
    if (r->spec.kind == TOKENIZER_SPM && !json_flag(r->model, "byte_fallback", false))
        return error_set(err, ERR_FORMAT,
                         "neither a byte-level BPE nor one with byte fallback (pre-tokenizer '%s')",
                         json_type_name(pre));
    int rc = r->spec.kind == TOKENIZER_BPE ? bpe_pipeline_read(r, err) : spm_pipeline_read(r, err);
    if (rc != OK || json_array_size(r->steps) == 0) return rc;
    char *text = normalizer_to_json(r->steps);
    r->spec.normalizer = arena_strdup(&r->arena, text);
    free(text);
    return OK;
}

/* The id of the token for a label of a TemplateProcessing template, or -1 if it has no entry for
 * the label. */
static int32_t label_token_id(const struct tokenizer_json_reader *r, const json_t *template,
                              const char *label) {
    const json_t *entry = json_object_get(json_object_get(template, "special_tokens"), label);
    const json_t *id = json_array_get(json_object_get(entry, "ids"), 0);
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    return value >= 0 && value < r->spec.n ? (int32_t)value : -1;
}

static const char *template_label(const json_t *part) {
    return json_string_value(json_object_get(json_object_get(part, "SpecialToken"), "id"));
}

/* The token before the text is BOS, the one after it EOS. Files written by Shoal also have labels
 * for tokens that the template does not use. */
static int post_processor_read(struct tokenizer_json_reader *r, const json_t *part,
                               struct error *err) {
    if (strcmp(json_type_name(part), "ByteLevel") == 0) return OK; /* concerns offsets only */
    if (strcmp(json_type_name(part), "TemplateProcessing") != 0)
        return error_set(err, ERR_FORMAT, "post-processor '%s' is not supported",
                         json_type_name(part));
    const json_t *single = json_object_get(part, "single");
    size_t n = json_array_size(single);
    const char *before = template_label(json_array_get(single, 0)),
               *after = n > 1 ? template_label(json_array_get(single, n - 1)) : NULL;
    if (n > 1u + (before != NULL) + (after != NULL))
        return error_set(err, ERR_FORMAT,
                         "a post-processor that adds several tokens on one side is not supported");
    r->spec.bos = label_token_id(r, part, before ? before : "bos");
    r->spec.eos = label_token_id(r, part, after ? after : "eos");
    r->spec.add_bos = before != NULL;
    r->spec.add_eos = after != NULL;
    if (r->spec.unk < 0) r->spec.unk = label_token_id(r, part, "unk");
    if ((before && r->spec.bos < 0) || (after && r->spec.eos < 0))
        return error_set(err, ERR_FORMAT,
                         "the post-processor's token '%.80s' is not in the vocabulary",
                         before && r->spec.bos < 0 ? before : after);
    return OK;
}

static int reader_read_model(struct tokenizer_json_reader *r, struct error *err) {
    const char *type = json_string_value(json_object_get(r->model, "type"));
    if (!json_is_object(r->model))
        return error_set(err, ERR_FORMAT, "there is no 'model' object: this is not a tokenizer");
    if (type && strcmp(type, "Unigram") == 0) {
        r->spec.kind = TOKENIZER_UNIGRAM;
        return OK;
    }
    if (type && strcmp(type, "BPE") != 0)
        return error_set(err, ERR_FORMAT, "model type '%.40s' is not supported (BPE, Unigram are)",
                         type);
    if (json_number_value(json_object_get(r->model, "dropout")) != 0)
        return error_set(err, ERR_FORMAT, "'dropout' in the model would make its output random");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < ARRAY_LEN(affixes); i++) {
        const char *s = json_string_value(json_object_get(r->model, affixes[i]));
        if (s && *s) return error_set(err, ERR_FORMAT, "'%s' is not supported", affixes[i]);
    }
    r->spec.ignore_merges = json_flag(r->model, "ignore_merges", false);
    return OK;
}

static int reader_alloc_arrays(struct tokenizer_json_reader *r, struct error *err) {
    size_t n = (size_t)r->spec.n;
    int rc = arena_reserve(
        &r->arena, n * (sizeof(*r->pieces) + sizeof(*r->lens) + sizeof(float) + 1) + 4 * 64, err);
    if (rc != OK) return rc;
    r->spec.pieces = r->pieces = arena_alloc(&r->arena, sizeof(*r->pieces) * n);
    r->spec.lens = r->lens = arena_alloc(&r->arena, sizeof(*r->lens) * n);
    r->spec.types = r->types = arena_alloc(&r->arena, n);
    r->spec.scores = r->scores = arena_alloc(&r->arena, sizeof(*r->scores) * n);
    return OK;
}

static int reader_parse(struct tokenizer_json_reader *r, struct error *err) {
    r->spec.bos = r->spec.eos = r->spec.unk = -1;
    if (reader_read_model(r, err) != OK || reader_count_tokens(r, err) != OK ||
        reader_alloc_arrays(r, err) != OK)
        return err->code;
    if (reader_read_vocab(r, err) != OK || reader_read_added_tokens(r, err) != OK) return err->code;
    reader_fill_missing_ids(r);
    if (r->spec.kind != TOKENIZER_UNIGRAM && reader_read_merges(r, err) != OK) return err->code;
    if (reader_read_pipeline(r, err) != OK || reader_read_unk(r, err) != OK) return err->code;
    return steps_each(r, json_object_get(r->root, "post_processor"), "processors",
                      post_processor_read, err);
}

static bool is_byte_piece(const char *p, int32_t len) {
    return len == 6 && memcmp(p, "<0x", 3) == 0 && strspn(p + 3, "0123456789ABCDEF") == 2 &&
           p[5] == '>';
}

/* A piece's score is the negative rank of the first merge that makes it. */
static float *scores_from_merges(struct tokenizer_json_reader *r, const struct tokenizer *t) {
    float *scores = arena_alloc(&r->arena, sizeof(*scores) * (size_t)r->spec.n);
    for (int32_t id = 0; id < r->spec.n; id++) scores[id] = -(float)r->spec.n_merges;
    for (uint64_t i = 0; i <= t->pairs.mask; i++) {
        const struct merge_slot *s = &t->pairs.slots[i];
        if (s->key != UINT64_MAX) scores[s->id] = MAX(scores[s->id], -(float)s->rank);
    }
    return scores;
}

static bool spm_merges_equal(const struct tokenizer *a, const struct tokenizer *b) {
    int32_t n, m;
    struct spm_merge *x = spm_merges(a, &n), *y = spm_merges(b, &m);
    bool same = n == m;
    for (int32_t i = 0; same && i < n; i++)
        same = x[i].left == y[i].left && x[i].right == y[i].right;
    free(x);
    free(y);
    return same;
}

/*
 * The merge list of a converted SentencePiece model has every pair of pieces that forms a piece, in
 * the order of scores. Such a list is converted back to scores, so that the tokenizer gives the
 * same ids as the original model. Any other list is used unchanged.
 */
static struct tokenizer *reader_build_spm(struct tokenizer_json_reader *r, struct error *err) {
    if (arena_reserve(&r->arena, sizeof(float) * (size_t)r->spec.n + 64, err) != OK)
        return NULL; /* for the scores below */
    struct tokenizer *from_list = tokenizer_new(&r->spec, err);
    if (!from_list) return NULL;
    r->spec.scores = scores_from_merges(r, from_list);
    struct tokenizer_spec spec = r->spec;
    spec.n_merges = 0;
    struct error ignored;
    struct tokenizer *from_scores = tokenizer_new(&spec, &ignored);
    bool same = from_scores && spm_merges_equal(from_list, from_scores);
    tokenizer_free(from_list);
    if (same) return from_scores;
    tokenizer_free(from_scores);
    return tokenizer_new(&r->spec, err);
}

static struct tokenizer *reader_build(struct tokenizer_json_reader *r, struct error *err) {
    if (r->spec.kind == TOKENIZER_BPE) return tokenizer_new(&r->spec, err);
    for (int32_t id = 0; id < r->spec.n && json_flag(r->model, "byte_fallback", false); id++)
        if (r->types[id] == PIECE_NORMAL && is_byte_piece(r->pieces[id], r->lens[id]))
            r->types[id] = PIECE_BYTE;
    return r->spec.kind == TOKENIZER_SPM ? reader_build_spm(r, err) : tokenizer_new(&r->spec, err);
}

struct tokenizer *tokenizer_from_json(const char *path, struct error *err) {
    struct tokenizer *t = NULL;
    json_t *root = json_parse_file(path, err);
    if (!root) return NULL;
    struct tokenizer_json_reader r = {.root = root, .model = json_object_get(root, "model")};
    if (reader_parse(&r, err) == OK) t = reader_build(&r, err);
    if (!t) error_wrap(err, "'%s'", path);
    json_decref(r.steps);
    arena_release(&r.arena);
    json_decref(root);
    return t;
}

static int piece_check(const struct tokenizer_spec *s, int32_t id, struct error *err) {
    const char *p = s->pieces[id];
    size_t len = (size_t)s->lens[id];
    bool is_valid = memchr(p, 0, len) == NULL;
    for (size_t i = 0, n; is_valid && i < len; i += n)
        is_valid = (n = (size_t)utf8_len(p + i, len - i)) > 0;
    return is_valid
               ? OK
               : error_set(err, ERR_MISMATCH, "token %d is not UTF-8 text, which JSON needs", id);
}

static json_t *vocab_json(const struct tokenizer_spec *s, struct error *err) {
    json_t *vocab = json_object();
    for (int32_t id = 0; id < s->n; id++) {
        int rc = piece_check(s, id, err);
        if (rc == OK && json_object_get(vocab, s->pieces[id]))
            rc = error_set(err, ERR_MISMATCH, "token %d ('%.80s') occurs twice", id, s->pieces[id]);
        if (rc != OK) {
            json_decref(vocab);
            return NULL;
        }
        json_object_set_new(vocab, s->pieces[id], json_integer(id));
    }
    return vocab;
}

static json_t *added_json(const struct tokenizer_spec *s) {
    json_t *added = json_array();
    for (int32_t id = 0; id < s->n; id++) {
        if (s->types[id] != PIECE_UNKNOWN && s->types[id] != PIECE_CONTROL &&
            s->types[id] != PIECE_USER)
            continue;
        json_array_append_new(added,
                              json_pack("{s:i,s:s,s:b,s:b,s:b,s:b,s:b}", "id", (int)id, "content",
                                        s->pieces[id], "single_word", 0, "lstrip", 0, "rstrip", 0,
                                        "normalized", s->types[id] == PIECE_USER && s->user_pieces,
                                        "special", s->types[id] != PIECE_USER));
    }
    return added;
}

static int merge_append(json_t *list, const struct tokenizer_spec *s, const struct spm_merge *m,
                        struct error *err) {
    if (m->left >= s->n || m->right >= s->n)
        return error_set(err, ERR_MISMATCH,
                         "token %d ('%.80s') has a character that is not a token: tokenizer.json "
                         "cannot express its merges",
                         m->id, s->pieces[m->id]);
    const char *a = s->pieces[m->left], *b = s->pieces[m->right];
    if (strchr(a, ' ') || strchr(b, ' '))
        return error_set(err, ERR_MISMATCH,
                         "token %d ('%.80s') contains a space, so its merge cannot be written",
                         m->id, s->pieces[m->id]);
    char *text = xasprintf("%s %s", a, b);
    json_array_append_new(list, json_string(text));
    free(text);
    return OK;
}

/* Equal scores of different pieces mean "the leftmost first", which a merge list cannot express. */
static json_t *merges_from_scores(const struct tokenizer *t, struct error *err) {
    int32_t n, ties = 0;
    struct spm_merge *v = spm_merges(t, &n);
    json_t *list = json_array();
    int rc = OK;
    for (int32_t i = 0; i < n && rc == OK; i++) {
        rc = merge_append(list, &t->spec, &v[i], err);
        ties += i > 0 && v[i].rank == v[i - 1].rank && v[i].id != v[i - 1].id;
    }
    free(v);
    if (rc == OK && ties > 0)
        log_info("%d pieces share a score with another: tokenizer.json orders them by id", ties);
    if (rc == OK) return list;
    json_decref(list);
    return NULL;
}

static json_t *merges_json(const struct tokenizer *t, struct error *err) {
    if (t->spec.kind == TOKENIZER_SPM && t->spec.n_merges == 0) return merges_from_scores(t, err);
    json_t *list = json_array();
    for (int32_t i = 0; i < t->spec.n_merges; i++)
        json_array_append_new(list, json_string(t->spec.merges[i]));
    return list;
}

static bool has_byte_pieces(const struct tokenizer_spec *s) {
    for (int32_t id = 0; id < s->n; id++)
        if (s->types[id] == PIECE_BYTE) return true;
    return false;
}

/* tokenizer.json cannot mark pieces as unused: the reader recognises only placeholders, by name. */
static int unused_piece_check(const struct tokenizer_spec *s, int32_t id, struct error *err) {
    char placeholder[24];
    placeholder_name(id, placeholder);
    if (s->types[id] != PIECE_UNUSED || strcmp(s->pieces[id], placeholder) == 0) return OK;
    return error_set(err, ERR_MISMATCH,
                     "token %d ('%.80s') is unused, which tokenizer.json cannot express", id,
                     s->pieces[id]);
}

static json_t *unigram_json(const struct tokenizer_spec *s, struct error *err) {
    json_t *vocab = json_array();
    for (int32_t id = 0; id < s->n; id++) {
        if (piece_check(s, id, err) != OK || unused_piece_check(s, id, err) != OK) {
            json_decref(vocab);
            return NULL;
        }
        json_array_append_new(vocab, json_pack("[s,f]", s->pieces[id], (double)s->scores[id]));
    }
    json_t *unk = s->unk >= 0 ? json_integer(s->unk) : json_null();
    return json_pack("{s:s,s:o,s:o,s:b}", "type", "Unigram", "unk_id", unk, "vocab", vocab,
                     "byte_fallback", (int)has_byte_pieces(s));
}

static json_t *model_json(const struct tokenizer *t, struct error *err) {
    const struct tokenizer_spec *s = &t->spec;
    if (s->kind == TOKENIZER_UNIGRAM) return unigram_json(s, err);
    bool spm = s->kind == TOKENIZER_SPM;
    json_t *vocab = vocab_json(s, err), *merges = vocab ? merges_json(t, err) : NULL;
    if (!merges) {
        json_decref(vocab);
        return NULL;
    }
    json_t *m =
        json_pack("{s:s,s:n,s:s?,s:n,s:n,s:b,s:b}", "type", "BPE", "dropout", "unk_token",
                  spm && s->unk >= 0 ? s->pieces[s->unk] : NULL, "continuing_subword_prefix",
                  "end_of_word_suffix", "fuse_unk", (int)spm, "byte_fallback", (int)spm);
    if (s->ignore_merges) json_object_set_new(m, "ignore_merges", json_true());
    json_object_set_new(m, "vocab", vocab);
    json_object_set_new(m, "merges", merges);
    return m;
}

static json_t *metaspace_json(const struct tokenizer *t) {
    const char *scheme = !t->spec.add_space_prefix ? "never"
                         : t->prefix_text_only     ? "first"
                                                   : "always";
    return json_pack("{s:s,s:s,s:s,s:b}", "type", "Metaspace", "replacement", METASPACE_CHAR,
                     "prepend_scheme", scheme, "split", (int)t->spec.split_words);
}

/* The array of the steps of a normalizer, whose JSON text is `text`; empty for NULL. */
static json_t *steps_json(const char *text) {
    struct error err;
    json_t *v = text ? json_parse(text, strlen(text), "normalizer", &err) : NULL;
    json_t *steps = json_object_get(v, "normalizers");
    steps = steps ? json_incref(steps) : v ? json_pack("[O]", v) : json_array();
    json_decref(v);
    return steps;
}

/* Writes the space that is added before a text as a Metaspace pre-tokenizer if prefix_unless_space
 * is set, otherwise as a Prepend normalizer. */
static void spm_pipeline_write(json_t *root, const struct tokenizer *t) {
    json_t *normalizers = steps_json(t->spec.normalizer), *pre = json_null();
    json_t *decoders = json_pack("[o,{s:s},{s:s}]", replace_json("String", METASPACE_CHAR, " "),
                                 "type", "ByteFallback", "type", "Fuse");
    if (t->prefix_unless_space && (t->spec.add_space_prefix || t->spec.split_words))
        pre = metaspace_json(t);
    if (t->spec.add_space_prefix) {
        if (!t->prefix_unless_space)
            json_array_append_new(
                normalizers, json_pack("{s:s,s:s}", "type", "Prepend", "prepend", METASPACE_CHAR));
        json_array_append_new(decoders, json_pack("{s:s,s:s,s:i,s:i}", "type", "Strip", "content",
                                                  " ", "start", 1, "stop", 0));
    }
    json_array_append_new(normalizers, replace_json("String", " ", METASPACE_CHAR));
    json_object_set_new(root, "normalizer",
                        json_pack("{s:s,s:o}", "type", "Sequence", "normalizers", normalizers));
    json_object_set_new(root, "pre_tokenizer", pre);
    json_object_set_new(root, "decoder",
                        json_pack("{s:s,s:o}", "type", "Sequence", "decoders", decoders));
}

static json_t *byte_level_json(bool prefix, bool regex) {
    return json_pack("{s:s,s:b,s:b,s:b}", "type", "ByteLevel", "add_prefix_space", (int)prefix,
                     "trim_offsets", 1, "use_regex", (int)regex);
}

/* A space before the text cannot be combined with a Split: ByteLevel would add the space before
 * every word. */
static int bpe_pipeline_write(json_t *root, const struct tokenizer_spec *s, struct error *err) {
    const char *pattern = pretokenizer_pattern(s->pre);
    bool gpt2 = strcmp(pattern, pretokenizer_pattern("gpt-2")) == 0;
    if (s->add_space_prefix && !gpt2)
        return error_set(err, ERR_MISMATCH,
                         "tokenizer.json cannot add a space before the text with the "
                         "pre-tokenizer '%.80s'",
                         s->pre);
    json_t *pre = byte_level_json(s->add_space_prefix, s->add_space_prefix);
    if (!s->add_space_prefix)
        pre = json_pack("{s:s,s:[{s:s,s:{s:s},s:s,s:b},o]}", "type", "Sequence", "pretokenizers",
                        "type", "Split", "pattern", "Regex", pattern, "behavior", "Isolated",
                        "invert", 0, pre);
    struct error ignored; /* it was parsed before, without error */
    json_t *norm = s->normalizer
                       ? json_parse(s->normalizer, strlen(s->normalizer), "normalizer", &ignored)
                       : json_null();
    json_object_set_new(root, "normalizer", norm);
    json_object_set_new(root, "pre_tokenizer", pre);
    json_object_set_new(root, "decoder", byte_level_json(false, false));
    return OK;
}

static void label_add(json_t *labels, const char *label, const struct tokenizer_spec *s,
                      int32_t id) {
    if (id >= 0)
        json_object_set_new(
            labels, label,
            json_pack("{s:s,s:[i],s:[s]}", "id", label, "ids", (int)id, "tokens", s->pieces[id]));
}

static json_t *template_part(const char *kind, const char *id, int type_id) {
    return json_pack("{s:{s:s,s:i}}", kind, "id", id, "type_id", type_id);
}

/* The template has BOS and EOS if they are added to texts. Its table special_tokens also has the
 * labels that the template does not use. */
static json_t *post_processor_json(const struct tokenizer_spec *s) {
    json_t *labels = json_object(), *single = json_array(), *pair = json_array();
    label_add(labels, "bos", s, s->bos);
    label_add(labels, "eos", s, s->eos);
    label_add(labels, "unk", s, s->unk);
    if (s->add_bos && s->bos >= 0) {
        json_array_append_new(single, template_part("SpecialToken", "bos", 0));
        json_array_append_new(pair, template_part("SpecialToken", "bos", 0));
    }
    json_array_append_new(single, template_part("Sequence", "A", 0));
    json_array_append_new(pair, template_part("Sequence", "A", 0));
    json_array_append_new(pair, template_part("Sequence", "B", 1));
    if (s->add_eos && s->eos >= 0) {
        json_array_append_new(single, template_part("SpecialToken", "eos", 0));
        json_array_append_new(pair, template_part("SpecialToken", "eos", 1));
    }
    return json_pack("{s:s,s:o,s:o,s:o}", "type", "TemplateProcessing", "single", single, "pair",
                     pair, "special_tokens", labels);
}

int tokenizer_write_json(const struct tokenizer *t, const char *path, struct error *err) {
    const struct tokenizer_spec *s = &t->spec;
    json_t *model = model_json(t, err);
    if (!model) return error_wrap(err, "'%s'", path);
    json_t *root = json_pack("{s:s,s:n,s:n,s:o}", "version", "1.0", "truncation", "padding",
                             "added_tokens", added_json(s));
    int rc = OK;
    if (s->kind == TOKENIZER_BPE)
        rc = bpe_pipeline_write(root, s, err);
    else
        spm_pipeline_write(root, t);
    json_object_set_new(root, "post_processor", post_processor_json(s));
    json_object_set_new(root, "model", model);
    if (rc != OK) {
        error_wrap(err, "'%s'", path);
    } else {
        char *text = json_dumps(root, JSON_INDENT(2));
        CHECK(text);
        rc = file_write(path, text, strlen(text), err);
        free(text);
    }
    json_decref(root);
    return rc;
}

/* Collects pieces for a tokenizer_spec. */
struct spec_builder {
    struct buf text;
    struct token_ids begin, lens; /* of each piece: its position in `text`, its bytes */
    struct buf scores, types;     /* float, uint8_t */
};

/* Reserves room for n pieces of `bytes` bytes in all. */
static int spec_builder_reserve(struct spec_builder *g, size_t n, size_t bytes, struct error *err) {
    n = MIN(n, (size_t)VOCAB_LIMIT + 1);
    if (buf_reserve(&g->text, bytes, err) != OK ||
        buf_reserve(&g->scores, n * sizeof(float), err) != OK ||
        buf_reserve(&g->types, n, err) != OK)
        return err->code;
    g->begin.v = try_calloc(n, sizeof(int32_t), err);
    g->lens.v = g->begin.v ? try_calloc(n, sizeof(int32_t), err) : NULL;
    if (!g->lens.v) return err->code;
    g->begin.cap = g->lens.cap = (int)n;
    return OK;
}

static void spec_builder_add(struct spec_builder *g, const char *p, size_t len, float score,
                             uint8_t type) {
    token_ids_add(&g->begin, (int32_t)g->text.len);
    token_ids_add(&g->lens, (int32_t)len);
    buf_add(&g->text, p, len);
    buf_add(&g->scores, &score, sizeof(score));
    buf_add(&g->types, &type, 1);
}

static struct tokenizer *spec_builder_finish(const struct spec_builder *g,
                                             struct tokenizer_spec *spec, struct error *err) {
    const char **pieces = try_calloc((size_t)g->begin.n + 1, sizeof(*pieces), err);
    if (!pieces) return NULL;
    for (int i = 0; i < g->begin.n; i++) pieces[i] = g->text.data + g->begin.v[i];
    spec->n = g->begin.n;
    spec->pieces = pieces;
    spec->lens = g->lens.v;
    spec->scores = (const float *)(const void *)g->scores.data;
    spec->types = (const uint8_t *)g->types.data;
    struct tokenizer *t = tokenizer_new(spec, err);
    free(pieces);
    return t;
}

static void spec_builder_release(struct spec_builder *g) {
    buf_release(&g->text);
    buf_release(&g->scores);
    buf_release(&g->types);
    token_ids_release(&g->begin);
    token_ids_release(&g->lens);
}

static void replace_all(struct buf *out, const char *p, size_t len, const char *from,
                        const char *to) {
    size_t from_len = strlen(from);
    out->len = 0;
    buf_add(out, "", 0);
    for (size_t i = 0; i < len;) {
        bool matches = len - i >= from_len && memcmp(p + i, from, from_len) == 0;
        buf_add(out, matches ? to : p + i, matches ? strlen(to) : 1);
        i += matches ? from_len : 1;
    }
}

/* Protocol buffers: a message is a sequence of (field number, wire type, value). A field borrows
 * its bytes from the file. */
struct protobuf_field {
    uint64_t number;
    int wire;            /* 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes */
    uint64_t value;      /* the value of a varint */
    const uint8_t *data; /* the bytes of other wire types */
    size_t size;
};
struct protobuf_view {
    const uint8_t *p, *end;
};

static bool protobuf_read_varint(struct protobuf_view *m, uint64_t *out) {
    *out = 0;
    for (int shift = 0; shift < 64 && m->p < m->end; shift += 7) {
        uint8_t byte = *m->p++;
        *out |= (uint64_t)(byte & 0x7F) << shift;
        if (!(byte & 0x80)) return true;
    }
    return false;
}

/* Returns 1 for a field, 0 at the end, a negative number for ERR_FORMAT. */
static int protobuf_next_field(struct protobuf_view *m, struct protobuf_field *f,
                               struct error *err) {
    uint64_t key, size = 0;
    if (m->p == m->end) return 0;
    if (!protobuf_read_varint(m, &key)) return error_set(err, ERR_FORMAT, "it ends inside a field");
    *f = (struct protobuf_field){.number = key >> 3, .wire = (int)(key & 7)};
    bool complete = true;
    switch (f->wire) {
    case 0:
        complete = protobuf_read_varint(m, &f->value);
        break;
    case 1:
        size = 8;
        break;
    case 2:
        complete = protobuf_read_varint(m, &size);
        break;
    case 5:
        size = 4;
        break;
    default:
        return error_set(err, ERR_FORMAT, "it has a field of the unknown wire type %d", f->wire);
    }
    if (!complete || size > (size_t)(m->end - m->p))
        return error_set(err, ERR_FORMAT, "it ends inside a field");
    f->data = m->p;
    f->size = (size_t)size;
    m->p += size;
    return 1;
}

static struct protobuf_view protobuf_submessage(const struct protobuf_field *f) {
    return (struct protobuf_view){f->data, f->data + f->size};
}

static int32_t protobuf_int(const struct protobuf_field *f) {
    return (int32_t)(uint32_t)f->value; /* negative numbers come as 64 bits */
}

struct sp_model {
    struct spec_builder pieces;
    struct buf scratch;
    struct tokenizer_spec spec;
    int32_t model_type;             /* 1 unigram (the default), 2 BPE, 3 word, 4 char */
    struct protobuf_field charsmap; /* precompiled_charsmap: table of character replacements */
    bool collapses_spaces, keeps_raw_spaces, space_suffix;
    bool has_trainer_section; /* a file without it is cut short or no SentencePiece model */
};

static int sp_piece_read(struct sp_model *m, const struct protobuf_field *outer,
                         struct error *err) {
    struct protobuf_view v = protobuf_submessage(outer);
    struct protobuf_field f, text = {0};
    float score = 0;
    int64_t type = PIECE_NORMAL;
    int rc;
    while ((rc = protobuf_next_field(&v, &f, err)) > 0) {
        if (f.number == 1 && f.wire == 2) text = f;
        if (f.number == 2 && f.wire == 5) memcpy(&score, f.data, sizeof(score));
        if (f.number == 3 && f.wire == 0) type = (int64_t)MIN(f.value, 255u);
    }
    if (rc < 0) return rc;
    if (type < PIECE_NORMAL || type > PIECE_BYTE)
        return error_set(err, ERR_FORMAT, "piece %d has the unknown type %d", m->pieces.begin.n,
                         (int)type);
    if (m->pieces.begin.n >= VOCAB_LIMIT)
        return error_set(err, ERR_FORMAT, "it has too many pieces");
    const char *p = text.data ? (const char *)text.data : "";
    if (type == PIECE_USER && m->model_type == 2) { /* matched before spaces become ▁ */
        replace_all(&m->scratch, p, text.size, METASPACE_CHAR, " ");
        spec_builder_add(&m->pieces, m->scratch.data, m->scratch.len, score, PIECE_USER);
    } else {
        spec_builder_add(&m->pieces, p, text.size, score, (uint8_t)type);
    }
    return OK;
}

/* Fields of TrainerSpec: 3 model_type, 24 treat_whitespace_as_suffix, 40 unk_id, 41 bos_id, 42
 * eos_id. */
static int sp_trainer_read(struct sp_model *m, const struct protobuf_field *outer,
                           struct error *err) {
    struct protobuf_view v = protobuf_submessage(outer);
    struct protobuf_field f;
    int rc;
    while ((rc = protobuf_next_field(&v, &f, err)) > 0) {
        if (f.wire != 0) continue;
        if (f.number == 3) m->model_type = protobuf_int(&f);
        if (f.number == 24) m->space_suffix = f.value != 0;
        if (f.number == 40) m->spec.unk = protobuf_int(&f);
        if (f.number == 41) m->spec.bos = protobuf_int(&f);
        if (f.number == 42) m->spec.eos = protobuf_int(&f);
    }
    return rc;
}

/* Fields of NormalizerSpec: 2 precompiled_charsmap; 3 add_dummy_prefix: a space is added before the
 * text; 4 remove_extra_whitespaces: runs of spaces become one; 5 escape_whitespaces: spaces become
 * ▁. */
static int sp_normalizer_read(struct sp_model *m, const struct protobuf_field *outer,
                              struct error *err) {
    struct protobuf_view v = protobuf_submessage(outer);
    struct protobuf_field f;
    int rc;
    while ((rc = protobuf_next_field(&v, &f, err)) > 0) {
        if (f.number == 2 && f.wire == 2) m->charsmap = f;
        if (f.number == 3 && f.wire == 0) m->spec.add_space_prefix = f.value != 0;
        if (f.number == 4 && f.wire == 0) m->collapses_spaces = f.value != 0;
        if (f.number == 5 && f.wire == 0) m->keeps_raw_spaces = f.value == 0;
    }
    return rc;
}

/* Reads the settings, or in a second pass the pieces: how pieces are read depends on the settings,
 * which come after the pieces in the file. */
static int sp_fields_read(struct sp_model *m, const struct file_map *file, bool pieces,
                          struct error *err) {
    struct protobuf_view v = {file->data, file->data + file->size};
    struct protobuf_field f;
    int rc;
    while ((rc = protobuf_next_field(&v, &f, err)) > 0) {
        if (f.wire != 2) continue;
        m->has_trainer_section |= f.number == 2;
        if (f.number == 1 && pieces) rc = sp_piece_read(m, &f, err);
        if (f.number == 2 && !pieces) rc = sp_trainer_read(m, &f, err);
        if (f.number == 3 && !pieces) rc = sp_normalizer_read(m, &f, err);
        if (rc < 0) return rc;
    }
    return rc;
}

static int sp_read(struct sp_model *m, const struct file_map *file, struct error *err) {
    if (file->size > FILE_LIMIT)
        return error_set(err, ERR_FORMAT, "it is too large for a tokenizer");
    if (spec_builder_reserve(&m->pieces, file->size / 2 + 1, file->size, err) != OK)
        return err->code;
    if (sp_fields_read(m, file, false, err) < 0 || sp_fields_read(m, file, true, err) < 0)
        return err->code;
    if (m->pieces.begin.n == 0)
        return error_set(err, ERR_FORMAT, "it holds no pieces: not a sentencepiece model");
    if (!m->has_trainer_section)
        return error_set(err, ERR_FORMAT,
                         "it ends before its settings: cut short, or not a sentencepiece model");
    if (m->model_type != 1 && m->model_type != 2)
        return error_set(err, ERR_FORMAT,
                         "sentencepiece model type %d is not supported (1 unigram, 2 BPE are)",
                         m->model_type);
    if (m->keeps_raw_spaces || m->space_suffix)
        return error_set(err, ERR_FORMAT, "%s is not supported",
                         m->space_suffix ? "'treat_whitespace_as_suffix'"
                                         : "'escape_whitespaces' that is off");
    m->spec.kind = m->model_type == 1 ? TOKENIZER_UNIGRAM : TOKENIZER_SPM;
    m->spec.user_pieces = m->model_type == 1;
    return OK;
}

struct tokenizer *tokenizer_from_sentencepiece(const char *path, struct error *err) {
    struct file_map file;
    if (file_map_open(&file, path, err) != OK) return NULL;
    struct sp_model m = {.model_type = 1,
                         .collapses_spaces = true,
                         .spec = {.unk = 0, .bos = 1, .eos = 2, .add_space_prefix = true}};
    struct tokenizer *t = NULL;
    char *norm = NULL;
    if (sp_read(&m, &file, err) == OK) {
        norm = normalizer_from_sentencepiece(m.charsmap.data, m.charsmap.size, m.collapses_spaces);
        m.spec.normalizer = norm;
        m.spec.add_bos = m.spec.bos >= 0;
        t = spec_builder_finish(&m.pieces, &m.spec, err);
    }
    free(norm);
    if (!t) error_wrap(err, "'%s'", path);
    spec_builder_release(&m.pieces);
    buf_release(&m.scratch);
    file_map_close(&file);
    return t;
}

/*
 * A file of llama2.c is little-endian: int32 bytes of the longest piece, then for each of `vocab`
 * pieces float score, int32 length and its bytes. It has no types. Where SentencePiece has ▁,
 * pieces have spaces; <s> and </s> have a newline before and after. This function converts and adds
 * one piece.
 */
static void llama2c_piece_add(struct spec_builder *g, struct buf *scratch, const char *p,
                              size_t len, float score) {
    static const char *const specials[] = {"<unk>", "\n<s>\n", "\n</s>\n"};
    for (int32_t i = 0; i < 3; i++)
        if (len == strlen(specials[i]) && memcmp(p, specials[i], len) == 0) {
            spec_builder_add(g, specials[i] + (i > 0), len - (i > 0 ? 2 : 0), score,
                             i == 0 ? PIECE_UNKNOWN : PIECE_CONTROL);
            return;
        }
    bool byte = is_byte_piece(p, (int32_t)MIN(len, 7u));
    replace_all(scratch, p, len, " ", METASPACE_CHAR);
    spec_builder_add(g, scratch->data, scratch->len, score, byte ? PIECE_BYTE : PIECE_NORMAL);
}

static int llama2c_read(struct spec_builder *g, struct buf *scratch, const struct file_map *file,
                        int32_t vocab, struct error *err) {
    size_t pos = 4;
    int32_t max_len = 0;
    if (file->size > FILE_LIMIT)
        return error_set(err, ERR_FORMAT, "it is too large for a tokenizer");
    if (spec_builder_reserve(g, file->size / 8 + 1, 3 * file->size, err) != OK)
        return err->code; /* a space becomes three bytes */
    if (file->size >= 4) memcpy(&max_len, file->data, 4);
    for (int32_t i = 0; i < vocab; i++) {
        float score;
        int32_t len;
        if (file->size < pos || file->size - pos < 8)
            return error_set(err, ERR_MISMATCH, "it ends at token %d of %d", i, vocab);
        memcpy(&score, file->data + pos, 4);
        memcpy(&len, file->data + pos + 4, 4);
        pos += 8;
        if (len < 0 || len > max_len || (size_t)len > file->size - pos)
            return error_set(err, ERR_FORMAT, "token %d has the impossible length %d", i, len);
        llama2c_piece_add(g, scratch, (const char *)file->data + pos, (size_t)len, score);
        pos += (size_t)len;
    }
    if (pos != file->size)
        return error_set(err, ERR_MISMATCH, "it continues after the model's %d tokens", vocab);
    return OK;
}

struct tokenizer *tokenizer_from_llama2c(const char *path, int32_t vocab, struct error *err) {
    struct file_map file;
    struct spec_builder g = {0};
    struct buf scratch = {0};
    struct tokenizer *t = NULL;
    if (file_map_open(&file, path, err) != OK) return NULL;
    struct tokenizer_spec spec = {.kind = TOKENIZER_SPM,
                                  .unk = 0,
                                  .bos = 1,
                                  .eos = 2,
                                  .add_bos = true,
                                  .add_space_prefix = true};
    int rc = llama2c_read(&g, &scratch, &file, vocab, err);
    if (rc == OK &&
        (vocab < 3 || g.types.data[1] != PIECE_CONTROL || g.types.data[2] != PIECE_CONTROL))
        rc = error_set(err, ERR_FORMAT,
                       "tokens 1 and 2 are not '<s>' and '</s>': not a llama2.c tokenizer");
    if (rc == OK) t = spec_builder_finish(&g, &spec, err);
    if (!t) error_wrap(err, "'%s'", path);
    spec_builder_release(&g);
    buf_release(&scratch);
    file_map_close(&file);
    return t;
}

/* NULL when `vocab` has no room for three specials and 256 bytes. */
struct tokenizer *tokenizer_new_bytes(int32_t vocab) {
    static const char *const specials[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    if (vocab < 3 + 256) return NULL;
    struct spec_builder g = {0};
    for (int i = 0; i < 3; i++)
        spec_builder_add(&g, specials[i], strlen(specials[i]), 0, PIECE_CONTROL);
    for (int i = 0; i < 256; i++) {
        char piece[4];
        int len = bytes_to_unicode_piece(bytes_to_unicode_byte(i), piece);
        spec_builder_add(&g, piece, (size_t)len, 0, PIECE_NORMAL);
    }
    for (int32_t id = g.begin.n; id < vocab; id++) {
        char piece[24];
        int len = snprintf(piece, sizeof(piece), "[PAD%d]", id);
        spec_builder_add(&g, piece, (size_t)len, 0, PIECE_UNUSED);
    }
    struct tokenizer_spec spec = {
        .kind = TOKENIZER_BPE, .pre = "gpt-2", .bos = 0, .eos = 2, .unk = -1};
    struct error err;
    struct tokenizer *t = spec_builder_finish(&g, &spec, &err);
    CHECK(t);
    spec_builder_release(&g);
    return t;
}
