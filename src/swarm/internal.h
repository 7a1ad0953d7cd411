/* swarm: declarations that only this folder uses: the parsed workflow (workflow.c parses it,
 * workflow_run.c runs it) and the functions of answer_parse.c. */
#ifndef SHOAL_SWARM_INTERNAL_H
#define SHOAL_SWARM_INTERNAL_H

#include "swarm/swarm.h"
#include "template/template.h"

enum { NODE_MESSAGES_MAX = 8, ROLES_MAX = 16 };

struct workflow_node {
    char *name;
    uint32_t role_mask; /* bit r: role r speaks; ~0: all agents */
    bool in_turn;       /* agents speak one after another and see the earlier replies */
    bool same_round;    /* the node does not advance the round */
    /* the prompt of a call: chat messages, each with its role (system, user, assistant) */
    const char *message_role[NODE_MESSAGES_MAX];
    struct jinja *message[NODE_MESSAGES_MAX];
    int n_messages;
    enum reply_format reply;
    int tail_chars; /* characters kept of each earlier utterance; 0: all */
    float temperature, top_p;
    int32_t max_tokens;
};
struct workflow_edge {
    int from, to;
    struct jinja *condition; /* NULL: always */
};
struct workflow {
    char *name, *description;
    char *roles[ROLES_MAX];
    int n_roles;
    json_t *translations;        /* {language: {name: text}} or NULL */
    struct workflow_node *nodes; /* every item (question) starts at the first */
    int n_nodes;
    struct workflow_edge *edges;
    int n_edges;
    int rounds;
    const struct vote *vote;
    bool vote_all_rounds; /* the vote counts answers of all rounds, instead of the last only */
    int judge_node;       /* the node that decides the answer; -1: the vote decides */
    int text_node;        /* the node that writes the result; -1: the result is an answer */
    /* limits of one item */
    int max_calls;
    int64_t max_generated_tokens;
    double max_seconds; /* limit of the whole run; 0: none */
};

/* answer_parse.c: extracts the answer from `text`, the reply of call c: malloc'ed, or NULL if there
 * is none. Without a grader the answer is the text after "answer:". *confidence: the product of the
 * probabilities of the answer's tokens; 1 if the client reports no tokens. */
char *answer_parse(const struct grader *g, const struct llm_call *c, const char *text,
                   float *confidence);
/* Index of the candidate that is equal to `text`: equivalent by the grader; without a grader, the
 * same bytes. If there is none: with `add` the index of a new candidate, a copy of the text; else
 * -1.
 */
int answer_candidate_find(char ***candidates, int *n, const char *text, const struct grader *g,
                          bool add);
/* Whether each of n answers is correct: of an item with choices, answer i is choice i; otherwise
 * the grader (NULL: "exact") compares it with the gold answer. malloc'ed. */
uint8_t *answers_grade(const struct task_item *item, const struct grader *g, char *const *answers,
                       int n);

int workflow_role_find(const struct workflow *w, const char *name); /* -1: no such role */

#endif
