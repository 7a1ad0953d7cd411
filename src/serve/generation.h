/*
 * generation: one request for text, whatever API it came by: prompts and settings in, deltas or a
 * whole reply out in that API's form (its dialect).
 *
 * A generation is n answers to each of its prompts, every answer a ticket of the batcher. The text
 * of an answer is advanced as its tokens come: never half a character, nothing that may yet turn
 * out to begin a stop text, tool calls told apart from words. Whoever replies — a stream that is
 * pulled, or a worker when all is there — is the only one to advance it.
 *
 * It is counted: by its exchange, and by each call until that is done.
 */
#ifndef SHOAL_GENERATION_H
#define SHOAL_GENERATION_H

#include "http/http.h"
#include "serve/ab.h"
#include "serve/batcher.h"
#include "serve/server.h"

enum tool_choice {
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_AUTO,     /* the model may call: <tool_call>{…}</tool_call>, or a reply that is an
                             object */
    TOOL_CHOICE_REQUIRED, /* a grammar sees to it that the reply is one call */
};

struct token_usage { /* tokens */
    int64_t prompt, completion, cached;
};

/* What is asked for; everything is the generation's own and released with it. */
struct generation_spec {
    struct token_ids *prompts;
    int n_prompts, n; /* n answers to each */
    int n_best;       /* of these so many are told, the most probable; 0: all */
    int32_t max_tokens;
    int32_t context; /* tokens of a prompt and its answer; 0: what the engine holds */
    struct sampling_params sampling; /* answer i of a prompt draws with seed + i */
    struct logit_bias *bias;
    struct strings stops;
    int32_t stop_ids[32];
    int n_stop_ids;
    int n_top, n_prompt_top; /* alternatives told of each token; the latter vLLM's, of prompts */
    bool logprobs, prompt_logprobs, echo, stream, include_usage;
    bool prompt_tops;        /* the prompt's log-probabilities are told as vLLM does */
    bool one_call;           /* of tools, at most */
    bool thoughts;           /* a team's turns are told, as reasoning */
    struct grammar *grammar; /* borrowed of the server's */
    enum tool_choice tools;
    struct strings tool_names; /* that are offered */
    char *user;                /* the request's user, or NULL: stays on one side of an experiment */
    json_t *asked;             /* {messages} or {prompt}, kept for ratings, or NULL */
    json_t *extra;             /* the dialect's own */
    struct exchange *x;        /* whose client is waiting while this is read, or NULL; borrowed */
    double until;              /* clock_now at which its prompts are given up; 0: none was begun */
    const char *wrong;         /* the field that an error of reading is about, or NULL */
};

/* A tool call in an answer's text. */
struct tool_call {
    char id[32], *name;
    size_t args, args_end; /* bytes of the text; args_end 0: it goes on */
    size_t sent;           /* of the arguments */
    bool told;             /* that it begins */
};

/* What somebody else than the batcher writes into an answer: a team. Under its lock. */
struct async_output {
    pthread_mutex_t lock;
    struct buf words, thoughts; /* not yet taken in */
    struct token_usage cost;
    bool done, stop; /* stop: nobody waits for it any more */
};

struct completion {
    struct batcher_request ticket;
    struct async_output *outside; /* NULL: it is the call's */
    struct buf thoughts;          /* what was said on the way to it */
    size_t thoughts_sent;
    int prompt, index;
    struct buf text;  /* all that was decoded so far */
    size_t *ends;     /* [n_read] the byte of the text that each token ends before */
    int32_t n_read;   /* tokens decoded */
    size_t shown;     /* bytes that may be told: whole characters, no stop text's beginning */
    size_t words_end; /* … of these what are words; the rest is tool calls or is held back */
    size_t sent;      /* bytes told; the stream's */
    struct buf chunk; /* of words that are none: see openai.c */
    int32_t tokens_sent;
    json_int_t offset; /* characters of these; the stream's */
    struct tool_call *tools;
    int n_tools, tools_cap;
    /* Calls are read once: the first n_read_calls of `tools` end before this byte of the text. */
    size_t calls_end;
    int n_read_calls;
    size_t calls_begin;         /* the byte of the first call's mark; 0 while there is none */
    bool done, begun, finished; /* the last two: the stream has told so */
};

struct generation;
/* A list in a reply that may be too large for a tree of JSON values: log-probabilities of the
 * tokens from..to of an answer. The tree has a string in its place, and reply_serialize writes the
 * list as text, one item's tree at a time. */
struct lazy_list {
    int kind;  /* the dialect's */
    int index; /* of the answer */
    int32_t from, to;
    json_int_t offset; /* the dialect's */
    size_t flags;      /* that jansson writes the reply with */
};
/* How an API says it. Streams: each appends whole events. */
struct api_dialect {
    const char *stream_type, *idle;
    void (*list)(const struct generation *g, const struct lazy_list *l, struct buf *out);
    void (*begin)(const struct generation *g, struct completion *a, struct buf *out);
    /* What is new in an answer: words from a->sent to words_end, tool calls. */
    void (*delta)(const struct generation *g, struct completion *a, struct buf *out);
    void (*finish)(const struct generation *g, struct completion *a, struct buf *out);
    void (*end)(const struct generation *g, struct buf *out);
    json_t *(*whole)(const struct generation *g); /* all in one; takes nothing over */
};

struct generation {
    int refs, left;                 /* left: tickets not done */
    struct generation *next, *prev; /* in the server's list */
    struct server *s;
    struct exchange *x;
    const struct api_dialect *dialect;
    struct model_ref target;
    struct generation_spec spec;
    struct ab_arm arm;
    char id[40];
    int64_t created; /* unix seconds */
    double began;
    struct completion *completions;
    int n_completions;
    char *key; /* who asked; NULL: nobody in particular */
    bool gone;
    uint64_t nonce; /* in the strings that stand for lists: no client knows it */
    struct reply_budget {
        size_t bytes; /* reserved for the reply's text */
        bool refused; /* there was no memory for more of it: the reply fails */
    } * room;
};

/* Takes spec and target over, and answers the exchange, with an error if it must be. */
void generation_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const char *id_prefix, struct model_ref *t, struct generation_spec *spec);
void generation_spec_release(struct generation_spec *spec);
/* The same where a thread of its own answers: fn(g, ctx) writes each answer's `outside` with
 * generation_append, and then ends it. At most so many at once: else the exchange is told to come
 * back. ctx is released by fn. */
enum { ASYNC_WORKERS_MAX = 32 };
bool generation_start_async(struct server *s, struct exchange *x, const struct api_dialect *d,
                            const char *id_prefix, struct model_ref *t,
                            struct generation_spec *spec,
                            void (*fn)(struct generation *g, void *ctx), void *ctx);
void generation_append(struct generation *g, struct completion *a, const char *words,
                       const char *thoughts, const struct token_usage *cost, bool done);

/* for dialects */

/* Takes in what the batcher has added: words that may be told, and tool calls. */
void completion_advance(const struct generation *g, struct completion *a);
void completion_release(struct completion *a);
/* "stop", "length" or "tool_calls"; NULL while it goes on. */
const char *completion_finish_reason(const struct completion *a);
struct token_usage generation_usage(const struct generation *g);
/* Bytes of a text as a JSON string; what is no UTF-8 becomes U+FFFD. */
json_t *json_string_lossy(const char *text, size_t n);
/* A token as OpenAI writes one that is no text: its characters, or bytes:\xe3. */
json_t *json_token_text(const struct server *s, int32_t id);
json_t *json_logprob(float v); /* -inf is -9999 */
/* A string that stands for the list. */
json_t *lazy_list_placeholder(const struct generation *g, const struct lazy_list *l);
/* Appends v as text, its lists written by the dialect; takes v over. */
void reply_serialize(const struct generation *g, json_t *v, size_t flags, struct buf *out);
/* For writers of lists: appends v and a comma before it where it is not the first; takes v over.
 * False: there is no memory for more. */
bool lazy_list_add(const struct generation *g, const struct lazy_list *l, json_t *v,
                   struct buf *out);
/* Token i of an answer as {token, logprob, bytes, top_logprobs}. */
json_t *token_logprobs(const struct generation *g, const struct completion *a, int32_t i);
/* A dialect's `list` that writes [to - from] of those. */
void token_logprobs_write(const struct generation *g, const struct lazy_list *l, struct buf *out);
/* Tokens of the answer whose text has been told. */
int32_t completion_tokens_sent(const struct completion *a);
/* Tokens of a whole answer that a stop text has left something of. */
int32_t completion_tokens_kept(const struct completion *a);
/* A token as OpenAI lists one: {token, logprob, bytes}. */
json_t *json_token_logprob(const struct server *s, int32_t id, float logprob);
/* An event of a stream: "data: {…}\n\n"; takes v over. */
void sse_add(const struct generation *g, json_t *v, struct buf *out);
/* A line of NDJSON; takes v over. g NULL: of no generation. */
void ndjson_add(const struct generation *g, json_t *v, struct buf *out);

/* for who reads requests: fields as OpenAI and vLLM call them, into the spec */

uint64_t random_seed(void);
/* Whoever is asked for: `model`, or llama.cpp's `lora`, or LoRAX's `parameters`. */
int model_ref_read(struct server *s, const json_t *body, struct model_ref *t, struct error *err);
/* Penalties as Ollama and llama.cpp have them, on the last so many tokens: 0 none, -1 all. */
void sampling_set_penalties(struct sampling_params *s, double repeat, double presence,
                            double frequency, int64_t last_n);
/* logit_bias as OpenAI has it: {"id": bias}. */
int logit_bias_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                    struct error *err);
/* stop, stop_token_ids, ignore_eos. */
int stop_conditions_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                         struct error *err);
/* spec->grammar from a text, or from a value as JSON; kinds as for server_grammar. */
int generation_set_grammar(struct server *s, struct generation_spec *spec, const char *kind,
                           const json_t *v, struct error *err);
/* tools, tool_choice; after the grammar. */
int tool_choice_read(struct server *s, const json_t *body, struct generation_spec *spec,
                     struct error *err);
/* A request's own `chat_template` needs --trust-request-chat-template. Before a made model's is put
 * in its place. */
int chat_template_check(const struct server *s, const json_t *body, struct generation_spec *spec,
                        struct error *err);
/* messages, chat_template, chat_template_kwargs …: the prompt. Messages are put in order in place;
 * after the tools. Ends with ERR_STATE when the client of spec->x has gone. */
int chat_prompt_render(const struct server *s, json_t *body, struct generation_spec *spec,
                       struct error *err);
/* Whether every prompt has room, and for one token of a reply. */
bool prompt_fits(const struct server *s, const struct generation_spec *spec);
/* Answers with the error and gives back what was read. */
void generation_fail(struct server *s, struct exchange *x, struct model_ref *t,
                     struct generation_spec *spec, const struct error *err);
/* Reads the exchange's body as a request, and starts it or says why not. */
void generation_handle(struct server *s, struct exchange *x, const struct api_dialect *d,
                       const char *prefix,
                       int (*read)(struct server *s, const json_t *body, struct model_ref *t,
                                   struct generation_spec *spec, struct error *err));

#endif
