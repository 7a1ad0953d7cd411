/*
 * workflow: parser of workflows. It converts YAML to nodes with parsed templates and to edges
 * between node indices.
 *
 * It reports all errors of a file, with file and line, except those that depend on the values of a
 * template's variables. Invariant: a parsed workflow is read-only and may be shared by threads.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *text;
} builtin[] = {
#include "protocols.inc"
};

const char *workflow_builtin(int i, const char **text) {
    if (i < 0 || i >= (int)ARRAY_LEN(builtin)) return NULL;
    if (text) *text = builtin[i].text;
    return builtin[i].name;
}

bool workflow_is_builtin(const char *protocol) {
    const char *name;
    protocol = current_value("protocol", protocol);
    for (int i = 0; (name = workflow_builtin(i, NULL)); i++)
        if (strcmp(name, protocol) == 0) return true;
    return false;
}

struct workflow_reader { /* `key_path`: the dotted path of the value that is read, for messages */
    const struct yaml *y;
    struct workflow *w;
    char key_path[128];
    struct error *err;
};

static int format_error(const struct workflow_reader *r, const char *what, const char *subject) {
    int line = yaml_line(r->y, r->key_path); // 0: a missing key has no line
    return error_set(r->err, ERR_FORMAT, "'%s' line %d: %s '%s'", r->y->path, MAX(line, 1), what,
                     subject);
}

/* Sets r->key_path from a format with a name and, if it has %d, a number. */
static int set_key_path(struct workflow_reader *r, const char *format, const char *name, int i) {
    char text[sizeof r->key_path];
    snprintf(text, sizeof text, format, name, i);
    memcpy(r->key_path, text, sizeof text);
    return OK;
}

/* Sets *out to the index of the text `v` in `known` (ended by NULL). */
static int enum_read(struct workflow_reader *r, const json_t *v, const char *const *known,
                     int *out) {
    const char *text = json_string_value(v);
    if (!text) return format_error(r, "a word is expected at", r->key_path);
    for (*out = 0; known[*out]; ++*out)
        if (strcmp(known[*out], text) == 0) return OK;
    return format_error(r, "unknown value", text);
}

static int number_read(struct workflow_reader *r, const json_t *v, double lo, double hi,
                       double *out) {
    char what[96];
    *out = json_number_value(v);
    if (json_is_number(v) && *out >= lo && *out <= hi) return OK;
    snprintf(what, sizeof what, "a number of %.10g to %.10g is expected at", lo, hi);
    return format_error(r, what, r->key_path);
}

static int template_read(struct workflow_reader *r, const json_t *v, struct jinja **out) {
    const char *text = json_string_value(v);
    if (!text) return format_error(r, "a text is expected at", r->key_path);
    *out = jinja_parse(text, strlen(text), r->err);
    if (*out) return OK;
    return error_wrap(r->err, "'%s' line %d, template", r->y->path,
                      MAX(yaml_line(r->y, r->key_path), 1));
}

/* Checks that `v` is NULL or a mapping that has only keys in `known` (ended by NULL). Sets
 * r->key_path to key_path. */
static int keys_check(struct workflow_reader *r, const json_t *v, const char *key_path,
                      const char *const *known) {
    const char *key;
    json_t *x;
    set_key_path(r, "%s", key_path, 0);
    if (v && !json_is_object(v)) return format_error(r, "a mapping is expected at", key_path);
    json_object_foreach ((json_t *)(uintptr_t)v, key, x) {
        int i = 0;
        while (known[i] && strcmp(known[i], key) != 0) i++;
        snprintf(r->key_path, sizeof r->key_path, "%s.%s", key_path, key);
        if (!known[i]) return format_error(r, "unknown key", key);
    }
    return set_key_path(r, "%s", key_path, 0);
}

int workflow_role_find(const struct workflow *w, const char *name) {
    for (int i = 0; i < w->n_roles; i++)
        if (strcmp(w->roles[i], name) == 0) return i;
    return -1;
}

static int node_find(const struct workflow *w, const char *name) {
    for (int i = 0; i < w->n_nodes; i++)
        if (strcmp(w->nodes[i].name, name) == 0) return i;
    return -1;
}

/* Reads the key `by` of a node: "all", a role, or a list of roles. */
static int speakers_read(struct workflow_reader *r, const json_t *v, struct workflow_node *n) {
    size_t count = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < count; i++) {
        const char *name = json_string_value(json_is_array(v) ? json_array_get(v, i) : v);
        if (!name) return format_error(r, "a role is expected at", r->key_path);
        if (strcmp(name, "all") == 0) {
            n->role_mask = ~0u;
            continue;
        }
        int role = workflow_role_find(r->w, name);
        if (role < 0) return format_error(r, "no role", name);
        n->role_mask |= 1u << role;
    }
    return n->role_mask ? OK : format_error(r, "no role speaks at", n->name);
}

static int messages_read(struct workflow_reader *r, const json_t *v, struct workflow_node *n) {
    static const char *const roles[] = {"system", "user", "assistant", NULL};
    size_t count = json_array_size(v);
    if (count < 1 || count > NODE_MESSAGES_MAX)
        return format_error(r, "between one and eight messages are expected at", n->name);
    for (size_t i = 0; i < count; i++) {
        const json_t *m = json_array_get(v, i);
        const char *key = json_object_iter_key(json_object_iter((json_t *)(uintptr_t)m));
        int role, rc;
        json_t *name = json_string(key ? key : "");
        set_key_path(r, "nodes.%s.messages.%d", n->name, (int)i);
        rc = json_object_size(m) == 1
                 ? enum_read(r, name, roles, &role)
                 : format_error(r, "a role and its text are expected at", r->key_path);
        json_decref(name);
        if (rc) return rc;
        n->message_role[i] = roles[role];
        if ((rc = template_read(r, json_object_get(m, key), &n->message[i]))) return rc;
        n->n_messages++;
    }
    return OK;
}

/* Reads the key `flock` of a node: the coefficients of the rules. */
static int flock_read(struct workflow_reader *r, const json_t *v, struct flock_rules *out) {
    static const char *const rules[] = {"separation", "alignment", "cohesion", NULL};
    double *const coefficients[] = {&out->separation, &out->alignment, &out->cohesion};
    char path[sizeof r->key_path];
    memcpy(path, r->key_path, sizeof path);
    int rc = keys_check(r, v, path, rules);
    for (int i = 0; rc == OK && rules[i]; i++) {
        const json_t *x = json_object_get(v, rules[i]);
        snprintf(r->key_path, sizeof r->key_path, "%.100s.%s", path, rules[i]);
        if (x) rc = number_read(r, x, 0, FLOCK_MAX_COEFFICIENT, coefficients[i]);
    }
    return rc;
}

static int node_key_read(struct workflow_reader *r, struct workflow_node *n, const char *key,
                         const json_t *v) {
    static const char *const replies[] = {"text", "answer", "judge", "legacy", NULL};
    static const char *const orders[] = {"together", "in-turn", NULL};
    double x = 0;
    int rc, i = 0;
    if (strcmp(key, "by") == 0) return speakers_read(r, v, n);
    if (strcmp(key, "messages") == 0) return messages_read(r, v, n);
    if (strcmp(key, "flock") == 0) {
        n->has_flock = true;
        return flock_read(r, v, &n->flock);
    }
    if (strcmp(key, "same_round") == 0) {
        n->same_round = json_is_true(v);
        return json_is_boolean(v) ? OK : format_error(r, "true or false is expected at", n->name);
    }
    if (strcmp(key, "reply") == 0) {
        json_t *current_name =
            json_is_string(v) ? json_string(renamed_value("reply", json_string_value(v))) : NULL;
        rc = enum_read(r, current_name ? current_name : v, replies, &i);
        json_decref(current_name);
        n->reply = (enum reply_format)i;
    } else if (strcmp(key, "order") == 0) {
        rc = enum_read(r, v, orders, &i);
        n->in_turn = i;
    } else if (strcmp(key, "tail") == 0) {
        rc = number_read(r, v, 0, 1e6, &x);
        n->tail_chars = (int)x;
    } else if (strcmp(key, "temperature") == 0) {
        rc = number_read(r, v, 0, 100, &x);
        n->temperature = (float)x;
    } else if (strcmp(key, "top_p") == 0) {
        rc = number_read(r, v, 1e-6, 1, &x);
        n->top_p = (float)x;
    } else if (strcmp(key, "max_tokens") == 0) {
        rc = number_read(r, v, 1, 1e6, &x);
        n->max_tokens = (int32_t)x;
    } else {
        rc = format_error(r, "a node has no", key);
    }
    return rc;
}

static int node_read(struct workflow_reader *r, const char *name, const json_t *v) {
    struct workflow_node *n = &r->w->nodes[r->w->n_nodes++];
    const char *key;
    json_t *x;
    *n = (struct workflow_node){
        .name = xstrdup(name), .top_p = 1, .max_tokens = 256, .temperature = 0.7f};
    if (!json_is_object(v)) return format_error(r, "a node is a mapping:", name);
    json_object_foreach ((json_t *)(uintptr_t)v, key, x) {
        snprintf(r->key_path, sizeof r->key_path, "nodes.%s.%s", name, key);
        int rc = node_key_read(r, n, key, x);
        if (rc) return rc;
    }
    set_key_path(r, "nodes.%s", name, 0);
    if (!n->role_mask) n->role_mask = ~0u;
    return n->n_messages ? OK : format_error(r, "no messages at", name);
}

static int nodes_read(struct workflow_reader *r, const json_t *v) {
    const char *name;
    json_t *x;
    size_t n = json_object_size(v);
    set_key_path(r, "%s", "nodes", 0);
    if (n < 1 || n > 64)
        return format_error(r, "between one and 64 nodes are expected in", "nodes");
    r->w->nodes = xcalloc(n, sizeof *r->w->nodes);
    json_object_foreach ((json_t *)(uintptr_t)v, name, x) {
        set_key_path(r, "nodes.%s", name, 0);
        int rc = node_read(r, name, x);
        if (rc) return rc;
    }
    return OK;
}

/* The condition is a Jinja expression; its template renders to an empty text if the condition is
 * false. */
static int edge_read(struct workflow_reader *r, const json_t *v, struct workflow_edge *e) {
    const char *from = json_string_value(json_object_get(v, "from")),
               *to = json_string_value(json_object_get(v, "to"));
    const json_t *condition = json_object_get(v, "when");
    if (!from || !to || json_object_size(v) != 2 + (size_t)(condition != NULL))
        return format_error(r, "{from, to, when} is expected at", r->key_path);
    e->from = node_find(r->w, from);
    e->to = node_find(r->w, to);
    if (e->from < 0 || e->to < 0) return format_error(r, "no node", e->from < 0 ? from : to);
    if (!condition) return OK;
    if (!json_is_string(condition))
        return format_error(r, "a condition is a text, at", r->key_path);
    json_t *text = json_sprintf("{{ true if (%s) else '' }}", json_string_value(condition));
    int rc = template_read(r, text, &e->condition);
    json_decref(text);
    return rc;
}

static int edges_read(struct workflow_reader *r, const json_t *v) {
    size_t n = json_array_size(v);
    set_key_path(r, "%s", "edges", 0);
    if (n > 256 || (v && !json_is_array(v)))
        return format_error(r, "a list of at most 256 edges is expected in", "edges");
    r->w->edges = xcalloc(n + 1, sizeof *r->w->edges);
    for (size_t i = 0; i < n; i++) {
        set_key_path(r, "%s.%d", "edges", (int)i);
        int rc = edge_read(r, json_array_get(v, i), &r->w->edges[r->w->n_edges++]);
        if (rc) return rc;
    }
    return OK;
}

static int roles_read(struct workflow_reader *r, const json_t *v) {
    set_key_path(r, "%s", "roles", 0);
    if (v && (!json_is_array(v) || json_array_size(v) > ROLES_MAX))
        return format_error(r, "a list of at most 16 names is expected in", "roles");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const char *name = json_string_value(json_array_get(v, i));
        if (!name) return format_error(r, "a name is expected in", "roles");
        if (strcmp(name, "all") == 0) return format_error(r, "a role cannot be named", name);
        if (workflow_role_find(r->w, name) >= 0) return format_error(r, "duplicate role", name);
        r->w->roles[r->w->n_roles++] = xstrdup(name);
    }
    return OK;
}

static int decide_read(struct workflow_reader *r, const json_t *v) {
    static const char *const vote_scopes[] = {"last", "all", NULL};
    static const char *const keys[] = {"vote", "judge", "over", "text", NULL};
    struct workflow *w = r->w;
    const char *vote = json_string_value(json_object_get(v, "vote")),
               *judge = json_string_value(json_object_get(v, "judge")),
               *text = json_string_value(json_object_get(v, "text"));
    const json_t *over = json_object_get(v, "over");
    int all = 0, rc = keys_check(r, v, "decide", keys);
    w->judge_node = w->text_node = -1;
    w->vote = &vote_table[0];
    if (rc) return rc;
    if ((!vote && json_object_get(v, "vote")) || (!judge && json_object_get(v, "judge")) ||
        (!text && json_object_get(v, "text")))
        return format_error(r, "a name is expected in", "decide");
    if (vote && !(w->vote = vote_find(vote))) return format_error(r, "no vote", vote);
    if (judge && (w->judge_node = node_find(w, judge)) < 0)
        return format_error(r, "no node", judge);
    if (text && (w->text_node = node_find(w, text)) < 0) return format_error(r, "no node", text);
    if (over) rc = enum_read(r, over, vote_scopes, &all);
    w->vote_all_rounds = all;
    return rc;
}

static int budget_read(struct workflow_reader *r, const json_t *v) {
    static const char *const keys[] = {"calls", "tokens", "seconds", NULL};
    const json_t *calls = json_object_get(v, "calls"), *tokens = json_object_get(v, "tokens"),
                 *seconds = json_object_get(v, "seconds");
    double x = 256, y = 1 << 20;
    int rc = keys_check(r, v, "budget", keys);
    if (!rc) set_key_path(r, "%s", "budget.calls", 0);
    if (!rc && calls) rc = number_read(r, calls, 1, 1e6, &x);
    if (!rc) set_key_path(r, "%s", "budget.tokens", 0);
    if (!rc && tokens) rc = number_read(r, tokens, 1, 1e9, &y);
    if (!rc) set_key_path(r, "%s", "budget.seconds", 0);
    if (!rc && seconds) rc = number_read(r, seconds, 0, 1e9, &r->w->max_seconds);
    r->w->max_calls = (int)x;
    r->w->max_generated_tokens = (int64_t)y;
    return rc;
}

/* Reads the key `words`: {language: {name: text}}. */
static int translations_read(struct workflow_reader *r, json_t *v) {
    const char *lang, *name;
    json_t *words, *text;
    set_key_path(r, "%s", "words", 0);
    if (v && !json_is_object(v)) return format_error(r, "a mapping is expected at", "words");
    json_object_foreach (v, lang, words) {
        set_key_path(r, "words.%s", lang, 0);
        if (!json_is_object(words)) return format_error(r, "a mapping is expected at", lang);
        json_object_foreach (words, name, text)
            if (!json_is_string(text)) return format_error(r, "a text is expected at", name);
    }
    r->w->translations = json_incref(v);
    return OK;
}

static int top_level_read(struct workflow_reader *r) {
    static const char *const keys[] = {"name",  "about", "rounds", "roles",  "words",
                                       "nodes", "edges", "decide", "budget", NULL};
    const json_t *root = r->y->root;
    const char *key;
    json_t *v;
    double rounds = 2;
    int rc = OK;
    json_object_foreach ((json_t *)(uintptr_t)root, key, v) {
        int known = 0;
        while (keys[known] && strcmp(keys[known], key) != 0) known++;
        snprintf(r->key_path, sizeof r->key_path, "%s", key);
        if (!keys[known]) return format_error(r, "a workflow has no", key);
    }
    const char *name = json_string_value(json_object_get(root, "name")),
               *about = json_string_value(json_object_get(root, "about"));
    if (!json_is_object(root)) return format_error(r, "a workflow is a mapping with a", "name");
    if (!name) return format_error(r, "a text is expected at", "name");
    if (!about && json_object_get(root, "about"))
        return format_error(r, "a text is expected at", "about");
    r->w->name = xstrdup(name);
    r->w->description = xstrdup(about ? about : "");
    set_key_path(r, "%s", "rounds", 0);
    if ((v = json_object_get(root, "rounds"))) rc = number_read(r, v, 1, 64, &rounds);
    r->w->rounds = (int)rounds;
    if (!rc) rc = translations_read(r, json_object_get(root, "words"));
    if (!rc) rc = roles_read(r, json_object_get(root, "roles"));
    if (!rc) rc = nodes_read(r, json_object_get(root, "nodes"));
    if (!rc) rc = edges_read(r, json_object_get(root, "edges"));
    if (!rc) rc = decide_read(r, json_object_get(root, "decide"));
    if (!rc) rc = budget_read(r, json_object_get(root, "budget"));
    return rc;
}

struct workflow *workflow_parse(const char *text, size_t len, const char *path, struct error *err) {
    struct yaml y;
    if (yaml_parse(&y, path, text, len, err) != OK) return NULL;
    struct workflow *w = xcalloc(1, sizeof *w);
    struct workflow_reader r = {.y = &y, .w = w, .err = err};
    sha256_bytes(text, len, w->hash);
    if (top_level_read(&r) != OK) {
        workflow_free(w);
        w = NULL;
    }
    yaml_release(&y);
    return w;
}

struct workflow *workflow_open(const char *name, struct error *err) {
    const char *text;
    name = renamed_value("protocol", name);
    for (int i = 0; workflow_builtin(i, &text); i++)
        if (strcmp(builtin[i].name, name) == 0) {
            char *path = xasprintf("protocols/%s.yaml", name);
            struct workflow *w = workflow_parse(text, strlen(text), path, err);
            free(path);
            return w;
        }
    struct buf file = {0};
    struct workflow *w = NULL;
    if (file_read(name, 1 << 20, &file, err) == OK)
        w = workflow_parse(file.data, file.len, name, err);
    else if (!strchr(name, '/') && !strchr(name, '.'))
        error_set(err, ERR_USAGE, "no protocol '%s'; 'shoal debate --protocols' lists them", name);
    buf_release(&file);
    return w;
}

void workflow_free(struct workflow *w) {
    if (!w) return;
    for (int i = 0; i < w->n_nodes; i++) {
        free(w->nodes[i].name);
        for (int m = 0; m < NODE_MESSAGES_MAX; m++) jinja_free(w->nodes[i].message[m]);
    }
    for (int i = 0; i < w->n_edges; i++) jinja_free(w->edges[i].condition);
    for (int i = 0; i < w->n_roles; i++) free(w->roles[i]);
    json_decref(w->translations);
    free(w->nodes);
    free(w->edges);
    free(w->name);
    free(w->description);
    free(w);
}

const char *workflow_name(const struct workflow *w) {
    return w->name;
}

const char *workflow_hash(const struct workflow *w) {
    return w->hash;
}

const char *workflow_description(const struct workflow *w) {
    return w->description;
}

int workflow_rounds(const struct workflow *w) {
    return w->rounds;
}

const struct vote *workflow_vote(const struct workflow *w) {
    return w->vote;
}

const char *workflow_role(const struct workflow *w, int agent) {
    return w->n_roles ? w->roles[agent % w->n_roles] : "";
}

bool workflow_has_first_answers(const struct workflow *w) {
    const struct workflow_node *first = &w->nodes[0];
    return first->role_mask == ~0u &&
           (first->reply == REPLY_ANSWER || first->reply == REPLY_LEGACY) && w->judge_node < 0 &&
           w->text_node < 0;
}

bool workflow_has_flock(const struct workflow *w) {
    for (int i = 0; i < w->n_nodes; i++)
        if (w->nodes[i].has_flock) return true;
    return false;
}

int workflow_n_roles(const struct workflow *w) {
    return w->n_roles;
}
