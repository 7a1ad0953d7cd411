/*
 * Asks one question of the base model and of the adapters on the command line, in one batch, and
 * prints each one's choice with its probability.
 *
 *   cc examples/choose.c $(pkg-config --cflags --libs shoal) -o choose
 *   ./choose models/fry runs/ID/adapters/gen_0/critic
 */
#include "shoal.h"

#include <stdio.h>

enum { MAX_REQUESTS = 16, CHOICES = 3 };

int main(int argc, char **argv) {
    static const char *const answers[CHOICES] = {"answer: 3", "answer: 41", "answer: 907"};
    static const struct shoal_message question = {"user", "pick the smallest of 41, 3, 907"};
    struct shoal_error err = {0};
    struct shoal_request *requests[MAX_REQUESTS] = {0};
    struct shoal_adapter *adapters[MAX_REQUESTS] = {0};
    int n = argc - 1 < MAX_REQUESTS ? argc - 1 : MAX_REQUESTS, code = 1;
    struct shoal *s = argc > 1 ? shoal_open(argv[1], NULL, &err) : NULL;
    for (int i = 0; s && i < n; i++) {
        if (i > 0 && !(adapters[i] = shoal_adapter_load(s, argv[i + 1], &err))) goto out;
        if (!(requests[i] = shoal_request_new(s, &question, 1, NULL, &err))) goto out;
        const struct shoal_adapter *one = adapters[i];
        if (one && shoal_request_set_adapters(requests[i], &one, NULL, 1, &err) != 0) goto out;
        if (shoal_request_set_choices(requests[i], answers, CHOICES, &err) != 0) goto out;
    }
    if (!s || shoal_run(s, requests, n, NULL, &err) != 0) goto out;
    for (int i = 0; i < n; i++) {
        float p[CHOICES];
        int choice = shoal_request_choice(requests[i], p);
        printf("%-40s %s (%.3f)\n", i ? argv[i + 1] : "base", answers[choice], (double)p[choice]);
    }
    code = 0;
out:
    if (code)
        fprintf(stderr, "choose: %s\n", argc > 1 ? err.text : "usage: choose MODEL [ADAPTER …]");
    for (int i = 0; i < n; i++) {
        shoal_request_free(requests[i]);
        shoal_adapter_free(adapters[i]);
    }
    shoal_close(s);
    return code;
}
