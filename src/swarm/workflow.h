/*
 * workflow: a debate, a panel with a judge, an answer pipeline: a small declared graph, and the one
 * engine that runs it for many items at once.
 *
 * A workflow is a YAML file (built-in ones are the files of protocols/). Its nodes are what agents
 * are asked, in messages that are Jinja templates over what has been said; its edges say where an
 * item goes next, under conditions in the same language. Votes and judgements close it.
 *
 * The engine knows no model: a step takes, of every item that is still under way, all calls that
 * wait for nothing, and hands them to an `asker` in one batch. An agent that fails abstains. It
 * always ends: every item's calls and tokens are bounded by its budget. A bound of seconds is the
 * one thing that makes a result depend on the machine, and only where somebody asks for it.
 *
 *   name: two-rounds
 *   about: What --help says of it.
 *   rounds: 2                      what --rounds stands at
 *   roles: [pro, con, judge]       agent i has role i mod 3; none: every agent is a debater
 *   words: {en: {go: …}, ja: {…}}  `words.go` is the item's language's, else English
 *   budget: {calls: 64, tokens: 65536}   of an item; a step shares what is left, or is not begun;
 *                                  `seconds` of the whole run, after which nobody begins
 *   nodes:
 *     first:
 *       by: all | ROLE …           who speaks (all); one word or a list
 *       order: together | in-turn  whether one hears the others of the same step (together)
 *       messages:                  empty ones are left out
 *         - system: "{{ me.system }}"
 *         - user: "{{ question }}"
 *       reply: text | answer | judge | seed  (text)
 *       same_round: true           the step before is of the same round (false)
 *       tail: 3000                 characters kept of what others and oneself said; 0: all
 *       temperature, top_p, max_tokens
 *   edges:                         the first that holds is taken; none: the item is done
 *     - {from: first, to: first, when: round < rounds and not agreed}
 *   decide: {vote: majority, over: last | all}   or {judge: NODE}, or {text: NODE}: its words
 *
 * Templates see: question, choices, lang, words, round (from 1), rounds, agents (how many), agreed,
 * me {name, role, system, number}, own {text, answer} or none, others [{number, text, answer}] in
 * an order drawn per item and without names, transcript [{name, role, number, round, node, text,
 * answer}], candidates (the answers given so far), given (what the caller has to say).
 */
#ifndef SHOAL_WORKFLOW_H
#define SHOAL_WORKFLOW_H

#include "swarm/swarm.h"

struct grader; /* grade/grade.h */
struct workflow;
/* A built-in by its name, else a file. */
struct workflow *workflow_open(const char *name, struct error *err);
struct workflow *workflow_parse(const char *text, size_t len, const char *path, struct error *err);
void workflow_free(struct workflow *w);
const char *workflow_name(const struct workflow *w);
const char *workflow_about(const struct workflow *w);
int workflow_rounds(const struct workflow *w);
const struct vote *workflow_vote(const struct workflow *w);
const char *workflow_role(const struct workflow *w, int agent); /* "" without roles */
int workflow_n_roles(const struct workflow *w);
/* Built-in i's name and text; NULL at the end. */
const char *workflow_builtin(int i, const char **text);

/* running */

struct utterance {
    int node, agent, round; /* round from 0 */
    char *text;
    int answer;       /* of the talk's candidates; -1: none */
    float confidence; /* probability of the answer: among choices; of free text that of the tokens
                         that say it, given what stands before them; 1 where the asker gives none */
    float prob[EVAL_MAX_CHOICES]; /* of an item's choices, in candidates' order */
    int32_t n_prefilled, n_generated;
    bool truncated;
    const char *failed;
};
enum workflow_stop_reason { WORKFLOW_STOP_ROUNDS, WORKFLOW_STOP_CONSENSUS, WORKFLOW_STOP_BUDGET, WORKFLOW_STOP_NO_ANSWER };
struct transcript { /* of an item */
    struct utterance *v;
    int n;
    char **candidates; /* the item's choices, or the answers in the order they were first given */
    int n_candidates;
    int answer; /* of the candidates; -1: nobody gave one */
    int final;  /* the utterance that is the result, of a workflow that ends in words; -1: none */
    double *scores; /* [n_candidates] of the vote */
    uint8_t *right; /* [n_candidates] whether each is right, where the item knows */
    int rounds;     /* that were spoken */
    enum workflow_stop_reason ending;
};
struct workflow_options {
    int rounds; /* at most; 0: the workflow's own */
    bool working;
    float temperature;       /* below 0: the nodes' own */
    int32_t max_tokens;      /* 0: the nodes' own */
    const struct vote *vote; /* NULL: the workflow's own */
    /* Of items without choices: finds the answer in what was said and tells which are one. NULL:
     * what follows "answer:", compared but for case and white space. */
    const struct grader *grader;
    const json_t *given;   /* an object for templates; may be NULL */
    double seconds;        /* 0: the workflow's own */
    double (*clock)(void); /* that counts them; NULL: clock_now */
    uint64_t seed;
    /* After a step of an item: what was said from utterance `from` on is new, and answer, scores
     * and right are as if it ended here. May be NULL. */
    void (*heard)(void *ctx, const struct transcript *talk, int item, int from);
    void *heard_ctx;
};
/* talks [n_items] are zeroed by the caller and released with transcript_release, also after an
 * error. Errors are the asker's, or a template's that names node and line. */
int workflow_run(const struct workflow *w, const struct llm_client *asker, const struct agent *team,
                 int n_agents, const struct task_item *items, int n_items,
                 const struct workflow_options *o, struct transcript *talks, struct progress *p,
                 struct error *err);
struct agent_answer utterance_answer(const struct utterance *u);
void transcript_release(struct transcript *o);

#endif
