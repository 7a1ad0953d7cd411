/*
 * Two agents debate a question with given answers. Each agent is the base model, or the adapter on
 * the command line, with a persona of its own; a callback shows the progress on stderr. The program
 * prints the transcript as JSON.
 *
 *   cc examples/debate.c $(pkg-config --cflags --libs shoal) -o debate
 *   ./debate models/fry [ADAPTER]
 */
#include "shoal.h"

#include <stdio.h>

static int on_progress(void *ctx, const struct shoal_progress *p) {
    (void)ctx;
    fprintf(stderr, "%s: %lld of at most %lld messages\n", p->task, p->done, p->total);
    return 0; /* not 0 would cancel the debate */
}

int main(int argc, char **argv) {
    static const char *const names[2] = {"optimist", "sceptic"};
    static const char *const options[] = {"topic=pick the smallest of 41, 3, 907",
                                          "choices=answer: 3",
                                          "choices=answer: 41",
                                          "choices=answer: 907",
                                          "personas=You trust the first answer.",
                                          "personas=You check every answer.",
                                          "rounds=2",
                                          "max-tokens=24",
                                          NULL};
    const struct shoal_callbacks callbacks = {.progress = on_progress};
    const struct shoal_adapter *agents[2] = {NULL, NULL};
    struct shoal_adapter *adapter = NULL;
    struct shoal_error err = {0};
    char *transcript = NULL;
    if (argc < 2) {
        fprintf(stderr, "usage: debate MODEL [ADAPTER]\n");
        return 2;
    }
    struct shoal *s = shoal_open(argv[1], NULL, &err);
    if (s && argc > 2) agents[1] = adapter = shoal_adapter_load(s, argv[2], &err);
    if (s && !err.code) transcript = shoal_debate(s, agents, names, 2, options, &callbacks, &err);
    if (transcript)
        puts(transcript);
    else
        fprintf(stderr, "debate: %s\n", err.text);
    shoal_free(transcript);
    shoal_adapter_free(adapter);
    shoal_close(s);
    return err.code != 0;
}
