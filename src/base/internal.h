/* Inside base: temporaries left by killed processes, and the check of paths. */
#ifndef SHOAL_FOLDER_H
#define SHOAL_FOLDER_H

#include "base/base.h"

/* Locks a temporary that was just created under the name `tmp`; false: another process has removed
 * it as a leftover. */
bool tempfile_claim(int fd, const char *tmp);
/* Removes PATH.tmp-PID and PATH.tmp-PID-N of processes that no longer run. */
void tempfile_remove_stale(const char *path);
/* The result of path_access_hook; OK if no hook is set. */
int path_access_check(const char *path, enum path_use use, struct error *err);

#endif
