/*
 * help: the help texts, from the tables of commands and options.
 *
 * --help fits one screen: it shows the options that the command's table names (main_options), and
 * --help-all shows all. test_cli.sh checks the number of lines.
 */
#define _GNU_SOURCE
#include "cli/help.h"

#include "cli/settings.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The files are in the program, which may be copied without them. */
__asm__(".pushsection .rodata\n"
        "licenses:\n"
        ".incbin \"LICENSE\"\n"
        ".ascii \"\\n\"\n"
        ".incbin \"THIRD_PARTY_NOTICES\"\n"
        "licenses_end:\n"
        ".popsection\n");
extern const char licenses[], licenses_end[];

void help_print_licenses(void) {
    fwrite(licenses, 1, (size_t)(licenses_end - licenses), stdout);
}

static void attribute_print(FILE *f, const char *sequence) {
    if (!terminal_has_color(f == stdout ? STDOUT_FILENO : STDERR_FILENO)) return;
    if (f == stdout)
        terminal_write_raw(sequence);
    else
        fputs(sequence, f);
}

/* Prints text in bold on a terminal. */
static void bold_print(FILE *f, const char *text) {
    attribute_print(f, TERMINAL_BOLD);
    fputs(text, f);
    attribute_print(f, TERMINAL_RESET);
}

/* Prints an empty line and the title of a section. */
static void __attribute__((format(printf, 2, 3))) title_print(FILE *f, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *title = xvasprintf(fmt, ap);
    va_end(ap);
    fputc('\n', f);
    bold_print(f, title);
    fputc('\n', f);
    free(title);
}

void help_print_commands(FILE *f) {
    fprintf(f,
            translate("shoal %s: trains, serves and evolves LoRA agents on one small language "
                      "model\n\n"),
            SHOAL_VERSION);
    bold_print(f, translate("usage:"));
    fprintf(f, " shoal COMMAND [options]\n");
    const struct cli_command *c;
    for (int i = 0; (c = cli_command_at(i)); i++) {
        if (cli_group_title(i)) title_print(f, "%s", translate(cli_group_title(i)));
        fprintf(f, "  %-10s %s\n", c->name, translate(c->summary));
    }
    fputs(translate(
              "\n'shoal COMMAND --help' explains a command, 'shoal help --man COMMAND' prints its "
              "manual page,\n"
              "'shoal --licenses' the licences of Shoal and of the libraries in it, 'shoal help "
              "--compatibility'\n"
              "a table of command lines of other programs and of what replaces them.\n"),
          f);
}

/* Whether `word` is in a list of words separated by blanks. */
static bool has_word(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *p = list; (p = strstr(p, word)); p += n)
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) return true;
    return false;
}

static int words_count(const char *list) {
    int n = 0;
    for (; list && *list; list += strspn(list, " "), n++) list += strcspn(list, " ");
    return n;
}

/* Prints the rows whose names are in `names` (NULL: all), after the title. Returns their number and
 * counts the other rows. */
static int rows_print(const struct option_row *rows, const char *names, const char *title,
                      int *n_hidden) {
    struct option_row *shown = xcalloc(options_count(rows) + 1, sizeof *shown);
    int n = 0;
    for (; rows->name; rows++) {
        if (rows->type == OPT_ALIAS) continue;
        if (!names || has_word(names, rows->name))
            shown[n++] = *rows;
        else
            ++*n_hidden;
    }
    if (n && title) title_print(stdout, "%s:", translate(title));
    options_help(shown, stdout);
    free(shown);
    return n;
}

static void recipe_print(const struct recipe_section *r) {
    for (; r && r->name; r++) {
        if (*r->name)
            title_print(stdout,
                        translate("keys of the recipe, section %s (name: value; '_' and '-' are "
                                  "the same):"),
                        r->name);
        else
            title_print(stdout, "%s",
                        translate("keys of the recipe (name: value; '_' and '-' are the same):"));
        options_help(r->rows, stdout);
    }
}

char *help_usage(const struct cli_command *c) {
    return xasprintf("shoal %s%s%s [options]", c->name, *c->args ? " " : "", c->args);
}

void help_print_command(const struct cli_command *c, const char *config, bool all) {
    const char *names = all ? NULL : c->main_options;
    int n_hidden = 0, n_shown = 0;
    char *usage = help_usage(c);
    bold_print(stdout, translate("usage:"));
    printf(" %s\n\n%s\n", usage, translate(c->about));
    free(usage);
    if (c->rows) n_shown = rows_print(c->rows, names, "options", &n_hidden);
    for (const struct option_table *t = c->more; t && t->rows; t++)
        n_shown += rows_print(t->rows, names, all ? t->title : NULL, &n_hidden);
    CHECK(n_shown >= words_count(names));
    bool keys = c->recipe && c->recipe->name;
    if (all) {
        recipe_print(c->recipe);
        struct option_row *common = settings_common_rows();
        title_print(stdout, "%s", translate("for every command:"));
        options_help(common, stdout);
        free(common);
    } else {
        putchar('\n');
        bold_print(stdout, translate("for every command:"));
        printf(" --json --quiet --exact --fast --threads N --config FILE\n");
        if (n_hidden || keys)
            printf(keys ? translate("%d more options and the keys of a recipe: 'shoal %s "
                                    "--help-all'\n")
                        : translate("%d more options: 'shoal %s --help-all'\n"),
                   n_hidden, c->name);
    }
    const char *path = settings_path(config);
    if (path)
        printf(translate("settings are read from '%s'; 'shoal config explain %s' shows them\n"),
               path, c->name);
}
