/*
 * folder: removes what tests leave on the disk. Include it under _GNU_SOURCE.
 */
#ifndef SHOAL_TEST_FOLDER_H
#define SHOAL_TEST_FOLDER_H

#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>

static inline int folder_entry_remove(const char *path, const struct stat *st, int type,
                                      struct FTW *at) {
    (void)st, (void)type, (void)at;
    return remove(path);
}

/* Removes a folder with its content; links are not followed. Not 0: something is left. */
static inline int folder_remove(const char *path) {
    return nftw(path, folder_entry_remove, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
