/*
 * debate_stats: statistics of a debate's answers: how many became right or wrong, how many changed
 * to the majority's answer, the items that at least one agent answers correctly in the first round
 * (the oracle), and calibration. Pure functions of answers and items.
 */
#include "swarm/swarm.h"

#include <math.h>
#include <string.h>

/* BINS: number of bins of the calibration error. FIT_STEPS: iterations of the search for the
 * temperature. */
enum { BINS = 10, FIT_STEPS = 60 };

static const struct agent_answer *answer_at(const struct debate *d, int round, int agent,
                                            int item) {
    return &d->answers[((size_t)round * (size_t)d->n_agents + (size_t)agent) * (size_t)d->n_items +
                       (size_t)item];
}

/* The choice of more than half of the other agents that have an answer; -1: no such choice. */
static int others_majority(const struct debate *d, int round, int agent, int item) {
    int others = 0;
    for (int a = 0; a < d->n_agents; a++)
        others += a != agent && answer_at(d, round, a, item)->choice >= 0;
    for (int a = 0; a < d->n_agents; a++) {
        int choice = answer_at(d, round, a, item)->choice, n_equal = 0;
        for (int b = 0; b < d->n_agents; b++)
            n_equal += b != agent && answer_at(d, round, b, item)->choice == choice;
        if (a != agent && choice >= 0 && 2 * n_equal > others) return choice;
    }
    return -1;
}

/* Adds the change of one agent's answer between the previous round and `round` to the counts. */
static void answer_change_count(const struct debate *d, const struct task_item *items, int round,
                                int agent, int item, struct debate_round_stats *out) {
    int previous = answer_at(d, round - 1, agent, item)->choice,
        current = answer_at(d, round, agent, item)->choice;
    int majority = others_majority(d, round - 1, agent, item);
    bool was_correct = debate_answer_is_correct(d, items, item, previous),
         is_correct = debate_answer_is_correct(d, items, item, current);
    out->flips_good += is_correct && !was_correct;
    out->flips_bad += was_correct && !is_correct;
    if (majority < 0 || previous < 0 || majority == previous) return;
    out->in_minority++;
    out->minority_changed += current != previous;
    out->switched_to_majority += current == majority;
}

void debate_round_stats(const struct debate *d, const struct task_item *items, int round,
                        struct debate_round_stats *out) {
    *out = (struct debate_round_stats){0};
    for (int i = 0; i < d->n_items; i++) {
        int first = answer_at(d, round, 0, i)->choice;
        bool all_agree = first >= 0;
        for (int a = 0; a < d->n_agents; a++) {
            all_agree &= answer_at(d, round, a, i)->choice == first;
            if (round > 0) answer_change_count(d, items, round, a, i, out);
        }
        out->consensus += all_agree;
        out->correct_votes += d->vote_correct[(size_t)round * (size_t)d->n_items + (size_t)i];
    }
}

void debate_oracle(const struct debate *d, uint8_t *any_correct) {
    memset(any_correct, 0, (size_t)d->n_items);
    for (int a = 0; a < d->n_agents; a++)
        for (int i = 0; i < d->n_items; i++)
            any_correct[i] |= d->first_correct[(size_t)a * (size_t)d->n_items + (size_t)i];
}

/* Input of the calibration: one answer as a probability distribution p over n outcomes. */
struct prediction {
    double p[EVAL_MAX_CHOICES];
    int n, answered, correct; /* number of outcomes; the agent's and the correct outcome */
};

/* The prediction of an agent's answer in the first round. The outcomes are the item's choices; an
 * item without choices has two: 0, the agent's answer is correct; 1, it is wrong. Returns false if
 * the item is left out: it has no answer, no known correct answer, or only one choice. */
static bool prediction_init(const struct debate *d, const struct task_item *items, int item,
                            int agent, struct prediction *prediction) {
    const struct task_item *it = &items[item];
    const struct agent_answer *x = answer_at(d, 0, agent, item);
    *prediction =
        (struct prediction){.n = it->n_choices, .answered = x->choice, .correct = it->correct};
    if (x->choice < 0 || (it->n_choices ? it->correct < 0 || it->n_choices < 2 : !it->gold))
        return false;
    for (int c = 0; c < it->n_choices; c++) prediction->p[c] = (double)x->prob[c];
    if (it->n_choices) return true;
    *prediction =
        (struct prediction){.p = {(double)x->confidence, 1 - (double)x->confidence},
                            .n = 2,
                            .correct = !debate_answer_is_correct(d, items, item, x->choice)};
    return true;
}

/* Rescales p from temperature 1 to `temperature`. */
static void prediction_apply_temperature(struct prediction *prediction, double temperature) {
    double sum = 0;
    for (int c = 0; c < prediction->n; c++)
        sum += prediction->p[c] = math_exp(math_log(fmax(prediction->p[c], 1e-30)) / temperature);
    for (int c = 0; c < prediction->n; c++) prediction->p[c] /= sum;
}

/* Returns the mean negative log-likelihood of the correct outcomes at `temperature`. *n: number of
 * items with a prediction; *ece: expected calibration error over BINS bins. */
static double calibration_measure(const struct debate *d, const struct task_item *items, int agent,
                                  double temperature, double *ece, int64_t *n) {
    double nll = 0, confidence_sum[BINS] = {0}, correct_sum[BINS] = {0};
    *n = 0;
    for (int i = 0; i < d->n_items; i++) {
        struct prediction prediction;
        if (!prediction_init(d, items, i, agent, &prediction)) continue;
        prediction_apply_temperature(&prediction, temperature);
        nll -= math_log(fmax(prediction.p[prediction.correct], 1e-30));
        int bin = MIN(BINS - 1, (int)(prediction.p[prediction.answered] * BINS));
        confidence_sum[bin] += prediction.p[prediction.answered];
        correct_sum[bin] += prediction.answered == prediction.correct;
        ++*n;
    }
    *ece = 0;
    for (int b = 0; b < BINS; b++)
        *ece += fabs(confidence_sum[b] - correct_sum[b]) / (double)MAX(*n, 1);
    return nll / (double)MAX(*n, 1);
}

/* Measures the calibration at temperature 1 and at the best temperature T. Golden-section search
 * over log T finds T between 1/20 and 20: as a function of log T, the negative log-likelihood has a
 * single minimum. */
struct debate_calibration debate_calibration(const struct debate *d, const struct task_item *items,
                                             int agent) {
    const double golden = 0.6180339887498949, log_lowest = -2.995732273553991; // log(1/20)
    struct debate_calibration c = {0};
    double lo = log_lowest, hi = -log_lowest, ece;
    c.nll = calibration_measure(d, items, agent, 1, &c.ece, &c.n);
    c.temperature = 1;
    if (c.n == 0) return c; // nothing to fit
    for (int i = 0; i < FIT_STEPS; i++) {
        double a = hi - golden * (hi - lo), b = lo + golden * (hi - lo);
        if (calibration_measure(d, items, agent, math_exp(a), &ece, &c.n) <
            calibration_measure(d, items, agent, math_exp(b), &ece, &c.n))
            hi = b;
        else
            lo = a;
    }
    c.temperature = math_exp((lo + hi) / 2);
    c.nll_fitted = calibration_measure(d, items, agent, c.temperature, &c.ece_fitted, &c.n);
    return c;
}
