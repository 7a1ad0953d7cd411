/*
 * remote_solver: a model of a remote server as a candidate of an evaluation.
 *
 * Several threads send the questions of a task, each the next one that no thread has taken, and
 * grade the replies as those of a local model. A result depends on the reply only, not on the order
 * of the requests. Whether a server gives the same reply twice is up to the server.
 */
#include "eval/evaluate.h"
#include "grade/grade.h"
#include "remote/remote.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* OpenAI refuses a request with more stop texts. Every reply is cut here too, at all of them. */
enum { MAX_STOPS = 4 };

struct remote_run {
    const struct eval_remote *s;
    const struct eval_task *task;
    const struct grader *grader;
    struct eval_result *out;
    struct progress *p;
    int64_t done_before; /* questions that `p` counted before this task */
    atomic_bool cancelled;
    atomic_llong next;    /* index of the next question to send */
    pthread_mutex_t lock; /* protects the members below */
    struct eval_cost *cost;
    int64_t done, failed, first_failed; /* first_failed: index of a question, if failed > 0 */
    struct error first_error;
};

int eval_remote_check(const struct eval_task *task, struct error *err) {
    if (task->output_type == EVAL_GENERATE) return OK;
    return error_set(err, ERR_USAGE,
                     "'%s' needs the probabilities of its choices, which --remote does not have; "
                     "it answers tasks with a grader: gsm8k, triviaqa, nq, math, mmlu_pro, bbh, "
                     "lambada, files with an answer instead of choices, and recipes with a grader, "
                     "such as 'grader: letter' for choices",
                     task->name);
}

static json_t *request_json(const struct remote_run *w, const struct eval_question *q) {
    char *context = question_context(w->task, q, 0);
    json_t *v = json_pack("{s:i,s:I,s:i,s:b}", "temperature", 0, "seed", (json_int_t)w->s->seed,
                          "max_tokens", (int)w->task->max_tokens, "stream", 0),
           *text = json_string_lossy(context, strlen(context));
    if (w->s->is_chat)
        json_object_set_new(v, "messages",
                            json_pack("[{s:s,s:o}]", "role", "user", "content", text));
    else
        json_object_set_new(v, "prompt", text);
    json_t *stops = json_array();
    for (int i = 0; i < MIN(w->task->stops.n, MAX_STOPS); i++) {
        const char *stop = w->task->stops.v[i];
        json_array_append_new(stops, json_string_lossy(stop, strlen(stop)));
    }
    if (json_array_size(stops)) json_object_set(v, "stop", stops);
    json_decref(stops);
    free(context);
    return v;
}

/* Ends a text at the first of the task's stop texts. Returns whether there was one. */
static bool text_stop(const struct eval_task *task, char *text) {
    char *end = NULL;
    for (int i = 0; i < task->stops.n; i++) {
        char *p = *task->stops.v[i] ? strstr(text, task->stops.v[i]) : NULL;
        if (p && (!end || p < end)) end = p;
    }
    if (end) *end = '\0';
    return end != NULL;
}

static void reply_grade(const struct remote_run *w, const struct eval_question *q,
                        struct remote_reply *reply, struct eval_result *result) {
    struct buf text = {0};
    bool stopped = text_stop(w->task, reply->text);
    buf_puts(&text, reply->text);
    *result = (struct eval_result){.choice = -1, .truncated = reply->truncated && !stopped};
    text_grade(w->task, w->grader, q, &text, result);
    buf_release(&text);
}

static void outcome_add(struct remote_run *w, int64_t index, const struct remote_reply *reply,
                        int rc, const struct error *why) {
    pthread_mutex_lock(&w->lock);
    w->cost->calls += reply->attempts;
    w->cost->prefilled += reply->prefilled;
    w->cost->generated += reply->generated;
    w->done++;
    if (rc != OK && (!w->failed || index < w->first_failed)) {
        w->first_failed = index;
        w->first_error = *why;
    }
    w->failed += rc != OK;
    pthread_mutex_unlock(&w->lock);
}

static void question_send(struct remote_run *w, int64_t index) {
    struct remote_reply reply;
    struct error why;
    const struct eval_question *q = &w->task->questions[index];
    json_t *request = request_json(w, q);
    int rc = remote_generate(w->s->server, request, &reply, &why);
    if (rc == OK)
        reply_grade(w, q, &reply, &w->out[index]);
    else
        w->out[index] = (struct eval_result){.choice = -1, .failed = true};
    outcome_add(w, index, &reply, rc, &why);
    remote_reply_release(&reply);
    json_decref(request);
}

/* One thread's part. The calling thread has the log and reports the progress of all. */
static void questions_send(void *ctx, int64_t begin, int64_t end, int thread) {
    struct remote_run *w = ctx;
    struct error err;
    (void)begin, (void)end;
    while (!atomic_load(&w->cancelled)) {
        int64_t index = atomic_fetch_add(&w->next, 1);
        if (index >= w->task->n_questions) return;
        question_send(w, index);
        if (thread != 0) continue;
        pthread_mutex_lock(&w->lock);
        int64_t done = w->done;
        pthread_mutex_unlock(&w->lock);
        if (w->p) progress_update(w->p, w->done_before + done, w->task->name);
        if (log_check_cancelled(&err) != OK) atomic_store(&w->cancelled, true);
    }
}

static void failures_report(struct remote_run *w) {
    if (!w->failed) return;
    question_error_wrap(w->task, &w->task->questions[w->first_failed], w->first_failed,
                        &w->first_error);
    log_warn("%s of '%s' failed on %lld of %lld questions of '%s', which do not count; the first: "
             "%.1500s",
             remote_model(w->s->server), remote_url(w->s->server), (long long)w->failed,
             (long long)w->task->n_questions, w->task->name, w->first_error.text);
}

int eval_remote_answer(void *remote, const struct eval_task *task, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done,
                       struct error *err) {
    struct remote_run w = {
        .s = remote, .task = task, .out = out, .cost = cost, .p = p, .done_before = done};
    double start = clock_now();
    if (eval_remote_check(task, err) != OK || eval_task_grader(task, &w.grader, err) != OK)
        return err->code;
    struct pool *pool = pool_new(w.s->n_requests);
    pthread_mutex_init(&w.lock, NULL);
    pool_run(pool, questions_send, &w, w.s->n_requests, 1);
    pthread_mutex_destroy(&w.lock);
    pool_free(pool);
    cost->seconds += clock_now() - start;
    failures_report(&w);
    if (p) progress_update(p, done + w.done, task->name);
    return log_check_cancelled(err);
}
