/* cmd_completion: `shoal completion bash|zsh|fish`: a script of completions, from the tables of
 * commands and options. Values of options are completed as file names. */
#define _GNU_SOURCE
#include "cli/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void quoted_print(const char *text) {
    struct buf b = {0};
    buf_add_shell_word(&b, text);
    fputs(b.data, stdout);
    buf_release(&b);
}

/* Prints the cases of the commands: each assigns its options to `flags`, between open and close. */
static void cases_print(const char *open, const char *close) {
    const struct cli_command *c;
    for (int i = 0; (c = cli_command_at(i)); i++) {
        struct option_row *rows = settings_job_rows(c);
        printf("    %s) flags=%s", c->name, open);
        for (const struct option_row *row = rows; row->name; row++)
            if (row->type != OPT_ALIAS) printf(" --%s", row->name);
        printf("%s ;;\n", close);
        free(rows);
    }
}

static void bash_print(void) {
    const struct cli_command *c;
    printf("_shoal() {\n"
           "    local word=${COMP_WORDS[COMP_CWORD]} flags='--help --licenses --version'\n"
           "    if [ \"$COMP_CWORD\" = 1 ] && [[ $word != -* ]]; then\n"
           "        COMPREPLY=($(compgen -W \"");
    for (int i = 0; (c = cli_command_at(i)); i++) printf("%s%s", i ? " " : "", c->name);
    printf("\" -- \"$word\"))\n"
           "        return\n"
           "    fi\n"
           "    case ${COMP_WORDS[1]} in\n");
    cases_print("\"", "\"");
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
           "    local -a commands flags=(--help --licenses --version)\n"
           "    commands=(\n");
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("        %s:", c->name);
        quoted_print(c->summary);
        printf("\n");
    }
    printf("    )\n"
           "    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then\n"
           "        _describe command commands\n"
           "        return\n"
           "    fi\n"
           "    case $words[2] in\n");
    cases_print("(", " )");
    printf("    esac\n"
           "    if [[ $words[CURRENT] == -* ]]; then compadd -- $flags; else _files; fi\n"
           "}\n"
           "compdef _shoal shoal\n");
}

static void fish_print(void) {
    const struct cli_command *c;
    for (const char *const *flag = (const char *const[]){"help", "licenses", "version", NULL};
         *flag; flag++)
        printf("complete -c shoal -n __fish_use_subcommand -f -l %s\n", *flag);
    for (int i = 0; (c = cli_command_at(i)); i++) {
        printf("complete -c shoal -n __fish_use_subcommand -f -a %s -d ", c->name);
        quoted_print(c->summary);
        printf("\n");
    }
    for (int i = 0; (c = cli_command_at(i)); i++) {
        struct option_row *rows = settings_job_rows(c);
        for (const struct option_row *row = rows; row->name; row++) {
            if (row->type == OPT_ALIAS) continue;
            printf("complete -c shoal -n '__fish_seen_subcommand_from %s' -l %s%s -d ", c->name,
                   row->name, row->type == OPT_BOOL ? "" : " -r");
            quoted_print(row->help ? row->help : "");
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
