/*
 * offload: the f32 factors of an adapter in a mapped file instead of memory.
 *
 * The file has no name, so no other program changes it, and the system frees it when the process
 * ends, however it ends. The factors stay readable at their new address: reading one loads its
 * pages, and adapter_free_pages returns them. So a caller that forgets adapter_free_pages needs
 * more memory, and gets the same results.
 */
#define _GNU_SOURCE
#include "adapter/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t data_bytes(const struct adapter *a) {
    return a->n_data * sizeof *a->data;
}

/* Writes the data to a file in `dir`, and maps it. NULL: `err` is set. */
static float *data_map(const struct adapter *a, const char *dir, struct error *err) {
    float *mapped = MAP_FAILED;
    char *path = path_join(dir, "offloaded");
    int fd = file_open_unnamed(path, err);
    free(path);
    if (fd < 0) return NULL;
    if (file_write_at(fd, a->data, data_bytes(a), 0, err) == OK &&
        (mapped = mmap(NULL, data_bytes(a), PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        error_errno(err, "cannot map a file in '%s'", dir);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

void adapter_offload(struct adapter *a, const char *dir) {
    struct error err;
    if (a->is_offloaded || !a->data || a->magnitude || a->vocab_overrides) return;
    float *mapped = data_map(a, dir, &err);
    if (!mapped) {
        log_warn("%s: adapter '%.12s' stays in memory", err.text, a->hash);
        return;
    }
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        struct lora *lo = &a->loras[i];
        if (lo->r == 0) continue;
        lo->a = mapped + (lo->a - a->data);
        lo->b = mapped + (lo->b - a->data);
    }
    free(a->data);
    a->data = mapped;
    a->is_offloaded = true;
}

void adapter_free_pages(const struct adapter *a) {
    // advice: if it fails, the pages stay until the system needs them
    if (a->is_offloaded) madvise(a->data, data_bytes(a), MADV_DONTNEED);
}

void adapter_free_packs(struct adapter *a) {
    CHECK(a->data); // NULL after adapter_pack_only: no pack could be made again
    for (int e = 0; e < N_DTYPE; e++) {
        lora_pack_free(a->packs[e]);
        a->packs[e] = NULL;
    }
}

void adapter_data_free(struct adapter *a) {
    if (a->is_offloaded)
        munmap(a->data, data_bytes(a));
    else
        free(a->data);
    a->data = NULL;
    a->is_offloaded = false;
}
