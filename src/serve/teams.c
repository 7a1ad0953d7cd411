/*
 * teams: a debate that is called like a model. A team of agents answers the question of a chat; the
 * agents' turns are the reasoning, and the decision is the reply.
 *
 * A team runs in a separate thread. Its calls are background requests of the batcher, so that teams
 * do not delay chats. The calls of one step of a team are submitted together and join the batch of
 * all requests.
 */
#define _GNU_SOURCE
#include "memory/memory.h"
#include "serve/async_reply.h"
#include "serve/request_fields.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_QUESTION = 1 << 16 };
static const char PREFIX[] = "team:";

/* loading */

int teams_open(struct server *s, struct error *err) {
    int n = s->options->teams.n;
    s->teams = xcalloc((size_t)n + 1, sizeof *s->teams);
    for (int i = 0; i < n; i++) {
        struct team_entry *t = &s->teams[s->n_teams++];
        const char *path;
        t->name = named_file_parse(s->options->teams.v[i], &path);
        if (team_read(&t->team, path, err) != OK ||
            team_load_adapters(&t->team, server_adapter_keep, s, err) != OK)
            return error_wrap(err, "--team %s", s->options->teams.v[i]);
    }
    return OK;
}

void teams_release(struct server *s) {
    for (int i = 0; i < s->n_teams; i++) {
        free(s->teams[i].name);
        team_release(&s->teams[i].team);
    }
    free(s->teams);
}

const struct team_entry *team_find(const struct server *s, const char *model, struct error *err) {
    err->code = OK;
    if (!model || strncmp(model, PREFIX, strlen(PREFIX)) != 0) return NULL;
    const char *name = model + strlen(PREFIX);
    for (int i = 0; i < s->n_teams; i++)
        if (strcmp(s->teams[i].name, name) == 0) return &s->teams[i];
    error_set(err, ERR_MISSING, "there is no team '%s'; GET /v1/teams lists those there are", name);
    return NULL;
}

/* running */

/* A debate of one team about one question, and the destination of its output. */
struct team_session {
    struct server *s;
    const struct team_entry *t;
    struct task_item item;
    struct debate_options o;
    struct engine_client engine_client;
    struct llm_client base_client;
    const bool *stop;
    json_t *turn_calls; /* if `trace` was requested: the call of each turn, in order; else NULL */

    /* for a generation */
    struct generation *g;
    struct completion *a;
    struct token_usage usage;

    struct async_reply *async_reply; /* for a debate request */
};

static int session_batch_run(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    struct team_session *d = ctx;
    return batcher_run(d->s->batcher, reqs, n, d->stop, err);
}

/* Formats an agent's turn for the reasoning stream. */
static void turn_format(struct team_session *d, const struct llm_call *c, struct buf *out) {
    const char *text = c->text ? c->text : "";
    buf_printf(out, "%s: %s", c->agent->name ? c->agent->name : "agent", text);
    if (c->answer.choice >= 0 && c->answer.choice < d->item.n_choices)
        buf_printf(out, "%s%s (%.0f %%)", *text ? " → " : "", d->item.choices[c->answer.choice],
                   100 * (double)c->answer.prob[c->answer.choice]);
    if (c->failed) buf_printf(out, "(%s)", c->failed);
    buf_puts(out, "\n");
}

/* A call as the body of a request. POST /v1/chat/completions with it returns the same text as a
 * free-text turn, except that a team cuts off an agent that repeats itself for long. */
static json_t *call_json(const struct llm_call *c) {
    json_t *messages = json_array();
    for (int i = 0; i < c->n_messages; i++)
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", c->messages[i].role,
                                                  "content", c->messages[i].content));
    return json_pack("{s:o,s:i,s:f,s:f,s:I}", "messages", messages, "max_tokens", c->max_tokens,
                     "temperature", (double)c->temperature, "top_p", (double)c->top_p, "seed",
                     (json_int_t)c->seed);
}

static int session_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    struct team_session *d = ctx;
    struct buf turns = {0};
    for (int i = 0; d->turn_calls && i < n; i++)
        json_array_append_new(d->turn_calls, call_json(&calls[i]));
    int rc = d->base_client.ask(d->base_client.ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        d->usage.prompt += calls[i].n_prefilled;
        d->usage.completion += calls[i].n_generated;
        turn_format(d, &calls[i], &turns);
    }
    if (rc == OK && d->g)
        generation_append(d->g, d->a,
                          &(struct async_part){.reasoning = turns.data, .usage = &d->usage});
    buf_release(&turns);
    return rc;
}

/* Returns an error for a debate without a message if calls of its agents failed. */
static int silence_check(const struct team_session *d, const struct transcript *o,
                         struct error *err) {
    if (*transcript_reply(o)) return OK;
    for (int i = 0; i < o->n; i++)
        if (o->v[i].failed)
            return error_set(err, ERR_USAGE, "no agent of the team '%s' has answered: %s",
                             d->t->name, o->v[i].failed);
    return OK;
}

/* Runs the debate of a session. The caller releases `out`, even after an error. */
static int session_run(struct team_session *d, struct debate *out, struct error *err) {
    d->engine_client = (struct engine_client){
        .engine = d->s->engine, .model = d->s->model, .run = session_batch_run, .run_ctx = d};
    d->base_client = engine_client_as_llm(&d->engine_client);
    struct llm_client client = {d, session_ask};
    return debate_run(&client, d->t->team.v, d->t->team.n, &d->item, 1, &d->o, out, NULL, err);
}

static void session_free(void *ctx) {
    struct team_session *d = ctx;
    if (!d) return;
    task_item_release(&d->item);
    json_decref(d->turn_calls);
    free(d);
}

static void team_generation_run(struct generation *g, void *ctx) {
    struct team_session *d = ctx;
    for (int i = 0; i < g->n_completions; i++) {
        struct debate out = {0};
        struct error err;
        d->g = g;
        d->a = &g->completions[i];
        d->stop = &d->a->async->stop;
        d->usage = (struct token_usage){0};
        d->o.seed += i > 0;
        int rc = session_run(d, &out, &err);
        if (rc == OK) rc = silence_check(d, &out.transcripts[0], &err);
        generation_append(
            g, d->a,
            &(struct async_part){.content = rc == OK ? transcript_reply(&out.transcripts[0]) : NULL,
                                 .error = rc == OK ? NULL : &err,
                                 .usage = &d->usage,
                                 .done = true});
        debate_release(&out);
    }
    session_free(d);
}

/* parsing of requests */

/* The earlier messages, except system messages, as "ROLE: TEXT" lines, and then the text of the
 * last message. malloc'ed. */
static char *question_from_messages(const json_t *messages) {
    struct buf b = {0};
    size_t n = json_array_size(messages), i;
    const json_t *m;
    json_array_foreach (messages, i, m) {
        const char *role = json_get_string(m, "role"), *text = json_get_string(m, "content");
        if (i + 1 < n && strcmp(role, "system") != 0) buf_printf(&b, "%s: %s\n", role, text);
        if (i + 1 == n) buf_printf(&b, "%s%s", b.len ? "\n" : "", text);
    }
    return b.data ? b.data : xstrdup("");
}

static int choices_read(const json_t *body, struct task_item *item, struct error *err) {
    struct strings list = {0};
    int rc = json_read_strings(body, "choices", EVAL_MAX_CHOICES, &list, err);
    if (rc == OK && list.n == 1)
        rc = error_set(err, ERR_USAGE, "'choices' requires 2 to %d answers", EVAL_MAX_CHOICES);
    item->n_choices = rc == OK ? list.n : 0;
    for (int i = 0; i < item->n_choices; i++) item->choices[i] = xstrdup(list.v[i]);
    strings_release(&list);
    return rc;
}

/* Takes ownership of the question. */
static struct team_session *session_new(struct server *s, const struct team_entry *t,
                                        char *question, uint64_t seed) {
    struct team_session *d = xcalloc(1, sizeof *d);
    *d = (struct team_session){.s = s, .t = t, .o = t->team.options};
    d->item = (struct task_item){
        .question = question, .correct = -1, .lang = language_names[language_detect(question)]};
    d->o.seed = seed;
    return d;
}

void team_chat_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                     const struct team_entry *t, const json_t *body, struct generation_spec *spec) {
    char *question = question_from_messages(json_object_get(body, "messages"));
    struct model_ref target = {.name = xasprintf("%s%s", PREFIX, t->name),
                               .label = xstrdup("team")};
    struct team_session *session;
    struct error err;
    if (!*question || strlen(question) > MAX_QUESTION) {
        api_fail(x, 400, NULL, "messages", "invalid_value",
                 "a team requires a question of 1 to %d bytes", MAX_QUESTION);
        free(question);
        goto refused;
    }
    session = session_new(s, t, question, spec->sampling.seed);
    if (json_get_nonnull(body, "temperature")) session->o.temperature = spec->sampling.temperature;
    if (choices_read(body, &session->item, &err) != OK) {
        api_fail_error(x, &err, "choices");
        session_free(session);
        goto refused;
    }
    spec->prompts = xcalloc(1, sizeof *spec->prompts); // no tokens: agents build their own prompts
    spec->n_prompts = 1;
    if (generation_start_async(s, x, d, "chatcmpl-", &target, spec, team_generation_run, session))
        return;
    session_free(session);
    return;
refused:
    generation_spec_release(spec);
    model_ref_release(&target);
}

/* debate requests */

/* The previous answer of the agent that speaks in utterance i; -1: no earlier answer. */
static int previous_answer(const struct transcript *o, int i) {
    for (int k = i - 1; k >= 0; k--)
        if (o->v[k].agent == o->v[i].agent && o->v[k].answer >= 0) return o->v[k].answer;
    return -1;
}

static json_t *turn_json(const struct team_session *d, const struct transcript *o, int i) {
    json_t *v = utterance_json(o, d->t->team.v, i);
    int previous = previous_answer(o, i), now = o->v[i].answer;
    bool flip = previous >= 0 && now >= 0 && previous != now;
    json_object_set_new(v, "flip", json_boolean(flip));
    if (flip) json_object_set_new(v, "before", json_string(o->candidates[previous]));
    return v;
}

static void debate_on_step(void *ctx, const struct transcript *o, int item, int from) {
    const struct team_session *d = ctx;
    bool answered = false;
    (void)item;
    for (int i = from; i < o->n; i++) {
        async_reply_event(d->async_reply, "turn", turn_json(d, o, i));
        answered = answered || o->v[i].answer >= 0;
    }
    if (!answered) return;
    const char *leads = o->answer >= 0 ? o->candidates[o->answer] : NULL;
    async_reply_event(d->async_reply, "vote",
                      json_pack("{s:i,s:o,s:s?}", "round", o->v[o->n - 1].round, "scores",
                                transcript_scores_json(o), "answer", leads));
}

/* The recorded calls are in the order of the turns. */
static json_t *debate_json(const struct team_session *d, const struct debate *out) {
    json_t *v = debate_transcript_json(out, d->t->team.v, &d->item, 0), *turn;
    size_t i;
    json_array_foreach (json_object_get(v, "said"), i, turn)
        if (d->turn_calls) json_object_set(turn, "asked", json_array_get(d->turn_calls, i));
    return v;
}

static json_t *debate_work_run(struct async_reply *l, void *ctx, struct error *err) {
    struct team_session *d = ctx;
    struct debate out = {0};
    d->async_reply = l;
    d->stop = async_reply_stop_flag(l);
    d->o.on_step = debate_on_step;
    d->o.on_step_ctx = d;
    int rc = session_run(d, &out, err);
    async_reply_add_usage(l, &d->usage);
    json_t *v = rc == OK ? debate_json(d, &out) : NULL;
    debate_release(&out);
    return v;
}

static struct team_session *debate_read(struct server *s, const json_t *body, struct error *err) {
    const char *name = "", *question = "";
    int64_t seed = 1, rounds = 0;
    double temperature = -1;
    bool trace = false;
    if (json_read_name(body, "team", &name, err) != OK ||
        json_read_string(body, "question", &question, err) != OK ||
        json_read_int(body, "seed", 0, INT64_MAX, &seed, err) != OK ||
        json_read_int(body, "rounds", 1, 64, &rounds, err) != OK ||
        json_read_number(body, "temperature", 0, 100, &temperature, err) != OK ||
        json_read_bool(body, "trace", &trace, err) != OK)
        return NULL;
    if (!*question || strlen(question) > MAX_QUESTION) {
        error_set(err, ERR_USAGE, "'question' must be of 1 to %d bytes", MAX_QUESTION);
        return NULL;
    }
    char *model = xasprintf("%s%s", PREFIX, name);
    const struct team_entry *t = team_find(s, model, err);
    free(model);
    if (!t) return NULL;
    struct team_session *d = session_new(s, t, xstrdup(question), (uint64_t)seed);
    if (rounds) d->o.rounds = (int)rounds;
    if (temperature >= 0) d->o.temperature = (float)temperature;
    if (trace) d->turn_calls = json_array();
    if (choices_read(body, &d->item, err) == OK) return d;
    session_free(d);
    return NULL;
}

static void debate_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    bool stream = false;
    json_t *body = request_memory_json(ctx, x, &err);
    struct team_session *d = body && json_read_bool(body, "stream", &stream, &err) == OK
                                 ? debate_read(s, body, &err)
                                 : NULL;
    const struct async_reply_work work = {debate_work_run, session_free, d};
    if (d && request_memory_reserve(s, x, 2 * TRANSCRIPT_BYTES, &err) != OK) {
        session_free(d);
        d = NULL;
    }
    if (d)
        async_reply_start(s, x, stream, &work);
    else
        api_fail_error(x, &err, err.code == ERR_MISSING ? "team" : NULL);
    json_decref(body);
}

static void teams_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    json_t *list = json_array();
    for (int i = 0; i < s->n_teams; i++) {
        const struct team *t = &s->teams[i].team;
        json_t *agents = json_array();
        for (int k = 0; k < t->n; k++)
            json_array_append_new(
                agents,
                json_pack("{s:s?,s:s?,s:s?}", "name", t->v[k].name, "system", t->v[k].system,
                          "role",
                          t->v[k].role ? t->v[k].role : workflow_role(t->options.workflow, k)));
        json_array_append_new(
            list, json_pack("{s:s,s:s+,s:s?,s:s,s:o}", "name", s->teams[i].name, "model", PREFIX,
                            s->teams[i].name, "about", t->description, "protocol",
                            workflow_name(t->options.workflow), "agents", agents));
    }
    exchange_reply_json(x, 200, json_pack("{s:o}", "teams", list));
}

const struct http_route teams_routes[] = {
    {"GET", "/v1/teams", SCOPE_CHAT, teams_handle},
    {"POST", "/v1/debate", SCOPE_CHAT, debate_handle},
    {0},
};
