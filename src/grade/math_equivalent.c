/*
 * math_equivalent: whether two formulas have the same meaning.
 *
 * Two values without roots and functions (except factorials and binomials) are compared exactly:
 * both are computed modulo a 61-bit prime, with a pseudo-random number for π, e and every variable.
 * Equal formulas give equal numbers; different formulas give different numbers except with a
 * probability of about 2^-50 (Schwartz 1980, Zippel 1979). This detects a difference in the
 * fortieth digit and handles 2^{10000}. All other values are computed in complex double at fixed
 * points, each with a bound of its error.
 *
 * Lists and sets match in any order, points and matrices element by element. An inequality also
 * matches an interval, and "x = 5" matches 5. If STEP_BUDGET steps do not decide the comparison of
 * two trees, they count as different.
 */
#define _GNU_SOURCE
#include "grade/internal.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    STEP_BUDGET = MATH_MAX_STEPS / 16, /* steps for one of the 16 pairs of readings */
    POINTS = 10,                       /* points at which formulas with variables are evaluated */
    MAX_ITEMS = 64,                    /* maximum items of a list */
    MAX_EXACT_FACTORIAL = 1000,        /* largest argument of an exact factorial */
};

/* A node of a tree, with the way to evaluate it. `sign` is the sign of each ±; 0: both signs.
 * `plain`: percent and degree signs have no effect. *budget: remaining steps. */
struct ref {
    const struct math_expr *m;
    int node, sign;
    bool plain;
    int *budget;
};

static const struct math_node *node_of(struct ref r) {
    return &r.m->node[r.node];
}

static struct ref child(struct ref r, int node) {
    r.node = node;
    return r;
}

static struct ref first_child(struct ref r) {
    return child(r, node_of(r)->first);
}

/* Spends a step; false: the budget is exhausted. */
static bool budget_spend(struct ref r) {
    return --*r.budget > 0;
}

/* Whether the subtree has a node of one of `kinds`, bits KIND(k). Without budget: true. */
static bool contains_kind(struct ref r, unsigned kinds) {
    if (!budget_spend(r) || kinds >> node_of(r)->kind & 1) return true;
    for (int c = node_of(r)->first; c != MATH_NONE; c = r.m->node[c].next)
        if (contains_kind(child(r, c), kinds)) return true;
    return false;
}

#define KIND(k) (1u << (k))

/* Pseudo-random bits that depend only on the name and the number of the point. */
static uint64_t point_bits(uint64_t name, uint32_t point) {
    struct rng rng = rng_make(name, RNG_TASK, point, 0);
    return rng_u64(&rng);
}

/* digits of a number */

struct exact_decimal {
    const char *s;
    int n, n_fraction; /* bytes of the digits and signs; number of digits after the point */
    int exponent;      /* power of ten */
};

/* The digits of a number in the text. They may contain blanks, commas and braces; an exponent is
 * not part of them. */
static struct exact_decimal decimal_of(struct ref r) {
    const struct math_node *v = node_of(r);
    struct exact_decimal d = {.s = r.m->text.data + v->pos, .n = v->len};
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
static int digits_before_repeat(struct exact_decimal d, int repeat) {
    int n = d.n;
    for (; repeat > 0; n--) repeat -= isdigit((unsigned char)d.s[n - 1]) != 0;
    return n;
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

/* A number with the digits N, f of them after the point: N / 10^f. If the last r digits repeat:
 * (N - (N without these r digits)) / (10^(f-r) (10^r - 1)). */
static uint64_t number_mod(struct ref r) {
    struct exact_decimal d = decimal_of(r);
    int repeat = node_of(r)->repeat;
    uint64_t v = digits_mod(d.s, d.n);
    if (!d.n_fraction && !d.exponent && !repeat) return v;
    uint64_t denominator = mod_power(10, (uint64_t)d.n_fraction);
    if (repeat) {
        v = mod_add(v, PRIME - digits_mod(d.s, digits_before_repeat(d, repeat)));
        denominator = mod_mul(mod_power(10, (uint64_t)(d.n_fraction - repeat)),
                              mod_add(mod_power(10, (uint64_t)repeat), PRIME - 1));
    }
    uint64_t scale = mod_power(10, (uint64_t)abs(d.exponent));
    if (d.exponent < 0)
        denominator = mod_mul(denominator, scale);
    else
        v = mod_mul(v, scale);
    *r.budget -= 50;
    return mod_mul(v, mod_inverse(denominator));
}

/* Evaluates a small integer, such as an exponent or the argument of a factorial. */
static bool small_integer(struct ref r, int64_t *out) {
    const struct math_node *v = node_of(r);
    if (!budget_spend(r)) return false;
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
        if (!small_integer(child(r, c), &x)) return false;
        bool overflow = v->kind == MATH_MULTIPLY ? __builtin_mul_overflow(total, x, &total)
                        : v->kind == MATH_ADD    ? __builtin_add_overflow(total, x, &total)
                                                 : __builtin_sub_overflow(total, x, &total);
        if (overflow) return false;
    }
    *out = total;
    return true;
}

static bool mod_value(struct ref r, uint64_t *out);

static bool power_mod(struct ref r, uint64_t *out) {
    int64_t e;
    struct ref base = first_child(r);
    uint64_t b;
    if (!small_integer(child(base, node_of(base)->next), &e) || !mod_value(base, &b)) return false;
    if (b == 0 && e <= 0) return false;
    *out = mod_power(b, e < 0 ? (uint64_t)-e : (uint64_t)e);
    if (e < 0) *out = mod_inverse(*out);
    return true;
}

/* n over k of small integers. ordered: without division by k!, which is n! for k = n. */
static uint64_t binomial_mod(int64_t n, int64_t k, bool ordered) {
    uint64_t out = k >= 0 && k <= n, denominator = 1;
    for (int64_t i = 0; out && i < k; i++) {
        out = mod_mul(out, (uint64_t)(n - i));
        if (!ordered) denominator = mod_mul(denominator, (uint64_t)(i + 1));
    }
    return mod_mul(out, mod_inverse(denominator));
}

/* The number for a variable or constant. */
static uint64_t symbol_mod(uint64_t name) {
    return point_bits(name, UINT32_MAX) % PRIME;
}

/* Factorial or binomial. For any n other than a small integer, n! is a variable that depends on the
 * value of n. */
static bool call_mod(struct ref r, uint64_t *out) {
    struct ref a = first_child(r);
    int64_t n, k;
    bool is_binomial = node_of(r)->op == FN_BINOMIAL;
    if (!is_binomial && node_of(r)->op != FN_FACTORIAL) return false;
    bool small = small_integer(a, &n) && n >= 0 && n <= MAX_EXACT_FACTORIAL;
    if (!small && (is_binomial || !mod_value(a, out))) return false;
    if (is_binomial && !small_integer(child(a, node_of(a)->next), &k)) return false;
    *r.budget -= MAX_EXACT_FACTORIAL;
    *out = small ? binomial_mod(n, is_binomial ? k : n, !is_binomial)
                 : symbol_mod(*out ^ FN_FACTORIAL);
    return true;
}

/* The sum or product of the children. */
static bool fold_mod(struct ref r, bool product, uint64_t *out) {
    uint64_t total = product, x;
    for (int c = node_of(r)->first; c != MATH_NONE; c = r.m->node[c].next) {
        if (!mod_value(child(r, c), &x)) return false;
        total = product ? mod_mul(total, x) : mod_add(total, x);
    }
    *out = total;
    return true;
}

/* Computes a value modulo PRIME. False: the value is not a rational function, has a pole at this
 * point, or the budget is exhausted. */
static bool mod_value(struct ref r, uint64_t *out) {
    const struct math_node *v = node_of(r);
    if (!budget_spend(r)) return false;
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

/* A complex number; `err` bounds its absolute rounding error. */
struct value {
    double re, im, err;
};

#define EPS 0x1p-51
#define PI 3.14159265358979323846

static double magnitude(struct value a) {
    return a.im == 0 ? fabs(a.re) : sqrt(a.re * a.re + a.im * a.im);
}

/* A result with the propagated error `err`; adds the error of rounding the result. */
static struct value value_with_error(double re, double im, double err) {
    struct value v = {re, im, 0};
    v.err = err + EPS * magnitude(v);
    return v;
}

static struct value real(double re) {
    return value_with_error(re, 0, 0);
}

static const struct value NOT_A_VALUE = {NAN, NAN, NAN};

static struct value add(struct value a, struct value b) {
    return value_with_error(a.re + b.re, a.im + b.im, a.err + b.err);
}

static struct value multiply(struct value a, struct value b) {
    return value_with_error(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re,
                            magnitude(a) * b.err + magnitude(b) * a.err + a.err * b.err +
                                EPS * magnitude(a) * magnitude(b));
}

static struct value scale(struct value a, double re, double im) {
    return multiply(a, (struct value){re, im, 0});
}

static struct value invert(struct value a) {
    double d = a.re * a.re + a.im * a.im;
    return value_with_error(a.re / d, -a.im / d, a.err / d);
}

/* The angle t of the point (c, s) on the unit circle, -π < t <= π. Newton's method for sin(angle -
 * t) = 0 converges cubically; the error of the initial t is less than 0.34. */
static double angle(double c, double s) {
    double t = (s < 0 ? -PI : PI) / 2 * (1 - c);
    for (int i = 0; i < 5; i++) t += s * math_cos(t) - c * math_sin(t);
    return t;
}

static struct value logarithm(struct value a) {
    double r = magnitude(a);
    if (!(r > 0)) return NOT_A_VALUE;
    double im = a.im == 0 ? (a.re < 0 ? PI : 0) : angle(a.re / r, a.im / r);
    return value_with_error(math_log(r), im, a.err / r + EPS);
}

static struct value exponential(struct value a) {
    if (!(fabs(a.re) < 700)) return NOT_A_VALUE;
    double r = math_exp(a.re);
    return value_with_error(r * math_cos(a.im), a.im == 0 ? 0 : r * math_sin(a.im),
                            r * (a.err + 2 * EPS));
}

static struct value square_root(struct value a) {
    double r = magnitude(a), re = sqrt((r + fabs(a.re)) / 2), im = re > 0 ? fabs(a.im) / 2 / re : 0;
    double err = r > a.err ? a.err / sqrt(r) : sqrt(a.err);
    if (a.re < 0) {
        double swap = re;
        re = im;
        im = swap;
    }
    return value_with_error(re, a.im < 0 ? -im : im, err);
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
    if (magnitude(a) == 0) return e.re > 0 ? real(0) : NOT_A_VALUE;
    return exponential(multiply(e, logarithm(a)));
}

/* The root of a. An odd root of a negative number is the negative real root. */
static struct value root_value(struct value a, struct value degree) {
    bool is_odd = degree.im == 0 && fabs(degree.re) < 1e9 && fmod(fabs(degree.re), 2) == 1;
    bool negate = is_odd && a.im == 0 && a.re < 0;
    struct value v = power_value(negate ? scale(a, -1, 0) : a, invert(degree));
    return negate ? scale(v, -1, 0) : v;
}

static struct value sine(struct value a, bool cosine) {
    if (a.im == 0)
        return value_with_error(cosine ? math_cos(a.re) : math_sin(a.re), 0,
                                a.err + EPS * (1 + fabs(a.re)));
    struct value up = exponential(scale(a, 0, 1)), down = exponential(scale(a, 0, -1));
    return cosine ? scale(add(up, down), 0.5, 0) : scale(add(up, scale(down, -1, 0)), 0, -0.5);
}

/* arcsin z = -i ln(iz + √(1 - z²)). */
static struct value arc_sine(struct value a) {
    struct value rest = square_root(add(real(1), scale(multiply(a, a), -1, 0)));
    return scale(logarithm(add(scale(a, 0, 1), rest)), 0, -1);
}

/* arctan z = i/2 (ln(1 - iz) - ln(1 + iz)). */
static struct value arc_tangent(struct value a) {
    struct value below = logarithm(add(real(1), scale(a, 0, -1)));
    struct value above = logarithm(add(real(1), scale(a, 0, 1)));
    return scale(add(below, scale(above, -1, 0)), 0, 0.5);
}

/* (e^a + sign e^-a) / 2: cosh for sign 1, sinh for -1. */
static struct value hyperbolic(struct value a, double sign) {
    struct value up = exponential(a), down = exponential(scale(a, -1, 0));
    return scale(add(up, scale(down, sign, 0)), 0.5, 0);
}

static struct value factorial(struct value a) {
    double out = 1;
    if (a.im != 0 || !(a.re >= 0 && a.re <= 170) || a.re != floor(a.re)) return NOT_A_VALUE;
    for (double i = 2; i <= a.re; i++) out *= i;
    return value_with_error(out, 0, out * 200 * EPS);
}

static struct value binomial_value(struct value n, struct value k) {
    double out = 1;
    bool whole_numbers = n.re == floor(n.re) && k.re == floor(k.re) && n.im == 0 && k.im == 0;
    if (!whole_numbers || !(n.re >= 0 && n.re <= MAX_EXACT_FACTORIAL && k.re >= 0 && k.re <= n.re))
        return NOT_A_VALUE;
    for (double i = 0; i < k.re; i++) out *= (n.re - i) / (i + 1);
    return value_with_error(out, 0, out * MAX_EXACT_FACTORIAL * 2 * EPS);
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
        return value_with_error(magnitude(a), 0, a.err);
    case FN_FLOOR:
        return a.im == 0 ? real(floor(a.re)) : NOT_A_VALUE;
    case FN_CEIL:
        return a.im == 0 ? real(ceil(a.re)) : NOT_A_VALUE;
    case FN_FACTORIAL:
        return factorial(a);
    case FN_BINOMIAL:
        return binomial_value(a, b);
    }
    return NOT_A_VALUE;
}

static double digits_double(const char *s, int n) {
    double v = 0;
    for (int i = 0; i < n; i++)
        if (isdigit((unsigned char)s[i])) v = v * 10 + (s[i] - '0');
    return v;
}

static struct value number_value(struct ref r) {
    struct exact_decimal d = decimal_of(r);
    int repeat = node_of(r)->repeat;
    struct value ten = real(10), v = real(digits_double(d.s, d.n));
    if (repeat) {
        v = real(v.re - digits_double(d.s, digits_before_repeat(d, repeat)));
        v = multiply(v, invert(add(integer_power(ten, repeat), real(-1))));
    }
    v = multiply(v, integer_power(ten, d.exponent - d.n_fraction + repeat));
    v.err += 4 * d.n * EPS * fabs(v.re);
    return v;
}

/* The value of a variable at a point: positive at even points, of either sign at odd points. */
static struct value name_value(uint64_t name, uint32_t point) {
    uint64_t bits = point_bits(name, point);
    double x = 0.5 + 2 * (double)(bits >> 32) * 0x1p-32;
    return (struct value){point & 1 && bits & 1 ? -x : x, 0, 0};
}

static struct value value_of(struct ref r, uint32_t point);

static struct value fold_value(struct ref r, uint32_t point, bool product) {
    struct value total = {product, 0, 0};
    for (int c = node_of(r)->first; c != MATH_NONE; c = r.m->node[c].next) {
        struct value x = value_of(child(r, c), point);
        total = product ? multiply(total, x) : add(total, x);
    }
    return total;
}

static struct value value_of(struct ref r, uint32_t point) {
    const struct math_node *v = node_of(r);
    if (!budget_spend(r)) return NOT_A_VALUE;
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
    if (v->kind >= MATH_LIST) return NOT_A_VALUE;
    struct ref first = first_child(r);
    int second = node_of(first)->next;
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
        return NOT_A_VALUE;
    }
}

/* comparing values */

/* Whether the value is finite and precise enough to compare. */
static bool is_usable(struct value a) {
    return isfinite(a.re) && isfinite(a.im) && (a.err < 1e-8 || a.err < 1e-8 * magnitude(a));
}

static bool nearly_equal(struct value a, struct value b) {
    struct value d = add(a, scale(b, -1, 0));
    return magnitude(d) <= 1e-10 * fmax(magnitude(a), magnitude(b)) + 4 * (a.err + b.err);
}

static bool is_real(struct value a) {
    return fabs(a.im) <= 4 * a.err;
}

/* Compares two values at the points where both are real; if there is no such point, at all points.
 * A value that is not usable at a point is not compared there. */
static bool equal_at_points(struct ref a, struct ref b) {
    unsigned names = KIND(MATH_NAME);
    uint32_t points = contains_kind(a, names) || contains_kind(b, names) ? POINTS : 1;
    int n_real = 0, n_equal_real = 0, n = 0, n_equal = 0;
    for (uint32_t i = 0; i < points; i++) {
        struct value x = value_of(a, i), y = value_of(b, i);
        if (!is_usable(x) || !is_usable(y)) continue;
        bool both_real = is_real(x) && is_real(y), is_equal = nearly_equal(x, y);
        n++;
        n_equal += is_equal;
        n_real += both_real;
        n_equal_real += both_real && is_equal;
    }
    return n_real ? n_equal_real == n_real : n && n_equal == n;
}

static bool values_equal(struct ref a, struct ref b) {
    uint64_t x, y;
    if (mod_value(a, &x) && mod_value(b, &y)) return x == y;
    return equal_at_points(a, b);
}

/* Compares two values. If only one of them has percent or degree signs, the signs may also be
 * ignored: 10% equals 0.1 and 10. */
static bool values_equal_ignoring_units(struct ref a, struct ref b) {
    unsigned scaled = KIND(MATH_PERCENT) | KIND(MATH_DEGREE);
    if (node_of(a)->kind >= MATH_LIST || node_of(b)->kind >= MATH_LIST) return false;
    if (values_equal(a, b)) return true;
    bool a_scaled = contains_kind(a, scaled), b_scaled = contains_kind(b, scaled);
    if (a_scaled == b_scaled) return false;
    a.plain = b.plain = true;
    return values_equal(a, b);
}

/* lists, points, matrices */

static bool nodes_equal(struct ref a, struct ref b);

static bool is_value(struct ref r) {
    return node_of(r)->kind < MATH_LIST;
}

/* Collects the items of an unordered list, or the value itself as one item; a value with ± counts
 * as two items. Returns their number; -1: more than MAX_ITEMS. */
static int items_collect(struct ref r, struct ref out[MAX_ITEMS]) {
    int n = 0;
    int kind = node_of(r)->kind;
    if (kind == MATH_LIST || kind == MATH_SET || kind == MATH_UNION) {
        for (int c = node_of(r)->first; c != MATH_NONE && n >= 0; c = r.m->node[c].next) {
            struct ref inner[MAX_ITEMS];
            int k = items_collect(child(r, c), inner);
            if (k < 0 || n + k > MAX_ITEMS) return -1;
            memcpy(out + n, inner, (size_t)k * sizeof *out);
            n += k;
        }
        return n;
    }
    out[n++] = r;
    if (!is_value(r) || r.sign || !contains_kind(r, KIND(MATH_PM))) return n;
    out[0].sign = 1;
    out[n] = r;
    out[n++].sign = -1;
    return n;
}

/* Whether the items of a and b match one to one in any order. If one side has a single item, every
 * item of the other side must be equal to it, so repetitions do not count. */
static bool items_match(struct ref a, struct ref b) {
    struct ref x[MAX_ITEMS], y[MAX_ITEMS];
    bool taken[MAX_ITEMS] = {false};
    int n = items_collect(a, x), m = items_collect(b, y), found = 0;
    if (n < 0 || m < 0) return false;
    if (n != m && n != 1 && m != 1) return false;
    for (int i = 0; i < MAX(n, m); i++)
        for (int k = 0; k < (n == m ? m : 1); k++) {
            if (taken[k] || !nodes_equal(x[n == 1 ? 0 : i], y[n == 1 && m > 1 ? i : k])) continue;
            taken[k] = n == m;
            found++;
            break;
        }
    return found == MAX(n, m);
}

static bool children_equal(struct ref a, struct ref b) {
    int c = node_of(a)->first, d = node_of(b)->first;
    for (; c != MATH_NONE && d != MATH_NONE; c = a.m->node[c].next, d = b.m->node[d].next)
        if (!nodes_equal(child(a, c), child(b, d))) return false;
    return c == d;
}

/* At least one of the nodes is a matrix. A matrix with one row or column also equals a point. */
static bool matrices_equal(struct ref a, struct ref b) {
    bool both_matrices = node_of(a)->kind == MATH_MATRIX && node_of(b)->kind == MATH_MATRIX;
    struct ref m = node_of(a)->kind == MATH_MATRIX ? a : b;
    bool is_vector = node_of(m)->op == 1 || node_of(m)->op == math_child_count(m.m, m.node);
    if (both_matrices) return node_of(a)->op == node_of(b)->op && children_equal(a, b);
    return is_vector && node_of(a)->kind + node_of(b)->kind == MATH_MATRIX + MATH_TUPLE &&
           (node_of(a)->kind == MATH_TUPLE ? node_of(a)->op : node_of(b)->op) == 0 &&
           children_equal(a, b);
}

/* relations */

static enum math_relation relation_at(struct ref r, int i) {
    return (enum math_relation)(node_of(r)->name >> (4 * i) & 15);
}

static enum math_relation relation_flip(enum math_relation r) {
    static const enum math_relation to[] = {
        0, REL_EQ, REL_GT, REL_GE, REL_LT, REL_LE, REL_NE, 0,
    };
    return to[r];
}

static struct ref relation_part(struct ref r, int i) {
    struct ref p = first_child(r);
    for (; i > 0; i--) p = child(r, node_of(p)->next);
    return p;
}

/* Whether the value is a name that an equation can define: x, f(x), AB. */
static bool is_name(struct ref r) {
    if (node_of(r)->kind == MATH_MULTIPLY) r = first_child(r);
    return node_of(r)->kind == MATH_NAME;
}

/* Finds the value that "x = 5", "5 = x", "f(x) = 2x = 6" or "x ∈ A" states. */
static bool stated_value(struct ref r, struct ref *out) {
    int last = math_child_count(r.m, r.node) - 1;
    struct ref a = relation_part(r, 0), b = relation_part(r, last);
    for (int i = 0; i < last; i++)
        if (relation_at(r, i) != REL_EQ && (relation_at(r, i) != REL_IN || last > 1)) return false;
    bool defined =
        is_name(a) || (is_value(a) && !contains_kind(a, KIND(MATH_NAME)) && nodes_equal(a, b));
    *out = !is_name(a) && node_of(b)->kind == MATH_NAME ? a : b;
    return defined || node_of(b)->kind == MATH_NAME;
}

/* An interval of the real line; an end whose node is MATH_NONE is infinite. */
struct real_range {
    struct ref end[2];
    bool closed[2];
    uint64_t name; /* name of its variable; 0: any */
};

static bool is_infinite(struct ref r) {
    if (node_of(r)->kind == MATH_NEGATE) r = first_child(r);
    return node_of(r)->kind == MATH_NAME && node_of(r)->name == hash_fnv1a("∞", 3);
}

static void range_end(struct real_range *out, int side, struct ref r, bool closed) {
    out->end[side] = r;
    out->closed[side] = closed;
    if (!is_infinite(r)) return;
    out->end[side].node = MATH_NONE;
    out->closed[side] = false;
}

static bool is_less(enum math_relation r) {
    return r == REL_LT || r == REL_LE;
}

/* Reads x > 2, 2 < x, 1 < x <= 3 or (1,3] as a range; false for other relations. */
static bool range_of(struct ref r, struct real_range *out) {
    int n = math_child_count(r.m, r.node);
    *out = (struct real_range){0};
    if (node_of(r)->kind == MATH_TUPLE && n == 2) {
        range_end(out, 0, relation_part(r, 0), node_of(r)->op & 1);
        range_end(out, 1, relation_part(r, 1), node_of(r)->op >> 1 & 1);
        return true;
    }
    if (node_of(r)->kind != MATH_RELATION || n > 3) return false;
    int x = n == 3 || node_of(relation_part(r, 0))->kind != MATH_NAME;
    if (node_of(relation_part(r, x))->kind != MATH_NAME) return false;
    out->name = node_of(relation_part(r, x))->name;
    out->end[0].node = out->end[1].node = MATH_NONE;
    for (int i = 0; i < n - 1; i++) {
        enum math_relation rel = relation_at(r, i);
        if (rel < REL_LT || rel > REL_GE) return false;
        int bound = i == x ? i + 1 : i;
        int side = is_less(rel) == (bound > x);
        if (n == 3 && is_less(rel) != is_less(relation_at(r, 0))) return false;
        range_end(out, side, relation_part(r, bound), rel == REL_LE || rel == REL_GE);
    }
    return true;
}

static bool ranges_equal(const struct real_range *a, const struct real_range *b) {
    if (a->name && b->name && a->name != b->name) return false;
    for (int i = 0; i < 2; i++) {
        bool inf = a->end[i].node == MATH_NONE;
        if (a->closed[i] != b->closed[i] || inf != (b->end[i].node == MATH_NONE)) return false;
        if (!inf && !nodes_equal(a->end[i], b->end[i])) return false;
    }
    return true;
}

/* The left part minus the right part, at a point. */
static struct value relation_difference(struct ref r, uint32_t point) {
    return add(value_of(relation_part(r, 0), point),
               scale(value_of(relation_part(r, 1), point), -1, 0));
}

/* Whether relation a is relation b multiplied by a constant. A negative constant reverses an
 * inequality. */
static bool are_multiples(struct ref a, struct ref b) {
    struct value ratio = NOT_A_VALUE, begin = NOT_A_VALUE;
    bool varies = false;
    for (uint32_t i = 0; i < POINTS; i++) {
        struct value f = relation_difference(a, i), g = relation_difference(b, i);
        if (!is_usable(f) || !is_usable(g) || magnitude(g) <= 4 * g.err ||
            magnitude(f) <= 4 * f.err)
            return false;
        struct value q = multiply(f, invert(g));
        if (i == 0) ratio = q, begin = f;
        varies |= !nearly_equal(begin, f);
        if (!nearly_equal(ratio, q) || !is_real(q)) return false;
    }
    enum math_relation x = relation_at(a, 0), y = relation_at(b, 0);
    return varies && x == (ratio.re < 0 ? relation_flip(y) : y);
}

static bool relations_equal(struct ref a, struct ref b) {
    int n = math_child_count(a.m, a.node);
    bool same_order = true, reversed_order = true;
    if (n != math_child_count(b.m, b.node)) return false;
    for (int i = 0; i < n; i++) {
        same_order = same_order && (i == n - 1 || relation_at(a, i) == relation_at(b, i)) &&
                     nodes_equal(relation_part(a, i), relation_part(b, i));
        reversed_order =
            reversed_order &&
            (i == n - 1 || relation_at(a, i) == relation_flip(relation_at(b, n - 2 - i))) &&
            nodes_equal(relation_part(a, i), relation_part(b, n - 1 - i));
    }
    return same_order || reversed_order ||
           (n == 2 && relation_at(a, 0) != REL_IN && are_multiples(a, b));
}

static bool relation_matches(struct ref a, struct ref b) {
    struct real_range x, y;
    struct ref v, w;
    bool a_is_relation = node_of(a)->kind == MATH_RELATION,
         b_is_relation = node_of(b)->kind == MATH_RELATION;
    if (range_of(a, &x) && range_of(b, &y)) return ranges_equal(&x, &y);
    if (a_is_relation && b_is_relation && relations_equal(a, b)) return true;
    if (a_is_relation && b_is_relation) // "x = 2 + 3 = 5"
        return stated_value(a, &v) && stated_value(b, &w) &&
               nodes_equal(relation_part(a, 0), relation_part(b, 0)) && nodes_equal(v, w);
    struct ref relation = a_is_relation ? a : b, other_node = a_is_relation ? b : a;
    if (stated_value(relation, &v) && nodes_equal(v, other_node)) return true;
    return node_of(other_node)->kind == MATH_LIST && items_match(a, b);
}

/* comparison of any two nodes */

static bool nodes_equal(struct ref a, struct ref b) {
    int x = node_of(a)->kind, y = node_of(b)->kind;
    if (!budget_spend(a)) return false;
    if (x == MATH_RELATION || y == MATH_RELATION) return relation_matches(a, b);
    if (x == MATH_TUPLE && y == MATH_TUPLE)
        return node_of(a)->op == node_of(b)->op && children_equal(a, b);
    if (x == MATH_MATRIX || y == MATH_MATRIX) return matrices_equal(a, b);
    if (x == MATH_TUPLE || y == MATH_TUPLE) { // "1, 2" may mean (1,2)
        int op = x == MATH_TUPLE ? node_of(a)->op : node_of(b)->op;
        return x + y == MATH_LIST + MATH_TUPLE && op == 0 && children_equal(a, b);
    }
    if (x >= MATH_LIST || y >= MATH_LIST) return items_match(a, b);
    bool has_plus_minus = (!a.sign && contains_kind(a, KIND(MATH_PM))) ||
                          (!b.sign && contains_kind(b, KIND(MATH_PM)));
    return has_plus_minus ? items_match(a, b) : values_equal_ignoring_units(a, b);
}

/* words */

/* Appends the text in lower case, without blanks next to signs, without the bytes of enum math_mark
 * (math_parse.c), and without brackets around a single byte. Braces remain only in a formula. */
static void words_fold(const struct math_expr *m, struct buf *out) {
    struct buf folded = {0};
    bool formula = strpbrk(m->text.data, "\\^_") != NULL;
    text_normalize(m->text.data, m->text.len, &folded);
    buf_puts(out, "");
    for (size_t i = 0; i < folded.len; i++) {
        unsigned char c = (unsigned char)folded.data[i], next = (unsigned char)folded.data[i + 1];
        bool is_dropped = c < 0x20 || (!formula && (c == '{' || c == '}'));
        unsigned char last = out->len ? (unsigned char)out->data[out->len - 1] : ' ';
        if (c == ' ' && !((isalnum(last) || last >= 0x80) && (isalnum(next) || next >= 0x80)))
            is_dropped = true;
        if (!is_dropped) buf_add(out, &c, 1);
    }
    if (out->len == 3 && out->data[0] == '(' && out->data[2] == ')') { // (c)
        out->data[0] = out->data[1];
        out->data[out->len = 1] = 0;
    }
    buf_release(&folded);
}

/* Whether the two texts are equal as words. */
static bool words_equal(const struct math_expr *a, const struct math_expr *b) {
    struct buf x = {0}, y = {0};
    words_fold(a, &x);
    words_fold(b, &y);
    bool equal = x.len && x.len == y.len && memcmp(x.data, y.data, x.len) == 0;
    buf_release(&x);
    buf_release(&y);
    return equal;
}

static bool is_letters_only(const struct math_expr *m) {
    size_t n = 0;
    for (const char *p = m->text.data; *p; p++, n++)
        if (!isalpha((unsigned char)*p) && *p != ' ') return false;
    return n > 1;
}

static bool parsed_equal(const struct math_expr *a, const struct math_expr *b, int64_t *steps) {
    int budget = STEP_BUDGET;
    bool units = a->unit && b->unit && a->unit != b->unit;
    bool as_words =
        a->root == MATH_NONE || b->root == MATH_NONE || (is_letters_only(a) && is_letters_only(b));
    if (as_words && words_equal(a, b)) return true;
    if (a->root == MATH_NONE || b->root == MATH_NONE || units) return false;
    bool equal = nodes_equal((struct ref){a, a->root, 0, false, &budget},
                             (struct ref){b, b->root, 0, false, &budget});
    *steps += STEP_BUDGET - budget;
    return equal;
}

/* Tries all pairs of readings. It skips a reading that would not give another tree. */
bool math_equivalent(const char *a, const char *b, int64_t *steps) {
    struct math_expr *m = xcalloc(2, sizeof *m);
    bool equal = false;
    *steps = 0;
    int all = READING_COMMA_SEPARATES | READING_UNIT_IS_VARIABLE;
    for (int i = 0; !equal && i <= all; i++) {
        math_parse(&m[0], a, i);
        for (int k = 0; !equal && (i & ~m[0].other_readings) == 0 && k <= all; k++) {
            math_parse(&m[1], b, k);
            equal = (k & ~m[1].other_readings) == 0 && parsed_equal(&m[0], &m[1], steps);
            math_release(&m[1]);
        }
        math_release(&m[0]);
    }
    free(m);
    return equal;
}
