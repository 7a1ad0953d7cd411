/*
 * memory_budget: a limit on the memory of all running requests; memory is reserved before it is
 * used.
 *
 * A reservation belongs to an owner (an exchange or a generation) and is released as a whole when
 * the reply is sent, not when the handler returns. Any thread may call.
 */
#ifndef SHOAL_SERVE_MEMORY_BUDGET_H
#define SHOAL_SERVE_MEMORY_BUDGET_H

#include "base/base.h"

struct memory_budget;
struct memory_budget_stats {
    size_t limit_bytes, used, peak; /* bytes */
    int owners;
    uint64_t refused;
};

/* limit: bytes for all owners; one owner may have half of them. */
struct memory_budget *memory_budget_new(size_t limit);
void memory_budget_free(struct memory_budget *b);
/* Bytes that one owner may have. */
size_t memory_budget_owner_max(const struct memory_budget *b);
/* Reserves `bytes` more for the owner. ERR_STATE: they do not fit now; ERR_USAGE: they never fit.
 * On an error nothing is reserved. */
int memory_budget_reserve(struct memory_budget *b, const void *owner, size_t bytes,
                          struct error *err);
/* Sets the owner's reservation to `bytes` in total. An error leaves the reservation unchanged; the
 * codes are those of memory_budget_reserve. */
int memory_budget_set(struct memory_budget *b, const void *owner, size_t bytes, struct error *err);
size_t memory_budget_reserved(struct memory_budget *b, const void *owner);
/* Moves up to `bytes` of a reservation from one owner to another. */
void memory_budget_transfer(struct memory_budget *b, const void *from, const void *to,
                            size_t bytes);
/* Releases the whole reservation of the owner, if it has one. */
void memory_budget_release(struct memory_budget *b, const void *owner);
struct memory_budget_stats memory_budget_stats(struct memory_budget *b);

#endif
