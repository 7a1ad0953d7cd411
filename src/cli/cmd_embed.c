/*
 * cmd_embed: `shoal embed MODEL`: prints embeddings of texts: JSON lines for programs, a table of
 * cosines for people.
 */
#define _GNU_SOURCE
#include "cli/prompts.h"
#include "cli/setup.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    char *adapter, *file;
    bool normalize, similarity;
};
static const struct option_row rows[] = {
    {"file", OPT_STRING, offsetof(struct options, file), NULL, 0, 0, "FILE",
     "file of texts: one per line, or JSON Lines of {prompt}"},
    {"adapter", OPT_STRING, offsetof(struct options, adapter), NULL, 0, 0, "DIR",
     "adapter that is applied"},
    {"normalize", OPT_BOOL, offsetof(struct options, normalize), NULL, 0, 0, NULL,
     "normalise vectors to length 1"},
    {"similarity", OPT_BOOL, offsetof(struct options, similarity), NULL, 0, 0, NULL,
     "print the cosine similarity of every two texts as a table"},
    SETUP_ROWS(struct options, setup),
    {0},
};

/* Texts as tokens, and their vectors [n][d]. */
struct embedded {
    struct prompts texts;
    struct token_ids *ids; /* [n] */
    struct token_seq *seq; /* [n] */
    float *v;              /* [n][d] */
    int32_t d;
};

/* Bytes of tokens and vector per text, for the width of small models; bytes of an output line. */
enum { VECTOR_WORK = 32 << 10, VECTOR_JSON = 1 << 20 };

static int texts_read(struct embedded *x, const struct options *o, const struct strings *args,
                      struct error *err) {
    if (!o->file == (args->n < 2)) return error_set(err, ERR_USAGE, "give texts, or --file FILE");
    if (o->file) return prompts_file(&x->texts, o->file, err);
    for (int i = 1; i < args->n; i++) prompts_add(&x->texts, args->v[i], NULL, false);
    return OK;
}

static int texts_encode(struct embedded *x, const struct model *m, struct error *err) {
    size_t n = (size_t)x->texts.n;
    if (!m->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->path);
    x->ids = xcalloc(n, sizeof *x->ids);
    x->seq = xcalloc(n, sizeof *x->seq);
    for (size_t i = 0; i < n; i++) {
        if (prompt_encode(m, &x->texts.v[i], &x->ids[i], err) != OK) return err->code;
        x->seq[i] = (struct token_seq){x->ids[i].v, x->ids[i].n};
    }
    return OK;
}

/* Euclidean norm in double; the entries are summed in order. */
static double length_of(const float *v, int32_t d) {
    double sum = 0;
    for (int32_t i = 0; i < d; i++) sum += (double)v[i] * (double)v[i];
    return sqrt(sum);
}

/* A zero vector stays one. */
static void normalize(struct embedded *x) {
    for (int i = 0; i < x->texts.n; i++) {
        float *v = x->v + (int64_t)i * x->d;
        double length = length_of(v, x->d);
        for (int32_t k = 0; k < x->d && length > 0; k++) v[k] = (float)((double)v[k] / length);
    }
}

static double cosine(const struct embedded *x, int a, int b) {
    const float *u = x->v + (int64_t)a * x->d, *v = x->v + (int64_t)b * x->d;
    double dot = 0, lengths = length_of(u, x->d) * length_of(v, x->d);
    for (int32_t k = 0; k < x->d; k++) dot += (double)u[k] * (double)v[k];
    return lengths > 0 ? dot / lengths : 0;
}

static void print_vectors(const struct embedded *x) {
    for (int i = 0; i < x->texts.n; i++) {
        json_t *v = json_array();
        for (int32_t k = 0; k < x->d; k++)
            json_array_append_new(v, json_from_float(x->v[(int64_t)i * x->d + k]));
        cli_print_json(json_pack("{s:i,s:s,s:i,s:o}", "index", i, "text", x->texts.v[i].text,
                                 "tokens", x->ids[i].n, "embedding", v));
    }
}

static void print_similarity(const struct cli_options *c, const struct embedded *x) {
    for (int a = 0; a < x->texts.n; a++) {
        json_t *row = json_array();
        if (!c->json) printf("%4d", a + 1);
        for (int b = 0; b < x->texts.n; b++) {
            if (c->json)
                json_array_append_new(row, json_real(cosine(x, a, b)));
            else
                printf(" %6.3f", cosine(x, a, b));
        }
        if (c->json)
            cli_print_json(
                json_pack("{s:i,s:s,s:O}", "index", a, "text", x->texts.v[a].text, "cosine", row));
        else
            printf("  %s\n", x->texts.v[a].text);
        json_decref(row);
    }
}

static int embed(const struct cli_options *c, const struct options *o, struct setup *s,
                 struct embedded *x, struct error *err) {
    int rc = texts_encode(x, s->m, err);
    struct adapter *a = rc == OK && o->adapter ? setup_adapter(s, o->adapter, err) : NULL;
    if (rc == OK && o->adapter && !a) rc = err->code;
    if (rc == OK) rc = setup_engine(s, err);
    if (rc != OK) return rc;
    x->d = s->m->config.d_model;
    x->v = xcalloc((size_t)x->texts.n * (size_t)x->d, sizeof *x->v);
    rc = engine_embed(s->e, x->seq, x->texts.n, a, x->v, err);
    if (rc != OK) return rc;
    if (o->normalize) normalize(x);
    if (o->similarity)
        print_similarity(c, x);
    else
        print_vectors(x);
    return OK;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct embedded x = {0};
    struct setup s = {0};
    int rc = texts_read(&x, o, args, err);
    if (rc == OK) {
        struct strings adapters = {.v = (char **)(uintptr_t)&o->adapter, .n = o->adapter != NULL};
        struct setup_needs w = {.engine = {.max_rows = 256,
                                           .max_seqs = 1,
                                           .max_len = (int32_t)MIN(x.texts.longest, 1 << 30)},
                                .adapters = &adapters,
                                .work = (size_t)x.texts.n * VECTOR_WORK + VECTOR_JSON};
        rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
        if (rc == OK && s.m) rc = embed(c, o, &s, &x, err);
    }
    rc = setup_close(&s, rc, err);
    for (int i = 0; x.ids && i < x.texts.n; i++) token_ids_release(&x.ids[i]);
    prompts_release(&x.texts);
    free(x.ids);
    free(x.seq);
    free(x.v);
    return rc;
}

const struct cli_command cmd_embed = {
    .name = "embed",
    .args = "MODEL [TEXT …]",
    .summary = "compute embeddings of texts and their cosine similarities",
    .about =
        "Prints a JSON line with a vector for each text: the mean over its tokens of the last\n"
        "hidden states, of the base model or with an adapter.\n"
        "\n"
        "  shoal embed models/fry 'sort: k b x' '412と907、大きいのは？' --normalize\n"
        "  shoal embed model.gguf --file texts.txt --adapter runs/ID/adapters/gen_0/critic\n"
        "  shoal embed model.gguf --similarity cat dog 猫",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = -1,
    .run = run,
};
