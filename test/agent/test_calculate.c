/*
 * test_calculate: expressions with their exact results, errors with their messages, random
 * expressions against GMP, and random bytes with a bound of the work.
 *
 * The work is counted as allocations of GMP, which do not depend on the machine's speed.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"

#include <gmp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

#include <cmocka.h>

static const struct {
    const char *expression, *result;
} results[] = {
    {"1+2", "3"},
    {"2^10", "1024"},
    {"2**10", "1024"},
    {"-2^2", "-4"},
    {"2^-2", "0.25"},
    {"2^3^2", "512"},
    {"(1/3)^3", "1/27 ≈ 0.037037037037037"},
    {"1/3", "1/3 ≈ 0.333333333333333"},
    {"2/3", "2/3 ≈ 0.666666666666667"},
    {"-1/3", "-1/3 ≈ -0.333333333333333"},
    {"1/8", "0.125"},
    {"1e-30", "0.000000000000000000000000000001"},
    {"1e-31", "1/10000000000000000000000000000000 ≈ 1e-31"},
    {"1/2^40", "1/1099511627776 ≈ 9.09494701772928e-13"},
    {"1,234,567 + 1", "1234568"},
    {"１２＋３", "15"},
    {"（１２＋３）×２", "30"},
    {"１，２３４，５６７÷２", "617283.5"},
    {"50%", "0.5"},
    {"200 * 15%", "30"},
    {"17 mod 5", "2"},
    {"-7 mod 3", "2"},
    {"7.5 mod 2", "1.5"},
    {"10!", "3628800"},
    {"0!", "1"},
    {"abs(-3)", "3"},
    {"min(3,1,2)", "1"},
    {"max(100,200)", "200"},
    {"round(2.5)", "3"},
    {"round(-2.5)", "-3"},
    {"round(3.14159, 2)", "3.14"},
    {"round(1234, -2)", "1200"},
    {"floor(-1.5)", "-2"},
    {"ceil(-1.5)", "-1"},
    {"sqrt(16)", "4"},
    {"sqrt(2)", "≈ 1.41421356237309504880168872421"},
    {"sqrt(9/4)", "1.5"},
    {"sqrt(2)^2", "≈ 2"},
    {"sqrt(2)^2-2", "≈ 0"},
    {"gcd(12,18)", "6"},
    {"lcm(4,6,10)", "60"},
    {"pi", "≈ 3.14159265358979323846264338328"},
    {"e", "≈ 2.71828182845904523536028747135"},
    {"2*pi", "≈ 6.28318530717958647692528676656"},
    {"pi^50", "≈ 7202671944715803306364652.67235"},
    {"pi^-50", "≈ 1.3883736586582205089337963149e-25"},
    {"5 km in mi", "78125/25146 ≈ 3.10685596118667 mi"},
    {"5 km to m", "5000 m"},
    {"2 h + 30 min", "2.5 h"},
    {"60 km/h * 90 min in km", "90 km"},
    {"60 km/h * 90 min", "90 km"},
    {"100 km / 50 km/h", "2 h"},
    {"5 km * 3 m", "0.015 km^2"},
    {"2 m * 3 l", "0.006 m^4"},
    {"1 m^3 in l", "1000 l"},
    {"5 m² in cm²", "50000 cm^2"},
    {"3 m³", "3 m^3"},
    {"㎡", "1 m^2"},
    {"5㎞", "5 km"},
    {"25 C in F", "77 F"},
    {"25°C to K", "298.15 K"},
    {"-40 F in C", "-40 C"},
    {"-5 C", "-5 C"},
    {"98.6 ℉ in ℃", "37 C"},
    {"5 in in cm", "12.7 cm"},
    {"5 in", "5 in"},
    {"12 in to ft", "1 ft"},
    {"6 km / 2 in m", "3000 m"},
    {"10 km * 3 in m", "30000 m"},
    {"1 GiB in MB", "1073.741824 MB"},
    {"10 MB / 2 s", "5 MB/s"},
    {"100 km/h in m/s", "250/9 ≈ 27.7777777777778 m/s"},
    {"5 km/m", "5000"},
    {"6 in^2", "6 in^2"},
    {"1/(2 s)", "0.5 s^-1"},
    {"3 kg * 2 m / 1 s^2", "6 kg*m/s^2"},
    {"sqrt(16 km^2)", "4 km"},
    {"round(5.4321 km, 1)", "5.4 km"},
    {"min(5 km, 300 m)", "300 m"},
    {"90 min + 1 h", "150 min"},
    {"5 km - 300 m", "4.7 km"},
    {"10^3 m", "1000 m"},
    {"1 week in day", "7 day"},
    {"1 lb in g", "453.59237 g"},
    {"16 oz in lb", "1 lb"},
    {"0^0", "1"},
    {"1^99999999999999999999999", "1"},
    {"(-1)^99999999999999999999999", "-1"},
    {"2^19999 - 2^19999", "0"},
    {"1000!/999!", "1000"},
    {"(3!)!", "720"},
    {"1.5e3", "1500"},
    {"1.5E-3km", "0.0015 km"},
    {".5", "0.5"},
    {"5.", "5"},
    {"min", "1 min"},
    {"km", "1 km"},
    {"km/h", "1 km/h"},
    {"2 l / 1 cm", "2000 cm^2"},
    {"(2 h in min) + 1 min", "121 min"},
    {"1 − 2 · 3", "-5"},
    {"10 ^ - 3", "0.001"},
    {"2⁻³", "0.125"},
    {"5²³", "11920928955078125"},
    {"1/3+1/6", "0.5"},
    {"2!^3", "8"},
    {"-3!", "-6"},
    {"sqrt(1e400+1)", "≈ 1e200"},
    {"1e-100*pi", "≈ 0"},
    {"0.1+0.2", "0.3"},
    {" 7 ", "7"},
    {"1 + 2 * 3 - 4 / 5", "6.2"},
    {"--3", "3"},
    {"-(-3)", "3"},
    {"+5", "5"},
    {"2 * -3", "-6"},
    {"(((1)))", "1"},
    {"12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"},
    {"0.000001 * 3", "0.000003"},
    {"1e3 mod 7", "6"},
    {"-1e-3", "-0.001"},
    {"1/7", "1/7 ≈ 0.142857142857143"},
    {"22/7 - 3", "1/7 ≈ 0.142857142857143"},
    {"2^64", "18446744073709551616"},
    {"3^-3", "1/27 ≈ 0.037037037037037"},
    {"(-2)^3", "-8"},
    {"(2/3)^-2", "2.25"},
    {"50% + 50%", "1"},
    {"(1+1)%", "0.02"},
    {"20!", "2432902008176640000"},
    {"(2+1)!", "6"},
    {"max(1, 2/3, 0.9)", "1"},
    {"min(1)", "1"},
    {"min((1,234), 5)", "5"},
    {"abs(2 - 5) * 2", "6"},
    {"floor(7/2)", "3"},
    {"ceil(7/2)", "4"},
    {"floor(-7/2)", "-4"},
    {"round(0.5)", "1"},
    {"round(1.005, 2)", "1.01"},
    {"round(-1234.5678, 3)", "-1234.568"},
    {"round(2/3, 4)", "0.6667"},
    {"sqrt(0)", "0"},
    {"sqrt(2.25)", "1.5"},
    {"sqrt(1e100)", "100000000000000000000000000000000000000000000000000"},
    {"sqrt(0.0001)", "0.01"},
    {"gcd(-12, 18)", "6"},
    {"gcd(7)", "7"},
    {"lcm(0, 5)", "0"},
    {"gcd(10!, 2^20)", "256"},
    {"７８９－１２３", "666"},
    {"６÷４", "1.5"},
    {"２＾１０", "1024"},
    {"ｍａｘ（１，２）", "2"},
    {"３＊（４＋５）／２", "13.5"},
    {"１００％", "1"},
    {"１．５＋０．５", "2"},
    {"1　+　2", "3"},
    {"5！", "120"},
    {"３²", "9"},
    {"1 ft in in", "12 in"},
    {"1 yd in ft", "3 ft"},
    {"1 mi in km", "1.609344 km"},
    {"100 cm in m", "1 m"},
    {"1 t in kg", "1000 kg"},
    {"1 l in ml", "1000 ml"},
    {"500 ml * 4", "2000 ml"},
    {"500 ml * 4 in l", "2 l"},
    {"1 day in h", "24 h"},
    {"1 h in s", "3600 s"},
    {"2 weeks in days", "14 day"},
    {"1 TiB in GiB", "1024 GiB"},
    {"1 kB in B", "1000 B"},
    {"60 mi/h in km/h", "96.56064 km/h"},
    {"10 m/s * 5 s", "50 m"},
    {"9.8 m/s^2 * 2 s", "19.6 m/s"},
    {"(5 m)^2", "25 m^2"},
    {"(5 m)^0", "1"},
    {"5 m^2 + 1 cm^2", "5.0001 m^2"},
    {"1 m^3 + 1 l", "1.001 m^3"},
    {"0 C in F", "32 F"},
    {"0 K in C", "-273.15 C"},
    {"100 C in F", "212 F"},
    {"20 ℃ to ℉", "68 F"},
    {"5 m * 2", "10 m"},
    {"2 * 5 m", "10 m"},
    {"10 m / 4", "2.5 m"},
    {"10 m / 4 m", "2.5"},
    {"10 m mod 3 m", "1 m"},
    {"7 km mod 2000 m", "1 km"},
    {"1 GB / (10 MB/s) in min", "5/3 ≈ 1.66666666666667 min"},
    {"floor(2.7 h)", "2 h"},
    {"max(1 h, 59 min)", "1 h"},
    {"abs(-3 kg)", "3 kg"},
    {"(1/3) km", "1/3 ≈ 0.333333333333333 km"},
    {"1/(3 km)", "1/3 ≈ 0.333333333333333 km^-1"},
    {"1/s", "1 s^-1"},
    {"5 km/h/s", "18000 km/h^2"},
    {"-5 km in m", "-5000 m"},
    {"３ｋｍ＋５００ｍ", "3.5 km"},
    {"25℃", "25 C"},
    {"1 mm² in cm²", "0.01 cm^2"},
    {"5 ㎏ in g", "5000 g"},
    {"(1 km in m) * 3", "3000 m"},
    {"pi * (2 m)^2", "≈ 12.5663706143591729538505735331 m^2"},
    {"e^2", "≈ 7.38905609893065022723042746058"},
    {"pi - pi", "≈ 0"},
    {"round(pi, 4)", "≈ 3.1416"},
    {"sqrt(3) m", "≈ 1.73205080756887729352744634151 m"},
    {"1e5999 / 1e5998", "10"},
    {"10^6020 / 10^6019", "10"},
};

static const struct {
    const char *expression, *message;
} errors[] = {
    {"1/3 km", "'/' at 2 divides by a number with a unit; write (a/b) UNIT or a/(b UNIT)"},
    {"2 + 3 km", "cannot add a number without a unit and km"},
    {"5 kg + 3 km", "cannot add kg and km"},
    {"5 kg - 3 km", "cannot subtract km from kg"},
    {"(1 + 2", "'(' at 1 has no ')'"},
    {"1 + 2)", "')' at 6 has no '('"},
    {"foo + 1", "unknown word 'foo' at 1"},
    {"1 + foo", "unknown word 'foo' at 5"},
    {"5 foo", "unknown word 'foo' at 3"},
    {"5 3", "an operator is missing before '3' at 3"},
    {"1/0", "division by zero"},
    {"0^-1", "division by zero"},
    {"2^20000", "a number has more than 20000 bits"},
    {"2^99999999999999", "an exponent is above 20000"},
    {"9^9^9", "an exponent is above 20000"},
    {"1001!", "a factorial of a number above 1000"},
    {"5!!", "'!!' at 2; write parentheses: (n!)!"},
    {"7 % 3", "'%' at 3 is percent; the remainder is 'mod'"},
    {"1 +", "a number is missing at the end"},
    {"1=1", "unknown character '=' at 2"},
    {"足す", "unknown character '足' at 1"},
    {"1,23", "',' at 2 separates neither thousands nor arguments"},
    {"1234,567", "',' at 5 separates neither thousands nor arguments"},
    {"abs(1,2)", "abs takes at most 1 argument"},
    {"round(1,200)", "round takes at most 100 digits, an integer"},
    {"abs 3", "'(' is missing after 'abs'"},
    {"1e99999", "the exponent of the number before 2 is above 6100"},
    {"1.2.3", "an operator is missing before '.' at 4"},
    {"2π", "an operator is missing before 'pi' at 2"},
    {"5 km in kg", "cannot convert km to kg"},
    {"5 in km", "cannot convert a number without a unit to km"},
    {"5 km in", "a unit is missing after the word at 6"},
    {"5 km in foo", "unknown word 'foo' at 9"},
    {"25 C + 1", "a temperature in C can only be converted, with 'in' or 'to' C, F or K"},
    {"300 C * 2", "a temperature in C can only be converted, with 'in' or 'to' C, F or K"},
    {"-300 C in K", "a temperature below absolute zero"},
    {"1 min(3)", "an operator is missing before 'min' at 3"},
    {"5 km to 3", "a unit is missing after the word at 6"},
    {"2^(1/2)", "an exponent is not an integer"},
    {"2^km", "a number is missing before 'km' at 3"},
    {"sqrt(-1)", "a square root of a negative number"},
    {"sqrt(2 km)", "a square root of an odd power of m"},
    {"gcd(1.5, 2)", "gcd and lcm take integers without units"},
    {"3 m^33", "a power of m above 32"},
    {"3 m^1.5", "the power of a unit at 6 is not a small integer"},
    {"3 l in l/km", "two units of one dimension in the unit after 5"},
    {"1 l / 100 km in l/km", "two units of one dimension in the unit after 14"},
    {"12 × 12 = ", "unknown character '=' at 9"},
    {"２時間", "unknown character '時' at 2"},
    {"1 +* 2", "a number is missing before '*' at 4"},
    {"(", "a number is missing at the end"},
    {"()", "a number is missing before ')' at 2"},
    {")", "a number is missing before ')' at 1"},
    {"*", "a number is missing before '*' at 1"},
    {"%", "a number is missing before '%' at 1"},
    {"min()", "a number is missing before ')' at 5"},
    {"max(1,)", "a number is missing before ')' at 7"},
    {"pi(2)", "an operator is missing before '(' at 3"},
    {"sqrt", "'(' is missing after 'sqrt'"},
    {"1 in 2", "an operator is missing before '2' at 6"},
    {"mod 3", "a number is missing before 'mod' at 1"},
    {"5 mod 0", "division by zero"},
    {"5 mod 3 m", "cannot take the remainder of a number without a unit by m"},
    {"1.5!", "a factorial of a number that is not 0, 1, 2, …"},
    {"(-1)!", "a factorial of a number that is not 0, 1, 2, …"},
    {"(5 m)!", "a factorial of a number with a unit"},
    {"2^(1 m)", "an exponent has a unit"},
    {"1 km + 20 C", "a temperature in C can only be converted, with 'in' or 'to' C, F or K"},
    {"5 C/s", "the temperature 'C' is part of a compound unit"},
    {"gcd(2 m, 4 m)", "gcd and lcm take integers without units"},
    {"max(1 m, 1 s)", "cannot compare m and s"},
    {"1e7000", "the exponent of the number before 2 is above 6100"},
    {"1000! * 1000! * 1000!", "a number has more than 20000 bits"},
    {"5..2", "an operator is missing before '.' at 3"},
    {"1,234,56", "',' at 6 separates neither thousands nor arguments"},
    {"0,123", "',' at 2 separates neither thousands nor arguments"},
    {"#", "unknown character '#' at 1"},
    {"1 + あ", "unknown character 'あ' at 5"},
    {"𝟏", "unknown character '𝟏' at 1"},
    {"x", "unknown word 'x' at 1"},
    {"2x", "unknown word 'x' at 2"},
    {"", "empty"},
    {"1\n+2", "control character"},
    {"1\t+2", "control character"},
    {"1\x7f", "control character"},
    {"1\xc2\x85", "control character"},
    {"1 + \xff", "not valid UTF-8"},
    {"1 + \xe3\x81", "not valid UTF-8"},
};

/* The memory of GMP. */
static struct {
    long live, allocations;
    size_t largest;
} memory;

static void *counted_alloc(size_t n) {
    memory.live++, memory.allocations++;
    memory.largest = MAX(memory.largest, n);
    return xmalloc(n);
}

static void *counted_realloc(void *p, size_t old, size_t n) {
    (void)old;
    memory.allocations++;
    memory.largest = MAX(memory.largest, n);
    return xrealloc(p, n);
}

static void counted_free(void *p, size_t n) {
    (void)n;
    memory.live--;
    free(p);
}

/* Calculates, and checks the contract that holds for each text. The caller releases `out`. */
static int calculate(const char *expression, struct buf *out, struct error *err) {
    long live = memory.live;
    memory.allocations = 0;
    memory.largest = 0;
    int rc = agent_calculate(expression, out, err);
    assert_int_equal(memory.live, live);
    assert_true(memory.allocations < 100000);
    assert_true(memory.largest < 64 << 10);
    if (rc == OK) {
        assert_true(out->len > 0 && out->len < AGENT_MAX_RESULT);
        assert_null(u8_check((const uint8_t *)out->data, out->len));
    } else {
        assert_int_equal(rc, ERR_USAGE);
        assert_int_equal(out->len, 0);
        assert_true(*err->text && strlen(err->text) < 400);
        assert_null(u8_check((const uint8_t *)err->text, strlen(err->text)));
    }
    return rc;
}

static void test_results(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(results); i++) {
        struct buf out = {0};
        struct error err;
        if (calculate(results[i].expression, &out, &err) != OK)
            fail_msg("'%s': %s", results[i].expression, err.text);
        if (strcmp(out.data, results[i].result) != 0)
            fail_msg("'%s' is '%s' instead of '%s'", results[i].expression, out.data,
                     results[i].result);
        buf_release(&out);
    }
}

static void assert_error(const char *expression, const char *message) {
    struct buf out = {0};
    struct error err;
    if (calculate(expression, &out, &err) == OK) fail_msg("'%s' is %s", expression, out.data);
    if (!strstr(err.text, message))
        fail_msg("'%s': '%s' instead of '%s'", expression, err.text, message);
    buf_release(&out);
}

static void test_errors(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(errors); i++)
        assert_error(errors[i].expression, errors[i].message);
}

static void test_result_is_appended(void **state) {
    (void)state;
    struct buf out = {0};
    struct error err;
    buf_puts(&out, "result: ");
    assert_int_equal(agent_calculate("6 * 7", &out, &err), OK);
    assert_string_equal(out.data, "result: 42");
    assert_int_equal(agent_calculate("6 *", &out, &err), ERR_USAGE);
    assert_string_equal(out.data, "result: 42");
    buf_release(&out);
}

static char *repeated(const char *begin, const char *unit, int n, const char *end) {
    struct buf b = {0};
    buf_puts(&b, begin);
    for (int i = 0; i < n; i++) buf_puts(&b, unit);
    buf_puts(&b, end);
    return b.data;
}

/* message: NULL if there is no error. */
static void assert_repeated(const char *begin, const char *unit, int n, const char *end,
                            const char *message) {
    char *text = repeated(begin, unit, n, end);
    struct buf out = {0};
    struct error err;
    if (message)
        assert_error(text, message);
    else if (calculate(text, &out, &err) != OK)
        fail_msg("%d '%s': %s", n, unit, err.text);
    buf_release(&out);
    free(text);
}

static void test_limits(void **state) {
    (void)state;
    assert_repeated("", "1", 4096, "", NULL);
    assert_repeated("", "1", 4097, "", "longer than 4096 bytes");
    assert_repeated("", "1+", 2000, "1", NULL);
    assert_repeated("", "-", 4000, "1", "more than 3000 operations");
    assert_repeated("2^(", "-", 4000, "1)", "more than 3000 operations");
    assert_repeated("1", "%", 4000, "", "more than");
    assert_repeated("", "(", 64, "1", "has no ')'");
    assert_repeated("", "(", 65, "1", "nested more than 64 deep at 65");
    assert_repeated("", "abs(", 65, "1", "nested more than 64 deep");
    assert_repeated("", "1^", 64, "1", NULL);
    assert_repeated("", "1^", 2000, "1", "nested more than 64 deep");
    assert_repeated("", "9^6000/7^7000+", 290, "1", "more than 3000 operations");
    assert_repeated("", "9^6000/7^7000+", 50, "1", NULL);
    assert_repeated("", "pi*", 1300, "1", NULL);
    assert_repeated("", "sqrt(2)+", 500, "1", NULL);
    assert_repeated("max(", "1/3,", 900, "1)", NULL);
    assert_repeated("lcm(", "9^999,8^999,7^999,", 30, "1)", NULL);
    assert_repeated("1 m", " * 1 m", 32, "", "above 32");
    assert_repeated("", "x", 4000, "", "unknown word");
    assert_repeated("", "㎥", 1300, "", "");
    assert_repeated("", "²", 2000, "", "missing before '^'");
}

/* random expressions */

/* Appends a random expression and computes its value; false: it divides by zero. */
static bool tree_make(struct rng *r, int depth, struct buf *text, mpq_t value);

static void leaf_make(struct rng *r, struct buf *text, mpq_t value) {
    uint32_t n = rng_below(r, 2000), decimals = rng_below(r, 4);
    static const char *const wide[] = {"０", "１", "２", "３", "４", "５", "６", "７", "８", "９"};
    char digits[32];
    mpq_set_ui(value, n, decimals == 3 ? 1000 : 1);
    mpq_canonicalize(value);
    snprintf(digits, sizeof digits, decimals == 3 ? "%u.%03u" : "%u", decimals == 3 ? n / 1000 : n,
             n % 1000);
    if (decimals == 2 && n >= 1000) snprintf(digits, sizeof digits, "%u,%03u", n / 1000, n % 1000);
    for (char *p = digits; *p; p++) {
        if (decimals == 1)
            buf_puts(text, wide[*p - '0']);
        else
            buf_add(text, p, 1);
    }
}

static bool power_make(struct rng *r, int depth, struct buf *text, mpq_t value) {
    int n = (int)rng_below(r, 7) - 3;
    buf_puts(text, "(");
    bool defined = tree_make(r, depth - 1, text, value);
    buf_printf(text, rng_below(r, 2) ? ")^%d" : ") ** %d", n);
    if (!defined || (n < 0 && mpq_sgn(value) == 0)) return false;
    mpz_pow_ui(mpq_numref(value), mpq_numref(value), (unsigned long)abs(n));
    mpz_pow_ui(mpq_denref(value), mpq_denref(value), (unsigned long)abs(n));
    if (n < 0) mpq_inv(value, value);
    return true;
}

static bool operation_make(struct rng *r, int depth, struct buf *text, mpq_t value) {
    static const char *const operators[] = {"+", " + ", " - ", "－", "*", "×", " / ", "÷"};
    uint32_t op = rng_below(r, ARRAY_LEN(operators));
    mpq_t right;
    mpq_init(right);
    buf_puts(text, "(");
    bool defined = tree_make(r, depth - 1, text, value);
    buf_printf(text, "%s%s%s", rng_below(r, 2) ? ")" : " )", operators[op],
               rng_below(r, 2) ? "(" : "（");
    defined &= tree_make(r, depth - 1, text, right);
    buf_puts(text, ")");
    if (op / 2 == 0)
        mpq_add(value, value, right);
    else if (op / 2 == 1)
        mpq_sub(value, value, right);
    else if (op / 2 == 2)
        mpq_mul(value, value, right);
    else if (mpq_sgn(right) == 0)
        defined = false;
    else
        mpq_div(value, value, right);
    mpq_clear(right);
    return defined;
}

static bool tree_make(struct rng *r, int depth, struct buf *text, mpq_t value) {
    uint32_t kind = depth == 0 ? 0 : rng_below(r, 8);
    if (kind == 0) {
        leaf_make(r, text, value);
        return true;
    }
    if (kind == 1) return power_make(r, depth, text, value);
    if (kind > 2) return operation_make(r, depth, text, value);
    buf_puts(text, "-(");
    bool defined = tree_make(r, depth - 1, text, value);
    buf_puts(text, ")");
    mpq_neg(value, value);
    return defined;
}

/* The number of an exact result: an integer, a decimal number or a fraction. */
static void result_parse(const char *result, mpq_t out) {
    char *text = xstrndup(result, strcspn(result, " ")), *point = strchr(text, '.');
    size_t decimals = point ? strlen(point + 1) : 0;
    mpz_t scale;
    if (point) memmove(point, point + 1, decimals + 1);
    assert_int_equal(mpq_set_str(out, text, 10), 0);
    mpz_init(scale);
    mpz_ui_pow_ui(scale, 10, decimals);
    mpz_mul(mpq_denref(out), mpq_denref(out), scale);
    mpq_canonicalize(out);
    mpz_clear(scale);
    free(text);
}

static void test_random_expressions(void **state) {
    (void)state;
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    int n_defined = 0;
    for (int i = 0; i < 3000; i++) {
        struct buf text = {0}, out = {0};
        struct error err;
        mpq_t expected, value;
        mpq_inits(expected, value, NULL);
        bool defined = tree_make(&r, 4, &text, expected);
        int rc = calculate(text.data, &out, &err);
        if (!defined) {
            assert_int_equal(rc, ERR_USAGE);
            assert_string_equal(err.text, "division by zero");
        } else {
            if (rc != OK) fail_msg("'%s': %s", text.data, err.text);
            result_parse(out.data, value);
            if (!mpq_equal(value, expected)) fail_msg("'%s' is not %s", text.data, out.data);
            n_defined++;
        }
        mpq_clears(expected, value, NULL);
        buf_release(&text);
        buf_release(&out);
    }
    assert_true(n_defined > 2000);
}

/* The series of e, and Machin's formula of pi, in units of 10^-70. */
static void series_add(mpz_t sum, unsigned long factor, unsigned long x, bool negative) {
    mpz_t term, part;
    mpz_inits(term, part, NULL);
    mpz_ui_pow_ui(term, 10, 70);
    mpz_mul_ui(term, term, factor);
    mpz_tdiv_q_ui(term, term, x);
    for (unsigned long k = 1; mpz_sgn(term); k += 2, negative = !negative) {
        mpz_tdiv_q_ui(part, term, k);
        if (negative)
            mpz_sub(sum, sum, part);
        else
            mpz_add(sum, sum, part);
        mpz_tdiv_q_ui(term, term, x * x);
    }
    mpz_clears(term, part, NULL);
}

/* 60 decimals; the last of the 70 that were computed are inexact. */
static void assert_constant(const char *name, const mpz_t expected) {
    char *digits = mpz_get_str(NULL, 10, expected);
    char *text = xasprintf("floor((%s - %.1s.%.60s) * 10^60)", name, digits, digits + 1);
    struct buf out = {0};
    struct error err;
    assert_int_equal(strlen(digits), 71);
    counted_free(digits, 72);
    assert_int_equal(calculate(text, &out, &err), OK);
    assert_string_equal(out.data, "≈ 0");
    buf_release(&out);
    free(text);
}

static void test_constants(void **state) {
    (void)state;
    mpz_t sum, term;
    mpz_inits(sum, term, NULL);
    series_add(sum, 16, 5, false);
    series_add(sum, 4, 239, true);
    assert_constant("pi", sum);
    mpz_set_ui(sum, 0);
    mpz_ui_pow_ui(term, 10, 70);
    for (unsigned long k = 1; mpz_sgn(term); k++) {
        mpz_add(sum, sum, term);
        mpz_tdiv_q_ui(term, term, k);
    }
    assert_constant("e", sum);
    mpz_clears(sum, term, NULL);
}

/* random bytes */

/* Replaces, removes or inserts some bytes of an expression. */
static void mutate(struct rng *r, char *text, size_t n) {
    static const char bytes[] = "0123456789+-*/^%!().,emk in to\xe3\x81\xff\n";
    for (uint32_t i = rng_below(r, 4) + 1; n && i > 0; i--) {
        size_t at = rng_below(r, (uint32_t)n);
        if (rng_below(r, 3) == 0)
            memmove(text + at, text + at + 1, n-- - at);
        else
            text[at] = bytes[rng_below(r, sizeof bytes - 1)];
    }
}

static void test_hostile_texts(void **state) {
    (void)state;
    struct rng r = rng_make(8, RNG_TEST, 0, 0);
    struct error err;
    for (int i = 0; i < 30000; i++) {
        char text[400];
        struct buf out = {0};
        size_t n = 0;
        for (uint32_t parts = rng_below(&r, 3) + 1; parts > 0; parts--) {
            const char *part = rng_below(&r, 2)
                                   ? results[rng_below(&r, ARRAY_LEN(results))].expression
                                   : errors[rng_below(&r, ARRAY_LEN(errors))].expression;
            n += (size_t)snprintf(text + n, sizeof text - n, "%s", part);
        }
        mutate(&r, text, n);
        calculate(text, &out, &err);
        buf_release(&out);
    }
    for (int i = 0; i < 10000; i++) {
        char text[64];
        struct buf out = {0};
        uint32_t n = rng_below(&r, sizeof text), range = rng_below(&r, 2) ? 255 : 94;
        for (uint32_t k = 0; k < n; k++)
            text[k] = (char)(range == 255 ? 1 + rng_below(&r, 255) : 32 + rng_below(&r, 95));
        text[n] = 0;
        calculate(text, &out, &err);
        buf_release(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_result_is_appended),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_random_expressions),
        cmocka_unit_test(test_constants),
        cmocka_unit_test(test_hostile_texts),
    };
    mp_set_memory_functions(counted_alloc, counted_realloc, counted_free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
