/*
 * kv_cache: keys and values in pages that sequences share.
 *
 * A page holds KV_PAGE_SIZE positions of every layer and head, so that one table per sequence is
 * enough for all layers. The keys (or values) of one head in successive pages are adjacent in
 * memory:
 *
 *     [L][K heads][keys, values][n_pages] planes of rows [KV_PAGE_SIZE][E] elements
 *                                                | scales [KV_PAGE_SIZE] f16 (int8 only)
 *
 * Pages are allocated in ascending order as long as the cache has room, so attention mostly reads
 * one ascending stream of keys and one of values, which memory delivers at full speed.
 *
 * Invariants: (1) a page's reference count is the number of tables that contain it; (2) only pages
 * with reference count 1 are written (kv_cache_reserve copies a shared page first), so a sequence
 * never changes the positions of another sequence; (3) free pages form a list through `next_free`.
 * The system allocates the memory of a page when it is first accessed.
 *
 * The engine knows the tokens of a page and decides which sequences share it; forward.c computes
 * the keys and values.
 */
#define _GNU_SOURCE
#include "model/model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct kv_cache {
    struct kv_cache_options o;
    int32_t n_layers, n_heads, head_dim, table_len, n_free, first_free_page;
    size_t plane_bytes;    /* one head's keys or values in a page */
    size_t n_planes;       /* of a page */
    uint8_t *data;         /* [n_planes][n_pages][plane_bytes] */
    int32_t *ref_count;    /* [n_pages] number of tables that contain the page */
    int32_t *next_free;    /* [n_pages] list of free pages */
    int32_t *tables;       /* [n_slots][table_len] page numbers */
    int32_t *n_slot_pages; /* [n_slots] number of pages in the slot's table */
};

static size_t align_64(size_t n) {
    return (n + 63) & ~(size_t)63;
}

int32_t kv_cache_pages_for(int32_t positions) {
    return (positions + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE;
}

int kv_cache_dtype_parse(const char *name, enum numeric_class cls, enum dtype *out,
                         struct error *err) {
    if (strcmp(name, "auto") != 0) return dtype_parse(name, out, err);
    *out = cls == NUMERIC_FAST && kernels_get()->attention ? DTYPE_BF16 : DTYPE_F16;
    return OK;
}

static struct kv_cache kv_cache_shape(const struct model_config *c,
                                      const struct kv_cache_options *o) {
    struct kv_cache kv = {.o = *o,
                          .n_layers = c->n_layers,
                          .n_heads = c->n_kv_heads,
                          .head_dim = c->head_dim,
                          .table_len = kv_cache_pages_for(o->slot_len)};
    if (kv.o.n_pages == 0) kv.o.n_pages = o->n_slots * kv.table_len;
    size_t scales = o->elem == DTYPE_I8 ? KV_PAGE_SIZE * sizeof(uint16_t) : 0;
    kv.plane_bytes = align_64((size_t)(KV_PAGE_SIZE * c->head_dim) * dtype_size(o->elem) + scales);
    kv.n_planes = 2 * (size_t)c->n_kv_heads * (size_t)c->n_layers;
    return kv;
}

static size_t tables_bytes(const struct kv_cache *kv) {
    return ((size_t)kv->o.n_slots * (size_t)(kv->table_len + 1) + 2 * (size_t)kv->o.n_pages) *
           sizeof(int32_t);
}

static size_t data_bytes(const struct kv_cache *kv) {
    return kv->n_planes * (size_t)kv->o.n_pages * kv->plane_bytes + 64;
}

size_t kv_cache_bytes(const struct model_config *c, const struct kv_cache_options *o) {
    struct kv_cache kv = kv_cache_shape(c, o);
    return sizeof kv + tables_bytes(&kv) + data_bytes(&kv);
}

struct kv_cache *kv_cache_new(const struct model_config *c, const struct kv_cache_options *o) {
    CHECK(o->n_slots > 0 && o->slot_len > 0 && o->n_pages >= 0);
    struct kv_cache *kv = xcalloc(1, sizeof *kv);
    *kv = kv_cache_shape(c, o);
    kv->data = calloc(data_bytes(kv), 1);
    kv->tables = calloc(tables_bytes(kv), 1);
    if (!kv->data || !kv->tables) {
        kv_cache_free(kv);
        return NULL;
    }
    kv->n_slot_pages = kv->tables + (int64_t)o->n_slots * kv->table_len;
    kv->ref_count = kv->n_slot_pages + o->n_slots;
    kv->next_free = kv->ref_count + kv->o.n_pages;
    kv->n_free = kv->o.n_pages;
    for (int32_t i = 0; i < kv->o.n_pages; i++) kv->next_free[i] = i + 1;
    return kv;
}

void kv_cache_free(struct kv_cache *kv) {
    if (!kv) return;
    free(kv->data);
    free(kv->tables);
    free(kv);
}

static int32_t *page_table(const struct kv_cache *kv, int32_t slot) {
    CHECK(slot >= 0 && slot < kv->o.n_slots);
    return kv->tables + (int64_t)slot * kv->table_len;
}

static uint8_t *plane_data(const struct kv_cache *kv, size_t plane, int32_t page) {
    return (uint8_t *)(((uintptr_t)kv->data + 63) & ~(uintptr_t)63) +
           (plane * (size_t)kv->o.n_pages + (size_t)page) * kv->plane_bytes;
}

static int32_t page_alloc(struct kv_cache *kv) {
    int32_t page = kv->first_free_page;
    kv->first_free_page = kv->next_free[page];
    kv->n_free--;
    kv->ref_count[page] = 1;
    return page;
}

static void page_unref(struct kv_cache *kv, int32_t page) {
    if (--kv->ref_count[page] > 0) return;
    kv->next_free[page] = kv->first_free_page;
    kv->first_free_page = page;
    kv->n_free++;
}

void kv_cache_truncate(struct kv_cache *kv, int32_t slot, int32_t n) {
    int32_t *table = page_table(kv, slot), n_pages = kv_cache_pages_for(n);
    while (kv->n_slot_pages[slot] > n_pages) page_unref(kv, table[--kv->n_slot_pages[slot]]);
}

/* Returns the memory of pages [first, end) of one plane to the system. It reads as zeros
 * afterwards.
 */
static void plane_discard(struct kv_cache *kv, size_t plane, int32_t first, int32_t end) {
    const uintptr_t step = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)plane_data(kv, plane, first) + step - 1) / step * step,
              to = (uintptr_t)plane_data(kv, plane, end) / step * step;
    if (from < to) madvise((void *)from, to - from, MADV_DONTNEED); // advice, which may fail
}

void kv_cache_trim(struct kv_cache *kv) {
    for (int32_t first = 0, end; first < kv->o.n_pages; first = end + 1) {
        while (first < kv->o.n_pages && kv->ref_count[first] > 0) first++;
        for (end = first; end < kv->o.n_pages && kv->ref_count[end] == 0;) end++;
        for (size_t plane = 0; first < end && plane < kv->n_planes; plane++)
            plane_discard(kv, plane, first, end);
    }
}

/* Replaces a shared page that is about to be written by a private copy. */
static bool page_copy_on_write(struct kv_cache *kv, int32_t *page) {
    if (kv->ref_count[*page] == 1) return true;
    if (kv->n_free == 0) return false;
    int32_t copy = page_alloc(kv);
    for (size_t i = 0; i < kv->n_planes; i++)
        memcpy(plane_data(kv, i, copy), plane_data(kv, i, *page), kv->plane_bytes);
    page_unref(kv, *page);
    *page = copy;
    return true;
}

bool kv_cache_reserve(struct kv_cache *kv, int32_t slot, int32_t from, int32_t to) {
    int32_t *table = page_table(kv, slot), *len = &kv->n_slot_pages[slot];
    CHECK(from >= 0 && to <= kv->o.slot_len && kv_cache_pages_for(from) <= *len);
    for (int32_t i = from / KV_PAGE_SIZE; i < kv_cache_pages_for(to); i++) {
        if (i < *len) {
            if (!page_copy_on_write(kv, &table[i])) return false;
        } else {
            if (kv->n_free == 0) return false;
            table[(*len)++] = page_alloc(kv);
        }
    }
    return true;
}

void kv_cache_share_prefix(struct kv_cache *kv, int32_t from, int32_t to, int32_t n) {
    int32_t *source = page_table(kv, from), *target = page_table(kv, to),
            pages = kv_cache_pages_for(n);
    CHECK(pages <= kv->n_slot_pages[from]);
    if (from == to) return;
    kv_cache_truncate(kv, to, 0);
    for (int32_t i = 0; i < pages; i++) {
        target[i] = source[i];
        kv->ref_count[source[i]]++;
    }
    kv->n_slot_pages[to] = pages;
}

struct kv_cache_rows kv_cache_at(const struct kv_cache *kv, int32_t slot, int32_t page,
                                 int32_t layer, int32_t head, bool values) {
    const int32_t *table = kv->tables + (int64_t)slot * kv->table_len;
    size_t plane = ((size_t)layer * (size_t)kv->n_heads + (size_t)head) * 2 + values;
    uint8_t *data = plane_data(kv, plane, table[page]);
    size_t rows = (size_t)(KV_PAGE_SIZE * kv->head_dim) * dtype_size(kv->o.elem);
    return (struct kv_cache_rows){.v = data, .d = (uint16_t *)(void *)(data + rows)};
}

uint16_t kv_row_quantize(const float *x, int8_t *q, int64_t n) {
    uint16_t d = f32_to_f16(MIN(row_amax(x, n) / 127.0f, 65504.0f));
    i8_from_f32(x, f16_to_f32(d), q, n);
    return d;
}

void kv_cache_write(struct kv_cache *kv, int32_t slot, int32_t pos, int32_t layer, int32_t head,
                    bool values, const float *x) {
    struct kv_cache_rows r = kv_cache_at(kv, slot, pos / KV_PAGE_SIZE, layer, head, values);
    int64_t e = kv->head_dim, row = pos % KV_PAGE_SIZE;
    if (kv->o.elem == DTYPE_I8)
        r.d[row] = kv_row_quantize(x, (int8_t *)r.v + row * e, e);
    else
        dtype_from_f32(kv->o.elem, x, (char *)r.v + row * e * (int64_t)dtype_size(kv->o.elem), e);
}

/* Bytes of one row without its scale; *scale: bytes of the scale. */
static size_t row_bytes(const struct kv_cache *kv, size_t *scale) {
    *scale = kv->o.elem == DTYPE_I8 ? sizeof(uint16_t) : 0;
    return (size_t)kv->head_dim * dtype_size(kv->o.elem);
}

size_t kv_cache_position_bytes(const struct kv_cache *kv) {
    size_t scale, row = row_bytes(kv, &scale);
    return (row + scale) * 2 * (size_t)kv->n_heads * (size_t)kv->n_layers;
}

/* Copies rows and scales from the pages to `bytes`, or with `out` false in the other direction, in
 * the order of positions, layers, heads, keys before values. */
static void slot_copy(const struct kv_cache *kv, int32_t slot, int32_t n, uint8_t *bytes,
                      bool out) {
    size_t scale, row = row_bytes(kv, &scale);
    int32_t planes = kv->n_layers * kv->n_heads * 2;
    for (int32_t pos = 0; pos < n; pos++)
        for (int32_t i = 0; i < planes; i++) {
            struct kv_cache_rows r = kv_cache_at(kv, slot, pos / KV_PAGE_SIZE, i / 2 / kv->n_heads,
                                                 i / 2 % kv->n_heads, i % 2 == 1);
            uint8_t *v = (uint8_t *)r.v + (size_t)(pos % KV_PAGE_SIZE) * row;
            memcpy(out ? bytes : v, out ? v : bytes, row);
            bytes += row;
            if (scale == 0) continue;
            memcpy(out ? (void *)bytes : (void *)(r.d + pos % KV_PAGE_SIZE),
                   out ? (void *)(r.d + pos % KV_PAGE_SIZE) : (void *)bytes, scale);
            bytes += scale;
        }
}

void kv_cache_save(const struct kv_cache *kv, int32_t slot, int32_t n, void *out) {
    CHECK(kv_cache_pages_for(n) <= kv->n_slot_pages[slot]);
    slot_copy(kv, slot, n, out, true);
}

bool kv_cache_load(struct kv_cache *kv, int32_t slot, int32_t n, const void *in) {
    kv_cache_truncate(kv, slot, 0);
    if (!kv_cache_reserve(kv, slot, 0, n)) return false;
    slot_copy(kv, slot, n, (uint8_t *)(uintptr_t)in, false);
    return true;
}
