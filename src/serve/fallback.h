/*
 * fallback: chains of models. A request whose model is the name of a chain is answered by the first
 * link that can: a model of this server (an adapter, a base, a mix, a team, an agent), a remote
 * server with OpenAI's API, or a fixed reply.
 *
 * A chain works on whole requests. fallback_handle takes the request before its API sees it, and a
 * session (fallback_session.c) sends it to one link after the other, each time as a call of this
 * process (http_call_new) with the link's model in place of the chain's. So every API and every
 * field works as if the client had named the link's model. The call for a remote or fixed link is
 * read by its API too, and ends in fallback_generation_start (fallback_remote.c), which generates
 * the reply elsewhere.
 *
 * Each link but a fixed reply has a circuit (circuit.h). A thread per remote link probes the server
 * while its circuit is not closed; the link of a local model is probed by a request. The key of a
 * server is in no reply, message or metric; its address is in the log, at the start.
 *
 * Threads: any thread, except for fallbacks_open and fallbacks_close.
 */
#ifndef SHOAL_SERVE_FALLBACK_H
#define SHOAL_SERVE_FALLBACK_H

#include "http/http.h"
#include "remote/remote.h"
#include "serve/circuit.h"
#include "serve/generation.h"

#include <pthread.h>

/* chain files (fallback_settings.c) */

enum { FALLBACK_MAX_LINKS = 16, FALLBACK_MAX_NAME = 128, FALLBACK_MAX_REPLY = 16 << 10 };
struct fallback_link_settings {
    char *name;              /* for replies and metrics; by default the model, or "reply" */
    char *model;             /* a model of this server, or of the server `url` */
    char *url, *api_key_env; /* a remote server, and the variable with its key */
    char *reply;             /* a fixed reply */
    double timeout; /* seconds until the reply; of a stream, between its parts; more than 0 */
    int64_t failure_threshold; /* see circuit.h */
    double cooldown;
};
struct fallback_settings {
    double timeout; /* seconds for all links together */
    struct fallback_link_settings *links;
    int n;
};
/* ERR_FORMAT and others, with the line: unknown keys, wrong values, a link that is not one of the
 * three kinds, a name that is taken, links after a fixed reply. */
int fallback_settings_read(struct fallback_settings *s, const char *path, struct error *err);
int fallback_settings_parse(struct fallback_settings *s, const char *text, size_t len,
                            const char *path, struct error *err);
void fallback_settings_release(struct fallback_settings *s); /* harmless after an error */
/* Whether a chain or a link may have the name, which is in headers and labels. */
bool fallback_name_is_valid(const char *name);

/* chains (fallback.c) */

struct fallback_chain;
struct fallback_link {
    const struct fallback_chain *chain;
    const struct fallback_link_settings *settings;
    struct remote *remote; /* NULL: a model of this server, or a fixed reply */
    struct metric *answers, *failures, *state;
    pthread_mutex_t lock;   /* protects `circuit` */
    pthread_cond_t changed; /* the circuit has opened, or the server ends */
    struct circuit circuit;
    atomic_bool quit; /* ends the thread of the probes, and a probe that runs */
    pthread_t thread; /* of the probes, if there is a remote server */
};
struct fallback_chain {
    char *name;
    struct fallback_settings settings;
    struct fallback_link *links; /* [settings.n] */
};
struct fallbacks {
    struct fallback_chain *v;
    int n;
    int n_sessions; /* atomic */
};
/* The result of asking a link's circuit to admit a request. */
enum link_permit { LINK_REFUSED, LINK_ADMITTED, LINK_PROBE };
enum link_permit fallback_link_ask(struct fallback_link *l);
/* Reports the result of an admitted request; `why` is logged if the circuit opens. A fixed reply
 * has no circuit, and is always admitted. */
enum link_result { LINK_ANSWERED, LINK_FAILED, LINK_NO_RESULT };
void fallback_link_report(struct fallback_link *l, enum link_permit permit, enum link_result result,
                          const char *why);

/* sessions (fallback_session.c) */

enum { FALLBACK_SESSIONS_MAX = 1024 };
/* Answers a request from a chain; takes over `body`, the parsed body. */
void fallback_session_start(struct server *s, struct exchange *x, struct fallback_chain *c,
                            json_t *body);
/* The attempt that a call is a part of; NULL: the exchange is another request. */
struct fallback_attempt;
struct fallback_attempt *fallback_attempt_of(const struct exchange *x);
const struct fallback_link *fallback_attempt_link(const struct fallback_attempt *a);
/* True once no session waits for the attempt. */
const atomic_bool *fallback_attempt_cancelled(const struct fallback_attempt *a);
/* Sets that the attempt's failure, which is reported next, is one of the link's server. */
void fallback_attempt_blame(struct fallback_attempt *a);

#endif
