/*
 * cmd_conversation: `shoal conversation list|show|search|rename|delete|import`: the conversations
 * that chat and ask keep in the store.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *store;
    int64_t limit;
};
static const struct option_row rows[] = {
    {"store", OPT_STRING, offsetof(struct options, store), SETUP_STORE, 0, 0, "FILE",
     "database of chat and ask; of a server: STATE/conversations.db"},
    {"limit", OPT_INT, offsetof(struct options, limit), "0", 0, 1e9, "N",
     "show: the last N exchanges; search: at most N hits; 0: all"},
    {0},
};

enum { PAGE = 256 };

struct command {
    const struct cli_options *c;
    const struct options *o;
    struct store *store;
    const char *id, *text; /* the arguments after the verb; NULL: not given */
};

static int list(const struct command *m, struct error *err) {
    json_t *all = conversation_list(m->store, "", err), *v;
    size_t i;
    json_array_foreach (all, i, v) {
        if (m->c->json) {
            cli_print_json(json_incref(v));
            continue;
        }
        printf("%20s  %5lld exchanges  ", json_get_string(v, "updated"),
               (long long)json_integer_value(json_object_get(v, "exchanges")));
        cli_print_text(json_get_string(v, "id"));
        printf(": ");
        cli_print_text(json_get_string(v, "title"));
        putchar('\n');
    }
    if (all && json_array_size(all) == 0) log_info("no conversations in '%s'", m->o->store);
    json_decref(all);
    return all ? OK : err->code;
}

static void turn_print(const char *role, const json_t *exchange) {
    printf("%s: ", role);
    cli_print_text(json_get_string(exchange, role));
    putchar('\n');
}

static void exchange_print(const struct command *m, json_t *v) {
    if (m->c->json) {
        cli_print_json(json_incref(v));
        return;
    }
    const char *id = json_get_string(v, "id");
    printf("-- ");
    cli_print_text(id);
    printf("%s%lld  %s\n", *id ? " " : "",
           (long long)json_integer_value(json_object_get(v, "number")), json_get_string(v, "at"));
    turn_print("user", v);
    turn_print("assistant", v);
}

/* The number of the exchange before those to show. */
static int show_from(const struct command *m, int64_t *after, struct error *err) {
    struct conversation *c = conversation_open(m->store, m->id, err);
    if (!c) return err->code;
    int64_t last = json_integer_value(json_object_get(conversation_state(c), "last"));
    *after = m->o->limit ? MAX(last - m->o->limit, 0) : 0;
    conversation_close(c);
    return OK;
}

static int show(const struct command *m, struct error *err) {
    int64_t after = 0;
    int rc = show_from(m, &after, err);
    for (size_t n = PAGE; rc == OK && n == PAGE;) {
        json_t *page = conversation_history(m->store, m->id, after, PAGE, err), *v;
        size_t i;
        if (!page) return err->code;
        n = json_array_size(page);
        json_array_foreach (page, i, v) {
            exchange_print(m, v);
            after = json_integer_value(json_object_get(v, "number"));
        }
        json_decref(page);
    }
    return rc;
}

static int search(const struct command *m, struct error *err) {
    int64_t limit = m->o->limit ? m->o->limit : INT64_MAX;
    json_t *hits = conversation_search(m->store, "", m->id, limit, err), *v;
    size_t i;
    json_array_foreach (hits, i, v) exchange_print(m, v);
    if (hits && json_array_size(hits) == 0) log_info("no exchange contains '%s'", m->id);
    json_decref(hits);
    return hits ? OK : err->code;
}

static int rename_title(const struct command *m, struct error *err) {
    return conversation_rename(m->store, m->id, m->text, err);
}

static int delete_one(const struct command *m, struct error *err) {
    int rc = conversation_delete(m->store, m->id, err);
    if (rc == OK) log_info("conversation '%s' is deleted", m->id);
    return rc;
}

struct import {
    struct conversation *to;
    int64_t n;
};

static int line_import(void *ctx, const json_t *v, int line, struct error *err) {
    struct import *i = ctx;
    (void)line;
    int rc = conversation_import(i->to, v, err);
    i->n += rc == OK;
    return rc;
}

static int import(const struct command *m, struct error *err) {
    struct import i = {conversation_open(m->store, m->id, err), 0};
    if (!i.to) return err->code;
    int rc = json_file_each(m->text, line_import, &i, err);
    conversation_close(i.to);
    log_info("%lld exchanges added to '%s'", (long long)i.n, m->id);
    return rc;
}

static const struct {
    const char *name, *args;
    int n_args;
    int (*run)(const struct command *m, struct error *err);
} verbs[] = {
    {"list", "no argument", 0, list}, {"show", "ID", 1, show},
    {"search", "TEXT", 1, search},    {"rename", "ID TITLE", 2, rename_title},
    {"delete", "ID", 1, delete_one},  {"import", "ID FILE", 2, import},
};

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    size_t i = 0;
    while (i < ARRAY_LEN(verbs) && strcmp(verbs[i].name, args->v[0]) != 0) i++;
    if (i == ARRAY_LEN(verbs))
        return error_set(err, ERR_USAGE,
                         "'%s' is not a subcommand: use list, show, search, rename, delete or "
                         "import",
                         args->v[0]);
    if (args->n - 1 != verbs[i].n_args)
        return error_set(err, ERR_USAGE, "%s takes %s", verbs[i].name, verbs[i].args);
    if (!path_exists(o->store) && verbs[i].run != import)
        return error_set(err, ERR_MISSING,
                         "no store '%s'; 'shoal chat --conversation ID' makes one, --store names "
                         "another file",
                         o->store);
    struct store *store = store_open(o->store, err);
    const struct command m = {c, o, store, args->n > 1 ? args->v[1] : NULL,
                              args->n > 2 ? args->v[2] : NULL};
    int rc = store ? verbs[i].run(&m, err) : err->code;
    store_close(store);
    return rc;
}

const struct cli_command cmd_conversation = {
    .name = "conversation",
    .args = "list|show|search|rename|delete|import [ID|TEXT] [TITLE|FILE]",
    .summary = "the conversations that chat and ask have stored",
    .about = "chat and ask keep every exchange of --conversation ID, word for word; several\n"
             "programs may continue one conversation at the same time. show --json writes a\n"
             "conversation that import reads. delete removes it with its facts and its summary.\n"
             "\n"
             "  shoal chat model.gguf --conversation me\n"
             "  shoal conversation list\n"
             "  shoal conversation search 富士山\n"
             "  shoal conversation show me --json > me.jsonl\n"
             "  shoal conversation import copy me.jsonl\n"
             "  shoal conversation rename me 'plans for the summer'\n"
             "  shoal conversation delete copy",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 3,
    .run = run,
};
