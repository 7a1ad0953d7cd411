/*
 * number: the final number of a text, as school problems (GSM8K) are graded.
 *
 * The search order is \boxed{…}, then the text after "####" or "answer:", then the last number of
 * the text. Thousands separators, currency and percent signs and full-width digits have no effect.
 * A number may have multipliers such as 万 and 億. An answer may also be a number in Chinese
 * characters only.
 *
 * The normal form is the number in decimal digits. A number in plain digits keeps all its digits,
 * so two such numbers are equal exactly when their forms are equal. A fraction, or a number with
 * multipliers, is computed as a double and rounded to 15 digits.
 */
#define _GNU_SOURCE
#include "grade/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

static size_t digit_count(const char *s, const char *end) {
    size_t n = 0;
    while (s + n < end && isdigit((unsigned char)s[n])) n++;
    return n;
}

/* Converts full-width signs and digits, and the minus sign U+2212, to ASCII. */
static void ascii_fold(struct text_span text, struct buf *out) {
    const uint8_t *p = (const uint8_t *)text.ptr, *end = p + text.len;
    buf_puts(out, "");
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtouc(&c, p, (size_t)(end - p));
        if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0;
        if (c == 0x2212) c = '-';
        char ascii = (char)c;
        buf_add(out, c < 0x80 ? (const void *)&ascii : p, c < 0x80 ? 1 : (size_t)n);
        p += n;
    }
}

/* Appends the normal form of a number with the digits v[n], of which `point` are before the decimal
 * point. */
static void decimal_append(bool minus, const char *v, size_t n, int64_t point, struct buf *out) {
    while (n && *v == '0') v++, n--, point--;
    while (n && v[n - 1] == '0') n--;
    if (minus && n) buf_puts(out, "-");
    if (n == 0) {
        buf_puts(out, "0");
    } else if (point > 0 && point - (int64_t)n <= 60) {
        size_t n_integer = MIN((size_t)point, n);
        buf_add(out, v, n_integer);
        for (int64_t i = (int64_t)n; i < point; i++) buf_puts(out, "0");
        if (n_integer < n) buf_puts(out, ".");
        buf_add(out, v + n_integer, n - n_integer);
    } else if (point <= 0 && point > -60) {
        buf_puts(out, "0.");
        for (int64_t i = point; i < 0; i++) buf_puts(out, "0");
        buf_add(out, v, n);
    } else {
        buf_add(out, v, 1);
        if (n > 1) buf_puts(out, ".");
        buf_add(out, v + 1, n - 1);
        buf_printf(out, "e%lld", (long long)point - 1);
    }
}

/* Appends the normal form of a computed number, rounded to 15 digits. */
static void double_append(double x, struct buf *out) {
    char text[40], v[40];
    size_t n = 0;
    snprintf(text, sizeof text, "%.14e", x < 0 ? -x : x);
    for (const char *p = text; *p != 'e'; p++)
        if (isdigit((unsigned char)*p)) v[n++] = *p;
    decimal_append(x < 0, v, n, atoi(strchr(text, 'e') + 1) + 1, out);
}

/* Bytes of a separator that exactly three digits follow; 0: none. */
static size_t thousands_separator_len(const char *s, const char *end) {
    static const char *const marks[] = {",", "{,}", "\\,", ",\\!"};
    for (size_t i = 0; i < ARRAY_LEN(marks); i++) {
        size_t n = strlen(marks[i]);
        if ((size_t)(end - s) > n && memcmp(s, marks[i], n) == 0 && digit_count(s + n, end) == 3)
            return n;
    }
    return 0;
}

/* A number such as 1,234.5e6 without its sign. */
struct number_text {
    struct buf digits;
    int64_t point;   /* number of digits before the decimal point, with the exponent */
    bool is_integer; /* it has neither separators nor a point */
};

/* Reads an exponent, "e6", and adds it to *out. Returns its end, or `s` without one. */
static const char *exponent_read(const char *s, const char *end, int64_t *out) {
    if (s + 1 >= end || (*s != 'e' && *s != 'E')) return s;
    size_t sign = s[1] == '-' || s[1] == '+', n = digit_count(s + 1 + sign, end);
    if (n == 0 || n > 4) return s;
    int64_t e = atoi(s + 1 + sign);
    *out += s[1] == '-' ? -e : e;
    return s + 1 + sign + n;
}

/* Reads a number. Returns its end; NULL: no number begins here. */
static const char *decimal_read(const char *s, const char *end, struct number_text *d) {
    size_t n = digit_count(s, end), skip;
    bool fraction = s + n + 1 < end && s[n] == '.' && isdigit((unsigned char)s[n + 1]);
    if (n == 0 && !fraction) return NULL;
    buf_add(&d->digits, s, n);
    d->is_integer = !fraction;
    for (s += n; n <= 3 && n && (skip = thousands_separator_len(s, end)) > 0; s += 3) {
        buf_add(&d->digits, s += skip, 3);
        d->is_integer = false;
    }
    d->point = (int64_t)d->digits.len;
    if (s + 1 < end && *s == '.' && (n = digit_count(s + 1, end)) > 0) {
        buf_add(&d->digits, s + 1, n);
        s += 1 + n;
        d->is_integer = false;
    }
    return exponent_read(s, end, &d->point);
}

static double decimal_value(const struct number_text *d) {
    char *text = xasprintf("%.*se%lld", (int)MIN(d->digits.len, 1000), d->digits.data,
                           (long long)(d->point - (int64_t)MIN(d->digits.len, 1000)));
    double x = strtod(text, NULL);
    free(text);
    return x;
}

/* The value of the multiplier here, as 万; 0: no multiplier. *len: its bytes. */
static double multiplier_value(const char *s, const char *end, size_t *len) {
    static const struct {
        const char *name;
        double times;
    } rows[] = {{"十", 1e1}, {"百", 1e2}, {"千", 1e3}, {"万", 1e4},
                {"萬", 1e4}, {"億", 1e8}, {"亿", 1e8}, {"兆", 1e12}};
    *len = 3;
    for (size_t i = 0; i < ARRAY_LEN(rows) && end - s >= 3; i++)
        if (memcmp(s, rows[i].name, 3) == 0) return rows[i].times;
    return 0;
}

/* Reads the multipliers after the number `first`, and further numbers with multipliers: 3万5千,
 * 1.2億. *out: the value. Returns the end, or `s` if no multiplier follows. */
static const char *multipliers_read(const char *s, const char *end, const struct number_text *first,
                                    double *out) {
    double part = decimal_value(first), times, section = 0;
    size_t len;
    *out = 0;
    while ((times = multiplier_value(s, end, &len)) > 0) {
        s += len;
        if (times < 1e4) {
            section += part * times;
        } else {
            *out += (section + part) * times;
            section = 0;
        }
        struct number_text d = {0};
        const char *next = decimal_read(s, end, &d);
        part = next ? decimal_value(&d) : 0;
        s = next ? next : s;
        buf_release(&d.digits);
    }
    *out += section + part;
    return s;
}

/* Reads the "/4" of 3/4. Returns the end, or `s` if no denominator follows. A second slash marks a
 * date, as in 1/2/2020. */
static const char *denominator_read(const char *s, const char *end, double *denominator) {
    size_t n = s < end && *s == '/' ? digit_count(s + 1, end) : 0;
    if (n == 0 || n > 18 || (s + 1 + n < end && s[1 + n] == '/')) return s;
    *denominator = strtod(s + 1, NULL);
    return *denominator > 0 ? s + 1 + n : s;
}

/* Reads the " 1/2" of 2 1/2. Returns the end, or `s` if no fraction follows. */
static const char *mixed_fraction_read(const char *s, const char *end, double *fraction) {
    size_t n = s < end && *s == ' ' ? digit_count(s + 1, end) : 0;
    double denominator;
    if (n == 0 || n > 18) return s;
    const char *rest = denominator_read(s + 1 + n, end, &denominator);
    if (rest == s + 1 + n) return s;
    *fraction = strtod(s + 1, NULL) / denominator;
    return rest;
}

/* Reads \frac{3}{4} or \dfrac{3}{4} as 3/4. Returns the end; NULL: no such fraction. */
static const char *latex_fraction_read(const char *s, const char *end, double *out) {
    static const char *const names[] = {"\\frac{", "\\dfrac{", "\\tfrac{"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        size_t len = strlen(names[i]), n, m;
        if ((size_t)(end - s) <= len || memcmp(s, names[i], len) != 0) continue;
        const char *numerator = s + len,
                   *denominator = numerator + (n = digit_count(numerator, end)) + 2;
        if (!n || n > 18 || denominator >= end || numerator[n] != '}' || denominator[-1] != '{')
            continue;
        if (!(m = digit_count(denominator, end)) || m > 18 || denominator + m >= end ||
            denominator[m] != '}')
            continue;
        *out = strtod(numerator, NULL) / strtod(denominator, NULL);
        return *out < 1e300 ? denominator + m + 1 : NULL; // no division by zero
    }
    return NULL;
}

/* Reads an unsigned number and appends its normal form; NULL: no number begins here. `after_slash`:
 * a slash precedes it, as in a date. */
static const char *unsigned_read(bool minus, bool after_slash, const char *s, const char *end,
                                 struct buf *out) {
    double value, fraction;
    const char *stop = latex_fraction_read(s, end, &value), *next;
    if (stop) {
        double_append(minus ? -value : value, out);
        return stop;
    }
    struct number_text d = {0};
    if ((stop = decimal_read(s, end, &d)) != NULL) {
        if ((next = multipliers_read(stop, end, &d, &value)) == stop) {
            value = decimal_value(&d);
            if (d.is_integer && !after_slash &&
                (next = denominator_read(stop, end, &fraction)) != stop)
                value /= fraction;
            else if (d.is_integer && (next = mixed_fraction_read(stop, end, &fraction)) != stop)
                value += fraction;
        }
        if (next == stop)
            decimal_append(minus, d.digits.data, d.digits.len, d.point, out);
        else
            double_append(minus ? -value : value, out);
        stop = next;
    }
    buf_release(&d.digits);
    return stop;
}

/* Skips the sign of -5 or -$5 and returns the position after it, or `s` if there is no sign. A
 * minus after a digit, a letter or ")" is a subtraction and no sign. */
static const char *sign_read(const char *begin, const char *s, const char *end, bool *minus) {
    *minus = *s == '-' && (s == begin || !(isalnum((unsigned char)s[-1]) || s[-1] == ')'));
    if (!*minus) return s;
    if (s + 1 < end && s[1] == '\\' && s + 2 < end && s[2] == '$') return s + 3;
    return s + 1 < end && s[1] == '$' ? s + 2 : s + 1;
}

/* Appends the first number of a text, or the last one if `last`. */
static bool number_find(struct text_span text, bool last, struct buf *out) {
    const char *end = text.ptr + text.len;
    size_t begin = out->len;
    bool found = false;
    for (const char *s = text.ptr; s < end;) {
        struct buf number = {0};
        bool minus;
        const char *from = sign_read(text.ptr, s, end, &minus);
        bool after_slash = s > text.ptr && s[-1] == '/';
        const char *next =
            from < end ? unsigned_read(minus, after_slash, from, end, &number) : NULL;
        if (next) {
            out->len = begin;
            buf_add(out, number.data, number.len);
            found = true;
        }
        buf_release(&number);
        if (found && !last) break;
        s = next ? next : s + 1;
    }
    return found;
}

/* numbers in Chinese characters */

/* The value 0..9 of the digit here; -1: no digit. */
static int kanji_digit(const char *s, const char *end) {
    static const char *const names[] = {"〇", "一", "二", "三", "四", "五",
                                        "六", "七", "八", "九", "零", "两"};
    for (int i = 0; i < (int)ARRAY_LEN(names) && end - s >= 3; i++)
        if (memcmp(s, names[i], 3) == 0) return i == 10 ? 0 : i == 11 ? 2 : i;
    return -1;
}

/* Reads a number in Chinese characters: 四千二十, 二〇二四. Returns the end, or `s` if no number
 * begins here. */
static const char *kanji_read(const char *s, const char *end, double *out) {
    double total = 0, section = 0, part = 0, times;
    bool has_digit = false; /* a digit precedes the next multiplier */
    size_t len;
    for (int n = 0; n < 32; n++, s += 3) {
        int d = kanji_digit(s, end);
        if (d >= 0) {
            part = part * 10 + d;
            has_digit = true;
        } else if ((times = multiplier_value(s, end, &len)) > 0 && times < 1e4) {
            section += (has_digit ? part : 1) * times;
            part = 0, has_digit = false;
        } else if (times > 0) {
            total += (section + part) * times;
            section = part = 0, has_digit = false;
        } else {
            break;
        }
    }
    *out = total + section + part;
    return s;
}

/* If `what` is at *s, moves *s after it. */
static bool skip_text(const char **s, const char *end, const char *what) {
    size_t n = strlen(what);
    if ((size_t)(end - *s) < n || memcmp(*s, what, n) != 0) return false;
    *s += n;
    return true;
}

/* Appends the number of a text that consists of a number in Chinese characters, and optionally a
 * counter word and a sentence end. False for other texts. */
static bool kanji_find(struct text_span text, struct buf *out) {
    static const char *const counters[] = {
        "円", "元", "個", "个", "人", "本", "枚", "歳", "岁", "台", "匹", "冊", "册", "回", "次",
        "点", "つ", "分", "秒", "年", "日", "月", "块", "只", "条", "张", "倍", "度", "頭", "时"};
    static const char *const ends[] = {"です", "だ", "。", "．", "."};
    text = text_span_trim(text);
    const char *s = text.ptr, *end = s + text.len;
    double value;
    bool minus =
        skip_text(&s, end, "マイナス") || skip_text(&s, end, "负") || skip_text(&s, end, "負");
    const char *from = s;
    if ((s = kanji_read(s, end, &value)) == from) return false;
    for (size_t i = 0; i < ARRAY_LEN(counters); i++)
        if (skip_text(&s, end, counters[i])) break;
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) skip_text(&s, end, ends[i]);
    if (s != end) return false;
    double_append(minus ? -value : value, out);
    return true;
}

/* the extractor */

/* Appends the number of a marked answer. After an "=": the first number after the last "=". Without
 * an
 * "=": the first number. If this finds none: the last number of the text. */
static bool marked_number_find(struct text_span text, struct buf *out) {
    const char *equals = memrchr(text.ptr, '=', text.len);
    if (kanji_find(text, out)) return true;
    struct text_span rest = text;
    if (equals) rest.ptr = equals + 1, rest.len = (size_t)(text.ptr + text.len - rest.ptr);
    return number_find(rest, false, out) || number_find(text, true, out);
}

bool number_extract(const char *text, struct buf *out) {
    struct buf folded = {0};
    struct text_span part;
    ascii_fold(text_span_of(text), &folded);
    struct text_span all = {folded.data, folded.len};
    bool found = find_boxed_answer(all, &part) && marked_number_find(part, out);
    if (!found) found = find_marked_answer(all, &part) && marked_number_find(part, out);
    if (!found) found = kanji_find(all, out) || number_find(all, true, out);
    buf_release(&folded);
    return found;
}
