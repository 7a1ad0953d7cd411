/*
 * flock: the step of a flock (swarm.h has its formulas). It is arithmetic on the weights and on the
 * distances of the answers; the workflow's executor gets the embeddings and makes the calls.
 *
 * Invariant: the rows of `weights` stay on the simplex. Every rule adds differences of rows that
 * sum to 1, so the sum of a moved row stays 1, and its positive part is at least 1.
 */
#include "swarm/swarm.h"

#include <math.h>

void flock_init(struct boid_flock *f, int n_agents) {
    CHECK(n_agents >= 1 && n_agents <= TEAM_MAX);
    *f = (struct boid_flock){.n = n_agents};
    for (int i = 0; i < n_agents; i++) {
        f->weights[i][i] = 1;
        for (int k = 0; k < n_agents; k++) f->velocity[i][k] = (k == i) - 1.0 / n_agents;
    }
}

static double distance(const float *a, const float *b, int32_t d) {
    double sum = 0;
    for (int32_t i = 0; i < d; i++) {
        double x = (double)a[i] - (double)b[i];
        sum += x * x;
    }
    return sqrt(sum);
}

/* The distances d_ij of the answers, as a share of the largest. */
static void distances_fill(const float *const *x, int n, int32_t d,
                           double out[TEAM_MAX][TEAM_MAX]) {
    double largest = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            out[i][j] = x[i] && x[j] && i != j ? distance(x[i], x[j], d) : 0;
            largest = fmax(largest, out[i][j]);
        }
    for (int i = 0; i < n && largest > 0; i++)
        for (int j = 0; j < n; j++) out[i][j] /= largest;
}

/* Adds to w the steering of agent i toward, or away from, agent j, in a flock in which each agent
 * has `n_others` others. `near` is 1 - d_ij. */
static void steer(const struct boid_flock *f, const struct flock_rules *rules, int i, int j,
                  double near, int n_others, double w[TEAM_MAX]) {
    for (int k = 0; k < f->n; k++) {
        double apart = f->weights[i][k] - f->weights[j][k],
               velocity = f->velocity[j][k] - f->velocity[i][k];
        w[k] += (rules->separation * near * apart + rules->alignment * velocity -
                 rules->cohesion * (1 - near) * apart) /
                n_others;
    }
}

static void simplex_clip(double w[TEAM_MAX], int n) {
    double sum = 0;
    for (int k = 0; k < n; k++) sum += w[k] = fmax(w[k], 0);
    for (int k = 0; k < n; k++) w[k] /= sum;
}

void flock_step(struct boid_flock *f, const struct flock_rules *rules, const float *const *answers,
                int32_t d) {
    const struct boid_flock before = *f;
    double distances[TEAM_MAX][TEAM_MAX];
    int n_others = -1;
    for (int i = 0; i < f->n; i++) n_others += answers[i] != NULL;
    distances_fill(answers, f->n, d, distances);
    for (int i = 0; i < f->n; i++) {
        for (int j = 0; j < f->n && answers[i]; j++)
            if (j != i && answers[j])
                steer(&before, rules, i, j, 1 - distances[i][j], n_others, f->weights[i]);
        simplex_clip(f->weights[i], f->n);
        for (int k = 0; k < f->n; k++) f->velocity[i][k] = f->weights[i][k] - before.weights[i][k];
    }
}
