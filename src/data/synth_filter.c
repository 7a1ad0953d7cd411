/*
 * synth_filter: selects the generated answers that are useful for training.
 *
 * Each filter is a row of the table `filters`. Filters run in the table's order, each on the
 * samples that the earlier filters kept. The report counts the samples that each filter dropped.
 * Cheap checks of the text come first, then the user's rules, then comparisons (agreement,
 * duplicates), and last the filter that runs a model.
 *
 * Invariant: a sample's result depends only on options, samples and their order. After the first
 * filter, texts are UTF-8 without control characters except newline, tab and carriage return; the
 * later filters require this. Languages are detected by Unicode scripts, and duplicates by the
 * hashes of lint.c.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/data.h"
#include "grade/grade.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
#include <unistr.h>

#define REASON_SIZE sizeof((struct synth_filter_stats){0}.reason)

/* Maps a hash to the first sample or line that has it. Open addressing, at most half full. */
struct hash_set {
    struct hash_slot {
        uint64_t hash;
        int value;
        bool used;
    } * slots;
    size_t size; /* a power of two */
};

struct perplexity_bound {
    bool is_set, quantile;
    double value; /* a perplexity; with `quantile`: a percentage of the samples */
};

struct synth_filter_set {
    const struct synth_options *o;
    pcre2_code **require, **forbid; /* [o->require.n], [o->forbid.n] */
    pcre2_match_data *match;
    pcre2_match_context *match_limit;
    const struct language *language;
    struct grammar *schema;
    struct grammar_machine *machine;
    struct dataset held_out;
    struct hash_set held_near, held_prompt; /* values: lines of the held-out file */
    struct perplexity_bound min_perplexity, max_perplexity;

    /* state of one run */
    struct synth *s;
    struct sample_digest *digests; /* [s->n] set for samples that reached the filter `duplicate` */
    struct hash_set whole, near;   /* values: indices of samples */
    double min_value, max_value;   /* bounds as perplexities */
};

/* the hash set */

/* Makes room for n hashes. */
static int hash_set_init(struct hash_set *t, int n, struct error *err) {
    t->size = 16;
    while (t->size < 2 * (size_t)n) t->size *= 2;
    t->slots = try_calloc(t->size, sizeof *t->slots, err);
    return t->slots ? OK : err->code;
}

static void hash_set_release(struct hash_set *t) {
    free(t->slots);
    *t = (struct hash_set){0};
}

static struct hash_slot *hash_set_slot(const struct hash_set *t, uint64_t hash) {
    size_t i = (size_t)hash & (t->size - 1);
    while (t->slots[i].used && t->slots[i].hash != hash) i = (i + 1) & (t->size - 1);
    return &t->slots[i];
}

/* Returns the value that was added with the hash. If the hash is new, adds it with `value` and
 * returns -1. */
static int hash_set_add(struct hash_set *t, uint64_t hash, int value) {
    struct hash_slot *slot = hash_set_slot(t, hash);
    if (slot->used) return slot->value;
    *slot = (struct hash_slot){hash, value, true};
    return -1;
}

static int hash_set_find(const struct hash_set *t, uint64_t hash) {
    const struct hash_slot *slot = hash_set_slot(t, hash);
    return slot->used ? slot->value : -1;
}

/* Filters of the text. A function X_rejects returns whether the filter X drops the sample. It
 * writes its reason to reason[REASON_SIZE]; the text there has no meaning if it returns false. */

/* Drops texts with invalid UTF-8 or control characters: a zero byte would break the sample's JSON
 * line, an escape character the terminal that shows it. */
static bool text_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    (void)r;
    const uint8_t *p = (const uint8_t *)x->text.data, *end = p + x->text.len;
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        bool control = n > 0 && c < 0x20 && c != '\n' && c != '\t' && c != '\r';
        if (n <= 0 || control) {
            snprintf(reason, REASON_SIZE,
                     n <= 0 ? "byte %d is not UTF-8" : "byte %d is a control character",
                     (int)(p - (const uint8_t *)x->text.data) + 1);
            return true;
        }
        p += n;
    }
    return false;
}

static bool empty_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    (void)r;
    const uint8_t *p = (const uint8_t *)x->text.data, *end = p + x->text.len;
    ucs4_t c;
    while (p < end) {
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        if (!uc_is_property_white_space(c)) return false;
    }
    snprintf(reason, REASON_SIZE, "%s", x->text.len ? "white space only" : "no text");
    return true;
}

static bool unfinished_enabled(const struct synth_filter_set *r) {
    return !r->o->unfinished;
}

static bool unfinished_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                               char *reason) {
    (void)r;
    snprintf(reason, REASON_SIZE, x->finish == FINISH_LOOP ? "repeats itself" : "cut at %d tokens",
             x->out.n);
    return x->finish != FINISH_STOP;
}

static bool length_enabled(const struct synth_filter_set *r) {
    return r->o->min_chars || r->o->max_chars;
}

static bool length_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    int64_t n = (int64_t)u8_mbsnlen((const uint8_t *)x->text.data, x->text.len);
    snprintf(reason, REASON_SIZE, "%lld characters", (long long)n);
    return n < r->o->min_chars || (r->o->max_chars && n > r->o->max_chars);
}

/* language */

enum script_class { LATIN, HAN, KANA, HANGUL, OTHER, N_SCRIPTS };
struct script_counts {
    int64_t by_script[N_SCRIPTS], letters;
};

/*
 * Japanese and Chinese share the Han characters. A text is Japanese if at least a tenth of its kana
 * and Han characters are kana, else Chinese. Names and numbers are written in Han only, so a text
 * of at most AMBIGUOUS_HAN_MAX Han characters and no kana counts as both.
 */
enum { LETTERS_PER_KANA = 10, AMBIGUOUS_HAN_MAX = 8 };

/* Whether the share of kana is that of a Japanese text. */
static bool has_kana(const struct script_counts *c) {
    return LETTERS_PER_KANA * c->by_script[KANA] >= c->by_script[KANA] + c->by_script[HAN];
}

static int64_t count_japanese(const struct script_counts *c) {
    bool may_be_either = c->by_script[KANA] == 0 && c->by_script[HAN] <= AMBIGUOUS_HAN_MAX;
    return has_kana(c) || may_be_either ? c->by_script[KANA] + c->by_script[HAN] : 0;
}

static int64_t count_chinese(const struct script_counts *c) {
    return c->by_script[HAN] && has_kana(c) ? 0 : c->by_script[HAN];
}

static int64_t count_latin(const struct script_counts *c) {
    return c->by_script[LATIN];
}

static int64_t count_korean(const struct script_counts *c) {
    return c->by_script[HANGUL];
}

static const struct language {
    const char *name;
    int64_t (*letters)(const struct script_counts *c); /* letters that may be of this language */
} languages[] = {
    {"ja", count_japanese}, {"zh", count_chinese}, {"en", count_latin}, {"ko", count_korean}};

/* The script of a letter. Unicode assigns no script to the prolonged sound mark, which is kana. */
static enum script_class script_of(ucs4_t c) {
    static const char *const names[] = {"Latin", "Han", "Hiragana", "Katakana", "Hangul"};
    static const enum script_class scripts[] = {LATIN, HAN, KANA, KANA, HANGUL};
    const uc_script_t *script = uc_script(c);
    if (c == 0x30FC || c == 0xFF70) return KANA;
    for (size_t i = 0; script && i < ARRAY_LEN(names); i++)
        if (strcmp(script->name, names[i]) == 0) return scripts[i];
    return OTHER;
}

static struct script_counts letters_count(const struct buf *text) {
    struct script_counts counts = {0};
    const uint8_t *p = (const uint8_t *)text->data, *end = p + text->len;
    while (p < end) {
        ucs4_t c;
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        if (!uc_is_property_alphabetic(c)) continue;
        counts.by_script[script_of(c)]++;
        counts.letters++;
    }
    return counts;
}

static bool language_enabled(const struct synth_filter_set *r) {
    return r->language;
}

/* A text without letters, such as a number, is kept for every language. */
static bool language_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                             char *reason) {
    struct script_counts c = letters_count(&x->text);
    int64_t n = r->language->letters(&c);
    snprintf(reason, REASON_SIZE, "%lld of %lld letters are %s", (long long)n, (long long)c.letters,
             r->language->name);
    return (double)n < r->o->language_share * (double)c.letters;
}

/* rules */

/* Searches for a pattern. 1: found; 0: not found; -1: the search exceeded its limit. */
static int pattern_find(const struct synth_filter_set *r, const pcre2_code *code,
                        const struct buf *text) {
    int rc = pcre2_match(code, (PCRE2_SPTR)text->data, text->len, 0, 0, r->match, r->match_limit);
    return rc >= 0 ? 1 : rc == PCRE2_ERROR_NOMATCH ? 0 : -1;
}

static bool require_enabled(const struct synth_filter_set *r) {
    return r->o->require.n > 0;
}

static bool require_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                            char *reason) {
    for (int i = 0; i < r->o->require.n; i++) {
        int found = pattern_find(r, r->require[i], &x->text);
        snprintf(reason, REASON_SIZE, "%s '%.100s'", found < 0 ? "too long a search for" : "no",
                 r->o->require.v[i]);
        if (found != 1) return true;
    }
    return false;
}

static bool forbid_enabled(const struct synth_filter_set *r) {
    return r->o->forbid.n > 0;
}

static bool forbid_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    for (int i = 0; i < r->o->forbid.n; i++) {
        int found = pattern_find(r, r->forbid[i], &x->text);
        snprintf(reason, REASON_SIZE, "%s '%.100s'", found < 0 ? "too long a search for" : "holds",
                 r->o->forbid.v[i]);
        if (found != 0) return true;
    }
    return false;
}

static bool schema_enabled(const struct synth_filter_set *r) {
    return r->machine;
}

static bool schema_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    const char *text = x->text.data, *end = text + x->text.len;
    while (end > text && strchr(" \t\r\n", end[-1])) end--;
    text += strspn(text, " \t\r\n");
    struct grammar_state state = grammar_state_new(r->machine);
    bool accepted = true;
    const char *p = text;
    while (p < end && (accepted = grammar_accept_bytes(&state, p, 1))) p++;
    bool is_complete = accepted && grammar_is_final(&state);
    snprintf(reason, REASON_SIZE, accepted ? "ends too early" : "leaves the schema at byte %d",
             (int)(p - x->text.data) + 1);
    grammar_state_release(&state);
    return !is_complete;
}

/* agreement */

void synth_extract_answer(const char *text, const char *marker, struct buf *out) {
    const char *answer = text;
    size_t skip = strlen(marker), begin = out->len;
    for (const char *p = text; skip && (p = strcasestr(p, marker)) != NULL;) answer = p += skip;
    text_normalize(answer, answer == text ? strlen(text) : strcspn(answer, "\n"), out);
    static const char *const ends[] = {".", "!", "。", " "};
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        size_t n = strlen(ends[i]);
        if (out->len < begin + n || memcmp(out->data + out->len - n, ends[i], n) != 0) continue;
        out->len -= n;
        i = (size_t)-1; // start again: another sign may precede this one
    }
    buf_puts(out, "");
}

/* The hash of a sample's answer; 0: it has no answer. An unfinished sample has no answer, unless
 * unfinished samples are kept. */
static uint64_t answer_hash(const struct synth_filter_set *r, const struct synth_sample *x) {
    struct buf answer = {0};
    bool is_finished = x->finish == FINISH_STOP || r->o->unfinished;
    if (is_finished) synth_extract_answer(x->text.data, r->o->answer, &answer);
    uint64_t hash = answer.len ? MAX(hash_fnv1a(answer.data, answer.len), 1) : 0;
    buf_release(&answer);
    return hash;
}

/* Sets the agreement of the samples [begin, end), which are all answers to one prompt. Dropped
 * samples count too. */
static void self_consistency_of_prompt(struct synth_filter_set *r, int begin, int end) {
    uint64_t hashes[SYNTH_MAX_SAMPLES];
    CHECK(end - begin <= (int)ARRAY_LEN(hashes));
    for (int i = begin; i < end; i++) hashes[i - begin] = answer_hash(r, &r->s->v[i]);
    for (int i = begin; i < end; i++) {
        int same = 0;
        for (int k = begin; k < end; k++) same += hashes[k - begin] == hashes[i - begin];
        r->s->v[i].agreement = hashes[i - begin] ? (double)same / (end - begin) : 0;
    }
}

static void self_consistency_all(struct synth_filter_set *r) {
    for (int i = 0, end; i < r->s->n; i = end) {
        for (end = i; end < r->s->n && r->s->v[end].prompt == r->s->v[i].prompt;) end++;
        self_consistency_of_prompt(r, i, end);
    }
}

static bool agreement_enabled(const struct synth_filter_set *r) {
    return r->o->min_agreement > 0;
}

static bool agreement_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                              char *reason) {
    snprintf(reason, REASON_SIZE, "%.4g of the prompt's answers say the same", x->agreement);
    return x->agreement < r->o->min_agreement;
}

/* duplicates */

/* Prepares the filters duplicate, near_duplicate and held_out: computes the digests of all samples
 * that are still kept. */
static int duplicates_prepare(struct synth_filter_set *r, struct error *err) {
    struct synth *s = r->s;
    r->digests = try_calloc((size_t)MAX(s->n, 1), sizeof *r->digests, err);
    if (!r->digests || hash_set_init(&r->whole, s->n, err) != OK ||
        hash_set_init(&r->near, s->n, err) != OK)
        return err->code;
    for (int i = 0; i < s->n; i++) {
        const struct synth_sample *x = &s->v[i];
        if (x->filter != SYNTH_KEPT) continue;
        int n;
        struct chat_message *msgs = synth_messages(&s->prompts.v[x->prompt], x->text.data, &n);
        int rc = sample_digest_compute(msgs, n, &r->digests[i], err);
        free(msgs);
        if (rc != OK) return rc;
    }
    return OK;
}

/* Writes the reason and returns true if `duplicate` is the index of a sample; -1: returns false. */
static bool duplicate_reason(const struct synth_filter_set *r, int duplicate, char *reason) {
    if (duplicate < 0) return false;
    const struct synth_sample *x = &r->s->v[duplicate];
    snprintf(reason, REASON_SIZE, "as answer %d to the prompt in line %d", x->index,
             r->s->prompts.v[x->prompt].line);
    return true;
}

/* Samples come in order, so of equal samples the earliest one that reached this filter is kept. */
static bool duplicate_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                              char *reason) {
    int i = (int)(x - r->s->v);
    return duplicate_reason(r, hash_set_add(&r->whole, r->digests[i].exact_hash, i), reason);
}

static bool near_rejects(struct synth_filter_set *r, const struct synth_sample *x, char *reason) {
    int i = (int)(x - r->s->v);
    return duplicate_reason(r, hash_set_add(&r->near, r->digests[i].near_hash, i), reason);
}

static bool held_out_enabled(const struct synth_filter_set *r) {
    return r->o->held_out;
}

static bool held_out_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                             char *reason) {
    const struct sample_digest *digest = &r->digests[x - r->s->v];
    int sample_line = hash_set_find(&r->held_near, digest->near_hash);
    int prompt_line =
        digest->prompt_hash ? hash_set_find(&r->held_prompt, digest->prompt_hash) : -1;
    snprintf(reason, REASON_SIZE, "%s line %d of the held-out samples",
             sample_line >= 0 ? "is" : "asks what is in",
             sample_line >= 0 ? sample_line : prompt_line);
    return sample_line >= 0 || prompt_line >= 0;
}

/* perplexity */

/* Computes the perplexities and converts the bounds to perplexities. A quantile is the nearest rank
 * among the samples that are still kept. A sample at a bound is kept. */
static int perplexity_prepare(struct synth_filter_set *r, struct error *err) {
    const struct synth *s = r->s;
    if (synth_score_perplexity(r->s, err) != OK) return err->code;
    double *v = try_calloc((size_t)MAX(s->n, 1), sizeof *v, err);
    int n = 0;
    if (!v) return err->code;
    for (int i = 0; i < s->n; i++)
        if (s->v[i].filter == SYNTH_KEPT) v[n++] = s->v[i].perplexity;
    qsort(v, (size_t)n, sizeof *v, double_compare);
    double min_rank = (double)n * r->min_perplexity.value / 100,
           max_rank = (double)n * r->max_perplexity.value / 100;
    r->min_value =
        r->min_perplexity.quantile && n ? v[MIN((int)min_rank, n - 1)] : r->min_perplexity.value;
    r->max_value = r->max_perplexity.value;
    if (r->max_perplexity.quantile && n) { // the last value within the share
        int rank = (int)max_rank + (max_rank > (double)(int)max_rank);
        r->max_value = v[MAX(rank, 1) - 1];
    }
    free(v);
    return OK;
}

static bool perplexity_enabled(const struct synth_filter_set *r) {
    return r->min_perplexity.is_set || r->max_perplexity.is_set;
}

/* A perplexity that is not a number is outside every bound. */
static bool perplexity_rejects(struct synth_filter_set *r, const struct synth_sample *x,
                               char *reason) {
    bool low = r->min_perplexity.is_set && !(x->perplexity >= r->min_value);
    bool high = r->max_perplexity.is_set && !(x->perplexity <= r->max_value);
    snprintf(reason, REASON_SIZE, "%.4g, %s %.4g", x->perplexity, low ? "below" : "above",
             low ? r->min_value : r->max_value);
    return low || high;
}

/* the table */

static const struct synth_filter_row {
    const char *name;
    bool (*enabled)(const struct synth_filter_set *r); /* NULL: always enabled */
    /* Called once, before `rejects`; may be NULL. */
    int (*prepare)(struct synth_filter_set *r, struct error *err);
    bool (*rejects)(struct synth_filter_set *r, const struct synth_sample *x, char *reason);
} filters[] = {
    {"text", NULL, NULL, text_rejects},
    {"empty", NULL, NULL, empty_rejects},
    {"unfinished", unfinished_enabled, NULL, unfinished_rejects},
    {"length", length_enabled, NULL, length_rejects},
    {"language", language_enabled, NULL, language_rejects},
    {"require", require_enabled, NULL, require_rejects},
    {"forbid", forbid_enabled, NULL, forbid_rejects},
    {"json_schema", schema_enabled, NULL, schema_rejects},
    {"agreement", agreement_enabled, NULL, agreement_rejects},
    {"duplicate", NULL, duplicates_prepare, duplicate_rejects},
    {"near_duplicate", NULL, NULL, near_rejects},
    {"held_out", held_out_enabled, NULL, held_out_rejects},
    {"perplexity", perplexity_enabled, perplexity_prepare, perplexity_rejects},
};
_Static_assert(ARRAY_LEN(filters) <= SYNTH_MAX_FILTERS, "each filter has an entry in filter_stats");

const char *synth_filter_name(int filter) {
    return filter >= 0 && filter < (int)ARRAY_LEN(filters) ? filters[filter].name : NULL;
}

/* Runs filter f on the samples that are still kept. */
static int filter_run(struct synth_filter_set *r, int f, struct error *err) {
    struct synth *s = r->s;
    struct synth_filter_stats *stats = &s->filter_stats[f];
    char reason[REASON_SIZE] = "";
    stats->enabled = !filters[f].enabled || filters[f].enabled(r);
    if (!stats->enabled) return OK;
    if (filters[f].prepare && filters[f].prepare(r, err) != OK) return err->code;
    for (int i = 0; i < s->n; i++) {
        struct synth_sample *x = &s->v[i];
        if (x->filter != SYNTH_KEPT || !filters[f].rejects(r, x, reason)) continue;
        x->filter = f;
        if (stats->dropped++) continue;
        stats->first = i;
        memcpy(stats->reason, reason, REASON_SIZE);
    }
    return OK;
}

int synth_filter(struct synth *s, struct synth_filter_set *r, struct error *err) {
    int rc = OK;
    r->s = s;
    memset(s->filter_stats, 0, sizeof s->filter_stats);
    for (int i = 0; i < s->n; i++) s->v[i].filter = SYNTH_KEPT;
    self_consistency_all(r);
    for (int f = 0; rc == OK && f < (int)ARRAY_LEN(filters); f++) rc = filter_run(r, f, err);
    free(r->digests);
    r->digests = NULL;
    hash_set_release(&r->whole);
    hash_set_release(&r->near);
    return rc;
}

/* making a filter set */

static pcre2_code *pattern_new(const char *text, struct error *err) {
    int code;
    PCRE2_SIZE offset;
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset, NULL);
    if (compiled) return compiled;
    PCRE2_UCHAR reason[160];
    pcre2_get_error_message(code, reason, sizeof reason);
    error_set(err, ERR_USAGE, "'%.200s' is not a regular expression: %s at byte %d", text,
              (char *)reason, (int)offset + 1);
    return NULL;
}

static int patterns_new(const struct strings *texts, pcre2_code ***out, struct error *err) {
    *out = xcalloc((size_t)MAX(texts->n, 1), sizeof **out);
    for (int i = 0; i < texts->n; i++)
        if (!((*out)[i] = pattern_new(texts->v[i], err))) return err->code;
    return OK;
}

static void patterns_free(const struct strings *texts, pcre2_code **v) {
    for (int i = 0; v && i < texts->n; i++) pcre2_code_free(v[i]);
    free(v);
}

static int language_find(struct synth_filter_set *r, struct error *err) {
    const char *name = r->o->language;
    for (size_t i = 0; name && i < ARRAY_LEN(languages); i++)
        if (strcmp(languages[i].name, name) == 0) r->language = &languages[i];
    if (!name || r->language) return OK;
    return error_set(err, ERR_USAGE, "language '%s' is not known; there are ja, zh, en, ko", name);
}

static int bound_parse(const char *name, const char *text, struct perplexity_bound *out,
                       struct error *err) {
    char *end = NULL;
    if (!text) return OK;
    out->is_set = true;
    out->value = strtod(text, &end);
    out->quantile = *end == '%';
    if (end == text || end[out->quantile] || !(out->value > 0) ||
        !(out->value <= (out->quantile ? 100 : 1e300)))
        return error_set(err, ERR_USAGE,
                         "'--%s %s' is not a bound; write a perplexity as 20 or a share as 90%%",
                         name, text);
    return OK;
}

static int schema_read(struct synth_filter_set *r, struct error *err) {
    const char *path = r->o->json_schema;
    struct buf text = {0};
    if (!path) return OK;
    int rc = file_read(path, 1 << 24, &text, err);
    if (rc == OK) {
        r->schema = grammar_new_json_schema(text.data ? text.data : "", text.len, false, err);
        rc = r->schema ? OK : error_wrap(err, "'%s'", path);
    }
    if (rc == OK) r->machine = grammar_machine_new(r->schema, NULL, 0);
    buf_release(&text);
    return rc;
}

static int held_out_read(struct synth_filter_set *r, const struct tokenizer *tok,
                         struct error *err) {
    struct dataset *d = &r->held_out;
    if (!r->o->held_out) return OK;
    CHECK(tok);
    if (dataset_load(d, r->o->held_out, NULL, tok, 0, err) != OK ||
        hash_set_init(&r->held_near, d->n_read, err) != OK ||
        hash_set_init(&r->held_prompt, d->n_read, err) != OK)
        return err->code;
    for (int i = 0; i < d->n_read; i++) {
        hash_set_add(&r->held_near, d->digests[i].near_hash, d->digests[i].line);
        if (d->digests[i].prompt_hash)
            hash_set_add(&r->held_prompt, d->digests[i].prompt_hash, d->digests[i].line);
    }
    return OK;
}

/* Maximum steps of a search; some patterns need exponential time. */
enum { MATCH_LIMIT = 1000000 };

struct synth_filter_set *synth_filter_set_new(const struct synth_options *o,
                                              const struct tokenizer *tok, struct error *err) {
    struct synth_filter_set *r = xcalloc(1, sizeof *r);
    r->o = o;
    r->match = pcre2_match_data_create(1, NULL);
    r->match_limit = pcre2_match_context_create(NULL);
    if (!r->match || !r->match_limit) {
        error_set(err, ERR_MEMORY, "no memory for regular expressions");
        synth_filter_set_free(r);
        return NULL;
    }
    pcre2_set_match_limit(r->match_limit, MATCH_LIMIT);
    if (language_find(r, err) == OK && patterns_new(&o->require, &r->require, err) == OK &&
        patterns_new(&o->forbid, &r->forbid, err) == OK &&
        bound_parse("min-perplexity", o->min_perplexity, &r->min_perplexity, err) == OK &&
        bound_parse("max-perplexity", o->max_perplexity, &r->max_perplexity, err) == OK &&
        schema_read(r, err) == OK && held_out_read(r, tok, err) == OK)
        return r;
    synth_filter_set_free(r);
    return NULL;
}

void synth_filter_set_free(struct synth_filter_set *r) {
    if (!r) return;
    patterns_free(&r->o->require, r->require);
    patterns_free(&r->o->forbid, r->forbid);
    pcre2_match_data_free(r->match);
    pcre2_match_context_free(r->match_limit);
    grammar_machine_free(r->machine);
    grammar_free(r->schema);
    dataset_release(&r->held_out);
    hash_set_release(&r->held_near);
    hash_set_release(&r->held_prompt);
    free(r);
}

/* the report */

int synth_count_kept(const struct synth *s) {
    int n = 0;
    for (int i = 0; i < s->n; i++) n += s->v[i].filter == SYNTH_KEPT;
    return n;
}

enum { SNIPPET = 60 }; /* characters */

/* Appends the beginning of a text as one line: white space becomes a blank, other control
 * characters and invalid bytes become U+FFFD. */
static void snippet_append(const struct buf *text, struct buf *out) {
    const uint8_t *p = (const uint8_t *)text->data, *end = p + text->len;
    for (int i = 0; p < end && i < SNIPPET; i++) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        bool blank = n > 0 && uc_is_property_white_space(c);
        if (n > 0 && !blank && !uc_is_property_iso_control(c))
            buf_add(out, p, (size_t)n);
        else
            buf_puts(out, blank ? " " : "\xef\xbf\xbd");
        p += MAX(n, 1);
    }
    buf_puts(out, p < end ? "…" : "");
}

void synth_report_text(const struct synth *s, struct buf *out) {
    buf_printf(out, "%d prompts, %d answers, %d kept\n", s->prompts.n, s->n, synth_count_kept(s));
    for (int f = 0; synth_filter_name(f); f++) {
        const struct synth_filter_stats *t = &s->filter_stats[f];
        if (!t->enabled) continue;
        buf_printf(out, "  %-14s %7d", synth_filter_name(f), t->dropped);
        if (t->dropped) {
            const struct synth_sample *x = &s->v[t->first];
            buf_printf(out, "  the first: line %d, answer %d, %s: ", s->prompts.v[x->prompt].line,
                       x->index, t->reason);
            snippet_append(&x->text, out);
        }
        buf_puts(out, "\n");
    }
}

static json_t *filter_stats_json(const struct synth *s, int f) {
    const struct synth_filter_stats *t = &s->filter_stats[f];
    json_t *v = json_pack("{s:s,s:i}", "filter", synth_filter_name(f), "dropped", t->dropped);
    if (!t->dropped) return v;
    const struct synth_sample *x = &s->v[t->first];
    struct buf text = {0};
    snippet_append(&x->text, &text);
    json_object_set_new(v, "first",
                        json_pack("{s:i,s:i,s:s,s:s,s:s}", "line", s->prompts.v[x->prompt].line,
                                  "sample", x->index, "call", x->call, "why", t->reason, "text",
                                  text.data));
    buf_release(&text);
    return v;
}

json_t *synth_report_json(const struct synth *s) {
    json_t *list = json_array();
    for (int f = 0; synth_filter_name(f); f++)
        if (s->filter_stats[f].enabled) json_array_append_new(list, filter_stats_json(s, f));
    return json_pack("{s:i,s:i,s:i,s:o}", "prompts", s->prompts.n, "answers", s->n, "kept",
                     synth_count_kept(s), "filters", list);
}
