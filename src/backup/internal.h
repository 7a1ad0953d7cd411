/* backup_internal: what making and restoring share. */
#ifndef SHOAL_BACKUP_INTERNAL_H
#define SHOAL_BACKUP_INTERNAL_H

#include "backup/backup.h"

/* Bytes on their way, told to whoever asked. */
struct backup_progress {
    const struct backup_options *p;
    int64_t done, total;
    bool stopped;
};
int backup_progress_step(struct backup_progress *w, int64_t bytes, struct error *err);
/* The first `size` bytes of a file, hashed and, where there is a writer, written. ERR_STATE: it has
 * fewer. */
int backup_copy_file(struct backup_progress *w, int fd, int64_t size, struct atomic_file *to,
                     const char *path, char hash[HASH_LEN], struct error *err);

int backup_dir_make(const char *path, struct error *err); /* mkdir -p, for the owner only */
/* atomic_file_open of a file of this mode from its first byte on. */
int backup_file_open(struct atomic_file *w, const char *path, uint32_t mode, struct error *err);
int json_write_file(const char *path, const json_t *v, struct error *err);
/* Holds TO until it is closed. ERR_STATE: somebody else does. */
int backup_dir_lock(const char *to, struct error *err);

void backup_id_now(char id[BACKUP_ID_LEN]);
bool backup_id_is_valid(const char *id);
/* What a restore leaves beside its roots: NAME.restoring, NAME.swapping, NAME.before-ID. */
bool backup_is_restore_temp(const char *name);
char *backup_blob_path(const char *to, const char *hash);
/* A manifest whose every field is as backup_create writes it, or NULL: {…, roots: {name: path},
 * files: [{root, path, mode, size, sha256 or dir}]}. */
json_t *backup_manifest_read(const char *to, const char *id, struct error *err);
/* The newest, also of broken ones; ERR_MISSING: there is none. */
int backup_find_newest(const char *to, char id[BACKUP_ID_LEN], struct error *err);
/* What lies in a folder, in no order. */
int dir_list_names(const char *dir, struct strings *out, struct error *err);
/* Ids in TO, the newest first. */
int backup_ids_list(const char *to, struct strings *out, struct error *err);

#endif
