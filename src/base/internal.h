/* base: temporaries left by killed processes, the check of paths, and renamed options. */
#ifndef SHOAL_BASE_INTERNAL_H
#define SHOAL_BASE_INTERNAL_H

#include "base/base.h"

/* Locks a temporary that was just created under the name `tmp`. Returns false if another process
 * has locked or removed it as a leftover. */
bool tempfile_claim(int fd, const char *tmp);
/* Removes PATH.tmp-PID and PATH.tmp-PID-N that killed processes left. */
void tempfile_remove_stale(const char *path);
/* The result of path_access_hook; OK if no hook is set. */
int path_access_check(const char *path, enum path_use use, struct error *err);

/* Whether the first n bytes of `a` are the name `b`; '-' and '_' are equal. */
bool option_name_equal(const char *a, const char *b, size_t n);
/* The row that had this name in version 0.1, or NULL. With `print_note` it prints a note about the
 * new name, once per old name. */
const struct option_row *option_find_renamed(const struct option_row *rows, const char *name,
                                             size_t len, bool print_note);

/* The option that a flag of this name and value sets although the name is the old one of another
 * option ("adapter" for `--lora FILE`), or NULL. `value` may be NULL. */
const char *option_of_flag(const char *name, size_t len, const char *value);

#endif
