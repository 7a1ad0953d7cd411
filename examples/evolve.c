/*
 * Breeds adapters for three generations with a fitness of its own, the probability of the right
 * answer to three questions, and prints the best candidate of each generation. Each founder is
 * first trained on the answer to one question.
 *
 *   cc examples/evolve.c $(pkg-config --cflags --libs shoal) -o evolve
 *   ./evolve models/fry
 */
#include "shoal.h"

#include <stdio.h>

enum { N = 3, GENERATIONS = 3, STEPS = 5 }; /* N founders, N questions */

static const char *const names[N] = {"smallest", "larger", "order"};
static const struct {
    const char *question, *choices[2]; /* the first choice is right */
} items[N] = {{"pick the smallest of 41, 3, 907", {"answer: 3", "answer: 907"}},
              {"pick the larger of 392 and 814", {"answer: 814", "answer: 392"}},
              {"order down: b y g", {"answer: y g b", "answer: b g y"}}};
static struct shoal_error err;

static int founders_train(struct shoal_trainer *t, struct shoal_adapter **out) {
    for (int k = 0; k < STEPS * N; k++) {
        const struct shoal_message talk[] = {{"user", items[k % N].question},
                                             {"assistant", items[k % N].choices[0]}};
        if (shoal_trainer_add(t, k % N, talk, 2, 1, &err) != 0) return -1;
        if (k % N == N - 1 && shoal_trainer_update(t, 0.01, NULL, &err) != 0) return -1;
    }
    for (int i = 0; i < N; i++)
        if (!(out[i] = shoal_trainer_adapter(t, i, &err))) return -1;
    return 0;
}

/* The scores of each candidate are its probabilities of the right choices. */
static int fitness(void *model, int n, const struct shoal_adapter *const *adapters,
                   const char *const *candidates, int n_items, double *scores) {
    int rc = 0;
    for (int k = 0; k < n * n_items && rc == 0; k++) {
        const struct shoal_message message = {"user", items[k % n_items].question};
        struct shoal_request *r = shoal_request_new(model, &message, 1, NULL, &err);
        float p[2] = {0};
        rc = r ? shoal_request_set_adapters(r, &adapters[k / n_items], NULL, 1, &err) : -1;
        if (rc == 0) rc = shoal_request_set_choices(r, items[k % n_items].choices, 2, &err);
        if (rc == 0) rc = shoal_run(model, &r, 1, NULL, &err);
        if (rc == 0) shoal_request_choice(r, p);
        scores[k] = (double)p[0];
        shoal_request_free(r);
    }
    (void)candidates;
    if (rc != 0) fprintf(stderr, "fitness: %s\n", err.text);
    return rc;
}

int main(int argc, char **argv) {
    static const char *const adapter_options[] = {"r=4", NULL};
    static const char *const options[] = {"population=6", "elites=2", "rank=4", NULL};
    struct shoal_adapter *start = NULL, *founders[N] = {0};
    const struct shoal_adapter *starts[N], *list[N];
    struct shoal_trainer *t = NULL;
    struct shoal_population *p = NULL;
    double scores[N];
    int code = 1;
    struct shoal *s = argc > 1 ? shoal_open(argv[1], NULL, &err) : NULL;
    if (!s || !(start = shoal_adapter_new(s, adapter_options, &err))) goto out;
    for (int i = 0; i < N; i++) starts[i] = start;
    if (!(t = shoal_trainer_new(s, starts, N, NULL, &err))) goto out;
    if (founders_train(t, founders) != 0) goto out;
    for (int i = 0; i < N; i++) list[i] = founders[i];
    if (!(p = shoal_population_new(s, list, names, N, options, &err))) goto out;
    for (int g = 0; g <= GENERATIONS; g++) {
        if (g > 0 && shoal_population_breed(p, &err) != 0) goto out;
        if (shoal_population_evaluate(p, fitness, s, N, &err) != 0) goto out;
        const struct shoal_adapter *best = shoal_population_adapter(p, 0);
        if (fitness(s, 1, &best, NULL, N, scores) != 0) goto out;
        printf("generation %d: %-8s", g, shoal_population_name(p, 0));
        for (int i = 0; i < N; i++) printf("  %s %.3f", names[i], scores[i]);
        printf("\n");
    }
    code = 0;
out:
    if (code) fprintf(stderr, "evolve: %s\n", argc > 1 ? err.text : "usage: evolve MODEL");
    shoal_population_free(p);
    shoal_trainer_free(t);
    for (int i = 0; i < N; i++) shoal_adapter_free(founders[i]);
    shoal_adapter_free(start);
    shoal_close(s);
    return code;
}
