/*
 * server: the state that the APIs share: the model and its batch, adapters by name, access control
 * and metrics. serve_start creates one struct, and every handler borrows it; `lock` guards the
 * fields that change. If there are several base models, each one has a struct (base_pool.h).
 */
#ifndef SHOAL_SERVE_SERVER_H
#define SHOAL_SERVE_SERVER_H

#include "agent/agent.h"
#include "http/http.h"
#include "ops/ops.h"
#include "serve/base_pool.h"
#include "serve/batcher.h"
#include "serve/grammar_cache.h"
#include "serve/memory_budget.h"
#include "serve/serve.h"
#include "swarm/swarm.h"

#include <pthread.h>

/* Flags of a route: the scope that it requires of its caller (auth.c), and the thread that runs its
 * handler (enum http_dispatch). METRICS is open to local clients, otherwise it requires CHAT. A
 * ROUTE_SLOW handler may block until the batch has computed; ROUTE_OWN_THREAD and ROUTE_IO_THREAD
 * reply even while all workers are busy. The context of a ROUTE_BASE handler is the server of the
 * base that the request names (base_pool.h), of other handlers that of the default base. */
enum route_scope {
    SCOPE_OPEN = 0,
    SCOPE_CHAT = 1,
    SCOPE_JOBS = 2,
    SCOPE_ADMIN = 4,
    SCOPE_METRICS = 8,
    ROUTE_SLOW = 16,
    ROUTE_OWN_THREAD = 32,
    ROUTE_IO_THREAD = 64,
    ROUTE_BASE = 128
};

/* An adapter that requests can name. */
struct adapter_entry {
    char *name, *path;
    int id;               /* vLLM's lora_int_id; llama.cpp's id, which starts at 0 */
    int64_t created;      /* unix seconds */
    double scale;         /* used in requests that name no model: see llamacpp.c */
    bool is_base;         /* the base model under another name, with its own settings; no adapter */
    json_t *derived_spec; /* the specification from /api/create (api/ollama_models.c); or NULL */
};
/* A team, which requests name as team:NAME. */
struct team_entry {
    char *name;
    struct team team;
};

/* An agent, which requests name as agent:NAME. */
struct agent_entry {
    char *name;
    struct agent_settings settings;
    struct adapter_mix mix;
    struct team team; /* for the tools ask and debate; n 0: no team */
    json_t *tools;    /* the names of its tools */
};

enum { REQUEST_TRACES_MAX = 256 };
struct server {
    const struct serve_options *options;
    struct server *front;          /* the default base; NULL: this is the default base */
    struct base_pool *bases;       /* the other bases; NULL: this is the only base */
    struct base_entry *base_entry; /* state of this base in the pool; NULL: the default base */
    struct model_size size;        /* shape and type; of the bases in the pool also the bytes */
    struct model *model;
    char *name, *path;          /* the base's id, and the path it was opened with */
    char fingerprint[HASH_LEN]; /* base, numeric class and element types */
    const struct reasoning_form *reasoning_form; /* tags of reasoning; NULL: it is not separated */
    struct engine *engine;
    struct batcher *batcher;
    struct yield *yield; /* the batchers of all bases are its foreground; of the default base */
    struct adapter_pool *pool;
    struct http *http;
    struct http_route *routes;    /* of all modules */
    bool restricts_process;       /* process_restrict was called */
    bool http_ended;              /* atomic: no request is running, and none will come */
    struct memory_budget *memory; /* budget of requests: see request_memory.c */
    size_t piece_bytes;           /* bytes of a token's text, averaged over the vocabulary */
    size_t reply_log_bytes;       /* bytes of replies that can be rated */
    size_t grammar_cache_bytes;   /* budget for compiled grammars, including those in use; a second
                                     budget of this size holds their token masks */
    int64_t started;              /* unix seconds */

    pthread_mutex_t lock;
    struct adapter_entry *adapters; /* [n_adapters] oldest first */
    int n_adapters, next_id;
    struct grammar_cache *grammars;
    uint64_t n_ids;                 /* ids generated so far */
    struct generation *generations; /* list of the running generations */
    int n_async_threads;            /* acquired by async_slot_acquire */

    struct keys *keys;
    char token[KEY_SECRET_LEN], *token_path; /* see auth.c */
    bool has_token;                          /* the token file exists */
    struct metrics *metrics;
    pthread_mutex_t
        metrics_lock; /* held from refreshing the metrics until they are written as text */
    struct metric *step_seconds, *step_tokens;
    struct alerts *alerts;
    struct strings slack_urls;
    struct ab *ab; /* experiments and feedback */

    json_t *traces[REQUEST_TRACES_MAX]; /* time per stage of the last replies; a ring */
    uint64_t n_traces;                  /* traces so far */
    int threads;

    struct jobs *jobs;
    char *jobs_store, *jobs_folder, *jobs_out;
    struct job_paths *job_paths; /* paths that jobs may read and write */
    char *job_env; /* permissions of jobs: value of the environment variable SHOAL_JOB */
    struct job_event_stream *event_streams; /* clients that stream job events */
    json_t *published;                      /* object: ids of jobs whose results are served */
    bool publishing, closing; /* publishing: atomic, the results of jobs are being published */

    struct team_entry *teams; /* [n_teams] constant after the start */
    int n_teams;
    struct agent_entry *agents; /* [n_agents] constant after the start */
    int n_agents;
    struct fallbacks *fallbacks;    /* NULL: there are none; constant after the start */
    struct auto_model *auto_model;  /* NULL: a base that is loaded on demand */
    struct adapter **kept_adapters; /* [n_kept_adapters] those of teams and agents */
    int n_kept_adapters;

    pthread_mutex_t derived_lock; /* held while a derived model changes, in memory and on disk */

    char *backups;                /* the folder of backups */
    const char *backup_operation; /* the running operation: "backup", "check", "restore", "delete";
                                     or NULL */
    int64_t backup_done_bytes, backup_total_bytes; /* bytes copied so far, and in total */

    struct sleep_schedule *sleep_schedule; /* see api/sleep.c; NULL: no --sleep-at */

    struct mcp *mcp; /* sessions and calls of the MCP server (api/mcp.c) */
};

/* A part of the server outside its core: its routes, and hooks into the server's life cycle. Unused
 * hooks are NULL. api/ has one module for each API. */
struct server_module {
    const struct http_route *routes;                     /* ends with a NULL method */
    int (*restore)(struct server *s, struct error *err); /* called before the state is opened */
    void (*load)(struct server *s); /* called after the adapters of the options are loaded */
    int (*open)(struct server *s, struct error *err); /* called last, before HTTP starts */
    void (*close)(struct server *s);                  /* called after HTTP has ended */
    void (*update_metrics)(struct server *s);         /* updates the metrics before a read */
    /* The sink for the body of an upload; NULL: the body is kept in memory. */
    struct body_sink *(*body_sink)(struct server *s, struct exchange *x,
                                   const struct http_route *r);
    /* Answers a request for a base that is not loaded, if it need not be loaded for it; false: it
     * must. */
    bool (*answer_unloaded)(struct server *base, struct exchange *x);
    /* Lists an adapter that a request names and that is not listed; false: the module has no
     * adapter of that name. */
    bool (*find_adapter)(struct server *s, const char *name);
    /* The name in the pool of an adapter that only the caller of a request (NULL: there is none)
     * may name, malloc'ed; NULL: the module has none. */
    char *(*own_adapter)(struct server *s, const struct exchange *x, const char *name);
};
/* The server of the default base. */
struct server *server_front(struct server *s);
/* Opens fingerprint, adapter pool and batcher of a base whose model and engine are set.
 * server_base_close also closes a base that is open in part. */
int server_base_open(struct server *s, const struct engine_options *eo, struct error *err);
void server_base_close(struct server *s);
/* The i-th module of the options, from 0; NULL if there is none. */
const struct server_module *server_module_at(const struct server *s, int i);

/* models by name */

/* The adapters that a model's name refers to. */
struct model_ref {
    char *name;  /* as in the request; replies use it as the model's name */
    char *label; /* label in the metrics: the name of a single adapter, "base", or "mix" */
    struct weighted_adapter terms[ENGINE_MIX_MAX]; /* retained */
    int n;                                         /* 0: the base */
    bool is_elsewhere; /* no model of this server: a link of a fallback chain */
    /* auto_model.h: the adapter is chosen when the prompt is known; by likelihood among the terms,
     * whose names are `candidates`. */
    bool is_auto, by_likelihood;
    struct strings candidates;
};
/* Whether a model's name is one of the base: its id, its path, --served-model-name, "" or NULL. */
bool server_name_is_base(const struct server *s, const char *model);
/* Resolves a request's model name. The base's id refers to the base; "" and NULL refer to the
 * adapters whose scale is not 0, or to the base if all scales are 0. Other names are an adapter's
 * NAME, BASE:NAME, BASE@NAME, NAME:latest, or a weighted sum of names such as a*0.7+b*0.3.
 * ERR_MISSING: no such model. */
int model_ref_resolve(struct server *s, const char *model, struct model_ref *out,
                      struct error *err);
/* Adds a term. If the adapter does not fit into memory now, the request waits (ERR_STATE). */
int model_ref_add(struct server *s, const char *name, float weight, struct model_ref *ref,
                  struct error *err);
/* Resolves llama.cpp's list [{id, scale}]. */
int model_ref_from_list(struct server *s, const json_t *list, struct model_ref *out,
                        struct error *err);
/* Sets the scales of all adapters from a list [{id, scale}]; adapters that the list omits get 0. On
 * an error no scale changes. */
int server_set_scales(struct server *s, const json_t *list, struct error *err);
void model_ref_release(struct model_ref *ref);
/* "" for a model elsewhere. Otherwise the hash of what decides the reply to a prompt, seed and
 * settings: base, adapters with their weights, numeric class, element types, in the fast class the
 * instruction set. "fp_" and twelve digits. */
enum { SYSTEM_FINGERPRINT_LEN = 16 };
void system_fingerprint(const struct server *s, const struct model_ref *ref,
                        char out[SYSTEM_FINGERPRINT_LEN]);
/* Sets the adapter or the mix of a request. */
void model_ref_apply(const struct model_ref *ref, struct engine_request *r);
/* Loads an adapter and lists it. `replace`: it may replace an adapter of that name. ERR_STATE: the
 * name is in use, or there is no room in memory now; ERR_MEMORY: the adapter is larger than the
 * pool; ERR_MISSING: the path does not exist; other codes: the adapter is invalid. */
int server_adapter_load(struct server *s, const char *name, const char *path, bool replace,
                        struct error *err);
/* Lists an adapter that requests load. ERR_STATE: the name is in use; other codes as above. */
int server_adapter_register(struct server *s, const char *name, const char *path,
                            struct error *err);
int server_adapter_unload(struct server *s, const char *name, struct error *err);
/* Serves `a` (retained), which is bound to the model, as the next version of the name. path: where
 * its files are, or will be. */
int server_adapter_publish(struct server *s, const char *name, const char *path, struct adapter *a,
                           struct error *err);
bool server_adapter_listed(struct server *s, const char *name);
/* "models/fry" → "fry", "x/y.gguf" → "y". malloc'ed. */
char *model_name_from_path(const char *path);
/* The name in "NAME=FILE", or that of the file: "x/critics.yaml" → "critics"; malloc'ed. *path: the
 * file. */
char *named_file_parse(const char *text, const char **path);
/* Opens an adapter that stays in memory until the server ends. ctx: the server. Call it during the
 * start only. */
struct adapter *server_adapter_keep(void *ctx, const char *path, struct error *err);
/* Lists a derived model (made by /api/create) and replaces the one of that name. a: its adapter
 * (retained; NULL: the base model). spec: its specification (taken over, also after an error). */
int server_derived_put(struct server *s, const char *name, const char *path, struct adapter *a,
                       json_t *spec, struct error *err);
/* A copy of a derived model's specification; NULL: the model is not derived, or does not exist. */
json_t *server_derived_spec(struct server *s, const char *name);
/* A copy of the list; server_adapters_free frees it. */
struct adapter_entry *server_adapters(struct server *s, int *n);
void server_adapters_free(struct adapter_entry *v, int n);

/* The compiled grammar of a source, from the cache if possible; borrowed until
 * server_grammar_release. kind: "json_schema", "json_object", "regex", "gbnf" or "choices" (each
 * choice ends with a NUL byte, which len counts). */
struct grammar *server_grammar(struct server *s, const char *kind, const char *text, size_t len,
                               struct error *err);
void server_grammar_release(struct server *s, struct grammar *g);

/* PREFIX and 24 letters or digits; each id is unique. */
void server_new_id(struct server *s, const char *prefix, char out[40]);

/* The id of the request's key; NULL: it has no key. */
const char *exchange_key_id(const struct exchange *x);

/* auth.c: admission of requests */

int auth_open(struct server *s, struct error *err); /* reads keys, checks options */
int auth_token_create(struct server *s,
                      struct error *err); /* creates the start-up token and its file */
void auth_close(struct server *s);        /* deletes the token's file */
/* Whether the caller of an admitted request may call routes of a scope. */
bool auth_allows(struct server *s, const struct exchange *x, int scope);
/* callbacks of http */
int auth_admit(void *ctx, struct exchange *x, const struct http_route *r);
void auth_request_done(struct server *s, const struct exchange *x);
bool auth_any_host(void *ctx);
enum http_dispatch route_dispatch(void *ctx, const struct http_route *r);

/* request_metrics.c: metrics */

void request_metrics_open(struct server *s);  /* after the batcher */
void request_metrics_watch(struct server *s); /* measures the steps of the batcher */
/* Counts prompts that were prefilled without a reply, such as those of embeddings. */
void request_metrics_add_prompts(struct server *s, const struct exchange *x,
                                 const struct model_ref *t, const struct token_ids *prompts, int n);
/* Counts tokens that a key has used outside generations. */
struct token_usage;
void request_metrics_add_tokens(struct server *s, const char *key, const struct token_usage *u);
struct generation;
void request_metrics_add_generation(const struct generation *g);
void request_metrics_add_exchange(struct server *s, const struct exchange *x);
void request_metrics_refresh(
    struct server *s); /* copies current values into the metrics, also those that modules keep */

/* teams.c: workflows of agents that are called like a model */

int teams_open(struct server *s, struct error *err); /* the teams of the options */
void teams_release(struct server *s);
/* Finds "team:NAME". NULL: the name is not a team's, or, with ERR_MISSING, that team does not
 * exist. */
const struct team_entry *team_find(const struct server *s, const char *model, struct error *err);
struct api_dialect;
struct generation_spec;
/* Answers a chat's messages. The team uses n, seed, temperature, stream and reasoning of spec.
 * Takes ownership of spec. */
void team_chat_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                     const struct team_entry *t, const json_t *body, struct generation_spec *spec);

/* agents.c: agents with tools that are called like a model */

int agents_open(struct server *s, struct error *err); /* the agents of the options */
void agents_release(struct server *s);
/* Finds "agent:NAME"; NULL as for team_find. */
const struct agent_entry *agent_find(const struct server *s, const char *model, struct error *err);
/* Sets the fields of a chat that it omits to the agent's settings. */
void agent_fields_apply(const struct agent_entry *a, json_t *body);
/* Answers a chat's messages, which spec->request_json has. The agent uses n, sampling, max_tokens,
 * stream and reasoning of spec. Takes ownership of spec. */
void agent_chat_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const struct agent_entry *a, struct generation_spec *spec);

/* fallback.c: chains of models, see fallback.h */

int fallbacks_open(struct server *s, struct error *err); /* the chains of the options */
/* Call it after HTTP and all async workers have ended. */
void fallbacks_close(struct server *s);
/* The callback `handle` of http: handles the requests to chains, and passes on the others. */
void fallback_handle(void *ctx, struct exchange *x, const struct http_route *r);
/* Whether the request is an attempt to answer a request to a chain, which alone is counted. */
bool fallback_is_part(const struct exchange *x);
/* The name of chain i; NULL: there are i or fewer. */
const char *fallback_name_at(struct server *s, int i);
/* Whether a chain has the name, and no base and no adapter. */
bool fallback_is_only(struct server *s, const char *name);

extern const struct http_route teams_routes[], agents_routes[], fallbacks_routes[],
    metrics_routes[];

/* errors */

/* Replies with an error in OpenAI's form, which vLLM's clients also read: {"error": {message, type,
 * param, code}}; below /api in Ollama's form, {"error": message}. fmt formats the message; type
 * NULL: the default for the status. */
void api_fail(struct exchange *x, int status, const char *type, const char *param, const char *code,
              const char *fmt, ...) __attribute__((format(printf, 6, 7)));
/* Replies with a struct error, whose code determines the status. */
void api_fail_error(struct exchange *x, const struct error *err, const char *param);

/* The field of the request that the message names at its begin, in quotes, such as
 * messages[0].content, copied to `out`; NULL: it names none. */
enum { API_PARAM_LEN = 128 };
const char *api_error_param(const struct error *err, char out[API_PARAM_LEN]);

/* An error as an event of a stream; plain: in Ollama's form. */
json_t *api_error_json(const struct error *err, bool plain);

/* request_memory.c: memory of a request, reserved before it is used. An exchange's reservation is
 * released when its reply is sent, a generation's with the generation. */

void request_memory_open(struct server *s);            /* call it after the model is loaded */
size_t token_piece_bytes(const struct tokenizer *tok); /* see server.piece_bytes */
/* Reserves `bytes` more for the exchange. ERR_STATE: they do not fit now; ERR_USAGE: they never
 * fit. */
int request_memory_reserve(struct server *s, struct exchange *x, size_t bytes, struct error *err);
/* Reserves memory for a list of n values of `each` bytes; an error names the field `what`, unless
 * it is NULL. */
int request_memory_reserve_list(struct server *s, struct exchange *x, int64_t n, size_t each,
                                const char *what, struct error *err);
/* Reserves `factor` bytes per byte of a file that is to be read; a missing file needs 0 bytes. */
int request_memory_reserve_file(struct server *s, struct exchange *x, const char *path,
                                size_t factor, struct error *err);
enum {
    JSON_INTEGER_BYTES = 64,
    JSON_TOKEN_TEXT_BYTES = 320,
    JSON_REAL_BYTES = 64
}; /* bytes per value: the JSON tree and its text */
/* Reserves memory for the values of the body and for tokenizing its texts, then parses the body as
 * JSON and checks the names of its fields (body_fields_check); the caller releases the result. NULL
 * on an error. */
json_t *request_memory_json(struct server *s, struct exchange *x, struct error *err);
struct generation_spec;
/* Replaces the exchange's reservation by the worst case of the generation. Sets `*what` to the
 * field that needs most of the memory; an error names it. */
int generation_reserve(struct server *s, struct exchange *x, const struct generation_spec *spec,
                       const char **what, struct error *err);
/* ERR_MEMORY: an allocation for the ids failed. */
int token_ids_check_memory(const struct token_ids *ids, struct error *err);
/* Bytes reserved for the transcript of one answer of a team or pipeline. */
enum { TRANSCRIPT_BYTES = 1 << 20 };

struct generation_spec;
#endif
