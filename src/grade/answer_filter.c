/*
 * answer_filter: steps that turn a model's whole text into the answer that is compared, as the
 * filters and the options of exact_match of lm-evaluation-harness define them.
 *
 * Patterns are those of Python's `re`; PCRE2 reads them in the same way. A
 * pattern that exceeds the match limits does not match.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "grade/internal.h"

#include <ctype.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unicase.h>

struct answer_step {
    /* Appends the new text; false: the text has no answer. */
    bool (*apply)(const struct answer_step *s, const struct buf *text, struct buf *out);
    const json_t *options; /* the step as written */
    pcre2_code *pattern;   /* or NULL */
};
struct answer_filter {
    json_t *steps;
    struct answer_step *v; /* [n] */
    size_t n;
};

/* matches */

/* All matches of a pattern from left to right, as Python's findall. The next match begins at `pos`;
 * an empty match may follow another match, but not another empty one at the same place. */
struct match_iterator {
    const pcre2_code *pattern;
    const struct buf *text;
    size_t pos;
    bool after_empty;
    pcre2_match_data *data;
    pcre2_match_context *limits;
};

static void matches_begin(struct match_iterator *m, const pcre2_code *pattern,
                          const struct buf *text) {
    *m = (struct match_iterator){.pattern = pattern, .text = text};
    m->data = pcre2_match_data_create_from_pattern(pattern, NULL);
    m->limits = regex_limits_new();
    CHECK(m->data);
}

/* The bounds of the groups of the next match, group 0 first; NULL: no further match. */
static const size_t *match_next(struct match_iterator *m) {
    if (pcre2_match(m->pattern, (PCRE2_SPTR)m->text->data, m->text->len, m->pos,
                    m->after_empty ? PCRE2_NOTEMPTY_ATSTART : 0, m->data, m->limits) < 0)
        return NULL;
    const size_t *groups = pcre2_get_ovector_pointer(m->data);
    m->pos = groups[1];
    m->after_empty = groups[0] == groups[1];
    return groups;
}

static void matches_end(struct match_iterator *m) {
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->limits);
}

/* steps */

/* The text of a match: the whole match of a pattern without groups, its only group, or the first
 * group that is not empty. NULL: all of several groups are empty. */
static const char *match_text(const struct match_iterator *m, const size_t *groups, size_t *len) {
    uint32_t n = 0;
    pcre2_pattern_info(m->pattern, PCRE2_INFO_CAPTURECOUNT, &n);
    for (uint32_t i = n ? 1 : 0; i <= n; i++) {
        bool set = groups[2 * i] != PCRE2_UNSET;
        *len = set ? groups[2 * i + 1] - groups[2 * i] : 0;
        if (*len || n <= 1) return m->text->data + (set ? groups[2 * i] : 0);
    }
    return NULL;
}

static int64_t matches_count(const pcre2_code *pattern, const struct buf *text) {
    struct match_iterator m;
    int64_t n = 0;
    matches_begin(&m, pattern, text);
    while (match_next(&m)) n++;
    matches_end(&m);
    return n;
}

/* Match `group` (from the end if it is negative), without white space at both ends; without such a
 * match `fallback`. */
static bool step_regex(const struct answer_step *s, const struct buf *text, struct buf *out) {
    struct match_iterator m;
    const size_t *groups = NULL;
    int64_t group = json_integer_value(json_object_get(s->options, "group"));
    if (group < 0) group += matches_count(s->pattern, text);
    matches_begin(&m, s->pattern, text);
    for (int64_t i = 0; group >= 0 && i <= group && (i == 0 || groups); i++)
        groups = match_next(&m);
    size_t len = 0;
    const char *found = groups ? match_text(&m, groups, &len) : NULL;
    struct text_span span = text_span_trim((struct text_span){found ? found : "", len});
    if (found)
        buf_add(out, span.ptr, span.len);
    else
        buf_puts(out, json_get_string(s->options, "fallback"));
    matches_end(&m);
    return found;
}

static bool step_remove(const struct answer_step *s, const struct buf *text, struct buf *out) {
    struct match_iterator m;
    const size_t *groups;
    size_t from = 0;
    matches_begin(&m, s->pattern, text);
    while ((groups = match_next(&m)) != NULL) {
        buf_add(out, text->data + from, groups[0] - from);
        from = groups[1];
    }
    buf_add(out, text->data + from, text->len - from);
    matches_end(&m);
    return true;
}

static bool step_strip(const struct answer_step *s, const struct buf *text, struct buf *out) {
    struct text_span span = text_span_trim((struct text_span){text->data, text->len});
    (void)s;
    buf_add(out, span.ptr, span.len);
    return true;
}

static bool step_lower(const struct answer_step *s, const struct buf *text, struct buf *out) {
    size_t n = 0;
    uint8_t *lower = u8_tolower((const uint8_t *)text->data, text->len, "", NULL, NULL, &n);
    (void)s;
    if (lower) buf_add(out, lower, n);
    free(lower);
    return true;
}

static bool step_upper(const struct answer_step *s, const struct buf *text, struct buf *out) {
    size_t n = 0;
    uint8_t *upper = u8_toupper((const uint8_t *)text->data, text->len, "", NULL, NULL, &n);
    (void)s;
    if (upper) buf_add(out, upper, n);
    free(upper);
    return true;
}

/* Removes ASCII signs, as Python's string.punctuation. */
static bool step_punctuation(const struct answer_step *s, const struct buf *text, struct buf *out) {
    (void)s;
    for (size_t i = 0; i < text->len; i++)
        if (!ispunct((unsigned char)text->data[i])) buf_add(out, text->data + i, 1);
    return true;
}

static bool step_digits(const struct answer_step *s, const struct buf *text, struct buf *out) {
    (void)s;
    for (size_t i = 0; i < text->len; i++)
        if (!isdigit((unsigned char)text->data[i])) buf_add(out, text->data + i, 1);
    return true;
}

static bool step_map(const struct answer_step *s, const struct buf *text, struct buf *out) {
    const json_t *to = json_object_get(json_object_get(s->options, "map"), text->data);
    if (!to) to = json_object_get(s->options, "default");
    if (to) buf_puts(out, json_string_value(to));
    return to;
}

static const struct answer_step_kind {
    const char *name;
    bool (*apply)(const struct answer_step *s, const struct buf *text, struct buf *out);
} kinds[] = {
    {"regex", step_regex},   {"remove", step_remove}, {"strip", step_strip},
    {"lower", step_lower},   {"upper", step_upper},   {"punctuation", step_punctuation},
    {"digits", step_digits}, {"map", step_map},
};

/* filters */

static int step_open(struct answer_step *s, const json_t *options, struct error *err) {
    const char *name = json_get_string(options, "step"),
               *pattern = json_string_value(json_object_get(options, "pattern"));
    s->options = options;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0) s->apply = kinds[i].apply;
    CHECK(s->apply);
    return !pattern || (s->pattern = regex_compile(pattern, err)) ? OK : err->code;
}

struct answer_filter *answer_filter_new(json_t *steps, struct error *err) {
    struct answer_filter *f = xcalloc(1, sizeof *f);
    f->steps = steps;
    f->v = xcalloc(json_array_size(steps) + 1, sizeof *f->v);
    for (; f->n < json_array_size(steps); f->n++)
        if (step_open(&f->v[f->n], json_array_get(steps, f->n), err) != OK) {
            answer_filter_free(f);
            return NULL;
        }
    return f;
}

const json_t *answer_filter_steps(const struct answer_filter *f) {
    return f->steps;
}

bool answer_filter_apply(const struct answer_filter *f, const char *text, struct buf *out) {
    json_t *valid = json_string_lossy(text, strlen(text));
    struct buf current = {0};
    bool found = true;
    buf_puts(&current, json_string_value(valid));
    for (size_t i = 0; i < f->n; i++) {
        struct buf next = {0};
        buf_puts(&next, "");
        found &= f->v[i].apply(&f->v[i], &current, &next);
        buf_release(&current);
        current = next;
    }
    buf_puts(out, current.data);
    buf_release(&current);
    json_decref(valid);
    return found;
}

void answer_filter_free(struct answer_filter *f) {
    if (!f) return;
    for (size_t i = 0; i < f->n; i++) pcre2_code_free(f->v[i].pattern);
    free(f->v);
    json_decref(f->steps);
    free(f);
}
