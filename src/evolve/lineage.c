/*
 * lineage: the family tree of a run: built from its records, printed as text, JSON and Graphviz.
 *
 * Records may come from an untrusted file or from a run in progress. Inconsistent records (an
 * unknown parent, a missing generation) are refused; names are sanitized on output.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* generations of ancestors that are printed; a deeper tree does not fit on a screen */
enum { MAX_PRINTED_DEPTH = 24 };
static const size_t FILE_LIMIT = (size_t)1 << 30; /* bytes */

double json_number_or_nan(const json_t *v, const char *key) {
    const json_t *x = json_object_get(v, key);
    return json_is_number(x) ? json_number_value(x) : NAN;
}

struct stats_interval json_interval(const json_t *v, const char *key) {
    const json_t *x = json_object_get(v, key);
    return (struct stats_interval){json_number_or_nan(x, "value"), json_number_or_nan(x, "lo"),
                                   json_number_or_nan(x, "hi")};
}

void buf_add_one_line(struct buf *b, const char *s) {
    size_t from = b->len;
    buf_add_sanitized(b, s, strlen(s));
    for (; from < b->len; from++)
        if (b->data[from] == '\n' || b->data[from] == '\t') b->data[from] = ' ';
}

/* building */

int lineage_find(const struct lineage *l, const char *name) {
    const json_t *index = json_object_get(l->index, name);
    return index ? (int)json_integer_value(index) : -1;
}

static int check_candidate(const json_t *c, struct error *err) {
    const json_t *parents = json_object_get(c, "parents");
    if (!*json_get_string(c, "name"))
        return error_set(err, ERR_FORMAT, "a candidate has no 'name'");
    if (!isfinite(json_interval(c, "fitness").value))
        return error_set(err, ERR_FORMAT, "'%s' has no 'fitness' with a 'value'",
                         json_get_string(c, "name"));
    if (!json_is_string_array(parents) || json_array_size(parents) > 2)
        return error_set(err, ERR_FORMAT, "the 'parents' of '%s' are not a list of up to two names",
                         json_get_string(c, "name"));
    return OK;
}

static int check_candidates(const json_t *list, struct error *err) {
    size_t i, n = json_array_size(list);
    json_t *c;
    int rc = OK;
    if (n < 1 || n > MAX_CANDIDATES)
        return error_set(err, ERR_FORMAT, "'candidates' is not a list of 1 to %d", MAX_CANDIDATES);
    json_array_foreach (list, i, c)
        if (rc == OK) rc = check_candidate(c, err);
    return rc;
}

/* Removes this generation and all later ones from the lineage. */
static void lineage_truncate(struct lineage *l, int generation) {
    while (l->n > 0 && l->v[l->n - 1].generation >= generation)
        json_object_del(l->index, l->v[--l->n].name);
    for (int i = 0; i < l->n; i++)
        l->v[i].last_generation = MIN(l->v[i].last_generation, generation - 1);
    l->generations = generation;
}

static int node_add(struct lineage *l, const json_t *c, struct error *err) {
    struct lineage_node v = {
        .name = json_get_string(c, "name"), .birth_record = c, .parent = {-1, -1}};
    const json_t *parents = json_object_get(c, "parents");
    int n = (int)json_array_size(parents);
    double blend = json_number_or_nan(c, "blend");
    v.generation = v.last_generation = l->generations;
    for (int i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(parents, (size_t)i));
        v.parent[i] = lineage_find(l, name);
        if (v.parent[i] < 0 || l->v[v.parent[i]].generation == v.generation)
            return error_set(err, ERR_FORMAT,
                             "'%s' descends from '%s', which is in no earlier generation", v.name,
                             name);
    }
    v.parent_share[1] = n < 2 ? 0 : isnan(blend) ? 0.5 : fmin(1, fmax(0, blend));
    v.parent_share[0] = 1 - v.parent_share[1];
    if ((l->n & (l->n - 1)) == 0) l->v = xrealloc(l->v, sizeof *l->v * (size_t)MAX(1, 2 * l->n));
    json_object_set_new(l->index, v.name, json_integer(l->n));
    l->v[l->n++] = v;
    return OK;
}

/* Adds a new candidate, or records that a known one is also in this generation. */
static int candidate_add(struct lineage *l, const json_t *c, struct error *err) {
    int node = lineage_find(l, json_get_string(c, "name"));
    if (node < 0) return node_add(l, c, err);
    if (l->v[node].last_generation == l->generations)
        return error_set(err, ERR_FORMAT, "two candidates are named '%s'", l->v[node].name);
    l->v[node].last_generation = l->generations;
    return OK;
}

int lineage_add(struct lineage *l, const json_t *generation, struct error *err) {
    const json_t *number = json_object_get(generation, "generation"), *c,
                 *list = json_object_get(generation, "candidates");
    json_int_t g = json_integer_value(number);
    size_t i;
    if (!json_is_integer(number) || g < 0)
        return error_set(err, ERR_FORMAT, "no generation: its 'generation' is missing");
    if (g > l->generations)
        return error_set(err, ERR_FORMAT, "generation %lld follows, where %d is expected",
                         (long long)g, l->generations);
    if (check_candidates(list, err) != OK) return err->code;
    if (!l->index) l->index = json_object();
    if (g < l->generations)
        lineage_truncate(l, (int)g); /* not in the usual case: it visits all nodes */
    int rc = OK;
    json_array_foreach (list, i, c)
        if (rc == OK) rc = candidate_add(l, c, err);
    if (rc != OK) return lineage_truncate(l, (int)g), rc;
    l->best = lineage_find(l, json_get_string(json_array_get(list, 0), "name"));
    l->generations++;
    return OK;
}

int lineage_from_json(struct lineage *l, const json_t *generations, struct error *err) {
    size_t i;
    json_t *g;
    int rc = OK;
    *l = (struct lineage){.best = -1};
    json_array_foreach (generations, i, g)
        if (rc == OK) rc = lineage_add(l, g, err);
    if (rc != OK) lineage_release(l);
    return rc;
}

void lineage_release(struct lineage *l) {
    free(l->v);
    json_decref(l->index);
    *l = (struct lineage){.best = -1};
}

void lineage_ancestors(const struct lineage *l, int node, bool *in) {
    memset(in, 0, (size_t)l->n * sizeof *in);
    in[node] = true;
    for (int i = node; i >= 0; i--)
        for (int k = 0; in[i] && k < 2; k++)
            if (l->v[i].parent[k] >= 0) in[l->v[i].parent[k]] = true;
}

void lineage_propagate(const struct lineage *l, double *flow) {
    for (int i = l->n - 1; i >= 0; i--)
        for (int k = 0; k < 2; k++)
            if (l->v[i].parent[k] >= 0)
                flow[l->v[i].parent[k]] += flow[i] * l->v[i].parent_share[k];
}

/* reading */

/* Sets `err` to the parser's error for the line data[start .. end). Replaces everything before the
 * line by blanks and parses again, so that the message has the position in the file. */
static void line_error(struct buf *b, size_t end, size_t start, const char *path,
                       struct error *err) {
    for (size_t i = 0; i < start; i++)
        if (b->data[i] != '\n') b->data[i] = ' ';
    json_decref(json_parse(b->data, end, path, err));
}

static int line_add(struct lineage *l, json_t *list, json_t *v, const char *path, int line,
                    struct error *err) {
    int rc = lineage_add(l, v, err);
    if (rc != OK) return error_wrap(err, "'%s', line %d", path, line);
    while (json_array_size(list) >= (size_t)l->generations)
        json_array_remove(list, json_array_size(list) - 1);
    json_array_append(list, v);
    return OK;
}

static int lines_read(struct buf *b, const char *path, struct lineage *l, json_t *list,
                      struct error *err) {
    int rc = OK, line = 1;
    for (size_t start = 0, end; rc == OK && start < b->len; start = end + 1, line++) {
        const char *newline = memchr(b->data + start, '\n', b->len - start);
        end = newline ? (size_t)(newline - b->data) : b->len;
        if (strspn(b->data + start, " \t\r") == end - start) continue;
        json_t *v = json_parse(b->data + start, end - start, path, err);
        if (!v && !newline) break; // the line is unfinished
        if (!v) {
            line_error(b, end, start, path, err);
            return err->code;
        }
        rc = line_add(l, list, v, path, line, err);
        json_decref(v);
    }
    return rc;
}

json_t *lineage_load(const char *path, struct error *err) {
    struct buf b = {0};
    struct lineage l = {.best = -1};
    json_t *list = json_array();
    int rc = file_read(path, FILE_LIMIT, &b, err);
    if (rc == OK) rc = lines_read(&b, path, &l, list, err);
    if (rc == OK && l.n == 0) rc = error_set(err, ERR_STATE, "'%s' holds no generation yet", path);
    lineage_release(&l);
    buf_release(&b);
    if (rc == OK) return list;
    json_decref(list);
    return NULL;
}

/* output */

/* The nodes to print: all (included = NULL), or a node and its ancestors. */
struct lineage_view {
    struct lineage l;
    int root; /* the named node, or else the fittest of the last generation; founders' shares are
                 those of its ancestry */
    bool *included;
};

static int view_open(struct lineage_view *w, const json_t *generations, const char *name,
                     struct error *err) {
    *w = (struct lineage_view){0};
    int rc = lineage_from_json(&w->l, generations, err);
    if (rc != OK) return rc;
    w->root = name ? lineage_find(&w->l, name) : w->l.best;
    if (w->root < 0)
        return error_set(err, ERR_MISSING, "no candidate '%s' in %d generations", name ? name : "",
                         w->l.generations);
    w->included = name ? xcalloc((size_t)w->l.n, sizeof *w->included) : NULL;
    if (name) lineage_ancestors(&w->l, w->root, w->included);
    return OK;
}

static void view_close(struct lineage_view *w) {
    lineage_release(&w->l);
    free(w->included);
}

static bool view_includes(const struct lineage_view *w, int node) {
    return !w->included || w->included[node];
}

static bool is_founder(const struct lineage_node *v) {
    return v->parent[0] < 0;
}

/* [{founder, share}]: the founders' shares of the ancestry of the root, in order of birth. */
static json_t *founders_json(const struct lineage_view *w) {
    double *flow = xcalloc((size_t)w->l.n, sizeof *flow);
    json_t *list = json_array();
    flow[w->root] = 1;
    lineage_propagate(&w->l, flow);
    for (int i = 0; i < w->l.n; i++)
        if (is_founder(&w->l.v[i]) && flow[i] > 0)
            json_array_append_new(
                list, json_pack("{s:s,s:f}", "founder", w->l.v[i].name, "share", flow[i]));
    free(flow);
    return list;
}

/* Appends "founder", or for example "slerp of a 60 % and b 40 %, step 0.3". */
static void add_origin(struct buf *b, const struct lineage *l, const struct lineage_node *v) {
    double step = json_number_or_nan(v->birth_record, "step");
    const char *operator_name = operator_label(v->birth_record, "operator"),
               *mutation = operator_label(v->birth_record, "mutation");
    const json_t *weights = json_object_get(v->birth_record, "weights"), *weight,
                 *genes = json_object_get(v->birth_record, "genes");
    size_t i;
    buf_add_one_line(b, *operator_name ? operator_name : is_founder(v) ? "founder" : "child");
    for (int k = 0; k < 2 && v->parent[k] >= 0; k++) {
        buf_puts(b, k ? " and " : " of ");
        buf_add_one_line(b, l->v[v->parent[k]].name);
        if (v->parent[1] >= 0) buf_printf(b, " %.0f %%", 100 * v->parent_share[k]);
    }
    if (isfinite(step)) buf_printf(b, ", step %.3g", step);
    if (*mutation) {
        buf_puts(b, ", mutation ");
        buf_add_one_line(b, mutation);
    }
    json_array_foreach (weights, i, weight)
        buf_printf(b, "%s%.3g", i ? " " : ", weights ", json_number_value(weight));
    if (genes) buf_puts(b, ", ");
    genes_describe(genes, b);
}

/* Lines of text in columns; the first column is as wide as its widest text. */
struct tree_row {
    char *label, *origin;
    const json_t *record; /* source of fitness and hash; NULL: a line without columns */
};
struct tree_rows {
    struct tree_row *v;
    size_t n;
};

static void rows_add(struct tree_rows *r, char *label, char *origin, const json_t *record) {
    if ((r->n & (r->n - 1)) == 0) r->v = xrealloc(r->v, sizeof *r->v * MAX((size_t)1, 2 * r->n));
    r->v[r->n++] = (struct tree_row){label, origin, record};
}

static int display_width(const char *text) {
    return (int)strlen(text) - utf8_field_width(text, 0);
}

static void rows_print(const struct tree_rows *r, FILE *f) {
    int width = 0;
    for (size_t i = 0; i < r->n; i++) width = MAX(width, display_width(r->v[i].label));
    for (size_t i = 0; i < r->n; i++) {
        const struct tree_row *v = &r->v[i];
        if (!v->record) {
            fprintf(f, "%s\n", v->label);
            continue;
        }
        struct stats_interval x = json_interval(v->record, "fitness");
        fprintf(f, "%-*s  %8.4f", utf8_field_width(v->label, width), v->label, x.value);
        if (isfinite(x.lo) && isfinite(x.hi)) fprintf(f, " (%.4f – %.4f)", x.lo, x.hi);
        if (json_object_get(v->record, "alive"))
            fprintf(f, "  %3.0f %% alive", 100 * json_get_number(v->record, "alive"));
        fprintf(f, "  %.8s  %s\n", json_get_string(v->record, "hash"), v->origin);
    }
}

static void rows_release(struct tree_rows *r) {
    for (size_t i = 0; i < r->n; i++) {
        free(r->v[i].label);
        free(r->v[i].origin);
    }
    free(r->v);
}

/* The prefix followed by the name; malloc'ed. */
static char *prefixed_name(const char *prefix, const char *name) {
    struct buf b = {0};
    buf_puts(&b, prefix);
    buf_add_one_line(&b, name);
    return b.data;
}

static void generation_rows(struct tree_rows *r, const struct lineage *l, const json_t *generation,
                            int number) {
    const json_t *list = json_object_get(generation, "candidates"), *c;
    size_t i, n = json_array_size(list);
    rows_add(r, xasprintf("generation %d", number), NULL, NULL);
    json_array_foreach (list, i, c) {
        const struct lineage_node *v = &l->v[lineage_find(l, json_get_string(c, "name"))];
        struct buf origin = {0};
        if (v->generation < number)
            buf_printf(&origin, "kept since generation %d", v->generation);
        else
            add_origin(&origin, l, v);
        rows_add(r, prefixed_name(i + 1 < n ? "├── " : "└── ", v->name), origin.data, c);
    }
}

struct ancestor_walk {
    const struct lineage *l;
    struct tree_rows *rows;
    bool *printed; /* [n] whether the ancestors of the node have rows */
};

/* Adds a row for the node, and below it rows for its ancestors. If the ancestors were printed
 * above, or are too deep, the node's row has a note instead. */
static void ancestor_rows(struct ancestor_walk *c, int node, const char *prefix, int depth,
                          bool last) {
    const struct lineage_node *v = &c->l->v[node];
    const char *branch = !depth ? "" : last ? "└── " : "├── ";
    char *label_prefix = xasprintf("%s%s", prefix, branch),
         *child_prefix = xasprintf("%s%s", prefix,
                                   !depth ? ""
                                   : last ? "    "
                                          : "│   ");
    bool is_repeated = c->printed[node] && !is_founder(v),
         is_too_deep = depth == MAX_PRINTED_DEPTH && !is_founder(v);
    struct buf origin = {0};
    add_origin(&origin, c->l, v);
    if (is_repeated || is_too_deep) buf_puts(&origin, is_repeated ? ", as above" : ", and so on");
    rows_add(c->rows, prefixed_name(label_prefix, v->name), origin.data, v->birth_record);
    c->printed[node] = c->printed[node] || !is_too_deep;
    for (int k = 0; k < 2 && !is_repeated && !is_too_deep; k++)
        if (v->parent[k] >= 0)
            ancestor_rows(c, v->parent[k], child_prefix, depth + 1, k || v->parent[1] < 0);
    free(label_prefix);
    free(child_prefix);
}

static void print_founders(const struct lineage_view *w, FILE *f) {
    json_t *list = founders_json(w), *v;
    size_t i;
    struct buf b = {0};
    buf_puts(&b, "\nancestry of ");
    buf_add_one_line(&b, w->l.v[w->root].name);
    if (w->root == w->l.best)
        buf_printf(&b, ", the fittest of generation %d", w->l.generations - 1);
    json_array_foreach (list, i, v) {
        buf_puts(&b, i ? ", " : ": ");
        buf_add_one_line(&b, json_get_string(v, "founder"));
        buf_printf(&b, " %.1f %%", 100 * json_number_or_nan(v, "share"));
    }
    fprintf(f, "%s\n", b.data);
    buf_release(&b);
    json_decref(list);
}

int lineage_print(const json_t *generations, const char *name, FILE *f, struct error *err) {
    struct lineage_view w;
    struct tree_rows rows = {0};
    int rc = view_open(&w, generations, name, err);
    if (rc == OK && name) {
        struct ancestor_walk c = {&w.l, &rows, xcalloc((size_t)w.l.n, sizeof *c.printed)};
        ancestor_rows(&c, w.root, "", 0, true);
        free(c.printed);
    }
    for (int g = 0; rc == OK && !name && g < w.l.generations; g++)
        generation_rows(&rows, &w.l, json_array_get(generations, (size_t)g), g);
    if (rc == OK) rows_print(&rows, f);
    if (rc == OK) print_founders(&w, f);
    rows_release(&rows);
    view_close(&w);
    return rc;
}

static json_t *node_json(const struct lineage_node *v) {
    static const char *const keys[] = {"hash",  "role",    "operator", "mutation", "step",
                                       "blend", "weights", "fitness",  "alive",    "genes"};
    json_t *out = json_pack("{s:s,s:i,s:i}", "name", v->name, "generation", v->generation, "last",
                            v->last_generation);
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        json_t *x = json_object_get(v->birth_record, keys[i]);
        if (x) json_object_set(out, keys[i], x);
    }
    return out;
}

json_t *lineage_json(const json_t *generations, const char *name, struct error *err) {
    struct lineage_view w;
    json_t *out = NULL, *nodes = json_array(), *edges = json_array();
    int rc = view_open(&w, generations, name, err);
    for (int i = 0; rc == OK && i < w.l.n; i++) {
        const struct lineage_node *v = &w.l.v[i];
        if (!view_includes(&w, i)) continue;
        json_array_append_new(nodes, node_json(v));
        for (int k = 0; k < 2 && v->parent[k] >= 0; k++)
            json_array_append_new(edges,
                                  json_pack("{s:s,s:s,s:f}", "parent", w.l.v[v->parent[k]].name,
                                            "child", v->name, "share", v->parent_share[k]));
    }
    if (rc == OK)
        out = json_pack("{s:s,s:i,s:O,s:O,s:o}", "of", w.l.v[w.root].name, "generations",
                        w.l.generations, "nodes", nodes, "edges", edges, "founders",
                        founders_json(&w));
    json_decref(nodes);
    json_decref(edges);
    view_close(&w);
    return out;
}

/* Escapes text for a quoted Graphviz label, in which a backslash starts an escape. */
static void dot_text(struct buf *b, const char *s) {
    struct buf line = {0};
    buf_add_one_line(&line, s);
    for (size_t i = 0; i < line.len; i++) {
        if (line.data[i] == '"' || line.data[i] == '\\') buf_puts(b, "\\");
        buf_add(b, line.data + i, 1);
    }
    buf_release(&line);
}

static void dot_node(struct buf *b, const struct lineage_view *w, int node) {
    const struct lineage_node *v = &w->l.v[node];
    buf_printf(b, "  n%d [label=\"", node);
    dot_text(b, v->name);
    buf_puts(b, "\\n");
    dot_text(b, is_founder(v) ? "founder" : operator_label(v->birth_record, "operator"));
    buf_printf(b, "\\n%.4f\"%s];\n", json_interval(v->birth_record, "fitness").value,
               node == w->root ? ", penwidth=3" : "");
    for (int k = 0; k < 2 && v->parent[k] >= 0; k++)
        buf_printf(b, "  n%d -> n%d [penwidth=%.2f];\n", v->parent[k], node,
                   0.5 + 2 * v->parent_share[k]);
}

/* Places the nodes with the same first generation on one rank. */
static void dot_ranks(struct buf *b, const struct lineage_view *w) {
    for (int g = 0, i = 0; g < w->l.generations; g++) {
        buf_puts(b, "  { rank=same;");
        for (; i < w->l.n && w->l.v[i].generation == g; i++)
            if (view_includes(w, i)) buf_printf(b, " n%d;", i);
        buf_puts(b, " }\n");
    }
}

int lineage_dot(const json_t *generations, const char *name, struct buf *out, struct error *err) {
    struct lineage_view w;
    int rc = view_open(&w, generations, name, err);
    if (rc == OK) {
        buf_puts(out, "digraph lineage {\n  node [shape=box, fontname=\"sans-serif\"];\n");
        for (int i = 0; i < w.l.n; i++)
            if (view_includes(&w, i)) dot_node(out, &w, i);
        dot_ranks(out, &w);
        buf_puts(out, "}\n");
    }
    view_close(&w);
    return rc;
}
