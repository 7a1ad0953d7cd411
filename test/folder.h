/*
 * folder: folders of tests: removes them, and copies a model. Include it under _GNU_SOURCE.
 */
#ifndef SHOAL_TEST_FOLDER_H
#define SHOAL_TEST_FOLDER_H

#include <ftw.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
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

/* A copy of test/models/fry-1 at `dir`, with a context of `tokens`. False: it cannot be written. */
static inline bool folder_long_model(const char *dir, int tokens) {
    char command[1024];
    snprintf(command, sizeof command,
             "cp -r test/models/fry-1 '%s' && sed -i 's/\\(max_position_embeddings\": \\)[0-9]*/"
             "\\1%d/' '%s/config.json'",
             dir, tokens, dir);
    return system(command) == 0;
}

#endif
