/* backup: functions shared by backup.c and restore.c. */
#ifndef SHOAL_BACKUP_INTERNAL_H
#define SHOAL_BACKUP_INTERNAL_H

#include "backup/backup.h"

/* Counts the bytes processed and reports them to the caller's callback. */
struct backup_progress {
    const struct backup_options *p;
    int64_t done, total;
    bool stopped;
};
/* Hashes the first `size` bytes of a file and, if `to` is set, writes them to it. ERR_STATE: the
 * file is shorter, or the callback has stopped the work. */
int backup_copy_file(struct backup_progress *w, int fd, int64_t size, struct atomic_file *to,
                     const char *path, char hash[HASH_LEN], struct error *err);

int backup_dir_make(const char *path, struct error *err); /* mkdir -p, for the owner only */
/* atomic_file_open for a file that has this mode from its first byte on. */
int backup_file_open(struct atomic_file *w, const char *path, uint32_t mode, struct error *err);
/* Replaces a file by the canonical text of `v`, with mode 0600. */
int json_write_file(const char *path, const json_t *v, struct error *err);
/* Locks TO until the descriptor is closed. ERR_STATE: another process holds the lock. */
int backup_dir_lock(const char *to, struct error *err);

void backup_id_now(char id[BACKUP_ID_LEN]);
bool backup_id_is_valid(const char *id);
/* Whether `name` is that of a file or folder that a restore creates next to a root: NAME.restoring,
 * NAME.swapping, NAME.before-ID. */
bool backup_is_restore_temp(const char *name);
/* The path of a blob, TO/blobs/xx/HASH; malloc'ed. */
char *backup_blob_path(const char *to, const char *hash);
/* Reads a manifest and checks every field; NULL on an error: {…, roots: {name: path}, files:
 * [{root, path, mode, size, sha256 or dir}]}. */
json_t *backup_manifest_read(const char *to, const char *id, struct error *err);
/* The id of the newest backup, which may be damaged; ERR_MISSING: no backup exists. */
int backup_find_newest(const char *to, char id[BACKUP_ID_LEN], struct error *err);
/* Names of the entries in a folder, unsorted. */
int dir_list_names(const char *dir, struct strings *out, struct error *err);
/* Ids of the backups in TO, newest first. */
int backup_ids_list(const char *to, struct strings *out, struct error *err);

#endif
