/*
 * normalizer: normalisation of text before it is tokenized: Unicode normalisation,
 * SentencePiece's compiled table of replacements, and the small edits of tokenizer.json's
 * normalizers.
 *
 * A tokenizer_spec has its normalizer as the JSON text of tokenizer.json, so that every file format
 * can store it; this file parses the text to a list of steps. An unsupported normalizer is an
 * error that names it. Replacing spaces by ▁ and adding ▁ before a text are not steps: spm.c does
 * both.
 *
 * Invariants: a step reads the whole fragment and writes a new one; no step changes bytes that are
 * not UTF-8. Only ranges that may change are passed to the Unicode library. A character is inert
 * for a normalisation form if it is a starter, the form does not change it, and it never combines
 * with the character before it. A range from an inert character up to the next one can therefore be
 * normalised separately, and is copied if it has no other characters.
 */
#define _GNU_SOURCE /* memmem */
#include "tokenizer/internal.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
#include <uninorm.h>

enum step_kind { STEP_UNICODE, STEP_CHARSMAP, STEP_REPLACE, STEP_REGEX, STEP_PREPEND, STEP_STRIP };

enum {
    INERT_END = 0x30000, /* all characters from here on are inert */
    DEPTH_LIMIT = 8,
    GROWTH_LIMIT = 4096, /* limit of output length / input length for all steps together */
};

struct step {
    enum step_kind kind;
    uninorm_t form;
    uint32_t *inert; /* [INERT_END / 32] bits: the character is inert */
    char *from, *to; /* STEP_REPLACE; STEP_PREPEND uses `to` */
    size_t from_len, to_len;
    pcre2_code *code;
    bool left, right;      /* sides of STEP_STRIP */
    const uint32_t *units; /* the table's double array, [n_units], into blob */
    size_t n_units;
    const char *targets; /* the replacements, each NUL-terminated; values are offsets into them */
    size_t targets_len;
    uint8_t *blob;
};
struct normalizer {
    struct step *steps;
    int n;
    size_t growth; /* bound on the ratio of the lengths of output and input, without prefixes */
};

/* Unicode */

static void bits_clear(uint32_t *bits, uint32_t c) {
    if (c < INERT_END) bits[c / 32] &= ~(1u << c % 32);
}

static bool is_unchanged_by_form(uninorm_t form, uint32_t c) {
    uint32_t buffer[32];
    size_t n = ARRAY_LEN(buffer);
    uint32_t *result = u32_normalize(form, &c, 1, buffer, &n);
    bool same = result && n == 1 && result[0] == c;
    if (result != buffer) free(result);
    return same;
}

/* The bits of struct step's `inert` for a normalisation form; malloc'ed. */
static uint32_t *inert_bits(uninorm_t form) {
    uint32_t *bits = xmalloc(INERT_END / 8);
    memset(bits, 0xFF, INERT_END / 8);
    for (uint32_t c = 0x80; c < INERT_END; c++) {
        ucs4_t parts[UC_DECOMPOSITION_MAX_LENGTH];
        int n = uc_canonical_decomposition(c, parts);
        /* parts after the first may combine with the character before them */
        for (int i = 1; i < n; i++) bits_clear(bits, parts[i]);
        /* a character without decomposition cannot change, so it needs no full check */
        int tag;
        bool plain = n < 0 && uc_decomposition(c, &tag, parts) < 0;
        if (uc_combining_class(c) != 0 || (!plain && !is_unchanged_by_form(form, c)))
            bits_clear(bits, c);
    }
    return bits;
}

static uint32_t char_at(const char *p, int n) {
    const uint8_t *u = (const uint8_t *)p;
    uint32_t c = n == 1 ? u[0] : u[0] & (0x7Fu >> n);
    for (int i = 1; i < n; i++) c = c << 6 | (u[i] & 0x3F);
    return c;
}

static bool is_inert(const struct step *s, const char *p, int n) {
    uint32_t c = n == 0 ? 0 : char_at(p, n);
    return c >= INERT_END || (s->inert[c / 32] >> c % 32 & 1);
}

static void normalize_range(const struct step *s, const char *p, size_t n, struct buf *out) {
    uint8_t buffer[512];
    size_t len = sizeof(buffer);
    uint8_t *result = u8_normalize(s->form, (const uint8_t *)p, n, buffer, &len);
    CHECK(result); /* it is valid UTF-8 */
    buf_add(out, result, len);
    if (result != buffer) free(result);
}

/* Normalises each range of an inert character and the following characters that are not inert, and
 * copies the rest. */
static void step_unicode(const struct step *s, const char *p, size_t len, struct buf *out) {
    size_t done = 0, starter = 0;
    for (size_t i = 0; i < len;) {
        int n = (uint8_t)p[i] < 0x80 ? 1 : utf8_len(p + i, len - i);
        if (is_inert(s, p + i, n)) {
            starter = n == 0 ? i + 1 : i; /* a byte outside UTF-8 is not included */
            i += (size_t)MAX(n, 1);
            continue;
        }
        size_t end = i;
        for (; end < len && (n = utf8_len(p + end, len - end)) > 0 && !is_inert(s, p + end, n);)
            end += (size_t)n;
        buf_add(out, p + done, starter - done);
        normalize_range(s, p + starter, end - starter, out);
        done = starter = i = end;
    }
    buf_add(out, p + done, len - done);
}

/*
 * SentencePiece's table: a double array in the layout of darts-clone. A unit holds its own label
 * (8 bits, and bit 31 for values), whether a value follows, and an offset to its children.
 */
static uint32_t unit_offset(uint32_t unit) {
    return (unit >> 10) << ((unit & 1u << 9) >> 6);
}

/* The length of the longest entry that `p` begins with, or 0; *value: where its replacement is in
 * `targets`. */
static size_t charsmap_find(const struct step *s, const char *p, size_t left, uint32_t *value) {
    size_t best = 0;
    uint32_t index = unit_offset(s->units[0]);
    for (size_t i = 0; i < left; i++) {
        index ^= (uint8_t)p[i];
        if (index >= s->n_units) break;
        uint32_t unit = s->units[index];
        if ((unit & (1u << 31 | 0xFF)) != (uint8_t)p[i]) break;
        index ^= unit_offset(unit);
        if (index >= s->n_units) break;
        uint32_t found = s->units[index] & 0x7FFFFFFF;
        if (!(unit >> 8 & 1) || found >= s->targets_len) continue;
        best = i + 1;
        *value = found;
    }
    return best;
}

static void step_charsmap(const struct step *s, const char *p, size_t len, struct buf *out) {
    for (size_t i = 0, n; i < len; i += n) {
        uint32_t value;
        n = charsmap_find(s, p + i, len - i, &value);
        if (n > 0) {
            buf_puts(out, s->targets + value);
        } else {
            n = (size_t)MAX(utf8_len(p + i, len - i), 1);
            buf_add(out, p + i, n);
        }
    }
}

/* Edits */

static void step_replace(const struct step *s, const char *p, size_t len, struct buf *out) {
    size_t done = 0;
    const char *hit;
    while ((hit = memmem(p + done, len - done, s->from, s->from_len))) {
        size_t pos = (size_t)(hit - p);
        buf_add(out, p + done, pos - done);
        buf_add(out, s->to, s->to_len);
        done = pos + s->from_len;
    }
    buf_add(out, p + done, len - done);
}

/* If matching fails, for example at PCRE2's limits, the rest of the text stays unchanged. */
static void step_regex(const struct step *s, const char *p, size_t len, struct buf *out) {
    pcre2_match_data *md = pcre2_match_data_create(1, NULL);
    CHECK(md);
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(md);
    size_t done = 0, pos = 0;
    while (pos <= len && pcre2_match(s->code, (PCRE2_SPTR)p, len, pos, 0, md, NULL) >= 0) {
        size_t begin = range[0], end = range[1];
        if (begin < done || end < begin) break; /* \K may do that */
        buf_add(out, p + done, begin - done);
        buf_add(out, s->to, s->to_len);
        done = pos = end;
        if (end == begin) pos += end < len ? (size_t)MAX(utf8_len(p + end, len - end), 1) : 1;
    }
    buf_add(out, p + done, len - done);
    pcre2_match_data_free(md);
}

static size_t space_len(const char *p, size_t left) {
    int n = utf8_len(p, left);
    return n > 0 && uc_is_property_white_space(char_at(p, n)) ? (size_t)n : 0;
}

static void step_strip(const struct step *s, const char *p, size_t len, struct buf *out) {
    size_t begin = 0, end = len;
    for (size_t n; s->left && begin < end && (n = space_len(p + begin, end - begin)) > 0;)
        begin += n;
    while (s->right && end > begin) {
        size_t i = end - 1;
        while (i > begin && ((uint8_t)p[i] & 0xC0) == 0x80) i--;
        if (space_len(p + i, end - i) != end - i) break;
        end = i;
    }
    buf_add(out, p + begin, end - begin);
}

static void step_run(const struct step *s, const char *p, size_t len, struct buf *out) {
    switch (s->kind) {
    case STEP_UNICODE:
        step_unicode(s, p, len, out);
        break;
    case STEP_CHARSMAP:
        step_charsmap(s, p, len, out);
        break;
    case STEP_REPLACE:
        step_replace(s, p, len, out);
        break;
    case STEP_REGEX:
        step_regex(s, p, len, out);
        break;
    case STEP_PREPEND:
        if (len > 0) buf_add(out, s->to, s->to_len);
        buf_add(out, p, len);
        break;
    case STEP_STRIP:
        step_strip(s, p, len, out);
        break;
    }
}

void normalizer_apply(const struct normalizer *n, const char *p, size_t len, struct buf *out,
                      struct buf *scratch) {
    out->len = 0;
    buf_add(out, p, n->n == 0 ? len : 0);
    for (int i = 0; i < n->n; i++) {
        struct buf from = i == 0 ? (struct buf){0} : *out;
        if (i > 0) { /* the output of the previous step is the input of this step */
            *out = *scratch;
            *scratch = from;
            p = from.data;
            len = from.len;
        }
        out->len = 0;
        buf_add(out, "", 0);
        step_run(&n->steps[i], p, len, out);
    }
}

/* Reading */

static const char *json_text(const json_t *v, const char *key) {
    return json_string_value(json_object_get(v, key));
}

static int charsmap_parse(struct step *s, size_t size, struct error *err) {
    uint32_t trie = 0;
    if (size >= 4) memcpy(&trie, s->blob, 4);
    if (trie < 4 || trie % 4 != 0 || trie > size - 4 || size - 4 == trie || s->blob[size - 1] != 0)
        return error_set(err, ERR_FORMAT,
                         "the precompiled character map is damaged: %zu bytes, a trie of %u", size,
                         trie);
    s->units = (const uint32_t *)(const void *)(s->blob + 4);
    s->n_units = trie / 4;
    s->targets = (const char *)s->blob + 4 + trie;
    s->targets_len = size - 4 - trie;
    return OK;
}

static int charsmap_step(struct step *s, const json_t *v, struct error *err) {
    const char *text = json_text(v, "precompiled_charsmap");
    size_t len = text ? strlen(text) : 0, size = 0;
    s->kind = STEP_CHARSMAP;
    s->blob = xmalloc(len + 1);
    if (!text || sodium_base642bin(s->blob, len + 1, text, len, NULL, &size, NULL,
                                   sodium_base64_VARIANT_ORIGINAL) != 0)
        return error_set(err, ERR_FORMAT, "'precompiled_charsmap' is not base64");
    return charsmap_parse(s, size, err);
}

/* ^ and $ match at the ends of every line, as in the reference's regular expressions. */
static int regex_step(struct step *s, const char *pattern, struct error *err) {
    s->kind = STEP_REGEX;
    s->code = tokenizer_regex_compile(pattern, PCRE2_MULTILINE | PCRE2_MATCH_INVALID_UTF, err);
    return s->code ? OK : err->code;
}

static int replace_step(struct step *s, const json_t *v, struct error *err) {
    const json_t *pattern = json_object_get(v, "pattern");
    const char *from = json_text(pattern, "String"), *regex = json_text(pattern, "Regex"),
               *to = json_text(v, "content");
    if (!to || (!from && !regex) || (from && !*from))
        return error_set(err, ERR_FORMAT, "normalizer 'Replace' lacks its pattern or content");
    s->to = xstrdup(to);
    s->to_len = strlen(to);
    if (regex) return regex_step(s, regex, err);
    s->kind = STEP_REPLACE;
    s->from = xstrdup(from);
    s->from_len = strlen(from);
    return OK;
}

static bool unicode_step(struct step *s, const char *type) {
    const struct {
        const char *name;
        uninorm_t form;
    } forms[] = {
        {"NFC", UNINORM_NFC}, {"NFD", UNINORM_NFD}, {"NFKC", UNINORM_NFKC}, {"NFKD", UNINORM_NFKD}};
    for (size_t i = 0; i < ARRAY_LEN(forms); i++) {
        if (strcmp(forms[i].name, type) != 0) continue;
        s->kind = STEP_UNICODE;
        s->form = forms[i].form;
        s->inert = inert_bits(s->form);
        return true;
    }
    return false;
}

static int step_parse(struct step *s, const char *type, const json_t *v, struct error *err) {
    if (unicode_step(s, type)) return OK;
    if (strcmp(type, "Precompiled") == 0) return charsmap_step(s, v, err);
    if (strcmp(type, "Replace") == 0) return replace_step(s, v, err);
    if (strcmp(type, "Strip") == 0) {
        s->kind = STEP_STRIP;
        s->left = json_is_true(json_object_get(v, "strip_left"));
        s->right = json_is_true(json_object_get(v, "strip_right"));
        return OK;
    }
    if (strcmp(type, "Prepend") == 0 && json_text(v, "prepend")) {
        s->kind = STEP_PREPEND;
        s->to = xstrdup(json_text(v, "prepend"));
        s->to_len = strlen(s->to);
        return OK;
    }
    return error_set(err, ERR_FORMAT, "normalizer '%.80s' is not supported", type);
}

/* The maximum number of output bytes per input byte. */
static size_t step_growth(const struct step *s) {
    size_t max_len = 1;
    switch (s->kind) {
    case STEP_UNICODE:
        return 18; /* Unicode's own bound, U+FDFA */
    case STEP_CHARSMAP:
        for (size_t i = 0, n; i < s->targets_len; i += n + 1)
            max_len = MAX(max_len, n = strlen(s->targets + i));
        return max_len;
    case STEP_REPLACE:
        return s->to_len / s->from_len + 1;
    default: /* a pattern may match the empty string before every character */
        return 1 + s->to_len;
    }
}

static int growth_check(struct normalizer *n, const struct step *s, struct error *err) {
    n->growth *= MIN(step_growth(s), (size_t)GROWTH_LIMIT + 1);
    if (n->growth <= GROWTH_LIMIT) return OK;
    return error_set(err, ERR_FORMAT, "the normalizer could make text over %d times longer",
                     (int)GROWTH_LIMIT);
}

static int steps_parse(struct normalizer *n, const json_t *v, int depth, struct error *err) {
    const char *type = json_text(v, "type");
    size_t i;
    json_t *part;
    if (depth > DEPTH_LIMIT) return error_set(err, ERR_FORMAT, "normalizers are nested too deeply");
    if (type && strcmp(type, "Sequence") == 0) {
        json_array_foreach (json_object_get(v, "normalizers"), i, part) {
            if (steps_parse(n, part, depth + 1, err) != OK) return err->code;
        }
        return OK;
    }
    n->steps = xrealloc(n->steps, sizeof(*n->steps) * (size_t)(n->n + 1));
    n->steps[n->n] = (struct step){0};
    struct step *s = &n->steps[n->n++];
    if (step_parse(s, type ? type : "without a type", v, err) != OK) return err->code;
    return growth_check(n, s, err);
}

struct normalizer *normalizer_new(const char *json, struct error *err) {
    json_t *v = json_parse(json, strlen(json), "normalizer", err);
    if (!v) return NULL;
    struct normalizer *n = xcalloc(1, sizeof(*n));
    n->growth = 1;
    int rc = steps_parse(n, v, 0, err);
    json_decref(v);
    if (rc == OK) return n;
    normalizer_free(n);
    return NULL;
}

void normalizer_free(struct normalizer *n) {
    for (int i = 0; n && i < n->n; i++) {
        struct step *s = &n->steps[i];
        free(s->inert);
        free(s->from);
        free(s->to);
        free(s->blob);
        pcre2_code_free(s->code);
    }
    if (n) free(n->steps);
    free(n);
}

/* The steps for SentencePiece's settings; NULL when no step is needed. malloc'ed. */
char *normalizer_from_sentencepiece(const void *charsmap, size_t len, bool collapse_spaces) {
    json_t *steps = json_array();
    if (len > 0) {
        size_t size = sodium_base64_encoded_len(len, sodium_base64_VARIANT_ORIGINAL);
        char *text = xmalloc(size);
        sodium_bin2base64(text, size, charsmap, len, sodium_base64_VARIANT_ORIGINAL);
        json_array_append_new(
            steps, json_pack("{s:s,s:s}", "type", "Precompiled", "precompiled_charsmap", text));
        free(text);
    }
    if (collapse_spaces) {
        json_array_append_new(steps,
                              json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern", "Regex",
                                        "\\A +|[ " METASPACE_CHAR "]+\\z", "content", ""));
        json_array_append_new(steps, json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern",
                                               "Regex", " {2,}", "content", " "));
    }
    char *json = json_array_size(steps) > 0 ? normalizer_to_json(steps) : NULL;
    json_decref(steps);
    return json;
}

/* A single step is written without a list. */
char *normalizer_to_json(const json_t *steps) {
    if (json_array_size(steps) == 1) return json_canonical(json_array_get(steps, 0));
    json_t *v = json_pack("{s:s,s:O}", "type", "Sequence", "normalizers", steps);
    char *json = json_canonical(v);
    json_decref(v);
    return json;
}

/* GGUF can store only this part of a normalizer. */
uint8_t *normalizer_charsmap(const char *json, size_t *len) {
    struct error err;
    struct normalizer *n = normalizer_new(json, &err);
    uint8_t *bytes = NULL;
    *len = 0;
    if (n && n->n > 0 && n->steps[0].kind == STEP_CHARSMAP) {
        const struct step *s = &n->steps[0];
        *len = 4 + 4 * s->n_units + s->targets_len;
        bytes = xmalloc(*len);
        memcpy(bytes, s->blob, *len);
    }
    normalizer_free(n);
    return bytes;
}
