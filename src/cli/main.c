/* main: finds the command, parses its options, and turns errors into a message and an exit code. */
#define _GNU_SOURCE
#include "cli/compatibility.h"
#include "cli/help.h"
#include "cli/job_confine.h"
#include "cli/man.h"
#include "cli/settings.h"
#include "hub/hub.h"

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum numeric_class cli_numeric_class(const struct cli_options *c) {
    return numeric_class_of(c->exact, c->fast);
}

int cli_compat_check(const char *compat, struct error *err) {
    if (!compat || strcmp(renamed_value("compat", compat), "legacy") == 0) return OK;
    return error_set(err, ERR_USAGE, "no compatibility with '%s'; there is legacy", compat);
}

void cli_energy_log(double joules) {
    if (!isnan(joules))
        log_info("energy: %.1f J of the processor packages, with all other programs", joules);
}

void cli_print_json(json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(v);
}

void cli_print_text(const char *text) {
    struct buf clean = {0};
    buf_add_sanitized(&clean, text, strlen(text));
    if (clean.len) fwrite(clean.data, 1, clean.len, stdout);
    buf_release(&clean);
}

/* A file of the program: below its folder, one of the two above that, or below share/shoal of one
 * of these. NULL: there is none. */
static char *program_file(const char *path) {
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return NULL;
    exe[n] = 0;
    for (int level = 0; level < 3; level++) { /* build/shoal, build/asan/shoal */
        char *slash = strrchr(exe, '/');
        if (!slash) break;
        *slash = 0;
        static const char *const folders[] = {"", "share/shoal/"};
        for (size_t i = 0; i < ARRAY_LEN(folders); i++) {
            char *candidate = xasprintf("%s/%s%s", exe, folders[i], path);
            if (path_exists(candidate)) return candidate;
            free(candidate);
        }
    }
    return NULL;
}

char *cli_find_file(const char *path) {
    char *found = path_exists(path) || path[0] == '/' ? NULL : program_file(path);
    return found ? found : xstrdup(path);
}

/* Messages are in the user's language, except those of jobs, which the server returns. */
static void language_init(void) {
    char *dir = getenv("SHOAL_JOB") ? NULL : program_file("locale");
    if (dir) translations_open(dir);
    free(dir);
}

char *cli_find_model(const char *name) {
    char *found = cli_find_file(name);
    const char *slash = strchr(name, '/');
    bool repo = !hub_is_name(name) && !path_exists(found) && slash && slash != name && slash[1] &&
                !strchr(slash + 1, '/') && *name != '.' && !path_has_extension(name, ".gguf");
    if (!repo) return found;
    free(found);
    return xasprintf("hf:%s", name);
}

static int usage_error(const struct cli_command *c, const struct error *err) {
    log_error(c->name, "%s", err->text);
    char *usage = help_usage(c);
    log_message("usage: %s; see 'shoal %s --help'", usage, c->name);
    free(usage);
    return 2;
}

bool cli_is_recipe(const char *path) {
    return path_has_extension(path, ".yaml") || path_has_extension(path, ".yml");
}

/* The n-th word of the command's arguments, from 0, is missing. */
static int missing_argument_error(const struct cli_command *c, int n, struct error *err) {
    const char *word = c->args;
    for (; n > 0 && *word; n--) {
        word += strcspn(word, " ");
        word += strspn(word, " ");
    }
    return error_set(err, ERR_USAGE, "argument '%.*s' is missing", (int)strcspn(word, " "), word);
}

/* Checks the common options and the number of arguments. */
static int command_line_check(const struct cli_command *c, const struct settings *s,
                              struct error *err) {
    int n = s->args.n;
    if (settings_common(s)->exact && settings_common(s)->fast)
        return error_set(err, ERR_USAGE, "--exact and --fast exclude each other");
    if (settings_common(s)->help || settings_common(s)->help_all) return OK;
    if (n < c->min_args) return missing_argument_error(c, n, err);
    if (c->max_args >= 0 && n > c->max_args)
        return error_set(err, ERR_USAGE, "unexpected argument '%s'", s->args.v[c->max_args]);
    return OK;
}

static int command_run(const struct cli_command *c, const struct settings *s, struct error *err) {
    const struct cli_options *common = settings_common(s);
    if (common->help || common->help_all) {
        help_print_command(c, common->config, common->help_all);
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

/* Flushes stdout. Returns the exit code: `code`, or 1 if not all results could be written. */
static int output_finish(int code) {
    bool unwritten = fflush(stdout) || ferror(stdout);
    if (code != 0 || !unwritten) return code;
    if (stdout_is_closed()) raise_sigpipe();
    log_error(NULL, "cannot write the result");
    return 1;
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
        log_error(c->name, "%s", err.text), code = 1;
    settings_release(&s);
    return output_finish(code);
}

static int unknown_command_error(const char *name) {
    const char *near = cli_suggest_command(name, NULL);
    log_error(NULL, "no command '%s'%s%s%s; 'shoal --help' lists them", name,
              near ? ", did you mean '" : "", near ? near : "", near ? "'?" : "");
    return 2;
}

/* Runs a command line of another program, or says what replaces it. */
static int foreign_run(int argc, char **argv) {
    struct error err = {0};
    struct strings line = {0};
    int rc = compatibility_translate(argc, argv, &line, &err), code = 2;
    if (rc == OK)
        code = run_command(cli_command(line.v[0]), line.n - 1, line.v + 1);
    else if (rc == ERR_MISSING)
        code = unknown_command_error(argv[0]);
    else
        log_error(NULL, "%s", err.text);
    strings_release(&line);
    return code;
}

/* 'shoal help --man [COMMAND]' */
static int man_run(const char *name) {
    const struct cli_command *c = name ? cli_command(name) : NULL;
    translations_close(); // manual pages are English
    if (name && !c) return unknown_command_error(name);
    man_print(c);
    return output_finish(0);
}

/* In a limited address space (ulimit -v), stacks of 8 MB and a heap of 64 MB for each thread would
 * leave little to the memory plans. */
static void address_space_save(void) {
    enum { STACK_BYTES = 2 << 20 };
    struct rlimit limit;
    pthread_attr_t a;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, STACK_BYTES);
    pthread_setattr_default_np(&a);
    pthread_attr_destroy(&a);
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
#endif
}

int main(int argc, char **argv) {
    address_space_save();
    progress_pipe_open();
    log_to_stderr = true;
    signal(SIGXFSZ, SIG_IGN); /* exceeding the file size limit is an error of write() instead */
    signal(SIGPIPE, SIG_IGN);
    file_map_catch_sigbus();
    terminal_sanitize_stdout();
    language_init();
    if (argc < 2) {
        help_print_commands(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        puts("shoal " SHOAL_VERSION);
        return output_finish(0);
    }
    if (strcmp(name, "--licenses") == 0) {
        help_print_licenses();
        return output_finish(0);
    }
    bool help = strcmp(name, "help") == 0;
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || (help && argc == 2)) {
        help_print_commands(stdout);
        return output_finish(0);
    }
    if (help && strcmp(argv[2], "--man") == 0) return man_run(argv[3]);
    if (help && strcmp(argv[2], "--compatibility") == 0) {
        compatibility_print();
        return output_finish(0);
    }
    static char help_flag[] = "--help";
    char *help_args[] = {help_flag, NULL};
    if (help) name = argv[2]; /* 'shoal help run' is 'shoal run --help' */
    const struct cli_command *c = cli_command(name);
    struct error err = {0};
    if (kernels_check_level(&err) != OK) {
        log_error(NULL, "%s", err.text);
        return 2;
    }
    if (job_confine(&err) != OK) {
        log_error(NULL, "the job cannot be confined: %s", err.text);
        return 1;
    }
    if (c) return help ? run_command(c, 1, help_args) : run_command(c, argc - 2, argv + 2);
    return help ? unknown_command_error(name) : foreign_run(argc - 1, argv + 1);
}
