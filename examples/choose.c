/*
 * Asks one question of the base model and of the adapters on the command line, in one batch:
 *
 *   gcc -Iinclude examples/choose.c build/libshoal.a -ljansson -lyaml -lpcre2-8 -lsqlite3 -lsodium
 * -lunistring -lm -pthread -o choose
 *   ./choose models/fry runs/ID/adapters/gen_0/critic
 */
#include "shoal.h"

#include <stdio.h>

int main(int argc, char **argv) {
    static const char *const answers[] = {"answer: 3", "answer: 41", "answer: 907"};
    struct shoal_error err = {0};
    struct shoal_request requests[16] = {{0}};
    struct shoal_adapter *adapters[16] = {0};
    int n = argc - 1 < 16 ? argc - 1 : 16, code = 1;
    struct shoal *s = argc > 1 ? shoal_open(argv[1], 0, 0, &err) : NULL;
    for (int i = 0; s && i < n; i++) {
        if (i > 0 && !(adapters[i] = shoal_adapter_load(s, argv[i + 1], &err))) goto out;
        requests[i] = (struct shoal_request){.user = "pick the smallest of 41, 3, 907",
                                             .adapter = adapters[i],
                                             .choices = answers,
                                             .n_choices = 3};
    }
    if (!s || shoal_run(s, requests, n, &err) != 0) goto out;
    for (int i = 0; i < n; i++)
        printf("%-40s %s (%.3f)\n", i ? argv[i + 1] : "base", answers[requests[i].choice],
               (double)requests[i].probability[requests[i].choice]);
    code = 0;
out:
    if (code)
        fprintf(stderr, "choose: %s\n", argc > 1 ? err.text : "usage: choose MODEL [ADAPTER …]");
    for (int i = 0; s && i < n; i++) {
        shoal_request_release(&requests[i]);
        shoal_adapter_free(adapters[i]);
    }
    shoal_close(s);
    return code;
}
