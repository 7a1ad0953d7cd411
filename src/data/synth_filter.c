/*
 * synth_filter: selects the generated answers that are useful for training.
 *
 * Each filter is a table row. Filters run in the table's order, each on the samples that the
 * earlier ones kept, and the report counts the samples that each one dropped. Cheap checks of the
 * text come first, then the user's rules, then comparisons (agreement, duplicates), and last the
 * filters that run a model.
 *
 * Invariant: a sample's result depends on options, samples and their order only. After the first
 * row, texts are UTF-8 without control characters; the other rows rely on it. No filter is learned:
 * languages are detected by Unicode scripts, and duplicates by lint's hashes.
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

#define WHY sizeof((struct synth_filter_stats){0}.why)

/* Hashes so far and the sample or line of each: open addressing, at most half full. */
struct hash_set {
    struct hash_slot {
        uint64_t hash;
        int at;
        bool used;
    } * slots;
    size_t size;
};

struct perplexity_bound { /* bound of a number: a value or a quantile */
    bool given, quantile;
    double value;
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
    struct hash_set held_near, held_prompt; /* values are lines */
    struct perplexity_bound min_perplexity, max_perplexity;

    /* state of one run */
    struct synth *s;
    struct sample_digest *facts; /* [s->n] facts of the samples that reached the first comparison */
    struct hash_set whole, near; /* values are samples */
    double low, high;            /* bounds of perplexity as values */
};

/* the hash set */

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

/* Returns the sample or line that added the hash first. If there was no such entry, it adds `at`
 * and returns -1. */
static int hash_set_add(struct hash_set *t, uint64_t hash, int at) {
    struct hash_slot *slot = hash_set_slot(t, hash);
    if (slot->used) return slot->at;
    *slot = (struct hash_slot){hash, at, true};
    return -1;
}

static int hash_set_find(const struct hash_set *t, uint64_t hash) {
    const struct hash_slot *slot = hash_set_slot(t, hash);
    return slot->used ? slot->at : -1;
}

/* the text itself */

/* A zero byte or an escape would break the sample's JSON line or a reader's terminal. */
static bool text_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    (void)r;
    const uint8_t *p = (const uint8_t *)x->text.data, *end = p + x->text.len;
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        bool control = n > 0 && c < 0x20 && c != '\n' && c != '\t' && c != '\r';
        if (n <= 0 || control) {
            snprintf(why, WHY, n <= 0 ? "byte %d is not UTF-8" : "byte %d is a control character",
                     (int)(p - (const uint8_t *)x->text.data) + 1);
            return true;
        }
        p += n;
    }
    return false;
}

static bool empty_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    (void)r;
    const uint8_t *p = (const uint8_t *)x->text.data, *end = p + x->text.len;
    ucs4_t c;
    while (p < end) {
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        if (!uc_is_property_white_space(c)) return false;
    }
    snprintf(why, WHY, "%s", x->text.len ? "white space only" : "no text");
    return true;
}

static bool unfinished_on(const struct synth_filter_set *r) {
    return !r->o->unfinished;
}

static bool unfinished_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    (void)r;
    snprintf(why, WHY, x->finish == FINISH_LOOP ? "repeats itself" : "cut at %d tokens", x->out.n);
    return x->finish != FINISH_STOP;
}

static bool length_on(const struct synth_filter_set *r) {
    return r->o->min_chars || r->o->max_chars;
}

static bool length_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    int64_t n = (int64_t)u8_mbsnlen((const uint8_t *)x->text.data, x->text.len);
    snprintf(why, WHY, "%lld characters", (long long)n);
    return n < r->o->min_chars || (r->o->max_chars && n > r->o->max_chars);
}

/* language */

enum script_class { LATIN, HAN, KANA, HANGUL, OTHER, N_SCRIPTS };
struct counts {
    int64_t of[N_SCRIPTS], letters;
};

/*
 * Japanese and Chinese share the Han characters and are distinguished by the share of kana: at
 * least a tenth is Japanese, less is Chinese. Names and numbers are written in Han only, so a short
 * text of Han only may be either.
 */
enum { KANA_TENTH = 10, HAN_ALONE = 8 };

static bool has_kana(const struct counts *c) {
    return KANA_TENTH * c->of[KANA] >= c->of[KANA] + c->of[HAN];
}

static int64_t japanese(const struct counts *c) {
    bool either = c->of[KANA] == 0 && c->of[HAN] <= HAN_ALONE;
    return has_kana(c) || either ? c->of[KANA] + c->of[HAN] : 0;
}

static int64_t chinese(const struct counts *c) {
    return c->of[HAN] && has_kana(c) ? 0 : c->of[HAN];
}

static int64_t latin(const struct counts *c) {
    return c->of[LATIN];
}

static int64_t korean(const struct counts *c) {
    return c->of[HANGUL];
}

static const struct language {
    const char *name;
    int64_t (*letters)(const struct counts *c); /* number of letters that may belong to it */
} languages[] = {{"ja", japanese}, {"zh", chinese}, {"en", latin}, {"ko", korean}};

/* Unicode assigns no script to the prolonged sound mark. */
static enum script_class script_of(ucs4_t c) {
    static const char *const names[] = {"Latin", "Han", "Hiragana", "Katakana", "Hangul"};
    static const enum script_class scripts[] = {LATIN, HAN, KANA, KANA, HANGUL};
    const uc_script_t *script = uc_script(c);
    if (c == 0x30FC || c == 0xFF70) return KANA;
    for (size_t i = 0; script && i < ARRAY_LEN(names); i++)
        if (strcmp(script->name, names[i]) == 0) return scripts[i];
    return OTHER;
}

static struct counts letters_count(const struct buf *text) {
    struct counts counts = {0};
    const uint8_t *p = (const uint8_t *)text->data, *end = p + text->len;
    while (p < end) {
        ucs4_t c;
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        if (!uc_is_property_alphabetic(c)) continue;
        counts.of[script_of(c)]++;
        counts.letters++;
    }
    return counts;
}

static bool language_on(const struct synth_filter_set *r) {
    return r->language;
}

/* A text without letters, such as a number, passes for every language. */
static bool language_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    struct counts c = letters_count(&x->text);
    int64_t n = r->language->letters(&c);
    snprintf(why, WHY, "%lld of %lld letters are %s", (long long)n, (long long)c.letters,
             r->language->name);
    return (double)n < r->o->language_share * (double)c.letters;
}

/* rules */

/* 1: found, 0: not found, -1: the search exceeded its limit. */
static int pattern_find(const struct synth_filter_set *r, const pcre2_code *code,
                        const struct buf *text) {
    int rc = pcre2_match(code, (PCRE2_SPTR)text->data, text->len, 0, 0, r->match, r->match_limit);
    return rc >= 0 ? 1 : rc == PCRE2_ERROR_NOMATCH ? 0 : -1;
}

static bool require_on(const struct synth_filter_set *r) {
    return r->o->require.n > 0;
}

static bool require_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    for (int i = 0; i < r->o->require.n; i++) {
        int found = pattern_find(r, r->require[i], &x->text);
        snprintf(why, WHY, "%s '%.100s'", found < 0 ? "too long a search for" : "no",
                 r->o->require.v[i]);
        if (found != 1) return true;
    }
    return false;
}

static bool forbid_on(const struct synth_filter_set *r) {
    return r->o->forbid.n > 0;
}

static bool forbid_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    for (int i = 0; i < r->o->forbid.n; i++) {
        int found = pattern_find(r, r->forbid[i], &x->text);
        snprintf(why, WHY, "%s '%.100s'", found < 0 ? "too long a search for" : "holds",
                 r->o->forbid.v[i]);
        if (found != 0) return true;
    }
    return false;
}

static bool schema_on(const struct synth_filter_set *r) {
    return r->machine;
}

static bool schema_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    const char *text = x->text.data, *end = text + x->text.len;
    while (end > text && strchr(" \t\r\n", end[-1])) end--;
    text += strspn(text, " \t\r\n");
    struct grammar_state state = grammar_state_new(r->machine);
    bool accepted = true;
    const char *at = text;
    while (at < end && (accepted = grammar_accept_bytes(&state, at, 1))) at++;
    bool whole = accepted && grammar_is_final(&state);
    snprintf(why, WHY, accepted ? "ends too early" : "leaves the schema at byte %d",
             (int)(at - x->text.data) + 1);
    grammar_state_release(&state);
    return !whole;
}

/* agreement */

void synth_extract_answer(const char *text, const char *marker, struct buf *out) {
    const char *answer = text;
    size_t skip = strlen(marker), from = out->len;
    for (const char *at = text; skip && (at = strcasestr(at, marker)) != NULL;) answer = at += skip;
    text_normalize(answer, answer == text ? strlen(text) : strcspn(answer, "\n"), out);
    static const char *const ends[] = {".", "!", "。", " "};
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        size_t n = strlen(ends[i]);
        if (out->len < from + n || memcmp(out->data + out->len - n, ends[i], n) != 0) continue;
        out->len -= n;
        i = (size_t)-1; // start again: another sign may precede this one
    }
    buf_puts(out, "");
}

/* The hash of a sample's answer, or 0. A truncated sample has no answer and agrees with no
 * other. */
static uint64_t answer_hash(const struct synth_filter_set *r, const struct synth_sample *x) {
    struct buf answer = {0};
    bool whole = x->finish == FINISH_STOP || r->o->unfinished;
    if (whole) synth_extract_answer(x->text.data, r->o->answer, &answer);
    uint64_t hash = answer.len ? MAX(hash_fnv1a(answer.data, answer.len), 1) : 0;
    buf_release(&answer);
    return hash;
}

/* The agreement of all answers to a prompt, including dropped ones. */
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

static bool agreement_on(const struct synth_filter_set *r) {
    return r->o->min_agreement > 0;
}

static bool agreement_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    snprintf(why, WHY, "%.4g of the prompt's answers say the same", x->agreement);
    return x->agreement < r->o->min_agreement;
}

/* duplicates */

/* Computes the facts for the three comparisons. */
static int duplicates_prepare(struct synth_filter_set *r, struct error *err) {
    struct synth *s = r->s;
    r->facts = try_calloc((size_t)MAX(s->n, 1), sizeof *r->facts, err);
    if (!r->facts || hash_set_init(&r->whole, s->n, err) != OK ||
        hash_set_init(&r->near, s->n, err) != OK)
        return err->code;
    for (int i = 0; i < s->n; i++) {
        const struct synth_sample *x = &s->v[i];
        if (x->filter != SYNTH_KEPT) continue;
        int n;
        struct chat_message *msgs = synth_messages(&s->prompts.v[x->prompt], x->text.data, &n);
        int rc = sample_digest_compute(msgs, n, &r->facts[i], err);
        free(msgs);
        if (rc != OK) return rc;
    }
    return OK;
}

static bool duplicate_reason(const struct synth_filter_set *r, int twin, char *why) {
    if (twin < 0) return false;
    const struct synth_sample *x = &r->s->v[twin];
    snprintf(why, WHY, "as answer %d to the prompt in line %d", x->index,
             r->s->prompts.v[x->prompt].line);
    return true;
}

/* Samples come in order, so the kept one is the earliest that passed the earlier filters. */
static bool duplicate_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    int i = (int)(x - r->s->v);
    return duplicate_reason(r, hash_set_add(&r->whole, r->facts[i].whole, i), why);
}

static bool near_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    int i = (int)(x - r->s->v);
    return duplicate_reason(r, hash_set_add(&r->near, r->facts[i].near, i), why);
}

static bool held_out_on(const struct synth_filter_set *r) {
    return r->o->held_out;
}

static bool held_out_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    const struct sample_digest *f = &r->facts[x - r->s->v];
    int whole = hash_set_find(&r->held_near, f->near);
    int asked = f->prompt ? hash_set_find(&r->held_prompt, f->prompt) : -1;
    snprintf(why, WHY, "%s line %d of the held-out samples", whole >= 0 ? "is" : "asks what is in",
             whole >= 0 ? whole : asked);
    return whole >= 0 || asked >= 0;
}

/* perplexity */

static int number_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Turns the bounds into values: nearest ranks among the samples still kept, both inclusive. */
static int perplexity_prepare(struct synth_filter_set *r, struct error *err) {
    const struct synth *s = r->s;
    if (synth_score_perplexity(r->s, err) != OK) return err->code;
    double *v = try_calloc((size_t)MAX(s->n, 1), sizeof *v, err);
    int n = 0;
    if (!v) return err->code;
    for (int i = 0; i < s->n; i++)
        if (s->v[i].filter == SYNTH_KEPT) v[n++] = s->v[i].perplexity;
    qsort(v, (size_t)n, sizeof *v, number_order);
    double below = (double)n * r->min_perplexity.value / 100,
           within = (double)n * r->max_perplexity.value / 100;
    r->low = r->min_perplexity.quantile && n ? v[MIN((int)below, n - 1)] : r->min_perplexity.value;
    r->high = r->max_perplexity.value;
    if (r->max_perplexity.quantile && n) { // the last value within the share
        int rank = (int)within + (within > (double)(int)within);
        r->high = v[MAX(rank, 1) - 1];
    }
    free(v);
    return OK;
}

static bool perplexity_on(const struct synth_filter_set *r) {
    return r->min_perplexity.given || r->max_perplexity.given;
}

/* A NaN is outside every bound. */
static bool perplexity_drops(struct synth_filter_set *r, const struct synth_sample *x, char *why) {
    bool low = r->min_perplexity.given && !(x->perplexity >= r->low);
    bool high = r->max_perplexity.given && !(x->perplexity <= r->high);
    snprintf(why, WHY, "%.4g, %s %.4g", x->perplexity, low ? "below" : "above",
             low ? r->low : r->high);
    return low || high;
}

/* the table */

static const struct synth_filter_row {
    const char *name;
    bool (*on)(const struct synth_filter_set *r); /* NULL: always */
    int (*prepare)(struct synth_filter_set *r, struct error *err);
    bool (*drops)(struct synth_filter_set *r, const struct synth_sample *x, char *why);
} filters[] = {
    {"text", NULL, NULL, text_drops},
    {"empty", NULL, NULL, empty_drops},
    {"unfinished", unfinished_on, NULL, unfinished_drops},
    {"length", length_on, NULL, length_drops},
    {"language", language_on, NULL, language_drops},
    {"require", require_on, NULL, require_drops},
    {"forbid", forbid_on, NULL, forbid_drops},
    {"json_schema", schema_on, NULL, schema_drops},
    {"agreement", agreement_on, NULL, agreement_drops},
    {"duplicate", NULL, duplicates_prepare, duplicate_drops},
    {"near_duplicate", NULL, NULL, near_drops},
    {"held_out", held_out_on, NULL, held_out_drops},
    {"perplexity", perplexity_on, perplexity_prepare, perplexity_drops},
};
_Static_assert(ARRAY_LEN(filters) <= SYNTH_MAX_FILTERS, "a tally each");

const char *synth_filter_name(int filter) {
    return filter >= 0 && filter < (int)ARRAY_LEN(filters) ? filters[filter].name : NULL;
}

static int filter_run(struct synth_filter_set *r, int f, struct error *err) {
    struct synth *s = r->s;
    struct synth_filter_stats *tally = &s->tally[f];
    char why[WHY] = "";
    tally->on = !filters[f].on || filters[f].on(r);
    if (!tally->on) return OK;
    if (filters[f].prepare && filters[f].prepare(r, err) != OK) return err->code;
    for (int i = 0; i < s->n; i++) {
        struct synth_sample *x = &s->v[i];
        if (x->filter != SYNTH_KEPT || !filters[f].drops(r, x, why)) continue;
        x->filter = f;
        if (tally->dropped++) continue;
        tally->first = i;
        memcpy(tally->why, why, WHY);
    }
    return OK;
}

int synth_filter(struct synth *s, struct synth_filter_set *r, struct error *err) {
    int rc = OK;
    r->s = s;
    memset(s->tally, 0, sizeof s->tally);
    for (int i = 0; i < s->n; i++) s->v[i].filter = SYNTH_KEPT;
    self_consistency_all(r);
    for (int f = 0; rc == OK && f < (int)ARRAY_LEN(filters); f++) rc = filter_run(r, f, err);
    free(r->facts);
    r->facts = NULL;
    hash_set_release(&r->whole);
    hash_set_release(&r->near);
    return rc;
}

/* making a filter set */

static pcre2_code *pattern_new(const char *text, struct error *err) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (compiled) return compiled;
    PCRE2_UCHAR why[160];
    pcre2_get_error_message(code, why, sizeof why);
    error_set(err, ERR_USAGE, "'%.200s' is not a regular expression: %s at byte %d", text,
              (char *)why, (int)at + 1);
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
    out->given = true;
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
    if (dataset_load(d, r->o->held_out, tok, 0, err) != OK ||
        hash_set_init(&r->held_near, d->n_read, err) != OK ||
        hash_set_init(&r->held_prompt, d->n_read, err) != OK)
        return err->code;
    for (int i = 0; i < d->n_read; i++) {
        hash_set_add(&r->held_near, d->facts[i].near, d->facts[i].line);
        if (d->facts[i].prompt) hash_set_add(&r->held_prompt, d->facts[i].prompt, d->facts[i].line);
    }
    return OK;
}

enum { MATCH_LIMIT = 1000000 }; /* steps of a search, which bounds patterns of exponential cost */

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

/* The beginning of a text on one line; invalid bytes and control characters become U+FFFD. */
static void snippet(const struct buf *text, struct buf *out) {
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
        const struct synth_filter_stats *t = &s->tally[f];
        if (!t->on) continue;
        buf_printf(out, "  %-14s %7d", synth_filter_name(f), t->dropped);
        if (t->dropped) {
            const struct synth_sample *x = &s->v[t->first];
            buf_printf(out, "  the first: line %d, answer %d, %s: ", s->prompts.v[x->prompt].line,
                       x->index, t->why);
            snippet(&x->text, out);
        }
        buf_puts(out, "\n");
    }
}

static json_t *tally_json(const struct synth *s, int f) {
    const struct synth_filter_stats *t = &s->tally[f];
    json_t *v = json_pack("{s:s,s:i}", "filter", synth_filter_name(f), "dropped", t->dropped);
    if (!t->dropped) return v;
    const struct synth_sample *x = &s->v[t->first];
    struct buf text = {0};
    snippet(&x->text, &text);
    json_object_set_new(v, "first",
                        json_pack("{s:i,s:i,s:s,s:s,s:s}", "line", s->prompts.v[x->prompt].line,
                                  "sample", x->index, "call", x->call, "why", t->why, "text",
                                  text.data));
    buf_release(&text);
    return v;
}

json_t *synth_report_json(const struct synth *s) {
    json_t *list = json_array();
    for (int f = 0; synth_filter_name(f); f++)
        if (s->tally[f].on) json_array_append_new(list, tally_json(s, f));
    return json_pack("{s:i,s:i,s:i,s:o}", "prompts", s->prompts.n, "answers", s->n, "kept",
                     synth_count_kept(s), "filters", list);
}
