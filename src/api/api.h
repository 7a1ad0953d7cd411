/*
 * api: the HTTP APIs of the server, one file each: OpenAI's, vLLM's, llama.cpp's and Ollama's, and
 * Shoal's native ones. Each is a module of the server (serve/server.h).
 */
#ifndef SHOAL_API_H
#define SHOAL_API_H

#include <signal.h>

struct server;
struct server_module;
/* All modules; ends with a NULL. */
extern const struct server_module *const api_modules[];

/* Serves the process that started this one as a client of the MCP server, over stdin and stdout,
 * until stdin ends or one of these blocked signals arrives: `attend` of struct serve_options. */
void mcp_stdio_attend(struct server *s, const sigset_t *signals);

#endif
