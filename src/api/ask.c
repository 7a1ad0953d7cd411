/*
 * ask: the answer pipeline over HTTP. The server runs the pipeline of 'shoal ask'; its model calls
 * join the server's batch. The entries of the team's blackboard are streamed as they are written.
 *
 * A blackboard exists for one request. Memory is kept per conversation, which is stored in the
 * server's state under its id and the API key of the request: the same id with another key is
 * another conversation. A conversation may answer several questions at once; no exchange is lost.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "serve/async_reply.h"
#include "serve/sample_filter.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_CONVERSATION_ID_BYTES = 128 };

struct ask_task {
    struct server *s;
    struct async_reply *reply;
    /* conversation: id of the API key (may be empty), "/" and the request's id; NULL: nothing is
     * stored */
    char *question, *conversation;
    struct model_ref target;
    struct workflow *workflow;
    struct pipeline_options options;
    struct sample_filter *filter; /* the fields check, samples and check_item; NULL: no check */
    const char *bad_field;        /* field that an error is about, or NULL */
    struct engine_client engine_client;
    struct llm_client base_client;
    struct store *store;
    json_t *entries; /* entries of the blackboard, in the order of writing */
    struct token_usage usage;
};

static double now(void *ctx) {
    (void)ctx;
    return (double)time(NULL);
}

/* calls */

/* All agents use the model of the request. */
static int batch_run(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    struct ask_task *a = ctx;
    for (int i = 0; i < n; i++) model_ref_apply(&a->target, &reqs[i]);
    return batcher_run(a->s->batcher, reqs, n, async_reply_stop_flag(a->reply), err);
}

static int ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    struct ask_task *a = ctx;
    int rc = a->base_client.ask(a->base_client.ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        a->usage.prompt += calls[i].n_prefilled;
        a->usage.completion += calls[i].n_generated;
    }
    return rc;
}

/* answer_selector.select */
static int sample_select(void *ctx, const char *question, char *const *texts, int n, int *selected,
                         struct error *err) {
    struct ask_task *a = ctx;
    (void)question; // the filter has the request's
    *selected = sample_filter_select(a->filter, texts, n, async_reply_stop_flag(a->reply));
    a->usage.prompt += a->filter->questioner.prefilled;
    a->usage.completion += a->filter->questioner.generated;
    if (a->filter->error.code != OK) *err = a->filter->error;
    return a->filter->error.code;
}

/* events */

static void on_step(void *ctx, const char *role, int iteration, int n) {
    struct ask_task *a = ctx;
    async_reply_event(
        a->reply, "step",
        json_pack("{s:s,s:i,s:i}", "role", role, "iteration", iteration, "agents", n));
}

/* Adds to an entry the agent that wrote it and the messages that it answered. */
static void entry_add_call(json_t *entry, const struct llm_call *c, int iteration) {
    json_t *messages = json_array();
    for (int i = 0; i < c->n_messages; i++)
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", c->messages[i].role,
                                                  "content", c->messages[i].content));
    json_object_set_new(entry, "agent", json_string(c->agent->name));
    json_object_set_new(entry, "role", json_string(c->agent->role));
    json_object_set_new(entry, "iteration", json_integer(iteration));
    json_object_set_new(entry, "messages", messages);
    if (c->truncated) json_object_set_new(entry, "truncated", json_true());
    if (c->failed) json_object_set_new(entry, "failed", json_string(c->failed));
}

static void on_board_write(void *ctx, const json_t *written, const struct llm_call *c,
                           int iteration) {
    struct ask_task *a = ctx;
    json_t *entry = json_copy((json_t *)(uintptr_t)written);
    json_object_set_new(entry, "seq", json_integer(blackboard_last_seq(a->options.board)));
    if (c) entry_add_call(entry, c, iteration);
    json_array_append(a->entries, entry);
    async_reply_event(a->reply, "entry", entry);
}

/* the answer */

static json_t *roles_json(const struct ask_task *a, const struct pipeline_answer *out,
                          enum language lang, int type) {
    json_t *list = json_array();
    for (int i = 0; type >= 0 && i < a->options.agents && out->names[i]; i++)
        json_array_append_new(
            list, json_pack("{s:s,s:s}", "name", out->names[i], "description",
                            agent_role_get((enum question_type)type, lang, i).description));
    return list;
}

static json_t *answer_json(const struct ask_task *a, const struct pipeline_answer *out) {
    const char *type = json_string_value(
        blackboard_read(a->options.board, BOARD_QUESTION_TYPE)); // NULL: the answer needed no team
    enum language lang =
        a->options.language < 0 ? language_detect(a->question) : (enum language)a->options.language;
    json_t *v = json_pack("{s:s,s:s,s:s*,s:s,s:s*,s:o,s:O,s:{s:I,s:I,s:I}}", "answer", out->text,
                          "source", answer_source_names[out->source], "why", out->failure_reason,
                          "language", language_names[lang], "role_type", type, "roles",
                          roles_json(a, out, lang, type ? question_type_find(type) : -1), "board",
                          a->entries, "usage", "prompt_tokens", (json_int_t)a->usage.prompt,
                          "completion_tokens", (json_int_t)a->usage.completion, "total_tokens",
                          (json_int_t)(a->usage.prompt + a->usage.completion));
    if (a->filter) {
        json_t *check = sample_filter_json(a->filter);
        json_object_update(v, check);
        json_decref(check);
    }
    return v;
}

static int board_open(struct ask_task *a, struct error *err) {
    const struct blackboard_options board = {.name = "ask", .clock = now};
    if (!(a->options.board = blackboard_open(&board, err))) return err->code;
    if (!a->conversation) return OK;
    if ((a->store = conversations_open(a->s, err)))
        a->options.memory = conversation_open(a->store, a->conversation, err);
    return a->options.memory ? OK : err->code;
}

static json_t *answer(struct async_reply *l, void *ctx, struct error *err) {
    struct ask_task *a = ctx;
    struct pipeline_answer out = {0};
    json_t *v = NULL;
    a->reply = l;
    a->engine_client = (struct engine_client){
        .engine = a->s->engine, .model = a->s->model, .run = batch_run, .run_ctx = a};
    a->base_client = engine_client_as_llm(&a->engine_client);
    for (int i = 0; i < PIPELINE_N_STAGES; i++)
        a->options.stage[i].llm_client = (struct llm_client){a, ask};
    if (board_open(a, err) == OK) {
        if (pipeline_run(&a->options, a->question, &out, err) == OK) v = answer_json(a, &out);
        if (out.exchange) memories_learn_exchange(a->s, a->store, a->conversation, out.exchange);
        async_reply_add_usage(l, &a->usage);
        pipeline_answer_release(&out);
    }
    return v;
}

static void ask_task_free(void *ctx) {
    struct ask_task *a = ctx;
    conversation_close(a->options.memory);
    blackboard_close(a->options.board);
    store_close(a->store);
    workflow_free(a->workflow);
    sample_filter_free(a->filter);
    model_ref_release(&a->target);
    json_decref(a->entries);
    free(a->question);
    free(a->conversation);
    free(a);
}

/* reading */

/* Reads a field that is one of n words or "auto". *out: the word's index, or -1 for "auto" and for
 * an absent field. */
static int choice_read(const json_t *body, const char *key, const char *const *choices, int n,
                       int *out, struct error *err) {
    const char *text = "auto";
    struct buf names = {0};
    if (json_read_string(body, key, &text, err) != OK) return err->code;
    for (int i = -1; i < n; i++) {
        const char *word = i < 0 ? "auto" : choices[i];
        buf_printf(&names, "%s%s", i < 0 ? "" : ", ", word);
        if (strcmp(text, word) != 0) continue;
        *out = i;
        buf_release(&names);
        return OK;
    }
    error_set(err, ERR_USAGE, "'%s' must be one of %s", key, names.data);
    buf_release(&names);
    return err->code;
}

static int texts_read(struct ask_task *a, const struct exchange *x, const json_t *body,
                      struct error *err) {
    const char *question = "", *id = NULL;
    if (json_read_string(body, "question", &question, err) != OK ||
        json_read_name(body, "conversation", &id, err) != OK)
        return err->code;
    if (!*question || strlen(question) > MAX_QUESTION_BYTES)
        return error_set(err, ERR_USAGE, "'question' must have 1 to %d bytes", MAX_QUESTION_BYTES);
    if (id && (!*id || strlen(id) > MAX_CONVERSATION_ID_BYTES))
        return error_set(err, ERR_USAGE, "'conversation' must be a name of 1 to %d bytes",
                         MAX_CONVERSATION_ID_BYTES);
    a->question = xstrdup(question);
    if (id) a->conversation = conversation_store_id(x, id);
    return OK;
}

/* The defaults are those of 'shoal ask'. */
static int options_read(struct ask_task *a, const json_t *body, struct error *err) {
    const char *types[N_QUESTION_TYPES + 1];
    int64_t agents = 3, iterations = 2, seed = 1, max_tokens = 0;
    struct pipeline_options *o = &a->options;
    for (int i = 0; i < N_QUESTION_TYPES; i++) types[i] = question_type_names[i];
    types[N_QUESTION_TYPES] = "model";
    if (json_read_int(body, "agents", 1, TEAM_MAX - 2, &agents, err) != OK ||
        json_read_int(body, "iterations", 1, 16, &iterations, err) != OK ||
        json_read_int(body, "seed", 0, INT64_MAX, &seed, err) != OK ||
        json_read_int(body, "max_tokens", 0, 65536, &max_tokens, err) != OK ||
        choice_read(body, "role_type", types, N_QUESTION_TYPES + 1, &o->type, err) != OK ||
        choice_read(body, "language", language_names, N_LANGUAGES, &o->language, err) != OK)
        return err->code;
    if (o->type == N_QUESTION_TYPES) o->type = QUESTION_TYPE_BY_MODEL;
    if (!(a->workflow = workflow_open("panel", err))) return err->code;
    o->workflow = a->workflow;
    o->agents = (int)agents;
    o->iterations = (int)iterations;
    o->max_tokens = (int32_t)max_tokens;
    o->seed = (uint64_t)seed;
    return OK;
}

static struct ask_task *ask_task_new(struct server *s) {
    struct ask_task *a = xcalloc(1, sizeof *a);
    a->s = s;
    a->entries = json_array();
    a->options = (struct pipeline_options){.summary = true,
                                           .temperature = -1,
                                           .facts = FACTS_MODEL,
                                           .progress = on_step,
                                           .progress_ctx = a,
                                           .on_write = on_board_write,
                                           .on_write_ctx = a};
    a->options.stage[PIPELINE_SUMMARY].temperature = 0.3f;
    a->options.stage[PIPELINE_OUTPUT].temperature = 0.7f;
    return a;
}

static int ask_task_read(struct ask_task *a, const struct exchange *x, const json_t *body,
                         bool *stream, struct error *err) {
    const char *model = NULL;
    int samples = 0;
    if (json_read_bool(body, "stream", stream, err) != OK ||
        json_read_string(body, "model", &model, err) != OK || texts_read(a, x, body, err) != OK ||
        options_read(a, body, err) != OK ||
        sample_filter_read(a->s, body, a->question, &a->filter, &samples, &a->bad_field, err) != OK)
        return err->code;
    if (a->filter) a->options.selector = (struct answer_selector){samples, sample_select, a};
    return model_ref_resolve(a->s, model, &a->target, err);
}

/* Reserves memory for the entries of the blackboard and the messages of each agent, which are
 * streamed and kept for the reply, and for the samples and their check. */
static int board_reserve(const struct ask_task *a, struct exchange *x, struct error *err) {
    size_t turns = (size_t)(a->options.agents + 3) * (size_t)(a->options.iterations + 1),
           message_bytes = (size_t)engine_max_len(a->s->engine) * a->s->piece_bytes;
    size_t samples = (size_t)a->options.selector.n_samples * message_bytes +
                     (a->filter ? sample_filter_bytes(a->filter) : 0);
    return request_memory_reserve(a->s, x, turns * (4 * message_bytes + 4096) + samples, err);
}

static void ask_handle(void *ctx, struct exchange *x) {
    struct ask_task *a = ask_task_new(ctx);
    const struct async_reply_work work = {answer, ask_task_free, a};
    struct error err;
    bool stream = false;
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? ask_task_read(a, x, body, &stream, &err) : err.code;
    json_decref(body);
    if (rc == OK) rc = board_reserve(a, x, &err);
    if (rc == OK && a->conversation && !conversation_admit(a->s, x, a->conversation)) {
        ask_task_free(a);
        return;
    }
    if (rc == OK) {
        async_reply_start(a->s, x, stream, &work);
        return;
    }
    api_fail_error(x, &err, a->bad_field);
    ask_task_free(a);
}

static const struct http_route routes[] = {
    {"POST", "/v1/ask", SCOPE_CHAT, ask_handle},
    {0},
};

const struct server_module ask_module = {.routes = routes};
