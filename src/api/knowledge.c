/*
 * knowledge: search in the knowledge base of --knowledge, by words (memory/memory.h). The file may
 * change while the server runs; 'shoal knowledge' adds and removes documents.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "memory/memory.h"
#include "serve/async_reply.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_QUERY_BYTES = 4096,
    DEFAULT_HITS = 5,
    MAX_HITS = 50,
    HIT_BYTES = 64 << 10, /* bytes of a hit, as JSON tree and as text */
};

struct search {
    const char *path;
    char *query;
    int64_t limit;
};

static json_t *search_run(struct async_reply *l, void *ctx, struct error *err) {
    const struct search *q = ctx;
    const struct knowledge_query query = {
        .text = q->query, .top = (int)q->limit, .threshold = KNOWLEDGE_TOOL_THRESHOLD};
    struct knowledge *k = knowledge_open(q->path, false, err);
    json_t *hits = k ? knowledge_search(k, &query, err) : NULL;
    (void)l;
    knowledge_close(k);
    return hits ? json_pack("{s:o}", "hits", hits) : NULL;
}

static void search_free(void *ctx) {
    struct search *q = ctx;
    free(q->query);
    free(q);
}

/* ?query&limit */
static void search_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    const char *query = exchange_query(x, "query");
    int64_t limit = DEFAULT_HITS;
    if (!s->options->knowledge) {
        api_fail(x, 404, NULL, NULL, "no_knowledge",
                 "this server has no knowledge base; start it with --knowledge DB");
        return;
    }
    if (!query || !*query || strlen(query) > MAX_QUERY_BYTES) {
        api_fail(x, 400, NULL, "query", NULL, "'query' must be a text of 1 to %d bytes",
                 MAX_QUERY_BYTES);
        return;
    }
    if (query_read_int(x, "limit", 1, MAX_HITS, &limit, &err) != OK ||
        request_memory_reserve_list(s, x, limit, HIT_BYTES, "limit", &err) != OK) {
        api_fail_error(x, &err, "limit");
        return;
    }
    struct search *q = xcalloc(1, sizeof *q);
    *q = (struct search){s->options->knowledge, xstrdup(query), limit};
    async_reply_start(s, x, false, &(struct async_reply_work){search_run, search_free, q});
}

static const struct http_route routes[] = {
    {"GET", "/v1/knowledge", SCOPE_CHAT, search_handle},
    {0},
};

/* Reports a missing or damaged file at the start. */
static int module_open(struct server *s, struct error *err) {
    if (!s->options->knowledge) return OK;
    struct knowledge *k = knowledge_open(s->options->knowledge, false, err);
    knowledge_close(k);
    return k ? OK : error_wrap(err, "--knowledge");
}

const struct server_module knowledge_module = {.routes = routes, .open = module_open};
