/*
 * adapter_profile: stores the training questions of an adapter next to it — shoal
 * adapter profile. 'shoal serve --router similarity' reads it. Needs no model.
 */
#define _GNU_SOURCE
#include "cli/adapter_verbs.h"
#include "data/data.h"

#include <stdlib.h>

int cmd_adapter_profile(const struct cli_options *c, const struct strings *args, bool dry_run,
                        struct error *err) {
    struct prompt_profile p = {0};
    struct adapter_size size = {0};
    if (args->n < 3)
        return error_set(err, ERR_USAGE, "name an adapter and files that it was trained on");
    if (adapter_measure(args->v[1], DTYPE_F32, &size, err) != OK) return err->code;
    for (int i = 2; i < args->n; i++)
        if (prompt_profile_add_file(&p, args->v[i], err) != OK) return err->code;
    if (p.n == 0) return error_set(err, ERR_USAGE, "there is no question in these files");
    char *path = prompt_profile_path(args->v[1]);
    int rc = dry_run ? OK : prompt_profile_write(&p, path, err);
    if (rc == OK && dry_run)
        cli_print_dry_run(c, json_pack("{s:o,s:I}", "writes", json_from_path(path), "questions",
                                       (json_int_t)p.n));
    else if (rc == OK && c->json)
        cli_print_json(json_pack("{s:o,s:o,s:I}", "adapter", json_from_path(args->v[1]), "profile",
                                 json_from_path(path), "questions", (json_int_t)p.n));
    else if (rc == OK)
        printf("%s: %lld questions\n", path, (long long)p.n);
    free(path);
    return rc;
}
