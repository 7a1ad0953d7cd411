/*
 * cmd_memory: `shoal memory list|search|learn|why|delete|undo|export|import`: the long-term
 * memories of a user in a store.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *store, *user, *attribute, *at, *conversation;
    int64_t limit, capacity, turn;
    bool ended, all;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("store", OPT_STRING, store, SETUP_STORE, 0, 0, "FILE", "database with the memories"),
    ROW("user", OPT_STRING, user, "me", 0, 0, "NAME",
        "user whose memories are meant; no other user's are read or changed"),
    ROW("attribute", OPT_STRING, attribute, NULL, 0, 0, "NAME",
        "search: only memories of this attribute, such as residence"),
    ROW("at", OPT_STRING, at, NULL, 0, 0, "TIME",
        "search: memories that held at this time; learn: the time of the turn "
        "(2026-11-29T09:30:00Z)"),
    ROW("ended", OPT_BOOL, ended, NULL, 0, 0, NULL,
        "list, search: also memories that no longer hold"),
    ROW("limit", OPT_INT, limit, "10", 1, 1000, "N", "search: at most N results"),
    ROW("conversation", OPT_STRING, conversation, NULL, 0, 0, "ID",
        "learn: conversation that the turn belongs to"),
    ROW("turn", OPT_INT, turn, "0", 0, 1e9, "N", "learn: number of the turn in the conversation"),
    ROW("capacity", OPT_INT, capacity, "10000", 1, MEMORIES_MAX_CAPACITY, "N",
        "most memories of the user; learning more removes those of the lowest strength"),
    ROW("all", OPT_BOOL, all, NULL, 0, 0, NULL, "delete: everything of the user"),
    {0},
};
#undef ROW

struct command {
    const struct cli_options *c;
    const struct options *o;
    struct memories *memories;
    const char *arg; /* the argument after the verb; NULL: none */
};

static int64_t id_of(const json_t *memory) {
    return json_integer_value(json_object_get(memory, "id"));
}

/* "  12  residence   Osaka  (until 2026-11-29T09:30:00Z)" */
static void memory_print(const char *before, const json_t *v) {
    const char *until = json_string_value(json_object_get(v, "valid_until"));
    printf("%s%4lld  %-10s  ", before, (long long)id_of(v), json_get_string(v, "attribute"));
    cli_print_text(json_get_string(v, "value"));
    if (until) printf("  (until %s)", until);
    putchar('\n');
}

/* Prints the memories of a list that is consumed; NULL: `err` is set. */
static int memories_print(const struct command *m, json_t *list, const char *none,
                          struct error *err) {
    json_t *v;
    size_t i;
    json_array_foreach (list, i, v) {
        if (m->c->json)
            cli_print_json(json_incref(v));
        else
            memory_print("", v);
    }
    if (list && json_array_size(list) == 0) log_info("%s", none);
    json_decref(list);
    return list ? OK : err->code;
}

static int list(const struct command *m, struct error *err) {
    return memories_print(m, memories_list(m->memories, m->o->ended, err), "no memories", err);
}

static int search(const struct command *m, struct error *err) {
    const struct memory_query q = {.text = m->arg,
                                   .attribute = m->o->attribute,
                                   .at = m->o->at,
                                   .ended = m->o->ended,
                                   .top = m->o->limit};
    return memories_print(m, memories_search(m->memories, &q, err), "no memory matches", err);
}

static void learnt_print(const json_t *result) {
    static const struct {
        const char *list, *label;
    } lists[] = {{"added", "added   "},
                 {"merged", "known   "},
                 {"ended", "ended   "},
                 {"pruned", "removed "}};
    const json_t *v;
    size_t i;
    for (size_t k = 0; k < ARRAY_LEN(lists); k++)
        json_array_foreach (json_object_get(result, lists[k].list), i, v)
            memory_print(lists[k].label, v);
    json_array_foreach (json_object_get(result, "refused"), i, v) {
        printf("refused (%s): ", json_get_string(v, "reason"));
        cli_print_text(json_get_string(v, "text"));
        putchar('\n');
    }
}

static int learn(const struct command *m, struct error *err) {
    const struct memory_turn t = {.role = "user",
                                  .text = m->arg,
                                  .conversation = m->o->conversation,
                                  .number = m->o->turn,
                                  .time = m->o->at};
    json_t *result = memories_learn(m->memories, &t, err);
    if (!result) return err->code;
    if (m->c->json)
        cli_print_json(json_incref(result));
    else
        learnt_print(result);
    json_decref(result);
    return OK;
}

static int id_parse(const char *text, int64_t *id, struct error *err) {
    char *end;
    *id = strtoll(text, &end, 10);
    return *end || *id <= 0 ? error_set(err, ERR_USAGE, "'%s' is not the number of a memory", text)
                            : OK;
}

static void why_print(const json_t *v) {
    const json_t *memory = json_object_get(v, "memory"), *s = json_object_get(v, "strength"),
                 *source = json_object_get(memory, "source"), *e;
    size_t i;
    memory_print("", memory);
    printf("strength    %.3f = importance %.2f × recency %.3f × use %.3f\n",
           json_get_number(s, "strength"), json_get_number(s, "importance"),
           json_get_number(s, "recency"), json_get_number(s, "use"));
    printf("            recency = 2^(-%.1f days / 180), use = (1 + %lld) / (2 + %lld)\n",
           json_get_number(s, "days"), (long long)json_get_number(s, "uses"),
           (long long)json_get_number(s, "uses"));
    printf("said        ");
    cli_print_text(json_get_string(memory, "text"));
    printf("\nsource      %s, %s%s", json_get_string(source, "speaker"),
           json_get_string(source, "time"),
           *json_get_string(source, "conversation") ? ", conversation " : "");
    cli_print_text(json_get_string(source, "conversation"));
    if (json_integer_value(json_object_get(source, "turn")))
        printf(", turn %lld", (long long)json_integer_value(json_object_get(source, "turn")));
    putchar('\n');
    json_array_foreach (json_object_get(v, "history"), i, e)
        printf("%-10s  %s %s\n", i ? "" : "history", json_get_string(e, "at"),
               json_get_string(e, "operation"));
}

static int why(const struct command *m, struct error *err) {
    int64_t id;
    if (id_parse(m->arg, &id, err) != OK) return err->code;
    json_t *v = memories_why(m->memories, id, m->o->at, err);
    if (!v) return err->code;
    if (m->c->json)
        cli_print_json(json_incref(v));
    else
        why_print(v);
    json_decref(v);
    return OK;
}

static int delete (const struct command *m, struct error *err) {
    int64_t id = 0, n = 1;
    int rc;
    if (m->o->all == (m->arg != NULL))
        return error_set(err, ERR_USAGE, "delete takes the number of a memory, or --all");
    if (m->o->all)
        rc = memories_delete_all(m->memories, &n, err);
    else if ((rc = id_parse(m->arg, &id, err)) == OK)
        rc = memories_delete(m->memories, id, err);
    if (rc == OK) log_info("%lld deleted", (long long)n);
    return rc;
}

static int undo(const struct command *m, struct error *err) {
    json_t *v = memories_undo(m->memories, err);
    if (!v) return err->code;
    if (m->c->json)
        cli_print_json(json_incref(v));
    else
        printf("taken back: %s of %s\n", json_get_string(v, "operation"), json_get_string(v, "at"));
    json_decref(v);
    return OK;
}

static int export(const struct command *m, struct error *err) {
    json_t *all = memories_list(m->memories, true, err), *v;
    size_t i;
    json_array_foreach (all, i, v) cli_print_json(json_incref(v));
    json_decref(all);
    return all ? OK : err->code;
}

struct import {
    struct memories *to;
    int64_t added, known;
};

static int line_import(void *ctx, const json_t *v, int line, struct error *err) {
    struct import *i = ctx;
    bool added;
    if (memories_import(i->to, v, &added, err) != OK) return error_wrap(err, "line %d", line);
    i->added += added;
    i->known += !added;
    return OK;
}

static int import(const struct command *m, struct error *err) {
    struct import i = {.to = m->memories};
    int rc = json_file_each(m->arg, line_import, &i, err);
    log_info("%lld added, %lld known already", (long long)i.added, (long long)i.known);
    return rc;
}

static const struct {
    const char *name, *args;
    int min_args, max_args;
    int (*run)(const struct command *m, struct error *err);
} verbs[] = {
    {"list", "no argument", 0, 0, list},      {"search", "TEXT, or no argument", 0, 1, search},
    {"learn", "TEXT", 1, 1, learn},           {"why", "ID", 1, 1, why},
    {"delete", "ID, or --all", 0, 1, delete}, {"undo", "no argument", 0, 0, undo},
    {"export", "no argument", 0, 0, export},  {"import", "FILE", 1, 1, import},
};

/* Opens the store; makes its folder. */
static struct store *store_make(const char *path, struct error *err) {
    char *dir = xstrndup(path, (size_t)(path_name(path) - path));
    int rc = *dir ? dir_make(dir, err) : OK;
    free(dir);
    return rc == OK ? store_open(path, err) : NULL;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    size_t i = 0;
    while (i < ARRAY_LEN(verbs) && strcmp(verbs[i].name, args->v[0]) != 0) i++;
    if (i == ARRAY_LEN(verbs))
        return error_set(err, ERR_USAGE,
                         "'%s' is not a subcommand: use list, search, learn, why, delete, undo, "
                         "export or import",
                         args->v[0]);
    if (args->n - 1 < verbs[i].min_args || args->n - 1 > verbs[i].max_args)
        return error_set(err, ERR_USAGE, "%s takes %s", verbs[i].name, verbs[i].args);
    if (!path_exists(o->store) && verbs[i].run != import && verbs[i].run != learn)
        return error_set(
            err, ERR_MISSING,
            "no store '%s'; 'shoal memory learn TEXT' makes one, --store names another "
            "file",
            o->store);
    struct store *store = store_make(o->store, err);
    struct memories *memories = store ? memories_open(store, o->user, o->capacity, err) : NULL;
    const struct command m = {c, o, memories, args->n > 1 ? args->v[1] : NULL};
    int rc = memories ? verbs[i].run(&m, err) : err->code;
    memories_close(memories);
    store_close(store);
    return rc;
}

const struct cli_command cmd_memory = {
    .name = "memory",
    .args = "list|search|learn|why|delete|undo|export|import [TEXT|ID|FILE]",
    .summary = "long-term memories of a user",
    .about =
        "A memory is a stable fact that a user stated about himself or herself. Rules for\n"
        "English, Japanese and Chinese find it; questions, quotations, pretence, instructions,\n"
        "negations and statements about others are refused, with the reason. A contradiction\n"
        "ends the old fact. why shows where a memory comes from and how its strength is\n"
        "computed; undo takes back the last change; delete is final (docs/MEMORY.md).\n"
        "\n"
        "  shoal memory learn 'I live in Osaka and I have a cat called Momo.'\n"
        "  shoal memory learn \"I've moved to Kyoto\" --user ann\n"
        "  shoal memory list --ended\n"
        "  shoal memory search 'where do I live?'\n"
        "  shoal memory why 1\n"
        "  shoal memory undo\n"
        "  shoal memory export --user ann > ann.jsonl\n"
        "  shoal memory import ann.jsonl --user ben",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run,
};
