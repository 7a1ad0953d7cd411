/*
 * team: who answers together, and how — one struct, filled from a file or from a command's flags.
 *
 *   name: careful                  what tables call it; without one, what the file is called
 *   about: What it is for.
 *   protocol: brief                a built-in workflow, or a file from where this one is (brief)
 *   rounds: 2                      at most; without it the protocol's own, and so for vote,
 *                                  temperature and max_tokens
 *   working: false                 think before one of given choices is named (true)
 *   agents:                        1 to TEAM_MAX of them; roles go by their order
 *     - name: doubter              draws go by it; without one it is the adapter's
 *       adapter: adapters/critic   a PEFT directory or GGUF file from where this one is, hf:…, or
 *                                  base (base). A list is a mix: [adapters/a=0.7, adapters/b=0.3]
 *       system: You doubt.         its persona
 *       role: judge                of the protocol's, instead of its place's
 *       temperature: 0.3           instead of the protocol's
 *
 * Reading a team opens its protocol and sees that its adapters are there; team_load_adapters loads them.
 * Nothing is written after that: any thread.
 */
#ifndef SHOAL_TEAM_H
#define SHOAL_TEAM_H

#include "eval/evaluate.h"
#include "swarm/workflow.h"

struct team {
    char *name, *about;
    /* `workflow` is the team's own; rounds and vote are what they stand at; seed and grader are
     * the caller's to set, as is anything that its flags say instead. */
    struct debate_options options;
    struct agent v[TEAM_MAX];
    int n;
    struct strings adapters; /* all that its agents stand on, "base" too: what a plan counts */

    /* the team's */
    struct workflow *workflow;
    struct strings texts;
    struct weighted_adapter *terms;  /* [adapters.n] */
    int first[TEAM_MAX + 1]; /* agent i stands on adapters first[i] … first[i + 1] - 1 */
};
/* Released with team_release also after an error. */
int team_read(struct team *t, const char *path, struct error *err);
int team_parse(struct team *t, const char *text, size_t len, const char *path, struct error *err);
/* From flags: an adapter (or "base") an agent, and system prompts for the first of them. */
int team_from_flags(struct team *t, const char *protocol, const struct strings *agents,
              const struct strings *personas, struct error *err);
void team_release(struct team *t);

/* Loads what agents stand on: `open` returns an adapter that lives as long as the team, or NULL. */
typedef struct adapter *team_adapter_open_fn(void *ctx, const char *path, struct error *err);
int team_load_adapters(struct team *t, team_adapter_open_fn *open, void *ctx, struct error *err);

/* team_solver.c: a team on the questions of a bank. */

/* Options for a bank: of generated answers its grader, and its tokens where none are said. */
int debate_options_for_bank(const struct eval_task *b, const struct debate_options *o, struct debate_options *out,
               struct error *err);
/* What a call of a debate on these banks may be long: on families a little, else what the model
 * reads, at most 4096. */
int32_t team_max_tokens(const struct eval_task *banks, int n, int32_t max_seq_len);
/* As a contestant: an outcome's `prob` is the share of agents that hold the answer in the end. */
struct team_solver {
    const struct team *team; /* loaded */
    const struct llm_client *asker;
    uint64_t seed;
};
int team_solver_answer(void *player, const struct eval_task *b, struct eval_result *out, struct eval_cost *cost,
                  struct progress *p, int64_t done, struct error *err);

#endif
