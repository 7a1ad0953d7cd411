/*
 * request_fields: reads the fields of requests, and has the table of known fields of OpenAI's API.
 * A field is supported; or ignored, whatever its value; or rejected with a reason, unless its value
 * is neutral (asks for what the server does anyway). The list in docs/API.md is generated from the
 * table, which test_fields checks.
 */
#ifndef SHOAL_SERVE_REQUEST_FIELDS_H
#define SHOAL_SERVE_REQUEST_FIELDS_H

#include "http/http.h"

enum field_route { FIELD_CHAT = 1, FIELD_COMPLETION = 2, FIELD_EMBEDDING = 4 };
enum field_support { FIELD_SUPPORTED, FIELD_IGNORED, FIELD_REJECTED };

struct request_field {
    const char *name;
    int routes; /* bits of enum field_route */
    enum field_support support;
    /* For a rejected field: the reason, and the neutral values as a JSON list; null is always
     * neutral. */
    const char *reason, *neutral_values;
};
extern const struct request_field request_fields[]; /* ends with a NULL name */

/* ERR_USAGE: the body has a rejected or an unknown field, which err names. */
int request_fields_check(enum field_route route, const json_t *body, struct error *err);
/* Checks the names of the fields of a body that POST `path` receives; the fields of chats,
 * completions and embeddings of OpenAI's API are checked by request_fields_check instead.
 * ERR_USAGE: the path does not know a field, which err names. */
int body_fields_check(const char *path, const json_t *body, struct error *err);
/* ERR_USAGE: a text of the JSON body contains U+0000 or half of a surrogate pair, or is not UTF-8;
 * err names its field. OK: there is no such text before the first byte that is not JSON. */
int request_text_check(const char *text, size_t len, struct error *err);
/* The text of a member of the JSON object in the body, or NULL if no such member is found before
 * the first byte that is not JSON. */
const char *request_text_member(const char *text, size_t len, const char *key, size_t *n);
/* The value of a member of a request's JSON body, or NULL as above. The caller releases it. */
json_t *request_body_member(const struct exchange *x, const char *key);
/* Whether any route knows the field; of a path such as messages[0].content, the first name counts.
 */
bool request_field_is_known(const char *path);
/* The tables as Markdown. */
void request_fields_markdown(struct buf *out);

/* The value of a key; NULL if it is absent or null. */
json_t *json_get_nonnull(const json_t *o, const char *key);
/* json_read_*: store the value of a key in *out; *out is unchanged if the key is absent or null.
 * ERR_USAGE: the value has the wrong type or is out of range; err names the key and the range. */
int json_read_number(const json_t *o, const char *key, double lo, double hi, double *out,
                     struct error *err);
int json_read_int(const json_t *o, const char *key, int64_t lo, int64_t hi, int64_t *out,
                  struct error *err);
/* The same for an argument of the query. */
int query_read_int(const struct exchange *x, const char *key, int64_t lo, int64_t hi, int64_t *out,
                   struct error *err);
int query_read_number(const struct exchange *x, const char *key, double lo, double hi, double *out,
                      struct error *err);
int json_read_bool(const json_t *o, const char *key, bool *out, struct error *err);
int json_read_string(const json_t *o, const char *key, const char **out, struct error *err);
/* Limits of names, in bytes. json_read_name reads a string of at most JSON_NAME_MAX bytes. */
enum {
    JSON_NAME_MAX = 256,
    MODEL_NAME_MAX = 4096 /* for a weighted sum of names, such as a*0.7+b*0.3 */
};
int json_read_name(const json_t *o, const char *key, const char **out, struct error *err);
/* Appends the value of a key to *out: a string, or a list of at most `max_items` strings. */
int json_read_strings(const json_t *o, const char *key, int max_items, struct strings *out,
                      struct error *err);

#endif
