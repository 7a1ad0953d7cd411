/*
 * grammar: the pushdown machine that reads bytes, and the mask of tokens it allows.
 *
 * A state is everything that the grammar may be doing after the bytes read: a set of configurations
 * (node, stacks). `stacks` is a set of return stacks, shared: it holds flags and frames (node to
 * return to, the stacks below), at most one frame a node, so it is a tree of stacks whose equal
 * parts are one. States and stacks are interned: equal ones have one id. Hence an ambiguous grammar
 * costs no more than its distinct futures, a state that comes back is found by its id, and a step
 * or a mask is computed once.
 *
 *     stacks 7: {return 4 → 1, return 9 → 5}     stacks 1: {bottom}     5: {return 2 → 1}
 *
 * Masks. The tokens are a trie in depth-first order; the walk follows it with one state a depth and
 * skips what is dead. States that differ only below their configurations' frames are served by one
 * *local* state, whose stacks are {unknown}: what it allows is allowed under any stacks, and only
 * tokens that read past its end (the cut ones) are walked again with the true state.
 *
 * Invariants: ids of stacks rise from bottom to top. A state other than 0 has a way to a whole
 * text. What a step gives depends on what the state means, never on ids or on what is cached; where
 * limits cut, they drop alternatives in that same order, so replies stay valid.
 */
#include "engine/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    STACKS_BOTTOM = 1,  /* flags and ids at once: stacks 1 is {bottom} */
    STACKS_UNKNOWN = 2, /* stacks 2 is {unknown} */
    STATE_DEAD = 0,
    ROW_NONE = -1,
    STEP_LIMIT = 1 << 15,  /* configurations looked at in one step */
    MERGE_LIMIT = 1 << 14, /* frames looked at by the unions of one step */
    N_MASKS = 256,
    MAX_GROUPS = 4, /* a state of more different stacks is walked whole */
};

struct frame {
    int32_t ret, below;
};
struct stacks {
    int32_t first, n; /* frames, by node */
    int32_t rest;     /* bytes of the shortest way down */
    int32_t flags;
};
struct config {
    int32_t node, stacks;
};
struct state {
    int32_t first, n; /* configurations, by node; all of them read */
    int32_t rest;
    int32_t row;   /* in rows: [n_classes] next states, -1 unknown; ROW_NONE: not made yet */
    int32_t mask;  /* in masks, or -1 */
    int32_t flags; /* STACKS_BOTTOM: a text ends here; STACKS_UNKNOWN: the frames below go on */
};

/* Growing arrays of plain values. */
#define POOL(type)                                                                                 \
    struct {                                                                                       \
        type *v;                                                                                   \
        int32_t n, cap;                                                                            \
    }
static void *pool_grow(void *v, int32_t *cap, int32_t need, size_t size) {
    CHECK(need >= 0 && need < INT32_MAX / 2);
    while (*cap < need) *cap = *cap ? 2 * *cap : 256;
    return xrealloc(v, (size_t)*cap * size);
}
#define POOL_ROOM(p, more)                                                                         \
    do {                                                                                           \
        if ((p)->n + (more) > (p)->cap)                                                            \
            (p)->v = pool_grow((p)->v, &(p)->cap, (p)->n + (more), sizeof *(p)->v);                \
    } while (0)

/* Open addressing from a hash to ids; the caller compares. */
struct id_table {
    int32_t *slots; /* id + 1 */
    uint64_t mask;
    int32_t n;
};

/* A map from pairs of ids that is emptied in no time. */
struct pair_entry {
    int32_t a, b, value;
    uint32_t epoch;
};
struct pair_map {
    struct pair_entry *v;
    uint32_t mask, n, epoch;
};

struct mask {
    int32_t state; /* -1: free */
    int32_t worst; /* the longest rest behind an allowed token */
    uint64_t used;
    uint32_t *bits;
    POOL(int32_t) cut; /* local masks: trie nodes where the way leads below the frames */
};

struct grammar_vocab {
    int32_t n_tokens, n_nodes, max_depth;
    uint8_t *byte;       /* [n_nodes], depth first */
    int32_t *depth;      /* [n_nodes] 0 for a first byte */
    int32_t *skip;       /* [n_nodes] the node behind the subtree */
    int32_t *parent;     /* [n_nodes] or -1 */
    int32_t *token_from; /* [n_nodes + 1] tokens that end at a node */
    int32_t *tokens;     /* by node */
    int32_t *node_of;    /* [n_tokens] or -1 */
};

struct grammar_machine {
    const struct grammar *g;
    const struct grammar_vocab *vocab;
    size_t max_bytes;
    POOL(struct frame) frames;
    POOL(struct stacks) stacks;
    POOL(struct config) configs;
    POOL(struct state) states;
    POOL(int32_t) rows;
    struct id_table stacks_table, states_table;
    POOL(int32_t) held; /* state of every slot, -1: a free slot */
    int32_t start;
    /* one step's scratch */
    POOL(struct config) todo, found;
    POOL(struct frame) merging;
    struct pair_map seen, merged;
    int32_t step_flags, n_merges;
    bool limited; /* for people: it decides nothing */
    /* masks */
    struct mask masks[N_MASKS];
    int32_t *path; /* [max_depth + 2] states of a walk */
    bool *open;    /* [max_depth + 2] the way has reached below the frames */
    uint64_t clock;
};

static uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

/* pairs */

/* Entries of an older epoch count as free; only when the counter wraps are they wiped. */
static void pair_map_clear(struct pair_map *m) {
    m->n = 0;
    if (++m->epoch == 0) {
        if (m->v) memset(m->v, 0, ((size_t)m->mask + 1) * sizeof *m->v);
        m->epoch = 1;
    }
}

static struct pair_entry *pair_map_slot(const struct pair_map *m, int32_t a, int32_t b) {
    uint32_t i = (uint32_t)mix((uint64_t)(uint32_t)a << 32 | (uint32_t)b, 1) & m->mask;
    while (m->v[i].epoch == m->epoch && (m->v[i].a != a || m->v[i].b != b)) i = (i + 1) & m->mask;
    return &m->v[i];
}

static void pair_map_grow(struct pair_map *m) {
    struct pair_map old = *m;
    m->mask = old.v ? 2 * old.mask + 1 : 63;
    m->v = xcalloc((size_t)m->mask + 1, sizeof *m->v);
    for (uint32_t i = 0; old.v && i <= old.mask; i++)
        if (old.v[i].epoch == m->epoch) *pair_map_slot(m, old.v[i].a, old.v[i].b) = old.v[i];
    free(old.v);
}

/* The pair's entry; *is_new when it was not there. Valid until the next call. */
static struct pair_entry *pair_map_get(struct pair_map *m, int32_t a, int32_t b, bool *is_new) {
    if (!m->v || 2 * m->n >= m->mask) pair_map_grow(m);
    struct pair_entry *e = pair_map_slot(m, a, b);
    *is_new = e->epoch != m->epoch;
    if (*is_new) {
        *e = (struct pair_entry){a, b, 0, m->epoch};
        m->n++;
    }
    return e;
}

/* interning */

static void id_table_put(struct id_table *t, uint64_t hash, int32_t id) {
    uint64_t i = hash & t->mask;
    while (t->slots[i]) i = (i + 1) & t->mask;
    t->slots[i] = id + 1;
    t->n++;
}

static void id_table_reset(struct id_table *t, uint64_t size) {
    free(t->slots);
    *t = (struct id_table){.slots = xcalloc(size, sizeof *t->slots), .mask = size - 1};
}

/* Lengths add up without bound as stacks grow: what is too long to count is GRAMMAR_NEVER, which no
 * reply has room for. */
static int32_t rest_sum(int32_t a, int32_t b) {
    return MIN(a + b, GRAMMAR_NEVER);
}

static uint64_t stacks_hash(const struct frame *v, int32_t n, int32_t flags) {
    uint64_t h = (uint64_t)flags;
    for (int32_t i = 0; i < n; i++)
        h = mix(h, (uint64_t)(uint32_t)v[i].ret << 32 | (uint32_t)v[i].below);
    return mix(h, (uint64_t)n);
}

static void stacks_table_grow(struct grammar_machine *m) {
    id_table_reset(&m->stacks_table, 2 * (m->stacks_table.mask + 1));
    for (int32_t i = 1; i < m->stacks.n; i++) {
        const struct stacks *s = &m->stacks.v[i];
        id_table_put(&m->stacks_table, stacks_hash(m->frames.v + s->first, s->n, s->flags), i);
    }
}

static int32_t stacks_intern(struct grammar_machine *m, const struct frame *v, int32_t n,
                             int32_t flags) {
    struct id_table *t = &m->stacks_table;
    uint64_t hash = stacks_hash(v, n, flags);
    for (uint64_t i = hash & t->mask; t->slots[i]; i = (i + 1) & t->mask) {
        const struct stacks *s = &m->stacks.v[t->slots[i] - 1];
        if (s->n == n && s->flags == flags &&
            (n == 0 || memcmp(m->frames.v + s->first, v, (size_t)n * sizeof *v) == 0))
            return t->slots[i] - 1;
    }
    struct stacks s = {.first = m->frames.n, .n = n, .flags = flags};
    s.rest = flags ? 0 : GRAMMAR_NEVER;
    for (int32_t i = 0; i < n; i++)
        s.rest = MIN(s.rest, rest_sum(m->g->rest[v[i].ret], m->stacks.v[v[i].below].rest));
    // the bytes of the way down add up frame by frame, so no state ever walks its stacks for them
    POOL_ROOM(&m->frames, n);
    if (n > 0) memcpy(m->frames.v + m->frames.n, v, (size_t)n * sizeof *v);
    m->frames.n += n;
    POOL_ROOM(&m->stacks, 1);
    m->stacks.v[m->stacks.n++] = s;
    id_table_put(t, hash, m->stacks.n - 1);
    if (2 * (uint64_t)t->n > t->mask) stacks_table_grow(m);
    return m->stacks.n - 1;
}

static uint64_t state_hash(const struct config *v, int32_t n, int32_t flags) {
    uint64_t h = (uint64_t)flags + 77;
    for (int32_t i = 0; i < n; i++)
        h = mix(h, (uint64_t)(uint32_t)v[i].node << 32 | (uint32_t)v[i].stacks);
    return mix(h, (uint64_t)n);
}

static void states_table_grow(struct grammar_machine *m) {
    id_table_reset(&m->states_table, 2 * (m->states_table.mask + 1));
    for (int32_t i = 1; i < m->states.n; i++) {
        const struct state *s = &m->states.v[i];
        id_table_put(&m->states_table, state_hash(m->configs.v + s->first, s->n, s->flags), i);
    }
}

static int32_t state_intern(struct grammar_machine *m, const struct config *v, int32_t n,
                            int32_t flags) {
    struct id_table *t = &m->states_table;
    if (n == 0 && !flags) return STATE_DEAD;
    uint64_t hash = state_hash(v, n, flags);
    for (uint64_t i = hash & t->mask; t->slots[i]; i = (i + 1) & t->mask) {
        const struct state *s = &m->states.v[t->slots[i] - 1];
        if (s->n == n && s->flags == flags &&
            (n == 0 || memcmp(m->configs.v + s->first, v, (size_t)n * sizeof *v) == 0))
            return t->slots[i] - 1;
    }
    struct state s = {m->configs.n, n, flags ? 0 : GRAMMAR_NEVER, ROW_NONE, -1, flags};
    for (int32_t i = 0; i < n; i++)
        s.rest = MIN(s.rest, rest_sum(m->g->rest[v[i].node], m->stacks.v[v[i].stacks].rest));
    POOL_ROOM(&m->configs, n);
    if (n > 0) memcpy(m->configs.v + m->configs.n, v, (size_t)n * sizeof *v);
    m->configs.n += n;
    POOL_ROOM(&m->states, 1);
    m->states.v[m->states.n++] = s;
    id_table_put(t, hash, m->states.n - 1);
    if (2 * (uint64_t)t->n > t->mask) states_table_grow(m);
    return m->states.n - 1;
}

/* one step */

/*
 * The union of two sets of stacks: frames of the same node are united below. Over the limit `a`
 * stands for the union: alternatives are lost, but what is left is right.
 */
static int32_t stacks_merge(struct grammar_machine *m, int32_t a, int32_t b) {
    bool is_new;
    if (a == b) return a;
    struct pair_entry *known = pair_map_get(&m->merged, a, b, &is_new);
    if (!is_new) return known->value;
    known->value = a;
    struct stacks x = m->stacks.v[a], y = m->stacks.v[b];
    if ((m->n_merges += 1 + x.n + y.n) > MERGE_LIMIT) {
        m->limited = true;
        return a;
    }
    // both lists are sorted by node: merge them, and unite below where a node is in both
    int32_t base = m->merging.n; // frames of this union lie above those of the callers
    for (int32_t i = 0, k = 0; i < x.n || k < y.n;) {
        struct frame f = i < x.n ? m->frames.v[x.first + i] : m->frames.v[y.first + k];
        if (i < x.n && k < y.n) {
            struct frame g = m->frames.v[y.first + k];
            if (f.ret == g.ret)
                f.below = stacks_merge(m, f.below, g.below), i++, k++;
            else if (f.ret < g.ret)
                i++;
            else
                f = g, k++;
        } else if (i < x.n) {
            i++;
        } else {
            k++;
        }
        POOL_ROOM(&m->merging, 1);
        m->merging.v[m->merging.n++] = f;
    }
    int32_t id = stacks_intern(m, m->merging.v + base, m->merging.n - base, x.flags | y.flags);
    m->merging.n = base;
    pair_map_get(&m->merged, a, b, &is_new)->value = id;
    return id;
}

/* Notes a configuration to follow, once. What has no way to an end is not worth following. */
static void step_visit(struct grammar_machine *m, int32_t node, int32_t stacks) {
    bool is_new;
    if (m->g->rest[node] >= GRAMMAR_NEVER) return;
    pair_map_get(&m->seen, node, stacks, &is_new);
    if (!is_new) return;
    if (m->todo.n >= STEP_LIMIT) {
        m->limited = true;
        return;
    }
    POOL_ROOM(&m->todo, 1);
    m->todo.v[m->todo.n++] = (struct config){node, stacks};
}

static void step_begin(struct grammar_machine *m) {
    pair_map_clear(&m->seen);
    pair_map_clear(&m->merged);
    m->todo.n = m->found.n = m->n_merges = m->step_flags = 0;
}

/* What the configuration leads to without reading. */
static void step_follow(struct grammar_machine *m, struct config c) {
    const struct grammar *g = m->g;
    if (g->is_end[c.node]) {
        struct stacks s = m->stacks.v[c.stacks];
        m->step_flags |= s.flags;
        for (int32_t i = 0; i < s.n; i++) {
            struct frame f = m->frames.v[s.first + i];
            step_visit(m, f.ret, f.below);
        }
    }
    for (int32_t k = g->edge_begin[c.node]; k < g->edge_begin[c.node + 1]; k++) {
        const struct edge *e = &g->edges[k];
        if (e->lo <= e->hi || g->rest[e->to] >= GRAMMAR_NEVER) continue;
        if (e->rule < 0) {
            step_visit(m, e->to, c.stacks);
        } else if (g->is_end[e->to]) { // a call at the end needs no frame: it returns to our caller
            step_visit(m, g->rules[e->rule].start, c.stacks);
        } else if (g->rest[g->rules[e->rule].start] < GRAMMAR_NEVER) {
            struct frame f = {e->to, c.stacks};
            step_visit(m, g->rules[e->rule].start, stacks_intern(m, &f, 1, 0));
        }
    }
}

/* Stable: configurations of one node are merged in the order in which they were found. */
static void configs_sort(struct config *v, struct config *scratch, int32_t n) {
    if (n <= 24) {
        for (int32_t i = 1, k; i < n; i++) {
            struct config c = v[i];
            for (k = i; k > 0 && v[k - 1].node > c.node; k--) v[k] = v[k - 1];
            v[k] = c;
        }
        return;
    }
    int32_t half = n / 2, a = 0, b = half, o = 0;
    configs_sort(v, scratch, half);
    configs_sort(v + half, scratch, n - half);
    while (a < half && b < n) scratch[o++] = v[b].node < v[a].node ? v[b++] : v[a++];
    while (a < half) scratch[o++] = v[a++];
    memcpy(v, scratch, (size_t)o * sizeof *v); // what is left of the second half is in its place
}

/* The state of what was visited. The list grows while it is gone through; first found, first
 * followed, so the order depends on the grammar and the stacks only. */
static int32_t step_end(struct grammar_machine *m) {
    for (int32_t i = 0; i < m->todo.n; i++) {
        struct config c = m->todo.v[i];
        step_follow(m, c);
        if (!m->g->reads[c.node]) continue;
        POOL_ROOM(&m->found, 1);
        m->found.v[m->found.n++] = c;
    }
    POOL_ROOM(&m->todo, m->found.n);
    configs_sort(m->found.v, m->todo.v, m->found.n);
    int32_t n = 0;
    for (int32_t i = 0; i < m->found.n; i++) {
        struct config c = m->found.v[i];
        if (n > 0 && m->found.v[n - 1].node == c.node)
            m->found.v[n - 1].stacks = stacks_merge(m, m->found.v[n - 1].stacks, c.stacks);
        else
            m->found.v[n++] = c;
    }
    return state_intern(m, m->found.v, n, m->step_flags);
}

/* The next state, worked out: state_next asks here once for each state and class of bytes. */
static int32_t state_compute(struct grammar_machine *m, int32_t state, uint8_t byte) {
    struct state s = m->states.v[state];
    step_begin(m);
    for (int32_t i = 0; i < s.n; i++) {
        struct config c = m->configs.v[s.first + i];
        for (int32_t k = m->g->edge_begin[c.node]; k < m->g->edge_begin[c.node + 1]; k++) {
            const struct edge *e = &m->g->edges[k];
            if (e->lo <= byte && byte <= e->hi) step_visit(m, e->to, c.stacks);
        }
    }
    return step_end(m);
}

/* The row of next states; most states of a walk are left by few bytes, and many are never left. */
static int32_t *state_row(struct grammar_machine *m, int32_t state) {
    struct state *s = &m->states.v[state];
    if (s->row == ROW_NONE) {
        POOL_ROOM(&m->rows, m->g->n_classes);
        s->row = m->rows.n;
        m->rows.n += m->g->n_classes;
        memset(m->rows.v + s->row, 0xFF, (size_t)m->g->n_classes * sizeof *m->rows.v);
    }
    return m->rows.v + s->row;
}

/* The state after a byte. */
static inline int32_t state_next(struct grammar_machine *m, int32_t state, uint8_t byte) {
    if (state == STATE_DEAD) return STATE_DEAD;
    int32_t *row = state_row(m, state), class = m->g->class_of[byte];
    if (row[class] >= 0) return row[class];
    int32_t next = state_compute(m, state, byte);
    state_row(m, state)[class] = next;
    return next;
}

static int32_t state_start(struct grammar_machine *m) {
    step_begin(m);
    step_visit(m, m->g->rules[m->g->root].start, STACKS_BOTTOM);
    return step_end(m);
}

/* the machine and its memory */

/* Empty tables with the ids that have names: stacks 1 and 2, state 0. */
static void machine_clear(struct grammar_machine *m) {
    m->frames.n = m->configs.n = m->rows.n = 0;
    m->stacks.n = m->states.n = 0;
    id_table_reset(&m->stacks_table, 256);
    id_table_reset(&m->states_table, 256);
    POOL_ROOM(&m->stacks, 1);
    m->stacks.v[m->stacks.n++] = (struct stacks){.rest = GRAMMAR_NEVER};
    POOL_ROOM(&m->states, 1);
    m->states.v[m->states.n++] = (struct state){.rest = GRAMMAR_NEVER, .row = ROW_NONE, .mask = -1};
    CHECK(stacks_intern(m, NULL, 0, STACKS_BOTTOM) == STACKS_BOTTOM);
    CHECK(stacks_intern(m, NULL, 0, STACKS_UNKNOWN) == STACKS_UNKNOWN);
    for (int i = 0; i < N_MASKS; i++) m->masks[i].state = -1;
}

struct grammar_machine *grammar_machine_new(const struct grammar *g, const struct grammar_vocab *v,
                                            size_t max_bytes) {
    struct grammar_machine *m = xcalloc(1, sizeof *m);
    m->g = g;
    m->vocab = v;
    m->max_bytes = max_bytes ? max_bytes : (size_t)64 << 20;
    size_t depth = v ? (size_t)v->max_depth + 2 : 2;
    m->path = xcalloc(depth, sizeof *m->path);
    m->open = xcalloc(depth, sizeof *m->open);
    machine_clear(m);
    m->start = state_start(m);
    return m;
}

static void machine_release(struct grammar_machine *m) {
    free(m->frames.v);
    free(m->stacks.v);
    free(m->configs.v);
    free(m->states.v);
    free(m->rows.v);
    free(m->stacks_table.slots);
    free(m->states_table.slots);
}

void grammar_machine_free(struct grammar_machine *m) {
    if (!m) return;
    machine_release(m);
    free(m->held.v);
    free(m->todo.v);
    free(m->found.v);
    free(m->merging.v);
    free(m->seen.v);
    free(m->merged.v);
    for (int i = 0; i < N_MASKS; i++) {
        free(m->masks[i].bits);
        free(m->masks[i].cut.v);
    }
    free(m->path);
    free(m->open);
    free(m);
}

size_t grammar_machine_bytes(const struct grammar_machine *m) {
    return (size_t)m->frames.n * sizeof *m->frames.v + (size_t)m->stacks.n * sizeof *m->stacks.v +
           (size_t)m->configs.n * sizeof *m->configs.v + (size_t)m->states.n * sizeof *m->states.v +
           (size_t)m->rows.n * sizeof *m->rows.v +
           (m->stacks_table.mask + m->states_table.mask + 2) * sizeof(int32_t);
}

bool grammar_machine_limited(const struct grammar_machine *m) {
    return m->limited;
}

/* Copies a state of `old` into m; map[] has the new ids of the stacks it needs. */
static int32_t state_move(struct grammar_machine *m, const struct grammar_machine *old, int32_t id,
                          const int32_t *map) {
    struct state s = old->states.v[id];
    m->found.n = 0;
    POOL_ROOM(&m->found, s.n);
    for (int32_t i = 0; i < s.n; i++) {
        struct config c = old->configs.v[s.first + i];
        m->found.v[m->found.n++] = (struct config){c.node, map[c.stacks]};
    }
    return state_intern(m, m->found.v, m->found.n, s.flags);
}

/* Marks the stacks that a held state stands on; what is below has a lower id. */
static void stacks_mark(const struct grammar_machine *m, int32_t *map) {
    for (int32_t i = 0; i < m->held.n; i++) {
        if (m->held.v[i] < 0) continue;
        struct state s = m->states.v[m->held.v[i]];
        for (int32_t k = 0; k < s.n; k++) map[m->configs.v[s.first + k].stacks] = 1;
    }
    for (int32_t i = m->stacks.n - 1; i > 0; i--) {
        struct stacks s = m->stacks.v[i];
        for (int32_t k = 0; map[i] && k < s.n; k++) map[m->frames.v[s.first + k].below] = 1;
    }
}

/* Forgets everything but the held states. */
static void machine_collect(struct grammar_machine *m) {
    struct grammar_machine old = *m;
    int32_t *map = xcalloc((size_t)old.stacks.n, sizeof *map);
    stacks_mark(&old, map);
    memset(&m->frames, 0, sizeof m->frames);
    memset(&m->stacks, 0, sizeof m->stacks);
    memset(&m->configs, 0, sizeof m->configs);
    memset(&m->states, 0, sizeof m->states);
    memset(&m->rows, 0, sizeof m->rows);
    m->stacks_table = m->states_table = (struct id_table){0};
    machine_clear(m);
    for (int32_t i = 1; i < old.stacks.n; i++) { // upwards: what is below has its new id already
        struct stacks s = old.stacks.v[i];
        if (!map[i]) continue;
        m->merging.n = 0;
        POOL_ROOM(&m->merging, s.n);
        for (int32_t k = 0; k < s.n; k++) {
            struct frame f = old.frames.v[s.first + k];
            m->merging.v[m->merging.n++] = (struct frame){f.ret, map[f.below]};
        }
        map[i] = stacks_intern(m, m->merging.v, m->merging.n, s.flags);
    }
    m->merging.n = 0;
    for (int32_t i = 0; i < m->held.n; i++)
        if (m->held.v[i] >= 0) m->held.v[i] = state_move(m, &old, m->held.v[i], map);
    m->start = state_start(m);
    machine_release(&old);
    free(map);
}

/* At the entry of public calls only: no id may be in anyone's hand but the slots'. Doubling the
 * bound when the held states themselves are large keeps collections rare. */
static void machine_trim(struct grammar_machine *m) {
    if (grammar_machine_bytes(m) <= m->max_bytes) return;
    machine_collect(m);
    if (grammar_machine_bytes(m) > m->max_bytes / 2) m->max_bytes *= 2;
}

/* states */

/* Slots keep a state's id out of its owner's hands, so that a collection may renumber. */
static struct grammar_state slot_new(struct grammar_machine *m, int32_t state) {
    int32_t i = 0;
    while (i < m->held.n && m->held.v[i] >= 0) i++;
    if (i == m->held.n) {
        POOL_ROOM(&m->held, 1);
        m->held.n++;
    }
    m->held.v[i] = state;
    return (struct grammar_state){m, i};
}

struct grammar_state grammar_state_new(struct grammar_machine *m) {
    return slot_new(m, m->start);
}

struct grammar_state grammar_state_copy(const struct grammar_state *s) {
    return slot_new(s->machine, s->machine->held.v[s->slot]);
}

void grammar_state_release(struct grammar_state *s) {
    if (s->machine) s->machine->held.v[s->slot] = -1;
    *s = (struct grammar_state){0};
}

static int32_t state_id(const struct grammar_state *s) {
    return s->machine->held.v[s->slot];
}

bool grammar_accept_bytes(struct grammar_state *s, const void *bytes, size_t n) {
    struct grammar_machine *m = s->machine;
    machine_trim(m);
    int32_t state = state_id(s);
    for (size_t i = 0; i < n && state != STATE_DEAD; i++)
        state = state_next(m, state, ((const uint8_t *)bytes)[i]);
    if (state != STATE_DEAD) m->held.v[s->slot] = state;
    return state != STATE_DEAD;
}

bool grammar_is_final(const struct grammar_state *s) {
    return s->machine->states.v[state_id(s)].flags & STACKS_BOTTOM;
}

int32_t grammar_rest(const struct grammar_state *s) {
    return s->machine->states.v[state_id(s)].rest;
}

/* The one byte that a state can read, or -1 when there are several, none, or the text may end. */
static int only_byte(struct grammar_machine *m, int32_t state) {
    int only = -1;
    if (m->states.v[state].flags) return -1; // it may end, which is another way to go on
    for (int32_t i = 0; i < m->g->n_classes; i++) {
        uint8_t byte = m->g->class_byte[i];
        if (state_next(m, state, byte) == STATE_DEAD) continue;
        int end = i + 1 < m->g->n_classes ? m->g->class_byte[i + 1] : 256;
        if (only >= 0 || end > byte + 1) return -1;
        only = byte;
    }
    return only;
}

size_t grammar_forced(struct grammar_state *s, size_t limit, struct buf *out) {
    machine_trim(s->machine);
    int32_t state = state_id(s);
    size_t n = 0;
    for (int byte; n < limit && (byte = only_byte(s->machine, state)) >= 0; n++) {
        buf_add(out, &(char){(char)byte}, 1);
        state = state_next(s->machine, state, (uint8_t)byte);
    }
    return n;
}

/* the vocabulary */

struct piece {
    const char *bytes;
    int32_t len, id;
};

static int piece_compare(const void *a, const void *b) {
    const struct piece *x = a, *y = b;
    int d = memcmp(x->bytes, y->bytes, (size_t)MIN(x->len, y->len));
    if (d) return d;
    if (x->len != y->len) return (x->len > y->len) - (x->len < y->len);
    return (x->id > y->id) - (x->id < y->id);
}

static int32_t common_prefix(const struct piece *a, const struct piece *b) {
    int32_t n = 0;
    while (n < a->len && n < b->len && a->bytes[n] == b->bytes[n]) n++;
    return n;
}

static void vocab_reserve(struct grammar_vocab *v, int32_t n_nodes, int32_t n_tokens) {
    size_t n = (size_t)n_nodes + 1;
    v->byte = xcalloc(n, sizeof *v->byte);
    v->depth = xcalloc(n, sizeof *v->depth);
    v->skip = xcalloc(n, sizeof *v->skip);
    v->parent = xcalloc(n, sizeof *v->parent);
    v->token_from = xcalloc(n, sizeof *v->token_from);
    v->tokens = xcalloc((size_t)n_tokens + 1, sizeof *v->tokens);
    v->node_of = xmalloc(((size_t)v->n_tokens + 1) * sizeof *v->node_of);
    memset(v->node_of, 0xFF, ((size_t)v->n_tokens + 1) * sizeof *v->node_of);
}

/* Sorted pieces in one pass: the nodes of a piece behind what it shares with the one before. */
static void vocab_fill(struct grammar_vocab *v, const struct piece *pieces, int32_t n) {
    int32_t *path = xcalloc((size_t)v->max_depth + 1, sizeof *path), n_nodes = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t shared = i > 0 ? common_prefix(&pieces[i - 1], &pieces[i]) : 0;
        for (int32_t d = shared; d < pieces[i].len; d++) {
            v->byte[n_nodes] = (uint8_t)pieces[i].bytes[d];
            v->depth[n_nodes] = d;
            v->parent[n_nodes] = d > 0 ? path[d - 1] : -1;
            v->token_from[n_nodes] = i;
            path[d] = n_nodes++;
        }
        v->tokens[i] = pieces[i].id;
        v->node_of[pieces[i].id] = path[pieces[i].len - 1];
    }
    v->token_from[n_nodes] = n;
    for (int32_t i = 0; i <= v->max_depth; i++) path[i] = n_nodes;
    for (int32_t i = n_nodes - 1; i >= 0;
         i--) { // path[d]: the nearest node to the right at d or above
        v->skip[i] = path[v->depth[i]];
        for (int32_t d = v->depth[i]; d <= v->max_depth && path[d] != i; d++) path[d] = i;
    }
    v->n_nodes = n_nodes;
    free(path);
}

struct grammar_vocab *grammar_vocab_from(const char *const *pieces, const int32_t *lens,
                                         int32_t n) {
    struct grammar_vocab *v = xcalloc(1, sizeof *v);
    struct piece *sorted = xmalloc(((size_t)n + 1) * sizeof *sorted);
    int32_t k = 0, n_nodes = 0;
    for (int32_t i = 0; i < n; i++) {
        if (lens[i] <= 0) continue;
        sorted[k++] = (struct piece){pieces[i], lens[i], i};
        v->max_depth = MAX(v->max_depth, lens[i]);
    }
    if (k > 1) qsort(sorted, (size_t)k, sizeof *sorted, piece_compare);
    for (int32_t i = 0; i < k; i++)
        n_nodes += sorted[i].len - (i > 0 ? common_prefix(&sorted[i - 1], &sorted[i]) : 0);
    v->n_tokens = n;
    vocab_reserve(v, n_nodes, k);
    vocab_fill(v, sorted, k);
    free(sorted);
    return v;
}

struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t) {
    int32_t n = tok_vocab_size(t);
    struct buf all = {0};
    size_t *at = xcalloc((size_t)n + 1, sizeof *at);
    for (int32_t i = 0; i < n; i++) {
        tok_decode(t, i, false, &all);
        at[i + 1] = all.len;
    }
    const char **pieces = xcalloc((size_t)n + 1, sizeof *pieces);
    int32_t *lens = xcalloc((size_t)n + 1, sizeof *lens);
    for (int32_t i = 0; i < n; i++) {
        pieces[i] = all.data + at[i];
        lens[i] = (int32_t)(at[i + 1] - at[i]);
    }
    struct grammar_vocab *v = grammar_vocab_from(pieces, lens, n);
    free(pieces);
    free(lens);
    free(at);
    buf_release(&all);
    return v;
}

void grammar_vocab_free(struct grammar_vocab *v) {
    if (!v) return;
    free(v->byte);
    free(v->depth);
    free(v->skip);
    free(v->parent);
    free(v->token_from);
    free(v->tokens);
    free(v->node_of);
    free(v);
}

/* masks */

struct walk {
    uint32_t *bits;
    int32_t max_rest, worst;
    struct mask *local; /* the walk is of a local state, its cut nodes go here */
    int64_t budget;     /* configurations that it may still meet */
};

/*
 * The budget keeps a hostile grammar, whose every token leads to thousands of configurations, from
 * taking minutes: when it is used up, only single bytes are still tried. No honest grammar comes
 * near it.
 */
static int64_t walk_budget(const struct grammar_vocab *v) {
    return (int64_t)64 * v->n_nodes + (1 << 22);
}

/* All tokens that end at the node: several tokens may have the same bytes. */
static void walk_allow(const struct grammar_vocab *v, struct walk *w, int32_t node, int32_t rest) {
    if (v->token_from[node] == v->token_from[node + 1] || rest > w->max_rest) return;
    w->worst = MAX(w->worst, rest);
    for (int32_t i = v->token_from[node]; i < v->token_from[node + 1]; i++)
        w->bits[v->tokens[i] / 32] |= 1u << (v->tokens[i] % 32);
}

/* Nodes [begin, end) of the trie; m->path[d] and m->open[d] are those before a node of depth d. */
static void walk_nodes(struct grammar_machine *m, struct walk *w, int32_t begin, int32_t end) {
    const struct grammar_vocab *v = m->vocab;
    for (int32_t i = begin; i < end;) {
        int32_t d = v->depth[i], here = m->path[d];
        m->limited |= w->budget <= 0 && d > 0;
        int32_t next = w->budget > 0 || d == 0 ? state_next(m, here, v->byte[i]) : STATE_DEAD;
        // once the way has been below the frames, what the local state forbids is still undecided
        bool open = m->open[d] || (w->local && m->states.v[here].flags & STACKS_UNKNOWN);
        if (next == STATE_DEAD) {
            if (open) {
                POOL_ROOM(&w->local->cut, 1);
                w->local->cut.v[w->local->cut.n++] = i;
            }
            i = v->skip[i];
            continue;
        }
        w->budget -= m->states.v[next].n;
        m->path[d + 1] = next;
        m->open[d + 1] = open;
        walk_allow(v, w, i, m->states.v[next].rest);
        i++;
    }
}

static void walk_all(struct grammar_machine *m, struct walk *w, int32_t state) {
    m->path[0] = state;
    m->open[0] = false;
    w->budget = walk_budget(m->vocab);
    walk_nodes(m, w, 0, m->vocab->n_nodes);
}

/* Fills path[0 .. depth] with the states on the way to a node, the last one before its own byte. */
static void walk_down(struct grammar_machine *m, int32_t state, int32_t node) {
    const struct grammar_vocab *v = m->vocab;
    m->path[0] = state;
    for (int32_t i = v->parent[node]; i >= 0; i = v->parent[i]) m->path[v->depth[i] + 1] = i;
    for (int32_t d = 0; d < v->depth[node]; d++) // path[d + 1] still names the trie's node
        m->path[d + 1] = state_next(m, m->path[d], v->byte[m->path[d + 1]]);
}

/* The subtree of a node at which a local walk was cut, with the true state. */
static void walk_cut(struct grammar_machine *m, struct walk *w, int32_t state, int32_t node) {
    walk_down(m, state, node);
    m->open[m->vocab->depth[node]] = false;
    walk_nodes(m, w, node, m->vocab->skip[node]);
}

bool grammar_accept_token(struct grammar_state *s, int32_t token) {
    struct grammar_machine *m = s->machine;
    const struct grammar_vocab *v = m->vocab;
    CHECK(v != NULL && token >= 0 && token < v->n_tokens);
    int32_t node = v->node_of[token];
    if (node < 0) return false;
    machine_trim(m);
    walk_down(m, state_id(s), node);
    int32_t state = state_next(m, m->path[v->depth[node]], v->byte[node]);
    if (state != STATE_DEAD) m->held.v[s->slot] = state;
    return state != STATE_DEAD;
}

static size_t mask_words(const struct grammar_vocab *v) {
    return ((size_t)v->n_tokens + 31) / 32;
}

/* An empty entry for the state, in place of the one that was used longest ago. */
static struct mask *mask_make(struct grammar_machine *m, int32_t state) {
    struct mask *out = &m->masks[0];
    for (int i = 1; i < N_MASKS && out->state >= 0; i++)
        if (m->masks[i].state < 0 || m->masks[i].used < out->used) out = &m->masks[i];
    if (out->state >= 0) m->states.v[out->state].mask = -1;
    if (!out->bits) out->bits = xmalloc(mask_words(m->vocab) * sizeof *out->bits + 4);
    memset(out->bits, 0, mask_words(m->vocab) * sizeof *out->bits);
    out->state = state;
    out->worst = 0;
    out->cut.n = 0;
    out->used = ++m->clock;
    m->states.v[state].mask = (int32_t)(out - m->masks);
    return out;
}

/* The mask that is there, marked as used; masks found or made last are never the ones replaced, so
 * a few may be held at once. */
static struct mask *mask_find(struct grammar_machine *m, int32_t state) {
    int32_t i = m->states.v[state].mask;
    if (i < 0) return NULL;
    m->masks[i].used = ++m->clock;
    return &m->masks[i];
}

static struct mask *mask_walked(struct grammar_machine *m, int32_t state, bool local) {
    struct mask *out = mask_make(m, state);
    struct walk w = {out->bits, GRAMMAR_NEVER, 0, local ? out : NULL, 0};
    walk_all(m, &w, state);
    out->worst = w.worst;
    return out;
}

/* The different stacks under a state's configurations; more than MAX_GROUPS counts as too many. */
static int32_t state_groups(const struct grammar_machine *m, int32_t state,
                            int32_t out[MAX_GROUPS]) {
    struct state s = m->states.v[state];
    int32_t n = 0;
    for (int32_t i = 0; i < s.n && n <= MAX_GROUPS; i++) {
        int32_t stacks = m->configs.v[s.first + i].stacks, k = 0;
        while (k < n && out[k] != stacks) k++;
        if (k < n) continue;
        if (n < MAX_GROUPS) out[n] = stacks;
        n++;
    }
    return n;
}

/* The state's configurations on `stacks`, on {unknown} instead. */
static int32_t state_local(struct grammar_machine *m, int32_t state, int32_t stacks) {
    struct state s = m->states.v[state];
    m->found.n = 0;
    POOL_ROOM(&m->found, s.n);
    for (int32_t i = 0; i < s.n; i++) {
        struct config c = m->configs.v[s.first + i];
        if (c.stacks == stacks) m->found.v[m->found.n++] = (struct config){c.node, STACKS_UNKNOWN};
    }
    return state_intern(m, m->found.v, m->found.n, 0);
}

/*
 * A mask put together from local ones and the walks they leave open. The figure `worst` is then an
 * upper bound.
 */
static struct mask *mask_joined(struct grammar_machine *m, int32_t state, const int32_t *groups,
                                int32_t n) {
    struct mask *parts[MAX_GROUPS];
    for (int32_t i = 0; i < n; i++) {
        int32_t local = state_local(m, state, groups[i]);
        parts[i] = mask_find(m, local);
        if (!parts[i]) parts[i] = mask_walked(m, local, true);
    }
    struct mask *out = mask_make(m, state);
    struct walk w = {out->bits, GRAMMAR_NEVER, 0, NULL, walk_budget(m->vocab)};
    for (int32_t i = 0; i < n; i++) {
        int32_t below = m->stacks.v[groups[i]].rest;
        w.worst = MAX(w.worst, rest_sum(parts[i]->worst, below));
        for (size_t k = 0; k < mask_words(m->vocab); k++) out->bits[k] |= parts[i]->bits[k];
        for (int32_t k = 0; k < parts[i]->cut.n; k++) walk_cut(m, &w, state, parts[i]->cut.v[k]);
    }
    out->worst = w.worst;
    return out;
}

/* Joining pays when several stacks may share the local mask, which the bottom alone cannot. */
static struct mask *mask_get(struct grammar_machine *m, int32_t state) {
    int32_t groups[MAX_GROUPS];
    struct mask *known = mask_find(m, state);
    if (known) return known;
    int32_t n = state_groups(m, state, groups);
    bool plain = n == 0 || n > MAX_GROUPS || (n == 1 && groups[0] == STACKS_BOTTOM);
    return plain ? mask_walked(m, state, false) : mask_joined(m, state, groups, n);
}

void grammar_mask(struct grammar_state *s, int32_t max_rest, uint32_t *bits) {
    struct grammar_machine *m = s->machine;
    CHECK(m->vocab != NULL);
    machine_trim(m);
    const struct mask *mask = mask_get(m, state_id(s));
    size_t size = mask_words(m->vocab) * sizeof *bits;
    if (max_rest < 0 || mask->worst <= max_rest) {
        memcpy(bits, mask->bits, size);
        return;
    }
    // near the end of the tokens: the mask that is kept would let in what takes too long to close
    struct walk w = {bits, max_rest, 0, NULL, 0};
    memset(bits, 0, size);
    walk_all(m, &w, state_id(s));
}

/* enumeration */

enum { TEXT_LIMIT = 4096 };
struct listing {
    struct grammar_machine *m;
    struct strings *out;
    struct buf text;
    POOL(int32_t) path; /* states before each byte of the text */
    int n, limit;
    struct error *err;
};

/* A state that comes back on the way to itself, having a way to an end, makes texts without end. */
static int listing_check(struct listing *l, int32_t state, uint8_t byte) {
    for (int32_t i = 0; i < l->path.n; i++)
        if (l->path.v[i] == state)
            return error_set(l->err, ERR_MEMORY, "grammar has no end of texts");
    if (byte == 0) return error_set(l->err, ERR_MEMORY, "grammar has texts with zero bytes");
    if (l->text.len >= TEXT_LIMIT)
        return error_set(l->err, ERR_MEMORY, "grammar has texts above %d bytes", TEXT_LIMIT);
    return OK;
}

static int listing_add(struct listing *l) {
    if (l->n == l->limit)
        return error_set(l->err, ERR_MEMORY, "grammar has more than %d texts", l->limit);
    strings_add(l->out, l->text.len ? l->text.data : "");
    l->n++;
    return OK;
}

/* Depth first without recursion: after a dead end, the last byte that can be raised is. */
static int listing_run(struct listing *l) {
    int32_t state = l->m->start;
    int from = 0;
    if (l->m->states.v[state].flags && listing_add(l) != OK) return l->err->code;
    for (;;) {
        int32_t next = STATE_DEAD;
        while (from < 256 && (next = state_next(l->m, state, (uint8_t)from)) == STATE_DEAD) from++;
        if (from == 256) {
            if (l->path.n == 0) return l->n;
            state = l->path.v[--l->path.n];
            from = (uint8_t)l->text.data[--l->text.len] + 1;
            continue;
        }
        POOL_ROOM(&l->path, 1);
        l->path.v[l->path.n++] = state;
        if (listing_check(l, next, (uint8_t)from) != OK) return l->err->code;
        buf_add(&l->text, &(char){(char)from}, 1);
        if (l->m->states.v[next].flags && listing_add(l) != OK) return l->err->code;
        state = next;
        from = 0;
    }
}

int grammar_enumerate(const struct grammar *g, int limit, struct strings *out, struct error *err) {
    struct listing l = {.out = out, .limit = limit, .err = err};
    l.m = grammar_machine_new(g, NULL, 0);
    int n = listing_run(&l);
    grammar_machine_free(l.m);
    buf_release(&l.text);
    free(l.path.v);
    return n;
}
