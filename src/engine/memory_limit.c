/*
 * memory_limit: a limit on the resident memory of the process, and the room that it leaves.
 *
 * The system reports the peak of the whole process (VmHWM), so the limit applies to the process.
 * Allocated memory counts before it is written: the order in which parts of the program first write
 * theirs does not matter. Nothing here refuses an allocation.
 *
 * Without a named limit, the limit is the memory in use at the start and the available memory. The
 * peak is not compared with it, because freed memory is available again.
 */
#define _GNU_SOURCE
#include "engine/engine.h"

#include <malloc.h>
#include <stdlib.h>

enum {
    PROGRAM_BYTES = 8 << 20, /* code, libraries, stacks; measured 5 to 7 MB */
    RESERVE_BYTES = 4 << 20, /* small allocations of the work, fragmentation, pages of a store */
    ROUNDING = 1 << 20,      /* two processes of one command differ by less */
};

/* Atomic: threads of a program that uses the library may train different models. */
static _Atomic size_t limit_bytes;
static _Atomic bool is_named;
static const char *_Atomic part_option; /* NULL: the limit is that of the whole process */

void memory_limit_set(size_t limit) {
    limit_bytes = limit;
    is_named = true;
    part_option = NULL;
}

int memory_limit_parse(const char *size, struct error *err) {
    size_t limit;
    if (size) {
        if (size_parse(size, &limit, err) != OK) return err->code;
        memory_limit_set(limit);
        return OK;
    }
    size_t usable = memory_usable();
    limit_bytes = usable < SIZE_MAX / 2 ? memory_used(NULL) + usable : 0;
    is_named = false;
    part_option = NULL;
    return OK;
}

void memory_limit_set_part(const struct model *m, size_t bytes, const char *option) {
    memory_limit_set(memory_used(m) + bytes);
    part_option = option;
}

size_t memory_limit_get(void) {
    return limit_bytes;
}

size_t memory_limit_named(void) {
    return is_named ? limit_bytes : 0;
}

/* Bytes of a matrix that is used in a mapped file. */
static size_t mapped_bytes(const struct model *m, const struct matrix *w) {
    const uint8_t *p = w->data;
    for (int i = 0; i < m->n_maps; i++)
        if (!w->packed && p >= m->maps[i].data && p < m->maps[i].data + m->maps[i].size)
            return (size_t)w->n * tensor_row_bytes(w->type, w->k);
    return 0;
}

static size_t model_mapped_bytes(const struct model *m) {
    size_t bytes = mapped_bytes(m, &m->embed) + mapped_bytes(m, &m->pos_embed);
    if (m->head.data != m->embed.data) bytes += mapped_bytes(m, &m->head);
    for (int l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) bytes += mapped_bytes(m, &m->layers[l].proj[p]);
    return bytes;
}

/* Memory that is allocated, or resident for another reason. Returns freed memory to the system. */
static size_t allocated_bytes(void) {
    size_t allocated = 0;
#ifdef __GLIBC__
    malloc_trim(0);
    struct mallinfo2 m = mallinfo2();
    allocated = m.uordblks + m.hblkhd;
#endif
    return MAX(allocated, process_memory("RssAnon"));
}

size_t memory_used(const struct model *m) {
    return allocated_bytes() + (m ? model_mapped_bytes(m) : 0) + PROGRAM_BYTES + RESERVE_BYTES;
}

size_t memory_room(const struct model *m) {
    if (!limit_bytes) return SIZE_MAX;
    size_t used = memory_used(m);
    return used < limit_bytes ? limit_bytes - used : 0;
}

static double mb(size_t bytes) {
    return (double)bytes / (1 << 20);
}

/* A limit that has room for `bytes`, in MB. */
static double limit_for(size_t bytes) {
    return mb(bytes + ROUNDING) + 0.5;
}

static int named_limit_check(size_t used, const struct memory_step *need, struct error *err) {
    size_t peak = process_memory("VmHWM"), all = MAX(used + need->least, peak);
    if (all <= limit_bytes) return OK;
    error_set(err, ERR_MEMORY,
              "a limit of '%.1f MB' is too small: %.1f MB are in use, and %s needs %.1f MB; raise "
              "--max-memory to %.0fM",
              mb(limit_bytes), mb(used), need->what, mb(need->least), limit_for(all));
    if (need->remedy) {
        char *first = xstrdup(err->text);
        error_set(err, ERR_MEMORY, "%s, or %s, with which %.0fM will do", first, need->remedy,
                  limit_for(MAX(used + need->least - need->saved, peak)));
        free(first);
    }
    return err->code;
}

/* As named_limit_check for a part of the process; the peak of the process is not its peak. */
static int part_check(const char *option, size_t left, const struct memory_step *need,
                      struct error *err) {
    if (need->least <= left) return OK;
    if (need->remedy)
        return error_set(err, ERR_MEMORY,
                         "'%.1f MB' of %s are left, but %s needs %.1f MB; raise %s by %.0fM, or "
                         "%s, with which %.0fM more will do",
                         mb(left), option, need->what, mb(need->least), option,
                         limit_for(need->least - left), need->remedy,
                         limit_for(need->least - MIN(need->least, left + need->saved)));
    return error_set(err, ERR_MEMORY,
                     "'%.1f MB' of %s are left, but %s needs %.1f MB; raise %s by %.0fM", mb(left),
                     option, need->what, mb(need->least), option, limit_for(need->least - left));
}

static int available_check(size_t left, const struct memory_step *need, struct error *err) {
    if (need->least <= left) return OK;
    if (need->remedy)
        return error_set(err, ERR_MEMORY,
                         "'%.1f MB' of memory are available, but %s needs %.0f MB; free memory, or "
                         "%s, with which %.0f MB will do",
                         mb(left), need->what, limit_for(need->least), need->remedy,
                         limit_for(need->least - need->saved));
    return error_set(err, ERR_MEMORY,
                     "'%.1f MB' of memory are available, but %s needs %.0f MB; free memory, or use "
                     "smaller weights, shorter texts or fewer threads",
                     mb(left), need->what, limit_for(need->least));
}

int memory_check(const struct model *m, const struct memory_step *need, struct error *err) {
    if (!limit_bytes) return OK;
    size_t used = memory_used(m), limit = limit_bytes;
    const char *option = part_option;
    if (option) return part_check(option, limit - MIN(used, limit), need, err);
    return is_named ? named_limit_check(used, need, err)
                    : available_check(limit - MIN(used, limit), need, err);
}

int engine_options_limit(const struct model *m, struct engine_options *o, struct error *err) {
    const struct memory_step need = {.what = "an engine for one sequence",
                                     .least = engine_least_bytes(&m->config, o)};
    size_t usable = limit_bytes ? memory_room(m) : memory_usable();
    int rc = limit_bytes ? memory_check(m, &need, err) : available_check(usable, &need, err);
    if (rc == OK) engine_options_fit(&m->config, o, usable);
    return rc;
}
