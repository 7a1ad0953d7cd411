/*
 * test_scaling: the time of every parser, and of everything that retains what comes from outside,
 * is linear in the size of its input.
 *
 * A row makes an input of a wanted size and runs the code on it. Sizes double from the row's first
 * until its top, or until one run takes STEP_SECONDS and there are LEAST_SIZES. No size may take
 * more than RATIO times as long per byte as a smaller one: code in O(n²) takes eight times as long
 * per byte three sizes on. What counts is processor time, the minimum of the runs of a size; a
 * ratio that is too large is measured again up to TRIES times, so that a busy machine costs time
 * and not a failure. Under sanitizers the sizes are 1/16. SHOAL_SCALING=WORD limits the test to the
 * rows whose names hold the word, and SHOAL_SCALING_SHOW=1 prints the times.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SHRINK = 16 };
#else
enum { SHRINK = 1 };
#endif

enum { SIZES = 16, LEAST_SIZES = 4, TRIES = 8, KB = 1 << 10, MB = 1 << 20 };
/* Below TICK_SECONDS a run is too short to compare. */
static const double STEP_SECONDS = 0.15, SLOW_SECONDS = 20, TICK_SECONDS = 1e-3, RATIO = 3;

static char scratch[256];

/* The input is made once a size; `run` is what is timed. It fails the test by itself when the
 * outcome is not the wanted one. */
struct scale {
    const char *name;
    size_t first, top;
    void (*make)(struct buf *b, size_t size);
    void (*run)(const struct buf *b);
};

/* HEAD UNIT UNIT ... TAIL, without the last byte of the last unit (a comma). */
static void repeat(struct buf *b, const char *head, const char *unit, const char *tail,
                   size_t size) {
    size_t n = strlen(unit);
    struct error err;
    assert_int_equal(buf_reserve(b, size + n + 64, &err), OK);
    buf_puts(b, head);
    while (b->len < size) buf_add(b, unit, n);
    b->len--;
    buf_puts(b, tail);
}

/* The same with a number for the unit's %zu. */
static void count(struct buf *b, const char *head, const char *unit, const char *tail,
                  size_t size) {
    char text[256];
    buf_puts(b, head);
    for (size_t i = 0; b->len < size; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        buf_add(b, text, (size_t)snprintf(text, sizeof(text), unit, i, i));
#pragma GCC diagnostic pop
    }
    b->len--;
    buf_puts(b, tail);
}

static const char *in_scratch(const char *name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", scratch, name);
    return path;
}

/* In the page cache, without the fsync of file_write. */
static const char *file_put(const char *name, const struct buf *b) {
    const char *path = in_scratch(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->len, f), b->len);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* JSON */

static void json_good(const struct buf *b) {
    struct error err;
    json_t *v = json_parse(b->data, b->len, "text", &err);
    if (!v) fail_msg("%s", err.text);
    json_decref(v);
}

static void json_bad(const struct buf *b) {
    struct error err;
    assert_null(json_parse(b->data, b->len, "text", &err));
    assert_int_equal(err.code, ERR_FORMAT);
}

static void numbers(struct buf *b, size_t n) {
    repeat(b, "[", "1,", "]", n);
}
static void numbers_cut(struct buf *b, size_t n) {
    repeat(b, "[", "1,", ",", n);
}
static void texts(struct buf *b, size_t n) {
    repeat(b, "[", "\"the quick brown fox\",", "]", n);
}
static void texts_cut(struct buf *b, size_t n) {
    repeat(b, "{\"a\":[", "\"the quick brown fox\",", "", n);
}
static void lists(struct buf *b, size_t n) {
    repeat(b, "[", "[],", "]", n);
}
static void lists_cut(struct buf *b, size_t n) {
    repeat(b, "[", "[],", "", n);
}
static void objects(struct buf *b, size_t n) {
    repeat(b, "[", "{},", "]", n);
}
static void objects_cut(struct buf *b, size_t n) {
    repeat(b, "[", "{\"a\":{},\"b\":[]},", "x", n);
}
static void members(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":1,", "}", n);
}
static void members_cut(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":[1],", "", n);
}
static void members_twice(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":1,", ",\"0\":1}", n);
}
/* Each list grows its table after its first item, which holds all that is deeper. */
static void deep(struct buf *b, size_t n) {
    for (int i = 0; i < 1000; i++) buf_puts(b, "[");
    repeat(b, "", "1,", "", n / 2);
    for (int i = 0; i < 1000; i++) buf_puts(b, ",0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]");
}
static void long_text(struct buf *b, size_t n) {
    repeat(b, "[\"", "abcdefghijklmnopqrstuvwxyz", "\"]", n);
}
static void long_text_cut(struct buf *b, size_t n) {
    repeat(b, "[\"", "abcdefghijklmnopqrstuvwxyz", "", n);
}
static void escapes(struct buf *b, size_t n) {
    repeat(b, "[\"", "\\n\\u9b5a\\\"", "\"\"]", n);
}
static void brackets(struct buf *b, size_t n) {
    repeat(b, "", "[", "", n);
}

/* JSON files of many values */

static int value_count(void *ctx, const json_t *v, int line, struct error *err) {
    (void)v, (void)line, (void)err;
    ++*(size_t *)ctx;
    return OK;
}

static void each_good(const struct buf *b) {
    struct error err;
    size_t n = 0;
    if (json_each(file_put("each", b), value_count, &n, &err) != OK) fail_msg("%s", err.text);
    assert_true(n > b->len / 64);
}

static void each_bad(const struct buf *b) {
    struct error err;
    size_t n = 0;
    assert_int_equal(json_each(file_put("each", b), value_count, &n, &err), ERR_FORMAT);
}

static void rows(struct buf *b, size_t n) {
    repeat(b, "", "{\"messages\":[{\"role\":\"user\",\"x\":1}]}\n", "\n", n);
}
static void rows_cut(struct buf *b, size_t n) {
    repeat(b, "", "{\"messages\":[{\"role\":\"user\",\"x\":1}]}\n", "{", n);
}
static void rows_listed(struct buf *b, size_t n) {
    repeat(b, "[", "{\"role\":\"user\",\"x\":[\"]\"]},", "]", n);
}

static const struct scale scales[] = {
    {"JSON: numbers", MB / 4, 8 * MB, numbers, json_good},
    {"JSON: numbers, cut", MB / 4, 8 * MB, numbers_cut, json_bad},
    {"JSON: texts", MB, 32 * MB, texts, json_good},
    {"JSON: texts, cut", MB, 32 * MB, texts_cut, json_bad},
    {"JSON: lists", MB / 8, 4 * MB, lists, json_good},
    {"JSON: lists, cut", MB / 8, 4 * MB, lists_cut, json_bad},
    {"JSON: objects", MB / 8, 4 * MB, objects, json_good},
    {"JSON: objects, cut", MB / 8, 4 * MB, objects_cut, json_bad},
    {"JSON: members", MB, 8 * MB, members, json_good},
    {"JSON: members, cut", MB, 8 * MB, members_cut, json_bad},
    {"JSON: a member twice", MB, 8 * MB, members_twice, json_bad},
    {"JSON: deep", MB / 4, 8 * MB, deep, json_good},
    {"JSON: one text", MB, 32 * MB, long_text, json_good},
    {"JSON: one text, cut", MB, 32 * MB, long_text_cut, json_bad},
    {"JSON: escapes", MB, 32 * MB, escapes, json_good},
    {"JSON: brackets", MB, 32 * MB, brackets, json_bad},
    {"JSON lines", MB, 32 * MB, rows, each_good},
    {"JSON lines, cut", MB, 32 * MB, rows_cut, each_bad},
    {"JSON lines in a list", MB, 32 * MB, rows_listed, each_good},
};

/* measuring */

struct point {
    size_t size;
    double seconds; /* the least of the runs */
};

static double clock_used(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void point_run(const struct scale *s, struct point *p) {
    struct buf b = {0};
    s->make(&b, p->size);
    double start = clock_used();
    s->run(&b);
    p->seconds = fmin(p->seconds, clock_used() - start);
    buf_release(&b);
    if (p->seconds > SLOW_SECONDS)
        fail_msg("%s: %zu KB take %.1f s", s->name, p->size / KB, p->seconds);
}

static double per_byte(const struct point *p) {
    return fmax(p->seconds, TICK_SECONDS) / (double)p->size;
}

/* How many times as long a byte takes at the worst size as at the best smaller one. */
static double ratio_of(const struct point *v, int n, int *worst) {
    double least = INFINITY, ratio = 0;
    for (int i = 0; i < n; i++) {
        least = fmin(least, per_byte(&v[i]));
        if (per_byte(&v[i]) / least > ratio) ratio = per_byte(&v[i]) / least, *worst = i;
    }
    return ratio;
}

static int points_run(const struct scale *s, struct point *v) {
    int n = 0;
    for (size_t size = s->first / SHRINK; size <= s->top / SHRINK && n < SIZES; size *= 2) {
        v[n] = (struct point){size, INFINITY};
        point_run(s, &v[n]);
        if (v[n++].seconds > STEP_SECONDS && n >= LEAST_SIZES) break;
    }
    return n;
}

static void points_show(const struct scale *s, const struct point *v, int n, double ratio) {
    printf("%-28s %5.2f:", s->name, ratio);
    for (int i = 0; i < n; i++) printf(" %zuK %.0f", v[i].size / KB, 1e9 * per_byte(&v[i]));
    printf(" ns/byte\n");
}

static void scale_check(const struct scale *s) {
    struct point v[SIZES];
    int n = points_run(s, v), worst = 0;
    double ratio = ratio_of(v, n, &worst);
    for (int i = 0; i < TRIES && ratio > RATIO; i++, ratio = ratio_of(v, n, &worst))
        point_run(s, &v[worst]);
    if (getenv("SHOAL_SCALING_SHOW")) points_show(s, v, n, ratio);
    if (ratio > RATIO)
        fail_msg("%s: a byte takes %.1f ns in %zu KB, %.1f times as long as in a smaller "
                 "input",
                 s->name, 1e9 * per_byte(&v[worst]), v[worst].size / KB, ratio);
}

static void test_scales(void **state) {
    (void)state;
    const char *only = getenv("SHOAL_SCALING");
    for (size_t i = 0; i < ARRAY_LEN(scales); i++)
        if (!only || strstr(scales[i].name, only)) scale_check(&scales[i]);
}

/* The peak of a child's memory over what it had before, or 0 where the system does not say. */
static size_t parse_peak(const struct buf *b) {
    int ends[2];
    size_t peak = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct error err;
        size_t before = process_bytes("VmRSS");
        json_t *v = json_parse(b->data, b->len, "text", &err);
        peak = process_bytes("VmHWM") - before;
        _exit(v && write(ends[1], &peak, sizeof(peak)) == sizeof(peak) ? 0 : 1);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], &peak, sizeof(peak));
    close(ends[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(n, sizeof(peak));
    return peak;
}

/* json_cost is above what parsing takes, and not far above; JSON_COST_MAX is above both. */
static void test_json_memory(void **state) {
    static const struct {
        const char *name, *head, *unit, *tail;
    } texts_of[] = {
        {"numbers", "[", "1,", "]"},
        {"numbers in rows", "[", "[1],", "]"},
        {"empty texts", "[", "\"\",", "]"},
        {"texts", "[", "\"the quick brown fox jumps over\",", "]"},
        {"lists", "[", "[],", "]"},
        {"lists in lists", "[", "[[[[[]]]]],", "]"},
        {"objects", "[", "{},", "]"},
        {"one-letter keys", "[", "{\"a\":1},", "]"},
        {"lists under keys", "[", "{\"a\":[]},", "]"},
        {"objects under keys", "[", "{\"a\":{\"b\":{}}},", "]"},
        {"members", "[", "{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1},", "]"},
        {"one text", "[\"", "abcdefghijklmnopqrstuvwxyz", "\"]"},
        {"nine items", "[", "[1,1,1,1,1,1,1,1,1],", "]"},
    };
    (void)state;
    if (SHRINK > 1 || !process_bytes("VmHWM")) {
        print_message("SKIP memory of JSON: not measured here\n");
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(texts_of); i++) {
        struct buf b = {0};
        repeat(&b, texts_of[i].head, texts_of[i].unit, texts_of[i].tail, 3 * MB);
        size_t peak = parse_peak(&b), cost = json_cost(b.data, b.len);
        if (getenv("SHOAL_SCALING_SHOW"))
            printf("%-28s peak %5.1f, cost %5.1f bytes a byte\n", texts_of[i].name,
                   (double)peak / (double)b.len, (double)cost / (double)b.len);
        if (peak > cost || cost > JSON_COST_MAX * b.len)
            fail_msg("%s: parsing %zu bytes took %zu, json_cost says %zu", texts_of[i].name, b.len,
                     peak, cost);
        buf_release(&b);
    }
    struct buf b = {0};
    members(&b, 3 * MB);
    assert_in_range(parse_peak(&b), MB, json_cost(b.data, b.len));
    buf_release(&b);
}

static int scratch_make(void **state) {
    (void)state;
    snprintf(scratch, sizeof(scratch), "%s/shoal-scaling-XXXXXX",
             access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp");
    return mkdtemp(scratch) ? 0 : -1;
}

static int scratch_remove(void **state) {
    (void)state;
    char *cmd = xasprintf("rm -rf '%s'", scratch);
    int rc = system(cmd);
    free(cmd);
    return rc;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_json_memory),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
