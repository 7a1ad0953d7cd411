/*
 * backup: copies the state of a server and its runs into a folder, and restores it.
 *
 *     TO/blobs/xx/HASH    file contents, named by their SHA-256; an existing blob is not rewritten
 *     TO/ID.json          manifest of one backup: the place of each content, and its own hash
 *     TO/restore.json     a restore that is scheduled or in progress
 *     TO/lock             held by the process that works on the folder
 *
 * A backup exists once its manifest does; the manifest is written last. SQLite copies its
 * databases, so concurrent writers do no harm. A file that is not a database and is written in
 * place during the backup may be copied with an old beginning and a new end.
 *
 * Threads. Any thread may call. Over all processes, one call at a time works on a folder TO; a
 * second call fails with ERR_STATE. Only backup_list, backup_restore_scheduled and
 * backup_is_unfinished do not lock it. Every argument is borrowed.
 */
#ifndef SHOAL_BACKUP_H
#define SHOAL_BACKUP_H

#include "base/base.h"

enum { BACKUP_ID_LEN = 20, BACKUP_ROOTS_MAX = 64 }; /* id: "20261122-202530-123" (UTC), and NUL */

/* A folder or file that is backed up under a name of letters, digits, '.', '_' and '-'. A root may
 * contain another root or TO; each file is backed up once, and TO is not. */
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
 * Creates a backup: {id, created, shoal, files, bytes, new_bytes, new_blobs, left_out: [text]}.
 * `left_out` lists missing roots, links, names that are not UTF-8, and files that vanish or keep
 * changing. Sockets, locks, temporary files, SQLite's companion files and the token of a running
 * server are skipped without an entry.
 */
json_t *backup_create(const struct backup_options *p, struct error *err);
/* An array of the backups, newest first, each as backup_create returns it; {id, problem} for a
 * backup that cannot be read. The array is empty if the folder does not exist. */
json_t *backup_list(const char *to, struct error *err);
/* Reads and hashes all blobs of a backup (id NULL: of all backups): {backups, blobs, bytes,
 * problems: [text]}. Does not read the roots. */
json_t *backup_verify(const struct backup_options *p, const char *id, struct error *err);
/* Deletes one backup, or all except the newest `keep`, and the blobs that no remaining manifest
 * names: {backups, blobs, bytes}, the numbers deleted. */
json_t *backup_delete(const char *to, const char *id, struct error *err);
json_t *backup_prune(const char *to, int64_t keep, struct error *err);

/*
 * Restores a backup (id NULL: the newest) to those of the roots that it holds. It verifies all
 * contents, writes them next to the roots, then renames them into place. The old content is kept as
 * PATH.before-TIME, where TIME has the form of an id. Fails with ERR_STATE while a server uses a
 * root, and, if `replace` is false, if a root is not empty. If a call is killed during the renames,
 * the next call finishes them first. Returns {id, files, bytes, roots: {name: {path, before or
 * null}}, left_out: [names without a root]}.
 */
json_t *backup_restore(const struct backup_options *p, const char *id, bool replace,
                       struct error *err);
/* Checks what backup_restore would do, and changes nothing: {writes: [paths], backup: id, files,
 * bytes, replaces}. */
json_t *backup_restore_plan(const struct backup_options *p, const char *id, bool replace,
                            struct error *err);
/* Whether a killed restore has moved only a part of the content into the root `path`. If so, err is
 * set. */
bool backup_is_unfinished(const char *path, struct error *err);

/* Verifies a backup (id is not NULL) and schedules its restore to these roots, which
 * backup_restore_run_scheduled runs later. */
int backup_restore_schedule(const struct backup_options *p, const char *id, struct error *err);
/* {id, asked: the time of the request, failed: the reason, if the restore was tried and failed};
 * NULL if no restore is scheduled. */
json_t *backup_restore_scheduled(const char *to);
int backup_restore_cancel(const char *to, const char *id, struct error *err);
/* Runs the scheduled restore and returns the result of backup_restore. Returns NULL with err->code
 * OK if no restore is scheduled for these roots, or if it has failed with the roots unchanged. Such
 * a failure is logged and recorded in restore.json, and the restore is not tried again. */
json_t *backup_restore_run_scheduled(const struct backup_options *p, struct error *err);

#endif
