/*
 * target: chooses a target by its name (scaling.h).
 */
#include "scaling/internal.h"

#include <stdlib.h>
#include <string.h>

struct scaling_target {
    const struct target_kind *kind;
    void *state;
};

static const struct target_kind *const kinds[] = {&target_local, &target_kubernetes,
                                                  &target_command};

/* Options of one kind only. */
static const struct {
    const char *option, *kind;
    size_t offset; /* offset of its text in the options */
} own_options[] = {
    {"model", "local", offsetof(struct target_options, model)},
    {"join", "local", offsetof(struct target_options, join)},
    {"node-options", "local", offsetof(struct target_options, node_options)},
    {"kubernetes-api", "kubernetes", offsetof(struct target_options, api)},
    {"namespace", "kubernetes", offsetof(struct target_options, namespace)},
    {"deployment", "kubernetes", offsetof(struct target_options, deployment)},
    {"service-account", "kubernetes", offsetof(struct target_options, account)},
    {"command", "command", offsetof(struct target_options, command)},
};

static int options_check(const struct target_options *o, const char *kind, struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(own_options); i++) {
        const char *text = *(char *const *)(const void *)((const char *)o + own_options[i].offset);
        if (text && strcmp(own_options[i].kind, kind) != 0)
            return error_set(err, ERR_USAGE, "--%s is an option of the target %s, not of %s",
                             own_options[i].option, own_options[i].kind, kind);
    }
    return OK;
}

struct scaling_target *scaling_target_open(const struct target_options *o, int min_nodes,
                                           struct error *err) {
    const char *name = o->target ? o->target : o->command ? "command" : "";
    size_t i = 0;
    while (i < ARRAY_LEN(kinds) && strcmp(kinds[i]->name, name) != 0) i++;
    if (i == ARRAY_LEN(kinds)) {
        error_set(err, ERR_USAGE,
                  "name a target: --target local, --target kubernetes or "
                  "--command CMD");
        return NULL;
    }
    if (options_check(o, name, err) != OK) return NULL;
    void *state = kinds[i]->open(o, min_nodes, err);
    if (!state) return NULL;
    struct scaling_target *t = xcalloc(1, sizeof *t);
    *t = (struct scaling_target){kinds[i], state};
    return t;
}

int scaling_target_nodes(struct scaling_target *t, int *n, struct error *err) {
    return t->kind->nodes(t->state, n, err);
}

int scaling_target_set(struct scaling_target *t, int n, struct error *err) {
    return t->kind->set(t->state, n, err);
}

int scaling_target_sources(struct scaling_target *t, struct strings *urls, struct error *err) {
    return t->kind->sources ? t->kind->sources(t->state, urls, err) : OK;
}

int scaling_target_check(struct scaling_target *t, struct error *err) {
    return t->kind->check ? t->kind->check(t->state, err) : OK;
}

void scaling_target_close(struct scaling_target *t) {
    if (!t) return;
    t->kind->close(t->state);
    free(t);
}
