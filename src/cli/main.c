/* The program's entry: finds the command, parses its options, turns errors into one line and an
 * exit code. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command *const commands[] = {
    &cmd_demo,   &cmd_run,   &cmd_train,     &cmd_pretrain, &cmd_debate,   &cmd_ask,
    &cmd_evolve, &cmd_eval,  &cmd_resume,    &cmd_fork,     &cmd_convert,  &cmd_adapter,
    &cmd_model,  &cmd_bench, &cmd_doctor,    &cmd_pull,     &cmd_quantize, &cmd_embed,
    &cmd_replay, &cmd_synth, &cmd_knowledge, &cmd_chat,     &cmd_lineage,  &cmd_runs,
    &cmd_world,  &cmd_serve, &cmd_key,       &cmd_metrics,
};

static const struct option_row common_rows[] = {
    {"json", OPT_BOOL, offsetof(struct common, json), NULL, 0, 0, NULL,
     "results as JSON lines on stdout"},
    {"quiet", OPT_BOOL, offsetof(struct common, quiet), NULL, 0, 0, NULL,
     "no notes and no progress on stderr"},
    {"exact", OPT_BOOL, offsetof(struct common, exact), NULL, 0, 0, NULL,
     "exact numeric class: the same bits on every processor"},
    {"fast", OPT_BOOL, offsetof(struct common, fast), NULL, 0, 0, NULL,
     "fast numeric class: bf16 weights run faster, with other bits (the default where AMX is)"},
    {"threads", OPT_INT, offsetof(struct common, threads), "0", 0, 1024, "N",
     "threads; 0: all processors"},
    {"help", OPT_BOOL, offsetof(struct common, help), NULL, 0, 0, NULL, "this text"},
    {0},
};

enum numeric_class cli_class(const struct common *c) {
    return c->exact ? CLASS_EXACT : c->fast ? CLASS_FAST : kernels_default_class();
}

void cli_print(json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(v);
}

char *cli_find(const char *path) {
    char exe[4096];
    if (path_exists(path) || path[0] == '/') return xstrdup(path);
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return xstrdup(path);
    exe[n] = 0;
    for (int up = 0; up < 3; up++) { /* build/shoal, build/asan/shoal */
        char *slash = strrchr(exe, '/');
        if (!slash) break;
        *slash = 0;
        char *there = path_join(exe, path);
        if (path_exists(there)) return there;
        free(there);
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
    fprintf(f, "\n'shoal COMMAND --help' explains a command. 'shoal demo' shows the main job in "
               "three minutes.\n");
}

static void help(const struct command *c) {
    printf("usage: shoal %s %s [options]\n\n%s\n\noptions:\n", c->name, c->args, c->about);
    if (c->rows) options_help(c->rows, stdout);
    if (c->over_rows) {
        printf("\n%s:\n", c->over_title);
        options_help(c->over_rows, stdout);
    }
    for (const struct recipe_section *r = c->recipe; r && r->name; r++) {
        printf("\nkeys of the recipe%s%s (name: value; '_' and '-' are the same):\n",
               *r->name ? ", section " : "", r->name);
        options_help(r->rows, stdout);
    }
    printf("\nfor every command:\n");
    options_help(common_rows, stdout);
}

static size_t rows_count(const struct option_row *rows) {
    size_t n = 0;
    while (rows && rows[n].name) n++;
    return n;
}

static void rows_copy(struct option_row *to, const struct option_row *from, size_t n, size_t at) {
    for (size_t i = 0; i < n; i++) {
        to[i] = from[i];
        to[i].offset += at;
    }
}

/* All rows as one table over one block: the common ones, then the command's. */
static struct option_row *joined_rows(const struct command *c) {
    size_t n = rows_count(common_rows), own = rows_count(c->rows), over = rows_count(c->over_rows);
    struct option_row *rows = xcalloc(n + own + over + 1, sizeof *rows);
    rows_copy(rows, common_rows, n, 0);
    rows_copy(rows + n, c->rows, own, sizeof(struct common));
    rows_copy(rows + n + own, c->over_rows, over, sizeof(struct common) + c->over_at);
    return rows;
}

static int usage_error(const struct command *c, const struct error *err) {
    fprintf(stderr, "shoal %s: %s\nusage: shoal %s %s [options]; see 'shoal %s --help'\n", c->name,
            err->text, c->name, c->args, c->name);
    return 2;
}

bool cli_is_recipe(const char *path) {
    const char *dot = strrchr(path, '.');
    return dot && (strcmp(dot, ".yaml") == 0 || strcmp(dot, ".yml") == 0);
}

/* Fills the options from what the command line, once read, names; 1 when there is such a thing. */
static int options_preload(const struct command *c, const struct option_row *rows, char *block,
                           const struct strings *args, struct error *err) {
    int rc = OK;
    if (c->over_load) {
        rc = c->over_load(block + sizeof(struct common), err);
    } else if (c->recipe_load && args->n && cli_is_recipe(args->v[0])) {
        options_release(rows, block);
        options_default(rows, block);
        rc = c->recipe_load(block + sizeof(struct common), args->v[0], err);
    } else {
        return 0;
    }
    return rc == OK ? 1 : err->code;
}

/* The command line, and before it what it names. */
static int options_read(const struct command *c, const struct option_row *rows, char *block,
                        int argc, char **argv, struct strings *args, struct error *err) {
    int rc = options_parse(rows, block, argc, argv, args, err);
    if (rc == OK) rc = options_preload(c, rows, block, args, err);
    if (rc <= 0) return rc;
    strings_release(args);
    return options_parse(rows, block, argc, argv, args, err);
}

static int run_command(const struct command *c, int argc, char **argv) {
    struct error err = {0};
    struct strings args = {0};
    struct option_row *rows = joined_rows(c);
    char *block = xcalloc(1, sizeof(struct common) + c->size);
    struct common *common = (struct common *)block;
    int code = 0;
    options_default(rows, block);
    int read = options_read(c, rows, block, argc, argv, &args, &err);
    if (read == OK && common->exact && common->fast)
        read = error_set(&err, ERR_USAGE, "--exact and --fast exclude each other");
    if (read == ERR_USAGE) {
        code = usage_error(c, &err);
    } else if (read != OK) {
        fprintf(stderr, "shoal %s: %s\n", c->name, err.text), code = 1;
    } else if (common->help) {
        help(c);
    } else if (args.n < c->min_args || (c->max_args >= 0 && args.n > c->max_args)) {
        error_set(&err, ERR_USAGE,
                  args.n < c->min_args ? "arguments are missing" : "too many arguments");
        code = usage_error(c, &err);
    } else {
        log_quiet = common->quiet;
        int rc = c->run(common, block + sizeof *common, &args, &err);
        if (rc == ERR_USAGE)
            code = usage_error(c, &err);
        else if (rc != OK)
            fprintf(stderr, "shoal %s: %s\n", c->name, err.text), code = 1;
        if (code == 0 && (fflush(stdout) || ferror(stdout)))
            fprintf(stderr, "shoal: cannot write the result\n"), code = 1;
    }
    options_release(rows, block);
    strings_release(&args);
    free(block);
    free(rows);
    return code;
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* a file limit is an error message, not a death */
    signal(SIGPIPE, SIG_IGN);
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
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(argv[1], commands[i]->name) == 0)
            return run_command(commands[i], argc - 2, argv + 2);
    fprintf(stderr, "shoal: no command '%s'; 'shoal --help' lists them\n", argv[1]);
    return 2;
}
