/*
 * test_agent_tools: the list of tools and every built-in tool, with ordinary, wrong and hostile
 * arguments and results: escapes from the folder, programs that reach for the network, endless
 * output, hosts that are not allowed, and redirects to them.
 *
 * The web server is a process of this test. Tests of programs need the sandbox, and are skipped
 * with the reason without one.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "hub/hub.h"
#include "hub/internal.h"
#include "sandbox/sandbox.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unistr.h>

#include <cmocka.h>

static struct error err;
static char folder[] = "/tmp/shoal-test-agent-XXXXXX";
static char *root; /* FOLDER/root; the tools must not read other files of FOLDER */

/* helpers */

static char *write_file(const char *name, const void *data, size_t len) {
    char *path = path_join(folder, name);
    if (file_write(path, data, len, &err) != OK) fail_msg("%s", err.text);
    return path;
}

static void write_text(const char *name, const char *text) {
    free(write_file(name, text, strlen(text)));
}

static struct agent_tools tools_with(const char *list, const struct agent_tool_options *o) {
    struct agent_tools t = {0};
    if (agent_tools_add_builtin(&t, list, o, &err) != OK) fail_msg("%s: %s", list, err.text);
    return t;
}

/* Calls a tool and releases the arguments; the result is malloc'ed. */
static char *call_json(const struct agent_tools *t, const char *name, bool succeeds, json_t *v) {
    struct buf out = {0};
    int i = agent_tools_find(t, name);
    assert_true(i >= 0);
    if (agent_tool_call(&t->v[i], v, &out) != succeeds) fail_msg("%s: %.2000s", name, out.data);
    assert_true(out.len > 0 && out.len <= AGENT_MAX_RESULT);
    assert_null(u8_check((const uint8_t *)out.data, out.len));
    json_decref(v);
    return out.data;
}

/* The arguments are one text; key NULL: none. */
static char *call(const struct agent_tools *t, const char *name, bool succeeds, const char *key,
                  const char *text) {
    return call_json(t, name, succeeds, key ? json_pack("{s:s}", key, text) : json_object());
}

static void assert_result(const struct agent_tools *t, const char *name, const char *key,
                          const char *text, const char *expected) {
    char *got = call(t, name, true, key, text);
    assert_string_equal(got, expected);
    free(got);
}

/* `part` is a part of the result. */
static void assert_part(const struct agent_tools *t, const char *name, bool succeeds,
                        const char *key, const char *text, const char *part) {
    char *got = call(t, name, succeeds, key, text);
    if (!strstr(got, part)) fail_msg("%s %s: %.2000s", name, text, got);
    free(got);
}

static bool have_sandbox(void) {
    struct error why;
    if (sandbox_available(&why) == OK) return true;
    print_message("# skipped: %s\n", why.text);
    return false;
}

/* the web server */

static uint16_t port;
static pid_t server;

static void respond(int fd, const char *status, const char *headers, const char *body, size_t len) {
    dprintf(fd, "HTTP/1.1 %s\r\n%sContent-Length: %zu\r\nConnection: close\r\n\r\n", status,
            headers, len);
    for (ssize_t n; len && (n = write(fd, body, len)) > 0; body += n) len -= (size_t)n;
}

/* A page whose whole answer is a table row, or one of the redirects. */
static void serve_one(int fd) {
    static const struct {
        const char *path, *status, *headers, *body;
    } pages[] = {
        {"/text", "200 OK", "Content-Type: text/plain; charset=utf-8\r\n", "豆腐は三百円です。"},
        {"/html", "200 OK", "Content-Type: text/HTML\r\n",
         "<title>豆腐店</title><script>x()</script><p>营业时间 <b>9–17</b></p>"},
        {"/json", "200 OK", "Content-Type: application/json\r\n", "{\"a\": 1}"},
        {"/image", "200 OK", "Content-Type: image/png\r\n", "PNG"},
        {"/untyped", "200 OK", "", "text"},
        {"/latin", "200 OK", "Content-Type: text/plain\r\n", "caf\xe9"},
        {"/%E8%B1%86%E8%85%90", "200 OK", "Content-Type: text/plain\r\n", "found"},
        {"/missing", "404 Not Found", "Content-Type: text/plain\r\n", "secret"},
        {"/to-other", "302 Found", "Location: http://other.example/\r\n", ""},
        {"/to-file", "302 Found", "Location: file:///etc/passwd\r\n", ""},
        {"/loop", "302 Found", "Location: /loop\r\n", ""},
        {"/relative", "301 Moved", "Location: text\r\n", ""},
    };
    char request[4096], path[512] = "", location[128];
    ssize_t n = read(fd, request, sizeof request - 1);
    request[MAX(n, 0)] = '\0';
    sscanf(request, "GET %511s", path);
    for (size_t i = 0; i < ARRAY_LEN(pages); i++)
        if (strcasecmp(pages[i].path, path) == 0) // hexadecimal digits
            respond(fd, pages[i].status, pages[i].headers, pages[i].body, strlen(pages[i].body));
    snprintf(location, sizeof location, "Location: http://a.localhost:%d/text\r\n", port);
    if (strcmp(path, "/to-name") == 0) respond(fd, "302 Found", location, "", 0);
    if (strcmp(path, "/headers") == 0)
        respond(fd, "200 OK", "Content-Type: text/plain\r\n", request, strlen(request));
    if (strcmp(path, "/endless") == 0) {
        dprintf(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n");
        while (write(fd, "豆腐豆腐豆腐豆腐", 24) > 0) continue;
    }
    if (strcmp(path, "/silent") == 0) sleep(20);
}

static void server_start(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 16) ||
        getsockname(fd, (struct sockaddr *)&a, &len))
        fail_msg("no port for the server");
    port = ntohs(a.sin_port);
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGPIPE, SIG_IGN);
        for (int c; (c = accept(fd, NULL, NULL)) >= 0; close(c)) serve_one(c);
        _exit(1);
    }
    close(fd);
}

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    if (!mkdtemp(folder)) return -1;
    root = path_join(folder, "root");
    mkdir(root, 0700);
    server_start();
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kill(server, SIGKILL);
    tree_delete(folder);
    free(root);
    return 0;
}

/* the list */

static int echo_call(void *ctx, const json_t *arguments, struct buf *out, struct error *e) {
    const struct buf *text = ctx;
    (void)arguments;
    if (text->data) buf_add(out, text->data, text->len);
    return text->cap == 1 ? error_set(e, ERR_STATE, "it\afails\xff") : OK;
}

static int n_released;
static void echo_release(void *ctx) {
    (void)ctx;
    n_released++;
}

static int add_echo(struct agent_tools *t, const char *name, const char *schema, void *ctx) {
    const struct agent_tool tool = {.name = xstrdup(name),
                                    .description = xstrdup("Repeats a text."),
                                    .parameters = json_loads(schema, JSON_DECODE_ANY, NULL),
                                    .call = echo_call,
                                    .release = echo_release,
                                    .ctx = ctx};
    return agent_tools_add(t, &tool, &err);
}

#define NO_ARGUMENTS "{\"type\": \"object\"}"

static void test_list(void **state) {
    (void)state;
    static const struct {
        const char *name, *schema;
        int code;
    } wrong[] = {
        {"", NO_ARGUMENTS, ERR_USAGE},
        {"a b", NO_ARGUMENTS, ERR_USAGE},
        {"豆腐", NO_ARGUMENTS, ERR_USAGE},
        {"a\"}", NO_ARGUMENTS, ERR_USAGE},
        {"echo", NO_ARGUMENTS, ERR_USAGE},
        {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", NO_ARGUMENTS,
         ERR_USAGE},
        {"b", "[]", ERR_FORMAT},
        {"b", "null", ERR_FORMAT},
        {"b", "{}", ERR_FORMAT},
        {"b", "{\"type\": \"string\"}", ERR_FORMAT},
        {"b", "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"colour\"}}}",
         ERR_FORMAT},
    };
    struct agent_tools t = {0};
    n_released = 0;
    assert_int_equal(add_echo(&t, "echo", NO_ARGUMENTS, NULL), OK);
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        if (add_echo(&t, wrong[i].name, wrong[i].schema, NULL) != wrong[i].code)
            fail_msg("'%s' %s: %s", wrong[i].name, wrong[i].schema, err.text);
        assert_int_equal(n_released, i + 1);
    }
    assert_int_equal(t.n, 1);
    for (int i = 1; i < AGENT_MAX_TOOLS; i++) {
        char name[16];
        snprintf(name, sizeof name, "t-%d", i);
        assert_int_equal(add_echo(&t, name, NO_ARGUMENTS, NULL), OK);
    }
    assert_int_equal(add_echo(&t, "more", NO_ARGUMENTS, NULL), ERR_USAGE);
    assert_int_equal(agent_tools_find(&t, "echo"), 0);
    assert_int_equal(agent_tools_find(&t, "t-63"), 63);
    assert_int_equal(agent_tools_find(&t, "Echo"), -1);
    n_released = 0;
    agent_tools_release(&t);
    assert_int_equal(n_released, AGENT_MAX_TOOLS);
    assert_int_equal(agent_tools_find(&t, "echo"), -1);
}

static void test_json(void **state) {
    (void)state;
    struct agent_tools t = {0};
    assert_int_equal(add_echo(&t, "echo", NO_ARGUMENTS, NULL), OK);
    json_t *v = agent_tools_json(&t);
    char *text = json_canonical(v);
    assert_string_equal(text, "[{\"function\":{\"description\":\"Repeats a text.\",\"name\":"
                              "\"echo\",\"parameters\":{\"type\":\"object\"}},"
                              "\"type\":\"function\"}]");
    free(text);
    json_decref(v);
    agent_tools_release(&t);
}

/* results */

static void assert_echo(const char *text, size_t len, bool fails, const char *expected) {
    struct agent_tools t = {0};
    struct buf b = {.data = (char *)(uintptr_t)text, .len = len, .cap = fails};
    assert_int_equal(add_echo(&t, "echo", NO_ARGUMENTS, &b), OK);
    char *got = call(&t, "echo", !fails, NULL, NULL);
    assert_string_equal(got, expected);
    free(got);
    agent_tools_release(&t);
}

static void test_results(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t len;
        const char *clean;
    } cases[] = {
        {"豆腐\n三百円\tです", 23, "豆腐\n三百円\tです"},
        {"\x1b[31mred\x7f\r\n\0b", 13, "[31mred\nb"},
        {"\xc2\x85"
         "a\xc2\x9b"
         "b",
         6, "ab"},                                                     // C1 control characters
        {"a\xff\xe8\xb1", 4, "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, // an incomplete character
        {"\xed\xa0\x80", 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},   // a surrogate
        {"\xc0\xaf", 2, "\xef\xbf\xbd\xef\xbf\xbd"},                   // an overlong '/'
        {"", 0, "(no output)"},
        {"\x01\x02", 2, "(no output)"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        assert_echo(cases[i].text, cases[i].len, false, cases[i].clean);
    assert_echo("before", 6, true, "before\nerror: itfails\xef\xbf\xbd");
    assert_echo("before\n", 7, true, "before\nerror: itfails\xef\xbf\xbd");
    assert_echo(NULL, 0, true, "error: itfails\xef\xbf\xbd");
}

/* 10 MB of characters of three bytes, after `shift` bytes so that the limit falls into one. */
static void assert_cut(size_t shift, bool fails) {
    struct agent_tools t = {0};
    struct buf b = {0};
    for (size_t i = 0; i < shift; i++) buf_puts(&b, "a");
    while (b.len < 10000000) buf_puts(&b, "豆");
    size_t cap = b.cap;
    b.cap = fails;
    assert_int_equal(add_echo(&t, "echo", NO_ARGUMENTS, &b), OK);
    char *got = call(&t, "echo", !fails, NULL, NULL);
    assert_null(u8_check((const uint8_t *)got, strlen(got)));
    assert_true(strlen(got) > AGENT_MAX_RESULT - 64);
    assert_true(
        text_ends_with(got, fails ? "豆\n… (cut)\nerror: itfails\xef\xbf\xbd" : "豆\n… (cut)"));
    free(got);
    b.cap = cap;
    buf_release(&b);
    agent_tools_release(&t);
}

static void test_cut(void **state) {
    (void)state;
    for (size_t shift = 0; shift < 3; shift++) {
        assert_cut(shift, false);
        assert_cut(shift, true);
    }
    char *full = xmalloc(AGENT_MAX_RESULT + 1);
    memset(full, 'a', AGENT_MAX_RESULT);
    full[AGENT_MAX_RESULT] = '\0';
    assert_echo(full, AGENT_MAX_RESULT, false, full);
    free(full);
}

static void test_arguments(void **state) {
    (void)state;
    struct agent_tools t = {0};
    struct buf text = {.data = (char *)(uintptr_t) "x", .len = 1};
    assert_int_equal(add_echo(&t, "echo", NO_ARGUMENTS, &text), OK);
    char *got = call_json(&t, "echo", false, json_pack("[s]", "x"));
    assert_string_equal(got, "error: the arguments must be a JSON object");
    free(got);
    struct buf out = {0};
    buf_puts(&out, "kept ");
    assert_false(agent_tool_call(&t.v[0], NULL, &out));
    assert_string_equal(out.data, "kept error: the arguments must be a JSON object");
    buf_release(&out);
    agent_tools_release(&t);
}

/* the built-in tools */

static void test_builtin_list(void **state) {
    (void)state;
    static const struct {
        const char *list, *why;
    } wrong[] = {
        {"clock,abacus", "there is no tool 'abacus'; there are calculator, clock, knowledge, "
                         "memory_search, memory_write, ask, debate, read_file, list_files, python, "
                         "sh, check_code, http_get"},
        {"", "there is no tool ''"},
        {"clock,", "there is no tool ''"},
        {"clock, clock", "there are two tools 'clock'"},
        {"knowledge", "'knowledge' needs --knowledge DB"},
        {"memory_search", "'memory_search' needs --memory DB"},
        {"memory_write", "'memory_write' needs --memory DB"},
        {"ask", "'ask' needs --team FILE"},
        {"read_file", "'read_file' needs --root DIR"},
        {"list_files", "'list_files' needs --root DIR"},
        {"http_get", "'http_get' needs --allow-host HOST"},
    };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        struct agent_tools t = {0};
        int rc = agent_tools_add_builtin(&t, wrong[i].list, &(struct agent_tool_options){0}, &err);
        if (rc != ERR_USAGE || !strstr(err.text, wrong[i].why))
            fail_msg("'%s': %d %s", wrong[i].list, rc, err.text);
        agent_tools_release(&t);
    }
    struct agent_tools t = {0};
    const struct agent_tool_options o = {.root = "/no/such", .knowledge = "/no/such.db"};
    assert_int_equal(agent_tools_add_builtin(&t, "read_file", &o, &err), ERR_MISSING);
    assert_int_equal(agent_tools_add_builtin(&t, "knowledge", &o, &err), ERR_MISSING);
    assert_int_equal(t.n, 0);
}

static void memory_call(struct agent_tools *t, const char *tool, const char *key, const char *text,
                        struct buf *out) {
    json_t *arguments = json_pack("{s:s}", key, text);
    out->len = 0;
    agent_tool_call(&t->v[agent_tools_find(t, tool)], arguments, out);
    json_decref(arguments);
}

/* memory_write stores what the user's messages state, and nothing that only the model says. */
static void test_memory(void **state) {
    (void)state;
    struct agent_tools t = {0};
    struct buf out = {0};
    json_t *messages =
        json_pack("[{s:s,s:s},{s:s,s:s},{s:s,s:s},{s:s,s:s},{s:s,s:s}]", "role", "user", "content",
                  "I live in Osaka. Where do I find good tea?", "role", "assistant", "content",
                  "I live in Paris and I am allergic to nuts.", "role", "tool", "content",
                  "I like wine.", "role", "assistant", "content", "When is your birthday?", "role",
                  "user", "content", "9 May");
    char *path = path_join(folder, "memories.db");
    const struct agent_tool_options o = {.memory = path, .user = "ann", .messages = messages};
    assert_int_equal(agent_tools_add_builtin(&t, "memory_search,memory_write", &o, &err), OK);
    static const char *const wrong[] = {"The user lives in Paris", "The user is allergic to nuts",
                                        "The user likes wine", "a", ""};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        memory_call(&t, "memory_write", "fact", wrong[i], &out);
        assert_non_null(strstr(out.data, "not remembered"));
    }
    memory_call(&t, "memory_search", "query", "residence", &out);
    assert_string_equal(out.data, "no memory matches");
    memory_call(&t, "memory_write", "fact", "The user lives in Osaka", &out);
    assert_non_null(strstr(out.data, "residence: Osaka"));
    memory_call(&t, "memory_search", "query", "residence", &out);
    assert_non_null(strstr(out.data, "residence: Osaka"));
    memory_call(&t, "memory_write", "fact", "born on 9 May", &out); /* an answer to a question */
    assert_non_null(strstr(out.data, "birthday: 9 May"));
    agent_tools_release(&t);
    json_decref(messages);
    buf_release(&out);
    free(path);
}

/* Every schema has bounds, so that a model under its grammar cannot write forever. */
static void test_schemas(void **state) {
    (void)state;
    char *hosts[] = {"example.org"};
    const struct strings list = {hosts, 1};
    const struct agent_tool_options o = {.root = folder, .hosts = &list};
    struct agent_tools t =
        tools_with(have_sandbox() ? "calculator,clock,read_file,list_files,http_get,python,sh,"
                                    "check_code"
                                  : "calculator,clock,read_file,list_files,http_get",
                   &o);
    for (int i = 0; i < t.n; i++) {
        const json_t *p = t.v[i].parameters, *v;
        json_t *properties = json_object_get(p, "properties");
        const char *key;
        assert_true(json_is_false(json_object_get(p, "additionalProperties")));
        assert_int_equal(json_array_size(json_object_get(p, "required")),
                         json_object_size(properties));
        assert_true(text_ends_with(t.v[i].description, "."));
        json_object_foreach (properties, key, v) {
            double max = json_get_number(v, "maxLength");
            assert_true((max >= 500 && max <= 4000) || json_object_get(v, "enum"));
            assert_true(*json_get_string(v, "description"));
        }
    }
    agent_tools_release(&t);
}

static void test_clock(void **state) {
    (void)state;
    struct agent_tools t = tools_with("calculator, clock", &(struct agent_tool_options){0});
    setenv("SOURCE_DATE_EPOCH", "1795925536", 1);
    assert_result(&t, "clock", NULL, NULL, "2026-11-29 04:12:16 UTC, Sunday");
    setenv("SOURCE_DATE_EPOCH", "soon", 1);
    char *now = call(&t, "clock", true, NULL, NULL);
    assert_string_not_equal(now, "2026-11-29 04:12:16 UTC, Sunday");
    assert_non_null(strstr(now, " UTC, "));
    free(now);
    unsetenv("SOURCE_DATE_EPOCH");
    assert_part(&t, "calculator", true, "expression", "123456789 * 987654321",
                "121932631112635269");
    assert_part(&t, "calculator", false, "expression", "1 +", "error: ");
    agent_tools_release(&t);
}

static void test_knowledge(void **state) {
    (void)state;
    write_text("notes.md", "# 豆腐店\n\n木綿豆腐は三百円です。\n\n豆腐店の定休日は水曜日です。\n");
    write_text("tea.md", "# Tea\n\nGreen tea is sold in the shop near the station.\n");
    write_text("zh.md", "# 图书馆\n\n图书馆早上九点开门，星期一休息。\n");
    char *path = path_join(folder, "k.db");
    struct knowledge *k = knowledge_open(path, true, &err);
    if (!k) fail_msg("%s", err.text);
    static const char *const files[] = {"notes.md", "tea.md", "zh.md"};
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        struct knowledge_report report;
        char *file = path_join(folder, files[i]);
        if (knowledge_add(k, file, &(struct knowledge_options){0}, &report, &err) != OK)
            fail_msg("%s", err.text);
        free(file);
    }
    knowledge_close(k);
    struct agent_tools t = tools_with("knowledge", &(struct agent_tool_options){.knowledge = path});
    assert_part(&t, "knowledge", true, "query", "木綿豆腐の値段", "【豆腐店】");
    assert_part(&t, "knowledge", true, "query", "图书馆几点开门", "九点");
    assert_part(&t, "knowledge", true, "query", "Where is green tea sold?", "【Tea】");
    assert_result(&t, "knowledge", "query", "submarine", "no passage matches");
    assert_result(&t, "knowledge", "query", "", "no passage matches");
    assert_part(&t, "knowledge", true, "query", "\" OR NEAR( * tea", "【Tea】");
    agent_tools_release(&t);
    free(path);
}

/* files */

static void test_read_file(void **state) {
    (void)state;
    struct agent_tools t = tools_with("read_file", &(struct agent_tool_options){.root = root});
    char *big = xmalloc(5000000);
    write_text("root/メモ.txt", "豆腐を買う\n");
    write_text("root/空.txt", "");
    char *sub = path_join(root, "資料");
    mkdir(sub, 0700);
    write_text("root/資料/说明.txt", "你好");
    memset(big, 'a', 5000000);
    free(write_file("root/big.txt", big, 5000000));
    for (size_t i = 0; i + 3 <= 5000000; i += 3) memcpy(big + i, "豆", 3);
    free(write_file("root/big-ja.txt", big, 4999998));
    free(write_file("root/binary", "a\0b", 3));
    free(write_file("root/latin", "caf\xe9", 4));
    assert_result(&t, "read_file", "path", "メモ.txt", "豆腐を買う\n");
    assert_result(&t, "read_file", "path", "./資料/说明.txt", "你好");
    assert_result(&t, "read_file", "path", "空.txt", "(the file is empty)");
    char *cut = call(&t, "read_file", true, "path", "big.txt");
    assert_true(text_ends_with(cut, "a\n… (cut)"));
    free(cut);
    cut = call(&t, "read_file", true, "path", "big-ja.txt");
    assert_true(text_ends_with(cut, "豆\n… (cut)"));
    free(cut);
    assert_part(&t, "read_file", false, "path", "binary", "not a text file in UTF-8");
    assert_part(&t, "read_file", false, "path", "latin", "not a text file in UTF-8");
    assert_part(&t, "read_file", false, "path", "資料", "is a folder; list_files");
    assert_part(&t, "read_file", false, "path", "", "is a folder");
    assert_part(&t, "read_file", false, "path", "無い.txt", "cannot open '無い.txt'");
    agent_tools_release(&t);
    free(sub);
    free(big);
}

static void link_to(const char *name, const char *target) {
    char *path = path_join(root, name);
    assert_int_equal(symlink(target, path), 0);
    free(path);
}

static void test_escapes(void **state) {
    (void)state;
    struct agent_tools t =
        tools_with("read_file,list_files", &(struct agent_tool_options){.root = root});
    write_text("secret.txt", "secret");
    write_text("root/inside.txt", "inside");
    char *fifo = path_join(root, "fifo"), *absolute = path_join(root, "inside.txt");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    link_to("out", "../secret.txt");
    link_to("out-folder", "..");
    link_to("in", "inside.txt");
    link_to("in-absolute", absolute);
    link_to("zero", "/dev/zero");
    link_to("loop", "loop");
    link_to("magic", "/proc/self/cwd/Makefile");
    static const struct {
        const char *path, *why;
    } refused[] = {
        {"../secret.txt", "without '..'"},
        {"a/../../secret.txt", "without '..'"},
        {"..", "without '..'"},
        {"/etc/passwd", "without '/' at its beginning"},
        {"//etc/passwd", "without '/' at its beginning"},
        {"out", "leads out of the folder"},
        {"out-folder/secret.txt", "leads out of the folder"},
        {"in-absolute", "leads out of the folder"},
        {"zero", "leads out of the folder"},
        {"magic", "leads out of the folder"},
        {"loop", "leads out of the folder"},
        {"fifo", "is not a regular file"},
    };
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        assert_part(&t, "read_file", false, "path", refused[i].path, refused[i].why);
    assert_part(&t, "list_files", false, "path", "out-folder", "leads out of the folder");
    assert_part(&t, "list_files", false, "path", "..", "without '..'");
    assert_part(&t, "list_files", false, "path", "/", "without '/'");
    assert_part(&t, "list_files", false, "path", "fifo", "cannot open");
    assert_result(&t, "read_file", "path", "in", "inside");
    assert_part(&t, "read_file", false, "path", "..txt", "cannot open '..txt'");
    agent_tools_release(&t);
    free(fifo);
    free(absolute);
}

static void test_list_files(void **state) {
    (void)state;
    char *dir = path_join(folder, "listed"), *sub = path_join(folder, "listed/资料"),
         *many = path_join(folder, "listed/many");
    mkdir(dir, 0700);
    mkdir(sub, 0700);
    mkdir(many, 0700);
    write_text("listed/.hidden", "");
    write_text("listed/b\nc\x1b.txt", "");
    write_text("listed/メモ.txt", "");
    for (int i = 0; i < 502; i++) {
        char name[64];
        snprintf(name, sizeof name, "listed/many/%03d.txt", i);
        char *path = path_join(folder, name);
        close(open(path, O_CREAT | O_WRONLY, 0600));
        free(path);
    }
    struct agent_tools t = tools_with("list_files", &(struct agent_tool_options){.root = dir});
    assert_result(&t, "list_files", "path", ".", "b?c?.txt\nmany/\nメモ.txt\n资料/");
    assert_result(&t, "list_files", "path", "", "b?c?.txt\nmany/\nメモ.txt\n资料/");
    assert_result(&t, "list_files", "path", "资料/", "(the folder is empty)");
    char *got = call(&t, "list_files", true, "path", "many");
    assert_true(strncmp(got, "000.txt\n001.txt\n", 16) == 0);
    assert_true(text_ends_with(got, "\n499.txt\n… (2 more)"));
    free(got);
    assert_part(&t, "list_files", false, "path", "メモ.txt", "cannot open 'メモ.txt'");
    agent_tools_release(&t);
    free(dir);
    free(sub);
    free(many);
}

/* programs */

static void test_python(void **state) {
    (void)state;
    if (!have_sandbox()) skip();
    struct agent_tools t = tools_with("python", &(struct agent_tool_options){0});
    assert_result(&t, "python", "code", "print(2**100)", "1267650600228229401496703205376");
    assert_result(&t, "python", "code", "print('豆腐', len('图书馆'))\n\n", "豆腐 3");
    assert_result(&t, "python", "code", "2 + 2", "(no output)");
    assert_result(&t, "python", "code", "import sys; print('a'); print('b', file=sys.stderr)", "a");
    assert_part(&t, "python", false, "code", "print('before')\n1 / 0", "before\nTraceback");
    char *got = call(&t, "python", false, "code", "1 / 0");
    assert_true(text_ends_with(got, "division by zero\nerror: it failed with status 1"));
    free(got);
    assert_part(&t, "python", false, "code", "print(", "SyntaxError");
    assert_part(&t, "python", false, "code", "input()", "EOFError");
    assert_part(&t, "python", false, "code", "x = bytearray(1 << 30)", "MemoryError");
    agent_tools_release(&t);
}

/* Programs that try to leave the sandbox or to use all of the machine. */
static void test_hostile_programs(void **state) {
    (void)state;
    if (!have_sandbox()) skip();
    struct agent_tools t = tools_with("python,sh", &(struct agent_tool_options){.root = root});
    char connect[256], secret[128], write[256];
    write_text("secret.txt", "secret");
    snprintf(connect, sizeof connect,
             "import socket\nsocket.create_connection(('127.0.0.1', %d), 1)", port);
    snprintf(secret, sizeof secret, "cat %s/secret.txt", folder);
    snprintf(write, sizeof write, "echo changed >%s/secret.txt", folder);
    assert_part(&t, "python", false, "code", connect, "Error");
    assert_part(&t, "sh", false, "command", secret, "No such file");
    assert_part(&t, "sh", false, "command", write, "error: it failed with status");
    assert_part(&t, "sh", false, "command", "echo x >/usr/bin/x", "Read-only");
    assert_part(&t, "sh", true, "command", "env", "HOME=/tmp");
    struct buf text = {0};
    char *path = path_join(folder, "secret.txt");
    assert_int_equal(file_read(path, 100, &text, &err), OK);
    assert_string_equal(text.data, "secret");
    buf_release(&text);
    free(path);

    char *got = call(&t, "sh", false, "command", "echo begun; yes 豆腐");
    assert_non_null(strstr(got, "begun\n豆腐"));
    assert_true(text_ends_with(got, "… (cut)\nerror: it printed more than 65536 bytes"));
    free(got);
    got = call(&t, "python", false, "code",
               "import sys; print('a' * 30000); sys.exit('the reason ' + 'b' * 30000)");
    assert_non_null(strstr(got, "the reason"));
    assert_true(text_ends_with(got, "error: it failed with status 1"));
    free(got);
    agent_tools_release(&t);
}

static void test_time_limit(void **state) {
    (void)state;
    if (!have_sandbox()) skip();
    struct agent_tools t = tools_with("python,sh", &(struct agent_tool_options){.seconds = 1});
    double begin = clock_now();
    char *got = call(&t, "python", false, "code", "print('begun', flush=True)\nwhile True: pass");
    assert_true(text_ends_with(got, "error: it did not end in time (1 seconds)"));
    free(got);
    assert_part(&t, "sh", false, "command", "sleep 60 & sleep 60", "did not end in time");
    assert_true(clock_now() - begin < 20);
    agent_tools_release(&t);
}

static void test_sh(void **state) {
    (void)state;
    if (!have_sandbox()) skip();
    struct agent_tools t = tools_with("sh", &(struct agent_tool_options){0});
    assert_result(&t, "sh", "command", "echo 豆腐 | wc -m", "3");
    assert_result(&t, "sh", "command", "printf '\\033[1mx\\000y\\377'", "[1mxy\xef\xbf\xbd");
    assert_result(&t, "sh", "command", "true", "(no output)");
    assert_part(&t, "sh", false, "command", "echo a; no-such-program",
                "not found\nerror: it failed with status 127");
    agent_tools_release(&t);
}

static void assert_checked(const struct agent_tools *t, bool succeeds, const char *language,
                           const char *code, const char *part) {
    char *got = call_json(t, "check_code", succeeds,
                          json_pack("{s:s, s:s}", "language", language, "code", code));
    if (strstr(got, "is not installed"))
        print_message("# skipped: %s\n", got);
    else if (!strstr(got, part))
        fail_msg("%s %s: %.2000s", language, code, got);
    free(got);
}

static void test_check_code(void **state) {
    (void)state;
    static const char right[] = "no syntax errors";
    if (!have_sandbox()) skip();
    struct agent_tools t = tools_with("check_code", &(struct agent_tool_options){0});
    assert_checked(&t, true, "python", "print('豆腐')\n", right);
    assert_checked(&t, true, "python", "raise SystemExit(3)", right); // is not run
    assert_checked(&t, true, "python", "a = 1\nprint('x'", "line 2: '(' was never closed");
    assert_checked(&t, true, "python", "return 1", "line 1: 'return' outside function");
    assert_checked(&t, true, "c", "#include <stdio.h>\nint main(void) { puts(\"你好\"); }", right);
    assert_checked(&t, true, "c", "int main(void) { return 0 }", "error: expected ‘;’");
    assert_checked(&t, true, "c", "#include \"/no/such.h\"", "No such file");
    assert_checked(&t, true, "javascript", "console.log('豆腐'); process.exit(3)", right);
    assert_checked(&t, true, "javascript", "function f( {", "SyntaxError");
    assert_checked(&t, true, "sh", "for i in 1 2; do echo $i; done; exit 3", right);
    assert_checked(&t, true, "sh", "if true; then", "Syntax error");
    assert_checked(&t, true, "python", "", right);
    assert_checked(&t, false, "cobol", "x", "'cobol' cannot be checked; there are python, c");
    agent_tools_release(&t);
}

/* pages */

static struct agent_tools web_tools(const char *first, const char *second) {
    char *hosts[] = {xasprintf(first, port), xasprintf(second, port)};
    const struct strings list = {hosts, 2};
    struct agent_tools t = tools_with("http_get", &(struct agent_tool_options){.hosts = &list});
    free(hosts[0]);
    free(hosts[1]);
    return t;
}

static void assert_page(const struct agent_tools *t, bool succeeds, const char *url,
                        const char *expected) {
    char *full = xasprintf(url, port);
    if (succeeds)
        assert_result(t, "http_get", "url", full, expected);
    else
        assert_part(t, "http_get", false, "url", full, expected);
    free(full);
}

static void test_pages(void **state) {
    (void)state;
    struct agent_tools t = web_tools("127.0.0.1:%d", "LOCALhost:%d");
    setenv("http_proxy", "http://127.0.0.1:1", 1); // is not used
    assert_page(&t, true, "http://127.0.0.1:%d/text", "豆腐は三百円です。");
    assert_page(&t, true, "HTTP://Localhost:%d/text#part", "豆腐は三百円です。");
    assert_page(&t, true, "http://127.0.0.1:%d/html", "豆腐店\n\n营业时间 9–17");
    assert_page(&t, true, "http://127.0.0.1:%d/json", "{\"a\": 1}");
    assert_page(&t, true, "http://127.0.0.1:%d/豆腐", "found");
    assert_page(&t, true, "http://127.0.0.1:%d/relative", "豆腐は三百円です。");
    assert_page(&t, false, "http://127.0.0.1:%d/image", "the page is 'image/png', not text");
    assert_page(&t, false, "http://127.0.0.1:%d/untyped", "the page is '', not text");
    assert_page(&t, false, "http://127.0.0.1:%d/latin", "not text in UTF-8");
    assert_page(&t, false, "http://127.0.0.1:%d/missing",
                "error: the server answered with status 404");
    assert_page(&t, false, "http://127.0.0.1:%d/loop", "more than 3 redirects");
    char *url = xasprintf("http://127.0.0.1:%d/endless", port);
    char *got = call(&t, "http_get", true, "url", url);
    assert_true(text_ends_with(got, "… (cut)"));
    free(got);
    free(url);
    unsetenv("http_proxy");
    agent_tools_release(&t);
}

static void test_hosts(void **state) {
    (void)state;
    struct agent_tools t = web_tools("127.0.0.1:%d", "example.org");
    static const struct {
        const char *url, *why;
    } refused[] = {
        {"http://localhost:%d/text", "host 'localhost:"},
        {"http://127.0.0.1/text", "host '127.0.0.1' is not allowed; allowed: 127.0.0.1:"},
        {"https://127.0.0.2:%d/text", "is not allowed"},
        {"http://example.org:%d/", "is not allowed"},
        {"http://example.org.evil.example/", "is not allowed"},
        {"http://evil.example/?http://example.org/", "is not allowed"},
        {"http://evil.example\\@example.org/", "error: "},
        {"http://example.org@evil.example/", "user name or password"},
        {"http://user@127.0.0.1:%d/text", "user name or password"},
        {"http://user:password@127.0.0.1:%d/text", "user name or password"},
        {"http://:@127.0.0.1:%d/text", "user name or password"},
        {"ftp://127.0.0.1:%d/text", "expected http://… or https://…"},
        {"file:///etc/passwd", "expected http://… or https://…"},
        {"gopher://127.0.0.1:%d/text", "expected http://… or https://…"},
        {"127.0.0.1:%d/text", "expected http://… or https://…"},
        {"", "expected http://… or https://…"},
        {"http://127.0.0.1:%d/te\r\nHost: x", "expected http://… or https://…"},
        {"http://127.0.0.1:%d/to-other", "redirects to another address: host 'other.example'"},
        {"http://127.0.0.1:%d/to-file", "redirects to another address"},
        {"http://127.0.0.1:%d/to-name", "redirects to another address: host 'a.localhost:"},
    };
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        assert_page(&t, false, refused[i].url, refused[i].why);
    agent_tools_release(&t);
}

/* Names of localhost stand for any name whose address is private: libcurl resolves them itself. */
static void test_private_addresses(void **state) {
    (void)state;
    struct agent_tools t = web_tools("a.localhost:%d", "127.0.0.1:%d");
    assert_page(&t, false, "http://a.localhost:%d/text", "has a private address");
    assert_page(&t, false, "http://127.0.0.1:%d/to-name", "'a.localhost' has a private address");
    agent_tools_release(&t);
    static const struct {
        const char *address;
        bool is_public;
    } cases[] = {
        {"8.8.8.8", true},
        {"9.255.255.255", true},
        {"11.0.0.0", true},
        {"172.15.0.1", true},
        {"172.32.0.1", true},
        {"192.167.1.1", true},
        {"223.255.255.255", true},
        {"0.0.0.0", false},
        {"10.1.2.3", false},
        {"100.64.0.1", false},
        {"127.0.0.1", false},
        {"127.255.0.1", false},
        {"169.254.169.254", false},
        {"172.16.0.1", false},
        {"172.31.255.255", false},
        {"192.168.1.1", false},
        {"198.19.0.1", false},
        {"224.0.0.1", false},
        {"255.255.255.255", false},
        {"2606:4700::1111", true},
        {"::", false},
        {"::1", false},
        {"fe80::1", false},
        {"fc00::1", false},
        {"fd12::1", false},
        {"ff02::1", false},
        {"::ffff:127.0.0.1", false},
        {"::ffff:8.8.8.8", true},
        {"64:ff9b::a00:1", false},
        {"64:ff9b::808:808", true},
        {"2002:7f00:1::", false},
        {"2002:808:808::", true},
        {"2001::1", false},
        {"2001:db8::1", false},
        {"2001:4860::8888", true},
        {"::7f00:1", false},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct sockaddr_in v4 = {.sin_family = AF_INET};
        struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
        bool is_v4 = inet_pton(AF_INET, cases[i].address, &v4.sin_addr) == 1;
        if (!is_v4) assert_int_equal(inet_pton(AF_INET6, cases[i].address, &v6.sin6_addr), 1);
        if (address_is_public(is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6) !=
            cases[i].is_public)
            fail_msg("%s", cases[i].address);
    }
}

static void test_silent_server(void **state) {
    (void)state;
    char *hosts[] = {xasprintf("127.0.0.1:%d", port)},
         *url = xasprintf("http://%s/silent", hosts[0]);
    const struct strings list = {hosts, 1};
    struct http_page page;
    double begin = clock_now();
    assert_int_equal(http_get_page(url, &list, 100, 0.5, &page, &err), ERR_IO);
    assert_true(clock_now() - begin < 5);
    free(hosts[0]);
    free(url);
}

/* The error of a call is English in every language of the user, so that a run has the same bits. */
static void test_language(void **state) {
    (void)state;
    static const char text[] = "unknown word '%.*s' at %d";
    const struct agent_tool_options none = {0};
    struct agent_tools t = tools_with("calculator", &none);
    setenv("LC_ALL", "ja_JP.UTF-8", 1);
    setenv("LANGUAGE", "ja", 1);
    translations_open("build/locale");
    if (strcmp(translate(text), text) == 0) skip(); /* no gettext */
    char *result = call(&t, "calculator", false, "expression", "2 + abc");
    assert_non_null(strstr(result, "unknown word 'abc' at 5"));
    assert_string_not_equal(translate(text), text);
    translations_close();
    free(result);
    agent_tools_release(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_list),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_results),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_builtin_list),
        cmocka_unit_test(test_schemas),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_knowledge),
        cmocka_unit_test(test_read_file),
        cmocka_unit_test(test_escapes),
        cmocka_unit_test(test_list_files),
        cmocka_unit_test(test_python),
        cmocka_unit_test(test_hostile_programs),
        cmocka_unit_test(test_time_limit),
        cmocka_unit_test(test_sh),
        cmocka_unit_test(test_check_code),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_private_addresses),
        cmocka_unit_test(test_language),
        cmocka_unit_test(test_silent_server), // last: the server sleeps
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
