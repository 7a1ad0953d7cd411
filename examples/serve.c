/*
 * Serves a model over HTTP on a free port, with the adapters on the command line, until a line or
 * the end of the standard input. NAME=DIR is an adapter, a model of that name for clients. STATE is
 * the folder of the server's state.
 *
 *   cc examples/serve.c $(pkg-config --cflags --libs shoal) -o serve
 *   ./serve models/fry runs/serve critic=runs/ID/adapters/gen_0/critic
 */
#include "shoal.h"

#include <stdio.h>

enum { MAX_OPTIONS = 32, OPTION_BYTES = 1024 };

int main(int argc, char **argv) {
    static char texts[MAX_OPTIONS][OPTION_BYTES];
    const char *options[MAX_OPTIONS + 1] = {0};
    struct shoal_error err = {0};
    struct shoal *s = NULL;
    struct shoal_server *server = NULL;
    if (argc < 3 || argc > MAX_OPTIONS) {
        fprintf(stderr, "usage: serve MODEL STATE [NAME=DIR …]\n");
        return 2;
    }
    options[0] = "port=0";
    for (int i = 2; i < argc; i++) {
        snprintf(texts[i], OPTION_BYTES, "%s=%s", i == 2 ? "state" : "adapter", argv[i]);
        options[i - 1] = texts[i];
    }
    s = shoal_open(argv[1], NULL, &err);
    if (s) server = shoal_serve(s, options, &err);
    if (server) {
        const char *url = shoal_server_url(server);
        printf("listening on %s; Enter stops\n", url);
        printf("try: curl %s/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", "
               "\"content\": \"pick the smallest of 41, 3, 907\"}]}'\n",
               url);
        printf("token in %s, for changes of the server\n", shoal_server_token_file(server));
        fflush(stdout);
        getchar();
    } else {
        fprintf(stderr, "serve: %s\n", err.text);
    }
    shoal_server_stop(server);
    shoal_close(s);
    return err.code != 0;
}
