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

static const struct reply_case {
    const char *name;
    enum reasoning_state begin;
    bool tools;
    const char *text, *cut; /* all tokens of the reply; the stop text at its end, or NULL */
    const char *reasoning, *content;
    int n_calls;
    int32_t n_tokens; /* tokens of the reasoning */
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
    struct server s = {.model = m};
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

static void test_chunks(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int32_t n = (int32_t)strlen(cases[i].text);
        for (int32_t first = 1; first <= n; first++) reply_check(&cases[i], first, n);
        for (int32_t step = 1; step < 4; step++) reply_check(&cases[i], step, step);
    }
}

/* The reasoning is left out, and the content is the same. */
static void test_left_out(void **state) {
    static const char text[] = "<think>a\n</think>\n\nb";
    struct server s = {.model = m};
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_chunks),
                                       cmocka_unit_test(test_left_out)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
