/*
 * second_turns: conversations that train the second turn of a debate. A team debates questions of
 * the train split with the protocol's own prompts; the agents' first answers are real, and the
 * prompt of each second turn becomes a conversation that ends in the right answer.
 *
 * A client in front of the team's client passes the first turns on and records the second ones
 * instead of computing them. A recorded turn fails, so that its agent abstains; what follows in the
 * debate is not used. The control has the same questions and right answers without the debate:
 * line i of both files has the same question, so training on either costs as many updates.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

/* The client that records. Agents and items are identified by their addresses in the team and in
 * the items. */
struct turn_recorder {
    struct llm_client client; /* answers the first turns */
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    uint8_t *has_answered; /* [n_items][n_agents] 1: the agent had a turn that ends in an answer */
    json_t **prompts;      /* [n_items][n_agents] messages of the next such turn; NULL: none */
};

/* The messages of a call. Training ignores the earlier turns of the assistant. */
static json_t *call_messages_json(const struct llm_call *c) {
    json_t *turns = json_array();
    for (int i = 0; i < c->n_messages; i++) {
        messages_add(turns, c->messages[i].role, c->messages[i].content);
        if (strcmp(c->messages[i].role, "assistant") == 0)
            json_object_set_new(json_array_get(turns, (size_t)i), "weight", json_integer(0));
    }
    return turns;
}

/* Whether the call is not its agent's first one that ends in an answer. Records the second one. */
static bool turn_record(struct turn_recorder *r, struct llm_call *c) {
    size_t i = (size_t)(c->item - r->items) * (size_t)r->n_agents + (size_t)(c->agent - r->team);
    if (c->reply != REPLY_ANSWER) return false;
    if (!r->has_answered[i]) {
        r->has_answered[i] = 1;
        return false;
    }
    if (!r->prompts[i]) r->prompts[i] = call_messages_json(c);
    c->answer.choice = -1;
    c->failed = "a second turn is recorded, not answered";
    return true;
}

static int recorder_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    struct turn_recorder *r = ctx;
    struct llm_call *first = xcalloc((size_t)MAX(n, 1), sizeof *first);
    int *index = xcalloc((size_t)MAX(n, 1), sizeof *index), m = 0;
    for (int i = 0; i < n; i++)
        if (!turn_record(r, &calls[i])) {
            first[m] = calls[i];
            index[m++] = i;
        }
    int rc = m ? r->client.ask(r->client.ctx, first, m, err) : OK;
    for (int i = 0; i < m; i++) calls[index[i]] = first[i];
    free(index);
    free(first);
    return rc;
}

/* The recorded conversations */

static void lines_add(struct second_turns *s, const struct turn_recorder *r, int n_items,
                      char *const *replies) {
    for (int i = 0; i < n_items; i++)
        for (int a = 0; a < r->n_agents; a++) {
            json_t *second = r->prompts[(size_t)i * (size_t)r->n_agents + (size_t)a];
            struct chat_message chat[2];
            if (!second) continue;
            const struct llm_call alone =
                llm_call_question(&r->team[a], &r->items[i], r->team[a].view, chat);
            json_t *direct = call_messages_json(&alone);
            messages_add(second, "assistant", replies[i]);
            messages_add(direct, "assistant", replies[i]);
            messages_to_jsonl(&s->v[a].second, json_incref(second));
            messages_to_jsonl(&s->v[a].direct, direct);
            s->v[a].n++;
        }
}

/* The right replies of the items; then, with `free_answers`, removes the items' choices. */
static char **replies_take(struct task_item *items, int n, bool chain_of_thought,
                           bool free_answers) {
    char **replies = xcalloc((size_t)n + 1, sizeof *replies);
    for (int i = 0; i < n; i++) {
        replies[i] = task_item_reply(&items[i], chain_of_thought);
        if (free_answers) task_item_make_free(&items[i]);
    }
    return replies;
}

static int task_check(const struct eval_task *task, struct error *err) {
    if (task->family < 0)
        return error_set(err, ERR_USAGE,
                         "'%s' is read from files, which have no train split; second turns are of "
                         "generated tasks, such as arithmetic",
                         task->name);
    if (task->is_split_evidence)
        return error_set(err, ERR_USAGE,
                         "no agent alone can learn the answers of '%s' from its part of the "
                         "evidence; 'shoal model data --tasks %s' writes its conversations",
                         task->name, task->name);
    if (task->split != SPLIT_TRAIN)
        return error_set(err, ERR_USAGE, "second turns are training data: add --split train");
    return OK;
}

/* An agent's name is the name of its files. */
static int names_check(const struct team *t, struct error *err) {
    for (int a = 0; a < t->n; a++) {
        const char *name = t->v[a].name;
        if (!*name || *name == '.' || strchr(name, '/'))
            return error_set(err, ERR_USAGE,
                             "the name of agent '%s' cannot be the name of a file; change it in "
                             "the team's file",
                             name);
        for (int b = 0; b < a; b++)
            if (strcmp(name, t->v[b].name) == 0)
                return error_set(err, ERR_USAGE,
                                 "two agents have the name '%s'; change one in the team's file",
                                 name);
    }
    return OK;
}

static int debate_record(struct second_turns *s, struct turn_recorder *r, const struct team *t,
                         const struct debate_options *o, int n_items, char *const *replies,
                         struct progress *p, struct error *err) {
    const struct llm_client client = {r, recorder_ask};
    struct debate d;
    int rc = debate_run(&client, t->v, t->n, r->items, n_items, o, &d, p, err);
    for (int a = 0; rc == OK && a < t->n; a++)
        for (int i = 0; i < n_items; i++)
            s->v[a].n_first_correct += d.first_correct[(size_t)a * (size_t)n_items + (size_t)i];
    if (rc == OK) lines_add(s, r, n_items, replies);
    debate_release(&d);
    return rc;
}

int second_turns_add(struct second_turns *s, const struct llm_client *client, const struct team *t,
                     const struct eval_task *task, bool free_answers, struct error *err) {
    struct debate_options o;
    struct progress bar;
    if (task_check(task, err) != OK || names_check(t, err) != OK ||
        debate_options_for_task(task, &t->options, &o, err) != OK)
        return err->code;
    if (free_answers && !o.grader && !(o.grader = grader_find("exact", err))) return err->code;
    const int n = (int)task->n_questions;
    const size_t cells = (size_t)n * (size_t)t->n;
    struct task_item *items = eval_task_items(task);
    char **replies = replies_take(items, n, o.chain_of_thought, free_answers);
    struct turn_recorder r = {.client = *client,
                              .team = t->v,
                              .n_agents = t->n,
                              .items = items,
                              .has_answered = xcalloc(cells + 1, 1),
                              .prompts = xcalloc(cells + 1, sizeof *r.prompts)};
    o.rounds = 2;
    progress_start(&bar, task->name, debate_max_calls(t->v, t->n, items, n, &o));
    int rc = debate_record(s, &r, t, &o, n, replies, &bar, err);
    if (rc == OK) progress_finish(&bar, NULL);
    s->n_questions += n;
    for (size_t i = 0; i < cells; i++) json_decref(r.prompts[i]);
    for (int i = 0; i < n; i++) free(replies[i]);
    task_items_release(items, n);
    free(r.prompts);
    free(r.has_answered);
    free(replies);
    return rc;
}

static int file_write_lines(const char *dir, const char *kind, const char *name,
                            const struct buf *lines, struct error *err) {
    char *folder = xasprintf("%s/%s", dir, kind), *path = xasprintf("%s/%s.jsonl", folder, name);
    int rc = dir_make(folder, err);
    if (rc == OK) rc = file_write(path, lines->len ? lines->data : "", lines->len, err);
    free(path);
    free(folder);
    return rc;
}

int second_turns_write(const struct second_turns *s, const struct team *t, const char *dir,
                       struct error *err) {
    int64_t n = 0;
    for (int a = 0; a < t->n; a++) n += s->v[a].n;
    if (n == 0)
        return error_set(err, ERR_STATE,
                         "no agent has a second turn that ends in an answer, in protocol '%s' with "
                         "this team and these questions",
                         t->options.workflow ? workflow_name(t->options.workflow) : "brief");
    int rc = OK;
    for (int a = 0; rc == OK && a < t->n; a++) {
        rc = file_write_lines(dir, "second", t->v[a].name, &s->v[a].second, err);
        if (rc == OK) rc = file_write_lines(dir, "direct", t->v[a].name, &s->v[a].direct, err);
    }
    return rc;
}

json_t *second_turns_json(const struct second_turns *s, const struct team *t) {
    json_t *agents = json_array();
    for (int a = 0; a < t->n; a++)
        json_array_append_new(
            agents, json_pack("{s:s,s:I,s:f}", "name", t->v[a].name, "lines", (json_int_t)s->v[a].n,
                              "first_correct",
                              (double)s->v[a].n_first_correct / (double)MAX(s->n_questions, 1)));
    return json_pack("{s:I,s:s,s:o}", "questions", (json_int_t)s->n_questions, "protocol",
                     t->options.workflow ? workflow_name(t->options.workflow) : "brief", "agents",
                     agents);
}

void second_turns_release(struct second_turns *s) {
    for (int a = 0; a < TEAM_MAX; a++) {
        buf_release(&s->v[a].second);
        buf_release(&s->v[a].direct);
    }
    *s = (struct second_turns){0};
}
