/*
 * snapshot: undoes updates. A snapshot has room for the parameters and the optimizer state of all
 * adapters; adapters are saved and restored one at a time. Gradients are not included.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

struct trainer_snapshot {
    struct param_group *groups; /* [n_groups] */
    uint8_t *bytes;             /* for each tensor its parameters, then its optimizer state */
    size_t size;                /* size of `bytes` */
};

static size_t tensor_bytes(const struct trainer *t, int i) {
    return (size_t)t->tensors[i].n * sizeof(float);
}

struct trainer_snapshot *trainer_snapshot_new(const struct trainer *t) {
    struct trainer_snapshot *s = xcalloc(1, sizeof *s);
    size_t size = 0;
    for (int i = 0; i < t->n_tensors; i++) size += tensor_bytes(t, i) + t->moments[i].bytes;
    s->size = size;
    s->groups = xcalloc((size_t)t->n_groups, sizeof *s->groups);
    s->bytes = xmalloc(size);
    return s;
}

size_t trainer_snapshot_bytes(const struct trainer_snapshot *s) {
    return s->size;
}

/* Copies adapter i's tensors and their optimizer state from the trainer to the snapshot, or with
 * `restore` from the snapshot to the trainer. */
static void adapter_copy(const struct trainer_snapshot *s, const struct trainer *t, int i,
                         bool restore) {
    uint8_t *p = s->bytes;
    int first = t->groups[i].first_tensor, end = first + t->groups[i].n_tensors;
    for (int k = 0; k < end; k++) {
        uint8_t *w = (uint8_t *)t->tensors[k].w, *m = t->moments[k].data, *p_m;
        size_t n = tensor_bytes(t, k), n_m = t->moments[k].bytes;
        p_m = p + n;
        if (k >= first) {
            memcpy(restore ? w : p, restore ? p : w, n);
            memcpy(restore ? m : p_m, restore ? p_m : m, n_m);
        }
        p = p_m + n_m;
    }
}

void trainer_snapshot_save(struct trainer_snapshot *s, const struct trainer *t, int i) {
    adapter_copy(s, t, i, false);
    s->groups[i] = t->groups[i];
}

void trainer_snapshot_restore(const struct trainer_snapshot *s, struct trainer *t, int i) {
    adapter_copy(s, t, i, true);
    t->groups[i].updates = s->groups[i].updates;
    t->derived_stale = true;
}

void trainer_snapshot_free(struct trainer_snapshot *s) {
    if (!s) return;
    free(s->groups);
    free(s->bytes);
    free(s);
}
