/* data: functions that the readers of several formats share. */
#ifndef SHOAL_DATA_INTERNAL_H
#define SHOAL_DATA_INTERNAL_H

#include "data/data.h"

/* data.c: parses a list of {role, content}. `out` is malloc'ed and borrows its texts from the list.
 * Errors name file, line and field. */
int conversation_parse(const char *path, int line, const char *field, const json_t *list,
                       struct chat_message **out, int *n, struct error *err);

#endif
