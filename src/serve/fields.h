/*
 * fields: the fields of requests in OpenAI's form that are known, from one table: what is honoured,
 * what has no effect here whatever it says, and what is refused with a reason unless its value asks
 * for nothing. The list in docs/API.md is written from it (test_fields).
 */
#ifndef SHOAL_SERVE_FIELDS_H
#define SHOAL_SERVE_FIELDS_H

#include "base/base.h"

enum field_route { FIELD_CHAT = 1, FIELD_COMPLETION = 2, FIELD_EMBEDDING = 4 };
enum field_use { FIELD_HONOURED, FIELD_WITHOUT_EFFECT, FIELD_REFUSED };

struct known_field {
    const char *name;
    int routes; /* of enum field_route */
    enum field_use use;
    /* Of a refused field: why, and the values that ask for nothing as a JSON list; null always
     * does. */
    const char *why, *neutral;
};
extern const struct known_field known_fields[]; /* ends with a NULL name */

/* ERR_USAGE, naming the field: the body has one that is refused, or is unknown. */
int fields_check(enum field_route route, const json_t *body, struct error *err);
/* Whether some route knows a field of that name. */
bool field_is_known(const char *name);
/* The table as Markdown. */
void fields_markdown(struct buf *out);

#endif
