/*
 * cmd_debate: `shoal debate`: agents answer questions together. With --tasks it measures what the
 * debate gains over each agent alone, the vote of the first round, the best choice among first
 * answers, and self-consistency of the best agent at equal cost; and the contribution of each
 * agent.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "cli/setup.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct debate_request request;
    struct strings agents;
    char *team, *show, *compat, *report, *second_turns;
    bool use_cache, protocols;
};
#define ROW(name, type, field, fallback, metavar, ...)                                             \
    { name, type, offsetof(struct options, field), fallback, 0, 0, metavar, __VA_ARGS__ }
static const struct option_row team_rows[] = {
    ROW("agents", OPT_LIST, agents, NULL, "DIR", "adapters of the agents; 'base' is the base model",
        JOB_ARG_BUILTIN_OR_PATH),
    {"adapters", OPT_ALIAS, 0, "agents"},
    {"adapter", OPT_ALIAS, 0, "agents"},
    {"temp", OPT_ALIAS, 0, "temperature"},
    ROW("team", OPT_STRING, team, NULL, "FILE",
        "file with agents, protocol and settings; --rounds, --vote, --temperature and --max-tokens "
        "override it",
        JOB_ARG_INPUT_PATH),
    ROW("protocols", OPT_BOOL, protocols, NULL, NULL, "list the built-in protocols and exit"),
    ROW("show-protocol", OPT_STRING, show, NULL, "NAME",
        "print the file of a built-in protocol and exit", JOB_ARG_TEXT),
    ROW("compat", OPT_STRING, compat, NULL, "legacy", "protocol 'legacy' and its output format",
        JOB_ARG_TEXT),
    {0},
};
static const struct option_row output_rows[] = {
    ROW("report", OPT_STRING, report, NULL, "FILE",
        "write an HTML page with transcripts and results", JOB_ARG_OUTPUT_PATH),
    ROW("second-turns", OPT_STRING, second_turns, NULL, "DIR",
        "--split train: instead of a report write training data, DIR/second/AGENT.jsonl: the "
        "protocol's second turn with the right answer, DIR/direct/AGENT.jsonl: the same questions "
        "and answers alone",
        JOB_ARG_OUTPUT_PATH),
    ROW("cache", OPT_BOOL, use_cache, "true", NULL,
        "reuse calls that are in --store, and store new ones"),
    SETUP_WORK_ROWS(struct options, setup),
    CLUSTER_ROWS(struct options, setup.cluster),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

/* Bytes of concurrent calls; bytes of a question with its transcript. */
enum { CALLS_WORK = 48 << 20, ITEM_WORK = 16384 };

/* What a result was computed from: the agents' adapters; a task's questions, or a topic with its
 * choices; the team's file, personas and protocol. Takes ownership of `data`. */
static json_t *manifest_of(const struct options *o, struct model *m, const struct team *t,
                           json_t *data, struct error *err) {
    const struct strings *personas = &o->request.personas;
    json_t *texts = json_array();
    for (int i = 0; i < personas->n; i++)
        json_array_append_new(texts, json_string_lossy(personas->v[i], strlen(personas->v[i])));
    if (personas->n > 0) manifest_add_json(data, "personas", texts);
    json_decref(texts);
    team_add_protocol_hash(t, data);
    int rc = o->team ? manifest_add_file(data, o->team, err) : OK;
    json_t *v = manifest_json(m, team_adapters_json(t), data, o->request.seed);
    if (rc == OK) return v;
    json_decref(v);
    return NULL;
}

/* one question */

static void print_legacy(const struct debate *d) {
    const struct transcript *o = &d->transcripts[0];
    printf("=== Debate Transcript ===\n");
    for (int i = 0; i < o->n; i++)
        printf("[A%d][R%d] %s\n", o->v[i].agent, o->v[i].round, o->v[i].text);
    printf("=== Vote Scores ===\n");
    for (int c = 0; c < o->n_candidates; c++) printf("%s: %.2f\n", o->candidates[c], o->scores[c]);
    printf("Final Answer: %s\n", o->answer < 0 ? "" : o->candidates[o->answer]);
}

static void print_topic(const struct options *o, const struct team *t, const struct task_item *it,
                        const struct debate *d, const struct vote *v) {
    const struct transcript *out = &d->transcripts[0];
    struct buf b = {0};
    debate_transcript(d, t->v, it, 0, v, &b);
    if (o->compat)
        print_legacy(d);
    else
        printf("=== Debate Transcript ===\n%sFinal Answer: %s\n", b.data,
               out->answer < 0 ? "none" : out->candidates[out->answer]);
    buf_release(&b);
}

/* running */

struct debate_session {
    const struct cli_options *c;
    const struct options *o;
    struct setup *st;
    struct team *team;
    struct engine_client engine_client;
    struct llm_client llm_client;
};

/* Prints a result with its manifest; takes ownership of `data`. */
static int result_print(const struct debate_session *s, json_t *result, json_t *data,
                        struct error *err) {
    json_t *manifest = manifest_of(s->o, s->st->m, s->team, data, err);
    json_t *v = json_copy(result);
    if (manifest) json_object_set_new(v, "manifest", manifest);
    cli_print_json(v);
    return manifest ? OK : err->code;
}

static int task_result_print(const struct debate_session *s, const struct eval_task *b,
                             json_t *result, struct error *err) {
    json_t *data = json_object();
    int rc = eval_task_add_hashes(b, data, err);
    if (rc == OK) return result_print(s, result, data, err);
    json_decref(data);
    return rc;
}

static int topic_result_print(const struct debate_session *s, const struct task_item *topic,
                              const struct debate *d, double joules, struct error *err) {
    json_t *data = json_object(), *choices = json_array(),
           *transcript = debate_transcript_json(d, s->team->v, topic, 0);
    for (int i = 0; i < topic->n_choices; i++)
        json_array_append_new(choices,
                              json_string_lossy(topic->choices[i], strlen(topic->choices[i])));
    json_t *asked =
        json_pack("{s:o,s:o}", "question",
                  json_string_lossy(topic->question, strlen(topic->question)), "choices", choices);
    manifest_add_json(data, "topic", asked);
    energy_add_json(transcript, joules, d->prefilled + d->generated);
    int rc = result_print(s, transcript, data, err);
    json_decref(asked);
    json_decref(transcript);
    return rc;
}

static int task_run(struct debate_session *s, const struct eval_task *b, struct buf *page,
                    struct error *err) {
    double joules = energy_now();
    json_t *r = debate_request_run_task(&s->o->request, &s->llm_client, s->team, b, err);
    if (!r) return err->code;
    joules = energy_now() - joules;
    if (s->c->json) energy_add_json(r, joules, 0); // the debate and its baselines
    int rc = s->c->json ? task_result_print(s, b, r, err) : OK;
    if (!s->c->json) debate_report_print(r, stdout);
    if (!s->c->json) cli_energy_log(joules);
    if (page) debate_report_html(r, page);
    json_decref(r);
    return rc;
}

static int tasks_run(struct debate_session *s, const struct debate_questions *q, struct buf *page,
                     struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < q->n_tasks; i++) rc = task_run(s, &q->tasks[i], page, err);
    return rc;
}

/* Debates the questions up to the second turns, which become training data. */
static int second_turns_run(struct debate_session *s, const struct debate_questions *q,
                            struct second_turns *out, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < q->n_tasks; i++)
        rc = second_turns_add(out, &s->llm_client, s->team, &q->tasks[i],
                              s->o->request.free_answers, err);
    return rc;
}

static int second_turns_print(const struct debate_session *s, const struct debate_questions *q,
                              const struct second_turns *turns, struct error *err) {
    const char *dir = s->o->second_turns;
    json_t *v = second_turns_json(turns, s->team), *data = json_object(), *agent;
    size_t i;
    int rc = OK;
    for (int k = 0; rc == OK && k < q->n_tasks; k++)
        rc = eval_task_add_hashes(&q->tasks[k], data, err);
    if (rc == OK && s->c->json) rc = result_print(s, v, json_incref(data), err);
    json_array_foreach (json_object_get(v, "agents"), i, agent) {
        if (s->c->json || rc != OK) break;
        const char *name = json_get_string(agent, "name");
        printf("%s: %lld conversations of %lld questions, %.1f %% of its first answers right: "
               "%s/second/%s.jsonl; control: %s/direct/%s.jsonl\n",
               name, (long long)turns->v[i].n, (long long)turns->n_questions,
               100 * json_get_number(agent, "first_correct"), dir, name, dir, name);
    }
    json_decref(data);
    json_decref(v);
    return rc;
}

static int second_turns_make(struct debate_session *s, const struct debate_questions *q,
                             struct error *err) {
    struct second_turns turns = {0};
    int rc = second_turns_run(s, q, &turns, err);
    if (rc == OK) rc = second_turns_write(&turns, s->team, s->o->second_turns, err);
    if (rc == OK) rc = second_turns_print(s, q, &turns, err);
    second_turns_release(&turns);
    return rc;
}

static int topic_run(struct debate_session *s, const struct debate_questions *q, struct buf *page,
                     struct error *err) {
    struct debate d;
    double joules = energy_now();
    int rc = debate_run(&s->llm_client, s->team->v, s->team->n, q->topic, 1, &s->team->options, &d,
                        NULL, err);
    joules = energy_now() - joules;
    if (rc == OK && s->c->json) rc = topic_result_print(s, q->topic, &d, joules, err);
    if (rc == OK && !s->c->json) print_topic(s->o, s->team, q->topic, &d, s->team->options.vote);
    if (rc == OK && page) {
        json_t *transcript = debate_transcript_json(&d, s->team->v, q->topic, 0);
        debate_transcript_html(transcript, page);
        json_decref(transcript);
    }
    debate_release(&d);
    return rc;
}

static int session_open(struct debate_session *s, struct error *err) {
    int rc = team_load_adapters(s->team, setup_load_adapter, s->st, err);
    if (rc == OK) rc = setup_engine(s->st, err);
    if (rc) return rc;
    s->engine_client = (struct engine_client){.engine = s->st->e, .model = s->st->m};
    s->llm_client = engine_client_as_llm(&s->engine_client);
    if (!s->o->use_cache) return OK;
    s->engine_client.store =
        s->o->setup.dry_run ? store_open(":memory:", err) : setup_store(s->st, err);
    return s->engine_client.store ? OK : err->code;
}

/* Counts the calls of the whole run, whose replies are made up, measures them, and prints the
 * estimate. With --cache, equal calls count once. */
static int work_print(struct debate_session *s, const struct debate_questions *q,
                      struct error *err) {
    struct engine_client *client = &s->engine_client;
    int rc = session_open(s, err);
    if (rc != OK) return rc;
    struct work_counter *counter = work_counter_new(s->st->e, s->st->m);
    client->run = work_counter_run;
    client->run_ctx = counter;
    bool muted = log_muted;
    log_muted = true; // a rehearsal shows no progress
    if (rc == OK && s->o->second_turns) {
        struct second_turns turns = {0};
        rc = second_turns_run(s, q, &turns, err);
        second_turns_release(&turns);
    }
    bool reports = s->o->request.rounds != 0 && !s->o->second_turns;
    for (int i = 0; rc == OK && reports && i < q->n_tasks; i++) {
        json_t *report =
            debate_request_run_task(&s->o->request, &s->llm_client, s->team, &q->tasks[i], err);
        rc = report ? OK : err->code;
        json_decref(report);
    }
    if (rc == OK && q->topic && s->o->request.rounds != 0) {
        struct debate d;
        rc = debate_run(&s->llm_client, s->team->v, s->team->n, q->topic, 1, &s->team->options, &d,
                        NULL, err);
        debate_release(&d);
    }
    log_muted = muted;
    if (rc == OK) rc = setup_print_work(s->st, counter, err);
    work_counter_free(counter);
    store_close(client->store);
    return rc;
}

static int debate(struct debate_session *s, const struct debate_questions *q, struct error *err) {
    struct buf page = {0}, *to = s->o->report ? &page : NULL;
    int rc = session_open(s, err);
    if (rc == OK && s->o->request.rounds == 0) {
        printf("[info] Rounds set to 0; skipping debate execution.\n");
    } else if (rc == OK && s->o->second_turns) {
        rc = second_turns_make(s, q, err);
    } else if (rc == OK) {
        if (to) html_page_open(to, "Debate");
        rc = q->n_tasks ? tasks_run(s, q, to, err) : topic_run(s, q, to, err);
        if (to) html_page_close(to);
        if (rc == OK && to) rc = file_write(s->o->report, page.data, page.len, err);
        if (rc == OK && !s->c->json && s->engine_client.n_calls > s->engine_client.n_computed)
            log_info("%lld of %lld calls were in the store",
                     (long long)(s->engine_client.n_calls - s->engine_client.n_computed),
                     (long long)s->engine_client.n_calls);
    }
    store_close(s->engine_client.store);
    buf_release(&page);
    return rc;
}

static int protocols_print(const struct options *o, struct error *err) {
    const char *text, *wanted = o->show ? renamed_value("protocol", o->show) : NULL;
    for (int i = 0; workflow_builtin(i, &text); i++) {
        const char *name = workflow_builtin(i, NULL);
        struct workflow *w = workflow_open(name, err);
        if (!w) return err->code;
        if (wanted && strcmp(wanted, name) == 0) fputs(text, stdout);
        if (!wanted) printf("%-20s %s\n", name, workflow_description(w));
        workflow_free(w);
        if (wanted && strcmp(wanted, name) == 0) return OK;
    }
    return o->show ? error_set(err, ERR_USAGE, "no protocol '%s'", o->show) : OK;
}

static int model_run(const struct cli_options *c, const struct options *o, const char *model,
                     struct team *t, const struct debate_questions *q, struct error *err) {
    struct setup_needs needs = {
        .engine = {.max_rows = 512,
                   .max_seqs = 128,
                   .max_len = team_max_tokens(q->tasks, q->n_tasks, INT32_MAX)},
        .adapters = &t->adapters,
        .work = CALLS_WORK + (size_t)q->n * ITEM_WORK,
        .estimates = true};
    struct setup st;
    if (q->topic) needs.engine.max_len = 0;
    int rc = setup_open(&st, c, &o->setup, model, &needs, err);
    if (rc == OK && st.m) {
        struct debate_session s = {.c = c, .o = o, .st = &st, .team = t};
        if (!st.m->tok)
            rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", st.path);
        else
            rc = o->setup.dry_run ? work_print(&s, q, err) : debate(&s, q, err);
    }
    return setup_close(&st, rc, err);
}

static int team_open(const struct options *o, struct team *t, struct error *err) {
    const struct debate_request *r = &o->request;
    const char *protocol = o->compat ? "legacy" : r->protocol ? r->protocol : "brief";
    if (cli_compat_check(o->compat, err) != OK) return err->code;
    if (o->team && (o->agents.n || r->personas.n || r->protocol || o->compat))
        return error_set(err, ERR_USAGE,
                         "'--team' names the agents and their protocol; leave out --agents, "
                         "--personas, --protocol and --compat");
    int rc = o->team ? team_read(t, o->team, err)
                     : team_from_flags(t, protocol, &o->agents, &r->personas, err);
    return rc == OK ? debate_request_apply(r, &t->options, err) : rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct debate_questions q = {0};
    struct team team = {0};
    if (o->protocols || o->show) return protocols_print(o, err);
    if (args->n != 1)
        return error_set(err, ERR_USAGE, "no model: name the base model of the agents");
    if (o->second_turns && (o->request.topic || o->report))
        return error_set(err, ERR_USAGE, "--second-turns is for --tasks, and writes no --report");
    int rc = team_open(o, &team, err);
    if (rc == OK) rc = debate_questions_open(&o->request, &q, err);
    if (rc == OK) rc = model_run(c, o, args->v[0], &team, &q, err);
    debate_questions_release(&q);
    team_release(&team);
    return rc;
}

const struct cli_command cmd_debate = {
    .name = "debate",
    .args = "MODEL --agents A B C | --team FILE",
    .summary = "agents answer, read each other, answer again, and vote",
    .about =
        "Agents answer a question, read each other's answers, answer again, and vote. An answer\n"
        "is chosen among the choices by exact probabilities; no text is parsed. With --tasks\n"
        "the report also has the vote of the first round, the best choice among first answers\n"
        "(oracle), self-consistency at equal generated and at equal total tokens, which agent\n"
        "switched to the answer of which other agent, and each agent's contribution.\n"
        "\n"
        "  shoal debate models/fry --agents g/critic g/explorer base --tasks route --n 500\n"
        "  shoal debate models/fry --agents g/critic base --topic 'pick the smallest of 4, 9, 2' "
        "\\\n"
        "      --choices 4 9 2\n"
        "  shoal debate models/fry --team team.yaml --tasks pick --n 500\n"
        "  shoal debate --show-protocol revise >mine.yaml",
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .job_store_option = "store",
    .main_options = "agents personas team topic tasks n protocol protocols rounds vote "
                    "max-tokens temperature report seed max-memory dry-run",
    .rows = team_rows,
    .more = (const struct option_table[]){{debate_request_rows, offsetof(struct options, request)},
                                          {output_rows, 0},
                                          {0}},
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 1,
    .run = run,
};
