/*
 * base: errors, memory, files, hashes, random numbers, threads, logging, options, configuration
 * files, YAML, JSON and HTML. Every other folder uses it.
 *
 * Errors. A function that can fail because of the outside world takes a `struct error *` as its
 * last argument, which is NULL only where a comment allows it. On failure the function sets the
 * error and returns a negative `enum error_code` or NULL. A message begins in lower case and quotes
 * its subject. Callers put context before it with error_wrap(). A broken contract (an error in the
 * program itself) aborts: CHECK.
 *
 * Threads. Any thread may call these functions. Two threads must not use one object at the same
 * time, unless its comment allows it.
 */
#ifndef SHOAL_BASE_H
#define SHOAL_BASE_H

#include <jansson.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* errors */

enum error_code {
    OK = 0,
    ERR_USAGE = -1,    /* the command line or an argument is wrong */
    ERR_IO = -2,       /* the system refused a file operation */
    ERR_FORMAT = -3,   /* bytes from outside do not follow their format */
    ERR_MISMATCH = -4, /* well-formed, but made for something else */
    ERR_MEMORY = -5,   /* does not fit the memory or a fixed limit */
    ERR_MISSING = -6,  /* a file, name or id that does not exist */
    ERR_STATE = -7,    /* not possible now */
    ERR_NUMERIC = -8,  /* NaN or Inf where a number is needed */
};

struct error {
    int code;
    char text[2048];
};

/* Sets `err` and returns `code`, which is negative. */
int error_set(struct error *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Puts "context: " before the message in `err`; returns err->code. */
int error_wrap(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* As error_set, with the system's text for errno after the message. The code is ERR_MISSING for
 * ENOENT and ENOTDIR, else ERR_IO. Returns the code. */
int error_errno(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "usage" for ERR_USAGE, "ok" for OK; "unknown" for a number that is not a code. */
const char *error_name(int code);

/* Prints the condition and aborts if the condition is false. It is checked in every build. */
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond);                                      \
    } while (0)
_Noreturn void check_failed(const char *file, int line, const char *what);

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* memory */

/* For sizes that a file, a model or an option determines. If the system has no memory, these two
 * functions return NULL and set ERR_MEMORY with the requested bytes. With err = NULL they behave
 * like xcalloc and xrealloc. */
void *try_calloc(size_t n, size_t size, struct error *err);
void *try_realloc(void *p, size_t size, struct error *err); /* on failure `p` is unchanged */
/* For small sizes: these functions never return NULL. If memory is exhausted and the reserve
 * (memory_reserve_set) is used up, they print a message and exit with 1. */
void *xmalloc(size_t size);
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *p, size_t size);
char *xstrdup(const char *s);
char *xstrndup(const char *s, size_t n);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
char *xvasprintf(const char *fmt, va_list ap) __attribute__((format(printf, 1, 0)));
/* memory_reserve_set allocates an emergency reserve of this size for xmalloc and the functions
 * after it; 0 (initially): no reserve. When an allocation fails, the reserve is freed and the
 * allocation is tried again. While the reserve is missing, a failing allocation waits up to 5
 * seconds for other threads to free memory. memory_is_low tries to allocate a missing reserve again
 * and returns true if that fails. A program with a reserve calls memory_is_low before it accepts
 * new work. */
void memory_reserve_set(size_t size);
bool memory_is_low(void);

/* An arena returns zeroed memory, aligned to 64 bytes, and frees all of it at once (arena_release).
 * Zero-initialise it. */
struct arena {
    struct arena_block *head;
    size_t used; /* bytes returned so far */
};
void *arena_try_alloc(struct arena *a, size_t size, struct error *err);
void *arena_alloc(struct arena *a, size_t size); /* never NULL */
/* Reserves memory: the next allocations cannot fail if their sizes, each rounded up to a multiple
 * of 64, add up to at most `size`. */
int arena_reserve(struct arena *a, size_t size, struct error *err);
char *arena_strdup(struct arena *a, const char *s);
void arena_release(struct arena *a);
/* Bump allocation, for a block `base` that several arrays share: returns base + *used and adds
 * `size`, rounded up to a multiple of 64, to *used. With base = NULL it returns NULL and only adds,
 * so that the same code can first compute the block's size. `base` is aligned to 64 bytes. */
void *bump_alloc(uint8_t *base, size_t *used, size_t size);

/* A growing byte string. `data` is NULL until something is added, then it ends with a NUL that
 * `len` does not count. Zero-initialise it. */
struct buf {
    char *data;
    size_t len, cap;
};
/* Reserves room for n more bytes, so that adding them cannot fail. With err = NULL it exits with 1
 * if memory is exhausted, as buf_add does. */
int buf_reserve(struct buf *b, size_t n, struct error *err);
void buf_add(struct buf *b, const void *p, size_t n);
void buf_puts(struct buf *b, const char *s);
void buf_add_shell_word(struct buf *b,
                        const char *s); /* between single quotes, for a POSIX shell */
/* Appends a text for display: control characters except newline and tab, and invalid UTF-8, become
 * U+FFFD. */
void buf_add_sanitized(struct buf *b, const char *text, size_t len);
/* The length in bytes of a text without an incomplete UTF-8 character at its end. */
size_t utf8_complete_len(const char *text, size_t n);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_release(struct buf *b);

/* files */

/* The functions below call it before they open, create or replace a file. PATH_USE_EXEC: a command
 * in a sandbox gets access to the file. Returns OK, or an error that says why the path is refused.
 * NULL: no check. A process that works for a client (a job) sets it before it starts threads. */
enum path_use { PATH_USE_READ, PATH_USE_WRITE, PATH_USE_EXEC };
extern int (*path_access_hook)(const char *path, enum path_use use, struct error *err);

/* Closes a descriptor if it is open, and sets it to -1. */
void fd_close(int *fd);
/* Writes all bytes, and waits while they do not fit; false: `errno` says why. */
bool fd_write(int fd, const void *data, size_t n);
/* Duplicates the descriptors from[0..n) to the numbers 0 to n-1; n is at most 8. For a child
 * between fork and exec: it only makes system calls. Returns false and sets errno on failure. */
bool fds_remap(const int *from, int n);

struct file_map {
    const uint8_t *data;
    size_t size;
    void *copy; /* the memory of file_map_open_copy */
};
/* Maps a regular file read-only. `data` of an empty file is not NULL. On an error *m is zero. */
int file_map_open(struct file_map *m, const char *path, struct error *err);
/* As file_map_open, with a copy of the bytes, for files that another process may shorten: reading a
 * mapping beyond its file's new end ends the process. */
int file_map_open_copy(struct file_map *m, const char *path, struct error *err);
void file_map_close(struct file_map *m);
/* Releases the whole pages inside these bytes of a mapping. They are read from the file again when
 * they are used. */
void file_map_evict(const void *p, size_t size);
/* Installs a handler of SIGBUS: reading a mapping beyond its file's new end then prints a message
 * with the file's name and exits with 1. Other bus errors keep their previous action. A program
 * calls it once, before it starts threads. */
void file_map_catch_sigbus(void);
/* OK, or ERR_STATE with the name of a mapped file whose size or modification time has changed since
 * it was mapped. Costs one system call per mapping. */
int file_map_check_unchanged(struct error *err);

/* Opens a regular file for reading; a pipe, a device or a folder is an error, and opening never
 * blocks. Fills *st. Returns the descriptor, or a negative error. file_map_open, file_map_open_copy
 * and file_read_head open files in this way. */
struct stat;
int file_open_regular(const char *path, struct stat *st, struct error *err);
/* Reads up to `size` bytes from the beginning of a regular file; returns their number, 0 if the
 * file cannot be opened. */
size_t file_read_head(const char *path, void *out, size_t size);
/* file_read, sha256_file and the functions that use them also read pipes, terminals and /dev/null,
 * which a command line may name. After file_set_regular_only(true) they read regular files only: a
 * server's paths come from requests, and a pipe without a writer would block its thread. */
void file_set_regular_only(bool only);

/* Appends a whole file to `out`. A file of more than `limit` bytes is ERR_MEMORY. On an error `out`
 * keeps its old content. */
int file_read(const char *path, size_t limit, struct buf *out, struct error *err);
/* Replaces a file atomically: writes PATH.tmp-PID[-N], flushes it to the disk, renames it to PATH
 * and flushes the directory. On an error the old file is unchanged and the temporary is removed;
 * only if the last step fails, PATH is the new file already. Keeps the old file's mode, follows a
 * symbolic link, and replaces regular files only. Removes temporaries of PATH that a killed process
 * left. */
int file_write(const char *path, const void *data, size_t size, struct error *err);
/* As file_write, with mode 0600 whatever the umask and the old file's mode: for conversations and
 * secrets. */
int file_write_private(const char *path, const void *data, size_t size, struct error *err);
/* Copies from_dir/name to to_dir/name, which is replaced as by file_write. The source is a regular
 * file. */
int file_copy(const char *from_dir, const char *to_dir, const char *name, struct error *err);
/* Opens an empty file without a name in the folder of `path`, for data of one process that are too
 * large for memory: it disappears when it is closed. Returns the descriptor, or a negative error.
 * file_write_at and file_read_at transfer exactly `size` bytes. */
int file_open_unnamed(const char *path, struct error *err);
int file_write_at(int fd, const void *p, size_t size, int64_t offset, struct error *err);
int file_read_at(int fd, void *p, size_t size, int64_t offset, struct error *err);

/* Like file_write, for files too large for memory: atomic_file_open, then any number of
 * atomic_file_write, then atomic_file_commit or atomic_file_abort. */
struct atomic_file {
    FILE *f;
    char *path, *tmp;
    uint64_t pos; /* bytes written so far */
};
int atomic_file_open(struct atomic_file *w, const char *path, struct error *err);
int atomic_file_write(struct atomic_file *w, const void *p, size_t n, struct error *err);
int atomic_file_commit(struct atomic_file *w, struct error *err); /* closes in every case */
void atomic_file_abort(struct atomic_file *w);                    /* harmless after commit */
/* Renames a file or folder and flushes both directories to the disk. Both paths must be in one file
 * system. */
int path_rename(const char *from, const char *to, struct error *err);
bool path_exists(const char *path);
bool path_is_dir(const char *path);
char *path_join(const char *dir, const char *name); /* malloc'ed */
const char *path_name(const char *path);            /* the part after the last slash */
/* Whether a file's name ends with the extension, ".gguf", in any case, after at least one letter.
 */
bool path_has_extension(const char *path, const char *extension);
/* The path that a file names: a relative `path` is relative to the folder of `file`. malloc'ed. */
char *path_relative_to(const char *file, const char *path);
int dir_make(const char *path, struct error *err); /* mkdir -p */
/* As dir_make, with mode 0700 for the last folder. An existing folder of this user loses the
 * permissions of group and others, with a log message; a folder of another user is not changed,
 * with a warning. A folder with the sticky bit, such as /tmp, is refused (ERR_STATE). */
int dir_make_private(const char *path, struct error *err);
/* Creates an empty file of mode 0600, or removes the permissions of group and others from an
 * existing one. Called for a database before SQLite opens it; SQLite's companion files get the mode
 * of the database. */
int file_make_private(const char *path, struct error *err);
/* Removes the permissions of group and others from a folder, from its entries whose names begin
 * with one of `names` (ends with NULL; NULL: any name) and from everything below these entries.
 * Skips files of other users and other file systems. Also removes temporaries that killed processes
 * left there. Returns the number of changed files and folders. */
int dir_restrict_permissions(const char *path, const char *const *names);
/* Locks a folder by DIR/lock until this process unlocks it or dies; `what` is its kind for the
 * message. Returns the descriptor, or ERR_STATE if another process holds the lock: "run 'runs/x' is
 * in use by another process (PID)". */
int dir_lock(const char *dir, const char *what, struct error *err);
void dir_unlock(int fd, const char *dir); /* harmless for fd < 0 */
bool dir_is_locked(const char *dir);      /* by any process, this one included */
void dir_delete(const char *path); /* deletes a folder's files except hidden ones, then the folder
                                      if it is empty */
/* Deletes a file, or a folder with its content; links are removed and not followed. */
void tree_delete(const char *path);
int64_t tree_disk_usage(const char *path); /* bytes on the disk; 0 if it is missing */

/* hashes */

/* SHA-256 in lower-case hex, 64 characters and NUL. */
#define HASH_LEN 65
struct sha256 {
    uint64_t opaque[16];
};
void sha256_init(struct sha256 *h);
void sha256_update(struct sha256 *h, const void *p, size_t n);
void sha256_final(struct sha256 *h, char out[HASH_LEN]);
void sha256_bytes(const void *p, size_t n, char out[HASH_LEN]);
int sha256_file(const char *path, char out[HASH_LEN], struct error *err);
bool hash_is_valid(const char *text);         /* whether it is 64 lower-case hex digits */
uint64_t hash_fnv1a(const void *p, size_t n); /* FNV-1a, then mixed: for tables and splits only */
/* SipHash-2-4 under a random key that the process chooses once, for hash tables whose keys a client
 * controls. The value differs between runs, so only the speed of a table may depend on it. */
uint64_t hash_siphash(const void *p, size_t n);

/* randomness */

/*
 * The random source of all results: Philox4x32-10 (Salmon et al. 2011). Its key is the seed; its
 * counter is (purpose, id, step, n), where n counts blocks of four values. Equal arguments of
 * rng_make give equal streams on every machine and in every order of use. There is no hidden state.
 */
enum rng_purpose {
    RNG_INIT = 1,
    RNG_DATA,
    RNG_DROPOUT,
    RNG_SAMPLE,
    RNG_MUTATE,
    RNG_SELECT,
    RNG_BOOTSTRAP,
    RNG_SHUFFLE,
    RNG_TASK,
    RNG_TEST,
    RNG_NOISE,
    RNG_WORLD,
};
struct rng {
    uint32_t key[2], ctr[4], out[4];
    int have; /* values of `out` that are not used yet; they are at its end */
};
struct rng rng_make(uint64_t seed, enum rng_purpose purpose, uint32_t id, uint32_t step);
uint32_t rng_u32(struct rng *r);
void rng_fill(struct rng *r, uint32_t *out, size_t n); /* the next n values of rng_u32, faster */
void rng_skip(struct rng *r, uint64_t n); /* as n calls of rng_u32, before any other call */
uint64_t rng_u64(struct rng *r);
uint32_t rng_below(struct rng *r, uint32_t n); /* uniform in 0..n-1, unbiased */
float rng_uniform(struct rng *r);              /* [0, 1), 24 bits */
float rng_normal(struct rng *r);               /* N(0, 1), Box-Muller on the functions below */
void rng_shuffle(struct rng *r, uint32_t *v, size_t n); /* Fisher-Yates, in place */

/* Elementary functions in double that give the same bits on every machine. Relative errors are
 * below 1e-14 on the documented ranges. */
double math_exp(double x); /* x is clamped to [-708, 708] */
double math_log(double x); /* x > 0; -inf for 0, NaN for a negative number */
double math_sin(double x); /* |x| < 1e6; fewer digits up to 2^40, NaN beyond */
double math_cos(double x);
double math_pow(double x, double y); /* x > 0, else NaN; y log x is clamped as for exp */

/* threads */

/*
 * A thread pool of fixed size. pool_run splits 0..n-1 into contiguous chunks (multiples of `grain`,
 * except the last), calls fn once on each, and returns when all are done. It makes a single call if
 * n <= grain or if `p` is NULL. The calling thread is thread 0 and takes chunks like the workers. A
 * waiting thread spins for a while, then sleeps on a futex. The split must not change results: the
 * work items of fn are independent. `thread` is the index of the executing thread, for scratch
 * memory. A pool must not be run inside its own run, or by two threads at once.
 */
struct pool;
typedef void (*pool_fn)(void *ctx, int64_t begin, int64_t end, int thread);
struct pool *pool_new(int n_threads); /* threads with the caller, at most 1024; 0: cpu_count() */
void pool_free(struct pool *p);
int pool_size(const struct pool *p); /* NULL counts as a pool of one */
void pool_run(struct pool *p, pool_fn fn, void *ctx, int64_t n, int64_t grain);
/* `gate` is called by the caller of pool_run and by the workers before each chunk, and may block;
 * chunks are then as small as `grain` allows. Call this before the first pool_run: a worker may
 * still come to the gate when pool_run has returned. ctx must be valid until pool_free. */
void pool_set_gate(struct pool *p, void (*gate)(void *ctx), void *ctx);
int cpu_count(void); /* the processors that this process may use */
/* Lowers the calling thread's priority by `nice` and requests short time slices for it, so that
 * another thread that wakes up does not wait for the end of a long slice. Kernels before Linux 6.12
 * ignore the requested slice. */
void thread_lower_priority(int nice);

/* As pthread_cond_wait, but waits at most until the time `end` of clock_now; then it returns false.
 */
bool condition_wait_until(pthread_cond_t *c, pthread_mutex_t *lock, double end);

/*
 * yield: background work that yields to other work of the process, the foreground.
 *
 * Threads report when foreground work begins and ends. A task of the background calls
 * yield_task_wait between two small pieces of work, for example as the gate of its pool. The call
 * blocks while there is foreground work, except during turns of the background: of every
 * YIELD_PERIOD seconds of foreground work, `share` at the end. So a task never starves if share is
 * above 0. Threads: any; a task ends before its yield is freed.
 */
#define YIELD_PERIOD 0.2
struct yield;
/* clock: clock_now, or that of a test. */
struct yield *yield_new(double share, double (*clock)(void));
void yield_free(struct yield *y); /* NULL is allowed */
/* Foreground work begins or ends; several may overlap. */
void yield_foreground(struct yield *y, bool begins);

struct yield_task {
    struct yield *y;
    bool normal;      /* it does not yield, but can be held */
    bool held, ended; /* private; atomic */
};
void yield_task_hold(struct yield_task *t, bool hold); /* a held task waits in any case */
void yield_task_end(struct yield_task *t);             /* the task waits no longer */
/* Seconds of foreground work until the task may continue: 0: now, INFINITY: it is held. */
double yield_task_delay(struct yield_task *t);
void yield_task_wait(void *task); /* a struct yield_task: the function is the gate of a pool */

/* time, memory, log, progress */

double clock_now(void);        /* seconds, monotonic */
char *clock_utc(char out[32]); /* "2026-11-21T09:30:00Z" */
/*
 * Joules that the processor packages of this machine used, from an arbitrary time on; the
 * difference of two values is the energy in between, of all programs. NaN if the counters (RAPL,
 * $SHOAL_POWERCAP or /sys/class/powercap) cannot be read, so a sum with it is NaN too. Any thread
 * may call it. It is an observation like clock_now: never part of hashes, decisions or tables.
 */
double energy_now(void);
/* The same for the counters in a folder, from energy_meter_new on. One thread at a time; a meter
 * that is not read for longer than energy_meter_period seconds may miss an overflow of a counter.
 * NULL: the folder has no readable package. */
struct energy_meter *energy_meter_new(const char *folder);
double energy_meter_read(struct energy_meter *m);
double energy_meter_period(const struct energy_meter *m);
void energy_meter_free(struct energy_meter *m);
/* Adds {joules, joules_per_token} to the costs `v` of a report, if the joules are known (no NaN);
 * joules_per_token only if tokens > 0. */
void energy_add_json(json_t *v, double joules, int64_t tokens);
/* A field of /proc/self/status in bytes: "VmRSS", "VmHWM"; 0 if it is not available. */
size_t process_memory(const char *name);
/* Total and available memory in bytes; -1: unknown. The limits of the control groups of this
 * process and its limit on the address space are taken into account. huge_pages: the kernel's
 * setting of transparent huge pages, "always", "madvise" or "never"; "unknown" if the kernel has no
 * such setting. `root` is "/", or a test's folder. */
struct memory_info {
    int64_t total, available;
    char huge_pages[16];
};
struct memory_info memory_info(const char *root);
/* The bytes that a program may allocate if its user named no limit: what is available, less a
 * sixteenth and 128 MB for other programs, at least 1. SIZE_MAX / 2: unknown. */
size_t memory_usable(void);
/* Advises the kernel (madvise) to use huge pages of 2 MiB for this memory, so that reading a large
 * array from end to end has fewer TLB misses. With huge pages, memory becomes resident in steps of
 * 2 MiB. Does nothing for less than 4 MiB, or if the system has no huge pages. */
void memory_prefer_huge(void *p, size_t size);

/* A program calls it once, before it prints. If stdout is a terminal, it then gets U+FFFD for each
 * control character (C1 included) except newline and tab, for each character that reorders text,
 * and for each invalid UTF-8 sequence. If stdout is a file or a pipe, it gets every byte. */
void terminal_sanitize_stdout(void);
/* Writes control sequences of the program itself, such as cursor movements, to stdout without this
 * filter, in order with printed text. */
void terminal_write_raw(const char *bytes);
/* Appends a text as terminal_sanitize_stdout would print it. */
void buf_add_terminal(struct buf *b, const char *text, size_t len);
/* Whether stdout is a pipe or socket whose other end no longer reads. */
bool stdout_is_closed(void);

/*
 * Messages and progress go to the log sink of the thread or, if it has none and log_to_stderr is
 * set (by the program, not by the library), to stderr: one line per message, control characters as
 * U+FFFD, lines after a newline inside a message indented. log_quiet (set by --quiet, for the whole
 * process) and log_muted (for a thread) silence log_info() and progress, never log_warn().
 */
extern bool log_to_stderr, log_quiet;
extern _Thread_local bool log_muted;

/* The receiver of one thread's messages and progress: a caller of the library. */
struct progress;
struct log_sink {
    void (*message)(void *ctx, const char *text); /* may be NULL */
    /* At each progress_update; true cancels the operation. May be NULL. */
    bool (*progress)(void *ctx, const struct progress *p, const char *detail);
    void *ctx;
    bool cancelled; /* atomic: another thread may set it, too */
};
/* Sets the sink of this thread, which the caller owns, and returns the one before; NULL: none. */
struct log_sink *log_set_sink(struct log_sink *sink);
/* ERR_STATE if the thread's sink has cancelled the operation. Long loops call it between two steps
 * and return the error. */
int log_check_cancelled(struct error *err);

/* A message without a prefix, printed under --quiet too. */
void log_message(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* An error that ends the program: the prefix is "shoal COMMAND: ", or "shoal: " if command is NULL.
 */
void log_error(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Control sequences of text attributes, for streams for which terminal_has_color is true: prefixes
 * of errors, warnings, headings, marked text; and the end of each. */
#define TERMINAL_ERROR "\033[1;31m"
#define TERMINAL_WARNING "\033[33m"
#define TERMINAL_BOLD "\033[1m"
#define TERMINAL_MARK "\033[1;32m"
#define TERMINAL_RESET "\033[0m"
/* Whether fd is a terminal that shows colours (TERM is neither unset nor "dumb") and the user has
 * not disabled them (NO_COLOR is unset or empty, see no-color.org). */
bool terminal_has_color(int fd);

/* For tables: the width to pass to printf's "%-*s" so that a text takes `columns` columns of a
 * terminal, where a kanji takes two. */
int utf8_field_width(const char *text, int columns);

bool text_ends_with(const char *text, const char *end);

int double_compare(const void *a, const void *b); /* ascending, for qsort */

/* The number of bytes of `text` that fit in `columns`; a character of three bytes or more counts as
 * two columns wide. */
size_t text_fit(const char *text, int columns);

/*
 * Progress on stderr. On a terminal: one line with bar, rate and remaining time, redrawn at most 10
 * times a second. Elsewhere: a line every 15 seconds. In both cases progress_finish prints a last
 * line. `detail` (may be NULL) is shown at the end of the line. `title` is borrowed.
 *
 * If SHOAL_PROGRESS is the number of a pipe that was open when the program began, the pipe also
 * gets lines of {"title", "done", "total", "seconds", "left"}, even under --quiet: at most 5 a
 * second for all bars together, and the last line of each bar whose previous line was written.
 * "total" 0: not known. "left", the remaining seconds, is missing while nothing is done or the
 * total is not known.
 */
struct progress {
    const char *title;
    double start, last; /* clock_now() at the start and when the line was last drawn */
    int64_t total, done;
    int64_t before;           /* done by an earlier process, before `start` */
    bool last_report_written; /* the last line for the pipe was written */
};
void progress_start(struct progress *p, const char *title, int64_t total);
/* After progress_start: an earlier process did `done` steps, which do not count for the rate. */
void progress_resume(struct progress *p, int64_t done);
void progress_update(struct progress *p, int64_t done, const char *detail);
void progress_finish(struct progress *p, const char *detail);

/* Opens the pipe of SHOAL_PROGRESS. The program calls it first, while an open descriptor with this
 * number can only be an inherited one. */
void progress_pipe_open(void);
/* The pipe of the progress and metrics of this thread, in place of that of the process; -1: that of
 * the process again. */
void progress_pipe_set(int fd);
/* Writes metrics of this process to the pipe of SHOAL_PROGRESS, as a line of {"figures": {name:
 * value}}; NaN and infinities are null. The line is lost if the pipe is full. Names are those of
 * job metrics without their prefix: "train_loss" is shoal_train_loss of metrics.inc. The reader
 * ignores names that are missing there. */
struct process_metric {
    const char *name;
    double value;
};
void process_metrics_report(const struct process_metric *v, int n);

/* options */

/*
 * A table of rows, one per option. Command-line flags, variables, keys of recipes and configuration
 * files, defaults, ranges and help texts all come from it. A row describes a member of the caller's
 * options struct, at `offset`. String values are malloc'ed copies, which options_release frees. In
 * names '-' and '_' are equal.
 */
enum option_type {
    OPT_BOOL,
    OPT_INT,
    OPT_FLOAT,
    OPT_STRING,
    OPT_LIST,    /* strings; may repeat and take several values */
    OPT_SECRETS, /* as OPT_LIST, never shown */
    OPT_ALIAS    /* alias of the row that `default_value` names; not shown in help */
};
/*
 * Whether a client that requests a job may set an option or a positional argument, and how its text
 * is checked. JOB_ARG_DEFAULT is the policy of an option row without one: a bool or a number may be
 * set, a text may not.
 */
enum job_arg_policy {
    JOB_ARG_DEFAULT,
    JOB_ARG_END = JOB_ARG_DEFAULT, /* ends the policies of positional arguments */
    JOB_ARG_FORBIDDEN,             /* no client may set it */
    JOB_ARG_SERVER_ONLY, /* only the server sets it: folders of runs and calls, format of the output
                          */
    JOB_ARG_TEXT,        /* any text; it names no file */
    JOB_ARG_NAME,        /* letters, digits, '.', '_' and '-', never a path */
    JOB_ARG_CLIENT_NAME, /* a name in a namespace per client: it becomes OWNER/NAME */
    JOB_ARG_INPUT_PATH,  /* a file or folder to read */
    JOB_ARG_DATABASE,    /* a database to read */
    JOB_ARG_BUILTIN_OR_PATH, /* a built-in name ("base", "brief"), or a file or folder to read */
    JOB_ARG_BUILTIN_OR_PATH_LIST, /* comma-separated values of JOB_ARG_BUILTIN_OR_PATH */
    JOB_ARG_NAMED_FILE,  /* FILE or NAME=FILE, a file to read; FILE may be a built-in source
                            ("fry:pick") */
    JOB_ARG_OUTPUT_PATH, /* a file or folder to write */
    JOB_ARG_REWARD,      /* a reward function, which may be a command */
    JOB_ARG_THREADS      /* a number of threads, at most that of the machine */
};
/* The positional arguments of a command in a job. */
struct job_args {
    const char *subcommand; /* value of the first argument (a subcommand); NULL: any value */
    enum job_arg_policy
        policies[4]; /* policy per argument, from the first; ends with JOB_ARG_END */
    bool repeats;    /* the last argument may be repeated */
};

struct option_row {
    const char *name; /* "grad-accum" for --grad-accum / grad_accum; NULL ends a table */
    enum option_type type;
    size_t offset;             /* offset of a bool, int64_t, double, char * or struct strings */
    const char *default_value; /* default value as text; NULL: false, 0, NULL or an empty list */
    double min, max;           /* for numbers, inclusive; both 0: no limits */
    const char *metavar;       /* "N", "FILE"; for help */
    const char *help;          /* one line */
    enum job_arg_policy job_policy;
};
/* Rows over a struct that is a part of the options struct, at an offset in it. */
struct option_table {
    const struct option_row *rows; /* NULL ends a list of tables */
    size_t offset;
    const char *title; /* heading in the help text; NULL: no heading */
};
size_t options_count(const struct option_row *rows);
/* `rows` followed by the rows of `more` (may be NULL), as one table; malloc'ed. */
struct option_row *options_join(const struct option_row *rows, const struct option_table *more);
struct strings {
    char **v;
    int n;
};
void strings_add(struct strings *s, const char *text);
void strings_release(struct strings *s);
void strings_sort(struct strings *s); /* by their bytes */
/* Adds the words of a command line, which are separated by blanks except within '…' and "…".
 * Nothing is expanded. False: a quote is not closed. */
bool strings_add_words(struct strings *s, const char *text);

/* Sets every member to its default. Old values are overwritten and not freed. */
void options_default(const struct option_row *rows, void *out);
/* Parses argv[0..argc-1] (no program name): flags ("--name value", "--name=value", "--bool",
 * "--no-bool", "--list a b c" up to the next flag) in any place. Other arguments, and all after
 * "--", are added to `positional`. "-" and "-5" are not flags. */
int options_parse(const struct option_row *rows, void *out, int argc, char **argv,
                  struct strings *positional, struct error *err);

/* The source of an option's value, recorded per row of a table. */
enum option_source {
    OPTION_FROM_DEFAULT,
    OPTION_FROM_FILE,
    OPTION_FROM_ENV,
    OPTION_FROM_RECIPE,
    OPTION_FROM_FLAG
};
struct option_origin {
    enum option_source source;
    int line; /* line of the configuration file */
};
/* As options_parse; also sets origin[i] (unless origin is NULL) for each row i that was given. */
int options_parse_with_origin(const struct option_row *rows, void *out, int argc, char **argv,
                              struct strings *positional, struct option_origin *origin,
                              struct error *err);
/* Sets rows from the variables PREFIX_NAME (capitals, and '_' for '-') of an environment. Blanks
 * separate a list's items. An empty variable is ignored. An unknown name is a warning only, since
 * other programs may set variables too. */
int options_from_env(const struct option_row *rows, void *out, const char *prefix,
                     char *const *environment, struct option_origin *origin, struct error *err);
/* Appends the name of the variable of `environment` that sets the option, under its name, an
 * alias or an old name; returns false if none does. */
bool option_env_source(const struct option_row *rows, const struct option_row *row,
                       const char *prefix, char *const *environment, struct buf *b);
/* Sets rows from one section of a configuration file; an absent section changes nothing. Each line
 * with a list's key is one item of the list. Errors begin with "FILE:LINE: ". `owner` is the
 * subject of the error about an unknown key: "OWNER has no option". */
struct config_file;
int options_from_config(const struct option_row *rows, void *out, const struct config_file *c,
                        const char *section, const char *owner, struct option_origin *origin,
                        struct error *err);
/* Appends an option's value in the form in which it is set; returns false if it has none (NULL, an
 * empty list). Of secrets it appends only how many there are. */
bool option_print_value(const struct option_row *row, const void *out, struct buf *b);
/* Appends SHOAL_SERVE_MAX_TOKENS for "SHOAL_SERVE" and "max-tokens". */
void option_env_name(const char *prefix, const char *name, struct buf *b);
/* Values that have an earlier name (renamed.c). `what` is the kind of the value: "compat", "rules",
 * "operator", "reply", "section" (of a recipe), "protocol". All three return `name` itself when the
 * table has no such row. renamed_value: the current name, for text from a user; the first use of an
 * old name prints a note. current_value: the same for names from files, without a note.
 * stored_value: the name that files and hashes use. */
const char *renamed_value(const char *what, const char *name);
const char *current_value(const char *what, const char *name);
const char *stored_value(const char *what, const char *name);
/* The option with this name, alias or former name; NULL if unknown. */
const struct option_row *option_find(const struct option_row *rows, const char *name);
/* Whether the option differs from `defaults`, which options_default has filled; a list does if it
 * has items. */
bool option_changed(const struct option_row *row, const void *options, const void *defaults);
/* As option_find, for a flag of the command line, of which the value may decide: `--lora FILE` is
 * the flag of llama.cpp, `--lora f16` an earlier name. `value` may be NULL. */
const struct option_row *option_find_flag(const struct option_row *rows, const char *name,
                                          const char *value);
/* The name under which results and records hold the option's value: the one of version 0.1. */
const char *option_stored_name(const struct option_row *row);
/* The option name closest to `name`, for "did you mean", or NULL. */
const char *option_suggest(const struct option_row *rows, const char *name);
/* The closest of n names, or NULL. */
const char *name_suggest(const char *const *names, int n, const char *name);
/* Sets rows from a YAML mapping (see yaml_load); an unknown key is an error with its file and line.
 * `section` may be NULL or a dotted path inside the document ("train.lora"); an absent section
 * changes nothing. A mapping under a key that names no row continues the name: "lora: {rank: 8}" is
 * lora_rank. null sets the row's default. */
struct yaml;
int options_from_yaml(const struct option_row *rows, void *out, const struct yaml *doc,
                      const char *section, struct error *err);
/* An option's value, a new reference; NULL for an alias and for secrets. */
json_t *option_json(const struct option_row *row, const void *options);
/* The options of a table as an object, in the table's order, under their stored names, without
 * aliases and secrets. */
json_t *options_json(const struct option_row *rows, const void *options);
void options_help(const struct option_row *rows, FILE *f);
/* The parts of a row that options_help prints: the placeholder of its value ("N", "FILE"; NULL for
 * a bool), whether it takes several values, whether it is a bool that --no-NAME switches off, and
 * its text with range and default, which is appended. */
const char *option_metavar(const struct option_row *row);
bool option_is_list(const struct option_row *row);
bool option_is_on(const struct option_row *row);
void option_add_help(struct buf *b, const struct option_row *row);
void options_release(const struct option_row *rows, void *out); /* frees strings and lists */
/* translate.c: chooses the catalogue DIR/LANGUAGE/LC_MESSAGES/shoal.mo by the environment. Without
 * this call, without a catalogue, and after translations_close, all texts are English. Call
 * translations_open while there is one thread. */
void translations_open(const char *dir);
void translations_close(void);
/* The translation of a message or help text, or the text itself. Errors and messages of the log are
 * translated when they are set: pass them as they are. */
const char *translate(const char *text) __attribute__((format_arg(1)));
/* Sets whether the texts of this thread are English, and returns whether they were: for texts that
 * a model reads, which must not depend on the user's language. */
bool translations_suspend(bool suspend);

/* "100M" → bytes; K, M, G are powers of 1024. */
int size_parse(const char *text, size_t *out, struct error *err);

/* A configuration file: sections of KEY = VALUE. The first section, "", has the entries before any
 * section header. config_release is harmless after an error. */
struct config_entry {
    const char *key, *value;
    int line;
};
struct config_section {
    const char *name;
    int line;     /* line where it begins; 0: the first section */
    int first, n; /* index of its first entry in config_file.v; number of its entries */
};
struct config_file {
    const char *path; /* NULL: no file */
    struct config_section *sections;
    struct config_entry *v;
    int n_sections, n;
    bool shared; /* other users may read the file */
    struct arena arena;
};
int config_load(struct config_file *c, const char *path, struct error *err);
int config_parse(struct config_file *c, const char *path, const char *text, size_t len,
                 struct error *err); /* parses a text; `path` names it in errors */
const struct config_section *config_find_section(const struct config_file *c, const char *name);
void config_release(struct config_file *c);

/* A YAML file as jansson values, with the line of every key ("a.b.0.c"). Anchors, tags and
 * duplicate keys are refused. An empty file is null. */
struct yaml {
    char *path;
    json_t *root;
    json_t *lines;
    bool stored; /* written by this program, so renamed options get no note */
};
int yaml_load(struct yaml *y, const char *path, struct error *err);
/* As yaml_load, but the tag of lm-evaluation-harness for Python code is accepted: '!function TEXT'
 * becomes {YAML_FUNCTION: TEXT}. */
#define YAML_FUNCTION "!function"
int yaml_load_functions(struct yaml *y, const char *path, struct error *err);
/* Parses a text; `path` names it in errors. */
int yaml_parse(struct yaml *y, const char *path, const char *text, size_t len, struct error *err);
int yaml_line(const struct yaml *y, const char *key_path); /* 0 when unknown */
/* Puts the file and the line of a key, or 1, before the message; returns err->code. */
int yaml_error_wrap(const struct yaml *y, const char *key_path, struct error *err);
/* The mapping `root`, which is at key_path in the document, as a separate document, which borrows
 * path and root. The caller calls json_decref on its `lines`. */
struct yaml yaml_subtree(const struct yaml *y, json_t *root, const char *key_path);
void yaml_release(struct yaml *y);

/* JSON */

/* Parses one document strictly: duplicate keys are an error. `what` names the source in the error,
 * which has line and column. */
json_t *json_parse(const char *text, size_t len, const char *what, struct error *err);
json_t *json_parse_file(const char *path, struct error *err);
/*
 * An upper bound of the memory in bytes that parsing this text may take at its peak, computed by
 * one scan that allocates nothing. For valid JSON it is at most about 32 KiB +
 * JSON_PARSE_MEMORY_FACTOR times the length; for usual texts about 12 times the length.
 */
enum { JSON_PARSE_MEMORY_FACTOR = 128 };
size_t json_parse_memory(const char *text, size_t len);
/* json_parse_limited is for untrusted texts, also for JSON in a string of a document that is parsed
 * already. Before it allocates memory, it refuses a text that is nested too deep or may take too
 * much memory (ERR_MISMATCH). Then it subtracts the text's cost from `left`. */
struct json_limits {
    int depth;                 /* limit of nested lists and objects */
    size_t cost;               /* limit of memory, as of json_parse_memory */
    bool allow_duplicate_keys; /* duplicate keys are accepted; the last one is kept */
};
extern const struct json_limits json_request_limits; /* one HTTP request: 100 deep, 256 MiB */
json_t *json_parse_limited(const char *text, size_t len, const char *what, struct json_limits *left,
                           struct error *err);
/* The value of a key; "" or 0 if it is missing or not a text or number. */
const char *json_get_string(const json_t *v, const char *key);
double json_get_number(const json_t *v, const char *key);
bool json_is_string_array(const json_t *v); /* a list that holds only strings */
/* Appends a value as one line of compact JSON, with its newline. Takes ownership of v. */
void buf_add_json_line(struct buf *b, json_t *v);
/* A text of n bytes as a JSON string; invalid UTF-8 becomes U+FFFD. */
json_t *json_string_lossy(const char *text, size_t n);
/* A path as a JSON string; JSON's null if it is not UTF-8. */
json_t *json_from_path(const char *path);
/* Canonical text: sorted keys, compact. malloc'ed. */
char *json_canonical(const json_t *v);
/*
 * Reads a file of JSON values: one per line, pretty-printed one after another, or one array of
 * them. Calls fn for each value, with the line where the value begins; the value is freed after the
 * call. Stops at the first non-zero return of fn and returns it.
 */
typedef int (*json_file_each_fn)(void *ctx, const json_t *value, int line, struct error *err);
int json_file_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);
/* Calls fn for each row of a table as text, except empty lines. cells: [n] texts with a NUL, valid
 * during the call. separator: ',' or a tab. A byte order mark is skipped; the first row, perhaps a
 * header, is a row. Errors name file and line; an error of fn ends the walk. */
enum { CSV_MAX_CELLS = 256 };
typedef int (*csv_row_fn)(void *ctx, const struct buf *cells, int n, int line, struct error *err);
int csv_rows_each(const char *path, char separator, csv_row_fn fn, void *ctx, struct error *err);
/* As json_file_each for a table whose first row names the columns: each other row is an object. Two
 * columns with one name and rows of another length are errors. `value` replaces the text of a cell,
 * which it owns, by its value; NULL leaves the member out. */
typedef json_t *(*csv_value_fn)(json_t *text);
int csv_objects_each(const char *path, char separator, csv_value_fn value, json_file_each_fn fn,
                     void *ctx, struct error *err);

/*
 * html: self-contained HTML pages and line charts, with light and dark colours and without scripts,
 * fonts and external addresses. All text from outside is escaped.
 *
 * Every function appends to a buf, which the caller writes to a file. A chart is made in this
 * order: plot_open fits the axes to the range; plot_line adds lines, and the caller may add SVG at
 * plot_x, plot_y; plot_close ends it. The functions keep no state.
 */

void html_page_open(struct buf *b, const char *title); /* up to and including the heading */
void html_page_close(struct buf *b);
/* Appends `s` escaped, for the text of an element or a quoted attribute. Characters that a page
 * must not contain become U+FFFD. */
void html_escape(struct buf *b, const char *s);
/* Appends a table. An object: a row of name and value for each member. An array of objects: a row
 * for each object and a column for each key of any of them. Nested values are shown as JSON. */
void html_table(struct buf *b, const json_t *v);

struct plot {
    const char *label, *x_title; /* description for screen readers, and title of the x axis */
    double x0, x1, y0, y1;       /* the range of the data; plot_open widens it to round numbers */
};
void plot_open(struct buf *b, struct plot *p);
double plot_x(const struct plot *p, double x);
double plot_y(const struct plot *p, double y);
/* Appends a line of n points. The number of the series decides colour and dashes. The line is
 * interrupted at points that are not finite. */
void plot_line(struct buf *b, const struct plot *p, int series, const double *x, const double *y,
               int n);
/* Appends a dot at (x, y) with a vertical line from lo to hi and its name. */
void plot_point(struct buf *b, const struct plot *p, int series, double x, double y, double lo,
                double hi, const char *name);
void plot_close(struct buf *b);
void plot_legend(struct buf *b, int series, const char *name);

/* A series of any length, reduced to at most CURVE_POINTS points. Each point is the mean of the
 * same number of values. */
#define CURVE_POINTS 512
struct curve {
    double x[CURVE_POINTS], y[CURVE_POINTS], sum_x, sum_y;
    int n;
    int64_t points_per_mean, n_summed; /* values per point; values in the sums so far */
};
void curve_add(struct curve *c, double x, double y); /* ignores NaN and infinities */
/* A chart of the n curves c, with a legend of `names`; NULL: no legend. */
void plot_curves(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                 const char *const *names, int n);
/* The chart of plot_bands as a complete SVG document, with its style sheet, the label above and the
 * names below. */
void plot_svg(struct buf *b, const char *label, const char *x_title, const struct curve *c,
              const struct curve *spread, const char *const *names, int n);
/* As plot_curves, with a band of ±`spread` [n] (may be NULL) around each line. A curve of spreads
 * has as many points as its line; an empty one draws no band. */
void plot_bands(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                const struct curve *spread, const char *const *names, int n);

#endif
