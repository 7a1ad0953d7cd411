/* main: finds the command, parses its options, and turns errors into a message and an exit code. */
#define _GNU_SOURCE
#include "cli/job_confine.h"
#include "cli/settings.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct cli_command *const commands[] = {
    &cmd_demo,    &cmd_run,   &cmd_train,     &cmd_pretrain, &cmd_debate,   &cmd_ask,
    &cmd_evolve,  &cmd_eval,  &cmd_resume,    &cmd_fork,     &cmd_convert,  &cmd_adapter,
    &cmd_model,   &cmd_bench, &cmd_doctor,    &cmd_pull,     &cmd_quantize, &cmd_embed,
    &cmd_replay,  &cmd_synth, &cmd_knowledge, &cmd_chat,     &cmd_lineage,  &cmd_runs,
    &cmd_world,   &cmd_serve, &cmd_key,       &cmd_metrics,  &cmd_config,   &cmd_backup,
    &cmd_restore,
};

const struct cli_command *cli_command_at(int i) {
    return i < (int)ARRAY_LEN(commands) ? commands[i] : NULL;
}

const struct cli_command *cli_command(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(name, commands[i]->name) == 0) return commands[i];
    return NULL;
}

enum numeric_class cli_numeric_class(const struct cli_options *c) {
    return c->exact ? NUMERIC_EXACT : c->fast ? NUMERIC_FAST : kernels_default_class();
}

int cli_compat_check(const char *compat, struct error *err) {
    if (!compat || strcmp(renamed_value("compat", compat), "legacy") == 0) return OK;
    return error_set(err, ERR_USAGE, "no compatibility with '%s'; there is legacy", compat);
}

void cli_print_json(json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(v);
}

char *cli_find_file(const char *path) {
    char exe[4096];
    if (path_exists(path) || path[0] == '/') return xstrdup(path);
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return xstrdup(path);
    exe[n] = 0;
    for (int level = 0; level < 3; level++) { /* build/shoal, build/asan/shoal */
        char *slash = strrchr(exe, '/');
        if (!slash) break;
        *slash = 0;
        char *candidate = path_join(exe, path);
        if (path_exists(candidate)) return candidate;
        free(candidate);
    }
    return xstrdup(path);
}

static void usage(FILE *f) {
    fprintf(f,
            "shoal %s: grows a shoal of LoRA agents on one small language model\n\n"
            "usage: shoal COMMAND [options]\n\n",
            SHOAL_VERSION);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        fprintf(f, "  %-10s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(f,
            "\n'shoal COMMAND --help' explains a command. 'shoal demo' shows the main features in "
            "three minutes.\n");
}

static void help(const struct cli_command *c, const struct cli_options *s) {
    printf("usage: shoal %s %s [options]\n\n%s\n\noptions:\n", c->name, c->args, c->about);
    if (c->rows) options_help(c->rows, stdout);
    for (const struct option_table *t = c->more; t && t->rows; t++) {
        if (t->title) printf("\n%s:\n", t->title);
        options_help(t->rows, stdout);
    }
    for (const struct recipe_section *r = c->recipe; r && r->name; r++) {
        printf("\nkeys of the recipe%s%s (name: value; '_' and '-' are the same):\n",
               *r->name ? ", section " : "", r->name);
        options_help(r->rows, stdout);
    }
    printf("\nfor every command:\n");
    settings_help(stdout);
    const char *path = settings_path(s->config);
    printf("\nsettings are read from %s%s%s; 'shoal config explain %s' shows them\n",
           path ? "'" : "", path ? path : "no file", path ? "'" : "", c->name);
}

static int usage_error(const struct cli_command *c, const struct error *err) {
    log_message("shoal %s: %s", c->name, err->text);
    log_message("usage: shoal %s %s [options]; see 'shoal %s --help'", c->name, c->args, c->name);
    return 2;
}

bool cli_is_recipe(const char *path) {
    const char *dot = strrchr(path, '.');
    return dot && (strcmp(dot, ".yaml") == 0 || strcmp(dot, ".yml") == 0);
}

/* Checks the common options and the number of arguments. */
static int command_line_check(const struct cli_command *c, const struct settings *s,
                              struct error *err) {
    int n = s->args.n;
    if (settings_common(s)->exact && settings_common(s)->fast)
        return error_set(err, ERR_USAGE, "--exact and --fast exclude each other");
    if (settings_common(s)->help) return OK;
    if (n < c->min_args) return error_set(err, ERR_USAGE, "arguments are missing");
    if (c->max_args >= 0 && n > c->max_args) return error_set(err, ERR_USAGE, "too many arguments");
    return OK;
}

static int command_run(const struct cli_command *c, const struct settings *s, struct error *err) {
    const struct cli_options *common = settings_common(s);
    if (common->help) {
        help(c, common);
        return OK;
    }
    log_quiet = common->quiet;
    settings_warn(s);
    return c->run(common, settings_options(s), &s->args, err);
}

/* Ends the process as other programs end when the reader of a pipe has closed it (shoal … | head).
 */
static void raise_sigpipe(void) {
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
}

static int run_command(const struct cli_command *c, int argc, char **argv) {
    struct error err = {0};
    struct settings s;
    int code = 0, rc = settings_read(&s, c, argc, argv, &err);
    if (rc == OK) rc = command_line_check(c, &s, &err);
    if (rc == OK) rc = command_run(c, &s, &err);
    if (rc == ERR_USAGE)
        code = usage_error(c, &err);
    else if (rc != OK)
        log_message("shoal %s: %s", c->name, err.text), code = 1;
    bool unwritten = fflush(stdout) || ferror(stdout), closed = unwritten && stdout_is_closed();
    if (code == 0 && unwritten && !closed) log_message("shoal: cannot write the result"), code = 1;
    settings_release(&s);
    if (code == 0 && closed) raise_sigpipe();
    return code;
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* exceeding the file size limit is an error of write() instead */
    signal(SIGPIPE, SIG_IGN);
    file_map_catch_sigbus();
    terminal_sanitize_stdout();
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        puts("shoal " SHOAL_VERSION);
        return 0;
    }
    const struct cli_command *c = cli_command(argv[1]);
    struct error err = {0};
    if (job_confine(&err) != OK) {
        fprintf(stderr, "shoal: the job cannot be confined: %s\n", err.text);
        return 1;
    }
    if (c) return run_command(c, argc - 2, argv + 2);
    log_message("shoal: no command '%s'; 'shoal --help' lists them", argv[1]);
    return 2;
}
