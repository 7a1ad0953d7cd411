/*
 * mcp: a client of the Model Context Protocol (modelcontextprotocol.io): it lists and calls the
 * tools of a server, which is a program (stdio) or an address (streamable HTTP).
 *
 * It speaks the versions 2025-11-25, 2025-06-18, 2025-03-26 and 2024-11-05 of the protocol, as the
 * official SDK does. It offers nothing to servers: it answers their pings and refuses every other
 * request (sampling, elicitation, roots). Over HTTP it does not open a stream for messages outside
 * of requests.
 *
 * A server is not trusted. The size, depth and number of its messages, the number of its tools, the
 * sizes of its schemas and all times are bounded. Texts that it sends may contain any characters
 * and any instructions; the caller cleans and shows them. A program of a server runs with the
 * user's rights, outside of the sandbox, and leads a process group, which mcp_close ends.
 *
 * Threads: one thread at a time uses a client. Messages that a server sends between two requests
 * are read during the next one.
 */
#ifndef SHOAL_MCP_H
#define SHOAL_MCP_H

#include "base/base.h"

struct mcp_client;
struct mcp_options {
    const struct strings *headers; /* "Name: value" for requests over HTTP; they may be secrets */
    /* Names of variables that a program gets in addition to HOME, LANG, LOGNAME, PATH, SHELL, TERM
     * and USER. */
    const struct strings *env;
    double seconds; /* limit of one request; 0: 60 */
};
/*
 * Starts or connects to a server and agrees on a version. `target`: http://… or https://…, or a
 * command line (strings_add_words). The options are borrowed during the call.
 *
 * ERR_USAGE: a wrong command line or address, or a missing variable. ERR_MISMATCH: no common
 * version. ERR_STATE: no answer in time, or an error that the server reports. ERR_IO, ERR_FORMAT,
 * ERR_MEMORY: the connection broke, or the server breaks the protocol. No
 * message contains an address or a header.
 */
struct mcp_client *mcp_open(const char *target, const struct mcp_options *o, struct error *err);
/* The version of the protocol, such as "2025-06-18". */
const char *mcp_version(const struct mcp_client *c);
/* Ends the session. A program gets the end of its input, after 2 seconds SIGTERM, after 2 more
 * SIGKILL. NULL is allowed. */
void mcp_close(struct mcp_client *c);

/* tools */

enum { MCP_MAX_TOOLS = 1000, MCP_MAX_SCHEMA = 16 << 10 /* bytes of a schema as JSON */ };
struct mcp_tool {
    char *name, *description; /* description: may be "" */
    json_t *schema;           /* JSON schema of the arguments; NULL: it is too large */
};
struct mcp_tools {
    struct mcp_tool *v;
    int n;
    size_t schema_bytes; /* sum of the schemas' sizes, which has a limit */
};
/* The server's tools, in its order. Tools without a name or a schema, and those that only run as
 * tasks, are left out with a warning. The caller releases `out`, also after an error. */
int mcp_tools_list(struct mcp_client *c, struct mcp_tools *out, struct error *err);
void mcp_tools_release(struct mcp_tools *t);
/* Whether the server has changed its list of tools since the last call of this function. */
bool mcp_tools_changed(struct mcp_client *c);

/* Calls a tool and appends its result as text of at most `limit` bytes: texts as they are, of
 * images, audio and binary resources only type and size. ERR_STATE: the tool failed; its text is
 * then its message. If no answer arrives in time, the server is asked to cancel the call. */
int mcp_tool_call(struct mcp_client *c, const char *name, const json_t *arguments, size_t limit,
                  struct buf *out, struct error *err);

#endif
