/*
 * test_blackboard: operations of the blackboard. Its state is a function of its log: after every
 * event, in another process, and after kill -9.
 *
 * The clock is a variable of the test. Boards are compared by their debug views, which contain
 * entries, times, priorities and slots, and by the lists of their slots.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include "folder.h"

#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char dir[64], path[96];
static double now;

static double test_clock(void *ctx) {
    (void)ctx;
    return now;
}

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    now = 1000;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-board-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/shoal.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

static struct blackboard *board_of(struct store *s, int64_t until) {
    struct blackboard_options o = {
        .store = s, .name = "話し合い", .clock = test_clock, .until = until};
    struct blackboard *b = blackboard_open(&o, &err);
    if (!b) fail_msg("%s", err.text);
    return b;
}

static struct store *store_at(void) {
    struct store *s = store_open(path, &err);
    if (!s) fail_msg("%s", err.text);
    return s;
}

/* Writes a text and checks the returned entry. */
static void write_text(struct blackboard *b, const char *key, const char *text,
                       const struct blackboard_write_options *w) {
    json_t *v = json_string(text), *back = blackboard_write(b, key, v, w, &err);
    if (!back) fail_msg("%s", err.text);
    assert_string_equal(json_string_value(json_object_get(back, "key")), key);
    assert_true(json_equal(json_object_get(back, "value"), v));
    assert_true(json_is_real(json_object_get(back, "timestamp")));
    json_decref(back);
    json_decref(v);
}

static const char *read_text(const struct blackboard *b, const char *key) {
    return json_string_value(blackboard_read(b, key));
}

/* The whole state of a board as text. */
static char *board_text(const struct blackboard *b) {
    json_t *v = json_pack("[o,o,o]", blackboard_debug_view(b), blackboard_slot_list(b, NULL),
                          blackboard_read_all(b));
    char *text = json_canonical(v);
    json_decref(v);
    return text;
}

static void test_turn(void **state) {
    (void)state;
    char key[BOARD_KEY_LEN];
    struct blackboard *b = board_of(NULL, 0);
    assert_null(blackboard_read(b, BOARD_INPUT));
    write_text(b, BOARD_INPUT, "富士山の高さは？", NULL);
    write_text(b, blackboard_agent_key(0, key), "3776メートルです。", NULL);
    assert_string_equal(key, "agent_0_output");
    write_text(b, blackboard_summary_key(1, key), "两位都说是3776米。", NULL);
    assert_string_equal(key, "summary_1");
    write_text(b, BOARD_CONVERSATION, "前の話", NULL);
    assert_string_equal(read_text(b, "agent_0_output"), "3776メートルです。");
    write_text(b, BOARD_INPUT, "琵琶湖の広さは？", NULL);
    assert_string_equal(read_text(b, BOARD_INPUT), "琵琶湖の広さは？");
    json_t *all = blackboard_read_all(b);
    assert_int_equal(json_object_size(all), 4);
    json_decref(all);
    assert_int_equal(blackboard_clear_current_turn(b, &err), OK);
    assert_null(blackboard_read(b, BOARD_INPUT));
    assert_string_equal(read_text(b, BOARD_CONVERSATION), "前の話");
    json_t *history = blackboard_history(b, BOARD_INPUT, &err);
    assert_int_equal(json_array_size(history), 2);
    assert_string_equal(json_string_value(json_object_get(json_array_get(history, 0), "value")),
                        "富士山の高さは？");
    json_decref(history);
    blackboard_close(b);
}

/* The board copies values: later changes by the caller are not events. */
static void test_values_are_copies(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    json_t *v = json_pack("{s:[i,i]}", "list", 1, 2), *want = json_deep_copy(v);
    json_decref(blackboard_write(b, "k", v, NULL, &err));
    json_object_set_new(v, "later", json_true());
    assert_true(json_equal(blackboard_read(b, "k"), want));
    json_decref(v);
    json_decref(want);
    blackboard_close(b);
}

static void test_several_at_once(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    const char *keys[] = {"b", "none", "a"};
    json_t *values = json_pack("{s:s,s:i,s:n}", "a", "一", "b", 2, "c"), *back;
    assert_int_equal(blackboard_write_multiple(b, values, NULL, &err), OK);
    assert_int_equal(blackboard_last_seq(b), 3);
    back = blackboard_read_multiple(b, keys, 3);
    json_t *want = json_pack("{s:i,s:s}", "b", 2, "a", "一");
    assert_true(json_equal(back, want));
    assert_true(json_is_null(blackboard_read(b, "c")));
    json_decref(back);
    json_decref(want);
    json_object_set_new(values, "", json_true());
    assert_int_equal(blackboard_write_multiple(b, values, NULL, &err), ERR_USAGE);
    assert_int_equal(blackboard_last_seq(b), 3); /* all or none */
    json_decref(values);
    blackboard_close(b);
}

static void test_time_to_live(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    write_text(b, "short", "x", &(struct blackboard_write_options){.ttl = 10});
    write_text(b, "long", "y", NULL);
    now = 1009.5;
    assert_non_null(blackboard_read(b, "short"));
    now = 1010;
    assert_null(blackboard_read(b, "short"));
    json_t *all = blackboard_read_all(b);
    assert_int_equal(json_object_size(all), 1);
    json_decref(all);
    write_text(b, "tick", "t", NULL);
    now = 900; /* a clock that goes back revives no expired entry */
    assert_null(blackboard_read(b, "short"));
    write_text(b, "short", "again", NULL);
    now = 1e9;
    assert_non_null(blackboard_read(b, "short"));
    blackboard_close(b);
}

static void test_priority(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    write_text(b, "low", "1", &(struct blackboard_write_options){.priority = -1});
    write_text(b, "first", "2", NULL);
    write_text(b, "high", "3", &(struct blackboard_write_options){.priority = 5});
    write_text(b, "second", "4", NULL);
    json_t *all = blackboard_read_all(b), *v;
    const char *key, *order[] = {"high", "first", "second", "low"};
    int i = 0;
    json_object_foreach (all, key, v) assert_string_equal(key, order[i++]);
    json_decref(all);
    blackboard_close(b);
}

/* One key more than the limit: expired entries are evicted first, then the lowest priority, then
 * the oldest. */
static void test_full_board(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    char key[32];
    write_text(b, "brief", "x", &(struct blackboard_write_options){.ttl = 1, .priority = 9});
    write_text(b, "oldest", "x", NULL);
    write_text(b, "low", "x", &(struct blackboard_write_options){.priority = -1});
    for (int i = 3; i < BOARD_MAX_KEYS; i++) {
        snprintf(key, sizeof key, "key %d", i);
        write_text(b, key, "v", NULL);
    }
    now += 2;
    write_text(b, "more 1", "v", NULL);
    assert_non_null(blackboard_read(b, "low"));
    write_text(b, "more 2", "v", NULL);
    assert_null(blackboard_read(b, "low"));
    assert_non_null(blackboard_read(b, "oldest"));
    write_text(b, "more 3", "v", NULL);
    assert_null(blackboard_read(b, "oldest"));
    assert_non_null(blackboard_read(b, "key 3"));
    write_text(b, "key 3", "again", NULL); /* replacing an entry evicts none */
    assert_non_null(blackboard_read(b, "key 4"));
    json_t *all = blackboard_read_all(b);
    assert_int_equal(json_object_size(all), BOARD_MAX_KEYS);
    json_decref(all);
    blackboard_close(b);
}

static void test_refusals(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    json_t *v = json_string("x"), *deep = json_null();
    char name[300];
    memset(name, 'k', sizeof name);
    name[sizeof name - 1] = 0;
    assert_null(blackboard_write(b, "", v, NULL, &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_non_null(strstr(err.text, "needs a key of 1 to 256 bytes"));
    assert_null(blackboard_write(b, name, v, NULL, &err));
    assert_null(blackboard_write(b, "a\xff", v, NULL, &err));
    assert_non_null(strstr(err.text, "not UTF-8"));
    for (int i = 0; i < 200; i++) deep = json_pack("[o]", deep);
    assert_null(blackboard_write(b, "deep", deep, NULL, &err));
    assert_non_null(strstr(err.text, "nested deeper"));
    char *large = xcalloc(1, BOARD_MAX_VALUE + 1);
    memset(large, 'x', BOARD_MAX_VALUE);
    json_t *text = json_string(large);
    assert_null(blackboard_write(b, "large", text, NULL, &err));
    assert_non_null(strstr(err.text, "bytes, more than 1048576"));
    assert_int_equal(blackboard_last_seq(b), 0);
    free(large);
    json_decref(text);
    json_decref(deep);
    json_decref(v);
    blackboard_close(b);
}

static void slot_put(struct blackboard *b, const char *slot, const char *text, float x, float y) {
    float v[2] = {x, y};
    json_t *back = blackboard_slot_add(
        b, &(struct blackboard_slot_entry){.slot = slot, .text = text, .embedding = v, .d = 2},
        &err);
    if (!back) fail_msg("%s", err.text);
    assert_int_equal(strlen(json_string_value(json_object_get(back, "entry_id"))), 8);
    json_decref(back);
}

static const char *row_text(const json_t *rows, size_t i) {
    return json_string_value(json_object_get(json_array_get(rows, i), "text"));
}

static void test_slots(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    const float q[2] = {2, 0};
    struct buf context = {0};
    slot_put(b, "critic", "反対です", 1, 1);
    slot_put(b, "critic", "同意", 1, 0);
    slot_put(b, "supporter", "赞成", 3, 0);
    slot_put(b, "supporter", "off", 0, 1);
    json_t *meta = json_pack("{s:i}", "round", 2);
    json_decref(blackboard_slot_add(
        b, &(struct blackboard_slot_entry){.slot = "critic", .text = "no vector", .metadata = meta},
        &err));
    json_t *rows = blackboard_find_similar(b, NULL, q, 2, BOARD_SIMILARITY, 10);
    assert_int_equal(json_array_size(rows), 3);
    assert_string_equal(row_text(rows, 0), "同意"); /* as similar as the next entry, and older */
    assert_string_equal(row_text(rows, 1), "赞成");
    assert_string_equal(row_text(rows, 2), "反対です");
    double last = json_real_value(json_object_get(json_array_get(rows, 2), "similarity"));
    assert_true(last > 0.7071 && last < 0.7072);
    json_decref(rows);
    rows = blackboard_find_similar(b, "supporter", q, 2, -1, 1);
    assert_int_equal(json_array_size(rows), 1);
    assert_string_equal(row_text(rows, 0), "赞成");
    json_decref(rows);
    rows = blackboard_slot_list(b, "critic");
    assert_int_equal(json_array_size(rows), 3);
    assert_true(json_equal(json_object_get(json_array_get(rows, 2), "metadata"), meta));
    json_decref(rows);
    blackboard_slot_context(b, NULL, 1, &context);
    assert_string_equal(context.data, "[critic] no vector\n[supporter] off\n");
    buf_release(&context);
    assert_int_equal(blackboard_clear_current_turn(b, &err), OK);
    rows = blackboard_slot_list(b, NULL);
    assert_int_equal(json_array_size(rows), 0);
    json_decref(rows);
    json_decref(meta);
    blackboard_close(b);
}

static void test_full_slots(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    char text[32];
    for (int i = 0; i < BOARD_SLOT_ENTRIES + 7; i++) {
        snprintf(text, sizeof text, "%d", i);
        slot_put(b, "s", text, 1, (float)i);
    }
    json_t *rows = blackboard_slot_list(b, "s");
    assert_int_equal(json_array_size(rows), BOARD_SLOT_ENTRIES);
    assert_string_equal(row_text(rows, 0), "7");
    json_decref(rows);
    for (int i = 1; i < BOARD_MAX_SLOTS; i++) {
        snprintf(text, sizeof text, "slot %d", i);
        slot_put(b, text, "x", 1, 0);
    }
    assert_null(
        blackboard_slot_add(b, &(struct blackboard_slot_entry){.slot = "one", .text = "x"}, &err));
    assert_int_equal(err.code, ERR_USAGE);
    blackboard_close(b);
}

/* A random event of any kind. */
static void random_event(struct blackboard *b, struct rng *r) {
    static const char *const keys[] = {"input", "意見", "摘要", "conversation_context"};
    uint32_t what = rng_below(r, 10);
    const char *key = keys[rng_below(r, ARRAY_LEN(keys))];
    char text[64];
    now += rng_uniform(r) - 0.2;
    snprintf(text, sizeof text, "値 %u", rng_u32(r));
    if (what == 0)
        assert_int_equal(blackboard_clear_current_turn(b, &err), OK);
    else if (what < 4)
        slot_put(b, key, text, rng_normal(r), rng_normal(r));
    else
        write_text(b, key, text,
                   &(struct blackboard_write_options){.ttl = what < 7 ? rng_uniform(r) : 0,
                                                      .priority = (int)rng_below(r, 3) - 1});
}

/* A replay up to event n gives the board's state after event n. */
static void test_replay(void **state) {
    (void)state;
    enum { N = 600 }; /* more than two pages of the log */
    char *seen[N + 1];
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    struct store *s = store_at();
    struct blackboard *b = board_of(s, 0);
    for (int i = 1; i <= N; i++) {
        random_event(b, &r);
        double later = now;
        now = 0; /* the view at the event's own time */
        seen[i] = board_text(b);
        now = later;
    }
    blackboard_close(b);
    for (int i = 1; i <= N; i += i < N ? MIN(37, N - i) : 1) {
        b = board_of(s, i);
        char *text = board_text(b);
        assert_string_equal(text, seen[i]);
        free(text);
        json_t *v = json_true();
        assert_null(blackboard_write(b, "k", v, NULL, &err));
        assert_int_equal(err.code, ERR_STATE);
        blackboard_close(b);
    }
    for (int i = 1; i <= N; i++) free(seen[i]);
    struct blackboard_options o = {.store = s, .name = "話し合い", .until = N + 1};
    assert_null(blackboard_open(&o, &err));
    assert_int_equal(err.code, ERR_MISSING);
    store_close(s);
}

/* Two boards on one log, as in two processes: both see all events in the same order. */
static void test_two_writers(void **state) {
    (void)state;
    struct store *s1 = store_at(), *s2 = store_at();
    struct blackboard *a = board_of(s1, 0), *b = board_of(s2, 0);
    write_text(a, "k", "from a", NULL);
    write_text(b, "l", "from b", NULL); /* b had not read a's event */
    assert_int_equal(blackboard_last_seq(b), 2);
    assert_string_equal(read_text(b, "k"), "from a");
    assert_null(blackboard_read(a, "l"));
    assert_int_equal(blackboard_refresh(a, &err), OK);
    char *of_a = board_text(a), *of_b = board_text(b);
    assert_string_equal(of_a, of_b);
    free(of_a);
    free(of_b);
    blackboard_close(a);
    blackboard_close(b);
    store_close(s1);
    store_close(s2);
}

/* With any limit, every event is returned once and in order, including events that are no longer in
 * memory. */
static void watch_all(const struct blackboard *b, int limit, int64_t first) {
    int64_t at = first - 1;
    for (;;) {
        json_t *page = blackboard_watch(b, at, limit, &err), *event;
        size_t i;
        assert_non_null(page);
        assert_true(json_array_size(page) <= (size_t)limit);
        if (json_array_size(page) == 0) {
            json_decref(page);
            break;
        }
        json_array_foreach (page, i, event)
            assert_int_equal(json_integer_value(json_object_get(event, "seq")), ++at);
        json_decref(page);
    }
    assert_int_equal(at, blackboard_last_seq(b));
}

static void test_watch(void **state) {
    (void)state;
    struct store *s = store_at();
    struct blackboard *b = board_of(s, 0), *forgetful = board_of(NULL, 0);
    assert_int_equal(store_begin(s, &err), OK);
    for (int i = 0; i < BOARD_MAX_EVENTS + 10; i++) {
        write_text(b, "k", i % 2 ? "一" : "二", NULL);
        write_text(forgetful, "k", "v", NULL);
    }
    assert_int_equal(store_commit(s, &err), OK);
    watch_all(b, 1000, 1);
    watch_all(b, 7, BOARD_MAX_EVENTS - 100);
    json_t *all = blackboard_history(b, "k", &err);
    assert_int_equal(json_array_size(all), BOARD_MAX_EVENTS + 10);
    json_decref(all);
    json_t *page = blackboard_watch(forgetful, 0, 1, &err);
    assert_true(json_integer_value(json_object_get(json_array_get(page, 0), "seq")) > 1);
    json_decref(page);
    blackboard_close(b);
    blackboard_close(forgetful);
    store_close(s);
}

static void test_debug_view(void **state) {
    (void)state;
    struct blackboard *b = board_of(NULL, 0);
    json_t *v = json_pack("{s:o}", "v", json_array());
    for (int i = 0; i < 384; i++)
        json_array_append_new(json_object_get(v, "v"), json_real(i * 0.5));
    json_decref(blackboard_write(b, "input", v, NULL, &err));
    assert_true(json_equal(blackboard_read(b, "input"), v)); /* the stored value is complete */
    char *text = board_text(b);
    assert_non_null(strstr(text, "<Vector shape=(384,)>"));
    free(text);
    struct buf longer = {0};
    for (int i = 0; i < 101; i++) buf_puts(&longer, "漢");
    write_text(b, "long", longer.data, NULL);
    json_t *view = blackboard_debug_view(b);
    const char *shown = json_string_value(
        json_object_get(json_object_get(json_object_get(view, "entries"), "long"), "value"));
    assert_int_equal(strlen(shown), 101 * 3);
    assert_string_equal(shown + 300, "…");
    json_decref(view);
    buf_release(&longer);
    json_decref(v);
    blackboard_close(b);
}

/* A damaged log is refused; the message contains the event's number. */
static void test_damaged_log(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "17",
        "{\"op\": \"write\", \"key\": \"k\", \"value\": 1}",
        "{\"op\": \"write\", \"timestamp\": 1, \"key\": \"\", \"value\": 1}",
        "{\"op\": \"write\", \"timestamp\": 1, \"key\": \"k\"}",
        "{\"op\": \"write\", \"timestamp\": 1, \"key\": \"k\", \"value\": 1, \"ttl\": 1e300}",
        "{\"op\": \"slot\", \"timestamp\": 1, \"slot\": \"s\"}",
        "{\"op\": \"slot\", \"timestamp\": 1, \"slot\": \"s\", \"text\": \"\", \"embedding\": 1}",
        "{\"op\": \"slot\", \"timestamp\": 1, \"slot\": \"s\", \"text\": \"\", \"embedding\": "
        "\"AAA=\"}",
        "{\"op\": \"clear\", \"timestamp\": 1, \"keep\": [1]}",
        "{\"op\": \"fly\", \"timestamp\": 1}",
    };
    struct store *s = store_at();
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        char name[16];
        snprintf(name, sizeof name, "log %zu", i);
        json_t *events = json_pack("[{s:s,s:i,s:s,s:i},o]", "op", "write", "timestamp", 1, "key",
                                   "k", "value", 1, json_loads(wrong[i], JSON_DECODE_ANY, NULL));
        assert_int_equal(store_log_append(s, name, 1, events, &err), OK);
        struct blackboard_options o = {.store = s, .name = name};
        if (blackboard_open(&o, &err)) fail_msg("accepted: %s", wrong[i]);
        assert_int_equal(err.code, ERR_FORMAT);
        assert_non_null(strstr(err.text, "event 2"));
        json_decref(events);
    }
    store_close(s);
}

/* A child writes pairs until it is killed: afterwards every pair is complete and the numbers have
 * no gap. */
static void test_kill(void **state) {
    (void)state;
    for (int delay = 2; delay <= 40; delay += 19) {
        int ready[2];
        assert_int_equal(pipe(ready), 0);
        pid_t child = fork();
        if (child == 0) {
            struct blackboard *b = board_of(store_at(), 0);
            for (int i = 0;; i++) {
                json_t *v = json_pack("{s:i,s:i}", "左", i, "右", i);
                if (blackboard_write_multiple(b, v, NULL, &err) != OK) _exit(3);
                json_decref(v);
                if (i == 0 && write(ready[1], "x", 1) != 1) _exit(4);
            }
        }
        char c;
        assert_int_equal(read(ready[0], &c, 1), 1);
        usleep((useconds_t)delay * 1000);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        close(ready[0]);
        close(ready[1]);
        struct store *s = store_at();
        struct blackboard *b = board_of(s, 0);
        assert_true(blackboard_last_seq(b) >= 2 && blackboard_last_seq(b) % 2 == 0);
        assert_true(json_equal(blackboard_read(b, "左"), blackboard_read(b, "右")));
        watch_all(b, 100, 1);
        write_text(b, "after", "生きている", NULL);
        write_text(b, "after", "二", NULL);
        blackboard_close(b);
        store_close(s);
    }
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_turn),
        TEST(test_values_are_copies),
        TEST(test_several_at_once),
        TEST(test_time_to_live),
        TEST(test_priority),
        TEST(test_full_board),
        TEST(test_refusals),
        TEST(test_slots),
        TEST(test_full_slots),
        TEST(test_replay),
        TEST(test_two_writers),
        TEST(test_watch),
        TEST(test_debug_view),
        TEST(test_damaged_log),
        TEST(test_kill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
