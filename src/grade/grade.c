/*
 * grade: the table of graders, the graders letter, exact, exact_match, prefix and regex, and the
 * extraction of f1 and math.
 *
 * A grader extracts an answer from a text in a normal form and scores this form against a gold
 * answer. This file finds the answer marks of a text ("answer:", 答えは, ####, \boxed) for all
 * graders. The last mark counts, because models repeat the marks of the question before they
 * answer.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "grade/internal.h"

#include <ctype.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unicase.h>
#include <unictype.h>
#include <unistr.h>

struct grader {
    const char *name;
    bool (*extract)(const char *text, struct buf *out);
    double (*score)(const char *form, const char *gold); /* NULL: 1 for equal forms, else 0 */
    bool (*equivalent)(const char *a, const char *b);    /* for unequal forms; NULL: false */
    int (*check)(const char *gold, struct error *err);
    bool gold_is_literal; /* `score` gets the gold answer as written, not its form */
};

/* spans */

struct text_span text_span_of(const char *text) {
    return (struct text_span){text, strlen(text)};
}

struct text_span text_span_trim(struct text_span s) {
    ucs4_t c;
    const uint8_t *begin = (const uint8_t *)s.ptr, *end = begin + s.len;
    while (begin < end) {
        int n = u8_mbtouc(&c, begin, (size_t)(end - begin));
        if (!uc_is_property_white_space(c)) break;
        begin += n;
    }
    while (begin < end) {
        const uint8_t *last = end - 1;
        while (last > begin && (*last & 0xC0) == 0x80) last--;
        u8_mbtouc(&c, last, (size_t)(end - last));
        if (!uc_is_property_white_space(c)) break;
        end = last;
    }
    return (struct text_span){(const char *)begin, (size_t)(end - begin)};
}

static bool span_append(struct text_span s, struct buf *out) {
    buf_puts(out, "");
    buf_add(out, s.ptr, s.len);
    return s.len > 0;
}

static bool has_prefix(struct text_span s, const char *what) {
    size_t n = strlen(what);
    return s.len >= n && strncasecmp(s.ptr, what, n) == 0;
}

static struct text_span span_skip(struct text_span s, size_t n) {
    return (struct text_span){s.ptr + n, s.len - n};
}

static struct text_span first_line(struct text_span s) {
    const char *end = s.len ? memchr(s.ptr, '\n', s.len) : NULL;
    return text_span_trim((struct text_span){s.ptr, end ? (size_t)(end - s.ptr) : s.len});
}

/* The last line that is not blank. */
static struct text_span text_span_last_line(struct text_span text) {
    text = text_span_trim(text);
    const char *begin = text.len ? memrchr(text.ptr, '\n', text.len) : NULL;
    return text_span_trim(begin ? span_skip(text, (size_t)(begin + 1 - text.ptr)) : text);
}

/* marks */

/* Bytes of one of `words` at the beginning, with the blanks and emphasis signs before it; 0: no
 * such word. */
static size_t leading_word_len(struct text_span s, const char *const *words, int n) {
    size_t skip = 0;
    while (skip < s.len && strchr(" \t*_", s.ptr[skip]) && s.ptr[skip]) skip++;
    for (int i = 0; i < n; i++)
        if (has_prefix(span_skip(s, skip), words[i])) return skip + strlen(words[i]);
    return 0;
}

/* Bytes of the mark at the beginning: "answer is:", 答えは and the like; 0: no mark begins here. */
static size_t answer_mark_len(struct text_span s) {
    static const char *const names[] = {"answer", "答え", "答案", "正解", "解答", "回答"};
    static const char *const links[] = {":", "：", "=", "is ", "is:", "は", "是", "为", "為"};
    if (has_prefix(s, "####")) return 4;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (!has_prefix(s, names[i])) continue;
        size_t len = strlen(names[i]), link, n_links = 0;
        while (n_links++ < 3 &&
               (link = leading_word_len(span_skip(s, len), links, ARRAY_LEN(links))) > 0)
            len += link;
        return n_links > 1 && len > strlen(names[i]) ? len : 0;
    }
    return 0;
}

bool find_marked_answer(struct text_span text, struct text_span *out) {
    bool found = false;
    for (size_t i = 0, len; i < text.len; i += MAX(len, 1))
        if ((len = answer_mark_len(span_skip(text, i))) > 0) {
            *out = span_skip(text, i + len);
            found = true;
        }
    if (found) *out = first_line(text_span_trim(*out));
    return found && out->len > 0;
}

/* Finds the content of the braces after "\boxed"; without braces, the letters and digits that
 * follow, at most 16. */
static bool box_content(struct text_span s, struct text_span *out) {
    int depth = 0;
    size_t skip = 0;
    while (skip < s.len && s.ptr[skip] == ' ') skip++;
    s = span_skip(s, skip);
    if (s.len && s.ptr[0] != '{') {
        *out = (struct text_span){s.ptr, 0};
        while (out->len < s.len && out->len < 16 && isalnum((unsigned char)s.ptr[out->len]))
            out->len++;
        return out->len > 0;
    }
    for (size_t i = 0; i < s.len; i++) {
        if (s.ptr[i] == '\\') {
            i++;
            continue;
        }
        depth += s.ptr[i] == '{';
        if (s.ptr[i] != '}' || --depth > 0) continue;
        *out = text_span_trim((struct text_span){s.ptr + 1, i - 1});
        return out->len > 0;
    }
    return false;
}

/* Searches from the end of the text. It tries only the last TRIES boxes, which bounds the cost of
 * boxes that are not closed. */
bool find_boxed_answer(struct text_span text, struct text_span *out) {
    enum { TRIES = 16 };
    size_t end = text.len;
    for (int i = 0; i < TRIES; i++) {
        const char *box = NULL;
        while (!box && end > 0) {
            const char *p = memrchr(text.ptr, '\\', end);
            end = p ? (size_t)(p - text.ptr) : 0;
            if (p && (has_prefix(span_skip(text, end), "\\boxed") ||
                      has_prefix(span_skip(text, end), "\\fbox")))
                box = p;
        }
        if (!box) return false;
        if (box_content(span_skip(text, end + (box[1] == 'f' ? 5 : 6)), out)) return true;
    }
    return false;
}

/* letter */

/* The first character, if it is ASCII or has an ASCII equivalent (full-width characters, 。); else,
 * and at the end, 0. *len: its bytes. */
static char ascii_at(struct text_span s, size_t *len) {
    ucs4_t c = 0;
    *len = s.len ? (size_t)u8_mbtouc(&c, (const uint8_t *)s.ptr, s.len) : 0;
    if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0;
    if (c == 0x3002) c = '.';
    return c < 0x80 ? (char)c : 0;
}

/* Skips opening brackets, emphasis and \text{ at the start of an answer. Sets *bracket if it skips
 * a bracket. */
static struct text_span skip_opening(struct text_span s, bool *bracket) {
    static const char *const wraps[] = {"\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{",
                                        "\\boxed{"};
    for (;;) {
        size_t len, i = 0;
        s = text_span_trim(s);
        char c = ascii_at(s, &len);
        if (c && strchr("([{*\"'$", c)) {
            *bracket |= c == '(' || c == '[' || c == '{';
            s = span_skip(s, len);
            continue;
        }
        while (i < ARRAY_LEN(wraps) && !has_prefix(s, wraps[i])) i++;
        if (i == ARRAY_LEN(wraps)) return s;
        *bracket = true;
        s = span_skip(s, strlen(wraps[i]));
    }
}

static bool is_choice(char c) {
    return (c >= 'A' && c <= 'J') || (c >= 'a' && c <= 'j');
}

/* Whether `s` holds only closing signs. */
static bool is_only_closing(struct text_span s) {
    size_t len;
    for (s = text_span_trim(s); s.len; s = text_span_trim(span_skip(s, len))) {
        char c = ascii_at(s, &len);
        if (!c || !strchr(")]}.,:;!*\"'$", c)) return false;
    }
    return true;
}

/* Whether a second choice letter follows the first one, as in "B and C" or "A/B". */
static bool second_letter_follows(struct text_span s) {
    static const char *const links[] = {"and ", "or ", "&", "/", ",", "と", "、", "和", "或"};
    while (s.len && strchr(")]}. *", *s.ptr)) s = span_skip(s, 1);
    size_t link_len = leading_word_len(s, links, ARRAY_LEN(links)), len, next;
    if (!link_len) return false;
    bool bracket = false;
    s = skip_opening(span_skip(s, link_len), &bracket);
    char c = ascii_at(s, &len);
    return is_choice(c) && !isalnum((unsigned char)ascii_at(span_skip(s, len), &next));
}

/* The letter at the start of a marked answer; 0: none. The letter must be alone or precede a sign.
 * An upper-case letter may also precede words, except for A, which may be an article, and I, which
 * may be a pronoun; a comma may follow the pronoun. */
static char marked_letter(struct text_span s) {
    bool bracket = false;
    size_t len, next;
    s = skip_opening(s, &bracket);
    char c = ascii_at(s, &len);
    if (!is_choice(c)) return 0;
    struct text_span rest = span_skip(s, len);
    if (second_letter_follows(rest)) return 0;
    if (is_only_closing(rest)) return (char)toupper((unsigned char)c);
    char after = ascii_at(rest, &next);
    bool dense = (uint8_t)*rest.ptr >= 0xE3; // kana, ideographs
    bool sign = dense || (after && strchr(")]}.,:;*$", after) && !(c == 'I' && after == ','));
    bool words =
        isupper((unsigned char)c) && c != 'A' && c != 'I' && isspace((unsigned char)*rest.ptr);
    if (islower((unsigned char)c) && !bracket && !dense) return 0;
    return sign || words ? (char)toupper((unsigned char)c) : 0;
}

/* The letter of a text that consists of one letter and signs; else 0. */
static char lone_letter(struct text_span s) {
    bool bracket = false;
    size_t len;
    s = skip_opening(s, &bracket);
    char c = ascii_at(s, &len);
    return is_choice(c) && is_only_closing(span_skip(s, len)) ? (char)toupper((unsigned char)c) : 0;
}

/* The letter of a line such as "B) Paris", "(B) Paris" or "B. Paris"; else 0. "I." may be a Roman
 * number. */
static char listed_letter(struct text_span line) {
    bool bracket = false;
    size_t len, next;
    struct text_span s = skip_opening(line, &bracket);
    char c = ascii_at(s, &len), after = ascii_at(span_skip(s, len), &next);
    if (!is_choice(c) || islower((unsigned char)c)) return 0;
    bool full_stop = after == '.' && !bracket && c != 'I';
    return after == ')' || full_stop || (after == ']' && bracket) ? c : 0;
}

/* The letter of the lines that listed_letter finds, if all these lines have the same letter;
 * else 0. */
static char only_listed_letter(struct text_span text) {
    char found = 0;
    while (text.len) {
        const char *end = memchr(text.ptr, '\n', text.len);
        size_t len = end ? (size_t)(end - text.ptr) : text.len;
        char c = listed_letter(text_span_trim((struct text_span){text.ptr, len}));
        if (c && found && c != found) return 0;
        if (c) found = c;
        text = span_skip(text, MIN(len + 1, text.len));
    }
    return found;
}

static bool letter_extract(const char *text, struct buf *out) {
    struct text_span all = text_span_of(text), part;
    char c = find_boxed_answer(all, &part) ? lone_letter(part) : 0;
    if (!c && find_marked_answer(all, &part)) {
        if ((c = marked_letter(part)) == 0) return false; // the marked answer is not a letter
    }
    if (!c) c = lone_letter(all);
    if (!c) c = lone_letter(text_span_last_line(all));
    if (!c) c = only_listed_letter(all);
    if (c) buf_add(out, &c, 1);
    return c != 0;
}

/* Checks that the grader finds an answer in the gold answer. */
static int form_check(const struct grader *g, const char *gold, const char *what,
                      struct error *err) {
    struct buf form = {0};
    bool found = g->extract(gold, &form);
    buf_release(&form);
    return found ? OK : error_set(err, ERR_FORMAT, "gold answer '%.60s' is no %s", gold, what);
}

/* exact */

static ucs4_t char_fold(ucs4_t c) {
    if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0; /* full-width ASCII */
    return uc_tolower(c);
}

/* From this code point on (CJK radicals, kana, ideographs, hangul, their punctuation),
 * text_normalize drops blanks next to a character. */
enum { DENSE_FROM = 0x2E80 };

void text_normalize(const char *text, size_t len, struct buf *out) {
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    ucs4_t before = 0;
    bool blank = false;
    while (p < end) {
        ucs4_t c;
        uint8_t bytes[6];
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        if (uc_is_property_white_space(c)) {
            blank = before != 0;
            continue;
        }
        c = char_fold(c);
        if (blank && c < DENSE_FROM && before < DENSE_FROM) buf_puts(out, " ");
        blank = false;
        before = c;
        buf_add(out, bytes, (size_t)u8_uctomb(bytes, c, sizeof bytes));
    }
}

/* The text after the last "answer:", 答え： or 答案：, or all of it. */
static struct text_span text_after_marker(const char *text) {
    static const char *const marks[] = {
        "answer:", "answer：", "答え:", "答え：", "答案:", "答案："};
    struct text_span all = text_span_of(text), rest = all;
    for (size_t i = 0; i < all.len; i++)
        for (size_t k = 0; k < ARRAY_LEN(marks); k++)
            if (has_prefix(span_skip(all, i), marks[k]))
                rest = span_skip(all, i + strlen(marks[k]));
    return rest;
}

static bool exact_extract(const char *text, struct buf *out) {
    struct text_span rest = text_after_marker(text);
    size_t begin = out->len;
    buf_puts(out, "");
    text_normalize(rest.ptr, rest.len, out);
    static const char *const ends[] = {".", "。", "｡", " "};
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        size_t n = strlen(ends[i]);
        if (out->len < begin + n || memcmp(out->data + out->len - n, ends[i], n) != 0) continue;
        out->data[out->len -= n] = 0;
        i = (size_t)-1; // start again: another sign may precede this one
    }
    return out->len > begin;
}

/* exact_match */

/* The words that F1 compares, or for a text of only articles and signs the text itself. */
static bool words_append(struct text_span s, struct buf *out) {
    size_t begin = out->len;
    char *copy = xasprintf("%.*s", (int)MIN(s.len, INT32_MAX), s.ptr);
    buf_puts(out, "");
    f1_words(copy, out);
    free(copy);
    if (out->len == begin) text_normalize(s.ptr, s.len, out);
    return out->len > begin;
}

static bool exact_match_extract(const char *text, struct buf *out) {
    struct text_span all = text_span_of(text), part;
    return words_append(find_marked_answer(all, &part) ? part : all, out);
}

/* prefix */

static bool is_word_char(ucs4_t c) {
    return uc_is_alnum(c) || uc_is_general_category(c, UC_MARK);
}

static ucs4_t last_char(struct text_span s) {
    ucs4_t c = 0;
    size_t from = s.len - (s.len > 0);
    while (from > 0 && (s.ptr[from] & 0xC0) == 0x80) from--;
    if (s.len) u8_mbtouc(&c, (const uint8_t *)s.ptr + from, s.len - from);
    return c;
}

/* Whether the characters at the start of `rest` belong to the word that ends with `last`: a letter
 * or digit; a hyphen or an apostrophe before one; a decimal point or comma between digits. Scripts
 * without blanks have no such words. */
static bool word_continues(ucs4_t last, struct text_span rest) {
    ucs4_t c = 0, next = 0;
    if (!is_word_char(last) || last >= DENSE_FROM || rest.len == 0) return false;
    int n = u8_mbtouc(&c, (const uint8_t *)rest.ptr, rest.len);
    if (is_word_char(c)) return c < DENSE_FROM;
    rest = span_skip(rest, (size_t)n);
    if (rest.len) u8_mbtouc(&next, (const uint8_t *)rest.ptr, rest.len);
    if (c == '.' || c == ',') return uc_is_digit(last) && uc_is_digit(next);
    return (c == '-' || c == '\'' || c == 0x2019) && is_word_char(next) && next < DENSE_FROM;
}

static double prefix_score(const char *form, const char *gold) {
    size_t n = strlen(gold);
    return strncmp(form, gold, n) == 0 &&
           !word_continues(last_char(text_span_of(gold)), text_span_of(form + n));
}

/* More text cannot change the verdict if the text differs from the gold answer, or has it and the
 * two characters after it. */
static bool prefix_is_decided(struct text_span text, struct text_span gold) {
    enum { TWO_CHARS = 8 };
    if (text.len == 0) return false;
    size_t n = MIN(text.len, gold.len);
    return memcmp(text.ptr, gold.ptr, n) != 0 || text.len >= gold.len + TWO_CHARS;
}

/* regex */

pcre2_code *regex_compile(const char *text, struct error *err) {
    int code;
    PCRE2_SIZE offset;
    char reason[256];
    pcre2_code *p = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                  &code, &offset, NULL);
    if (p) return p;
    pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
    error_set(err, ERR_FORMAT, "pattern '%s' is wrong at byte %zu: %s", text, offset + 1, reason);
    return NULL;
}

static int regex_check(const char *gold, struct error *err) {
    pcre2_code *p = regex_compile(gold, err);
    pcre2_code_free(p);
    return p ? OK : err->code;
}

pcre2_match_context *regex_limits_new(void) {
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    CHECK(limits);
    pcre2_set_match_limit(limits, 1000000);
    pcre2_set_heap_limit(limits, 65536); // KiB
    return limits;
}

/* A text that is not UTF-8 or that exceeds the match limits does not match. */
static double regex_score(const char *form, const char *gold) {
    struct error err;
    pcre2_code *p = regex_compile(gold, &err);
    CHECK(p); // grader_check has compiled it before
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = regex_limits_new();
    CHECK(m);
    int rc = pcre2_match(p, (PCRE2_SPTR)form, strlen(form), 0, 0, m, limits);
    pcre2_match_context_free(limits);
    pcre2_match_data_free(m);
    pcre2_code_free(p);
    return rc >= 0;
}

/* Any text is an answer, also an empty one. */
static bool verbatim_extract(const char *text, struct buf *out) {
    buf_puts(out, text);
    return true;
}

static int verbatim_check(const char *gold, struct error *err) {
    (void)gold, (void)err;
    return OK;
}

/* Extracts the whole text without white space at both ends. */
static bool trimmed_extract(const char *text, struct buf *out) {
    return span_append(text_span_trim(text_span_of(text)), out);
}

/* f1 */

static bool f1_extract(const char *text, struct buf *out) {
    return words_append(text_after_marker(text), out);
}

/* math */

/* Whether the text has a word of four or more letters that is not a LaTeX command. */
static bool has_prose(struct text_span s) {
    for (size_t i = 0, n; i < s.len; i += n + 1) {
        n = 0;
        while (i + n < s.len && isalpha((unsigned char)s.ptr[i + n])) n++;
        bool is_command = i > 0 && s.ptr[i - 1] == '\\';
        if (n >= 4 && !is_command) return true;
    }
    return false;
}

/* Finds the text between the first and the last $; a single $ is a currency sign. Without two $:
 * the text between the first \( and the last \), or between \[ and \]. */
static bool find_delimited_formula(struct text_span s, struct text_span *out) {
    static const char *const pairs[][2] = {{"\\(", "\\)"}, {"\\[", "\\]"}};
    const char *open = memchr(s.ptr, '$', s.len), *close = open ? memrchr(s.ptr, '$', s.len) : NULL;
    for (size_t i = 0; open == close && i < ARRAY_LEN(pairs); i++) {
        const char *a = memmem(s.ptr, s.len, pairs[i][0], 2), *b = NULL;
        for (const char *p = a; p && (p = memmem(p, (size_t)(s.ptr + s.len - p), pairs[i][1], 2));
             p += 2)
            b = p;
        if (b) open = a + 1, close = b;
    }
    if (open == close) return false;
    *out = text_span_trim((struct text_span){open + 1, (size_t)(close - open - 1)});
    while (out->len && *out->ptr == '$') *out = span_skip(*out, 1);
    while (out->len && out->ptr[out->len - 1] == '$') out->len--;
    *out = text_span_trim(*out);
    return out->len > 0;
}

/* Finds the last formula of the line. */
static bool last_formula(struct text_span line, struct text_span *out) {
    struct text_span formula;
    const char *close = line.len ? memrchr(line.ptr, '$', line.len) : NULL;
    const char *open = close > line.ptr ? memrchr(line.ptr, '$', (size_t)(close - line.ptr)) : NULL;
    if (open && close == open + 1) // $$…$$
        open = open > line.ptr ? memrchr(line.ptr, '$', (size_t)(open - line.ptr)) : NULL;
    if (open) *out = text_span_trim((struct text_span){open + 1, (size_t)(close - open - 1)});
    if (open && out->len) return true;
    if (!find_delimited_formula(line, &formula)) return false;
    *out = formula;
    return true;
}

/* The text before the first ". ": "5. I hope it is correct." → 5 */
static struct text_span first_sentence(struct text_span s) {
    const char *end = memmem(s.ptr, s.len, ". ", 2);
    return end ? (struct text_span){s.ptr, (size_t)(end - s.ptr)} : s;
}

static bool math_extract(const char *text, struct buf *out) {
    enum { SHORT = 64 };
    struct text_span all = text_span_trim(text_span_of(text)), part,
                     line = text_span_last_line(all);
    if (find_boxed_answer(all, &part)) return span_append(part, out);
    if (find_marked_answer(all, &part)) {
        struct text_span formula;
        return span_append(find_delimited_formula(part, &formula) ? formula : first_sentence(part),
                           out);
    }
    bool one_line = line.ptr == all.ptr;
    if (one_line && (!has_prose(all) || all.len <= SHORT)) return span_append(all, out);
    if (last_formula(line, &part)) return span_append(part, out);
    if (line.len <= SHORT && !has_prose(line)) return span_append(line, out);
    char *copy = xasprintf("%.*s", (int)MIN(line.len, INT32_MAX), line.ptr);
    bool found = number_extract(copy, out);
    free(copy);
    return found;
}

static bool math_is_equivalent(const char *a, const char *b) {
    int64_t steps;
    return math_equivalent(a, b, &steps);
}

static double math_score(const char *form, const char *gold) {
    return math_is_equivalent(form, gold);
}

/* the table */

static int letter_check(const char *gold, struct error *err);
static int number_check(const char *gold, struct error *err);

static int nonempty_check(const char *gold, struct error *err) {
    return text_span_trim(text_span_of(gold)).len
               ? OK
               : error_set(err, ERR_FORMAT, "the gold answer is empty");
}

static const struct grader graders[] = {
    /* a choice's letter, A to J */
    {"letter", letter_extract, NULL, NULL, letter_check, false},
    /* a number: after #### or "answer:", else the last one */
    {"number", number_extract, NULL, NULL, number_check, false},
    /* a formula, compared by its value */
    {"math", math_extract, math_score, math_is_equivalent, nonempty_check, false},
    /* a text, compared without case, width, blanks and a final full stop */
    {"exact", exact_extract, NULL, NULL, nonempty_check, false},
    /* a text, compared without case, signs and articles, as SQuAD's exact match */
    {"exact_match", exact_match_extract, NULL, NULL, nonempty_check, false},
    /* a text that begins with the gold answer and does not continue its last word */
    {"prefix", trimmed_extract, prefix_score, NULL, nonempty_check, false},
    /* the same text, byte by byte; an answer_filter comes before it */
    {"verbatim", verbatim_extract, NULL, NULL, verbatim_check, false},
    /* a text that the gold answer, a regular expression, matches */
    {"regex", trimmed_extract, regex_score, NULL, regex_check, true},
    /* F1 of words, as defined by SQuAD */
    {"f1", f1_extract, f1_score, NULL, nonempty_check, true},
    /* ROUGE-L's F1, without stemming */
    {"rouge_l", trimmed_extract, rouge_l_score, NULL, nonempty_check, true},
    /* BLEU-4 of a sentence, smoothed exponentially */
    {"bleu", trimmed_extract, bleu_score, NULL, nonempty_check, true},
};

static int letter_check(const char *gold, struct error *err) {
    return form_check(&graders[0], gold, "letter from A to J", err);
}

static int number_check(const char *gold, struct error *err) {
    return form_check(&graders[1], gold, "number", err);
}

const struct grader *grader_at(int i) {
    return i >= 0 && i < (int)ARRAY_LEN(graders) ? &graders[i] : NULL;
}

const struct grader *grader_find(const char *name, struct error *err) {
    struct buf names = {0};
    for (size_t i = 0; i < ARRAY_LEN(graders); i++) {
        if (strcmp(graders[i].name, name) == 0) {
            buf_release(&names);
            return &graders[i];
        }
        buf_printf(&names, "%s%s", i ? ", " : "", graders[i].name);
    }
    error_set(err, ERR_USAGE, "no grader '%s'; there are %s", name, names.data);
    buf_release(&names);
    return NULL;
}

const char *grader_name(const struct grader *g) {
    return g->name;
}

int grader_check(const struct grader *g, const char *gold, struct error *err) {
    return g->check(gold, err);
}

bool grader_extract(const struct grader *g, const char *text, struct buf *out) {
    size_t begin = out->len;
    buf_puts(out, "");
    bool found = g->extract(text, out);
    if (!found) out->data[out->len = begin] = 0;
    return found;
}

/* Scores a form, which was extracted from a text, against a gold answer. */
static double form_score(const struct grader *g, const char *form, const char *gold) {
    struct buf gold_form = {0};
    if (g->gold_is_literal) return g->score(form, gold);
    bool found = grader_extract(g, gold, &gold_form);
    double score = !found     ? 0
                   : g->score ? g->score(form, gold_form.data)
                              : strcmp(form, gold_form.data) == 0;
    buf_release(&gold_form);
    return score;
}

struct grade grader_grade(const struct grader *g, const char *text, const char *const *golds,
                          int n_golds) {
    struct buf form = {0};
    struct grade out = {.found = grader_extract(g, text, &form)};
    for (int i = 0; out.found && i < n_golds; i++)
        out.score = MAX(out.score, form_score(g, form.data, golds[i]));
    buf_release(&form);
    return out;
}

bool grader_is_decided(const struct grader *g, const char *text, const char *gold) {
    struct text_span s = text_span_of(text);
    if (g->score != prefix_score) return false;
    s.ptr = text_span_trim(s).ptr; // white space at the end may precede more text
    s.len = strlen(s.ptr);
    return prefix_is_decided(s, text_span_trim(text_span_of(gold)));
}

static bool forms_equivalent(const struct grader *g, const char *a, const char *b) {
    return strcmp(a, b) == 0 || (g->equivalent && g->equivalent(a, b));
}

char *grader_answer(const struct grader *g, const char *text) {
    struct buf form = {0};
    if (grader_extract(g, text, &form)) return form.data;
    buf_release(&form);
    return NULL;
}

bool grader_equivalent(const struct grader *g, const char *a, const char *b) {
    struct buf x = {0}, y = {0};
    bool both = grader_extract(g, a, &x) && grader_extract(g, b, &y);
    bool same = both && forms_equivalent(g, x.data, y.data);
    buf_release(&x);
    buf_release(&y);
    return same;
}

int grader_group_answers(const struct grader *g, const char *const *texts, int n, int *group) {
    struct buf *firsts = xcalloc((size_t)MAX(n, 1), sizeof *firsts);
    int n_groups = 0;
    for (int i = 0; i < n; i++) {
        struct buf form = {0};
        int k = 0;
        group[i] = -1;
        if (grader_extract(g, texts[i], &form)) {
            while (k < n_groups && !forms_equivalent(g, firsts[k].data, form.data)) k++;
            group[i] = k;
        }
        if (group[i] == n_groups)
            firsts[n_groups++] = form;
        else
            buf_release(&form);
    }
    for (int k = 0; k < n_groups; k++) buf_release(&firsts[k]);
    free(firsts);
    return n_groups;
}
