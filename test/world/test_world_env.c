/*
 * Policies in an environment of another program: through the pipe the simulation is equal bit by
 * bit to the one in the process; the requests contain the actions; and invalid answers of the
 * program are refused.
 *
 * The model is tiny and initialised from a seed, with fry's tokenizer.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "world/world.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>

#include <cmocka.h>

static struct model *model;

static int model_make(void **state) {
    (void)state;
    struct error err;
    struct model_config c = fixture_shape(2, 32, 4, 2, 8, 48);
    c.vocab_size = 768;
    c.max_seq_len = 128;
    model = fixture_model_of(c, false, TENSOR_F32, NUMERIC_EXACT);
    tokenizer_free(model->tok);
    model->tok = tokenizer_from_json("models/fry/tokenizer.json", &err);
    return model->tok ? 0 : -1;
}

static int model_drop(void **state) {
    (void)state;
    model_close(model);
    return 0;
}

/* the program's side of the protocol, without a pipe */

enum { AGENTS = 5, TICKS = 40, MAX_WORLDS = 3 };

struct served {
    struct world_server *server;
    struct buf answer;
    int lines, lists;
};

static int served_exchange(void *ctx, const struct buf *line, const char **answer, size_t *len,
                           struct error *err) {
    struct served *s = ctx;
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
static struct world_rules rules_make(void) {
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

static struct simulation_options options_make(int worlds) {
    struct simulation_options o = {0};
    options_default(simulation_option_rows, &o);
    options_default(learner_option_rows, &o.learn);
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

static void options_drop(struct simulation_options *o) {
    options_release(simulation_option_rows, o);
    options_release(learner_option_rows, &o->learn);
}

static int gone, survived; /* ticks with a dead agent; episodes that ended by the time limit */

/* Runs both simulations tick by tick. Without a measure, fitness is the reward. */
static void simulations_equal(int worlds) {
    struct error err;
    struct world_rules rules = rules_make();
    struct simulation_options o = options_make(worlds);
    struct served s = {.server = world_server_new(&rules, AGENTS, TICKS, &err)};
    struct external_envs *outside = external_envs_new(served_exchange, &s, worlds, false, &err);
    if (!outside) fail_msg("%s", err.text);
    assert_int_equal(external_envs_max_steps(outside), TICKS);
    struct grid_env *places = xcalloc(MAX_WORLDS, sizeof *places);
    struct environment envs[MAX_WORLDS], *list[MAX_WORLDS];
    for (int i = 0; i < worlds; i++) {
        places[i] = (struct grid_env){.rules = &rules, .n_agents = AGENTS};
        envs[i] = grid_env_as_environment(&places[i]);
        envs[i].episode_stats = NULL;
        list[i] = &envs[i];
    }
    struct simulation *here = simulation_new(model, &o, list, NULL, 0, NULL, &err);
    struct simulation *there =
        simulation_new(model, &o, external_envs_list(outside), NULL, 0, NULL, &err);
    assert_true(here && there);
    for (int g = 0; g < 3; g++) {
        assert_int_equal(simulation_begin_generation(here, NULL, &err), OK);
        assert_int_equal(simulation_begin_generation(there, NULL, &err), OK);
        for (int n = 1, ticks = 0; n > 0;) {
            n = simulation_step(here, &err);
            int m = simulation_step(there, &err);
            if (m < 0) fail_msg("%s", err.text);
            assert_int_equal(n, m);
            gone += n > 0 && n < worlds * AGENTS;
            survived += n > 0 && ++ticks == TICKS;
            assert_memory_equal(simulation_actions(here), simulation_actions(there),
                                (size_t)(worlds * AGENTS) * sizeof(int16_t));
        }
        simulation_end_generation(here);
        simulation_end_generation(there);
        for (int i = 0; i < simulation_n_policies(here); i++) {
            const struct policy_record *a = simulation_policy(here, i),
                                       *b = simulation_policy(there, i);
            assert_string_equal(a->name, b->name);
            assert_string_equal(a->adapter->hash, b->adapter->hash);
            assert_true(a->outcome.reward == b->outcome.reward);
            assert_memory_equal(a->critic, b->critic, learner_critic_bytes());
        }
        struct episode_stats x[2], y[2];
        assert_int_equal(simulation_evaluate(here, x, &err), OK);
        assert_int_equal(simulation_evaluate(there, y, &err), OK);
        assert_memory_equal(x, y, sizeof x);
    }
    int measured = worlds == 1 ? 2 : 1; // its two maps at once, or one after the other
    assert_true(s.lines <= 1 + 3 * (1 + measured) * (TICKS + 1)); // one line per tick for all
                                                                  // worlds
    assert_int_equal(s.lists, worlds > 1 ? s.lines - 1 : 0);      // only the request for the spaces
                                                                  // is a single one
    simulation_free(here);
    simulation_free(there);
    external_envs_free(outside);
    world_server_free(s.server);
    buf_release(&s.answer);
    free(places);
    options_drop(&o);
    world_rules_release(&rules);
}

static void test_same_simulation_as_in_process(void **state) {
    (void)state;
    simulations_equal(1);
    simulations_equal(3);
    assert_true(gone > 0 && survived > 0); // otherwise one of the two endings was not tested
}

/* An agent that is truncated before the episode ends gets no more requests. */
static void test_truncated_agents(void **state) {
    (void)state;
    struct error err;
    struct world_rules rules = rules_make();
    struct simulation_options o = options_make(2);
    struct served s = {.server = world_server_new(&rules, AGENTS, 3, &err)};
    struct external_envs *outside = external_envs_new(served_exchange, &s, 2, false, &err);
    struct simulation *l =
        simulation_new(model, &o, external_envs_list(outside), NULL, 0, NULL, &err);
    assert_int_equal(simulation_begin_generation(l, NULL, &err), OK);
    for (int tick = 0; tick < 3; tick++) assert_int_equal(simulation_step(l, &err), 2 * AGENTS);
    assert_int_equal(simulation_step(l, &err), 0);
    simulation_end_generation(l);
    assert_int_equal(s.lines, 1 + 1 + 3);
    simulation_free(l);
    external_envs_free(outside);
    world_server_free(s.server);
    buf_release(&s.answer);
    options_drop(&o);
    world_rules_release(&rules);
}

/* scripted answers and recorded requests */

enum { SCRIPT = 8 };
struct script {
    const char *answers[SCRIPT];
    int at;
    struct buf asked;
};

static int script_exchange(void *ctx, const struct buf *line, const char **answer, size_t *len,
                           struct error *err) {
    struct script *s = ctx;
    (void)err;
    buf_add(&s->asked, line->data, line->len);
    assert_true(s->at < SCRIPT && s->answers[s->at]);
    *answer = s->answers[s->at++];
    *len = strlen(*answer);
    return OK;
}

#define SPACES                                                                                     \
    "{\"possible_agents\":[\"a\",\"b \\\"\\u00e9\"],\"actions\":[\"go_left\",\"go_right\",\"go\"]" \
    ",\"said\":[\"left\",\"right\",\"go\"],\"max_steps\":null}"

static void request_is(struct script *s, const char *want) {
    assert_string_equal(s->asked.data, want);
    s->asked.len = 0;
}

static void prompt_is(const struct environment *e, int agent, const char *want) {
    struct buf b = {0};
    assert_true(e->prompt(e->ctx, agent, &b));
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static bool is_gone(const struct environment *e, int agent) {
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
    assert_null(e->teach);
    request_is(&s, "{\"spaces\":{}}\n");
    assert_int_equal(e->reset(e->ctx, 7, &err), OK);
    request_is(&s, "{\"reset\":{\"seed\":7}}\n");
    prompt_is(e, 0, "own");
    prompt_is(e, 1, "y Action:");
    if (e->step(e->ctx, (int16_t[]){2, 0}, rewards, &err) != OK) fail_msg("%s", err.text);
    request_is(&s, "{\"step\":{\"a\":\"go\",\"b \\\"\u00e9\":\"go_left\"}}\n");
    assert_true(rewards[0] == -0.1 && rewards[1] == 2);
    assert_true(e->over(e->ctx, 0) && !e->over(e->ctx, 1) && is_gone(e, 1));
    prompt_is(e, 0, "z Action:"); // truncated: its observation can still be evaluated
    /* no agent is left: no request, no reward */
    assert_int_equal(e->step(e->ctx, (int16_t[]){-1, -1}, rewards, &err), OK);
    assert_true(s.asked.len == 0 && rewards[0] == 0 && rewards[1] == 0);
    assert_int_equal(e->parse(e->ctx, "I Go_Right, not left"), 1);
    assert_int_equal(e->parse(e->ctx, "just go"), 2);
    assert_int_equal(e->parse(e->ctx, "stay"), -1);
    external_envs_free(c);
    buf_release(&s.asked);
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
    double rewards[2], paid[2][2] = {{1, 2}, {3, 0}};
    s.asked.len = 0;
    for (int i = 0; i < 2; i++) e[i]->will_reset(e[i]->ctx, 5 + (uint64_t)i);
    for (int i = 0; i < 2; i++) assert_int_equal(e[i]->reset(e[i]->ctx, 5 + (uint64_t)i, &err), OK);
    request_is(&s, "[{\"world\":0,\"reset\":{\"seed\":5}},{\"world\":1,\"reset\":{\"seed\":6}}]\n");
    assert_int_equal(e[1]->teach(e[1]->ctx, 0), 1);
    assert_true(is_gone(e[0], 1)); // a possible agent that is absent
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 2; i++) e[i]->will_step(e[i]->ctx, act[i]);
        for (int i = 0; i < 2; i++) {
            if (e[i]->step(e[i]->ctx, act[i], rewards, &err) != OK) fail_msg("%s", err.text);
            assert_true(rewards[0] == paid[k][i]);
        }
        request_is(&s, k ? "[{\"world\":0,\"step\":{\"a\":\"go_left\"}}]\n"
                         : "[{\"world\":0,\"step\":{\"a\":\"go_left\"}},"
                           "{\"world\":1,\"step\":{\"a\":\"go_right\"}}]\n");
    }
    assert_int_equal(e[0]->teach(e[0]->ctx, 0), 0);
    external_envs_free(c);
    buf_release(&s.asked);
}

/* refused answers */

#define TWO "{\"possible_agents\":[\"a\",\"b\"],\"actions\":[\"left\",\"right\"]}"
#define BOTH "{\"observations\":{\"a\":\"x\",\"b\":\"y\"}}"
#define PAID(observations, rewards, terminations, truncations)                                     \
    "{\"observations\":" observations ",\"rewards\":" rewards ",\"terminations\":" terminations    \
    ",\"truncations\":" truncations "}"
#define XY "{\"a\":\"x\",\"b\":\"y\"}"
#define ONES "{\"a\":1,\"b\":1}"
#define NO "{\"a\":false,\"b\":false}"

static const struct refusal {
    const char *spaces, *reset, *step, *says;
    bool taught;
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
    {TWO, "[]", NULL, "world 0, reset: its answer is not an object", false},
    {TWO, "{}", NULL, "no 'observations'", false},
    {TWO, "{\"observations\":{}}", NULL, "no agent is present", false},
    {TWO, "{\"observations\":{\"c\":\"x\"}}", NULL,
     "'c' is not a possible agent, but in observations", false},
    {TWO, "{\"observations\":{\"a\":[1,2]}}", NULL, "the observation of 'a' is not text", false},
    {TWO, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":1}}", NULL,
     "info of 'a' is not an object", false},
    {TWO, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"b\":{}}}", NULL, "an info, but no", false},
    {TWO, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":{\"prompt\":3}}}", NULL,
     "prompt of 'a' is not text", false},
    {TWO, "{\"observations\":{\"a\":\"\"},\"infos\":{\"a\":{\"prompt\":\"\"}}}", NULL, "is empty",
     false},
    {TWO, BOTH, NULL, "the info of 'a' names no 'teacher'", true},
    {TWO, "{\"observations\":{\"a\":\"x\"},\"infos\":{\"a\":{\"teacher\":\"up\"}}}", NULL,
     "the teacher of 'a' names none of the actions", true},
    {TWO, BOTH, "{\"error\":\"tired\"}", "world 0, tick 1: it says: tired", false},
    {TWO, BOTH, "{\"observations\":{}}", "no 'rewards'", false},
    {TWO, BOTH, PAID(XY, "{\"a\":1}", NO, NO), "the reward of 'b' is missing", false},
    {TWO, BOTH, PAID(XY, "{\"a\":1,\"b\":\"1\"}", NO, NO), "the reward of 'b' is no number", false},
    {TWO, BOTH, PAID(XY, "{\"a\":1,\"b\":NaN}", NO, NO), "its answer", false},
    {TWO, BOTH, PAID(XY, "{\"a\":1,\"b\":-2e9}", NO, NO), "the reward of 'b' is -2e+09", false},
    {TWO, BOTH, PAID(XY, "{\"a\":1,\"b\":1,\"c\":1}", NO, NO), "'c' is not a possible agent",
     false},
    {TWO, "{\"observations\":{\"a\":\"x\"}}", PAID(XY, ONES, NO, NO),
     "'b' did not act, but is in observations", false},
    {TWO, BOTH, PAID(XY, ONES, "{\"a\":false}", NO), "'b' in 'terminations' is missing", false},
    {TWO, BOTH, PAID(XY, ONES, NO, "{\"a\":0,\"b\":false}"), "neither true nor false", false},
    {TWO, BOTH, PAID("{\"a\":\"x\"}", ONES, NO, NO), "'b' has no observation", false},
    {TWO, BOTH, PAID("{\"a\":\"x\"}", ONES, NO, "{\"a\":false,\"b\":true}"),
     "'b' has no observation", false},
};

static void refused(const struct refusal *r) {
    struct error err = {0};
    struct script s = {{r->spaces, r->reset, r->step}, 0, {0}};
    double rewards[2];
    int rc = OK;
    struct external_envs *c = external_envs_new(script_exchange, &s, 1, r->taught, &err);
    struct environment *e = c ? external_envs_list(c)[0] : NULL;
    assert_true(r->reset ? e != NULL : e == NULL);
    if (e) rc = e->reset(e->ctx, 1, &err);
    if (r->step) assert_int_equal(rc, OK);
    if (r->step) rc = e->step(e->ctx, (int16_t[]){0, 1}, rewards, &err);
    if (r->reset) assert_true(rc < 0);
    if (!strstr(err.text, r->says) || !strstr(err.text, "the environment 'its own'"))
        fail_msg("'%s' does not say '%s'", err.text, r->says);
    external_envs_free(c);
    buf_release(&s.asked);
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(refusals); i++) refused(&refusals[i]);
}

static void test_excessive_input_is_refused(void **state) {
    (void)state;
    char *text = xcalloc(1, ENV_PROMPT + 2);
    memset(text, 'x', ENV_PROMPT + 1);
    char *reset = xasprintf("{\"observations\":{\"a\":\"%s\"}}", text);
    char *name = xasprintf("{\"possible_agents\":[\"%.65s\"],\"actions\":[\"x\"]}", text);
    refused(&(struct refusal){TWO, reset, NULL, "the text for 'a' has 4097 bytes, more than 4096",
                              false});
    refused(&(struct refusal){name, NULL, NULL, "has 65 bytes", false});
    free(text);
    free(reset);
    free(name);
}

/* A list of another length, or no list. */
static void test_lists_refused(void **state) {
    (void)state;
    static const char *const answers[] = {BOTH, "[" BOTH "]", "[" BOTH "," BOTH "," BOTH "]"};
    for (size_t i = 0; i < ARRAY_LEN(answers); i++) {
        struct error err;
        struct script s = {{TWO, answers[i]}, 0, {0}};
        struct external_envs *c = external_envs_new(script_exchange, &s, 2, false, &err);
        struct environment *const *e = external_envs_list(c);
        for (int k = 0; k < 2; k++) e[k]->will_reset(e[k]->ctx, 1);
        assert_int_equal(e[0]->reset(e[0]->ctx, 1, &err), ERR_FORMAT);
        assert_non_null(
            strstr(err.text, "a list of 2 requests requires a list of as many answers"));
        external_envs_free(c);
        buf_release(&s.asked);
    }
}

/* Programs that exit or do not answer, before and after they have listed their agents. */
static void test_programs(void **state) {
    (void)state;
    static const struct {
        const char *command, *says;
        bool begins;
    } rows[] = {
        {"exit 3", "it ended with exit code 3", false},
        {"kill -9 $$", "it died of signal 9", false},
        {"exec sleep 30", "it was silent for 0.3 seconds (--timeout)", false},
        {"read l; echo '" TWO "'; read l; exit 4", "it ended with exit code 4", true},
        {"read l; echo '" TWO "'; exec sleep 30", "it was silent for 0.3 seconds", true},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct error err;
        double timeout = strstr(rows[i].says, "silent") ? 0.3 : 20;
        struct external_envs *c = external_envs_open(rows[i].command, timeout, 1, false, &err);
        assert_true(rows[i].begins == (c != NULL));
        struct environment *e = c ? external_envs_list(c)[0] : NULL;
        if (e) assert_true(e->reset(e->ctx, 1, &err) < 0);
        if (!strstr(err.text, rows[i].says) || !strstr(err.text, rows[i].command))
            fail_msg("'%s' does not say '%s'", err.text, rows[i].says);
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
    return cmocka_run_group_tests(tests, model_make, model_drop);
}
