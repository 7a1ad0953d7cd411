/*
 * report: a debate over a set of questions and everything it is measured against, as one JSON
 * object; the same as a table for a terminal and as part of a page.
 *
 * {name, n, protocol, rounds, detectable, rows: [{name, kind, acc, lo, hi, calls, prefilled,
 * generated}], comparisons: [{a, b, diff, lo, hi, p, p_holm}], by_round: [{round, voted, agreed,
 * flips_good, flips_bad, open, changed, conformed}], credit: {game, method, agents: [{name,
 * shapley, banzhaf, leave_one_out}], sampling_error: [{samples, shapley, banzhaf}]}, calibration:
 * [{name, ece, ece_fitted, temperature}], cost, endings, talks}; an interval is [value, low, high].
 * Kinds: solo, vote (after the first round), debate (what was decided), oracle, whole (where
 * evidence is split: an agent that sees all of it), samples.
 */
#ifndef SHOAL_SWARM_REPORT_H
#define SHOAL_SWARM_REPORT_H

#include "swarm/workflow.h"

struct debate_report_options {
    const char *name;
    int samples; /* of the best agent's self-consistency, at most; 0: none */
    float temperature;
    int32_t max_tokens;              /* of a sample */
    bool credit_debate, credit_none; /* else the game of the first vote */
    int shown;                       /* talks that are kept */
};
/* Runs the debate and what it is compared with; NULL on failure. */
json_t *debate_report_make(const struct llm_client *a, const struct agent *team, int n_agents,
                    const struct task_item *items, int n_items, const struct debate_options *o,
                    const struct debate_report_options *w, struct progress *p, struct error *err);
void debate_report_print(const json_t *r, FILE *f);
void debate_report_html(const json_t *r, struct buf *page);

/* An utterance of a talk: {name, round, text, answer, confidence, truncated, failed}; and how the
 * vote stands: {answer: score}. */
json_t *utterance_json(const struct transcript *o, const struct agent *team, int i);
json_t *transcript_scores_json(const struct transcript *o);
/* What was said about an item: {question, said: [utterances], answer, ending, scores}; and as a
 * conversation on a page. */
json_t *debate_transcript_json(const struct debate *d, const struct agent *team, const struct task_item *it,
                    int item);
void debate_transcript_html(const json_t *talk, struct buf *page);

#endif
