/*
 * generation: one request for text, from any API. Input: prompts and settings. Output: deltas or a
 * whole reply in the form of that API (its dialect).
 *
 * A generation has n completions of each prompt; each completion is one request of the batcher. The
 * text of a completion grows as tokens arrive. Text is sent only when it is final: an incomplete
 * character and a possible beginning of a stop text are held back, and reasoning and tool calls are
 * separated from content. Only the replying thread advances a completion: the thread that pulls the
 * stream, or, without a stream, a worker after all completions are done.
 *
 * Reference counts: the exchange holds one reference, and each batcher request holds one until it
 * is done.
 */
#ifndef SHOAL_SERVE_GENERATION_H
#define SHOAL_SERVE_GENERATION_H

#include "http/http.h"
#include "serve/batcher.h"
#include "serve/reasoning.h"
#include "serve/server.h"
#include "serve/tool_calls.h"

enum tool_choice {
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_AUTO,     /* the model may call: in its tool_form, or a reply that is an object */
    TOOL_CHOICE_REQUIRED, /* a grammar ensures that the reply is one call */
};

/* The reasoning of a model, in the server's reasoning_form at the beginning of a reply. The states
 * follow each other in this order; a reply that begins in another way goes from BEFORE to NONE, or
 * to CLOSED if it begins with the tag of the answer. */
enum reasoning_state {
    REASONING_NONE,   /* there is no such block, or it remains part of the content */
    REASONING_BEFORE, /* the text so far is white space and a part of the opening tag */
    REASONING_OPEN,   /* the text continues the reasoning */
    REASONING_CLOSED, /* the content follows, after newlines and its tag, which are left out */
};

struct token_usage { /* tokens */
    int64_t prompt, completion, cached;
    int64_t reasoning; /* part of `completion`: the tokens up to the closing tag */
};

/* The settings of a request. The generation owns and releases everything in it except `x`. */
struct generation_spec {
    struct token_ids *prompts;
    int n_prompts, n; /* n completions of each prompt */
    /* Not NULL: the n completions are samples, and the reply is the one that the filter selects. */
    struct sample_filter *filter;
    int n_best; /* return the n_best most probable of these; 0: all */
    int32_t max_tokens;
    int32_t loop_tokens;            /* loop_tokens of the engine requests */
    int32_t truncate_prompt_tokens; /* keep the last tokens of a prompt: n with its first BOS; -1:
                                       those that leave room for max_tokens, at most half of the
                                       context; 0: all */
    int32_t context;    /* tokens of a prompt and its completion; 0: the engine's maximum */
    bool context_shift; /* continue after the context is full: see engine_request.context_len */
    int32_t n_keep;     /* tokens of the prompt after its BOS that a context shift keeps; -1: all */
    struct sampling_params sampling; /* completion i of a prompt uses seed + i */
    struct logit_bias *bias;
    struct strings stop_texts;
    int32_t stop_ids[32];
    int n_stop_ids;
    int n_top, n_prompt_top; /* alternatives returned per token; per prompt token (vLLM's field) */
    bool logprobs, prompt_logprobs, echo, stream, include_usage;
    bool prompt_tops;      /* return the prompt's log-probabilities in vLLM's form */
    bool single_tool_call; /* at most one tool call */
    bool reasoning; /* return the reasoning: of the model, the turns of a team, or an agent's steps
                     */
    enum reasoning_state reasoning_begin; /* state of each completion before its first token */
    struct grammar *grammar;              /* released with server_grammar_release */
    enum tool_choice tool_choice;
    const struct tool_form *tool_form; /* of the calls, unless the choice is NONE */
    struct strings tool_names;         /* names of the offered tools */
    char *user; /* the request's user, or NULL: all requests of a user get the same side of an A/B
                   test */
    json_t *request_json;   /* {messages} or {prompt}, kept for ratings, or NULL */
    json_t *router;         /* the choice of the model auto, or NULL: {method, model, scores …} */
    int64_t router_tokens;  /* tokens that it prefilled */
    json_t *extra;          /* private to the dialect */
    struct exchange *x;     /* the waiting client's exchange, or NULL; borrowed */
    double render_deadline; /* clock_now after which rendering the prompts fails; 0: not begun */
    const char *bad_field;  /* the field that an error is about, or NULL */
};

/* Output of an async worker, a thread that writes the completion of a team or an agent. The lock
 * guards all fields. */
struct async_output {
    pthread_mutex_t lock;
    struct buf content, reasoning; /* not yet moved to the completion */
    json_t *steps;                 /* the same for an agent's steps; NULL: none */
    json_t *run;                   /* an agent's run at its end, without its steps; or NULL */
    struct token_usage usage;
    struct error error;         /* code OK: none; otherwise the reply fails */
    bool truncated, done, stop; /* stop: no client waits for the result */
};

struct completion {
    struct batcher_request batch_request;
    struct async_output *async; /* NULL: the batcher computes the completion */
    struct buf reasoning;       /* the model's reasoning, the team's turns or the agent's steps
                                   before the answer */
    json_t *steps, *run;        /* of an agent, as in async_output; a stream removes sent steps */
    size_t reasoning_sent;
    enum reasoning_state reasoning_state;
    size_t n_newlines;          /* newlines of the reasoning that are not yet in `reasoning` */
    int32_t n_reasoning_tokens; /* tokens of the reasoning and its tags so far */
    int prompt, index;          /* index of the prompt; index of the completion in the generation */
    struct buf text;            /* all text decoded so far */
    size_t *ends;               /* [n_decoded] byte offset in the text at which each token ends */
    int32_t n_decoded;          /* tokens decoded */
    int32_t ends_cap;
    size_t shown; /* bytes that are final: whole characters, and no beginning of a stop text */
    size_t content_begin; /* bytes of `shown` before the content: reasoning, if it is separated */
    size_t content_end;   /* end of the content in `shown`; the rest is tool calls or held back */
    size_t sent;          /* bytes sent, with those of the reasoning; used by the stream */
    struct buf chunk;     /* serialized chunk without content, a template: see openai.c */
    int32_t tokens_sent;
    json_int_t offset; /* character offset of the next token; used by the stream */
    struct tool_call *tool_calls;
    int n_tool_calls, tools_cap;
    /* Calls are parsed once: the first n_parsed_calls of `tool_calls` end before this byte of the
     * text.
     */
    size_t calls_end;
    int n_parsed_calls;
    size_t calls_begin;             /* 1 + offset of the first tag of a call; 0: none yet */
    bool done, role_sent, finished; /* role_sent, finished: the stream has sent that event */
};

struct generation;
/* A list in a reply that may be too large for a tree of JSON values: the log-probabilities of the
 * tokens `from` to `to` - 1 of a completion. The tree has a placeholder string in its place;
 * reply_serialize replaces the placeholder and builds the JSON of one item at a time. */
struct lazy_list {
    int kind;  /* defined by the dialect */
    int index; /* index of the completion */
    int32_t from, to;
    json_int_t offset; /* defined by the dialect */
    size_t flags;      /* jansson's flags for the reply */
};
/* How an API serializes a reply. The functions for streams append whole events. */
struct api_dialect {
    const char *stream_type, *keepalive; /* content type; comment that keeps an idle stream open */
    /* Writes the items of a lazy list. */
    void (*write_list)(const struct generation *g, const struct lazy_list *l, struct buf *out);
    void (*begin)(const struct generation *g, struct completion *a, struct buf *out);
    /* Appends the new part of a completion: content from a->sent to a->content_end, tool calls. */
    void (*delta)(const struct generation *g, struct completion *a, struct buf *out);
    void (*finish)(const struct generation *g, struct completion *a, struct buf *out);
    void (*end)(const struct generation *g, struct buf *out);
    json_t *(*write_reply)(const struct generation *g); /* the whole reply, without a stream */
};

struct generation {
    int refs, n_unfinished;         /* n_unfinished: completions that are not done */
    struct generation *next, *prev; /* in the server's list */
    struct server *s;
    struct exchange *x;
    const struct api_dialect *dialect;
    struct model_ref target;
    struct generation_spec spec;
    struct ab_arm arm;
    char id[40], fingerprint[SYSTEM_FINGERPRINT_LEN];
    int64_t created; /* unix seconds */
    double started_at;
    struct completion *completions;
    int n_completions;
    /* The reply consists of completions first … first + n_choices - 1: of all, or with a filter of
     * the selected one, once `selected` is true. */
    int first, n_choices;
    bool selected;  /* atomic */
    bool has_slot;  /* async_slot_acquire succeeded */
    char *key;      /* the id of the request's key; NULL: no key */
    bool cancelled; /* atomic */
    bool counted;   /* in the metrics */
    uint64_t nonce; /* random part of the placeholders for lists: no client knows it */
    struct reply_budget {
        size_t bytes; /* reserved for the reply's text */
        bool refused; /* no memory was left for more of the text: the reply fails */
    } * room;
};

/* Takes ownership of spec and t. Replies to the exchange, with an error if the generation cannot
 * start. */
void generation_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const char *id_prefix, struct model_ref *t, struct generation_spec *spec);
void generation_spec_release(struct generation_spec *spec);
/* Replies with the error, about the field spec->bad_field, and releases t and spec. */
void generation_fail(struct server *s, struct exchange *x, struct model_ref *t,
                     struct generation_spec *spec, const struct error *err);
/* The member "shoal" of a reply, which is added if it is missing; borrowed. */
json_t *reply_extension(json_t *reply);
/* Adds the choice of the model auto to a reply: {"shoal": {"router": …}}; other replies do not
 * change. */
void router_report_add(const struct generation *g, json_t *reply);
/* At most ASYNC_WORKERS_MAX threads run for teams, async replies and filters. False: there are as
 * many, and the reply is 503 with Retry-After. */
enum { ASYNC_WORKERS_MAX = 32 };
bool async_slot_acquire(struct server *s, struct exchange *x);
void async_slot_release(struct server *s);
/* Starts a generation whose completions a separate thread writes: fn(g, ctx) calls
 * generation_append for each completion, the last time with `done`. fn releases ctx; after false
 * the caller does. */
bool generation_start_async(struct server *s, struct exchange *x, const struct api_dialect *d,
                            const char *id_prefix, struct model_ref *t,
                            struct generation_spec *spec,
                            void (*fn)(struct generation *g, void *ctx), void *ctx);
/* fallback_remote.c: starts the generation of a request that is a part of a fallback chain, if its
 * link is not a model of this server; takes over the arguments as generation_start does. False: it
 * is another request. */
bool fallback_generation_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                               const char *id_prefix, struct model_ref *t,
                               struct generation_spec *spec);
/* New output of a worker. Members that are NULL or false change nothing. */
struct async_part {
    const char *content, *reasoning;
    json_t *step, *run; /* taken over */
    const struct token_usage *usage;
    const struct error *error;
    bool truncated, done;
};
void generation_append(struct generation *g, struct completion *a, const struct async_part *part);

/* for dialects */

/* Decodes the batcher's new tokens; updates the text that may be sent and the tool calls. */
void completion_advance(const struct generation *g, struct completion *a);
void completion_release(struct completion *a);
/* Completion i of the reply, and its index in the reply. */
struct completion *reply_completion(const struct generation *g, int i);
int reply_index(const struct generation *g, const struct completion *a);
/* The content of a completion. */
json_t *completion_content_json(const struct completion *a);
/* "stop", "length" or "tool_calls"; NULL while the completion is unfinished. */
const char *completion_finish_reason(const struct completion *a);
bool completion_was_cut(const struct completion *a); /* by its maximal length, or in a loop */
struct token_usage generation_usage(const struct generation *g);
/* The tokens of a completion; of a worker's, those that it has reported. */
struct token_usage completion_usage(const struct completion *a);
/* A token as OpenAI writes it: its characters, or bytes:\xe3 if it is not valid text. */
json_t *json_token_text(const struct server *s, int32_t id);
json_t *json_logprob(float v); /* -inf is -9999 */
/* The placeholder string for the list. */
json_t *lazy_list_placeholder(const struct generation *g, const struct lazy_list *l);
/* Called by the dialect's `write_list` function: appends the item v, after a comma unless it is the
 * first; takes v over. False: no memory is left for more items. */
bool lazy_list_add(const struct generation *g, const struct lazy_list *l, json_t *v,
                   struct buf *out);
/* Token i of a completion as {token, logprob, bytes, top_logprobs}. */
json_t *token_logprobs(const struct generation *g, const struct completion *a, int32_t i);
/* A dialect's `write_list` function: writes token_logprobs of the tokens `from` to `to` - 1. */
void token_logprobs_write(const struct generation *g, const struct lazy_list *l, struct buf *out);
/* The number of tokens of the completion whose text has been sent. */
int32_t completion_tokens_sent(const struct completion *a);
/* The number of tokens of a finished completion that remain, at least in part, after the cut at a
 * stop text. */
int32_t completion_tokens_kept(const struct completion *a);
/* Appends an event of a stream, "data: {…}\n\n"; takes v over. */
void sse_add(const struct generation *g, json_t *v, struct buf *out);
/* Appends a line of NDJSON; takes v over. g NULL: the line belongs to no generation. */
void ndjson_add(const struct generation *g, json_t *v, struct buf *out);

/* for request parsers: fields named as in OpenAI and vLLM are read into the spec */

uint64_t random_seed(void);
/* Reads the model reference: `model`, or llama.cpp's `lora`, or LoRAX's `parameters`. */
int model_ref_read(struct server *s, const json_t *body, struct model_ref *t, struct error *err);
/* Penalties as in Ollama and llama.cpp, on the last last_n tokens: 0 none, -1 all. */
void sampling_set_penalties(struct sampling_params *s, double repeat, double presence,
                            double frequency, int64_t last_n);
/* logit_bias as in OpenAI: {"id": bias}. */
int logit_bias_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                    struct error *err);
/* Reads stop, stop_token_ids, ignore_eos, loop_tokens. */
int stop_conditions_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                         struct error *err);
/* Reads whether a reply shifts the context (the field `shift` of body) and how many tokens it keeps
 * (the field `keep` of options). The server has the defaults. */
int context_shift_read(const struct server *s, const json_t *body, const char *shift,
                       const json_t *options, const char *keep, struct generation_spec *spec,
                       struct error *err);
/* Sets spec->grammar from a text, or from a value as JSON; kinds as for server_grammar. */
int generation_set_grammar(struct server *s, struct generation_spec *spec, const char *kind,
                           const json_t *v, struct error *err);
/* Reads tools and tool_choice. Call it after other fields have set the grammar, because a required
 * call replaces the grammar. */
int tool_choice_read(struct server *s, const json_t *body, struct generation_spec *spec,
                     struct error *err);
/* Checks the field `chat_template`, which a request may set only with
 * --trust-request-chat-template. Call it before a derived model's template is put into that field.
 */
int chat_template_check(const struct server *s, const json_t *body, struct generation_spec *spec,
                        struct error *err);
/* Renders the prompt from messages, chat_template, chat_template_kwargs and so on; call it after
 * tool_choice_read. Normalizes the messages in place. ERR_STATE: the client of spec->x has
 * disconnected, or rendering takes too long. */
int chat_prompt_render(const struct server *s, json_t *body, struct generation_spec *spec,
                       struct error *err);
/* Sets spec->reasoning_begin; call it after the grammar and the prompt are set. A grammar applies
 * from the first token, so such a reply has no reasoning. continued: the assistant's text at the
 * end of the prompt that the reply continues, or NULL. */
void reasoning_expect(const struct server *s, struct generation_spec *spec, const char *continued);
/* The maximum tokens of a reply to a prompt of n_prompt tokens, which fits into the context. */
int32_t reply_max_tokens(const struct server *s, const struct generation_spec *spec,
                         int32_t n_prompt);
/* Whether every prompt fits into the context with one token of a reply. */
bool prompt_fits(const struct server *s, const struct generation_spec *spec);
/* Parses the exchange's body with `read`, then starts the generation or replies with an error. */
void generation_handle(struct server *s, struct exchange *x, const struct api_dialect *d,
                       const char *prefix,
                       int (*read)(struct server *s, const json_t *body, struct model_ref *t,
                                   struct generation_spec *spec, struct error *err));

#endif
