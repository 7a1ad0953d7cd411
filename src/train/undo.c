/*
 * undo: takes an update back. A copy of every adapter's parameters and of what the optimizer
 * remembers of them; what gradients had been added is gone, as after an update.
 */
#include "train/course.h"
#include "train/internal.h"

#include <stdlib.h>
#include <string.h>

struct undo {
    struct group *groups; /* [n_groups] */
    uint8_t *bytes;       /* each tensor's numbers, then its moments */
    size_t size;          /* of them */
};

static size_t tensor_bytes(const struct trainer *t, int i) {
    return (size_t)t->tensors[i].n * sizeof(float);
}

struct undo *undo_new(const struct trainer *t) {
    struct undo *u = xcalloc(1, sizeof *u);
    size_t size = 0;
    for (int i = 0; i < t->n_tensors; i++) size += tensor_bytes(t, i) + t->moments[i].bytes;
    u->size = size;
    u->groups = xcalloc((size_t)t->n_groups, sizeof *u->groups);
    u->bytes = xmalloc(size);
    return u;
}

size_t undo_bytes(const struct undo *u) {
    return u->size;
}

void undo_keep(struct undo *u, const struct trainer *t) {
    uint8_t *p = u->bytes;
    memcpy(u->groups, t->groups, (size_t)t->n_groups * sizeof *u->groups);
    for (int i = 0; i < t->n_tensors; i++) {
        memcpy(p, t->tensors[i].w, tensor_bytes(t, i));
        p += tensor_bytes(t, i);
        memcpy(p, t->moments[i].data, t->moments[i].bytes);
        p += t->moments[i].bytes;
    }
}

void undo_restore(const struct undo *u, struct trainer *t, int i) {
    const uint8_t *p = u->bytes;
    int first = t->groups[i].first, end = first + t->groups[i].n_tensors;
    for (int k = 0; k < end; k++) {
        if (k >= first) {
            memcpy(t->tensors[k].w, p, tensor_bytes(t, k));
            memcpy(t->moments[k].data, p + tensor_bytes(t, k), t->moments[k].bytes);
        }
        p += tensor_bytes(t, k) + t->moments[k].bytes;
    }
    t->groups[i].updates = u->groups[i].updates;
    t->stale = true;
}

void undo_free(struct undo *u) {
    if (!u) return;
    free(u->groups);
    free(u->bytes);
    free(u);
}
