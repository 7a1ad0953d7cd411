/*
 * external_env: environments that another program provides.
 *
 * Requests to several worlds are queued until an answer is needed; then all are sent in one line.
 * The program is not trusted: exactly the agents that acted must receive rewards, and a missing,
 * unknown, too long or non-numeric value is an error that names the agent and the field.
 *
 * Not here: the rules of the environment. The program keeps the state of the environment; this file
 * stores only the agents' presence, prompts, rewards and teacher's actions of the last answer.
 */
#define _GNU_SOURCE
#include "world/world.h"

#include "world/world_server_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum env_agent_status { ENV_AGENT_ABSENT, ENV_AGENT_ACTIVE, ENV_AGENT_TRUNCATED };
#define MAX_REWARD 1e9

struct env_agent { /* state of an agent in one world */
    enum env_agent_status status;
    double reward;
    int16_t expert_action; /* the action that the teacher would take, or -1 */
    struct buf prompt;
};
struct external_env { /* one world */
    struct external_envs *c;
    int index, tick;
    bool requested;           /* the next request is queued or sent already */
    bool is_reset;            /* the last request was a reset, not a step */
    struct env_agent *agents; /* [n_agents] */
};
struct external_envs {
    external_envs_exchange_fn exchange;
    void *ctx;
    struct subprocess *program; /* the same as ctx if this file started the program, else NULL */
    char *command;
    int n_worlds, n_agents, n_actions;
    bool has_expert;
    int64_t max_steps;
    char **agents, **actions, **action_texts; /* [n_agents], [n_actions], [n_actions] */
    char **quoted_agents, **quoted_actions;   /* the same names as JSON strings */
    json_t *agent_index;                      /* maps an agent's name to its index */
    struct external_env *worlds;              /* [n_worlds] */
    struct environment *envs, **list; /* [n_worlds]: the worlds' interfaces, pointers to these */
    struct buf queued_line;           /* the queued requests as JSON; sent as one line */
    int *waiting, n_waiting; /* [n_waiting] indexes of the worlds whose requests are queued */
};

/* names */

static char *quote(const char *text) {
    json_t *v = json_string(text);
    char *out = json_dumps(v, JSON_ENCODE_ANY);
    json_decref(v);
    return out;
}

static int name_check(const char *name, const char *field, struct error *err) {
    size_t n = strlen(name);
    if (n == 0 || n > ENV_NAME_MAX_BYTES)
        return error_set(err, ERR_FORMAT, "a name in '%s' has %zu bytes, not 1 to %d", field, n,
                         ENV_NAME_MAX_BYTES);
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)name[i] < ' ' || name[i] == 127)
            return error_set(err, ERR_FORMAT, "a name in '%s' has control characters", field);
    return OK;
}

static void names_free(char **v, int n) {
    for (int i = 0; v && i < n; i++) free(v[i]);
    free(v);
}

static char **quote_all(char *const *names, int n) {
    char **out = xcalloc((size_t)n, sizeof *out);
    for (int i = 0; i < n; i++) out[i] = quote(names[i]);
    return out;
}

/* Reads a list of 1 to `max_names` distinct names and sets *n to its length. If *n is not 0, the
 * list must have *n names. */
static int names_read(const json_t *spaces, const char *key, int max_names, char ***out, int *n,
                      struct error *err) {
    const json_t *list = json_object_get(spaces, key);
    size_t size = json_array_size(list);
    json_t *seen = json_object();
    int rc = OK;
    if (!list || !json_is_string_array(list) || size == 0 || size > (size_t)max_names)
        rc = error_set(err, ERR_FORMAT, "'%s' must be a list of 1 to %d names", key, max_names);
    else if (*n && size != (size_t)*n)
        rc = error_set(err, ERR_FORMAT, "'%s' has %zu names for %d actions", key, size, *n);
    for (size_t i = 0; rc == OK && i < size; i++) {
        const char *name = json_string_value(json_array_get(list, i));
        rc = name_check(name, key, err);
        if (rc == OK && json_object_get(seen, name))
            rc = error_set(err, ERR_FORMAT, "'%s' names '%s' twice", key, name);
        json_object_set_new(seen, name, json_true());
    }
    json_decref(seen);
    if (rc != OK) return rc;
    *n = (int)size;
    *out = xcalloc(size, sizeof **out);
    for (int i = 0; i < *n; i++)
        (*out)[i] = xstrdup(json_string_value(json_array_get(list, (size_t)i)));
    return OK;
}

static int agent_find(const struct external_envs *c, const char *name) {
    const json_t *v = json_object_get(c->agent_index, name);
    return v ? (int)json_integer_value(v) : -1;
}

static int action_find(const struct external_envs *c, const char *name) {
    for (int i = 0; name && i < c->n_actions; i++)
        if (strcmp(name, c->actions[i]) == 0 || strcmp(name, c->action_texts[i]) == 0) return i;
    return -1;
}

/* answers */

/* Sets an error: the quoted name, `problem` and `field`. The name comes from the program, so it is
 * sanitized. */
static int name_error(struct error *err, const char *problem, const char *name, const char *field) {
    struct buf clean = {0};
    buf_add_sanitized(&clean, name, MIN(strlen(name), ENV_NAME_MAX_BYTES));
    char *text = xasprintf("'%s'%s", clean.data ? clean.data : "", problem);
    error_set(err, ERR_FORMAT, "%s%s", text, field);
    free(text);
    buf_release(&clean);
    return err->code;
}

/* Reads a field of an answer: an object keyed by agents, all of which must have the required status
 * (ENV_AGENT_ABSENT: any status). *out is NULL if the field is missing and not required. */
static int field_read(const struct external_env *s, const json_t *answer, const char *field,
                      enum env_agent_status required_status, bool required, const json_t **out,
                      struct error *err) {
    const char *agent;
    json_t *value;
    *out = json_object_get(answer, field);
    if (!*out && !required) return OK;
    if (!json_is_object(*out))
        return error_set(err, ERR_FORMAT, "'%s' of its answer is not an object with agents as keys",
                         field);
    json_object_foreach ((json_t *)(uintptr_t)*out, agent, value) {
        int i = agent_find(s->c, agent);
        if (i < 0) return name_error(err, " is not a possible agent, but in ", agent, field);
        if (required_status != ENV_AGENT_ABSENT && s->agents[i].status != required_status)
            return name_error(err, " did not act, but is in ", agent, field);
    }
    return OK;
}

static int prompt_read(const char *name, const json_t *observation, const json_t *info,
                       struct buf *out, struct error *err) {
    const json_t *prompt = json_object_get(info, "prompt"), *text = prompt ? prompt : observation;
    if (prompt && !json_is_string(prompt))
        return error_set(err, ERR_FORMAT, "the prompt of '%s' is not text", name);
    if (!json_is_string(text))
        return error_set(err, ERR_FORMAT,
                         "the observation of '%s' is not text, and its info has no 'prompt'", name);
    size_t n = json_string_length(text);
    if (n == 0) return error_set(err, ERR_FORMAT, "the text for '%s' is empty", name);
    if (n > ENV_PROMPT_MAX_BYTES)
        return error_set(err, ERR_MEMORY, "the text for '%s' has %zu bytes, more than %d", name, n,
                         ENV_PROMPT_MAX_BYTES);
    out->len = 0;
    buf_add(out, json_string_value(text), n);
    if (!prompt) buf_puts(out, " Action:");
    return OK;
}

static int expert_action_read(const struct external_env *s, const char *name, const json_t *info,
                              struct env_agent *agent, struct error *err) {
    const json_t *v = json_object_get(info, "teacher");
    agent->expert_action = -1;
    if (!v && (!s->c->has_expert || agent->status == ENV_AGENT_TRUNCATED)) return OK;
    if (!v)
        return error_set(err, ERR_STATE,
                         "the info of '%s' names no 'teacher', which --learn clone needs", name);
    agent->expert_action = (int16_t)action_find(s->c, json_string_value(v));
    if (agent->expert_action >= 0) return OK;
    return error_set(err, ERR_FORMAT, "the teacher of '%s' names none of the actions", name);
}

/* Reads agent i's observation and info. */
static int agent_observation_read(struct external_env *s, int i, const json_t *observations,
                                  const json_t *infos, struct error *err) {
    const char *name = s->c->agents[i];
    const json_t *observation = json_object_get(observations, name),
                 *info = json_object_get(infos, name);
    if (!observation) return error_set(err, ERR_FORMAT, "'%s' has no observation", name);
    if (info && !json_is_object(info))
        return error_set(err, ERR_FORMAT, "the info of '%s' is not an object", name);
    int rc = prompt_read(name, observation, info, &s->agents[i].prompt, err);
    return rc == OK ? expert_action_read(s, name, info, &s->agents[i], err) : rc;
}

static int reset_reply_read(struct external_env *s, const json_t *answer, struct error *err) {
    const json_t *observations, *infos;
    int n_present = 0;
    if (field_read(s, answer, "observations", ENV_AGENT_ABSENT, true, &observations, err) != OK ||
        field_read(s, answer, "infos", ENV_AGENT_ABSENT, false, &infos, err) != OK)
        return err->code;
    for (int i = 0; i < s->c->n_agents; i++) {
        bool is_present = json_object_get(observations, s->c->agents[i]) != NULL;
        if (!is_present && json_object_get(infos, s->c->agents[i]))
            return error_set(err, ERR_FORMAT, "'%s' has an info, but no observation",
                             s->c->agents[i]);
        s->agents[i].status = is_present ? ENV_AGENT_ACTIVE : ENV_AGENT_ABSENT;
        if (is_present && agent_observation_read(s, i, observations, infos, err) != OK)
            return err->code;
        n_present += is_present;
    }
    return n_present ? OK : error_set(err, ERR_FORMAT, "no agent is present");
}

static int reward_read(const char *name, const json_t *rewards, double *out, struct error *err) {
    const json_t *v = json_object_get(rewards, name);
    *out = json_number_value(v);
    if (!json_is_number(v))
        return error_set(err, ERR_FORMAT, "the reward of '%s' is %s", name,
                         v ? "no number" : "missing");
    if (fabs(*out) <= MAX_REWARD) return OK;
    return error_set(err, ERR_FORMAT, "the reward of '%s' is %g, beyond %g", name, *out,
                     MAX_REWARD);
}

static int bool_read(const char *name, const json_t *values, const char *field, bool *out,
                     struct error *err) {
    const json_t *v = json_object_get(values, name);
    *out = json_is_true(v);
    if (json_is_boolean(v)) return OK;
    return error_set(err, ERR_FORMAT, "'%s' in '%s' is %s", name, field,
                     v ? "neither true nor false" : "missing");
}

struct step_reply {
    const json_t *observations, *rewards, *terminations, *truncations, *infos;
};

static int agent_step_read(struct external_env *s, int i, const struct step_reply *reply,
                           struct error *err) {
    const char *name = s->c->agents[i];
    struct env_agent *agent = &s->agents[i];
    bool terminated, truncated;
    if (reward_read(name, reply->rewards, &agent->reward, err) != OK ||
        bool_read(name, reply->terminations, "terminations", &terminated, err) != OK ||
        bool_read(name, reply->truncations, "truncations", &truncated, err) != OK)
        return err->code;
    agent->status = terminated  ? ENV_AGENT_ABSENT
                    : truncated ? ENV_AGENT_TRUNCATED
                                : ENV_AGENT_ACTIVE;
    if (terminated) return OK;
    return agent_observation_read(s, i, reply->observations, reply->infos, err);
}

static int step_reply_read(struct external_env *s, const json_t *answer, struct error *err) {
    struct step_reply reply;
    if (field_read(s, answer, "observations", ENV_AGENT_ACTIVE, true, &reply.observations, err) !=
            OK ||
        field_read(s, answer, "rewards", ENV_AGENT_ACTIVE, true, &reply.rewards, err) != OK ||
        field_read(s, answer, "terminations", ENV_AGENT_ACTIVE, true, &reply.terminations, err) !=
            OK ||
        field_read(s, answer, "truncations", ENV_AGENT_ACTIVE, true, &reply.truncations, err) !=
            OK ||
        field_read(s, answer, "infos", ENV_AGENT_ACTIVE, false, &reply.infos, err) != OK)
        return err->code;
    for (int i = 0; i < s->c->n_agents; i++)
        if (s->agents[i].status == ENV_AGENT_ACTIVE && agent_step_read(s, i, &reply, err) != OK)
            return err->code;
    return OK;
}

/* Returns OK if the answer reports no error; else sets the error that it reports. */
static int reported_error(const json_t *answer, struct error *err) {
    const json_t *v = json_object_get(answer, "error");
    if (!v) return OK;
    struct buf clean = {0};
    const char *text = json_is_string(v) ? json_string_value(v) : "an error";
    buf_add_sanitized(&clean, text, MIN(strlen(text), 512));
    error_set(err, ERR_STATE, "it says: %s", clean.data ? clean.data : "");
    buf_release(&clean);
    return err->code;
}

static int reply_read(struct external_env *s, const json_t *answer, struct error *err) {
    int rc = json_is_object(answer) ? reported_error(answer, err)
                                    : error_set(err, ERR_FORMAT, "its answer is not an object");
    if (rc == OK)
        rc = s->is_reset ? reset_reply_read(s, answer, err) : step_reply_read(s, answer, err);
    s->tick = s->is_reset ? 0 : s->tick + 1;
    if (rc == OK) return OK;
    return error_wrap(err, s->is_reset ? "world %d, reset" : "world %d, tick %d", s->index,
                      s->tick);
}

static int replies_read(struct external_envs *c, const json_t *v, struct error *err) {
    if (c->n_worlds == 1) return reply_read(&c->worlds[0], v, err);
    if (reported_error(v, err) != OK) return err->code;
    if (!json_is_array(v) || json_array_size(v) != (size_t)c->n_waiting)
        return error_set(err, ERR_FORMAT,
                         "a list of %d requests requires a list of as many answers (--num-envs %d)",
                         c->n_waiting, c->n_worlds);
    int rc = OK;
    for (int i = 0; rc == OK && i < c->n_waiting; i++)
        rc = reply_read(&c->worlds[c->waiting[i]], json_array_get(v, (size_t)i), err);
    return rc;
}

/* requests */

static json_t *request_exchange(struct external_envs *c, struct error *err) {
    const char *text;
    size_t len;
    if (c->exchange(c->ctx, &c->queued_line, &text, &len, err) != OK) return NULL;
    struct json_limits limits = WORLD_SERVER_JSON_BOUNDS;
    return json_parse_limited(text, len, "its answer", &limits, err);
}

static int env_error(const struct external_envs *c, struct error *err) {
    return error_wrap(err, "the environment '%s'", c->command);
}

static int queued_requests_send(struct external_envs *c, struct error *err) {
    if (!c->n_waiting) return OK;
    buf_puts(&c->queued_line, c->n_worlds > 1 ? "]\n" : "\n");
    json_t *v = request_exchange(c, err);
    int rc = v ? replies_read(c, v, err) : err->code;
    json_decref(v);
    c->queued_line.len = 0;
    c->n_waiting = 0;
    return rc == OK ? OK : env_error(c, err);
}

static struct buf *request_begin(struct external_env *s, bool is_reset) {
    struct external_envs *c = s->c;
    s->is_reset = is_reset;
    buf_puts(&c->queued_line, c->n_waiting ? "," : c->n_worlds > 1 ? "[" : "");
    c->waiting[c->n_waiting++] = s->index;
    buf_puts(&c->queued_line, "{");
    if (c->n_worlds > 1) buf_printf(&c->queued_line, "\"world\":%d,", s->index);
    return &c->queued_line;
}

static void external_env_will_reset(void *ctx, uint64_t seed) {
    struct external_env *s = ctx;
    buf_printf(request_begin(s, true), "\"reset\":{\"seed\":%" PRIu64 "}}", seed);
    s->requested = true;
}

static int external_env_reset(void *ctx, uint64_t seed, struct error *err) {
    struct external_env *s = ctx;
    if (!s->requested) external_env_will_reset(s, seed);
    s->requested = false;
    return queued_requests_send(s->c, err);
}

static void external_env_will_step(void *ctx, const int16_t *actions) {
    struct external_env *s = ctx;
    struct buf *out = NULL;
    for (int i = 0; i < s->c->n_agents; i++) {
        s->agents[i].reward = 0;
        if (s->agents[i].status != ENV_AGENT_ACTIVE) continue;
        if (out)
            buf_puts(out, ",");
        else
            buf_puts(out = request_begin(s, false), "\"step\":{");
        buf_printf(out, "%s:%s", s->c->quoted_agents[i], s->c->quoted_actions[actions[i]]);
    }
    if (out) buf_puts(out, "}}");
    s->requested = true;
}

static int external_env_step(void *ctx, const int16_t *actions, double *rewards,
                             struct error *err) {
    struct external_env *s = ctx;
    if (!s->requested) external_env_will_step(s, actions);
    s->requested = false;
    int rc = queued_requests_send(s->c, err);
    for (int i = 0; i < s->c->n_agents; i++) rewards[i] = s->agents[i].reward;
    return rc;
}

/* the rest of the interface of environment.h */

static bool external_env_prompt(void *ctx, int agent, struct buf *out) {
    const struct env_agent *state = &((const struct external_env *)ctx)->agents[agent];
    if (state->status == ENV_AGENT_ABSENT) return false;
    buf_add(out, state->prompt.data, state->prompt.len);
    return true;
}

static bool external_env_is_truncated(void *ctx, int agent) {
    return ((const struct external_env *)ctx)->agents[agent].status == ENV_AGENT_TRUNCATED;
}

/* The action whose name or text occurs first in the generated text; of several at the same
 * position, the longest. */
static int external_env_parse(void *ctx, const char *text) {
    const struct external_envs *c = ((const struct external_env *)ctx)->c;
    const char *first = NULL;
    size_t longest = 0;
    int found = -1;
    for (int i = 0; i < 2 * c->n_actions; i++) {
        const char *word = (i < c->n_actions ? c->action_texts : c->actions)[i % c->n_actions],
                   *position = strcasestr(text, word);
        size_t n = strlen(word);
        if (!position || (first && (position > first || (position == first && n <= longest))))
            continue;
        first = position;
        longest = n;
        found = i % c->n_actions;
    }
    return found;
}

static int external_env_expert_action(void *ctx, int agent) {
    return ((const struct external_env *)ctx)->agents[agent].expert_action;
}

static void envs_init(struct external_envs *c) {
    size_t n = (size_t)c->n_worlds;
    c->worlds = xcalloc(n, sizeof *c->worlds);
    c->envs = xcalloc(n, sizeof *c->envs);
    c->list = xcalloc(n, sizeof *c->list);
    c->waiting = xcalloc(n, sizeof *c->waiting);
    for (int i = 0; i < c->n_worlds; i++) {
        struct env_agent *agents = xcalloc((size_t)c->n_agents, sizeof *agents);
        c->worlds[i] = (struct external_env){.c = c, .index = i, .agents = agents};
        c->envs[i] = (struct environment){.ctx = &c->worlds[i],
                                          .n_agents = c->n_agents,
                                          .n_actions = c->n_actions,
                                          .actions = (const char *const *)c->action_texts,
                                          .reset = external_env_reset,
                                          .prompt = external_env_prompt,
                                          .is_truncated = external_env_is_truncated,
                                          .step = external_env_step,
                                          .will_reset = external_env_will_reset,
                                          .will_step = external_env_will_step,
                                          .parse = external_env_parse,
                                          .expert_action =
                                              c->has_expert ? external_env_expert_action : NULL};
        c->list[i] = &c->envs[i];
    }
}

/* opening */

static int spaces_read(struct external_envs *c, const json_t *v, struct error *err) {
    const json_t *steps = json_object_get(v, "max_steps");
    if (!json_is_object(v)) return error_set(err, ERR_FORMAT, "its answer is not an object");
    if (reported_error(v, err) != OK) return err->code;
    if (names_read(v, "possible_agents", ENV_MAX_AGENTS, &c->agents, &c->n_agents, err) != OK ||
        names_read(v, "actions", ENV_MAX_ACTIONS, &c->actions, &c->n_actions, err) != OK ||
        names_read(v, json_object_get(v, "said") ? "said" : "actions", ENV_MAX_ACTIONS,
                   &c->action_texts, &c->n_actions, err) != OK)
        return err->code;
    c->max_steps = json_integer_value(steps);
    if (steps && !json_is_null(steps) && (!json_is_integer(steps) || c->max_steps < 1))
        return error_set(err, ERR_FORMAT, "'max_steps' must be a whole number, at least 1");
    c->quoted_agents = quote_all(c->agents, c->n_agents);
    c->quoted_actions = quote_all(c->actions, c->n_actions);
    c->agent_index = json_object();
    for (int i = 0; i < c->n_agents; i++)
        json_object_set_new(c->agent_index, c->agents[i], json_integer(i));
    return OK;
}

static int spaces_request(struct external_envs *c, struct error *err) {
    buf_puts(&c->queued_line, "{\"spaces\":{}}\n");
    json_t *v = request_exchange(c, err);
    int rc = v ? spaces_read(c, v, err) : err->code;
    json_decref(v);
    c->queued_line.len = 0;
    if (rc != OK) return error_wrap(err, "the environment '%s', spaces", c->command);
    envs_init(c);
    return OK;
}

static struct external_envs *external_envs_alloc(external_envs_exchange_fn exchange, void *ctx,
                                                 int n_worlds, bool has_expert) {
    struct external_envs *c = xcalloc(1, sizeof *c);
    *c = (struct external_envs){
        .exchange = exchange, .ctx = ctx, .n_worlds = n_worlds, .has_expert = has_expert};
    return c;
}

struct external_envs *external_envs_new(external_envs_exchange_fn exchange, void *ctx, int n_worlds,
                                        bool has_expert, struct error *err) {
    struct external_envs *c = external_envs_alloc(exchange, ctx, n_worlds, has_expert);
    c->command = xstrdup("in-process");
    if (spaces_request(c, err) == OK) return c;
    external_envs_free(c);
    return NULL;
}

static int program_exchange(void *ctx, const struct buf *line, const char **answer, size_t *len,
                            struct error *err) {
    return subprocess_exchange(ctx, line, answer, len, err);
}

struct external_envs *external_envs_open(const char *command, double timeout, int n_worlds,
                                         bool has_expert, struct error *err) {
    struct subprocess *program = subprocess_open(command, timeout, err);
    if (!program) return NULL;
    struct external_envs *c = external_envs_alloc(program_exchange, program, n_worlds, has_expert);
    c->program = program;
    c->command = xstrdup(command);
    if (spaces_request(c, err) == OK) return c;
    external_envs_free(c);
    return NULL;
}

void external_envs_free(struct external_envs *c) {
    if (!c) return;
    subprocess_close(c->program);
    for (int i = 0; c->worlds && i < c->n_worlds; i++) {
        for (int k = 0; k < c->n_agents; k++) buf_release(&c->worlds[i].agents[k].prompt);
        free(c->worlds[i].agents);
    }
    names_free(c->agents, c->n_agents);
    names_free(c->actions, c->n_actions);
    names_free(c->action_texts, c->n_actions);
    names_free(c->quoted_agents, c->n_agents);
    names_free(c->quoted_actions, c->n_actions);
    json_decref(c->agent_index);
    buf_release(&c->queued_line);
    free(c->worlds);
    free(c->envs);
    free(c->list);
    free(c->waiting);
    free(c->command);
    free(c);
}

struct environment *const *external_envs_list(const struct external_envs *c) {
    return c->list;
}

int64_t external_envs_max_steps(const struct external_envs *c) {
    return c->max_steps;
}

static json_t *names_json(char *const *names, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_string(names[i]));
    return list;
}

json_t *external_envs_json(const struct external_envs *c) {
    json_t *v = json_pack("{s:o,s:o,s:o}", "agents", names_json(c->agents, c->n_agents), "actions",
                          names_json(c->actions, c->n_actions), "said",
                          names_json(c->action_texts, c->n_actions));
    json_object_set_new(v, "command", json_from_path(c->command));
    return v;
}
