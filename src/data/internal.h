/* data: a function that the readers of several formats share. */
#ifndef SHOAL_DATA_INTERNAL_H
#define SHOAL_DATA_INTERNAL_H

#include "data/data.h"

/* In data.c. Parses a list of {role, content} to *out, a malloc'ed array of *n messages with room
 * for one more. The messages borrow their texts from the list. Errors name file, line and field. */
int conversation_parse(const char *path, int line, const char *field, const json_t *list,
                       struct chat_message **out, int *n, struct error *err);

#endif
