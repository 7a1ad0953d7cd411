/*
 * cmd_debate: `shoal debate`: agents answer questions together. With --tasks it measures what the
 * debate gains over each agent alone, the vote of the first round, the best choice among first
 * answers, and self-consistency of the best agent at equal cost; and the contribution of each
 * agent.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "cli/setup.h"
#include "grade/grade.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct strings agents, personas, choices;
    char *team, *topic, *tasks, *data, *vote, *protocol, *show, *compat, *credit, *report, *grader;
    int64_t rounds, n, shots, seed, max_tokens, samples;
    double temperature, seconds;
    bool chain_of_thought, use_cache, protocols;
};
#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, __VA_ARGS__ }
static const struct option_row rows[] = {
    ROW("agents", OPT_LIST, agents, NULL, 0, 0, "DIR",
        "adapters of the agents; 'base' is the base model", JOB_ARG_BUILTIN_OR_PATH),
    {"adapters", OPT_ALIAS, 0, "agents"},
    {"adapter", OPT_ALIAS, 0, "agents"},
    {"temp", OPT_ALIAS, 0, "temperature"},
    ROW("personas", OPT_LIST, personas, NULL, 0, 0, "TEXT", "the agents' system prompts",
        JOB_ARG_TEXT),
    ROW("team", OPT_STRING, team, NULL, 0, 0, "FILE",
        "file with agents, protocol and settings; --rounds, --vote, --temperature and --max-tokens "
        "override it",
        JOB_ARG_INPUT_PATH),
    ROW("topic", OPT_STRING, topic, NULL, 0, 0, "TEXT", "one question", JOB_ARG_TEXT),
    ROW("choices", OPT_LIST, choices, NULL, 0, 0, "TEXT",
        "possible answers to --topic; without it, any answer", JOB_ARG_TEXT),
    ROW("grader", OPT_STRING, grader, NULL, 0, 0, "NAME",
        "without --choices: extracts and compares answers: number, math, letter …", JOB_ARG_TEXT),
    ROW("tasks", OPT_STRING, tasks, NULL, 0, 0, "LIST",
        "tasks instead of --topic, as for 'shoal eval': names, JSONL files, recipes; fry; or tasks "
        "that need communication: largest, earliest",
        JOB_ARG_BUILTIN_OR_PATH_LIST),
    ROW("data", OPT_STRING, data, NULL, 0, 0, "DIR", "folder of the files of named tasks",
        JOB_ARG_INPUT_PATH),
    ROW("n", OPT_INT, n, "200", 0, 1e6, "N", "questions per task; 0: the default of 'shoal eval'"),
    ROW("shots", OPT_INT, shots, "0", 0, 1000, "N",
        "few-shot examples, from the task's dev or train file"),
    ROW("protocol", OPT_STRING, protocol, NULL, 0, 0, "NAME",
        "built-in protocol (default brief), or a workflow file", JOB_ARG_BUILTIN_OR_PATH),
    ROW("protocols", OPT_BOOL, protocols, NULL, 0, 0, NULL, "list the built-in protocols and exit"),
    ROW("show-protocol", OPT_STRING, show, NULL, 0, 0, "NAME",
        "print the file of a built-in protocol and exit", JOB_ARG_TEXT),
    ROW("compat", OPT_STRING, compat, NULL, 0, 0, "legacy",
        "protocol 'legacy' and its output format", JOB_ARG_TEXT),
    ROW("rounds", OPT_INT, rounds, "-1", -1, 64, "N",
        "maximum rounds (-1: the protocol's); 0: check the arguments and exit"),
    ROW("vote", OPT_STRING, vote, NULL, 0, 0, "NAME",
        "majority, confidence, logprob, borda or quorum (default: the protocol's)", JOB_ARG_TEXT),
    ROW("chain-of-thought", OPT_BOOL, chain_of_thought, "true", 0, 0, NULL,
        "write a chain of thought before the answer"),
    ROW("max-tokens", OPT_INT, max_tokens, "0", 0, 65536, "N",
        "maximum tokens of the message of a turn (0: the protocol's)"),
    ROW("temperature", OPT_FLOAT, temperature, "-1", -1, 100, "X",
        "sampling temperature of the messages (-1: the protocol's)"),
    ROW("max-seconds", OPT_FLOAT, seconds, "0", 0, 1e9, "S",
        "seconds after which no agent starts a turn; the vote counts the answers until then (0: "
        "the "
        "protocol's)"),
    ROW("samples", OPT_INT, samples, "32", 0, 256, "N",
        "--tasks: maximum samples of self-consistency; 0: none"),
    ROW("credit", OPT_STRING, credit, "vote", 0, 0, "NAME",
        "--tasks: Shapley, Banzhaf and leave-one-out values for the first vote (vote) or the whole "
        "debate (debate); or none",
        JOB_ARG_TEXT),
    ROW("report", OPT_STRING, report, NULL, 0, 0, "FILE",
        "write an HTML page with transcripts and results", JOB_ARG_OUTPUT_PATH),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of questions, orders and samples"),
    ROW("cache", OPT_BOOL, use_cache, "true", 0, 0, NULL,
        "reuse calls that are in --store, and store new ones"),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

/* Bytes of concurrent calls; bytes of a question with its transcript; transcripts in a report. */
enum { CALLS_WORK = 48 << 20, ITEM_WORK = 16384, MAX_SHOWN = 5 };
enum { PAGES_TOKENS = 65536 }; /* tokens of the KV cache, or more for long calls */

struct debate_questions {
    struct task_item *topic; /* a single question, or NULL */
    struct eval_task *tasks;
    int n_tasks;
    int64_t n; /* number of questions */
};

static int topic_init(const struct options *o, struct debate_questions *q, struct error *err) {
    if (o->choices.n == 1 || o->choices.n > EVAL_MAX_CHOICES)
        return error_set(err, ERR_USAGE, "--choices requires 2 to %d answers", EVAL_MAX_CHOICES);
    q->n = 1;
    q->topic = xcalloc(1, sizeof *q->topic);
    *q->topic =
        (struct task_item){.question = xstrdup(o->topic), .n_choices = o->choices.n, .correct = -1};
    for (int i = 0; i < o->choices.n; i++) q->topic->choices[i] = xstrdup(o->choices.v[i]);
    return OK;
}

static int questions_load(const struct options *o, struct debate_questions *q, struct error *err) {
    const struct eval_task_options bo = {.dir = o->data,
                                         .n = o->n,
                                         .shots = o->shots,
                                         .split = SPLIT_TEST,
                                         .seed = (uint64_t)o->seed};
    if (!o->topic == !o->tasks)
        return error_set(err, ERR_USAGE, "give one of --topic TEXT and --tasks LIST");
    if (o->topic && (o->data || o->shots))
        return error_set(err, ERR_USAGE, "--%s is for --tasks", o->data ? "data" : "shots");
    if (o->topic) return topic_init(o, q, err);
    if (o->grader || o->choices.n)
        return error_set(err, ERR_USAGE, "--%s is for --topic; tasks have their own",
                         o->grader ? "grader" : "choices");
    int rc = eval_tasks_open(o->tasks, &bo, &q->tasks, &q->n_tasks, err);
    for (int i = 0; i < q->n_tasks; i++) q->n += q->tasks[i].n_questions;
    return rc;
}

static void questions_release(struct debate_questions *q) {
    for (int i = 0; i < q->n_tasks; i++) eval_task_release(&q->tasks[i]);
    free(q->tasks);
    if (q->topic) task_item_release(q->topic);
    free(q->topic);
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

static void print_topic(const struct cli_options *c, const struct options *o, const struct team *t,
                        const struct task_item *it, const struct debate *d, const struct vote *v) {
    const struct transcript *out = &d->transcripts[0];
    struct buf b = {0};
    debate_transcript(d, t->v, it, 0, v, &b);
    if (c->json)
        cli_print_json(debate_transcript_json(d, t->v, it, 0));
    else if (o->compat)
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
    struct progress bar;
};

static int task_run(struct debate_session *s, const struct eval_task *b, struct buf *page,
                    struct error *err) {
    struct debate_options o;
    const struct team *t = s->team;
    if (debate_options_for_task(b, &t->options, &o, err) != OK) return err->code;
    const struct debate_report_options needs = {.name = b->name,
                                                .samples = (int)s->o->samples,
                                                .temperature = 0.7f,
                                                .max_tokens = o.max_tokens ? o.max_tokens : 24,
                                                .credit_debate =
                                                    strcmp(s->o->credit, "debate") == 0,
                                                .credit_none = strcmp(s->o->credit, "none") == 0,
                                                .n_transcripts = MAX_SHOWN};
    struct task_item *items = eval_task_items(b);
    json_t *r = debate_report_run(&s->llm_client, t->v, t->n, items, (int)b->n_questions, &o,
                                  &needs, &s->bar, err);
    task_items_release(items, b->n_questions);
    if (!r) return err->code;
    if (s->c->json)
        cli_print_json(json_incref(r));
    else
        debate_report_print(r, stdout);
    if (page) debate_report_html(r, page);
    json_decref(r);
    return OK;
}

static int tasks_run(struct debate_session *s, const struct debate_questions *q, struct buf *page,
                     struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < q->n_tasks; i++) {
        const struct eval_task *b = &q->tasks[i];
        progress_start(&s->bar, b->name, b->n_questions * s->team->n * s->team->options.rounds);
        rc = task_run(s, b, page, err);
        progress_finish(&s->bar, NULL);
    }
    return rc;
}

static int topic_run(struct debate_session *s, const struct debate_questions *q, struct buf *page,
                     struct error *err) {
    struct debate d;
    int rc = debate_run(&s->llm_client, s->team->v, s->team->n, q->topic, 1, &s->team->options, &d,
                        NULL, err);
    if (rc == OK) print_topic(s->c, s->o, s->team, q->topic, &d, s->team->options.vote);
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
    if (s->o->use_cache && !(s->engine_client.store = setup_store(s->st, err))) return err->code;
    s->llm_client = engine_client_as_llm(&s->engine_client);
    return OK;
}

static int debate(struct debate_session *s, const struct debate_questions *q, struct error *err) {
    struct buf page = {0}, *to = s->o->report ? &page : NULL;
    int rc = session_open(s, err);
    if (rc == OK && s->o->rounds == 0) {
        printf("[info] Rounds set to 0; skipping debate execution.\n");
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

/* The engine runs many sequences at once, but they need not all reach max_len: the KV cache has
 * pages for fewer tokens. */
static void engine_fit(struct setup *st, const struct debate_questions *q) {
    struct engine_options *e = &st->engine;
    if (q->n_tasks) e->max_len = MIN(e->max_len, st->m->config.max_seq_len);
    if (e->n_pages == 0) e->n_pages = kv_cache_pages_for(MAX(PAGES_TOKENS, 2 * e->max_len));
}

static int model_run(const struct cli_options *c, const struct options *o, const char *model,
                     struct team *t, const struct debate_questions *q, struct error *err) {
    struct setup_needs needs = {
        .engine = {.max_rows = 512,
                   .max_seqs = 128,
                   .max_len = team_max_tokens(q->tasks, q->n_tasks, INT32_MAX)},
        .adapters = &t->adapters,
        .work = CALLS_WORK + (size_t)q->n * ITEM_WORK};
    struct setup st;
    if (q->topic) needs.engine.max_len = 0;
    int rc = setup_open(&st, c, &o->setup, model, &needs, err);
    if (rc == OK && st.m) {
        struct debate_session s = {.c = c, .o = o, .st = &st, .team = t};
        engine_fit(&st, q);
        rc = st.m->tok ? debate(&s, q, err)
                       : error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", st.path);
    }
    return setup_close(&st, rc, err);
}

/* Flags override the team's file. */
static int flags_apply(const struct options *o, struct debate_options *d, struct error *err) {
    d->seed = (uint64_t)o->seed;
    d->chain_of_thought &= o->chain_of_thought;
    if (o->rounds > 0) d->rounds = (int)o->rounds;
    if (o->temperature >= 0) d->temperature = (float)o->temperature;
    if (o->max_tokens) d->max_tokens = (int32_t)o->max_tokens;
    if (o->seconds > 0) d->seconds = o->seconds;
    if (o->vote && !(d->vote = vote_parse(o->vote, err))) return err->code;
    if (o->grader && !(d->grader = grader_find(o->grader, err))) return err->code;
    return OK;
}

static int team_open(const struct options *o, struct team *t, struct error *err) {
    const char *protocol = o->compat ? "legacy" : o->protocol ? o->protocol : "brief";
    if (cli_compat_check(o->compat, err) != OK) return err->code;
    if (o->team && (o->agents.n || o->personas.n || o->protocol || o->compat))
        return error_set(err, ERR_USAGE,
                         "'--team' names the agents and their protocol; leave out --agents, "
                         "--personas, --protocol and --compat");
    int rc = o->team ? team_read(t, o->team, err)
                     : team_from_flags(t, protocol, &o->agents, &o->personas, err);
    return rc == OK ? flags_apply(o, &t->options, err) : rc;
}

static int credit_check(const char *name, struct error *err) {
    static const char *const known[] = {"vote", "debate", "none"};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strcmp(name, known[i]) == 0) return OK;
    return error_set(err, ERR_USAGE, "no credit of a '%s'; there are vote, debate and none", name);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct debate_questions q = {0};
    struct team team = {0};
    if (o->protocols || o->show) return protocols_print(o, err);
    if (args->n != 1)
        return error_set(err, ERR_USAGE, "no model: name the base model of the agents");
    int rc = credit_check(o->credit, err);
    if (rc == OK) rc = team_open(o, &team, err);
    if (rc == OK) rc = questions_load(o, &q, err);
    if (rc == OK) rc = model_run(c, o, args->v[0], &team, &q, err);
    questions_release(&q);
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
                    "max-tokens temperature report seed dry-run",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 1,
    .run = run,
};
