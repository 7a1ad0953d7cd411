/*
 * fallback_settings: parser of the files of fallback chains. The keys of the top level and of a
 * link are option rows, so unknown keys, wrong types and values out of range are reported with file
 * and line, as in a team file.
 */
#define _GNU_SOURCE
#include "serve/fallback.h"

#include <stdlib.h>
#include <string.h>

#define ROW(key, kind, type, field, fallback, min, max)                                            \
    { key, kind, offsetof(struct type, field), fallback, min, max, NULL, NULL }
static const struct option_row top_rows[] = {
    ROW("timeout", OPT_FLOAT, fallback_settings, timeout, "300", 0.1, 86400),
    {0},
};
static const struct option_row link_rows[] = {
    ROW("name", OPT_STRING, fallback_link_settings, name, NULL, 0, 0),
    ROW("model", OPT_STRING, fallback_link_settings, model, NULL, 0, 0),
    ROW("url", OPT_STRING, fallback_link_settings, url, NULL, 0, 0),
    ROW("api_key_env", OPT_STRING, fallback_link_settings, api_key_env, NULL, 0, 0),
    ROW("reply", OPT_STRING, fallback_link_settings, reply, NULL, 0, 0),
    ROW("timeout", OPT_FLOAT, fallback_link_settings, timeout, "0", 0, 86400),
    ROW("failure_threshold", OPT_INT, fallback_link_settings, failure_threshold, "3", 1, 1000),
    ROW("cooldown", OPT_FLOAT, fallback_link_settings, cooldown, "30", 0.1, 86400),
    {0},
};
#undef ROW

/* The default for a remote link. A whole reply of a local model can take as long as the chain. */
#define REMOTE_SECONDS 60.0

/* links */

/* A link must be of one of the three kinds. */
static int kind_check(const struct fallback_link_settings *l, struct error *err) {
    if (l->reply && (l->model || l->url || l->api_key_env))
        return error_set(err, ERR_FORMAT, "a link with 'reply' has no model, url or api_key_env");
    if (!l->reply && !l->model)
        return error_set(err, ERR_FORMAT,
                         "a link needs 'model' (of this server), 'url' and 'model' (of a remote "
                         "server) or 'reply' (a fixed text)");
    if (l->api_key_env && !l->url)
        return error_set(err, ERR_FORMAT, "'api_key_env' is for a link with 'url'");
    if (l->reply && (!*l->reply || strlen(l->reply) > FALLBACK_MAX_REPLY))
        return error_set(err, ERR_FORMAT, "'reply' must have 1 to %d bytes", FALLBACK_MAX_REPLY);
    if (l->model && !*l->model) return error_set(err, ERR_FORMAT, "'model' is empty");
    return OK;
}

bool fallback_name_is_valid(const char *name) {
    size_t n = strlen(name);
    for (const char *p = name; *p; p++)
        if (*p <= ' ' || *p > '~' || strchr("\"\\", *p)) return false;
    return n && n <= FALLBACK_MAX_NAME;
}

static int name_set(const struct fallback_settings *s, struct fallback_link_settings *l,
                    struct error *err) {
    if (!l->name) l->name = xstrdup(l->reply ? "reply" : l->model);
    if (!fallback_name_is_valid(l->name))
        return error_set(err, ERR_FORMAT,
                         "the 'name' of a link has 1 to %d characters of ASCII without blanks, "
                         "'\"' and '\\'",
                         FALLBACK_MAX_NAME);
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->links[i].name, l->name) == 0)
            return error_set(err, ERR_FORMAT, "two links have the name '%s'; set 'name'", l->name);
    return OK;
}

static int link_read(struct fallback_settings *s, const struct yaml *y, int i, struct error *err) {
    char key_path[32];
    json_t *root = json_array_get(json_object_get(y->root, "links"), (size_t)i);
    snprintf(key_path, sizeof key_path, "links.%d", i);
    if (!json_is_object(root)) {
        error_set(err, ERR_FORMAT, "a link is a mapping such as 'model: NAME'");
        return yaml_error_wrap(y, key_path, err);
    }
    struct fallback_link_settings l;
    struct yaml part = yaml_subtree(y, root, key_path);
    options_default(link_rows, &l);
    int rc = options_from_yaml(link_rows, &l, &part, NULL, err);
    if (rc == OK && (kind_check(&l, err) != OK || name_set(s, &l, err) != OK))
        rc = yaml_error_wrap(y, key_path, err);
    if (rc == OK && i > 0 && s->links[i - 1].reply) {
        error_set(err, ERR_FORMAT, "no link can follow 'reply', which always answers");
        rc = yaml_error_wrap(y, key_path, err);
    }
    if (rc == OK && l.timeout == 0) l.timeout = l.url ? REMOTE_SECONDS : s->timeout;
    if (rc == OK)
        s->links[s->n++] = l;
    else
        options_release(link_rows, &l);
    json_decref(part.lines);
    return rc;
}

static int links_read(struct fallback_settings *s, const struct yaml *y, struct error *err) {
    int n = (int)json_array_size(json_object_get(y->root, "links")), rc = OK;
    if (n < 1 || n > FALLBACK_MAX_LINKS) {
        error_set(err, ERR_FORMAT, "a list of 1 to %d links is expected in 'links'",
                  FALLBACK_MAX_LINKS);
        return yaml_error_wrap(y, "links", err);
    }
    s->links = xcalloc((size_t)n, sizeof *s->links);
    for (int i = 0; rc == OK && i < n; i++) rc = link_read(s, y, i, err);
    return rc;
}

/* files */

static int document_read(struct fallback_settings *s, const struct yaml *y, struct error *err) {
    if (!json_is_object(y->root)) {
        error_set(err, ERR_FORMAT, "a fallback chain is a mapping with 'links'");
        return yaml_error_wrap(y, "", err);
    }
    struct yaml top = {y->path, json_copy(y->root), y->lines};
    json_object_del(top.root, "links");
    int rc = options_from_yaml(top_rows, s, &top, NULL, err);
    json_decref(top.root);
    return rc == OK ? links_read(s, y, err) : rc;
}

int fallback_settings_parse(struct fallback_settings *s, const char *text, size_t len,
                            const char *path, struct error *err) {
    struct yaml y;
    *s = (struct fallback_settings){0};
    options_default(top_rows, s);
    int rc = yaml_parse(&y, path, text, len, err);
    if (rc != OK) return rc;
    rc = document_read(s, &y, err);
    yaml_release(&y);
    if (rc != OK) fallback_settings_release(s);
    return rc;
}

int fallback_settings_read(struct fallback_settings *s, const char *path, struct error *err) {
    struct buf text = {0};
    *s = (struct fallback_settings){0};
    int rc = file_read(path, 1 << 20, &text, err);
    if (rc == OK) rc = fallback_settings_parse(s, text.data ? text.data : "", text.len, path, err);
    buf_release(&text);
    return rc;
}

void fallback_settings_release(struct fallback_settings *s) {
    for (int i = 0; i < s->n; i++) options_release(link_rows, &s->links[i]);
    free(s->links);
    *s = (struct fallback_settings){0};
}
