/*
 * mcp: the parts of the MCP server (Model Context Protocol): its protocol (mcp.c), its tools
 * (mcp_tools.c), and calls of them (mcp_call.c). A tool is a request to one of the server's routes,
 * which runs as a call (http/http.h) of the client's request, with the rights of its key.
 */
#ifndef SHOAL_API_MCP_H
#define SHOAL_API_MCP_H

#include "serve/server.h"

/* tools */

struct mcp_tool;
/* The tool with this name, if the server offers it and the caller of x may use it; else NULL. */
const struct mcp_tool *mcp_tool_find(struct server *s, const struct exchange *x, const char *name);
/* The tools that the caller of x may use, as in the result of tools/list. */
json_t *mcp_tools_json(struct server *s, const struct exchange *x);
/* Fills in method, path, query and body of the call of a tool. arguments: an object, or NULL.
 * stream: events of progress are requested. ERR_USAGE: an argument is unknown, missing or of the
 * wrong type. The caller releases `out` by mcp_tool_request_release, also after an error. */
struct mcp_tool_request {
    const char *method;
    char *path;
    struct http_field *query; /* ends with a NULL name; owns the values */
    struct buf body;
};
int mcp_tool_request_make(const struct mcp_tool *t, const json_t *arguments, bool stream,
                          struct mcp_tool_request *out, struct error *err);
void mcp_tool_request_release(struct mcp_tool_request *r);
/* The structured result of a tool from the reply of its route. */
json_t *mcp_tool_result(const struct mcp_tool *t, const json_t *reply);
/* The reply of a route that arrives as server-sent events. */
struct mcp_stream {
    struct buf text, reasoning; /* texts of a chat */
    json_t *reply;              /* its last state; an object with "error": the stream failed */
};
/* Handles one event; name "": without a name. Returns the text to report as progress, or NULL. */
json_t *mcp_stream_event(struct mcp_stream *m, const char *name, const json_t *data);
/* Completes and returns m->reply, which the stream keeps. */
const json_t *mcp_stream_reply(struct mcp_stream *m);
void mcp_stream_release(struct mcp_stream *m);

/* calls */

struct mcp_call;
struct mcp_calls {
    pthread_mutex_t lock;
    struct mcp_call *list; /* the running calls */
};
/* Runs a tool, and answers the client's request x with a JSON-RPC response. id: the id of the
 * request. token: for notifications of progress, which are streamed; or NULL. session: "": none. */
void mcp_call_start(struct mcp_calls *all, struct server *s, struct exchange *x,
                    const struct mcp_tool *t, const json_t *arguments, const json_t *id,
                    const json_t *token, const char *session);
/* The id of the caller's key; "" without one. */
const char *mcp_caller_key(const struct exchange *x);
/* Cancels the call of the session, and of the caller of x, whose request has this id; NULL: all.
 * Its request gets no response. */
void mcp_calls_cancel(struct mcp_calls *all, const struct exchange *x, const char *session,
                      const json_t *id);

/* {jsonrpc, id, result}; takes over the result. */
json_t *mcp_response(const json_t *id, json_t *result);

#endif
