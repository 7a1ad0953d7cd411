/* swarm: private declarations: the parsed workflow (workflow.c, workflow_run.c) and answer_parse.c.
 */
#ifndef SHOAL_SWARM_INTERNAL_H
#define SHOAL_SWARM_INTERNAL_H

#include "swarm/swarm.h"
#include "template/template.h"

enum { NODE_MESSAGES = 8, ROLES_MAX = 16 };

struct workflow_node {
    char *name;
    uint32_t role_mask; /* bit r: role r speaks; ~0: all agents */
    bool in_turn;       /* agents speak one after another and see the earlier replies */
    bool same_round;    /* the node does not advance the round */
    const char *role[NODE_MESSAGES];
    struct jinja *message[NODE_MESSAGES];
    int n_messages;
    enum reply_format reply;
    int tail_chars;
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
    json_t *translations; /* {language: {name: text}} or NULL */
    struct workflow_node *nodes;
    int n_nodes; /* an item starts at the first node */
    struct workflow_edge *edges;
    int n_edges;
    int rounds;
    const struct vote *vote;
    bool vote_all_rounds; /* the vote counts answers of all rounds, instead of the last only */
    int judge_node;       /* the node that decides the answer; -1: the vote decides */
    int text_node;        /* the node that writes the result; -1: the result is an answer */
    int max_calls;
    int64_t max_generated;
    double max_seconds; /* 0: no limit */
};

/* answer_parse.c: the answer in a call's text, malloc'ed (NULL: none), and the probability of its
 * tokens: 1 if the client reports none. Without a grader the answer is the text after "answer:". */
char *answer_parse(const struct grader *g, const struct llm_call *c, const char *text,
                   float *confidence);
/* Index of the candidate of v[n] that equals a text, by the grader or byte by byte. If none does:
 * appends the text, or returns -1. */
int answer_candidate_find(char ***v, int *n, const char *text, const struct grader *g, bool add);
/* [n] whether each answer is correct: the item's correct choice, or equal to the gold answer by a
 * grader (NULL: exact). malloc'ed. */
uint8_t *answers_grade(const struct task_item *it, const struct grader *g, char *const *v, int n);

int workflow_role_find(const struct workflow *w, const char *name); /* -1: no such role */

#endif
