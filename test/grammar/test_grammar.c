/*
 * test_grammar: constrained decoding.
 *
 * Texts that each front end accepts are in test/cases/grammar.txt. In addition: regular expressions
 * are compared with PCRE2 on all short texts, random context-free grammars with a naive recogniser,
 * numbers between bounds with arithmetic, masks with the result of accepting each token, and random
 * replies under masks and a token limit with a small validator of schemas; the time for hostile
 * sources is bounded. "--bench FILE" prints the time of masks with the tokenizer of a
 * tokenizer.json or GGUF file.
 */
/* levels: once */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include "fixture.h"
#include "grammar/grammar.h"
#include "model/internal.h"

#include <pcre2.h>
#include <time.h>

static struct grammar *assert_compiled(struct grammar *g, const struct error *err) {
    if (!g) fail_msg("%s", err->text);
    return g;
}

static struct grammar *compile(const char *kind, const char *text, struct error *err) {
    size_t n = strlen(text);
    if (strcmp(kind, "regex") == 0) return grammar_new_regex(text, n, err);
    if (strcmp(kind, "gbnf") == 0) return grammar_new_gbnf(text, n, err);
    return grammar_new_json_schema(text, n, strcmp(kind, "compact") == 0, err);
}

/* 'y': a complete text, 'p': a prefix of one, 'n': neither. */
static char classify(struct grammar_machine *m, const void *text, size_t n) {
    struct grammar_state s = grammar_state_new(m);
    bool accepted = grammar_accept_bytes(&s, text, n);
    char out = !accepted ? 'n' : grammar_is_final(&s) ? 'y' : 'p';
    grammar_state_release(&s);
    return out;
}

/* the table of cases */

struct case_source {
    char kind[16];
    struct buf text;
    struct grammar *g;
    struct grammar_machine *m;
    int line;
    bool open; /* lines may still be added */
};

static void case_source_release(struct case_source *s) {
    grammar_machine_free(s->m);
    grammar_free(s->g);
    buf_release(&s->text);
    *s = (struct case_source){0};
}

static void case_source_compile(struct case_source *s) {
    struct error err;
    if (!s->open) return;
    s->open = false;
    s->g = compile(s->kind, s->text.data, &err);
    if (!s->g) fail_msg("line %d: refused: %s", s->line, err.text);
    s->m = grammar_machine_new(s->g, NULL, 0);
}

static void replace_line_breaks(char *text) {
    for (char *p; (p = strstr(text, "␊")) != NULL;) {
        *p = '\n';
        memmove(p + 1, p + strlen("␊"), strlen(p + strlen("␊")) + 1);
    }
}

static void check_refused(struct case_source *s, const char *words, int line) {
    struct error err;
    struct grammar *g = compile(s->kind, s->text.data, &err);
    if (g) fail_msg("line %d: '%s' is not refused", line, s->text.data);
    if (!strstr(err.text, words)) fail_msg("line %d: '%s' lacks '%s'", line, err.text, words);
    assert_true(err.code < 0);
    s->open = false;
}

static void check_forced(const struct case_source *s, const char *want, int line) {
    struct buf b = {0};
    struct grammar_state state = grammar_state_new(s->m);
    size_t n = grammar_jump_forward(&state, 1000, &b);
    if (n != strlen(want) || (n && memcmp(b.data, want, n) != 0))
        fail_msg("line %d: '%s' is forced", line, b.data ? b.data : "");
    grammar_state_release(&state);
    buf_release(&b);
}

static void check_count(const struct case_source *s, const char *arg, int line) {
    struct strings texts = {0};
    struct error err;
    int n = grammar_enumerate(s->g, 1000, &texts, &err);
    if (n != atoi(arg)) fail_msg("line %d: %d texts: %s", line, n, n < 0 ? err.text : "");
    for (int i = 0; i < texts.n; i++)
        assert_int_equal(classify(s->m, texts.v[i], strlen(texts.v[i])), 'y');
    strings_release(&texts);
}

static void check_line(struct case_source *s, const char *word, char *arg, int line) {
    static const char *const words[] = {"yes", "part", "no"};
    case_source_compile(s);
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        if (strcmp(word, words[i]) != 0) continue;
        char got = classify(s->m, arg, strlen(arg));
        if (got != word[0]) fail_msg("line %d: '%s' is '%c', not '%s'", line, arg, got, word);
        return;
    }
    if (strcmp(word, "forced") == 0)
        check_forced(s, arg, line);
    else if (strcmp(word, "count") == 0)
        check_count(s, arg, line);
    else
        fail_msg("line %d: unknown word '%s'", line, word);
}

static void test_cases(void **state) {
    (void)state;
    struct buf file = {0};
    struct error err;
    struct case_source s = {0};
    int n_line = 0, n_cases = 0;
    if (file_read("test/cases/grammar.txt", 1 << 20, &file, &err) != OK) fail_msg("%s", err.text);
    for (char *line = file.data, *next; line && *line; line = next) {
        char *end = strchr(line, '\n');
        next = end ? end + 1 : NULL;
        if (end) *end = 0;
        n_line++;
        if (*line == 0 || *line == '#') continue;
        replace_line_breaks(line);
        char *arg = strchr(line, ' ');
        if (arg) *arg++ = 0;
        if (!arg) arg = line + strlen(line);
        n_cases++;
        if (strcmp(line, "+") == 0) {
            assert_true(s.open);
            buf_printf(&s.text, "\n%s", arg);
        } else if (strcmp(line, "refused") == 0) {
            check_refused(&s, arg, n_line);
        } else if (strcmp(line, "regex") == 0 || strcmp(line, "gbnf") == 0 ||
                   strcmp(line, "schema") == 0 || strcmp(line, "compact") == 0) {
            case_source_release(&s);
            s.open = true;
            s.line = n_line;
            snprintf(s.kind, sizeof s.kind, "%s", line);
            buf_puts(&s.text, arg);
        } else {
            check_line(&s, line, arg, n_line);
        }
    }
    case_source_release(&s);
    buf_release(&file);
    assert_true(n_cases > 300);
}

static void test_choices(void **state) {
    (void)state;
    static const char *const texts[] = {"北", "南", "north", "nort", "", "北"};
    struct error err;
    struct strings out = {0};
    struct grammar *g = assert_compiled(grammar_new_choices(texts, 6, &err), &err);
    assert_int_equal(grammar_enumerate(g, 5, &out, &err), 5);
    assert_string_equal(out.v[0], "");
    assert_string_equal(out.v[2], "north");
    strings_release(&out);
    assert_int_equal(grammar_enumerate(g, 4, &out, &err), ERR_MEMORY);
    strings_release(&out);
    grammar_free(g);
    assert_null(grammar_new_choices(NULL, 0, &err));
}

/* every short text */

/* Calls fn with every sequence of at most `max_len` of the n symbols. */
typedef void (*text_fn)(void *ctx, const char *text, size_t len);
static void for_each_text(const char *const *symbols, int n, int max_len, struct buf *text,
                          text_fn fn, void *ctx) {
    fn(ctx, text->data ? text->data : "", text->len);
    for (int i = 0; i < n && max_len > 0; i++) {
        size_t len = text->len;
        buf_puts(text, symbols[i]);
        for_each_text(symbols, n, max_len - 1, text, fn, ctx);
        text->len = len;
    }
}

static void random_regex(struct rng *r, int depth, struct buf *out) {
    static const char *const atoms[] = {"a",    "b",      "猫",       ".",     "[ab]",
                                        "[^a]", "[b-猫]", "\\p{Han}", "[a猫]", "\\w"};
    static const char *const quantifiers[] = {"",  "",    "",      "*",      "+",
                                              "?", "{2}", "{1,2}", "{0,3}?", "*?"};
    int n = 1 + (int)rng_below(r, 3);
    for (int i = 0; i < n; i++) {
        if (depth > 0 && rng_below(r, 3) == 0) {
            buf_puts(out, "(");
            random_regex(r, depth - 1, out);
            if (rng_below(r, 2)) {
                buf_puts(out, "|");
                if (rng_below(r, 4)) random_regex(r, depth - 1, out);
            }
            buf_puts(out, ")");
        } else {
            buf_puts(out, atoms[rng_below(r, ARRAY_LEN(atoms))]);
        }
        buf_puts(out, quantifiers[rng_below(r, ARRAY_LEN(quantifiers))]);
    }
}

struct regex_pair {
    struct grammar_machine *m;
    pcre2_code *code;
    pcre2_match_data *match;
    const char *pattern;
    int n_yes;
};

static void compare_regex(void *ctx, const char *text, size_t len) {
    struct regex_pair *p = ctx;
    uint32_t whole = PCRE2_ANCHORED | PCRE2_ENDANCHORED;
    int rc = pcre2_match(p->code, (PCRE2_SPTR)text, len, 0, whole, p->match, NULL);
    char got = classify(p->m, text, len);
    p->n_yes += rc >= 0;
    if ((rc >= 0) != (got == 'y'))
        fail_msg("'%s' on '%.*s': PCRE2 returns %d, the grammar '%c'", p->pattern, (int)len, text,
                 rc, got);
}

static void test_regex_pcre2(void **state) {
    (void)state;
    static const char *const symbols[] = {"a", "b", "猫", "é"};
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    int n_yes = 0;
    for (int i = 0; i < 400; i++) {
        struct buf pattern = {0}, text = {0};
        struct error err;
        int code;
        PCRE2_SIZE at;
        random_regex(&r, 2, &pattern);
        struct regex_pair p = {.pattern = pattern.data};
        struct grammar *g = assert_compiled(compile("regex", pattern.data, &err), &err);
        p.code = pcre2_compile((PCRE2_SPTR)pattern.data, pattern.len, PCRE2_UTF, &code, &at, NULL);
        assert_non_null(p.code);
        p.match = pcre2_match_data_create_from_pattern(p.code, NULL);
        p.m = grammar_machine_new(g, NULL, 0);
        for_each_text(symbols, 4, 4, &text, compare_regex, &p);
        n_yes += p.n_yes;
        pcre2_match_data_free(p.match);
        pcre2_code_free(p.code);
        grammar_machine_free(p.m);
        grammar_free(g);
        buf_release(&pattern);
        buf_release(&text);
    }
    assert_true(n_yes > 4000);
}

/* random context-free grammars and a naive recogniser */

enum { CFG_RULES = 4, CFG_ALTS = 3, CFG_LEN = 3, CFG_TEXT = 7 };
struct cfg {
    int n_alts[CFG_RULES];
    int len[CFG_RULES][CFG_ALTS];
    int sym[CFG_RULES][CFG_ALTS][CFG_LEN]; /* 0..CFG_RULES-1: a rule; 'a', 'b' */
    bool left;                             /* a rule is left-recursive */
    struct grammar_machine *m;
    int n_yes;
    bool prefixes[2 << CFG_TEXT]; /* prefixes of longer texts */
};

static void cfg_make(struct cfg *c, struct rng *r, struct buf *out) {
    for (int i = 0; i < CFG_RULES; i++) {
        c->n_alts[i] = 1 + (int)rng_below(r, CFG_ALTS);
        buf_printf(out, i == 0 ? "root ::=" : "r%d ::=", i);
        for (int k = 0; k < c->n_alts[i]; k++) {
            c->len[i][k] = (int)rng_below(r, CFG_LEN + 1);
            if (k > 0) buf_puts(out, " |");
            if (c->len[i][k] == 0) buf_puts(out, " \"\"");
            for (int j = 0; j < c->len[i][k]; j++) {
                bool rule = rng_below(r, 2);
                c->sym[i][k][j] = rule ? (int)rng_below(r, CFG_RULES) : 'a' + (int)rng_below(r, 2);
                if (!rule)
                    buf_printf(out, " \"%c\"", c->sym[i][k][j]);
                else
                    buf_printf(out, c->sym[i][k][j] ? " r%d" : " root", c->sym[i][k][j]);
            }
        }
        buf_puts(out, "\n");
    }
}

static bool cfg_nullable(const struct cfg *c, const bool *nullable, int rule) {
    for (int k = 0; k < c->n_alts[rule]; k++) {
        bool all = true;
        for (int j = 0; j < c->len[rule][k]; j++)
            all = all && c->sym[rule][k][j] < CFG_RULES && nullable[c->sym[rule][k][j]];
        if (all) return true;
    }
    return false;
}

static void cfg_check_left(struct cfg *c) {
    bool nullable[CFG_RULES] = {0}, reach[CFG_RULES][CFG_RULES] = {{0}};
    for (int pass = 0; pass < CFG_RULES; pass++)
        for (int i = 0; i < CFG_RULES; i++)
            nullable[i] = nullable[i] || cfg_nullable(c, nullable, i);
    for (int i = 0; i < CFG_RULES; i++)
        for (int k = 0; k < c->n_alts[i]; k++)
            for (int j = 0; j < c->len[i][k]; j++) {
                int s = c->sym[i][k][j];
                if (s >= CFG_RULES) break;
                reach[i][s] = true;
                if (!nullable[s]) break;
            }
    for (int k = 0; k < CFG_RULES; k++)
        for (int i = 0; i < CFG_RULES; i++)
            for (int j = 0; j < CFG_RULES; j++)
                reach[i][j] = reach[i][j] || (reach[i][k] && reach[k][j]);
    for (int i = 0; i < CFG_RULES; i++) c->left = c->left || reach[i][i];
}

/* The set of positions where the rule may end when it begins at one of `from`. No left
 * recursion. */
static uint32_t cfg_ends(const struct cfg *c, int rule, uint32_t from, const char *text, size_t n) {
    uint32_t out = 0;
    for (int k = 0; k < c->n_alts[rule]; k++) {
        uint32_t at = from;
        for (int j = 0; j < c->len[rule][k] && at; j++) {
            int s = c->sym[rule][k][j];
            uint32_t next = 0;
            if (s < CFG_RULES) {
                next = cfg_ends(c, s, at, text, n);
            } else {
                for (size_t i = 0; i < n; i++)
                    if ((at >> i & 1) && text[i] == s) next |= 1u << (i + 1);
            }
            at = next;
        }
        out |= at;
    }
    return out;
}

static size_t text_index(const char *text, size_t n) {
    size_t i = 1;
    for (size_t k = 0; k < n; k++) i = 2 * i + (text[k] == 'b');
    return i;
}

static void compare_cfg(void *ctx, const char *text, size_t n) {
    struct cfg *c = ctx;
    bool want = cfg_ends(c, 0, 1, text, n) >> n & 1;
    char got = classify(c->m, text, n);
    c->n_yes += want;
    if (want != (got == 'y'))
        fail_msg("'%.*s': naive returns %d, the grammar '%c'", (int)n, text, want, got);
    for (size_t i = text_index(text, n); want && i > 0; i /= 2) c->prefixes[i] = true;
}

/* A prefix of a short text is accepted, and an accepted text with a small grammar_min_remaining is
 * such a prefix. */
static void compare_prefix(void *ctx, const char *text, size_t n) {
    struct cfg *c = ctx;
    struct grammar_state s = grammar_state_new(c->m);
    bool alive = grammar_accept_bytes(&s, text, n), known = c->prefixes[text_index(text, n)];
    if (known) assert_true(alive);
    if (alive && n + (size_t)grammar_min_remaining(&s) <= CFG_TEXT) assert_true(known);
    grammar_state_release(&s);
}

static void test_random_grammars(void **state) {
    (void)state;
    static const char *const symbols[] = {"a", "b"};
    struct rng r = rng_make(2, RNG_TEST, 0, 0);
    int n_left = 0, n_empty = 0, n_yes = 0;
    for (int i = 0; i < 600; i++) {
        struct cfg c = {0};
        struct buf case_source = {0}, text = {0};
        struct error err;
        cfg_make(&c, &r, &case_source);
        cfg_check_left(&c);
        struct grammar *g = compile("gbnf", case_source.data, &err);
        bool left = !g && strstr(err.text, "left recursion");
        if (left != c.left) fail_msg("%sleft recursion %d, we: %d", case_source.data, c.left, left);
        n_left += left;
        n_empty += !g && !left;
        if (g) {
            c.m = grammar_machine_new(g, NULL, 0);
            for_each_text(symbols, 2, CFG_TEXT, &text, compare_cfg, &c);
            text.len = 0;
            for_each_text(symbols, 2, CFG_TEXT, &text, compare_prefix, &c);
            n_yes += c.n_yes;
        }
        grammar_machine_free(c.m);
        grammar_free(g);
        buf_release(&case_source);
        buf_release(&text);
    }
    assert_true(n_left > 50 && n_left + n_empty < 500 && n_yes > 500);
}

/* numbers */

/* x and the bounds are in hundredths. */
static void check_decimals(const char *schema, int lo, int hi, bool open) {
    struct error err;
    struct grammar *g = compile("compact", schema, &err);
    if (!g) { // only an empty interval is refused
        assert_true(open ? lo >= hi : lo > hi);
        return;
    }
    struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
    for (int x = -1250; x <= 1250; x++) {
        char text[32];
        int a = abs(x);
        if (a % 100 == 0)
            snprintf(text, sizeof text, "%s%d", x < 0 ? "-" : "", a / 100);
        else if (a % 10 == 0)
            snprintf(text, sizeof text, "%s%d.%d", x < 0 ? "-" : "", a / 100, a / 10 % 10);
        else
            snprintf(text, sizeof text, "%s%d.%02d", x < 0 ? "-" : "", a / 100, a % 100);
        bool want = open ? lo < x && x < hi : lo <= x && x <= hi;
        bool got = classify(m, text, strlen(text)) == 'y';
        if (got != want) fail_msg("%s: '%s' is %d", schema, text, got);
    }
    grammar_machine_free(m);
    grammar_free(g);
}

static void test_numbers(void **state) {
    (void)state;
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    for (int i = 0; i < 150; i++) {
        char schema[200];
        bool open = rng_below(&r, 2);
        int scale = (int[]){1, 10, 100}[rng_below(&r, 3)];
        int lo = ((int)rng_below(&r, 2400) - 1200) / scale * scale;
        int hi = lo + (int)rng_below(&r, 1200) / scale * scale;
        snprintf(schema, sizeof schema, "{\"type\":\"number\",\"%s\":%.2f,\"%s\":%.2f}",
                 open ? "exclusiveMinimum" : "minimum", lo / 100.0,
                 open ? "exclusiveMaximum" : "maximum", hi / 100.0);
        check_decimals(schema, lo, hi, open);
    }
}

static void test_integers(void **state) {
    (void)state;
    struct rng r = rng_make(4, RNG_TEST, 0, 0);
    for (int i = 0; i < 150; i++) {
        char schema[200], text[32];
        struct error err;
        int lo = (int)rng_below(&r, 3000) - 1500, hi = lo + (int)rng_below(&r, 1500);
        int form = (int)rng_below(&r, 3); // both bounds, the lower, the upper
        snprintf(schema, sizeof schema, "{\"type\":\"integer\"");
        if (form != 2) snprintf(schema + strlen(schema), 60, ",\"minimum\":%d", lo);
        if (form != 1) snprintf(schema + strlen(schema), 60, ",\"maximum\":%d", hi);
        strcat(schema, "}");
        struct grammar *g = assert_compiled(compile("compact", schema, &err), &err);
        struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
        for (int x = -12000; x <= 12000; x += abs(x) < 1800 ? 1 : 97) {
            bool want = (form == 2 || x >= lo) && (form == 1 || x <= hi);
            snprintf(text, sizeof text, "%d", x);
            if ((classify(m, text, strlen(text)) == 'y') != want) fail_msg("%s: %s", schema, text);
        }
        grammar_machine_free(m);
        grammar_free(g);
    }
}

/* masks */

/* A vocabulary: all bytes, pieces of JSON and text, pieces that end inside characters, and random
 * bytes. */
struct pieces {
    const char *v[1200];
    int32_t lens[1200];
    int32_t n;
    struct arena arena;
};

static void piece_add(struct pieces *p, const char *text, size_t n) {
    char *copy = arena_alloc(&p->arena, n + 1);
    memcpy(copy, text, n);
    p->v[p->n] = copy;
    p->lens[p->n++] = (int32_t)n;
}

static struct pieces pieces_make(uint64_t seed) {
    static const char *const words[] = {"{\"",        "\"}",   "\":",    "\": \"", "\",",
                                        "\", \"",     "},",    "]}",     "[[",     "{}",
                                        "[]",         "true",  "null",   "name",   "\"name",
                                        "ame\": ",    "1.5",   "e10",    "-1",     "00",
                                        "12",         "2026-", "\\u",    "\\\"",   "\\n",
                                        "\n  ",       "  ",    "日本",   "本語の", "ねこ",
                                        "しまえなが", "🐟🐟",    "中文字", "abab",   "aab",
                                        "(((",        "))"};
    struct pieces p = {0};
    struct rng r = rng_make(seed, RNG_TEST, 7, 0);
    piece_add(&p, "", 0); // a special token has no bytes
    for (int i = 0; i < 256; i++) piece_add(&p, &(char){(char)i}, 1);
    for (size_t i = 0; i < ARRAY_LEN(words); i++) piece_add(&p, words[i], strlen(words[i]));
    piece_add(&p, "true", 4); // two tokens of the same bytes
    while (p.n < 1200) {
        char text[64];
        size_t n = 0;
        for (int k = 0; k < 3; k++) {
            const char *w = words[rng_below(&r, ARRAY_LEN(words))];
            size_t len = strlen(w), from = rng_below(&r, (uint32_t)len);
            size_t take = 1 + rng_below(&r, (uint32_t)(len - from));
            memcpy(text + n, w + from, take);
            n += take;
            if (rng_below(&r, 2)) break;
        }
        if (rng_below(&r, 20) == 0) text[rng_below(&r, (uint32_t)n)] = (char)rng_below(&r, 256);
        piece_add(&p, text, n);
    }
    return p;
}

static bool bit(const uint32_t *bits, int32_t i) {
    return bits[i / 32] >> (i % 32) & 1;
}

/* Compares every token's bit with the result of accepting it; returns the number of allowed
 * tokens. */
static int check_mask(struct grammar_state *s, const struct pieces *p, int32_t max_remaining,
                      uint32_t *bits) {
    int n = 0;
    memset(bits, 0xAA, (size_t)((p->n + 31) / 32) * sizeof *bits);
    grammar_mask(s, max_remaining, bits);
    for (int32_t i = 0; i < p->n; i++) {
        struct grammar_state t = grammar_state_copy(s);
        bool want = p->lens[i] > 0 && grammar_accept_bytes(&t, p->v[i], (size_t)p->lens[i]) &&
                    (max_remaining < 0 || grammar_min_remaining(&t) <= max_remaining);
        if (want != bit(bits, i)) fail_msg("token %d '%s': bit is %d", i, p->v[i], !want);
        n += want;
        grammar_state_release(&t);
    }
    return n;
}

static int32_t sample_allowed(struct rng *r, const uint32_t *bits, int32_t n_tokens,
                              int n_allowed) {
    int k = (int)rng_below(r, (uint32_t)n_allowed);
    for (int32_t i = 0; i < n_tokens; i++)
        if (bit(bits, i) && k-- == 0) return i;
    fail_msg("mask lost a token");
    return -1;
}

static const char *const mask_sources[][2] = {
    {"schema", "{\"type\":\"object\"}"},
    {"schema",
     "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"tags\":{\"type\":"
     "\"array\",\"items\":{\"enum\":[\"ねこ\",\"日本\",\"abab\"]}},\"n\":{\"type\":\"integer\","
     "\"minimum\":-12,\"maximum\":2026},\"s\":{\"type\":\"string\",\"maxLength\":5}},\"required\":"
     "[\"name\",\"n\"]}"},
    {"regex", "(日本|中文|[ぁ-ん]{2,5})*[ab]{3,9}"},
    {"regex", ".*a.{6}"},
    {"gbnf", "root ::= \"(\" root \")\" | (\"a\" root \"b\" | [ぁ-ん]+)?"},
    {"gbnf", "root ::= \"a\" root \"b\" | \"a\" root \"ab\" | \"a\" root \"bb\" | \"\""},
};

static void walk_masks(const char *kind, const char *case_source, size_t max_bytes, uint32_t seed) {
    struct error err;
    struct pieces p = pieces_make(seed);
    struct grammar *g = assert_compiled(compile(kind, case_source, &err), &err);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    struct grammar_machine *m = grammar_machine_new(g, v, max_bytes);
    struct rng r = rng_make(seed, RNG_TEST, 8, 0);
    uint32_t bits[40], limited[40];
    for (int walk = 0; walk < 3; walk++) {
        struct grammar_state s = grammar_state_new(m);
        for (int step = 0; step < 25; step++) {
            int n = check_mask(&s, &p, -1, bits);
            check_mask(&s, &p, grammar_min_remaining(&s) + (int32_t)rng_below(&r, 4), limited);
            if (n == 0) assert_true(grammar_is_final(&s));
            if (n == 0) break;
            int32_t token = sample_allowed(&r, bits, p.n, n);
            assert_true(grammar_accept_bytes(&s, p.v[token], (size_t)p.lens[token]));
        }
        grammar_state_release(&s);
    }
    assert_false(grammar_machine_hit_limit(m));
    grammar_machine_free(m);
    grammar_vocab_free(v);
    grammar_free(g);
    arena_release(&p.arena);
}

static void test_masks(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(mask_sources); i++) {
        walk_masks(mask_sources[i][0], mask_sources[i][1], 0, (uint32_t)i);
        walk_masks(mask_sources[i][0], mask_sources[i][1], 1, (uint32_t)i); // always forgetting
    }
}

/* The same reply in two machines, one of which is shared with other replies and evicts states. */
static void test_masks_shared(void **state) {
    (void)state;
    struct error err;
    struct pieces p = pieces_make(3);
    struct grammar *g = assert_compiled(grammar_new_json_object(&err), &err);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    struct grammar_machine *one = grammar_machine_new(g, v, 0),
                           *many = grammar_machine_new(g, v, 4096);
    struct grammar_state alone = grammar_state_new(one), crowd[8];
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    uint32_t a[40], b[40];
    size_t words = (size_t)(p.n + 31) / 32;
    for (int i = 0; i < 8; i++) crowd[i] = grammar_state_new(many);
    for (int step = 0; step < 60; step++) {
        int32_t first = -1;
        for (int i = 0; i < 8; i++) {
            int n = 0;
            grammar_mask(&crowd[i], -1, b);
            if (i == 0) grammar_mask(&alone, -1, a);
            if (i == 0) assert_memory_equal(a, b, words * sizeof *a);
            for (int32_t t = 0; t < p.n; t++) n += bit(b, t);
            if (n == 0) continue;
            int32_t t = sample_allowed(&r, b, p.n, n);
            if (i == 0) first = t;
            assert_true(grammar_accept_bytes(&crowd[i], p.v[t], (size_t)p.lens[t]));
        }
        if (first < 0) break;
        assert_true(grammar_accept_bytes(&alone, p.v[first], (size_t)p.lens[first]));
        assert_int_equal(grammar_min_remaining(&alone), grammar_min_remaining(&crowd[0]));
        assert_int_equal(grammar_is_final(&alone), grammar_is_final(&crowd[0]));
    }
    for (int i = 0; i < 8; i++) grammar_state_release(&crowd[i]);
    grammar_state_release(&alone);
    grammar_machine_free(one);
    grammar_machine_free(many);
    grammar_vocab_free(v);
    grammar_free(g);
    arena_release(&p.arena);
}

/* Calls grammar_advance with `units` at a time; no call does much more work than allowed. */
static void advance(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits,
                    int64_t units, int *calls) {
    for (*calls = 1;; ++*calls) {
        int64_t given = units;
        if (grammar_advance(s, token, left, bits, &given)) return;
        assert_true(given <= 0);
    }
}

/* Masks that are computed in slices of any size, in a machine that evicts states meanwhile, are
 * equal to those computed at once. */
static void check_slices(const char *kind, const char *case_source, uint64_t seed) {
    struct error err;
    struct pieces p = pieces_make(4);
    struct grammar *g = assert_compiled(compile(kind, case_source, &err), &err);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    struct grammar_machine *one = grammar_machine_new(g, v, 0),
                           *sliced = grammar_machine_new(g, v, 8192);
    struct rng r = rng_make(seed, RNG_TEST, 0, 0);
    uint32_t a[40], b[40];
    int calls, most = 0, n = 1;
    for (int reply = 0; reply < 6; reply++) {
        struct grammar_state x = grammar_state_new(one), y = grammar_state_new(sliced);
        int32_t token = -1, left = reply < 3 ? 40 : grammar_min_length(g) + 10;
        for (; left > 0 && n > 0; left--) {
            bool fits;
            if (token >= 0) assert_true(grammar_accept_token(&x, token));
            fits = grammar_min_remaining(&x) <= left;
            grammar_mask(&x, fits ? left - 1 : -1, a);
            advance(&y, token, left, b, 1 + rng_below(&r, reply % 2 ? 5 : 3000), &calls);
            most = MAX(most, calls);
            assert_memory_equal(a, b, (size_t)(p.n + 31) / 32 * sizeof *a);
            assert_int_equal(grammar_min_remaining(&x), grammar_min_remaining(&y));
            n = 0;
            for (int32_t t = 0; t < p.n; t++) n += bit(a, t);
            token = n ? sample_allowed(&r, a, p.n, n) : -1;
        }
        if (n > 0) {
            advance(&y, token, 0, NULL, 1, &calls);
            assert_true(grammar_accept_token(&x, token));
            assert_int_equal(grammar_is_final(&x), grammar_is_final(&y));
        }
        n = 1;
        grammar_state_release(&x);
        grammar_state_release(&y);
    }
    assert_true(most > 10);
    grammar_machine_free(one);
    grammar_machine_free(sliced);
    grammar_vocab_free(v);
    grammar_free(g);
    arena_release(&p.arena);
}

static void test_slices(void **state) {
    (void)state;
    check_slices("schema", "true", 1);
    check_slices(
        "schema",
        "{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":"
        "\"integer\"},\"b\":{\"enum\":[\"ab\",\"abc\"]}},\"required\":[\"b\"]}}",
        2);
    check_slices("regex", "((a|b)*c|[a-z ]{1,30}){1,9}", 3);
    check_slices("gbnf", "root ::= r\nr ::= \"a\" r | [a-z ] r \"b\" | [a-z] r? r \"c\" | \"a\"",
                 4);
}

/* After a job is abandoned the machine works for other replies. */
static void test_slices_abandoned(void **state) {
    (void)state;
    struct error err;
    struct pieces p = pieces_make(4);
    struct grammar *g = assert_compiled(grammar_new_json_object(&err), &err);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    struct grammar_machine *m = grammar_machine_new(g, v, 0), *one = grammar_machine_new(g, v, 0);
    uint32_t a[40], b[40];
    for (int i = 1; i < 200; i += 7) {
        struct grammar_state x = grammar_state_new(m), y = grammar_state_new(m),
                             z = grammar_state_new(one);
        assert_true(grammar_accept_bytes(&x, "{\"a\": [", 7));
        assert_true(grammar_accept_bytes(&y, "{\"a\": ", 6));
        assert_true(grammar_accept_bytes(&z, "{\"a\": ", 6));
        int64_t units = i, none = 100;
        if (!grammar_advance(&x, -1, 50, a, &units)) {
            assert_false(grammar_advance(&y, -1, 50, b, &none)); // the machine is at x
            assert_int_equal(none, 100);
        }
        grammar_state_release(&x);
        int calls;
        advance(&y, -1, 50, b, 1000, &calls);
        grammar_mask(&z, 49, a);
        assert_memory_equal(a, b, (size_t)(p.n + 31) / 32 * sizeof *a);
        grammar_state_release(&y);
        grammar_state_release(&z);
    }
    grammar_machine_free(m);
    grammar_machine_free(one);
    grammar_vocab_free(v);
    grammar_free(g);
    arena_release(&p.arena);
}

/* The bit of every token of a tokenizer is that of its decoded bytes; special tokens are never
 * allowed. */
static void check_tokenizer(struct tokenizer *t) {
    static const char *const prefixes[] = {"", "{\"", "{\"名前\": \"しま\xE3\x81",
                                           "{\"a\": [1, {}"};
    struct error err;
    struct grammar *g = assert_compiled(grammar_new_json_object(&err), &err);
    struct grammar_vocab *v = grammar_vocab_new(t);
    struct grammar_machine *m = grammar_machine_new(g, v, 0);
    int32_t n = tokenizer_vocab_size(t);
    uint32_t *bits = xcalloc((size_t)n / 32 + 1, sizeof *bits);
    for (size_t i = 0; i < ARRAY_LEN(prefixes); i++) {
        struct grammar_state s = grammar_state_new(m);
        struct buf b = {0};
        int n_allowed = 0;
        assert_true(grammar_accept_bytes(&s, prefixes[i], strlen(prefixes[i])));
        grammar_mask(&s, -1, bits);
        for (int32_t id = 0; id < n; id++) {
            struct grammar_state next = grammar_state_copy(&s);
            b.len = 0;
            tokenizer_decode_token(t, id, false, &b);
            struct grammar_state same = grammar_state_copy(&s);
            bool want = b.len > 0 && grammar_accept_bytes(&next, b.data, b.len);
            if (want != bit(bits, id)) fail_msg("after '%s': token %d", prefixes[i], id);
            assert_int_equal(grammar_accept_token(&same, id), want);
            assert_int_equal(grammar_min_remaining(&same), grammar_min_remaining(&next));
            n_allowed += want;
            grammar_state_release(&next);
            grammar_state_release(&same);
        }
        assert_true(n_allowed > 0);
        grammar_state_release(&s);
        buf_release(&b);
    }
    free(bits);
    grammar_machine_free(m);
    grammar_vocab_free(v);
    grammar_free(g);
    tokenizer_free(t);
}

static void test_tokenizers(void **state) {
    (void)state;
    check_tokenizer(tokenizer_new_bytes(400));
    static const char *const names[] = {"gpt-2", "llama-spm", "phi-3"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char file[100];
        struct error err;
        snprintf(file, sizeof file, "data/tokenizers/ggml-vocab/ggml-vocab-%s.gguf", names[i]);
        char *path = fixture_shared(file);
        if (!path) continue;
        struct tokenizer *t = gguf_tokenizer_open(path, &err);
        if (!t) fail_msg("%s", err.text);
        check_tokenizer(t);
        free(path);
    }
}

/* replies under a token limit, and a validator that does not use grammars */

static bool is_valid(json_t *root, json_t *schema, json_t *x);

static bool type_is_valid(const char *t, json_t *x) {
    return (strcmp(t, "object") == 0 && json_is_object(x)) ||
           (strcmp(t, "array") == 0 && json_is_array(x)) ||
           (strcmp(t, "string") == 0 && json_is_string(x)) ||
           (strcmp(t, "number") == 0 && json_is_number(x)) ||
           (strcmp(t, "integer") == 0 && json_is_integer(x)) ||
           (strcmp(t, "boolean") == 0 && json_is_boolean(x)) ||
           (strcmp(t, "null") == 0 && json_is_null(x));
}

static int valid_count(json_t *root, json_t *list, json_t *x) {
    int n = 0;
    for (size_t i = 0; i < json_array_size(list); i++)
        n += is_valid(root, json_array_get(list, i), x);
    return n;
}

static size_t characters(const char *s) {
    size_t n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

static bool pattern_is_valid(const char *pattern, const char *text) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                  PCRE2_UTF | PCRE2_DOLLAR_ENDONLY, &code, &at, NULL);
    assert_non_null(c);
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(c, NULL);
    bool is = pcre2_match(c, (PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, 0, 0, m, NULL) >= 0;
    pcre2_match_data_free(m);
    pcre2_code_free(c);
    return is;
}

static bool object_is_valid(json_t *root, json_t *s, json_t *x) {
    json_t *props = json_object_get(s, "properties"),
           *more = json_object_get(s, "additionalProperties");
    json_t *required = json_object_get(s, "required"), *v;
    const char *key;
    for (size_t i = 0; i < json_array_size(required); i++)
        if (!json_object_get(x, json_string_value(json_array_get(required, i)))) return false;
    json_object_foreach (x, key, v) {
        json_t *p = json_object_get(props, key);
        if (!p) p = more;
        if (p && !is_valid(root, p, v)) return false;
    }
    return true;
}

static bool array_is_valid(json_t *root, json_t *s, json_t *x) {
    json_t *prefix = json_object_get(s, "prefixItems"), *items = json_object_get(s, "items");
    json_t *min = json_object_get(s, "minItems"), *max = json_object_get(s, "maxItems");
    size_t n = json_array_size(x);
    if (min && n < (size_t)json_integer_value(min)) return false;
    if (max && n > (size_t)json_integer_value(max)) return false;
    for (size_t i = 0; i < n; i++) {
        json_t *p = i < json_array_size(prefix) ? json_array_get(prefix, i) : items;
        if (p && !is_valid(root, p, json_array_get(x, i))) return false;
    }
    return true;
}

static bool scalar_is_valid(json_t *s, json_t *x) {
    json_t *k;
    if (json_is_string(x)) {
        const char *text = json_string_value(x);
        if ((k = json_object_get(s, "minLength")) &&
            characters(text) < (size_t)json_integer_value(k))
            return false;
        if ((k = json_object_get(s, "maxLength")) &&
            characters(text) > (size_t)json_integer_value(k))
            return false;
        if ((k = json_object_get(s, "pattern")) && !pattern_is_valid(json_string_value(k), text))
            return false;
    }
    if (json_is_number(x)) {
        double v = json_number_value(x);
        if ((k = json_object_get(s, "minimum")) && v < json_number_value(k)) return false;
        if ((k = json_object_get(s, "maximum")) && v > json_number_value(k)) return false;
        if ((k = json_object_get(s, "exclusiveMinimum")) && v <= json_number_value(k)) return false;
        if ((k = json_object_get(s, "exclusiveMaximum")) && v >= json_number_value(k)) return false;
    }
    return true;
}

static bool is_valid(json_t *root, json_t *s, json_t *x) {
    json_t *k;
    if (json_is_boolean(s)) return json_is_true(s);
    if ((k = json_object_get(s, "$ref"))) {
        const char *ref = json_string_value(k);
        json_t *target =
            strcmp(ref, "#") == 0 ? root : json_object_get(json_object_get(root, "$defs"), ref + 8);
        assert_non_null(target);
        if (!is_valid(root, target, x)) return false;
    }
    if ((k = json_object_get(s, "type"))) {
        bool any = json_is_string(k) && type_is_valid(json_string_value(k), x);
        for (size_t i = 0; i < json_array_size(k); i++)
            any = any || type_is_valid(json_string_value(json_array_get(k, i)), x);
        if (!any) return false;
    }
    if ((k = json_object_get(s, "const")) && !json_equal(k, x)) return false;
    if ((k = json_object_get(s, "enum"))) {
        bool any = false;
        for (size_t i = 0; i < json_array_size(k); i++)
            any = any || json_equal(json_array_get(k, i), x);
        if (!any) return false;
    }
    if ((k = json_object_get(s, "anyOf")) && valid_count(root, k, x) == 0) return false;
    if ((k = json_object_get(s, "oneOf")) && valid_count(root, k, x) != 1) return false;
    if ((k = json_object_get(s, "allOf")) && valid_count(root, k, x) != (int)json_array_size(k))
        return false;
    if (json_is_object(x)) return object_is_valid(root, s, x);
    if (json_is_array(x)) return array_is_valid(root, s, x);
    return scalar_is_valid(s, x);
}

static const char *const schemas[] = {
    "{\"type\":\"object\"}",
    "true",
    "{\"type\":\"object\",\"properties\":{\"名前\":{\"type\":\"string\",\"minLength\":1,"
    "\"maxLength\":8},\"年齢\":{"
    "\"type\":\"integer\",\"minimum\":0,\"maximum\":150},\"趣味\":{\"type\":\"array\",\"items\":{"
    "\"type\":\"string\"},"
    "\"minItems\":1,\"maxItems\":3}},\"required\":[\"名前\",\"趣味\"],\"additionalProperties\":"
    "false}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\",\"exclusiveMinimum\":-0.5,"
    "\"maximum\":12.25}},"
    "\"required\":[\"a\"],\"additionalProperties\":{\"type\":[\"boolean\",\"null\"]}}",
    "{\"$defs\":{\"tree\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},"
    "\"kids\":{\"type\":"
    "\"array\",\"items\":{\"$ref\":\"#/$defs/"
    "tree\"}}},\"required\":[\"v\",\"kids\"]}},\"$ref\":\"#/$defs/tree\"}",
    "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"move\"},\"to\":{"
    "\"enum\":[\"北\",\"南\"]}},"
    "\"required\":[\"kind\",\"to\"]},{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":"
    "\"say\"},\"text\":{"
    "\"type\":\"string\"}},\"required\":[\"kind\",\"text\"]}]}",
    "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"string\",\"pattern\":\"^[あ-ん]{1,3}$\"},{"
    "\"type\":\"string\","
    "\"pattern\":\"b+|\\\\p{Han}\"}],\"items\":{\"type\":\"integer\",\"minimum\":-3},\"minItems\":"
    "2,\"maxItems\":6}",
    "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\",\"minimum\":1}},"
    "\"required\":[\"a\"]},"
    "{\"properties\":{\"a\":{\"maximum\":30},\"b\":{\"type\":\"string\",\"pattern\":\"\\\\d\"}}}]}",
};

/* One reply of at most `budget` tokens; it must be complete, valid JSON and valid under the
 * schema. */
static void check_reply(struct grammar_machine *m, const struct pieces *p, json_t *schema,
                        int32_t budget, struct rng *r) {
    struct grammar_state s = grammar_state_new(m);
    struct buf text = {0};
    uint32_t bits[40];
    assert_true(grammar_min_remaining(&s) <= budget);
    for (; budget > 0; budget--) {
        int n = 0;
        grammar_mask(&s, budget - 1, bits);
        for (int32_t i = 0; i < p->n; i++) n += bit(bits, i);
        if (grammar_is_final(&s) && (n == 0 || rng_below(r, 8) == 0)) break;
        assert_true(n > 0);
        int32_t token = sample_allowed(r, bits, p->n, n);
        assert_true(grammar_accept_bytes(&s, p->v[token], (size_t)p->lens[token]));
        buf_add(&text, p->v[token], (size_t)p->lens[token]);
    }
    assert_true(grammar_is_final(&s));
    grammar_state_release(&s);
    // a grammar cannot track the free keys of an object, so duplicates are allowed here
    json_t *x = json_loadb(text.data, text.len, JSON_DECODE_ANY, NULL);
    if (!x) fail_msg("'%.*s' is no JSON", (int)text.len, text.data);
    if (!is_valid(schema, schema, x)) fail_msg("'%.*s' is not valid", (int)text.len, text.data);
    json_decref(x);
    buf_release(&text);
}

static void test_replies(void **state) {
    (void)state;
    struct pieces p = pieces_make(5);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    struct rng r = rng_make(6, RNG_TEST, 0, 0);
    for (size_t i = 0; i < 2 * ARRAY_LEN(schemas); i++) {
        struct error err;
        const char *case_source = schemas[i / 2];
        struct grammar *g =
            assert_compiled(compile(i % 2 ? "compact" : "schema", case_source, &err), &err);
        json_t *schema = json_loads(case_source, JSON_DECODE_ANY, NULL);
        struct grammar_machine *m = grammar_machine_new(g, v, 0);
        for (int k = 0; k < 40; k++)
            check_reply(m, &p, schema, grammar_min_length(g) + (int32_t)rng_below(&r, 60), &r);
        json_decref(schema);
        grammar_machine_free(m);
        grammar_free(g);
    }
    grammar_vocab_free(v);
    arena_release(&p.arena);
}

/* hostile sources */

static char *nested_text(const char *open, int n, const char *middle, const char *close) {
    struct buf b = {0};
    for (int i = 0; i < n; i++) buf_puts(&b, open);
    buf_puts(&b, middle);
    for (int i = 0; i < n; i++) buf_puts(&b, close);
    return b.data;
}

static char *repeated_text(const char *head, const char *unit, int n, const char *tail) {
    struct buf b = {0};
    buf_puts(&b, head);
    for (int i = 0; i < n; i++) buf_puts(&b, unit);
    buf_puts(&b, tail);
    return b.data;
}

static int n_limited; /* machines for which grammar_machine_hit_limit is true */

/* Compiles a source and, if it is valid, accepts `input` 100 times and computes a mask every 25
 * times. Seconds are CPU time, because the computer may be busy. */
static void compile_and_run(const char *kind, char *case_source, const char *input,
                            const struct grammar_vocab *v) {
    struct error err;
    clock_t start = clock();
    struct grammar *g = compile(kind, case_source, &err);
    if (!g) assert_true(err.code < 0 && err.text[0]);
    if (g) {
        struct grammar_machine *m = grammar_machine_new(g, v, 0);
        struct grammar_state s = grammar_state_new(m);
        uint32_t bits[40];
        for (int i = 0; i < 100 && grammar_accept_bytes(&s, input, strlen(input)); i++)
            if (i % 25 == 0) grammar_mask(&s, -1, bits);
        assert_true(grammar_machine_bytes(m) < (size_t)1 << 29);
        n_limited += grammar_machine_hit_limit(m);
        grammar_state_release(&s);
        grammar_machine_free(m);
    }
    grammar_free(g);
    double took = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (took > 20) fail_msg("'%.60s' took %.1f s", case_source, took);
    if (getenv("SHOAL_VERBOSE")) fprintf(stderr, "%6.2f s %.70s\n", took, case_source);
    free(case_source);
}

static void test_hostile(void **state) {
    (void)state;
    struct pieces p = pieces_make(8);
    struct grammar_vocab *v = grammar_vocab_new_pieces(p.v, p.lens, p.n);
    compile_and_run("regex", repeated_text("", "(", 100000, ""), "a", v);
    compile_and_run("regex", nested_text("(a|", 150, "", ")"), "a", v);
    compile_and_run("regex", repeated_text("", "(a?){100}", 100, ""), "a", v);
    compile_and_run("regex", xstrdup("(.*a.{2000}){1,1000}"), "a", v);
    compile_and_run("regex", xstrdup("((a|b){0,1000}(a|ab){0,1000}){0,1000}"), "ab", v);
    compile_and_run("regex", repeated_text("", "\\p{L}?", 3000, ""), "猫", v);
    compile_and_run("regex", repeated_text("", "a|", 100000, ""), "a", v);
    compile_and_run("regex", repeated_text("", "\\p{L}", 40000, ""), "a", v);
    compile_and_run("regex", repeated_text("[", "\\p{Lu}", 30000, "]"), "A", v);
    compile_and_run("gbnf", repeated_text("root ::= \"a\"", "*", 100000, ""), "a", v);
    compile_and_run("gbnf", repeated_text("root ::= \"a\"", "*", 150, ""), "a", v);
    compile_and_run("gbnf", repeated_text("root ::= ", "(\"a\"?)*", 20000, ""), "a", v);
    compile_and_run("schema", repeated_text("", "{\"items\":", 100000, ""), "[", v);
    compile_and_run("schema", nested_text("{\"items\":", 190, "{}", "}"), "[", v);
    compile_and_run("schema", nested_text("{\"additionalProperties\":", 190, "{}", "}"),
                    "{\"a\":", v);
    compile_and_run("schema", xstrdup("true"), "[", v);
    compile_and_run("schema",
                    repeated_text("{\"oneOf\":[{\"type\":\"null\"}",
                                  ",{\"type\":\"object\",\"required\":[\"a\"]}", 5000, "]}"),
                    "{", v);
    compile_and_run(
        "schema",
        xstrdup("{\"$defs\":{\"a\":{\"type\":\"object\",\"anyOf\":[{\"$ref\":\"#/$defs/a\"},"
                "{\"$ref\":\"#/$defs/a\"}]}},\"$ref\":\"#/$defs/a\"}"),
        "{", v);
    compile_and_run(
        "schema",
        xstrdup("{\"type\":\"array\",\"minItems\":65536,\"items\":{\"type\":\"array\",\"minItems\":"
                "65536}}"),
        "[", v);
    compile_and_run(
        "gbnf",
        xstrdup("root ::= (\"a\" | \"a\" root \"b\" | \"a\" root \"c\" | root2)\nroot2 ::= "
                "\"a\" root root \"d\" | \"\""),
        "a", v);
    // the choice between x and y k steps ago stays open: up to 2^k sets of stacks
    compile_and_run(
        "gbnf",
        xstrdup("root ::= p q\np ::= [ab] p | [ab] p \"x\" | [ab] p \"y\" | \"\"\nq ::= \"x\" "
                "\"z\"{20}"),
        "ab", v);
    compile_and_run(
        "gbnf", repeated_text("root ::= r\nr ::= \"a\" r", " | \"a\" r \"b\"", 2000, " | \"a\""),
        "a", v);
    compile_and_run("gbnf", repeated_text("root ::= (", "(\"\")*", 10000, ")* \"a\"*"), "a", v);
    assert_true(n_limited > 0);
    grammar_vocab_free(v);
    arena_release(&p.arena);
}

static void test_deep(void **state) {
    (void)state;
    struct error err;
    struct grammar *g = assert_compiled(grammar_new_json_schema("true", 4, false, &err), &err);
    struct grammar_machine *m = grammar_machine_new(g, NULL, 1 << 16);
    struct grammar_state s = grammar_state_new(m);
    for (int i = 0; i < 100000; i++) assert_true(grammar_accept_bytes(&s, "[", 1));
    assert_int_equal(grammar_min_remaining(&s), 100000);
    for (int i = 0; i < 100000; i++) assert_true(grammar_accept_bytes(&s, "]", 1));
    assert_true(grammar_is_final(&s));
    assert_false(grammar_accept_bytes(&s, "]", 1));
    assert_true(grammar_is_final(&s));
    grammar_state_release(&s);
    grammar_machine_free(m);
    grammar_free(g);
}

/* Sources of the table with changed bytes are refused or compiled, without a crash. */
static void test_mangled(void **state) {
    (void)state;
    struct buf file = {0};
    struct error err;
    struct rng r = rng_make(10, RNG_TEST, 0, 0);
    static const char spice[] = "(){}[]|*+?\\\"',:.^$<>=-#09au\n\x80\xE7";
    assert_int_equal(file_read("test/cases/grammar.txt", 1 << 20, &file, &err), OK);
    for (int round = 0; round < 6; round++)
        for (char *line = file.data, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
            char *text = strndup(line, (size_t)(end - line)), *arg = strchr(text, ' ');
            size_t n = arg ? strlen(++arg) : 0;
            for (int k = (int)rng_below(&r, 4); n > 0 && k >= 0; k--)
                arg[rng_below(&r, (uint32_t)n)] = spice[rng_below(&r, sizeof spice - 1)];
            for (int kind = 0; n > 0 && kind < 3; kind++) {
                struct grammar *g =
                    compile((const char *[]){"regex", "gbnf", "schema"}[kind], arg, &err);
                if (!g && (err.code >= 0 || !err.text[0])) fail_msg("'%s': no message", arg);
                grammar_free(g);
            }
            free(text);
        }
    buf_release(&file);
}

/* benchmark */

static void bench_state(struct grammar_machine *m, const char *prefix) {
    uint32_t *bits = xcalloc(8192, sizeof *bits);
    struct grammar_state s = grammar_state_new(m);
    assert_true(grammar_accept_bytes(&s, prefix, strlen(prefix)));
    double start = clock_now();
    grammar_mask(&s, -1, bits);
    double cold = clock_now() - start;
    start = clock_now();
    for (int i = 0; i < 1000; i++) grammar_mask(&s, -1, bits);
    double warm = (clock_now() - start) / 1000;
    printf("  first %8.1f us, again %6.2f us   after '%s'\n", cold * 1e6, warm * 1e6, prefix);
    grammar_state_release(&s);
    free(bits);
}

static int bench(const char *path) {
    struct error err;
    bool json = strlen(path) > 5 && strcmp(path + strlen(path) - 5, ".json") == 0;
    struct tokenizer *t = json ? tokenizer_from_json(path, &err) : gguf_tokenizer_open(path, &err);
    if (!t) return fprintf(stderr, "%s\n", err.text), 1;
    double start = clock_now();
    struct grammar_vocab *v = grammar_vocab_new(t);
    printf("%d tokens, trie in %.1f ms\n", tokenizer_vocab_size(t), (clock_now() - start) * 1e3);
    start = clock_now();
    struct grammar *g = grammar_new_json_schema(schemas[2], strlen(schemas[2]), false, &err);
    printf("schema compiled in %.2f ms\n", (clock_now() - start) * 1e3);
    struct grammar_machine *m = grammar_machine_new(g, v, 0);
    static const char *const prefixes[] = {"",
                                           "{",
                                           "{\"",
                                           "{\"名前\": \"",
                                           "{\"名前\": \"しま",
                                           "{\"名前\": \"しま",
                                           "{\"名前\": \"しま\", ",
                                           "{\"名前\": \"しま\", \"年齢\": 1",
                                           "{\"名前\":\"x\",\"趣味\":[\"",
                                           "{\"名前\":\"y\",\"趣味\":[\"a\",\""};
    for (size_t i = 0; i < ARRAY_LEN(prefixes); i++) bench_state(m, prefixes[i]);
    grammar_machine_free(m);
    grammar_free(g);
    g = grammar_new_json_object(&err);
    m = grammar_machine_new(g, v, 0);
    static const char *const objects[] = {"",
                                          "{\"",
                                          "{\"a\": ",
                                          "{\"a\": \"x",
                                          "{\"a\": {\"b\": \"x",
                                          "{\"a\": [{\"b\": \"x",
                                          "{\"a\": 1",
                                          "{\"a\": [1",
                                          "{\"a\": [[1",
                                          "{\"a\": [[\"b\"",
                                          "{\"a\": [[[\"b\""};
    for (size_t i = 0; i < ARRAY_LEN(objects); i++) bench_state(m, objects[i]);
    printf("machine: %zu KiB\n", grammar_machine_bytes(m) / 1024);
    grammar_machine_free(m);
    grammar_free(g);
    grammar_vocab_free(v);
    tokenizer_free(t);
    return 0;
}

/* A value within a longer text: a space may precede it, and a text follows it. The source makes an
 * equal grammar, also with references to the schema's root. */
static void test_value(void **state) {
    static const struct {
        const char *text;
        char kind;
    } cases[] = {{" {\"a\": 1}}\n", 'y'},
                 {"{\"a\":1}}\n", 'y'},
                 {" {\"a\": 1}", 'p'},
                 {"  {", 'n'},
                 {"{\"a\": 1} }", 'n'},
                 {"", 'p'},
                 {" {\"b\": {\"a\": 2}}}\n", 'y'}};
    struct error err;
    json_t *schema = json_pack("{s:s,s:{s:{s:s},s:{s:s}},s:b}", "type", "object", "properties", "a",
                               "type", "integer", "b", "$ref", "#", "additionalProperties", 0);
    struct grammar *g = assert_compiled(grammar_new_json_value(schema, "}\n", &err), &err);
    size_t len;
    const char *source = grammar_source(g, &len);
    struct grammar *again =
        assert_compiled(grammar_from_source(grammar_kind(g), source, len, &err), &err);
    assert_string_equal(grammar_hash(g), grammar_hash(again));
    struct grammar *const both[] = {g, again};
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct grammar_machine *m = grammar_machine_new(both[k], NULL, 0);
        for (size_t i = 0; i < ARRAY_LEN(cases); i++)
            if (classify(m, cases[i].text, strlen(cases[i].text)) != cases[i].kind)
                fail_msg("'%s' is not '%c'", cases[i].text, cases[i].kind);
        grammar_machine_free(m);
    }
    grammar_free(g);
    grammar_free(again);
    json_decref(schema);
    assert_null(grammar_new_json_value(NULL, "", &err));
    assert_null(grammar_from_source("JSON schema of a value", "{}", 2, &err));
    assert_null(grammar_from_source("JSON schema of a value", "{", 1, &err));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--bench") == 0) return bench(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),       cmocka_unit_test(test_choices),
        cmocka_unit_test(test_regex_pcre2), cmocka_unit_test(test_random_grammars),
        cmocka_unit_test(test_numbers),     cmocka_unit_test(test_integers),
        cmocka_unit_test(test_masks),       cmocka_unit_test(test_masks_shared),
        cmocka_unit_test(test_slices),      cmocka_unit_test(test_slices_abandoned),
        cmocka_unit_test(test_tokenizers),  cmocka_unit_test(test_replies),
        cmocka_unit_test(test_hostile),     cmocka_unit_test(test_deep),
        cmocka_unit_test(test_mangled),     cmocka_unit_test(test_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
