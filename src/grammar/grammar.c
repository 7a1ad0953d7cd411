/*
 * grammar: a pushdown automaton over bytes, and the masks of tokens that it allows.
 *
 * A state is the set of all configurations (node, stacks) that the grammar may be in after the
 * bytes read. `stacks` is the id of a set of return stacks, stored as a graph-structured stack: the
 * set has flags and frames, a frame is (node to return to, id of the set of stacks below), and a
 * set has at most one frame per node. Equal parts of stacks are therefore stored once. States and
 * sets of stacks are interned: equal ones have the same id. The cost of an ambiguous grammar is
 * therefore that of its distinct continuations, and each step and each mask is computed once while
 * it is cached. In the example, "return 4 → 1" is a frame that returns to node 4, with the set 1
 * below:
 *
 *     stacks 7: {return 4 → 1, return 9 → 5}     stacks 1: {bottom}     5: {return 2 → 1}
 *
 * Masks. The vocabulary is a trie of bytes in depth-first order. A walk visits the trie's nodes
 * with one state per depth and skips the subtree of a node whose byte leads to the dead state. The
 * configurations of a state that have the same stacks form a *local* state, in which these stacks
 * are replaced by {unknown}, so that states which differ only in their stacks share its mask.
 * Tokens that a local state allows are allowed with any stacks. A trie node is *cut* if the local
 * state does not allow its byte, but the path to it may have returned to the unknown stacks, which
 * might allow it. Only the subtrees of cut nodes are walked again, with the actual state.
 *
 * Invariants: a set of stacks has a higher id than the sets below it. From every state except 0 a
 * complete text can be reached. The result of a step depends on the content of the state, never on
 * ids or cached data. A step that reaches a limit loses alternatives, in a fixed order, and never
 * gains any, so replies stay valid.
 */
#include "grammar/internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    STACKS_BOTTOM = 1,  /* both a flag and an id: stacks 1 is {bottom} */
    STACKS_UNKNOWN = 2, /* stacks 2 is {unknown} */
    STATE_DEAD = 0,     /* the state without configurations: no text continues */
    NO_ROW = -1,
    STEP_LIMIT = 1 << 15,  /* configurations visited in one step */
    MERGE_LIMIT = 1 << 14, /* frames visited by stacks_merge in one step */
    N_MASKS = 256,         /* masks in the cache */
    MAX_LOCAL_MASKS = 4,   /* a state with more distinct sets of stacks has no local masks */
    EDGE_LIMIT = 1 << 18,  /* edges visited in one step */
    GC_INTERVAL = 16,      /* trie nodes between two checks of the machine's memory */
};
#define UNITS_UNLIMITED INT64_MAX /* no limit on work units: a job never pauses */

/* A frame of a return stack: the node to return to, and the id of the set of stacks below. */
struct frame {
    int32_t ret, below;
};
/* A set of return stacks. */
struct stacks {
    int32_t first, n; /* frames [first, first + n), sorted by node */
    int32_t min_len;  /* minimum bytes until all frames have returned */
    int32_t flags;
};
/* A configuration; `stacks` is the id of a set. */
struct parse_config {
    int32_t node, stacks;
};
struct automaton_state {
    int32_t first, n; /* configurations whose nodes read a byte, sorted by node */
    int32_t min_len;
    int32_t row; /* offset in `rows` of [n_classes] next states (-1: not computed yet), or NO_ROW */
    int32_t mask;  /* index in `masks`, or -1 */
    int32_t flags; /* STACKS_BOTTOM: the text may end here; STACKS_UNKNOWN: a local state may return
                      to the unknown stacks */
};

/* Growing arrays of plain values. */
#define VECTOR(type)                                                                               \
    struct {                                                                                       \
        type *v;                                                                                   \
        int32_t n, cap;                                                                            \
    }
static void *vector_grow(void *v, int32_t *cap, int32_t need, size_t size) {
    CHECK(need >= 0 && need < INT32_MAX / 2);
    while (*cap < need) *cap = *cap ? 2 * *cap : 256;
    return xrealloc(v, (size_t)*cap * size);
}
#define VECTOR_RESERVE(p, more)                                                                    \
    do {                                                                                           \
        if ((p)->n + (more) > (p)->cap)                                                            \
            (p)->v = vector_grow((p)->v, &(p)->cap, (p)->n + (more), sizeof *(p)->v);              \
    } while (0)

/* Hash table of ids with open addressing; the caller compares the entries. */
struct id_table {
    int32_t *slots; /* id + 1, or 0 if free */
    uint64_t mask;
    int32_t n;
};

/* A hash map from pairs of ids that is cleared in constant time. */
struct pair_entry {
    int32_t a, b, value;
    uint32_t epoch;
};
struct pair_map {
    struct pair_entry *v;
    uint32_t mask, n, epoch;
};

struct cached_mask {
    int32_t state;     /* -1: not in the cache */
    int32_t worst_len; /* maximum of the state's min_len after each allowed token */
    uint64_t last_used;
    uint32_t *bits;
    int64_t cut_bytes;   /* bytes of `cut` that are counted in mask_bytes */
    VECTOR(int32_t) cut; /* local masks: trie nodes to walk again with the actual state */
};

/*
 * A walk over trie nodes [node, end). It may pause between two nodes and resume later. path[0 ..
 * depth] are the states on the path to `node`.
 */
struct vocab_walk {
    uint32_t *bits;
    int32_t max_remaining, worst_len;
    struct cached_mask *local; /* the mask of a local state; else NULL */
    int64_t budget;            /* configurations that the walk may still visit */
    int32_t node, end, depth;
    bool path_ready; /* path[] has the states up to the first node */
};

/*
 * The computation of one reply's next mask. A machine has one at a time.
 *
 *     CONSUME_TOKEN ─> LOOK_UP ─┬─> (cached mask) ───────────┬─> COPY ─┬─> done
 *                               ├─> WALK_TRIE ───────────────┤         └─> WALK_LIMITED ─> done
 *                               └─> NEXT_LOCAL ─> WALK_CUTS ─┘
 *                                     └─> WALK_LOCAL ─> NEXT_LOCAL
 */
enum job_stage {
    JOB_NONE,
    JOB_CONSUME_TOKEN,
    JOB_LOOK_UP,
    JOB_WALK_TRIE,
    JOB_NEXT_LOCAL,
    JOB_WALK_LOCAL,
    JOB_WALK_CUTS,
    JOB_COPY,
    JOB_WALK_LIMITED
};
struct mask_job {
    enum job_stage stage;
    int32_t slot, token;
    int32_t left; /* number of tokens left for the reply; -1: the caller gave max_remaining */
    int32_t max_remaining; /* maximum of min_len after the next token; -1: no maximum */
    uint32_t *bits;        /* NULL: no mask is requested */
    struct vocab_walk w;
    int32_t local;                /* WALK_LOCAL: the state to walk */
    struct cached_mask *new_mask; /* the mask that the walk writes; not in the cache yet */
    struct cached_mask *local_masks[MAX_LOCAL_MASKS]; /* [n_local_masks] */
    int32_t n_local_masks, local_index, cut_index;    /* WALK_CUTS: position */
};

struct grammar_vocab {
    int32_t n_tokens, n_nodes, max_depth;
    uint8_t *byte;          /* [n_nodes], depth first */
    int32_t *depth;         /* [n_nodes] 0 for a first byte */
    int32_t *after_subtree; /* [n_nodes] the first node after the node's subtree */
    int32_t *parent;        /* [n_nodes] or -1 */
    int32_t *first_token;   /* [n_nodes + 1] index in `tokens` of the node's first token */
    int32_t *tokens;        /* token ids, sorted by the node at which they end */
    int32_t *node_of;       /* [n_tokens] node at which the token ends, or -1 */
};

struct grammar_machine {
    const struct grammar *g;
    const struct grammar_vocab *vocab;
    size_t max_bytes;
    VECTOR(struct frame) frames;
    VECTOR(struct stacks) stacks;
    VECTOR(struct parse_config) configs;
    VECTOR(struct automaton_state) states;
    VECTOR(int32_t) rows;
    struct id_table stacks_table, states_table;
    VECTOR(int32_t) slot_states; /* state of each slot, -1: a free slot */
    int32_t start;
    /* scratch of one step */
    VECTOR(struct parse_config) todo, found;
    VECTOR(struct frame) merge_scratch;
    struct pair_map seen, merged;
    int32_t step_flags, n_merges, n_edges;
    bool limit_hit; /* for grammar_machine_hit_limit */
    int64_t units;  /* work units left before the job pauses */
    /* masks */
    struct cached_mask masks[N_MASKS];
    size_t mask_bytes;
    struct mask_job job;
    int32_t *path;      /* [max_depth + 2] states of the current walk, by depth */
    bool *below_frames; /* [max_depth + 2] a local state may be at the unknown stacks */
    uint64_t clock;
};

static uint64_t hash_combine(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

static size_t mask_words(const struct grammar_vocab *v) {
    return ((size_t)v->n_tokens + 31) / 32;
}

/* pairs */

/* Removes all pairs: entries of older epochs count as free. Entries are zeroed only when the epoch
 * wraps around. */
static void pair_map_clear(struct pair_map *m) {
    m->n = 0;
    if (++m->epoch == 0) {
        if (m->v) memset(m->v, 0, ((size_t)m->mask + 1) * sizeof *m->v);
        m->epoch = 1;
    }
}

static struct pair_entry *pair_map_slot(const struct pair_map *m, int32_t a, int32_t b) {
    uint32_t i = (uint32_t)hash_combine((uint64_t)(uint32_t)a << 32 | (uint32_t)b, 1) & m->mask;
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

/* The entry of the pair, which is inserted if it is absent (*is_new). The pointer is valid until
 * the next call. */
static struct pair_entry *pair_map_insert(struct pair_map *m, int32_t a, int32_t b, bool *is_new) {
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

/* Saturating addition, because stacks may be very deep: the result is at most
 * GRAMMAR_INFINITE_LENGTH. */
static int32_t length_add(int32_t a, int32_t b) {
    return MIN(a + b, GRAMMAR_INFINITE_LENGTH);
}

static uint64_t stacks_hash(const struct frame *v, int32_t n, int32_t flags) {
    uint64_t h = (uint64_t)flags;
    for (int32_t i = 0; i < n; i++)
        h = hash_combine(h, (uint64_t)(uint32_t)v[i].ret << 32 | (uint32_t)v[i].below);
    return hash_combine(h, (uint64_t)n);
}

static void stacks_table_grow(struct grammar_machine *m) {
    id_table_reset(&m->stacks_table, 2 * (m->stacks_table.mask + 1));
    for (int32_t i = 1; i < m->stacks.n; i++) {
        const struct stacks *s = &m->stacks.v[i];
        id_table_put(&m->stacks_table, stacks_hash(m->frames.v + s->first, s->n, s->flags), i);
    }
}

/* The id of the set of stacks with these frames (sorted by node) and flags; adds it if it is new.
 */
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
    s.min_len = flags ? 0 : GRAMMAR_INFINITE_LENGTH;
    for (int32_t i = 0; i < n; i++)
        s.min_len =
            MIN(s.min_len, length_add(m->g->min_len[v[i].ret], m->stacks.v[v[i].below].min_len));
    // min_len includes that of the sets below, so state_intern need not follow the frames
    VECTOR_RESERVE(&m->frames, n);
    if (n > 0) memcpy(m->frames.v + m->frames.n, v, (size_t)n * sizeof *v);
    m->frames.n += n;
    VECTOR_RESERVE(&m->stacks, 1);
    m->stacks.v[m->stacks.n++] = s;
    id_table_put(t, hash, m->stacks.n - 1);
    if (2 * (uint64_t)t->n > t->mask) stacks_table_grow(m);
    return m->stacks.n - 1;
}

static uint64_t state_hash(const struct parse_config *v, int32_t n, int32_t flags) {
    uint64_t h = (uint64_t)flags + 77;
    for (int32_t i = 0; i < n; i++)
        h = hash_combine(h, (uint64_t)(uint32_t)v[i].node << 32 | (uint32_t)v[i].stacks);
    return hash_combine(h, (uint64_t)n);
}

static void states_table_grow(struct grammar_machine *m) {
    id_table_reset(&m->states_table, 2 * (m->states_table.mask + 1));
    for (int32_t i = 1; i < m->states.n; i++) {
        const struct automaton_state *s = &m->states.v[i];
        id_table_put(&m->states_table, state_hash(m->configs.v + s->first, s->n, s->flags), i);
    }
}

/* The id of the state with these configurations (sorted by node) and flags; adds it if it is new.
 */
static int32_t state_intern(struct grammar_machine *m, const struct parse_config *v, int32_t n,
                            int32_t flags) {
    struct id_table *t = &m->states_table;
    if (n == 0 && !flags) return STATE_DEAD;
    uint64_t hash = state_hash(v, n, flags);
    for (uint64_t i = hash & t->mask; t->slots[i]; i = (i + 1) & t->mask) {
        const struct automaton_state *s = &m->states.v[t->slots[i] - 1];
        if (s->n == n && s->flags == flags &&
            (n == 0 || memcmp(m->configs.v + s->first, v, (size_t)n * sizeof *v) == 0))
            return t->slots[i] - 1;
    }
    struct automaton_state s = {m->configs.n, n,  flags ? 0 : GRAMMAR_INFINITE_LENGTH,
                                NO_ROW,       -1, flags};
    for (int32_t i = 0; i < n; i++)
        s.min_len =
            MIN(s.min_len, length_add(m->g->min_len[v[i].node], m->stacks.v[v[i].stacks].min_len));
    VECTOR_RESERVE(&m->configs, n);
    if (n > 0) memcpy(m->configs.v + m->configs.n, v, (size_t)n * sizeof *v);
    m->configs.n += n;
    VECTOR_RESERVE(&m->states, 1);
    m->states.v[m->states.n++] = s;
    id_table_put(t, hash, m->states.n - 1);
    if (2 * (uint64_t)t->n > t->mask) states_table_grow(m);
    return m->states.n - 1;
}

/* one step */

/*
 * The union of two sets of stacks. For a node that has a frame in both sets, the sets below are
 * merged too. Above MERGE_LIMIT the result is `a`, so some alternatives are lost.
 */
static int32_t stacks_merge(struct grammar_machine *m, int32_t a, int32_t b) {
    bool is_new;
    if (a == b) return a;
    struct pair_entry *known = pair_map_insert(&m->merged, a, b, &is_new);
    if (!is_new) return known->value;
    known->value = a;
    struct stacks x = m->stacks.v[a], y = m->stacks.v[b];
    if ((m->n_merges += 1 + x.n + y.n) > MERGE_LIMIT) {
        m->limit_hit = true;
        return a;
    }
    // both lists of frames are sorted by node
    int32_t base = m->merge_scratch.n; // recursive calls: the callers' frames come before it
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
        VECTOR_RESERVE(&m->merge_scratch, 1);
        m->merge_scratch.v[m->merge_scratch.n++] = f;
    }
    int32_t id =
        stacks_intern(m, m->merge_scratch.v + base, m->merge_scratch.n - base, x.flags | y.flags);
    m->merge_scratch.n = base;
    pair_map_insert(&m->merged, a, b, &is_new)->value = id;
    return id;
}

/* Adds a configuration to `todo`, unless it was added before in this step or cannot reach an end.
 */
static void step_visit(struct grammar_machine *m, int32_t node, int32_t stacks) {
    bool is_new;
    if (m->g->min_len[node] >= GRAMMAR_INFINITE_LENGTH) return;
    pair_map_insert(&m->seen, node, stacks, &is_new);
    if (!is_new) return;
    if (m->todo.n >= STEP_LIMIT) {
        m->limit_hit = true;
        return;
    }
    VECTOR_RESERVE(&m->todo, 1);
    m->todo.v[m->todo.n++] = (struct parse_config){node, stacks};
}

static void step_begin(struct grammar_machine *m) {
    pair_map_clear(&m->seen);
    pair_map_clear(&m->merged);
    m->todo.n = m->found.n = m->n_merges = m->n_edges = m->step_flags = 0;
}

/* Adds the number of the node's edges to the step's count; false above EDGE_LIMIT. The number of
 * nodes does not bound the work, because one node may have almost all edges. */
static bool step_count_edges(struct grammar_machine *m, int32_t node) {
    m->n_edges += m->g->edge_begin[node + 1] - m->g->edge_begin[node];
    if (m->n_edges <= EDGE_LIMIT) return true;
    m->limit_hit = true;
    return false;
}

/* Adds the configurations that follow c by one move without reading a byte. */
static void step_follow(struct grammar_machine *m, struct parse_config c) {
    const struct grammar *g = m->g;
    if (g->is_end[c.node]) {
        struct stacks s = m->stacks.v[c.stacks];
        m->step_flags |= s.flags;
        for (int32_t i = 0; i < s.n; i++) {
            struct frame f = m->frames.v[s.first + i];
            step_visit(m, f.ret, f.below);
        }
    }
    if (!step_count_edges(m, c.node)) return;
    for (int32_t k = g->edge_begin[c.node]; k < g->edge_begin[c.node + 1]; k++) {
        const struct grammar_edge *e = &g->edges[k];
        if (e->lo <= e->hi || g->min_len[e->to] >= GRAMMAR_INFINITE_LENGTH) continue;
        if (e->rule < 0) {
            step_visit(m, e->to, c.stacks);
        } else if (g->is_end[e->to]) { // tail call: no frame is needed
            step_visit(m, g->rules[e->rule].start, c.stacks);
        } else if (g->min_len[g->rules[e->rule].start] < GRAMMAR_INFINITE_LENGTH) {
            struct frame f = {e->to, c.stacks};
            step_visit(m, g->rules[e->rule].start, stacks_intern(m, &f, 1, 0));
        }
    }
}

/* Stable merge sort by node: configurations of one node stay in the order in which they were found.
 */
static void configs_sort(struct parse_config *v, struct parse_config *scratch, int32_t n) {
    if (n <= 24) {
        for (int32_t i = 1, k; i < n; i++) {
            struct parse_config c = v[i];
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
    memcpy(v, scratch, (size_t)o * sizeof *v); // v[o..n) is in place already
}

/* Follows all configurations in `todo`, which grows during the loop, and returns the state of those
 * that read a byte. The list is processed in order, so that the order depends on the grammar and
 * the stacks only. */
static int32_t step_end(struct grammar_machine *m) {
    for (int32_t i = 0; i < m->todo.n; i++) {
        struct parse_config c = m->todo.v[i];
        step_follow(m, c);
        if (!m->g->reads[c.node]) continue;
        VECTOR_RESERVE(&m->found, 1);
        m->found.v[m->found.n++] = c;
    }
    VECTOR_RESERVE(&m->todo, m->found.n);
    configs_sort(m->found.v, m->todo.v, m->found.n);
    int32_t n = 0;
    for (int32_t i = 0; i < m->found.n; i++) {
        struct parse_config c = m->found.v[i];
        if (n > 0 && m->found.v[n - 1].node == c.node)
            m->found.v[n - 1].stacks = stacks_merge(m, m->found.v[n - 1].stacks, c.stacks);
        else
            m->found.v[n++] = c;
    }
    m->units -= m->todo.n + m->n_edges + m->n_merges;
    return state_intern(m, m->found.v, n, m->step_flags);
}

/* Computes the state after `byte`. state_next calls it once per state and byte class and stores the
 * result. */
static int32_t state_compute(struct grammar_machine *m, int32_t state, uint8_t byte) {
    struct automaton_state s = m->states.v[state];
    step_begin(m);
    for (int32_t i = 0; i < s.n; i++) {
        struct parse_config c = m->configs.v[s.first + i];
        m->units -= m->g->edge_begin[c.node + 1] - m->g->edge_begin[c.node];
        for (int32_t k = m->g->edge_begin[c.node]; k < m->g->edge_begin[c.node + 1]; k++) {
            const struct grammar_edge *e = &m->g->edges[k];
            if (e->lo <= byte && byte <= e->hi) step_visit(m, e->to, c.stacks);
        }
    }
    return step_end(m);
}

/* The state's row of next states, created on the first call, because many states never need a row.
 */
static int32_t *state_row(struct grammar_machine *m, int32_t state) {
    struct automaton_state *s = &m->states.v[state];
    if (s->row == NO_ROW) {
        VECTOR_RESERVE(&m->rows, m->g->n_classes);
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

static int32_t start_state_compute(struct grammar_machine *m) {
    step_begin(m);
    step_visit(m, m->g->rules[m->g->root].start, STACKS_BOTTOM);
    return step_end(m);
}

/* the machine and its memory */

/* Empties the tables and creates the entries with fixed ids: the sets of stacks 1 ({bottom}) and 2
 * ({unknown}), and state 0, the dead state. */
static void machine_clear(struct grammar_machine *m) {
    m->frames.n = m->configs.n = m->rows.n = 0;
    m->stacks.n = m->states.n = 0;
    id_table_reset(&m->stacks_table, 256);
    id_table_reset(&m->states_table, 256);
    VECTOR_RESERVE(&m->stacks, 1);
    m->stacks.v[m->stacks.n++] = (struct stacks){.min_len = GRAMMAR_INFINITE_LENGTH};
    VECTOR_RESERVE(&m->states, 1);
    m->states.v[m->states.n++] =
        (struct automaton_state){.min_len = GRAMMAR_INFINITE_LENGTH, .row = NO_ROW, .mask = -1};
    CHECK(stacks_intern(m, NULL, 0, STACKS_BOTTOM) == STACKS_BOTTOM);
    CHECK(stacks_intern(m, NULL, 0, STACKS_UNKNOWN) == STACKS_UNKNOWN);
}

static bool mask_is_pinned(const struct mask_job *j, const struct cached_mask *k) {
    bool pinned = j->stage != JOB_NONE && k == j->new_mask;
    for (int32_t i = 0; j->stage != JOB_NONE && i < j->n_local_masks; i++)
        pinned |= k == j->local_masks[i];
    return pinned;
}

/* Removes all masks from the cache and frees those that the current job does not need. */
static void masks_clear(struct grammar_machine *m) {
    for (int i = 0; i < N_MASKS; i++) {
        struct cached_mask *k = &m->masks[i];
        k->state = -1;
        if (!k->bits || mask_is_pinned(&m->job, k)) continue;
        m->mask_bytes -= mask_words(m->vocab) * sizeof *k->bits + (size_t)k->cut_bytes;
        free(k->bits);
        free(k->cut.v);
        *k = (struct cached_mask){.state = -1};
    }
}

void grammar_machine_set_limit(struct grammar_machine *m, size_t max_bytes) {
    m->max_bytes = max_bytes ? max_bytes : (size_t)64 << 20;
}

struct grammar_machine *grammar_machine_new(const struct grammar *g, const struct grammar_vocab *v,
                                            size_t max_bytes) {
    struct grammar_machine *m = xcalloc(1, sizeof *m);
    m->g = g;
    m->vocab = v;
    grammar_machine_set_limit(m, max_bytes);
    m->units = UNITS_UNLIMITED;
    for (int i = 0; i < N_MASKS; i++) m->masks[i].state = -1;
    size_t depth = v ? (size_t)v->max_depth + 2 : 2;
    m->path = xcalloc(depth, sizeof *m->path);
    m->below_frames = xcalloc(depth, sizeof *m->below_frames);
    machine_clear(m);
    m->start = start_state_compute(m);
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
    free(m->slot_states.v);
    free(m->todo.v);
    free(m->found.v);
    free(m->merge_scratch.v);
    free(m->seen.v);
    free(m->merged.v);
    for (int i = 0; i < N_MASKS; i++) {
        free(m->masks[i].bits);
        free(m->masks[i].cut.v);
    }
    free(m->path);
    free(m->below_frames);
    free(m);
}

size_t grammar_machine_bytes(const struct grammar_machine *m) {
    return (size_t)m->frames.n * sizeof *m->frames.v + (size_t)m->stacks.n * sizeof *m->stacks.v +
           (size_t)m->configs.n * sizeof *m->configs.v + (size_t)m->states.n * sizeof *m->states.v +
           (size_t)m->rows.n * sizeof *m->rows.v +
           (m->stacks_table.mask + m->states_table.mask + 2) * sizeof(int32_t) + m->mask_bytes;
}

bool grammar_machine_hit_limit(const struct grammar_machine *m) {
    return m->limit_hit;
}

/* Copies a state of `old` into m and returns its new id; map[] has the new ids of sets of stacks.
 */
static int32_t state_copy_from(struct grammar_machine *m, const struct grammar_machine *old,
                               int32_t id, const int32_t *map) {
    struct automaton_state s = old->states.v[id];
    m->found.n = 0;
    VECTOR_RESERVE(&m->found, s.n);
    for (int32_t i = 0; i < s.n; i++) {
        struct parse_config c = old->configs.v[s.first + i];
        m->found.v[m->found.n++] = (struct parse_config){c.node, map[c.stacks]};
    }
    return state_intern(m, m->found.v, m->found.n, s.flags);
}

/* The number of states at the beginning of path[] that the current job needs. */
static int32_t job_path_len(const struct grammar_machine *m) {
    const struct mask_job *j = &m->job;
    bool walks = j->stage != JOB_NONE && j->stage != JOB_LOOK_UP && j->stage != JOB_NEXT_LOCAL &&
                 j->stage != JOB_COPY && j->w.node < j->w.end;
    if (!walks) return 0;
    return (j->w.path_ready ? m->vocab->depth[j->w.node] : j->w.depth) + 1;
}

/* Pointers to the state ids that garbage collection must keep and renumber: [*n], freed by the
 * caller. */
static int32_t **machine_roots(struct grammar_machine *m, int32_t *n) {
    int32_t n_path = job_path_len(m), k = 0;
    int32_t **roots = xmalloc((size_t)(m->slot_states.n + n_path + 1) * sizeof *roots);
    for (int32_t i = 0; i < m->slot_states.n; i++)
        if (m->slot_states.v[i] >= 0) roots[k++] = &m->slot_states.v[i];
    for (int32_t i = 0; i < n_path; i++) roots[k++] = &m->path[i];
    if (m->job.stage == JOB_WALK_LOCAL) roots[k++] = &m->job.local;
    *n = k;
    return roots;
}

/* Sets map[] to 1 for each set of stacks that the roots use. The sets below have lower ids, so one
 * pass from high to low ids is enough. */
static void stacks_mark(const struct grammar_machine *m, int32_t *const *roots, int32_t n,
                        int32_t *map) {
    for (int32_t i = 0; i < n; i++) {
        struct automaton_state s = m->states.v[*roots[i]];
        for (int32_t k = 0; k < s.n; k++) map[m->configs.v[s.first + k].stacks] = 1;
    }
    for (int32_t i = m->stacks.n - 1; i > 0; i--) {
        struct stacks s = m->stacks.v[i];
        for (int32_t k = 0; map[i] && k < s.n; k++) map[m->frames.v[s.first + k].below] = 1;
    }
}

/* Garbage collection: removes all states and stacks except those that the roots use. */
static void machine_gc(struct grammar_machine *m) {
    int32_t n_roots, **roots = machine_roots(m, &n_roots);
    struct grammar_machine old = *m;
    int32_t *map = xcalloc((size_t)old.stacks.n, sizeof *map);
    stacks_mark(&old, roots, n_roots, map);
    m->units -= old.stacks.n;
    memset(&m->frames, 0, sizeof m->frames);
    memset(&m->stacks, 0, sizeof m->stacks);
    memset(&m->configs, 0, sizeof m->configs);
    memset(&m->states, 0, sizeof m->states);
    memset(&m->rows, 0, sizeof m->rows);
    m->stacks_table = m->states_table = (struct id_table){0};
    machine_clear(m);
    masks_clear(m);
    for (int32_t i = 1; i < old.stacks.n; i++) { // ascending: the sets below are copied first
        struct stacks s = old.stacks.v[i];
        if (!map[i]) continue;
        m->merge_scratch.n = 0;
        VECTOR_RESERVE(&m->merge_scratch, s.n);
        for (int32_t k = 0; k < s.n; k++) {
            struct frame f = old.frames.v[s.first + k];
            m->merge_scratch.v[m->merge_scratch.n++] = (struct frame){f.ret, map[f.below]};
        }
        map[i] = stacks_intern(m, m->merge_scratch.v, m->merge_scratch.n, s.flags);
    }
    m->merge_scratch.n = 0;
    for (int32_t i = 0; i < n_roots; i++) *roots[i] = state_copy_from(m, &old, *roots[i], map);
    m->start = start_state_compute(m);
    machine_release(&old);
    free(roots);
    free(map);
}

/* Collects garbage if the machine is above its memory limit. It is called at the beginning of
 * public functions and between two nodes of a walk, when all ids in use are roots. If the roots
 * themselves need more than half of the limit, the limit is doubled, so that collections stay rare.
 */
static void machine_gc_if_full(struct grammar_machine *m) {
    if (grammar_machine_bytes(m) <= m->max_bytes) return;
    machine_gc(m);
    if (grammar_machine_bytes(m) > m->max_bytes / 2) m->max_bytes *= 2;
}

/* states */

/* A grammar_state has a slot instead of a state id, so that garbage collection may renumber states.
 */
static struct grammar_state slot_new(struct grammar_machine *m, int32_t state) {
    int32_t i = 0;
    while (i < m->slot_states.n && m->slot_states.v[i] >= 0) i++;
    if (i == m->slot_states.n) {
        VECTOR_RESERVE(&m->slot_states, 1);
        m->slot_states.n++;
    }
    m->slot_states.v[i] = state;
    return (struct grammar_state){m, i};
}

struct grammar_state grammar_state_new(struct grammar_machine *m) {
    return slot_new(m, m->start);
}

struct grammar_state grammar_state_copy(const struct grammar_state *s) {
    return slot_new(s->machine, s->machine->slot_states.v[s->slot]);
}

void grammar_state_release(struct grammar_state *s) {
    if (s->machine) s->machine->slot_states.v[s->slot] = -1;
    if (s->machine && s->machine->job.slot == s->slot) s->machine->job.stage = JOB_NONE;
    *s = (struct grammar_state){0};
}

static int32_t state_id(const struct grammar_state *s) {
    return s->machine->slot_states.v[s->slot];
}

bool grammar_accept_bytes(struct grammar_state *s, const void *bytes, size_t n) {
    struct grammar_machine *m = s->machine;
    machine_gc_if_full(m);
    int32_t state = state_id(s);
    for (size_t i = 0; i < n && state != STATE_DEAD; i++)
        state = state_next(m, state, ((const uint8_t *)bytes)[i]);
    if (state != STATE_DEAD) m->slot_states.v[s->slot] = state;
    return state != STATE_DEAD;
}

bool grammar_is_final(const struct grammar_state *s) {
    return s->machine->states.v[state_id(s)].flags & STACKS_BOTTOM;
}

int32_t grammar_min_remaining(const struct grammar_state *s) {
    return s->machine->states.v[state_id(s)].min_len;
}

/* The byte that must come next; -1 if several bytes or none may come, or if the text may end. */
static int state_only_byte(struct grammar_machine *m, int32_t state) {
    int only = -1;
    if (m->states.v[state].flags) return -1; // the text may end here, so no byte is certain
    for (int32_t i = 0; i < m->g->n_classes; i++) {
        uint8_t byte = m->g->class_byte[i];
        if (state_next(m, state, byte) == STATE_DEAD) continue;
        int end = i + 1 < m->g->n_classes ? m->g->class_byte[i + 1] : 256;
        if (only >= 0 || end > byte + 1) return -1;
        only = byte;
    }
    return only;
}

size_t grammar_jump_forward(struct grammar_state *s, size_t limit, struct buf *out) {
    machine_gc_if_full(s->machine);
    int32_t state = state_id(s);
    size_t n = 0;
    for (int byte; n < limit && (byte = state_only_byte(s->machine, state)) >= 0; n++) {
        buf_add(out, &(char){(char)byte}, 1);
        state = state_next(s->machine, state, (uint8_t)byte);
    }
    return n;
}

/* the vocabulary */

struct vocab_piece {
    const char *bytes;
    int32_t len, id;
};

static int piece_compare(const void *a, const void *b) {
    const struct vocab_piece *x = a, *y = b;
    int d = memcmp(x->bytes, y->bytes, (size_t)MIN(x->len, y->len));
    if (d) return d;
    if (x->len != y->len) return (x->len > y->len) - (x->len < y->len);
    return (x->id > y->id) - (x->id < y->id);
}

static int32_t common_prefix(const struct vocab_piece *a, const struct vocab_piece *b) {
    int32_t n = 0;
    while (n < a->len && n < b->len && a->bytes[n] == b->bytes[n]) n++;
    return n;
}

static void vocab_alloc(struct grammar_vocab *v, int32_t n_nodes, int32_t n_tokens) {
    size_t n = (size_t)n_nodes + 1;
    v->byte = xcalloc(n, sizeof *v->byte);
    v->depth = xcalloc(n, sizeof *v->depth);
    v->after_subtree = xcalloc(n, sizeof *v->after_subtree);
    v->parent = xcalloc(n, sizeof *v->parent);
    v->first_token = xcalloc(n, sizeof *v->first_token);
    v->tokens = xcalloc((size_t)n_tokens + 1, sizeof *v->tokens);
    v->node_of = xmalloc(((size_t)v->n_tokens + 1) * sizeof *v->node_of);
    memset(v->node_of, 0xFF, ((size_t)v->n_tokens + 1) * sizeof *v->node_of);
}

/* Builds the trie from sorted pieces: each piece adds the nodes after its common prefix with the
 * previous one. */
static void vocab_build_trie(struct grammar_vocab *v, const struct vocab_piece *pieces, int32_t n) {
    int32_t *path = xcalloc((size_t)v->max_depth + 1, sizeof *path), n_nodes = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t shared = i > 0 ? common_prefix(&pieces[i - 1], &pieces[i]) : 0;
        for (int32_t d = shared; d < pieces[i].len; d++) {
            v->byte[n_nodes] = (uint8_t)pieces[i].bytes[d];
            v->depth[n_nodes] = d;
            v->parent[n_nodes] = d > 0 ? path[d - 1] : -1;
            v->first_token[n_nodes] = i;
            path[d] = n_nodes++;
        }
        v->tokens[i] = pieces[i].id;
        v->node_of[pieces[i].id] = path[pieces[i].len - 1];
    }
    v->first_token[n_nodes] = n;
    for (int32_t i = 0; i <= v->max_depth; i++) path[i] = n_nodes;
    for (int32_t i = n_nodes - 1; i >= 0;
         i--) { // path[d]: the next node after i, in depth-first order, of depth d or less
        v->after_subtree[i] = path[v->depth[i]];
        for (int32_t d = v->depth[i]; d <= v->max_depth && path[d] != i; d++) path[d] = i;
    }
    v->n_nodes = n_nodes;
    free(path);
}

struct grammar_vocab *grammar_vocab_new_pieces(const char *const *pieces, const int32_t *lens,
                                               int32_t n) {
    struct grammar_vocab *v = xcalloc(1, sizeof *v);
    struct vocab_piece *sorted = xmalloc(((size_t)n + 1) * sizeof *sorted);
    int32_t k = 0, n_nodes = 0;
    for (int32_t i = 0; i < n; i++) {
        if (lens[i] <= 0) continue;
        sorted[k++] = (struct vocab_piece){pieces[i], lens[i], i};
        v->max_depth = MAX(v->max_depth, lens[i]);
    }
    if (k > 1) qsort(sorted, (size_t)k, sizeof *sorted, piece_compare);
    for (int32_t i = 0; i < k; i++)
        n_nodes += sorted[i].len - (i > 0 ? common_prefix(&sorted[i - 1], &sorted[i]) : 0);
    v->n_tokens = n;
    vocab_alloc(v, n_nodes, k);
    vocab_build_trie(v, sorted, k);
    free(sorted);
    return v;
}

struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t) {
    int32_t n = tokenizer_vocab_size(t);
    struct buf all = {0};
    size_t *offset = xcalloc((size_t)n + 1, sizeof *offset);
    for (int32_t i = 0; i < n; i++) {
        tokenizer_decode_token(t, i, false, &all);
        offset[i + 1] = all.len;
    }
    const char **pieces = xcalloc((size_t)n + 1, sizeof *pieces);
    int32_t *lens = xcalloc((size_t)n + 1, sizeof *lens);
    for (int32_t i = 0; i < n; i++) {
        pieces[i] = all.data + offset[i];
        lens[i] = (int32_t)(offset[i + 1] - offset[i]);
    }
    struct grammar_vocab *v = grammar_vocab_new_pieces(pieces, lens, n);
    free(pieces);
    free(lens);
    free(offset);
    buf_release(&all);
    return v;
}

void grammar_vocab_free(struct grammar_vocab *v) {
    if (!v) return;
    free(v->byte);
    free(v->depth);
    free(v->after_subtree);
    free(v->parent);
    free(v->first_token);
    free(v->tokens);
    free(v->node_of);
    free(v);
}

/* masks */

/*
 * The number of configurations that a walk may visit. It bounds the time of a hostile grammar, in
 * which each token leads to thousands of configurations. When it is used up, only tokens of one
 * byte are tried. Ordinary grammars use a small part of it.
 */
static int64_t walk_budget(const struct grammar_vocab *v) {
    return (int64_t)64 * v->n_nodes + (1 << 22);
}

/* Allows the tokens that end at the node, unless min_len is too long; several tokens may have the
 * same bytes. */
static void walk_allow_tokens(const struct grammar_vocab *v, struct vocab_walk *w, int32_t node,
                              int32_t min_len) {
    if (v->first_token[node] == v->first_token[node + 1] || min_len > w->max_remaining) return;
    w->worst_len = MAX(w->worst_len, min_len);
    for (int32_t i = v->first_token[node]; i < v->first_token[node + 1]; i++)
        w->bits[v->tokens[i] / 32] |= 1u << (v->tokens[i] % 32);
}

/* Starts a walk over nodes [begin, end): a node, its subtree or the whole trie. `state` is the
 * state at the root of the trie. Writes the trie nodes of the path to `begin` to path[];
 * walk_fill_path replaces them by states. */
static void walk_begin(struct grammar_machine *m, struct vocab_walk *w, int32_t state,
                       int32_t begin, int32_t end) {
    const struct grammar_vocab *v = m->vocab;
    w->node = begin;
    w->end = end;
    w->depth = 0;
    w->path_ready = begin == end;
    m->path[0] = state;
    if (w->path_ready) return;
    m->below_frames[v->depth[begin]] = false;
    for (int32_t i = v->parent[begin]; i >= 0; i = v->parent[i]) m->path[v->depth[i] + 1] = i;
}

/* Fills path[] with the states on the path to the first node, up to the state before that node's
 * byte. False: the work units are used up. */
static bool walk_fill_path(struct grammar_machine *m, struct vocab_walk *w) {
    const struct grammar_vocab *v = m->vocab;
    for (; !w->path_ready && w->depth < v->depth[w->node]; w->depth++) {
        int32_t d = w->depth; // path[d + 1] is still the trie node
        if (m->units <= 0) return false;
        m->units--;
        m->path[d + 1] = state_next(m, m->path[d], v->byte[m->path[d + 1]]);
    }
    w->path_ready = true;
    return true;
}

static void machine_gc_if_full(struct grammar_machine *m);

/* Visits one node. For a node of depth d, path[d] and below_frames[d] are the values before its
 * byte. */
static void walk_visit_node(struct grammar_machine *m, struct vocab_walk *w) {
    const struct grammar_vocab *v = m->vocab;
    int32_t i = w->node, d = v->depth[i], state = m->path[d];
    m->limit_hit |= w->budget <= 0 && d > 0;
    int32_t next = w->budget > 0 || d == 0 ? state_next(m, state, v->byte[i]) : STATE_DEAD;
    // where a local state may have returned to the unknown stacks, the actual stacks decide
    bool below_frames =
        m->below_frames[d] || (w->local && m->states.v[state].flags & STACKS_UNKNOWN);
    if (next == STATE_DEAD) {
        if (below_frames) {
            VECTOR_RESERVE(&w->local->cut, 1);
            w->local->cut.v[w->local->cut.n++] = i;
        }
        w->node = v->after_subtree[i];
        return;
    }
    w->budget -= m->states.v[next].n;
    m->path[d + 1] = next;
    m->below_frames[d + 1] = below_frames;
    walk_allow_tokens(v, w, i, m->states.v[next].min_len);
    w->node++;
}

/* Continues the walk. False: the work units are used up, and the walk is paused. */
static bool walk_continue(struct grammar_machine *m, struct vocab_walk *w) {
    if (!walk_fill_path(m, w)) return false;
    for (int32_t n = 0; w->node < w->end; n++) {
        if (m->units-- <= 0) return false;
        if (n % GC_INTERVAL == 0) machine_gc_if_full(m);
        walk_visit_node(m, w);
    }
    return true;
}

bool grammar_accept_token(struct grammar_state *s, int32_t token) {
    struct grammar_machine *m = s->machine;
    const struct grammar_vocab *v = m->vocab;
    CHECK(v != NULL && token >= 0 && token < v->n_tokens && m->job.stage == JOB_NONE);
    int32_t node = v->node_of[token];
    if (node < 0) return false;
    machine_gc_if_full(m);
    struct vocab_walk w;
    walk_begin(m, &w, state_id(s), node, node + 1);
    walk_fill_path(m, &w);
    int32_t state = state_next(m, m->path[v->depth[node]], v->byte[node]);
    if (state != STATE_DEAD) m->slot_states.v[s->slot] = state;
    return state != STATE_DEAD;
}

/* Removes an unused or else the least recently used mask from the cache, except those that the job
 * needs, and returns it, cleared. */
static struct cached_mask *mask_cache_evict(struct grammar_machine *m) {
    struct cached_mask *out = NULL;
    for (int i = 0; i < N_MASKS; i++) {
        struct cached_mask *k = &m->masks[i];
        if (mask_is_pinned(&m->job, k)) continue;
        if (!out || k->state < 0 || k->last_used < out->last_used) out = k;
        if (k->state < 0) break;
    }
    if (out->state >= 0) m->states.v[out->state].mask = -1;
    if (!out->bits) {
        out->bits = xmalloc(mask_words(m->vocab) * sizeof *out->bits + 4);
        m->mask_bytes += mask_words(m->vocab) * sizeof *out->bits;
    }
    memset(out->bits, 0, mask_words(m->vocab) * sizeof *out->bits);
    out->state = -1;
    out->worst_len = 0;
    out->cut.n = 0;
    return out;
}

static void mask_cache_put(struct grammar_machine *m, struct cached_mask *k, int32_t state,
                           int32_t worst_len) {
    int64_t bytes = (int64_t)k->cut.cap * (int64_t)sizeof *k->cut.v;
    m->mask_bytes += (size_t)(bytes - k->cut_bytes);
    k->cut_bytes = bytes;
    k->state = state;
    k->worst_len = worst_len;
    k->last_used = ++m->clock;
    m->states.v[state].mask = (int32_t)(k - m->masks);
}

/* The cached mask, marked as used, or NULL. */
static struct cached_mask *mask_cache_get(struct grammar_machine *m, int32_t state) {
    int32_t i = m->states.v[state].mask;
    if (i < 0) return NULL;
    m->masks[i].last_used = ++m->clock;
    return &m->masks[i];
}

/* Writes the ids of the distinct sets of stacks of a state's configurations to `out` and returns
 * their number. A result above MAX_LOCAL_MASKS means that there are more; `out` then has the first
 * ones. */
static int32_t state_distinct_stacks(const struct grammar_machine *m, int32_t state,
                                     int32_t out[MAX_LOCAL_MASKS]) {
    struct automaton_state s = m->states.v[state];
    int32_t n = 0;
    for (int32_t i = 0; i < s.n && n <= MAX_LOCAL_MASKS; i++) {
        int32_t stacks = m->configs.v[s.first + i].stacks, k = 0;
        while (k < n && out[k] != stacks) k++;
        if (k < n) continue;
        if (n < MAX_LOCAL_MASKS) out[n] = stacks;
        n++;
    }
    return n;
}

/* The local state: the configurations of `state` that have these stacks, with the stacks {unknown}
 * instead. */
static int32_t local_state_intern(struct grammar_machine *m, int32_t state, int32_t stacks) {
    struct automaton_state s = m->states.v[state];
    m->found.n = 0;
    VECTOR_RESERVE(&m->found, s.n);
    for (int32_t i = 0; i < s.n; i++) {
        struct parse_config c = m->configs.v[s.first + i];
        if (c.stacks == stacks)
            m->found.v[m->found.n++] = (struct parse_config){c.node, STACKS_UNKNOWN};
    }
    return state_intern(m, m->found.v, m->found.n, 0);
}

/* The stages of a job (enum job_stage). Functions that walk return false when the walk pauses. */

static int32_t job_current_state(const struct grammar_machine *m) {
    return m->slot_states.v[m->job.slot];
}

static bool job_consume_token(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    const struct grammar_vocab *v = m->vocab;
    int32_t node = v->node_of[j->token];
    CHECK(node >= 0);
    if (!walk_fill_path(m, &j->w)) return false;
    int32_t state = state_next(m, m->path[v->depth[node]], v->byte[node]);
    CHECK(state != STATE_DEAD); // the previous mask allowed the token
    m->slot_states.v[j->slot] = state;
    j->stage = j->bits ? JOB_LOOK_UP : JOB_NONE;
    return true;
}

/* Starts a walk of the whole trie from `state` that fills a new mask. */
static void job_start_walk(struct grammar_machine *m, int32_t state, bool local) {
    struct mask_job *j = &m->job;
    j->new_mask = mask_cache_evict(m);
    j->w = (struct vocab_walk){.bits = j->new_mask->bits,
                               .max_remaining = GRAMMAR_INFINITE_LENGTH,
                               .local = local ? j->new_mask : NULL,
                               .budget = walk_budget(m->vocab)};
    walk_begin(m, &j->w, state, 0, m->vocab->n_nodes);
}

/* Uses the cached mask of the state, or decides how to compute it. Local masks are useful because
 * states with other stacks share them; if the only stacks are {bottom}, the whole trie is walked
 * instead. */
static void job_look_up(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    int32_t stacks[MAX_LOCAL_MASKS], state = job_current_state(m),
                                     min_len = m->states.v[state].min_len;
    // if the tokens left do not suffice for a complete reply, there is no limit
    if (j->left >= 0) j->max_remaining = min_len <= j->left ? j->left - 1 : -1;
    j->new_mask = NULL;
    j->n_local_masks = 0;
    if (mask_cache_get(m, state)) {
        j->stage = JOB_COPY;
        return;
    }
    int32_t n = state_distinct_stacks(m, state, stacks);
    bool plain = n == 0 || n > MAX_LOCAL_MASKS || (n == 1 && stacks[0] == STACKS_BOTTOM);
    if (plain) job_start_walk(m, state, false);
    j->stage = plain ? JOB_WALK_TRIE : JOB_NEXT_LOCAL;
}

/* Called when all local masks are complete. Joins them and starts to walk the cut nodes. The joined
 * worst_len is an upper bound. */
static void job_join_locals(struct grammar_machine *m, const int32_t *stacks) {
    struct mask_job *j = &m->job;
    int32_t worst_len = 0;
    j->new_mask = mask_cache_evict(m);
    for (int32_t i = 0; i < j->n_local_masks; i++) {
        worst_len = MAX(worst_len,
                        length_add(j->local_masks[i]->worst_len, m->stacks.v[stacks[i]].min_len));
        for (size_t k = 0; k < mask_words(m->vocab); k++)
            j->new_mask->bits[k] |= j->local_masks[i]->bits[k];
    }
    j->w = (struct vocab_walk){.bits = j->new_mask->bits,
                               .max_remaining = GRAMMAR_INFINITE_LENGTH,
                               .worst_len = worst_len,
                               .budget = walk_budget(m->vocab)};
    j->local_index = j->cut_index = 0;
    j->stage = JOB_WALK_CUTS;
}

/* Finds or starts the next local mask. The sets of stacks are computed again each time, because
 * garbage collection changes their ids; it does not change their order. */
static void job_next_local(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    int32_t stacks[MAX_LOCAL_MASKS], n = state_distinct_stacks(m, job_current_state(m), stacks);
    if (j->n_local_masks == n) {
        job_join_locals(m, stacks);
        return;
    }
    int32_t local = local_state_intern(m, job_current_state(m), stacks[j->n_local_masks]);
    struct cached_mask *known = mask_cache_get(m, local);
    if (known) {
        j->local_masks[j->n_local_masks++] = known;
        return;
    }
    j->local = local;
    job_start_walk(m, local, true);
    j->stage = JOB_WALK_LOCAL;
}

static bool job_walk_local(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    if (!walk_continue(m, &j->w)) return false;
    mask_cache_put(m, j->new_mask, j->local, j->w.worst_len);
    j->local_masks[j->n_local_masks++] = j->new_mask;
    j->new_mask = NULL;
    j->stage = JOB_NEXT_LOCAL;
    return true;
}

/* Walks the subtrees of all cut nodes with the actual state. */
static bool job_walk_cuts(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    for (; j->local_index < j->n_local_masks; j->local_index++, j->cut_index = 0) {
        const struct cached_mask *local_mask = j->local_masks[j->local_index];
        while (j->w.node < j->w.end || j->cut_index < local_mask->cut.n) {
            if (j->w.node == j->w.end) {
                int32_t node = local_mask->cut.v[j->cut_index++];
                walk_begin(m, &j->w, job_current_state(m), node, m->vocab->after_subtree[node]);
            }
            if (!walk_continue(m, &j->w)) return false;
        }
    }
    return true;
}

static bool job_store_mask(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    if (!(j->stage == JOB_WALK_TRIE ? walk_continue(m, &j->w) : job_walk_cuts(m))) return false;
    mask_cache_put(m, j->new_mask, job_current_state(m), j->w.worst_len);
    j->new_mask = NULL;
    j->n_local_masks = 0;
    j->stage = JOB_COPY;
    return true;
}

/* Copies the cached mask. If it may allow a token after which the reply cannot be completed in
 * time, starts a walk with max_remaining instead. */
static void job_copy_mask(struct grammar_machine *m) {
    struct mask_job *j = &m->job;
    const struct cached_mask *mask = mask_cache_get(m, job_current_state(m));
    size_t size = mask_words(m->vocab) * sizeof *j->bits;
    bool fits = j->max_remaining < 0 || mask->worst_len <= j->max_remaining;
    m->units -= (int64_t)size / 64;
    j->stage = fits ? JOB_NONE : JOB_WALK_LIMITED;
    if (fits) {
        memcpy(j->bits, mask->bits, size);
        return;
    }
    memset(j->bits, 0, size);
    j->w = (struct vocab_walk){
        .bits = j->bits, .max_remaining = j->max_remaining, .budget = walk_budget(m->vocab)};
    walk_begin(m, &j->w, job_current_state(m), 0, m->vocab->n_nodes);
}

static bool job_stage_run(struct grammar_machine *m) {
    switch (m->job.stage) {
    case JOB_CONSUME_TOKEN:
        return job_consume_token(m);
    case JOB_LOOK_UP:
        job_look_up(m);
        return true;
    case JOB_NEXT_LOCAL:
        job_next_local(m);
        return true;
    case JOB_WALK_LOCAL:
        return job_walk_local(m);
    case JOB_WALK_TRIE:
    case JOB_WALK_CUTS:
        return job_store_mask(m);
    case JOB_COPY:
        job_copy_mask(m);
        return true;
    case JOB_WALK_LIMITED:
        if (!walk_continue(m, &m->job.w)) return false;
        m->job.stage = JOB_NONE;
        return true;
    case JOB_NONE:
        break;
    }
    return true;
}

static bool job_run(struct grammar_machine *m) {
    bool running = true;
    while (running && m->job.stage != JOB_NONE) running = job_stage_run(m);
    return running;
}

void grammar_mask(struct grammar_state *s, int32_t max_remaining, uint32_t *bits) {
    struct grammar_machine *m = s->machine;
    CHECK(m->vocab != NULL && m->job.stage == JOB_NONE);
    machine_gc_if_full(m);
    m->job = (struct mask_job){.stage = JOB_LOOK_UP,
                               .slot = s->slot,
                               .left = -1,
                               .max_remaining = max_remaining,
                               .bits = bits};
    CHECK(job_run(m));
}

/* Starts a job. Without a token it starts with the mask. */
static void job_begin(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits) {
    struct grammar_machine *m = s->machine;
    machine_gc_if_full(m);
    m->job = (struct mask_job){
        .slot = s->slot, .token = token, .left = left, .max_remaining = -1, .bits = bits};
    m->job.stage = token >= 0 ? JOB_CONSUME_TOKEN : bits ? JOB_LOOK_UP : JOB_NONE;
    if (token < 0) return;
    int32_t node = m->vocab->node_of[token];
    CHECK(node >= 0);
    walk_begin(m, &m->job.w, state_id(s), node, node + 1);
}

bool grammar_advance(struct grammar_state *s, int32_t token, int32_t left, uint32_t *bits,
                     int64_t *units) {
    struct grammar_machine *m = s->machine;
    CHECK(m->vocab != NULL);
    if (m->job.stage != JOB_NONE && m->job.slot != s->slot) return false;
    m->units = *units;
    if (m->job.stage == JOB_NONE) job_begin(s, token, left, bits);
    bool done = job_run(m);
    *units = m->units;
    m->units = UNITS_UNLIMITED;
    return done;
}

/* enumeration */

enum { TEXT_LIMIT = 4096 /* bytes */, ENUMERATION_UNITS = 1 << 24 };
struct enumeration {
    struct grammar_machine *m;
    struct strings *out;
    struct buf text;
    VECTOR(int32_t) path; /* the state before each byte of the text */
    int n, limit;
    struct error *err;
};

/* Checks the next byte. A state that occurs twice on the path means infinitely many texts, because
 * every state can reach an end. */
static int enumeration_check(struct enumeration *l, int32_t state, uint8_t byte) {
    for (int32_t i = 0; i < l->path.n; i++)
        if (l->path.v[i] == state)
            return error_set(l->err, ERR_MEMORY, "grammar has infinitely many texts");
    if (byte == 0) return error_set(l->err, ERR_MEMORY, "grammar has texts with zero bytes");
    if (l->text.len >= TEXT_LIMIT)
        return error_set(l->err, ERR_MEMORY, "grammar has texts above %d bytes", TEXT_LIMIT);
    if (l->m->units < 0)
        return error_set(l->err, ERR_MEMORY, "grammar takes too many steps to enumerate");
    return OK;
}

static int enumeration_add(struct enumeration *l) {
    if (l->n == l->limit)
        return error_set(l->err, ERR_MEMORY, "grammar has more than %d texts", l->limit);
    strings_add(l->out, l->text.len ? l->text.data : "");
    l->n++;
    return OK;
}

/* Depth-first search without recursion. Returns the number of texts, or an error. At a dead end it
 * removes the last byte and tries the next one. */
static int enumeration_run(struct enumeration *l) {
    int32_t state = l->m->start;
    int from = 0;
    if (l->m->states.v[state].flags && enumeration_add(l) != OK) return l->err->code;
    for (;;) {
        int32_t next = STATE_DEAD;
        while (from < 256 && (next = state_next(l->m, state, (uint8_t)from)) == STATE_DEAD) from++;
        if (from == 256) {
            if (l->path.n == 0) return l->n;
            state = l->path.v[--l->path.n];
            from = (uint8_t)l->text.data[--l->text.len] + 1;
            continue;
        }
        VECTOR_RESERVE(&l->path, 1);
        l->path.v[l->path.n++] = state;
        if (enumeration_check(l, next, (uint8_t)from) != OK) return l->err->code;
        buf_add(&l->text, &(char){(char)from}, 1);
        if (l->m->states.v[next].flags && enumeration_add(l) != OK) return l->err->code;
        state = next;
        from = 0;
    }
}

int grammar_enumerate(const struct grammar *g, int limit, struct strings *out, struct error *err) {
    struct enumeration l = {.out = out, .limit = limit, .err = err};
    l.m = grammar_machine_new(g, NULL, 0);
    l.m->units = ENUMERATION_UNITS;
    int n = enumeration_run(&l);
    grammar_machine_free(l.m);
    buf_release(&l.text);
    free(l.path.v);
    return n;
}
