/*
 * math_parse: parses a formula, in LaTeX or plain text, into a tree.
 *
 * It has two steps. First, rewriting removes commands without meaning (\left, \!, \displaystyle, $)
 * and unifies spellings (\dfrac, ≤ and \leq, full-width digits). Symbols that ASCII does not have
 * become the bytes of enum math_mark. Second, a recursive descent parser reads lists, relations,
 * sums, products, powers and brackets. It drops units and words after a number, and records the
 * first known unit.
 *
 * A text that does not follow this grammar is not an error: the root is MATH_NONE, and the answer
 * is compared as words. Invariants: every loop consumes a byte; nesting is at most MATH_MAX_DEPTH;
 * there are at most MATH_MAX_NODES nodes.
 */
#define _GNU_SOURCE
#include "grade/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
#include <unistr.h>

/* Bytes in a rewritten text that stand for symbols. */
enum math_mark {
    PLUS_MINUS = 1,
    MINUS_PLUS,
    LESS_EQUAL,
    GREATER_EQUAL,
    NOT_EQUAL,
    ELEMENT_OF,
    UNION,
    ROW,             /* end of a row of a matrix */
    WORDS_OPEN = 14, /* begins words, which WORDS_CLOSE ends */
    WORDS_CLOSE,
    SET_OPEN,
    SET_CLOSE,
    FLOOR_OPEN,
    FLOOR_CLOSE,
    CEIL_OPEN,
    CEIL_CLOSE,
    APPROXIMATELY,
};

#define DEGREE_SIGN "\xC2\xB0"
#define DENSE_FROM 0x2E80 /* CJK: a run of such characters counts as words */

/* rewriting */

struct rewrite {
    const char *from, *to;
};
/* Commands without their backslash. `to` WORDS_OPEN: the argument of the command is words. */
static const struct rewrite commands[] = {
    {"left", ""},
    {"right", ""},
    {"big", ""},
    {"Big", ""},
    {"bigg", ""},
    {"Bigg", ""},
    {"bigl", ""},
    {"bigr", ""},
    {"Bigl", ""},
    {"Bigr", ""},
    {"middle", ""},
    {"displaystyle", ""},
    {"textstyle", ""},
    {"limits", ""},
    {"mathbf", ""},
    {"mathbb", ""},
    {"mathcal", ""},
    {"boldsymbol", ""},
    {"bold", ""},
    {"vec", ""},
    {"boxed", ""},
    {"overrightarrow", ""},
    {"!", ""},
    {"$", ""},
    {",", " "},
    {";", " "},
    {":", " "},
    {" ", " "},
    {"quad", " "},
    {"qquad", " "},
    {"%", "%"},
    {"#", ""},
    {"&", "&"},
    {"_", "_"},
    {"{", "\x10"},
    {"}", "\x11"},
    {"lbrace", "\x10"},
    {"rbrace", "\x11"},
    {"\\", "\x08"},
    {"|", "|"},
    {"vert", "|"},
    {"lvert", "|"},
    {"rvert", "|"},
    {"langle", "("},
    {"rangle", ")"},
    {"(", " "},
    {")", " "},
    {"[", " "},
    {"]", " "},
    {"lbrack", "["},
    {"rbrack", "]"},
    {"lfloor", "\x12"},
    {"rfloor", "\x13"},
    {"lceil", "\x14"},
    {"rceil", "\x15"},
    {"times", "*"},
    {"cdot", "*"},
    {"ast", "*"},
    {"div", "/"},
    {"colon", ":"},
    {"pm", "\x01"},
    {"mp", "\x02"},
    {"le", "\x03"},
    {"leq", "\x03"},
    {"leqslant", "\x03"},
    {"ge", "\x04"},
    {"geq", "\x04"},
    {"geqslant", "\x04"},
    {"lt", "<"},
    {"gt", ">"},
    {"ne", "\x05"},
    {"neq", "\x05"},
    {"in", "\x06"},
    {"cup", "\x07"},
    {"approx", "\x16"},
    {"circ", DEGREE_SIGN},
    {"degree", DEGREE_SIGN},
    {"pi", "π"},
    {"infty", "∞"},
    {"emptyset", "∅"},
    {"varnothing", "∅"},
    {"alpha", "α"},
    {"beta", "β"},
    {"gamma", "γ"},
    {"delta", "δ"},
    {"theta", "θ"},
    {"lambda", "λ"},
    {"mu", "μ"},
    {"phi", "φ"},
    {"varphi", "φ"},
    {"omega", "ω"},
    {"dfrac", "\\frac "},
    {"tfrac", "\\frac "},
    {"cfrac", "\\frac "},
    {"dbinom", "\\binom "},
    {"tbinom", "\\binom "},
    {"dots", "\\ldots "},
    {"text", "\x0E"},
    {"textbf", "\x0E"},
    {"textit", "\x0E"},
    {"textrm", "\x0E"},
    {"texttt", "\x0E"},
    {"mbox", "\x0E"},
    {"hbox", "\x0E"},
    {"mathrm", "\x0E"},
    {"mathit", "\x0E"},
    {"operatorname", "\x0E"},
};
static const struct rewrite symbols[] = {
    {"**", "^"},         {"<=", "\x03"},      {">=", "\x04"},     {" !=", "\x05"},
    {"{,}", ","},        {"$", " "},          {"~", " "},         {"\"", ""},
    {"€", ""},           {"£", ""},           {"¥", ""},          {"−", "-"},
    {"–", "-"},          {"×", "*"},          {"·", "*"},         {"⋅", "*"},
    {"∙", "*"},          {"÷", "/"},          {"⁄", "/"},         {"±", "\x01"},
    {"∓", "\x02"},       {"≤", "\x03"},       {"≦", "\x03"},      {"≥", "\x04"},
    {"≧", "\x04"},       {"≠", "\x05"},       {"∈", "\x06"},      {"∪", "\x07"},
    {"≈", "\x16"},       {"≒", "\x16"},       {"√", " sqrt "},    {"∛", "\\sqrt[3]"},
    {"²", "^2"},         {"³", "^3"},         {"⁴", "^4"},        {"⁵", "^5"},
    {"⁻¹", "^{-1}"},     {"½", "\\frac12 "},  {"⅓", "\\frac13 "}, {"⅔", "\\frac23 "},
    {"¼", "\\frac14 "},  {"¾", "\\frac34 "},  {"⅛", "\\frac18 "}, {"℃", DEGREE_SIGN},
    {"°C", DEGREE_SIGN}, {"°F", DEGREE_SIGN}, {"、", ","},        {"。", "."},
    {"…", "\\ldots "},   {"⟨", "("},          {"⟩", ")"},         {"⌊", "\x12"},
    {"⌋", "\x13"},       {"⌈", "\x14"},       {"⌉", "\x15"},
};

struct function_name {
    const char *name;
    enum math_function fn;
};
static const struct function_name functions[] = {
    {"sin", FN_SIN},     {"cos", FN_COS},     {"tan", FN_TAN},     {"cot", FN_COT},
    {"sec", FN_SEC},     {"csc", FN_CSC},     {"arcsin", FN_ASIN}, {"arccos", FN_ACOS},
    {"arctan", FN_ATAN}, {"asin", FN_ASIN},   {"acos", FN_ACOS},   {"atan", FN_ATAN},
    {"sinh", FN_SINH},   {"cosh", FN_COSH},   {"tanh", FN_TANH},   {"exp", FN_EXP},
    {"ln", FN_LN},       {"log", FN_LOG},     {"lg", FN_LOG},      {"sqrt", FN_SQRT},
    {"abs", FN_ABS},     {"floor", FN_FLOOR}, {"ceil", FN_CEIL},
};

static const struct function_name *function_find(const char *s, size_t len) {
    for (size_t i = 0; i < ARRAY_LEN(functions); i++)
        if (strlen(functions[i].name) == len && memcmp(functions[i].name, s, len) == 0)
            return &functions[i];
    return NULL;
}

static size_t letter_count(const char *s) {
    size_t n = 0;
    while (isalpha((unsigned char)s[n])) n++;
    return n;
}

static size_t digit_count(const char *s) {
    size_t n = 0;
    while (isdigit((unsigned char)s[n])) n++;
    return n;
}

/* Bytes from s, which is after an opening brace, to the closing brace or to the end of the text. */
static size_t braced_len(const char *s) {
    int depth = 0;
    size_t n = 0;
    for (; s[n]; n++) {
        if (s[n] == '\\' && s[n + 1]) {
            n++;
            continue;
        }
        depth += s[n] == '{';
        if (s[n] == '}' && depth-- == 0) break;
    }
    return n;
}

/* Rewrites the argument {…} of \text to words between WORDS_OPEN and WORDS_CLOSE. The argument
 * stays part of the formula if it has no letters, or a single letter with neither a blank nor a
 * digit before it. Returns the bytes read; 0: no argument follows. */
static size_t words_rewrite(const char *s, struct buf *out) {
    size_t skip = strspn(s, " ");
    if (s[skip] != '{') return 0;
    const char *content = s + skip + 1;
    size_t len = braced_len(content), n_letters = 0, begin = out->len + 1;
    buf_puts(out, "\x0E");
    for (size_t i = 0; i < len; i++) {
        if (content[i] == '\\')
            i += letter_count(content + i + 1);
        else if ((uint8_t)content[i] >= 0x20 && !strchr("{}$", content[i]))
            buf_add(out, content + i, 1);
        n_letters += isalpha((unsigned char)content[i]) || (uint8_t)content[i] >= 0x80;
    }
    bool is_unit =
        strspn(content, " ") > 0 || (begin > 1 && isdigit((unsigned char)out->data[begin - 2]));
    bool is_words = n_letters > 1 || (n_letters == 1 && is_unit);
    bool is_blank = strspn(out->data + begin, " ") == out->len - begin;
    if (!is_words) out->data[begin - 1] = is_blank ? ' ' : '{';
    if (is_words || !is_blank) buf_puts(out, is_words ? "\x0F" : "}");
    return skip + 1 + len + (content[len] == '}');
}

/* Rewrites the command at a backslash; returns the bytes read. */
static size_t command_rewrite(const char *s, struct buf *out) {
    size_t len = letter_count(s + 1);
    if (function_find(s + 1, len)) {
        bool root = len == 4 && memcmp(s + 1, "sqrt", 4) == 0;
        buf_printf(out, root ? "\\%.*s " : " %.*s ", (int)len, s + 1);
        return 1 + len;
    }
    if (len == 0 && s[1]) len = 1;
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) {
        if (strlen(commands[i].from) != len || memcmp(commands[i].from, s + 1, len) != 0) continue;
        if (*commands[i].to == WORDS_OPEN) return 1 + len + words_rewrite(s + 1 + len, out);
        buf_puts(out, commands[i].to);
        bool side = strcmp(commands[i].from, "left") == 0 || strcmp(commands[i].from, "right") == 0;
        return 1 + len + (side && s[1 + len] == '.'); // "\right." has no closing bracket
    }
    if (isalpha((unsigned char)s[1])) buf_printf(out, "\\%.*s ", (int)len, s + 1);
    return 1 + len;
}

/* Rewrites the symbol or character at s; returns the bytes read. */
static size_t symbol_rewrite(const char *s, struct buf *out) {
    for (size_t i = 0; i < ARRAY_LEN(symbols); i++) {
        size_t len = strlen(symbols[i].from);
        if (strncmp(symbols[i].from, s, len) != 0) continue;
        buf_puts(out, symbols[i].to);
        return len;
    }
    ucs4_t c;
    int n = u8_strmbtouc(&c, (const uint8_t *)s);
    if (n <= 0) return 1; // not UTF-8
    if (c >= 0xFF01 && c <= 0xFF5E) {
        char ascii[2] = {(char)(c - 0xFEE0), 0};
        if (*ascii == '$') *ascii = ' ';
        buf_puts(out, ascii);
    } else if (uc_is_property_white_space(c) || c == 0xFFE5) {
        buf_puts(out, " ");
    } else if (c >= 0x20) {
        buf_add(out, s, (size_t)n);
    }
    return (size_t)n;
}

static void rewrite(const char *s, struct buf *out) {
    buf_puts(out, "");
    while (*s) s += *s == '\\' ? command_rewrite(s, out) : symbol_rewrite(s, out);
    while (out->len && strchr(" .", out->data[out->len - 1])) out->data[--out->len] = 0;
}

/* units */

/* Each row lists the names of one unit; the first name identifies it. */
static const char *const units[] = {
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "mg milligram milligrams",
    "g gram grams",
    "kg kilogram kilograms",
    "lb lbs pound pounds",
    "oz ounce ounces",
    "ml milliliter milliliters",
    "l L liter liters litre litres",
    "s sec second seconds",
    "min minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "dollar dollars",
    "cent cents",
    "rad radian radians",
};

/* The hash of the first name of the unit that s[len] names; 0: no known unit. */
static uint64_t unit_find(const char *s, size_t len) {
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        for (const char *p = units[i]; *p; p += strspn(p, " ")) {
            size_t n = strcspn(p, " ");
            if (n == len && memcmp(p, s, len) == 0)
                return hash_fnv1a(units[i], strcspn(units[i], " "));
            p += n;
        }
    return 0;
}

/* the tree */

struct math_parser {
    struct math_expr *m;
    const char *s; /* NUL-terminated */
    size_t pos;
    int depth, reading;   /* nesting depth; bits of enum math_reading */
    bool failed, in_bars; /* in_bars: inside |…| */
    bool has_word;        /* a word is in the place of a value, and no = follows */
};

static int chain(struct math_parser *p);
static int power(struct math_parser *p);
static int list(struct math_parser *p, int *n_items);

/* Every parsing function returns the index of its node; after a failure, p->failed is set. */
static int fail(struct math_parser *p) {
    p->failed = true;
    return MATH_NONE;
}

static int node_new(struct math_parser *p, enum math_kind kind) {
    struct math_expr *m = p->m;
    if (p->failed || m->n == MATH_MAX_NODES) return fail(p);
    m->node[m->n] =
        (struct math_node){.kind = (uint8_t)kind, .first = MATH_NONE, .next = MATH_NONE};
    return m->n++;
}

static void child_append(struct math_parser *p, int parent, int child) {
    if (p->failed) return;
    struct math_node *node = p->m->node;
    int16_t *end = &node[parent].first;
    while (*end != MATH_NONE) end = &node[*end].next;
    *end = (int16_t)child;
}

static int node_with_child(struct math_parser *p, enum math_kind kind, int child) {
    int n = node_new(p, kind);
    child_append(p, n, child);
    return n;
}

static int node_with_children(struct math_parser *p, enum math_kind kind, int a, int b) {
    int n = node_with_child(p, kind, a);
    child_append(p, n, b);
    return n;
}

/* The next byte that is not a blank. */
static char peek(struct math_parser *p) {
    while (p->s[p->pos] == ' ') p->pos++;
    return p->s[p->pos];
}

static bool accept(struct math_parser *p, char c) {
    if (peek(p) != c) return false;
    p->pos++;
    return true;
}

static bool follows_blank(const struct math_parser *p) {
    return p->pos == 0 || p->s[p->pos - 1] == ' ';
}

/* Whether the next token is this command; a following blank is not part of it. */
static bool is_at_command(struct math_parser *p, const char *name) {
    size_t len = strlen(name);
    return peek(p) == '\\' && letter_count(p->s + p->pos + 1) == len &&
           memcmp(p->s + p->pos + 1, name, len) == 0;
}

static bool accept_command(struct math_parser *p, const char *name) {
    if (!is_at_command(p, name)) return false;
    p->pos += 1 + strlen(name);
    return true;
}

/* Skips a group in braces with any content; false: no complete group is here. */
static bool accept_braces(struct math_parser *p) {
    if (peek(p) != '{') return false;
    size_t len = braced_len(p->s + p->pos + 1);
    if (!p->s[p->pos + 1 + len]) return false;
    p->pos += 2 + len;
    return true;
}

/* Bytes of the list separator here: a comma, a semicolon, "and", 或 and the like; 0: none. */
static size_t separator_len(struct math_parser *p) {
    static const char *const words[] = {"and", "or", "または", "及び", "と", "或者", "或", "和"};
    char c = peek(p);
    const char *s = p->s + p->pos;
    if (c == ',' || c == ';') return 1;
    size_t skip = c == WORDS_OPEN ? 1 + strspn(s + 1, " ,") : 0;
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        size_t len = strlen(words[i]);
        if (strncmp(s + skip, words[i], len) != 0 || isalpha((unsigned char)s[skip + len]))
            continue;
        size_t end = skip + len + strspn(s + skip + len, " ");
        if (!skip) return len;
        if (s[end] == WORDS_CLOSE) return end + 1;
    }
    return 0;
}

/* Bytes of the run of characters from DENSE_FROM on; 0: none. */
static size_t dense_run_len(const char *s) {
    size_t n = 0;
    ucs4_t c;
    for (int k; (uint8_t)s[n] >= 0x80; n += (size_t)k) {
        k = u8_strmbtouc(&c, (const uint8_t *)s + n);
        if (k <= 0 || c < DENSE_FROM) break;
    }
    return n;
}

/* Whether a factor begins here. */
static bool starts_factor(struct math_parser *p) {
    unsigned char c = (unsigned char)peek(p);
    if (!c || separator_len(p) || is_at_command(p, "end")) return false;
    if (c == '.') return isdigit((unsigned char)p->s[p->pos + 1]);
    if (c == '|') return !p->in_bars;
    if (c >= 0x80) return strncmp(p->s + p->pos, DEGREE_SIGN, 2) != 0;
    return isalnum(c) || strchr("([{\\\x0E\x10\x12\x14", c);
}

/* Whether a comma or blank and exactly three digits follow, as in ",000". */
static bool is_thousands_group(const char *s) {
    return (*s == ',' || *s == ' ') && digit_count(s + 1) == 3;
}

/* Reads the groups of three digits after n_leading digits. */
static void number_groups(struct math_parser *p, size_t n_leading) {
    const char *first = p->s + p->pos - n_leading;
    if (n_leading == 0 || n_leading > 3 || *first == '0') return;
    for (; is_thousands_group(p->s + p->pos); p->pos += 4) {
        bool is_ambiguous = p->s[p->pos] == ',' && p->s[p->pos + 1] != '0';
        if (is_ambiguous) p->m->other_readings |= READING_COMMA_SEPARATES;
        if (is_ambiguous && p->reading & READING_COMMA_SEPARATES) return;
    }
}

/* Reads repeating digits, as in 0.1\overline{6}, and returns their number. */
static size_t number_repeat(struct math_parser *p) {
    const char *s = p->s + p->pos;
    if (strncmp(s, "\\overline {", 11) != 0) return 0;
    size_t n = digit_count(s + 11);
    if (n == 0 || s[11 + n] != '}') return 0;
    p->pos += 12 + n;
    return n;
}

static void number_exponent(struct math_parser *p) {
    const char *s = p->s + p->pos;
    size_t sign = *s && strchr("+-", s[1]) && s[1] ? 1 : 0, n;
    if ((*s != 'e' && *s != 'E') || (n = digit_count(s + 1 + sign)) == 0 || n > 4) return;
    if (!isalpha((unsigned char)s[1 + sign + n])) p->pos += 1 + sign + n;
}

/* Reads the base of 2516_8 or 11_{16}. The base is recorded as the unit. */
static void number_base(struct math_parser *p) {
    const char *s = p->s + p->pos;
    size_t brace = *s == '_' && s[1] == '{', n;
    if (*s != '_' || (n = digit_count(s + 1 + brace)) == 0 || (brace && s[2 + n] != '}')) return;
    if (p->depth <= 1) p->m->unit = hash_fnv1a(s + 1 + brace, n);
    p->pos += 1 + n + 2 * brace;
}

static int number(struct math_parser *p) {
    size_t begin = p->pos, n_leading = digit_count(p->s + p->pos), repeat = 0;
    p->pos += n_leading;
    number_groups(p, n_leading);
    if (p->s[p->pos] == '.' &&
        (isdigit((unsigned char)p->s[p->pos + 1]) || p->s[p->pos + 1] == '\\')) {
        size_t fraction = digit_count(p->s + p->pos + 1), saved_pos = p->pos;
        p->pos += 1 + fraction;
        repeat = number_repeat(p);
        if (fraction + repeat == 0) p->pos = saved_pos;
    }
    if (!repeat) number_exponent(p);
    int n = node_new(p, MATH_NUMBER);
    if (n == MATH_NONE) return n;
    p->m->node[n].pos = (int16_t)begin;
    p->m->node[n].len = (int16_t)(p->pos - begin);
    p->m->node[n].repeat = (int16_t)repeat;
    number_base(p);
    return n;
}

static int name_new(struct math_parser *p, uint64_t hash) {
    int n = node_new(p, MATH_NAME);
    if (n != MATH_NONE) p->m->node[n].name = hash;
    return n;
}

/* A name of len bytes with its index or primes: x_1, x_{1}, f''. */
static int name(struct math_parser *p, size_t len) {
    char key[64];
    size_t n = MIN(len, sizeof key);
    memcpy(key, p->s + p->pos, n);
    p->pos += len;
    if (p->s[p->pos] == '_') {
        const char *s = p->s + p->pos + 1;
        size_t size = *s == '{' ? 2 + braced_len(s + 1) : *s != 0;
        if (*s == '{' && s[size - 1] != '}') return fail(p);
        for (size_t i = 0; i < size; i++)
            if (!strchr("{} ", s[i]) && n < sizeof key) key[n++] = s[i] == '\\' ? '_' : s[i];
        p->pos += 1 + size;
    }
    for (; p->s[p->pos] == '\''; p->pos++)
        if (n < sizeof key) key[n++] = '\'';
    return name_new(p, hash_fnv1a(key, n));
}

/* A word of len bytes as a name, in lower case. A text with a word is a formula only if the word is
 * on the left side of an equation. */
static int word(struct math_parser *p, size_t len) {
    struct buf folded = {0};
    text_normalize(p->s + p->pos, len, &folded);
    uint64_t hash = hash_fnv1a(folded.data, folded.len);
    buf_release(&folded);
    p->pos += len;
    p->has_word = true;
    return name_new(p, hash);
}

/* An argument without braces, as of \frac12: a single digit, or a power. */
static int argument(struct math_parser *p) {
    if (!isdigit((unsigned char)peek(p))) return power(p);
    int n = node_new(p, MATH_NUMBER);
    if (n == MATH_NONE) return n;
    p->m->node[n].pos = (int16_t)p->pos++;
    p->m->node[n].len = 1;
    return n;
}

/* A group in braces, without a suffix such as an exponent; if no brace is here, an argument. */
static int group(struct math_parser *p) {
    if (peek(p) != '{') return argument(p);
    int n_items = 0, n;
    if (++p->depth > MATH_MAX_DEPTH) return fail(p);
    p->pos++;
    bool outer_bars = p->in_bars;
    p->in_bars = false;
    n = list(p, &n_items);
    p->in_bars = outer_bars;
    p->depth--;
    if (!accept(p, '}')) return fail(p);
    if (n_items > 1 && !p->failed) p->m->node[n].kind = MATH_SET;
    return n;
}

static int fraction(struct math_parser *p) {
    int a = group(p), b = group(p);
    return node_with_children(p, MATH_MULTIPLY, a, node_with_child(p, MATH_INVERT, b));
}

static int call_new(struct math_parser *p, enum math_function fn, int argument_node) {
    int n = node_with_child(p, MATH_CALL, argument_node);
    if (n != MATH_NONE) p->m->node[n].op = (uint8_t)fn;
    return n;
}

static int primary(struct math_parser *p);

static int root(struct math_parser *p) {
    int degree = MATH_NONE, n_items;
    if (accept(p, '[')) {
        degree = list(p, &n_items);
        if (!accept(p, ']')) return fail(p);
    }
    int n = peek(p) == '{' ? group(p) : primary(p);
    return degree == MATH_NONE ? call_new(p, FN_SQRT, n)
                               : node_with_children(p, MATH_ROOT, n, degree);
}

static int binomial(struct math_parser *p) {
    int n = call_new(p, FN_BINOMIAL, group(p)), k = group(p);
    child_append(p, n, k);
    return n;
}

/* Reads {pmatrix} and the like, or {array} with its columns {cc}. */
static bool accept_matrix_kind(struct math_parser *p) {
    static const char *const kinds[] = {"matrix", "pmatrix", "bmatrix", "smallmatrix", "array"};
    const char *s = p->s + p->pos;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        size_t len = strlen(kinds[i]);
        if (*s != '{' || strncmp(s + 1, kinds[i], len) != 0 || s[1 + len] != '}') continue;
        return accept_braces(p) && (strcmp(kinds[i], "array") != 0 || accept_braces(p));
    }
    return false;
}

/* The rows of a matrix, up to \end{…}. */
static int matrix(struct math_parser *p) {
    if (peek(p) != '{' || !accept_matrix_kind(p)) return fail(p);
    int n = node_new(p, MATH_MATRIX), columns = 0, column = 0;
    while (!p->failed && !is_at_command(p, "end")) {
        child_append(p, n, chain(p));
        column++;
        if (accept(p, '&')) continue;
        if ((columns && column != columns) || column > 100) return fail(p);
        columns = column;
        column = 0;
        if (!accept(p, ROW) && !is_at_command(p, "end")) return fail(p);
    }
    if (p->failed || columns == 0 || column || !accept_command(p, "end") || !accept_braces(p))
        return fail(p);
    p->m->node[n].op = (uint8_t)columns;
    return n;
}

/* The rest after the opening bracket `open`: a group, a point or an interval. */
static int bracket(struct math_parser *p, char open) {
    int n_items = 0;
    bool outer_bars = p->in_bars;
    p->in_bars = false;
    int n = list(p, &n_items);
    p->in_bars = outer_bars;
    bool closed = accept(p, ']');
    if (!closed && !accept(p, ')')) return fail(p);
    if (p->failed || n_items == 1) return (open == '[') == closed ? n : fail(p);
    p->m->node[n].kind = MATH_TUPLE;
    p->m->node[n].op = (uint8_t)((open == '[') | closed << 1);
    return n;
}

/* The rest after an opening |, ⌊ or ⌈, as the argument of fn. */
static int enclosed(struct math_parser *p, enum math_function fn, char close) {
    bool outer_bars = p->in_bars;
    p->in_bars = close == '|';
    int n = chain(p);
    p->in_bars = outer_bars;
    return accept(p, close) ? call_new(p, fn, n) : fail(p);
}

static int set(struct math_parser *p) {
    int n_items = 0;
    if (accept(p, SET_CLOSE)) return name_new(p, hash_fnv1a("∅", 3));
    int n = list(p, &n_items);
    if (!accept(p, SET_CLOSE) || p->failed) return fail(p);
    if (n_items > 1) p->m->node[n].kind = MATH_SET;
    return n_items > 1 ? n : node_with_child(p, MATH_SET, n);
}

static int command(struct math_parser *p) {
    if (accept_command(p, "frac")) return fraction(p);
    if (accept_command(p, "sqrt")) return root(p);
    if (accept_command(p, "binom")) return binomial(p);
    if (accept_command(p, "begin")) return matrix(p);
    if (accept_command(p, "overline")) return group(p);
    return name(p, 1 + letter_count(p->s + p->pos + 1));
}

/* The rest after a function's name: sin x, sin^2 x, log_2 8, sin 2x. Without brackets the argument
 * is all adjacent factors up to the next function; for a root it is one factor without its
 * suffixes. */
static int call(struct math_parser *p, enum math_function fn) {
    int base = MATH_NONE, exponent = MATH_NONE, factors = MATH_NONE;
    if (fn == FN_LOG && accept(p, '_')) base = group(p);
    if (accept(p, '^')) exponent = group(p);
    bool is_single_factor = strchr("({[|", peek(p)) || fn == FN_SQRT;
    if (is_single_factor)
        factors = primary(p);
    else
        factors = node_with_child(p, MATH_MULTIPLY, power(p));
    while (!is_single_factor && !p->failed && starts_factor(p) && p->s[p->pos] != WORDS_OPEN &&
           !function_find(p->s + p->pos, letter_count(p->s + p->pos)))
        child_append(p, factors, power(p));
    int n = call_new(p, fn, factors);
    if (base != MATH_NONE) child_append(p, n, base);
    if (exponent == MATH_NONE || p->failed) return n;
    const struct math_node *e = &p->m->node[exponent];
    bool inverse = fn <= FN_TAN && e->kind == MATH_NEGATE;
    if (inverse) p->m->node[n].op = (uint8_t)(FN_ASIN + (fn - FN_SIN));
    return inverse ? n : node_with_children(p, MATH_POWER, n, exponent);
}

static int letter(struct math_parser *p) {
    const char *s = p->s + p->pos;
    size_t len = letter_count(s);
    const struct function_name *f = function_find(s, len);
    if (f) {
        p->pos += len;
        return call(p, f->fn);
    }
    if (len == 2 && memcmp(s, "pi", 2) == 0) {
        p->pos += len;
        return node_new(p, MATH_PI);
    }
    if ((len == 3 && memcmp(s, "inf", 3) == 0) || (len == 8 && memcmp(s, "infinity", 8) == 0)) {
        p->pos += len;
        return name_new(p, hash_fnv1a("∞", 3));
    }
    if (len >= 4 && follows_blank(p)) return word(p, len);
    if ((*s == 'e' || *s == 'i') && s[1] != '_') {
        p->pos++;
        return node_new(p, *s == 'e' ? MATH_E : MATH_I);
    }
    return name(p, 1);
}

/* Skips words before a value and reads the value. If no value follows, the words are a name. */
static int value_after_words(struct math_parser *p) {
    const char *s = p->s + p->pos;
    bool marked = *s == WORDS_OPEN;
    size_t len = marked ? strcspn(s, "\x0F") : dense_run_len(s), begin = p->pos;
    p->pos += len + (marked && s[len]);
    if (starts_factor(p)) return primary(p);
    p->pos = begin + marked;
    int n = word(p, len - marked);
    p->pos += marked && p->s[p->pos];
    return n;
}

static int symbol(struct math_parser *p) {
    const char *s = p->s + p->pos;
    int len = u8_strmblen((const uint8_t *)s);
    if (len <= 0) return fail(p);
    if (strncmp(s, "π", 2) == 0) {
        p->pos += 2;
        return node_new(p, MATH_PI);
    }
    return dense_run_len(s) ? value_after_words(p) : name(p, (size_t)len);
}

static int primary_inside(struct math_parser *p) {
    unsigned char c = (unsigned char)peek(p);
    if (isdigit(c) || (c == '.' && isdigit((unsigned char)p->s[p->pos + 1]))) return number(p);
    if (isalpha(c)) return letter(p);
    if (c >= 0x80) return symbol(p);
    if (c == WORDS_OPEN) return value_after_words(p);
    if (c == '\\') return command(p);
    if (c == '{') return group(p);
    if (!c) return fail(p);
    p->pos++;
    if (c == '(' || c == '[') return bracket(p, (char)c);
    if (c == SET_OPEN) return set(p);
    if (c == '|') return enclosed(p, FN_ABS, '|');
    if (c == FLOOR_OPEN) return enclosed(p, FN_FLOOR, FLOOR_CLOSE);
    if (c == CEIL_OPEN) return enclosed(p, FN_CEIL, CEIL_CLOSE);
    return fail(p);
}

/* Every recursion passes through primary(), group() or exponent(), which count the depth. */
static int primary(struct math_parser *p) {
    if (p->failed || ++p->depth > MATH_MAX_DEPTH) return fail(p);
    int n = primary_inside(p);
    p->depth--;
    return n;
}

/* Skips a degree sign, which may be raised, and the C or F after it: "°", "^°", "^{°}", "°C". */
static bool accept_degree(struct math_parser *p) {
    size_t saved_pos = p->pos;
    bool raised = accept(p, '^'), brace = raised && accept(p, '{');
    peek(p);
    if (strncmp(p->s + p->pos, DEGREE_SIGN, 2) != 0) {
        p->pos = saved_pos;
        return false;
    }
    p->pos += 2;
    if (brace && !accept(p, '}')) p->failed = true;
    char c = peek(p);
    if ((c == 'C' || c == 'F') && !isalpha((unsigned char)p->s[p->pos + 1])) p->pos++;
    return true;
}

static int exponent(struct math_parser *p) {
    if (++p->depth > MATH_MAX_DEPTH) return fail(p);
    bool minus = accept(p, '-');
    int n = peek(p) == '{' ? group(p) : power(p);
    p->depth--;
    return minus ? node_with_child(p, MATH_NEGATE, n) : n;
}

/* A primary with its suffixes: degree, percent, factorial, exponent. */
static int power(struct math_parser *p) {
    int n = primary(p);
    for (int i = 0; !p->failed && i < 8; i++) {
        if (accept_degree(p))
            n = node_with_child(p, MATH_DEGREE, n);
        else if (accept(p, '%'))
            n = node_with_child(p, MATH_PERCENT, n);
        else if (accept(p, '!'))
            n = call_new(p, FN_FACTORIAL, n);
        else if (accept(p, '^'))
            n = node_with_children(p, MATH_POWER, n, exponent(p));
        else
            break;
    }
    return n;
}

/* Records the first known unit in s[len], if the text is not nested and has no unit yet. */
static void unit_record(struct math_parser *p, const char *s, size_t len) {
    uint64_t unit = 0;
    for (size_t i = 0; i < len && !unit; i++) {
        size_t n = MIN(letter_count(s + i), len - i);
        if (n) unit = unit_find(s + i, n);
        i += n;
    }
    if (p->depth == 0 && !p->m->unit) p->m->unit = unit;
}

/* Whether the `len` letters after a value are a unit, not variables. after_unit: the value already
 * has a unit. */
static bool letters_are_unit(struct math_parser *p, size_t len, bool after_unit) {
    const char *s = p->s + p->pos;
    if (len == 0 || function_find(s, len)) return false;
    if (len == 1) {
        if (!follows_blank(p) || !unit_find(s, 1) || (s[1] && !strchr(" ^/,)", s[1]))) return false;
        p->m->other_readings |= READING_UNIT_IS_VARIABLE;
        return !(p->reading & READING_UNIT_IS_VARIABLE);
    }
    return unit_find(s, len) || (follows_blank(p) && (after_unit || len >= 4));
}

/* Bytes of the unit or of the words after a value; 0: none. */
static size_t unit_len(struct math_parser *p, bool after_unit) {
    char c = peek(p);
    const char *s = p->s + p->pos;
    if (separator_len(p)) return 0;
    if (c == WORDS_OPEN) return strcspn(s, "\x0F") + (strchr(s, WORDS_CLOSE) != NULL);
    size_t len = letter_count(s);
    return letters_are_unit(p, len, after_unit) ? len : dense_run_len(s);
}

/* Skips the units and words after a value; false: no unit or word. */
static bool accept_unit(struct math_parser *p) {
    bool after_unit = false;
    for (size_t len; (len = unit_len(p, after_unit)) > 0; after_unit = true) {
        unit_record(p, p->s + p->pos, len);
        p->pos += len;
        if (p->s[p->pos] == '^') { // cm^2, cm^{2}
            p->pos++;
            if (!accept_braces(p) && isdigit((unsigned char)peek(p))) p->pos++;
        }
        const char *s = p->s + p->pos;
        if (peek(p) == '/' && (letter_count(s + 1) || s[1] == WORDS_OPEN))
            p->pos += 1 + letter_count(s + 1);
    }
    return after_unit;
}

/* Whether the node is a number without a point, which may be the integer of a mixed number. */
static bool is_integer_literal(const struct math_parser *p, int n) {
    const struct math_node *v = &p->m->node[n];
    return v->kind == MATH_NUMBER && !memchr(p->s + v->pos, '.', (size_t)v->len);
}

/* Bytes of "{12}" or "1" here, with the blanks before it; 0: something else is here. */
static size_t small_argument_len(const char *s) {
    size_t skip = strspn(s, " "), n = digit_count(s + skip + 1);
    if (isdigit((unsigned char)s[skip])) return skip + 1;
    return s[skip] == '{' && n && s[skip + 1 + n] == '}' ? skip + 2 + n : 0;
}

/* Whether a fraction of integers follows, as in 3\frac12 and 3 1/2. Looks ahead in the text, so
 * nothing is parsed twice. */
static bool is_at_small_fraction(struct math_parser *p) {
    size_t a, b;
    const char *s = p->s + p->pos;
    if (!is_at_command(p, "frac"))
        return (a = digit_count(s)) && s[a] == '/' && digit_count(s + a + 1);
    s += strlen("\\frac");
    if ((a = small_argument_len(s)) == 0 || (b = small_argument_len(s + a)) == 0) return false;
    return s[a + b + strspn(s + a + b, " ")] != '^';
}

static int small_fraction(struct math_parser *p) {
    if (accept_command(p, "frac")) return fraction(p);
    int a = number(p);
    p->pos++;
    return node_with_children(p, MATH_MULTIPLY, a, node_with_child(p, MATH_INVERT, number(p)));
}

/* Parses a factor that follows the factor `last` without a sign. *mixed: the factor is the fraction
 * of a mixed number, which the caller adds to `last`. */
static int adjacent_factor(struct math_parser *p, int last, bool *mixed) {
    *mixed = is_integer_literal(p, last) && is_at_small_fraction(p);
    if (*mixed) return small_fraction(p);
    if (isdigit((unsigned char)peek(p))) return fail(p); // "2 3" and "x2" are not products
    return power(p);
}

static int signed_power(struct math_parser *p) {
    bool minus = accept(p, '-');
    int n = power(p);
    return minus ? node_with_child(p, MATH_NEGATE, n) : n;
}

static int term(struct math_parser *p) {
    int last = power(p), product = MATH_NONE;
    while (!p->failed) {
        char c = peek(p);
        bool mixed = false;
        int next;
        if (accept_unit(p)) continue;
        if (accept(p, '*'))
            next = signed_power(p);
        else if (c == '/' || c == ':')
            p->pos++, next = node_with_child(p, MATH_INVERT, signed_power(p));
        else if (starts_factor(p))
            next = adjacent_factor(p, last, &mixed);
        else
            break;
        if (p->failed) break;
        if (mixed && product != MATH_NONE) return fail(p);
        if (mixed) {
            last = node_with_children(p, MATH_ADD, last, next);
            continue;
        }
        if (product == MATH_NONE) product = node_with_child(p, MATH_MULTIPLY, last);
        child_append(p, product, next);
        last = next;
    }
    return product == MATH_NONE ? last : product;
}

/* A term with its signs. Unless `first`, it must begin with a sign; MATH_NONE: there is no term. */
static int signed_term(struct math_parser *p, bool first) {
    bool minus = false, both = false;
    for (char c; (c = peek(p)) && strchr("+-\x01\x02", c); p->pos++, first = true) {
        minus ^= c == '-' || c == MINUS_PLUS;
        both |= c == PLUS_MINUS || c == MINUS_PLUS;
    }
    int n = first ? term(p) : MATH_NONE;
    if (minus) n = node_with_child(p, MATH_NEGATE, n);
    return both ? node_with_child(p, MATH_PM, n) : n;
}

static int sum(struct math_parser *p) {
    int first = signed_term(p, true), total = MATH_NONE;
    while (!p->failed) {
        int next = signed_term(p, false);
        if (next == MATH_NONE) break;
        if (total == MATH_NONE) total = node_with_child(p, MATH_ADD, first);
        child_append(p, total, next);
    }
    return total == MATH_NONE ? first : total;
}

static int unions(struct math_parser *p) {
    int first = sum(p), all = MATH_NONE;
    while (!p->failed && accept(p, UNION)) {
        if (all == MATH_NONE) all = node_with_child(p, MATH_UNION, first);
        child_append(p, all, sum(p));
    }
    return all == MATH_NONE ? first : all;
}

static enum math_relation relation_of_mark(char c) {
    static const char marks[] = "=<\x03>\x04\x05\x06";
    const char *mark = c ? strchr(marks, c) : NULL;
    return mark ? (enum math_relation)(REL_EQ + (mark - marks)) : 0;
}

/* A relation: a = b < c. The value of "1/3 ≈ 0.33" is the part before ≈. */
static int chain(struct math_parser *p) {
    int first = unions(p), all = MATH_NONE, n = 0;
    for (enum math_relation r; !p->failed && (r = relation_of_mark(peek(p))) != 0; n++) {
        if (n == 8) return fail(p);
        p->pos++;
        if (r == REL_EQ) p->has_word = false;
        if (all == MATH_NONE) all = node_with_child(p, MATH_RELATION, first);
        child_append(p, all, unions(p));
        if (!p->failed) p->m->node[all].name |= (uint64_t)r << (4 * n);
    }
    if (peek(p) == APPROXIMATELY) {
        if (p->depth) return fail(p);
        p->pos = p->m->text.len;
    }
    return all == MATH_NONE ? first : all;
}

/* A list of *n_items items; a single item has no list node. */
static int list(struct math_parser *p, int *n_items) {
    int first = chain(p), all = MATH_NONE;
    *n_items = 1;
    for (size_t len; !p->failed && (len = separator_len(p)) > 0; ++*n_items) {
        p->pos += len;
        if ((len = separator_len(p)) > 0) p->pos += len; // ", and"
        if (all == MATH_NONE) all = node_with_child(p, MATH_LIST, first);
        child_append(p, all, chain(p));
    }
    return all == MATH_NONE ? first : all;
}

void math_parse(struct math_expr *m, const char *text, int reading) {
    int n_items = 0;
    m->n = m->other_readings = 0;
    m->unit = 0;
    m->root = MATH_NONE;
    m->text = (struct buf){0};
    bool is_short = strnlen(text, MATH_MAX_BYTES) < MATH_MAX_BYTES;
    if (is_short)
        rewrite(text, &m->text);
    else
        buf_puts(&m->text, text);
    if (!is_short || m->text.len >= INT16_MAX || m->text.len == 0) return;
    struct math_parser p = {.m = m, .s = m->text.data, .reading = reading};
    int root_node = list(&p, &n_items);
    if (!p.failed && !p.has_word && peek(&p) == 0) m->root = root_node;
}

void math_release(struct math_expr *m) {
    buf_release(&m->text);
}

int math_child_count(const struct math_expr *m, int node) {
    int n = 0;
    for (int c = m->node[node].first; c != MATH_NONE; c = m->node[c].next) n++;
    return n;
}
