/*
 * Asking: an item becomes tokens (chat, suffix, choices), a family becomes thousands of requests in
 * one engine, and the chosen answer is compared with the right one. Nothing is parsed out of free
 * text: the answer is one of the choices, decoded with its exact probability.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

int tasks_parse(const char *list, bool pick[MAX_TASKS], struct error *err) {
    char *copy = xstrdup(list), *save = NULL;
    int rc = OK;
    CHECK(fry_count() <= MAX_TASKS);
    for (char *t = strtok_r(copy, ",", &save); t && rc == OK; t = strtok_r(NULL, ",", &save)) {
        int f = fry_find(t);
        if (strcmp(t, "fry") == 0)
            for (int i = 0; i < fry_count(); i++) pick[i] = true;
        else if (f >= 0)
            pick[f] = true;
        else
            rc = error_set(err, ERR_USAGE, "no task '%s'", t);
    }
    free(copy);
    return rc;
}

int asked_init(struct asked *a, const struct tokenizer *tok, const struct message *chat, int n_msgs,
               const struct item *it, bool working, struct error *err) {
    *a = (struct asked){.n_choices = it->n_choices};
    const char *first = working ? WORK_PREFIX : ANSWER_PREFIX;
    if (chat_encode(tok, chat, n_msgs, true, &a->prompt, NULL, err) != OK) return err->code;
    tok_encode(tok, first, strlen(first), 0, &a->prompt);
    if (working) tok_encode(tok, "\n" ANSWER_PREFIX, strlen("\n" ANSWER_PREFIX), 0, &a->suffix);
    int32_t end = tok_chat_end(tok);
    for (int i = 0; i < it->n_choices; i++) {
        char *text = xasprintf(" %s", it->choices[i]);
        tok_encode(tok, text, strlen(text), 0, &a->choices[i]);
        if (end >= 0) ids_add(&a->choices[i], end);
        a->seq[i] = (struct token_seq){a->choices[i].v, a->choices[i].n};
        free(text);
    }
    struct ids newline = {0};
    tok_encode(tok, "\n", 1, 0, &newline);
    if (newline.n > 0) a->stop[a->n_stop++] = newline.v[newline.n - 1];
    if (end >= 0) a->stop[a->n_stop++] = end;
    ids_release(&newline);
    return OK;
}

void asked_release(struct asked *a) {
    ids_release(&a->prompt);
    ids_release(&a->suffix);
    for (int i = 0; i < a->n_choices; i++) ids_release(&a->choices[i]);
    *a = (struct asked){0};
}

void asked_request(const struct asked *a, struct adapter *adapter, int32_t max_tokens,
                   struct request *out) {
    *out = (struct request){
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

#define TASK_CHUNK 2048 /* items in memory at once */
#define WORK_TOKENS 32

static void score_add(struct score *s, const struct request *r, bool right) {
    s->n++;
    s->correct += right;
    s->prefilled += r->n_prefilled;
    s->generated += r->n_generated;
    s->truncated += r->max_tokens > 0 && r->n_out == r->max_tokens;
}

int task_run(struct engine *e, const struct tokenizer *tok, int family, enum split split,
             uint64_t seed, int32_t n, struct adapter *adapter, bool working, uint8_t *right,
             struct score *out, struct progress *p, struct error *err) {
    double start = clock_now();
    int rc = OK;
    struct asked *asked = xcalloc(TASK_CHUNK, sizeof *asked);
    struct request *reqs = xcalloc(TASK_CHUNK, sizeof *reqs);
    int *correct = xcalloc(TASK_CHUNK, sizeof *correct);
    for (int32_t base = 0; rc == OK && base < n; base += TASK_CHUNK) {
        int32_t m = MIN(n - base, TASK_CHUNK);
        for (int32_t i = 0; rc == OK && i < m; i++) {
            struct item it;
            fry_item(family, split, seed, (uint32_t)(base + i), false, &it);
            struct message user = {"user", it.question};
            rc = asked_init(&asked[i], tok, &user, 1, &it, working, err);
            asked_request(&asked[i], adapter, WORK_TOKENS, &reqs[i]);
            correct[i] = it.correct;
            item_release(&it);
        }
        if (rc == OK) rc = engine_run(e, reqs, m, p, err);
        for (int32_t i = 0; i < m; i++) {
            bool ok = rc == OK && reqs[i].choice == correct[i];
            score_add(out, &reqs[i], ok);
            if (right) right[base + i] = ok;
            request_release(&reqs[i]);
            asked_release(&asked[i]);
        }
    }
    out->seconds += clock_now() - start;
    free(asked);
    free(reqs);
    free(correct);
    return rc;
}
