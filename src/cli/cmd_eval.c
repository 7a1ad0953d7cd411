/*
 * cmd_eval: `shoal eval MODEL`: evaluates the base, adapters, the generations of a run, teams and a
 * remote model on the same questions, with statistics of the differences.
 *
 * Questions are read before the model, and the smallest detectable difference is printed before the
 * evaluation. Results are printed at the end, because Holm's correction needs all of them.
 */
#include "cli/setup.h"
#include "data/data.h"
#include "remote/remote.h"
#include "swarm/swarm.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct options {
    struct eval_request request; /* first: its rows are the first ones of the command */
    struct setup_options setup;
    char *log_samples, *run, *freeze, *frozen;
    struct strings adapters, teams;
    char *remote, *remote_model, *remote_key_env, *remote_api;
    int64_t remote_requests, remote_retries;
    double remote_timeout;
};
#define ROW(name, type, field, metavar, help, policy)                                              \
    { name, type, offsetof(struct options, field), NULL, 0, 0, metavar, help, policy }
static const struct option_row candidate_rows[] = {
    ROW("adapter", OPT_LIST, adapters, "DIR", "adapters to evaluate in addition to the base",
        JOB_ARG_BUILTIN_OR_PATH),
    ROW("run", OPT_STRING, run, "DIR",
        "folder of a run: evaluate all adapters of its generations, with mean and best of each "
        "generation",
        JOB_ARG_INPUT_PATH),
    ROW("team", OPT_LIST, teams, "FILE", "teams to evaluate as well", JOB_ARG_INPUT_PATH),
    ROW("log-samples", OPT_STRING, log_samples, "FILE",
        "write each answer to this file, as JSON Lines", JOB_ARG_OUTPUT_PATH),
    ROW("freeze", OPT_STRING, freeze, "FILE",
        "seal questions, settings and comparisons in this new file, and exit without an answer",
        JOB_ARG_OUTPUT_PATH),
    ROW("frozen", OPT_STRING, frozen, "FILE",
        "report whether the evaluation kept the plan in this file of --freeze", JOB_ARG_INPUT_PATH),
    SETUP_WORK_ROWS(struct options, setup),
    CLUSTER_ROWS(struct options, setup.cluster),
    SETUP_RECORD_ROWS(struct options, setup),
    {"adapters", OPT_ALIAS, 0, "adapter"},
    {0},
};
#undef ROW
#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    {                                                                                              \
        name, type, offsetof(struct options, field), fallback, min, max, metavar, __VA_ARGS__,     \
            JOB_ARG_FORBIDDEN                                                                      \
    }
static const struct option_row remote_rows[] = {
    ROW("remote", OPT_STRING, remote, NULL, 0, 0, "URL",
        "a model of this server as well (OpenAI's API)"),
    ROW("remote-model", OPT_STRING, remote_model, NULL, 0, 0, "NAME",
        "the model's name there; without it, the only one that the server has"),
    ROW("remote-key-env", OPT_STRING, remote_key_env, NULL, 0, 0, "VAR",
        "environment variable with the server's API key"),
    ROW("remote-api", OPT_STRING, remote_api, "chat", 0, 0, "NAME",
        "chat: a question is the message of a chat; completions: a prompt, as for the base"),
    ROW("remote-requests", OPT_INT, remote_requests, "4", 1, 64, "N", "requests at once"),
    ROW("remote-timeout", OPT_FLOAT, remote_timeout, "120", 0.1, 86400, "S",
        "seconds until a request without a whole response is given up"),
    ROW("remote-retries", OPT_INT, remote_retries, "4", 0, 20, "N",
        "how often a request is repeated if the server is busy or not reachable"),
    {0},
};
#undef ROW

enum {
    QUESTIONS_WORK = 16 << 20, /* bytes outside of the engine */
    ITEM_WORK = 16384,         /* bytes of a team's question and its transcript */
};
struct eval_command {
    const struct cli_options *c;
    const struct options *o;
    struct setup s;
    struct eval_task *tasks;
    struct strings single_names; /* names of base and adapters */
    struct strings paths;        /* [single_names.n] */
    int *generation; /* [single_names.n] generation of --run, from 0; -1: not from --run */
    struct strings adapter_paths; /* all adapters to load */
    struct team *teams;           /* [o->teams.n] */
    struct team_solver *team_solvers;
    struct engine_client engine_client;
    struct llm_client llm_client;
    struct eval_candidate *candidates; /* base and adapters, then teams, then a remote model */
    struct eval_solver *solvers;
    struct eval_remote remote; /* server NULL: none */
    char *remote_name;
    json_t **contaminated; /* [n_tasks · n_candidates] see team_contamination; NULL: none is */
    int n_tasks, n_candidates;
    struct eval_comparison comparison;
    json_t *sealed;      /* the plan of --frozen, or NULL */
    json_t *plan_report; /* its comparison with this evaluation, or NULL */
};

/* Upper bounds for the engine before texts are tokenized: a text has at most as many tokens as
 * bytes. */
static struct engine_options engine_options_init(const struct eval_command *r) {
    struct engine_options e = {.max_rows = 512, .max_seqs = 256, .max_len = FAMILY_MAX_TOKENS};
    for (int i = 0; i < r->n_tasks; i++) {
        size_t most = r->tasks[i].longest + (size_t)r->tasks[i].max_tokens;
        e.max_len = MAX(e.max_len, (int32_t)MIN(most, (size_t)1 << 20));
    }
    if (r->o->teams.n) e.max_len = MAX(e.max_len, team_max_tokens(r->tasks, r->n_tasks, INT32_MAX));
    return e;
}

static void engine_fit(struct eval_command *r) {
    struct engine_options *e = &r->s.engine;
    int32_t need = FAMILY_MAX_TOKENS;
    for (int i = 0; i < r->n_tasks; i++)
        need = MAX(need, eval_task_max_request_tokens(&r->tasks[i], r->s.m->tok));
    if (r->o->teams.n)
        need = MAX(need, team_max_tokens(r->tasks, r->n_tasks, r->s.m->config.max_seq_len));
    e->max_len = MIN(e->max_len, need);
}

/* candidates: base, adapters, teams */

static void single_add(struct eval_command *r, const char *name, const char *path, int generation) {
    strings_add(&r->single_names, name);
    strings_add(&r->paths, path);
    r->generation = xrealloc(r->generation, (size_t)r->single_names.n * sizeof *r->generation);
    r->generation[r->single_names.n - 1] = generation;
    strings_add(&r->adapter_paths, path);
}

static int is_visible(const struct dirent *f) {
    return f->d_name[0] != '.';
}

/* Adds the adapters DIR/adapters/gen_N/NAME in order of name and returns their number; -1: no such
 * folder. */
static int generation_add(struct eval_command *r, int generation) {
    struct dirent **found = NULL;
    char *dir = xasprintf("%s/adapters/gen_%d", r->o->run, generation);
    int n = scandir(dir, &found, is_visible, alphasort), added = 0;
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, found[i]->d_name),
             *name = xasprintf("gen_%d/%s", generation, found[i]->d_name);
        if (adapter_exists(path)) {
            single_add(r, name, path, generation);
            added++;
        }
        free(path);
        free(name);
        free(found[i]);
    }
    free(found);
    free(dir);
    return n < 0 ? -1 : added;
}

/* Lists the candidates and the adapters that they need, before anything is loaded. */
static int candidates_list(struct eval_command *r, struct error *err) {
    const struct options *o = r->o;
    single_add(r, "base", "base", -1);
    for (int i = 0; i < o->adapters.n; i++) single_add(r, o->adapters.v[i], o->adapters.v[i], -1);
    for (int g = 0; o->run && generation_add(r, g) >= 0; g++) continue;
    if (o->run && r->generation[r->single_names.n - 1] < 0)
        return error_set(err, ERR_MISSING, "no generations in '%s'; 'adapters/gen_0' is looked for",
                         o->run);
    r->teams = xcalloc((size_t)o->teams.n + 1, sizeof *r->teams);
    for (int i = 0; i < o->teams.n; i++) {
        if (team_read(&r->teams[i], o->teams.v[i], err) != OK) return err->code;
        for (int k = 0; k < r->teams[i].adapters.n; k++)
            strings_add(&r->adapter_paths, r->teams[i].adapters.v[k]);
    }
    return OK;
}

/* The number of candidates without a remote model. */
static int n_local(const struct eval_command *r) {
    return r->single_names.n + r->o->teams.n;
}

/* Checks the options of the remote model, and whether it can answer the tasks. */
static int remote_options_check(const struct eval_command *r, struct error *err) {
    const struct options *o = r->o;
    bool is_chat = strcmp(o->remote_api, "chat") == 0;
    if (!o->remote && (o->remote_model || o->remote_key_env))
        return error_set(err, ERR_USAGE, "--remote-model and --remote-key-env need --remote URL");
    if (!is_chat && strcmp(o->remote_api, "completions") != 0)
        return error_set(err, ERR_USAGE, "--remote-api is chat or completions, not '%s'",
                         o->remote_api);
    for (int i = 0; o->remote && i < r->n_tasks; i++)
        if (eval_remote_check(&r->tasks[i], err) != OK) return err->code;
    return OK;
}

/* Opens the remote model before the local one is loaded. A dry run sends nothing. */
static int remote_candidate_open(struct eval_command *r, struct error *err) {
    const struct options *o = r->o;
    if (remote_options_check(r, err) != OK) return err->code;
    if (!o->remote) return OK;
    r->remote = (struct eval_remote){.is_chat = strcmp(o->remote_api, "chat") == 0,
                                     .n_requests = (int)o->remote_requests,
                                     .seed = o->request.seed};
    r->remote.server = remote_open(&(struct remote_options){.url = o->remote,
                                                            .model = o->remote_model,
                                                            .key_env = o->remote_key_env,
                                                            .seconds = o->remote_timeout,
                                                            .retries = (int)o->remote_retries},
                                   err);
    if (!r->remote.server) return error_wrap(err, "--remote");
    if (!o->setup.dry_run && remote_connect(r->remote.server, err) != OK)
        return error_wrap(err, "--remote");
    r->remote_name = xasprintf("remote:%s", remote_model(r->remote.server));
    return OK;
}

static int candidates_load(struct eval_command *r, struct error *err) {
    for (int k = 1; k < r->single_names.n; k++)
        if (!(r->solvers[k].adapter = setup_adapter(&r->s, r->paths.v[k], err))) return err->code;
    for (int i = 0; i < r->o->teams.n; i++)
        if (team_load_adapters(&r->teams[i], setup_load_adapter, &r->s, err) != OK)
            return err->code;
    engine_fit(r);
    return setup_engine(&r->s, err);
}

static int candidates_open(struct eval_command *r, struct error *err) {
    r->n_candidates = n_local(r) + (r->remote.server != NULL);
    r->candidates = xcalloc((size_t)r->n_candidates, sizeof *r->candidates);
    r->solvers = xcalloc((size_t)r->single_names.n, sizeof *r->solvers);
    r->team_solvers = xcalloc((size_t)r->o->teams.n + 1, sizeof *r->team_solvers);
    if (candidates_load(r, err) != OK) return err->code;
    r->engine_client = (struct engine_client){.engine = r->s.e, .model = r->s.m};
    r->llm_client = engine_client_as_llm(&r->engine_client);
    for (int k = 0; k < r->single_names.n; k++) {
        r->solvers[k].e = r->s.e;
        r->solvers[k].tok = r->s.m->tok;
        r->solvers[k].max_len = r->s.engine.max_len;
        r->solvers[k].chain_of_thought = r->o->request.chain_of_thought;
        r->candidates[k] =
            (struct eval_candidate){r->single_names.v[k], eval_solver_answer, &r->solvers[k]};
    }
    for (int i = 0; i < r->o->teams.n; i++) {
        r->team_solvers[i] =
            (struct team_solver){&r->teams[i], &r->llm_client, (uint64_t)r->o->request.seed};
        r->candidates[r->single_names.n + i] =
            (struct eval_candidate){r->teams[i].name, team_solver_answer, &r->team_solvers[i]};
    }
    if (r->remote.server)
        r->candidates[n_local(r)] =
            (struct eval_candidate){r->remote_name, eval_remote_answer, &r->remote};
    return OK;
}

/* Appends s[n] with "\\n" for line ends. */
static void one_line_add(struct buf *b, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (s[i] == '\n')
            buf_puts(b, "\\n");
        else
            buf_add(b, s + i, 1);
}

/* Appends the beginning and the end of a prompt. */
static void prompt_excerpt_add(struct buf *b, const char *prompt) {
    enum { BEGINNING = 48, END = 32 };
    size_t n = strlen(prompt), head = n, tail = n;
    if (n > BEGINNING + END) {
        head = utf8_complete_len(prompt, BEGINNING);
        tail = n - END;
        while (tail < n && (prompt[tail] & 0xC0) == 0x80) tail++;
    }
    one_line_add(b, prompt, head);
    if (tail > head) buf_puts(b, head < n ? " … " : "");
    one_line_add(b, prompt + tail, n - tail);
}

/* Prints for each task from files the form of its lines and the first prompt, so that a prompt that
 * the files do not intend is visible. */
static void forms_print(const struct eval_command *r) {
    for (int i = 0; i < r->n_tasks; i++) {
        const struct eval_task *b = &r->tasks[i];
        struct buf prompt = {0};
        if (!b->form) continue;
        const struct eval_question *q = &b->questions[0];
        prompt_excerpt_add(&prompt, q->context ? q->context : q->contexts[0]);
        log_info("%s: %lld questions in the form '%s'%s%s, asked as '%s'", b->name,
                 (long long)b->n_questions, b->form, b->grader ? ", grader " : "",
                 b->grader ? b->grader : "", prompt.data ? prompt.data : "");
        buf_release(&prompt);
    }
}

/* Prints the smallest difference that a comparison of this size can detect. */
static void power_print(const struct eval_command *r) {
    for (int i = 0; i < r->n_tasks; i++) {
        const struct eval_task *b = &r->tasks[i];
        struct stats_interval half = stats_wilson(b->n_questions / 2, b->n_questions);
        if (r->n_candidates == 1)
            log_info("%s: %lld questions, an interval of up to ± %.1f points", b->name,
                     (long long)b->n_questions, 50 * (half.hi - half.lo));
        else
            log_info(
                "%s: %lld questions; a difference of %.1f points is found four times in five if "
                "%.0f %% of the answers differ",
                b->name, (long long)b->n_questions,
                100 * stats_min_detectable_effect(b->n_questions, EVAL_DISCORDANT),
                100 * EVAL_DISCORDANT);
    }
}

static json_t *single_contamination(const struct eval_task *b, const char *name,
                                    const struct adapter *a) {
    json_t *v = contamination_report(b, name, a);
    return v ? json_pack("[o]", v) : NULL;
}

/* Looks for the questions of each task in the training data of each candidate, and warns. */
static void contamination_check(struct eval_command *r) {
    r->contaminated = xcalloc((size_t)r->n_tasks * (size_t)r->n_candidates, sizeof(json_t *));
    for (int i = 0; i < r->n_tasks * r->n_candidates; i++) {
        const struct eval_task *b = &r->tasks[i / r->n_candidates];
        int k = i % r->n_candidates, n = r->single_names.n;
        if (k >= n_local(r)) continue; // its training data is not known
        r->contaminated[i] =
            k < n ? single_contamination(b, r->candidates[k].name, r->solvers[k].adapter)
                  : team_contamination(&r->teams[k - n], b);
    }
}

/* output */

static void summary_print(const struct eval_task *b, const char *candidate,
                          const struct eval_summary *s, bool first) {
    const struct eval_cost *c = &s->cost;
    printf("%-*s %-*s %7lld %7.2f %%   %6.2f … %6.2f", utf8_field_width(b->name, 14), b->name,
           utf8_field_width(candidate, 16), candidate, (long long)s->n, 100 * s->acc.value,
           100 * s->acc.lo, 100 * s->acc.hi);
    if (b->output_type == EVAL_LOGLIKELIHOOD && b->reports_acc_norm)
        printf("  %6.2f %%", 100 * s->acc_norm.value);
    else
        printf("  %8s", "");
    printf("  %8lld %10lld %9lld %8.1f\n", (long long)c->calls, (long long)c->prefilled,
           (long long)c->generated, c->seconds);
    if (!first)
        printf("%15s%+.2f points, %+.2f … %+.2f; %lld only it, %lld only the base; p %.3g, "
               "Holm %.3g%s\n",
               "", 100 * s->versus.diff.value, 100 * s->versus.diff.lo, 100 * s->versus.diff.hi,
               (long long)s->versus.only_a, (long long)s->versus.only_b, s->versus.p, s->p_holm,
               s->equivalent ? "; the same within 2 points" : "");
    if (!isnan(c->joules))
        printf("%15s%.1f J, %.3g J per answer, %.3g J per token\n", "", c->joules,
               c->joules / (double)MAX(s->n, 1),
               c->joules / (double)MAX(c->prefilled + c->generated, 1));
    if (s->n_clusters > 1 && s->n_clusters < s->n)
        printf("%15s%lld clusters: %.2f … %.2f\n", "", (long long)s->n_clusters,
               100 * s->clustered.lo, 100 * s->clustered.hi);
    if (s->failed)
        printf("%15s%lld of %lld questions failed and are not counted\n", "", (long long)s->failed,
               (long long)(s->n + s->failed));
    if (s->prompts_truncated + s->truncated + s->no_answer)
        printf("%15s%lld contexts cut, %lld replies truncated, %lld without an answer\n", "",
               (long long)s->prompts_truncated, (long long)s->truncated, (long long)s->no_answer);
}

static const char *candidate_kind(const struct eval_command *r, int candidate) {
    return candidate == 0                  ? "base"
           : candidate < r->single_names.n ? "adapter"
           : candidate < n_local(r)        ? "team"
                                           : "remote";
}

/* Prints mean and best of a generation on a task. The best is biased upwards (selection). */
static void generation_print(const struct eval_command *r, int task_index, int generation) {
    const struct eval_summary *s = &r->comparison.summaries[task_index * r->n_candidates];
    const char *task = r->tasks[task_index].name;
    double sum = 0;
    int n = 0, best = -1;
    for (int k = 1; k < r->single_names.n; k++) {
        if (r->generation[k] != generation) continue;
        sum += s[k].acc.value;
        n++;
        if (best < 0 || s[k].correct > s[best].correct) best = k;
    }
    if (n == 0) return;
    if (r->c->json)
        cli_print_json(json_pack("{s:s,s:i,s:i,s:f,s:s,s:f}", "task", task, "generation",
                                 generation, "adapters", n, "mean", sum / n, "best",
                                 r->candidates[best].name, "best_acc", s[best].acc.value));
    else
        printf("%-*s generation %-5d %7d adapters, mean %.2f %%, best %.2f %% (%s)\n",
               utf8_field_width(task, 14), task, generation, n, 100 * sum / n,
               100 * s[best].acc.value, r->candidates[best].name);
}

/* URL, name and API of the remote model. `reproducible`: its replies need not be the same twice. */
static json_t *remote_json(const struct eval_command *r) {
    const char *model = remote_model(r->remote.server);
    return json_pack("{s:s,s:o,s:s,s:b}", "url", remote_url(r->remote.server), "model",
                     json_string_lossy(model, strlen(model)), "api", r->o->remote_api,
                     "reproducible", 0);
}

/* {name: hash} of a candidate's adapters. */
static json_t *candidate_adapters_json(const struct eval_command *r, int k) {
    if (k >= n_local(r)) return json_object();
    if (k >= r->single_names.n) return team_adapters_json(&r->teams[k - r->single_names.n]);
    json_t *hashes = json_object();
    const struct adapter *a = r->solvers[k].adapter;
    if (a) manifest_add_hash(hashes, r->single_names.v[k], a->hash);
    return hashes;
}

/* The manifest of a candidate; takes the ownership of `data`. */
static json_t *candidate_manifest(const struct eval_command *r, int k, json_t *data) {
    bool is_remote = k >= n_local(r);
    json_t *v = manifest_json(is_remote ? NULL : r->s.m, candidate_adapters_json(r, k), data,
                              r->o->request.seed);
    if (is_remote) json_object_set_new(v, "remote", remote_json(r));
    return v;
}

static int team_add_hashes(const struct eval_command *r, int team, json_t *hashes,
                           struct error *err) {
    team_add_protocol_hash(&r->teams[team], hashes);
    return manifest_add_file(hashes, r->o->teams.v[team], err);
}

/* Prints the result of a candidate on a task with its manifest. `data`: hashes of the task. */
static int summary_print_json(const struct eval_command *r, int task, int k, const json_t *data,
                              struct error *err) {
    int i = task * r->n_candidates + k;
    json_t *hashes = json_copy((json_t *)(uintptr_t)data);
    int team = k - r->single_names.n, rc = OK;
    if (team >= 0 && team < r->o->teams.n) rc = team_add_hashes(r, team, hashes, err);
    json_t *v = eval_summary_json(&r->tasks[task], r->candidates[k].name, candidate_kind(r, k),
                                  &r->comparison.summaries[i], k == 0);
    if (r->contaminated[i]) json_object_set(v, "contaminated", r->contaminated[i]);
    if (k >= n_local(r))
        json_object_set_new(v, "failed",
                            json_integer((json_int_t)r->comparison.summaries[i].failed));
    json_object_set_new(v, "manifest", candidate_manifest(r, k, hashes));
    cli_print_json(v);
    return rc;
}

static int task_print_json(const struct eval_command *r, int task, struct error *err) {
    json_t *data = json_object();
    int rc = eval_task_add_hashes(&r->tasks[task], data, err);
    for (int k = 0; rc == OK && k < r->n_candidates; k++)
        rc = summary_print_json(r, task, k, data, err);
    json_decref(data);
    return rc;
}

static int leaderboard_print(const struct eval_command *r, struct error *err) {
    int rc = OK;
    if (!r->c->json)
        printf("%-14s %-16s %7s %9s   %s  %8s  %8s %10s %9s %8s\n", "task", "adapter", "n",
               "accuracy", "95 % interval  ", "acc_norm", "calls", "prefilled", "generated",
               "seconds");
    for (int i = 0; rc == OK && i < r->n_tasks; i++) {
        if (r->c->json) rc = task_print_json(r, i, err);
        for (int k = 0; !r->c->json && k < r->n_candidates; k++)
            summary_print(&r->tasks[i], r->candidates[k].name,
                          &r->comparison.summaries[i * r->n_candidates + k], k == 0);
    }
    for (int i = 0; i < r->n_tasks; i++)
        for (int g = 0; g <= r->generation[r->single_names.n - 1]; g++) generation_print(r, i, g);
    return rc;
}

static int sample_write(struct atomic_file *w, const struct eval_task *b, const char *candidate,
                        int64_t i, const struct eval_result *o, struct error *err) {
    struct eval_question scratch;
    const struct eval_question *q = eval_task_question(b, i, &scratch);
    json_t *v = json_pack("{s:s,s:s,s:I,s:b}", "task", b->name, "adapter", candidate, "item",
                          (json_int_t)i, "right", o->right);
    if (q->path)
        json_object_update_new(v, json_pack("{s:s,s:i}", "file", q->path, "line", q->line));
    else if (q->context) // a generated question is in no file
        json_object_set_new(v, "question", json_string(q->context));
    if (o->failed)
        json_object_set_new(v, "failed", json_true());
    else if (b->output_type == EVAL_GENERATE)
        json_object_update_new(v, json_pack("{s:f,s:b,s:b}", "score", (double)o->score, "no_answer",
                                            o->no_answer, "truncated", o->truncated));
    else
        json_object_update_new(v, json_pack("{s:i,s:i,s:f}", "choice", o->choice, "correct",
                                            q->correct, "prob", (double)o->prob));
    if (b->output_type == EVAL_LOGLIKELIHOOD)
        json_object_set_new(v, "right_norm", json_boolean(o->right_norm));
    if (o->prompt_truncated) json_object_set_new(v, "cut", json_true());
    char *text = json_canonical(v);
    int rc = atomic_file_write(w, text, strlen(text), err);
    if (rc == OK) rc = atomic_file_write(w, "\n", 1, err);
    free(text);
    json_decref(v);
    if (q == &scratch) eval_question_release(&scratch);
    return rc;
}

static int samples_write(const struct eval_command *r, struct error *err) {
    struct atomic_file w;
    if (!r->o->log_samples) return OK;
    int rc = atomic_file_open(&w, r->o->log_samples, err);
    if (rc != OK) return rc;
    for (int i = 0; rc == OK && i < r->n_tasks * r->n_candidates; i++) {
        const struct eval_task *b = &r->tasks[i / r->n_candidates];
        for (int64_t q = 0; rc == OK && q < b->n_questions; q++)
            rc = sample_write(&w, b, r->candidates[i % r->n_candidates].name, q,
                              &r->comparison.results[i][q], err);
    }
    if (rc == OK) return atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    return rc;
}

/* pre-registration */

/* The manifest of all candidates. The plan has the hashes of the questions. NULL: `err` is set. */
static json_t *plan_manifest(const struct eval_command *r, struct error *err) {
    json_t *adapters = json_object(), *data = json_object();
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n_tasks; i++)
        rc = eval_task_add_file_hashes(&r->tasks[i], data, err);
    for (int i = 0; rc == OK && i < r->o->teams.n; i++) rc = team_add_hashes(r, i, data, err);
    for (int k = 0; k < r->n_candidates; k++)
        json_object_update_new(adapters, candidate_adapters_json(r, k));
    json_t *v = manifest_json(r->s.m, adapters, data, r->o->request.seed);
    if (r->remote.server) json_object_set_new(v, "remote", remote_json(r));
    if (rc == OK) return v;
    json_decref(v);
    return NULL;
}

/* Options that can change an answer. Manifest and plan have tasks, n and seed. */
static json_t *plan_settings(const struct eval_command *r) {
    static const char *const names[] = {"shots", "split", "chain-of-thought"};
    const struct engine_options *e = &r->s.engine;
    json_t *v =
        json_pack("{s:s,s:s,s:i}", "kv-cache-dtype", dtype_name(e->kv_elem), "lora-dtype",
                  dtype_name(e->lora_elem), "tokens of a request, at most", (int)e->max_len);
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        json_object_set_new(v, names[i],
                            option_json(option_find(eval_request_rows, names[i]), &r->o->request));
    return v;
}

static int plan_seal(const struct eval_command *r, const json_t *manifest, const json_t *plan,
                     struct error *err) {
    if (eval_plan_seal(r->o->freeze, manifest, plan, err) != OK) return err->code;
    json_t *v = eval_plan_read(r->o->freeze, err);
    if (!v) return err->code;
    if (r->c->json)
        cli_print_json(json_pack("{s:{s:O,s:O,s:O}}", "preregistration", "file",
                                 json_object_get(v, "file"), "sha256", json_object_get(v, "sha256"),
                                 "sealed", json_object_get(v, "sealed")));
    else
        printf("sealed the plan in '%s', SHA-256 %s: publish it before the results\n", r->o->freeze,
               json_get_string(v, "sha256"));
    json_decref(v);
    return OK;
}

/* Seals the plan of --freeze, or compares it with that of --frozen. */
static int plan_apply(struct eval_command *r, struct error *err) {
    if (!r->o->freeze && !r->sealed) return OK;
    json_t *manifest = plan_manifest(r, err), *plan = NULL;
    int rc = manifest ? OK : err->code;
    if (rc == OK) plan = eval_plan_json(&r->comparison, plan_settings(r));
    if (rc == OK && r->o->freeze) rc = plan_seal(r, manifest, plan, err);
    if (rc == OK && r->sealed) r->plan_report = eval_plan_compare(r->sealed, manifest, plan);
    json_decref(manifest);
    json_decref(plan);
    if (r->plan_report && !json_is_true(json_object_get(r->plan_report, "kept")))
        log_warn("this evaluation deviates from the plan in '%s'; the report is at the end",
                 r->o->frozen);
    return rc;
}

static void plan_report_print(const struct eval_command *r) {
    struct buf text = {0};
    if (!r->plan_report) return;
    if (r->c->json) {
        cli_print_json(json_pack("{s:O}", "preregistration", r->plan_report));
        return;
    }
    eval_plan_report(r->plan_report, &text);
    fputs(text.data, stdout);
    buf_release(&text);
}

static int plan_open(struct eval_command *r, struct error *err) {
    const struct options *o = r->o;
    if (o->freeze && o->frozen)
        return error_set(err, ERR_USAGE,
                         "--freeze seals a plan and --frozen checks one; give one of both");
    if (o->freeze) return eval_plan_check_new(o->freeze, err);
    if (o->frozen && !(r->sealed = eval_plan_read(o->frozen, err))) return err->code;
    return OK;
}

/* Counts the requests of the local candidates. A team's replies are made up. */
static int work_count(struct eval_command *r, struct work_counter *counter, struct error *err) {
    int rc = OK, n = n_local(r);
    r->engine_client.run = work_counter_run;
    r->engine_client.run_ctx = counter;
    for (int i = 0; rc == OK && i < r->n_tasks * n; i++) {
        const struct eval_task *b = &r->tasks[i / n];
        int k = i % n;
        if (k < r->single_names.n) {
            rc = eval_solver_count(&r->solvers[k], b, counter, err);
            continue;
        }
        struct eval_result *unused = xcalloc((size_t)b->n_questions + 1, sizeof *unused);
        struct eval_cost cost = {0};
        rc = r->candidates[k].answer(r->candidates[k].ctx, b, unused, &cost, NULL, 0, err);
        free(unused);
    }
    return rc;
}

static int work_print(struct eval_command *r, struct error *err) {
    struct work_counter *counter = work_counter_new(r->s.e, r->s.m);
    int rc = work_count(r, counter, err);
    if (rc == OK) rc = setup_print_work(&r->s, counter, err);
    work_counter_free(counter);
    return rc;
}

static int eval_all(struct eval_command *r, struct error *err) {
    if (!r->s.m->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", r->s.path);
    if (candidates_open(r, err) != OK) return err->code;
    if (r->o->setup.dry_run) return work_print(r, err);
    forms_print(r);
    power_print(r);
    contamination_check(r);
    r->comparison = (struct eval_comparison){.tasks = r->tasks,
                                             .n_tasks = r->n_tasks,
                                             .candidates = r->candidates,
                                             .n_candidates = r->n_candidates};
    int rc = plan_apply(r, err);
    if (rc != OK || r->o->freeze) return rc;
    if (eval_comparison_run(&r->comparison, (uint64_t)r->o->request.seed, err) != OK)
        return err->code;
    rc = leaderboard_print(r, err);
    plan_report_print(r);
    if (rc == OK) rc = samples_write(r, err);
    return rc == OK && r->remote.server ? remote_check(r->remote.server, err) : rc;
}

static void eval_command_release(struct eval_command *r) {
    eval_comparison_release(&r->comparison);
    for (int i = 0; i < r->n_tasks; i++) eval_task_release(&r->tasks[i]);
    free(r->tasks);
    for (int i = 0; r->teams && i < r->o->teams.n; i++) team_release(&r->teams[i]);
    json_decref(r->sealed);
    json_decref(r->plan_report);
    remote_close(r->remote.server);
    free(r->remote_name);
    strings_release(&r->single_names);
    strings_release(&r->paths);
    strings_release(&r->adapter_paths);
    free(r->generation);
    free(r->teams);
    free(r->team_solvers);
    for (int i = 0; r->contaminated && i < r->n_tasks * r->n_candidates; i++)
        json_decref(r->contaminated[i]);
    free(r->contaminated);
    free(r->candidates);
    free(r->solvers);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct eval_command r = {.c = c, .o = o};
    int rc = plan_open(&r, err);
    if (rc == OK) rc = candidates_list(&r, err);
    if (rc == OK) rc = eval_request_open(&o->request, &r.tasks, &r.n_tasks, err);
    if (rc == OK) rc = remote_candidate_open(&r, err);
    if (rc == OK) {
        struct setup_needs w = {.engine = engine_options_init(&r),
                                .adapters = &r.adapter_paths,
                                .work = QUESTIONS_WORK,
                                .estimates = true};
        for (int i = 0; o->teams.n && i < r.n_tasks; i++)
            w.work += (size_t)r.tasks[i].n_questions * ITEM_WORK;
        rc = setup_open(&r.s, c, &o->setup, args->v[0], &w, err);
        if (rc == OK && r.s.m) rc = eval_all(&r, err);
        rc = setup_close(&r.s, rc, err);
    }
    eval_command_release(&r);
    return rc;
}

const struct cli_command cmd_eval = {
    .name = "eval",
    .args = "MODEL",
    .summary = "accuracy of base, adapters and teams on the same questions, with 95 % intervals",
    .about =
        "The base model, every adapter and every team answer the same questions. Accuracy has\n"
        "Wilson's 95 % interval. Adapters and teams are compared with the base question by\n"
        "question (McNemar's exact test, Holm's correction over the whole run). A choice is\n"
        "decoded or scored; it is never parsed from text. Teams are prompted as a chat, by\n"
        "their protocol, with the same choices. --remote adds a model of another server.\n"
        "\n"
        "Tasks: starter, the families of generated questions of the starter model; a family of\n"
        "it; needle, a text of 4,000 tokens; fry, the ten of version 0.1; largest and earliest;\n"
        "from files below --data: arc_easy, arc_challenge, winogrande, boolq, hellaswag, mmlu,\n"
        "truthfulqa, jcommonsenseqa, gsm8k, piqa, openbookqa, siqa, copa, sciq, race, lambada,\n"
        "triviaqa, nq, math, mmlu_pro, gpqa, bbh; FILE.jsonl, whose form is known by its fields\n"
        "(Hugging Face, llm-foundry, or question, choices and answer) and is printed; RECIPE.yaml\n"
        "that maps other fields. docs/EVALUATION.md shows every form and its prompt.\n"
        "\n"
        "To pre-register an evaluation, give its command --freeze FILE, publish the hash that it\n"
        "prints, and run the command later with --frozen FILE: a report names each item of the\n"
        "plan (questions, n, seed, model, adapters, comparisons …) that was not kept.\n"
        "\n"
        "  shoal eval models/fry --json\n"
        "  shoal eval MODEL --tasks arc_easy,mmlu --data data/eval --shots 5\n"
        "  shoal eval models/fry --tasks route,order --adapter runs/ID/adapters/gen_0/explorer "
        "\\\n"
        "      --team team.yaml --n 5000\n"
        "  shoal eval models/fry --tasks route --adapter DIR --freeze plan.json",
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .job_store_option = "store",
    .main_options = "tasks data adapter run team n shots split seed chain-of-thought "
                    "remote log-samples max-memory dry-run",
    .rows = eval_request_rows,
    .more =
        (const struct option_table[]){{candidate_rows, 0}, {remote_rows, 0, "a remote model"}, {0}},
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
