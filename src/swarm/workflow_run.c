/*
 * workflow_run: executor of workflows. Every item has a track, which is its position in the graph
 * with its utterances. Each step runs, in one batch, all calls of all tracks whose inputs are
 * ready.
 *
 * The variables of a template are computed for every call from the track's utterances. So a call
 * depends on its inputs only, and the same call in another team has the same key in the store.
 * Invariants: an utterance is never changed; a step starts only if the budget covers it.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include "grade/grade.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct workflow_track {
    const struct task_item *item;
    struct transcript *transcript; /* the caller's transcript of the item */
    int index;                     /* index of the item; part of the seeds of its random orders */
    int only;                      /* the one agent that speaks; -1: all do */
    int node;                      /* current node; -1: the item has ended */
    int n_spoken;             /* in-turn nodes: number of agents that have replied in this step */
    int waiting;              /* number of agents that have not replied in this step */
    int step_begin;           /* index of the first utterance of this step */
    int reported_utterances;  /* utterances already passed to `on_step` */
    int round, capacity;      /* current round, from 0; capacity of transcript->v */
    int calls;                /* calls so far; a step without speakers counts as one */
    int64_t generated;        /* generated tokens so far */
    struct boid_flock *flock; /* from the first node with `flock` on */
    int64_t n_embedded;       /* tokens of the embeddings of this step */
};
struct workflow_execution {
    const struct workflow *w;
    const struct agent *team;
    int n_agents;
    const struct workflow_options *options;
    int rounds;
    const struct vote *vote;
    const struct grader *exact_grader; /* compares free answers if the options have no grader */
    double (*clock)(void);
    double deadline; /* a time of `clock`; INFINITY: no deadline */
    bool deadline_passed;
    struct workflow_track *tracks;
    int n_tracks;
};
/* A call in preparation, with its track and agent. `messages` borrows from `texts`. */
struct pending_call {
    struct workflow_track *track;
    int agent;
    struct chat_message messages[NODE_MESSAGES_MAX];
    struct jinja_output texts[NODE_MESSAGES_MAX];
    struct weighted_adapter *mix; /* at a node with `flock` */
};

static const char *role_name(const struct workflow_execution *r, int agent) {
    const char *role = r->team[agent].role;
    return role ? role : workflow_role(r->w, agent);
}

/* variables of templates */

/* The last `tail` characters of a text, after "[...]" if the text is longer; tail 0: all of it. */
static json_t *tail_json(const char *text, int tail) {
    size_t len = strlen(text), begin = len;
    for (int n_left = tail; tail && begin > 0 && n_left > 0; n_left--) {
        begin--;
        while (begin > 0 && ((unsigned char)text[begin] & 0xc0) == 0x80) begin--;
    }
    if (!tail || begin == 0) return json_string(text);
    return json_sprintf("[...]\n%s", text + begin);
}

static const char *answer_text(const struct transcript *o, const struct utterance *u) {
    return u->answer < 0 ? "" : o->candidates[u->answer];
}

/* The latest utterance of `agent` before index `end` that did not fail and, if `answered`, has an
 * answer. NULL: no such utterance. */
static const struct utterance *latest_utterance(const struct workflow_track *t, int agent, int end,
                                                bool answered) {
    for (int i = end - 1; i >= 0; i--) {
        const struct utterance *u = &t->transcript->v[i];
        if (u->agent == agent && !u->failed && (!answered || u->answer >= 0)) return u;
    }
    return NULL;
}

static json_t *utterance_vars(const struct workflow_track *t, const struct utterance *u, int number,
                              int tail) {
    return json_pack("{s:i,s:o,s:s,s:o}", "number", number, "text", tail_json(u->text, tail),
                     "answer", answer_text(t->transcript, u), "confidence",
                     u->has_probability ? json_real((double)u->confidence) : json_null());
}

/* The latest utterances of the other agents, in an order seeded by item and round. A number is the
 * place in this order, so it does not identify an agent; the name does. */
static json_t *others_json(const struct workflow_execution *r, const struct workflow_track *t,
                           int me, int end, int tail) {
    uint32_t order[TEAM_MAX];
    int n = 0;
    for (int a = 0; a < r->n_agents; a++)
        if (a != me) order[n++] = (uint32_t)a;
    struct rng rng =
        rng_make(r->options->seed, RNG_SHUFFLE, (uint32_t)t->index, (uint32_t)t->round);
    rng_shuffle(&rng, order, (size_t)n);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        const int agent = (int)order[i];
        const struct utterance *u = latest_utterance(t, agent, end, false);
        if (!u) continue;
        json_t *v = utterance_vars(t, u, (int)json_array_size(list) + 1, tail);
        json_object_set_new(v, "name", json_string(r->team[agent].name));
        json_object_set_new(v, "role", json_string(role_name(r, agent)));
        json_array_append_new(list, v);
    }
    return list;
}

static json_t *transcript_json(const struct workflow_execution *r, const struct workflow_track *t,
                               int end, int tail) {
    json_t *list = json_array();
    for (int i = 0; i < end; i++) {
        const struct utterance *u = &t->transcript->v[i];
        if (u->failed) continue;
        json_array_append_new(
            list, json_pack("{s:s,s:s,s:i,s:i,s:s,s:o,s:s}", "name", r->team[u->agent].name, "role",
                            role_name(r, u->agent), "number", u->agent, "round", u->round, "node",
                            r->w->nodes[u->node].name, "text", tail_json(u->text, tail), "answer",
                            answer_text(t->transcript, u)));
    }
    return list;
}

static json_t *texts_json(char *const *v, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_string(v[i]));
    return list;
}

/* The number of agents that may speak about a track's item. */
static int track_agents(const struct workflow_execution *r, const struct workflow_track *t) {
    return t->only < 0 ? r->n_agents : 1;
}

/* Whether all agents that have an answer have the same answer. One answer alone is a consensus only
 * in a team of one agent. */
static bool has_consensus(const struct workflow_execution *r, const struct workflow_track *t) {
    int answer = -1, n_answers = 0;
    for (int a = 0; a < r->n_agents; a++) {
        const struct utterance *u = latest_utterance(t, a, t->transcript->n, true);
        if (!u) continue;
        if (answer >= 0 && u->answer != answer) return false;
        answer = u->answer;
        n_answers++;
    }
    return n_answers > 1 || (n_answers == 1 && track_agents(r, t) == 1);
}

/* The variable `words`: the English texts, replaced where the item's language has a text. */
static json_t *translations_json(const struct workflow *w, const char *lang) {
    json_t *words = json_object();
    json_object_update(words, json_object_get(w->translations, "en"));
    json_object_update(words, json_object_get(w->translations, lang ? lang : "en"));
    return words;
}

/* Variables of an item, with the question as agent `me` sees it; me -1: the whole question. */
static json_t *track_vars(const struct workflow_execution *r, const struct workflow_track *t,
                          int me) {
    const char *lang = t->item->lang ? t->item->lang : "en";
    json_t *given = (json_t *)(uintptr_t)r->options->given;
    return json_pack("{s:s,s:o,s:s,s:o,s:i,s:i,s:i,s:b,s:o,s:o}", "question",
                     task_item_question(t->item, me < 0 ? -1 : r->team[me].view), "choices",
                     texts_json(t->item->choices, t->item->n_choices), "lang", lang, "words",
                     translations_json(r->w, lang), "round", t->round + 1, "rounds", r->rounds,
                     "agents", track_agents(r, t), "agreed", (int)has_consensus(r, t), "candidates",
                     texts_json(t->transcript->candidates, t->transcript->n_candidates), "given",
                     given ? json_incref(given) : json_object());
}

/* Variables for agent `me`. In an in-turn node they include the utterances of the current step. */
static json_t *agent_vars(const struct workflow_execution *r, const struct workflow_track *t,
                          int me) {
    const struct workflow_node *n = &r->w->nodes[t->node];
    const struct agent *a = &r->team[me];
    int end = n->in_turn ? t->transcript->n : t->step_begin;
    const struct utterance *own = latest_utterance(t, me, end, false);
    json_t *vars = track_vars(r, t, me);
    json_object_set_new(vars, "me",
                        json_pack("{s:s,s:s,s:s,s:i}", "name", a->name, "role", role_name(r, me),
                                  "system", a->system ? a->system : "", "number", me));
    json_object_set_new(vars, "own", own ? utterance_vars(t, own, 0, n->tail_chars) : json_null());
    json_object_set_new(vars, "others", others_json(r, t, me, end, n->tail_chars));
    json_object_set_new(vars, "transcript", transcript_json(r, t, end, n->tail_chars));
    return vars;
}

/* flocks */

/* The node's rules with the caller's coefficients. */
static struct flock_rules rules_of(const struct workflow_execution *r,
                                   const struct workflow_node *n) {
    struct flock_rules v = n->flock;
    const struct flock_rules *o = r->options->flock;
    if (o && o->separation >= 0) v.separation = o->separation;
    if (o && o->alignment >= 0) v.alignment = o->alignment;
    if (o && o->cohesion >= 0) v.cohesion = o->cohesion;
    return v;
}

/* Sets distinct[n] to the agents' different last answers, and of[a] to the place of agent a's
 * answer in it, or -1. Returns their number. */
static int distinct_answers(const struct workflow_execution *r, const struct workflow_track *t,
                            const char *distinct[TEAM_MAX], int of[TEAM_MAX]) {
    int n = 0, answer[TEAM_MAX];
    for (int a = 0; a < r->n_agents; a++) {
        const struct utterance *u = latest_utterance(t, a, t->step_begin, true);
        of[a] = -1;
        if (!u) continue;
        for (of[a] = 0; of[a] < n && answer[of[a]] != u->answer;) of[a]++;
        if (of[a] < n) continue;
        answer[n] = u->answer;
        distinct[n++] = answer_text(t->transcript, u);
    }
    return n;
}

/* The step of an item's flock. Different answers are embedded once; equal ones need no embedding,
 * because only distances count. */
static int track_flock_step(const struct workflow_execution *r, struct workflow_track *t,
                            const struct llm_client *client, struct error *err) {
    static const float origin;
    const struct flock_rules rules = rules_of(r, &r->w->nodes[t->node]);
    const char *distinct[TEAM_MAX];
    const float *answers[TEAM_MAX] = {NULL};
    int of[TEAM_MAX], n = distinct_answers(r, t, distinct, of), rc = OK;
    int32_t d = 1;
    float *v = NULL;
    if (!t->flock) {
        t->flock = xcalloc(1, sizeof *t->flock);
        flock_init(t->flock, r->n_agents);
    }
    if (n > 1) rc = client->embed(client->ctx, distinct, n, &v, &d, &t->n_embedded, err);
    if (rc != OK) return error_wrap(err, "workflow '%s', embeddings of the answers", r->w->name);
    for (int a = 0; a < r->n_agents; a++)
        if (of[a] >= 0) answers[a] = v ? v + (size_t)of[a] * (size_t)d : &origin;
    flock_step(t->flock, &rules, answers, d);
    free(v);
    return OK;
}

/* Sets the adapters of a call by the weights of agent `me`, malloc'ed. An agent without an adapter
 * adds nothing: its weight is that of the base model. */
static void call_mix(const struct workflow_execution *r, const struct workflow_track *t, int me,
                     struct pending_call *a, struct llm_call *c) {
    int room = 1, n = 0;
    for (int k = 0; k < r->n_agents; k++) room += MAX(r->team[k].n_mix, 1);
    a->mix = xcalloc((size_t)room, sizeof *a->mix);
    for (int k = 0; k < r->n_agents; k++) {
        const struct agent *of = &r->team[k];
        const float w = (float)t->flock->weights[me][k];
        if (w > 0 && of->adapter)
            a->mix[n++] = (struct weighted_adapter){.adapter = of->adapter, .weight = w};
        for (int i = 0; w > 0 && !of->adapter && i < of->n_mix; i++) {
            a->mix[n] = of->mix[i];
            a->mix[n++].weight *= w;
        }
    }
    c->mix = a->mix;
    c->n_mix = n;
}

/* calls */

static bool agent_speaks(const struct workflow_execution *r, const struct workflow_node *n,
                         int agent) {
    if (n->role_mask == ~0u) return true;
    int role = workflow_role_find(r->w, role_name(r, agent));
    return role >= 0 && n->role_mask >> role & 1;
}

static int messages_render(const struct workflow_execution *r, struct pending_call *a,
                           struct llm_call *c, struct error *err) {
    const struct workflow_node *n = &r->w->nodes[a->track->node];
    json_t *vars = agent_vars(r, a->track, a->agent);
    int rc = OK;
    for (int i = 0; rc == OK && i < n->n_messages; i++) {
        struct jinja_output *text = &a->texts[i];
        rc = jinja_render(n->message[i], &(struct jinja_input){.vars = vars, .now = -1}, text, err);
        if (rc) error_wrap(err, "workflow '%s', node '%s', template", r->w->name, n->name);
        if (rc == OK && text->n > 0)
            a->messages[c->n_messages++] = (struct chat_message){n->message_role[i], text->text};
    }
    c->messages = a->messages;
    json_decref(vars);
    return rc;
}

/* The seed depends on the run's seed, the item, the agent's name and the number of the agent's
 * earlier utterances. So an agent has the same random numbers in every team and in any graph
 * (common random numbers). A seed has 53 bits: a double represents it exactly. */
static uint64_t call_seed(const struct workflow_execution *r, const struct workflow_track *t,
                          int agent) {
    const char *name = r->team[agent].name;
    uint32_t spoken = 0;
    for (int i = 0; i < t->transcript->n; i++) spoken += t->transcript->v[i].agent == agent;
    struct rng rng = rng_make(r->options->seed ^ hash_fnv1a(name, strlen(name)), RNG_SAMPLE,
                              (uint32_t)t->index, spoken);
    return rng_u64(&rng) >> 11;
}

static int call_init(const struct workflow_execution *r, struct pending_call *a, struct llm_call *c,
                     struct error *err) {
    const struct workflow_track *t = a->track;
    const struct workflow_node *n = &r->w->nodes[t->node];
    const struct workflow_options *o = r->options;
    int64_t token_share =
        (r->w->max_generated_tokens - t->generated) / t->waiting; // an equal share
    *c = (struct llm_call){.agent = &r->team[a->agent],
                           .item = t->item,
                           .reply = n->reply,
                           .chain_of_thought = o->chain_of_thought,
                           .candidates = (const char *const *)t->transcript->candidates,
                           .n_candidates = t->transcript->n_candidates,
                           .temperature = o->temperature < 0 ? n->temperature : o->temperature,
                           .top_p = n->top_p,
                           .max_tokens = o->max_tokens ? o->max_tokens : n->max_tokens};
    if (r->team[a->agent].temperature > 0 && o->temperature < 0)
        c->temperature = r->team[a->agent].temperature;
    if (r->team[a->agent].max_tokens > 0 && !o->max_tokens)
        c->max_tokens = r->team[a->agent].max_tokens;
    if (c->temperature > 0) c->seed = call_seed(r, t, a->agent);
    c->max_tokens = (int32_t)MIN((int64_t)c->max_tokens, token_share);
    if (n->has_flock) call_mix(r, t, a->agent, a, c);
    return messages_render(r, a, c, err);
}

/* Selects the agents that reply next in a track's step. Returns their number. 0: no agent has the
 * role, or the budget does not cover the step; in the second case the track ends (node -1). */
static int speakers_select(const struct workflow_execution *r, struct workflow_track *t,
                           int out[TEAM_MAX]) {
    const struct workflow_node *n = &r->w->nodes[t->node];
    int n_speakers = 0;
    for (int a = 0; a < r->n_agents; a++)
        if ((t->only < 0 || t->only == a) && agent_speaks(r, n, a)) out[n_speakers++] = a;
    t->waiting = n_speakers - t->n_spoken;
    if (r->deadline_passed || t->calls + t->waiting > r->w->max_calls ||
        t->generated + MAX(t->waiting, 1) > r->w->max_generated_tokens) {
        t->transcript->stop_reason = WORKFLOW_STOP_BUDGET;
        t->node = -1;
        return 0;
    }
    if (!n->in_turn || n_speakers == 0) return n_speakers;
    out[0] = out[t->n_spoken];
    return 1;
}

/* replies */

/* Sets the answer of an utterance, which is the index of a candidate, and its probability. A new
 * free answer becomes a candidate. */
static void utterance_set_answer(const struct workflow_execution *r, struct workflow_track *t,
                                 const struct llm_call *c, struct utterance *u) {
    const struct grader *grader = r->options->grader, *same_grader = c->reply == REPLY_LEGACY ? NULL
                                                                     : grader ? grader
                                                                              : r->exact_grader;
    char *text = NULL;
    u->answer = -1;
    u->confidence = 1;
    if (c->failed || c->reply == REPLY_TEXT) return;
    if (c->reply == REPLY_JUDGE || (c->reply == REPLY_ANSWER && t->item->n_choices)) {
        u->answer = c->answer.choice;
        CHECK(u->answer < t->transcript->n_candidates);
        memcpy(u->prob, c->answer.prob, sizeof u->prob);
        if (u->answer >= 0)
            u->confidence =
                u->answer < EVAL_MAX_CHOICES ? u->prob[u->answer] : c->answer.confidence;
        u->has_probability = u->answer >= 0;
        return;
    }
    if (c->reply == REPLY_LEGACY)
        text = legacy_vote_parse(u->text, &u->confidence);
    else
        text = answer_parse(grader, c, u->text, &u->confidence);
    if (text && *text)
        u->answer = answer_candidate_find(&t->transcript->candidates, &t->transcript->n_candidates,
                                          text, same_grader, t->item->n_choices == 0);
    if (u->answer >= 0 && u->answer < EVAL_MAX_CHOICES) u->prob[u->answer] = u->confidence;
    u->has_probability = u->answer >= 0 && c->reply == REPLY_ANSWER && c->n_tokens > 0;
    free(text);
}

static void utterance_add(const struct workflow_execution *r, struct workflow_track *t, int agent,
                          struct llm_call *c) {
    struct transcript *o = t->transcript;
    if (o->n == t->capacity) {
        t->capacity = t->capacity ? 2 * t->capacity : 8;
        o->v = xrealloc(o->v, (size_t)t->capacity * sizeof *o->v);
    }
    struct utterance *u = &o->v[o->n++];
    *u = (struct utterance){.node = t->node,
                            .agent = agent,
                            .round = t->round,
                            .text = c->text ? c->text : xstrdup(""),
                            .weight = r->team[agent].weight,
                            .n_prefilled = c->n_prefilled,
                            .n_generated = c->n_generated,
                            .truncated = c->truncated,
                            .failed = c->failed};
    c->text = NULL;
    utterance_set_answer(r, t, c, u);
    o->rounds = t->round + 1;
    t->calls++;
    t->generated += c->n_generated;
}

/* transitions */

static int edge_condition_holds(const struct workflow_execution *r, const struct workflow_track *t,
                                const struct workflow_edge *e, bool *out, struct error *err) {
    struct jinja_output text = {0};
    *out = true;
    if (!e->condition) return OK;
    json_t *vars = track_vars(r, t, -1);
    int rc = jinja_render(e->condition, &(struct jinja_input){.vars = vars, .now = -1}, &text, err);
    if (rc) error_wrap(err, "workflow '%s', condition of an edge", r->w->name);
    *out = rc == OK && text.n > 0;
    jinja_output_release(&text);
    json_decref(vars);
    return rc;
}

/* Ends a step: moves the track to the next node, or ends the track. */
static int track_advance(const struct workflow_execution *r, struct workflow_track *t,
                         struct error *err) {
    int from = t->node;
    t->node = -1;
    for (int i = 0; i < r->w->n_edges && t->node < 0; i++) {
        const struct workflow_edge *e = &r->w->edges[i];
        bool holds = false;
        if (e->from != from) continue;
        int rc = edge_condition_holds(r, t, e, &holds, err);
        if (rc) return rc;
        if (holds) t->node = e->to;
    }
    if (t->node < 0) {
        t->transcript->stop_reason =
            has_consensus(r, t) ? WORKFLOW_STOP_CONSENSUS : WORKFLOW_STOP_ROUNDS;
        return OK;
    }
    t->n_spoken = 0;
    t->step_begin = t->transcript->n;
    t->round += !r->w->nodes[t->node].same_round;
    return OK;
}

/* Ends a turn. In an in-turn node the step ends with the turn of the last agent. */
static int track_end_turn(const struct workflow_execution *r, struct workflow_track *t,
                          struct error *err) {
    if (!r->w->nodes[t->node].in_turn || t->waiting == 1) return track_advance(r, t, err);
    t->n_spoken++;
    return OK;
}

/* decision */

/* Collects the ballots of a track: the last answer of each agent, or all answers
 * (vote_all_rounds). Answers of the judge's node do not count. Returns their number. */
static int ballots_collect(const struct workflow_execution *r, const struct workflow_track *t,
                           struct agent_answer *out) {
    int n = 0;
    for (int i = 0; i < t->transcript->n; i++) {
        const struct utterance *u = &t->transcript->v[i];
        bool counts = u->answer >= 0 && u->node != r->w->judge_node;
        for (int k = i + 1; counts && !r->w->vote_all_rounds && k < t->transcript->n; k++) {
            const struct utterance *later = &t->transcript->v[k];
            counts =
                later->agent != u->agent || later->answer < 0 || later->node == r->w->judge_node;
        }
        if (counts) out[n++] = utterance_answer(u);
    }
    return n;
}

/* Sets answer, scores, right and final_utterance of the transcript from its utterances. */
static void track_decide(const struct workflow_execution *r, struct workflow_track *t) {
    struct transcript *o = t->transcript;
    struct agent_answer *v = xcalloc((size_t)o->n + 1, sizeof *v);
    int n = ballots_collect(r, t, v);
    free(o->scores);
    free(o->right);
    o->answer = -1;
    o->scores = xcalloc((size_t)o->n_candidates + 1, sizeof *o->scores);
    o->right = answers_grade(t->item, r->options->grader, o->candidates, o->n_candidates);
    if (n > 0) {
        r->vote->score(v, n, o->n_candidates, o->scores);
        o->answer = vote_decide(r->vote, v, n, o->n_candidates);
    }
    for (int i = o->n - 1; r->w->judge_node >= 0 && i >= 0; i--)
        if (o->v[i].node == r->w->judge_node && o->v[i].answer >= 0) {
            o->answer = o->v[i].answer;
            break;
        }
    o->final_utterance = -1;
    for (int i = 0; i < o->n; i++)
        if (o->v[i].node == r->w->text_node && !o->v[i].failed) o->final_utterance = i;
    if (o->answer < 0 && o->final_utterance < 0 && o->stop_reason != WORKFLOW_STOP_BUDGET)
        o->stop_reason = WORKFLOW_STOP_NO_ANSWER;
    free(v);
}

static void track_report(const struct workflow_execution *r, struct workflow_track *t) {
    if (!r->options->on_step) return;
    track_decide(r, t);
    r->options->on_step(r->options->on_step_ctx, t->transcript, t->index, t->reported_utterances);
    t->reported_utterances = t->transcript->n;
}

/* Runs the calls of all tracks whose inputs are ready, as one batch. */
static int workflow_step(struct workflow_execution *r, const struct llm_client *client,
                         int *n_calls, struct error *err) {
    size_t max_calls = (size_t)r->n_tracks * (size_t)r->n_agents;
    struct pending_call *a = xcalloc(max_calls, sizeof *a);
    struct llm_call *calls = xcalloc(max_calls, sizeof *calls);
    int n = 0, rc = OK, speakers[TEAM_MAX];
    r->deadline_passed = r->clock() >= r->deadline;
    for (int i = 0; rc == OK && i < r->n_tracks; i++) {
        struct workflow_track *t = &r->tracks[i];
        int n_speakers = t->node < 0 ? 0 : speakers_select(r, t, speakers);
        if (t->node >= 0 && n_speakers == 0) { // no agent has the role
            t->calls++;                        // such a step counts as a call, so that cycles end
            rc = track_advance(r, t, err);
        } else if (n_speakers > 0 && t->n_spoken == 0 && r->w->nodes[t->node].has_flock) {
            rc = track_flock_step(r, t, client, err);
        }
        for (int k = 0; rc == OK && k < n_speakers; k++, n++) {
            a[n].track = t;
            a[n].agent = speakers[k];
            rc = call_init(r, &a[n], &calls[n], err);
        }
    }
    if (rc == OK && n > 0) rc = client->ask(client->ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        calls[i].n_prefilled += (int32_t)a[i].track->n_embedded;
        a[i].track->n_embedded = 0;
        utterance_add(r, a[i].track, a[i].agent, &calls[i]);
        if (i + 1 < n && a[i + 1].track == a[i].track) continue;
        track_report(r, a[i].track);
        rc = track_end_turn(r, a[i].track, err);
    }
    for (int i = 0; i < n + (rc != OK && (size_t)n < max_calls); i++) {
        for (int m = 0; m < NODE_MESSAGES_MAX; m++) jinja_output_release(&a[i].texts[m]);
        llm_call_release(&calls[i]);
        free(a[i].mix);
    }
    *n_calls = n;
    free(a);
    free(calls);
    return rc;
}

static void track_init(struct workflow_track *t, const struct task_item *it, struct transcript *o,
                       int index, int only) {
    *t = (struct workflow_track){.item = it, .transcript = o, .index = index, .only = only};
    o->candidates = xcalloc((size_t)it->n_choices + 1, sizeof *o->candidates);
    for (int c = 0; c < it->n_choices; c++)
        o->candidates[o->n_candidates++] = xstrdup(it->choices[c]);
}

/* Checks that a text is UTF-8, which the JSON variables of templates require. `what` names the text
 * in the message. */
static int text_check(const char *text, const char *what, struct error *err) {
    json_t *v = json_string(text ? text : "");
    if (!v) return error_set(err, ERR_FORMAT, "%s is not UTF-8", what);
    json_decref(v);
    return OK;
}

static int texts_check(const struct agent *team, int n_agents, const struct task_item *items,
                       int n_items, struct error *err) {
    int rc = OK;
    for (int a = 0; rc == OK && a < n_agents; a++) {
        rc = text_check(team[a].name, "an agent's name", err);
        if (rc == OK) rc = text_check(team[a].system, "an agent's system prompt", err);
    }
    for (int i = 0; rc == OK && i < n_items; i++) {
        rc = text_check(items[i].question, "a question", err);
        for (int v = 0; rc == OK && v < items[i].n_views; v++)
            rc = text_check(items[i].views[v], "a question", err);
        for (int c = 0; rc == OK && c < items[i].n_choices; c++)
            rc = text_check(items[i].choices[c], "a possible answer", err);
    }
    return rc;
}

int workflow_run(const struct workflow *w, const struct llm_client *client,
                 const struct agent *team, int n_agents, const struct task_item *items, int n_items,
                 const struct workflow_options *o, struct transcript *transcripts,
                 struct progress *p, struct error *err) {
    if (n_agents < 1 || n_agents > TEAM_MAX)
        return error_set(err, ERR_USAGE, "a team has 1 to %d agents, not %d", TEAM_MAX, n_agents);
    if (workflow_has_flock(w) && !client->embed)
        return error_set(
            err, ERR_USAGE,
            "workflow '%s' has a flock, for which there are no embeddings here; 'shoal "
            "debate', 'shoal eval --team' and the library have them",
            w->name);
    struct workflow_execution r = {.w = w,
                                   .team = team,
                                   .n_agents = n_agents,
                                   .options = o,
                                   .rounds = o->rounds ? o->rounds : w->rounds,
                                   .vote = o->vote ? o->vote : w->vote,
                                   .exact_grader = grader_find("exact", err),
                                   .clock = o->clock ? o->clock : clock_now,
                                   .tracks = xcalloc((size_t)n_items + 1, sizeof *r.tracks),
                                   .n_tracks = n_items};
    int rc = texts_check(team, n_agents, items, n_items, err), open = n_items;
    double seconds = o->seconds > 0 ? o->seconds : w->max_seconds;
    r.deadline = seconds > 0 ? r.clock() + seconds : INFINITY;
    for (int i = 0; i < n_items; i++)
        track_init(&r.tracks[i], &items[i], &transcripts[i], i, o->only ? o->only[i] : -1);
    while (rc == OK && open > 0) {
        int n_calls;
        rc = workflow_step(&r, client, &n_calls, err);
        if (p) progress_update(p, p->done + n_calls, NULL);
        open = 0;
        for (int i = 0; i < n_items; i++) open += r.tracks[i].node >= 0;
        if (rc == OK && open > 0) rc = log_check_cancelled(err);
    }
    for (int i = 0; rc == OK && i < n_items; i++) track_decide(&r, &r.tracks[i]);
    for (int i = 0; i < n_items; i++) free(r.tracks[i].flock);
    free(r.tracks);
    return rc;
}

struct agent_answer utterance_answer(const struct utterance *u) {
    struct agent_answer a = {.choice = u->answer, .confidence = u->confidence, .weight = u->weight};
    memcpy(a.prob, u->prob, sizeof a.prob);
    return a;
}

void transcript_release(struct transcript *o) {
    for (int i = 0; i < o->n; i++) free(o->v[i].text);
    for (int i = 0; i < o->n_candidates; i++) free(o->candidates[i]);
    free(o->candidates);
    free(o->scores);
    free(o->right);
    free(o->v);
    *o = (struct transcript){0};
}
