/*
 * ollama_models: Ollama's derived models, and the files that clients upload for them. A derived
 * model consists of the base model, adapters and settings.
 *
 *   STATE/blobs/sha256-HASH     uploaded files, under the hash of their content
 *   STATE/adapters/HASH/        PEFT directories: hard links to blobs, under PEFT's file names
 *   STATE/models/HASH.json      derived models (ollama.h), under the hash of their name
 *
 * If a model has several adapters, their exact sum is published to the pool as one adapter. A blob
 * gets its name only after its hash was verified and all of it is on disk.
 */
#define _GNU_SOURCE
#include "api/go_template.h"
#include "api/internal.h"
#include "api/ollama.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_ADAPTERS = 16, MODELFILE_BYTES = 1 << 20 };
static const uint64_t BLOB_BYTES = (uint64_t)64 << 30;

static char *state_path(const struct server *s, const char *folder, const char *name) {
    return xasprintf("%s/%s/%s", s->options->state_dir, folder, name);
}

static int state_folder(const struct server *s, const char *folder, struct error *err) {
    char *path = path_join(s->options->state_dir, folder);
    int rc = dir_make(path, err);
    free(path);
    return rc;
}

/* blobs */

/* The hash in "sha256:HASH" or "sha256-HASH"; NULL: the text has another form. */
static const char *digest_hash(const char *text) {
    bool named = strncmp(text, "sha256:", 7) == 0 || strncmp(text, "sha256-", 7) == 0;
    return named && hash_is_valid(text + 7) ? text + 7 : NULL;
}

static char *blob_path(const struct server *s, const char *hash) {
    char name[80];
    snprintf(name, sizeof name, "sha256-%s", hash);
    return state_path(s, "blobs", name);
}

/* The path of a blob, malloc'ed. ERR_MISSING: it was not uploaded. */
static char *blob_find(const struct server *s, const char *digest, struct error *err) {
    const char *hash = digest_hash(digest);
    char *path = hash ? blob_path(s, hash) : NULL;
    if (path && path_exists(path)) return path;
    free(path);
    error_set(err, hash ? ERR_MISSING : ERR_USAGE,
              hash ? "there is no blob '%.80s'; upload it to /api/blobs first"
                   : "'%.80s' is not a digest; use sha256: and 64 hex digits",
              digest);
    return NULL;
}

/* An upload. Errors are reported after the whole body has arrived, because the server cannot reply
 * while a client sends. */
struct ollama_blob {
    struct body_sink sink;
    struct atomic_file file;
    struct sha256 hasher;
    char expected[HASH_LEN];
    uint64_t size;
    bool exists;
    struct error err;
};

static int blob_sink_write(struct body_sink *sink, const void *p, size_t n) {
    struct ollama_blob *b = (struct ollama_blob *)sink;
    b->size += n;
    if (b->size > BLOB_BYTES) return ERR_MEMORY;
    sha256_update(&b->hasher, p, n);
    if (b->err.code == OK && !b->exists) atomic_file_write(&b->file, p, n, &b->err);
    return OK;
}

static void blob_sink_free(struct body_sink *sink) {
    struct ollama_blob *b = (struct ollama_blob *)sink;
    atomic_file_abort(&b->file);
    free(b);
}

struct body_sink *ollama_sink(struct server *s, struct exchange *x, const struct http_route *r) {
    if (r->handle != ollama_upload_handle) return NULL;
    const char *hash = digest_hash(exchange_wildcard(x));
    if (!hash) return NULL; // the handler replies with an error
    struct ollama_blob *b = xcalloc(1, sizeof *b);
    char *path = blob_path(s, hash);
    b->sink = (struct body_sink){blob_sink_write, blob_sink_free};
    strcpy(b->expected, hash);
    sha256_init(&b->hasher);
    b->exists = path_exists(path);
    if (!b->exists && state_folder(s, "blobs", &b->err) == OK)
        atomic_file_open(&b->file, path, &b->err);
    free(path);
    return &b->sink;
}

void ollama_upload_handle(void *ctx, struct exchange *x) {
    struct ollama_blob *b = (struct ollama_blob *)exchange_sink(x);
    char actual[HASH_LEN];
    (void)ctx;
    if (!b) {
        api_fail(x, 400, NULL, NULL, NULL, "'%.80s' is not a digest; use sha256: and 64 hex digits",
                 exchange_wildcard(x));
        return;
    }
    sha256_final(&b->hasher, actual);
    if (strcmp(actual, b->expected) != 0)
        api_fail(x, 400, NULL, NULL, NULL, "digest mismatch: expected sha256:%s, got sha256:%s",
                 b->expected, actual);
    else if (b->err.code != OK || (!b->exists && atomic_file_commit(&b->file, &b->err) != OK))
        api_fail(x, 500, NULL, NULL, NULL, "%s", b->err.text);
    else
        exchange_reply(x, b->exists ? 200 : 201, NULL, "", 0);
}

void ollama_blob_handle(void *ctx, struct exchange *x) {
    struct error err;
    if (strcmp(exchange_method(x), "HEAD") != 0) {
        api_fail(x, 405, NULL, NULL, NULL,
                 "a blob can be checked with HEAD and uploaded with POST");
        return;
    }
    char *path = blob_find(ctx, exchange_wildcard(x), &err);
    exchange_reply(x, path ? 200 : err.code == ERR_MISSING ? 404 : 400, NULL, "", 0);
    free(path);
}

/* adapters of a derived model */

/* Creates a folder with links to the uploaded files of one PEFT adapter; returns its path,
 * malloc'ed. */
static char *peft_folder_create(const struct server *s, const json_t *files, struct error *err) {
    char *text_of_files = json_canonical(files), hash[HASH_LEN];
    sha256_bytes(text_of_files, strlen(text_of_files), hash);
    free(text_of_files);
    char *dir = state_path(s, "adapters", hash);
    const char *name;
    const json_t *digest;
    int rc = dir_make(dir, err);
    json_object_foreach ((json_t *)(uintptr_t)files, name, digest) {
        const char *text = json_is_string(digest) ? json_string_value(digest) : "";
        char *blob = rc == OK ? blob_find(s, text, err) : NULL;
        char *target = path_join(dir, name);
        if (!blob)
            rc = err->code;
        else if (link(blob, target) != 0 && errno != EEXIST)
            rc = error_errno(err, "cannot link '%s'", target);
        free(blob);
        free(target);
    }
    if (rc == OK) return dir;
    free(dir);
    return NULL;
}

static char *adapter_source_path(const struct server *s, const json_t *v, struct error *err) {
    const char *text = json_string_value(v);
    if (!text) return peft_folder_create(s, v, err);
    return strncmp(text, "sha256", 6) == 0 ? blob_find(s, text, err) : xstrdup(text);
}

/* Opens the sum of a model's adapters; *out is NULL if it has none. */
static int adapters_open(struct server *s, const json_t *derived, struct adapter **out,
                         struct error *err) {
    const json_t *list = json_object_get(derived, "adapters"), *v;
    struct adapter *all[MAX_ADAPTERS];
    float ones[MAX_ADAPTERS];
    int n = 0, rc = OK;
    size_t i;
    *out = NULL;
    if (json_array_size(list) > MAX_ADAPTERS)
        return error_set(err, ERR_USAGE, "a model has at most %d adapters", MAX_ADAPTERS);
    json_array_foreach (list, i, v) {
        char *path = adapter_source_path(s, v, err);
        struct adapter *a = path ? adapter_open(path, s->model, err) : NULL;
        free(path);
        if (!a) {
            rc = err->code;
            break;
        }
        ones[n] = 1;
        all[n++] = a;
    }
    if (rc == OK && n == 1) *out = adapter_retain(all[0]);
    if (rc == OK && n > 1 && !(*out = adapter_sum(s->model, all, ones, n, NULL, err)))
        rc = err->code;
    while (n) adapter_release(all[--n]);
    if (rc == ERR_MISSING)
        rc = err->code = ERR_USAGE; // ERR_MISSING would mean that the model is missing
    return rc;
}

/* Adds a derived model to the list of adapters; takes ownership of `derived`. */
static int derived_serve(struct server *s, json_t *derived, struct error *err) {
    struct adapter *a;
    if (adapters_open(s, derived, &a, err) != OK) {
        json_decref(derived);
        return err->code;
    }
    const json_t *list = json_object_get(derived, "adapters");
    const char *first = json_string_value(json_array_get(list, 0));
    char *name = xstrdup(json_get_string(derived, "name"));
    char *path = xstrdup(json_array_size(list) == 1 && first ? first : name);
    int rc = server_derived_put(s, name, path, a, derived, err);
    adapter_release(a);
    free(path);
    free(name);
    return rc;
}

/* on disk */

static char *derived_path(const struct server *s, const char *name) {
    char hash[HASH_LEN], file[HASH_LEN + 8];
    sha256_bytes(name, strlen(name), hash);
    snprintf(file, sizeof file, "%s.json", hash);
    return state_path(s, "models", file);
}

/* Serves and stores a derived model; takes ownership of it. */
static int derived_save(struct server *s, json_t *derived, struct error *err) {
    char *text = json_canonical(derived), *path = derived_path(s, json_get_string(derived, "name"));
    pthread_mutex_lock(&s->derived_lock);
    int rc = derived_serve(s, derived, err);
    if (rc == OK) rc = state_folder(s, "models", err);
    if (rc == OK) rc = file_write(path, text, strlen(text), err);
    pthread_mutex_unlock(&s->derived_lock);
    free(text);
    free(path);
    return rc;
}

static void derived_load(struct server *s, const char *path) {
    struct error err;
    json_t *derived = json_parse_file(path, &err);
    char *expected = derived ? derived_path(s, json_get_string(derived, "name")) : NULL;
    bool ours = expected && strcmp(expected, path) == 0;
    if (derived && !ours) error_set(&err, ERR_FORMAT, "it is not a derived model");
    int rc = ours ? derived_serve(s, json_incref(derived), &err) : ERR_FORMAT;
    if (rc != OK) log_warn("the model in '%s' is not served: %s", path, err.text);
    json_decref(derived);
    free(expected);
}

void ollama_models_load(struct server *s) {
    char *folder = path_join(s->options->state_dir, "models");
    DIR *d = opendir(folder);
    const struct dirent *e;
    while (d && (e = readdir(d))) {
        const char *dot = strrchr(e->d_name, '.');
        if (!dot || strcmp(dot, ".json") != 0) continue;
        char *path = path_join(folder, e->d_name);
        derived_load(s, path);
        free(path);
    }
    if (d) closedir(d);
    free(folder);
}

/* the source of a derived model */

static char *name_without_tag(const char *name) {
    char *copy = xstrdup(name), *tag = strrchr(copy, ':');
    if (tag && strcmp(tag, ":latest") == 0) *tag = 0;
    return copy;
}

/* The specification of a model that consists of a listed adapter; NULL: it is not listed. */
static json_t *adapter_spec(struct server *s, const char *name) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    const struct adapter_entry *row = ollama_find_adapter(v, n, name);
    char *real = row ? realpath(row->path, NULL) : NULL;
    json_t *derived =
        row ? json_pack("{s:[o]}", "adapters", json_from_path(real ? real : row->path)) : NULL;
    free(real);
    server_adapters_free(v, n);
    return derived;
}

/* The specification of the model `from`, as the start of a new one. */
static json_t *derived_spec_from(struct server *s, const char *from, struct error *err) {
    struct model_ref t;
    if (ollama_target(s, from, &t, err) != OK) return NULL;
    json_t *derived = server_derived_spec(s, t.label);
    if (!derived && t.n == 0) derived = json_object();
    if (!derived && t.n == 1) derived = adapter_spec(s, t.label);
    if (!derived)
        error_set(err, ERR_USAGE, "'%.200s' is a mix: name its adapters one by one instead", from);
    model_ref_release(&t);
    return derived;
}

/* Checks that a derived model may have this name: it must not be a name of the base model, nor
 * "base" or "mix", which are labels of model references. */
static int name_check_free(struct server *s, const char *name, struct error *err) {
    if (strcmp(name, "base") == 0 || strcmp(name, "mix") == 0)
        return error_set(err, ERR_USAGE, "a model cannot be called '%s' here", name);
    return server_name_is_base(s, name) ? error_set(err, ERR_USAGE, "'%s' is the base's name", name)
                                        : OK;
}

/* Modelfiles */

struct modelfile {
    const char *p;
    struct error *err;
    int line;
};

/* The next """ of a text, or NULL. Unlike strstr, it reads no further, also under a sanitizer. */
static const char *block_end(const char *p) {
    while ((p = strchr(p, '"')) && strncmp(p, "\"\"\"", 3) != 0) p++;
    return p;
}

/* Consumes a value up to the end of its line, or between """. */
static char *value_take(struct modelfile *f) {
    bool block = strncmp(f->p, "\"\"\"", 3) == 0;
    const char *from = f->p + (block ? 3 : 0), *to = block ? block_end(from) : strchr(from, '\n');
    if (!to && block) {
        error_set(f->err, ERR_FORMAT, "line %d of the Modelfile: '\"\"\"' is not closed", f->line);
        return NULL;
    }
    if (!to) to = from + strlen(from);
    for (const char *c = f->p; c < to; c++) f->line += *c == '\n';
    f->p = to + (block ? 3 : 0);
    if (!block)
        while (to > from && strchr(" \t\r", to[-1])) to--;
    if (!block && to - from >= 2 && *from == '"' && to[-1] == '"') from++, to--;
    return xstrndup(from, (size_t)(to - from));
}

static char *word_take(struct modelfile *f) {
    size_t n = strcspn(f->p, " \t\r\n");
    char *word = xstrndup(f->p, n);
    f->p += n;
    f->p += strspn(f->p, " \t");
    return word;
}

/* The list under a key, which is created if necessary. */
static json_t *list_get_or_add(json_t *o, const char *key) {
    json_t *list = json_object_get(o, key);
    if (!json_is_array(list)) json_object_set_new(o, key, list = json_array());
    return list;
}

static void parameter_add(json_t *parameters, const char *key, const char *value) {
    enum { NUMBER_BYTES = 64 };
    json_t *v = strlen(value) < NUMBER_BYTES ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    if (strcmp(key, "stop") == 0 || !(json_is_number(v) || json_is_boolean(v))) {
        json_decref(v);
        v = json_string(value);
    }
    if (strcmp(key, "stop") == 0)
        json_array_append_new(list_get_or_add(parameters, key), v);
    else
        json_object_set_new(parameters, key, v);
}

static int instruction_add(struct modelfile *f, json_t *out, const char *instruction,
                           const char *first, const char *value) {
    static const char *const texts[] = {"FROM", "TEMPLATE", "SYSTEM", "LICENSE"};
    static const char *const keys[] = {"from", "template", "system", "license"};
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        if (strcasecmp(instruction, texts[i]) == 0) {
            json_object_set_new(out, keys[i], json_string(value));
            return OK;
        }
    if (strcasecmp(instruction, "ADAPTER") == 0) {
        json_array_append_new(list_get_or_add(out, "adapters"), json_string(value));
    } else if (strcasecmp(instruction, "PARAMETER") == 0) {
        json_t *p = json_object_get(out, "parameters");
        if (!p) json_object_set_new(out, "parameters", p = json_object());
        parameter_add(p, first, value);
    } else if (strcasecmp(instruction, "MESSAGE") == 0) {
        json_array_append_new(list_get_or_add(out, "messages"),
                              json_pack("{s:s,s:s}", "role", first, "content", value));
    } else if (strcasecmp(instruction, "REQUIRES") != 0) {
        return error_set(f->err, ERR_FORMAT,
                         "line %d of the Modelfile: '%.40s' is not one of FROM, ADAPTER, TEMPLATE, "
                         "SYSTEM, PARAMETER, MESSAGE, LICENSE and REQUIRES",
                         f->line, instruction);
    }
    return OK;
}

int ollama_modelfile(const char *text, json_t *out, struct error *err) {
    struct modelfile f = {.p = text, .err = err, .line = 1};
    int rc =
        strlen(text) > MODELFILE_BYTES
            ? error_set(err, ERR_USAGE, "the Modelfile is larger than %d bytes", MODELFILE_BYTES)
            : OK;
    while (rc == OK && *(f.p += strspn(f.p, " \t\r"))) {
        if (*f.p == '\n') {
            f.p++, f.line++;
            continue;
        }
        if (*f.p == '#') {
            f.p += strcspn(f.p, "\n");
            continue;
        }
        char *instruction = word_take(&f);
        bool has_name =
            strcasecmp(instruction, "PARAMETER") == 0 || strcasecmp(instruction, "MESSAGE") == 0;
        char *first = has_name ? word_take(&f) : NULL, *value = value_take(&f);
        rc = value ? instruction_add(&f, out, instruction, first, value) : err->code;
        free(instruction);
        free(first);
        free(value);
    }
    return rc;
}

/* creation */

/* Reads {name: digest or path}. PEFT files in the same folder are one adapter. */
static int adapters_by_name(const json_t *named, json_t *list, struct error *err) {
    json_t *folders = json_object();
    const char *name;
    const json_t *v;
    int rc = OK;
    json_object_foreach ((json_t *)(uintptr_t)named, name, v) {
        const char *file = path_name(name);
        bool peft = strcmp(file, "adapter_config.json") == 0 ||
                    strcmp(file, "adapter_model.safetensors") == 0;
        if (!json_is_string(v) || (peft && !digest_hash(json_string_value(v)))) {
            rc = error_set(err, ERR_USAGE, "'adapters' has '%.80s', which names no digest", name);
            break;
        }
        if (!peft) {
            json_array_append(list, (json_t *)(uintptr_t)v);
            continue;
        }
        char *folder = xstrndup(name, (size_t)(file - name));
        json_t *files = json_object_get(folders, folder);
        if (!files) {
            json_object_set_new(folders, folder, files = json_object());
            json_array_append(list, files);
        }
        json_object_set(files, file, (json_t *)(uintptr_t)v);
        free(folder);
    }
    json_decref(folders);
    return rc;
}

static int adapters_read(const json_t *body, json_t *derived, struct error *err) {
    json_t *v = json_get_nonnull(body, "adapters");
    if (!v) return OK;
    json_t *list = list_get_or_add(derived, "adapters");
    if (json_is_object(v)) return adapters_by_name(v, list, err);
    if (!json_is_string_array(v))
        return error_set(err, ERR_USAGE,
                         "'adapters' must be {name: digest}, or a list of digests and paths");
    json_array_extend(list, v);
    return OK;
}

/* Reads the template. If it cannot be translated, the base model's template is used, and a status
 * line reports it. */
static int template_read(const struct server *s, const json_t *body, json_t *derived, json_t *lines,
                         struct error *err) {
    const char *text = NULL;
    struct error why;
    if (json_read_string(body, "template", &text, err) != OK) return err->code;
    if (!text) return OK;
    char *jinja = ollama_template_to_jinja(s, text, &why);
    json_object_set_new(derived, "template", json_string(text));
    json_object_del(derived, "jinja");
    if (jinja) {
        json_object_set_new(derived, "jinja", json_string(jinja));
    } else {
        char *line = xasprintf("%s; the base's own template is used", why.text);
        json_array_append_new(lines, json_string(line));
        free(line);
    }
    free(jinja);
    return OK;
}

static int parameters_read(const struct server *s, const json_t *body, json_t *derived,
                           struct error *err) {
    json_t *v = json_get_nonnull(body, "parameters"), *all = json_object_get(derived, "parameters");
    struct generation_spec spec = {0};
    if (!v) return OK;
    if (!json_is_object(v)) return error_set(err, ERR_USAGE, "'parameters' must be an object");
    int rc = ollama_options_read(s, NULL, v, &spec, err);
    generation_spec_release(&spec);
    if (rc != OK) return rc;
    if (all)
        json_object_update(all, v);
    else
        json_object_set(derived, "parameters", v);
    return OK;
}

static int messages_read(const json_t *body, json_t *derived, struct error *err) {
    json_t *v = json_get_nonnull(body, "messages"), *m;
    size_t i;
    if (!v) return OK;
    bool valid = json_is_array(v);
    json_array_foreach (v, i, m) {
        const char *role = json_get_string(m, "role");
        valid &= json_is_string(json_object_get(m, "content")) &&
                 (strcmp(role, "system") == 0 || strcmp(role, "user") == 0 ||
                  strcmp(role, "assistant") == 0);
    }
    if (!valid)
        return error_set(err, ERR_USAGE,
                         "'messages' must be a list of {role: system, user or assistant, content}");
    json_object_set(derived, "messages", v);
    return OK;
}

static int texts_read(const json_t *body, json_t *derived, struct error *err) {
    static const char *const keys[] = {"system", "license"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        json_t *v = json_get_nonnull(body, keys[i]);
        if (v && !json_is_string(v) && !(i == 1 && json_is_string_array(v)))
            return error_set(err, ERR_USAGE, "'%s' must be a string", keys[i]);
        if (v) json_object_set(derived, keys[i], v);
    }
    return OK;
}

/* Merges the fields of the Modelfile into the request; the fields of the request take
 * precedence. */
static int body_merge_modelfile(json_t *body, struct error *err) {
    const char *text = NULL, *quantize = "";
    json_t *modelfile = json_object();
    int rc = json_read_string(body, "modelfile", &text, err);
    if (rc == OK && text) rc = ollama_modelfile(text, modelfile, err);
    if (rc == OK) json_object_update_missing(body, modelfile);
    if (rc == OK) rc = json_read_string(body, "quantize", &quantize, err);
    if (rc == OK && *quantize)
        rc = error_set(err, ERR_USAGE,
                       "'quantize' is not supported: this server does not change its base; see "
                       "'shoal quantize'");
    json_decref(modelfile);
    return rc;
}

/* Reads a request into a derived model, *out. Appends status lines to `lines`. */
static int derived_read(struct server *s, json_t *body, json_t *lines, json_t **out,
                        struct error *err) {
    const char *name = "", *from = NULL;
    *out = NULL;
    if (body_merge_modelfile(body, err) != OK || ollama_name(body, &name, err) != OK ||
        json_read_string(body, "from", &from, err) != OK || name_check_free(s, name, err) != OK)
        return err->code;
    if (!from || !*from)
        return error_set(err, ERR_USAGE,
                         "'from' must name a model of this server, such as its base '%s'; it "
                         "serves no other weights",
                         s->name);
    json_t *derived = *out = derived_spec_from(s, from, err);
    if (!derived) return err->code;
    char *untagged = name_without_tag(name);
    json_object_set_new(derived, "name", json_string(untagged));
    json_object_set_new(derived, "parent", json_string(from));
    free(untagged);
    if (adapters_read(body, derived, err) != OK || texts_read(body, derived, err) != OK ||
        template_read(s, body, derived, lines, err) != OK ||
        parameters_read(s, body, derived, err) != OK || messages_read(body, derived, err) != OK)
        return err->code;
    return OK;
}

static void layer_lines_add(const json_t *derived, json_t *lines) {
    const json_t *v;
    size_t i;
    json_array_foreach (json_object_get(derived, "adapters"), i, v) {
        const char *text = json_string_value(v);
        char *line = xasprintf("using existing layer %s", text ? text : "of several files");
        json_array_append_new(lines, json_string(line));
        free(line);
    }
}

/* Replies with the status lines after all work is done: creation is fast, and so an error can have
 * its HTTP status. */
static void statuses_reply(struct exchange *x, const json_t *lines, bool stream) {
    struct buf out = {0};
    const json_t *line;
    size_t i;
    if (!stream) {
        exchange_reply_json(x, 200, json_pack("{s:s}", "status", "success"));
        return;
    }
    json_array_foreach (lines, i, line) ndjson_add(NULL, json_pack("{s:O}", "status", line), &out);
    exchange_reply(x, 200, "application/x-ndjson", out.data, out.len);
    buf_release(&out);
}

void ollama_create_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    bool stream = true;
    json_t *lines = json_array(), *derived = NULL, *body = request_memory_json(ctx, x, &err);
    int rc = body ? json_read_bool(body, "stream", &stream, &err) : err.code;
    if (rc == OK) rc = derived_read(s, body, lines, &derived, &err);
    if (rc == OK) {
        layer_lines_add(derived, lines);
        rc = derived_save(s, json_incref(derived), &err);
    }
    json_array_append_new(lines, json_string("writing manifest"));
    json_array_append_new(lines, json_string("success"));
    if (rc == OK)
        statuses_reply(x, lines, stream);
    else
        api_fail_error(x, &err, NULL);
    json_decref(lines);
    json_decref(derived);
    json_decref(body);
}

void ollama_copy_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    const char *from = "", *to = "";
    json_t *derived = NULL, *body = request_memory_json(ctx, x, &err);
    int rc = body ? json_read_name(body, "source", &from, &err) : err.code;
    if (rc == OK) rc = json_read_name(body, "destination", &to, &err);
    if (rc == OK && (!*from || !*to))
        rc = error_set(&err, ERR_USAGE, "'source' and 'destination' must be given");
    if (rc == OK) rc = name_check_free(s, to, &err);
    if (rc == OK && !(derived = derived_spec_from(s, from, &err))) rc = err.code;
    if (rc == OK) {
        char *untagged = name_without_tag(to);
        json_object_set_new(derived, "name", json_string(untagged));
        if (!json_object_get(derived, "parent"))
            json_object_set_new(derived, "parent", json_string(from));
        free(untagged);
        rc = derived_save(s, json_incref(derived), &err);
    }
    if (rc == OK)
        exchange_reply(x, 200, NULL, "", 0);
    else
        api_fail_error(x, &err, NULL);
    json_decref(derived);
    json_decref(body);
}

static int model_delete(struct server *s, const char *name, struct error *err) {
    struct model_ref t;
    if (ollama_target(s, name, &t, err) != OK) return err->code;
    int rc = OK;
    char *path = derived_path(s, t.label);
    pthread_mutex_lock(&s->derived_lock);
    if (strcmp(t.label, "base") == 0 && t.n == 0)
        rc = error_set(err, ERR_USAGE, "'%s' is the base, which cannot be deleted", name);
    else
        rc = server_adapter_unload(s, t.label, err);
    if (rc == OK && unlink(path) != 0 && errno != ENOENT)
        rc = error_errno(err, "cannot delete '%s'", path);
    pthread_mutex_unlock(&s->derived_lock);
    model_ref_release(&t);
    free(path);
    return rc;
}

void ollama_delete_handle(void *ctx, struct exchange *x) {
    struct error err;
    const char *name = "";
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? ollama_name(body, &name, &err) : err.code;
    if (rc == OK) rc = model_delete(ctx, name, &err);
    if (rc == OK)
        exchange_reply(x, 200, NULL, "", 0);
    else
        api_fail_error(x, &err, NULL);
    json_decref(body);
}

/* in chats of OpenAI's form */

/* Puts the derived model's messages before those of the body. The derived model's system message
 * becomes the first one, unless either list begins with a system message. */
static void messages_apply(const json_t *derived, json_t *body) {
    json_t *model_messages = json_object_get(derived, "messages"),
           *system = json_object_get(derived, "system");
    json_t *chat_messages = json_object_get(body, "messages"), *all = json_array();
    const char *first = json_get_string(
        json_array_get(json_array_size(model_messages) ? model_messages : chat_messages, 0),
        "role");
    if (json_string_length(system) && strcmp(first, "system") != 0 &&
        strcmp(json_get_string(json_array_get(chat_messages, 0), "role"), "system") != 0)
        json_array_append_new(all, json_pack("{s:s,s:O}", "role", "system", "content", system));
    if (model_messages) json_array_extend(all, model_messages);
    json_array_extend(all, chat_messages);
    json_object_set_new(body, "messages", all);
}

/* Adds the derived model's parameters to the body, under OpenAI's or vLLM's names; fields of the
 * body take precedence. */
static void parameters_apply(const json_t *derived, json_t *body) {
    static const char *const names[][2] = {{"num_predict", "max_tokens"},
                                           {"repeat_penalty", "repetition_penalty"},
                                           {"num_keep", "n_keep"}};
    json_t *parameters = json_copy(json_object_get(derived, "parameters")), *v;
    if (!parameters) return;
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if ((v = json_object_get(parameters, names[i][0]))) {
            if (i > 0 || json_number_value(v) >= 1) json_object_set(parameters, names[i][1], v);
            json_object_del(parameters, names[i][0]);
        }
    if (json_get_nonnull(body, "max_completion_tokens")) json_object_del(parameters, "max_tokens");
    if (json_get_number(parameters, "seed") < 0) json_object_del(parameters, "seed");
    json_object_update_missing(body, parameters);
    json_decref(parameters);
}

void ollama_derived_apply(const json_t *derived, json_t *chat) {
    json_t *jinja = json_object_get(derived, "jinja");
    messages_apply(derived, chat);
    if (jinja && !json_get_nonnull(chat, "chat_template"))
        json_object_set(chat, "chat_template", jinja);
}

void derived_settings_apply(struct server *s, const struct model_ref *t, json_t *body) {
    json_t *derived = server_derived_spec(s, t->label);
    if (derived && json_is_array(json_get_nonnull(body, "messages")))
        ollama_derived_apply(derived, body);
    if (derived) parameters_apply(derived, body);
    json_decref(derived);
}
