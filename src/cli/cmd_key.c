/*
 * cmd_key: `shoal key add|list|revoke`: the keys that give access to `shoal serve`.
 *
 * Changes the key store, whether a server runs or not; a running server applies the change within a
 * second. The secret of a new key is printed to stdout once and stored nowhere.
 */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "ops/ops.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct options {
    char *store;
    struct strings scope;
    int64_t rpm, tpm, quota_day, quota, days;
};
static const struct option_row rows[] = {
    {"store", OPT_STRING, offsetof(struct options, store), "runs/serve/serve.db", 0, 0, "FILE",
     "key store of the server"},
    {"scope", OPT_LIST, offsetof(struct options, scope), "chat", 0, 0, "SCOPE",
     "add: scopes of the key: chat, jobs, admin; none implies another"},
    {"rpm", OPT_INT, offsetof(struct options, rpm), "0", 0, 1e9, "N",
     "add: requests per minute; 0: no limit"},
    {"tpm", OPT_INT, offsetof(struct options, tpm), "0", 0, 1e12, "N",
     "add: tokens per minute, prompt and completion; 0: no limit"},
    {"quota-day", OPT_INT, offsetof(struct options, quota_day), "0", 0, 1e15, "N",
     "add: tokens per day (UTC); 0: no limit"},
    {"quota", OPT_INT, offsetof(struct options, quota), "0", 0, 1e15, "N",
     "add: tokens in total; 0: no limit"},
    {"days", OPT_INT, offsetof(struct options, days), "0", 0, 36500, "N",
     "add: days until the key expires; 0: never"},
    {0},
};

static int scopes_parse(const struct strings *names, unsigned *bits, struct error *err) {
    *bits = 0;
    for (int i = 0; i < names->n; i++) {
        unsigned bit = key_scope_from_name(names->v[i]);
        if (!bit)
            return error_set(err, ERR_USAGE, "'%s' is not a scope: use chat, jobs or admin",
                             names->v[i]);
        *bits |= bit;
    }
    return OK;
}

static int add(const struct cli_options *c, const struct options *o, struct keys *k,
               const char *name, time_t now, struct error *err) {
    char secret[KEY_SECRET_LEN];
    struct key_spec spec = {.requests_per_minute = o->rpm,
                            .tokens_per_minute = o->tpm,
                            .quota_day = o->quota_day,
                            .quota = o->quota,
                            .expires = o->days ? now + o->days * 86400 : 0};
    int rc = scopes_parse(&o->scope, &spec.scopes, err);
    if (rc == OK) rc = keys_add(k, name, &spec, (double)now, secret, err);
    if (rc != OK) return rc;
    if (c->json) {
        cli_print_json(json_pack("{s:s,s:s}", "name", name, "secret", secret));
    } else {
        puts(secret);
        log_info("this is the only time that the key of '%s' is shown", name);
    }
    sodium_memzero(secret, sizeof secret);
    return OK;
}

/* The date_text of a time; "" if it is 0. */
static const char *date_text(const json_t *v, const char *key, char out[16]) {
    time_t at = (time_t)json_get_number(v, key);
    struct tm tm;
    *out = 0;
    if (at && gmtime_r(&at, &tm)) strftime(out, 16, "%Y-%m-%d", &tm);
    return out;
}

static double token_count(const json_t *v, const char *when) {
    const json_t *count = json_object_get(v, when);
    return json_get_number(count, "prompt_tokens") + json_get_number(count, "completion_tokens");
}

static void scopes_print(const json_t *list) {
    struct buf b = {0};
    size_t i;
    const json_t *name;
    json_array_foreach (list, i, name)
        buf_printf(&b, "%s%s", i ? "," : "", json_string_value(name));
    printf("%-16s", b.data);
    buf_release(&b);
}

static void key_print(const json_t *v, double now) {
    char created[16], last[16];
    double expires = json_get_number(v, "expires");
    printf("%-22s%-16s…%-8s", json_get_string(v, "id"), json_get_string(v, "name"),
           json_get_string(v, "tail"));
    scopes_print(json_object_get(v, "scopes"));
    printf("%-12s%-12s%12.0f%14.0f%14.0f  %s\n", date_text(v, "created", created),
           date_text(v, "last_used", last), json_get_number(json_object_get(v, "all"), "requests"),
           token_count(v, "today"), token_count(v, "all"),
           json_get_number(v, "revoked")    ? "revoked"
           : expires != 0 && expires <= now ? "expired"
                                            : "");
}

static int list(const struct cli_options *c, struct keys *k, time_t now) {
    json_t *all = keys_list(k, (double)now), *v;
    size_t i;
    if (!c->json)
        printf("%-22s%-16s%-9s%-16s%-12s%-12s%12s%14s%14s\n", "id", "name", "ends in", "scopes",
               "made", "last used", "requests", "tokens today", "tokens");
    json_array_foreach (all, i, v) {
        if (c->json)
            cli_print_json(json_incref(v));
        else
            key_print(v, (double)now);
    }
    json_decref(all);
    return OK;
}

static int revoke(const struct cli_options *c, struct keys *k, const char *name, time_t now,
                  struct error *err) {
    int rc = keys_revoke(k, name, (double)now, err);
    if (rc == OK && c->json)
        cli_print_json(json_pack("{s:s}", "revoked", name));
    else if (rc == OK)
        log_info("key '%s' is revoked", name);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    const char *verb = args->v[0], *name = args->n > 1 ? args->v[1] : NULL;
    bool is_add = strcmp(verb, "add") == 0, is_list = strcmp(verb, "list") == 0,
         is_revoke = strcmp(verb, "revoke") == 0;
    if (!is_add && !is_list && !is_revoke)
        return error_set(err, ERR_USAGE, "'%s' is not a subcommand: use add, list or revoke", verb);
    if (is_list ? name != NULL : !name)
        return error_set(err, ERR_USAGE, is_list ? "list takes no name" : "name the key");
    if (!is_add && !path_exists(o->store))
        return error_set(err, ERR_MISSING,
                         "no keys in '%s'; 'shoal key add NAME' makes one, --store names another "
                         "file",
                         o->store);
    struct keys *k = keys_open(o->store, err);
    if (!k) return err->code;
    time_t now = time(NULL);
    int rc = is_add    ? add(c, o, k, name, now, err)
             : is_list ? list(c, k, now)
                       : revoke(c, k, name, now, err);
    keys_close(k);
    return rc;
}

const struct cli_command cmd_key = {
    .name = "key",
    .args = "add|list|revoke [NAME]",
    .summary = "manage the API keys of the server, their limits and their usage",
    .about =
        "add prints the secret of a new key once; the store keeps only its hash. A running\n"
        "server applies the change within a second, and requires a key as soon as there is one.\n"
        "revoke takes a name, or an id from list.\n"
        "\n"
        "  shoal key add alice --rpm 60 --tpm 20000 --quota-day 500000\n"
        "  shoal key add trainer --scope chat jobs --days 30\n"
        "  shoal key list\n"
        "  shoal key revoke alice",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run,
};
