/*
 * pipeline: builds a team for the question, runs a workflow with this team, writes every reply to
 * the board, and stores the exchange in the conversation memory.
 *
 * Invariants:
 * 1. A call goes only to the client of its agent's stage. The calls of a step that go to the same
 *    client are one batch.
 * 2. An agent that fails or returns no usable text does not stop the other agents. If no text is
 *    usable, the answer is a fallback text.
 * 3. The board has the latest utterance of each internal agent under the agent's key, every summary
 *    under a separate key, the final answer under BOARD_FINAL_RESPONSE, and all nonempty utterances
 *    of an agent in the agent's slot.
 * 4. With a selector, a reply of the role "output" is the selected one of its samples, before it is
 *    written. Sample 0 is the reply without a selector.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

enum {
    LONG_QUESTION = 150,          /* characters; a longer question is summarized */
    LONG_REFERENCE = 500,         /* characters; a question with longer references is summarized */
    QUESTION_SUMMARY_CHARS = 250, /* maximum length of the summary of a question */
    CONTEXT_CHARS = 1500,         /* characters of the conversation in a prompt, before halving */
    MIN_ANSWER_CHARS = 10,        /* minimum length of an answer with --compat legacy */
    SUMMARY_TOKENS = 256,         /* token limit of a summary */
    FACT_TOKENS = 256,            /* token limit of the extracted facts */
    MAX_HALVINGS = 3 /* in the attempt after this many halvings, context and references are empty */
};

static const char *const stage_names[PIPELINE_N_STAGES] = {"internal", "summary", "output"};
const char *const answer_source_names[] = {"output", "member", "memory", "nobody"};

enum pipeline_stage pipeline_stage_of_role(const char *role) {
    for (int s = PIPELINE_SUMMARY; s < PIPELINE_N_STAGES; s++)
        if (strcmp(role, stage_names[s]) == 0) return (enum pipeline_stage)s;
    return PIPELINE_INTERNAL;
}

/* State of one question. */
struct pipeline_state {
    const struct pipeline_options *o;
    const char *question;
    enum language lang;
    enum question_type type;
    struct agent agents[TEAM_MAX];
    char *system[TEAM_MAX]; /* system prompts, owned */
    char **names;           /* [TEAM_MAX] in the pipeline_answer, which owns the texts */
    int n_agents;
    int n_utterances[TEAM_MAX];  /* by agent, in this attempt */
    int n_halvings;              /* attempts before this one; each halves context and references */
    struct report_cost *sampled; /* in the pipeline_answer */
};

/* LLM calls */

static bool same_client(const struct llm_client *a, const struct llm_client *b) {
    return a->ask == b->ask && a->ctx == b->ctx;
}

/* Runs, as one batch, the calls of all stages that have this client. */
static int calls_run_on_client(const struct pipeline_state *t, const struct llm_client *client,
                               struct llm_call *calls, int n, struct error *err) {
    struct llm_call *selected = xcalloc((size_t)n, sizeof *selected);
    int *index = xcalloc((size_t)n, sizeof *index), m = 0;
    for (int i = 0; i < n; i++) {
        const struct llm_client *stage_client =
            &t->o->stage[pipeline_stage_of_role(calls[i].agent->role)].llm_client;
        if (!same_client(stage_client, client)) continue;
        index[m] = i;
        selected[m++] = calls[i];
    }
    int rc = m ? client->ask(client->ctx, selected, m, err) : OK;
    for (int i = 0; i < m; i++)
        calls[index[i]] = selected[i]; /* after an error too, because selected[i] may own a text */
    free(selected);
    free(index);
    return rc;
}

static int calls_run(const struct pipeline_state *t, struct llm_call *calls, int n,
                     struct error *err) {
    int rc = OK;
    for (int s = 0; rc == OK && s < PIPELINE_N_STAGES; s++) {
        bool done = false;
        for (int k = 0; k < s; k++)
            done = done || same_client(&t->o->stage[k].llm_client, &t->o->stage[s].llm_client);
        if (!done) rc = calls_run_on_client(t, &t->o->stage[s].llm_client, calls, n, err);
    }
    return rc;
}

/* samples of the answer */

static bool is_sampled(const struct pipeline_state *t, const struct llm_call *c) {
    return t->o->selector.n_samples && pipeline_stage_of_role(c->agent->role) == PIPELINE_OUTPUT;
}

/* Selects among the samples of an answer that have usable text; without one it is the first. */
static int sample_select(const struct pipeline_state *t, const struct llm_call *samples,
                         int *selected, struct error *err) {
    const struct answer_selector *s = &t->o->selector;
    char **texts = xcalloc((size_t)s->n_samples, sizeof *texts);
    bool usable = false;
    for (int i = 0; i < s->n_samples; i++) {
        const struct llm_call *c = &samples[i];
        struct buf text = {0};
        usable |= !c->failed && answer_clean(c->text, c->truncated, &text);
        buf_puts(&text, "");
        texts[i] = text.data;
    }
    int rc = usable ? s->select(s->ctx, t->question, texts, s->n_samples, selected, err) : OK;
    for (int i = 0; i < s->n_samples; i++) free(texts[i]);
    free(texts);
    return rc;
}

/* Moves the selected sample to `out` and releases the others; after an error too. */
static int samples_take(const struct pipeline_state *t, struct llm_call *samples,
                        struct llm_call *out, int rc, struct error *err) {
    const int n = t->o->selector.n_samples;
    int selected = 0;
    if (rc == OK) rc = sample_select(t, samples, &selected, err);
    *out = samples[selected];
    for (int i = 0; i < n; i++) {
        t->sampled->prefilled += samples[i].n_prefilled;
        t->sampled->generated += samples[i].n_generated;
        if (i != selected) llm_call_release(&samples[i]);
    }
    t->sampled->calls += n;
    return rc;
}

/* Runs the calls as one batch, with all samples of the answer. */
static int calls_run_sampled(const struct pipeline_state *t, struct llm_call *calls, int n,
                             struct error *err) {
    int total = 0, at = 0;
    for (int i = 0; i < n; i++) total += is_sampled(t, &calls[i]) ? t->o->selector.n_samples : 1;
    struct llm_call *all = xcalloc((size_t)total, sizeof *all);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < (is_sampled(t, &calls[i]) ? t->o->selector.n_samples : 1); k++) {
            all[at] = calls[i];
            all[at++].seed += (uint64_t)k;
        }
    int rc = calls_run(t, all, total, err);
    at = 0;
    for (int i = 0; i < n; i++) {
        if (is_sampled(t, &calls[i])) {
            rc = samples_take(t, &all[at], &calls[i], rc, err);
            at += t->o->selector.n_samples;
        } else {
            calls[i] = all[at++];
        }
    }
    free(all);
    return rc;
}

/* Asks the summary model. The caller sets the limits and the kind of reply in `c`, and releases `c`
 * also after an error. */
static int summary_model_ask(const struct pipeline_options *o, const char *system, const char *user,
                             struct llm_call *c, struct error *err) {
    static const struct agent summary_agent = {.name = "summary", .role = "summary"};
    static const struct task_item no_item = {.correct = -1};
    const struct chat_message chat[2] = {{"system", system}, {"user", user}};
    const struct llm_client *client = &o->stage[PIPELINE_SUMMARY].llm_client;
    c->agent = &summary_agent;
    if (!c->item) c->item = &no_item;
    c->messages = chat;
    c->n_messages = 2;
    int rc = client->ask(client->ctx, c, 1, err);
    c->messages = NULL;
    return rc;
}

/* the board */

/* Writes `value`, which it takes over, to the board, and reports the write to on_write. value NULL:
 * the text was not UTF-8. */
static int board_put_reply(const struct pipeline_options *o, const char *key, json_t *value,
                           const struct llm_call *c, int iteration, struct error *err) {
    if (!value) return error_set(err, ERR_FORMAT, "'%s' is not UTF-8", key);
    json_t *event = blackboard_write(o->board, key, value, NULL, err);
    json_decref(value);
    if (event && o->on_write) o->on_write(o->on_write_ctx, event, c, iteration);
    json_decref(event);
    return event ? OK : err->code;
}

static int board_put(const struct pipeline_options *o, const char *key, json_t *value,
                     struct error *err) {
    return board_put_reply(o, key, value, NULL, 0, err);
}

/* Adds a text to the slot of its agent. */
static int slot_put(const struct pipeline_state *t, int agent, const char *text,
                    struct error *err) {
    const struct embedder *e = t->o->embedder;
    float *v = e ? xcalloc((size_t)e->d, sizeof *v) : NULL;
    json_t *meta = json_pack("{s:s,s:i}", "role", t->agents[agent].role, "iteration",
                             t->n_utterances[agent]),
           *stored = NULL;
    int rc = e ? e->embed(e->ctx, &text, 1, v, err) : OK;
    const struct blackboard_slot_entry entry = {
        .slot = t->names[agent], .text = text, .embedding = v, .d = e ? e->d : 0, .metadata = meta};
    if (rc == OK && !(stored = blackboard_slot_add(t->o->board, &entry, err))) rc = err->code;
    json_decref(stored);
    json_decref(meta);
    free(v);
    return rc;
}

static int utterance_put(struct pipeline_state *t, const struct llm_call *c, struct error *err) {
    char key[BOARD_KEY_LEN] = BOARD_FINAL_RESPONSE;
    int agent = (int)(c->agent - t->agents);
    enum pipeline_stage s = pipeline_stage_of_role(c->agent->role);
    if (s == PIPELINE_SUMMARY) blackboard_summary_key(t->n_utterances[agent], key);
    if (s == PIPELINE_INTERNAL) blackboard_agent_key(agent, key);
    t->n_utterances[agent]++;
    const char *text = c->failed || !c->text ? "" : c->text;
    int rc = board_put_reply(t->o, key, json_string(text), c, t->n_utterances[agent], err);
    return rc == OK && *text ? slot_put(t, agent, text, err) : rc;
}

/* `ask` of the workflow's llm_client. It runs the calls and then writes each reply to the board. */
static int pipeline_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    struct pipeline_state *t = ctx;
    if (t->o->progress)
        t->o->progress(t->o->progress_ctx, calls[0].agent->role,
                       t->n_utterances[calls[0].agent - t->agents] + 1, n);
    int rc = calls_run_sampled(t, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) rc = utterance_put(t, &calls[i], err);
    return rc;
}

/* the team */

static void agent_add(struct pipeline_state *t, const char *role, const char *name,
                      const char *system, float temperature) {
    const struct pipeline_stage_options *s = &t->o->stage[pipeline_stage_of_role(role)];
    int i = t->n_agents++;
    t->names[i] = xstrdup(name);
    t->system[i] = system ? xasprintf("%s\n%s", name, system) : NULL;
    t->agents[i] = (struct agent){.name = t->names[i],
                                  .system = t->system[i],
                                  .role = role,
                                  .temperature = s->temperature > 0 ? s->temperature : temperature,
                                  .max_tokens = s->max_tokens};
}

/* Adds one agent for each role of the workflow. For the role "agent" it adds o->agents agents,
 * whose names and prompts depend on the type of the question (agent_role_get). */
static int team_build(struct pipeline_state *t, struct error *err) {
    const struct pipeline_options *o = t->o;
    int n_roles = workflow_n_roles(o->workflow);
    bool has_output = false;
    for (int r = 0; r < n_roles; r++) {
        const char *role = workflow_role(o->workflow, r);
        bool is_agent_role = strcmp(role, "agent") == 0;
        has_output |= pipeline_stage_of_role(role) == PIPELINE_OUTPUT;
        if (t->n_agents + (is_agent_role ? o->agents : 1) > TEAM_MAX)
            return error_set(
                err, ERR_USAGE,
                "workflow '%s' with %d agents needs a team larger than the limit of %d",
                workflow_name(o->workflow), o->agents, TEAM_MAX);
        for (int i = 0; is_agent_role && i < o->agents; i++) {
            struct agent_role assigned_role = agent_role_get(t->type, t->lang, i);
            char *name = xasprintf("%d %s", i + 1, assigned_role.name);
            agent_add(t, role, name, assigned_role.description, assigned_role.temperature);
            if (o->adapters) t->agents[t->n_agents - 1].adapter = o->adapters[i];
            free(name);
        }
        if (!is_agent_role) agent_add(t, role, role, NULL, 0);
    }
    if (n_roles && o->selector.n_samples && !has_output)
        return error_set(err, ERR_USAGE,
                         "workflow '%s' has no role 'output', whose answer a check selects",
                         workflow_name(o->workflow));
    return n_roles ? OK
                   : error_set(err, ERR_USAGE, "workflow '%s' has no roles",
                               workflow_name(o->workflow));
}

/* Sets the type that the summary model finds most probable. If its call fails (the question does
 * not fit in its context), the type found by keywords remains. */
static int question_type_by_model(struct pipeline_state *t, struct error *err) {
    static const char *const prompts[N_LANGUAGES] = {
        [LANG_EN] = "What kind of question is this: discussion, planning, informational, "
                    "conversational, or default for none of these?",
        [LANG_JA] = "これはどの種類の質問ですか。discussion（議論）、planning（計画）、"
                    "informational（知識）、conversational（会話）、どれでもなければdefault。",
        [LANG_ZH] = "这是哪一类问题？discussion（讨论）、planning（计划）、informational（知识）、"
                    "conversational（闲聊），都不是则为default。"};
    struct task_item kinds = {.n_choices = N_QUESTION_TYPES, .correct = -1};
    struct llm_call c = {.item = &kinds, .reply = REPLY_ANSWER};
    for (int i = 0; i < N_QUESTION_TYPES; i++)
        kinds.choices[i] = (char *)(uintptr_t)question_type_names[i];
    int rc = summary_model_ask(t->o, prompts[t->lang], t->question, &c, err);
    if (rc == OK && !c.failed && c.answer.choice >= 0)
        t->type = (enum question_type)c.answer.choice;
    llm_call_release(&c);
    return rc;
}

/* inputs of the team */

/* Appends snippets of the knowledge base for the question. Each halving halves their length. */
static int references_find(const struct pipeline_state *t, struct buf *out, struct error *err) {
    buf_puts(out, "");
    if (!t->o->knowledge || t->n_halvings == MAX_HALVINGS) return OK;
    const struct knowledge_query q = {.text = t->question, .embedder = t->o->embedder};
    json_t *hits = knowledge_search(t->o->knowledge, &q, err);
    if (!hits) return err->code;
    knowledge_snippets(hits, KNOWLEDGE_SNIPPET_CHARS >> t->n_halvings, out);
    json_decref(hits);
    return OK;
}

static bool is_longer(const char *text, int chars) {
    size_t len = strlen(text);
    return utf8_prefix_len(text, len, (size_t)chars) < len;
}

/* Summarizes a question with its references in one or two sentences. Appends nothing if both are
 * short, if summaries are off, or if the summary model returns no usable text. */
static int question_summarize(const struct pipeline_state *t, const char *references,
                              struct buf *out, struct error *err) {
    static const char *const prompts[N_LANGUAGES] = {
        [LANG_EN] = "Say in one or two sentences what is asked, and what of the reference bears on "
                    "it. Do not answer.",
        [LANG_JA] = "何が問われているか、参考のうち何が関係するかを、一、二文で述べてください。"
                    "答えは書かないでください。",
        [LANG_ZH] = "请用一两句话说明问题是什么，以及参考中哪些内容与之有关。不要回答问题。"};
    const struct pipeline_options *o = t->o;
    buf_puts(out, "");
    if (!o->summary ||
        !(is_longer(t->question, LONG_QUESTION) || is_longer(references, LONG_REFERENCE)))
        return OK;
    if (o->progress) o->progress(o->progress_ctx, "gist", 1, 1);
    char *user = xasprintf("%s\n\n%s", t->question, references);
    struct llm_call c = {.max_tokens = o->max_tokens ? o->max_tokens : SUMMARY_TOKENS};
    struct buf clean = {0};
    int rc = summary_model_ask(o, prompts[t->lang], user, &c, err);
    if (rc == OK && !c.failed && answer_clean(c.text, c.truncated, &clean))
        buf_add(out, clean.data, utf8_prefix_len(clean.data, clean.len, QUESTION_SUMMARY_CHARS));
    buf_puts(out, "");
    llm_call_release(&c);
    buf_release(&clean);
    free(user);
    return rc;
}

/* Builds workflow_options.given: the conversation, the references, the summary of the question, the
 * type of the question, and whether summaries are on. Writes the first three to the board. */
static int given_build(const struct pipeline_state *t, json_t **out, struct error *err) {
    static const char *const keys[] = {BOARD_CONVERSATION, BOARD_RAG, BOARD_INITIAL_SUMMARY};
    struct buf text[3] = {{0}};
    const struct pipeline_options *o = t->o;
    buf_puts(&text[0], "");
    if (o->memory && t->n_halvings < MAX_HALVINGS)
        conversation_context(o->memory, t->lang, CONTEXT_CHARS >> t->n_halvings, &text[0]);
    int rc = references_find(t, &text[1], err);
    if (rc == OK) rc = question_summarize(t, text[1].data, &text[2], err);
    *out = json_pack("{s:b,s:s}", "summary", (int)o->summary, BOARD_QUESTION_TYPE,
                     question_type_names[t->type]);
    for (int i = 0; i < 3 && rc == OK; i++) {
        rc = board_put(o, keys[i], json_string(text[i].data), err);
        json_object_set_new(*out, keys[i], json_string(text[i].data));
    }
    for (int i = 0; i < 3; i++) buf_release(&text[i]);
    return rc;
}

/* the answer */

/* Whether the cleaned text of an utterance, which it sets in *out, can be an answer. */
static bool is_usable(const struct pipeline_options *o, const struct utterance *u,
                      struct buf *out) {
    out->len = 0;
    return !u->failed && answer_clean(u->text, u->truncated, out) &&
           (!o->compat || is_longer(out->data, MIN_ANSWER_CHARS - 1));
}

/* Selects the answer: the text of the final utterance if it is usable, else the last usable
 * utterance (not with --compat legacy), else a fallback text. */
static void answer_select(const struct pipeline_state *t, struct pipeline_answer *a) {
    const struct transcript *transcript = &a->transcript;
    struct buf text = {0};
    a->source = ANSWER_FALLBACK;
    if (transcript->final_utterance >= 0 &&
        is_usable(t->o, &transcript->v[transcript->final_utterance], &text))
        a->source = ANSWER_FROM_OUTPUT;
    for (int i = transcript->n - 1; !t->o->compat && a->source == ANSWER_FALLBACK && i >= 0; i--)
        if (is_usable(t->o, &transcript->v[i], &text)) a->source = ANSWER_FROM_AGENT;
    if (a->source == ANSWER_FALLBACK) text.len = 0, buf_puts(&text, answer_fallback(t->lang));
    for (int i = 0; a->source != ANSWER_FROM_OUTPUT && i < transcript->n; i++)
        if (transcript->v[i].failed) a->failure_reason = transcript->v[i].failed;
    a->text = text.data;
}

static bool given_has_text(const json_t *given, const char *key) {
    return *json_string_value(json_object_get(given, key)) != 0;
}

/* Whether at least one agent of the internal stage replied and there is a final utterance. */
static bool transcript_is_complete(const struct pipeline_state *t,
                                   const struct transcript *transcript) {
    bool has_internal_reply = false;
    for (int i = 0; i < transcript->n; i++)
        has_internal_reply =
            has_internal_reply ||
            (!transcript->v[i].failed &&
             pipeline_stage_of_role(t->agents[transcript->v[i].agent].role) == PIPELINE_INTERNAL);
    return has_internal_reply && transcript->final_utterance >= 0;
}

/* Runs the team once. *retry: the transcript is not complete, and a prompt with a shorter context
 * may fit. */
static int team_attempt(struct pipeline_state *t, const struct task_item *item,
                        struct pipeline_answer *a, bool *retry, struct error *err) {
    const struct pipeline_options *o = t->o;
    const struct llm_client client = {t, pipeline_ask};
    json_t *given = NULL;
    int rc = given_build(t, &given, err);
    const struct workflow_options wo = {.rounds = o->iterations,
                                        .temperature = o->temperature,
                                        .max_tokens = o->max_tokens,
                                        .seed = o->seed,
                                        .seconds = o->seconds,
                                        .given = given};
    transcript_release(&a->transcript);
    memset(t->n_utterances, 0, sizeof t->n_utterances);
    if (rc == OK)
        rc = workflow_run(o->workflow, &client, t->agents, t->n_agents, item, 1, &wo,
                          &a->transcript, NULL, err);
    *retry = rc == OK && !transcript_is_complete(t, &a->transcript) &&
             a->transcript.stop_reason != WORKFLOW_STOP_BUDGET &&
             (given_has_text(given, BOARD_CONVERSATION) || given_has_text(given, BOARD_RAG));
    json_decref(given);
    return rc;
}

/* Answers with a team, in up to MAX_HALVINGS + 1 attempts. */
static int team_answer(struct pipeline_state *t, struct pipeline_answer *a, struct error *err) {
    const struct pipeline_options *o = t->o;
    char *question = xstrdup(t->question);
    const struct task_item item = {
        .question = question, .lang = language_names[t->lang], .correct = -1};
    bool retry = true;
    int rc = o->type == QUESTION_TYPE_BY_MODEL ? question_type_by_model(t, err) : OK;
    if (rc == OK)
        rc = board_put(o, BOARD_QUESTION_TYPE, json_string(question_type_names[t->type]), err);
    if (rc == OK) rc = team_build(t, err);
    for (t->n_halvings = 0; rc == OK && retry && t->n_halvings <= MAX_HALVINGS; t->n_halvings++)
        rc = team_attempt(t, &item, a, &retry, err);
    if (rc == OK) answer_select(t, a);
    free(question);
    return rc;
}

/* Sets the answer if the conversation memory can answer the question; no team runs then. */
static bool answer_from_memory(const struct pipeline_state *t, struct pipeline_answer *a) {
    struct buf known = {0};
    if (!t->o->memory || !conversation_answer_from_facts(t->o->memory, t->question, &known))
        return false;
    a->text = known.data;
    a->source = ANSWER_FROM_MEMORY;
    return true;
}

int pipeline_run(const struct pipeline_options *o, const char *question,
                 struct pipeline_answer *out, struct error *err) {
    *out = (struct pipeline_answer){.source = ANSWER_FALLBACK};
    struct pipeline_state t = {
        .o = o, .question = question, .names = out->names, .sampled = &out->sampled};
    t.lang = o->language < 0 ? language_detect(question) : (enum language)o->language;
    t.type = o->type < 0 ? question_classify(question, o->compat) : (enum question_type)o->type;
    int rc = blackboard_clear_current_turn(o->board, err);
    if (rc == OK) rc = board_put(o, BOARD_INPUT, json_string(question), err);
    if (rc == OK && o->memory) rc = conversation_refresh(o->memory, err);
    if (rc == OK && !answer_from_memory(&t, out)) rc = team_answer(&t, out, err);
    if (rc == OK) rc = board_put(o, BOARD_FINAL_RESPONSE, json_string(out->text), err);
    if (rc == OK && o->memory)
        rc = pipeline_update_memory(o, question, out->text, &out->exchange, err);
    for (int i = 0; i < t.n_agents; i++) free(t.system[i]);
    return rc;
}

void pipeline_answer_release(struct pipeline_answer *a) {
    transcript_release(&a->transcript);
    for (int i = 0; i < TEAM_MAX; i++) free(a->names[i]);
    free(a->text);
    *a = (struct pipeline_answer){0};
}

/* conversation memory */

/* Summarizes the exchanges that the memory drops, with the previous summary. If the model gives no
 * usable text, appends the previous summary. */
static int exchanges_summarize(void *ctx, const char *previous, const char *exchanges,
                               struct buf *out, struct error *err) {
    static const char *const prompts[N_LANGUAGES] = {
        [LANG_EN] = "Sum up the conversation in a few sentences. Keep names, wishes and facts.",
        [LANG_JA] = "会話を数文に要約してください。名前、希望、事実は残してください。",
        [LANG_ZH] = "请用几句话概括这段对话，保留名字、愿望和事实。"};
    const struct pipeline_options *o = ctx;
    char *user = xasprintf("%s%s%s", previous, *previous ? "\n" : "", exchanges);
    struct llm_call c = {.max_tokens = o->max_tokens ? o->max_tokens : SUMMARY_TOKENS};
    int rc = summary_model_ask(o, prompts[language_detect(exchanges)], user, &c, err);
    if (rc == OK && (c.failed || !answer_clean(c.text, c.truncated, out))) buf_puts(out, previous);
    llm_call_release(&c);
    free(user);
    return rc;
}

/* The facts that the summary model extracts as JSON, without facts that the user did not state.
 * NULL: no facts, or an error in err. */
static json_t *facts_from_model(const struct pipeline_options *o, const char *statements,
                                struct error *err) {
    static const char *const prompts[N_LANGUAGES] = {
        [LANG_EN] = "List what the user says of himself or herself, in the user's own words, as "
                    "JSON. Leave empty what is not said.",
        [LANG_JA] = "ユーザーが自分について述べたことを、本人の言葉のままJSONに書き出してください。"
                    "述べていないことは空にしてください。",
        [LANG_ZH] = "请用用户的原话，把用户关于自己说的内容列成JSON。没有说的请留空。"};
    enum language l = language_detect(statements);
    char *schema = conversation_facts_schema(l);
    struct grammar *g = grammar_new_json_schema(schema, strlen(schema), true, err);
    struct llm_call c = {.max_tokens = FACT_TOKENS, .grammar = g};
    json_t *claimed = NULL, *facts = NULL;
    if (g && summary_model_ask(o, prompts[l], statements, &c, err) == OK && !c.failed && c.text)
        claimed = json_loads(c.text, 0, NULL); /* NULL if the token limit cut the reply */
    if (json_is_object(claimed)) facts = facts_filter_grounded(claimed, statements);
    json_decref(claimed);
    llm_call_release(&c);
    grammar_free(g);
    free(schema);
    return facts;
}

static int facts_update(const struct pipeline_options *o, const char *question, struct error *err) {
    struct buf statements = {0};
    json_t *rule_facts = facts_extract(question), *model_facts = NULL;
    statements_extract(question, &statements);
    err->code = OK;
    if (o->facts == FACTS_MODEL && statements.len)
        model_facts = facts_from_model(o, statements.data, err);
    int rc = model_facts ? OK : err->code;
    if (rc == OK && model_facts) rc = conversation_merge_facts(o->memory, model_facts, err);
    if (rc == OK)
        rc = conversation_merge_facts(o->memory, rule_facts, err); /* rules take precedence */
    json_decref(rule_facts);
    json_decref(model_facts);
    buf_release(&statements);
    return rc;
}

int pipeline_update_memory(const struct pipeline_options *o, const char *question,
                           const char *answer, int64_t *number, struct error *err) {
    const struct summarizer s = {(void *)(uintptr_t)o, exchanges_summarize};
    int rc = conversation_add(o->memory, question, answer, &s, err);
    if (rc == OK && number)
        *number = json_integer_value(json_object_get(conversation_state(o->memory), "last"));
    if (rc == OK && o->facts != FACTS_NONE) rc = facts_update(o, question, err);
    const json_t *state = conversation_state(o->memory);
    return rc == OK
               ? board_put(o, BOARD_KEY_FACTS, json_deep_copy(json_object_get(state, "facts")), err)
               : rc;
}
