/*
 * What workflow.c reads and workflow_run.c runs.
 */
#ifndef SHOAL_SWARM_WORKFLOW_INTERNAL_H
#define SHOAL_SWARM_WORKFLOW_INTERNAL_H

#include "swarm/swarm.h"
#include "template/template.h"

enum { NODE_MESSAGES = 8, ROLES_MAX = 16 };

struct workflow_node {
    char *name;
    uint32_t by; /* bit r: role r speaks; ~0: everybody */
    bool in_turn, same_round;
    const char *role[NODE_MESSAGES];
    struct jinja *message[NODE_MESSAGES];
    int n_messages;
    enum reply_format reply;
    int tail;
    float temperature, top_p;
    int32_t max_tokens;
};
struct workflow_edge {
    int from, to;
    struct jinja *when; /* NULL: always */
};
struct workflow {
    char *name, *about;
    char *roles[ROLES_MAX];
    int n_roles;
    json_t *words; /* {language: {name: text}} or NULL */
    struct workflow_node *nodes;
    int n_nodes; /* an item begins at the first */
    struct workflow_edge *edges;
    int n_edges;
    int rounds;
    const struct vote *vote;
    bool over_all; /* votes of all rounds count, not of the last only */
    int judge;     /* the node whose answer stands; -1: the vote's */
    int text;      /* the node whose words are the result; -1: there is a vote */
    int max_calls;
    int64_t max_generated;
    double max_seconds; /* 0: no limit */
};

/* answer_parse.c: the answer in what a call said, malloc'ed (NULL: none), and the probability of
 * its tokens: 1 where the asker gives none. Without a grader it is what follows "answer:". */
char *answer_parse(const struct grader *g, const struct llm_call *c, const char *text, float *sure);
/* Which of v[n] a text is by a grader, or letter by letter; else it is added, or -1. */
int answer_candidate_find(char ***v, int *n, const char *text, const struct grader *g, bool add);
/* [n] whether each is right: the item's right choice, or what its gold is for a grader (NULL:
 * exact). malloc'ed. */
uint8_t *answers_grade(const struct task_item *it, const struct grader *g, char *const *v, int n);

int workflow_role_find(const struct workflow *w, const char *name); /* -1: no such role */

#endif
