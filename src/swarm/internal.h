/* swarm: declarations that only this folder uses: the parsed workflow (workflow.c parses it,
 * workflow_run.c runs it), and the functions of answer_parse.c and workflow.c. */
#ifndef SHOAL_SWARM_INTERNAL_H
#define SHOAL_SWARM_INTERNAL_H

#include "swarm/swarm.h"
#include "template/template.h"

enum { NODE_MESSAGES_MAX = 8, ROLES_MAX = 16 };

struct workflow_node {
    char *name;
    uint32_t role_mask; /* bit r: agents with role r speak; ~0: all agents speak */
    bool in_turn;       /* agents speak one after another; each sees the replies before its own */
    bool same_round;    /* entering the node does not start a new round */
    /* the prompt of a call: chat messages, each with its role (system, user, assistant) */
    const char *message_role[NODE_MESSAGES_MAX];
    struct jinja *message[NODE_MESSAGES_MAX];
    int n_messages;
    enum reply_format reply;
    int tail_chars; /* characters kept of each earlier utterance; 0: all */
    float temperature, top_p;
    int32_t max_tokens;
    bool has_flock;
    struct flock_rules flock;
};
struct workflow_edge {
    int from, to;
    struct jinja *condition; /* holds if it renders to a nonempty text; NULL: always holds */
};
struct workflow {
    char *name, *description;
    char hash[HASH_LEN]; /* of its text */
    char *roles[ROLES_MAX];
    int n_roles;
    json_t *translations;        /* {language: {name: text}} or NULL */
    struct workflow_node *nodes; /* every item (question) starts at node 0 */
    int n_nodes;
    struct workflow_edge *edges;
    int n_edges;
    int rounds;
    const struct vote *vote;
    bool vote_all_rounds; /* true: the vote counts all answers; false: each agent's last answer */
    int judge_node;       /* the node that decides the answer; -1: the vote decides */
    int text_node;        /* the node whose text is the result; -1: the result is an answer */
    int max_calls;        /* limit of one item, as is max_generated_tokens */
    int64_t max_generated_tokens;
    double max_seconds; /* limit of the whole run; 0: none */
};

/* The next three functions are in answer_parse.c. */

/* Extracts the answer from `text`, the reply of call c. Returns a malloc'ed text, or NULL if there
 * is no answer. g NULL: the answer is the line's rest after the last "answer:". *confidence: the
 * product of the probabilities of the answer's tokens; 1 if there is no answer or if the client
 * reports no tokens. */
char *answer_parse(const struct grader *g, const struct llm_call *c, const char *text,
                   float *confidence);
/* Returns the index of the first candidate that is equal to `text`: equivalent for the grader, or,
 * if g is NULL, the same bytes. If no candidate is equal: appends a copy of the text and returns
 * its index if `add`, else returns -1. */
int answer_candidate_find(char ***candidates, int *n, const char *text, const struct grader *g,
                          bool add);
/* Returns for each of the n answers whether it is correct (1) or not (0), in a malloc'ed array. For
 * an item with choices, answer i is choice i. For other items the grader (NULL: "exact") compares
 * the answer with the gold answer; without a gold answer, no answer is correct. */
uint8_t *answers_grade(const struct task_item *item, const struct grader *g, char *const *answers,
                       int n);

/* Whether a built-in workflow has this name or had it earlier. */
bool workflow_is_builtin(const char *protocol);

/* Whether a node has the key `flock`. */
bool workflow_has_flock(const struct workflow *w);

/* Whether every agent answers in the first step and the vote decides, as a router requires. */
bool workflow_has_first_answers(const struct workflow *w);

/* The index of a role in w->roles; -1: no such role. */
int workflow_role_find(const struct workflow *w, const char *name);

enum { ROUTER_WEIGHTS = 1 + ROUTER_DIM }; /* each agent's */
/* The log-odds that weights [ROUTER_WEIGHTS] predict. */
double router_logit(const double *weights, const struct question_features *f);

/* sample_tuning.c: the temperature of the samples of an agent. */
struct sample_tuning_options {
    const struct llm_client *client;
    const struct agent *agent;
    const struct task_item *items; /* development items */
    int n_items;
    bool chain_of_thought;
    int32_t max_tokens;
    uint64_t seed;
    const struct grader *grader;
};
/* {temperature, agent, n, samples, curve: [[temperature, accuracy]]}; NULL on failure. */
json_t *sample_tuning_run(const struct sample_tuning_options *o, struct progress *p,
                          struct error *err);
int64_t sample_tuning_calls(int n_items);
void sample_tuning_print(const json_t *v, FILE *f);

/* checked_report.c: samples with and without a check, of the team and of its best agent. */
struct checked_report_options {
    const struct llm_client *client;
    const struct agent *team;
    int n_agents, best; /* best: the index of the agent with the most right first answers */
    const struct task_item *items;
    int n_items;
    struct checked_options samples; /* with a check */
    struct check_questioner *questioner;
};
/* Adds the rows; returns {kind, samples, passes, confusion, comparisons}, NULL on failure. */
json_t *checked_report_run(const struct checked_report_options *o, json_t *rows, struct progress *p,
                           struct error *err);
/* The samples of a report at most. When items end early, checked_report_run takes the rest off the
 * total of the progress. */
int64_t checked_report_max_calls(int n_items, int max_samples);
void checked_report_print(const json_t *v, FILE *f);

#endif
