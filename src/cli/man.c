/*
 * man: the manual pages, in mdoc(7), from the tables of commands and options.
 *
 * A command's page has the same facts as its --help-all. Of `about`, paragraphs become the
 * description. Indented lines keep their form: a block that begins with a command line becomes an
 * example, other blocks stay in the description. 'make install' finds the names of the pages in the
 * lines ".It Xr shoal-NAME 1" of shoal(1).
 *
 * Invariant: no text of the tables reaches the page unescaped. Texts are filled again to lines of
 * LINE_WIDTH bytes, and a sentence begins a line, as mandoc's style asks. Pages are ASCII.
 */
#define _GNU_SOURCE
#include "cli/man.h"

#include "cli/settings.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistr.h>

enum { LINE_WIDTH = 78 };

struct item {
    const char *name, *text;
};

/* In alphabetical order. */
static const struct item variables[] = {
    {"HF_ENDPOINT", "Address of the hub from which models are downloaded."},
    {"HF_HOME", "Folder of the hub's own client, with its file 'token'."},
    {"HF_TOKEN", "Token for gated and private models of the hub."},
    {"HF_TOKEN_PATH", "File with that token."},
    {"KUBERNETES_SERVICE_HOST",
     "Address of the API in a pod of Kubernetes; KUBERNETES_SERVICE_PORT is its port."},
    {"KUBERNETES_SERVICE_PORT", "Port of that API."},
    {"LANGUAGE",
     "Preferred languages of messages and help, as in gettext; also LC_ALL, LC_MESSAGES and "
     "LANG. There are English, Japanese (ja) and simplified Chinese (zh_CN)."},
    {"NO_COLOR", "If it is set and not empty, the output to a terminal has no colours."},
    {"SHOAL_ALERT_SLACK", "Slack webhooks that receive the server's alerts."},
    {"SHOAL_API_KEY", "Key of the server with all scopes."},
    {"SHOAL_CACHE", "Folder of downloaded models, in place of ~/.cache/shoal."},
    {"SHOAL_CONFIG", "The settings file; empty: none."},
    {"SHOAL_CPU",
     "The highest instruction set to use: scalar, avx2, avxvnni, avx512, avx512bf16 or amx."},
    {"SHOAL_POWERCAP", "Folder of the energy counters, in place of /sys/class/powercap."},
    {"SHOAL_PROGRESS", "Number of an inherited pipe that receives progress as lines of JSON."},
    {"SOURCE_DATE_EPOCH",
     "Date, in seconds since 1970, of chat templates, manual pages and the tool clock."},
    {"VLLM_LORA_RESOLVER_CACHE_DIR", "Folder of adapters that requests may name, as in vLLM."},
    {"VLLM_PLUGINS", "'lora_filesystem_resolver' enables that folder, as in vLLM."},
    {"XDG_CACHE_HOME", "Folder of caches, in place of ~/.cache."},
    {"XDG_STATE_HOME", "Folder of the history of 'shoal chat', in place of ~/.local/state."},
};

static const struct item files[] = {
    {"./shoal.conf", "Settings file, read if it exists and no other is named."},
    {"~/.cache/shoal", "Downloaded models."},
    {"runs", "Records of evolution, worlds and jobs, below the working folder."},
    {"PREFIX/share/shoal", "Starter model, recipes, worlds and examples."},
    {"PREFIX/share/doc/shoal", "The documents: start with README.md."},
};

/* escaping */

/* `code`: the text is something to type, in which '-' is no hyphen. */
static const char *character_escape(char c, bool code) {
    switch (c) {
    case '\\':
        return "\\e";
    case '\'':
        return "\\(aq";
    case '"':
        return "\\(dq";
    case '`':
        return "\\(ga";
    case '^':
        return "\\(ha";
    case '~':
        return "\\(ti";
    case '-':
        return code ? "\\-" : NULL;
    default:
        return NULL;
    }
}

/* Appends text to a line of roff. */
static void escaped_add(struct buf *b, const char *text, size_t n, bool code) {
    const char *end = text + n;
    if (n > 0 && *text == '.') buf_puts(b, "\\&"); /* no macro */
    while (text < end) {
        ucs4_t c;
        int len = u8_mbtouc(&c, (const uint8_t *)text, (size_t)(end - text));
        const char *escape = character_escape(*text, code);
        if (escape)
            buf_puts(b, escape);
        else if (len == 1)
            buf_add(b, text, 1);
        else
            buf_printf(b, "\\[u%04X]", (unsigned)c);
        text += len;
    }
}

static void escaped_print(const char *text, size_t n, bool code) {
    struct buf b = {0};
    escaped_add(&b, text, n, code);
    fwrite(b.data, 1, b.len, stdout);
    buf_release(&b);
}

static bool is_sentence_end(const char *word, size_t n) {
    while (n > 0 && strchr(")'\"", word[n - 1])) n--;
    return n > 0 && strchr(".?!", word[n - 1]);
}

/* Prints n bytes of running text: whole words, after which text[n] is a blank, a newline or NUL. */
static void text_print(const char *text, size_t n) {
    const char *end = text + n;
    size_t column = 0;
    bool line_ends = false;
    while (text += strspn(text, " \n"), text < end) {
        size_t len = strcspn(text, " \n");
        struct buf word = {0};
        escaped_add(&word, text, len, text[strspn(text, "('[")] == '-');
        line_ends = line_ends || column + 1 + word.len > LINE_WIDTH;
        if (column > 0) column += (size_t)printf(line_ends ? "\n" : " ");
        if (line_ends) column = 0;
        column += fwrite(word.data, 1, word.len, stdout);
        line_ends = is_sentence_end(text, len);
        buf_release(&word);
        text += len;
    }
    if (column > 0) printf("\n");
}

static void heading_print(const char *macro, const char *title) {
    printf("%s %c%s\n", macro, toupper((unsigned char)*title), title + 1);
}

/* the parts of a page */

/* Prints a command's arguments, such as "add|list [NAME …]", as a line of macros: a word in
 * capitals is a placeholder, another word is typed as it is. */
static void arguments_print(const char *args) {
    bool joined = false; /* no blank precedes the next part */
    for (const char *p = args; *p;) {
        size_t blanks = strspn(p, " "), n = 1;
        p += blanks;
        printf("%s", p == args ? "." : " ");
        if (joined && blanks == 0 && *p != ']') printf("Ns ");
        joined = *p != '[';
        if (strchr("[]|", *p)) {
            printf("%s", *p == '[' ? "Oo" : *p == ']' ? "Oc" : "|");
        } else {
            n = strcspn(p, " []|");
            bool flag = *p == '-', literal = islower((unsigned char)*p) && !memchr(p, ':', n);
            printf("%s ", flag ? "Fl" : literal ? "Cm" : "Ar");
            escaped_print(p + flag, n - flag, true);
        }
        p += n;
    }
    if (*args) printf("\n");
}

static void synopsis_print(const struct cli_command *c) {
    printf(".Sh SYNOPSIS\n.Nm shoal %s\n", c->name);
    arguments_print(c->args);
    printf(".Op Ar options\n");
}

static size_t block_length(const char *text) {
    const char *end = strstr(text, "\n\n");
    return end ? (size_t)(end - text) : strlen(text);
}

static bool is_example(const char *block) {
    return strncmp(block, "  shoal ", 8) == 0;
}

static void literal_print(const char *block, size_t n) {
    printf(".Bd -literal -offset indent\n");
    for (const char *line = block, *end = block + n; line < end; line++) {
        size_t len = MIN(strcspn(line, "\n"), (size_t)(end - line));
        size_t indent = MIN(strspn(line, " "), 2);
        escaped_print(line + indent, len - indent, true);
        printf("\n");
        line += len;
    }
    printf(".Ed\n");
}

/* Prints the blocks of `about` that are examples, or those that are not. Returns whether there are
 * any. */
static bool about_print(const char *about, bool examples) {
    bool any = false;
    for (const char *block = about; *block; block += strspn(block, "\n")) {
        size_t n = block_length(block);
        bool literal = *block == ' ';
        if (is_example(block) == examples) {
            if (!any) printf(".Sh %s\n", examples ? "EXAMPLES" : "DESCRIPTION");
            if (!literal && any) printf(".Pp\n");
            if (literal)
                literal_print(block, n);
            else
                text_print(block, n);
            any = true;
        }
        block += n;
    }
    return any;
}

/* Prints the tag of an option, "--name VALUE", or of a recipe's key, "name: VALUE". */
static void tag_print(const struct option_row *row, bool key) {
    const char *metavar = key && row->type == OPT_BOOL ? "true|false" : option_metavar(row);
    printf(key ? ".It Cm " : ".It Fl \\-");
    escaped_print(row->name, strlen(row->name), true);
    if (!key && option_is_on(row)) {
        printf(" , Fl \\-no\\-");
        escaped_print(row->name, strlen(row->name), true);
    }
    if (key) printf(" :");
    if (metavar) {
        printf(" Ar ");
        escaped_print(metavar, strlen(metavar), true);
    }
    printf("%s\n", metavar && option_is_list(row) ? " ..." : "");
}

static void rows_print(const struct option_row *rows, const char *title, bool keys) {
    if (!rows->name) return; // mandoc warns of an empty list
    if (title) heading_print(".Ss", title);
    printf(".Bl -tag -width Ds\n");
    for (const struct option_row *row = rows; row->name; row++) {
        struct buf help = {0};
        if (row->type == OPT_ALIAS) continue;
        tag_print(row, keys);
        option_add_help(&help, row);
        text_print(help.data, help.len);
        buf_release(&help);
    }
    printf(".El\n");
}

static void options_print(const struct cli_command *c) {
    printf(".Sh OPTIONS\n"
           "Variables such as\n"
           ".Ev SHOAL_ALL_THREADS\n"
           "and a settings file can set every option: see%s\n",
           c == &cmd_config ? " above." : "\n.Xr shoal-config 1 .");
    if (c->rows) rows_print(c->rows, NULL, false);
    for (const struct option_table *t = c->more; t && t->rows; t++)
        rows_print(t->rows, t->title, false);
    struct option_row *common = settings_common_rows();
    rows_print(common, "options of every command", false);
    free(common);
    for (const struct recipe_section *r = c->recipe; r && r->name; r++) {
        char *title = *r->name ? xasprintf("keys of the recipe, section %s", r->name)
                               : xstrdup("keys of the recipe");
        rows_print(r->rows, title, true);
        free(title);
    }
}

static void items_print(const char *title, const char *macro, const struct item *v, size_t n) {
    printf(".Sh %s\n.Bl -tag -width Ds\n", title);
    for (size_t i = 0; i < n; i++) {
        printf(".It %s ", macro);
        escaped_print(v[i].name, strlen(v[i].name), true);
        printf("\n");
        text_print(v[i].text, strlen(v[i].text));
    }
    printf(".El\n");
}

static void exit_status_print(void) {
    printf(".Sh EXIT STATUS\n"
           ".Bl -tag -width Ds\n"
           ".It 0\n"
           "success\n"
           ".It 1\n"
           "a failure, which a message on standard error explains\n"
           ".It 2\n"
           "an error of the command line or of the settings\n"
           ".El\n");
}

/* Prints what precedes the synopsis. The date is that of $SOURCE_DATE_EPOCH, for reproducible
 * packages, or the current one. */
static void head_print(const char *name, const char *summary) {
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    time_t now = epoch && *epoch ? (time_t)strtoll(epoch, NULL, 10) : time(NULL);
    struct tm tm = {0};
    char month[16];
    gmtime_r(&now, &tm);
    strftime(month, sizeof month, "%B", &tm);
    printf(".Dd %s %d, %d\n.Dt ", month, tm.tm_mday, tm.tm_year + 1900);
    for (const char *p = name; *p; p++) putchar(toupper((unsigned char)*p));
    printf(" 1\n.Os\n.Sh NAME\n.Nm %s\n.Nd ", name);
    escaped_print(summary, strlen(summary), false);
    printf("\n");
}

static void command_print(const struct cli_command *c) {
    char *name = xasprintf("shoal-%s", c->name);
    head_print(name, c->summary);
    free(name);
    synopsis_print(c);
    about_print(c->about, false);
    options_print(c);
    exit_status_print();
    about_print(c->about, true);
    printf(".Sh SEE ALSO\n"
           ".Xr shoal 1\n");
}

static void program_print(void) {
    const struct cli_command *c;
    head_print("shoal", "train, serve and evolve LoRA agents on one small language model");
    printf(".Sh SYNOPSIS\n"
           ".Nm\n"
           ".Ar command\n"
           ".Op Ar options\n"
           ".Nm\n"
           ".Fl \\-help | \\-version | \\-licenses\n"
           ".Sh DESCRIPTION\n"
           "Each command has a page.\n"
           "Results are printed on standard output, messages on standard error.\n");
    for (int i = 0; (c = cli_command_at(i)); i++) {
        const char *title = cli_group_title(i);
        if (title) {
            char *heading = xstrndup(title, strcspn(title, ":"));
            printf("%s", i ? ".El\n" : "");
            heading_print(".Ss", heading);
            printf(".Bl -tag -width Ds\n");
            free(heading);
        }
        printf(".It Xr shoal-%s 1\n", c->name);
        text_print(c->summary, strlen(c->summary));
    }
    printf(".El\n");
    items_print("ENVIRONMENT", "Ev", variables, ARRAY_LEN(variables));
    items_print("FILES", "Pa", files, ARRAY_LEN(files));
    exit_status_print();
    printf(".Sh EXAMPLES\n");
    printf(".Bd -literal -offset indent\n");
    printf("shoal demo\n"
           "shoal run models/fry \\(aqsort: k b x\\(aq\n"
           ".Ed\n");
    printf(".Sh SEE ALSO\n"
           ".Xr shoal-config 1 ,\n"
           ".Xr shoal-demo 1 ,\n"
           ".Xr shoal-run 1 ,\n"
           ".Xr shoal-train 1\n");
}

void man_print(const struct cli_command *c) {
    if (c)
        command_print(c);
    else
        program_print();
}
