/*
 * panel: the team that answers in ask and chat: its options, its models, and all objects that the
 * pipeline borrows. They are opened together and closed together.
 */
#ifndef SHOAL_CLI_PANEL_H
#define SHOAL_CLI_PANEL_H

#include "cli/base_models.h"
#include "swarm/swarm.h"

struct panel_options {
    struct strings adapters;
    char *role_type, *language, *knowledge, *protocol, *facts, *compat, *conversation;
    char *models[PIPELINE_N_STAGES];
    int64_t agents, iterations, max_tokens, tokens[PIPELINE_N_STAGES];
    double temperature, seconds, temps[PIPELINE_N_STAGES];
    bool summary, embeddings, slots, board;
    /* options of an earlier program (docs/COMPATIBILITY.md) */
    char *model_type, *model_name, *model_path, *cache_folder, *rag_mode, *zim_path;
    int64_t max_workers;
    bool parallel, safe_parallel, local_files, log;
};
#define PANEL_ROW(opt, kind, type, field, fallback, min, max, metavar, ...)                        \
    { opt, kind, offsetof(type, field), fallback, min, max, metavar, __VA_ARGS__ }
/* The rows for adapters, max_tokens and temperature are in the commands' tables, because chat also
 * has replies without a team. */
#define PANEL_ROWS(type, field)                                                                    \
    PANEL_ROW("agents", OPT_INT, type, field.agents, "3", 1, TEAM_MAX - 2, "N",                    \
              "number of agents"),                                                                 \
        PANEL_ROW("iterations", OPT_INT, type, field.iterations, "2", 1, 16, "N",                  \
                  "number of iterations"),                                                         \
        PANEL_ROW("role-type", OPT_STRING, type, field.role_type, "auto", 0, 0, "NAME",            \
                  "kind of roles: discussion, planning, informational, conversational, default; "  \
                  "auto: by the question's words; model: by the summary model",                    \
                  JOB_ARG_TEXT),                                                                   \
        PANEL_ROW("language", OPT_STRING, type, field.language, "auto", 0, 0, "LANG",              \
                  "language of the answer: ja, en or zh; auto: that of the question",              \
                  JOB_ARG_TEXT),                                                                   \
        PANEL_ROW("protocol", OPT_STRING, type, field.protocol, "panel", 0, 0, "FILE",             \
                  "workflow; the role 'agent' has --agents agents", JOB_ARG_BUILTIN_OR_PATH),      \
        PANEL_ROW("slots", OPT_BOOL, type, field.slots, NULL, 0, 0, NULL,                          \
                  "workflow with fixed roles: reformulator, critic, supporter, synthesizer"),      \
        PANEL_ROW("internal-model", OPT_STRING, type, field.models[PIPELINE_INTERNAL], NULL, 0, 0, \
                  "MODEL", "model of the role 'agent'; default: MODEL", JOB_ARG_INPUT_PATH),       \
        PANEL_ROW("summary-model", OPT_STRING, type, field.models[PIPELINE_SUMMARY], NULL, 0, 0,   \
                  "MODEL", "model that writes the summaries", JOB_ARG_INPUT_PATH),                 \
        PANEL_ROW("output-model", OPT_STRING, type, field.models[PIPELINE_OUTPUT], NULL, 0, 0,     \
                  "MODEL", "model that writes the answer", JOB_ARG_INPUT_PATH),                    \
        PANEL_ROW("internal-temperature", OPT_FLOAT, type, field.temps[PIPELINE_INTERNAL], "0", 0, \
                  100, "X", "temperature of the role 'agent' (0: each role's default)"),           \
        PANEL_ROW("summary-temperature", OPT_FLOAT, type, field.temps[PIPELINE_SUMMARY], "0.3",    \
                  0.01, 100, "X", "temperature of the summaries"),                                 \
        PANEL_ROW("output-temperature", OPT_FLOAT, type, field.temps[PIPELINE_OUTPUT], "0.7",      \
                  0.01, 100, "X", "temperature of the answer"),                                    \
        PANEL_ROW("max-seconds", OPT_FLOAT, type, field.seconds, "0", 0, 1e9, "S",                 \
                  "seconds after which no agent starts a turn; the best message so far is the "    \
                  "answer (0: no limit)"),                                                         \
        PANEL_ROW("internal-max-tokens", OPT_INT, type, field.tokens[PIPELINE_INTERNAL], "0", 0,   \
                  65536, "N", "maximum tokens of a turn of the role 'agent'"),                     \
        PANEL_ROW("summary-max-tokens", OPT_INT, type, field.tokens[PIPELINE_SUMMARY], "0", 0,     \
                  65536, "N", "maximum tokens of a summary"),                                      \
        PANEL_ROW("output-max-tokens", OPT_INT, type, field.tokens[PIPELINE_OUTPUT], "0", 0,       \
                  65536, "N", "maximum tokens of the answer"),                                     \
        PANEL_ROW("summary", OPT_BOOL, type, field.summary, "true", 0, 0, NULL,                    \
                  "summarise each iteration and long messages"),                                   \
        PANEL_ROW("knowledge", OPT_STRING, type, field.knowledge, NULL, 0, 0, "DB",                \
                  "database of 'shoal knowledge', searched for passages for the agents",           \
                  JOB_ARG_DATABASE),                                                               \
        PANEL_ROW("embeddings", OPT_BOOL, type, field.embeddings, NULL, 0, 0, NULL,                \
                  "also search the knowledge by embeddings, and store embeddings of messages"),    \
        PANEL_ROW("conversation", OPT_STRING, type, field.conversation, NULL, 0, 0, "ID",          \
                  "continue the stored conversation of this name, and store new messages",         \
                  JOB_ARG_CLIENT_NAME),                                                            \
        PANEL_ROW("facts", OPT_STRING, type, field.facts, "model", 0, 0, "HOW",                    \
                  "extraction of key facts: rules, model (rules and model), or none",              \
                  JOB_ARG_TEXT),                                                                   \
        PANEL_ROW(                                                                                 \
            "compat", OPT_STRING, type, field.compat, NULL, 0, 0, "legacy",                        \
            "legacy keywords of questions, and an apology for an answer under 10 characters",      \
            JOB_ARG_TEXT),                                                                         \
        PANEL_ROW("board", OPT_BOOL, type, field.board, NULL, 0, 0, NULL,                          \
                  "print the blackboard at the end"),                                              \
        PANEL_ROW("model-name", OPT_STRING, type, field.model_name, NULL, 0, 0, "NAME",            \
                  "name of the model on the hub, instead of MODEL"),                               \
        PANEL_ROW("model-path", OPT_STRING, type, field.model_path, NULL, 0, 0, "FILE",            \
                  "file of the model, instead of MODEL"),                                          \
        PANEL_ROW("cache-folder", OPT_STRING, type, field.cache_folder, NULL, 0, 0, "DIR",         \
                  "folder of downloaded models ($SHOAL_CACHE)"),                                   \
        PANEL_ROW("rag-mode", OPT_STRING, type, field.rag_mode, NULL, 0, 0, "MODE",                \
                  "knowledge_base: requires --knowledge; dummy: no references", JOB_ARG_TEXT),     \
        PANEL_ROW("zim-path", OPT_STRING, type, field.zim_path, NULL, 0, 0, "FILE",                \
                  "not supported"),                                                                \
        PANEL_ROW("model-type", OPT_STRING, type, field.model_type, NULL, 0, 0, "TYPE",            \
                  "accepted without effect, as are the next five", JOB_ARG_TEXT),                  \
        PANEL_ROW("parallel", OPT_BOOL, type, field.parallel, NULL, 0, 0, NULL, ""),               \
        PANEL_ROW("safe-parallel", OPT_BOOL, type, field.safe_parallel, NULL, 0, 0, NULL, ""),     \
        PANEL_ROW("max-workers", OPT_INT, type, field.max_workers, "0", 0, 1024, "N", ""),         \
        PANEL_ROW("local-files", OPT_BOOL, type, field.local_files, "true", 0, 0, NULL, ""),       \
        PANEL_ROW("log", OPT_BOOL, type, field.log, NULL, 0, 0, NULL, ""),                         \
        PANEL_ALIAS("iter", "iterations"), PANEL_ALIAS("debug", "board"),                          \
        PANEL_ALIAS("huggingface-model", "model-name"),                                            \
        PANEL_ALIAS("internal-model-path", "internal-model"),                                      \
        PANEL_ALIAS("summary-model-path", "summary-model"),                                        \
        PANEL_ALIAS("output-model-path", "output-model"),                                          \
        PANEL_ALIAS("internal-model-type", "model-type"),                                          \
        PANEL_ALIAS("summary-model-type", "model-type"),                                           \
        PANEL_ALIAS("output-model-type", "model-type")
#define PANEL_ALIAS(name, of)                                                                      \
    { name, OPT_ALIAS, 0, of, 0, 0, NULL, NULL }

struct panel {
    const struct cli_options *c;
    const struct panel_options *o;
    struct base_models bases;
    int stage_base[PIPELINE_N_STAGES]; /* index of each stage's base */
    struct workflow *w;
    struct engine_client engine_clients[BASE_MODELS_MAX];
    struct store *store;
    struct knowledge *knowledge;
    struct engine_embedder engine_embedder;
    struct embedder embedder;
    struct adapter *adapters[TEAM_MAX];
    struct pipeline_options pipeline; /* pass it to pipeline_run */
    bool ready;                       /* false after --dry-run */
};
struct panel_params {
    const char *model; /* NULL: the model that the flags name */
    uint64_t seed;
    /* included in the plan; the caller opens them, unless they are the agents' adapters */
    const struct strings *adapters;
    bool remember; /* keep a conversation in memory even without --conversation */
};
/* Whether a flag names the model; then the command line needs no MODEL. */
bool panel_names_model(const struct panel_options *o);
/* Parses options, plans memory, loads models. The caller calls panel_close even after an error. */
int panel_open(struct panel *p, const struct cli_options *c, const struct setup_options *so,
               const struct panel_options *o, const struct panel_params *w, struct error *err);
/* Loads the agents' adapters, creates the engines, opens store, blackboard, conversation and
 * knowledge. */
int panel_start(struct panel *p, const struct panel_params *w, struct error *err);
int panel_close(struct panel *p, int rc, struct error *err);
/* The base that runs stage s. */
struct setup *panel_base(struct panel *p, enum pipeline_stage s);
/* Removes the facts that contain the text, or with "all" every fact, and prints their number. */
int conversation_forget_facts(struct conversation *memory, const char *text, struct error *err);
/* Does that for a stored conversation, without a model. */
int panel_forget(const struct cli_options *c, const struct setup_options *so,
                 const char *conversation, const char *text, struct error *err);
/* Prints the blackboard for people. */
void panel_board_print(const struct panel *p);

#endif
