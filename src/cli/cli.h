/*
 * cli: one binary, one command table, one function a command.
 *
 * Results go to stdout, words for people to stderr; --json everywhere prints JSON lines instead.
 * Exit codes: 0 done, 1 the world was wrong (one line on stderr says what and, where the user can
 * act, how), 2 the command line was wrong.
 */
#ifndef SHOAL_CLI_H
#define SHOAL_CLI_H

#include "base/base.h"
#include "kernel/kernel.h"

/* Options that every command takes. */
struct cli_options {
    bool json, quiet, exact, fast, help; /* exact and fast: not both */
    int64_t threads;                     /* 0: all */
    char *config;                        /* a file of settings; NULL: the usual one */
};

/* A section of the recipe that a command reads, for its help; "" is the top level. */
struct recipe_section {
    const char *name;
    const struct option_row *rows;
};

struct cli_command {
    const char *name, *args, *summary;   /* "eval", "MODEL", one line */
    const char *about;                   /* a paragraph with examples, shown by --help */
    const struct option_row *rows;       /* its own options; common ones are added */
    const struct recipe_section *recipe; /* ends with a NULL name; may be NULL */
    /* Where flags go before a recipe that is the first argument: fills the options from it. */
    int (*recipe_load)(void *options, const char *path, struct error *err);
    /* Where flags stand over something that another flag names: rows over the struct that begins at
     * `over_at` in the options, which over_load fills. */
    const struct option_row *over_rows;
    size_t over_at;
    const char *over_title; /* for help */
    int (*over_load)(void *options, struct error *err);
    size_t size;            /* of the struct that rows fill */
    int min_args, max_args; /* positional; -1: any */
    /* Where it may be a job: its positional arguments (ends with one of none), the command that
     * continues it by its run's id, and the option that says where it keeps what it did. */
    const struct job_args *job_args;
    const char *job_resume, *job_keeps;
    int (*run)(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err);
};
/* One definition a file cmd_*.c; the table is in main.c. */
extern const struct cli_command cmd_demo, cmd_run, cmd_train, cmd_pretrain, cmd_debate, cmd_evolve,
    cmd_eval, cmd_resume, cmd_fork, cmd_convert, cmd_adapter, cmd_model, cmd_bench, cmd_doctor,
    cmd_pull, cmd_quantize, cmd_embed, cmd_replay, cmd_synth, cmd_knowledge, cmd_ask, cmd_chat,
    cmd_lineage, cmd_runs, cmd_world, cmd_serve, cmd_key, cmd_metrics, cmd_config, cmd_backup,
    cmd_restore;
/* NULL where there is none of this name, or there are not so many. */
const struct cli_command *cli_command(const char *name);
const struct cli_command *cli_command_at(int i);

/* Where models and recipes live: the argument itself, else below the folder of the program's own
 * checkout. malloc'ed. */
char *cli_find_file(const char *path);
bool cli_is_recipe(const char *path); /* by its name: .yaml or .yml */
enum numeric_class cli_numeric_class(const struct cli_options *c);
/* A generation of a run computed anew and compared (cmd_evolve.c). */
int cmd_evolve_replay(const struct cli_options *c, const char *runs, const char *id,
                      int64_t generation, struct error *err);
/* Prints one JSON object as a line on stdout and releases it. */
void cli_print(json_t *v);
/* The same of what a command would do, under "dry_run"; for people a line a key. */
void cli_print_dry_run(const struct cli_options *c, json_t *plan);

#endif
