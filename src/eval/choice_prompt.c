/*
 * choice_prompt: turns an item into the tokens of a chat, a suffix and the choices. No answer is
 * parsed from text: it is one of the choices, decoded with its exact probability. evaluate.c and
 * swarm/engine_client.c run the requests.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

void choice_prompt_add_choice(struct choice_prompt *a, int i, const struct tokenizer *tok,
                              const char *text, int32_t end) {
    if (!a->choices) {
        a->choices = xcalloc((size_t)a->n_choices, sizeof *a->choices);
        a->seq = xcalloc((size_t)a->n_choices, sizeof *a->seq);
    }
    tokenizer_encode(tok, text, strlen(text), 0, &a->choices[i]);
    if (end >= 0) token_ids_add(&a->choices[i], end);
    a->seq[i] = (struct token_seq){a->choices[i].v, a->choices[i].n};
}

static int chat_encode_item(const struct tokenizer *tok, const struct chat_message *chat,
                            int n_msgs, const struct task_item *it, struct token_ids *out,
                            struct error *err) {
    if (!it->chat) return chat_encode(tok, chat, n_msgs, true, out, NULL, err);
    const struct chat_template_input in = {.messages = json_object_get(it->chat, "messages"),
                                           .tools = json_object_get(it->chat, "tools"),
                                           .generation_prompt = true};
    return chat_template_encode(tok, &in, out, NULL, err);
}

int choice_prompt_init(struct choice_prompt *a, const struct tokenizer *tok,
                       const struct chat_message *chat, int n_msgs, const struct task_item *it,
                       bool chain_of_thought, struct error *err) {
    *a = (struct choice_prompt){.n_choices = it->n_choices};
    chain_of_thought &= !it->whole_replies;
    const char *first = it->whole_replies ? "" : chain_of_thought ? WORK_PREFIX : ANSWER_PREFIX;
    if (chat_encode_item(tok, chat, n_msgs, it, &a->prompt, err) != OK) return err->code;
    tokenizer_encode(tok, first, strlen(first), 0, &a->prompt);
    if (chain_of_thought)
        tokenizer_encode(tok, "\n" ANSWER_PREFIX, strlen("\n" ANSWER_PREFIX), 0, &a->suffix);
    int32_t end = tokenizer_eot(tok);
    for (int i = 0; i < it->n_choices; i++) {
        char *text = xasprintf("%s%s", it->whole_replies ? "" : " ", it->choices[i]);
        choice_prompt_add_choice(a, i, tok, text, end);
        free(text);
    }
    struct token_ids newline = {0};
    tokenizer_encode(tok, "\n", 1, 0, &newline);
    if (newline.n > 0) a->stop[a->n_stop++] = newline.v[newline.n - 1];
    if (end >= 0) a->stop[a->n_stop++] = end;
    token_ids_release(&newline);
    return OK;
}

void choice_prompt_release(struct choice_prompt *a) {
    token_ids_release(&a->prompt);
    token_ids_release(&a->suffix);
    for (int i = 0; a->choices && i < a->n_choices; i++) token_ids_release(&a->choices[i]);
    free(a->choices);
    free(a->seq);
    *a = (struct choice_prompt){0};
}

void choice_prompt_request(const struct choice_prompt *a, struct adapter *adapter,
                           int32_t max_tokens, struct engine_request *out) {
    *out = (struct engine_request){
        .prompt = a->prompt.v,
        .n_prompt = a->prompt.n,
        .adapter = adapter,
        .max_tokens = a->suffix.n ? max_tokens : 0,
        .sampling = {.top_p = 1},
        .stop = a->stop,
        .n_stop = a->n_stop,
        .suffix = {a->suffix.v, a->suffix.n},
        .choices = a->seq,
        .n_choices = a->n_choices,
    };
}
