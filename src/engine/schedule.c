/*
 * schedule: which rows of the engine a step runs.
 *
 * Every decoding request gets its row. The other rows go to the known tokens of prompts, suffixes
 * and choices: the request with the fewest remaining rows first, so that a short prompt does not
 * wait for a long one; but a quarter of the rows is for the oldest request, so that every prompt
 * ends. engine_set_prompt_rows limits known rows, above all while a request decodes.
 *
 * No result depends on the schedule.
 */
#define _GNU_SOURCE
#include "engine/internal.h"

#include <stdlib.h>

enum {
    OLDEST_SHARE = 4, /* the oldest prompt gets at least one row of OLDEST_SHARE */
    IDLE_ROWS = 128, /* limit while no request decodes: IDLE_ROWS, or IDLE_FACTOR times the limit */
    IDLE_FACTOR = 4, /* while one decodes; see docs/SPEED.md, "Long prompts" */
};

/* True if the last row of the current phase needs logits. */
static bool last_row_needs_logits(const struct engine_request *r) {
    if (r->state->phase != PHASE_PREFILL) return true;
    return request_generates(r) || (r->n_choices > 0 && r->suffix.n == 0);
}

/* Schedules up to `budget` rows of `r`, of which only as many may need logits as max_out allows. */
static void chunk_schedule(struct engine *e, struct engine_request *r, int32_t budget) {
    struct request_state *s = r->state;
    int32_t n = MIN(s->end - s->kv, budget), room = e->max_out - e->n_out, n_out = 0;
    if (s->phase == PHASE_CHOICES || (s->phase == PHASE_PREFILL && r->prompt_logprobs)) {
        n = n_out = MIN(n, room);
    } else if (n == s->end - s->kv && last_row_needs_logits(r)) {
        if (room > 0)
            n_out = 1;
        else
            n--;
    }
    if (n <= 0) return;
    e->chunks[e->n_chunks++] =
        (struct scheduled_chunk){.r = r, .n_rows = n, .n_out = n_out, .next = -1};
    e->n_rows += n;
    e->n_out += n_out;
}

/* The request has known rows that a step may run. A request that waits for its prefix source has
 * none yet. */
static bool has_known_rows(const struct request_state *s) {
    return s->phase != PHASE_DECODE && !s->prefix_source;
}

/* Schedules at most `budget` rows of a request. While its grammar mask is incomplete, the last
 * prompt row cannot run, because a token is sampled from it. */
static void known_rows_schedule(struct engine *e, struct engine_request *r, int32_t budget) {
    const struct request_state *s = r->state;
    chunk_schedule(e, r, s->mask_pending ? MIN(budget, s->end - s->kv - 1) : budget);
}

static int order_compare(const void *pa, const void *pb) {
    const struct prompt_order *a = pa, *b = pb;
    return a->left != b->left ? (a->left > b->left) - (a->left < b->left) : a->active - b->active;
}

/* Lists the requests with known rows in e->order, oldest first; *total receives their rows. */
static int32_t known_rows_list(struct engine *e, int64_t *total) {
    int32_t n = 0;
    *total = 0;
    for (int32_t i = 0; i < e->n_active; i++) {
        const struct request_state *s = e->active[i]->state;
        if (!has_known_rows(s)) continue;
        e->order[n++] = (struct prompt_order){.left = s->end - s->kv, .active = i};
        *total += s->end - s->kv;
    }
    return n;
}

/* Schedules at most `budget` known rows in total: first those of the oldest request, which are at
 * least a quarter, or what the others leave. */
static void prompts_schedule(struct engine *e, int32_t budget) {
    int64_t total;
    int32_t n = known_rows_list(e, &total), end = e->n_rows + budget;
    if (n == 0) return;
    int64_t others = total - e->order[0].left, share = (budget + OLDEST_SHARE - 1) / OLDEST_SHARE;
    known_rows_schedule(e, e->active[e->order[0].active], (int32_t)MAX(share, budget - others));
    if (total > budget) qsort(e->order + 1, (size_t)n - 1, sizeof *e->order, order_compare);
    for (int32_t i = 1; i < n && e->n_rows < end; i++)
        known_rows_schedule(e, e->active[e->order[i].active], end - e->n_rows);
}

/* Drops tokens of a decoding request whose sequence fills its context; those after them have to be
 * run again. */
static void context_shift(struct engine *e, struct engine_request *r) {
    struct request_state *s = r->state;
    struct engine_slot *slot = &e->slots[s->slot];
    int32_t n = (s->end - r->n_keep) / 2;
    r->n_dropped += n;
    s->end -= n;
    s->kv = r->n_keep;
    s->phase = PHASE_SHIFT;
    slot->n = s->kv;
    slot->n_known = MIN(slot->n_known, s->kv);
    kv_cache_truncate(forward_kv_cache(e->f), s->slot, s->kv);
}

static bool decode_is_ready(struct engine *e, struct engine_request *r) {
    struct request_state *s = r->state;
    if (s->phase != PHASE_DECODE || s->mask_pending) return false;
    if (r->context_len && s->end >= r->context_len) context_shift(e, r);
    return s->phase == PHASE_DECODE;
}

void step_schedule(struct engine *e) {
    bool any_mask_pending = false;
    e->n_chunks = e->n_rows = e->n_out = 0;
    for (int32_t i = 0; i < e->n_active && e->n_rows < e->o.max_rows; i++) {
        any_mask_pending |= e->active[i]->state->mask_pending;
        if (decode_is_ready(e, e->active[i])) chunk_schedule(e, e->active[i], 1);
    }
    int32_t limit = e->n_rows > 0 ? e->prompt_rows : MAX(IDLE_ROWS, IDLE_FACTOR * e->prompt_rows);
    prompts_schedule(e, MIN(limit, e->o.max_rows - e->n_rows));
    CHECK(e->n_rows > 0 || any_mask_pending);
}
