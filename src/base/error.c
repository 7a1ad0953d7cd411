/*
 * error: error messages, checked memory, arenas and growing byte strings.
 *
 * It does not log or translate: it makes a message, and the code that handles the error shows it.
 * Memory comes in two kinds. Sizes that a file, a model or an option determines are allocated with
 * the try_ functions, which return an error. If a small allocation fails, the process ends, because
 * no caller could continue without it. A server keeps an emergency reserve for that case: the
 * reserve is freed when the system refuses memory, and the allocation is tried again.
 *
 * Invariant: err->text is always NUL-terminated UTF-8 (if its inputs were), never cut inside a
 * character, and may be a %s argument of error_set on the same err.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unistr.h>

/* Copies the part that fits; a cut text ends in "..." after a whole character. */
static void error_store(struct error *err, const char *text) {
    size_t len = strlen(text), room = sizeof(err->text) - 1;
    if (len <= room) {
        memmove(err->text, text, len + 1);
        return;
    }
    size_t cut = room - 3;
    while (cut > 0 && ((unsigned char)text[cut] & 0xC0) == 0x80) cut--;
    memmove(err->text, text, cut);
    memcpy(err->text + cut, "...", 4);
}

static _Noreturn void exit_out_of_memory(size_t size) {
    fprintf(stderr, "shoal: out of memory: cannot allocate %zu bytes\n", size);
    exit(1);
}

/* The emergency reserve: a block that is never written, so it takes address space and no pages. */
static struct {
    _Atomic(void *) block;
    atomic_size_t size; /* 0: the process keeps no reserve */
} reserve;

void memory_reserve_set(size_t size) {
    atomic_store(&reserve.size, size);
    if (size == 0) free(atomic_exchange(&reserve.block, NULL));
    memory_is_low();
}

bool memory_is_low(void) {
    size_t size = atomic_load(&reserve.size);
    void *expected = NULL;
    if (size == 0 || atomic_load(&reserve.block)) return false;
    void *block = malloc(size);
    if (!block) return true;
    if (!atomic_compare_exchange_strong(&reserve.block, &expected, block)) free(block);
    return false;
}

/* Frees the reserve; returns false if it was missing. */
static bool reserve_free(void) {
    void *block = atomic_exchange(&reserve.block, NULL);
    free(block);
    return block != NULL;
}

static void *alloc_try(void *p, size_t n, size_t size, bool zeroed) {
    return zeroed ? calloc(n, size) : realloc(p, size);
}

/* realloc (calloc if `zeroed`). If it fails and there is a reserve, the reserve is freed. While the
 * reserve is missing, the allocation is repeated for up to TRIES pauses. Meanwhile other threads
 * finish their work, free its memory and get no new work. */
static void *alloc_with_reserve(void *p, size_t n, size_t size, bool zeroed) {
    enum { TRIES = 100, PAUSE = 50000 /* microseconds */ };
    void *q = alloc_try(p, n, size, zeroed);
    for (int i = 0; !q && i < TRIES && atomic_load(&reserve.size); i++) {
        if (!reserve_free()) usleep(PAUSE);
        q = alloc_try(p, n, size, zeroed);
    }
    return q;
}

__attribute__((format(printf, 1, 0))) static char *text_format(const char *fmt, va_list ap) {
    va_list copy;
    fmt = translate(fmt);
    va_copy(copy, ap);
    int n = vsnprintf(NULL, 0, fmt, copy);
    va_end(copy);
    CHECK(n >= 0);
    char *text = xmalloc((size_t)n + 1);
    vsnprintf(text, (size_t)n + 1, fmt, ap);
    return text;
}

int error_set(struct error *err, int code, const char *fmt, ...) {
    CHECK(err != NULL && code < 0);
    va_list ap;
    va_start(ap, fmt);
    char *text = text_format(fmt, ap);
    va_end(ap);
    err->code = code;
    error_store(err, text);
    free(text);
    return code;
}

int error_wrap(struct error *err, const char *fmt, ...) {
    CHECK(err != NULL && err->code < 0);
    va_list ap;
    va_start(ap, fmt);
    char *context = text_format(fmt, ap);
    va_end(ap);
    char *text = xasprintf("%s: %s", context, err->text);
    error_store(err, text);
    free(text);
    free(context);
    return err->code;
}

int error_errno(struct error *err, const char *fmt, ...) {
    int saved = errno;
    va_list ap;
    va_start(ap, fmt);
    char *context = text_format(fmt, ap);
    va_end(ap);
    int code = saved == ENOENT || saved == ENOTDIR ? ERR_MISSING : ERR_IO;
    error_set(err, code, "%s: %s", context, strerrordesc_np(saved) ? strerrordesc_np(saved) : "?");
    free(context);
    return code;
}

const char *error_name(int code) {
    static const char *const names[] = {"ok",     "usage",   "io",    "format", "mismatch",
                                        "memory", "missing", "state", "numeric"};
    return code <= 0 && -code < (int)ARRAY_LEN(names) ? names[-code] : "unknown";
}

_Noreturn void check_failed(const char *file, int line, const char *what) {
    fprintf(stderr, "shoal: %s:%d: assertion failed: %s\n", file, line, what);
    fflush(stderr);
    abort();
}

/* Sets `err` and returns NULL; ends the process if `err` is NULL. */
static void *out_of_memory_error(size_t size, struct error *err) {
    if (!err) exit_out_of_memory(size);
    error_set(err, ERR_MEMORY, "out of memory: cannot allocate %zu bytes", size);
    return NULL;
}

static size_t size_product(size_t n, size_t size) {
    return n > 0 && size > SIZE_MAX / n ? SIZE_MAX : n * size;
}

void *try_calloc(size_t n, size_t size, struct error *err) {
    n = MAX(n, (size_t)1);
    size = MAX(size, (size_t)1);
    void *p = err ? calloc(n, size) : alloc_with_reserve(NULL, n, size, true);
    return p ? p : out_of_memory_error(size_product(n, size), err);
}

void *try_realloc(void *p, size_t size, struct error *err) {
    size = MAX(size, (size_t)1);
    void *q = err ? realloc(p, size) : alloc_with_reserve(p, 1, size, false);
    return q ? q : out_of_memory_error(size, err);
}

void *xmalloc(size_t size) {
    void *p = alloc_with_reserve(NULL, 1, MAX(size, (size_t)1), false);
    if (!p) exit_out_of_memory(size);
    return p;
}

void *xcalloc(size_t n, size_t size) {
    return try_calloc(n, size, NULL);
}

void *xrealloc(void *p, size_t size) {
    return try_realloc(p, size, NULL);
}

char *xstrdup(const char *s) {
    size_t size = strlen(s) + 1;
    return memcpy(xmalloc(size), s, size);
}

bool text_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

int double_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

char *xstrndup(const char *s, size_t n) {
    size_t len = strnlen(s, n);
    char *copy = memcpy(xmalloc(len + 1), s, len);
    copy[len] = '\0';
    return copy;
}

char *xasprintf(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *text = text_format(fmt, ap);
    va_end(ap);
    return text;
}

char *xvasprintf(const char *fmt, va_list ap) {
    return text_format(fmt, ap);
}

/* A block is this header, then `size` bytes from `base` (aligned to 64 bytes). The first `used` of
 * them are allocated. */
struct arena_block {
    struct arena_block *next;
    uint8_t *base;
    size_t size, used;
};

enum { ARENA_ALIGN = 64, ARENA_BLOCK = 256 * 1024 };

/* Uses calloc, because large zeroed blocks come from the system as untouched pages and cost nothing
 * until used. NULL with `err` set if memory is exhausted. */
static struct arena_block *arena_block_new(size_t size, struct error *err) {
    CHECK(size <= SIZE_MAX - sizeof(struct arena_block) - ARENA_ALIGN);
    struct arena_block *b = try_calloc(1, sizeof(*b) + ARENA_ALIGN + size, err);
    if (!b) return NULL;
    memory_prefer_huge(b, sizeof(*b) + ARENA_ALIGN + size);
    uintptr_t start = (uintptr_t)(b + 1);
    b->base = (uint8_t *)(b + 1) + ((ARENA_ALIGN - start % ARENA_ALIGN) % ARENA_ALIGN);
    b->size = size;
    return b;
}

void *arena_try_alloc(struct arena *a, size_t size, struct error *err) {
    CHECK(size <= SIZE_MAX - ARENA_ALIGN);
    size = (MAX(size, 1) + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    struct arena_block *b = a->head;
    if (!b || size > b->size - b->used) {
        struct arena_block *new_block = arena_block_new(MAX(size, (size_t)ARENA_BLOCK), err);
        if (!new_block) return NULL;
        /* A block that one large request fills is inserted after the head, so that the free end
         * of the head remains usable. */
        if (b && size >= ARENA_BLOCK) {
            new_block->next = b->next;
            b->next = new_block;
        } else {
            new_block->next = b;
            a->head = new_block;
        }
        b = new_block;
    }
    void *p = b->base + b->used;
    b->used += size;
    a->used += size;
    return p;
}

void *arena_alloc(struct arena *a, size_t size) {
    return arena_try_alloc(a, size, NULL);
}

int arena_reserve(struct arena *a, size_t size, struct error *err) {
    if (a->head && size <= a->head->size - a->head->used) return OK;
    struct arena_block *b = arena_block_new(MAX(size, (size_t)ARENA_BLOCK), err);
    if (!b) return err->code;
    b->next = a->head;
    a->head = b;
    return OK;
}

char *arena_strdup(struct arena *a, const char *s) {
    size_t size = strlen(s) + 1;
    return memcpy(arena_alloc(a, size), s, size);
}

void arena_release(struct arena *a) {
    for (struct arena_block *b = a->head, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    *a = (struct arena){0};
}

void *bump_alloc(uint8_t *base, size_t *used, size_t size) {
    size_t offset = *used;
    *used = offset + ((size + 63) & ~(size_t)63);
    return base ? base + offset : NULL;
}

/* Reserves room for n more bytes and the NUL. Doubling keeps the total copying linear. */
int buf_reserve(struct buf *b, size_t n, struct error *err) {
    CHECK(n < SIZE_MAX / 2 - b->len);
    size_t need = b->len + n + 1;
    if (need <= b->cap) return OK;
    size_t cap = MAX(MAX(b->cap * 2, (size_t)64), need);
    char *data = try_realloc(b->data, cap, err);
    if (!data) return err->code;
    b->data = data;
    b->cap = cap;
    return OK;
}

void buf_add(struct buf *b, const void *p, size_t n) {
    buf_reserve(b, n, NULL);
    if (n) memcpy(b->data + b->len, p, n);
    b->len += n;
    b->data[b->len] = '\0';
}

void buf_puts(struct buf *b, const char *s) {
    buf_add(b, s, strlen(s));
}

void buf_add_shell_word(struct buf *b, const char *s) {
    buf_puts(b, "'");
    for (size_t n; (n = strcspn(s, "'")), s[n]; s += n + 1) {
        buf_add(b, s, n);
        buf_puts(b, "'\\''");
    }
    buf_puts(b, s);
    buf_puts(b, "'");
}

size_t utf8_complete_len(const char *text, size_t n) {
    size_t back = 0;
    while (back < n && back < 3 && ((uint8_t)text[n - 1 - back] & 0xC0) == 0x80) back++;
    if (back == n) return n;
    uint8_t lead = (uint8_t)text[n - 1 - back];
    size_t need = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    return need > back + 1 ? n - back - 1 : n;
}

void buf_add_sanitized(struct buf *b, const char *text, size_t len) {
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        bool shown = n > 0 && (c >= 0x20 || c == '\n' || c == '\t') && !(c >= 0x7f && c < 0xa0);
        if (shown)
            buf_add(b, p, (size_t)n);
        else
            buf_puts(b, "\xef\xbf\xbd");
        p += MAX(n, 1);
    }
}

void buf_printf(struct buf *b, const char *fmt, ...) {
    va_list ap, copy;
    va_start(ap, fmt);
    va_copy(copy, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    CHECK(n >= 0);
    buf_reserve(b, (size_t)n, NULL);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, copy);
    b->len += (size_t)n;
    va_end(copy);
    va_end(ap);
}

void buf_release(struct buf *b) {
    free(b->data);
    *b = (struct buf){0};
}
