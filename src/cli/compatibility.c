/*
 * compatibility: command lines, variables and settings of earlier programs.
 *
 * A row of `commands` has Shoal's words for a command, or a text that says what replaces it. Its
 * words are the flags and variables of that command that need a conversion. Other flags are passed
 * on unchanged; their names are options or aliases of Shoal's command.
 *
 * Invariant: 'shoal help --compatibility' prints every row, and docs/COMPATIBILITY.md has these
 * lines (test_compatibility.sh).
 */
#define _GNU_SOURCE
#include "cli/compatibility.h"

#include "cli/cli.h"
#include "eval/eval.h"
#include "hub/hub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* commands */

enum value_kind {
    VALUE_TEXT,     /* unchanged */
    VALUE_MODEL,    /* a path, or OWNER/REPO on the hub */
    VALUE_ADAPTER,  /* a folder; the base model, with a warning, if it does not exist */
    VALUE_MODULE,   /* NAME=DIR, or NAME:DIR */
    VALUE_PERSONA,  /* the name of a built-in persona, or the text of a system message */
    VALUE_LEARNING, /* true or false */
    VALUE_ELITES,   /* a fraction of AGENTS */
    VALUE_WHOLE,    /* a whole number, possibly with a decimal point: 100.0 */
    VALUE_NONE      /* without effect; `text` is the reason */
};
enum { AGENTS = 20, ENV_FILE_LIMIT = 1 << 16 };

struct foreign_word {
    const char *name;     /* a flag, a variable (in capitals), or "": the first argument */
    const char *option;   /* the flag that gets the values; NULL: they become arguments */
    const char *fallback; /* values if the word is absent, separated by '|'; may be NULL */
    enum value_kind kind;
    const char *text;
};
#define BASE_WORD(option)                                                                          \
    {                                                                                              \
        "base", option, "Qwen/Qwen3-4B-Instruct-2507", VALUE_MODEL,                                \
            "the base model; without it `Qwen/Qwen3-4B-Instruct-2507` if that is downloaded, "     \
            "else `models/fry`, with a warning"                                                    \
    }

static const struct foreign_word train_words[] = {BASE_WORD(NULL), {0}};
static const struct foreign_word blend_words[] = {BASE_WORD("--model"), {0}};
static const struct foreign_word debate_words[] = {
    BASE_WORD(NULL),
    {"adapters", "--agents", "adapters/persona_a|adapters/persona_b|adapters/persona_c",
     VALUE_ADAPTER,
     "`--agents`; by default `adapters/persona_a`, `_b` and `_c`. A missing folder is a warning, "
     "and the agent uses the base model"},
    {"personas", "--personas", "critic|practitioner|explorer", VALUE_PERSONA,
     "`--personas`; by default the built-in critic, practitioner and explorer"},
    {0},
};
static const struct foreign_word merge_words[] = {
    BASE_WORD(NULL), {"adapter", NULL, NULL, VALUE_TEXT, "the argument ADAPTER"}, {0}};
static const struct foreign_word vllm_words[] = {
    {"", NULL, NULL, VALUE_MODEL, "a path, or OWNER/REPO for `hf:OWNER/REPO`"},
    {"lora-modules", "--adapter", NULL, VALUE_MODULE, "`--adapter`; NAME=DIR, or NAME:DIR"},
    {0},
};
static const char food_grows[] = "food grows on single cells: --food and --food-every";
static const char rule_agents[] =
    "all agents of a world have one kind of policy: --policy model rule compares both kinds";
static const char live_view[] = "--watch shows the world live; + and - change its speed";
static const struct foreign_word world_words[] = {
    {"MODEL_PATH", NULL, "models/smollm-135m-instruct.q4_k_m.gguf", VALUE_MODEL,
     "the argument MODEL; by default `models/smollm-135m-instruct.q4_k_m.gguf` if it exists, else "
     "`models/fry`, with a warning"},
    {"MODEL_TYPE", NULL, NULL, VALUE_NONE, "a model's kind is read from its files"},
    {"MAX_TOKENS", NULL, NULL, VALUE_NONE,
     "actions are sampled from their probabilities, without text; --decode text generates text"},
    {"TEMPERATURE", "--temperature", NULL, VALUE_TEXT, "`--temperature`"},
    {"ENABLE_ONLINE_LEARNING", "--learn", NULL, VALUE_LEARNING,
     "`--learn`: true is `gradient`, false is `none`"},
    {"LORA_RANK", "--r", NULL, VALUE_TEXT, "`--r`"},
    {"LEARNING_RATE", "--lr", NULL, VALUE_TEXT, "`--lr`"},
    {"BATCH_SIZE", "--batch-size", NULL, VALUE_TEXT, "`--batch-size`"},
    {"MUTATION_RATE", "--mutation-rate", NULL, VALUE_TEXT, "`--mutation-rate`"},
    {"ELITE_RATIO", "--elites", NULL, VALUE_ELITES, "`--elites`: this fraction of 20, at least 2"},
    {"WORLD_SIZE", "--size", NULL, VALUE_WHOLE, "`--size`"},
    {"INITIAL_ENERGY", "--energy", NULL, VALUE_WHOLE, "`--energy`"},
    {"ENERGY_FROM_FOOD", "--food-energy", NULL, VALUE_WHOLE,
     "`--food-energy`: energy for food that is brought home"},
    {"NUM_LLM_AGENTS", "--agents", NULL, VALUE_WHOLE, "`--agents`"},
    {"ENERGY_PER_STEP", NULL, NULL, VALUE_NONE,
     "a step costs 1 energy: divide --energy and --food-energy by this value"},
    {"INITIAL_FOOD_PATCHES", NULL, NULL, VALUE_NONE, food_grows},
    {"FOOD_PATCH_SIZE", NULL, NULL, VALUE_NONE, food_grows},
    {"FOOD_PATCH_AMOUNT", NULL, NULL, VALUE_NONE, food_grows},
    {"MODE", NULL, NULL, VALUE_NONE, rule_agents},
    {"NUM_RULE_AGENTS", NULL, NULL, VALUE_NONE, rule_agents},
    {"RENDER_INTERVAL", NULL, NULL, VALUE_NONE, live_view},
    {"SHOW_GRID", NULL, NULL, VALUE_NONE, live_view},
    {"CONTEXT_SIZE", NULL, NULL, VALUE_NONE,
     "a prompt has at most as many tokens as the model's context"},
    {"OPENAI_API_KEY", NULL, NULL, VALUE_NONE, "models run in Shoal itself, without a key"},
    {"DOWNLOAD_MODEL", NULL, NULL, VALUE_NONE,
     "a document of that program; 'shoal pull' downloads models"},
    {"ARCHITECTURE", NULL, NULL, VALUE_NONE,
     "a document of that program; a model's architecture is read from its files"},
    {0},
};

static const char no_python[] = "Shoal is one program without a Python environment: leave this out";
static const char no_sources[] = "it checks Python sources, which Shoal does not need: leave this "
                                 "out";
static const char own_tests[] = "a test of that program; 'make test' runs those of Shoal";
static const char harness[] =
    "'shoal eval MODEL --tasks arc_easy,winogrande,hellaswag --data DIR --adapter DIR', or lm_eval "
    "--model local-completions --model_args "
    "model=NAME,base_url=http://localhost:8000/v1/completions with 'shoal serve'";
static const char web_page[] = "'shoal serve MODEL' has a web page and prints its address";

static const struct foreign_command {
    const char *name;    /* without folder and ".py"; it may have two words */
    const char *command; /* Shoal's words; NULL: only `text` */
    const struct foreign_word *words;
    const char *text;
} commands[] = {
    {"train_lora_persona", "train", train_words, NULL},
    {"run_debate_local", "debate --compat legacy", debate_words, NULL},
    {"evolve_loras", "adapter blend --compat legacy", blend_words, NULL},
    {"export_merge_utils", "adapter merge", merge_words, NULL},
    {"merge", "adapter merge", merge_words, NULL},
    {"vllm serve", "serve", vllm_words, NULL},
    {"ping_vllm_persona", NULL, NULL,
     "'shoal chat MODEL --adapter DIR', or any OpenAI client at the address of 'shoal serve'"},
    {"eval_with_harness.sh", NULL, NULL, harness},
    {"lm_eval", NULL, NULL, harness},
    {"docker", NULL, NULL,
     "'shoal serve MODEL --adapter persona_a=DIR persona_b=DIR' replaces the containers"},
    {"uv", NULL, NULL, no_python},
    {"pip", NULL, NULL, no_python},
    {"compileall", NULL, NULL, no_sources},
    {"ruff", NULL, NULL, no_sources},
    {"console_app", "chat --team", NULL, NULL},
    {"test_distributed_extensions", NULL, NULL, own_tests},
    {"test_agent_models", NULL, NULL, own_tests},
    {"test_system_prompt_tuning", NULL, NULL, own_tests},
    {"test_llm_jp_fixed_v2", NULL, NULL, own_tests},
    {"main", "world --world legacy", world_words, NULL},
    {"run.sh", "world --world legacy", world_words, NULL},
    {"test_agent", NULL, NULL, "'shoal world MODEL --agents 1 --steps 20'"},
    {"huggingface-cli", NULL, NULL,
     "'shoal pull hf:OWNER/REPO', or 'shoal pull hf:OWNER/REPO/FILE --out DIR' for one file"},
    {"streamlit", NULL, NULL, web_page},
    {"streamlit_simple_test", NULL, NULL, web_page},
    {"test_ollama_connection", NULL, NULL,
     "'shoal doctor' checks this machine; models run in Shoal itself"},
};

/* settings */

static const char autoscale[] =
    "the section 'autoscaling' of FILE.yaml in 'shoal autoscale FILE.yaml' has this key";
static const char bus_frames[] = "messages of a cluster are not compressed: leave this out";
static const char not_needed[] = "nothing to set: leave this out";

static const struct foreign_key {
    const char *path, *text;
} keys[] = {
    {"distributed_coordination.enable", "commands take '--cluster local:N' or nats://HOST"},
    {"distributed_coordination.consensus_algorithm",
     "'--replicas N' of commands with --cluster: the majority of N nodes decides"},
    {"distributed_coordination.load_balance_strategy",
     "'--balancer NAME' of commands with --cluster"},
    {"monitoring.enable_prometheus", "the server always has /metrics: leave this out"},
    {"monitoring.prometheus_port",
     "/metrics is at the server's port: 'port = N' in the section [serve]"},
    {"monitoring.alert_check_interval", "'alert-seconds = S' in the section [serve]"},
    {"monitoring.notification_channels",
     "'alert-webhook = URL' and 'alert-slack = URL' in the section [serve]"},
    {"autoscaling.enable", autoscale},
    {"autoscaling.scaling_strategy", autoscale},
    {"autoscaling.min_workers", autoscale},
    {"autoscaling.max_workers", autoscale},
    {"autoscaling.target_cpu_utilization", autoscale},
    {"performance_optimization.enable", not_needed},
    {"performance_optimization.enable_compression", bus_frames},
    {"performance_optimization.compression_algorithm", bus_frames},
    {"performance_optimization.enable_auto_optimization", not_needed},
};

/* values */

/* The default model of another program, or the starter model if it is not there. */
static char *default_model(const struct foreign_word *w, char *path) {
    struct error ignored;
    char *found = hub_is_name(path) ? hub_cached_path(path, &ignored) : NULL;
    bool here = found || path_exists(path);
    free(found);
    if (here) return path;
    log_warn("there is no '%s' here%s: 'models/fry' is used; %s%s names another model", path,
             hub_is_name(path) ? " ('shoal pull' downloads it)" : "",
             isupper((unsigned char)*w->name) ? "" : "--", w->name);
    free(path);
    return xstrdup("models/fry");
}

static char *adapter_value(const char *path) {
    if (path_exists(path) || strcmp(path, "base") == 0) return xstrdup(path);
    log_warn("there is no '%s': this agent uses the base model", path);
    return xstrdup("base");
}

static char *module_value(const char *text) {
    const char *colon = strchr(text, ':');
    if (!colon || *text == '{' || strchr(text, '=')) return xstrdup(text);
    return xasprintf("%.*s=%s", (int)(colon - text), text, colon + 1);
}

static const char *persona_value(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(built_in_personas); i++)
        if (strcmp(built_in_personas[i].name, name) == 0) return built_in_personas[i].system;
    return name;
}

static const char *learning_value(const char *text) {
    if (strcasecmp(text, "true") == 0) return "gradient";
    return strcasecmp(text, "false") == 0 ? "none" : text;
}

static char *elites_value(const char *text) {
    char *end;
    double ratio = strtod(text, &end);
    if (*end || end == text || !(ratio >= 0 && ratio <= 1)) return xstrdup(text);
    return xasprintf("%d", MAX(2, (int)(AGENTS * ratio)));
}

static char *whole_value(const char *text) {
    size_t digits = strspn(text, "0123456789");
    const char *rest = text + digits;
    bool whole = digits && *rest == '.' && !rest[1 + strspn(rest + 1, "0")];
    return whole ? xstrndup(text, digits) : xstrdup(text);
}

/* The value for Shoal's option, malloc'ed. is_default: it is the fallback of the word. */
static char *value_convert(const struct foreign_word *w, const char *text, bool is_default) {
    char *model;
    switch (w->kind) {
    case VALUE_MODEL:
        model = cli_find_model(text);
        return is_default ? default_model(w, model) : model;
    case VALUE_ADAPTER:
        return adapter_value(text);
    case VALUE_MODULE:
        return module_value(text);
    case VALUE_PERSONA:
        return xstrdup(persona_value(text));
    case VALUE_LEARNING:
        return xstrdup(learning_value(text));
    case VALUE_ELITES:
        return elites_value(text);
    case VALUE_WHOLE:
        return whole_value(text);
    case VALUE_TEXT:
    case VALUE_NONE:
        break;
    }
    return xstrdup(text);
}

/* words of a command line */

struct foreign_line {
    char **argv;
    int argc;
    bool *used; /* [argc] arguments that a word has taken */
    char *env;  /* text of the file .env, or NULL */
};

static bool is_flag(const char *arg) {
    return arg[0] == '-' && isalpha((unsigned char)arg[arg[1] == '-' ? 2 : 1]);
}

static bool begins_with_argument(const struct foreign_line *l) {
    return l->argc && !is_flag(l->argv[0]);
}

/* Takes the values of each --NAME VALUE … and --NAME=VALUE. A flag without a value is passed on,
 * for the command's error. */
static void flag_values(struct foreign_line *l, const char *name, struct strings *out) {
    size_t n = strlen(name);
    for (int i = 0; i < l->argc; i++) {
        const char *arg = l->argv[i];
        if (strncmp(arg, "--", 2) != 0 || strncmp(arg + 2, name, n) != 0) continue;
        if (arg[n + 2] != '\0' && arg[n + 2] != '=') continue;
        if (arg[n + 2] == '=') strings_add(out, arg + n + 3), l->used[i] = true;
        while (arg[n + 2] == '\0' && i + 1 < l->argc && !is_flag(l->argv[i + 1])) {
            l->used[i] = l->used[i + 1] = true;
            strings_add(out, l->argv[++i]);
        }
    }
}

/* The text of a value in a .env file: between quotes, or up to a comment. malloc'ed. */
static char *env_value_text(const char *p) {
    p += strspn(p, " \t");
    size_t n = strcspn(p, "\r\n");
    const char *quote = n && (*p == '"' || *p == '\'') ? memchr(p + 1, *p, n - 1) : NULL;
    if (quote) return xstrndup(p + 1, (size_t)(quote - p) - 1);
    for (size_t i = 1; i < n; i++)
        if (p[i] == '#' && isblank((unsigned char)p[i - 1])) n = i;
    while (n && isblank((unsigned char)p[n - 1])) n--;
    return xstrndup(p, n);
}

/* The value of a variable in the text of a .env file, malloc'ed; NULL: it is not set there. */
static char *env_file_value(const char *text, const char *name) {
    size_t n = strlen(name);
    for (const char *line = text; line && *line;) {
        const char *p = line + strspn(line, " \t"), *end = strchr(line, '\n');
        if (strncmp(p, "export ", 7) == 0) p += 7;
        if (strncmp(p, name, n) == 0) {
            p += n + strspn(p + n, " \t");
            if (*p == '=') return env_value_text(p + 1);
        }
        line = end ? end + 1 : NULL;
    }
    return NULL;
}

/* Warns about each variable of a .env file that is not one of the words. */
static void unknown_variables_warn(const char *text, const struct foreign_word *words) {
    for (const char *line = text; line && *line;) {
        const char *p = line + strspn(line, " \t"), *end = strchr(line, '\n');
        if (strncmp(p, "export ", 7) == 0) p += 7;
        size_t n = strspn(p, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
        const struct foreign_word *w = words;
        while (w->name && (strlen(w->name) != n || strncmp(w->name, p, n) != 0)) w++;
        if (n && !w->name && p[n + strspn(p + n, " \t")] == '=')
            log_warn(".env: %.*s is not known and has no effect", (int)n, p);
        line = end ? end + 1 : NULL;
    }
}

static void variable_value(const struct foreign_line *l, const char *name, struct strings *out) {
    const char *set = getenv(name);
    char *text = set && *set ? xstrdup(set) : env_file_value(l->env, name);
    if (text && *text) strings_add(out, text);
    free(text);
}

static void fallback_values(const char *text, struct strings *out) {
    char *copy = xstrdup(text), *rest = copy;
    for (char *item; (item = strsep(&rest, "|"));) strings_add(out, item);
    free(copy);
}

/* Converts the values of a word, and appends them to Shoal's arguments or options. */
static void word_translate(struct foreign_line *l, const struct foreign_word *w,
                           struct strings *arguments, struct strings *options) {
    struct strings values = {0};
    if (isupper((unsigned char)*w->name)) {
        variable_value(l, w->name, &values);
    } else if (*w->name) {
        flag_values(l, w->name, &values);
    } else if (begins_with_argument(l)) {
        strings_add(&values, l->argv[0]);
        l->used[0] = true;
    }
    bool is_default = !values.n;
    if (is_default && w->fallback && (w->option || !begins_with_argument(l)))
        fallback_values(w->fallback, &values);
    if (values.n && w->kind == VALUE_NONE) log_info("%s: %s", w->name, w->text);
    if (values.n && w->option) strings_add(options, w->option);
    for (int i = 0; w->kind != VALUE_NONE && i < values.n; i++) {
        char *value = value_convert(w, values.v[i], is_default);
        strings_add(w->option ? options : arguments, value);
        free(value);
    }
    strings_release(&values);
}

static void strings_append(struct strings *to, const struct strings *from) {
    for (int i = 0; i < from->n; i++) strings_add(to, from->v[i]);
}

/* Shoal's words, arguments, the remaining words of the line, then the options: an option with
 * several values takes all words that follow it. */
static void line_translate(const struct foreign_command *c, struct foreign_line *l,
                           struct strings *line) {
    struct strings arguments = {0}, options = {0};
    char *copy = xstrdup(c->command), *rest = copy;
    for (char *word; (word = strsep(&rest, " "));) strings_add(line, word);
    for (const struct foreign_word *w = c->words; w && w->name; w++)
        word_translate(l, w, &arguments, &options);
    strings_append(line, &arguments);
    for (int i = 0; i < l->argc; i++)
        if (!l->used[i]) strings_add(line, l->argv[i]);
    strings_append(line, &options);
    strings_release(&arguments);
    strings_release(&options);
    free(copy);
}

/* The number of words that start a program: uv run, python, python -m, sh. */
static int launcher_words(int argc, char **argv) {
    static const char *const launchers[] = {"python", "python3", "-m", "bash", "sh"};
    int n = argc > 1 && strcmp(argv[0], "uv") == 0 && strcmp(argv[1], "run") == 0 ? 2 : 0;
    for (size_t i = 0; n < argc && i < ARRAY_LEN(launchers); i++)
        if (strcmp(argv[n], launchers[i]) == 0) n++;
    return n;
}

/* The command of a line whose first word is its name; *n is the number of words of the name. */
static const struct foreign_command *command_find(int argc, char **argv, int *n) {
    if (argc < 1) return NULL;
    const char *base = path_name(argv[0]);
    size_t len = strlen(base) - (path_has_extension(base, ".py") ? 3 : 0);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) {
        const char *name = commands[i].name;
        size_t first = strcspn(name, " ");
        *n = name[first] ? 2 : 1;
        if (first == len && strncmp(name, base, len) == 0 && argc >= *n &&
            (*n == 1 || strcmp(name + first + 1, argv[1]) == 0))
            return &commands[i];
    }
    return NULL;
}

static void line_note(const struct strings *line) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "-_=./:,@+";
    struct buf b = {0};
    for (int i = 0; i < line->n; i++) {
        const char *word = line->v[i];
        buf_puts(&b, " ");
        if (*word && !word[strspn(word, plain)])
            buf_puts(&b, word);
        else
            buf_add_shell_word(&b, word);
    }
    log_info("this is: shoal%s", b.data);
    buf_release(&b);
}

int compatibility_translate(int argc, char **argv, struct strings *line, struct error *err) {
    int skip = launcher_words(argc, argv), n = 0;
    const struct foreign_command *c = command_find(argc - skip, argv + skip, &n);
    if (!c) return ERR_MISSING;
    if (!c->command) return error_set(err, ERR_USAGE, "%s: %s", c->name, c->text);
    skip += n;
    struct foreign_line l = {.argc = argc - skip, .argv = argv + skip};
    struct buf env = {0};
    struct error ignored;
    for (int i = 0; i < l.argc; i++) log_quiet |= strcmp(l.argv[i], "--quiet") == 0;
    if (c->words == world_words) file_read(".env", ENV_FILE_LIMIT, &env, &ignored);
    l.env = env.data;
    if (l.env) unknown_variables_warn(l.env, c->words);
    l.used = xcalloc((size_t)l.argc + 1, sizeof *l.used);
    line_translate(c, &l, line);
    line_note(line);
    free(l.used);
    buf_release(&env);
    return OK;
}

/* settings in YAML */

static const char *key_text(const char *path) {
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        if (strcmp(keys[i].path, path) == 0) return keys[i].text;
    return "not known; 'shoal COMMAND --help-all' lists the options of a command";
}

typedef void (*key_fn)(const struct yaml *y, const char *path);

static void key_print(const struct yaml *y, const char *path) {
    printf("%s:%d: %s: %s\n", y->path, yaml_line(y, path), path, key_text(path));
}

static void key_warn(const struct yaml *y, const char *path) {
    log_warn("%s:%d: %s has no effect: %s", y->path, yaml_line(y, path), path, key_text(path));
}

static void section_each(const struct yaml *y, const char *name, json_t *section, key_fn fn) {
    const char *key;
    json_t *value;
    if (!json_is_object(section)) fn(y, name);
    json_object_foreach (section, key, value) {
        char *path = xasprintf("%s.%s", name, key);
        fn(y, path);
        free(path);
    }
}

void compatibility_note_keys(const struct yaml *y) {
    const char *name;
    json_t *section;
    json_object_foreach (y->root, name, section) section_each(y, name, section, key_warn);
}

int compatibility_explain_yaml(const char *path, struct error *err) {
    struct yaml y;
    const char *name;
    json_t *section;
    if (yaml_load(&y, path, err) != OK) return err->code;
    json_object_foreach (y.root, name, section) section_each(&y, name, section, key_print);
    yaml_release(&y);
    return error_set(err, ERR_FORMAT,
                     "'%s' is YAML: settings are sections of KEY = VALUE, as in docs/CONFIG.md",
                     path);
}

/* the tables */

static void words_print(const struct foreign_command *c) {
    for (const struct foreign_word *w = c->words; w && w->name; w++) {
        bool variable = isupper((unsigned char)*w->name);
        if (variable)
            printf("| variable `%s` of `%s` | %s |\n", w->name, c->name, w->text);
        else
            printf("| `%s %s%s` | %s |\n", c->name, *w->name ? "--" : "MODEL", w->name, w->text);
    }
}

/* Whether both names are names of the same command. */
static bool commands_equal(const struct foreign_command *a, const struct foreign_command *b) {
    return a->words == b->words && a->text == b->text && !a->command == !b->command &&
           (!a->command || strcmp(a->command, b->command) == 0);
}

void compatibility_print(void) {
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) {
        const struct foreign_command *c = &commands[i];
        printf("| `%s`", c->name);
        for (; i + 1 < ARRAY_LEN(commands) && commands_equal(c, &commands[i + 1]); i++)
            printf(", `%s`", commands[i + 1].name);
        if (c->command)
            printf(" | `shoal %s` |\n", c->command);
        else
            printf(" | %s |\n", c->text);
        words_print(c);
    }
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        printf("| key `%s` | %s |\n", keys[i].path, keys[i].text);
}
