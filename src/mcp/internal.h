/*
 * mcp: declarations shared by the files of the client: requests and their answers (client.c), tools
 * and results (tools.c) and the transports (stdio.c, streamable_http.c).
 */
#ifndef SHOAL_MCP_INTERNAL_H
#define SHOAL_MCP_INTERNAL_H

#include "mcp/mcp.h"

enum {
    MCP_MAX_MESSAGE = 4 << 20,   /* bytes of one message */
    MCP_MAX_EXCHANGE = 16 << 20, /* bytes of all messages until a request is answered */
};

/* messages */

/* A message and its kind. The members point into the JSON value. */
enum mcp_message_kind { MCP_INVALID, MCP_REQUEST, MCP_NOTIFICATION, MCP_RESPONSE };
struct mcp_message {
    enum mcp_message_kind kind;
    const char *method;                    /* if it is a request or notification */
    const json_t *id;                      /* if it is a request or response; may be JSON's null */
    const json_t *params, *result, *error; /* NULL if missing */
};
struct mcp_message mcp_message_read(const json_t *v);

/* Adds the tools of one answer to tools/list. ERR_FORMAT, ERR_MEMORY. */
int mcp_tools_read(const json_t *result, struct mcp_tools *out, struct error *err);
/* Appends the result of tools/call as text; returns whether the tool succeeded. */
bool mcp_result_text(const json_t *result, size_t limit, struct buf *out);

/* transports */

/* Receives a message of the server. OK: more are expected; MCP_DONE: the exchange is complete; a
 * negative error ends it. */
enum { MCP_DONE = 1 };
typedef int (*mcp_receive_fn)(void *ctx, const char *text, size_t len, struct error *err);

/* A connection to a server. Its functions return after `deadline` (clock_now) at the latest. */
struct mcp_transport {
    /* Sends a message and passes messages of the server to `receive` until the exchange is complete
     * or fails. ERR_MISSING: the server no longer knows the session; the next message begins
     * another. */
    int (*exchange)(struct mcp_transport *t, const char *text, size_t len, double deadline,
                    mcp_receive_fn receive, void *ctx, struct error *err);
    /* Sends a message that has no answer. `receive` may call it. */
    int (*post)(struct mcp_transport *t, const char *text, size_t len, double deadline,
                struct error *err);
    void (*version_set)(struct mcp_transport *t, const char *version); /* NULL: before a session */
    void (*close)(struct mcp_transport *t);
};
struct mcp_transport *mcp_stdio_open(const char *command, const struct strings *env,
                                     struct error *err);
struct mcp_transport *mcp_http_open(const char *url, const struct strings *headers);

#endif
