/*
 * sample_tuning: the temperature of an agent's samples, tuned on development items.
 *
 * At each temperature of a fixed list the agent answers every item with the same number of samples
 * and the same seeds, and the majority of an item's samples is its answer. The temperature with the
 * most correct majorities is selected; of equal ones the lowest. The items that a report measures
 * are never among the development items: the caller opens those of another split.
 */
#include "swarm/internal.h"

#include <stdlib.h>

static const double temperatures[] = {0.3, 0.5, 0.7, 1.0, 1.3};
enum { N_TEMPERATURES = ARRAY_LEN(temperatures), SAMPLES = 8 };

int64_t sample_tuning_calls(int n_items) {
    return (int64_t)n_items * N_TEMPERATURES * SAMPLES;
}

/* Sets *n_correct to the number of items with a correct majority at temperature `t`. */
static int majority_count_correct(const struct sample_tuning_options *o, double t, int *n_correct,
                                  struct progress *p, struct error *err) {
    struct self_consistency s;
    uint8_t *right = xcalloc((size_t)o->n_items + 1, 1);
    int rc = self_consistency_sample(o->client, o->agent, o->items, o->n_items, SAMPLES,
                                     o->chain_of_thought, (float)t, o->max_tokens, o->seed,
                                     o->grader, &s, p, err);
    if (rc == OK) self_consistency_vote(&s, o->items, SAMPLES, right);
    *n_correct = 0;
    for (int i = 0; rc == OK && i < o->n_items; i++) *n_correct += right[i];
    self_consistency_release(&s);
    free(right);
    return rc;
}

json_t *sample_tuning_run(const struct sample_tuning_options *o, struct progress *p,
                          struct error *err) {
    json_t *curve = json_array();
    int best = 0, n_best = -1;
    for (int i = 0; i < N_TEMPERATURES; i++) {
        int n_correct;
        if (majority_count_correct(o, temperatures[i], &n_correct, p, err) != OK) {
            json_decref(curve);
            return NULL;
        }
        json_array_append_new(curve, json_pack("[f,f]", temperatures[i],
                                               (double)n_correct / (double)MAX(o->n_items, 1)));
        if (n_correct <= n_best) continue;
        best = i;
        n_best = n_correct;
    }
    return json_pack("{s:f,s:s,s:i,s:i,s:o}", "temperature", temperatures[best], "agent",
                     o->agent->name, "n", o->n_items, "samples", SAMPLES, "curve", curve);
}

void sample_tuning_print(const json_t *v, FILE *f) {
    size_t i;
    json_t *point;
    fprintf(f,
            "temperature of samples %.1f: right majorities of %lld samples of %s on %lld "
            "development questions:",
            json_get_number(v, "temperature"), (long long)json_get_number(v, "samples"),
            json_get_string(v, "agent"), (long long)json_get_number(v, "n"));
    json_array_foreach (json_object_get(v, "curve"), i, point)
        fprintf(f, "%s %.1f: %.1f %%", i ? "," : "", json_number_value(json_array_get(point, 0)),
                100 * json_number_value(json_array_get(point, 1)));
    fputc('\n', f);
}
