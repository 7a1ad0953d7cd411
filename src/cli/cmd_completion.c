/* cmd_completion: `shoal completion bash|zsh|fish`: a script of completions, from the tables of
 * commands and options. Values of options are completed as file names. */
#define _GNU_SOURCE
#include "cli/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Prints text between single quotes for a shell; `also` is one more character to escape with a
 * backslash, or 0. */
static void quoted_print(const char *text, char also) {
    putchar('\'');
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", stdout);
        else if (*text == also)
            printf("\\%c", also);
        else
            putchar(*text);
    }
    putchar('\'');
}

/* Prints " --name" for every option of the command. */
static void flags_print(const struct cli_command *c) {
    struct option_row *rows = settings_job_rows(c);
    for (const struct option_row *row = rows; row->name; row++)
        if (row->type != OPT_ALIAS) printf(" --%s", row->name);
    free(rows);
}

static void bash_print(void) {
    const struct cli_command *c;
    printf("_shoal() {\n"
           "    local word=${COMP_WORDS[COMP_CWORD]} flags=\n"
           "    if [ \"$COMP_CWORD\" = 1 ]; then\n"
           "        COMPREPLY=($(compgen -W \"");
    for (int i = 0; (c = cli_command_at(i)); i++) printf("%s%s", i ? " " : "", c->name);
    printf("\" -- \"$word\"))\n"
           "        return\n"
           "    fi\n"
           "    case ${COMP_WORDS[1]} in\n");
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("    %s) flags=\"", c->name);
        flags_print(c);
        printf("\" ;;\n");
    }
    printf("    esac\n"
           "    case $word in\n"
           "    -*) COMPREPLY=($(compgen -W \"$flags\" -- \"$word\")) ;;\n"
           "    *) COMPREPLY=($(compgen -f -- \"$word\")) ;;\n"
           "    esac\n"
           "}\n"
           "complete -o filenames -F _shoal shoal\n");
}

static void zsh_print(void) {
    const struct cli_command *c;
    printf("#compdef shoal\n"
           "_shoal() {\n"
           "    local -a commands flags\n"
           "    commands=(\n");
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("        %s:", c->name);
        quoted_print(c->summary, ':');
        printf("\n");
    }
    printf("    )\n"
           "    if (( CURRENT == 2 )); then\n"
           "        _describe command commands\n"
           "        return\n"
           "    fi\n"
           "    case $words[2] in\n");
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("    %s) flags=(", c->name);
        flags_print(c);
        printf(" ) ;;\n");
    }
    printf("    esac\n"
           "    if [[ $words[CURRENT] == -* ]]; then compadd -- $flags; else _files; fi\n"
           "}\n"
           "compdef _shoal shoal\n");
}

static void fish_print(void) {
    const struct cli_command *c;
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("complete -c shoal -n __fish_use_subcommand -f -a %s -d ", c->name);
        quoted_print(c->summary, 0);
        printf("\n");
    }
    for (int i = 0; (c = cli_command_at(i)); i++) {
        struct option_row *rows = settings_job_rows(c);
        for (const struct option_row *row = rows; row->name; row++) {
            if (row->type == OPT_ALIAS) continue;
            printf("complete -c shoal -n '__fish_seen_subcommand_from %s' -l %s%s -d ", c->name,
                   row->name, row->type == OPT_BOOL ? "" : " -r");
            quoted_print(row->help ? row->help : "", 0);
            printf("\n");
        }
        free(rows);
    }
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    (void)c, (void)options;
    const char *shell = args->v[0];
    if (strcmp(shell, "bash") == 0)
        bash_print();
    else if (strcmp(shell, "zsh") == 0)
        zsh_print();
    else if (strcmp(shell, "fish") == 0)
        fish_print();
    else
        return error_set(err, ERR_USAGE, "no completion for '%s'; there are bash, zsh and fish",
                         shell);
    return OK;
}

const struct cli_command cmd_completion = {
    .name = "completion",
    .args = "bash|zsh|fish",
    .summary = "print a script that completes commands and options in a shell",
    .about = "Prints a script for the shell.\n"
             "\n"
             "  bash: eval \"$(shoal completion bash)\"        in ~/.bashrc\n"
             "  zsh:  eval \"$(shoal completion zsh)\"         in ~/.zshrc, after compinit\n"
             "  fish: shoal completion fish >~/.config/fish/completions/shoal.fish",
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
