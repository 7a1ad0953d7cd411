/*
 * base: what every other folder stands on.
 *
 * Errors. A function that can meet a wrong outside world takes a `struct error *` (never NULL) as
 * its last argument and returns a negative `enum error_code` or NULL; the message is lower case,
 * names what is wrong first, quotes the subject, and gains context on its way up through
 * error_wrap(). A broken contract aborts (CHECK).
 *
 * Threads. Everything here may be used from any thread on distinct objects; a `struct pool` is
 * driven by one thread.
 */
#ifndef SHOAL_BASE_H
#define SHOAL_BASE_H

#include <jansson.h>
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

/* Sets `err` and returns `code`. */
int error_set(struct error *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Puts "context: " before the message that is there; returns err->code. */
int error_wrap(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* error_set(ERR_IO or ERR_MISSING) with errno's own words after the message. */
int error_errno(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
const char *error_name(int code);

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond);                                      \
    } while (0)
_Noreturn void check_failed(const char *file, int line, const char *what);

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* memory */

/* For what a file, a model or an option decides the size of: NULL and ERR_MEMORY, with the bytes
 * that were wanted, when the system refuses. With err = NULL they are the functions below. */
void *try_calloc(size_t n, size_t size, struct error *err);
void *try_realloc(void *p, size_t size, struct error *err); /* on failure `p` stays as it is */
/* For what is small: never return NULL. Out of memory is a message and exit 1, after the reserve
 * was spent. */
void *xmalloc(size_t size);
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *p, size_t size);
char *xstrdup(const char *s);
char *xstrndup(const char *s, size_t n);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
char *xvasprintf(const char *fmt, va_list ap) __attribute__((format(printf, 1, 0)));
/* An emergency reserve for the functions above (0: none, as a process begins). When the system
 * refuses memory, the reserve is freed and the process continues; while there is none, an
 * allocation that fails waits some seconds for what other threads free. memory_is_low then tries
 * to allocate the reserve again and returns true as long as that fails. A program that keeps one
 * asks it before it takes new work. Any thread. */
void memory_reserve_set(size_t size);
bool memory_is_low(void);

/* An arena hands out 64-byte-aligned zeroed memory and gives all of it back at once. */
struct arena {
    struct arena_block *head;
    size_t used;
};
void *arena_try_alloc(struct arena *a, size_t size, struct error *err);
void *arena_alloc(struct arena *a, size_t size); /* never NULL */
/* The next allocations of `size` bytes in all, each rounded up to 64, cannot fail. */
int arena_reserve(struct arena *a, size_t size, struct error *err);
char *arena_strdup(struct arena *a, const char *s);
void arena_release(struct arena *a);

/* A growing byte string; `data` is always NUL-terminated once anything was added. Zero-initialise.
 */
struct buf {
    char *data;
    size_t len, cap;
};
/* Room for n more bytes, so that adding them cannot fail; err as for try_realloc. */
int buf_reserve(struct buf *b, size_t n, struct error *err);
void buf_add(struct buf *b, const void *p, size_t n);
void buf_puts(struct buf *b, const char *s);
/* For people: control characters but newline and tab, and what is no UTF-8, become U+FFFD. */
void buf_add_sanitized(struct buf *b, const char *text, size_t len);
/* Bytes of the whole characters at the beginning of a text that is still growing. */
size_t utf8_complete_len(const char *text, size_t n);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_release(struct buf *b);

/* files */

/* Called before the functions below open a file for reading, or make or replace one, and before a
 * file is shown to a command: OK, or the reason of the refusal. NULL: no check. Set once, while the
 * process has one thread, by a process that works for others (a job). */
enum path_use { PATH_USE_READ, PATH_USE_WRITE, PATH_USE_EXEC };
extern int (*path_access_hook)(const char *path, enum path_use use, struct error *err);

/* Closes a descriptor that is open, and makes it -1. */
void fd_close(int *fd);
/* Makes from[0..n) the descriptors 0 to n-1, n at most 8, in a child between fork and exec: it
 * calls the system only. False with errno. */
bool fds_remap(const int *from, int n);

struct file_map {
    const uint8_t *data;
    size_t size;
    void *copy; /* file_map_open_copy's memory */
};
int file_map_open(struct file_map *m, const char *path, struct error *err);
/* The same with a copy of the bytes, for files that may be rewritten meanwhile: reading a map
 * beyond a file's new end ends the process. */
int file_map_open_copy(struct file_map *m, const char *path, struct error *err);
void file_map_close(struct file_map *m);
/* Lets the pages inside these bytes of a mapping leave memory; they are read from the file again
 * when touched. */
void file_map_evict(const void *p, size_t size);
/* A program calls it once, before its threads: reading a mapping beyond the file's new end is then
 * a message with the file's name and exit 1. Other bus errors keep their action. */
void file_map_catch_sigbus(void);
/* ERR_STATE with the name of a mapped file that has another size or time than when it was mapped.
 * Costs a system call a mapping. */
int file_map_check_unchanged(struct error *err);

/* A regular file for reading, never a pipe, a device or a folder; does not wait. The descriptor, or
 * a negative error. file_map_open, file_map_open_copy and file_read_head open files in this way. */
struct stat;
int file_open_regular(const char *path, struct stat *st, struct error *err);
/* Bytes at the beginning of a regular file, as many as were read; 0 after any error. */
size_t file_read_head(const char *path, void *out, size_t size);
/* The functions below also read pipes, terminals and /dev/null, as a command line may name them.
 * From file_set_regular_only(true) on they do not: a server's paths come from requests, and a pipe
 * without a writer would hold its thread. */
void file_set_regular_only(bool only);

/* Whole file into `out` (appended). Refuses files above `limit` bytes. */
int file_read(const char *path, size_t limit, struct buf *out, struct error *err);
/* All or nothing: writes PATH.tmp-PID[-N], fsyncs file and directory, renames; on any failure the
 * old file stands and the temporary is gone. Keeps the old file's mode, follows a symbolic link,
 * refuses to replace what is not a regular file. Temporaries of PATH that a killed process left are
 * removed. */
int file_write(const char *path, const void *data, size_t size, struct error *err);
/* The same with mode 0600 whatever the umask and the old file's mode: conversations and secrets. */
int file_write_private(const char *path, const void *data, size_t size, struct error *err);
/* One file of a folder into another one, in the same way. */
int file_copy(const char *from_dir, const char *to_dir, const char *name, struct error *err);
/* The same for files too large to hold: atomic_file_open, atomic_file_write ..., then
 * atomic_file_commit or atomic_file_abort. */
struct atomic_file {
    FILE *f;
    char *path, *tmp;
    uint64_t pos;
};
int atomic_file_open(struct atomic_file *w, const char *path, struct error *err);
int atomic_file_open_private(struct atomic_file *w, const char *path,
                             struct error *err); /* mode 0600 */
int atomic_file_write(struct atomic_file *w, const void *p, size_t n, struct error *err);
int atomic_file_commit(struct atomic_file *w, struct error *err); /* closes in every case */
void atomic_file_abort(struct atomic_file *w);                    /* harmless after commit */
/* A rename that is on the disk when it returns; both in one file system. */
int path_rename(const char *from, const char *to, struct error *err);
bool path_exists(const char *path);
bool path_is_dir(const char *path);
char *path_join(const char *dir, const char *name); /* malloc'ed */
/* A path that a file names, which begins where that file is. malloc'ed. */
char *path_relative_to(const char *file, const char *path);
int dir_make(const char *path, struct error *err); /* mkdir -p */
/* The same, the last folder with mode 0700. One that is there loses the rights of others, with a
 * note; one that all may write in, such as /tmp, is refused. */
int dir_make_private(const char *path, struct error *err);
/* A new, empty file of mode 0600, or an old one without the rights of others: a database before
 * SQLite opens it, whose other files inherit its mode. */
int file_make_private(const char *path, struct error *err);
/* Takes the rights of others from a folder, from its entries whose names begin with one of `names`
 * (ends with NULL; NULL: any name) and from all below those, as far as it is ours and in one file
 * system; removes leftovers of killed writers there. Returns how many entries it changed. */
int dir_restrict_permissions(const char *path, const char *const *names);
/* A lock file that this process holds until it releases it or dies. The descriptor, or ERR_STATE
 * with the process that has it: "SUBJECT is in use by another process (PID)". */
int lockfile_acquire(const char *path, const char *subject, struct error *err);
void lockfile_release(int fd, const char *path); /* removes the file; harmless for fd < 0 */
/* The same for a folder, by DIR/lock; `what` is it in the message: "run 'runs/x'". */
int dir_lock(const char *dir, const char *what, struct error *err);
void dir_unlock(int fd, const char *dir);
void dir_delete(const char *path); /* with its files; hidden ones keep it there */
/* A file, or a folder with all that is in it; links are removed and not followed. */
void tree_delete(const char *path);
int64_t tree_disk_usage(const char *path); /* of its files, as on the disk; 0: there is nothing */

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
bool hash_is_valid(const char *text); /* whether it is one, as written here */
uint64_t
hash_fnv1a(const void *p,
           size_t n); /* FNV-1a then a 64-bit finaliser: for tables and splits, not for identity */
/* SipHash-2-4 under a key that the process draws once: for tables whose keys a caller chooses.
 * Differs between runs, so nothing but the speed of a table may depend on it. */
uint64_t hash_siphash(const void *p, size_t n);

/* randomness */

/*
 * The one random source: Philox4x32-10 (Salmon et al. 2011), keyed by (seed, purpose) with counter
 * (id, step, n). Equal arguments give equal streams on every machine and in every order of use.
 * There is no hidden state.
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
    int have;
};
struct rng rng_make(uint64_t seed, enum rng_purpose purpose, uint32_t id, uint32_t step);
uint32_t rng_u32(struct rng *r);
void rng_fill(struct rng *r, uint32_t *out, size_t n); /* the next n of rng_u32, faster */
uint64_t rng_u64(struct rng *r);
uint32_t rng_below(struct rng *r, uint32_t n); /* uniform in 0..n-1, unbiased */
float rng_uniform(struct rng *r);              /* [0, 1), 24 bits */
float rng_normal(struct rng *r);               /* N(0, 1), Box-Muller on the functions below */
void rng_shuffle(struct rng *r, uint32_t *v, size_t n);

/* Own elementary functions in double: same bits everywhere. Errors below 1e-14 relative on their
 * documented ranges. */
double math_exp(double x); /* x is clamped to [-708, 708] */
double math_log(double x); /* x > 0; log 0 is -inf, of a negative number NaN */
double math_sin(double x); /* |x| < 1e6; fewer digits up to 2^40, NaN beyond */
double math_cos(double x);
double math_pow(double x, double y); /* x > 0, else NaN; y log x is clamped as for exp */

/* threads */

/*
 * A fixed pool. pool_run cuts 0..n-1 into contiguous chunks (multiples of `grain` but for the last)
 * and calls fn once on each; n <= grain is one call. The caller is thread 0 and takes chunks like
 * the others. Waiting spins for a while, then sleeps on a futex. The cut must not change results:
 * fn's work items are independent. `thread` names who executes, for scratch. Running a pool inside
 * its own run breaks the contract.
 */
struct pool;
typedef void (*pool_fn)(void *ctx, int64_t begin, int64_t end, int thread);
struct pool *pool_new(int n_threads); /* 0: as many as sched_getaffinity allows; at most 1024 */
void pool_free(struct pool *p);
int pool_size(const struct pool *p); /* NULL is a pool of one */
void pool_run(struct pool *p, pool_fn fn, void *ctx, int64_t n, int64_t grain);
int cpu_count(void);
/* Lowers the calling thread's priority by `nice` and gives it short time slices, so that a thread
 * which wakes beside it need not wait for the end of a long one (Linux 6.12; older ones have their
 * own slices). */
void thread_background(int nice);

/* time, memory, log, progress */

double clock_now(void);        /* seconds, monotonic */
char *clock_utc(char out[32]); /* "2026-11-21T09:30:00Z" */
/* What the system says of this process in bytes: "VmRSS", "VmHWM"; 0 when it does not say. */
size_t process_memory(const char *name);
/* What the machine has and would give, bytes, -1 where it is not known; never more than the limits
 * of the control groups that this process is in. `root` is "/", or a test's. */
struct memory_info {
    int64_t total, available;
};
struct memory_info memory_info(const char *root);

/* A program calls it once, before it prints: from then on what it prints with stdout, if that is a
 * terminal, loses control characters but newline and tab, C1 controls, characters that reorder text
 * and invalid UTF-8, each shown as U+FFFD. Files and pipes get every byte. */
void terminal_sanitize_stdout(void);
/* Bytes of ours for the terminal, such as cursor movements, unfiltered; in order with stdout. */
void terminal_write_raw(const char *bytes);
/* A text as terminal_sanitize_stdout shows it. */
void buf_add_terminal(struct buf *b, const char *text, size_t len);
/* Whether the other side of stdout, a pipe or a socket, reads no more. */
bool stdout_is_closed(void);

/* Words for people go to stderr, one line each: the newline is added; control characters in them
 * become U+FFFD, and lines after a newline in them are indented. `log_quiet` silences log_info()
 * and progress (set by
 * --quiet), never log_warn(). */
extern bool log_quiet;
/* Also under --quiet, without a prefix. */
void log_message(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* For tables: what printf's "%-*s" wants so that a text takes so many columns of a terminal, where
 * a kanji takes two. */
int utf8_field_width(const char *text, int columns);

/* On a terminal: one line redrawn at most 10 times a second with bar, rate and remaining time.
 * Elsewhere: a line every 15 seconds. `detail` (may be NULL) is shown after the bar.
 *
 * Where SHOAL_PROGRESS is the number of a pipe that was open when the program began, it gets lines
 * of {"title", "done", "total", "seconds", "left"} too, also under --quiet: at most 5 a second of
 * all bars, and the end of a bar that it knows of. "total" 0: not known; "left", the seconds to go,
 * is missing until something is done. */
struct progress {
    const char *title;
    double start, last;
    int64_t total, shown;
    bool told;
};
void progress_start(struct progress *p, const char *title, int64_t total);
void progress_update(struct progress *p, int64_t done, const char *detail);
void progress_finish(struct progress *p, const char *detail);

/* What a process measures of itself goes there too, as a line of {"figures": {name: value}}:
 * always, unless the pipe is full; what is not finite as null. Names are those of metrics of jobs
 * without their prefix: "train_loss" is shoal_train_loss of metrics.inc, and what is not there is
 * not taken. */
struct process_metric {
    const char *name;
    double value;
};
void process_metrics_report(const struct process_metric *v, int n);

/* options */

/*
 * One row per option: command-line flag, recipe key, default, range and help all come from it. A
 * row writes into a caller's struct at `offset`. Strings are malloc'ed copies. In recipes '-' and
 * '_' in names are the same.
 */
enum option_type {
    OPT_BOOL,
    OPT_INT,
    OPT_FLOAT,
    OPT_STRING,
    OPT_LIST,    /* strings; repeats and takes several */
    OPT_SECRETS, /* the same, never shown */
    OPT_ALIAS    /* another name, not shown in help, of the row that `fallback` names */
};
/*
 * What a job of the server, which a client asks for, may do with an option or a positional
 * argument, and what a text of it names. JOB_BY_TYPE: a bool or a number may be set, a text may
 * not.
 */
enum option_job_policy {
    JOB_BY_TYPE,
    JOB_REFUSED,  /* not by a client */
    JOB_SERVER,   /* by the server only: where runs and calls are kept, how results are printed */
    JOB_TEXT,     /* any text; it names no file */
    JOB_NAME,     /* letters, digits, '.', '_' and '-', never a path */
    JOB_OWN,      /* a name among those that belong to the client's key */
    JOB_INPUT,    /* a file or folder to read */
    JOB_DATABASE, /* a database to read */
    JOB_CHOICE,   /* a built-in name ("base", "brief"), or a file or folder to read */
    JOB_CHOICES,  /* several of them between commas */
    JOB_NAMED,    /* FILE or NAME=FILE; a FILE may be a built-in source ("fry:pick") */
    JOB_OUTPUT,   /* a file or folder to write */
    JOB_REWARD,   /* how completions are rewarded, which may be a command */
    JOB_THREADS   /* a number of threads, at most the machine's */
};
/* The positional arguments of a command in a job. */
struct job_args {
    const char *word; /* what the first argument is; NULL: none of the words before it */
    enum option_job_policy of[4]; /* of the arguments, the word included; JOB_BY_TYPE: no more */
    bool repeats;                 /* the last of them any number of times */
};

struct option_row {
    const char *name; /* "grad-accum" for --grad-accum / grad_accum; NULL ends a table */
    enum option_type type;
    size_t offset;        /* of bool, int64_t, double, char *, struct strings */
    const char *fallback; /* default as text; NULL: false, 0, NULL, empty */
    double min, max;      /* for numbers, inclusive; both 0: any */
    const char *metavar;  /* "N", "FILE"; for help */
    const char *help;     /* one line */
    enum option_job_policy job;
};
struct strings {
    char **v;
    int n;
};
void strings_add(struct strings *s, const char *text);
void strings_release(struct strings *s);

void options_default(const struct option_row *rows, void *out);
/* Parses argv[0..argc-1] (no program name): flags ("--name value", "--name=value", "--bool",
 * "--no-bool", "--list a b c" up to the next flag) in any place; the rest, and all after "--", goes
 * to `positional`. "-" and "-5" are not flags. */
int options_parse(const struct option_row *rows, void *out, int argc, char **argv,
                  struct strings *positional, struct error *err);

/* Where a value came from: of each row of a table, for whoever asks. */
enum option_source {
    OPTION_FROM_DEFAULT,
    OPTION_FROM_FILE,
    OPTION_FROM_ENV,
    OPTION_FROM_RECIPE,
    OPTION_FROM_FLAG
};
struct option_origin {
    enum option_source from;
    int line; /* of the file */
};
/* The same, noting what was given in origin[rows]. */
int options_parse_with_origin(const struct option_row *rows, void *out, int argc, char **argv,
                              struct strings *positional, struct option_origin *origin,
                              struct error *err);
/* Sets rows from the variables PREFIX_NAME, capitals and '_' for '-', of an environment. A list's
 * items stand between blanks; an empty variable is none; one that names no row is warned of, since
 * an environment is not ours alone. */
int options_from_env(const struct option_row *rows, void *out, const char *prefix,
                     char *const *environment, struct option_origin *origin, struct error *err);
/* Sets rows from one section of a configuration file; an absent one leaves them. A list's items are
 * the lines of that key. Errors begin "FILE:LINE: "; `who` is what the section is of. */
struct config_file;
int options_from_config(const struct option_row *rows, void *out, const struct config_file *c,
                        const char *section, const char *who, struct option_origin *origin,
                        struct error *err);
/* A row's value as the text that sets it; false: there is none (NULL, an empty list). A secret is
 * told by its number only. */
bool option_text(const struct option_row *row, const void *out, struct buf *b);
/* SHOAL_SERVE_MAX_TOKENS of "SHOAL_SERVE" and "max-tokens". */
void option_env_name(const char *prefix, const char *name, struct buf *b);
/* The option of this name, or what an alias of this name stands for; NULL: there is none. */
const struct option_row *option_find(const struct option_row *rows, const char *name);
/* The name of the option that may have been meant, or NULL. */
const char *option_suggest(const struct option_row *rows, const char *name);
/* Which of n names may have been meant, or NULL. */
const char *name_suggest(const char *const *names, int n, const char *name);
/* Sets rows from a YAML mapping (see yaml_load); an unknown key is an error naming its file and
 * line. `section` may be NULL or a dotted path inside the document ("train.lora"); an absent
 * section leaves the defaults. A mapping under a key that is no row continues the name: "lora:
 * {rank: 8}" is lora_rank. null is the row's default. */
struct yaml;
int options_from_yaml(const struct option_row *rows, void *out, const struct yaml *doc,
                      const char *section, struct error *err);
void options_help(const struct option_row *rows, FILE *f);
void options_release(const struct option_row *rows, void *out); /* frees strings and lists */

/* A configuration file: sections of KEY = VALUE. The first section, "", is what stands before any
 * other. config_release is harmless after an error. */
struct config_entry {
    const char *key, *value;
    int line;
};
struct config_section {
    const char *name;
    int line;     /* where it begins; 0: the first */
    int first, n; /* its entries */
};
struct config_file {
    const char *path; /* NULL: there is no file */
    struct config_section *sections;
    struct config_entry *v;
    int n_sections, n;
    bool shared; /* others may read the file */
    struct arena arena;
};
int config_load(struct config_file *c, const char *path, struct error *err);
int config_parse(struct config_file *c, const char *path, const char *text, size_t len,
                 struct error *err); /* the same of a text; `path` names it in errors */
const struct config_section *config_find_section(const struct config_file *c, const char *name);
void config_release(struct config_file *c);

/* A YAML file as jansson values, with the line of every key ("a.b.0.c"). Anchors and tags are
 * refused; duplicates too. An empty file is null. */
struct yaml {
    char *path;
    json_t *root;
    json_t *lines;
};
int yaml_load(struct yaml *y, const char *path, struct error *err);
/* The same of a text; `path` names it in errors. */
int yaml_parse(struct yaml *y, const char *path, const char *text, size_t len, struct error *err);
int yaml_line(const struct yaml *y, const char *key_path); /* 0 when unknown */
void yaml_release(struct yaml *y);

/* JSON */

/* Parses one document strictly (duplicate keys rejected); `what` names the source in the error,
 * which has line and column. */
json_t *json_parse(const char *text, size_t len, const char *what, struct error *err);
json_t *json_parse_file(const char *path, struct error *err);
/*
 * The memory in bytes that parsing this text may take at its peak: an upper bound, made by one scan
 * that allocates nothing. It is below 32 KiB + JSON_PARSE_MEMORY_FACTOR times the length for every
 * text, and about 12 times for usual ones.
 */
enum { JSON_PARSE_MEMORY_FACTOR = 128 };
size_t json_parse_memory(const char *text, size_t len);
/* For texts of others, also those inside a document that was parsed already: refuses with
 * ERR_MISMATCH, before it takes memory, what is nested too deep or may cost too much, and takes the
 * cost off `left`. */
struct json_limits {
    int depth;      /* lists and objects inside one another */
    size_t cost;    /* as of json_parse_memory */
    bool last_wins; /* a key given twice is accepted */
};
extern const struct json_limits json_request_limits; /* one HTTP request: 100 deep, 256 MiB */
json_t *json_parse_limited(const char *text, size_t len, const char *what, struct json_limits *left,
                           struct error *err);
/* What stands under a key: "" or 0 where there is no text or number. */
const char *json_get_string(const json_t *v, const char *key);
double json_get_number(const json_t *v, const char *key);
bool json_is_string_array(const json_t *v); /* a list of strings and nothing else */
/* A path as a string, or null where it is no UTF-8. */
json_t *json_from_path(const char *path);
/* Canonical text: sorted keys, compact. malloc'ed. */
char *json_canonical(const json_t *v);
/*
 * Walks a file of JSON values: one per line, pretty-printed one after another, or one array of
 * them. Calls fn(ctx, value, line) for each (line: where it begins); stops at the first non-zero
 * return and returns it.
 */
typedef int (*json_file_each_fn)(void *ctx, const json_t *value, int line, struct error *err);
int json_file_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

/*
 * page: self-contained HTML pages and line charts — no script, no font, no address, readable in
 * light and dark. All text from outside is escaped.
 *
 * Everything appends to a buf that the caller writes (file_write is atomic). A chart is made in
 * order: plot_open fits the axes to the range, then lines and whatever SVG the caller adds at
 * plot_x, plot_y, then plot_close. Pure; any thread.
 */

void html_page_open(struct buf *b, const char *title); /* up to and with the heading */
void html_page_close(struct buf *b);
/* As text or inside "quotes": markup is escaped; what no page may hold becomes U+FFFD. */
void html_escape(struct buf *b, const char *s);
/* An object as rows of name and value; an array of objects as rows under the keys of all of them.
 * What is nested deeper is shown as JSON. */
void html_table(struct buf *b, const json_t *v);

struct plot {
    const char *label, *x_title; /* what it shows, and along what */
    double x0, x1, y0, y1;       /* the range of the data; plot_open widens it to round numbers */
};
void plot_open(struct buf *b, struct plot *p);
double plot_x(const struct plot *p, double x);
double plot_y(const struct plot *p, double y);
/* The series decides colour and dashes. Points that are not finite break the line. */
void plot_line(struct buf *b, const struct plot *p, int series, const double *x, const double *y,
               int n);
void plot_close(struct buf *b);
void plot_legend(struct buf *b, int series, const char *name);

/* Any number of points as at most CURVE_POINTS means of equal numbers of them. */
#define CURVE_POINTS 512
struct curve {
    double x[CURVE_POINTS], y[CURVE_POINTS], sum_x, sum_y;
    int n;
    int64_t per, held; /* points in a mean; points in the sums */
};
void curve_add(struct curve *c, double x, double y); /* not finite: left out */
/* n charts' worth of lines in one chart; names may be NULL: no legend. */
void plot_curves(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                 const char *const *names, int n);
/* A chart as a file of its own: plot_bands' with its names below, under its own style sheet. */
void plot_file(struct buf *b, const char *label, const char *x_title, const struct curve *c,
               const struct curve *spread, const char *const *names, int n);
/* The same with a band around each line, as high as `spread` [n] (may be NULL) above and below. A
 * curve of spreads has the points of its line, or none: no band. */
void plot_bands(struct buf *b, const char *label, const char *x_title, const struct curve *c,
                const struct curve *spread, const char *const *names, int n);

#endif
