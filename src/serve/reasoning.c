/*
 * reasoning: finds the form of a model's reasoning, and its tags in prompts and replies.
 *
 *     think       Qwen3, DeepSeek-R1, GLM, SmolLM3: <think>…</think>
 *     mistral     Magistral: [THINK]…[/THINK], special tokens
 *     command_a   <|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>
 *     seed_oss    <seed:think>…</seed:think>
 *     reasoning   Reka Flash; thought: EXAONE Deep; thinking: fine-tuned Llama models
 *
 * The channels of gpt-oss are not supported: a reply there has several messages.
 */
#define _GNU_SOURCE
#include "serve/reasoning.h"
#include "serve/tool_calls.h"

#include <string.h>

/* The first row that matches is the form of a model. */
static const struct reasoning_form forms[] = {
    {{"think", "deepseek_r1", "deepseek_v3", "qwen3", "glm45"}, "<think>", "</think>", NULL, NULL},
    {{"mistral"}, "[THINK]", "[/THINK]", NULL, NULL},
    {{"command_a"},
     "<|START_THINKING|>",
     "<|END_THINKING|>",
     "<|START_RESPONSE|>",
     "<|END_RESPONSE|>"},
    {{"seed_oss"}, "<seed:think>", "</seed:think>", NULL, NULL},
    {{"reasoning"}, "<reasoning>", "</reasoning>", NULL, NULL},
    {{"thought"}, "<thought>", "</thought>", NULL, NULL},
    {{"thinking"}, "<thinking>", "</thinking>", NULL, NULL},
};

static const struct reasoning_form *form_named(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        for (size_t k = 0; k < ARRAY_LEN(forms[i].names) && forms[i].names[k]; k++)
            if (strcmp(forms[i].names[k], name) == 0) return &forms[i];
    return NULL;
}

/* llama.cpp's format "deepseek" names the field of the reply, not the tags. */
static bool is_auto(const char *parser) {
    return strcmp(parser, "auto") == 0 || strcmp(parser, "deepseek") == 0;
}

int reasoning_parser_check(const char *parser, struct error *err) {
    struct buf names = {0};
    if (is_auto(parser) || strcmp(parser, "none") == 0 || form_named(parser)) return OK;
    for (size_t i = 0; i < ARRAY_LEN(forms); i++) buf_printf(&names, ", %s", forms[i].names[0]);
    error_set(err, ERR_USAGE, "--reasoning-parser has no '%.40s'; there are auto, none%s", parser,
              names.data);
    buf_release(&names);
    return err->code;
}

static bool is_plain_token(const struct tokenizer *tok, const char *piece) {
    int32_t id = tokenizer_piece_to_id(tok, piece);
    return id >= 0 && !tokenizer_is_special(tok, id);
}

const struct reasoning_form *reasoning_form_find(const char *parser, const char *chat_template,
                                                 const struct tokenizer *tok) {
    if (!is_auto(parser)) return form_named(parser);
    for (size_t i = 0; chat_template && i < ARRAY_LEN(forms); i++)
        if (strstr(chat_template, forms[i].close)) return &forms[i];
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        if (is_plain_token(tok, forms[i].open) && is_plain_token(tok, forms[i].close))
            return &forms[i];
    return NULL;
}

bool reasoning_form_has_token(const struct reasoning_form *f, const struct tokenizer *tok,
                              int32_t id) {
    const char *const tags[] = {f->open, f->close, f->answer_open, f->answer_close};
    for (size_t i = 0; i < ARRAY_LEN(tags); i++)
        if (tags[i] && tokenizer_piece_to_id(tok, tags[i]) == id) return true;
    return false;
}

static size_t length_without_blanks(const char *p, size_t n) {
    while (n > 0 && p[n - 1] && strchr(" \n\r\t", p[n - 1])) n--;
    return n;
}

static bool ends_with(const char *p, size_t n, const char *tag) {
    size_t len = strlen(tag);
    return n >= len && memcmp(p + n - len, tag, len) == 0;
}

bool reasoning_form_opened_by(const struct reasoning_form *f, const struct tokenizer *tok,
                              const struct token_ids *prompt) {
    enum { TOKENS = 64 }; // more than those of any tag and the white space after it
    int n = MIN(prompt->n, TOKENS);
    struct buf text = {0};
    tokenizer_decode(tok, prompt->v + prompt->n - n, n, true, &text);
    bool opened =
        text.len && ends_with(text.data, length_without_blanks(text.data, text.len), f->open);
    buf_release(&text);
    return opened;
}

bool reasoning_form_is_open(const struct reasoning_form *f, const char *text) {
    const char *p = skip_whitespace(text, text + strlen(text));
    return strncmp(p, f->open, strlen(f->open)) == 0 && !strstr(p, f->close);
}

size_t reasoning_form_content_len(const struct reasoning_form *f, const char *p, size_t n,
                                  bool done) {
    if (!f->answer_close) return n;
    size_t trimmed = length_without_blanks(p, n);
    if (ends_with(p, trimmed, f->answer_close)) return trimmed - strlen(f->answer_close);
    return done ? n : n - tag_partial_match(p, n, f->answer_close);
}
