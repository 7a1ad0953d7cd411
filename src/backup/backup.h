/*
 * backup: copies the state of a server and its runs into a folder, and restores it.
 *
 *     TO/blobs/xx/HASH    file contents, named by their SHA-256; an existing blob is not rewritten
 *     TO/ID.json          manifest of one backup: the place of each content, and its own hash
 *     TO/restore.json     a restore that is scheduled or in progress
 *     TO/lock             held by the process that works on the folder
 *
 * A backup exists once its manifest does; the manifest is written last. SQLite copies its
 * databases, so concurrent writers do no harm. Any other file that is written in place may be
 * copied with an end that is newer than its beginning.
 *
 * Threads. Any thread may call. One call at a time works on a folder, across all processes; a
 * second call fails with ERR_STATE. Every argument is borrowed.
 */
#ifndef SHOAL_BACKUP_H
#define SHOAL_BACKUP_H

#include "base/base.h"

enum { BACKUP_ID_LEN = 20, BACKUP_ROOTS_MAX = 64 }; /* "20261122-202530-123", and NUL */

/* A folder or file that is backed up under a name: letters, digits, '.', '_' and '-'. A root may
 * contain another root, and TO; each file is backed up once. */
struct backup_root {
    const char *name, *path;
};
struct backup_options {
    const char *to;
    const struct backup_root *roots;
    int n_roots;
    /* Reports progress: bytes done and bytes in total. If it returns false, the work stops with
     * ERR_STATE. May be NULL. */
    bool (*on_progress)(void *ctx, int64_t done, int64_t total);
    void *ctx;
    /* Called for each restored folder before it is put in place. It may edit the folder `staged`,
     * using the current folder `present`, which may not exist. Called again when a restore starts
     * over. May be NULL. */
    int (*edit_staged)(const char *present, const char *staged, struct error *err);
};

/*
 * {id, created, shoal, files, bytes, new_bytes, new_blobs, left_out: [text]}. `left_out` lists
 * missing roots, links, names that are not UTF-8, and files that vanish or keep changing. Sockets,
 * locks, temporary files and SQLite's companion files are skipped without an entry.
 */
json_t *backup_create(const struct backup_options *p, struct error *err);
/* An array of {id, created, shoal, files, bytes, new_bytes, left_out}, newest first; {id, problem}
 * for a backup that cannot be read. A folder that does not exist holds no backups. */
json_t *backup_list(const char *to, struct error *err);
/* Reads and hashes everything in a backup again (id NULL: in all backups): {backups, blobs, bytes,
 * problems: [text]}. Does not read the roots. */
json_t *backup_verify(const struct backup_options *p, const char *id, struct error *err);
/* Deletes one backup, or all except the newest `keep`, and the blobs that no remaining manifest
 * names: {backups, blobs, bytes}, the numbers deleted. */
json_t *backup_delete(const char *to, const char *id, struct error *err);
json_t *backup_prune(const char *to, int64_t keep, struct error *err);

/*
 * Restores a backup (id NULL: the newest) to those of the roots that it holds. It verifies all
 * contents, writes them next to the roots, then renames them into place. The old content is kept as
 * PATH.before-ID', which the result names. Fails with ERR_STATE if a root is not empty and
 * `replace` is false, and always while a server uses a root. If a call is killed, the next call
 * finishes it. {id, files, bytes, roots: {name: {path, before or null}}, left_out: [names without a
 * root]}.
 */
json_t *backup_restore(const struct backup_options *p, const char *id, bool replace,
                       struct error *err);
/* Whether a killed restore has left a root half in place; if so, err is set. */
bool backup_is_unfinished(const char *path, struct error *err);

/* Verifies a backup and schedules its restore to these roots, to be run by
 * backup_restore_run_scheduled. */
int backup_restore_schedule(const struct backup_options *p, const char *id, struct error *err);
/* {id, asked, and failed: the reason, if a restore was tried}; NULL if no restore is scheduled. */
json_t *backup_restore_scheduled(const char *to);
int backup_restore_cancel(const char *to, const char *id, struct error *err);
/* Runs the scheduled restore and returns the result of backup_restore. Returns NULL with err->code
 * OK if no restore is scheduled for these roots, or if it failed with the roots unchanged; such a
 * failure is logged and recorded in restore.json. */
json_t *backup_restore_run_scheduled(const struct backup_options *p, struct error *err);

#endif
