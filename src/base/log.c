/*
 * log: clocks, messages on stderr, and progress: a line for the user, and lines of JSON for the
 * program that started this one.
 *
 * The library has no output of its own: the program sets log_to_stderr, and a caller of the library
 * may have a log sink. Messages and progress never go to stdout, which is for results;
 * terminal_sanitize_stdout keeps characters that could harm a terminal out of stdout. Only a
 * terminal gets colours, and only fixed text has them: the prefix of a message, outside the
 * sanitised text. There is no bar if stderr is not a terminal.
 *
 * Invariant: every message is one write of whole lines. While a progress line is on the terminal, a
 * message first erases it; the next update draws it again.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <unistr.h>
#include <uniwidth.h>

bool log_to_stderr, log_quiet;
_Thread_local bool log_muted;
static _Thread_local struct log_sink *log_sink; /* NULL: stderr */

struct log_sink *log_set_sink(struct log_sink *sink) {
    struct log_sink *before = log_sink;
    log_sink = sink;
    return before;
}

int log_check_cancelled(struct error *err) {
    return log_sink && __atomic_load_n(&log_sink->cancelled, __ATOMIC_ACQUIRE)
               ? error_set(err, ERR_STATE, "cancelled")
               : OK;
}

int utf8_field_width(const char *text, int columns) {
    return columns + (int)strlen(text) - u8_strwidth((const uint8_t *)text, "UTF-8");
}

static bool stderr_is_terminal(void) {
    return isatty(STDERR_FILENO) == 1;
}

bool terminal_has_color(int fd) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    return isatty(fd) == 1 && term && *term && strcmp(term, "dumb") != 0 &&
           !(no_color && *no_color);
}

static atomic_bool progress_line_shown; /* a progress line without its newline is on the terminal */

double clock_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

char *clock_utc(char out[32]) {
    time_t now = time(NULL);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
    return out;
}

size_t process_memory(const char *name) {
    size_t kb = 0, n = strlen(name);
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, name, n) == 0 && line[n] == ':') kb = strtoull(line + n + 1, NULL, 10);
    if (f) fclose(f);
    return kb << 10;
}

/* Whether a character of an untrusted text may be sent to a terminal: no control characters except
 * newline and tab, no C1 controls, nothing that reorders text (Unicode's embeddings, overrides and
 * isolates). */
static bool is_printable(ucs4_t c) {
    if (c < 0x20) return c == '\n' || c == '\t';
    return !(c >= 0x7f && c < 0xa0) && !(c >= 0x202a && c <= 0x202e) &&
           !(c >= 0x2066 && c <= 0x2069);
}

/* U+FFFD */
static const char replacement[] = "\xef\xbf\xbd";

void buf_add_terminal(struct buf *b, const char *text, size_t len) {
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtoucr(&c, p, (size_t)(end - p));
        bool line_end = *p == '\r' && p + 1 < end && p[1] == '\n';
        if (n > 0 && is_printable(c))
            buf_add(b, p, (size_t)n);
        else if (!line_end)
            buf_puts(b, replacement);
        p += MAX(n, 1);
    }
}

/* Bytes not yet sent to the terminal: an incomplete character, or a carriage return that may begin
 * a line's end. */
struct terminal_filter {
    struct buf pending;
};

static ssize_t filter_write(void *cookie, const char *text, size_t n) {
    struct terminal_filter *f = cookie;
    struct buf sanitized = {0};
    buf_add(&f->pending, text, n);
    size_t complete = utf8_complete_len(f->pending.data, f->pending.len);
    if (complete > 0 && f->pending.data[complete - 1] == '\r') complete--;
    buf_add_terminal(&sanitized, f->pending.data, complete);
    f->pending.len -= complete;
    memmove(f->pending.data, f->pending.data + complete, f->pending.len);
    bool written = fd_write(STDOUT_FILENO, sanitized.data, sanitized.len);
    buf_release(&sanitized);
    return written ? (ssize_t)n : 0;
}

void terminal_sanitize_stdout(void) {
    static struct terminal_filter filter;
    if (isatty(STDOUT_FILENO) != 1) return;
    FILE *f = fopencookie(&filter, "w", (cookie_io_functions_t){.write = filter_write});
    CHECK(f != NULL);
    setvbuf(f, NULL, _IOLBF, BUFSIZ);
    stdout = f;
}

void terminal_write_raw(const char *bytes) {
    fflush(stdout);
    if (isatty(STDOUT_FILENO) == 1)
        fd_write(STDOUT_FILENO, bytes, strlen(bytes));
    else
        fputs(bytes, stdout);
}

bool stdout_is_closed(void) {
    struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLERR | POLLHUP));
}

/* Appends a message that may quote untrusted text; changes `text`. Lines after the first are
 * indented, so that a line break in a quoted name cannot begin a false message. */
static void log_append_sanitized(struct buf *b, char *text) {
    bool terminal = stderr_is_terminal();
    for (char *line, *rest = text; (line = strsep(&rest, "\n"));) {
        if (line != text) buf_puts(b, "\n  ");
        if (terminal) {
            buf_add_terminal(b, line, strlen(line));
            continue;
        }
        for (; *line; line++)
            if ((unsigned char)*line >= 0x20 && *line != 0x7f)
                buf_add(b, line, 1);
            else
                buf_puts(b, *line == '\t' ? "\t" : replacement);
    }
}

/* color: the colour of the prefix. */
static void message_write(const char *color, const char *prefix, const char *fmt, va_list ap) {
    if (log_sink ? !log_sink->message : !log_to_stderr) return;
    char *text = xvasprintf(translate(fmt), ap);
    if (log_sink) {
        char *whole = xasprintf("%s%s", prefix, text);
        log_sink->message(log_sink->ctx, whole);
        free(whole);
        free(text);
        return;
    }
    struct buf b = {0};
    bool wipe_progress = atomic_exchange(&progress_line_shown, false);
    bool colored = *prefix && terminal_has_color(STDERR_FILENO);
    buf_printf(&b, "%s%s%s%s", wipe_progress ? "\r\033[K" : "", colored ? color : "", prefix,
               colored ? TERMINAL_RESET : "");
    log_append_sanitized(&b, text);
    buf_puts(&b, "\n");
    fputs(b.data, stderr);
    buf_release(&b);
    free(text);
}

void log_message(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    message_write("", "", fmt, ap);
    va_end(ap);
}

void log_info(const char *fmt, ...) {
    if (log_quiet || log_muted) return;
    va_list ap;
    va_start(ap, fmt);
    message_write("", "", fmt, ap);
    va_end(ap);
}

void log_warn(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    message_write(TERMINAL_WARNING, "warning: ", fmt, ap);
    va_end(ap);
}

void log_error(const char *command, const char *fmt, ...) {
    char *prefix = xasprintf("shoal%s%s: ", command ? " " : "", command ? command : "");
    va_list ap;
    va_start(ap, fmt);
    message_write(TERMINAL_ERROR, prefix, fmt, ap);
    va_end(ap);
    free(prefix);
}

enum { BAR_CELLS = 24 };

static const double REDRAW_SECONDS = 0.1, LINE_SECONDS = 15.0, REPORT_SECONDS = 0.2;

static int terminal_columns(void) {
    struct winsize w;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

size_t text_fit(const char *text, int columns) {
    size_t i = 0;
    while (text[i]) {
        unsigned char lead = (unsigned char)text[i];
        columns -= lead >= 0xE0 ? 2 : 1;
        if (columns < 0) break;
        for (i++; ((unsigned char)text[i] & 0xC0) == 0x80;) i++;
    }
    return i;
}

/* Appends a duration: "42 s", "3:07", "2:05:00". */
static void add_duration(struct buf *b, double seconds) {
    int64_t s = (int64_t)(MIN(MAX(seconds, 0.0), 1e15) + 0.5);
    if (s < 60) {
        buf_printf(b, "%d s", (int)s);
    } else if (s < 3600) {
        buf_printf(b, "%d:%02d", (int)(s / 60), (int)(s % 60));
    } else {
        buf_printf(b, "%lld:%02d:%02d", (long long)(s / 3600), (int)(s / 60 % 60), (int)(s % 60));
    }
}

static void add_bar(struct buf *b, double fraction) {
    int n_full = (int)(fraction * BAR_CELLS + 0.5);
    buf_puts(b, " [");
    for (int i = 0; i < BAR_CELLS; i++) buf_puts(b, i < n_full ? "#" : ".");
    buf_puts(b, "]");
}

/* Steps per second since the start; 0: unknown. */
static double progress_rate(const struct progress *p, double seconds) {
    return seconds > 0 ? (double)(p->done - p->before) / seconds : 0;
}

/* Appends a line of progress, "train [####....] 120/400  3.4/s  1:22 left  loss 2.31". Without a
 * total it has no bar and no remaining time. The last line has the duration in place of the
 * remaining time. */
static void add_line(struct buf *b, const struct progress *p, double now, const char *detail,
                     bool bar, bool last) {
    double elapsed = now - p->start, rate = progress_rate(p, elapsed);
    buf_puts(b, p->title);
    if (p->total > 0 && bar) add_bar(b, (double)MIN(p->done, p->total) / (double)p->total);
    buf_printf(b, " %lld", (long long)p->done);
    if (p->total > 0) buf_printf(b, "/%lld", (long long)p->total);
    if (rate > 0) buf_printf(b, rate < 10 ? "  %.2f/s" : "  %.0f/s", rate);
    if (last) {
        buf_puts(b, "  in ");
        add_duration(b, elapsed);
    } else if (p->total > p->done && rate > 0) {
        buf_puts(b, "  ");
        add_duration(b, (double)(p->total - p->done) / rate);
        buf_puts(b, " left");
    }
    if (detail && *detail) buf_printf(b, "  %s", detail);
}

static void progress_draw(struct progress *p, double now, const char *detail, bool last) {
    struct buf b = {0};
    bool terminal = stderr_is_terminal();
    add_line(&b, p, now, detail, terminal, last);
    size_t len = terminal ? text_fit(b.data, terminal_columns() - 1) : b.len;
    b.data[len] = '\0';
    struct buf line = {0};
    log_append_sanitized(&line, b.data);
    fprintf(stderr, "%s%s%s", terminal ? "\r\033[K" : "", line.data ? line.data : "",
            terminal && !last ? "" : "\n");
    fflush(stderr);
    buf_release(&line);
    atomic_store(&progress_line_shown, terminal && !last);
    p->last = now;
    buf_release(&b);
}

static int process_pipe_fd = -1; /* the pipe that SHOAL_PROGRESS names */
static _Thread_local int thread_pipe_fd = -1;
static _Atomic double progress_reported_at;

/* Programs that this process starts get neither the descriptor nor the variable. */
void progress_pipe_open(void) {
    const char *text = getenv("SHOAL_PROGRESS");
    if (!text) return;
    char *end;
    struct stat st;
    long fd = strtol(text, &end, 10);
    if (end != text && !*end && fd > STDERR_FILENO && fd <= INT_MAX && fstat((int)fd, &st) == 0 &&
        S_ISFIFO(st.st_mode) && fcntl((int)fd, F_SETFD, FD_CLOEXEC) == 0)
        process_pipe_fd = (int)fd;
    unsetenv("SHOAL_PROGRESS");
}

void progress_pipe_set(int fd) {
    thread_pipe_fd = fd;
}

static int progress_pipe(void) {
    return thread_pipe_fd >= 0 ? thread_pipe_fd : process_pipe_fd;
}

static char *progress_json(const struct progress *p, double seconds) {
    struct buf title = {0};
    buf_add_sanitized(&title, p->title, text_fit(p->title, 80));
    json_t *v =
        json_pack("{s:s#,s:I,s:I,s:f}", "title", title.data ? title.data : "", (int)title.len,
                  "done", (json_int_t)p->done, "total", (json_int_t)p->total, "seconds", seconds);
    double rate = progress_rate(p, seconds);
    if (rate > 0 && p->total >= p->done)
        json_object_set_new(v, "left", json_real((double)(p->total - p->done) / rate));
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(6));
    CHECK(text != NULL);
    json_decref(v);
    buf_release(&title);
    return text;
}

/* Returns whether the line was written. If the pipe is full, the line is lost; writing never
 * blocks. */
static bool progress_pipe_write(const char *text) {
    struct pollfd pipe = {.fd = progress_pipe(), .events = POLLOUT};
    char *line = xasprintf("%s\n", text);
    bool written =
        poll(&pipe, 1, 0) == 1 && pipe.revents == POLLOUT && write(pipe.fd, line, strlen(line)) > 0;
    free(line);
    return written;
}

/* Writes a line to the pipe, unless any bar wrote one within REPORT_SECONDS. The last line of a bar
 * is written only if the bar's previous write succeeded. */
static void progress_report(struct progress *p, bool last) {
    if (progress_pipe() < 0 || (last && !p->last_report_written)) return;
    double now = clock_now(), last_report = atomic_load(&progress_reported_at);
    if (!last && (now - last_report < REPORT_SECONDS ||
                  !atomic_compare_exchange_strong(&progress_reported_at, &last_report, now)))
        return;
    char *text = progress_json(p, now - p->start);
    p->last_report_written = progress_pipe_write(text);
    free(text);
}

void process_metrics_report(const struct process_metric *v, int n) {
    if (progress_pipe() < 0) return;
    json_t *figures = json_object();
    for (int i = 0; i < n; i++)
        json_object_set_new(figures, v[i].name,
                            isfinite(v[i].value) ? json_real(v[i].value) : json_null());
    json_t *line = json_pack("{s:o}", "figures", figures);
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    json_decref(line);
    progress_pipe_write(text);
    free(text);
}

/* On stderr, not to a log sink. */
static bool progress_is_shown(void) {
    return !log_sink && log_to_stderr && !log_quiet && !log_muted;
}

void progress_start(struct progress *p, const char *title, int64_t total) {
    double now = clock_now();
    *p = (struct progress){.title = title, .start = now, .last = now, .total = total};
    progress_report(p, false);
    if (progress_is_shown() && stderr_is_terminal()) progress_draw(p, now, NULL, false);
}

void progress_resume(struct progress *p, int64_t done) {
    p->done = p->before = done;
}

void progress_update(struct progress *p, int64_t done, const char *detail) {
    p->done = done;
    if (p->total > 0) p->total = MAX(p->total, done); // the total may be an estimate
    progress_report(p, false);
    if (log_sink && log_sink->progress && !log_muted &&
        log_sink->progress(log_sink->ctx, p, detail))
        __atomic_store_n(&log_sink->cancelled, true, __ATOMIC_RELEASE);
    if (!progress_is_shown()) return;
    double now = clock_now();
    if (now - p->last >= (stderr_is_terminal() ? REDRAW_SECONDS : LINE_SECONDS))
        progress_draw(p, now, detail, false);
}

void progress_finish(struct progress *p, const char *detail) {
    progress_report(p, true);
    if (progress_is_shown()) progress_draw(p, clock_now(), detail, true);
}
