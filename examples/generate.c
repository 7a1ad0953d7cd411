/*
 * A chat that is printed while it is generated, one step of the engine at a time:
 *
 *   cc examples/generate.c $(pkg-config --cflags --libs shoal) -o generate
 *   ./generate models/fry "sort: k b x"
 */
#include "shoal.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    static const char *const options[] = {"max-tokens=64", "temperature=0.7", "seed=1", NULL};
    struct shoal_error err = {0};
    struct shoal_request *r = NULL;
    size_t printed = 0;
    int left = 1, code = 1;
    struct shoal *s = argc > 2 ? shoal_open(argv[1], NULL, &err) : NULL;
    if (!s) goto out;
    struct shoal_message messages[] = {{"user", argv[2]}};
    if (!(r = shoal_request_new(s, messages, 1, options, &err))) goto out;
    if (shoal_submit(s, r, &err) != 0) goto out;
    while (left > 0) {
        left = shoal_step(s, &err);
        const char *text = shoal_request_text(r);
        fputs(text + printed, stdout);
        fflush(stdout);
        printed = strlen(text);
    }
    struct shoal_usage usage = shoal_request_usage(r);
    printf("\n(%s after %d tokens; the prompt has %d)\n", shoal_request_finish(r),
           usage.completion_tokens, usage.prompt_tokens);
    code = left < 0;
out:
    if (code) fprintf(stderr, "generate: %s\n", argc > 2 ? err.text : "usage: generate MODEL TEXT");
    shoal_request_free(r);
    shoal_close(s);
    return code;
}
