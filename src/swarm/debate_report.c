/*
 * debate_report: the report of a debate over many questions: converts the measurements to one JSON
 * object with rows, comparisons and statistics, and writes it as a table and as HTML.
 *
 * All comparisons use the same items. The self-consistency baseline samples the agent with the best
 * accuracy alone on these same items, which favours the baseline.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include "base/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CONTESTANTS = 5, SAMPLED = 200, SEEDS = 8 };

static json_t *bounds_json(struct stats_interval v) {
    return json_pack("[f,f,f]", v.value, v.lo, v.hi);
}

static int64_t count(const uint8_t *right, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += right[i];
    return sum;
}

struct round_cost {
    int64_t calls, prefilled, generated;
};

/* Cost of the first `rounds` rounds, of one agent or (-1) of all agents. */
static struct round_cost cost_of(const struct debate *d, int rounds, int agent) {
    struct round_cost c = {0};
    for (int i = 0; i < d->n_items; i++)
        for (int u = 0; u < d->transcripts[i].n; u++) {
            const struct utterance *v = &d->transcripts[i].v[u];
            if (v->round >= rounds || (agent >= 0 && v->agent != agent)) continue;
            c.calls++;
            c.prefilled += v->n_prefilled;
            c.generated += v->n_generated;
        }
    return c;
}

/* building */

struct report_builder {
    const struct llm_client *llm_client;
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    int n_items;
    const struct debate_options *o;
    const struct debate_report_options *w;
    struct debate d;
    json_t *rows;
    struct { /* baselines of the debate */
        char name[96];
        uint8_t *right;
    } against[CONTESTANTS];
    int n_against;
};

static void row_add(struct report_builder *m, const char *name, const char *kind,
                    const uint8_t *right, struct round_cost c) {
    struct stats_interval ci = stats_wilson(count(right, m->n_items), m->n_items);
    json_array_append_new(m->rows,
                          json_pack("{s:s,s:s,s:f,s:f,s:f,s:I,s:I,s:I}", "name", name, "kind", kind,
                                    "acc", ci.value, "lo", ci.lo, "hi", ci.hi, "calls",
                                    (json_int_t)c.calls, "prefilled", (json_int_t)c.prefilled,
                                    "generated", (json_int_t)c.generated));
}

static void against_add(struct report_builder *m, const char *name, const uint8_t *right) {
    CHECK(m->n_against < CONTESTANTS);
    snprintf(m->against[m->n_against].name, sizeof m->against[0].name, "%s", name);
    m->against[m->n_against].right = xmalloc((size_t)MAX(m->n_items, 1));
    memcpy(m->against[m->n_against++].right, right, (size_t)m->n_items);
}

static int best_alone(const struct report_builder *m) {
    int best = 0;
    for (int a = 1; a < m->n_agents; a++)
        if (count(m->d.solo + (size_t)a * (size_t)m->n_items, m->n_items) >
            count(m->d.solo + (size_t)best * (size_t)m->n_items, m->n_items))
            best = a;
    return best;
}

static void rows_make(struct report_builder *m) {
    const struct debate *d = &m->d;
    size_t n = (size_t)m->n_items;
    int best = best_alone(m);
    uint8_t *oracle = xmalloc(n + 1);
    for (int a = 0; a < m->n_agents; a++)
        row_add(m, m->team[a].name, "solo", d->solo + (size_t)a * n, cost_of(d, 1, a));
    row_add(m, "first-round vote", "vote", d->voted, cost_of(d, 1, -1));
    row_add(m, "debate", "debate", d->decided, cost_of(d, d->rounds, -1));
    debate_oracle(d, oracle);
    row_add(m, "oracle", "oracle", oracle, cost_of(d, 1, -1));
    against_add(m, "first-round vote", d->voted);
    against_add(m, m->team[best].name, d->solo + (size_t)best * n);
    free(oracle);
}

static int samples_for(int64_t tokens, int64_t each, int most) {
    return (int)MAX(1, MIN((int64_t)most, (tokens + each / 2) / MAX(each, 1)));
}

/* Baseline for split evidence: the best agent answers the whole question. */
static int whole_make(struct report_builder *m, struct progress *p, struct error *err) {
    const struct agent *best = &m->team[best_alone(m)];
    struct debate_options o = *m->o;
    struct task_item *whole = xcalloc((size_t)m->n_items + 1, sizeof *whole);
    struct debate d;
    o.rounds = 1;
    for (int i = 0; i < m->n_items; i++) {
        whole[i] = m->items[i]; // texts are borrowed
        whole[i].n_views = 0;
    }
    int rc = debate_run(m->llm_client, best, 1, whole, m->n_items, &o, &d, p, err);
    if (rc == OK) {
        char name[96];
        snprintf(name, sizeof name, "%.60s, seeing everything", best->name);
        row_add(m, name, "whole", d.solo, cost_of(&d, 1, -1));
        against_add(m, name, d.solo);
    }
    debate_release(&d);
    free(whole);
    return rc;
}

/* The accuracy curve of self-consistency, and its points at the debate's token cost. */
static int samples_make(struct report_builder *m, struct progress *p, json_t *curve,
                        struct error *err) {
    int best = best_alone(m), most = m->w->samples;
    struct round_cost all = cost_of(&m->d, m->d.rounds, -1), one = cost_of(&m->d, 1, best);
    int equal[2] = {
        samples_for(all.generated, one.generated, most),
        samples_for(all.generated + all.prefilled, one.generated + one.prefilled, most)};
    static const char *const what[] = {"generated", "total"};
    struct self_consistency s;
    struct round_cost c = {0};
    int k = MAX(equal[0], equal[1]);
    int rc = self_consistency_sample(m->llm_client, &m->team[best], m->items, m->n_items, k,
                                     m->w->temperature, m->w->max_tokens, m->o->seed, m->o->grader,
                                     &s, p, err);
    uint8_t *right = xmalloc((size_t)m->n_items + 1);
    for (int i = 1; rc == OK && i <= k; i++) {
        c.calls += m->n_items;
        c.prefilled += s.prefilled[i - 1];
        c.generated += s.generated[i - 1];
        bool point = (i & (i - 1)) == 0 || i == k;
        if (point || i == equal[0] || i == equal[1]) self_consistency_vote(&s, m->items, i, right);
        if (point)
            json_array_append_new(
                curve,
                json_pack("[i,f]", i, stats_wilson(count(right, m->n_items), m->n_items).value));
        for (int e = 0; e < 2; e++) {
            char name[96];
            if (i != equal[e]) continue;
            snprintf(name, sizeof name, "%.40s@%d (equal %s tokens)", m->team[best].name, i,
                     what[e]);
            row_add(m, name, "samples", right, c);
            against_add(m, name, right);
        }
    }
    free(right);
    self_consistency_release(&s);
    return rc;
}

static json_t *comparisons_json(const struct report_builder *m) {
    struct stats_mcnemar v[CONTESTANTS];
    double p[CONTESTANTS], holm[CONTESTANTS];
    json_t *list = json_array();
    for (int i = 0; i < m->n_against; i++) {
        v[i] = stats_mcnemar(m->d.decided, m->against[i].right, m->n_items);
        p[i] = v[i].p;
    }
    stats_holm(p, m->n_against, holm);
    for (int i = 0; i < m->n_against; i++)
        json_array_append_new(list, json_pack("{s:s,s:s,s:f,s:f,s:f,s:f,s:f}", "a", "debate", "b",
                                              m->against[i].name, "diff", v[i].diff.value, "lo",
                                              v[i].diff.lo, "hi", v[i].diff.hi, "p", p[i], "p_holm",
                                              holm[i]));
    return list;
}

static json_t *rounds_json(const struct report_builder *m) {
    json_t *list = json_array();
    for (int r = 0; r < m->d.rounds; r++) {
        struct debate_round_stats f;
        debate_round_stats(&m->d, m->items, r, &f);
        json_array_append_new(list, json_pack("{s:i,s:f,s:f,s:I,s:I,s:I,s:I,s:I}", "round", r,
                                              "voted", (double)f.voted / MAX(m->n_items, 1),
                                              "agreed", (double)f.agreed / MAX(m->n_items, 1),
                                              "flips_good", (json_int_t)f.flips_good, "flips_bad",
                                              (json_int_t)f.flips_bad, "open", (json_int_t)f.open,
                                              "changed", (json_int_t)f.changed, "conformed",
                                              (json_int_t)f.switched_to_majority));
    }
    return list;
}

struct solved_game { /* a game whose coalitions have all been played */
    const uint8_t *right;
    int n_items;
};

static int known_play(void *ctx, uint32_t mask, uint8_t *right, struct error *err) {
    const struct solved_game *k = ctx;
    (void)err;
    memcpy(right, k->right + (size_t)mask * (size_t)k->n_items, (size_t)k->n_items);
    return OK;
}

/* Distance of sampled values from exact ones: root mean square over agents and seeds. */
static json_t *sampling_json(const struct report_builder *m, const uint8_t *right,
                             const struct contribution *exact) {
    struct solved_game k = {right, m->n_items};
    const struct coalition_game g = {&k, known_play, m->n_agents, m->n_items};
    struct error err;
    json_t *list = json_array();
    for (int samples = 4; samples <= 64; samples *= 4) {
        double far[2] = {0};
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            struct contribution w[TEAM_MAX];
            CHECK(contribution_sampled(&g, samples, m->o->seed + seed, w, &err) == OK);
            for (int a = 0; a < m->n_agents; a++) {
                double off[2] = {w[a].shapley.value - exact[a].shapley.value,
                                 w[a].banzhaf.value - exact[a].banzhaf.value};
                for (int i = 0; i < 2; i++) far[i] += off[i] * off[i];
            }
        }
        for (int i = 0; i < 2; i++) far[i] = sqrt(far[i] / (SEEDS * m->n_agents));
        json_array_append_new(list, json_pack("{s:i,s:f,s:f}", "samples", samples, "shapley",
                                              far[0], "banzhaf", far[1]));
    }
    return list;
}

static int credit_make(struct report_builder *m, struct progress *p, json_t **out,
                       struct error *err) {
    struct vote_game v = {m->o->vote,  m->d.answers, m->items,
                          m->n_agents, m->n_items,   m->d.transcripts};
    struct debate_game g = {m->llm_client, m->team, m->n_agents, m->items, m->n_items, m->o, p};
    struct coalition_game game = m->w->credit_debate ? debate_game(&g) : vote_game(&v);
    struct contribution worth[TEAM_MAX];
    bool exact = m->n_agents <= GAME_MAX_EXACT_AGENTS;
    json_t *errors = NULL;
    int rc = OK;
    if (exact) {
        uint8_t *right = xmalloc(((size_t)1 << m->n_agents) * (size_t)MAX(m->n_items, 1));
        rc = coalition_game_play_all(&game, right, err);
        if (rc == OK) {
            contribution_exact(right, m->n_agents, m->n_items, worth);
            errors = sampling_json(m, right, worth);
        }
        free(right);
    } else {
        rc = contribution_sampled(&game, SAMPLED, m->o->seed, worth, err);
    }
    json_t *agents = json_array();
    for (int a = 0; rc == OK && a < m->n_agents; a++)
        json_array_append_new(agents, json_pack("{s:s,s:o,s:o,s:o}", "name", m->team[a].name,
                                                "shapley", bounds_json(worth[a].shapley), "banzhaf",
                                                bounds_json(worth[a].banzhaf), "leave_one_out",
                                                bounds_json(worth[a].leave_one_out)));
    *out =
        json_pack("{s:s,s:s,s:o,s:o}", "game", m->w->credit_debate ? "debate" : "first-round vote",
                  "method", exact ? "exact" : "sampled", "agents", agents, "sampling_error",
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

static const char *const ending_names[] = {"rounds", "agreed", "budget", "nobody"};

static json_t *endings_json(const struct debate *d) {
    json_int_t n[ARRAY_LEN(ending_names)] = {0};
    json_t *v = json_object();
    for (int i = 0; i < d->n_items; i++) n[d->transcripts[i].ending]++;
    for (size_t i = 0; i < ARRAY_LEN(ending_names); i++)
        json_object_set_new(v, ending_names[i], json_integer(n[i]));
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

json_t *debate_transcript_json(const struct debate *d, const struct agent *team,
                               const struct task_item *it, int item) {
    const struct transcript *o = &d->transcripts[item];
    json_t *said = json_array();
    for (int i = 0; i < o->n; i++) json_array_append_new(said, utterance_json(o, team, i));
    json_t *v = json_pack("{s:s,s:o,s:o,s:s,s:i}", "question", it->question, "said", said, "scores",
                          transcript_scores_json(o), "ending", ending_names[o->ending], "rounds",
                          o->rounds);
    if (o->answer >= 0) json_object_set_new(v, "answer", json_string(o->candidates[o->answer]));
    if (it->n_choices && it->correct >= 0)
        json_object_set_new(v, "right", json_string(it->choices[it->correct]));
    if (it->gold) json_object_set_new(v, "right", json_string(it->gold));
    return v;
}

static int figures_make(struct report_builder *m, json_t *r, struct progress *p,
                        struct error *err) {
    const struct debate *d = &m->d;
    json_t *talks = json_array(), *credit = NULL, *curve = json_array();
    int rc = OK;
    rows_make(m);
    if (m->n_items > 0 && m->items[0].n_views) rc = whole_make(m, p, err);
    bool thinks = m->o->chain_of_thought || (m->n_items > 0 && !m->items[0].n_choices);
    if (rc == OK && m->w->samples && thinks) rc = samples_make(m, p, curve, err);
    if (rc == OK && !m->w->credit_none) rc = credit_make(m, p, &credit, err);
    for (int i = 0; i < d->n_items && i < m->w->shown; i++)
        json_array_append_new(talks, debate_transcript_json(d, m->team, &m->items[i], i));
    json_object_set_new(r, "comparisons", comparisons_json(m));
    json_object_set_new(r, "by_round", rounds_json(m));
    json_object_set_new(r, "self_consistency", curve);
    if (credit) json_object_set_new(r, "credit", credit);
    json_object_set_new(r, "calibration", calibration_json(m));
    json_object_set_new(r, "endings", endings_json(d));
    json_object_set_new(r, "cost",
                        json_pack("{s:I,s:I,s:I,s:I,s:I}", "calls", (json_int_t)d->calls,
                                  "prefilled", (json_int_t)d->prefilled, "generated",
                                  (json_int_t)d->generated, "truncated", (json_int_t)d->truncated,
                                  "failed", (json_int_t)d->failed));
    json_object_set_new(r, "talks", talks);
    return rc;
}

json_t *debate_report_make(const struct llm_client *a, const struct agent *team, int n_agents,
                           const struct task_item *items, int n_items,
                           const struct debate_options *o, const struct debate_report_options *w,
                           struct progress *p, struct error *err) {
    struct report_builder m = {.llm_client = a,
                               .team = team,
                               .n_agents = n_agents,
                               .items = items,
                               .n_items = n_items,
                               .o = o,
                               .w = w,
                               .rows = json_array()};
    json_t *r = json_pack("{s:s,s:i,s:s,s:i,s:s,s:f,s:O}", "name", w->name, "n", n_items,
                          "protocol", o->workflow ? workflow_name(o->workflow) : "brief", "rounds",
                          o->rounds, "vote", o->vote->name, "detectable",
                          stats_min_detectable_effect(n_items, 0.2), "rows", m.rows);
    int rc = debate_run(a, team, n_agents, items, n_items, o, &m.d, p, err);
    if (rc == OK) rc = figures_make(&m, r, p, err);
    debate_release(&m.d);
    for (int i = 0; i < m.n_against; i++) free(m.against[i].right);
    json_decref(m.rows);
    if (rc == OK) return r;
    json_decref(r);
    return NULL;
}

/* output */

static double real(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

static const char *text(const json_t *v, const char *key) {
    const char *s = json_string_value(json_object_get(v, key));
    return s ? s : "";
}

static json_int_t whole(const json_t *v, const char *key) {
    return json_integer_value(json_object_get(v, key));
}

static const char *verdict(const json_t *c) {
    return real(c, "p_holm") >= 0.05 ? "not significant" : real(c, "diff") > 0 ? "better" : "worse";
}

static void print_credit(const json_t *credit, FILE *f) {
    size_t i;
    json_t *v;
    if (!credit) return;
    fprintf(f, "worth in the %s (%s), points: Shapley, Banzhaf, leave-one-out\n",
            text(credit, "game"), text(credit, "method"));
    json_array_foreach (json_object_get(credit, "agents"), i, v) {
        fprintf(f, "  %-*s", utf8_field_width(text(v, "name"), 28), text(v, "name"));
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
                (long long)whole(v, "samples"), 100 * real(v, "shapley"), 100 * real(v, "banzhaf"));
}

void debate_report_print(const json_t *r, FILE *f) {
    size_t i;
    json_t *v;
    fprintf(f,
            "%s: %lld questions, protocol %s, %lld rounds at most, %s vote; a difference of %.1f "
            "points would be found\n",
            text(r, "name"), (long long)whole(r, "n"), text(r, "protocol"),
            (long long)whole(r, "rounds"), text(r, "vote"), 100 * real(r, "detectable"));
    json_array_foreach (json_object_get(r, "rows"), i, v)
        fprintf(f, "  %-*s %6.2f %%  (%.2f – %.2f)  %9lld calls %11lld read %10lld written\n",
                utf8_field_width(text(v, "name"), 44), text(v, "name"), 100 * real(v, "acc"),
                100 * real(v, "lo"), 100 * real(v, "hi"), (long long)whole(v, "calls"),
                (long long)whole(v, "prefilled"), (long long)whole(v, "generated"));
    json_array_foreach (json_object_get(r, "comparisons"), i, v)
        fprintf(f, "debate against %s: %+.2f (%+.2f … %+.2f), p = %.2g after Holm: %s\n",
                text(v, "b"), 100 * real(v, "diff"), 100 * real(v, "lo"), 100 * real(v, "hi"),
                real(v, "p_holm"), verdict(v));
    json_array_foreach (json_object_get(r, "by_round"), i, v) {
        if (i == 0) continue;
        fprintf(f,
                "round %d: %lld answers became right, %lld wrong; of %lld against the others' "
                "majority %lld "
                "changed, %lld to it; %.1f %% agree\n",
                (int)i, (long long)whole(v, "flips_good"), (long long)whole(v, "flips_bad"),
                (long long)whole(v, "open"), (long long)whole(v, "changed"),
                (long long)whole(v, "conformed"), 100 * real(v, "agreed"));
    }
    print_credit(json_object_get(r, "credit"), f);
    json_array_foreach (json_object_get(r, "calibration"), i, v)
        fprintf(f, "calibration of %s: error %.3f, %.3f at temperature %.2f\n", text(v, "name"),
                real(v, "ece"), real(v, "ece_fitted"), real(v, "temperature"));
    v = json_object_get(r, "cost");
    if (whole(v, "failed") + whole(v, "truncated") > 0)
        fprintf(f, "%lld calls failed, %lld were cut\n", (long long)whole(v, "failed"),
                (long long)whole(v, "truncated"));
}

/* pages */

void debate_transcript_html(const json_t *talk, struct buf *page) {
    size_t i;
    json_t *v;
    buf_puts(page, "<h3>");
    html_escape(page, text(talk, "question"));
    buf_puts(page, "</h3>\n");
    json_array_foreach (json_object_get(talk, "said"), i, v) {
        buf_printf(page, "<p><b>");
        html_escape(page, text(v, "name"));
        buf_printf(page, "</b> (%lld) ", (long long)whole(v, "round"));
        html_escape(page, *text(v, "failed") ? text(v, "failed") : text(v, "text"));
        if (json_object_get(v, "answer")) {
            buf_puts(page, " → <b>");
            html_escape(page, text(v, "answer"));
            buf_printf(page, "</b> %.2f", real(v, "confidence"));
        }
        buf_puts(page, "</p>\n");
    }
    buf_puts(page, "<p>Answer: <b>");
    html_escape(page, text(talk, "answer"));
    buf_puts(page, "</b>");
    if (json_object_get(talk, "right")) {
        buf_puts(page, ", right: <b>");
        html_escape(page, text(talk, "right"));
        buf_puts(page, "</b>");
    }
    buf_puts(page, "</p>\n");
}

/* Accuracy after each round, or by number of samples. */
static void page_curve(const json_t *list, const char *label, const char *x_title, bool rounds,
                       struct buf *page) {
    struct curve c = {0};
    size_t i;
    json_t *v;
    json_array_foreach ((json_t *)(uintptr_t)list, i, v) {
        double x = rounds ? (double)i : json_number_value(json_array_get(v, 0)),
               y = rounds ? real(v, "voted") : json_number_value(json_array_get(v, 1));
        curve_add(&c, x, 100 * y);
    }
    if (json_array_size(list) > 1) plot_curves(page, label, x_title, &c, NULL, 1);
}

void debate_report_html(const json_t *r, struct buf *page) {
    size_t i;
    json_t *v;
    buf_puts(page, "<h2>");
    html_escape(page, text(r, "name"));
    buf_puts(page, "</h2>\n");
    html_table(page, json_object_get(r, "rows"));
    html_table(page, json_object_get(r, "comparisons"));
    page_curve(json_object_get(r, "by_round"), "right votes, %", "round", true, page);
    page_curve(json_object_get(r, "self_consistency"), "right votes of samples, %", "samples",
               false, page);
    html_table(page, json_object_get(r, "by_round"));
    if (json_object_get(r, "credit"))
        html_table(page, json_object_get(json_object_get(r, "credit"), "agents"));
    html_table(page, json_object_get(r, "calibration"));
    json_array_foreach (json_object_get(r, "talks"), i, v) debate_transcript_html(v, page);
}
