/*
 * cmd_backup: `shoal backup TO` and `shoal restore TO`: copies the state of the server and the runs
 * into a folder and restores it.
 *
 * Each root has a name in the backup: "state", "runs", and for --also the last part of each path;
 * restore finds the target of a name by the same flags.
 */
#define _GNU_SOURCE
#include "backup/backup.h"
#include "cli/cli.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *state, *runs;
    struct strings also;
    bool list, check, replace, dry_run;
    int64_t prune;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
#define ROOT_ROWS                                                                                  \
    ROW("state", OPT_STRING, state, "runs/serve", 0, 0, "DIR", "state folder of the server"),      \
        ROW("runs", OPT_STRING, runs, "runs", 0, 0, "DIR", "folder of the runs"),                  \
        ROW("also", OPT_LIST, also, NULL, 0, 0, "PATH",                                            \
            "additional folders and files; the last part of a path is its name in the backup")
static const struct option_row backup_rows[] = {
    ROOT_ROWS,
    ROW("list", OPT_BOOL, list, NULL, 0, 0, NULL, "list the backups"),
    ROW("check", OPT_BOOL, check, NULL, 0, 0, NULL,
        "verify the backup ID, or all backups: exit 1 if something is missing or broken"),
    ROW("prune", OPT_INT, prune, "0", 0, 1e6, "KEEP",
        "remove all backups except the newest KEEP, and contents that no other backup uses"),
    {0},
};
static const struct option_row restore_rows[] = {
    ROOT_ROWS,
    ROW("replace", OPT_BOOL, replace, NULL, 0, 0, NULL,
        "replace what exists at a path, and keep it as PATH.before-…"),
    ROW("dry-run", OPT_BOOL, dry_run, NULL, 0, 0, NULL,
        "verify the backup, print what would be restored, and exit"),
    {0},
};
#undef ROOT_ROWS
#undef ROW

static bool on_progress(void *ctx, int64_t done, int64_t total) {
    struct progress *p = ctx;
    p->total = total;
    progress_update(p, done, NULL);
    return true;
}

/* "adapters/critic/" → "critic". malloc'ed. */
static char *last_part(const char *path) {
    char *copy = xstrdup(path);
    for (size_t n = strlen(copy); n > 1 && copy[n - 1] == '/';) copy[--n] = 0;
    const char *slash = strrchr(copy, '/');
    char *name = xstrdup(slash ? slash + 1 : copy);
    free(copy);
    return name;
}

/* Fills roots from the options and returns their number; roots borrow from `names`. */
static int roots_make(const struct options *o, struct strings *names, struct backup_root *roots,
                      struct error *err) {
    int n = 0;
    if (o->also.n > BACKUP_ROOTS_MAX - 3)
        return error_set(err, ERR_USAGE, "--also takes at most %d paths", BACKUP_ROOTS_MAX - 3);
    roots[n++] = (struct backup_root){"state", o->state};
    roots[n++] = (struct backup_root){"runs", o->runs};
    for (int i = 0; i < o->also.n; i++) {
        char *name = last_part(o->also.v[i]);
        strings_add(names, name);
        free(name);
    }
    for (int i = 0; i < o->also.n; i++)
        roots[n++] = (struct backup_root){names->v[i], o->also.v[i]};
    return n;
}

static int array_count(const json_t *v, const char *key) {
    return (int)json_array_size(json_object_get(v, key));
}

static void texts_warn(const json_t *v, const char *key, const char *words) {
    const json_t *list = json_object_get(v, key), *text;
    size_t i;
    json_array_foreach (list, i, text) log_warn("%s%s", words, json_string_value(text));
}

static int list(const struct cli_options *c, const char *to, struct error *err) {
    json_t *all = backup_list(to, err), *v;
    size_t i;
    if (!all) return err->code;
    if (!c->json) printf("%-21s%-22s%10s%16s%16s\n", "id", "made", "files", "bytes", "new bytes");
    json_array_foreach (all, i, v) {
        if (c->json)
            cli_print_json(json_incref(v));
        else if (json_object_get(v, "problem"))
            printf("%-21s%s\n", json_get_string(v, "id"), json_get_string(v, "problem"));
        else
            printf("%-21s%-22s%10.0f%16.0f%16.0f\n", json_get_string(v, "id"),
                   json_get_string(v, "created"), json_get_number(v, "files"),
                   json_get_number(v, "bytes"), json_get_number(v, "new_bytes"));
    }
    json_decref(all);
    return OK;
}

static int create(const struct cli_options *c, const struct backup_options *p, struct error *err) {
    json_t *v = backup_create(p, err);
    if (!v) return err->code;
    texts_warn(v, "left_out", "left out: ");
    log_info("backup '%s': %.0f files, %.0f bytes, of which %.0f are new", json_get_string(v, "id"),
             json_get_number(v, "files"), json_get_number(v, "bytes"),
             json_get_number(v, "new_bytes"));
    if (c->json)
        cli_print_json(v);
    else
        puts(json_get_string(v, "id")), json_decref(v);
    return OK;
}

static int check(const struct cli_options *c, const struct backup_options *p, const char *id,
                 struct error *err) {
    json_t *v = backup_verify(p, id, err);
    if (!v) return err->code;
    int n = array_count(v, "problems"), rc = OK;
    texts_warn(v, "problems", "");
    if (n)
        rc = error_set(err, ERR_FORMAT, "%d of the contents and manifests in '%s' %s broken", n,
                       p->to, n == 1 ? "is" : "are");
    else
        log_info("%.0f backups, %.0f contents, %.0f bytes: all are intact",
                 json_get_number(v, "backups"), json_get_number(v, "blobs"),
                 json_get_number(v, "bytes"));
    if (c->json)
        cli_print_json(v);
    else
        json_decref(v);
    return rc;
}

static int prune(const struct cli_options *c, const char *to, int64_t keep, struct error *err) {
    json_t *v = backup_prune(to, keep, err);
    if (!v) return err->code;
    log_info("removed %.0f backups, %.0f bytes", json_get_number(v, "backups"),
             json_get_number(v, "bytes"));
    if (c->json)
        cli_print_json(v);
    else
        json_decref(v);
    return OK;
}

static int backup(const struct cli_options *c, const void *options, const struct strings *args,
                  struct error *err) {
    const struct options *o = options;
    struct backup_root roots[BACKUP_ROOTS_MAX];
    struct strings names = {0};
    struct progress bar;
    const char *to = args->v[0], *id = args->n > 1 ? args->v[1] : NULL;
    if (o->list + o->check + (o->prune > 0) > 1)
        return error_set(err, ERR_USAGE, "--list, --check and --prune exclude each other");
    if (id && !o->check) return error_set(err, ERR_USAGE, "an id goes with --check");
    int n = roots_make(o, &names, roots, err), rc = n;
    struct backup_options p = {
        .to = to, .roots = roots, .n_roots = n, .on_progress = on_progress, .ctx = &bar};
    if (n > 0) {
        progress_start(&bar, o->check ? "check" : "backup", 0);
        rc = o->list    ? list(c, to, err)
             : o->check ? check(c, &p, id, err)
             : o->prune ? prune(c, to, o->prune, err)
                        : create(c, &p, err);
    }
    strings_release(&names);
    return rc;
}

static void restored_print(const json_t *v) {
    const char *name;
    json_t *root;
    json_object_foreach (json_object_get(v, "roots"), name, root) {
        const char *before = json_get_string(root, "before");
        log_info("%s: '%s' is as in backup '%s'%s%s", name, json_get_string(root, "path"),
                 json_get_string(v, "id"), *before ? "; the previous contents are in " : "",
                 before);
    }
}

static int restore(const struct cli_options *c, const void *options, const struct strings *args,
                   struct error *err) {
    const struct options *o = options;
    struct backup_root roots[BACKUP_ROOTS_MAX];
    struct strings names = {0};
    struct progress bar;
    int n = roots_make(o, &names, roots, err);
    struct backup_options p = {.to = args->v[0],
                               .roots = roots,
                               .n_roots = n,
                               .on_progress = on_progress,
                               .ctx = &bar,
                               .edit_staged = keys_restore};
    const char *id = args->n > 1 ? args->v[1] : NULL;
    json_t *v = NULL;
    if (n > 0) {
        progress_start(&bar, "restore", 0);
        v = o->dry_run ? backup_restore_plan(&p, id, o->replace, err)
                       : backup_restore(&p, id, o->replace, err);
    }
    strings_release(&names);
    if (!v) return err->code;
    if (o->dry_run) {
        cli_print_dry_run(c, v);
        return OK;
    }
    restored_print(v);
    texts_warn(v, "left_out", "left out, because its --also is missing: ");
    if (c->json)
        cli_print_json(v);
    else
        json_decref(v);
    return OK;
}

const struct cli_command cmd_backup = {
    .name = "backup",
    .args = "TO [ID]",
    .summary = "copy the server's state and the runs; only new contents are written",
    .about =
        "Copies the server's state, the runs and the paths of --also to the folder TO; the\n"
        "server may keep running. Contents are stored once, by their hash, for all backups in\n"
        "TO together. 'shoal restore' restores a backup. TO needs the same protection as its\n"
        "contents.\n"
        "\n"
        "  shoal backup /mnt/backups --also adapters team.yaml\n"
        "  shoal backup /mnt/backups --list\n"
        "  shoal backup /mnt/backups --check\n"
        "  shoal backup /mnt/backups --prune 7",
    .rows = backup_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = backup,
};

const struct cli_command cmd_restore = {
    .name = "restore",
    .args = "TO [ID]",
    .summary = "restore a backup after verifying it; replaced files are kept",
    .about =
        "Restores the backup ID of the folder TO, or the newest one, to --state, --runs and the\n"
        "paths of --also. Everything is verified and written next to its target before anything\n"
        "is replaced. Stop the server and all other programs that write there first. If a\n"
        "restore was killed, the same command finishes it. A key that was revoked after the\n"
        "backup stays revoked; a key that was added after the backup is kept but revoked.\n"
        "\n"
        "  shoal restore /mnt/backups\n"
        "  shoal restore /mnt/backups 20261122-202530-123 --replace --also adapters team.yaml",
    .rows = restore_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = restore,
};
