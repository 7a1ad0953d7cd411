/*
 * families: generated tasks: the families that train and measure the starter model, one file each,
 * and questions with split evidence.
 *
 * A family generates one question in one of three languages from an rng. Easy families contain only
 * variants that occur in pretraining. Harder families mix a common variant with a rare variant that
 * does not occur in pretraining (addition and subtraction, larger and smaller, …). So the accuracy
 * of the base model is between chance and 1, and adapters, votes and evolution can have an effect.
 *
 * Invariant: the key of an item contains everything that identifies the question, and nothing else:
 * no language and no wording. The hash of the key decides the split (train, dev or test; dev is for
 * fitness), so the splits are disjoint, and a question of the test split is never sampled for
 * training or for fitness. Two pairs of families ask the same question in other words (sort and
 * order, compare and pick): in the dev and test splits, the key `duplicate_of` must belong to the
 * same split. Generators are pure functions.
 */
#ifndef SHOAL_FAMILIES_H
#define SHOAL_FAMILIES_H

#include "base/base.h"

#define EVAL_MAX_CHOICES 32

/* A further question about the same text, and its answer. */
struct task_follow_up {
    char *question, *answer;
};
struct task_item {
    char *question;                  /* the user's message; with `chat`: the last one */
    char *work;                      /* a short correct derivation, for training; may be "" */
    char *conclusion;                /* the end of the derivation, which follows `work`, or NULL */
    char *choices[EVAL_MAX_CHOICES]; /* [n_choices] candidate answers */
    int n_choices, correct;          /* correct: index of the right choice; -1: unknown */
    /* The conversation that the model replies to, {"messages": [...], "tools": [...]} as in a chat
     * request, tools are optional. NULL: the question is the only message. */
    json_t *chat;
    bool whole_replies; /* a choice is a whole reply; false: ANSWER_PREFIX precedes it */
    bool free_answer;   /* without choices: the reply begins with ANSWER_PREFIX, or with WORK_PREFIX
                           for a chain of thought */
    struct task_follow_up *follow_ups; /* [n_follow_ups] for pretraining, which asks them next */
    int n_follow_ups;
    const char *lang;   /* "en", "ja", "zh" */
    bool rare;          /* a variant that does not occur in pretraining */
    char *key;          /* canonical content, see above */
    char *duplicate_of; /* key of the same question in another family, or NULL */
    char *gold;         /* item without choices: the text that a grader compares with, or NULL */
    struct strings gold_aliases; /* other right answers */
    char **views; /* [n_views] variants of the question with a part of its evidence; agent i of a
                     team sees view i mod n_views */
    int n_views;  /* 0: all agents see `question` */
    /* Jinja templates of the check `question` (check/check.h), or NULL. They follow from the
     * question alone: neither depends on `correct`. */
    char *check_question, *check_answer;
    json_t *check_item; /* what a check sees of the item, without its answer; NULL: the question
                           and the two templates */
};
void task_item_release(struct task_item *it);
/* Turns an item with choices into one without, whose answer is generated: the right choice becomes
 * `gold`. */
void task_item_make_free(struct task_item *it);

enum data_split { SPLIT_TRAIN, SPLIT_DEV, SPLIT_TEST };
int data_split_parse(const char *name, enum data_split *out, struct error *err);
struct task_family {
    const char *name;
    bool easy;        /* the starter model answers at least 99 % correctly */
    float rare_share; /* share of rare variants outside pretraining; 0 for easy families */
    const char *description;
    /* Generates an item whose choice 0 is the right one; `rare` selects the variant. */
    void (*generate)(struct rng *r, bool rare, struct task_item *out);
    bool conversations;  /* items have a chat or whole replies, see task_item */
    int max_tokens;      /* of an item with its answer; 0: FAMILY_MAX_TOKENS */
    int max_work_tokens; /* of a derivation; 0: FAMILY_MAX_WORK_TOKENS */
};
enum { FAMILY_MAX_TOKENS = 256, FAMILY_MAX_WORK_TOKENS = 32 };
extern const struct task_family *const task_families[];
int family_count(void); /* all families */
int family_max_tokens(int family);
/* Refuses a family of conversations, for callers that ask questions with an answer: teams, debates,
 * evolution, rewards. */
int family_check_questions(int family, struct error *err);
int family_max_work_tokens(int family);
int fry_count(void); /* the families of the first starter model, which are the first ones */
int family_find(const char *name); /* -1 when unknown */
#define MAX_FAMILIES 64
/* Sets pick[i] for each family i of a set, and returns true; false: there is no set of this name.
 * "starter": the families of the starter model, except the long needle; "fry": those of the first
 * starter model, for the runs of version 0.1. */
bool family_set(const char *name, bool pick[MAX_FAMILIES]);
/* Sets pick[i] for each family i in a comma-separated list of names of families and sets. */
int families_parse(const char *list, bool pick[MAX_FAMILIES], struct error *err);
/* The longest family_max_tokens of the picked families, at most `most`; 0: none is picked. */
int32_t families_max_tokens(const bool pick[MAX_FAMILIES], int32_t most);
/* Generates item `index` of a family's split, with shuffled choices. `pretrain`: only common
 * variants. */
void family_item(int family, enum data_split split, uint64_t seed, uint32_t index, bool pretrain,
                 struct task_item *out);
enum data_split family_split_of(const char *key);

/* The question of the family "judge" whether an answer to an item is right; malloc'ed. */
char *family_judge_question(const struct task_item *it, const char *proposed);

/* Appends everyday sentences, one per line. language: index of "en", "ja", "zh". capitals: with
 * their first letter as a capital. */
void family_prose_add(struct buf *text, int language, bool capitals);

/* The three built-in personas. families: the families of a persona's conversations. */
struct built_in_persona {
    const char *name, *system;
    const char *families[3];
};
extern const struct built_in_persona built_in_personas[3];
/* The debate message to an agent: "others say 12 and 15. answer again." malloc'ed. */
char *debate_turn_text(const char *const *others, int n);
/* The correct derivation of an item's answer, malloc'ed; "" if it has none. */
char *task_item_work(const struct task_item *it);
/* The correct reply to an item: after a chain of thought if `work` and the item has one; malloc'ed.
 */
char *task_item_reply(const struct task_item *it, bool work);
/* Appends a turn to a conversation, which is an array of {role, content}. */
void messages_add(json_t *turns, const char *role, const char *text);
/* Appends the assistant's turn "answer: CHOICE". */
void messages_add_answer(json_t *turns, const char *choice);
/* Appends the line {"messages": turns} to `text`. Takes ownership of `turns`. */
void messages_to_jsonl(struct buf *text, json_t *turns);
/* Writes n conversations of a persona, from the train split, to a JSONL file. */
int persona_write(const struct built_in_persona *p, int n, uint64_t seed, const char *path,
                  struct error *err);
/* Writes n questions of the train split with their answers to a JSONL file. The families take
 * turns. chain_of_thought: with the derivations of those that have one. */
int families_write_questions(const bool pick[MAX_FAMILIES], bool chain_of_thought, int n,
                             uint64_t seed, const char *path, struct error *err);

/* Writes n preferences of the train split, {"prompt", "chosen", "rejected"}: the right choice of an
 * item and a wrong one. */
int families_write_preferences(const bool pick[MAX_FAMILIES], int n, uint64_t seed,
                               const char *path, struct error *err);

/* Writes n conversations of the train split in which the assistant answers, sees the answers of two
 * others and answers again. Each of these three answers is correct with probability 1/2. The
 * assistant's second answer is always correct. */
int families_write_critiques(const bool pick[MAX_FAMILIES], int n, uint64_t seed, const char *path,
                             struct error *err);

/* split_evidence.c: questions of two kinds ("largest", "earliest") whose evidence is split among a
 * team. The question contains all of the evidence, each of its three views a third. */
int split_evidence_find(const char *name); /* index of the kind; -1 when unknown */
void split_evidence_item(int kind, enum data_split split, uint64_t seed, uint32_t index,
                         struct task_item *out);
/* Writes n conversations of the train split to a JSONL file: in turn the whole question, a view,
 * and a view followed by a debate. */
int split_evidence_write(int kind, int n, uint64_t seed, const char *path, struct error *err);

/* residents.c: questions that need tools. Writes DIR/documents.jsonl, {title, content}, for a
 * knowledge base about invented people and towns, and DIR/questions.jsonl, n lines {kind, question,
 * answer, reply, calls} for agent_tasks_read. */
int residents_write(enum data_split split, int n, uint64_t seed, const char *dir,
                    struct error *err);

/* texts of answers */

/* Begins the assistant's answer. A space, one choice and the end-of-turn token follow. */
#define ANSWER_PREFIX "answer:"
/* Begins the reasoning, after which a line with ANSWER_PREFIX follows. */
#define WORK_PREFIX "work:"

#endif
