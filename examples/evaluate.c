/*
 * Accuracy of the base model and of adapters on the same questions, as JSON, with progress:
 *
 *   cc examples/evaluate.c $(pkg-config --cflags --libs shoal) -o evaluate
 *   ./evaluate models/fry runs/ID/adapters/gen_0/critic
 */
#include "shoal.h"

#include <stdio.h>

enum { MAX_ADAPTERS = 16 };

/* Not 0 would cancel the evaluation. */
static int print_progress(void *ctx, const struct shoal_progress *p) {
    (void)ctx;
    fprintf(stderr, "\r%s: %lld of %lld %s", p->task, p->done, p->total, p->detail);
    return 0;
}

int main(int argc, char **argv) {
    static const char *const options[] = {"tasks=pick,route", "n=300", NULL};
    const struct shoal_callbacks callbacks = {.progress = print_progress};
    struct shoal_error err = {0};
    struct shoal_adapter *adapters[MAX_ADAPTERS] = {0};
    char *result = NULL;
    int n = argc - 2 < MAX_ADAPTERS ? argc - 2 : MAX_ADAPTERS, loaded = 0;
    struct shoal *s = argc > 1 ? shoal_open(argv[1], NULL, &err) : NULL;
    for (; s && loaded < n; loaded++)
        if (!(adapters[loaded] = shoal_adapter_load(s, argv[loaded + 2], &err))) break;
    if (s && loaded == n)
        result = shoal_evaluate(s, (const struct shoal_adapter *const *)adapters,
                                (const char *const *)argv + 2, n, options, &callbacks, &err);
    if (result)
        printf("\n%s\n", result);
    else
        fprintf(stderr, "evaluate: %s\n",
                argc > 1 ? err.text : "usage: evaluate MODEL [ADAPTER …]");
    shoal_free(result);
    for (int i = 0; i < loaded; i++) shoal_adapter_free(adapters[i]);
    shoal_close(s);
    return result == NULL;
}
