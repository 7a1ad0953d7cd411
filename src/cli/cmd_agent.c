/*
 * cmd_agent: `shoal agent MODEL [QUESTION]`: a model answers in steps and uses tools.
 *
 * Steps go to stderr, answers to stdout; with --json one line per question has both. Without a
 * question, each line of stdin is the next message of one conversation.
 */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "cli/agent_measure.h"
#include "cli/generate.h"
#include "cli/prompts.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    char *adapter, *system, *tools, *knowledge, *root, *form, *calibration;
    struct strings hosts;
    int64_t seed, max_steps, max_tokens, thought_tokens, top_k;
    double temperature, top_p, min_p, max_seconds, tool_seconds;
    bool list, sample_calls;
    struct agent_measure_options measure;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("tools", OPT_STRING, tools, "calculator,clock", 0, 0, "LIST",
        "tools that the agent may call, separated by commas (--list-tools lists them)"),
    ROW("list-tools", OPT_BOOL, list, NULL, 0, 0, NULL, "list the built-in tools and exit"),
    ROW("adapter", OPT_STRING, adapter, NULL, 0, 0, "DIR",
        "adapter, or a weighted sum of several, such as A=0.7,B=0.3"),
    ROW("system", OPT_STRING, system, NULL, 0, 0, "TEXT", "system message"),
    ROW("knowledge", OPT_STRING, knowledge, NULL, 0, 0, "DB",
        "database of 'shoal knowledge' for the tool knowledge"),
    ROW("root", OPT_STRING, root, NULL, 0, 0, "DIR",
        "folder that the tools read_file and list_files may read"),
    ROW("allow-host", OPT_LIST, hosts, NULL, 0, 0, "HOST", "hosts that the tool http_get may ask"),
    ROW("max-steps", OPT_INT, max_steps, "8", 1, 64, "N",
        "maximum calls; then the agent must answer"),
    ROW("max-seconds", OPT_FLOAT, max_seconds, "180", 0, 1e6, "S",
        "seconds after which the agent must answer (0: no limit)"),
    ROW("tool-seconds", OPT_FLOAT, tool_seconds, "10", 0.1, 3600, "S",
        "maximum seconds of one call that executes code"),
    ROW("max-tokens", OPT_INT, max_tokens, "512", 1, 65536, "N",
        "maximum tokens of an answer, and of the arguments of a call"),
    ROW("thought-tokens", OPT_INT, thought_tokens, "128", 1, 65536, "N",
        "maximum tokens of a thought in the form react"),
    ROW("form", OPT_STRING, form, "auto", 0, 0, "FORM",
        "form of the calls: native, that of the model's chat template; react, lines of text; "
        "auto: native if the template knows tools"),
    ROW("temperature", OPT_FLOAT, temperature, "0", 0, 100, "X",
        "sampling temperature of thoughts and answers, and of calls with --sample-calls"),
    ROW("sample-calls", OPT_BOOL, sample_calls, NULL, 0, 0, NULL,
        "sample calls too, instead of taking the most probable ones"),
    ROW("top-k", OPT_INT, top_k, "0", 0, 1e6, "K",
        "sample from the K most probable tokens; 0: all"),
    ROW("min-p", OPT_FLOAT, min_p, "0", 0, 1, "P",
        "exclude tokens below P times the highest probability"),
    ROW("top-p", OPT_FLOAT, top_p, "0.9", 0, 1, "P",
        "sample from the smallest set with probability P"),
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

struct agent_session {
    const struct cli_options *c;
    struct setup setup;
    struct adapter_mix mix;
    struct agent_tools tools;
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
            printf("%-12s%s%s%s%s\n", b->name, b->description, b->needs ? " Needs " : "",
                   b->needs ? b->needs : "", b->needs ? "." : "");
}

static int form_parse(const char *text, enum agent_form *out, struct error *err) {
    static const char *const names[] = {"auto", "native", "react"};
    for (int i = 0; i < (int)ARRAY_LEN(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *out = (enum agent_form)i;
            return OK;
        }
    return error_set(err, ERR_USAGE, "there is no form '%s': it is auto, native or react", text);
}

/* Shows a step to people. */
static void step_print(void *ctx, const struct agent_run *r, const struct agent_step *s) {
    const struct agent_session *a = ctx;
    (void)r;
    if (*s->thought) log_info("thought: %s", s->thought);
    if (s->tool < 0) return;
    char *arguments = json_dumps(s->arguments, 0);
    log_info("call: %s %s (probability %.3f)", a->tools.v[s->tool].name, arguments,
             s->prob[s->tool]);
    log_info("result: %s", s->observation);
    free(arguments);
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

static int tools_open(struct agent_session *a, const struct options *o, struct error *err) {
    const struct agent_tool_options t = {
        .knowledge = o->knowledge, .root = o->root, .hosts = &o->hosts, .seconds = o->tool_seconds};
    return *o->tools ? agent_tools_add_builtin(&a->tools, o->tools, &t, err) : OK;
}

static int session_open(struct agent_session *a, const struct options *o, const char *model,
                        struct error *err) {
    struct setup_needs w = {.engine = {.max_rows = ENGINE_DEFAULT_ROWS,
                                       .max_seqs = o->measure.tasks ? AGENT_TASKS_AT_ONCE : 1},
                            .adapters = &a->mix.paths};
    int rc = setup_open(&a->setup, a->c, &o->setup, model, &w, err);
    if (rc != OK || !a->setup.m) return rc;
    rc = adapter_mix_open(&a->mix, &a->setup, err);
    if (rc == OK) rc = setup_engine(&a->setup, err);
    if (rc != OK) return rc;
    struct engine_request mixed = {0};
    adapter_mix_apply(&a->mix, &mixed);
    a->options.model = a->setup.m;
    a->options.engine = a->setup.e;
    a->options.adapter = mixed.adapter;
    a->options.mix = mixed.mix;
    a->options.n_mix = mixed.n_mix;
    return OK;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (o->list) {
        builtins_print(c);
        return OK;
    }
    if (!args->n) return error_set(err, ERR_USAGE, "no model: name the model of the agent");
    if (o->measure.tasks && args->n > 1)
        return error_set(err, ERR_USAGE, "--tasks has its own questions: leave out the question");
    struct agent_session a = {.c = c, .messages = json_array(), .seed = (uint64_t)o->seed};
    a.options = (struct agent_options){.system = o->system,
                                       .tools = &a.tools,
                                       .max_steps = (int)o->max_steps,
                                       .max_seconds = o->max_seconds,
                                       .max_tokens = (int32_t)o->max_tokens,
                                       .thought_tokens = (int32_t)o->thought_tokens,
                                       .sampling = {.temperature = (float)o->temperature,
                                                    .top_k = (int32_t)o->top_k,
                                                    .top_p = (float)o->top_p,
                                                    .min_p = (float)o->min_p},
                                       .sample_calls = o->sample_calls,
                                       .on_step = c->json || o->measure.tasks ? NULL : step_print,
                                       .on_step_ctx = &a};
    int rc = form_parse(o->form, &a.options.form, err);
    if (rc == OK && o->calibration) {
        rc = agent_calibration_read(o->calibration, &a.calibration, err);
        a.options.calibration = &a.calibration;
    }
    if (rc == OK) rc = tools_open(&a, o, err);
    if (rc == OK) rc = adapter_mix_parse(&a.mix, o->adapter, err);
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
        "names them; code runs in the sandbox. Without a question, each line of stdin is the\n"
        "next message of a conversation (docs/AGENT.md).\n"
        "\n"
        "  shoal agent models/fry --list-tools\n"
        "  shoal agent model.gguf --tools calculator '123456 * 789 = ?'\n"
        "  shoal agent model.gguf --tools knowledge --knowledge notes.db 'どこで買えますか？'\n"
        "  shoal agent model.gguf --tools python,read_file --root data 'Sum column 2 of a.csv'\n"
        "  shoal agent model.gguf --tools calculator --json < questions.txt",
    .main_options = "tools list-tools adapter system knowledge root allow-host max-steps "
                    "max-seconds max-tokens form temperature seed max-memory dry-run record tasks",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 2,
    .run = run,
};
