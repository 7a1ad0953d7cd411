/*
 * document: converts HTML, Markdown and plain text to plain text.
 *
 * The readers check that the input is UTF-8, but not its markup, because real pages contain all
 * kinds of errors. Unknown HTML tags are dropped; other markup that a reader does not recognise
 * becomes text. The time is linear in the length of the input.
 *
 * Other encodings are not supported. The layout of tables and the addresses of links are omitted.
 */
#define _GNU_SOURCE
#include "memory/memory.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unictype.h>
#include <unistr.h>

static int utf8_check(const char *doc, size_t len, struct error *err) {
    const uint8_t *wrong = len ? u8_check((const uint8_t *)doc, len) : NULL;
    if (!wrong && len) wrong = memchr(doc, 0, len);
    if (!wrong) return OK;
    return error_set(err, ERR_FORMAT,
                     "the text is not UTF-8 at byte offset %zu; convert the file with iconv",
                     (size_t)(wrong - (const uint8_t *)doc));
}

static size_t bom_len(const char *doc, size_t len) {
    return len >= 3 && memcmp(doc, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

int document_read_text(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err) {
    size_t bom = bom_len(doc, len);
    (void)title;
    if (utf8_check(doc, len, err) != OK) return err->code;
    buf_add(text, doc + bom, len - bom);
    return OK;
}

/* Writes text with normalised white space. Of several gaps in a row only the largest is written,
 * before the next text. */
enum text_gap { GAP_NONE, GAP_SPACE, GAP_LINE, GAP_PARAGRAPH };
struct text_writer {
    struct buf *out;
    enum text_gap gap;
};

static void text_writer_gap(struct text_writer *w, enum text_gap gap) {
    w->gap = MAX(w->gap, gap);
}

static void text_writer_add(struct text_writer *w, const char *p, size_t n) {
    static const char *const gaps[] = {"", " ", "\n", "\n\n"};
    if (w->out->len) buf_puts(w->out, gaps[w->gap]);
    buf_add(w->out, p, n);
    w->gap = GAP_NONE;
}

/* HTML */

/* State of the HTML reader. `out` is &title inside <title>, else &text. */
struct html {
    const char *doc;
    size_t len, pos;
    struct text_writer text, title, *out;
    bool pre;
    bool no_quote[2]; /* [0] for ', [1] for ": no such mark follows in the document */
};

static const struct {
    const char *name, *text;
} entities[] = {
    {"amp", "&"},    {"lt", "<"},     {"gt", ">"},     {"quot", "\""},  {"apos", "'"},
    {"nbsp", " "},   {"copy", "©"},   {"reg", "®"},    {"trade", "™"},  {"hellip", "…"},
    {"mdash", "—"},  {"ndash", "–"},  {"lsquo", "‘"},  {"rsquo", "’"},  {"ldquo", "“"},
    {"rdquo", "”"},  {"laquo", "«"},  {"raquo", "»"},  {"middot", "·"}, {"bull", "•"},
    {"times", "×"},  {"divide", "÷"}, {"deg", "°"},    {"plusmn", "±"}, {"yen", "¥"},
    {"euro", "€"},   {"pound", "£"},  {"cent", "¢"},   {"sect", "§"},   {"para", "¶"},
    {"eacute", "é"}, {"egrave", "è"}, {"agrave", "à"}, {"ccedil", "ç"}, {"auml", "ä"},
    {"ouml", "ö"},   {"uuml", "ü"},   {"Auml", "Ä"},   {"Ouml", "Ö"},   {"Uuml", "Ü"},
    {"szlig", "ß"},  {"ntilde", "ñ"}, {"larr", "←"},   {"rarr", "→"},   {"uarr", "↑"},
    {"darr", "↓"},   {"le", "≤"},     {"ge", "≥"},     {"ne", "≠"},     {"minus", "−"},
    {"ensp", " "},   {"emsp", " "},   {"thinsp", " "}, {"shy", ""},
};

/* Decodes "&#12354;" or "&#x3042;", passed without "&" and ";", and returns the number of bytes; -1
 * if it is not a number. An invalid code gives U+FFFD, one below 32 a space. */
static int numeric_entity_decode(const char *name, size_t n, char out[8]) {
    bool hex = n > 1 && (name[1] == 'x' || name[1] == 'X');
    ucs4_t c = 0;
    size_t i = hex ? 2 : 1;
    if (i == n) return -1;
    for (; i < n; i++) {
        int digit = isdigit((uint8_t)name[i])           ? name[i] - '0'
                    : hex && isxdigit((uint8_t)name[i]) ? (name[i] | 32) - 'a' + 10
                                                        : -1;
        if (digit < 0) return -1;
        c = MIN(c * (hex ? 16 : 10) + (ucs4_t)digit, 0x110000);
    }
    if (c > 0 && c < 0x20) c = ' ';
    int len = c ? u8_uctomb((uint8_t *)out, c, 8) : -1;
    return len > 0 ? len : (int)(memcpy(out, "\xEF\xBF\xBD", 3), 3);
}

/* Decodes the entity at h->pos into out, *n bytes; returns its length in the input, 0 if there is
 * no known entity. */
static size_t entity_read(const struct html *h, char out[8], int *n) {
    const char *name = h->doc + h->pos + 1, *end = memchr(name, ';', MIN(h->len - h->pos - 1, 12));
    if (!end) return 0;
    size_t len = (size_t)(end - name);
    if (*name == '#') {
        *n = numeric_entity_decode(name, len, out);
        return *n > 0 ? len + 2 : 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(entities); i++) {
        const char *text = entities[i].text;
        if (strlen(entities[i].name) != len || memcmp(entities[i].name, name, len) != 0) continue;
        *n = (int)strlen(text);
        memcpy(out, text, (size_t)*n);
        return len + 2;
    }
    return 0;
}

static void html_char_add(struct html *h, const char *p, size_t n) {
    ucs4_t c = ' ';
    if (n) u8_mbtouc(&c, (const uint8_t *)p, n);
    if (!uc_is_property_white_space(c))
        text_writer_add(h->out, p, n);
    else if (n)
        text_writer_gap(h->out, h->pre && c == '\n' ? GAP_LINE : GAP_SPACE);
}

static void text_char_read(struct html *h) {
    char decoded[8];
    int n = 0;
    size_t taken = h->doc[h->pos] == '&' ? entity_read(h, decoded, &n) : 0;
    ucs4_t c;
    if (taken) {
        html_char_add(h, decoded, (size_t)n);
    } else {
        taken = (size_t)u8_mbtouc(&c, (const uint8_t *)h->doc + h->pos, h->len - h->pos);
        html_char_add(h, h->doc + h->pos, taken);
    }
    h->pos += taken;
}

static bool name_in(const char *names, const char *name, size_t n) {
    for (size_t k; *names; names += k + (names[k] == ' ')) {
        k = strcspn(names, " ");
        if (k == n && strncasecmp(names, name, n) == 0) return true;
    }
    return false;
}

/* Moves past the ">" of the tag; returns whether "/" precedes it. A quotation mark begins a quoted
 * value only after "=" and if the same mark follows. */
static bool tag_skip(struct html *h) {
    char previous = 0;
    for (; h->pos < h->len; h->pos++) {
        char c = h->doc[h->pos];
        if (c == '>') break;
        bool quote = (c == '"' || c == '\'') && previous == '=';
        if (quote && !h->no_quote[c == '"']) {
            const char *end = memchr(h->doc + h->pos + 1, c, h->len - h->pos - 1);
            if (end)
                h->pos = (size_t)(end - h->doc);
            else
                h->no_quote[c == '"'] = true;
        }
        if (!strchr(" \t\r\n", c)) previous = c;
    }
    h->pos = MIN(h->pos + 1, h->len);
    return previous == '/';
}

/* Moves to the closing tag of the element `name`, whose content is omitted; to the end of the
 * document if there is none. */
static void content_skip(struct html *h, const char *name, size_t n) {
    while (h->pos < h->len) {
        const char *close = memmem(h->doc + h->pos, h->len - h->pos, "</", 2);
        h->pos = close ? (size_t)(close - h->doc) : h->len;
        if (h->len - h->pos > n + 1 && strncasecmp(h->doc + h->pos + 2, name, n) == 0) return;
        h->pos = MIN(h->pos + 2, h->len);
    }
}

/* Names of the HTML elements whose content is omitted, begins a new line, or begins a new
 * paragraph. */
static const char hidden_elements[] =
    "script style noscript template svg math iframe object textarea select";
static const char line_elements[] = "br li tr dt dd option";
static const char block_elements[] =
    "p div h1 h2 h3 h4 h5 h6 ul ol dl table section article header footer nav aside main form "
    "blockquote pre figure figcaption hr body address details summary fieldset caption";

static void tag_read(struct html *h) {
    bool close = h->doc[h->pos + 1] == '/';
    size_t begin = h->pos + 1 + close, n = 0;
    while (begin + n < h->len && isalnum((uint8_t)h->doc[begin + n])) n++;
    const char *name = h->doc + begin;
    h->pos = begin + n;
    bool empty = tag_skip(h) && name_in("svg math", name, n); // of other elements "/" means nothing
    if (!close && !empty && name_in(hidden_elements, name, n)) content_skip(h, name, n);
    if (name_in("title", name, n)) h->out = close ? &h->text : &h->title;
    if (name_in("pre", name, n)) h->pre = !close;
    if (name_in(block_elements, name, n)) text_writer_gap(&h->text, GAP_PARAGRAPH);
    if (name_in(line_elements, name, n)) text_writer_gap(&h->text, GAP_LINE);
    if (name_in("td th", name, n)) text_writer_gap(&h->text, GAP_SPACE);
}

/* Skips "<!-- -->", "<!DOCTYPE>" or "<?xml ?>". A declaration that is not closed extends to the end
 * of the document. */
static void declaration_skip(struct html *h) {
    bool comment = h->len - h->pos >= 4 && memcmp(h->doc + h->pos, "<!--", 4) == 0;
    const char *from = h->doc + h->pos + 2, *mark = comment ? "-->" : ">";
    const char *end = memmem(from, h->len - h->pos - 2, mark, strlen(mark));
    h->pos = end ? (size_t)(end - h->doc) + strlen(mark) : h->len;
}

int document_read_html(const char *doc, size_t len, struct buf *title, struct buf *text,
                       struct error *err) {
    struct html h = {.doc = doc,
                     .len = len,
                     .pos = bom_len(doc, len),
                     .text = {.out = text},
                     .title = {.out = title}};
    h.out = &h.text;
    if (utf8_check(doc, len, err) != OK) return err->code;
    while (h.pos < len) {
        char next = h.doc[h.pos] == '<' && h.pos + 1 < len ? h.doc[h.pos + 1] : 0;
        char after = next == '/' && h.pos + 2 < len ? h.doc[h.pos + 2] : 0;
        if (next == '!' || next == '?')
            declaration_skip(&h);
        else if (isalpha((uint8_t)next) || isalpha((uint8_t)after))
            tag_read(&h);
        else
            text_char_read(&h);
    }
    return OK;
}

/* Markdown */

struct markdown {
    struct text_writer text;
    struct buf *title;
    char fence; /* fence character of the current code block, or 0 */
};

/* Whether a line has at least 3 characters, all of them in `set`, and one of them is `needed`: a
 * horizontal rule, or the underline of a heading or of a table's head. */
static bool is_separator_line(const char *p, size_t n, const char *set, char needed) {
    size_t i = 0;
    while (i < n && strchr(set, p[i])) i++;
    return i == n && n >= 3 && memchr(p, needed, n);
}

/* Finds a link "[text](address)" at p. Returns the offset of "]", and the length of the link in
 * *whole; 0 if there is no link. The search is bounded by TEXT_MAX and ADDRESS_MAX. */
static size_t link_parse(const char *p, size_t left, size_t *whole) {
    enum { TEXT_MAX = 500, ADDRESS_MAX = 2000 };
    const char *close = memchr(p, ']', MIN(left, TEXT_MAX));
    size_t bracket = close ? (size_t)(close - p) : 0;
    if (!bracket || bracket + 1 >= left || p[bracket + 1] != '(') return 0;
    const char *end = memchr(p + bracket, ')', MIN(left - bracket, ADDRESS_MAX));
    *whole = end ? (size_t)(end - p) + 1 : 0;
    return end ? bracket : 0;
}

/* Appends a line without "**", "`" and the addresses of links. */
static void inline_add(struct buf *out, const char *p, size_t n) {
    for (size_t i = 0, whole; i < n;) {
        size_t bang = p[i] == '!' && i + 1 < n && p[i + 1] == '[';
        size_t text = p[i + bang] == '[' ? link_parse(p + i + bang, n - i - bang, &whole) : 0;
        if (text) {
            buf_add(out, p + i + bang + 1, text - 1);
            i += bang + whole;
        } else if (p[i] == '`') {
            i++;
        } else if (p[i] == '*' && i + 1 < n && p[i + 1] == '*') {
            i += 2;
        } else {
            buf_add(out, p + i++, 1);
        }
    }
}

/* The length of a heading's mark ("## ") at the beginning of a line, or 0. */
static size_t heading_mark_len(const char *p, size_t n) {
    size_t hashes = 0;
    while (hashes < n && p[hashes] == '#') hashes++;
    bool space = hashes < n && (p[hashes] == ' ' || p[hashes] == '\t');
    return hashes >= 1 && hashes <= 6 && space ? hashes + 1 : 0;
}

static void line_add(struct markdown *m, const char *p, size_t n, bool code) {
    struct buf line = {0};
    if (code)
        buf_add(&line, p, n);
    else
        inline_add(&line, p, n);
    if (line.len) text_writer_add(&m->text, line.data, line.len);
    text_writer_gap(&m->text, GAP_LINE);
    buf_release(&line);
}

static void heading_add(struct markdown *m, const char *p, size_t n) {
    while (n && strchr(" \t#", p[n - 1])) n--;
    while (n && strchr(" \t", *p)) p++, n--;
    if (!m->title->len) inline_add(m->title, p, n);
    text_writer_gap(&m->text, GAP_PARAGRAPH);
    line_add(m, p, n, false);
    text_writer_gap(&m->text, GAP_PARAGRAPH);
}

/* Reads a line: a fence, code, a separator, a heading or text. */
static void line_read(struct markdown *m, const char *p, size_t n) {
    while (n && strchr(" \t\r", p[n - 1])) n--;
    size_t indent = 0;
    while (indent < n && (p[indent] == ' ' || p[indent] == '>')) indent++;
    const char *q = p + indent;
    size_t k = n - indent, mark = heading_mark_len(q, k);
    bool fence = k >= 3 && (memcmp(q, "```", 3) == 0 || memcmp(q, "~~~", 3) == 0);
    if (fence && (!m->fence || m->fence == *q))
        m->fence = m->fence ? 0 : *q;
    else if (m->fence)
        line_add(m, p, n, true);
    else if (!k || is_separator_line(q, k, "-=*_ ", *q) || is_separator_line(q, k, "|-: ", '-'))
        text_writer_gap(&m->text, GAP_PARAGRAPH);
    else if (mark)
        heading_add(m, q + mark, k - mark);
    else
        line_add(m, q, k, false);
}

/* YAML front matter between "---" lines, which may end in CRLF: reads its title and returns the
 * offset of the text after it; 0 if there is none. */
static size_t front_matter_read(const char *doc, size_t len, struct buf *title) {
    bool crlf = len > 4 && memcmp(doc, "---\r\n", 5) == 0;
    if (!crlf && (len < 4 || memcmp(doc, "---\n", 4) != 0)) return 0;
    const char *mark = crlf ? "\n---\r\n" : "\n---\n";
    const char *end = memmem(doc + 3, len - 3, mark, strlen(mark));
    if (!end) return 0;
    size_t n = (size_t)(end - doc);
    const char *value = memmem(doc + 3, n - 3, "\ntitle:", 7);
    if (value) {
        value += 7;
        const char *stop = value < end ? memchr(value, '\n', (size_t)(end - value)) : end;
        stop = stop ? stop : end;
        while (value < stop && strchr(" \t\"'", *value)) value++;
        while (stop > value && strchr(" \t\r\"'", stop[-1])) stop--;
        buf_add(title, value, (size_t)(stop - value));
    }
    return n + strlen(mark);
}

int document_read_markdown(const char *doc, size_t len, struct buf *title, struct buf *text,
                           struct error *err) {
    struct markdown m = {.text = {.out = text}, .title = title};
    if (utf8_check(doc, len, err) != OK) return err->code;
    size_t pos = bom_len(doc, len);
    pos += front_matter_read(doc + pos, len - pos, title);
    while (pos < len) {
        const char *end = memchr(doc + pos, '\n', len - pos);
        size_t n = end ? (size_t)(end - doc) - pos : len - pos;
        line_read(&m, doc + pos, n);
        pos += n + 1;
    }
    return OK;
}
