/*
 * test_world_pipe: interfaces of the world. Traces reproduce every bit or report the first tick
 * that differs; the environment over a pipe; policy programs with valid and invalid answers; the
 * terminal viewer; and the C interface.
 */
/* levels: once */
#define _GNU_SOURCE
#include "cli/world_viewer.h"
#include "folder.h"
#include "sandbox/sandbox.h"
#include "shoal.h"
#include "world/world.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { AGENTS = 6, TICKS = 230 };

static const char *const worlds[] = {"legacy",
                                     "repaired",
                                     "worlds/maze.yaml",
                                     "worlds/predators.yaml",
                                     "worlds/builders.yaml",
                                     "worlds/homes.yaml",
                                     "worlds/talk.yaml"};

static char folder[] = "/tmp/shoal-world-XXXXXX";

static int folder_make(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int folder_clean(void **state) {
    (void)state;
    return folder_remove(folder);
}

static struct world_rules rules_load(const char *name) {
    struct world_rules r;
    struct error err;
    if (world_rules_load(&r, name, &err) != OK) fail_msg("%s", err.text);
    return r;
}

static void random_actions(const struct world *w, const struct world_rules *r, int16_t *actions) {
    for (int i = 0; i < w->n_agents; i++) {
        struct rng rng = rng_make(w->seed, RNG_TEST, (uint32_t)i, (uint32_t)w->tick);
        uint32_t n = rng_below(&rng, 8); /* picks and drops more often than by chance */
        n = n >= WORLD_N_ACTIONS ? n - 2 : n;
        actions[i] = (int16_t)(n + WORLD_N_ACTIONS * rng_below(&rng, (uint32_t)r->vocabulary + 1));
    }
}

static void assert_same_hash(const struct world *a, const struct world *b) {
    char x[HASH_LEN], y[HASH_LEN];
    world_hash(a, x);
    world_hash(b, y);
    assert_string_equal(x, y);
}

/* A simulation of at most TICKS, recorded in memory and, with a path, in a file. */
static void simulate_random(struct trace *t, struct world *w, const char *rules, uint64_t seed,
                            const char *path) {
    struct error err;
    struct world_rules r = rules_load(rules);
    FILE *f = NULL;
    assert_int_equal(trace_init(t, &r, AGENTS, seed, TICKS, "random", &err), OK);
    trace_seek(t, w, 0);
    if (path) assert_non_null(f = trace_create(t, path, &err));
    while (w->tick < TICKS && !world_terminated(w)) {
        int16_t actions[WORLD_AGENTS_MAX];
        random_actions(w, &r, actions);
        assert_int_equal(trace_append(t, w, actions, &err), OK);
        world_step(w, &r, actions);
        if (f) assert_int_equal(trace_write_tick(t, w, f, &err), OK);
    }
    if (f) assert_int_equal(trace_close(w, f, &err), OK);
    world_rules_release(&r);
}

static struct buf file_text(const char *path) {
    struct buf b = {0};
    struct error err;
    if (file_read(path, 1 << 24, &b, &err) != OK) fail_msg("%s", err.text);
    return b;
}

/* traces */

/* Every tick of a trace that was read again equals the original, in any order of seeking. */
static void test_trace_round_trip(void **state) {
    (void)state;
    struct world w[3] = {0};
    struct error err;
    char *path = path_join(folder, "life.jsonl");
    for (size_t k = 0; k < ARRAY_LEN(worlds); k++) {
        struct trace t, back;
        w[0].n_agents = w[1].n_agents = w[2].n_agents = 0;
        simulate_random(&t, &w[0], worlds[k], 40 + k, path);
        if (trace_load(&back, path, &err) != OK) fail_msg("%s: %s", worlds[k], err.text);
        assert_true(back.closed);
        assert_int_equal(back.n_ticks, t.n_ticks);
        assert_string_equal(back.policy, "random");
        trace_seek(&back, &w[1], t.n_ticks);
        assert_same_hash(&w[0], &w[1]);
        for (int64_t tick = t.n_ticks; tick >= 0; tick -= 37) {
            trace_seek(&back, &w[1], tick); /* backwards, from the beginning */
            trace_seek(&t, &w[2], tick);
            assert_same_hash(&w[1], &w[2]);
        }
        trace_release(&t);
        trace_release(&back);
    }
    free(path);
}

/* A trace cut at any byte, as after a crash, has every complete line; a flipped byte is detected or
 * has no effect. */
static void test_trace_cut_and_damaged(void **state) {
    (void)state;
    struct world w = {0};
    struct error err;
    char *path = path_join(folder, "cut.jsonl");
    struct trace t, back;
    simulate_random(&t, &w, "repaired", 3, path);
    struct buf b = file_text(path);
    const char *header_end = memchr(b.data, '\n', b.len);
    for (size_t n = 0; n < b.len; n += 1 + n % 97) {
        int64_t lines = 0;
        for (size_t i = 0; i < n; i++) lines += b.data[i] == '\n';
        int rc = trace_parse(&back, "cut", b.data, n, &err);
        assert_int_equal(rc, lines ? OK : ERR_FORMAT);
        if (lines) assert_int_equal(back.n_ticks, lines - 1);
        assert_false(back.closed);
        trace_release(&back);
    }
    /* In the actions before tick 100, one other move there gives another world. */
    char *at = strstr(header_end, "\"tick\":50,\"actions\":[");
    assert_non_null(at);
    at += strlen("\"tick\":50,\"actions\":[");
    *at = *at == '0' ? '1' : '0';
    assert_int_equal(trace_parse(&back, "damaged", b.data, b.len, &err), ERR_MISMATCH);
    if (!strstr(err.text, "at tick 100 the world is not")) fail_msg("%s", err.text);
    trace_release(&back);
    trace_release(&t);
    buf_release(&b);
    free(path);
}

#define HEAD(more)                                                                                 \
    "{\"shoal_world\":1,\"rules\":{\"rules\":\"seed\",\"energy\":3},\"agents\":2,\"seed\":1,"      \
    "\"steps\":9,\"policy\":\"x\"" more "}\n"
#define TICK(n, actions) "{\"tick\":" #n ",\"actions\":" actions "}\n"
#define THREE_TICKS TICK(1, "[0,1]") TICK(2, "[4,5]") TICK(3, "[0,0]")

static void test_trace_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
    } table[] = {
        {"", "holds no whole line"},
        {HEAD("") THREE_TICKS TICK(4, "[-1,-1]"), NULL},
        {HEAD(",\"fork\":2") THREE_TICKS, NULL},
        {HEAD("") "{\"tick\":1,\"acti", NULL},
        {"{}\n", "line 1: no trace of a world"},
        {"[]\n", "line 1: no trace of a world"},
        {HEAD(",\"more\":2"), "line 1: unknown key 'more'"},
        {HEAD(",\"fork\":-2"), "'fork' must be a whole number from 0"},
        {"{\"shoal_world\":2}\n", "'shoal_world' must be a whole number from 1 to 1"},
        {"{\"shoal_world\":1,\"agents\":65}\n", "'agents' must be a whole number from 1 to 64"},
        {"{\"shoal_world\":1,\"agents\":6,\"seed\":1.5}\n", "'seed' must be a whole number"},
        {"{\"shoal_world\":1,\"agents\":6,\"seed\":1,\"steps\":1,\"policy\":\"\"}\n",
         "'rules' must be an object"},
        {"{\"shoal_world\":1,\"agents\":6,\"seed\":1,\"steps\":1,\"policy\":\"\",\"rules\":{"
         "\"size\":3}}\n",
         "it must be 4 to 64"},
        {HEAD("") TICK(2, "[0,1]"), "line 2: 'tick' must be a whole number from 1 to 1"},
        {HEAD("") TICK(1, "[0]"), "line 2: 'actions' must be a list of 2"},
        {HEAD("") TICK(1, "[0,6]"), "line 2: agent 1 does no action"},
        {HEAD("") TICK(1, "[-1,0]"), "line 2: agent 0 does no action"},
        {HEAD("") TICK(1, "[0,true]"), "line 2: agent 1 does no action"},
        {HEAD("") THREE_TICKS TICK(4, "[0,-1]"), "line 5: agent 0 is dead"},
        {HEAD("") "{\"tick\":1,\"actions\":[0,0],\"hash\":\"00\"}\n", "at tick 1 the world is not"},
        {HEAD("") "{\"end\":1,\"hash\":\"00\"}\n", "'end' must be a whole number from 0 to 0"},
        {HEAD("") "{\"end\":0}\n", "at tick 0 the world is not"},
        {HEAD("") "\n", "line 2: 'trace' is empty"},
        {HEAD("") "{\"tick\":1\n", "line 2"},
        {HEAD("") HEAD(""), "line 2: unknown key"},
    };
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        struct trace t;
        struct error err = {0};
        int rc = trace_parse(&t, "x", table[i].text, strlen(table[i].text), &err);
        bool good = table[i].message ? rc != OK && strstr(err.text, table[i].message) : rc == OK;
        if (!good) fail_msg("row %zu: %d %s", i, rc, err.text);
        trace_release(&t);
    }
}

/* Rules are equal after JSON and back, including maps and rewards. */
static void test_rules_as_json(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(worlds); k++) {
        struct error err;
        struct world_rules r = rules_load(worlds[k]), back;
        r.rewards.move = -0.1 - 1e-9;
        json_t *v = world_rules_json(&r), *again;
        if (world_rules_from_json(&back, "x", v, &err) != OK) fail_msg("%s", err.text);
        again = world_rules_json(&back);
        assert_true(json_equal(v, again));
        assert_true(back.rewards.move == r.rewards.move);
        json_decref(v);
        json_decref(again);
        world_rules_release(&r);
        world_rules_release(&back);
    }
}

/* the environment */

static struct world_server *server_open(const char *name, int64_t steps) {
    struct error err;
    struct world_rules r = rules_load(name);
    struct world_server *s = world_server_new(&r, 3, steps, &err);
    assert_non_null(s);
    world_rules_release(&r);
    return s;
}

/* Returns the reply, which must be one line of JSON for any request. */
static json_t *request_bytes(struct world_server *s, const char *line, size_t len) {
    struct buf out = {0};
    struct error err;
    world_server_handle(s, line, len, &out);
    assert_true(out.len > 1 && memchr(out.data, '\n', out.len) == out.data + out.len - 1);
    json_t *v = json_parse(out.data, out.len, "answer", &err);
    if (!v) fail_msg("%s in %s", err.text, out.data);
    buf_release(&out);
    return v;
}

static json_t *request(struct world_server *s, const char *line) {
    return request_bytes(s, line, strlen(line));
}

static json_t *request_ok(struct world_server *s, const char *line) {
    json_t *v = request(s, line);
    if (json_object_get(v, "error")) fail_msg("%s: %s", line, json_get_string(v, "error"));
    return v;
}

static void request_ignore_reply(struct world_server *s, const char *line) {
    json_decref(request_ok(s, line));
}

static void assert_request_error(struct world_server *s, const char *line, const char *message) {
    json_t *v = request(s, line);
    if (!strstr(json_get_string(v, "error"), message))
        fail_msg("%s: no '%s' in '%s'", line, message, json_get_string(v, "error"));
    json_decref(v);
}

static char *server_state(struct world_server *s) {
    json_t *v = request_ok(s, "{\"state\":{}}");
    char *text = json_canonical(v);
    json_decref(v);
    return text;
}

static const char *observation(const json_t *v, const char *agent) {
    return json_get_string(json_object_get(v, "observations"), agent);
}

/* Observations over the pipe equal those of the world. */
static void test_pipe_equals_the_world(void **state) {
    (void)state;
    struct world_server *s = server_open("repaired", 50);
    struct world_rules r = rules_load("repaired");
    struct world w;
    r.food = 30;
    r.rewards.move = 0.25;
    world_reset(&w, &r, 2, 9);
    json_t *v = request_ok(s, "{\"reset\":{\"seed\":9,\"options\":{\"agents\":2,\"food\":30,"
                              "\"rewards\":{\"move\":0.25}}}}");
    for (int tick = 0; tick < 50; tick++) {
        int16_t actions[WORLD_AGENTS_MAX];
        assert_int_equal(json_object_size(json_object_get(v, "observations")), 2);
        for (int i = 0; i < 2; i++) {
            struct buf see = {0}, prompt = {0};
            char name[32];
            snprintf(name, sizeof name, "agent_%d", i);
            const json_t *info = json_object_get(json_object_get(v, "infos"), name);
            world_observe(&w, &r, i, &see);
            world_prompt(&w, &r, i, &prompt);
            assert_string_equal(observation(v, name), see.data);
            assert_string_equal(json_get_string(info, "prompt"), prompt.data);
            assert_int_equal(json_get_number(info, "energy"), w.agents[i].energy);
            if (tick)
                assert_true(json_get_number(json_object_get(v, "rewards"), name) ==
                            w.agents[i].reward);
            buf_release(&see);
            buf_release(&prompt);
        }
        random_actions(&w, &r, actions);
        char line[96];
        snprintf(line, sizeof line, "{\"step\":{\"agent_1\":%d,\"agent_0\":\"%s\"}}", actions[1],
                 world_action_names[actions[0]]);
        world_step(&w, &r, actions);
        json_decref(v);
        v = request_ok(s, line);
    }
    json_decref(v);
    world_rules_release(&r);
    world_server_free(s);
}

/* As in PettingZoo: an agent that died or was truncated is in that step's answer, and in no later
 * one. */
static void test_pipe_agents_leave(void **state) {
    (void)state;
    struct world_server *s = server_open("legacy", 5);
    request_ignore_reply(
        s, "{\"reset\":{\"seed\":1,\"options\":{\"energy\":2,\"agents\":1,\"steps\":3}}}");
    request_ignore_reply(s, "{\"step\":{\"agent_0\":0}}");
    json_t *v = request_ok(s, "{\"step\":{\"agent_0\":0}}");
    assert_true(json_is_true(json_object_get(json_object_get(v, "terminations"), "agent_0")));
    assert_true(json_is_false(json_object_get(json_object_get(v, "truncations"), "agent_0")));
    json_decref(v);
    v = request_ok(s, "{\"agents\":{}}");
    assert_int_equal(json_array_size(json_object_get(v, "agents")), 0);
    json_decref(v);
    assert_request_error(s, "{\"step\":{\"agent_0\":0}}", "no agent is left to act");
    request_ignore_reply(s, "{\"reset\":{\"seed\":1,\"options\":{\"steps\":1}}}");
    v = request_ok(s, "{\"step\":{\"agent_0\":0,\"agent_1\":1,\"agent_2\":2}}");
    assert_true(json_is_false(json_object_get(json_object_get(v, "terminations"), "agent_2")));
    assert_true(json_is_true(json_object_get(json_object_get(v, "truncations"), "agent_2")));
    json_decref(v);
    assert_request_error(s, "{\"step\":{}}", "no agent is left to act");
    world_server_free(s);
}

static void test_pipe_errors_change_nothing(void **state) {
    (void)state;
    static const struct {
        const char *line, *message;
    } table[] = {
        {"", "is empty"},
        {"{", "request"},
        {"7", "a request is an object"},
        {"{}", "the request is missing"},
        {"{\"world\":1}", "the request is missing"},
        {"{\"fly\":{}}", "no request 'fly'"},
        {"{\"step\":{},\"reset\":{}}", "two requests at once"},
        {"{\"agents\":{\"x\":1}}", "'agents' takes {}"},
        {"{\"step\":[]}", "'step' takes an object"},
        {"{\"world\":1024,\"agents\":{}}", "'world' must be a number from 0 to 1023"},
        {"{\"world\":5,\"step\":{}}", "no world has begun"},
        {"{\"world\":5,\"state\":{}}", "no world has begun"},
        {"{\"step\":{\"agent_0\":0,\"agent_1\":0}}", "'agent_2' has no action"},
        {"{\"step\":{\"agent_0\":0,\"agent_1\":0,\"agent_3\":0}}", "no agent 'agent_3'"},
        {"{\"step\":{\"agent_00\":0}}", "no agent 'agent_00'"},
        {"{\"step\":{\"agent_99999999999999999999\":0}}", "no agent"},
        {"{\"step\":{\"agent_0\":6,\"agent_1\":0,\"agent_2\":0}}", "'agent_0': an action is text"},
        {"{\"step\":{\"agent_0\":null}}", "a number from 0 to 5"},
        {"{\"step\":{\"agent_0\":{\"action\":1,\"word\":1}}}", "'word' must be a number from 0"},
        {"{\"step\":{\"agent_0\":{\"action\":1,\"wird\":1}}}", "only 'action' and 'word'"},
        {"{\"reset\":{\"sead\":1}}", "only 'seed' and 'options'"},
        {"{\"reset\":{\"seed\":-1}}", "'seed' must be"},
        {"{\"reset\":{\"seed\":\"1\"}}", "'seed' must be"},
        {"{\"reset\":{\"options\":[]}}", "'options' must be an object"},
        {"{\"reset\":{\"options\":{\"agents\":0}}}", "'agents' must be"},
        {"{\"reset\":{\"options\":{\"steps\":1e9}}}", "'steps' must be"},
        {"{\"reset\":{\"options\":{\"sise\":9}}}", "unknown key 'sise'"},
        {"{\"reset\":{\"options\":{\"size\":3}}}", "it must be 4 to 64"},
        {"{\"reset\":{\"options\":{\"food-every\":3,\"food_every\":3}}}", "given twice"},
        {"{\"reset\":{\"options\":{\"map\":[\"##\"]}}}", "the map"},
        {"{\"restore\":{}}", "no trace of a world"},
        {"{\"restore\":{\"shoal_world\":1}}", "'agents' must be"},
    };
    struct world_server *s = server_open("repaired", 50);
    request_ignore_reply(s, "{\"reset\":{\"seed\":4}}");
    request_ignore_reply(s, "{\"step\":{\"agent_0\":0,\"agent_1\":1,\"agent_2\":2}}");
    char *before = server_state(s);
    for (size_t i = 0; i < ARRAY_LEN(table); i++)
        assert_request_error(s, table[i].line, table[i].message);
    for (uint32_t k = 0; k < 300; k++) { /* noise, and requests with a random byte */
        char line[] = "{\"step\":{\"agent_0\":0,\"agent_1\":1,\"agent_9\":2}}";
        struct rng r = rng_make(1, RNG_TEST, 0, k);
        for (uint32_t i = 0; k % 2 && i < sizeof line; i++) line[i] = (char)rng_u32(&r);
        line[rng_below(&r, sizeof line - 1)] = (char)rng_u32(&r);
        json_t *v = request_bytes(s, line, sizeof line - 1);
        assert_true(*json_get_string(v, "error"));
        json_decref(v);
    }
    char *after = server_state(s);
    assert_string_equal(before, after);
    free(before);
    free(after);
    world_server_free(s);
}

/* From a snapshot the same actions give the same answers, in the same server and in another one. */
static void test_pipe_snapshots(void **state) {
    (void)state;
    struct world_server *s = server_open("worlds/predators.yaml", 400),
                        *other = server_open("legacy", 5);
    static const char step[] = "{\"step\":{\"agent_0\":\"go up\",\"agent_1\":\"?\",\"agent_2\":3}}";
    request_ignore_reply(s, "{\"reset\":{\"seed\":4}}");
    for (int i = 0; i < 20; i++) request_ignore_reply(s, step);
    char *snapshot = server_state(s), *line = xasprintf("{\"restore\":%s", snapshot + 9);
    assert_memory_equal(snapshot, "{\"state\":", 9);
    json_t *first[10];
    for (int i = 0; i < 10; i++) first[i] = request_ok(s, step);
    request_ignore_reply(s, line);
    request_ignore_reply(other, line);
    for (int i = 0; i < 10; i++) {
        json_t *again = request_ok(s, step), *there = request_ok(other, step);
        assert_true(json_equal(first[i], again));
        assert_true(json_equal(first[i], there));
        json_decref(again);
        json_decref(there);
        json_decref(first[i]);
    }
    /* Another tick does not match the hash. */
    char *hash = strstr(line, "\"hash\":\"") + 8;
    *hash = *hash == '0' ? '1' : '0';
    assert_request_error(s, line, "at tick 20 the world is not the one");
    free(snapshot);
    free(line);
    world_server_free(s);
    world_server_free(other);
}

/* Several worlds, and several requests on one line. */
static void test_pipe_many_worlds(void **state) {
    (void)state;
    struct world_server *s = server_open("repaired", 50), *alone = server_open("repaired", 50);
    static const char step[] = "{\"step\":{\"agent_0\":1,\"agent_1\":1,\"agent_2\":3}}";
    json_t *v =
        request(s, "[{\"world\":0,\"reset\":{\"seed\":5}},{\"world\":9,\"reset\":{}},{\"x\":{}}]");
    assert_int_equal(json_array_size(v), 3);
    assert_non_null(json_object_get(json_array_get(v, 2), "error"));
    json_decref(v);
    v = request(s, "[{\"world\":9,\"step\":{\"agent_0\":1,\"agent_1\":1,\"agent_2\":3}},"
                   "{\"step\":{\"agent_0\":1,\"agent_1\":1,\"agent_2\":3}}]");
    for (int i = 0; i < 2; i++) {
        char reset[64];
        snprintf(reset, sizeof reset, "{\"reset\":{\"seed\":%d}}", i ? 5 : 6); /* the next seed */
        request_ignore_reply(alone, reset);
        json_t *one = request_ok(alone, step);
        assert_true(json_equal(one, json_array_get(v, (size_t)i)));
        json_decref(one);
    }
    json_decref(v);
    world_server_free(s);
    world_server_free(alone);
}

/* Vocabulary, rule sets and maps as options of a reset. */
static void test_pipe_options(void **state) {
    (void)state;
    struct world_server *s = server_open("repaired", 50);
    json_t *v;
    for (int brief = 0; brief < 2; brief++) {
        char line[160];
        snprintf(line, sizeof line,
                 "{\"reset\":{\"seed\":5,\"options\":{\"words\":3,\"hearing\":99,\"agents\":2%s}}}",
                 brief ? "" : ",\"brief\":false");
        request_ignore_reply(s, line);
        v = request_ok(s,
                       "{\"step\":{\"agent_0\":{\"action\":\"west\",\"word\":2},\"agent_1\":20}}");
        const char *first = observation(v, "agent_0"), *second = observation(v, "agent_1");
        if (brief) { // after nine letters
            assert_string_equal(first + 17, " 3");
            assert_string_equal(second + 17, " 2");
        } else {
            assert_non_null(strstr(first, ". Heard: 3"));
            assert_non_null(strstr(second, ". Heard: 2"));
        }
        json_decref(v);
    }
    v = request_ok(s, "{\"spaces\":{}}");
    assert_int_equal(json_get_number(v, "n_actions"), 24);
    assert_int_equal(json_get_number(v, "max_steps"), 50);
    assert_int_equal(json_array_size(json_object_get(v, "possible_agents")), 2);
    json_decref(v);
    /* "pick up" picks, but under the legacy rules it moves north. */
    static const char pick[] = "{\"step\":{\"agent_0\":\"pick UP the food\"}}";
    static const char map[] = "\"agents\":1,\"map\":[\"#####\",\"#.H.#\",\"#.A.#\",\"#####\"]";
    for (int legacy = 0; legacy < 2; legacy++) {
        char line[200];
        snprintf(line, sizeof line, "{\"reset\":{\"options\":{%s%s}}}",
                 legacy ? "\"rules\":\"legacy\"," : "", map);
        request_ignore_reply(s, line);
        v = request_ok(s, pick);
        const json_t *info = json_object_get(json_object_get(v, "infos"), "agent_0");
        assert_string_equal(json_get_string(info, "action"), legacy ? "move_north" : "pick_food");
        assert_true(json_is_true(json_object_get(info, "parsed")));
        json_decref(v);
    }
    v = request_ok(s, "{\"step\":{\"agent_0\":\"私は\"}}");
    const json_t *info = json_object_get(json_object_get(v, "infos"), "agent_0");
    assert_true(json_is_false(json_object_get(info, "parsed")));
    json_decref(v);
    struct buf last = {0};
    assert_false(world_server_handle(s, "{\"close\":{}}", 12, &last));
    assert_string_equal(last.data, "{\"closed\":true}\n");
    buf_release(&last);
    world_server_free(s);
}

/* lines */

static void assert_line(struct line_reader *r, const char *wanted, size_t len) {
    const char *line;
    size_t n;
    struct error err;
    if (line_reader_next(r, 5, &line, &n, &err) != 1) fail_msg("no line");
    assert_int_equal(n, len);
    assert_memory_equal(line, wanted, n);
}

static void test_lines(void **state) {
    (void)state;
    int fd[2];
    const char *line;
    size_t n;
    struct error err;
    assert_int_equal(pipe(fd), 0);
    struct line_reader r = {.fd = fd[0], .limit = 10};
    static const char sent[] = "one\n\ntw\0o\xFF\n0123456789\n0123456789a\nlong, much longer\nend";
    for (size_t i = 0; i < sizeof sent - 1; i++) assert_int_equal(write(fd[1], sent + i, 1), 1);
    assert_line(&r, "one", 3);
    assert_line(&r, "", 0);
    assert_line(&r, "tw\0o\xFF", 5);
    assert_line(&r, "0123456789", 10);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(line_reader_next(&r, 5, &line, &n, &err), ERR_MEMORY);
        assert_non_null(strstr(err.text, "more than 10 bytes"));
    }
    assert_int_equal(line_reader_next(&r, 0.05, &line, &n, &err),
                     ERR_STATE); /* "end" has no end yet */
    close(fd[1]);
    assert_line(&r, "end", 3);
    assert_int_equal(line_reader_next(&r, 5, &line, &n, &err), 0);
    line_reader_release(&r);
    close(fd[0]);
}

/* A line above the limit that arrives in many reads is skipped to its end. */
static void test_long_lines(void **state) {
    (void)state;
    const char *line;
    size_t n;
    struct error err;
    FILE *f = tmpfile();
    assert_non_null(f);
    for (int i = 0; i < 300000; i++) fputc('x', f);
    fputs("\nnext\n", f);
    for (int i = 0; i < 300000; i++) fputc('x', f);
    rewind(f);
    struct line_reader r = {.fd = fileno(f), .limit = 1000};
    assert_int_equal(line_reader_next(&r, 0, &line, &n, &err), ERR_MEMORY);
    assert_true(r.b.cap < 280000);
    assert_line(&r, "next", 4);
    assert_int_equal(line_reader_next(&r, 0, &line, &n, &err), ERR_MEMORY);
    assert_int_equal(line_reader_next(&r, 0, &line, &n, &err), 0);
    line_reader_release(&r);
    fclose(f);
}

/* programs as policies */

#define ANSWER(text) "while read l; do echo '" text "'; done"

static void test_programs(void **state) {
    (void)state;
    static const struct {
        const char *command;
        double timeout;
        const char *message; /* NULL: it plays */
    } table[] = {
        {ANSWER("{\"actions\":{\"agent_0\":\"north\"}}"), 20, NULL},
        {"read l; exit 3", 20, "it ended with exit code 3"},
        {"read l; kill -9 $$", 20, "it died of signal 9"},
        {"no-such-program-here 2>/dev/null", 20, "it ended with exit code 127"},
        {"exec sleep 60", 0.2, "it was silent for 0.2 seconds"},
        {"read l; exec >&-; read l", 20, "it has closed its output or input"},
        {ANSWER(""), 20, "its answer"},
        {ANSWER("north"), 20, "its answer"},
        {ANSWER("[]"), 20, "its answer must be"},
        {ANSWER("{\"actions\":{}}"), 20, "'agent_0' has no action"},
        {ANSWER("{\"actions\":{\"agent_0\":9}}"), 20, "'agent_0': an action is text or a number"},
        {ANSWER("{\"actions\":{\"agent_0\":0,\"agent_1\":0}}"), 20, "no agent 'agent_1'"},
        {"head -c 1000 /dev/zero; echo", 20, "its answer"},
    };
    struct world_rules r = rules_load("repaired");
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        struct world w;
        struct error err;
        int16_t actions[WORLD_AGENTS_MAX] = {5};
        struct subprocess *o = subprocess_open(table[i].command, table[i].timeout, &err);
        assert_non_null(o);
        world_reset(&w, &r, 1, 1);
        int rc = subprocess_act(o, &w, &r, actions, &err);
        if (!table[i].message) {
            assert_int_equal(rc, OK);
            assert_int_equal(actions[0], MOVE_NORTH);
            world_step(&w, &r, actions);
            assert_int_equal(subprocess_act(o, &w, &r, actions, &err), OK);
        } else if (rc == OK || !strstr(err.text, table[i].message) || !strstr(err.text, "tick 0")) {
            fail_msg("'%s': %d %s", table[i].command, rc, err.text);
        }
        double began = clock_now();
        subprocess_close(o);
        assert_true(clock_now() - began < 10);
    }
    world_rules_release(&r);
}

/* the viewer */

static void press_keys(struct world_viewer *v, const char *keys) {
    struct error err;
    for (; *keys; keys++) assert_int_equal(world_viewer_key(v, *keys, &err), OK);
}

static void test_watch(void **state) {
    (void)state;
    struct trace t;
    struct world w = {0};
    struct error err;
    struct buf b = {0};
    simulate_random(&t, &w, "repaired", 8, NULL);
    struct world_viewer v = {.t = &t, .w = &w, .speed = 3};
    press_keys(&v, "<");
    assert_int_equal(w.tick, t.n_ticks - 10);
    press_keys(&v, "<<.");
    assert_int_equal(w.tick, t.n_ticks - 29);
    assert_true(v.paused);
    press_keys(&v, " >>>>>>");
    assert_int_equal(w.tick, t.n_ticks);
    assert_false(v.paused);
    assert_int_equal(world_viewer_step(&v, &err), 0);
    press_keys(&v, "pp");
    assert_int_equal(v.agent, AGENTS - 2);
    press_keys(&v, "nnnn+++-xyz");
    assert_int_equal(v.agent, 2);
    assert_int_equal(v.speed, 5);
    press_keys(&v, "--------------------------------++++++++++++++++++++++++++++++++++++++-");
    world_viewer_render(&v, false, &b);
    world_observe(&w, &t.rules, 2, &b);
    const char *line = strrchr(b.data, '\n') + 1; /* agent 2's observation is in the frame too */
    assert_non_null(strstr(strstr(b.data, "agent_2: "), line));
    char *status = xasprintf("tick %d of %d  seed 8  random", w.tick, TICKS);
    assert_non_null(strstr(b.data, status));
    free(status);
    assert_null(strchr(b.data, '\033'));
    press_keys(&v, "q");
    assert_true(v.quit);
    world_viewer_seek(&v, 0, &err);
    b.len = 0;
    world_viewer_render(&v, true, &b);
    assert_non_null(strstr(b.data, "\033[7mC\033[0m"));
    assert_non_null(strstr(b.data, "nothing yet"));
    buf_release(&b);
    trace_release(&t);
}

/* the C interface */

static void test_library(void **state) {
    (void)state;
    struct shoal_error err = {0};
    struct shoal_agent a;
    struct world w;
    struct world_rules r = rules_load("worlds/talk.yaml");
    struct shoal_world *s = shoal_world_new("worlds/talk.yaml", AGENTS, 7, &err);
    assert_non_null(s);
    world_reset(&w, &r, AGENTS, 7);
    for (int tick = 0; tick < 60; tick++) {
        int16_t actions[WORLD_AGENTS_MAX];
        int public[WORLD_AGENTS_MAX];
        struct buf see = {0};
        random_actions(&w, &r, actions);
        for (int i = 0; i < AGENTS; i++) public[i] = actions[i];
        world_step(&w, &r, actions);
        assert_int_equal(shoal_world_step(s, public, &err), 0);
        world_observe(&w, &r, tick % AGENTS, &see);
        assert_string_equal(shoal_world_observe(s, tick % AGENTS), see.data);
        assert_int_equal(shoal_world_agent(s, tick % AGENTS, &a, &err), 0);
        assert_true(a.reward == w.agents[tick % AGENTS].reward);
        assert_int_equal(a.y * w.size + a.x, w.agents[tick % AGENTS].cell);
        buf_release(&see);
    }
    char *half = shoal_world_state(s);
    assert_int_equal(shoal_world_step(s, (int[AGENTS]){0, 0, -1}, &err), ERR_USAGE);
    assert_int_equal(shoal_world_tick(s), 60);
    assert_int_equal(shoal_world_step(s, (int[AGENTS]){1, 1, 1}, &err), 0);
    assert_int_equal(shoal_world_restore(s, "{}", &err), ERR_FORMAT);
    assert_int_equal(shoal_world_tick(s), 61);
    assert_int_equal(shoal_world_restore(s, half, &err), 0);
    char *again = shoal_world_state(s);
    assert_string_equal(half, again);
    assert_int_equal(shoal_world_parse(s, "please COLLECT it"), SHOAL_PICK_FOOD);
    assert_int_equal(shoal_world_parse(s, "?"), -1);
    assert_null(shoal_world_observe(s, AGENTS));
    assert_int_equal(shoal_world_agent(s, -1, &a, &err), ERR_MISSING);
    assert_int_equal(shoal_world_reset(s, 8, &err), 0);
    assert_int_equal(shoal_world_tick(s), 0);
    world_reset(&w, &r, AGENTS, 8);
    struct buf map = {0};
    world_render(&w, &map);
    const char *seen = shoal_world_observe(s, 0), *drawn = shoal_world_draw(s);
    assert_non_null(
        strstr(shoal_world_prompt(s, 0), seen)); /* no call changes the text of another one */
    assert_string_equal(drawn, map.data);
    assert_int_equal(shoal_world_reset(s, ~0ull, &err), ERR_USAGE);
    assert_null(shoal_world_new("none", 3, 1, &err));
    assert_null(shoal_world_new(NULL, 65, 1, &err));
    assert_non_null(strstr(err.text, "65 agents"));
    buf_release(&map);
    free(half);
    free(again);
    shoal_world_free(s);
    world_rules_release(&r);
}

/* A process that may not run commands does not start a program for a pipe either. */
static void test_forbidden_program(void **state) {
    (void)state;
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        struct error err;
        sandbox_forbid_commands("no commands in a test");
        bool refused = !subprocess_open("true", 1, &err) && err.code == ERR_STATE;
        _exit(refused && strcmp(err.text, "no commands in a test") == 0 ? 0 : 1);
    }
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forbidden_program),
        cmocka_unit_test(test_trace_round_trip),
        cmocka_unit_test(test_trace_cut_and_damaged),
        cmocka_unit_test(test_trace_refusals),
        cmocka_unit_test(test_rules_as_json),
        cmocka_unit_test(test_pipe_equals_the_world),
        cmocka_unit_test(test_pipe_agents_leave),
        cmocka_unit_test(test_pipe_errors_change_nothing),
        cmocka_unit_test(test_pipe_snapshots),
        cmocka_unit_test(test_pipe_many_worlds),
        cmocka_unit_test(test_pipe_options),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_long_lines),
        cmocka_unit_test(test_programs),
        cmocka_unit_test(test_watch),
        cmocka_unit_test(test_library),
    };
    signal(SIGPIPE, SIG_IGN);
    log_quiet = true;
    return cmocka_run_group_tests(tests, folder_make, folder_clean);
}
