/*
 * test_grammar: constrained decoding.
 *
 * What each front end accepts stands in test/cases/grammar.txt. Beside it: regular expressions
 * against PCRE2 on every short text; random context-free grammars against a naive recogniser;
 * numbers between bounds against arithmetic; masks against reading each token; replies written at
 * random under masks and a budget against a small validator of schemas; hostile sources against the
 * clock. "--bench" prints what masks cost.
 */
/* levels: once */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/grammar.h"
#include "fixture.h"

#include <pcre2.h>

static struct grammar *made(struct grammar *g, const struct error *err) {
    if (!g) fail_msg("%s", err->text);
    return g;
}

static struct grammar *compiled(const char *kind, const char *text, struct error *err) {
    size_t n = strlen(text);
    if (strcmp(kind, "regex") == 0) return grammar_new_regex(text, n, err);
    if (strcmp(kind, "gbnf") == 0) return grammar_new_gbnf(text, n, err);
    return grammar_new_json_schema(text, n, strcmp(kind, "compact") == 0, err);
}

/* 'y': whole, 'p': a text begins so, 'n': none does. */
static char verdict(struct grammar_machine *m, const void *text, size_t n) {
    struct grammar_state s = grammar_state_new(m);
    bool alive = grammar_accept_bytes(&s, text, n);
    char out = !alive ? 'n' : grammar_is_final(&s) ? 'y' : 'p';
    grammar_state_release(&s);
    return out;
}

/* the table of cases */

struct source {
    char kind[16];
    struct buf text;
    struct grammar *g;
    struct grammar_machine *m;
    int line;
    bool open; /* lines may still be added */
};

static void source_release(struct source *s) {
    grammar_machine_free(s->m);
    grammar_free(s->g);
    buf_release(&s->text);
    *s = (struct source){0};
}

static void source_need(struct source *s) {
    struct error err;
    if (!s->open) return;
    s->open = false;
    s->g = compiled(s->kind, s->text.data, &err);
    if (!s->g) fail_msg("line %d: refused: %s", s->line, err.text);
    s->m = grammar_machine_new(s->g, NULL, 0);
}

static void line_breaks(char *text) {
    for (char *p; (p = strstr(text, "␊")) != NULL;) {
        *p = '\n';
        memmove(p + 1, p + strlen("␊"), strlen(p + strlen("␊")) + 1);
    }
}

static void check_refused(struct source *s, const char *words, int line) {
    struct error err;
    struct grammar *g = compiled(s->kind, s->text.data, &err);
    if (g) fail_msg("line %d: '%s' is not refused", line, s->text.data);
    if (!strstr(err.text, words)) fail_msg("line %d: '%s' lacks '%s'", line, err.text, words);
    assert_true(err.code < 0);
    s->open = false;
}

static void check_forced(const struct source *s, const char *want, int line) {
    struct buf b = {0};
    struct grammar_state state = grammar_state_new(s->m);
    size_t n = grammar_forced(&state, 1000, &b);
    if (n != strlen(want) || (n && memcmp(b.data, want, n) != 0))
        fail_msg("line %d: '%s' is forced", line, b.data ? b.data : "");
    grammar_state_release(&state);
    buf_release(&b);
}

static void check_count(const struct source *s, const char *arg, int line) {
    struct strings texts = {0};
    struct error err;
    int n = grammar_enumerate(s->g, 1000, &texts, &err);
    if (n != atoi(arg)) fail_msg("line %d: %d texts: %s", line, n, n < 0 ? err.text : "");
    for (int i = 0; i < texts.n; i++)
        assert_int_equal(verdict(s->m, texts.v[i], strlen(texts.v[i])), 'y');
    strings_release(&texts);
}

static void check_line(struct source *s, const char *word, char *arg, int line) {
    static const char *const words[] = {"yes", "part", "no"};
    source_need(s);
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        if (strcmp(word, words[i]) != 0) continue;
        char got = verdict(s->m, arg, strlen(arg));
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
    struct source s = {0};
    int n_line = 0, n_cases = 0;
    if (file_read("test/cases/grammar.txt", 1 << 20, &file, &err) != OK) fail_msg("%s", err.text);
    for (char *line = file.data, *next; line && *line; line = next) {
        char *end = strchr(line, '\n');
        next = end ? end + 1 : NULL;
        if (end) *end = 0;
        n_line++;
        if (*line == 0 || *line == '#') continue;
        line_breaks(line);
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
            source_release(&s);
            s.open = true;
            s.line = n_line;
            snprintf(s.kind, sizeof s.kind, "%s", line);
            buf_puts(&s.text, arg);
        } else {
            check_line(&s, line, arg, n_line);
        }
    }
    source_release(&s);
    buf_release(&file);
    assert_true(n_cases > 300);
}

static void test_choices(void **state) {
    (void)state;
    static const char *const texts[] = {"北", "南", "north", "nort", "", "北"};
    struct error err;
    struct strings out = {0};
    struct grammar *g = made(grammar_new_choices(texts, 6, &err), &err);
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

/* Calls fn with every sequence of at most `most` of the n symbols. */
typedef void (*text_fn)(void *ctx, const char *text, size_t len);
static void each_text(const char *const *symbols, int n, int most, struct buf *text, text_fn fn,
                      void *ctx) {
    fn(ctx, text->data ? text->data : "", text->len);
    for (int i = 0; i < n && most > 0; i++) {
        size_t len = text->len;
        buf_puts(text, symbols[i]);
        each_text(symbols, n, most - 1, text, fn, ctx);
        text->len = len;
    }
}

static void random_regex(struct rng *r, int depth, struct buf *out) {
    static const char *const atoms[] = {"a",   "b",      "猫",        ".",     "[ab]",
                                        "[^a]", "[b-猫]", "\\p{Han}", "[a猫]", "\\w"};
    static const char *const quantifiers[] = {"", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}?", "*?"};
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
    char got = verdict(p->m, text, len);
    p->n_yes += rc >= 0;
    if ((rc >= 0) != (got == 'y'))
        fail_msg("'%s' on '%.*s': PCRE2 says %d, we '%c'", p->pattern, (int)len, text, rc, got);
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
        struct grammar *g = made(compiled("regex", pattern.data, &err), &err);
        p.code = pcre2_compile((PCRE2_SPTR)pattern.data, pattern.len, PCRE2_UTF, &code, &at, NULL);
        assert_non_null(p.code);
        p.match = pcre2_match_data_create_from_pattern(p.code, NULL);
        p.m = grammar_machine_new(g, NULL, 0);
        each_text(symbols, 4, 4, &text, compare_regex, &p);
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
    bool left; /* some rule reaches itself before it reads */
    struct grammar_machine *m;
    int n_yes;
    bool prefixes[2 << CFG_TEXT]; /* texts that some longer text begins with */
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
        for (int i = 0; i < CFG_RULES; i++) nullable[i] = nullable[i] || cfg_nullable(c, nullable, i);
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

/* The set of places where the rule may end when it begins at one of `from`. No left recursion. */
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
    char got = verdict(c->m, text, n);
    c->n_yes += want;
    if (want != (got == 'y')) fail_msg("'%.*s': naive says %d, we '%c'", (int)n, text, want, got);
    for (size_t i = text_index(text, n); want && i > 0; i /= 2) c->prefixes[i] = true;
}

/* What begins a short text is alive, and what is alive with little left to read does begin one. */
static void compare_prefix(void *ctx, const char *text, size_t n) {
    struct cfg *c = ctx;
    struct grammar_state s = grammar_state_new(c->m);
    bool alive = grammar_accept_bytes(&s, text, n), known = c->prefixes[text_index(text, n)];
    if (known) assert_true(alive);
    if (alive && n + (size_t)grammar_rest(&s) <= CFG_TEXT) assert_true(known);
    grammar_state_release(&s);
}

static void test_random_grammars(void **state) {
    (void)state;
    static const char *const symbols[] = {"a", "b"};
    struct rng r = rng_make(2, RNG_TEST, 0, 0);
    int n_left = 0, n_empty = 0, n_yes = 0;
    for (int i = 0; i < 600; i++) {
        struct cfg c = {0};
        struct buf source = {0}, text = {0};
        struct error err;
        cfg_make(&c, &r, &source);
        cfg_check_left(&c);
        struct grammar *g = compiled("gbnf", source.data, &err);
        bool left = !g && strstr(err.text, "left recursion");
        if (left != c.left) fail_msg("%sleft recursion %d, we: %d", source.data, c.left, left);
        n_left += left;
        n_empty += !g && !left;
        if (g) {
            c.m = grammar_machine_new(g, NULL, 0);
            each_text(symbols, 2, CFG_TEXT, &text, compare_cfg, &c);
            text.len = 0;
            each_text(symbols, 2, CFG_TEXT, &text, compare_prefix, &c);
            n_yes += c.n_yes;
        }
        grammar_machine_free(c.m);
        grammar_free(g);
        buf_release(&source);
        buf_release(&text);
    }
    assert_true(n_left > 50 && n_left + n_empty < 500 && n_yes > 500);
}

/* numbers */

/* x and the bounds are in hundredths. */
static void check_decimals(const char *schema, int lo, int hi, bool open) {
    struct error err;
    struct grammar *g = compiled("compact", schema, &err);
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
        bool got = verdict(m, text, strlen(text)) == 'y';
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
        struct grammar *g = made(compiled("compact", schema, &err), &err);
        struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
        for (int x = -12000; x <= 12000; x += abs(x) < 1800 ? 1 : 97) {
            bool want = (form == 2 || x >= lo) && (form == 1 || x <= hi);
            snprintf(text, sizeof text, "%d", x);
            if ((verdict(m, text, strlen(text)) == 'y') != want) fail_msg("%s: %s", schema, text);
        }
        grammar_machine_free(m);
        grammar_free(g);
    }
}
