/*
 * team: parser of team files. The keys of the top level and of an agent are option rows, so unknown
 * keys, wrong types and values out of range are reported with file and line, as in a recipe.
 *
 * Invariants: agents have distinct names; the team owns the texts that its agents point to.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include "data/data.h"
#include "hub/hub.h"
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

struct team_document {
    char *name, *about, *protocol, *vote, *router;
    int64_t rounds, max_tokens;
    double temperature;
    bool chain_of_thought;
};
struct team_member {
    char *name, *system, *role;
    struct strings adapter;
    double temperature, weight;
};
#define ROW(key, kind, type, field, fallback, min, max)                                            \
    { key, kind, offsetof(struct type, field), fallback, min, max, NULL, NULL }
static const struct option_row top_rows[] = {
    ROW("name", OPT_STRING, team_document, name, NULL, 0, 0),
    ROW("about", OPT_STRING, team_document, about, "", 0, 0),
    ROW("protocol", OPT_STRING, team_document, protocol, "brief", 0, 0),
    ROW("vote", OPT_STRING, team_document, vote, NULL, 0, 0),
    ROW("router", OPT_STRING, team_document, router, NULL, 0, 0),
    ROW("rounds", OPT_INT, team_document, rounds, "0", 0, 64),
    ROW("max_tokens", OPT_INT, team_document, max_tokens, "0", 0, 65536),
    ROW("temperature", OPT_FLOAT, team_document, temperature, "-1", -1, 100),
    ROW("chain-of-thought", OPT_BOOL, team_document, chain_of_thought, "true", 0, 0),
    {0},
};
static const struct option_row member_rows[] = {
    ROW("name", OPT_STRING, team_member, name, NULL, 0, 0),
    ROW("adapter", OPT_LIST, team_member, adapter, "base", 0, 0),
    ROW("system", OPT_STRING, team_member, system, NULL, 0, 0),
    ROW("role", OPT_STRING, team_member, role, NULL, 0, 0),
    ROW("temperature", OPT_FLOAT, team_member, temperature, "0", 0, 100),
    ROW("weight", OPT_FLOAT, team_member, weight, "1", 0, 1000),
    {0},
};
#undef ROW

static int format_error(const struct yaml *y, const char *key_path, const char *what,
                        const char *subject, struct error *err) {
    error_set(err, ERR_FORMAT, "%s '%s'", what, subject);
    return yaml_error_wrap(y, key_path, err);
}

/* A copy of the text that the team owns; NULL for NULL. */
static const char *team_copy_text(struct team *t, const char *text) {
    if (!text) return NULL;
    strings_add(&t->texts, text);
    return t->texts.v[t->texts.n - 1];
}

/* agents */

static bool name_is_taken(const struct team *t, const char *name) {
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->v[i].name, name) == 0) return true;
    return false;
}

/* "runs/x/critic" → "critic"; "critic#2" if an agent has that name already. malloc'ed. */
static char *name_make_unique(const struct team *t, const char *dir) {
    char *path = xstrdup(dir);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
    const char *slash = strrchr(path, '/'), *base = slash && slash[1] ? slash + 1 : path;
    char *name = xstrdup(base);
    for (int suffix = 2; name_is_taken(t, name); suffix++) {
        free(name);
        name = xasprintf("%s#%d", base, suffix);
    }
    free(path);
    return name;
}

static void term_add(struct team *t, const char *path, float weight) {
    strings_add(&t->adapters, path);
    t->terms = xrealloc(t->terms, (size_t)t->adapters.n * sizeof *t->terms);
    t->terms[t->adapters.n - 1] = (struct weighted_adapter){.weight = weight};
}

/* Adds an agent whose terms the caller has added. name NULL: the name of its first adapter. */
static struct agent *agent_add(struct team *t, const char *name) {
    struct agent *a = &t->v[t->n];
    char *unique_name = name ? NULL : name_make_unique(t, t->adapters.v[t->first[t->n]]);
    *a = (struct agent){
        .name = team_copy_text(t, name ? name : unique_name), .view = t->n, .weight = 1};
    t->first[++t->n] = t->adapters.n;
    free(unique_name);
    return a;
}

/* The path of an adapter in a team file, malloc'ed; NULL: the adapter does not exist. */
static char *adapter_find(const char *file, const char *path) {
    if (strcmp(path, "base") == 0 || hub_is_name(path)) return xstrdup(path);
    char *found = path_relative_to(file, path);
    if (path_exists(found)) return found;
    free(found);
    return NULL;
}

/* "DIR" or "DIR=WEIGHT"; an existing path is used unchanged, even with a '=' in its name. */
static int term_read(struct team *t, const struct yaml *y, const char *key_path, const char *text,
                     struct error *err) {
    float weight = 1;
    char *term = xstrdup(text), *found = adapter_find(y->path, term);
    if (!found && adapter_weight_parse(term, &weight)) found = adapter_find(y->path, term);
    if (found) term_add(t, found, weight);
    int rc = found ? OK : format_error(y, key_path, "there is no adapter", term, err);
    free(term);
    free(found);
    return rc;
}

static int terms_read(struct team *t, const struct yaml *y, const char *key_path,
                      const struct strings *terms, struct error *err) {
    int rc = OK;
    if (terms->n < 1 || terms->n > ENGINE_MIX_MAX) {
        error_set(err, ERR_FORMAT, "an adapter, or a mix of at most %d, is expected at '%s'",
                  ENGINE_MIX_MAX, key_path);
        return yaml_error_wrap(y, key_path, err);
    }
    for (int i = 0; rc == OK && i < terms->n; i++) {
        rc = term_read(t, y, key_path, terms->v[i], err);
        const char *last = rc == OK ? t->adapters.v[t->adapters.n - 1] : "";
        bool has_weight = rc == OK && t->terms[t->adapters.n - 1].weight != 1;
        if (strcmp(last, "base") == 0 && (terms->n > 1 || has_weight))
            rc = format_error(y, key_path, "a mix cannot contain", "base", err);
    }
    return rc;
}

static int agent_read(struct team *t, const struct yaml *y, int i, struct error *err) {
    char key_path[32];
    struct team_member m;
    json_t *root = json_array_get(json_object_get(y->root, "agents"), (size_t)i);
    snprintf(key_path, sizeof key_path, "agents.%d", i);
    if (!json_is_object(root))
        return format_error(y, key_path, "an agent is a mapping:", key_path, err);
    struct yaml part = yaml_subtree(y, root, key_path);
    options_default(member_rows, &m);
    int rc = options_from_yaml(member_rows, &m, &part, NULL, err);
    if (rc == OK) rc = terms_read(t, &part, "adapter", &m.adapter, err);
    if (rc == OK && m.name && (!*m.name || name_is_taken(t, m.name)))
        rc = format_error(&part, "name", *m.name ? "duplicate name" : "empty name", m.name, err);
    if (rc == OK && m.role && workflow_role_find(t->workflow, m.role) < 0)
        rc = format_error(&part, "role", "the protocol has no role", m.role, err);
    if (rc == OK) {
        struct agent *a = agent_add(t, m.name);
        a->system = team_copy_text(t, m.system);
        a->role = team_copy_text(t, m.role);
        a->temperature = (float)m.temperature;
        a->weight = (float)m.weight;
    }
    options_release(member_rows, &m);
    json_decref(part.lines);
    return rc;
}

static int agents_read(struct team *t, const struct yaml *y, struct error *err) {
    const json_t *list = json_object_get(y->root, "agents");
    int n = (int)json_array_size(list), rc = OK;
    if (n < 1 || n > TEAM_MAX) {
        error_set(err, ERR_FORMAT, "a list of 1 to %d agents is expected in 'agents'", TEAM_MAX);
        return yaml_error_wrap(y, "agents", err);
    }
    for (int i = 0; rc == OK && i < n; i++) rc = agent_read(t, y, i, err);
    return rc;
}

/* top level */

static void team_set_workflow(struct team *t, struct workflow *w) {
    t->workflow = w;
    t->options = (struct debate_options){.workflow = w,
                                         .rounds = workflow_rounds(w),
                                         .chain_of_thought = true,
                                         .vote = workflow_vote(w),
                                         .temperature = -1};
}

static int top_level_read(struct team *t, const struct yaml *y, const struct team_document *o,
                          struct error *err) {
    char *path = workflow_is_builtin(o->protocol) ? xstrdup(o->protocol)
                                                  : path_relative_to(y->path, o->protocol);
    struct workflow *w = workflow_open(path, err);
    free(path);
    if (!w) return yaml_error_wrap(y, "protocol", err);
    team_set_workflow(t, w);
    const char *file = path_name(y->path);
    t->name = o->name ? xstrdup(o->name) : strndup(file, strcspn(file, "."));
    t->description = xstrdup(o->about);
    t->options.chain_of_thought = o->chain_of_thought;
    t->options.temperature = (float)o->temperature;
    t->options.max_tokens = (int32_t)o->max_tokens;
    if (o->rounds) t->options.rounds = (int)o->rounds;
    if (o->vote && !(t->options.vote = vote_parse(o->vote, err)))
        return yaml_error_wrap(y, "vote", err);
    return OK;
}

/* router */

static int router_check(const struct team *t, const struct router *r, const char *path,
                        struct error *err) {
    if (r->n_agents != t->n)
        return error_set(err, ERR_MISMATCH, "router '%s' is for %d agents, and the team has %d",
                         path, r->n_agents, t->n);
    for (int i = 0; i < t->n; i++)
        if (strcmp(r->names[i], t->v[i].name) != 0)
            return error_set(err, ERR_MISMATCH,
                             "router '%s' has the agent '%s' at the place of '%s': fit it again",
                             path, r->names[i], t->v[i].name);
    return OK;
}

static int router_open(struct team *t, const struct yaml *y, const struct team_document *o,
                       struct error *err) {
    if (!o->router) return OK;
    if (!workflow_has_first_answers(t->workflow))
        return format_error(y, "router", "a router needs first answers and a vote, not protocol",
                            o->protocol, err);
    if (o->rounds > 1)
        return format_error(y, "rounds", "a team with a router has one round; remove the key",
                            "rounds", err);
    char *path = path_relative_to(y->path, o->router);
    t->router = router_read(path, err);
    int rc = t->router ? router_check(t, t->router, path, err) : err->code;
    free(path);
    if (rc != OK) return yaml_error_wrap(y, "router", err);
    t->options.router = t->router;
    t->options.rounds = 1;
    return OK;
}

static int document_read(struct team *t, const struct yaml *y, struct error *err) {
    struct team_document o;
    struct yaml top = {y->path, json_copy(y->root), y->lines};
    json_object_del(top.root, "agents");
    options_default(top_rows, &o);
    int rc = json_is_object(y->root)
                 ? options_from_yaml(top_rows, &o, &top, NULL, err)
                 : format_error(y, "", "a team is a mapping with", "agents", err);
    if (rc == OK) rc = top_level_read(t, y, &o, err);
    if (rc == OK) rc = agents_read(t, y, err);
    if (rc == OK) rc = router_open(t, y, &o, err);
    options_release(top_rows, &o);
    json_decref(top.root);
    return rc;
}

int team_parse(struct team *t, const char *text, size_t len, const char *path, struct error *err) {
    struct yaml y;
    *t = (struct team){0};
    int rc = yaml_parse(&y, path, text, len, err);
    if (rc != OK) return rc;
    rc = document_read(t, &y, err);
    yaml_release(&y);
    return rc;
}

int team_read(struct team *t, const char *path, struct error *err) {
    struct buf text = {0};
    *t = (struct team){0};
    int rc = file_read(path, 1 << 20, &text, err);
    if (rc == OK) rc = team_parse(t, text.data ? text.data : "", text.len, path, err);
    buf_release(&text);
    return rc;
}

int team_from_flags(struct team *t, const char *protocol, const struct strings *agents,
                    const struct strings *personas, struct error *err) {
    *t = (struct team){.name = xstrdup("team"), .description = xstrdup("")};
    if (agents->n < 1 || agents->n > TEAM_MAX)
        return error_set(err, ERR_USAGE, "--agents requires 1 to %d adapters", TEAM_MAX);
    if (personas->n > agents->n)
        return error_set(err, ERR_USAGE, "there are more --personas than --agents");
    struct workflow *w = workflow_open(protocol, err);
    if (!w) return err->code;
    team_set_workflow(t, w);
    for (int i = 0; i < agents->n; i++) {
        term_add(t, agents->v[i], 1);
        agent_add(t, NULL)->system = i < personas->n ? team_copy_text(t, personas->v[i]) : NULL;
    }
    return OK;
}

int team_load_adapters(struct team *t, adapter_open_fn *open, void *ctx, struct error *err) {
    for (int i = 0; i < t->adapters.n; i++) {
        const char *path = t->adapters.v[i];
        if (strcmp(path, "base") != 0 && !(t->terms[i].adapter = open(ctx, path, err)))
            return err->code;
    }
    for (int i = 0; i < t->n; i++) {
        struct weighted_adapter *terms = &t->terms[t->first[i]];
        int n = t->first[i + 1] - t->first[i];
        bool is_mix = n > 1 || terms->weight != 1;
        t->v[i].adapter = is_mix ? NULL : terms->adapter;
        t->v[i].mix = is_mix ? terms : NULL;
        t->v[i].n_mix = is_mix ? n : 0;
    }
    return OK;
}

json_t *team_contamination(const struct team *t, const struct eval_task *task) {
    json_t *list = json_array();
    for (int i = 0; i < t->n; i++) {
        const struct agent *agent = &t->v[i];
        for (int k = 0; k < MAX(agent->n_mix, 1); k++) {
            const struct adapter *a = agent->n_mix ? agent->mix[k].adapter : agent->adapter;
            json_t *v = contamination_report(task, agent->name, a);
            if (v) json_array_append_new(list, v);
        }
    }
    if (json_array_size(list)) return list;
    json_decref(list);
    return NULL;
}

json_t *team_adapters_json(const struct team *t) {
    json_t *hashes = json_object();
    for (int i = 0; i < t->adapters.n; i++)
        if (t->terms[i].adapter)
            manifest_add_hash(hashes, t->adapters.v[i], t->terms[i].adapter->hash);
    return hashes;
}

void team_add_protocol_hash(const struct team *t, json_t *hashes) {
    const struct workflow *w = t->options.workflow;
    char *name = w ? xasprintf("protocol %s", workflow_name(w)) : NULL,
         *router = xasprintf("router %s", t->name);
    if (w) manifest_add_hash(hashes, name, workflow_hash(w));
    if (t->router) manifest_add_hash(hashes, router, t->router->hash);
    free(name);
    free(router);
}

void team_release(struct team *t) {
    workflow_free(t->workflow);
    router_free(t->router);
    strings_release(&t->adapters);
    strings_release(&t->texts);
    free(t->terms);
    free(t->name);
    free(t->description);
    *t = (struct team){0};
}
