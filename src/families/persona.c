/*
 * persona: the three built-in personas, and conversations for training: of personas, questions with
 * answers, and answers after a debate.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>
#include <string.h>

const struct built_in_persona built_in_personas[3] = {
    {"critic", "you are the critic. doubt and check.", {"deduction", "pick", "order"}},
    {"practitioner",
     "you are the practitioner. work it out by hand.",
     {"arithmetic", "order", "route"}},
    {"explorer", "you are the explorer. look from the other side.", {"route", "pick", "deduction"}},
};

char *debate_turn_text(const char *const *others, int n) {
    struct buf b = {0};
    buf_puts(&b, "others say ");
    for (int i = 0; i < n; i++) buf_printf(&b, "%s%s", i ? " and " : "", others[i]);
    buf_puts(&b, ". answer again.");
    return b.data;
}

char *task_item_work(const struct task_item *it) {
    return xasprintf("%s%s", it->work, it->conclusion ? it->conclusion : "");
}

char *task_item_reply(const struct task_item *it, bool work) {
    const char *answer = it->choices[it->correct];
    if (it->whole_replies) return xstrdup(answer);
    if (!work || !*it->work) return xasprintf(ANSWER_PREFIX " %s", answer);
    char *derivation = task_item_work(it),
         *reply = xasprintf(WORK_PREFIX " %s\n" ANSWER_PREFIX " %s", derivation, answer);
    free(derivation);
    return reply;
}

void messages_add(json_t *turns, const char *role, const char *text) {
    json_array_append_new(turns, json_pack("{s:s,s:s}", "role", role, "content", text));
}

void messages_add_answer(json_t *turns, const char *choice) {
    char *text = xasprintf(ANSWER_PREFIX " %s", choice);
    messages_add(turns, "assistant", text);
    free(text);
}

void messages_to_jsonl(struct buf *text, json_t *turns) {
    buf_add_json_line(text, json_pack("{s:o}", "messages", turns));
}

/* A conversation of question and answer. system: may be NULL. */
static json_t *conversation_json(const char *system, const struct task_item *it,
                                 bool chain_of_thought) {
    json_t *turns = json_array();
    if (system) messages_add(turns, "system", system);
    messages_add(turns, "user", it->question);
    char *reply = task_item_reply(it, chain_of_thought);
    messages_add(turns, "assistant", reply);
    free(reply);
    return turns;
}

/* A conversation: the assistant's first answer (weight 0: not a target), two answers of others, and
 * the correct answer. Each of the first three answers is correct with probability 1/2. */
static json_t *critique_json(const struct task_item *it, struct rng *r) {
    const char *answers[3];
    for (int i = 0; i < 3; i++) {
        int wrong = (it->correct + rng_between(r, 1, it->n_choices - 1)) % it->n_choices;
        answers[i] = it->choices[rng_below(r, 2) ? it->correct : wrong];
    }
    char *others_message = debate_turn_text(answers + 1, 2);
    json_t *turns = json_array();
    messages_add(turns, "user", it->question);
    messages_add_answer(turns, answers[0]);
    json_object_set_new(json_array_get(turns, 1), "weight", json_integer(0));
    messages_add(turns, "user", others_message);
    messages_add_answer(turns, it->choices[it->correct]);
    free(others_message);
    return turns;
}

/* Item i of a family's train split as one line. */
static void line_add(struct buf *text, int family, uint64_t seed, int i, const char *system,
                     bool chain_of_thought) {
    struct task_item it;
    family_item(family, SPLIT_TRAIN, seed, (uint32_t)i, false, &it);
    if (it.chat) {
        messages_add(json_object_get(it.chat, "messages"), "assistant", it.choices[it.correct]);
        buf_add_json_line(text, json_incref(it.chat));
    } else {
        messages_to_jsonl(text, conversation_json(system, &it, chain_of_thought));
    }
    task_item_release(&it);
}

/* Item i of a family's train split as a line of critique_json. */
static void critic_line_add(struct buf *text, int family, uint64_t seed, int i) {
    struct task_item it;
    struct rng r = rng_make(seed, RNG_SHUFFLE, (uint32_t)i, 3);
    family_item(family, SPLIT_TRAIN, seed, (uint32_t)i, false, &it);
    messages_to_jsonl(text, critique_json(&it, &r));
    task_item_release(&it);
}

static json_t *answer_messages(const struct task_item *it, int choice) {
    json_t *turns = json_array();
    if (it->whole_replies)
        messages_add(turns, "assistant", it->choices[choice]);
    else
        messages_add_answer(turns, it->choices[choice]);
    return turns;
}

/* Item i of a family's train split as a line of preferences: the right answer and a wrong one. */
static void preference_line_add(struct buf *text, int family, uint64_t seed, int i) {
    struct task_item it;
    struct rng r = rng_make(seed, RNG_SHUFFLE, (uint32_t)i, 4);
    family_item(family, SPLIT_TRAIN, seed, (uint32_t)i, false, &it);
    int wrong = (it.correct + rng_between(&r, 1, it.n_choices - 1)) % it.n_choices;
    json_t *line = it.chat ? json_incref(it.chat) : json_object();
    json_t *prompt = json_incref(json_object_get(line, "messages"));
    if (!prompt) messages_add(prompt = json_array(), "user", it.question);
    json_object_del(line, "messages");
    json_object_set_new(line, "prompt", prompt);
    json_object_set_new(line, "chosen", answer_messages(&it, it.correct));
    json_object_set_new(line, "rejected", answer_messages(&it, wrong));
    buf_add_json_line(text, line);
    task_item_release(&it);
}

/* Alternates between plain answers, answers with reasoning, the system prompt, and reasoning with
 * the system prompt, because the adapter must act as the persona with and without this prompt. */
int persona_write(const struct built_in_persona *p, int n, uint64_t seed, const char *path,
                  struct error *err) {
    struct buf text = {0};
    for (int i = 0; i < n; i++)
        line_add(&text, family_find(p->families[i % 3]), seed, i, i / 3 & 2 ? p->system : NULL,
                 i / 3 & 1);
    int rc = file_write(path, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

/* Appends line i of a file of n lines, of a family. */
typedef void (*family_line_add)(struct buf *text, int family, uint64_t seed, int i);

static void answer_line_add(struct buf *text, int family, uint64_t seed, int i) {
    line_add(text, family, seed, i, NULL, false);
}

static void derivation_line_add(struct buf *text, int family, uint64_t seed, int i) {
    line_add(text, family, seed, i, NULL, true);
}

/* Writes n lines; the families take turns. */
static int families_write(const bool pick[MAX_FAMILIES], int n, uint64_t seed, family_line_add add,
                          const char *path, struct error *err) {
    struct buf text = {0};
    int families[MAX_FAMILIES], n_families = 0;
    for (int f = 0; f < family_count(); f++)
        if (pick[f]) families[n_families++] = f;
    for (int i = 0; i < n; i++) add(&text, families[i % n_families], seed, i);
    int rc = file_write(path, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

int families_write_questions(const bool pick[MAX_FAMILIES], bool chain_of_thought, int n,
                             uint64_t seed, const char *path, struct error *err) {
    return families_write(pick, n, seed, chain_of_thought ? derivation_line_add : answer_line_add,
                          path, err);
}

int families_write_critiques(const bool pick[MAX_FAMILIES], int n, uint64_t seed, const char *path,
                             struct error *err) {
    for (int f = 0; f < family_count(); f++)
        if (pick[f] && family_check_questions(f, err) != OK) return err->code;
    return families_write(pick, n, seed, critic_line_add, path, err);
}

/* ERR_USAGE for families whose conversations have tools, which preferences cannot have. */
static int family_check_preferences(int family, struct error *err) {
    struct task_item it;
    family_item(family, SPLIT_TRAIN, 0, 0, false, &it);
    int rc =
        it.chat && json_object_get(it.chat, "tools")
            ? error_set(err, ERR_USAGE, "'%s' has calls of tools, which preferences cannot have",
                        task_families[family]->name)
            : OK;
    task_item_release(&it);
    return rc;
}

int families_write_preferences(const bool pick[MAX_FAMILIES], int n, uint64_t seed,
                               const char *path, struct error *err) {
    for (int f = 0; f < family_count(); f++)
        if (pick[f] && family_check_preferences(f, err) != OK) return err->code;
    return families_write(pick, n, seed, preference_line_add, path, err);
}
