/*
 * server: what the APIs share — the model and its batch, adapters by name, who may do what, what is
 * counted. One struct, made by serve_run and borrowed by every handler; what changes in it is under
 * its lock.
 */
#ifndef SHOAL_SERVER_H
#define SHOAL_SERVER_H

#include "http/http.h"
#include "ops/ops.h"
#include "serve/batcher.h"
#include "serve/grammar_cache.h"
#include "serve/memory_budget.h"
#include "serve/serve.h"
#include "swarm/swarm.h"

#include <pthread.h>

/* What a route needs of its caller (auth.c); METRICS is open on this machine, else CHAT's. The
 * last three say where its handler is called (enum http_dispatch): with SLOW it waits for the
 * batch, ASIDE and INSTANT answer also while all workers are busy. */
enum route_scope {
    SCOPE_OPEN = 0,
    SCOPE_CHAT = 1,
    SCOPE_JOBS = 2,
    SCOPE_ADMIN = 4,
    SCOPE_METRICS = 8,
    ROUTE_SLOW = 16,
    ROUTE_OWN_THREAD = 32,
    ROUTE_IO_THREAD = 64
};

/* An adapter that can be asked for by its name. */
struct adapter_entry {
    char *name, *path;
    int id;          /* vLLM's lora_int_id and, from 0, llama.cpp's */
    int64_t created; /* unix seconds */
    double scale;    /* in requests that name nothing: see llamacpp.c */
    bool bare;       /* no adapter: the base under another name, for its settings */
    json_t *made;    /* what /api/create was told: see ollama_models.c; or NULL */
};
/* A team, asked for as team:NAME. */
struct team_entry {
    char *name;
    struct team team;
};

enum { REQUEST_TRACES_MAX = 256 };
struct server {
    const struct serve_options *o;
    struct model *m;
    char *name, *path; /* of the base; what its id is, and where it came from */
    char fingerprint[32];
    struct engine *e;
    struct batcher *batcher;
    struct adapter_pool *pool;
    struct http *http;
    bool http_ended;              /* atomic: no request is under way, nor will be */
    struct memory_budget *memory; /* of requests: see request_memory.c */
    size_t piece_bytes;           /* of a token's text, on average over the vocabulary */
    size_t kept_replies;          /* bytes of replies that can be rated */
    size_t kept_grammars; /* bytes of them, compiled, and again of their masks; also those in use */
    int64_t started;      /* unix seconds */

    pthread_mutex_t lock;
    struct adapter_entry *adapters; /* [n_adapters] by age */
    int n_adapters, next_id;
    struct grammar_cache *grammars;
    uint64_t drawn;                 /* ids so far */
    struct generation *generations; /* that are under way */
    int n_outside;                  /* threads of teams that talk */
    struct ask_task *askings;       /* questions in a conversation: ask_api.c */

    struct keys *keys;
    char token[KEY_SECRET_LEN], *token_path; /* see auth.c */
    bool has_token;                          /* the file is there */
    struct metrics *metrics;
    pthread_mutex_t counting; /* held from reading what stands to writing it as text */
    struct metric *step_seconds, *step_tokens;
    struct alerts *alerts;
    struct strings slacks;
    struct ab *ab; /* experiments and feedback */

    json_t *traces[REQUEST_TRACES_MAX]; /* where the time of the last replies went; a ring */
    uint64_t n_traces;                  /* so far */
    int threads;

    struct jobs *jobs;
    char *jobs_store, *jobs_folder, *jobs_out;
    struct job_paths *job_paths;       /* what they may read and write */
    char *job_child;                   /* and that as the variable of their processes */
    struct job_event_stream *watchers; /* streams of jobs' events */
    json_t *published;                 /* object: ids of jobs whose results are served */
    bool publishing, closing;

    struct team_entry *teams; /* [n_teams] from the beginning on */
    int n_teams;
    struct adapter **team_adapters; /* [n_team_adapters] that they stand on */
    int n_team_adapters;

    pthread_mutex_t making; /* held while a made model changes, here and on the disk */

    char *backups; /* their folder */
    const char
        *backup_work; /* "backup", "check", "restore", "delete", which is under way; or NULL */
    int64_t backed_up, to_backup; /* its bytes, and all of them */
};

/* A part of the server that is not its core: its routes, and what it needs of the server's life.
 * What is NULL is not needed. api/ has one for each API. */
struct server_module {
    const struct http_route *routes;                     /* ends with a NULL method */
    int (*restore)(struct server *s, struct error *err); /* before the state is opened */
    void (*load)(struct server *s);                      /* after the adapters of the options */
    int (*open)(struct server *s, struct error *err);    /* last, before HTTP */
    void (*close)(struct server *s);                     /* after HTTP */
    void (*count)(struct server *s);                     /* before metrics are read */
    /* Where the body of an upload goes; NULL: into memory. */
    struct body_sink *(*sink)(struct server *s, struct exchange *x, const struct http_route *r);
    /* Loads an adapter that is asked for and not listed; false: it knows none of that name. */
    bool (*find_adapter)(struct server *s, const char *name);
};

/* models by name */

/* What a model's name stands for. */
struct model_ref {
    char *name;  /* as it was asked for; what replies call it */
    char *label; /* of one adapter its name, "base", or "mix": what it is counted under */
    struct weighted_adapter terms[ENGINE_MIX_MAX]; /* retained */
    int n;                                         /* 0: the base */
};
/* The base's id, "", or none (NULL): the base. Else an adapter's name, by itself or after the
 * base's as BASE:NAME or BASE@NAME, or a sum of them, a*0.7+b*0.3. ERR_MISSING: there is none. */
int model_ref_resolve(struct server *s, const char *model, struct model_ref *out,
                      struct error *err);
/* The same by llama.cpp's [{id, scale}]. */
int model_ref_from_list(struct server *s, const json_t *list, struct model_ref *out,
                        struct error *err);
/* Sets scales by such a list, all or none; what it does not name is 0. */
int server_set_scales(struct server *s, const json_t *list, struct error *err);
void model_ref_release(struct model_ref *t);
/* Puts the target into a request. */
void model_ref_apply(const struct model_ref *t, struct engine_request *r);
/* Lists an adapter and loads it; `again`: in place of the one of that name. ERR_STATE: there is
 * one; ERR_MISSING: nothing at that path; else what is wrong with it. */
int server_adapter_load(struct server *s, const char *name, const char *path, bool again,
                        struct error *err);
int server_adapter_unload(struct server *s, const char *name, struct error *err);
bool server_adapter_listed(struct server *s, const char *name);
/* Puts an adapter that is in memory under a name; `path`: where one like it can be had. */
int server_adapter_publish(struct server *s, const char *name, struct adapter *a, const char *path,
                           struct error *err);
/* Lists a made model in place of what has its name: an adapter (retained; NULL: the bare base) and
 * what it was made from (taken over, also after an error). */
int server_derived_put(struct server *s, const char *name, const char *path, struct adapter *a,
                       json_t *made, struct error *err);
/* A copy of what a model was made from; NULL: it was not made, or is not there. */
json_t *server_derived_spec(struct server *s, const char *name);
/* A copy of the list; server_adapters_free frees it. */
struct adapter_entry *server_adapters(struct server *s, int *n);
void server_adapters_free(struct adapter_entry *v, int n);

/* Compiled from "json_schema", "json_object", "regex", "gbnf" or "choices" (every text with its
 * zero byte), or known already; borrowed until server_grammar_release. */
struct grammar *server_grammar(struct server *s, const char *kind, const char *text, size_t len,
                               struct error *err);
void server_grammar_release(struct server *s, struct grammar *g);

/* PREFIX and 24 letters that nobody had before. */
void server_new_id(struct server *s, const char *prefix, char out[40]);

/* The id of the key that a request came with; NULL: it came with none. */
const char *exchange_key_id(const struct exchange *x);

/* auth.c: what is admitted */

int auth_open(struct server *s, struct error *err); /* keys; what may not be without them */
int auth_token_create(struct server *s,
                      struct error *err); /* makes the start-up token and its file */
void auth_close(struct server *s);        /* takes the file away */
/* For http. */
int auth_admit(void *ctx, struct exchange *x, const struct http_route *r);
void auth_request_done(struct server *s, const struct exchange *x);
bool auth_any_host(void *ctx);
enum http_dispatch route_dispatch(void *ctx, const struct http_route *r);

/* request_metrics.c: metrics */

void request_metrics_open(struct server *s); /* after the batcher */
/* Prompts that were read and nothing generated. */
void request_metrics_add_prompts(struct server *s, const struct exchange *x,
                                 const struct model_ref *t, const struct token_ids *prompts, int n);
/* Tokens that a key has used otherwise. */
struct token_usage;
void request_metrics_add_tokens(struct server *s, const char *key, const struct token_usage *u);
struct generation;
void request_metrics_add_generation(const struct generation *g);
void request_metrics_add_exchange(struct server *s, const struct exchange *x);
void request_metrics_refresh(
    struct server *s); /* what stands now; what the metrics' owner reads aside */

/* teams.c: workflows of agents that are asked like a model */

int teams_open(struct server *s, struct error *err); /* those of the options */
void teams_release(struct server *s);
/* "team:NAME"; NULL: it is no team's. ERR_MISSING: it is, but there is none. */
const struct team_entry *team_find(const struct server *s, const char *model, struct error *err);
struct api_dialect;
struct generation_spec;
/* Answers a chat's messages: what is read of spec is n, seed, temperature, stream and thoughts.
 * Takes spec over. */
void team_chat_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                     const struct team_entry *t, const json_t *body, struct generation_spec *spec);

extern const struct http_route teams_routes[], metrics_routes[], ab_routes[], feedback_routes[];

/* errors */

/* In OpenAI's form, which vLLM's clients read too: {"error": {message, type, param, code}}, and
 * under /api in Ollama's, {"error": message}. The message is formatted; type NULL is what the
 * status says. */
void api_fail(struct exchange *x, int status, const char *type, const char *param, const char *code,
              const char *fmt, ...) __attribute__((format(printf, 6, 7)));
/* The same of an error of ours: its code says the status. */
void api_fail_error(struct exchange *x, const struct error *err, const char *param);

/* An error as a stream writes it in place of a reply; plain: in Ollama's form. */
json_t *api_error_json(const struct error *err, bool plain);

/* request_memory.c: what a request needs, reserved before it is used. An exchange's reservation is
 * given back when its reply is out, a generation's with the generation. */

void request_memory_open(struct server *s); /* after the model */
/* `bytes` more for the exchange: ERR_STATE not now, ERR_USAGE never. */
int request_memory_reserve(struct server *s, struct exchange *x, size_t bytes, struct error *err);
/* The same for a reply of n values; an error names the field. */
int request_memory_reserve_list(struct server *s, struct exchange *x, int64_t n, size_t each,
                                const char *what, struct error *err);
/* For what reading a file makes, `factor` bytes for one in it; a file that is not there needs none.
 */
int request_memory_reserve_file(struct server *s, struct exchange *x, const char *path,
                                size_t factor, struct error *err);
enum {
    JSON_INTEGER_BYTES = 64,
    JSON_TOKEN_TEXT_BYTES = 320,
    JSON_REAL_BYTES = 64
}; /* of a value, in tree and text */
/* The body as JSON, when there is memory for its values and for reading its text as tokens. */
json_t *request_memory_json(struct server *s, struct exchange *x, struct error *err);
struct generation_spec;
/* The worst case of a generation in place of what its body needed. *what: of a request that does
 * not fit, the field that most of it is for. */
int generation_reserve(struct server *s, struct exchange *x, const struct generation_spec *spec,
                       int32_t context, const char **what, struct error *err);
/* ERR_MEMORY where the ids were refused memory. */
int ids_check_memory(const struct token_ids *ids, struct error *err);
/* Of an answer that agents talk about, or an answer of the pipeline. */
enum { TRANSCRIPT_BYTES = 1 << 20 };

struct generation_spec;
#endif
