/*
 * debate_report: the report of a debate over many questions. It converts the measurements to one
 * JSON object with rows, comparisons and statistics, and prints this object as a table and as HTML.
 *
 * All comparisons use the same items. The self-consistency baseline samples the agent with the
 * highest first-round accuracy. This agent is selected on the same items, which favours the
 * baseline.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BASELINES = 6, CONTRIBUTION_SAMPLES = 200, SAMPLING_SEEDS = 8 };

static json_t *interval_json(struct stats_interval v) {
    return json_pack("[f,f,f]", v.value, v.lo, v.hi);
}

static int64_t count_correct(const uint8_t *right, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += right[i];
    return sum;
}

/* Adds the cost of the first `rounds` rounds of an item. agent -1: of all agents; else of this
 * agent. */
static void item_cost_add(const struct debate *d, int item, int rounds, int agent,
                          struct report_cost *c) {
    for (int u = 0; u < d->transcripts[item].n; u++) {
        const struct utterance *v = &d->transcripts[item].v[u];
        if (v->round >= rounds || (agent >= 0 && v->agent != agent)) continue;
        c->calls++;
        c->prefilled += v->n_prefilled;
        c->generated += v->n_generated;
    }
}

static struct report_cost cost_of(const struct debate *d, int rounds, int agent) {
    struct report_cost c = {0};
    for (int i = 0; i < d->n_items; i++) item_cost_add(d, i, rounds, agent, &c);
    return c;
}

/* building */

/* A report under construction. It owns d, route, rows and baselines[].right; the rest is borrowed.
 */
struct report_builder {
    const struct llm_client *llm_client;
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    int n_items;
    const struct debate_options *o;
    const struct debate_report_options *report_options;
    struct debate d;
    int *route; /* [n_items] the agent that the router chooses; NULL without a router */
    json_t *rows;
    struct { /* results that the debate is compared with */
        char name[96];
        uint8_t *right; /* [n_items] */
    } baselines[MAX_BASELINES];
    int n_baselines;
    float sample_temperature;
};

void report_row_add(json_t *rows, const char *name, const char *kind, const uint8_t *right,
                    int n_items, struct report_cost c) {
    struct stats_interval ci = stats_wilson(count_correct(right, n_items), n_items);
    json_array_append_new(rows, json_pack("{s:s,s:s,s:f,s:f,s:f,s:I,s:I,s:I}", "name", name, "kind",
                                          kind, "acc", ci.value, "lo", ci.lo, "hi", ci.hi, "calls",
                                          (json_int_t)c.calls, "prefilled", (json_int_t)c.prefilled,
                                          "generated", (json_int_t)c.generated));
}

/* Cost of the decisions: with a router, of the agents that it chooses. */
static struct report_cost decision_cost(const struct report_builder *m) {
    struct report_cost c = {0};
    for (int i = 0; i < m->n_items; i++)
        item_cost_add(&m->d, i, m->d.rounds, m->route ? m->route[i] : -1, &c);
    return c;
}

static const char *decision_name(const struct report_builder *m) {
    return m->route ? "router" : "debate";
}

/* Makes the first answers of the agents that the router chooses the decisions. */
static void router_apply(struct report_builder *m, const struct router *router) {
    struct debate *d = &m->d;
    m->route = xcalloc((size_t)m->n_items + 1, sizeof *m->route);
    for (int i = 0; i < m->n_items; i++) {
        m->route[i] = router_route(router, task_item_question(&m->items[i], -1), NULL);
        size_t first = (size_t)m->route[i] * (size_t)m->n_items + (size_t)i;
        d->transcripts[i].answer = d->answers[first].choice;
        d->decision_correct[i] = d->first_correct[first];
    }
}

static void row_add(struct report_builder *m, const char *name, const char *kind,
                    const uint8_t *right, struct report_cost c) {
    report_row_add(m->rows, name, kind, right, m->n_items, c);
}

static void baseline_add(struct report_builder *m, const char *name, const uint8_t *right) {
    CHECK(m->n_baselines < MAX_BASELINES);
    snprintf(m->baselines[m->n_baselines].name, sizeof m->baselines[0].name, "%s", name);
    m->baselines[m->n_baselines].right = xmalloc((size_t)MAX(m->n_items, 1));
    memcpy(m->baselines[m->n_baselines++].right, right, (size_t)m->n_items);
}

static int best_single_agent(const struct report_builder *m) {
    int best = 0;
    for (int a = 1; a < m->n_agents; a++)
        if (count_correct(m->d.first_correct + (size_t)a * (size_t)m->n_items, m->n_items) >
            count_correct(m->d.first_correct + (size_t)best * (size_t)m->n_items, m->n_items))
            best = a;
    return best;
}

/* Adds the rows of the debate, and to r the share of questions on which every agent errs at first.
 * No vote among these answers, and no choice of one agent per question, is right on them. */
static void result_rows_add(struct report_builder *m, json_t *r) {
    const struct debate *d = &m->d;
    size_t n = (size_t)m->n_items;
    int best = best_single_agent(m);
    uint8_t *oracle = xmalloc(n + 1);
    for (int a = 0; a < m->n_agents; a++)
        row_add(m, m->team[a].name, "solo", d->first_correct + (size_t)a * n, cost_of(d, 1, a));
    row_add(m, "first-round vote", "vote", d->vote_correct, cost_of(d, 1, -1));
    row_add(m, decision_name(m), decision_name(m), d->decision_correct, decision_cost(m));
    debate_oracle(d, oracle);
    row_add(m, "oracle", "oracle", oracle, cost_of(d, 1, -1));
    json_object_set_new(
        r, "all_wrong",
        json_real(1 - (double)count_correct(oracle, m->n_items) / MAX(m->n_items, 1)));
    baseline_add(m, "first-round vote", d->vote_correct);
    baseline_add(m, m->team[best].name, d->first_correct + (size_t)best * n);
    free(oracle);
}

/* The number of samples, 1 to max_samples, whose cost is closest to `tokens`. */
static int samples_for_tokens(int64_t tokens, int64_t tokens_per_sample, int max_samples) {
    return (int)MAX(
        1, MIN((int64_t)max_samples, (tokens + tokens_per_sample / 2) / MAX(tokens_per_sample, 1)));
}

/* Corrects the total of the progress when a part of the report begins that makes n calls. */
static void progress_correct(struct progress *p, int64_t expected, int64_t n) {
    if (p && p->total > 0) p->total += n - expected;
}

static bool samples_are_taken(const struct report_builder *m) {
    bool has_reasoning = m->o->chain_of_thought || (m->n_items > 0 && !m->items[0].n_choices);
    return m->report_options->samples > 0 && has_reasoning;
}

/* The calls of self-consistency if its samples are as long as the turns of the debate. */
static int64_t expected_sample_calls(const struct report_builder *m, int64_t debate_calls) {
    int64_t k = debate_calls / MAX(m->n_items, 1);
    return samples_are_taken(m) ? m->n_items * MIN(k, (int64_t)m->report_options->samples) : 0;
}

/* The calls of the debates of all coalitions, if the values are exact. */
static int64_t coalition_calls(const struct report_builder *m) {
    struct agent team[TEAM_MAX];
    int64_t calls = 0;
    if (m->report_options->credit_none || !m->report_options->credit_debate ||
        m->n_agents > GAME_MAX_EXACT_AGENTS)
        return 0;
    for (uint32_t mask = 1; mask < 1u << m->n_agents; mask++) {
        int n = 0;
        for (int a = 0; a < m->n_agents; a++)
            if (mask >> a & 1) team[n++] = m->team[a];
        calls += debate_max_calls(team, n, m->items, m->n_items, m->o);
    }
    return calls;
}

/* The team without its adapters. Returns whether an agent lost one; *prompted: whether agents still
 * differ from the base model, by a system prompt. */
static bool team_without_adapters(const struct report_builder *m, struct agent bare[TEAM_MAX],
                                  bool *prompted) {
    bool lost = false;
    *prompted = false;
    for (int i = 0; i < m->n_agents; i++) {
        bare[i] = m->team[i];
        lost |= agent_has_adapter(&bare[i]);
        *prompted |= bare[i].system && *bare[i].system;
        bare[i].adapter = NULL;
        bare[i].mix = NULL;
        bare[i].n_mix = 0;
    }
    return lost;
}

/* Whether the rows without adapters are measured: not for split evidence, of which one agent sees
 * only a part. */
static bool base_is_measured(const struct report_builder *m) {
    return m->report_options->base && m->n_items > 0 && !m->items[0].n_views;
}

static int64_t expected_base_calls(const struct report_builder *m, int64_t debate_calls) {
    struct agent bare[TEAM_MAX];
    bool prompted;
    if (!base_is_measured(m) || !team_without_adapters(m, bare, &prompted)) return 0;
    return m->n_items + (prompted ? debate_calls : 0);
}

/* The calls that the report will probably make. */
static int64_t expected_calls(const struct report_builder *m) {
    int64_t debate_calls = debate_max_calls(m->team, m->n_agents, m->items, m->n_items, m->o);
    bool splits = m->n_items > 0 && m->items[0].n_views;
    return debate_calls + expected_base_calls(m, debate_calls) + (splits ? m->n_items : 0) +
           expected_sample_calls(m, debate_calls) + coalition_calls(m) +
           sample_tuning_calls(m->report_options->n_tuning) +
           (m->report_options->check
                ? checked_report_max_calls(m->n_items, m->report_options->check_samples)
                : 0);
}

/* Baseline for split evidence: the best single agent answers the question with all evidence. */
static int baseline_full_evidence(struct report_builder *m, struct progress *p, struct error *err) {
    const struct agent *best = &m->team[best_single_agent(m)];
    struct debate_options o = *m->o;
    struct task_item *full_items = xcalloc((size_t)m->n_items + 1, sizeof *full_items);
    struct debate d;
    o.rounds = 1;
    for (int i = 0; i < m->n_items; i++) {
        full_items[i] = m->items[i]; // texts are borrowed
        full_items[i].n_views = 0;
    }
    int rc = debate_run(m->llm_client, best, 1, full_items, m->n_items, &o, &d, p, err);
    if (rc == OK) {
        char name[96];
        snprintf(name, sizeof name, "%.60s, with all evidence", best->name);
        row_add(m, name, "whole", d.first_correct, cost_of(&d, 1, -1));
        baseline_add(m, name, d.first_correct);
    }
    debate_release(&d);
    free(full_items);
    return rc;
}

/* What the adapters add: the base model, which answers once, and, if the agents have system
 * prompts, a debate of the same team without adapters. Greedy answers of several base models
 * without prompts would be equal. */
static int baseline_without_adapters(struct report_builder *m, struct progress *p,
                                     struct error *err) {
    struct agent bare[TEAM_MAX];
    const struct agent base = {.name = "base"};
    struct debate_options once = *m->o;
    struct debate d;
    bool prompted;
    if (!base_is_measured(m) || !team_without_adapters(m, bare, &prompted)) return OK;
    once.rounds = 1;
    once.workflow = NULL; // a protocol may need more agents
    int rc = debate_run(m->llm_client, &base, 1, m->items, m->n_items, &once, &d, p, err);
    if (rc == OK) row_add(m, "base", "base", d.first_correct, cost_of(&d, 1, -1));
    debate_release(&d);
    if (rc != OK || !prompted) return rc;
    rc = debate_run(m->llm_client, bare, m->n_agents, m->items, m->n_items, m->o, &d, p, err);
    if (rc == OK) {
        row_add(m, "debate without adapters", "prompted", d.decision_correct,
                cost_of(&d, d.rounds, -1));
        baseline_add(m, "debate without adapters", d.decision_correct);
    }
    debate_release(&d);
    return rc;
}

/* Tunes the temperature of the samples, if there are items for it, and adds the result to r. */
static int sample_temperature_tune(struct report_builder *m, json_t *r, struct progress *p,
                                   struct error *err) {
    const struct debate_report_options *w = m->report_options;
    const struct sample_tuning_options o = {.client = m->llm_client,
                                            .agent = &m->team[best_single_agent(m)],
                                            .items = w->tuning_items,
                                            .n_items = w->n_tuning,
                                            .chain_of_thought = m->o->chain_of_thought,
                                            .max_tokens = w->max_tokens,
                                            .seed = m->o->seed,
                                            .grader = w->tuning_grader};
    m->sample_temperature = w->temperature;
    if (w->n_tuning == 0) return OK;
    json_t *v = sample_tuning_run(&o, p, err);
    if (!v) return err->code;
    m->sample_temperature = (float)json_get_number(v, "temperature");
    json_object_set_new(r, "sample_temperature", v);
    return OK;
}

/* Self-consistency of the best single agent. Appends the accuracy for 1, 2, 4, … samples to
 * `curve`. Adds a row for the number of samples that costs as many generated tokens as the debate,
 * and a row for the number that costs as many tokens in total. */
static int baseline_self_consistency(struct report_builder *m, struct progress *p, json_t *curve,
                                     struct error *err) {
    int best = best_single_agent(m), max_samples = m->report_options->samples;
    struct report_cost debate_cost = decision_cost(m), first_answer_cost = cost_of(&m->d, 1, best);
    int n_equal_cost[2] = {
        samples_for_tokens(debate_cost.generated, first_answer_cost.generated, max_samples),
        samples_for_tokens(debate_cost.generated + debate_cost.prefilled,
                           first_answer_cost.generated + first_answer_cost.prefilled, max_samples)};
    static const char *const token_kinds[] = {"generated", "total"};
    struct self_consistency s;
    struct report_cost c = {0};
    int k = MAX(n_equal_cost[0], n_equal_cost[1]);
    progress_correct(p,
                     expected_sample_calls(
                         m, debate_max_calls(m->team, m->n_agents, m->items, m->n_items, m->o)),
                     (int64_t)m->n_items * k);
    int rc = self_consistency_sample(
        m->llm_client, &m->team[best], m->items, m->n_items, k, m->o->chain_of_thought,
        m->sample_temperature, m->report_options->max_tokens, m->o->seed, m->o->grader, &s, p, err);
    uint8_t *right = xmalloc((size_t)m->n_items + 1);
    for (int i = 1; rc == OK && i <= k; i++) {
        c.calls += m->n_items;
        c.prefilled += s.prefilled[i - 1];
        c.generated += s.generated[i - 1];
        bool is_curve_point = (i & (i - 1)) == 0 || i == k;
        if (is_curve_point || i == n_equal_cost[0] || i == n_equal_cost[1])
            self_consistency_vote(&s, m->items, i, right);
        if (is_curve_point)
            json_array_append_new(
                curve, json_pack("[i,f]", i,
                                 stats_wilson(count_correct(right, m->n_items), m->n_items).value));
        for (int e = 0; e < 2; e++) {
            char name[96];
            if (i != n_equal_cost[e]) continue;
            snprintf(name, sizeof name, "%.40s@%d (equal %s tokens)", m->team[best].name, i,
                     token_kinds[e]);
            row_add(m, name, "samples", right, c);
            baseline_add(m, name, right);
        }
    }
    free(right);
    self_consistency_release(&s);
    return rc;
}

/* The rows and the result of the check, if there is one. */
static int checked_report_add(struct report_builder *m, json_t *r, struct progress *p,
                              struct error *err) {
    const struct debate_report_options *w = m->report_options;
    const struct checked_report_options o = {.client = m->llm_client,
                                             .team = m->team,
                                             .n_agents = m->n_agents,
                                             .best = best_single_agent(m),
                                             .items = m->items,
                                             .n_items = m->n_items,
                                             .samples = {.check = w->check,
                                                         .max_samples = w->check_samples,
                                                         .passes = w->check_passes,
                                                         .chain_of_thought = m->o->chain_of_thought,
                                                         .temperature = m->sample_temperature,
                                                         .max_tokens = w->max_tokens,
                                                         .seed = m->o->seed,
                                                         .grader = m->o->grader},
                                             .questioner = w->questioner};
    if (!w->check) return OK;
    json_t *v = checked_report_run(&o, m->rows, p, err);
    if (!v) return err->code;
    json_object_set_new(r, "check", v);
    return OK;
}

static json_t *comparisons_json(const struct report_builder *m) {
    struct stats_pair pairs[MAX_BASELINES];
    for (int i = 0; i < m->n_baselines; i++)
        pairs[i] = (struct stats_pair){decision_name(m), m->baselines[i].name,
                                       m->d.decision_correct, m->baselines[i].right};
    return stats_pairs_json(pairs, m->n_baselines, m->n_items);
}

static json_t *rounds_json(const struct report_builder *m) {
    json_t *list = json_array();
    for (int r = 0; r < m->d.rounds; r++) {
        struct debate_round_stats f;
        debate_round_stats(&m->d, m->items, r, &f);
        json_array_append_new(
            list, json_pack("{s:i,s:f,s:f,s:I,s:I,s:I,s:I,s:I}", "round", r, "voted",
                            (double)f.correct_votes / MAX(m->n_items, 1), "agreed",
                            (double)f.consensus / MAX(m->n_items, 1), "flips_good",
                            (json_int_t)f.flips_good, "flips_bad", (json_int_t)f.flips_bad, "open",
                            (json_int_t)f.in_minority, "changed", (json_int_t)f.minority_changed,
                            "conformed", (json_int_t)f.switched_to_majority));
    }
    return list;
}

struct solved_game { /* a game whose coalitions have all been played */
    const uint8_t *right;
    int n_items;
};

static int solved_game_play(void *ctx, uint32_t mask, uint8_t *right, struct error *err) {
    const struct solved_game *k = ctx;
    (void)err;
    memcpy(right, k->right + (size_t)mask * (size_t)k->n_items, (size_t)k->n_items);
    return OK;
}

/* The error of sampled Shapley and Banzhaf values compared with the exact ones, as root mean square
 * over agents and seeds, for 4, 16 and 64 samples. */
static json_t *sampling_json(const struct report_builder *m, const uint8_t *right,
                             const struct contribution *exact) {
    struct solved_game solved = {right, m->n_items};
    const struct coalition_game g = {&solved, solved_game_play, m->n_agents, m->n_items};
    struct error err;
    json_t *list = json_array();
    for (int samples = 4; samples <= 64; samples *= 4) {
        double rmse[2] = {0};
        for (uint64_t seed = 0; seed < SAMPLING_SEEDS; seed++) {
            struct contribution sampled[TEAM_MAX];
            CHECK(contribution_sampled(&g, samples, m->o->seed + seed, sampled, &err) == OK);
            for (int a = 0; a < m->n_agents; a++) {
                double deviation[2] = {sampled[a].shapley.value - exact[a].shapley.value,
                                       sampled[a].banzhaf.value - exact[a].banzhaf.value};
                for (int i = 0; i < 2; i++) rmse[i] += deviation[i] * deviation[i];
            }
        }
        for (int i = 0; i < 2; i++) rmse[i] = sqrt(rmse[i] / (SAMPLING_SEEDS * m->n_agents));
        json_array_append_new(list, json_pack("{s:i,s:f,s:f}", "samples", samples, "shapley",
                                              rmse[0], "banzhaf", rmse[1]));
    }
    return list;
}

static int contributions_measure(struct report_builder *m, struct progress *p, json_t **out,
                                 struct error *err) {
    struct vote_game v = {m->o->vote,  m->d.answers, m->items,
                          m->n_agents, m->n_items,   m->d.transcripts};
    struct debate_game g = {m->llm_client, m->team, m->n_agents, m->items, m->n_items, m->o, p};
    struct coalition_game game = m->report_options->credit_debate ? debate_game(&g) : vote_game(&v);
    struct contribution values[TEAM_MAX];
    bool exact = m->n_agents <= GAME_MAX_EXACT_AGENTS;
    json_t *errors = NULL;
    int rc = OK;
    if (exact) {
        uint8_t *right = xmalloc(((size_t)1 << m->n_agents) * (size_t)MAX(m->n_items, 1));
        rc = coalition_game_play_all(&game, right, err);
        if (rc == OK) {
            contribution_exact(right, m->n_agents, m->n_items, values);
            errors = sampling_json(m, right, values);
        }
        free(right);
    } else {
        rc = contribution_sampled(&game, CONTRIBUTION_SAMPLES, m->o->seed, values, err);
    }
    json_t *agents = json_array();
    for (int a = 0; rc == OK && a < m->n_agents; a++)
        json_array_append_new(agents,
                              json_pack("{s:s,s:o,s:o,s:o}", "name", m->team[a].name, "shapley",
                                        interval_json(values[a].shapley), "banzhaf",
                                        interval_json(values[a].banzhaf), "leave_one_out",
                                        interval_json(values[a].leave_one_out)));
    *out = json_pack("{s:s,s:s,s:o,s:o}", "game",
                     m->report_options->credit_debate ? "debate" : "first-round vote", "method",
                     exact ? "exact" : "sampled", "agents", agents, "sampling_error",
                     errors ? errors : json_array());
    return rc;
}

static json_t *calibration_json(const struct report_builder *m) {
    json_t *list = json_array();
    for (int a = 0; a < m->n_agents; a++) {
        struct debate_calibration c = debate_calibration(&m->d, m->items, a);
        json_array_append_new(list,
                              json_pack("{s:s,s:f,s:f,s:f}", "name", m->team[a].name, "ece", c.ece,
                                        "ece_fitted", c.ece_fitted, "temperature", c.temperature));
    }
    return list;
}

/* by enum workflow_stop_reason */
static const char *const stop_reason_names[] = {"rounds", "agreed", "budget", "nobody"};

static json_t *stop_reasons_json(const struct debate *d) {
    json_int_t n[ARRAY_LEN(stop_reason_names)] = {0};
    json_t *v = json_object();
    for (int i = 0; i < d->n_items; i++) n[d->transcripts[i].stop_reason]++;
    for (size_t i = 0; i < ARRAY_LEN(stop_reason_names); i++)
        json_object_set_new(v, stop_reason_names[i], json_integer(n[i]));
    return v;
}

json_t *utterance_json(const struct transcript *o, const struct agent *team, int i) {
    const struct utterance *u = &o->v[i];
    json_t *line =
        json_pack("{s:s,s:i,s:s}", "name", team[u->agent].name, "round", u->round, "text", u->text);
    if (u->answer >= 0) {
        json_object_set_new(line, "answer", json_string(o->candidates[u->answer]));
        json_object_set_new(line, "confidence", json_real((double)u->confidence));
    }
    if (u->truncated) json_object_set_new(line, "truncated", json_true());
    if (u->failed) json_object_set_new(line, "failed", json_string(u->failed));
    return line;
}

json_t *transcript_scores_json(const struct transcript *o) {
    json_t *scores = json_object();
    for (int c = 0; c < o->n_candidates; c++)
        json_object_set_new(scores, o->candidates[c], json_real(o->scores[c]));
    return scores;
}

const char *transcript_reply(const struct transcript *t) {
    if (t->final_utterance >= 0) return t->v[t->final_utterance].text;
    if (t->answer >= 0) return t->candidates[t->answer];
    for (int i = t->n - 1; i >= 0; i--)
        if (t->v[i].text && *t->v[i].text) return t->v[i].text;
    return "";
}

json_t *debate_transcript_json(const struct debate *d, const struct agent *team,
                               const struct task_item *it, int item) {
    const struct transcript *o = &d->transcripts[item];
    json_t *utterances = json_array();
    for (int i = 0; i < o->n; i++) json_array_append_new(utterances, utterance_json(o, team, i));
    json_t *v = json_pack("{s:s,s:o,s:o,s:s,s:i}", "question", it->question, "said", utterances,
                          "scores", transcript_scores_json(o), "ending",
                          stop_reason_names[o->stop_reason], "rounds", o->rounds);
    if (o->answer >= 0) json_object_set_new(v, "answer", json_string(o->candidates[o->answer]));
    if (it->n_choices && it->correct >= 0)
        json_object_set_new(v, "right", json_string(it->choices[it->correct]));
    if (it->gold) json_object_set_new(v, "right", json_string(it->gold));
    return v;
}

/* Prompt and generated tokens. */
static double row_tokens(const json_t *row) {
    return json_get_number(row, "prefilled") + json_get_number(row, "generated");
}

/* Sets "pareto" of each row: whether no other row is more accurate for at most as many tokens, or
 * as accurate for fewer. The oracle knows the right answers and is left out. */
static void rows_mark_pareto(json_t *rows) {
    size_t i, k;
    json_t *row, *other;
    json_array_foreach (rows, i, row) {
        bool best = strcmp(json_get_string(row, "kind"), "oracle") != 0;
        json_array_foreach (rows, k, other) {
            double more = json_get_number(other, "acc") - json_get_number(row, "acc"),
                   saved = row_tokens(row) - row_tokens(other);
            if (k != i && strcmp(json_get_string(other, "kind"), "oracle") != 0)
                best &= !(more >= 0 && saved >= 0 && (more > 0 || saved > 0));
        }
        json_object_set_new(row, "pareto", json_boolean(best));
    }
}

static int report_fill(struct report_builder *m, json_t *r, struct progress *p, struct error *err) {
    const struct debate *d = &m->d;
    json_t *transcripts = json_array(), *credit = NULL, *curve = json_array();
    int rc = OK;
    result_rows_add(m, r);
    if (m->n_items > 0 && m->items[0].n_views) rc = baseline_full_evidence(m, p, err);
    if (rc == OK) rc = baseline_without_adapters(m, p, err);
    if (rc == OK) rc = sample_temperature_tune(m, r, p, err);
    if (rc == OK && samples_are_taken(m)) rc = baseline_self_consistency(m, p, curve, err);
    if (rc == OK) rc = checked_report_add(m, r, p, err);
    if (rc == OK && !m->report_options->credit_none) rc = contributions_measure(m, p, &credit, err);
    rows_mark_pareto(m->rows);
    for (int i = 0; i < d->n_items && i < m->report_options->n_transcripts; i++)
        json_array_append_new(transcripts, debate_transcript_json(d, m->team, &m->items[i], i));
    json_object_set_new(r, "comparisons", comparisons_json(m));
    json_object_set_new(r, "by_round", rounds_json(m));
    json_object_set_new(r, "self_consistency", curve);
    if (credit) json_object_set_new(r, "credit", credit);
    json_object_set_new(r, "calibration", calibration_json(m));
    json_object_set_new(r, "endings", stop_reasons_json(d));
    json_object_set_new(r, "cost",
                        json_pack("{s:I,s:I,s:I,s:I,s:I}", "calls", (json_int_t)d->calls,
                                  "prefilled", (json_int_t)d->prefilled, "generated",
                                  (json_int_t)d->generated, "truncated", (json_int_t)d->truncated,
                                  "failed", (json_int_t)d->failed));
    json_object_set_new(r, "talks", transcripts);
    return rc;
}

json_t *debate_report_run(const struct llm_client *client, const struct agent *team, int n_agents,
                          const struct task_item *items, int n_items,
                          const struct debate_options *o,
                          const struct debate_report_options *report_options, struct progress *p,
                          struct error *err) {
    /* All agents answer, so that each has a row; the router then chooses among the answers. */
    struct debate_options all_agents = *o;
    all_agents.router = NULL;
    struct report_builder m = {.llm_client = client,
                               .team = team,
                               .n_agents = n_agents,
                               .items = items,
                               .n_items = n_items,
                               .o = &all_agents,
                               .report_options = report_options,
                               .rows = json_array()};
    json_t *r = json_pack("{s:s,s:i,s:s,s:i,s:s,s:f,s:O}", "name", report_options->name, "n",
                          n_items, "protocol", o->workflow ? workflow_name(o->workflow) : "brief",
                          "rounds", o->rounds, "vote", o->vote->name, "detectable",
                          stats_min_detectable_effect(n_items, 0.2), "rows", m.rows);
    if (p) progress_start(p, report_options->name, expected_calls(&m));
    int rc = debate_run(client, team, n_agents, items, n_items, &all_agents, &m.d, p, err);
    if (rc == OK && o->router) router_apply(&m, o->router);
    if (rc == OK) rc = report_fill(&m, r, p, err);
    debate_release(&m.d);
    free(m.route);
    for (int i = 0; i < m.n_baselines; i++) free(m.baselines[i].right);
    json_decref(m.rows);
    if (rc == OK) return r;
    json_decref(r);
    return NULL;
}

/* output */

static double get_real(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

static const char *get_text(const json_t *v, const char *key) {
    const char *s = json_string_value(json_object_get(v, key));
    return s ? s : "";
}

static json_int_t get_int(const json_t *v, const char *key) {
    return json_integer_value(json_object_get(v, key));
}

void report_row_print(const json_t *v, FILE *f) {
    const json_t *retained = json_object_get(v, "retained");
    fprintf(f, "  %-*s %6.2f %%  (%.2f – %.2f)  %9lld calls %11lld prompt %10lld generated",
            utf8_field_width(get_text(v, "name"), 44), get_text(v, "name"),
            100 * get_real(v, "acc"), 100 * get_real(v, "lo"), 100 * get_real(v, "hi"),
            (long long)get_int(v, "calls"), (long long)get_int(v, "prefilled"),
            (long long)get_int(v, "generated"));
    if (retained) fprintf(f, ", other tasks %.1f %%", 100 * json_number_value(retained));
    fprintf(f, "\n");
}

void report_comparison_print(const json_t *v, FILE *f) {
    const double diff = get_real(v, "diff"), p = get_real(v, "p_holm");
    fprintf(f, "%s against %s: %+.2f (%+.2f … %+.2f), p = %.2g after Holm: %s\n", get_text(v, "a"),
            get_text(v, "b"), 100 * diff, 100 * get_real(v, "lo"), 100 * get_real(v, "hi"), p,
            p >= 0.05  ? "not significant"
            : diff > 0 ? "better"
                       : "worse");
}

static void print_credit(const json_t *credit, FILE *f) {
    size_t i;
    json_t *v;
    if (!credit) return;
    fprintf(f, "worth in the %s (%s), points: Shapley, Banzhaf, leave-one-out\n",
            get_text(credit, "game"), get_text(credit, "method"));
    json_array_foreach (json_object_get(credit, "agents"), i, v) {
        fprintf(f, "  %-*s", utf8_field_width(get_text(v, "name"), 28), get_text(v, "name"));
        static const char *const of[] = {"shapley", "banzhaf", "leave_one_out"};
        for (int k = 0; k < 3; k++) {
            const json_t *x = json_object_get(v, of[k]);
            fprintf(f, " %+6.1f (%+.1f … %+.1f)", 100 * json_number_value(json_array_get(x, 0)),
                    100 * json_number_value(json_array_get(x, 1)),
                    100 * json_number_value(json_array_get(x, 2)));
        }
        fputc('\n', f);
    }
    json_array_foreach (json_object_get(credit, "sampling_error"), i, v)
        fprintf(f, "  of %3lld samples: off by %.2f points (Shapley), %.2f (Banzhaf)\n",
                (long long)get_int(v, "samples"), 100 * get_real(v, "shapley"),
                100 * get_real(v, "banzhaf"));
}

void debate_report_print(const json_t *r, FILE *f) {
    size_t i;
    json_t *v;
    fprintf(f,
            "%s: %lld questions, protocol %s, %lld rounds at most, %s vote; a difference of %.1f "
            "points would be found\n",
            get_text(r, "name"), (long long)get_int(r, "n"), get_text(r, "protocol"),
            (long long)get_int(r, "rounds"), get_text(r, "vote"), 100 * get_real(r, "detectable"));
    json_array_foreach (json_object_get(r, "rows"), i, v) report_row_print(v, f);
    fprintf(f,
            "every agent errs on %.1f %% of the questions: no vote and no choice of an agent is "
            "right on them\n",
            100 * get_real(r, "all_wrong"));
    json_array_foreach (json_object_get(r, "comparisons"), i, v) report_comparison_print(v, f);
    json_array_foreach (json_object_get(r, "by_round"), i, v) {
        if (i == 0) continue;
        fprintf(f,
                "round %d: %lld answers became right, %lld wrong; of %lld against the others' "
                "majority %lld "
                "changed, %lld to it; %.1f %% agree\n",
                (int)i, (long long)get_int(v, "flips_good"), (long long)get_int(v, "flips_bad"),
                (long long)get_int(v, "open"), (long long)get_int(v, "changed"),
                (long long)get_int(v, "conformed"), 100 * get_real(v, "agreed"));
    }
    if ((v = json_object_get(r, "sample_temperature"))) sample_tuning_print(v, f);
    if ((v = json_object_get(r, "check"))) checked_report_print(v, f);
    print_credit(json_object_get(r, "credit"), f);
    json_array_foreach (json_object_get(r, "calibration"), i, v)
        fprintf(f, "calibration of %s: error %.3f, %.3f at temperature %.2f\n", get_text(v, "name"),
                get_real(v, "ece"), get_real(v, "ece_fitted"), get_real(v, "temperature"));
    v = json_object_get(r, "cost");
    if (get_int(v, "failed") + get_int(v, "truncated") > 0)
        fprintf(f, "%lld calls failed, %lld were cut\n", (long long)get_int(v, "failed"),
                (long long)get_int(v, "truncated"));
}

/* pages */

void debate_transcript_html(const json_t *transcript, struct buf *page) {
    size_t i;
    json_t *v;
    buf_puts(page, "<h3>");
    html_escape(page, get_text(transcript, "question"));
    buf_puts(page, "</h3>\n");
    json_array_foreach (json_object_get(transcript, "said"), i, v) {
        buf_printf(page, "<p><b>");
        html_escape(page, get_text(v, "name"));
        buf_printf(page, "</b> (%lld) ", (long long)get_int(v, "round"));
        html_escape(page, *get_text(v, "failed") ? get_text(v, "failed") : get_text(v, "text"));
        if (json_object_get(v, "answer")) {
            buf_puts(page, " → <b>");
            html_escape(page, get_text(v, "answer"));
            buf_printf(page, "</b> %.2f", get_real(v, "confidence"));
        }
        buf_puts(page, "</p>\n");
    }
    buf_puts(page, "<p>Answer: <b>");
    html_escape(page, get_text(transcript, "answer"));
    buf_puts(page, "</b>");
    if (json_object_get(transcript, "right")) {
        buf_puts(page, ", right: <b>");
        html_escape(page, get_text(transcript, "right"));
        buf_puts(page, "</b>");
    }
    buf_puts(page, "</p>\n");
}

/* Plots accuracy against the round (`rounds`: list is by_round) or against the number of samples
 * (list is self_consistency). */
static void page_curve(const json_t *list, const char *label, const char *x_title, bool rounds,
                       struct buf *page) {
    struct curve c = {0};
    size_t i;
    json_t *v;
    json_array_foreach ((json_t *)(uintptr_t)list, i, v) {
        double x = rounds ? (double)i : json_number_value(json_array_get(v, 0)),
               y = rounds ? get_real(v, "voted") : json_number_value(json_array_get(v, 1));
        curve_add(&c, x, 100 * y);
    }
    if (json_array_size(list) > 1) plot_curves(page, label, x_title, &c, NULL, 1);
}

static int by_tokens(const void *a, const void *b) {
    double x = row_tokens(*(json_t *const *)a), y = row_tokens(*(json_t *const *)b);
    return (x > y) - (x < y);
}

/* Plots the accuracy of all rows except the oracle against their tokens. A line joins the Pareto
 * front. */
static void page_cost(const json_t *rows, struct buf *page) {
    enum { MAX_ROWS = 256 };
    json_t *v[MAX_ROWS], *row;
    double x[MAX_ROWS], y[MAX_ROWS];
    struct plot p = {"right, % (line: Pareto front)", "tokens", 0, 0, INFINITY, -INFINITY};
    int n = 0, n_front = 0;
    size_t i;
    json_array_foreach (rows, i, row)
        if (n < MAX_ROWS && strcmp(get_text(row, "kind"), "oracle") != 0) v[n++] = row;
    qsort(v, (size_t)n, sizeof *v, by_tokens);
    for (int k = 0; k < n; k++) {
        p.x1 = fmax(p.x1, row_tokens(v[k]));
        p.y0 = fmin(p.y0, 100 * get_real(v[k], "lo"));
        p.y1 = fmax(p.y1, 100 * get_real(v[k], "hi"));
        if (!json_is_true(json_object_get(v[k], "pareto"))) continue;
        x[n_front] = row_tokens(v[k]);
        y[n_front++] = 100 * get_real(v[k], "acc");
    }
    if (n < 2) return;
    plot_open(page, &p);
    plot_line(page, &p, 0, x, y, n_front);
    for (int k = 0; k < n; k++)
        plot_point(page, &p, k, row_tokens(v[k]), 100 * get_real(v[k], "acc"),
                   100 * get_real(v[k], "lo"), 100 * get_real(v[k], "hi"), get_text(v[k], "name"));
    plot_close(page);
}

void debate_report_html(const json_t *r, struct buf *page) {
    size_t i;
    json_t *v;
    buf_puts(page, "<h2>");
    html_escape(page, get_text(r, "name"));
    buf_puts(page, "</h2>\n");
    html_table(page, json_object_get(r, "rows"));
    page_cost(json_object_get(r, "rows"), page);
    html_table(page, json_object_get(r, "comparisons"));
    page_curve(json_object_get(r, "by_round"), "right votes, %", "round", true, page);
    page_curve(json_object_get(r, "self_consistency"), "right votes of samples, %", "samples",
               false, page);
    page_curve(json_object_get(json_object_get(r, "sample_temperature"), "curve"),
               "right majorities on development questions, %", "temperature", false, page);
    html_table(page, json_object_get(r, "by_round"));
    if (json_object_get(r, "credit"))
        html_table(page, json_object_get(json_object_get(r, "credit"), "agents"));
    html_table(page, json_object_get(r, "calibration"));
    json_array_foreach (json_object_get(r, "talks"), i, v) debate_transcript_html(v, page);
}
