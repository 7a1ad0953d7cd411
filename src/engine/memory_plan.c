/*
 * memory_plan: the sum of all memory, and a search for the largest engine under a limit.
 *
 * Every term is an upper bound of resident bytes, so that the peak memory that the system reports
 * stays below the total. Memory that is reserved but never used is counted, and so is memory that
 * is freed after loading.
 *
 * The commands print the memory that the process actually used; this file does not measure it.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    SERVER_BYTES = 16 << 20, /* threads, stores, metrics, fragmentation of two heaps */
    PROGRAM_BYTES = 8 << 20, /* code, libraries, stacks, the store; measured 5 to 7 MB */
    TOKENIZER_FACTOR = 12,   /* memory per byte of its files; measured, with parsing: 5 to 10 */
    ROWS_MIN = 16,           /* engine_shrink does not make max_rows smaller */
    /* With 1/32 of its size more than an adapter's structs need, so that the largest one fits. */
    ADAPTER_STRUCT_BYTES = 64 << 10,
};

static double mb(size_t bytes) {
    return (double)bytes / (1 << 20);
}

/* Bytes of the whole engine; *kv receives those of its KV cache. */
static size_t engine_and_kv_bytes(const struct model_config *c, const struct engine_options *o,
                                  size_t *kv) {
    struct kv_cache_options ko = {.n_slots = o->max_seqs + o->max_cached,
                                  .slot_len = o->max_len,
                                  .n_pages = o->n_pages,
                                  .elem = o->kv_elem};
    *kv = kv_cache_bytes(c, &ko);
    return engine_bytes(c, o);
}

/* The bytes that the plan may use; 0: any number. */
static size_t plan_bound(const struct memory_plan_input *in) {
    return in->limit ? in->limit : in->available;
}

static size_t plan_update_total(const struct memory_plan_input *in, struct memory_plan *p) {
    size_t engine = engine_and_kv_bytes(&in->model.config, &p->engine, &p->kv);
    p->activations = engine - p->kv;
    p->total = p->weights + p->tokenizer + p->adapters + p->requests + p->other_bytes + engine;
    return p->total;
}

/* p->engine has the minimum number of pages. Halves max_rows or max_seqs, whichever saves more,
 * until the plan fits. False: it cannot fit. */
static bool engine_shrink(const struct memory_plan_input *in, struct memory_plan *p) {
    while (plan_update_total(in, p) > plan_bound(in)) {
        struct memory_plan rows = *p, seqs = *p;
        rows.engine.max_rows = MAX(MIN(ROWS_MIN, p->engine.max_rows), p->engine.max_rows / 2);
        seqs.engine.max_seqs = MAX(1, p->engine.max_seqs / 2);
        seqs.engine.max_cached = MIN(p->engine.max_cached, seqs.engine.max_seqs);
        size_t by_rows = plan_update_total(in, &rows), by_seqs = plan_update_total(in, &seqs);
        if (MIN(by_rows, by_seqs) >= p->total) return false;
        *p = by_rows < by_seqs ? rows : seqs;
    }
    return true;
}

/* Sets n_pages to the largest number that fits, at least the pages of one sequence and at most
 * pages_wanted. */
static void pages_grow(const struct memory_plan_input *in, struct memory_plan *p) {
    int32_t lo = p->engine.n_pages;
    int32_t hi = (int32_t)MIN((int64_t)p->engine.max_seqs * kv_cache_pages_for(p->engine.max_len),
                              (int64_t)INT32_MAX - 1);
    hi = MIN(hi, MAX(p->pages_wanted, lo));
    size_t bound = plan_bound(in);
    if (in->half && bound) bound = p->total + (bound - p->total) / 2;
    while (lo < hi) {
        p->engine.n_pages = lo + (hi - lo + 1) / 2;
        if (bound == 0 || plan_update_total(in, p) <= bound)
            lo = p->engine.n_pages;
        else
            hi = p->engine.n_pages - 1;
    }
    p->engine.n_pages = lo;
    plan_update_total(in, p);
}

/* Gives the adapter pool half of what the smallest engine leaves, or all that is wanted if that is
 * less; the KV cache grows in the rest. */
static void pool_grow(const struct memory_plan_input *in, struct memory_plan *p) {
    size_t bound = plan_bound(in), half = bound ? (bound - p->total) / 2 : SIZE_MAX;
    size_t more = MIN(in->pool_wanted, half);
    p->pool += more;
    p->adapters += more;
    plan_update_total(in, p);
}

static int plan_set_error(const struct memory_plan *p, struct error *err) {
    if (!p->limit)
        return error_set(err, ERR_MEMORY,
                         "%.1f MB of memory are available, but one sequence of %d tokens needs "
                         "%.1f MB (weights %.1f, adapters %.1f, KV cache %.1f, activations %.1f, "
                         "requests %.1f); free memory, or use smaller weights, shorter texts, a "
                         "smaller --max-model-len, --kv-cache-dtype i8 or fewer threads",
                         mb(p->available), p->engine.max_len, mb(p->total), mb(p->weights),
                         mb(p->adapters), mb(p->kv), mb(p->activations), mb(p->requests));
    return error_set(
        err, ERR_MEMORY,
        "a limit of '%.1f MB' is too small: one sequence of %d tokens needs %.1f MB (weights %.1f, "
        "tokenizer %.1f, adapters %.1f, KV cache %.1f, activations %.1f, requests %.1f, program "
        "and "
        "work %.1f); "
        "raise --max-memory to %.0fM, use smaller weights, shorter texts, a smaller "
        "--max-model-len, --kv-cache-dtype i8 or fewer threads",
        mb(p->limit), p->engine.max_len, mb(p->total), mb(p->weights), mb(p->tokenizer),
        mb(p->adapters), mb(p->kv), mb(p->activations), mb(p->requests), mb(p->other_bytes),
        mb(p->total) + 1);
}

int memory_plan_make(const struct memory_plan_input *in, struct memory_plan *out,
                     struct error *err) {
    struct memory_plan p = {.weights = in->model.weights + in->model.while_loading,
                            .tokenizer = in->model.tokenizer * TOKENIZER_FACTOR,
                            .adapters = in->adapters.resident + in->adapters.while_loading,
                            .pool = in->adapters.resident,
                            .requests = in->requests,
                            .other_bytes = PROGRAM_BYTES + in->caller_bytes +
                                           (in->requests ? SERVER_BYTES : 0),
                            .limit = in->limit,
                            .available = in->available,
                            .engine = in->max_options};
    CHECK(p.engine.max_rows > 0 && p.engine.max_seqs > 0 && p.engine.max_len > 0);
    if (p.engine.max_cached == 0) p.engine.max_cached = p.engine.max_seqs;
    int32_t min_pages = kv_cache_pages_for(p.engine.max_len);
    p.pages_wanted = p.engine.n_pages;
    if (p.pages_wanted == 0)
        p.pages_wanted =
            (int32_t)MIN((int64_t)p.engine.max_seqs * min_pages, (int64_t)INT32_MAX - 1);
    p.engine.n_pages = min_pages;
    int rc = OK;
    if (plan_bound(in) > 0 && !engine_shrink(in, &p)) {
        rc = plan_set_error(&p, err);
    } else {
        plan_update_total(in, &p);
        pool_grow(in, &p);
        pages_grow(in, &p);
    }
    *out = p;
    return rc;
}

/* Total of the smallest plan for one sequence of `len` tokens. */
static size_t least_total(const struct memory_plan_input *in, int32_t len) {
    struct memory_plan_input one = *in;
    struct memory_plan plan;
    struct error too_small;
    one.limit = 1;
    one.max_options.max_len = len;
    memory_plan_make(&one, &plan, &too_small);
    return plan.total;
}

/* The shortest context that memory_plan_context chooses. */
static int32_t shortest_context(const struct memory_plan_input *in) {
    enum { SHORTEST = 1024 };
    return MIN(in->model.config.max_seq_len, SHORTEST);
}

void memory_plan_limit_requests(struct memory_plan_input *in) {
    enum { LEAST_BYTES = 1 << 20 };
    size_t wanted = in->requests;
    if (in->limit || !in->available || wanted <= LEAST_BYTES) return;
    int32_t len = in->max_options.max_len;
    in->requests = LEAST_BYTES;
    size_t least = least_total(in, len ? len : shortest_context(in)),
           room = in->available - MIN(least, in->available);
    in->requests = MIN(wanted, MAX(LEAST_BYTES, MIN(in->available / 4, room / 2)));
}

int32_t memory_plan_context(const struct memory_plan_input *in) {
    enum { SHORT = 4096 };
    int32_t hi = in->model.config.max_seq_len, lo = shortest_context(in), brief = MIN(hi, SHORT);
    size_t bound = plan_bound(in);
    if (!bound) return hi;
    size_t least = least_total(in, lo), most = least + (bound - least) / 2;
    if (least >= bound) return lo;
    if (least_total(in, brief) > most) {
        hi = brief;
        most = bound;
    }
    if (least_total(in, hi) <= most) return hi;
    while (hi - lo > KV_PAGE_SIZE) { // hi does not fit
        int32_t len = (lo + (hi - lo) / 2) / KV_PAGE_SIZE * KV_PAGE_SIZE;
        *(len > lo && least_total(in, len) <= most ? &lo : &hi) = MAX(len, lo + 1);
    }
    return lo;
}

void adapter_sizes_add(struct adapter_sizes *all, const struct adapter_size *one) {
    all->sum.resident += one->resident;
    all->largest.resident = MAX(all->largest.resident, one->resident);
    all->largest.while_loading = MAX(all->largest.while_loading, one->while_loading);
    all->sum.while_loading = all->largest.while_loading;
}

void memory_plan_add_pool(struct memory_plan_input *in, const struct adapter_sizes *all) {
    size_t n = all->largest.resident;
    in->adapters.resident = n ? n + n / 32 + ADAPTER_STRUCT_BYTES : 0;
    in->adapters.while_loading = n + all->largest.while_loading;
    in->pool_wanted = all->sum.resident - n;
}

bool memory_plan_is_reduced(const struct memory_plan_input *in, const struct memory_plan *p) {
    return p->engine.n_pages < p->pages_wanted || p->engine.max_seqs < in->max_options.max_seqs ||
           p->engine.max_rows < in->max_options.max_rows;
}

bool engine_options_fit(const struct model_config *c, struct engine_options *o, size_t bytes) {
    struct memory_plan_input in = {
        .model.config = *c, .limit = PROGRAM_BYTES + bytes, .max_options = *o};
    struct engine_options *all = &in.max_options;
    struct memory_plan plan;
    struct error ignored; // its sizes are those of a process with nothing but this engine
    if (!all->max_rows) all->max_rows = ENGINE_DEFAULT_ROWS;
    if (!all->max_seqs) all->max_seqs = 64;
    if (!all->max_len) all->max_len = MIN(c->max_seq_len, 4096);
    int rc = memory_plan_make(&in, &plan, &ignored);
    *o = plan.engine;
    return rc == OK;
}

size_t engine_least_bytes(const struct model_config *c, const struct engine_options *o) {
    struct engine_options least = *o;
    engine_options_fit(c, &least, 0);
    return engine_bytes(c, &least);
}

size_t model_loading_bytes(const struct model_size *size) {
    return model_with_bytes(size, 0);
}

size_t model_with_bytes(const struct model_size *size, size_t bytes) {
    return size->weights + MAX(size->while_loading, bytes) + size->tokenizer * TOKENIZER_FACTOR;
}

void memory_plan_text(const struct memory_plan *p, struct buf *out) {
    static const char *const elems[N_DTYPE] = {"f32", "bf16", "f16", "i8"};
    const struct engine_options *e = &p->engine;
    buf_printf(out, "memory plan, MB\n");
    buf_printf(out, "  weights      %9.1f\n", mb(p->weights));
    buf_printf(out, "  tokenizer    %9.1f  at most\n", mb(p->tokenizer));
    buf_printf(out, "  adapters     %9.1f\n", mb(p->adapters));
    buf_printf(out, "  KV cache     %9.1f  %d pages of %d positions in %s, %d wanted\n", mb(p->kv),
               e->n_pages, KV_PAGE_SIZE, elems[e->kv_elem], p->pages_wanted);
    buf_printf(out, "  activations  %9.1f  %d rows per step, %d sequences of at most %d tokens\n",
               mb(p->activations), e->max_rows, e->max_seqs, e->max_len);
    if (p->requests)
        buf_printf(out, "  requests     %9.1f  at most, with their replies\n", mb(p->requests));
    buf_printf(out, "  rest         %9.1f  %s\n", mb(p->other_bytes),
               p->requests ? "program and server" : "program and requests");
    buf_printf(out, "  total        %9.1f", mb(p->total));
    if (p->limit) buf_printf(out, "  of %.1f", mb(p->limit));
}

json_t *memory_plan_json(const struct memory_plan *p) {
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:i,s:i,s:i,s:i,s:i}", "weights",
                     (json_int_t)p->weights, "tokenizer", (json_int_t)p->tokenizer, "adapters",
                     (json_int_t)p->adapters, "kv", (json_int_t)p->kv, "activations",
                     (json_int_t)p->activations, "requests", (json_int_t)p->requests, "rest",
                     (json_int_t)p->other_bytes, "total", (json_int_t)p->total, "limit",
                     (json_int_t)p->limit, "pages", p->engine.n_pages, "pages_wanted",
                     p->pages_wanted, "max_rows", p->engine.max_rows, "max_seqs",
                     p->engine.max_seqs, "max_len", p->engine.max_len);
}

/* The number of values in the tensors of a safetensors file, and the file's size. For other files,
 * an upper bound of the number if no value has less than 2 bytes. */
static int values_count(const char *path, size_t *values, size_t *bytes, struct error *err) {
    if (!path_has_extension(path, ".safetensors")) {
        struct file_map map;
        if (file_map_open(&map, path, err) != OK) return err->code;
        *bytes = map.size;
        *values = map.size / 2;
        file_map_close(&map);
        return OK;
    }
    struct safetensors st;
    if (safetensors_open(&st, path, err) != OK) return err->code;
    for (int i = 0; i < st.n_tensors; i++)
        *values += st.tensors[i].size * 32 / tensor_row_bytes(st.tensors[i].type, 32);
    *bytes = st.map.size;
    safetensors_close(&st);
    return OK;
}

/* The size of the hashes of an adapter's training data; 0: it has none. */
static size_t training_data_size(const char *dir) {
    char *path = path_join(dir, "training_data.hashes");
    struct stat st;
    size_t size = stat(path, &st) == 0 ? (size_t)st.st_size : 0;
    free(path);
    return size;
}

int adapter_measure(const char *path, enum dtype elem, struct adapter_size *sum,
                    struct error *err) {
    if (hub_is_name(path)) {
        char *pulled = hub_cached_path(path, err);
        int rc = pulled ? adapter_measure(pulled, elem, sum, err) : err->code;
        free(pulled);
        return rc;
    }
    size_t values = 0, bytes = 0;
    char *file = path_is_dir(path) ? path_join(path, "adapter_model.safetensors") : xstrdup(path);
    int rc = values_count(file, &values, &bytes, err);
    free(file);
    if (rc != OK) return rc;
    sum->resident += training_data_size(path);
    sum->resident += values * (sizeof(float) + dtype_size(elem));
    // the file, and its values in f32 while they are converted
    sum->while_loading = MAX(sum->while_loading, bytes + values * sizeof(float));
    return OK;
}
