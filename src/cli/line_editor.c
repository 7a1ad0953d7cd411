/*
 * line_editor: see line_editor.h.
 *
 * The history file contains one line of text per entry, oldest first. It is read and replaced
 * atomically for each new line, so a killed program loses nothing, and two programs at once share
 * the file; if both write in the same moment, one line is lost.
 *
 * libedit converts between bytes and characters by the locale of the thread. All text of this
 * program is UTF-8, so the editor uses C.UTF-8 whatever the environment says.
 */
#define _GNU_SOURCE
#include "cli/line_editor.h"

#include <histedit.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HISTORY_LINES = 1000, HISTORY_LINE_BYTES = 16 << 10 };
static const size_t HISTORY_FILE_BYTES = 64 << 20; /* a larger file was not written by us */

struct line_editor {
    struct line_editor_options o;
    EditLine *el;
    FILE *out; /* stdout has no descriptor that libedit can use: see terminal_sanitize_stdout */
    History *history;
    char *history_path; /* NULL: no file */
    locale_t locale;
    struct buf line;
    bool cleared; /* Ctrl-C has ended the line */
};

/* history */

static char *history_path(struct error *err) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char *dir = state && *state == '/' ? path_join(state, "shoal")
                : home && *home == '/' ? path_join(home, ".local/state/shoal")
                                       : NULL;
    if (!dir) {
        error_set(err, ERR_MISSING, "there is no folder for it: set HOME or XDG_STATE_HOME");
        return NULL;
    }
    char *path = dir_make_private(dir, err) == OK ? path_join(dir, "history") : NULL;
    free(dir);
    return path;
}

/* The start of the last `n` lines of a text in which each line ends with a newline. */
static const char *last_lines(const char *text, size_t len, int n) {
    const char *at = text + len;
    while (at > text && (at[-1] != '\n' || n-- > 0)) at--;
    return at;
}

static int history_read(const char *path, struct buf *out, struct error *err) {
    if (!path_exists(path)) return OK;
    int rc = file_read(path, HISTORY_FILE_BYTES, out, err);
    if (rc == OK && out->len && out->data[out->len - 1] != '\n') buf_puts(out, "\n");
    return rc;
}

static void history_file_fail(struct line_editor *ed, const struct error *err) {
    log_warn("the lines of this chat are not in the history: %s", err->text);
    free(ed->history_path);
    ed->history_path = NULL;
}

static void history_load(struct line_editor *ed) {
    struct error err = {0};
    struct buf text = {0};
    HistEvent ev;
    ed->history_path = history_path(&err);
    int rc = ed->history_path ? history_read(ed->history_path, &text, &err) : err.code;
    char *rest = text.data, *line;
    while (rc == OK && (line = strsep(&rest, "\n")) != NULL)
        if (*line) history(ed->history, &ev, H_ENTER, line);
    if (rc != OK) history_file_fail(ed, &err);
    buf_release(&text);
}

static void history_add(struct line_editor *ed, const char *line) {
    struct error err = {0};
    struct buf text = {0};
    HistEvent ev;
    size_t n = strlen(line);
    if (n > HISTORY_LINE_BYTES) return;
    history(ed->history, &ev, H_ENTER, line);
    if (!ed->history_path) return;
    int rc = history_read(ed->history_path, &text, &err);
    const char *last = text.len ? last_lines(text.data, text.len, 1) : NULL;
    if (rc == OK && !(last && strncmp(last, line, n) == 0 && last[n] == '\n')) {
        buf_printf(&text, "%s\n", line);
        const char *from = last_lines(text.data, text.len, HISTORY_LINES);
        rc =
            file_write_private(ed->history_path, from, text.len - (size_t)(from - text.data), &err);
    }
    if (rc != OK) history_file_fail(ed, &err);
    buf_release(&text);
}

/* keys; libedit passes the editor as its client data */

static struct line_editor *client_data(EditLine *el) {
    void *ed = NULL;
    el_get(el, EL_CLIENTDATA, &ed);
    return ed;
}

static const char *prompt_text(EditLine *el) {
    return client_data(el)->o.prompt;
}

static unsigned char on_interrupt(EditLine *el, int ch) {
    struct line_editor *ed = client_data(el);
    const LineInfo *info = el_line(el);
    (void)ch;
    ed->cleared = true;
    el_cursor(el, (int)(info->lastchar - info->cursor)); // the next output starts below the line
    el_set(el, EL_REFRESH);
    return CC_NEWLINE;
}

static void candidates_print(const struct line_editor *ed, const char *text, size_t n) {
    enum line_argument arg;
    const char *name;
    fputs("\n", ed->out);
    for (int i = 0; (name = ed->o.command(i, &arg)); i++)
        if (strncmp(name, text, n) == 0) fprintf(ed->out, "%s  ", name);
    fputs("\n", ed->out);
}

/* Completes text[0..n-1] to the longest common start of the commands that begin with it. */
static unsigned char command_complete(struct line_editor *ed, const char *text, size_t n) {
    enum line_argument arg, first_arg = LINE_ARG_NONE;
    const char *name, *first = NULL;
    size_t common = 0;
    int n_found = 0;
    for (int i = 0; (name = ed->o.command(i, &arg)); i++) {
        if (strncmp(name, text, n) != 0) continue;
        if (n_found++ == 0) first = name, first_arg = arg, common = strlen(name);
        for (size_t k = n; k < common; k++)
            if (name[k] != first[k]) common = k;
    }
    if (n_found == 0) return CC_ERROR;
    if (n_found > 1 && common == n) {
        candidates_print(ed, text, n);
        return CC_REDISPLAY;
    }
    char *rest = xasprintf("%.*s%s", (int)(common - n), first + n,
                           n_found == 1 && first_arg != LINE_ARG_NONE ? " " : "");
    el_insertstr(ed->el, rest);
    free(rest);
    return CC_REFRESH;
}

/* Whether the argument of the command in text[0..n-1], which ends with a blank, is a path. */
static bool takes_path(const struct line_editor *ed, const char *text, size_t n) {
    enum line_argument arg;
    const char *name;
    for (int i = 0; (name = ed->o.command(i, &arg)); i++)
        if (strlen(name) == n && strncmp(name, text, n) == 0) return arg == LINE_ARG_PATH;
    return false;
}

/* Completes commands and paths; in other text a tab is a tab. */
static unsigned char on_tab(EditLine *el, int ch) {
    struct line_editor *ed = client_data(el);
    const LineInfo *info = el_line(el);
    size_t n = (size_t)(info->cursor - info->buffer), word = 0;
    while (word < n && info->buffer[word] != ' ') word++;
    if (n > 0 && info->buffer[0] == '/' && word == n) return command_complete(ed, info->buffer, n);
    if (takes_path(ed, info->buffer, word)) return _el_fn_complete(el, ch);
    el_insertstr(el, "\t");
    return CC_REFRESH;
}

static void keys_bind(EditLine *el) {
    static const char *const keys[][2] = {
        {"^C", "shoal-interrupt"},    {"^I", "shoal-tab"},
        {"^R", "em-inc-search-prev"}, {"\\e[3~", "ed-delete-next-char"},
        {"\\e[1~", "ed-move-to-beg"}, {"\\e[4~", "ed-move-to-end"},
        {"\\e[1;5C", "em-next-word"}, {"\\e[1;5D", "ed-prev-word"},
    };
    el_set(el, EL_ADDFN, "shoal-interrupt", "end the line without reading it", on_interrupt);
    el_set(el, EL_ADDFN, "shoal-tab", "complete a command or a path", on_tab);
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) el_set(el, EL_BIND, keys[i][0], keys[i][1], NULL);
}

/* the editor */

static bool terminal_moves_cursor(void) {
    const char *term = getenv("TERM");
    return term && *term && strcmp(term, "dumb") != 0;
}

static void editor_init(struct line_editor *ed) {
    HistEvent ev;
    ed->history = history_init();
    CHECK(ed->history != NULL);
    history(ed->history, &ev, H_SETSIZE, HISTORY_LINES);
    history(ed->history, &ev, H_SETUNIQUE, 1);
    el_set(ed->el, EL_CLIENTDATA, ed);
    el_set(ed->el, EL_PROMPT, prompt_text);
    el_set(ed->el, EL_EDITOR, "emacs");
    el_set(ed->el, EL_SIGNAL, 1);
    el_set(ed->el, EL_HIST, history, ed->history);
    el_set(ed->el, EL_SETTY, "-d", "intr=", "-intr", NULL); // Ctrl-C is a key here
    keys_bind(ed->el);
    el_source(ed->el, NULL); // the user's ~/.editrc
    if (ed->o.history) history_load(ed);
}

struct line_editor *line_editor_open(const struct line_editor_options *o) {
    if (!terminal_moves_cursor()) return NULL;
    struct line_editor *ed = xcalloc(1, sizeof *ed);
    int fd = dup(STDOUT_FILENO);
    *ed = (struct line_editor){.o = *o, .out = fd < 0 ? NULL : fdopen(fd, "w")};
    ed->locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    locale_t before = ed->locale ? uselocale(ed->locale) : (locale_t)0;
    if (ed->out && ed->locale) ed->el = el_init("shoal", stdin, ed->out, stderr);
    if (ed->el) editor_init(ed);
    if (before) uselocale(before);
    if (ed->el) return ed;
    line_editor_close(ed);
    return NULL;
}

void line_editor_close(struct line_editor *ed) {
    if (!ed) return;
    if (ed->el) el_end(ed->el);
    if (ed->history) history_end(ed->history);
    if (ed->out) fclose(ed->out);
    if (ed->locale) freelocale(ed->locale);
    buf_release(&ed->line);
    free(ed->history_path);
    free(ed);
}

enum line_result line_editor_read(struct line_editor *ed, char **line) {
    int n = 0;
    fflush(stdout);
    ed->cleared = false;
    locale_t before = uselocale(ed->locale);
    el_set(ed->el, EL_PREP_TERM, 1); // libedit would do it after the prompt
    sighandler_t on_sigint = signal(SIGINT, SIG_DFL);
    const char *text = el_gets(ed->el, &n);
    signal(SIGINT, on_sigint);
    uselocale(before);
    ed->line.len = 0;
    buf_puts(&ed->line, "");
    if (text && n > 0) buf_add(&ed->line, text, (size_t)n);
    *line = ed->line.data;
    (*line)[strcspn(*line, "\r\n")] = 0;
    if (!text || ed->cleared) fputs(ed->cleared ? "^C\n" : "\n", ed->out);
    fflush(ed->out);
    if (ed->cleared) return LINE_CLEARED;
    if (!text) return LINE_END;
    if (**line) history_add(ed, *line);
    return LINE_READ;
}
