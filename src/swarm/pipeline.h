/*
 * pipeline: how a team answers one question — recall, references, a gist of what is long, agents
 * with roles that think in one batch, summaries, the answer, and what is remembered of it.
 *
 * The graph of who speaks when is a workflow (protocols/panel.yaml, or one with roles of its own);
 * everything around it is here. Each stage may have an asker of its own, which is how several bases
 * work together: what is asked in one step goes to each asker in one batch. Nothing here knows a
 * model. Everything in the options is borrowed; a call uses them and owns nothing between calls.
 */
#ifndef SHOAL_PIPELINE_H
#define SHOAL_PIPELINE_H

#include "swarm/blackboard.h"
#include "swarm/roles.h"
#include "swarm/workflow.h"

/* Who sums up, who answers, and all the others. */
enum pipeline_stage { PIPELINE_INTERNAL, PIPELINE_SUMMARY, PIPELINE_OUTPUT, PIPELINE_N_STAGES };
extern const char *const pipeline_stage_names[PIPELINE_N_STAGES]; /* "internal", "summary", "output" */
enum pipeline_stage pipeline_stage_of_role(const char *role);          /* by the workflow's role */

struct pipeline_stage_options {
    struct llm_client asker;
    float temperature;  /* 0: the role's, else the workflow's own */
    int32_t max_tokens; /* 0: the workflow's own */
};
/* How key facts are found in what the user says: by rules (memory.h), and by the model that sums
 * up, whose reply is held to a grammar and of which only what was said is kept. */
enum fact_source { FACTS_NONE, FACTS_RULES, FACTS_MODEL };

enum { QUESTION_TYPE_BY_MODEL = -2 };
struct pipeline_options {
    const struct workflow *workflow;
    struct pipeline_stage_options stage[PIPELINE_N_STAGES];
    struct blackboard *board;
    struct conversation *memory;     /* NULL: nothing is remembered */
    struct knowledge *knowledge;     /* NULL: none */
    const struct embedder *embedder; /* finds references by meaning too, and puts what is said into
                                        slots with its vector; NULL: by words, without */
    struct adapter *const *adapters; /* [agents], each may be NULL */
    int agents, iterations;
    int type; /* enum question_type; -1: by the question's words; QUESTION_TYPE_BY_MODEL: who sums up says */
    int language; /* enum language; -1: the question's */
    bool summary; /* after each iteration, and of what is long */
    bool compat;  /* the predecessor's keywords, and its ten characters that an answer must have */
    float temperature;  /* of everybody; below 0: each one's own */
    int32_t max_tokens; /* of every turn; 0: each one's own */
    double seconds;     /* after which nobody begins to speak; 0: no limit */
    enum fact_source facts;
    uint64_t seed;
    /* Before `n` agents are asked at once; may be NULL. Iterations count from 1. */
    void (*progress)(void *ctx, const char *role, int iteration, int n);
    void *progress_ctx;
    /* What was just written on the board, {timestamp, key, value}. `c`: the call whose words it
     * is, with what was asked, the agent's so many-th; NULL: it is nobody's. May be NULL. */
    void (*wrote)(void *ctx, const json_t *entry, const struct llm_call *c, int iteration);
    void *wrote_ctx;
};

/* Whose words an answer is: the one who answers; where nothing usable came from there, a member;
 * the memory's own; an apology. */
enum answer_source { ANSWER_FROM_OUTPUT, ANSWER_FROM_AGENT, ANSWER_FROM_MEMORY, ANSWER_FALLBACK };
extern const char *const answer_source_names[]; /* "output", "member", "memory", "nobody" */
struct pipeline_answer {
    char *text; /* cleaned */
    enum answer_source source;
    const char *why;  /* of a member's or an apology: what failed, or NULL */
    struct transcript talk; /* all that was said, as it was said; empty where the memory answered */
    char *names[TEAM_MAX];
};
/*
 * Who fails abstains: an answer always comes. Errors are the outside world's (a question that is
 * not UTF-8, a store that cannot be written, an asker that breaks) and a team that is too large.
 * `out` is released also after an error.
 */
int pipeline_run(const struct pipeline_options *o, const char *question,
                 struct pipeline_answer *out, struct error *err);
void pipeline_answer_release(struct pipeline_answer *a);
/* Keeps an exchange, with the summary and the key facts that come of it, in o->memory. */
int pipeline_update_memory(const struct pipeline_options *o, const char *question, const char *answer,
                      struct error *err);

#endif
