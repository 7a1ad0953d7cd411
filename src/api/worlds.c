/*
 * worlds: views of simulations in the grid environment, even while they run. A run writes the
 * actions of its agents to a trace, tick by tick; this file replays the trace and returns the state
 * of the world as frames. For any agent at any tick it returns the observation, the prompt, and the
 * probabilities of a model's actions.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "world/world.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_FRAMES = 500,
    FRAME_BYTES = 64 << 10, /* bytes of a frame as a JSON tree and as text, without agents */
    AGENT_BYTES = 512,
    TRACE_FACTOR = 4, /* bytes in memory per byte in the file */
};

static json_t *cell_json(const struct world *w, int cell) {
    return json_pack("[i,i]", cell % w->size, cell / w->size);
}

static json_t *cells_json(const struct world *w, int kind) {
    json_t *list = json_array();
    for (int c = 0; c < w->size * w->size; c++)
        if (w->cells[c] & kind) json_array_append_new(list, cell_json(w, c));
    return list;
}

/* [x, y, energy, holds, delivered, reward] of a living agent, null for a dead one. */
static json_t *agents_json(const struct world *w) {
    json_t *list = json_array();
    for (int i = 0; i < w->n_agents; i++) {
        const struct world_agent *a = &w->agents[i];
        json_array_append_new(list, a->alive ? json_pack("[i,i,i,i,i,f]", a->cell % w->size,
                                                         a->cell / w->size, a->energy, a->holds,
                                                         a->delivered, a->reward)
                                             : json_null());
    }
    return list;
}

static json_t *frame_json(const struct world *w) {
    json_t *predators = json_array();
    for (int p = 0; p < w->n_predators; p++)
        json_array_append_new(predators, cell_json(w, w->predators[p]));
    return json_pack("{s:i,s:o,s:o,s:o,s:o}", "tick", w->tick, "agents", agents_json(w), "food",
                     cells_json(w, CELL_FOOD), "material", cells_json(w, CELL_MATERIAL),
                     "predators", predators);
}

/* The path of a trace, malloc'ed, among the runs of the command line or of this server's jobs;
 * NULL: none. */
static char *trace_path(const struct server *s, const char *run, const char *generation) {
    const char *digits = "0123456789";
    if (!run || !*run || *run == '.' || strchr(run, '/') || !generation || !*generation ||
        strspn(generation, digits) != strlen(generation) || strlen(generation) > 6)
        return NULL;
    char *path = xasprintf("%s/%s/trace-%s.jsonl", s->options->runs, run, generation);
    if (path_exists(path)) return path;
    free(path);
    path = xasprintf("%s/out/%s/trace-%s.jsonl", s->options->state_dir, run, generation);
    if (path_exists(path)) return path;
    free(path);
    return NULL;
}

/* Loads the trace that a request names; replies with an error if that fails. */
static bool trace_open(struct server *s, struct exchange *x, struct trace *t) {
    struct error err;
    char *path = trace_path(s, exchange_query(x, "run"), exchange_query(x, "generation"));
    int rc = path ? request_memory_reserve_file(s, x, path, TRACE_FACTOR, &err) : OK;
    if (rc == OK)
        rc = path ? trace_load(t, path, &err)
                  : error_set(&err, ERR_MISSING,
                              "there is no such trace; ?run=ID&generation=N name one");
    if (rc == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "trace_not_found", "%s", err.text);
    else if (rc != OK)
        api_fail_error(x, &err, NULL);
    if (rc != OK && path) trace_release(t);
    free(path);
    return rc == OK;
}

/* ?run&generation&from&n: replies with at most n of the available frames, from tick `from` on. A
 * client that follows a run requests the following frames later. */
static void frames_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct trace t = {0};
    struct error err;
    int64_t from = 0, n = 100;
    if (!trace_open(s, x, &t)) return;
    if (query_read_int(x, "from", 0, INT64_MAX, &from, &err) != OK ||
        query_read_int(x, "n", 1, INT64_MAX, &n, &err) != OK) {
        api_fail_error(x, &err, NULL);
        trace_release(&t);
        return;
    }
    from = MIN(from, t.n_ticks + 1);
    n = MIN(n, MAX_FRAMES);
    if (request_memory_reserve_list(s, x, n, FRAME_BYTES + (size_t)t.n_agents * AGENT_BYTES, "n",
                                    &err)) {
        api_fail_error(x, &err, "n");
        trace_release(&t);
        return;
    }
    struct world *w = xcalloc(1, sizeof *w);
    json_t *frames = json_array();
    for (int64_t tick = from; tick < from + n && tick <= t.n_ticks; tick++) {
        trace_seek(&t, w, tick);
        json_array_append_new(frames, frame_json(w));
    }
    if (from > t.n_ticks) trace_seek(&t, w, 0); // the reply has walls and homes even without frames
    exchange_reply_json(x, 200,
                        json_pack("{s:i,s:i,s:I,s:s,s:I,s:I,s:b,s:o,s:o,s:o}", "size", w->size,
                                  "agents", t.n_agents, "seed", (json_int_t)t.seed, "policy",
                                  t.policy, "ticks", (json_int_t)t.n_ticks, "planned",
                                  (json_int_t)t.steps, "closed", t.closed, "walls",
                                  cells_json(w, CELL_WALL), "homes", cells_json(w, CELL_HOME),
                                  "frames", frames));
    free(w);
    trace_release(&t);
}

/* a model's action probabilities */

/* The probabilities of the first tokens of the action words, among which policies choose. */
static json_t *action_probabilities(struct server *s, const struct model_ref *t,
                                    const struct buf *prompt, double temperature,
                                    struct error *err) {
    const struct tokenizer *tok = s->model->tok;
    struct token_ids words[WORLD_N_ACTIONS] = {{0}}, ids = {0};
    struct token_seq choices[WORLD_N_ACTIONS];
    tokenizer_encode(tok, prompt->data, prompt->len, TOKENIZER_ADD_BOS, &ids);
    for (int i = 0; i < WORLD_N_ACTIONS; i++) {
        char *word = xasprintf(" %s", world_action_words[i]);
        tokenizer_encode(tok, word, strlen(word), 0, &words[i]);
        choices[i] = (struct token_seq){words[i].v, 1};
        free(word);
    }
    struct engine_request r = {.prompt = ids.v,
                               .n_prompt = ids.n,
                               .choices = choices,
                               .n_choices = WORLD_N_ACTIONS,
                               .logprob_temperature = (float)temperature};
    model_ref_apply(t, &r);
    int rc = batcher_run(s->batcher, &r, 1, NULL, err);
    json_t *v = rc == OK ? json_object() : NULL;
    for (int i = 0; v && i < WORLD_N_ACTIONS; i++)
        json_object_set_new(v, world_action_words[i], json_real((double)r.choice_prob[i]));
    engine_request_release(&r);
    for (int i = 0; i < WORLD_N_ACTIONS; i++) token_ids_release(&words[i]);
    token_ids_release(&ids);
    return v;
}

/* The action that the agent chose in the state after `tick` ticks; null: the agent was dead, or the
 * trace ends at this tick. */
static json_t *action_json(const struct trace *t, int64_t tick, int agent) {
    if (tick >= t->n_ticks) return json_null();
    int a = t->actions[tick * t->n_agents + agent];
    return a < 0 ? json_null() : json_string(world_action_words[a % WORLD_N_ACTIONS]);
}

static json_t *agent_json(struct server *s, const struct trace *t, const struct world *w, int agent,
                          const struct model_ref *model, double temperature, struct error *err) {
    const struct world_agent *a = &w->agents[agent];
    struct buf observation = {0}, prompt = {0};
    json_t *probabilities = NULL, *v = NULL;
    if (a->alive) {
        world_observe(w, &t->rules, agent, &observation);
        world_prompt(w, &t->rules, agent, &prompt);
        probabilities = action_probabilities(s, model, &prompt, temperature, err);
    }
    if (!a->alive || probabilities)
        v = json_pack(
            "{s:i,s:i,s:b,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:f,s:s,s:s,s:o,s:o?}", "agent", agent,
            "tick", w->tick, "alive", a->alive, "energy", a->energy, "holds", a->holds, "collected",
            a->collected, "delivered", a->delivered, "blocked", a->blocked, "reward", a->reward,
            "total", a->episode_reward, "fitness", world_agent_fitness(a), "observation",
            observation.data ? observation.data : "", "prompt", prompt.data ? prompt.data : "",
            "action", action_json(t, w->tick, agent), "probabilities", probabilities);
    buf_release(&observation);
    buf_release(&prompt);
    return v;
}

/* ?run&generation&tick&agent. Optional: &model, whose action probabilities are computed (default:
 * as for a request without a model), and &temperature (default: 2). */
static void agent_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct trace t = {0};
    struct model_ref model;
    struct error err;
    double temperature = 2;
    int64_t agent = 0;
    if (!trace_open(s, x, &t)) return;
    int64_t tick = t.n_ticks;
    json_t *v = NULL;
    int rc = model_ref_resolve(s, exchange_query(x, "model"), &model, &err);
    bool found = rc == OK;
    if (rc == OK) rc = query_read_int(x, "tick", 0, INT64_MAX, &tick, &err);
    if (rc == OK) rc = query_read_int(x, "agent", 0, t.n_agents - 1, &agent, &err);
    if (rc == OK) rc = query_read_number(x, "temperature", 0.01, 100, &temperature, &err);
    if (rc == OK) {
        struct world *w = xcalloc(1, sizeof *w);
        trace_seek(&t, w, MIN(tick, t.n_ticks));
        v = agent_json(s, &t, w, (int)agent, &model, temperature, &err);
        free(w);
    }
    if (v)
        exchange_reply_json(x, 200, v);
    else
        api_fail_error(x, &err, NULL);
    if (found) model_ref_release(&model);
    trace_release(&t);
}

static const struct http_route routes[] = {
    {"GET", "/v1/worlds/frames", SCOPE_CHAT, frames_handle},
    {"GET", "/v1/worlds/agent", SCOPE_CHAT | ROUTE_SLOW, agent_handle},
    {0},
};

const struct server_module worlds_module = {.routes = routes};
