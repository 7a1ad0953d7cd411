/*
 * cmd_replay: `shoal replay KEY`: runs a recorded call again and prints "same bits", or every
 * difference.
 *
 * It compares the inputs of the call (model, adapters, numeric class, processor level, version),
 * and the outputs if the call can run. The store does not change.
 */
#define _GNU_SOURCE
#include "cli/setup.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *store, *run, *runs;
    int64_t generation;
    bool list;
};
static const struct option_row rows[] = {
    {"store", OPT_STRING, offsetof(struct options, store), SETUP_STORE, 0, 0, "FILE",
     "database of recorded calls"},
    {"list", OPT_BOOL, offsetof(struct options, list), NULL, 0, 0, NULL,
     "list the recorded calls, newest first"},
    {"run", OPT_STRING, offsetof(struct options, run), NULL, 0, 0, "ID",
     "repeat a generation of this run instead of a call"},
    {"generation", OPT_INT, offsetof(struct options, generation), "0", 0, 1e6, "G",
     "--run: the generation"},
    {"runs", OPT_STRING, offsetof(struct options, runs), "runs", 0, 0, "DIR", "folder of runs"},
    {0},
};

/* One replay: the record, the state to run it, and the differences. */
struct replay {
    const struct cli_options *c;
    json_t *call;
    struct buf differs; /* one line per difference from the recorded call */
    struct arena arena;
    struct grammar *grammar;
    struct setup s;
    struct weighted_adapter mix[ENGINE_MIX_MAX];
    struct engine_request r;
};

static int list_calls(const struct cli_options *c, struct store *s, struct error *err) {
    json_t *all = store_record_list(s, err), *v;
    size_t i;
    if (!all) return err->code;
    json_array_foreach (all, i, v) {
        if (c->json)
            cli_print_json(json_incref(v));
        else
            printf("%.16s  %s  %s %s  %s, %d adapters\n", json_get_string(v, "key"),
                   json_get_string(v, "created"), json_get_string(v, "class"),
                   json_get_string(v, "level"), json_get_string(v, "model"),
                   (int)json_array_size(json_object_get(v, "adapters")));
    }
    json_decref(all);
    return OK;
}

/* Notes a setting that differs; the outputs may still be equal. */
static void field_compare(struct replay *r, const char *key, const char *current) {
    const char *recorded = json_get_string(r->call, key);
    if (strcmp(recorded, current) != 0)
        buf_printf(&r->differs, "%s: was '%s', is '%s'\n", key, recorded, current);
}

/* Opens the recorded model; false if it is missing or changed, which ends the replay. */
static bool model_reopen(struct replay *r, struct error *err) {
    const char *path = json_get_string(r->call, "model");
    enum numeric_class cls;
    const char *name = json_get_string(r->call, "class"), *level = json_get_string(r->call, "level");
    bool same = numeric_class_find(name, level, &cls) && !r->c->exact;
    if (r->c->exact) cls = NUMERIC_EXACT;
    if (!same && strcmp(name, numeric_class_name(cls)) != 0)
        buf_printf(&r->differs, "class: was '%s' at level '%s', is '%s'\n", name, level,
                   numeric_class_name(cls));
    r->s.pool = pool_new((int)r->c->threads);
    r->s.m = model_open(path, cls, err);
    const char *hash = r->s.m ? model_hash(r->s.m, err) : NULL;
    if (!hash) {
        buf_printf(&r->differs, "model: cannot be opened: %s\n", err->text);
        return false;
    }
    if (strcmp(hash, json_get_string(r->call, "model_hash")) == 0) return true;
    buf_printf(&r->differs, "model file '%s' changed: was %s, is %s\n", path,
               json_get_string(r->call, "model_hash"), hash);
    return false;
}

static bool adapter_reopen(struct replay *r, const json_t *v, struct weighted_adapter *out,
                           struct error *err) {
    const char *path = json_get_string(v, "path"), *hash = json_get_string(v, "hash");
    const json_t *noise = json_object_get(v, "noise"), *weight = json_object_get(v, "weight");
    *out = (struct weighted_adapter){.weight = weight ? (float)json_number_value(weight) : 1};
    if (noise) {
        out->noise.seed = (uint64_t)json_integer_value(json_object_get(noise, "seed"));
        out->noise.member = (uint32_t)json_integer_value(json_object_get(noise, "member"));
        return true;
    }
    out->adapter = setup_adapter(&r->s, path, err);
    if (!out->adapter)
        buf_printf(&r->differs, "adapter '%s' is missing: %s\n", path, err->text);
    else if (strcmp(out->adapter->hash, hash) != 0)
        buf_printf(&r->differs, "adapter '%s' changed: was %s, is %s\n", path, hash,
                   out->adapter->hash);
    return out->adapter && strcmp(out->adapter->hash, hash) == 0;
}

/* Opens the recorded adapters. A recorded mix has weights, so that a mix of one adapter is distinct
 * from a plain adapter. */
static bool adapters_reopen(struct replay *r, struct error *err) {
    const json_t *list = json_object_get(r->call, "adapters");
    int n = (int)MIN(json_array_size(list), (size_t)ENGINE_MIX_MAX);
    bool same = true;
    for (int i = 0; i < n; i++)
        same &= adapter_reopen(r, json_array_get(list, (size_t)i), &r->mix[i], err);
    bool mixed = n > 0 && json_object_get(json_array_get(list, 0), "weight");
    r->r.adapter = mixed || n == 0 ? NULL : r->mix[0].adapter;
    r->r.mix = r->mix;
    r->r.n_mix = mixed ? n : 0;
    return same;
}

/* Runs the call in an engine with one sequence of the required length. Other engine options do not
 * change the bits. */
static int call_rerun(struct replay *r, struct error *err) {
    int64_t longest = 0;
    for (int i = 0; i < r->r.n_choices; i++) longest = MAX(longest, r->r.choices[i].n);
    longest += (int64_t)r->r.n_prompt + r->r.max_tokens + r->r.suffix.n;
    struct engine_options o = {.max_rows = 256,
                               .max_seqs = 1,
                               .max_len = (int32_t)MIN(longest, r->s.m->config.max_seq_len),
                               .pool = r->s.pool};
    if (dtype_parse(json_get_string(r->call, "kv"), &o.kv_elem, err) != OK ||
        dtype_parse(json_get_string(r->call, "lora"), &o.lora_elem, err) != OK ||
        engine_options_limit(r->s.m, &o, err) != OK)
        return err->code;
    r->s.engine = o;
    r->s.e = engine_new(r->s.m, &o, err);
    return r->s.e ? engine_run(r->s.e, &r->r, 1, NULL, err) : err->code;
}

/* Compares the settings that the outputs may depend on. */
static void settings_compare(struct replay *r) {
    char key[HASH_LEN];
    field_compare(r, "version", SHOAL_VERSION);
    record_key(&r->r, r->s.m->hash, r->s.m->cls, r->s.engine.kv_elem, r->s.engine.lora_elem, key);
    field_compare(r, "key", key);
}

static int replay_run(struct replay *r, bool *same, struct error *err) {
    *same = false;
    if (!model_reopen(r, err)) return OK;
    int rc =
        record_inputs_parse(json_object_get(r->call, "inputs"), &r->arena, &r->r, &r->grammar, err);
    if (rc != OK || !adapters_reopen(r, err)) return rc;
    rc = call_rerun(r, err);
    if (rc != OK) return rc;
    json_t *current = record_outputs_json(&r->r);
    struct buf outputs = {0};
    bool differ = record_outputs_diff(json_object_get(r->call, "outputs"), current, &outputs);
    settings_compare(r);
    if (outputs.len) buf_add(&r->differs, outputs.data, outputs.len);
    *same = !differ;
    buf_release(&outputs);
    json_decref(current);
    return OK;
}

static void print_result(const struct replay *r, bool same) {
    const char *differs = r->differs.data ? r->differs.data : "";
    if (r->c->json)
        cli_print_json(json_pack("{s:s,s:b,s:s,s:i}", "call", json_get_string(r->call, "key"),
                                 "same", (int)same, "differs", differs, "tokens", r->r.n_out));
    else if (same)
        printf("%ssame bits: call %.16s, %d tokens\n", differs, json_get_string(r->call, "key"),
               r->r.n_out);
    else
        printf("%scall %.16s differs\n", differs, json_get_string(r->call, "key"));
}

static int replay_call(const struct cli_options *c, struct store *s, const char *prefix,
                       struct error *err) {
    static const struct setup_options none;
    struct replay r = {.c = c, .s = {.c = c, .o = &none}};
    bool same = false;
    r.call = store_record_get(s, prefix, err);
    if (!r.call) return err->code;
    int rc = replay_run(&r, &same, err);
    if (rc == OK) print_result(&r, same);
    if (rc == OK && !same)
        rc = error_set(err, ERR_MISMATCH, "call '%.16s' is not the same",
                       json_get_string(r.call, "key"));
    rc = setup_close(&r.s, rc, err);
    engine_request_release(&r.r);
    grammar_free(r.grammar);
    arena_release(&r.arena);
    buf_release(&r.differs);
    json_decref(r.call);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (o->run && args->n == 0 && !o->list)
        return cmd_evolve_replay(c, o->runs, o->run, o->generation, err);
    if (o->run || o->list == (args->n == 1))
        return error_set(err, ERR_USAGE, "give the beginning of a call's key, --list or --run ID");
    if (!path_exists(o->store))
        return error_set(err, ERR_MISSING,
                         "no calls are kept in '%s'; --record keeps them, --store names the file",
                         o->store);
    struct store *s = store_open(o->store, err);
    int rc = !s ? err->code : o->list ? list_calls(c, s, err) : replay_call(c, s, args->v[0], err);
    store_close(s);
    return rc;
}

const struct cli_command cmd_replay = {
    .name = "replay",
    .args = "KEY|--list|--run ID",
    .summary = "repeat a recorded call or a generation, and compare the bits",
    .about =
        "Runs a recorded call again and compares the results bit by bit. 'run', 'eval' and\n"
        "'debate' record calls with --record. A prefix of the key is enough. Exit status 0: the\n"
        "same bits; 1: not the same, and the output names each difference.\n"
        "\n"
        "  shoal run models/fry -p 'two plus two' --record --json\n"
        "  shoal replay --list\n"
        "  shoal replay 3f9aa118\n"
        "  shoal replay --run 20261122-060712-s1 --generation 3",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 1,
    .run = run,
};
