/*
 * text_rules: regular expressions, in tables, that clean up a model's answers; and the facts of a
 * conversation, which memory_rules.c finds.
 *
 * A rule that exceeds the match limit (pattern.c) has no effect. Test cases are in
 * test/cases/cleanup.txt and test/cases/facts.txt.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <stdlib.h>
#include <string.h>

enum { FACT_MAX_CHARS = 60 };

/* answers */

/*
 * Rules in the order of application; `what` describes the text that a rule removes. No replacement
 * may be longer than its match. White space may be as long as the text: a pattern that needs the
 * end of a run of white space must match from the run's start only ("(?<!\\s)\\s++"), else PCRE2
 * would search to the end from each position, in quadratic time.
 */
static const struct {
    const char *what, *pattern, *to;
} cleanup[] = {
    {"control characters, and bytes that were not UTF-8", "[\\x{fffd}\\x{200b}]", ""},
    {"thinking aloud", "(?s)<think(?:ing)?>.*?(?:</think(?:ing)?>|\\z)", ""},
    {"marks of a chat's turns", "<\\|[A-Za-z_]{1,24}\\|>|</?(?:start|end)_of_turn>", ""},
    {"a speaker's label", "(?i)\\A\\s*(?:アシスタント|回答|答え|助手|AI|assistant|answer)\\s*[:：]",
     ""},
    {"lines of markup", "(?m)^\\h*(?:-{3,}|={3,}|_{3,}|\\*{3,})\\h*$", ""},
    {"a heading's mark", "(?m)^\\h*#{1,6}\\h+", ""},
    {"emphasis, but powers", "(?<![0-9A-Za-z])(\\*{2,3})(?=\\S)([^*\\n]+?)(?<=\\S)\\1", "$2"},
    {"links, but their words", "\\[([^\\]\\n]{1,1000})\\]\\([^)\\n]{1,2000}\\)", "$1"},
    {"marks of code", "`([^`\\n]+)`", "$1"},
    {"stuttered characters, but digits", "([^\\d\\s])\\1{4,}", "$1"},
    {"stuttered words", "\\b(\\w+)(?:\\s+\\1\\b){2,}", "$1"},
    {"stuttered passages, but numbers", "(?!\\d{8})(\\S[^\\n]{7,399}?)(?:\\s*+\\1)+", "$1"},
    {"blanks at the end of a line", "(?m)(?<!\\h)\\h++$", ""},
    {"empty lines", "\\n{3,}", "\n\n"},
    {"runs of blanks within a line", "(?<=\\S) {3,}", " "},
    {"blanks around all", "\\A\\s+|(?<!\\s)\\s++\\z", ""},
};
#define SENTENCE_END "(?:[。！？!?…]|\\.(?=\\s|[」』”\"）)]|\\z))[」』”\"）)]*"

bool answer_clean(const char *text, bool cut, struct buf *out) {
    struct buf b = {0};
    buf_add_sanitized(&b, text, strlen(text));
    buf_puts(&b, "");
    for (size_t i = 0; i < ARRAY_LEN(cleanup); i++)
        pattern_replace(cleanup[i].pattern, cleanup[i].to, &b);
    if (cut && !pattern_find(SENTENCE_END "\\z", b.data, b.len, NULL)) /* unfinished */
        pattern_replace("(?s)\\A(.*" SENTENCE_END ").*\\z", "$1", &b);
    bool has_text = pattern_find("[\\p{L}\\p{N}]", b.data, b.len, NULL);
    if (has_text) buf_add(out, b.data, b.len);
    buf_release(&b);
    return has_text;
}

const char *answer_fallback(enum language l) {
    static const char *const words[N_LANGUAGES] = {
        [LANG_JA] = "申し訳ございませんが、適切な回答を生成できませんでした。",
        [LANG_EN] = "I am sorry, but I could not produce a proper answer.",
        [LANG_ZH] = "抱歉，未能生成合适的回答。"};
    return words[l];
}

/* facts */

/* True for a sentence that ends or begins like a question. */
static bool is_question(const char *p, size_t n) {
    return pattern_find("(?:[?？]|か[。！]?|[吗呢][。！]?)\\s*\\z", p, n, NULL) ||
           pattern_find(
               "(?i)\\A\\s*(?:what|who|where|when|why|how|which|do|does|did|is|are|can|could|"
               "would|should)\\b",
               p, n, NULL);
}

/* The next sentence of a text that is not a question; false at the end of the text. */
static bool statement_next(const struct buf *text, size_t *pos, struct buf *sentence) {
    while (*pos < text->len) {
        sentence->len = 0;
        if (!pattern_find("\\A((?s:.+?)(?:[。！？!?\\n]|\\.(?=\\s)|\\z)\\s*)", text->data + *pos,
                          text->len - *pos, sentence))
            return false;
        *pos += sentence->len;
        if (!is_question(sentence->data, sentence->len)) return true;
    }
    return false;
}

void statements_extract(const char *text, struct buf *out) {
    struct buf all = {0}, sentence = {0};
    buf_add_sanitized(&all, text, strlen(text));
    for (size_t pos = 0; statement_next(&all, &pos, &sentence);)
        buf_add(out, sentence.data, sentence.len);
    buf_puts(out, "");
    buf_release(&all);
    buf_release(&sentence);
}

/* The key of conversation_merge_facts for an attribute of a memory. */
static const char *fact_key(const char *attribute) {
    static const char *const keys[][2] = {
        {"name", "名前"}, {"hobby", "興味"}, {"likes", "好きなもの"}};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        if (strcmp(attribute, keys[i][0]) == 0) return keys[i][1];
    return "その他の情報";
}

/* Adds a fact of memory_rules_extract. Facts without a key of their own become "residence: Osaka".
 */
static void fact_add(json_t *facts, const json_t *fact) {
    const char *attribute = json_get_string(fact, "attribute"), *key = fact_key(attribute),
               *value = json_get_string(fact, "value");
    char *text =
        strcmp(key, "その他の情報") == 0 ? xasprintf("%s: %s", attribute, value) : xstrdup(value);
    json_t *v = json_stringn(text, utf8_prefix_len(text, strlen(text), FACT_MAX_CHARS));
    if (strcmp(attribute, "name") == 0) {
        json_object_set_new(facts, key, v);
    } else {
        if (!json_object_get(facts, key)) json_object_set_new(facts, key, json_array());
        json_array_append_new(json_object_get(facts, key), v);
    }
    free(text);
}

json_t *facts_extract(const char *text) {
    json_t *facts = json_object(), *found = memory_rules_extract(text, NULL, false), *fact;
    size_t i;
    json_array_foreach (json_object_get(found, "facts"), i, fact)
        if (strcmp(json_get_string(fact, "change"), "holds") == 0) fact_add(facts, fact);
    json_decref(found);
    return facts;
}

/* The sorted terms of a text. v [n] are pointers into `terms`, the output of terms_index, in which
 * a space follows each term. */
struct term_set {
    struct buf terms;
    const char **v;
    int64_t n;
};

/* Compares two terms, each terminated by a space or NUL. */
static int term_compare(const void *a, const void *b) {
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    size_t n = strcspn(x, " "), m = strcspn(y, " ");
    int order = memcmp(x, y, MIN(n, m));
    return order ? order : (n > m) - (n < m);
}

static void term_set_init(struct term_set *s, const char *text) {
    struct error err;
    *s = (struct term_set){0};
    if (terms_index(text, strlen(text), &s->terms, &s->n, &err) != OK) s->n = 0;
    s->v = xcalloc((size_t)s->n + 1, sizeof *s->v);
    const char *p = s->terms.data;
    for (int64_t i = 0; i < s->n; i++, p += strcspn(p, " ") + 1) s->v[i] = p;
    qsort(s->v, (size_t)s->n, sizeof *s->v, term_compare);
}

static void term_set_release(struct term_set *s) {
    free(s->v);
    buf_release(&s->terms);
}

static bool term_set_has(const struct term_set *s, const struct query_term *t) {
    const char *text = t->text;
    int64_t lo = 0, hi = s->n; /* finds the first term that does not sort before t */
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (term_compare(&s->v[mid], &text) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == s->n) return false;
    return t->prefix ? strncmp(s->v[lo], text, strlen(text)) == 0
                     : term_compare(&s->v[lo], &text) == 0;
}

/* True if `source` has at least half of the terms of the fact `text`, by weight, and at least one
 * term that is not a stop word. A fact of one character is never grounded. */
static bool fact_is_grounded(const char *text, const struct term_set *source) {
    struct query_term terms[QUERY_TERMS];
    struct error err;
    double total_weight = 0, found_weight = 0;
    bool any_rare = false;
    int n =
        utf8_prefix_len(text, strlen(text), 1) < strlen(text) ? terms_query(text, terms, &err) : 0;
    for (int i = 0; i < n; i++) {
        bool found = term_set_has(source, &terms[i]);
        total_weight += terms[i].weight;
        found_weight += found ? terms[i].weight : 0;
        any_rare = any_rare || (found && terms[i].weight >= 1);
    }
    return any_rare && 2 * found_weight >= total_weight;
}

json_t *facts_filter_grounded(const json_t *facts, const char *text) {
    json_t *out = json_object(), *v, *member;
    struct term_set source;
    const char *key;
    size_t i;
    term_set_init(&source, text);
    json_object_foreach ((json_t *)(uintptr_t)facts, key, v) {
        if (json_is_string(v) && fact_is_grounded(json_string_value(v), &source))
            json_object_set(out, key, v);
        if (json_is_array(v)) json_object_set_new(out, key, json_array());
        json_array_foreach (v, i, member)
            if (json_is_string(member) && fact_is_grounded(json_string_value(member), &source))
                json_array_append(json_object_get(out, key), member);
    }
    term_set_release(&source);
    return out;
}
