/*
 * adapter_extract: `shoal adapter extract` and `resize`: reads the source, truncates it to a low
 * rank, writes the adapter, and prints its error and its KL divergence from the source. The
 * divergence includes everything that a low-rank adapter cannot represent.
 */
#include "adapter/adapter.h"
#include "cli/adapter_verbs.h"

#include <stdlib.h>

/* A KL divergence to report: the result against its source, or the base against the source. */
struct kl_row {
    const char *name, *about;
    struct kl_divergence d;
};

static void print_modules(const struct truncated_adapter *k) {
    for (int p = 0; p < N_PROJ; p++) {
        const struct projection_truncation *kind = &k->projections[p];
        if (kind->layers == 0) continue;
        printf("  %-9s %d of %d layers, rank %d", proj_names[p], kind->layers,
               k->adapter->shape.n_layers, kind->rank_min);
        if (kind->rank_max > kind->rank_min) printf(" to %d", kind->rank_max);
        printf(", error %.3g\n", kind->error);
    }
}

static json_t *modules_json(const struct truncated_adapter *k) {
    json_t *o = json_object();
    for (int p = 0; p < N_PROJ; p++)
        if (k->projections[p].layers > 0)
            json_object_set_new(
                o, proj_names[p],
                json_pack("{s:i, s:i, s:i, s:f}", "layers", k->projections[p].layers, "rank_min",
                          k->projections[p].rank_min, "rank_max", k->projections[p].rank_max,
                          "error", k->projections[p].error));
    return o;
}

static void cut_report(const struct cli_options *c, const struct truncated_adapter *k,
                       const struct cut_request *q, const struct kl_row *e, int n) {
    const struct adapter *a = k->adapter;
    if (c->json) {
        json_t *o =
            json_pack("{s:s, s:s, s:I, s:f, s:o}", "out", q->out, "hash", a->hash, "parameters",
                      (json_int_t)a->n_data, "error", k->error, "modules", modules_json(k));
        for (int i = 0; i < n; i++) json_object_set_new(o, e[i].name, divergence_json(e[i].d));
        cli_print_json(q->dry_run ? json_pack("{s:o}", "dry_run", o) : o);
        return;
    }
    if (q->dry_run) printf("dry run, nothing is written:\n");
    printf("%s: %zu parameters, relative error of ΔW %.3g\n", q->out, a->n_data, k->error);
    print_modules(k);
    for (int i = 0; i < n; i++) print_divergence(e[i].about, e[i].d);
    printf("  sha-256 %s\n", a->hash);
}

static int cut_check(const struct strings *args, int n, const char *what,
                     const struct cut_request *q, struct error *err) {
    if (args->n != n) return error_set(err, ERR_USAGE, "%s", what);
    if (!q->out) return error_set(err, ERR_USAGE, "--out is missing");
    if (q->cut.rank == 0 && q->cut.energy == 0)
        return error_set(err, ERR_USAGE,
                         "--rank R or --energy E is missing: the size of the result");
    return OK;
}

static int cut_write(const struct truncated_adapter *k, const struct cut_request *q,
                     const char *base, struct error *err) {
    return q->dry_run ? OK : adapter_write(k->adapter, q->out, base, q->fold, err);
}

int cmd_adapter_extract(const struct cli_options *c, struct model *base, const struct strings *args,
                        const struct cut_request *q, struct pool *pool, struct error *err) {
    struct truncated_adapter k = {0};
    struct kl_row e[2] = {
        {.name = "extracted_vs_finetuned", .about = "extracted against fine-tuned"},
        {.name = "base_vs_finetuned", .about = "base against fine-tuned     "}};
    if (cut_check(args, 3, "extract requires BASE and FINETUNED", q, err) != OK) return err->code;
    char *path = cli_find_file(args->v[2]);
    struct model *finetuned = model_open(path, cli_numeric_class(c), err);
    int rc = finetuned ? adapter_extract(base, finetuned, q->cut, pool, &k, err) : err->code;
    if (rc == OK) rc = cut_write(&k, q, base->name, err);
    bool comparable = rc == OK && base->config.vocab_size == finetuned->config.vocab_size;
    if (comparable) {
        e[0].d = adapter_kl_divergence(finetuned, NULL, base, k.adapter, pool);
        e[1].d = adapter_kl_divergence(finetuned, NULL, base, NULL, pool);
    }
    if (rc == OK) cut_report(c, &k, q, e, comparable ? 2 : 0);
    adapter_release(k.adapter);
    model_close(finetuned);
    free(path);
    return rc;
}

int cmd_adapter_resize(const struct cli_options *c, struct model *m, const struct strings *args,
                       const struct cut_request *q, struct pool *pool, struct error *err) {
    struct truncated_adapter k = {0};
    if (cut_check(args, 2, "resize requires one adapter", q, err) != OK) return err->code;
    struct adapter *source = adapter_open(args->v[1], m, err);
    int rc = source ? adapter_resize(source, q->cut, pool, &k, err) : err->code;
    if (rc == OK) rc = cut_write(&k, q, source->base ? source->base : m->name, err);
    if (rc == OK) {
        struct kl_row e[2] = {{"resized_vs_whole", "resized against whole",
                               adapter_kl_divergence(m, source, m, k.adapter, pool)},
                              {"base_vs_whole", "base against whole   ",
                               adapter_kl_divergence(m, source, m, NULL, pool)}};
        cut_report(c, &k, q, e, 2);
    }
    adapter_release(k.adapter);
    adapter_release(source);
    return rc;
}
