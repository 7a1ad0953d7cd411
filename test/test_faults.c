/*
 * Faults on every open, load and save path: the n-th allocation, and the n-th call of the file
 * system, fails, for every n until nothing fails any more.
 *
 * The linker puts this file's functions between Shoal and the C library (--wrap in the Makefile),
 * so the program itself has no hook. Requirements:
 *
 * 1. Memory whose size comes from a file, a model or an option: the call returns ERR_MEMORY, its
 *    message contains the requested size, and nothing stays allocated, open or mapped.
 * 2. Any other memory: the same, or the process ends with exit code 1 and a message; it never
 *    crashes, and never continues with fewer data than it read.
 * 3. Files: the call returns an error with the system's message; a short or interrupted read
 * changes
 *    nothing. A save that fails leaves the old file complete and no temporary file.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "eval/eval.h"
#include "evolve/evolve.h"
#include "fixture.h"
#include "folder.h"
#include "grammar/grammar.h"
#include "memory/memory.h"
#include "serve/fallback.h"
#include "store/store.h"
#include "swarm/swarm.h"
#include "template/template.h"
#include "train/train.h"
#include "world/world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Larger than every allocation of fixed size (an arena's block, a file's chunk); `large` ones
 * depend on data. */
enum { LARGE = 512 << 10 };

/* How a child ended. */
enum { CHILD_OK = 40, CHILD_ERROR, CHILD_SILENT, CHILD_KILLED };

/* The fault to inject, and the counters. */
static struct {
    size_t threshold; /* size of allocations that count; 0: all */
    long memory;      /* the n-th of them fails; 0: none */
    long io;          /* the n-th call of the file system fails; 0: none */
    int why;          /* its errno */
    bool kill;        /* the n-th call of the file system ends the process instead */
    bool trickle;     /* every read is first interrupted, and then returns few bytes */
    long memory_seen, io_seen;
    bool fired, child;
} fault;
static long live; /* blocks that Shoal has allocated and not freed */

static bool memory_fails(size_t size) {
    if (size < fault.threshold || ++fault.memory_seen != fault.memory) return false;
    fault.fired = true;
    return true;
}

static bool io_fails(void) {
    if (++fault.io_seen != fault.io) return false;
    fault.fired = true;
    if (fault.kill) _exit(CHILD_KILLED);
    errno = fault.why;
    return true;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void __real_free(void *p);
char *__real_strndup(const char *s, size_t n);
char *__real_realpath(const char *path, char *out);
int __real_vasprintf(char **out, const char *fmt, va_list ap);
_Noreturn void __real_exit(int code);
int __real_fstat(int fd, struct stat *st);
ssize_t __real_read(int fd, void *p, size_t n);
void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __real_open(const char *path, int flags, ...);
FILE *__real_fdopen(int fd, const char *mode);
size_t __real_fwrite(const void *p, size_t size, size_t n, FILE *f);
int __real_fflush(FILE *f);
int __real_fsync(int fd);
int __real_fclose(FILE *f);
int __real_rename(const char *from, const char *to);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
void __wrap_free(void *p);
char *__wrap_strndup(const char *s, size_t n);
char *__wrap_realpath(const char *path, char *out);
int __wrap_vasprintf(char **out, const char *fmt, va_list ap);
_Noreturn void __wrap_exit(int code);
int __wrap_fstat(int fd, struct stat *st);
ssize_t __wrap_read(int fd, void *p, size_t n);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __wrap_open(const char *path, int flags, ...);
FILE *__wrap_fdopen(int fd, const char *mode);
size_t __wrap_fwrite(const void *p, size_t size, size_t n, FILE *f);
int __wrap_fflush(FILE *f);
int __wrap_fsync(int fd);
int __wrap_fclose(FILE *f);
int __wrap_rename(const char *from, const char *to);

static void *counted(void *p) {
    if (p) __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
    return p;
}

void *__wrap_malloc(size_t size) {
    return memory_fails(size) ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size) {
    return memory_fails(n * size) ? NULL : counted(__real_calloc(n, size));
}

void *__wrap_realloc(void *p, size_t size) {
    if (memory_fails(size)) return NULL;
    return p ? __real_realloc(p, size) : counted(__real_realloc(p, size));
}

void __wrap_free(void *p) {
    if (p) __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    __real_free(p);
}

/* These allocate memory inside the C library that Shoal frees. */
char *__wrap_strndup(const char *s, size_t n) {
    return counted(__real_strndup(s, n));
}

char *__wrap_realpath(const char *path, char *out) {
    return out ? __real_realpath(path, out) : counted(__real_realpath(path, NULL));
}

int __wrap_vasprintf(char **out, const char *fmt, va_list ap) {
    int n = __real_vasprintf(out, fmt, ap);
    if (n >= 0) counted(*out);
    return n;
}

/* Memory that a child still has when it exits is not a leak, because it could not continue. */
_Noreturn void __wrap_exit(int code) {
    if (fault.child) _exit(code);
    __real_exit(code);
}

int __wrap_open(const char *path, int flags, ...) {
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return io_fails() ? -1 : __real_open(path, flags, mode);
}

int __wrap_fstat(int fd, struct stat *st) {
    return io_fails() ? -1 : __real_fstat(fd, st);
}

ssize_t __wrap_read(int fd, void *p, size_t n) {
    static unsigned turn;
    if (io_fails()) return -1;
    if (!fault.trickle) return __real_read(fd, p, n);
    if (turn++ % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    return __real_read(fd, p, MIN(n, (size_t)997));
}

void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    return io_fails() ? MAP_FAILED : __real_mmap(at, n, prot, flags, fd, offset);
}

FILE *__wrap_fdopen(int fd, const char *mode) {
    return io_fails() ? NULL : __real_fdopen(fd, mode);
}

/* A full disk takes the first half. */
size_t __wrap_fwrite(const void *p, size_t size, size_t n, FILE *f) {
    if (f == stderr || f == stdout || !io_fails()) return __real_fwrite(p, size, n, f);
    size_t half = __real_fwrite(p, size, n / 2, f);
    errno = fault.why;
    return half;
}

int __wrap_fflush(FILE *f) {
    if (f == stderr || f == stdout || !io_fails()) return __real_fflush(f);
    return EOF;
}

int __wrap_fsync(int fd) {
    return io_fails() ? -1 : __real_fsync(fd);
}

int __wrap_fclose(FILE *f) {
    bool fails = io_fails();
    int rc = __real_fclose(f);
    errno = fails ? fault.why : errno;
    return fails ? EOF : rc;
}

int __wrap_rename(const char *from, const char *to) {
    return io_fails() ? -1 : __real_rename(from, to);
}

/* SQLite has separate hooks for both. */
static sqlite3_mem_methods sqlite_memory;
static void *sqlite_malloc(int n) {
    return memory_fails((size_t)n) ? NULL : sqlite_memory.xMalloc(n);
}
static void *sqlite_realloc(void *p, int n) {
    return memory_fails((size_t)n) ? NULL : sqlite_memory.xRealloc(p, n);
}
static int (*sqlite_open_real)(const char *, int, int);
static ssize_t (*sqlite_pread_real)(int, void *, size_t, off_t);
static ssize_t (*sqlite_pwrite_real)(int, const void *, size_t, off_t);
static int sqlite_open_(const char *path, int flags, int mode) {
    return io_fails() ? -1 : sqlite_open_real(path, flags, mode);
}
static ssize_t sqlite_pread(int fd, void *p, size_t n, off_t at) {
    return io_fails() ? -1 : sqlite_pread_real(fd, p, n, at);
}
static ssize_t sqlite_pwrite(int fd, const void *p, size_t n, off_t at) {
    return io_fails() ? -1 : sqlite_pwrite_real(fd, p, n, at);
}

static void sqlite_prepare(void) {
    assert_int_equal(sqlite3_config(SQLITE_CONFIG_GETMALLOC, &sqlite_memory), SQLITE_OK);
    sqlite3_mem_methods ours = sqlite_memory;
    ours.xMalloc = sqlite_malloc;
    ours.xRealloc = sqlite_realloc;
    assert_int_equal(sqlite3_config(SQLITE_CONFIG_MALLOC, &ours), SQLITE_OK);
    sqlite3_vfs *vfs = sqlite3_vfs_find(NULL);
    sqlite_open_real = (int (*)(const char *, int, int))vfs->xGetSystemCall(vfs, "open");
    sqlite_pread_real = (ssize_t(*)(int, void *, size_t, off_t))vfs->xGetSystemCall(vfs, "pread64");
    sqlite_pwrite_real =
        (ssize_t(*)(int, const void *, size_t, off_t))vfs->xGetSystemCall(vfs, "pwrite64");
    assert_true(sqlite_open_real && sqlite_pread_real && sqlite_pwrite_real);
    vfs->xSetSystemCall(vfs, "open", (sqlite3_syscall_ptr)sqlite_open_);
    vfs->xSetSystemCall(vfs, "pread64", (sqlite3_syscall_ptr)sqlite_pread);
    vfs->xSetSystemCall(vfs, "pwrite64", (sqlite3_syscall_ptr)sqlite_pwrite);
}

static int folder_count(const char *path, const char *part) {
    int n = 0;
    DIR *d = opendir(path);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += strstr(e->d_name, part) != NULL;
    closedir(d);
    return n;
}

/* Open descriptors and file-backed mappings of the test's folder, and allocated blocks. */
struct resources {
    int files, maps;
    long blocks;
    int64_t sqlite;
};

static char root[64];

static struct resources resources_now(void) {
    struct resources h = {.files = folder_count("/proc/self/fd", ""),
                          .blocks = live,
                          .sqlite = sqlite3_memory_used()};
    char line[1024];
    FILE *f = fopen("/proc/self/maps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) h.maps += strstr(line, root) != NULL;
    __real_fclose(f);
    return h;
}

static void resources_equal(const struct resources *before, const char *name, long n) {
    struct resources h = resources_now();
    if (h.files != before->files || h.maps != before->maps || h.blocks != before->blocks ||
        h.sqlite != before->sqlite)
        fail_msg("%s, fault %ld: %d files, %d maps, %ld blocks and %lld bytes of sqlite stay", name,
                 n, h.files - before->files, h.maps - before->maps, h.blocks - before->blocks,
                 (long long)(h.sqlite - before->sqlite));
}

/* The paths: each opens or loads, releases, and returns OK or the error. */
static char *path_in(const char *name) {
    return path_join(root, name);
}

static struct model *small; /* tiny-llama with its adapter and trainer */
static struct adapter *small_adapter;
static struct trainer *trainer;
static struct model_config wide; /* the large adapter's config */
static struct model *wide_model;
static struct adapter *wide_adapter;
static struct adapter *mixed_adapter; /* an adapter for the wide shape, with two ranks */
static struct tokenizer *bytes;
static struct engine *sessions; /* over wide_model, with the tokens cached */
static int32_t session_ids[256];
static const struct token_seq session_tokens = {session_ids, 200};
static struct buf template, schema;

static int model_at(const char *name, struct error *err) {
    char *path = path_in(name);
    struct model *m = model_open(path, NUMERIC_EXACT, err);
    int rc = m ? OK : err->code;
    model_close(m);
    free(path);
    return rc;
}

static int open_gguf(struct error *err) {
    return model_at("large.gguf", err);
}
static int open_hf(struct error *err) {
    return model_at("large", err);
}
static int open_small_gguf(struct error *err) {
    return model_at("small.gguf", err);
}
static int open_small_hf(struct error *err) {
    return model_at("small", err);
}

static int open_biased_gguf(struct error *err) {
    return model_at("biased.gguf", err);
}
static int open_windowed_hf(struct error *err) {
    return model_at("windowed", err);
}

static int tokenizer_done(struct tokenizer *t, char *path, struct error *err) {
    int rc = t ? OK : err->code;
    tokenizer_free(t);
    free(path);
    return rc;
}

static int open_tokenizer_json(struct error *err) {
    char *path = path_in("large/tokenizer.json");
    return tokenizer_done(tokenizer_from_json(path, err), path, err);
}

static int open_sentencepiece(struct error *err) {
    char *path = path_in("tokenizer.model");
    return tokenizer_done(tokenizer_from_sentencepiece(path, err), path, err);
}

static int adapter_at(const char *name, const struct model_config *shape, struct error *err) {
    char *path = path_in(name);
    struct adapter *a = adapter_load(path, shape, err);
    int rc = a ? OK : err->code;
    adapter_release(a);
    free(path);
    return rc;
}

static int load_adapter(struct error *err) {
    return adapter_at("wide-adapter", &wide, err);
}
static int load_small_adapter(struct error *err) {
    return adapter_at("small-adapter", &small->config, err);
}

static int new_engine(struct error *err) {
    struct engine_options o = {.max_rows = 256, .max_seqs = 1024, .max_len = 64};
    struct engine *e = engine_new(small, &o, err);
    int rc = e ? OK : err->code;
    engine_free(e);
    return rc;
}

static int adapter_gguf_at(const char *name, const struct model_config *shape, struct error *err) {
    char *path = path_in(name);
    struct adapter *a = adapter_load_gguf(path, shape, err);
    int rc = a ? OK : err->code;
    adapter_release(a);
    free(path);
    return rc;
}

static int load_gguf_adapter(struct error *err) {
    return adapter_gguf_at("wide-adapter.gguf", &wide, err);
}
static int load_small_gguf_adapter(struct error *err) {
    return adapter_gguf_at("small-adapter.gguf", &small->config, err);
}

/* Scales that no single alpha can represent: the factors are copied to fold them. */
static int save_gguf_adapter(struct error *err) {
    char *path = path_in("folded.gguf");
    int rc = adapter_save_gguf(mixed_adapter, path, "base", true, err);
    free(path);
    return rc;
}

static int merge_adapter(struct error *err) {
    struct model *merged = adapter_merge(wide_model, mixed_adapter, err);
    adapter_merged_close(merged);
    return merged ? OK : err->code;
}

static int quantize(struct error *err) {
    char *path = path_in("quantised.gguf");
    struct quant_scheme q = quant_pure(TENSOR_Q4_K);
    int rc = model_quantize_gguf(wide_model, path, &q, NULL, NULL, err);
    free(path);
    return rc;
}

static int save_session(struct error *err) {
    char *path = path_in("session.out");
    int rc = engine_session_save(sessions, session_tokens, NULL, "base", path, err);
    free(path);
    return rc;
}

static int load_session(struct error *err) {
    char *path = path_in("session.bin");
    int32_t n = 0;
    int rc = engine_session_load(sessions, "base", path, &n, err);
    if (rc == OK && n != session_tokens.n)
        check_failed(__FILE__, __LINE__, "a session keeps its tokens");
    free(path);
    return rc;
}

static int parse_template(struct error *err) {
    struct jinja_output out;
    json_t *vars = json_object();
    struct jinja *j = jinja_parse(template.data, template.len, err);
    int rc = j ? jinja_render(j, &(struct jinja_input){.vars = vars}, &out, err) : err->code;
    if (j) jinja_output_release(&out);
    jinja_free(j);
    json_decref(vars);
    return rc;
}

static int grammar_done(struct grammar *g, struct error *err) {
    int rc = g ? OK : err->code;
    grammar_free(g);
    return rc;
}

/* Forty names of a thousand characters each, all different. */
static int compile_schema(struct error *err) {
    return grammar_done(grammar_new_json_schema(schema.data, schema.len, true, err), err);
}
static int compile_small_schema(struct error *err) {
    static const char text[] =
        "{\"type\": \"object\", \"required\": [\"名前\"], \"properties\": {\"名前\": {\"type\": "
        "\"string\", \"pattern\": \"^\\\\p{Han}{1,4}$\"}, \"n\": {\"type\": \"integer\", "
        "\"minimum\": 3}}}";
    return grammar_done(grammar_new_json_schema(text, sizeof text - 1, false, err), err);
}

/* A base in f32 for both passes, and a batch. */
static int train(struct error *err) {
    struct train_options o;
    int32_t tokens[64] = {0};
    uint8_t mask[64] = {[63] = 1};
    struct train_sample s = {.tokens = tokens, .mask = mask, .n = 64};
    int64_t targets;
    double nll;
    options_default(train_option_rows, &o);
    struct trainer *t = trainer_new_lora(wide_model, &wide_adapter, 1, &o, NULL, err);
    int rc = t ? trainer_eval_loss(t, &s, 1, &nll, &targets, err) : err->code;
    trainer_free(t);
    options_release(train_option_rows, &o);
    return rc;
}

static int load_data_file(const char *name, struct error *err) {
    struct dataset d;
    char *path = path_in(name);
    int rc = dataset_load(&d, path, NULL, bytes, 64, err);
    if (rc == OK) dataset_release(&d);
    free(path);
    return rc;
}

static int load_data(struct error *err) {
    return load_data_file("data.jsonl", err);
}

static int load_data_table(struct error *err) {
    return load_data_file("data.csv", err);
}

static int load_data_text(struct error *err) {
    return load_data_file("data.txt", err);
}

/* Reads prompts, filters an answer to each and writes it as a line. */
static int filter_data(struct error *err) {
    struct synth_options o = {0};
    struct synth s = {.o = &o, .model = wide_model};
    struct synth_filter_set *rules = NULL;
    struct buf lines = {0};
    char *path = path_in("prompts.jsonl");
    options_default(synth_option_rows, &o);
    o.held_out = path_in("data.jsonl");
    int rc = synth_prompts_read(&s.prompts, path, &o, err);
    s.n = s.prompts.n;
    s.v = xcalloc((size_t)MAX(s.n, 1), sizeof *s.v);
    for (int i = 0; i < s.n; i++) {
        s.v[i] = (struct synth_sample){.prompt = i, .finish = FINISH_STOP};
        buf_puts(&s.v[i].text, "青");
    }
    if (rc == OK) rc = (rules = synth_filter_set_new(&o, bytes, err)) ? OK : err->code;
    if (rc == OK) rc = synth_filter(&s, rules, err);
    if (rc == OK) rc = synth_format_jsonl(&s, &lines, err);
    if (rc == OK && synth_count_kept(&s) != 2) check_failed(__FILE__, __LINE__, "both are kept");
    synth_filter_set_free(rules);
    synth_release(&s);
    buf_release(&lines);
    options_release(synth_option_rows, &o);
    free(path);
    return rc;
}

static int row_skip(void *ctx, const json_t *row, int line, struct error *err) {
    (void)ctx, (void)row, (void)line, (void)err;
    return OK;
}

static int load_questions(struct error *err) {
    struct eval_task b;
    char *lines = path_in("questions.jsonl"), *table = path_in("questions.csv");
    int rc = eval_task_open(&b, lines, &(struct eval_task_options){0}, err);
    if (rc == OK) rc = csv_each(table, row_skip, NULL, err);
    eval_task_release(&b);
    free(lines);
    free(table);
    return rc;
}

static int load_checkpoint(struct error *err) {
    json_t *extra = NULL;
    char *path = path_in("checkpoint.bin");
    int rc = trainer_load(trainer, path, &extra, err);
    json_decref(extra);
    free(path);
    return rc;
}

static int load_recipe(struct error *err) {
    struct evolve_recipe o;
    char *path = path_in("recipe.yaml");
    int rc = evolve_recipe_load(&o, path, err);
    evolve_recipe_release(&o);
    free(path);
    return rc;
}

static int load_team(struct error *err) {
    struct team t;
    char *path = path_in("team.yaml");
    int rc = team_read(&t, path, err);
    if (rc == OK && t.n != 2) check_failed(__FILE__, __LINE__, "two agents");
    team_release(&t);
    free(path);
    return rc;
}

static int load_agent(struct error *err) {
    struct agent_settings s;
    char *path = path_in("agent.yaml");
    int rc = agent_settings_read(&s, path, err);
    if (rc == OK && s.max_steps != 3) check_failed(__FILE__, __LINE__, "three steps");
    if (rc == OK) options_release(agent_setting_rows, &s);
    free(path);
    return rc;
}

static int load_fallback(struct error *err) {
    struct fallback_settings s;
    char *path = path_in("fallback.yaml");
    int rc = fallback_settings_read(&s, path, err);
    if (rc == OK && s.n != 2) check_failed(__FILE__, __LINE__, "two links");
    fallback_settings_release(&s);
    free(path);
    return rc;
}

static int load_trace(struct error *err) {
    struct trace t;
    char *path = path_in("life.jsonl");
    int rc = trace_load(&t, path, err);
    if (rc == OK && t.n_ticks != 2) check_failed(__FILE__, __LINE__, "two ticks");
    trace_release(&t);
    free(path);
    return rc;
}

/* Writes a run and reads it back: SQLite may lack optional memory, but no row. */
static int open_store(struct error *err) {
    char *path = path_in("store.db");
    struct store *s = store_open(path, err);
    json_t *recipe = json_string("日本"), *back = NULL, *list = NULL;
    static int turn;
    char id[64];
    snprintf(id, sizeof id, "%ld-%d", (long)getpid(), turn++);
    int rc = s ? store_run_add(s, id, "test", recipe, err) : err->code;
    if (rc == OK) rc = (back = store_run_get(s, id, err)) ? OK : err->code;
    if (rc == OK) rc = (list = store_run_list(s, ".", err)) ? OK : err->code;
    if (rc == OK && !json_equal(json_object_get(back, "recipe"), recipe))
        check_failed(__FILE__, __LINE__, "the store keeps what it was given");
    store_close(s);
    json_decref(recipe);
    json_decref(back);
    json_decref(list);
    free(path);
    return rc;
}

/* Writes a turn, and reads the same board from the log. */
static int write_board(struct error *err) {
    static int turn;
    char *path = path_in("board.db"), *name = xasprintf("%ld-%d", (long)getpid(), turn++);
    const float v[2] = {1, 2};
    struct store *s = store_open(path, err);
    struct blackboard_options o = {.store = s, .name = name};
    struct blackboard *b = s ? blackboard_open(&o, err) : NULL, *again = NULL;
    json_t *value = json_pack("{s:s}", "本文", "猫"), *row = NULL;
    int rc = b ? blackboard_write_multiple(b, value, NULL, err) : err->code;
    if (rc == OK)
        rc = (row = blackboard_slot_add(
                  b, &(struct blackboard_slot_entry){"批評", "反対", v, 2, NULL}, err))
                 ? OK
                 : err->code;
    if (rc == OK) rc = (again = blackboard_open(&o, err)) ? OK : err->code;
    if (rc == OK && (blackboard_last_seq(again) != 2 ||
                     strcmp(json_string_value(blackboard_read(again, "本文")), "猫") != 0))
        check_failed(__FILE__, __LINE__, "the log keeps what was written");
    json_decref(row);
    json_decref(value);
    blackboard_close(again);
    blackboard_close(b);
    store_close(s);
    free(name);
    free(path);
    return rc;
}

static int talk(struct error *err) {
    char *path = path_in("talk.db");
    struct store *s = store_open(path, err);
    struct conversation *c = s ? conversation_open(s, "話", err) : NULL;
    json_t *facts = json_pack("{s:s}", "名前", "太郎");
    int rc = c ? conversation_merge_facts(c, facts, err) : err->code;
    if (rc == OK) rc = conversation_add(c, "こんにちは", "你好", NULL, err);
    json_decref(facts);
    conversation_close(c);
    store_close(s);
    free(path);
    return rc;
}

/* Adds, finds and removes a page. */
static int use_knowledge(struct error *err) {
    char *path = path_in("knowledge.db"), *page = path_in("page.html");
    struct knowledge_options o = {0};
    struct knowledge_query q = {.text = "富士山", .threshold = -1};
    struct knowledge_report r;
    struct knowledge *k = knowledge_open(path, true, err);
    json_t *hits = NULL;
    int rc = k ? knowledge_add(k, page, &o, &r, err) : err->code;
    if (rc == OK) rc = (hits = knowledge_search(k, &q, err)) ? OK : err->code;
    if (rc == OK && json_array_size(hits) != 1)
        check_failed(__FILE__, __LINE__, "the page is found");
    if (rc == OK) rc = knowledge_remove(k, page, &r, err);
    json_decref(hits);
    knowledge_close(k);
    free(page);
    free(path);
    return rc;
}

static int load_small_json(struct error *err) {
    static const char text[] =
        "{\"名前\": [\"猫\", 1, 2.5, {\"x\": null}], \"b\": {\"c\": \"d\\n\"}}";
    json_t *v = json_parse(text, sizeof text - 1, "text", err);
    int rc = v ? OK : err->code;
    json_decref(v);
    return rc;
}

static int load_json(struct error *err) {
    char *path = path_in("large.json");
    json_t *v = json_parse_file(path, err);
    int rc = v ? OK : err->code;
    json_decref(v);
    free(path);
    return rc;
}

/* SWEPT: small enough that every allocation and every call of the file system can fail once.
 * SPARES: some allocations are optional; the result is complete without them. */
enum { SWEPT = 1, SPARES = 2 };

static const struct path {
    const char *name;
    int (*run)(struct error *err);
    int large; /* at least this many allocations depend on data */
    int flags;
} paths[] = {
    {"GGUF model", open_gguf, 5, 0},
    {"HF model", open_hf, 6, 0},
    {"tokenizer.json", open_tokenizer_json, 4, 0},
    {"sentencepiece", open_sentencepiece, 5, 0},
    {"adapter", load_adapter, 1, 0},
    {"engine", new_engine, 2, SWEPT},
    {"JSON", load_json, 2, 0},
    {"training", train, 2, 0},
    {"GGUF adapter", load_gguf_adapter, 1, 0},
    {"GGUF adapter, folded", save_gguf_adapter, 1, 0},
    {"merge", merge_adapter, 0, SWEPT},
    {"quantising", quantize, 0, 0},
    {"session", load_session, 1, SWEPT},
    {"session saved", save_session, 1, 0},
    {"template", parse_template, 3, 0},
    {"schema", compile_schema, 3, 0},
    {"small schema", compile_small_schema, 0, SWEPT},
    {"small GGUF adapter", load_small_gguf_adapter, 0, SWEPT},
    {"small GGUF model", open_small_gguf, 0, SWEPT},
    {"small HF model", open_small_hf, 0, SWEPT},
    {"small GGUF model with permuted biases", open_biased_gguf, 0, SWEPT},
    {"small HF model with windows and norms less 1", open_windowed_hf, 0, SWEPT},
    {"small adapter", load_small_adapter, 0, SWEPT},
    {"training data", load_data, 0, SWEPT},
    {"training data in a table", load_data_table, 0, SWEPT},
    {"training data as text", load_data_text, 0, SWEPT},
    {"written data", filter_data, 0, SWEPT},
    {"questions", load_questions, 0, SWEPT},
    {"small JSON", load_small_json, 0, SWEPT},
    {"checkpoint", load_checkpoint, 0, SWEPT},
    {"recipe", load_recipe, 0, SWEPT},
    {"team", load_team, 0, SWEPT},
    {"agent", load_agent, 0, SWEPT},
    {"fallback chain", load_fallback, 0, SWEPT},
    {"trace", load_trace, 0, SWEPT},
    {"store", open_store, 0, SWEPT | SPARES},
    {"blackboard", write_board, 0, SWEPT | SPARES},
    {"conversation", talk, 0, SWEPT | SPARES},
    {"knowledge", use_knowledge, 0, SWEPT | SPARES},
};

static void fault_clear(void) {
    memset(&fault, 0, sizeof fault);
}

/* Runs once without faults, because data allocated on first use are no leak. */
static void path_warm(const struct path *p) {
    struct error err;
    fault_clear();
    if (p->run(&err) != OK) fail_msg("%s: %s", p->name, err.text);
}

static void test_large_memory(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        const struct path *p = &paths[i];
        path_warm(p);
        long n = 1;
        for (;; n++) {
            struct error err = {0};
            struct resources before = resources_now();
            fault_clear();
            fault.threshold = LARGE;
            fault.memory = n;
            int rc = p->run(&err);
            bool fired = fault.fired;
            fault_clear();
            resources_equal(&before, p->name, n);
            if (!fired) {
                assert_int_equal(rc, OK);
                break;
            }
            if (rc != ERR_MEMORY || !strstr(err.text, "out of memory") ||
                !strpbrk(err.text, "123456789"))
                fail_msg("%s, allocation %ld: %d, '%s'", p->name, n, rc, err.text);
        }
        if (n - 1 < p->large) fail_msg("%s: only %ld large allocations were seen", p->name, n - 1);
    }
}

/* Runs the path with the n-th allocation failing; `text` gets the child's output. */
static int child_run(const struct path *p, long n, char *text, size_t room) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct error err = {0};
        dup2(ends[1], STDERR_FILENO);
        fault_clear();
        fault.child = true;
        fault.memory = n;
        int rc = p->run(&err);
        fault.memory = 0;
        if (rc != OK) dprintf(STDERR_FILENO, "%s", err.text);
        _exit(rc != OK ? CHILD_ERROR : fault.fired ? CHILD_SILENT : CHILD_OK);
    }
    close(ends[1]);
    size_t len = 0;
    for (ssize_t got; (got = __real_read(ends[0], text + len, room - 1 - len)) > 0;)
        len += (size_t)got;
    text[len] = '\0';
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status))
        fail_msg("%s, allocation %ld: signal %d: %s", p->name, n, WTERMSIG(status), text);
    return WEXITSTATUS(status);
}

/* The first few allocations each fail once; of many, every k-th. */
static void test_any_memory(void **state) {
    (void)state;
    enum { TRIES = 40 };
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        const struct path *p = &paths[i];
        if (!(p->flags & SWEPT)) continue;
        path_warm(p);
        long total = fault.memory_seen, step = MAX(total / TRIES, 1);
        char text[4096];
        for (long n = 1; n <= total; n += step) {
            int code = child_run(p, n, text, sizeof text);
            if ((code == CHILD_SILENT || code == CHILD_OK) && (p->flags & SPARES)) continue;
            if (!(code == 1 || code == CHILD_ERROR) || !strstr(text, "out of memory"))
                fail_msg("%s, allocation %ld of %ld: exit code %d: %s", p->name, n, total, code,
                         text);
        }
    }
}

static void test_reading(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        const struct path *p = &paths[i];
        if (!(p->flags & SWEPT)) continue;
        path_warm(p);
        bool done = false;
        for (long n = 1; !done; n++) {
            struct error err = {0};
            struct resources before = resources_now();
            fault_clear();
            fault.io = n;
            fault.why = EIO;
            int rc = p->run(&err);
            done = !fault.fired;
            fault_clear();
            resources_equal(&before, p->name, n);
            bool fine = done || p->flags & SPARES;
            if (rc == OK ? !fine : rc != ERR_IO || !err.text[0])
                fail_msg("%s, call %ld: %d, '%s'", p->name, n, rc, err.text);
        }
    }
}

/* Interrupted and short reads give the same bytes. */
static void test_trickle(void **state) {
    (void)state;
    struct error err;
    struct buf whole = {0}, slow = {0};
    char *path = path_in("large.json"), hash[2][HASH_LEN];
    assert_int_equal(file_read(path, 1 << 30, &whole, &err), OK);
    assert_int_equal(sha256_file(path, hash[0], &err), OK);
    fault.trickle = true;
    assert_int_equal(file_read(path, 1 << 30, &slow, &err), OK);
    assert_int_equal(sha256_file(path, hash[1], &err), OK);
    fault_clear();
    assert_int_equal(whole.len, slow.len);
    assert_memory_equal(whole.data, slow.data, whole.len);
    assert_string_equal(hash[0], hash[1]);
    buf_release(&whole);
    buf_release(&slow);
    free(path);
}

/* Saves over existing files: each file is the complete old or the complete new one. */
static int save_file(const char *path, struct error *err) {
    return file_write(path, "new content", 11, err);
}
static int save_gguf(const char *path, struct error *err) {
    return model_write_gguf(small, path, TENSOR_F16, err);
}
static int save_checkpoint(const char *path, struct error *err) {
    return trainer_save(trainer, path, NULL, err);
}
static int save_tokenizer(const char *path, struct error *err) {
    return tokenizer_write_json(bytes, path, err);
}
static int save_hf(const char *path, struct error *err) {
    return model_write_hf(small, path, TENSOR_BF16, err);
}
static int save_adapter(const char *path, struct error *err) {
    return adapter_save(small_adapter, path, "base", err);
}

static int save_quantised(const char *path, struct error *err) {
    struct quant_scheme q = quant_pure(TENSOR_Q5_1);
    return model_quantize_gguf(small, path, &q, NULL, NULL, err);
}
static int save_adapter_gguf(const char *path, struct error *err) {
    return adapter_save_gguf(small_adapter, path, "base", false, err);
}
static int save_session_at(const char *path, struct error *err) {
    return engine_session_save(sessions, session_tokens, NULL, "base", path, err);
}

static const struct save {
    const char *name;
    int (*run)(const char *path, struct error *err);
    const char *files[5]; /* relative to a folder; none: the path itself is the file */
} saves[] = {
    {"file", save_file, {NULL}},
    {"GGUF", save_gguf, {NULL}},
    {"quantised GGUF", save_quantised, {NULL}},
    {"GGUF adapter", save_adapter_gguf, {NULL}},
    {"session", save_session_at, {NULL}},
    {"checkpoint", save_checkpoint, {NULL}},
    {"tokenizer.json", save_tokenizer, {NULL}},
    {"HF",
     save_hf,
     {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}},
    {"PEFT", save_adapter, {"adapter_config.json", "adapter_model.safetensors"}},
};

static const char old_content[] = "what was there before";

static char *save_path(const char *out, const struct save *s, int i) {
    return s->files[0] ? path_join(out, s->files[i]) : xstrdup(out);
}

static int save_count(const struct save *s) {
    int n = 0;
    while (n < (int)ARRAY_LEN(s->files) && s->files[n]) n++;
    return MAX(n, 1);
}

static void save_lay(const char *out, const struct save *s) {
    struct error err;
    if (s->files[0]) assert_int_equal(dir_make(out, &err), OK);
    for (int i = 0; i < save_count(s); i++) {
        char *path = save_path(out, s, i);
        assert_int_equal(file_write(path, old_content, sizeof old_content - 1, &err), OK);
        free(path);
    }
}

/* fresh[i]: the hash of file i without faults. Returns the number of files that are still the old
 * ones. */
static int save_check(const char *out, const struct save *s, char fresh[][HASH_LEN], long n) {
    char old_hash[HASH_LEN], hash[HASH_LEN];
    struct error err;
    int kept = 0;
    sha256_bytes(old_content, sizeof old_content - 1, old_hash);
    for (int i = 0; i < save_count(s); i++) {
        char *path = save_path(out, s, i);
        if (sha256_file(path, hash, &err) != OK) fail_msg("%s, call %ld: %s", s->name, n, err.text);
        bool old = strcmp(hash, old_hash) == 0;
        if (!old && strcmp(hash, fresh[i]) != 0)
            fail_msg("%s, call %ld: '%s' is neither old nor new", s->name, n, path);
        kept += old;
        free(path);
    }
    assert_int_equal(folder_count(s->files[0] ? out : root, ".tmp-"), 0);
    return kept;
}

static void save_sweep(const struct save *s, int why) {
    char fresh[5][HASH_LEN], *out = path_in("saved");
    struct error err = {0};
    save_lay(out, s);
    if (s->run(out, &err) != OK) fail_msg("%s: %s", s->name, err.text);
    for (int i = 0; i < save_count(s); i++) {
        char *path = save_path(out, s, i);
        assert_int_equal(sha256_file(path, fresh[i], &err), OK);
        free(path);
    }
    bool done = false;
    for (long n = 1; !done; n++) {
        save_lay(out, s);
        struct resources before = resources_now();
        err = (struct error){0};
        fault_clear();
        fault.io = n;
        fault.why = why;
        int rc = s->run(out, &err);
        done = !fault.fired;
        fault_clear();
        resources_equal(&before, s->name, n);
        int kept = save_check(out, s, fresh, n);
        if (done ? rc != OK || kept > 0 : rc != ERR_IO)
            fail_msg("%s, call %ld: %d, '%s', %d files kept", s->name, n, rc, err.text, kept);
        /* Only an error of flushing the directory comes after the rename. */
        if (!done && kept == 0 && !strstr(err.text, "is written, but"))
            fail_msg("%s, call %ld: replaced, and yet '%s'", s->name, n, err.text);
    }
    for (int i = 0; i < save_count(s); i++) {
        char *path = save_path(out, s, i);
        unlink(path);
        free(path);
    }
    rmdir(out);
    free(out);
}

static void test_saving(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(saves); i++) {
        save_sweep(&saves[i], ENOSPC);
        save_sweep(&saves[i], EIO);
    }
}

/* Publications: after any failure and any kill, the directory is the old version, the new one, or
 * reports that it is neither, and the next call completes or rolls back the change. */
static struct adapter *like_adapter,
    *other_adapter; /* with small_adapter's config, and with another */

static int publish_like(const char *dir, struct error *err) {
    return adapter_publish(like_adapter, dir, "base", NULL, err);
}
static int publish_other(const char *dir, struct error *err) {
    return adapter_publish(other_adapter, dir, "base", NULL, err);
}
static int go_back(const char *dir, struct error *err) {
    char hash[HASH_LEN];
    return adapter_rollback(dir, &small_adapter->shape, NULL, hash, err);
}

static const struct publication {
    const char *name;
    int (*run)(const char *dir, struct error *err);
    struct adapter *const *first, *const *second; /* laid out before */
    struct adapter *const *after;
} publications[] = {
    {"publish, the same config", publish_like, NULL, &small_adapter, &like_adapter},
    {"publish, another config", publish_other, NULL, &small_adapter, &other_adapter},
    {"roll back", go_back, &small_adapter, &other_adapter, &small_adapter},
};

static void must(int rc, const struct error *err);

static void publication_lay(const struct publication *p, const char *dir) {
    struct error err;
    folder_remove(dir);
    if (p->first) must(adapter_publish(*p->first, dir, "base", NULL, &err), &err);
    must(adapter_publish(*p->second, dir, "base", NULL, &err), &err);
}

/* 1: the state is p->second, 2: p->after, 0: no adapter. */
static int publication_state(const struct publication *p, const char *dir, long n) {
    struct error err;
    struct adapter *a = adapter_load(dir, &small_adapter->shape, &err);
    if (!a && err.code != ERR_MISSING) fail_msg("%s, call %ld: %s", p->name, n, err.text);
    int is = !a                                         ? 0
             : strcmp(a->hash, (*p->second)->hash) == 0 ? 1
             : strcmp(a->hash, (*p->after)->hash) == 0  ? 2
                                                        : -1;
    if (is < 0) fail_msg("%s, call %ld: parts of two versions", p->name, n);
    adapter_release(a);
    return is;
}

static void publication_check(const struct publication *p, const char *dir, bool done, long n) {
    struct error err;
    int is = publication_state(p, dir, n);
    if (done && is != 2) fail_msg("%s: no fault, but state %d", p->name, is);
    json_t *list = adapter_versions(dir, &err);
    must(list ? OK : err.code, &err);
    json_decref(list);
    is = publication_state(p, dir, n);
    if (is == 0) fail_msg("%s, call %ld: not mended", p->name, n);
    /* Nothing is lost: both can be loaded. */
    char hash[HASH_LEN];
    must(adapter_rollback(dir, &small_adapter->shape, (*p->second)->hash, hash, &err), &err);
    assert_int_equal(publication_state(p, dir, n), 1);
    if (p->run(dir, &err) != OK) fail_msg("%s, after call %ld: %s", p->name, n, err.text);
    assert_int_equal(publication_state(p, dir, n), 2);
}

static bool publication_kill(const struct publication *p, const char *dir, long n) {
    struct error err;
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        fault.io = n;
        fault.kill = true;
        _exit(p->run(dir, &err) == OK ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) &&
                (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == CHILD_KILLED));
    return WEXITSTATUS(status) == 0;
}

static bool publication_fail(const struct publication *p, const char *dir, long n) {
    struct error err = {0};
    struct resources before = resources_now();
    fault.io = n;
    fault.why = ENOSPC;
    int rc = p->run(dir, &err);
    bool done = !fault.fired;
    fault_clear();
    resources_equal(&before, p->name, n);
    if (rc != OK && (done || !err.text[0])) fail_msg("%s, call %ld: %s", p->name, n, err.text);
    return done;
}

static void test_publishing(void **state) {
    (void)state;
    char *dir = path_in("agent");
    for (size_t i = 0; i < ARRAY_LEN(publications); i++)
        for (int killing = 0; killing < 2; killing++) {
            const struct publication *p = &publications[i];
            bool done = false;
            for (long n = 1; !done; n++) {
                publication_lay(p, dir);
                fault_clear();
                done = killing ? publication_kill(p, dir, n) : publication_fail(p, dir, n);
                publication_check(p, dir, done, n);
            }
        }
    folder_remove(dir);
    free(dir);
}

/* Fixtures */

static void must(int rc, const struct error *err) {
    if (rc != OK) check_failed(__FILE__, __LINE__, err->text);
}

static void put_text(const char *name, const char *text, size_t len) {
    struct error err;
    char *path = path_in(name);
    must(file_write(path, text, len, &err), &err);
    free(path);
}

enum { MANY = 70000 };

/* 70,000 pieces, so that every array over them is large: one layer, and an embedding. */
static void large_make(void) {
    struct error err;
    struct model_config c = small->config;
    c.n_layers = 1;
    c.vocab_size = MANY;
    c.tied = true;
    struct model *m = model_new_random(&c, 3, NUMERIC_EXACT);
    char *gguf = path_in("large.gguf"), *hf = path_in("large");
    must(model_write_gguf(m, gguf, TENSOR_F16, &err), &err);
    must(model_write_hf(m, hf, TENSOR_F16, &err), &err);
    model_close(m);
    free(gguf);
    free(hf);
}

/* A llama with biases and llama3's scaling, and a Gemma. */
static void archs_make(void) {
    struct error err;
    struct model_config c = small->config;
    char *gguf = path_in("biased.gguf"), *hf = path_in("windowed");
    c.biased = 1u << PROJ_Q | 1u << PROJ_K;
    c.rope_scaling = (struct rope_scaling){ROPE_LLAMA3, 8, 1, 4, 32};
    struct model *biased = fixture_model_of(c, true, TENSOR_F32, NUMERIC_EXACT);
    struct model *gemma = fixture_model("tiny-gemma3", true, TENSOR_F32, NUMERIC_EXACT);
    must(model_write_gguf(biased, gguf, TENSOR_Q8_0, &err), &err);
    must(model_write_hf(gemma, hf, TENSOR_BF16, &err), &err);
    model_close(biased);
    model_close(gemma);
    free(gguf);
    free(hf);
}

static void sentencepiece_make(void) {
    struct buf b = {0};
    for (int i = 0; i < MANY; i++) {
        char piece[16];
        float score = -(float)i;
        uint8_t len = (uint8_t)snprintf(piece, sizeof piece, i < 3 ? "<%d>" : "漢%d", i);
        buf_add(&b, (uint8_t[]){0x0A, (uint8_t)(len + 9), 0x0A, len}, 4);
        buf_add(&b, piece, len);
        buf_add(&b, "\x15", 1);
        buf_add(&b, &score, 4);
        buf_add(&b, (uint8_t[]){0x18, i == 0 ? 2 : i < 3 ? 3 : 1}, 2);
    }
    buf_add(&b, "\x12\x02\x18\x02", 4); /* the trainer's model_type: BPE */
    buf_add(&b, "\x1a\x02\x18\x01", 4); /* the normalizer's add_dummy_prefix */
    put_text("tokenizer.model", b.data, b.len);
    buf_release(&b);
}

static void json_make(void) {
    struct buf b = {0};
    buf_puts(&b, "[\"");
    for (int i = 0; i < 3 * LARGE; i++) buf_add(&b, "a", 1);
    buf_puts(&b, "\", \"日本語\"]");
    put_text("large.json", b.data, b.len);
    buf_release(&b);
}

static void adapters_make(void) {
    struct error err;
    char *path = path_in("wide-adapter"), *other = path_in("small-adapter"),
         *gguf = path_in("wide.gguf");
    struct adapter_config high = {.r = 256, .alpha = 512, .target = {[PROJ_UP] = true}};
    must(model_preset_find("fry-1", &wide, &err), &err);
    wide_model = model_new_random(&wide, 1, NUMERIC_EXACT);
    wide_adapter = fixture_adapter(&wide, 32, "all-linear", 0.1f, 1);
    must(adapter_save(wide_adapter, path, "base", &err), &err);
    small_adapter = fixture_adapter(&small->config, 2, "q_proj,v_proj", 0.1f, 1);
    like_adapter = fixture_adapter(&small->config, 2, "q_proj,v_proj", 0.1f, 2);
    other_adapter = fixture_adapter(&small->config, 3, "k_proj", 0.1f, 3);
    must(adapter_save(small_adapter, other, "base", &err), &err);
    struct adapter *large = adapter_new(&wide, &high, 1);
    must(adapter_save_gguf(large, gguf, "base", false, &err), &err);
    adapter_release(large);
    free(gguf);
    free(path);
    free(other);
}

static void gguf_adapters_make(void) {
    struct error err;
    static struct adapter_module modules[64 * N_PROJ];
    char *path = path_in("wide-adapter.gguf"), *other = path_in("small-adapter.gguf");
    must(adapter_save_gguf(wide_adapter, path, "base", false, &err), &err);
    must(adapter_save_gguf(small_adapter, other, "base", false, &err), &err);
    for (int32_t i = 0; i < wide.n_layers * N_PROJ; i++)
        modules[i] = (struct adapter_module){i % 2 ? 32 : 16, 8.0f + (float)(i % 3)};
    struct adapter_config c = {.r = 32, .alpha = 8, .modules = modules};
    mixed_adapter = adapter_new(&wide, &c, 2);
    free(path);
    free(other);
}

static void session_make(void) {
    struct error err;
    struct engine_options o = {.max_rows = 64, .max_seqs = 2, .max_len = 256};
    struct engine_request r = {
        .prompt = session_ids, .n_prompt = session_tokens.n, .max_tokens = 1, .sampling = {0}};
    char *path = path_in("session.bin");
    for (int32_t i = 0; i < session_tokens.n; i++) session_ids[i] = i % wide.vocab_size;
    sessions = engine_new(wide_model, &o, &err);
    must(sessions ? OK : err.code, &err);
    must(engine_run(sessions, &r, 1, NULL, &err), &err);
    must(engine_session_save(sessions, session_tokens, NULL, "base", path, &err), &err);
    engine_request_release(&r);
    free(path);
}

static void sources_make(void) {
    for (int i = 0; i < 30000; i++) buf_puts(&template, "{{ 'あ' * 9 }}{# c #}日本");
    buf_puts(&schema, "{\"enum\": [");
    for (int i = 0; i < 40; i++) {
        buf_printf(&schema, "%s\"%d", i ? ", " : "", i);
        for (int k = 0; k < 1000; k++) buf_puts(&schema, "名");
        buf_puts(&schema, "\"");
    }
    buf_puts(&schema, "]}");
}

static void trainer_make(void) {
    struct error err;
    struct train_options o;
    char *path = path_in("checkpoint.bin");
    options_default(train_option_rows, &o);
    trainer = trainer_new_lora(small, &small_adapter, 1, &o, NULL, &err);
    must(trainer ? OK : err.code, &err);
    must(trainer_save(trainer, path, NULL, &err), &err);
    options_release(train_option_rows, &o);
    free(path);
}

static void texts_make(void) {
    static const char data[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"空は?\"}, "
        "{\"role\": \"assistant\", \"content\": \"青\"}]}\n{\"text\": \"一つの文\"}\n";
    static const char questions[] =
        "{\"question\": \"空は?\", \"choices\": [\"青\", \"赤\"], \"answer\": 0}\n";
    static const char table[] = "question,a,b,answer\n空は?,青,赤,A\n";
    static const char prompts[] = "{\"prompt\": \"海は?\"}\n{\"messages\": "
                                  "[{\"role\": \"user\", \"content\": \"山は?\"}]}\n";
    static const char team[] =
        "protocol: own.yaml\nagents: [{adapter: own.yaml}, {system: 疑え}]\n",
                      own[] = "name: x\nnodes: {q: {reply: answer, messages: [{user: x}]}}\n";
    static const char recipe[] = "personas: [critic=a.jsonl, helper=b.jsonl]\ntasks: [copy]\n"
                                 "train: {r: 4}\nevolve: {generations: 1}\n";
    static const char page[] = "<title>山</title><p>富士山は<b>高い</b>。";
    put_text("data.jsonl", data, sizeof data - 1);
    static const char data_table[] = "question,answer\nq,\"an, answer\"\n";
    put_text("data.csv", data_table, sizeof data_table - 1);
    put_text("data.txt", "one\n\ntwo\n", 9);
    put_text("questions.jsonl", questions, sizeof questions - 1);
    put_text("questions.csv", table, sizeof table - 1);
    put_text("prompts.jsonl", prompts, sizeof prompts - 1);
    static const char life[] =
        "{\"shoal_world\":1,\"rules\":{\"rules\":\"seed\"},\"agents\":2,\"seed\":1,\"steps\":9,"
        "\"policy\":\"x\"}\n{\"tick\":1,\"actions\":[0,1]}\n{\"tick\":2,\"actions\":[2,5]}\n";
    put_text("recipe.yaml", recipe, sizeof recipe - 1);
    put_text("life.jsonl", life, sizeof life - 1);
    put_text("team.yaml", team, sizeof team - 1);
    put_text("own.yaml", own, sizeof own - 1);
    static const char agent[] = "tools: [clock]\nadapter: [a=0.5, b]\nmax_steps: 3\n";
    put_text("agent.yaml", agent, sizeof agent - 1);
    static const char chain[] =
        "timeout: 9\nlinks: [{model: a, timeout: 2}, {reply: 済みません}]\n";
    put_text("fallback.yaml", chain, sizeof chain - 1);
    put_text("page.html", page, sizeof page - 1);
}

static int group_setup(void **state) {
    struct error err;
    (void)state;
    log_quiet = true;
    /* In memory if possible: thousands of files are flushed. */
    bool memory = access("/dev/shm", W_OK | X_OK) == 0;
    snprintf(root, sizeof root, "%s/shoal-test-faults-XXXXXX", memory ? "/dev/shm" : "/tmp");
    if (!mkdtemp(root)) return -1;
    sqlite_prepare();
    small = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    bytes = tokenizer_new_bytes(259);
    char *gguf = path_in("small.gguf"), *hf = path_in("small");
    must(model_write_gguf(small, gguf, TENSOR_Q8_0, &err), &err);
    must(model_write_hf(small, hf, TENSOR_BF16, &err), &err);
    free(gguf);
    free(hf);
    adapters_make();
    gguf_adapters_make();
    session_make();
    sources_make();
    trainer_make();
    large_make();
    archs_make();
    sentencepiece_make();
    json_make();
    texts_make();
    return 0;
}

static int group_teardown(void **state) {
    (void)state;
    trainer_free(trainer);
    adapter_release(small_adapter);
    adapter_release(like_adapter);
    adapter_release(other_adapter);
    adapter_release(wide_adapter);
    adapter_release(mixed_adapter);
    engine_free(sessions);
    buf_release(&template);
    buf_release(&schema);
    model_close(small);
    model_close(wide_model);
    tokenizer_free(bytes);
    return folder_remove(root);
}

/* One run into `checkpoint` and `log`; returns the hash of its adapter at the end. */
static int run_train(char hash[HASH_LEN], struct error *err) {
    char *data = path_in("data.jsonl"), *checkpoint = path_in("run.bin"),
         *log = path_in("run.jsonl");
    struct train_job job = {.name = "a", .data = data};
    struct train_options o;
    options_default(train_option_rows, &o);
    o.r = 1;
    o.grad_accum = 2;
    o.max_steps = 3;
    o.save_steps = 1;
    strings_release(&o.target);
    strings_add(&o.target, "q_proj");
    FILE *f = fopen(log, "a");
    assert_non_null(f);
    struct tokenizer *own = small->tok;
    small->tok = bytes;
    int rc = sft_run(small, &job, 1, &o, NULL, checkpoint, f, err);
    small->tok = own;
    __real_fclose(f);
    if (rc == OK) snprintf(hash, HASH_LEN, "%s", job.result->hash);
    adapter_release(job.result);
    options_release(train_option_rows, &o);
    free(data);
    free(checkpoint);
    free(log);
    return rc;
}

/* Whichever call of the file system finds the disk full, the error reports the saved update, and
 * repeating the call gives the adapter of an uninterrupted run. */
static void test_training_stopped(void **state) {
    (void)state;
    char whole[HASH_LEN], again[HASH_LEN], *checkpoint = path_in("run.bin");
    struct error err = {0};
    int kept = 0;
    assert_int_equal(run_train(whole, &err), OK);
    unlink(checkpoint);
    for (long n = 1;; n++) {
        struct resources before = resources_now();
        fault_clear();
        fault.io = n;
        fault.why = ENOSPC;
        int rc = run_train(again, &err);
        bool fired = fault.fired, there = path_exists(checkpoint);
        fault_clear();
        resources_equal(&before, "training", n);
        if (!fired) {
            assert_int_equal(rc, OK);
            break;
        }
        if (rc == OK) { /* information about the system's memory is optional */
            assert_string_equal(again, whole);
            unlink(checkpoint);
            continue;
        }
        if (rc != ERR_IO) fail_msg("call %ld: %d, '%s'", n, rc, err.text);
        if (there && !strstr(err.text, "run.bin' holds at least update") &&
            !strstr(err.text, "run.bin' is written"))
            fail_msg("call %ld leaves a checkpoint: '%s'", n, err.text);
        kept += there;
        if (run_train(again, &err) != OK) fail_msg("after call %ld: '%s'", n, err.text);
        assert_string_equal(again, whole);
        unlink(checkpoint);
    }
    assert_true(kept > 0);
    unlink(checkpoint);
    free(checkpoint);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_large_memory), cmocka_unit_test(test_any_memory),
        cmocka_unit_test(test_reading),      cmocka_unit_test(test_trickle),
        cmocka_unit_test(test_saving),       cmocka_unit_test(test_training_stopped),
        cmocka_unit_test(test_publishing),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
