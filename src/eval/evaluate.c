/*
 * evaluate: turns questions into requests to an engine, grades the results and summarizes them.
 *
 * A window of jobs is submitted to the engine and refilled as jobs end, so the batch stays full
 * until the last question. A job is one question. It has one request that generates the answer, or
 * one request with all options as choices (the shared context is prefilled once), or one request
 * per option if each option has a separate context. The preamble of a subject is prefilled once:
 * later questions of the subject find it in the engine's prefix cache.
 *
 * Invariant: a result depends on the question, the model and the adapter only, never on the window.
 */
#define _GNU_SOURCE
#include "eval/evaluate.h"

#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>

enum {
    WINDOW_JOBS = 1024,
    TOKENIZATION_SLACK = 8, /* tokens that a text may have in excess of the sum of its parts */
};
static const double EQUIVALENCE_MARGIN =
    0.02; /* the largest difference of accuracies that counts as equivalent */

struct eval_job {
    int64_t index; /* index of the question in the task */
    const struct eval_question *q;
    struct eval_question generated_question; /* storage for q if the question is generated */
    struct choice_prompt chat; /* EVAL_CHAT_CHOICE; EVAL_GENERATE uses only its stop tokens */
    struct token_ids prompt[EVAL_MAX_OPTIONS], continuation[EVAL_MAX_OPTIONS];
    struct token_seq choices[EVAL_MAX_OPTIONS]; /* the continuations, for the requests */
    struct engine_request *reqs;                /* [n] */
    int n;                                      /* number of requests; 0: the job is free */
    bool prompt_truncated;
};

struct eval_window {
    struct eval_solver *s;
    const struct eval_task *task;
    const struct grader *grader;
    bool ends_early; /* a generation is cancelled when its grade is decided */
    struct eval_result *out;
    struct eval_cost *cost;
    struct eval_job *jobs; /* [WINDOW_JOBS] */
    int64_t next, done;    /* index of the next question to start; number of graded questions */
};

/* encoding */

void eval_encode_pair(const struct tokenizer *tok, const char *context, const char *continuation,
                      struct token_ids *prompt, struct token_ids *continuation_ids) {
    size_t n = text_trimmed_len(context);
    struct token_ids whole_ids = {0};
    struct buf text = {0};
    int n_before = prompt->n;
    buf_puts(&text, context);
    buf_puts(&text, continuation);
    tokenizer_encode(tok, text.data, n, TOKENIZER_ADD_BOS, prompt);
    tokenizer_encode(tok, text.data, text.len, TOKENIZER_ADD_BOS, &whole_ids);
    int n_context = prompt->n - n_before;
    if (n_context < whole_ids.n)
        for (int i = n_context; i < whole_ids.n; i++)
            token_ids_add(continuation_ids, whole_ids.v[i]);
    else
        tokenizer_encode(tok, text.data + n, text.len - n, 0, continuation_ids);
    int32_t first = tokenizer_first_token(tok);
    if (n_context == 0 && first >= 0) token_ids_add(prompt, first);
    token_ids_release(&whole_ids);
    buf_release(&text);
}

/* Drops tokens at the beginning of a prompt that has more than `room` tokens, and returns true.
 * Otherwise, and if room < 1, returns false. */
static bool prompt_truncate_left(struct token_ids *prompt, int64_t room) {
    if (prompt->n <= room || room < 1) return false;
    memmove(prompt->v, prompt->v + prompt->n - room, (size_t)room * sizeof *prompt->v);
    prompt->n = (int)room;
    return true;
}

char *question_context(const struct eval_task *task, const struct eval_question *q, int option) {
    const char *context = q->contexts[option] ? q->contexts[option] : q->context;
    return xasprintf("%s%s", task->subjects[q->subject].preamble, context);
}

static void requests_alloc(struct eval_job *j, int n) {
    j->reqs = xcalloc((size_t)n, sizeof *j->reqs);
    j->n = n;
}

/* Initializes request r, whose choices are the n options from `first` on. */
static void choices_request_init(struct eval_job *j, int r, int first, int n,
                                 const struct eval_solver *s) {
    int longest = 0;
    for (int i = first; i < first + n; i++) {
        j->choices[i] = (struct token_seq){j->continuation[i].v, j->continuation[i].n};
        longest = MAX(longest, j->continuation[i].n);
    }
    j->prompt_truncated |= prompt_truncate_left(&j->prompt[r], (int64_t)s->max_len - longest);
    j->reqs[r] = (struct engine_request){.prompt = j->prompt[r].v,
                                         .n_prompt = j->prompt[r].n,
                                         .adapter = s->adapter,
                                         .sampling = {.top_p = 1},
                                         .choices = &j->choices[first],
                                         .n_choices = n};
}

/* Creates one request for all options if they share the context, else one request per option. */
static void loglikelihood_requests_init(struct eval_job *j, const struct eval_window *w,
                                        const struct eval_question *q) {
    bool separate_contexts = q->contexts[0] != NULL;
    requests_alloc(j, separate_contexts ? q->n : 1);
    for (int i = 0; i < q->n; i++) {
        struct token_ids unused_prompt = {0};
        char *context = question_context(w->task, q, i),
             *option = xasprintf("%s%s", w->task->delimiter, q->options[i]);
        eval_encode_pair(w->s->tok, context, option,
                         separate_contexts || i == 0 ? &j->prompt[i] : &unused_prompt,
                         &j->continuation[i]);
        token_ids_release(&unused_prompt);
        free(context);
        free(option);
        if (separate_contexts) choices_request_init(j, i, i, 1, w->s);
    }
    if (!separate_contexts) choices_request_init(j, 0, 0, q->n, w->s);
}

static void generate_request_init(struct eval_job *j, const struct eval_window *w,
                                  const struct eval_question *q) {
    const struct eval_task *task = w->task;
    char *context = question_context(task, q, 0);
    int32_t eos = tokenizer_eos(w->s->tok);
    tokenizer_encode(w->s->tok, context, strlen(context), TOKENIZER_ADD_BOS, &j->prompt[0]);
    int32_t first = tokenizer_first_token(w->s->tok);
    if (j->prompt[0].n == 0 && first >= 0) token_ids_add(&j->prompt[0], first);
    j->prompt_truncated =
        prompt_truncate_left(&j->prompt[0], (int64_t)w->s->max_len - task->max_tokens);
    requests_alloc(j, 1);
    if (eos >= 0) j->chat.stop[j->chat.n_stop++] = eos;
    j->reqs[0] = (struct engine_request){.prompt = j->prompt[0].v,
                                         .n_prompt = j->prompt[0].n,
                                         .adapter = w->s->adapter,
                                         .sampling = {.top_p = 1},
                                         .max_tokens = task->max_tokens,
                                         .stop = j->chat.stop,
                                         .n_stop = j->chat.n_stop,
                                         .stop_texts = (const char *const *)task->stops.v,
                                         .n_stop_texts = task->stops.n};
    free(context);
}

static int chat_request_init(struct eval_job *j, const struct eval_window *w,
                             const struct eval_question *q, struct error *err) {
    struct task_item it = {.n_choices = q->n, .chat = q->chat, .whole_replies = q->whole_replies};
    struct chat_message user = {"user", q->context};
    for (int i = 0; i < q->n; i++) it.choices[i] = q->options[i];
    requests_alloc(j, 1);
    if (choice_prompt_init(&j->chat, w->s->tok, &user, 1, &it, w->s->chain_of_thought, err) != OK)
        return err->code;
    int work_tokens = w->task->is_split_evidence ? FAMILY_MAX_WORK_TOKENS
                                                 : family_max_work_tokens(w->task->family);
    choice_prompt_request(&j->chat, w->s->adapter, work_tokens, &j->reqs[0]);
    return OK;
}

int question_error_wrap(const struct eval_task *task, const struct eval_question *q, int64_t index,
                        struct error *err) {
    if (q->path) return error_wrap(err, "'%s', line %d", q->path, q->line);
    return error_wrap(err, "question %lld of '%s'", (long long)index, task->name);
}

/* Makes the requests of the next question in the free job `j`. */
static int job_prepare(struct eval_window *w, struct eval_job *j, struct error *err) {
    int rc = OK;
    *j = (struct eval_job){.index = w->next++};
    const struct eval_question *q = j->q =
        eval_task_question(w->task, j->index, &j->generated_question);
    if (w->task->output_type == EVAL_CHAT_CHOICE)
        rc = chat_request_init(j, w, q, err);
    else if (w->task->output_type == EVAL_GENERATE)
        generate_request_init(j, w, q);
    else
        loglikelihood_requests_init(j, w, q);
    return rc != OK ? question_error_wrap(w->task, q, j->index, err) : OK;
}

/* Starts the next question in the free job `j`. */
static int job_begin(struct eval_window *w, struct eval_job *j, struct error *err) {
    int rc = job_prepare(w, j, err);
    if (rc != OK) return rc;
    for (int i = 0; rc == OK && i < j->n; i++) rc = engine_submit(w->s->e, &j->reqs[i], err);
    return rc != OK ? question_error_wrap(w->task, j->q, j->index, err) : OK;
}

/* grading */

static int64_t count_characters(const char *s) {
    int64_t n = 0;
    for (; *s; s++) n += (*s & 0xC0) != 0x80;
    return n;
}

/* Index of the largest value, the first of equal ones. */
static int argmax(const double *v, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return best;
}

static void loglikelihood_grade(const struct eval_job *j, const struct eval_question *q,
                                struct eval_result *result) {
    double logprob[EVAL_MAX_OPTIONS], logprob_per_char[EVAL_MAX_OPTIONS], sum = 0;
    for (int i = 0; i < q->n; i++) {
        logprob[i] =
            (double)(j->n > 1 ? j->reqs[i].choice_logprob[0] : j->reqs[0].choice_logprob[i]);
        logprob_per_char[i] = logprob[i] / (double)MAX(count_characters(q->options[i]), 1);
    }
    result->choice = (int16_t)argmax(logprob, q->n);
    for (int i = 0; i < q->n; i++) sum += math_exp(logprob[i] - logprob[result->choice]);
    result->prob = (float)(1 / sum);
    result->right = result->choice == q->correct;
    result->right_norm = argmax(logprob_per_char, q->n) == q->correct;
}

/* Appends the text that a request has generated so far. */
static void generated_text(const struct eval_window *w, const struct engine_request *r,
                           struct buf *out) {
    if (r->n_stop_texts > 0 && r->text.data)
        buf_add(out, r->text.data, r->text.len);
    else
        tokenizer_decode(w->s->tok, r->out, r->n_out, false, out);
    buf_puts(out, "");
}

/* Replaces a text by its answer; false: the text has no answer. */
static bool text_filter(const struct answer_filter *filter, struct buf *text) {
    struct buf answer = {0};
    buf_puts(&answer, "");
    bool found = answer_filter_apply(filter, text->data, &answer);
    buf_release(text);
    *text = answer;
    return found;
}

void text_grade(const struct eval_task *task, const struct grader *grader,
                const struct eval_question *q, struct buf *text, struct eval_result *result) {
    bool found = true;
    if (task->filter) found = text_filter(task->filter, text);
    struct grade g = grader_grade(grader, text->data, (const char *const *)&q->answer, 1),
                 others = grader_grade(grader, text->data, (const char *const *)q->aliases.v,
                                       q->aliases.n);
    result->no_answer = !g.found || !found;
    result->score = (float)MAX(g.score, others.score);
    result->right = MAX(g.score, others.score) >= 0.5;
}

static void generation_grade(const struct eval_window *w, const struct eval_job *j,
                             struct eval_result *result) {
    struct buf text = {0};
    generated_text(w, &j->reqs[0], &text);
    text_grade(w->task, w->grader, j->q, &text, result);
    result->truncated = j->reqs[0].finish == FINISH_LENGTH && !w->ends_early;
    buf_release(&text);
}

static void job_grade(const struct eval_window *w, const struct eval_job *j,
                      struct eval_result *result) {
    const struct eval_question *q = j->q;
    const struct engine_request *r = &j->reqs[0];
    *result = (struct eval_result){.prompt_truncated = j->prompt_truncated, .choice = -1};
    if (w->task->output_type == EVAL_LOGLIKELIHOOD) {
        loglikelihood_grade(j, q, result);
    } else if (w->task->output_type == EVAL_GENERATE) {
        generation_grade(w, j, result);
    } else {
        result->choice = (int16_t)r->choice;
        result->prob = r->choice_prob[r->choice];
        result->right = r->choice == q->correct;
        result->truncated = r->max_tokens > 0 && r->n_out == r->max_tokens;
    }
    if (w->task->output_type != EVAL_GENERATE) result->score = result->right;
}

static bool job_is_done(const struct eval_job *j) {
    for (int i = 0; i < j->n; i++)
        if (!j->reqs[i].done) return false;
    return j->n > 0;
}

static void job_release(struct eval_job *j) {
    for (int i = 0; i < j->n; i++) engine_request_release(&j->reqs[i]);
    for (int i = 0; i < EVAL_MAX_OPTIONS; i++) {
        token_ids_release(&j->prompt[i]);
        token_ids_release(&j->continuation[i]);
    }
    choice_prompt_release(&j->chat);
    if (j->q == &j->generated_question) eval_question_release(&j->generated_question);
    free(j->reqs);
    *j = (struct eval_job){0};
}

static void job_finish(struct eval_window *w, struct eval_job *j) {
    job_grade(w, j, &w->out[j->index]);
    for (int i = 0; i < j->n; i++) {
        w->cost->prefilled += j->reqs[i].n_prefilled;
        w->cost->generated += j->reqs[i].n_generated;
    }
    w->cost->calls += j->n;
    w->done++;
    job_release(j);
}

int32_t eval_task_max_request_tokens(const struct eval_task *task, const struct tokenizer *tok) {
    if (task->family >= 0)
        return task->is_split_evidence ? FAMILY_MAX_TOKENS : family_max_tokens(task->family);
    int32_t max_tokens = 0,
            *preamble_tokens = xcalloc((size_t)MAX(task->n_subjects, 1), sizeof *preamble_tokens);
    struct token_ids ids = {0};
    for (int i = 0; i < task->n_subjects; i++, ids.n = 0) {
        tokenizer_encode(tok, task->subjects[i].preamble, strlen(task->subjects[i].preamble),
                         TOKENIZER_ADD_BOS, &ids);
        preamble_tokens[i] = ids.n;
    }
    for (int64_t i = 0; i < task->n_questions; i++) {
        const struct eval_question *q = &task->questions[i];
        for (int k = 0; k < MAX(q->n, 1); k++, ids.n = 0) {
            const char *context = q->contexts[k] ? q->contexts[k] : q->context;
            tokenizer_encode(tok, context, strlen(context), 0, &ids);
            if (q->n) tokenizer_encode(tok, q->options[k], strlen(q->options[k]), 0, &ids);
            max_tokens = MAX(max_tokens, preamble_tokens[q->subject] + ids.n);
        }
    }
    token_ids_release(&ids);
    free(preamble_tokens);
    return max_tokens + task->max_tokens + TOKENIZATION_SLACK;
}

/* answering */

/* Grades finished jobs and starts the next questions in their place. */
static int window_refill(struct eval_window *w, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < WINDOW_JOBS; i++) {
        if (job_is_done(&w->jobs[i])) job_finish(w, &w->jobs[i]);
        if (w->jobs[i].n == 0 && w->next < w->task->n_questions)
            rc = job_begin(w, &w->jobs[i], err);
    }
    return rc;
}

static bool text_is_decided(const struct eval_window *w, const struct eval_job *j) {
    struct buf text = {0};
    generated_text(w, &j->reqs[0], &text);
    bool decided = grader_is_decided(w->grader, text.data, j->q->answer);
    for (int i = 0; decided && i < j->q->aliases.n; i++)
        decided = grader_is_decided(w->grader, text.data, j->q->aliases.v[i]);
    buf_release(&text);
    return decided;
}

/* Cancels the generations whose grade more text cannot change. */
static void window_cancel_decided(struct eval_window *w) {
    for (int i = 0; i < WINDOW_JOBS; i++) {
        struct eval_job *j = &w->jobs[i];
        if (j->n && !j->reqs[0].done && j->reqs[0].n_out > 0 && text_is_decided(w, j))
            engine_cancel(w->s->e, &j->reqs[0]);
    }
}

/* Releases all jobs. After an error some requests may be unfinished; it runs these first, because
 * the engine uses a request until it is done. */
static void window_drain(struct eval_window *w) {
    while (engine_step(w->s->e) > 0) continue;
    for (int i = 0; i < WINDOW_JOBS; i++)
        if (w->jobs[i].n) job_release(&w->jobs[i]);
}

int eval_task_grader(const struct eval_task *task, const struct grader **out, struct error *err) {
    *out = NULL;
    if (task->output_type != EVAL_GENERATE) return OK;
    if (!(*out = grader_find(task->grader, err))) return err->code;
    for (int64_t i = 0; i < task->n_questions; i++)
        if (grader_check(*out, task->questions[i].answer, err) != OK)
            return question_error_wrap(task, &task->questions[i], i, err);
    return OK;
}

int eval_solver_answer(void *solver, const struct eval_task *task, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done,
                       struct error *err) {
    struct eval_window w = {.s = solver, .task = task, .out = out, .cost = cost};
    double start = clock_now();
    int rc = eval_task_grader(task, &w.grader, err);
    w.ends_early = w.grader && strcmp(grader_name(w.grader), "prefix") == 0;
    w.jobs = xcalloc(WINDOW_JOBS, sizeof *w.jobs);
    while (rc == OK && w.done < task->n_questions) {
        rc = window_refill(&w, err);
        if (rc == OK && w.done < task->n_questions) engine_step(w.s->e);
        if (rc == OK && w.ends_early) window_cancel_decided(&w);
        if (p) progress_update(p, done + w.done, task->name);
        if (rc == OK) rc = log_check_cancelled(err);
    }
    window_drain(&w);
    free(w.jobs);
    cost->seconds += clock_now() - start;
    return rc;
}

int eval_solver_count(const struct eval_solver *solver, const struct eval_task *task,
                      struct work_counter *counter, struct error *err) {
    struct eval_solver s = *solver;
    struct eval_window w = {.s = &s, .task = task};
    int rc = eval_task_grader(task, &w.grader, err);
    while (rc == OK && w.next < task->n_questions) {
        struct eval_job j;
        rc = job_prepare(&w, &j, err);
        for (int i = 0; rc == OK && i < j.n; i++) {
            rc = engine_check(s.e, &j.reqs[i], err);
            if (rc == OK) work_counter_add(counter, &j.reqs[i]);
        }
        job_release(&j);
        if (rc == OK) rc = log_check_cancelled(err);
    }
    return rc;
}

int eval_run_family(struct engine *e, const struct tokenizer *tok, int family,
                    enum data_split split, uint64_t seed, int32_t n, struct adapter *adapter,
                    bool chain_of_thought, uint8_t *right, struct eval_score *out,
                    struct progress *p, struct error *err) {
    struct eval_task task = {.name = (char *)(uintptr_t)task_families[family]->name,
                             .output_type = EVAL_CHAT_CHOICE,
                             .n_questions = n,
                             .family = family,
                             .split = split,
                             .seed = seed};
    struct eval_solver s = {
        .e = e, .tok = tok, .adapter = adapter, .chain_of_thought = chain_of_thought};
    struct eval_result *v = xcalloc((size_t)MAX(n, 1), sizeof *v);
    struct eval_cost cost = {0};
    int rc = eval_solver_answer(&s, &task, v, &cost, p, 0, err);
    for (int32_t i = 0; rc == OK && i < n; i++) {
        out->correct += v[i].right;
        out->truncated += v[i].truncated;
        if (right) right[i] = v[i].right;
    }
    out->n += rc == OK ? n : 0;
    out->prefilled += cost.prefilled;
    out->generated += cost.generated;
    out->seconds += cost.seconds;
    free(v);
    return rc;
}

/* comparing */

struct cluster_key {
    uint64_t hash;
    int64_t index;
};

static int by_hash(const void *a, const void *b) {
    const struct cluster_key *x = a, *y = b;
    return x->hash != y->hash ? (x->hash < y->hash ? -1 : 1)
                              : (x->index > y->index) - (x->index < y->index);
}

int32_t eval_task_clusters(const struct eval_task *task, int32_t *cluster_of) {
    struct cluster_key *v = xcalloc((size_t)MAX(task->n_questions, 1), sizeof *v);
    for (int64_t i = 0; i < task->n_questions; i++) {
        struct eval_question scratch;
        const struct eval_question *q = eval_task_question(task, i, &scratch);
        const void *key = q->cluster ? (const void *)q->cluster : &i;
        v[i] = (struct cluster_key){hash_fnv1a(key, q->cluster ? strlen(q->cluster) : sizeof i), i};
        if (q == &scratch) eval_question_release(&scratch);
    }
    qsort(v, (size_t)task->n_questions, sizeof *v, by_hash);
    int32_t n = 0;
    for (int64_t i = 0; i < task->n_questions; i++) {
        n += i == 0 || v[i].hash != v[i - 1].hash;
        cluster_of[v[i].index] = n - 1;
    }
    free(v);
    return n;
}

/* The questions without failed ones, as vectors. */
struct answered {
    int64_t n;
    uint8_t *right, *baseline_right; /* [n] */
    double *v;                       /* [n] scratch */
    int32_t *cluster_of, n_clusters; /* [n] the clusters of these questions, renumbered */
};

static struct answered answered_select(const struct eval_result *results,
                                       const struct eval_result *baseline, int64_t n,
                                       const int32_t *cluster_of, int32_t n_clusters) {
    size_t size = (size_t)MAX(n, 1);
    struct answered a = {.right = xcalloc(size, 1),
                         .baseline_right = xcalloc(size, 1),
                         .v = xcalloc(size, sizeof *a.v),
                         .cluster_of = xcalloc(size, sizeof *a.cluster_of)};
    int32_t *number = xcalloc((size_t)MAX(n_clusters, 1), sizeof *number); /* from 1; 0: none yet */
    for (int64_t i = 0; i < n; i++) {
        if (results[i].failed) continue;
        int32_t *c = &number[cluster_of[i]];
        if (!*c) *c = ++a.n_clusters;
        a.cluster_of[a.n] = *c - 1;
        a.right[a.n] = results[i].right;
        a.baseline_right[a.n++] = baseline[i].right;
    }
    free(number);
    return a;
}

static void answered_release(struct answered *a) {
    free(a->right);
    free(a->baseline_right);
    free(a->v);
    free(a->cluster_of);
}

/* Sets a->v to the differences from the baseline, or to the results themselves. */
static const double *answered_values(struct answered *a, bool difference) {
    for (int64_t i = 0; i < a->n; i++)
        a->v[i] = (double)a->right[i] - (difference ? (double)a->baseline_right[i] : 0);
    return a->v;
}

struct eval_summary eval_summarize(const struct eval_result *results,
                                   const struct eval_result *baseline, int64_t n,
                                   const int32_t *cluster_of, int32_t n_clusters, uint64_t seed) {
    struct answered a = answered_select(results, baseline, n, cluster_of, n_clusters);
    struct eval_summary s = {.n = a.n, .failed = n - a.n, .n_clusters = a.n_clusters, .p_holm = 1};
    for (int64_t i = 0; i < n; i++) {
        if (results[i].failed) continue;
        s.correct += results[i].right;
        s.correct_norm += results[i].right_norm;
        s.prompts_truncated += results[i].prompt_truncated;
        s.truncated += results[i].truncated;
        s.no_answer += results[i].no_answer;
        s.score += (double)results[i].score / (double)a.n;
    }
    s.acc = stats_wilson(s.correct, a.n);
    s.acc_norm = stats_wilson(s.correct_norm, a.n);
    s.clustered =
        stats_cluster_bootstrap(answered_values(&a, false), a.cluster_of, a.n, a.n_clusters, seed);
    s.versus.p = 1;
    if (results != baseline) {
        const double *v = answered_values(&a, true);
        s.versus = stats_mcnemar(a.right, a.baseline_right, a.n);
        s.versus_clustered = stats_cluster_bootstrap(v, a.cluster_of, a.n, a.n_clusters, seed);
        s.equivalent = stats_tost(v, a.n, EQUIVALENCE_MARGIN);
    }
    answered_release(&a);
    return s;
}
