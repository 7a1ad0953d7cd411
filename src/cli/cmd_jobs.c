/*
 * cmd_jobs: `shoal jobs list|show|follow|results|log|submit|pause|resume|cancel|delete`: the jobs
 * of a running server, through its API.
 *
 * The server of this machine is asked with the start-up token of its state folder, others with an
 * API key of the scope jobs. Texts of a server are printed without control characters.
 */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_KEY_BYTES = 4096 };
#define MAX_REPLY_BYTES ((size_t)256 << 20) /* the results of a job are one reply */
#define SECONDS 60.0
#define ID_CHARACTERS "abcdefghijklmnopqrstuvwxyz0123456789-"

struct options {
    char *server, *state_dir, *api_key_file, *state;
};
#define ROW(name, type, field, fallback, metavar, help)                                            \
    { name, type, offsetof(struct options, field), fallback, 0, 0, metavar, help }
static const struct option_row rows[] = {
    ROW("server", OPT_STRING, server, "http://127.0.0.1:8000", "URL", "address of the server"),
    ROW("state", OPT_STRING, state_dir, "runs/serve", "DIR",
        "state folder of a server of this machine, whose start-up token is used"),
    ROW("api-key-file", OPT_STRING, api_key_file, NULL, "FILE",
        "file with an API key of the scope jobs, instead of the token"),
    ROW("job-state", OPT_STRING, state, NULL, "STATE",
        "list: only jobs of this state: queued, running, paused, done, failed, cancelled"),
    {0},
};
#undef ROW

struct command {
    const struct cli_options *c;
    const struct options *o;
    struct strings headers; /* with the key */
    const char *arg;        /* the argument after the verb; NULL: none */
};

/* requests */

static int headers_init(struct command *m, struct error *err) {
    struct buf text = {0};
    char *token = path_join(m->o->state_dir, "token");
    const char *path = m->o->api_key_file ? m->o->api_key_file : token;
    int rc = file_read(path, MAX_KEY_BYTES, &text, err);
    if (rc == OK) {
        char *header = xasprintf("Authorization: Bearer %.*s",
                                 (int)strcspn(text.data ? text.data : "", "\r\n"), text.data);
        strings_add(&m->headers, header);
        free(header);
    } else if (rc == ERR_MISSING && !m->o->api_key_file) {
        rc = error_set(err, ERR_MISSING,
                       "no server of this machine has the state folder '%s'; name it with --state, "
                       "or the key of another server with --api-key-file",
                       m->o->state_dir);
    }
    buf_release(&text);
    free(token);
    return rc;
}

/* The error of a reply that has failed. */
static int reply_error(const struct http_response *r, struct error *err) {
    struct error ignored;
    json_t *v = json_parse(r->body.data ? r->body.data : "", r->body.len, "the reply", &ignored);
    const char *why = json_get_string(json_object_get(v, "error"), "message");
    struct buf clean = {0};
    buf_add_sanitized(&clean, why, strlen(why));
    error_set(err, r->status == 404 ? ERR_MISSING : ERR_STATE,
              "the server replies with status %d%s%s", r->status, clean.len ? ": " : "",
              clean.len ? clean.data : "");
    buf_release(&clean);
    json_decref(v);
    return err->code;
}

static struct http_request request_to(const struct command *m, const char *method,
                                      const char *url) {
    return (struct http_request){.method = method,
                                 .url = url,
                                 .headers = &m->headers,
                                 .max_body = MAX_REPLY_BYTES,
                                 .seconds = SECONDS};
}

/* The address of /v1/jobs with `path` behind it; malloc'ed. */
static char *url_make(const struct command *m, const char *path) {
    size_t n = strlen(m->o->server);
    while (n > 0 && m->o->server[n - 1] == '/') n--;
    return xasprintf("%.*s/v1/jobs%s", (int)n, m->o->server, path);
}

static int server_ask(const struct command *m, const char *method, const char *path,
                      const char *body, struct buf *out, struct error *err) {
    struct http_response r;
    char *url = url_make(m, path);
    struct http_request q = request_to(m, method, url);
    q.body = body;
    q.body_len = body ? strlen(body) : 0;
    int rc = http_request(&q, &r, err);
    if (rc == OK && r.status / 100 != 2) rc = reply_error(&r, err);
    if (rc == OK && r.body.len) buf_add(out, r.body.data, r.body.len);
    http_response_release(&r);
    free(url);
    return rc;
}

/* The JSON of a reply; NULL: `err` is set. */
static json_t *server_json(const struct command *m, const char *method, const char *path,
                           const char *body, struct error *err) {
    struct buf text = {0};
    json_t *v = NULL;
    if (server_ask(m, method, path, body, &text, err) == OK)
        v = json_parse(text.data ? text.data : "", text.len, "the reply", err);
    buf_release(&text);
    return v;
}

/* printing */

/* "training 40 of 200", or why the job failed. */
static void status_print(const json_t *job) {
    const json_t *p = json_object_get(job, "progress");
    const char *note = json_get_string(job, "note");
    if (*note) {
        cli_print_text(note);
    } else if (p) {
        cli_print_text(json_get_string(p, "title"));
        printf(" %.0f of %.0f", json_get_number(p, "done"), json_get_number(p, "total"));
    }
}

static void job_print(const json_t *job) {
    printf("%-14s%-10s%-11s%9.0f%9.0f  %-21s  ", json_get_string(job, "id"),
           json_get_string(job, "kind"), json_get_string(job, "state"),
           json_get_number(job, "priority"), json_get_number(job, "attempts"),
           json_get_string(job, "created"));
    status_print(job);
    putchar('\n');
}

/* Prints a job and releases it; NULL: `err` is set. */
static int job_show(const struct command *m, json_t *job, struct error *err) {
    if (!job) return err->code;
    if (m->c->json)
        cli_print_json(job);
    else
        job_print(job), json_decref(job);
    return OK;
}

/* verbs */

static int list(const struct command *m, struct error *err) {
    char *path = m->o->state ? xasprintf("?state=%s", m->o->state) : xstrdup("");
    json_t *v = server_json(m, "GET", path, NULL, err), *jobs = json_object_get(v, "jobs"), *job;
    size_t i;
    free(path);
    if (!v) return err->code;
    if (json_array_size(jobs) == 0) log_info("no jobs");
    if (!m->c->json && json_array_size(jobs))
        printf("%-14s%-10s%-11s%9s%9s  %-21s\n", "id", "kind", "state", "priority", "attempts",
               "submitted");
    json_array_foreach (jobs, i, job) {
        if (m->c->json)
            cli_print_json(json_incref(job));
        else
            job_print(job);
    }
    json_decref(v);
    return OK;
}

/* Sends a request for the job of the argument. */
static json_t *job_ask(const struct command *m, const char *method, const char *operation,
                       struct error *err) {
    char *path = xasprintf("/%s%s", m->arg, operation);
    json_t *v = server_json(m, method, path, NULL, err);
    free(path);
    return v;
}

static int show(const struct command *m, struct error *err) {
    return job_show(m, job_ask(m, "GET", "", err), err);
}

static int pause_job(const struct command *m, struct error *err) {
    return job_show(m, job_ask(m, "POST", "/pause", err), err);
}

static int resume(const struct command *m, struct error *err) {
    return job_show(m, job_ask(m, "POST", "/resume", err), err);
}

static int cancel(const struct command *m, struct error *err) {
    return job_show(m, job_ask(m, "POST", "/cancel", err), err);
}

static int delete_job(const struct command *m, struct error *err) {
    json_t *v = job_ask(m, "DELETE", "", err);
    json_decref(v);
    if (!v) return err->code;
    log_info("job '%s' is deleted", m->arg);
    return OK;
}

/* The output of a job, as the server has stored it. */
static int output_print(const struct command *m, const char *name, struct error *err) {
    struct buf text = {0};
    char *path = xasprintf("/%s/%s", m->arg, name);
    int rc = server_ask(m, "GET", path, NULL, &text, err);
    for (size_t at = 0; rc == OK && at < text.len;) {
        char *line = text.data + at, *end = memchr(line, '\n', text.len - at);
        if (end) *end = '\0';
        cli_print_text(line);
        putchar('\n');
        at += strlen(line) + 1;
    }
    buf_release(&text);
    free(path);
    return rc;
}

static int results(const struct command *m, struct error *err) {
    return output_print(m, "results", err);
}

static int log_print(const struct command *m, struct error *err) {
    return output_print(m, "log", err);
}

static int submit(const struct command *m, struct error *err) {
    struct buf text = {0};
    int rc = file_read(m->arg, 1 << 20, &text, err);
    json_t *v = rc == OK ? json_parse(text.data ? text.data : "", text.len, m->arg, err) : NULL;
    json_decref(v); // the server says what is wrong with its keys
    if (v) rc = job_show(m, server_json(m, "POST", "", text.data, err), err);
    buf_release(&text);
    return v ? rc : err->code;
}

/* follow */

struct follower {
    const struct command *m;
    struct event_stream events;
    int rc;
    struct error *err;
};

static int event_print(void *ctx, const char *text, size_t len, struct error *err) {
    const struct follower *f = ctx;
    json_t *v = json_parse(text, len, "an event", err);
    if (!v) return err->code;
    const char *type = json_get_string(v, "type");
    if (!*type || f->m->c->json) { // the event of the end has no type
        if (*type) cli_print_json(json_incref(v));
        json_decref(v);
        return OK;
    }
    if (strcmp(type, "progress") == 0) {
        status_print(v);
    } else if (strcmp(type, "state") == 0) {
        cli_print_text(json_get_string(v, "state"));
        if (*json_get_string(v, "note")) printf(": "), cli_print_text(json_get_string(v, "note"));
    } else {
        char *result = json_dumps(json_object_get(v, "result"), JSON_COMPACT | JSON_ENCODE_ANY);
        cli_print_text(result ? result : json_get_string(v, "text"));
        free(result);
    }
    putchar('\n');
    fflush(stdout);
    json_decref(v);
    return OK;
}

static bool events_receive(void *ctx, const struct http_response *r, const char *data, size_t len) {
    struct follower *f = ctx;
    (void)r;
    f->rc = event_stream_add(&f->events, data, len, event_print, f, f->err);
    return f->rc == OK;
}

/* Prints the events until the job ends. */
static int follow(const struct command *m, struct error *err) {
    struct follower f = {.m = m, .events.any_type = true, .err = err};
    struct http_response r;
    json_t *job = job_ask(m, "GET", "", err); // an error before the stream
    if (!job) return err->code;
    json_decref(job);
    char *path = xasprintf("/%s/events", m->arg), *url = url_make(m, path);
    struct http_request q = request_to(m, "GET", url);
    q.seconds = 0;
    q.on_body = events_receive;
    q.ctx = &f;
    int rc = http_request(&q, &r, err);
    if (rc == OK) rc = f.rc;
    http_response_release(&r);
    event_stream_release(&f.events);
    free(url);
    free(path);
    if (rc != OK || !(job = job_ask(m, "GET", "", err))) return err->code;
    if (strcmp(json_get_string(job, "state"), "done") != 0)
        rc = error_set(err, ERR_STATE, "job '%s' is %s", m->arg, json_get_string(job, "state"));
    json_decref(job);
    return rc;
}

static const struct verb {
    const char *name;
    bool needs_arg;
    int (*run)(const struct command *m, struct error *err);
} verbs[] = {{"list", false, list},       {"show", true, show},     {"follow", true, follow},
             {"results", true, results},  {"log", true, log_print}, {"submit", true, submit},
             {"pause", true, pause_job},  {"resume", true, resume}, {"cancel", true, cancel},
             {"delete", true, delete_job}};

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    struct command m = {.c = c, .o = options, .arg = args->n > 1 ? args->v[1] : NULL};
    const char *name = args->n ? args->v[0] : "list";
    const struct verb *v = verbs;
    while (v < verbs + ARRAY_LEN(verbs) && strcmp(v->name, name) != 0) v++;
    if (v == verbs + ARRAY_LEN(verbs))
        return error_set(err, ERR_USAGE,
                         "'%s': there are list, show, follow, results, log, submit, pause, resume, "
                         "cancel and delete",
                         name);
    if (v->needs_arg != (m.arg != NULL))
        return error_set(err, ERR_USAGE, "jobs %s takes %s", name,
                         !v->needs_arg                 ? "no argument"
                         : strcmp(name, "submit") == 0 ? "a file with the request"
                                                       : "the id of a job");
    if (v->needs_arg && v->run != submit && strspn(m.arg, ID_CHARACTERS) != strlen(m.arg))
        return error_set(err, ERR_USAGE, "'%s' is no id of a job; 'shoal jobs' lists them", m.arg);
    int rc = headers_init(&m, err);
    if (rc == OK) rc = v->run(&m, err);
    strings_release(&m.headers);
    return rc;
}

const struct cli_command cmd_jobs = {
    .name = "jobs",
    .args = "[list|show|follow|results|log|submit|pause|resume|cancel|delete] [ID|FILE]",
    .summary = "jobs of a server: list, follow, submit, pause, retry, cancel",
    .about =
        "The server runs commands in the background as jobs. The next one is that of the highest\n"
        "priority; keys of equal priority take turns. A job with retries that fails is queued\n"
        "again; the failed ones that are left are kept with their reasons until they are resumed\n"
        "or deleted (dead letters).\n\n"
        "  list            all jobs, the newest first; the default\n"
        "  show ID         one job; --json prints everything that is known of it\n"
        "  follow ID       states, progress and results as they come; the exit code is 1 unless\n"
        "                  the job is done\n"
        "  results ID      its output; log ID: its messages\n"
        "  submit FILE     a new job: {\"kind\", \"args\", \"options\"}, and perhaps \"priority\" "
        "(-100\n"
        "                  to 100), \"retries\" (at most 3) and \"deadline\" (seconds)\n"
        "  pause, resume, cancel, delete ID    resume also tries a failed job again\n\n"
        "examples:\n"
        "  shoal jobs --job-state failed\n"
        "  shoal jobs submit request.json\n"
        "  shoal jobs follow job-0a1b2c3d\n"
        "  shoal jobs --server https://gpu.example.org:8000 --api-key-file key.txt\n",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 2,
    .run = run,
};
