/*
 * adapter_list: the versions of adapters on disk — shoal adapter list.
 *
 * Reads version.json files and compares bytes; needs no model. The only thing that it may change:
 * it finishes publishing a version if a kill interrupted that.
 */
#include "cli/adapter_verbs.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

/* Prints tags without control characters: a tag may come from another person, and escape sequences
 * would control the terminal. */
static void print_tags(const json_t *tags) {
    json_t *tag;
    size_t i;
    json_array_foreach (tags, i, tag) {
        const char *text = json_string_value(tag);
        printf(i ? ", " : "  ");
        for (const char *p = text ? text : ""; *p; p++)
            putchar((unsigned char)*p < 0x20 || *p == 0x7f ? '?' : *p);
    }
}

static void print_version(const json_t *v) {
    const json_t *score = json_object_get(v, "score");
    printf("  %c %.12s  %-20.20s  ", json_is_true(json_object_get(v, "current")) ? '*' : ' ',
           json_get_string(v, "hash"), json_get_string(v, "created"));
    if (json_is_number(score))
        printf("score %+.4f", json_number_value(score));
    else
        printf("no score     ");
    print_tags(json_object_get(v, "tags"));
    printf("\n");
}

/* The number of invocation tokens of the current version; 0: it is no activated LoRA. */
static size_t invocation_length(const char *dir) {
    struct error ignored;
    char *path = path_join(dir, "adapter_config.json");
    json_t *config = path_exists(path) ? json_parse_file(path, &ignored) : NULL;
    size_t n = json_array_size(json_object_get(config, "alora_invocation_tokens"));
    json_decref(config);
    free(path);
    return n;
}

static int list_one(const struct cli_options *c, const char *dir, struct error *err) {
    json_t *versions = adapter_versions(dir, err), *v;
    size_t i, n = json_array_size(versions);
    bool current = false;
    if (!versions) return err->code;
    if (c->json) {
        cli_print_json(
            json_pack("{s:o,s:o}", "adapter", json_from_path(dir), "versions", versions));
        return OK;
    }
    printf("%s: %zu version%s%s\n", dir, n, n == 1 ? "" : "s",
           invocation_length(dir) ? ", activated LoRA" : "");
    json_array_foreach (versions, i, v) {
        current = current || json_is_true(json_object_get(v, "current"));
        print_version(v);
    }
    if (!current)
        printf(
            "  * the adapter in this folder was not published; it is kept when it is replaced\n");
    json_decref(versions);
    return OK;
}

bool dir_is_adapter(const char *dir) {
    char *versions_dir = path_join(dir, ".versions");
    bool found_any = adapter_exists(dir) || path_is_dir(versions_dir);
    free(versions_dir);
    return found_any;
}

static int is_visible(const struct dirent *f) {
    return f->d_name[0] != '.';
}

/* Lists the adapters directly below a folder, by name. */
static int list_folder(const struct cli_options *c, const char *dir, int *shown,
                       struct error *err) {
    struct dirent **found = NULL;
    int n = scandir(dir, &found, is_visible, alphasort), rc = OK;
    if (n < 0) return error_errno(err, "cannot read the directory '%s'", dir);
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, found[i]->d_name);
        if (rc == OK && dir_is_adapter(path)) {
            rc = list_one(c, path, err);
            ++*shown;
        }
        free(path);
        free(found[i]);
    }
    free(found);
    return rc;
}

int cmd_adapter_list(const struct cli_options *c, const struct strings *args, struct error *err) {
    int rc = OK;
    if (args->n < 2) return error_set(err, ERR_USAGE, "name at least one adapter or folder");
    for (int i = 1; rc == OK && i < args->n; i++) {
        int shown = 0;
        if (dir_is_adapter(args->v[i]))
            rc = list_one(c, args->v[i], err);
        else
            rc = list_folder(c, args->v[i], &shown, err);
        if (rc == OK && !dir_is_adapter(args->v[i]) && shown == 0)
            rc = error_set(err, ERR_MISSING, "no adapter in '%s'", args->v[i]);
    }
    return rc;
}
