/*
 * remote: declarations shared by the files of the client: connections, retries and errors
 * (remote.c), single attempts (attempt.c).
 */
#ifndef SHOAL_REMOTE_INTERNAL_H
#define SHOAL_REMOTE_INTERNAL_H

#include "hub/hub.h"
#include "remote/remote.h"

#include <pthread.h>

enum { REMOTE_MAX_RESPONSE = 8 << 20 }; /* bytes of a response */

struct remote {
    char *url;   /* without '/' at its end */
    char *model; /* NULL: not known yet */
    char *key;   /* NULL: none */
    struct strings headers;
    double seconds;
    int retries;
    atomic_bool stopped;
    pthread_mutex_t lock; /* protects n_failures and last */
    int n_failures;       /* in a row */
    struct error last;    /* the last one, if n_failures > 0 */
};

bool remote_has_key(const struct remote *r, const char *text);
/* Parses a response within the limits of requests. */
json_t *remote_body_parse(const struct buf *body, struct error *err);
/* Sets the error of a response whose status is not 200; returns ERR_STATE. */
int remote_status_error(const struct remote *r, int status, const struct buf *body,
                        struct error *err);
/* Sets ERR_STATE for the error that a response reports in the form of OpenAI's API. */
int remote_reported_error(const struct remote *r, const json_t *v, struct error *err);

#endif
