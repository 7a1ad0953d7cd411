/*
 * test_bus: messages, queues and values of a local bus, members that disconnect, and invalid
 * frames; the same over a NATS server, which each test starts, if one is installed.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"

#include "cluster/bus_frame.h"
#include "cluster/unit.h"

#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct bus *hub, *one, *two;
static struct error err;

static int members_open(const char *address) {
    hub = bus_open(address, &err);
    one = hub ? bus_open(bus_address(hub), &err) : NULL;
    two = hub ? bus_open(bus_address(hub), &err) : NULL;
    return one && two ? 0 : -1;
}

static int bus_setup(void **state) {
    (void)state;
    return members_open("local");
}

/* A server of NATS with an empty store; its port is chosen by the kernel. */
static pid_t server;
static char server_folder[] = "/tmp/shoal-nats-XXXXXX";

static int server_start(int port) {
    char *config = path_join(server_folder, "nats.conf"), *text;
    text =
        xasprintf("listen: 127.0.0.1:%d\nmax_payload: 8388608\njetstream {store_dir: \"%s/%d\"}\n"
                  "log_file: \"%s/log\"\n",
                  port, server_folder, port, server_folder);
    if (file_write(config, text, strlen(text), &err) != OK) return -1;
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execlp("nats-server", "nats-server", "-c", config, (char *)NULL);
        _exit(127);
    }
    free(config);
    free(text);
    return server > 0 ? 0 : -1;
}

static int free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool found = bind(fd, (struct sockaddr *)&address, size) == 0 &&
                 getsockname(fd, (struct sockaddr *)&address, &size) == 0;
    close(fd);
    return found ? ntohs(address.sin_port) : 0;
}

static int nats_setup(void **state) {
    char address[64];
    int port = free_port();
    (void)state;
    snprintf(address, sizeof address, "nats://127.0.0.1:%d", port);
    if (server_start(port) != 0) return -1;
    for (int i = 0; i < 100; i++) {
        if (members_open(address) == 0) return 0;
        usleep(50 * 1000);
    }
    fprintf(stderr, "%s\n", err.text);
    return -1;
}

static int bus_teardown(void **state) {
    (void)state;
    bus_close(two);
    bus_close(one);
    bus_close(hub);
    two = one = hub = NULL;
    if (server > 0) {
        kill(server, SIGKILL);
        waitpid(server, NULL, 0);
    }
    server = 0;
    return 0;
}

static void ok(int rc) {
    if (rc != OK) fail_msg("%s", err.text);
}

static void send_text(int (*send)(struct bus *, const char *, const void *, size_t, struct error *),
                      struct bus *b, const char *to, const char *text) {
    ok(send(b, to, text, strlen(text), &err));
}

static void enqueue(const char *queue, const char *id, const char *text) {
    ok(bus_enqueue(hub, queue, id, text, strlen(text), &err));
}

/* The next message; its text must be `text`. Returns its item. */
static uint64_t receive(struct bus *b, const char *subject, const char *text) {
    struct bus_message m;
    int rc = bus_receive(b, 10, &m, &err);
    if (rc < 0) fail_msg("%s", err.text);
    assert_int_equal(rc, 1);
    assert_string_equal(m.subject, subject);
    assert_int_equal(m.len, strlen(text));
    assert_memory_equal(m.data, text, m.len);
    return m.item;
}

static void receive_nothing(struct bus *b) {
    struct bus_message m;
    assert_int_equal(bus_receive(b, 0.05, &m, &err), 0);
}

/* Returns when the hub has handled all messages of the member. */
static void hub_sync(struct bus *b) {
    ok(bus_enqueue(b, "sync", "", "", 0, &err));
}

static void messages_reach_subscribers(void **state) {
    (void)state;
    ok(bus_subscribe(one, "news.a", &err));
    ok(bus_subscribe(two, "news.*", &err));
    assert_int_equal(bus_subscribe(two, "new*", &err), ERR_USAGE);
    hub_sync(one);
    hub_sync(two);
    send_text(bus_publish, hub, "news.a", "hello");
    send_text(bus_publish, hub, "news.b", "only two");
    receive(one, "news.a", "hello");
    receive(two, "news.a", "hello");
    receive(two, "news.b", "only two");
    receive_nothing(one);
    receive_nothing(hub);
}

/* Receives and acknowledges "first" and "second", in any order. */
static void receive_both(struct bus *b) {
    bool seen[2] = {false, false};
    for (int i = 0; i < 2; i++) {
        struct bus_message m;
        assert_int_equal(bus_receive(b, 10, &m, &err), 1);
        bool second = m.len == strlen("second");
        assert_false(seen[second]);
        seen[second] = true;
        ok(bus_ack(b, m.item, &err));
    }
}

static void items_stay_until_they_are_acknowledged(void **state) {
    (void)state;
    enqueue("work", "1", "first"); // before there is a consumer
    enqueue("work", "1", "first again");
    enqueue("work", "2", "second");
    ok(bus_consume(one, "work", 1, &err));
    uint64_t item = receive(one, "work", "first");
    receive_nothing(one); // its limit is one
    ok(bus_nak(one, item, &err));
    receive_both(one);
    receive_nothing(one);
    ok(bus_ack(one, item, &err)); // has no effect
}

/* NATS waits BUS_ACK_SECONDS before it delivers such an item again. */
static void items_of_a_lost_member_return(void **state) {
    (void)state;
    ok(bus_consume(one, "work", 1, &err));
    enqueue("work", "2", "second");
    receive(one, "work", "second");
    ok(bus_consume(two, "work", 5, &err));
    hub_sync(two);
    bus_close(one); // without acknowledging
    one = NULL;
    ok(bus_ack(two, receive(two, "work", "second"), &err));
    hub_sync(two);
    enqueue("work", "2", "the id is free again");
    receive(two, "work", "the id is free again");
}

static void consumers_share_a_queue(void **state) {
    (void)state;
    ok(bus_consume(one, "work", 2, &err));
    ok(bus_consume(two, "work", 2, &err));
    hub_sync(one);
    hub_sync(two);
    for (int i = 0; i < 5; i++) {
        char id[2] = {(char)('a' + i), 0};
        enqueue("work", id, id);
    }
    struct bus_message m;
    for (int i = 0; i < 2; i++) assert_int_equal(bus_receive(one, 10, &m, &err), 1);
    for (int i = 0; i < 2; i++) assert_int_equal(bus_receive(two, 10, &m, &err), 1);
    receive_nothing(one);
    receive_nothing(two);
    ok(bus_purge(hub, "work", &err)); // the fifth
    hub_sync(hub);
    ok(bus_ack(two, m.item, &err));
    receive_nothing(two);
}

static void messages_wait_while_a_reply_is_awaited(void **state) {
    (void)state;
    ok(bus_subscribe(one, "news", &err));
    hub_sync(one);
    send_text(bus_publish, two, "news", "1");
    send_text(bus_publish, two, "news", "2");
    hub_sync(two);
    hub_sync(one);
    receive(one, "news", "1");
    receive(one, "news", "2");
}

static void large_messages_and_limits(void **state) {
    (void)state;
    char *data = xmalloc(BUS_DATA_MAX + 1), name[BUS_NAME_MAX + 1];
    memset(data, 'x', BUS_DATA_MAX + 1);
    memset(name, 'n', BUS_NAME_MAX);
    name[BUS_NAME_MAX] = 0;
    ok(bus_subscribe(one, "big", &err));
    hub_sync(one);
    ok(bus_publish(two, "big", data, BUS_DATA_MAX, &err));
    struct bus_message m;
    assert_int_equal(bus_receive(one, 20, &m, &err), 1);
    assert_int_equal(m.len, BUS_DATA_MAX);
    assert_memory_equal(m.data, data, m.len);
    assert_int_equal(bus_publish(two, "big", data, BUS_DATA_MAX + 1, &err), ERR_MEMORY);
    assert_int_equal(bus_publish(two, name, data, 1, &err), ERR_USAGE);
    assert_int_equal(bus_publish(two, "a b", data, 1, &err), ERR_USAGE);
    assert_null(bus_open("http://x", &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_null(bus_open("unix:/nonexistent", &err));
    free(data);
}

/* A connection without the functions of a member. */
static int raw_connect(void) {
    int fd = bus_socket_open(bus_address(hub) + strlen("unix:"), false, &err);
    assert_true(fd >= 0);
    return fd;
}

static void a_wake_ends_a_wait(void **state) {
    (void)state;
    struct bus_message m;
    double begin = clock_now();
    bus_wake(one);                                   // before the wait
    ok(bus_enqueue(one, "work", "1", "a", 1, &err)); // which waits for a reply
    assert_int_equal(bus_receive(one, 20, &m, &err), 0);
    assert_true(clock_now() - begin < 10);
    ok(bus_subscribe(one, "news", &err));
    hub_sync(one);
    bus_wake(one); // it drops no message
    send_text(bus_publish, two, "news", "it is here");
    while (bus_receive(one, 20, &m, &err) == 0)
        ;
    assert_memory_equal(m.data, "it is here", m.len);
}

static void wrong_bytes_end_only_their_connection(void **state) {
    (void)state;
    static const char *const wrong[] = {"\xff\xff\xff\xff_",        "\0\0\0\0",
                                        "\x0a\0\0\0\x63_________",  "\x0a\0\0\0\x01________\xff",
                                        "\x0a\0\0\0\x09________\0", "\x0a\0\0\0\x04________\0"};
    static const size_t lengths[] = {5, 4, 14, 14, 14, 14};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        char byte;
        int fd = raw_connect();
        assert_int_equal(send(fd, wrong[i], lengths[i], MSG_NOSIGNAL), (ssize_t)lengths[i]);
        assert_int_equal(recv(fd, &byte, 1, 0), 0); // the hub has closed it
        close(fd);
    }
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int i = 0; i < 200; i++) {
        uint8_t bytes[64];
        int fd = raw_connect();
        for (size_t k = 0; k < sizeof bytes; k++)
            bytes[k] = (uint8_t)rng_below(&r, k < 4 ? 8 : 256);
        send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
        close(fd);
    }
    hub_sync(one);
    ok(bus_subscribe(one, "news", &err));
    hub_sync(one);
    send_text(bus_publish, two, "news", "still here");
    receive(one, "news", "still here");
}

static void the_end_of_the_hub_is_an_error(void **state) {
    (void)state;
    bus_close(hub);
    hub = NULL;
    struct bus_message m;
    assert_int_equal(bus_receive(one, 10, &m, &err), ERR_IO);
    assert_int_equal(bus_enqueue(two, "work", "1", "a", 1, &err), ERR_IO);
}

static bool nats_is_installed(void) {
    struct bus *b = bus_open("nats://127.0.0.1:1", &err); // refused, or without the library
    bus_close(b);
    if (err.code == ERR_MISSING) printf("skip: %s\n", err.text);
    if (err.code == ERR_MISSING) return false;
    if (system("command -v nats-server >/dev/null") == 0) return true;
    printf("skip: nats-server is not installed\n");
    return false;
}

int main(void) {
#define BUS_TEST(f) cmocka_unit_test_setup_teardown(f, bus_setup, bus_teardown)
#define NATS_TEST(f)                                                                               \
    { "nats: " #f, f, nats_setup, bus_teardown, NULL }
    const struct CMUnitTest tests[] = {
        BUS_TEST(messages_reach_subscribers),
        BUS_TEST(items_stay_until_they_are_acknowledged),
        BUS_TEST(items_of_a_lost_member_return),
        BUS_TEST(consumers_share_a_queue),
        BUS_TEST(messages_wait_while_a_reply_is_awaited),
        BUS_TEST(large_messages_and_limits),
        BUS_TEST(a_wake_ends_a_wait),
        BUS_TEST(wrong_bytes_end_only_their_connection),
        BUS_TEST(the_end_of_the_hub_is_an_error),
    };
    const struct CMUnitTest nats_tests[] = {
        NATS_TEST(messages_reach_subscribers), NATS_TEST(items_stay_until_they_are_acknowledged),
        NATS_TEST(consumers_share_a_queue),    NATS_TEST(messages_wait_while_a_reply_is_awaited),
        NATS_TEST(large_messages_and_limits),  NATS_TEST(a_wake_ends_a_wait),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (!nats_is_installed()) return failed;
    if (!mkdtemp(server_folder)) return 1;
    failed += cmocka_run_group_tests(nats_tests, NULL, NULL);
    tree_delete(server_folder);
    return failed;
}
