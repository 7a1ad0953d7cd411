/*
 * run: the steps of agents. All runs advance together: in each round every unfinished run has one
 * request, and all requests are one batch.
 *
 * A step goes through these phases. THINK (only REACT) writes a line of thought. CHOOSE scores the
 * texts that begin the call of each tool, and in REACT that of an answer. In the native form
 * answering is any other text, so its probability is 1 minus the sum of the tools'. CALL writes the
 * arguments under the grammar of the tool's schema; then the tool runs, and the step ends. ANSWER
 * writes free text. If this text begins a call (a model may write its reasoning before it), the
 * text so far is the thought, and CHOOSE follows, without answering.
 *
 * The conversation of a run grows by one call and its result per step. The prefix cache of the
 * engine makes each step cost its new tokens only.
 */
#define _GNU_SOURCE
#include "agent/form.h"
#include "agent/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STEPS = 8, MAX_TOKENS = 512, THOUGHT_TOKENS = 128, LOOP_TOKENS = 64, LEAST_TOKENS = 8 };
enum phase { THINK, CHOOSE, CALL, ANSWER, ENDED };

const char *const agent_end_names[] = {"running", "answered", "step limit", "time limit", "failed"};

struct agent_run_state {
    enum phase phase;
    json_t *messages;        /* the conversation with the calls so far; owned */
    struct token_ids prompt; /* tokens of the conversation and the begun turn */
    struct engine_request req;
    struct agent_step step; /* the current one */
    double began;           /* the step */
    bool must_answer;       /* a limit was reached */
    bool must_call;         /* the text before has begun a call */
};

/* All runs of one agent_run_all. */
struct agent_batch {
    const struct agent_options *o;
    struct agent_call_form form;
    struct agent_run *runs;
    int n;
    double began;
    int32_t stop[2], n_stop;
    const char *stop_texts[2]; /* the stop of the form; of a thought also the end of the line */
};

/* limits and inputs */

static int max_steps(const struct agent_batch *b) {
    return b->o->max_steps > 0 ? b->o->max_steps : MAX_STEPS;
}

static int32_t tokens_or(int32_t value, int32_t fallback) {
    return value > 0 ? value : fallback;
}

int agent_messages_check(const json_t *messages, struct error *err) {
    size_t n = json_array_size(messages), i;
    const json_t *m;
    json_array_foreach (messages, i, m)
        if (!json_is_string(json_object_get(m, "role")) ||
            !json_is_string(json_object_get(m, "content")))
            return error_set(err, ERR_USAGE, "message %zu needs the texts 'role' and 'content'",
                             i + 1);
    if (!n) return error_set(err, ERR_USAGE, "an agent needs a message to answer");
    if (strcmp(json_get_string(json_array_get(messages, n - 1), "role"), "user") != 0)
        return error_set(err, ERR_USAGE, "the last message must have the role 'user'");
    return OK;
}

/* steps */

static void step_release(struct agent_step *s) {
    free(s->thought);
    json_decref(s->arguments);
    free(s->observation);
    free(s->prob);
    *s = (struct agent_step){0};
}

static void run_fail(struct agent_run *r, const char *text) {
    r->end = AGENT_FAILED;
    r->error = xstrdup(text);
    r->state->phase = ENDED;
}

static void step_begin(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    const struct chat_template_input in = {
        .messages = s->messages,
        .tools = b->form.react || !b->form.n_tools ? NULL : b->form.tools,
        .generation_prompt = true};
    struct error err;
    double now = clock_now();
    s->prompt.n = 0;
    s->must_call = false;
    s->began = now;
    s->step = (struct agent_step){
        .tool = -1, .prob = xcalloc((size_t)b->form.n_tools + 1, sizeof *s->step.prob)};
    if (b->o->max_seconds > 0 && now - b->began >= b->o->max_seconds)
        r->end = AGENT_TIME_LIMIT;
    else if (r->n_steps >= max_steps(b))
        r->end = AGENT_STEP_LIMIT;
    s->must_answer = r->end != AGENT_RUNNING;
    if (chat_template_encode(b->o->model->tok, &in, &s->prompt, NULL, &err) != OK) {
        run_fail(r, err.text);
        return;
    }
    if (b->form.react)
        s->phase = THINK;
    else
        s->phase = s->must_answer || !b->form.n_tools ? ANSWER : CHOOSE;
    if (s->phase == ANSWER) s->step.prob[b->form.n_tools] = 1;
    if (s->phase == THINK)
        tokenizer_encode(b->o->model->tok, "Thought:", strlen("Thought:"),
                         TOKENIZER_NO_PREFIX_SPACE, &s->prompt);
}

static void step_end(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    if (!s->step.thought) s->step.thought = xstrdup("");
    s->step.seconds = clock_now() - s->began;
    r->prefilled += s->step.prefilled;
    r->cached += s->step.cached;
    r->generated += s->step.generated;
    r->seconds += s->step.seconds;
    r->steps = xrealloc(r->steps, sizeof *r->steps * (size_t)(r->n_steps + 1));
    r->steps[r->n_steps++] = s->step;
    s->step = (struct agent_step){0};
    if (b->o->on_step) b->o->on_step(b->o->on_step_ctx, r, &r->steps[r->n_steps - 1]);
}

/* requests */

/* The seed of a run's samples in its phase. */
static uint64_t phase_seed(const struct agent_run *r) {
    return (r->seed << 9) + 4 * (uint64_t)r->n_steps + r->state->phase;
}

static void sampling_set(struct engine_request *q, const struct agent_options *o,
                         const struct agent_run *r) {
    q->sampling = o->sampling;
    if (o->sampling.temperature == 0) q->sampling.top_p = 1;
    q->sampling.seed = phase_seed(r);
}

/* Sets the request of a run's phase. False: there is no room for it in the context. */
static bool request_init(struct agent_batch *b, struct agent_run *r) {
    const struct agent_options *o = b->o;
    struct agent_run_state *s = r->state;
    int n_choices = b->form.n_tools + (b->form.react && !s->must_call);
    int32_t longest = 0, room = engine_max_len(o->engine) - s->prompt.n;
    s->req = (struct engine_request){.prompt = s->prompt.v,
                                     .n_prompt = s->prompt.n,
                                     .adapter = o->adapter,
                                     .mix = o->adapter ? NULL : o->mix,
                                     .n_mix = o->adapter ? 0 : o->n_mix,
                                     .sampling = {.top_p = 1},
                                     .stop = b->stop,
                                     .n_stop = b->n_stop};
    if (s->phase == CHOOSE) {
        for (int i = 0; i < n_choices; i++) longest = MAX(longest, b->form.seqs[i].n);
        s->req.choices = b->form.seqs;
        s->req.n_choices = n_choices;
        return room > longest + LEAST_TOKENS;
    }
    s->req.max_tokens = s->phase == THINK ? tokens_or(o->thought_tokens, THOUGHT_TOKENS)
                                          : tokens_or(o->max_tokens, MAX_TOKENS);
    s->req.max_tokens = MIN(s->req.max_tokens, room);
    if (s->phase == CALL) {
        s->req.grammar = b->form.grammars[s->step.tool];
        if (o->sample_calls) sampling_set(&s->req, o, r);
        return room >= LEAST_TOKENS;
    }
    s->req.stop_texts = b->stop_texts;
    s->req.n_stop_texts = !b->form.stop ? 0 : s->phase == THINK ? 2 : 1;
    s->req.loop_tokens = LOOP_TOKENS;
    sampling_set(&s->req, o, r);
    return room >= LEAST_TOKENS;
}

/* The generated text of a request, as valid UTF-8 without control characters and without white
 * space at its ends; malloc'ed. */
static char *request_text(const struct agent_batch *b, const struct engine_request *q) {
    struct buf text = {0};
    buf_puts(&text, "");
    if (q->n_stop_texts)
        buf_add(&text, q->text.data, q->text.len);
    else
        tokenizer_decode(b->o->model->tok, q->out, q->n_out, false, &text);
    const char *from = text.data + strspn(text.data, " \t\r\n");
    size_t n = strlen(from);
    while (n > 0 && strchr(" \t\r\n", from[n - 1])) n--;
    struct buf out = {0};
    buf_puts(&out, "");
    text_add_clean(&out, from, n, SIZE_MAX);
    buf_release(&text);
    return out.data;
}

static void prompt_add(const struct agent_batch *b, struct agent_run_state *s, const char *text) {
    tokenizer_encode(b->o->model->tok, text, strlen(text), TOKENIZER_NO_PREFIX_SPACE, &s->prompt);
}

static void prompt_add_ids(struct agent_run_state *s, const struct token_ids *ids) {
    for (int i = 0; i < ids->n; i++) token_ids_add(&s->prompt, ids->v[i]);
}

/* results of the phases */

static void think_end(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    s->step.thought = request_text(b, &s->req);
    char *line = xasprintf(" %s\n", s->step.thought);
    prompt_add(b, s, line);
    free(line);
    s->phase = CHOOSE;
    if (!s->must_answer) return;
    prompt_add_ids(s, &b->form.openings[b->form.n_tools]);
    s->step.prob[b->form.n_tools] = 1;
    s->phase = ANSWER;
}

/* Samples an index of p[n], at this temperature. */
static int choice_sample(const double *p, int n, float temperature, uint64_t seed) {
    struct rng rng = rng_make(seed, RNG_SELECT, 0, 0);
    double sum = 0, u = (double)rng_uniform(&rng);
    for (int i = 0; i < n; i++) sum += pow(p[i], 1 / (double)temperature);
    u *= sum;
    for (int i = 0; i < n - 1; i++) {
        u -= pow(p[i], 1 / (double)temperature);
        if (u < 0) return i;
    }
    return n - 1;
}

/* Reads the probabilities of a choice, and returns the chosen tool, or -1: the answer. In the
 * native form a call is chosen if calling, by any tool, is more probable than all other texts. */
static int choice_read(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    int n = b->form.n_tools, best = 0;
    double sum = 0, *p = s->step.prob;
    for (int i = 0; i < s->req.n_choices; i++)
        p[i] = b->form.react || s->must_call ? (double)s->req.choice_prob[i]
                                             : exp((double)s->req.choice_logprob[i]);
    for (int i = 0; i < n; i++) {
        sum += p[i];
        if (p[i] > p[best]) best = i;
    }
    if (s->must_call)
        p[n] = 0;
    else if (!b->form.react)
        p[n] = MAX(0, 1 - sum);
    if (b->o->sample_calls && b->o->sampling.temperature > 0) {
        int sampled =
            choice_sample(p, n + !s->must_call, b->o->sampling.temperature, phase_seed(r));
        return sampled == n ? -1 : sampled;
    }
    if (s->must_call) return best;
    return p[n] >= (b->form.react ? p[best] : sum) ? -1 : best;
}

static void choose_end(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    s->step.tool = choice_read(b, r);
    s->phase = s->step.tool < 0 ? ANSWER : CALL;
    prompt_add_ids(s, &b->form.openings[s->step.tool < 0 ? b->form.n_tools : s->step.tool]);
}

static void call_end(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    const struct agent_tool *tool = &b->o->tools->v[s->step.tool];
    char *text = request_text(b, &s->req);
    struct buf result = {0};
    s->step.arguments = json_loads(text, JSON_DISABLE_EOF_CHECK, NULL);
    free(text);
    if (!s->step.arguments) {
        run_fail(r, "the arguments of a call have no room: raise --max-tokens or --max-model-len");
        return;
    }
    buf_puts(&result, "");
    s->step.failed = !agent_tool_call(tool, s->step.arguments, &result);
    if (tool->spent) {
        int64_t prefilled, generated;
        tool->spent(tool->ctx, &prefilled, &generated);
        s->step.prefilled += prefilled;
        s->step.generated += generated;
    }
    s->step.observation = xstrdup(result.data);
    buf_release(&result);
    agent_call_form_add(&b->form, s->messages, s->step.thought ? s->step.thought : "", tool,
                        s->step.arguments, s->step.observation);
    step_end(b, r);
    step_begin(b, r);
}

/* Whether a free text ended where it begins a call. */
static bool began_call(const struct agent_batch *b, const struct engine_request *q) {
    return !b->form.react && q->n_stop_texts && q->finish == FINISH_STOP &&
           q->n_generated == q->n_out;
}

static void answer_end(struct agent_batch *b, struct agent_run *r) {
    struct agent_run_state *s = r->state;
    char *text = request_text(b, &s->req);
    if (began_call(b, &s->req) && !s->must_answer) {
        s->step.thought = text;
        if (*text) {
            prompt_add(b, s, text);
            prompt_add(b, s, "\n");
        }
        s->must_call = true;
        s->phase = CHOOSE;
        return;
    }
    double logprob = 0;
    for (int32_t i = 0; i < s->req.n_out; i++) logprob += (double)s->req.out_logprob[i];
    r->confidence = s->step.prob[b->form.n_tools] * exp(logprob);
    r->calibrated = b->o->calibration ? agent_calibrated(b->o->calibration, r->confidence) : NAN;
    r->truncated = s->req.finish != FINISH_STOP;
    r->answer = text;
    if (r->end == AGENT_RUNNING) r->end = AGENT_ANSWERED;
    step_end(b, r);
    agent_call_form_add_answer(&b->form, s->messages, r->steps[r->n_steps - 1].thought, text);
    r->conversation = agent_call_form_request(&b->form, s->messages);
    s->phase = ENDED;
}

static void advance(struct agent_batch *b, struct agent_run *r) {
    static void (*const end[])(struct agent_batch *, struct agent_run *) = {
        [THINK] = think_end, [CHOOSE] = choose_end, [CALL] = call_end, [ANSWER] = answer_end};
    struct agent_run_state *s = r->state;
    s->step.prefilled += s->req.n_prefilled;
    s->step.cached += s->req.n_cached;
    s->step.generated += s->req.n_generated;
    end[s->phase](b, r);
    engine_request_release(&s->req);
}

/* all runs */

static int requests_run(struct agent_batch *b, struct engine_request *reqs, int n,
                        struct error *err) {
    if (b->o->run) return b->o->run(b->o->run_ctx, reqs, n, err);
    return engine_run(b->o->engine, reqs, n, NULL, err);
}

/* One request of each unfinished run. *n: how many there were. */
static int round_run(struct agent_batch *b, struct engine_request *reqs, int *which, int *n,
                     struct error *err) {
    *n = 0;
    for (int i = 0; i < b->n; i++) {
        struct agent_run *r = &b->runs[i];
        if (r->state->phase == ENDED) continue;
        if (!request_init(b, r)) {
            run_fail(r, "no room is left in the context: raise --max-model-len, or lower "
                        "--max-steps or --max-tokens");
            continue;
        }
        which[*n] = i;
        reqs[(*n)++] = r->state->req;
    }
    int rc = *n ? requests_run(b, reqs, *n, err) : OK;
    for (int i = 0; i < *n; i++) {
        struct agent_run *r = &b->runs[which[i]];
        r->state->req = reqs[i];
        if (rc == OK)
            advance(b, r);
        else
            engine_request_release(&r->state->req);
    }
    return rc;
}

static void state_release(struct agent_run *r) {
    struct agent_run_state *s = r->state;
    if (!s) return;
    step_release(&s->step);
    token_ids_release(&s->prompt);
    json_decref(s->messages);
    free(s);
    r->state = NULL;
}

static int runs_begin(struct agent_batch *b, struct error *err) {
    int32_t eot = tokenizer_eot(b->o->model->tok);
    if (eot >= 0) b->stop[b->n_stop++] = eot;
    b->stop_texts[0] = b->form.stop;
    b->stop_texts[1] = "\n";
    for (int i = 0; i < b->n; i++) {
        struct agent_run *r = &b->runs[i];
        if (agent_messages_check(r->messages, err) != OK) return err->code;
        r->state = xcalloc(1, sizeof *r->state);
        r->state->messages = agent_call_form_conversation(&b->form, b->o->system, r->messages);
        step_begin(b, r);
    }
    return OK;
}

int agent_run_all(const struct agent_options *o, struct agent_run *runs, int n, struct error *err) {
    struct agent_batch b = {.o = o, .runs = runs, .n = n, .began = clock_now()};
    struct engine_request *reqs = xcalloc((size_t)n + 1, sizeof *reqs);
    int *which = xcalloc((size_t)n + 1, sizeof *which), left = 1;
    int rc = agent_call_form_init(&b.form, o->form, o->model, o->tools, err);
    if (rc == OK) rc = runs_begin(&b, err);
    while (rc == OK && left > 0) rc = round_run(&b, reqs, which, &left, err);
    for (int i = 0; i < n; i++) state_release(&runs[i]);
    agent_call_form_release(&b.form);
    free(reqs);
    free(which);
    return rc;
}

void agent_run_release(struct agent_run *r) {
    for (int i = 0; i < r->n_steps; i++) step_release(&r->steps[i]);
    free(r->steps);
    free(r->answer);
    free(r->error);
    json_decref(r->conversation);
    state_release(r);
    *r = (struct agent_run){.messages = r->messages, .seed = r->seed};
}

/* steps for people and as JSON */

void agent_step_text(const struct agent_step *s, const struct agent_tools *t, struct buf *out) {
    if (*s->thought) buf_printf(out, "thought: %s\n", s->thought);
    if (s->tool < 0) return;
    char *arguments = json_dumps(s->arguments, 0);
    buf_printf(out, "call: %s %s (probability %.3f)\nresult: %s\n", t->v[s->tool].name, arguments,
               s->prob[s->tool], s->observation);
    free(arguments);
}

json_t *agent_step_json(const struct agent_step *s, const struct agent_tools *t) {
    json_t *probabilities = json_object();
    for (int i = 0; i < t->n; i++)
        json_object_set_new(probabilities, t->v[i].name, json_real(s->prob[i]));
    json_object_set_new(probabilities, "answer", json_real(s->prob[t->n]));
    return json_pack("{s:s,s:s?,s:O?,s:s?,s:b,s:o,s:f,s:I,s:I,s:I}", "thought", s->thought, "tool",
                     s->tool < 0 ? NULL : t->v[s->tool].name, "arguments", s->arguments,
                     "observation", s->observation, "failed", s->failed, "probabilities",
                     probabilities, "seconds", s->seconds, "prefilled", (json_int_t)s->prefilled,
                     "cached", (json_int_t)s->cached, "generated", (json_int_t)s->generated);
}

json_t *agent_run_json(const struct agent_run *r, const struct agent_tools *t) {
    json_t *steps = json_array();
    for (int i = 0; i < r->n_steps; i++)
        json_array_append_new(steps, agent_step_json(&r->steps[i], t));
    return json_pack(
        "{s:s?,s:s,s:s?,s:f,s:o,s:b,s:o,s:f,s:I,s:I,s:I}", "answer", r->answer, "end",
        agent_end_names[r->end], "error", r->error, "confidence", r->confidence, "calibrated",
        r->answer && !isnan(r->calibrated) ? json_real(r->calibrated) : json_null(), "truncated",
        r->truncated, "steps", steps, "seconds", r->seconds, "prefilled", (json_int_t)r->prefilled,
        "cached", (json_int_t)r->cached, "generated", (json_int_t)r->generated);
}
