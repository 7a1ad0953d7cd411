/* data: functions that the readers of several formats share. */
#ifndef SHOAL_DATA_INTERNAL_H
#define SHOAL_DATA_INTERNAL_H

#include "data/data.h"

/* In data.c. Parses a list of {role, content} to *out, a malloc'ed array of *n messages with room
 * for one more. The messages borrow their texts from the list. Errors name file, line and field. */
int conversation_parse(const char *path, int line, const char *field, const json_t *list,
                       struct chat_message **out, int *n, struct error *err);

/* In forms.c. Converts an object of a training file to *out, an object {messages, tools}, {prompt,
 * completion} or {text}, which the caller releases, also after an error. form: name of its form;
 * NULL: by its keys. Sets *name to the form. Errors name the key. */
int sample_convert(const json_t *v, const char *form, json_t **out, const char **name,
                   struct error *err);
/* In forms.c. The messages or the text with the question of a sample, a preference pair or a
 * prompt, or NULL. *from receives the object that it is in, which the caller releases. */
const json_t *sample_question_find(const json_t *v, const char *form, json_t **from);
/* In files.c. Calls fn for each sample of a file, as an object: of JSON, of a table (.csv, .tsv)
 * whose first row has the keys, or of a text (.txt) whose paragraphs are {text}. */
int sample_file_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

#endif
