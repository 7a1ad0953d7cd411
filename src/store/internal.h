/* store: the check of a store that was not closed. Private to this folder. */
#ifndef SHOAL_STORE_INTERNAL_H
#define SHOAL_STORE_INTERNAL_H

#include "store/store.h"

#include <sqlite3.h>

#define STORE_SCHEMA_VERSION 5

/* The connection of a store. */
sqlite3 *store_connection(struct store *s);
/* Whether the last process that wrote to the file of `db` ended without closing it, and no other
 * connection has it open. `db` is open, but has not read from the file. */
bool store_was_left_open(sqlite3 *db);
/* Reads the whole file and verifies the structure of its tables: ERR_FORMAT with the first problem.
 * `path` is for the messages. */
int store_check(sqlite3 *db, const char *path, struct error *err);
/* Sets the error of a damaged file: what is wrong, and the command that copies the rest. */
int store_damaged(const char *path, const char *problem, struct error *err);
/* Closing `db` then leaves the file and its write-ahead log as they are. */
void store_keep_wal(sqlite3 *db);

#endif
