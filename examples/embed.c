/*
 * Prints the cosine similarity of the first text with each of the others:
 *
 *   cc examples/embed.c $(pkg-config --cflags --libs shoal) -lm -o embed
 *   ./embed models/fry cat dog 猫
 */
#include "shoal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static double cosine(const float *a, const float *b, int d) {
    double ab = 0, aa = 0, bb = 0;
    for (int i = 0; i < d; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : 0;
}

int main(int argc, char **argv) {
    struct shoal_error err = {0};
    float *v = NULL;
    int n = argc - 2, code = 1;
    struct shoal *s = n > 1 ? shoal_open(argv[1], NULL, &err) : NULL;
    if (!s) goto out;
    int d = shoal_embedding_size(s);
    v = calloc((size_t)n * (size_t)d, sizeof *v);
    if (!v || shoal_embed(s, (const char *const *)(argv + 2), n, NULL, v, &err) != 0) goto out;
    for (int i = 1; i < n; i++)
        printf("%6.3f  %s\n", cosine(v, v + (size_t)i * (size_t)d, d), argv[i + 2]);
    code = 0;
out:
    if (code) fprintf(stderr, "embed: %s\n", n > 1 ? err.text : "usage: embed MODEL TEXT TEXT …");
    free(v);
    shoal_close(s);
    return code;
}
