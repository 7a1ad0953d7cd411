/*
 * cmd_agent: `shoal agent MODEL [QUESTION]`: a model answers in steps and uses tools.
 *
 * Steps go to stderr, answers to stdout; with --json one line per question has both. Without a
 * question, each line of stdin is the next message of one conversation.
 */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "cli/agent_measure.h"
#include "cli/prompts.h"
#include "cli/setup.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct agent_settings agent;
    char *file, *calibration;
    int64_t seed;
    bool list;
    struct agent_measure_options measure;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("list-tools", OPT_BOOL, list, NULL, 0, 0, NULL,
        "list the built-in tools, or with --mcp those of the agent, and exit"),
    ROW("agent", OPT_STRING, file, NULL, 0, 0, "FILE",
        "file of an agent, whose keys are options of this command; other options override it"),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15, "N", "seed of the sampling"),
    ROW("tasks", OPT_STRING, measure.tasks, NULL, 0, 0, "FILE",
        "measure the agent on questions: JSON Lines {question, answer, calls, …}"),
    ROW("n", OPT_INT, measure.n, "0", 0, 1e7, "N", "with --tasks: the first N questions; 0: all"),
    ROW("samples", OPT_INT, measure.samples, "1", 1, 1024, "N",
        "with --tasks: runs of each question, with different seeds"),
    ROW("grader", OPT_STRING, measure.grader, "exact", 0, 0, "NAME",
        "with --tasks: how answers are compared, as in 'shoal eval'"),
    ROW("out", OPT_STRING, measure.out, NULL, 0, 0, "FILE",
        "with --tasks: write every run with its steps, a line of JSON each"),
    ROW("traces", OPT_STRING, measure.traces, NULL, 0, 0, "FILE",
        "with --tasks: write the runs with right answers as training data"),
    ROW("demonstrations", OPT_STRING, measure.demonstrations, NULL, 0, 0, "FILE",
        "with --tasks: write the calls and replies of the questions as training data, and exit"),
    ROW("calibrate", OPT_STRING, measure.calibrate, NULL, 0, 0, "FILE",
        "with --tasks: write how probable right answers are by confidence, for --calibration"),
    ROW("calibration", OPT_STRING, calibration, NULL, 0, 0, "FILE",
        "report the confidence of an answer as the probability that it is right"),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

static int base_load(void *options, struct error *err) {
    struct options *o = options;
    if (!o->file) return OK;
    options_release(agent_setting_rows, &o->agent);
    int rc = agent_settings_read(&o->agent, o->file, err);
    if (rc != OK) options_default(agent_setting_rows, &o->agent); // the caller releases them
    return rc;
}

struct agent_session {
    const struct cli_options *c;
    struct setup setup;
    struct adapter_mix mix;
    struct strings paths; /* adapters of the mix and of the team */
    struct agent_tools tools;
    struct team team_file;
    struct agent_team team;
    struct agent_options options;
    struct agent_calibration calibration;
    json_t *messages; /* the conversation */
    uint64_t seed;    /* seed of the next question */
};

static void builtins_print(const struct cli_options *c) {
    for (const struct agent_builtin *b = agent_builtins; b->name; b++)
        if (c->json)
            cli_print_json(json_pack("{s:s,s:s,s:s?,s:b}", "name", b->name, "description",
                                     b->description, "needs", b->needs, "executes", b->executes));
        else
            printf("%-14s%s%s%s%s\n", b->name, b->description, b->needs ? " Needs " : "",
                   b->needs ? b->needs : "", b->needs ? "." : "");
}

/* Shows a step to people. */
static void step_print(void *ctx, const struct agent_run *r, const struct agent_step *s) {
    const struct agent_session *a = ctx;
    (void)r;
    struct buf text = {0};
    agent_step_text(s, &a->tools, &text);
    while (text.len && text.data[text.len - 1] == '\n') text.data[--text.len] = 0;
    if (text.len) log_info("%s", text.data);
    buf_release(&text);
}

static int answer(void *ctx, const char *question, struct error *err) {
    struct agent_session *a = ctx;
    json_array_append_new(a->messages, json_pack("{s:s,s:s}", "role", "user", "content", question));
    struct agent_run run = {.messages = a->messages, .seed = a->seed++};
    int rc = agent_run_all(&a->options, &run, 1, err);
    if (rc == OK && run.end == AGENT_FAILED) rc = error_set(err, ERR_MEMORY, "%s", run.error);
    if (rc == OK && a->c->json)
        cli_print_json(agent_run_json(&run, &a->tools));
    else if (rc == OK) {
        printf("%s\n", run.answer);
        log_info("%s, %d step%s, confidence %.3f, %.1f s", agent_end_names[run.end], run.n_steps,
                 run.n_steps == 1 ? "" : "s",
                 a->options.calibration ? run.calibrated : run.confidence, run.seconds);
        if (run.truncated) log_warn("the answer was cut off: raise --max-tokens");
    }
    fflush(stdout);
    if (rc == OK)
        json_array_append_new(a->messages,
                              json_pack("{s:s,s:s}", "role", "assistant", "content", run.answer));
    agent_run_release(&run);
    return rc;
}

/* The engine of the team follows when it is open. */
static int tools_open(struct agent_session *a, const struct options *o, struct error *err) {
    struct agent_tool_options t = {.messages = a->messages};
    if (o->agent.team) {
        if (team_read(&a->team_file, o->agent.team, err) != OK) return err->code;
        a->team.team = &a->team_file;
        t.team = &a->team;
    }
    return agent_settings_open_tools(&o->agent, t, &a->tools, err);
}

static int session_open(struct agent_session *a, const struct options *o, const char *model,
                        struct error *err) {
    struct setup_needs w = {.engine = {.max_rows = ENGINE_DEFAULT_ROWS,
                                       .max_seqs = o->measure.tasks ? AGENT_TASKS_AT_ONCE : 1},
                            .adapters = &a->paths};
    for (int i = 0; i < a->mix.paths.n; i++) strings_add(&a->paths, a->mix.paths.v[i]);
    for (int i = 0; i < a->team_file.adapters.n; i++)
        strings_add(&a->paths, a->team_file.adapters.v[i]);
    int rc = setup_open(&a->setup, a->c, &o->setup, model, &w, err);
    if (rc != OK || !a->setup.m) return rc;
    rc = adapter_mix_open(&a->mix, setup_load_adapter, &a->setup, err);
    if (rc == OK) rc = team_load_adapters(&a->team_file, setup_load_adapter, &a->setup, err);
    if (rc == OK) rc = setup_engine(&a->setup, err);
    if (rc != OK) return rc;
    a->team.engine = a->setup.e;
    a->team.model = a->setup.m;
    struct engine_request mixed = {0};
    adapter_mix_apply(&a->mix, &mixed);
    a->options.model = a->setup.m;
    a->options.engine = a->setup.e;
    a->options.adapter = mixed.adapter;
    a->options.mix = mixed.mix;
    a->options.n_mix = mixed.n_mix;
    return OK;
}

/* The tools of the agent, with those of its MCP servers. */
static int tools_print(const struct cli_options *c, const struct options *o, struct error *err) {
    struct agent_session a = {.c = c};
    int rc = tools_open(&a, o, err);
    for (int i = 0; rc == OK && i < a.tools.n; i++) {
        const struct agent_tool *t = &a.tools.v[i];
        if (c->json)
            cli_print_json(json_pack("{s:s,s:s,s:O}", "name", t->name, "description",
                                     t->description, "parameters", t->parameters));
        else
            printf("%s: %s\n", t->name, t->description);
    }
    agent_tools_release(&a.tools);
    team_release(&a.team_file);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (o->list && o->agent.mcp.n) return tools_print(c, o, err);
    if (o->list) {
        builtins_print(c);
        return OK;
    }
    if (!args->n) return error_set(err, ERR_USAGE, "no model: name the model of the agent");
    if (o->measure.tasks && args->n > 1)
        return error_set(err, ERR_USAGE, "--tasks has its own questions: leave out the question");
    struct agent_session a = {.c = c, .messages = json_array(), .seed = (uint64_t)o->seed};
    a.options = (struct agent_options){.tools = &a.tools,
                                       .on_step = c->json || o->measure.tasks ? NULL : step_print,
                                       .on_step_ctx = &a};
    int rc = agent_settings_apply(&o->agent, &a.options, err);
    if (rc == OK && o->calibration) {
        rc = agent_calibration_read(o->calibration, &a.calibration, err);
        a.options.calibration = &a.calibration;
    }
    if (rc == OK) rc = tools_open(&a, o, err);
    if (rc == OK) rc = adapter_mix_parse(&a.mix, o->agent.adapter, err);
    if (rc == OK) {
        rc = session_open(&a, o, args->v[0], err);
        if (rc == OK && a.setup.e && o->measure.tasks)
            rc = agent_measure(c, &o->measure, &a.options, (uint64_t)o->seed, err);
        else if (rc == OK && a.setup.e)
            rc = args->n > 1 ? answer(&a, args->v[1], err) : prompts_each_line(answer, &a, err);
        rc = setup_close(&a.setup, rc, err);
    }
    adapter_mix_release(&a.mix);
    agent_tools_release(&a.tools);
    team_release(&a.team_file);
    strings_release(&a.paths);
    json_decref(a.messages);
    return rc;
}

const struct cli_command cmd_agent = {
    .name = "agent",
    .args = "MODEL [QUESTION]",
    .summary = "a model answers in steps and uses tools",
    .about =
        "In each step the model either calls a tool and reads its result, or answers. It chooses\n"
        "by exact probabilities and writes arguments under the tool's JSON schema, so that no\n"
        "call is malformed. Tools that execute code or use the network are off until --tools\n"
        "names them; code runs in the sandbox. --mcp adds the tools of MCP servers. Without a\n"
        "question, each line of stdin is the next message of a conversation (docs/AGENT.md).\n"
        "\n"
        "  shoal agent models/fry --list-tools\n"
        "  shoal agent model.gguf --tools calculator '123456 * 789 = ?'\n"
        "  shoal agent model.gguf --tools knowledge --knowledge notes.db 'どこで買えますか？'\n"
        "  shoal agent model.gguf --tools memory_search,memory_write --memory me.db 'I am Ann.'\n"
        "  shoal agent model.gguf --tools python,read_file --root data 'Sum column 2 of a.csv'\n"
        "  shoal agent models/fry --agent examples/agent.yaml 'sort: k b x'\n"
        "  shoal agent model.gguf --tools calculator --json < questions.txt",
    .main_options = "tools list-tools agent adapter system knowledge memory team mcp max-steps "
                    "max-seconds max-tokens temperature seed max-memory tasks",
    .rows = rows,
    .more =
        (const struct option_table[]){{agent_setting_rows, offsetof(struct options, agent)}, {0}},
    .base_load = base_load,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 2,
    .run = run,
};
