/*
 * backup: everything that a server and its runs keep, copied into a folder and brought back.
 *
 *     TO/blobs/xx/HASH    contents, by their SHA-256: what is there already is not written again
 *     TO/ID.json          a backup: where each content belongs, and the manifest's own hash
 *     TO/restore.json     a restore that is asked for, or under way; TO/lock: who works here
 *
 * A backup is there when its manifest is, which is the last thing written. SQLite's files are taken
 * by SQLite, so that a writer does not matter; what else is written in place may be newer at its
 * end than at its beginning.
 *
 * Any thread may call; one call at a time works on a folder, in whatever process, and another one
 * is told ERR_STATE. Everything passed in is borrowed.
 */
#ifndef SHOAL_BACKUP_H
#define SHOAL_BACKUP_H

#include "base/base.h"

enum { BACKUP_ID_LEN = 20, BACKUP_ROOTS_MAX = 64 }; /* "20261122-202530-123", and NUL */

/* A folder, or a file, that is kept under a name: letters, digits, '.', '_' and '-'. Roots may lie
 * in one another and hold TO: each thing is kept once. */
struct backup_root {
    const char *name, *path;
};
struct backup_options {
    const char *to;
    const struct backup_root *roots;
    int n_roots;
    /* Bytes so far and in all, now and then; false: stop, with ERR_STATE. May be NULL. */
    bool (*told)(void *ctx, int64_t done, int64_t total);
    void *ctx;
    /* Of a folder that is restored, before it is put in place: may change what is `staged` by what
     * is `present`, which need not be there. Called again where a restore is begun anew. May be
     * NULL. */
    int (*staged)(const char *present, const char *staged, struct error *err);
};

/*
 * {id, created, shoal, files, bytes, new_bytes, new_blobs, left_out: [text]}. A root that is not
 * there is left out, and so are links, names that are no UTF-8 and files that vanish or keep
 * changing; sockets, locks, temporary files and SQLite's own companions go without saying.
 */
json_t *backup_create(const struct backup_options *p, struct error *err);
/* An array of {id, created, shoal, files, bytes, new_bytes, left_out}, newest first; of one that
 * cannot be read {id, problem}. A folder that is not there holds none. */
json_t *backup_list(const char *to, struct error *err);
/* Reads everything of a backup again (id NULL: of all): {backups, blobs, bytes, problems: [text]}.
 * Roots are not looked at. */
json_t *backup_verify(const struct backup_options *p, const char *id, struct error *err);
/* Takes one away, or all but the newest `keep`, and the contents that nobody names any more:
 * {backups, blobs, bytes} that are gone. */
json_t *backup_delete(const char *to, const char *id, struct error *err);
json_t *backup_prune(const char *to, int64_t keep, struct error *err);

/*
 * Brings a backup (id NULL: the newest) back to those of the roots that it holds: everything is
 * verified and written beside the roots, then put in place by renames. What was there is kept as
 * PATH.before-ID', which the result names; without `replace`, ERR_STATE where a root holds
 * something, and always while a server uses one. One that was killed is finished by the next call.
 * {id, files, bytes, roots: {name: {path, before or null}}, left_out: [names without a root]}.
 */
json_t *backup_restore(const struct backup_options *p, const char *id, bool replace,
                       struct error *err);
/* Whether a killed restore has left a root half in place; then its error is in err. */
bool backup_is_unfinished(const char *path, struct error *err);

/* Verifies a backup and leaves word that these roots are to become it, for
 * backup_restore_run_scheduled. */
int backup_restore_schedule(const struct backup_options *p, const char *id, struct error *err);
/* {id, asked, and failed: why, where it was tried}; NULL: nothing is asked for. */
json_t *backup_restore_scheduled(const char *to);
int backup_restore_cancel(const char *to, const char *id, struct error *err);
/* Does what is asked for: the result of backup_restore, or NULL with err->code OK where nothing is,
 * or where it failed and the roots are as they were, which is told and noted. */
json_t *backup_restore_run_scheduled(const struct backup_options *p, struct error *err);

#endif
