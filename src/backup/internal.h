/* backup_internal: what making and restoring share. */
#ifndef SHOAL_BACKUP_INTERNAL_H
#define SHOAL_BACKUP_INTERNAL_H

#include "backup/backup.h"

/* Bytes on their way, told to whoever asked. */
struct work {
    const struct backup_place *p;
    int64_t done, total;
    bool stopped;
};
int work_step(struct work *w, int64_t bytes, struct error *err);
/* The first `size` bytes of a file, hashed and, where there is a writer, written. ERR_STATE: it has
 * fewer. */
int work_copy(struct work *w, int fd, int64_t size, struct writer *to, const char *path,
              char hash[HASH_LEN], struct error *err);

int folder_private(const char *path, struct error *err); /* mkdir -p, for the owner only */
/* writer_open of a file of this mode from its first byte on. */
int file_begin(struct writer *w, const char *path, uint32_t mode, struct error *err);
int json_save(const char *path, const json_t *v, struct error *err);
/* Holds TO until it is closed. ERR_STATE: somebody else does. */
int folder_hold(const char *to, struct error *err);

void id_now(char id[BACKUP_ID_LEN]);
bool id_is_valid(const char *id);
/* What a restore leaves beside its roots: NAME.restoring, NAME.swapping, NAME.before-ID. */
bool is_companion(const char *name);
char *blob_path(const char *to, const char *hash);
/* A manifest whose every field is as backup_make writes it, or NULL: {…, roots: {name: path},
 * files: [{root, path, mode, size, sha256 or dir}]}. */
json_t *manifest_read(const char *to, const char *id, struct error *err);
/* The newest, also of broken ones; ERR_MISSING: there is none. */
int newest_find(const char *to, char id[BACKUP_ID_LEN], struct error *err);
/* What lies in a folder, in no order. */
int backup_names(const char *dir, struct strings *out, struct error *err);
/* Ids in TO, the newest first. */
int ids_read(const char *to, struct strings *out, struct error *err);

#endif
