/*
 * team_fit: measures the first answers of a team's agents, fits a router, the weights of a vote and
 * the sub-team that votes best to them, reports all under cross-validation, and writes the fitted
 * team.
 *
 * The agents and the unweighted vote have no fitted values, so they are measured on all questions.
 * The router, the weights and the sub-team of a question's fold are fitted on the other folds.
 * Every sub-team is tried: its vote needs no further calls. The best agent is the best on the
 * measured questions, which favours it against the router.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include "hub/hub.h"

#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { QUESTIONS_MIN = 50, QUESTIONS_MAX = 20000 };
/* Rows of the report after those of the agents. */
enum { ROW_VOTE, ROW_WEIGHTED, ROW_SUBTEAM, ROW_ROUTER, ROW_ORACLE, N_ROWS };
static const char *const row_names[N_ROWS] = {"unweighted vote", "weighted vote", "sub-team",
                                              "router", "oracle"};
static const char *const row_kinds[N_ROWS] = {"vote", "weighted", "subteam", "router", "oracle"};

/* answers */

static struct debate_options first_answers(const struct team *t, uint64_t seed) {
    struct debate_options o = t->options;
    o.router = NULL;
    o.rounds = 1;
    o.seed = seed;
    if (strcmp(o.vote->name, "weighted") == 0) o.vote = vote_find("majority");
    return o;
}

int team_answers_run(const struct llm_client *client, const struct team *t,
                     const struct eval_task *tasks, int n_tasks, uint64_t seed,
                     struct team_answers *out, struct progress *p, struct error *err) {
    *out = (struct team_answers){.team = t, .tasks = tasks, .n_tasks = n_tasks};
    out->items = xcalloc((size_t)n_tasks + 1, sizeof *out->items);
    out->debates = xcalloc((size_t)n_tasks + 1, sizeof *out->debates);
    if (!workflow_has_first_answers(t->workflow))
        return error_set(
            err, ERR_USAGE,
            "in protocol '%s' not every agent answers first, or no vote decides; a fit "
            "needs another protocol, such as 'brief'",
            workflow_name(t->workflow));
    const struct debate_options first = first_answers(t, seed);
    int rc = OK;
    for (int i = 0; rc == OK && i < n_tasks; i++) {
        struct debate_options o;
        rc = debate_options_for_task(&tasks[i], &first, &o, err);
        if (rc != OK) break;
        if (tasks[i].n_questions > QUESTIONS_MAX)
            return error_set(err, ERR_USAGE, "a fit takes at most %d questions; use --n",
                             QUESTIONS_MAX);
        out->items[i] = eval_task_items(&tasks[i]);
        rc = debate_run(client, t->v, t->n, out->items[i], (int)tasks[i].n_questions, &o,
                        &out->debates[i], p, err);
    }
    return rc;
}

void team_answers_release(struct team_answers *a) {
    for (int i = 0; i < a->n_tasks; i++) {
        debate_release(&a->debates[i]);
        if (a->items[i]) task_items_release(a->items[i], a->tasks[i].n_questions);
    }
    free(a->items);
    free(a->debates);
    *a = (struct team_answers){0};
}

/* measuring */

/* The answers to the questions of all tasks, one after another. */
struct fit_table {
    const struct team_answers *a;
    int n, n_agents;
    const char **questions;                    /* [n] */
    int *task, *item, *fold;                   /* [n] */
    uint8_t *right;                            /* [n_agents + N_ROWS][n] */
    double weight[ROUTER_FOLDS + 1][TEAM_MAX]; /* fitted without the fold; the last: on all */
    uint32_t subteam[ROUTER_FOLDS + 1];        /* likewise; bit k: agent k */
};

static uint8_t *row_at(const struct fit_table *t, int row) {
    return t->right + (size_t)row * (size_t)t->n;
}

static void question_add(struct fit_table *t, int task, int item) {
    int i = t->n++;
    t->task[i] = task;
    t->item[i] = item;
    t->questions[i] = task_item_question(&t->a->items[task][item], -1);
    t->fold[i] = router_fold(t->questions[i]);
}

static int64_t questions_count(const struct team_answers *a) {
    int64_t n = 0;
    for (int i = 0; i < a->n_tasks; i++) n += a->tasks[i].n_questions;
    return n;
}

/* Fills the rows that no fit changes. */
static void table_fill(struct fit_table *t) {
    for (int i = 0; i < t->n; i++) {
        const struct debate *d = &t->a->debates[t->task[i]];
        uint8_t *oracle = &row_at(t, t->n_agents + ROW_ORACLE)[i];
        for (int k = 0; k < t->n_agents; k++) {
            uint8_t right = d->first_correct[(size_t)k * (size_t)d->n_items + (size_t)t->item[i]];
            row_at(t, k)[i] = right;
            *oracle |= right;
        }
        row_at(t, t->n_agents + ROW_VOTE)[i] = d->vote_correct[t->item[i]];
    }
}

static void table_init(struct fit_table *t, const struct team_answers *a, int64_t n) {
    *t = (struct fit_table){.a = a, .n_agents = a->team->n};
    t->questions = xcalloc((size_t)n, sizeof *t->questions);
    t->task = xcalloc((size_t)n, sizeof *t->task);
    t->item = xcalloc((size_t)n, sizeof *t->item);
    t->fold = xcalloc((size_t)n, sizeof *t->fold);
    t->right = xcalloc((size_t)(t->n_agents + N_ROWS) * (size_t)n, 1);
    for (int i = 0; i < a->n_tasks; i++)
        for (int k = 0; k < (int)a->tasks[i].n_questions; k++) question_add(t, i, k);
    table_fill(t);
}

static void table_release(struct fit_table *t) {
    free(t->questions);
    free(t->task);
    free(t->item);
    free(t->fold);
    free(t->right);
}

static double log_odds(double p) {
    return math_log(p) - math_log(1 - p);
}

/* The weights by the questions outside of `fold`. A guess is right with the mean of 1 / choices;
 * a question without choices counts as one of two. */
static void weights_fit(struct fit_table *t, int fold) {
    double right[TEAM_MAX] = {0}, guess = 0;
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        if (t->fold[i] == fold) continue;
        int choices = t->a->items[t->task[i]][t->item[i]].n_choices;
        guess += 1 / (double)(choices ? choices : 2);
        for (int k = 0; k < t->n_agents; k++) right[k] += row_at(t, k)[i];
        n++;
    }
    for (int k = 0; k < t->n_agents; k++) {
        double p = (right[k] + 1) / (n + 2), g = n ? fmin(guess / n, 0.99) : 0.5;
        t->weight[fold][k] = fmax(0, log_odds(p) - log_odds(g));
    }
}

/* Whether a vote of the agents of `subteam` decides question i rightly. `weights`: NULL, or of the
 * agents. */
static bool vote_is_right(const struct fit_table *t, int i, const struct vote *vote,
                          uint32_t subteam, const double *weights) {
    const struct debate *d = &t->a->debates[t->task[i]];
    const struct task_item *items = t->a->items[t->task[i]];
    struct agent_answer ballots[TEAM_MAX];
    int n = 0, item = t->item[i];
    for (int k = 0; k < t->n_agents; k++) {
        const struct agent_answer *x = &d->answers[(size_t)k * (size_t)d->n_items + (size_t)item];
        if (x->choice < 0 || !(subteam >> k & 1)) continue;
        ballots[n] = *x;
        if (weights) ballots[n].weight = (float)weights[k];
        n++;
    }
    int choice = n ? vote_decide(vote, ballots, n, d->transcripts[item].n_candidates) : -1;
    return debate_answer_is_correct(d, items, item, choice);
}

/* Right votes of each sub-team, by fold. */
struct subteams {
    const struct fit_table *t;
    const struct vote *vote;
    int (*right)[ROUTER_FOLDS]; /* [1 << n_agents] */
};

static void subteams_count(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct subteams *s = ctx;
    (void)thread;
    for (int64_t mask = begin; mask < end; mask++)
        for (int i = 0; i < s->t->n; i++)
            s->right[mask][s->t->fold[i]] += vote_is_right(s->t, i, s->vote, (uint32_t)mask, NULL);
}

/* The sub-team with the most right votes outside of `fold`; of several the smallest. */
static uint32_t subteam_best(const struct subteams *s, int fold) {
    uint32_t best = 1;
    int most = -1;
    for (uint32_t mask = 1; mask < 1u << s->t->n_agents; mask++) {
        int right = 0;
        for (int f = 0; f < ROUTER_FOLDS; f++)
            if (f != fold) right += s->right[mask][f];
        if (right > most ||
            (right == most && __builtin_popcount(mask) < __builtin_popcount(best))) {
            best = mask;
            most = right;
        }
    }
    return best;
}

static void subteams_fit(struct fit_table *t, struct pool *pool) {
    struct subteams s = {.t = t, .vote = first_answers(t->a->team, 1).vote};
    s.right = xcalloc((size_t)1 << t->n_agents, sizeof *s.right);
    pool_run(pool, subteams_count, &s, (int64_t)1 << t->n_agents, 1);
    for (int fold = 0; fold <= ROUTER_FOLDS; fold++) t->subteam[fold] = subteam_best(&s, fold);
    for (int i = 0; i < t->n; i++)
        row_at(t, t->n_agents + ROW_SUBTEAM)[i] =
            vote_is_right(t, i, s.vote, t->subteam[t->fold[i]], NULL);
    free(s.right);
}

static int64_t row_right(const struct fit_table *t, int row, int task) {
    int64_t sum = 0;
    for (int i = 0; i < t->n; i++)
        if (task < 0 || t->task[i] == task) sum += row_at(t, row)[i];
    return sum;
}

static int best_agent(const struct fit_table *t) {
    int best = 0;
    for (int k = 1; k < t->n_agents; k++)
        if (row_right(t, k, -1) > row_right(t, best, -1)) best = k;
    return best;
}

/* report */

static const char *row_name(const struct fit_table *t, int row) {
    return row < t->n_agents ? t->a->team->v[row].name : row_names[row - t->n_agents];
}

static json_t *rows_json(const struct fit_table *t) {
    json_t *rows = json_array();
    for (int r = 0; r < t->n_agents + N_ROWS; r++) {
        int calls = r < t->n_agents || r == t->n_agents + ROW_ROUTER ? 1
                    : r == t->n_agents + ROW_SUBTEAM ? __builtin_popcount(t->subteam[ROUTER_FOLDS])
                                                     : t->n_agents;
        struct stats_interval ci = stats_wilson(row_right(t, r, -1), t->n);
        json_array_append_new(rows,
                              json_pack("{s:s,s:s,s:f,s:f,s:f,s:i}", "name", row_name(t, r), "kind",
                                        r < t->n_agents ? "solo" : row_kinds[r - t->n_agents],
                                        "acc", ci.value, "lo", ci.lo, "hi", ci.hi, "calls", calls));
    }
    return rows;
}

static json_t *tasks_json(const struct fit_table *t) {
    json_t *list = json_array();
    for (int i = 0; i < t->a->n_tasks; i++) {
        const struct eval_task *task = &t->a->tasks[i];
        json_t *acc = json_array(), *contaminated = team_contamination(t->a->team, task);
        for (int r = 0; r < t->n_agents + N_ROWS; r++)
            json_array_append_new(
                acc, json_real((double)row_right(t, r, i) / (double)MAX(task->n_questions, 1)));
        json_t *v = json_pack("{s:s,s:I,s:o}", "name", task->name, "n",
                              (json_int_t)task->n_questions, "acc", acc);
        if (contaminated) json_object_set_new(v, "contaminated", contaminated);
        json_array_append_new(list, v);
    }
    return list;
}

/* Router, weighted vote and sub-team against the best agent and the unweighted vote. */
static json_t *comparisons_json(const struct fit_table *t) {
    const int vote = t->n_agents + ROW_VOTE, best = best_agent(t);
    const int pairs[][2] = {{t->n_agents + ROW_ROUTER, best},   {t->n_agents + ROW_ROUTER, vote},
                            {t->n_agents + ROW_WEIGHTED, best}, {t->n_agents + ROW_WEIGHTED, vote},
                            {t->n_agents + ROW_SUBTEAM, best},  {t->n_agents + ROW_SUBTEAM, vote}};
    struct stats_pair v[ARRAY_LEN(pairs)];
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++)
        v[i] = (struct stats_pair){row_name(t, pairs[i][0]), row_name(t, pairs[i][1]),
                                   row_at(t, pairs[i][0]), row_at(t, pairs[i][1])};
    return stats_pairs_json(v, ARRAY_LEN(pairs), t->n);
}

/* [{name, weight, routed, subteam}], routed: the share of the questions that the router gives the
 * agent. */
static json_t *agents_json(const struct fit_table *t, const struct router_fit *f) {
    json_t *list = json_array();
    for (int k = 0; k < t->n_agents; k++) {
        int routed = 0;
        for (int i = 0; i < t->n; i++) routed += f->route[i] == k;
        json_array_append_new(list, json_pack("{s:s,s:f,s:f,s:b}", "name", t->a->team->v[k].name,
                                              "weight", t->weight[ROUTER_FOLDS][k], "routed",
                                              (double)routed / t->n, "subteam",
                                              (int)(t->subteam[ROUTER_FOLDS] >> k & 1)));
    }
    return list;
}

static json_t *report_json(const struct fit_table *t, const struct router_fit *f,
                           const struct team_fit *fit) {
    json_t *fold_l2 = json_array();
    int64_t oracle = row_right(t, t->n_agents + ROW_ORACLE, -1);
    for (int i = 0; i < ROUTER_FOLDS; i++) json_array_append_new(fold_l2, json_real(f->fold_l2[i]));
    return json_pack("{s:i,s:i,s:f,s:o,s:s,s:s,s:o,s:f,s:o,s:o,s:o,s:{s:b,s:b,s:b}}", "n", t->n,
                     "folds", ROUTER_FOLDS, "l2", fit->router->l2, "fold_l2", fold_l2, "vote",
                     first_answers(t->a->team, 1).vote->name, "best", row_name(t, best_agent(t)),
                     "rows", rows_json(t), "all_wrong", 1 - (double)oracle / t->n, "agents",
                     agents_json(t, f), "tasks", tasks_json(t), "comparisons", comparisons_json(t),
                     "better", "router", (int)fit->better[TEAM_DECIDE_ROUTER], "weighted",
                     (int)fit->better[TEAM_DECIDE_WEIGHTED], "subteam",
                     (int)fit->better[TEAM_DECIDE_SUBTEAM]);
}

/* fitting */

static void fit_decisions(struct fit_table *t, struct pool *pool, struct router_fit *f) {
    const struct router_data data = {t->questions, t->right, t->n, t->n_agents};
    for (int fold = 0; fold <= ROUTER_FOLDS; fold++) weights_fit(t, fold);
    router_fit(&data, pool, f);
    subteams_fit(t, pool);
    for (int i = 0; i < t->n; i++) {
        row_at(t, t->n_agents + ROW_WEIGHTED)[i] =
            vote_is_right(t, i, vote_find("weighted"), UINT32_MAX, t->weight[t->fold[i]]);
        row_at(t, t->n_agents + ROW_ROUTER)[i] = row_at(t, f->route[i])[i];
    }
}

int team_fit_run(const struct team_answers *a, struct pool *pool, struct team_fit *out,
                 struct error *err) {
    struct fit_table t;
    struct router_fit f;
    int64_t n = questions_count(a);
    *out = (struct team_fit){0};
    if (n < QUESTIONS_MIN || n > QUESTIONS_MAX)
        return error_set(err, ERR_USAGE, "a fit takes %d to %d questions, not %lld", QUESTIONS_MIN,
                         QUESTIONS_MAX, (long long)n);
    table_init(&t, a, n);
    fit_decisions(&t, pool, &f);
    out->router = f.router;
    f.router = NULL;
    for (int k = 0; k < t.n_agents; k++) {
        out->router->names[k] = xstrdup(a->team->v[k].name);
        out->weight[k] = t.weight[ROUTER_FOLDS][k];
    }
    int64_t best = row_right(&t, best_agent(&t), -1), vote = row_right(&t, t.n_agents, -1),
            weighted = row_right(&t, t.n_agents + ROW_WEIGHTED, -1),
            subteam = row_right(&t, t.n_agents + ROW_SUBTEAM, -1);
    out->subteam = t.subteam[ROUTER_FOLDS];
    out->better[TEAM_DECIDE_ROUTER] = row_right(&t, t.n_agents + ROW_ROUTER, -1) > best;
    out->better[TEAM_DECIDE_WEIGHTED] = weighted > best && weighted > vote;
    out->better[TEAM_DECIDE_SUBTEAM] = subteam > best && subteam > vote;
    out->report = report_json(&t, &f, out);
    router_fit_release(&f);
    table_release(&t);
    return OK;
}

void team_fit_release(struct team_fit *f) {
    router_free(f->router);
    json_decref(f->report);
    *f = (struct team_fit){0};
}

/* output */

static void rows_print(const json_t *report, FILE *f) {
    size_t i;
    json_t *v;
    json_array_foreach (json_object_get(report, "rows"), i, v)
        fprintf(f, "  %-*s %6.2f %%  (%.2f – %.2f)  calls per question: %d\n",
                utf8_field_width(json_get_string(v, "name"), 24), json_get_string(v, "name"),
                100 * json_get_number(v, "acc"), 100 * json_get_number(v, "lo"),
                100 * json_get_number(v, "hi"), (int)json_get_number(v, "calls"));
}

static void tasks_print(const json_t *report, FILE *f) {
    const json_t *rows = json_object_get(report, "rows");
    size_t i, k;
    json_t *v, *acc;
    if (json_array_size(json_object_get(report, "tasks")) < 2) return;
    json_array_foreach (json_object_get(report, "tasks"), i, v) {
        fprintf(f, "%s (%d):", json_get_string(v, "name"), (int)json_get_number(v, "n"));
        json_array_foreach (json_object_get(v, "acc"), k, acc)
            fprintf(f, "%s %s %.1f", k ? "," : "", json_get_string(json_array_get(rows, k), "name"),
                    100 * json_number_value(acc));
        fputc('\n', f);
    }
}

void team_fit_print(const json_t *report, FILE *f) {
    const json_t *better = json_object_get(report, "better");
    size_t i;
    json_t *v;
    fprintf(f,
            "first answers to %d questions; router, weights and sub-team are cross-validated in %d "
            "folds\n",
            (int)json_get_number(report, "n"), (int)json_get_number(report, "folds"));
    rows_print(report, f);
    fprintf(f,
            "every agent errs on %.1f %% of the questions: no router and no vote is right there\n",
            100 * json_get_number(report, "all_wrong"));
    json_array_foreach (json_object_get(report, "comparisons"), i, v) report_comparison_print(v, f);
    tasks_print(report, f);
    json_array_foreach (json_object_get(report, "agents"), i, v)
        fprintf(f, "%s: %.1f %% of the questions by the router, weight %.3f in the vote, %s\n",
                json_get_string(v, "name"), 100 * json_get_number(v, "routed"),
                json_get_number(v, "weight"),
                json_is_true(json_object_get(v, "subteam")) ? "in the sub-team"
                                                            : "not in the sub-team");
    if (!json_is_true(json_object_get(better, "router")))
        fprintf(f, "the router is not better than its best agent, '%s'\n",
                json_get_string(report, "best"));
    if (!json_is_true(json_object_get(better, "weighted")))
        fprintf(f, "the weighted vote is not better than both the best agent and the vote\n");
    if (!json_is_true(json_object_get(better, "subteam")))
        fprintf(f, "the sub-team is not better than both the best agent and the vote\n");
}

/* files */

static char *folder_real(const char *file) {
    char *copy = xstrdup(file), *real = realpath(dirname(copy), NULL);
    free(copy);
    return real ? real : xstrdup("");
}

/* Agent i's adapters with absolute paths, as the key `adapter`. */
static json_t *adapters_absolute(const struct team *t, int i) {
    json_t *list = json_array();
    for (int k = t->first[i]; k < t->first[i + 1]; k++) {
        const char *path = t->adapters.v[k];
        double weight = (double)t->terms[k].weight;
        bool is_name = strcmp(path, "base") == 0 || hub_is_name(path);
        char *absolute = is_name ? xstrdup(path) : path_absolute(path);
        json_array_append_new(list, weight != 1 ? json_sprintf("%s=%.9g", absolute, weight)
                                                : json_string(absolute));
        free(absolute);
    }
    return list;
}

static void protocol_make_absolute(json_t *root, const char *path) {
    const char *protocol = json_string_value(json_object_get(root, "protocol"));
    char *file = protocol ? path_relative_to(path, protocol) : NULL;
    if (file && !workflow_is_builtin(protocol)) {
        char *absolute = path_absolute(file);
        json_object_set_new(root, "protocol", json_string(absolute));
        free(absolute);
    }
    free(file);
}

static void fitted_keys_set(json_t *root, const struct team_fit *f, const struct team *t,
                            enum team_decision decide, const char *router) {
    if (decide == TEAM_DECIDE_WEIGHTED) json_object_set_new(root, "vote", json_string("weighted"));
    if (decide == TEAM_DECIDE_ROUTER)
        json_object_set_new(root, "router", json_string(router));
    else
        json_object_del(root, "router");
    json_object_set_new(root, "rounds", json_integer(1));
    json_object_del(root, "name");
    for (int i = 0; i < t->n; i++) {
        json_t *agent = json_array_get(json_object_get(root, "agents"), (size_t)i);
        json_object_set_new(agent, "name", json_string(t->v[i].name));
        json_object_set_new(agent, "weight", json_real(f->weight[i]));
    }
    for (int i = t->n - 1; decide == TEAM_DECIDE_SUBTEAM && i >= 0; i--)
        if (!(f->subteam >> i & 1)) json_array_remove(json_object_get(root, "agents"), (size_t)i);
}

/* Appends "KEY: VALUE" lines. A value in JSON is one in YAML. */
static void mapping_add(struct buf *b, const json_t *mapping, const char *first,
                        const char *indent) {
    const char *key;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)mapping, key, v) {
        if (strcmp(key, "agents") == 0) continue;
        char *value = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
        buf_printf(b, "%s%s: %s\n", first, key, value);
        first = indent;
        free(value);
    }
}

static void team_yaml(const json_t *root, struct buf *out) {
    size_t i;
    json_t *agent;
    mapping_add(out, root, "", "");
    buf_puts(out, "agents:\n");
    json_array_foreach (json_object_get(root, "agents"), i, agent)
        mapping_add(out, agent, "  - ", "    ");
}

/* "dir/careful.yaml" → "dir/careful.router.json" */
static char *router_path(const char *out) {
    size_t n = strlen(out);
    if (path_has_extension(out, ".yaml")) n -= strlen(".yaml");
    if (path_has_extension(out, ".yml")) n -= strlen(".yml");
    return xasprintf("%.*s.router.json", (int)n, out);
}

static int router_write(const struct router *r, const char *path, const json_t *fit,
                        struct error *err) {
    json_t *v = router_json(r, fit);
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    int rc = file_write(path, text, strlen(text), err);
    free(text);
    json_decref(v);
    return rc;
}

static int team_write(const struct team_fit *f, enum team_decision decide, const struct team *t,
                      const char *path, const char *out, const char *router, struct error *err) {
    char *from = folder_real(path), *to = folder_real(out);
    struct buf text = {0};
    struct yaml y;
    int rc = yaml_load(&y, path, err);
    if (rc == OK) {
        bool moved = strcmp(from, to) != 0;
        if (moved) protocol_make_absolute(y.root, path);
        for (int i = 0; moved && i < t->n; i++)
            json_object_set_new(json_array_get(json_object_get(y.root, "agents"), (size_t)i),
                                "adapter", adapters_absolute(t, i));
        fitted_keys_set(y.root, f, t, decide, path_name(router));
        team_yaml(y.root, &text);
        rc = file_write(out, text.data, text.len, err);
        yaml_release(&y);
    }
    buf_release(&text);
    free(from);
    free(to);
    return rc;
}

int team_fit_write(const struct team_fit *f, enum team_decision decide, const struct team *t,
                   const char *path, const char *out, const json_t *fit, struct error *err) {
    char *router = router_path(out);
    int rc = decide == TEAM_DECIDE_ROUTER ? router_write(f->router, router, fit, err) : OK;
    if (rc == OK) rc = team_write(f, decide, t, path, out, router, err);
    free(router);
    return rc;
}
