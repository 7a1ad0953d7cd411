/*
 * test_conversation: conversations in a store: two processes that continue one conversation and are
 * killed, the history of exchanges, search, titles, deletion, and documents of version 0.1.
 */
/* levels: once */
#define _GNU_SOURCE
#include "folder.h"
#include "memory/internal.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char dir[64], db[96];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-conversation-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(db, sizeof db, "%s/c.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

static struct store *open_store(void) {
    struct store *s = store_open(db, &err);
    if (!s) fail_msg("%s", err.text);
    return s;
}

static struct conversation *open_ok(struct store *s, const char *id) {
    struct conversation *c = conversation_open(s, id, &err);
    if (!c) fail_msg("%s", err.text);
    return c;
}

static void add_ok(struct conversation *c, const char *user, const struct summarizer *s) {
    if (conversation_add(c, user, "reply", s, &err) != OK) fail_msg("%s", err.text);
}

static json_t *history_ok(struct store *s, const char *id, int64_t after, int64_t limit) {
    json_t *list = conversation_history(s, id, after, limit, &err);
    if (!list) fail_msg("%s", err.text);
    return list;
}

static const char *user_at(const json_t *list, size_t i) {
    return json_get_string(json_array_get(list, i), "user");
}

static int64_t number_at(const json_t *list, size_t i) {
    return json_integer_value(json_object_get(json_array_get(list, i), "number"));
}

/* The summary is a list of the first words of the exchanges: "1 2 3 ". */
static int words_summarize(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                           struct error *e) {
    (void)ctx;
    (void)e;
    buf_puts(out, previous);
    for (const char *p = exchanges; (p = strstr(p, "User: ")); p++)
        buf_printf(out, "%.*s ", (int)strcspn(p + 6, " \n"), p + 6);
    return OK;
}

static const struct summarizer words = {NULL, words_summarize};

/* two processes, which are killed */

enum { WRITERS = 2, TURNS = 50, KILLS = 20 };

struct writer {
    pid_t pid; /* 0: all turns are added */
    int fd;    /* a byte to it starts a turn, a byte from it says that the turn is added */
    int added; /* turns */
};

/* Adds turns "W.0" to "W.49", from `first` on. */
static bool turns_written(int w, int first, int fd) {
    struct store *s = store_open(db, &err);
    struct conversation *c = s ? conversation_open(s, "me", &err) : NULL;
    char byte;
    if (!c) return false;
    for (int t = first; t < TURNS && read(fd, &byte, 1) == 1; t++) {
        char user[32];
        snprintf(user, sizeof user, "%d.%d", w, t);
        if (conversation_add(c, user, "reply", &words, &err) != OK) return false;
        if (write(fd, &byte, 1) != 1) _exit(1);
    }
    return true;
}

static void writer_start(struct writer *v, int w) {
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    v->pid = fork();
    if (v->pid == 0) {
        close(ends[0]);
        if (turns_written(w, v->added, ends[1])) _exit(0);
        print_error("writer %d: %s\n", w, err.text);
        _exit(1);
    }
    close(ends[1]);
    v->fd = ends[0];
}

static void writer_end(struct writer *v) {
    char byte;
    if (read(v->fd, &byte, 1) == 1) v->added++; /* it finished a turn before it was killed */
    close(v->fd);
    assert_int_equal(waitpid(v->pid, NULL, 0), v->pid);
    v->pid = 0;
}

/* Both writers add a turn at the same time. One of them may be killed meanwhile. */
static void turn_run(struct writer v[WRITERS], int killed, unsigned after_us) {
    for (int w = 0; w < WRITERS; w++)
        if (v[w].pid) assert_int_equal(write(v[w].fd, "", 1), 1);
    usleep(after_us);
    if (killed >= 0) {
        kill(v[killed].pid, SIGKILL);
        writer_end(&v[killed]);
        if (v[killed].added < TURNS) writer_start(&v[killed], killed);
    }
    for (int w = 0; w < WRITERS; w++) {
        char byte;
        if (!v[w].pid || w == killed) continue;
        assert_int_equal(read(v[w].fd, &byte, 1), 1);
        if (++v[w].added == TURNS) writer_end(&v[w]);
    }
}

static void writers_run(struct writer v[WRITERS]) {
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    int kills = 0;
    for (int w = 0; w < WRITERS; w++) writer_start(&v[w], w);
    while (v[0].pid || v[1].pid) {
        int victim = (int)rng_below(&r, WRITERS);
        bool kill_it = kills < KILLS && v[victim].pid;
        turn_run(v, kill_it ? victim : -1, rng_below(&r, 400));
        kills += kill_it;
    }
    assert_int_equal(kills, KILLS);
}

/* Nothing is lost: every turn that was added is in the history; a turn during which its process was
 * killed may be there twice, because it was added again. */
static void test_two_processes(void **state) {
    (void)state;
    struct writer v[WRITERS] = {0};
    int count[WRITERS][TURNS] = {0}, last[WRITERS] = {0}, twice = 0;
    writers_run(v);
    struct store *s = open_store();
    struct conversation *c = open_ok(s, "me");
    json_t *all = history_ok(s, "me", 0, 1000), *exchanges;
    for (size_t i = 0; i < json_array_size(all); i++) {
        int w, t;
        assert_int_equal(sscanf(user_at(all, i), "%d.%d", &w, &t), 2);
        assert_int_equal(number_at(all, i), i + 1);
        assert_true(t >= last[w]);
        last[w] = t;
        twice += count[w][t]++ > 0;
    }
    for (int w = 0; w < WRITERS; w++)
        for (int t = 0; t < TURNS; t++)
            if (!count[w][t]) fail_msg("turn %d.%d is lost", w, t);
    assert_true(twice <= KILLS);
    /* Summary and exchanges of the memory together are the history. */
    exchanges = json_object_get(conversation_state(c), "exchanges");
    struct buf text = {0};
    const char *summary = json_get_string(conversation_state(c), "summary");
    size_t n = json_array_size(exchanges), older = json_array_size(all) - n;
    assert_true(n >= CONVERSATION_MAX_EXCHANGES / 2 && n <= CONVERSATION_MAX_EXCHANGES);
    for (size_t i = 0; i < older; i++) buf_printf(&text, "%s ", user_at(all, i));
    assert_string_equal(summary, text.data);
    for (size_t i = 0; i < n; i++)
        assert_string_equal(user_at(exchanges, i), user_at(all, older + i));
    buf_release(&text);
    json_decref(all);
    conversation_close(c);
    store_close(s);
}

/* While one process summarises, the other one adds exchanges, and summarises too. */
struct rival {
    struct conversation *c;
    int n; /* exchanges that it still adds */
};

static int rival_summarize(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                           struct error *e) {
    struct rival *r = ctx;
    for (; r->n > 0; r->n--) add_ok(r->c, "rival", &words);
    return words_summarize(NULL, previous, exchanges, out, e);
}

static void test_summaries_at_once(void **state) {
    (void)state;
    struct store *s[2] = {open_store(), open_store()};
    struct conversation *c[2] = {open_ok(s[0], "me"), open_ok(s[1], "me")};
    for (int i = 1; i <= CONVERSATION_MAX_EXCHANGES; i++) {
        char user[16];
        snprintf(user, sizeof user, "%d", i);
        add_ok(c[0], user, &words);
    }
    assert_int_equal(conversation_refresh(c[1], &err), OK);
    struct rival rival = {c[1], 5}; /* its first one removes five exchanges, then there are ten */
    const struct summarizer slow = {&rival, rival_summarize};
    add_ok(c[0], "11", &slow);
    const json_t *v = conversation_state(c[0]);
    assert_string_equal(json_get_string(v, "summary"), "1 2 3 4 5 6 7 8 9 10 ");
    assert_int_equal(json_array_size(json_object_get(v, "exchanges")), 6);
    assert_int_equal(json_integer_value(json_object_get(v, "last")), 16);
    for (int i = 0; i < 2; i++) {
        conversation_close(c[i]);
        store_close(s[i]);
    }
}

static void test_history(void **state) {
    (void)state;
    struct store *s = open_store();
    struct conversation *c = open_ok(s, "me");
    size_t size = CONVERSATION_MAX_TEXT + 100;
    char *longest = xcalloc(1, size + 1);
    memset(longest, 'x', size);
    assert_null(conversation_history(s, "me", 0, 1, &err));
    assert_int_equal(err.code, ERR_MISSING);
    add_ok(c, longest, NULL);
    for (int i = 2; i <= 30; i++) {
        char user[16];
        snprintf(user, sizeof user, "%d", i);
        add_ok(c, user, NULL);
    }
    json_t *list = history_ok(s, "me", 0, 1);
    assert_string_equal(user_at(list, 0), longest); /* word for word */
    json_decref(list);
    list = history_ok(s, "me", 27, 2);
    assert_int_equal(json_array_size(list), 2);
    assert_string_equal(user_at(list, 0), "28");
    assert_int_equal(number_at(list, 1), 29);
    assert_string_equal(json_get_string(json_array_get(list, 0), "assistant"), "reply");
    assert_int_equal(strlen(json_get_string(json_array_get(list, 0), "at")), 20);
    json_decref(list);
    /* Clearing removes everything; the numbers continue. */
    assert_int_equal(conversation_clear(c, &err), OK);
    list = history_ok(s, "me", 0, 100);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    add_ok(c, "new", NULL);
    list = history_ok(s, "me", 0, 100);
    assert_int_equal(json_array_size(list), 1);
    assert_int_equal(number_at(list, 0), 31);
    json_decref(list);
    free(longest);
    conversation_close(c);
    store_close(s);
}

static void test_import(void **state) {
    (void)state;
    static const char *const wrong[] = {"{}",
                                        "[]",
                                        "3",
                                        "{\"user\": \"a\"}",
                                        "{\"user\": \"a\", \"assistant\": 3}",
                                        "{\"user\": \"a\", \"assistant\": \"b\", \"at\": 3}"};
    struct store *s = open_store();
    struct conversation *c = open_ok(s, "a"), *copy = open_ok(s, "b");
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        json_t *v = json_loads(wrong[i], JSON_DECODE_ANY, NULL);
        assert_int_equal(conversation_import(copy, v, &err), ERR_FORMAT);
        json_decref(v);
    }
    for (int i = 0; i < 12; i++) add_ok(c, "山 \"quoted\"\n", NULL);
    json_t *all = history_ok(s, "a", 0, 100), *v;
    size_t i;
    json_array_foreach (all, i, v) assert_int_equal(conversation_import(copy, v, &err), OK);
    json_t *copied = history_ok(s, "b", 0, 100);
    assert_true(json_equal(all, copied));
    json_decref(all);
    json_decref(copied);
    conversation_close(c);
    conversation_close(copy);
    store_close(s);
}

static const char *entry_text(const json_t *list, size_t i, const char *key) {
    return json_get_string(json_array_get(list, i), key);
}

static void test_list(void **state) {
    (void)state;
    struct store *s = open_store();
    static const char *const ids[] = {"k1/会話", "k1/other", "k2/会話"};
    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        struct conversation *c = open_ok(s, ids[i]);
        json_t *v = json_pack(
            "{s:s,s:s,s:s}", "at", i == 1 ? "2026-01-02T00:00:00Z" : "2026-01-01T00:00:00Z", "user",
            i == 1 ? "Ｆｕｊｉ is high\nand far" : "富士山の高さは？", "assistant", "3776 m");
        assert_int_equal(conversation_import(c, v, &err), OK);
        json_decref(v);
        conversation_close(c);
    }
    json_t *list = conversation_list(s, "k1/", &err);
    assert_int_equal(json_array_size(list), 2);
    assert_string_equal(entry_text(list, 0, "id"), "k1/other"); /* the newest one */
    assert_string_equal(entry_text(list, 0, "title"), "Ｆｕｊｉ is high…");
    assert_string_equal(entry_text(list, 1, "title"), "富士山の高さは？");
    assert_int_equal(json_integer_value(json_object_get(json_array_get(list, 0), "exchanges")), 1);
    json_decref(list);

    list = conversation_search(s, "k1/", "fUJI", 10, &err);
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(entry_text(list, 0, "id"), "k1/other");
    json_decref(list);
    list = conversation_search(s, "", "3776", 2, &err); /* in replies too, at most two */
    assert_int_equal(json_array_size(list), 2);
    json_decref(list);

    assert_int_equal(conversation_rename(s, "k1/会話", "mountains", &err), OK);
    assert_int_equal(conversation_rename(s, "k1/none", "x", &err), ERR_MISSING);
    assert_int_equal(conversation_rename(s, "k1/会話", "\xff", &err), ERR_USAGE);
    list = conversation_list(s, "k1/会", &err);
    assert_string_equal(entry_text(list, 0, "title"), "mountains");
    json_decref(list);
    assert_int_equal(conversation_rename(s, "k1/会話", "", &err), OK);

    assert_int_equal(conversation_delete(s, "k1/会話", &err), OK);
    assert_int_equal(conversation_delete(s, "k1/会話", &err), ERR_MISSING);
    list = conversation_search(s, "", "富士", 10, &err);
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(entry_text(list, 0, "id"), "k2/会話");
    json_decref(list);
    store_close(s);
}

/* A document without a log: its exchanges become the log with the first change. */
static void test_old_document(void **state) {
    (void)state;
    struct store *s = open_store();
    json_t *old =
        json_pack("{s:[{s:s,s:s},{s:s,s:s}],s:s,s:{s:s}}", "exchanges", "user", "one", "assistant",
                  "1", "user", "two", "assistant", "2", "summary", "zero", "facts", "名前", "Ann");
    assert_int_equal(store_document_put(s, CONVERSATION_KIND, "me", old, &err), OK);
    json_t *list = conversation_list(s, "", &err);
    assert_string_equal(entry_text(list, 0, "title"), "one");
    assert_int_equal(json_integer_value(json_object_get(json_array_get(list, 0), "exchanges")), 2);
    json_decref(list);
    list = history_ok(s, "me", 0, 10);
    assert_int_equal(number_at(list, 1), 2);
    json_decref(list);
    struct conversation *c = open_ok(s, "me");
    add_ok(c, "three", NULL);
    list = history_ok(s, "me", 0, 10);
    assert_int_equal(json_array_size(list), 3);
    assert_string_equal(user_at(list, 0), "one");
    assert_string_equal(user_at(list, 2), "three");
    assert_int_equal(number_at(list, 2), 3);
    assert_string_equal(json_get_string(conversation_state(c), "summary"), "zero");
    json_decref(list);
    json_decref(old);
    conversation_close(c);
    store_close(s);
}

/* An error leaves store and memory as they were. */
static void test_errors(void **state) {
    (void)state;
    struct store *s = open_store();
    struct conversation *c = open_ok(s, "me");
    json_t *wrong = json_pack("{s:[s],s:i}", "likes", "tea", "name", 3);
    add_ok(c, "one", NULL);
    assert_int_equal(conversation_merge_facts(c, wrong, &err), ERR_FORMAT);
    assert_int_equal(json_object_size(json_object_get(conversation_state(c), "facts")), 0);
    assert_int_equal(conversation_add(c, "\xff", "", NULL, &err), ERR_USAGE);
    assert_int_equal(conversation_refresh(c, &err), OK);
    assert_int_equal(json_object_size(json_object_get(conversation_state(c), "facts")), 0);
    json_t *list = history_ok(s, "me", 0, 10);
    assert_int_equal(json_array_size(list), 1);
    json_decref(list);
    json_decref(wrong);
    conversation_close(c);
    store_close(s);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_two_processes), TEST(test_summaries_at_once),
        TEST(test_history),       TEST(test_import),
        TEST(test_list),          TEST(test_old_document),
        TEST(test_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
