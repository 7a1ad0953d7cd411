/*
 * fields: reading the fields of requests, and the table of those that are known in OpenAI's form:
 * what is honoured, what has no effect here whatever it says, and what is refused with a reason
 * unless its value asks for nothing. The list in docs/API.md is written from it (test_fields).
 */
#ifndef SHOAL_SERVE_FIELDS_H
#define SHOAL_SERVE_FIELDS_H

#include "base/base.h"

enum field_route { FIELD_CHAT = 1, FIELD_COMPLETION = 2, FIELD_EMBEDDING = 4 };
enum field_support { FIELD_SUPPORTED, FIELD_IGNORED, FIELD_REJECTED };

struct request_field {
    const char *name;
    int routes; /* of enum field_route */
    enum field_support use;
    /* Of a refused field: why, and the values that ask for nothing as a JSON list; null always
     * does. */
    const char *why, *neutral;
};
extern const struct request_field request_fields[]; /* ends with a NULL name */

/* ERR_USAGE, naming the field: the body has one that is refused, or is unknown. */
int request_fields_check(enum field_route route, const json_t *body, struct error *err);
/* Whether some route knows a field of that name. */
bool request_field_is_known(const char *name);
/* The table as Markdown. */
void request_fields_markdown(struct buf *out);

/* The value under a key where it is not null. */
json_t *json_get_nonnull(const json_t *o, const char *key);
/* Read into *out, which keeps its value when the key is absent or null. ERR_USAGE with the range:
 * the key is then in err's text. */
int json_read_number(const json_t *o, const char *key, double lo, double hi, double *out,
                     struct error *err);
int json_read_int(const json_t *o, const char *key, int64_t lo, int64_t hi, int64_t *out,
                  struct error *err);
int json_read_bool(const json_t *o, const char *key, bool *out, struct error *err);
int json_read_string(const json_t *o, const char *key, const char **out, struct error *err);
/* A text that is kept or compared: of at most JSON_NAME_MAX. */
enum { JSON_NAME_MAX = 256, MODEL_NAME_MAX = 4096 /* of a sum of names */ };
int json_read_name(const json_t *o, const char *key, const char **out, struct error *err);
/* A string or a list of at most `most` strings, appended. */
int json_read_strings(const json_t *o, const char *key, int most, struct strings *out,
                      struct error *err);

#endif
