/*
 * test_pool: the adapter pool: resident adapters, their versions and their memory. The pool is
 * compared with a naive implementation after each of many random calls. Files are changed, damaged
 * and rewritten while the pool uses them, several threads use one pool, and an engine runs one
 * version while the next is published.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "fixture.h"

#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

// last: it needs four of the above
#include <cmocka.h>

static struct error err;
static struct model *model;
static char *scratch;

static int setup(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    scratch = xasprintf("%s/shoal-pool-XXXXXX", base ? base : "/tmp");
    model = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    return mkdtemp(scratch) ? 0 : -1;
}

static int unlink_one(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static int teardown(void **state) {
    (void)state;
    model_close(model);
    int rc = nftw(scratch, unlink_one, 16, FTW_DEPTH | FTW_PHYS);
    free(scratch);
    return rc;
}

static const char *scratch_path(const char *name) {
    static char path[4][512];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[0], "%s/%s", scratch, name);
    return path[turn];
}

/* Waits until the last write is old enough to be distinguished from another write. */
static void wait_until_stamps_differ(void) {
    usleep(80000);
}

static struct buf read_file(const char *dir, const char *name) {
    char *path = path_join(dir, name);
    struct buf b = {0};
    if (file_read(path, 1 << 26, &b, &err) != OK) fail_msg("%s", err.text);
    free(path);
    return b;
}

/* Overwrites in place, without a rename. */
static void write_file(const char *dir, const char *name, const void *data, size_t n) {
    char *path = path_join(dir, name);
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(data, 1, n, f) == n && fclose(f) == 0);
    free(path);
}

#define TENSORS "adapter_model.safetensors"
#define CONFIG "adapter_config.json"

static struct adapter *adapter_make(int32_t r, uint64_t seed) {
    return fixture_adapter(&model->config, r, "all-linear", 0.05f, seed);
}

/* Saves a random adapter; `hash` receives the hash of its content. Returns `dir`. */
static const char *save_adapter(const char *dir, int32_t r, uint64_t seed, char hash[HASH_LEN]) {
    struct adapter *a = adapter_make(r, seed);
    if (adapter_save(a, dir, "x", &err) != OK) fail_msg("%s", err.text);
    memcpy(hash, a->hash, HASH_LEN);
    adapter_release(a);
    return dir;
}

static struct adapter_pool *pool_make(size_t max_bytes, bool serve_only) {
    struct adapter_pool_options o = {.max_bytes = max_bytes, .serve_only = serve_only};
    return adapter_pool_new(model, &o);
}

static struct adapter *get_ok(struct adapter_pool *p, const char *name) {
    struct adapter *a = adapter_pool_get(p, name, &err);
    if (!a) fail_msg("%s", err.text);
    return a;
}

static void assert_get(struct adapter_pool *p, const char *name, const char *hash) {
    struct adapter *a = get_ok(p, name);
    assert_string_equal(a->hash, hash);
    adapter_release(a);
}

static void assert_get_fails(struct adapter_pool *p, const char *name, int code,
                             const char *words) {
    assert_null(adapter_pool_get(p, name, &err));
    assert_int_equal(err.code, code);
    if (!strstr(err.text, words)) fail_msg("'%s' is not in '%s'", words, err.text);
}

static void assert_ok(int rc) {
    if (rc < OK) fail_msg("%s", err.text);
}

/* The pool's item with this name; its strings are allocated in `arena`. */
static struct adapter_pool_item pool_item_find(struct adapter_pool *p, const char *name,
                                               struct arena *arena) {
    int n;
    const struct adapter_pool_item *list = adapter_pool_list(p, arena, &n);
    for (int i = 0; i < n; i++) {
        assert_true(i == 0 || strcmp(list[i - 1].name, list[i].name) < 0);
        if (strcmp(list[i].name, name) == 0) return list[i];
    }
    fail_msg("'%s' is not listed", name);
    return (struct adapter_pool_item){0};
}

/* The naive implementation: a new object for each load, and every sum recomputed. */
enum { N_NAMES = 9, N_CONTENTS = 7, N_OBJECTS = 20000, N_REFERENCES = 12 };
struct naive_object {
    int content, users;
    size_t bytes;
    bool referenced_by_pool; /* the pool has a reference */
};
struct naive_name {
    bool exists, on_disk, pinned;
    int path, content, object; /* object -1: not resident */
    uint64_t version, lru_stamp;
};
struct naive_pool {
    struct naive_name names[N_NAMES];
    struct naive_object objects[N_OBJECTS];
    int n_objects;
    size_t max, file_bytes[N_CONTENTS], memory_bytes[N_CONTENTS];
    uint64_t lru_clock, drops;
};

static size_t naive_bytes(const struct naive_pool *t) {
    size_t sum = 0;
    for (int i = 0; i < t->n_objects; i++)
        sum += t->objects[i].referenced_by_pool ? t->objects[i].bytes : 0;
    return sum;
}

/* Releases the pool's references to unused objects that are not resident. */
static void naive_release_unused(struct naive_pool *t) {
    for (int i = 0; i < t->n_objects; i++) {
        bool resident = false;
        for (int k = 0; k < N_NAMES; k++)
            resident = resident || (t->names[k].exists && t->names[k].object == i);
        if (!resident && t->objects[i].users == 0) t->objects[i].referenced_by_pool = false;
    }
}

static bool naive_is_evictable(const struct naive_pool *t, int k) {
    const struct naive_name *n = &t->names[k];
    return n->exists && n->object >= 0 && n->on_disk && !n->pinned &&
           t->objects[n->object].users == 0;
}

static int naive_evict_to_fit(struct naive_pool *t, int k, size_t size) {
    naive_release_unused(t);
    const struct naive_name *self = &t->names[k];
    size_t replaced_bytes = 0, evictable_bytes = 0;
    if (self->exists && self->object >= 0 && t->objects[self->object].users == 0)
        replaced_bytes = t->objects[self->object].bytes;
    for (int i = 0; i < N_NAMES; i++)
        if (i != k && naive_is_evictable(t, i))
            evictable_bytes += t->objects[t->names[i].object].bytes;
    if (size > t->max) return ERR_MEMORY;
    if (naive_bytes(t) - replaced_bytes - evictable_bytes + size > t->max) return ERR_STATE;
    while (naive_bytes(t) - replaced_bytes + size > t->max) {
        int best = -1;
        for (int i = 0; i < N_NAMES; i++)
            if (i != k && naive_is_evictable(t, i) &&
                (best < 0 || t->names[i].lru_stamp < t->names[best].lru_stamp))
                best = i;
        t->names[best].object = -1;
        t->drops++;
        naive_release_unused(t);
    }
    return OK;
}

static void naive_replace(struct naive_pool *t, int k, int content, size_t bytes) {
    struct naive_name *n = &t->names[k];
    assert_true(t->n_objects < N_OBJECTS);
    t->objects[t->n_objects] =
        (struct naive_object){.content = content, .bytes = bytes, .referenced_by_pool = true};
    n->version += n->content != content;
    n->content = content;
    n->object = t->n_objects++;
    naive_release_unused(t);
}

static int naive_get(struct naive_pool *t, int k) {
    struct naive_name *n = &t->names[k];
    naive_release_unused(t);
    if (!n->exists) return ERR_MISSING;
    if (n->object < 0) {
        int rc = naive_evict_to_fit(t, k, t->file_bytes[n->path]);
        if (rc != OK) {
            n->version += n->content != n->path;
            n->content = n->path;
            return rc;
        }
        naive_replace(t, k, n->path, t->file_bytes[n->path]);
    }
    n->lru_stamp = ++t->lru_clock;
    t->objects[n->object].users++;
    return OK;
}

static int naive_publish(struct naive_pool *t, int k, int content, bool on_disk) {
    struct naive_name *n = &t->names[k];
    size_t bytes = on_disk ? t->file_bytes[content] : t->memory_bytes[content];
    bool same = n->exists && n->object >= 0 && n->content == content;
    int rc = same ? OK : naive_evict_to_fit(t, k, bytes);
    if (rc != OK) return rc;
    if (!n->exists) *n = (struct naive_name){.exists = true, .content = -1, .object = -1};
    n->on_disk = on_disk;
    n->path = content;
    n->lru_stamp = ++t->lru_clock;
    if (!same) naive_replace(t, k, content, bytes);
    return OK;
}

static const char *const naive_names[N_NAMES] = {"a", "b",      "c",    "d", "e",
                                                 "f", "日本語", "汉字", "z"};

/* A pool, its naive implementation, and the references that the test has got from it. */
struct trial {
    struct adapter_pool *p;
    struct naive_pool t;
    struct rng rng;
    char dirs[N_CONTENTS][512];
    struct adapter *contents[N_CONTENTS], *references[N_REFERENCES];
    int reference_objects[N_REFERENCES], n_references;
};

static void trial_open(struct trial *w, bool serve_only, uint32_t id) {
    *w = (struct trial){.rng = rng_make(3, RNG_TEST, id, 0)};
    for (int i = 0; i < N_CONTENTS; i++) {
        char hash[HASH_LEN], name[24];
        snprintf(name, sizeof name, "twin-%d", i);
        int32_t r = 1 + (i * 2) % 5;
        strcpy(w->dirs[i], save_adapter(scratch_path(name), r, (uint64_t)i, hash));
        w->contents[i] = adapter_make(r, (uint64_t)i);
        struct adapter *file = adapter_open(w->dirs[i], model, &err);
        assert_string_equal(file->hash, hash);
        assert_string_equal(w->contents[i]->hash, hash);
        adapter_pack(w->contents[i], DTYPE_F32);
        if (serve_only)
            adapter_pack_only(file, DTYPE_F32);
        else
            adapter_pack(file, DTYPE_F32);
        w->t.file_bytes[i] = adapter_bytes(file);
        w->t.memory_bytes[i] = adapter_bytes(w->contents[i]);
        w->t.max += w->t.file_bytes[i] * (serve_only ? 3 : 2) / 5;
        adapter_release(file);
    }
    for (int k = 0; k < N_NAMES; k++) w->t.names[k].object = -1;
    w->p = pool_make(w->t.max, serve_only);
    wait_until_stamps_differ();
}

static void trial_close(struct trial *w) {
    for (int i = 0; i < w->n_references; i++) adapter_release(w->references[i]);
    adapter_pool_free(w->p);
    for (int i = 0; i < N_CONTENTS; i++) adapter_release(w->contents[i]);
}

static void trial_get(struct trial *w, int k) {
    if (w->n_references == N_REFERENCES) return;
    struct adapter *a = adapter_pool_get(w->p, naive_names[k], &err);
    int want = naive_get(&w->t, k);
    assert_int_equal(a ? OK : err.code, want);
    if (!a) return;
    assert_string_equal(a->hash, w->contents[w->t.names[k].content]->hash);
    w->references[w->n_references] = a;
    w->reference_objects[w->n_references++] = w->t.names[k].object;
}

static void trial_release(struct trial *w) {
    if (w->n_references == 0) return;
    int i = (int)rng_below(&w->rng, (uint32_t)w->n_references);
    adapter_release(w->references[i]);
    w->t.objects[w->reference_objects[i]].users--;
    w->references[i] = w->references[--w->n_references];
    w->reference_objects[i] = w->reference_objects[w->n_references];
}

static void trial_publish(struct trial *w, int k, int content, bool on_disk) {
    const struct adapter *c = w->contents[content];
    struct adapter *own = adapter_from_data(&c->shape, &c->config, c->data, NULL);
    int rc = on_disk ? adapter_pool_publish_path(w->p, naive_names[k], w->dirs[content], &err)
                     : adapter_pool_publish(w->p, naive_names[k], own, &err);
    adapter_release(own);
    assert_int_equal(rc, naive_publish(&w->t, k, content, on_disk));
}

static void trial_remove(struct trial *w, int k) {
    int rc = adapter_pool_remove(w->p, naive_names[k], &err);
    assert_int_equal(rc, w->t.names[k].exists ? OK : ERR_MISSING);
    w->t.names[k] = (struct naive_name){.object = -1};
    naive_release_unused(&w->t);
}

static void trial_add(struct trial *w, int k, int content) {
    struct naive_name *n = &w->t.names[k];
    int want = !n->exists || (n->on_disk && n->path == content) ? OK : ERR_STATE;
    assert_int_equal(adapter_pool_add(w->p, naive_names[k], w->dirs[content], &err), want);
    if (!n->exists)
        *n = (struct naive_name){
            .exists = true, .on_disk = true, .path = content, .content = -1, .object = -1};
}

static void trial_pin(struct trial *w, int k) {
    struct naive_name *n = &w->t.names[k];
    bool pinned = rng_below(&w->rng, 3) == 0;
    int rc = adapter_pool_pin(w->p, naive_names[k], pinned, &err);
    assert_int_equal(rc, n->exists ? OK : ERR_MISSING);
    n->pinned = n->exists && pinned;
}

static void trial_step(struct trial *w) {
    int op = (int)rng_below(&w->rng, 100), k = (int)rng_below(&w->rng, N_NAMES);
    int content = (int)rng_below(&w->rng, N_CONTENTS);
    if (op < 40)
        trial_get(w, k);
    else if (op < 78)
        trial_release(w);
    else if (op < 80)
        trial_publish(w, k, content, false);
    else if (op < 86)
        trial_publish(w, k, content, true);
    else if (op < 91)
        trial_pin(w, k);
    else if (op < 94)
        trial_remove(w, k);
    else
        trial_add(w, k, content);
}

static void trial_compare(struct trial *w) {
    struct adapter_pool_stats s = adapter_pool_stats(w->p);
    struct arena arena = {0};
    int n, at = 0, resident = 0;
    naive_release_unused(&w->t);
    const struct adapter_pool_item *list = adapter_pool_list(w->p, &arena, &n);
    for (int k = 0; k < N_NAMES; k++) {
        const struct naive_name *t = &w->t.names[k];
        if (!t->exists) continue;
        const struct adapter_pool_item item = pool_item_find(w->p, naive_names[k], &arena);
        assert_int_equal(item.version, t->version);
        assert_string_equal(item.hash, t->content < 0 ? "" : w->contents[t->content]->hash);
        assert_int_equal(item.bytes, t->object < 0 ? 0 : w->t.objects[t->object].bytes);
        assert_int_equal(item.in_use, t->object >= 0 && w->t.objects[t->object].users > 0);
        assert_int_equal(item.pinned, t->pinned);
        assert_int_equal(item.path != NULL, t->on_disk);
        assert_null(item.problem);
        resident += t->object >= 0;
        at++;
    }
    assert_non_null(list);
    assert_int_equal(n, at);
    assert_int_equal(s.n, n);
    assert_int_equal(s.n_resident, resident);
    assert_int_equal(s.bytes, naive_bytes(&w->t));
    assert_true(s.bytes <= s.max_bytes);
    assert_int_equal(s.evictions, w->t.drops);
    arena_release(&arena);
}

static void pool_equals_naive(void **state) {
    (void)state;
    static struct trial w;
    for (uint32_t id = 0; id < 2; id++) {
        trial_open(&w, id == 1, id);
        for (int i = 0; i < 4000; i++) {
            trial_step(&w);
            trial_compare(&w);
        }
        assert_true(w.t.drops > 100);
        trial_close(&w);
    }
}

static void full_pool_then_room(void **state) {
    (void)state;
    char one[HASH_LEN], two[HASH_LEN], big[HASH_LEN];
    struct arena arena = {0};
    const char *dirs[] = {save_adapter(scratch_path("one"), 2, 1, one),
                          save_adapter(scratch_path("two"), 2, 2, two),
                          save_adapter(scratch_path("big"), 9, 3, big)};
    struct adapter *a = adapter_open(dirs[0], model, &err);
    adapter_pack(a, DTYPE_F32);
    struct adapter_pool *p = pool_make(adapter_bytes(a) * 3 / 2, false);
    adapter_release(a);
    wait_until_stamps_differ();
    assert_ok(adapter_pool_add(p, "one", dirs[0], &err));
    assert_ok(adapter_pool_add(p, "two", dirs[1], &err));
    assert_ok(adapter_pool_add(p, "big", dirs[2], &err));
    a = get_ok(p, "one");
    for (int i = 0; i < 5; i++) assert_get_fails(p, "two", ERR_STATE, "in use");
    assert_int_equal(pool_item_find(p, "two", &arena).loads, 1);
    assert_string_equal(pool_item_find(p, "two", &arena).hash, two);
    assert_int_equal(adapter_pool_bytes_of(p, "two"), adapter_bytes(a)); // of the same rank
    assert_int_equal(adapter_pool_bytes_of(p, "big"), 0);
    assert_get_fails(p, "big", ERR_MEMORY, "larger than the adapter pool");
    assert_int_equal(adapter_pool_publish_path(p, "new", dirs[1], &err), ERR_STATE);
    assert_int_equal(adapter_pool_stats(p).n, 3);
    adapter_release(a);
    assert_get(p, "two", two);
    assert_ok(adapter_pool_pin(p, "two", true, &err));
    assert_get_fails(p, "one", ERR_STATE, "pinned");
    assert_ok(adapter_pool_pin(p, "two", false, &err));
    assert_get(p, "one", one);
    arena_release(&arena);
    adapter_pool_free(p);
}

static void changed_files_are_reloaded(void **state) {
    (void)state;
    char hash[HASH_LEN], next[HASH_LEN];
    struct arena arena = {0};
    struct adapter_pool *p = pool_make(0, false);
    const char *dir = save_adapter(scratch_path("changing"), 2, 1, hash);
    wait_until_stamps_differ();
    assert_ok(adapter_pool_add(p, "c", dir, &err));
    assert_int_equal(pool_item_find(p, "c", &arena).loads, 0);
    struct adapter *held = get_ok(p, "c");
    assert_get(p, "c", hash);
    assert_int_equal(pool_item_find(p, "c", &arena).loads, 1);
    save_adapter(dir, 2, 2, next);
    assert_get(p, "c", next);
    assert_string_equal(held->hash, hash);
    assert_int_equal(pool_item_find(p, "c", &arena).version, 2);
    assert_int_equal(adapter_pool_stats(p).n_retired, 1);
    adapter_release(held);
    assert_int_equal(adapter_pool_stats(p).n_retired, 0);
    /* The same content again: the same object. */
    wait_until_stamps_differ();
    held = get_ok(p, "c");
    save_adapter(dir, 2, 2, next);
    struct adapter *again = get_ok(p, "c");
    assert_ptr_equal(held, again);
    assert_int_equal(pool_item_find(p, "c", &arena).version, 2);
    adapter_release(held);
    adapter_release(again);
    arena_release(&arena);
    adapter_pool_free(p);
}

/* Rewrites faster than the resolution of file times: size, inode and times may all stay the same.
 */
static void quick_rewrites_are_detected(void **state) {
    (void)state;
    enum { N = 6 };
    char hash[N][HASH_LEN];
    struct buf bytes[N];
    const char *dir = scratch_path("quick");
    for (int i = 0; i < N; i++) {
        save_adapter(dir, 1, (uint64_t)i, hash[i]);
        bytes[i] = read_file(dir, TENSORS);
    }
    struct adapter_pool *p = pool_make(0, true);
    assert_ok(adapter_pool_add(p, "q", dir, &err));
    for (int i = 0; i < 120; i++) {
        write_file(dir, TENSORS, bytes[i % N].data, bytes[i % N].len);
        assert_get(p, "q", hash[i % N]);
    }
    for (int i = 0; i < N; i++) buf_release(&bytes[i]);
    adapter_pool_free(p);
}

static void damaged_file_keeps_loaded_version(void **state) {
    (void)state;
    char hash[HASH_LEN], next[HASH_LEN];
    struct arena arena = {0};
    struct adapter_pool *p = pool_make(0, false);
    const char *dir = save_adapter(scratch_path("damaged"), 2, 1, hash);
    struct buf whole = read_file(dir, TENSORS);
    wait_until_stamps_differ();
    assert_ok(adapter_pool_add(p, "d", dir, &err));
    assert_get(p, "d", hash);
    write_file(dir, TENSORS, whole.data, whole.len / 2);
    assert_get(p, "d", hash);
    wait_until_stamps_differ();
    assert_get(p, "d", hash); // checked once more, because it was written so recently
    uint64_t loads = pool_item_find(p, "d", &arena).loads;
    for (int i = 0; i < 3; i++) assert_get(p, "d", hash);
    assert_int_equal(pool_item_find(p, "d", &arena).loads, loads);
    assert_non_null(strstr(pool_item_find(p, "d", &arena).problem, TENSORS));
    write_file(dir, CONFIG, "{", 1);
    assert_get(p, "d", hash);
    assert_non_null(strstr(pool_item_find(p, "d", &arena).problem, CONFIG));
    char *tensors = path_join(dir, TENSORS);
    unlink(tensors);
    free(tensors);
    assert_get(p, "d", hash);
    assert_non_null(strstr(pool_item_find(p, "d", &arena).problem, "has no"));
    save_adapter(dir, 3, 2, next);
    assert_get(p, "d", next);
    assert_null(pool_item_find(p, "d", &arena).problem);
    assert_int_equal(pool_item_find(p, "d", &arena).version, 2);
    buf_release(&whole);
    arena_release(&arena);
    adapter_pool_free(p);
}

/* Without a loaded version the error is found once and returned by each get. */
static void damaged_adapter_is_refused(void **state) {
    (void)state;
    char hash[HASH_LEN];
    struct arena arena = {0};
    struct adapter_pool *p = pool_make(0, false);
    const char *dir = save_adapter(scratch_path("refused"), 2, 1, hash);
    struct buf whole = read_file(dir, TENSORS);
    assert_ok(adapter_pool_add(p, "r", dir, &err));
    write_file(dir, TENSORS, whole.data, whole.len - 4);
    wait_until_stamps_differ();
    for (int i = 0; i < 4; i++) assert_get_fails(p, "r", ERR_FORMAT, TENSORS);
    assert_int_equal(pool_item_find(p, "r", &arena).loads, 1);
    assert_int_equal(pool_item_find(p, "r", &arena).version, 0);
    assert_int_equal(adapter_pool_publish_path(p, "new", dir, &err), ERR_FORMAT);
    assert_get_fails(p, "new", ERR_MISSING, "'new'");
    write_file(dir, TENSORS, whole.data, whole.len);
    assert_get(p, "r", hash);
    buf_release(&whole);
    arena_release(&arena);
    adapter_pool_free(p);
}

static void names_and_paths(void **state) {
    (void)state;
    char one[HASH_LEN], two[HASH_LEN];
    const char *a = save_adapter(scratch_path("scan/狐"), 1, 1, one);
    const char *b = save_adapter(scratch_path("scan/b"), 1, 2, two);
    char *hidden = xasprintf("%s/scan/.hidden", scratch), *plain = xasprintf("%s/scan/no", scratch);
    char *gguf = xasprintf("%s/lora.gguf", scratch);
    struct adapter_pool *p = pool_make(0, false);
    save_adapter(hidden, 1, 3, (char[HASH_LEN]){0});
    assert_ok(dir_make(plain, &err));
    assert_ok(adapter_pool_add(p, "b", a, &err)); // the explicit add replaces the scanned one
    assert_int_equal(adapter_pool_scan(p, scratch_path("scan"), &err), 1);
    assert_int_equal(adapter_pool_scan(p, scratch_path("scan"), &err), 0);
    assert_int_equal(adapter_pool_scan(p, scratch_path("none"), &err), ERR_MISSING);
    assert_get(p, "狐", one);
    assert_get(p, "b", one);
    assert_int_equal(adapter_pool_add(p, "b", b, &err), ERR_STATE);
    assert_int_equal(adapter_pool_add(p, "x", plain, &err), ERR_MISSING);
    assert_int_equal(adapter_pool_add(p, "x", scratch_path("none"), &err), ERR_MISSING);
    const char *bad[] = {"", "a\nb", "\x1b[0m", "\xff\xfe"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(adapter_pool_add(p, bad[i], a, &err), ERR_USAGE);
    struct adapter *held = get_ok(p, "b");
    assert_ok(adapter_save_gguf(held, gguf, "x", false, &err));
    adapter_release(held);
    assert_ok(adapter_pool_add(p, "gguf", gguf, &err));
    assert_get(p, "gguf", one);
    assert_ok(adapter_pool_remove(p, "b", &err));
    assert_get_fails(p, "b", ERR_MISSING, "'b'");
    assert_int_equal(adapter_pool_remove(p, "b", &err), ERR_MISSING);
    assert_int_equal(adapter_pool_pin(p, "b", true, &err), ERR_MISSING);
    adapter_pool_free(p);
    free(hidden);
    free(plain);
    free(gguf);
}

static void incompatible_adapters_are_not_published(void **state) {
    (void)state;
    struct adapter_pool *p = pool_make(0, false);
    struct model_config c;
    assert_ok(model_preset_find("tiny-qwen3", &c, &err));
    c.n_layers++;
    struct adapter *a = fixture_adapter(&c, 1, "q_proj", 1, 1);
    assert_int_equal(adapter_pool_publish(p, "a", a, &err), ERR_MISMATCH);
    assert_non_null(strstr(err.text, "does not fit the shape of"));
    assert_int_equal(a->refs, 1);
    adapter_release(a);
    assert_int_equal(adapter_pool_stats(p).n, 0);
    adapter_pool_free(p);
}

static int32_t prompt[] = {5, 9, 2, 40, 41, 7, 7, 3};

static struct engine_request request_make(struct adapter *a) {
    return (struct engine_request){.prompt = prompt,
                                   .n_prompt = ARRAY_LEN(prompt),
                                   .adapter = a,
                                   .max_tokens = 12,
                                   .sampling = {.temperature = 1, .top_p = 1, .seed = 4}};
}

static struct engine *engine_make(enum dtype elem) {
    struct engine_options o = {.max_rows = 4, .max_seqs = 4, .max_len = 64, .lora_elem = elem};
    struct engine *e = engine_new(model, &o, &err);
    assert_non_null(e);
    return e;
}

static void request_run_alone(struct engine_request *r, struct adapter *a, enum dtype elem) {
    struct engine *e = engine_make(elem);
    *r = request_make(a);
    assert_ok(engine_run(e, r, 1, NULL, &err));
    engine_free(e);
}

static void assert_same_output(const struct engine_request *a, const struct engine_request *b) {
    assert_true(a->done && b->done);
    assert_int_equal(a->n_out, b->n_out);
    assert_memory_equal(a->out, b->out, (size_t)a->n_out * sizeof *a->out);
    assert_memory_equal(a->out_logprob, b->out_logprob, (size_t)a->n_out * sizeof(float));
}

static void replaced_while_running(void **state) {
    (void)state;
    char hash[2][HASH_LEN];
    struct engine_request alone[2], together[2];
    struct adapter *got[2];
    const char *dirs[] = {save_adapter(scratch_path("v1"), 3, 1, hash[0]),
                          save_adapter(scratch_path("v2"), 3, 2, hash[1])};
    for (int i = 0; i < 2; i++) {
        struct adapter *a = adapter_open(dirs[i], model, &err);
        request_run_alone(&alone[i], a, DTYPE_F32);
        adapter_release(a);
    }
    struct adapter_pool *p = pool_make(0, true);
    struct engine *e = engine_make(DTYPE_F32);
    for (int i = 0; i < 2; i++) {
        assert_ok(adapter_pool_publish_path(p, "hot", dirs[i], &err));
        got[i] = get_ok(p, "hot");
        assert_string_equal(got[i]->hash, hash[i]);
        together[i] = request_make(got[i]);
        assert_ok(engine_submit(e, &together[i], &err));
        for (int k = 0; i == 0 && k < 5; k++) assert_int_equal(engine_step(e), 1);
    }
    assert_int_equal(adapter_pool_stats(p).n_retired, 1);
    while (engine_step(e) > 0) {}
    assert_memory_not_equal(alone[0].out_logprob, alone[1].out_logprob, sizeof(float));
    for (int i = 0; i < 2; i++) {
        assert_same_output(&alone[i], &together[i]);
        engine_request_release(&alone[i]);
        engine_request_release(&together[i]);
        adapter_release(got[i]);
    }
    assert_int_equal(adapter_pool_stats(p).n_retired, 0);
    engine_free(e);
    adapter_pool_free(p);
}

/* serve_only: only packs are in memory; the results are the same, also for DoRA. */
static void serve_only_keeps_packs(void **state) {
    (void)state;
    static const enum dtype elems[] = {DTYPE_F32, DTYPE_BF16};
    for (int i = 0; i < 4; i++) {
        struct adapter_config c = {.r = 3, .alpha = 5, .dora = i >= 2};
        enum dtype elem = elems[i % 2];
        assert_ok(adapter_targets_parse("all-linear", c.target, &err));
        size_t n = adapter_param_count(&model->config, &c);
        float *data = xcalloc(n, sizeof *data);
        struct rng rng = rng_make(6, RNG_TEST, (uint32_t)i, 0);
        for (size_t k = 0; k < n; k++) data[k] = 0.05f + 0.05f * rng_normal(&rng);
        struct adapter *a = adapter_from_data(&model->config, &c, data, NULL), *served;
        assert_ok(adapter_save(a, scratch_path("served"), "x", &err));
        assert_ok(adapter_bind(a, model, &err));
        struct adapter_pool_options o = {.elem = elem, .serve_only = true};
        struct adapter_pool *p = adapter_pool_new(model, &o);
        assert_ok(adapter_pool_add(p, "s", scratch_path("served"), &err));
        served = get_ok(p, "s");
        struct engine_request whole, pack;
        request_run_alone(&whole, a, elem);
        request_run_alone(&pack, served, elem);
        assert_same_output(&whole, &pack);
        assert_null(served->data);
        assert_true(adapter_bytes(served) < adapter_bytes(a) * 2 / 3);
        engine_request_release(&whole);
        engine_request_release(&pack);
        adapter_release(a);
        adapter_release(served);
        adapter_pool_free(p);
        free(data);
    }
}

/* 2,000 different adapters with memory for fifty. */
static void two_thousand_adapters(void **state) {
    (void)state;
    enum { N = 2000, FIT = 50 };
    char hash[HASH_LEN], name[64], *previous = xstrdup("");
    struct arena arena = {0};
    struct adapter *a = fixture_adapter(&model->config, 1, "q_proj", 0.1f, 1);
    assert_ok(adapter_save(a, scratch_path("mother"), "x", &err));
    adapter_pack_only(a, DTYPE_F32);
    size_t bytes = adapter_bytes(a);
    adapter_release(a);
    struct buf tensors = read_file(scratch_path("mother"), TENSORS);
    struct buf config = read_file(scratch_path("mother"), CONFIG);
    for (int i = 0; i < N; i++) {
        float last = (float)i;
        snprintf(name, sizeof name, "many/%04d", i);
        assert_ok(dir_make(scratch_path(name), &err));
        memcpy(tensors.data + tensors.len - sizeof last, &last, sizeof last);
        write_file(scratch_path(name), TENSORS, tensors.data, tensors.len);
        write_file(scratch_path(name), CONFIG, config.data, config.len);
    }
    wait_until_stamps_differ();
    struct adapter_pool *p = pool_make(bytes * FIT, true);
    double start = clock_now();
    assert_int_equal(adapter_pool_scan(p, scratch_path("many"), &err), N);
    double scanned = clock_now();
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "%04d", i);
        a = get_ok(p, name);
        assert_string_not_equal(a->hash, previous);
        free(previous);
        previous = xstrdup(a->hash);
        adapter_release(a);
        assert_true(adapter_pool_stats(p).bytes <= bytes * FIT);
    }
    double loaded = clock_now();
    for (int i = N - 1; i >= 0; i--) {
        snprintf(name, sizeof name, "%04d", i);
        adapter_release(get_ok(p, name));
    }
    print_message("%d adapters: scan %.0f ms, first get %.2f ms each, again %.2f ms each\n", N,
                  1e3 * (scanned - start), 1e3 * (loaded - scanned) / N,
                  1e3 * (clock_now() - loaded) / N);
    struct adapter_pool_stats s = adapter_pool_stats(p);
    assert_int_equal(s.n_resident, FIT);
    assert_int_equal(s.loads, 2 * N - FIT);
    assert_int_equal(s.evictions, 2 * N - 2 * FIT);
    struct adapter_pool_item last = pool_item_find(p, "1999", &arena);
    assert_int_equal(last.version, 1);
    memcpy(hash, last.hash, HASH_LEN);
    assert_string_equal(hash, previous);
    arena_release(&arena);
    buf_release(&tensors);
    buf_release(&config);
    adapter_pool_free(p);
    free(previous);
}

/* Threads get, use and release adapters while another thread publishes and removes them. */
enum { N_THREADS = 5, N_SHARED = 6 };
struct race {
    struct adapter_pool *p;
    char hashes[N_SHARED + 1][HASH_LEN];
    pthread_barrier_t start;
    uint64_t got, refused, wrong;
};

static const char *race_name(int i) {
    static const char *const names[N_SHARED + 1] = {"0", "1", "2", "3", "4", "5", "other"};
    return names[i];
}

static void race_get(struct race *r, int i) {
    struct error e;
    struct adapter *a = adapter_pool_get(r->p, race_name(i), &e);
    /* Name 0 is republished with another's content, name 1 is added and removed. */
    bool fine = a ? strcmp(a->hash, r->hashes[i]) == 0 ||
                        (i == 0 && strcmp(a->hash, r->hashes[N_SHARED]) == 0)
                  : e.code == ERR_STATE || (i == 1 && e.code == ERR_MISSING);
    __atomic_add_fetch(a ? &r->got : &r->refused, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&r->wrong, !fine, __ATOMIC_RELAXED);
    if (a) adapter_pack(a, DTYPE_F32);
    if (i % 2) usleep(50);
    adapter_release(a);
}

static void *race_reader(void *ctx) {
    struct race *r = ctx;
    static uint32_t id;
    struct rng rng = rng_make(9, RNG_TEST, __atomic_add_fetch(&id, 1, __ATOMIC_RELAXED), 0);
    pthread_barrier_wait(&r->start);
    race_get(r, 5); // all at once
    pthread_barrier_wait(&r->start);
    pthread_barrier_wait(&r->start); // the test checks the state between the two
    for (int i = 0; i < 400; i++) race_get(r, (int)rng_below(&rng, N_SHARED));
    return NULL;
}

static void race_publish(struct race *r, int i) {
    struct error e;
    const char *path[] = {"race-0", "race-6"};
    char dir[512];
    snprintf(dir, sizeof dir, "%s/%s", scratch, path[i % 2]);
    int rc = adapter_pool_publish_path(r->p, "0", dir, &e);
    bool fine = rc == OK || rc == ERR_STATE;
    snprintf(dir, sizeof dir, "%s/race-1", scratch);
    if (i % 4 == 0) adapter_pool_remove(r->p, "1", &e);
    if (i % 4 == 1) fine = fine && adapter_pool_add(r->p, "1", dir, &e) == OK;
    if (i % 4 == 2) adapter_pool_pin(r->p, "2", i % 8 == 2, &e);
    __atomic_add_fetch(&r->wrong, !fine, __ATOMIC_RELAXED);
    struct arena arena = {0};
    int n;
    adapter_pool_list(r->p, &arena, &n);
    arena_release(&arena);
}

static void threads_agree(void **state) {
    (void)state;
    struct race r = {0};
    pthread_t threads[N_THREADS];
    struct arena arena = {0};
    size_t bytes = 0;
    char name[32];
    for (int i = 0; i <= N_SHARED; i++) {
        snprintf(name, sizeof name, "race-%d", i);
        save_adapter(scratch_path(name), 2, (uint64_t)i, r.hashes[i]);
    }
    struct adapter *a = adapter_open(scratch_path("race-0"), model, &err);
    adapter_pack_only(a, DTYPE_F32);
    bytes = adapter_bytes(a);
    adapter_release(a);
    wait_until_stamps_differ();
    r.p = pool_make(bytes * 7 / 2, true);
    for (int i = 0; i < N_SHARED; i++) {
        snprintf(name, sizeof name, "race-%d", i);
        assert_ok(adapter_pool_add(r.p, race_name(i), scratch_path(name), &err));
    }
    pthread_barrier_init(&r.start, NULL, N_THREADS + 1);
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, race_reader, &r), 0);
    pthread_barrier_wait(&r.start);
    pthread_barrier_wait(&r.start);
    assert_int_equal(pool_item_find(r.p, "5", &arena).loads, 1);
    assert_int_equal(pool_item_find(r.p, "5", &arena).gets, N_THREADS);
    pthread_barrier_wait(&r.start);
    for (int i = 0; i < 100; i++) race_publish(&r, i);
    for (int i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
    struct adapter_pool_stats s = adapter_pool_stats(r.p);
    assert_int_equal(r.wrong, 0);
    assert_int_equal(s.gets, r.got);
    assert_int_equal(s.n_retired, 0);
    assert_true(r.got > r.refused && s.bytes <= s.max_bytes && s.evictions > 0);
    pthread_barrier_destroy(&r.start);
    arena_release(&arena);
    adapter_pool_free(r.p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pool_equals_naive),
        cmocka_unit_test(full_pool_then_room),
        cmocka_unit_test(changed_files_are_reloaded),
        cmocka_unit_test(quick_rewrites_are_detected),
        cmocka_unit_test(damaged_file_keeps_loaded_version),
        cmocka_unit_test(damaged_adapter_is_refused),
        cmocka_unit_test(names_and_paths),
        cmocka_unit_test(incompatible_adapters_are_not_published),
        cmocka_unit_test(replaced_while_running),
        cmocka_unit_test(serve_only_keeps_packs),
        cmocka_unit_test(two_thousand_adapters),
        cmocka_unit_test(threads_agree),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
