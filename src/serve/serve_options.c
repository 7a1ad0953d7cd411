/* serve_options: the options of a server, for the command and the library. */
#define _GNU_SOURCE
#include "check/check.h"
#include "serve/reasoning.h"
#include "serve/serve.h"
#include "serve/server.h"
#include "sleep/sleep.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct serve_options, field), fallback, min, max, metavar, help }
const struct option_row serve_option_rows[] = {
    ROW("adapter", OPT_LIST, adapters, NULL, 0, 0, "NAME=DIR",
        "adapters to serve, each as a model of that name; also vLLM's {\"name\", \"path\"}; those "
        "of "
        "a further MODEL as MODEL:NAME=DIR"),
    ROW("adapter-dir", OPT_STRING, adapter_dir, NULL, 0, 0, "DIR",
        "serve every adapter in this folder, by the name of its folder"),
    ROW("team", OPT_LIST, teams, NULL, 0, 0, "NAME=FILE",
        "teams to serve (files of 'shoal debate --team'), each as a model team:NAME"),
    ROW("agent", OPT_LIST, agents, NULL, 0, 0, "NAME=FILE",
        "agents to serve (files of 'shoal agent --agent'), each as a model agent:NAME"),
    ROW("fallback", OPT_LIST, fallbacks, NULL, 0, 0, "NAME=FILE",
        "fallback chains, each for requests with the model NAME: models of this server, remote "
        "servers and a fixed reply, of which the first that can answers (docs/API.md)"),
    ROW("allow-tool", OPT_LIST, tools, NULL, 0, 0, "TOOL",
        "tools that agents may use although they execute code or use the network: python, sh, "
        "check_code, http_get, mcp (MCP servers); all clients that may chat can then use them"),
    ROW("router", OPT_STRING, router, NULL, 0, 0, "METHOD",
        "how the model 'auto' chooses an adapter for a prompt: similarity (to what each was "
        "trained on), likelihood (a prefill under each), a router file of 'shoal team fit', or "
        "none (default: with two adapters or more, similarity if all have a profile, which "
        "training stores, else likelihood)"),
    ROW("knowledge", OPT_STRING, knowledge, NULL, 0, 0, "DB",
        "knowledge base (of 'shoal knowledge') that clients may search"),
    ROW("memory", OPT_STRING, memory, NULL, 0, 0, "DB",
        "store of long-term memories (of 'shoal memory'): what users state about themselves in "
        "stored conversations is remembered, for each API key apart"),
    ROW("sleep-at", OPT_STRING, sleep_at, NULL, 0, 0, "HH:MM",
        "local time at which a job turns the memories of each key into weights ('shoal sleep')"),
    ROW("sleep-rehearse", OPT_STRING, sleep_rehearse, NULL, 0, 0, "LIST",
        "tasks that these jobs also learn and must not make worse ('shoal sleep --rehearse')"),
    ROW("state", OPT_STRING, state_dir, "runs/serve", 0, 0, "DIR",
        "folder of the server's state: keys, jobs, uploaded files, derived models …"),
    ROW("runs", OPT_STRING, runs, "runs", 0, 0, "DIR",
        "folder of runs: those of jobs, and those that the web page shows"),
    ROW("backups", OPT_STRING, backups, NULL, 0, 0, "DIR",
        "folder of the backups of --state, --runs and --adapter-dir (default: 'backups' next to "
        "--state)"),
    ROW("model-dir", OPT_STRING, model_dir, NULL, 0, 0, "DIR",
        "load the models in this folder when requests name them, like further MODELs"),
    ROW("keep-alive", OPT_STRING, keep_alive, "5m", 0, 0, "TIME",
        "how long such a model remains loaded after its last request: seconds, or 5m, 1h30m (0: "
        "not at all, -1: until its memory is needed)"),
    ROW("load-seconds", OPT_FLOAT, load_seconds, "300", 0, 1e6, "S",
        "how long a request waits until its model is loaded"),
    ROW("slow-seconds", OPT_FLOAT, slow_seconds, "30", 0, 1e9, "S",
        "log replies that take longer, with the time of each stage"),
    ROW("api-key", OPT_SECRETS, api_keys, NULL, 0, 0, "SECRET",
        "key with all scopes, in addition to those of 'shoal key'; also from $SHOAL_API_KEY; other "
        "users can see a command line (ps): prefer --api-key-file"),
    ROW("api-key-file", OPT_STRING, api_key_file, NULL, 0, 0, "FILE",
        "file of such keys, one per line; '#' begins a comment"),
    ROW("max-concurrent", OPT_INT, max_concurrent, "512", 0, 1e6, "N",
        "maximum concurrent requests of a key, and of an address other than this machine (0: no "
        "limit)"),
    ROW("auth", OPT_BOOL, auth, "true", 0, 0, NULL,
        "without keys, accept requests from this machine only; --no-auth: other machines may chat"),
    ROW("trust-request-chat-template", OPT_BOOL, trust_template, "false", 0, 0, NULL,
        "allow 'chat_template' in requests"),
    ROW("allow-check", OPT_LIST, checks, NULL, 0, 0, "CHECK",
        "checks that the field 'check' of a request may name in addition to calculator, regex and "
        "question, such as tests or json-schema:FILE; they open files or run programs"),
    ROW("feedback", OPT_BOOL, feedback, "true", 0, 0, NULL,
        "keep the last replies for ratings; --no-feedback: keep no text"),
    ROW("max-feedback", OPT_STRING, max_feedback, "1G", 0, 0, "SIZE",
        "maximum size of the file of ratings and experiments; a key may write 1/16 of it per day"),
    ROW("served-model-name", OPT_LIST, names, NULL, 0, 0, "NAME",
        "additional model names of the base"),
    ROW("max-waiting", OPT_INT, max_waiting, "2048", 1, 1e6, "N",
        "maximum waiting requests; further requests get status 503"),
    ROW("max-step-ms", OPT_FLOAT, max_step_ms, "200", 0, 1e6, "MS",
        "goal for the time between two tokens of a reply while other prompts are computed; 0: "
        "none"),
    ROW("max-request-memory", OPT_STRING, max_request_memory, NULL, 0, 0, "SIZE",
        "memory of all running requests, such as 64M or 1G; beyond it requests get status 503 "
        "(default: 512M, or 1/8 of --max-memory)"),
    ROW("max-jobs", OPT_INT, max_jobs, "1", 1, 64, "N", "maximum concurrent jobs"),
    ROW("jobs-idle", OPT_BOOL, jobs_idle, "true", 0, 0, NULL,
        "run jobs only while no other program needs the processor; --no-jobs-idle: with normal "
        "priority"),
    ROW("jobs-read", OPT_LIST, jobs_read, NULL, 0, 0, "DIR",
        "folders that jobs may read, in addition to the working folder, the served models and "
        "adapters, --runs, results, and what 'shoal pull' has downloaded"),
    ROW("jobs-run-commands", OPT_BOOL, jobs_run_commands, NULL, 0, 0, NULL,
        "allow reward commands in jobs; they run in a sandbox, but landlock does not confine the "
        "jobs themselves"),
    ROW("job-seconds", OPT_FLOAT, job_seconds, "604800", 0, 1e9, "S",
        "maximum seconds of a job, without pauses; a resumed job continues from its saved state "
        "(0: no limit)"),
    ROW("train-share", OPT_FLOAT, train_share, "0.1", 0, 1, "X",
        "while requests are computed, the share of the time in which a training in the server's "
        "process (a job with 'in_process') computes, too"),
    ROW("train-memory", OPT_STRING, train_memory, NULL, 0, 0, "SIZE",
        "memory for such a training, such as 500M; needed with --max-memory, which includes it "
        "(default: the available memory)"),
    ROW("jobs-bytes", OPT_INT, jobs_bytes, "68719476736", 0, 1e18, "BYTES",
        "maximum bytes of all files of jobs; a key may have half of it (0: no limit)"),
    ROW("max-tokens", OPT_INT, max_tokens, "1024", 1, 1e6, "N",
        "default maximum tokens of a reply"),
    ROW("loop-tokens", OPT_INT, loop_tokens, "256", 0, 1e6, "N",
        "end a reply whose last N or more tokens repeat a cycle at least four times (0: never); "
        "requests set it with 'loop_tokens'"),
    ROW("context-shift", OPT_BOOL, context_shift, "false", 0, 0, NULL,
        "when a reply reaches the end of the context, drop half of its tokens, the oldest first, "
        "and continue, up to ten contexts; requests set it with 'context_shift'"),
    ROW("keep", OPT_INT, n_keep, "0", -1, 1e9, "N",
        "tokens at the beginning of a prompt, in addition to BOS, that a context shift keeps (-1: "
        "the whole prompt); requests set it with 'n_keep'"),
    ROW("reasoning-parser", OPT_STRING, reasoning_parser, "auto", 0, 0, "NAME",
        "tags of the reasoning in replies: think, mistral, command_a, seed_oss, reasoning, "
        "thought, thinking; auto: those of the chat template; none: it remains content"),
    ROW("alert-webhook", OPT_LIST, alert_webhooks, NULL, 0, 0, "URL",
        "URLs that receive alerts, in Alertmanager's format"),
    ROW("alert-slack", OPT_SECRETS, alert_slacks, NULL, 0, 0, "URL",
        "Slack webhooks that receive alerts; also from $SHOAL_ALERT_SLACK"),
    ROW("alert-seconds", OPT_FLOAT, alert_seconds, "15", 0, 3600, "S",
        "seconds between two checks of the alerts (0: never)"),
    {0},
};
#undef ROW

/* Sets the memory of requests (input, output, grammars, replies that can be rated). */
static int request_memory_init(struct serve_options *o, struct error *err) {
    enum { MIN_BYTES = SERVE_MIN_REQUEST_MEMORY, DEFAULT_BYTES = 512 << 20 };
    size_t all = o->max_memory ? o->max_memory : memory_usable(),
           most = MIN(MAX(all / 8, (size_t)MIN_BYTES), (size_t)DEFAULT_BYTES);
    if (o->max_request_memory && size_parse(o->max_request_memory, &most, err) != OK)
        return error_wrap(err, "--max-request-memory");
    if (most < MIN_BYTES)
        return error_set(err, ERR_USAGE, "--max-request-memory must be at least %dM",
                         MIN_BYTES >> 20);
    o->request_memory = (int64_t)most;
    if (most == DEFAULT_BYTES && !o->max_memory && !o->max_request_memory) return OK;
    o->http.max_held = (int64_t)most / 4; // the buffer of a growing body may be twice its size
    o->http.max_body = MIN(o->http.max_body, o->http.max_held);
    return OK;
}

/* Opens each allowed check once, so that a missing file or sandbox is found at the start. */
static int allowed_checks_try(const struct strings *specs, struct error *err) {
    const struct check_options o = {.sandbox = true};
    for (int i = 0; i < specs->n; i++) {
        struct check *c = check_open_filter(specs->v[i], &o, err);
        if (!c) return error_wrap(err, "--allow-check");
        check_free(c);
    }
    return OK;
}

static int sleep_options_read(struct serve_options *o, struct error *err) {
    if (!o->sleep_at) return OK;
    if (!o->memory)
        return error_set(err, ERR_USAGE,
                         "--sleep-at requires --memory DB, whose memories it learns");
    int rc = sleep_time_parse(o->sleep_at, &o->sleep_minute, err);
    return rc == OK ? OK : error_wrap(err, "--sleep-at");
}

int serve_options_check(struct serve_options *o, struct error *err) {
    size_t feedback = 0;
    int rc = http_options_check(&o->http, err);
    if (rc == OK) rc = http_tls_check(&o->http, err);
    if (rc == OK) rc = request_memory_init(o, err);
    if (rc == OK) rc = allowed_checks_try(&o->checks, err);
    if (rc == OK) rc = reasoning_parser_check(o->reasoning_parser, err);
    if (rc == OK) rc = sleep_options_read(o, err);
    if (rc == OK && size_parse(o->max_feedback, &feedback, err) != OK)
        rc = error_wrap(err, "--max-feedback");
    o->feedback_bytes = (int64_t)feedback;
    o->train_memory_bytes = 0;
    if (rc == OK && o->train_memory &&
        size_parse(o->train_memory, &o->train_memory_bytes, err) != OK)
        rc = error_wrap(err, "--train-memory");
    if (rc == OK && !keep_alive_parse(o->keep_alive, &o->keep_alive_seconds))
        rc = error_set(err, ERR_USAGE,
                       "--keep-alive '%s' must be seconds or a duration such as 5m, 1h30m or -1",
                       o->keep_alive);
    return rc;
}

/* The unit of time that a text begins with, in seconds, and its length; 0: no unit. */
static double unit_read(const char *p, size_t *len) {
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"ns", 1e-9}, {"us", 1e-6}, {"µs", 1e-6}, {"ms", 1e-3}, // "ms" before "m"
                 {"s", 1},     {"m", 60},    {"h", 3600}};
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        *len = strlen(units[i].name);
        if (strncmp(p, units[i].name, *len) == 0) return units[i].seconds;
    }
    return 0;
}

bool keep_alive_parse(const char *text, double *seconds) {
    static const char digits[] = "0123456789.";
    bool negative = *text == '-';
    const char *p = text + (negative || *text == '+'), *begin = p;
    bool plain = *p && p[strspn(p, digits)] == 0;
    double all = 0;
    do {
        char *end;
        size_t len = 0;
        if (!strchr(digits, *p) || !*p) return false; // strtod also reads names such as "inf"
        double v = strtod(p, &end), unit = plain ? 1 : unit_read(end, &len);
        bool number = end > p && end <= p + strspn(p, digits); // not 0x1 or 1e3
        if (!number || unit <= 0 || (plain && p != begin)) return false;
        all += v * unit;
        p = end + len;
    } while (*p);
    *seconds = negative && all > 0 ? -1 : all;
    return isfinite(all);
}

int serve_adapter_base(const struct serve_options *o, const char *adapter) {
    struct error ignored; // serve_start reports it
    json_t *v = *adapter == '{' ? json_parse(adapter, strlen(adapter), "adapter", &ignored) : NULL;
    const char *base = json_get_string(v, "base_model_name");
    int found = -1;
    for (int i = 0; i < o->bases.n && found < 0; i++) {
        char *name = model_name_from_path(o->bases.v[i]);
        size_t n = strlen(name);
        bool prefix = strncmp(adapter, name, n) == 0 && adapter[n] == ':' && strchr(adapter, '=');
        if (v ? strcmp(base, name) == 0 : prefix) found = i;
        free(name);
    }
    json_decref(v);
    return found;
}

/* models in a folder */

struct model_scan {
    struct serve_options *o;
    const char *first; /* the path of the default base */
    enum numeric_class cls;
};

/* Whether another model has this name; *same: it is this model. */
static bool model_is_listed(const struct model_scan *m, const char *path, bool *same) {
    char *name = model_name_from_path(path);
    bool listed = false;
    *same = false;
    for (int i = -1; i < m->o->bases.n && !listed; i++) {
        const char *other = i < 0 ? m->first : m->o->bases.v[i];
        char *other_name = model_name_from_path(other);
        *same = strcmp(other, path) == 0;
        listed = *same || strcmp(other_name, name) == 0;
        free(other_name);
    }
    free(name);
    return listed;
}

static void model_add(struct model_scan *m, const char *path) {
    struct model_size size;
    struct error err;
    bool same;
    if (model_is_listed(m, path, &same)) {
        if (!same) log_warn("'%s' is not served: another model has its name", path);
    } else if (model_measure(path, m->cls, &size, &err) != OK) {
        log_warn("'%s' is not served: %s", path, err.text);
    } else {
        strings_add(&m->o->bases, path);
    }
}

static bool dir_has(const char *dir, const char *file) {
    char *path = path_join(dir, file);
    bool has = path_exists(path);
    free(path);
    return has;
}

static int dir_scan(struct model_scan *m, const char *dir, int depth, struct error *err) {
    struct dirent **list;
    int n = scandir(dir, &list, NULL, alphasort);
    if (n < 0) return error_errno(err, "cannot read the folder '%s'", dir);
    for (int i = 0; i < n; i++) {
        struct error ignored;
        char *path = path_join(dir, list[i]->d_name);
        if (*list[i]->d_name == '.') {
            // hidden, or the folder itself
        } else if (path_is_dir(path) && dir_has(path, "config.json")) {
            model_add(m, path);
        } else if (path_is_dir(path)) {
            if (depth > 1) dir_scan(m, path, depth - 1, &ignored);
        } else if (path_has_extension(path, ".gguf")) {
            model_add(m, path);
        }
        free(path);
        free(list[i]);
    }
    free(list);
    return OK;
}

int serve_options_add_models(struct serve_options *o, const char *path, enum numeric_class cls,
                             struct error *err) {
    enum { MAX_DEPTH = 3 }; // 'shoal pull' stores OWNER/REPO/FILE
    struct model_scan m = {o, path, cls};
    if (!o->model_dir) return OK;
    char *dir = realpath(o->model_dir, NULL);
    int rc = dir ? dir_scan(&m, dir, MAX_DEPTH, err)
                 : error_errno(err, "cannot read the folder '%s'", o->model_dir);
    free(dir);
    return rc == OK ? OK : error_wrap(err, "--model-dir");
}
