/*
 * json: strict parsing with positions in the messages, canonical output, and iteration over files
 * of many values.
 *
 * jansson parses, with the allocator of this file. This file adds the source's name, line and
 * column, accepts a byte-order mark, and finds where one value ends and the next begins. It never
 * repairs: a duplicate key, a trailing comma or a stray byte is an error.
 *
 * Invariant of a cursor: `line` and `column` (in characters, from 1) are those of text[pos].
 */
#include "base/base.h"

#include <malloc.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistr.h>

/* Limit of a file that is read whole: far above the largest known one (tokenizer.json has 10 to 40
 * MB). */
static const size_t JSON_FILE_LIMIT = (size_t)1 << 30;

struct json_cursor {
    const char *what, *text;
    size_t len, pos;
    int line, column;
};

static struct json_cursor cursor_init(const char *what, const char *text, size_t len) {
    struct json_cursor c = {.what = what, .text = text, .len = len, .line = 1, .column = 1};
    if (len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) c.pos = 3;
    return c;
}

static void cursor_advance(struct json_cursor *c, size_t n) {
    for (; n > 0; n--) {
        unsigned char byte = (unsigned char)c->text[c->pos++];
        if (byte == '\n') {
            c->line++;
            c->column = 1;
        } else if ((byte & 0xC0) != 0x80) {
            c->column++;
        }
    }
}

/* The next byte that is not white space, or -1 at the end. */
static int cursor_peek(struct json_cursor *c) {
    while (c->pos < c->len && strchr(" \t\r\n", c->text[c->pos]) && c->text[c->pos])
        cursor_advance(c, 1);
    return c->pos < c->len ? (unsigned char)c->text[c->pos] : -1;
}

/*
 * jansson's allocator. A document too large for the machine is an error, but the parser does not
 * survive a failed allocation: it loses characters and then its position. So while the parser runs,
 * its blocks are listed, and a failed allocation frees all of them and leaves the parser by
 * longjmp. Outside of parsing, values are small and callers do not check for NULL, so xmalloc
 * allocates them. Most blocks that the parser frees are among the last that it allocated: keys,
 * buffers. They are freed at once. Any other block stays listed and is freed when the parse ends,
 * so that each free takes constant time; searching the whole list would make the clean-up after a
 * syntax error quadratic. The deferred memory is bounded by the memory of the values: it consists
 * of outgrown tables (together smaller than the tables that replaced them) and the keys of lists
 * and objects. Blocks of LARGE_BLOCK bytes or more have a separate list, which is short enough to
 * be searched.
 *
 * Invariant: `small` and `large` list every block of the parse that is not freed yet; `deferred`
 * lists those of `small` that the parser has asked to free. A running parser frees its own blocks
 * only. Blocks have no header: other code frees values in any thread at any time, and frees the
 * text of json_dumps with free().
 */
enum { RECENT_BLOCKS = 8 }; /* a member, its value and its key are 4 blocks or fewer */
static const size_t LARGE_BLOCK = (size_t)1 << 20;

struct block_list {
    void **v;
    size_t n, cap;
};
static _Thread_local struct parse {
    bool running, out_of_memory;
    struct block_list small, large, deferred;
    jmp_buf out;
} parse;

static void blocks_free(struct block_list *b) {
    for (size_t i = 0; i < b->n; i++) free(b->v[i]);
    free(b->v);
    *b = (struct block_list){0};
}

static _Noreturn void parse_out_of_memory(void) {
    blocks_free(&parse.small);
    blocks_free(&parse.large);
    parse.deferred.n = 0; /* its blocks were in `small` too */
    parse.out_of_memory = true;
    longjmp(parse.out, 1);
}

/* Reserves room for one more block. */
static void blocks_reserve(struct block_list *b) {
    if (b->n < b->cap) return;
    size_t cap = MAX(2 * b->cap, (size_t)1024);
    void **v = realloc(b->v, cap * sizeof(*v));
    if (!v) parse_out_of_memory();
    b->v = v;
    b->cap = cap;
}

/* Frees the block if it is among the last n; returns whether it was. */
static bool blocks_free_recent(struct block_list *b, void *p, size_t n) {
    for (size_t i = b->n, end = i - MIN(i, n); i-- > end;)
        if (b->v[i] == p) {
            b->v[i] = b->v[--b->n];
            free(p);
            return true;
        }
    return false;
}

static bool block_is_large(void *p) {
    return malloc_usable_size(p) >= LARGE_BLOCK;
}

static void *parse_malloc(size_t size) {
    if (!parse.running) return xmalloc(size);
    struct block_list *b = size >= LARGE_BLOCK ? &parse.large : &parse.small;
    blocks_reserve(b);
    void *p = malloc(size);
    if (!p) parse_out_of_memory();
    return b->v[b->n++] = p;
}

static void parse_free(void *p) {
    if (!parse.running) {
        free(p);
    } else if (p && !blocks_free_recent(&parse.small, p, RECENT_BLOCKS) &&
               !(block_is_large(p) && blocks_free_recent(&parse.large, p, SIZE_MAX))) {
        blocks_reserve(&parse.deferred);
        parse.deferred.v[parse.deferred.n++] = p;
    }
}

__attribute__((constructor)) static void allocator_init(void) {
    json_set_alloc_funcs(parse_malloc, parse_free);
}

static json_t *jansson_parse(const char *text, size_t len, size_t flags, json_error_t *je) {
    json_t *volatile v = NULL;
    parse = (struct parse){.running = true};
    if (setjmp(parse.out) == 0)
        v = json_loadb(text, len, flags | JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK, je);
    parse.running = false;
    free(parse.small.v);
    free(parse.large.v);
    blocks_free(&parse.deferred);
    return v;
}

/* Replaces those of jansson's messages that name its flags, or that do not help to find the place
 * in the input. */
static void message_reword(const char *text, char *out, size_t size) {
    static const char *const replacements[][2] = {
        {"\\u0000 is not allowed", "a string holds the character U+0000, which is not accepted"},
        {"NUL byte in object key", "a key holds the character U+0000, which is not accepted"},
        {"invalid Unicode", "a '\\u' escape is half of a surrogate pair without its other half"},
        {"maximum parsing depth", "lists and objects are nested more than 2048 deep"},
    };
    const char *near = strstr(text, " near ");
    for (size_t i = 0; i < ARRAY_LEN(replacements); i++)
        if (strncmp(text, replacements[i][0], strlen(replacements[i][0])) == 0) {
            snprintf(out, size, "%s%s", replacements[i][1], near ? near : "");
            return;
        }
    snprintf(out, size, "%s", text);
}

/* Parses the value at the cursor and moves the cursor past it. */
static json_t *cursor_value(struct json_cursor *c, bool allow_duplicate_keys, struct error *err) {
    json_error_t je;
    size_t len = MIN(c->len - c->pos, (size_t)INT32_MAX); /* jansson counts positions in an int */
    json_t *v = jansson_parse(c->text + c->pos, len,
                              allow_duplicate_keys ? 0 : JSON_REJECT_DUPLICATES, &je);
    if (v) {
        cursor_advance(c, (size_t)je.position);
        return v;
    }
    if (parse.out_of_memory) {
        error_set(err, ERR_MEMORY,
                  "out of memory: cannot hold the values of '%s', %zu bytes of JSON", c->what,
                  c->len);
        return NULL;
    }
    char message[2 * JSON_ERROR_TEXT_LENGTH];
    message_reword(je.text, message, sizeof(message));
    int line = c->line + MAX(je.line, 1) - 1;
    int column = MAX(je.column, 1) + (line == c->line ? c->column - 1 : 0);
    if (line == c->line) {
        error_set(err, ERR_FORMAT, "'%s', line %d, column %d: %s", c->what, line, column, message);
    } else {
        error_set(err, ERR_FORMAT,
                  "'%s', line %d, column %d: %s (in the value that begins on line %d)", c->what,
                  line, column, message, c->line);
    }
    return NULL;
}

static int cursor_error(const struct json_cursor *c, const char *problem, struct error *err) {
    return error_set(err, ERR_FORMAT, "'%s', line %d, column %d: %s", c->what, c->line, c->column,
                     problem);
}

static json_t *text_parse(const char *text, size_t len, const char *what, bool allow_duplicate_keys,
                          struct error *err) {
    struct json_cursor c = cursor_init(what, text, len);
    if (cursor_peek(&c) < 0) {
        error_set(err, ERR_FORMAT, "'%s' is empty, a JSON value was expected", what);
        return NULL;
    }
    json_t *v = cursor_value(&c, allow_duplicate_keys, err);
    if (v && cursor_peek(&c) >= 0) {
        cursor_error(&c, "the JSON value has ended, but more text follows", err);
        json_decref(v);
        return NULL;
    }
    return v;
}

json_t *json_parse(const char *text, size_t len, const char *what, struct error *err) {
    return text_parse(text, len, what, false, err);
}

/*
 * The memory cost of a value during parsing: malloc's block for each struct of jansson (list 48 +
 * 80 for its first 8 items, object 80 + 144 for its first 8 buckets, member 64, number 32, text 48
 * + 32), the slots in lists that double (up to 32 bytes per item, 64 per member), and 24 bytes of
 * `parse` per block. A string's bytes are in the value, in the key's copy and in the lexer's
 * buffer.
 */
enum {
    COST_FIXED = 32 << 10,
    COST_VALUE = 88, /* a number, with its slot */
    COST_LIST = 176,
    COST_OBJECT = 272,
    COST_TEXT = 128,
    COST_MEMBER = 128,
    COST_CHARACTER = 3,
};

struct parse_cost {
    int depth, max_depth;
    size_t cost;
};

/* The opening quote is at text[i]; returns the position of the closing one, or len. */
static size_t string_skip(const char *text, size_t len, size_t i) {
    for (i++; i < len && text[i] != '"'; i++)
        if (text[i] == '\\') i++;
    return MIN(i, len);
}

static struct parse_cost cost_measure(const char *text, size_t len) {
    struct parse_cost m = {.cost = COST_FIXED + COST_VALUE};
    for (size_t i = 0, start; i < len; i++) {
        switch (text[i]) {
        case '"':
            start = i;
            i = string_skip(text, len, i);
            m.cost += COST_TEXT + COST_CHARACTER * (i - start);
            break;
        case '[':
        case '{':
            m.cost += text[i] == '[' ? COST_LIST : COST_OBJECT;
            m.depth++;
            m.max_depth = MAX(m.max_depth, m.depth);
            break;
        case ']':
        case '}':
            m.depth--;
            break;
        case ',':
            m.cost += COST_VALUE;
            break;
        case ':':
            m.cost += COST_MEMBER;
            break;
        default:
            break;
        }
    }
    return m;
}

size_t json_parse_memory(const char *text, size_t len) {
    return cost_measure(text, len).cost;
}

const struct json_limits json_request_limits = {.depth = 100, .cost = (size_t)256 << 20};

json_t *json_parse_limited(const char *text, size_t len, const char *what,
                           struct json_limits *budget, struct error *err) {
    struct parse_cost m = cost_measure(text, len);
    if (m.max_depth > budget->depth) {
        error_set(err, ERR_MISMATCH, "the JSON of '%s' is nested more than %d deep", what,
                  budget->depth);
        return NULL;
    }
    if (m.cost > budget->cost) {
        error_set(
            err, ERR_MISMATCH,
            "the JSON of '%s' has too many values: they may take %zu MB of memory, and %zu MB "
            "are left for them",
            what, m.cost >> 20, budget->cost >> 20);
        return NULL;
    }
    budget->cost -= m.cost;
    return text_parse(text, len, what, budget->allow_duplicate_keys, err);
}

json_t *json_parse_file(const char *path, struct error *err) {
    struct buf b = {0};
    json_t *v = NULL;
    if (file_read(path, JSON_FILE_LIMIT, &b, err) == OK) v = json_parse(b.data, b.len, path, err);
    buf_release(&b);
    return v;
}

char *json_canonical(const json_t *v) {
    char *text = json_dumps(v, JSON_SORT_KEYS | JSON_COMPACT | JSON_ENCODE_ANY);
    CHECK(text != NULL);
    return text;
}

json_t *json_from_path(const char *path) {
    json_t *v = json_string(path);
    return v ? v : json_null();
}

static int value_visit(struct json_cursor *c, json_file_each_fn fn, void *ctx, struct error *err) {
    int line = c->line;
    json_t *v = cursor_value(c, false, err);
    if (!v) return err->code;
    int rc = fn(ctx, v, line, err);
    json_decref(v);
    return rc;
}

/* Whether the array at the cursor is the file's only value: only white space follows its closing
 * bracket. An array that is not closed counts as the only value too, so that array_walk reports the
 * error at its position. Strings may hold brackets. */
static bool array_is_whole(struct json_cursor c) {
    int depth = 0;
    bool in_string = false;
    for (size_t i = c.pos; i < c.len; i++) {
        char ch = c.text[i];
        if (in_string) {
            if (ch == '\\') {
                i++;
            } else if (ch == '"') {
                in_string = false;
            }
        } else if (ch == '"') {
            in_string = true;
        } else if (ch == '[' || ch == '{') {
            depth++;
        } else if ((ch == ']' || ch == '}') && --depth == 0) {
            c.pos = i + 1;
            return cursor_peek(&c) < 0;
        }
    }
    return true;
}

static int array_open_error(const struct json_cursor *c, struct error *err) {
    return cursor_error(c, "the array is not closed", err);
}

static int array_walk(struct json_cursor *c, json_file_each_fn fn, void *ctx, struct error *err) {
    cursor_advance(c, 1);
    if (cursor_peek(c) == ']') return OK;
    for (;;) {
        int byte = cursor_peek(c);
        if (byte < 0) return array_open_error(c, err);
        if (byte == ']') return cursor_error(c, "a value is expected after ','", err);
        int rc = value_visit(c, fn, ctx, err);
        if (rc != OK) return rc;
        byte = cursor_peek(c);
        if (byte == ']') return OK;
        if (byte < 0) return array_open_error(c, err);
        if (byte != ',')
            return cursor_error(c, "',' or ']' is expected after an array's value", err);
        cursor_advance(c, 1);
    }
}

static int cursor_walk(struct json_cursor *c, json_file_each_fn fn, void *ctx, struct error *err) {
    if (cursor_peek(c) == '[' && array_is_whole(*c)) return array_walk(c, fn, ctx, err);
    while (cursor_peek(c) >= 0) {
        int rc = value_visit(c, fn, ctx, err);
        if (rc != OK) return rc;
    }
    return OK;
}

int json_file_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err) {
    struct stat st;
    struct file_map m = {0};
    struct buf b = {0};
    bool mapped = stat(path, &st) == 0 && S_ISREG(st.st_mode); /* a pipe is read whole */
    int rc = mapped ? file_map_open(&m, path, err) : file_read(path, JSON_FILE_LIMIT, &b, err);
    if (rc == OK) {
        const char *text = mapped ? (const char *)m.data : b.data;
        struct json_cursor c = cursor_init(path, text, mapped ? m.size : b.len);
        rc = cursor_walk(&c, fn, ctx, err);
    }
    file_map_close(&m);
    buf_release(&b);
    return rc;
}

void buf_add_json_line(struct buf *b, json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT);
    CHECK(text != NULL);
    buf_printf(b, "%s\n", text);
    free(text);
    json_decref(v);
}

json_t *json_string_lossy(const char *text, size_t n) {
    struct buf b = {0};
    while (n > 0) {
        const uint8_t *bad = u8_check((const uint8_t *)text, n);
        size_t good = bad ? (size_t)((const char *)bad - text) : n;
        buf_add(&b, text, good);
        if (!bad) break;
        int skip = u8_mblen(bad, n - good);
        buf_puts(&b, "\xEF\xBF\xBD");
        good += (size_t)MAX(skip, 1);
        text += good;
        n -= good;
    }
    json_t *v = json_stringn(b.data ? b.data : "", b.len);
    buf_release(&b);
    return v;
}

const char *json_get_string(const json_t *v, const char *key) {
    const char *text = json_string_value(json_object_get(v, key));
    return text ? text : "";
}

double json_get_number(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

bool json_is_string_array(const json_t *v) {
    size_t i;
    const json_t *text;
    json_array_foreach (v, i, text)
        if (!json_is_string(text)) return false;
    return json_is_array(v);
}
