/*
 * text_rules: rules over words, as tables of regular expressions: they clean answers before people
 * read them, and extract the facts that users state about themselves.
 *
 * A rule that exceeds its limits (on a very long text that almost repeats itself) leaves the text
 * unchanged. Rules depend on one text only, so their result is a function of it. To change a rule,
 * change its line; its test cases are in test/cases/cleanup.txt and test/cases/facts.txt.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "memory/internal.h"

#include <pcre2.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Sentences may have any length, facts may not: the search covers the beginning of each sentence,
 * and the first sentences of a text. */
enum { STEPS = 20000000, FACT_CHARS = 60, SENTENCE_BYTES = 2048, SAID_BYTES = 256 << 10 };

/* A pattern is compiled once and cached; `text` is a literal in this file, so that its address
 * identifies it. */
static pcre2_code *pattern_of(const char *text) {
    enum { PATTERNS = 64 };
    static struct {
        const char *text;
        pcre2_code *code;
    } known[PATTERNS];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int code, i = 0;
    PCRE2_SIZE at;
    pthread_mutex_lock(&lock);
    while (i < PATTERNS && known[i].text && known[i].text != text) i++;
    CHECK(i < PATTERNS);
    if (!known[i].text)
        known[i].code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                                      PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    known[i].text = text;
    pthread_mutex_unlock(&lock);
    CHECK(known[i].code != NULL); /* the tables contain valid patterns only */
    return known[i].code;
}

static pcre2_match_context *limits_new(void) {
    pcre2_match_context *m = pcre2_match_context_create(NULL);
    pcre2_set_match_limit(m, STEPS);
    return m;
}

/* Texts here were cleaned by buf_add_sanitized, so UTF-8 is not checked again at every offset. */

/* True if the pattern matches in the text; `group` (may be NULL) receives its first group. */
static bool pattern_in(const char *pattern, const char *text, size_t len, struct buf *group) {
    pcre2_code *p = pattern_of(pattern);
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(p, NULL);
    pcre2_match_context *limits = limits_new();
    bool found = pcre2_match(p, (PCRE2_SPTR)text, len, 0, PCRE2_NO_UTF_CHECK, m, limits) > 0;
    if (found && group) {
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(m);
        buf_add(group, text + at[2], at[3] - at[2]);
    }
    pcre2_match_context_free(limits);
    pcre2_match_data_free(m);
    return found;
}

/* Replaces every match in `text`. The result always fits: no replacement is longer than its match.
 */
static void pattern_replace(const char *pattern, const char *to, struct buf *text) {
    pcre2_code *p = pattern_of(pattern);
    pcre2_match_context *limits = limits_new();
    PCRE2_SIZE room = text->len + 1;
    char *out = xmalloc(room);
    int rc = pcre2_substitute(p, (PCRE2_SPTR)text->data, text->len, 0,
                              PCRE2_SUBSTITUTE_GLOBAL | PCRE2_NO_UTF_CHECK, NULL, limits,
                              (PCRE2_SPTR)to, PCRE2_ZERO_TERMINATED, (PCRE2_UCHAR *)out, &room);
    if (rc > 0) {
        text->len = 0;
        buf_add(text, out, room);
    }
    free(out);
    pcre2_match_context_free(limits);
}

/* answers */

/*
 * Applied in this order, each to the output of the previous one. No replacement is longer than its
 * match. A run of blanks may be as long as the text: a pattern that needs the end of a run must
 * match from the start of the run only ("(?<!\\s)\\s++"), else the engine would search to its end
 * from each position.
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
    if (cut && !pattern_in(SENTENCE_END "\\z", b.data, b.len, NULL)) /* an unfinished sentence */
        pattern_replace("(?s)\\A(.*" SENTENCE_END ").*\\z", "$1", &b);
    bool good = pattern_in("[\\p{L}\\p{N}]", b.data, b.len, NULL);
    if (good) buf_add(out, b.data, b.len);
    buf_release(&b);
    return good;
}

const char *answer_fallback(enum language l) {
    static const char *const words[N_LANGUAGES] = {
        [LANG_JA] = "申し訳ございませんが、適切な回答を生成できませんでした。",
        [LANG_EN] = "I am sorry, but I could not produce a proper answer.",
        [LANG_ZH] = "抱歉，未能生成合适的回答。"};
    return words[l];
}

/* facts */

/* Patterns for one sentence that is not a question, with white space trimmed; the first group is
 * the fact. The keys are those of conversation_merge_facts. With `list`, an enumeration becomes
 * several facts. */
#define JA_I "(?:私|わたし|僕|ぼく|俺|おれ|自分|あたし)"
#define JA_ASK "(?!何|なに|なん|誰|だれ|どんな|どう|[^。！]*(?:ない|ません))" /* no denial */
#define JA_FROM "(?:^|[、，\\s]|" JA_I "[はも])"
#define JA_IS "(?:です|だよ?|でございます|$|[。！])"
static const struct {
    const char *key;
    bool list;
    const char *pattern;
} fact_patterns[] = {
    {"名前", false,
     JA_I "の名前は" JA_ASK
          "(?|[「『]([^」』]{1,20})[」』]|([^「」『』、。！\\s]{1,20}?))(?:と[言い申]|、|" JA_IS
          ")"},
    {"名前", false,
     JA_I "は[「『]?" JA_ASK "([^「」『』は、。！\\s]{1,20}?)[」』]?と(?:言い|いい|申し)ます"},
    {"名前", false, "(?:^|[、，\\s])[「『]?([^「」『』は、。！\\s]{1,20}?)[」』]?と(?:呼|よ)んで"},
    {"興味", true, "趣味は" JA_ASK "([^。！]{1,60}?)" JA_IS},
    {"興味", true, JA_FROM "(は?[^は、。！\\s]{1,30}?)に興味が(?:あり|ある)"},
    {"好きなもの", true,
     JA_FROM JA_ASK "(は?[^は、。！\\s]{1,30}?)[がを](?:大|一番|とても)?好き"
                    "(?:です|だ(?!った)|なんです|で[、，]|$|[。！])"},
    {"好きなもの", true, "好きな(?:もの|こと|食べ物|飲み物)は" JA_ASK "([^。！]{1,60}?)" JA_IS},
    {"その他の情報", false,
     "(" JA_I "は[^、。！]{1,30}?(?:に住んで|で働いて|を勉強して|出身で)[^、。！]{0,6})"},
    {"その他の情報", false,
     JA_I "は(?!元気|大丈夫|平気|賛成|反対|同じ|そう|好き)" JA_ASK
          "([^はがを、。！\\s]{1,12}?)(?<![のん好])です"},
    {"名前", false,
     "(?i:\\bmy name(?:['’]s| is)) (?!not\\b|what\\b)(\\p{L}[\\p{L}'’-]*(?: "
     "\\p{Lu}[\\p{L}'’-]*){0,2})"},
    {"名前", false, "(?i:\\bcall me) (\\p{Lu}[\\p{L}'’-]*)"},
    {"興味", true, "(?i)\\bmy (?:hobby|hobbies|interests?) (?:is|are) ([^.!\\n]{1,60})"},
    {"興味", true, "(?i)\\bI(?:['’]m| am) (?:really |very )?interested in ([^.!;\\n]{1,60})"},
    {"好きなもの", true,
     "(?i)\\bI (?:really |also |especially )?(?:like|love|enjoy) "
     "(?!it\\b|this\\b|that\\b|you\\b|to\\b|how\\b|your\\b)"
     "([^.!;\\n]{1,60}?)(?= but\\b| because\\b|[.!;\\n]|$)"},
    {"その他の情報", false,
     "(?i)\\b(I (?:live in|work (?:as|at|in|for)|come from|am from|study) [^.!,;\\n]{1,40})"},
    {"名前", false,
     "我(?:的名字(?:是|叫)|名叫|的姓名是|叫)(?!什么|啥|谁|他|她|它|你|了|不|做)([^，。！、\\s]{1,"
     "15})"},
    {"興味", true, "我的(?:爱好|兴趣|业余爱好)(?:是|有|包括)(?!什么|啥|哪)([^。！\\n]{1,60})"},
    {"興味", true, "我对([^，。！\\s]{1,20}?)(?:很|非常)?(?:有|感)兴趣"},
    {"好きなもの", true,
     "我(?:很|最|也|非常|特别)?(?:喜欢|爱)(?!你|他|她|它|什么|啥|这|那|上了)([^，。！\\s]{1,30})"},
    {"その他の情報", false,
     "(我(?:住在|来自|在[^，。！\\s]{1,12}工作|是(?!说|不|否|想|在|要|谁))[^，。！\\s]{0,20})"},
};

/* True for a sentence that asks a question. */
static bool is_question(const char *p, size_t n) {
    return pattern_in("(?:[?？]|か[。！]?|[吗呢][。！]?)\\s*\\z", p, n, NULL) ||
           pattern_in(
               "(?i)\\A\\s*(?:what|who|where|when|why|how|which|do|does|did|is|are|can|could|"
               "would|should)\\b",
               p, n, NULL);
}

/* The next sentence of a text that is not a question; false at the end of the text. */
static bool statement_next(const struct buf *text, size_t *at, struct buf *one) {
    while (*at < text->len) {
        one->len = 0;
        if (!pattern_in("\\A((?s:.+?)(?:[。！？!?\\n]|\\.(?=\\s)|\\z)\\s*)", text->data + *at,
                        text->len - *at, one))
            return false;
        *at += one->len;
        if (!is_question(one->data, one->len)) return true;
    }
    return false;
}

void statements_extract(const char *text, struct buf *out) {
    struct buf all = {0}, one = {0};
    buf_add_sanitized(&all, text, strlen(text));
    for (size_t at = 0; statement_next(&all, &at, &one);) buf_add(out, one.data, one.len);
    buf_puts(out, "");
    buf_release(&all);
    buf_release(&one);
}

static void fact_put(json_t *facts, const char *key, const char *text, size_t len, bool list) {
    while (len && strchr(" \t.", *text)) text++, len--;
    while (len && strchr(" \t.", text[len - 1])) len--;
    json_t *v = len ? json_stringn(text, utf8_prefix_len(text, len, FACT_CHARS)) : NULL;
    if (!v) return;
    if (!list && strcmp(key, "名前") == 0) {
        json_object_set_new(facts, key, v);
        return;
    }
    if (!json_object_get(facts, key)) json_object_set_new(facts, key, json_array());
    json_array_append_new(json_object_get(facts, key), v);
}

/* Splits "chess, go and shogi" into three facts. */
static void list_put(json_t *facts, const char *key, struct buf *text) {
    pattern_replace("\\s*(?:[、，,;；・/／]|\\band\\b)\\s*(?:and\\b\\s*)?", "\n", text);
    for (size_t n, at = 0; at < text->len; at += n + 1) {
        n = strcspn(text->data + at, "\n");
        fact_put(facts, key, text->data + at, n, true);
    }
}

/* Applies all rules to one sentence. */
static void sentence_facts(const char *p, size_t n, json_t *facts) {
    for (size_t i = 0; i < ARRAY_LEN(fact_patterns); i++) {
        struct buf group = {0};
        if (pattern_in(fact_patterns[i].pattern, p, n, &group)) {
            buf_puts(&group, "");
            if (fact_patterns[i].list)
                list_put(facts, fact_patterns[i].key, &group);
            else
                fact_put(facts, fact_patterns[i].key, group.data, group.len, false);
        }
        buf_release(&group);
    }
}

json_t *facts_extract(const char *text) {
    json_t *facts = json_object();
    struct buf all = {0}, one = {0};
    buf_add_sanitized(&all, text, strnlen(text, SAID_BYTES));
    for (size_t at = 0; statement_next(&all, &at, &one);) {
        pattern_replace("(?<!\\s)\\s++\\z", "", &one);
        sentence_facts(one.data, utf8_complete_len(one.data, MIN(one.len, (size_t)SENTENCE_BYTES)),
                       facts);
    }
    buf_release(&all);
    buf_release(&one);
    return facts;
}

/* The terms of a text, sorted: [n] pointers into the output of terms_index, where a blank ends each
 * term. */
struct term_set {
    struct buf terms;
    const char **v;
    int64_t n;
};

/* Compares two terms, each ended by a blank or NUL. */
static int word_order(const void *a, const void *b) {
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    size_t n = strcspn(x, " "), m = strcspn(y, " ");
    int order = memcmp(x, y, MIN(n, m));
    return order ? order : (n > m) - (n < m);
}

static void said_read(struct term_set *s, const char *text) {
    struct error err;
    *s = (struct term_set){0};
    if (terms_index(text, strlen(text), &s->terms, &s->n, &err) != OK) s->n = 0;
    s->v = xcalloc((size_t)s->n + 1, sizeof *s->v);
    const char *p = s->terms.data;
    for (int64_t i = 0; i < s->n; i++, p += strcspn(p, " ") + 1) s->v[i] = p;
    qsort(s->v, (size_t)s->n, sizeof *s->v, word_order);
}

static void said_release(struct term_set *s) {
    free(s->v);
    buf_release(&s->terms);
}

static bool term_was_said(const struct term_set *s, const struct query_term *t) {
    const char *text = t->text;
    int64_t lo = 0, hi = s->n; /* finds the first term that does not sort before t */
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (word_order(&s->v[mid], &text) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == s->n) return false;
    return t->prefix ? strncmp(s->v[lo], text, strlen(text)) == 0
                     : word_order(&s->v[lo], &text) == 0;
}

/* True if the text contains at least half of a fact's terms, by weight, and at least one that is
 * not a common word. */
static bool fact_is_grounded(const char *text, const struct term_set *said) {
    struct query_term terms[QUERY_TERMS];
    struct error err;
    double all = 0, there = 0;
    bool any = false;
    int n =
        utf8_prefix_len(text, strlen(text), 1) < strlen(text) ? terms_query(text, terms, &err) : 0;
    for (int i = 0; i < n; i++) {
        bool found = term_was_said(said, &terms[i]);
        all += terms[i].weight;
        there += found ? terms[i].weight : 0;
        any = any || (found && terms[i].weight >= 1);
    }
    return any && 2 * there >= all;
}

json_t *facts_filter_grounded(const json_t *facts, const char *text) {
    json_t *out = json_object(), *v, *member;
    struct term_set said;
    const char *key;
    size_t i;
    said_read(&said, text);
    json_object_foreach ((json_t *)(uintptr_t)facts, key, v) {
        if (json_is_string(v) && fact_is_grounded(json_string_value(v), &said))
            json_object_set(out, key, v);
        if (json_is_array(v)) json_object_set_new(out, key, json_array());
        json_array_foreach (v, i, member)
            if (json_is_string(member) && fact_is_grounded(json_string_value(member), &said))
                json_array_append(json_object_get(out, key), member);
    }
    said_release(&said);
    return out;
}
