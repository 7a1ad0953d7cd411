/*
 * agent: a model that answers in steps and uses tools (ReAct, Yao et al. 2023).
 *
 * A step is a thought, which may be empty, and then either a call of one tool, whose result the
 * model reads in the next step, or the answer. The model chooses among all tools and answering by
 * the exact probabilities of the texts that begin them, and writes the arguments of the chosen tool
 * under a grammar of its JSON schema. So a call can be neither malformed nor of an unknown tool, at
 * any size of the model; its arguments can still be wrong.
 *
 * Many runs advance together: their requests of one moment are one batch of the engine. A run
 * depends on its messages, the model, adapters, tools, results of tools and options only, except
 * for the limit of time.
 *
 * Tools that execute code exist only if the caller names them, and run in the sandbox; servers of
 * tools that the caller names run outside of it. The result of a tool is bounded and cleaned text;
 * it is never a part of the template.
 *
 * Threads: one thread at a time uses a list of tools; agent_run uses the engine as its owner.
 */
#ifndef SHOAL_AGENT_H
#define SHOAL_AGENT_H

#include "engine/engine.h"
#include "grade/grade.h"
#include "memory/memory.h"
#include "swarm/swarm.h"

/* tools */

enum { AGENT_MAX_TOOLS = 64, AGENT_MAX_RESULT = 16 << 10 /* bytes of a result; the rest is cut */ };
struct agent_tool {
    char *name, *description;
    json_t *parameters; /* JSON schema of the arguments, an object */
    /* Appends the result as text. An error is a result as well: the model reads its message. The
     * grammar enforces the schema of the arguments. */
    int (*call)(void *ctx, const json_t *arguments, struct buf *out, struct error *err);
    /* Sets the tokens of the model that the tool used since the last time. May be NULL: none. */
    void (*spent)(void *ctx, int64_t *prefilled, int64_t *generated);
    void (*release)(void *ctx); /* may be NULL */
    void *ctx;
};
struct agent_tools {
    struct agent_tool *v;
    int n;
};
/* Adds a tool and takes ownership of its members; after an error they are released. ERR_USAGE: the
 * name is not 1 to 64 letters, digits, _ and -, or is taken; too many tools. ERR_FORMAT: the schema
 * is not one that the grammar supports. */
int agent_tools_add(struct agent_tools *t, const struct agent_tool *tool, struct error *err);
void agent_tools_release(struct agent_tools *t);
/* Index of a tool, or -1. */
int agent_tools_find(const struct agent_tools *t, const char *name);
/* The list as in a chat request: [{type, function: {name, description, parameters}}]. */
json_t *agent_tools_json(const struct agent_tools *t);
/* Appends the result of a call, or its error as text, cleaned and cut to AGENT_MAX_RESULT;
 * returns whether it succeeded. */
bool agent_tool_call(const struct agent_tool *tool, const json_t *arguments, struct buf *out);

/* A team (swarm/swarm.h) that the tools `ask` and `debate` call; its adapters are loaded. */
struct agent_team {
    const struct team *team;
    struct engine *engine;
    struct model *model;
    /* Replaces engine_run, as in struct agent_options. */
    int (*run)(void *ctx, struct engine_request *reqs, int n, struct error *err);
    void *run_ctx;
};

/* Inputs of the built-in tools. Strings are copied. */
struct agent_tool_options {
    const char *knowledge;  /* knowledge base of the tool `knowledge` */
    const char *memory;     /* store with the memories, for memory_search, memory_write */
    const char *user;       /* whose memories; NULL: "me" */
    const json_t *messages; /* the conversation, whose user messages memory_write reads at each
                               call; NULL: it remembers nothing; borrowed */
    const struct embedder *embedder; /* for knowledge and memories; NULL: words only; borrowed */
    const struct agent_team *team;   /* of `ask` and `debate`; borrowed, also its members, which may
                                        be set until the first call */
    const char *root;                /* folder that `read_file` and `list_files` may read */
    const struct strings *hosts;     /* hosts that `http_get` may ask */
    double seconds;                  /* limit of one call that executes code; 0: 10 */
};
/*
 * Adds the built-in tools of a comma-separated list:
 *
 *   calculator     {expression}: the exact value of an arithmetic expression, also with units
 *   clock          {}: date, time and day of the week, in UTC
 *   knowledge      {query}: passages of the knowledge base
 *   memory_search  {query}: memories of the user
 *   memory_write   {fact}: remembers a fact that the user's own messages state
 *   ask            {question}: the answer of the team
 *   debate         {question, choices}: the choice of the team, after its debate
 *   read_file      {path}: the text of a file below `root`
 *   list_files     {path}: the files and folders of a folder below `root`
 *   python         {code}: runs Python in the sandbox; its output
 *   sh             {command}: runs a shell command in the sandbox; its output
 *   check_code     {language, code}: whether Python, C, JavaScript or shell code has syntax errors
 *   http_get       {url}: the text of a page of an allowed host
 *
 * The sandbox has no network, and of the machine's files sees only the system's programs.
 * ERR_USAGE: an unknown name, or a tool without the option that it needs; the message names it.
 * ERR_STATE, ERR_MISSING: no sandbox can be made here.
 */
int agent_tools_add_builtin(struct agent_tools *t, const char *list,
                            const struct agent_tool_options *o, struct error *err);
/* The names and descriptions of the built-in tools, in order; ends with a row whose name is NULL.
 * needs: the option of struct agent_tool_options that a tool needs, in words of the command line,
 * or NULL. executes: the tool executes code or uses the network. */
struct agent_builtin {
    const char *name, *description, *needs;
    bool executes;
};
extern const struct agent_builtin agent_builtins[];

/* Servers of the Model Context Protocol (mcp/mcp.h), whose tools an agent may call. */
struct agent_mcp_options {
    /* "[NAME=]TARGET": a command line or an address. NAME is 1 to 32 letters, digits, _ and -; by
     * default "mcp", and then "mcp2" and so on. */
    const struct strings *servers;
    /* "NAME=HEADER: VALUE" for requests to the server NAME. ${VARIABLE} in VALUE is the value of a
     * variable of the environment; the value of Authorization must have one. NULL: none. */
    const struct strings *headers;
    const struct strings *env;  /* "NAME=VARIABLE", which the program NAME gets; NULL: none */
    const struct strings *only; /* globs of tools to add, by their new names; NULL or empty: all */
    double seconds;             /* limit of a request; 0: 60 */
};
/*
 * Connects to the servers and adds their tools as NAME__TOOL, in which every character that a name
 * must not have is '_', and which gets a number if it is taken. A tool's description is cleaned and
 * cut. If the grammar does not support its schema, its arguments can be any JSON object, and the
 * schema is a part of its description. Tools that cannot be added, and those after AGENT_MAX_TOOLS,
 * are left out with a warning that names them.
 *
 * A server runs until the last of its tools is released. Errors are those of mcp_open, and
 * ERR_USAGE for wrong options; tools that were added before stay in the list.
 */
int agent_tools_add_mcp(struct agent_tools *t, const struct agent_mcp_options *o,
                        struct error *err);

/* Appends the exact value of an arithmetic expression, such as "1/3 ≈ 0.333333333333333" or
 * "5.08 cm". It may have numbers, + - * / ^ mod, percents, parentheses, abs, min, max, round,
 * floor, ceil, sqrt, gcd, lcm, !, units, and `in` or `to` a unit. Full-width characters, × ÷ − and
 * thousands separators are understood. ERR_USAGE: the message has the mistake and its position. The
 * cost is bounded. */
int agent_calculate(const char *expression, struct buf *out, struct error *err);

/* runs */

/* How the model writes calls. AGENT_NATIVE: in the form of its chat template, which must know
 * tools. AGENT_REACT: as lines of text, "Thought:", "Action:", "Arguments:", "Answer:", which the
 * system message explains. */
enum agent_form { AGENT_AUTO, AGENT_NATIVE, AGENT_REACT };

struct agent_step {
    char *thought;     /* may be "" */
    int tool;          /* index of the tool; -1: the step is the answer */
    json_t *arguments; /* NULL: the answer */
    char *observation; /* the result, as the model reads it; NULL: the answer */
    bool failed;       /* the tool returned an error */
    double *prob;      /* [n_tools + 1] exact probabilities of the choice; the last: answering,
                          or any other text */
    double seconds;    /* duration of the step, with its tool */
    int64_t prefilled, cached, generated; /* tokens */
};
enum agent_end {
    AGENT_RUNNING,
    AGENT_ANSWERED,
    AGENT_STEP_LIMIT, /* the answer was demanded after max_steps */
    AGENT_TIME_LIMIT, /* the answer was demanded after max_seconds */
    AGENT_FAILED,     /* the context has no room left; `error` has the remedy */
};
struct agent_run {
    const json_t *messages; /* the conversation; its last message has the role user; borrowed */
    uint64_t seed;

    /* results; agent_run_release frees them */
    struct agent_step *steps; /* [n_steps] */
    int n_steps;
    char *answer;         /* malloc'ed; NULL after AGENT_FAILED */
    json_t *conversation; /* {messages, tools}: the messages with the calls, their results and the
                             answer, as a chat request or a line of training data; tools in the
                             native form; NULL after AGENT_FAILED */
    double confidence;    /* probability of answering times that of the answer's tokens */
    double calibrated;    /* the probability that the answer is right; NAN without a calibration */
    bool truncated;       /* the answer reached max_tokens */
    enum agent_end end;
    char *error;
    int64_t prefilled, cached, generated; /* sums of the steps */
    double seconds;
    struct agent_run_state *state; /* owned by agent_run_all */
};
void agent_run_release(struct agent_run *r);
/* {answer, end, confidence, steps: [{thought, tool, arguments, observation, failed,
 * probabilities: {NAME: p, …, "answer": p}, seconds, prefilled, cached, generated}], …} */
json_t *agent_run_json(const struct agent_run *r, const struct agent_tools *t);
json_t *agent_step_json(const struct agent_step *s, const struct agent_tools *t);
/* Appends a step for people: lines that begin with "thought: ", "call: " and "result: ". A step
 * that only answers adds nothing. */
void agent_step_text(const struct agent_step *s, const struct agent_tools *t, struct buf *out);
/* ERR_USAGE: the messages of a conversation are none, one lacks the text of its role or its
 * content, or the last one is not the user's. */
int agent_messages_check(const json_t *messages, struct error *err);
extern const char *const agent_end_names[];

/* calibrate.c: Platt scaling of a confidence p, 1 / (1 + exp(-(a·log(p / (1 - p)) + b))). */
struct agent_calibration {
    double a, b;
};
enum { AGENT_CALIBRATION_MIN = 20 };
/* Fits a calibration to n answers. ERR_USAGE: fewer than AGENT_CALIBRATION_MIN, or all of them are
 * right or all are wrong. */
int agent_calibrate(const double *confidence, const bool *right, int n,
                    struct agent_calibration *out, struct error *err);
double agent_calibrated(const struct agent_calibration *c, double confidence);

struct agent_options {
    const struct model *model;
    struct engine *engine;
    struct adapter *adapter; /* NULL: the mix, or the base model */
    const struct weighted_adapter *mix;
    int n_mix;
    const char *system; /* system message, before that of the form; or NULL */
    enum agent_form form;
    const struct agent_tools *tools;
    int max_steps;          /* 0: 8 */
    double max_seconds;     /* from the begin of agent_run_all; 0: no limit */
    int32_t max_tokens;     /* maximum for an answer, and for the arguments of a call; 0: 512 */
    int32_t thought_tokens; /* maximum for a thought in the form REACT; 0: 128 */
    /* Sampling of thoughts and answers; its seed is ignored. */
    struct sampling_params sampling;
    bool
        sample_calls; /* calls are sampled too, by the temperature; false: the most probable ones */
    const struct agent_calibration *calibration; /* or NULL */
    /* Replaces engine_run if another component drives the engine. NULL: engine_run. */
    int (*run)(void *ctx, struct engine_request *reqs, int n, struct error *err);
    void *run_ctx;
    /* Called after each step; the last one is the answer. */
    void (*on_step)(void *ctx, const struct agent_run *r, const struct agent_step *s);
    void *on_step_ctx;
};
/* Runs n agents to their end. A run that fails alone ends with AGENT_FAILED; an error is one of
 * all: ERR_USAGE for wrong options or messages, ERR_STATE when cancelled. */
int agent_run_all(const struct agent_options *o, struct agent_run *runs, int n, struct error *err);

/* settings.c: an agent as options of the command line, and as a file */

struct agent_settings {
    char *tools; /* a comma-separated list */
    char *adapter, *system, *knowledge, *memory, *user, *team, *root, *form;
    struct strings hosts, mcp, mcp_headers, mcp_env, mcp_tools;
    int64_t max_steps, max_tokens, thought_tokens, top_k;
    bool sample_calls;
    double temperature, top_p, min_p, max_seconds, tool_seconds, mcp_seconds;
};
extern const struct option_row agent_setting_rows[];
/* Reads an agent file: a YAML mapping whose keys are the options of the rows, with '_' for '-';
 * `tools` and `adapter` may also be lists. Paths are relative to the file. Omitted keys have the
 * default values. Old values of *s are overwritten and not freed; options_release frees the new
 * ones, and after an error there is nothing to free. */
int agent_settings_read(struct agent_settings *s, const char *path, struct error *err);
/* Opens the tools, and connects to the MCP servers; the caller releases the tools, also after an
 * error. `user`, `messages`, `embedder` and `team` are those of `o`; without a user, that of the
 * settings. */
int agent_settings_open_tools(const struct agent_settings *s, struct agent_tool_options o,
                              struct agent_tools *t, struct error *err);
/* Sets the members of *o that the settings decide; the texts are borrowed. ERR_USAGE: the form is
 * unknown. */
int agent_settings_apply(const struct agent_settings *s, struct agent_options *o,
                         struct error *err);

/* tasks (tasks.c): questions with their answers, for measuring and training */

struct agent_task {
    char *kind;             /* its group in the report */
    json_t *messages;       /* the conversation */
    struct strings answers; /* the right ones */
    char *reply;            /* the text of a right answer */
    json_t *calls; /* [{name, arguments}] that answer the question, in this order; []: no tool is
                      necessary; NULL: unknown */
};
struct agent_tasks {
    struct agent_task *v;
    int n;
};
/*
 * Reads JSON Lines {question or messages, answer: a text or several, reply, calls, kind}; reply is
 * by default the first answer, the other members are optional. At most `limit` lines; 0: all.
 * ERR_FORMAT, with the line: a wrong member, or an answer that the grader cannot match.
 */
int agent_tasks_read(const char *path, int limit, const struct grader *g, struct agent_tasks *out,
                     struct error *err);
void agent_tasks_release(struct agent_tasks *t);
bool agent_task_is_right(const struct agent_task *task, const struct grader *g,
                         const struct agent_run *r);
/*
 * Measures runs[i] of task i. {n, accuracy: {value, lo, hi}, kinds: {KIND: {n, accuracy, …}},
 * right_calls: the share of calls that equal the call of the task at their place, unneeded: the
 * share of the tasks without calls in which a tool was called, calls, failed_calls, failed_runs,
 * confidence: the mean, calibration_error: the expected calibration error in ten bins (both of
 * the calibrated confidence if there is one), steps,
 * prefilled, cached, generated, seconds}. An interval is Wilson's of 95 %. Shares of nothing are
 * null.
 */
json_t *agent_tasks_report(const struct agent_tasks *t, const struct grader *g,
                           const struct agent_run *runs, const struct agent_tools *tools);
enum { AGENT_TASKS_AT_ONCE = 128 };
/* Runs all tasks, AGENT_TASKS_AT_ONCE at a time: runs[i], zero before, is that of task i, with the
 * seed seed + i. */
int agent_tasks_run(const struct agent_tasks *t, const struct agent_options *o, uint64_t seed,
                    struct agent_run *runs, struct error *err);
/* Appends lines {messages, tools} for training, of the tasks that have calls: the tools are called
 * as the task says, and its reply follows. ERR_USAGE: a call of a tool that is not in the list. */
int agent_tasks_demonstrate(const struct agent_tasks *t, const struct agent_options *o,
                            struct buf *out, struct error *err);

#endif
