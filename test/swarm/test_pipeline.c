/*
 * test_pipeline: the answer pipeline with scripted agents, without weights. Checks which client
 * runs which agents in how many batches, the agents' prompts, agents that fail or give no usable
 * answer, the blackboard's entries, and the stored conversation.
 */
/* levels: once */
#define _GNU_SOURCE
#include "folder.h"
#include "swarm/swarm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;
static char dir[64];

/* scripted LLM clients */

enum { CALLS_MAX = 256 };
struct recorded_call {
    char *role, *messages; /* all messages */
    int client, batch;     /* index of the client, and of its batch */
    float temperature;
    int32_t max_tokens;
    bool grammar;
};
/* An agent's reply to a prompt; NULL: the call fails, as after a timeout. */
typedef const char *reply_fn(const char *role, const char *messages);
static struct script {
    reply_fn *respond;
    struct recorded_call v[CALLS_MAX];
    int n, batches;
    int fail_at; /* the batch in which the client fails; 0: none */
} script;
static int clients[PIPELINE_N_STAGES];

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    script.batches++;
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        struct buf messages = {0};
        for (int m = 0; m < c->n_messages; m++)
            buf_printf(&messages, "%s: %s\n", c->messages[m].role, c->messages[m].content);
        assert_true(script.n < CALLS_MAX);
        script.v[script.n++] = (struct recorded_call){.role = xstrdup(c->agent->role),
                                                      .messages = messages.data,
                                                      .client = (int)((int *)ctx - clients),
                                                      .batch = script.batches,
                                                      .temperature = c->temperature,
                                                      .max_tokens = c->max_tokens,
                                                      .grammar = c->grammar != NULL};
        const char *reply = script.respond(c->agent->role, messages.data);
        c->answer.choice = -1;
        for (int k = 0; reply && c->reply == REPLY_ANSWER && k < c->item->n_choices; k++)
            if (strcmp(c->item->choices[k], reply) == 0) c->answer.choice = k;
        if (reply) c->text = xstrdup(reply);
        if (!reply) c->failed = "it timed out";
        c->n_generated = 1;
        if (script.fail_at == script.batches && i == n - 1)
            return error_set(e, ERR_IO, "the disk is full");
    }
    return OK;
}

static int count_calls(const char *role) {
    int n = 0;
    for (int i = 0; i < script.n; i++) n += strcmp(script.v[i].role, role) == 0;
    return n;
}

/* The prompt of a role's k-th call. */
static const char *prompt_of(const char *role, int k) {
    for (int i = 0; i < script.n; i++)
        if (strcmp(script.v[i].role, role) == 0 && k-- == 0) return script.v[i].messages;
    fail_msg("role '%s' was not called", role);
    return NULL;
}

static void script_reset(void) {
    for (int i = 0; i < script.n; i++) {
        free(script.v[i].role);
        free(script.v[i].messages);
    }
    script = (struct script){.n = 0};
}

/* a pipeline with a board, a memory and the built-in team */

static struct pipeline_options options;
static struct workflow *panel;

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    script_reset();
    snprintf(dir, sizeof dir, "/tmp/shoal-test-pipeline-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    const struct blackboard_options bo = {.name = "x"};
    panel = workflow_open("panel", &err);
    options = (struct pipeline_options){.workflow = panel,
                                        .board = blackboard_open(&bo, &err),
                                        .memory = conversation_open(NULL, "x", &err),
                                        .agents = 3,
                                        .iterations = 2,
                                        .type = -1,
                                        .language = -1,
                                        .summary = true,
                                        .temperature = -1,
                                        .facts = FACTS_RULES};
    for (int s = 0; s < PIPELINE_N_STAGES; s++)
        options.stage[s].llm_client = (struct llm_client){clients, script_ask};
    return panel && options.board && options.memory ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    script_reset();
    blackboard_close(options.board);
    conversation_close(options.memory);
    workflow_free(panel);
    return folder_remove(dir);
}

/* Runs the pipeline and compares the answer. */
static void check_answer(const char *question, reply_fn *respond, const char *want,
                         enum answer_source source) {
    struct pipeline_answer a;
    script.respond = respond;
    if (pipeline_run(&options, question, &a, &err) != OK) fail_msg("%s", err.text);
    assert_string_equal(a.text, want);
    assert_int_equal(a.source, source);
    const char *final_response =
        json_string_value(blackboard_read(options.board, BOARD_FINAL_RESPONSE));
    assert_string_equal(final_response, want);
    pipeline_answer_release(&a);
}

static const char *reply_plain(const char *role, const char *messages) {
    (void)messages;
    if (strcmp(role, "agent") == 0) return "意見です。";
    return strcmp(role, "summary") == 0 ? "まとめです。" : "**答え**です。";
}

/* Each stage has its client, temperature and token limit; the agents of an iteration are one
 * batch. */
static void test_stages(void **state) {
    (void)state;
    for (int s = 0; s < PIPELINE_N_STAGES; s++) {
        options.stage[s].llm_client.ctx = &clients[s];
        options.stage[s].max_tokens = 10 + s;
    }
    options.stage[PIPELINE_OUTPUT].temperature = 0.25f;
    check_answer("富士山の高さは？", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_int_equal(script.batches, 5);
    assert_int_equal(count_calls("agent"), 6);
    assert_int_equal(count_calls("summary"), 2);
    assert_int_equal(count_calls("output"), 1);
    for (int i = 0; i < script.n; i++) {
        const struct recorded_call *h = &script.v[i];
        assert_int_equal(h->client, pipeline_stage_of_role(h->role));
        assert_int_equal(h->max_tokens, 10 + h->client);
        if (h->client == PIPELINE_OUTPUT) assert_true(h->temperature == 0.25f);
    }
    /* the roles of the question's type, in its language */
    assert_non_null(
        strstr(prompt_of("agent", 0), agent_role_get(QUESTION_DEFAULT, LANG_JA, 0).name));
    assert_non_null(strstr(prompt_of("agent", 3), "仲間たちの意見：\n"));
    options.max_tokens = 7;
    check_answer("なぜですか", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_int_equal(script.v[script.n - 1].max_tokens, 7);
}

/* Agents of one step are called in one batch per base model, and each reply goes to its agent. */
static const char *reply_role(const char *role, const char *messages) {
    (void)messages;
    return strcmp(role, "output") == 0 ? "the answer" : role;
}

static void test_step_with_two_clients(void **state) {
    (void)state;
    static const char text[] = "name: mixed\nroles: [agent, critic, output]\nnodes:\n"
                               "  all: {messages: [{user: '{{ question }}'}]}\n"
                               "decide: {text: all}\n";
    struct workflow *w = workflow_parse(text, sizeof text - 1, "mixed.yaml", &err);
    options.workflow = w;
    options.stage[PIPELINE_OUTPUT].llm_client.ctx = &clients[PIPELINE_OUTPUT];
    options.iterations = 1;
    check_answer("which?", reply_role, "the answer", ANSWER_FROM_OUTPUT);
    assert_int_equal(script.batches, 2); /* the summary uses the agents' client */
    assert_int_equal(count_calls("critic"), 1);
    const char *third =
        json_string_value(blackboard_read(options.board, "agent_3_output")); /* the critic */
    assert_string_equal(third, "critic");
    workflow_free(w);
}

/* The summarizer may classify the question; if it does not, the question's keywords do. */
static const char *classified_type;
static const char *reply_with_type(const char *role, const char *messages) {
    if (strcmp(role, "summary") == 0 && strstr(messages, "informational")) return classified_type;
    return reply_plain(role, messages);
}

static void test_question_type_by_model(void **state) {
    (void)state;
    options.type = QUESTION_TYPE_BY_MODEL;
    classified_type = "planning";
    check_answer("富士山の高さは？", reply_with_type, "答えです。", ANSWER_FROM_OUTPUT);
    assert_non_null(
        strstr(prompt_of("agent", 1), agent_role_get(QUESTION_PLANNING, LANG_JA, 1).name));
    assert_string_equal(json_string_value(blackboard_read(options.board, BOARD_QUESTION_TYPE)),
                        "planning");
    script_reset();
    classified_type = NULL;
    check_answer("你好！", reply_with_type, "答えです。", ANSWER_FROM_OUTPUT);
    assert_non_null(
        strstr(prompt_of("agent", 1), agent_role_get(QUESTION_CONVERSATIONAL, LANG_ZH, 1).name));
}

/* a failed agent does not stop the team */

static int n_agent_calls;
static const char *reply_one_failure_each(const char *role, const char *messages) {
    (void)messages;
    if (strcmp(role, "agent") != 0) return strcmp(role, "output") == 0 ? "It is 42." : "A summary.";
    switch (n_agent_calls++ % 3) {
    case 0:
        return NULL; /* timed out */
    case 1:
        return "\x01\x02 \n\n"; /* garbage */
    default:
        return "no no no no no no";
    }
}

static void test_failing_agents(void **state) {
    (void)state;
    check_answer("How many?", reply_one_failure_each, "It is 42.", ANSWER_FROM_OUTPUT);
    assert_null(strstr(prompt_of("agent", 3), "timed"));
    assert_string_equal(json_string_value(blackboard_read(options.board, "agent_0_output")), "");
    json_t *slots = blackboard_slot_list(options.board, NULL), *v;
    size_t i;
    json_array_foreach (slots, i, v)
        assert_true(*json_string_value(json_object_get(v, "text"))); /* the failed agent has none */
    assert_int_equal(json_array_size(slots), 4 + 2 + 1);
    json_decref(slots);
}

static const char *reply_without_output(const char *role, const char *messages) {
    (void)messages;
    if (strcmp(role, "output") == 0) return "<think>let me";
    return strcmp(role, "summary") == 0 ? NULL : "Agents say 7.";
}

static const char *reply_failure(const char *role, const char *messages) {
    (void)role, (void)messages;
    return NULL;
}

static const char *reply_briefly(const char *role, const char *messages) {
    (void)role, (void)messages;
    return "Yes.";
}

static void test_fallbacks(void **state) {
    (void)state;
    struct pipeline_answer a;
    check_answer("How many?", reply_without_output, "Agents say 7.", ANSWER_FROM_AGENT);
    check_answer("いくつですか", reply_failure, answer_fallback(LANG_JA), ANSWER_FALLBACK);
    check_answer("有几个？", reply_failure, answer_fallback(LANG_ZH), ANSWER_FALLBACK);
    script.respond = reply_failure;
    assert_int_equal(pipeline_run(&options, "Is it so?", &a, &err), OK);
    assert_string_equal(a.text, answer_fallback(LANG_EN));
    assert_string_equal(a.failure_reason, "it timed out");
    pipeline_answer_release(&a);
    check_answer("Is it so?", reply_briefly, "Yes.", ANSWER_FROM_OUTPUT);
    options.compat = true; /* ten characters, and no other agent's text instead */
    check_answer("Is it so?", reply_briefly, answer_fallback(LANG_EN), ANSWER_FALLBACK);
}

/* the team's prompts */

static void test_question_summary(void **state) {
    (void)state;
    struct buf question = {0};
    for (int i = 0; i < 160; i++) buf_puts(&question, "长");
    buf_puts(&question, "吗？");
    check_answer(question.data, reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_int_equal(count_calls("summary"), 3);
    assert_string_equal(json_string_value(blackboard_read(options.board, BOARD_INITIAL_SUMMARY)),
                        "まとめです。");
    assert_non_null(strstr(prompt_of("agent", 0), "要点： まとめです。"));
    assert_non_null(strstr(prompt_of("output", 0), "要点： まとめです。"));
    script_reset();
    options.summary = false;
    check_answer(question.data, reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_int_equal(count_calls("summary"), 0);
    options.summary = true;
    check_answer(question.data, reply_failure, answer_fallback(LANG_ZH),
                 ANSWER_FALLBACK); /* none comes */
    buf_release(&question);
}

static int count_embed(void *ctx, const char *const *texts, int n, float *out, struct error *e) {
    (void)e;
    for (int i = 0; i < n; i++) {
        out[2 * i] = (float)strlen(texts[i]);
        out[2 * i + 1] = 1;
    }
    ++*(int *)ctx;
    return OK;
}

static void test_references(void **state) {
    (void)state;
    char db[96], doc[96];
    int n_embed_calls = 0;
    struct knowledge_report r;
    const struct embedder e = {&n_embed_calls, 2, "counts", count_embed};
    static const char text[] = "富士山の高さは3776メートルです。";
    snprintf(db, sizeof db, "%s/base.db", dir);
    snprintf(doc, sizeof doc, "%s/富士山.txt", dir);
    assert_int_equal(file_write(doc, text, sizeof text - 1, &err), OK);
    options.knowledge = knowledge_open(db, true, &err);
    assert_int_equal(
        knowledge_add(options.knowledge, doc, &(struct knowledge_options){0}, &r, &err), OK);
    check_answer("富士山の高さは何メートルですか？", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_non_null(
        strstr(prompt_of("agent", 0), "参考：\n【富士山】 富士山の高さは3776メートルです。"));
    assert_non_null(strstr(prompt_of("output", 0), "【富士山】"));
    options.embedder = &e;
    check_answer("富士山の高さは何メートルですか？", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_true(n_embed_calls > 2); /* the query, the text, and every utterance */
    const float like[2] = {15, 1};
    json_t *found = blackboard_find_similar(options.board, NULL, like, 2, 0.99, 20);
    assert_int_equal(json_array_size(found), 9);
    json_decref(found);
    knowledge_close(options.knowledge);
}

/* The context window is smaller than the stored memory: prompts are shortened, and the team
 * answers. */
static size_t context_chars;
static const char *reply_if_short(const char *role, const char *messages) {
    return strlen(messages) > context_chars ? NULL : reply_plain(role, messages);
}

static void test_short_context(void **state) {
    (void)state;
    for (int i = 0; i < 9; i++)
        assert_int_equal(pipeline_update_memory(&options, "次の都市はどこですか？",
                                                "次の都市は仙台で、その次は盛岡です。", NULL, &err),
                         OK);
    for (context_chars = 900; context_chars > 400; context_chars -= 250) {
        script_reset();
        check_answer("3と9、大きいのは？", reply_if_short, "答えです。", ANSWER_FROM_OUTPUT);
        assert_true(script.batches > 5); /* not at once */
    }
    assert_non_null(strstr(prompt_of("agent", 0), "これまでの会話"));
    assert_int_equal(strstr(script.v[script.n - 1].messages, "これまでの会話") != NULL, 0);
    script_reset();
    context_chars = 10;
    check_answer("3と9、大きいのは？", reply_if_short, answer_fallback(LANG_JA), ANSWER_FALLBACK);
}

/* memory */

static const char *fact_json;
static const char *reply_with_facts(const char *role, const char *messages) {
    if (strcmp(role, "summary") == 0 && strstr(messages, "JSON")) return fact_json;
    return reply_plain(role, messages);
}

static char *facts_of_line(const char *line, enum fact_source how, const char *json) {
    fact_json = json;
    options.facts = how;
    script.respond = reply_with_facts;
    assert_int_equal(conversation_clear(options.memory, &err), OK);
    if (pipeline_update_memory(&options, line, "はい。", NULL, &err) != OK)
        fail_msg("%s", err.text);
    return json_canonical(json_object_get(conversation_state(options.memory), "facts"));
}

static void test_facts(void **state) {
    (void)state;
    static const struct {
        enum fact_source how;
        const char *line, *json, *want;
    } cases[] = {
        {FACTS_NONE, "My name is Ann.", NULL, "{}"},
        {FACTS_RULES, "My name is Ann.", NULL, "{\"名前\":\"Ann\"}"},
        {FACTS_MODEL, "Ann here, a violinist from Osaka.",
         "{\"name\":\"Ann\",\"interests\":[\"football\"],\"likes\":[],\"other\":[\"violinist\"]}",
         "{\"その他の情報\":[\"violinist\"],\"名前\":\"Ann\"}"},
        {FACTS_MODEL, "太郎です。バイオリンを弾きます。",
         "{\"名前\":\"太郎\",\"興味\":[\"バイオリン\",\"将棋\"],\"好きなもの\":[],\"その他の情報\":"
         "[]}",
         "{\"名前\":\"太郎\",\"興味\":[\"バイオリン\"]}"},
        {FACTS_MODEL, "我叫小明，在上海学小提琴。",
         "{\"名字\":\"小红\",\"兴趣\":[\"小提琴\"],\"喜欢的东西\":[],\"其他信息\":[]}",
         "{\"名前\":\"小明\",\"興味\":[\"小提琴\"]}"}, /* the name found by the rules stays */
        {FACTS_MODEL, "My name is Ann.", "{\"name\":\"An", "{\"名前\":\"Ann\"}"}, /* cut short */
        {FACTS_MODEL, "My name is Ann.", NULL, "{\"名前\":\"Ann\"}"},             /* no reply */
        {FACTS_MODEL, "My name is Ann.", "[1]", "{\"名前\":\"Ann\"}"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        script_reset();
        char *got = facts_of_line(cases[i].line, cases[i].how, cases[i].json);
        assert_string_equal(got, cases[i].want);
        assert_int_equal(script.n, cases[i].how == FACTS_MODEL);
        if (script.n) assert_true(script.v[0].grammar);
        free(got);
    }
    script_reset(); /* the question contains no fact: the model is not called */
    free(facts_of_line("What is the name of Ann?", FACTS_MODEL, "{\"name\":\"Ann\"}"));
    assert_int_equal(script.n, 0);
}

static void test_memory(void **state) {
    (void)state;
    check_answer("私の名前は太郎です。3と9、大きいのは？", reply_plain, "答えです。",
                 ANSWER_FROM_OUTPUT);
    int n = script.n;
    check_answer("私の名前は何ですか？", reply_plain, "あなたのお名前は太郎です。",
                 ANSWER_FROM_MEMORY);
    assert_int_equal(script.n, n); /* no call was needed */
    check_answer("では、5と7は？", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    assert_non_null(strstr(script.v[n].messages, "覚えていること：名前：太郎"));
    assert_non_null(strstr(script.v[n].messages, "アシスタント：あなたのお名前は太郎です。"));
    for (int i = 0; i < 8; i++) {
        assert_int_equal(pipeline_update_memory(&options, "次は？", "はい。", NULL, &err), OK);
        script_reset();
        script.respond = reply_plain;
    }
    check_answer("最後に？", reply_plain, "答えです。", ANSWER_FROM_OUTPUT);
    const char *summary =
        json_string_value(json_object_get(conversation_state(options.memory), "summary"));
    assert_string_equal(summary, "まとめです。");
}

/* refused options */

static void test_invalid_options(void **state) {
    (void)state;
    static const char text[] = "name: flat\nnodes:\n  all: {messages: [{user: x}]}\n";
    struct pipeline_answer a;
    script.respond = reply_plain;
    assert_int_equal(pipeline_run(&options, "a\xff", &a, &err), ERR_FORMAT);
    pipeline_answer_release(&a);
    options.agents = TEAM_MAX - 1;
    assert_int_equal(pipeline_run(&options, "why?", &a, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "a team larger than the limit of 17"));
    pipeline_answer_release(&a);
    options.agents = 3;
    for (int at = 1; at <= 5; at++) { /* an error of the client is returned, and nothing leaks */
        script_reset();
        script.respond = reply_plain;
        script.fail_at = at;
        assert_int_equal(pipeline_run(&options, "why?", &a, &err), ERR_IO);
        pipeline_answer_release(&a);
    }
    struct workflow *w = workflow_parse(text, sizeof text - 1, "flat.yaml", &err);
    options.workflow = w;
    assert_int_equal(pipeline_run(&options, "why?", &a, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "'flat' has no roles"));
    pipeline_answer_release(&a);
    workflow_free(w);
}

/* an answer that is selected among samples */

static int n_outputs;
static const char *numbered_reply(const char *role, const char *messages) {
    static const char *const outputs[] = {"the answer is 1", "", NULL, "the answer is **4**"};
    (void)messages;
    return strcmp(role, "output") == 0 ? outputs[n_outputs++ % 4] : "an opinion";
}

struct selection {
    int calls, choose;
    char *question, *texts[4];
    int code;
};

static int selection_make(void *ctx, const char *question, char *const *texts, int n, int *selected,
                          struct error *e) {
    struct selection *s = ctx;
    assert_int_equal(n, 4);
    s->calls++;
    free(s->question);
    s->question = xstrdup(question);
    for (int i = 0; i < n; i++) free(s->texts[i]), s->texts[i] = xstrdup(texts[i]);
    *selected = s->choose;
    return s->code ? error_set(e, s->code, "the check failed") : OK;
}

static void test_selected_answer(void **state) {
    (void)state;
    struct selection s = {.choose = 3};
    struct pipeline_answer a;
    options.selector = (struct answer_selector){4, selection_make, &s};
    n_outputs = 0;
    check_answer("what is larger?", numbered_reply, "the answer is 4", ANSWER_FROM_OUTPUT);
    assert_int_equal(s.calls, 1);
    assert_string_equal(s.question, "what is larger?");
    assert_string_equal(s.texts[0], "the answer is 1");
    assert_string_equal(s.texts[1], "");
    assert_string_equal(s.texts[2], "");
    assert_string_equal(s.texts[3], "the answer is 4");
    assert_int_equal(count_calls("output"), 4);
    int batch = 0;
    for (int i = 0; i < script.n; i++) {
        if (strcmp(script.v[i].role, "output") != 0) continue;
        assert_true(batch == 0 || script.v[i].batch == batch);
        batch = script.v[i].batch;
    }

    s.code = ERR_IO;
    script.respond = numbered_reply;
    assert_int_equal(pipeline_run(&options, "and now?", &a, &err), ERR_IO);
    assert_string_equal(err.text, "the check failed");
    assert_int_equal(a.sampled.calls, 4);
    assert_int_equal(a.sampled.generated, 4);
    pipeline_answer_release(&a);
    for (int i = 0; i < 4; i++) free(s.texts[i]);
    free(s.question);
}

static const char *no_output(const char *role, const char *messages) {
    (void)messages;
    return strcmp(role, "output") == 0 ? NULL : "an opinion";
}

/* Samples that all fail are not given to the selector. */
static void test_selected_answer_missing(void **state) {
    (void)state;
    struct selection s = {0};
    options.selector = (struct answer_selector){4, selection_make, &s};
    check_answer("what is larger?", no_output, "an opinion", ANSWER_FROM_AGENT);
    assert_int_equal(s.calls, 0);
}

static void test_selector_needs_output(void **state) {
    (void)state;
    struct selection s = {0};
    struct pipeline_answer a;
    struct workflow *debate = workflow_open("mad", &err);
    assert_non_null(debate);
    options.workflow = debate;
    options.selector = (struct answer_selector){4, selection_make, &s};
    script.respond = no_output;
    assert_int_equal(pipeline_run(&options, "what?", &a, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "has no role 'output'"));
    pipeline_answer_release(&a);
    workflow_free(debate);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_stages),
        TEST(test_step_with_two_clients),
        TEST(test_short_context),
        TEST(test_question_type_by_model),
        TEST(test_failing_agents),
        TEST(test_fallbacks),
        TEST(test_question_summary),
        TEST(test_references),
        TEST(test_facts),
        TEST(test_memory),
        TEST(test_invalid_options),
        TEST(test_selected_answer),
        TEST(test_selected_answer_missing),
        TEST(test_selector_needs_output),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
