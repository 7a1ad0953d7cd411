/*
 * Trains a new adapter on two conversations, which it holds in memory, prints the loss of each
 * before and after, and saves the adapter as a PEFT directory (default: trained).
 *
 *   cc examples/train.c $(pkg-config --cflags --libs shoal) -o train
 *   ./train models/fry /tmp/trained
 */
#include "shoal.h"

#include <stdio.h>

enum { TALKS = 2, MESSAGES = 2, STEPS = 20 };

static const struct shoal_message talks[TALKS][MESSAGES] = {
    {{"user", "what is the name of this program?"}, {"assistant", "answer: train"}},
    {{"user", "how many steps does it train?"}, {"assistant", "answer: 20"}},
};

static int print_losses(struct shoal_trainer *t, const char *when, struct shoal_error *err) {
    for (int i = 0; i < TALKS; i++) {
        double loss;
        if (shoal_trainer_loss(t, 0, talks[i], MESSAGES, &loss, err) != 0) return -1;
        printf("%s: loss %.4f nats per token of '%s'\n", when, loss, talks[i][1].content);
    }
    return 0;
}

static int train(struct shoal_trainer *t, struct shoal_error *err) {
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < TALKS; i++)
            if (shoal_trainer_add(t, 0, talks[i], MESSAGES, 1, err) != 0) return -1;
        if (shoal_trainer_update(t, 0.01, NULL, err) != 0) return -1;
    }
    return 0;
}

int main(int argc, char **argv) {
    static const char *const adapter_options[] = {"r=8", "seed=1", NULL};
    static const char *const trainer_options[] = {"weight-decay=0.01", "seed=1", NULL};
    const char *dir = argc > 2 ? argv[2] : "trained";
    struct shoal_error err = {0};
    struct shoal_adapter *start = NULL, *trained = NULL;
    struct shoal_trainer *t = NULL;
    int code = 1;
    struct shoal *s = argc > 1 ? shoal_open(argv[1], NULL, &err) : NULL;
    if (!s || !(start = shoal_adapter_new(s, adapter_options, &err))) goto out;
    const struct shoal_adapter *adapters[] = {start};
    if (!(t = shoal_trainer_new(s, adapters, 1, trainer_options, &err))) goto out;
    if (print_losses(t, "before", &err) != 0 || train(t, &err) != 0) goto out;
    if (print_losses(t, "after", &err) != 0) goto out;
    if (!(trained = shoal_trainer_adapter(t, 0, &err))) goto out;
    if (shoal_adapter_save(s, trained, dir, &err) != 0) goto out;
    printf("saved %.12s in '%s'\n", shoal_adapter_hash(trained), dir);
    code = 0;
out:
    if (code) fprintf(stderr, "train: %s\n", argc > 1 ? err.text : "usage: train MODEL [DIR]");
    shoal_trainer_free(t);
    shoal_adapter_free(trained);
    shoal_adapter_free(start);
    shoal_close(s);
    return code;
}
