/*
 * calculator: the check calculator. The equations of a text hold in exact rational arithmetic.
 *
 * The text is folded to ASCII first: full-width digits and signs, × ÷ − and \times become * / - *.
 * A scan then looks for chains `side = side = …`, whose sides are expressions of numbers, + - * /
 * and parentheses. A chain counts if a side has an operator. Other mathematics (a variable
 * or unit next to a side, a power, a root, a remainder) is skipped and does not fail the text:
 * "2x + 3 = 7" and "5 kg + 1 kg = 6 kg" are skipped, "so 5 + 3 = 8 apples" is checked.
 *
 * The time of the scan is linear in the length of the text, and for each unclosed parenthesis at
 * most MAX_DEPTH times the length.
 */
#define _GNU_SOURCE
#include "check/internal.h"
#include "grade/grade.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistr.h>

enum { MAX_DEPTH = 10 };

/* numbers */

enum number_state { NUMBER_OK, NUMBER_OVERFLOW, NUMBER_DIVIDED_BY_ZERO };

/* num / den, den > 0, in lowest terms. The value of a number that is not NUMBER_OK is undefined. */
struct rational {
    int64_t num, den;
    enum number_state state;
};

static struct rational rational_make(__int128 num, __int128 den) {
    __int128 a = num < 0 ? -num : num, b = den < 0 ? -den : den;
    if (den == 0) return (struct rational){.state = NUMBER_DIVIDED_BY_ZERO};
    while (b > 1) { // b == 1: the greatest common divisor is 1
        __int128 rest = a % b;
        a = b;
        b = rest;
    }
    if (b == 0) num /= a, den /= a;
    if (den < 0) num = -num, den = -den;
    if (num > INT64_MAX || num < -INT64_MAX || den > INT64_MAX)
        return (struct rational){.state = NUMBER_OVERFLOW};
    return (struct rational){(int64_t)num, (int64_t)den, NUMBER_OK};
}

/* No product or sum of products of two int64_t above -2^63 overflows an __int128. */
static struct rational rational_apply(struct rational a, char op, struct rational b) {
    const __int128 an = a.num, ad = a.den, bn = b.num, bd = b.den;
    if (a.state) return a;
    if (b.state) return b;
    switch (op) {
    case '+':
        return rational_make(an * bd + bn * ad, ad * bd);
    case '-':
        return rational_make(an * bd - bn * ad, ad * bd);
    case '*':
        return rational_make(an * bn, ad * bd);
    default:
        return rational_make(an * bd, ad * bn);
    }
}

static bool rational_equal(struct rational a, struct rational b) {
    return !a.state && !b.state && a.num == b.num && a.den == b.den;
}

/* folding */

static const struct {
    const char *from, *to;
} signs[] = {
    {"×", "*"},     {"✕", "*"}, {"⋅", "*"}, {"\\times", "*"}, {"\\cdot", "*"},  {"÷", "/"},
    {"\\div", "/"}, {"∕", "/"}, {"−", "-"}, {"\u3000", " "},  {"\\left(", "("}, {"\\right)", ")"},
    {"$", ""},      {"¥", ""},  {"€", ""},  {"£", ""},        {"￥", ""},       {"\\$", ""},
};

/* Appends the fold of the sign at `p`, and returns its bytes; 0: no sign is here. */
static size_t sign_fold(const char *p, struct buf *out) {
    for (size_t i = 0; i < ARRAY_LEN(signs); i++) {
        size_t n = strlen(signs[i].from);
        if (strncmp(p, signs[i].from, n) != 0) continue;
        buf_puts(out, signs[i].to);
        return n;
    }
    return 0;
}

/* Full-width ASCII becomes ASCII. A full-width comma separates thousands only after a full-width
 * digit; it becomes a semicolon elsewhere. */
static char *text_fold(const char *text) {
    const uint8_t *p = (const uint8_t *)text, *end = p + strlen(text);
    struct buf out = {0};
    bool wide_digit = false;
    buf_puts(&out, "");
    while (p < end) {
        ucs4_t c = 0;
        size_t sign = *p < 0x80 && *p != '\\' && *p != '$' ? 0 : sign_fold((const char *)p, &out);
        int n = sign ? (int)sign : u8_mbtouc(&c, p, (size_t)(end - p));
        if (!sign && c >= 0xFF01 && c <= 0xFF5E) {
            char ascii = (char)(c - 0xFEE0);
            if (ascii == ',' && !wide_digit) ascii = ';';
            buf_add(&out, &ascii, 1);
            wide_digit = isdigit((unsigned char)ascii);
        } else {
            wide_digit = false;
            if (!sign) buf_add(&out, p, (size_t)n);
        }
        p += n;
    }
    return out.data;
}

/* expressions */

/* A position in a folded text, which the functions below move. */
struct scan {
    const char *begin, *p;
    int depth;
    bool has_operator; /* an operator was read */
};

static void skip_spaces(struct scan *s) {
    while (*s->p == ' ' || *s->p == '\t') s->p++;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_letter(char c) {
    return isalpha((unsigned char)c) && (unsigned char)c < 0x80;
}

/* Reads digits into num (and den if they follow the decimal point). */
static void digits_read(struct scan *s, struct rational *x, bool fraction) {
    for (; is_digit(*s->p); s->p++) {
        int digit = *s->p - '0';
        if (x->state) continue;
        if (__builtin_mul_overflow(x->num, 10, &x->num) ||
            __builtin_add_overflow(x->num, digit, &x->num) ||
            (fraction && __builtin_mul_overflow(x->den, 10, &x->den)))
            x->state = NUMBER_OVERFLOW;
    }
}

static bool thousands_follow(const char *p) {
    return p[0] == ',' && is_digit(p[1]) && is_digit(p[2]) && is_digit(p[3]) && !is_digit(p[4]);
}

static bool number_read(struct scan *s, struct rational *out) {
    const char *begin = s->p;
    *out = (struct rational){.den = 1};
    if (!is_digit(*s->p) && !(*s->p == '.' && is_digit(s->p[1]))) return false;
    digits_read(s, out, false);
    if (s->p > begin && s->p - begin <= 3)
        while (thousands_follow(s->p)) {
            s->p++;
            digits_read(s, out, false);
        }
    if (*s->p == '.' && is_digit(s->p[1])) {
        s->p++;
        digits_read(s, out, true);
    }
    if (!out->state) *out = rational_make(out->num, out->den);
    return true;
}

static bool sum_read(struct scan *s, struct rational *out);

/* A number or parentheses, after at most one sign. */
static bool factor_read(struct scan *s, struct rational *out) {
    const char *begin = s->p;
    bool minus = *s->p == '-';
    if (*s->p == '-' || *s->p == '+') {
        s->p++;
        skip_spaces(s);
    }
    bool good = false;
    if (*s->p == '(' && s->depth < MAX_DEPTH) {
        s->p++;
        s->depth++;
        good = sum_read(s, out);
        s->depth--;
        skip_spaces(s);
        good = good && *s->p == ')';
        if (good) s->p++;
    } else {
        good = number_read(s, out);
    }
    if (!good) s->p = begin;
    if (good && *s->p == '%') {
        s->p++;
        *out = rational_apply(*out, '/', (struct rational){100, 1, NUMBER_OK});
    }
    if (minus) out->num = -out->num;
    return good;
}

/* Whether a multiplication sign begins here: * or an x between numbers, not **. */
static bool is_times(const char *p) {
    if (*p == '*') return p[1] != '*';
    if (*p != 'x' && *p != 'X') return false;
    for (p++; *p == ' '; p++) continue;
    return is_digit(*p) || *p == '(';
}

/* Reads operands and operators as long as both follow; *out is the value so far. */
static bool operations_read(struct scan *s, struct rational *out, bool products) {
    for (;;) {
        struct scan before = *s;
        skip_spaces(s);
        char op = *s->p;
        bool found = products ? is_times(s->p) || op == '/' : op == '+' || op == '-';
        if (!found) {
            *s = before;
            return true;
        }
        struct rational right;
        s->p++;
        skip_spaces(s);
        s->has_operator = true;
        if (!factor_read(s, &right) || (!products && !operations_read(s, &right, true))) {
            *s = before;
            return true;
        }
        *out = rational_apply(*out, products && op != '/' ? '*' : op, right);
    }
}

/* Reads the longest expression. False, with s->p unchanged: none begins here. */
static bool sum_read(struct scan *s, struct rational *out) {
    skip_spaces(s);
    return factor_read(s, out) && operations_read(s, out, true) && operations_read(s, out, false);
}

/* contexts */

/* The code point that ends before `p`; 0: the beginning. */
static ucs4_t char_before(const char *begin, const char *p) {
    ucs4_t c = 0;
    const char *from = p;
    if (p == begin) return 0;
    for (from--; from > begin && ((unsigned char)*from & 0xC0) == 0x80;) from--;
    u8_mbtouc(&c, (const uint8_t *)from, (size_t)(p - from));
    return c;
}

/* Signs of mathematics that this check does not compute: powers, indices, roots, ≤, ±. */
static bool is_other_mathematics(ucs4_t c) {
    return c == '^' || c == '_' || c == 0xB0 || c == 0xB1 || c == 0xB2 || c == 0xB3 || c == 0xB9 ||
           (c >= 0x2070 && c <= 0x209F) || (c >= 0x2200 && c <= 0x22FF);
}

/* Whether a character may end an operand: a number, a variable, a unit. Of words before a number,
 * は, 是 and 为 (is) do not. */
static bool is_operand_end(ucs4_t c) {
    if (c < 0x80) return isalnum((int)c) || (c && strchr(")]}%?", (int)c));
    bool punctuation = c < 0xC0 || (c >= 0x2000 && c < 0x2070) || (c >= 0x3000 && c < 0x3040);
    return !punctuation && c != 0x306F && c != 0x662F && c != 0x4E3A && c != 0x70BA;
}

static const char *spaces_before(const char *begin, const char *p) {
    while (p > begin && (p[-1] == ' ' || p[-1] == '\t')) p--;
    return p;
}

/* Whether an expression may begin at `p`: the text before it is not part of the same expression.
 * A sign with a blank after it is a list's mark or an operator. */
static bool may_begin(const char *begin, const char *p) {
    ucs4_t c = char_before(begin, p);
    bool sign = *p == '-' || *p == '+';
    if ((sign || *p == '.') && !is_digit(p[1]) && !(sign && strchr("(.", p[1]) && p[1]))
        return false;
    if (c < 0x80 && (isalnum((int)c) || (c && strchr(".)]\\", (int)c)))) return false;
    if (c == ',' && p - begin > 1 && is_digit(p[-2])) return false; // part of a longer number
    const char *operators = spaces_before(begin, p), *q = operators;
    if (is_other_mathematics(char_before(begin, q))) return false;
    if (sign && is_operand_end(char_before(begin, q))) return false;
    /* an operator before it, unless no operand precedes that: a list's mark, emphasis */
    while (q > begin && strchr("+-*/", q[-1])) q--;
    return q == operators || !is_operand_end(char_before(begin, spaces_before(begin, q)));
}

static bool remainder_follows(const char *p) {
    static const char *const words[] = {"remainder", "余", "あまり", "R", "r"};
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        size_t n = strlen(words[i]);
        if (strncmp(p, words[i], n) == 0 && !is_letter(p[n])) return true;
    }
    const char *dots = p;
    while (strncmp(p, "…", 3) == 0) p += 3;
    while (*p == '.') p++;
    while (p > dots && *p == ' ') p++;
    return p > dots && is_digit(*p);
}

/* Whether a LaTeX command ends or only decorates a formula: \) \] \\ \text. */
static bool is_decoration(const char *p) {
    return strchr(")]\\,;!", p[1]) || strncmp(p, "\\text", 5) == 0 ||
           strncmp(p, "\\quad", 5) == 0 || strncmp(p, "\\end", 4) == 0;
}

/* Whether a side may end here: the text after it is not part of the same expression. */
static bool may_end(const struct scan *s) {
    struct scan rest = *s;
    ucs4_t c = 0;
    if (is_letter(*s->p) && !is_letter(s->p[1])) return false; // a variable or a short unit
    if (*s->p == ':' && is_digit(s->p[1])) return false;       // a ratio
    skip_spaces(&rest);
    if (!*rest.p) return true;
    if (*rest.p == '\\') return is_decoration(rest.p);
    if (remainder_follows(rest.p)) return false;
    u8_mbtouc(&c, (const uint8_t *)rest.p, strnlen(rest.p, 6));
    if (c != '_' && is_other_mathematics(c)) return false;
    if (rest.p[0] == '*' && rest.p[1] == '*') return !is_digit(rest.p[2]); // emphasis
    if (!strchr("+-*/(", *rest.p)) return true;
    rest.p++;
    skip_spaces(&rest);
    return !(isalnum((unsigned char)*rest.p) || *rest.p == '(' || (unsigned char)*rest.p >= 0x80);
}

/* equations */

/* The length of an equals sign: "=", "=="; 0: none, as of "=>". */
static int equals_length(const char *p) {
    int n = p[0] != '=' ? 0 : p[1] == '=' ? 2 : 1;
    return n && (p[n] == '>' || p[n] == '<' || p[n] == '=' || p[n] == '~') ? 0 : n;
}

struct chain {
    const char *begin, *end;
    int equations; /* number of `side = side` that count */
    bool has_operator, wrong;
    enum number_state state; /* the first that is not NUMBER_OK */
};

/* Reads a chain whose first side begins here. Moves the scan to the end of its last side. */
static struct chain chain_read(struct scan *s) {
    struct chain c = {.begin = s->p};
    struct rational left, right;
    s->has_operator = false;
    if (!sum_read(s, &left)) return c;
    for (int n;;) {
        struct scan next = *s;
        skip_spaces(&next);
        if (!(n = equals_length(next.p))) break;
        next.p += n;
        skip_spaces(&next);
        if (!sum_read(&next, &right)) break;
        struct scan after = next;
        skip_spaces(&after);
        if (!equals_length(after.p) && !may_end(&next)) break;
        *s = next;
        c.equations++;
        if (!c.state) c.state = left.state ? left.state : right.state;
        c.wrong |= !rational_equal(left, right);
        left = right;
    }
    c.end = s->p;
    c.has_operator = s->has_operator;
    return c;
}

/* Moves to the next place where an expression begins; false: no expression follows. */
static bool next_begin(struct scan *s) {
    for (; *s->p; s->p++) {
        if (!is_digit(*s->p) && !strchr("(-+.", *s->p)) continue;
        struct scan copy = *s;
        struct rational x;
        if (may_begin(s->begin, s->p) && sum_read(&copy, &x)) return true;
        if (!is_digit(*s->p)) continue;
        number_read(s, &x); // not an expression: skip the whole number
        s->p--;
    }
    return false;
}

/* Checks the equations of a folded text; returns their number, or -1 if the case has failed. */
static int64_t equations_check(struct check *c, struct check_case *k, const char *text) {
    struct scan s = {.begin = text, .p = text};
    int64_t n = 0;
    while (next_begin(&s)) {
        struct chain chain = chain_read(&s);
        int len = (int)MIN(chain.end - chain.begin, 100);
        if (!chain.has_operator || !chain.equations) continue;
        n += chain.equations;
        if (!chain.state && !chain.wrong) continue;
        case_fail(c, k, "'%.*s' %s", len, chain.begin,
                  chain.state == NUMBER_OVERFLOW          ? "has too many digits"
                  : chain.state == NUMBER_DIVIDED_BY_ZERO ? "divides by zero"
                                                          : "is wrong");
        return -1;
    }
    return n;
}

/* questions */

static const struct {
    const char *word, *sign;
} words[] = {
    {"足す", "+"}, {"たす", "+"},  {"加上", "+"},       {"加", "+"},     {"plus", "+"},
    {"引く", "-"}, {"ひく", "-"},  {"减去", "-"},       {"減去", "-"},   {"减", "-"},
    {"減", "-"},   {"minus", "-"}, {"掛ける", "*"},     {"かける", "*"}, {"乘以", "*"},
    {"乘", "*"},   {"乗", "*"},    {"times", "*"},      {"割る", "/"},   {"わる", "/"},
    {"除以", "/"}, {"除", "/"},    {"divided by", "/"},
};

/* Words before and after the expression of a question. */
static const char *const frames[] = {
    "what is", "what's", "calculate", "compute", "计算",         "計算",     "请",   "等于多少",
    "等于",    "是多少", "多少",      "几",      "いくつ",       "いくら",   "は何", "何",
    "は",      "です",   "ですか",    "か",      "してください", "しなさい", "を",
};

static size_t word_length(const char *p, const char *word) {
    size_t n = strlen(word);
    return strncasecmp(p, word, n) == 0 ? n : 0;
}

/* Skips white space, the words of a frame and signs; returns whether the text ends. */
static bool frame_skip(const char **p) {
    for (const char *begin = NULL; begin != *p;) {
        size_t longest = 0;
        begin = *p;
        for (size_t i = 0; i < ARRAY_LEN(frames); i++) {
            size_t n = word_length(*p, frames[i]);
            longest = MAX(longest, n);
        }
        *p += longest;
        *p += strspn(*p, " \t\r\n=?:;.,");
        if (strncmp(*p, "。", 3) == 0) *p += 3;
    }
    return !**p;
}

/* Replaces the words of operators by signs. */
static char *operators_fold(const char *text) {
    struct buf out = {0};
    buf_puts(&out, "");
    while (*text) {
        size_t n = 0;
        for (size_t i = 0; !n && i < ARRAY_LEN(words); i++)
            if ((n = word_length(text, words[i].word)) > 0) buf_printf(&out, " %s ", words[i].sign);
        if (!n) buf_add(&out, text, n = 1);
        text += n;
    }
    return out.data;
}

/* The text of the item's question; NULL: the item has no question. Of a conversation it is the last
 * message. */
static const char *question_text(const json_t *item) {
    static const char *const keys[] = {"question", "prompt", "messages"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        const json_t *v = json_object_get(item, keys[i]);
        size_t n = json_array_size(v);
        if (n) v = json_object_get(json_array_get(v, n - 1), "content");
        if (json_is_string(v)) return json_string_value(v);
    }
    return NULL;
}

/* Whether the question is an arithmetic expression with an operator; *out is its value. */
static bool question_value(const json_t *item, struct rational *out) {
    const char *question = question_text(item);
    if (!question || strlen(question) > 1000) return false;
    char *folded = text_fold(question), *text = operators_fold(folded);
    const char *p = text;
    frame_skip(&p);
    struct scan s = {.begin = p, .p = p};
    bool found = sum_read(&s, out) && s.has_operator;
    p = s.p;
    found = found && frame_skip(&p);
    free(folded);
    free(text);
    return found;
}

/* The value of the last expression in the answer of a text. */
static bool answer_value(const char *text, struct rational *out) {
    char *answer = grader_answer(grader_find("exact", &(struct error){0}), text);
    bool found = false;
    if (!answer) return false;
    char *folded = text_fold(answer);
    struct scan s = {.begin = folded, .p = folded};
    while (next_begin(&s)) found = sum_read(&s, out);
    free(folded);
    free(answer);
    return found;
}

static void answer_check(struct check *c, struct check_case *k, struct rational want) {
    struct rational got;
    if (want.state)
        case_fail(c, k, "the value of the question %s",
                  want.state == NUMBER_OVERFLOW ? "has too many digits" : "divides by zero");
    else if (!answer_value(k->text, &got))
        case_fail(c, k, "the answer has no number");
    else if (!rational_equal(got, want))
        case_fail(c, k, want.den == 1 ? "the answer is not %lld" : "the answer is not %lld/%lld",
                  (long long)want.num, (long long)want.den);
}

static int calculator_run(struct check *c, struct check_case *k, struct error *err) {
    char *text = text_fold(k->text);
    struct rational want;
    bool asks = question_value(k->item, &want);
    int64_t n = equations_check(c, k, text);
    (void)err;
    if (n == 0 && !asks) case_fail(c, k, "the text has no equation");
    if (n >= 0 && asks) answer_check(c, k, want);
    k->score = !k->reason;
    free(text);
    return OK;
}

const struct check_kind calculator_check = {.name = "calculator",
                                            .usage = "calculator",
                                            .argument = ARGUMENT_NONE,
                                            .pure = true,
                                            .run_one = calculator_run};
