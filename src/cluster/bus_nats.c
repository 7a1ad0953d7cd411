/*
 * bus_nats: a bus over NATS with JetStream.
 *
 * Messages are core NATS. Queues are subjects of one JetStream stream with limits: items are kept
 * for STREAM_SECONDS, and each queue has one durable pull consumer with acknowledgements. Work
 * queues with WorkQueue retention are not used, because a replica that restarts keeps items that
 * were acknowledged. The stream has three replicas if the cluster has three
 * servers. Errors that a new leader causes are repeated for RETRY_SECONDS.
 *
 * libnats is loaded with dlopen at its first use, and the program is built without this backend if
 * its header is missing. Threads: libnats calls message_arrived in its own threads, which only adds
 * to the inbox.
 */
#define _GNU_SOURCE
#include "cluster/bus_backend.h"

#if __has_include(<nats/nats.h>)

#include <dlfcn.h>
#include <nats/nats.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SUBSCRIPTIONS = 64, MAX_ITEMS = 4096, FETCH_MS = 20, INBOX_BYTES = 256 << 20 };
static const char STREAM[] = "shoal", QUEUES[] = "shoal.queue.", SUBJECTS[] = "shoal.message.";
static const double RETRY_SECONDS = 60;
static const int64_t SECOND = 1000000000, STREAM_SECONDS = 3600;

#define NATS_FUNCTIONS(X)                                                                          \
    X(nats_Open)                                                                                   \
    X(natsStatus_GetText)                                                                          \
    X(natsConnection_ConnectTo)                                                                    \
    X(natsConnection_IsClosed)                                                                     \
    X(natsConnection_GetServers)                                                                   \
    X(natsConnection_GetMaxPayload)                                                                \
    X(natsConnection_Publish)                                                                      \
    X(natsConnection_Subscribe)                                                                    \
    X(natsConnection_FlushTimeout)                                                                 \
    X(natsConnection_JetStream)                                                                    \
    X(natsConnection_Destroy)                                                                      \
    X(natsSubscription_Fetch)                                                                      \
    X(natsSubscription_Destroy)                                                                    \
    X(natsMsg_GetSubject)                                                                          \
    X(natsMsg_GetData)                                                                             \
    X(natsMsg_GetDataLength)                                                                       \
    X(natsMsg_Ack)                                                                                 \
    X(natsMsg_Nak)                                                                                 \
    X(natsMsg_InProgress)                                                                          \
    X(natsMsg_Destroy)                                                                             \
    X(jsStreamConfig_Init)                                                                         \
    X(jsSubOptions_Init)                                                                           \
    X(jsPubOptions_Init)                                                                           \
    X(jsOptions_Init)                                                                              \
    X(jsCtx_Destroy)                                                                               \
    X(js_AddStream)                                                                                \
    X(js_Publish)                                                                                  \
    X(js_PullSubscribe)                                                                            \
    X(js_PurgeStream)
static struct {
#define MEMBER(name) __typeof__(&name) name;
    NATS_FUNCTIONS(MEMBER)
#undef MEMBER
} lib;
static struct error load_error;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

static void library_load(void) {
    void *so = dlopen("libnats.so.3.4", RTLD_NOW), *symbol;
    if (!so) so = dlopen("libnats.so", RTLD_NOW);
    if (!so) {
        error_set(&load_error, ERR_MISSING, "libnats is not installed (%s); install libnats3.4",
                  dlerror());
        return;
    }
#define LOAD(name)                                                                                 \
    if (!(symbol = dlsym(so, #name))) {                                                            \
        error_set(&load_error, ERR_MISSING, "this libnats has no '%s'; install a newer one",       \
                  #name);                                                                          \
        return;                                                                                    \
    }                                                                                              \
    memcpy(&lib.name, &symbol, sizeof symbol);
    NATS_FUNCTIONS(LOAD)
    lib.nats_Open(-1);
}

struct arrived {
    struct arrived *next;
    natsMsg *message;
};
struct queue {
    char name[BUS_NAME_MAX];
    natsSubscription *subscription;
    int limit, held;
};
struct item {
    natsMsg *message; /* NULL: free */
    int queue;
};
struct nats_bus {
    natsConnection *connection;
    jsCtx *jetstream;
    char *address;
    natsSubscription *subscriptions[MAX_SUBSCRIPTIONS];
    int n_subscriptions;
    struct queue queues[MAX_SUBSCRIPTIONS];
    int n_queues, turn;
    struct item items[MAX_ITEMS];
    char subject[BUS_NAME_MAX]; /* subject of the last message */
    natsMsg *given;             /* a message without an item, until the next one */

    pthread_mutex_t lock; /* protects the inbox and `woken` */
    pthread_cond_t changed;
    bool woken;
    struct arrived *first, **last;
    size_t bytes;
};

static int nats_fail(const struct nats_bus *b, natsStatus status, struct error *err) {
    return error_set(err, status == NATS_NOT_FOUND ? ERR_MISSING : ERR_IO, "the bus '%s': %s",
                     b->address, lib.natsStatus_GetText(status));
}

/* Whether to repeat an operation; waits a little before. */
static bool retry(const struct nats_bus *b, natsStatus status, double since) {
    if (status == NATS_OK || status == NATS_NOT_FOUND || status == NATS_INVALID_ARG ||
        lib.natsConnection_IsClosed(b->connection) || clock_now() - since > RETRY_SECONDS)
        return false;
    nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
    return true;
}

/* messages */

static void message_arrived(natsConnection *c, natsSubscription *s, natsMsg *m, void *ctx) {
    struct nats_bus *b = ctx;
    size_t n = (size_t)lib.natsMsg_GetDataLength(m);
    (void)c;
    (void)s;
    pthread_mutex_lock(&b->lock);
    bool full = b->bytes + n > INBOX_BYTES; // the member does not read: the message is dropped
    if (!full) {
        struct arrived *a = xcalloc(1, sizeof *a);
        a->message = m;
        *b->last = a;
        b->last = &a->next;
        b->bytes += n;
        pthread_cond_signal(&b->changed);
    }
    pthread_mutex_unlock(&b->lock);
    if (full) lib.natsMsg_Destroy(m);
}

static int nats_subscribe(void *ctx, const char *subject, struct error *err) {
    struct nats_bus *b = ctx;
    size_t n = strlen(subject);
    bool pattern = n > 1 && subject[n - 1] == '*';
    if (b->n_subscriptions == MAX_SUBSCRIPTIONS)
        return error_set(err, ERR_MEMORY, "the bus has too many subscriptions");
    char *name = xasprintf("%s%.*s%s", SUBJECTS, (int)(n - pattern), subject, pattern ? ">" : "");
    natsStatus s = lib.natsConnection_Subscribe(&b->subscriptions[b->n_subscriptions],
                                                b->connection, name, message_arrived, b);
    free(name);
    if (s != NATS_OK) return nats_fail(b, s, err);
    b->n_subscriptions++;
    return OK;
}

static int length_check(const struct nats_bus *b, size_t len, struct error *err) {
    int64_t most = lib.natsConnection_GetMaxPayload(b->connection);
    if (most <= 0 || (int64_t)len <= most) return OK;
    return error_set(err, ERR_MEMORY,
                     "a message of %zu bytes is too long for the server; set max_payload in its "
                     "configuration to 8MB",
                     len);
}

static int nats_publish(void *ctx, const char *subject, const void *data, size_t len,
                        struct error *err) {
    struct nats_bus *b = ctx;
    if (length_check(b, len, err) != OK) return err->code;
    char *name = xasprintf("%s%s", SUBJECTS, subject);
    natsStatus s = lib.natsConnection_Publish(b->connection, name, data, (int)len);
    free(name);
    return s == NATS_OK ? OK : nats_fail(b, s, err);
}

/* queues */

static int nats_consume(void *ctx, const char *queue, int limit, struct error *err) {
    struct nats_bus *b = ctx;
    jsSubOptions o;
    natsStatus s;
    if (b->n_queues == MAX_SUBSCRIPTIONS)
        return error_set(err, ERR_MEMORY, "the bus has too many queues");
    struct queue *q = &b->queues[b->n_queues];
    *q = (struct queue){.limit = limit};
    memcpy(q->name, queue, strlen(queue) + 1);
    lib.jsSubOptions_Init(&o);
    o.Stream = STREAM;
    o.Config.AckPolicy = js_AckExplicit;
    o.Config.AckWait = BUS_ACK_SECONDS * SECOND;
    o.Config.InactiveThreshold = STREAM_SECONDS * SECOND; // then the server deletes the consumer
    o.Config.MaxAckPending = MAX_ITEMS; // for all members together; each has its own limit
    char *subject = xasprintf("%s%s", QUEUES, queue), *durable = xstrdup(queue);
    for (char *p = durable; *p; p++)
        if (*p == '.') *p = '_';
    double since = clock_now();
    do s = lib.js_PullSubscribe(&q->subscription, b->jetstream, subject, durable, NULL, &o, NULL);
    while (retry(b, s, since));
    free(subject);
    free(durable);
    if (s != NATS_OK) return nats_fail(b, s, err);
    b->n_queues++;
    return OK;
}

static int nats_enqueue(void *ctx, const char *queue, const char *id, const void *data, size_t len,
                        struct error *err) {
    struct nats_bus *b = ctx;
    jsPubOptions o;
    natsStatus s;
    if (length_check(b, len, err) != OK) return err->code;
    char *subject = xasprintf("%s%s", QUEUES, queue), *unique = xasprintf("%s %s", queue, id);
    lib.jsPubOptions_Init(&o);
    o.MsgId = unique; // so that a repetition is stored once
    double since = clock_now();
    do s = lib.js_Publish(NULL, b->jetstream, subject, data, (int)len, &o, NULL);
    while (retry(b, s, since));
    free(subject);
    free(unique);
    return s == NATS_OK ? OK : nats_fail(b, s, err);
}

static int nats_purge(void *ctx, const char *queue, struct error *err) {
    struct nats_bus *b = ctx;
    jsOptions o;
    natsStatus s;
    char *subject = xasprintf("%s%s", QUEUES, queue);
    lib.jsOptions_Init(&o);
    o.Stream.Purge.Subject = subject;
    double since = clock_now();
    do s = lib.js_PurgeStream(b->jetstream, STREAM, &o, NULL);
    while (retry(b, s, since));
    free(subject);
    return s == NATS_OK ? OK : nats_fail(b, s, err);
}

/* Takes an item of the queue, if there is one within the milliseconds. */
static bool queue_fetch(struct nats_bus *b, int queue, int64_t milliseconds,
                        struct bus_message *out) {
    struct queue *q = &b->queues[queue];
    natsMsgList list = {0};
    uint64_t at = 0;
    while (at < MAX_ITEMS && b->items[at].message) at++;
    if (at == MAX_ITEMS ||
        lib.natsSubscription_Fetch(&list, q->subscription, 1, milliseconds, NULL) != NATS_OK ||
        list.Count == 0)
        return false;
    natsMsg *m = list.Msgs[0];
    free(list.Msgs); // the list's array is malloc'ed; the message is kept
    b->items[at] = (struct item){.message = m, .queue = queue};
    q->held++;
    *out = (struct bus_message){q->name, (const uint8_t *)lib.natsMsg_GetData(m),
                                (size_t)lib.natsMsg_GetDataLength(m), at + 1};
    return true;
}

static void nats_wake(void *ctx) {
    struct nats_bus *b = ctx;
    pthread_mutex_lock(&b->lock);
    b->woken = true;
    pthread_cond_signal(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

/* Whether nats_wake was called since the last call. */
static bool wake_clear(struct nats_bus *b) {
    pthread_mutex_lock(&b->lock);
    bool woken = b->woken;
    b->woken = false;
    pthread_mutex_unlock(&b->lock);
    return woken;
}

/* Takes a message of the inbox; waits for at most `seconds`. */
static bool inbox_take(struct nats_bus *b, double seconds, struct bus_message *out) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t at = until.tv_nsec + (int64_t)(seconds * 1e9);
    until.tv_sec += at / SECOND;
    until.tv_nsec = at % SECOND;
    pthread_mutex_lock(&b->lock);
    if (!b->first && !b->woken && seconds > 0)
        pthread_cond_timedwait(&b->changed, &b->lock, &until);
    struct arrived *a = b->first;
    if (a) {
        b->first = a->next;
        if (!b->first) b->last = &b->first;
        b->bytes -= (size_t)lib.natsMsg_GetDataLength(a->message);
    }
    pthread_mutex_unlock(&b->lock);
    if (!a) return false;
    b->given = a->message;
    free(a);
    snprintf(b->subject, sizeof b->subject, "%s",
             lib.natsMsg_GetSubject(b->given) + strlen(SUBJECTS));
    *out = (struct bus_message){b->subject, (const uint8_t *)lib.natsMsg_GetData(b->given),
                                (size_t)lib.natsMsg_GetDataLength(b->given), 0};
    return true;
}

/* The next queue of which another item may be taken; -1: all are at their limits. */
static int queue_next(struct nats_bus *b) {
    for (int i = 0; i < b->n_queues; i++) {
        int k = (b->turn + i) % b->n_queues;
        if (b->queues[k].held >= b->queues[k].limit) continue;
        b->turn = k + 1;
        return k;
    }
    return -1;
}

static int nats_receive(void *ctx, double seconds, struct bus_message *out, struct error *err) {
    struct nats_bus *b = ctx;
    double until = clock_now() + seconds, left;
    if (b->given) lib.natsMsg_Destroy(b->given);
    b->given = NULL;
    do {
        left = MAX(until - clock_now(), 0);
        int queue = queue_next(b);
        if (inbox_take(b, queue < 0 ? left : 0, out)) return 1;
        int64_t wait = MIN((int64_t)(left * 1000) + 1, FETCH_MS);
        if (queue >= 0 && queue_fetch(b, queue, wait, out)) return 1;
        if (lib.natsConnection_IsClosed(b->connection))
            return error_set(err, ERR_IO, "the bus '%s' is closed", b->address);
    } while (left > 0 && !wake_clear(b));
    return 0;
}

static struct item *item_of(struct nats_bus *b, uint64_t item) {
    return item >= 1 && item <= MAX_ITEMS && b->items[item - 1].message ? &b->items[item - 1]
                                                                        : NULL;
}

static int item_settle(struct nats_bus *b, uint64_t item,
                       natsStatus (*settle)(natsMsg *, jsOptions *), struct error *err) {
    struct item *i = item_of(b, item);
    if (!i) return OK;
    natsStatus s = settle(i->message, NULL);
    lib.natsMsg_Destroy(i->message);
    b->queues[i->queue].held--;
    i->message = NULL;
    return s == NATS_OK ? OK : nats_fail(b, s, err);
}

static int nats_ack(void *ctx, uint64_t item, struct error *err) {
    return item_settle(ctx, item, lib.natsMsg_Ack, err);
}

static int nats_nak(void *ctx, uint64_t item, struct error *err) {
    return item_settle(ctx, item, lib.natsMsg_Nak, err);
}

static int nats_working(void *ctx, uint64_t item, struct error *err) {
    struct nats_bus *b = ctx;
    struct item *i = item_of(b, item);
    natsStatus s = i ? lib.natsMsg_InProgress(i->message, NULL) : NATS_OK;
    return s == NATS_OK ? OK : nats_fail(b, s, err);
}

/* open and close */

static void nats_close(void *ctx) {
    struct nats_bus *b = ctx;
    if (b->connection) lib.natsConnection_FlushTimeout(b->connection, 1000);
    for (int i = 0; i < MAX_ITEMS; i++)
        if (b->items[i].message) lib.natsMsg_Destroy(b->items[i].message);
    for (int i = 0; i < b->n_subscriptions; i++) lib.natsSubscription_Destroy(b->subscriptions[i]);
    for (int i = 0; i < b->n_queues; i++) lib.natsSubscription_Destroy(b->queues[i].subscription);
    if (b->jetstream) lib.jsCtx_Destroy(b->jetstream);
    if (b->connection) lib.natsConnection_Destroy(b->connection);
    if (b->given) lib.natsMsg_Destroy(b->given);
    while (b->first) {
        struct arrived *a = b->first;
        b->first = a->next;
        lib.natsMsg_Destroy(a->message);
        free(a);
    }
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->changed);
    free(b->address);
    free(b);
}

static int stream_open(struct nats_bus *b, struct error *err) {
    jsStreamConfig o;
    char *subjects = xasprintf("%s>", QUEUES), **servers = NULL;
    const char *list[] = {subjects};
    int n = 0;
    natsStatus s;
    if (lib.natsConnection_GetServers(b->connection, &servers, &n) == NATS_OK) {
        for (int i = 0; i < n; i++) free(servers[i]);
        free(servers);
    }
    lib.jsStreamConfig_Init(&o);
    o.Name = STREAM;
    o.Subjects = list;
    o.SubjectsLen = 1;
    o.Retention = js_LimitsPolicy;
    o.MaxAge = STREAM_SECONDS * SECOND;
    o.MaxBytes = BUS_QUEUE_BYTES;
    o.Replicas = n >= 3 ? 3 : 1;
    double since = clock_now();
    jsErrCode code = 0;
    do s = lib.js_AddStream(NULL, b->jetstream, &o, NULL, &code);
    while (code != JSStreamNameExistErr && retry(b, s, since));
    free(subjects);
    return s == NATS_OK || code == JSStreamNameExistErr ? OK : nats_fail(b, s, err);
}

static void *nats_open(const char *address, char **joined, struct error *err) {
    pthread_once(&load_once, library_load);
    if (load_error.code) {
        *err = load_error;
        return NULL;
    }
    struct nats_bus *b = xcalloc(1, sizeof *b);
    b->address = xstrdup(address);
    b->last = &b->first;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    natsStatus s = lib.natsConnection_ConnectTo(&b->connection, address);
    if (s == NATS_OK) s = lib.natsConnection_JetStream(&b->jetstream, b->connection, NULL);
    int rc = s == NATS_OK ? stream_open(b, err) : nats_fail(b, s, err);
    if (rc == OK) {
        *joined = xstrdup(address);
        return b;
    }
    nats_close(b);
    return NULL;
}

#else

static void *nats_open(const char *address, char **joined, struct error *err) {
    (void)joined;
    error_set(err, ERR_MISSING,
              "'%s': this program was built without NATS; install libnats-dev and build it again",
              address);
    return NULL;
}
#define nats_close NULL
#define nats_subscribe NULL
#define nats_consume NULL
#define nats_publish NULL
#define nats_enqueue NULL
#define nats_purge NULL
#define nats_receive NULL
#define nats_ack NULL
#define nats_nak NULL
#define nats_working NULL
#define nats_wake NULL

#endif

const struct bus_backend bus_nats = {nats_open,    nats_close,   nats_subscribe, nats_consume,
                                     nats_publish, nats_enqueue, nats_purge,     nats_receive,
                                     nats_ack,     nats_nak,     nats_working,   nats_wake};
