/*
 * cmd_knowledge: `shoal knowledge add|search|list|remove DB`: a knowledge base that agents search.
 *
 * Search uses words (BM25); with --model it also uses that model's embeddings, which `add` and
 * `search` store in DB.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    char *model, *adapter;
    int64_t chunk, top, snippet;
    double threshold, mix;
};
static const struct option_row rows[] = {
    {"model", OPT_STRING, offsetof(struct options, model), NULL, 0, 0, "MODEL",
     "also search by embeddings of this model; add and search compute and store them"},
    {"adapter", OPT_STRING, offsetof(struct options, adapter), NULL, 0, 0, "DIR",
     "adapter of the embedding model"},
    {"chunk", OPT_INT, offsetof(struct options, chunk), "800", 16, 8000, "N",
     "add: maximum characters of a chunk"},
    {"top", OPT_INT, offsetof(struct options, top), "5", 1, 1000, "N",
     "search: maximum number of hits"},
    {"threshold", OPT_FLOAT, offsetof(struct options, threshold), "0.5", 0, 1, "X",
     "search: minimum score of a hit"},
    {"mix", OPT_FLOAT, offsetof(struct options, mix), "0.5", 0, 1, "X",
     "search: weight of the cosine similarity in the score, with --model"},
    {"snippet", OPT_INT, offsetof(struct options, snippet), "500", 1, 8000, "N",
     "search: characters shown of a hit"},
    SETUP_ROWS(struct options, setup),
    {0},
};

/* An embedder with its model and engine. */
struct embedding_setup {
    struct setup setup;
    struct engine_embedder engine;
    struct embedder embedder;
};
/* EMBED_TOKENS: maximum tokens of a text that is embedded; the rest is cut off. EMBED_WORK: bytes
 * reserved outside of the engine. */
enum { EMBED_TOKENS = 2048, EMBED_WORK = 4 << 20 };

static int embedding_open(struct embedding_setup *x, const struct cli_options *c,
                          const struct options *o, struct error *err) {
    struct strings adapters = {.v = (char **)(uintptr_t)&o->adapter, .n = o->adapter != NULL};
    struct setup_needs w = {.engine = {.max_rows = 256, .max_seqs = 1, .max_len = EMBED_TOKENS},
                            .adapters = &adapters,
                            .work = EMBED_WORK};
    int rc = setup_open(&x->setup, c, &o->setup, o->model, &w, err);
    struct model *m = x->setup.m;
    if (rc != OK || !m) return rc;
    struct adapter *a = o->adapter ? setup_adapter(&x->setup, o->adapter, err) : NULL;
    if (o->adapter && !a) return err->code;
    x->setup.engine.max_len = MIN(x->setup.engine.max_len, m->config.max_seq_len);
    rc = setup_engine(&x->setup, err);
    x->engine = (struct engine_embedder){x->setup.e, m, a, x->setup.engine.max_len, {0}};
    return rc == OK ? embedder_open(&x->embedder, &x->engine, err) : rc;
}

static int add(const struct cli_options *c, const struct options *o, struct knowledge *k,
               const struct embedder *e, const struct strings *args, struct error *err) {
    struct progress bar;
    struct knowledge_options add_options = {(int)o->chunk, e, &bar};
    for (int i = 2; i < args->n; i++) {
        struct knowledge_report r;
        if (knowledge_add(k, args->v[i], &add_options, &r, err) != OK) return err->code;
        if (c->json)
            cli_print_json(json_pack("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "path",
                                     args->v[i], "added", r.added, "changed", r.changed,
                                     "unchanged", r.unchanged, "removed", r.removed, "refused",
                                     r.refused, "skipped", r.skipped, "documents", r.documents,
                                     "chunks", r.chunks, "embedded", r.embedded));
        else
            printf("%s: %d added, %d changed, %d unchanged, %d removed, %d refused, %d skipped; "
                   "%d documents, %d chunks in all\n",
                   args->v[i], r.added, r.changed, r.unchanged, r.removed, r.refused, r.skipped,
                   r.documents, r.chunks);
    }
    return OK;
}

static void hit_print(const json_t *hit, int chars) {
    struct buf line = {0};
    json_t *one = json_pack("[O]", hit);
    knowledge_snippets(one, chars, &line);
    printf("%.3f  %s       %s\n", json_number_value(json_object_get(hit, "score")), line.data,
           json_string_value(json_object_get(hit, "source")));
    json_decref(one);
    buf_release(&line);
}

/* An option value of 0 means off, which struct knowledge_query expresses as -1. */
static int search(const struct cli_options *c, const struct options *o, struct knowledge *k,
                  const struct embedder *e, const struct strings *args, struct error *err) {
    struct buf text = {0};
    for (int i = 2; i < args->n; i++) {
        if (i > 2) buf_puts(&text, " ");
        buf_puts(&text, args->v[i]);
    }
    struct knowledge_query q = {.text = text.data,
                                .top = (int)o->top,
                                .threshold = o->threshold > 0 ? o->threshold : -1,
                                .mix = o->mix > 0 ? o->mix : -1,
                                .embedder = e};
    json_t *hits = knowledge_search(k, &q, err), *hit;
    size_t i;
    json_array_foreach (hits, i, hit) {
        if (c->json)
            cli_print_json(json_incref(hit));
        else
            hit_print(hit, (int)o->snippet);
    }
    if (hits && json_array_size(hits) == 0) log_info("no hit has a score of at least --threshold");
    buf_release(&text);
    json_decref(hits);
    return hits ? OK : err->code;
}

static int list(const struct cli_options *c, struct knowledge *k, struct error *err) {
    json_t *all = knowledge_list(k, err), *v;
    size_t i;
    json_array_foreach (all, i, v) {
        if (c->json)
            cli_print_json(json_incref(v));
        else
            printf("%6lld documents %6lld chunks  %s\n",
                   (long long)json_integer_value(json_object_get(v, "documents")),
                   (long long)json_integer_value(json_object_get(v, "chunks")),
                   json_string_value(json_object_get(v, "source")));
    }
    json_decref(all);
    return all ? OK : err->code;
}

static int remove_paths(const struct cli_options *c, struct knowledge *k,
                        const struct strings *args, struct error *err) {
    for (int i = 2; i < args->n; i++) {
        struct knowledge_report r;
        if (knowledge_remove(k, args->v[i], &r, err) != OK) return err->code;
        if (c->json)
            cli_print_json(json_pack("{s:s,s:i,s:i}", "path", args->v[i], "removed", r.removed,
                                     "documents", r.documents));
        else
            printf("%s: %d files removed\n", args->v[i], r.removed);
    }
    return OK;
}

/* Prints the plan of --dry-run. Does not open DB, because that would create it. */
static int plan(const struct cli_options *c, const struct strings *args, bool is_add,
                struct error *err) {
    json_t *paths = json_array();
    int rc = OK;
    for (int i = 2; rc == OK && i < args->n; i++) {
        json_array_append_new(paths, json_from_path(args->v[i]));
        if (is_add && !path_exists(args->v[i]))
            rc = error_set(err, ERR_MISSING, "there is no '%s'", args->v[i]);
    }
    if (rc == OK)
        cli_print_dry_run(c, json_pack("{s:o,s:b,s:O}", "writes", json_from_path(args->v[1]),
                                       "there already", (int)path_exists(args->v[1]),
                                       is_add ? "reads" : "forgets", paths));
    json_decref(paths);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    const char *verb = args->v[0];
    bool is_add = strcmp(verb, "add") == 0, is_search = strcmp(verb, "search") == 0,
         is_list = strcmp(verb, "list") == 0, is_remove = strcmp(verb, "remove") == 0;
    if (!is_add && !is_search && !is_list && !is_remove)
        return error_set(err, ERR_USAGE,
                         "'%s' is not a subcommand: use add, search, list or remove", verb);
    if (is_list ? args->n > 2 : args->n < 3)
        return error_set(err, ERR_USAGE, is_list ? "list takes only DB" : "name what to %s", verb);
    if (o->adapter && !o->model) return error_set(err, ERR_USAGE, "--adapter goes with --model");
    struct embedding_setup x = {0};
    bool dry_run = o->setup.dry_run && (is_add || is_remove);
    struct knowledge *k = dry_run ? NULL : knowledge_open(args->v[1], is_add, err);
    bool uses_embeddings = (k || dry_run) && o->model && (is_add || is_search);
    int rc = !k && !dry_run ? err->code : uses_embeddings ? embedding_open(&x, c, o, err) : OK;
    const struct embedder *e = uses_embeddings ? &x.embedder : NULL;
    if (rc == OK && dry_run) rc = plan(c, args, is_add, err);
    /* After the plan of --dry-run, setup_open leaves x.setup.m NULL: then nothing is searched. */
    if (rc == OK && !dry_run && !(uses_embeddings && !x.setup.m))
        rc = is_add      ? add(c, o, k, e, args, err)
             : is_search ? search(c, o, k, e, args, err)
             : is_list   ? list(c, k, err)
                         : remove_paths(c, k, args, err);
    if (uses_embeddings) rc = setup_close(&x.setup, rc, err);
    knowledge_close(k);
    return rc;
}

const struct cli_command cmd_knowledge = {
    .name = "knowledge",
    .args = "add|search|list|remove DB [PATH …|QUERY]",
    .summary = "a knowledge base of your texts: full-text and embedding search",
    .about =
        "DB is one file. add reads files and folders of .txt, .md, .html and .jsonl ({title,\n"
        "content} or {text}); if they were added before, it reads only changed files and\n"
        "removes deleted ones. Words of Chinese and Japanese are found as well. With --model,\n"
        "search also uses embeddings of that model.\n"
        "\n"
        "  shoal knowledge add notes.db ~/notes handbook.md\n"
        "  shoal knowledge search notes.db 富士山の高さは？\n"
        "  shoal knowledge search notes.db --model model.gguf --mix 0.7 how tall is it\n"
        "  shoal knowledge list notes.db --json\n"
        "  shoal knowledge remove notes.db ~/notes/old",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 2,
    .max_args = -1,
    .run = run,
};
