/*
 * test_world_env: policies in an environment of another program. A simulation over the protocol
 * equals one in the process bit by bit; the requests contain the actions; and invalid answers of
 * the program are refused.
 *
 * The model is tiny and initialised from a seed, with fry's tokenizer.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "old_defaults.h"
#include "world/world.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>

#include <cmocka.h>

static struct model *model;

static int model_make(void **state) {
    (void)state;
    model = fixture_model_with_fry_tokenizer(fixture_shape(2, 32, 4, 2, 8, 48));
    return model ? 0 : -1;
}

static int model_free(void **state) {
    (void)state;
    model_close(model);
    return 0;
}

/* the program's side of the protocol, without a pipe */

enum { AGENTS = 5, TICKS = 40, MAX_WORLDS = 3 };

struct local_server {
    struct world_server *server;
    struct buf answer;
    int lines, lists;
};

static int local_server_exchange(void *ctx, const struct buf *line, const char **answer,
                                 size_t *len, struct error *err) {
    struct local_server *s = ctx;
    (void)err;
    assert_int_equal(line->data[line->len - 1], '\n');
    s->lines++;
    s->lists += line->data[0] == '[';
    s->answer.len = 0;
    assert_true(world_server_handle(s->server, line->data, line->len - 1, &s->answer));
    *answer = s->answer.data;
    *len = s->answer.len;
    return OK;
}

/* Some agents die from bites, some survive. */
static struct world_rules rules_init(void) {
    struct world_rules r;
    struct error err;
    assert_int_equal(world_rules_load(&r, "repaired", &err), OK);
    r.size = 10;
    r.predators = 2;
    r.predator_damage = 15;
    r.energy = 60;
    assert_int_equal(world_rules_check(&r, &err), OK);
    return r;
}

static struct simulation_options options_init(int worlds) {
    struct simulation_options o = {0};
    options_default(simulation_option_rows, &o);
    options_default(learner_option_rows, &o.learn);
    simulation_options_set_old_defaults(&o);
    o.n_envs = worlds;
    o.steps = TICKS;
    o.seed = 3;
    o.elites = 1;
    o.eval_maps = 2;
    o.init_noise = 0.2;
    o.learn.update_interval = 4;
    o.learn.warmup_steps = 2;
    o.learn.train.r = 2;
    return o;
}

static void options_free(struct simulation_options *o) {
    options_release(simulation_option_rows, o);
    options_release(learner_option_rows, &o->learn);
}

static int n_terminated, n_truncated; /* number of ticks with a dead agent; number of episodes that
                                         ended by the time limit */

/* Runs both simulations tick by tick. Without episode statistics, fitness is the reward. */
static void simulations_equal(int worlds) {
    struct error err;
    struct world_rules rules = rules_init();
    struct simulation_options o = options_init(worlds);
    struct local_server s = {.server = world_server_new(&rules, AGENTS, TICKS, &err)};
    struct external_envs *external =
        external_envs_new(local_server_exchange, &s, worlds, false, &err);
    if (!external) fail_msg("%s", err.text);
    assert_int_equal(external_envs_max_steps(external), TICKS);
    struct grid_env *grids = xcalloc(MAX_WORLDS, sizeof *grids);
    struct environment envs[MAX_WORLDS], *list[MAX_WORLDS];
    for (int i = 0; i < worlds; i++) {
        grids[i] = (struct grid_env){.rules = &rules, .n_agents = AGENTS};
        envs[i] = grid_env_as_environment(&grids[i]);
        envs[i].episode_stats = NULL;
        list[i] = &envs[i];
    }
    struct simulation *in_process = simulation_new(model, &o, list, NULL, 0, NULL, &err);
    struct simulation *over_pipe =
        simulation_new(model, &o, external_envs_list(external), NULL, 0, NULL, &err);
    assert_true(in_process && over_pipe);
    for (int g = 0; g < 3; g++) {
        assert_int_equal(simulation_begin_generation(in_process, NULL, &err), OK);
        assert_int_equal(simulation_begin_generation(over_pipe, NULL, &err), OK);
        for (int n = 1, ticks = 0; n > 0;) {
            n = simulation_step(in_process, &err);
            int m = simulation_step(over_pipe, &err);
            if (m < 0) fail_msg("%s", err.text);
            assert_int_equal(n, m);
            n_terminated += n > 0 && n < worlds * AGENTS;
            n_truncated += n > 0 && ++ticks == TICKS;
            assert_memory_equal(simulation_actions(in_process), simulation_actions(over_pipe),
                                (size_t)(worlds * AGENTS) * sizeof(int16_t));
        }
        simulation_end_generation(in_process);
        simulation_end_generation(over_pipe);
        for (int i = 0; i < simulation_n_policies(in_process); i++) {
            const struct policy_record *a = simulation_policy(in_process, i),
                                       *b = simulation_policy(over_pipe, i);
            assert_string_equal(a->name, b->name);
            assert_string_equal(a->adapter->hash, b->adapter->hash);
            assert_true(a->outcome.reward == b->outcome.reward);
            assert_memory_equal(a->critic, b->critic, learner_critic_bytes(&o.learn));
        }
        struct episode_stats x[2], y[2];
        assert_int_equal(simulation_evaluate(in_process, x, &err), OK);
        assert_int_equal(simulation_evaluate(over_pipe, y, &err), OK);
        assert_memory_equal(x, y, sizeof x);
    }
    int evaluations = worlds == 1 ? 2 : 1; // its two maps at once, or one after the other
    assert_true(s.lines <= 1 + 3 * (1 + evaluations) * (TICKS + 1)); // one line per tick for all
                                                                     // worlds
    assert_int_equal(s.lists, worlds > 1 ? s.lines - 1 : 0); // only the request for the spaces
                                                             // is a single one
    simulation_free(in_process);
    simulation_free(over_pipe);
    external_envs_free(external);
    world_server_free(s.server);
    buf_release(&s.answer);
    free(grids);
    options_free(&o);
    world_rules_release(&rules);
}

static void test_same_simulation_as_in_process(void **state) {
    (void)state;
    simulations_equal(1);
    simulations_equal(3);
    assert_true(n_terminated > 0 &&
                n_truncated > 0); // otherwise one of the two endings was not tested
}

/* An agent that is truncated before the episode ends gets no more requests. */
static void test_truncated_agents(void **state) {
    (void)state;
    struct error err;
    struct world_rules rules = rules_init();
    struct simulation_options o = options_init(2);
    struct local_server s = {.server = world_server_new(&rules, AGENTS, 3, &err)};
    struct external_envs *external = external_envs_new(local_server_exchange, &s, 2, false, &err);
    struct simulation *l =
        simulation_new(model, &o, external_envs_list(external), NULL, 0, NULL, &err);
    assert_int_equal(simulation_begin_generation(l, NULL, &err), OK);
    for (int tick = 0; tick < 3; tick++) assert_int_equal(simulation_step(l, &err), 2 * AGENTS);
    assert_int_equal(simulation_step(l, &err), 0);
    simulation_end_generation(l);
    assert_int_equal(s.lines, 1 + 1 + 3);
    simulation_free(l);
    external_envs_free(external);
    world_server_free(s.server);
    buf_release(&s.answer);
    options_free(&o);
    world_rules_release(&rules);
}

/* scripted answers and recorded requests */

enum { SCRIPT = 8 };
struct script {
    const char *answers[SCRIPT];
    int next;
    struct buf requests;
};

static int script_exchange(void *ctx, const struct buf *line, const char **answer, size_t *len,
                           struct error *err) {
    struct script *s = ctx;
    (void)err;
    buf_add(&s->requests, line->data, line->len);
    assert_true(s->next < SCRIPT && s->answers[s->next]);
    *answer = s->answers[s->next++];
    *len = strlen(*answer);
    return OK;
}

#define SPACES                                                                                     \
    "{\"possible_agents\":[\"a\",\"b \\\"\\u00e9\"],\"actions\":[\"go_left\",\"go_right\",\"go\"]" \
    ",\"said\":[\"left\",\"right\",\"go\"],\"max_steps\":null}"

static void assert_requests(struct script *s, const char *want) {
    assert_string_equal(s->requests.data, want);
    s->requests.len = 0;
}

static void assert_prompt(const struct environment *e, int agent, const char *want) {
    struct buf b = {0};
    assert_true(e->prompt(e->ctx, agent, &b));
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static bool has_no_prompt(const struct environment *e, int agent) {
    struct buf b = {0};
    bool here = e->prompt(e->ctx, agent, &b);
    buf_release(&b);
    return !here;
}

static void test_one_world(void **state) {
    (void)state;
    struct error err;
    struct script s = {
        {SPACES,
         "{\"observations\":{\"a\":\"x\",\"b \\\"\\u00e9\":\"y\"},\"infos\":{\"a\":{\"prompt\":"
         "\"own\"}}}",
         "{\"observations\":{\"a\":\"z\"},\"rewards\":{\"a\":-0.1,\"b \\\"\\u00e9\":2},"
         "\"terminations\":{\"a\":false,\"b \\\"\\u00e9\":true},\"truncations\":{\"a\":true,\"b "
         "\\\"\\u00e9\":false}}"},
        0,
        {0}};
    struct external_envs *c = external_envs_new(script_exchange, &s, 1, false, &err);
    if (!c) fail_msg("%s", err.text);
    struct environment *e = external_envs_list(c)[0];
    double rewards[2];
    assert_int_equal(external_envs_max_steps(c), 0);
    assert_int_equal(e->n_agents, 2);
    assert_int_equal(e->n_actions, 3);
    assert_string_equal(e->actions[1], "right");
    assert_null(e->expert_action);
    assert_requests(&s, "{\"spaces\":{}}\n");
    assert_int_equal(e->reset(e->ctx, 7, &err), OK);
    assert_requests(&s, "{\"reset\":{\"seed\":7}}\n");
    assert_prompt(e, 0, "own");
    assert_prompt(e, 1, "y Action:");
    if (e->step(e->ctx, (int16_t[]){2, 0}, rewards, &err) != OK) fail_msg("%s", err.text);
    assert_requests(&s, "{\"step\":{\"a\":\"go\",\"b \\\"\u00e9\":\"go_left\"}}\n");
    assert_true(rewards[0] == -0.1 && rewards[1] == 2);
    assert_true(e->is_truncated(e->ctx, 0) && !e->is_truncated(e->ctx, 1) && has_no_prompt(e, 1));
    assert_prompt(e, 0, "z Action:"); // truncated: its observation can still be evaluated
    /* no agent is left: no request, no reward */
    assert_int_equal(e->step(e->ctx, (int16_t[]){-1, -1}, rewards, &err), OK);
    assert_true(s.requests.len == 0 && rewards[0] == 0 && rewards[1] == 0);
    assert_int_equal(e->parse(e->ctx, "I Go_Right, not left"), 1);
    assert_int_equal(e->parse(e->ctx, "just go"), 2);
    assert_int_equal(e->parse(e->ctx, "stay"), -1);
    external_envs_free(c);
    buf_release(&s.requests);
}

/* Requests of one tick are one line; a single world is a list too. */
static void test_batched_requests(void **state) {
    (void)state;
    struct error err;
#define BEGIN "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":{\"teacher\":\"go_right\"}}}"
#define STEP(reward, over)                                                                         \
    "{\"observations\":{\"a\":\"x\"},\"rewards\":{\"a\":" reward                                   \
    "},\"terminations\":{\"a\":false},\"truncations\":{\"a\":" over                                \
    "},\"infos\":{\"a\":{\"teacher\":\"left\"}}}"
    struct script s = {{SPACES, "[" BEGIN "," BEGIN "]",
                        "[" STEP("1", "false") "," STEP("2", "true") "]",
                        "[" STEP("3", "false") "]"},
                       0,
                       {0}};
    struct external_envs *c = external_envs_new(script_exchange, &s, 2, true, &err);
    assert_non_null(c);
    struct environment *const *e = external_envs_list(c);
    int16_t act[2][2] = {{0, -1}, {1, -1}};
    double rewards[2], expected[2][2] = {{1, 2}, {3, 0}};
    s.requests.len = 0;
    for (int i = 0; i < 2; i++) e[i]->will_reset(e[i]->ctx, 5 + (uint64_t)i);
    for (int i = 0; i < 2; i++) assert_int_equal(e[i]->reset(e[i]->ctx, 5 + (uint64_t)i, &err), OK);
    assert_requests(
        &s, "[{\"world\":0,\"reset\":{\"seed\":5}},{\"world\":1,\"reset\":{\"seed\":6}}]\n");
    assert_int_equal(e[1]->expert_action(e[1]->ctx, 0), 1);
    assert_true(has_no_prompt(e[0], 1)); // a possible agent that is absent
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 2; i++) e[i]->will_step(e[i]->ctx, act[i]);
        for (int i = 0; i < 2; i++) {
            if (e[i]->step(e[i]->ctx, act[i], rewards, &err) != OK) fail_msg("%s", err.text);
            assert_true(rewards[0] == expected[k][i]);
        }
        assert_requests(&s, k ? "[{\"world\":0,\"step\":{\"a\":\"go_left\"}}]\n"
                              : "[{\"world\":0,\"step\":{\"a\":\"go_left\"}},"
                                "{\"world\":1,\"step\":{\"a\":\"go_right\"}}]\n");
    }
    assert_int_equal(e[0]->expert_action(e[0]->ctx, 0), 0);
    external_envs_free(c);
    buf_release(&s.requests);
}

/* refused answers */

#define TWO_AGENTS "{\"possible_agents\":[\"a\",\"b\"],\"actions\":[\"left\",\"right\"]}"
#define RESET_REPLY "{\"observations\":{\"a\":\"x\",\"b\":\"y\"}}"
#define STEP_REPLY(observations, rewards, terminations, truncations)                               \
    "{\"observations\":" observations ",\"rewards\":" rewards ",\"terminations\":" terminations    \
    ",\"truncations\":" truncations "}"
#define OBSERVATIONS "{\"a\":\"x\",\"b\":\"y\"}"
#define REWARDS "{\"a\":1,\"b\":1}"
#define FALSE_FOR_BOTH "{\"a\":false,\"b\":false}"

static const struct refusal {
    const char *spaces, *reset, *step, *message;
    bool has_expert;
} refusals[] = {
    {"[]", NULL, NULL, "spaces: its answer is not an object", false},
    {"nonsense", NULL, NULL, "its answer", false},
    {"{\"error\":\"no \\u001b[31m licence\"}", NULL, NULL, "it says: no \xef\xbf\xbd[31m licence",
     false},
    {"{\"actions\":[\"left\"]}", NULL, NULL, "'possible_agents' must be a list of 1 to 1024",
     false},
    {"{\"possible_agents\":[],\"actions\":[\"left\"]}", NULL, NULL, "must be a list of 1 to 1024",
     false},
    {"{\"possible_agents\":[\"a\",\"a\"],\"actions\":[\"left\"]}", NULL, NULL, "names 'a' twice",
     false},
    {"{\"possible_agents\":[\"a\"],\"actions\":[1]}", NULL, NULL, "'actions' must be a list",
     false},
    {"{\"possible_agents\":[\"\"],\"actions\":[\"x\"]}", NULL, NULL, "has 0 bytes, not 1 to 64",
     false},
    {"{\"possible_agents\":[\"\\u0007\"],\"actions\":[\"x\"]}", NULL, NULL, "control characters",
     false},
    {"{\"possible_agents\":[\"a\"],\"actions\":[\"x\"],\"said\":[\"x\",\"y\"]}", NULL, NULL,
     "'said' has 2 names for 1 actions", false},
    {"{\"possible_agents\":[\"a\"],\"actions\":[\"x\"],\"max_steps\":0}", NULL, NULL,
     "'max_steps' must be", false},
    {TWO_AGENTS, "[]", NULL, "world 0, reset: its answer is not an object", false},
    {TWO_AGENTS, "{}", NULL, "'observations' of its answer", false},
    {TWO_AGENTS, "{\"observations\":{}}", NULL, "no agent is present", false},
    {TWO_AGENTS, "{\"observations\":{\"c\":\"x\"}}", NULL,
     "'c' is not a possible agent, but in observations", false},
    {TWO_AGENTS, "{\"observations\":{\"a\":[1,2]}}", NULL, "the observation of 'a' is not text",
     false},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":1}}", NULL,
     "info of 'a' is not an object", false},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"b\":{}}}", NULL, "an info, but no",
     false},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":{\"prompt\":3}}}", NULL,
     "prompt of 'a' is not text", false},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"\"},\"infos\":{\"a\":{\"prompt\":\"\"}}}", NULL,
     "is empty", false},
    {TWO_AGENTS, RESET_REPLY, NULL, "the info of 'a' names no 'teacher'", true},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":{\"teacher\":\"up\"}}}", NULL,
     "the teacher of 'a' names none of the actions", true},
    {TWO_AGENTS, RESET_REPLY, "{\"error\":\"tired\"}", "world 0, tick 1: it says: tired", false},
    {TWO_AGENTS, RESET_REPLY, "{\"observations\":{}}", "'rewards' of its answer", false},
    {TWO_AGENTS, RESET_REPLY, STEP_REPLY(OBSERVATIONS, "{\"a\":1}", FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "the reward of 'b' is missing", false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY(OBSERVATIONS, "{\"a\":1,\"b\":\"1\"}", FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "the reward of 'b' is no number", false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY(OBSERVATIONS, "{\"a\":1,\"b\":NaN}", FALSE_FOR_BOTH, FALSE_FOR_BOTH), "its answer",
     false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY(OBSERVATIONS, "{\"a\":1,\"b\":-2e9}", FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "the reward of 'b' is -2e+09", false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY(OBSERVATIONS, "{\"a\":1,\"b\":1,\"c\":1}", FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "'c' is not a possible agent", false},
    {TWO_AGENTS, "{\"observations\":{\"a\":\"x\"}}",
     STEP_REPLY(OBSERVATIONS, REWARDS, FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "'b' did not act, but is in observations", false},
    {TWO_AGENTS, RESET_REPLY, STEP_REPLY(OBSERVATIONS, REWARDS, "{\"a\":false}", FALSE_FOR_BOTH),
     "'b' in 'terminations' is missing", false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY(OBSERVATIONS, REWARDS, FALSE_FOR_BOTH, "{\"a\":0,\"b\":false}"),
     "neither true nor false", false},
    {TWO_AGENTS, RESET_REPLY, STEP_REPLY("{\"a\":\"x\"}", REWARDS, FALSE_FOR_BOTH, FALSE_FOR_BOTH),
     "'b' has no observation", false},
    {TWO_AGENTS, RESET_REPLY,
     STEP_REPLY("{\"a\":\"x\"}", REWARDS, FALSE_FOR_BOTH, "{\"a\":false,\"b\":true}"),
     "'b' has no observation", false},
};

static void assert_refused(const struct refusal *r) {
    struct error err = {0};
    struct script s = {{r->spaces, r->reset, r->step}, 0, {0}};
    double rewards[2];
    int rc = OK;
    struct external_envs *c = external_envs_new(script_exchange, &s, 1, r->has_expert, &err);
    struct environment *e = c ? external_envs_list(c)[0] : NULL;
    assert_true(r->reset ? e != NULL : e == NULL);
    if (e) rc = e->reset(e->ctx, 1, &err);
    if (r->step) assert_int_equal(rc, OK);
    if (r->step) rc = e->step(e->ctx, (int16_t[]){0, 1}, rewards, &err);
    if (r->reset) assert_true(rc < 0);
    if (!strstr(err.text, r->message) || !strstr(err.text, "the environment 'in-process'"))
        fail_msg("'%s' does not say '%s'", err.text, r->message);
    external_envs_free(c);
    buf_release(&s.requests);
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(refusals); i++) assert_refused(&refusals[i]);
}

static void test_excessive_input_is_refused(void **state) {
    (void)state;
    char *text = xcalloc(1, ENV_PROMPT_MAX_BYTES + 2);
    memset(text, 'x', ENV_PROMPT_MAX_BYTES + 1);
    char *reset = xasprintf("{\"observations\":{\"a\":\"%s\"}}", text);
    char *name = xasprintf("{\"possible_agents\":[\"%.65s\"],\"actions\":[\"x\"]}", text);
    assert_refused(&(struct refusal){TWO_AGENTS, reset, NULL,
                                     "the text for 'a' has 4097 bytes, more than 4096", false});
    assert_refused(&(struct refusal){name, NULL, NULL, "has 65 bytes", false});
    free(text);
    free(reset);
    free(name);
}

/* A list of another length, or no list. */
static void test_lists_refused(void **state) {
    (void)state;
    static const char *const answers[] = {RESET_REPLY, "[" RESET_REPLY "]",
                                          "[" RESET_REPLY "," RESET_REPLY "," RESET_REPLY "]"};
    for (size_t i = 0; i < ARRAY_LEN(answers); i++) {
        struct error err;
        struct script s = {{TWO_AGENTS, answers[i]}, 0, {0}};
        struct external_envs *c = external_envs_new(script_exchange, &s, 2, false, &err);
        struct environment *const *e = external_envs_list(c);
        for (int k = 0; k < 2; k++) e[k]->will_reset(e[k]->ctx, 1);
        assert_int_equal(e[0]->reset(e[0]->ctx, 1, &err), ERR_FORMAT);
        assert_non_null(
            strstr(err.text, "a list of 2 requests requires a list of as many answers"));
        external_envs_free(c);
        buf_release(&s.requests);
    }
}

/* Programs that exit or do not answer, before and after they have listed their agents. */
static void test_programs(void **state) {
    (void)state;
    static const struct {
        const char *command, *message;
        bool lists_agents;
    } rows[] = {
        {"exit 3", "it ended with exit code 3", false},
        {"kill -9 $$", "it died of signal 9", false},
        {"exec sleep 30", "it was silent for 0.3 seconds (--timeout)", false},
        {"read l; echo '" TWO_AGENTS "'; read l; exit 4", "it ended with exit code 4", true},
        {"read l; echo '" TWO_AGENTS "'; exec sleep 30", "it was silent for 0.3 seconds", true},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct error err;
        double timeout = strstr(rows[i].message, "silent") ? 0.3 : 20;
        struct external_envs *c = external_envs_open(rows[i].command, timeout, 1, false, &err);
        assert_true(rows[i].lists_agents == (c != NULL));
        struct environment *e = c ? external_envs_list(c)[0] : NULL;
        if (e) assert_true(e->reset(e->ctx, 1, &err) < 0);
        if (!strstr(err.text, rows[i].message) || !strstr(err.text, rows[i].command))
            fail_msg("'%s' does not say '%s'", err.text, rows[i].message);
        external_envs_free(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_simulation_as_in_process),
        cmocka_unit_test(test_truncated_agents),
        cmocka_unit_test(test_one_world),
        cmocka_unit_test(test_batched_requests),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_excessive_input_is_refused),
        cmocka_unit_test(test_lists_refused),
        cmocka_unit_test(test_programs),
    };
    signal(SIGPIPE, SIG_IGN); // as the program does
    return cmocka_run_group_tests(tests, model_make, model_free);
}
