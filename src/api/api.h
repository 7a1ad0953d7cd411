/*
 * api: what the server answers over HTTP, a file for each API: OpenAI's, vLLM's, llama.cpp's and
 * Ollama's, and Shoal's own. Each is a module of the server (serve/server.h).
 */
#ifndef SHOAL_API_H
#define SHOAL_API_H

struct server_module;
/* All of them; ends with a NULL. */
extern const struct server_module *const api_modules[];

#endif
