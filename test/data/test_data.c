/*
 * test_data: training files in every form that is accepted, the tokens that become targets, errors
 * in wrong files, and the report of lint.
 *
 * The tokenizer is the byte one, so expected lengths and masks can be read off the text. A
 * legacy persona file (pretty-printed objects one after another, Japanese) is included
 * (docs/COMPATIBILITY.md).
 */
#include "data/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static struct tokenizer *tok;
static char path[64];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    tok = tokenizer_new_bytes(300);
    snprintf(path, sizeof path, "/tmp/shoal-test-data-%d.jsonl", (int)getpid());
    return tok ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    tokenizer_free(tok);
    unlink(path);
    return 0;
}

static int load(struct dataset *d, const char *text, int32_t max_length) {
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    return dataset_load(d, path, NULL, tok, max_length, &err);
}

/* The targets of a sample, decoded. */
static char *targets_text(const struct train_sample *s) {
    struct buf b = {0};
    struct token_ids ids = {0};
    for (int32_t i = 1; i < s->n; i++)
        if (s->mask[i]) token_ids_add(&ids, s->tokens[i]);
    tokenizer_decode(tok, ids.v, ids.n, true, &b);
    token_ids_release(&ids);
    buf_puts(&b, "");
    return b.data;
}

static void check_targets(const struct train_sample *s, const char *expected) {
    char *text = targets_text(s);
    if (!strstr(text, expected)) fail_msg("targets are '%s', not '%s'", text, expected);
    free(text);
}

static void test_messages(void **state) {
    (void)state;
    struct dataset d;
    const char *text =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"be "
        "kind\"},{\"role\":\"user\",\"content\":\"one\"},"
        "{\"role\":\"assistant\",\"content\":\"TWO\"},{\"role\":\"user\",\"content\":\"three\"},"
        "{\"role\":\"assistant\",\"content\":\"FOUR\"}],\"id\":7}\n"
        "\n"
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
        "\"Y\"}]}\n";
    assert_int_equal(load(&d, text, 0), OK);
    assert_int_equal(d.n, 2);
    assert_int_equal(d.cut, 0);
    check_targets(&d.v[0], "TWO");
    check_targets(&d.v[0], "FOUR");
    char *text_of_targets = targets_text(&d.v[0]);
    assert_null(strstr(text_of_targets, "three"));
    assert_null(strstr(text_of_targets, "kind"));
    free(text_of_targets);
    check_targets(&d.v[1], "Y");
    int64_t targets = 0, tokens = 0;
    for (int i = 0; i < d.n; i++) {
        tokens += d.v[i].n;
        for (int32_t j = 1; j < d.v[i].n; j++) targets += d.v[i].mask[j];
    }
    assert_int_equal(d.targets, targets);
    assert_int_equal(d.tokens, tokens);
    assert_int_equal(strlen(d.hash), HASH_LEN - 1);
    dataset_release(&d);
}

/* Legacy files: objects over several lines, one after another. */
/* clang-format off */
static const char *const multi_line_objects =
    "{\"messages\":[\n"
    "  {\"role\":\"system\",\"content\":\"あなたは厳密な論理検証を重視する批判的思考の専門家です。\"},\n"
    "  {\"role\":\"user\",\"content\":\"ソクラテスは人間である。人間は死ぬ。ソクラテスは死ぬか？\"},\n"
    "  {\"role\":\"assistant\",\"content\":\"はい。三段論法により結論は「ソクラテスは死ぬ」です。\"}\n"
    "]}\n"
    "{\"messages\":[\n"
    "  {\"role\":\"system\",\"content\":\"あなたは厳密な論理検証を重視する批判的思考の専門家です。\"},\n"
    "  {\"role\":\"user\",\"content\":\"次の主張の前提の妥当性を検証してください: ...\"},\n"
    "  {\"role\":\"assistant\",\"content\":\"前提Aは観察データXにより支持されますが、Bは...\"}\n"
    "]}\n";
/* clang-format on */

static void test_multi_line_japanese(void **state) {
    (void)state;
    struct dataset d;
    assert_int_equal(load(&d, multi_line_objects, 0), OK);
    assert_int_equal(d.n, 2);
    check_targets(&d.v[0], "はい。三段論法により結論は「ソクラテスは死ぬ」です。");
    check_targets(&d.v[1], "前提Aは観察データXにより支持されますが、Bは...");
    dataset_release(&d);
}

static void test_other_formats(void **state) {
    (void)state;
    struct dataset d;
    assert_int_equal(load(&d, "{\"prompt\":\"\",\"completion\":\"alone\"}", 0), OK);
    check_targets(&d.v[0], "lone");
    dataset_release(&d);
    assert_int_equal(
        load(&d, "[{\"prompt\":\"2+2=\",\"completion\":\" four\"},\n {\"text\":\"all of it\"}]", 0),
        OK);
    assert_int_equal(d.n, 2);
    check_targets(&d.v[0], "four");
    char *text_of_targets = targets_text(&d.v[0]);
    assert_null(strstr(text_of_targets, "2+2"));
    free(text_of_targets);
    check_targets(&d.v[1], "ll of it"); /* the first token is no target without a BOS before it */
    for (int i = 0; i < 2 && tokenizer_eos(tok) >= 0; i++) {
        assert_int_equal(d.v[i].tokens[d.v[i].n - 1], tokenizer_eos(tok));
        assert_int_equal(d.v[i].mask[d.v[i].n - 1], 1);
    }
    dataset_release(&d);
}

static void test_cut(void **state) {
    (void)state;
    struct dataset whole, d;
    const char *text = "{\"prompt\":\"ab\",\"completion\":\"cdefghijklmnop\"}\n{\"text\":\"xy\"}\n"
                       "{\"prompt\":\"a prompt that fills all the length\",\"completion\":\"z\"}\n";
    assert_int_equal(load(&whole, text, 0), OK);
    assert_int_equal(load(&d, text, 8), OK);
    assert_int_equal(whole.cut, 0);
    assert_int_equal(whole.n, 3);
    assert_int_equal(d.cut, 2);
    assert_int_equal(d.n, 2); /* the third has no target left */
    assert_int_equal(d.v[0].n, 8);
    assert_memory_equal(d.v[0].tokens, whole.v[0].tokens, 8 * sizeof(int32_t));
    assert_true(d.targets < whole.targets);
    dataset_release(&d);
    dataset_release(&whole);
    assert_int_equal(load(&d, "{\"prompt\":\"a long enough prompt\",\"completion\":\"z\"}", 8),
                     ERR_FORMAT);
    assert_non_null(strstr(err.text, "cut before"));
}

static void test_refused(void **state) {
    (void)state;
#define GOOD "{\"text\":\"good\"}\n"
    static const struct {
        const char *text, *word;
    } cases[] = {
        {GOOD GOOD "{\"text\": \n", "line"},
        {GOOD GOOD "{\"text\": nonsense}\n", "line 3"},
        {GOOD GOOD "[1]\n", "line 3"},
        {GOOD "{\"txt\":\"x\"}\n",
         "line 2: 'messages', 'prompt' and 'completion', or 'text' is missing"},
        {GOOD "\n{\"prompt\":\"x\"}\n", "line 3: 'completion' is missing"},
        {"{\"completion\":\"x\"}\n", "line 1: 'prompt' is missing"},
        {"{\"text\":5}\n", "line 1: 'text' must be a string"},
        {"{\"text\":\"x\",\"messages\":[]}\n", "only one of"},
        {"{\"messages\":{}}\n", "'messages' must be a list"},
        {"{\"messages\":[]}\n", "no turn of the assistant"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n", "no turn of the assistant"},
        {"{\"messages\":[7]}\n", "'messages[0]' must be an object"},
        {"{\"messages\":[{\"role\":\"user\"}]}\n", "'messages[0].content' is missing"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"content\":\"x\"}]}\n",
         "'messages[1].role' is missing"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}\n",
         "'messages[0].content' must be a string"},
        {"{\"messages\":[{\"role\":\"owl\",\"content\":\"x\"}]}\n",
         "'messages[0].role' must be system"},
        {"{\"prompt\":\"\",\"completion\":5}\n", "'completion' must be a string"},
        {"", "no sample"},
        {"[]", "no sample"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct dataset d;
        assert_int_equal(load(&d, cases[i].text, 0), ERR_FORMAT);
        if (!strstr(err.text, cases[i].word))
            fail_msg("'%s' does not say '%s'", err.text, cases[i].word);
        if (!strstr(err.text, path)) fail_msg("'%s' does not name the file", err.text);
        assert_null(d.v);
    }
    struct dataset d;
    assert_int_equal(dataset_load(&d, "/nonexistent/x.jsonl", NULL, tok, 0, &err), ERR_MISSING);
}

/* Loads and lints; `eval` (may be NULL) is the evaluation set's text. */
static struct lint lint_of(const char *text, const char *eval, int32_t max_length) {
    struct dataset d, e;
    struct lint l;
    if (eval) assert_int_equal(load(&e, eval, 0), OK);
    assert_int_equal(load(&d, text, max_length), OK);
    assert_int_equal(lint_dataset(&d, eval ? &e : NULL, &l, &err), OK);
    if (eval) dataset_release(&e);
    dataset_release(&d);
    return l;
}

static void check_matches(const struct lint_matches *p, int n, int line, int other) {
    assert_int_equal(p->n, n);
    assert_int_equal(p->line, line);
    assert_int_equal(p->other, other);
}

static void test_lint_counts(void **state) {
    (void)state;
    int bos = tokenizer_add_bos(tok), ends = bos + (tokenizer_eos(tok) >= 0);
    struct buf text = {0};
    for (int i = 1; i <= 20; i++)
        buf_printf(&text, "{\"text\":\"%.*s\"}\n", i, "abcdefghijklmnopqrst");
    buf_puts(&text, "{\"prompt\":\"abcdefghijklmnopqrstuvwxyz\",\"completion\":\"z\"}");
    struct lint l = lint_of(text.data, NULL, 12 + ends);
    assert_int_equal(l.read, 21);
    assert_int_equal(l.kept, 20);
    assert_int_equal(l.cut, 9); /* 13 … 20 and the last */
    assert_int_equal(l.dropped, 1);
    assert_int_equal(l.shortest, 1 + ends);
    assert_int_equal(l.median, 11 + ends);
    assert_int_equal(l.p95, 20 + ends);
    assert_int_equal(l.longest, 27 + ends);
    assert_int_equal(l.n_eval, 0);
    check_matches(&l.exact, 0, 0, 0);
    struct buf report = {0};
    lint_text(&l, &report);
    assert_non_null(strstr(report.data, "20 samples"));
    assert_non_null(strstr(report.data, "9 of 21 samples were cut (42.9 %), 1 of them dropped"));
    buf_release(&report);
    buf_release(&text);
}

/* Each row: two texts, and whether they are near-duplicates. */
static const struct {
    const char *a, *b;
    bool near;
} looks[] = {
    {"Two  words", "two words", true},
    {"two words ", "\\n\\ttwo\\nwords", true},
    {"1 2 3", "12 3", false},
    {"two words", "two words.", false},
    {"ＡＢＣ１２", "abc12", true},
    {"空は　青い。", "空は青い。", true},
    {"空は青い。", "空は\\n青い。", true},
    {"空は青い。", "空は赤い。", false},
    {"天空是 蓝色的", "天空是蓝色的", true},
    {"天空是蓝色的", "天空是藍色的", false},
    {"GPU を使う", "gpuを使う", true},
    {"ÉCOLE ΑΒΓ", "école αβγ", true},
    {"がぎぐ", "かきく", false},
};

static void test_lint_near_duplicates(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(looks); i++) {
        char *text = xasprintf("{\"text\":\"%s\"}\n{\"text\":\"%s\"}\n{\"text\":\"%s\"}\n",
                               looks[i].a, looks[i].b, looks[i].a);
        struct lint l = lint_of(text, NULL, 0);
        if (l.near.n != looks[i].near) fail_msg("'%s' and '%s'", looks[i].a, looks[i].b);
        check_matches(&l.exact, 1, 3, 1);
        if (looks[i].near) check_matches(&l.near, 1, 2, 1);
        free(text);
    }
}

/* The same question in other formats and with another persona, and an equal text. */
static void test_lint_overlap(void **state) {
    (void)state;
    const char *train =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"疑え\"},{\"role\":\"user\",\"content\":"
        "\"富士山の高さは?\"},{\"role\":\"assistant\",\"content\":\"3776m\"}]}\n"
        "\n{\"text\":\"whole text\"}\n{\"prompt\":\"\",\"completion\":\"x\"}";
    const char *eval = "{\"prompt\":\"2+2=\",\"completion\":\"4\"}\n"
                       "{\"prompt\":\"富士山の 高さは？\",\"completion\":\"知らない\"}\n"
                       "{\"text\":\"Whole  Text\"}\n{\"prompt\":\"\",\"completion\":\"y\"}\n";
    struct lint l = lint_of(train, eval, 0);
    assert_int_equal(l.n_eval, 4);
    check_matches(&l.eval_prompts, 1, 1, 2);
    check_matches(&l.eval_samples, 1, 3, 3);
    json_t *v = lint_json(&l);
    assert_int_equal(json_integer_value(json_object_get(
                         json_object_get(json_object_get(v, "eval"), "prompts_in_data"), "count")),
                     1);
    json_decref(v);
    l = lint_of(train, "{\"prompt\":\"2+2=\",\"completion\":\"4\"}\n", 0);
    assert_int_equal(l.eval_prompts.n + l.eval_samples.n, 0);
}

static const char two_turns[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"短く\"},{\"role\":\"user\",\"content\":"
    "\"空は?\"},"
    "{\"role\":\"assistant\",\"content\":\"青い。\"},{\"role\":\"user\",\"content\":\"[x]\"},"
    "{\"role\":\"assistant\",\"content\":\"天空\"}]}";

/* A template, and the conversation above rendered with it; targets in ⟦ ⟧. */
static const struct {
    const char *template, *shown;
} masks[] = {
    {NULL, "<|im_start|>system\n短く<|im_end|>\n<|im_start|>user\n空は?<|im_end|>\n"
           "<|im_start|>assistant\n⟦青い。<|im_end|>⟧\n<|im_start|>user\n[x]<|im_end|>\n"
           "<|im_start|>assistant\n⟦天空<|im_end|>⟧\n"},
    {"{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
     "{% elif m.role == 'system' %}<<{{ m.content }}>>{% else %} {{ m.content }}</s>{% endif %}"
     "{% endfor %}",
     "<<短く>>[INST] 空は? [/INST]⟦ 青い。</s>⟧[INST] [x] [/INST]⟦ 天空</s>⟧"},
};

/* A turn of weight 0 is no target; the others are unchanged. */
static void test_weights(void **state) {
    (void)state;
    static const char first[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a?\"},"
                                "{\"role\":\"assistant\",\"content\":\"誤り\",\"weight\":0},"
                                "{\"role\":\"user\",\"content\":\"b?\"},"
                                "{\"role\":\"assistant\",\"content\":\"正しい\",\"weight\":1}]}";
    static const char *const wrong[] = {"2", "-1", "0.5", "\"0\"", "null", "true"};
    struct dataset d;
    struct buf text = {0};
    tokenizer_set_chat_template(tok, NULL);
    assert_int_equal(load(&d, first, 0), OK);
    train_sample_render(&d.v[0], tok, "⟦", "⟧", &text);
    assert_non_null(strstr(text.data, "<|im_start|>assistant\n誤り<|im_end|>"));
    assert_non_null(strstr(text.data, "⟦正しい<|im_end|>⟧"));
    buf_release(&text);
    dataset_release(&d);
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        char *bad = xasprintf(
            "{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"weight\":%s}]}", wrong[i]);
        assert_int_equal(load(&d, bad, 0), ERR_FORMAT);
        assert_non_null(strstr(err.text, "'weight' must be 0 or 1"));
        free(bad);
    }
}

/* Tools and calls reach the template; a template without them is refused. */
static void test_tools(void **state) {
    (void)state;
    static const char with_tools[] =
        "{% if tools %}{{ tools[0].function | tojson }}|{% endif %}{% for m in messages %}{{ "
        "m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% "
        "endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    static const char tools[] =
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_age\"}}]}";
    static const char begin[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"年は？\"},{\"role\":"
        "\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":\"function\",\"function\":"
        "{\"name\":\"get_age\",\"arguments\":{\"name\":\"みか\"}}}]},{\"role\":\"tool\","
        "\"content\":\"34\"},{\"role\":\"assistant\",\"content\":\"34さい\"}],";
    static const struct {
        const char *template, *text, *word;
    } wrong[] = {
        {with_tools, "{\"messages\":[],\"tools\":7}", "'tools' must be a list"},
        {with_tools, "{\"messages\":[{\"role\":\"tool\"}]}", "need contents that are strings"},
        {with_tools,
         "{\"messages\":[{\"role\":\"owl\",\"content\":\"\"}],\"tools\":[{\"name\":\"f\"}]}",
         "system, user, assistant and tool"},
        {"{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", NULL,
         "the model's chat template does not write"},
        {NULL, NULL, "no chat template that knows tools"},
    };
    struct dataset d;
    struct buf text = {0};
    char *sample = xasprintf("%s%s", begin, tools);
    tokenizer_set_chat_template(tok, with_tools);
    assert_int_equal(load(&d, sample, 0), OK);
    train_sample_render(&d.v[0], tok, "⟦", "⟧", &text);
    assert_string_equal(text.data,
                        "{\"name\": \"get_age\"}|user:年は？;assistant:⟦{\"name\": "
                        "\"get_age\", \"arguments\": {\"name\": \"みか\"}};⟧tool:34;assistant:"
                        "⟦34さい;⟧");
    buf_release(&text);
    dataset_release(&d);
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        tokenizer_set_chat_template(tok, wrong[i].template);
        assert_true(load(&d, wrong[i].text ? wrong[i].text : sample, 0) < 0);
        if (!strstr(err.text, wrong[i].word))
            fail_msg("'%s' does not say '%s'", err.text, wrong[i].word);
    }
    tokenizer_set_chat_template(tok, NULL);
    free(sample);
}

/* Forms of other programs: what is trained, or the error. */
static void test_forms(void **state) {
    (void)state;
    static const struct {
        const char *text, *form, *rendered, *word;
    } cases[] = {
        {"{\"conversations\":[{\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\",\"value\":"
         "\"問\"},"
         "{\"from\":\"gpt\",\"value\":\"答\"}],\"id\":1}",
         "sharegpt", "system:s;user:問;assistant:⟦答;⟧", NULL},
        {"{\"system\":\"s\",\"tools\":\"[{\\\"name\\\":\\\"f\\\"}]\",\"conversations\":[{\"from\":"
         "\"human\",\"value\":\"q\"},{\"from\":\"function_call\",\"value\":\"{\\\"name\\\":"
         "\\\"f\\\","
         "\\\"arguments\\\":{}}\"},{\"from\":\"observation\",\"value\":\"1\"},{\"from\":\"gpt\","
         "\"value\":\"a\"}]}",
         "sharegpt",
         "{\"name\": \"f\"}|system:s;user:q;assistant:⟦{\"name\": \"f\", \"arguments\": "
         "{}};⟧tool:1;"
         "assistant:⟦a;⟧",
         NULL},
        {"{\"instruction\":\"翻译\",\"input\":\"你好\",\"output\":\"hello\",\"text\":\"unused\"}",
         "alpaca", "user:翻译\n\n你好;assistant:⟦hello;⟧", NULL},
        {"{\"instruction\":\"i\",\"input\":\"\",\"output\":\"o\",\"system\":\"s\",\"history\":[["
         "\"q\",\"a\"]]}",
         "alpaca", "system:s;user:q;assistant:⟦a;⟧user:i;assistant:⟦o;⟧", NULL},
        {"{\"instruction\":\"i\",\"context\":\"c\",\"response\":\"r\",\"category\":\"open_qa\"}",
         "dolly", "user:i\n\nc;assistant:⟦r;⟧", NULL},
        {"{\"prompt\":\"p\",\"response\":\"r\"}", "prompt-response", "user:p;assistant:⟦r;⟧", NULL},
        {"{\"query\":\"p\",\"response\":\"r\"}", "query-response", "user:p;assistant:⟦r;⟧", NULL},
        {"{\"question\":\"p\",\"answer\":\"r\"}", "question-answer", "user:p;assistant:⟦r;⟧", NULL},
        {"{\"input\":\"p\",\"output\":\"r\"}", "input-output", "user:p;assistant:⟦r;⟧", NULL},
        {"{\"functions\":[{\"name\":\"f\"}],\"messages\":[{\"role\":\"developer\",\"content\":"
         "\"d\"},"
         "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"q\"},{\"type\":\"text\","
         "\"text\":\"2\"}]},"
         "{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\",\"arguments\":"
         "\"{}\"}},"
         "{\"role\":\"function\",\"name\":\"f\",\"content\":\"1\"},{\"role\":\"assistant\","
         "\"content\":\"a\"}]}",
         "messages",
         "{\"name\": \"f\"}|system:d;user:q2;assistant:⟦{\"name\": \"f\", \"arguments\": "
         "\"{}\"};⟧tool:1;"
         "assistant:⟦a;⟧",
         NULL},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", NULL, NULL,
         "line 1: 'messages[0]': 'content' has a part without text"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":"
         "\"a\","
         "\"reasoning_content\":\"because\"}]}",
         NULL, NULL, "reasoning that the model's chat template does not write"},
        {"{\"conversations\":[{\"from\":\"owl\",\"value\":\"x\"}]}", NULL, NULL,
         "'from' is 'owl'; known are"},
        {"{\"conversations\":[{\"from\":\"gpt\"}]}", NULL, NULL, "need turns {from, value}"},
        {"{\"conversations\":7}", NULL, NULL, "'conversations' must be a list"},
        {"{\"instruction\":5,\"output\":\"o\"}", NULL, NULL, "'instruction' must be a string"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"history\":[[\"q\"]]}", NULL, NULL,
         "'history' must be a list of [question, answer]"},
        {"{\"instruction\":\"i\"}", NULL, NULL,
         "'output' is missing: the form 'alpaca' has 'instruction' and 'output'"},
        {"{\"prompt\":\"p\",\"completion\":\"c\",\"label\":false}", NULL, NULL, "(KTO)"},
        {"{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":\"r\"}", NULL, NULL, "use --method dpo"},
    };
    tokenizer_set_chat_template(
        tok,
        "{% if tools %}{{ tools[0].function | tojson }}|{% endif %}{% for m in messages %}{{ "
        "m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% "
        "endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct dataset d;
        struct buf text = {0};
        int rc = load(&d, cases[i].text, 0);
        if (cases[i].word && (rc == OK || !strstr(err.text, cases[i].word)))
            fail_msg("'%s' does not say '%s'", rc == OK ? "" : err.text, cases[i].word);
        if (cases[i].word) continue;
        if (rc != OK) fail_msg("%s: %s", cases[i].text, err.text);
        assert_string_equal(d.form, cases[i].form);
        train_sample_render(&d.v[0], tok, "⟦", "⟧", &text);
        assert_string_equal(text.data, cases[i].rendered);
        buf_release(&text);
        dataset_release(&d);
    }
    tokenizer_set_chat_template(tok, NULL);
}

/* Loads a file with another ending and checks the targets of its samples, or the error. */
static void check_file(const char *suffix, const char *text, const char *const *targets,
                       const char *word) {
    struct dataset d;
    char *file = xasprintf("%s%s", path, suffix);
    assert_int_equal(file_write(file, text, strlen(text), &err), OK);
    int rc = dataset_load(&d, file, NULL, tok, 0, &err);
    if (word && (rc == OK || !strstr(err.text, word) || !strstr(err.text, file)))
        fail_msg("'%s' does not say '%s'", rc == OK ? "" : err.text, word);
    if (!word && rc != OK) fail_msg("%s", err.text);
    int n = 0;
    for (; !word && targets[n]; n++) check_targets(&d.v[n], targets[n]);
    if (!word) {
        assert_int_equal(d.n, n);
        dataset_release(&d);
    }
    unlink(file);
    free(file);
}

static void test_tables_and_texts(void **state) {
    (void)state;
    check_file(
        ".csv",
        "\xEF\xBB\xBFid,question,answer\r\n1,\"3, or 8?\",\"a \"\"8\"\"\"\r\n\r\n2,問,答え\n",
        (const char *const[]){"a \"8\"", "答え", NULL}, NULL);
    check_file(".TSV", "instruction\tinput\toutput\nsay, twice\t\thello\n",
               (const char *const[]){"hello", NULL}, NULL);
    check_file(".txt", "one\ntwo\n \n\n三つ\n", (const char *const[]){"ne\ntwo\n", "つ\n", NULL},
               NULL);
    check_file(".txt", "\n\nlast paragraph", (const char *const[]){"ast paragraph", NULL}, NULL);
    check_file(".csv", "question,answer\na\n", NULL, "line 2: 1 cells, but the first row names 2");
    check_file(".csv", "question,question\na,b\n", NULL, "two columns are named 'question'");
    check_file(".csv", "question,answer\na,\n", NULL, "line 2: 'answer' is missing");
    check_file(".csv", "question,answer\na,\xff\n", NULL, "line 2: not UTF-8");
    check_file(".csv", "question,answer\na,\"b\n", NULL, "line 2: a quote is not closed");
    check_file(".txt", "a\n\n\xff\n", NULL, "line 3: not UTF-8");
    check_file(".txt", "\n\n", NULL, "holds no sample");
    check_file(".parquet", "PAR1", NULL, "is a Parquet file: convert it");
}

static void test_format_option(void **state) {
    (void)state;
    static const char both[] =
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"m\"}],\"text\":"
        "\"t\"}\n{\"question\":\"q\",\"answer\":\"a\",\"text\":\"another\"}";
    struct dataset d;
    assert_int_equal(file_write(path, both, sizeof both - 1, &err), OK);
    assert_int_equal(dataset_load(&d, path, "text", tok, 0, &err), OK);
    assert_string_equal(d.form, "text");
    assert_int_equal(d.n, 2);
    check_targets(&d.v[1], "nother");
    dataset_release(&d);
    assert_int_equal(dataset_load(&d, path, "messages", tok, 0, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 2"));
    assert_int_equal(dataset_load(&d, path, "owl", tok, 0, &err), ERR_USAGE);
    assert_non_null(
        strstr(err.text, "no form 'owl' of training data; there are messages, sharegpt"));
    const char *mixed = "{\"text\":\"t\"}\n{\"question\":\"q\",\"answer\":\"a\"}";
    assert_int_equal(load(&d, mixed, 0), OK);
    assert_string_equal(d.form, "several");
    dataset_release(&d);
}

static void test_render(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(masks); i++) {
        struct dataset d;
        struct buf text = {0}, joined = {0};
        tokenizer_set_chat_template(tok, masks[i].template);
        assert_int_equal(load(&d, two_turns, 0), OK);
        train_sample_render(&d.v[0], tok, "⟦", "⟧", &text);
        const char *shown = text.data + (strncmp(text.data, "<s>", 3) ? 0 : 3);
        assert_string_equal(shown, masks[i].shown);
        json_t *v = train_sample_json(&d.v[0], tok), *part;
        size_t k, n_targets = 0;
        json_array_foreach (json_object_get(v, "parts"), k, part) {
            bool is_target = json_is_true(json_object_get(part, "learned"));
            buf_printf(&joined, "%s%s%s", is_target ? "⟦" : "",
                       json_string_value(json_object_get(part, "text")), is_target ? "⟧" : "");
        }
        assert_string_equal(joined.data, text.data);
        assert_int_equal(json_array_size(json_object_get(v, "ids")), d.v[0].n);
        json_array_foreach (json_object_get(v, "mask"), k, part) {
            n_targets += (size_t)json_integer_value(part);
        }
        assert_int_equal(n_targets, d.targets);
        json_decref(v);
        buf_release(&text);
        buf_release(&joined);
        dataset_release(&d);
    }
    tokenizer_set_chat_template(tok, NULL);
}

/* Control characters and incomplete UTF-8 are not printed. */
static void test_render_sanitizes(void **state) {
    (void)state;
    struct token_ids ids = {0};
    struct buf text = {0};
    uint8_t mask[16] = {1, 1};
    tokenizer_encode(tok, "a\x1b[2J\xc2\x9b\n\xe7\xa9", 10, 0, &ids);
    assert_true(ids.n <= 16);
    struct train_sample s = {.tokens = ids.v, .mask = mask, .n = ids.n};
    train_sample_render(&s, tok, "", "", &text);
    assert_null(strpbrk(text.data, "\x1b"));
    assert_null(strstr(text.data, "\xc2\x9b"));
    json_t *v = json_string(text.data);
    assert_non_null(v); /* is UTF-8 */
    json_decref(v);
    buf_release(&text);
    token_ids_release(&ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_multi_line_japanese),
        cmocka_unit_test(test_other_formats),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_lint_counts),
        cmocka_unit_test(test_lint_near_duplicates),
        cmocka_unit_test(test_lint_overlap),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_tables_and_texts),
        cmocka_unit_test(test_format_option),
        cmocka_unit_test(test_render),
        cmocka_unit_test(test_render_sanitizes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
