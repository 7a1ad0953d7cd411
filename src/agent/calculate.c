/*
 * calculate: the exact value of an arithmetic expression, also with units.
 *
 * Values are rational numbers of GMP. Pi, e and square roots that are not rational are rational
 * approximations of PRECISION bits; a result that depends on one is marked with ≈. No
 * floating-point number takes part, so a text has the same result on every machine.
 *
 * The grammar, on a text whose full-width characters and signs are folded to ASCII:
 *
 *   all      = sum [("in" | "to") unit]
 *   sum      = product {("+" | "-") product}
 *   product  = signed {("*" | "/" | "mod") signed}
 *   signed   = {"+" | "-"} quantity
 *   quantity = power [unit] | unit
 *   power    = postfix ["^" {"+" | "-"} power]
 *   postfix  = primary {"!" | "%"}
 *   primary  = number | "(" all ")" | constant | function "(" all {"," all} ")"
 *   unit     = name ["^" integer] {("*" | "/") name ["^" integer]}
 *
 * GMP aborts the process when memory is exhausted, so the cost is bounded: a text has at most
 * MAX_BYTES bytes and MAX_OPERATIONS operations, recursion is at most MAX_DEPTH deep, and after
 * each operation numerator and denominator have at most MAX_BITS bits. One sum, product or
 * comparison of such values needs numbers of at most about twice as many bits; powers are products,
 * and factorials and powers of ten have limits of their own.
 */
#include "agent/agent.h"

#include <gmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum {
    MAX_BYTES = 4096,
    MAX_DEPTH = 64,
    MAX_BITS = 20000,
    MAX_OPERATIONS = 3000,
    MAX_FACTORIAL = 1000,
    MAX_SCALE = 6100,        /* decimal exponent of a number; 10^6100 has more than MAX_BITS bits */
    MAX_UNIT_EXPONENT = 32,  /* of a dimension */
    MAX_ROUND = 100,         /* digits of round */
    MAX_WORD = 40,           /* bytes of a word that a message quotes */
    PRECISION = 512,         /* bits of an approximation */
    EXACT_DECIMALS = 30,     /* of an exact decimal number; a longer one is shown as a fraction */
    FRACTION_DIGITS = 15,    /* significant digits of the approximation of a fraction */
    APPROXIMATE_DIGITS = 30, /* significant digits of an approximate result */
    APPROXIMATE_DECIMALS = 60, /* smaller differences of approximations are shown as 0 */
};

/* units */

enum dimension { DATA, MASS, LENGTH, TIME, N_DIMENSIONS, TEMPERATURE = N_DIMENSIONS };

static const char *const base_units[N_DIMENSIONS] = {"B", "kg", "m", "s"};

/* 1 unit = factor * base unit ^ power; kelvin = (temperature + offset) * factor. */
struct unit {
    const char *names; /* separated by blanks; results have the first */
    enum dimension dimension;
    int power;
    const char *factor, *offset;
};
static const struct unit units[] = {
    {"mm", LENGTH, 1, "1/1000"},
    {"cm", LENGTH, 1, "1/100"},
    {"m meter meters metre metres", LENGTH, 1, "1"},
    {"km kilometer kilometers kilometre kilometres", LENGTH, 1, "1000"},
    {"in inch inches", LENGTH, 1, "127/5000"},
    {"ft foot feet", LENGTH, 1, "381/1250"},
    {"yd yard yards", LENGTH, 1, "1143/1250"},
    {"mi mile miles", LENGTH, 1, "201168/125"},
    {"l L liter liters litre litres", LENGTH, 3, "1/1000"},
    {"ml mL", LENGTH, 3, "1/1000000"},
    {"mg", MASS, 1, "1/1000000"},
    {"g gram grams", MASS, 1, "1/1000"},
    {"kg kilogram kilograms", MASS, 1, "1"},
    {"t tonne tonnes", MASS, 1, "1000"},
    {"oz ounce ounces", MASS, 1, "45359237/1600000000"},
    {"lb lbs pound pounds", MASS, 1, "45359237/100000000"},
    {"ms", TIME, 1, "1/1000"},
    {"s sec second seconds", TIME, 1, "1"},
    {"min minute minutes", TIME, 1, "60"},
    {"h hr hour hours", TIME, 1, "3600"},
    {"day days d", TIME, 1, "86400"},
    {"week weeks", TIME, 1, "604800"},
    {"B byte bytes", DATA, 1, "1"},
    {"kB", DATA, 1, "1000"},
    {"MB", DATA, 1, "1000000"},
    {"GB", DATA, 1, "1000000000"},
    {"TB", DATA, 1, "1000000000000"},
    {"KiB", DATA, 1, "1024"},
    {"MiB", DATA, 1, "1048576"},
    {"GiB", DATA, 1, "1073741824"},
    {"TiB", DATA, 1, "1099511627776"},
    {"C", TEMPERATURE, 1, "1", "27315/100"},
    {"F", TEMPERATURE, 1, "5/9", "45967/100"},
    {"K", TEMPERATURE, 1, "1", "0"},
};

/* Whether a word is one of the names that blanks separate. */
static bool names_have(const char *names, const char *word, size_t n) {
    for (const char *name = names; *name;) {
        size_t length = strcspn(name, " ");
        if (length == n && memcmp(name, word, n) == 0) return true;
        name += length + strspn(name + length, " ");
    }
    return false;
}

static const struct unit *unit_find(const char *word, size_t n) {
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if (names_have(units[i].names, word, n)) return &units[i];
    return NULL;
}

static void unit_append_name(const struct unit *u, enum dimension d, struct buf *out) {
    const char *name = u ? u->names : base_units[d];
    buf_add(out, name, strcspn(name, " "));
}

/* numbers */

static void number_set(mpq_ptr x, const char *text) {
    CHECK(mpq_set_str(x, text, 10) == 0);
    mpq_canonicalize(x);
}

static bool is_integer(mpq_srcptr x) {
    return mpz_cmp_ui(mpq_denref(x), 1) == 0;
}

static long bits(const mpz_t z) {
    return (long)mpz_sizeinbase(z, 2);
}

/* x *= 2^n */
static void number_shift(mpq_ptr x, long n) {
    if (n >= 0)
        mpq_mul_2exp(x, x, (mp_bitcnt_t)n);
    else
        mpq_div_2exp(x, x, (mp_bitcnt_t)-n);
}

/* Cuts an approximation to about PRECISION significant bits. */
static void number_cut(mpq_ptr x) {
    long shift = PRECISION - bits(mpq_numref(x)) + bits(mpq_denref(x));
    mpz_t q;
    if (mpq_sgn(x) == 0) return;
    mpz_init(q);
    number_shift(x, shift);
    mpz_tdiv_q(q, mpq_numref(x), mpq_denref(x));
    mpq_set_z(x, q);
    number_shift(x, -shift);
    mpz_clear(q);
}

static void number_floor(mpq_ptr x) {
    mpz_fdiv_q(mpq_numref(x), mpq_numref(x), mpq_denref(x));
    mpz_set_ui(mpq_denref(x), 1);
}

static void number_ceil(mpq_ptr x) {
    mpz_cdiv_q(mpq_numref(x), mpq_numref(x), mpq_denref(x));
    mpz_set_ui(mpq_denref(x), 1);
}

/* Halves are rounded away from zero. */
static void number_round(mpq_ptr x) {
    bool negative = mpq_sgn(x) < 0;
    mpq_t half;
    mpq_init(half);
    mpq_set_ui(half, 1, 2);
    mpq_abs(x, x);
    mpq_add(x, x, half);
    number_floor(x);
    if (negative) mpq_neg(x, x);
    mpq_clear(half);
}

/* x *= 10^n; n is at most a few thousand. */
static void number_scale(mpq_ptr x, long n) {
    mpq_t power;
    mpq_init(power);
    mpz_ui_pow_ui(mpq_numref(power), 10, (unsigned long)labs(n));
    if (n >= 0)
        mpq_mul(x, x, power);
    else
        mpq_div(x, x, power);
    mpq_clear(power);
}

/* Replaces x >= 0 by its square root; returns whether it is exact. */
static bool number_root(mpq_ptr x) {
    mpz_ptr num = mpq_numref(x), den = mpq_denref(x);
    if (mpz_perfect_square_p(num) && mpz_perfect_square_p(den)) {
        mpz_sqrt(num, num);
        mpz_sqrt(den, den);
        return true;
    }
    long shift = MAX(PRECISION - (bits(num) - bits(den)) / 2, 0);
    number_shift(x, 2 * shift);
    number_floor(x);
    mpz_sqrt(num, num);
    number_shift(x, -shift);
    return false;
}

/* values */

/*
 * A number in base units, the exponent of each dimension, and the unit that shows the dimension;
 * NULL: the base unit. Invariant: units[d] is NULL if exponents[d] is 0, and its power divides
 * exponents[d] otherwise. A temperature is a number in its own unit, without dimensions.
 */
struct value {
    mpq_t number;
    bool approximate;
    int exponents[N_DIMENSIONS];
    const struct unit *units[N_DIMENSIONS];
    const struct unit *temperature;
};

static void value_init(struct value *v, unsigned long number) {
    *v = (struct value){0};
    mpq_init(v->number);
    mpq_set_ui(v->number, number, 1);
}

static void value_release(struct value *v) {
    mpq_clear(v->number);
}

static void value_swap(struct value *a, struct value *b) {
    struct value t = *a;
    *a = *b;
    *b = t;
}

static bool has_dimension(const struct value *v) {
    for (int d = 0; d < N_DIMENSIONS; d++)
        if (v->exponents[d]) return true;
    return false;
}

static bool is_plain(const struct value *v) {
    return !v->temperature && !has_dimension(v);
}

static void dimension_set(struct value *v, int d, int exponent, const struct unit *first,
                          const struct unit *second) {
    v->exponents[d] = exponent;
    v->units[d] = NULL;
    if (exponent && second && exponent % second->power == 0) v->units[d] = second;
    if (exponent && first && exponent % first->power == 0) v->units[d] = first;
}

/* out: one unit of the result in base units. */
static void unit_factor(const struct value *v, mpq_ptr out) {
    mpq_t factor;
    mpq_init(factor);
    mpq_set_ui(out, 1, 1);
    for (int d = 0; d < N_DIMENSIONS; d++) {
        const struct unit *u = v->units[d];
        if (!u) continue;
        number_set(factor, u->factor);
        for (int n = v->exponents[d] / u->power; n > 0; n--) mpq_mul(out, out, factor);
        for (int n = v->exponents[d] / u->power; n < 0; n++) mpq_div(out, out, factor);
    }
    mpq_clear(factor);
}

static int unit_exponent(const struct value *v, int d) {
    return v->units[d] ? v->exponents[d] / v->units[d]->power : v->exponents[d];
}

/* "kg*m/s^2"; "s^-1" if all exponents are negative. */
static void unit_append(const struct value *v, struct buf *out) {
    int n = 0, n_positive = 0;
    if (v->temperature) unit_append_name(v->temperature, 0, out);
    for (int d = 0; d < N_DIMENSIONS; d++) n_positive += v->exponents[d] > 0;
    for (int sign = 1; sign >= -1; sign -= 2) {
        for (int d = 0; d < N_DIMENSIONS; d++) {
            int exponent = unit_exponent(v, d);
            if (exponent * sign <= 0) continue;
            bool divided = sign < 0 && n_positive;
            if (n++) buf_puts(out, divided ? "/" : "*");
            unit_append_name(v->units[d], d, out);
            if (divided) exponent = -exponent;
            if (exponent != 1) buf_printf(out, "^%d", exponent);
        }
    }
}

/* The unit for a message; valid until the buf is released. */
static const char *unit_words(const struct value *v, struct buf *out) {
    if (is_plain(v))
        buf_puts(out, "a number without a unit");
    else
        unit_append(v, out);
    return out->data;
}

/* A position in a folded text, which the functions below move. */
struct scan {
    const char *text;
    const uint16_t
        *at; /* [strlen(text) + 1] number of the character in the text as given, from 1 */
    size_t p;
    int depth, operations;
    bool in_arguments;     /* a comma separates arguments, not thousands */
    bool number_with_unit; /* the last quantity is a number and a unit, without parentheses */
    struct error *err;
};

static int size_check(struct scan *s, const struct value *v) {
    if (bits(mpq_numref(v->number)) > MAX_BITS || bits(mpq_denref(v->number)) > MAX_BITS)
        return error_set(s->err, ERR_USAGE, "a number has more than %d bits", MAX_BITS);
    return OK;
}

static int operation_count(struct scan *s) {
    if (++s->operations > MAX_OPERATIONS)
        return error_set(s->err, ERR_USAGE, "more than %d operations", MAX_OPERATIONS);
    return OK;
}

/* To be called with the result of each operation. */
static int operation_end(struct scan *s, struct value *v) {
    if (v->approximate) number_cut(v->number);
    return operation_count(s) == OK ? size_check(s, v) : s->err->code;
}

static int temperature_refuse(struct scan *s, const struct value *v) {
    if (!v->temperature) return OK;
    return error_set(s->err, ERR_USAGE,
                     "a temperature in %s can only be converted, with 'in' or 'to' C, F or K",
                     v->temperature->names);
}

static int division_by_zero(struct scan *s) {
    return error_set(s->err, ERR_USAGE, "division by zero");
}

/* Before an operation on values of one dimension: "cannot VERB A JOINER B". */
static int dimensions_match(struct scan *s, const char *verb, const struct value *a,
                            const char *joiner, const struct value *b) {
    struct buf first = {0}, second = {0};
    if (temperature_refuse(s, a) != OK || temperature_refuse(s, b) != OK) return s->err->code;
    if (memcmp(a->exponents, b->exponents, sizeof a->exponents) == 0) return OK;
    error_set(s->err, ERR_USAGE, "cannot %s %s %s %s", verb, unit_words(a, &first), joiner,
              unit_words(b, &second));
    buf_release(&first);
    buf_release(&second);
    return s->err->code;
}

static int value_add(struct scan *s, struct value *a, const struct value *b) {
    int rc = dimensions_match(s, "add", a, "and", b);
    if (rc != OK) return rc;
    a->approximate |= b->approximate;
    mpq_add(a->number, a->number, b->number);
    return operation_end(s, a);
}

static int value_subtract(struct scan *s, struct value *a, const struct value *b) {
    int rc = dimensions_match(s, "subtract", b, "from", a);
    if (rc != OK) return rc;
    a->approximate |= b->approximate;
    mpq_sub(a->number, a->number, b->number);
    return operation_end(s, a);
}

/* The exponents of a * b^sign. */
static int dimensions_combine(struct scan *s, struct value *a, const struct value *b, int sign) {
    if (temperature_refuse(s, a) != OK || temperature_refuse(s, b) != OK) return s->err->code;
    for (int d = 0; d < N_DIMENSIONS; d++) {
        int exponent = a->exponents[d] + sign * b->exponents[d];
        if (abs(exponent) > MAX_UNIT_EXPONENT)
            return error_set(s->err, ERR_USAGE, "a power of %s above %d", base_units[d],
                             MAX_UNIT_EXPONENT);
        dimension_set(a, d, exponent, a->units[d], b->units[d]);
    }
    return OK;
}

static int value_multiply(struct scan *s, struct value *a, const struct value *b) {
    int rc = dimensions_combine(s, a, b, 1);
    if (rc != OK) return rc;
    a->approximate |= b->approximate;
    mpq_mul(a->number, a->number, b->number);
    return operation_end(s, a);
}

static int value_divide(struct scan *s, struct value *a, const struct value *b) {
    int rc = dimensions_combine(s, a, b, -1);
    if (rc != OK) return rc;
    if (mpq_sgn(b->number) == 0) return division_by_zero(s);
    a->approximate |= b->approximate;
    mpq_div(a->number, a->number, b->number);
    return operation_end(s, a);
}

/* a - b * floor(a / b): the remainder has the sign of b. */
static int value_modulo(struct scan *s, struct value *a, const struct value *b) {
    int rc = dimensions_match(s, "take the remainder of", a, "by", b);
    if (rc != OK) return rc;
    if (mpq_sgn(b->number) == 0) return division_by_zero(s);
    mpq_t times;
    mpq_init(times);
    mpq_div(times, a->number, b->number);
    number_floor(times);
    mpq_mul(times, times, b->number);
    mpq_sub(a->number, a->number, times);
    mpq_clear(times);
    a->approximate |= b->approximate;
    return operation_end(s, a);
}

/* *n = |exponent|; of -1, 0 and 1 only its parity matters, so that any exponent is possible. */
static int exponent_get(struct scan *s, const struct value *v, const struct value *exponent,
                        unsigned long *n) {
    mpz_srcptr integer = mpq_numref(exponent->number);
    if (temperature_refuse(s, v) != OK) return s->err->code;
    if (!is_plain(exponent)) return error_set(s->err, ERR_USAGE, "an exponent has a unit");
    if (!is_integer(exponent->number))
        return error_set(s->err, ERR_USAGE, "an exponent is not an integer");
    bool small = is_integer(v->number) && mpz_cmpabs_ui(mpq_numref(v->number), 1) <= 0;
    if (mpz_cmpabs_ui(integer, MAX_BITS) <= 0)
        *n = mpz_get_ui(integer);
    else if (small && !has_dimension(v))
        *n = mpz_odd_p(integer) ? 1 : 2;
    else
        return error_set(s->err, ERR_USAGE, "an exponent is above %d", MAX_BITS);
    return OK;
}

/* By squaring, so that each product has checked operands. */
static int value_power(struct scan *s, struct value *v, const struct value *exponent) {
    unsigned long n = 0;
    struct value result;
    int rc = exponent_get(s, v, exponent, &n);
    if (rc != OK) return rc;
    if (mpq_sgn(exponent->number) < 0 && mpq_sgn(v->number) == 0) return division_by_zero(s);
    value_init(&result, 1);
    for (; rc == OK && n; n >>= 1) {
        bool negative = mpq_sgn(exponent->number) < 0;
        if (n & 1) rc = negative ? value_divide(s, &result, v) : value_multiply(s, &result, v);
        if (rc == OK && n > 1) rc = value_multiply(s, v, v);
    }
    result.approximate |= exponent->approximate;
    value_swap(v, &result);
    value_release(&result);
    return rc;
}

static int value_factorial(struct scan *s, struct value *v) {
    if (!is_plain(v)) return error_set(s->err, ERR_USAGE, "a factorial of a number with a unit");
    if (!is_integer(v->number) || mpq_sgn(v->number) < 0)
        return error_set(s->err, ERR_USAGE, "a factorial of a number that is not 0, 1, 2, …");
    if (mpz_cmp_ui(mpq_numref(v->number), MAX_FACTORIAL) > 0)
        return error_set(s->err, ERR_USAGE, "a factorial of a number above %d", MAX_FACTORIAL);
    mpz_fac_ui(mpq_numref(v->number), mpz_get_ui(mpq_numref(v->number)));
    return operation_end(s, v);
}

static int value_percent(struct scan *s, struct value *v) {
    if (temperature_refuse(s, v) != OK) return s->err->code;
    number_scale(v->number, -2);
    return operation_end(s, v);
}

/* functions */

static int value_abs(struct scan *s, struct value *v) {
    mpq_abs(v->number, v->number);
    return operation_end(s, v);
}

/* Applies a function to the number of units that a result would show. */
static int value_apply(struct scan *s, struct value *v, long digits, void (*function)(mpq_ptr)) {
    mpq_t factor;
    mpq_init(factor);
    unit_factor(v, factor);
    mpq_div(v->number, v->number, factor);
    number_scale(v->number, digits);
    function(v->number);
    number_scale(v->number, -digits);
    mpq_mul(v->number, v->number, factor);
    mpq_clear(factor);
    return operation_end(s, v);
}

static int value_floor(struct scan *s, struct value *v) {
    return value_apply(s, v, 0, number_floor);
}

static int value_ceil(struct scan *s, struct value *v) {
    return value_apply(s, v, 0, number_ceil);
}

static int value_round(struct scan *s, struct value *v) {
    return value_apply(s, v, 0, number_round);
}

static int value_round_digits(struct scan *s, struct value *v, struct value *digits) {
    if (!is_plain(digits) || !is_integer(digits->number) ||
        mpz_cmpabs_ui(mpq_numref(digits->number), MAX_ROUND) > 0)
        return error_set(s->err, ERR_USAGE, "round takes at most %d digits, an integer", MAX_ROUND);
    v->approximate |= digits->approximate;
    return value_apply(s, v, mpz_get_si(mpq_numref(digits->number)), number_round);
}

static int value_sqrt(struct scan *s, struct value *v) {
    if (mpq_sgn(v->number) < 0)
        return error_set(s->err, ERR_USAGE, "a square root of a negative number");
    for (int d = 0; d < N_DIMENSIONS; d++) {
        if (v->exponents[d] % 2)
            return error_set(s->err, ERR_USAGE, "a square root of an odd power of %s",
                             base_units[d]);
        dimension_set(v, d, v->exponents[d] / 2, v->units[d], NULL);
    }
    if (!number_root(v->number)) v->approximate = true;
    return operation_end(s, v);
}

/* Leaves the smaller value, or with sign = -1 the larger one, in `a`. */
static int value_choose(struct scan *s, struct value *a, struct value *b, int sign) {
    int rc = dimensions_match(s, "compare", a, "and", b);
    if (rc != OK) return rc;
    if (mpq_cmp(a->number, b->number) * sign > 0) value_swap(a, b);
    a->approximate |= b->approximate;
    return operation_end(s, a);
}

static int value_min(struct scan *s, struct value *a, struct value *b) {
    return value_choose(s, a, b, 1);
}

static int value_max(struct scan *s, struct value *a, struct value *b) {
    return value_choose(s, a, b, -1);
}

static int integer_check(struct scan *s, const struct value *v) {
    if (is_plain(v) && is_integer(v->number)) return OK;
    return error_set(s->err, ERR_USAGE, "gcd and lcm take integers without units");
}

static int value_divisor(struct scan *s, struct value *v) {
    return integer_check(s, v) == OK ? value_abs(s, v) : s->err->code;
}

static int value_gcd(struct scan *s, struct value *a, struct value *b) {
    if (integer_check(s, a) != OK || integer_check(s, b) != OK) return s->err->code;
    mpz_gcd(mpq_numref(a->number), mpq_numref(a->number), mpq_numref(b->number));
    a->approximate |= b->approximate;
    return operation_end(s, a);
}

static int value_lcm(struct scan *s, struct value *a, struct value *b) {
    if (integer_check(s, a) != OK || integer_check(s, b) != OK) return s->err->code;
    mpz_lcm(mpq_numref(a->number), mpq_numref(a->number), mpq_numref(b->number));
    a->approximate |= b->approximate;
    return operation_end(s, a);
}

/* one: for a call with one argument; NULL: the argument is the result. two: for each further
 * argument; the first value is the result so far. */
struct function {
    const char *name;
    int max_arguments;
    int (*one)(struct scan *s, struct value *v);
    int (*two)(struct scan *s, struct value *v, struct value *argument);
};
static const struct function functions[] = {
    {"abs", 1, value_abs, NULL},
    {"floor", 1, value_floor, NULL},
    {"ceil", 1, value_ceil, NULL},
    {"round", 2, value_round, value_round_digits},
    {"sqrt", 1, value_sqrt, NULL},
    {"min", MAX_BYTES, NULL, value_min},
    {"max", MAX_BYTES, NULL, value_max},
    {"gcd", MAX_BYTES, value_divisor, value_gcd},
    {"lcm", MAX_BYTES, value_divisor, value_lcm},
};

static const struct {
    const char *name, *digits; /* 160 decimals */
} constants[] = {
    {"pi", "31415926535897932384626433832795028841971693993751058209749445923078164062862089986280"
           "348253421170679821480865132823066470938446095505822317253594081284811174502"},
    {"e", "27182818284590452353602874713526624977572470936999595749669676277240766303535475945713"
          "821785251664274274663919320030599218174135966290435729003342952605956307381"},
};

/* scanning */

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Skips spaces and returns the rest of the text. */
static const char *rest(struct scan *s) {
    while (s->text[s->p] == ' ') s->p++;
    return s->text + s->p;
}

static int position(const struct scan *s) {
    return s->at[s->p];
}

/* The number of letters at the position. */
static size_t word_length(struct scan *s) {
    const char *p = rest(s);
    size_t n = 0;
    while (is_letter(p[n])) n++;
    return n;
}

static bool word_is(struct scan *s, const char *word) {
    return word_length(s) == strlen(word) && memcmp(rest(s), word, strlen(word)) == 0;
}

static bool char_take(struct scan *s, char c) {
    if (*rest(s) != c) return false;
    s->p++;
    return true;
}

/* Takes "^" or "**". */
static bool power_take(struct scan *s) {
    const char *p = rest(s);
    size_t n = p[0] == '^' ? 1 : p[0] == '*' && p[1] == '*' ? 2 : 0;
    s->p += n;
    return n > 0;
}

static const struct function *function_at(struct scan *s) {
    for (size_t i = 0; i < ARRAY_LEN(functions); i++)
        if (word_is(s, functions[i].name)) return &functions[i];
    return NULL;
}

static const char *constant_at(struct scan *s) {
    for (size_t i = 0; i < ARRAY_LEN(constants); i++)
        if (word_is(s, constants[i].name)) return constants[i].digits;
    return NULL;
}

/* "min(" is the function, any other "min" the unit. */
static const struct unit *unit_at(struct scan *s) {
    size_t n = word_length(s);
    if (function_at(s)) {
        struct scan after = *s;
        after.p += n;
        if (*rest(&after) == '(') return NULL;
    }
    return unit_find(rest(s), n);
}

static bool word_is_known(struct scan *s) {
    return function_at(s) || constant_at(s) || unit_at(s) || word_is(s, "mod") || word_is(s, "to");
}

/* The error for text that the grammar does not allow here. operand: a number is missing. */
static int unexpected(struct scan *s, bool operand) {
    const char *p = rest(s);
    size_t word = word_length(s);
    int at = position(s), n = word ? (int)MIN(word, MAX_WORD) : 1;
    if (!*p) return error_set(s->err, ERR_USAGE, "a number is missing at the end");
    if (word && !word_is_known(s))
        return error_set(s->err, ERR_USAGE, "unknown word '%.*s' at %d", n, p, at);
    if (!word && !is_digit(*p) && !strchr("+-*/^()!%,.", *p)) {
        n = u8_mblen((const uint8_t *)p, strlen(p));
        return error_set(s->err, ERR_USAGE, "unknown character '%.*s' at %d", n, p, at);
    }
    if (operand)
        return error_set(s->err, ERR_USAGE, "a number is missing before '%.*s' at %d", n, p, at);
    if (*p == ')') return error_set(s->err, ERR_USAGE, "')' at %d has no '('", at);
    if (*p == ',')
        return error_set(s->err, ERR_USAGE, "',' at %d separates neither thousands nor arguments",
                         at);
    if (word || is_digit(*p) || *p == '(' || *p == '.')
        return error_set(s->err, ERR_USAGE, "an operator is missing before '%.*s' at %d", n, p, at);
    return error_set(s->err, ERR_USAGE, "unexpected '%c' at %d", *p, at);
}

static int depth_enter(struct scan *s) {
    if (++s->depth > MAX_DEPTH)
        return error_set(s->err, ERR_USAGE, "nested more than %d deep at %d", MAX_DEPTH,
                         position(s));
    return OK;
}

/* units in the text */

/* Reads NAME [^ INTEGER]; *u is NULL if no unit is at the position. */
static int unit_term_read(struct scan *s, const struct unit **u, int *exponent) {
    *u = unit_at(s);
    *exponent = 1;
    if (!*u) return OK;
    s->p += word_length(s);
    if (!power_take(s)) return OK;
    int sign = char_take(s, '-') ? -1 : 1, digits = 0;
    for (*exponent = 0, rest(s); is_digit(s->text[s->p]) && digits < 3; s->p++, digits++)
        *exponent = 10 * *exponent + s->text[s->p] - '0';
    *exponent *= sign;
    if (!digits || is_digit(s->text[s->p]) || s->text[s->p] == '.')
        return error_set(s->err, ERR_USAGE, "the power of a unit at %d is not a small integer",
                         position(s));
    return OK;
}

/* Takes * or / if a unit follows. Returns the sign of the unit's exponent; 0: none is taken. */
static int unit_operator_take(struct scan *s) {
    struct scan before = *s;
    int sign = char_take(s, '*') ? 1 : char_take(s, '/') ? -1 : 0;
    if (sign && unit_at(s)) return sign;
    *s = before;
    return 0;
}

static int unit_multiply(struct scan *s, struct value *v, const struct unit *u, int exponent) {
    struct value one, n;
    int rc;
    if (u->dimension == TEMPERATURE)
        return error_set(s->err, ERR_USAGE, "the temperature '%s' is part of a compound unit",
                         u->names);
    value_init(&one, 1);
    value_init(&n, 1);
    number_set(one.number, u->factor);
    mpq_set_si(n.number, exponent, 1);
    dimension_set(&one, (int)u->dimension, u->power, u, NULL);
    rc = value_power(s, &one, &n);
    if (rc == OK) rc = value_multiply(s, v, &one);
    value_release(&one);
    value_release(&n);
    return rc;
}

/* Multiplies a value by the unit at the position. A temperature becomes its unit only if no
 * operator with another unit follows. *mixed: two units of one dimension occur. */
static int unit_read(struct scan *s, struct value *v, bool *mixed) {
    const struct unit *u, *seen[N_DIMENSIONS + 1] = {0};
    int exponent, sign = 1, rc;
    *mixed = false;
    do {
        rc = unit_term_read(s, &u, &exponent);
        if (rc != OK) return rc;
        if (u->dimension == TEMPERATURE && exponent == 1 && !has_dimension(v) &&
            !unit_operator_take(s)) {
            v->temperature = u;
            return OK;
        }
        rc = unit_multiply(s, v, u, sign * exponent);
        if (rc != OK) return rc;
        *mixed |= seen[u->dimension] && seen[u->dimension] != u;
        seen[u->dimension] = u;
    } while ((sign = unit_operator_take(s)));
    return OK;
}

/* Whether the word at the position, "in" or "to", converts: a unit and no more follows. In "5 in"
 * and "5 in in cm" the first "in" is a unit. */
static bool conversion_follows(const struct scan *s) {
    struct scan ahead = *s;
    struct error ignored;
    const struct unit *u;
    int exponent;
    ahead.err = &ignored;
    ahead.p += 2;
    do {
        if (unit_term_read(&ahead, &u, &exponent) != OK || !u) return false;
    } while (unit_operator_take(&ahead));
    char end = *rest(&ahead);
    return !end || end == ')' || end == ',';
}

/* x is a temperature in the unit `from`; afterwards in the unit `to`. */
static int temperature_convert(struct scan *s, struct value *v, const struct unit *to) {
    mpq_t t;
    mpq_init(t);
    number_set(t, v->temperature->offset);
    mpq_add(v->number, v->number, t);
    bool possible = mpq_sgn(v->number) >= 0;
    number_set(t, v->temperature->factor);
    mpq_mul(v->number, v->number, t);
    number_set(t, to->factor);
    mpq_div(v->number, v->number, t);
    number_set(t, to->offset);
    mpq_sub(v->number, v->number, t);
    mpq_clear(t);
    v->temperature = to;
    if (!possible) return error_set(s->err, ERR_USAGE, "a temperature below absolute zero");
    return operation_end(s, v);
}

static int value_convert(struct scan *s, struct value *v, const struct value *target) {
    if (v->temperature && target->temperature)
        return temperature_convert(s, v, target->temperature);
    if (!v->temperature && !target->temperature &&
        memcmp(v->exponents, target->exponents, sizeof v->exponents) == 0) {
        memcpy(v->units, target->units, sizeof v->units);
        return OK;
    }
    struct buf from = {0}, to = {0};
    error_set(s->err, ERR_USAGE, "cannot convert %s to %s", unit_words(v, &from),
              unit_words(target, &to));
    buf_release(&from);
    buf_release(&to);
    return s->err->code;
}

/* Reads [("in" | "to") unit]. */
static int conversion_read(struct scan *s, struct value *v) {
    int at, rc;
    bool mixed;
    struct value target;
    if (!word_is(s, "in") && !word_is(s, "to")) return OK;
    at = position(s);
    s->p += 2;
    if (word_length(s) && !word_is_known(s)) return unexpected(s, false);
    if (!unit_at(s))
        return error_set(s->err, ERR_USAGE, "a unit is missing after the word at %d", at);
    value_init(&target, 1);
    rc = unit_read(s, &target, &mixed);
    if (rc == OK && mixed)
        rc = error_set(s->err, ERR_USAGE, "two units of one dimension in the unit after %d", at);
    if (rc == OK) rc = value_convert(s, v, &target);
    value_release(&target);
    return rc;
}

/* expressions */

static bool thousands_follow(const struct scan *s) {
    const char *p = s->text + s->p;
    return !s->in_arguments && p[0] == ',' && is_digit(p[1]) && is_digit(p[2]) && is_digit(p[3]) &&
           !is_digit(p[4]);
}

static size_t digits_read(struct scan *s, char *digits, size_t n) {
    for (; is_digit(s->text[s->p]); s->p++) digits[n++] = s->text[s->p];
    return n;
}

/* Reads [e [+-] DIGITS] after a number; *scale is beyond MAX_SCALE if it is too large. */
static void scale_read(struct scan *s, long *scale) {
    const char *p = s->text + s->p;
    bool sign = p[0] && (p[1] == '-' || p[1] == '+');
    *scale = 0;
    if ((*p != 'e' && *p != 'E') || !is_digit(p[1 + sign])) return;
    for (s->p += 1 + sign; is_digit(s->text[s->p]); s->p++)
        if (*scale <= MAX_SCALE) *scale = *scale * 10 + s->text[s->p] - '0';
    if (p[1] == '-') *scale = -*scale;
}

static int number_read(struct scan *s, struct value *v) {
    char digits[MAX_BYTES + 1];
    size_t n = digits_read(s, digits, 0), decimals = 0;
    int at = position(s);
    long scale;
    if (n >= 1 && n <= 3 && digits[0] != '0') {
        while (thousands_follow(s)) {
            s->p++;
            n = digits_read(s, digits, n);
        }
    }
    if (s->text[s->p] == '.') {
        s->p++;
        decimals = digits_read(s, digits, n) - n;
    }
    digits[n + decimals] = 0;
    scale_read(s, &scale);
    if (labs(scale) > MAX_SCALE)
        return error_set(s->err, ERR_USAGE, "the exponent of the number before %d is above %d", at,
                         MAX_SCALE);
    number_set(v->number, digits);
    number_scale(v->number, scale - (long)decimals);
    return size_check(s, v);
}

static int all_read(struct scan *s, struct value *v);

/* After the text in parentheses that began at `at`. */
static int parenthesis_end(struct scan *s, int at) {
    if (char_take(s, ')')) return OK;
    if (!*rest(s)) return error_set(s->err, ERR_USAGE, "'(' at %d has no ')'", at);
    return unexpected(s, false);
}

static int parentheses_read(struct scan *s, struct value *v) {
    bool outer = s->in_arguments;
    int at = position(s), rc = depth_enter(s);
    s->p++;
    s->in_arguments = false;
    if (rc == OK) rc = all_read(s, v);
    if (rc == OK) rc = parenthesis_end(s, at);
    s->in_arguments = outer;
    s->depth--;
    return rc;
}

/* Reads {"," all}, and applies the function to all arguments. */
static int arguments_read(struct scan *s, const struct function *f, struct value *v) {
    int rc = OK, n = 1;
    while (rc == OK && char_take(s, ',')) {
        struct value argument;
        if (++n > f->max_arguments)
            return error_set(s->err, ERR_USAGE, "%s takes at most %d argument%s", f->name,
                             f->max_arguments, f->max_arguments == 1 ? "" : "s");
        value_init(&argument, 0);
        rc = all_read(s, &argument);
        if (rc == OK) rc = temperature_refuse(s, &argument);
        if (rc == OK) rc = f->two(s, v, &argument);
        value_release(&argument);
    }
    return rc == OK && n == 1 && f->one ? f->one(s, v) : rc;
}

static int function_read(struct scan *s, const struct function *f, struct value *v) {
    bool outer = s->in_arguments;
    int at, rc;
    s->p += strlen(f->name);
    at = (rest(s), position(s));
    if (!char_take(s, '('))
        return error_set(s->err, ERR_USAGE, "'(' is missing after '%s'", f->name);
    rc = depth_enter(s);
    s->in_arguments = true;
    if (rc == OK) rc = all_read(s, v);
    if (rc == OK) rc = temperature_refuse(s, v);
    if (rc == OK) rc = arguments_read(s, f, v);
    if (rc == OK) rc = parenthesis_end(s, at);
    s->in_arguments = outer;
    s->depth--;
    return rc;
}

static int primary_read(struct scan *s, struct value *v) {
    const char *p = rest(s), *digits = constant_at(s);
    const struct function *f = function_at(s);
    if (*p == '(') return parentheses_read(s, v);
    if (is_digit(*p) || (*p == '.' && is_digit(p[1]))) return number_read(s, v);
    if (f) return function_read(s, f, v);
    if (!digits) return unexpected(s, true);
    s->p += word_length(s);
    number_set(v->number, digits);
    number_scale(v->number, 1 - (long)strlen(digits));
    v->approximate = true;
    return OK;
}

/* Reads {"!" | "%"}. "5!!" usually means the double factorial, and "7 % 5" a
 * remainder; both are refused. */
static int postfix_read(struct scan *s, struct value *v) {
    int rc = primary_read(s, v);
    while (rc == OK) {
        int at = (rest(s), position(s));
        if (char_take(s, '!')) {
            if (*rest(s) == '!')
                return error_set(s->err, ERR_USAGE, "'!!' at %d; write parentheses: (n!)!", at);
            rc = value_factorial(s, v);
        } else if (char_take(s, '%')) {
            if (is_digit(*rest(s)) || *rest(s) == '(' || *rest(s) == '.')
                return error_set(s->err, ERR_USAGE, "'%%' at %d is percent; the remainder is 'mod'",
                                 at);
            rc = value_percent(s, v);
        } else {
            break;
        }
    }
    return rc;
}

/* Takes {"+" | "-"}; each sign is an operation. */
static int signs_take(struct scan *s, bool *negative) {
    *negative = false;
    while (*rest(s) == '+' || *rest(s) == '-') {
        if (operation_count(s) != OK) return s->err->code;
        *negative ^= s->text[s->p++] == '-';
    }
    return OK;
}

static int power_read(struct scan *s, struct value *v) {
    bool negative;
    struct value exponent;
    int rc = postfix_read(s, v);
    if (rc != OK || !power_take(s)) return rc;
    value_init(&exponent, 0);
    rc = depth_enter(s);
    if (rc == OK) rc = signs_take(s, &negative);
    if (rc == OK) rc = power_read(s, &exponent);
    if (rc == OK && negative) mpq_neg(exponent.number, exponent.number);
    if (rc == OK) rc = value_power(s, v, &exponent);
    s->depth--;
    value_release(&exponent);
    return rc;
}

/* A unit alone is one of it: "60 km / h". */
static int quantity_read(struct scan *s, struct value *v) {
    bool mixed, alone = unit_at(s);
    int rc = OK;
    if (alone)
        mpq_set_ui(v->number, 1, 1);
    else
        rc = power_read(s, v);
    s->number_with_unit = false;
    if (rc != OK || !is_plain(v) || !unit_at(s)) return rc;
    if (word_is(s, "in") && conversion_follows(s)) return OK;
    s->number_with_unit = !alone;
    return unit_read(s, v, &mixed);
}

static int signed_read(struct scan *s, struct value *v) {
    bool negative;
    int rc = signs_take(s, &negative);
    if (rc == OK) rc = quantity_read(s, v);
    if (rc == OK && negative) mpq_neg(v->number, v->number);
    return rc;
}

typedef int (*operation)(struct scan *s, struct value *a, const struct value *b);

static operation operator_take(struct scan *s, bool products) {
    char c = *rest(s);
    if (products && word_is(s, "mod")) {
        s->p += 3;
        return value_modulo;
    }
    if (!c || !strchr(products ? "*/" : "+-", c)) return NULL;
    s->p++;
    return c == '+'   ? value_add
           : c == '-' ? value_subtract
           : c == '*' ? value_multiply
                      : value_divide;
}

/* "1/3 km" may be a third of a kilometre or 1/(3 km). */
static int ambiguity_refuse(struct scan *s, operation apply, const struct value *left, int at) {
    if (apply != value_divide || !is_plain(left) || !s->number_with_unit) return OK;
    return error_set(s->err, ERR_USAGE,
                     "'/' at %d divides by a number with a unit; write (a/b) UNIT or a/(b UNIT)",
                     at);
}

static int operations_read(struct scan *s, struct value *v, bool products) {
    operation apply;
    int rc = products ? signed_read(s, v) : operations_read(s, v, true);
    while (rc == OK) {
        int at = (rest(s), position(s));
        struct value right;
        if (!(apply = operator_take(s, products))) break;
        value_init(&right, 0);
        rc = products ? signed_read(s, &right) : operations_read(s, &right, true);
        if (rc == OK) rc = ambiguity_refuse(s, apply, v, at);
        if (rc == OK) rc = apply(s, v, &right);
        value_release(&right);
    }
    return rc;
}

static int all_read(struct scan *s, struct value *v) {
    int rc = operations_read(s, v, false);
    return rc == OK ? conversion_read(s, v) : rc;
}

/* folding */

static const struct {
    const char *from, *to;
} signs[] = {
    {"×", "*"},      {"✕", "*"},      {"⋅", "*"},    {"·", "*"},      {"・", "*"},
    {"∙", "*"},      {"÷", "/"},      {"∕", "/"},    {"⁄", "/"},      {"−", "-"},
    {"–", "-"},      {"π", "pi"},     {"、", ","},   {"°C", "C"},     {"°F", "F"},
    {"℃", "C"},      {"℉", "F"},      {"㎜", "mm"},  {"㎝", "cm"},    {"㎞", "km"},
    {"㎏", "kg"},    {"㎎", "mg"},    {"㎖", "ml"},  {"㎠", "cm^2"},  {"㎡", "m^2"},
    {"㎢", "km^2"},  {"㎤", "cm^3"},  {"㎥", "m^3"}, {"\u3000", " "}, {"\u00a0", " "},
    {"\u2009", " "}, {"\u202f", " "},
};

static const char *const superscripts[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹", "⁻"};

/* Appends the fold of the characters at `p`, and returns how many bytes they have. */
static size_t char_fold(const char *p, bool *superscript, struct buf *out) {
    bool continued = *superscript;
    ucs4_t c = 0;
    *superscript = false;
    for (size_t i = 0; i < ARRAY_LEN(superscripts); i++) {
        size_t n = strlen(superscripts[i]);
        if (strncmp(p, superscripts[i], n) != 0) continue;
        if (!continued) buf_puts(out, "^");
        buf_add(out, &"0123456789-"[i], 1);
        *superscript = true;
        return n;
    }
    for (size_t i = 0; i < ARRAY_LEN(signs); i++) {
        size_t n = strlen(signs[i].from);
        if (strncmp(p, signs[i].from, n) != 0) continue;
        buf_puts(out, signs[i].to);
        return n;
    }
    int n = u8_mbtouc(&c, (const uint8_t *)p, strlen(p));
    char ascii = (char)(c - 0xFEE0);
    bool wide = c >= 0xFF01 && c <= 0xFF5E;
    buf_add(out, wide ? &ascii : p, wide ? 1 : (size_t)n);
    return (size_t)n;
}

/* Refuses a text that is not an expression at first sight. */
static int text_check(const char *text, struct error *err) {
    size_t n = strnlen(text, MAX_BYTES + 1);
    if (n > MAX_BYTES)
        return error_set(err, ERR_USAGE, "the expression is longer than %d bytes", MAX_BYTES);
    if (u8_check((const uint8_t *)text, n))
        return error_set(err, ERR_USAGE, "the expression is not valid UTF-8");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i], next = (unsigned char)text[i + 1];
        if (c < 0x20 || c == 0x7F || (c == 0xC2 && next < 0xA0))
            return error_set(err, ERR_USAGE, "a control character in the expression");
    }
    return OK;
}

/* Folds a checked text. at: [MAX_FOLDED]; the number of the character of each folded byte. */
enum { MAX_FOLDED = 2 * MAX_BYTES + 1 };
static void text_fold(const char *text, struct buf *out, uint16_t *at) {
    bool superscript = false;
    uint16_t number = 1;
    buf_puts(out, "");
    for (size_t n; *text; text += n) {
        size_t before = out->len;
        n = char_fold(text, &superscript, out);
        CHECK(out->len < MAX_FOLDED);
        for (size_t i = before; i < out->len; i++) at[i] = number;
        for (size_t i = 0; i < n; i++) number += ((unsigned char)text[i] & 0xC0) != 0x80;
    }
    at[out->len] = number;
}

/* results */

/* |z| as decimal digits, malloc'ed. */
static char *digits_of(const mpz_t z) {
    char *digits = xmalloc(mpz_sizeinbase(z, 10) + 2);
    mpz_get_str(digits, 10, z);
    if (*digits == '-') memmove(digits, digits + 1, strlen(digits));
    return digits;
}

static void integer_append(const mpz_t z, struct buf *out) {
    char *digits = digits_of(z);
    if (mpz_sgn(z) < 0) buf_puts(out, "-");
    buf_puts(out, digits);
    free(digits);
}

/* Appends DIGITS / 10^decimals without zeros at the end. */
static void decimal_append(const char *digits, int decimals, struct buf *out) {
    int n = (int)strlen(digits), integer = n - decimals;
    while (n > MAX(integer, 0) && digits[n - 1] == '0') n--;
    if (integer <= 0) buf_puts(out, "0");
    if (integer > 0) buf_add(out, digits, (size_t)integer);
    if (n <= integer || n == 0) return;
    buf_puts(out, ".");
    for (int i = integer; i < 0; i++) buf_puts(out, "0");
    buf_add(out, digits + MAX(integer, 0), (size_t)(n - MAX(integer, 0)));
}

/* The first n significant digits of x > 0, rounded, malloc'ed; x is about D.DDD * 10^*exponent. */
static char *significant_digits(mpq_srcptr x, int n, int *exponent) {
    mpq_t scaled;
    char *digits = NULL;
    int length = n;
    *exponent = (int)mpz_sizeinbase(mpq_numref(x), 10) - (int)mpz_sizeinbase(mpq_denref(x), 10);
    mpq_init(scaled);
    do {
        *exponent += length - n;
        free(digits);
        mpq_set(scaled, x);
        number_scale(scaled, n - 1 - *exponent);
        number_round(scaled);
        digits = digits_of(mpq_numref(scaled));
        length = mpq_sgn(scaled) ? (int)strlen(digits) : 0;
    } while (length != n);
    mpq_clear(scaled);
    return digits;
}

/* Appends x, rounded to n significant digits; very large and small numbers as 1.5e-20. */
static void approximation_append(mpq_srcptr x, int n, struct buf *out) {
    int exponent;
    mpq_t positive;
    if (mpq_sgn(x) == 0) {
        buf_puts(out, "0");
        return;
    }
    mpq_init(positive);
    mpq_abs(positive, x);
    char *digits = significant_digits(positive, n, &exponent);
    if (mpq_sgn(x) < 0) buf_puts(out, "-");
    if (exponent >= n || exponent < -7) {
        decimal_append(digits, n - 1, out);
        buf_printf(out, "e%d", exponent);
    } else {
        decimal_append(digits, n - 1 - exponent, out);
    }
    free(digits);
    mpq_clear(positive);
}

/* Appends x if it has at most EXACT_DECIMALS decimals. */
static bool exact_append(mpq_srcptr x, struct buf *out) {
    mpq_t scaled;
    mpq_init(scaled);
    mpq_set(scaled, x);
    number_scale(scaled, EXACT_DECIMALS);
    bool exact = is_integer(scaled);
    if (exact) {
        char *digits = digits_of(mpq_numref(scaled));
        if (mpq_sgn(x) < 0) buf_puts(out, "-");
        decimal_append(digits, EXACT_DECIMALS, out);
        free(digits);
    }
    mpq_clear(scaled);
    return exact;
}

static void fraction_append(mpq_srcptr x, struct buf *out) {
    integer_append(mpq_numref(x), out);
    buf_puts(out, "/");
    integer_append(mpq_denref(x), out);
    buf_puts(out, " ≈ ");
    approximation_append(x, FRACTION_DIGITS, out);
}

static void value_append(const struct value *v, struct buf *out) {
    mpq_t x;
    mpq_init(x);
    unit_factor(v, x);
    mpq_div(x, v->number, x);
    if (v->approximate) {
        number_scale(x, APPROXIMATE_DECIMALS);
        number_round(x);
        number_scale(x, -APPROXIMATE_DECIMALS);
        buf_puts(out, "≈ ");
        approximation_append(x, APPROXIMATE_DIGITS, out);
    } else if (is_integer(x)) {
        integer_append(mpq_numref(x), out);
    } else if (!exact_append(x, out)) {
        fraction_append(x, out);
    }
    if (!is_plain(v)) buf_puts(out, " ");
    unit_append(v, out);
    mpq_clear(x);
}

int agent_calculate(const char *expression, struct buf *out, struct error *err) {
    uint16_t at[MAX_FOLDED];
    struct buf text = {0};
    struct value v;
    int rc = text_check(expression, err);
    if (rc != OK) return rc;
    text_fold(expression, &text, at);
    struct scan s = {.text = text.data, .at = at, .err = err};
    value_init(&v, 0);
    if (!*rest(&s))
        rc = error_set(err, ERR_USAGE, "the expression is empty");
    else
        rc = all_read(&s, &v);
    if (rc == OK && *rest(&s)) rc = unexpected(&s, false);
    if (rc == OK) value_append(&v, out);
    value_release(&v);
    buf_release(&text);
    return rc;
}
