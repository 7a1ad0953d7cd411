/*
 * measure: questions about the facts and of the tasks to retain, answered by greedy generation.
 *
 * A memory is recalled if the answer contains its value as whole words. An answer to a question to
 * retain is right if it is the expected text. The questions are encoded once; both adapters answer
 * the same ones, so that the results are paired.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "sleep/internal.h"

#include <stdlib.h>
#include <string.h>

enum { EXTRA_TOKENS = 16 }; /* allowed beyond the expected answer */

struct sleep_question {
    struct token_ids prompt;
    int32_t max_tokens;
    int fact;       /* index of the fact, or -1 */
    char *expected; /* answer to a question to retain */
};

static int text_tokens(const struct model *m, const char *text) {
    struct token_ids ids = {0};
    tokenizer_encode(m->tok, text, strlen(text), 0, &ids);
    const int n = ids.n;
    token_ids_release(&ids);
    return n;
}

/* Adds a question. `chat` is {messages, tools} without the answer. */
static int question_add(struct sleep_measure *q, const struct model *m, const json_t *chat,
                        const char *expected, struct error *err) {
    const struct chat_template_input in = {.messages = json_object_get(chat, "messages"),
                                           .tools = json_object_get(chat, "tools"),
                                           .generation_prompt = true};
    struct sleep_question *v = &q->v[q->n++];
    *v = (struct sleep_question){.fact = -1, .max_tokens = text_tokens(m, expected) + EXTRA_TOKENS};
    return chat_template_encode(m->tok, &in, &v->prompt, NULL, err);
}

static int fact_questions_add(struct sleep_measure *q, const struct model *m,
                              const struct sleep_facts *f, int fact, struct error *err) {
    const struct sleep_fact *v = &f->v[fact];
    int rc = OK;
    for (int k = 0; rc == OK && k < SLEEP_HELD_OUT; k++) {
        char *text = sleep_held_out_question(v->language, v->attribute, k);
        json_t *chat = json_pack("{s:[{s:s,s:s}]}", "messages", "role", "user", "content", text);
        rc = question_add(q, m, chat, v->answer, err);
        q->v[q->n - 1].fact = fact;
        json_decref(chat);
        free(text);
    }
    return rc;
}

/* The expected answer of a conversation is its last message, which is removed. An answer of a
 * family begins with ANSWER_PREFIX, which is given, so that the model does not reason first. */
static int retained_question_add(struct sleep_measure *q, const struct model *m,
                                 const struct sleep_rehearsal *r, int set, json_t *chat,
                                 struct error *err) {
    json_t *messages = json_copy(json_object_get(chat, "messages"));
    const size_t last = json_array_size(messages) - 1, prefix = strlen(ANSWER_PREFIX);
    char *reply = xstrdup(json_get_string(json_array_get(messages, last), "content"));
    const bool prefixed = strncmp(reply, ANSWER_PREFIX, prefix) == 0;
    char *expected = xstrdup(reply + (prefixed ? prefix : 0));
    json_array_remove(messages, last);
    json_object_set_new(chat, "messages", messages);
    int rc = question_add(q, m, chat, reply, err);
    struct sleep_question *v = &q->v[q->n - 1];
    if (prefixed) tokenizer_encode(m->tok, ANSWER_PREFIX, prefix, 0, &v->prompt);
    v->expected = expected;
    free(reply);
    return rc ? error_wrap(err, "a question of '%s'", sleep_rehearsal_set(r, set)) : OK;
}

/* Sets the length of the longest question. */
static int context_check(struct sleep_measure *q, const struct model *m, struct error *err) {
    for (int i = 0; i < q->n; i++)
        q->longest = MAX(q->longest, q->v[i].prompt.n + q->v[i].max_tokens);
    if (q->longest <= m->config.max_seq_len) return OK;
    return error_set(err, ERR_MISMATCH,
                     "a question with its answer has %d tokens, but the context of '%s' is %d: the "
                     "user has too many memories of one kind, or --rehearse has long questions",
                     q->longest, m->name, m->config.max_seq_len);
}

int sleep_measure_open(struct sleep_measure *q, const struct model *m,
                       const struct sleep_options *o, const struct sleep_facts *f,
                       const struct sleep_rehearsal *r, struct error *err) {
    const int64_t per_set = sleep_rehearsal_size(r, true, o->retain_n);
    int rc = OK;
    *q = (struct sleep_measure){.n_recall = SLEEP_HELD_OUT * (int64_t)sleep_facts_learnable(f),
                                .n_retain = r->n_sets * per_set};
    q->v = xcalloc((size_t)(SLEEP_HELD_OUT * (int64_t)f->n + q->n_retain + 1), sizeof *q->v);
    q->sets = json_array();
    for (int i = 0; i < 2; i++) {
        q->recall[i] = xcalloc((size_t)q->n_recall + 1, 1);
        q->retain[i] = xcalloc((size_t)q->n_retain + 1, 1);
    }
    for (int i = 0; rc == OK && i < f->n; i++) rc = fact_questions_add(q, m, f, i, err);
    for (int s = 0; rc == OK && s < r->n_sets; s++) {
        json_array_append_new(q->sets, json_string(sleep_rehearsal_set(r, s)));
        for (int64_t i = 0; rc == OK && i < per_set; i++) {
            json_t *chat = sleep_rehearsal_at(r, s, true, i, per_set, RETAIN_SEED);
            rc = retained_question_add(q, m, r, s, chat, err);
            json_decref(chat);
        }
    }
    return rc == OK ? context_check(q, m, err) : rc;
}

void sleep_measure_release(struct sleep_measure *q) {
    for (int i = 0; i < q->n; i++) {
        token_ids_release(&q->v[i].prompt);
        free(q->v[i].expected);
    }
    for (int i = 0; i < 2; i++) free(q->recall[i]), free(q->retain[i]);
    json_decref(q->sets);
    free(q->v);
    *q = (struct sleep_measure){0};
}

/* answers */

static void answer_text(const struct model *m, const struct engine_request *r, struct buf *out) {
    int32_t n = r->n_out;
    while (n > 0 && tokenizer_is_special(m->tok, r->out[n - 1])) n--;
    tokenizer_decode(m->tok, r->out, n, false, out);
    buf_puts(out, "");
}

static bool texts_equal(const char *a, const char *b) {
    char *x = text_trimmed(a), *y = text_trimmed(b);
    const bool equal = strcmp(x, y) == 0;
    free(x);
    free(y);
    return equal;
}

/* Grades all answers. The answers to the questions of a fact count for each of its memories. */
static void answers_grade(struct sleep_measure *q, const struct model *m,
                          const struct sleep_facts *f, const struct engine_request *requests,
                          int phase) {
    char **answers = xcalloc((size_t)q->n + 1, sizeof *answers);
    int64_t n_recall = 0, n_retain = 0;
    for (int i = 0; i < q->n; i++) {
        struct buf text = {0};
        answer_text(m, &requests[i], &text);
        answers[i] = text.data;
        if (q->v[i].fact < 0)
            q->retain[phase][n_retain++] = texts_equal(answers[i], q->v[i].expected);
    }
    for (int i = 0; i < f->n_memories; i++)
        for (int k = 0; f->memories[i].fact >= 0 && k < SLEEP_HELD_OUT; k++)
            q->recall[phase][n_recall++] = sleep_answer_has(
                answers[f->memories[i].fact * SLEEP_HELD_OUT + k], f->memories[i].value);
    for (int i = 0; i < q->n; i++) free(answers[i]);
    free(answers);
}

static struct engine *engine_make(const struct sleep_measure *q, const struct sleep_env *env,
                                  const struct engine_limits *limits, struct error *err) {
    struct engine_options eo = {.max_rows = 512,
                                .max_seqs = limits->max_seqs ? (int32_t)limits->max_seqs : 256,
                                .max_len = q->longest,
                                .kv_elem = DTYPE_F16,
                                .pool = env->pool};
    return engine_options_limit(env->exact, &eo, err) == OK ? engine_new(env->exact, &eo, err)
                                                            : NULL;
}

int sleep_measure_run(struct sleep_measure *q, const struct sleep_env *env,
                      const struct engine_limits *limits, const struct sleep_facts *f,
                      struct adapter *a, int phase, struct error *err) {
    struct engine_request *requests = xcalloc((size_t)q->n + 1, sizeof *requests);
    struct progress p;
    const int32_t stop = tokenizer_eot(env->exact->tok);
    struct engine *e = engine_make(q, env, limits, err);
    int rc = e ? OK : err->code;
    for (int i = 0; i < q->n; i++)
        requests[i] = (struct engine_request){.prompt = q->v[i].prompt.v,
                                              .n_prompt = q->v[i].prompt.n,
                                              .adapter = a,
                                              .sampling = {.top_p = 1},
                                              .max_tokens = q->v[i].max_tokens,
                                              .stop = &stop,
                                              .n_stop = stop >= 0};
    progress_start(&p, phase ? "measuring, after" : "measuring, before", q->n);
    if (rc == OK) rc = engine_run(e, requests, q->n, &p, err);
    progress_finish(&p, NULL);
    if (rc == OK) answers_grade(q, env->exact, f, requests, phase);
    for (int i = 0; i < q->n; i++) engine_request_release(&requests[i]);
    engine_free(e);
    free(requests);
    return rc;
}

/* results */

static json_t *paired_json(const uint8_t *before, const uint8_t *after, int64_t n) {
    if (n == 0) return json_null();
    const struct stats_mcnemar v = stats_mcnemar(after, before, n);
    const struct stats_interval d = stats_paired_interval(&v, 1);
    const int64_t was = v.both + v.only_b, is = v.both + v.only_a;
    return json_pack("{s:I,s:o,s:o,s:f,s:f,s:f,s:f}", "n", (json_int_t)n, "before",
                     stats_interval_json(stats_wilson(was, n)), "after",
                     stats_interval_json(stats_wilson(is, n)), "change", d.value, "lo", d.lo, "hi",
                     d.hi, "p", v.p);
}

json_t *sleep_recall_json(const struct sleep_measure *q) {
    return paired_json(q->recall[0], q->recall[1], q->n_recall);
}

static bool has_id(const json_t *ids, int64_t id) {
    const json_t *v;
    size_t i;
    json_array_foreach (ids, i, v)
        if (json_integer_value(v) == id) return true;
    return false;
}

json_t *sleep_learned_json(const struct sleep_measure *q, const struct sleep_facts *f,
                           const json_t *unlearned) {
    json_t *list = json_array();
    int64_t at = 0;
    for (int i = 0; i < f->n_memories; i++) {
        const struct sleep_memory *m = &f->memories[i];
        int right[2] = {0};
        if (m->fact < 0) continue;
        for (int k = 0; k < SLEEP_HELD_OUT; k++, at++)
            for (int phase = 0; phase < 2; phase++) right[phase] += q->recall[phase][at];
        json_array_append_new(list, json_pack("{s:I,s:s,s:b,s:i,s:i}", "id", (json_int_t)m->id,
                                              "hash", m->hash, "new", (int)has_id(unlearned, m->id),
                                              "before", right[0], "after", right[1]));
    }
    return list;
}

json_t *sleep_retention_json(const struct sleep_measure *q) {
    json_t *v = paired_json(q->retain[0], q->retain[1], q->n_retain), *sets, *name;
    size_t i;
    if (q->n_retain == 0) return v;
    const int64_t n = q->n_retain / (int64_t)json_array_size(q->sets);
    json_object_set_new(v, "sets", sets = json_array());
    json_array_foreach (q->sets, i, name) {
        json_t *row = paired_json(q->retain[0] + (int64_t)i * n, q->retain[1] + (int64_t)i * n, n);
        json_object_set(row, "name", name);
        json_array_append_new(sets, row);
    }
    return v;
}
