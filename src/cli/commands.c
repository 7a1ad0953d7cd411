/* commands: the table of all commands. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <string.h>

/* In the order of --help. A title begins a group. */
static const struct {
    const char *title;
    const struct cli_command *command;
} commands[] = {
    {"start here:", &cmd_demo},
    {NULL, &cmd_doctor},
    {NULL, &cmd_completion},
    {"generate:", &cmd_run},
    {NULL, &cmd_chat},
    {NULL, &cmd_ask},
    {NULL, &cmd_agent},
    {NULL, &cmd_serve},
    {NULL, &cmd_mcp},
    {NULL, &cmd_embed},
    {"train:", &cmd_train},
    {NULL, &cmd_synth},
    {NULL, &cmd_grow},
    {NULL, &cmd_sleep},
    {NULL, &cmd_adapter},
    {NULL, &cmd_pretrain},
    {"debate and evolve:", &cmd_debate},
    {NULL, &cmd_team},
    {NULL, &cmd_evolve},
    {NULL, &cmd_resume},
    {NULL, &cmd_fork},
    {NULL, &cmd_lineage},
    {NULL, &cmd_runs},
    {NULL, &cmd_world},
    {"measure:", &cmd_eval},
    {NULL, &cmd_bench},
    {NULL, &cmd_replay},
    {"models and texts:", &cmd_pull},
    {NULL, &cmd_convert},
    {NULL, &cmd_quantize},
    {NULL, &cmd_model},
    {NULL, &cmd_knowledge},
    {NULL, &cmd_conversation},
    {NULL, &cmd_memory},
    {"run a server:", &cmd_node},
    {NULL, &cmd_jobs},
    {NULL, &cmd_autoscale},
    {NULL, &cmd_key},
    {NULL, &cmd_metrics},
    {NULL, &cmd_config},
    {NULL, &cmd_backup},
    {NULL, &cmd_restore},
    {NULL, &cmd_salvage},
};
enum { N_COMMANDS = ARRAY_LEN(commands) };

const struct cli_command *cli_command_at(int i) {
    return i < N_COMMANDS ? commands[i].command : NULL;
}

const char *cli_group_title(int i) {
    return commands[i].title;
}

const struct cli_command *cli_command(const char *name) {
    for (int i = 0; i < N_COMMANDS; i++)
        if (strcmp(name, commands[i].command->name) == 0) return commands[i].command;
    return NULL;
}

const char *cli_suggest_command(const char *name, const char *also) {
    const char *names[N_COMMANDS + 1] = {also};
    int n = also ? 1 : 0;
    for (int i = 0; i < N_COMMANDS; i++) names[n++] = commands[i].command->name;
    return name_suggest(names, n, name);
}
