/*
 * test_reasoning: the reasoning at the beginning of a reply is separated from its content and tool
 * calls, whatever the chunks in which the tokens arrive: two chunks for every place of the cut, and
 * one byte at a time. At every step a stream has sent beginnings of the final texts only.
 *
 * Each token is one byte, so that tags are cut everywhere. test_reasoning.sh has the tags as
 * tokens, and the forms of the APIs.
 */
/* levels: once */
#define _GNU_SOURCE
#include "serve/generation.h"
#include "tokenizer/internal.h"

#include "fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define CALL "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"
#define THOUGHT "<|START_THINKING|>a<|END_THINKING|>"
#define ANSWER "<|START_RESPONSE|>"

static const struct reply_case {
    const char *name;
    enum reasoning_state begin;
    bool tools;
    const char *text, *cut; /* all tokens of the reply; the stop text at its end, or NULL */
    const char *reasoning, *content;
    int n_calls;
    int32_t n_tokens;   /* tokens of the reasoning */
    const char *parser; /* NULL: think */
} cases[] = {
    {"Qwen3's form", REASONING_BEFORE, false, "<think>\na < b\n</think>\n\nyes\n", NULL, "a < b",
     "yes\n", 0, 22},
    {"white space before the tag", REASONING_BEFORE, false, " \n<think>a</think>b", NULL, "a", "b",
     0, 18},
    {"no reasoning", REASONING_BEFORE, false, "\n\nyes <think>a</think>", NULL, "",
     "\n\nyes <think>a</think>", 0, 0},
    {"almost a tag", REASONING_BEFORE, false, "<thin>a</think>", NULL, "", "<thin>a</think>", 0, 0},
    {"white space only", REASONING_BEFORE, false, " \n", NULL, "", " \n", 0, 0},
    {"ends in the first tag", REASONING_BEFORE, false, "\n<thi", NULL, "", "\n<thi", 0, 0},
    {"ends within the reasoning", REASONING_BEFORE, false, "<think>\na\n\nb\n", NULL, "a\n\nb", "",
     0, 13},
    {"ends in the second tag", REASONING_BEFORE, false, "<think>a</thi", NULL, "a</thi", "", 0, 13},
    {"an empty block", REASONING_BEFORE, false, "<think>\n\n</think>\n\nyes", NULL, "", "yes", 0,
     17},
    {"newlines of the reasoning", REASONING_BEFORE, false, "<think>\n\n\na\n\n\nb\n</think>c", NULL,
     "a\n\n\nb", "c", 0, 24},
    {"one block only", REASONING_BEFORE, false, "<think>a</think><think>b</think>", NULL, "a",
     "<think>b</think>", 0, 16},
    {"characters of several bytes", REASONING_BEFORE, false, "<think>\n猫<\n</think>\n犬", NULL,
     "猫<", "犬", 0, 21},
    {"opened by the prompt", REASONING_OPEN, false, "a\n</think>\n\nyes", NULL, "a", "yes", 0, 10},
    {"opened by the prompt, a tag again", REASONING_OPEN, false, "<think>a</think>b", NULL,
     "<think>a", "b", 0, 16},
    {"not separated", REASONING_NONE, false, "<think>\na\n</think>\n\nyes", NULL, "",
     "<think>\na\n</think>\n\nyes", 0, 0},
    {"a call", REASONING_BEFORE, true, "<think>\na\n</think>\n\n" CALL, NULL, "a", "", 1, 18},
    {"content and a call", REASONING_BEFORE, true, "<think>a</think>\nb" CALL "c", NULL, "a", "b",
     1, 16},
    {"a call without tags", REASONING_BEFORE, true,
     "<think>a</think>\n\n{\"name\": \"f\", \"arguments\": {}}", NULL, "a", "", 1, 16},
    {"an object that is no call", REASONING_BEFORE, true, "<think>a</think>\n{\"b\": 1}", NULL, "a",
     "{\"b\": 1}", 0, 16},
    {"a call in the reasoning is text", REASONING_BEFORE, true, "<think>" CALL "</think>b", NULL,
     CALL, "b", 0, 15 + (int32_t)sizeof CALL - 1},
    {"a stop text in the reasoning", REASONING_BEFORE, false, "<think>\nab", "b", "a", "", 0, 9},
    {"a stop text that has a tag", REASONING_BEFORE, false, "<think>\na</think>", "</think>", "a",
     "", 0, 9},
    {"a stop text in the content", REASONING_BEFORE, false, "<think>a</think>\n\nbc", "c", "a", "b",
     0, 16},
    {"an answer in tags", REASONING_BEFORE, false, THOUGHT "\n" ANSWER "b\n<|END_RESPONSE|>\n",
     NULL, "a", "b\n", 0, (int32_t)sizeof THOUGHT - 1, "command_a"},
    {"an answer in tags without reasoning", REASONING_BEFORE, false, ANSWER "b<|END_RESPONSE|>",
     NULL, "", "b", 0, 0, "command_a"},
    {"an answer without tags", REASONING_BEFORE, false, THOUGHT "b", NULL, "a", "b", 0,
     (int32_t)sizeof THOUGHT - 1, "command_a"},
    {"almost the tag of the answer", REASONING_BEFORE, false, THOUGHT "<|START_RESP", NULL, "a",
     "<|START_RESP", 0, (int32_t)sizeof THOUGHT - 1, "command_a"},
    {"text after the answer", REASONING_BEFORE, false, THOUGHT ANSWER "b<|END_RESPONSE|> c", NULL,
     "a", "b<|END_RESPONSE|> c", 0, (int32_t)sizeof THOUGHT - 1, "command_a"},
    {"an answer that ends in its tag", REASONING_BEFORE, false, THOUGHT ANSWER "b<|END_RES", NULL,
     "a", "b<|END_RES", 0, (int32_t)sizeof THOUGHT - 1, "command_a"},
    {"a call after the answer", REASONING_BEFORE, true, THOUGHT ANSWER "b<|END_RESPONSE|>" CALL,
     NULL, "a", "b", 1, (int32_t)sizeof THOUGHT - 1, "command_a"},
};

static struct model *m;

static int group_setup(void **state) {
    struct model_config c = fixture_shape(1, 8, 2, 1, 4, 8);
    (void)state;
    c.vocab_size = 259;
    m = fixture_model_of(c, true, TENSOR_F32, NUMERIC_EXACT);
    return 0;
}

static int group_teardown(void **state) {
    (void)state;
    model_close(m);
    return 0;
}

/* Compares what a stream has sent so far with the final text. */
static void assert_begins(const struct reply_case *k, const struct buf *sent, const char *final) {
    if (sent->len && (sent->len > strlen(final) || memcmp(sent->data, final, sent->len) != 0))
        fail_msg("%s: a stream sends '%.*s' of '%s'", k->name, (int)sent->len, sent->data, final);
}

static void assert_whole(const struct reply_case *k, const struct buf *sent, const char *final) {
    assert_begins(k, sent, final);
    if (sent->len != strlen(final))
        fail_msg("%s: a stream ends after %zu bytes of '%s'", k->name, sent->len, final);
}

/* The reply whose tokens arrive in chunks: one of `first` tokens, then chunks of `step`. */
static void reply_check(const struct reply_case *k, int32_t first, int32_t step) {
    static char f[] = "f";
    char *names[] = {f}, *stop = k->cut ? xstrdup(k->cut) : NULL;
    const char *parser = k->parser ? k->parser : "think";
    struct server s = {.model = m, .reasoning_form = reasoning_form_find(parser, NULL, m->tok)};
    struct generation g = {.s = &s,
                           .spec = {.reasoning = true,
                                    .reasoning_begin = k->begin,
                                    .tool_choice = k->tools ? TOOL_CHOICE_AUTO : TOOL_CHOICE_NONE,
                                    .tool_form = tool_form_find(NULL),
                                    .tool_names = {names, 1},
                                    .stop_texts = {&stop, k->cut ? 1 : 0}}};
    struct completion a = {.reasoning_state = k->begin};
    struct engine_request *r = &a.batch_request.request;
    struct buf content = {0}, reasoning = {0};
    int32_t n = (int32_t)strlen(k->text);
    size_t n_read = 0;
    r->out = xcalloc((size_t)n, sizeof *r->out);
    for (int32_t i = 0; i < n; i++) r->out[i] = m->tok->byte_ids[(uint8_t)k->text[i]];
    buf_add(&r->text, k->text, (size_t)n - (k->cut ? strlen(k->cut) : 0));
    for (int32_t seen = 0; !a.done; seen += step) {
        seen = MIN(seen ? seen : first, n);
        r->n_out = a.batch_request.n_visible = seen;
        a.batch_request.done = seen == n;
        completion_advance(&g, &a);
        if (a.content_end > a.sent) {
            buf_add(&content, a.text.data + a.sent, a.content_end - a.sent);
            a.sent = a.content_end;
        }
        buf_add(&reasoning, a.reasoning.data + n_read, a.reasoning.len - n_read);
        n_read = a.reasoning.len;
        assert_true(a.content_begin <= a.content_end && a.content_end <= a.shown);
        assert_begins(k, &content, k->content);
        assert_begins(k, &reasoning, k->reasoning);
    }
    assert_whole(k, &content, k->content);
    assert_whole(k, &reasoning, k->reasoning);
    json_t *whole = completion_content_json(&a);
    assert_string_equal(json_string_value(whole), k->content);
    if (a.n_tool_calls != k->n_calls) fail_msg("%s: %d calls", k->name, a.n_tool_calls);
    if (a.n_reasoning_tokens != k->n_tokens)
        fail_msg("%s: %d tokens of reasoning", k->name, a.n_reasoning_tokens);
    json_decref(whole);
    free(stop);
    buf_release(&content);
    buf_release(&reasoning);
    completion_release(&a);
}

static void reply_check_chunks(const struct reply_case *k) {
    int32_t n = (int32_t)strlen(k->text);
    for (int32_t first = 1; first <= n; first++) reply_check(k, first, n);
    for (int32_t step = 1; step < 4; step++) reply_check(k, step, step);
}

static void test_chunks(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) reply_check_chunks(&cases[i]);
}

/* The first n bytes of a text, with the form's tags for <think> and </think>; malloc'ed. */
static char *text_with_tags(const char *text, size_t n, const struct reasoning_form *f) {
    static const char open[] = "<think>", close[] = "</think>";
    struct buf b = {0};
    buf_puts(&b, "");
    for (const char *p = text; p < text + n;) {
        bool opens = strncmp(p, open, strlen(open)) == 0,
             closes = strncmp(p, close, strlen(close)) == 0;
        if (opens || closes)
            buf_puts(&b, opens ? f->open : f->close);
        else
            buf_add(&b, p, 1);
        p += opens ? strlen(open) : closes ? strlen(close) : 1;
    }
    return b.data;
}

/* The cases of <think> with the tags of the other forms. */
static void test_forms(void **state) {
    static const char *const parsers[] = {"mistral",   "command_a", "seed_oss",
                                          "reasoning", "thought",   "thinking"};
    (void)state;
    for (size_t p = 0; p < ARRAY_LEN(parsers); p++) {
        const struct reasoning_form *f = reasoning_form_find(parsers[p], NULL, m->tok);
        for (size_t i = 0; i < ARRAY_LEN(cases) && !cases[i].parser; i++) {
            struct reply_case k = cases[i];
            k.parser = parsers[p];
            char *text = text_with_tags(k.text, strlen(k.text), f),
                 *begin = text_with_tags(k.text, (size_t)k.n_tokens, f),
                 *cut = k.cut ? text_with_tags(k.cut, strlen(k.cut), f) : NULL,
                 *reasoning = text_with_tags(k.reasoning, strlen(k.reasoning), f),
                 *content = text_with_tags(k.content, strlen(k.content), f);
            k.text = text, k.cut = cut, k.reasoning = reasoning, k.content = content;
            k.n_tokens = (int32_t)strlen(begin);
            reply_check_chunks(&k);
            free(text), free(begin), free(cut), free(reasoning), free(content);
        }
    }
}

static const struct template_case {
    const char *parser, *chat_template, *open; /* open NULL: no reasoning */
} templates[] = {
    {"auto", "{{ x.split('</think>')[-1] }}", "<think>"},
    {"deepseek", "<think>\n</think>", "<think>"},
    {"auto", "thoughts in [THINK] and [/THINK]", "[THINK]"},
    {"auto", "<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"},
    {"auto", "<seed:think>x</seed:think>", "<seed:think>"},
    {"auto", "<reasoning></reasoning>", "<reasoning>"},
    {"auto", "<thought></thought>", "<thought>"},
    {"auto", "<thinking></thinking>", "<thinking>"},
    {"auto", "<think>", NULL},
    {"auto", NULL, NULL},
    {"none", "<think></think>", NULL},
    {"thinking", "<think></think>", "<thinking>"},
    {"qwen3", "[THINK][/THINK]", "<think>"},
};

static void test_templates(void **state) {
    struct error err;
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(templates); i++) {
        const struct template_case *k = &templates[i];
        assert_int_equal(reasoning_parser_check(k->parser, &err), OK);
        const struct reasoning_form *f = reasoning_form_find(k->parser, k->chat_template, m->tok);
        if (!f != !k->open || (f && strcmp(f->open, k->open) != 0))
            fail_msg("%s, '%s': %s", k->parser, k->chat_template, f ? f->open : "no form");
    }
    assert_int_equal(reasoning_parser_check("granite", &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "mistral"));
}

static const struct prompt_case {
    const char *prompt, *continued;
    enum reasoning_state state;
} prompts[] = {
    {"hi", NULL, REASONING_BEFORE},
    {"hi<reasoning>", NULL, REASONING_OPEN},
    {"<reasoning> \n\n", NULL, REASONING_OPEN},
    {"reasoning>", NULL, REASONING_BEFORE},
    {"<reasoning>a", NULL, REASONING_BEFORE},
    {"", NULL, REASONING_BEFORE},
    {"x", "\n<reasoning>a", REASONING_OPEN},
    {"x", "<reasoning>a</reasoning>", REASONING_NONE},
    {"x", "a<reasoning>", REASONING_NONE},
};

/* The state after prompts; tags need not be tokens. */
static void test_prompts(void **state) {
    struct server s = {.model = m,
                       .reasoning_form = reasoning_form_find("reasoning", NULL, m->tok)};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(prompts); i++) {
        struct token_ids ids = {0};
        struct generation_spec spec = {.prompts = &ids, .n_prompts = 1};
        tokenizer_encode(m->tok, prompts[i].prompt, strlen(prompts[i].prompt), 0, &ids);
        reasoning_expect(&s, &spec, prompts[i].continued);
        if (spec.reasoning_begin != prompts[i].state)
            fail_msg("'%s': state %d", prompts[i].prompt, (int)spec.reasoning_begin);
        token_ids_release(&ids);
    }
}

/* The reasoning is left out, and the content is the same. */
static void test_left_out(void **state) {
    static const char text[] = "<think>a\n</think>\n\nb";
    struct server s = {.model = m, .reasoning_form = reasoning_form_find("think", NULL, m->tok)};
    struct generation g = {.s = &s};
    struct completion a = {.reasoning_state = REASONING_BEFORE};
    struct engine_request *r = &a.batch_request.request;
    (void)state;
    r->out = xcalloc(sizeof text, sizeof *r->out);
    for (size_t i = 0; text[i]; i++) r->out[i] = m->tok->byte_ids[(uint8_t)text[i]];
    r->n_out = a.batch_request.n_visible = (int32_t)strlen(text);
    a.batch_request.done = true;
    completion_advance(&g, &a);
    assert_int_equal(a.reasoning.len, 0);
    assert_int_equal(a.n_reasoning_tokens, 17);
    assert_int_equal(a.content_end - a.content_begin, 1);
    completion_release(&a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks), cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_forms), cmocka_unit_test(test_templates),
        cmocka_unit_test(test_prompts)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
