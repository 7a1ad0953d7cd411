/*
 * math_equivalent: whether two formulas have the same meaning.
 *
 * Values without roots and functions are compared exactly. Both are computed modulo a 61-bit prime,
 * with π, e and every variable at an arbitrary point. Equal formulas give equal numbers; different
 * formulas give different numbers except with a probability of about 2^-50 (Schwartz 1980, Zippel
 * 1979). This detects a difference in the fortieth digit and handles 2^{10000}. All other values
 * are computed in complex double at fixed points, each with a bound of its error.
 *
 * Lists and sets match in any order, points and matrices element by element, inequalities also as
 * intervals, "x = 5" as 5. A comparison ends after WORK steps at the latest, with "no".
 */
#define _GNU_SOURCE
#include "grade/internal.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WORK = MATH_MAX_STEPS / 16, /* budget of one of the 16 pairs of readings */
    POINTS = 10,                /* points at which a variable is evaluated */
    ITEMS = 64,                 /* items of a list */
    WHOLE_MAX = 1000,           /* largest argument of an exact factorial */
};

/* A value in a tree. `sign` selects the sign of each ±; 0: both signs. `plain`: percent and degrees
 * are units and change nothing. */
struct ref {
    const struct math_expr *m;
    int node, sign;
    bool plain;
    int *work;
};

static const struct math_node *at(struct ref r) {
    return &r.m->node[r.node];
}

static struct ref child(struct ref r, int node) {
    r.node = node;
    return r;
}

static struct ref first_child(struct ref r) {
    return child(r, at(r)->first);
}

static bool works(struct ref r) {
    return --*r.work > 0;
}

static bool contains(struct ref r, unsigned kinds) {
    if (!works(r) || kinds >> at(r)->kind & 1) return true;
    for (int c = at(r)->first; c != MATH_NONE; c = r.m->node[c].next)
        if (contains(child(r, c), kinds)) return true;
    return false;
}

#define KIND(k) (1u << (k))

/* Random bits that depend on the name and the number of the point only. */
static uint64_t place_bits(uint64_t name, uint32_t point) {
    struct rng rng = rng_make(name, RNG_TASK, point, 0);
    return rng_u64(&rng);
}

/* digits of a number */

struct exact_decimal {
    const char *s;
    int n, n_fraction; /* bytes of digits, digits after the point */
    int exponent;      /* power of ten */
};

/* Points into the text, so the digits keep their blanks, commas and braces; `n` is where they
 * end. */
static struct exact_decimal decimal_of(struct ref r) {
    const struct math_node *v = at(r);
    struct exact_decimal d = {.s = r.m->text.data + v->at, .n = v->len};
    bool point = false;
    for (int i = 0; i < v->len; i++) {
        bool e = (d.s[i] == 'e' || d.s[i] == 'E') && !v->repeat;
        if (e) {
            d.exponent = atoi(d.s + i + 1); // at most four digits
            d.n = i;
            break;
        }
        point |= d.s[i] == '.';
        d.n_fraction += point && isdigit((unsigned char)d.s[i]);
    }
    return d;
}

/* Number of bytes before the repeating digits. */
static int digits_kept(struct exact_decimal d, int repeat) {
    int kept = d.n;
    for (; repeat > 0; kept--) repeat -= isdigit((unsigned char)d.s[kept - 1]) != 0;
    return kept;
}

/* exact values modulo PRIME */

/* 2^61 - 31, which is 1 modulo 4, and a square root of -1. */
static const uint64_t PRIME = 2305843009213693921u, SQRT_MINUS_1 = 583529827753931384u;

static uint64_t mod_add(uint64_t a, uint64_t b) {
    uint64_t sum = a + b;
    return sum >= PRIME ? sum - PRIME : sum;
}

static uint64_t mod_mul(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b % PRIME);
}

static uint64_t mod_power(uint64_t a, uint64_t e) {
    uint64_t out = 1;
    for (; e; e >>= 1, a = mod_mul(a, a))
        if (e & 1) out = mod_mul(out, a);
    return out;
}

static uint64_t mod_inverse(uint64_t a) {
    return mod_power(a, PRIME - 2);
}

static uint64_t digits_mod(const char *s, int n) {
    uint64_t v = 0;
    for (int i = 0; i < n; i++)
        if (isdigit((unsigned char)s[i])) v = mod_add(mod_mul(v, 10), (uint64_t)(s[i] - '0'));
    return v;
}

/* N / 10^f. With r repeating digits: (N - N without them) / (10^(f-r) (10^r - 1)). */
static uint64_t number_mod(struct ref r) {
    struct exact_decimal d = decimal_of(r);
    int repeat = at(r)->repeat;
    uint64_t v = digits_mod(d.s, d.n);
    if (!d.n_fraction && !d.exponent && !repeat) return v;
    uint64_t below = mod_power(10, (uint64_t)d.n_fraction);
    if (repeat) {
        v = mod_add(v, PRIME - digits_mod(d.s, digits_kept(d, repeat)));
        below = mod_mul(mod_power(10, (uint64_t)(d.n_fraction - repeat)),
                        mod_add(mod_power(10, (uint64_t)repeat), PRIME - 1));
    }
    uint64_t scale = mod_power(10, (uint64_t)abs(d.exponent));
    if (d.exponent < 0)
        below = mod_mul(below, scale);
    else
        v = mod_mul(v, scale);
    *r.work -= 50;
    return mod_mul(v, mod_inverse(below));
}

/* Evaluates a small integer, such as an exponent or the argument of a factorial. */
static bool whole(struct ref r, int64_t *out) {
    const struct math_node *v = at(r);
    if (!works(r)) return false;
    if (v->kind == MATH_NUMBER) {
        struct exact_decimal d = decimal_of(r);
        *out = 0;
        for (int i = 0; i < d.n; i++)
            if (isdigit((unsigned char)d.s[i])) {
                if (*out > INT64_MAX / 100) return false;
                *out = *out * 10 + (d.s[i] - '0');
            }
        return !d.n_fraction && !d.exponent && !v->repeat;
    }
    if (v->kind != MATH_NEGATE && v->kind != MATH_ADD && v->kind != MATH_MULTIPLY) return false;
    int64_t total = v->kind == MATH_MULTIPLY, x;
    for (int c = v->first; c != MATH_NONE; c = r.m->node[c].next) {
        if (!whole(child(r, c), &x)) return false;
        bool over = v->kind == MATH_MULTIPLY ? __builtin_mul_overflow(total, x, &total)
                    : v->kind == MATH_ADD    ? __builtin_add_overflow(total, x, &total)
                                             : __builtin_sub_overflow(total, x, &total);
        if (over) return false;
    }
    *out = total;
    return true;
}

static bool mod_value(struct ref r, uint64_t *out);

static bool power_mod(struct ref r, uint64_t *out) {
    int64_t e;
    struct ref base = first_child(r);
    uint64_t b;
    if (!whole(child(base, at(base)->next), &e) || !mod_value(base, &b)) return false;
    if (b == 0 && e <= 0) return false;
    *out = mod_power(b, e < 0 ? (uint64_t)-e : (uint64_t)e);
    if (e < 0) *out = mod_inverse(*out);
    return true;
}

/* n! (ordered, k = n) and n over k of small integers. */
static uint64_t choices_mod(int64_t n, int64_t k, bool ordered) {
    uint64_t out = k >= 0 && k <= n, below = 1;
    for (int64_t i = 0; out && i < k; i++) {
        out = mod_mul(out, (uint64_t)(n - i));
        if (!ordered) below = mod_mul(below, (uint64_t)(i + 1));
    }
    return mod_mul(out, mod_inverse(below));
}

static uint64_t symbol_mod(uint64_t name) {
    return place_bits(name, UINT32_MAX) % PRIME;
}

/* For any n other than a small integer, n! becomes a separate variable, one for each value of n. */
static bool call_mod(struct ref r, uint64_t *out) {
    struct ref a = first_child(r);
    int64_t n, k;
    bool over = at(r)->op == FN_BINOMIAL;
    if (!over && at(r)->op != FN_FACTORIAL) return false;
    bool small = whole(a, &n) && n >= 0 && n <= WHOLE_MAX;
    if (!small && (over || !mod_value(a, out))) return false;
    if (over && !whole(child(a, at(a)->next), &k)) return false;
    *r.work -= WHOLE_MAX;
    *out = small ? choices_mod(n, over ? k : n, !over) : symbol_mod(*out ^ FN_FACTORIAL);
    return true;
}

/* The children's sum or product. */
static bool fold_mod(struct ref r, bool product, uint64_t *out) {
    uint64_t total = product, x;
    for (int c = at(r)->first; c != MATH_NONE; c = r.m->node[c].next) {
        if (!mod_value(child(r, c), &x)) return false;
        total = product ? mod_mul(total, x) : mod_add(total, x);
    }
    *out = total;
    return true;
}

/* False if the value is not a rational function, and at a pole. */
static bool mod_value(struct ref r, uint64_t *out) {
    const struct math_node *v = at(r);
    if (!works(r)) return false;
    switch (v->kind) {
    case MATH_NUMBER:
        *out = number_mod(r);
        return true;
    case MATH_NAME:
        *out = symbol_mod(v->name);
        return true;
    case MATH_PI:
        *out = symbol_mod(MATH_PI);
        return true;
    case MATH_E:
        *out = symbol_mod(MATH_E);
        return true;
    case MATH_I:
        *out = SQRT_MINUS_1;
        return true;
    case MATH_ADD:
        return fold_mod(r, false, out);
    case MATH_MULTIPLY:
        return fold_mod(r, true, out);
    case MATH_POWER:
        return power_mod(r, out);
    case MATH_CALL:
        return call_mod(r, out);
    case MATH_NEGATE:
    case MATH_INVERT:
    case MATH_PM:
    case MATH_PERCENT:
    case MATH_DEGREE:
        break;
    default:
        return false;
    }
    if (!mod_value(first_child(r), out)) return false;
    if (v->kind == MATH_INVERT && *out == 0) return false;
    if (v->kind == MATH_NEGATE || (v->kind == MATH_PM && r.sign < 0))
        *out = mod_mul(*out, PRIME - 1);
    if (v->kind == MATH_INVERT) *out = mod_inverse(*out);
    if (v->kind == MATH_PERCENT && !r.plain) *out = mod_mul(*out, mod_inverse(100));
    if (v->kind == MATH_DEGREE && !r.plain)
        *out = mod_mul(mod_mul(*out, symbol_mod(MATH_PI)), mod_inverse(180));
    return true;
}

/* values in complex double */

/* `err` bounds the rounding error. */
struct value {
    double re, im, err;
};

#define EPS 0x1p-51
#define PI 3.14159265358979323846

static double size(struct value a) {
    return a.im == 0 ? fabs(a.re) : sqrt(a.re * a.re + a.im * a.im);
}

static struct value rounded(double re, double im, double err) {
    struct value v = {re, im, 0};
    v.err = err + EPS * size(v);
    return v;
}

static struct value real(double re) {
    return rounded(re, 0, 0);
}

static const struct value NOTHING = {NAN, NAN, NAN};

static struct value add(struct value a, struct value b) {
    return rounded(a.re + b.re, a.im + b.im, a.err + b.err);
}

static struct value multiply(struct value a, struct value b) {
    return rounded(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re,
                   size(a) * b.err + size(b) * a.err + a.err * b.err + EPS * size(a) * size(b));
}

static struct value scale(struct value a, double re, double im) {
    return multiply(a, (struct value){re, im, 0});
}

static struct value invert(struct value a) {
    double d = a.re * a.re + a.im * a.im;
    return rounded(a.re / d, -a.im / d, a.err / d);
}

/* The angle of a point on the unit circle, -π < t <= π. Newton's method on sin(angle - t), whose
 * convergence is cubic here, from a start that is off by less than 0.34. */
static double angle(double c, double s) {
    double t = (s < 0 ? -PI : PI) / 2 * (1 - c);
    for (int i = 0; i < 5; i++) t += s * math_cos(t) - c * math_sin(t);
    return t;
}

static struct value logarithm(struct value a) {
    double r = size(a);
    if (!(r > 0)) return NOTHING;
    double im = a.im == 0 ? (a.re < 0 ? PI : 0) : angle(a.re / r, a.im / r);
    return rounded(math_log(r), im, a.err / r + EPS);
}

static struct value exponential(struct value a) {
    if (!(fabs(a.re) < 700)) return NOTHING;
    double r = math_exp(a.re);
    return rounded(r * math_cos(a.im), a.im == 0 ? 0 : r * math_sin(a.im), r * (a.err + 2 * EPS));
}

static struct value square_root(struct value a) {
    double r = size(a), re = sqrt((r + fabs(a.re)) / 2), im = re > 0 ? fabs(a.im) / 2 / re : 0;
    double err = r > a.err ? a.err / sqrt(r) : sqrt(a.err);
    if (a.re < 0) {
        double swap = re;
        re = im;
        im = swap;
    }
    return rounded(re, a.im < 0 ? -im : im, err);
}

static struct value integer_power(struct value a, int64_t e) {
    struct value out = real(1);
    for (uint64_t k = (uint64_t)(e < 0 ? -e : e); k; k >>= 1, a = multiply(a, a))
        if (k & 1) out = multiply(out, a);
    return e < 0 ? invert(out) : out;
}

static struct value power_value(struct value a, struct value e) {
    if (e.im == 0 && fabs(e.re) <= 4096 && e.re == floor(e.re))
        return integer_power(a, (int64_t)e.re);
    if (size(a) == 0) return e.re > 0 ? real(0) : NOTHING;
    return exponential(multiply(e, logarithm(a)));
}

/* An odd root of a negative number is negative. */
static struct value root_value(struct value a, struct value degree) {
    bool odd = degree.im == 0 && fabs(degree.re) < 1e9 && fmod(fabs(degree.re), 2) == 1;
    bool turn = odd && a.im == 0 && a.re < 0;
    struct value v = power_value(turn ? scale(a, -1, 0) : a, invert(degree));
    return turn ? scale(v, -1, 0) : v;
}

static struct value sine(struct value a, bool cosine) {
    if (a.im == 0)
        return rounded(cosine ? math_cos(a.re) : math_sin(a.re), 0, a.err + EPS * (1 + fabs(a.re)));
    struct value up = exponential(scale(a, 0, 1)), down = exponential(scale(a, 0, -1));
    return cosine ? scale(add(up, down), 0.5, 0) : scale(add(up, scale(down, -1, 0)), 0, -0.5);
}

/* -i ln(iz + √(1 - z²)). */
static struct value arc_sine(struct value a) {
    struct value rest = square_root(add(real(1), scale(multiply(a, a), -1, 0)));
    return scale(logarithm(add(scale(a, 0, 1), rest)), 0, -1);
}

/* i/2 (ln(1 - iz) - ln(1 + iz)). */
static struct value arc_tangent(struct value a) {
    struct value below = logarithm(add(real(1), scale(a, 0, -1)));
    struct value above = logarithm(add(real(1), scale(a, 0, 1)));
    return scale(add(below, scale(above, -1, 0)), 0, 0.5);
}

static struct value hyperbolic(struct value a, double sign) {
    struct value up = exponential(a), down = exponential(scale(a, -1, 0));
    return scale(add(up, scale(down, sign, 0)), 0.5, 0);
}

static struct value factorial(struct value a) {
    double out = 1;
    if (a.im != 0 || !(a.re >= 0 && a.re <= 170) || a.re != floor(a.re)) return NOTHING;
    for (double i = 2; i <= a.re; i++) out *= i;
    return rounded(out, 0, out * 200 * EPS);
}

static struct value binomial_value(struct value n, struct value k) {
    double out = 1;
    bool whole_numbers = n.re == floor(n.re) && k.re == floor(k.re) && n.im == 0 && k.im == 0;
    if (!whole_numbers || !(n.re >= 0 && n.re <= WHOLE_MAX && k.re >= 0 && k.re <= n.re))
        return NOTHING;
    for (double i = 0; i < k.re; i++) out *= (n.re - i) / (i + 1);
    return rounded(out, 0, out * WHOLE_MAX * 2 * EPS);
}

static struct value function_value(enum math_function fn, struct value a, struct value b) {
    switch (fn) {
    case FN_SIN:
        return sine(a, false);
    case FN_COS:
        return sine(a, true);
    case FN_TAN:
        return multiply(sine(a, false), invert(sine(a, true)));
    case FN_COT:
        return multiply(sine(a, true), invert(sine(a, false)));
    case FN_SEC:
        return invert(sine(a, true));
    case FN_CSC:
        return invert(sine(a, false));
    case FN_ASIN:
        return arc_sine(a);
    case FN_ACOS:
        return add(real(PI / 2), scale(arc_sine(a), -1, 0));
    case FN_ATAN:
        return arc_tangent(a);
    case FN_SINH:
        return hyperbolic(a, -1);
    case FN_COSH:
        return hyperbolic(a, 1);
    case FN_TANH:
        return multiply(hyperbolic(a, -1), invert(hyperbolic(a, 1)));
    case FN_EXP:
        return exponential(a);
    case FN_LN:
        return logarithm(a);
    case FN_LOG:
        return multiply(logarithm(a), invert(logarithm(b)));
    case FN_SQRT:
        return square_root(a);
    case FN_ABS:
        return rounded(size(a), 0, a.err);
    case FN_FLOOR:
        return a.im == 0 ? real(floor(a.re)) : NOTHING;
    case FN_CEIL:
        return a.im == 0 ? real(ceil(a.re)) : NOTHING;
    case FN_FACTORIAL:
        return factorial(a);
    case FN_BINOMIAL:
        return binomial_value(a, b);
    }
    return NOTHING;
}

static double digits_double(const char *s, int n) {
    double v = 0;
    for (int i = 0; i < n; i++)
        if (isdigit((unsigned char)s[i])) v = v * 10 + (s[i] - '0');
    return v;
}

static struct value number_value(struct ref r) {
    struct exact_decimal d = decimal_of(r);
    int repeat = at(r)->repeat;
    struct value ten = real(10), v = real(digits_double(d.s, d.n));
    if (repeat) {
        v = real(v.re - digits_double(d.s, digits_kept(d, repeat)));
        v = multiply(v, invert(add(integer_power(ten, repeat), real(-1))));
    }
    v = multiply(v, integer_power(ten, d.exponent - d.n_fraction + repeat));
    v.err += 4 * d.n * EPS * fabs(v.re);
    return v;
}

/* The value of a variable: positive at even points, of either sign at odd ones. */
static struct value name_value(uint64_t name, uint32_t point) {
    uint64_t bits = place_bits(name, point);
    double x = 0.5 + 2 * (double)(bits >> 32) * 0x1p-32;
    return (struct value){point & 1 && bits & 1 ? -x : x, 0, 0};
}

static struct value value_of(struct ref r, uint32_t point);

static struct value fold_value(struct ref r, uint32_t point, bool product) {
    struct value total = {product, 0, 0};
    for (int c = at(r)->first; c != MATH_NONE; c = r.m->node[c].next) {
        struct value x = value_of(child(r, c), point);
        total = product ? multiply(total, x) : add(total, x);
    }
    return total;
}

static struct value value_of(struct ref r, uint32_t point) {
    const struct math_node *v = at(r);
    if (!works(r)) return NOTHING;
    switch (v->kind) {
    case MATH_NUMBER:
        return number_value(r);
    case MATH_NAME:
        return name_value(v->name, point);
    case MATH_PI:
        return real(PI);
    case MATH_E:
        return real(2.71828182845904523536);
    case MATH_I:
        return (struct value){0, 1, 0};
    case MATH_ADD:
        return fold_value(r, point, false);
    case MATH_MULTIPLY:
        return fold_value(r, point, true);
    default:
        break;
    }
    if (v->kind >= MATH_LIST) return NOTHING;
    struct ref first = first_child(r);
    int second = at(first)->next;
    struct value a = value_of(first, point);
    struct value b = second == MATH_NONE ? real(10) : value_of(child(r, second), point);
    switch (v->kind) {
    case MATH_NEGATE:
        return scale(a, -1, 0);
    case MATH_PM:
        return scale(a, r.sign < 0 ? -1 : 1, 0);
    case MATH_INVERT:
        return invert(a);
    case MATH_POWER:
        return power_value(a, b);
    case MATH_ROOT:
        return root_value(a, b);
    case MATH_CALL:
        return function_value((enum math_function)v->op, a, b);
    case MATH_PERCENT:
        return r.plain ? a : scale(a, 0.01, 0);
    case MATH_DEGREE:
        return r.plain ? a : scale(a, PI / 180, 0);
    default:
        return NOTHING;
    }
}

/* comparing values */

/* Whether the value is finite and precise enough to compare. */
static bool usable(struct value a) {
    return isfinite(a.re) && isfinite(a.im) && (a.err < 1e-8 || a.err < 1e-8 * size(a));
}

static bool near(struct value a, struct value b) {
    struct value d = add(a, scale(b, -1, 0));
    return size(d) <= 1e-10 * fmax(size(a), size(b)) + 4 * (a.err + b.err);
}

static bool is_real(struct value a) {
    return fabs(a.im) <= 4 * a.err;
}

/* Compares the points where both values are real; if no point is, all points. So √x equals itself
 * on either side of zero. */
static bool near_everywhere(struct ref a, struct ref b) {
    unsigned names = KIND(MATH_NAME);
    uint32_t points = contains(a, names) || contains(b, names) ? POINTS : 1;
    int n_real = 0, same_real = 0, n = 0, same = 0;
    for (uint32_t i = 0; i < points; i++) {
        struct value x = value_of(a, i), y = value_of(b, i);
        if (!usable(x) || !usable(y)) continue;
        bool both = is_real(x) && is_real(y), equal = near(x, y);
        n++;
        same += equal;
        n_real += both;
        same_real += both && equal;
    }
    return n_real ? same_real == n_real : n && same == n;
}

static bool values_near(struct ref a, struct ref b) {
    uint64_t x, y;
    if (mod_value(a, &x) && mod_value(b, &y)) return x == y;
    return near_everywhere(a, b);
}

/* If only one of the values has a percent or degree sign, 10% equals 0.1 and also 10. */
static bool values_same(struct ref a, struct ref b) {
    unsigned scaled = KIND(MATH_PERCENT) | KIND(MATH_DEGREE);
    if (at(a)->kind >= MATH_LIST || at(b)->kind >= MATH_LIST) return false;
    if (values_near(a, b)) return true;
    bool of_a = contains(a, scaled), of_b = contains(b, scaled);
    if (of_a == of_b) return false;
    a.plain = b.plain = true;
    return values_near(a, b);
}

/* lists, points, matrices */

static bool same(struct ref a, struct ref b);

static bool is_value(struct ref r) {
    return at(r)->kind < MATH_LIST;
}

/* Collects the items of an unordered list; a value with ± counts as two items. -1: too many to
 * compare. */
static int items(struct ref r, struct ref out[ITEMS]) {
    int n = 0;
    int kind = at(r)->kind;
    if (kind == MATH_LIST || kind == MATH_SET || kind == MATH_UNION) {
        for (int c = at(r)->first; c != MATH_NONE && n >= 0; c = r.m->node[c].next) {
            struct ref inner[ITEMS];
            int k = items(child(r, c), inner);
            if (k < 0 || n + k > ITEMS) return -1;
            memcpy(out + n, inner, (size_t)k * sizeof *out);
            n += k;
        }
        return n;
    }
    out[n++] = r;
    if (!is_value(r) || r.sign || !contains(r, KIND(MATH_PM))) return n;
    out[0].sign = 1;
    out[n] = r;
    out[n++].sign = -1;
    return n;
}

/* Matches each item of a with one item of b. If one side has a single item, every item of the other
 * must equal it, so repetitions do not count. */
static bool items_same(struct ref a, struct ref b) {
    struct ref x[ITEMS], y[ITEMS];
    bool taken[ITEMS] = {false};
    int n = items(a, x), m = items(b, y), found = 0;
    if (n < 0 || m < 0) return false;
    if (n != m && n != 1 && m != 1) return false;
    for (int i = 0; i < MAX(n, m); i++)
        for (int k = 0; k < (n == m ? m : 1); k++) {
            if (taken[k] || !same(x[n == 1 ? 0 : i], y[n == 1 && m > 1 ? i : k])) continue;
            taken[k] = n == m;
            found++;
            break;
        }
    return found == MAX(n, m);
}

static bool in_order(struct ref a, struct ref b) {
    int c = at(a)->first, d = at(b)->first;
    for (; c != MATH_NONE && d != MATH_NONE; c = a.m->node[c].next, d = b.m->node[d].next)
        if (!same(child(a, c), child(b, d))) return false;
    return c == d;
}

static bool matrices_same(struct ref a, struct ref b) {
    bool both = at(a)->kind == MATH_MATRIX && at(b)->kind == MATH_MATRIX;
    struct ref m = at(a)->kind == MATH_MATRIX ? a : b;
    bool line = at(m)->op == 1 || at(m)->op == math_children(m.m, m.node);
    if (both) return at(a)->op == at(b)->op && in_order(a, b);
    return line && at(a)->kind + at(b)->kind == MATH_MATRIX + MATH_TUPLE &&
           (at(a)->kind == MATH_TUPLE ? at(a)->op : at(b)->op) == 0 && in_order(a, b);
}

/* relations */

static enum math_relation relation_at(struct ref r, int i) {
    return (enum math_relation)(at(r)->name >> (4 * i) & 15);
}

static enum math_relation flipped(enum math_relation r) {
    static const enum math_relation to[] = {
        0, REL_EQ, REL_GT, REL_GE, REL_LT, REL_LE, REL_NE, 0,
    };
    return to[r];
}

static struct ref part(struct ref r, int i) {
    struct ref p = first_child(r);
    for (; i > 0; i--) p = child(r, at(p)->next);
    return p;
}

/* Whether an equation can define it: x, f(x), AB. */
static bool is_name(struct ref r) {
    if (at(r)->kind == MATH_MULTIPLY) r = first_child(r);
    return at(r)->kind == MATH_NAME;
}

/* Finds the value that "x = 5", "5 = x", "f(x) = 2x = 6" or "x ∈ A" states. */
static bool relation_value(struct ref r, struct ref *out) {
    int last = math_children(r.m, r.node) - 1;
    struct ref a = part(r, 0), b = part(r, last);
    for (int i = 0; i < last; i++)
        if (relation_at(r, i) != REL_EQ && (relation_at(r, i) != REL_IN || last > 1)) return false;
    bool defined = is_name(a) || (is_value(a) && !contains(a, KIND(MATH_NAME)) && same(a, b));
    *out = !is_name(a) && at(b)->kind == MATH_NAME ? a : b;
    return defined || at(b)->kind == MATH_NAME;
}

/* An interval of the real line; an end whose node is MATH_NONE is infinite. */
struct real_range {
    struct ref end[2];
    bool closed[2];
    uint64_t name; /* name of its variable; 0: any */
};

static bool infinite(struct ref r) {
    if (at(r)->kind == MATH_NEGATE) r = first_child(r);
    return at(r)->kind == MATH_NAME && at(r)->name == hash_fnv1a("∞", 3);
}

static void range_end(struct real_range *out, int side, struct ref r, bool closed) {
    out->end[side] = r;
    out->closed[side] = closed;
    if (!infinite(r)) return;
    out->end[side].node = MATH_NONE;
    out->closed[side] = false;
}

static bool is_less(enum math_relation r) {
    return r == REL_LT || r == REL_LE;
}

/* Reads x > 2, 2 < x, 1 < x <= 3, (1,3]. */
static bool range_of(struct ref r, struct real_range *out) {
    int n = math_children(r.m, r.node);
    *out = (struct real_range){0};
    if (at(r)->kind == MATH_TUPLE && n == 2) {
        range_end(out, 0, part(r, 0), at(r)->op & 1);
        range_end(out, 1, part(r, 1), at(r)->op >> 1 & 1);
        return true;
    }
    if (at(r)->kind != MATH_RELATION || n > 3) return false;
    int x = n == 3 || at(part(r, 0))->kind != MATH_NAME;
    if (at(part(r, x))->kind != MATH_NAME) return false;
    out->name = at(part(r, x))->name;
    out->end[0].node = out->end[1].node = MATH_NONE;
    for (int i = 0; i < n - 1; i++) {
        enum math_relation rel = relation_at(r, i);
        if (rel < REL_LT || rel > REL_GE) return false;
        int other = i == x ? i + 1 : i;
        int side = is_less(rel) == (other > x);
        if (n == 3 && is_less(rel) != is_less(relation_at(r, 0))) return false;
        range_end(out, side, part(r, other), rel == REL_LE || rel == REL_GE);
    }
    return true;
}

static bool ranges_same(const struct real_range *a, const struct real_range *b) {
    if (a->name && b->name && a->name != b->name) return false;
    for (int i = 0; i < 2; i++) {
        bool inf = a->end[i].node == MATH_NONE;
        if (a->closed[i] != b->closed[i] || inf != (b->end[i].node == MATH_NONE)) return false;
        if (!inf && !same(a->end[i], b->end[i])) return false;
    }
    return true;
}

/* Left minus right, at a point. */
static struct value difference(struct ref r, uint32_t point) {
    return add(value_of(part(r, 0), point), scale(value_of(part(r, 1), point), -1, 0));
}

/* Whether one equation or inequality is a multiple of the other. A negative factor reverses an
 * inequality. */
static bool multiples(struct ref a, struct ref b) {
    struct value ratio = NOTHING, begin = NOTHING;
    bool varies = false;
    for (uint32_t i = 0; i < POINTS; i++) {
        struct value f = difference(a, i), g = difference(b, i);
        if (!usable(f) || !usable(g) || size(g) <= 4 * g.err || size(f) <= 4 * f.err) return false;
        struct value q = multiply(f, invert(g));
        if (i == 0) ratio = q, begin = f;
        varies |= !near(begin, f);
        if (!near(ratio, q) || !is_real(q)) return false;
    }
    enum math_relation x = relation_at(a, 0), y = relation_at(b, 0);
    return varies && x == (ratio.re < 0 ? flipped(y) : y);
}

static bool relations_same(struct ref a, struct ref b) {
    int n = math_children(a.m, a.node);
    bool straight = true, reversed = true;
    if (n != math_children(b.m, b.node)) return false;
    for (int i = 0; i < n; i++) {
        straight = straight && (i == n - 1 || relation_at(a, i) == relation_at(b, i)) &&
                   same(part(a, i), part(b, i));
        reversed = reversed &&
                   (i == n - 1 || relation_at(a, i) == flipped(relation_at(b, n - 2 - i))) &&
                   same(part(a, i), part(b, n - 1 - i));
    }
    return straight || reversed || (n == 2 && relation_at(a, 0) != REL_IN && multiples(a, b));
}

static bool with_relations_same(struct ref a, struct ref b) {
    struct real_range x, y;
    struct ref v, w;
    bool of_a = at(a)->kind == MATH_RELATION, of_b = at(b)->kind == MATH_RELATION;
    if (range_of(a, &x) && range_of(b, &y)) return ranges_same(&x, &y);
    if (of_a && of_b && relations_same(a, b)) return true;
    if (of_a && of_b) // "x = 2 + 3 = 5"
        return relation_value(a, &v) && relation_value(b, &w) && same(part(a, 0), part(b, 0)) &&
               same(v, w);
    struct ref rel = of_a ? a : b, other = of_a ? b : a;
    if (relation_value(rel, &v) && same(v, other)) return true;
    return at(other)->kind == MATH_LIST && items_same(a, b);
}

/* comparison of any two nodes */

static bool same(struct ref a, struct ref b) {
    int x = at(a)->kind, y = at(b)->kind;
    if (!works(a)) return false;
    if (x == MATH_RELATION || y == MATH_RELATION) return with_relations_same(a, b);
    if (x == MATH_TUPLE && y == MATH_TUPLE) return at(a)->op == at(b)->op && in_order(a, b);
    if (x == MATH_MATRIX || y == MATH_MATRIX) return matrices_same(a, b);
    if (x == MATH_TUPLE || y == MATH_TUPLE) { // "1, 2" may mean (1,2)
        int op = x == MATH_TUPLE ? at(a)->op : at(b)->op;
        return x + y == MATH_LIST + MATH_TUPLE && op == 0 && in_order(a, b);
    }
    if (x >= MATH_LIST || y >= MATH_LIST) return items_same(a, b);
    bool both = (!a.sign && contains(a, KIND(MATH_PM))) || (!b.sign && contains(b, KIND(MATH_PM)));
    return both ? items_same(a, b) : values_same(a, b);
}

/* words */

/* Lower case, without blanks next to signs, without mark bytes, and without brackets around a
 * single byte. Braces remain in a formula, where they have a meaning. */
static void words_fold(const struct math_expr *m, struct buf *out) {
    struct buf folded = {0};
    bool formula = strpbrk(m->text.data, "\\^_") != NULL;
    text_normalize(m->text.data, m->text.len, &folded);
    buf_puts(out, "");
    for (size_t i = 0; i < folded.len; i++) {
        unsigned char c = (unsigned char)folded.data[i], next = (unsigned char)folded.data[i + 1];
        bool drop = c < 0x20 || (!formula && (c == '{' || c == '}'));
        unsigned char last = out->len ? (unsigned char)out->data[out->len - 1] : ' ';
        if (c == ' ' && !((isalnum(last) || last >= 0x80) && (isalnum(next) || next >= 0x80)))
            drop = true;
        if (!drop) buf_add(out, &c, 1);
    }
    if (out->len == 3 && out->data[0] == '(' && out->data[2] == ')') { // (c)
        out->data[0] = out->data[1];
        out->data[out->len = 1] = 0;
    }
    buf_release(&folded);
}

static bool words_same(const struct math_expr *a, const struct math_expr *b) {
    struct buf x = {0}, y = {0};
    words_fold(a, &x);
    words_fold(b, &y);
    bool equal = x.len && x.len == y.len && memcmp(x.data, y.data, x.len) == 0;
    buf_release(&x);
    buf_release(&y);
    return equal;
}

static bool all_letters(const struct math_expr *m) {
    size_t n = 0;
    for (const char *p = m->text.data; *p; p++, n++)
        if (!isalpha((unsigned char)*p) && *p != ' ') return false;
    return n > 1;
}

static bool parsed_same(const struct math_expr *a, const struct math_expr *b, int64_t *steps) {
    int work = WORK;
    bool units = a->unit && b->unit && a->unit != b->unit;
    bool as_words =
        a->root == MATH_NONE || b->root == MATH_NONE || (all_letters(a) && all_letters(b));
    if (as_words && words_same(a, b)) return true;
    if (a->root == MATH_NONE || b->root == MATH_NONE || units) return false;
    bool equal =
        same((struct ref){a, a->root, 0, false, &work}, (struct ref){b, b->root, 0, false, &work});
    *steps += WORK - work;
    return equal;
}

/* Skips a reading that would not give another tree. */
bool math_equivalent(const char *a, const char *b, int64_t *steps) {
    struct math_expr *m = xcalloc(2, sizeof *m);
    bool equal = false;
    *steps = 0;
    int all = READ_SEPARATE | READ_LETTERS;
    for (int i = 0; !equal && i <= all; i++) {
        math_parse(&m[0], a, i);
        for (int k = 0; !equal && (i & ~m[0].other) == 0 && k <= all; k++) {
            math_parse(&m[1], b, k);
            equal = (k & ~m[1].other) == 0 && parsed_same(&m[0], &m[1], steps);
            math_release(&m[1]);
        }
        math_release(&m[0]);
    }
    free(m);
    return equal;
}
