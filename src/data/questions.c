/*
 * questions: the question of each sample of a training file: the last message of the user, the
 * prompt of a completion, or a text.
 */
#define _GNU_SOURCE
#include "data/internal.h"

#include <string.h>

struct question_visitor {
    void (*fn)(void *ctx, const char *question);
    void *ctx;
};

static const char *last_user_message(const json_t *messages) {
    const char *found = NULL;
    const json_t *m;
    size_t i;
    json_array_foreach ((json_t *)(uintptr_t)messages, i, m)
        if (strcmp(json_get_string(m, "role"), "user") == 0) found = json_get_string(m, "content");
    return found;
}

static int sample_visit(void *ctx, const json_t *value, int line, struct error *err) {
    const struct question_visitor *v = ctx;
    json_t *from;
    (void)line, (void)err;
    const json_t *found = sample_question_find(value, NULL, &from);
    const char *question =
        json_is_array(found) ? last_user_message(found) : json_string_value(found);
    if (question && *question) v->fn(v->ctx, question);
    json_decref(from);
    return OK;
}

int training_questions_each(const char *path, void (*fn)(void *ctx, const char *question),
                            void *ctx, struct error *err) {
    struct question_visitor v = {fn, ctx};
    return sample_file_each(path, sample_visit, &v, err);
}
