/* serve_command: the rows of the options, the memory plan, and the start of the server. */
#define _GNU_SOURCE
#include "cli/serve_command.h"
#include "agent/agent.h"
#include "api/api.h"
#include "cli/settings.h"
#include "hub/hub.h"
#include "jobs/jobs.h"
#include "swarm/swarm.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct serve_command, field), fallback, min, max, metavar, help }
#define ALIAS(name, of)                                                                            \
    { name, OPT_ALIAS, 0, of, 0, 0, NULL, NULL }
const struct option_row serve_command_rows[] = {
    ROW("enable-lora", OPT_BOOL, vllm.enabled, "true", 0, 0, NULL,
        "option of vLLM; no effect here, like the next four"),
    ROW("max-loras", OPT_INT, vllm.loras, "0", 0, 1e9, "N", ""),
    ROW("max-lora-rank", OPT_INT, vllm.rank, "0", 0, 1e9, "N", ""),
    ROW("max-cpu-loras", OPT_INT, vllm.cpu, "0", 0, 1e9, "N", ""),
    ROW("tensor-parallel-size", OPT_INT, vllm.tensor_parallel, "1", 1, 1e6, "N", ""),
    ALIAS("lora-modules", "adapter"),
    ALIAS("reasoning-format", "reasoning-parser"),
    SETUP_ROWS(struct serve_command, setup),
    SERVER_CLUSTER_ROWS(struct serve_command, setup.cluster),
    {0},
};
#undef ROW

/* Raises the limit of open files to the maximum: each client is a file descriptor, and the usual
 * limit is 1024. */
static void open_files_limit_raise(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
    r.rlim_cur = r.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &r) != 0) log_warn("at most %d files at once", (int)r.rlim_cur);
}

/* The path of an adapter in vLLM's form {"name", "path"}. */
static void add_path_of_json(struct strings *paths, const char *text) {
    struct error ignored; // serve_start reports it
    json_t *v = json_parse(text, strlen(text), "adapter", &ignored);
    const char *path = json_get_string(v, "path");
    if (path) strings_add(paths, path);
    json_decref(v);
}

/* Adds the adapters of a folder. Broken ones are not planned: only requests for them fail. */
static void add_paths_of_dir(struct strings *paths, const char *dir) {
    struct error ignored;
    DIR *d = opendir(dir);
    for (const struct dirent *f; d && (f = readdir(d));) {
        struct adapter_size size = {0};
        char *path = path_join(dir, f->d_name);
        if (f->d_name[0] != '.' && adapter_exists(path) &&
            adapter_measure(path, DTYPE_F32, &size, &ignored) == OK)
            strings_add(paths, path);
        free(path);
    }
    if (d) closedir(d);
}

/* The paths of all adapters that the pool of a base may load, for the memory plan. base: an index
 * in o->bases, or -1. */
static struct strings adapter_paths(const struct serve_options *o, int base) {
    struct strings paths = {0};
    for (int i = 0; i < o->adapters.n; i++) {
        const char *spec = o->adapters.v[i], *equals = strchr(spec, '=');
        if (serve_adapter_base(o, spec) != base) continue;
        if (*spec == '{')
            add_path_of_json(&paths, spec);
        else
            strings_add(&paths, equals ? equals + 1 : spec);
    }
    if (o->adapter_dir && base < 0) add_paths_of_dir(&paths, o->adapter_dir);
    return paths;
}

static void team_measure(const char *path, enum dtype elem, struct adapter_size *sum) {
    struct error ignored; // serve_start reports it
    struct team t = {0};
    int rc = team_read(&t, path, &ignored);
    for (int i = 0; rc == OK && i < t.adapters.n; i++)
        if (strcmp(t.adapters.v[i], "base") != 0)
            adapter_measure(t.adapters.v[i], elem, sum, &ignored);
    team_release(&t);
}

static void agent_measure(const char *path, enum dtype elem, struct adapter_size *sum) {
    struct error ignored;
    struct agent_settings a;
    struct adapter_mix mix;
    if (agent_settings_read(&a, path, &ignored) != OK) return;
    int rc = adapter_mix_parse(&mix, a.adapter, &ignored);
    for (int i = 0; rc == OK && i < mix.paths.n; i++)
        adapter_measure(mix.paths.v[i], elem, sum, &ignored);
    if (a.team) team_measure(a.team, elem, sum);
    adapter_mix_release(&mix);
    options_release(agent_setting_rows, &a);
}

/* Bytes of the adapters of teams and agents, which are always in memory. */
static size_t kept_adapter_bytes(const struct serve_options *o, enum dtype elem) {
    struct adapter_size sum = {0};
    for (int i = 0; i < o->teams.n + o->agents.n; i++) {
        bool team = i < o->teams.n;
        const char *text = team ? o->teams.v[i] : o->agents.v[i - o->teams.n],
                   *equals = strchr(text, '=');
        (team ? team_measure : agent_measure)(equals ? equals + 1 : text, elem, &sum);
    }
    return sum.resident + sum.while_loading;
}

static size_t request_bytes(const struct serve_options *so) {
    return (size_t)so->request_memory + 2 * (size_t)so->http.max_held;
}

/* models that are loaded on demand */

/* The absolute path of a model; NULL: it was not pulled. */
static char *model_path(const char *name, struct error *err) {
    char *found = cli_find_file(name),
         *path = hub_is_name(found) ? hub_cached_path(found, err) : path_absolute(found);
    free(found);
    return path;
}

/* Lists the models after the first one, and those of --model-dir. */
static int on_demand_list(const struct cli_options *c, const struct strings *models,
                          struct serve_options *so, struct error *err) {
    for (int i = 1; i < models->n; i++) {
        char *path = model_path(models->v[i], err);
        if (!path) return err->code;
        strings_add(&so->bases, path);
        free(path);
    }
    if (!so->model_dir) return OK;
    char *first = model_path(models->v[0], err);
    int rc = first ? serve_options_add_models(so, first, cli_numeric_class(c), err) : err->code;
    free(first);
    return rc;
}

/* Bytes of the largest of the smallest memory plans of these models, which must fit next to the
 * first model. --dry-run: prints the sizes of all of them. */
static int on_demand_measure(const struct cli_options *c, const struct serve_command *o,
                             const struct serve_options *so, size_t *largest, struct error *err) {
    for (int i = 0; i < so->bases.n && (so->max_memory || o->setup.dry_run); i++) {
        struct strings paths = adapter_paths(so, i);
        struct setup_needs w = {.engine = so->base_engine, .adapters = &paths, .pooled = true};
        size_t least, most;
        int rc = setup_memory_bounds(c, &o->setup, so->bases.v[i], &w, &least, &most, err);
        strings_release(&paths);
        if (rc != OK) return error_wrap(err, "model '%s'", so->bases.v[i]);
        if (o->setup.dry_run && !c->json)
            log_message("'%s': %.1f to %.1f MB while it is loaded", so->bases.v[i],
                        (double)least / (1 << 20), (double)most / (1 << 20));
        *largest = MAX(*largest, least);
    }
    return OK;
}

/* Sets the share of the first model in --max-memory: as much as each other model has, at least its
 * smallest plan, and so much that the largest other model fits next to it. */
static int first_model_limit(const struct cli_options *c, const struct serve_command *o,
                             const char *model, const struct serve_options *so, size_t largest,
                             struct setup_needs *w, struct error *err) {
    size_t least, most, limit = so->max_memory;
    if (!limit || !so->bases.n) return OK;
    if (setup_memory_bounds(c, &o->setup, model, w, &least, &most, err) != OK) return err->code;
    if (least + largest > limit)
        return error_set(err, ERR_MEMORY,
                         "a limit of '%.1f MB' is too small: '%s' needs %.1f MB, and the largest "
                         "other model %.1f MB; raise --max-memory to %.0fM or use smaller models",
                         (double)limit / (1 << 20), model, (double)least / (1 << 20),
                         (double)largest / (1 << 20), (double)(least + largest) / (1 << 20) + 1);
    w->limit = MIN(MAX(least, limit / (size_t)(so->bases.n + 1)), limit - largest);
    return OK;
}

/* Lowers the default memory of requests to its minimum if the smallest plan does not fit next to
 * `others` bytes otherwise. */
static int request_memory_fit(const struct cli_options *c, const struct serve_command *o,
                              const char *model, size_t others, struct serve_options *so,
                              struct setup_needs *w, struct error *err) {
    static char smallest[24];
    size_t min_bytes, max_bytes;
    if (!so->max_memory || so->max_request_memory) return OK;
    if (setup_memory_bounds(c, &o->setup, model, w, &min_bytes, &max_bytes, err) != OK)
        return err->code;
    if (min_bytes + others <= so->max_memory) return OK;
    snprintf(smallest, sizeof smallest, "%dM", SERVE_MIN_REQUEST_MEMORY >> 20);
    so->max_request_memory = smallest;
    int rc = serve_options_check(so, err);
    w->requests = request_bytes(so);
    return rc;
}

/* The commands that may be jobs, from the command table. */
static const struct job_kind *job_kinds(void) {
    static struct job_kind kinds[16];
    const struct cli_command *c;
    size_t n = 0;
    for (int i = 0; (c = cli_command_at(i)); i++) {
        if (!c->job_args) continue;
        CHECK(n + 1 < ARRAY_LEN(kinds));
        struct job_kind *k = &kinds[n++];
        *k = (struct job_kind){.name = c->name,
                               .resume = c->job_resume,
                               .store_option = c->job_store_option,
                               .args = c->job_args};
        k->rows = settings_job_rows(c);
    }
    return kinds;
}

int serve_command_run(const struct cli_options *c, const struct serve_command *o,
                      const struct strings *args, struct error *err) {
    struct serve_options so = o->serve;
    struct setup s = {.c = c};
    struct strings paths;
    enum dtype elem;
    size_t others = 0;
    enum { DEFAULT_SEQS = 64 };
    int32_t seqs = o->setup.limits.max_seqs ? (int32_t)o->setup.limits.max_seqs : DEFAULT_SEQS;
    struct setup_needs w = {.adapters = &paths,
                            .pooled = true,
                            .engine = {.max_rows = ENGINE_DEFAULT_ROWS,
                                       .max_seqs = seqs,
                                       .max_out = MAX(seqs, DEFAULT_SEQS)}};
    if (o->vllm.tensor_parallel > 1)
        log_info("--tensor-parallel-size: one process computes; --threads N limits its threads");
    open_files_limit_raise();
    int rc = o->setup.max_memory ? size_parse(o->setup.max_memory, &so.max_memory, err) : OK;
    if (rc == OK) rc = serve_options_check(&so, err);
    if (rc == OK) rc = dtype_parse(o->setup.lora, &elem, err);
    if (rc != OK) return rc;
    w.requests = request_bytes(&so);
    w.work = kept_adapter_bytes(&so, elem) + so.train_memory_bytes;
    so.base_engine = w.engine;
    so.base_engine.max_len = (int32_t)o->setup.limits.max_len;
    so.base_engine.lora_elem = elem;
    rc = kv_cache_dtype_parse(o->setup.kv, cli_numeric_class(c), &so.base_engine.kv_elem, err);
    if (rc == OK) rc = on_demand_list(c, args, &so, err);
    paths = adapter_paths(&so, -1);
    if (rc == OK) rc = on_demand_measure(c, o, &so, &others, err);
    if (rc == OK) rc = request_memory_fit(c, o, args->v[0], others, &so, &w, err);
    if (rc == OK) rc = first_model_limit(c, o, args->v[0], &so, others, &w, err);
    if (rc == OK) rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
    s.streams = true;
    if (rc == OK && !o->setup.dry_run) rc = setup_engine(&s, err);
    so.cluster = s.cluster;
    s.limit = so.max_memory; // setup_close compares it with the peak of all models
    so.plan = &s.plan;
    so.find = cli_find_file;
    so.modules = api_modules;
    so.job_kinds = job_kinds();
    so.train = train_in_server;
    if (settings_path(c->config)) strings_add(&so.jobs_closed, settings_path(c->config));
    if (so.api_key_file) strings_add(&so.jobs_closed, so.api_key_file);
    if (rc == OK && !o->setup.dry_run) rc = serve_run(s.m, s.e, &s.engine, s.path, &so, err);
    strings_release(&so.jobs_closed);
    strings_release(&so.bases);
    strings_release(&paths);
    return setup_close(&s, rc, err);
}
