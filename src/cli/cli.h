/*
 * cli: one binary, one command table, one function per command.
 *
 * Results go to stdout, messages for people to stderr; --json everywhere prints JSON lines instead.
 * Exit codes: 0 success, 1 a failure outside of the command line (one line on stderr says what
 * failed and, where the user can act, how), 2 an error in the command line.
 */
#ifndef SHOAL_CLI_H
#define SHOAL_CLI_H

#include "base/base.h"
#include "kernel/kernel.h"

/* Options that every command takes. */
struct cli_options {
    bool json, quiet, exact, fast; /* not both exact and fast */
    bool help, help_all;
    int64_t threads; /* 0: all */
    char *config;    /* a configuration file; NULL: the default one */
};

/* A section of the recipe that a command reads, for the help text; "" is the top level. */
struct recipe_section {
    const char *name;
    const struct option_row *rows;
};

struct cli_command {
    const char *name, *args, *summary; /* "eval", "MODEL", one line */
    const char *about;                 /* description and examples, printed by --help */
    /* Names of the options that --help prints, separated by blanks; NULL: all. --help-all prints
     * every option. */
    const char *main_options;
    const struct option_row *rows;   /* options of this command; common ones are added */
    const struct option_table *more; /* tables for structs inside its options struct; may be NULL */
    const struct recipe_section *recipe; /* ends with a NULL name; may be NULL */
    /* For commands whose first argument may be a recipe: fills the options from it. Flags override
     * the recipe. */
    int (*recipe_load)(void *options, const char *path, struct error *err);
    /* For commands whose defaults depend on the environment, or on a flag that names a file of
     * option values: fills the options. All other sources override them. */
    int (*base_load)(void *options, struct error *err);
    size_t size;            /* size of the options struct */
    int min_args, max_args; /* number of positional arguments; -1: any */
    /* If the command may run as a job: its positional arguments (ends with an all-zero row), the
     * command that resumes it by run id, and the option that names the folder or file of its runs.
     */
    const struct job_args *job_args;
    const char *job_resume, *job_store_option;
    int (*run)(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err);
};
/* Each is defined in its cmd_*.c; the table is in commands.c. */
extern const struct cli_command cmd_demo, cmd_run, cmd_train, cmd_pretrain, cmd_debate, cmd_evolve,
    cmd_eval, cmd_resume, cmd_fork, cmd_convert, cmd_adapter, cmd_model, cmd_bench, cmd_doctor,
    cmd_pull, cmd_quantize, cmd_embed, cmd_replay, cmd_synth, cmd_grow, cmd_knowledge, cmd_ask,
    cmd_chat, cmd_lineage, cmd_runs, cmd_world, cmd_serve, cmd_key, cmd_metrics, cmd_config,
    cmd_agent, cmd_mcp, cmd_backup, cmd_restore, cmd_salvage, cmd_completion, cmd_team,
    cmd_conversation, cmd_memory, cmd_sleep, cmd_node, cmd_jobs, cmd_autoscale;
/* The command of a name or an index; NULL if there is none. */
const struct cli_command *cli_command(const char *name);
const struct cli_command *cli_command_at(int i);
/* The title of the group that begins with command i; NULL: the command continues a group. */
const char *cli_group_title(int i);
/* The name of the most similar command, or `also` (may be NULL); NULL: none is similar. */
const char *cli_suggest_command(const char *name, const char *also);

/* Finds a model or recipe: the path itself, else the same path below the folder of the program or
 * below one of the two folders above that, or below share/shoal of one of these three folders (an
 * installed program). malloc'ed. */
char *cli_find_file(const char *path);
/* As cli_find_file for a model; a name OWNER/REPO that is no path becomes hf:OWNER/REPO. */
char *cli_find_model(const char *name);
bool cli_is_recipe(const char *path); /* by its name: .yaml or .yml */
enum numeric_class cli_numeric_class(const struct cli_options *c);
/* Recomputes a generation of a run and compares it with the record (cmd_evolve.c). */
int cmd_evolve_replay(const struct cli_options *c, const char *runs, const char *id,
                      int64_t generation, struct error *err);
/* Checks the value of --compat; NULL is valid. */
int cli_compat_check(const char *compat, struct error *err);
/* Logs the joules that a command used, if they are known (no NaN). */
void cli_energy_log(double joules);
/* Prints one JSON object as a line on stdout and releases it. */
void cli_print_json(json_t *v);
/* Prints a text on stdout without the control characters that it may have. */
void cli_print_text(const char *text);
/* "3.2 s", "4.1 min", "2.5 h" */
const char *cli_duration(double seconds, char out[32]);
/* The lines of a plan's estimate (work_plan_add). */
void cli_work_text(const json_t *plan, struct buf *out);
/* Prints the plan of a command: JSON under "dry_run", or one line per key, and the lines of
 * cli_work_text if it has "work". */
void cli_print_dry_run(const struct cli_options *c, json_t *plan);

#endif
