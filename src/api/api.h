/*
 * api: the HTTP APIs of the server, one file each: OpenAI's, vLLM's, llama.cpp's and Ollama's, and
 * Shoal's native ones. Each is a module of the server (serve/server.h).
 */
#ifndef SHOAL_API_H
#define SHOAL_API_H

struct server_module;
/* All modules; ends with a NULL. */
extern const struct server_module *const api_modules[];

#endif
