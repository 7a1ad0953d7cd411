/*
 * test_lib_server: a server of the library: its replies equal those of shoal_run, the model is in
 * use meanwhile and free afterwards, a client that vanishes raises no signal, a running reply is
 * cut off at the stop, and nothing of the process stays changed.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "folder.h"
#include "shoal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_TOKENS = 24 };
static const char MODEL[] = "test/models/fry-1";
static const char QUESTION[] = "pick the smallest of 41, 3, 907";
static char dir[] = "/tmp/test_lib_server.XXXXXX";
static struct shoal *s;
static struct shoal_adapter *adapter; /* saved as "twin" in `dir` */

static char *in_dir(const char *prefix, const char *name) {
    return xasprintf("%s%s/%s", prefix, dir, name);
}

static int open_model(void **state) {
    (void)state;
    static const char *const options[] = {"threads=2", "max-num-seqs=8", NULL};
    static const char *const noise[] = {"step=1", "seed=5", NULL};
    s = mkdtemp(dir) ? shoal_open(MODEL, options, NULL) : NULL;
    if (!s) return -1;
    const struct shoal_adapter *plain = shoal_adapter_new(s, NULL, NULL);
    adapter = shoal_adapter_combine(s, "noise_absolute", &plain, NULL, 1, noise, NULL);
    shoal_adapter_free((struct shoal_adapter *)(uintptr_t)plain);
    char *path = in_dir("", "twin");
    int rc = adapter ? shoal_adapter_save(s, adapter, path, NULL) : -1;
    free(path);
    return rc;
}

static int close_model(void **state) {
    (void)state;
    shoal_adapter_free(adapter);
    shoal_close(s);
    return folder_remove(dir);
}

/* The reply of shoal_run; malloc'ed. a NULL: of the base model. */
static char *run_reply(const struct shoal_adapter *a) {
    static const char *const options[] = {"max-tokens=24", NULL};
    const struct shoal_message question = {"user", QUESTION};
    struct shoal_error err = {0};
    struct shoal_request *r = shoal_request_new(s, &question, 1, options, &err);
    if (!r || (a && shoal_request_set_adapters(r, &a, NULL, 1, &err) != SHOAL_OK) ||
        shoal_run(s, &r, 1, NULL, &err) != SHOAL_OK)
        fail_msg("%s", err.text);
    char *text = xstrdup(shoal_request_text(r));
    shoal_request_free(r);
    return text;
}

/* Whether `option` (may be NULL) sets another option than `name`. */
static bool is_other(const char *option, const char *name) {
    return !option || strncmp(option, name, strlen(name)) != 0;
}

/* `name` is the folder of the state in `dir`. */
static struct shoal_server *serve(struct shoal *model, const char *name, const char *extra,
                                  struct shoal_error *err) {
    char *state = in_dir("state=", name), *runs = in_dir("runs=", "runs"),
         *twin = in_dir("adapter=twin=", "twin");
    const char *options[7] = {state, runs, twin};
    int n = 3;
    if (is_other(extra, "port=")) options[n++] = "port=0";
    if (is_other(extra, "drain-seconds=")) options[n++] = "drain-seconds=0.2";
    options[n] = extra;
    struct shoal_server *v = shoal_serve(model, options, err);
    free(state);
    free(runs);
    free(twin);
    return v;
}

static struct shoal_server *serve_ok(struct shoal *model, const char *name) {
    struct shoal_error err = {0};
    struct shoal_server *v = serve(model, name, NULL, &err);
    if (!v) fail_msg("%s", err.text);
    return v;
}

/* raw HTTP/1.1 */

static int socket_connect(const struct shoal_server *v) {
    const char *url = shoal_server_url(v);
    assert_int_equal(strncmp(url, "http://127.0.0.1:", 17), 0);
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)atoi(url + 17)),
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_return_code(connect(fd, (const struct sockaddr *)&to, sizeof to), errno);
    return fd;
}

static int request_send(const struct shoal_server *v, const char *method, const char *path,
                        const char *key, const char *body) {
    int fd = socket_connect(v);
    char *text = xasprintf("%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           "Connection: close\r\nContent-Length: %zu\r\n%s%s%s\r\n%s",
                           method, path, strlen(body), key ? "Authorization: Bearer " : "",
                           key ? key : "", key ? "\r\n" : "", body);
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
    free(text);
    return fd;
}

/* The body of the reply as JSON; sets *status. */
static json_t *reply_read(int fd, int *status) {
    struct buf b = {0};
    char part[4096];
    ssize_t n;
    while ((n = read(fd, part, sizeof part)) > 0) buf_add(&b, part, (size_t)n);
    close(fd);
    buf_puts(&b, "");
    assert_int_equal(sscanf(b.data, "HTTP/1.1 %d", status), 1);
    const char *body = strstr(b.data, "\r\n\r\n");
    assert_non_null(body);
    json_t *v = json_loads(body + 4, 0, NULL);
    if (!v) fail_msg("%s", b.data);
    buf_release(&b);
    return v;
}

static void assert_reply(const struct shoal_server *v, const char *model, const char *expected) {
    int status;
    json_t *body =
        json_pack("{s:s,s:i,s:i,s:[{s:s,s:s}]}", "model", model, "max_tokens", MAX_TOKENS,
                  "temperature", 0, "messages", "role", "user", "content", QUESTION);
    char *text = json_dumps(body, 0);
    json_t *reply =
        reply_read(request_send(v, "POST", "/v1/chat/completions", NULL, text), &status);
    assert_int_equal(status, 200);
    const json_t *choice = json_array_get(json_object_get(reply, "choices"), 0);
    assert_string_equal(json_get_string(json_object_get(choice, "message"), "content"), expected);
    json_decref(reply);
    json_decref(body);
    free(text);
}

/* The start-up token, from its file. */
static char *token_read(const struct shoal_server *v) {
    struct buf b = {0};
    struct error err;
    if (file_read(shoal_server_token_file(v), 4096, &b, &err) != OK) fail_msg("%s", err.text);
    b.data[strcspn(b.data, "\n")] = 0;
    return b.data;
}

static void assert_refused(int code, const struct shoal_error *err) {
    assert_int_equal(code, SHOAL_ERR_STATE);
    assert_int_equal(err->code, SHOAL_ERR_STATE);
    assert_non_null(strstr(err->text, "server"));
}

/* While a server runs, other calls with the model fail. */
static void assert_in_use(void) {
    static const char *const topic[] = {"topic=3 or 4?", NULL};
    static const char *const names[] = {"a"};
    const struct shoal_message question = {"user", QUESTION};
    struct shoal_error err = {0};
    float out[1024];
    const char *text = "x";
    assert_null(shoal_request_new(s, &question, 1, NULL, &err));
    assert_refused(err.code, &err);
    assert_null(shoal_serve(s, NULL, &err));
    assert_refused(err.code, &err);
    assert_null(shoal_debate(s, NULL, names, 1, topic, NULL, &err));
    assert_refused(err.code, &err);
    assert_null(shoal_simulate(s, NULL, NULL, &err));
    assert_refused(err.code, &err);
    assert_refused(shoal_embed(s, &text, 1, NULL, out, &err), &err);
    assert_refused(shoal_step(s, &err), &err);
}

static void test_serve(void **state) {
    (void)state;
    const struct shoal_message question = {"user", QUESTION};
    struct shoal_error err = {0};
    char *base = run_reply(NULL), *twin = run_reply(adapter);
    assert_string_not_equal(base, twin);
    struct shoal_request *before = shoal_request_new(s, &question, 1, NULL, NULL);
    for (int start = 0; start < 2; start++) {
        struct shoal_server *v = serve_ok(s, "state");
        assert_reply(v, "fry-1", base);
        assert_reply(v, "twin", twin);
        assert_refused(shoal_run(s, &before, 1, NULL, &err), &err);
        assert_refused(shoal_submit(s, before, &err), &err);
        assert_in_use();
        assert_reply(v, "fry-1", base);
        char *token_file = xstrdup(shoal_server_token_file(v));
        assert_return_code(access(token_file, F_OK), errno);
        shoal_server_stop(v);
        assert_int_equal(access(token_file, F_OK), -1);
        free(token_file);
        char *again = run_reply(NULL), *twin_again = run_reply(adapter);
        assert_string_equal(again, base);
        assert_string_equal(twin_again, twin);
        free(again);
        free(twin_again);
    }
    shoal_request_free(before);
    free(base);
    free(twin);
}

/* Pages that need the memory plan, and jobs, which the library does not have. */
static void test_system_and_jobs(void **state) {
    (void)state;
    int status;
    struct shoal_server *v = serve_ok(s, "state");
    char *token = token_read(v);
    json_t *reply = reply_read(request_send(v, "GET", "/v1/system", NULL, ""), &status);
    assert_int_equal(status, 200);
    const json_t *plan = json_object_get(json_object_get(reply, "memory"), "plan");
    assert_true(json_get_number(plan, "weights") > 0);
    json_decref(reply);
    reply = reply_read(request_send(v, "GET", "/v1/jobs", NULL, ""), &status);
    assert_int_equal(status, 401);
    json_decref(reply);
    reply = reply_read(request_send(v, "POST", "/v1/jobs", token, "{\"kind\":\"train\"}"), &status);
    assert_int_equal(status, 400);
    json_decref(reply);
    free(token);
    shoal_server_stop(v);
}

/* Clients that reset the connection before or during the reply. A write to it must not raise
 * SIGPIPE, whose default action is to end the process. */
static void test_vanished_clients(void **state) {
    (void)state;
    static const char body[] = "{\"model\":\"fry-1\",\"stream\":true,\"max_tokens\":200,"
                               "\"ignore_eos\":true,\"messages\":[{\"role\":\"user\","
                               "\"content\":\"tell me\"}]}";
    char *base = run_reply(NULL), first;
    struct shoal_server *v = serve_ok(s, "state");
    assert_ptr_equal(signal(SIGPIPE, SIG_DFL), SIG_DFL);
    for (int i = 0; i < 20; i++) {
        int fd = request_send(v, "POST", "/v1/chat/completions", NULL, body);
        const struct linger reset = {.l_onoff = 1};
        if (i % 2) assert_int_equal(read(fd, &first, 1), 1);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
    }
    assert_reply(v, "fry-1", base);
    shoal_server_stop(v);
    free(base);
}

/* Stops the server while it streams a reply of 4 x 400 tokens; returns what the client has got. */
static char *stop_during_reply(const char *drain) {
    static const char body[] = "{\"model\":\"fry-1\",\"stream\":true,\"max_tokens\":400,\"n\":4,"
                               "\"ignore_eos\":true,\"messages\":[{\"role\":\"user\","
                               "\"content\":\"tell me\"}]}";
    struct shoal_error err = {0};
    struct buf b = {0};
    char part[4096];
    ssize_t n;
    struct shoal_server *v = serve(s, "state", drain, &err);
    if (!v) fail_msg("%s", err.text);
    int fd = request_send(v, "POST", "/v1/chat/completions", NULL, body);
    assert_int_equal(read(fd, part, 1), 1);
    double begin = clock_now();
    shoal_server_stop(v);
    assert_true(clock_now() - begin < 60);
    while ((n = read(fd, part, sizeof part)) > 0) buf_add(&b, part, (size_t)n);
    close(fd);
    buf_puts(&b, "");
    return b.data;
}

/* A running reply has drain-seconds to finish, and is then cut off, unless it was complete before:
 * on a busy machine the client may be late. */
static void test_drain(void **state) {
    (void)state;
    char *whole = stop_during_reply("drain-seconds=60"),
         *cut = stop_during_reply("drain-seconds=0");
    assert_non_null(strstr(whole, "[DONE]"));
    free(whole);
    free(cut);
    free(run_reply(NULL)); // the model is free
}

/* The context of a model in the list of models; 0: it is not in it. */
static int listed_context(const struct shoal_server *v, const char *model) {
    int status, tokens = 0;
    size_t i;
    json_t *reply = reply_read(request_send(v, "GET", "/v1/models", NULL, ""), &status), *card;
    json_array_foreach (json_object_get(reply, "data"), i, card)
        if (strcmp(json_get_string(card, "id"), model) == 0)
            tokens = (int)json_get_number(card, "max_model_len");
    json_decref(reply);
    return tokens;
}

/* A model that is loaded on demand has its own context, as far as memory allows, or the named one
 * of the first model. */
static void test_contexts(void **state) {
    (void)state;
    static const char *const named[] = {"threads=1", "max-model-len=300", NULL};
    struct shoal_error err = {0};
    struct shoal *other = shoal_open(MODEL, named, NULL);
    char *path = in_dir("", "models"), *model = in_dir("", "models/long"),
         *option = in_dir("model-dir=", "models");
    assert_true(dir_make(path, &(struct error){0}) == OK && folder_long_model(model, 20000));
    struct shoal_server *a = serve(s, "state", option, &err),
                        *b = serve(other, "other", option, &err);
    if (!a || !b) fail_msg("%s", err.text);
    assert_int_equal(listed_context(a, "fry-1"), 512);
    assert_int_equal(listed_context(a, "long"), 20000);
    assert_int_equal(listed_context(b, "fry-1"), 300);
    assert_int_equal(listed_context(b, "long"), 300);
    shoal_server_stop(a);
    shoal_server_stop(b);
    shoal_close(other);
    free(path);
    free(model);
    free(option);
}

/* Whether file_read may read a device, which it may not while a server runs. */
static bool reads_devices(void) {
    struct buf b = {0};
    struct error err;
    int rc = file_read("/dev/null", 16, &b, &err);
    buf_release(&b);
    return rc == OK;
}

static mode_t umask_get(void) {
    mode_t mask = umask(0);
    umask(mask);
    return mask;
}

/* Two servers at once; the process is as before after both have stopped. */
static void test_process(void **state) {
    (void)state;
    static const char *const options[] = {"threads=1", "max-num-seqs=2", NULL};
    struct shoal *other = shoal_open(MODEL, options, NULL);
    sigset_t before, during, after;
    struct sigaction pipe_action;
    struct stat st;
    mode_t mask = umask_get();
    char *base = run_reply(NULL), *folder = in_dir("", "state");
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_true(reads_devices());
    struct shoal_server *a = serve_ok(s, "state"), *b = serve_ok(other, "other");
    pthread_sigmask(SIG_SETMASK, NULL, &during);
    assert_false(reads_devices());
    assert_int_equal(umask_get(), mask);
    assert_return_code(stat(folder, &st), errno);
    assert_int_equal(st.st_mode & 0777, 0700);
    assert_string_not_equal(shoal_server_url(a), shoal_server_url(b));
    assert_reply(a, "fry-1", base);
    assert_reply(b, "fry-1", base);
    shoal_server_stop(a);
    assert_false(reads_devices());
    assert_reply(b, "fry-1", base);
    shoal_server_stop(b);
    assert_true(reads_devices());
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int i = 1; i < 32; i++) {
        assert_int_equal(sigismember(&during, i), sigismember(&before, i));
        assert_int_equal(sigismember(&after, i), sigismember(&before, i));
    }
    sigaction(SIGPIPE, NULL, &pipe_action);
    assert_ptr_equal(pipe_action.sa_handler, SIG_DFL);
    shoal_close(other);
    free(folder);
    free(base);
}

static void test_errors(void **state) {
    (void)state;
    static const struct {
        const char *name, *option;
        int code;
        const char *text;
    } cases[] = {
        {"state", "prot=1", SHOAL_ERR_USAGE, "prot"},
        {"state", "max-memory=1G", SHOAL_ERR_USAGE, "max-memory"},
        {"state", "port=100000", SHOAL_ERR_USAGE, "port"},
        {"state", "max-feedback=much", SHOAL_ERR_USAGE, "much"},
        {"state", "max-request-memory=1M", SHOAL_ERR_USAGE, "at least 8M"},
        {"state", "host=nowhere.invalid", SHOAL_ERR_USAGE, "nowhere.invalid"},
        {"state", "host=0.0.0.0", SHOAL_ERR_USAGE, "0.0.0.0"}, // there are no keys
        {"state", "adapter=x=/nowhere", SHOAL_ERR_MISSING, "/nowhere"},
        {"state", "team=/nowhere", SHOAL_ERR_MISSING, "/nowhere"},
        {"state", "api-key-file=/nowhere", SHOAL_ERR_MISSING, "/nowhere"},
        {"twin/adapter_config.json", NULL, SHOAL_ERR_IO, "adapter_config.json"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct shoal_error err = {0};
        assert_null(serve(s, cases[i].name, cases[i].option, &err));
        assert_null(serve(s, cases[i].name, cases[i].option, NULL));
        if (err.code != cases[i].code || !strstr(err.text, cases[i].text))
            fail_msg("case %zu: %d %s", i, err.code, err.text);
    }
    assert_true(reads_devices());
    shoal_server_stop(NULL);
    free(run_reply(NULL)); // the model is free
}

/* Another server uses the state folder; submitted requests are unfinished. */
static void test_busy(void **state) {
    (void)state;
    const struct shoal_message question = {"user", QUESTION};
    struct shoal_error err = {0};
    struct shoal *other = shoal_open(MODEL, NULL, NULL);
    struct shoal_request *r = shoal_request_new(other, &question, 1, NULL, NULL);
    struct shoal_server *v = serve_ok(s, "state");
    assert_int_equal(shoal_submit(other, r, NULL), SHOAL_OK);
    assert_null(serve(other, "other", NULL, &err));
    assert_int_equal(err.code, SHOAL_ERR_STATE);
    assert_non_null(strstr(err.text, "unfinished"));
    shoal_cancel(other, r);
    assert_null(serve(other, "state", NULL, &err));
    assert_int_equal(err.code, SHOAL_ERR_STATE);
    assert_non_null(strstr(err.text, "state"));
    shoal_server_stop(v);
    shoal_server_stop(serve_ok(other, "state"));
    shoal_request_free(r);
    shoal_close(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_serve),
        cmocka_unit_test(test_system_and_jobs),
        cmocka_unit_test(test_vanished_clients),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_contexts),
        cmocka_unit_test(test_process),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_busy),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
